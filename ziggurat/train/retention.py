"""Retention: checkpoints of a run are kept, deleted or set aside; leftovers of killed processes are removed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ziggurat.config.lifecycle import CheckpointConfig
from ziggurat.model.run_folder import CHECKPOINTS, best_link, checkpoint_folders, checkpoint_update, link, ranked
from ziggurat.system.errors import CheckpointError
from ziggurat.system.workspace import discard, sweep, tidy
from ziggurat.train.checkpoint import read_progress
from ziggurat.train.run_state import Progress


def prune(run: Path, progress: Progress, kept: CheckpointConfig, *, smaller_is_better: bool) -> None:
    """Delete the checkpoints that `kept` does not ask for, and mend the links `best` and `best-DIRECTION`.

    The newest always stays, and so does the one to roll back to. Checkpoints that the clock asked for do not take the
    place of others: which updates they are of is chance, and the checkpoints of an average must not depend on it.

    What `progress` notes of deleted checkpoints is removed.
    """
    folders = checkpoint_folders(run)
    regular = [folder for folder in folders if folder.name not in progress.interim]
    names = {folder.name for folder in folders}
    best = ranked({n: s for n, s in progress.scores.items() if n in names}, smaller_is_better=smaller_is_better)
    counted = [folder for folder in regular if not _by_clock(folder)]
    staying = {folder for folder in folders if folder.name in (progress.good, *best[: kept.keep_best])}
    if kept.keep_around_best is not None:
        staying |= _around_best(counted, best, kept.keep_around_best // 2)
    for direction, scores in progress.direction_scores.items() if kept.keep_best_per_direction else ():
        known = {name: score for name, score in scores.items() if name in names}
        its_best = ranked(known, smaller_is_better=smaller_is_better)[: kept.keep_best_per_direction]
        staying |= {folder for folder in folders if folder.name in its_best}
        if its_best:
            link(run / best_link(direction), run / CHECKPOINTS / its_best[0])
    # The newest of all, and the newest of those that the clock did not ask for, which make up averages.
    staying |= {*regular[-kept.keep_last :], *counted[-kept.keep_last :], *folders[-1:]}
    if best and kept.keep_best:  # before the old target of the link is deleted, or a kill would leave it dangling
        link(run / "best", run / CHECKPOINTS / best[0])
    links = {
        path: Path(os.readlink(path)).name for path in (run / "best", *run.glob(best_link("*"))) if path.is_symlink()
    }
    if not best:  # scores were forgotten: until there is a new best one
        staying |= {folder for folder in folders if folder.name in links.values()}
    if kept.keep_every is not None:
        staying |= {folder for folder in counted if checkpoint_update(folder) % kept.keep_every == 0}
    going = [folder for folder in folders if folder not in staying]
    gone = {folder.name for folder in going}
    for path, target in links.items():  # of a run that was resumed, and keeps no best ones any more
        if target in gone:
            path.unlink()
    for folder in going:
        discard(folder)
    progress.keep({folder.name for folder in staying})


def _around_best(counted: list[Path], best: list[str], half: int) -> set[Path]:
    """Return the best checkpoint with `half` as many on either side, and the newest, which the next best may follow."""
    if not best:
        return {*counted[-half:]}
    before, after = ([f for f in counted if f.name < best[0]], [f for f in counted if f.name > best[0]])
    return {*before[-half:], *(f for f in counted if f.name == best[0]), *after[:half], *counted[-half:]}


def set_aside(run: Path, *, after: int) -> list[Path]:
    """Rename the checkpoints newer than update `after` to `damaged-step-...`; return their new names.

    For a run that resumes from `after` because newer ones are damaged: among the newest, they would push whole ones
    out. The link `last` is mended too.
    """
    moved: list[Path] = []
    for folder in checkpoint_folders(run):
        if checkpoint_update(folder) > after:
            damaged = folder.with_name(f"damaged-{folder.name}")
            shutil.rmtree(damaged, ignore_errors=True)
            os.replace(folder, damaged)
            moved.append(damaged)
    if folders := checkpoint_folders(run):
        link(run / "last", folders[-1])
    return moved


def clear_leftovers(run: Path) -> None:
    """Remove what killed processes have left in a run and beside it; only the holder of the run's lock may call this.

    Raises DataError when another process is making this folder.
    """
    tidy(run)
    sweep(run, deep=True)
    for pattern in _UNLOCKED:
        for path in run.glob(pattern):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


_UNLOCKED = (
    ".shared",  # ziggurat.train.ownership.refuse_unshared
    ".*.linking_.tmp",  # ziggurat.model.run_folder.link
)
"""Temporary files without locks of their own: only the lock of the run tells that their writers are dead."""


def _by_clock(folder: Path) -> bool:
    try:
        return read_progress(folder).by_clock
    except CheckpointError:
        return False  # damaged: kept like any other
