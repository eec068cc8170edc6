from __future__ import annotations

import io
import json
import math
import re
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from tests.conftest import tiny_experiment
from tests.train.runs import QUIET, records
from ziggurat.config.data import CorpusConfig
from ziggurat.config.lifecycle import CheckpointConfig, StopConfig
from ziggurat.config.load import change_section
from ziggurat.config.modifiers import StageConfig, UntilConfig
from ziggurat.config.train import TrainingConfig
from ziggurat.data.corpus import Store
from ziggurat.data.prepare import prepare
from ziggurat.data.subword import SentencePieceTokenizer, save_tokenizers
from ziggurat.inspect.trial import open_data
from ziggurat.model.counts import inspect_experiment
from ziggurat.model.directory import open_model, write_model_directory
from ziggurat.model.run_folder import checkpoint_folders
from ziggurat.model.tensors import read_tensors, weights
from ziggurat.system.errors import CheckpointError, ConfigError, TrainingError
from ziggurat.train.average import CheckpointSelection, average_run, mean_weights, regular_checkpoints
from ziggurat.train.checkpoint import Checkpoint, RunProgress, save_checkpoint
from ziggurat.train.learner import Learner
from ziggurat.train.limits import how_to_continue, share_done, time_left
from ziggurat.train.loop import TrainingResult, train
from ziggurat.train.progress import RecordWindow
from ziggurat.train.saving import prune
from ziggurat.train.setup import position_limit
from ziggurat.train.update import UpdateResult, train_update
from ziggurat.train.validate import Validation


def train_run(folder: Path, run: Path, **training: object) -> TrainingResult:
    return train(run, tiny_experiment(folder, **training), console=QUIET)


@pytest.mark.slow
def test_a_run_holds_its_files_and_the_checkpoints_it_keeps(tiny_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = train_run(
        tiny_folder,
        run,
        stop={"updates": 8},
        validation={"every_updates": 4, "metric": "bleu"},
        checkpoint={"every_updates": 2, "keep_last": 2, "average_last": 2},
        tensorboard=True,
        log_every_updates=2,
    )
    assert (result.update, result.signal) == (8, None)
    names = {p.name for p in run.iterdir()}
    assert names >= {
        "config.yaml",
        "metrics.jsonl",
        "log.txt",
        "tensorboard",
        "checkpoints",
        "best",
        "last",
        "averaged",
    }
    assert list((run / "tensorboard").iterdir())
    steps = [folder.name for folder in checkpoint_folders(run)]
    assert steps[-2:] == ["step-00000006", "step-00000008"]
    assert (run / "last").resolve().name == "step-00000008"
    assert result.best_update is not None
    assert (run / "best").resolve().name == f"step-{result.best_update:08d}"
    train_records = records(run, "train")
    assert [r["update"] for r in train_records] == [2, 4, 6, 8]
    for key in ("loss", "nll", "perplexity", "learning_rate", "grad_norm", "target_tokens_per_second"):
        assert all(isinstance(r[key], float) for r in train_records)
    validation = records(run, "validation")
    assert [r["update"] for r in validation] == [4, 8]
    assert all({"nll", "perplexity", "bleu", "chrf"} <= r.keys() for r in validation)
    for which in (None, "averaged", "best", "last", "6"):
        assert open_model(run, which=which).model.vocabulary_size == 400
    with pytest.raises(CheckpointError, match="no checkpoint `2`; kept: averaged, best, last, 4, 6, 8"):
        open_model(run, which="2")


@pytest.mark.slow
def test_averages_are_means(tiny_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_run(tiny_folder, run, stop={"updates": 3}, checkpoint={"every_updates": 1, "keep_last": 3})
    files = [folder / "model.safetensors" for folder in checkpoint_folders(run)]
    each = [read_tensors(file) for file in files]
    for name, tensor in mean_weights(files).items():
        expected = sum(t[name].double() for t in each) / 3
        torch.testing.assert_close(tensor.double(), expected, atol=1e-7, rtol=1e-6)
    out, updates = average_run(run, CheckpointSelection("last", 2), out=tmp_path / "mean")
    assert updates == [2, 3]
    model = open_model(out).model
    name = "encoder.layers.0.ffn.in_proj.weight"
    torch.testing.assert_close(model.get_parameter(name).detach(), (each[1][name] + each[2][name]) / 2)
    with pytest.raises(CheckpointError, match="3 of the 4 requested checkpoints are kept"):
        average_run(run, CheckpointSelection("last", 4))


@pytest.mark.slow
def test_checkpoints_of_an_interruption_do_not_count(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is stopped by a signal and resumed keeps and averages the same as without the stop."""
    settings = {"stop": {"updates": 6}, "checkpoint": {"every_updates": 2, "keep_last": 2, "average_last": 2}}
    train_run(tiny_folder, tmp_path / "whole", **settings)
    run = tmp_path / "run"
    updates = 0

    def interrupted(*args: object, **kwargs: object) -> UpdateResult:
        nonlocal updates
        updates += 1
        if updates == 5:
            signal.raise_signal(signal.SIGTERM)
        return train_update(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("ziggurat.train.loop.train_update", interrupted)
    assert train_run(tiny_folder, run, **settings).signal == signal.SIGTERM
    assert [folder.name for folder in checkpoint_folders(run)] == [f"step-{n:08d}" for n in (2, 4, 5)]
    train(run, tiny_experiment(tiny_folder, **settings), resume=True, console=QUIET)
    assert [folder.name for folder in checkpoint_folders(run)] == [f"step-{n:08d}" for n in (4, 6)]
    for file in ("averaged/model.safetensors", "last/model.safetensors"):
        assert (run / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_averages_leave_out_an_interim_checkpoint_kept_as_the_best(tmp_path: Path) -> None:
    for update in (2, 3, 4, 5):
        progress = RunProgress(update=update, interim=["step-00000003", "step-00000005"])
        save_checkpoint(tmp_path, Checkpoint(progress, {"w": torch.tensor(1.0)}, {}, "store"), (2, 2))
    for stop, kept in ((6, "24"), (5, "245")):  # the last checkpoint of a finished run counts
        config = TrainingConfig(stop=StopConfig(updates=stop))
        assert [folder.name[-1] for folder in regular_checkpoints(tmp_path, config)] == list(kept)
    prune(tmp_path, progress, CheckpointConfig(keep_last=1, keep_best=0), smaller_is_better=True)
    assert [folder.name[-1] for folder in checkpoint_folders(tmp_path)] == ["4", "5"]
    assert progress.interim == ["step-00000005"]


@pytest.mark.parametrize(
    ("metric", "values", "best", "told"),
    [
        ("bleu", [10.0, 30.0, 20.0], 2, [True, True, False]),
        ("loss", [3.0, 1.0, 2.0], 2, [True, True, False]),
        ("loss", [math.nan, 5.0, math.nan], 2, [False, True, False]),
    ],
)
def test_the_best_is_the_highest_bleu_or_the_lowest_loss(
    metric: str,
    values: list[float],
    best: int,
    told: list[bool],
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NaN is never the best."""
    left = iter(values)
    monkeypatch.setattr(
        "ziggurat.train.validate.Validator.measure",
        lambda *_, **__: Validation(value := next(left), bleu=value, chrf=value, unfinished=0),
    )
    validation = {"every_updates": 1, "metric": metric}
    checkpoint = {"every_updates": 1, "keep_last": 1, "keep_best": 1}
    result = train_run(tiny_folder, tmp_path / "run", stop={"updates": 3}, validation=validation, checkpoint=checkpoint)
    assert (result.best, result.best_update) == (values[1], best)
    assert (tmp_path / "run" / "best").resolve().name == f"step-{best:08d}"
    lines = (tmp_path / "run" / "log.txt").read_text("utf-8").splitlines()
    assert [f"(best {metric})" in line for line in lines if "dev nll" in line] == told
    assert [f.name for f in checkpoint_folders(tmp_path / "run")] == [f"step-{n:08d}" for n in (best, 3)]


@pytest.mark.slow
def test_a_folder_with_other_files_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "config.yaml").write_text("# by hand")
    with pytest.raises(ConfigError, match="holds something other than a run"):
        train_run(tiny_folder, mine, stop={"updates": 1})
    assert [p.read_text() for p in mine.iterdir()] == ["# by hand"]
    run = tmp_path / "run"
    run.mkdir()  # an empty folder is as good as none
    train_run(tiny_folder, run, stop={"updates": 1}, checkpoint={"every_updates": 1})
    with pytest.raises(ConfigError, match="holds something other than a model directory"):
        average_run(run, CheckpointSelection("last", 1), out=mine)
    average_run(run, CheckpointSelection("last", 1), out=tmp_path / "mean")
    with pytest.raises(ConfigError, match="already holds a model; `--force` replaces it"):
        average_run(run, CheckpointSelection("last", 1), out=tmp_path / "mean")
    average_run(run, CheckpointSelection("last", 1), out=tmp_path / "mean", force=True)


def test_patience_without_a_dev_set_would_never_end(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = tiny_experiment(tiny_folder, stop={"updates": None, "patience": 2})
    store = Store.open(experiment.data.store)
    store.dev = None
    monkeypatch.setattr("ziggurat.train.setup.Store.open", lambda _path: store)
    with pytest.raises(ConfigError, match="would never end"):
        train(tmp_path / "run", experiment, console=QUIET)


def test_learned_positions_must_cover_the_dev_set_too(tiny_folder: Path) -> None:
    learned = tiny_experiment(tiny_folder, {"embedding": {"positions": "learned", "max_positions": 400}})
    store = Store.open(learned.data.store)
    assert store.dev is not None
    store.dev.target_lengths = np.array([500])
    with pytest.raises(ConfigError, match="501 tokens"):
        position_limit(learned, store)


def test_the_best_checkpoint_stays_until_another_is_the_best(tmp_path: Path) -> None:
    """For example after the metric of `best` has changed: no score is left, and the link must not dangle."""
    progress = RunProgress(scores={"step-00000001": 5.0})
    for update in range(1, 5):
        progress.update = update
        save_checkpoint(tmp_path, Checkpoint(progress, {"w": torch.tensor(1.0)}, {}, "store"), (2, 2))
        prune(tmp_path, progress, CheckpointConfig(keep_last=1, keep_best=1), smaller_is_better=True)
        progress.scores = {}
    assert [folder.name[-1] for folder in checkpoint_folders(tmp_path)] == ["1", "4"]
    assert (tmp_path / "best").resolve().name == "step-00000001"


def test_the_last_update_is_validated(tiny_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = train_run(tiny_folder, run, stop={"updates": 3}, validation={"every_updates": 2, "max_sentences": 2})
    validations = records(run, "validation")
    assert [r["update"] for r in validations] == [2, 3]
    assert all(isinstance(r["unfinished"], int) for r in validations)
    assert result.best_update in (2, 3)


@pytest.mark.slow
def test_every_update_is_in_one_record(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are validations between records, a signal, and an end at which no record is due."""
    taken: dict[int, UpdateResult] = {}
    run, settings = tmp_path / "run", {"log_every_updates": 4, "stop": {"updates": 10}}
    settings |= {"validation": {"every_updates": 3, "decode": False}, "tensorboard": True}

    def update(*args: object, **kwargs: object) -> UpdateResult:
        result = train_update(*args, **kwargs)  # type: ignore[arg-type]
        taken[len(taken) + 1] = result
        if len(taken) == 6:
            signal.raise_signal(signal.SIGTERM)
        return result

    monkeypatch.setattr("ziggurat.train.loop.train_update", update)
    assert train_run(tiny_folder, run, **settings).update == 6
    train(run, tiny_experiment(tiny_folder, **settings), resume=True, console=QUIET)
    found = [(r["update"], r.get("partial", False)) for r in records(run, "train")]
    assert found == [(4, False), (8, False), (10, True)], "the record of update 6 is taken back"
    since = 0
    for record in records(run, "train"):
        members = [taken[n] for n in range(since + 1, record["update"] + 1)]
        assert record["loss"] == pytest.approx(sum(m.loss for m in members) / len(members))
        assert record["sentences_per_update"] == sum(m.sentences for m in members) / len(members)
        since = record["update"]
    log = (run / "log.txt").read_text()
    assert "update 10  epoch" in log
    assert "update 6  epoch" in log


def test_time_outside_of_updates_is_not_training_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("ziggurat.train.progress.time.perf_counter", lambda: now[0])
    window = RecordWindow(SimpleNamespace(waited_seconds=0.0), SimpleNamespace(waited_seconds=0.0))  # type: ignore[arg-type]
    window.add(UpdateResult(1.0, 20.0, 1.0, 5, 10, 2, True), 1e-3)
    now[0] += 7.0
    window.leave_out(5.0)
    assert window.seconds == pytest.approx(2.0)
    assert window.tokens_per_second == pytest.approx(5.0)


@pytest.mark.slow
def test_other_corpora_than_those_of_the_store_are_noticed(tiny_folder: Path, tmp_path: Path) -> None:
    """Training reads only the store, so a configuration that names other files is not an error."""
    experiment = tiny_experiment(tiny_folder, stop={"updates": 1})
    (tmp_path / "link").symlink_to(tiny_folder)
    heard = io.StringIO()

    def noticed(run: str, *, resume: bool = False, **corpora: object) -> str:
        changed = experiment.model_copy(update={"data": experiment.data.model_copy(update=corpora)})
        heard.truncate(0)
        train(tmp_path / run, changed, resume=resume, console=Console(file=heard, width=1000))
        return heard.getvalue()

    (corpus,) = experiment.data.train
    assert corpus.source is not None
    assert "other files" not in noticed("same")
    written = f"{tiny_folder}/../{tiny_folder.name}/./train.qlo"
    assert "other files" not in noticed("written", train=[corpus.model_copy(update={"source": written})])
    other = [corpus.model_copy(update={"source": "news.qlo"})]
    said = noticed("other", train=other)
    assert f"(store -> configuration): data.train.0.source ({corpus.source} -> news.qlo). Training reads" in said
    assert "dev" not in said.split("(store -> configuration)")[1].split("Training reads")[0]
    assert "other files" not in noticed("other", resume=True, train=other)  # a resumed run cannot change its data


def test_a_store_of_other_settings_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    experiment = tiny_experiment(tiny_folder)
    filters = experiment.data.filters.model_copy(update={"max_characters": 7})
    corpora = {"train": [CorpusConfig(source="a", target="b")], "dev": [CorpusConfig(source="c", target="d")]}
    other = experiment.data.model_copy(update={"filters": filters, **corpora, "sampling_temperature": 2.0})
    with pytest.raises(ConfigError, match=r"data\.filters\.max_characters \(4000 -> 7\).*ziggurat prepare"):
        train(tmp_path / "run", experiment.model_copy(update={"data": other}), console=QUIET)
    assert not (tmp_path / "run").exists()
    heavier = [CorpusConfig(source="a", target="b", weight=2.0)]
    other = experiment.data.model_copy(update={**corpora, "train": heavier})
    with pytest.raises(ConfigError, match=r"data\.train\.0\.weight \(1\.0 -> 2\.0\)"):
        train(tmp_path / "run", experiment.model_copy(update={"data": other}), console=QUIET)


def test_one_embedding_for_two_vocabularies_of_one_size_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    """No configuration key states that the folder has two vocabularies."""
    tiny = tiny_experiment(tiny_folder)
    two = tiny.data.subword.model_copy(update={"joint": False})
    prepare(tiny.data.model_copy(update={"store": str(tmp_path / "two"), "subword": two}))
    subword = {"kind": "existing", "source_model": str(tmp_path / "two")}
    changes = {"data": {"store": str(tmp_path / "again"), "subword": subword}}
    experiment = change_section(tiny, changes, "")
    with pytest.raises(ConfigError, match="one vocabulary for both sides") as refused:
        inspect_experiment(experiment)
    prepare(experiment.data)
    with pytest.raises(ConfigError) as again, open_data(experiment):
        pass
    with pytest.raises(ConfigError) as last:
        train(tmp_path / "run", experiment, console=QUIET)
    assert str(refused.value) == str(again.value) == str(last.value)
    apart = change_section(experiment, {"model": {"embedding": {"sharing": "decoder"}}}, "")
    assert inspect_experiment(apart).vocabulary.origin == str(tmp_path / "again")


def test_weights_trained_on_differently_normalised_text_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    """A SentencePiece file does not record it, so a store made with that file has the same pieces."""
    experiment = tiny_experiment(tiny_folder)
    store = Store.open(experiment.data.store)
    learner = Learner(experiment, store, torch.device("cpu"))
    joint = SentencePieceTokenizer((store.path / "joint.spm").read_bytes(), "nfkc")
    save_tokenizers(tmp_path, joint, joint)
    write_model_directory(tmp_path / "model", weights(learner.model), experiment, tmp_path)
    with pytest.raises(ConfigError, match=r"normalised by `data\.unicode: nfkc`.* by `none`; .* data\.unicode=nfkc`"):
        learner.start_from(str(tmp_path / "model"))


def test_remaining_time_is_until_the_first_limit(tiny_folder: Path) -> None:
    def left(p: RunProgress, batches: int | None = None, until: UntilConfig | None = None, **limits: Any) -> str:
        config = tiny_experiment(tiny_folder, batch={"accumulate": 2}, stop={"updates": None, **limits}).training
        stages = [] if until is None else [StageConfig(mix={"a": 1.0}, until=until)] * 2
        return time_left(p, share_done(p, config, stages, batches))

    progress = RunProgress(update=25, epoch=1, seconds=60.0)
    assert left(progress, updates=100) == "3:00"
    assert time_left(progress, 0.25, (30.0, 0.05)) == "1:52", "by the speed since then"
    assert time_left(progress, 0.25, (60.0, 0.25)) == "?"
    assert left(progress, updates=100, epochs=2) == "1:00"
    assert left(progress, updates=100, minutes=1) == "0 s"
    assert left(progress, patience=3) == "?"
    # Epochs of an hour, 100 batches or 50 updates each: half of the current one counts.
    hours = RunProgress(update=75, epoch=1, batch=50, seconds=5400.0)
    assert left(hours, 100, epochs=10) == "8:30:00"
    assert left(hours, 100, epochs=10, updates=100) == "30:00"
    # Two stages of three epochs each, the last of which started after an epoch.
    until = UntilConfig(corpus="a", epochs=3)
    last = replace(hours, data_stages=[0, 1])
    assert left(last, 100, until, updates=100_000) == "2:30:00"
    assert left(replace(last, epoch=4, batch=0, stages_to_come=-1), 100, until, updates=100_000) == "0 s"
    assert left(replace(hours, stages_to_come=1), 100, until, updates=100_000) == "?"
    assert left(replace(last, batch=0), 100, until, updates=100_000) == "?"  # the epoch's size is that of stage 1
    assert left(last, 100, UntilConfig(corpus="a", patience=3), updates=100) == "30:00"


def test_resuming_requires_raising_every_reached_limit(tiny_folder: Path, tmp_path: Path) -> None:
    progress = RunProgress(update=25, epoch=1, seconds=60.0, validations_since_best=3)
    how, run = "raise that limit: `ziggurat train --run a --resume", Path("a")
    assert how_to_continue(progress, StopConfig(updates=26, minutes=1), run) == f"{how} training.stop.minutes=...`"
    both = StopConfig(updates=20, epochs=2, patience=3)
    assert how_to_continue(progress, both, run) == f"{how} training.stop.updates=... training.stop.patience=...`"
    over = how_to_continue(replace(progress, stages_to_come=-1), both, run)
    assert over == "start a new run with other `data.stages`: `training.start_from=a` takes the weights of this one"
    stop = {"updates": 100, "minutes": 1e-6}
    train_run(tiny_folder, tmp_path / "run", stop=stop)
    train(tmp_path / "run", tiny_experiment(tiny_folder, stop=stop), resume=True, console=QUIET)
    last = (tmp_path / "run" / "log.txt").read_text().splitlines()[-1]
    assert last.endswith(f"`ziggurat train --run {tmp_path / 'run'} --resume training.stop.minutes=...`")


def test_early_stopping_counts_validations_without_a_better_score(tiny_folder: Path, tmp_path: Path) -> None:
    result = train_run(
        tiny_folder,
        tmp_path / "run",
        schedule={"kind": "constant", "peak": 1e-30, "warmup_updates": 0, "initial": 0.0},  # nothing ever improves
        validation={"every_updates": 1, "decode": False},
        stop={"updates": 100, "patience": 3},
    )
    assert result.update == 4
    assert "no better loss in 3 validations" in result.reason


@pytest.mark.slow
def test_epochs_end_a_run(tiny_folder: Path, tmp_path: Path) -> None:
    result = train_run(tiny_folder, tmp_path / "run", stop={"updates": None, "epochs": 2}, log_every_updates=1)
    assert "epochs" in result.reason
    log = (tmp_path / "run" / "log.txt").read_text()
    assert re.findall(r"(\S+) left", log)[0] != "?", "the part of an epoch counts"
    # The log names the epoch of the latest update, the records count finished ones.
    ended = records(tmp_path / "run", "train")
    told = [int(epoch) for epoch in re.findall(r"  epoch (\d+)  loss", log)]
    assert told == [1, *(r["epoch"] + 1 for r in ended[:-1])]
    assert (told[-1], ended[-1]["epoch"]) == (2, 2)
    seen = json.loads((checkpoint_folders(tmp_path / "run")[-1] / "meta.json").read_text())["progress"]
    assert (seen["epoch"], seen["batch"]) == (2, 0)


def test_divergence_stops_with_a_diagnosis(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="3 updates in a row had a non-finite loss") as error:
        train_run(
            tiny_folder,
            tmp_path / "run",
            schedule={"kind": "constant", "peak": 1e9, "warmup_updates": 0},
            stop={"updates": 100},
            patience={"non_finite": 3},
        )
    assert "training.schedule.peak" in str(error.value)


@pytest.mark.slow
def test_validation_changes_nothing_in_training(tiny_folder: Path, tmp_path: Path) -> None:
    runs = []
    for number, every in enumerate((1, 1000)):
        run = tmp_path / str(number)
        train_run(tiny_folder, run, stop={"updates": 4}, validation={"every_updates": every, "max_sentences": 3})
        runs.append(read_tensors(checkpoint_folders(run)[-1] / "model.safetensors"))
    for name in runs[0]:
        assert torch.equal(runs[0][name], runs[1][name])


@pytest.mark.parametrize(
    ("kind", "precision"),
    [("radam", "bf16"), *(pytest.param(kind, "bf16", marks=pytest.mark.slow) for kind in ("adamw", "muon"))],
)
def test_other_optimisers_and_bf16_train(kind: str, precision: str, tiny_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_run(
        tiny_folder,
        run,
        optimiser={"kind": kind},
        precision=precision,
        schedule={"peak": 1e-2, "warmup_updates": 4},
        stop={"updates": 30},
        log_every_updates=5,
    )
    reported = records(run)
    assert reported[-1]["nll"] < reported[0]["nll"] - 0.2
    assert {t.dtype for t in read_tensors(run / "last" / "model.safetensors").values()} == {torch.float32}


def test_learned_positions_that_are_too_few_are_refused_before_training(tiny_folder: Path, tmp_path: Path) -> None:
    experiment = tiny_experiment(tiny_folder, {"embedding": {"positions": "learned", "max_positions": 9}})
    with pytest.raises(ConfigError, match=r"`model\.embedding\.max_positions` is 9; raise it"):
        train(tmp_path / "run", experiment, console=QUIET)
