"""The engine of pipelines: looks at what is done, does the rest in order, and can be stopped at any moment.

A step is done if its manifest names the present settings, the present content of what it reads, and files that are
there with their checksums. So a change redoes what depends on it and nothing else: a step that is redone and hands on
the same as before leaves those after it as they are.

A part of one step of a pipeline: calls on many machines, in the same folder, each do their share of its shards.

They share the lock of the pipeline, which a call for whole steps holds alone, so one kind waits for the other to end.
They also share one of the step: whoever begins it anew, because it is of other settings or inputs, must be alone in it.
One call begins after the other. None writes the step's manifest: the next call for whole steps merges what is done.

Fingerprints of files that are asked for again and again, remembered as long as the files are untouched.

Folders that are there already: what no pipeline made is left alone, and that is said before anything is done.

All that the result of a step depends on, as its manifest keeps it, and in words why a step is done again.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ziggurat.corpora.pipeline.settings import settings_changed
from ziggurat.corpora.pipeline.step import (
    BEGUN,
    DEAR,
    MANIFEST,
    Selection,
    Spent,
    State,
    Step,
    StepManifest,
    StepState,
    Times,
    outputs_of,
    read_document,
    read_manifest,
    write_document,
)
from ziggurat.data.store_checks import InputWatch
from ziggurat.system.errors import ConfigError, DataError, printable
from ziggurat.system.files import fingerprint, write_atomically
from ziggurat.system.small_files import parse_json, read_bounded
from ziggurat.system.staging import TEMPORARY, discard, held, locked, sweep
from ziggurat.system.terminal import duration
from ziggurat.system.yaml_text import changed, shown

_SETTLED_NS = 2_000_000_000
"""A file touched later than this before it was read may change again within the clock's resolution, unnoticed."""


class Fingerprints:
    """Fingerprints by path; of a file of the same size, inode and times of change it is not computed again.

    No program can set the time of an inode's last change (ctime), so new content is always noticed.

    Args:
        memory: file to remember them in.
    """

    def __init__(self, memory: Path) -> None:
        self._memory = memory
        self._known: dict[str, tuple[list[int], str]] = {}
        try:
            for path, (stamp, digest) in parse_json(read_bounded(memory), str(memory)).items():
                self._known[str(path)] = ([int(number) for number in stamp], str(digest))
        except (OSError, DataError, ValueError, TypeError, AttributeError):
            self._known = {}  # nothing is lost but time
        self._new = False

    def of(self, file: Path) -> str:
        """Return the fingerprint of a file. Raises DataError where it cannot be read."""
        name, stamp = os.path.abspath(file), _stamp(file)
        known = self._known.get(name)
        if known is not None and stamp is not None and known[0] == stamp:
            return known[1]
        digest = fingerprint(file)
        if stamp is not None and stamp == _stamp(file) and time.time_ns() - max(stamp[2:]) > _SETTLED_NS:
            self._known[name] = (stamp, digest)
            self._new = True
        return digest

    def keep(self) -> None:
        """Write what is known, if there is anything new."""
        if self._new:
            write_atomically(self._memory, json.dumps(self._known, indent=0, sort_keys=True).encode() + b"\n")
            self._new = False


def _stamp(file: Path) -> list[int] | None:
    """Return size, inode and times of the last change in nanoseconds; None where there is no such file."""
    try:
        found = os.stat(file)
    except (OSError, ValueError):
        return None
    return [found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns]


_OWN = {".lock", "times.json", "hashes.json", "corpora.yaml"}  # the last is of the demo, whose corpora come first
_SHOWN = 3


def refuse_foreign(folder: Path, steps: Collection[str]) -> None:
    """Raise DataError where a pipeline's folder, or that of one of its steps, holds what no pipeline made."""
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
            f"folder: {folder} holds other things ({shown}): results need a folder of their own, such as "
            f"`folder: {folder / 'pipeline'}`"
        )
    for step in steps:
        place = folder / step
        if os.path.lexists(place) and read_manifest(place) is None and not made_here(place):
            raise DataError(f"{place}: is in the way, and no pipeline made it; move it, or give another `folder`")


def made_here(folder: Path) -> bool:
    """Return whether a pipeline made the folder of a step."""
    if not folder.is_dir() or folder.is_symlink():
        return False
    return (folder / BEGUN).is_file() or all(TEMPORARY.fullmatch(path.name) is not None for path in folder.iterdir())


AUTO = "auto: "
"""Before the device that `auto` is, in `Step.machine`."""
_FORMAT = 1
_CHANGED = "settings changed (there -> now)"


def wanted_of(
    step: Step, manifests: Mapping[str, StepManifest | None], fingerprint: Callable[[Path], str]
) -> dict[str, Any]:
    """Return all that the result of a step depends on but its `machine`; steps that are not done are left out."""
    known = {name: (manifests[name], patterns) for name, patterns in step.after.items()}
    return {
        "format": _FORMAT,
        "step": step.name,
        "version": step.version,
        "settings": dict(step.settings),
        "files": {key: [fingerprint(path) for path in paths] for key, paths in step.files().items()},
        "reads": {name: list(patterns) for name, patterns in step.after.items()},
        "after": {name: found.fingerprint(patterns) for name, (found, patterns) in known.items() if found is not None},
    }


def difference(step: Step, before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return in words why a step is not done by what `before` says; None: it differs in nothing that is known."""
    if before.get("format") != _FORMAT:
        return "done by another version of ziggurat"
    if (version := before.get("version")) != step.version:
        earlier = isinstance(version, int) and version < step.version
        return f"done by {'an earlier' if earlier else 'a later'} version of ziggurat, by which it comes out otherwise"
    if changes := settings_changed(before.get("settings"), step.settings):
        return f"{_CHANGED}: {shown(changes, 3)}"
    reasons = [*_other_steps(before, now), *_other_files(step, before, now)]
    return "; ".join(reasons) if reasons else None


def other_machine(step: Step, before: Mapping[str, Any]) -> str | None:
    """Return in words why what was begun cannot be gone on with although its result would be the same."""
    was, here = before.get("machine"), dict(step.machine())
    changes = changed(was, here)
    return f"{_CHANGED}, and it was not finished: {shown(changes, 3)}" if changes else None


def _other_steps(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what differs in the steps that are read and in what they handed on."""
    reads, read, handed = now["reads"], before.get("reads", {}), before.get("after", {})
    new = " and ".join(name for name in reads if name not in read)
    gone = " and ".join(name for name in read if name not in reads)
    reasons = []
    if new:
        reasons.append(f"now reads {new}" + (f" in place of {gone}" if gone else ""))
    elif gone:
        reasons.append(f"no longer reads {gone}")
    both = [name for name in reads if name in read]
    if others := [name for name in both if reads[name] != read[name]]:
        reasons.append(f"reads other files of {' and '.join(others)}")
    same = [name for name in both if name not in others and name in now["after"]]
    if others := [name for name in same if now["after"][name] != handed.get(name)]:
        reasons.append(f"{' and '.join(others)} handed on something else")
    return reasons


def _other_files(step: Step, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the first that differs in the files from outside."""
    was, found = before.get("files", {}), now["files"]
    for key, paths in step.files().items():
        if len(old := was.get(key, [])) != len(paths):
            return [f"{key}: {len(old)} input files before, {len(paths)} now"]
        if other := [path for path, *digests in zip(paths, old, found[key], strict=True) if len(set(digests)) > 1]:
            return [f"{other[0]} changed"]
    return [f"{key}: {len(was[key])} input files before, 0 now" for key in was if key not in found][:1]


_HASHES, TIMES, LOCK = "hashes.json", "times.json", ".lock"
_EARLIER = "earlier"
"""Where results go whose step is done anew, if that step took long."""
BUSY = "another pipeline, or a part of a step, is at work here; wait for it to end"


@dataclass(frozen=True)
class PipelineEnd:
    """The end of a call.

    Attributes:
        done: names of the steps that were done, in order.
        stopped: the step at which a signal stopped it; None: it reached its end.
        signal: number of that signal.
    """

    done: tuple[str, ...]
    stopped: str | None = None
    signal: int | None = None


class Pipeline:
    """Steps in their order, and the folder of their results.

    Args:
        folder: the folder.
        steps: each after those that it depends on.
    """

    def __init__(self, folder: Path, steps: Sequence[Step]) -> None:
        names = [step.name for step in steps]
        assert len(set(names)) == len(names)
        assert all(other in names[: names.index(step.name)] for step in steps for other in step.after), "order"
        self.folder = folder
        self.steps = tuple(steps)
        self.begun: list[str] = []
        """Names of the steps that `run` began anew, in order."""
        self._hashes = Fingerprints(folder / _HASHES)
        self._times = Times(folder / TIMES)

    def times(self) -> dict[str, Spent]:
        """Return the time spent on each step."""
        return {step.name: self._times.of(step.name) for step in self.steps}

    def left_over(self) -> list[str]:
        """Return the names of folders of steps that the pipeline no longer has."""
        names = {step.name for step in self.steps}
        found = self.folder.glob(f"*/{BEGUN}") if self.folder.is_dir() else []
        return sorted(path.parent.name for path in found if path.parent.name not in names)

    def standings(self, selection: Selection | None = None) -> list[StepState]:
        """Return what a call would do with each step up to the last chosen one; nothing is written.

        Raises ConfigError for an unknown step, DataError for files that are missing, and what steps refuse.
        """
        selection = selection or Selection()
        chosen = selection.numbers(self.steps)
        refuse_foreign(self.folder, [step.name for step in self.steps])
        self._refuse_impossible(self.steps[chosen.start : chosen.stop], selection.forced)
        manifests: dict[str, StepManifest | None] = {}
        found, busy = [], held(self.folder / LOCK)
        for step in self.steps[: chosen.stop]:
            standing, manifests[step.name] = self._look(step, selection, manifests, self.steps.index(step) in chosen)
            if busy and standing.spent.running is not None and not standing.finished:
                same = standing.state == "begun"
                why = "is running" if same else f"is running as another call wants it; this one: {standing.why}"
                standing = replace(standing, state="running" if same else standing.state, why=why)
            found.append(standing)
        return found

    def run(self, selection: Selection | None = None, say: Callable[[str], object] = lambda text: None) -> PipelineEnd:
        """Do what is to be done of the chosen steps, in order; what was interrupted goes on.

        Args:
            selection: None: all steps.
            say: takes messages.

        Raises ConfigError for an unknown step. DataError: another process is at work in the folder, files are missing,
            something of others is in a step's place. And what the steps raise; what is done then stays done.
        """
        selection = selection or Selection()
        chosen = selection.numbers(self.steps)
        refuse_foreign(self.folder, [step.name for step in self.steps])  # before it gets a file of ours
        self.folder.mkdir(parents=True, exist_ok=True)
        done: list[str] = []
        with locked(self.folder / LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB, f"{self.folder}: {BUSY}"):
            sweep(self.folder)
            self._refuse_impossible(self.steps[chosen.start : chosen.stop], selection.forced)
            manifests: dict[str, StepManifest | None] = {}
            for number, step in enumerate(self.steps[: chosen.stop]):
                standing, manifests[step.name] = self._look(step, selection, manifests, number in chosen)
                place = f"{number + 1}/{chosen.stop} {step.name}"
                if standing.state == "missing":
                    raise DataError(f"{self.folder / step.name}: {standing.why}; leave out `--from` or `--only`")
                if standing.settled:
                    say(f"{place}: {standing.why}")
                    continue
                say(f"{place}: {step.title}" + ("" if standing.state == "new" else f" ({standing.why})"))
                if not standing.goes_on:
                    self._make_room(step, say)
                    self.begun.append(step.name)
                watch = InputWatch(self._hashes.of)
                wanted = wanted_of(step, manifests, watch.fingerprint)
                stopped = self._do(step, wanted, watch, say, begun=standing.goes_on)
                if stopped is not None:
                    return PipelineEnd(tuple(done), step.name, stopped)
                manifests[step.name] = read_manifest(self.folder / step.name)
                say(f"{place}: done in {duration(self._times.of(step.name).seconds)}")
                done.append(step.name)
                self._hashes.keep()
            self._hashes.keep()
        return PipelineEnd(tuple(done))

    def _refuse_impossible(self, steps: Sequence[Step], forced: Collection[str]) -> None:
        """Raise what steps would end with, as far as that is known: now, not after hours."""
        for step in steps:
            step.files()
        for step in steps:
            known = read_manifest(self.folder / step.name)
            as_it_was = known is not None and not settings_changed(known.wanted.get("settings"), step.settings)
            if not as_it_was or step.name in forced:
                step.check()

    def _look(
        self, step: Step, selection: Selection, manifests: dict[str, StepManifest | None], chosen: bool
    ) -> tuple[StepState, StepManifest | None]:
        """Return how a step stands, and its manifest where it is done; `manifests` are those of the steps before it."""
        folder = self.folder / step.name
        manifest = read_manifest(folder)

        def standing(state: State, why: str) -> tuple[StepState, StepManifest | None]:
            so_far = partial(self._times.so_far, step.name, folder)
            spent = replace(self._times.of(step.name), seconds=so_far())
            found = StepState(step, state, why, spent, manifest is not None, so_far)
            return found, manifest if found.settled else None

        if not chosen:
            if manifest is None or (damage := self._damage(folder, manifest)) is not None:
                return standing("missing", "not done yet" if manifest is None else str(damage))
            return standing("kept", "taken as it stands")
        waiting = [name for name in step.after if manifests[name] is None]
        wanted = wanted_of(step, manifests, self._hashes.of)
        if step.name in selection.forced:
            return standing("forced", "to be done again")
        if manifest is None:
            begun = read_document(folder / BEGUN)
            if begun is None:
                return standing("new", "not done yet")
            if (why := difference(step, begun, wanted) or other_machine(step, begun)) is not None:
                return standing("changed", why)
            if waiting:
                return standing("after", f"was begun, and depends on what {' and '.join(waiting)} will hand on")
            return standing("begun", "goes on where it was interrupted")
        if (why := difference(step, manifest.wanted, wanted)) is not None:
            return standing("changed", why)
        if waiting:
            return standing("after", f"depends on what {' and '.join(waiting)} will hand on")
        if (damage := self._damage(folder, manifest)) is not None:
            return standing("damaged", damage)
        if gone := [folder / page for page in step.pages if not (folder / page).is_file()]:
            return standing("page", f"{gone[0]} is gone: it is made again")
        if (why := step.stale()) is not None:
            return standing("page", why)
        return standing("done", "up to date")

    def _damage(self, folder: Path, manifest: StepManifest) -> str | None:
        """Return which of its outputs is not what the manifest says; None: all are."""
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

        Raises DataError, and nothing of the step stays, where a file from outside is not what `watch` saw.
        """
        folder, wanted = self.folder / step.name, {**wanted, "machine": dict(step.machine())}
        if not begun:
            self._times.restart(step.name)
            folder.mkdir()
            write_document(folder / BEGUN, wanted)
        with self._times.measuring(step.name, folder):
            stopped = step.work(folder)
            if stopped is not None:
                return stopped
            try:
                watch.check("the same command does the step again")
            except DataError:
                self._make_room(step, say)  # it is of no known text: nothing may be gone on with
                raise
            outputs = outputs_of(step, folder, self._hashes.of)
            write_document(folder / MANIFEST, StepManifest(wanted, outputs).document())
        return None

    def _make_room(self, step: Step, say: Callable[[str], object]) -> None:
        """Remove what an earlier call left of a step, or set it aside if it took long.

        Raises DataError for anything else that is in its place.
        """
        folder = self.folder / step.name
        if not os.path.lexists(folder):
            return
        if not made_here(folder):
            raise DataError(f"{folder}: is in the way, and no pipeline made it; move it, or give another `folder`")
        if (seconds := self._times.so_far(step.name, folder)) < DEAR:
            discard(folder)
            return
        aside = self.folder / _EARLIER
        aside.mkdir(exist_ok=True)
        number = next(n for n in itertools.count(1) if not os.path.lexists(aside / f"{step.name}-{n}"))
        kept = folder.rename(aside / f"{step.name}-{number}")
        say(f"{step.name}: what is there took {duration(seconds)}; it is kept in {kept}")


_BEGINNING = ".parts.lock"


def shared_step(steps: Sequence[Step], name: str | None) -> Step:
    """Return the step of which parts are to be done. Raises ConfigError unless it is a job."""
    shared = ", ".join(step.name for step in steps if step.is_job)
    shared = (
        f"those that can be done in parts are: {shared}" if shared else "none of this pipeline can be done in parts"
    )
    if name is None:
        raise ConfigError(f"`--shard` is of one step: add `--only STEP`; {shared}")
    found = next((step for step in steps if step.name == name), None)
    if found is None or not found.is_job:
        what = "no such step" if found is None else "this step is done as a whole"
        raise ConfigError(f"`--only {printable(name)}` with `--shard`: {what}; {shared}")
    return found


class StepParts(Pipeline):
    """A pipeline of which parts of a step are done."""

    def run_part(self, step: Step, say: Callable[[str], object] = lambda text: None) -> int | None:
        """Do this call's part of a step, which its `work` knows; return the number of the signal that stopped it.

        Raises DataError: a step before it is not done, a call for whole steps is at work in the folder, parts of other
            settings or inputs are at work on the step. And what the step raises; what is done then stays done.
        """
        refuse_foreign(self.folder, [each.name for each in self.steps])
        self._refuse_impossible([step], ())
        self._found(step)  # it may take long to read all that it depends on: not with a lock that others wait for
        folder, lock = self.folder / step.name, self.folder / f".{step.name}.lock"
        with ExitStack() as held:
            held.enter_context(locked(self.folder / LOCK, fcntl.LOCK_SH | fcntl.LOCK_NB, f"{self.folder}: {BUSY}"))
            with locked(self.folder / _BEGINNING, fcntl.LOCK_EX, ""):
                standing, wanted = self._found(step)
                if standing.settled:
                    say(f"{step.name}: {standing.why}")
                    return None
                say(f"{step.name}: {step.title}" + ("" if standing.state == "new" else f" ({standing.why})"))
                self._times = Times(self.folder / TIMES)  # others write it, too
                if not standing.goes_on:
                    self._refuse_unlike(step, wanted)
                    others = f"{folder}: {standing.why}; but parts are at work there as it was: wait for them to end"
                    with locked(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, others):
                        self._make_room(step, say)
                        self._times.restart(step.name)
                        folder.mkdir()
                        write_document(folder / BEGUN, {**wanted, "machine": dict(step.machine())})
                held.enter_context(locked(lock, fcntl.LOCK_SH | fcntl.LOCK_NB, BUSY))
                self._times.leave_running(step.name)
                self._hashes.keep()
            return step.work(folder)

    def _refuse_unlike(self, step: Step, wanted: Mapping[str, Any]) -> None:
        """Raise DataError where it was begun by another device of `auto`: each kind would discard the other's parts."""
        folder = self.folder / step.name
        begun = read_document(folder / BEGUN)
        if begun is None or (folder / MANIFEST).exists() or difference(step, begun, wanted) is not None:
            return
        was, here = (str(machine.get("device")) for machine in (begun.get("machine", {}), step.machine()))
        if was != here and was.startswith(AUTO) and here.startswith(AUTO):
            was, here = was.removeprefix(AUTO), here.removeprefix(AUTO)
            raise DataError(
                f"{folder}: was begun where `device: auto` is {was}, here it is {here}, and a job is done by one kind: "
                f"do all parts where it is {was}, or name the `device` in the step's section, and it begins anew"
            )

    def _found(self, step: Step) -> tuple[StepState, dict[str, Any]]:
        """Return how a step stands, and what it depends on. Raises DataError where one before it is not done."""
        selection, manifests = Selection(step.name, step.name), dict[str, StepManifest | None]()
        for earlier in self.steps[: self.steps.index(step)]:
            standing, manifests[earlier.name] = self._look(earlier, selection, manifests, False)
            if standing.state == "missing":
                place = self.folder / earlier.name
                first = f"parts of `{step.name}` begin when all steps before it are done"
                raise DataError(f"{place}: {standing.why}; {first}: `--until {self._before(step)}`, without `--shard`")
        return self._look(step, selection, manifests, True)[0], wanted_of(step, manifests, self._hashes.of)

    def _before(self, step: Step) -> str:
        return self.steps[self.steps.index(step) - 1].name
