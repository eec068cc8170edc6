"""Runs with staged and modified data: when a stage ends, and that interruptions change nothing."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.conftest import tiny_experiment
from tests.train.runs import QUIET, outcome, records, train_part
from ziggurat.config import Experiment
from ziggurat.config.data import DataConfig
from ziggurat.config.load import change_section
from ziggurat.data.aligner import format_links
from ziggurat.data.babel import generate_aligned
from ziggurat.data.batching import make_batches
from ziggurat.data.corpus import Store
from ziggurat.data.loader import LoaderState
from ziggurat.data.modified import PairModifier
from ziggurat.data.prepare import prepare
from ziggurat.inspect.cost import expected_batches
from ziggurat.model.run_folder import checkpoint_folders
from ziggurat.system.errors import CheckpointError, ConfigError
from ziggurat.train.checkpoint import RunProgress, read_progress
from ziggurat.train.device import loader_of
from ziggurat.train.limits import finished
from ziggurat.train.loop import train
from ziggurat.train.setup import largest_batches

STAGES: list[dict[str, Any]] = [
    {"mix": {"one": 0.5, "two": 0.5}, "until": {"corpus": "two", "epochs": 1}},
    {"mix": {"one": 1.0}, "until": {"corpus": "one", "patience": 2}, "modifiers": {}},
    {"mix": {"one": 0.4, "two": 0.6}, "until": {"corpus": "two", "epochs": 1}},
]
MODIFIERS = {
    **{name: {"probability": 0.3} for name in ("merge", "upper_case", "typos", "prefix")},
    **{name: {"probability": 0.1} for name in ("terms", "inline")},
}


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    """A run on two aligned corpora with three stages, the second of which ends by early stopping."""
    folder = tmp_path_factory.mktemp("data-stages")
    pairs = list(generate_aligned(90, 3))
    corpora = {}
    for name, part in (("one", pairs[:50]), ("two", pairs[50:80]), ("dev", pairs[80:])):
        lines = {"source": [pair.low for pair in part], "target": [pair.high for pair in part]}
        lines["alignment"] = [format_links(pair.sure) for pair in part]
        for kind, content in lines.items():
            (folder / f"{name}.{kind}").write_text("".join(line + "\n" for line in content))
        corpora[name] = {**{kind: str(folder / f"{name}.{kind}") for kind in lines}, "name": name}
    found = tiny_experiment(
        folder,
        batch={"max_tokens": 300, "accumulate": 2},
        stop={"updates": 1000},
        checkpoint={"every_updates": 3, "keep_last": 50},
        validation={"every_updates": 2, "decode": False},
        # So high that the loss soon stops improving.
        schedule={"peak": 1.0, "warmup_updates": 1},
        loss={"alignment": {}},
        threads=1,
    )
    section = {"train": [corpora["one"], corpora["two"]], "dev": [corpora["dev"]]}
    data = {**found.data.model_dump(), **section, "stages": STAGES, "modifiers": MODIFIERS}
    found = found.model_copy(update={"data": DataConfig.model_validate(data)})
    prepare(found.data)
    return found


@pytest.fixture(scope="module")
def uninterrupted_run(experiment: Experiment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    result = train(run, experiment, console=QUIET)
    assert result.reason == "the last of `data.stages` is over"
    return run


@pytest.mark.slow
def test_each_stage_ends_as_configured(experiment: Experiment, uninterrupted_run: Path) -> None:
    known = [read_progress(folder) for folder in checkpoint_folders(uninterrupted_run)]
    assert [p.stages_to_come for p in known] == sorted((p.stages_to_come for p in known), reverse=True)
    assert {p.stages_to_come for p in known} == {2, 1, 0, -1}
    last = known[-1]
    first, second, third = last.data_stages
    assert (first, second) == (0, 1)
    assert third >= 2
    assert last.epoch == third + 1
    assert last.batch == 0
    # Early stopping after two validations in a row without a better one, counted from the beginning of the stage.
    log = (uninterrupted_run / "log.txt").read_text()
    begun, ended = (
        int(re.findall(rf"update (\d+): stage {stage} of 3 of the data begins", log)[0]) for stage in (2, 3)
    )
    best, misses = float("inf"), 0
    for record in records(uninterrupted_run, "validation"):
        better = record["nll"] < best
        best = min(best, record["nll"])
        if begun < record["update"] <= ended:
            misses = 0 if better else misses + 1
            assert (misses == 2) == (record["update"] == ended)


@pytest.mark.slow
def test_an_interrupted_run_ends_the_same(experiment: Experiment, uninterrupted_run: Path, tmp_path: Path) -> None:
    """Stopped within each stage and resumed."""
    run = tmp_path / "run"
    known = [read_progress(folder) for folder in checkpoint_folders(uninterrupted_run)]
    updates = known[-1].update
    # The stops are at validations, because a stop at any other update adds one, and patience counts them.
    stops = [min(p.update for p in known if len(p.data_stages) == stage) // 2 * 2 + 2 for stage in (1, 3)]
    for number, stop in enumerate([*stops, 1000]):
        training = change_section(experiment.training, {"stop": {"updates": stop}}, "training")
        part = experiment.model_copy(update={"training": training})
        train_part(str(run), part.model_dump_json(), "resume" if number else "")
    found, expected = outcome(run), outcome(uninterrupted_run)
    last = f"checkpoints/step-{updates:08d}"
    for side in (found, expected):
        side["tensors"] = {name: value for name, value in side["tensors"].items() if name.startswith(last)}
    assert found["tensors"] == expected["tensors"]
    assert found["tensors"]
    progress = [side["progress"][f"step-{updates:08d}"] for side in (found, expected)]
    for key in ("epoch", "batch", "data_stages", "stages_to_come", "validations_since_best", "target_tokens"):
        assert progress[0][key] == progress[1][key]


@pytest.mark.slow
def test_a_store_whose_corpora_have_changed_names_is_refused(experiment: Experiment, tmp_path: Path) -> None:
    """The names of two corpora are swapped: the same pairs, with a different plan."""
    run, store = tmp_path / "run", tmp_path / "store"
    shutil.copytree(experiment.data.store, store)
    data = experiment.data.model_copy(update={"store": str(store)})
    names = [corpus.name for corpus in data.train]
    swapped = [c.model_copy(update={"name": name}) for c, name in zip(data.train, reversed(names), strict=True)]
    training = [change_section(experiment.training, {"stop": {"updates": n}}, "training") for n in (1, 2)]
    mine = [experiment.model_copy(update={"data": data, "training": each}) for each in training]
    train(run, mine[0], console=QUIET)
    prepare(data.model_copy(update={"train": swapped}))
    with pytest.raises(CheckpointError, match=r"changed in .*/store: one was number 1; two was number 2"):
        train(run, mine[1], resume=True, console=QUIET)


def test_patience_of_the_run_counts_only_in_the_last_stage(experiment: Experiment) -> None:
    training = change_section(experiment.training, {"stop": {"patience": 3}}, "training")
    stages = experiment.data.stages
    p = RunProgress(validations_since_best=3)
    p.advance(1, LoaderState(0, 1, (0,)), stages)
    assert (p.stages_to_come, finished(p, training)) == (2, None)
    p.advance(1, LoaderState(1, 0, (0, 1)), stages)
    assert (p.stages_to_come, p.validations_since_best) == (1, 0)
    p.validations_since_best = 2  # counted by a validation of the previous stage
    assert not p.lose_patience(stages)
    assert p.validations_since_best == 0
    p.advance(1, LoaderState(1, 2, (0, 1)), stages)
    p.validations_since_best = 2
    assert p.lose_patience(stages)
    assert p.position == LoaderState(2, 0, (0, 1, 2))
    p.advance(1, LoaderState(2, 2, (0, 1, 2)), stages)
    p.validations_since_best = 3
    assert finished(p, training) == "no better loss in 3 validations"


def test_trial_batches_are_those_of_the_stage(experiment: Experiment) -> None:
    """The second stage reads only one of the two corpora."""
    store = Store.open(experiment.data.store)
    place = LoaderState(1, 0, (0, 1))
    loader = loader_of(experiment, store)
    found = largest_batches(loader, 1, place)
    assert {tuple(batch.indices) for batch in found} <= {tuple(indices) for indices in loader.plan(place)}
    assert set(store.train.corpora[np.concatenate([batch.indices for batch in found])]) == {0}


def test_an_epoch_is_planned_only_from_its_own_pairs(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches must equal those from the lengths of all pairs; drawing them all takes as long as reading the store."""
    loader, begin = loader_of(experiment, Store.open(experiment.data.store)), LoaderState()
    chosen, batch = loader.chosen(begin), experiment.training.batch
    seen: list[int] = []
    expected = make_batches(
        chosen,
        *loader.lengths(begin),
        max_tokens=batch.max_tokens,
        length_multiple=batch.length_multiple,
        seed=experiment.training.seed,
        epoch=0,
    )
    drawn = PairModifier._drawn

    def spied(self: PairModifier, indices: NDArray[np.int64], epoch: int) -> Any:
        seen.extend(indices.tolist())
        return drawn(self, indices, epoch)

    monkeypatch.setattr(PairModifier, "_drawn", spied)
    assert [indices.tolist() for indices in loader.plan(begin)] == [indices.tolist() for indices in expected]
    assert seen == sorted(set(chosen.tolist()))
    assert len(seen) == 60 < len(loader.lengths(begin, chosen[:1])[0])


def test_costs_are_those_of_the_first_stage_with_its_modifiers(experiment: Experiment) -> None:
    loader, begin = loader_of(experiment, Store.open(experiment.data.store)), LoaderState()
    plan, lengths = loader.plan(begin), loader.lengths(begin)
    found = expected_batches(experiment)
    assert found.source_length == pytest.approx(lengths[0][np.concatenate(plan)].mean() + 1)
    assert found.target_tokens == pytest.approx(np.mean([len(b) * (lengths[1][b].max() + 1) for b in plan]))
    rows = np.array([3, 40])
    unmodified = loader.lengths(LoaderState(1, 0, (0, 1)))
    for side, partly, stored in zip(lengths, loader.lengths(begin, rows), unmodified, strict=True):
        assert partly.tolist() == np.where(np.isin(np.arange(len(side)), rows), side, stored).tolist()


def test_a_stage_that_no_validation_ends_is_refused(experiment: Experiment, tmp_path: Path) -> None:
    data = experiment.data.model_copy(update={"dev": [], "store": str(tmp_path / "store")})
    prepare(data)
    with pytest.raises(ConfigError, match="a stage would never end: without a dev set"):
        train(tmp_path / "run", experiment.model_copy(update={"data": data}), console=QUIET)
