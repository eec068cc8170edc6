"""Attention kinds and their caches."""

from ziggurat.nn.attention.average import AverageAttention, SimplifiedAverageAttention
from ziggurat.nn.attention.base import attend, weights_explicit
from ziggurat.nn.attention.cache import Block, CrossAttentionCache, LiveMemory, SelfAttentionCache
from ziggurat.nn.attention.live import Live, Moved
from ziggurat.nn.attention.mask import Mask, causal_mask, padding_bias, padding_mask
from ziggurat.nn.attention.merged import MergedAttention, MergedAverageAttention
from ziggurat.nn.attention.multihead import CrossAttention, LinearMaker, SelfAttention
from ziggurat.nn.attention.relative import RelativeAttention
from ziggurat.nn.attention.rotary import Rotary
from ziggurat.nn.attention.scaling import QueryKeyScaling
from ziggurat.nn.attention.target import OwnAttention, OwnCache, TargetView, WholeTarget

__all__ = [
    "AverageAttention",
    "Block",
    "CrossAttention",
    "CrossAttentionCache",
    "LinearMaker",
    "Live",
    "LiveMemory",
    "Mask",
    "MergedAttention",
    "MergedAverageAttention",
    "Moved",
    "OwnAttention",
    "OwnCache",
    "QueryKeyScaling",
    "RelativeAttention",
    "Rotary",
    "SelfAttention",
    "SelfAttentionCache",
    "SimplifiedAverageAttention",
    "TargetView",
    "WholeTarget",
    "attend",
    "causal_mask",
    "padding_bias",
    "padding_mask",
    "weights_explicit",
]
