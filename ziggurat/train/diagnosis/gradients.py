"""Gradients across the depth of a model, and hooks that record the tensors in its sub-layers.

Hooks exist only inside the contexts of this module; outside, a model runs as if the module did not exist.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ziggurat.model.residual.base import Residual
from ziggurat.model.seq2seq import Recomputing, Seq2Seq

STACKS = ("encoder", "decoder")


def layers_of(model: Seq2Seq, stack: str) -> list[nn.Module]:
    """Return the layers of the stack `encoder` or `decoder`, bottom first."""
    return list(cast(nn.ModuleList, getattr(model, stack).layers))


def residuals_of(layer: nn.Module) -> dict[str, Residual]:
    """Return the Residuals of a layer by the name of their sub-layer (`self_attn`, `ffn`), in order.

    Layers of RNMT+ have none.
    """
    return {
        name.removesuffix("_residual"): child for name, child in layer.named_children() if isinstance(child, Residual)
    }


@dataclass
class Sublayer:
    """Tensors of one residual sub-layer y = out_norm(r), r = skip * x + branch * f(x), in a forward pass.

    Attributes:
        residual: the module that joins f(x) to the stream.
        x: the stream before the sub-layer, [batch, length, d_model], or with hyper-connections [batch, length, streams,
            d_model].
        fx: the output of f, [batch, length, d_model].
        r: the sum, before any `out_norm`; same shape as x.
        y: the stream after it, same shape as x; r itself without an `out_norm`.
    """

    residual: Residual
    x: Tensor
    fx: Tensor
    r: Tensor
    y: Tensor


class Trace:
    """Record of a forward pass inside the context; a second pass replaces the first.

    The tensors are those of the pass itself, so gradients can be taken with respect to them. Layers skipped by
    LayerDrop are None.

    Args:
        model: any family, in any mode.

    Attributes:
        sublayers: place (`encoder.self_attn`, `decoder.ffn`) -> one per layer, bottom first; empty for RNMT+.
        outputs: stack -> output of each layer, [batch, length, d], before any final norm.
        embedded: stack -> embedding and position of its input, [batch, length, d_model].
        opened: stack -> input of its first layer: `embedded`, normalised if the stack normalises its input.
    """

    def __init__(self, model: Seq2Seq) -> None:
        self._model = model
        self._handles: list[RemovableHandle] = []
        self.sublayers: dict[str, list[Sublayer | None]] = {}
        self.outputs: dict[str, list[Tensor | None]] = {}
        self.embedded: dict[str, Tensor] = {}
        self.opened: dict[str, Tensor] = {}

    def __enter__(self) -> Trace:
        embeddings = self._model.source_embedding, self._model.target_embedding
        for stack, embedding in zip(STACKS, embeddings, strict=True):
            self._hook(embedding, partial(self._embeds, stack))
            if (norm := getattr(getattr(self._model, stack), "entry_norm", None)) is not None:
                self._hook(norm, partial(self._opens, stack))
            layers = layers_of(self._model, stack)
            self.outputs[stack] = [None] * len(layers)
            for number, layer in enumerate(layers):
                self._watch(stack, number, len(layers), layer)
            if (solver := getattr(getattr(self._model, stack), "solver", None)) is not None:
                self._hook(solver, partial(self._steps, stack, layers))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, module: nn.Module, hook: Any) -> None:
        self._handles.append(module.register_forward_hook(hook))

    def _watch(self, stack: str, number: int, count: int, layer: nn.Module) -> None:
        residuals = residuals_of(layer)
        for name, residual in residuals.items():
            places = self.sublayers.setdefault(f"{stack}.{name}", [None] * count)
            # A layer's output is that of its last sub-layer.
            last = name == next(reversed(residuals))
            inside: list[Tensor] = []
            if residual.out_norm is not None:
                self._handles.append(residual.out_norm.register_forward_pre_hook(partial(_keep, inside)))
            self._hook(residual, partial(self._joins, places, stack if last else None, number, inside))
        # An LSTM layer. The decoder's first layer runs cell by cell, not as a module, so its output is the next one's
        # input.
        if not residuals:
            self._hook(layer, partial(self._runs, stack, number))

    def _embeds(self, stack: str, _module: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> None:
        self.embedded[stack] = self.opened[stack] = output

    def _opens(self, stack: str, _module: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> None:
        self.opened[stack] = output

    def _steps(
        self, stack: str, layers: list[nn.Module], _module: nn.Module, inputs: tuple[Any, ...], y: Tensor
    ) -> None:
        # The layer has been called several times; its sub-layers are those of the last call.
        self.outputs[stack][layers.index(inputs[0])] = y

    def _joins(
        self,
        places: list[Sublayer | None],
        stack: str | None,
        number: int,
        inside: list[Tensor],
        residual: nn.Module,
        inputs: tuple[Tensor, ...],
        y: Tensor,
    ) -> None:
        # The sum r is the input of `out_norm`; without that norm it is y itself.
        r = inside.pop() if inside else y
        places[number] = Sublayer(cast(Residual, residual), inputs[0], inputs[1], r, y)
        if stack is not None:
            self.outputs[stack][number] = y

    def _runs(self, stack: str, number: int, _layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        if number:
            self.outputs[stack][number - 1] = inputs[0]
        self.outputs[stack][number] = output


def _keep(inside: list[Tensor], _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    inside[:] = inputs[:1]


@contextlib.contextmanager
def eagerly(model: nn.Module) -> Iterator[None]:
    """Run without compiled layers, which skip the hooks of inner modules."""
    if all(module._compiled_call_impl is None for module in model.modules()):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def seen_once(model: nn.Module) -> Iterator[None]:
    """Run without compiled layers, and without recomputation, which would run hooks inside layers a second time."""
    stacks = [module for module in model.modules() if isinstance(module, Recomputing)]
    before = [stack.recompute for stack in stacks]
    for stack in stacks:
        stack.recompute = None
    try:
        with eagerly(model):
            yield
    finally:
        for stack, recompute in zip(stacks, before, strict=True):
            stack.recompute = recompute


Parts = dict[str, list[list[nn.Parameter]]]
"""Groups of parameters by part. `embeddings` and `output`: one group or none; `encoder` and `decoder`: one per
layer."""


def parts_of(model: Seq2Seq) -> Parts:
    """Return the trained parameters by part, each once, except that tied layers all list their shared parameters.

    A matrix shared by embeddings and output projection belongs to the embeddings; `output` has the rest of the
    projection. Parameters of a stack outside its layers (final norms, weights of a history) are left out.
    """
    seen: set[nn.Parameter] = set()

    def group(*modules: nn.Module) -> list[nn.Parameter]:
        found = dict.fromkeys(p for module in modules for p in module.parameters() if p.requires_grad)
        mine = [p for p in found if p not in seen]
        seen.update(mine)
        return mine

    parts: Parts = {"embeddings": [group(model.source_embedding, model.target_embedding)]}
    outside = set(seen)
    for stack in STACKS:
        parts[stack] = []
        for layer in layers_of(model, stack):
            parts[stack].append(group(layer))
            seen.intersection_update(outside)
    parts["output"] = [group(model.output)]
    return {name: groups for name, groups in parts.items() if name in STACKS or groups[0]}


def by_part(parts: Parts, norm_of: Callable[[list[nn.Parameter]], float]) -> dict[str, Any]:
    """Return a figure for every group: a number for `embeddings` and `output`, a list for each stack."""
    figures: dict[str, Any] = {name: [norm_of(group) for group in groups] for name, groups in parts.items()}
    return {name: found if name in STACKS else found[0] for name, found in figures.items()}


def backward_measures(model: Seq2Seq, trace: Trace, objective: Tensor, which: Iterable[str]) -> dict[str, Any]:
    """Return the measures that `which` names among `gradient_norm`, `beta_ln`, `beta_rc`, `beta` and `r`.

    torch.autograd.grad accumulates nothing: gradients of the parameters do not change, and their hooks do not run.

    Args:
        model: the model.
        trace: record of the forward pass that computed `objective`.
        objective: training objective on one batch.
        which: names of measures; other names are ignored.
    """
    wanted = set(which)
    parts = parts_of(model) if "gradient_norm" in wanted else {}
    parameters = [p for groups in parts.values() for group in groups for p in group]
    rates = bool(wanted & {"beta_ln", "beta_rc", "beta"})
    sublayers = [s for row in trace.sublayers.values() for s in row if s is not None] if rates else []
    ends = [(trace.outputs[stack][0], trace.outputs[stack][-1]) for stack in STACKS] if "r" in wanted else []
    states = [t for s in sublayers for t in (s.r, s.y)] + [t for pair in ends for t in pair if t is not None]
    # Each tensor once: without a norm after the addition, r and y are the same tensor.
    asked = list(dict.fromkeys(t for t in (*parameters, *states) if t.requires_grad))
    # The graph is reused for the rates, which propagate from r to x.
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
        # The output of a layer gets no gradient if that layer and all below it are frozen (`training.freeze`).
        frozen = [low is not None and not low.requires_grad for low, _ in ends]
        values["r"] = {
            stack: torch.nan if fixed else _ratio(*pair)
            for stack, fixed, *pair in zip(STACKS, frozen, first, last, strict=True)
        }
    return values


def _rates(
    sublayers: Mapping[str, Sequence[Sublayer | None]], gradients: Mapping[Tensor, Tensor | None]
) -> dict[str, dict[str, list[float]]]:
    """Return beta_LN, beta_RC and beta of every sub-layer, by place (Zhang, Titov and Sennrich 2019).

    delta_z is the gradient that flows into z through this sub-layer only, skip and branch together, propagated back
    from r. Other paths of the stream (dense connections, B2T, transparent attention) do not count.
    """
    passed = [s for row in sublayers.values() for s in row if s is not None]
    into: dict[int, Tensor | None] = {}
    for s in passed:
        delta = gradients.get(s.r)
        if delta is not None and s.x.requires_grad:
            (into[id(s)],) = torch.autograd.grad(s.r, s.x, delta, retain_graph=True, allow_unused=True)
    norms = _norms(gradients, [t for s in passed for t in (s.r, s.y)])
    before = dict(zip(into, lengths(list(into.values())), strict=True))

    found: dict[str, dict[str, list[float]]] = {"beta_ln": {}, "beta_rc": {}, "beta": {}}
    for place, row in sublayers.items():
        at_x = [None if s is None else before.get(id(s)) for s in row]
        at_r = [None if s is None else norms.get(s.r) for s in row]
        at_y = [None if s is None else norms.get(s.y) for s in row]
        if any(s and s.residual.out_norm for s in row):
            found["beta_ln"][place] = list(map(_ratio, at_r, at_y))
        found["beta_rc"][place] = list(map(_ratio, at_x, at_r))
        found["beta"][place] = list(map(_ratio, at_x, at_y))
    return found


@torch.no_grad()
def sublayer_variance(trace: Trace, masks: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Return Var(r) over the features, mean over real tokens, of every sub-layer, by place.

    `masks` are [batch, length] by stack, True at real tokens. Each stream of hyper-connections counts separately.
    """
    found: dict[str, list[float]] = {}
    for place, row in trace.sublayers.items():
        # Indexing with a mask waits for a GPU each time; row numbers, computed once, serve all sub-layers.
        rows = masks[place.partition(".")[0]].flatten().nonzero()[:, 0]
        missing = torch.full((), torch.nan, device=rows.device)
        real = [None if s is None else s.r.flatten(0, 1).index_select(0, rows).float() for s in row]
        means = [missing if r is None else r.var(-1, unbiased=False).mean() for r in real]
        found[place] = torch.stack(means).tolist()
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
    return one / other if one is not None and other else torch.nan
