"""Verbs killed, or hit by an error, at a file operation: repeating the command gives the undisturbed result.

Trying every operation of every verb is slow; the default suite tries a few. For every error that an operation can
raise: `python -m experiments.faults operations`.
"""

from __future__ import annotations

import errno
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.faults.ground import Ground
from tests.faults.operations import Fault, Operation
from tests.faults.trials import Bench, Outcome, chosen, faults_of
from tests.faults.verbs import EXPORTS, VERBS, Verb

SAMPLED = ("prepare-force", "train", "average-out", "translate-replacing")
WHOLE = {**VERBS, **EXPORTS}


def disturbed(bench: Bench, faults: list[Fault]) -> dict[Fault, Outcome]:
    """Disturb a verb in each of these ways; return those that it did not survive."""
    outcomes = {fault: bench.kill(fault) if fault.error is None else bench.fail(fault) for fault in faults}
    assert outcomes
    return {fault: outcome for fault, outcome in outcomes.items() if outcome.verdict != "survived"}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLED)
def test_some_operations_killed_and_failed(name: str, ground: Ground, place: Path) -> None:
    bench = Bench(VERBS[name], ground, place / "work")
    faults = chosen(faults_of(bench.operations, errors=False), 2, name)
    faults += chosen(faults_of(bench.operations, errors=True, brief=True), 3, name)[1:2]
    assert disturbed(bench, faults) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_every_operation_killed(name: str, ground: Ground, place: Path) -> None:
    bench = Bench(WHOLE[name], ground, place / "work")
    assert disturbed(bench, faults_of(bench.operations, errors=False)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_every_operation_failed(name: str, ground: Ground, place: Path) -> None:
    bench = Bench(WHOLE[name], ground, place / "work")
    assert disturbed(bench, faults_of(bench.operations, errors=True, brief=True)) == {}


def test_every_verb_that_writes_is_disturbed() -> None:
    from ziggurat.cli.app import app

    known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    # These only print or answer; `serve --new-key` writes random keys (tests/serve). `pipeline` consists of the others,
    # and is killed in tests/corpora/pipeline.
    reading = {"recipes", "explain", "serve", "pipeline"}
    assert {word for verb in WHOLE.values() for word in verb.arguments if word in known} == known - reading


def write_in_place() -> None:
    """Write every file in place, as none of our code does."""
    import contextlib
    from collections.abc import Iterator

    from ziggurat.cli import output
    from ziggurat.system import files

    @contextlib.contextmanager
    def in_place(path: Path, *_: Any, **__: Any) -> Iterator[Any]:
        with open(path, "wb") as file:
            yield file

    files.atomic_file = in_place  # type: ignore[assignment]
    output.atomic_file = in_place  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_file_written_in_place_is_detected(ground: Ground, place: Path) -> None:
    sound = VERBS["translate-replacing"]
    careless = Verb(
        sound.arguments,
        ground=sound.ground,
        before=sound.before,
        preload=sound.preload,
        prepare="tests.faults.test_disturbed_verbs:write_in_place",
    )
    bench = Bench(careless, ground, place / "work")
    writing = [one.kind for one in bench.operations if one.kind != "read"]
    assert "rename" not in writing
    number = writing.index("write") + 1
    assert bench.kill(Fault(number)).verdict == "half"
    assert bench.fail(Fault(number, errno.ENOSPC)).verdict in ("half", "unnamed")


@pytest.mark.slow
def test_operations_are_seen_where_they_happen(ground: Ground, place: Path) -> None:
    """A file written atomically: created, written, given its mode, synced and renamed, in this order."""
    bench = Bench(VERBS["translate-replacing"], ground, place / "work")
    writing = [one for one in bench.operations if one.kind != "read"]
    assert [one.kind for one in writing if one.kind != "flock"] == ["open", "write", "chmod", "fsync", "rename"]
    assert Operation("rename", str(place / "work" / "out")) in writing
    # Not the first rename: repairing a run's links may fail, and the verb continues.
    weights = str(place / "work" / "run" / "averaged" / "model.safetensors")
    fault = Fault([one.path for one in bench.operations].index(weights) + 1, errno.EIO, reads=True)
    ended = ground.nursery.run(bench.verb.arguments, place / "work", preload=bench.verb.preload, fault=fault)
    assert ended.status == 2
    killed = ground.nursery.run(bench.verb.arguments, place / "work", preload=bench.verb.preload, fault=Fault(1))
    assert killed.status == -signal.SIGKILL
