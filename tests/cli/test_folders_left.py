"""Folders after a verb was interrupted: what it leaves there, and what earlier ones left."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.conftest import Ziggurat
from tests.cli.test_terminal import started, wait_for


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU])
def test_a_signal_leaves_no_temporary_file(number: signal.Signals, trained: Path, tmp_path: Path) -> None:
    """`translate -o` is interrupted in the middle, as by Ctrl-C; terminals and schedulers send the signal several
    times.
    """
    output, source = tmp_path / "results" / "out", tmp_path / "source"
    output.parent.mkdir()
    os.mkfifo(source)
    arguments = ["translate", str(trained), "--window", "1", "-i", str(source), "-o", str(output)]
    child = started(arguments, tmp_path / "said")
    with source.open("w"):  # a source that never ends
        wait_for(lambda: bool(list(output.parent.iterdir())), child)
        for _ in range(1 if number == signal.SIGTERM else 30):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, number)  # type: ignore[arg-type]
            time.sleep(0.001)
        child.join(60)
    said = (tmp_path / "said.err").read_text()
    assert child.exitcode == 128 + number, said
    assert said.endswith(f"ziggurat: stopped by {number.name}\n")
    assert not list(output.parent.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU])
def test_a_signal_during_an_import_is_named(number: signal.Signals) -> None:
    """While half-loaded modules could swallow an exception, the process ends at once."""
    code = (
        "import os, signal\nfrom ziggurat.system.terminal import importing\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        f"with importing():\n    os.kill(os.getpid(), {int(number)})\n    raise SystemExit(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 128 + number
    assert done.stderr == f"ziggurat: stopped{'' if number == signal.SIGINT else f' by {number.name}'}\n"


def test_the_next_process_removes_what_a_killed_one_left(
    ziggurat: Ziggurat, trained: Path, text: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / ".out.abcdefgh.tmp").write_text("half")
    assert ziggurat("translate", trained, "max_length.limit=2", "-i", text, "-o", folder / "out").status == 0
    assert [path.name for path in folder.iterdir()] == ["out"]
    (folder / "model").mkdir()
    (folder / "model" / ".config.yaml.abcdefgh.tmp").write_text("half")
    assert ziggurat("average", trained, "--last", 1, "--out", folder / "model").status == 0
    (folder / "spm").mkdir()
    (folder / "spm" / "joint.spm").write_text("somebody's")
    refused = ziggurat("average", trained, "--last", 1, "--out", folder / "spm")
    assert refused.status == 2
    assert "holds something other than a model directory" in refused.err
    assert [path.name for path in (folder / "spm").iterdir()] == ["joint.spm"]


@pytest.mark.slow
def test_a_file_called_minus_is_not_standard_output(
    ziggurat: Ziggurat, trained: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = ziggurat("report", trained, "--translations", 0, "--out", "-")
    assert result.status == 0, result.err
    assert result.out.startswith("<!")
    assert result.out.rstrip().endswith("</html>")
    assert not Path("-").exists()
    Path("-").touch()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.read_bytes())))
    assert ziggurat("translate", trained, "max_length.limit=2").status == 0
