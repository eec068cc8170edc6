"""What a run reports about its depth: to trackers, the log, the progress bar and `diagnostics/warnings.jsonl`."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import tiny_experiment
from tests.inspect import hand_made
from ziggurat.config import TrainingConfig
from ziggurat.train import progress
from ziggurat.train.checkpoint import RunProgress
from ziggurat.train.depth_records import DepthReporter
from ziggurat.train.diagnosis.health import WARNINGS_FILE, read_warnings
from ziggurat.train.loop import train
from ziggurat.train.progress import ProgressLine, RecordWindow, Reporter
from ziggurat.train.records import DEPTH_FILE, Record, read_records
from ziggurat.train.run_log import MetricsWriter, RunLog
from ziggurat.train.trackers import Pixels
from ziggurat.train.update import UpdateResult

CONFIG = TrainingConfig.model_validate({"schedule": {"warmup_updates": 10}, "log_every_updates": 2})
EXPERIMENT = hand_made.EXPERIMENT.model_copy(update={"training": CONFIG})


class RecordingListener:
    """A stand-in for a Listener."""

    name, failure, left_out = "RecordingListener", None, 0

    def __init__(self) -> None:
        self.scalar: list[tuple[int, dict[str, float]]] = []
        self.images: list[tuple[int, str]] = []

    def scalars(self, update: int, values: dict[str, float]) -> None:
        self.scalar.append((update, values))

    def image(self, update: int, name: str, draw: Callable[[], Pixels]) -> None:
        assert draw().ndim == 3
        self.images.append((update, name))

    def close(self, seconds: float) -> bool:
        return True


def record(update: int, ratio: float = 1.0) -> Record:
    gradients = {"encoder": [ratio, 1.0], "decoder": [1.0, 1.0]}
    return Record(update, 1.5, {"encoder": 2, "decoder": 2}, {"gradient_norm": gradients, "r": {"encoder": ratio}})


def parts(run: Path, *, update: int = 0) -> tuple[DepthReporter, RecordingListener, io.StringIO, MetricsWriter, RunLog]:
    told, said = RecordingListener(), io.StringIO()
    log = RunLog(run, Console(file=said, width=500))
    metrics = MetricsWriter(run, log, update=update, trackers=[told])  # type: ignore[list-item]
    return DepthReporter(run, metrics, log, EXPERIMENT, update=update), told, said, metrics, log


def test_trackers_get_curves_at_once_and_heat_maps_less_and_less_often(tmp_path: Path) -> None:
    depth, told, *_ = parts(tmp_path)
    for update in range(100):
        depth.see(record(update))
    assert [update for update, _ in told.scalar] == list(range(100))
    assert told.scalar[0][1]["depth/gradient_norm.encoder.first"] == 1.0
    drawn = sorted({update for update, _ in told.images})
    assert drawn[:10] == list(range(10))
    assert len(drawn) < 40
    assert {name for _, name in told.images} == {
        "depth/gradient_norm.encoder by layer and update",
        "depth/gradient_norm.decoder by layer and update",
    }
    depth.ended()
    assert told.images[-1][0] == 99
    count = len(told.images)
    depth.ended()
    assert len(told.images) == count


def test_a_warning_goes_everywhere_once(tmp_path: Path) -> None:
    depth, _, said, _, log = parts(tmp_path)
    for update, ratio in enumerate([1.0, 1e-5, 1e-5, 1.0, 1.0, 1.0]):
        depth.see(record(update, ratio))
        assert depth.standing == (["gradient_ratio.encoder"] if 1 <= update < 5 else [])
        assert depth.shown_r(update) == f"r {ratio:.2g}  "
        assert depth.shown_r(update + 3) == f"r {ratio:.2g} (update {update})  "
    log.close()
    for text in (said.getvalue(), (tmp_path / "log.txt").read_text()):
        assert text.count("update 1: WARNING: the gradient of the first encoder layer is 1.0e-05") == 1
        assert text.count("update 5: gradient_ratio.encoder is back in its healthy band") == 1
    assert [(w.kind, w.update) for w in read_warnings(tmp_path)] == [("warning", 1), ("recovered", 5)]


def test_a_resumed_run_warns_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    """The killed run warned again after its checkpoint; resuming repeats the warning, but the file has it only once."""
    records = [record(u, ratio) for u, ratio in enumerate([1e-5, 1.0, 1.0, 1.0, 1e-5], start=1)]
    depth, *_ = parts(tmp_path)
    (tmp_path / DEPTH_FILE).parent.mkdir()
    for one in records:
        with (tmp_path / DEPTH_FILE).open("a") as file:
            file.write(one.line())
        depth.see(one)
    whole = (tmp_path / WARNINGS_FILE).read_bytes()
    assert len(whole.splitlines()) == 3
    resumed, told, said, *_ = parts(tmp_path, update=2)
    assert [w.update for w in read_warnings(tmp_path)] == [1]
    assert (resumed.standing, resumed.shown_r(2), said.getvalue()) == (["gradient_ratio.encoder"], "r 1  ", "")
    for one in records[2:]:
        resumed.see(one)
    assert (tmp_path / WARNINGS_FILE).read_bytes() == whole
    assert told.images, "heat maps have the records from before"


def test_a_full_disk_is_reported_once(tmp_path: Path) -> None:
    depth, _, said, *_ = parts(tmp_path)
    (tmp_path / "diagnostics").write_text("a file where the folder should be")
    depth.see(record(1, 1e-5))
    depth.see(Record(2, 1.5, {}, {"nll": None}))
    assert said.getvalue().count("warnings.jsonl cannot be written") == 1


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    log = RunLog(None, Console(quiet=True))
    depth = DepthReporter(None, MetricsWriter(None, log, update=0), log, EXPERIMENT, update=0)
    depth.see(record(1, 1e-5))
    assert depth.standing == ["gradient_ratio.encoder"]
    assert not list(tmp_path.iterdir())


def _update() -> UpdateResult:
    return UpdateResult(2.0, 20.0, 0.75, source_tokens=10, target_tokens=10, sentences=1, finite=True)


@pytest.mark.parametrize("width", [80, 200])
def test_the_bar_and_the_log_show_progress(tmp_path: Path, width: int) -> None:
    depth, _, said, metrics, log = parts(tmp_path)
    screen = io.StringIO()
    console = Console(file=screen, width=width, force_terminal=True, color_system=None)
    waits: Any = SimpleNamespace(waited_seconds=0.0)
    with ProgressLine(console) as bar:
        report = Reporter(bar, metrics, log, EXPERIMENT, partial(RecordWindow, waits, waits), depth, RunProgress())
        report.updated(RunProgress(update=1, seconds=1.0), _update(), 1e-3)
        depth.see(record(1, 1e-5))
        report.updated(RunProgress(update=2, seconds=2.0), _update(), 1e-3)
        report.updated(RunProgress(update=3, seconds=3.0), _update(), 1e-3)
        bar._bar.refresh()
        shown = screen.getvalue()
    assert "rate 1.00e-03  gradient 0.75  r 1e-05 (update 1)  " in said.getvalue()
    assert "WARNING gradient_ratio.encoder" in shown
    if width == 200:
        for part in ("update 3  loss 2.000  ", " left  ", " tokens/s  ", "rate 1.0e-03  gradient 0.75  r 1e-05"):
            assert part in shown


def test_without_measures_the_line_has_no_r(tmp_path: Path) -> None:
    depth, _, said, metrics, log = parts(tmp_path)
    waits: Any = SimpleNamespace(waited_seconds=0.0)
    window = partial(RecordWindow, waits, waits)
    report = Reporter(ProgressLine(Console(quiet=True)), metrics, log, EXPERIMENT, window, depth, RunProgress())
    report.updated(RunProgress(update=2, seconds=1.0), _update(), 1e-3)
    assert "gradient 0.75  " in said.getvalue()
    assert " r " not in said.getvalue()


@pytest.mark.parametrize("crowded", [False, True])
def test_a_busy_machine_is_reported_at_the_start_and_when_the_rate_falls(
    crowded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_LEAST_SECONDS", 0.0)
    monkeypatch.setattr(progress.SystemLoad, "look", lambda self, threads: (0.6, crowded))
    depth, _, said, metrics, log = parts(tmp_path)
    waits: Any = SimpleNamespace(waited_seconds=0.0)
    window, load = partial(RecordWindow, waits, waits), progress.SystemLoad()
    report = Reporter(ProgressLine(Console(quiet=True)), metrics, log, EXPERIMENT, window, depth, RunProgress(), load)
    report.updated(RunProgress(update=1, seconds=1.0), _update(), 1e-3)
    for speed in (100.0, 90.0, 70.0, 60.0, 100.0, 70.0):
        report._say_if_slowed(RunProgress(update=2), speed)
    lines = said.getvalue().splitlines()
    busy = "the machine is busy: 60% of its CPU time went to other processes"
    slower = f"update 2: slower, 70 target tokens/s after 100: {busy}"
    assert [line for line in lines if busy in line] == [
        f"{busy}: updates take longer than on an idle one",
        slower,
        slower,
    ][: 3 * crowded]


@pytest.mark.slow
def test_a_whole_run_measures_warns_and_draws(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The healthy band is empty; a stopped and resumed run has the same warnings, each once."""
    monkeypatch.setattr("ziggurat.train.diagnosis.health.FADING", 1e9)
    run = tmp_path / "run"
    settings: dict[str, Any] = {"diagnostics": {"every_updates": 2, "max_share": None}, "tensorboard": True}
    settings |= {"validation": {"every_updates": 100, "decode": False}, "log_every_updates": 2}
    train(run, tiny_experiment(tiny_folder, **settings, stop={"updates": 2}), console=Console(quiet=True))
    said = io.StringIO()
    resumed = tiny_experiment(tiny_folder, **settings, stop={"updates": 4})
    train(run, resumed, resume=True, console=Console(file=said, width=500))
    warned = [(w.kind, w.update, w.measure) for w in read_warnings(run)]
    assert warned == [("warning", 0, "gradient_ratio.encoder"), ("warning", 0, "gradient_ratio.decoder")]
    assert "WARNING" not in said.getvalue()
    assert (run / "log.txt").read_text().count("WARNING: the gradient of the first") == 2
    assert "  r " in said.getvalue()
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("depth/nll")] == [0, 2, 4]
    assert {e.step for e in events.Images("depth/gradient_norm.encoder by layer and update")} == {0, 2, 4}
    assert [e.step for e in events.Images("depth/similarity by layer and layer")][-1] == 4


@pytest.mark.slow
def test_measurements_left_out_are_counted_and_reported_once(tiny_folder: Path, tmp_path: Path) -> None:
    for share, left_out in ((1e-9, 5), (None, 0)):
        run = tmp_path / str(share)
        measured = {"every_updates": 1, "max_share": share}
        train(run, tiny_experiment(tiny_folder, diagnostics=measured, stop={"updates": 5}), console=Console(quiet=True))
        assert [record.update for record in read_records(run)] == [*range(6 - left_out)]
        told = [line for line in (run / "log.txt").read_text().splitlines() if "records left out" in line]
        assert len(told) == (left_out > 0)
        assert all("left out to save time: 5." in line and "`training.diagnostics.max_share`" in line for line in told)
