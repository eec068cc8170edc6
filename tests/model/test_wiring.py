"""Every option of attention, combination, wiring and dropout reaches the modules that it is about, in both stacks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from tests.composition import model as small_model
from tests.model.sentences import MASK, SOURCE, TARGET, V
from ziggurat.config import TrainingConfig
from ziggurat.config.kinds import HISTORIES, HistoryKind, InitKind, ResidualKind
from ziggurat.model.attention.cache import padding_mask
from ziggurat.model.build import build_model
from ziggurat.model.dropout import Dropout, StochasticBranch
from ziggurat.model.layers import SourceView
from ziggurat.model.residual.base import Residual
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.train.objective import as_trained

WIDTH, INNER, HEADS, LAYERS = 16, 24, 2, 3  # as in tests.composition
STILL = {f"dropout.{place}": 0.0 for place in ("residual", "attention", "activation", "embedding")}


def built(choices: dict[str, Any]) -> Seq2Seq:
    return build_model(small_model(choices), V, V, seed=3)


def found(model: nn.Module, pattern: str) -> list[Any]:
    """Return all modules, parameters, buffers and attributes at dotted paths, in which `*` stands for any layer."""
    at: list[Any] = [model]
    for name in pattern.split("."):
        at = [x for module in at for x in (module if name == "*" else [getattr(module, name)])]
    return at


Read = Callable[[Any], Any]


def exists(x: object) -> bool:
    return x is not None


def shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


AAN = {"decoder.attention": "average"}
GATED = {"decoder.attention": "merged_gated"}
SHAW = {"encoder.attention": "relative", "decoder.attention": "relative"}
L2 = {"attention.qk_norm": "l2"}
EVERY_NORM = {"attention.qk_norm": "rms", "attention.value_norm": "layer"}
MANIFOLD = {"residual": "manifold_hyper"}
DLCL = {"encoder.history": "dlcl", "decoder.history": "dlcl"}
DENSER = {"encoder.history": "depth_weighted", "decoder.history": "depth_weighted"}
BLOCKS = {"encoder.history": "blocks", "decoder.history": "blocks"}

SELF_AND_CROSS = ("encoder.layers.*.self_attn", "decoder.layers.*.self_attn", "decoder.layers.*.cross_attn")
FACTORS = {n: pytest.approx(math.log2(n**2 - n), rel=1e-6) for n in (100, 7)}

# Base choices; the option; which attribute is read, where and how; the option's values -> expected attributes.
TABLE: list[tuple[dict[str, Any], str, str, Read, dict[Any, Any]]] = [
    (AAN, "attention.average_gate", "decoder.layers.*.self_attn.gate_proj", exists, {True: True, False: False}),
    (GATED, "attention.average_gate", "decoder.layers.*.merged_attn.own.gate_proj", exists, {True: True, False: False}),
    (AAN, "attention.average_ffn", "decoder.layers.*.self_attn.ffn", exists, {True: True, False: False}),
    (
        AAN | {"attention.average_ffn": True},
        "d_ff",
        "decoder.layers.*.self_attn.ffn.in_proj.weight",
        shape,
        {40: (40, WIDTH)},
    ),
    (GATED, "attention.average_ffn", "decoder.layers.*.merged_attn.own.ffn", exists, {True: True, False: False}),
    *((L2, "attention.qk_length", f"{at}.scaling.factor", Tensor.item, FACTORS) for at in SELF_AND_CROSS),
    *(
        case
        for at in SELF_AND_CROSS
        for case in (
            (
                {},
                "attention.query_scale",
                f"{at}.scaling",
                lambda s: s is not None and s.dimensions is not None,
                {True: True, False: False},
            ),
            (
                {},
                "attention.value_norm",
                f"{at}.scaling",
                lambda s: type(s and s.value_norm),
                {"none": type(None), "layer": nn.LayerNorm, "rms": nn.RMSNorm},
            ),
            (
                EVERY_NORM,
                "layer_norm_epsilon",
                f"{at}.scaling",
                lambda s: {s.epsilon, s.query_norm.eps, s.key_norm.eps, s.value_norm.eps},
                {1e-5: {1e-5}, 1e-3: {1e-3}},
            ),
            (
                {},
                f"attention.{'cross_' if 'cross' in at else ''}value_residual",
                f"{at}.residual",
                lambda r: r and r.kind,
                {"none": None, "half": "half", "learned": "learned", "single": "single"},
            ),
        )
    ),
    *(
        (SHAW, "attention.value_residual", f"{at}.residual", lambda r: r and r.kind, {"learned": "learned"})
        for at in SELF_AND_CROSS[:2]
    ),
    (
        {"decoder.attention": "merged"},
        "attention.share_value",
        "decoder.layers.*.merged_attn.v_proj",
        exists,
        {True: False, False: True},
    ),
    *(
        case
        for side in ("encoder", "decoder")
        for case in (
            (
                SHAW,
                "attention.relative_clip",
                f"{side}.layers.*.self_attn.key_table",
                shape,
                {8: (17, WIDTH // HEADS), 3: (7, WIDTH // HEADS)},
            ),
            (
                SHAW,
                "attention.relative_values",
                f"{side}.layers.*.self_attn.value_table",
                exists,
                {True: True, False: False},
            ),
            (DLCL, "combination.dropout", f"{side}.history.dropout.p", float, {0.0: 0.0, 0.3: 0.3}),
            (DENSER, "combination.dropout", f"{side}.history.dropout.p", float, {0.0: 0.0, 0.3: 0.3}),
            (
                DLCL,
                "combination.groups",
                f"{side}.history.weight",
                shape,
                {1: (4, 4), 4: (4, 4, 4), 16: (4, 4, 16)},
            ),
            (
                DENSER | {"combination.period": 1},
                "combination.dilation",
                f"{side}.history.sizes",
                list,
                {1: [2, 3, 4], 2: [1, 2, 2], 3: [1, 1, 2]},
            ),
            (DENSER, "combination.period", f"{side}.history.sizes", list, {1: [2, 3, 4], 2: [3], 3: [4]}),
            (BLOCKS, "combination.period", f"{side}.history.weight", shape, {1: (4, 4), 2: (3, 3), 3: (2, 2)}),
            *(
                (
                    {"encoder.history": kind, "decoder.history": kind},
                    "combination.learnable",
                    f"{side}.history",
                    lambda history: "weight" in dict(history.named_parameters()),
                    {True: True, False: False},
                )
                for kind in ("dlcl", "blocks", "top_only", "depth_weighted")
            ),
            (
                DLCL,
                "combination.start",
                f"{side}.history.weight",
                lambda w: w[2].tolist(),
                {"average": pytest.approx([1 / 3, 1 / 3, 1 / 3, 0]), "one": [1, 1, 1, 0], "last": [0, 0, 1, 0]},
            ),
            (
                DLCL,
                "combination.normalize_embedding",
                f"{side}.history.norms",
                lambda norms: isinstance(norms[0], nn.LayerNorm),
                {True: True, False: False},
            ),
        )
    ),
    (
        DLCL,
        "combination.unit",
        "encoder.history.weight",
        len,
        {"layer": LAYERS + 1, "sublayer": 2 * LAYERS + 1},
    ),
    (
        DLCL,
        "combination.unit",
        "decoder.history.weight",
        len,
        {"layer": LAYERS + 1, "sublayer": 3 * LAYERS + 1},
    ),
    *(
        case
        for at in (
            "encoder.layers.*.self_attn_residual",
            "encoder.layers.*.ffn_residual",
            "decoder.layers.*.self_attn_residual",
            "decoder.layers.*.cross_attn_residual",
            "decoder.layers.*.ffn_residual",
        )
        for case in (
            (
                {"dropout.sublayer": 0.3},
                "dropout.sublayer_unit",
                f"{at}.dropout.unit",
                str,
                {"batch": "batch", "sample": "sample"},
            ),
            ({"residual": "branch_norm"}, "wiring.branch_updates", f"{at}.updates", int, {4000: 4000, 9: 9}),
            (
                {"residual": "layer_scale"},
                "wiring.layer_scale",
                f"{at}.branch",
                lambda b: b.tolist(),
                {v: pytest.approx([v or 0.1] * WIDTH) for v in (None, 0.37)},
            ),
            (
                {"residual": "hyper"},
                "wiring.dynamic",
                f"{at}.stream_norm",
                exists,
                {True: True, False: False},
            ),
            ({"residual": "hyper"}, "wiring.streams", f"{at}.alpha", shape, {2: (2, 3), 3: (3, 4)}),
            (MANIFOLD, "wiring.mixing", f"{at}.permutations", exists, {"sinkhorn": False, "permutations": True}),
            (
                MANIFOLD,
                "wiring.stream_start",
                at,
                lambda r: [*r.scale.tolist(), r.weight.std().item(), bool(r.bias.any())],
                {
                    "streams": [*[pytest.approx(0.01)] * 3, 0.0, True],
                    "normal": [1.0, 1.0, 1.0, pytest.approx(0.02, rel=0.25), False],
                },
            ),
            (
                {"residual": "admin"},
                "wiring.omega_trainable",
                f"{at}.skip",
                lambda omega: omega.requires_grad,
                {True: True, False: False},
            ),
        )
    ),
    (
        {"residual": "deepnorm"},
        "wiring.planned_encoder_layers",
        "encoder.layers.*.ffn_residual.skip",
        float,
        {n: pytest.approx(0.81 * ((n or LAYERS) ** 4 * LAYERS) ** (1 / 16)) for n in (None, 24)},
    ),
    (
        {},
        "encoder.d_ff",
        "encoder.layers.*.ffn.in_proj.weight",
        shape,
        {None: (INNER, WIDTH), 40: (40, WIDTH)},
    ),
    ({}, "encoder.d_ff", "decoder.layers.*.ffn.in_proj.weight", shape, {40: (INNER, WIDTH)}),
    ({}, "d_ff", "decoder.layers.*.ffn.in_proj.weight", shape, {40: (40, WIDTH)}),
    ({}, "encoder.heads", "encoder.layers.*.self_attn.heads", int, {None: HEADS, 4: 4}),
    ({}, "encoder.heads", "decoder.layers.*.self_attn.heads", int, {4: HEADS}),
    (
        {"embedding.sharing": "decoder"},
        "encoder.d_model",
        "encoder.layers.*.ffn.out_proj.weight",
        shape,
        {None: (WIDTH, INNER), 20: (20, INNER)},
    ),
    (
        {"embedding.sharing": "decoder"},
        "encoder.d_model",
        "decoder.layers.*.cross_attn.kv_proj.weight",
        shape,
        {20: (2 * WIDTH, 20)},
    ),
    ({"memory": "transparent"}, "dropout.transparent", "encoder.transparent.p", float, {0.1: 0.1, 0.4: 0.4, 0.0: 0.0}),
]


@pytest.mark.parametrize(
    ("host", "option", "path", "read", "value", "expected"),
    [
        pytest.param(host, option, path, read, value, expected, id=f"{option}={value}:{path}{''.join(map(str, host))}")
        for host, option, path, read, values in TABLE
        for value, expected in values.items()
    ],
)
def test_the_option_reaches_the_modules(
    host: dict[str, Any], option: str, path: str, read: Read, value: Any, expected: Any
) -> None:
    at = found(built({**host, option: value}), path)
    assert len(at) == (LAYERS if "*" in path else 1)
    for x in at:
        assert read(x) == expected


PLACES = {"residual": 0.11, "attention": 0.12, "activation": 0.13, "embedding": 0.14}
HOMES = {
    "residual": r"(encoder|decoder)\.layers\.\d\.\w+_residual\.dropout(\.dropout)?",
    "attention": r"(encoder|decoder)\.layers\.\d\.(self_attn|cross_attn|merged_attn\.(own|cross))\.dropout",
    "activation": r"(encoder|decoder)\.layers\.\d\.((self_attn|merged_attn\.own)\.)?ffn\.dropout",
    "embedding": r"(source|target)_embedding\.dropout",
}


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("sublayer", [0.0, 0.3])
@pytest.mark.parametrize(
    ("choices", "attentions", "networks"),
    [
        ({}, 3, 2),  # per pair of an encoder and a decoder layer
        (SHAW, 3, 2),
        ({"activation": "swiglu"}, 3, 2),
        (AAN | {"attention.average_ffn": True}, 2, 3),
        (GATED | {"attention.average_ffn": True}, 2, 3),
        ({"decoder.attention": "simplified_average"}, 2, 2),
        ({"decoder.attention": "ssru"}, 2, 2),
        ({"decoder.attention": "merged"}, 2, 2),
        ({"decoder.attention": "merged_full"}, 3, 2),
    ],
    ids=str,
)
def test_each_dropout_is_only_in_its_own_places(
    choices: dict[str, Any], attentions: int, networks: int, sublayer: float, exact: bool
) -> None:
    options = {f"dropout.{place}": p for place, p in PLACES.items()} | {"dropout.sublayer": sublayer}
    model = built({**choices, **options})
    as_trained(model, TrainingConfig(exact_dropout=exact))
    everywhere = {name: module for name, module in model.named_modules() if isinstance(module, Dropout)}
    merged = str(choices.get("decoder.attention", "")).startswith("merged")
    counts = {"residual": 4 if merged else 5, "attention": attentions, "activation": networks}
    homeless = set(everywhere)
    for place, pattern in HOMES.items():
        homes = {name for name in everywhere if re.fullmatch(pattern, name)}
        assert len(homes) == (2 if place == "embedding" else LAYERS * counts[place])
        assert {everywhere[name].p for name in homes} == {PLACES[place]}
        homeless -= homes
    assert not homeless
    assert {module.exact for module in everywhere.values()} == {exact}


@pytest.mark.parametrize("kind", [k for k, facts in HISTORIES.items() if "combination.dropout" in facts.options])
def test_dropout_of_combinations_acts_only_on_them(kind: str) -> None:
    choices = {"encoder.history": kind, "decoder.history": kind, "combination.dropout": 0.5, **STILL}
    model = built(choices).train()
    assert {m.p for n, m in model.named_modules() if isinstance(m, Dropout) and ".history." not in n} == {0.0}
    torch.manual_seed(1)
    memory = model.encode(SOURCE, MASK)
    assert not torch.equal(memory.of(0), model.encode(SOURCE, MASK).of(0))
    assert not torch.equal(model.decode(TARGET, memory), model.decode(TARGET, memory))


@pytest.mark.parametrize("window", [None, 1, 2, 3])
@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_a_combination_reads_the_outputs_within_its_window_and_no_others(side: str, window: int | None) -> None:
    model = built({**DLCL, "combination.window": window}).double().eval()
    memory = model.encode(SOURCE, MASK)
    hidden = memory.of(0) if side == "encoder" else model.decode(TARGET, memory)
    (hidden * torch.randn(WIDTH, generator=torch.Generator().manual_seed(1))).sum().backward()
    read = found(model, f"{side}.history.weight")[0].grad != 0
    rows = range(LAYERS + 1)
    assert read.tolist() == [[source <= row and row - source < (window or 99) for source in rows] for row in rows]


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_softmax_makes_combinations_indifferent_to_a_constant_in_each_row(side: str) -> None:
    for softmax in (False, True):
        model = built({**DLCL, "combination.softmax": softmax, "combination.norm": "none"}).double().eval()
        (weight,) = found(model, f"{side}.history.weight")

        def hidden(model: Seq2Seq = model) -> Tensor:
            memory = model.encode(SOURCE, MASK)
            return memory.of(0) if side == "encoder" else model.decode(TARGET, memory)

        before = hidden()
        with torch.no_grad():
            weight += torch.arange(LAYERS + 1)[:, None] + 0.5
        assert torch.allclose(hidden(), before, atol=1e-10, rtol=0) == softmax


@pytest.mark.parametrize("planned", [None, 2, 4])
def test_the_share_of_dropped_branches_grows_with_the_layer_of_each_stack(planned: int | None) -> None:
    depths = (3, 5)
    wiring = {f"wiring.planned_{stack}_layers": planned for stack in ("encoder", "decoder")}
    model = built({"encoder.layers": depths[0], "decoder.layers": depths[1], "dropout.sublayer": 0.3, **wiring})
    for stack, depth in zip((model.encoder, model.decoder), (max(depths[0], planned or 0), depths[1]), strict=True):
        for number, layer in enumerate(stack.layers, start=1):  # type: ignore[arg-type, union-attr]
            branches = [m for m in layer.modules() if isinstance(m, StochasticBranch)]
            assert len(branches) == len([m for m in layer.modules() if isinstance(m, Residual)])
            assert [float(b.p) for b in branches] == pytest.approx([0.3 * number / depth] * len(branches))


@pytest.mark.parametrize("unit", ["batch", "sample"])
def test_a_dropped_branch_is_dropped_for_the_batch_or_for_single_sentences(unit: str) -> None:
    model = built({"residual": "no_norm", "dropout.sublayer": 0.5, "dropout.sublayer_unit": unit, **STILL}).train()
    top = found(model, "encoder.layers.*.ffn_residual")[-1]
    x, fx = torch.zeros(6, 2, WIDTH), torch.ones(6, 2, WIDTH)
    torch.manual_seed(2)
    draws = [frozenset(top(x, fx, x).flatten(1).mean(1).tolist()) for _ in range(30)]
    assert {value for draw in draws for value in draw} == {0.0, 2.0}  # kept ones are rescaled by 1/(1-p)
    assert (frozenset((0.0, 2.0)) in draws) == (unit == "sample")


RUNS, DEPTH = 80, 8


def skipping(side: str, p: float, **more: Any) -> Seq2Seq:
    """Return a deep encoder (or decoder) whose layers are skipped in training, with nothing else random."""
    other = "decoder" if side == "encoder" else "encoder"
    choices = {f"{side}.layers": DEPTH, f"{other}.layers": 1, f"{side}.layer_drop": p, **STILL, **more}
    return built(choices).double().train()


def computed(model: Seq2Seq, side: str, runs: int = RUNS) -> list[list[tuple[Tensor, Tensor]]]:
    """Return each layer's input and output for each run in which it was called."""
    calls: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(DEPTH)]
    for number, layer in enumerate(found(model, f"{side}.layers.*")):
        layer.register_forward_hook(lambda _, args, y, into=calls[number]: into.append((args[0], y)))
    torch.manual_seed(5)
    with torch.no_grad():
        for _ in range(runs):
            memory = model.encode(SOURCE, MASK)
            if side == "decoder":
                model.decode(TARGET, memory)
    return calls


@pytest.mark.parametrize("p", [0.2, 0.6])
@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_layer_drop_skips_every_layer_with_its_probability(side: str, p: float) -> None:
    skipped = torch.tensor([RUNS - len(calls) for calls in computed(skipping(side, p), side)]) / RUNS
    deviation = math.sqrt(p * (1 - p) / RUNS)
    assert float(skipped.mean()) == pytest.approx(p, abs=3.5 * deviation / math.sqrt(DEPTH))
    assert float((skipped - p).abs().max()) < 4 * deviation
    assert all(len(calls) == 3 for calls in computed(skipping(side, p).eval(), side, 3))
    assert all(len(calls) == 3 for calls in computed(skipping(side, 0.0), side, 3))


def test_layer_drop_affects_only_its_stack() -> None:
    model = built({"encoder.layer_drop": 0.3, "decoder.layer_drop": 0.6})
    assert (model.encoder.layer_drop, model.decoder.layer_drop) == (0.3, 0.6)


def test_layer_drop_does_not_change_layers_that_are_not_skipped() -> None:
    """Nothing is rescaled: a kept layer returns the same as in evaluation, a skipped one its input."""
    model = skipping("encoder", 0.5)
    layers = found(model, "encoder.layers.*")
    view = SourceView(padding_mask(MASK, torch.float64))
    torch.manual_seed(6)
    kept = 0
    with torch.no_grad():
        for _ in range(8):
            x, outputs = model.source_embedding(SOURCE), list[Tensor]()
            memory = model.encode(SOURCE, MASK, outputs)
            for layer, y in zip(layers, outputs, strict=True):
                if not torch.equal(y, x):
                    torch.testing.assert_close(y, layer(x, view), atol=1e-10, rtol=0)
                    kept += 1
                x = y
            top = model.encoder.final_norm(x)  # type: ignore[operator]
            torch.testing.assert_close(memory.of(0), top, atol=1e-10, rtol=0)
    assert 16 < kept < 48


def test_layer_drop_with_combined_sublayers_skips_whole_layers() -> None:
    options = {**DLCL, "combination.unit": "sublayer", "combination.norm": "none", "combination.start": "last"}
    model = skipping("encoder", 0.5, **options)
    called: list[tuple[int, str]] = []
    for number, layer in enumerate(found(model, "encoder.layers.*")):
        for part in ("self_attn_residual", "ffn_residual"):
            getattr(layer, part).register_forward_hook(lambda *_, at=(number, part): called.append(at))
    torch.manual_seed(7)
    for _ in range(8):
        called.clear()
        model.encode(SOURCE, MASK)
        assert 0 < len(called) < 2 * DEPTH
        assert called[::2] == [(n, "self_attn_residual") for n, _ in called[::2]]
        assert called[1::2] == [(n, "ffn_residual") for n, _ in called[::2]]


@pytest.mark.parametrize(
    "choices",
    [
        *({"residual": kind} for kind in get_args(ResidualKind)),
        *({"init.kind": kind, "residual": "admin"} for kind in get_args(InitKind)),
        *({"init.omega": omega, "init.kind": "admin", "residual": "admin"} for omega in ("log", "linear", "one")),
        *({"encoder.history": kind, "decoder.history": kind} for kind in get_args(HistoryKind)),
        {"wiring.layer_scale": 0.1, "residual": "layer_scale"},
    ],
    ids=lambda choices: "-".join(map(str, choices.values())),
)
def test_planned_depths_have_an_effect_where_they_change_a_model(choices: dict[str, Any]) -> None:
    """Return its initial values, or what it computes with them."""
    sized = [{**choices, "encoder.layers": 2, "wiring.planned_encoder_layers": planned} for planned in (None, 30)]
    values = []
    for model in (built(each).eval() for each in sized):
        output = model.decode(TARGET, model.encode(SOURCE, MASK))
        values.append(torch.cat([output.flatten(), *(parameter.flatten() for parameter in model.parameters())]))
    assert small_model(sized[1]).depth_matters == (not torch.equal(*values))
