"""Diverse beams against a plain loop over groups."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.translate.doubles import Prefix, TableScorer, random_log_probabilities
from tests.translate.plain import BOS, EOS, penalised
from ziggurat.translate.hypotheses import LengthPenalty
from ziggurat.translate.search import search
from ziggurat.translate.settings import RuleOptions, SearchSettings, Sentence

Found = list[tuple[list[int], float, bool]]


def plain(scorer: TableScorer, sentence: int, longest: int, wanted: SearchSettings) -> Found:
    """Search one sentence up to the limit, group by group at each step; penalties of tokens count only at that step."""
    size, kept = wanted.beam_size // wanted.groups, -(-wanted.n_best // wanted.groups)
    alive: list[list[tuple[float, Prefix]]] = [[(0.0, ())] for _ in range(wanted.groups)]
    finished: list[Found] = [[] for _ in range(wanted.groups)]
    before = list(alive)
    cut: list[list[tuple[float, Prefix]]] = [[] for _ in range(wanted.groups)]
    for step in range(longest + 1):
        taken: list[int] = []
        before = [beams or cut[g] for g, beams in enumerate(alive)]
        for group in range(wanted.groups):
            extensions = []
            for rank, (total, prefix) in enumerate(alive[group]):
                for token, p in enumerate(scorer.log_probabilities(sentence, prefix)):
                    if token != BOS:
                        cost = wanted.strength * taken.count(token)
                        extensions.append((-(total + p - cost), rank, token, total + p, prefix))
            extensions.sort(key=lambda e: e[:3])
            extensions = extensions[: 2 * size]
            for _, _, token, total, prefix in extensions:
                if token == EOS:
                    finished[group].append((list(prefix), penalised(wanted.penalty, total, step + 1, []), True))
            alive[group] = [(total, (*prefix, t)) for _, _, t, total, prefix in extensions if t != EOS][:size]
            taken += [prefix[-1] for _, prefix in alive[group]]
    results: Found = []
    for group, found in enumerate(finished):
        total, prefix = before[group][0]
        best_cut = (list(prefix), penalised(wanted.penalty, total, max(1, len(prefix)), []), False)
        results += sorted(found, key=lambda f: -f[1])[:kept] or [best_cut]
    return sorted(results, key=lambda f: (not f[2], -f[1]))[: wanted.n_best]


@pytest.mark.slow
@settings(max_examples=100)
@given(data=st.data())
def test_groups_find_what_a_plain_loop_finds(data: st.DataObject) -> None:
    groups, size = data.draw(st.integers(2, 3)), data.draw(st.integers(1, 2))
    wanted = SearchSettings(
        groups * size,
        data.draw(st.integers(1, groups * size)),
        BOS,
        EOS,
        (BOS,),
        penalty=data.draw(st.sampled_from([LengthPenalty(), LengthPenalty("gnmt", 0.8)])),
        groups=groups,
        strength=data.draw(st.sampled_from([0.0, 0.4, 3.0])),
        batch_sentences=data.draw(st.integers(1, 4)),
    )
    vocabulary = data.draw(st.integers(3, 6))
    scorer = TableScorer(random_log_probabilities(data.draw(st.integers(0, 999)), vocabulary, 1.0), vocabulary)
    limits = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    rows = search(scorer, [Sentence([i], longest) for i, longest in enumerate(limits)], wanted)
    for number, (found, longest) in enumerate(zip(rows, limits, strict=True)):
        expected = plain(scorer, number, longest, wanted)
        assert [(h.tokens, h.finished) for h in found] == [(tokens, finished) for tokens, _, finished in expected]
        assert [h.score for h in found] == pytest.approx([score for _, score, _ in expected], abs=1e-9)


def test_a_high_cost_makes_groups_differ_where_a_beam_search_does_not() -> None:
    def table(sentence: int, prefix: Prefix) -> list[float]:
        chances = [0.0, 0.01, 0.70, 0.20, 0.09] if not prefix else [0.0, 0.97, 0.01, 0.01, 0.01]
        return [math.log(p) if p else -math.inf for p in chances]

    def first(groups: int, strength: float) -> list[int]:
        wanted = SearchSettings(3, 3, BOS, EOS, (BOS,), groups=groups, strength=strength)
        (found,) = search(TableScorer(table, 5), [Sentence([0], 4)], wanted)
        return sorted(h.tokens[0] for h in found)

    assert first(3, 0.0) == [2, 2, 2]
    assert first(3, 5.0) == [2, 3, 4]


def test_a_group_that_is_given_up_has_no_result() -> None:
    """The second group has to start with a far less likely token, so all of it is pruned."""

    def table(sentence: int, prefix: Prefix) -> list[float]:
        return [math.log(p) for p in ((1e-9, 0.97, 0.02, 0.01) if prefix else (1e-9, 0.01, 0.98, 0.009))]

    for prune, groups in ((None, 2), (1.0, 1)):
        wanted = SearchSettings(2, 2, BOS, EOS, (BOS,), RuleOptions(prune=prune), groups=2, strength=9.0)
        (found,) = search(TableScorer(table, 4), [Sentence([0], 4)], wanted)
        assert len(found) == groups
        assert all(math.isfinite(h.score) for h in found)
