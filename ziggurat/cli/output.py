"""Input and output of the verbs, and the options that several of them share.

Messages and progress bars go to standard error, results to standard output. A file appears only once it is complete.
Paths are checked before the work begins, since loading a model takes seconds.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from ziggurat.config.load import apply_override
from ziggurat.system.compressed import byte_stream, compression_of
from ziggurat.system.errors import ConfigError, DataError, printable
from ziggurat.system.files import atomic_file, may_be_replaced, write_atomically
from ziggurat.system.small_files import json_safe
from ziggurat.system.terminal import print_message, safe

if TYPE_CHECKING:
    from ziggurat.inspect.report.figure import Figure

OUT = ("--output", "-o", "--out")
"""OUT are the names of every verb's output option; some verbs called it `--out` before version 0.2."""

QUIET = "ZIGGURAT_QUIET"
"""QUIET is the environment variable that `--quiet` sets; processes that a verb starts inherit it."""

_COUNTED_BYTES = 1 << 28  # counting the lines of a larger file would keep the user waiting

_of_bars: list[Console] = []  # consoles of the progress bars on the screen, innermost last


# Messages and progress


def console() -> Console:
    """Return the console for messages: standard error, ignoring failed writes; silent with `--quiet`.

    While a progress bar is shown, this is the bar's console, which prints above the bar; another console would print
    into the bar's line.
    """
    if _of_bars:
        return _of_bars[-1]
    return safe(Console(stderr=True, quiet=QUIET in os.environ))


def say(text: str) -> None:
    """Print a message on standard error without markup or colours; nothing with `--quiet`."""
    print_message(console(), text)


@contextlib.contextmanager
def progress_bars(*columns: ProgressColumn, shown: bool = True) -> Iterator[Progress]:
    """Context with progress bars on standard error, removed at the end; none off a terminal or without `shown`."""
    screen = console()
    with Progress(*columns, console=screen, transient=True, disable=not (shown and screen.is_terminal)) as bars:
        _of_bars.append(screen)
        try:
            yield bars
        finally:
            _of_bars.remove(screen)


class PhaseBars:
    """One progress bar per phase of a verb; off a terminal, one message per phase. `once`: show only the latest bar."""

    def __init__(self, bars: Progress, *, once: bool = False) -> None:
        self._bars, self._once = bars, once
        self._tasks: dict[str, TaskID] = {}

    def show(self, phase: str, done: int, total: int | None) -> None:
        """Show how much of a phase is done; `total` is None if unknown."""
        if phase not in self._tasks:
            while self._once and self._tasks:
                self._bars.remove_task(self._tasks.popitem()[1])
            self._tasks[phase] = self._bars.add_task(printable(phase, 60), total=total)
            if self._bars.disable:
                say(f"{printable(phase, 200)} ...")
        self._bars.update(self._tasks[phase], completed=done, total=total)


class _LineRate(ProgressColumn):
    def render(self, task: Task) -> Text:
        rate = f"{task.completed / task.elapsed:,.0f} lines/s" if task.elapsed else ""
        return Text(rate, style="progress.data.speed")


@contextlib.contextmanager
def line_progress(task: str, total: int | None, *, shown: bool = True) -> Iterator[Callable[[int], object]]:
    """Context with a progress bar over lines; gives the function that advances it by a number of lines.

    `total` is None if unknown.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _LineRate(), TimeRemainingColumn())
    with progress_bars(*columns, shown=shown) as bars:
        bar = bars.add_task(task, total=total)
        yield lambda count: bars.advance(bar, count)


def is_first_process() -> bool:
    """Return True without torchrun, and under it in the one process that prints."""
    return os.environ.get("RANK", "0") == "0"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: `1 line`, `2,000 lines`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def print_json(document: Any) -> None:
    """Print one JSON document on standard output; numbers that JSON cannot express become null."""
    print(json.dumps(json_safe(document), ensure_ascii=False, indent=2, allow_nan=False))


# Paths and files


def line_count(path: str) -> int | None:
    """Return the number of lines of a text file; None for a stream, or for a compressed or huge file."""
    if path == "-" or not os.path.isfile(path) or compression_of(Path(path)) or os.path.getsize(path) > _COUNTED_BYTES:
        return None
    with open(path, "rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def shell_paths(arguments: Sequence[str]) -> list[str]:
    """Return arguments with `~/` expanded where the shell leaves it: in quotes and after `=`.

    Raises ConfigError for an unexpanded `$NAME/...`, which would create a folder literally called `$NAME`.
    """
    expanded = []
    for argument in arguments:
        name, equals, value = argument.partition("=") if "=" in argument else ("", "", argument)
        if (found := re.match(r"(\$(?:\{\w+\}|[A-Za-z_]\w*))(?:/|$)", value)) and not os.path.lexists(value):
            raise ConfigError(
                f"`{printable(argument)}`: the shell did not expand `{found[1]}`, as in single quotes; "
                "use double quotes, or write out the path"
            )
        expanded.append(f"{name}{equals}{os.path.expanduser(value)}" if re.match(r"~(/|$)", value) else argument)
    return expanded


def check_input(path: str) -> None:
    """Raise DataError unless `path` is a readable file (`-`: standard input)."""
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


def check_one_stream(*paths: str | None) -> None:
    """Raise ConfigError if several inputs are standard input, which can be read only once."""
    if paths.count("-") > 1:
        raise ConfigError("only one of the inputs can be standard input (`-`)")


def input_stream(path: str) -> tuple[BinaryIO, str]:
    """Return `path` opened for reading (`-`: standard input; .gz, .xz, .zst are decompressed); and its name."""
    check_input(path)
    if path == "-":
        return sys.stdin.buffer, "standard input"
    return byte_stream(Path(path)), path


def file_named(path: str) -> str:
    """Return an output path for a verb that prints a report on standard output: here `-` is a file of that name."""
    return "./-" if path == "-" else path


def _write_target(path: str) -> Path:
    """Return the path to write to: links are resolved, except to a pipe or device.

    The shell's `>(gzip > x.gz)` and /dev/stdout are links whose targets have no name in the file system: they can be
    opened but not resolved.
    """
    given = Path(path)
    return given if given.exists() and not given.is_file() else given.resolve()


def check_output(path: str) -> None:
    """Raise DataError unless a file can be written at `path` (`-`: standard output)."""
    if path == "-":
        return
    target = _write_target(path)
    if target.is_dir():
        raise DataError(f"{path}: is a folder, expected a file to write")
    if compression_of(target):
        raise DataError(f"{path}: output is plain text, not compressed: name it {target.stem}")
    if not target.parent.is_dir():
        raise DataError(f"{path}: folder {target.parent} does not exist")
    # A pipe or device is written to directly; a file is renamed into its folder, so the folder must be writable.
    place = target if target.exists() and not target.is_file() else target.parent
    if not os.access(place, os.W_OK):
        read_only = os.statvfs(place).f_flag & os.ST_RDONLY
        why = os.strerror(errno.EROFS) if read_only else "permission denied"
        raise DataError(f"{path}: cannot be written: {why}")


@contextlib.contextmanager
def output_stream(path: str) -> Iterator[BinaryIO]:
    """Context with `path` opened for writing (`-`: standard output); a file appears once everything is written.

    If `path` is a link, its target is replaced; a pipe or device is written to directly.
    """
    if path == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    check_output(path)
    target = _write_target(path)
    if target.exists() and not target.is_file():
        with target.open("wb") as device:
            yield device
        return
    with atomic_file(target) as file:
        yield file


def output_folder(path: str | None) -> Path | None:
    """Return the folder for several texts, created if missing. Raises ConfigError if `path` is a file."""
    if path is None:
        return None
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{path}: is a file; with several outputs, `--output` names a folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_parts(path: str, parts: Iterable[bytes]) -> None:
    """Write the parts of a file one after the other; see output_stream."""
    with output_stream(path) as out:
        out.writelines(parts)


def figure_files(figures: Sequence[Figure], folder: Path, formats: Sequence[str] | None = None) -> list[Path]:
    """Write each figure in the given formats (None: all), and its numbers as CSV; return the files."""
    from ziggurat.inspect.report.drawing import FORMATS, save
    from ziggurat.inspect.report.figure import numbers

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for figure in figures:
        table = folder / f"{figure.key}.csv"
        write_atomically(table, numbers(figure).encode())
        written += [*save(figure, folder, formats or list(FORMATS)), table]
    return written


def refuse_overwriting(output: str | None, *inputs: str | None) -> None:
    """Raise ConfigError if `output` is also one of the `inputs`; `-` means a standard stream, never a file."""
    if not output or output == "-" or not os.path.isfile(output):
        return
    for path in inputs:
        if path and path != "-" and os.path.isfile(path) and os.path.samefile(output, path):
            raise ConfigError(f"{output}: is an input; write to another file")


def check_page(path: str, option: str, *inputs: str | None) -> None:
    """Raise an error unless a page can be written to `path`, given by `option`; only an earlier page is replaced."""
    check_output(path)
    refuse_overwriting(path, *inputs)
    if path != "-" and not may_be_replaced(Path(path)):
        raise ConfigError(
            f"{path}: exists and is not a page that ziggurat wrote; name another file with `{option}`, or remove it"
        )


def read_text(path: str) -> list[str]:
    """Return the lines of a text file, `-` for standard input. Raises DataError if it cannot be read."""
    from ziggurat.translate.text_lines import read_lines

    stream, name = input_stream(path)
    return list(read_lines(stream, name))


def refuse_empty(path: str, lines: Sequence[str]) -> None:
    """Raise DataError for a text without lines."""
    if not lines:
        raise DataError(f"{path}: is empty, so there is nothing to score")


def pair_up(first: tuple[str, list[str]], *others: tuple[str, Sequence[str]]) -> None:
    """Raise DataError unless all texts have the same number of lines; each is given with its path."""
    name, lines = first
    for other_name, other_lines in others:
        if len(other_lines) != len(lines):
            raise DataError(
                f"{name} has {counted(len(lines), 'line')}, but {other_name} has {counted(len(other_lines), 'line')}: "
                "they must pair up line by line"
            )


WHO, HOW, WHAT = "Which model", "Speed", "What to translate"
"""WHO, HOW and WHAT are groups of options in the help."""

Model = Annotated[str, typer.Argument(help="Run or model directory.")]
Tag = Annotated[
    str | None,
    typer.Option(
        "--tag",
        metavar="TAG",
        help="Tag for every line, such as `<bt>`, as in the training corpora.",
        rich_help_panel=WHAT,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
Ensemble = Annotated[
    list[str] | None,
    typer.Option(
        "--ensemble",
        metavar="RUN",
        help="Another model with the same vocabularies, of any architecture; repeatable. Their probabilities are "
        "averaged.",
        rich_help_panel=WHO,
    ),
]
Which = Annotated[
    str | None,
    typer.Option(
        "--which",
        metavar="NAME",
        help="Checkpoint of a run: averaged, best, best-en-de (for one direction), last or an update number.",
        rich_help_panel=WHO,
    ),
]
Checkpoints = Annotated[
    str | None,
    typer.Option(
        "--checkpoints",
        metavar="KIND:N",
        help="Several checkpoints of a run: last:5 (the newest), last-epochs:5 (ends of epochs), around-best:21.",
        rich_help_panel=WHO,
    ),
]
WithoutLayers = Annotated[
    str | None,
    typer.Option(
        "--without-layers",
        metavar="LAYERS",
        help="Leave layers out, such as `encoder.5-8,decoder.3`: faster, but worse unless trained for it "
        "(`layer_drop`). `ziggurat diagnose --layers` measures what each is worth.",
        rich_help_panel=WHO,
    ),
]
Device = Annotated[
    str, typer.Option("--device", metavar="NAME", help="auto, cpu, cuda, cuda:1, ...", rich_help_panel=HOW)
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads", metavar="N", min=1, max=1024, help="CPU threads; default: PyTorch's.", rich_help_panel=HOW
    ),
]


def is_setting(text: str) -> bool:
    """Return True for an argument `key=value`, unless a file or folder has that name."""
    return "=" in text and not os.path.exists(text)  # which accepts text too long for a path


def decoding_settings(overrides: Sequence[str] | None, text_option: str) -> dict[str, Any]:
    """Return decoding settings from `key=value`; `text_option` is the verb's text option, for the message."""
    settings: dict[str, Any] = {}
    for override in overrides or []:
        if "=" not in override:
            shown = printable(override, 4096)  # in full, so that it can be pasted
            raise ConfigError(
                f"`{shown}` is not a decoding setting such as beam_size=8; to translate a file, write "
                f"`{text_option} {shown}`"
            )
        apply_override(settings, override.removeprefix("decoding."))
    return settings
