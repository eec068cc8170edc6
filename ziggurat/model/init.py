"""Initialisation: a scheme for each row of the table in docs/depth.md, and ADMIN's skip vectors.

A scheme maps the role, shape and layer of a parameter to the distribution of its initial values. `xavier` handles every
role; the others override some and leave the rest to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple, assert_never

import torch
from torch import Tensor, nn

from ziggurat.config.kinds import InitKind
from ziggurat.config.model import InitConfig
from ziggurat.model.dropout import StochasticBranch
from ziggurat.model.residual.base import Residual
from ziggurat.model.residual.kinds import deepnorm_constants
from ziggurat.model.roles import MATRICES, QUERY_KEY_VALUE, WRITTEN, Role, Slot


class ModelDepth(NamedTuple):
    """The depths N and M of a model's encoder and decoder; if growth is planned, those of the grown model.

    `merged`: the decoder has merged average attention (MAtt), whose maps Fixup scales differently.
    """

    encoder_layers: int
    decoder_layers: int
    merged: bool = False


class Distribution(NamedTuple):
    """A distribution of initial values; `size` is its scale, to which values are proportional.

    uniform: U(-size, size). normal: N(0, size^2). constant: `size`. as_built: the value set by the parameter's module.
    """

    kind: Literal["uniform", "normal", "constant", "as_built"]
    size: float = 1.0

    def scaled(self, factor: float) -> Distribution:
        """Return the distribution of `factor` times a value."""
        return self._replace(size=self.size * factor)

    def fill(self, values: Tensor, generator: torch.Generator) -> None:
        """Draw `values`, of any shape, in place."""
        match self.kind:
            case "uniform":
                values.uniform_(-self.size, self.size, generator=generator)
            case "normal":
                values.normal_(0.0, self.size, generator=generator)
            case "constant":
                values.fill_(self.size)
            case "as_built":
                pass
            case _:
                assert_never(self.kind)


def _xavier_bound(slot: Slot, *, fused: bool) -> float:
    """Return sqrt(6 / (fan_in + fan_out)) of a matrix slot.

    With `fused`, query, key and value maps count as one d x 3d matrix, which halves their variance, if all three exist.
    """
    fan_out, fan_in = slot.values.shape
    if fused and slot.role in QUERY_KEY_VALUE:
        fan_out = slot.fused_out or fan_out
    return math.sqrt(6.0 / (fan_in + fan_out))


def xavier(slot: Slot, config: InitConfig, depth: ModelDepth) -> Distribution:
    """Glorot uniform (Glorot and Bengio 2010), the default of fairseq, tensor2tensor and zero.

    Matrices are U(-bound, bound) (`init.qkv` says which count as one), embeddings N(0, 1/d_model), biases 0, norms 1
    and 0; the vector added to all embeddings U(-sqrt(3/d), sqrt(3/d)) (zero), the inner maps of additive attention
    N(0, 1/fan_in) (lingvo). Residual wiring (skip and branch factors, combination weights) and low-rank updates stay as
    built; maps from streams to their own weights are N(0, 0.02^2) where they do not start at 0 (`wiring.stream_start`).
    """
    match slot.role:
        case Role.EMBEDDING | Role.POSITION | Role.OUTPUT | Role.ADDITIVE:
            return Distribution("normal", slot.values.shape[-1] ** -0.5)
        case Role.BIAS | Role.NORM_BIAS:
            return Distribution("constant", 0.0)
        case Role.NORM_GAIN:
            return Distribution("constant", 1.0)
        case Role.INPUT_BIAS:
            return Distribution("uniform", math.sqrt(3.0 / slot.values.shape[-1]))
        case Role.WIRING | Role.LOW_RANK:
            return Distribution("as_built")
        case Role.STREAM_MAP:
            return Distribution("normal", 0.02)
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
            fused = config.qkv == "fused" or (config.qkv == "fused_self" and not slot.cross)
            return Distribution("uniform", _xavier_bound(slot, fused=fused))
        case _:
            assert_never(slot.role)


_UNIFORM = frozenset({Role.EMBEDDING, Role.OUTPUT, Role.LSTM, Role.PROJECTION})


def uniform(slot: Slot, config: InitConfig, depth: ModelDepth) -> Distribution:
    """LSTM matrices, embeddings, softmax and projection U(-b, b), b = `init.uniform`: RNMT+ (Chen et al. 2018).

    Follows lingvo. The rest is as in `xavier`: query and key maps of additive attention are Glorot, its inner maps N(0,
    1/fan_in), and biases 0.
    """
    return Distribution("uniform", config.uniform) if slot.role in _UNIFORM else xavier(slot, config, depth)


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
    return Distribution("normal", gain * math.sqrt(2.0 / (fan_in + fan_out)))


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


def lipschitz(slot: Slot, config: InitConfig, depth: ModelDepth) -> Distribution:
    """U(-b, b), b = sqrt(1 / fan_in) for linear maps, sqrt(2 / (V + d)) for V embeddings of width d: Xu et al. 2020.

    Both are 1 / sqrt(3) of the usual bounds, He's and Glorot's. Post-norm shrinks the skip where the sum has a standard
    deviation above 1; these bounds keep it below that. The equations are those of the authors' code
    (github.com/hfxunlp/transformer, `utils/init/base.py`), whose linear maps include an untied projection; the paper's
    text was not available. Positions are as in `xavier`, because the authors train none.
    """
    rows, width = slot.values.shape if slot.values.dim() == 2 else (1, 1)
    if slot.role is Role.EMBEDDING:
        return Distribution("uniform", math.sqrt(2.0 / (rows + width)))
    if slot.role in MATRICES or slot.role is Role.OUTPUT:
        return Distribution("uniform", width**-0.5)
    return xavier(slot, config, depth)


def t_fixup(slot: Slot, config: InitConfig, depth: ModelDepth) -> Distribution:
    """Glorot, with value, output and feed-forward maps and token embeddings smaller by depth (Huang et al. 2020, 3.2).

    The factor is (9M)^-1/4 for the decoder's maps and for target embeddings that the source does not share, 0.67 N^-1/4
    for the encoder's maps, (9N)^-1/4 for source embeddings and for a table that both sides share. The paper assumes
    equal depths and writes N everywhere; for unequal depths this follows its code. Value maps have the Glorot bound of
    a single matrix whatever `init.qkv` says: the paper's code undoes its fused bound. Positions, an untied softmax
    matrix, gates and relative positions are as in `xavier`.
    """
    decoder_factor = (9.0 * depth.decoder_layers) ** -0.25
    if slot.role is Role.EMBEDDING:
        factor = decoder_factor if slot.decoder else (9.0 * depth.encoder_layers) ** -0.25
        return xavier(slot, config, depth).scaled(factor)
    if slot.role in WRITTEN and slot.layer:
        factor = decoder_factor if slot.decoder else 0.67 * depth.encoder_layers**-0.25
        return Distribution("uniform", factor * _xavier_bound(slot, fused=False))
    return xavier(slot, config, depth)


def fixup(slot: Slot, config: InitConfig, depth: ModelDepth) -> Distribution:
    """Glorot times powers of the number B = 2N + 3M of branches, which start at 0 (Zhang, Dauphin and Ma 2019).

    Follows the toolkit zero. Query, key and value maps: B^-1/6; those of merged average attention: B^-1/8. First
    feed-forward matrix: B^-1/2. Attention output, second feed-forward matrix and an untied softmax matrix: 0. The rest
    is as in `xavier`, including the gates of average attention, whose branch is the only one that does not start at
    zero. Shifts and multipliers belong to `residual: fixup`, which starts them at 0 and 1.
    """
    branches = 2.0 * depth.encoder_layers + 3.0 * depth.decoder_layers
    draw = xavier(slot, config, depth)
    if slot.role in (Role.ATTENTION_OUT, Role.FFN_OUT, Role.OUTPUT):
        return Distribution("constant", 0.0)
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
    "admin": xavier,  # changes skip vectors only: constant_omega, profile_omega
    "deepnorm": deepnorm,
    "magneto": magneto,
    "lipschitz": lipschitz,
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
    """Fill every slot in place, in the given order; `layers`: the settings for encoder and decoder layers."""
    for slot in slots:
        chosen = layers[slot.decoder] if layers is not None and slot.layer else config
        INIT[chosen.kind](slot, chosen, depth).fill(slot.values, generator)


@torch.no_grad()
def constant_omega(
    residuals: Sequence[Residual], kind: Literal["log", "linear", "one"], planned: int | None = None
) -> None:
    """Set omega of all n sub-layers of one stack to one number: the profile-free forms of admin-torch.

    n is `planned`, the number of sub-layers of the fully grown stack, by default its current number. `log`: sqrt((n +
    1) / ln(n + 1) - 1), for an output that changes by O(log n) under a small change of the parameters; `linear`:
    sqrt(n), for O(1); `one`: 1, plain post-norm, O(n). This includes the first sub-layer. A stack without omega is left
    unchanged.
    """
    n = planned or len(residuals)
    match kind:
        case "log":
            omega = math.sqrt((n + 1) / math.log(n + 1) - 1)
        case "linear":
            omega = math.sqrt(n)
        case "one":
            omega = 1.0
        case _:
            assert_never(kind)
    for skip in map(_omega, residuals):
        if skip is not None:
            skip.fill_(omega)


@torch.no_grad()
def profile_omega(
    stacks: Sequence[Sequence[Residual]],
    run: Callable[[], object],
    masks: Sequence[Tensor],
    kept: Collection[Residual] = (),
) -> list[list[float]]:
    """Set omega of every sub-layer from the variances in one forward pass; return the values, stack by stack.

    Args:
        stacks: the Residuals of each stack; one without omega is unchanged and gives an empty list.
        run: the forward pass, in training mode, through each Residual exactly once.
        masks: for each stack, [batch, length], True at real tokens.
        kept: residuals whose omega is left unchanged and not returned: those of a trained model that has grown, or of a
            stack with another initialisation.

    Stacks are independent. Within one, omega_1 = 1 and omega_{i+1}^2 = Var(omega_i x_{i-1}) + Var(f_i), in the order in
    which the pass meets the sub-layers. Each omega is applied as soon as it is known, as in the progressive form of the
    released code. (The paper's formula profiles with omega = 1 throughout and would make omega_1 zero.) Variances are
    over all channels of all real tokens, after the branch's dropout, and the pass adds that same dropped branch. No
    branch is dropped as a whole (stochastic sub-layers), and compiled layers run uncompiled. Only omega changes.
    """
    recursions = [_Recursion(mask, kept) for mask in masks]
    # Uncompiled: a compiled layer would be compiled again with its hooks, once for every sub-layer.
    with ExitStack() as hooks, torch.compiler.set_stance("force_eager"):
        for residuals, recursion in zip(stacks, recursions, strict=True):
            for residual in residuals:
                if _omega(residual) is not None:
                    hooks.enter_context(recursion.watching(residual))
        run()
    return [recursion.omegas for recursion in recursions]


def _omega(residual: Residual) -> nn.Parameter | None:
    return residual.skip if isinstance(residual.skip, nn.Parameter) else None


class _Recursion:
    """The recursion of one stack over its sub-layers; `mask` [batch, length] is True at the tokens to include."""

    def __init__(self, mask: Tensor, kept: Collection[Residual]) -> None:
        self.mask = mask
        self.kept = kept
        self.omegas: list[float] = []
        self.following = 1.0

    @contextmanager
    def watching(self, residual: Residual) -> Iterator[None]:
        """Profile `residual` when it is called."""
        training = residual.dropout.training
        hook = residual.register_forward_pre_hook(self._profile)
        try:
            yield
        finally:
            hook.remove()
            residual.dropout.train(training)

    def _profile(self, residual: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        assert isinstance(residual, Residual)
        x, fx, *bottom = inputs
        omega, dropout = _omega(residual), residual.dropout
        assert omega is not None
        if residual not in self.kept:
            omega.fill_(self.following)
            self.omegas.append(self.following)
        # Var(f_i) is measured on the branch after dropout. Dropout is applied here, so the module's dropout must be the
        # identity.
        fx = (dropout.dropout if isinstance(dropout, StochasticBranch) else dropout)(fx)
        dropout.eval()
        self.following = math.sqrt(self._variance(x * omega) + self._variance(fx))
        return x, fx, *bottom

    def _variance(self, x: Tensor) -> float:
        real = x[self.mask]
        return float(real.to(torch.promote_types(real.dtype, torch.float32)).var(correction=0))
