"""The distribution: the wheel alone runs in an empty environment, and no file in the tree holds corpus text."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHORT = ("training.stop.updates=20", "training.validation.every_updates=20", "training.schedule.warmup_updates=10")
SHORT += ("decoding.beam_size=1", "decoding.max_length.limit=12")


def run(*command: str | Path, cwd: Path, given: str | None = None) -> str:
    """Run a command outside the tree and return its output."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, input=given, text=True, capture_output=True
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def test_no_file_holds_text_of_a_corpus(shared_data: Path) -> None:
    """This matters most for results of experiments, because a report gives examples of dropped lines."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    found: dict[str, str] = {}
    for name in filter(None, listed.stdout.split("\0")):
        try:
            text = (ROOT / name).read_text("utf-8")
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):  # pictures, and links to folders
            continue
        quoted = (json.loads(string) for string in re.findall(r'"(?:[^"\\\n]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*"', text))
        for string in (*text.splitlines(), *quoted):
            if len(string := string.strip()) > 20 and string.count(" ") > 2:
                found.setdefault(string, name)
    assert len(found) > 10_000
    copied: dict[str, list[str]] = {}
    for path in sorted(set(shared_data.rglob("*.gz")) - set((shared_data / "hostile").rglob("*"))):
        with gzip.open(path, "rt", encoding="utf-8", errors="replace", newline="\n") as lines:
            for line in lines:
                if (line := line.strip()) in found:
                    copied.setdefault(found.pop(line), []).append(line)
    assert copied.pop("docs/tutorial.md", []) in ([], ["A dog is running on the beach."])  # outputs of a model
    assert copied == {}


@pytest.mark.slow  # three to six minutes, most of which installs PyTorch
def test_the_wheel_runs_in_an_empty_environment(tmp_path: Path) -> None:
    pip = ("-m", "pip", "--quiet", "--disable-pip-version-check")
    run(sys.executable, *pip, "wheel", "--no-deps", "--wheel-dir", tmp_path / "dist", ROOT, cwd=tmp_path)
    (wheel,) = (tmp_path / "dist").glob("ziggurat_mt-*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    page = {str(path.relative_to(ROOT)) for path in (ROOT / "ziggurat" / "serve" / "interfaces" / "static").iterdir()}
    assert len(page) > 5
    assert page <= held
    if shutil.which("gcc"):
        assert "ziggurat/model/fast/_compiled.so" in held
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python, ziggurat = (tmp_path / "venv" / "bin" / name for name in ("python", "ziggurat"))
    run(python, *pip, "install", "--constraint", ROOT / "constraints.txt", f"{wheel}[train]", cwd=tmp_path)

    place = run(python, "-c", "import ziggurat; print(ziggurat.__file__)", cwd=tmp_path)
    assert Path(place.strip()).is_relative_to(tmp_path / "venv")
    run(ziggurat, "demo", *SHORT, cwd=tmp_path)
    assert (tmp_path / "demo" / "run" / "report.html").is_file()
    lines = (tmp_path / "demo" / "corpus" / "test.qlo").read_text(encoding="utf-8").splitlines()[:3]
    output = run(ziggurat, "translate", "demo/run", cwd=tmp_path, given="\n".join(lines) + "\n")
    assert len(output.splitlines()) == 3
