"""Saving during training: checkpoints are written in a thread, one at a time, and kept, deleted or set aside.

No weights are written before the check of the store is complete. Comparing a large store with its checksums can take
minutes, so training does not wait for it.
"""

from __future__ import annotations

import copy
import os
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from ziggurat.config import Experiment
from ziggurat.config.lifecycle import CheckpointConfig
from ziggurat.data.corpus import Store
from ziggurat.data.store_checks import StoreWatch, Verification
from ziggurat.model.accelerator import copies_aside, synchronize
from ziggurat.model.run_folder import (
    CHECKPOINTS,
    best_link,
    checkpoint_folders,
    checkpoint_name,
    checkpoint_update,
    link,
    ranked,
    read_meta,
    write_meta,
)
from ziggurat.model.tensors import local
from ziggurat.system.errors import CheckpointError, DataError, MachineError
from ziggurat.system.staging import discard, sweep, tidy
from ziggurat.train.checkpoint import Checkpoint, RunProgress, read_progress, save_checkpoint
from ziggurat.train.distributed import Processes
from ziggurat.train.learner import Learner
from ziggurat.train.run_log import RunLog


def prune(run: Path, progress: RunProgress, kept: CheckpointConfig, *, smaller_is_better: bool) -> None:
    """Delete the checkpoints that `kept` does not require, and update the links `best` and `best-DIRECTION`.

    The newest always stays, as does the one to roll back to. Checkpoints written because of the clock do not displace
    others: their updates are random, and the checkpoints of an average must not depend on chance.

    Entries for deleted checkpoints are removed from `progress`.
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
    # The newest of all, and the newest of those that are independent of the clock, which averages use.
    staying |= {*regular[-kept.keep_last :], *counted[-kept.keep_last :], *folders[-1:]}
    if best and kept.keep_best:  # before the link's old target is deleted; otherwise a kill would leave it dangling
        link(run / "best", run / CHECKPOINTS / best[0])
    links = {
        path: Path(os.readlink(path)).name for path in (run / "best", *run.glob(best_link("*"))) if path.is_symlink()
    }
    if not best:  # scores were dropped, so there is no link until there is a new best one
        staying |= {folder for folder in folders if folder.name in links.values()}
    if kept.keep_every is not None:
        staying |= {folder for folder in counted if checkpoint_update(folder) % kept.keep_every == 0}
    going = [folder for folder in folders if folder not in staying]
    gone = {folder.name for folder in going}
    for path, target in links.items():  # links of a resumed run that no longer keeps the best checkpoints
        if target in gone:
            path.unlink()
    for folder in going:
        discard(folder)
    progress.keep({folder.name for folder in staying})


def _around_best(counted: list[Path], best: list[str], half: int) -> set[Path]:
    """Return the best checkpoint with `half` neighbours on either side, and the newest, as the next may be best."""
    if not best:
        return {*counted[-half:]}
    before, after = ([f for f in counted if f.name < best[0]], [f for f in counted if f.name > best[0]])
    return {*before[-half:], *(f for f in counted if f.name == best[0]), *after[:half], *counted[-half:]}


def set_aside(run: Path, *, after: int) -> list[Path]:
    """Rename the checkpoints newer than update `after` to `damaged-step-...`; return their new names.

    For a run that resumes from `after` because newer ones are damaged: counted among the newest, they would displace
    undamaged ones. The link `last` is also updated.
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
    """Remove what killed processes have left in a run and next to it; only the holder of the run's lock may call this.

    Raises DataError when another process is creating this folder.
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
    ".shared",  # ziggurat.train.run.refuse_unshared
    ".*.linking_.tmp",  # ziggurat.model.run_folder.link
)
"""Temporary files without separate locks: holding the run's lock proves that their writers are dead."""


def _by_clock(folder: Path) -> bool:
    try:
        return read_progress(folder).by_clock
    except CheckpointError:
        return False  # damaged; kept like any other


class StoreCheck:
    """The comparison of a store with its checksums, in all processes: damage found by one ends the run in all.

    Each process compares its own view of the files. Raises DataError when damage is found within the first second.
    """

    def __init__(self, store: Store, processes: Processes) -> None:
        self._store, self._processes, self._confirmed = store, processes, False
        self._verification = Verification(store)

    def poll(self) -> None:
        """Raise DataError, as `confirm` does, if damage was found so far; all processes call this together."""
        if self._confirmed:
            return
        found = self._verification
        pending, damaged = self._processes.largest([not found.done, found.damaged])
        if damaged or not pending:
            self.confirm()

    def confirm(self) -> None:
        """Wait until the store is known to be undamaged; all processes call this together.

        Raises DataError in all of them when one found damage; the message of that process names the file.
        """
        if self._confirmed:
            return
        # Agree before anything is raised, because processes that continued would wait for the others for ever.
        (damaged,) = self._processes.largest([self._verification.found_damage()])
        if damaged:
            self._verification.wait()  # raises in the process that found it
            raise DataError(f"{self._store.path}: damaged, as another process found; its message names the file")
        self._confirmed = True


class Buffers:
    """CPU memory that receives copies of tensors and is reused; page-locked for tensors of a GPU.

    New memory would cost page faults or page-locking at every checkpoint.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of `tensors`, valid until the next call; memory of names that no longer appear is freed."""
        kept: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            # A DTensor stays a DTensor, without page-locking: shards are written by placement, and this process's part
            # is small.
            if local(tensor) is not tensor:
                kept[name] = tensor.to("cpu", copy=True)
                continue
            buffer = self._kept.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                contiguous = torch.contiguous_format
                buffer = torch.empty_like(tensor, device="cpu", memory_format=contiguous)
                buffer = buffer.pin_memory() if copies_aside(tensor.device) else buffer
            kept[name] = buffer.copy_(tensor, non_blocking=buffer.is_pinned())
        for device in {tensor.device for tensor in tensors.values()}:
            synchronize(device)  # once for all copies, because no stream orders the reading thread after them
        self._kept = kept
        return kept


class Saver:
    """Writes the checkpoints of a run and deletes those that the configuration does not keep.

    With `training.checkpoint.asynchronous`, `save` waits until the previous checkpoint is on disk, copies the tensors
    and returns; a thread does the rest. An error there is raised by the next `poll` or `save`, or on leaving the
    context, which waits for the write in progress. Without it, `save` returns when everything is on disk. All processes
    call every method together, and an error in one is raised in all.

    Names of deleted checkpoints are removed from `progress`. `save` uses `watch` to notice changed files of the store.
    No checkpoint is written before `store_check` is complete; None: the store is known to be undamaged.
    `waited_seconds` is the time that training has waited for checkpoints.
    """

    def __init__(
        self,
        run: Path,
        experiment: Experiment,
        watch: StoreWatch,
        progress: RunProgress,
        log: RunLog,
        processes: Processes | None = None,
        store_check: StoreCheck | None = None,
    ) -> None:
        self.waited_seconds = 0.0
        self._store_check, self._configuration = store_check, experiment.model_dump(mode="json")
        config = experiment.training
        # A separate group for this thread's messages, which would otherwise be mixed up with those of training.
        self._processes = (processes or Processes()).aside()
        self._run, self._kept, self._progress, self._log = run, config.checkpoint, progress, log
        self._smaller_is_better = config.validation.metric == "loss"
        self._store, self._watch = (watch.store.fingerprint, watch.store.train.corpus_names), watch
        self._replaced: str | None = None
        there = (run / CHECKPOINTS / checkpoint_name(progress.update)).is_dir()
        # The first process's answer counts, because one that joins a save alone would wait for the others for ever.
        self._saved_update = progress.update if self._processes.of_first(there) else -1
        self._saved_seconds = progress.seconds
        self._buffers = Buffers(), Buffers()
        # One thread, so that checkpoints are written in order and links and deletions never overtake each other.
        self._writer = ThreadPoolExecutor(1, "ziggurat-checkpoint")
        self._writing: tuple[RunProgress, Future[RunProgress]] | None = None
        self._good_before = progress.good  # the checkpoint to roll back to if the one in progress cannot be written
        self._failed: CheckpointError | None = None  # of the newest checkpoint
        self._untold: CheckpointError | None = None  # not yet raised or logged

    def __enter__(self) -> Self:
        if self._saved_update >= 0:  # a resumed run may have been killed before it deleted old checkpoints
            self._prune(self._progress)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.finish()
        except CheckpointError as unwritten:
            if error is None:
                raise
            if unwritten is not error:  # the run ends with its existing error
                self._log.say(f"CHECKPOINT NOT WRITTEN: {unwritten}", "bold red")
        finally:
            self._writer.shutdown()

    @property
    def due(self) -> bool:
        """True when a checkpoint is due by the clock (`training.checkpoint.every_minutes`)."""
        minutes = self._kept.every_minutes
        return minutes is not None and self._progress.seconds - self._saved_seconds >= 60 * minutes

    def save(self, learner: Learner, *, interim: bool, by_clock: bool = False, good: bool = False) -> None:
        """Save a checkpoint, unless this update already has one.

        `interim`: it was not due. `by_clock`: it was due only by the clock. `good`: the run may roll back to it.

        Raises CheckpointError when the previous one, or without `asynchronous` this one, could not be written and
        `training.checkpoint.on_error` is `stop`; DataError when a file of the store has changed.
        """
        began = time.perf_counter()
        name = checkpoint_name(self._progress.update)
        self._settle()
        if good:
            self._good_before, self._progress.good = self._progress.good, name
        self._saved_seconds = self._progress.seconds
        if self._saved_update != self._progress.update:
            if self._store_check is not None:
                self._store_check.confirm()
            self._warn_of_replaced_store()
            # Before the snapshot, which contains the progress, because a checkpoint records why it was written.
            self._progress.by_clock = by_clock
            if interim:
                self._progress.interim.append(name)
            snapshot = self._snapshot(learner)
            self._writing = snapshot.progress, self._writer.submit(self._write, snapshot, learner.depth)
            self._saved_update = self._progress.update
            if not self._kept.asynchronous:
                self._settle()
        self.waited_seconds += time.perf_counter() - began

    def amend(self) -> None:
        """Write the progress into the newest checkpoint, that of this update, and delete those no longer kept.

        For a resumed run that has just done the validation that was due after its checkpoint. Raises CheckpointError as
        `save` does.
        """
        began = time.perf_counter()
        folder = self._run / CHECKPOINTS / checkpoint_name(self._progress.update)

        def write() -> None:
            write_meta(folder, {**read_meta(folder), "progress": asdict(self._progress)})

        try:
            self._processes.first_does(partial(_with_disk_errors, write))
            self._prune(self._progress)
        except OSError as error:
            self._raise_or_log(CheckpointError(f"{folder}: cannot be brought up to date: {error.strerror or error}"))
        except CheckpointError as error:
            self._raise_or_log(error)
        self.waited_seconds += time.perf_counter() - began

    @property
    def writing(self) -> bool:
        """True while this process writes a checkpoint."""
        return self._writing is not None and not self._writing[1].done()

    def poll(self) -> None:
        """Process the outcome of the latest write; called when none is in progress. Raises as `save` does.

        Raises DataError as soon as damage in the store is found. No write can start until the store is checked, so
        until then this is called after every update.
        """
        if self._store_check is not None:
            self._store_check.poll()
        self._settle()

    def wait(self) -> None:
        """Wait for any write in progress; an error is kept for the next `poll` or `save`, and for `finish`."""
        began = time.perf_counter()
        self._collect()
        self.waited_seconds += time.perf_counter() - began

    def finish(self) -> None:
        """Wait for any write in progress. Raises CheckpointError when the newest checkpoint could not be written."""
        self.wait()
        if self._failed is not None:
            raise self._failed

    def _snapshot(self, learner: Learner) -> Checkpoint:
        """Return a snapshot of the run, which does not change while it is written."""
        # The first process writes the weights, whole. Moments are distributed: all processes write their parts of a
        # sharded moment, and a moment that every process has is written by one of them in turn, so that all write about
        # as much.
        rank, count = self._processes.rank, self._processes.count
        whole, moments = learner.kept_weights(), learner.optimiser.state()
        # Sorted, so that all processes distribute them in the same way.
        mine = {name for number, name in enumerate(sorted(moments)) if number % count == rank}
        tensors: tuple[Mapping[str, Tensor], Mapping[str, Tensor]] = (
            whole if rank == 0 else {},
            {name: moment for name, moment in moments.items() if name in mine or local(moment) is not moment},
        )
        # Otherwise training waits until everything is written, and the tensors cannot change meanwhile.
        if self._kept.asynchronous:
            tensors = self._buffers[0].copy(tensors[0]), self._buffers[1].copy(tensors[1])
        # A deep copy, because training changes the lists and dictionaries of its progress while the thread writes.
        return Checkpoint(copy.deepcopy(self._progress), *tensors, *self._store, self._configuration)

    def _write(self, snapshot: Checkpoint, depth: tuple[int, int]) -> RunProgress:
        """Write one checkpoint, then delete others; return the progress without the names of the deleted ones."""
        save_checkpoint(self._run, snapshot, depth, self._processes)
        pruned = copy.copy(snapshot.progress)
        self._prune(pruned)
        return pruned

    def _prune(self, progress: RunProgress) -> None:
        """Delete the checkpoints that are not kept, and their names in `progress`, in every process."""
        try:
            work = partial(prune, self._run, progress, self._kept, smaller_is_better=self._smaller_is_better)
            self._processes.first_does(partial(_with_disk_errors, work))
        except OSError as error:
            raise CheckpointError(f"{self._run}: old checkpoints cannot be deleted: {error}") from None
        progress.keep(self._processes.texts([*progress.scores, *progress.interim])[0])

    def _collect(self) -> None:
        """Wait for any write in progress and process its outcome; an error is kept."""
        if self._writing is None:
            return
        (before, future), self._writing = self._writing, None
        try:
            after = future.result()
        except CheckpointError as error:
            # -1, because the next save of this update would otherwise be skipped as already done.
            self._saved_update, self._failed, self._untold = -1, error, error
            folder = self._run / CHECKPOINTS / checkpoint_name(before.update)
            if self._progress.good == folder.name and not folder.is_dir():  # it exists if only pruning failed
                self._progress.good = self._good_before
            return
        self._failed = None
        # Only the names that the thread deleted, because training has added others to the progress meanwhile.
        gone = (before.scores.keys() - after.scores.keys()) | (set(before.interim) - set(after.interim))
        self._progress.keep({*self._progress.scores, *self._progress.interim} - gone)

    def _settle(self) -> None:
        """Wait for any write in progress, and raise or log its error, or one that `wait` has kept."""
        self._collect()
        error, self._untold = self._untold, None
        if error is not None:
            self._raise_or_log(error)

    def _raise_or_log(self, error: CheckpointError) -> None:
        if self._kept.on_error == "stop":
            raise error
        self._log.say(f"CHECKPOINT NOT WRITTEN: {error}", "bold red")
        self._log.say("training continues, as set by `training.checkpoint.on_error: continue`", "bold red")

    def _warn_of_replaced_store(self) -> None:
        """Log once that another store has replaced the run's."""
        replaced = self._watch.check()
        if replaced is not None and self._replaced is None:
            self._log.say(
                f"THE STORE WAS REPLACED: {replaced}. This process still has the old data and continues with it; to "
                "resume the run, put the old store back",
                "bold red",
            )
        self._replaced = replaced


def _with_disk_errors(work: Callable[[], object]) -> None:
    """Run `work`; turn a MachineError into an OSError, which reaches all processes and is subject to `on_error`."""
    try:
        work()
    except MachineError as error:
        raise OSError(str(error)) from None
