"""A block of pairs on its way into a store: cleaned and segmented, not yet compared with others, overlong pairs in it.

Such blocks can be made in any order by any process, since nothing of a block depends on another. `pack` makes a file of
several for ziggurat.corpora.jobs.preparation.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ziggurat.data.cleaning.cleaner import Examples
from ziggurat.data.cleaning.comparisons import Traces

Lists = tuple[NDArray[np.int32], NDArray[np.int32]]
"""Lists of numbers: all of them, concatenated, and the length of each list."""

_IDS = pa.list_(pa.int32())
_NUMBERS = ("source", "target", "links")


@dataclass(frozen=True)
class EncodedBlock:
    """Pairs of one corpus.

    Attributes:
        corpus: number of the corpus within its split.
        read: pairs that were read.
        dropped: pairs that were dropped so far, by reason.
        repaired: pairs whose text was mended, also of those that were dropped.
        examples: some of the dropped pairs.
        traces: what is compared of each pair with others; None for development text.
        source: ids of each source [pairs], without tag.
        target: the same for the other side.
        texts: both sides as the store keeps them; None where it does not.
        links: word alignments, as the store keeps them; None where it does not.
    """

    corpus: int
    read: int
    dropped: Counter[str]
    repaired: int
    examples: Examples
    traces: Traces | None
    source: Lists
    target: Lists
    texts: tuple[Sequence[str], Sequence[str]] | None = None
    links: Lists | None = None

    def select(self, stay: NDArray[np.bool_]) -> EncodedBlock:
        """Return the pairs of the mask `stay` [pairs]."""
        if stay.all():
            return self
        return replace(
            self,
            traces=None if self.traces is None else self.traces.select(stay),
            source=_selected(self.source, stay),
            target=_selected(self.target, stay),
            texts=None
            if self.texts is None
            else (list(compress(self.texts[0], stay)), list(compress(self.texts[1], stay))),
            links=None if self.links is None else _selected(self.links, stay),
        )


def _selected(lists: Lists, stay: NDArray[np.bool_]) -> Lists:
    numbers, lengths = lists
    return numbers[np.repeat(stay, lengths)], lengths[stay]


def pack(blocks: Sequence[EncodedBlock]) -> bytes:
    """Return blocks, at least one and all of the same columns, as an Arrow file."""
    batches = [pa.record_batch(_columns(block)) for block in blocks]
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, batches[0].schema) as writer:
        for block, batch in zip(blocks, batches, strict=True):
            facts = [block.corpus, block.read, block.dropped, block.repaired, block.examples.record()]
            writer.write_batch(batch, custom_metadata={"block": json.dumps(facts, sort_keys=True)})
    return sink.getvalue()


def _columns(block: EncodedBlock) -> dict[str, pa.Array]:
    columns = {name: _list_array(lists) for name in _NUMBERS if (lists := getattr(block, name)) is not None}
    for name, array in zip(Traces._fields, block.traces or (), strict=False):
        if array is not None:
            numbers = pa.array(array.ravel(), pa.uint64())
            flat = array.ndim == 1
            columns[name] = numbers if flat else pa.FixedSizeListArray.from_arrays(numbers, array.shape[1])
    for name, side in zip(("source_text", "target_text"), block.texts or (), strict=False):
        columns[name] = pa.array(side, pa.large_string())
    return columns


def _list_array(lists: Lists) -> pa.Array:
    offsets = np.zeros(len(lists[1]) + 1, np.int32)
    np.cumsum(lists[1], out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(lists[0], pa.int32()))


def unpack(content: bytes) -> Iterator[EncodedBlock]:
    """Yield the blocks of a file that `pack` made; its checksum was compared."""
    reader = pa.ipc.open_file(pa.BufferReader(content))
    for number in range(reader.num_record_batches):
        batch, facts = reader.get_batch_with_custom_metadata(number)
        corpus, read, dropped, repaired, examples = json.loads(facts[b"block"])
        lists: dict[str, Lists | None] = dict.fromkeys(_NUMBERS)
        for name in lists.keys() & set(batch.schema.names):
            column = batch.column(name)
            offsets = column.offsets.to_numpy()
            lists[name] = column.values.to_numpy()[offsets[0] : offsets[-1]], np.diff(offsets)
        texts = [
            batch.column(f"{side}_text").to_pylist() for side in _NUMBERS[:2] if f"{side}_text" in batch.schema.names
        ]
        source, target = lists["source"], lists["target"]
        assert source is not None
        assert target is not None
        yield EncodedBlock(
            corpus,
            read,
            Counter(dropped),
            repaired,
            Examples(examples),
            _traces(batch),
            source,
            target,
            (texts[0], texts[1]) if texts else None,
            lists["links"],
        )


def _traces(batch: pa.RecordBatch) -> Traces | None:
    if "keys" not in batch.schema.names:
        return None
    arrays = {}
    for name in set(Traces._fields) & set(batch.schema.names):
        column = batch.column(name)
        flat = not pa.types.is_fixed_size_list(column.type)
        arrays[name] = (
            column.to_numpy() if flat else column.flatten().to_numpy().reshape(len(column), column.type.list_size)
        )
    return Traces(**arrays)
