"""Attention: its kinds, their masks, and their caches in decoding."""

from ziggurat.nn.attention.average import AverageAttention, SimplifiedAverageAttention
from ziggurat.nn.attention.base import OwnAttention, OwnCache, attend, weights_explicit
from ziggurat.nn.attention.cache import (
    Block,
    CrossAttentionCache,
    KeptWeights,
    LiveMemory,
    SelfAttentionCache,
    StateCache,
)
from ziggurat.nn.attention.live import LiveBeams, RowMoves
from ziggurat.nn.attention.mask import Mask, causal_mask, padding_bias, padding_mask
from ziggurat.nn.attention.merged import MergedAttention, MergedAverageAttention
from ziggurat.nn.attention.multihead import CrossAttention, LinearMaker, SelfAttention
from ziggurat.nn.attention.relative import RelativeAttention
from ziggurat.nn.attention.rotary import Rotary
from ziggurat.nn.attention.scaling import QueryKeyScaling
from ziggurat.nn.attention.ssru import Ssru
from ziggurat.nn.attention.target import TargetView, WholeTarget
from ziggurat.nn.attention.values import FirstValues, ValueResidual

__all__ = [
    "AverageAttention",
    "Block",
    "CrossAttention",
    "CrossAttentionCache",
    "FirstValues",
    "KeptWeights",
    "LinearMaker",
    "LiveBeams",
    "LiveMemory",
    "Mask",
    "MergedAttention",
    "MergedAverageAttention",
    "OwnAttention",
    "OwnCache",
    "QueryKeyScaling",
    "RelativeAttention",
    "Rotary",
    "RowMoves",
    "SelfAttention",
    "SelfAttentionCache",
    "SimplifiedAverageAttention",
    "Ssru",
    "StateCache",
    "TargetView",
    "ValueResidual",
    "WholeTarget",
    "attend",
    "causal_mask",
    "padding_bias",
    "padding_mask",
    "weights_explicit",
]
