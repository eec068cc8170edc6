"""Training and translation on the pretend accelerator, from end to end, with common and rare settings."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.conftest import tiny_experiment
from tests.pretend.conftest import DEVICES, LINES, experiment_of, opened
from tests.train.faulty_batches import planned, poison
from tests.train.runs import QUIET, final_bytes, records, timeless_progress
from tools.pretend_device import NAME, counted
from ziggurat.data.corpus import Store
from ziggurat.data.shortlist import estimate_shortlist, write_shortlist
from ziggurat.inspect.trial import TrialOptions, run_trial
from ziggurat.train.checkpoint import load_checkpoint
from ziggurat.train.loop import train

SETTINGS: dict[str, Any] = {
    "device": NAME,
    "batch": {"max_tokens": 400, "accumulate": 2},
    "clip_norm": 1.0,
    "optimiser": {"moments": "bf16", "weight_decay": 0.01, "kind": "adamw", "weight_smoothing": 0.1},
    "validation": {"every_updates": 2, "max_sentences": 1, "beam_size": 2},
    "checkpoint": {"every_updates": 1, "average_last": 2},
    "log_every_updates": 1,
    "stop": {"updates": 2},
}
SHALLOW = {"encoder": {"layers": 1}, "decoder": {"layers": 1}, "dropout": {"attention": 0.1, "residual": 0.1}}


def translated(run: Path, device: str, **options: Any) -> list[str]:
    return [each.text for each in opened(device, run, **options).translate(LINES)]


def test_a_run_trains_validates_and_resumes_to_the_same_bits(tiny_folder: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    with counted() as counts:
        train(whole, experiment_of(tiny_folder, SHALLOW, **SETTINGS), console=QUIET)
    assert len(records(whole, "validation")) == 1
    assert counts.operators["attention_backward"] > 0  # so attention ran on the device
    short = {"stop": {"updates": 1}, "validation": {"decode": False}, "checkpoint": {}}
    train(cut, experiment_of(tiny_folder, SHALLOW, **{**SETTINGS, **short}), console=QUIET)
    train(cut, experiment_of(tiny_folder, SHALLOW, **SETTINGS), resume=True, console=QUIET)
    assert final_bytes(cut, 2) == final_bytes(whole, 2)
    # Written with one device, read with another.
    assert {t.device.type for t in load_checkpoint(cut / "last").optimiser.values()} == {"cpu"}
    assert translated(whole, "cpu") == translated(whole, NAME)


PLAIN: dict[str, Any] = {
    "log_every_updates": 1,
    "validation": {"every_updates": 1000, "decode": False},
}


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in records(run, "train") if "loss" in record]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"stop": {"updates": 2}}, 1e-5),
        pytest.param({"recompute": {"encoder": 1, "decoder": "segments"}}, 1e-5, marks=pytest.mark.slow),
        pytest.param({"quantise": "int8"}, 1e-2, marks=pytest.mark.slow),
        pytest.param({"growth": {"stages": [{"layers": 1, "updates": 2}]}}, 1e-5, marks=pytest.mark.slow),
    ],
    ids=["plain", "recomputed", "int8", "grown"],
)
def test_losses_are_those_of_a_cpu(changes: dict[str, Any], error: float, tiny_folder: Path, tmp_path: Path) -> None:
    for device in DEVICES:
        train(tmp_path / device, experiment_of(tiny_folder, device=device, **PLAIN, **changes), console=QUIET)
    assert losses(tmp_path / NAME) == pytest.approx(losses(tmp_path / "cpu"), rel=error)


@pytest.mark.slow
def test_a_run_goes_from_device_to_device_and_back(tiny_folder: Path, tmp_path: Path) -> None:
    """It grows on the CPU, so the device resumes with weights and moments of both depths."""
    more = PLAIN | {"growth": {"stages": [{"layers": 1, "updates": 3}], "moments": "copy"}}
    train(tmp_path / "whole", experiment_of(tiny_folder, **more, stop={"updates": 6}), console=QUIET)
    for updates, device in ((2, NAME), (4, "cpu"), (6, NAME)):
        experiment = experiment_of(tiny_folder, device=device, **more, stop={"updates": updates})
        train(tmp_path / "moved", experiment, resume=updates > 2, console=QUIET)
    assert len(losses(tmp_path / "whole")) == 6
    assert losses(tmp_path / "moved") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


@pytest.mark.slow
def test_a_run_rolls_back_as_on_a_cpu(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates 3 and 4 fail, so update 4 rolls back to the weights after update 2."""
    more = {"divergence": {"action": "roll_back"}, "patience": {"non_finite": 2}, "checkpoint": {"every_updates": 2}}
    layer, progress = "decoder.layers.1.ffn.in_proj", []
    for device in DEVICES:
        experiment = experiment_of(tiny_folder, device=device, **PLAIN, **more, stop={"updates": 6})
        with monkeypatch.context() as patch:
            poison(patch, planned(experiment, 3, 4), layer, lambda output: output * math.nan)
            train(tmp_path / device, experiment, console=Console(file=(said := io.StringIO()), width=1000))
        assert f"first {layer}: output is NaN in the forward pass; rolled back to the weights after" in said.getvalue()
        progress.append(timeless_progress(tmp_path / device / "last"))
    assert progress[0]["roll_backs"] == 1
    assert progress[0]["skipped"] == 2
    of_cpu, of_device = (
        [p[key] for key in ("update", "schedule_update", "roll_backs", "skipped", "rate_factor")] for p in progress
    )
    assert of_cpu == of_device
    assert losses(tmp_path / NAME) == pytest.approx(losses(tmp_path / "cpu"), rel=1e-5)


def test_low_rank_updates_train_and_open(run: Path, tiny_folder: Path, tmp_path: Path) -> None:
    lora = {"rank": 2, "alpha": 4.0, "dropout": 0.1, "maps": ["query", "value", "feed_forward"]}
    more = {"start_from": str(run), "lora": lora, "device": NAME, "stop": {"updates": 1}}
    train(tmp_path / "run", experiment_of(tiny_folder, **PLAIN, **more), console=QUIET)
    assert translated(tmp_path / "run", NAME) == translated(tmp_path / "run", "cpu")


def test_diagnosing_depth_does_not_wait_in_each_layer(tiny_folder: Path, tmp_path: Path) -> None:
    experiment = tiny_experiment(tiny_folder, device=NAME)
    with counted() as counts:
        trial = run_trial(experiment, Store.open(experiment.data.store), 5.0, TrialOptions(updates=2), lambda _: None)
    assert trial.failed is None
    # A line waits once per kind of sub-layer (five) and measure (two), and not in each layer.
    assert max((counts.waits - counts.to_device).values()) <= 10


@pytest.mark.slow  # test_verbs.py tests the parts
def test_a_shortlist_is_read(run: Path, tiny_folder: Path, tmp_path: Path) -> None:
    table, store = tmp_path / "list", Store.open(experiment_of(tiny_folder).data.store)
    write_shortlist(table, estimate_shortlist(store, best=8, frequent=8))
    found = [translated(run, name, shortlist=str(table)) for name in DEVICES]
    assert found[0] == found[1]
