"""Input and output of the verbs, and the options that several of them share.

Messages and progress bars go to standard error, results to standard output. A file appears when it is complete, or not
at all. Paths are checked before the work begins, since loading a model takes seconds.
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
"""Names of the option that says where to write, for every verb; some verbs called it `--out` before version 0.2."""

QUIET = "ZIGGURAT_QUIET"
"""Environment variable set by `--quiet`: the processes that a verb starts inherit it and are quiet too."""

_COUNTED_BYTES = 1 << 28  # counting the lines of a larger file would keep people waiting

_of_bars: list[Console] = []  # the console of the progress bars on the screen, innermost last


# Messages and progress


def console() -> Console:
    """Return the console for messages: standard error, where a failed write is ignored; silent with `--quiet`.

    While a progress bar is shown, it is the bar's console: it prints above the bar, where another console would print
    into the bar's line.
    """
    if _of_bars:
        return _of_bars[-1]
    return safe(Console(stderr=True, quiet=QUIET in os.environ))


def say(text: str) -> None:
    """Print a message on standard error as it is: no markup, no colours; nothing with `--quiet`."""
    print_message(console(), text)


@contextlib.contextmanager
def progress_bars(*columns: ProgressColumn, shown: bool = True) -> Iterator[Progress]:
    """Context with progress bars on standard error, removed at the end; none unless that is a terminal and `shown`."""
    screen = console()
    with Progress(*columns, console=screen, transient=True, disable=not (shown and screen.is_terminal)) as bars:
        _of_bars.append(screen)
        try:
            yield bars
        finally:
            _of_bars.remove(screen)


class PhaseBars:
    """One progress bar per phase of a verb; off a terminal one message per phase. `once`: only the latest is shown."""

    def __init__(self, bars: Progress, *, once: bool = False) -> None:
        self._bars, self._once = bars, once
        self._tasks: dict[str, TaskID] = {}

    def show(self, phase: str, done: int, total: int | None) -> None:
        """Show how much of a phase is done; `total` is None where it is not known."""
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

    `total` is None where it is not known.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _LineRate(), TimeRemainingColumn())
    with progress_bars(*columns, shown=shown) as bars:
        bar = bars.add_task(task, total=total)
        yield lambda count: bars.advance(bar, count)


def is_first_process() -> bool:
    """Return True in the process that prints for all that torchrun started, and where there is no torchrun."""
    return os.environ.get("RANK", "0") == "0"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: `1 line`, `2,000 lines`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def print_json(document: Any) -> None:
    """Print one JSON document on standard output; numbers that JSON does not have are null."""
    print(json.dumps(json_safe(document), ensure_ascii=False, indent=2, allow_nan=False))


# Paths and files


def line_count(path: str) -> int | None:
    """Return the number of lines of a text file; None where counting takes long: a stream, a packed or huge file."""
    if path == "-" or not os.path.isfile(path) or compression_of(Path(path)) or os.path.getsize(path) > _COUNTED_BYTES:
        return None
    with open(path, "rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def shell_paths(arguments: Sequence[str]) -> list[str]:
    """Return arguments with `~/` expanded where the shell does not do it: in quotes and after `=`.

    Raises ConfigError for an unexpanded `$NAME/...`, since a folder literally called `$NAME` would be created.
    """
    expanded = []
    for argument in arguments:
        name, equals, value = argument.partition("=") if "=" in argument else ("", "", argument)
        if (found := re.match(r"(\$(?:\{\w+\}|[A-Za-z_]\w*))(?:/|$)", value)) and not os.path.lexists(value):
            raise ConfigError(
                f"`{printable(argument)}`: the shell did not replace `{found[1]}`, as in single quotes; "
                "use double quotes, or write out the path"
            )
        expanded.append(f"{name}{equals}{os.path.expanduser(value)}" if re.match(r"~(/|$)", value) else argument)
    return expanded


def check_input(path: str) -> None:
    """Raise DataError unless `path` can be read as a file (`-`: standard input)."""
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
    """Raise ConfigError where several inputs are standard input, which can be read once."""
    if paths.count("-") > 1:
        raise ConfigError("only one of the inputs can be standard input (`-`)")


def input_stream(path: str) -> tuple[BinaryIO, str]:
    """Return `path` opened for reading (`-`: standard input; .gz, .xz, .zst are unpacked) and its name in messages."""
    check_input(path)
    if path == "-":
        return sys.stdin.buffer, "standard input"
    return byte_stream(Path(path)), path


def file_named(path: str) -> str:
    """Return a path to write by a verb whose standard output is its report: `-` is a file of this name."""
    return "./-" if path == "-" else path


def _write_target(path: str) -> Path:
    """Return the path to write to: links are followed to the file, but a pipe or device keeps the given name.

    The shell's `>(gzip > x.gz)` and /dev/stdout are links whose target has no name in the file system: they can be
    opened, but not resolved.
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
        raise DataError(f"{path}: is written as plain text, not packed: name it {target.stem}")
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

    Of a link the target is replaced, not the link itself; a pipe or device is written to directly.
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
    """Return the folder for several texts, created if missing. Raises ConfigError when a file is in its place."""
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
    """Write each figure, in all formats unless some are named, and its numbers as CSV; return the files."""
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
    """Raise ConfigError when `output` is also one of the `inputs`; `-` means a standard stream, never a file."""
    if not output or output == "-" or not os.path.isfile(output):
        return
    for path in inputs:
        if path and path != "-" and os.path.isfile(path) and os.path.samefile(output, path):
            raise ConfigError(f"{output}: is an input; write to another file")


def check_page(path: str, option: str, *inputs: str | None) -> None:
    """Raise an error unless a page can be written at `path`, named by `option`, in place of at most another page."""
    check_output(path)
    refuse_overwriting(path, *inputs)
    if path != "-" and not may_be_replaced(Path(path)):
        raise ConfigError(
            f"{path}: is there already, and is not a page that ziggurat wrote; name another file with `{option}`, or "
            "remove it"
        )


def read_text(path: str) -> list[str]:
    """Return the lines of a text file, `-` for standard input. Raises DataError when it cannot be read."""
    from ziggurat.translate.results import read_lines

    stream, name = input_stream(path)
    return list(read_lines(stream, name))


def refuse_empty(path: str, lines: Sequence[str]) -> None:
    """Raise DataError for a text without any line, of which nothing can be scored."""
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
"""Groups of options in the help of verbs."""

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
        help="Another model with the same vocabularies, of any architecture; repeat for more. Their probabilities are "
        "averaged.",
        rich_help_panel=WHO,
    ),
]
Which = Annotated[
    str | None,
    typer.Option(
        "--which",
        metavar="NAME",
        help="Checkpoint of a run: averaged, best, best-en-de (of a direction), last or an update's number.",
        rich_help_panel=WHO,
    ),
]
Checkpoints = Annotated[
    str | None,
    typer.Option(
        "--checkpoints",
        metavar="KIND:N",
        help="Several checkpoints of a run: last:5 (the newest), last-epochs:5 (that end an epoch), around-best:21.",
        rich_help_panel=WHO,
    ),
]
WithoutLayers = Annotated[
    str | None,
    typer.Option(
        "--without-layers",
        metavar="LAYERS",
        help="Leave layers out, such as `encoder.5-8,decoder.3`: faster, and worse unless trained for it "
        "(`layer_drop`). `ziggurat diagnose --layers` tells what each is worth.",
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
    return "=" in text and not os.path.exists(text)  # which takes what is too long for a path, as a setting may be


def decoding_settings(overrides: Sequence[str] | None, text_option: str) -> dict[str, Any]:
    """Return decoding settings from `key=value`; `text_option` is the verb's option for the text, for the message."""
    settings: dict[str, Any] = {}
    for override in overrides or []:
        if "=" not in override:
            shown = printable(override, 4096)  # in full, so that it can be copied
            raise ConfigError(
                f"`{shown}` is not a decoding setting such as beam_size=8; to translate a file, write "
                f"`{text_option} {shown}`"
            )
        apply_override(settings, override.removeprefix("decoding."))
    return settings
