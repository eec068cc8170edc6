"""Search over a scorer with sentences that come and go. It knows token ids, nothing of text, models or files.

Each step extends every beam of every live sentence; those that end go to the sentence's finished hypotheses, ranked
by penalised score. The best n of a sentence are settled when no beam can still beat the n-th: its log-probability
over the penalty at the greatest length is a bound, so stopping early changes nothing (unlike stopping at the first K
finished). A settled sentence leaves at once, and waiting ones enter as soon as there is room for a group of them
(ziggurat.decoding.admission); each sentence is at its own position. Results do not depend on which sentences share a
batch, up to the scorer's own rounding.

Shapes: N live sentences, K beams, C candidates, R finished hypotheses kept, S source, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ziggurat.decoding.admission import Admission
from ziggurat.decoding.batches import padded
from ziggurat.decoding.beam import BestExtensions
from ziggurat.decoding.hypotheses import NEVER, IdHypothesis
from ziggurat.decoding.request import SearchSettings, Sentence
from ziggurat.decoding.scorer import Scorer
from ziggurat.decoding.trellis import Step, Trellis, Visit
from ziggurat.errors import ConfigError, ZigguratError

__all__ = ["NonFiniteScoreError", "search"]


class NonFiniteScoreError(ZigguratError):
    """The model gave NaN (or no finite score at all) for the next token: its weights or its input are broken."""


@torch.inference_mode()
def search(scorer: Scorer, sentences: Sequence[Sentence], settings: SearchSettings) -> list[list[IdHypothesis]]:
    """Return up to `settings.n_best` results per sentence, best first and at least one, in the order of the input.

    Sentences enter in the order given: sorted by length, they share batches with little padding. Raises
    NonFiniteScoreError, and ConfigError for a coverage penalty without the scorer's attention.
    """
    if not sentences:
        return []
    waiting = Admission([len(s.source) for s in sentences], settings.batch_tokens, settings.batch_sentences)
    scorer.start(settings.beam_size, waiting.slots, keep_attention=settings.penalty.coverage > 0)
    running = _Search(scorer, settings)
    found: dict[int, list[IdHypothesis]] = {}
    while len(found) < len(sentences):
        if group := waiting.group(running.lengths()):
            running.admit(group, [sentences[number] for number in group])
        while not (settled := running.step()):
            pass
        found.update(settled)
    return [found[number] for number in range(len(sentences))]


class _State(NamedTuple):
    """What the search keeps of the live sentences, one row each."""

    tokens: Tensor  # [N, K] last tokens
    total: Tensor  # [N, K] log-probabilities of the beams, float64
    score: Tensor  # [N, R] penalised scores of finished hypotheses, best first
    ticket: Tensor  # [N, R] where they ended: position * C + candidate
    position: Tensor  # [N] tokens so far
    max_length: Tensor  # [N]
    min_length: Tensor  # [N]
    source_length: Tensor  # [N]


class _Live(NamedTuple):
    """A sentence in the search."""

    number: int
    sentence: Sentence
    visit: Visit


class _Search:
    """The live sentences of a search. Row i of every tensor, and of the scorer, is `live[i]`."""

    def __init__(self, scorer: Scorer, settings: SearchSettings) -> None:
        self.scorer = scorer
        self.settings = settings
        self.choice = BestExtensions(settings.beam_size)
        self.width = 2 * settings.beam_size if settings.beam_size > 1 else 1  # C, at most
        self.live: list[_Live] = []
        self.trellis = Trellis()
        self.forbidden = torch.tensor(settings.forbidden, dtype=torch.int64, device=settings.device)
        self.state = self._enter([])
        self.attended: Tensor | None = None  # [N, K, S] attention summed over steps

    def lengths(self) -> list[int]:
        """Return the source lengths of the live sentences."""
        return [len(each.sentence.source) for each in self.live]

    def admit(self, numbers: Sequence[int], sentences: Sequence[Sentence]) -> None:
        """Let sentences in, behind the live ones."""
        source, mask = padded([s.source for s in sentences], self.settings.pad, self.settings.device)
        self.scorer.admit(source, mask, max(s.max_length for s in sentences) + 1)
        for number, sentence in zip(numbers, sentences, strict=True):
            visit = Visit(len(self.trellis), [(len(self.trellis), len(self.live))])
            self.live.append(_Live(number, sentence, visit))
        self.state = _State(*(torch.cat(pair) for pair in zip(self.state, self._enter(sentences), strict=True)))

    def step(self) -> dict[int, list[IdHypothesis]]:
        """Extend all hypotheses by one token; return the results of the sentences that this settles, by number."""
        self.settings.before_step()
        before = self.state
        scores = self.scorer.step(before.tokens)
        # One fused pass over the row, faster on CPU than the log-sum-exp alone; NaN anywhere makes all of it NaN.
        wide = torch.float32 if scores.dtype in (torch.bfloat16, torch.float16) else scores.dtype
        log_probabilities = scores.log_softmax(-1, dtype=wide)
        broken = log_probabilities[..., 0].isnan().any()
        coverage = self._coverage()
        candidates = self.choice.candidates(before.total, self._allowed(log_probabilities))
        ends = candidates.token == self.settings.eos
        score, ticket = self._finish(candidates.total.masked_fill(~ends, NEVER), candidates.origin, coverage)

        going = candidates.total.masked_fill(ends, NEVER)
        chosen = self.choice.beams(going)
        self.trellis.append(Step(*candidates, chosen))
        self.state = before._replace(
            tokens=candidates.token.gather(1, chosen),
            total=going.gather(1, chosen),
            score=score,
            ticket=ticket,
            position=before.position + 1,
        )
        done = torch.cat((self._done(), broken[None])).tolist()
        if done.pop():
            raise self._non_finite(log_probabilities)
        parents = candidates.origin.gather(1, chosen)
        if self.attended is not None:
            self.attended = self.attended.gather(1, parents[..., None].expand(-1, -1, self.attended.shape[2]))
        gone = [row for row, is_done in enumerate(done) if is_done]
        settled = self._results(gone) if gone else {}
        if gone:
            parents = self._leave(done, parents)
        if self.settings.beam_size > 1 and self.live:
            self.scorer.follow(parents)
        return settled

    def _enter(self, sentences: Sequence[Sentence]) -> _State:
        """Return the state of sentences before their first step.

        All beams start from one token: only the first is alive, or each hypothesis would appear K times.
        """
        settings, count = self.settings, len(sentences)
        total = torch.full((count, settings.beam_size), NEVER, dtype=torch.float64)
        total[:, 0] = 0.0
        limits = [(0, s.max_length, min(s.min_length, s.max_length), len(s.source)) for s in sentences]
        numbers = torch.tensor(limits, dtype=torch.int64).view(-1, 4).unbind(1)
        rows = (
            torch.full((count, settings.beam_size), settings.bos),
            total,
            torch.full((count, settings.n_best), NEVER, dtype=torch.float64),
            torch.zeros(count, settings.n_best, dtype=torch.int64),
            *numbers,
        )
        return _State(*(t.to(settings.device) for t in rows))

    def _allowed(self, log_probabilities: Tensor) -> Tensor:
        """Rule out forbidden tokens, and end-of-sentence where the hypothesis is too short; in place."""
        log_probabilities.index_fill_(-1, self.forbidden, NEVER)
        too_short = (self.state.position < self.state.min_length)[:, None]
        log_probabilities[..., self.settings.eos].masked_fill_(too_short, NEVER)
        return log_probabilities

    def _coverage(self) -> Tensor | None:
        """Add the step's attention to the sums; return the beams' coverage terms [N, K], if there are any."""
        penalty = self.settings.penalty
        if not penalty.coverage:
            return None
        attention = self.scorer.attention
        if attention is None:
            raise ConfigError(
                "`decoding.length_penalty.coverage` needs attention weights, which this scorer does not offer; "
                "set it to 0"
            )
        # Sentences that came since the last step have no sums yet; the longest source may have come or gone.
        sums = attention.clone()
        if self.attended is not None:
            rows, width = len(self.attended), min(attention.shape[2], self.attended.shape[2])
            sums[:rows, :, :width] += self.attended[..., :width]
        self.attended = sums
        real = torch.arange(sums.shape[2], device=sums.device) < self.state.source_length[:, None, None]
        return penalty.coverage_term(sums, real)

    def _finish(self, total: Tensor, origin: Tensor, coverage: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rank candidates with `total` [N, C] (-inf: it did not end) among the finished; return scores and tickets."""
        state = self.state
        score = total / self.settings.penalty.divisor(state.position.double() + 1)[:, None]
        if coverage is not None:
            score = score + coverage.gather(1, origin)
        ticket = state.position[:, None] * self.width + torch.arange(total.shape[1], device=total.device)
        score, order = torch.cat((state.score, score), 1).sort(dim=1, descending=True, stable=True)
        kept = order[:, : self.settings.n_best]
        return score[:, : self.settings.n_best], torch.cat((state.ticket, ticket), 1).gather(1, kept)

    def _done(self) -> Tensor:
        """Return which sentences [N] are settled: beyond their limit, or beyond improvement."""
        state = self.state
        bound = self.settings.penalty.best_reachable(state.total[:, 0], state.max_length + 1, state.source_length)
        return (state.position > state.max_length) | (bound <= state.score[:, -1])

    def _results(self, rows: Sequence[int]) -> dict[int, list[IdHypothesis]]:
        """Return the results of settled sentences, by their number."""
        index = torch.tensor(rows, device=self.state.score.device)
        scores, tickets = self.state.score[index].tolist(), self.state.ticket[index].tolist()
        found = {}
        for row, its_scores, its_tickets in zip(rows, scores, tickets, strict=True):
            each = self.live[row]
            results = []
            for score, ticket in zip(its_scores, its_tickets, strict=True):
                if score > NEVER:
                    path = self.trellis.path(each.visit, *divmod(ticket, self.width))
                    results.append(IdHypothesis(path.tokens[:-1], path.log_probabilities, path.total, score, True))
            found[each.number] = results or [self._cut(each)]
        return found

    def _cut(self, each: _Live) -> IdHypothesis:
        """Return the best hypothesis so far of a sentence of which none ended, scored without a coverage term.

        The step that took it beyond its limit, or left no beam, does not count.
        """
        length = len(self.trellis) - each.visit.start - 1
        if not length:
            return IdHypothesis([], [], 0.0, 0.0, False)
        path = self.trellis.path(each.visit, length - 1, self.trellis.beam(each.visit, length - 1, 0))
        score = path.total / self.settings.penalty.divisor(float(length))
        return IdHypothesis(path.tokens, path.log_probabilities, path.total, score, False)

    def _leave(self, done: Sequence[bool], parents: Tensor) -> Tensor:
        """Take out the sentences that are `done`, filling holes from the end; return the parents of the others."""
        stay = [row for row, is_done in enumerate(done) if not is_done]
        count = len(stay)
        fill = (row for row in reversed(stay) if row >= count)
        kept = [next(fill) if done[row] else row for row in range(count)]
        self.live = [self.live[row] for row in kept]
        for row, (old, each) in enumerate(zip(kept, self.live, strict=True)):
            if row != old:
                each.visit.rows.append((len(self.trellis), row))
        self.trellis.forget([each.visit for each in self.live])
        index = torch.tensor(kept, dtype=torch.int64, device=parents.device)
        self.state = _State(*(t.index_select(0, index) for t in self.state))
        if self.attended is not None:
            self.attended = self.attended.index_select(0, index)
        self.scorer.keep(index)
        return parents.index_select(0, index)

    def _non_finite(self, log_probabilities: Tensor) -> NonFiniteScoreError:
        """Return the error that names the first token whose scores are broken."""
        row = int(log_probabilities.isnan().any(-1).any(-1).nonzero()[0, 0])
        return NonFiniteScoreError(
            f"the model's scores for token {int(self.state.position[row])} are not finite (NaN or infinity); the "
            "checkpoint may be from a diverged run: try an earlier one, or full precision"
        )
