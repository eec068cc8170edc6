"""Several checkpoints of a run, selected by count, by epochs or around the best one, to be averaged or scored."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

from ziggurat.config import TrainingConfig
from ziggurat.config.lifecycle import CheckpointConfig
from ziggurat.model.run_folder import checkpoint_folders, checkpoint_name
from ziggurat.system.errors import CheckpointError, ConfigError, printable
from ziggurat.train.checkpoint import read_progress
from ziggurat.train.run_state import Progress
from ziggurat.train.schedule import finished


@dataclass(frozen=True)
class CheckpointSelection:
    """Checkpoints as a user asks for them: `last:5`, `last-epochs:5` or `around-best:21`.

    Attributes:
        kind: `last` are the newest; `last-epochs` the newest of those that end an epoch; `around-best` the best by
            `training.validation.metric`, with as many before it as after it.
        count: how many; for `around-best` an odd number.
    """

    kind: str
    count: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the selection that the option `--checkpoints` names. Raises ConfigError."""
        found = re.fullmatch(r"(last|last-epochs|around-best):([1-9][0-9]{0,5})", text)
        if found is None:
            raise ConfigError(
                f"`--checkpoints {printable(text)}`: say `last:5` (the newest), `last-epochs:5` (the newest that end "
                "an epoch) or `around-best:21` (the best and its neighbours)"
            )
        selection = cls(found[1], int(found[2]))
        if selection.kind == "around-best" and selection.count % 2 == 0:
            raise ConfigError(
                f"`--checkpoints {selection}`: an odd number, since as many are before the best as after it"
            )
        return selection

    def __str__(self) -> str:
        return f"{self.kind}:{self.count}"


def regular_checkpoints(run: Path, config: TrainingConfig) -> list[Path]:
    """Return the checkpoints of the current stage that a run has however often it was stopped, oldest first.

    These are the checkpoints that the count of updates or epochs asked for, not the clock, and, when training is over,
    the last one, unless epochs alone count; where the model grew, those of its present depth. Raises CheckpointError
    when the `meta.json` of one cannot be read.
    """
    return _regular({folder: read_progress(folder) for folder in checkpoint_folders(run)}, config)


def selected_checkpoints(run: Path, config: TrainingConfig, selection: CheckpointSelection) -> list[Path]:
    """Return the checkpoints of a run that `selection` names, oldest first.

    Raises CheckpointError when fewer are kept, or when those around the best are not one after the other.
    """
    known = {folder: read_progress(folder) for folder in checkpoint_folders(run)}
    folders = _regular(known, config)
    if selection.kind == "around-best":
        return _around_best(run, known, folders, selection.count, config.checkpoint)
    if selection.kind == "last-epochs":
        folders = [folder for folder in folders if known[folder].batch == 0]
    if len(folders) < selection.count:
        ends = ""
        if selection.kind == "last-epochs":
            ends = " that end an epoch (`training.checkpoint.every_epochs`)"
        raise CheckpointError(
            f"{run}: {len(folders)} of the {selection.count} checkpoints wanted{ends} are kept (those that an "
            "interruption left or the clock asked for, and those of another depth, do not count); ask for fewer, or "
            "raise `training.checkpoint.keep_last` and train on"
        )
    return folders[-selection.count :]


def _regular(known: Mapping[Path, Progress], config: TrainingConfig) -> list[Path]:
    if not known:
        return []
    newest, progress = list(known.items())[-1]
    passing = {folder for folder, p in known.items() if folder.name in progress.interim or p.by_clock}
    by_epochs = config.checkpoint.every_updates is None and config.checkpoint.every_epochs is not None
    if finished(progress, config) is not None and not by_epochs:
        passing.discard(newest)
    return [folder for folder, p in known.items() if p.stage == progress.stage and folder not in passing]


def _around_best(
    run: Path, known: Mapping[Path, Progress], folders: list[Path], count: int, config: CheckpointConfig
) -> list[Path]:
    """Return the best checkpoint and its `count` - 1 neighbours."""
    update = list(known.values())[-1].best_update if known else None
    if update is None:
        raise CheckpointError(f"{run}: no checkpoint is the best: none was validated")
    place = next((n for n, folder in enumerate(folders) if folder.name == checkpoint_name(update)), None)
    if place is None:
        raise CheckpointError(
            f"{run}: the best checkpoint, of update {update}, is not kept, or not one of those that count (of the "
            "present depth, at a multiple of the updates or epochs between checkpoints)"
        )
    half, before, after = count // 2, place, len(folders) - 1 - place
    fewer = min(before, after)
    if fewer < half:
        ways = [f"ask for `around-best:{2 * fewer + 1}`"] if fewer else []
        ways += ["train on"] if after < half else []
        if (config.keep_around_best or 0) < count:
            ways.append(f"have a run keep them by `training.checkpoint.keep_around_best={count}`")
        raise CheckpointError(
            f"{run}: {before} checkpoints before the best one (update {update}) and {after} after it are kept, of "
            f"{half} each: {', or '.join(ways or ['ask for others'])}"
        )
    window = folders[place - half : place + half + 1]
    for first, second in pairwise(window):
        if _apart(known[first], known[second], config):
            raise CheckpointError(
                f"{run}: checkpoints between {first.name} and {second.name}, near the best one, are not kept; ask for "
                f"fewer, or have a run keep them by `training.checkpoint.keep_around_best={count}`"
            )
    return window


def _apart(first: Progress, second: Progress, config: CheckpointConfig) -> bool:
    """True when more updates or epochs are between two checkpoints than between two that follow each other."""
    updates, epochs = config.every_updates, config.every_epochs
    return (updates is not None and second.update - first.update > updates) or (
        epochs is not None and second.epoch - first.epoch > epochs
    )
