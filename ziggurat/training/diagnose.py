"""Measures of depth after the fact: of the checkpoints that a run has kept, or of a model directory."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from ziggurat.data.corpus import Store
from ziggurat.data.subword import load_tokenizers, same_vocabulary
from ziggurat.diagnosis.hooks import STACKS, layers_of
from ziggurat.diagnosis.probe import measure
from ziggurat.diagnosis.records import DEPTH_FILE, Record, read_records, write_records
from ziggurat.errors import CheckpointError, ConfigError
from ziggurat.models.directory import CHECKPOINTS, OpenedModel, open_model
from ziggurat.models.run_folder import locked
from ziggurat.threads import share_cores
from ziggurat.training.checkpoint import checkpoint_folders, read_progress
from ziggurat.training.diagnostics import measured, probe_batch
from ziggurat.training.objective import probe_loss

__all__ = ["diagnose"]


def diagnose(
    path: Path,
    *,
    store: Path | None = None,
    device: str = "auto",
    say: Callable[[str], object] = lambda message: None,
) -> list[Record]:
    """Measure every checkpoint kept of the run `path`, or the model directory `path`; write and return the records.

    They are those that training leaves, of the same training pairs; what only an update can tell (`update_ratio`) is
    not among them. Those of a run join the ones that are there; where there is one of the same update already, its
    values are replaced one by one. That of a model directory is of update 0.

    Args:
        path: run or model directory.
        store: prepared data; None: `data.store` of the configuration.
        device: see ziggurat.models.device.usable_device.
        say: takes a line before every model.

    Raises CheckpointError: nothing there, damaged files, a run that is being trained. ConfigError: data with another
    vocabulary than the model's, or a model directory with records of its training. DataError: no such store, damaged
    records.
    """
    share_cores(torch.get_num_threads())
    if not (path / CHECKPOINTS).is_dir():
        if any(record.update for record in read_records(path)):
            raise ConfigError(
                f"{path}: has the records of a training ({DEPTH_FILE}), but no checkpoints to measure; move the file "
                "away to measure the model that is there"
            )
        say(f"measuring {path}")
        record = _measured(open_model(path, device=device), store, 0)
        write_records(path, [record])
        return [record]
    folders = checkpoint_folders(path)
    if not folders:
        raise CheckpointError(f"{path}: no checkpoint yet; nothing to measure")
    with locked(path):
        known = {record.update: record for record in read_records(path)}
        found = []
        for folder in folders:
            update = read_progress(folder).update
            say(f"measuring {path}: update {update}")
            found.append(_measured(open_model(path, which=folder.name, device=device), store, update))
        for record in found:
            before = known.get(record.update)
            values = {**before.values, **record.values} if before else record.values
            known[record.update] = Record(record.update, record.time, record.layers, values)
        write_records(path, [known[update] for update in sorted(known)])
    return found


def _measured(opened: OpenedModel, store: Path | None, update: int) -> Record:
    experiment, model = opened.experiment, opened.model
    data = Store.open(store or experiment.data.store)
    for side, mine, its in zip(
        ("source", "target"), (data.source, data.target), load_tokenizers(opened.directory), strict=True
    ):
        if not same_vocabulary(mine, its):
            raise ConfigError(
                f"{opened.origin}: its {side} vocabulary is not that of the store {data.path}; name the data that it "
                "was trained on by `--store`"
            )
    batch = probe_batch(experiment, data)
    loss = probe_loss(experiment.training.loss, experiment.training.precision)
    values = measured(model, lambda: measure(model, batch, loss))
    layers = {stack: len(layers_of(model, stack)) for stack in STACKS}
    return Record(update, round(time.time(), 3), layers, values)
