"""Search over a scorer with sentences that come and go. It knows token ids, nothing of text, models or files.

Each step extends every beam of every live sentence; those that end go to the sentence's finished hypotheses, ranked
by penalised score. The best n of a sentence are settled when no beam can still beat the n-th: its log-probability
over the penalty at the greatest length is a bound, so stopping early changes nothing (unlike stopping at the first K
finished, which `endings: fairseq` asks for). A settled sentence leaves at once, and waiting ones enter as soon as there
is room for a group of them (ziggurat.decoding.admission); each sentence is at its own position. Results do not depend
on which sentences share a batch, up to the scorer's own rounding.

Shapes: N live sentences, K beams, C candidates, G groups, R finished hypotheses kept, S source, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ziggurat.decoding.admission import Admission
from ziggurat.decoding.batches import padded
from ziggurat.decoding.beam import BeamChoice
from ziggurat.decoding.choice import Candidates, Choice
from ziggurat.decoding.constrained import ConstrainedChoice
from ziggurat.decoding.diverse import DiverseChoice
from ziggurat.decoding.hypotheses import NEVER, IdHypothesis
from ziggurat.decoding.request import SearchSettings, Sentence
from ziggurat.decoding.rules import Rules
from ziggurat.decoding.sample import SampleChoice
from ziggurat.decoding.scorer import Scorer
from ziggurat.decoding.state import Live, State, holes_filled
from ziggurat.decoding.trellis import Path, Step, Trellis, Visit
from ziggurat.errors import ConfigError, ZigguratError

__all__ = ["NonFiniteScoreError", "search"]


class NonFiniteScoreError(ZigguratError):
    """The model gave NaN (or no finite score at all) for the next token: its weights or its input are broken."""


@torch.inference_mode()
def search(
    scorer: Scorer,
    sentences: Sequence[Sentence],
    settings: SearchSettings,
    told: Callable[[int], object] = lambda count: None,
) -> list[list[IdHypothesis]]:
    """Return up to `settings.n_best` results per sentence, best first and at least one, in the order of the input.

    Sentences enter in the order given: sorted by length, they share batches with little padding. `told` is called with
    the number of sentences that a step has settled, for a progress bar. Raises NonFiniteScoreError, and ConfigError
    where settings need the scorer's attention and it offers none.
    """
    if not sentences:
        return []
    waiting = Admission([len(s.source) for s in sentences], settings.batch_tokens, settings.batch_sentences)
    keep_attention = settings.keep_attention or settings.penalty.coverage > 0
    scorer.start(settings.beam_size, waiting.slots, keep_attention=keep_attention)
    running = _Search(scorer, settings, _choice(sentences, settings))
    found: dict[int, list[IdHypothesis]] = {}
    while len(found) < len(sentences):
        if group := waiting.group(running.lengths()):
            running.admit(group, [sentences[number] for number in group])
        while not (settled := running.step()):
            pass
        found.update(settled)
        told(len(settled))
    return [found[number] for number in range(len(sentences))]


def _choice(sentences: Sequence[Sentence], settings: SearchSettings) -> Choice:
    """Return the strategy that the settings ask for."""
    if settings.sampling is not None:
        return SampleChoice(settings.beam_size, settings.sampling, settings.device)
    if settings.groups > 1:
        return DiverseChoice(settings.beam_size, settings.groups, settings.strength, settings.eos)
    if phrases := max(len(s.constraints) for s in sentences):
        longest = max(len(phrase) for s in sentences for phrase in s.constraints)
        return ConstrainedChoice(settings.beam_size, phrases, longest, settings.eos, settings.device)
    return BeamChoice(settings.beam_size)


class _Search:
    """The live sentences of a search. Row i of every tensor, and of the scorer, is `live[i]`."""

    def __init__(self, scorer: Scorer, settings: SearchSettings, choice: Choice) -> None:
        self.scorer = scorer
        self.settings = settings
        self.choice = choice
        self.rules = Rules(settings)
        self.live: list[Live] = []
        self.trellis = Trellis()
        self.state = State.entering([], settings, choice.groups)
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
            self.live.append(Live(number, sentence, visit))
        self.state = self.state.joined(State.entering(sentences, self.settings, self.choice.groups))
        self.choice.admit(sentences)
        self.rules.admit(sentences)

    def step(self) -> dict[int, list[IdHypothesis]]:
        """Extend all hypotheses by one token; return the results of the sentences that this settles, by number."""
        self.settings.before_step()
        before = self.state
        scores = self.scorer.step(before.tokens)
        # One fused pass over the row, faster on CPU than the log-sum-exp alone; NaN anywhere makes all of it NaN.
        # In place where it can be: on CPU fresh memory for every step costs more than the pass itself.
        narrow = scores.dtype in (torch.bfloat16, torch.float16)
        wide = scores.float() if narrow else scores
        log_probabilities = torch.log_softmax(wide, -1, out=wide)
        broken = log_probabilities[..., 0].isnan()
        attention = self._attention()
        candidates = self._candidates(log_probabilities)
        ends = candidates.token == self.settings.eos
        going = candidates.total.masked_fill(ends, NEVER)
        chosen = self.choice.beams(going, candidates)
        self.trellis.append(Step(*candidates, chosen, attention if self.settings.keep_attention else None))
        counted = self._counted(ends, candidates.total)
        score, ticket = self._finish(candidates.total.masked_fill(~counted, NEVER), candidates.origin)
        ended = before.ended + counted.sum(1)
        tokens, parents = candidates.token.gather(1, chosen), candidates.origin.gather(1, chosen)
        self.rules.follow(parents, tokens, before.position)
        self.state = self.state._replace(
            tokens=tokens,
            total=going.gather(1, chosen),
            score=score,
            ticket=ticket,
            ended=ended,
            position=before.position + 1,
        )
        done = torch.cat((self._done(), broken.any()[None])).tolist()
        if done.pop():
            raise self._non_finite(broken)
        if self.attended is not None:
            self.attended = self.attended.gather(1, parents[..., None].expand(-1, -1, self.attended.shape[2]))
        if not any(done):
            self._follow(parents)
            return {}
        settled = self._results([row for row, is_done in enumerate(done) if is_done])
        self._leave(done, parents)
        return settled

    def _counted(self, ends: Tensor, totals: Tensor) -> Tensor:
        """Return which of the candidates that end, `ends` [N, C], are results; `totals` [N, C] are best first."""
        if self.settings.endings == "candidates":
            return ends
        beams = self.settings.beam_size
        counted = ends & (totals > NEVER) & (torch.arange(ends.shape[1], device=ends.device) < beams)
        if self.settings.endings == "fairseq":  # those beyond the K-th are not even looked at
            counted &= self.state.ended[:, None] + counted.cumsum(1) <= beams
        return counted

    def _candidates(self, log_probabilities: Tensor) -> Candidates:
        """Return the step's candidates, by log-probabilities [N, K, V] that the rules may edit in place."""
        state = self.state
        given = log_probabilities.clone() if self.rules.change_scores else None
        self.rules.apply(log_probabilities, state.position, state.min_length, state.max_length)
        candidates = self.choice.candidates(state.total, log_probabilities, state.position)
        if given is not None:
            place = candidates.origin * given.shape[2] + candidates.token
            candidates = candidates._replace(log_probability=given.flatten(1).gather(1, place))
        if self.settings.limits.prune is not None:
            floor = state.best.maximum(candidates.total.amax(1)) - self.settings.limits.prune
            given_up = candidates.total < floor[:, None]
            candidates = candidates._replace(total=candidates.total.masked_fill(given_up, NEVER))
            ended = candidates.total.masked_fill(candidates.token != self.settings.eos, NEVER)
            self.state = state._replace(best=state.best.maximum(ended.amax(1)))
        return candidates

    def _attention(self) -> Tensor | None:
        """Return the step's attention [N, K, S], if it is needed, and add it to the sums of the coverage term."""
        if not (self.settings.keep_attention or self.settings.penalty.coverage):
            return None
        attention = self.scorer.attention
        if attention is None:
            raise ConfigError(
                "`decoding.length_penalty.coverage`, `decoding.alignments` and `decoding.replace_unknown` need "
                "attention weights, which this model does not offer; leave them out"
            )
        if self.settings.penalty.coverage:
            # Sentences that came since the last step have no sums yet; the longest source may have come or gone.
            sums = attention.double()
            if self.attended is not None:
                rows, width = len(self.attended), min(attention.shape[2], self.attended.shape[2])
                sums = sums.clone()
                sums[:rows, :, :width] += self.attended[..., :width]
            self.attended = sums
        return attention

    def _finish(self, total: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
        """Rank candidates with `total` [N, C] (-inf: it did not end) among the finished; return scores and tickets."""
        state, groups = self.state, self.choice.groups
        score = total / self.settings.penalty.divisor(state.position.double() + 1)[:, None]
        if self.attended is not None:
            real = torch.arange(self.attended.shape[2], device=total.device) < state.source_length[:, None, None]
            score = score + self.settings.penalty.coverage_term(self.attended, real).gather(1, origin)
        ticket = state.position[:, None] * self.choice.width + torch.arange(total.shape[1], device=total.device)
        score = torch.cat((state.score, score.unflatten(1, (groups, -1))), 2)
        score, order = score.sort(dim=2, descending=True, stable=True)
        size = state.score.shape[2]
        ticket = torch.cat((state.ticket, ticket.unflatten(1, (groups, -1))), 2).gather(2, order[..., :size])
        return score[..., :size], ticket

    def _done(self) -> Tensor:
        """Return which sentences [N] are settled: beyond their limit, or beyond improvement in every group.

        With `endings: fairseq` K ended hypotheses settle a sentence, and nothing else does while a beam goes on.
        """
        state = self.state
        if self.settings.endings == "fairseq":
            no_beam = state.total.amax(1) == NEVER
            return (state.position > state.max_length) | (state.ended >= self.settings.beam_size) | no_beam
        best = state.total.unflatten(1, (self.choice.groups, -1)).amax(2)
        limits = state.max_length[:, None] + 1, state.source_length[:, None]
        bound = self.settings.penalty.best_reachable(best, *limits)
        return (state.position > state.max_length) | (bound <= state.score[..., -1]).all(1)

    def _results(self, rows: Sequence[int]) -> dict[int, list[IdHypothesis]]:
        """Return the results of settled sentences, by their number."""
        index = torch.tensor(rows, device=self.state.score.device)
        scores, tickets = self.state.score[index].tolist(), self.state.ticket[index].tolist()
        found = {}
        for row, its_scores, its_tickets in zip(rows, scores, tickets, strict=True):
            each = self.live[row]
            results = []
            for group, finished in enumerate(zip(its_scores, its_tickets, strict=True)):
                ended = [pair for pair in zip(*finished, strict=True) if pair[0] > NEVER]
                for score, ticket in ended:
                    position, candidate = divmod(ticket, self.choice.width)
                    path = self.trellis.path(each.visit, position, candidate)
                    forced = self.settings.endings == "fairseq" and position == each.sentence.max_length
                    results.append(_hypothesis(path, score, len(each.sentence.source), True, forced))
                if not ended:
                    results.append(self._cut(each, group))
            results.sort(key=lambda h: (not h.finished, -h.score))
            found[each.number] = results[: self.settings.n_best]
        return found

    def _cut(self, each: Live, group: int) -> IdHypothesis:
        """Return the best hypothesis so far of a group of which none ended, scored without a coverage term.

        The step that took it beyond its limit, or left no beam, does not count.
        """
        length = len(self.trellis) - each.visit.start - 1
        if not length:
            return IdHypothesis([], [], 0.0, 0.0, False)
        rank = group * (self.choice.beam_size // self.choice.groups)
        path = self.trellis.path(each.visit, length - 1, self.trellis.beam(each.visit, length - 1, rank))
        score = path.total / self.settings.penalty.divisor(float(length))
        return _hypothesis(path, score, len(each.sentence.source), False)

    def _leave(self, done: Sequence[bool], parents: Tensor) -> None:
        """Take out the sentences that are `done`; the others follow their `parents` [N, K]."""
        kept = holes_filled(done)
        self.live = [self.live[row] for row in kept]
        for row, (old, each) in enumerate(zip(kept, self.live, strict=True)):
            if row != old:
                each.visit.rows.append((len(self.trellis), row))
        self.trellis.forget([each.visit for each in self.live])
        index = torch.tensor(kept, dtype=torch.int64, device=parents.device)
        self.state = self.state.rows(index)
        self.choice.keep(index)
        self.rules.keep(index)
        if self.attended is not None:
            self.attended = self.attended.index_select(0, index)
        self.scorer.keep(index)
        self._follow(parents.index_select(0, index))

    def _follow(self, parents: Tensor) -> None:
        """Let the scorer's beams continue `parents` [N, K], unless each continues itself."""
        if self.choice.groups < self.choice.beam_size and len(parents):
            self.scorer.follow(parents)

    def _non_finite(self, broken: Tensor) -> NonFiniteScoreError:
        """Return the error that names the first token whose scores are `broken` [N, K]."""
        row = int(broken.any(1).nonzero()[0, 0])
        return NonFiniteScoreError(
            f"the model's scores for token {int(self.state.position[row])} are not finite (NaN or infinity); the "
            "checkpoint may be from a diverged run: try an earlier one, or full precision"
        )


def _hypothesis(path: Path, score: float, source_length: int, finished: bool, forced: bool = False) -> IdHypothesis:
    """Return a result; the end of the sentence is no token of it, but has a score."""
    tokens = path.tokens[:-1] if finished else path.tokens
    attention = [row[:source_length].tolist() for row in path.attention[: len(tokens)]]
    total = math.fsum(path.log_probabilities)
    return IdHypothesis(tokens, path.log_probabilities, total, score, finished, forced, attention)
