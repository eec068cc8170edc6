"""The program killed at random moments, with all its workers: what it ends with is that of an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.pipeline.conftest import whole, write_data
from ziggurat.pipeline.step import MANIFEST

KILLS = 30


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Start the program in a folder, as the leader of a group of processes."""
    command = [sys.executable, "-m", "ziggurat", "pipeline", "my.yaml"]
    root = str(Path(__file__).resolve().parents[2])
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            command,
            cwd=folder,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        )


def handed_on(folder: Path) -> dict[str, object]:
    """The manifests of all steps, which have the checksums of all that they hand on."""
    return {path.parent.name: json.loads(path.read_bytes()) for path in sorted(folder.glob(f"w/*/{MANIFEST}"))}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_at_random_moments(number: signal.Signals, tmp_path: Path) -> None:
    generator = random.Random(int(number))
    content = whole()
    # A run goes on with the batches that were found to fit when it began.
    content["student"]["training"] |= {"batch": {"fit": True, "fit_limit": 512, "fit_margin": 0.0}}
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
        write_data(tmp_path / name)
        (tmp_path / name / "my.yaml").write_text(yaml.safe_dump(content))
    began, undisturbed = time.monotonic(), start(tmp_path / "whole")
    assert undisturbed.wait(3600) == 0, (tmp_path / "whole" / "log").read_text()
    killed, longest = 0, (time.monotonic() - began) / 8  # a fast machine ends sooner
    while True:
        process = start(tmp_path / "cut")
        try:
            status = process.wait(generator.uniform(0.5, longest) if killed < KILLS else 3600)
        except subprocess.TimeoutExpired:
            # Ctrl-C reaches the group, SIGTERM the program alone, which ends its workers.
            (os.killpg if number == signal.SIGKILL else os.kill)(process.pid, number)
            status = process.wait(60)
            killed += 1
            longest *= 1.05  # or, on a busy machine, a long step would never end
            assert status in (-number, 128 + number)
            continue
        assert status == 0, (tmp_path / "cut" / "log").read_text()[-3000:]
        break
    assert killed > 10
    found = handed_on(tmp_path / "cut")
    assert found == handed_on(tmp_path / "whole")
    assert len(found) == len(list((tmp_path / "whole" / "w").glob("*/begun.json")))
