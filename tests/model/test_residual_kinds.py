"""Every residual kind compared with float64 references written from the formulas."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import pytest
import torch
from torch import Tensor, nn

from ziggurat.config.kinds import RESIDUALS, ResidualKind
from ziggurat.model.dropout import Dropout, StochasticBranch
from ziggurat.model.kinds import RESIDUAL
from ziggurat.model.linear import ShiftedLinear
from ziggurat.model.residual import kinds as residual
from ziggurat.model.residual.base import Residual, ResidualOptions, ScaleNorm, ShiftScale, SublayerPosition
from ziggurat.model.residual.kinds import deepnorm_constants
from ziggurat.model.roles import Role, assign_roles

HERE = "tests/model/test_residual_kinds.py"
WIDTH, N, M = 6, 60, 12
EPSILON = 1e-5
SIDES = {"encoder": (True, False), "decoder": (True, True, False), "merged decoder": (True, False)}
Branch = Callable[[Tensor], Tensor]


class Masking(nn.Module):
    """A stand-in for dropout with a fixed mask, so that a reference can show where dropout acts."""

    mask = torch.tensor([0.0, 2.0, 2.0, 0.0, 2.0, 2.0], dtype=torch.float64)

    def forward(self, fx: Tensor, residual: Tensor | None = None) -> Tensor:
        return fx * self.mask if residual is None else residual + fx * self.mask


def drop(fx: Tensor) -> Tensor:
    return fx * Masking.mask


def ln(x: Tensor, norm: nn.Module | None) -> Tensor:
    """g (x - mean) / sqrt(variance + epsilon) + b over the last axis, with biased variance."""
    assert isinstance(norm, nn.LayerNorm)
    mean = x.sum(-1, keepdim=True) / WIDTH
    variance = ((x - mean) ** 2).sum(-1, keepdim=True) / WIDTH
    return norm.weight * (x - mean) / (variance + EPSILON).sqrt() + norm.bias


def test_scale_norm_gives_one_length_to_every_position() -> None:
    """Nguyen and Salazar 2019, section 2.2: g x / |x|, g one number from sqrt(d)."""
    norm = ScaleNorm(WIDTH, 1e-30).double()
    assert norm.length.shape == (1,)
    assert float(norm.length.detach()) == pytest.approx(math.sqrt(WIDTH))
    with torch.no_grad():
        norm.length.fill_(1.7)
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64)
    for row, found in zip(x.flatten(0, 1).tolist(), norm(x).flatten(0, 1).tolist(), strict=True):
        length = math.sqrt(math.fsum(value * value for value in row))
        assert found == pytest.approx([1.7 * value / length for value in row], rel=1e-12)
    assert bool((norm(torch.zeros(2, WIDTH, dtype=torch.float64)) == 0).all())


def material(**options: object) -> ResidualOptions:
    return ResidualOptions(WIDTH, Masking, lambda: nn.LayerNorm(WIDTH, eps=EPSILON), **options)  # type: ignore[arg-type]


def place(sublayer: int, side: str = "encoder", layer: int = 1) -> SublayerPosition:
    attentions = SIDES[side]
    return SublayerPosition("decoder" in side, layer, sublayer, len(attentions), attentions[sublayer], N, M)


def layer_of(
    make: Callable[[SublayerPosition, ResidualOptions], Residual],
    side: str = "encoder",
    number: int = 1,
    **options: object,
) -> nn.ModuleList:
    """The Residuals of one layer with every parameter redrawn, because initial ones and zeros would hide mistakes."""
    shared = material(**options)
    kinds = nn.ModuleList(make(place(i, side, number), shared) for i in range(len(SIDES[side]))).double()
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for parameter in kinds.parameters():
            parameter.normal_(0.5, 1.0, generator=generator)
    return kinds


def branches(count: int) -> list[Branch]:
    """Functions that stand in for sub-layers."""
    generator = torch.Generator().manual_seed(7)
    maps = [torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) for _ in range(count)]
    return [lambda x, w=w: torch.tanh(x @ w) + 0.3 for w in maps]  # type: ignore[misc]


def stream(*shape: int) -> Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def through(kinds: Sequence[Residual] | nn.ModuleList, functions: Sequence[Branch], x: Tensor) -> Tensor:
    """A layer as models.layers runs it."""
    below = x
    for kind, f in zip(kinds, functions, strict=True):
        x = kind(x, f(kind.enter(x)), below)  # type: ignore[operator]
    return x


def deepnorm_reference(x: Tensor, f: Branch, r: Residual, below: Tensor, at: SublayerPosition) -> Tensor:
    alpha = (3 * M) ** (1 / 4) if at.decoder else 0.81 * (N**4 * M) ** (1 / 16)
    return ln(alpha * x + drop(f(x)), r.out_norm)


def lingvo_reference(x: Tensor, f: Branch, r: Residual, below: Tensor, at: SublayerPosition) -> Tensor:
    u = ln(x, r.in_norm)
    return (u if at.attention else x) + drop(f(u))


def b2t_reference(x: Tensor, f: Branch, r: Residual, below: Tensor, at: SublayerPosition) -> Tensor:
    bypass = 0 if at.attention else below  # the feed-forward network comes last
    return ln(x + drop(f(x)) + bypass, r.out_norm)


def hybrid_reference(x: Tensor, f: Branch, r: Residual, below: Tensor, at: SublayerPosition) -> Tensor:
    u = x if at.attention else ln(x, r.in_norm)
    return u + drop(f(u))


def keel_reference(x: Tensor, f: Branch, r: Residual, below: Tensor, at: SublayerPosition) -> Tensor:
    if at.layer == 1:
        y = x + drop(f(ln(x, r.in_norm)))
        return y if at.sublayer == 0 else ln(y, r.out_norm)
    alpha = at.sublayers * (M if at.decoder else N)
    return ln(alpha * x + drop(f(ln(x, r.in_norm))), r.out_norm)


REFERENCES: dict[str, Callable[[Tensor, Branch, Residual, Tensor, SublayerPosition], Tensor]] = {
    "post_norm": lambda x, f, r, below, at: ln(x + drop(f(x)), r.out_norm),
    "pre_norm": lambda x, f, r, below, at: x + drop(f(ln(x, r.in_norm))),
    "no_norm": lambda x, f, r, below, at: x + drop(f(x)),
    "lingvo": lingvo_reference,
    "no_skip": lambda x, f, r, below, at: drop(f(ln(x, r.in_norm))),
    "admin": lambda x, f, r, below, at: ln(r.skip * x + drop(f(x)), r.out_norm),  # type: ignore[operator]
    "deepnorm": deepnorm_reference,
    "branch_norm": lambda x, f, r, below, at: ln(x + drop(f(x)), r.out_norm),
    "rezero": lambda x, f, r, below, at: x + r.branch * drop(f(x)),  # type: ignore[operator]
    "layer_scale": lambda x, f, r, below, at: x + r.branch * drop(f(ln(x, r.in_norm))),  # type: ignore[operator]
    "ln_scaling": lambda x, f, r, below, at: x + drop(f(ln(x, r.in_norm.norm) / at.layer**0.5)),  # type: ignore[union-attr]
    "peri": lambda x, f, r, below, at: x + drop(ln(f(ln(x, r.in_norm)), r.branch_norm)),
    "res_post": lambda x, f, r, below, at: x + drop(ln(f(x), r.branch_norm)),
    "b2t": b2t_reference,
    "keel": keel_reference,
    "hybrid": hybrid_reference,
    "fixup": lambda x, f, r, below, at: x + r.branch * drop(f(x)),  # type: ignore[operator]
}
"""REFERENCES are one sub-layer of each kind: (stream, branch, the Residual for its parameters, layer input, place)."""


STREAMS = {"hyper", "manifold_hyper", "siamese"}
"""STREAMS are kinds with several streams; their references are below."""


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", REFERENCES)
def test_a_layer_follows_the_formula(name: str, side: str, number: int) -> None:
    kinds, functions, x = layer_of(getattr(residual, name), side, number), branches(len(SIDES[side])), stream(2, 3)
    expected = below = x
    for i, f in enumerate(functions):
        expected = REFERENCES[name](expected, f, kinds[i], below, place(i, side, number))  # type: ignore[arg-type]
    torch.testing.assert_close(through(kinds, functions, x), expected, atol=1e-10, rtol=0)


STARTS: dict[str, dict[str, float]] = {
    "admin": {"skip": 1.0},
    "rezero": {"branch": 0.0},
    "layer_scale": {"branch": 0.1},
    "fixup": {"branch": 1.0},
}
"""STARTS are the parameters of a kind besides its norms, with their initial values in a decoder of 12 layers."""
ONE_PER_LAYER = {"rezero"}
"""ONE_PER_LAYER are kinds whose parameters are shared by all sub-layers of a layer."""


@pytest.mark.parametrize("kind", [kind for kind in get_args(ResidualKind) if kind not in STREAMS])
def test_every_kind_has_a_formula_and_the_documented_start(kind: ResidualKind) -> None:
    make, shared = RESIDUAL[kind].make, material()
    formulas = [getattr(residual, name) for name in REFERENCES]
    assert make in formulas, f"residual `{kind}` has no formula: write it, with dropout, into REFERENCES ({HERE})"
    per_position = [dict(make(place(i, "decoder"), shared).named_parameters(recurse=False)) for i in range(3)]
    for learned in per_position:
        told = STARTS.get(kind, {})
        assert learned.keys() == told.keys(), f"residual `{kind}` learns {[*learned]}, not {[*told]}: STARTS ({HERE})"
        for name, values in learned.items():
            torch.testing.assert_close(values.detach(), torch.full(values.shape, told[name]))
    own = {id(values) for learned in per_position for values in learned.values()}
    expected = 1 if kind in ONE_PER_LAYER else sum(map(len, per_position))
    assert len(own) == expected, f"residual `{kind}` learns {len(own)} parameters per layer: ONE_PER_LAYER ({HERE})"


@pytest.mark.parametrize("kind", get_args(ResidualKind))
@pytest.mark.parametrize("decoder", [False, True])
def test_the_row_of_a_kind_states_what_its_constants_depend_on(kind: ResidualKind, decoder: bool) -> None:
    x, fx, below = stream(2, 3, 2) if kind in STREAMS else stream(2, 3), stream(2, 3), stream(2, 3) + 1
    shared = material(streams=2)

    def residuals_of(layer: int, times: int = 1) -> list[Residual]:
        places = [SublayerPosition(decoder, layer, i, 2, i == 0, times * N, times * M) for i in range(2)]
        return [RESIDUAL[kind].make(place, shared).double() for place in places]

    def results(residuals: list[Residual]) -> Tensor:
        for one, like in zip(residuals, residuals_of(3), strict=True):
            one.load_state_dict(like.state_dict())
        return torch.cat([part.flatten() for r in residuals for part in (r.enter(x), r(x, fx, below))])

    def parameters(layer: int) -> list[list[str]]:
        return [[*one.state_dict()] for one in residuals_of(layer)]

    facts = {
        "depth_constants": not torch.equal(results(residuals_of(3)), results(residuals_of(3, times=2))),
        "layer_constants": not torch.equal(results(residuals_of(3)), results(residuals_of(4))),
        "first_differs": parameters(1) != parameters(3),
        "layer_input": any(residual.bypass for residual in residuals_of(3)),
    }
    for fact, true in facts.items():
        assert getattr(RESIDUALS[kind], fact) == true, (
            f"residual `{kind}`: `{fact}` is {true} (ziggurat/config/kinds.py)"
        )


@pytest.mark.parametrize("name", [*REFERENCES, *sorted(STREAMS)])
def test_every_parameter_has_a_role(name: str) -> None:
    kinds = layer_of(getattr(residual, name), streams=2, dynamic=True, stream_start="streams")
    roles = {slot.name.rsplit(".", 1)[1]: slot.role for slot in assign_roles(kinds)}
    assert {roles.pop(part) for part in ("weight", "bias") if part in roles} <= {Role.NORM_GAIN, Role.NORM_BIAS}
    assert set(roles.values()) <= {Role.WIRING}


def test_deepnorm_constants_of_60_12() -> None:
    assert deepnorm_constants(60, 12, decoder=False) == pytest.approx((2.633, 0.2676), abs=1e-3)
    assert deepnorm_constants(60, 12, decoder=True) == pytest.approx((2.449, 0.2887), abs=1e-3)
    assert deepnorm_constants(60, 12, decoder=False)[1] == pytest.approx(0.87 * (60**4 * 12) ** (-1 / 16))
    assert deepnorm_constants(60, 12, decoder=True)[1] == pytest.approx((12 * 12) ** -0.25)
    assert isinstance(residual.deepnorm(place(0), material()).skip, float)


@pytest.mark.parametrize(("update", "factor"), [(1, 0.01), (37, 0.37), (100, 1.0), (4000, 1.0)])
def test_branch_norm_grows_its_branches_only_in_training(update: int, factor: float) -> None:
    """LN(x + min(1, t / T) f(x)); in evaluation it is post-norm, and t is not saved with it."""
    kind = residual.branch_norm(place(0), material(branch_updates=100)).double()
    assert isinstance(kind, residual.BranchNorm)
    x, (f,) = stream(2, 3), branches(1)
    assert kind.train().state_dict().keys() == {"out_norm.weight", "out_norm.bias"}
    torch.testing.assert_close(kind(x, f(x), x), ln(x + drop(f(x)), kind.out_norm), atol=1e-12, rtol=0)
    kind.begin(update)
    torch.testing.assert_close(kind(x, f(x), x), ln(x + factor * drop(f(x)), kind.out_norm), atol=1e-12, rtol=0)
    torch.testing.assert_close(kind.eval()(x, f(x), x), ln(x + drop(f(x)), kind.out_norm), atol=1e-12, rtol=0)


@pytest.mark.parametrize("trainable", [True, False])
def test_admin_starts_as_post_norm_and_omega_is_trained_on_request(trainable: bool) -> None:
    kind = residual.admin(place(0), material(omega_trainable=trainable)).double()
    assert isinstance(kind.skip, nn.Parameter)
    assert kind.skip.shape == (WIDTH,)
    assert kind.skip.requires_grad is trainable
    x, (f,) = stream(2, 3), branches(1)
    plain = residual.post_norm(place(0), material()).double()
    assert torch.equal(kind(x, f(x), x), plain(x, f(x), x))


def test_rezero_has_one_gate_per_layer_that_starts_closed() -> None:
    layers = []
    for number in (1, 2):
        shared = material()
        layers.append([residual.rezero(place(i, "decoder", number), shared) for i in range(3)])
    gates = [{id(kind.branch) for kind in layer} for layer in layers]
    assert [len(layer) for layer in gates] == [1, 1]
    assert gates[0] != gates[1]
    x = stream(2, 3)
    kinds = nn.ModuleList(layers[0]).double()
    assert torch.equal(through(kinds, branches(3), x), x)
    assert [(slot.role, slot.values.shape) for slot in assign_roles(kinds)] == [(Role.WIRING, (1,))]


@pytest.mark.parametrize(("depth", "start"), [(1, 0.1), (18, 0.1), (19, 1e-5), (24, 1e-5), (25, 1e-6), (100, 1e-6)])
def test_layer_scale_starts_by_the_depth_of_its_stack(depth: int, start: float) -> None:
    for decoder, depths in ((False, (depth, 3)), (True, (3, depth))):
        at = SublayerPosition(decoder, 1, 0, 2, True, *depths)
        for given, expected in ((None, start), (0.5, 0.5)):
            kind = residual.layer_scale(at, material(layer_scale=given))
            assert torch.equal(kind.branch, torch.full((WIDTH,), expected))  # type: ignore[arg-type]


def test_lingvo_attention_is_blind_to_affine_changes_of_its_input_unlike_pre_norm() -> None:
    exact = ResidualOptions(WIDTH, Masking, lambda: nn.LayerNorm(WIDTH, eps=0.0))
    (f,), x = branches(1), stream(2, 3)
    changed = 2.5 * x - 1.5

    def output(make: Callable[[SublayerPosition, ResidualOptions], Residual], sublayer: int, at: Tensor) -> Tensor:
        kind = make(place(sublayer), exact).double()
        return kind(at, f(kind.enter(at)), at)  # type: ignore[no-any-return]

    torch.testing.assert_close(output(residual.lingvo, 0, changed), output(residual.lingvo, 0, x), atol=1e-10, rtol=0)
    for make, sublayer in ((residual.pre_norm, 0), (residual.lingvo, 1)):
        assert (output(make, sublayer, changed) - output(make, sublayer, x)).abs().min() > 1e-3


def hyper_reference(h: Tensor, f: Branch, r: residual.HyperConnection) -> Tensor:
    """Equations 2 to 5 and 10 to 13 of Zhu et al. 2024 for one position, element by element; `h` is [n, d]."""
    n = len(h)
    a, b = r.alpha.clone(), r.beta.clone()
    if r.stream_norm is not None:
        for i in range(n):
            seen = ln(h[i], r.stream_norm)
            b[i] += r.beta_scale[0] * torch.tanh((seen * r.beta_map).sum())
            for j in range(n + 1):
                a[i, j] += r.alpha_scale[0] * torch.tanh((seen * r.alpha_map[:, j]).sum())
    read = sum(a[i, 0] * h[i] for i in range(n))
    fx = drop(f(ln(read, r.in_norm)))  # type: ignore[arg-type]
    return torch.stack([sum(a[i, 1 + j] * h[i] for i in range(n)) + b[j] * fx for j in range(n)])  # type: ignore[misc]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("streams", [1, 2, 4])
def test_hyper_connections_follow_the_equations(streams: int, dynamic: bool) -> None:
    kinds, functions, x = layer_of(residual.hyper, streams=streams, dynamic=dynamic), branches(2), stream(2, 3, streams)
    expected = torch.empty_like(x)
    with torch.no_grad():
        for b in range(2):
            for t in range(3):
                h = x[b, t]
                for kind, f in zip(kinds, functions, strict=True):
                    h = hyper_reference(h, f, kind)  # type: ignore[arg-type]
                expected[b, t] = h
        torch.testing.assert_close(through(kinds, functions, x), expected, atol=1e-10, rtol=0)


def test_hyper_connections_start_as_specified() -> None:
    kind = residual.hyper(SublayerPosition(True, 3, 1, 3, True, N, M), material(streams=4, dynamic=True))
    assert isinstance(kind, residual.HyperConnection)
    k = 2 * 3 + 1
    assert torch.equal(kind.alpha[:, 0], torch.eye(4)[k % 4])
    assert torch.equal(kind.alpha[:, 1:], torch.eye(4))
    assert torch.equal(kind.beta, torch.ones(4))
    for scale, weight in ((kind.alpha_scale, kind.alpha_map), (kind.beta_scale, kind.beta_map)):
        assert torch.equal(scale, torch.full((1,), 0.01))
        assert not weight.any()


@pytest.mark.parametrize("streams", [1, 3])
def test_hyper_connections_start_as_copies_of_a_pre_norm_stream(streams: int) -> None:
    """One stream is pre-norm bit by bit; n streams are n copies of its stream, so their sum is n times it."""
    x, functions = stream(2, 3), branches(3)
    plain: list[Residual] = []
    hyper: list[Residual] = []
    for layer in range(1, 4):
        plain += [residual.pre_norm(place(i, "decoder", layer), material()).double() for i in range(3)]
        parts = material(streams=streams, dynamic=streams > 1)
        hyper += [residual.hyper(place(i, "decoder", layer), parts).double() for i in range(3)]
    y = through(plain, 3 * functions, x)
    got = through(hyper, 3 * functions, x.unsqueeze(-2).expand(2, 3, streams, WIDTH)).sum(-2)
    if streams == 1:
        assert torch.equal(got, y)
    torch.testing.assert_close(got, streams * y, atol=1e-10, rtol=0)


@pytest.mark.parametrize("dynamic", [False, True])
def test_streams_keep_their_precision_under_autocast(dynamic: bool) -> None:
    parts = ResidualOptions(WIDTH, lambda: Dropout(0.0), lambda: nn.LayerNorm(WIDTH), streams=3, dynamic=dynamic)
    kind = residual.hyper(place(0), parts)
    x = stream(2, 3, 3).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = kind(x, torch.zeros(2, 3, WIDTH, dtype=torch.bfloat16), x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, x, atol=1e-6, rtol=0)


def manifold_reference(h: Tensor, f: Branch, r: residual.ManifoldConnection) -> Tensor:
    """Equations 7 to 9 of Xie et al. 2025 for one position, element by element; `h` is [n, d]."""
    n = len(h)
    flat = h.flatten()
    seen = flat / (sum(value * value for value in flat) / len(flat) + 1e-6) ** 0.5  # type: ignore[operator]
    c = [float((seen * row).sum()) for row in r.weight]
    scales = [r.scale[0]] * n + [r.scale[1]] * n + [r.scale[2]] * (len(c) - 2 * n)
    logits = [float(s * value + b) for s, value, b in zip(scales, c, r.bias, strict=True)]
    read = [1 / (1 + math.exp(-x)) for x in logits[:n]]
    write = [2 / (1 + math.exp(-x)) for x in logits[n : 2 * n]]
    rest = [math.exp(x) for x in logits[2 * n :]]
    if r.permutations is None:
        mix = [rest[i * n : (i + 1) * n] for i in range(n)]
        for _ in range(20):
            columns = [sum(row[j] for row in mix) for j in range(n)]
            mix = [[row[j] / columns[j] for j in range(n)] for row in mix]
            mix = [[value / sum(row) for value in row] for row in mix]
    else:
        mix = [[0.0] * n for _ in range(n)]
        for share, order in zip(rest, itertools.permutations(range(n)), strict=True):
            for i, j in enumerate(order):
                mix[i][j] += share / sum(rest)
    fx = drop(f(ln(sum(read[i] * h[i] for i in range(n)), r.in_norm)))  # type: ignore[arg-type]
    return torch.stack([sum(mix[j][i] * h[i] for i in range(n)) + write[j] * fx for j in range(n)])  # type: ignore[misc]


@pytest.mark.parametrize("mixing", ["sinkhorn", "permutations"])
@pytest.mark.parametrize("streams", [1, 2, 4])
def test_manifold_connections_follow_the_equations(streams: int, mixing: str) -> None:
    kinds = layer_of(residual.manifold_hyper, streams=streams, mixing=mixing)
    functions, x = branches(2), stream(2, 3, streams)
    expected = torch.empty_like(x)
    with torch.no_grad():
        for b, t in itertools.product(range(2), range(3)):
            h = x[b, t]
            for kind, f in zip(kinds, functions, strict=True):
                h = manifold_reference(h, f, kind)  # type: ignore[arg-type]
            expected[b, t] = h
        torch.testing.assert_close(through(kinds, functions, x), expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("mixing", ["sinkhorn", "permutations"])
def test_streams_are_mixed_by_a_doubly_stochastic_matrix(mixing: str) -> None:
    kind = layer_of(residual.manifold_hyper, streams=4, mixing=mixing)[0]
    _, mix = kind.writing(stream(2, 3, 4))  # type: ignore[operator]
    assert (mix >= 0).all()
    # Twenty rounds end with the rows; if logits differ by ten or more, the columns have not converged by then.
    for axis, near in ((-1, 1e-6), (-2, 1e-6 if mixing == "permutations" else 0.1)):
        torch.testing.assert_close(mix.sum(axis), torch.ones(2, 3, 4, dtype=mix.dtype), atol=near, rtol=0)


@pytest.mark.parametrize("mixing", ["sinkhorn", "permutations"])
def test_weights_of_streams_are_the_same_under_autocast(mixing: str) -> None:
    kind = layer_of(residual.manifold_hyper, streams=4, mixing=mixing)[0].float()
    x = stream(2, 3, 4).float()
    before = kind.reading(x), *kind.writing(x)  # type: ignore[operator]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        after = kind.reading(x), *kind.writing(x)  # type: ignore[operator]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("mixing", ["sinkhorn", "permutations"])
def test_manifold_connections_start_as_hyper_connections_do(mixing: str) -> None:
    at = SublayerPosition(True, 3, 1, 3, True, N, M)
    kind = residual.manifold_hyper(at, material(streams=4, mixing=mixing)).double()
    x = stream(2, 3, 4)
    read, (write, mix) = kind.reading(x), kind.writing(x)  # type: ignore[operator]
    torch.testing.assert_close(read, torch.eye(4, dtype=read.dtype)[7 % 4].expand_as(read), atol=1e-3, rtol=0)
    torch.testing.assert_close(write, torch.ones_like(write))
    torch.testing.assert_close(mix, torch.eye(4, dtype=mix.dtype).expand_as(mix), atol=1e-3, rtol=0)


def siamese_reference(h: Tensor, f: Branch, r: Any, at: SublayerPosition) -> Tensor:
    """The authors' loop: x = N(x); z = f(N(x + N(y))); x = x + z / c; y = y + z."""
    x, y = ln(h[..., 0, :], r.x_norm), h[..., 1, :]
    z = drop(f(ln(x + ln(y, r.y_norm), r.in_norm)))
    return torch.stack([x + z / (at.sublayers * at.layer) ** 0.5, y + z], -2)


@pytest.mark.parametrize("side", SIDES)
def test_siamese_streams_follow_the_equations(side: str) -> None:
    kinds, functions = layer_of(residual.siamese, side, 3), branches(len(SIDES[side]))
    expected = x = stream(2, 3, 2)
    for i, f in enumerate(functions):
        expected = siamese_reference(expected, f, kinds[i], place(i, side, 3))
    torch.testing.assert_close(through(kinds, functions, x), expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", ["pre_norm", "post_norm", "peri", "deepnorm"])
def test_a_gate_makes_the_stream_smaller_but_not_its_gradient(name: str) -> None:
    """GPAS: the sum times 1 - silu(g), or in post-norm the skipped stream; in the backward pass the factor is 1."""
    kind, (f,) = layer_of(getattr(residual, name))[0], branches(1)
    x = stream(2, 3).requires_grad_()
    plain = kind(x, f(kind.enter(x)), x)
    kind.gate = nn.Parameter(torch.tensor([0.7], dtype=torch.float64))
    gated, smaller = kind(x, f(kind.enter(x)), x), 1 - 0.7 / (1 + math.exp(-0.7))
    if kind.out_norm is None:
        torch.testing.assert_close(gated, smaller * plain)
        above = torch.ones_like(gated)
        torch.testing.assert_close(*(torch.autograd.grad(y, x, above, retain_graph=True) for y in (gated, plain)))
    else:
        alpha = 1.0 if kind.skip is None else kind.skip
        torch.testing.assert_close(gated, ln(smaller * alpha * x + drop(f(x)), kind.out_norm))  # type: ignore[operator]


def test_shifted_linear_and_shift_scale_follow_their_formulas() -> None:
    linear = ShiftedLinear(WIDTH, 3)
    assert linear.bias is None
    assert not linear.shift.any()
    nn.init.normal_(linear.weight)
    linear.double()
    x = stream(2)
    nn.init.constant_(linear.shift, 0.7)
    w = linear.weight.tolist()
    expected = [[sum((float(x[b, i]) + 0.7) * w[o][i] for i in range(WIDTH)) for o in range(3)] for b in range(2)]
    for b in range(2):
        assert linear(x)[b].tolist() == pytest.approx(expected[b], abs=1e-10)
    for scaled in (True, False):
        end = ShiftScale(scaled).double()
        assert torch.equal(end(x), x)
        nn.init.constant_(end.shift, 0.7)
        if end.scale is not None:
            nn.init.constant_(end.scale, -2.0)
        torch.testing.assert_close(end(x), (x + 0.7) * (-2.0 if scaled else 1.0))
        assert [slot.role for slot in assign_roles(end)] == [Role.WIRING] * (1 + scaled)


@pytest.mark.parametrize(("unit", "batch"), [("batch", 1), ("batch", 5), ("sample", 100)])
def test_stochastic_branches_are_dropped_with_their_probability(unit: Literal["batch", "sample"], batch: int) -> None:
    torch.manual_seed(0)
    p, draws = 0.3, 4000
    branch = StochasticBranch(Dropout(0.0), p, unit)
    fx = torch.rand(batch, 2, 3) + 1
    decisions = []
    for _ in range(draws if unit == "batch" else draws // batch):
        ratio = branch(fx) / fx
        together = ratio.reshape(1 if unit == "batch" else batch, -1)
        torch.testing.assert_close(together, together[:, :1].expand_as(together))
        decisions.append(together[:, 0])
    values = torch.cat(decisions)
    assert len(values) == draws
    dropped = values == 0
    torch.testing.assert_close(values[~dropped], torch.full_like(values[~dropped], 1 / (1 - p)))
    # Within four standard deviations.
    assert float(dropped.float().mean()) == pytest.approx(p, abs=4 * (p * (1 - p) / draws) ** 0.5)


def test_stochastic_branches_add_the_residual_or_are_the_identity() -> None:
    fx, x = stream(4, 3).requires_grad_(), stream(4, 3) + 1
    for p, training in ((0.0, True), (0.9, False)):
        branch = StochasticBranch(Dropout(0.0), p, "sample").train(training)
        assert torch.equal(branch(fx), fx)
        assert torch.equal(branch(fx, residual=x), x + fx)
    torch.manual_seed(1)
    branch = StochasticBranch(Dropout(0.0), 0.5, "sample")
    y = branch(fx, residual=x)
    dropped = (y == x).flatten(1).all(1)
    assert 0 < dropped.sum() < 4
    torch.testing.assert_close(y[~dropped], (x + 2 * fx)[~dropped])
    (gradient,) = torch.autograd.grad(y.sum(), fx)
    torch.testing.assert_close(gradient, torch.where(dropped[:, None, None], 0.0, 2.0).double().expand_as(fx))
