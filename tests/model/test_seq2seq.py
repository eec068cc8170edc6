from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model.checks import (
    V,
    check_every_source_token_reaches_every_output,
    check_steps_equal_full_decoding,
)
from tests.parameter_counts import decoder, encoder
from tests.small import moved, small_config
from ziggurat.config import ModelConfig
from ziggurat.config.model import PRESETS
from ziggurat.model.build import assemble, build_model, count_parameters, model_slots
from ziggurat.model.dropout import Dropout
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.system.errors import ConfigError


def tiny(residual: str = "pre", **more: Any) -> Seq2Seq:
    model = build_model(small_config(2, 3, residual=residual, **more), V, V, seed=3)
    return moved(model.double().eval(), 0.2)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "none"])
@pytest.mark.parametrize("residual", ["post", "pre"])
@settings(max_examples=8)
@given(data=st.data())
def test_steps_equal_full_decoding_through_reordering(residual: str, positions: str, data: st.DataObject) -> None:
    check_steps_equal_full_decoding(tiny(residual, embedding={"positions": positions}), data)


def test_every_source_token_reaches_every_output() -> None:
    check_every_source_token_reaches_every_output(tiny())


@pytest.mark.parametrize(
    ("preset", "layers", "residual", "vocabulary", "sharing", "millions"),
    [
        # Counts of published systems; where a paper rounds to millions, the exact value of its formula.
        ("base", (6, 6), "post", (32768, 32768), "all", 60.918 - 0.002),
        ("base", (6, 6), "pre", (44512, 44512), "all", 66.929),
        ("base", (60, 12), "post", (32768, 32768), "all", 256.37),
        ("base", (20, 6), "pre", (34040, 34040), "all", 105.70),
        ("base", (6, 6), "post", (27500, 27523), "decoder", 72.311),
        ("big", (6, 6), "pre", (33230, 33230), "all", 210.4),
    ],
)
def test_parameter_counts_of_the_papers(
    preset: str,
    layers: tuple[int, int],
    residual: str,
    vocabulary: tuple[int, int],
    sharing: str,
    millions: float,
) -> None:
    config = ModelConfig.model_validate(
        {
            "preset": preset,
            "residual": residual,
            "encoder": {"layers": layers[0]},
            "decoder": {"layers": layers[1]},
            "embedding": {"sharing": sharing},
        }
    )
    with torch.device("meta"):
        count = count_parameters(assemble(config, *vocabulary))
    assert count / 1e6 == pytest.approx(millions, abs=0.05)


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("residual", ["post", "pre"])
def test_parameter_count_follows_the_formula(preset: str, residual: str) -> None:
    d, f = PRESETS[preset]["d_model"], PRESETS[preset]["d_ff"]
    config = {"preset": preset, "residual": residual, "encoder": {"layers": 2}, "decoder": {"layers": 1}}
    for sharing, matrices in (("all", 1), ("decoder", 2), ("none", 3)):
        model_config = ModelConfig.model_validate(config | {"embedding": {"sharing": sharing}})
        with torch.device("meta"):
            count = count_parameters(assemble(model_config, V, V))
        assert count == 2 * encoder(d, f) + decoder(d, f) + matrices * V * d + (4 * d if residual == "pre" else 0)


def test_embedding_sharing() -> None:
    shared = tiny(embedding={"sharing": "all"})
    assert shared.source_embedding.tokens.weight is shared.target_embedding.tokens.weight is shared.output.weight
    decoder = tiny(embedding={"sharing": "decoder"})
    assert decoder.source_embedding.tokens.weight is not decoder.output.weight is decoder.target_embedding.tokens.weight
    none = tiny(embedding={"sharing": "none"})
    assert none.target_embedding.tokens.weight is not none.output.weight
    config = ModelConfig.model_validate({"d_model": 8, "heads": 2})
    with pytest.raises(ConfigError, match="the source has 5 tokens and the target 6"):
        build_model(config, 5, 6)


def test_parameter_names_are_the_same_for_every_residual_kind() -> None:
    def sub_layer_names(residual: str) -> set[str]:
        names = (name for name, _ in tiny(residual).named_parameters())
        return {n for n in names if "_residual." not in n and "final_norm" not in n}

    assert sub_layer_names("post") == sub_layer_names("pre")
    expected = {f"decoder.layers.0.{n}" for n in ("self_attn", "cross_attn", "ffn")}
    assert expected <= {".".join(n.split(".")[:4]) for n in sub_layer_names("pre")}


@pytest.mark.parametrize("qkv", ["fused", "separate"])
def test_initial_weights_have_the_bounds_of_glorot(qkv: str) -> None:
    config = ModelConfig.model_validate(
        {
            "d_model": 64,
            "d_ff": 256,
            "heads": 4,
            "encoder": {"layers": 2},
            "decoder": {"layers": 2},
            "init": {"qkv": qkv},
        }
    )
    model = build_model(config, 500, 500, seed=1)
    d, f = 64, 256
    bounds = {
        "attention_query": (6 / (d + (3 * d if qkv == "fused" else d))) ** 0.5,
        "attention_out": (6 / (2 * d)) ** 0.5,
        "ffn_in": (6 / (d + f)) ** 0.5,
        "ffn_out": (6 / (d + f)) ** 0.5,
    }
    bounds["attention_key"] = bounds["attention_value"] = bounds["attention_query"]
    seen = set()
    for slot in model_slots(model):
        role = slot.role.value
        seen.add(role)
        if role in bounds:
            assert float(slot.values.abs().max()) <= bounds[role]
            assert float(slot.values.detach().std()) == pytest.approx(bounds[role] / 3**0.5, rel=0.05)
            assert slot.layer in (1, 2)
        elif role == "embedding":
            assert float(slot.values.detach().std()) == pytest.approx(d**-0.5, rel=0.02)
            assert slot.layer == 0
        else:
            assert float(slot.values.detach().std()) == 0
            assert float(slot.values.mean()) == (1.0 if role == "norm_gain" else 0.0)
    assert seen == {*bounds, "embedding", "bias", "norm_gain", "norm_bias"}


def test_the_seed_fixes_the_weights_and_leaves_the_global_generator_alone() -> None:
    config = ModelConfig.model_validate({"d_model": 8, "heads": 2})
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first, second, other = (build_model(config, V, V, seed=seed) for seed in (1, 1, 2))
    for a, b, c in zip(first.parameters(), second.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.unique().numel() < 3 or not torch.equal(a, c)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("place", ["residual", "attention", "activation", "embedding"])
def test_each_dropout_is_where_it_belongs(place: str) -> None:
    """Each option alone changes training, in each stack that has it, and nothing in evaluation."""
    none = dict.fromkeys(("residual", "attention", "activation", "embedding"), 0.0)
    model = build_model(small_config(1, 1, d_ff=16, dropout={**none, place: 0.5}), V, V)
    used = [name for name, module in model.named_modules() if isinstance(module, Dropout) and module.p > 0]
    calls: list[str] = []
    for name in used:
        model.get_submodule(name).register_forward_hook(lambda *_args, name=name: calls.append(name))
    source, target = torch.randint(4, V, (3, 5)), torch.randint(4, V, (3, 6))
    mask = torch.ones(3, 5, dtype=torch.bool)
    model.train()
    torch.manual_seed(0)
    first, second = model(source, mask, target), model(source, mask, target)
    assert not torch.equal(first, second)
    assert set(calls) == set(used)
    expected = {"residual": 5, "attention": 3, "activation": 2, "embedding": 2}[place]
    assert len(calls) == 2 * expected
    model.eval()
    assert torch.equal(model(source, mask, target), model(source, mask, target))
