"""Which waiting sentences enter a search, and when."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Admission"]

_SHARE = 4
"""New sentences come when they make up this part (one in so many) of those that are then live.

Each admission is a pass of the encoder of its own, which one sentence fills badly; a larger part leaves more rows of
the search empty meanwhile.
"""


class Admission:
    """Sentences wait in the order of `lengths` and enter in groups.

    Args:
        lengths: source tokens of each sentence.
        batch_tokens: most source tokens that are live at a time, padding counted: sentences x the longest of them.
            A sentence longer than that is live alone.
        batch_sentences: most sentences that are live at a time.
    """

    def __init__(self, lengths: Sequence[int], batch_tokens: int, batch_sentences: int) -> None:
        self.lengths = lengths
        self.batch_tokens = batch_tokens
        self.slots = min(len(lengths), batch_sentences, max(1, batch_tokens // min(lengths)))
        """Sentences that can be live at a time."""
        self._next = 0

    def group(self, live: Sequence[int]) -> range:
        """Return the sentences that enter now, when sentences of the lengths `live` are in the search.

        None enter until there is room for a group that is worth a batch of the encoder, or for all that wait.
        """
        waiting = len(self.lengths) - self._next
        longest, count = max(live, default=0), 0
        while count < waiting and len(live) + count < self.slots:
            longest = max(longest, self.lengths[self._next + count])
            together = len(live) + count + 1
            if together > 1 and together * longest > self.batch_tokens:
                break
            count += 1
        if count < waiting and count * _SHARE < len(live) + count:
            count = 0
        first, self._next = self._next, self._next + count
        return range(first, self._next)
