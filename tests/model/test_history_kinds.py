from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.model.histories import D, Tripled, combining, layers, norm_of, plain, run, stirred, stream, weighted
from ziggurat.model.history.base import History
from ziggurat.model.history.kinds import Blocks, DepthWeighted, Dlcl, Latest, TopOnly, Transparent
from ziggurat.model.kinds import HISTORY
from ziggurat.model.roles import Role, assign_roles
from ziggurat.system.errors import ConfigError

L = 7


def tensors(history: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in history.named_parameters()}


def assert_equal_with_gradients(history: Any, expected: Any, stack: list[Any], **tolerance: float) -> None:
    """`expected` returns each layer's input and the output for x; compare these, and gradients, with `history`."""
    x = stream().requires_grad_()
    leaves = [x, *history.parameters()]
    got, wanted = run(history, stack, x), expected(x)
    torch.testing.assert_close(got, wanted, atol=1e-10, rtol=0)
    direction = stream(seed=3)
    gradients = [
        torch.autograd.grad((output * direction).sum(), leaves, allow_unused=True) for output in (got[1], wanted[1])
    ]
    torch.testing.assert_close(*gradients, atol=1e-10, rtol=1e-10)


# Blocks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_at", ["sources", "consumers", "none"])
@pytest.mark.parametrize("period", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("options", [{}, {"softmax": True, "window": 2}, {"groups": 3, "dropout": Tripled}], ids=str)
def test_blocks_equal_the_written_out_formula(options: dict[str, Any], period: int, norm_at: str) -> None:
    history, stack = stirred(Blocks(combining(L, period=period, norm_at=norm_at, **options))), layers(L)
    ends = [*range(period, L, period), L]  # the last block can be shorter
    assert history.weight.shape[:2] == (len(ends) + 1, len(ends) + 1)

    def expected(x: Tensor) -> tuple[list[Tensor], Tensor]:
        outputs, read, y = [x], [], x
        for number, layer in enumerate(stack, start=1):
            if number == 1 or number - 1 in ends:
                y = combination(outputs)
            read.append(y)
            y = layer(y)
            if number in ends:
                outputs.append(y)
        return read, combination(outputs)

    def combination(outputs: list[Tensor]) -> Tensor:
        row = len(outputs) - 1
        numbers = list(range(len(outputs)))[-options.get("window", L + 1) :]
        terms = [norm_of(history, b, outputs[b]) if norm_at == "sources" else outputs[b] for b in numbers]
        total = weighted([history.weight[row, b] for b in numbers], terms, softmax=options.get("softmax", False))
        if norm_at == "consumers":
            total = norm_of(history, row, total)
        return 3 * total if "dropout" in options else total

    assert_equal_with_gradients(history, expected, stack)


@pytest.mark.parametrize("norm_at", ["sources", "consumers"])
def test_blocks_of_one_layer_are_dlcl(norm_at: str) -> None:
    blocks, dlcl = (stirred(kind(combining(L, period=1, norm_at=norm_at))) for kind in (Blocks, Dlcl))
    assert torch.equal(run(blocks, layers(L), stream())[1], run(dlcl, layers(L), stream())[1])
    assert tensors(blocks).keys() == tensors(dlcl).keys()


@pytest.mark.parametrize("period", [L, L + 1, 100])
def test_one_block_of_the_last_layer_alone_is_plain_pre_norm(period: int) -> None:
    stack, final_norm = layers(L), nn.LayerNorm(D, eps=1e-9).double()
    without = Blocks(combining(L, period=period, start="last", norm_at="none")).double()
    assert torch.equal(run(without, stack, stream())[1], plain(stack, stream()))
    # The same holds with the block's norm, apart from epsilon, because the final norm cancels it.
    normed = Blocks(combining(L, period=period, start="last", norm=lambda: nn.LayerNorm(D, eps=1e-9))).double()
    got, expected = final_norm(run(normed, stack, stream())[1]), final_norm(plain(stack, stream()))
    torch.testing.assert_close(got, expected, atol=1e-7, rtol=0)


@pytest.mark.parametrize(("old_units", "new_units"), [(4, 6), (4, 5), (2, 6), (4, 10)])
def test_blocks_keep_their_weights_when_they_grow(old_units: int, new_units: int) -> None:
    old = stirred(Blocks(combining(old_units, period=2)))
    new = stirred(Blocks(combining(new_units, period=2)), seed=8)
    before, after = tensors(old), new.extend(tensors(old), old_units)
    b = old_units // 2
    assert torch.equal(after["weight"][: b + 1, : b + 1], before["weight"])
    for row in range(b + 1, len(after["weight"])):
        torch.testing.assert_close(
            after["weight"][row, : row + 1], torch.full((row + 1,), 1 / (row + 1)).double(), atol=1e-7, rtol=0
        )
        assert torch.equal(after[f"norms.{row}.weight"], before[f"norms.{b}.weight"])
    new.load_state_dict(after)
    shallow = run(old, layers(old_units), stream())
    deep = run(new, layers(new_units), stream())
    torch.testing.assert_close([*shallow[0], shallow[1]], deep[0][: old_units + 1], atol=0, rtol=0)


def test_an_incomplete_block_is_filled_before_another_begins() -> None:
    old, new = stirred(Blocks(combining(3, period=2))), Blocks(combining(4, period=2)).double()
    assert tensors(old).keys() == new.extend(tensors(old), 3).keys()
    torch.testing.assert_close(new.extend(tensors(old), 3), tensors(old), atol=0, rtol=0)


# TopOnly -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_at", ["sources", "consumers", "none"])
@pytest.mark.parametrize(
    "options",
    [{}, {"softmax": True}, {"window": 3}, {"groups": 2, "dropout": Tripled}, {"normalize_embedding": True}],
    ids=str,
)
def test_top_only_equals_the_written_out_formula(options: dict[str, Any], norm_at: str) -> None:
    history, stack = stirred(TopOnly(combining(L, norm_at=norm_at, **options))), layers(L)
    assert history.weight.shape == ((L + 1, 2) if "groups" in options else (L + 1,))
    norms = {"none": 0, "consumers": 1, "sources": L + ("normalize_embedding" in options)}[norm_at]
    assert sum(slot.role is Role.NORM_GAIN for slot in assign_roles(history)) == norms

    def expected(x: Tensor) -> tuple[list[Tensor], Tensor]:
        outputs = [x]
        for layer in stack:
            outputs.append(layer(outputs[-1]))
        numbers = list(range(L + 1))[-options.get("window", L + 1) :]
        terms = [norm_of(history, k, outputs[k]) if norm_at == "sources" else outputs[k] for k in numbers]
        total = weighted([history.weight[k] for k in numbers], terms, softmax=options.get("softmax", False))
        if norm_at == "consumers":
            total = norm_of(history, L, total)
        return outputs[:-1], 3 * total if "dropout" in options else total

    assert_equal_with_gradients(history, expected, stack)


def test_top_only_starts_as_its_options_say() -> None:
    torch.testing.assert_close(TopOnly(combining(3)).weight.detach(), torch.full((4,), 0.25))
    torch.testing.assert_close(TopOnly(combining(3, softmax=True)).weight.softmax(0), torch.full((4,), 0.25))
    assert TopOnly(combining(3, start="last")).weight.tolist() == [0, 0, 0, 1]
    assert TopOnly(combining(3, start="one", window=2)).weight.tolist() == [0, 0, 1, 1]
    assert not list(TopOnly(combining(3, learnable=False, norm_at="none")).parameters())


def test_dlcl_at_the_top_only_is_the_transparent_merge_with_the_same_weights() -> None:
    merge = stirred(Transparent(L + 1, 1, 0.1)).eval()
    history, stack = TopOnly(combining(L, norm_at="none")).double(), layers(L)
    logits = merge.weight.detach()[0]
    with torch.no_grad():
        history.weight.copy_(logits.exp() / logits.exp().sum())
    states = [stream()]
    for layer in stack:
        states.append(layer(states[-1]))
    (merged,) = merge(states)
    torch.testing.assert_close(run(history, stack, stream())[1], merged, atol=1e-10, rtol=0)


@pytest.mark.parametrize("norm_at", ["sources", "consumers"])
def test_a_grown_top_only_computes_what_it_did(norm_at: str) -> None:
    old, new = (stirred(TopOnly(combining(units, norm_at=norm_at)), seed=units) for units in (3, L))
    new.load_state_dict(new.extend(tensors(old), 3))
    expected = run(old, layers(L)[:3], stream())[1]
    torch.testing.assert_close(run(new, layers(L), stream())[1], expected, atol=1e-10, rtol=0)


def test_a_grown_top_only_with_softmax_leaves_a_small_share_to_the_added_layers() -> None:
    old = stirred(TopOnly(combining(3, softmax=True, groups=2)))
    after = TopOnly(combining(L, softmax=True, groups=2)).extend(tensors(old), 3)["weight"].softmax(0)
    before = old.weight.softmax(0)
    torch.testing.assert_close(after[:4], 0.95 * before, atol=1e-10, rtol=0)
    torch.testing.assert_close(
        after[4:], torch.full((L - 3, 2), 0.05 / (L - 3), dtype=torch.float64), atol=1e-10, rtol=0
    )


def test_a_grown_top_only_with_a_window_restarts_at_the_top() -> None:
    old = stirred(TopOnly(combining(3, window=2)))
    after = TopOnly(combining(5, window=2)).extend(tensors(old), 3)["weight"]
    assert after.tolist() == [0, 0, 0, 0, 0.5, 0.5]


# DepthWeighted -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dilation", "period"), [(1, 1), (2, 1), (1, 3), (4, 5), (4, 2), (2, 4), (3, 3), (20, 1)])
@pytest.mark.parametrize("options", [{}, {"groups": 2, "dropout": Tripled}], ids=str)
def test_depth_weighted_equals_the_written_out_formula(options: dict[str, Any], dilation: int, period: int) -> None:
    depth = 9
    history = stirred(DepthWeighted(combining(depth, dilation=dilation, period=period, **options)))
    stack = layers(depth)
    rows = {
        i: [j for j in range(i + 1) if j % dilation == i % dilation] for i in range(1, depth + 1) if i % period == 0
    }
    assert len(history.weight) == sum(len(row) for row in rows.values())

    def expected(x: Tensor) -> tuple[list[Tensor], Tensor]:
        alphas = iter(history.weight)
        outputs, averaged = [x], [x]
        for i in range(1, depth + 1):
            outputs.append(stack[i - 1](averaged[-1]))
            if i not in rows:
                averaged.append(outputs[i])
                continue
            total = weighted([next(alphas) for _ in rows[i]], [outputs[j] for j in rows[i]])
            averaged.append(3 * total if "dropout" in options else total)
        return averaged[:-1], averaged[-1]

    assert_equal_with_gradients(history, expected, stack)


@pytest.mark.parametrize(("dilation", "period"), [(1, 1), (4, 5), (2, 3), (1, 8)])
def test_depth_weighted_starts_as_the_plain_stack(dilation: int, period: int) -> None:
    history = DepthWeighted(combining(L, dilation=dilation, period=period, softmax=True, norm_at="sources")).double()
    assert torch.equal(run(history, layers(L), stream())[1], plain(layers(L), stream()))
    assert {slot.role for slot in assign_roles(history)} == ({Role.WIRING} if period <= L else set())


def test_depth_weighted_is_one_hot_dlcl_without_norms() -> None:
    weighted_, dlcl = DepthWeighted(combining(L, period=1)).double(), Dlcl(combining(L, norm_at="none")).double()
    stirred(weighted_)
    with torch.no_grad():
        dlcl.weight[0, 0] = 1.0
        for i, row in enumerate(weighted_.weight.split(list(range(2, L + 2))), start=1):
            dlcl.weight[i, : i + 1] = row
    got, expected = (run(history, layers(L), stream())[1] for history in (weighted_, dlcl))
    torch.testing.assert_close(got, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize(("old_units", "period"), [(3, 1), (4, 2), (5, 2), (1, 2)])
def test_grown_depth_weights_keep_their_rows_and_add_plain_ones(old_units: int, period: int) -> None:
    options = {"dilation": 2, "period": period, "groups": 2}
    old = stirred(DepthWeighted(combining(old_units, **options))) if old_units >= period else Latest()
    new = stirred(DepthWeighted(combining(L, **options)), seed=8)
    new.load_state_dict(new.extend(tensors(old), old_units))
    read, output = run(new, layers(L), stream())
    assert torch.equal(read[old_units], run(old, layers(old_units), stream())[1])
    assert torch.equal(output, plain(layers(L)[old_units:], read[old_units]))


# All kinds ---------------------------------------------------------------------------------------------------------

KINDS = [row.make for row in HISTORY.values()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm_at", ["sources", "consumers", "none"])
def test_every_kind_gives_its_parameters_roles_and_trains_all_of_them(kind: Any, norm_at: str) -> None:
    history: History = stirred(kind(combining(L, norm_at=norm_at, period=3)))
    assert {slot.role for slot in assign_roles(history)} <= {
        Role.WIRING,
        Role.NORM_GAIN,
        Role.NORM_BIAS,
        Role.ADDITIVE,
    }
    (run(history, layers(L), stream().requires_grad_())[1] * stream(3)).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in history.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_one_position_at_a_time_and_further_axes_of_the_stream_change_nothing(kind: Any) -> None:
    history = stirred(kind(combining(L, period=2, window=3, groups=2))).eval()
    _, whole = run(history, layers(L), stream())
    steps = [run(history, layers(L), stream()[:, i : i + 1])[1] for i in range(stream().shape[1])]
    torch.testing.assert_close(torch.cat(steps, 1), whole, atol=1e-10, rtol=0)
    streams = stream().unsqueeze(-2).expand(2, 3, 4, D)  # parallel streams (hyper-connections)
    _, parallel = run(history, layers(L), streams)
    torch.testing.assert_close(parallel, whole.unsqueeze(-2).expand_as(streams), atol=1e-10, rtol=0)


@pytest.mark.parametrize("kind", [*KINDS, lambda combining: Transparent(combining.units + 1, 2, 0.1)])
def test_growth_gives_every_parameter_and_leaves_the_old_ones_alone(kind: Any) -> None:
    old, new = (kind(combining(units, period=1)) for units in (3, 5))
    stirred(old)
    before = tensors(old)
    after = new.double().extend(dict(old.named_parameters()), 3)
    assert {n: v.shape for n, v in after.items()} == {n: p.shape for n, p in new.named_parameters()}
    for values in after.values():
        values.zero_()
    torch.testing.assert_close(tensors(old), before, atol=0, rtol=0)


def test_growth_without_the_old_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match="`weight` of the shallow model's history is missing"):
        TopOnly(combining(4, norm_at="none")).extend({}, 2)
    with pytest.raises(ConfigError, match="`weight` of the shallow model's history is missing"):
        DepthWeighted(combining(4, period=1)).extend({}, 2)
    with pytest.raises(ConfigError, match="`weight` of the shallow model's history is missing"):
        Transparent(5, 2, 0.1).extend({}, 2)
