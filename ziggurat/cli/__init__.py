"""The command line: runs one verb and turns every outcome into a message and an exit status.

The verbs are in ziggurat.cli.app; this module handles signals and broken streams around them.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType

import typer
from rich.console import Console

from ziggurat.cli.hints import command_hint, option_hint, single_hyphen_hint
from ziggurat.system.errors import ZigguratError, is_full_disk, shortage, why_unwritten
from ziggurat.system.terminal import REPEATED, importing, let_go, print_message, safe, standard_streams, why

_CLOSED = "standard output is closed, so results would be lost; redirect it to a file or to /dev/null"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one verb and exit: 0 success, 2 user error, 1 internal error, 130 Ctrl-C, 128 + n after signal n.

    When the reader of the output goes away, as `head` does, the exit status is 141, as after SIGPIPE, and no message is
    printed.

    Anywhere before `--`, the option `--debug` shows the traceback of an error, and `--quiet` or `-q` suppresses all
    messages except errors.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    end = given.index("--") if "--" in given else len(given)
    options, rest = given[:end], given[end:]
    debug = "--debug" in options
    quiet = {"--quiet", "-q"} & set(options)
    words = [option for option in options if option not in ("--debug", "--quiet", "-q")]
    # `train` works without standard output, since its result is the run folder.
    closed = sys.stdout is None and words[:1] != ["train"]
    with _unwinding() as ended, standard_streams(), _quiet() if quiet else contextlib.nullcontext():
        status = _fail(_CLOSED, 2, False) if closed else _run(words + rest, debug)
        if ended and status not in [128 + number for number in ended]:  # some code caught the exception and continued
            status = _stopped_by(ended[0])
    if arguments is None:  # the process is about to exit
        gc.freeze()  # otherwise Python spends a quarter of a second at exit on collecting garbage in PyTorch's modules
    sys.exit(status)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Context in which ziggurat.cli.output.console is silent, including in processes that the verb starts."""
    before = os.environ.get("ZIGGURAT_QUIET")
    os.environ["ZIGGURAT_QUIET"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["ZIGGURAT_QUIET"]
        else:
            os.environ["ZIGGURAT_QUIET"] = before


_EXTRAS = {
    "torch": ("PyTorch", "train"),
    "matplotlib": ("matplotlib", "report"),
    "jinja2": ("jinja2", "report"),
}
"""_EXTRAS maps each optional package to its display name and the extra that installs it."""


def _run(arguments: list[str], debug: bool) -> int:
    """Run a verb and return the exit status; every expected exception becomes a message."""
    if hint := single_hyphen_hint(arguments):
        return _fail(hint, 2, False)
    try:
        with importing():
            from ziggurat.cli.app import app
            from ziggurat.cli.output import shell_paths
        status = app(shell_paths(arguments), prog_name="ziggurat", standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except ZigguratError as error:
        return _fail(_shortage_message(error) or str(error), 2, debug)
    except (typer.Abort, KeyboardInterrupt):
        return _fail("stopped", 130, False)
    except _Ended as ended:
        return _stopped_by(ended.number)
    except BrokenPipeError:
        return _reader_gone()
    except SystemExit as stop:  # Typer and rich turn a broken pipe into exit status 1
        if isinstance(stop.__context__, BrokenPipeError):
            return _reader_gone()
        raise
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in _EXTRAS:
            raise
        missing, extra = _EXTRAS[name]
        return _fail(f"this needs {missing}, which is not installed: pip install 'ziggurat-mt[{extra}]'", 2, debug)
    except OSError as error:
        # An error without a file name may come from standard output: a full disk shows only when the buffer is flushed.
        if error.filename is None and (reason := _unwritten_results()):
            let_go(sys.stdout)
            return _fail(f"standard output cannot be written: {reason}", 2, debug)
        if is_full_disk(error):
            return _fail(why_unwritten(error), 2, debug)
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}", 2, debug)
    except Exception as error:
        if message := _shortage_message(error):
            return _fail(message, 2, debug)
        # Typer's usage errors, recognised by their attributes: some versions depend on click, others contain a copy.
        if hasattr(error, "show") and hasattr(error, "exit_code"):
            error.show()
            if hint := option_hint(error, arguments) or command_hint(error, arguments):
                print(hint, file=sys.stderr)
            return 2
        text = f"internal error: {type(error).__name__}: {error}\nThis is a bug in ziggurat; run again with --debug"
        return _fail(f"{text} and report the output.", 1, debug)


class _Ended(BaseException):
    """A stop signal arrived. It is not an Exception, so no `except Exception` can swallow it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


_AGAIN_SECONDS = 0.5
"""_AGAIN_SECONDS is the interval after which a signal raises its exception again, unless handled by then."""


@contextlib.contextmanager
def _unwinding() -> Iterator[list[int]]:
    """Context in which stop signals raise an exception, as Ctrl-C does, so that temporary files are removed.

    Yields a list that receives the number of each signal. Python drops an exception raised inside a weakref callback or
    a `__del__`, and other code may catch all exceptions, so it is raised again every half second unless a clean-up that
    it triggered is still running.

    A second SIGTERM ends the process at once; a second one of `REPEATED` is ignored. Under torchrun all signals keep
    their default action: a process that waits for others in C++ would not run Python's handler.
    """
    ended: list[int] = []
    if threading.current_thread() is not threading.main_thread() or "RANK" in os.environ:
        yield ended
        return

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN if number in REPEATED else signal.SIG_DFL)
        ended.append(number)
        if alarm:
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS, _AGAIN_SECONDS)
        raise _Ended(number)

    def end_again(number: int, frame: FrameType | None) -> None:
        handled = sys.exception()
        while handled is not None and not isinstance(handled, _Ended):
            handled = handled.__context__
        if handled is None:
            raise _Ended(ended[0])

    def dropped(unraisable: sys.UnraisableHookArgs) -> None:
        if not isinstance(unraisable.exc_value, _Ended):
            before(unraisable)

    # Any other handler belongs to a program that calls ziggurat, or to nohup, which ignores SIGHUP.
    free = [number for number in (signal.SIGTERM, *REPEATED) if signal.getsignal(number) is signal.SIG_DFL]
    alarm = bool(free) and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    before, sys.unraisablehook = sys.unraisablehook, dropped
    for number in free:
        signal.signal(number, end)
    if alarm:
        signal.signal(signal.SIGALRM, end_again)
    try:
        yield ended
    finally:
        if alarm:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        sys.unraisablehook = before
        for number in free:
            if signal.getsignal(number) is not signal.SIG_IGN:  # another one may still arrive
                signal.signal(number, signal.SIG_DFL)


def _stopped_by(number: int) -> int:
    """Report which signal ended the verb; return the exit status."""
    signal.setitimer(signal.ITIMER_REAL, 0)  # the exception got through
    return _fail(f"stopped by {signal.Signals(number).name}", 128 + number, False)


def _shortage_message(error: Exception) -> str | None:
    """Return a message for an error caused by too little memory or too few threads, unless its own message says so."""
    lack = shortage(error)
    if lack is None or (isinstance(error, ZigguratError) and "memory" in str(error)):
        return None
    if lack == "memory":
        return "out of memory; use smaller batches (`max_tokens`, `batch_tokens`) or model"
    return "the system allows no more threads: out of memory, or a limit (`ulimit -v`, `ulimit -u`, the container's)"


def _reader_gone() -> int:
    """Return the exit status after SIGPIPE; unwritten output is dropped."""
    let_go(sys.stdout)
    return 128 + signal.SIGPIPE


def _unwritten_results() -> str | None:
    """Return why standard output cannot be flushed; None if it can."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError) as error:
        return why(error)
    return None


def _fail(message: str, status: int, debug: bool) -> int:
    """Print an error message, and with `debug` the traceback; return `status`."""
    if debug:
        traceback.print_exc()
    rank = os.environ.get("RANK")  # set in processes that torchrun starts
    print_message(safe(Console(stderr=True)), f"ziggurat{f' (process {rank})' if rank else ''}: {message}")
    return status
