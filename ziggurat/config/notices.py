"""What a configuration does that its writer may not expect."""

from __future__ import annotations

from pydantic import BaseModel

from ziggurat.config.compatibility import unheeded
from ziggurat.config.experiment import Experiment
from ziggurat.config.growth import cut_short
from ziggurat.config.train import TrainingConfig

__all__ = ["notices"]

_HALVES = (
    ("admin", "admin", "starts as plain post-norm, omega 1"),
    ("deepnorm", "deepnorm", "has the paper's constant on the stream, but not the smaller weights that go with it"),
    ("no_norm", "t_fixup", "has neither normalisation nor the initialisation that replaces it"),
    ("fixup", "fixup", "has neither normalisation nor the initialisation that replaces it"),
)
"""Methods that are a residual and an initialisation: what the one is without the other."""


_HEEDED_BY_SCHEDULE = {
    "isqrt": {"peak", "warmup_updates", "initial", "floor"},
    "noam": {"factor", "warmup_updates"},
    "linear": {"peak", "warmup_updates", "initial", "floor", "decay_updates"},
    "cosine": {"peak", "warmup_updates", "initial", "floor", "decay_updates"},
    "constant": {"peak", "warmup_updates", "initial"},
    "gnmt+": {"warmup_updates", "base", "replicas", "decay_start", "decay_end"},
}


def _unheeded_in_training(training: TrainingConfig) -> list[str]:
    heeded = {"kind", *_HEEDED_BY_SCHEDULE[training.schedule.kind]}
    unused = [f"training.schedule.{key}" for key in _changed(training.schedule) if key not in heeded]
    if training.optimiser.kind != "muon" and "momentum" in _changed(training.optimiser):
        unused.append("training.optimiser.momentum")
    divergence, batch = training.divergence, training.batch
    idle = {"rate_factor", "max_roll_backs"} if divergence.action == "stop" else set()
    idle |= {"window"} if divergence.loss_spike is None else set()
    unused += [f"training.divergence.{key}" for key in _changed(divergence) if key in idle]
    unused += [
        f"training.batch.{key}" for key in _changed(batch) if key in ("fit_limit", "fit_margin") and not batch.fit
    ]
    return unused


def _changed(section: BaseModel) -> list[str]:
    return [key for key, field in type(section).model_fields.items() if getattr(section, key) != field.default]


def notices(experiment: Experiment) -> list[str]:
    """Return a sentence on every choice of `experiment` that is allowed, but hardly meant."""
    model, training = experiment.model, experiment.training
    unused = [*unheeded(model), *_unheeded_in_training(training)]
    said = [f"`{key}` is set, but beside the other choices it means nothing" for key in unused]
    if training.compile == "layers" and model.combination.unit == "sublayer":
        said.append("`training.compile: layers` compiles nothing: with `combination.unit: sublayer` no layer is called")
    for side, every, layers in (
        ("encoder", training.recompute.encoder, model.encoder.layers),
        ("decoder", training.recompute.decoder, model.decoder.layers),
    ):
        if isinstance(every, int) and every > layers:
            said.append(f"`training.recompute.{side}: {every}` recomputes nothing: the {side} has {layers} layers")
    for residual, kind, lacking in _HALVES:
        chosen = residual in (model.encoder_residual, model.decoder_residual)
        if chosen and model.init.kind != kind:
            said.append(f"`residual: {residual}` without `init.kind: {kind}` {lacking}")
        if model.init.kind == kind and not chosen:
            said.append(f"`init.kind: {kind}` was made for `residual: {residual}`; here it is `{model.residual}`")
    if training.growth is not None and (cut := cut_short(training.growth, training.stop)):
        said.append(cut)
    return said
