"""Initialisation schemes: one function for each row of the table in docs/depth.md (`admin` is `xavier`).

A scheme says of one parameter, by its role, shape and layer, which distribution its values are drawn from. It never
looks at names. `xavier` knows every role; the others change what they must and leave the rest to it. The order here:
the arguments of a scheme, the distributions it can return, the schemes, their table.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, Self, assert_never

import torch
from torch import Tensor

from ziggurat.config.kinds import InitKind
from ziggurat.config.model import InitConfig
from ziggurat.model.residual.kinds import deepnorm_constants
from ziggurat.model.roles import MATRICES, QUERY_KEY_VALUE, WRITTEN, Role, Slot


class ModelDepth(NamedTuple):
    """The depth of a model, as far as initial values depend on it.

    Attributes:
        encoder_layers: N; of the grown encoder, where growth is planned.
        decoder_layers: M, likewise.
        merged: the decoder has merged average attention (MAtt): Fixup scales its maps differently.
    """

    encoder_layers: int
    decoder_layers: int
    merged: bool = False


@dataclass(frozen=True)
class Distribution(ABC):
    """A distribution of initial values; `size` is its scale, to which values are proportional."""

    size: float

    def scaled(self, factor: float) -> Self:
        """Return the distribution of `factor` times a value."""
        return replace(self, size=self.size * factor)

    @abstractmethod
    def fill(self, values: Tensor, generator: torch.Generator) -> None:
        """Draw `values`, of any shape, in place."""


class Uniform(Distribution):
    """U(-size, size)."""

    def fill(self, values: Tensor, generator: torch.Generator) -> None:
        """Draw `values`, of any shape, in place."""
        values.uniform_(-self.size, self.size, generator=generator)


class Normal(Distribution):
    """N(0, size^2)."""

    def fill(self, values: Tensor, generator: torch.Generator) -> None:
        """Draw `values`, of any shape, in place."""
        values.normal_(0.0, self.size, generator=generator)


class Constant(Distribution):
    """The number `size`."""

    def fill(self, values: Tensor, generator: torch.Generator) -> None:
        """Fill `values`, of any shape, in place; nothing is drawn."""
        values.fill_(self.size)


class AsBuilt(Distribution):
    """The values that the parameter's module has given it; schemes do not scale them."""

    def __init__(self) -> None:
        super().__init__(1.0)

    def scaled(self, factor: float) -> Self:
        """Return itself."""
        return self

    def fill(self, values: Tensor, generator: torch.Generator) -> None:
        """Leave `values` as they are; nothing is drawn."""


def xavier_bound(slot: Slot, *, fused: bool) -> float:
    """Return sqrt(6 / (fan_in + fan_out)) of a matrix slot.

    With `fused`, query, key and value maps count as one d x 3d matrix, which halves their variance; a map that is
    not one of three (`fused_out` 0) keeps its own bound.
    """
    fan_out, fan_in = slot.values.shape
    if fused and slot.role in QUERY_KEY_VALUE:
        fan_out = slot.fused_out or fan_out
    return math.sqrt(6.0 / (fan_in + fan_out))


def xavier(slot: Slot, config: InitConfig, depth: ModelDepth) -> Distribution:
    """Glorot uniform (Glorot and Bengio 2010), the default of fairseq, tensor2tensor and zero.

    Matrices are U(-bound, bound) (`xavier_bound`), embeddings N(0, 1/d_model), biases 0, norms 1 and 0.

    The vector added to all embeddings is U(-sqrt(3/d), sqrt(3/d)) (zero); the inner maps of additive attention are
    N(0, 1/fan_in) (lingvo). Residual wiring (skip and branch factors, combination weights) and low-rank updates stay as
    their modules made them; maps from streams to their own weights are N(0, 0.02^2) where they do not start at 0
    (`wiring.stream_start`).
    """
    match slot.role:
        case Role.EMBEDDING | Role.POSITION | Role.OUTPUT | Role.ADDITIVE:
            return Normal(slot.values.shape[-1] ** -0.5)
        case Role.BIAS | Role.NORM_BIAS:
            return Constant(0.0)
        case Role.NORM_GAIN:
            return Constant(1.0)
        case Role.INPUT_BIAS:
            return Uniform(math.sqrt(3.0 / slot.values.shape[-1]))
        case Role.WIRING | Role.LOW_RANK:
            return AsBuilt()
        case Role.STREAM_MAP:
            return Normal(0.02)
        case (
            Role.ATTENTION_QUERY
            | Role.ATTENTION_KEY
            | Role.ATTENTION_VALUE
            | Role.ATTENTION_OUT
            | Role.RELATIVE
            | Role.GATE
            | Role.FFN_IN
            | Role.FFN_OUT
            | Role.LSTM
            | Role.PROJECTION
        ):
            return Uniform(xavier_bound(slot, fused=_is_fused(slot, config)))
        case _:
            assert_never(slot.role)


def _is_fused(slot: Slot, config: InitConfig) -> bool:
    """Return whether query, key and value maps count as one matrix (`init.qkv`)."""
    match config.qkv:
        case "fused":
            return True
        case "separate":
            return False
        case "fused_self":
            return not slot.cross
        case _:
            assert_never(config.qkv)


_UNIFORM = frozenset({Role.EMBEDDING, Role.OUTPUT, Role.LSTM, Role.PROJECTION})


def uniform(slot: Slot, config: InitConfig, depth: ModelDepth) -> Distribution:
    """LSTM matrices, embeddings, softmax and projection U(-b, b), b being `init.uniform`: RNMT+ (Chen et al. 2018).

    As lingvo has it. The rest is as in `xavier`: query and key maps of additive attention Glorot, its inner maps
    N(0, 1/fan_in), biases 0.
    """
    return Uniform(config.uniform) if slot.role in _UNIFORM else xavier(slot, config, depth)


def depth_scaled(slot: Slot, config: InitConfig, depth: ModelDepth) -> Distribution:
    """DS-Init: bounds gamma * alpha * l^-exponent for the linear maps of layer l, gamma Glorot's (Zhang et al. 2019).

    Section 4 of Zhang, Titov and Sennrich. Layers are counted from 1 in each stack. Their equation 15 has exponent 1/2.
    The released code passes l^-1/2 as the scale of a variance, so its bounds have exponent 1/4, and only that gives the
    Var(r) of the paper's table 1. Embeddings, relative positions, biases, norms and output projection are as in
    `xavier`.
    """
    draw = xavier(slot, config, depth)
    if slot.layer and slot.role in MATRICES:
        return draw.scaled(config.alpha * slot.layer**-config.exponent)
    return draw


def deepnorm(slot: Slot, config: InitConfig, depth: ModelDepth) -> Distribution:
    """Linear maps of the layers N(0, gain^2 * 2 / (fan_in + fan_out)), the rest as in `xavier` (Wang et al. 2022).

    Figure 2 and section 4. The gain is beta for value and output maps and both feed-forward matrices, cross-attention
    included, and 1 for queries, keys and gates. Query, key and value maps are three matrices, as in the paper, whatever
    `init.qkv` says.
    """
    if not slot.layer or slot.role not in MATRICES:
        return xavier(slot, config, depth)
    gain = 1.0
    if slot.role in WRITTEN:
        _, gain = deepnorm_constants(depth.encoder_layers, depth.decoder_layers, slot.decoder)
    fan_out, fan_in = slot.values.shape
    return Normal(gain * math.sqrt(2.0 / (fan_in + fan_out)))


def magneto(slot: Slot, config: InitConfig, depth: ModelDepth) -> Distribution:
    """Glorot, with value, output and feed-forward maps larger by depth: Wang et al. 2022 (Magneto), section 3.2.

    The factor is sqrt(ln(3M) ln(2N) / 3) in the encoder and sqrt(ln 3M) in the decoder. Attention to the memory, which
    has no inner norm, keeps Glorot's bounds.
    """
    draw = xavier(slot, config, depth)
    if not slot.layer or slot.role not in WRITTEN or slot.cross:
        return draw
    above = math.log(3 * depth.decoder_layers)
    return draw.scaled(math.sqrt(above if slot.decoder else above * math.log(2 * depth.encoder_layers) / 3))


def t_fixup(slot: Slot, config: InitConfig, depth: ModelDepth) -> Distribution:
    """Glorot, with value, output and feed-forward maps and token embeddings smaller by depth (Huang et al. 2020, 3.2).

    The factor is (9M)^-1/4 for the decoder's maps and for target embeddings that the source does not share, 0.67 N^-1/4
    for the encoder's maps, (9N)^-1/4 for source embeddings and for a table that both sides share. The paper has equal
    depths and writes N everywhere; for unequal ones this is the rule of its code. Value maps have the Glorot bound of a
    single matrix whatever `init.qkv` says: the paper's code undoes its fused bound. Positions, a softmax matrix that is
    no embedding, gates and relative positions are as in `xavier`.
    """
    decoder_factor = (9.0 * depth.decoder_layers) ** -0.25
    if slot.role is Role.EMBEDDING:
        factor = decoder_factor if slot.decoder else (9.0 * depth.encoder_layers) ** -0.25
        return xavier(slot, config, depth).scaled(factor)
    if slot.role in WRITTEN and slot.layer:
        factor = decoder_factor if slot.decoder else 0.67 * depth.encoder_layers**-0.25
        return Uniform(factor * xavier_bound(slot, fused=False))
    return xavier(slot, config, depth)


def fixup(slot: Slot, config: InitConfig, depth: ModelDepth) -> Distribution:
    """Glorot times powers of the number B = 2N + 3M of branches, which start at 0 (Zhang, Dauphin and Ma 2019).

    As the toolkit zero has it. Query, key and value maps: B^-1/6; those of merged average attention: B^-1/8. First
    feed-forward matrix: B^-1/2. Attention output, second feed-forward matrix and a softmax matrix that is no embedding:
    0. The rest as in `xavier`, also the gates of average attention: its branch alone does not start at zero. Shifts and
    multipliers belong to `residual: fixup`, which starts them at 0 and 1.
    """
    branches = 2.0 * depth.encoder_layers + 3.0 * depth.decoder_layers
    draw = xavier(slot, config, depth)
    if slot.role in (Role.ATTENTION_OUT, Role.FFN_OUT, Role.OUTPUT):
        return Constant(0.0)
    if slot.role in QUERY_KEY_VALUE:
        return draw.scaled(branches ** (-1 / 8 if slot.decoder and depth.merged else -1 / 6))
    if slot.role is Role.FFN_IN:
        return draw.scaled(branches**-0.5)
    return draw


Scheme = Callable[[Slot, InitConfig, ModelDepth], Distribution]
"""The type of a scheme: the distribution of one parameter's initial values."""

INIT: dict[InitKind, Scheme] = {
    "xavier": xavier,
    "depth_scaled": depth_scaled,
    "admin": xavier,  # ADMIN changes its skip vectors only: ziggurat.model.init.admin
    "deepnorm": deepnorm,
    "magneto": magneto,
    "t_fixup": t_fixup,
    "fixup": fixup,
    "uniform": uniform,
}


@torch.no_grad()
def initialise(
    slots: Iterable[Slot],
    config: InitConfig,
    depth: ModelDepth,
    generator: torch.Generator,
    layers: tuple[InitConfig, InitConfig] | None = None,
) -> None:
    """Fill every slot in place, in the order given: equal slots, depth and generator state give equal values.

    `layers`: what the layers of encoder and decoder go by; None: by `config`, as everything outside of them does.
    """
    for slot in slots:
        chosen = layers[slot.decoder] if layers is not None and slot.layer else config
        INIT[chosen.kind](slot, chosen, depth).fill(slot.values, generator)
