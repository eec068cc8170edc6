from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ziggurat.config import ModelConfig
from ziggurat.config.model import InitConfig
from ziggurat.model.build import build_model, model_slots
from ziggurat.model.init import INIT, ModelDepth, initialise
from ziggurat.model.roles import Role, Slot
from ziggurat.model.seq2seq import Seq2Seq

OUT, IN = 300, 200
DEPTH = ModelDepth(encoder_layers=12, decoder_layers=5)
QKV = (Role.ATTENTION_QUERY, Role.ATTENTION_KEY, Role.ATTENTION_VALUE)
LINEAR = {*QKV, Role.ATTENTION_OUT, Role.GATE, Role.FFN_IN, Role.FFN_OUT}


def glorot(out: int = OUT, width: int = IN) -> float:
    return math.sqrt(6 / (width + out))


def drawn(role: Role, shape: tuple[int, ...] = (OUT, IN), *, config: dict[str, Any], **place: Any) -> torch.Tensor:
    """Return the values of one parameter, which is 7 before it is initialised."""
    depth = place.pop("depth", DEPTH)
    slot = Slot(torch.full(shape, 7.0), role, "w", **{"fused_out": 3 * OUT if role in QKV else 0, **place})
    initialise([slot], InitConfig.model_validate(config), depth, torch.Generator().manual_seed(1))
    return slot.values


def check_uniform(values: torch.Tensor, bound: float) -> None:
    assert values.abs().max().item() <= bound * (1 + 1e-6)
    assert values.abs().max().item() >= bound * 0.999
    assert values.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.01)
    assert abs(values.mean().item()) < 0.01 * bound


def check_normal(values: torch.Tensor, std: float) -> None:
    assert values.std().item() == pytest.approx(std, rel=0.01)
    assert abs(values.mean().item()) < 0.02 * std
    assert (values.abs() > 2 * std).double().mean().item() == pytest.approx(0.0455, abs=0.004)  # for a normal variable


@pytest.mark.parametrize("kind", INIT)
def test_parameters_that_no_scheme_scales(kind: str) -> None:
    config = {"kind": kind}
    for role in (Role.BIAS, Role.NORM_BIAS):
        assert bool((drawn(role, (IN,), config=config, layer=3) == 0).all())
    assert bool((drawn(Role.NORM_GAIN, (IN,), config=config, layer=3) == 1).all())
    assert bool((drawn(Role.WIRING, (IN,), config=config, layer=3) == 7).all())
    check_uniform(drawn(Role.INPUT_BIAS, (40_000,), config=config), math.sqrt(3 / 40_000))
    check_uniform(drawn(Role.RELATIVE, config=config, layer=3), glorot())
    check_normal(drawn(Role.ADDITIVE, config=config, layer=3), IN**-0.5)
    check_normal(drawn(Role.ADDITIVE, (40_000,), config=config, layer=3), 40_000**-0.5)
    check_normal(drawn(Role.POSITION, config=config), IN**-0.5)


@pytest.mark.parametrize("kind", ["xavier", "depth_scaled", "admin", "deepnorm"])
def test_embeddings_have_variance_one_over_their_width(kind: str) -> None:
    for role in (Role.EMBEDDING, Role.OUTPUT):
        check_normal(drawn(role, config={"kind": kind}), IN**-0.5)


@pytest.mark.parametrize(
    ("qkv", "cross", "out"),
    [
        ("fused", False, 3 * OUT),
        ("fused", True, 3 * OUT),
        ("separate", False, OUT),
        ("separate", True, OUT),
        ("fused_self", False, 3 * OUT),
        ("fused_self", True, OUT),
    ],
)
def test_xavier_counts_query_key_and_value_as_one_matrix_or_three(qkv: str, cross: bool, out: int) -> None:
    for role in QKV:
        for kind in ("xavier", "admin"):
            check_uniform(drawn(role, config={"kind": kind, "qkv": qkv}, layer=2, cross=cross), glorot(out))


def test_xavier_of_a_square_matrix_is_the_papers() -> None:
    """sqrt(3/d), and with fused query, key and value sqrt(3/(2d)): half the variance."""
    d = 256
    check_uniform(drawn(Role.ATTENTION_OUT, (d, d), config={}, layer=1), math.sqrt(3 / d))
    check_uniform(drawn(Role.ATTENTION_KEY, (d, d), config={}, layer=1, fused_out=3 * d), math.sqrt(3 / (2 * d)))


def test_xavier_of_a_query_map_that_is_not_one_of_three_keeps_its_own_bound() -> None:
    check_uniform(drawn(Role.ATTENTION_QUERY, config={"qkv": "fused"}, layer=1, fused_out=0), glorot())


@pytest.mark.parametrize("role", [Role.ATTENTION_OUT, Role.FFN_IN, Role.FFN_OUT, Role.GATE, Role.PROJECTION, Role.LSTM])
def test_xavier_of_other_matrices(role: Role) -> None:
    check_uniform(drawn(role, config={}, layer=4, decoder=True), glorot())


@pytest.mark.parametrize("decoder", [False, True])
@pytest.mark.parametrize("layer", [1, 4, 9])
@pytest.mark.parametrize(("exponent", "alpha"), [(0.25, 1.0), (0.5, 1.0), (0.25, 0.7)])
def test_depth_scaled_bounds(exponent: float, alpha: float, layer: int, decoder: bool) -> None:
    config = {"kind": "depth_scaled", "exponent": exponent, "alpha": alpha, "qkv": "separate"}
    for role in LINEAR:
        values = drawn(role, config=config, layer=layer, decoder=decoder)
        check_uniform(values, glorot() * alpha * layer**-exponent)
    for role in (Role.PROJECTION, Role.LSTM):  # outside the layers of a Transformer
        check_uniform(drawn(role, config=config, layer=layer, decoder=decoder), glorot())


def model(init: dict[str, Any], **more: Any) -> Seq2Seq:
    config: dict[str, Any] = {
        "d_model": 32,
        "d_ff": 96,
        "heads": 2,
        "residual": "post",
        "encoder": {"layers": 9, "attention": "relative"},
        "decoder": {"layers": 4},
        "embedding": {"sharing": "none", "positions": "learned", "shared_bias": True, "max_positions": 9},
        "init": init,
    }
    return build_model(ModelConfig.model_validate(config | more), 29, 31, seed=5)


@pytest.mark.parametrize("attention", ["full", "merged", "average", "merged_full", "simplified_average", "ssru"])
@pytest.mark.parametrize(("exponent", "alpha"), [(0.25, 1.0), (0.5, 1.0), (0.25, 0.5)])
def test_depth_scaled_is_the_plain_initialiser_shrunk_by_depth(exponent: float, alpha: float, attention: str) -> None:
    """Each stack counts its own layers from 1; layer 1 (alpha 1) and everything but linear maps are unchanged."""
    more = {"decoder": {"layers": 4, "attention": attention}}
    plain = model_slots(model({"kind": "xavier"}, **more))
    scaled = model_slots(model({"kind": "depth_scaled", "exponent": exponent, "alpha": alpha}, **more))
    scaled_layers = set()
    for before, after in zip(plain, scaled, strict=True):
        assert (before.name, before.layer) == (after.name, after.layer)
        factor = 1.0
        if before.role in LINEAR:
            stack, number = before.name.split(".layers.")
            layer = int(number.split(".")[0]) + 1
            factor = alpha * layer**-exponent
            scaled_layers.add((stack, layer))
        if factor == 1.0:
            assert torch.equal(after.values, before.values), before.name
        else:
            torch.testing.assert_close(after.values, before.values * factor, msg=before.name)
    assert scaled_layers == {("encoder", n) for n in range(1, 10)} | {("decoder", n) for n in range(1, 5)}


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_the_initialisation_of_one_stack_affects_only_its_layers(side: str) -> None:
    """DS-Init on one stack compared with the plain initialiser, which draws the same numbers."""
    layers = {"encoder": 9, "decoder": 4}[side]
    own = {"layers": layers, "init": {"kind": "depth_scaled", "exponent": 0.5}}
    plain, scaled = (model_slots(model({"kind": "xavier"}, **{side: m})) for m in ({"layers": layers}, own))
    changed = set()
    for before, after in zip(plain, scaled, strict=True):
        inside = before.role in LINEAR and before.name.startswith(f"{side}.layers.")
        factor = before.layer**-0.5 if inside else 1.0
        torch.testing.assert_close(after.values, before.values * factor, msg=before.name)
        changed |= {before.layer} if inside else set()
    assert changed == set(range(1, layers + 1))


def test_a_stack_inherits_missing_settings_from_the_model() -> None:
    given = {"kind": "xavier", "qkv": "separate"}
    values = {"init": given, "encoder": {"init": {"kind": "depth_scaled", "alpha": 0.5}}, "decoder": {"init": None}}
    config = ModelConfig.model_validate(values)
    encoder = config.stack_init(decoder=False)
    assert (encoder.kind, encoder.qkv, encoder.alpha) == ("depth_scaled", "separate", 0.5)
    assert config.stack_init(decoder=True) == config.init == InitConfig.model_validate(given)
    assert ModelConfig.model_validate(config.model_dump()) == config


def test_the_rest_of_a_model_keeps_its_initialisation() -> None:
    """Embeddings follow `model.init`, even if layers have another initialisation; all three draw the same numbers."""
    own = {"residual": "no_norm", "decoder": {"layers": 4, "init": {"kind": "xavier"}}}
    both, plain = (model_slots(model({"kind": kind}, residual="no_norm")) for kind in ("t_fixup", "xavier"))
    changed = 0
    for whole, one, xavier in zip(both, model_slots(model({"kind": "t_fixup"}, **own)), plain, strict=True):
        expected = xavier if whole.decoder and whole.layer else whole
        assert torch.equal(one.values, expected.values), whole.name
        changed += not torch.equal(whole.values, one.values)
    assert changed


@pytest.mark.parametrize("decoder", [False, True])
def test_deepnorm_gains(decoder: bool) -> None:
    n, m = DEPTH[:2]
    beta = (12 * m) ** -0.25 if decoder else 0.87 * (n**4 * m) ** (-1 / 16)
    std = math.sqrt(2 / (IN + OUT))  # separately for query, key and value, whatever `qkv` is
    config = {"kind": "deepnorm", "qkv": "fused"}
    for role in (Role.ATTENTION_VALUE, Role.ATTENTION_OUT, Role.FFN_IN, Role.FFN_OUT):
        for cross in (False, True):
            check_normal(drawn(role, config=config, layer=3, decoder=decoder, cross=cross), beta * std)
    for role in (Role.ATTENTION_QUERY, Role.ATTENTION_KEY, Role.GATE):
        check_normal(drawn(role, config=config, layer=3, decoder=decoder), std)


def test_deepnorm_of_60_and_12_layers_has_the_papers_beta() -> None:
    for decoder, beta in ((False, 0.2676), (True, 0.2887)):
        values = drawn(
            Role.FFN_IN, (1000, 1000), config={"kind": "deepnorm"}, layer=1, decoder=decoder, depth=ModelDepth(60, 12)
        )
        check_normal(values, beta * math.sqrt(2 / 2000))


def test_deepnorm_uses_the_planned_depth() -> None:
    config = {"kind": "deepnorm"}
    grown = model(config, wiring={"planned_encoder_layers": 60})
    values = grown.get_parameter("encoder.layers.0.ffn.in_proj.weight")
    beta = 0.87 * (60**4 * 4) ** (-1 / 16)
    assert values.std().item() == pytest.approx(beta * math.sqrt(2 / (32 + 96)), rel=0.03)


def test_magneto_factors() -> None:
    """6-6: 1.547 and 1.700; 18-18: 2.183 and 1.997 (Wang et al. 2022, section 3.2); queries and keys are Glorot's."""
    config = {"kind": "magneto", "qkv": "separate"}
    for (n, m), (encoder, decoder) in {(6, 6): (1.547, 1.700), (18, 18): (2.183, 1.997)}.items():
        depth = ModelDepth(n, m)
        for role in (Role.ATTENTION_VALUE, Role.ATTENTION_OUT, Role.FFN_IN, Role.FFN_OUT):
            for above, factor in ((False, encoder), (True, decoder)):
                values = drawn(role, config=config, layer=2, decoder=above, depth=depth)
                assert float(values.abs().max()) == pytest.approx(factor * glorot(), rel=2e-3)
            check_uniform(drawn(role, config=config, layer=2, decoder=True, cross=True, depth=depth), glorot())
        check_uniform(drawn(Role.ATTENTION_KEY, config=config, layer=2, depth=depth), glorot())


def test_lipschitz_bounds() -> None:
    """Xu et al.'s code: He's bound sqrt(3 / fan_in) and Glorot's sqrt(6 / (V + d)), each times sqrt(1 / 3)."""
    config = {"kind": "lipschitz", "qkv": "fused"}
    for role in (*LINEAR, Role.OUTPUT):
        check_uniform(drawn(role, config=config, layer=2, decoder=True), math.sqrt(3 / IN) * math.sqrt(1 / 3))
    check_uniform(drawn(Role.EMBEDDING, config=config), glorot() * math.sqrt(1 / 3))


def test_t_fixup_factors() -> None:
    n, m = DEPTH[:2]
    config = {"kind": "t_fixup", "qkv": "fused"}
    decoder, encoder = (9 * m) ** -0.25, 0.67 * n**-0.25
    for role in (Role.ATTENTION_VALUE, Role.ATTENTION_OUT, Role.FFN_IN, Role.FFN_OUT):
        check_uniform(drawn(role, config=config, layer=2), encoder * glorot())
        for cross in (False, True):
            check_uniform(drawn(role, config=config, layer=2, decoder=True, cross=cross), decoder * glorot())
    for role in (Role.ATTENTION_QUERY, Role.ATTENTION_KEY):
        check_uniform(drawn(role, config=config, layer=2, decoder=True), glorot(3 * OUT))
    check_normal(drawn(Role.EMBEDDING, config=config), (9 * n) ** -0.25 * IN**-0.5)
    check_normal(drawn(Role.EMBEDDING, config=config, decoder=True), decoder * IN**-0.5)
    check_normal(drawn(Role.OUTPUT, config=config), IN**-0.5)


@pytest.mark.parametrize("sharing", ["none", "decoder", "all"])
def test_t_fixup_of_unequal_depths_scales_embeddings_by_the_stack_that_reads_them(sharing: str) -> None:
    """Huang et al.'s code: the encoder scales its table, which may be shared; the decoder only an unshared one."""
    config = {"kind": "t_fixup"}
    values = {"d_model": 32, "heads": 2, "encoder": {"layers": 9}, "decoder": {"layers": 4}, "init": config}
    chosen = ModelConfig.model_validate(values | {"residual": "no_norm", "embedding": {"sharing": sharing}})
    small = build_model(chosen, 31, 31, seed=5)
    width = 32**-0.5
    depths = {"source": 9, "target": 9 if sharing == "all" else 4}
    for side, depth in depths.items():
        table = small.get_parameter(f"{side}_embedding.tokens.weight")
        assert table.std().item() == pytest.approx((9 * depth) ** -0.25 * width, rel=0.05)
    if sharing == "none":
        assert small.output.weight.std().item() == pytest.approx(width, rel=0.05)


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("decoder", [False, True])
def test_fixup_factors(decoder: bool, merged: bool) -> None:
    depth = DEPTH._replace(merged=merged)
    branches = 2 * depth.encoder_layers + 3 * depth.decoder_layers
    config = {"kind": "fixup", "qkv": "fused_self"}
    power = -1 / 8 if merged and decoder else -1 / 6
    for role in QKV:
        place = {"layer": 2, "decoder": decoder, "depth": depth}
        check_uniform(drawn(role, config=config, **place), branches**power * glorot(3 * OUT))
        check_uniform(drawn(role, config=config, cross=True, **place), branches**power * glorot())
    values = drawn(Role.FFN_IN, config=config, layer=2, decoder=decoder, depth=depth)
    check_uniform(values, branches**-0.5 * glorot())
    for role in (Role.ATTENTION_OUT, Role.FFN_OUT, Role.OUTPUT):
        assert bool((drawn(role, config=config, layer=2, decoder=decoder, depth=depth) == 0).all())
    check_normal(drawn(Role.EMBEDDING, config=config, depth=depth), IN**-0.5)


def test_fixup_of_a_whole_model_starts_as_the_identity() -> None:
    """Every branch is zero, so the decoder's states equal its input; merged attention has the exponent 1/8."""
    tiny = model({"kind": "fixup"}, residual="fixup", decoder={"layers": 4, "attention": "merged"}).eval()
    source, target = torch.tensor([[4, 5, 6]]), torch.tensor([[2, 7]])
    states = tiny(source, torch.ones(1, 3, dtype=torch.bool), target)
    torch.testing.assert_close(states, tiny.target_embedding(target))
    assert bool((tiny.logits(states) == 0).all())
    query = tiny.get_parameter("decoder.layers.1.merged_attn.cross.q_proj.weight")
    bound = (2 * 9 + 3 * 4) ** (-1 / 8) * glorot(96, 32)
    assert bound * 0.98 < query.abs().max().item() <= bound


def test_uniform_of_rnmt() -> None:
    config = {"kind": "uniform", "uniform": 0.03}
    for role in (Role.LSTM, Role.EMBEDDING, Role.OUTPUT, Role.PROJECTION):
        check_uniform(drawn(role, config=config, layer=2), 0.03)
    for role in (Role.ATTENTION_QUERY, Role.ATTENTION_KEY):
        check_uniform(drawn(role, config=config, layer=2, fused_out=0), glorot())


@pytest.mark.parametrize("kind", ["xavier", "uniform"])
def test_every_parameter_of_rnmt_is_drawn(kind: str) -> None:
    config = {
        "family": "rnmt",
        "d_model": 16,
        "heads": 4,
        "encoder": {"layers": 3},
        "decoder": {"layers": 2},
        "embedding": {"sharing": "none", "positions": "none", "output_bias": True},
        "init": {"kind": kind},
    }
    rnmt = build_model(ModelConfig.model_validate(config), 29, 31, seed=5)
    again = build_model(ModelConfig.model_validate(config), 29, 31, seed=5)
    other = build_model(ModelConfig.model_validate(config), 29, 31, seed=6)
    for slot, same, different in zip(*map(model_slots, (rnmt, again, other)), strict=True):
        assert torch.equal(slot.values, same.values)
        constant = slot.role in (Role.BIAS, Role.NORM_BIAS, Role.NORM_GAIN, Role.WIRING)
        assert torch.equal(slot.values, different.values) == constant, slot.name


def test_building_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    model({"kind": "depth_scaled"})
    assert torch.equal(torch.rand(4), expected)
