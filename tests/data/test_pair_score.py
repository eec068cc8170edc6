"""The pair score on the embedded language pair: it separates wrong pairs from right ones, the same way every time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ziggurat.data.babel import generate
from ziggurat.data.cleaning import pair_score
from ziggurat.data.cleaning.pair_score import (
    LEAST_PAIRS,
    CorpusStatistics,
    HalfModel,
    PairScorer,
    PairTokens,
    read_pair_score,
    wrong_pairs,
)
from ziggurat.system.errors import DataError

Pairs = list[tuple[str, str]]


@pytest.fixture(scope="module")
def corpus() -> tuple[Pairs, NDArray[np.int64]]:
    """Pairs; every tenth has the target of another one, and every tenth has two thirds of its own target."""
    right = [(pair[0], pair[1]) for pair in generate(2500, seed=11)]
    kinds = np.zeros(len(right), np.int64)
    pairs = list(right)
    for n in range(0, len(pairs), 5):
        source, target = right[n]
        words = target.split()
        kinds[n] = 1 + n % 2
        pairs[n] = (
            (source, right[(n + 1234) % len(right)][1]) if n % 2 == 0 else (source, " ".join(words[: len(words) // 2]))
        )
    return pairs, kinds


@pytest.fixture(scope="module")
def scorer(corpus: tuple[Pairs, NDArray[np.int64]]) -> PairScorer:
    return PairScorer.train(corpus[0])


def _scores(scorer: PairScorer, pairs: Pairs) -> NDArray[np.float64]:
    return scorer.scores([s for s, _ in pairs], [t for _, t in pairs])


@pytest.mark.slow
def test_wrong_pairs_have_lower_scores(scorer: PairScorer, corpus: tuple[Pairs, NDArray[np.int64]]) -> None:
    pairs, kinds = corpus
    scores = _scores(scorer, pairs)
    assert ((scores >= 0) & (scores <= 1)).all()
    for kind in (1, 2):
        # How often a wrong pair scores lower than a right one.
        wrong, right = scores[kinds == kind], scores[kinds == 0]
        assert (wrong[:, None] < right[None, :]).mean() > 0.97
    assert (scores[kinds == 0] >= 0.5).mean() > 0.9
    assert (scores[kinds > 0] < 0.5).mean() > 0.85
    # It does not just remember them: it also separates other pairs of the language.
    fresh = [(pair[0], pair[1]) for pair in generate(300, seed=12)]
    exchanged = [(source, fresh[n - 1][1]) for n, (source, _) in enumerate(fresh)]
    assert (_scores(scorer, exchanged)[:, None] < _scores(scorer, fresh)[None, :]).mean() > 0.97


@pytest.mark.slow
def test_the_score_depends_only_on_the_pair(
    scorer: PairScorer, corpus: tuple[Pairs, NDArray[np.int64]], tmp_path: Path
) -> None:
    pairs = corpus[0][:300]
    scores = _scores(scorer, pairs)
    one_by_one = np.concatenate([_scores(scorer, [pair]) for pair in pairs])
    assert (scores == one_by_one).all()
    again = PairScorer.train(iter(corpus[0]))
    assert again.content() == scorer.content()
    (tmp_path / "score").write_bytes(scorer.content())
    assert (_scores(read_pair_score(tmp_path / "score"), pairs) == scores).all()
    assert scorer.scores([], []).shape == (0,)


def test_long_pairs_are_described_a_few_at_a_time(
    scorer: PairScorer, corpus: tuple[Pairs, NDArray[np.int64]], monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = _scores(scorer, corpus[0][:300])
    most, describe = [], pair_score.features

    def features(sides: PairTokens, half: HalfModel, corpus: CorpusStatistics) -> NDArray[np.float64]:
        most.append(sum(len(s) * len(t) for s, t in zip(*sides.words, strict=True)))
        return describe(sides, half, corpus)

    monkeypatch.setattr(pair_score, "features", features)
    monkeypatch.setattr(pair_score, "_CELLS", 1000)
    assert (_scores(scorer, corpus[0][:300]) == scores).all()
    longest = max(len(source.split()) * len(target.split()) for source, target in corpus[0][:300])
    assert len(most) > 10
    assert max(most) < 1000 + 2 * longest  # marks are words too


def test_a_sentence_may_end_with_the_question_mark_of_greek() -> None:
    pairs = [("Πώς σε λένε;", "What is your name?"), ("one;", "one?"), ("one;", "eins;"), ("ένα;", "one;")]
    sides = [list(side) for side in zip(*pairs, strict=True)]
    words = [[text.split() for text in side] for side in sides]
    ids = [[np.zeros(len(text), np.int32) for text in side] for side in words]
    _, ends = pair_score._sides(sides[0], sides[1], words, ids, np.arange(4)).marks
    assert ends.tolist() == [True, False, True, False]


def test_regression_is_at_the_minimum_of_its_loss() -> None:
    """The gradient of the mean log loss with ridge, term by term, vanishes there."""
    generator = np.random.default_rng(4)
    inputs = np.concatenate([generator.normal(size=(400, 3)), np.ones((400, 1))], 1)
    labels = (inputs @ [1.0, -2.0, 0.3, 0.5] + generator.normal(size=400) > 0).astype(float)
    weights = pair_score._regression(inputs, labels)
    gradient = np.zeros(4)
    for row, label in zip(inputs, labels, strict=True):
        gradient += (1 / (1 + np.exp(-(row @ weights))) - label) * row / 400
    gradient[:3] += 1e-2 * weights[:3]
    assert np.abs(gradient).max() < 1e-6
    assert weights[0] > 0 > weights[1]


def test_wrong_pairs_are_wrong_and_stay_in_their_half() -> None:
    sources = [f"s{n} a{n} b{n} c{n} d{n}" for n in range(600)]
    targets = [f"t{n} e{n} f{n} g{n} h{n}" for n in range(600)]
    odd = np.random.default_rng(0).random(600) < 0.4
    found = wrong_pairs(sources, targets, odd)
    assert found == wrong_pairs(sources, targets, odd)
    same = [n for n in range(600) if (found[0][n], found[1][n]) == (sources[n], targets[n])]
    assert len(same) < 6  # by chance: the order is unchanged
    for size in range(20, 60):  # no target is swapped with itself
        made = wrong_pairs(sources[:size], targets[:size], odd[:size])
        assert all(made[1][n] != targets[n] for n in range(size) if n % 6 < 2)
    other_half = 0
    for number, (source, target) in enumerate(zip(*found, strict=True)):
        used = {int(word[1:]) for word in f"{source} {target}".split()}
        other_half += any(odd[n] != odd[number] for n in used)
    assert other_half <= 3  # at the boundary of the halves, neighbours by length


def test_text_without_blanks_is_cut_and_shuffled_by_characters() -> None:
    texts = [chr(0x4E00 + n) * 2 + chr(0x5000 + n) * 2 for n in range(120)]
    sources, targets = wrong_pairs(texts, texts, np.zeros(120, np.bool_))
    assert not any(" " in text for text in (sources[2], targets[2], sources[3], targets[3]))
    assert len(sources[2]) + len(targets[2]) < 8
    assert sorted(sources[3] + targets[3]) == sorted(2 * texts[3])


def test_too_few_pairs_are_refused() -> None:
    with pytest.raises(
        DataError, match=f"needs {LEAST_PAIRS} pairs to learn from, and there are 99; .*pair_score: null"
    ):
        PairScorer.train([("a", "b")] * 99)


@pytest.mark.parametrize(("end", "side"), [(("", " ."), "source"), ((" .", ""), "target")])
def test_a_side_without_a_word_that_occurs_twice_is_refused(end: tuple[str, str], side: str) -> None:
    pairs = [(f"wort{n}{end[0]}", f"word{n}{end[1]}") for n in range(LEAST_PAIRS)]
    with pytest.raises(DataError, match=rf"no word of the {side} side does; switch it off with `pair_score: null`"):
        PairScorer.train(pairs)


@pytest.mark.parametrize("damage", ["cut", "empty", "format", "missing"])
def test_damaged_files_are_refused(scorer: PairScorer, tmp_path: Path, damage: str) -> None:
    path, content = tmp_path / "score", scorer.content()
    if damage != "missing":
        changed = content.replace(b"pair-score-1", b"pair-score-9")
        path.write_bytes({"cut": content[:-100], "empty": b"", "format": changed}[damage])
    with pytest.raises(DataError, match=r"score: .*remove it and run this again"):
        read_pair_score(path)


@pytest.mark.parametrize("around", ["\u3000{}", "{}\u00a0", "\u3000\u3000{}\u00a0"])
def test_blank_characters_of_any_kind_around_text_without_blanks(around: str) -> None:
    texts = [around.format(chr(0x3042 + n % 40) + chr(0x3042 + n // 40)) for n in range(LEAST_PAIRS)]
    english = [f"word {n}" for n in range(LEAST_PAIRS)]
    for pairs in (list(zip(texts, english, strict=True)), list(zip(english, texts, strict=True))):
        scores = _scores(PairScorer.train(pairs), pairs)
        assert ((scores >= 0) & (scores <= 1)).all()
