"""State of a search: its live sentences, their hypotheses, and the sentences that wait to enter.

`SearchState` has one row of tensors for each live sentence. A sentence that leaves makes a hole, which a row from the
end fills (`holes_filled`). `Admission` decides when waiting sentences enter, in groups that fill a batch of the
encoder.

Shapes: N live sentences, K beams, C candidates, G groups, R finished hypotheses kept of each group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ziggurat.translate.choice import SearchSettings, Sentence
from ziggurat.translate.hypotheses import NEVER, RowTrack


class LiveSentence(NamedTuple):
    """A sentence in the search."""

    number: int
    """Its place in the input."""
    sentence: Sentence
    track: RowTrack


class SearchState(NamedTuple):
    """Hypotheses of the live sentences, one row for each sentence."""

    tokens: Tensor  # [N, K] last tokens
    total: Tensor  # [N, K] log-probabilities of the beams, float64
    score: Tensor  # [N, G, R] penalised scores of finished hypotheses, best first
    ticket: Tensor  # [N, G, R] where they ended: position * C + candidate
    best: Tensor  # [N] highest log-probability of a finished hypothesis; kept up for pruning alone
    ended: Tensor  # [N] hypotheses that have ended so far, those that are not kept included
    position: Tensor  # [N] tokens so far
    max_length: Tensor  # [N]
    min_length: Tensor  # [N]
    source_length: Tensor  # [N]

    @classmethod
    def entering(cls, sentences: Sequence[Sentence], settings: SearchSettings, groups: int) -> SearchState:
        """Return the rows of sentences before their first step.

        All beams of a group start from one token: only the first is alive, or each hypothesis would appear K times.
        """
        count, beams, device = len(sentences), settings.beam_size, settings.device
        total = torch.full((count, beams), NEVER, dtype=torch.float64, device=device)
        total[:, :: beams // groups] = 0.0
        kept = (count, groups, -(-settings.n_best // groups))
        limits = [(0, s.max_length, min(s.min_length, s.max_length), len(s.source)) for s in sentences]
        return cls(
            torch.full((count, beams), settings.bos, device=device),
            total,
            torch.full(kept, NEVER, dtype=torch.float64, device=device),
            torch.zeros(kept, dtype=torch.int64, device=device),
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


def holes_filled(done: Sequence[bool]) -> list[int]:
    """Return the rows that stay when those that are `done` leave; rows from the end fill the holes."""
    stay = [row for row, is_done in enumerate(done) if not is_done]
    fill = (row for row in reversed(stay) if row >= len(stay))
    return [next(fill) if done[row] else row for row in range(len(stay))]


_GROUP_PART = 4
"""New sentences enter once they are one in so many of the sentences then live.

Each admission is a pass of the encoder, which a single sentence fills badly; but the longer a group is waited for, the
more rows of the search stay empty.
"""


class Admission:
    """Sentences that wait, in the order of `lengths`, and enter in groups.

    Args:
        lengths: source tokens of each sentence.
        batch_tokens: most source tokens that are live at a time, padding counted: sentences x the longest of them.
            A sentence longer than that is live alone.
        batch_sentences: most sentences that are live at a time.
        slots: the same where more sentences will come; None: no more than `lengths` can need.
    """

    def __init__(
        self, lengths: Sequence[int], batch_tokens: int, batch_sentences: int, slots: int | None = None
    ) -> None:
        self.batch_tokens = batch_tokens
        fit = max(1, batch_tokens // min(lengths, default=1))
        self.slots = slots or max(1, min(len(lengths), batch_sentences, fit))
        """Sentences that can be live at a time."""
        self._waiting = deque(enumerate(lengths))

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, number: int, length: int) -> None:
        """Let one more sentence wait behind the others."""
        self._waiting.append((number, length))

    def remove(self, numbers: Container[int]) -> None:
        """Let the sentences with these numbers wait no longer."""
        self._waiting = deque(pair for pair in self._waiting if pair[0] not in numbers)

    def group(self, live: Sequence[int]) -> list[int]:
        """Return the numbers of the sentences that enter now, when those of the lengths `live` are in the search.

        None enter until there is room for a group that is worth a pass of the encoder, or for all that wait.
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


def length_batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yield batches of indices into `lengths`, longest first; sentences x longest <= `batch_tokens`.

    A sentence longer than `batch_tokens` is a batch alone. Longest first, so that a batch that does not fit into memory
    fails at once and not after an hour. Equal lengths keep their order.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def padded(rows: Sequence[Sequence[int]], pad: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Return ids [rows, longest] filled up with `pad` on the right, and their mask, True for real tokens."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows], dtype=torch.int64)
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(longest) < lengths[:, None]
    return ids.to(device), mask.to(device)
