"""Adaptive gradient clipping (Chen et al. 2018)."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch

from tests.conftest import tiny_experiment
from tests.train.batches import batches
from tests.train.runs import QUIET, records
from tests.train.test_step import tiny
from ziggurat.config.train import LossConfig
from ziggurat.model.run_folder import checkpoint_folders
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.train import update
from ziggurat.train.checkpoint import RunProgress, read_progress
from ziggurat.train.clipping import AdaptiveClipper
from ziggurat.train.loop import train
from ziggurat.train.optim import Optimiser
from ziggurat.train.parallel import Parallel
from ziggurat.train.recovery import count_skipped
from ziggurat.train.update import UpdateResult, train_update


def norms(count: int, seed: int = 0) -> list[float]:
    generator = random.Random(seed)
    return [math.exp(generator.gauss(1.0, 0.3)) for _ in range(count)]


def decisions(values: list[float]) -> tuple[list[bool], list[float]]:
    """Return admissions and thresholds by the rule: weighted sums over all norms so far, each capped at its own
    threshold.
    """
    capped: list[float] = []
    admitted, thresholds = [], []
    for norm in values:
        weights = [0.005 * 0.995 ** (len(capped) - 1 - k) for k in range(len(capped))]
        total = sum(weights)
        mean = sum(w * x for w, x in zip(weights, capped, strict=True)) / max(total, 1e-6)
        square = sum(w * x * x for w, x in zip(weights, capped, strict=True)) / max(total, 1e-6)
        threshold = mean + 4.0 * math.sqrt(max(square - mean**2, 1e-6))
        logarithm = math.log(1.0 + max(norm, 0.01))
        admitted.append(not (logarithm > threshold and total > 0.75) and norm < 1e5)
        capped.append(min(logarithm, threshold))
        thresholds.append(threshold)
    return admitted, thresholds


def test_decisions_are_those_of_the_rule() -> None:
    values = norms(600)
    for position, spike in ((100, 1e3), (300, 1e3), (301, 40.0), (450, 6.0), (500, 200.0), (501, 200.0), (560, 1e-5)):
        values[position] = spike
    clipper = AdaptiveClipper([0.0, 0.0, 0.0])
    found, limits = [], []
    for norm in values:
        limits.append(clipper.limit)
        found.append(clipper.admits(norm))
    expected, thresholds = decisions(values)
    assert found == expected
    assert limits == pytest.approx(thresholds, rel=1e-9)
    assert [position for position, fine in enumerate(found) if not fine] == [300, 301, 500, 501]


def test_until_the_average_is_trusted_only_huge_norms_are_skipped() -> None:
    clipper = AdaptiveClipper([0.0, 0.0, 0.0])
    assert all(clipper.admits(norm) for norm in [*[1.0] * 276, 1e4])
    assert clipper.sums[0] == pytest.approx(1 - 0.995**277)
    assert clipper.sums[0] > 0.75 > 1 - 0.995**276
    assert not clipper.admits(1e4)
    assert not AdaptiveClipper([0.0, 0.0, 0.0]).admits(1e5)


def test_a_lasting_change_is_followed() -> None:
    """Rejected norms still move the statistics, so that training does not stop for good."""
    clipper = AdaptiveClipper([0.0, 0.0, 0.0])
    for norm in norms(1000):
        clipper.admits(norm)
    after = [clipper.admits(30 * norm) for norm in norms(200, seed=1)]
    assert not after[0]
    assert all(after[100:])


def updated(model: Seq2Seq, optimiser: Optimiser, clipper: AdaptiveClipper | None) -> UpdateResult:
    parallel = Parallel(model, LossConfig())
    return train_update(parallel, batches([7]), optimiser, rate=1e-2, clip_norm=None, clipper=clipper)


def test_an_update_that_is_not_admitted_changes_nothing_and_is_counted_apart() -> None:
    model, optimiser = tiny()
    before = [p.detach().clone() for p in model.parameters()]
    sums = [1.0, 0.01, 0.01**2]  # the usual norm is tiny
    result = updated(model, optimiser, AdaptiveClipper(sums))
    assert result.finite
    assert not result.admitted
    assert optimiser.state() == {}
    for old, parameter in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, parameter)
        assert parameter.grad is None
    assert sums != [1.0, 0.01, 0.01**2]
    p = RunProgress(update=9, skipped_in_a_row=3)
    message = count_skipped(p, result)
    assert message is not None
    assert "update 9: gradient norm" in message
    assert (p.skipped, p.skipped_in_a_row, p.rejected) == (0, 0, 1)


def test_a_non_finite_norm_is_not_counted_in_the_statistics() -> None:
    model, optimiser = tiny()
    with torch.no_grad():
        model.decoder.layers[0].get_parameter("ffn.in_proj.weight")[0, 0] = float("nan")  # type: ignore[union-attr]
    sums = [0.0, 0.0, 0.0]
    result = updated(model, optimiser, AdaptiveClipper(sums))
    assert not result.finite
    assert result.admitted
    assert sums == [0.0, 0.0, 0.0]
    p = RunProgress()
    assert "not both finite" in (count_skipped(p, result) or "")
    assert (p.skipped, p.skipped_in_a_row, p.rejected) == (1, 1, 0)


def test_an_admitted_update_is_taken_as_without_a_clipper() -> None:
    plain, optimiser = tiny()
    clipped, other = tiny()
    for model, optimise, clipper in ((plain, optimiser, None), (clipped, other, AdaptiveClipper([0.0, 0.0, 0.0]))):
        result = updated(model, optimise, clipper)
        assert result.admitted
        assert count_skipped(RunProgress(), result) is None
    for a, b in zip(plain.parameters(), clipped.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
def test_statistics_and_decisions_survive_a_resume(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is stopped and resumed ends like an uninterrupted one, with skipped updates on both sides of the
    stop.
    """
    monkeypatch.setattr(update, "_DECAY", 0.5)  # with a short memory and no tolerance some updates are skipped
    monkeypatch.setattr(update, "_DEVIATIONS", 0.0)
    ends, rejected = {}, []
    for name, stops in (("whole", [10]), ("parts", [5, 10])):
        run = tmp_path / name
        for updates in stops:
            settings = {"threads": 1, "adaptive_clip": True, "stop": {"updates": updates}, "log_every_updates": 5}
            train(run, tiny_experiment(tiny_folder, **settings), resume=run.exists(), console=QUIET)
            progress = read_progress(folder := checkpoint_folders(run)[-1])
            rejected.append(progress.rejected)
        ends[name] = (progress.gradient_norms, progress.rejected, (folder / "model.safetensors").read_bytes())
        assert progress.skipped == 0
        assert sum(record["rejected"] for record in records(run, "train")) == progress.rejected
    assert ends["whole"] == ends["parts"]
    assert 0 < rejected[1] < rejected[2] == rejected[0]
