"""Attention masks, the live hypotheses of a search, and the attention caches kept between decoding steps."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

_MOST_SEQUENCES = 65_535
"""Maximum number of sequences in one call of flash attention, an axis of the kernel's grid, whose size CUDA limits."""


class SequenceBounds(NamedTuple):
    """A padded batch for flash attention, laid end to end and cut into sequences that attend only to themselves.

    Each sentence is one sequence and the padding after it another, which attends only to itself and is never read. So
    nothing is packed or copied, no size depends on the data, and the kernel still skips padding. (Packing the real
    tokens would also save the padding's share of the products, 3 % in batches of similar lengths, but it would wait for
    the device, and every batch would have a different shape.)

    Attributes:
        queries: int32 [2 batch + 1], the rows among batch * queries at which the sequences begin, and the end.
        keys: the same among the batch * keys rows.
    """

    queries: Tensor
    keys: Tensor


class Mask(NamedTuple):
    """The keys that queries may attend to.

    Attributes:
        bias: added to the logits: 0, or -inf at hidden keys; broadcasts to [batch, heads, queries, keys]. It is the
            whole mask, for kernels that cannot use the other two.
        causal: whether the mask hides only the future.
        bounds: the same mask for flash attention, if it hides only padding; None on devices without it.
    """

    bias: Tensor
    causal: bool = False
    bounds: SequenceBounds | None = None


def padding_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [batch, 1, 1, keys] with 0 at real tokens and -inf at padding, for `mask` [batch, keys] (True: real).

    A softmax over padding alone would be undefined; every sentence has one real token, end-of-sentence.
    """
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return bias.masked_fill_(~mask, -math.inf)[:, None, None, :]


def padding_mask(mask: Tensor, dtype: torch.dtype, queries: int | None = None) -> Mask:
    """Return the mask that hides padding, which follows the real tokens, for `mask` [batch, keys] (True: real).

    `queries` is the number of queries per sentence; None: the keys themselves attend.
    """
    bounded = _takes_bounds(mask.device) and 2 * len(mask) <= _MOST_SEQUENCES
    return Mask(padding_bias(mask, dtype), bounds=sequence_bounds(mask, queries) if bounded else None)


def causal_mask(length: int, dtype: torch.dtype, device: torch.device) -> Mask:
    """Return the mask that hides the future; its bias is [1, 1, length, length]: 0 where key <= query, else -inf."""
    bias = torch.full((length, length), -math.inf, dtype=dtype, device=device).triu_(1)[None, None]
    return Mask(bias, causal=True)


def sequence_bounds(mask: Tensor, queries: int | None = None) -> SequenceBounds:
    """Return the bounds of a padded batch; the arguments are those of `padding_mask`."""
    batch, length = mask.shape
    begin = torch.arange(batch + 1, device=mask.device)
    keys = _interleaved(begin * length, begin[:-1] * length + mask.sum(1))
    # Self-attention: a sentence's padding attends to itself. Queries that are not the keys all attend to the sentence's
    # real keys, and the sequence of its padding has no queries.
    return SequenceBounds(keys if queries is None else _interleaved(begin * queries, begin[1:] * queries), keys)


def _interleaved(begin: Tensor, border: Tensor) -> Tensor:
    """Return [begin[0], border[0], begin[1], ..., begin[batch]] in int32."""
    return torch.cat([torch.stack([begin[:-1], border], dim=1).flatten(), begin[-1:]]).int()


def _takes_bounds(device: torch.device) -> bool:
    """Return whether flash attention runs on this device: an NVIDIA GPU of the Ampere generation or later."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.backends.cuda.is_flash_attention_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


BLOCK = 32
"""BLOCK is the number of positions by which caches and masks grow."""


class RowMoves(NamedTuple):
    """Rows of a batch that move because others have left: row `source[i]` goes to `target[i]`, [rows] each."""

    target: Tensor
    source: Tensor

    def within(self, buffer: Tensor) -> None:
        """Move rows of `buffer` [slots, ...]."""
        if self.target.numel():
            buffer[self.target] = buffer[self.source]


class LiveBeams:
    """N sentences of K beams each; sentences may be at different positions.

    In the caches, the keys and values of a sentence's beams are adjacent, position by position (entry t * K + b is that
    of the token that beam b was fed at position t), and never move. When beams are reordered, only the bias of `seen`
    is reordered: it hides from each hypothesis the entries of others. So no cache is copied, whatever the search does.

    New sentences are appended (`admit`); the search decides which stay (`keep`). Caches have memory for `room`
    sentences, not for all slots: there are enough slots for the shortest sentences, and only a few long ones are live
    at a time.

    Args:
        beam_size: K.
        slots: the largest number of sentences at a time.

    Attributes:
        count: N.
        room: the number of sentences for which the caches have memory.
        longest: the largest of `positions`.
        in_step: whether all sentences are at the same position.
        source: source positions S of the longest sentence at the latest `admit`.
        first: whether all sentences take their first step. All beams of a sentence start from the same token, so that
            step runs one beam, [N, 1, d_model] for [N, K, d_model], and its result holds for the others.
    """

    def __init__(self, beam_size: int, slots: int) -> None:
        self.beam_size = beam_size
        self.slots = slots
        self.count = 0
        self.room = 0
        self.longest = 0
        self.in_step = True
        self.source = 0
        self.first = True
        self._steps = 0
        # For each sentence, the step at which it was admitted and its source positions: kept on the host, because
        # asking the device would wait for it.
        self._born: list[int] = []
        self._lengths: list[int] = []
        self._newest: dict[int, list[tuple[int, Tensor, Tensor]]] = {}
        self._positions = torch.empty(0)
        self._bias = torch.empty(0)
        self._own = torch.empty(0)
        self._padding = torch.empty(0)

    @property
    def positions(self) -> Tensor:
        """Number of tokens that each sentence has been fed before this step, int64 [N]."""
        return self._positions[: self.count]

    def seen(self, entries: int) -> Mask | None:
        """Return the mask that hides from each hypothesis the entries of others, for the first `entries` of the caches.

        The bias is [N, 1, K, entries], with K = 1 in a first step. None: nothing is hidden.
        """
        if self.first:
            return None if entries == 1 else Mask(self._bias[: self.count, None, :1, :entries])
        if self.beam_size == 1 and self.in_step and entries == self.longest + 1:
            return None
        return Mask(self._bias[: self.count, None, :, :entries])

    @property
    def padding(self) -> Mask:
        """Mask that hides padding of the memory; its bias is [N, 1, 1, S]."""
        return Mask(self._padding[: self.count, None, None, : self.source])

    def distances(self, entries: int) -> Tensor:
        """Return the positions of the first `entries` of the caches relative to that of each sentence, [N, entries]."""
        positions = torch.arange(entries, device=self._positions.device) // self.beam_size
        return positions - self.positions[:, None]

    def newest(self, size: int) -> list[tuple[int, Tensor, Tensor]]:
        """Return where this step's positions are in blocks of `size`: (block number, rows, offsets in the block).

        Computed once for all layers, from values on the host; otherwise each layer would wait for the device.
        """
        if size not in self._newest:
            of_blocks: dict[int, list[tuple[int, int]]] = {}
            for row, born in enumerate(self._born):
                number, place = divmod(self._steps - born, size)
                of_blocks.setdefault(number, []).append((row, place))
            self._newest[size] = []
            for number, pairs in of_blocks.items():
                both = torch.tensor([*zip(*pairs, strict=True)]).to(self._positions.device, non_blocking=True)
                rows, places = both.unbind()
                self._newest[size].append((number, rows, places))
        return self._newest[size]

    def admit(self, mask: Tensor, like: Tensor) -> slice:
        """Add n sentences with source `mask` [n, source] (True: real token); return their rows.

        `like` has the type and device of the decoder's activations. Raises ValueError when there are too few slots.
        """
        new = slice(self.count, self.count + len(mask))
        if new.stop > self.slots:
            raise ValueError(f"{new.stop} sentences, but only {self.slots} slots")
        if new.stop > self.room:
            self.room = min(self.slots, max(new.stop, 2 * self.room))  # doubled, so that growth is rare
        if not self._positions.numel():
            beams = self.beam_size
            self._positions = torch.zeros(self.slots, dtype=torch.int64, device=like.device)
            self._bias = like.new_full((self.slots, beams, BLOCK * beams), -math.inf)
            self._own = like.new_full((beams, beams), -math.inf).fill_diagonal_(0)
            self._padding = like.new_full((self.slots, 0), -math.inf)
        length = mask.shape[1]
        # A multiple of eight: fused GPU kernels accept no other row length, and each layer would copy rows in each
        # step.
        if (missing := length + -length % 8 - self._padding.shape[1]) > 0:
            self._padding = torch.cat([self._padding, like.new_full((self.slots, missing), -math.inf)], dim=1)
        self._positions[new] = 0
        self._bias[new] = -math.inf
        self._padding[new] = -math.inf
        self._padding[new, :length].masked_fill_(mask, 0)
        self._born += [self._steps] * len(mask)
        self._lengths += mask.sum(1).tolist()
        self.source = max(self._lengths)
        self._recount()
        return new

    def begin(self) -> None:
        """Begin a step: let each beam see the token that it is about to be fed."""
        self._newest.clear()
        beams, at = self.beam_size, self.longest
        if (at + 1) * beams > self._bias.shape[2]:
            more = self._bias.new_full((self.slots, beams, BLOCK * beams), -math.inf)
            self._bias = torch.cat([self._bias, more], dim=2)
        if self.first:
            self._bias[: self.count, :, 0] = 0
        elif self.in_step:
            self._bias[: self.count, :, at * beams : (at + 1) * beams] = self._own
        else:
            entries = self._bias.unflatten(2, (-1, beams))
            entries[torch.arange(self.count, device=self._bias.device), :, self.positions] = self._own

    def end(self) -> None:
        """End a step: every sentence is one position further."""
        self._positions[: self.count] += 1
        self._steps += 1
        self.longest += 1
        self.first = False

    def follow(self, parents: Tensor) -> None:
        """Make beam k of sentence i continue its old beam parents[i, k]; `parents` is [N, K]."""
        if self.beam_size > 1:
            seen = self._bias[: self.count, :, : self.longest * self.beam_size]
            seen.copy_(seen.gather(1, parents[..., None].expand(-1, -1, seen.shape[2])))

    def keep(self, sentences: Tensor) -> RowMoves:
        """Make row i the old row sentences[i], [new N] of them; return the moves for the caches to make.

        `sentences` is on the CPU, because fetching it would wait for the device.
        """
        target = (sentences != torch.arange(len(sentences))).nonzero()[:, 0]
        both = torch.stack((target, sentences[target])).to(self._positions.device, non_blocking=True)
        moves = RowMoves(*both.unbind())
        for buffer in (self._positions, self._bias, self._padding):
            moves.within(buffer)
        order = sentences.tolist()
        self._born = [self._born[row] for row in order]
        self._lengths = [self._lengths[row] for row in order]
        self._recount()
        return moves

    def _recount(self) -> None:
        """Update the attributes that depend on the sentences now in the batch."""
        self.count = len(self._born)
        first = min(self._born, default=self._steps)
        self.longest = self._steps - first
        self.in_step = first == max(self._born, default=self._steps)
        self.first = self.longest == 0


class BeamCache(Protocol):
    """State of the live hypotheses between decoding steps, which follows every choice of the search.

    What starts new sentences depends on the state: their memory, their rows, or both.
    """

    def follow(self, parents: Tensor) -> None:
        """Make beam k of sentence i continue its old beam parents[i, k]; `parents` is [N, K]."""

    def keep(self, moves: RowMoves) -> None:
        """Move rows; `LiveBeams.keep` has already counted the live ones."""


_DENSE_BLOCK = 8
"""Positions in a block that is always read whole: a larger block reads unused entries, smaller ones need more
products."""


class KeptWeights:
    """Holder in which an attention to the memory stores the `weights` [batch, queries, source] of its latest use.

    They are those before dropout, of one head, counted from 0, or the mean over all.
    """

    def __init__(self, head: int | None = None) -> None:
        self.head = head
        self.weights: Tensor | None = None

    def take(self, weights: Tensor) -> None:
        """Keep the requested part of `weights` [batch, heads, queries, source]."""
        self.weights = weights.mean(dim=1) if self.head is None else weights[:, self.head]


class CrossAttentionCache:
    """Keys and values of the memory, [batch, heads, source, d_head]: one row per sentence, shared by its beams.

    `mask` hides padding, if any; attention weights are stored in `kept`, if given.
    """

    def __init__(self, key: Tensor, value: Tensor, mask: Mask | None, kept: KeptWeights | None = None) -> None:
        self.key = key
        self.value = value
        self.mask = mask
        self.kept = kept

    @property
    def weights(self) -> Tensor | None:
        """[batch, queries, source], the attention weights of the latest use, if they are kept."""
        return None if self.kept is None else self.kept.weights


class LiveMemory(CrossAttentionCache):
    """Keys and values of the memory of the live sentences, which enter and leave the batch."""

    def __init__(self, live: LiveBeams, kept: KeptWeights | None = None) -> None:
        super().__init__(torch.empty(0), torch.empty(0), None, kept)
        self.live = live
        self._buffers: list[Tensor] = []

    def admit(self, memory: CrossAttentionCache, rows: slice) -> None:
        """Copy in the projected memory of new sentences, which have `rows` among the live ones."""
        new = (memory.key, memory.value)
        size = self.live.room, self.live.source
        if not self._buffers or (len(self._buffers[0]), self._buffers[0].shape[2]) != size:
            self._buffers = self._resized(memory.key)
        for buffer, part in zip(self._buffers, new, strict=True):
            buffer[rows, :, : part.shape[2]] = part[:, :, : buffer.shape[2]]
        self._refresh()

    def keep(self, moves: RowMoves) -> None:
        """Move rows."""
        for buffer in self._buffers:
            moves.within(buffer)
        self._refresh()

    def _resized(self, like: Tensor) -> list[Tensor]:
        """Return buffers exactly as wide as the longest source, since matrix products are fastest on dense factors."""
        shape = (self.live.room, like.shape[1], self.live.source, like.shape[3])
        larger = [like.new_zeros(shape), like.new_zeros(shape)]
        for new, old in zip(larger, self._buffers, strict=False):
            rows, width = min(self.live.count, len(old)), min(new.shape[2], old.shape[2])
            new[:rows, :, :width] = old[:rows, :, :width]
        return larger

    def _refresh(self) -> None:
        self.key, self.value = (buffer[: self.live.count] for buffer in self._buffers)
        self.mask = self.live.padding


class KeyValueBlock(NamedTuple):
    """Keys and values of some positions of the live hypotheses, [N, heads, entries, d_head] each."""

    key: Tensor
    value: Tensor


class SelfAttentionCache:
    """Keys and values of the tokens that the live hypotheses were fed, in the order of LiveBeams.

    They are stored in blocks of a fixed number of positions. When one is full, another is added, so nothing is copied
    unless there are more sentences than ever before.
    """

    def __init__(self, live: LiveBeams) -> None:
        self.live = live
        self._blocks: list[KeyValueBlock] = []  # for `live.room` sentences

    def append(self, key: Tensor, value: Tensor) -> list[KeyValueBlock]:
        """Add one position, [N, heads, K, d_head] each (K = 1 in a first step); return the blocks up to it.

        The last block may end with entries of later positions, which `LiveBeams.seen` hides.
        """
        live, beams = self.live, self.live.beam_size
        # oneDNN copies factors that are not dense before it multiplies them in bf16, so whole blocks are read.
        whole = key.dtype == torch.bfloat16 and key.device.type == "cpu"
        size = _DENSE_BLOCK if whole else BLOCK
        number, place = divmod(live.longest, size)
        if number == len(self._blocks):
            # The memory must be initialised: hidden entries have weight 0, but 0 times a NaN is NaN.
            shape = (live.room, key.shape[1], size * beams, key.shape[3])
            self._blocks.append(KeyValueBlock(key.new_zeros(shape), value.new_zeros(shape)))
        begin, end = place * beams, place * beams + key.shape[2]
        if live.in_step:
            for buffer, part in zip(self._blocks[number], (key, value), strict=True):
                buffer[: live.count, :, begin:end] = part
        else:
            self._scatter(key, value, size)
        blocks = [KeyValueBlock(*(part[: live.count] for part in block)) for block in self._blocks[: number + 1]]
        if not whole:
            blocks[-1] = KeyValueBlock(*(part[:, :, :end] for part in blocks[-1]))
        return blocks

    def _scatter(self, key: Tensor, value: Tensor, size: int) -> None:
        """Write one position of sentences that are at different positions."""
        for number, rows, places in self.live.newest(size):
            for buffer, part in zip(self._blocks[number], (key, value), strict=True):
                buffer.unflatten(2, (size, self.live.beam_size))[rows, :, places] = part[rows]

    def admit(self, rows: slice) -> None:
        """Make room for new sentences; the entries of those that had `rows` before are hidden from them."""
        if not self._blocks:
            return
        live = self.live
        needed = 1 + live.longest // (self._blocks[0].key.shape[2] // live.beam_size)
        # Further blocks belonged to longer sentences that have left. Twice as many are kept, since the longest length
        # varies.
        del self._blocks[2 * needed :]
        if (missing := live.room - len(self._blocks[0].key)) > 0:
            self._blocks = [
                KeyValueBlock(*(torch.cat((part, part.new_zeros(missing, *part.shape[1:]))) for part in block))
                for block in self._blocks
            ]

    def follow(self, parents: Tensor) -> None:
        """Do nothing: when beams are reordered, their masks change, but not the entries."""

    def keep(self, moves: RowMoves) -> None:
        """Move rows."""
        for block in self._blocks:
            for buffer in block:
                moves.within(buffer)


class StateCache:
    """One state of every live hypothesis, [slots, K, d_model], in at least fp32, whatever the positions."""

    def __init__(self, live: LiveBeams) -> None:
        self.live = live
        self.state: Tensor | None = None

    def current(self, x: Tensor) -> Tensor:
        """Return the states of the live hypotheses, [N, K, d_model], to be changed in place; 0 before any position.

        `x` [N, K or 1, d_model] is the new position.
        """
        if self.state is None:
            # In a half type, a growing sum would stop growing and a cell would not decay.
            dtype = torch.promote_types(x.dtype, torch.float32)
            self.state = x.new_zeros(self.live.slots, self.live.beam_size, x.shape[2], dtype=dtype)
        return self.state[: self.live.count]

    def admit(self, rows: slice) -> None:
        """Start new sentences, which have `rows` among the live ones, from 0."""
        if self.state is not None:
            self.state[rows] = 0.0

    def follow(self, parents: Tensor) -> None:
        """Make beam k of sentence i continue its old beam parents[i, k]; `parents` is [N, K]."""
        if self.state is not None and self.live.beam_size > 1:
            state = self.state[: self.live.count]
            state.copy_(state.gather(1, parents[..., None].expand_as(state)))

    def keep(self, moves: RowMoves) -> None:
        """Move rows."""
        if self.state is not None:
            moves.within(self.state)
