"""The visible tables: every kind of the configuration -> what it is made by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import nn

from ziggurat.config.model import HistoryKind, ResidualKind
from ziggurat.nn import history, residual
from ziggurat.nn.history import Combining, History, Latest
from ziggurat.nn.residual import Material, Place, Residual

__all__ = ["HISTORY", "RESIDUAL", "ResidualRow"]


@dataclass(frozen=True)
class ResidualRow:
    """One residual kind.

    Attributes:
        make: makes the Residual of one sub-layer.
        final_norm: the stream leaves the layers unnormalised, so each stack ends with a norm.
        history_norm: where combinations of layers normalise (`combination.norm: auto`).
        entry_norm: the stack normalises its input.
        shifted: linear maps have scalar shifts instead of biases (Fixup).
        streams: the stream is n parallel ones (hyper-connections).
    """

    make: Callable[[Place, Material], Residual]
    final_norm: bool
    history_norm: Literal["sources", "consumers", "none"]
    entry_norm: bool = False
    shifted: bool = False
    streams: bool = False


RESIDUAL: dict[ResidualKind, ResidualRow] = {
    "post": ResidualRow(residual.post_norm, False, "consumers"),
    "pre": ResidualRow(residual.pre_norm, True, "sources"),
    "lingvo": ResidualRow(residual.lingvo, False, "sources"),
    "none": ResidualRow(residual.no_skip, True, "sources"),
    "admin": ResidualRow(residual.admin, False, "consumers"),
    "deepnorm": ResidualRow(residual.deepnorm, False, "consumers"),
    "rezero": ResidualRow(residual.rezero, False, "none"),
    "layer_scale": ResidualRow(residual.layer_scale, True, "sources"),
    "ln_scaling": ResidualRow(residual.ln_scaling, True, "sources"),
    "peri": ResidualRow(residual.peri, True, "sources", entry_norm=True),
    "res_post": ResidualRow(residual.res_post, True, "sources"),
    "b2t": ResidualRow(residual.b2t, False, "consumers"),
    "no_norm": ResidualRow(residual.no_norm, False, "none"),
    "fixup": ResidualRow(residual.fixup, False, "none", shifted=True),
    "hyper": ResidualRow(residual.hyper, True, "sources", streams=True),
}

HISTORY: dict[HistoryKind, Callable[[Combining], History]] = {
    "latest": lambda combining: Latest(),
    "dlcl": history.Dlcl,
    "dense": history.dense,
    "average": history.average,
    "blocks": history.Blocks,
    "top_only": history.TopOnly,
    "depth_weighted": history.DepthWeighted,
}


def final_module(row: ResidualRow, norm: Callable[[], nn.Module], *, decoder: bool) -> nn.Module | None:
    """Return what ends a stack: a norm, Fixup's shift (and, on the encoder, scale), or nothing."""
    if row.shifted:
        return residual.ShiftScale(scaled=not decoder)
    return norm() if row.final_norm else None
