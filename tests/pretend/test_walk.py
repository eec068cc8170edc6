"""One walk through training and translation on the pretend accelerator, with what is rarely used beside the usual."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ziggurat
from tests.conftest import tiny_experiment
from tests.train.runs import QUIET, final_bytes, records
from tools.pretend_device import NAME, counted
from ziggurat.config.model import DropoutConfig
from ziggurat.data.corpus import Store
from ziggurat.data.shortlist import estimate_shortlist, write_shortlist
from ziggurat.inspect.trial import TrialOptions, run_trial
from ziggurat.train.checkpoint import load_checkpoint
from ziggurat.train.loop import train

SETTINGS: dict[str, Any] = {
    "device": NAME,
    "batch": {"max_tokens": 150, "accumulate": 2},
    "clip_norm": 1.0,
    "optimiser": {"moments": "bf16", "weight_decay": 0.01, "kind": "adamw", "weight_smoothing": 0.1},
    "validation": {"every_updates": 1, "max_sentences": 2, "beam_size": 2},
    "checkpoint": {"every_updates": 1, "average_last": 2},
    "diagnostics": {"every_updates": 2, "max_share": None},
    "log_every_updates": 1,
    "stop": {"updates": 2},
}


def test_a_run_trains_validates_and_resumes_to_the_same_bits(tiny_folder: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    with counted() as counts:
        train(whole, tiny_experiment(tiny_folder, **SETTINGS), console=QUIET)
    assert len(records(whole, "validation")) == 2
    assert counts.operators["attention_backward"] > 0  # and not all of it beside the device
    train(cut, tiny_experiment(tiny_folder, **{**SETTINGS, "stop": {"updates": 1}}), console=QUIET)
    train(cut, tiny_experiment(tiny_folder, **SETTINGS), resume=True, console=QUIET)
    assert final_bytes(cut, 2) == final_bytes(whole, 2)
    # Written by one device, read by another.
    assert {t.device.type for t in load_checkpoint(cut / "last").optimiser.values()} == {"cpu"}
    assert ziggurat.load(whole, device="cpu").translate(["Vi vados."])[0].text is not None


def test_a_first_loss_is_that_of_a_cpu(tiny_folder: Path, tmp_path: Path) -> None:
    plain = {"stop": {"updates": 2}, "log_every_updates": 1, "validation": {"every_updates": 9}}
    losses = []
    for device in ("cpu", NAME):
        experiment = tiny_experiment(tiny_folder, device=device, **plain)
        model = experiment.model.model_copy(update={"dropout": DropoutConfig(residual=0.0, embedding=0.0)})
        experiment = experiment.model_copy(update={"model": model})
        train(tmp_path / device, experiment, console=QUIET)
        losses.append([record["loss"] for record in records(tmp_path / device, "train")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_low_rank_updates_train_and_open(tiny_folder: Path, tmp_path: Path) -> None:
    train(tmp_path / "base", tiny_experiment(tiny_folder, device="cpu", stop={"updates": 2}), console=QUIET)
    lora = {"rank": 2, "alpha": 4.0, "dropout": 0.1, "maps": ["query", "value", "feed_forward"]}
    more = {"start_from": str(tmp_path / "base"), "lora": lora}
    train(tmp_path / "run", tiny_experiment(tiny_folder, **SETTINGS | {"optimiser": {}} | more), console=QUIET)
    assert ziggurat.load(tmp_path / "run", device=NAME).translate(["Vi vados."])[0].text is not None


def test_depth_is_diagnosed_with_few_waits(tiny_folder: Path, tmp_path: Path) -> None:
    experiment = tiny_experiment(tiny_folder, device=NAME)
    with counted() as counts:
        trial = run_trial(experiment, Store.open(experiment.data.store), 5.0, TrialOptions(updates=2), lambda _: None)
    assert trial.failed is None
    assert counts.waits.total() < 200


def test_a_shortlist_forced_words_and_scores(tiny_folder: Path, tmp_path: Path) -> None:
    run, table = tmp_path / "run", tmp_path / "list"
    experiment = tiny_experiment(tiny_folder, device="cpu", stop={"updates": 2})
    train(run, experiment, console=QUIET)
    write_shortlist(table, estimate_shortlist(Store.open(experiment.data.store), best=8, frequent=8))
    lines, targets = ["Vi vados.", "Madona dogun."], ["Tha skotha.", "kref."]
    found = []
    for device in ("cpu", NAME):
        translator = ziggurat.load(run, device=device)
        short = ziggurat.load(run, device=device, shortlist=str(table))
        forced = translator.translate(lines, constraints=[["kref"], ["tha", "skotha"]], beam_size=4)
        texts = [t.text for t in [*forced, *short.translate(lines), *translator.translate(lines, seed=3)]]
        found.append((texts, [score.log_probability for score in translator.score(lines, targets)]))
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-4)
