"""Padded tensors from sentence pairs, and the thread that prepares them ahead.

`collate` makes a `Batch`; `Background` runs any iterator in a thread. In ziggurat.data, only this module and
ziggurat.data.loader import torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from queue import Empty, Queue
from threading import Event, Thread, current_thread
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ziggurat.data.batching import round_up
from ziggurat.data.subword import Tokenizer
from ziggurat.data.units import PieceLinks

Ids = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Batch:
    """Sentence pairs as padded tensors. Masks are True where there is a token; S and T are the padded lengths."""

    source: torch.Tensor
    """`[batch, S]` int64: ids, end-of-sentence, padding."""
    source_mask: torch.Tensor
    """`[batch, S]` bool."""
    target_in: torch.Tensor
    """`[batch, T]` int64, the decoder's input: begin-of-sentence, ids, padding."""
    target_out: torch.Tensor
    """`[batch, T]` int64, the expected output: ids, end-of-sentence, padding."""
    target_mask: torch.Tensor
    """`[batch, T]` bool, the same for `target_in` and `target_out`."""
    indices: NDArray[np.int64]
    """`[batch]` int64, indices of the pairs in the table."""
    source_tokens: int
    """Source tokens, end-of-sentence included, padding not; kept here so that no device has to be asked."""
    target_tokens: int
    """Target tokens, likewise."""
    link_places: torch.Tensor | None = None
    """`[links]` int64: word alignments on pieces, as indices into the flattened attention `[batch, T, S]`, ascending;
    None where the batch has none."""
    link_shares: torch.Tensor | None = None
    """`[links]` float32: 1 / number of source tokens that the link's target token is linked to."""
    seed: int = 0
    """Seed of the random numbers that training draws on this batch (dropout): a function of `training.seed` and the
    batch's position in the data, so that they are the same in any process and after a resume."""

    @property
    def sentences(self) -> int:
        """Number of sentence pairs."""
        return len(self.indices)

    @property
    def shape_in_words(self) -> str:
        """Its size, padding included, for messages."""
        sentences, source = self.source.shape
        pairs = f"{sentences} sentence pair{'s' if sentences > 1 else ''}"
        return f"{pairs} of {source} source and {self.target_in.shape[1]} target tokens"

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return this batch with its tensors on `device`."""
        return self.with_each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def with_each(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """Return this batch with `function` applied to each of its tensors."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        changed: dict[str, Any] = {name: function(tensor) for name, tensor in tensors.items()}
        return replace(self, **changed)

    def idle(self) -> Batch:
        """Return up to two pairs of this batch, every target token masked and no links, so loss and gradients are 0.

        For a process that has no batch in an update where others have one: it must take part in their collectives.
        """
        few: dict[str, Any] = {
            name: getattr(self, name)[:2] for name in ("source", "source_mask", "target_in", "target_out")
        }
        few |= {"target_mask": torch.zeros_like(self.target_mask[:2]), "link_places": None, "link_shares": None}
        return replace(self, **few, indices=self.indices[:0], source_tokens=0, target_tokens=0)


class SpecialIds(NamedTuple):
    """Ids of padding, begin- and end-of-sentence on the two sides."""

    source_pad: int
    source_eos: int
    target_pad: int
    target_bos: int
    target_eos: int

    @classmethod
    def of(cls, source: Tokenizer, target: Tokenizer) -> SpecialIds:
        """Return the ids of the two sides' tokenizers."""
        return cls(source.pad, source.eos, target.pad, target.bos, target.eos)


def collate(
    sources: Sequence[Ids],
    targets: Sequence[Ids],
    indices: NDArray[np.int64],
    special: SpecialIds,
    length_multiple: int = 1,
    links: PieceLinks | None = None,
) -> Batch:
    """Pad sentence pairs, given without begin- and end-of-sentence, into a batch.

    `indices` `[batch]` become those of the batch; padded lengths are rounded up to a multiple of `length_multiple`.
    `links` are those of the pairs.
    """
    source, source_mask = _padded(sources, special.source_pad, special.source_eos, length_multiple)
    target_out, target_mask = _padded(targets, special.target_pad, special.target_eos, length_multiple)
    # target_out shifted right by one, without its end-of-sentence: the tokens known before each one to predict.
    target_in = np.full_like(target_out, special.target_pad)
    target_in[:, 0] = special.target_bos
    target_in[:, 1:] = np.where(target_mask[:, 1:], target_out[:, :-1], special.target_pad)
    aligned: dict[str, Any] = {}
    if links is not None and len(links.row):
        places = (links.row * target_out.shape[1] + links.target) * source.shape[1] + links.source
        aligned = {"link_places": torch.from_numpy(places), "link_shares": torch.from_numpy(links.shares())}
    return Batch(
        source=torch.from_numpy(source),
        source_mask=torch.from_numpy(source_mask),
        target_in=torch.from_numpy(target_in),
        target_out=torch.from_numpy(target_out),
        target_mask=torch.from_numpy(target_mask),
        indices=indices,
        source_tokens=int(source_mask.sum()),
        target_tokens=int(target_mask.sum()),
        **aligned,
    )


def _padded(
    sentences: Sequence[Ids], pad: int, eos: int, length_multiple: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the sentences, each followed by `eos` and padding, and the mask of their tokens, both `[batch, width]`."""
    lengths = np.fromiter(map(len, sentences), dtype=np.int32, count=len(sentences))
    width = int(round_up(lengths.max() + 1, length_multiple))
    places = np.arange(width)
    padded = np.full((len(sentences), width), pad, dtype=np.int64)
    padded[places < lengths[:, None]] = np.concatenate(sentences)
    padded[np.arange(len(sentences)), lengths] = eos
    return padded, places <= lengths[:, None]


Item = TypeVar("Item")


class _Failure(NamedTuple):
    error: BaseException


class Background(Generic[Item]):
    """Iterator that runs another one in a thread, at most `depth` items ahead, in the same order."""

    def __init__(self, items: Iterator[Item], depth: int) -> None:
        self._queue: Queue[Item | _Failure] = Queue(depth)
        stop = Event()
        # Neither the thread nor the finaliser refers to this object, so dropping the last reference ends the thread.
        # The finaliser also runs at exit: a thread that is inside torch while the interpreter shuts down can crash it.
        thread = Thread(target=_fill, args=(items, self._queue, stop), name="ziggurat-loader", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _end, self._queue, stop, thread)

    def __next__(self) -> Item:
        item = self._queue.get()
        if isinstance(item, _Failure):
            self.close()
            raise item.error
        return item


def _fill(items: Iterator[Item], queue: Queue[Item | _Failure], stop: Event) -> None:
    try:
        while not stop.is_set():
            queue.put(next(items))
    except BaseException as error:  # of any kind: the consumer would otherwise wait for ever
        queue.put(_Failure(error))


def _end(queue: Queue[Any], stop: Event, thread: Thread) -> None:
    """End the thread."""
    stop.set()
    while True:  # emptying the queue unblocks a waiting `put`, after which the thread sees `stop`
        try:
            queue.get_nowait()
        except Empty:
            break
    if thread is not current_thread():  # the garbage collector may call this in any thread
        thread.join()
