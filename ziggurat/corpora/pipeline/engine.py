"""The engine of pipelines: looks at what is done, does the rest in order, and can be stopped at any moment.

A step is done if its manifest names the present settings, the present content of what it reads, and files that are
there with their checksums. So a change redoes what depends on it and nothing else: a step that is redone and hands on
the same as before leaves those after it as they are.
"""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ziggurat.corpora.pipeline.folders import made_here, refuse_foreign
from ziggurat.corpora.pipeline.hashes import Fingerprints
from ziggurat.corpora.pipeline.reasons import difference, other_machine, wanted_of
from ziggurat.corpora.pipeline.settings import settings_changed
from ziggurat.corpora.pipeline.standing import DEAR, State, StepState
from ziggurat.corpora.pipeline.step import (
    BEGUN,
    MANIFEST,
    Selection,
    Step,
    StepManifest,
    outputs_of,
    read_document,
    read_manifest,
    write_document,
)
from ziggurat.corpora.pipeline.times import Spent, Times
from ziggurat.data.store_checks import InputWatch
from ziggurat.system.duration import duration
from ziggurat.system.errors import DataError
from ziggurat.system.temporary import held, locked
from ziggurat.system.workspace import discard, sweep

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
