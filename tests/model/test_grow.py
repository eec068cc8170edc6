"""Growing the stacks: how each layer starts, what stays the same, and what the deeper model computes."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from tests.composition import model as small_model
from tests.composition import refusal
from tests.parameter_counts import encoder
from tests.small import moved, small_config
from ziggurat.config.depth import CopyStrategy, GrowthConfig, copied_layers, growth_refused
from ziggurat.config.kinds import DecoderAttentionKind, HistoryKind, ResidualKind
from ziggurat.config.model import ModelConfig
from ziggurat.model.build import build_model, count_parameters
from ziggurat.model.depth import Copies, Deepening, at_depth, deepening, grow_moments, grow_weights
from ziggurat.model.residual.base import Residual
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.model.tensors import weights
from ziggurat.system.errors import ConfigError

VOCABULARY = 11


def pair(choices: dict[str, Any], old: int, new: int, strategy: CopyStrategy) -> tuple[Seq2Seq, Seq2Seq, ModelConfig]:
    """Return a shallow model with random wiring and the deeper one grown from it."""
    deep = small_model({**choices, "encoder.layers": new})
    return (*grown_from(at_depth(deep, old), deep, strategy), deep)


def grown_from(before: ModelConfig, after: ModelConfig, strategy: CopyStrategy) -> tuple[Seq2Seq, Seq2Seq]:
    shallow = moved(build_model(before, VOCABULARY, VOCABULARY, seed=1), 0.1, seed=9)
    grown = build_model(after, VOCABULARY, VOCABULARY, seed=2)
    grow_weights(grown, weights(shallow), deepening(strategy, before, after))
    return shallow.eval(), grown.eval()


def layer(model: Seq2Seq, number: int, stack: str = "encoder") -> dict[str, Tensor]:
    return {n: p.detach() for n, p in model.get_submodule(f"{stack}.layers.{number}").named_parameters()}


# The index maps of Li et al. 2020, section 4, for 4 layers.
MAPS: list[tuple[CopyStrategy, int, list[int]]] = [
    ("g_top", 6, [0, 1, 2, 3, 2, 3]),
    ("g_top", 7, [0, 1, 2, 3, 1, 2, 3]),
    ("g_interpolate", 6, [0, 1, 2, 2, 3, 3]),
    ("g_interpolate", 8, [0, 0, 1, 1, 2, 2, 3, 3]),
    ("top_only", 6, [0, 1, 2, 3, 3, 3]),
    ("copy_all", 8, [0, 1, 2, 3, 0, 1, 2, 3]),
    ("interpolate", 8, [0, 0, 1, 1, 2, 2, 3, 3]),
    # Middle growth of Saunshi et al. 2024 and Kapl et al. 2025.
    ("midas", 5, [0, 1, 1, 2, 3]),
    ("midas", 6, [0, 1, 0, 1, 2, 3]),
    ("midas", 8, [0, 1, 2, 3, 0, 1, 2, 3]),
    ("lidas", 5, [0, 1, 1, 2, 3]),
    ("lidas", 6, [0, 1, 2, 1, 2, 3]),
    ("lidas", 7, [0, 1, 2, 0, 1, 2, 3]),
]


@pytest.mark.parametrize(("strategy", "new", "map_"), MAPS)
def test_each_layer_starts_as_the_strategy_demands(strategy: CopyStrategy, new: int, map_: list[int]) -> None:
    shallow, grown, deep = pair({"residual": "pre"}, 4, new, strategy)
    for number, source in enumerate(map_):
        ours, theirs = layer(grown, number), layer(shallow, source)
        assert ours.keys() == theirs.keys()
        for name, values in ours.items():
            assert torch.equal(values, theirs[name])
            assert values.data_ptr() != theirs[name].data_ptr()
    pointers = [p.data_ptr() for p in grown.encoder.parameters()]
    assert len(set(pointers)) == len(pointers)  # copies, not the same layer twice
    outside = [n for n, _ in shallow.named_parameters() if not n.startswith("encoder.layers.")]
    for name in outside:
        assert torch.equal(grown.get_parameter(name), shallow.get_parameter(name))
    d, f = deep.d_model, deep.d_ff
    assert count_parameters(grown) - count_parameters(shallow) == (new - 4) * encoder(d, f)


@pytest.mark.parametrize("strategy", get_args(CopyStrategy))
@pytest.mark.parametrize("residual", get_args(ResidualKind))
def test_every_residual_kind_grows_or_is_refused_before_the_run(residual: str, strategy: CopyStrategy) -> None:
    deep = small_model({"residual": residual, "encoder.layers": 4, "decoder.layers": 4})
    growth = GrowthConfig.model_validate(
        {"stages": [{"layers": 2, "decoder_layers": 2, "updates": 1}], "copy_strategy": strategy}
    )
    if reasons := growth_refused(growth, deep):
        assert residual in ("keel", "ln_scaling", "siamese")
        assert strategy in ("interpolate", "copy_all", "g_top", "g_interpolate", "midas", "lidas")
        assert f"`residual: {residual}`" in str(reasons[0])
        return
    shallow, grown = grown_from(at_depth(deep, 2, 2), deep, strategy)
    assert count_parameters(grown) > count_parameters(shallow)


def test_random_layers_are_fresh() -> None:
    shallow, grown, deep = pair({"residual": "pre"}, 3, 5, "random")
    fresh = build_model(deep, VOCABULARY, VOCABULARY, seed=2)
    for number in range(3):
        assert all(torch.equal(v, layer(shallow, number)[n]) for n, v in layer(grown, number).items())
    for number in (3, 4):
        assert all(torch.equal(v, layer(fresh, number)[n]) for n, v in layer(grown, number).items())


def test_a_block_adds_its_norm_and_a_row_and_column_of_weights() -> None:
    choices = {"residual": "pre", "encoder.history": "blocks", "combination.period": 2}
    shallow, grown, deep = pair(choices, 4, 6, "g_top")
    d, f = deep.d_model, deep.d_ff
    per_layer = 4 * d * d + 2 * d * f + 9 * d + f
    assert count_parameters(grown) - count_parameters(shallow) == 2 * per_layer + 2 * d + (4 * 4 - 3 * 3)


def test_interpolation_in_the_top_block_grows_the_table_as_a_block_on_top_does() -> None:
    """Li et al. 2020, table 3, "interpolation, g = 6", with 2 layers per block: W keeps its rows, the new one is
    uniform.
    """
    choices = {"residual": "pre", "encoder.history": "blocks", "combination.period": 2}
    shallow, grown, deep = pair(choices, 4, 6, "g_interpolate")
    for number, source in enumerate([0, 1, 2, 2, 3, 3]):
        assert all(torch.equal(v, layer(shallow, source)[name]) for name, v in layer(grown, number).items())
    old, new = (dict(model.get_submodule("encoder.history").named_parameters()) for model in (shallow, grown))
    expected = torch.zeros(4, 4)
    expected[:3, :3] = old["weight"]
    expected[3] = 1 / 4
    assert torch.equal(new["weight"].tril(), expected.tril())
    for norm, source in ((1, 1), (2, 2), (3, 2)):
        assert torch.equal(new[f"norms.{norm}.weight"], old[f"norms.{source}.weight"])
    # The stack's output again in float64: a mean of the embedding and of the norms of the blocks' outputs.
    grown = grown.double()
    x, outputs = torch.randn(1, 3, deep.d_model, dtype=torch.float64), list[Tensor]()
    [found] = grown.encoder(x, torch.ones(1, 3, dtype=torch.bool), outputs)
    blocks = [normed(outputs[2 * k - 1], new[f"norms.{k}.weight"], new[f"norms.{k}.bias"]) for k in (1, 2, 3)]
    mean = (x + blocks[0] + blocks[1] + blocks[2]) / 4
    last = dict(grown.get_submodule("encoder.final_norm").named_parameters())
    torch.testing.assert_close(found, normed(mean, last["weight"], last["bias"]))


def normed(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    """Layer normalisation written out."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain.double() + bias.double()


@pytest.mark.parametrize(
    ("choices", "old", "new", "word"),
    [
        ({"encoder.history": "blocks", "combination.period": 2}, 4, 7, "the last block (2,"),
        ({"encoder.history": "blocks", "combination.period": 4}, 6, 10, "the last block (4,"),
        ({"encoder.history": "blocks", "combination.unit": "sublayer"}, 4, 6, "between old ones"),
        ({"encoder.history": "dlcl"}, 4, 6, "between old ones"),
        ({"memory": "transparent"}, 4, 6, "between old ones"),
    ],
)
def test_interpolation_across_tables_is_refused(choices: dict[str, Any], old: int, new: int, word: str) -> None:
    deep = small_model({"residual": "pre", "encoder.layers": new, **choices})
    growth = {"stages": [{"layers": old, "updates": 1}], "copy_strategy": "g_interpolate"}
    assert any(word in str(reason) for reason in growth_refused(GrowthConfig.model_validate(growth), deep))


@pytest.mark.parametrize("history", get_args(HistoryKind))
@pytest.mark.parametrize("residual", ["pre", "post"])
@pytest.mark.parametrize("unit", ["layer", "sublayer"])
def test_every_history_grows(history: str, residual: str, unit: str) -> None:
    choices = {"residual": residual, "encoder.history": history, "combination.unit": unit, "memory": "transparent"}
    if refusal(choices):
        assert (history, residual) == ("mudd", "post")
        return
    _, grown, _ = pair(choices, 2, 4, "g_top")
    source = torch.tensor([[3, 4, 5]])
    hidden = grown(source, torch.ones(1, 3, dtype=torch.bool), source)
    assert hidden.isfinite().all()


@pytest.mark.parametrize("unit", ["layer", "sublayer"])
@pytest.mark.parametrize("history", ["attention_residuals", "block_attention_residuals"])
def test_trained_readers_of_attention_residuals_stay_and_added_ones_are_fresh(history: str, unit: str) -> None:
    """The weights that read the former stack's output now belong to the first added layer."""
    stacks = {"encoder.history": history, "decoder.history": history, "combination.unit": unit}
    deep = small_model({**stacks, "encoder.layers": 4, "decoder.layers": 4})
    models = grown_from(at_depth(deep, 2, 3), deep, "g_top")
    for stack in ("encoder", "decoder"):
        before, after = (dict(model.get_submodule(f"{stack}.history").named_parameters()) for model in models)
        for name, start in (("query", 0.0), ("gain", 1.0)):
            old = before[name]
            assert (old != start).all(), "trained"
            expected = torch.full_like(after[name], start)
            expected[: len(old)] = old
            assert torch.equal(after[name], expected)


def test_identity_layers_added_leave_the_function_unchanged() -> None:
    """ReZero with a = 0 makes added layers the identity, so the grown model must compute what the shallow one does."""
    shallow, grown, _ = pair({"residual": "rezero"}, 2, 4, "g_top")
    with torch.no_grad():
        for number in (2, 3):
            grown.encoder.layers[number].ffn_residual.branch.zero_()  # type: ignore[index,union-attr]
    source, mask = torch.tensor([[3, 4, 5]]), torch.ones(1, 3, dtype=torch.bool)
    torch.testing.assert_close(grown(source, mask, source), shallow(source, mask, source))


def test_constants_of_depth_stay() -> None:
    shallow, grown, deep = pair({"residual": "deepnorm", "init.kind": "deepnorm"}, 2, 4, "g_top")
    alphas = {layer.ffn_residual.skip for m in (shallow, grown) for layer in m.encoder.layers}  # type: ignore[union-attr]
    assert len(alphas) == 1
    assert alphas == {0.81 * (4**4 * deep.decoder.layers) ** (1 / 16)}
    plain = small_model({"residual": "pre"})
    assert at_depth(plain, 9, 9).wiring == plain.wiring, "a model without such constants has no planned depth"


@pytest.mark.parametrize(
    ("strategy", "old", "new", "word"),
    [
        ("g_top", 2, 5, "grow to at most 4"),
        ("copy_all", 2, 3, "doubles the depth"),
        ("interpolate", 3, 5, "doubles the depth"),
        ("g_interpolate", 2, 5, "grow to at most 4"),
        ("midas", 2, 5, "grow to at most 4"),
        ("lidas", 2, 5, "grow to at most 4"),
        ("midas", 5, 8, "do not divide into blocks of 3"),
        ("g_top", 3, 2, "must be larger"),
    ],
)
def test_unreachable_depths_are_refused(strategy: CopyStrategy, old: int, new: int, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        deepening(strategy, small_config(old, 1), small_config(new, 1))
    with pytest.raises(ConfigError, match=word):
        deepening(strategy, small_config(1, old), small_config(1, new))


def test_another_architecture_is_refused() -> None:
    shallow = build_model(small_model({"d_ff": 40, "encoder.layers": 2}), VOCABULARY, VOCABULARY)
    deep = build_model(small_model({"encoder.layers": 4}), VOCABULARY, VOCABULARY)
    with pytest.raises(ConfigError, match="more than its depth"):
        grow_weights(deep, weights(shallow), Deepening(Copies(2, [0, 1, 0, 1]), Copies(1, [0])))


def test_moments_follow_their_layers() -> None:
    names = ["encoder.layers.0.a", "encoder.layers.1.a", "decoder.a", "decoder.layers.0.a"]
    old = {f"{n}/{m}": torch.full((2,), float(i)) for i, n in enumerate(names, 1) for m in ("exp_avg", "exp_avg_sq")}
    old |= {f"{n}/step": torch.tensor(7.0) for n in names}
    added = [f"encoder.layers.{i}.a" for i in range(4)] + [f"decoder.layers.{i}.a" for i in range(3)]
    new = {name: torch.zeros(2) for name in [*added, "decoder.a"]}
    state = grow_moments(new, old, Deepening(Copies(2, [0, 1, 1, None]), Copies(1, [0, 0, None])))
    assert [float(state[f"encoder.layers.{i}.a/exp_avg"][0]) for i in range(3)] == [1, 2, 2]
    assert [float(state[f"encoder.layers.{i}.a/step"]) for i in range(3)] == [7, 7, 7]
    assert float(state["decoder.a/exp_avg_sq"][1]) == 3
    assert [float(state[f"decoder.layers.{i}.a/exp_avg"][0]) for i in range(2)] == [4, 4]
    assert not [key for key in state if key.startswith(("encoder.layers.3.", "decoder.layers.2."))]


@pytest.mark.parametrize(("strategy", "new", "map_"), MAPS)
def test_a_decoder_grows_likewise(strategy: CopyStrategy, new: int, map_: list[int]) -> None:
    deep = small_model({"encoder.layers": 2, "decoder.layers": new})
    shallow, grown = grown_from(at_depth(deep, 2, 4), deep, strategy)
    for number, source in enumerate(map_):
        ours, theirs = layer(grown, number, "decoder"), layer(shallow, source, "decoder")
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(values, theirs[name]) for name, values in ours.items())
    for name, values in shallow.encoder.named_parameters():
        assert torch.equal(grown.encoder.get_parameter(name), values)


@pytest.mark.parametrize("history", get_args(HistoryKind))
@pytest.mark.parametrize("attention", get_args(DecoderAttentionKind))
def test_every_history_and_attention_of_a_decoder_grows(history: str, attention: str) -> None:
    choices = {"residual": "pre", "decoder.history": history, "decoder.attention": attention}
    if refusal(choices):
        assert history == "mudd"
        return
    deep = small_model({**choices, "encoder.layers": 2, "decoder.layers": 4})
    _, grown = grown_from(at_depth(deep, 2, 2), deep, "g_top")
    source = torch.tensor([[3, 4, 5]])
    assert grown(source, torch.ones(1, 3, dtype=torch.bool), source).isfinite().all()


@pytest.mark.parametrize("strategy", ["g_top", "random"])
def test_added_readers_of_transparent_attention_read_what_their_copies_do(strategy: CopyStrategy) -> None:
    deep = small_model({"residual": "pre", "memory": "transparent", "encoder.layers": 2, "decoder.layers": 4})
    shallow, grown = grown_from(at_depth(deep, 2, 2), deep, strategy)
    before, after = (model.encoder.transparent.mixtures() for model in (shallow, grown))  # type: ignore[union-attr]
    assert torch.equal(after[:2], before)
    torch.testing.assert_close(after[2:], before if strategy == "g_top" else torch.full((2, 3), 1 / 3))


def test_a_decoder_of_identity_layers_computes_what_it_did() -> None:
    deep = small_model({"residual": "rezero", "encoder.layers": 2, "decoder.layers": 4})
    shallow, grown = grown_from(at_depth(deep, 1, 2), deep, "g_top")
    for layers in (grown.encoder.layers[1:], grown.decoder.layers[2:]):  # type: ignore[index]
        for part in layers.modules():
            if isinstance(part, Residual):
                part.branch.detach().zero_()  # type: ignore[union-attr]
    source, mask = torch.tensor([[3, 4, 5]]), torch.ones(1, 3, dtype=torch.bool)
    torch.testing.assert_close(grown(source, mask, source), shallow(source, mask, source))


def test_growing_in_the_middle_by_an_odd_number_of_blocks_is_one_map() -> None:
    for blocks, size in ((1, 2), (3, 2), (5, 3)):
        old = blocks * size
        both = [copied_layers(strategy, old, old + size) for strategy in ("midas", "lidas")]
        assert both[0] == both[1]
        middle = list(range(old // 2 - size // 2, old // 2 + -(-size // 2)))
        assert [layer for layer in range(old) if both[0].count(layer) == 2] == middle
