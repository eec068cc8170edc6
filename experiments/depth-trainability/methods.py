"""The methods and depths that are compared: overrides of the recipe `multi30k-de-en`."""

from __future__ import annotations

METHODS: dict[str, list[str]] = {
    # Post-norm family: peak 1e-3, the rate of the ADMIN recipes (En-De).
    "post": ["model.residual=post", "training.schedule.peak=1e-3"],
    "ds-init": ["model.residual=post", "model.init.kind=depth_scaled", "training.schedule.peak=1e-3"],
    "ds-init-1/2": [
        "model.residual=post",
        "model.init={kind: depth_scaled, exponent: 0.5}",
        "training.schedule.peak=1e-3",
    ],
    "admin": [
        "model.residual=admin",
        "model.init.kind=admin",
        "training.optimiser={kind: radam, betas: [0.9, 0.98], epsilon: 1e-8, rectified_only: true}",
        "training.schedule.peak=1e-3",
    ],
    "deepnorm": ["model.residual=deepnorm", "model.init.kind=deepnorm", "training.schedule.peak=1e-3"],
    "dlcl-post": [
        "model.residual=post",
        "model.encoder.history=dlcl",
        "model.decoder.history=dlcl",
        "training.schedule.peak=1e-3",
    ],
    # Pre-norm family: peak 2e-3, the rate of the deep recipes of DLCL and of shallow-to-deep training.
    "pre": ["model.residual=pre", "training.schedule.peak=2e-3"],
    "dlcl-pre": [
        "model.residual=pre",
        "model.encoder.history=dlcl",
        "model.decoder.history=dlcl",
        "training.schedule.peak=2e-3",
    ],
    # Transparent attention on lingvo's residual form and on true pre-norm: the rate of its recipe (noam, peak 6.6e-4).
    "lingvo": ["model.residual=lingvo", "training.schedule.peak=6.6e-4"],
    "transparent-lingvo": ["model.residual=lingvo", "model.memory=transparent", "training.schedule.peak=6.6e-4"],
    "transparent-pre": ["model.residual=pre", "model.memory=transparent", "training.schedule.peak=6.6e-4"],
    # Shallow-to-deep training with sparse connections; `growth` adds the stages.
    "sdt-blocks": [
        "model.residual=pre",
        "model.encoder.history=blocks",
        "model.combination.period=6",
        "training.schedule.peak=2e-3",
    ],
}
"""METHODS maps a method to overrides, with one rate per family of methods, near those of their recipes (README.md)."""

DEPTHS: dict[str, tuple[int, int]] = {"6-6": (6, 6), "18-18": (18, 18), "36-12": (36, 12), "60-12": (60, 12)}
"""DEPTHS are encoder and decoder layers."""

UNEQUAL: dict[str, tuple[int, int]] = {"12-3": (12, 3), "12-1": (12, 1), "3-12": (3, 12), "36-6": (36, 6)}
"""UNEQUAL are unequal depths, where users of ADMIN's forks report divergence."""

INITIALISATIONS: dict[str, list[str]] = {
    "xavier, post": METHODS["post"],
    "xavier, pre": METHODS["pre"],
    "depth_scaled, post": METHODS["ds-init"],
    "admin profiled": METHODS["admin"],
    "admin log": [*METHODS["admin"], "model.init={kind: admin, omega: log}"],
    "deepnorm": METHODS["deepnorm"],
    "t_fixup, no_norm": ["model.residual=no_norm", "model.init.kind=t_fixup", "training.schedule.peak=5e-4"],
    "fixup": ["model.residual=fixup", "model.init.kind=fixup", "training.schedule.peak=5e-4"],
}
"""INITIALISATIONS are all initialisations, each with the residual kind for which it was designed."""


def common(encoder: int, decoder: int, updates: int, batch_tokens: int, warmup: int) -> list[str]:
    """Return the overrides that all runs share: tiny width, small batches, short warm-up, no decoding."""
    return [
        "model.preset=tiny",
        "model.d_model=128",
        "model.d_ff=512",
        "model.heads=4",
        f"model.encoder.layers={encoder}",
        f"model.decoder.layers={decoder}",
        "model.dropout={residual: 0.1, attention: 0.0, activation: 0.1, embedding: 0.1}",
        f"training.batch.max_tokens={batch_tokens}",
        "training.optimiser={kind: adam, betas: [0.9, 0.98], epsilon: 1e-8}",
        f"training.schedule.warmup_updates={warmup}",
        "training.clip_norm=null",
        "training.log_every_updates=10",
        "training.validation={every_updates: 100, decode: false, metric: loss}",
        f"training.checkpoint.every_updates={updates}",
        "training.checkpoint.keep_last=1",
        f"training.stop={{updates: {updates}}}",
        "training.threads=1",
        "training.tensorboard=false",
    ]


def growth(encoder: int, updates: int, step: int = 6) -> list[str]:
    """Return the stages of shallow-to-deep training: 6, 12, ... layers, equal shares of the first half of the run."""
    depths = range(step, encoder, step)
    if not depths:
        return []
    each = updates // 2 // len(depths)
    stages = ", ".join(f"{{layers: {d}, updates: {each * number}}}" for number, d in enumerate(depths, start=1))
    return [f"training.growth={{stages: [{stages}]}}"]
