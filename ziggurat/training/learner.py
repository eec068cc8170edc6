"""What learns: the model at its present depth, and its optimiser; made, loaded, grown."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from ziggurat.config import Experiment, TrainingConfig
from ziggurat.config.compatibility import unlike
from ziggurat.data.corpus import Store
from ziggurat.data.subword import load_tokenizers, same_vocabulary
from ziggurat.errors import ConfigError
from ziggurat.models.build import build_model, compile_layers, parameter_roles, set_recompute
from ziggurat.models.directory import load_weights, open_model, weights
from ziggurat.models.seq2seq import Seq2Seq
from ziggurat.training.checkpoint import Checkpoint
from ziggurat.training.graphs import GraphedPasses
from ziggurat.training.growth import carry_moments, carry_weights, stage_model
from ziggurat.training.optim import Optimiser
from ziggurat.training.parallel import Parallel
from ziggurat.training.processes import Processes
from ziggurat.training.profile import profile_admin
from ziggurat.training.replicated import Replicated
from ziggurat.training.sharded import Sharded

__all__ = ["Learner"]


class Learner:
    """Model and optimiser of one stage of a run.

    Args:
        experiment: configuration of the whole run.
        store: gives the sizes of the vocabularies.
        device: where the model is trained.
        processes: all that train it.

    Attributes:
        stage: stage of growth, from 0.
        parallel: the model, and how its gradients come about.
        optimiser: of its parameters.
        passes: context of updates, within which the model's passes are replayed from CUDA graphs, if so chosen.
    """

    parallel: Parallel
    optimiser: Optimiser
    passes: AbstractContextManager[None]

    def __init__(
        self, experiment: Experiment, store: Store, device: torch.device, processes: Processes | None = None
    ) -> None:
        self.experiment = experiment
        self.store = store
        self.device = device
        self.processes = processes or Processes()
        self._make(0, self._build(0))

    @property
    def model(self) -> Seq2Seq:
        """What is trained, on the device; cut up over the processes where they train so."""
        return self.parallel.model

    def _build(self, stage: int) -> Seq2Seq:
        return build_model(
            stage_model(self.experiment, stage),
            self.store.source.size,
            self.store.target.size,
            seed=self.experiment.training.seed,
            exact_dropout=self.experiment.training.exact_dropout,
        ).to(self.device)

    def _make(self, stage: int, model: Seq2Seq) -> None:
        self.stage = stage
        training = self.experiment.training
        set_recompute(model, training.recompute)
        if training.compile == "layers":
            compile_layers(model)  # a deeper stage finds the graphs of the one before
        roles = parameter_roles(model)
        self.passes = GraphedPasses(model, training.cuda_graphs) if training.cuda_graphs else nullcontext()
        self.parallel = _parallel(model, training, self.processes)
        self.optimiser = Optimiser(model, roles, training.optimiser, seed=training.seed)

    @property
    def encoder_layers(self) -> int:
        """Depth of the encoder now."""
        return self._layers(self.stage)

    def _layers(self, stage: int) -> int:
        return stage_model(self.experiment, stage).encoder.layers

    def start_from(self, path: str) -> str:
        """Take the weights of a run or a model directory; return which those are, for people.

        Raises CheckpointError when there is no model, ConfigError when its architecture differs or its vocabularies
        are not the store's.
        """
        opened = open_model(path)
        theirs, ours = opened.experiment.model, stage_model(self.experiment, self.stage)
        if changed := unlike(theirs, ours):
            deeper = theirs.encoder.layers < ours.encoder.layers
            hint = "`ziggurat grow` makes a deeper model" if deeper else f"{path} has a config.yaml to train on with"
            raise ConfigError(
                f"`training.start_from: {path}`: the same weights would compute something else here, by "
                f"{'; '.join(changed)}; {hint}"
            )
        for side, mine, its in zip(
            ("source", "target"), (self.store.source, self.store.target), load_tokenizers(opened.directory), strict=True
        ):
            if not same_vocabulary(mine, its):
                raise ConfigError(
                    f"`training.start_from: {path}`: its {side} vocabulary is not that of the store {self.store.path}; "
                    f"prepare the data with the model's: `data.subword.kind=existing data.subword.source_model={path}`"
                )
        load_weights(self.model, weights(opened.model), f"`training.start_from: {path}`")
        ruled_out = opened.model.output.ruled_out
        left_out = "" if ruled_out is None else f"; {len(ruled_out)} tokens that its output bias rules out have no loss"
        return opened.origin + left_out

    def restore(self, checkpoint: Checkpoint, run: Path) -> None:
        """Put back the weights and moments of a checkpoint, at its depth. Raises CheckpointError: it does not fit."""
        if checkpoint.progress.stage != self.stage:
            self._make(checkpoint.progress.stage, self._build(checkpoint.progress.stage))
        load_weights(self.model, checkpoint.weights, str(run))
        self.optimiser.load_state(checkpoint.optimiser)

    def grow(self) -> str | None:
        """Go on with the model of the next stage, which starts from the present one; return what was profiled."""
        growth = self.experiment.training.growth
        assert growth is not None
        layers, shallow = self.encoder_layers, self.optimiser
        model = self._build(self.stage + 1)
        added = carry_weights(growth, self.parallel.weights(), layers, model)
        self._make(self.stage + 1, model)
        carry_moments(growth, shallow.state(), layers, self.encoder_layers, self.optimiser)
        return self.profile(added)

    def profile(self, added: Sequence[int] | None = None) -> str | None:
        """Profile ADMIN's omegas, or those of the encoder layers `added`; return what was found, if it is to be."""
        with self.parallel.whole() as model:
            found = profile_admin(model, self.experiment, self.store, added)
            if found is not None and model is not self.model:
                load_weights(self.model, weights(model), "the profiled model")
        return found


def _parallel(model: Seq2Seq, config: TrainingConfig, processes: Processes) -> Parallel:
    """Return what trains `model` in `processes`, as `training.distributed` says.

    Raises ConfigError for `fsdp` with layers that are left out at random: each process would leave out others, and
    wait for ever for those to be gathered.
    """
    layer_drop = any(getattr(stack, "layer_drop", 0.0) > 0 for stack in (model.encoder, model.decoder))
    if processes.count == 1:
        return Parallel(model, config.loss, config.precision)
    if config.distributed.kind == "ddp":
        bucket_mib = config.distributed.bucket_mib
        return Replicated(model, config.loss, config.precision, processes, bucket_mib=bucket_mib, layer_drop=layer_drop)
    if layer_drop:
        raise ConfigError(
            "`training.distributed.kind: fsdp` gathers every layer in all processes, but with `layer_drop` each would "
            "leave out others; use `ddp`"
        )
    return Sharded(model, config.loss, config.precision, processes)
