"""Every history kind compared with its equation, written in float64 from the table in docs/depth.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from tests.model.histories import Tripled, combining, layers, norm_of, run, stream
from ziggurat.config.kinds import HISTORIES, HistoryKind
from ziggurat.model.kinds import HISTORY

HERE = "tests/model/test_history_equations.py"
DEPTH, PERIOD, DILATION = 7, 3, 2


class Reader:
    """A history's options and parameters, and the outputs y_0, ..., y_l so far."""

    def __init__(self, history: Any, norm_at: str, outputs: list[Tensor]) -> None:
        self.history = history
        self.norm_at = norm_at
        self.outputs = outputs
        self.depth = len(outputs) - 1

    def combined(self, weights: list[Any], sources: list[Tensor], row: int) -> Tensor:
        """G_row, the weighted sum of `sources`: source k has norm number k, or the sum has norm number `row`."""
        if self.norm_at == "sources":
            sources = [norm_of(self.history, k, y) for k, y in enumerate(sources)]
        total = sum(weight * y for weight, y in zip(weights, sources, strict=True))
        return norm_of(self.history, row, total) if self.norm_at == "consumers" else total


def dlcl(r: Reader) -> Tensor:
    return r.combined(list(r.history.weight[r.depth, : r.depth + 1]), r.outputs, r.depth)


def blocks(r: Reader) -> Tensor:
    ends = [l for l in range(r.depth + 1) if l % PERIOD == 0 or l == DEPTH]  # noqa: E741
    if ends[-1] != r.depth:
        return r.outputs[-1]
    row = len(ends) - 1
    return r.combined(list(r.history.weight[row, : row + 1]), [r.outputs[l] for l in ends], row)  # noqa: E741


def top_only(r: Reader) -> Tensor:
    return r.outputs[-1] if r.depth < DEPTH else r.combined(list(r.history.weight), r.outputs, DEPTH)


def depth_weighted(r: Reader) -> Tensor:
    if r.depth == 0 or r.depth % PERIOD:
        return r.outputs[-1]
    before = sum(i // DILATION + 1 for i in range(PERIOD, r.depth, PERIOD))  # the weights of earlier combinations
    sources = [j for j in range(r.depth + 1) if j % DILATION == r.depth % DILATION]
    return sum(r.history.weight[before + n] * r.outputs[j] for n, j in enumerate(sources))  # type: ignore[return-value]


def attended(r: Reader, sources: list[Tensor]) -> Tensor:
    """sum_k a_k y_k with a = softmax_k(w . RMSNorm(y_k)), position by position."""
    if r.depth == 0:
        return sources[0]
    query = r.history.query[r.depth - 1] * r.history.gain[r.depth - 1]
    logits = torch.stack([(y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * query).sum(-1) for y in sources])
    shares = logits.exp() / logits.exp().sum(0)
    return sum(share[..., None] * y for share, y in zip(shares, sources, strict=True))  # type: ignore[return-value]


def block_attended(r: Reader) -> Tensor:
    """Sources are y_0, the sum of each block, and the sum of the layers so far in the current block."""
    above = [r.outputs[1 + first : 1 + first + PERIOD] for first in range(0, r.depth, PERIOD)]
    return attended(r, [r.outputs[0], *(sum(block[1:], block[0]) for block in above)])


def mudd(r: Reader) -> Tensor:
    """The stream; tests/model/test_mudd.py covers the inputs of queries, keys and values."""
    if r.depth == 0:
        return r.outputs[0]
    inner, outer, bias = (getattr(r.history, part)[r.depth - 1] for part in ("inner", "outer", "bias"))
    y = r.outputs[-1]
    hidden = (y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()) @ inner.T
    hidden = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
    weights = (hidden @ outer.T)[..., -(r.depth + 1) :] + bias[-1]
    return torch.stack(r.outputs, -1).mul(weights[..., None, :]).sum(-1)


def cross_module(r: Reader) -> Tensor:
    y = r.outputs[-1]
    return y + norm(r.outputs[0], r.history.norm) if r.depth == PERIOD else y


def norm(y: Tensor, its: Any) -> Tensor:
    centred = y - y.mean(-1, keepdim=True)
    return its.weight * centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() + its.bias


EQUATIONS: dict[str, Callable[[Reader], Tensor]] = {
    "latest": lambda r: r.outputs[-1],
    "dlcl": dlcl,
    "dense": lambda r: r.combined([1.0] * (r.depth + 1), r.outputs, r.depth),
    "average": lambda r: r.combined([1 / (r.depth + 1)] * (r.depth + 1), r.outputs, r.depth),
    "blocks": blocks,
    "top_only": top_only,
    "depth_weighted": depth_weighted,
    "attention_residuals": lambda r: attended(r, r.outputs),
    "block_attention_residuals": block_attended,
    "mudd": mudd,
    "cross_module": cross_module,
}
"""EQUATIONS give what layer l + 1 reads, for l < DEPTH, and the stack's output, for l = DEPTH."""


def moved(history: Any) -> Any:
    """Return `history` in fp64 with changed parameters and unchanged buffers, because fixed weights must be right."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in history.double().parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return history


@pytest.mark.parametrize("norm_at", ["sources", "consumers", "none"])
@pytest.mark.parametrize("kind", get_args(HistoryKind))
def test_every_history_follows_its_equation(kind: HistoryKind, norm_at: str) -> None:
    assert kind in EQUATIONS, f"history `{kind}` has no equation: write it into EQUATIONS ({HERE})"
    history = moved(HISTORY[kind].make(combining(DEPTH, norm_at=norm_at, period=PERIOD, dilation=DILATION)))
    outputs, expected = [stream()], []
    for layer in layers(DEPTH):
        expected.append(EQUATIONS[kind](Reader(history, norm_at, outputs)))
        outputs.append(layer(expected[-1]))
    expected.append(EQUATIONS[kind](Reader(history, norm_at, outputs)))
    read, output = run(history, layers(DEPTH), stream())
    rounded = bool(list(history.buffers()))  # fixed weights such as 1/3 were computed in fp32
    torch.testing.assert_close([*read, output], expected, atol=1e-6 if rounded else 1e-10, rtol=0)
    if norm_at == "none" and "attention" not in kind and kind not in ("mudd", "cross_module"):  # no numbers
        agrees(history.table(), outputs, expected)


def agrees(table: Tensor | None, outputs: list[Tensor], expected: list[Tensor]) -> None:
    """`History.table` holds the weights of y_0, ..., y_l in what layer l + 1 reads; None: y_l alone."""
    for number, read in enumerate(expected):
        weights = torch.eye(DEPTH + 1, dtype=torch.float64)[number] if table is None else table[number].nan_to_num(0.0)
        total = sum(weight * y for weight, y in zip(weights, outputs, strict=True))
        torch.testing.assert_close(total, read, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", sorted({*get_args(HistoryKind)} - {"latest", "mudd"}))  # for whole layers
def test_a_history_may_act_between_sublayers(kind: HistoryKind) -> None:
    assert "combination.unit" in HISTORIES[kind].options, f"name `combination.unit` on the row of `{kind}`"


CHANGES: dict[str, dict[str, Any]] = {
    "start": {"start": "last"},
    "learnable": {"learnable": False},
    "norm": {"norm_at": "consumers"},
    "normalize_embedding": {"normalize_embedding": True},
    "softmax": {"softmax": True},
    "window": {"window": 2},
    "dropout": {"dropout": Tripled},
    "groups": {"groups": 2},
    "period": {"period": 2},
    "dilation": {"dilation": 3},
}
"""CHANGES are keys of `combination`, each with a value other than its default."""


@pytest.mark.parametrize("key", CHANGES)
@pytest.mark.parametrize("kind", get_args(HistoryKind))
def test_the_options_that_change_a_history_are_on_its_row(kind: HistoryKind, key: str) -> None:
    def history_with(**options: Any) -> tuple[Any, Tensor]:
        history = moved(HISTORY[kind].make(combining(DEPTH, **{"period": PERIOD, **options})))
        shapes = {name: values.shape for name, values in history.state_dict().items()}
        trained = [name for name, _ in history.named_parameters()]
        return (shapes, trained), run(history, layers(DEPTH), stream())[1]

    (one, before), (other, after) = history_with(), history_with(**CHANGES[key])
    row, told = "HISTORIES (ziggurat/config/kinds.py)", f"combination.{key}" in HISTORIES[kind].options
    if one != other or not torch.equal(before, after):
        assert told, f"history `{kind}` goes by `{key}`: name it in {row}"
    else:
        assert not told, f"`{key}` changes nothing in history `{kind}`: take it out of {row}"
