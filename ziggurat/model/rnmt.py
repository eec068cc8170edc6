"""RNMT+: a bidirectional LSTM encoder of any depth and an LSTM decoder with additive attention.

Chen et al. 2018, section 3; the attention, with several heads, is that of Bahdanau et al. 2015.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from ziggurat.config.model import ModelConfig
from ziggurat.model.attention.cache import (
    CrossAttentionCache,
    KeptWeights,
    LiveBeams,
    LiveMemory,
    Mask,
    RowMoves,
    padding_bias,
)
from ziggurat.model.attention.multihead import join_heads, split_heads
from ziggurat.model.dropout import Dropout
from ziggurat.model.embedding import Embeddings
from ziggurat.model.history.kinds import Transparent
from ziggurat.model.kinds import memory_mixtures
from ziggurat.model.linear import Linear, linear
from ziggurat.model.lstm import LstmLayer, LstmState, StepOrder, step_order
from ziggurat.model.roles import Role, Roles, Slot, table_slots
from ziggurat.model.seq2seq import Memory, Recomputing, Seq2Seq, StepwiseDecoder


class AdditiveAttention(nn.Module):
    """Per head, with keys K = memory W_s + b_s and a query q = x W_q + b_q: softmax(v^T tanh(K A + q B)) K.

    The values are the keys; `key_map` A, `query_map` B [d_head, d_head] and `score` v [d_head] are shared by the heads,
    and there is no output map (lingvo's MultiHeadedAttention over AdditiveAttention). Queries, memory and result are
    all `width` wide.
    """

    def __init__(self, width: int, heads: int, dropout: Dropout) -> None:
        super().__init__()
        d_head = width // heads
        self.heads = heads
        self.k_proj = Linear(width, width)
        self.q_proj = Linear(width, width)
        self.key_map = nn.Parameter(torch.empty(d_head, d_head))
        self.query_map = nn.Parameter(torch.empty(d_head, d_head))
        self.score = nn.Parameter(torch.empty(d_head))
        self.dropout = dropout

    def remember(self, memory: Tensor, mask: Mask | None, kept: KeptWeights | None = None) -> CrossAttentionCache:
        """Project `memory` [batch, source, width] once, to K A and K; `mask` hides its padding."""
        keys = split_heads(self.k_proj(memory), self.heads)
        return CrossAttentionCache(keys @ self.key_map, keys, mask, kept)

    def forward(self, x: Tensor, cache: CrossAttentionCache) -> Tensor:
        """Return [batch, queries, width] for `x` of that shape: one target position in training, beams in decoding."""
        query = split_heads(self.q_proj(x), self.heads) @ self.query_map
        logits = torch.tanh(query.unsqueeze(3) + cache.key.unsqueeze(2)) @ self.score
        if cache.mask is not None:
            logits = logits + cache.mask.bias
        weights = torch.softmax(logits, dim=-1)
        if cache.kept is not None:
            cache.kept.take(weights)
        return join_heads(torch.matmul(self.dropout(weights), cache.value))

    def slots(self) -> Iterator[Slot]:
        """Yield the role of each parameter that the module holds itself."""
        maps = {"k_proj": Role.ATTENTION_KEY, "q_proj": Role.ATTENTION_QUERY}
        return table_slots(self, maps | dict.fromkeys(("key_map", "query_map", "score"), Role.ADDITIVE), cross=True)


class RnmtLayer(nn.Module):
    """dropout(LSTM(x)), with `residual` x + dropout(LSTM(x))."""

    def __init__(self, lstm: LstmLayer, dropout: Dropout, residual: bool) -> None:
        super().__init__()
        self.lstm = lstm
        self.dropout = dropout
        self.residual = residual

    def forward(self, x: Tensor, order: StepOrder, context: Tensor | None = None) -> Tensor:
        """Return [batch, length, d_out] for `x` [batch, length, d_in]; with a `context` the LSTM reads [x; context]."""
        read = x if context is None else torch.cat([x, context], dim=-1)
        return self._join(x, self.lstm(read, order))

    def step(self, x: Tensor, context: Tensor, state: LstmState) -> tuple[Tensor, LstmState]:
        """Return [N, K, d_out] for one position per hypothesis, and the state [N, K, ...] after it."""
        state = self.lstm.first.step(torch.cat([x, context], dim=-1), state)
        return self._join(x, state.output), state

    def _join(self, x: Tensor, y: Tensor) -> Tensor:
        return self.dropout(y, x if self.residual else None)


class RnmtEncoder(Recomputing):
    """Bidirectional layers, bottom first, their transparent merge if there is one, and a projection to `width`.

    Only the outputs of the layers are merged, because the embedding has a different width (as in lingvo; the paper
    includes it).
    """

    roles: ClassVar[Roles] = {"out_proj": Role.PROJECTION}

    def __init__(self, layers: Sequence[RnmtLayer], transparent: Transparent | None, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.transparent = transparent
        self.out_proj = Linear(2 * width, width)

    def forward(self, x: Tensor, mask: Tensor, outputs: list[Tensor] | None = None) -> tuple[Tensor, ...]:
        """Return the memory, one tensor [batch, source, width], for the embedded source `x` of that shape.

        `mask` [batch, source] is True at real tokens. The output of every layer, [batch, source, 2 * width], is
        appended to `outputs`, when it is given.
        """
        order = step_order(mask, directions=2)
        sources: list[Tensor] = []
        for run in self.runs():
            x, given = run.through(self._pass, x, order, self.transparent is not None or outputs is not None)
            sources.extend(given)
        if outputs is not None:
            outputs.extend(sources)
        if self.transparent is not None:
            (x,) = self.transparent(sources)
        return (self.out_proj(x),)

    def _pass(self, layers: range, x: Tensor, order: StepOrder, all_of_them: bool) -> tuple[Tensor, list[Tensor]]:
        """Return the output of the last of `layers` and, with `all_of_them`, the output of each."""
        given = []
        for number in layers:
            x = self.layers[number](x, order)
            if all_of_them:
                given.append(x)
        return x, given


class RnmtCache:
    """The decoder's state of the live hypotheses between steps; attention to the memory is stored in `kept`."""

    def __init__(self, live: LiveBeams, kept: KeptWeights | None, layers: int) -> None:
        self.live = live
        self.memory = LiveMemory(live, kept)
        self._layers = layers
        # The context, then outputs and cells of all layers in turn: [slots, K, width] each.
        self._buffers: list[Tensor] = []

    @property
    def cross_attention(self) -> Tensor | None:
        """Attention to the memory at the last step, [N, K, source], if it is kept."""
        return self.memory.weights

    @property
    def context(self) -> Tensor:
        """The result of the first layer's latest attention to the memory, [N, K, width]."""
        return self._buffers[0][: self.live.count]

    @property
    def states(self) -> list[LstmState]:
        """State of each layer, [N, K, width] a part."""
        parts = [buffer[: self.live.count] for buffer in self._buffers[1:]]
        return [LstmState(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]

    def begin(self, context: Tensor, rows: slice) -> None:
        """Start new sentences, which have `rows` among the live ones, with `context` [n, K, width]."""
        if not self._buffers:
            # Allocates all slots at once, so that sentences come and go without new memory.
            shape = (self.live.slots, *context.shape[1:])
            self._buffers = [context.new_zeros(shape) for _ in range(1 + 2 * self._layers)]
        for buffer in self._buffers[1:]:
            buffer[rows] = 0.0
        self._buffers[0][rows] = context

    def update(self, context: Tensor, states: list[LstmState]) -> None:
        """Keep the results of a step, [N, K, width] each, or [N, 1, width] for all beams."""
        for buffer, part in zip(self._buffers, [context, *(part for state in states for part in state)], strict=True):
            buffer[: self.live.count] = part

    def follow(self, parents: Tensor) -> None:
        """Make beam k of sentence i continue its old beam parents[i, k]; `parents` is [N, K]."""
        for buffer in self._buffers:
            live = buffer[: self.live.count]
            live.copy_(live.gather(1, parents[..., None].expand_as(live)))

    def keep(self, moves: RowMoves) -> None:
        """Move rows; `LiveBeams.keep` has already counted the live ones."""
        self.memory.keep(moves)
        for buffer in self._buffers:
            moves.within(buffer)


class RnmtDecoder(StepwiseDecoder[RnmtCache]):
    """An LSTM that reads the result of its attention at the previous step, and layers that all read that result too.

    The output of the first layer is the attention's query.
    """

    def __init__(self, layers: Sequence[RnmtLayer], attention: AdditiveAttention) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.attention = attention

    def units(self) -> list[nn.Module]:
        """See Recomputing; the first layer runs cell by cell, within the attention's loop."""
        return super().units()[1:]

    def forward(self, x: Tensor, memory: Memory, kept: KeptWeights | None = None) -> Tensor:
        """Return [batch, target, 2 * width] for the embedded target input `x` [batch, target, width]; see the base."""
        order = step_order(x.new_ones(x.shape[:2], dtype=torch.bool), directions=1)
        context: Tensor | None = None
        for run in self.runs():
            x, context = run.through(self._pass, x, context, order, memory, kept)
        assert context is not None
        return torch.cat([x, context], dim=-1)

    def _pass(
        self,
        layers: range,
        x: Tensor,
        context: Tensor | None,
        order: StepOrder,
        memory: Memory,
        kept: KeptWeights | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output of the last of `layers`, and the context: the first layer makes it, the others read it."""
        for number in layers:
            if context is None:
                x, context = self._attend(x, memory, kept)
            else:
                x = self.layers[number](x, order, context)
        return x, context

    def _attend(self, x: Tensor, memory: Memory, kept: KeptWeights | None) -> tuple[Tensor, Tensor]:
        """Return the first layer's outputs and contexts, [batch, target, width] each.

        Each step reads the context of the previous one, so this is the only loop over positions that stays in Python.
        """
        cache = self.attention.remember(memory.of(0), Mask(padding_bias(memory.mask, x.dtype)), kept)
        cell = cast(RnmtLayer, self.layers[0]).lstm.first
        # The embeddings' part of the product is computed for all positions at once, before the loop.
        of_x, of_rest = cell.weight.split([x.shape[-1], cell.weight.shape[1] - x.shape[-1]], dim=1)
        state = cell.start(x.shape[0])
        context = self.attention(torch.zeros_like(x[:, :1]), cache)
        outputs, contexts, weights = [], [], list[Tensor]()
        for known in linear(x, of_x).unbind(1):
            rest = torch.cat([context.squeeze(1), state.output], dim=-1)
            state = cell.advance(torch.addmm(known, rest, of_rest.t()), state)
            context = self.attention(state.output.unsqueeze(1), cache)
            outputs.append(state.output)
            contexts.append(context)
            if kept is not None and kept.weights is not None:
                weights.append(kept.weights)
        if kept is not None:
            kept.weights = torch.cat(weights, dim=1)
        return torch.stack(outputs, dim=1), torch.cat(contexts, dim=1)

    def start(self, live: LiveBeams, *, keep_attention: bool = False) -> RnmtCache:
        """Return the cache for the hypotheses of `live`; with `keep_attention` it keeps attention to the memory."""
        kept = KeptWeights(self.aligned.head) if keep_attention else None
        return RnmtCache(live, kept, len(self.layers))

    def admit(self, memory: Memory, rows: slice, cache: RnmtCache) -> None:
        """Project the memory of new sentences, which have `rows` among the live ones; attend with a zero query."""
        states = memory.of(0)
        remembered = self.attention.remember(states, Mask(padding_bias(memory.mask, states.dtype)))
        cache.memory.admit(remembered, rows)
        nothing = states.new_zeros(len(states), cache.live.beam_size, states.shape[2])
        cache.begin(self.attention(nothing, remembered), rows)

    def step(self, x: Tensor, cache: RnmtCache) -> Tensor:
        """Return [N, K, 2 * width] for one new position per hypothesis, `x` [N, K, width]; K may be 1 at first."""
        beams, states = x.shape[1], []
        context = cache.context[:, :beams]
        for number, (layer, state) in enumerate(zip(self.layers, cache.states, strict=True)):
            x, state = cast(RnmtLayer, layer).step(x, context, LstmState(*(part[:, :beams] for part in state)))
            states.append(state)
            if number == 0:
                context = self.attention(x, cache.memory)
        cache.update(context, states)
        return torch.cat([x, context], dim=-1)


def build_rnmt(config: ModelConfig, source_vocabulary: int, target_vocabulary: int) -> Seq2Seq:
    """Return an RNMT+ whose parameters have no values yet; cells and embeddings are `d_model` wide."""
    width, depth = config.d_model, config.encoder.layers
    outside = Embeddings(config)
    source_tokens, target_tokens, output = outside.tokens(source_vocabulary, target_vocabulary, 2 * width)
    dropout = Dropout(config.dropout.residual)
    joins = config.encoder.residual != "none"
    below = [
        RnmtLayer(LstmLayer(width if number == 0 else 2 * width, width, 2), dropout, joins and number >= 2)
        for number in range(depth)
    ]
    above = [
        RnmtLayer(LstmLayer(2 * width, width), dropout if number else Dropout(0.0), number >= 2)
        for number in range(config.decoder.layers)
    ]
    attention = AdditiveAttention(width, config.heads, Dropout(config.dropout.attention))
    return Seq2Seq(
        outside.input(source_tokens),
        outside.input(target_tokens),
        RnmtEncoder(below, memory_mixtures(config, sources=depth, readers=1), width),
        RnmtDecoder(above, attention),
        output,
    )
