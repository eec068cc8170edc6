"""Measures of states and wiring: similarities, entropies, changes, dependencies, weights across depth."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from tests.composition import model as composed
from tests.small import moved, small_config
from tests.train.test_probe import LOSS, RNMT, VOCABULARY, batch, built, close
from ziggurat.config.kinds import HistoryKind, ResidualKind
from ziggurat.model.build import build_model, stack_residuals
from ziggurat.model.history.base import History, HistoryOptions
from ziggurat.model.history.kinds import Blocks, DepthWeighted, Dlcl, Latest, TopOnly
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.train.diagnosis.gradients import Trace
from ziggurat.train.diagnosis.measures import SIZE, perturbed, similarities
from ziggurat.train.diagnosis.probe import contributions, measure, norm_inputs


def rnmt(**choices: Any) -> Seq2Seq:
    config = small_config(3, 3, **{**RNMT, **choices})
    return moved(build_model(config, VOCABULARY, VOCABULARY).double(), 0.1).eval()


def combining(**options: Any) -> HistoryOptions:
    return HistoryOptions(7, 8, torch.nn.Identity, torch.nn.Identity, **{"norm_at": "none", **options})


HISTORIES: dict[str, History] = {
    "dlcl": Dlcl(combining()),
    "softmax": Dlcl(combining(softmax=True, window=3)),
    "window": Dlcl(combining(window=2)),
    "blocks": Blocks(combining(period=3)),
    "top_only": TopOnly(combining()),
    "top_window": TopOnly(combining(window=4, softmax=True)),
    "depth_weighted": DepthWeighted(combining(period=2, dilation=2)),
    "depth_weighted_dense": DepthWeighted(combining(period=3)),
}


@pytest.mark.parametrize("kind", HISTORIES)
@torch.no_grad()
def test_the_table_of_a_history_is_its_effect_on_unit_vectors(kind: str) -> None:
    history = HISTORIES[kind]
    generator = torch.Generator().manual_seed(5)
    history.weight += torch.randn(history.weight.shape, generator=generator)  # type: ignore[operator]
    units = torch.eye(8).view(8, 1, 1, 8)
    past = history.start(units[0])
    rows = [history(past)]
    for depth in range(1, 8):
        past = history.push(past, units[depth])
        rows.append(history(past) if depth < 7 else history.output(past))
    table = history.table()
    assert table is not None
    torch.testing.assert_close(table.nan_to_num(), torch.cat(rows).squeeze(1), atol=1e-6, rtol=0)
    assert table.isnan()[torch.ones(8, 8).triu(1).bool()].all()


@torch.no_grad()
def test_tables_of_groups_are_means_and_the_plain_stack_has_none() -> None:
    grouped = Dlcl(combining(groups=2))
    grouped.weight[..., 1] += 1.0
    table, plain = grouped.table(), Dlcl(combining()).table()
    torch.testing.assert_close(table, plain + 0.5, equal_nan=True)
    assert Latest().table() is None
    assert DepthWeighted(combining(period=8)).table() is None


def test_history_and_transparent_weights_of_models() -> None:
    model = built(3, 2, encoder={"history": "dlcl"}, memory="transparent")
    values = measure(model, batch(), LOSS, ("history_weights", "transparent_weights"))
    assert values["history_weights"].keys() == {"encoder"}
    weight = model.encoder.history.weight
    for row, found in enumerate(values["history_weights"]["encoder"]):
        close(found[: row + 1], weight[row, : row + 1].tolist())
        assert all(math.isnan(v) for v in found[row + 1 :])
    mixtures = model.encoder.transparent.mixtures()
    assert [len(row) for row in values["transparent_weights"]] == [2] * 4
    for source in range(4):
        close(values["transparent_weights"][source], mixtures[:, source].tolist())
    mixed = rnmt(memory="transparent")
    first, *others = measure(mixed, batch(), LOSS, ("transparent_weights",))["transparent_weights"]
    assert math.isnan(first[0])
    close([row[0] for row in others], mixed.encoder.transparent.mixtures()[0].tolist())


@torch.no_grad()
@pytest.mark.parametrize("kind", ["pre", "hyper", "rnmt"])
def test_similarities_are_those_of_the_encoders_outputs(kind: str) -> None:
    model, some = rnmt() if kind == "rnmt" else built(residual=kind), batch()
    outputs: list[Tensor] = []
    model.encode(some.source, some.source_mask, outputs)
    states = [model.source_embedding(some.source), *outputs]
    values = measure(model, some, LOSS)

    def mean(one: int, other: int) -> float:
        if kind == "rnmt" and (one == 0) != (other == 0):
            return math.nan
        return float(similarities([states[one], states[other]], some.source_mask)[0, 1].mean())

    expected = [[mean(i, j) for j in range(4)] for i in range(4)]
    expected[0][0] = math.nan if kind == "rnmt" else 1.0
    torch.testing.assert_close(torch.tensor(values["similarity"]), torch.tensor(expected), equal_nan=True)
    adjacent, embedding = [expected[i][i - 1] for i in (1, 2, 3)], [expected[i][0] for i in (1, 2, 3)]
    torch.testing.assert_close(torch.tensor(values["adjacent_similarity"]), torch.tensor(adjacent), equal_nan=True)
    torch.testing.assert_close(torch.tensor(values["embedding_similarity"]), torch.tensor(embedding), equal_nan=True)
    lengths = some.source_mask.sum(1).tolist()
    for state, found in zip(states, values["inter_similarity"], strict=True):
        means = [state[i, :n].mean(0) for i, n in enumerate(lengths)]
        cosines = [
            math.fsum(float(torch.cosine_similarity(state[i, p], means[i], dim=0)) for p in range(n)) / n
            for i, n in enumerate(lengths)
        ]
        assert found == pytest.approx(math.fsum(cosines) / 3, rel=1e-6)


def entropy(logits: list[float]) -> float:
    peak = max(logits)
    odds = [math.exp(v - peak) for v in logits]
    return -math.fsum(o / sum(odds) * math.log(o / sum(odds)) for o in odds)


@torch.no_grad()
def test_entropy_of_attention_head_by_head() -> None:
    model, some = built(2, 1), batch()
    found = measure(model, some, LOSS, ("attention_entropy",))["attention_entropy"]
    assert {place: len(row) for place, row in found.items()} == {
        "encoder.self_attn": 2,
        "decoder.self_attn": 1,
        "decoder.cross_attn": 1,
    }
    sources, targets = (mask.sum(1).tolist() for mask in (some.source_mask, some.target_mask))

    def mean(query: Tensor, key: Tensor, lengths: list[int], keys: Any) -> float:
        """Average over heads (of width 4) and real queries; `keys` is how many of a sentence's keys a query sees."""
        terms = [
            entropy(
                [float(query[i, q, 4 * h : 4 * h + 4] @ key[i, k, 4 * h : 4 * h + 4]) / 2 for k in range(keys(i, q))]
            )
            for i, n in enumerate(lengths)
            for q in range(n)
            for h in range(2)
        ]
        return math.fsum(terms) / len(terms)

    first: Any = model.encoder.layers[0]  # type: ignore[index]
    read = first.self_attn_residual.enter(model.source_embedding(some.source))
    query, key, _ = first.self_attn.qkv_proj(read).chunk(3, -1)
    assert found["encoder.self_attn"][0] == pytest.approx(mean(query, key, sources, lambda i, q: sources[i]), rel=1e-6)
    layer: Any = model.decoder.layers[0]  # type: ignore[index]
    x = model.target_embedding(some.target_in)
    query, key, _ = layer.self_attn.qkv_proj(layer.self_attn_residual.enter(x)).chunk(3, -1)
    assert found["decoder.self_attn"][0] == pytest.approx(mean(query, key, targets, lambda i, q: q + 1), rel=1e-6)
    seen: list[Tensor] = []
    handle = layer.cross_attn.register_forward_pre_hook(lambda _m, inputs: seen.append(inputs[0]))
    memory = model.encode(some.source, some.source_mask)
    model.decode(some.target_in, memory)
    handle.remove()
    query, key = layer.cross_attn.q_proj(seen[0]), layer.cross_attn.kv_proj(memory.of(0)).chunk(2, -1)[0]
    assert found["decoder.cross_attn"][0] == pytest.approx(mean(query, key, targets, lambda i, q: sources[i]), rel=1e-6)


@pytest.mark.parametrize("kind", ["relative", "average", "merged", "merged_full", "rnmt"])
@torch.no_grad()
def test_uniform_attention_has_the_entropy_of_its_length(kind: str) -> None:
    some = batch()
    if kind == "rnmt":
        model = rnmt()
        model.decoder.attention.score.zero_()
    else:
        model = built(3, 2, decoder={"attention": kind})
        for name, parameter in model.named_parameters():
            if "qkv_proj" in name or "q_proj" in name or "key_table" in name:
                parameter[: len(parameter) // 3 if "qkv" in name else None] = 0.0
    found = measure(model, some, LOSS, ("attention_entropy",))["attention_entropy"]
    own = {"relative": {"decoder.self_attn"}, "merged_full": {"decoder.self_attn"}}.get(kind, set())
    assert found.keys() == own | {"decoder.cross_attn"} | ({"encoder.self_attn"} if kind != "rnmt" else set())
    sources, targets = [5, 3, 1], [4, 6, 2]
    expected = {
        "encoder.self_attn": [math.fsum(n * math.log(n) for n in sources) / 9] * 3,
        "decoder.self_attn": [math.fsum(math.log(q + 1) for n in targets for q in range(n)) / 12] * 2,
        "decoder.cross_attn": [math.fsum(t * math.log(s) for s, t in zip(sources, targets, strict=True)) / 12]
        * (1 if kind == "rnmt" else 2),
    }
    for place, row in found.items():
        assert row == pytest.approx(expected[place], rel=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["post", "hyper", "rnmt"])
def test_output_change_is_that_of_a_model_with_other_matrices(kind: str) -> None:
    model, some = rnmt() if kind == "rnmt" else built(residual=kind), batch()
    found = measure(model, some, LOSS, ("output_change",))["output_change"]
    other = copy.deepcopy(model)
    moved_to = perturbed(model)
    for name, parameter in model.named_parameters():
        inside = ".layers." in name and parameter.dim() >= 2
        assert (name in moved_to) == inside
        if inside:
            change = moved_to[name] - parameter
            assert float(change.norm()) == pytest.approx(SIZE * float(parameter.norm()), rel=1e-9)
            other.get_parameter(name).copy_(moved_to[name])
    with Trace(model) as before:
        model(some.source, some.source_mask, some.target_in)
    with Trace(other) as after:
        other(some.source, some.source_mask, some.target_in)
    for stack, mask in (("encoder", some.source_mask), ("decoder", some.target_mask)):
        for value, old, new in zip(found[stack], before.outputs[stack], after.outputs[stack], strict=True):
            assert old is not None
            assert new is not None
            pairs = list(zip(old[mask].flatten().tolist(), new[mask].flatten().tolist(), strict=True))
            change = math.sqrt(math.fsum((b - a) ** 2 for a, b in pairs))
            assert value == pytest.approx(change / math.sqrt(math.fsum(a * a for a, _ in pairs)), rel=1e-6)
            assert 0 < value < 1


KINDS: list[dict[str, Any]] = [
    *({"residual": kind} for kind in get_args(ResidualKind)),
    {"residual": "hyper", "wiring.dynamic": True},
    {"residual": "manifold_hyper", "wiring.mixing": "permutations", "wiring.stream_start": "normal"},
    {"residual": "post", "wiring.gpas": True},
    {"encoder.residual": "none", "decoder.residual": "pre"},
    {"residual": "post", "norm": "rms"},
    {"residual": "pre", "norm": "scale"},
    *(
        {"residual": residual, "encoder.history": kind, "decoder.history": kind}
        for residual in ("post", "pre")
        for kind in get_args(HistoryKind)
        if (residual, kind) != ("post", "mudd")  # refused
    ),
    {"combination.unit": "sublayer", "encoder.history": "dlcl", "decoder.history": "dlcl"},
    {"combination.normalize_embedding": True, "encoder.history": "dlcl", "combination.norm": "sources"},
    {"decoder.attention": "merged", "decoder.history": "dlcl", "residual": "post"},
    {"memory": "hierarchical", "decoder.history": "cross_module", "residual": "post"},
    {"encoder.tied_layers": [1, 2, 2], "decoder.tied_layers": [1], "residual": "post"},
]


@torch.no_grad()
@pytest.mark.parametrize("choices", KINDS, ids=str)
def test_contributions_add_up_to_the_state(choices: dict[str, Any]) -> None:
    """Without norm biases the contributions of the input and the branches add up to everything."""
    model = moved(build_model(composed(choices), VOCABULARY, VOCABULARY).double(), 0.2).eval()
    some = replace(
        batch(), source=batch().source[:, :3], source_mask=batch().source_mask[:, :3]
    )  # shorter than targets
    for stack in (model.encoder, model.decoder):
        for module in [*stack_residuals(stack), stack.history]:
            for name, parameter in module.named_parameters():  # type: ignore[union-attr]
                # Weights are computed from the output of `stream_norm`, so they contain its bias and the terms do not.
                if name.endswith("bias") and not name.startswith("stream_norm"):
                    parameter.zero_()
    with Trace(model) as trace, norm_inputs(model) as norms:
        model(some.source, some.source_mask, some.target_in)
    for stack_name, mask in (("encoder", some.source_mask), ("decoder", some.target_mask)):
        order = [(n, place) for n in range(3) for place in trace.sublayers if place.startswith(stack_name)]
        found = list(contributions(model, trace, norms, stack_name, mask))
        assert len(found) == len(order)
        for number, ((layer, place), parts) in enumerate(zip(order, found, strict=True), start=1):
            sublayer = trace.sublayers[place][layer]
            assert sublayer is not None
            state = sublayer.y.sum(-2) if sublayer.y.dim() == 4 else sublayer.y
            torch.testing.assert_close(parts.sum(0), state[mask], atol=1e-9, rtol=1e-9)
            assert not parts[number + 1 :].any()
            assert len(parts) == len(order) + 1
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@torch.no_grad()
def test_a_layer_that_is_computed_several_times_is_not_a_sum_of_branches() -> None:
    model, some = build_model(composed({"encoder.solver": "rk4"}), VOCABULARY, VOCABULARY).eval(), batch()
    found = measure(model, some, LOSS, ("residual_dependency",))["residual_dependency"]
    assert [*found] == ["decoder"]


def deviation(values: list[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))


@torch.no_grad()
@pytest.mark.parametrize("residual", ["post", "admin", "pre"])
def test_residual_dependency_against_a_plain_loop(residual: str) -> None:
    """The loop keeps every branch's current state in a list, and rescales it at every norm (Clinic's variance log)."""
    init = {"kind": "admin", "omega": "linear"} if residual == "admin" else {}
    model, some = built(residual=residual, **({"init": init} if init else {})), batch()
    found = measure(model, some, LOSS, ("residual_dependency",))["residual_dependency"]
    with Trace(model) as trace:
        model(some.source, some.source_mask, some.target_in)
    for stack, mask in (("encoder", some.source_mask), ("decoder", some.target_mask)):
        names = [name for name in trace.sublayers if name.startswith(stack)]
        stored = [trace.embedded[stack][mask].tolist()]
        rows = []
        for layer in range(len(trace.outputs[stack])):
            for name in names:
                sublayer = trace.sublayers[name][layer]
                assert sublayer is not None
                skip, norm = sublayer.residual.skip, sublayer.residual.out_norm
                if isinstance(skip, Tensor):
                    factors = skip.expand(8).tolist()
                    stored = [[[v * f for v, f in zip(t, factors, strict=True)] for t in part] for part in stored]
                stored.append(sublayer.fx[mask].tolist())
                if norm is not None:
                    sums = sublayer.r[mask].tolist()
                    scales = [
                        1 / math.sqrt(deviation(token) ** 2 + float(norm.eps))  # type: ignore[arg-type]
                        for token in sums
                    ]
                    gains = norm.weight.tolist()  # type: ignore[union-attr]
                    stored = [
                        [
                            [(v - math.fsum(t) / 8) * s * g for v, g in zip(t, gains, strict=True)]
                            for t, s in zip(part, scales, strict=True)
                        ]
                        for part in stored
                    ]
                spread = [deviation([v for token in part for v in token]) for part in stored]
                rows.append([s / math.sqrt(math.fsum(v * v for v in spread)) for s in spread])
        assert len(found[stack]) == len(rows)
        for expected, row in zip(rows, found[stack], strict=True):
            close(row[: len(expected)], expected)
            assert all(math.isnan(v) for v in row[len(expected) :])
            assert len(row) == len(rows) + 1
