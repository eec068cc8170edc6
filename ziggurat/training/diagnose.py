"""Measures of depth after training: of the checkpoints that a run has kept, or of a model directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from ziggurat.data.collate import Batch
from ziggurat.data.corpus import Store
from ziggurat.diagnosis.records import DEPTH_FILE, Record, read_records, write_records
from ziggurat.errors import CheckpointError, ConfigError
from ziggurat.models.directory import CHECKPOINTS, OpenedModel, open_model
from ziggurat.models.run_folder import locked
from ziggurat.threads import share_cores
from ziggurat.training.checkpoint import checkpoint_folders, read_progress
from ziggurat.training.depth_records import measured, probe_batch, record_of
from ziggurat.training.learner import refuse_other_vocabulary
from ziggurat.training.objective import probe_loss, settle_precision

__all__ = ["diagnose"]


def diagnose(
    path: Path,
    *,
    store: Path | None = None,
    device: str = "auto",
    say: Callable[[str], object] = lambda message: None,
) -> list[Record]:
    """Measure every kept checkpoint of the run `path`, or the model directory `path`; write and return the records.

    Training writes the same records, of the same training pairs; only `update_ratio`, which takes an update to measure,
    is missing here. Records of a run are merged into those on disk: where there is one of the same update, its values
    are replaced one by one. The record of a model directory is of update 0.

    Args:
        path: run or model directory.
        store: prepared data; None: `data.store` of the configuration.
        device: see ziggurat.models.tensors.usable_device.
        say: called with a line of text before every model.

    Raises CheckpointError: no model, damaged files, a run in training. ConfigError: data with another vocabulary than
    the model's, or a model directory with records of its training. DataError: no such store, damaged records.
    """
    share_cores(torch.get_num_threads())
    if not (path / CHECKPOINTS).is_dir():
        if any(record.update for record in read_records(path)):
            raise ConfigError(
                f"{path}: has the records of a training ({DEPTH_FILE}), but no checkpoints to measure; move the file "
                "away to measure the model in the folder"
            )
        say(f"measuring {path}")
        opened = open_model(path, device=device)
        record = _measured(opened, _batch(opened, store), 0)
        write_records(path, [record])
        return [record]
    folders = checkpoint_folders(path)
    if not folders:
        raise CheckpointError(f"{path}: no checkpoint yet; nothing to measure")
    with locked(path):  # training appends to the same file
        known = {record.update: record for record in read_records(path)}
        found, batch = list[Record](), None
        for folder in folders:
            update = read_progress(folder).update
            say(f"measuring {path}: update {update}")
            opened = open_model(path, which=folder.name, device=device)
            batch = batch or _batch(opened, store)  # the same for all of them: choosing it reads the whole table
            found.append(_measured(opened, batch, update))
        for record in found:
            before = known.get(record.update)
            values = {**before.values, **record.values} if before else record.values
            known[record.update] = Record(record.update, record.time, record.layers, values)
        write_records(path, [known[update] for update in sorted(known)])
    return found


def _batch(opened: OpenedModel, store: Path | None) -> Batch:
    """Return the pairs of the store on which a model is measured. Raises ConfigError for another vocabulary."""
    data = Store.open(store or opened.experiment.data.store)
    refuse_other_vocabulary(opened, data, opened.origin, "name the data that it was trained on with `--store`")
    return probe_batch(opened.experiment, data)


def _measured(opened: OpenedModel, batch: Batch, update: int) -> Record:
    """Return the record of a model after `update`."""
    training = settle_precision(opened.experiment, opened.model.device).training
    loss = probe_loss(training.loss, training.precision)
    return record_of(opened.model, update, measured(opened.model, batch, loss))
