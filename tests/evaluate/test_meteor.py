"""METEOR computed by hand, and a signature that names how words were matched."""

from __future__ import annotations

import sys

import pytest

from ziggurat.evaluate import metrics
from ziggurat.evaluate.metrics import TestSet
from ziggurat.evaluate.scores import add_up, scored
from ziggurat.system.errors import ConfigError, DataError

pytest.importorskip("nltk", reason="METEOR needs nltk")


def by_hand(matches: int, output: int, reference: int, chunks: int) -> float:
    """Lavie and Agarwal 2007, equations with alpha 0.9, beta 3, gamma 0.5."""
    precision, recall = matches / output, matches / reference
    mean = precision * recall / (0.9 * precision + 0.1 * recall)
    return 100 * mean * (1 - 0.5 * (chunks / matches) ** 3)


@pytest.fixture(autouse=True)
def without_wordnet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matching must not depend on the data that happens to be installed."""
    monkeypatch.setattr("nltk.data.path", [])


def test_sentences_by_hand() -> None:
    reference = ["The cat sat on the mat .", "Dogs are running home", "nothing in common", "same words"]
    output = ["the cat on the mat .", "the dog runs home", "x y", ""]
    metric = TestSet([reference], target_language="en").metric("meteor")
    (statistics,) = metric.statistics([output])
    scores = [row[0] for row in statistics]
    # The cat | on the mat . : 6 matches in 2 chunks. dog runs home: stems dog, run, home: chunks dog | run home.
    assert scores == pytest.approx([by_hand(6, 6, 7, 2), by_hand(3, 4, 4, 2), 0, 0])
    found = metric.from_sums(add_up(statistics))
    assert found.name == "METEOR"
    assert found.score == pytest.approx(sum(scores) / 4)


def test_the_signature_says_how_words_were_matched() -> None:
    english = str(TestSet([["a"]], target_language="en").metric("meteor").signature())
    assert english.startswith("nrefs:1|case:lc|tok:13a|match:exact+stem|stem:porter|")
    assert "version:nltk-" in english
    assert "match:exact+stem|stem:snowball-german" in str(
        TestSet([["a"]], target_language="de").metric("meteor").signature()
    )
    for language in (None, "cs"):
        plain = TestSet([["dogs"], ["a"]], target_language=language).metric("meteor")
        assert "nrefs:2|case:lc|tok:13a|match:exact|alpha" in str(plain.signature())
        assert plain.statistics([["dog"]]) == [[[0.0, 1.0]]]
    assert TestSet([["Hunden"]], target_language="de").metric("meteor").statistics([["hunde"]])[0][0][0] > 0


def test_wordnet_is_used_if_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lemma:
        def name(self) -> str:
            return "hound"

    class Synset:
        def lemmas(self) -> list[Lemma]:
            return [Lemma()]

    class Wordnet:
        def ensure_loaded(self) -> None: ...

        def synsets(self, word: str) -> list[Synset]:
            return [Synset()] if word == "dog" else []

    monkeypatch.setattr("nltk.corpus.wordnet", Wordnet())
    metric = TestSet([["the hound"]], target_language="en").metric("meteor")
    assert "match:exact+stem+wordnet" in str(metric.signature())
    assert metric.statistics([["the dog"]])[0][0][0] == pytest.approx(by_hand(2, 2, 2, 1))


def test_the_best_reference_counts() -> None:
    metric = TestSet([["a b c d"], ["x y z w"]]).metric("meteor")
    (statistics,) = metric.statistics([["x y z q"]])
    assert statistics == [[pytest.approx(by_hand(3, 4, 4, 1)), 1.0]]


def test_one_output_with_an_interval() -> None:
    reference = [f"word{i} and more" for i in range(20)]
    output = [line if i % 2 else "none" for i, line in enumerate(reference)]
    metric = TestSet([reference]).metric("meteor")
    score = scored(metric, output, confidence=True)
    whole = by_hand(3, 3, 3, 1)
    assert score.value == pytest.approx(whole / 2)
    assert score.mean == pytest.approx(whole / 2, abs=3)
    assert score.interval == pytest.approx(1.96 * whole / 2 / 20**0.5, abs=3)
    assert "bs:1000|seed:12345" in score.signature
    assert scored(metric, output, confidence=False).interval is None


def test_missing_packages_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="unequal numbers of lines"):
        TestSet([["a"]]).metric("meteor").statistics([["a", "b"]])
    monkeypatch.setitem(sys.modules, "nltk", None)
    with pytest.raises(ConfigError, match=r"METEOR needs nltk: pip install 'ziggurat-mt\[meteor\]'"):
        metrics.Meteor([["a"]], target_language="en")
