"""Scores that other tools gave to pairs: every layout, aligned with the corpus, and faulty files."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ziggurat.config.data import CorpusConfig
from ziggurat.data.readers import CorpusReader, ScoreStream, find_scores
from ziggurat.system.errors import ConfigError, DataError

SCORES = [0.9, 0.2, 0.5, 1.0, 0.0, 0.7]
KEY = "data.train.0"


def write_text(folder: Path, count: int = len(SCORES), name: str = "corpus") -> dict[str, Any]:
    for side in ("de", "en"):
        (folder / f"{name}.{side}").write_text("".join(f"{side} {n}\n" for n in range(count)))
    return {"source": str(folder / f"{name}.de"), "target": str(folder / f"{name}.en")}


def unwanted(corpus: dict[str, Any], steps: list[int] | None = None) -> list[bool]:
    """Return the pairs that the scores rule out, read in the reader's blocks or in `steps`."""
    config = CorpusConfig.model_validate(corpus)
    reader = CorpusReader.of(config, KEY, ("de", "en"))
    stream = ScoreStream(find_scores(config, KEY, reader), reader)
    found: list[bool] = []
    for source, _ in reader.blocks():
        cuts = [min(n, len(source)) for n in sorted(steps or [])]
        for first, last in zip([0, *cuts], [*cuts, len(source)], strict=True):
            mask = stream.unwanted(last - first)
            assert mask is not None
            found += mask.tolist()
    stream.end()
    return found


def lay_out(folder: Path, kind: str) -> dict[str, Any]:
    """Write the scores in one of the layouts of other tools; return the configuration of the score."""
    path = folder / f"scores{'.gz' if kind == 'gz' else '' if kind in ('lines', 'bicleaner') else f'.{kind}'}"
    if kind in ("lines", "gz"):
        content = "".join(f"{score}\n" for score in SCORES).encode()
        path.write_bytes(gzip.compress(content) if kind == "gz" else content)
        return {"path": str(path)}
    if kind in ("bicleaner", "tsv"):  # a column after the texts, whatever the file is called
        path.write_text("".join(f"de {n}\ten {n}\t{score}\n" for n, score in enumerate(SCORES)))
        return {"path": str(path), "column": -1 if kind == "bicleaner" else 2}
    if kind == "jsonl":  # OpusFilter: filters by name, some with one number per side
        records = ({"LengthRatioFilter": {"word": 1.5}, "LanguageIDFilter": {"cld2": [s, 0.5]}} for s in SCORES)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return {"path": str(path), "column": "LanguageIDFilter.cld2.0"}
    pq.write_table(pa.table({"text": ["x"] * len(SCORES), "score": pa.array(SCORES, pa.float32())}), path)
    return {"path": str(path), "column": "score"}


@pytest.mark.parametrize("kind", ["lines", "gz", "bicleaner", "tsv", "jsonl", "parquet"])
def test_layouts_of_other_tools(tmp_path: Path, kind: str) -> None:
    corpus = write_text(tmp_path)
    score = lay_out(tmp_path, kind)
    assert unwanted({**corpus, "scores": [{**score, "min": 0.5}]}) == [s < 0.5 for s in SCORES]
    assert unwanted({**corpus, "scores": [{**score, "max": 0.5}]}) == [s > 0.5 for s in SCORES]
    both = {**score, "min": 0.15, "max": 0.85}
    assert unwanted({**corpus, "scores": [both]}) == [not 0.15 <= s <= 0.85 for s in SCORES]


def test_scores_next_to_the_texts(tmp_path: Path) -> None:
    (tmp_path / "corpus.tsv").write_text("".join(f"de {n}\ten {n}\t{s}\n" for n, s in enumerate(SCORES)))
    corpus = {"path": str(tmp_path / "corpus.tsv")}
    assert unwanted({**corpus, "scores": [{"column": 2, "min": 0.6}]}) == [s < 0.6 for s in SCORES]
    records = ({"de": "a", "en": "b", "bicleaner": {"score": s}} for s in SCORES)
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    corpus = {"path": str(tmp_path / "corpus.jsonl")}
    assert unwanted({**corpus, "scores": [{"column": "bicleaner.score", "min": 0.6}]}) == [s < 0.6 for s in SCORES]


def test_a_field_whose_name_has_dots(tmp_path: Path) -> None:
    records = ({"a.b": s, "a": {"b": 9}} for s in SCORES)
    (tmp_path / "s.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    score = {"path": str(tmp_path / "s.jsonl"), "column": "a.b", "min": 0.6}
    assert unwanted({**write_text(tmp_path), "scores": [score]}) == [s < 0.6 for s in SCORES]


def test_several_scores_and_files(tmp_path: Path) -> None:
    for name in ("corpus1", "corpus2"):
        write_text(tmp_path, name=name)
        (tmp_path / f"{name}.score").write_text("".join(f"{s if name == 'corpus1' else 1 - s}\n" for s in SCORES))
        (tmp_path / f"{name}.other").write_text("".join(f"{n}\n" for n in range(len(SCORES))))
    scores = [{"path": str(tmp_path / "*.score"), "min": 0.5}, {"path": str(tmp_path / "*.other"), "max": 4}]
    corpus = {"source": str(tmp_path / "*.de"), "target": str(tmp_path / "*.en"), "scores": scores}
    wanted = [s < 0.5 or n > 4 for n, s in enumerate(SCORES)]
    assert unwanted(corpus) == wanted + [1 - s < 0.5 or n > 4 for n, s in enumerate(SCORES)]


@pytest.mark.parametrize(("lines", "message"), [(7, "has 7 scores"), (5, r"has 5 scores .* at least 6 pairs")])
def test_each_file_has_as_many_scores_as_its_part_of_the_corpus(tmp_path: Path, lines: int, message: str) -> None:
    """This holds even if another file has the missing scores."""
    for name, count in (("corpus1", lines), ("corpus2", 12 - lines)):
        write_text(tmp_path, name=name)
        (tmp_path / f"{name}.score").write_text("1\n" * count)
    corpus = {"source": str(tmp_path / "*.de"), "target": str(tmp_path / "*.en")}
    with pytest.raises(DataError, match=rf"corpus1\.score {message}"):
        unwanted({**corpus, "scores": [{"path": str(tmp_path / "*.score"), "min": 0}]})


@settings(max_examples=30)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.lists(st.integers(0, 40), max_size=4))
def test_pairs_may_be_read_in_any_steps(
    tmp_path_factory: pytest.TempPathFactory, scores: list[float], steps: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("scores")
    (folder / "s").write_text("".join(f"{score!r}\n" for score in scores))
    corpus = {**write_text(folder, len(scores)), "scores": [{"path": str(folder / "s"), "min": 0}]}
    assert unwanted(corpus, steps) == [score < 0 for score in scores]


@pytest.mark.parametrize(
    ("kind", "content", "column", "message"),
    [
        ("", "0.5\nnull\n", None, r"s, line 2: no score \(data\.train\.0\.scores\.0\): could not convert.*null"),
        ("", "score\n0\n", None, r"s, line 1: no score .*; if it holds the names of columns, remove it"),
        (".tsv", "src\ttrg\tscore\na\tb\t1\n", 2, r"s\.tsv, line 1: .*; if it holds the names of columns, remove it"),
        ("", "nan\n0\n", None, r"s, line 1: no score .*: not a number"),
        ("", "0.1\n", None, r"s has 1 scores .* but .*corpus\.de and .*corpus\.en has at least 2 pairs"),
        ("", "0.1\n0.2\n0.3\n", None, r"s has 3 scores .* but .* has 2 pairs; line i must be the score of pair i"),
        (".tsv", "a\tb\t0.5\na\tb\n", 2, r"s\.tsv, line 2: no score in column 2 .*: list index out of range"),
        (".jsonl", '{"a": 1}\n{"a": "1"}\n', "a", r"line 2: no score in column 'a' .*: 'a' is not a number but str"),
        (".jsonl", '{"a": 1}\n{"a": true}\n', "a", r"line 2: .*'a' is not a number but bool"),
        (".jsonl", '{"a": 1}\n{"b": 1}\n', "a", r"line 2: no score in column 'a'"),
        (".jsonl", '{"a": 1}\n{"a": 1\n', "a", r"line 2: no score in column 'a'"),
        (".jsonl", '{"a": [1]}\n', "a.1", r"line 1: no score in column 'a\.1' .*: list index out of range"),
        (".jsonl", '{"a": 1}\n', "a.b.c", r"line 1: .*nothing is inside where 'b' is looked for"),
        (".parquet", "PAR1", "a", r"s\.parquet: not a readable Parquet file"),
    ],
)
def test_faults_of_a_file_are_named(
    tmp_path: Path, kind: str, content: str, column: str | int | None, message: str
) -> None:
    (tmp_path / f"s{kind}").write_text(content)
    score = {"path": str(tmp_path / f"s{kind}"), "column": column, "min": 0}
    with pytest.raises(DataError, match=message):
        unwanted({**write_text(tmp_path, 2), "scores": [score]})


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("b", [1.0, 2.0], r"no column 'b'; it has: a"),
        ("a", ["x", "y"], r"column 'a' has no numbers but string"),
        ("a", [1.0, None], r"no number in column 'a' of row 2"),
        ("a", [math.nan, 1.0], r"no number in column 'a' of row 1"),
    ],
)
def test_faults_of_parquet(tmp_path: Path, column: str, values: list[Any], message: str) -> None:
    pq.write_table(pa.table({"a": values}), tmp_path / "s.parquet")
    score = {"path": str(tmp_path / "s.parquet"), "column": column, "min": 0}
    with pytest.raises(DataError, match=message):
        unwanted({**write_text(tmp_path, 2), "scores": [score]})


@pytest.mark.parametrize(
    ("score", "message"),
    [
        ({"column": 2, "min": 0}, r"scores\.0: the corpus is plain text, without columns; give `path`"),
        ({"path": "{0}/s.tsv", "min": 0}, r"scores\.0\.column: None; a column of a tsv file is a number from 0"),
        ({"path": "{0}/s.tsv", "column": "a", "min": 0}, r"column: 'a'; a column of a tsv file is a number from 0"),
        ({"path": "{0}/s.jsonl", "column": 3, "min": 0}, r"column: 3; a column of a jsonl file is the name of a field"),
        ({"path": "{0}/s.*", "column": 3, "min": 0}, r"scores\.0: .* matches 2 files, but the corpus has 1"),
        ({"path": "{0}/none", "min": 0}, r"data\.train\.0\.scores\.0\.path"),
    ],
)
def test_senseless_settings_are_refused(tmp_path: Path, score: dict[str, Any], message: str) -> None:
    for name in ("s.tsv", "s.jsonl"):
        (tmp_path / name).write_text("0\n0\n")
    score = {key: value.format(tmp_path) if key == "path" else value for key, value in score.items()}
    with pytest.raises((ConfigError, DataError), match=message):
        unwanted({**write_text(tmp_path, 2), "scores": [score]})
