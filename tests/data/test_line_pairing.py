"""Sides whose lines do not belong together, and corpora that only look odd."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ziggurat.config.data import DataConfig
from ziggurat.data.line_pairing import Pairing
from ziggurat.data.prepare import prepare

Lines = list[str]
LINES = 3000


def corpus(seed: int, lines: int = LINES, noise: float = 0.25, letters: str = "abcdefgh ") -> tuple[Lines, Lines]:
    """Return sentences and translations of similar length into a language that shares no words with theirs."""
    random = Random(seed)
    lengths = [max(1, int(random.lognormvariate(3.3, 0.5))) for _ in range(lines)]
    targets = [max(1, int(0.6 * length * random.lognormvariate(0, noise))) for length in lengths]
    source = ["".join(random.choices("vwxyz ", k=length)) for length in lengths]
    return source, ["".join(random.choices(letters, k=length)) for length in targets]


def notices(source: Lines, target: Lines, block: int = 1000) -> Lines:
    pairing = Pairing()
    for start in range(0, len(source), block):
        pairing.see(source[start : start + block], target[start : start + block], start, "a.en")
    found = list(pairing.notices("data.train.0"))
    assert {(one.key, one.severity) for one in found} <= {("data.train.0", "warning")}
    return list(map(str, found))


def shuffled(lines: Lines) -> Lines:
    return Random(1).sample(lines, len(lines))


APART: dict[str, Callable[[Lines], Lines]] = {
    "a line early": lambda lines: lines[1:] + lines[:1],
    "three late": lambda lines: lines[-3:] + lines[:-3],
    "far": lambda lines: lines[70:] + lines[:70],
    "shuffled": shuffled,
    "sorted": sorted,
    "backwards": lambda lines: lines[::-1],
    "a line lost in the middle": lambda lines: lines[:1500] + lines[1501:] + lines[:1],
    "two lines more near the end": lambda lines: lines[:2000] + lines[:2] + lines[2000:-2],
    "duplicates dropped": lambda lines: [*(line for n, line in enumerate(lines) if n % 97), *lines][: len(lines)],
    "shuffled from a line on": lambda lines: lines[:2000] + shuffled(lines[2000:]),
}


@pytest.mark.parametrize("fault", APART)
@pytest.mark.parametrize("letters", ["abcdefgh ", "日本語の文字", "กขคงจ"])
def test_lines_that_do_not_belong_together(fault: str, letters: str) -> None:
    source, target = corpus(2, letters=letters)
    assert not notices(source, target)
    for pair in ((source, APART[fault](target)), (APART[fault](source), target)):
        (found,) = notices(*pair)
        assert "do not seem to belong together" in found


@pytest.mark.parametrize(("lines", "message"), [(1, "1 line early"), (4, "4 lines early"), (-1, "1 line late")])
def test_shifts_are_named(lines: int, message: str) -> None:
    source, target = corpus(3)
    assert message in notices(source, target[lines:] + target[:lines])[0]


def test_the_first_wrong_line_is_reported() -> None:
    source, target = corpus(4)
    assert "from a.en, line 2,001 on" in notices(source, target[:2000] + target[2001:] + target[:1])[0]


@pytest.mark.parametrize("some", [["Copyright notice."], ["x", "y and z"], ["a", "b b", "c c c"]])
def test_one_text_paired_with_many(some: Lines) -> None:
    source, target = corpus(5, 600)
    repeated = (some * 600)[:600]
    for pair in ((source, repeated), (repeated, target)):
        (found,) = notices(*pair)
        assert "is paired with many different ones" in found
    assert not notices(["", *source], ["", *target])
    assert not notices(source[:20] * 30, target[:20] * 30), "copies of whole pairs"


@given(st.integers(0, 1000), st.floats(0, 0.4))
@settings(max_examples=25)
def test_correct_corpora(seed: int, noise: float) -> None:
    source, target = corpus(seed, 1200, noise)
    pairs = list(zip(source, target, strict=True))
    random = Random(seed)
    orders: list[Callable[[tuple[str, str]], object]] = [
        lambda pair: pair[0], lambda pair: len(pair[0]), lambda pair: len(pair[1]), lambda pair: pair[0].count(" ")
    ]  # fmt: skip
    for order in orders:
        first, second = zip(*sorted(pairs, key=order), strict=True)
        assert not notices(list(first), list(second))
    assert not notices(source, [line if random.random() < 0.6 else "" for line in target]), "lines to be translated"
    wrong = [random.choice(target) if random.random() < 0.5 else line for line in target]
    # In one block, since chance decides about half of 200 lines.
    assert not notices(source, wrong, 1200), "half of the pairs wrong, as of text from the web: that is for filters"
    assert not notices(source[:90], shuffled(target)[:90]), "too few to say"
    assert not notices(["word"] * 1200, ["Wort"] * 1200)


@pytest.mark.parametrize(
    ("folder", "name", "languages"),
    [("tatoeba-de-en", "train", "de en"), ("tanaka-en-ja", "train", "en ja"), ("news-de-en", "train", "de en"),
     ("multi30k", "train", "cs fr"), ("testsets", "newstest2013", "cs de")],
)  # fmt: skip
def test_real_corpora(folder: str, name: str, languages: str, shared_data: Path) -> None:
    paths = [shared_data / folder / f"{name}.{language}.gz" for language in languages.split()]
    source, target = (gzip.decompress(path.read_bytes()).decode().split("\n")[:30_000] for path in paths)
    assert not notices(source, target, 16_384)
    for fault in APART.values():
        assert notices(source, fault(target)), "from the beginning"


def test_prepare_reports_it(tmp_path: Path) -> None:
    source, target = corpus(7, 400)
    paths = tmp_path / "c.en", tmp_path / "c.de"
    for path, lines in zip(paths, (source, target[1:] + target[:1]), strict=True):
        path.write_text("".join(f"{line}\n" for line in lines))
    section = {
        "train": [{"source": str(paths[0]), "target": str(paths[1])}], "subword": {"vocabulary_size": 300},
        "source_language": "en", "target_language": "de", "store": str(tmp_path / "store"),
    }  # fmt: skip
    report = prepare(DataConfig.model_validate(section))
    assert [notice for notice in report.notices if f"from {paths[0]}, line 1 on (the target seems" in notice]
