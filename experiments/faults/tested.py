"""Attacks that are tests in the suite or separate programs: run, and counted case by case."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

from experiments.faults.ledger import Ledger
from tests.faults.fuzzing import FAULTS, Outcome, fuzz, starve
from tests.faults.readers import READERS

_ROOT = Path(__file__).resolve().parents[2]

TESTS: dict[str, tuple[str, ...]] = {
    "hostile corpora through prepare": ("tests/data/test_hostile.py",),
    "hostile YAML": ("tests/test_hostile_files.py::test_yaml_made_to_hurt_is_refused", "tests/config/test_bounds.py"),
    "bombs, pipes, nesting, a stranger's folder": (
        "tests/test_hostile_files.py",
        "tests/exchange/test_hostile_imports.py",
    ),
    "pickle payloads in fairseq .pt": ("tests/exchange/test_import.py::test_a_checkpoint_runs_no_code",),
    "report in headless Chromium": ("tests/inspect/test_browser.py",),
}
"""TESTS maps an attack to tests, each case of which is one disturbance; missing files are left out."""


def run_tests(ledger: Ledger, folder: Path) -> None:
    """Run the tests of every attack, including slow ones."""
    counted = {record["key"] for record in ledger.records}
    for attack, names in TESTS.items():
        there = [name for name in names if (_ROOT / name.partition("::")[0]).exists()]
        results = folder / "results.xml"
        command = [sys.executable, "-m", "pytest", "-m", "slow or not slow", f"--junit-xml={results}", *there]
        if not there or subprocess.run(command, cwd=_ROOT, capture_output=True).returncode not in (0, 1):
            print(f"{attack}: not tried: no such tests", flush=True)
            continue
        for case in ElementTree.parse(results).getroot().iter("testcase"):
            key = f"{case.get('classname')}.{case.get('name')}"
            if (skipped := case.find("skipped")) is not None:
                print(f"{key}: not tried: {skipped.get('message')}", flush=True)
            elif key not in counted:  # some attacks are also part of others
                counted.add(key)
                failed = next((case.find(kind) for kind in ("failure", "error") if case.find(kind) is not None), None)
                detail = "" if failed is None else str(failed.get("message"))[:300]
                ledger.add(attack, key, "survived" if failed is None else "failed", detail)


def flip_bits(ledger: Ledger, folder: Path, per_file: int) -> None:
    """Damage every file in stores, checkpoints, models and exports; kinds of folders already counted are left out."""
    from experiments.faults.flips import campaign, subjects

    folder.mkdir(parents=True, exist_ok=True)
    for subject in subjects(folder):
        attack = f"damage: {subject.kind}"
        if ledger.tried(attack):
            continue
        count = campaign([subject], per_file=per_file)[subject.kind]
        wrong = {"silent": count.silent, "unnamed": count.unnamed, "internal": count.internal, "crashed": count.crashed}
        ledger.add(attack, "refused or without effect", "survived", tried=count.refused + count.harmless)
        for verdict, several in wrong.items():
            for number, said in enumerate(several):
                ledger.add(attack, f"{verdict} {number}", verdict, said)
        print(f"{subject.kind}: {count.tried} damages, {len(count.failures)} not survived", flush=True)


def fuzz_readers(ledger: Ledger, folder: Path, count: int) -> None:
    """Give readers damaged files of every kind, and too little memory, in steps of 4 MiB.

    Readers already counted are left out. If damage turns a file without a checksum into another valid file, which no
    reader can notice, that counts as survived.
    """
    for name in READERS:
        attack = f"damaged files read: {name}"
        if not ledger.tried(attack):
            _count(ledger, attack, fuzz(folder, [(name, seed) for seed in range(1, count + 1)]))
        attack = f"too little memory: {name}"
        if not ledger.tried(attack):
            _count(ledger, attack, starve(folder, [name], 4 << 20))


def _count(ledger: Ledger, attack: str, outcomes: Iterable[Outcome]) -> None:
    """Record the outcome of an attack once all of it is known, so that half an attack is tried again."""
    found = list(outcomes)
    wrong = [outcome for outcome in found if outcome.kind in FAULTS]
    for outcome in wrong:
        ledger.add(attack, f"seed {outcome.seed}", outcome.kind, f"{outcome.file}: {outcome.damage}: {outcome.said}")
    ledger.add(attack, "others", "survived", tried=len(found) - len(wrong))
    print(f"{attack}: {len(found)} cases, {len(wrong)} not survived", flush=True)
