"""Search compared with brute force and with a plain loop over dictionaries and Python floats."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.translate.doubles import Prefix, TableScorer, random_log_probabilities
from tests.translate.plain import BOS, EOS, Plain, fairseq_search, marian_search, penalised, plain_search
from ziggurat.system.errors import ConfigError
from ziggurat.translate.hypotheses import IdHypothesis, LengthPenalty, best_tokens
from ziggurat.translate.search import NonFiniteScoreError, search
from ziggurat.translate.settings import RuleOptions, SearchSettings, Sentence


def run(
    scorer: TableScorer,
    max_lengths: list[int],
    wanted: SearchSettings,
    source_lengths: list[int] | None = None,
    min_length: int = 0,
) -> list[list[IdHypothesis]]:
    lengths = source_lengths or [1] * len(max_lengths)
    sentences = [
        Sentence([number] + [0] * (length - 1), longest, min_length)
        for number, (longest, length) in enumerate(zip(max_lengths, lengths, strict=True))
    ]
    return search(scorer, sentences, wanted)


def assert_same(found: list[IdHypothesis], wanted: list[Plain]) -> None:
    assert [h.tokens for h in found] == [h.tokens for h in wanted]
    assert [h.finished for h in found] == [h.finished for h in wanted]
    assert [h.score for h in found] == pytest.approx([h.score for h in wanted], abs=1e-9)
    assert [h.log_probability for h in found] == pytest.approx([h.log_probability for h in wanted], abs=1e-9)
    for h in found:
        assert sum(h.token_log_probabilities) == pytest.approx(h.log_probability, abs=1e-9)
        assert len(h.token_log_probabilities) == len(h.tokens) + h.finished


penalties = st.one_of(
    st.builds(LengthPenalty, st.sampled_from(["none", "power", "gnmt", "lingvo"]), st.sampled_from([0.0, 0.6, 1.5])),
    st.builds(LengthPenalty, st.just("lingvo"), st.sampled_from([0.2, 1.0]), st.sampled_from([0.1, 0.4]), st.just(1.3)),
    st.builds(LengthPenalty, st.just("power"), st.sampled_from([0.0, 1.0]), word=st.sampled_from([-3.0, -0.2, 0.4])),
)


@settings(max_examples=60)
@given(data=st.data(), penalty=penalties)
def test_same_n_best_as_a_plain_loop_whatever_the_batch(data: st.DataObject, penalty: LengthPenalty) -> None:
    vocabulary = data.draw(st.integers(3, 7))
    beam_size = data.draw(st.integers(1, 5))
    wanted = SearchSettings(
        beam_size=beam_size,
        n_best=data.draw(st.integers(1, beam_size)),
        bos=BOS,
        eos=EOS,
        forbidden=data.draw(st.sampled_from([(BOS,), (BOS, vocabulary - 1), ()])),
        penalty=penalty,
        batch_tokens=data.draw(st.integers(1, 12)),
        batch_sentences=data.draw(st.integers(1, 6)),
    )
    min_length = data.draw(st.integers(0, 3))
    table = random_log_probabilities(
        data.draw(st.integers(0, 999)), vocabulary, data.draw(st.sampled_from([0.3, 2, 6]))
    )
    max_lengths = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=8))
    source_lengths = data.draw(st.lists(st.integers(1, 4), min_size=len(max_lengths), max_size=len(max_lengths)))
    scorer = TableScorer(table, vocabulary, attention_seed=3 if penalty.coverage else None)
    found = run(scorer, max_lengths, wanted, source_lengths, min_length)
    for sentence, (longest, length) in enumerate(zip(max_lengths, source_lengths, strict=True)):
        assert_same(found[sentence], plain_search(scorer, sentence, length, longest, wanted, min_length))


@pytest.mark.parametrize("kind", ["none", "power", "gnmt", "lingvo"])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.4])
@pytest.mark.parametrize("seed", range(3))
def test_a_beam_of_all_sequences_finds_the_best_of_all(kind: str, alpha: float, seed: int) -> None:
    vocabulary, longest = 5, 3
    table = random_log_probabilities(seed, vocabulary, 1.0)
    penalty = LengthPenalty(kind, alpha)  # type: ignore[arg-type]
    every = []
    for length in range(longest + 1):
        for words in itertools.product([2, 3, 4], repeat=length):
            path = (*words, EOS)
            total = sum(table(0, path[:i])[token] for i, token in enumerate(path))
            every.append((penalised(penalty, total, len(path), []), list(words)))
    every.sort(key=lambda e: -e[0])
    wanted = SearchSettings(64, 10, BOS, EOS, forbidden=(BOS,), penalty=penalty)
    found = run(TableScorer(table, vocabulary), [longest], wanted)[0]
    assert [h.tokens for h in found] == [words for _, words in every[:10]]
    assert [h.score for h in found] == pytest.approx([score for score, _ in every[:10]], abs=1e-12)


def test_greedy_search_takes_the_likeliest_token_at_every_step() -> None:
    table = random_log_probabilities(5, 9, 2.0)
    found = run(TableScorer(table, 9), [30] * 6, SearchSettings(1, 1, BOS, EOS))
    for sentence, (hypothesis,) in enumerate(found):
        prefix: Prefix = ()
        while len(prefix) < 30 and (token := max(range(9), key=lambda t: table(sentence, prefix)[t])) != EOS:
            prefix += (token,)
        assert hypothesis.tokens == list(prefix)


def crossing(sentence: int, prefix: Prefix) -> list[float]:
    """Token 2 looks better than token 3 at first, but everything goes wrong after 2, and well after 3."""
    if prefix == ():
        probabilities = [0.0, 0.01, 0.55, 0.44]
    elif prefix[0] == 2:
        probabilities = [0.0, 0.30, 0.35, 0.35]
    else:
        probabilities = [0.0, 0.01, 0.98, 0.01] if len(prefix) < 3 else [0.0, 0.97, 0.02, 0.01]
    return [math.log(p) if p else -math.inf for p in probabilities]


def test_beams_that_overtake_each_other_keep_their_state() -> None:
    found = run(TableScorer(crossing, 4), [5], SearchSettings(2, 1, BOS, EOS, forbidden=(BOS,)))[0][0]
    assert found.tokens == [3, 2, 2]
    assert math.exp(found.log_probability) == pytest.approx(0.44 * 0.98 * 0.98 * 0.97)


def test_without_reordering_the_result_differs() -> None:
    """The test above would show nothing if the order of beams did not matter."""

    class Forgetful(TableScorer):
        def follow(self, parents: torch.Tensor) -> None:
            pass

    found = run(Forgetful(crossing, 4), [5], SearchSettings(2, 1, BOS, EOS, forbidden=(BOS,)))[0][0]
    assert math.exp(found.log_probability) != pytest.approx(0.44 * 0.98 * 0.98 * 0.97)


def ends_after(lengths: list[int]) -> TableScorer:
    """Sentence i surely ends after lengths[i] tokens 2."""

    def table(sentence: int, prefix: Prefix) -> list[float]:
        ends = len(prefix) == lengths[sentence]
        return [math.log(p) for p in ([1e-4, 0.9997, 1e-4, 1e-4] if ends else [1e-4, 1e-4, 0.9997, 1e-4])]

    return TableScorer(table, 4)


@pytest.mark.parametrize("beam_size", [1, 2, 4])
def test_settled_sentences_leave_the_batch_and_the_search_stops_early(beam_size: int) -> None:
    scorer = ends_after([2, 6, 4])
    found = run(scorer, [50, 50, 50], SearchSettings(beam_size, 1, BOS, EOS, (BOS,), penalty=LengthPenalty("none")))
    assert [len(h[0].tokens) for h in found] == [2, 6, 4]
    assert scorer.batch_sizes == [3, 3, 3, 2, 2, 1, 1]


def test_hypotheses_that_never_end_are_cut_and_marked() -> None:
    def never(sentence: int, prefix: Prefix) -> list[float]:
        return [math.log(0.1), -math.inf, math.log(0.6), math.log(0.3)]

    found = run(
        TableScorer(never, 4), [3, 0], SearchSettings(2, 2, BOS, EOS, (BOS,), penalty=LengthPenalty("power", 1))
    )
    (cut,), (empty,) = found
    assert (cut.tokens, cut.finished) == ([2, 2, 2], False)
    assert cut.log_probability == pytest.approx(3 * math.log(0.6))
    assert cut.score == pytest.approx(math.log(0.6))
    assert (empty.tokens, empty.finished, empty.log_probability) == ([], False, 0.0)


def test_a_full_length_hypothesis_may_still_end() -> None:
    found = run(ends_after([3]), [3], SearchSettings(2, 1, BOS, EOS, (BOS,)))[0][0]
    assert (found.tokens, found.finished) == ([2, 2, 2], True)


def test_forbidden_tokens_never_occur_and_probabilities_are_not_redistributed() -> None:
    def likes_forbidden(sentence: int, prefix: Prefix) -> list[float]:
        return [math.log(p) for p in (0.9, 0.05, 0.03, 0.02)]

    found = run(TableScorer(likes_forbidden, 4), [4], SearchSettings(4, 4, BOS, EOS, forbidden=(BOS, 3)))[0]
    assert all(set(h.tokens) <= {2} for h in found)
    assert found[0].log_probability == pytest.approx(math.log(0.05))


def test_min_length_holds_back_the_end() -> None:
    def ends(sentence: int, prefix: Prefix) -> list[float]:
        return [math.log(p) for p in (0.01, 0.97, 0.01, 0.01)]

    for shortest in range(4):
        found = run(TableScorer(ends, 4), [6, 2], SearchSettings(2, 1, BOS, EOS, (BOS,)), None, shortest)
        assert [len(h[0].tokens) for h in found] == [shortest, min(shortest, 2)]  # the limit of 2 takes precedence


def test_equal_scores_go_to_the_smaller_id_and_the_better_parent() -> None:
    def flat(sentence: int, prefix: Prefix) -> list[float]:
        return [0.0] * 6

    # Of the last step's 6 extensions, the best parent supplies 5 (one of them the end), and the second best the last.
    found = run(TableScorer(flat, 6), [2] * 3, SearchSettings(3, 3, BOS, EOS, (BOS,)), None, 2)
    assert [[h.tokens for h in row] for row in found] == [[[2, 2], [2, 3]]] * 3


@settings(max_examples=100)
@given(
    rows=st.integers(2, 12).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 4), min_size=n, max_size=n), min_size=1, max_size=4)
    ),
    data=st.data(),
)
def test_best_tokens_is_a_stable_sort_cut_short(rows: list[list[int]], data: st.DataObject) -> None:
    scores = torch.tensor(rows, dtype=torch.float32)
    count = data.draw(st.integers(1, scores.shape[1]))
    wanted = scores.sort(dim=-1, descending=True, stable=True)
    values, ids = best_tokens(scores, count)
    assert torch.equal(values, wanted.values[:, :count])
    assert torch.equal(ids, wanted.indices[:, :count])


@pytest.mark.parametrize("vocabulary", [640, 1300, 4096 + 63])
@pytest.mark.parametrize("different", [3, 50, 1_000_000])
def test_best_tokens_of_large_vocabularies_with_few_different_values(vocabulary: int, different: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    scores = torch.randint(different, (3, 2, vocabulary), generator=generator).float()
    scores[0, 0] = -torch.inf
    scores[0, 0, [5, vocabulary - 1]] = 1.0  # fewer exist than are requested
    scores[1, 1, -1] = 2e6  # in the remainder after the blocks
    for count in (1, 2, 8):
        wanted = scores.sort(dim=-1, descending=True, stable=True)
        values, ids = best_tokens(scores, count)
        assert torch.equal(values, wanted.values[..., :count])
        exist = values > -torch.inf
        assert torch.equal(ids[exist], wanted.indices[..., :count][exist])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("beam_size", [1, 3])
def test_non_finite_scores_are_a_clear_error(bad: float, beam_size: int) -> None:
    def broken(sentence: int, prefix: Prefix) -> list[float]:
        return [0.0, -9.0, 1.0, bad if sentence == 1 and len(prefix) == 2 else 0.5]

    with pytest.raises(NonFiniteScoreError, match=r"token 3 are not finite"):
        run(TableScorer(broken, 4), [5, 5], SearchSettings(beam_size, 1, BOS, EOS, (BOS,)))


def test_coverage_without_attention_is_refused() -> None:
    wanted = SearchSettings(2, 1, BOS, EOS, penalty=LengthPenalty("lingvo", 0.5, 0.2))
    with pytest.raises(ConfigError, match=r"coverage.*need attention"):
        run(ends_after([2]), [4], wanted)


def test_half_precision_scores_are_summed_in_single_precision() -> None:
    table = random_log_probabilities(1, 6, 1.0)
    scorer = TableScorer(table, 6, dtype=torch.bfloat16)
    found = run(scorer, [20], SearchSettings(2, 1, BOS, EOS, (BOS,)), None, 20)[0][0]
    logits = [torch.tensor(table(0, tuple(found.tokens[:i]))).bfloat16().double() for i in range(21)]
    path = [*found.tokens, EOS][: len(found.token_log_probabilities)]
    exact = [row.log_softmax(0)[token].item() for row, token in zip(logits, path, strict=False)]
    assert found.token_log_probabilities == pytest.approx(exact, abs=1e-6)
    assert found.log_probability == pytest.approx(sum(exact), abs=1e-5)


def test_endings_are_counted_among_all_candidates_or_only_the_beams() -> None:
    """With two beams, and end-of-sentence third at the first step, a hypothesis ends unless only beams may end one."""
    tokens = [t for t in range(5) if t not in (BOS, EOS)]

    def table(sentence: int, prefix: Prefix) -> list[float]:
        chances = {EOS: 0.25, tokens[0]: 0.4, tokens[1]: 0.3} if not prefix else {EOS: 0.5, tokens[0]: 0.3}
        rest = (1 - sum(chances.values())) / (5 - len(chances))
        return [math.log(chances.get(token, rest)) for token in range(5)]

    scores = {}
    for endings in ("candidates", "beam"):
        wanted = SearchSettings(2, 1, BOS, EOS, penalty=LengthPenalty("none"), endings=endings)
        (best,) = run(TableScorer(table, 5), [4], wanted)[0]
        scores[endings] = (best.tokens, best.log_probability)
    assert scores["candidates"] == ([], pytest.approx(math.log(0.25)))
    assert scores["beam"] == ([tokens[0]], pytest.approx(math.log(0.4 * 0.5)))


@settings(max_examples=60)
@given(data=st.data(), kind=st.sampled_from(["none", "power", "gnmt"]), alpha=st.sampled_from([0.6, 1.0, 1.5]))
def test_fairseqs_rule_against_a_plain_loop_of_it(data: st.DataObject, kind: str, alpha: float) -> None:
    beam_size = data.draw(st.integers(1, 5))
    vocabulary = data.draw(st.integers(2 * beam_size + 2, 14))  # fairseq takes 2 K candidates from the first step on
    wanted = SearchSettings(
        beam_size=beam_size,
        n_best=data.draw(st.integers(1, beam_size)),
        bos=BOS,
        eos=EOS,
        forbidden=(BOS,),
        penalty=LengthPenalty(kind, alpha),  # type: ignore[arg-type]
        endings="fairseq",
        rules=RuleOptions(prune=data.draw(st.sampled_from([None, 0.5, 3.0]))),
        batch_sentences=data.draw(st.integers(1, 6)),
    )
    table = random_log_probabilities(
        data.draw(st.integers(0, 999)), vocabulary, data.draw(st.sampled_from([0.3, 2, 6]))
    )
    scorer = TableScorer(table, vocabulary)
    min_length = data.draw(st.integers(0, 3))
    max_lengths = data.draw(st.lists(st.integers(min_length, 7), min_size=1, max_size=6))
    found = run(scorer, max_lengths, wanted, min_length=min_length)
    for sentence, longest in enumerate(max_lengths):
        assert_same(found[sentence], fairseq_search(scorer, sentence, longest, wanted, min_length))
        assert [h.forced for h in found[sentence]] == [len(h.tokens) == longest for h in found[sentence]]


@settings(max_examples=60)
@given(data=st.data(), alpha=st.sampled_from([0.0, 0.6, 1.0]), word=st.sampled_from([0.0, 0.5, -1.0]))
def test_marians_rule_against_a_plain_loop_of_it(data: st.DataObject, alpha: float, word: float) -> None:
    beam_size = data.draw(st.integers(1, 5))
    vocabulary = data.draw(st.integers(beam_size + 2, 14))
    wanted = SearchSettings(
        beam_size=beam_size,
        n_best=data.draw(st.integers(1, beam_size)),
        bos=BOS,
        eos=EOS,
        forbidden=(BOS,),
        penalty=LengthPenalty("power", alpha, word=word),
        endings="marian",
        batch_sentences=data.draw(st.integers(1, 6)),
    )
    table = random_log_probabilities(
        data.draw(st.integers(0, 999)), vocabulary, data.draw(st.sampled_from([0.3, 2, 6]))
    )
    scorer = TableScorer(table, vocabulary)
    max_lengths = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=6))
    found = run(scorer, max_lengths, wanted)
    for sentence, longest in enumerate(max_lengths):
        assert_same(found[sentence], marian_search(scorer, sentence, longest, wanted))


@pytest.mark.parametrize("endings", ["beam", "fairseq"])
def test_an_uncounted_end_prunes_nothing(endings: Any) -> None:
    """End-of-sentence is third among the first step's candidates; all continuations are far below it for a while."""

    def table(sentence: int, prefix: Prefix) -> list[float]:
        chances = (1e-9, 0.2, 0.45, 0.35) if not prefix else (0.3, 0.2, 0.25, 0.25) if len(prefix) < 6 else (0, 1, 0, 0)
        return [math.log(chance) if chance else -math.inf for chance in chances]

    wanted = SearchSettings(2, 1, BOS, EOS, (), rules=RuleOptions(prune=2.0), endings=endings)
    ((found,),) = run(TableScorer(table, 4), [9], wanted)
    assert found.finished
    assert len(found.tokens) == 6


def test_the_rules_of_ending_differ_widely_on_a_model_that_is_not_trained() -> None:
    """The test above would show nothing if all rules found the same: here at most 7 of 20 sentences agree."""
    table = random_log_probabilities(11, 12, 0.8)
    found = {}
    for endings in ("candidates", "beam", "fairseq"):
        wanted = SearchSettings(2, 1, BOS, EOS, (BOS,), penalty=LengthPenalty("power", 1.4), endings=endings)
        found[endings] = [h[0].tokens for h in run(TableScorer(table, 12), [25] * 20, wanted)]
    for one, other in itertools.combinations(found.values(), 2):
        assert sum(a == b for a, b in zip(one, other, strict=True)) <= 7


def test_fairseqs_rule_ends_at_the_limit_whatever_other_rules_say() -> None:
    """End-of-sentence is the least likely token everywhere, and ruled out by its margin."""

    def never(sentence: int, prefix: Prefix) -> list[float]:
        return [math.log(p) for p in (0.1, 0.01, 0.59, 0.3)]

    limits = RuleOptions(eos_margin=0.5)
    for beam_size in (1, 2):
        wanted = SearchSettings(beam_size, 1, BOS, EOS, (BOS,), rules=limits, endings="fairseq")
        (best,), (empty,) = run(TableScorer(never, 4), [3, 0], wanted)
        assert (best.tokens, best.finished, best.forced) == ([2, 2, 2], True, True)
        assert best.token_log_probabilities == pytest.approx([math.log(0.59)] * 3 + [math.log(0.01)])
        assert (empty.tokens, empty.log_probability) == ([], pytest.approx(math.log(0.01)))


def test_fairseqs_rule_stops_at_k_ended_hypotheses_and_rejects_the_next() -> None:
    """Two beams: the empty output ends first; then both beams end in one step, with room for only one of them."""

    def table(sentence: int, prefix: Prefix) -> list[float]:
        return [math.log(p) for p in ((0.04, 0.9, 0.03, 0.03) if prefix else (1e-9, 0.3, 0.5, 0.2))]

    penalty = LengthPenalty("power", 2.0)  # by score, the rejected output would be the second best
    wanted = SearchSettings(2, 2, BOS, EOS, (BOS,), penalty=penalty, endings="fairseq")
    scorer = TableScorer(table, 4)
    (found,) = run(scorer, [9], wanted)
    assert [h.tokens for h in found] == [[2], []]
    assert scorer.batch_sizes == [1, 1]
