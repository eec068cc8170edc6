from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ziggurat.config import ModelConfig
from ziggurat.model.build import build_model, stack_residuals
from ziggurat.model.init import constant_omega, profile_omega
from ziggurat.model.residual.base import Residual
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.system.errors import ConfigError

V = 53
LENGTHS = [17, 9, 13, 17, 5, 11]


def tiny(residual: str = "admin", **more: Any) -> Seq2Seq:
    config: dict[str, Any] = {
        "d_model": 64,
        "d_ff": 128,
        "heads": 2,
        "residual": residual,
        "encoder": {"layers": 5},
        "decoder": {"layers": 4},
        "dropout": {"attention": 0.1, "activation": 0.1},
        "init": {"kind": "admin"} if "admin" in (residual, more.get("decoder", {}).get("residual")) else {},
    }
    return build_model(ModelConfig.model_validate(config | more), V, V, seed=3).double().train()


def batch(extra: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return source, its mask, decoder input and its mask, with `extra` more columns of padding on both sides."""
    generator = torch.Generator().manual_seed(1)
    width = max(LENGTHS)
    source, target = torch.randint(4, V, (2, len(LENGTHS), width), generator=generator)
    source_mask = torch.arange(width + extra) < torch.tensor(LENGTHS)[:, None]
    target_mask = torch.arange(width + extra) < torch.tensor(LENGTHS[::-1])[:, None]
    source, target = (nn.functional.pad(side, (0, extra), value=1) for side in (source, target))
    return source, source_mask, target, target_mask


def profile(model: Seq2Seq, seed: int = 7, extra: int = 0) -> list[list[float]]:
    source, source_mask, target, target_mask = batch(extra)
    torch.manual_seed(seed)
    stacks = [stack_residuals(model.encoder), stack_residuals(model.decoder)]
    return profile_omega(stacks, lambda: model(source, source_mask, target), [source_mask, target_mask])


class Sums:
    """The inputs of one stack's norms in a forward pass, and the omegas and streams that form them."""

    def __init__(self, stack: nn.Module, mask: Tensor) -> None:
        self.mask = mask
        self.streams: list[Tensor] = []
        self.branches: list[Tensor] = []
        self.omegas: list[Tensor | float] = []
        self.sums: list[Tensor] = []
        for residual in stack_residuals(stack):
            assert residual.out_norm is not None
            residual.register_forward_pre_hook(self._stream)
            residual.out_norm.register_forward_pre_hook(self._sum)

    def _stream(self, residual: nn.Module, joined: tuple[Tensor, ...]) -> None:
        assert isinstance(residual, Residual)
        self.streams.append(joined[0])
        self.omegas.append(1.0 if residual.skip is None else residual.get_parameter("skip").detach())

    def _sum(self, norm: nn.Module, inputs: tuple[Tensor]) -> None:
        self.sums.append(inputs[0])
        self.branches.append(inputs[0] - self.omegas[-1] * self.streams[-1])

    def variance(self, x: Tensor) -> float:
        real = torch.cat([x[row, :length] for row, length in enumerate(self.mask.sum(1).tolist())])
        return float(((real - real.mean()) ** 2).mean())


@torch.no_grad()
def watched(model: Seq2Seq, seed: int = 7) -> tuple[Sums, Sums]:
    """Run another forward pass in training mode with the same random numbers."""
    source, source_mask, target, target_mask = batch()
    encoder, decoder = Sums(model.encoder, source_mask), Sums(model.decoder, target_mask)
    torch.manual_seed(seed)
    model(source, source_mask, target)
    return encoder, decoder


KINDS: list[dict[str, Any]] = [
    {},
    {"decoder": {"layers": 4, "attention": "merged"}},
    {"decoder": {"layers": 4, "attention": "average"}, "norm": "rms"},
    {"encoder": {"layers": 4, "history": "dlcl"}, "memory": "transparent"},
]


@pytest.mark.parametrize("more", KINDS, ids=["plain", "merged", "average-rms", "dlcl-transparent"])
def test_omega_is_the_root_of_the_sum_of_variances(more: dict[str, Any]) -> None:
    model = tiny(**more)
    found = profile(model)
    for omegas, sums, stack in zip(found, watched(model), (model.encoder, model.decoder), strict=True):
        residuals = stack_residuals(stack)
        assert len(omegas) == len(residuals) == len(sums.sums)
        for residual, omega in zip(residuals, omegas, strict=True):
            assert isinstance(residual.skip, Tensor)
            assert torch.equal(residual.skip, torch.full_like(residual.skip, omega))
        assert omegas[0] == 1.0
        branch = [sums.variance(f) for f in sums.branches]
        for i in range(len(omegas) - 1):
            into = omegas[i] ** 2 * sums.variance(sums.streams[i])
            assert omegas[i + 1] ** 2 == pytest.approx(into + branch[i], rel=1e-10)
        if not more:  # a norm's output has variance 1, so only branches add
            assert omegas[1] ** 2 == pytest.approx(sums.variance(sums.streams[0]) + branch[0], rel=1e-10)
            for i in range(1, len(omegas) - 1):
                assert omegas[i + 1] ** 2 - omegas[i] ** 2 == pytest.approx(branch[i], rel=1e-3)
            assert all(below < above for below, above in pairwise(omegas))


def test_the_variances_of_encoder_and_decoder_are_followed_independently() -> None:
    """The decoder starts again at 1; its omegas are the same as if the encoder had none."""
    both = profile(tiny())
    assert both[0][0] == both[1][0] == 1.0
    source, source_mask, target, target_mask = batch()
    model = tiny()
    for residual, omega in zip(stack_residuals(model.encoder), both[0], strict=True):
        nn.init.constant_(residual.get_parameter("skip"), omega)
    alone: list[list[float]] = []
    torch.manual_seed(7)
    alone = profile_omega([stack_residuals(model.decoder)], lambda: model(source, source_mask, target), [target_mask])
    assert alone == both[1:]


def shares(sums: Sums) -> list[float]:
    """Return each branch's share of the variance of the last sum before a norm, tracked through all norms between."""
    found = []
    for start, branch in enumerate(sums.branches):
        part = branch
        for above in range(start + 1, len(sums.sums)):
            root = sums.sums[above - 1].var(-1, correction=0, keepdim=True).sqrt()
            part = sums.omegas[above] * (part - part.mean(-1, keepdim=True)) / root
        found.append(sums.variance(part) / sums.variance(sums.sums[-1]))
    return found


def test_no_late_branch_dominates() -> None:
    """Branch j has the share Var(f_j) / omega_{n+1}^2 of the sum of all n; in plain post-norm the last has Var / (1 +
    Var).
    """
    more = {"encoder": {"layers": 10}, "decoder": {"layers": 10}}
    admin, post = tiny(**more), tiny("post", **more)
    found = profile(admin)
    for omegas, scaled, plain in zip(found, watched(admin), watched(post), strict=True):
        variances = [scaled.variance(f) for f in scaled.branches]
        whole = omegas[-1] ** 2 + variances[-1]
        for share, variance in zip(shares(scaled), variances, strict=True):
            assert share == pytest.approx(variance / whole, rel=0.3)  # branches are slightly correlated
        admin_shares, plain_shares = shares(scaled), shares(plain)
        assert max(admin_shares[-6:]) < 0.1
        assert max(admin_shares[-6:]) < 1.5 * max(admin_shares[:6])
        last = plain.variance(plain.branches[-1])
        assert plain_shares[-1] == pytest.approx(last / (1 + last), rel=0.25)
        assert plain_shares[-1] > 0.2
        assert max(plain_shares[:6]) < 0.02  # the contribution of early branches is forgotten


def test_profiling_again_gives_the_same() -> None:
    model = tiny()
    assert profile(model) == profile(model) == profile(tiny())
    assert profile(model, seed=8) != profile(model)


def test_values_at_padding_do_not_matter() -> None:
    still: dict[str, Any] = {"dropout": {"residual": 0.0, "embedding": 0.0}}
    torch.testing.assert_close(profile(tiny(**still), extra=6), profile(tiny(**still)), atol=1e-12, rtol=0)


def test_the_variance_of_a_branch_includes_its_dropout() -> None:
    """The variance of a branch with dropout is Var / (1-p) if its mean is small."""
    still: dict[str, Any] = {"embedding": 0.0, "attention": 0.0, "activation": 0.0}
    without = profile(tiny(dropout=still | {"residual": 0.0}))
    with_dropout = profile(tiny(dropout=still | {"residual": 0.5}))
    first = [(stack[1] ** 2 - embedding) for stack, embedding in ((without[0], _input()), (with_dropout[0], _input()))]
    assert first[1] / first[0] == pytest.approx(2.0, rel=0.05)


def _input() -> float:
    source, mask, *_ = batch()
    x = tiny().eval().source_embedding(source)[mask].detach()
    return float(((x - x.mean()) ** 2).mean())


def test_profiling_changes_nothing_but_omega() -> None:
    model = tiny()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    profile(model)
    for name, parameter in model.named_parameters():
        assert parameter.grad is None
        assert torch.equal(parameter, before[name]) == (not name.endswith(".skip") or before[name][0] == parameter[0])
    for module in model.modules():
        assert module.training
        assert not module._forward_pre_hooks
    assert sum(name.endswith(".skip") for name in before) == 5 * 2 + 4 * 3


def test_an_interrupted_pass_leaves_no_hook() -> None:
    model = tiny()

    def fail() -> None:
        source, source_mask, *_ = batch()
        model.encode(source, source_mask)
        raise KeyboardInterrupt

    mask = batch()[1]
    with pytest.raises(KeyboardInterrupt):
        profile_omega([stack_residuals(model.encoder)], fail, [mask])
    assert all(module.training and not module._forward_pre_hooks for module in model.modules())


def test_a_stack_without_omega_is_left_alone() -> None:
    model = tiny("post", decoder={"layers": 4, "residual": "admin"})
    encoder, decoder = profile(model)
    assert encoder == []
    assert len(decoder) == 12


def test_stochastic_branches_are_present_while_profiling() -> None:
    plain: dict[str, Any] = {"dropout": {"residual": 0.0, "embedding": 0.0}}
    stochastic: dict[str, Any] = {"dropout": {"residual": 0.0, "embedding": 0.0, "sublayer": 0.9}}
    assert profile(tiny(**stochastic)) == profile(tiny(**plain))


def test_compiled_layers_are_profiled_without_compiling_anything() -> None:
    compiled = tiny()
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    for stack in (compiled.encoder, compiled.decoder):
        for layer in stack.get_submodule("layers").children():
            layer.compile(backend=backend)
    assert profile(compiled) == profile(tiny())
    assert not graphs


@pytest.mark.parametrize(
    ("kind", "formula"),
    [
        ("log", lambda n: math.sqrt((n + 1) / math.log(n + 1) - 1)),
        ("linear", math.sqrt),
        ("one", lambda n: 1.0),
    ],
)
def test_profile_free_omega(kind: str, formula: Callable[[int], float]) -> None:
    model = tiny(init={"kind": "admin", "omega": kind})
    for stack, n in ((model.encoder, 10), (model.decoder, 12)):
        for residual in stack_residuals(stack):
            assert isinstance(residual.skip, Tensor)
            torch.testing.assert_close(residual.skip.float(), torch.full((64,), formula(n)), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("n", "omega"), [(12, 2.02), (36, 3.04), (120, 4.92)])
def test_profile_free_omega_matches_the_published_values(n: int, omega: float) -> None:
    residuals = [Residual(nn.Identity(), skip=nn.Parameter(torch.ones(4))) for _ in range(n)]
    constant_omega(residuals, "log")
    assert residuals[0].get_parameter("skip")[0].item() == pytest.approx(omega, abs=0.006)


def test_admin_needs_its_residual() -> None:
    with pytest.raises((ConfigError, ValueError), match="residual: admin"):
        tiny("post", init={"kind": "admin"})
