"""Deliberate mistakes in our code, and how much the comparisons then differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import gpt
import llama
import stacks
import streams
import torch
from checkouts import Checkouts
from comparing import Case, compared
from torch import Tensor
from torch.nn import functional as F

from ziggurat.model import kinds
from ziggurat.model import kinds as parts
from ziggurat.model.attention import multihead as values
from ziggurat.model.residual import base
from ziggurat.model.residual import kinds as connections
from ziggurat.model.residual import kinds as residual


class Control(NamedTuple):
    """A mistake, and the comparison that should notice it.

    Attributes:
        mistake: what is wrong.
        family: yields the comparisons.
        case: the name of the comparison.
        made: context in which our code makes the mistake.
    """

    mistake: str
    family: Callable[[Checkouts, torch.dtype], Iterator[Case]]
    case: str
    made: Any


def _without_stop(x: Tensor, gate: Tensor) -> Tensor:
    return x - F.silu(gate) * x


def _uneven(first: Tensor, own: Tensor, weight: float) -> Tensor:
    return 0.51 * first + 0.49 * own


def _by_layers(position: base.SublayerPosition, options: base.ResidualOptions) -> base.Residual:
    return connections.SiameseConnection(position.layer**-0.5, options)


def _turned(connection: Any, logits: Tensor) -> Tensor:
    return _MIXING(connection, logits).transpose(-1, -2)


_MIXING = connections.ManifoldConnection._mixing
_ROW = dataclasses.replace(kinds.RESIDUAL["siamese"], make=_by_layers)

CONTROLS = [
    Control("c = sqrt(l), not sqrt(2 l)", stacks.siamese, "siamese", mock.patch.dict(kinds.RESIDUAL, siamese=_ROW)),
    Control(
        "the gate is part of the gradient", llama.gpas, "gpas-pre", mock.patch.object(base, "_gated", _without_stop)
    ),
    Control(
        "0.51 V_1 + 0.49 V_n",
        llama.value_residual,
        "resformer",
        mock.patch.object(values, "torch", mock.Mock(wraps=torch, lerp=_uneven)),
    ),
    Control(
        "the skip of feed-forward networks is not normalised",
        stacks.hybrid,
        "hybrid",
        mock.patch.object(residual, "NormalisedSkip", base.Residual),
    ),
    Control(
        "branches times 0.34, not 1/3",
        gpt.transfer,
        "transfer",
        mock.patch.object(parts, "branch_factor", return_value=0.34),
    ),
    Control(
        "R transposed",
        streams.manifold,
        "manifold-deepseek",
        mock.patch.object(connections.ManifoldConnection, "_mixing", _turned),
    ),
    Control(
        "19 rounds of Sinkhorn, not 20",
        streams.manifold,
        "manifold-deepseek",
        mock.patch.object(connections, "SINKHORN_ROUNDS", 19),
    ),
]


def controls(checkouts: Checkouts, seed: int) -> dict[str, dict[str, Any]]:
    """Return the differences that `compared` finds in fp64, by mistake."""
    found = {}
    for control in CONTROLS:
        with control.made:
            case = next(case for case in control.family(checkouts, torch.float64) if case.name == control.case)
            found[control.mistake] = {"case": control.case, **compared(case, torch.float64, seed)}
    return found
