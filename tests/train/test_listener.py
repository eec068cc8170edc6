"""Trackers that fail, hang or are slow, and how a run handles them."""

from __future__ import annotations

import io
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tests.train.runs import records
from ziggurat.train import run_log as metrics_module
from ziggurat.train.run_log import MetricsWriter, RunLog
from ziggurat.train.trackers import Listener, Pixels


class Fake:
    """A tracker that keeps its records."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []
        self.closed = 0

    def scalars(self, update: int, values: Mapping[str, float]) -> None:
        self.told.append((update, dict(values)))

    def image(self, update: int, name: str, pixels: Pixels) -> None:
        self.told.append((update, name, pixels.shape))

    def close(self) -> None:
        self.closed += 1


class Failing(Fake):
    """A tracker that fails at the second record, in the given way."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def scalars(self, update: int, values: Mapping[str, float]) -> None:
        super().scalars(update, values)
        if len(self.told) == 2:
            raise self.error

    def close(self) -> None:
        super().close()
        raise ValueError("closing fails, too")


def writer(run: Path, *trackers: Listener) -> tuple[MetricsWriter, RunLog, io.StringIO]:
    said = io.StringIO()
    log = RunLog(run, Console(file=said, width=500))
    return MetricsWriter(run, log, update=0, trackers=trackers), log, said


def settled(listener: Listener) -> None:
    """Wait until the thread has ended."""
    listener._thread.join(10)
    assert not listener._thread.is_alive()


def test_all_reports_arrive_in_order() -> None:
    fake = Fake()
    listener = Listener("fake", lambda: fake)
    listener.scalars(1, {"a": 1.0})
    listener.image(1, "map", lambda: np.zeros((2, 3, 3), np.uint8))
    listener.scalars(2, {"a": 2.0})
    assert listener.close(10)
    assert fake.told == [(1, {"a": 1.0}), (1, "map", (2, 3, 3)), (2, {"a": 2.0})]
    assert (fake.closed, listener.failure, listener.left_out) == (1, None, 0)


@pytest.mark.parametrize("error", [RuntimeError("no\nroute"), SystemExit(3), MemoryError()])
def test_a_failing_tracker_is_dropped_and_reported_once(tmp_path: Path, error: BaseException) -> None:
    bad, good = Failing(error), Fake()
    failing, working = Listener("Bad", lambda: bad), Listener("Good", lambda: good)
    metrics, log, said = writer(tmp_path, failing, working)
    metrics.write("train", 1, {"loss": 1.0, "bleu": None})
    metrics.write("train", 2, {"loss": 2.0})
    settled(failing)
    for update in (3, 4):
        metrics.write("train", update, {"loss": 3.0})
    metrics.close()
    log.close()
    assert said.getvalue().count("Bad is left out from now on") == 1
    assert f"{type(error).__name__}" in said.getvalue()
    assert "no route" in said.getvalue() or not isinstance(error, RuntimeError)
    assert (len(bad.told), bad.closed) == (2, 1)
    assert [update for update, _ in good.told] == [1, 2, 3, 4]
    assert good.told[0] == (1, {"train/loss": 1.0})
    assert len(records(tmp_path)) == 4
    assert "Bad is left out" in (tmp_path / "log.txt").read_text()


def test_a_tracker_that_cannot_start_or_close_is_reported(tmp_path: Path) -> None:
    def start() -> Fake:
        raise ConnectionError("offline")

    absent, rude = Listener("Absent", start), Listener("Rude", lambda: Failing(KeyError("x")))
    metrics, _, said = writer(tmp_path, absent, rude)
    settled(absent)
    metrics.write("train", 1, {"loss": 1.0})
    metrics.close()
    assert said.getvalue().count("Absent is left out from now on; training continues: ConnectionError: offline") == 1
    assert "Rude is left out from now on; training continues: ValueError: closing fails, too" in said.getvalue()


def test_a_tracker_that_hangs_does_not_delay_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start never returns: records are dropped once the queue is full, and closing waits for a bounded time."""
    monkeypatch.setattr(metrics_module, "_CLOSING_SECONDS", 0.2)
    never = threading.Event()

    def start() -> Fake:
        never.wait(30)
        return Fake()

    hanging = Listener("Hanging", start, room=2)
    metrics, _, said = writer(tmp_path, hanging)
    for update in range(1, 6):
        metrics.write("train", update, {"loss": 1.0})
    assert hanging.left_out == 3
    assert hanging._thread.daemon  # so that the process ends anyway
    metrics.close()
    assert "Hanging has not taken all records in time; training no longer waits for it" in said.getvalue()
    assert len(records(tmp_path)) == 5
    never.set()


def test_a_slow_tracker_is_reported_once_it_is_over(tmp_path: Path) -> None:
    go_on, fake = threading.Event(), Fake()

    def start() -> Fake:
        go_on.wait(30)
        return fake

    slow = Listener("Slow", start, room=2)
    metrics, _, said = writer(tmp_path, slow)
    for update in range(1, 6):
        metrics.write("train", update, {"loss": 1.0})
    go_on.set()
    metrics.close()
    assert [update for update, _ in fake.told] == [1, 2]
    assert "Slow was too slow: 3 records are missing there" in said.getvalue()
