"""The program killed at random moments, with all its workers: the result equals that of an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.corpora.pipeline.conftest import whole, write_data
from ziggurat.corpora.pipeline.step import MANIFEST

KILLS = 30


def start(folder: Path, *options: str, bulk: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    """Start the program in a folder as the leader of a process group; `bulk` are options of the verb."""
    before = ["bulk", *bulk] if bulk else []
    command = [sys.executable, "-m", "ziggurat", *before, "pipeline", "my.yaml", *options]
    root = str(Path(__file__).resolve().parents[3])
    places = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            command,
            cwd=folder,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"},
        )


def handed_on(folder: Path) -> dict[str, object]:
    """The manifests of all steps, with the checksums of all their outputs."""
    return {path.parent.name: json.loads(path.read_bytes()) for path in sorted(folder.glob(f"w/*/{MANIFEST}"))}


def kill(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """End the program, unless it has just ended. Ctrl-C reaches the whole group, SIGTERM only the program."""
    (os.killpg if number == signal.SIGKILL else os.kill)(process.pid, number)
    assert process.wait(60) in (0, -number, 128 + number)


def prepared(tmp_path: Path, content: dict[str, Any]) -> dict[str, object]:
    """Write folders `whole` and `cut` with the corpora and the file; return the undisturbed pipeline's outputs."""
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
        write_data(tmp_path / name)
        (tmp_path / name / "my.yaml").write_text(yaml.safe_dump(content))
    assert start(tmp_path / "whole").wait(3600) == 0, (tmp_path / "whole" / "log").read_text()
    found = handed_on(tmp_path / "whole")
    assert len(found) == len(list((tmp_path / "whole" / "w").glob("*/begun.json")))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_at_random_moments(number: signal.Signals, tmp_path: Path) -> None:
    generator = random.Random(int(number))
    content = whole()
    # A resumed run keeps the batches that were found to fit when it started.
    content["student"]["training"] |= {"batch": {"fit": True, "fit_limit": 512, "fit_margin": 0.0}}
    began = time.monotonic()
    undisturbed = prepared(tmp_path, content)
    killed, longest = 0, (time.monotonic() - began) / 8  # a fast machine finishes sooner
    while True:
        process = start(tmp_path / "cut")
        try:
            status = process.wait(generator.uniform(0.5, longest) if killed < KILLS else 3600)
        except subprocess.TimeoutExpired:
            kill(process, number)
            killed += 1
            longest *= 1.05  # otherwise, on a busy machine, a long step would never end
            continue
        assert status == 0, (tmp_path / "cut" / "log").read_text()[-3000:]
        break
    assert killed > 10
    assert handed_on(tmp_path / "cut") == undisturbed


def in_many_shards() -> dict[str, Any]:
    """The content of a file whose translating steps have a dozen shards each, with nothing after the student."""
    content = whole(quantisation=None, shortlist=None, export=None, evaluation=None)
    content["backtranslation"]["shard_lines"], content["distillation"]["shard_lines"] = 3, 10
    return content


@pytest.mark.slow
def test_parts_killed_at_random_moments(tmp_path: Path) -> None:
    """Two parts of each step that is a job run at once, like a Slurm array; then a full call merges them."""
    generator = random.Random(3)
    undisturbed = prepared(tmp_path, in_many_shards())
    cut, killed = tmp_path / "cut", 0
    for step, before in (
        ("backtranslate", "backward"),
        ("distil", "teacher"),
        ("filter", "distil-monolingual"),
        ("align", "filter"),
        ("student-data", "align"),
    ):
        assert start(cut, "--until", before).wait(3600) == 0, (cut / "log").read_text()[-3000:]
        parts = {f"{number}/2": start(cut, "--only", step, bulk=("--shard", f"{number}/2")) for number in (1, 2)}
        kills = 3
        while parts:
            time.sleep(generator.uniform(0.3, 1.5))  # on a fast machine a part takes three seconds
            for part, process in list(parts.items()):
                if process.poll() is not None:
                    assert process.wait() == 0, (cut / "log").read_text()[-3000:]
                    del parts[part]
                elif kills and generator.random() < 0.6:
                    kill(process, generator.choice([signal.SIGKILL, signal.SIGTERM]))
                    kills, killed = kills - 1, killed + 1
                    parts[part] = start(cut, "--only", step, bulk=("--shard", part))
        assert not (cut / "w" / step / MANIFEST).exists()
    assert start(cut).wait(3600) == 0, (cut / "log").read_text()[-3000:]
    assert killed > 8
    assert handed_on(cut) == undisturbed
