"""ADMIN's skip vectors omega: constants, or profiled in one forward pass (Liu et al. 2020, section 4)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, assert_never

import torch
from torch import Tensor, nn

from ziggurat.model.dropout import StochasticBranch
from ziggurat.model.residual.base import Residual


@torch.no_grad()
def constant_omega(
    residuals: Sequence[Residual], kind: Literal["log", "linear", "one"], planned: int | None = None
) -> None:
    """Set omega of all n sub-layers of one stack to one number: the profile-free forms of admin-torch.

    n is `planned`, the sub-layers of the stack once it has grown, or by default those it has.

    `log`: sqrt((n + 1) / ln(n + 1) - 1), for an output that changes by O(log n) under a small change of the
    parameters; `linear`: sqrt(n), for O(1); `one`: 1, plain post-norm, O(n). The first sub-layer gets it too. A
    stack without omega stays as it is.
    """
    n = planned or len(residuals)
    match kind:
        case "log":
            omega = math.sqrt((n + 1) / math.log(n + 1) - 1)
        case "linear":
            omega = math.sqrt(n)
        case "one":
            omega = 1.0
        case _:
            assert_never(kind)
    for skip in map(_omega, residuals):
        if skip is not None:
            skip.fill_(omega)


@torch.no_grad()
def profile_omega(
    stacks: Sequence[Sequence[Residual]],
    run: Callable[[], object],
    masks: Sequence[Tensor],
    kept: Collection[Residual] = (),
) -> list[list[float]]:
    """Set omega of every sub-layer from the variances in one forward pass; return the values, stack by stack.

    Args:
        stacks: the Residuals of each stack; one without omega is left alone and gives an empty list.
        run: the forward pass, in training mode, through each Residual exactly once.
        masks: of each stack's tokens [batch, length], True where real.
        kept: residuals whose omega stays as it is and is not returned: those of a trained model that has grown, or of a
            stack with another initialisation.

    Stacks are independent. Within one, omega_1 = 1 and omega_{i+1}^2 = Var(omega_i x_{i-1}) + Var(f_i), in the order in
    which the pass meets the sub-layers. Each omega is applied as soon as it is known: the progressive form of the
    released code. (The paper's formula profiles with omega = 1 throughout and would make omega_1 zero.) Variances are
    over all channels of all real tokens, after the branch's dropout, and the pass adds that same dropped branch. No
    branch is dropped as a whole (stochastic sub-layers), and compiled layers run uncompiled. Nothing but omega changes.
    """
    recursions = [_Recursion(mask, kept) for mask in masks]
    # Uncompiled: a compiled layer would be compiled again with its hooks, once for every sub-layer.
    with ExitStack() as hooks, torch.compiler.set_stance("force_eager"):
        for residuals, recursion in zip(stacks, recursions, strict=True):
            for residual in residuals:
                if _omega(residual) is not None:
                    hooks.enter_context(recursion.watching(residual))
        run()
    return [recursion.omegas for recursion in recursions]


def _omega(residual: Residual) -> nn.Parameter | None:
    return residual.skip if isinstance(residual.skip, nn.Parameter) else None


class _Recursion:
    """The recursion of one stack over its sub-layers; `mask` [batch, length] is True at tokens that count."""

    def __init__(self, mask: Tensor, kept: Collection[Residual]) -> None:
        self.mask = mask
        self.kept = kept
        self.omegas: list[float] = []
        self.following = 1.0

    @contextmanager
    def watching(self, residual: Residual) -> Iterator[None]:
        """Profile `residual` when it is called."""
        training = residual.dropout.training
        hook = residual.register_forward_pre_hook(self._profile)
        try:
            yield
        finally:
            hook.remove()
            residual.dropout.train(training)

    def _profile(self, residual: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        assert isinstance(residual, Residual)
        x, fx, *bottom = inputs
        omega, dropout = _omega(residual), residual.dropout
        assert omega is not None
        if residual not in self.kept:
            omega.fill_(self.following)
            self.omegas.append(self.following)
        # Var(f_i) is of the branch after dropout. It is dropped out here, so the module's own dropout must pass it on.
        fx = (dropout.dropout if isinstance(dropout, StochasticBranch) else dropout)(fx)
        dropout.eval()
        self.following = math.sqrt(self._variance(x * omega) + self._variance(fx))
        return x, fx, *bottom

    def _variance(self, x: Tensor) -> float:
        real = x[self.mask]
        return float(real.to(torch.promote_types(real.dtype, torch.float32)).var(correction=0))
