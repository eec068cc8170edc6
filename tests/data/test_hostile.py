"""Every faulty input in ../shared/data/hostile behaves as its README table states.

test_readers.py, test_clean.py and test_prepare.py cover the same faults with our own sentences, and need no data
outside the repository.
"""

from __future__ import annotations

import gzip
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ziggurat.config.data import DataConfig
from ziggurat.data.corpus import Store
from ziggurat.data.prepare import prepare
from ziggurat.system.errors import DataError


@dataclass(frozen=True)
class Accepted:
    """Expect `kept` pairs, with the rest counted as `dropped`; `lines` (from 1) are the dropped ones."""

    kept: int = 40
    dropped: dict[str, int] = field(default_factory=dict)
    lines: tuple[int, ...] = ()
    carriage_returns: int = 0
    byte_order_marks: int = 0


@dataclass(frozen=True)
class Refused:
    """Expect a DataError that names these."""

    parts: tuple[str, ...]

    def __init__(self, *parts: str) -> None:
        object.__setattr__(self, "parts", parts)


CASES: dict[str, Accepted | Refused] = {
    "00-good": Accepted(),
    "01-misaligned-missing-line": Refused(".de has 39 lines", ".en has 40"),
    "02-misaligned-extra-blank-end": Refused(".de has 41 lines", ".en has 40", "the last line of", "is empty"),
    "03-no-final-newline": Accepted(),
    "04-crlf-one-side": Accepted(carriage_returns=40),
    "05-cr-only": Refused(".de has 1 lines", ".en has 40"),
    "06-mixed-line-ends": Accepted(carriage_returns=14),
    "07-empty-lines": Accepted(35, {"empty": 5}, (5, 12, 20, 30, 35)),
    "08-invalid-utf8": Refused(".de, line 9:", "not valid UTF-8", "byte 8 of the line, 438 of the file"),
    "09-surrogates": Refused(".de, line 6:", "not valid UTF-8", "byte 5 of the line"),
    "10-nul-bytes": Accepted(37, {"nul": 3}, (3, 18, 40)),
    "11-unicode-line-separators": Accepted(),
    "12-control-characters": Accepted(),
    "13-bom": Accepted(byte_order_marks=2),
    "14-utf16": Refused(".en, line 1:", "not valid UTF-8", "byte 0 of the line, 0 of the file", "UTF-16"),
    "15-very-long-lines": Accepted(37, {"too_long": 3}, (7, 8, 13)),
    "16-unicode-zoo": Accepted(20),
    "17-looks-like-control-tokens": Accepted(20),
    "18-truncated": Refused(".en.gz", "the compressed data ends early"),
    "19-bad-checksum": Refused(".en.gz", "damaged"),
    "20-not-gzip": Refused(".en.gz", "the content is not compressed data of that kind"),
    "21-two-members": Accepted(),
    "22-gzip-trailing-garbage": Refused(".en.gz", "bytes follow the compressed data"),
    "23-xz-named-gz": Refused(".en.gz", "the content is .xz data"),
    "24-empty-both": Refused("no sentence pairs in", ".de", ".en"),
    "25-empty-one-side": Refused(".de has 0 lines", ".en has 40"),
    "26-only-newlines": Refused("40 of 40 pairs skipped", "empty 40", "nothing left to train on"),
    "27-one-pair": Accepted(1),
    "28-copied-source": Accepted(20, {"identical": 20}, tuple(range(11, 31))),
    "29-length-ratio": Accepted(38, {"length_ratio": 2}, (4, 10)),
    "30-duplicates": Accepted(4, {"duplicate": 36}, tuple(range(5, 41))),
    "31-whitespace": Accepted(),
    "32-bad-columns": Refused(".tsv, line 7: 1 columns instead of 2"),
    "33-quotes": Accepted(),
    "34-binary": Refused(".en, line 1:", "not valid UTF-8"),
    "35-unseen-script": Accepted(4),
}

# Filters that the table allows but does not demand; without them these cases load whole, which is checked, too.
OPTIONAL_FILTERS: dict[str, dict[str, Any]] = {
    "28-copied-source": {"identical": True},
    "29-length-ratio": {"max_length_ratio": 20.0},
    "30-duplicates": {"duplicates": True},
}


def corpus_of(folder: Path, case: str) -> dict[str, str]:
    """Return the corpus section for the files of `case`."""
    files = {path.name.removeprefix(f"{case}."): str(path) for path in sorted(folder.glob(f"{case}.*"))}
    if "tsv" in files:
        return {"path": files["tsv"]}
    sides = {name.split(".")[0]: path for name, path in files.items()}
    return {"source": sides["de"], "target": sides["en"]}


def settings_of(folder: Path, case: str, store: Path, filters: dict[str, Any]) -> DataConfig:
    return DataConfig.model_validate({
        "source_language": "de", "target_language": "en", "store": str(store), "filters": filters,
        "train": [corpus_of(folder, case)], "subword": {"vocabulary_size": 1000},
    })  # fmt: skip


def expected_texts(corpus: dict[str, str], dropped: tuple[int, ...]) -> list[list[str]]:
    """Read the files in the plainest way and normalise blanks by the documented rule."""

    def lines(path: str) -> list[str]:
        data = Path(path).read_bytes()
        text = (gzip.decompress(data) if path.endswith(".gz") else data).decode("utf-8-sig")
        return text.removesuffix("\n").split("\n")

    if "path" in corpus:
        rows = [line.split("\t") for line in lines(corpus["path"])]
        sides = [[row[0] for row in rows], [row[1] for row in rows]]
    else:
        sides = [lines(corpus["source"]), lines(corpus["target"])]
    return [
        [re.sub("[ \t\r]+", " ", text).strip(" ") for number, text in enumerate(side, 1) if number not in dropped]
        for side in sides
    ]


@pytest.mark.parametrize("case", CASES)
def test_hostile(shared_data: Path, tmp_path: Path, case: str) -> None:
    folder, expected, store = shared_data / "hostile", CASES[case], tmp_path / "store"
    config = settings_of(folder, case, store, OPTIONAL_FILTERS.get(case, {}))
    if isinstance(expected, Refused):
        with pytest.raises(DataError) as caught:
            prepare(config)
        message = str(caught.value)
        for part in (case, *expected.parts):
            assert part in message
        assert message.isprintable(), "one line, nothing that a terminal would act on"
        assert len(message) < 700
        assert [*tmp_path.iterdir()] == [], "nothing may be left behind"
        return
    report = prepare(config)
    (corpus,) = report.corpora
    assert (corpus.kept, corpus.dropped) == (expected.kept, expected.dropped)
    assert (corpus.carriage_returns, corpus.byte_order_marks) == (
        expected.carriage_returns,
        expected.byte_order_marks,
    )
    opened = Store.open(store)
    for tokenizer, ids, texts in zip(
        (opened.source, opened.target),
        opened.train.pairs(range(corpus.kept)),
        expected_texts(corpus_of(folder, case), expected.lines),
        strict=True,
    ):
        assert [tokenizer.decode(row.tolist()) for row in ids] == texts
        assert min(int(row.min()) for row in ids) > max(tokenizer.pad, tokenizer.unk, tokenizer.bos, tokenizer.eos)
        assert not any("\r" in piece for row in ids for piece in tokenizer.pieces(row.tolist()))
    if case in OPTIONAL_FILTERS:
        assert prepare(settings_of(folder, case, tmp_path / "unfiltered", {"max_pieces": None})).kept == 40
    if case in ("16-unicode-zoo", "17-looks-like-control-tokens"):
        raw = Path(corpus_of(folder, case)["target"]).read_text("utf-8").removesuffix("\n").split("\n")
        decoded = [opened.target.decode(row.tolist()) for row in opened.train.pairs(range(20))[1]]
        assert decoded == raw, "the text must come back unchanged, not only normalised"
    if case == "35-unseen-script":
        # This case is input for translation, in scripts on which the tokenizer was never trained.
        other = tmp_path / "other"
        prepare(settings_of(folder, "00-good", other, {}))
        tokenizer = Store.open(other).source
        for texts in expected_texts(corpus_of(folder, case), ()):
            ids = tokenizer.encode(texts)
            assert [tokenizer.decode(row) for row in ids] == texts
            assert tokenizer.unk not in {index for row in ids for index in row}


def test_every_case_is_covered(shared_data: Path) -> None:
    found = {path.name.split(".")[0] for path in (shared_data / "hostile").iterdir() if path.name[0].isdigit()}
    assert found == set(CASES)
