"""The command line: parse, call, print. Every verb that prints figures takes `--json`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType

import typer

from ziggurat.cli.hints import option_hint
from ziggurat.errors import ZigguratError, is_full_disk, shortage, why_unwritten
from ziggurat.terminal import let_go, say_at_once, standard_streams, why

__all__ = ["leaving_at_once", "main"]


_CLOSED = "standard output is closed, so results would be lost; redirect it to a file, or to /dev/null"


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
    quiet = {"--quiet", "-q"} & set(options)
    words = [option for option in options if option not in ("--debug", "--quiet", "-q")]
    closed = sys.stdout is None and words[:1] != ["train"]  # whose result is the run, not what it prints
    with _unwinding(), standard_streams(), _quiet() if quiet else contextlib.nullcontext():
        status = _fail(_CLOSED, 2, False) if closed else _run(words + rest, debug)
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
        return _fail(_lacking(error) or str(error), 2, debug)
    except (typer.Abort, KeyboardInterrupt):
        return _fail("stopped", 130, False)
    except _Ended as ended:
        return _fail(f"stopped by {signal.Signals(ended.number).name}", 128 + ended.number, False)
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
        if error.filename is None and (reason := _unwritten_results()):
            let_go(sys.stdout)
            return _fail(f"standard output cannot be written: {reason}", 2, debug)
        if is_full_disk(error):
            return _fail(why_unwritten(error), 2, debug)
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}", 2, debug)
    except Exception as error:
        if lacking := _lacking(error):
            return _fail(lacking, 2, debug)
        # Typer's usage errors: it carries click inside in some versions and depends on it in others.
        if hasattr(error, "show") and hasattr(error, "exit_code"):
            error.show()
            if hint := option_hint(error, arguments):
                print(hint, file=sys.stderr)
            return 2
        text = f"internal error: {type(error).__name__}: {error}\nThis is a fault of ziggurat; run again with --debug"
        return _fail(f"{text} and report what it prints.", 1, debug)


class _Ended(BaseException):
    """SIGTERM or SIGHUP came; not an Exception, so that nobody takes it for an error to go on after."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def _unwinding() -> Iterator[None]:
    """Context in which SIGTERM and SIGHUP go the way of Ctrl-C, so that temporary files go; a second one ends at once.

    But for a second SIGHUP: the shell and the kernel both tell that the terminal is gone. Under torchrun both end the
    process as ever: one that waits for others in C++ would not hear them.
    """
    if threading.current_thread() is not threading.main_thread() or "RANK" in os.environ:
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else signal.SIG_DFL)
        raise _Ended(number)

    # Others are somebody else's, whose program calls ziggurat, or nohup's, which ignores SIGHUP.
    free = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in free:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in free:
            if signal.getsignal(number) is not signal.SIG_IGN:  # SIGHUP comes once more, perhaps on the way out
                signal.signal(number, signal.SIG_DFL)


def _lacking(error: Exception) -> str | None:
    """Return what to say of an error that comes of too little memory, or too few threads, and does not say so."""
    lack = shortage(error)
    if lack is None or (isinstance(error, ZigguratError) and "memory" in str(error)):
        return None
    if lack == "memory":
        return "out of memory; use smaller batches (`max_tokens`, `batch_tokens`) or model"
    return "the system gives no more threads: out of memory, or a limit (`ulimit -v`, `ulimit -u`, the container's)"


@contextlib.contextmanager
def leaving_at_once() -> Iterator[None]:
    """Context for importing: Ctrl-C and SIGTERM end the process there and then, with status 130 and 143.

    Modules half loaded would otherwise show a traceback, or Python would lose the KeyboardInterrupt among them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _leave) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    say_at_once("ziggurat: stopped\n")
    os._exit(128 + number)


def _reader_gone() -> int:
    """End as SIGPIPE would: nobody reads the results any more."""
    let_go(sys.stdout)
    return 128 + signal.SIGPIPE


def _unwritten_results() -> str | None:
    """Return why standard output does not take what it still holds; None when it does, or holds nothing."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError) as error:
        return why(error)
    return None


def _fail(message: str, status: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    rank = os.environ.get("RANK")  # of processes that torchrun started
    print(f"ziggurat{f' (process {rank})' if rank else ''}: {message}", file=sys.stderr)
    return status
