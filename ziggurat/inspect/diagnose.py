"""Depth measures after training: of a run's checkpoints, of a model directory, and the worth of each layer.

The worth of a layer (`ziggurat diagnose --layers`, docs/report.md) is measured by comparing states over depth, and
losses with layers removed or exchanged. The measures are those of DepthBench (2026) for decoder-only models, extended
to both stacks of an encoder-decoder. They take many passes, so they are not part of training.

z_0 is the input of the first layer and z_l the output of layer l, with streams of hyper-connections summed. If a
history acts between sub-layers that have no stream, z_l is the output of the last sub-layer only. A layer that is left
out passes its input through; everything else is unchanged.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ziggurat.config import TrainingConfig
from ziggurat.config.depth import LeftOut, unprunable
from ziggurat.data.corpus import Store
from ziggurat.data.loader import Batch
from ziggurat.evaluate.scores import evaluate
from ziggurat.model.attention.multihead import ValueResidual
from ziggurat.model.directory import OpenedModel, open_model, refuse_other_vocabulary
from ziggurat.model.residual.base import NoSkip
from ziggurat.model.run_folder import CHECKPOINTS, checkpoint_folders, locked
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.model.transformer import Decoder, Encoder
from ziggurat.system.errors import CheckpointError, ConfigError, DataError
from ziggurat.system.processes import share_cores
from ziggurat.train.checkpoint import read_progress
from ziggurat.train.depth_records import measured, probe_batches, record_of
from ziggurat.train.diagnosis.gradients import STACKS, eagerly
from ziggurat.train.diagnosis.probe import Loss
from ziggurat.train.objective import probe_loss, settle_precision
from ziggurat.train.records import DEPTH_FILE, Record, read_records, write_records
from ziggurat.train.validate import directions_of
from ziggurat.translate.interface import translate_tagged
from ziggurat.translate.results import TranslationWarning
from ziggurat.translate.translator import load_translator

LAYER_MEASURES = (
    "angular_distance",
    "causal_score",
    "permutation_score",
    "loss_without",
    "pruning_curve",
    "effective_depth",
    "logit_lens",
)
"""LAYER_MEASURES lists the names of the measures, in the order in which `layer_measures` returns them."""

PASSES = 300
"""PASSES is the maximum number of passes for a stack's exchanges, and for the ranges of layers left out of it."""
TOLERANCE = 0.05
"""TOLERANCE is the relative rise of the loss that layers may cause together and still not count (`effective_depth`)."""


@torch.no_grad()
def layer_measures(model: Seq2Seq, batch: Batch, loss: Loss) -> dict[str, Any]:
    """Return the measures by name, each by stack; none for RNMT+, whose layers do not form such a stack.

    - `angular_distance` [N + 1][N + 1]: mean over real tokens of arccos(cos(z_i, z_j)) / pi.
    - `causal_score` [s][l]: mean over real tokens of |u_l* - u_l| / |u_l| for l > s, where u_l is what layer l adds to
      its input (with `residual: none`, its output), and u_l* the same without layer s. NaN elsewhere.
    - `permutation_score` [i][j]: |L* - L| / L, where L* is the loss with layers i and j exchanged.
    - `loss_without` [i][j]: rise of the loss, in nats per token, without layers i to j; the diagonal is for single
      layers.
    - `pruning_curve` [n]: rise of the loss without the n least valuable layers by that diagonal, n < N.
    - `effective_depth`: see `effective_depth`.
    - `logit_lens`: `nll` and `agreement` [M + 1] if the decoder ended after its layer l: loss, and share of tokens
      whose most likely word is that of the whole decoder. It ends with what layer l + 1 reads, or at the top with its
      output; with a history this is the combination that is made there.

    In deep stacks only the nearest pairs are measured, PASSES per stack; the others are NaN, as are impossible ones:
    with value residuals the first layer cannot move. The model and its mode do not change.

    Args:
        model: the model; its layers run uncompiled.
        batch: the batch, on any device.
        loss: see ziggurat.train.diagnosis.probe.Loss.
    """
    stacks = {name: getattr(model, name) for name in STACKS}
    if not all(isinstance(stack, Encoder | Decoder) for stack in stacks.values()):
        return {}
    training = model.training
    model.eval()
    try:
        with eagerly(model):
            return _change_of_loss(model, batch.to(model.device), loss, stacks)
    finally:
        model.train(training)


def passes_needed(layers: Sequence[int]) -> int:
    """Return the number of passes that the measures take in stacks of the given depths."""
    pairs = [(len(near_pairs(n, 0)), len(near_pairs(n, 1))) for n in layers]
    return 1 + sum(n - 1 + runs + exchanges for n, (runs, exchanges) in zip(layers, pairs, strict=True))


def near_pairs(layers: int, apart: int) -> list[tuple[int, int]]:
    """Return pairs (i, j) of layers, from 0, with j - i >= `apart`, nearest first, at most PASSES of them."""
    return [(i, i + d) for d in range(apart, layers) for i in range(layers - d)][:PASSES]


def pruning_order(rises: Sequence[float]) -> list[int]:
    """Return the layers, from 0, in the order of removal, given the rise of the loss without each one alone.

    Those that cannot be left out (NaN) come last; on ties, the higher layer is removed first.
    """
    return sorted(range(len(rises)), key=lambda n: (math.isnan(rises[n]), rises[n], -n))


def effective_depth(curve: Sequence[float], nll: float) -> float:
    """Return N - n, where n layers can be removed from a stack before its loss rises by more than TOLERANCE.

    `curve` is its `pruning_curve`, `nll` the loss of the whole model. The least valuable layers are removed first, and
    the first rise beyond the tolerance ends the count: a stack in which all N layers count has effective depth N. NaN
    if the loss is not finite.
    """
    if not math.isfinite(nll):
        return math.nan
    fits = [rise <= TOLERANCE * nll for rise in curve]  # of NaN: no
    return float(len(curve) - (fits.index(False) if False in fits else len(curve)) + 1)


class _Watched(nn.Module):
    """A layer that records its input and output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.states: list[Tensor] = []

    def forward(self, x: Tensor, *view: Any) -> Tensor:
        y: Tensor = self.layer(x, *view)
        self.states = [x, y]
        return y

    def sublayers(self) -> list[Callable[..., Tensor]]:
        """See ziggurat.model.layers.TransformerLayer."""
        self.states = []
        return [self._kept(unit) for unit in cast(Any, self.layer).sublayers()]

    def _kept(self, unit: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(x: Tensor, *view: Any) -> Tensor:
            y = unit(x, *view)
            self.states = [self.states[0] if self.states else x, y]
            return y

        return run


class _LeftOut(nn.Module):
    """Replaces a layer and passes its input through."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.units = len(cast(Any, layer).sublayers())

    def forward(self, x: Tensor, *_view: Any) -> Tensor:
        return x

    def sublayers(self) -> list[Callable[..., Tensor]]:
        """See ziggurat.model.layers.TransformerLayer."""
        return [self.forward] * self.units


@contextlib.contextmanager
def _arranged(stack: Encoder | Decoder, layers: Sequence[nn.Module]) -> Iterator[None]:
    """Context in which the stack has these layers, whose number is unchanged."""
    before, stack.layers = stack.layers, nn.ModuleList(layers)
    try:
        yield
    finally:
        stack.layers = before


def _change_of_loss(model: Seq2Seq, batch: Batch, loss: Loss, stacks: dict[str, Encoder | Decoder]) -> dict[str, Any]:
    masks = {"encoder": batch.source_mask, "decoder": batch.target_mask}

    def nll() -> float:
        return float(loss(model, batch)[1]) / batch.target_tokens

    with contextlib.ExitStack() as watching:
        watched = {}
        for name, stack in stacks.items():
            watched[name] = [_Watched(layer) for layer in stack.layers]
            watching.enter_context(_arranged(stack, watched[name]))
        ends: list[Tensor] = []
        hook = stacks["decoder"].register_forward_hook(lambda _module, _args, hidden: ends.append(hidden))
        watching.callback(hook.remove)
        whole = nll()
    found: dict[str, Any] = {measure: {} for measure in LAYER_MEASURES}
    for name, stack in stacks.items():
        states = [[_real(stack, state, masks[name]) for state in layer.states] for layer in watched[name]]
        found["angular_distance"][name] = _angles([states[0][0], *(gave for _, gave in states)])
        found["causal_score"][name], alone = _causal(stack, states, masks[name], nll)
        found["permutation_score"][name] = _exchanges(stack, nll, whole)
        without, curve = _without(stack, nll, whole, alone)
        found["loss_without"][name], found["pruning_curve"][name] = without, curve
        found["effective_depth"][name] = effective_depth(curve, whole)
    found["logit_lens"] = _lens(model, batch, [layer.states[0] for layer in watched["decoder"]], ends[-1])
    return found


def _real(stack: Encoder | Decoder, state: Tensor, mask: Tensor) -> Tensor:
    """Return the states of real tokens, streams summed, [tokens, d], in double, because arccos is steep at 1."""
    return (state if stack.streams is None else state.sum(-2))[mask].double()


def _angles(states: Sequence[Tensor]) -> list[list[float]]:
    directions = torch.stack([F.normalize(state, dim=-1) for state in states])  # [N + 1, tokens, d]
    rows = [(directions[i] * directions).sum(-1).clamp(-1, 1).arccos().mean(-1) / math.pi for i in range(len(states))]
    return torch.stack(rows).tolist()


def _fixed(stack: Encoder | Decoder) -> int:
    """Return how many of the lowest layers must keep their position."""
    first = stack.layers[0]
    return 1 if any(isinstance(module, ValueResidual) for module in first.modules()) else 0


def _causal(
    stack: Encoder | Decoder, states: Sequence[Sequence[Tensor]], mask: Tensor, nll: Callable[[], float]
) -> tuple[list[list[float]], list[float]]:
    """Return the causal scores, and the loss without each single layer."""
    layers, count = list(stack.layers), len(stack.layers)
    scores, alone = torch.full((count, count), torch.nan, dtype=torch.float64), [math.nan] * count
    for s in range(_fixed(stack), count):
        above = [_Watched(layer) for layer in layers[s + 1 :]]
        with _arranged(stack, [*layers[:s], _LeftOut(layers[s]), *above]):
            alone[s] = nll()
        for number, layer in enumerate(above, start=s + 1):
            now = _added(layer.layer, [_real(stack, state, mask) for state in layer.states])
            before = _added(layer.layer, states[number])
            change = torch.linalg.vector_norm(now - before, dim=-1)
            scores[s, number] = (change / torch.linalg.vector_norm(before, dim=-1)).mean()
    return scores.tolist(), alone


def _added(layer: nn.Module, states: Sequence[Tensor]) -> Tensor:
    """Return what a layer adds to its input; its whole output if its sub-layers leave out the stream."""
    read, gave = states
    return gave if any(isinstance(module, NoSkip) for module in layer.modules()) else gave - read


def _exchanges(stack: Encoder | Decoder, nll: Callable[[], float], whole: float) -> list[list[float]]:
    layers, count = list(stack.layers), len(stack.layers)
    scores = torch.full((count, count), torch.nan, dtype=torch.float64)
    scores.fill_diagonal_(0.0)
    for i, j in near_pairs(count, 1):
        if i >= _fixed(stack):
            order = list(range(count))
            order[i], order[j] = j, i
            with _arranged(stack, [layers[n] for n in order]):
                scores[i, j] = scores[j, i] = abs(nll() - whole) / whole
    return scores.tolist()


def _without(
    stack: Encoder | Decoder, nll: Callable[[], float], whole: float, alone: Sequence[float]
) -> tuple[list[list[float]], list[float]]:
    """Return the rises without layers i to j, and those without the n least valuable layers."""
    layers, count = list(stack.layers), len(stack.layers)

    def rise(left_out: Sequence[int]) -> float:
        if min(left_out) < _fixed(stack):
            return math.nan
        with _arranged(stack, [_LeftOut(layer) if n in left_out else layer for n, layer in enumerate(layers)]):
            return nll() - whole

    rises = torch.full((count, count), torch.nan, dtype=torch.float64)
    for i, j in near_pairs(count, 0):
        rises[i, j] = alone[i] - whole if i == j else rise(range(i, j + 1))
    order = pruning_order([loss - whole for loss in alone])
    return rises.tolist(), [0.0, *(rise(order[:n]) for n in range(1, count))]


def _lens(model: Seq2Seq, batch: Batch, read: Sequence[Tensor], whole: Tensor) -> dict[str, list[float]]:
    """Return loss and agreement if the decoder ended with each layer's input, and with `whole`, its output."""
    decoder = cast(Decoder, model.decoder)
    rows = []
    for state in read:
        merged = state
        if decoder.streams is not None:
            merged = state.sum(-2) if decoder.end is None else decoder.end(state)
        merged = merged[batch.target_mask].to(model.output.weight.dtype)  # autocast may have returned a half type
        rows.append(merged if decoder.final_norm is None else decoder.final_norm(merged))
    rows.append(whole[batch.target_mask].to(model.output.weight.dtype))
    best = model.logits(rows[-1]).argmax(-1)
    gold, nlls, agreement = batch.target_out[batch.target_mask], [], []
    for hidden in rows:
        logits = model.logits(hidden)
        nlls.append(float(F.cross_entropy(logits, gold)))
        agreement.append(float((logits.argmax(-1) == best).double().mean()))
    return {"nll": nlls, "agreement": agreement}


def diagnose(
    path: Path,
    *,
    store: Path | None = None,
    device: str = "auto",
    layers: bool = False,
    translate: int = 0,
    say: Callable[[str], object] = lambda message: None,
) -> list[Record]:
    """Measure every kept checkpoint of the run `path`, or the model directory `path`; write and return the records.

    Training writes the same records, for the same training pairs; only `update_ratio`, which needs an update, is
    missing here. Records of a run are merged into those on disk: if one exists for the same update, its values are
    replaced individually. The record of a model directory has update 0.

    Args:
        path: run or model directory.
        store: prepared data; None: `data.store` of the configuration.
        device: see ziggurat.model.accelerator.usable_device.
        layers: also measure the worth of each layer (`layer_measures`), which takes many passes.
        translate: with `layers`, the number of dev sentences to translate without the least valuable layers, for the
            record's `pruning_bleu` [n] by stack.
        say: called with a line of text before every model.

    Raises CheckpointError: no model, damaged files, a run in training. ConfigError: data with a vocabulary other than
    the model's, or a model directory with records of its training. DataError: no such store, damaged records.
    """
    share_cores(torch.get_num_threads())

    def measure(which: str | None, update: int, batches: list[Batch] | None) -> tuple[Record, list[Batch]]:
        opened = open_model(path, which=which, device=device)
        batches = batches or _batches(opened, store)  # shared, since choosing them reads the whole table
        record = _measured(opened, batches, update)
        if layers:
            _add_worth(record, opened, batches[0], say)
        if layers and translate and "loss_without" in record.values:
            data = Store.open(store or opened.experiment.data.store)
            record.values["pruning_bleu"] = _pruned_bleu(path, opened, record, data, translate, say)
        return record, batches

    if not (path / CHECKPOINTS).is_dir():
        if any(record.update for record in read_records(path)):
            raise ConfigError(
                f"{path}: has the records of a training run ({DEPTH_FILE}), but no checkpoints to measure; move the "
                "file away to measure the model in the folder"
            )
        say(f"measuring {path}")
        record, _ = measure(None, 0, None)
        write_records(path, [record])
        return [record]
    folders = checkpoint_folders(path)
    if not folders:
        raise CheckpointError(f"{path}: no checkpoint yet; nothing to measure")
    with locked(path):  # because training appends to the same file
        known = {record.update: record for record in read_records(path)}
        found, batches = list[Record](), None
        for folder in folders:
            update = read_progress(folder).update
            say(f"measuring {path}: update {update}")
            record, batches = measure(folder.name, update, batches)
            found.append(record)
        for record in found:
            before = known.get(record.update)
            # Drop the number of batches, which belongs to the replaced norms.
            kept = {k: v for k, v in before.values.items() if k != "gradient_batches"} if before else {}
            values = {**kept, **record.values}
            known[record.update] = Record(record.update, record.time, record.layers, values)
        write_records(path, [known[update] for update in sorted(known)])
    return found


def _batches(opened: OpenedModel, store: Path | None) -> list[Batch]:
    """Return the pairs of the store on which a model is measured. Raises ConfigError for a different vocabulary."""
    data = Store.open(store or opened.experiment.data.store)
    named = "name the data that it was trained on with `--store`"
    theirs = (data.source, data.target)
    refuse_other_vocabulary(opened.tokenizers, theirs, opened.origin, f"the store {data.path}", named)
    return probe_batches(opened.experiment, data)


def _settled(opened: OpenedModel) -> TrainingConfig:
    source, target = opened.tokenizers
    return settle_precision(opened.experiment, opened.model.device, (source.size, target.size)).training


def _measured(opened: OpenedModel, batches: Sequence[Batch], update: int) -> Record:
    training = _settled(opened)
    loss = probe_loss(training.loss, training.precision)
    return record_of(opened.model, update, measured(opened.model, batches, loss))


def _add_worth(record: Record, opened: OpenedModel, batch: Batch, say: Callable[[str], object]) -> None:
    """Add the worth of each layer to the record of a model."""
    training = _settled(opened)
    say(f"leaving out and exchanging layers: {passes_needed(list(record.layers.values())):,} passes")
    record.values.update(layer_measures(opened.model, batch, probe_loss(training.loss, training.precision)))


def _pruned_bleu(
    path: Path, opened: OpenedModel, record: Record, data: Store, count: int, say: Callable[[str], object]
) -> dict[str, list[float]]:
    """Return BLEU on `count` dev sentences without the n least valuable layers, for n < N, by stack.

    As in validation, each sentence has its corpus's tag, and BLEU is the mean over the trained directions. NaN if the
    layers cannot be left out. Raises DataError: the store has no dev set.
    """
    if data.dev is None or not len(data.dev):
        raise DataError(f"{data.path}: the store has no dev set to translate")
    directions = [direction for direction in directions_of(data) if direction.trained]
    rows = np.concatenate([direction.rows for direction in directions])
    rows = rows[np.unique(np.linspace(0, len(rows) - 1, min(count, len(rows))).round().astype(np.int64))]
    sources, references = data.dev.texts(rows)
    tags = data.dev_tags(rows)
    found_in = [(one.target_language, np.flatnonzero(np.isin(rows, one.rows)).tolist()) for one in directions]
    which = opened.weights.parent.name if (path / CHECKPOINTS).is_dir() else None

    def bleu(without_layers: str | None) -> float:
        translator = load_translator(path, which=which, device=str(opened.model.device), without_layers=without_layers)
        # A stack with missing layers may not end its sentences.
        with warnings.catch_warnings(action="ignore", category=TranslationWarning):
            outputs = [found.text for found in translate_tagged(translator.translate, sources, tags)]
        scores = []
        for language, own in found_in:
            if own:  # a few sentences may contain none of a small direction
                mine, theirs = ([lines[i] for i in own] for lines in (outputs, references))
                (score,) = evaluate(mine, [theirs], metrics=("bleu",), target_language=language)
                scores.append(score.value)
        return sum(scores) / len(scores)

    whole = bleu(None)
    curves: dict[str, list[float]] = {}
    for stack, rises in record.values["loss_without"].items():
        order = pruning_order([row[layer] for layer, row in enumerate(rises)])
        say(f"translating {len(sources):,} sentences without up to {len(order) - 1} layers of the {stack}")
        curves[stack] = [whole]
        for n in range(1, len(order)):
            numbers = [layer + 1 for layer in order[:n]]
            prunable = not unprunable(opened.experiment.model, LeftOut(**{stack: frozenset(numbers)}))
            left_out = ",".join(f"{stack}.{number}" for number in numbers)
            curves[stack].append(bleu(left_out) if prunable else math.nan)
    return curves
