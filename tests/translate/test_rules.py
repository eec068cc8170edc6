"""Rules compared with Hugging Face's logits processors, and in a search with a plain loop."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.translate.doubles import TableScorer, random_log_probabilities
from tests.translate.plain import BOS, EOS, plain_search
from ziggurat.translate.rules import BannedPhrases, ban_repeated_ngrams, penalise_repetition
from ziggurat.translate.search import search
from ziggurat.translate.settings import RuleOptions, SearchSettings, Sentence

histories = st.lists(st.lists(st.integers(0, 4), min_size=0, max_size=9), min_size=1, max_size=4)


def tensors(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens so far [N, 1, T], their number [N], and log-probabilities [N, 1, 5]."""
    width = max(map(len, rows)) + 2
    held = torch.tensor([[row + [-1] * (width - len(row))] for row in rows])
    generator = torch.Generator().manual_seed(sum(map(sum, rows)))
    return held, torch.tensor(list(map(len, rows))), torch.randn(len(rows), 1, 5, generator=generator).log_softmax(-1)


@settings(max_examples=60)
@given(rows=histories, size=st.integers(1, 4), penalty=st.sampled_from([1.0, 1.3, 4.0]), data=st.data())
def test_the_rules_equal_hugging_faces(rows: list[list[int]], size: int, penalty: float, data: st.DataObject) -> None:
    processors = pytest.importorskip("transformers.generation.logits_process")
    phrases = data.draw(st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=3), min_size=1, max_size=3))
    held, position, scores = tensors(rows)
    repeated, ngrams, banned = scores.clone(), scores.clone(), scores.clone()
    penalise_repetition(repeated, held, penalty)
    ban_repeated_ngrams(ngrams, held, position, size)
    BannedPhrases(phrases, "cpu").ban(banned, held, position)
    for number, row in enumerate(rows):
        ids, given_scores = torch.tensor([row], dtype=torch.int64), scores[number]
        theirs = processors.RepetitionPenaltyLogitsProcessor(penalty)(ids, given_scores.clone())
        torch.testing.assert_close(repeated[number], theirs)
        assert torch.equal(ngrams[number], processors.NoRepeatNGramLogitsProcessor(size)(ids, given_scores.clone()))
        bad = processors.NoBadWordsLogitsProcessor(phrases, eos_token_id=99)
        assert torch.equal(banned[number], bad(ids, given_scores.clone()))


limits = st.builds(
    RuleOptions,
    banned=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
    no_repeat_ngram_size=st.integers(0, 3),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    eos_margin=st.sampled_from([None, 0.0, 0.7, 2.0]),
    prune=st.sampled_from([None, 0.5, 3.0]),
)


@settings(max_examples=100)
@given(data=st.data(), rules=limits)
def test_a_search_with_rules_finds_what_a_plain_loop_finds(data: st.DataObject, rules: RuleOptions) -> None:
    beam_size = data.draw(st.integers(1, 4))
    wanted = SearchSettings(
        beam_size,
        data.draw(st.integers(1, beam_size)),
        BOS,
        EOS,
        (BOS,),
        rules,
        endings=data.draw(st.sampled_from(["candidates", "beam"])),
        batch_tokens=data.draw(st.integers(1, 6)),
    )
    table = random_log_probabilities(data.draw(st.integers(0, 999)), 5, data.draw(st.sampled_from([0.3, 2.0])))
    rows = data.draw(
        st.lists(
            st.tuples(st.integers(2, 6), st.integers(0, 2), st.lists(st.integers(2, 4), max_size=2).map(tuple)),
            min_size=1,
            max_size=5,
        )
    )
    sentences = [Sentence([i], longest, least, forced) for i, (longest, least, forced) in enumerate(rows)]
    scorer = TableScorer(table, 5)
    for number, (found, (longest, least, forced)) in enumerate(
        zip(search(scorer, sentences, wanted), rows, strict=True)
    ):
        plain = plain_search(scorer, number, 1, longest, wanted, least, forced)
        assert [h.tokens for h in found] == [h.tokens for h in plain]
        assert [h.score for h in found] == pytest.approx([h.score for h in plain], abs=1e-9)
        for h in found:  # whatever the rules did to the order, the log-probability is the model's
            path = [*h.tokens, *([EOS] if h.finished else [])]
            given_by_model = [table(number, tuple(path[:i]))[token] for i, token in enumerate(path)]
            assert h.token_log_probabilities == pytest.approx(given_by_model, abs=1e-9)
            assert h.log_probability == pytest.approx(math.fsum(given_by_model), abs=1e-9)
            assert tuple(h.tokens[: len(forced)]) == forced[: len(h.tokens)]


def test_a_prefix_wins_over_every_other_rule() -> None:
    rules = RuleOptions(banned=((2,), (3, 3)), no_repeat_ngram_size=1, repetition_penalty=2.0)
    wanted = SearchSettings(2, 1, BOS, EOS, (BOS, 4), rules)
    table = random_log_probabilities(1, 6, 1.0)
    forced = (2, 3, 3, 4, 2)
    (found,) = search(TableScorer(table, 6), [Sentence([0], 8, 0, forced)], wanted)
    assert tuple(found[0].tokens[:5]) == forced
    assert not {2, 3, 4} & set(found[0].tokens[5:])
