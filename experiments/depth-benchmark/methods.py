"""The methods of the table, as overrides of the recipe `multi30k-de-en`."""

from __future__ import annotations

_BOTH = "model.encoder.history={0} model.decoder.history={0}"


def _history(kind: str, *more: str) -> list[str]:
    return ["model.residual=pre", *_BOTH.format(kind).split(), *more]


WARMUP = 120
"""WARMUP is the number of updates up to the peak rate."""

METHODS: dict[str, list[str]] = {
    "pre": ["model.residual=pre"],
    "post": ["model.residual=post"],
    "ds-init": ["model.residual=post", "model.init.kind=depth_scaled"],
    "admin": [
        "model.residual=admin",
        "model.init.kind=admin",
        "training.optimiser={kind: radam, betas: [0.9, 0.98], epsilon: 1e-8, rectified_only: true}",
    ],
    "deepnorm": ["model.residual=deepnorm", "model.init.kind=deepnorm"],
    "b2t": ["model.residual=b2t"],
    "t-fixup": ["model.residual=no_norm", "model.init.kind=t_fixup"],
    "rezero": ["model.residual=rezero"],
    "layer-scale": ["model.residual=layer_scale"],
    "ln-scaling": ["model.residual=ln_scaling"],
    "peri": ["model.residual=peri"],
    "res-post": ["model.residual=res_post"],
    "gpas": ["model.residual=pre", "model.wiring.gpas=true"],
    "mix-ln": ["model.residual=pre"],  # the ranges follow from the depth
    "sub-ln": ["model.residual=sub_ln", "model.init.kind=magneto"],
    "hybrid": ["model.residual=hybrid", "model.attention={qk_norm: rms, value_norm: rms}"],
    "keel": ["model.residual=keel"],
    "siamese": ["model.residual=siamese"],
    "hyper": ["model.residual=hyper", "model.wiring={streams: 4, dynamic: true}"],
    # Narrower feed-forward networks compensate for the maps that read the streams: equal parameters within 1 %.
    "mhc": ["model.residual=manifold_hyper", "model.d_ff=368", "model.encoder.d_ff=416"],
    "mhc-lite": [
        "model.residual=manifold_hyper",
        "model.wiring.mixing=permutations",
        "model.d_ff=320",
        "model.encoder.d_ff=384",
    ],
    "resformer": ["model.residual=pre", "model.attention={value_residual: half, cross_value_residual: half}"],
    "resformer-learned": [
        "model.residual=pre",
        "model.attention={value_residual: learned, cross_value_residual: learned}",
    ],
    # Wider feed-forward networks make up for the value maps that it lacks.
    "svformer": [
        "model.residual=pre",
        "model.attention={value_residual: single, cross_value_residual: single}",
        "model.d_ff=640",
        "model.encoder.d_ff=576",
    ],
    "dlcl": _history("dlcl"),
    "blocks": _history("blocks"),
    "depth-weighted": _history("depth_weighted"),
    "attnres": [
        "model.residual=none",
        *_BOTH.format("attention_residuals").split(),
        "model.combination.unit=sublayer",
    ],
    "attnres-blocks": [
        "model.residual=none",
        *_BOTH.format("block_attention_residuals").split(),
        "model.combination.unit=sublayer",
    ],
    # Narrower feed-forward networks compensate for the networks that compute the weights.
    "mudd": [*_history("mudd"), "model.d_ff=480", "model.encoder.d_ff=472"],
    "transparent": ["model.residual=pre", "model.memory=transparent"],
    "completep": ["model.residual=pre", "model.transfer={width: 128, encoder_layers: 6, decoder_layers: 6}"],
    "lipschitz": ["model.residual=post", "model.init.kind=lipschitz"],
    "scale-norm": [
        "model.residual=pre",
        "model.norm=scale",
        "model.embedding.unit_length=true",
        "model.init={kind: uniform, uniform: 0.01}",
    ],
    "branch-norm": ["model.residual=branch_norm", f"model.wiring.branch_updates={WARMUP}"],
    # Wider feed-forward networks, since there are half as many layers (`_of_depth` defines which are shared).
    "tied": ["model.residual=pre", "model.d_ff=1536", "model.encoder.d_ff=1280"],
    "ode-2": ["model.residual=pre", "model.encoder.solver=rk2_gated"],
    "ode-4": ["model.residual=pre", "model.encoder.solver=rk4"],
    "depth-growing": [*_history("cross_module"), "model.memory=hierarchical"],  # with growth, like the next two
    "midas": ["model.residual=pre"],
    "lidas": ["model.residual=pre"],
    "r-drop": ["model.residual=pre", "training.loss.r_drop=5"],
    "smoothed": ["model.residual=pre", "training.optimiser.weight_smoothing=1e-4"],
    "wsd": ["model.residual=pre", "training.schedule.kind=wsd"],
}
"""METHODS maps a method to overrides. Everything else is the same for all (`common`), and the rate is swept for
each.
"""

RATES = (7e-4, 2e-3, 4e-3)
"""RATES are the peaks that are tried for each method at 18-18."""
BEYOND = (2.5e-4, 8e-3, 1.6e-2)
"""BEYOND are the peaks that are tried if the best so far is at an edge, where it need not be the optimum."""
TIE, LEAN = 0.1, 0.5
"""TIE is how far, in nats, the trial of a higher rate may be from the best one for a full run to try it.

Seeds differ by as much. LEAN is the same for a lower rate; it is larger, because trials favour high rates.
"""
SWEEP, UPDATES, LONG = 200, 600, 1500
"""SWEEP, UPDATES and LONG are the lengths of a rate trial, of a run for the table, and of one on the second corpus."""
PRECISION = "fp32"
"""PRECISION is that of all runs from 2026-11-24 on. Earlier rate trials were in bf16, which a processor without AVX-512
emulates twelve times more slowly; each result records its precision.
"""
SLOWER = ("blocks", "resformer", "svformer", "b2t", "hybrid")
"""SLOWER are the methods that come last, because a closely related one is among the others."""
BRIEF: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("lipschitz", "scale-norm", "wsd", "smoothed", "midas", "lidas", "depth-growing"), ()),
    **dict.fromkeys(("branch-norm", "tied"), ("36-12",)),
    **dict.fromkeys(("mudd", "ode-2", "r-drop", "ode-4", "mhc", "attnres"), ()),
}
"""BRIEF are the methods that get the fewest hours (`run.py --brief`), cheap ones first.

They use the rate of the trials, with three seeds at 18-18 and one seed at these other depths.
"""
SWEPT_AT = {"completep": "6-6"}
"""SWEPT_AT maps a method to the depth from which its rate is taken, the base of the transfer."""
DEPTHS: dict[str, tuple[int, int]] = {"6-6": (6, 6), "18-18": (18, 18), "36-12": (36, 12)}
"""DEPTHS are encoder and decoder layers."""


def _of_depth(method: str, depth: tuple[int, int], updates: int) -> list[str]:
    """Return the part of a method that depends on the depth or on the length of the run."""
    stacks = tuple(zip(("encoder", "decoder"), depth, strict=True))
    if method == "mix-ln":  # the lower quarter is post-norm
        return [f"model.{stack}.ranges=[{{layers: {layers // 4}, residual: post}}]" for stack, layers in stacks]
    if method == "tied":  # cycle (rev) of Takase and Kiyono (2021), with M = N / 2
        halves = [(stack, list(range(1, layers // 2 + 1))) for stack, layers in stacks]
        return [f"model.{stack}.tied_layers={half + half[::-1]}" for stack, half in halves]
    if method == "depth-growing":
        return [f"model.combination.period={depth[0] // 2}", _growth(depth, updates, 2, "random")]
    return [_growth(depth, updates, 3, method)] if method in ("midas", "lidas") else []


def _growth(depth: tuple[int, int], updates: int, parts: int, strategy: str) -> str:
    """Return growth of both stacks in equal parts, one after each part of the updates but the last."""
    stages = [
        {"layers": depth[0] * n // parts, "decoder_layers": depth[1] * n // parts, "updates": updates * n // parts}
        for n in range(1, parts)
    ]
    return f"training.growth={{stages: {stages}, copy_strategy: {strategy}, keep_stages: false}}"


def common(method: str, depth: tuple[int, int], rate: float, updates: int, seed: int) -> list[str]:
    """Return all overrides of one run; a short one, for the sweep, is validated only at its end."""
    encoder, decoder = depth
    every = max(1, updates // 4) if updates > SWEEP else updates
    return [
        "model={preset: tiny, dropout: {residual: 0.1, attention: 0.0, activation: 0.1, embedding: 0.1}}",
        f"model.encoder.layers={encoder}",
        f"model.decoder.layers={decoder}",
        "training.batch.max_tokens=512",
        "training.optimiser={kind: adam, betas: [0.9, 0.98], epsilon: 1e-8}",
        f"training.schedule={{kind: isqrt, warmup_updates: {WARMUP}, peak: {rate}}}",
        *METHODS[method],
        *_of_depth(method, depth, updates),
        "training.clip_norm=null",
        "training.log_every_updates=10",
        f"training.validation={{every_updates: {every}, decode: false, metric: loss}}",
        f"training.checkpoint={{every_updates: {max(1, updates // 12)}, keep_last: 3, average_last: 3}}",
        f"training.diagnostics={{every_updates: {max(1, updates // 2)}, max_share: null}}",
        f"training.stop={{updates: {updates}}}",
        f"training.precision={PRECISION}",
        "training.threads=1",
        "training.tensorboard=false",
        f"training.seed={seed}",
    ]


_USUAL = tuple(method for method in METHODS if method not in SLOWER and method not in BRIEF)
CLIMBED: dict[str, tuple[str, ...]] = {
    "18-18": tuple(method for method in _USUAL if method not in SWEPT_AT),
    "6-6": _USUAL,
    "36-12": ("pre", "dlcl", "t-fixup", "layer-scale", "hyper"),
}
"""CLIMBED maps a depth to the methods for which full runs search the rate there. At 36-12, where a run takes ten
minutes or more, these are the ones that might be recommended; the others use their rate of 18-18.
"""
