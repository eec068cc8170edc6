"""Measures of depth after training: of the checkpoints that a run has kept, or of a model directory."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from ziggurat.config import TrainingConfig
from ziggurat.config.pruning import LeftOut, unprunable
from ziggurat.data.corpus import Store
from ziggurat.data.loader import Batch
from ziggurat.evaluate.scores import evaluate
from ziggurat.inspect.layer_worth import layer_measures, passes_needed, pruning_order
from ziggurat.model.directory import OpenedModel, open_model, refuse_other_vocabulary
from ziggurat.model.run_folder import CHECKPOINTS, checkpoint_folders, locked
from ziggurat.system.errors import CheckpointError, ConfigError, DataError
from ziggurat.system.threads import share_cores
from ziggurat.train.checkpoint import read_progress
from ziggurat.train.depth_records import measured, probe_batches, record_of
from ziggurat.train.diagnosis.records import DEPTH_FILE, Record, read_records, write_records
from ziggurat.train.objective import probe_loss, settle_precision
from ziggurat.train.validate import directions_of
from ziggurat.translate.results import TranslationWarning, translate_tagged
from ziggurat.translate.translator import load_translator


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

    Training writes the same records, of the same training pairs; only `update_ratio`, which takes an update to measure,
    is missing here. Records of a run are merged into those on disk: where there is one of the same update, its values
    are replaced one by one. The record of a model directory is of update 0.

    Args:
        path: run or model directory.
        store: prepared data; None: `data.store` of the configuration.
        device: see ziggurat.model.directory.usable_device.
        layers: also measure what each layer is worth (ziggurat.inspect.layer_worth), which takes many passes.
        translate: with `layers`, also translate so many sentences of the dev set without the layers worth least, for
            the record's `pruning_bleu` [n] by stack.
        say: called with a line of text before every model.

    Raises CheckpointError: no model, damaged files, a run in training. ConfigError: data with another vocabulary than
    the model's, or a model directory with records of its training. DataError: no such store, damaged records.
    """
    share_cores(torch.get_num_threads())

    def measure(which: str | None, update: int, batches: list[Batch] | None) -> tuple[Record, list[Batch]]:
        opened = open_model(path, which=which, device=device)
        batches = batches or _batches(opened, store)  # the same for all of them: choosing it reads the whole table
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
                f"{path}: has the records of a training ({DEPTH_FILE}), but no checkpoints to measure; move the file "
                "away to measure the model in the folder"
            )
        say(f"measuring {path}")
        record, _ = measure(None, 0, None)
        write_records(path, [record])
        return [record]
    folders = checkpoint_folders(path)
    if not folders:
        raise CheckpointError(f"{path}: no checkpoint yet; nothing to measure")
    with locked(path):  # training appends to the same file
        known = {record.update: record for record in read_records(path)}
        found, batches = list[Record](), None
        for folder in folders:
            update = read_progress(folder).update
            say(f"measuring {path}: update {update}")
            record, batches = measure(folder.name, update, batches)
            found.append(record)
        for record in found:
            before = known.get(record.update)
            # Without the number of batches of the norms that are replaced.
            kept = {k: v for k, v in before.values.items() if k != "gradient_batches"} if before else {}
            values = {**kept, **record.values}
            known[record.update] = Record(record.update, record.time, record.layers, values)
        write_records(path, [known[update] for update in sorted(known)])
    return found


def _batches(opened: OpenedModel, store: Path | None) -> list[Batch]:
    """Return the pairs of the store on which a model is measured. Raises ConfigError for another vocabulary."""
    data = Store.open(store or opened.experiment.data.store)
    named = "name the data that it was trained on with `--store`"
    theirs = (data.source, data.target)
    refuse_other_vocabulary(opened.tokenizers, theirs, opened.origin, f"the store {data.path}", named)
    return probe_batches(opened.experiment, data)


def _settled(opened: OpenedModel) -> TrainingConfig:
    source, target = opened.tokenizers
    return settle_precision(opened.experiment, opened.model.device, (source.size, target.size)).training


def _measured(opened: OpenedModel, batches: Sequence[Batch], update: int) -> Record:
    """Return the record of a model after `update`."""
    training = _settled(opened)
    loss = probe_loss(training.loss, training.precision)
    return record_of(opened.model, update, measured(opened.model, batches, loss))


def _add_worth(record: Record, opened: OpenedModel, batch: Batch, say: Callable[[str], object]) -> None:
    """Add what each layer is worth to the record of a model."""
    training = _settled(opened)
    say(f"leaving out and exchanging layers: {passes_needed(list(record.layers.values())):,} passes")
    record.values.update(layer_measures(opened.model, batch, probe_loss(training.loss, training.precision)))


def _pruned_bleu(
    path: Path, opened: OpenedModel, record: Record, data: Store, count: int, say: Callable[[str], object]
) -> dict[str, list[float]]:
    """Return BLEU of `count` sentences of the dev set without the n layers worth least, for n < N, by stack.

    As in validation, each sentence has its corpus's tag, and BLEU is the mean of the directions that are trained on.
    NaN where the model cannot do without the layers. Raises DataError: the store has no dev set.
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
        # A stack that lacks layers may not end its sentences.
        with warnings.catch_warnings(action="ignore", category=TranslationWarning):
            outputs = [found.text for found in translate_tagged(translator.translate, sources, tags)]
        scores = []
        for language, own in found_in:
            if own:  # of a few sentences, a small direction may have none
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
