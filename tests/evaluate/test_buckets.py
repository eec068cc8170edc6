"""Tables by buckets compared with plain loops written from their definitions."""

from __future__ import annotations

import random

import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st

from tests.evaluate.test_scores import corpus
from ziggurat.evaluate.findings import (
    FREQUENCIES,
    LENGTH_DIFFERENCES,
    LENGTHS,
    bucket_index,
    bucket_labels,
    by_length,
    length_differences,
    sentence_scores,
    word_accuracy,
)
from ziggurat.evaluate.metrics import TestSet
from ziggurat.evaluate.scores import BleuWords, evaluate

LINES = st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=12), min_size=1, max_size=5)
COUNTS = {"a": 2000, "b": 1000, "c": 999, "d": 10, "e": 9, "f": 4, "g": 1}  # and there is no h


def matched_by_position(reference: list[str], output: list[str]) -> list[int]:
    """Return for each output word the reference position with as many earlier occurrences of the word, or -1."""
    found = []
    for place, word in enumerate(output):
        earlier = output[:place].count(word)
        places = [i for i, other in enumerate(reference) if other == word]
        found.append(places[earlier] if earlier < len(places) else -1)
    return found


@given(LINES, st.randoms(use_true_random=False))
def test_word_accuracy_is_the_f_measure_of_the_definition(reference: list[list[str]], draw: random.Random) -> None:
    output = [[draw.choice("abcdefgh") if draw.random() < 0.5 else w for w in line] for line in reference]
    output[0] = output[0] + ["a"] * draw.randrange(3)
    found = word_accuracy(reference, [[output]], COUNTS)
    shown = {bucket.label: bucket for bucket in found.buckets}
    for index, label in enumerate(bucket_labels(FREQUENCIES)):

        def inside(word: str, index: int = index) -> bool:
            return bucket_index(COUNTS.get(word, 0), FREQUENCIES) == index

        in_reference = sum(inside(word) for line in reference for word in line)
        in_output, matched = 0, 0
        for wanted, given_ in zip(reference, output, strict=True):
            for word, place in zip(given_, matched_by_position(wanted, given_), strict=True):
                mine = inside(word) if place < 0 else inside(wanted[place])
                in_output += mine
                matched += mine and place >= 0
        if not in_reference and not in_output:
            assert label not in shown
            continue
        precision, recall = matched / max(1, in_output), matched / max(1, in_reference)
        f_measure = 2 * precision * recall / (precision + recall) if matched else 0.0
        assert shown[label].systems[0].mean == pytest.approx(100 * f_measure)
        assert shown[label].size == in_reference


def test_labels_are_those_of_compare_mt() -> None:
    assert bucket_labels(FREQUENCIES) == ["<1", "1", "2", "3", "4", "[5,10)", "[10,100)", "[100,1000)", ">=1000"]
    assert bucket_labels(LENGTHS) == ["<10", "[10,20)", "[20,30)", "[30,40)", "[40,50)", "[50,60)", ">=60"]
    assert bucket_labels(LENGTH_DIFFERENCES)[:4] == ["<-20", "[-20,-10)", "[-10,-5)", "-5"]
    assert bucket_labels((10, 11), whole=False) == ["<10", "[10,11)", ">=11"]
    assert [bucket_index(value, (1, 2, 5)) for value in (0, 1, 2, 4.9, 5, 6)] == [0, 1, 2, 2, 3, 3]


def test_bleu_by_length_is_the_score_of_the_sentences_of_that_length() -> None:
    hypotheses, references = corpus(3, 60, 0.3)
    words = BleuWords()
    metric = TestSet(references).metric("bleu")
    table = by_length(
        [words(line) for line in references[0]],
        metric,
        [metric.statistics([hypotheses]), metric.statistics([references[1]] * 2)],
        "BLEU",
    )
    assert [bucket.label for bucket in table.buckets] == ["<10", "[10,20)", "[20,30)"]
    for bucket, (low, high) in zip(table.buckets, [(0, 10), (10, 20), (20, 30)], strict=True):
        inside = [i for i, line in enumerate(references[0]) if low <= len(words(line)) < high]
        kept = [[lines[i] for i in inside] for lines in (hypotheses, *references)]
        (score,) = evaluate(kept[0], kept[1:], metrics=["bleu"])
        assert bucket.size == len(inside)
        assert bucket.systems[0].mean == pytest.approx(score.value, abs=1e-9)
        (other,) = evaluate(kept[2], kept[1:], metrics=["bleu"])
        assert bucket.systems[1].values == pytest.approx((other.value, other.value), abs=1e-9)
    assert table.key == "bleu-by-length"


def test_histograms_count_every_sentence_once() -> None:
    reference = [["a"] * 5, ["a"] * 5, ["a"] * 40]
    outputs = [["a"] * 5, ["a"] * 4, ["a"] * 10]
    table = length_differences(reference, [[outputs, reference]])
    found = {bucket.label: bucket.systems[0].values for bucket in table.buckets}
    assert found == {"<-20": (1, 0), "-1": (1, 0), "0": (1, 3)}
    table = sentence_scores([[[0.0, 9.99, 10.0, 89.9, 90.0, 100.0]]], "chrF")
    assert {b.label: b.systems[0].mean for b in table.buckets} == {"<10": 2, "[10,20)": 1, "[80,90)": 1, ">=90": 2}


def test_words_are_those_that_bleu_counts() -> None:
    words = BleuWords()
    split = ["The", '"', "old", '"', "bridge", ",", "(", "3.5", ")", "well-known", "."]
    assert words('The "old" bridge, (3.5) well-known.  ') == split
    assert words.name == "13a"
    assert words("") == []
    assert BleuWords(lowercase=True)("The Dog") == ["the", "dog"]
    assert BleuWords(target_language="zh").name == "zh"
    assert BleuWords(tokenize="none")("a, b") == ["a,", "b"]
    assert words.counts(["a b", "a"]) == {"a": 2, "b": 1}
    lines = corpus(1, 5, 0.2)[0]
    assert [len(words(line)) for line in lines] == [sacrebleu.BLEU().corpus_score([x], [[x]]).sys_len for x in lines]
