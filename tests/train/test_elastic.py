"""Under torchrun: a killed worker leads to a restart that resumes by itself, and to the same weights."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import tiny_experiment
from tests.train.runs import final_bytes, records
from tests.train.test_parallel import tiny, together
from ziggurat.cli import main
from ziggurat.config import dump
from ziggurat.data.prepare import prepare
from ziggurat.model.run_folder import checkpoint_folders
from ziggurat.train.checkpoint import load_checkpoint
from ziggurat.train.run import run_lock, was_requeued

UPDATES = 80


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    prepare(tiny(folder).data)
    return folder


def workers(agent: int) -> list[int]:
    """Return the processes that torchrun's agent has started."""
    return [child.pid for child in psutil.Process(agent).children() if "ziggurat" in child.cmdline()]


@pytest.mark.slow  # five processes import torch; test_parallel.py and the tests below cover the parts
def test_a_killed_worker_does_not_change_the_weights(data: Path, tmp_path: Path) -> None:
    experiment = tiny(
        data,
        batch={"max_tokens": 200, "accumulate": 2},
        stop={"updates": UPDATES},
        validation={"every_updates": 100, "decode": False},
        checkpoint={"every_updates": 4, "keep_last": 2},
    )
    together(tmp_path / "whole", experiment, 2)
    config, run = tmp_path / "config.yaml", tmp_path / "run"
    config.write_text(dump(experiment), encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    with (tmp_path / "said").open("w+b") as said:
        agent = subprocess.Popen(
            [*torchrun, "-m", "ziggurat", "train", str(config), "-r", str(run)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=said,
            stderr=said,
        )
        try:
            until = time.monotonic() + 120
            while len(checkpoint_folders(run)) < 2 and agent.poll() is None and time.monotonic() < until:
                time.sleep(0.02)
            assert agent.poll() is None
            victim = workers(agent.pid)[1]
            os.kill(victim, signal.SIGKILL)
            status = agent.wait(timeout=180)
        finally:
            agent.kill()
        said.seek(0)
        output = said.read().decode(errors="replace")
    assert status == 0, output
    log = (run / "log.txt").read_text(encoding="utf-8")
    assert len(re.findall("resumed after update", log)) == 1, log
    assert final_bytes(run, UPDATES) == final_bytes(tmp_path / "whole", UPDATES)


@pytest.mark.slow
def test_workers_end_when_torchrun_is_killed(data: Path, tmp_path: Path) -> None:
    """As after SIGTERM, they end within seconds with a checkpoint of the current update, from which all resume."""
    experiment = tiny(
        data,
        batch={"max_tokens": 200, "accumulate": 2},
        stop={"updates": 10**6},
        validation={"every_updates": 10**6},
        checkpoint={"every_updates": 10**6},
    )
    config, run = tmp_path / "config.yaml", tmp_path / "run"
    config.write_text(dump(experiment), encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    agent = subprocess.Popen(
        [*torchrun, "-m", "ziggurat", "train", str(config), "-r", str(run)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    orphans = []
    try:
        until = time.monotonic() + 120
        while len(metrics_of(run)) < 3 and agent.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        assert agent.poll() is None
        orphans = [psutil.Process(pid) for pid in workers(agent.pid)]
        assert len(orphans) == 2
        agent.kill()
        agent.wait()
        assert psutil.wait_procs(orphans, timeout=20)[1] == [], "they train on"
    finally:
        agent.kill()
        for orphan in orphans:
            with contextlib.suppress(psutil.NoSuchProcess):
                orphan.kill()
    log = (run / "log.txt").read_text(encoding="utf-8")
    assert f"SIGTERM, since torchrun (process {agent.pid}) is gone" in log
    assert load_checkpoint(run / "last").progress.update == int(metrics_of(run)[-1]["update"])


def metrics_of(run: Path) -> list[dict[str, float]]:
    return records(run) if (run / "metrics.jsonl").exists() else []


@pytest.mark.slow
def test_the_same_command_started_again_by_torchrun_resumes_the_run(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ziggurat.cli.training.leave_with_launcher", lambda: None)  # the launcher is not a process here
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    config, run = tmp_path / "config.yaml", tmp_path / "run"
    config.write_text(dump(tiny_experiment(tiny_folder, stop={"updates": 4}, checkpoint={"every_updates": 2})))
    for start in range(2):
        with pytest.raises(SystemExit) as stop:
            main(["train", str(config), "--run", str(run)])
        messages = capsys.readouterr().err
        assert not stop.value.code, messages
        assert (f"{run} was started by this job:" in messages) == ("resumed after update 2" in messages) == (start == 1)
        assert [folder.name for folder in checkpoint_folders(run)] == ["step-00000002", "step-00000004"]
        shutil.rmtree(run / "checkpoints" / "step-00000004")  # as if it had been killed earlier


def test_only_the_job_that_made_a_run_resumes_it_automatically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    run = tmp_path / "run"
    run.mkdir()
    with run_lock(run):
        assert not was_requeued(run)  # no job id is known
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    with run_lock(run):
        assert not was_requeued(run)  # another command of the same Slurm job
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert was_requeued(run)
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    assert not was_requeued(run)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    with run_lock(run):
        assert was_requeued(run)
    monkeypatch.delenv("SLURM_JOB_ID")
    assert was_requeued(run)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "b")
    assert not was_requeued(run)
    assert not was_requeued(tmp_path / "nowhere")
    for name in ("my job", b"caf\xe9".decode("utf-8", "surrogateescape")):  # how the environment passes other bytes
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
        with run_lock(run):
            assert was_requeued(run)
    (run / ".job").write_bytes(b"torchrun-\xff")
    assert not was_requeued(run)
