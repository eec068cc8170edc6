from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.model.histories import D, Tripled, combining, layers, norm_of, run, stirred, stream, weighted
from ziggurat.model.history.base import weighted_sum
from ziggurat.model.history.kinds import Dlcl, average, dense
from ziggurat.model.roles import Role, assign_roles
from ziggurat.system.errors import ConfigError

L = 4
OPTIONS: list[dict[str, Any]] = [
    {},
    {"normalize_embedding": True},
    {"softmax": True},
    {"window": 1},
    {"window": 3, "softmax": True},
    {"groups": 2},
    {"groups": D, "softmax": True, "window": 2},
    {"dropout": Tripled},
    {"learnable": False},
]


@pytest.fixture
def default_fp64() -> Iterator[None]:
    """New parameters are fp64, so that 1/3 is not rounded to fp32."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def written_out(history: Any, stack: list[Any], x: Tensor, options: dict[str, Any]) -> tuple[list[Tensor], Tensor]:
    """Return x_{l+1} = G_l(y_0..y_l) from W and the norms' gains and biases, in loops."""
    outputs, combinations = [x], []
    for l in range(len(stack) + 1):  # noqa: E741
        first = max(0, l + 1 - options["window"]) if options.get("window") else 0
        terms = outputs[first:]
        if options["norm_at"] == "sources":
            terms = [norm_of(history, k, outputs[k]) for k in range(first, l + 1)]
        weights = [history.weight[l, k] for k in range(first, l + 1)]
        total = weighted(weights, terms, softmax=options.get("softmax", False))
        if options["norm_at"] == "consumers":
            total = norm_of(history, l, total)
        combinations.append(3 * total if options.get("dropout") is Tripled else total)
        if l < len(stack):
            outputs.append(stack[l](combinations[-1]))
    return combinations[:-1], combinations[-1]


@pytest.mark.parametrize("norm_at", ["sources", "consumers", "none"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_equals_the_written_out_formula_with_its_gradients(options: dict[str, Any], norm_at: str) -> None:
    options = {**options, "norm_at": norm_at}
    history, stack = stirred(Dlcl(combining(L, **options))), layers(L)
    x = stream().requires_grad_()
    leaves = [x, *history.parameters()]
    got_read, got = run(history, stack, x)
    read, expected = written_out(history, stack, x, options)
    torch.testing.assert_close([*got_read, got], [*read, expected], atol=1e-10, rtol=0)
    direction = stream(seed=3)
    got_gradients = torch.autograd.grad((got * direction).sum(), leaves)
    gradients = torch.autograd.grad((expected * direction).sum(), leaves)
    torch.testing.assert_close(got_gradients, gradients, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("per_channel", [False, True])
def test_the_weighted_sum_differentiates_as_written(per_channel: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    weights = torch.randn(3, *([D] if per_channel else []), generator=generator, dtype=torch.float64)
    terms = [torch.randn(2, 1, D, generator=generator, dtype=torch.float64) for _ in range(3)]
    terms[1] = terms[1].expand(2, 1, D)
    leaves = [t.clone().requires_grad_() for t in (weights, *terms)]
    assert torch.autograd.gradcheck(lambda w, *ys: weighted_sum(w, ys), leaves)


def test_the_weighted_sum_keeps_the_streams_dtype_and_full_precision_of_weight_gradients() -> None:
    weights = torch.tensor([0.25, 0.5], requires_grad=True)
    low = [stream(k).bfloat16().requires_grad_() for k in (1, 2)]
    total = weighted_sum(weights, low)
    assert total.dtype == torch.bfloat16
    total.backward(torch.ones_like(total))
    assert weights.grad is not None
    torch.testing.assert_close(weights.grad, torch.stack([y.detach().double().sum() for y in low]).float())
    assert low[0].grad is not None
    assert low[0].grad.dtype == torch.bfloat16
    mixed = weighted_sum(weights, [low[0], stream(2).float()])
    assert mixed.dtype == torch.float32
    mixed.sum().backward()
    with pytest.raises(ValueError):
        weighted_sum(weights, [low[0]])


def test_only_weights_and_layer_outputs_are_saved_for_backward() -> None:
    history = stirred(Dlcl(combining(L, norm_at="none")))
    past = history.start(stream().requires_grad_())
    for _ in range(L):
        past = history.push(past, stream().requires_grad_())
    own = {y.data_ptr() for y in past.kept}
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        history.output(past)
    assert sum(tensor.numel() >= stream().numel() for tensor in saved) == L + 1
    assert all(tensor.data_ptr() in own for tensor in saved if tensor.numel() >= stream().numel())


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("groups", [1, 3])
def test_weights_over_the_layers_start_uniform_with_sum_1(softmax: bool, window: int | None, groups: int) -> None:
    weight = Dlcl(combining(L, softmax=softmax, window=window, groups=groups)).weight
    assert weight.shape == ((L + 1, L + 1) if groups == 1 else (L + 1, L + 1, groups))
    for row in range(L + 1):
        read = weight[row, max(0, row + 1 - (window or L + 1)) : row + 1]
        share = read.softmax(0) if softmax else read
        torch.testing.assert_close(share, torch.full_like(share, 1 / len(share)))


@pytest.mark.parametrize("options", [{}, {"softmax": True}, {"groups": 2}, {"window": 2}], ids=str)
@pytest.mark.parametrize("norm_at", ["sources", "consumers"])
def test_weights_of_later_layers_or_out_of_the_window_are_never_read(options: dict[str, Any], norm_at: str) -> None:
    clean, spoilt = (stirred(Dlcl(combining(L, norm_at=norm_at, **options))) for _ in range(2))
    read = torch.ones(L + 1, L + 1, dtype=torch.bool).tril()
    if "window" in options:
        read = read.triu(1 - options["window"])
    with torch.no_grad():
        spoilt.weight[~read] = float("nan")
    results = []
    for history in (clean, spoilt):
        _, output = run(history, layers(L), stream())
        output.sum().backward()
        results.append((output, history.weight.grad))
    torch.testing.assert_close(results[0], results[1], atol=0, rtol=0)
    assert not results[0][1][~read].any()
    if options.get("softmax"):
        read[0] = False  # the softmax of one logit is 1, whatever it is
    assert results[0][1][read].all()


def test_other_starts() -> None:
    one, last = (Dlcl(combining(L, start=start)).weight for start in ("one", "last"))
    assert torch.equal(one, torch.ones(L + 1, L + 1).tril())
    assert torch.equal(last, torch.eye(L + 1))
    # A softmax sums to 1 and cannot express either: `one` becomes uniform, and `last` leaves 5 % to all others
    # together.
    one, last = (Dlcl(combining(L, start=start, softmax=True)).weight for start in ("one", "last"))
    for row in range(L + 1):
        torch.testing.assert_close(one[row, : row + 1].softmax(0), torch.full((row + 1,), 1 / (row + 1)))
        expected = torch.full((row + 1,), 0.05 / max(row, 1))
        expected[-1] = 0.95 if row else 1.0
        torch.testing.assert_close(last[row, : row + 1].softmax(0), expected)


@pytest.mark.parametrize(
    ("make", "combined"),
    [(dense, sum), (average, lambda outputs: sum(outputs) / len(outputs))],
    ids=["dense", "average"],
)
def test_fixed_weights_give_the_sum_or_the_mean_of_all_lower_layers(
    make: Any, combined: Any, default_fp64: None
) -> None:
    options = {"norm_at": "none", "start": "last", "softmax": True, "learnable": True}  # only the first counts here
    history, stack, x = make(combining(L, **options)), layers(L), stream()
    outputs = [x]
    for layer in stack:
        outputs.append(layer(combined(outputs)))
    torch.testing.assert_close(run(history, stack, x)[1], combined(outputs), atol=1e-10, rtol=0)


@pytest.mark.parametrize("make", [dense, average])
def test_fixed_weights_are_state_but_not_parameters(make: Any) -> None:
    history = make(combining(L, softmax=True, start="last"))
    assert "weight" in history.state_dict()
    assert {slot.role for slot in assign_roles(history)} == {Role.NORM_GAIN, Role.NORM_BIAS}
    assert sum(p.numel() for p in history.parameters()) == 2 * D * L
    run(history.double(), layers(L), stream())[1].sum().backward()


@pytest.mark.parametrize("norm_at", ["sources", "consumers"])
@pytest.mark.parametrize("normalize_embedding", [False, True])
def test_the_published_number_of_parameters(norm_at: str, normalize_embedding: bool) -> None:
    extra = 0
    for depth in (30, 6):  # one LN per layer, 36 in all, and both square matrices
        options = {"norm_at": norm_at, "normalize_embedding": normalize_embedding}
        history = Dlcl(combining(depth, **options))
        slots = assign_roles(history)
        assert [slot.name for slot in slots if slot.role is Role.WIRING] == ["weight"]
        extra += sum(slot.values.numel() for slot in slots)
    assert extra == 31**2 + 7**2 + 2 * D * (36 + 2 * normalize_embedding)


def test_the_window_releases_older_outputs() -> None:
    history = Dlcl(combining(L, window=2))
    past = history.start(stream().float())
    for _ in range(L):
        past = history.push(past, stream().float())
        assert len(past.kept) == 2


def old_tensors(history: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in history.named_parameters()}


@pytest.mark.parametrize("norm_at", ["sources", "consumers"])
@pytest.mark.parametrize("options", [{}, {"softmax": True}, {"groups": 2}, {"normalize_embedding": True}], ids=str)
def test_growth_keeps_the_weights_of_old_layers_and_adds_uniform_ones(options: dict[str, Any], norm_at: str) -> None:
    old = stirred(Dlcl(combining(2, norm_at=norm_at, **options)))
    new = stirred(Dlcl(combining(5, norm_at=norm_at, **options)), seed=8)
    before = old_tensors(old)
    after = new.extend(before, 2)
    assert {name: v.shape for name, v in after.items()} == {name: p.shape for name, p in new.named_parameters()}
    assert torch.equal(after["weight"][:3, :3], before["weight"])
    for row in (3, 4, 5):
        read = after["weight"][row, : row + 1]
        share = read.softmax(0) if options.get("softmax") else read
        torch.testing.assert_close(share, torch.full_like(share, 1 / (row + 1)), atol=1e-7, rtol=0)
    for name, values in after.items():
        if name.startswith("norms"):
            _, k, part = name.split(".")
            assert torch.equal(values, before[f"norms.{min(int(k), 2)}.{part}"])
    assert not {v.data_ptr() for v in after.values()} & {v.data_ptr() for v in before.values()}
    # The first added layer reads the former output of the shallow stack.
    new.load_state_dict(after)
    stack = layers(5)
    assert torch.equal(run(new, stack, stream())[0][2], run(old, stack[:2], stream())[1])


def test_growth_of_fixed_weights_gives_only_the_norms() -> None:
    old, new = stirred(dense(combining(2))), dense(combining(4)).double()
    after = new.extend(old_tensors(old), 2)
    assert after.keys() == dict(new.named_parameters()).keys()
    assert torch.equal(new.weight, torch.ones(5, 5, dtype=torch.float64).tril())


def test_growth_from_another_history_names_what_is_missing() -> None:
    new = Dlcl(combining(4))
    with pytest.raises(ConfigError, match=r"`norms\.1\.weight` of the shallow model's history is missing"):
        new.extend({}, 2)
    tensors = old_tensors(Dlcl(combining(2)))
    with pytest.raises(ConfigError, match=r"`norms\.3\.weight`"):
        new.extend(tensors, 3)
    with pytest.raises(ConfigError, match=r"`weight` .* has shape \[3, 3\], but shape \[3, 3, 2\] is needed"):
        Dlcl(combining(4, groups=2)).extend(tensors, 2)
