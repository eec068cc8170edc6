from __future__ import annotations

import contextlib
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from tests.model.checks import V, batch
from tests.small import small_config
from ziggurat.config import ModelConfig
from ziggurat.config.kinds import HistoryKind, ResidualKind
from ziggurat.exchange.plain import NotPlainError, fold
from ziggurat.model.build import build_model
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.model.tensors import load_weights, weights
from ziggurat.system.errors import ConfigError

EXACT: dict[str, Any] = {"atol": 1e-12, "rtol": 0.0}
FOLDED = {
    *("post", "pre", "admin", "deepnorm", "branch_norm", "layer_scale", "ln_scaling"),
    *("latest", "dlcl", "dense", "average", "blocks"),
}
"""FOLDED are the kinds of residuals and, with `residual: admin`, of histories that fold exactly; others are refused."""
STACKS = [("encoder", 3, ("self_attn", "ffn")), ("decoder", 2, ("self_attn", "cross_attn", "ffn"))]


def config_of(residual: str, **more: Any) -> ModelConfig:
    return small_config(3, 2, residual=residual, **more)


def random_model(config: ModelConfig, *, first: float = 1.0) -> Seq2Seq:
    """Randomise every parameter; the first omega of each stack is `first`."""
    model = build_model(config, V, V, seed=3).double().eval()
    generator = torch.Generator().manual_seed(4)
    seen = set()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if name.endswith(".skip"):
                stack = name.split(".")[0]
                # Of either sign, away from 0.
                parameter.copy_(torch.where(noise > -1, 1.5 + 0.3 * noise, noise) if stack in seen else first)
                seen.add(stack)
            else:
                parameter += 0.2 * noise
    return model


def outputs(model: Seq2Seq) -> Tensor:
    source, mask, target = batch()
    memory = model.encode(source, mask)
    logits = model.logits(model.decode(target, memory))
    return torch.cat([logits.flatten(), *(state[mask].flatten() for state in memory.states)])


def check_exact(model: Seq2Seq, config: ModelConfig) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Fold, build the plain model, compare encoder and decoder outputs; return the result of `fold`."""
    given = weights(model)
    before = {name: tensor.clone() for name, tensor in given.items()}
    plain_config, tensors = fold(config, given)
    for name, tensor in given.items():
        assert torch.equal(tensor, before[name]), f"{name} was changed in place"
    plain = build_model(plain_config, V, V).double().eval()
    load_weights(plain, tensors, "folded")
    torch.testing.assert_close(outputs(plain), outputs(model), **EXACT)
    return plain_config, tensors


def residuals_of(config: ModelConfig) -> tuple[str, str]:
    return config.encoder_residual, config.decoder_residual


ADMIN: list[dict[str, Any]] = [
    {},
    {"norm": "rms"},
    {"norm": "scale", "embedding": {"unit_length": True, "sharing": "decoder"}, "encoder": {"history": "dlcl"}},
    {"activation": "swiglu", "attention": {"qk_norm": "layer", "query_scale": True}},
    {
        "encoder": {"attention": "relative"},
        "decoder": {"attention": "relative"},
        "attention": {"relative_values": True},
    },
    {"decoder": {"attention": "simplified_average"}},
    {"decoder": {"attention": "ssru"}},
    {"decoder": {"attention": "merged"}, "attention": {"share_value": False}},
    {"decoder": {"attention": "merged_full"}, "embedding": {"positions": "rotary"}},
    {"encoder": {"d_model": 12, "d_ff": 16}, "embedding": {"sharing": "decoder"}},
    {"encoder": {"history": "dlcl"}, "decoder": {"history": "dense"}},
    {"decoder": {"history": "dlcl"}, "combination": {"unit": "sublayer", "normalize_embedding": True}},
    {"encoder": {"history": "blocks", "layers": 5}, "combination": {"period": 2}},
    {
        "encoder": {"history": "blocks"},
        "decoder": {"history": "blocks"},
        "combination": {"period": 4, "unit": "sublayer"},
    },
]


@pytest.mark.parametrize("more", ADMIN, ids=str)
def test_folding_admin_leaves_the_function_unchanged(more: dict[str, Any]) -> None:
    """All vectors omega but the first are arbitrary, gains and biases random."""
    config = config_of("admin", init={"kind": "admin"}, **more)
    plain, tensors = check_exact(random_model(config), config)
    assert residuals_of(plain) == ("post", "post")
    assert plain.init.kind == "xavier"
    assert not any(name.endswith(".skip") for name in tensors)


def test_the_factors_of_a_base_fold_into_the_maps() -> None:
    config = config_of("pre", transfer={"width": 4, "encoder_layers": 1, "decoder_layers": 1})
    plain, tensors = check_exact(random_model(config), config)
    assert plain.transfer is None
    assert "decoder.final_norm.weight" in tensors


@pytest.mark.parametrize("residual", ["pre", "deepnorm", "ln_scaling"])
def test_lengths_fold_into_gains_and_rows(residual: str) -> None:
    embedding = {"unit_length": True, "sharing": "none", "output_bias": True}
    config = config_of(residual, norm="scale", embedding=embedding, encoder={"d_model": 12})
    plain, tensors = check_exact(random_model(config), config)
    assert (plain.norm, plain.embedding.unit_length) == ("rms", False)
    assert not any(name.endswith(".length") for name in tensors)


def test_folding_changes_only_what_it_must() -> None:
    config = config_of("admin")
    model = random_model(config)
    before = weights(model)
    _, after = fold(config, before)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    expected = set()
    for stack, layers, names in STACKS:
        for layer in range(layers):
            for name in names:
                at = f"{stack}.layers.{layer}."
                if (layer, name) != (0, "self_attn"):
                    # Only the query side of cross-attention changes, because keys and values read the memory.
                    reads = {"self_attn": "qkv_proj", "cross_attn": "q_proj", "ffn": "in_proj"}[name]
                    expected.add(f"{at}{name}.{reads}.weight")
                if (layer, name) != (layers - 1, names[-1]):  # the last norm of a stack stays
                    expected |= {f"{at}{name}_residual.out_norm.{kind}" for kind in ("weight", "bias")}
    assert changed == expected


def test_an_omega_of_one_folds_anywhere() -> None:
    more: dict[str, Any] = {
        "encoder": {"history": "top_only"},
        "decoder": {"attention": "average", "history": "depth_weighted"},
        "memory": "transparent",
    }
    config = config_of("admin", **more)
    model = random_model(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".skip"):
                parameter.fill_(1.0)
    check_exact(model, config)


@pytest.mark.parametrize("omega", ["log", "linear", "one"])
def test_a_constant_omega_folds_into_the_maps_that_write_to_the_stream(omega: str) -> None:
    config = config_of("admin", init={"kind": "admin", "omega": omega}, decoder={"attention": "merged"})
    model = build_model(config, V, V, seed=3).double().eval()
    plain, _ = check_exact(model, config)
    assert (plain.encoder.layer_norm_epsilon is None) == (omega == "one")


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"norm": "rms", "activation": "swiglu"},
        {"decoder": {"attention": "merged"}},
        {"decoder": {"attention": "merged_full"}, "encoder": {"attention": "relative"}},
        {"decoder": {"attention": "simplified_average"}, "memory": "transparent"},
        {"encoder": {"history": "depth_weighted"}, "combination": {"period": 1}},
        {"encoder": {"history": "dlcl"}, "combination": {"norm": "none"}},
        {"wiring": {"planned_encoder_layers": 30}, "layer_norm_epsilon": 0.1},
        {"encoder": {"layer_norm_epsilon": 0.3}},
    ],
    ids=str,
)
def test_folding_deepnorm_is_exact_with_an_epsilon_for_each_stack(more: dict[str, Any]) -> None:
    config = config_of("deepnorm", init={"kind": "deepnorm"}, **more)
    plain, _ = check_exact(random_model(config), config)
    assert residuals_of(plain) == ("post", "post")
    n, m = (config.wiring.planned_encoder_layers or 3), 2
    for stack, of, alpha in (
        (plain.encoder, config.encoder, 0.81 * (n**4 * m) ** (1 / 16)),
        (plain.decoder, config.decoder, (3 * m) ** 0.25),
    ):
        assert stack.layer_norm_epsilon == pytest.approx(
            (of.layer_norm_epsilon or config.layer_norm_epsilon) / alpha**2
        )


def test_the_epsilon_matters() -> None:
    """Without an epsilon per stack, folded DeepNorm is off by far more than rounding."""
    config = config_of("deepnorm", layer_norm_epsilon=0.01)
    model = random_model(config)
    folded, tensors = fold(config, weights(model))
    values = folded.model_dump()
    values["encoder"]["layer_norm_epsilon"] = values["decoder"]["layer_norm_epsilon"] = None
    plain = build_model(ModelConfig.model_validate(values), V, V).double().eval()
    load_weights(plain, tensors, "folded")
    assert (outputs(plain) - outputs(model)).abs().max().item() > 1e-4


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"encoder": {"history": "dlcl"}, "decoder": {"history": "top_only"}, "memory": "transparent"},
        {"decoder": {"attention": "merged", "history": "dlcl"}, "activation": "swiglu", "norm": "rms"},
    ],
    ids=str,
)
@pytest.mark.parametrize("residual", ["layer_scale", "ln_scaling"])
def test_a_scaled_branch_folds_into_plain_pre_norm(residual: str, more: dict[str, Any]) -> None:
    config = config_of(residual, **more)
    plain, tensors = check_exact(random_model(config), config)
    assert residuals_of(plain) == ("pre", "pre")
    assert not any(name.endswith(".branch") for name in tensors)


def test_stacks_of_different_kinds() -> None:
    config = config_of("layer_scale", encoder={"residual": "admin"})
    plain, _ = check_exact(random_model(config), config)
    assert residuals_of(plain) == ("post", "pre")


def test_ranges_of_layers_that_all_become_pre_norm_fold() -> None:
    ranges = [{"layers": 1, "residual": "layer_scale"}, {"layers": 1, "residual": "ln_scaling"}]
    config = config_of("pre", encoder={"ranges": ranges}, decoder={"residual": "ln_scaling", "ranges": ranges[:1]})
    plain, _ = check_exact(random_model(config), config)
    assert residuals_of(plain) == ("pre", "pre")
    assert plain.encoder.ranges == plain.decoder.ranges == []


@pytest.mark.parametrize("residual", ["post", "pre"])
def test_plain_models_stay_as_they_are(residual: str) -> None:
    config = config_of(residual)
    model = random_model(config)
    again, tensors = fold(config, weights(model))
    assert again == config
    assert tensors.keys() == weights(model).keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in weights(model).items())


@pytest.mark.parametrize("normed", [False, True])
def test_a_trained_first_omega_folds_where_a_norm_feeds_the_first_sublayer(normed: bool) -> None:
    more: dict[str, Any] = {"encoder": {"history": "dlcl"}, "decoder": {"history": "dlcl"}}
    config = config_of("admin", combination={"normalize_embedding": normed}, **more)
    model = random_model(config, first=1.2)
    if normed:
        check_exact(model, config)
    else:
        with pytest.raises(ConfigError, match="its input, an embedding"):
            fold(config, weights(model))


@pytest.mark.parametrize("positions", ["learned", "rotary", "none"])
@pytest.mark.parametrize("sharing", ["none", "decoder"])
def test_a_trained_first_omega_folds_into_embeddings_and_positions(sharing: str, positions: str) -> None:
    embedding = {"sharing": sharing, "positions": positions, "zero_start": True, "output_bias": True}
    config = config_of("admin", init={"kind": "admin"}, embedding=embedding)
    model = random_model(config, first=1.2)
    with torch.no_grad():
        for stack in (model.encoder, model.decoder):
            omega = stack.layers[0].get_parameter("self_attn_residual.skip")
            omega.copy_(torch.linspace(-2.0, 1.7, len(omega)))
    plain, tensors = check_exact(model, config)
    assert residuals_of(plain) == ("post", "post")
    for side in ("source_embedding", "target_embedding"):
        assert not torch.equal(tensors[f"{side}.tokens.weight"], weights(model)[f"{side}.tokens.weight"])


@pytest.mark.parametrize(
    ("embedding", "reason", "stacks"),
    [
        ({}, "`embedding.positions: sinusoidal`", 2),
        ({"positions": "learned"}, "`embedding.sharing: all`", 2),
        ({"positions": "learned", "sharing": "none", "shared_bias": True}, "`embedding.shared_bias`", 2),
    ],
)
def test_an_embedding_that_cannot_take_the_first_omega(embedding: dict[str, Any], reason: str, stacks: int) -> None:
    config = config_of("admin", embedding=embedding)
    with pytest.raises(NotPlainError) as refused:
        fold(config, weights(random_model(config, first=1.2)))
    assert len(refused.value.reasons) == stacks
    for message in refused.value.reasons:
        assert reason in message
        assert "`model.wiring.omega_trainable: false`" in message
        assert "--to ctranslate2" in message


def test_a_trained_first_omega_is_refused_with_every_reason() -> None:
    config = config_of("admin", decoder={"attention": "average"})
    with pytest.raises(ConfigError, match="not equal to any plain Transformer") as refused:
        fold(config, weights(random_model(config, first=1.2)))
    text = str(refused.value)
    assert text.count("omega of") == 1 + 1 + 1  # the first of each stack, and the second layer's average attention
    assert "omega of encoder.layers.0.self_attn is not 1" in text
    assert "omega of decoder.layers.0.self_attn is not 1" in text
    assert "omega of decoder.layers.1.self_attn is not 1, and not only linear maps read its input" in text
    assert "omega_trainable" in text


@pytest.mark.parametrize(
    ("residual", "more", "reason"),
    [
        ("admin", {"memory": "transparent"}, "omega of encoder.layers.1.self_attn is not 1, and its input"),
        ("admin", {"decoder": {"history": "top_only"}}, "omega of decoder.layers.1.self_attn is not 1, and its input"),
        ("admin", {"decoder": {"attention": "merged"}}, "omega of decoder.layers.1.merged_attn is not 1, and not only"),
        ("admin", {"encoder": {"history": "dlcl"}, "combination": {"norm": "none"}}, "omega of encoder.layers.1.self"),
        ("deepnorm", {"encoder": {"history": "dlcl"}}, "the norms of `history: dlcl` keep their epsilon"),
        ("deepnorm", {"decoder": {"attention": "average"}}, "output of decoder.layers.0.self_attn is not"),
        ("layer_scale", {"decoder": {"attention": "merged_gated"}}, "output of decoder.layers.0.merged_attn is not"),
        ("rezero", {}, "encoder: `residual: rezero` has no plain form"),
        ("hyper", {}, "decoder: `residual: hyper` has no plain form"),
        ("pre", {"wiring": {"gpas": True}}, "encoder: `wiring.gpas` has no plain form"),
        ("pre", {"decoder": {"ranges": [{"layers": 1, "residual": "post"}]}}, "decoder: `ranges`: layers of several"),
    ],
)
def test_models_that_cannot_be_folded_are_refused(residual: str, more: dict[str, Any], reason: str) -> None:
    config = config_of(residual, **more)
    with pytest.raises(ConfigError) as refused:
        fold(config, weights(random_model(config)))
    assert reason in str(refused.value)


@pytest.mark.parametrize("unit", ["layer", "sublayer"])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in get_args(HistoryKind) if kind != "mudd"])  # for pre-norm only
def test_with_every_history_folding_is_exact_or_refused(kind: str, normed: bool, unit: str) -> None:
    more: dict[str, Any] = {"encoder": {"history": kind}, "decoder": {"history": kind}}
    combination = {"normalize_embedding": normed, "unit": unit, "period": 2}
    config = config_of("admin", combination=combination, **more)
    model = random_model(config)
    with contextlib.nullcontext() if kind in FOLDED else pytest.raises(NotPlainError):
        check_exact(model, config)


@pytest.mark.parametrize("kind", get_args(ResidualKind))
def test_with_every_residual_folding_is_exact_or_refused(kind: str) -> None:
    config = config_of(kind)
    model = random_model(config)
    with contextlib.nullcontext() if kind in FOLDED else pytest.raises(NotPlainError):
        check_exact(model, config)


def test_an_omega_of_zero_is_refused() -> None:
    config = config_of("admin")
    model = random_model(config)
    with torch.no_grad():
        model.get_parameter("decoder.layers.1.ffn_residual.skip")[3] = 0
    with pytest.raises(ConfigError, match="ffn is 0 or not finite"):
        fold(config, weights(model))
