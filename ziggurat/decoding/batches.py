"""Ids of different length -> few, well-filled padded tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["length_batches", "padded"]


def length_batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yield batches of indices into `lengths`, longest first; sentences x longest <= `batch_tokens`.

    A sentence longer than `batch_tokens` is a batch of its own. Longest first, so that a batch that does not
    fit into memory fails at once and not after an hour. Equal lengths keep their order.
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
