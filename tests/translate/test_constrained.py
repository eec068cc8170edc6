"""Constraints: they are met if possible, and wide beams find the best of all outputs that meet them."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.translate.doubles import TableScorer, random_log_probabilities
from tests.translate.plain import BOS, EOS, plain_search
from ziggurat.translate.choice import Candidates, ConstrainedChoice, searched_together
from ziggurat.translate.hypotheses import LengthPenalty
from ziggurat.translate.search import search
from ziggurat.translate.settings import RuleOptions, SearchSettings, Sentence

Phrases = tuple[tuple[int, ...], ...]


def holds(tokens: tuple[int, ...], phrases: Phrases) -> bool:
    """Return whether all phrases occur, in any order, without sharing tokens."""
    for order in itertools.permutations(phrases):
        at = 0
        for phrase in order:
            places = [i for i in range(at, len(tokens) - len(phrase) + 1) if tokens[i : i + len(phrase)] == phrase]
            if not places:
                break
            at = places[0] + len(phrase)
        else:
            return True
    return False


phrases = st.lists(st.lists(st.integers(2, 5), min_size=1, max_size=3).map(tuple), max_size=3).map(tuple)


@settings(max_examples=100)
@given(data=st.data(), rows=st.lists(phrases, min_size=1, max_size=5))
def test_every_output_holds_its_phrases_and_others_are_not_disturbed(data: st.DataObject, rows: list[Phrases]) -> None:
    beam_size = data.draw(st.integers(2, 5))
    wanted = SearchSettings(
        beam_size,
        data.draw(st.integers(1, beam_size)),
        BOS,
        EOS,
        (BOS,),
        penalty=data.draw(st.sampled_from([LengthPenalty(), LengthPenalty("power", 1.0)])),
        batch_sentences=data.draw(st.integers(1, 4)),
    )
    table = random_log_probabilities(data.draw(st.integers(0, 999)), 7, data.draw(st.sampled_from([0.5, 3.0])))
    longest = [sum(map(len, row)) + data.draw(st.integers(0, 3)) for row in rows]
    sentences = [Sentence([i], most, 0, (), row) for i, (row, most) in enumerate(zip(rows, longest, strict=True))]
    scorer = TableScorer(table, 7)
    for number, (found, row) in enumerate(zip(search(scorer, sentences, wanted), rows, strict=True)):
        if row:
            assert all(h.finished and holds(tuple(h.tokens), row) for h in found)
            assert len({tuple(h.tokens) for h in found}) == len(found)
        else:
            plain = plain_search(scorer, number, 1, longest[number], wanted)
            assert [h.tokens for h in found] == [h.tokens for h in plain]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("row", [((2,),), ((2, 3), (4,)), ((2, 3), (4, 2)), ((2, 3), (2, 4)), ((2,), (2, 3)),
                                 ((3,), (3,)), ((2, 2, 3),), ((4,), (4,), (4, 3)), ((3, 2), (3, 2))])  # fmt: skip
def test_wide_beams_find_the_best_output_with_all_phrases(seed: int, row: Phrases) -> None:
    table = random_log_probabilities(seed, 5, 1.0)
    every = []
    for length in range(5):
        for words in itertools.product([2, 3, 4], repeat=length):
            if holds(words, row):
                path = (*words, EOS)
                every.append((sum(table(0, path[:i])[token] for i, token in enumerate(path)), list(words)))
    best = sorted(every, key=lambda e: -e[0])[:3]
    wanted = SearchSettings(200, 3, BOS, EOS, (BOS,))
    (found,) = search(TableScorer(table, 5), [Sentence([0], 4, 0, (), row)], wanted)
    assert [h.tokens for h in found] == [tokens for _, tokens in best]
    assert [h.log_probability for h in found] == pytest.approx([total for total, _ in best], abs=1e-9)


def test_unmet_constraints_are_dropped_and_the_output_is_marked_as_cut() -> None:
    table = random_log_probabilities(1, 5, 1.0)
    wanted = SearchSettings(2, 1, BOS, EOS, (BOS,), RuleOptions(banned=((3,),)))
    ((found,),) = search(TableScorer(table, 5), [Sentence([0], 4, 0, (), ((2,), (3,)))], wanted)
    assert not found.finished
    assert 2 in found.tokens
    assert 3 not in found.tokens


def test_sentences_with_many_phrases_do_not_fill_the_memory_of_others() -> None:
    counts = [0, 12, 2, 300, 12, 9, 300]
    rows = [tuple((2 + n % 4,) for n in range(count)) for count in counts]
    sentences = [Sentence([i], len(row) + 1, 0, (), row) for i, row in enumerate(rows)]
    many = [sentences[3]] * 64
    assert searched_together(sentences, 4) == [[0, 2], [1, 3, 4, 5, 6]]
    assert max(map(len, searched_together(many, 4))) <= 11
    assert sorted(n for group in searched_together(many, 4) for n in group) == list(range(64))

    short = [0, 1, 2, 4, 5]
    table = random_log_probabilities(3, 7, 1.0)
    wanted = SearchSettings(3, 1, BOS, EOS, (BOS,))
    scorer = TableScorer(table, 7)
    found = search(scorer, [sentences[i] for i in short], wanted)
    assert scorer.admitted == [[0, 2], [1, 4, 5]]
    assert found == [search(TableScorer(table, 7), [sentences[i]], wanted)[0] for i in short]


def test_a_forced_start_may_contain_a_phrase() -> None:
    table = random_log_probabilities(1, 5, 1.0)
    wanted = SearchSettings(3, 1, BOS, EOS, (BOS,))
    ((found,),) = search(TableScorer(table, 5), [Sentence([0], 6, 0, (4, 2, 3), ((2, 3), (4, 4)))], wanted)
    assert found.finished
    assert found.tokens[:3] == [4, 2, 3]
    assert holds(tuple(found.tokens), ((2, 3), (4, 4)))


class Way(NamedTuple):
    """The state of a hypothesis: its constraint tokens, its complete phrases, and whether it is inside a phrase."""

    bank: int
    completed: int
    finished: bool
    is_root: bool


def followed(phrases: Phrases, tokens: tuple[int, ...]) -> Way:
    """Return the state of a hypothesis with these tokens."""
    width = max(map(len, phrases))
    choice = ConstrainedChoice(2, len(phrases), width, EOS, "cpu")
    choice.admit([Sentence([0], 99, 0, (), phrases)])
    going = torch.zeros(1, 2)
    for token in tokens:
        every = torch.full((1, 2), token)
        choice.beams(going, Candidates(every, torch.tensor([[0, 1]]), going, going))
    held, done = choice.held[0, 0], choice.done[0, 0]
    completed = len(phrases) - int((choice._following()[0, 0] >= 0).sum())
    bank = sum(len(phrase) for phrase, has in zip(phrases, done.tolist(), strict=True) if has) + int(held.max())
    return Way(bank, completed, completed == len(phrases), not held.any())


def read(phrases: Phrases, tokens: tuple[int, ...]) -> Way:
    """Return the same by the rule, token by token."""
    lacking = list(phrases)
    way: tuple[int, ...] = ()
    waiting = list(tokens)
    while waiting:
        longer = (*way, waiting.pop(0))
        if any(phrase[: len(longer)] == longer for phrase in lacking):
            way = longer
            continue
        passed = max((p for p in lacking if p == longer[: len(p)]), key=len, default=())
        if passed:
            lacking.remove(passed)
        waiting = [*longer[max(1, len(passed)) :], *waiting]
        way = ()
    ended = way in lacking
    bank = sum(map(len, phrases)) - sum(map(len, lacking)) + len(way)
    return Way(bank, len(phrases) - len(lacking) + ended, len(lacking) - ended == 0, not way)


SIX = ((1, 2, 3), (1, 3), (1, 4), (4, 5, 6, 7), (1,), (4, 5))


@pytest.mark.parametrize(
    ("phrases", "tokens", "way"),
    [  # expected by fairseq's tests of unordered constraints
        (SIX, (), Way(0, 0, False, True)),
        (SIX, (1, 2), Way(2, 0, False, False)),
        (SIX, (1, 2, 94), Way(1, 1, False, True)),
        (SIX, (1, 3, 999, 1, 4), Way(4, 2, False, False)),
        (SIX, (1, 3, 999, 1, 4, 999), Way(4, 2, False, True)),
        (SIX, (4, 5, 6, 8), Way(2, 1, False, True)),
        (SIX, (1, 2, 3, 1, 3, 1, 4, 4, 5, 6, 7, 1, 4, 5), Way(14, 6, True, False)),
        (SIX, (1, 2, 3, 999, 1, 3, 1, 4, 4, 5, 6, 7, 1, 4, 5, 117), Way(14, 6, True, True)),
        (((1,), (2, 3)), (1, 1), Way(1, 1, False, True)),
        (((1, 2), (1, 2)), (1, 2, 1, 2), Way(4, 2, True, False)),
        (((1, 2), (1, 2)), (1, 2, 1, 2, 1), Way(4, 2, True, True)),
        (((1, 2), (3, 4)), (1, 2, 3, 4, 5), Way(4, 2, True, True)),
        # beyond fairseq's tests: after an abandoned phrase, its tokens are read again
        (((1, 1, 2),), (1, 1, 1, 2), Way(3, 1, True, False)),
        (((1, 2, 3), (2, 4)), (1, 2, 4), Way(2, 1, False, False)),
        (((5,), (5, 6, 7), (6,)), (5, 6, 8, 5, 6, 7), Way(5, 3, True, False)),
        (((5,), (5,), (5, 6)), (5, 5, 6, 5), Way(4, 3, True, False)),
        (((5, 7), (5, 6)), (5, 6, 8, 5, 7), Way(4, 2, True, False)),
        (((5, 6), (5, 6, 7)), (5, 6, 7, 5, 6), Way(5, 2, True, False)),
        (((5, 6), (5, 6, 7)), (5, 6, 7), Way(3, 1, False, False)),
    ],
)
def test_progress_of_a_hypothesis(phrases: Phrases, tokens: tuple[int, ...], way: Way) -> None:
    assert followed(phrases, tokens) == read(phrases, tokens) == way


small = st.integers(2, 4)
crowded = st.lists(st.lists(small, min_size=1, max_size=4).map(tuple), min_size=1, max_size=5).map(tuple)


@settings(max_examples=300)
@given(crowded, st.lists(small, max_size=14).map(tuple))
def test_phrases_are_followed_by_the_rule(phrases: Phrases, tokens: tuple[int, ...]) -> None:
    way = followed(phrases, tokens)
    assert way == read(phrases, tokens)
    assert not way.finished or holds(tokens, phrases)


beginnings = st.lists(st.lists(st.integers(3, 4), max_size=2).map(lambda rest: (2, *rest)), min_size=1, max_size=4)


@settings(max_examples=300)
@given(beginnings.map(tuple), st.lists(st.integers(2, 4), max_size=14).map(tuple))
def test_every_reading_of_phrases_with_a_common_beginning_is_recognised(
    phrases: Phrases, tokens: tuple[int, ...]
) -> None:
    assert followed(phrases, tokens).finished == holds(tokens, phrases)


@pytest.mark.parametrize(
    "phrases", [((5, 6), (5, 7)), ((5, 7), (5, 6)), ((5,), (5, 6)), ((5, 6), (5,)), ((5, 6, 8), (5, 7))]
)
def test_the_unconstrained_output_is_found_if_it_has_all_phrases(phrases: Phrases) -> None:
    own = (5, 6, 8, 5, 7, EOS)

    def table(sentence: int, prefix: tuple[int, ...]) -> list[float]:
        odds = [1e-4] * 10
        if len(prefix) < 6 and prefix == own[: len(prefix)]:
            odds[own[len(prefix)]] = 1
        else:
            odds[EOS], odds[8] = 0.05, 0.5
        return [math.log(each / sum(odds)) for each in odds]

    wanted = SearchSettings(4, 1, BOS, EOS, (BOS,))
    ((found,),) = search(TableScorer(table, 10), [Sentence([0], 12, 0, (), phrases)], wanted)
    assert tuple(found.tokens) == own[:-1]
