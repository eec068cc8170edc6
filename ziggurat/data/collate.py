"""Sentence pairs as padded tensors.

Only this module and ziggurat.data.loader of ziggurat.data need torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ziggurat.data.batching import round_up
from ziggurat.data.subword import Tokenizer

__all__ = ["Batch", "Ids", "SpecialIds", "collate"]

Ids = NDArray[np.int32]


class SpecialIds(NamedTuple):
    """The ids that frame and fill sentences."""

    source_pad: int
    source_eos: int
    target_pad: int
    target_bos: int
    target_eos: int

    @classmethod
    def of(cls, source: Tokenizer, target: Tokenizer) -> SpecialIds:
        """Take them from the tokenizers of the two sides."""
        return cls(source.pad, source.eos, target.pad, target.bos, target.eos)


@dataclass(frozen=True, eq=False)
class Batch:
    """Sentence pairs as padded tensors. Masks are True where there is a token; S and T are padded lengths."""

    source: torch.Tensor
    """`[batch, S]` int64: ids, end-of-sentence, padding."""
    source_mask: torch.Tensor
    """`[batch, S]` bool."""
    target_in: torch.Tensor
    """`[batch, T]` int64, what the decoder reads: begin-of-sentence, ids, padding."""
    target_out: torch.Tensor
    """`[batch, T]` int64, what it should say: ids, end-of-sentence, padding."""
    target_mask: torch.Tensor
    """`[batch, T]` bool, the same for `target_in` and `target_out`."""
    indices: NDArray[np.int64]
    """`[batch]` which pairs of the table these are."""
    source_tokens: int
    """Source tokens, end-of-sentence counted, padding not; known without asking a device."""
    target_tokens: int
    """Target tokens, likewise."""
    seed: int = 0
    """Of the random numbers that training draws on this batch (dropout): a function of `training.seed` and the batch's
    place in the data, so that they are the same whichever process has it, and after a resume."""

    @property
    def sentences(self) -> int:
        """Number of sentence pairs."""
        return len(self.indices)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return this batch with its tensors on `device`."""
        names = ("source", "source_mask", "target_in", "target_out", "target_mask")
        moved: dict[str, Any] = {name: getattr(self, name).to(device, non_blocking=non_blocking) for name in names}
        return replace(self, **moved)

    def idle(self) -> Batch:
        """Return two sentence pairs of it, or its only one, that count for nothing: no target token is real.

        Their loss is 0 and so is every gradient; for a process that has nothing to do while others have.
        """
        few: dict[str, Any] = {
            name: getattr(self, name)[:2] for name in ("source", "source_mask", "target_in", "target_out")
        }
        hidden = torch.zeros_like(self.target_mask[:2])
        return replace(self, **few, target_mask=hidden, indices=self.indices[:0], source_tokens=0, target_tokens=0)


def collate(
    sources: Sequence[Ids],
    targets: Sequence[Ids],
    indices: NDArray[np.int64],
    special: SpecialIds,
    length_multiple: int = 1,
) -> Batch:
    """Pad sentence pairs, given without begin- and end-of-sentence, into a batch.

    `indices` `[batch]` are kept for reference; padded lengths are rounded up to a multiple of `length_multiple`.
    """
    source, source_mask = _padded(sources, special.source_pad, special.source_eos, length_multiple)
    target_out, target_mask = _padded(targets, special.target_pad, special.target_eos, length_multiple)
    # One to the right, with the end replaced by padding: what is known before each token of target_out.
    target_in = np.full_like(target_out, special.target_pad)
    target_in[:, 0] = special.target_bos
    target_in[:, 1:] = np.where(target_mask[:, 1:], target_out[:, :-1], special.target_pad)
    return Batch(
        source=torch.from_numpy(source),
        source_mask=torch.from_numpy(source_mask),
        target_in=torch.from_numpy(target_in),
        target_out=torch.from_numpy(target_out),
        target_mask=torch.from_numpy(target_mask),
        indices=indices,
        source_tokens=int(source_mask.sum()),
        target_tokens=int(target_mask.sum()),
    )


def _padded(
    sentences: Sequence[Ids], pad: int, eos: int, length_multiple: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Stack sentences `[batch, width]`, each followed by `eos` and padding, and say where the tokens are."""
    lengths = np.fromiter(map(len, sentences), dtype=np.int32, count=len(sentences))
    width = int(round_up(lengths.max() + 1, length_multiple))
    places = np.arange(width)
    padded = np.full((len(sentences), width), pad, dtype=np.int64)
    padded[places < lengths[:, None]] = np.concatenate(sentences)
    padded[np.arange(len(sentences)), lengths] = eos
    return padded, places <= lengths[:, None]
