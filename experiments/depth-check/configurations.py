"""The configurations whose verdicts are compared with real runs: overrides of the recipe `multi30k-de-en`.

Some outcomes come from experiments/depth-trainability, whose runs have the same data, width, batches and warm-up.
"""

from __future__ import annotations

from typing import NamedTuple

SHARED: list[str] = [
    "model.preset=tiny",
    "model.d_model=128",
    "model.d_ff=512",
    "model.heads=4",
    "model.dropout={residual: 0.1, attention: 0.0, activation: 0.1, embedding: 0.1}",
    "training.batch.max_tokens=512",
    "training.optimiser={kind: adam, betas: [0.9, 0.98], epsilon: 1e-8}",
    "training.schedule.warmup_updates=120",
    "training.clip_norm=null",
    "training.log_every_updates=10",
    "training.validation={every_updates: 100, decode: false, metric: loss}",
    "training.checkpoint.every_updates=300",
    "training.checkpoint.keep_last=1",
    "training.stop={updates: 300}",
    "training.threads=1",
    "training.tensorboard=false",
]
"""SHARED are the settings common to all runs, which stop at update 300; longer runs are evaluated at update 300."""

_RADAM = "training.optimiser={kind: radam, betas: [0.9, 0.98], epsilon: 1e-8, rectified_only: true}"
_BOTH_DLCL = ["model.encoder.history=dlcl", "model.decoder.history=dlcl"]

METHODS: dict[str, list[str]] = {
    "post": ["model.residual=post"],
    "ds-init": ["model.residual=post", "model.init.kind=depth_scaled"],
    "ds-init-1/2": ["model.residual=post", "model.init={kind: depth_scaled, exponent: 0.5}"],
    "admin": ["model.residual=admin", "model.init.kind=admin", _RADAM],
    "deepnorm": ["model.residual=deepnorm", "model.init.kind=deepnorm"],
    "dlcl-post": ["model.residual=post", *_BOTH_DLCL],
    "pre": ["model.residual=pre"],
    "dlcl-pre": ["model.residual=pre", *_BOTH_DLCL],
    "lingvo": ["model.residual=lingvo"],
    "transparent-lingvo": ["model.residual=lingvo", "model.memory=transparent"],
    "transparent-pre": ["model.residual=pre", "model.memory=transparent"],
    "none": ["model.residual=none"],
    "rezero": ["model.residual=rezero"],
    "layer_scale": ["model.residual=layer_scale"],
    "ln_scaling": ["model.residual=ln_scaling"],
    "peri": ["model.residual=peri"],
    "res_post": ["model.residual=res_post"],
    "b2t": ["model.residual=b2t"],
    "t_fixup": ["model.residual=no_norm", "model.init.kind=t_fixup"],
    "fixup": ["model.residual=fixup", "model.init.kind=fixup"],
    "hyper": ["model.residual=hyper"],
    "dense": ["model.residual=pre", "model.encoder.history=dense", "model.decoder.history=dense"],
    "average": ["model.residual=pre", "model.encoder.history=average", "model.decoder.history=average"],
    "blocks": ["model.residual=pre", "model.encoder.history=blocks", "model.combination.period=6"],
    "top_only": ["model.residual=pre", "model.encoder.history=top_only", "model.decoder.history=top_only"],
    "depth_weighted": [
        "model.residual=pre",
        "model.encoder.history=depth_weighted",
        "model.decoder.history=depth_weighted",
    ],
    # The methods of unseen.py; a name with two kinds has the encoder's first, then the decoder's.
    "admin-plain": ["model.residual=admin"],
    "keel": ["model.residual=keel"],
    "ln_scaling-layer_scale": [
        "model.encoder.residual=ln_scaling",
        "model.encoder.history=depth_weighted",
        "model.decoder.residual=layer_scale",
        "model.decoder.history=top_only",
    ],
    "dense-average-values": [
        "model.residual=pre",
        "model.encoder.history=dense",
        "model.decoder.history=average",
        "model.attention={value_residual: learned, cross_value_residual: learned}",
    ],
    "hyper-manifold": [
        "model.encoder.residual=hyper",
        "model.decoder.residual=manifold_hyper",
        "model.wiring={streams: 4, dynamic: true}",
    ],
    "siamese-sandwich": ["model.encoder.residual=siamese", "model.decoder.residual=sandwich"],
    "mix-ln-gpas": [  # a quarter of that for 36-12 below
        "model.residual=pre",
        "model.encoder.ranges=[{layers: 9, residual: post}]",
        "model.decoder.ranges=[{layers: 3, residual: post}]",
        "model.wiring.gpas=true",
    ],
    "sub_ln-hybrid": [
        "model.encoder.residual=sub_ln",
        "model.decoder.residual=hybrid",
        "model.init.kind=magneto",
        "model.attention={qk_norm: rms, value_norm: rms}",
    ],
    "attnres": [
        "model.residual=none",
        "model.encoder.history=attention_residuals",
        "model.decoder.history=block_attention_residuals",
        "model.combination.unit=sublayer",
    ],
    "mudd-blocks": ["model.residual=pre", "model.encoder.history=mudd", "model.decoder.history=blocks"],
    "completep": ["model.residual=pre", "model.transfer={width: 128, encoder_layers: 6, decoder_layers: 6}"],
}
"""METHODS maps a method to overrides: every residual, history and initialisation."""


class Configuration(NamedTuple):
    """One configuration, and the source of its outcome.

    Attributes:
        depth: encoder and decoder layers, `18-18`.
        method: key of METHODS.
        rate: peak learning rate.
        outcome: file of experiments/depth-trainability/results that has it; None: a run of this experiment.
    """

    depth: str
    method: str
    rate: str
    outcome: str | None = None

    @property
    def name(self) -> str:
        """Name of the configuration's files."""
        return f"{self.depth}-{self.method.replace('/', '')}-{self.rate}"

    @property
    def overrides(self) -> list[str]:
        """All overrides of the recipe."""
        encoder, decoder = self.depth.split("-")
        return [
            *SHARED,
            f"model.encoder.layers={encoder}",
            f"model.decoder.layers={decoder}",
            *METHODS[self.method],
            f"training.schedule.peak={self.rate}",
        ]


CONFIGURATIONS: list[Configuration] = [
    Configuration("18-18", "post", "5e-3"),
    Configuration("18-18", "pre", "1e-2"),
    Configuration("6-6", "post", "5e-3"),
    Configuration("18-18", "admin", "5e-3"),
    Configuration("18-18", "rezero", "1e-3"),
    Configuration("18-18", "none", "1e-3"),
    Configuration("60-12", "post", "1e-3"),
    Configuration("18-18", "ds-init-1/2", "5e-3"),
    Configuration("18-18", "peri", "2e-3"),
    Configuration("18-18", "b2t", "1e-3"),
    Configuration("60-12", "pre", "2e-3"),
    Configuration("18-18", "dlcl-pre", "1e-2"),
    Configuration("18-18", "average", "2e-3"),
    Configuration("18-18", "t_fixup", "5e-4"),
    Configuration("18-18", "post", "2e-4"),
    Configuration("60-12", "admin", "1e-3"),
    Configuration("18-18", "hyper", "2e-3"),
    Configuration("18-18", "dense", "2e-3"),
    Configuration("6-6", "pre", "1e-2"),
    Configuration("18-18", "deepnorm", "5e-3"),
    Configuration("18-18", "layer_scale", "2e-3"),
    Configuration("12-12", "post", "1e-3"),
    Configuration("18-18", "top_only", "2e-3"),
    Configuration("18-18", "depth_weighted", "2e-3"),
    Configuration("60-12", "dlcl-pre", "2e-3"),
    Configuration("18-18", "res_post", "1e-3"),
    Configuration("18-18", "ln_scaling", "2e-3"),
    Configuration("18-18", "fixup", "5e-4"),
    Configuration("18-18", "post", "1e-3", "18-18-post"),
    Configuration("18-18", "lingvo", "6.6e-4", "18-18-lingvo"),
    Configuration("18-18", "ds-init", "1e-3", "18-18-ds-init"),
    Configuration("18-18", "admin", "1e-3", "18-18-admin"),
    Configuration("3-12", "post", "1e-3", "unequal-3-12-xavier-post"),
    Configuration("18-18", "deepnorm", "1e-3", "18-18-deepnorm"),
    Configuration("6-6", "post", "1e-3", "6-6-post"),
    Configuration("18-18", "pre", "2e-3", "18-18-pre"),
    Configuration("36-12", "post", "1e-3", "36-12-post"),
    Configuration("18-18", "transparent-lingvo", "6.6e-4", "18-18-transparent-lingvo"),
    Configuration("36-6", "post", "1e-3", "unequal-36-6-xavier-post"),
    Configuration("18-18", "dlcl-post", "1e-3", "18-18-dlcl-post"),
    Configuration("6-6", "lingvo", "6.6e-4", "6-6-lingvo"),
    Configuration("36-12", "lingvo", "6.6e-4", "36-12-lingvo"),
    Configuration("18-18", "dlcl-pre", "2e-3", "18-18-dlcl-pre"),
    Configuration("18-18", "transparent-pre", "6.6e-4", "18-18-transparent-pre"),
    Configuration("36-12", "admin", "1e-3", "36-12-admin"),
    Configuration("12-1", "fixup", "5e-4", "unequal-12-1-fixup"),
    Configuration("36-12", "dlcl-pre", "2e-3", "36-12-dlcl-pre"),
    Configuration("36-12", "pre", "2e-3", "36-12-pre"),
]

CALIBRATION: frozenset[str] = frozenset(
    {
        "18-18-post-1e-3",
        "18-18-lingvo-6.6e-4",
        "18-18-ds-init-1e-3",
        "18-18-admin-1e-3",
        "3-12-post-1e-3",
        "18-18-deepnorm-1e-3",
        "6-6-post-1e-3",
        "18-18-pre-2e-3",
        "18-18-transparent-lingvo-6.6e-4",
        "18-18-post-5e-3",
        "18-18-pre-1e-2",
        "6-6-post-5e-3",
        "18-18-admin-5e-3",
        "18-18-rezero-1e-3",
        "18-18-none-1e-3",
        "12-1-fixup-5e-4",
    }
)
"""CALIBRATION are the configurations whose outcomes were known when ziggurat/inspect/check.py got its bands.
"""
