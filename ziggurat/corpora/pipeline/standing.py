"""How a step stands: what is to be done with it and why, and what that will take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from ziggurat.corpora.pipeline.step import Done, Expected, Step
from ziggurat.corpora.pipeline.times import Spent
from ziggurat.system.duration import duration

DEAR = 600.0
"""Seconds of work from which a step's results are set aside when it is done anew: a changed setting is often a slip."""

State = Literal["done", "begun", "running", "page", "new", "changed", "damaged", "forced", "after", "kept", "missing"]


@dataclass(frozen=True)
class StepState:
    """What is to be done with a step, and why.

    Attributes:
        step: the step.
        state: `done`; `kept`: taken as it stands; `begun`: goes on where it was interrupted; `running`: another call is
            at work on it; `page`: done, but a page is gone or does not hold any more, and is made again; `new`,
            `changed`, `damaged`, `forced`: done from its beginning; `after`: depends on what an earlier one will hand
            on; `missing`: to be taken as it stands, but not done.
        why: the reason, in words.
        spent: the time spent on it.
        finished: whether a result of it is there, be it of other settings.
        spent_by_now: reads the seconds spent on it again, which another call may be adding to; None: as in `spent`.
    """

    step: Step
    state: State
    why: str
    spent: Spent
    finished: bool = False
    spent_by_now: Callable[[], float] | None = None

    @property
    def settled(self) -> bool:
        """True where nothing is to be done."""
        return self.state in ("done", "kept")

    @property
    def goes_on(self) -> bool:
        """True where what is there stays, and is gone on with."""
        return self.state in ("begun", "page")

    @property
    def told(self) -> str:
        """The reason, and what becomes of the work so far where a step begins anew."""
        if self.state not in ("changed", "damaged", "forced") or self.spent.seconds < 1:
            return self.why
        goes = "moves to `earlier`" if self.spent.seconds >= DEAR else "is discarded"
        return f"{self.why}; it begins anew, what took {duration(self.spent.seconds)} {goes}"

    def expected(self) -> Expected:
        """Return what the rest of it will take: by its estimate, by what is done of it, or by the last time."""
        if self.state in ("begun", "running"):
            # Of one moment, and first: another call may be at work, and costs take minutes to measure.
            spent = self.spent.seconds if self.spent_by_now is None else self.spent_by_now()
            done = self.step.done()
            return _rest(self.step.cost(), done, spent)
        cost = self.step.cost()
        if cost.seconds is None and self.finished and self.spent.calls:
            said = "at most what all of it took" if self.state == "page" else "what it took before"
            return replace(cost, seconds=self.spent.seconds, said=f"{cost.said}; {said}" if cost.said else said)
        return cost


def _rest(cost: Expected, done: Done | None, spent: float) -> Expected:
    """Return what is left of a step that was begun, on which so many seconds were spent."""
    if done is None or not done.share:
        said = f"all of it, on which {duration(spent)} were spent already"
        return replace(cost, said=f"{cost.said}; {said}" if cost.said else said)
    rest, said = 1 - done.share, f"{done.said} are done"
    spent = spent if done.seconds is None else done.seconds
    if spent:
        seconds: float | None = spent * rest / done.share
        return replace(cost, seconds=seconds, said=f"{said}, in {duration(spent)}; the rest at that speed")
    seconds = None if cost.seconds is None else cost.seconds * rest
    return replace(cost, seconds=seconds, said=said)
