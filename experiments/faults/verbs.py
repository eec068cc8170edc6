"""Every file operation of every verb that writes, killed once and made to fail once with each possible error."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from experiments.faults.ledger import Ledger
from tests.faults.ground import Ground
from tests.faults.nursery import Nursery
from tests.faults.operations import Fault, Operation
from tests.faults.trials import Bench, faults_of
from tests.faults.verbs import EXPORTS, VERBS


def disturb_verbs(
    ledger: Ledger, folder: Path, names: Sequence[str], *, errors: bool, brief: bool, every: int = 1
) -> None:
    """Kill each of the named verbs at every operation that writes; with `errors`, make every operation fail.

    With `brief`, each operation gets one of its possible errors, in turn, instead of all. Only one fault in `every` is
    tried.
    """
    verbs, folder = {**VERBS, **EXPORTS}, folder / ("failed" if errors else "killed")
    with Nursery(folder / "scratch") as nursery:
        ground = Ground(folder / "ground", nursery)
        for name in names or [*verbs]:
            bench = Bench(verbs[name], ground, folder / "work")
            attack = f"{'error' if errors else 'SIGKILL'} at each file operation: {verbs[name].arguments[0]}"
            attack += f" (one of {every})" if every > 1 else ""
            writing = [one for one in bench.operations if one.kind != "read"]
            wrong = tried = 0
            for fault in faults_of(bench.operations, errors=errors, brief=brief)[::every]:
                operation = (bench.operations if fault.reads else writing)[fault.number - 1]
                key = f"{name} {_called(fault)}"
                if ledger.has(attack, key):
                    continue
                found = bench.fail(fault) if errors else bench.kill(fault)
                said = "" if found.verdict == "survived" else f"{_shown(operation, folder)}: {found.detail}"
                ledger.add(attack, key, found.verdict, said)
                tried, wrong = tried + 1, wrong + (found.verdict != "survived")
                if found.verdict != "survived":
                    print(f"{key}: {found.verdict}: {said}", flush=True)
            print(
                f"{name}: {len(bench.operations)} operations, {tried} disturbed now, {wrong} not survived", flush=True
            )


def _called(fault: Fault) -> str:
    error = "SIGKILL" if fault.error is None else errno.errorcode[fault.error]
    return f"{fault.number} {error}{' from then on' if fault.lasting else ''}"


def _shown(operation: Operation, folder: Path) -> str:
    return f"{operation.kind} {os.path.relpath(operation.path, folder / 'work')}"
