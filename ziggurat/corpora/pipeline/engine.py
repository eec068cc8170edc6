"""The engine of pipelines: it checks which steps are done, does the others in order, and can be stopped at any time.

A step is done if its manifest has the current settings, the current content of its inputs, and the checksums of
existing outputs. So after a change only the steps that depend on it are redone, and a redone step with the same result
as before leaves later steps untouched.

Several calls on many machines can each do a share of one step's shards, in the same folder. They share the lock of the
pipeline, which a call for whole steps holds exclusively, so calls of one kind wait for those of the other to end. They
also share a lock on the step; restarting the step with new settings or inputs needs that lock exclusively. None of them
writes the step's manifest: the next call for whole steps merges the finished shards.
"""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from ziggurat.corpora.pipeline.step import (
    AUTO,
    BEGUN,
    DEAR,
    MANIFEST,
    Fingerprints,
    State,
    Step,
    StepManifest,
    StepStatus,
    Times,
    other_machine,
    outputs_of,
    read_document,
    read_manifest,
    settings_changed,
    wanted_of,
    why_stale,
    write_document,
)
from ziggurat.data.store_checks import InputWatch
from ziggurat.system.errors import ConfigError, DataError, printable
from ziggurat.system.staging import TEMPORARY, discard, held, locked, sweep
from ziggurat.system.terminal import duration


@dataclass(frozen=True)
class Selection:
    """The steps of a call."""

    first: str | None = None
    """Name of the first step; None: the first of all. Results of earlier steps are used unchecked."""
    last: str | None = None
    """Name of the last step; None: the last of all."""
    forced: frozenset[str] = frozenset()
    """Names of steps to redo even if they are done."""

    def numbers(self, steps: Sequence[Step]) -> range:
        """Return the indices of the chosen steps. Raises ConfigError for a step that is not in `steps`."""
        names = [step.name for step in steps]
        for name in (self.first, self.last, *sorted(self.forced)):
            if name is not None and name not in names:
                near = get_close_matches(name, names, n=1)
                hint = f"did you mean `{near[0]}`? It" if near else "it"
                raise ConfigError(f"no step `{printable(name)}` in this pipeline; {hint} has {', '.join(names)}")
        first = 0 if self.first is None else names.index(self.first)
        last = len(names) - 1 if self.last is None else names.index(self.last)
        if last < first:
            raise ConfigError(f"`{names[last]}` comes before `{names[first]}`: no step is between them")
        if outside := [name for name in sorted(self.forced) if not first <= names.index(name) <= last]:
            raise ConfigError(f"`--force {outside[0]}`: this step is not among those chosen")
        return range(first, last + 1)


_OWN = {".lock", "times.json", "hashes.json", "corpora.yaml"}  # the last belongs to the demo, whose corpora come first
_SHOWN = 3


def _refuse_foreign(folder: Path, steps: Collection[str]) -> None:
    """Raise DataError if the folder of a pipeline or one of its steps contains files that no pipeline made."""
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise DataError(f"folder: {there} is a file; give the name of a folder for the results")
    if not folder.is_dir():
        return
    found = {path.name for path in folder.iterdir() if TEMPORARY.fullmatch(path.name) is None}
    others = sorted(found - set(steps))
    if others and not found & _OWN and not any(folder.glob(f"*/{BEGUN}")):
        shown = f"{', '.join(others[:_SHOWN])}{', ...' if len(others) > _SHOWN else ''}"
        raise DataError(
            f"folder: {folder} contains other files ({shown}): results need a folder of their own, such as "
            f"`folder: {folder / 'pipeline'}`"
        )
    for step in steps:
        place = folder / step
        if os.path.lexists(place) and read_manifest(place) is None and not _made_here(place):
            raise DataError(f"{place}: is in the way, and no pipeline made it; move it, or give another `folder`")


def _made_here(folder: Path) -> bool:
    if not folder.is_dir() or folder.is_symlink():
        return False
    return (folder / BEGUN).is_file() or all(TEMPORARY.fullmatch(path.name) is not None for path in folder.iterdir())


_HASHES, TIMES, LOCK = "hashes.json", "times.json", ".lock"
_EARLIER = "earlier"
"""_EARLIER is the folder for old results of restarted steps that took a long time."""
_BUSY = "another pipeline, or a part of a step, is at work here; wait for it to end"


@dataclass(frozen=True)
class PipelineEnd:
    """The end of a call."""

    done: tuple[str, ...]
    stopped: str | None = None
    """The step at which a signal stopped it; None: it reached its end."""
    signal: int | None = None
    """Number of that signal."""


class Pipeline:
    """Steps in order, each after its dependencies, and the folder of their results."""

    def __init__(self, folder: Path, steps: Sequence[Step]) -> None:
        names = [step.name for step in steps]
        assert len(set(names)) == len(names)
        assert all(other in names[: names.index(step.name)] for step in steps for other in step.after), "order"
        self.folder = folder
        self.steps = tuple(steps)
        self.begun: list[str] = []
        """Names of the steps that `run` restarted, in order."""
        self._hashes = Fingerprints(folder / _HASHES)
        self._times = Times(folder / TIMES)

    def left_over(self) -> list[str]:
        """Return the names of the folders of steps that the pipeline no longer has."""
        names = {step.name for step in self.steps}
        found = self.folder.glob(f"*/{BEGUN}") if self.folder.is_dir() else []
        return sorted(path.parent.name for path in found if path.parent.name not in names)

    def statuses(self, selection: Selection | None = None) -> list[StepStatus]:
        """Return what a call would do with each step up to the last chosen one; nothing is written.

        Raises ConfigError for an unknown step, DataError for missing files, and the errors of the steps' checks.
        """
        selection = selection or Selection()
        chosen = selection.numbers(self.steps)
        _refuse_foreign(self.folder, [step.name for step in self.steps])
        self._refuse_impossible(self.steps[chosen.start : chosen.stop], selection.forced)
        manifests: dict[str, StepManifest | None] = {}
        found, busy = [], held(self.folder / LOCK)
        for step in self.steps[: chosen.stop]:
            status, manifests[step.name] = self._look(step, selection, manifests, self.steps.index(step) in chosen)
            if busy and status.spent.running is not None and not status.finished:
                same = status.state == "begun"
                other = f" with settings other than this call's (this call: {status.why})"
                why = f"is running{'' if same else other}"
                status = replace(status, state="running" if same else status.state, why=why)
            found.append(status)
        return found

    def run(self, selection: Selection | None = None, say: Callable[[str], object] = lambda text: None) -> PipelineEnd:
        """Run the chosen steps that are not done yet, in order; interrupted steps resume.

        Raises ConfigError for an unknown step. Raises DataError if another process is at work in the folder, files are
            missing, or foreign files are in a step's folder. Also raises the errors of the steps; finished steps stay.
        """
        selection = selection or Selection()
        chosen = selection.numbers(self.steps)
        _refuse_foreign(self.folder, [step.name for step in self.steps])  # before writing a file there
        self.folder.mkdir(parents=True, exist_ok=True)
        done: list[str] = []
        with locked(self.folder / LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB, f"{self.folder}: {_BUSY}"):
            sweep(self.folder)
            self._refuse_impossible(self.steps[chosen.start : chosen.stop], selection.forced)
            manifests: dict[str, StepManifest | None] = {}
            for number, step in enumerate(self.steps[: chosen.stop]):
                status, manifests[step.name] = self._look(step, selection, manifests, number in chosen)
                place = f"{number + 1}/{chosen.stop} {step.name}"
                if status.state == "missing":
                    raise DataError(f"{self.folder / step.name}: {status.why}; leave out `--from` or `--only`")
                if status.settled:
                    say(f"{place}: {status.why}")
                    continue
                say(f"{place}: {step.title}" + ("" if status.state == "new" else f" ({status.why})"))
                if not status.resumes:
                    self._make_room(step, say)
                    self.begun.append(step.name)
                watch = InputWatch(self._hashes.of)
                wanted = wanted_of(step, manifests, watch.fingerprint)
                stopped = self._do(step, wanted, watch, say, begun=status.resumes)
                if stopped is not None:
                    return PipelineEnd(tuple(done), step.name, stopped)
                manifests[step.name] = read_manifest(self.folder / step.name)
                say(f"{place}: done in {duration(self._times.of(step.name).seconds)}")
                done.append(step.name)
                self._hashes.keep()
            self._hashes.keep()
        return PipelineEnd(tuple(done))

    def _refuse_impossible(self, steps: Sequence[Step], forced: Collection[str]) -> None:
        """Raise now, not after hours, the errors that steps would end with, if they are already known."""
        for step in steps:
            step.inputs()
        for step in steps:
            known = read_manifest(self.folder / step.name)
            as_it_was = known is not None and not settings_changed(known.wanted.get("settings"), step.settings)
            if not as_it_was or step.name in forced:
                step.check()

    def _look(
        self, step: Step, selection: Selection, manifests: dict[str, StepManifest | None], chosen: bool
    ) -> tuple[StepStatus, StepManifest | None]:
        """Return a step's status, and its manifest if it is done; `manifests` are those of the previous steps."""
        folder = self.folder / step.name
        manifest = read_manifest(folder)

        def status(state: State, why: str) -> tuple[StepStatus, StepManifest | None]:
            so_far = partial(self._times.so_far, step.name, folder)
            spent = replace(self._times.of(step.name), seconds=so_far())
            found = StepStatus(step, state, why, spent, manifest is not None, so_far)
            return found, manifest if found.settled else None

        if not chosen:
            if manifest is None or (damage := self._damage(folder, manifest)) is not None:
                return status("missing", "not done yet" if manifest is None else str(damage))
            return status("kept", "used unchecked")
        waiting = [name for name in step.after if manifests[name] is None]
        wanted = wanted_of(step, manifests, self._hashes.of)
        if step.name in selection.forced:
            return status("forced", "to be done again")
        if manifest is None:
            begun = read_document(folder / BEGUN)
            if begun is None:
                return status("new", "not done yet")
            if (why := why_stale(step, begun, wanted) or other_machine(step, begun)) is not None:
                return status("changed", why)
            if waiting:
                return status("after", f"was started, and depends on the output of {' and '.join(waiting)}")
            return status("begun", "resumes where it was interrupted")
        if (why := why_stale(step, manifest.wanted, wanted)) is not None:
            return status("changed", why)
        if waiting:
            return status("after", f"depends on the output of {' and '.join(waiting)}")
        if (damage := self._damage(folder, manifest)) is not None:
            return status("damaged", damage)
        if gone := [folder / page for page in step.pages if not (folder / page).is_file()]:
            return status("page", f"{gone[0]} is gone: it is made again")
        if (why := step.outdated()) is not None:
            return status("page", why)
        return status("done", "up to date")

    def _damage(self, folder: Path, manifest: StepManifest) -> str | None:
        for name, entry in manifest.outputs.items():
            path = folder / name
            if not path.is_file():
                return f"{path} is gone"
            if path.stat().st_size != entry["bytes"] or self._hashes.of(path) != entry["xxh3_128"]:
                return f"{path} changed since it was made"
        return None

    def _do(
        self, step: Step, wanted: dict[str, Any], watch: InputWatch, say: Callable[[str], object], *, begun: bool
    ) -> int | None:
        """Do a step, or the rest of it; return the number of the signal that stopped it, or None.

        Raises DataError, and discards the step, if an external file changed since `watch` saw it.
        """
        folder, wanted = self.folder / step.name, {**wanted, "machine": dict(step.machine())}
        if not begun:
            self._begin(folder, wanted)
        with self._times.measuring(step.name, folder):
            stopped = step.work(folder)
            if stopped is not None:
                return stopped
            try:
                watch.check("the same command does the step again")
            except DataError:
                self._make_room(step, say)  # its input is unknown, so it must not be resumed
                raise
            outputs = outputs_of(step, folder, self._hashes.of)
            write_document(folder / MANIFEST, StepManifest(wanted, outputs).document())
        return None

    def _begin(self, folder: Path, wanted: Mapping[str, Any]) -> None:
        """Start a step from scratch, in a new folder."""
        self._times.restart(folder.name)
        folder.mkdir()
        write_document(folder / BEGUN, wanted)

    def _make_room(self, step: Step, say: Callable[[str], object]) -> None:
        """Remove a step's results of an earlier call, or set them aside if they took a long time.

        Raises DataError if anything else is in the step's folder.
        """
        folder = self.folder / step.name
        if not os.path.lexists(folder):
            return
        if not _made_here(folder):
            raise DataError(f"{folder}: is in the way, and no pipeline made it; move it, or give another `folder`")
        if (seconds := self._times.so_far(step.name, folder)) < DEAR:
            discard(folder)
            return
        aside = self.folder / _EARLIER
        aside.mkdir(exist_ok=True)
        number = next(n for n in itertools.count(1) if not os.path.lexists(aside / f"{step.name}-{n}"))
        kept = folder.rename(aside / f"{step.name}-{number}")
        say(f"{step.name}: the earlier result took {duration(seconds)}; it is kept in {kept}")


_BEGINNING = ".parts.lock"


def shared_step(steps: Sequence[Step], name: str | None) -> Step:
    """Return the step to be done in parts. Raises ConfigError unless it is a job."""
    shared = ", ".join(step.name for step in steps if step.is_job)
    shared = (
        f"those that can be done in parts are: {shared}" if shared else "none of this pipeline can be done in parts"
    )
    if name is None:
        raise ConfigError(f"`--shard` applies to one step: add `--only STEP`; {shared}")
    found = next((step for step in steps if step.name == name), None)
    if found is None or not found.is_job:
        what = "no such step" if found is None else "this step is done as a whole"
        raise ConfigError(f"`--only {printable(name)}` with `--shard`: {what}; {shared}")
    return found


class ShardedRun(Pipeline):
    """A pipeline of which this call does a share of one step's shards."""

    def run_part(self, step: Step, say: Callable[[str], object] = lambda text: None) -> int | None:
        """Do this call's part of a step, as defined by its `work`; return the number of the signal that stopped it.

        Raises DataError if an earlier step is not done, a call for whole steps is at work in the folder, or parts with
            other settings or inputs are at work on the step. Also raises the errors of the step; finished shards stay.
        """
        _refuse_foreign(self.folder, [each.name for each in self.steps])
        self._refuse_impossible([step], ())
        self._found(step)  # reading all its inputs may take a long time, so this is done without a lock
        folder, lock = self.folder / step.name, self.folder / f".{step.name}.lock"
        with ExitStack() as held:
            held.enter_context(locked(self.folder / LOCK, fcntl.LOCK_SH | fcntl.LOCK_NB, f"{self.folder}: {_BUSY}"))
            with locked(self.folder / _BEGINNING, fcntl.LOCK_EX, ""):
                status, wanted = self._found(step)
                if status.settled:
                    say(f"{step.name}: {status.why}")
                    return None
                say(f"{step.name}: {step.title}" + ("" if status.state == "new" else f" ({status.why})"))
                self._times = Times(self.folder / TIMES)  # others write it, too
                if not status.resumes:
                    self._refuse_unlike(step, wanted)
                    running = "other shards are still running with the old settings or inputs"
                    others = f"{folder}: {status.why}; {running}; wait for them to end"
                    with locked(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, others):
                        self._make_room(step, say)
                        self._begin(folder, {**wanted, "machine": dict(step.machine())})
                held.enter_context(locked(lock, fcntl.LOCK_SH | fcntl.LOCK_NB, _BUSY))
                self._times.leave_running(step.name)
                self._hashes.keep()
            return step.work(folder)

    def _refuse_unlike(self, step: Step, wanted: Mapping[str, Any]) -> None:
        """Raise DataError if it was started where `auto` is another device: each would discard the other's parts."""
        folder = self.folder / step.name
        begun = read_document(folder / BEGUN)
        if begun is None or (folder / MANIFEST).exists() or why_stale(step, begun, wanted) is not None:
            return
        was, here = (str(machine.get("device")) for machine in (begun.get("machine", {}), step.machine()))
        if was != here and was.startswith(AUTO) and here.startswith(AUTO):
            was, here = was.removeprefix(AUTO), here.removeprefix(AUTO)
            raise DataError(
                f"{folder}: was started where `device: auto` is {was}, here it is {here}, and a job needs one kind of "
                f"device: do all parts where it is {was}, or name the `device` of the step, which then starts over"
            )

    def _found(self, step: Step) -> tuple[StepStatus, dict[str, Any]]:
        """Return a step's status, and what it depends on. Raises DataError if an earlier step is not done."""
        selection, manifests = Selection(step.name, step.name), dict[str, StepManifest | None]()
        before = self.steps[: self.steps.index(step)]
        for earlier in before:
            status, manifests[earlier.name] = self._look(earlier, selection, manifests, False)
            if status.state == "missing":
                place = self.folder / earlier.name
                first = f"parts of `{step.name}` start when all earlier steps are done"
                raise DataError(f"{place}: {status.why}; {first}: `--until {before[-1].name}`, without `--shard`")
        return self._look(step, selection, manifests, True)[0], wanted_of(step, manifests, self._hashes.of)
