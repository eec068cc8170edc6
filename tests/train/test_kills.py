"""Fifty SIGKILLs, then SIGTERMs, at recorded moments of live `ziggurat train` processes, lose not a bit."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.cli.conftest import tiny_config
from tests.conftest import forkserver
from tests.train.runs import final_bytes, same_records
from ziggurat.cli import main
from ziggurat.model.run_folder import checkpoint_folders

UPDATES = 30
SEEDS = {signal.SIGKILL: range(50), signal.SIGTERM: range(100, 120)}
"""SEEDS give the moments of signals as shares of the time that the latest uninterrupted run took."""


def _ziggurat(arguments: list[str], output: str) -> None:
    """Act as `ziggurat` with these arguments, with output to a file."""
    with Path(output).open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    main(arguments)


def lived(seconds: float | None, config: Path, run: Path, number: int = signal.SIGKILL) -> int | None:
    """Start or resume the run in a separate process; return its exit status, or None if the signal ended it."""
    context = forkserver()
    begun = (run / "checkpoints").is_dir()
    arguments = ["train", "--run", str(run), *(["--resume"] if begun else [str(config)])]
    child = context.Process(target=_ziggurat, args=(arguments, f"{run}.txt"))
    child.start()
    child.join(seconds)
    killed = child.is_alive()
    if killed and child.pid is not None:
        os.kill(child.pid, number)
    child.join(60)
    assert child.exitcode is not None, "the signal was not heeded"
    # Before and after training, SIGTERM ends the process like any other; in between, `train` exits by itself.
    return None if killed and child.exitcode in (-number, 128 + number) else child.exitcode


@pytest.mark.slow
@pytest.mark.parametrize("number", SEEDS, ids=lambda number: number.name)
def test_kills_of_runs_that_write_their_checkpoints_asynchronously(
    number: signal.Signals, tiny_folder: Path, tmp_path: Path
) -> None:
    """One run is killed repeatedly until it is done, then the next one, and all are compared with an undisturbed
    one.
    """
    settings = {
        "threads": 1,
        "stop": {"updates": UPDATES},
        "checkpoint": {"every_updates": 1, "keep_last": 2, "asynchronous": True},
        "validation": {"every_updates": 9, "max_sentences": 2},
        "batch": {"max_tokens": 150, "accumulate": 2},
    }
    config = tiny_config(tmp_path, tiny_folder, **settings)
    assert lived(None, config, tmp_path / "warm") == 0  # starts the fork server, which takes seconds
    began = time.perf_counter()
    assert lived(None, config, tmp_path / "whole") == 0
    length = time.perf_counter() - began
    expected = final_bytes(tmp_path / "whole", UPDATES)
    seeds, killed, count = list(SEEDS[number]), 0, 0
    while seeds:
        count += 1
        assert count <= 4 * len(SEEDS[number]), "runs end before they are killed"
        run, status = tmp_path / f"run-{count}", None
        while status is None:
            moment = random.Random(seeds[0]).uniform(0.0, 0.9) * length if seeds else None
            fresh, began = not (run / "checkpoints").is_dir(), time.perf_counter()
            status = lived(moment, config, run, number)
            if status is None:
                seeds, killed = seeds[1:], killed + 1
            elif fresh:  # the machine has become faster
                length = time.perf_counter() - began
        messages = Path(f"{run}.txt").read_text()
        assert status == 0, messages
        assert "DAMAGED" not in messages, "a kill leaves no damaged checkpoint, only whole ones"
        assert final_bytes(run, UPDATES) == expected, f"run {count}, after {killed} kills"
        same_records(tmp_path / "whole", run)
        assert [f.name for f in checkpoint_folders(run)] == [f.name for f in checkpoint_folders(tmp_path / "whole")]
        assert not list((run / "checkpoints").glob(".*"))
    assert killed == len(SEEDS[number])
