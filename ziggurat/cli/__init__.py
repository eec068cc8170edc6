"""The command line: parse, call, print. Every verb that prints figures takes `--json`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence

import typer

from ziggurat.cli.hints import option_hint
from ziggurat.errors import ZigguratError, is_full_disk, out_of_memory, why_unwritten

__all__ = ["leaving_at_once", "main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one verb and exit: 0 success, 2 the user's error, 1 ours, 130 Ctrl-C, 128 + n after signal n.

    A reader of the output that goes away, as `head` does, ends it without a word and with 141, as SIGPIPE would.

    Anywhere before a `--`, `--debug` shows the traceback of an error, and `--quiet` or `-q` leaves errors alone on
    standard error.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    end = given.index("--") if "--" in given else len(given)
    options, rest = given[:end], given[end:]
    debug = "--debug" in options
    with _quiet() if {"--quiet", "-q"} & set(options) else contextlib.nullcontext():
        status = _run([option for option in options if option not in ("--debug", "--quiet", "-q")] + rest, debug)
    sys.exit(status)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Context in which ziggurat.cli.output.console shows nothing, in the processes that a verb starts either."""
    before = os.environ.get("ZIGGURAT_QUIET")
    os.environ["ZIGGURAT_QUIET"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["ZIGGURAT_QUIET"]


def _run(arguments: list[str], debug: bool) -> int:
    try:
        with leaving_at_once():
            from ziggurat.cli.app import app
            from ziggurat.cli.output import shell_paths
        status = app(shell_paths(arguments), prog_name="ziggurat", standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except ZigguratError as error:
        return _fail(str(error), 2, debug)
    except (typer.Abort, KeyboardInterrupt):
        return _fail("stopped", 130, False)
    except BrokenPipeError:
        return _reader_gone()
    except SystemExit as stop:  # Typer and rich turn a broken pipe into exit status 1
        if isinstance(stop.__context__, BrokenPipeError):
            return _reader_gone()
        raise
    except ModuleNotFoundError as error:
        missing = {"torch": "PyTorch", "matplotlib": "matplotlib"}.get((error.name or "").partition(".")[0])
        if missing is None:
            raise
        return _fail(f"this needs {missing}, which is not installed: pip install 'ziggurat-mt[train]'", 2, debug)
    except OSError as error:
        if is_full_disk(error):
            return _fail(why_unwritten(error), 2, debug)
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}", 2, debug)
    except Exception as error:
        if out_of_memory(error):
            return _fail("out of memory; use smaller batches (`max_tokens`, `batch_tokens`) or model", 2, debug)
        # Typer's usage errors: it carries click inside in some versions and depends on it in others.
        if hasattr(error, "show") and hasattr(error, "exit_code"):
            error.show()
            if hint := option_hint(error, arguments):
                print(hint, file=sys.stderr)
            return 2
        text = f"internal error: {type(error).__name__}: {error}\nThis is a fault of ziggurat; run again with --debug"
        return _fail(f"{text} and report what it prints.", 1, debug)


@contextlib.contextmanager
def leaving_at_once() -> Iterator[None]:
    """Context for importing: Ctrl-C ends the process there and then, with status 130.

    Modules half loaded would otherwise show a traceback, or Python would lose the KeyboardInterrupt among them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: (os.write(2, b"ziggurat: stopped\n"), os._exit(130)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _reader_gone() -> int:
    """Let what is still buffered go nowhere, or Python complains about it on its way out."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
    return 128 + signal.SIGPIPE


def _fail(message: str, status: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    rank = os.environ.get("RANK")  # of processes that torchrun started
    print(f"ziggurat{f' (process {rank})' if rank else ''}: {message}", file=sys.stderr)
    return status
