"""The learner: the model of a run at its present depth, and its optimiser; building, loading and growing them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from ziggurat.config import Experiment
from ziggurat.config.differences import differing_keys
from ziggurat.config.model import ModelConfig
from ziggurat.data.corpus import Store
from ziggurat.model.build import (
    build_model,
    compile_layers,
    parameter_roles,
    parameter_scales,
    set_recompute,
    stack_residuals,
)
from ziggurat.model.directory import (
    open_model,
    read_weights,
    refuse_other_vocabulary,
)
from ziggurat.model.fast.precision import maps_of, wrong_maps
from ziggurat.model.low_rank import is_update
from ziggurat.model.residual.kinds import BranchNorm
from ziggurat.model.run_folder import BASE, MODEL_FILE
from ziggurat.model.seq2seq import AlignmentHead, Seq2Seq
from ziggurat.model.tensors import load_weights, weights, whole
from ziggurat.system.errors import ConfigError
from ziggurat.system.yaml_text import keys_of
from ziggurat.train.checkpoint import Checkpoint
from ziggurat.train.cuda_graphs import GraphedPasses
from ziggurat.train.distributed import Processes
from ziggurat.train.growth import carry_moments, carry_weights, of_depth, stage_model
from ziggurat.train.objective import as_trained
from ziggurat.train.optim import Optimiser
from ziggurat.train.parallel import parallel_of
from ziggurat.train.profiling import profile_admin


class Learner:
    """Model and optimiser of a run.

    Growing replaces `parallel` (the model and how its gradients are computed), `optimiser`, and `passes` (the context
    of updates, in which the model's passes are replayed from CUDA graphs if so configured).
    """

    def __init__(
        self, experiment: Experiment, store: Store, device: torch.device, processes: Processes | None = None
    ) -> None:
        self.experiment = experiment
        self.store = store
        self.device = device
        self.processes = processes or Processes()
        self._take(0, self._build(0))
        if experiment.training.precision == "bf16" and device.type == "cpu":
            _refuse_wrong_maps(self.model)

    @property
    def model(self) -> Seq2Seq:
        """The model in training, on the device; with FSDP each process holds a part of every parameter."""
        return self.parallel.model

    @property
    def architecture(self) -> ModelConfig:
        """Architecture of the model at its present depth."""
        return stage_model(self.experiment, self._stage)

    @property
    def depth(self) -> tuple[int, int]:
        """Layers of encoder and decoder now."""
        return self.architecture.encoder.layers, self.architecture.decoder.layers

    def deepest(self) -> Learner:
        """Return a learner of the fully grown model, with initial weights; this one if the model does not grow."""
        if self.experiment.training.growth is None:
            return self
        whole = of_depth(self.experiment, self.experiment.model)
        return Learner(whole, self.store, self.device, self.processes)

    @property
    def _adapts(self) -> bool:
        return self.experiment.training.lora is not None

    def smoothed_weights(self) -> Mapping[str, Tensor]:
        """Return the weights for translation, whole, by name: running means if the optimiser keeps them."""
        found = self.parallel.weights()
        return {**found, **{name: whole(mean).to(found[name].device) for name, mean in self.optimiser.means().items()}}

    @contextlib.contextmanager
    def smoothed(self) -> Iterator[Seq2Seq]:
        """Context with the whole model, in this process, with the weights for translation."""
        with self.optimiser.smoothed(), self.parallel.whole() as model:
            yield model

    def kept_weights(self) -> Mapping[str, Tensor]:
        """Return the weights that belong in a checkpoint, whole, by name; with low-rank adaptation, the updates."""
        found = self.smoothed_weights()
        return {name: tensor for name, tensor in found.items() if is_update(name)} if self._adapts else found

    def base_weights(self) -> Mapping[str, Tensor] | None:
        """Return the weights that low-rank updates belong to, whole, by name; None: all weights are trained."""
        if not self._adapts:
            return None
        return {name: tensor for name, tensor in self.parallel.weights().items() if not is_update(name)}

    def start_from(self, path: str) -> str:
        """Take the weights of a run or a model directory; return a description of it for the log.

        Raises CheckpointError when there is no model, ConfigError when its architecture differs or its vocabularies
        or normalisation of text are not the store's.
        """
        opened = open_model(path)
        theirs, ours = opened.experiment.model, self.architecture
        if changed := differing_keys(theirs, ours):
            deeper = theirs.encoder.layers < ours.encoder.layers or theirs.decoder.layers < ours.decoder.layers
            hint = f"{path} has a config.yaml with which to train on"
            if not differing_keys(theirs, self.experiment.model):  # at the final depth of this run
                hint = "set `training.growth=null` to continue at the full depth"
            elif deeper:
                hint = "`ziggurat grow` makes a deeper model"
            raise ConfigError(
                f"`training.start_from: {path}`: the same weights would compute something else here, because of "
                f"{'; '.join(changed)}; {hint}",
                key="training.start_from",
                named=keys_of(changed),
            )
        unicode, here = opened.tokenizers[0].unicode, (self.store.source, self.store.target)
        form = "" if unicode == here[0].unicode else f" data.unicode={unicode}"
        refuse_other_vocabulary(
            opened.tokenizers,
            here,
            f"`training.start_from: {path}`",
            f"the store {self.store.path}",
            f"prepare the data with the model's: `data.subword.kind=existing data.subword.source_model={path}{form}`",
        )
        whole = {**self.kept_weights(), **weights(opened.model)} if self._adapts else weights(opened.model)
        load_weights(self.model, whole, f"`training.start_from: {path}`")
        ruled_out = opened.model.output.ruled_out
        left_out = "" if ruled_out is None else f"; {len(ruled_out)} tokens that its output bias rules out have no loss"
        return opened.origin + left_out

    def begin(self, update: int) -> None:
        """Set what depends on the update number, from 1: running means, and the factor of `residual: branch_norm`.

        If a run starts from trained weights, the factor is 1, as it was in their training.
        """
        self.optimiser.update = update
        if self.experiment.training.start_from is None:
            for residual in (*stack_residuals(self.model.encoder), *stack_residuals(self.model.decoder)):
                if isinstance(residual, BranchNorm):
                    residual.begin(update)

    def restore(self, checkpoint: Checkpoint, run: Path) -> None:
        """Load a checkpoint's weights and moments, at its depth. Raises CheckpointError when it does not fit."""
        number = checkpoint.progress.stage
        if number != self._stage:
            self._take(number, self._build(number))
        base = read_weights(run / BASE / MODEL_FILE) if self._adapts else {}
        load_weights(self.model, {**base, **checkpoint.weights}, str(run))
        self.optimiser.load_state(checkpoint.optimiser)

    def take_weights(self, trained: Mapping[str, Tensor], name: str) -> None:
        """Load the weights of a model directory of this run, at the present depth, in which updates are merged.

        Errors use `name` for their origin. Moments are kept, because this only serves to measure weights after
        training.
        """
        updates = {key: torch.zeros_like(tensor) for key, tensor in self.kept_weights().items()} if self._adapts else {}
        load_weights(self.model, {**updates, **trained}, name)

    def grow(self) -> str | None:
        """Replace the model by the next stage's, grown from it; return the findings of ADMIN's profiling, if any."""
        growth, number = self.experiment.training.growth, self._stage + 1
        assert growth is not None
        depths, moments = (self.architecture, stage_model(self.experiment, number)), self.optimiser.state()
        model = self._build(number)
        # Weights are copied before `_take`, because FSDP shards the parameters that it is given.
        added = carry_weights(growth, self.parallel.weights(), depths, model)
        self._take(number, model)
        # Compiled layers contain reference cycles: the old model would stay in memory until the next collection.
        gc.collect()
        carry_moments(growth, moments, depths, self.optimiser)
        return self.profile(added)

    def profile(self, added: Sequence[str] | None = None) -> str | None:
        """Profile ADMIN's omegas, or only those of the layers named `added`; return the findings.

        Returns None, and does nothing, when the configuration does not ask for it.
        """
        with self.parallel.whole() as model:
            found = profile_admin(model, self.experiment, self.store, added)
            if found is not None and model is not self.model:  # with FSDP, `model` is a copy gathered for this
                load_weights(self.model, weights(model), "the profiled model")
        return found

    def _build(self, stage: int) -> Seq2Seq:
        training = self.experiment.training
        # Drawn on the CPU and moved afterwards, for the same initial weights on every device.
        model = build_model(
            stage_model(self.experiment, stage),
            self.store.source.size,
            self.store.target.size,
            seed=training.seed,
        )
        as_trained(model, training, seed=training.seed)
        model.to(self.device)
        model.decoder.aligned = AlignmentHead.of(training.loss.alignment)
        return model

    def _take(self, stage: int, model: Seq2Seq) -> None:
        """Switch training to `model`, that of `stage`: create everything that uses its parameters. Order matters."""
        training = self.experiment.training
        # (1) Apply settings that change how layers run, before anything wraps the layers.
        set_recompute(model, training.recompute)
        if training.compile == "layers":
            compile_layers(model)  # a deeper stage reuses the graphs of the previous one
        # (2) Read the roles while every parameter is whole and has its original name.
        roles = parameter_roles(model)
        scales = parameter_scales(model, self.experiment.model)
        self.passes: AbstractContextManager[None] = (
            GraphedPasses(model, training.cuda_graphs) if training.cuda_graphs else nullcontext()
        )
        # (3) FSDP replaces the model's parameters by their shards, which the optimiser must own.
        self.parallel = parallel_of(model, training, self.processes)
        self.optimiser = Optimiser(model, roles, training.optimiser, scales=scales, seed=training.seed)
        self._stage = stage


def _refuse_wrong_maps(model: Seq2Seq) -> None:
    if wrong := wrong_maps(maps_of(model)):
        raise ConfigError(
            f"`training.precision: bf16`: this CPU computes maps of the model wrongly in bf16: {', '.join(wrong)}; the "
            "fault is in a library's kernels: set `training.precision=fp32`, or train or continue on another machine",
            key="training.precision",
        )
