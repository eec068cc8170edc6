"""How verbs read and write: progress on standard error, results on standard output, files whole or not at all."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console

from ziggurat.data.files import atomic_file, byte_blocks
from ziggurat.errors import ConfigError, DataError

__all__ = [
    "check_input",
    "check_output",
    "console",
    "counted",
    "input_stream",
    "is_first_process",
    "output_stream",
    "print_json",
    "refuse_overwriting",
]


def console() -> Console:
    """Return the console for people: standard error."""
    return Console(stderr=True)


def is_first_process() -> bool:
    """Whether this process speaks for those that torchrun started with it; True where it did not."""
    return os.environ.get("RANK", "0") == "0"


def counted(count: int, noun: str) -> str:
    """Return a number of things in words: `1 line`, `2,000 lines`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def print_json(document: Any) -> None:
    """Print one JSON document on standard output."""
    print(json.dumps(document, ensure_ascii=False, indent=2))


class _Blocks(io.RawIOBase):
    """The blocks of a (compressed) file as a raw stream."""

    def __init__(self, path: Path) -> None:
        self._blocks = byte_blocks(path)
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._rest = block
        part, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)


def check_input(path: str) -> None:
    """Raise DataError when there is no such file to read (`-`: standard input)."""
    if path == "-":
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
    if not Path(path).is_file():  # a pipe: it can be read only once, so it is taken as it comes
        return open(path, "rb"), path
    return io.BufferedReader(_Blocks(Path(path))), path


def check_output(path: str) -> None:
    """Raise DataError when no file can be written there (`-`: standard output)."""
    if path == "-":
        return
    target = Path(path).resolve()
    if target.is_dir():
        raise DataError(f"{path}: is a folder, expected a file to write")
    if not target.parent.is_dir():
        raise DataError(f"{path}: folder {target.parent} does not exist")
    if not os.access(target if target.exists() and not target.is_file() else target.parent, os.W_OK):
        raise DataError(f"{path}: cannot be written: permission denied")


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
    target = Path(path).resolve()
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
