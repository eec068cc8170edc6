"""Token embeddings, positions and the output projection (Vaswani et al. 2017, sections 3.4 and 3.5).

Positions are added to embeddings, or, if rotary, turn queries and keys by angles (Su et al. 2021, section 3.2.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, assert_never

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ziggurat.config.model import ModelConfig
from ziggurat.model.dropout import Dropout
from ziggurat.model.linear import Multiply, linear
from ziggurat.model.roles import Role, Roles
from ziggurat.system.errors import ConfigError

_IMPOSSIBLE = -1e8
"""An output bias below this makes a token impossible whatever the hidden states are; importers write -1e9."""


def sinusoids(length: int, d_model: int) -> Tensor:
    """Return [length, d_model] in fp64: channels i < d/2 are sin(pos r_i), the rest cos(pos r_i).

    r_i = 10000^(-i / (d/2 - 1)): the layout of tensor2tensor, fairseq, zero and lingvo. The paper's text
    interleaves sine and cosine, which is the same table with its channels permuted.
    """
    half = d_model // 2
    rates = torch.exp(torch.arange(half, dtype=torch.float64) * (-math.log(10000.0) / max(1, half - 1)))
    angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class SinusoidalPositions(nn.Module):
    """Fixed positions for any length: the table grows for longer inputs. Nothing is saved with the model."""

    table: Tensor

    def __init__(self, d_model: int, length: int = 256) -> None:
        super().__init__()
        self.d_model = d_model
        # Not computed where only shapes matter: sines on the meta device make torch import its compiler (over a
        # second).
        on_meta = torch.get_default_device().type == "meta"
        table = torch.empty(length, d_model) if on_meta else sinusoids(length, d_model).float()
        self.register_buffer("table", table, persistent=False)

    def forward(self, length: int) -> Tensor:
        """Return [length, d_model]."""
        if length > self.table.shape[0]:
            # Doubled, so that step-by-step decoding does not rebuild the table at every step.
            self.table = sinusoids(max(length, 2 * self.table.shape[0]), self.d_model).to(self.table)
        return self.table[:length]

    def _apply(self, fn: object, recurse: bool = True) -> SinusoidalPositions:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.table.dtype == torch.float64:  # recomputed, since conversion would keep the rounding to fp32
            self.table = sinusoids(self.table.shape[0], self.d_model).to(self.table.device)
        return self


class LearnedPositions(nn.Module):
    """One trained vector per position. Raises ConfigError in `forward` when an input is longer than `max_positions`."""

    roles: ClassVar[Roles] = {"weight": Role.POSITION}

    def __init__(self, d_model: int, max_positions: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(max_positions, d_model))

    def forward(self, length: int) -> Tensor:
        """Return [length, d_model]."""
        if length > self.weight.shape[0]:
            raise ConfigError(
                f"a sequence of {length} tokens is longer than `model.embedding.max_positions` "
                f"({self.weight.shape[0]}); raise it and train again, or lower `data.filters.max_pieces`, "
                "`decoding.max_source_pieces` or `decoding.max_length.limit`",
                key="model.embedding.max_positions",
                named=["data.filters.max_pieces", "decoding.max_source_pieces", "decoding.max_length.limit"],
            )
        return self.weight[:length]


def _as_they_are(rows: Tensor) -> Tensor:
    return rows


class UnitEmbedding(nn.Embedding):
    """E[token] / |E[token]| (FixNorm): Nguyen and Salazar 2019, after Nguyen and Chiang 2018.

    E itself is trained, so the longer a row becomes, the less a step rotates it.
    """

    roles: ClassVar[Roles] = {"weight": Role.EMBEDDING}

    def forward(self, ids: Tensor) -> Tensor:
        """Return [..., width] for `ids` [...]."""
        return F.normalize(super().forward(ids), dim=-1)


class InputEmbedding(nn.Module):
    """dropout(scale * E[token] + bias + position).

    Args:
        tokens: E [vocabulary, d_model]; may be shared with other modules.
        positions: module that gives [length, d_model] for a length.
        scale: sqrt(d_model) or 1.
        dropout: dropout on the sum.
        bias: vector [d_model] added to every scaled embedding, the same on both sides (zero), or None.
        zero_start: the token at position 0 has no embedding: the input there is the position alone (zero).

    Attributes:
        rounded: applied to embeddings first; the identity unless ziggurat.model.fast.int8 replaces it.
    """

    roles: ClassVar[Roles] = {"bias": Role.INPUT_BIAS}
    bias: nn.Parameter | None

    def __init__(
        self,
        tokens: nn.Embedding,
        positions: SinusoidalPositions | LearnedPositions | None,
        scale: float,
        dropout: Dropout,
        *,
        bias: nn.Parameter | None = None,
        zero_start: bool = False,
    ) -> None:
        super().__init__()
        self.tokens = tokens
        self.positions = positions
        self.scale = scale
        self.dropout = dropout
        self.register_parameter("bias", bias)
        self.zero_start = zero_start
        self.rounded: Callable[[Tensor], Tensor] = _as_they_are

    def forward(self, ids: Tensor) -> Tensor:
        """Return [batch, length, d_model] for `ids` [batch, length]."""
        x = self._scaled(ids)
        if self.zero_start:
            x = F.pad(x[:, 1:], (0, 0, 1, 0))
        if self.positions is not None:
            x = x + self.positions(ids.shape[1])
        return self.dropout(x)

    def step(self, ids: Tensor, positions: Tensor, longest: int) -> Tensor:
        """Return [N, K, d_model] for `ids` [N, K]; those of sentence i are at positions[i], at most `longest`."""
        x = self._scaled(ids)
        if self.zero_start:
            x = x.masked_fill((positions == 0)[:, None, None], 0.0)
        if self.positions is not None:
            x = x + self.positions(longest + 1)[positions][:, None]
        return self.dropout(x)

    def _scaled(self, ids: Tensor) -> Tensor:
        """Return [..., d_model] without positions."""
        x: Tensor = self.rounded(self.tokens(ids))
        if self.scale != 1.0:
            x = x * self.scale
        return x if self.bias is None else x + self.bias


class OutputProjection(nn.Module):
    """Logits = hidden W^T + b.

    Attributes:
        weight: W [vocabulary, d_model], either a separate parameter or the target embedding's.
        unit: each row of W is divided by its length, as UnitEmbedding does.
        bias: b [vocabulary], or None.
        ruled_out: ids [n] of tokens that the bias makes impossible, such as those that an imported model never
            produces; None: no such tokens. `rule_out` finds them when weights are loaded, because searching for them in
            every training step would mean waiting for the GPU.
        multiply: the product, from ziggurat.model.linear or ziggurat.model.fast.int8.
        rounded: the rounding that the product applies to the rows of both factors.
    """

    roles: ClassVar[Roles] = {"weight": Role.OUTPUT, "bias": Role.BIAS}  # a shared matrix has its embedding's role
    weight: Tensor
    bias: nn.Parameter | None
    ruled_out: Tensor | None

    def __init__(self, weight: Tensor, bias: nn.Parameter | None = None, *, unit: bool = False) -> None:
        super().__init__()
        self.weight = weight
        self.unit = unit
        self.register_parameter("bias", bias)
        self.register_buffer("ruled_out", None, persistent=False)
        self.multiply: Multiply = linear
        self.rounded: Callable[[Tensor], Tensor] = _as_they_are

    @property
    def matrix(self) -> Tensor:
        """The matrix [vocabulary, d_model] of the product: W, or W with rows of length 1."""
        return F.normalize(self.weight, dim=-1) if self.unit else self.weight

    def rule_out(self, bias: Tensor | None) -> None:
        """Set `ruled_out` from `bias` [vocabulary] as loaded: whole, not sharded over processes."""
        ids = [] if bias is None else (bias < _IMPOSSIBLE).nonzero().flatten().tolist()
        self.ruled_out = torch.tensor(ids, device=self.weight.device) if ids else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [..., vocabulary] for `hidden` [..., d_model]."""
        return self.multiply(hidden, self.matrix, self.bias)

    def restricted(self, tokens: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the map from [..., d_model] to logits [..., n] of only `tokens` [n]."""
        weight, bias = self.matrix[tokens], None if self.bias is None else self.bias[tokens]
        return lambda hidden: self.multiply(hidden, weight, bias)


def _turns(length: int, d_head: int) -> Tensor:
    """Return [2, length, d_head / 2] in fp64: cosine and sine of position * 10000^(-2i / d_head)."""
    rates = 10000.0 ** (-torch.arange(0, d_head, 2, dtype=torch.float64) / d_head)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
    return torch.stack([angles.cos(), angles.sin()])


def _turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Return `x` [..., d_head] rotated by the angles of these cosines and sines, [..., d_head / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1).to(x.dtype)


class Rotary(nn.Module):
    """Rotation of pair i of a head's channels, as a point of the plane, by position * 10000^(-2i / d_head).

    The product of a rotated query and a rotated key depends on their distance alone. Pair i is made of the channels
    i and i + d_head / 2. The paper pairs neighbouring channels, which is equivalent up to a permutation of the rows of
    the query and key maps. Nothing is saved with the model. The table, initially of `length` positions, grows for
    longer inputs, which should be rare: it costs a compiled layer a new graph.
    """

    table: Tensor

    def __init__(self, d_head: int, length: int = 1024) -> None:
        super().__init__()
        self.d_head = d_head
        self.register_buffer("table", _turns(length, d_head).float(), persistent=False)

    def forward(self, x: Tensor, start: int) -> Tensor:
        """Return `x` [batch, heads, length, d_head] rotated; its positions are start, start + 1, ..."""
        end = start + x.shape[2]
        self._reach(end)
        return _turned(x, self.table[0, start:end], self.table[1, start:end])

    def at(self, x: Tensor, positions: Tensor, longest: int) -> Tensor:
        """Return `x` [N, heads, K, d_head] rotated; row i is at positions[i], [N], none of them beyond `longest`."""
        self._reach(longest + 1)
        return _turned(x, self.table[0, positions, None, None], self.table[1, positions, None, None])

    def _reach(self, end: int) -> None:
        """Make the table long enough for the positions before `end`."""
        if end > self.table.shape[1]:
            # Doubled, so that growth is rare. Not an inference tensor, even when decoding makes it: training reads
            # the same table, and autograd does not accept inference tensors.
            with torch.inference_mode(False):
                self.table = _turns(max(end, 2 * self.table.shape[1]), self.d_head).to(self.table)

    def _apply(self, fn: object, recurse: bool = True) -> Rotary:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # The angles of late positions need at least fp32. Recomputed, since conversion would keep the rounding error.
        dtype = torch.promote_types(self.table.dtype, torch.float32)
        if self.table.dtype != torch.float32:
            self.table = _turns(self.table.shape[1], self.d_head).to(self.table.device, dtype)
        return self


class Embeddings:
    """Makes the parts outside the stacks: token embeddings, positions, output projection."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        shared = config.embedding.shared_bias
        self.bias = nn.Parameter(torch.empty(config.d_model)) if shared else None

    def tokens(
        self, source_size: int, target_size: int, hidden: int
    ) -> tuple[nn.Embedding, nn.Embedding, OutputProjection]:
        """Return source and target embeddings and the projection from states of width `hidden`.

        Raises ConfigError when `sharing: all` meets vocabularies of different size.
        """
        config = self.config
        sharing = config.embedding.sharing
        if sharing == "all" and source_size != target_size:
            raise ConfigError(
                f"`model.embedding.sharing: all` needs one vocabulary for both sides, but the source has "
                f"{source_size} tokens and the target {target_size}; use `decoder` or a joint vocabulary",
                key="model.embedding.sharing",
            )
        table = UnitEmbedding if config.embedding.unit_length else nn.Embedding
        target = table(target_size, config.d_model)
        source = target if sharing == "all" else table(source_size, config.encoder_width)
        weight = nn.Parameter(torch.empty(target_size, hidden)) if sharing == "none" else target.weight
        bias = nn.Parameter(torch.empty(target_size)) if config.embedding.output_bias else None
        return source, target, OutputProjection(weight, bias, unit=config.embedding.unit_length)

    def input(self, tokens: nn.Embedding, *, zero_start: bool = False) -> InputEmbedding:
        """Return the embedding of one side, positions included."""
        config, width = self.config.embedding, tokens.embedding_dim
        positions: SinusoidalPositions | LearnedPositions | None
        match config.positions:
            case "sinusoidal":
                positions = SinusoidalPositions(width)
            case "learned":
                positions = LearnedPositions(width, config.max_positions)
            case "rotary" | "none":  # rotary positions belong to attention
                positions = None
            case _:
                assert_never(config.positions)
        scale = math.sqrt(width) if config.scale else 1.0
        dropout = Dropout(self.config.dropout.embedding)
        return InputEmbedding(tokens, positions, scale, dropout, bias=self.bias, zero_start=zero_start)
