"""Forced scoring, and the search on a real model: its scores equal those of forced scoring, token by token."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from ziggurat.data.subword import SentencePieceTokenizer
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.translate.hypotheses import IdHypothesis, LengthPenalty
from ziggurat.translate.scorers import ModelScorer, force_score, length_batches
from ziggurat.translate.search import search
from ziggurat.translate.settings import SearchSettings, Sentence

SOURCES = [[20, 21, 22], [30], [25, 60, 70, 80, 90, 100, 31], [40, 41]]


def found_by(
    model: Seq2Seq, sources: list[list[int]], wanted: SearchSettings, min_length: int = 0
) -> list[list[IdHypothesis]]:
    sentences = [Sentence([*s, wanted.eos], len(s) + 6, min_length) for s in sources]
    return search(ModelScorer(model), sentences, wanted)


def forced(
    model: Seq2Seq, sources: list[list[int]], targets: list[list[int]], tokenizer: SentencePieceTokenizer, tokens: int
) -> list[list[float]]:
    ended = [[*source, tokenizer.eos] for source in sources]
    return force_score(
        model, ended, targets, bos=tokenizer.bos, eos=tokenizer.eos, pad=tokenizer.pad, batch_tokens=tokens
    )


@pytest.mark.parametrize("beam_size", [1, 2, 5])
@pytest.mark.parametrize("penalty", [LengthPenalty("power", 0.6), LengthPenalty("lingvo", 0.5, 0.2)])
def test_search_scores_are_forced_scores_token_by_token(
    tiny_model: Seq2Seq, tokenizer: SentencePieceTokenizer, beam_size: int, penalty: LengthPenalty
) -> None:
    wanted = SearchSettings(beam_size, beam_size, tokenizer.bos, tokenizer.eos, (0, 2), penalty=penalty)
    found = found_by(tiny_model, SOURCES, wanted, 4)
    assert len({tuple(h.tokens) for row in found for h in row}) >= 4  # otherwise the test would show nothing
    for source, row in zip(SOURCES, found, strict=True):
        scores = forced(tiny_model, [source] * len(row), [h.tokens for h in row], tokenizer, 4096)
        for hypothesis, score in zip(row, scores, strict=True):
            steps = len(hypothesis.token_log_probabilities)
            assert hypothesis.token_log_probabilities == pytest.approx(score[:steps], abs=1e-10)
            if hypothesis.finished:
                assert hypothesis.log_probability == pytest.approx(math.fsum(score), abs=1e-10)


@pytest.mark.slow
def test_search_does_not_depend_on_the_batch(tiny_model: Seq2Seq, tokenizer: SentencePieceTokenizer) -> None:
    wanted = SearchSettings(4, 4, tokenizer.bos, tokenizer.eos, (0, 2), penalty=LengthPenalty("lingvo", 0.5, 0.2))
    sources = [*SOURCES, *([50 + i] * (1 + i % 5) for i in range(8))]
    together = found_by(tiny_model, sources, wanted, 4)
    reverse = found_by(tiny_model, sources[::-1], wanted, 4)[::-1]
    alone = [found_by(tiny_model, [s], wanted, 4)[0] for s in sources]
    few = [found_by(tiny_model, sources, replace(wanted, batch_sentences=n), 4) for n in (2, 5)]
    for row, *others in zip(together, reverse, alone, *few, strict=True):
        for other in others:
            assert [h.tokens for h in row] == [h.tokens for h in other]
            assert [h.score for h in row] == pytest.approx([h.score for h in other], abs=1e-10)


def test_forced_scores_against_one_sentence_at_a_time(tiny_model: Seq2Seq, tokenizer: SentencePieceTokenizer) -> None:
    targets = [[50, 51, 52, 53], [], [60], [61, 62]]
    for batch_tokens in (1, 16, 4096):
        scores = forced(tiny_model, SOURCES, targets, tokenizer, batch_tokens)
        for source, target, score in zip(SOURCES, targets, scores, strict=True):
            ids = torch.tensor([[*source, tokenizer.eos]])
            memory = tiny_model.encode(ids, torch.ones_like(ids, dtype=torch.bool))
            logits = tiny_model.logits(tiny_model.decode(torch.tensor([[tokenizer.bos, *target]]), memory))[0]
            exact = logits.log_softmax(-1).gather(1, torch.tensor([[t] for t in [*target, tokenizer.eos]]))[:, 0]
            assert score == pytest.approx(exact.tolist(), abs=1e-10)


def test_logits_exist_for_a_bounded_number_of_tokens(tiny_model: Seq2Seq, tokenizer: SentencePieceTokenizer) -> None:
    rows: list[int] = []
    hook = tiny_model.output.register_forward_hook(lambda module, args, output: rows.append(output.shape[0]))
    try:
        scores = forced(tiny_model, [[20]] * 30, [[50] * 99] * 30, tokenizer, 10_000)
    finally:
        hook.remove()
    assert sum(rows) == 3000
    assert max(rows) <= 1024
    assert all(len(s) == 100 for s in scores)


def test_unpaired_targets_are_refused(tiny_model: Seq2Seq, tokenizer: SentencePieceTokenizer) -> None:
    with pytest.raises(ValueError, match="2 sources, but 1 targets"):
        forced(tiny_model, [[20], [21]], [[50]], tokenizer, 100)
    assert forced(tiny_model, [], [], tokenizer, 100) == []


def test_batches_hold_every_index_once_within_the_budget() -> None:
    lengths = [3, 9, 1, 50, 9, 2, 30, 4]
    batches = list(length_batches(lengths, 30))
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert batches[0] == [3]  # too long for any batch: alone and first
    for batch in batches[1:]:
        assert len(batch) * max(lengths[i] for i in batch) <= 30
    assert list(length_batches([], 30)) == []
    assert [len(batch) for batch in length_batches([10] * 6, 29)] == [2, 2, 2]
    assert [len(batch) for batch in length_batches([10] * 6, 30)] == [3, 3]
