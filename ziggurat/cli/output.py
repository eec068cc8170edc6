"""How verbs read and write: progress on standard error, results on standard output, files whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from ziggurat.data.compressed import byte_stream, compression_of
from ziggurat.data.files import atomic_file
from ziggurat.errors import ConfigError, DataError, printable
from ziggurat.terminal import safe

__all__ = [
    "OUT",
    "check_input",
    "check_output",
    "console",
    "counted",
    "input_stream",
    "is_first_process",
    "line_count",
    "line_progress",
    "output_stream",
    "print_json",
    "refuse_overwriting",
    "shell_paths",
]

OUT = ("--output", "-o", "--out")
"""Every verb's option that says where to write; `--out` is how some spelt it before version 0.2."""

QUIET = "ZIGGURAT_QUIET"
"""Environment variable that `--quiet` sets, so that processes which a verb starts are quiet too."""

_with_bar: list[Console] = []

_COUNTED_BYTES = 1 << 28  # counting the lines of a larger file would keep people waiting


def console() -> Console:
    """Return the console for people: standard error, which never fails; nothing is shown with `--quiet`.

    While a bar is shown it is the bar's: what another console prints would go on behind the bar on its line.
    """
    if _with_bar:
        return _with_bar[-1]
    return safe(Console(stderr=True, quiet=QUIET in os.environ))


class _Rate(ProgressColumn):
    """Lines per second so far."""

    def render(self, task: Task) -> Text:
        return Text(
            f"{task.completed / task.elapsed:,.0f} lines/s" if task.elapsed else "", style="progress.data.speed"
        )


@contextlib.contextmanager
def line_progress(said: str, total: int | None, *, shown: bool = True) -> Iterator[Callable[[int], object]]:
    """Show a bar on standard error where that is a terminal, and give what moves it on by a number of lines.

    `total` may be unknown. The bar is gone at the end. What is printed to console() meanwhile appears above it.
    """
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn()]
    on = console()
    with Progress(*columns, console=on, transient=True, disable=not (shown and on.is_terminal)) as bar:
        task = bar.add_task(said, total=total)
        _with_bar.append(on)
        try:
            yield lambda count: bar.advance(task, count)
        finally:
            _with_bar.remove(on)


def line_count(path: str) -> int | None:
    """Return how many lines a text file has, or None where counting would take long: of a stream, or a huge file."""
    if path == "-" or not os.path.isfile(path) or compression_of(Path(path)) or os.path.getsize(path) > _COUNTED_BYTES:
        return None
    with open(path, "rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def shell_paths(arguments: Sequence[str]) -> list[str]:
    """Return arguments with `~/` replaced where a shell leaves it alone, in quotes and behind `=`.

    Raises ConfigError for `$NAME/...` that reached us as it is: a folder of that name would be made.
    """
    expanded = []
    for argument in arguments:
        name, equals, value = argument.partition("=") if "=" in argument else ("", "", argument)
        if (found := re.match(r"(\$(?:\{\w+\}|[A-Za-z_]\w*))(?:/|$)", value)) and not os.path.lexists(value):
            raise ConfigError(
                f"`{printable(argument)}`: the shell did not replace `{found[1]}` (single quotes keep it from that); "
                "write double quotes, or the path itself"
            )
        expanded.append(f"{name}{equals}{os.path.expanduser(value)}" if re.match(r"~(/|$)", value) else argument)
    return expanded


def is_first_process() -> bool:
    """Whether this process speaks for those that torchrun started with it; True where it did not."""
    return os.environ.get("RANK", "0") == "0"


def counted(count: int, noun: str) -> str:
    """Return a number of things in words: `1 line`, `2,000 lines`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def print_json(document: Any) -> None:
    """Print one JSON document on standard output."""
    print(json.dumps(document, ensure_ascii=False, indent=2))


def check_input(path: str) -> None:
    """Raise DataError when there is no such file to read (`-`: standard input)."""
    if path == "-":
        if sys.stdin is None:  # `<&-` in a shell
            raise DataError("standard input is closed; give a file or a pipe")
        return
    if Path(path).is_dir():
        raise DataError(f"{path}: is a folder, expected a text file")
    if not Path(path).exists():
        raise DataError(f"{path}: no such file")
    if not os.access(path, os.R_OK):
        raise DataError(f"{path}: cannot be read: permission denied")


def input_stream(path: str) -> tuple[BinaryIO, str]:
    """Open `path` (`-`: standard input; .gz, .xz, .zst are unpacked) and return it with its name for messages."""
    check_input(path)
    if path == "-":
        return sys.stdin.buffer, "standard input"
    return byte_stream(Path(path)), path


def _written(path: str) -> Path:
    """Return what is written at `path`: the file that links lead to; a pipe or device by the name that was given.

    The shell's `>(gzip > x.gz)` and /dev/stdout are links that name no file: they can be opened, but not followed.
    """
    given = Path(path)
    return given if given.exists() and not given.is_file() else given.resolve()


def check_output(path: str) -> None:
    """Raise DataError when no file can be written there (`-`: standard output)."""
    if path == "-":
        return
    target = _written(path)
    if target.is_dir():
        raise DataError(f"{path}: is a folder, expected a file to write")
    if compression_of(target):
        raise DataError(f"{path}: is written as plain text, not packed: name it {target.stem}")
    if not target.parent.is_dir():
        raise DataError(f"{path}: folder {target.parent} does not exist")
    place = target if target.exists() and not target.is_file() else target.parent
    if not os.access(place, os.W_OK):
        fixed = os.statvfs(place).f_flag & os.ST_RDONLY
        why = os.strerror(errno.EROFS) if fixed else "permission denied"
        raise DataError(f"{path}: cannot be written: {why}")


@contextlib.contextmanager
def output_stream(path: str) -> Iterator[BinaryIO]:
    """Open `path` for writing (`-`: standard output); a file appears only when everything was written.

    What a link points to is replaced, not the link; a pipe or device is written to as it is.
    """
    if path == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    check_output(path)
    target = _written(path)
    if target.exists() and not target.is_file():
        with target.open("wb") as device:
            yield device
        return
    with atomic_file(target) as file:
        yield file


def refuse_overwriting(output: str | None, *inputs: str | None) -> None:
    """Raise ConfigError when the file `output` is one of those that are read; `-` is none, even if there is one."""
    if not output or output == "-" or not os.path.isfile(output):
        return
    for path in inputs:
        if path and path != "-" and os.path.isfile(path) and os.path.samefile(output, path):
            raise ConfigError(f"{output}: is an input; write the translations to another file")
