"""Folders that appear whole or not at all; the sweep removes leftovers of dead processes but nothing of live ones."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.killing import run_and_kill, tree
from ziggurat.system.errors import DataError
from ziggurat.system.files import atomic_file, write_atomically
from ziggurat.system.staging import building, discard, make_temporary, recover, staged, sweep, tidy


def build(target: Path, content: str) -> None:
    with building(target) as folder:
        (folder / "a").write_text(content)
        (folder / "inner").mkdir()
        (folder / "inner" / "b").write_text(content)


def held_by_another(folder: Path, code: str) -> subprocess.Popen[str]:
    """Start a process that runs `code` in the folder and then waits with its locks; return it once it waits."""
    begin = "from pathlib import Path\nfrom ziggurat.system.files import *\nfrom ziggurat.system.staging import *\n"
    program = f"{begin}{code}\nprint('there', flush=True)\ninput()"
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    return process


def kill_and_wait(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    """The next process to open it, reader or writer, finds the old folder; once it is rewritten, only the new one."""
    target, operation, missing = tmp_path / "x", 0, 0
    build(target, "old")
    while run_and_kill(lambda: build(target, "new"), str(tmp_path), operation := operation + 1):
        missing += not target.exists()
        if operation % 2:
            recover(target)
        else:
            tidy(target)
            assert [path.name for path in tmp_path.iterdir()] == ["x"]
        assert {(target / name).read_text() for name in ("a", "inner/b")} in ({"old"}, {"new"})
        build(target, "old")
        assert tree(tmp_path) == {"x": None, "x/a": b"old", "x/inner": None, "x/inner/b": b"old"}
    assert operation > 12
    assert missing == 1, "between the two renames"


@pytest.mark.slow
def test_a_folder_set_aside_by_a_live_writer_is_waited_for(tmp_path: Path) -> None:
    build(tmp_path / "x", "old")
    other = held_by_another(
        tmp_path, "place = Staging(Path('x')); place.begin(); import os; os.rename('x', '.x.building.tmp/old')"
    )
    try:
        with pytest.raises(DataError, match="another process of ziggurat is building this folder"):
            recover(tmp_path / "x")
        with pytest.raises(DataError, match="another process of ziggurat is building this folder"):
            build(tmp_path / "x", "mine")
        sweep(tmp_path)
        assert (tmp_path / ".x.building.tmp" / "old" / "a").read_text() == "old"
    finally:
        kill_and_wait(other)
    recover(tmp_path / "x")
    assert (tmp_path / "x" / "a").read_text() == "old"


def test_a_half_deleted_folder_is_never_put_back(tmp_path: Path) -> None:
    build(tmp_path / "x", "old")
    operation, halves = 0, 0
    while run_and_kill(lambda: discard(tmp_path / "x"), str(tmp_path), operation := operation + 1):
        whole = (tmp_path / "x" / "inner" / "b").exists() and (tmp_path / "x" / "a").exists()
        assert whole or not (tmp_path / "x").exists()
        halves += not whole
        recover(tmp_path / "x")
        assert (tmp_path / "x").exists() == whole
        sweep(tmp_path)
        build(tmp_path / "x", "old")
        assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert halves > 2


def test_the_sweep_removes_only_leftovers_of_dead_processes(tmp_path: Path) -> None:
    deep = tmp_path / "run" / "stages" / "012-layers"
    deep.mkdir(parents=True)
    other = held_by_another(deep, "f = atomic_file(Path('config.yaml')); f.__enter__(); s = Staging(Path('y'))")
    for name in (".environment.json.x1_y2z3q.tmp", "stages/012-layers/.config.yaml.abcdefgh.tmp"):
        (tmp_path / "run" / name).write_text("half")
    (tmp_path / "run" / ".averaged.deleting.tmp" / "inner").mkdir(parents=True)
    (tmp_path / "run" / ".averaged.building.tmp" / "new").mkdir(parents=True)
    mine = {"stages/.hidden.tmp", ".a.b.tmp", "notes.tmp", ".rsync.abcdef", ".x.ABCDEFGH.tmp", "x.abcdefgh.tmp"}
    for name in mine:
        (tmp_path / "run" / name).write_text("mine")
    (tmp_path / "run" / ".dir.abcdefgh.tmp").mkdir()  # not a name that we give to folders
    os.mkfifo(tmp_path / "run" / ".pipe.abcdefgh.tmp")  # nobody can open it
    (tmp_path / "run" / ".link.abcdefgh.tmp").symlink_to("notes.tmp")
    before = set(tree(tmp_path / "run", contents=bool))
    try:
        sweep(tmp_path / "run", deep=True)
        gone = before - set(tree(tmp_path / "run", contents=bool))
        assert {name.partition("/")[0] if name.startswith(".") else name for name in gone} == {
            ".environment.json.x1_y2z3q.tmp",
            "stages/012-layers/.config.yaml.abcdefgh.tmp",
            ".averaged.deleting.tmp",
            ".averaged.building.tmp",
        }
        assert len([p for p in deep.iterdir() if p.name.startswith(".")]) == 2, "of the living"
    finally:
        kill_and_wait(other)
    sweep(tmp_path / "run", deep=True)
    assert not list(deep.iterdir())


def test_in_folders_of_others_only_half_written_files_of_that_name_go(tmp_path: Path) -> None:
    for name in (".out.txt.abcdefgh.tmp", ".report.abcdefgh.tmp", "sub/.out.txt.abcdefgh.tmp"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("half")
    write_atomically(tmp_path / "out.txt", b"whole")
    assert {name for name in tree(tmp_path) if "." in name} == {
        "out.txt",
        ".report.abcdefgh.tmp",
        "sub/.out.txt.abcdefgh.tmp",
    }


def test_a_sweep_between_making_and_locking_removes_no_live_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the sweep comes first, the writer makes another file, and never writes into the removed one."""
    sweeps = []
    original = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        if not sweeps:
            sweeps.append(True)
            sweep(tmp_path)
        original(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    descriptor, name = make_temporary(tmp_path / "x")
    assert [name] == list(tmp_path.iterdir())
    assert os.path.samestat(os.stat(name), os.fstat(descriptor))
    os.close(descriptor)


@pytest.mark.slow
def test_two_threads_that_build_one_folder(tmp_path: Path) -> None:
    """Repeatedly, one of them builds, or both do in turn; a refused one leaves nothing behind."""
    refused: list[bool] = []

    def often() -> None:
        for number in range(60):
            try:
                build(tmp_path / "x", str(number))
            except DataError:
                refused.append(True)

    threads = [threading.Thread(target=often) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) < 180
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x" / "a").read_text() == (tmp_path / "x" / "inner" / "b").read_text()


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.usefixtures("no_locks")
def test_without_locks_nothing_that_may_be_in_use_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".x.abcdefgh.tmp").write_text("perhaps alive")
    (tmp_path / ".y.building.tmp" / "new").mkdir(parents=True)
    (tmp_path / ".y.building.tmp" / "lock").touch()
    sweep(tmp_path)
    write_atomically(tmp_path / "x", b"files need none")
    for target in ("y", "z"):
        with pytest.raises(DataError, match=r"cannot lock files \(No locks available\).*another file system"):
            build(tmp_path / target, "")
    assert set(tree(tmp_path)) == {
        *(".x.abcdefgh.tmp", "x", ".y.building.tmp", ".y.building.tmp/new", ".y.building.tmp/lock")
    }


def test_leftovers_of_an_error(tmp_path: Path) -> None:
    build(tmp_path / "x", "old")
    with pytest.raises(IsADirectoryError), building(tmp_path / "x") as folder:
        folder.write_text("half")
    assert (tmp_path / "x" / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_failing_rename_puts_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path / "x", "old")
    original = os.rename

    def rename(source: Any, target: Any) -> None:
        if Path(source).name == "new" and not Path(target).exists():
            raise OSError(errno.EIO, "Input/output error")
        original(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match="Input/output"):
        build(tmp_path / "x", "new")
    assert (tmp_path / "x" / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_the_target_of_a_link_is_replaced_and_not_the_link(tmp_path: Path) -> None:
    build(tmp_path / "far" / "x", "old")
    (tmp_path / "x").symlink_to(tmp_path / "far" / "x")
    with building(tmp_path / "x") as folder:
        assert folder == staged(tmp_path / "x") == staged(tmp_path / "far" / "x")
        (folder / "a").write_text("new")
    assert (tmp_path / "x").is_symlink()
    assert tree(tmp_path / "far") == {"x": None, "x/a": b"new"}


def test_a_file_in_the_way_stays(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    with pytest.raises(DataError, match="is a file, expected a folder to write"):
        build(tmp_path / "x", "new")
    assert tree(tmp_path) == {"x": b"mine"}


def test_content_is_on_the_disk_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are synced before the rename and the folder after it, or a power cut leaves a name without content."""
    done: list[str] = []
    inode_of = {}

    def noting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if name == "fsync":
                done.append(inode_of.get(os.fstat(args[0]).st_ino) or os.readlink(f"/proc/self/fd/{args[0]}"))
            else:
                done.append(f"name {Path(args[1]).name}")
            return original(*args, **options)

        return call

    for name in ("fsync", "rename", "replace"):
        monkeypatch.setattr(os, name, noting(name, getattr(os, name)))
    build(tmp_path / "x", "new")
    new = str(tmp_path / ".x.building.tmp" / "new")
    assert set(done[: done.index("name x")]) == {f"{new}/a", f"{new}/inner", f"{new}/inner/b", new}
    assert done[done.index("name x") + 1 :] == [str(tmp_path)]
    done.clear()
    with atomic_file(tmp_path / "file") as file:
        file.write(b"content")
    assert Path(done[0]).name.startswith(".file.")
    assert done[1:] == ["name file", str(tmp_path)]


@pytest.mark.parametrize("kind", ["partial", "replaced"])
@pytest.mark.parametrize("there", [True, False])
def test_folders_of_like_names_stay(tmp_path: Path, kind: str, there: bool) -> None:
    """Whole models may have such names, which people give to copies and unfinished downloads."""
    if there:
        build(tmp_path / "x", "old")
    (tmp_path / f"x.{kind}").mkdir()
    for name in ("config.json", "model.safetensors", "manifest.json", "source.spm"):
        (tmp_path / f"x.{kind}" / name).write_text("mine")
    recover(tmp_path / "x")
    tidy(tmp_path / "x")
    assert (tmp_path / "x").exists() == there
    build(tmp_path / "x", "new")
    assert {path.read_text() for path in (tmp_path / f"x.{kind}").iterdir()} == {"mine"}
    assert len(list((tmp_path / f"x.{kind}").iterdir())) == 4
    assert (tmp_path / "x" / "a").read_text() == "new"
