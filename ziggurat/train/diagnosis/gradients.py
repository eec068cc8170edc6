"""Gradients across the depth of a model: per layer, per sub-layer, and from one end of a stack to the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.train.diagnosis.hooks import STACKS, Sublayer, Trace, layers_of

Parts = dict[str, list[list[nn.Parameter]]]
"""`embeddings` and `output`: one group of parameters, or none; `encoder` and `decoder`: one group per layer."""


def parts_of(model: Seq2Seq) -> Parts:
    """Return the trained parameters by part, each of them once.

    A matrix that embeddings and output projection share counts among the embeddings; `output` has the others of the
    projection. Parameters of a stack outside of its layers (final norms, weights of a history) are left out.
    """
    seen: set[nn.Parameter] = set()

    def group(*modules: nn.Module) -> list[nn.Parameter]:
        found = dict.fromkeys(p for module in modules for p in module.parameters() if p.requires_grad)
        mine = [p for p in found if p not in seen]
        seen.update(mine)
        return mine

    parts: Parts = {"embeddings": [group(model.source_embedding, model.target_embedding)]}
    parts |= {stack: [group(layer) for layer in layers_of(model, stack)] for stack in STACKS}
    parts["output"] = [group(model.output)]
    return {name: groups for name, groups in parts.items() if name in STACKS or groups[0]}


def by_part(parts: Parts, norm_of: Callable[[list[nn.Parameter]], float]) -> dict[str, Any]:
    """Return a figure for every group: a number for `embeddings` and `output`, a list for each stack."""
    figures: dict[str, Any] = {name: [norm_of(group) for group in groups] for name, groups in parts.items()}
    return {name: found if name in STACKS else found[0] for name, found in figures.items()}


def backward_measures(model: Seq2Seq, trace: Trace, objective: Tensor, which: Iterable[str]) -> dict[str, Any]:
    """Return those of `gradient_norm`, `beta_ln`, `beta_rc`, `beta` and `r` that `which` names.

    torch.autograd.grad accumulates nothing: gradients of the parameters do not change, and hooks of DDP do not run.

    Args:
        model: the model.
        trace: record of the forward pass that computed `objective`.
        objective: objective of training on one batch.
        which: names of measures; other names are ignored.
    """
    wanted = set(which)
    parts = parts_of(model) if "gradient_norm" in wanted else {}
    parameters = [p for groups in parts.values() for group in groups for p in group]
    rates = bool(wanted & {"beta_ln", "beta_rc", "beta"})
    sublayers = [s for row in trace.sublayers.values() for s in row if s is not None] if rates else []
    ends = [_ends(trace.outputs[stack]) for stack in STACKS] if "r" in wanted else []
    states = [t for s in sublayers for t in (s.r, s.y)] + [t for pair in ends for t in pair if t is not None]
    # Each tensor once: without a norm after the addition, r and y are one tensor.
    asked = list(dict.fromkeys(t for t in (*parameters, *states) if t.requires_grad))
    # The graph is needed again for the rates, which propagate from r to x.
    found = torch.autograd.grad(objective, asked, retain_graph=bool(sublayers), allow_unused=True)
    gradients = dict(zip(asked, found, strict=True))
    values: dict[str, Any] = {}
    if parts:
        norms = _norms(gradients, parameters)
        values["gradient_norm"] = by_part(parts, lambda group: sum(norms[p] ** 2 for p in group) ** 0.5)
    if rates:
        values |= {k: v for k, v in _rates(trace.sublayers, gradients).items() if k in wanted}
    if ends:
        first, last = (
            lengths([None if t is None else gradients.get(t) for t in row]) for row in zip(*ends, strict=True)
        )
        # No gradient goes into the output of a layer that is frozen, with all below it (`training.freeze`).
        frozen = [low is not None and not low.requires_grad for low, _ in ends]
        values["r"] = {
            stack: torch.nan if fixed else _ratio(*pair)
            for stack, fixed, *pair in zip(STACKS, frozen, first, last, strict=True)
        }
    return values


def _ends(outputs: Sequence[Tensor | None]) -> tuple[Tensor | None, Tensor | None]:
    return outputs[0], outputs[-1]


def _rates(
    sublayers: Mapping[str, Sequence[Sublayer | None]], gradients: Mapping[Tensor, Tensor | None]
) -> dict[str, dict[str, list[float]]]:
    """Return beta_LN, beta_RC and beta of every sub-layer, by place (Zhang, Titov and Sennrich 2019).

    delta_z is the gradient that flows into z through this sub-layer alone, skip and branch together: it is propagated
    back from r. Other paths of the stream (dense connections, B2T, transparent attention) do not count.
    """
    passed = [s for row in sublayers.values() for s in row if s is not None]
    into: dict[int, Tensor | None] = {}
    for s in passed:
        delta = gradients.get(s.r)
        if delta is not None and s.x.requires_grad:
            (into[id(s)],) = torch.autograd.grad(s.r, s.x, delta, retain_graph=True, allow_unused=True)
    norms = _norms(gradients, [t for s in passed for t in (s.r, s.y)])
    before = dict(zip(into, lengths(list(into.values())), strict=True))

    def ln(s: Sublayer | None) -> float:
        return torch.nan if s is None else _ratio(norms.get(s.r), norms.get(s.y))

    def rc(s: Sublayer | None) -> float:
        return torch.nan if s is None else _ratio(before.get(id(s)), norms.get(s.r))

    def both(s: Sublayer | None) -> float:
        return torch.nan if s is None else _ratio(before.get(id(s)), norms.get(s.y))

    normed = {place: row for place, row in sublayers.items() if any(s and s.residual.out_norm for s in row)}
    return {
        "beta_ln": {place: list(map(ln, row)) for place, row in normed.items()},
        "beta_rc": {place: list(map(rc, row)) for place, row in sublayers.items()},
        "beta": {place: list(map(both, row)) for place, row in sublayers.items()},
    }


@torch.no_grad()
def sublayer_variance(trace: Trace, masks: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Return Var(r) over the features, mean over real tokens, of every sub-layer, by place.

    `masks` are [batch, length] by stack, True at real tokens. Each stream of hyper-connections counts separately.
    """
    found: dict[str, list[float]] = {}
    for place, row in trace.sublayers.items():
        mask = masks[place.partition(".")[0]]
        found[place] = [
            torch.nan if s is None else float(s.r[mask].float().var(-1, unbiased=False).mean()) for s in row
        ]
    return found


def _norms(gradients: Mapping[Tensor, Tensor | None], keys: Iterable[Tensor]) -> dict[Tensor, float]:
    """Return the norm of each key's gradient; 0 where the objective does not depend on the key."""
    asked = list(dict.fromkeys(keys))
    return dict(zip(asked, lengths([gradients.get(key) for key in asked]), strict=True))


def lengths(tensors: Sequence[Tensor | None]) -> list[float]:
    """Return the 2-norm of each tensor, in fp32 or wider; waits for a GPU only once."""
    given = [t for t in tensors if t is not None]
    if not given:
        return [0.0] * len(tensors)
    # Squares of half-precision numbers underflow, or overflow fp16.
    wide = [t.float() if t.dtype in (torch.bfloat16, torch.float16) else t for t in given]
    numbers = iter(torch.stack([torch.linalg.vector_norm(t) for t in wide]).tolist())
    return [0.0 if t is None else next(numbers) for t in tensors]


def _ratio(one: float | None, other: float | None) -> float:
    """Return one / other; NaN where either is unknown or the divisor is 0."""
    return one / other if one is not None and other else torch.nan
