"""Divergence: tests for loss spikes, and a search for the place where the first number that is not finite arose.

While training is healthy, only one comparison of the loss runs, if `training.divergence.loss_spike` is set. When an
update fails, its batches are run once more, under the same dropout masks, with hooks on every module and parameter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ziggurat.config.lifecycle import DivergenceConfig
from ziggurat.config.train import LossConfig
from ziggurat.data.collate import Batch
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.train.diagnosis.hooks import eagerly
from ziggurat.train.memory import Shortage, within_memory
from ziggurat.train.objective import Objective, add_gradients


def highest_nll(losses: Sequence[float], config: DivergenceConfig) -> float:
    """Return the loss above which an update is a spike, nats per target token; infinity while none can be.

    Args:
        losses: of the latest updates that were taken (`Progress.losses`).
        config: the factor above their median, and the number of losses that the median needs.
    """
    if config.loss_spike is None or len(losses) < config.window:
        return math.inf
    # The median, since a spike just below the limit would raise a mean, and with it the limit for the next one.
    return config.loss_spike * median(losses[-config.window :])


def remember_loss(losses: Sequence[float], nll: float, config: DivergenceConfig) -> list[float]:
    """Return `losses` with that of one more update, cut to the window; [] when spikes are not looked for."""
    return [*losses, nll][-config.window :] if config.loss_spike is not None else []


def all_finite(tensors: Mapping[str, Tensor]) -> bool:
    """True when no floating-point tensor holds NaN or an infinity."""
    return all(_kind(tensor) is None for tensor in tensors.values())


class Fault(NamedTuple):
    """The place where an update failed.

    Attributes:
        place: in words.
        found: False when every state and gradient was finite this time, or memory was too short to look.
    """

    place: str
    found: bool


def find_fault(
    model: Seq2Seq,
    batches: Sequence[Batch],
    config: LossConfig,
    *,
    precision: str,
) -> Fault:
    """Return the layer and tensor at which an update failed first.

    A parameter that is not finite is named before all else. Then the update is run again; named is the first module
    whose input or output is not finite, else the loss, else the first gradient in the order of the backward pass, where
    the fault arose. When all of them are finite (a norm that overflows, a loss spike) it is the largest gradient.

    Args:
        model: with the weights of that update; its gradients are dropped, all else is left as found.
        batches: those of that update.
        config: the loss of training.
        precision: `training.precision`.
    """
    for name, parameter in model.named_parameters():
        if kind := _kind(parameter.detach()):
            return Fault(f"parameter {name} is {kind}", True)
    batches = [batch for batch in batches if batch.target_tokens]
    if not batches:
        return Fault("had no tokens in this update", False)  # one of several processes, with an idle batch
    hooks = _Hooks(model)
    try:
        with hooks, eagerly(model):
            short = within_memory(lambda: _again(model, batches, config, precision, hooks), model.device)
        if isinstance(short, Shortage):
            return Fault(f"place not found: {short}", False)
        found = hooks.fault()
        return Fault(_largest(model), False) if found is None else Fault(found, True)
    finally:
        model.zero_grad(set_to_none=True)


def _again(model: Seq2Seq, batches: Sequence[Batch], config: LossConfig, precision: str, hooks: _Hooks) -> None:
    """Run the batches of an update again, up to the first that shows a fault."""
    objective = Objective(model, config).train()
    model.zero_grad(set_to_none=True)
    tokens, sentences = sum(b.target_tokens for b in batches), sum(b.sentences for b in batches)
    for batch in batches:
        sums = add_gradients(objective, batch, model.device, precision, tokens=tokens, sentences=sentences)
        hooks.see_loss(sums.objective)
        if hooks.fault() is not None:
            return


class _Hooks:
    """A context with hooks on all of a model that remember the first number that is not finite."""

    def __init__(self, model: Seq2Seq) -> None:
        self._model = model
        self._forward: str | None = None
        self._loss: str | None = None
        self._gradient: str | None = None
        self._handles: list[RemovableHandle] = []

    def fault(self) -> str | None:
        """Return the first fault that was seen, in words."""
        return self._forward or self._loss or self._gradient

    def __enter__(self) -> None:
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_pre_hook(partial(self._enters, name)))
            self._handles.append(module.register_forward_hook(partial(self._leaves, name)))
        for name, parameter in self._model.named_parameters():
            # These fire in the order of the backward pass, so the first one that finds something is where it arose.
            if parameter.requires_grad:
                hook = partial(self._accumulated, name)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def see_loss(self, objective: Tensor) -> None:
        """Check the loss of a batch whose forward and backward pass are over."""
        if kind := _kind(objective):
            self._loss = f"the loss is {kind}, though all states are finite: the projection to the vocabulary overflows"

    def _enters(self, name: str, _module: nn.Module, inputs: tuple[Any, ...]) -> None:
        # Only the first argument, the hidden states: later ones may be an attention bias, which is -inf where masked.
        if self._forward is None and (kind := _first_kind(inputs[:1])):
            self._forward = f"{name}: input is {kind} in the forward pass"

    def _leaves(self, name: str, _module: nn.Module, _inputs: tuple[Any, ...], output: Any) -> None:
        if self._forward is None and (kind := _first_kind(output)):
            self._forward = f"{name or 'the model'}: output is {kind} in the forward pass"

    def _accumulated(self, name: str, parameter: Tensor) -> None:
        if self._gradient is None and parameter.grad is not None and (kind := _kind(parameter.grad)):
            self._gradient = f"gradient of {name} is {kind}"


def _kind(tensor: Tensor) -> str | None:
    """Return "NaN" or "inf" when the tensor holds either, NaN first, or None."""
    if not tensor.is_floating_point() or bool(torch.isfinite(tensor).all()):
        return None
    return "NaN" if bool(torch.isnan(tensor).any()) else "inf"


def _first_kind(value: Any) -> str | None:
    """Return `_kind` of a tensor, or of the first of a tuple's or list's tensors that is not finite."""
    if isinstance(value, Tensor):
        return _kind(value.detach())
    if isinstance(value, tuple | list):
        return next((kind for part in value if (kind := _first_kind(part))), None)
    return None


def _largest(model: nn.Module) -> str:
    """Return the parameter with the largest gradient, in words."""
    # In fp64: the square of a value beyond 1.8e19 overflows fp32, and that may be the fault that is looked for.
    norms = {name: float(p.grad.double().norm()) for name, p in model.named_parameters() if p.grad is not None}
    name = max(norms, key=lambda n: norms[n])
    share = norms[name] ** 2 / max(sum(norm**2 for norm in norms.values()), 1e-300)  # all may be 0
    return (
        f"run again, every state and gradient is finite; the largest gradient is that of {name} "
        f"(norm {norms[name]:.3g}, {100 * share:.0f} % of the sum of squares)"
    )
