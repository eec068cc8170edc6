"""A comparison's tables survive JSON; verdicts follow the adjusted p-values."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace

import pytest
from pydantic import TypeAdapter

from ziggurat.cli.compare import comparison_text
from ziggurat.evaluate.comparison import FORMAT, Comparison
from ziggurat.evaluate.findings import (
    Bucket,
    BucketTable,
    Example,
    NgramDifference,
    NgramTable,
    OutputCount,
    OverSeeds,
    Scores,
    SentenceTable,
    SystemDifference,
    SystemNotes,
)


def from_json(text: str) -> Comparison:
    """The comparison in the document that `compare --json` prints."""
    record = json.loads(text)
    assert record.pop("format") == FORMAT
    return TypeAdapter(Comparison).validate_python(record)


def scores(difference: float, adjusted: float, higher_is_better: bool = True) -> Scores:
    pair = SystemDifference("a", "b", difference, 0.01, adjusted, 0.02, adjusted)
    return Scores(
        "M", "s", higher_is_better, (OverSeeds.of([1.0]), OverSeeds.of([1.0 - difference])), (pair,), "t", sentences=100
    )


def sample() -> Comparison:
    two = (OverSeeds.of([1.0, 2.5]), OverSeeds.of([3]))
    return Comparison(
        systems=(SystemNotes("a", 2, ("x", "y")), SystemNotes("b", 1, ())),
        sentences=2,
        references=1,
        words="13a",
        scores=(scores(0.5, 0.04),),
        counts=(OutputCount("empty", "empty outputs", two, ((1,), ())),),
        buckets=(BucketTable("k", "t", "by", "m", "words", (Bucket("<1", None, two), Bucket(">=1", 3, two))),),
        sentence_tables=(
            SentenceTable("a", "b", "chrF2", 1, 0, 1, (Example(1, 2.0, 1.0, None, "r", ("x",), ("y",)),), ()),
        ),
        ngrams=(NgramTable("a", "b", (NgramDifference("of the", 3.0, 1.0, 4 / 6),), ()),),
        notes=("<script>",),
    )


def test_mean_and_deviation_over_seeds() -> None:
    found = OverSeeds.of([1, 2, 4.5])
    assert found.values == (1.0, 2.0, 4.5)
    assert found.mean == pytest.approx(2.5)
    assert found.deviation == pytest.approx(statistics.stdev([1, 2, 4.5]))
    assert OverSeeds.of([7]).deviation is None


def test_a_record_comes_back_from_json() -> None:
    assert from_json(json.dumps(sample().as_record())) == sample()


@pytest.mark.parametrize(
    ("difference", "adjusted", "higher_is_better", "verdict"),
    [
        (1.0, 0.049, True, "+"),
        (-1.0, 0.049, True, "-"),
        (1.0, 0.049, False, "-"),
        (-1.0, 0.049, False, "+"),
        (1.0, 0.05, True, "="),
        (0.0, 0.01, True, "="),
    ],
)
def test_verdicts(difference: float, adjusted: float, higher_is_better: bool, verdict: str) -> None:
    found = scores(difference, adjusted, higher_is_better)
    assert found.verdict("a", "b") == verdict
    assert found.verdict("b", "a") == {"+": "-", "-": "+", "=": "="}[verdict]
    with pytest.raises(KeyError):
        found.verdict("a", "c")


def test_no_verdict_from_few_sentences() -> None:
    found = scores(1.0, 0.001)
    assert [replace(found, sentences=count).verdict("a", "b") for count in (1, 29, 30)] == ["?", "?", "+"]
    comparison = replace(sample(), scores=(replace(found, sentences=1),))
    assert from_json(json.dumps(comparison.as_record())) == comparison


@pytest.mark.parametrize("sentences", [1, 40])
def test_tables_report_few_sentences(sentences: int) -> None:
    pairs = tuple(
        SystemDifference(a, b, 1.0, 0.001, 0.001, 0.001, 0.001) for a, b in (("a", "b"), ("a", "c"), ("b", "c"))
    )
    one = OverSeeds.of([1.0])
    tested = Scores("M", "s", True, (one, one, one), pairs, "t", sentences=sentences)
    names = tuple(SystemNotes(name, 1, ()) for name in "abc")
    text = comparison_text(Comparison(names, sentences, 1, "13a", (tested,), (), (), (), (), ()))
    assert "0.0010" in text  # as in sacreBLEU
    assert ("1 sentence: too few to tell" in text) == (sentences == 1)
    assert ("row better than column" in text) == (sentences == 40)


def test_no_verdict_between_two_systems_that_do_not_translate() -> None:
    found = scores(1.0, 0.001)
    assert found.verdict("a", "b") == "+"
    assert replace(found, useless=("a", "b")).verdict("a", "b") == "0"
    assert replace(found, useless=("b",)).verdict("a", "b") == "+", (
        "one that translates is better than one that does not"
    )
