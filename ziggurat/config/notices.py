"""What a configuration does that its writer may not expect."""

from __future__ import annotations

from ziggurat.config.compatibility import unheeded
from ziggurat.config.experiment import Experiment
from ziggurat.config.growth import cut_short

__all__ = ["notices"]


def notices(experiment: Experiment) -> list[str]:
    """Return a sentence on every choice of `experiment` that is allowed, but hardly meant."""
    model, training = experiment.model, experiment.training
    said = [f"`{key}` is set, but beside the model's other choices it means nothing" for key in unheeded(model)]
    if "admin" in (model.encoder_residual, model.decoder_residual) and model.init.kind != "admin":
        said.append("`residual: admin` starts as plain post-norm, omega 1, without `init.kind: admin`")
    if training.growth is not None and (cut := cut_short(training.growth, training.stop)):
        said.append(cut)
    return said
