"""Beam search over any scorer, with sentences that enter and leave while it runs.

The search handles token ids and knows nothing about text, models or files. Each step extends every hypothesis (beam) of
every live sentence by one token (`Search.step`). Hypotheses that end join the sentence's finished ones, ranked by
penalised score.

A sentence is settled once none of its beams can still beat its n-th best finished hypothesis. More tokens only lower a
log-probability, so a beam's log-probability divided by the penalty at the greatest length bounds its final score:
stopping there changes no result (unlike stopping at K finished, as with `endings: fairseq` and `marian`). A settled
sentence leaves at once, and a row from the end fills its hole (`_compacted`). Waiting ones enter as soon as there is
room for a group of them (`BatchAdmission`). Each sentence has a separate position. Results do not depend on the other
sentences of the batch, up to the scorer's rounding.

Shapes: N live sentences, K beams, C candidates, G groups, R finished hypotheses kept, S source, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ziggurat.system.errors import ConfigError, ZigguratError
from ziggurat.translate.choice import Candidates, choice_of, searched_together
from ziggurat.translate.hypotheses import NEVER, IdHypothesis, RowTrack, Trellis, TrellisStep, to_host
from ziggurat.translate.rules import Rules
from ziggurat.translate.scorers import Scorer, padded
from ziggurat.translate.settings import SearchSettings, Sentence


class NonFiniteScoreError(ZigguratError):
    """The model returned NaN (or no finite score) for the next token, because its weights or its input are broken."""


class LiveSentence(NamedTuple):
    """A sentence in a running search."""

    number: int
    """Its number in the input."""
    sentence: Sentence
    track: RowTrack


class SearchState(NamedTuple):
    """Hypotheses of the live sentences, one row for each sentence."""

    tokens: Tensor  # [N, K] last tokens
    total: Tensor  # [N, K] log-probabilities of the beams, float64
    score: Tensor  # [N, G, R] penalised scores of finished hypotheses, best first
    ticket: Tensor  # [N, G, R] where they ended: position * C + candidate
    best: Tensor  # [N] highest log-probability of a finished hypothesis; only for pruning
    ended: Tensor  # [N] hypotheses that have ended so far, including those not kept
    position: Tensor  # [N] tokens so far
    max_length: Tensor  # [N]
    min_length: Tensor  # [N]
    source_length: Tensor  # [N]

    @classmethod
    def entering(cls, sentences: Sequence[Sentence], settings: SearchSettings, groups: int) -> SearchState:
        """Return the rows of sentences before their first step.

        All beams of a group start from one token, so only the first is alive; otherwise each hypothesis would appear K
        times.
        """
        count, beams, device = len(sentences), settings.beam_size, settings.device
        total = torch.full((count, beams), NEVER, dtype=torch.float64, device=device)
        total[:, :: beams // groups] = 0.0
        finished = (count, groups, -(-settings.n_best // groups))
        limits = [(0, s.max_length, min(s.min_length, s.max_length), len(s.source)) for s in sentences]
        return cls(
            torch.full((count, beams), settings.bos, device=device),
            total,
            torch.full(finished, NEVER, dtype=torch.float64, device=device),
            torch.zeros(finished, dtype=torch.int64, device=device),
            torch.full((count,), NEVER, dtype=torch.float64, device=device),
            torch.zeros(count, dtype=torch.int64, device=device),
            *torch.tensor(limits, dtype=torch.int64, device=device).view(-1, 4).unbind(1),
        )

    def joined(self, others: SearchState) -> SearchState:
        """Return these rows, followed by those of `others`."""
        return SearchState(*(torch.cat(pair) for pair in zip(self, others, strict=True)))

    def rows(self, index: Tensor) -> SearchState:
        """Return the rows `index` [N']."""
        return SearchState(*(t.index_select(0, index) for t in self))


def _compacted(done: Sequence[bool]) -> list[int]:
    """Return the remaining rows when the `done` ones leave; rows from the end fill the holes."""
    stay = [row for row, is_done in enumerate(done) if not is_done]
    fill = (row for row in reversed(stay) if row >= len(stay))
    return [next(fill) if done[row] else row for row in range(len(stay))]


_GROUP_PART = 4
"""A group of new sentences is admitted once it makes up one part in _GROUP_PART of the live sentences.

Each admission is a pass of the encoder, which is inefficient for a single sentence; but the longer the wait for a
group, the more rows of the search stay empty.
"""


class BatchAdmission:
    """Waiting sentences, in the order of `lengths`, which enter in groups.

    Args:
        lengths: source tokens of each sentence.
        batch_tokens: maximum number of live source tokens, including padding: sentences x the longest of them. A
            longer sentence is live alone.
        batch_sentences: maximum number of live sentences.
        slots: the same limit if more sentences will be added; None: the most that sentences of these lengths can
            occupy at once.
    """

    def __init__(
        self, lengths: Sequence[int], batch_tokens: int, batch_sentences: int, slots: int | None = None
    ) -> None:
        self.batch_tokens = batch_tokens
        fit = max(1, batch_tokens // min(lengths, default=1))
        self.slots = slots or max(1, min(len(lengths), batch_sentences, fit))
        """Number of sentences that can be live at a time."""
        self._waiting = deque(enumerate(lengths))

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, number: int, length: int) -> None:
        """Append a sentence to the waiting ones."""
        self._waiting.append((number, length))

    def remove(self, numbers: Container[int]) -> None:
        """Remove the sentences with these numbers from the waiting ones."""
        self._waiting = deque(pair for pair in self._waiting if pair[0] not in numbers)

    def group(self, live: Sequence[int]) -> list[int]:
        """Return the indices of the sentences that enter now, given the lengths `live` of those in the search.

        None enter until there is room for a group that justifies a pass of the encoder, or for all waiting ones.
        """
        longest, count = max(live, default=0), 0
        for _, length in self._waiting:
            together = len(live) + count + 1
            longest = max(longest, length)
            if together > self.slots or (together > 1 and together * longest > self.batch_tokens):
                break
            count += 1
        if count < len(self._waiting) and count * _GROUP_PART < len(live) + count:
            count = 0
        return [self._waiting.popleft()[0] for _ in range(count)]


def search(scorer: Scorer, sentences: Sequence[Sentence], settings: SearchSettings) -> list[list[IdHypothesis]]:
    """Return the results of each sentence, in the order of the input; see `search_by_steps`."""
    found: dict[int, list[IdHypothesis]] = {}
    for settled in search_by_steps(scorer, sentences, settings):
        found.update(settled)
    return [found[number] for number in range(len(sentences))]


@torch.inference_mode()
def search_by_steps(
    scorer: Scorer, sentences: Sequence[Sentence], settings: SearchSettings
) -> Iterator[dict[int, list[IdHypothesis]]]:
    """Yield the results of the sentences settled by a step, by number: up to `n_best`, best first, at least one.

    Sentences enter in the given order; sorted by length, they share batches with little padding. Raises
    NonFiniteScoreError, and ConfigError if the settings need attention that the scorer lacks.
    """
    for numbers in searched_together(sentences, settings.beam_size):
        running = Search(scorer, [sentences[number] for number in numbers], settings)
        left = len(numbers)
        while left:
            if settled := running.step():
                left -= len(settled)
                yield {numbers[place]: results for place, results in settled.items()}


class Search:
    """A running search. Row i of every tensor, and of the scorer, is `live[i]`.

    Args:
        scorer: the model.
        sentences: the initial waiting sentences, numbered from 0.
        settings: settings of all sentences.
        slots: maximum number of live sentences; None: the most that sentences of these lengths can occupy at once.
    """

    def __init__(
        self, scorer: Scorer, sentences: Sequence[Sentence], settings: SearchSettings, slots: int | None = None
    ) -> None:
        self.scorer = scorer
        self.settings = settings
        self.sentences = dict(enumerate(sentences))  # waiting
        self.choice = choice_of(sentences, settings)
        self.rules = Rules(settings)
        self.live: list[LiveSentence] = []
        self.trellis = Trellis()
        self.state = SearchState.entering([], settings, self.choice.groups)
        self.attended: Tensor | None = None  # [N, K, S] attention summed over steps
        lengths = [len(s.source) for s in sentences]
        self.waiting = BatchAdmission(lengths, settings.batch_tokens, settings.batch_sentences, slots)
        keep_attention = settings.keep_attention or settings.penalty.coverage > 0
        scorer.start(settings.beam_size, self.waiting.slots, keep_attention=keep_attention)

    def step(self) -> dict[int, list[IdHypothesis]]:
        """Extend all hypotheses by one token; return the results of the sentences settled by this, by number."""
        # (1) Admit waiting sentences, once there is room for a group of them.
        self._admit(self.waiting.group([len(each.sentence.source) for each in self.live]))
        self.settings.before_step()

        # (2) Score the next tokens, and choose: C extensions are candidates; of those that do not end, K are the next
        # beams.
        log_probabilities, broken = self._scores()
        attention = self._attention()
        candidates = self._candidates(log_probabilities)
        ends = candidates.token == self.settings.eos
        going = candidates.total.masked_fill(ends, NEVER)
        chosen = self.choice.beams(going, candidates)

        # (3) Rank the candidates that end among the finished hypotheses, and advance to the next position.
        parents = self._advance(candidates, ends, going, chosen)

        # (4) Settle the sentences that can no longer improve. Everything that the host needs from a step, including
        # whether all scores were finite, is read here at once, because each read waits for the device.
        state = self.state
        ranked = self._done(), state.score, state.ticket, state.total, broken.any()
        shown = attention if self.settings.keep_attention else None
        *read, failed, token, origin, own, total, beams, weights = to_host(*ranked, *candidates, chosen, shown)
        if failed:
            raise self._non_finite(broken)
        self.trellis.append(TrellisStep(token, origin, own, total, beams, weights))
        done, settled = read[0].tolist(), {}
        if any(done):
            settled = self._results(*(each.tolist() for each in read))
            parents = self._leave(done, parents)

        # (5) Let the scorer's beams continue their parents; when sampling, each beam continues itself.
        if self.choice.groups < self.choice.beam_size and len(parents):
            self.scorer.follow(parents)
        return settled

    def add(self, number: int, sentence: Sentence) -> None:
        """Append a sentence without constraints to the waiting ones; its `number` must be new."""
        self.sentences[number] = sentence
        self.waiting.add(number, len(sentence.source))

    def remove(self, numbers: Container[int]) -> None:
        """Remove sentences, waiting or live, without results."""
        self.waiting.remove(numbers)
        self.sentences = {number: each for number, each in self.sentences.items() if number not in numbers}
        done = [each.number in numbers for each in self.live]
        if any(done):
            self._leave(done, self.state.tokens)

    def _admit(self, numbers: Sequence[int]) -> None:
        """Admit the sentences `numbers`, after the live ones."""
        if not numbers:
            return
        sentences = [self.sentences.pop(number) for number in numbers]
        source, mask = padded([s.source for s in sentences], self.settings.pad, self.settings.device)
        self.scorer.admit(source, mask, max(s.max_length for s in sentences) + 1)
        for number, sentence in zip(numbers, sentences, strict=True):
            track = RowTrack(len(self.trellis), [(len(self.trellis), len(self.live))])
            self.live.append(LiveSentence(number, sentence, track))
        self.state = self.state.joined(SearchState.entering(sentences, self.settings, self.choice.groups))
        self.choice.admit(sentences)
        self.rules.admit(sentences)

    def _scores(self) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities [N, K, V] of the next tokens, and the beams [N, K] whose scores are broken."""
        # One fused pass over a row is faster on CPU than its log-sum-exp alone, and NaN anywhere makes the whole row
        # NaN. In place if possible, because on CPU fresh memory for every step costs more than the pass itself.
        scores = self.scorer.step(self.state.tokens)
        narrow = scores.dtype in (torch.bfloat16, torch.float16)
        wide = scores.float() if narrow else scores
        log_probabilities = torch.log_softmax(wide, -1, out=wide)
        return log_probabilities, log_probabilities[..., 0].isnan()

    def _candidates(self, log_probabilities: Tensor) -> Candidates:
        """Return the candidates among the extensions; `log_probabilities` [N, K, V] of the tokens are overwritten."""
        state = self.state
        # If the rules change scores, a copy keeps the model's scores for the results.
        given = log_probabilities.clone() if self.rules.change_scores else None
        self.rules.apply(log_probabilities, state.position, state.min_length, state.max_length)
        candidates = self.choice.candidates(state.total, log_probabilities, state.position)
        if given is not None:
            index = candidates.origin * given.shape[2] + candidates.token
            candidates = candidates._replace(log_probability=given.flatten(1).gather(1, index))
        return candidates._replace(total=self._narrowed(self._pruned(candidates.total)))

    def _advance(self, candidates: Candidates, ends: Tensor, going: Tensor, chosen: Tensor) -> Tensor:
        """Rank the candidates that end, `ends` [N, C]; let the `chosen` [N, K] be the beams; return their parents."""
        state = self.state
        tokens, parents = candidates.token.gather(1, chosen), candidates.origin.gather(1, chosen)
        counted = self._counted(ends, candidates.total)
        ended = candidates.total.masked_fill(~counted, NEVER)
        score, ticket = self._ranked(ended, candidates.origin)
        longest = len(self.trellis) - min(each.track.start for each in self.live)
        self.rules.follow(parents, tokens, state.position, longest)
        self.state = state._replace(
            tokens=tokens,
            total=going.gather(1, chosen),
            score=score,
            ticket=ticket,
            best=state.best if self.settings.rules.prune is None else state.best.maximum(ended.amax(1)),
            ended=state.ended + counted.sum(1),
            position=state.position + 1,
        )
        if self.attended is not None:
            self.attended = self.attended.gather(1, parents[..., None].expand(-1, -1, self.attended.shape[2]))
        return parents

    def _attention(self) -> Tensor | None:
        """Return the step's attention [N, K, S], if it is needed, and add it to the sums of the coverage term."""
        if not (self.settings.keep_attention or self.settings.penalty.coverage):
            return None
        attention = self.scorer.attention
        if attention is None:
            raise ConfigError(
                "`decoding.length_penalty.coverage`, `decoding.alignments` and `decoding.replace_unknown` need "
                "attention weights, which this model does not provide; leave them out",
                key="decoding.length_penalty.coverage",
                named=["decoding.alignments", "decoding.replace_unknown"],
            )
        if self.settings.penalty.coverage:
            # Sentences admitted since the last step have no sums yet; S changes with the longest live source.
            sums = attention.double()
            if self.attended is not None:
                rows, width = len(self.attended), min(attention.shape[2], self.attended.shape[2])
                sums = sums.clone()
                sums[:rows, :, :width] += self.attended[..., :width]
            self.attended = sums
        return attention

    def _pruned(self, totals: Tensor) -> Tensor:
        """Return the totals [N, C] of candidates without those too far below the best of their sentence."""
        if self.settings.rules.prune is None:
            return totals
        floor = self.state.best.maximum(totals.amax(1)) - self.settings.rules.prune
        return totals.masked_fill(totals < floor[:, None], NEVER)

    def _narrowed(self, totals: Tensor) -> Tensor:
        """Return the totals [N, C], best first, without those that exceed the beam of `endings: marian`."""
        if self.settings.endings != "marian":
            return totals
        room = self.settings.beam_size - self.state.ended
        return totals.masked_fill(torch.arange(totals.shape[1], device=totals.device) >= room[:, None], NEVER)

    def _counted(self, ends: Tensor, totals: Tensor) -> Tensor:
        """Return which of the candidates that end, `ends` [N, C], are results; `totals` [N, C] are best first."""
        if self.settings.endings == "candidates":
            return ends
        beams = self.settings.beam_size
        counted = ends & (totals > NEVER) & (torch.arange(ends.shape[1], device=ends.device) < beams)
        if self.settings.endings == "fairseq":  # a sentence accepts at most K endings, the best of this step first
            counted &= self.state.ended[:, None] + counted.cumsum(1) <= beams
        return counted

    def _ranked(self, total: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
        """Rank candidates with `total` [N, C] (-inf: it did not end) among the finished; return scores and tickets."""
        state, groups = self.state, self.choice.groups
        score = self.settings.penalty.score(total, state.position.double()[:, None] + 1)
        if self.attended is not None:
            real = torch.arange(self.attended.shape[2], device=total.device) < state.source_length[:, None, None]
            score = score + self.settings.penalty.coverage_term(self.attended, real).gather(1, origin)
        ticket = state.position[:, None] * self.choice.width + torch.arange(total.shape[1], device=total.device)
        # After the earlier ones, with a stable sort, so that among equal scores the older hypothesis ranks first.
        score = torch.cat((state.score, score.unflatten(1, (groups, -1))), 2)
        score, order = score.sort(dim=2, descending=True, stable=True)
        size = state.score.shape[2]
        ticket = torch.cat((state.ticket, ticket.unflatten(1, (groups, -1))), 2).gather(2, order[..., :size])
        return score[..., :size], ticket

    def _done(self) -> Tensor:
        """Return which sentences [N] are settled: beyond their limit, or beyond improvement in every group.

        With `endings: fairseq` and `marian`, only K ended hypotheses settle a sentence while it has a beam. With
        `marian`, no step beyond the limit is needed, because unfinished hypotheses are results.
        """
        state = self.state
        if self.settings.endings in ("fairseq", "marian"):
            no_beam = state.total.amax(1) == NEVER
            last = state.max_length if self.settings.endings == "fairseq" else state.max_length - 1
            return (state.position > last) | (state.ended >= self.settings.beam_size) | no_beam
        best = state.total.unflatten(1, (self.choice.groups, -1)).amax(2)
        limits = state.position[:, None] + 1, state.max_length[:, None] + 1, state.source_length[:, None]
        bound = self.settings.penalty.best_reachable(best, *limits)
        return (state.position > state.max_length) | (bound <= state.score[..., -1]).all(1)

    def _results(
        self,
        done: Sequence[bool],
        scores: Sequence[Sequence[Sequence[float]]],
        tickets: Sequence[Sequence[Sequence[int]]],
        totals: Sequence[Sequence[float]],
    ) -> dict[int, list[IdHypothesis]]:
        """Return the hypotheses of the sentences that are `done`, read from the state."""
        found = {}
        for row in (row for row, is_done in enumerate(done) if is_done):
            each, results = self.live[row], []
            for group, finished in enumerate(zip(scores[row], tickets[row], strict=True)):
                ended = [pair for pair in zip(*finished, strict=True) if pair[0] > NEVER]
                for score, ticket in ended:
                    position, candidate = divmod(ticket, self.choice.width)
                    path = self.trellis.path(each.track, position, candidate)
                    forced = self.settings.endings == "fairseq" and position == each.sentence.max_length
                    results.append(path.hypothesis(score, len(each.sentence.source), finished=True, forced=forced))
                # A group may have been dropped (`prune`); another one then has hypotheses.
                if self.settings.endings == "marian":
                    results += self._left(each, totals[row])
                elif not ended and (cut := self._cut(each, group)).score > NEVER:
                    results.append(cut)
            results.sort(key=lambda h: (not h.finished and self.settings.endings != "marian", -h.score))
            found[each.number] = results[: self.settings.n_best]
        return found

    def _cut(self, each: LiveSentence, group: int) -> IdHypothesis:
        """Return the best unfinished hypothesis of a group in which none ended, scored without a coverage term.

        The last step is ignored, because it exceeded the limit or left no beam.
        """
        length = len(self.trellis) - each.track.start - 1
        if not length:
            return IdHypothesis([], [], 0.0, 0.0, False)
        rank = group * (self.choice.beam_size // self.choice.groups)
        path = self.trellis.path(each.track, length - 1, self.trellis.beam(each.track, length - 1, rank))
        score = self.settings.penalty.score(path.total, float(length))
        return path.hypothesis(score, len(each.sentence.source), finished=False)

    def _left(self, each: LiveSentence, totals: Sequence[float]) -> list[IdHypothesis]:
        """Return the hypotheses of a sentence that have not ended, scored without a coverage term."""
        length = len(self.trellis) - each.track.start
        left = []
        for rank in (rank for rank, total in enumerate(totals) if total > NEVER):
            path = self.trellis.path(each.track, length - 1, self.trellis.beam(each.track, length - 1, rank))
            score = self.settings.penalty.score(path.total, float(length))
            left.append(path.hypothesis(score, len(each.sentence.source), finished=False))
        return left

    def _leave(self, done: Sequence[bool], parents: Tensor) -> Tensor:
        """Remove the sentences that are `done`; return the remaining rows of `parents` [N, K]."""
        stay = _compacted(done)
        self.live = [self.live[row] for row in stay]
        for row, (old, each) in enumerate(zip(stay, self.live, strict=True)):
            if row != old:
                each.track.rows.append((len(self.trellis), row))
        self.trellis.forget([each.track for each in self.live])
        on_host = torch.tensor(stay, dtype=torch.int64)
        index = on_host.to(parents.device, non_blocking=True)
        self.state = self.state.rows(index)
        self.choice.keep(index)
        self.rules.keep(index)
        if self.attended is not None:
            self.attended = self.attended.index_select(0, index)
        self.scorer.keep(on_host)
        return parents.index_select(0, index)

    def _non_finite(self, broken: Tensor) -> NonFiniteScoreError:
        """Return the error that names the first token whose scores are `broken` [N, K]."""
        row = int(broken.any(1).nonzero()[0, 0])
        return NonFiniteScoreError(
            f"the model's scores for token {int(self.state.position[row])} are not finite (NaN or infinity); the "
            "checkpoint may be from a diverged run: try an earlier one, or full precision"
        )
