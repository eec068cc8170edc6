"""A vocabulary is reported, with a smaller size, if training hardly ever sees most of its pieces."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ziggurat.config.data import DataConfig, SubwordConfig
from ziggurat.data.prepare import prepare
from ziggurat.data.table import TableWriter
from ziggurat.data.vocabulary import rare_notices, size_notices, unknown_notices
from ziggurat.system.errors import Problem


def counted(*often: int) -> NDArray[np.int64]:
    return np.array(often, np.int64)


def problems_found(
    source: NDArray[np.int64], target: NDArray[np.int64], size: int = 1200, **subword: Any
) -> list[Problem]:
    return rare_notices(SubwordConfig(vocabulary_size=size, **subword), (size, size), (source, target))


def test_counts_add_up_over_blocks(tmp_path: Path) -> None:
    writer = TableWriter(tmp_path, "train", has_text=False)
    ids = np.repeat(np.arange(4, dtype=np.int32), [3, 0, 7, 1])
    for part in np.array_split(ids, 3):
        lists = part, np.array([len(part)], np.int32)
        writer.write(0, lists, lists)
    writer.close()
    assert [counts.tolist() for counts in writer.counts] == [[3, 0, 7, 1]] * 2


def test_pieces_of_both_sides_count_where_the_vocabulary_is_joint() -> None:
    half, none = counted(*[5] * 600), counted()
    without_bytes = {"byte_fallback": False}
    assert problems_found(half, half, **without_bytes) == []  # ten occurrences of half of the pieces
    message = str(*problems_found(half, none, **without_bytes))
    assert message.startswith("1,200 of 1,200 pieces occur fewer than 10 times in the training text")
    assert "lower `data.subword.vocabulary_size` to about 500 and prepare again" in message


def test_each_side_is_reported_by_its_own_key() -> None:
    rare, frequent = counted(*[10] * 500), counted(*[10] * 900)
    sizes = {"joint": False, "byte_fallback": False}
    assert [problem.key for problem in problems_found(rare, frequent, **sizes)] == ["data.subword.vocabulary_size"]
    (problem,) = problems_found(frequent, rare, target_vocabulary_size=1200, **sizes)
    assert problem.key == "data.subword.target_vocabulary_size"
    assert str(problem).startswith("700 of 1,200 target pieces")


def test_bytes_do_not_count_nor_vocabularies_that_are_given_or_small() -> None:
    counts = counted(*[10] * 480)
    assert problems_found(counts, counted()) == []  # there are 944 pieces that are not bytes
    assert problems_found(counts, counted(), byte_fallback=False)
    assert problems_found(counted(1), counted(1), size=999) == []
    given: dict[str, Any] = {"kind": "existing", "source_model": "some.spm"}
    assert problems_found(counted(1), counted(1), **given) == []


@pytest.mark.parametrize(("size", "notices"), [(1500, 1), (900, 0)])
def test_prepare_reports_them(size: int, notices: int, tmp_path: Path) -> None:
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghijklmnopqrst", k=6)) for _ in range(400)]
    for name in ("a", "b"):
        lines = [" ".join(draw.choices(words, k=6)) + "\n" for _ in range(150)]
        (tmp_path / name).write_text("".join(lines), encoding="utf-8")
    config = DataConfig(
        source_language="qlo",
        target_language="qhi",
        store=str(tmp_path / "store"),
        subword=SubwordConfig(vocabulary_size=size),
        train=[{"source": str(tmp_path / "a"), "target": str(tmp_path / "b")}],  # type: ignore[list-item]
    )
    report = prepare(config)
    assert not [message for message in report.notices if "not the" in message]
    assert len([message for message in report.notices if "occur fewer than 10 times" in message]) == notices
    assert report.pieces() == f"{size:,} joint pieces"
    assert prepare(config).notices == report.notices  # reported for the existing store, too


@pytest.mark.parametrize(
    ("subword", "said"),
    [
        (
            {"vocabulary_size": 5000},
            ["joint subword model has 9 pieces, not the 5,000 of `data.sub"],
        ),
        ({"vocabulary_size": 9}, []),
        ({"vocabulary_size": 8}, []),
        ({"joint": False, "vocabulary_size": 8}, []),
        ({"joint": False, "vocabulary_size": 12}, ["source subword model has 9", "target subword model has 10"]),
        ({"joint": False, "vocabulary_size": 9, "target_vocabulary_size": 11}, ["the 11 of `data.subword.target_voc"]),
        ({"kind": "existing", "source_model": "some.spm"}, []),
    ],
)
def test_fewer_pieces_than_requested(subword: dict[str, Any], said: list[str]) -> None:
    found = size_notices(SubwordConfig(**subword), (9, 9 if subword.get("joint", True) else 10))
    assert len(found) == len(said)
    assert all(part in str(one) for part, one in zip(said, found, strict=True))


def test_prepare_reports_that_a_corpus_has_too_few_pieces(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text("the same line\n" * 20 + "and another\n", encoding="utf-8")
    config = DataConfig(
        source_language="qlo",
        target_language="qhi",
        store=str(tmp_path / "store"),
        subword=SubwordConfig(vocabulary_size=8000),
        train=[{"source": str(tmp_path / "a"), "target": str(tmp_path / "b"), "tag": "<bt>"}],  # type: ignore[list-item]
    )
    report = prepare(config)
    made = report.source_vocabulary - 1  # one is the tag
    said = [one for one in report.notices if f"has {made:,} pieces, not the 8,000" in one]
    assert len(said) == 1
    assert said[0] in report.as_dict()["notices"]
    assert said[0] in prepare(config).notices  # read from the manifest


def test_unknown_pieces_are_reported_by_side_from_one_percent_on() -> None:
    ids, few, many = (1, 0), counted(99, 1), counted(2, 98)
    assert unknown_notices(ids, (few, counted(0, 100))) == []
    (problem,) = unknown_notices(ids, (few, many))
    assert problem.severity == "warning"
    assert "2.0%" in problem.reason
    assert "target" in problem.reason
    assert unknown_notices((5, 5), (few, counted())) == []  # no id that high, and no text


def test_raw_text_against_a_vocabulary_of_other_words_is_reported(tmp_path: Path) -> None:
    for side in ("a", "b"):
        (tmp_path / side).write_text("known words\n" * 30 + "raw text\n" * 9)
        (tmp_path / f"dict.{side}.txt").write_text("known 60\nwords 60\n")
    subword = {"kind": "vocabulary"} | {
        f"{name}_vocabulary": str(tmp_path / f"dict.{side}.txt") for name, side in (("source", "a"), ("target", "b"))
    }
    corpus = {"source": str(tmp_path / "a"), "target": str(tmp_path / "b")}
    config = DataConfig.model_validate(
        {
            "source_language": "qlo",
            "target_language": "qhi",
            "store": str(tmp_path / "store"),
            "train": [corpus],
            "subword": subword,
            "filters": {"duplicates": False},
        }
    )
    prepare(config)
    notices = json.loads((tmp_path / "store" / "manifest.json").read_text())["notices"]
    assert sum("unknown to the vocabulary" in notice for notice in notices) == 2
