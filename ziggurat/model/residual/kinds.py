"""Residual kinds, one function each: how a sub-layer f joins the stream x, mostly by slots of `Residual`.

LN stands for `options.norm()`, layer normalisation or RMSNorm, and f has its dropout. A stack of n streams
[..., n, d_model] starts with n copies of its input and ends with their sum, or with a module of this file that merges
them. Other parts of a stack, such as a final LN, are in the kind's row in ziggurat.model.kinds.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ziggurat.model.residual.base import NormalisedSkip, NoSkip, Residual, ResidualOptions, ScaledNorm, SublayerPosition
from ziggurat.model.roles import Role, Slot, table_slots


class _StreamConnection(Residual):
    """H' = R H + p^T dropout(f(LN(q H))) for n streams H [..., n, d_model]; subclasses define q, p and R.

    They may depend on H: q is needed before the sub-layer, p and R after it, so each is computed when it is needed.
    """

    @abstractmethod
    def reading(self, x: Tensor) -> Tensor:
        """Return q, [n] or [..., n], for the streams `x` [..., n, d_model]."""

    @abstractmethod
    def writing(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return p, [n] or [..., n], and R, [n, n] or [..., n, n], for the streams `x` [..., n, d_model]."""

    def enter(self, x: Tensor) -> Tensor:
        """Return the sub-layer's input [..., d_model] for the streams `x` [..., n, d_model]."""
        return super().enter((self.reading(x)[..., None] * x).sum(-2).to(x.dtype))

    def forward(self, x: Tensor, fx: Tensor, bottom: Tensor | None = None) -> Tensor:
        """Join the streams `x` [..., n, d_model] and the sub-layer's output `fx` [..., d_model]."""
        return self.join_as(x, x, fx)

    def join_as(self, seen: Tensor, x: Tensor, fx: Tensor, bottom: Tensor | None = None) -> Tensor:
        """Join them with weights computed from the streams `seen`."""
        write, mix = self.writing(seen)
        # Autocast would compute the product in a half type and round the streams at every sub-layer.
        with torch.autocast(x.device.type, enabled=False):
            mixed = mix.to(x.dtype) @ x
        return mixed + write[..., None].to(x.dtype) * self.dropout(fx)[..., None, :]


class HyperConnection(_StreamConnection):
    """H' = A_r^T H + B^T dropout(f(LN(A_m^T H))) for n streams H: Zhu et al. 2024, equations 2 to 5.

    `alpha` [n, 1 + n] is (A_m, A_r), at first (e_(k mod n), I) for sub-layer k of its stack (section 2.3; the paper
    leaves open whether k starts at 0, as here, or 1, which only reorders the streams); `beta` [n] is B, at first 1.
    Dynamic connections add alpha_scale tanh(LN'(H) alpha_map) and beta_scale tanh(LN'(H) beta_map) to them (equations
    10 to 13): LN' is a separate norm, the maps start at 0, the scales [1] at 0.01. The paper also leaves open whether
    the initial factor sqrt(n) of output matrices (section 4) enlarges or shrinks them; it is omitted here.
    """

    def __init__(self, number: int, options: ResidualOptions) -> None:
        super().__init__(options.dropout(), in_norm=options.norm())
        n, d = options.streams, options.d_model
        self.alpha = nn.Parameter(torch.cat([torch.eye(n)[:, [number % n]], torch.eye(n)], dim=1))
        self.beta = nn.Parameter(torch.ones(n))
        self.stream_norm = options.norm() if options.dynamic else None
        if options.dynamic:
            self.alpha_map, self.beta_map = nn.Parameter(torch.zeros(d, 1 + n)), nn.Parameter(torch.zeros(d))
            self.alpha_scale, self.beta_scale = (nn.Parameter(torch.full((1,), 0.01)) for _ in range(2))

    def reading(self, x: Tensor) -> Tensor:
        """Return A_m."""
        return self._weights(x)[0][..., 0]

    def writing(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return B and A_r^T."""
        alpha, beta = self._weights(x)
        return beta, alpha[..., 1:].transpose(-1, -2)

    def _weights(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (A_m, A_r) and B; dynamic ones vary by position: [..., n, 1 + n] and [..., n]."""
        if self.stream_norm is None:
            return self.alpha, self.beta
        seen = self.stream_norm(x)
        alpha = self.alpha + self.alpha_scale * torch.tanh(seen @ self.alpha_map)
        return alpha, self.beta + self.beta_scale * torch.tanh(seen @ self.beta_map)


SINKHORN_ROUNDS = 20
"""SINKHORN_ROUNDS is the number of rounds of Sinkhorn's iteration (table 5 of Xie et al. 2025)."""


class ManifoldConnection(_StreamConnection):
    """H' = R H + p^T dropout(f(LN(q H))) with q, p and R made from the streams themselves: Xie et al. 2025 (mHC).

    For n streams H [..., n, d_model], x = RMSNorm(vec H) over all channels, and [c_q, c_p, c_R] = s (x W) + b with a
    scale s for each of the three parts (equations 7 to 9): q = sigmoid(c_q), p = 2 sigmoid(c_p), and R [n, n] is doubly
    stochastic, so that the streams' mean passes through any depth unchanged. R is

    - with `mixing: sinkhorn`, exp(c_R) after 20 rounds that divide its columns, then its rows, by their sums, so that
      each new stream is exactly a mean of the old ones, and each old one is nearly fully distributed;
    - with `mixing: permutations` (mHC-lite, Yang and Gao 2026), sum_r softmax(c_R)_r P_r over all n! permutations of
      the streams: exact, without iteration.

    The paper gives only one initial value, s = 0.01; W and b are our choice. `stream_start: streams`: W = 0, and b such
    that connection k reads stream k mod n, writes to all, and mixes none (to 3 digits), as hyper-connections start;
    reading different streams breaks their symmetry. `normal`: W from N(0, 0.02^2), b = 0, s = 1, as in the port of
    DeepSeek's model to transformers. All of it is computed in fp32.
    """

    permutations: Tensor | None

    def __init__(self, number: int, options: ResidualOptions) -> None:
        super().__init__(options.dropout(), in_norm=options.norm())
        n = options.streams
        self.streams, self.start, self.width = n, options.stream_start, n * options.d_model
        mixed = n * n
        self.register_buffer("permutations", None, persistent=False)
        if options.mixing == "permutations":
            orders = torch.tensor(list(itertools.permutations(range(n))))
            self.permutations = F.one_hot(orders, n).float()  # the identity first
            mixed = len(orders)
        self.weight = nn.Parameter(torch.zeros(2 * n + mixed, self.width))
        self.bias = nn.Parameter(torch.zeros(2 * n + mixed))
        self.scale = nn.Parameter(torch.full((3,), 0.01 if self.start == "streams" else 1.0))
        if self.start == "streams":
            with torch.no_grad():
                read, _, mix = self.bias.split([n, n, mixed])
                read.fill_(-8.0)[number % n] = 8.0
                kept = torch.eye(n).flatten().bool() if self.permutations is None else torch.arange(mixed) == 0
                # The other n! - 1 small weights add up, so the identity needs a larger lead with more permutations.
                mix.copy_(torch.where(kept, 8.0 + math.log(max(1.0, mixed / n)), -8.0))

    def reading(self, x: Tensor) -> Tensor:
        """Return q, [..., n]."""
        (read,) = self._logits(x, slice(0, 1))
        return torch.sigmoid(read)

    def writing(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return p, [..., n], and R, [..., n, n]."""
        write, mix = self._logits(x, slice(1, 3))
        with torch.autocast(x.device.type, enabled=False):  # otherwise the mean of permutations would have a half type
            return 2 * torch.sigmoid(write), self._mixing(mix)

    def _logits(self, x: Tensor, parts: slice) -> list[Tensor]:
        """Return the requested ones of c_q, c_p and c_R, at least in fp32."""
        sizes = [self.streams, self.streams, len(self.bias) - 2 * self.streams]
        rows = zip(self.scale, self.weight.split(sizes), self.bias.split(sizes), strict=True)
        with torch.autocast(x.device.type, enabled=False):
            wide = torch.promote_types(x.dtype, torch.float32)
            seen = F.rms_norm(x.flatten(-2).to(wide), (self.width,), eps=1e-6)
            return [s * (seen @ weight.to(wide).T) + b for s, weight, b in list(rows)[parts]]

    def _mixing(self, logits: Tensor) -> Tensor:
        """Return R, [..., n, n]."""
        n = self.streams
        if self.permutations is not None:
            return (logits.softmax(-1) @ self.permutations.to(logits.dtype).flatten(1)).unflatten(-1, (n, n))
        # In logarithms, so that a row of small weights divided by its sum stays exact.
        mix = logits.unflatten(-1, (n, n))
        for _ in range(SINKHORN_ROUNDS):
            mix = mix - mix.logsumexp(-2, keepdim=True)
            mix = mix - mix.logsumexp(-1, keepdim=True)
        return mix.exp()

    def slots(self) -> Iterator[Slot]:
        """Yield the role of every parameter that it holds itself; W is drawn if it does not start at 0."""
        roles = {"weight": Role.STREAM_MAP if self.start == "normal" else Role.WIRING}
        return table_slots(self, {**roles, "bias": Role.WIRING, "scale": Role.WIRING})


class BranchNorm(Residual):
    """y = LN(x + a dropout(f(x))) with a = min(1, t / T) in update t of a training, 1 elsewhere: Liu et al. 2023.

    In the first updates, which make deep post-norm models diverge, branches are nearly switched off. The final model is
    plain post-norm, whereas DeepNorm keeps weak branches. `begin` sets a from the update number alone, so nothing has
    to be saved. The paper's text was not available: notes on it state that a grows with the updates. Linear growth from
    0 to 1 is an interpretation, and T (4,000) may not be the authors' value.
    """

    factor: Tensor

    def __init__(self, updates: int, options: ResidualOptions) -> None:
        super().__init__(options.dropout(), out_norm=options.norm())
        self.updates = updates
        # A buffer, as in ScaledNorm: recorded and compiled passes read its current value.
        self.register_buffer("factor", torch.ones((), dtype=torch.float64), persistent=False)

    def begin(self, update: int) -> None:
        """Set a for update `update`, from 1."""
        self.factor.fill_(min(1.0, update / self.updates))

    def forward(self, x: Tensor, fx: Tensor, bottom: Tensor | None = None) -> Tensor:
        """Join the stream `x` and the sub-layer's output `fx`, both [..., d_model]."""
        return super().forward(x, fx * self.factor if self.training else fx, bottom)


class SiameseConnection(Residual):
    """x' = N_x(x) + z / c and y' = y + z with z = dropout(f(N_in(N_x(x) + N_y(y)))): Li et al. 2026 (SiameseNorm).

    Two streams H = (x, y): x is normalised at every sub-layer, as in post-norm, y never, as in pre-norm, and one branch
    feeds both; `factor` is 1 / c. A stack ends with SiameseEnd, then a norm.
    """

    factor: Tensor

    def __init__(self, factor: float, options: ResidualOptions) -> None:
        super().__init__(options.dropout(), in_norm=options.norm())
        self.x_norm, self.y_norm = options.norm(), options.norm()
        # A buffer, as in ScaledNorm: it differs from layer to layer.
        self.register_buffer("factor", torch.tensor(factor, dtype=torch.float64), persistent=False)

    def enter(self, x: Tensor) -> Tensor:
        """Return the sub-layer's input [..., d_model] for the streams `x` [..., 2, d_model]."""
        post, pre = x.unbind(-2)
        return super().enter(self.x_norm(post) + self.y_norm(pre))

    def forward(self, x: Tensor, fx: Tensor, bottom: Tensor | None = None) -> Tensor:
        """Join the streams `x` [..., 2, d_model] and the sub-layer's output `fx` [..., d_model]."""
        post, pre = x.unbind(-2)
        z = self.dropout(fx)
        return torch.stack([self.x_norm(post) + z * self.factor, pre + z], dim=-2)


class SiameseEnd(nn.Module):
    """N_x(x) + N_y(y), [..., d_model], for the two streams [..., 2, d_model] of SiameseConnection."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.x_norm, self.y_norm = norm(), norm()

    def forward(self, x: Tensor) -> Tensor:
        """Return one stream for the two."""
        post, pre = x.unbind(-2)
        return self.x_norm(post) + self.y_norm(pre)


def post_norm(position: SublayerPosition, options: ResidualOptions) -> Residual:
    """y = LN(x + f(x)): Vaswani et al. 2017, section 3.1."""
    return Residual(options.dropout(), out_norm=options.norm())


def pre_norm(position: SublayerPosition, options: ResidualOptions) -> Residual:
    """y = x + f(LN(x)): Wang et al. 2019, equation 3. A final LN ends the stack. `options.branch` multiplies f."""
    return Residual(options.dropout(), in_norm=options.norm(), branch=options.branch)


def lingvo(position: SublayerPosition, options: ResidualOptions) -> Residual:
    """y = LN(x) + f(LN(x)) for attention, x + f(LN(x)) for feed-forward networks: lingvo's code of Bapna et al. 2018.

    The paper does not describe it. The LN on the skip cuts the identity path once per encoder layer and twice per
    decoder layer, so there is no final LN.
    """
    return (NormalisedSkip if position.attention else Residual)(options.dropout(), in_norm=options.norm())


def no_skip(position: SublayerPosition, options: ResidualOptions) -> Residual:
    """y = f(LN(x)): "- residuals" in tables 1 and 2 of Bapna et al. 2018. The stack ends as `model.residual` does."""
    return NoSkip(options.dropout(), in_norm=options.norm())


def admin(position: SublayerPosition, options: ResidualOptions) -> Residual:
    """y = LN(omega * x + f(x)), a vector omega [d_model] for each sub-layer: Liu et al. 2020, section 4.

    omega is 1 until it is profiled (ziggurat.train.profiling) or set to a constant (ziggurat.model.init). The
    released code trains it, the paper does not: `options.omega_trainable`.
    """
    omega = nn.Parameter(torch.ones(options.d_model), requires_grad=options.omega_trainable)
    return Residual(options.dropout(), out_norm=options.norm(), skip=omega)


def branch_norm(position: SublayerPosition, options: ResidualOptions) -> Residual:
    """BranchNorm: see that class."""
    return BranchNorm(options.branch_updates, options)


def deepnorm(position: SublayerPosition, options: ResidualOptions) -> Residual:
    """y = LN(alpha x + f(x)), alpha from the depths of both stacks: Wang et al. 2022, section 2 and figure 2."""
    alpha, _ = deepnorm_constants(position.encoder_layers, position.decoder_layers, position.decoder)
    return Residual(options.dropout(), out_norm=options.norm(), skip=alpha)


def deepnorm_constants(encoder_layers: int, decoder_layers: int, decoder: bool) -> tuple[float, float]:
    """Return (alpha, beta) for one stack of an encoder-decoder: Wang et al. 2022, section 2, figure 2.

    With N encoder and M decoder layers, alpha is 0.81 (N^4 M)^(1/16) in the encoder and (3M)^(1/4) in the decoder;
    beta, the gain of value, output and feed-forward weights at the start, is 0.87 (N^4 M)^(-1/16) and (12M)^(-1/4).
    TorchScale uses 1.15 instead of 0.87; this is the paper's figure. A decoder with merged attention has two branches
    per layer, for which 2M would suffice; it keeps the paper's 3M, because alpha is part of the function that trained
    models compute.
    """
    if decoder:
        return (3 * decoder_layers) ** 0.25, (12 * decoder_layers) ** -0.25
    both = (encoder_layers**4 * decoder_layers) ** 0.0625
    return 0.81 * both, 0.87 / both


def keel(position: SublayerPosition, options: ResidualOptions) -> Residual:
    """y = LN'(alpha x + f(LN(x))), alpha the number of sub-layers of the stack: Chen and Wei 2026 (KEEL). A final LN.

    In the first layer alpha is 1, and its first sub-layer has no LN' (as in three reproductions; others have none in
    the whole layer; the paper's text was not available). The authors count two sub-layers per layer; counting three in
    a decoder layer is an interpretation.
    """
    first = position.layer == 1
    return Residual(
        options.dropout(),
        in_norm=options.norm(),
        out_norm=None if first and position.sublayer == 0 else options.norm(),
        skip=None if first else float(position.sublayers * position.layers),
    )


def hybrid(position: SublayerPosition, options: ResidualOptions) -> Residual:
    """y = x + f(x) for attention, u + f(u) with u = LN(x) for feed-forward networks: Zhuo et al. 2025 (HybridNorm).

    Attention has its norms inside, on the queries, keys and values of each head (`attention.qk_norm`, `value_norm`). A
    final LN. The authors have decoder-only models and do not cover attention to the memory, which is treated like
    self-attention here.
    """
    if position.attention:
        return Residual(options.dropout())
    return NormalisedSkip(options.dropout(), in_norm=options.norm())


def rezero(position: SublayerPosition, options: ResidualOptions) -> Residual:
    """y = x + a f(x), one scalar a [1] per layer, 0 at first: Bachlechner et al. 2020, section 3.

    Nothing is normalised. The paper has no decoder; here it is built like the encoder.
    """
    gate = options.shared.setdefault("rezero", nn.Parameter(torch.zeros(1)))
    return Residual(options.dropout(), branch=gate)


def layer_scale(position: SublayerPosition, options: ResidualOptions) -> Residual:
    """y = x + lambda * f(LN(x)), lambda [d_model] trained: Touvron et al. 2021 (CaiT), section 2. A final LN.

    lambda starts at `options.layer_scale`, by default at 0.1 in stacks of up to 18 layers, 1e-5 up to 24, and 1e-6
    beyond.
    """
    start = options.layer_scale
    if start is None:
        start = 0.1 if position.layers <= 18 else 1e-5 if position.layers <= 24 else 1e-6
    factor = nn.Parameter(torch.full((options.d_model,), start))
    return Residual(options.dropout(), in_norm=options.norm(), branch=factor)


def ln_scaling(position: SublayerPosition, options: ResidualOptions) -> Residual:
    """y = x + f(LN(x) / sqrt(l)) in layer l, from 1: Sun et al. 2025 (LayerNorm Scaling). A final LN, not scaled.

    The variance of a pre-norm stream grows with depth, so its upper layers hardly change it; the scaling limits this
    growth.
    """
    return Residual(options.dropout(), in_norm=ScaledNorm(options.norm(), 1 / math.sqrt(position.layer)))


def peri(position: SublayerPosition, options: ResidualOptions) -> Residual:
    """y = x + LN(f(LN(x))): Kim et al. 2025 (Peri-LN), with dropout on the normalised branch.

    The stack normalises its input, which the paper calls optional, and its output. Without the first it is CogView's
    sandwich norm (Ding et al. 2021, kind `sandwich`), whose code has dropout inside f.
    """
    return Residual(options.dropout(), in_norm=options.norm(), branch_norm=options.norm())


def res_post(position: SublayerPosition, options: ResidualOptions) -> Residual:
    """y = x + LN(f(x)): Liu et al. 2022 (Swin v2), section 3.2. A final LN ends the stack."""
    return Residual(options.dropout(), branch_norm=options.norm())


def b2t(position: SublayerPosition, options: ResidualOptions) -> Residual:
    """y = LN(x + f(x)), and in a layer's last sub-layer LN(x + f(x) + b), b the layer's input: Takase et al. 2022.

    The input of a layer thus bypasses all of the layer's norms except the last. The released code also multiplies
    initial weights by 1/sqrt(layers of the stack); here initialisation is a separate choice.
    """
    return Residual(options.dropout(), out_norm=options.norm(), bypass=position.sublayer == position.sublayers - 1)


def no_norm(position: SublayerPosition, options: ResidualOptions) -> Residual:
    """y = x + f(x): Huang et al. 2020, with their initialisation T-Fixup (ziggurat.model.init)."""
    return Residual(options.dropout())


def fixup(position: SublayerPosition, options: ResidualOptions) -> Residual:
    """y = x + m f(x), with a scalar m [1] that starts at 1: Zhang, Dauphin and Ma 2019, section 3, rule 3.

    The other rules are shifts in place of biases (ShiftedLinear) and branches that start at 0 (ziggurat.model.init).
    """
    return Residual(options.dropout(), branch=nn.Parameter(torch.ones(1)))


def hyper(position: SublayerPosition, options: ResidualOptions) -> Residual:
    """Hyper-connections: see HyperConnection."""
    return HyperConnection(position.number, options)


def manifold_hyper(position: SublayerPosition, options: ResidualOptions) -> Residual:
    """Manifold-constrained hyper-connections: see ManifoldConnection."""
    return ManifoldConnection(position.number, options)


def siamese(position: SublayerPosition, options: ResidualOptions) -> Residual:
    """SiameseNorm: see SiameseConnection. c = sqrt(s l) in layer l of s sub-layers, as in the authors' code.

    Its layers have two sub-layers; counting cross-attention as well is an interpretation.
    """
    return SiameseConnection(1 / math.sqrt(position.sublayers * position.layer), options)
