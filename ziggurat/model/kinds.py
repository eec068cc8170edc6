"""Tables of residual and history kinds: what each is built by, and what the model must know of it.

What a configuration must know (paper, options, notices) is on the kind's row in ziggurat.config.kinds. The table of
attention is in ziggurat.model.attention.kinds, that of initialisation in ziggurat.model.init.schemes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import nn

from ziggurat.config.kinds import HistoryKind, ResidualKind
from ziggurat.model.history import kinds as history
from ziggurat.model.history.attention_residuals import AttentionResiduals, BlockAttentionResiduals
from ziggurat.model.history.base import History, HistoryOptions
from ziggurat.model.history.mudd import Mudd
from ziggurat.model.residual import kinds as residual
from ziggurat.model.residual.base import Residual, ResidualOptions, SublayerPosition
from ziggurat.model.residual.streams import SiameseEnd

Folding = Literal["post", "pre", "skip_vector", "alpha", "branch_vector", "norm_constant"]
"""The way in which ziggurat.exchange.fold makes a stack plain.

`post`, `pre`: it is plain already. `skip_vector`: post-norm, and the parameter `skip` moves. `alpha`: post-norm, and
DeepNorm's constant moves. `branch_vector`: pre-norm, and the parameter `branch` moves. `norm_constant`: pre-norm, and
the constant of each layer's norms moves into them.
"""


@dataclass(frozen=True)
class ResidualRow:
    """One residual kind.

    Attributes:
        make: makes the Residual of one sub-layer.
        final_norm: the stream leaves the layers unnormalised, so each stack ends with a norm.
        folding: how a stack of this kind becomes a plain one; None: no plain stack computes the same.
        entry_norm: the stack normalises its input.
        ends_as_model: an encoder of this kind is an ablation, and ends as one of `model.residual` would.
        shifted: linear maps have scalar shifts instead of biases (Fixup).
        inner_norm: the last map of self-attention and of the feed-forward network has a norm before it (Sub-LN).
        streams: the stream is so many parallel ones, or as many as `wiring.streams` says; None: it is one.
        end: makes of a maker of norms the module that merges the streams at the end; None: they are added up.
    """

    make: Callable[[SublayerPosition, ResidualOptions], Residual]
    final_norm: bool
    folding: Folding | None = None
    entry_norm: bool = False
    ends_as_model: bool = False
    shifted: bool = False
    inner_norm: bool = False
    streams: int | Literal["option"] | None = None
    end: Callable[[Callable[[], nn.Module]], nn.Module] | None = None


RESIDUAL: dict[ResidualKind, ResidualRow] = {
    "post": ResidualRow(residual.post_norm, False, "post"),
    "pre": ResidualRow(residual.pre_norm, True, "pre"),
    "lingvo": ResidualRow(residual.lingvo, False),
    "none": ResidualRow(residual.no_skip, True, ends_as_model=True),
    "admin": ResidualRow(residual.admin, False, "skip_vector"),
    "deepnorm": ResidualRow(residual.deepnorm, False, "alpha"),
    "rezero": ResidualRow(residual.rezero, False),
    "layer_scale": ResidualRow(residual.layer_scale, True, "branch_vector"),
    "ln_scaling": ResidualRow(residual.ln_scaling, True, "norm_constant"),
    "peri": ResidualRow(residual.peri, True, entry_norm=True),
    "sandwich": ResidualRow(residual.peri, True),
    "res_post": ResidualRow(residual.res_post, True),
    "b2t": ResidualRow(residual.b2t, False),
    "no_norm": ResidualRow(residual.no_norm, False),
    "fixup": ResidualRow(residual.fixup, False, shifted=True),
    "hyper": ResidualRow(residual.hyper, True, streams="option"),
    "manifold_hyper": ResidualRow(residual.manifold_hyper, True, streams="option"),
    "siamese": ResidualRow(residual.siamese, True, streams=2, end=SiameseEnd),
    "keel": ResidualRow(residual.keel, True),
    "hybrid": ResidualRow(residual.hybrid, True),
    "sub_ln": ResidualRow(residual.pre_norm, True, inner_norm=True),
}


Feeding = int | Literal["below", "shared"]
"""The source of a layer's input, as folding asks it: combination number k; `below`: the output of the layer below,
which nothing else reads; `shared`: something that others read too, or that no single norm gives."""


@dataclass(frozen=True)
class HistoryRow:
    """One history kind.

    Attributes:
        make: makes the History of one stack.
        feeding: what layer n, from 0, reads in a stack with blocks of `period` layers, as a function of (n, period).
            A combination counts only if no other layer reads it; with norms at the consumers it has norm k.
    """

    make: Callable[[HistoryOptions], History]
    feeding: Callable[[int, int], Feeding]


def _each_its_own(layer: int, period: int) -> Feeding:
    return layer


HISTORY: dict[HistoryKind, HistoryRow] = {
    "latest": HistoryRow(lambda options: history.Latest(), lambda layer, period: "below"),
    "dlcl": HistoryRow(history.Dlcl, _each_its_own),
    "dense": HistoryRow(history.dense, _each_its_own),
    "average": HistoryRow(history.average, _each_its_own),
    "blocks": HistoryRow(history.Blocks, lambda layer, period: "below" if layer % period else layer // period),
    "top_only": HistoryRow(history.TopOnly, lambda layer, period: "shared"),
    "depth_weighted": HistoryRow(history.DepthWeighted, lambda layer, period: "shared"),
    "attention_residuals": HistoryRow(AttentionResiduals, lambda layer, period: "shared"),
    "block_attention_residuals": HistoryRow(BlockAttentionResiduals, lambda layer, period: "shared"),
    "mudd": HistoryRow(Mudd, lambda layer, period: "shared"),
}
