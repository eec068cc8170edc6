"""The inter-similarity penalty: its definition by plain loops, and the same loss however an update is cut."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import tiny_experiment
from tests.small import small_config
from tests.train.batches import LENGTHS, batches
from tests.train.runs import QUIET, records
from ziggurat.config.train import LossConfig, OptimiserConfig
from ziggurat.data.corpus import Store
from ziggurat.model.build import build_model, parameter_roles
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.train.loop import train
from ziggurat.train.loss import Labels, sequence_loss
from ziggurat.train.objective import batch_loss, inter_similarity_penalty
from ziggurat.train.optim import Optimiser
from ziggurat.train.parallel import Parallel
from ziggurat.train.update import train_update
from ziggurat.train.validate import Validator

KINDS: dict[str, dict[str, Any]] = {
    "pre": {},
    "post, dlcl": {"residual": "post", "encoder": {"layers": 3, "history": "dlcl"}},
    "transparent, wide": {"memory": "transparent", "encoder": {"layers": 3, "d_model": 12}},
    "hyper": {"residual": "hyper", "wiring": {"streams": 2}},
    "dlcl by sub-layers": {"encoder": {"layers": 3, "history": "dlcl"}, "combination": {"unit": "sublayer"}},
    "rnmt": {"family": "rnmt", "embedding": {"positions": "none", "sharing": "none"}},
}


def tiny(kind: str = "pre", **choices: Any) -> Seq2Seq:
    still = {"dropout": {"residual": 0.0, "embedding": 0.0, "transparent": 0.0}, "embedding": {"sharing": "none"}}
    config = small_config(3, 1, **{**still, **KINDS[kind], **choices})
    return build_model(config, 20, 20).double()


def loss_config(inter_sim: float, normalisation: str = "tokens") -> LossConfig:
    return LossConfig.model_validate({"inter_sim": inter_sim, "normalisation": normalisation})


def apart(state: list[list[float]]) -> float:
    """Return 1 - sim_in of the states at one sentence's real positions."""
    width, n = len(state[0]), len(state)
    mean = [math.fsum(position[c] for position in state) / n for c in range(width)]
    length = math.sqrt(math.fsum(x * x for x in mean))
    cosines = []
    for position in state:
        own = math.sqrt(math.fsum(x * x for x in position))
        cosines.append(math.fsum(x * y for x, y in zip(position, mean, strict=True)) / own / length)
    return 1 - math.fsum(cosines) / n


@pytest.mark.parametrize("normalisation", ["tokens", "sentence_mean", "sentence_sum"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_penalty_is_its_definition_in_plain_loops(kind: str, normalisation: str) -> None:
    model = tiny(kind)
    (batch,) = batches([5])
    outputs: list[torch.Tensor] = []
    model.encode(batch.source, batch.source_mask, outputs)
    assert len(outputs) == len(model.encoder.layers)  # type: ignore[arg-type]
    tokens, sentences = 50, 9  # as part of an update with more batches
    expected = 0.0
    for s, (source_length, target_length) in enumerate(LENGTHS[:5]):  # plus end-of-sentence on both sides
        terms = [apart(output[s, : source_length + 1].tolist()) for output in outputs]
        weight = (target_length + 1) / tokens if normalisation == "tokens" else 1 / sentences
        expected += 0.7 * weight * math.fsum(terms) / len(terms)
    assert expected > 1e-3
    kept = {"tokens": tokens, "sentences": sentences}
    config = loss_config(0.7, normalisation)
    got = inter_similarity_penalty(outputs, batch.source_mask, batch.target_mask, config, **kept)
    assert got.shape == ()
    assert got.item() == pytest.approx(expected, abs=1e-10)
    plain, whole = (batch_loss(model, batch, loss_config(x, normalisation), **kept) for x in (0.0, 0.7))
    assert (whole.objective - plain.objective).item() == pytest.approx(expected, abs=1e-10)
    assert torch.equal(whole.nll, plain.nll)


@pytest.mark.parametrize("kind", ["pre", "post, dlcl", "transparent, wide"])
def test_it_reads_the_outputs_of_the_layers(kind: str) -> None:
    model, (batch,) = tiny(kind), batches([5])
    given: list[torch.Tensor] = []
    for layer in model.encoder.layers:  # type: ignore[union-attr]
        layer.register_forward_hook(lambda _layer, _inputs, output: given.append(output))
    outputs: list[torch.Tensor] = []
    model.encode(batch.source, batch.source_mask, outputs)
    assert len(outputs) == len(given) == 3
    assert all(torch.equal(a, b) for a, b in zip(outputs, given, strict=True))


def test_lambda_0_gives_the_loss_without_it_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (batch,) = tiny(), batches([5])
    config = LossConfig()
    assert config.inter_sim == 0
    asked: list[object] = []
    encode = model.encoder.forward
    monkeypatch.setattr(model.encoder, "forward", lambda *args: asked.append(args[2:]) or encode(*args))
    hidden = model.decode(batch.target_in, model.encode(batch.source, batch.source_mask))
    gold = Labels(batch.target_out, batch.target_mask, batch.target_tokens)
    plain = sequence_loss(hidden, model.output.weight, gold, config, tokens=22, sentences=5)
    got = batch_loss(model, batch, config, tokens=22, sentences=5)
    assert torch.equal(got.objective, plain.objective)
    assert torch.equal(got.nll, plain.nll)
    parameters = list(model.parameters())
    pairs = zip(*(torch.autograd.grad(x.objective, parameters) for x in (got, plain)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert asked == [(None,), (None,)], "no layer output is kept"


def test_the_gradient_reaches_all_of_the_encoder_and_nothing_else() -> None:
    model, (batch,) = tiny(), batches([5])

    def penalty() -> torch.Tensor:
        outputs: list[torch.Tensor] = []
        model.encode(batch.source, batch.source_mask, outputs)
        return inter_similarity_penalty(
            outputs, batch.source_mask, batch.target_mask, loss_config(2.0), tokens=22, sentences=5
        )

    penalty().backward()
    for name, parameter in model.named_parameters():
        reached = name.startswith(("encoder.layers", "source_embedding"))
        assert (parameter.grad is not None) == reached, name
        assert parameter.grad is None or float(parameter.grad.abs().max()) > 0, name
    weight = model.encoder.get_parameter("layers.0.ffn.in_proj.weight")
    gradient = weight.grad
    assert gradient is not None
    for row, column in ((0, 0), (5, 3), (11, 7)):
        values = []
        for shift in (1e-6, -1e-6):
            with torch.no_grad():
                weight[row, column] += shift
                values.append(penalty().item())
                weight[row, column] -= shift
        assert (values[0] - values[1]) / 2e-6 == pytest.approx(gradient[row, column].item(), abs=1e-8)


def test_gradients_of_the_penalty_are_those_of_its_value() -> None:
    mask = torch.tensor([[True, True, True], [True, False, False], [True, True, False]])
    outputs = [torch.randn(3, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    config = loss_config(0.3)
    assert torch.autograd.gradcheck(
        lambda *layers: inter_similarity_penalty(layers, mask, mask, config, tokens=6, sentences=3), outputs
    )


def test_training_with_it_brings_positions_together() -> None:
    @torch.no_grad()
    def dissimilarity(model: Seq2Seq) -> float:
        (batch,) = batches([5])
        on, off = (batch_loss(model, batch, loss_config(x), tokens=22, sentences=5).objective for x in (1.0, 0.0))
        return float(on - off)

    ends = []
    for inter_sim in (0.0, 1.0):
        model = tiny()
        before = dissimilarity(model)
        optimiser = Optimiser(model, parameter_roles(model), OptimiserConfig())
        for _ in range(15):
            train_update(Parallel(model, loss_config(inter_sim)), batches([5]), optimiser, rate=1e-2, clip_norm=None)
        ends.append(dissimilarity(model))
    assert ends[1] < 0.5 * min(before, ends[0])


def test_autocast_leaves_it_in_fp32() -> None:
    model, (batch,) = tiny("post, dlcl").float(), batches([5])
    with torch.autocast("cpu", torch.bfloat16):
        rough = batch_loss(model, batch, loss_config(1.0), tokens=22, sentences=5)
        without = batch_loss(model, batch, loss_config(0.0), tokens=22, sentences=5)
    assert rough.objective.dtype == torch.float32
    exact, plain = (batch_loss(model, batch, loss_config(x), tokens=22, sentences=5).objective for x in (1.0, 0.0))
    assert (rough.objective - without.objective).item() == pytest.approx((exact - plain).item(), abs=5e-3)
    rough.objective.backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


@pytest.mark.slow
def test_training_reports_it_and_validation_leaves_it_out(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices: dict[str, Any] = {
        "stop": {"updates": 1},
        "validation": {"every_updates": 1, "decode": False},
        "log_every_updates": 1,
    }
    without, penalised = (tiny_experiment(tiny_folder, loss={"inter_sim": x}, **choices) for x in (0.0, 0.5))
    reported = []
    for name, experiment in (("without", without), ("penalised", penalised)):
        train(tmp_path / name, experiment, console=QUIET)
        reported += records(tmp_path / name, "train")
    assert len(reported) == 2
    assert reported[1]["nll"] == reported[0]["nll"]
    assert reported[1]["loss"] > reported[0]["loss"] + 0.05

    def refused(*args: object, **kwargs: object) -> None:
        raise AssertionError("validation asked for the penalty")

    store = Store.open(tiny_folder / "store")
    model = build_model(penalised.model, store.source.size, store.target.size)
    monkeypatch.setattr("ziggurat.train.objective.inter_similarity_penalty", refused)
    validators = [Validator(store, e.training, e.decoding) for e in (without, penalised)]
    assert validators[0].measure(model) == validators[1].measure(model)


def test_a_negative_lambda_is_refused() -> None:
    with pytest.raises(ValueError, match="inter_sim"):
        loss_config(-0.1)
