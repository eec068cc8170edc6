"""Beam search over a scorer. It knows token ids and states, nothing of text, models or files.

Each step extends every alive hypothesis, takes the 2K best extensions of a sentence by log-probability (at
most K of them end, so K alive ones remain) and moves those that end to the sentence's finished ones, ranked
by penalised score. The best n of a sentence are settled when no alive hypothesis can still beat the n-th: its
log-probability over the penalty at the greatest length is a bound, so stopping early changes nothing (unlike
stopping at the first K finished). Settled sentences leave the batch. A beam of 1 keeps one extension: greedy
search.

Equal scores rank by age, then by the parent's rank, then by token id, on every device.

Shapes: B sentences still searched, K beam, N results per sentence, S source, T steps, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from ziggurat.decoding.hypotheses import NEVER, Hypotheses, IdHypothesis, best_tokens
from ziggurat.decoding.length import LengthPenalty
from ziggurat.errors import ConfigError, ZigguratError

__all__ = ["NonFiniteScoreError", "Scorer", "SearchSettings", "beam_search"]


class NonFiniteScoreError(ZigguratError):
    """The model gave NaN (or no finite score at all) for the next token: its weights or its input are broken."""


class Scorer(Protocol):
    """What the search asks of a model, or of several: scores of every next token, and to follow the beams."""

    @property
    def vocabulary_size(self) -> int:
        """Number V of tokens that get a score."""

    @property
    def attention(self) -> Tensor | None:
        """Attention weights [B, K, S] of the last step, for the coverage term; None when not offered."""

    def start(self, source: Tensor, source_mask: Tensor, beam_size: int) -> None:
        """Read source ids [B, S] (mask: True for real tokens) and get ready for steps of K = `beam_size` beams."""

    def step(self, tokens: Tensor) -> Tensor:
        """Take the last tokens [B, K]; return scores [B, K, V] whose softmax gives the next token.

        Log-probabilities are such scores (the softmax keeps them), logits are cheaper.
        """

    def reorder(self, sentences: Tensor, parents: Tensor) -> None:
        """Keep only `sentences` [B'] of the batch; beam k of new row i continues old beam `parents`[i, k]."""


@dataclass(frozen=True)
class SearchSettings:
    """What a search needs besides the sentences; `n_best` must not be larger than `beam_size`."""

    beam_size: int
    n_best: int
    bos: int
    """First token of the decoder's input."""
    eos: int
    """Ends a hypothesis."""
    forbidden: tuple[int, ...] = ()
    """Ids that are never generated: padding, begin-of-sentence, tags."""
    min_length: int = 0
    """Fewest tokens before end-of-sentence; a smaller limit of a sentence wins."""
    penalty: LengthPenalty = field(default_factory=LengthPenalty)
    endings: Literal["candidates", "beam"] = "candidates"
    """Which of the 2K best extensions may end a hypothesis: all, or the K best."""
    before_step: Callable[[], None] = lambda: None
    """Called before every step; what it raises ends the search."""


@torch.inference_mode()
def beam_search(
    scorer: Scorer, source: Tensor, source_mask: Tensor, max_lengths: Tensor, settings: SearchSettings
) -> list[list[IdHypothesis]]:
    """Return up to `settings.n_best` results per sentence, best first and at least one.

    source: [B, S] ids; source_mask: [B, S], True for real tokens; max_lengths: [B], the most tokens a result
    may have, end-of-sentence not counted. Results do not depend on which sentences share a batch, up to the
    scorer's own rounding. Raises NonFiniteScoreError, and ConfigError for a coverage penalty without the scorer's
    attention.
    """
    longest = int(max_lengths.max())
    scorer.start(source, source_mask, settings.beam_size)
    tokens = torch.full((len(source), settings.beam_size), settings.bos, device=source.device)
    search: _Search | None = None
    for step in range(longest + 1):
        settings.before_step()
        scores = scorer.step(tokens)
        # Not the two-pass "best 2K, then log-sum-exp": log_softmax is one fused pass and measured faster on
        # CPU.
        wide = torch.float32 if scores.dtype in (torch.bfloat16, torch.float16) else scores.dtype
        log_probabilities = scores.log_softmax(-1, dtype=wide)
        if search is None:
            search = _Search(log_probabilities, source_mask, max_lengths, settings)
        parents, keep = search.advance(step, log_probabilities, scorer.attention)
        if keep is not None and not len(keep):
            break
        if keep is not None:
            scorer.reorder(keep, parents)
        elif settings.beam_size > 1:
            scorer.reorder(torch.arange(len(parents), device=parents.device), parents)
        tokens = search.alive.tokens[..., step]
    assert search is not None
    return search.results(len(source))


class _Search:
    """The state of one search, as tensors whose first dimension is the sentences not yet settled."""

    def __init__(self, like: Tensor, source_mask: Tensor, max_lengths: Tensor, settings: SearchSettings) -> None:
        sentences, steps = len(source_mask), int(max_lengths.max()) + 1
        self.settings = settings
        self.rows = torch.arange(sentences, device=like.device)
        self.max_lengths = max_lengths.to(like.device)
        self.min_lengths = self.max_lengths.clamp(max=settings.min_length)
        self.source_mask = source_mask
        self.forbidden = torch.tensor(settings.forbidden, dtype=torch.int64, device=like.device)
        # All beams start from one token: only the first is alive, or each hypothesis would appear K times.
        self.alive = Hypotheses.none(sentences, settings.beam_size, steps, like)
        self.alive.log_probability[:, 0] = 0.0
        self.finished = Hypotheses.none(sentences, settings.n_best, steps, like)
        self.attended = like.new_zeros(sentences, settings.beam_size, source_mask.shape[1])
        self.settled: list[tuple[Tensor, Hypotheses, Tensor]] = []

    def advance(self, step: int, log_probabilities: Tensor, attention: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Extend all hypotheses by one token; log_probabilities [B, K, V] is overwritten.

        Returns the parents [B', K] of the alive beams and the sentences [B'] that go on (None: all of them).
        """
        broken = log_probabilities[..., 0].isnan().any()  # NaN anywhere makes a whole log-softmax row NaN
        before = self.alive
        coverage = self._coverage(attention)
        candidates, parents = self._extend(step, self._allowed(step, log_probabilities))
        ends = candidates.tokens[..., step] == self.settings.eos
        counted = ends.clone()
        if self.settings.endings == "beam":
            counted[:, self.settings.beam_size :] = False
        divisor = self.settings.penalty.divisor(candidates.log_probability.new_tensor(step + 1.0))
        score = candidates.log_probability / divisor
        if coverage is not None:
            score = score + coverage.gather(1, parents)
        ended = candidates._replace(score=score.masked_fill(~counted, NEVER))
        self.finished = self.finished.beside(ended).ranked(self.settings.n_best)

        going = candidates.log_probability.masked_fill(ends, NEVER)
        chosen = going.sort(dim=1, descending=True, stable=True).indices[:, : self.settings.beam_size]
        self.alive = candidates._replace(log_probability=going).pick(chosen)
        parents = parents.gather(1, chosen)
        if coverage is not None:
            self.attended = self.attended.gather(1, parents[..., None].expand(-1, -1, self.attended.shape[2]))

        done = self._done(step)
        any_done, any_broken = torch.stack((done.any(), broken)).tolist()
        if any_broken:
            raise NonFiniteScoreError(
                f"the model's scores for token {step + 1} are not finite (NaN or infinity); the checkpoint may "
                "be from a diverged run: try an earlier one, or full precision"
            )
        if not any_done:
            return parents, None
        keep = self._settle(done, before, step)
        return parents.index_select(0, keep), keep

    def results(self, sentences: int) -> list[list[IdHypothesis]]:
        """Return the results of all sentences, in the order in which they came."""
        found: list[list[IdHypothesis]] = [[] for _ in range(sentences)]
        for rows, finished, cut in self.settled:
            columns = (t.tolist() for t in finished)
            for row, is_cut, *hypotheses in zip(rows.tolist(), cut.tolist(), *columns, strict=True):
                for score, total, length, tokens, token_scores in zip(*hypotheses, strict=True):
                    if score > NEVER:
                        ids = tokens[: length if is_cut else length - 1]
                        result = IdHypothesis(ids, token_scores[:length], total, score, not is_cut)
                        found[row].append(result)
        return found

    def _allowed(self, step: int, log_probabilities: Tensor) -> Tensor:
        """Rule out forbidden tokens, and end-of-sentence where the hypothesis is too short."""
        log_probabilities.index_fill_(-1, self.forbidden, NEVER)
        if step < self.settings.min_length:
            too_short = (self.min_lengths > step)[:, None]
            log_probabilities[..., self.settings.eos].masked_fill_(too_short, NEVER)
        return log_probabilities

    def _coverage(self, attention: Tensor | None) -> Tensor | None:
        """Add the step's attention to the sums; return the beams' coverage terms [B, K], if there are any."""
        penalty = self.settings.penalty
        if not penalty.coverage:
            return None
        if attention is None:
            raise ConfigError(
                "`decoding.length_penalty.coverage` needs attention weights, which this scorer does not offer; "
                "set it to 0"
            )
        self.attended = self.attended + attention
        return penalty.coverage_term(self.attended, self.source_mask[:, None])

    def _extend(self, step: int, log_probabilities: Tensor) -> tuple[Hypotheses, Tensor]:
        """Return the best C extensions by log-probability and their parents [B, C]; C = 2K, or 1 for K = 1."""
        count = 2 * self.settings.beam_size if self.settings.beam_size > 1 else 1
        values, ids = best_tokens(log_probabilities, min(count, log_probabilities.shape[-1]))
        totals = (self.alive.log_probability[..., None] + values).flatten(1)
        totals, order = totals.sort(dim=1, descending=True, stable=True)
        totals, order = totals[:, :count], order[:, :count]
        parents = order.div(ids.shape[-1], rounding_mode="floor")
        candidates = self.alive.pick(parents)._replace(log_probability=totals)
        candidates.tokens[..., step] = ids.flatten(1).gather(1, order)
        candidates.token_log_probabilities[..., step] = values.flatten(1).gather(1, order)
        candidates.length.fill_(step + 1)
        return candidates, parents

    def _done(self, step: int) -> Tensor:
        """Return which sentences [B] are settled after `step`: at their limit, or beyond improvement."""
        bound = self.settings.penalty.best_reachable(
            self.alive.log_probability[:, 0], self.max_lengths + 1, self.source_mask.sum(1)
        )
        return (self.max_lengths <= step) | (bound <= self.finished.score[:, -1])

    def _settle(self, done: Tensor, before: Hypotheses, step: int) -> Tensor:
        """Take the sentences that are `done` out of the search; return the indices [B'] of the others.

        A sentence without any finished hypothesis gives the best of `before`, alive until this step, scored
        without a coverage term.
        """
        gone = done.nonzero()[:, 0]
        finished = self.finished.sentences(gone)
        cut = finished.score[:, 0] == NEVER
        length = before.log_probability.new_tensor(float(step))
        scored = before._replace(score=before.log_probability / self.settings.penalty.divisor(length))
        for kept, replacement in zip(finished, scored.sentences(gone), strict=True):
            kept[:, 0] = torch.where(cut.view(-1, *[1] * (kept.dim() - 2)), replacement[:, 0], kept[:, 0])
        self.settled.append((self.rows[gone], finished, cut))

        keep = (~done).nonzero()[:, 0]
        self.rows, self.attended = self.rows[keep], self.attended[keep]
        self.max_lengths, self.min_lengths = self.max_lengths[keep], self.min_lengths[keep]
        self.source_mask = self.source_mask[keep]
        self.alive, self.finished = self.alive.sentences(keep), self.finished.sentences(keep)
        return keep
