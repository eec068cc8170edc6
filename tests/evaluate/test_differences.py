"""Wins and losses are sacreBLEU's sentence scores; n-gram matches are counted by hand."""

from __future__ import annotations

from collections import Counter
from statistics import fmean

import pytest
import sacrebleu

from tests.evaluate.test_scores import corpus
from ziggurat.evaluate.comparison import System, compare, matched_ngrams, ngram_table, ngrams, sentence_table


def test_ngrams() -> None:
    assert ngrams(["a", "b", "a"]) == {("a",): 2, ("b",): 1, ("a", "b"): 1, ("b", "a"): 1, ("a", "b", "a"): 1}
    assert ngrams([]) == {}
    assert max(len(ngram) for ngram in ngrams(["a", "b", "c", "d", "e", "f"])) == 4


def test_matches_are_clipped_within_a_sentence_and_averaged_over_seeds() -> None:
    reference = [["a", "a", "b"], ["c"]]
    seeds = [[["a", "a", "a"], ["b"]], [["b", "a"], ["c"]]]
    found = matched_ngrams(reference, seeds)
    assert found == {("a",): 1.5, ("a", "a"): 0.5, ("b",): 0.5, ("c",): 0.5}


def test_ngrams_that_tell_apart() -> None:
    left = {("a",): 3.0, ("b",): 1.0, ("c",): 2.0, ("x",): 9.0}
    right = {("c",): 2.0, ("d",): 1.0, ("x",): 8.0}
    table = ngram_table(("l", "r"), left, right, shown=2)
    assert [(n.ngram, n.left, n.right) for n in table.more_in_left] == [("a", 3, 0), ("b", 1, 0)]
    assert [n.score for n in table.more_in_left] == pytest.approx([4 / 5, 2 / 3])
    assert [(n.ngram, n.score) for n in table.more_in_right] == [("d", pytest.approx(1 / 3))]
    assert (table.left, table.right) == ("l", "r")


def test_sentences_won_and_lost_are_by_sentence_chrf() -> None:
    outputs, references = corpus(4, 30, 0.3)
    left, right = [outputs, references[1]], [[line.upper() if i % 3 else line for i, line in enumerate(outputs)]]
    found = compare(
        [System("l", left), System("r", right)], references[:1], outputs, resamplings=2, trials=2, examples=4
    ).sentence_tables[0]

    def scores(seeds: list[list[str]]) -> list[float]:
        judged = [[sacrebleu.sentence_chrf(h, [r]).score for h, r in zip(s, references[0], strict=True)] for s in seeds]
        return [fmean(line) for line in zip(*judged, strict=True)]

    ours, theirs = scores(left), scores(right)
    assert found.wins == sum(a > b for a, b in zip(ours, theirs, strict=True))
    assert found.losses == sum(a < b for a, b in zip(ours, theirs, strict=True))
    assert found.wins + found.losses + found.ties == 30
    assert found.measure.startswith("sentence chrF|nrefs:1|")
    gaps = sorted((a - b for a, b in zip(ours, theirs, strict=True)), reverse=True)
    assert [e.left_score - e.right_score for e in found.left_best] == pytest.approx(gaps[:4])
    for example in (*found.left_best, *found.right_best):
        line = example.line - 1
        assert (example.left_score, example.right_score) == pytest.approx((ours[line], theirs[line]))
        assert (example.source, example.reference) == (outputs[line], references[0][line])
        assert example.left == (left[0][line], left[1][line])
        assert example.right == (right[0][line],)
    assert all(e.right_score > e.left_score for e in found.right_best)


def test_the_same_example_is_shown_once() -> None:
    reference = ["r", "r", "s"]
    outputs = ([["a", "a", "a"]], [["b", "b", "b"]])
    table = sentence_table(("l", "r"), outputs, ([[9, 9, 5]], [[1, 1, 4]]), None, reference, measure="m", examples=3)
    assert [(e.line, e.source) for e in table.left_best] == [(1, None), (3, None)]
    assert table.right_best == ()
    assert (table.wins, table.losses, table.ties) == (3, 0, 0)


def test_sentence_bleu_buckets_are_sacrebleus() -> None:
    outputs, references = corpus(9, 40, 0.3)
    found = compare([System("l", [outputs])], references, resamplings=2, trials=2)
    (table,) = (table for table in found.buckets if table.key == "sentence-bleu")
    scores = [sacrebleu.sentence_bleu(h, list(r)).score for h, *r in zip(outputs, *references, strict=True)]
    wanted = Counter(min(9, int(score // 10)) for score in scores)
    labels = ["<10", *(f"[{low},{low + 10})" for low in range(10, 90, 10)), ">=90"]
    assert {b.label: b.systems[0].mean for b in table.buckets} == {labels[k]: v for k, v in wanted.items()}
