"""Comparison of two modules that should compute the same: weights copied, outputs and gradients side by side."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from checkouts import as_precise_as
from torch import Tensor, nn

from ziggurat.config import ModelConfig
from ziggurat.model import transformer
from ziggurat.model.attention.cache import causal_mask
from ziggurat.model.build import assemble
from ziggurat.model.roles import Role, assign_roles, place_of
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.model.transformer import Encoder

BATCH, LENGTH = 3, 11

View = Callable[[Tensor], Tensor]


def whole(values: Tensor) -> Tensor:
    """Return the whole parameter."""
    return values


@dataclass(frozen=True, eq=False)
class Pair:
    """One of our parameters, or a part of it, which is `factor` times one of theirs plus `offset`.

    Attributes:
        ours: the parameter.
        theirs: the parameter that corresponds.
        our_part: returns a view of the matching part of our parameter.
        their_part: returns the part of theirs, in the same shape.
        factor: see above.
        offset: see above.
    """

    ours: nn.Parameter
    theirs: nn.Parameter
    our_part: View = whole
    their_part: View = whole
    factor: float = 1.0
    offset: float = 0.0


@dataclass
class Case:
    """Two modules, and how to compare them.

    Attributes:
        name: names the comparison.
        what: describes the comparison in a few words.
        repository: the folder of theirs.
        path: the file in it.
        ours: our module.
        theirs: the authors'.
        pairs: parameters that correspond.
        run_ours: computes our output from the input [batch, length, d_model].
        run_theirs: theirs.
        d_model: width of the input.
        fixed: parameters of theirs that keep their initial values, since ours has none.
        starts: compare the initial values of gains of norms and of the method's own parameters.
    """

    name: str
    what: str
    repository: str
    path: str
    ours: nn.Module
    theirs: nn.Module
    pairs: Sequence[Pair]
    run_ours: Callable[[Tensor], Tensor]
    run_theirs: Callable[[Tensor], Tensor]
    d_model: int
    fixed: Sequence[nn.Parameter] = field(default_factory=tuple)
    starts: bool = True


def rows(first: int, last: int) -> View:
    """Return the view of these rows of a matrix."""
    return lambda values: values[first:last]


def matching(ours: nn.Module | None, theirs: nn.Module) -> Iterator[Pair]:
    """Yield the pairs of parameters of the same name of two norms or linear maps."""
    assert ours is not None
    mine = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        yield Pair(mine[name], parameter)


def config_of(layers: int, **choices: Any) -> ModelConfig:
    """Return a configuration with `layers` encoder layers, one decoder layer, no dropout, and these choices."""
    sections = {"encoder": {"layers": layers, **choices.pop("encoder", {})}, "decoder": {"layers": 1}}
    nothing = dict.fromkeys(("residual", "attention", "activation", "embedding"), 0.0)
    return ModelConfig.model_validate({**sections, "dropout": nothing, **choices})


def model_of(config: ModelConfig, dtype: torch.dtype) -> Seq2Seq:
    """Return the model, with uninitialised parameters."""
    return assemble(config, 8, 8).to(dtype).eval()


def encoder_of(layers: int, dtype: torch.dtype, **choices: Any) -> Encoder:
    """Return the encoder of `config_of`, with uninitialised parameters."""
    return model_of(config_of(layers, **choices), dtype).encoder


def encoded(encoder: Encoder, x: Tensor, *, causal: bool) -> Tensor:
    """Return the output of our encoder for `x` [batch, length, d_model].

    It gets a decoder's mask where theirs is a decoder: all our decoders attend to a memory.
    """
    future = causal_mask(x.shape[1], x.dtype, x.device)
    real = torch.ones(x.shape[:2], dtype=torch.bool)
    hidden = mock.patch.object(transformer, "padding_mask", return_value=future)
    with hidden if causal else contextlib.nullcontext():
        (y,) = encoder(x, real)
    return y


def compared(case: Case, dtype: torch.dtype, seed: int) -> dict[str, float | None]:
    """Return the largest differences of outputs, and of gradients of a random linear function of them."""
    generator = torch.Generator().manual_seed(seed)
    initial = _initial_difference(case) if case.starts else None
    prepare(case, generator)
    x = drawn((BATCH, LENGTH, case.d_model), generator, dtype)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    mine = case.run_ours(ours)
    with as_precise_as(dtype):
        other = case.run_theirs(theirs)
    assert mine.dtype == other.dtype == dtype, (mine.dtype, other.dtype)
    direction = drawn(other.shape, generator, dtype)
    (mine * direction).sum().backward()
    (other * direction).sum().backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    absolute, relative = differences([(mine.detach(), other.detach())])
    _, of_input = differences([(ours.grad, theirs.grad)])
    gradients = [(p.our_part(_grad(p.ours)) * p.factor, p.their_part(_grad(p.theirs))) for p in case.pairs]
    return {
        "output_absolute": absolute,
        "output_relative": relative,
        "input_gradient_relative": of_input,
        "parameter_gradients_relative": differences(gradients)[1],
        "parameters": len(gradients),
        "initial_values_absolute": initial,
    }


def _initial_difference(case: Case) -> float:
    """Return the largest difference of initial values set by constructors: gains and the residuals' own parameters."""
    built = {slot.place for slot in assign_roles(case.ours) if slot.role in (Role.NORM_GAIN, Role.WIRING)}
    pairs = [pair for pair in case.pairs if place_of(pair.ours.data) in built]
    values = [(p.our_part(p.ours), p.factor * p.their_part(p.theirs) + p.offset) for p in pairs]
    return differences([(ours.detach(), theirs.detach()) for ours, theirs in values])[0]


def drawn(shape: Sequence[int], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Return values from N(0, 1), the same for every type up to rounding."""
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)


def prepare(case: Case, generator: torch.Generator) -> None:
    """Draw their parameters, and give ours the same values."""
    _draw(case, generator)
    _copy(case)


@torch.no_grad()
def _draw(case: Case, generator: torch.Generator) -> None:
    """Move each of their parameters away from its initial value, so that each affects the output."""
    fixed = {id(p) for p in case.fixed}
    for parameter in case.theirs.parameters():
        if id(parameter) in fixed:
            continue
        noise = drawn(parameter.shape, generator, parameter.dtype)
        if parameter.dim() > 1:
            parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(0.3 * noise)


@torch.no_grad()
def _copy(case: Case) -> None:
    """Give ours the values of theirs; biases that theirs lack become 0, and anything else left over is an error."""
    covered: dict[int, int] = {}
    for pair in case.pairs:
        part = pair.our_part(pair.ours.data)
        part.copy_(pair.factor * pair.their_part(pair.theirs.data) + pair.offset)
        covered[id(pair.ours)] = covered.get(id(pair.ours), 0) + part.numel()
    for name, parameter in case.ours.named_parameters():
        if id(parameter) in covered:
            assert covered[id(parameter)] == parameter.numel(), f"{case.name}: a part of our {name} has no counterpart"
        else:
            assert name.endswith("bias"), f"{case.name}: our {name} has no counterpart"
            parameter.zero_()
    theirs = {id(p) for p in (*(pair.theirs for pair in case.pairs), *case.fixed)}
    for name, parameter in case.theirs.named_parameters():
        assert id(parameter) in theirs, f"{case.name}: their {name} has no counterpart"


def _grad(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def differences(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Return the largest difference, and the largest one relative to the largest value of its tensor.

    Tensors below a thousandth of the largest of all are compared with that thousandth: some consist of rounding errors,
    since the gradients of key biases and of the mixing of equal streams are 0.
    """
    scale = max(float(theirs.abs().max()) for _, theirs in pairs)
    absolute = [float((ours - theirs).abs().max()) for ours, theirs in pairs]
    sizes = [max(float(theirs.abs().max()), 1e-3 * scale) for _, theirs in pairs]
    return max(absolute), max(a / s for a, s in zip(absolute, sizes, strict=True))
