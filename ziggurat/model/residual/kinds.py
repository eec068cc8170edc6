"""Residual kinds, one function each, in the order of the table in docs/depth.md.

A kind says how a sub-layer f joins the stream x. Each fills slots of the one equation of ziggurat.model.residual.base,

    y = out_norm(skip * x + branch * dropout(branch_norm(f(in_norm(x)))))

and an empty slot is the identity. LN stands for `options.norm()`, layer normalisation or RMSNorm; in the docstrings f
has its dropout. What a stack adds before its first layer and after its last (a final LN, say) and what else must be
known of a kind is on its row in ziggurat.model.kinds.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from ziggurat.model.residual.base import NormalisedSkip, NoSkip, Residual, ResidualOptions, ScaledNorm, SublayerPosition
from ziggurat.model.residual.streams import HyperConnection, ManifoldConnection, SiameseConnection


def post_norm(position: SublayerPosition, options: ResidualOptions) -> Residual:
    """y = LN(x + f(x)): Vaswani et al. 2017, section 3.1."""
    return Residual(options.dropout(), out_norm=options.norm())


def pre_norm(position: SublayerPosition, options: ResidualOptions) -> Residual:
    """y = x + f(LN(x)): Wang et al. 2019, equation 3. A final LN ends the stack. `options.branch` multiplies f."""
    return Residual(options.dropout(), in_norm=options.norm(), branch=options.branch)


def lingvo(position: SublayerPosition, options: ResidualOptions) -> Residual:
    """y = LN(x) + f(LN(x)) for attention, x + f(LN(x)) for feed-forward networks: lingvo's code of Bapna et al. 2018.

    The paper does not print it. The LN on the skip cuts the identity path once per encoder layer and twice per decoder
    layer, so there is no final LN.
    """
    return (NormalisedSkip if position.attention else Residual)(options.dropout(), in_norm=options.norm())


def no_skip(position: SublayerPosition, options: ResidualOptions) -> Residual:
    """y = f(LN(x)): "- residuals" in tables 1 and 2 of Bapna et al. 2018. The stack ends as `model.residual` does."""
    return NoSkip(options.dropout(), in_norm=options.norm())


def admin(position: SublayerPosition, options: ResidualOptions) -> Residual:
    """y = LN(omega * x + f(x)), a vector omega [d_model] for each sub-layer: Liu et al. 2020, section 4.

    omega is 1 until it is profiled (ziggurat.train.profile) or set to a constant (ziggurat.model.init.admin). The
    released code trains it, the paper does not: `options.omega_trainable`.
    """
    omega = nn.Parameter(torch.ones(options.d_model), requires_grad=options.omega_trainable)
    return Residual(options.dropout(), out_norm=options.norm(), skip=omega)


def deepnorm(position: SublayerPosition, options: ResidualOptions) -> Residual:
    """y = LN(alpha x + f(x)), alpha from the depths of both stacks: Wang et al. 2022, section 2 and figure 2."""
    alpha, _ = deepnorm_constants(position.encoder_layers, position.decoder_layers, position.decoder)
    return Residual(options.dropout(), out_norm=options.norm(), skip=alpha)


def deepnorm_constants(encoder_layers: int, decoder_layers: int, decoder: bool) -> tuple[float, float]:
    """Return (alpha, beta) for one stack of an encoder-decoder: Wang et al. 2022, section 2, figure 2.

    With N encoder and M decoder layers, alpha is 0.81 (N^4 M)^(1/16) in the encoder and (3M)^(1/4) in the decoder;
    beta, the gain of value, output and feed-forward weights at the start, is 0.87 (N^4 M)^(-1/16) and (12M)^(-1/4).
    TorchScale has 1.15 for 0.87; this is the paper's figure. A decoder of merged attention has two branches to a layer
    and would do with 2M for 3M; it keeps the paper's count, because alpha is part of what trained models compute.
    """
    if decoder:
        return (3 * decoder_layers) ** 0.25, (12 * decoder_layers) ** -0.25
    both = (encoder_layers**4 * decoder_layers) ** 0.0625
    return 0.81 * both, 0.87 / both


def keel(position: SublayerPosition, options: ResidualOptions) -> Residual:
    """y = LN'(alpha x + f(LN(x))), alpha the number of sub-layers of the stack: Chen and Wei 2026 (KEEL). A final LN.

    In the first layer alpha is 1, and its first sub-layer has no LN' (so three reproductions; others have none in the
    whole layer; the paper's text was not at hand). The authors count two sub-layers to a layer; that a decoder layer
    has three is our reading.
    """
    first = position.layer == 1
    return Residual(
        options.dropout(),
        in_norm=options.norm(),
        out_norm=None if first and position.sublayer == 0 else options.norm(),
        skip=None if first else float(position.branches),
    )


def hybrid(position: SublayerPosition, options: ResidualOptions) -> Residual:
    """y = x + f(x) for attention, u + f(u) with u = LN(x) for feed-forward networks: Zhuo et al. 2025 (HybridNorm).

    Attention has its norms inside, on the queries, keys and values of each head (`attention.qk_norm`, `value_norm`). A
    final LN. For attention to the memory the authors, who have decoders only, say nothing: here it is as the other.
    """
    if position.attention:
        return Residual(options.dropout())
    return NormalisedSkip(options.dropout(), in_norm=options.norm())


def rezero(position: SublayerPosition, options: ResidualOptions) -> Residual:
    """y = x + a f(x), one scalar a [1] per layer, 0 at first: Bachlechner et al. 2020, section 3.

    Nothing is normalised. The paper has no decoder; ours is built like the encoder.
    """
    gate = options.shared.setdefault("rezero", nn.Parameter(torch.zeros(1)))
    return Residual(options.dropout(), branch=gate)


def layer_scale(position: SublayerPosition, options: ResidualOptions) -> Residual:
    """y = x + lambda * f(LN(x)), lambda [d_model] trained: Touvron et al. 2021 (CaiT), section 2. A final LN.

    lambda starts as `options.layer_scale`, by default as 0.1 in stacks of up to 18 layers, 1e-5 up to 24, 1e-6 beyond.
    """
    start = options.layer_scale
    if start is None:
        start = 0.1 if position.layers <= 18 else 1e-5 if position.layers <= 24 else 1e-6
    factor = nn.Parameter(torch.full((options.d_model,), start))
    return Residual(options.dropout(), in_norm=options.norm(), branch=factor)


def ln_scaling(position: SublayerPosition, options: ResidualOptions) -> Residual:
    """y = x + f(LN(x) / sqrt(l)) in layer l, from 1: Sun et al. 2025 (LayerNorm Scaling). A final LN, not scaled.

    The variance of a pre-norm stream grows with depth, so its upper layers hardly change it; this keeps it down.
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

    The input of a layer thus bypasses all of the layer's norms but the last. The released code also multiplies initial
    weights by 1/sqrt(layers of the stack); here initialisation is a choice by itself.
    """
    return Residual(options.dropout(), out_norm=options.norm(), bypass=position.last)


def no_norm(position: SublayerPosition, options: ResidualOptions) -> Residual:
    """y = x + f(x): Huang et al. 2020, with their initialisation T-Fixup (ziggurat.model.init.schemes)."""
    return Residual(options.dropout())


def fixup(position: SublayerPosition, options: ResidualOptions) -> Residual:
    """y = x + m f(x), a scalar m [1] from 1: Zhang, Dauphin and Ma 2019, section 3, rule 3.

    The other rules are shifts for biases (ziggurat.model.residual.fixup) and branches that start at 0
    (ziggurat.model.init.schemes).
    """
    return Residual(options.dropout(), branch=nn.Parameter(torch.ones(1)))


def hyper(position: SublayerPosition, options: ResidualOptions) -> Residual:
    """n streams H: f reads LN(A_m' H), then H becomes A_r' H + B f: Zhu et al. 2024, equations 2 to 5.

    Connection k = 0, 1, ... of its stack, counted over sub-layers, begins by reading stream k mod n (section 2.3). The
    paper leaves open if k begins at 0 or 1, which only orders the streams, and if the initial factor sqrt(n) of output
    matrices (section 4) enlarges or shrinks them: there is none here.
    """
    return HyperConnection((position.layer - 1) * position.sublayers + position.sublayer, options)


def manifold_hyper(position: SublayerPosition, options: ResidualOptions) -> Residual:
    """H becomes R H + p f(LN(q H)), with R doubly stochastic and all three made from H: Xie et al. 2025 (mHC)."""
    return ManifoldConnection((position.layer - 1) * position.sublayers + position.sublayer, options)


def siamese(position: SublayerPosition, options: ResidualOptions) -> Residual:
    """x becomes N(x) + z/c and y becomes y + z, with z = f(N(N(x) + N(y))): Li et al. 2026 (SiameseNorm).

    c = sqrt(s l) in layer l of s sub-layers. A stack ends with N(N(x) + N(y)).
    """
    return SiameseConnection(1 / math.sqrt(position.sublayers * position.layer), options)
