"""Warnings over the course of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ziggurat.system.errors import DataError
from ziggurat.train.diagnosis.health import CALM, FADING, WARNINGS_FILE, RunWarning, Watch, read_warnings
from ziggurat.train.records import Record


def record(update: int, ratio: float | None) -> Record:
    values = {} if ratio is None else {"gradient_norm": {"encoder": [ratio, 1.0], "decoder": [1.0]}}
    return Record(update, 100.0 + update, {"encoder": 2, "decoder": 1}, values)


def course(*ratios: float | None) -> list[tuple[int, str]]:
    watch = Watch(warmup_updates=10)
    return [(w.update, w.kind) for update, ratio in enumerate(ratios) for w in watch.see(record(update, ratio))]


LOW, HIGH = FADING / 2, FADING * 2


def test_a_warning_is_reported_once() -> None:
    assert course(HIGH, LOW, LOW, LOW, LOW) == [(1, "warning")]


def test_it_is_withdrawn_once_the_measure_stays_in_its_band_and_can_return() -> None:
    assert CALM == 3
    assert course(LOW, HIGH, HIGH, HIGH, HIGH, LOW) == [(0, "warning"), (3, "recovered"), (5, "warning")]


def test_a_measure_at_the_edge_is_not_reported_repeatedly() -> None:
    assert course(*([LOW, HIGH, HIGH] * 10)) == [(0, "warning")]


def test_values_that_keep_exploding_do_not_recover() -> None:
    """The band for growth moves with the values; the band that was left stays."""
    watch = Watch(warmup_updates=10)
    kinds = []
    for update, variance in enumerate([1.0, 9e4, 3e5, 6e5, 9e5, 8e5, 50.0, 50.0, 50.0]):
        values = {"variance": {"encoder.ffn": [variance]}}
        kinds += [(update, w.kind) for w in watch.see(Record(update, 0.0, {"encoder": 1, "decoder": 1}, values))]
    assert kinds == [(1, "warning"), (8, "recovered")]


def test_a_record_without_the_measure_changes_nothing() -> None:
    assert course(LOW, None, None, None, HIGH, None, HIGH, LOW) == [(0, "warning")]


def test_standing_warnings() -> None:
    watch = Watch(warmup_updates=10)
    (warned,) = watch.see(record(7, LOW))
    assert list(watch.standing) == ["gradient_ratio.encoder"]
    assert (warned.kind, warned.update, warned.time, warned.value, warned.low) == ("warning", 7, 107.0, LOW, FADING)
    for update in (8, 9, 10):
        found = watch.see(record(update, HIGH))
    assert found[0].message == "gradient_ratio.encoder is back in its healthy band"
    assert not watch.standing


WARNED = RunWarning("warning", 5, 1.5, "finite.nll", None, None, None, "nll is not finite")


def test_warnings_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert read_warnings(tmp_path) == []
    path = tmp_path / WARNINGS_FILE
    path.parent.mkdir()
    path.write_text(WARNED.line() * 2)
    assert read_warnings(tmp_path) == [WARNED, WARNED]
    path.write_bytes(path.read_bytes()[:-9])  # cut off by a kill
    assert read_warnings(tmp_path) == [WARNED]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense\n", "line 2: damaged"),
        (json.dumps({"format": 1, "kind": "warning"}) + "\n", "line 2: damaged"),
        (WARNED.line().replace('"format": 1', '"format": 9'), "line 2: format 9"),
    ],
)
def test_damage_is_reported_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / WARNINGS_FILE
    path.parent.mkdir()
    path.write_text(WARNED.line() + line + WARNED.line())
    with pytest.raises(DataError, match=message):
        read_warnings(tmp_path)
