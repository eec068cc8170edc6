"""Which checkpoints of a run are kept: the newest, the best, and every so many updates one for good."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ziggurat.config.train import CheckpointConfig
from ziggurat.models.directory import CHECKPOINTS
from ziggurat.training.checkpoint import Progress, checkpoint_folders, delete_checkpoint, link

__all__ = ["clear_leftovers", "prune", "set_aside"]


def prune(run: Path, progress: Progress, kept: CheckpointConfig, *, smaller_is_better: bool) -> None:
    """Delete the checkpoints that `kept` does not ask for, and mend the link `best`.

    The newest always stays, and the one that the run would roll back to.

    `progress.scores` and `progress.interim` lose the names that are gone.
    """
    folders = checkpoint_folders(run)
    regular = [folder for folder in folders if folder.name not in progress.interim]
    scores = {folder: progress.scores[folder.name] for folder in folders if folder.name in progress.scores}
    ranked = sorted(scores, key=lambda f: (scores[f] if smaller_is_better else -scores[f], f.name))
    staying = {folder for folder in folders if folder.name == progress.good}
    staying |= {*regular[-kept.keep_last :], *folders[-1:], *ranked[: kept.keep_best]}
    if not ranked and (best := run / "best").is_symlink():  # until something compares with it
        staying |= {folder for folder in folders if folder.name == Path(os.readlink(best)).name}
    if kept.keep_every is not None:
        staying |= {folder for folder in regular if _update(folder) % kept.keep_every == 0}
    for folder in folders:
        if folder not in staying:
            delete_checkpoint(folder)
    if ranked and kept.keep_best:
        link(run / "best", ranked[0])
    names = {folder.name for folder in staying}
    progress.scores = {name: score for name, score in progress.scores.items() if name in names}
    progress.interim = [name for name in progress.interim if name in names]


def set_aside(run: Path, *, after: int) -> list[Path]:
    """Rename the checkpoints newer than update `after` to `damaged-step-...`; return their new names.

    For a run that resumes from `after` because those are damaged: counted among the newest, they would push whole
    ones out. The link `last` is mended.
    """
    moved = []
    for folder in checkpoint_folders(run):
        if _update(folder) > after:
            damaged = folder.with_name(f"damaged-{folder.name}")
            shutil.rmtree(damaged, ignore_errors=True)
            os.replace(folder, damaged)
            moved.append(damaged)
    if moved:
        link(run / "last", checkpoint_folders(run)[-1])
    return moved


def clear_leftovers(run: Path) -> None:
    """Remove what a process that was killed while writing or deleting a checkpoint left behind."""
    for pattern in (".step-*.tmp", ".step-*.old"):
        for folder in (run / CHECKPOINTS).glob(pattern):
            shutil.rmtree(folder, ignore_errors=True)


def _update(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))
