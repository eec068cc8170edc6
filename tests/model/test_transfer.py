"""Transfer of a learning rate (CompleteP): factors compared with the paper's table, and their purpose."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import torch

from tests.conftest import tiny_experiment
from tests.small import small_config
from ziggurat.config import Experiment, ModelConfig
from ziggurat.config.kinds import HistoryKind
from ziggurat.config.load import change_section
from ziggurat.config.train import LossConfig, OptimiserConfig
from ziggurat.data.corpus import Store
from ziggurat.data.loader import Batch, SpecialIds, collate
from ziggurat.data.prepare import prepare
from ziggurat.inspect.tuning import Size, coordinates, spread, with_base
from ziggurat.model.build import build_model, parameter_roles, parameter_scales
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.train.optim import Optimiser
from ziggurat.train.parallel import Parallel
from ziggurat.train.update import train_update

VOCABULARY = 50
BASE = {"width": 32, "encoder_layers": 2, "decoder_layers": 2}


def config_of(d_model: int, encoder: int, decoder: int, **transfer: Any) -> ModelConfig:
    """Heads are 16 wide at every width."""
    sizes = {"d_model": d_model, "d_ff": 2 * d_model, "heads": d_model // 16, "residual": "pre"}
    return small_config(encoder, decoder, **sizes, transfer=transfer or None)


def batch() -> Batch:
    draw = torch.Generator().manual_seed(2)
    pairs = [torch.randint(5, VOCABULARY, (2, 7), generator=draw).tolist() for _ in range(8)]
    return collate(
        [np.array(s) for s, _ in pairs], [np.array(t) for _, t in pairs], np.arange(8), SpecialIds(0, 2, 3, 0, 3)
    )


def optimiser_of(model: Seq2Seq, config: ModelConfig, **options: Any) -> Optimiser:
    chosen = OptimiserConfig.model_validate({"kind": "adamw", "epsilon": 1e-8, "weight_decay": 0.1, **options})
    return Optimiser(model, parameter_roles(model), chosen, scales=parameter_scales(model, config))


def trained(config: ModelConfig, rate: float, updates: int, **options: Any) -> Seq2Seq:
    model = build_model(config, VOCABULARY, VOCABULARY)
    optimiser, parallel = optimiser_of(model, config, **options), Parallel(model, LossConfig(label_smoothing=0.0))
    for _ in range(updates):
        train_update(parallel, [batch()], optimiser, rate=rate, clip_norm=None)
    return model.eval()


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_at_the_size_of_the_base_nothing_changes(moments: str) -> None:
    # The rounding of bf16 moments depends on the names of parameters, one of which is new; it shows from update 2 on.
    updates = 3 if moments == "fp32" else 1
    plain, based = (trained(config_of(32, 2, 2, **base), 1e-3, updates, moments=moments) for base in ({}, BASE))
    one, other = dict(plain.named_parameters()), dict(based.named_parameters())
    names = {name: name.replace("decoder.final_norm.", "decoder.final_norm.norm.") for name in one}
    for name, its in names.items():
        torch.testing.assert_close(other[its], one[name], atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("exponent", [1.0, 0.5])
def test_factors_match_the_table(exponent: float) -> None:
    """m_N = 4, m_L = 3 in the encoder and 2 in the decoder."""
    config = config_of(128, 6, 4, **BASE, exponent=exponent)
    model = build_model(config, VOCABULARY, VOCABULARY)
    optimiser = optimiser_of(model, config)
    optimiser.set_rate(1.0)
    had = {
        optimiser.names[p]: (group["lr"], group["eps"] / 1e-8, group["weight_decay"] / 0.1)
        for part in optimiser.parts
        for group in part.param_groups
        for p in group["params"]
    }
    for stack, depth in (("encoder", 3.0), ("decoder", 2.0)):
        layer, epsilon = f"{stack}.layers.1.", depth**-exponent / 4
        assert had[layer + "ffn.in_proj.weight"] == pytest.approx((depth ** (exponent - 1) / 4, epsilon, 4))
        assert had[layer + "self_attn.out_proj.weight"] == had[layer + "ffn.in_proj.weight"]
        for vector in ("ffn.in_proj.bias", "ffn_residual.in_norm.weight"):
            assert had[layer + vector] == pytest.approx((depth ** (exponent - 1), epsilon, 0))
        branches = {r.branch for r in model.modules() if getattr(r, "branch", None) and r in _residuals(model, stack)}
        assert [*branches] == [pytest.approx(depth**-exponent)]
    assert had["encoder.final_norm.weight"] == (1, 1, 0)
    assert had["source_embedding.tokens.weight"] == pytest.approx((0.5, 0.5, 0))
    assert float(model.decoder.final_norm.factor) == 0.5  # type: ignore[union-attr, arg-type]


def _residuals(model: Seq2Seq, stack: str) -> set[Any]:
    return set(getattr(model, stack).modules())


SIZES = {"width": [Size(32, 2, 2), Size(128, 2, 2)], "depth": [Size(32, 2, 2), Size(32, 24, 24)]}
STATES = ("memory", "decoder", "logits")


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    """The model has width 32; heads are 16 wide."""
    made = tiny_experiment(tmp_path_factory.mktemp("transfer"))
    prepare(made.data)
    return made.model_copy(update={"model": config_of(32, 2, 2)})


def spreads(experiment: Experiment, sizes: list[Size]) -> list[float]:
    """Return the ratio of the largest to the smallest change for each of STATES; a batch holds the longest pair."""
    store = Store.open(experiment.data.store)
    found = [coordinates(experiment, store, size, tokens=1) for size in sizes]
    return [spread(found, name) for name in STATES]


@pytest.mark.parametrize("history", ["latest", pytest.param("top_only", marks=pytest.mark.slow)])
@pytest.mark.parametrize("axis", SIZES)
def test_the_first_updates_change_models_of_every_size_alike(experiment: Experiment, axis: str, history: str) -> None:
    """The coordinate check: with a base, changes stay the same size; without, they grow by a factor of three or more.

    Logits fall slightly with the width: part of them is a sum over channels that agree by chance initially, which
    scales with 1/sqrt(width).
    """
    stacks = {stack: {"history": history} for stack in ("encoder", "decoder")}
    plain = change_section(experiment, {"model": stacks}, "")
    memory, decoder, logits = spreads(with_base(plain, SIZES[axis][0]), SIZES[axis])
    assert memory < 1.3
    assert decoder < 1.7
    assert logits < 2.2
    if history == "latest":
        assert min(spreads(plain, SIZES[axis])) > 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"residual": "post"}, "not worked out for `residual: post`"),
        ({"init": {"kind": "depth_scaled"}}, "not worked out for `init.kind: depth_scaled`"),
        ({"embedding": {"positions": "learned"}}, "not worked out for `embedding.positions: learned"),
        *(
            ({"encoder": {"history": history}}, f"not worked out for `encoder.history: {history}`.*`top_only`")
            for history in get_args(HistoryKind)
            if history not in ("latest", "top_only")
        ),
        ({"decoder": {"history": "attention_residuals"}}, "not worked out for `decoder.history: attention_residuals"),
    ],
)
def test_unsupported_models_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_config(2, 2, transfer=BASE, **change)


def test_a_base_whose_heads_cannot_be_as_wide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`transfer.width` \(24\): no base with 16 channels per head"):
        config_of(32, 2, 2, **{**BASE, "width": 24})
    with pytest.raises(ValueError, match=r"`d_model` \(8\) is not a multiple of `heads` \(16\)"):
        small_config(2, 2, heads=16, transfer=BASE)  # no channel per head, so nothing to divide by


def test_a_schedule_that_depends_on_the_width_is_refused() -> None:
    data = {"source_language": "de", "target_language": "en", "store": "s", "train": [{"source": "a", "target": "b"}]}
    content = {"data": data, "model": {"d_model": 64, "heads": 4, "transfer": {**BASE, "width": 32}}}
    schedule = {"kind": "noam", "factor": 2.0, "warmup_updates": 50}
    with pytest.raises(ValueError, match=r"`kind: isqrt` with `peak: 0.05`"):
        Experiment.model_validate({**content, "training": {"schedule": schedule}})
    Experiment.model_validate({**content, "training": {"schedule": {"kind": "isqrt", "peak": 0.05}}})
