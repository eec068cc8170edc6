"""The learner: the model of a run at its present depth, and its optimiser; building, loading and growing them.

Growth in shallow-to-deep training (Li et al. 2020) depends only on the progress, so a resumed run grows at the same
update. `grow_model` takes the same step outside a run, on a trained model.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ziggurat.config import Experiment, TrainingConfig
from ziggurat.config.depth import CopyStrategy, GrowthConfig, ungrowable
from ziggurat.config.differences import differing_keys
from ziggurat.config.model import ModelConfig
from ziggurat.config.train import LossConfig
from ziggurat.data.corpus import Store
from ziggurat.data.loader import Batch
from ziggurat.model.build import (
    build_model,
    compile_layers,
    count_parameters,
    parameter_roles,
    parameter_scales,
    set_recompute,
    stack_residuals,
)
from ziggurat.model.depth import Deepening, added_layers, at_depth, deepening, grow_moments, grow_weights
from ziggurat.model.directory import (
    open_model,
    read_weights,
    refuse_other_vocabulary,
    refuse_replacing,
    write_model_directory,
)
from ziggurat.model.fast.precision import maps_of, wrong_maps
from ziggurat.model.low_rank import is_update
from ziggurat.model.residual.kinds import BranchNorm
from ziggurat.model.run_folder import BASE, MODEL_FILE
from ziggurat.model.seq2seq import AlignmentHead, Seq2Seq
from ziggurat.model.tensors import load_weights, weights, whole
from ziggurat.system.errors import ConfigError, TrainingError
from ziggurat.system.files import made_by
from ziggurat.system.yaml_text import keys_of
from ziggurat.train.checkpoint import Checkpoint, RunProgress
from ziggurat.train.device import Shortage
from ziggurat.train.distributed import Processes
from ziggurat.train.loss import LossSums
from ziggurat.train.objective import GraphedPasses, as_trained, profile_admin
from ziggurat.train.optim import Optimiser
from ziggurat.train.schedule import peak_update
from ziggurat.train.update import Parallel, Replicated, UpdateSize

STAGES = "stages"


def _stage_model(experiment: Experiment, stage: int) -> ModelConfig:
    """Return the architecture of stage `stage`, from 0; the last stage is `model`."""
    growth = experiment.training.growth
    if growth is None or stage >= len(growth.stages):
        return experiment.model
    return at_depth(experiment.model, *growth.stages[stage].depths(experiment.model.decoder.layers))


def _of_depth(experiment: Experiment, model: ModelConfig, **training: Any) -> Experiment:
    """Return the configuration of a model directory of another depth: without stages, which lead to the old depth."""
    changed = experiment.training.model_copy(update={"growth": None, **training})
    return experiment.model_copy(update={"model": model, "training": changed})


def _with_guided_layer(experiment: Experiment, plan: Deepening) -> Experiment:
    """Return the configuration with the new number of the decoder layer that guided alignment trained, if it names one.

    The first copy of a layer counts as the trained one, as in ziggurat.model.depth.added_layers.
    """
    guided = experiment.training.loss.alignment
    if guided is None or guided.layer is None:
        return experiment
    number = plan.decoder.sources.index(guided.layer - 1) + 1
    loss = experiment.training.loss.model_copy(update={"alignment": guided.model_copy(update={"layer": number})})
    return experiment.model_copy(update={"training": experiment.training.model_copy(update={"loss": loss})})


def stage_experiment(experiment: Experiment, stage: int) -> Experiment:
    """Return the configuration of the model of stage `stage`, from 0."""
    model = _stage_model(experiment, stage)
    return experiment if model == experiment.model else _of_depth(experiment, model)


def stage_ended(p: RunProgress, config: TrainingConfig) -> bool:
    """True when the present stage is over and a deeper one follows; depends only on the progress."""
    growth = config.growth
    if growth is None or p.stage >= len(growth.stages):
        return False
    stage = growth.stages[p.stage]
    return (stage.updates is not None and p.update >= stage.updates) or (
        stage.epochs is not None and p.epoch >= stage.epochs
    )


def after_growth(p: RunProgress, config: TrainingConfig) -> None:
    """Move `p` to the next stage; with `restart_rate`, the rate restarts after the warm-up (Li et al.'s code)."""
    assert config.growth is not None
    p.stage += 1
    p.losses = []  # losses of the grown model may be higher without being spikes
    p.validations_since_best = 0  # they belonged to a shallower model
    if config.growth.restart_rate:
        # During the warm-up, the counter is left unchanged.
        p.schedule_update = min(p.schedule_update, peak_update(config.schedule) - 1)


def carry_weights(
    growth: GrowthConfig, shallow: Mapping[str, Tensor], depths: tuple[ModelConfig, ModelConfig], model: Seq2Seq
) -> list[str]:
    """Copy the weights `shallow` into the deeper `model`; return the names of the layers that it adds.

    `depths` are the architectures of the shallow model and the deep one.
    """
    plan = deepening(growth.copy_strategy, *depths)
    grow_weights(model, shallow, plan)
    stacks = ("encoder", plan.encoder), ("decoder", plan.decoder)
    return [f"{name}.layers.{number}" for name, copies in stacks for number in added_layers(copies)]


def carry_moments(
    growth: GrowthConfig, shallow: Mapping[str, Tensor], depths: tuple[ModelConfig, ModelConfig], optimiser: Optimiser
) -> None:
    """Copy the optimiser state `shallow` into the deeper model's `optimiser`, if `growth.moments` asks for it."""
    if growth.moments == "copy":
        # Running means of weights restart, because the deeper model was grown from the weights themselves.
        shallow = {key: moment for key, moment in shallow.items() if not key.endswith("/trained")}
        plan = deepening(growth.copy_strategy, *depths)
        trained = {name: parameter for parameter, name in optimiser.names.items()}
        optimiser.load_state(grow_moments(trained, {key: whole(value) for key, value in shallow.items()}, plan))


def stage_folder(run: Path, experiment: Experiment, stage: int) -> Path:
    """Return the folder for the model at the end of a stage; stages differ in depth."""
    growth, model = experiment.training.growth, _stage_model(experiment, stage)
    both = growth is not None and any(stage.decoder_layers is not None for stage in growth.stages)
    depth = f"{model.encoder.layers:03d}-{model.decoder.layers:03d}" if both else f"{model.encoder.layers:03d}"
    return run / STAGES / f"{depth}-layers"


def keep_stage(run: Path, experiment: Experiment, stage: int, tensors: Mapping[str, Tensor]) -> None:
    """Write the weights at the end of a stage as a model directory."""
    again = f"training writes it once: restore a copy, or train {run} again (the run itself continues without it)"
    folder = stage_folder(run, experiment, stage)
    write_model_directory(folder, tensors, stage_experiment(experiment, stage), run, again=again)


def grow_model(
    path: Path,
    out: Path,
    *,
    strategy: CopyStrategy,
    layers: int | None = None,
    decoder_layers: int | None = None,
    which: str | None = None,
    force: bool = False,
) -> tuple[ModelConfig, int]:
    """Deepen a trained model and write a model directory; return its architecture and parameter count.

    The encoder gets `layers` layers and the decoder `decoder_layers`; None: unchanged. `path` and `which` name
    a run, one of its checkpoints, or a model directory (ziggurat.model.directory). Raises ConfigError if the strategy
    cannot reach the depth, if it is the present one, or if `out` holds other things or, without `force`, a model;
    CheckpointError if there is no such model.
    """
    refuse_replacing(out, force=force)
    opened = open_model(path, which=which)
    before = opened.experiment.model
    depths = layers or before.encoder.layers, decoder_layers or before.decoder.layers
    if depths == (before.encoder.layers, before.decoder.layers):
        raise ConfigError(f"{path} has {depths[0]} encoder and {depths[1]} decoder layers already: nothing grows")
    for decoder in (False, True):
        grows = depths[decoder] != (before.decoder if decoder else before.encoder).layers
        if grows and (problem := ungrowable(before, strategy, decoder=decoder)):
            raise ConfigError(problem)
    config = at_depth(before, *depths)
    plan = deepening(strategy, before, config)
    source, target = opened.tokenizers
    grown = build_model(config, source.size, target.size, seed=opened.experiment.training.seed)
    grow_weights(grown, weights(opened.model), plan)
    chosen = ("--which", which) if which is not None else ()
    sizes = [("--layers", layers), ("--decoder-layers", decoder_layers)]
    deeper = [word for pair in sizes if pair[1] is not None for word in pair]
    again = made_by("grow", path, *deeper, "--copy", strategy, *chosen, "--out", out, "--force")
    # Nothing is frozen, because frozen layers may have new numbers now.
    grown_experiment = _with_guided_layer(_of_depth(opened.experiment, config, freeze=[]), plan)
    write_model_directory(out, weights(grown), grown_experiment, opened.directory, again=again)
    return config, count_parameters(grown)


class Sharded(Parallel):
    """A part of each parameter, its gradient and its moments in every process.

    The weights of a layer are gathered when it runs, forward and backward. Gradients are summed after every batch, so
    no process ever holds all of them. Validation uses a copy of the model on the CPU.
    """

    recovers = False

    def __init__(self, model: Seq2Seq, loss: LossConfig, precision: str, processes: Processes) -> None:
        from torch.distributed.fsdp import FSDPModule, fully_shard  # here, since it takes a second to import

        super().__init__(model, loss, precision, processes)
        device = model.device
        self._copy = copy.deepcopy(model.cpu())  # made on the CPU, so that a GPU never holds the model twice
        model.to(device)
        mesh = init_device_mesh(model.device.type, (processes.count,))
        for stack in (model.encoder, model.decoder):
            for unit in stack.units():
                fully_shard(unit, mesh=mesh)
        fully_shard(self.objective, mesh=mesh)  # after the units, to shard what they do not contain
        # Sums, not means: losses are already divided by the size of the whole update.
        for module in self.objective.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def accumulate(self, batches: Sequence[Batch], size: UpdateSize) -> LossSums | Shortage:
        """See Parallel; a process with fewer batches runs idle ones, since all processes gather each layer together."""
        idle = [batches[0].idle()] * (size.batches - len(batches))
        return super().accumulate([*batches, *idle], size)

    def agree(self, short: bool) -> bool:
        """See Parallel; here the others wait in the middle of a layer and cannot continue, so the run ends."""
        if short:
            raise TrainingError(
                f"process {self.processes.rank} ran out of memory, and with `training.distributed.kind: fsdp` the "
                "others cannot continue without it; lower `training.batch.max_tokens`, or use more processes",
                key="training.distributed.kind",
                named=["training.batch.max_tokens"],
            )
        return False

    def weights(self) -> Mapping[str, Tensor]:
        """See Parallel; on the CPU, so that a GPU holds one whole parameter at a time."""
        return {name: whole(parameter).cpu() for name, parameter in weights(self.model).items()}

    @contextlib.contextmanager
    def whole(self) -> Iterator[Seq2Seq]:
        """See Parallel; the model is a copy, and changes to it do not reach the parts."""
        device = self.model.device
        load_weights(self._copy, self.weights(), "the parts of the model")
        try:
            yield self._copy.to(device)
        finally:
            self._copy.cpu()


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
        return _stage_model(self.experiment, self._stage)

    @property
    def depth(self) -> tuple[int, int]:
        """Layers of encoder and decoder now."""
        return self.architecture.encoder.layers, self.architecture.decoder.layers

    def deepest(self) -> Learner:
        """Return a learner of the fully grown model, with initial weights; this one if the model does not grow."""
        if self.experiment.training.growth is None:
            return self
        whole = _of_depth(self.experiment, self.experiment.model)
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
                hint = "set `training.growth=null`, which trains on at the whole depth"
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

        If a run starts from trained weights, the factor is 1, as it was for them.
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
        depths, moments = (self.architecture, _stage_model(self.experiment, number)), self.optimiser.state()
        model = self._build(number)
        # Weights are copied before `_take`, because FSDP shards the parameters that it is given.
        added = carry_weights(growth, self.parallel.weights(), depths, model)
        self._take(number, model)
        # Compiled layers and DDP contain reference cycles: the old model would stay in memory until the next
        # collection.
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
            _stage_model(self.experiment, stage),
            self.store.source.size,
            self.store.target.size,
            seed=training.seed,
        )
        as_trained(model, training, seed=training.seed)
        model.to(self.device)
        model.decoder.aligned = AlignmentHead.of(training.loss.alignment)
        return model

    def _take(self, stage: int, model: Seq2Seq) -> None:
        """Train `model`, that of `stage`, from now on: create everything that uses its parameters. Order matters."""
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
        self.parallel = _parallel(model, training, self.processes)
        self.optimiser = Optimiser(model, roles, training.optimiser, scales=scales, seed=training.seed)
        self._stage = stage


def _parallel(model: Seq2Seq, config: TrainingConfig, processes: Processes) -> Parallel:
    """Return the kind of Parallel that `training.distributed` asks for in `processes`.

    Raises ConfigError for `fsdp` with LayerDrop: each process would skip different layers and wait for ever for the
    others to gather those that it runs.
    """
    layer_drop = any(getattr(stack, "layer_drop", 0.0) > 0 for stack in (model.encoder, model.decoder))
    if processes.count == 1:
        return Parallel(model, config.loss, config.precision)
    if config.distributed.kind == "ddp":
        bucket_mib = config.distributed.bucket_mib
        return Replicated(model, config.loss, config.precision, processes, bucket_mib=bucket_mib, layer_drop=layer_drop)
    if layer_drop:
        raise ConfigError(
            "`training.distributed.kind: fsdp` gathers every layer in all processes, but with `layer_drop` each "
            "would skip different layers; use `ddp`",
            key="training.distributed.kind",
        )
    return Sharded(model, config.loss, config.precision, processes)


def _refuse_wrong_maps(model: Seq2Seq) -> None:
    if wrong := wrong_maps(maps_of(model)):
        raise ConfigError(
            f"`training.precision: bf16`: this CPU computes maps of the model wrongly in bf16: {', '.join(wrong)}; the "
            "fault is in a library's kernels: set `training.precision=fp32`, or train or continue on another machine",
            key="training.precision",
        )
