"""Lexical shortlists in the search: scores only for target tokens that the source sentence allows (Jean et al. 2015).

Shapes: n new sentences, N live ones, K beams, S source, V vocabulary, U columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ziggurat.data.shortlist import ShortlistTable
from ziggurat.model.embedding import OutputProjection
from ziggurat.model.fast.packed import PackedOutput


class Shortlist:
    """Target tokens that source sentences allow.

    Args:
        table: candidates for each source id.
        size: number of target ids of the tokenizer; a model may have rows beyond them, which are never allowed.
        device: where the masks are built.
    """

    def __init__(self, table: ShortlistTable, size: int, device: torch.device | str = "cpu") -> None:
        self.size = size
        self._candidates = torch.from_numpy(table.candidates).to(device)
        self._always = torch.from_numpy(table.always).to(device, torch.int64)

    def allowed(self, source: Tensor, source_mask: Tensor, vocabulary_size: int) -> Tensor:
        """Return bool [n, V] for source ids [n, S] (mask: True for real tokens): a function of each sentence alone."""
        # Column `size` is cleared below: fillers of the table write there, and positions beyond a source's end. A model
        # without rows beyond the tokenizer's ids needs one more column for it.
        mask = torch.zeros(len(source), vocabulary_size + 1, dtype=torch.bool, device=source.device)
        ids = self._candidates[source].masked_fill(~source_mask[..., None], self.size)
        mask.scatter_(1, ids.flatten(1).long(), True)
        mask[:, self._always] = True
        mask[:, self.size :] = False
        return mask[:, :-1]


class ShortlistedOutput:
    """Output projection for live sentences: one product over the tokens that any of them allows, -inf elsewhere.

    Args:
        output: the whole projection.
        shortlist: tokens that each sentence allows.
    """

    def __init__(self, output: OutputProjection | PackedOutput, shortlist: Shortlist) -> None:
        self._whole = output
        self._shortlist = shortlist
        vocabulary = output.weight.shape[0]
        self._allowed = torch.zeros(0, vocabulary, dtype=torch.bool, device=output.weight.device)
        self._columns = self._allowed[:0].any(0).nonzero()[:, 0]
        self._forbidden = self._allowed[:, :0]
        self._product: Callable[[Tensor], Tensor] = output
        self._scores: Tensor | None = None

    def admit(self, source: Tensor, source_mask: Tensor) -> None:
        """Take in new sentences, ids [n, S], behind the live ones."""
        new = self._shortlist.allowed(source, source_mask, self._allowed.shape[1])
        self._allowed = torch.cat((self._allowed, new))
        self._columns = self._allowed.any(0).nonzero()[:, 0]
        self._forbidden = ~self._allowed.index_select(1, self._columns)
        self._product = self._whole.restricted(self._columns)

    def keep(self, sentences: Tensor) -> None:
        """Let row i be the old row `sentences`[i]."""
        # Columns that no sentence needs any more stay until the next admission: restricting the projection copies rows.
        sentences = sentences.to(self._allowed.device)
        self._allowed = self._allowed.index_select(0, sentences)
        self._forbidden = self._forbidden.index_select(0, sentences)

    def __call__(self, hidden: Tensor, beams: int) -> Tensor:
        """Return scores [N, `beams`, V] for hidden states [N, `beams` or 1, d], valid until the next call."""
        product = self._product(hidden)
        some = (product.float() if product.element_size() < torch.float32.itemsize else product).masked_fill_(
            self._forbidden[:, None], -math.inf
        )
        shape = (len(hidden), beams, self._allowed.shape[1])
        # The same memory at every step: allocating it costs more than filling it.
        if self._scores is None or self._scores.dtype != some.dtype or self._scores.numel() < math.prod(shape):
            self._scores = some.new_empty(math.prod(shape))
        scores = self._scores[: math.prod(shape)].view(shape).fill_(-math.inf)
        return scores.index_copy_(2, self._columns, some.expand(-1, beams, -1))
