"""A whole comparison: scores are those of each output, and tables are present or reported as left out."""

from __future__ import annotations

import json
import statistics
from typing import Any

import pytest

from tests.evaluate.test_findings import from_json
from tests.evaluate.test_scores import corpus
from ziggurat.evaluate.comparison import Comparison, System, compare
from ziggurat.evaluate.scores import evaluate
from ziggurat.system.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def compared() -> Comparison:
    outputs, references = corpus(1, 30, 0.4)
    systems = [System("two seeds", [outputs, references[1]], ["run 1", "run 2"]), System("one", [references[1]])]
    return compare(
        systems,
        [references[0]],
        outputs,
        iter(references[1]),  # a stream that can be read only once
        resamplings=20,
        trials=20,
        examples=2,
    )


def test_scores_are_those_of_each_output(compared: Comparison) -> None:
    outputs, references = corpus(1, 30, 0.4)
    found = [evaluate(output, [references[0]]) for output in (outputs, references[1])]
    assert [scores.metric for scores in compared.scores] == ["BLEU", "chrF2", "TER"]
    for number, scores in enumerate(compared.scores):
        values = [of_output[number].value for of_output in found]
        assert scores.systems[0].values == tuple(values)
        assert scores.systems[0].mean == statistics.fmean(values)
        assert scores.systems[0].deviation == statistics.stdev(values)
        assert scores.systems[1].values == (values[1],)
        assert scores.signature == found[0][number].signature
        assert scores.higher_is_better == (scores.metric != "TER")
        assert scores.pairs[0].difference == pytest.approx(scores.systems[0].mean - scores.systems[1].mean)


def test_all_tables_are_present(compared: Comparison) -> None:
    assert [(s.name, s.seeds, s.origins) for s in compared.systems] == [
        ("two seeds", 2, ("run 1", "run 2")),
        ("one", 1, ()),
    ]
    assert [table.key for table in compared.buckets] == [
        "accuracy-by-frequency",
        "bleu-by-length",
        "length-difference",
        "sentence-bleu",
        "sentence-chrf",
    ]
    assert [count.key for count in compared.counts] == ["exact", "empty", "copied", "untranslated", "repeated"]
    assert compared.counts[2].systems[0].values[0] > 20  # the first seed's output is the source
    assert len(compared.sentence_tables) == len(compared.ngrams) == 1
    assert len(compared.ngrams[0].more_in_left) == 2
    assert (compared.sentences, compared.references, compared.words, compared.notes) == (30, 1, "13a", ())
    for table in compared.buckets:
        assert all(len(bucket.systems) == 2 and len(bucket.systems[0].values) == 2 for bucket in table.buckets)


def test_it_survives_json(compared: Comparison) -> None:
    assert from_json(json.dumps(compared.as_record(), allow_nan=False)) == compared


def test_omissions_are_reported() -> None:
    found = compare([System("a", [["x y"]])], [["x z"]])
    assert found.buckets[0].key == "bleu-by-length"
    assert [count.key for count in found.counts] == ["exact", "empty", "repeated"]
    assert len(found.notes) == 2
    assert "--train-target" in found.notes[0]
    assert "--source" in found.notes[1]
    assert (found.sentence_tables, found.ngrams, found.scores[0].pairs) == ((), (), ())


def test_case_and_tokenizer_reach_everything() -> None:
    options: dict[str, Any] = {"resamplings": 2, "trials": 2}
    systems = [System("a", [["THE DOG, RUNS HOME"]]), System("b", [["x"]])]
    found = compare(systems, [["the dog, runs home"]], None, ["the"], lowercase=True, tokenize="none", **options)
    assert found.words == "none"
    assert found.scores[0].systems[0].mean > 0
    assert "case:lc" in found.scores[0].signature
    assert "tok:none" in found.scores[0].signature
    assert found.counts[0].systems[0].mean == 1  # exact
    assert [b.label for b in found.buckets[0].buckets] == ["<1", "1"]
    assert [n.ngram for n in found.ngrams[0].more_in_left][:2] == ["dog,", "dog, runs"]
    plain = compare(systems, [["the dog, runs home"]], None, ["the"], **options)
    assert plain.counts[0].systems[0].mean == 0


def test_hopeless_outputs_give_figures_too() -> None:
    found = compare(
        [System("a", [["", ""]]), System("b", [["x", ""]])], [["c d", "e"]], ["s", ""], [], resamplings=5, trials=5
    )
    json.dumps(found.as_record(), allow_nan=False)
    assert found.scores[0].systems[0].mean == 0


@pytest.mark.parametrize(
    ("systems", "error", "message"),
    [
        ([], ConfigError, "no system"),
        ([System("a", [["x"]]), System("a", [["x"]])], ConfigError, "two systems are called 'a'"),
        ([System("a", [])], ConfigError, "system 'a' needs a list of outputs"),
        ([System("a", ["x"])], ConfigError, "system 'a' needs a list of outputs, each a list"),
        ([System("a", [["x", "y"]])], DataError, "unequal numbers of lines"),
    ],
)
def test_incomparable_systems(systems: list[System], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        compare(systems, [["x"]])


def test_wrong_arguments() -> None:
    system = [System("a", [["x"]])]
    with pytest.raises(ConfigError, match=r"unknown metric `blue`; valid: bleu, chrf, ter, chrf\+\+, meteor, comet"):
        compare(system, [["x"]], metrics=["blue"])
    with pytest.raises(ConfigError, match="no metric"):
        compare(system, [["x"]], metrics=[])
    with pytest.raises(DataError, match="unequal"):
        compare(system, [["x"]], ["s", "t"])
    with pytest.raises(ConfigError, match="unknown tokenizer"):
        compare(system, [["x"]], tokenize="14a")
