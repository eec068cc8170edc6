"""A part of one step of a pipeline: calls on many machines, in the same folder, each do their share of its shards.

They share the lock of the pipeline, which a call for whole steps holds alone, so one kind waits for the other to end.
They also share one of the step: whoever begins it anew, because it is of other settings or inputs, must be alone in it.
One call begins after the other. None writes the step's manifest: the next call for whole steps merges what is done.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from ziggurat.corpora.pipeline.engine import BUSY, LOCK, TIMES, Pipeline
from ziggurat.corpora.pipeline.folders import refuse_foreign
from ziggurat.corpora.pipeline.reasons import AUTO, difference, wanted_of
from ziggurat.corpora.pipeline.standing import StepState
from ziggurat.corpora.pipeline.step import BEGUN, MANIFEST, Selection, Step, StepManifest, read_document, write_document
from ziggurat.corpora.pipeline.times import Times
from ziggurat.system.errors import ConfigError, DataError, printable
from ziggurat.system.temporary import locked

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
