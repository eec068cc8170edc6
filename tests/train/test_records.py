"""Records of depth measures on disk."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from ziggurat.system.errors import DataError
from ziggurat.train.records import Record, read_records, write_records

FIRST = Record(0, 12.5, {"encoder": 2, "decoder": 1}, {"nll": 9.0, "r": {"encoder": 1.5, "decoder": 1.0}})
SECOND = Record(200, 13.0, {"encoder": 2, "decoder": 1}, {"history_weights": {"encoder": [[1.0, math.nan], [0.5, 2]]}})


def test_records_are_read_back_with_null_for_non_finite_values(tmp_path: Path) -> None:
    assert read_records(tmp_path) == []
    path = write_records(tmp_path, [FIRST, SECOND])
    assert path == tmp_path / "diagnostics" / "depth.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == {
        "format": 1,
        "update": 0,
        "time": 12.5,
        "layers": {"encoder": 2, "decoder": 1},
        "values": {"nll": 9.0, "r": {"encoder": 1.5, "decoder": 1.0}},
    }
    assert lines[1]["values"] == {"history_weights": {"encoder": [[1.0, None], [0.5, 2]]}}
    first, second = read_records(tmp_path)
    assert first == FIRST
    assert (second.update, second.values) == (200, {"history_weights": {"encoder": [[1.0, None], [0.5, 2]]}})
    for wrong in (math.inf, -math.inf):
        assert json.loads(Record(1, 0.0, {}, {"nll": wrong}).line())["values"] == {"nll": None}


def test_a_line_cut_off_by_a_kill_is_ignored(tmp_path: Path) -> None:
    path = write_records(tmp_path, [FIRST, SECOND])
    whole = path.read_bytes()
    for cut in (2, 30, len(SECOND.line()) - 1):
        path.write_bytes(whole[:-cut])
        assert read_records(tmp_path) == [FIRST]


DAMAGE = [
    "{",
    "[]",
    "null",
    '{"format": 1}',
    "\x00\x00",
    '{"format": 1, "updates": 3}',
    "",
    '{"format": 1, "update": "5", "time": 1.0, "layers": {}, "values": {}}',
    '{"format": 1, "update": 5, "time": 1.0, "layers": {}, "values": []}',
    '{"format": 1, "update": 5, "time": 1.0, "layers": {}, "values": {"gradient_norm": 3}}',
    '{"format": 1, "update": 5, "time": 1.0, "layers": {}, "values": {"similarity": [0.5]}}',
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_other_damage_names_file_and_line(tmp_path: Path, damage: str) -> None:
    path = write_records(tmp_path, [FIRST, SECOND])
    first, second = path.read_text().splitlines()
    path.write_text(f"{first}\n{damage}\n{second}\n")
    with pytest.raises(DataError, match=r"depth\.jsonl, line 2: damaged"):
        read_records(tmp_path)


def test_other_formats_are_refused(tmp_path: Path) -> None:
    path = write_records(tmp_path, [FIRST])
    for line in (path.read_text().replace('"format": 1', '"format": 2'), '{"format": 2, "all": "else"}\n'):
        path.write_text(line)
        with pytest.raises(DataError, match=r"depth\.jsonl, line 1: format 2, but .* reads 1"):
            read_records(tmp_path)


def test_the_later_of_two_records_of_an_update_counts(tmp_path: Path) -> None:
    again = Record(0, 14.0, FIRST.layers, {"nll": 8.0})
    write_records(tmp_path, [SECOND, FIRST, again])
    assert [(r.update, r.time) for r in read_records(tmp_path)] == [(0, 14.0), (200, 13.0)]
