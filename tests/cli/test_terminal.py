"""Messages and results whose stream breaks, fills up or disappears: the work continues, with its own exit status."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import multiprocessing
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from tests.cli.conftest import tiny_config
from tests.conftest import forkserver
from tests.train.runs import same_records
from ziggurat.cli import main
from ziggurat.system.terminal import Messages, print_message, signals_waiting, standard_streams
from ziggurat.train.checkpoint import load_checkpoint

UPDATES = 6
SETTINGS = {"threads": 1, "stop": {"updates": UPDATES}, "validation": {"every_updates": 3, "decode": False}}


def broken(number: int) -> None:
    """Make descriptor `number` a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, number)


def full(number: int) -> None:
    """Make descriptor `number` a file on a full disk."""
    os.dup2(os.open("/dev/full", os.O_WRONLY), number)


FAULTS: dict[str, Callable[[int], None]] = {"full": full, "broken": broken, "closed": os.close}


def _ziggurat(arguments: list[str], output: str, faults: dict[int, str], ignored: list[int]) -> None:
    """Act as `ziggurat` with these arguments; standard output goes to a file, and streams have `faults`."""
    os.dup2(os.open(f"{output}.out", os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(os.open(f"{output}.err", os.O_WRONLY | os.O_CREAT), 2)
    for number, fault in faults.items():
        FAULTS[fault](number)
    _default_signals()
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    _fresh_streams()
    main(arguments)


def _default_signals() -> None:
    """React to signals even if the tests run under `nohup`; exit after some minutes if a test leaves it behind."""
    signal.alarm(150)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _fresh_streams() -> None:
    """Set Python's streams as at the start of a process, when a closed one is None."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
            stream = os.fdopen(number, mode, closefd=False, buffering=1 if number == 2 else -1)
            setattr(sys, name, stream)
        except OSError:
            setattr(sys, name, None)


def started(
    arguments: list[str], output: Path, faults: dict[int, str] | None = None, ignored: list[int] | None = None
) -> multiprocessing.Process:
    """Start `ziggurat` in a process forked from one that has imported everything."""
    child = forkserver().Process(target=_ziggurat, args=(arguments, str(output), faults or {}, ignored or []))
    child.start()
    return child  # type: ignore[return-value]


def run_ziggurat(arguments: list[str], output: Path, faults: dict[int, str]) -> tuple[int | None, str, str]:
    """Run `ziggurat`; return its status, its output and its messages."""
    child = started(arguments, output, faults, [])
    child.join(120)
    return child.exitcode, Path(f"{output}.out").read_text(), Path(f"{output}.err").read_text()


@pytest.fixture(scope="module")
def undisturbed_run(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    config = tiny_config(folder, tiny_folder, **SETTINGS)
    assert run_ziggurat(["train", str(config), "--run", str(folder / "run")], folder / "said", {})[0] == 0
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "reason"),
    [("full", "No space left on device"), ("broken", "Broken pipe"), ("closed", "it is closed")],
)
def test_training_continues_without_standard_error(
    fault: str, reason: str, undisturbed_run: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    config, run = tiny_config(tmp_path, tiny_folder, **SETTINGS), tmp_path / "run"
    status, printed, _ = run_ziggurat(
        ["train", str(config), "--run", str(run), "--json"], tmp_path / "said", {2: fault}
    )
    assert status == 0
    assert json.loads(printed)["update"] == UPDATES
    log = (run / "log.txt").read_text()
    assert log.count(f"standard error cannot be written ({reason})") == 1
    assert f"stopped after update {UPDATES}" in log
    same_records(undisturbed_run, run)
    weights = [folder / "last" / "model.safetensors" for folder in (run, undisturbed_run)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "status"), [("broken", 0), ("closed", 0), ("full", 2)])
def test_training_without_standard_output(fault: str, status: int, tiny_folder: Path, tmp_path: Path) -> None:
    """If nobody reads the result, the exit status is that of training; a truncated result in a file is an error."""
    config = tiny_config(tmp_path, tiny_folder, **{**SETTINGS, "stop": {"updates": 1}})
    found, _, messages = run_ziggurat(
        ["train", str(config), "--run", str(tmp_path / "run"), "--json"], tmp_path / "said", {1: fault}
    )
    assert found == status, messages
    assert "internal error" not in messages
    assert ("the run itself is unharmed" if status == 0 else "standard output cannot be written: No space") in messages
    quiet = ["train", "--run", str(tmp_path / "run"), "--resume"]
    assert run_ziggurat(quiet, tmp_path / "again", {1: fault, 2: fault})[0] == 0, "there is nothing to print"


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_other_verbs_and_their_messages(fault: str, undisturbed_run: Path, tiny_folder: Path, tmp_path: Path) -> None:
    """Their output is complete, whatever happens to standard error, and an error still has its exit status."""
    source = tmp_path / "source"
    source.write_text("".join(f"{line}\n" for line in (tiny_folder / "dev.qlo").read_text().splitlines()[:3]))
    verbs = {
        "translate": ["translate", str(undisturbed_run), "-i", str(source)],
        "explain": ["explain", "training.schedule"],
        "prepare": ["prepare", str(tiny_config(tmp_path, tiny_folder)), f"data.store={tmp_path / 'store'}", "--json"],
        "wrong": ["translate", str(tmp_path / "nothing"), "-i", str(source)],
    }
    for name, arguments in verbs.items():
        status, printed, _ = run_ziggurat(arguments, tmp_path / name, {2: fault})
        assert status == (2 if name == "wrong" else 0), name
        assert bool(printed) == (name != "wrong"), name
        if name == "translate":
            assert printed.count("\n") == 3
    assert (tmp_path / "store" / "manifest.json").is_file()
    status, _, messages = run_ziggurat(verbs["explain"], tmp_path / "results", {1: fault})
    assert status == {"full": 2, "broken": 128 + signal.SIGPIPE, "closed": 2}[fault]
    assert "internal error" not in messages
    assert {"full": "No space left", "broken": "", "closed": "standard output is closed"}[fault] in messages


def test_a_closed_standard_input_is_named(undisturbed_run: Path, tmp_path: Path) -> None:
    status, _, messages = run_ziggurat(["translate", str(undisturbed_run)], tmp_path / "said", {0: "closed"})
    assert (status, "standard input is closed" in messages) == (2, True), messages


@pytest.mark.parametrize("terminal", [True, False])
def test_messages_are_wrapped_between_words_only_on_a_terminal(terminal: bool) -> None:
    stream = io.StringIO()
    stream.isatty = lambda: terminal  # type: ignore[method-assign]
    message = "[b] the learning rate still rises " * 5
    print_message(Console(file=stream, width=40), message)
    lines = stream.getvalue().splitlines()
    assert (max(map(len, lines)) <= 40) == terminal == (len(lines) > 1)
    assert " ".join(lines).split() == message.split()


def endless(folder: Path, data: Path) -> Path:
    """Write the configuration of a run that has to be stopped and writes no checkpoint before that."""
    settings = {**SETTINGS, "stop": {"updates": 10**6}, "validation": {"every_updates": 10**6}, "log_every_updates": 1}
    return tiny_config(folder, data, **settings, checkpoint={"every_updates": 10**6})


def wait_for(done: Callable[[], bool], child: multiprocessing.Process) -> None:
    end = time.monotonic() + 60
    while not done() and child.is_alive() and time.monotonic() < end:
        time.sleep(0.02)
    assert done()
    assert child.is_alive()


def updates_of(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


@pytest.mark.slow
def test_sighup_counts_like_sigterm_and_never_as_a_second_signal(tiny_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    child = started(["train", str(endless(tmp_path, tiny_folder)), "--run", str(run)], tmp_path / "said")
    wait_for(lambda: updates_of(run) >= 2, child)
    assert child.pid is not None
    for _ in range(20):  # send more until it has ended
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGHUP)
        time.sleep(0.002)
    child.join(60)
    assert child.exitcode == 128 + signal.SIGHUP
    assert load_checkpoint(run / "last").progress.update >= 2


@pytest.mark.slow
def test_with_nohup_sighup_stays_ignored(tiny_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ["train", str(endless(tmp_path, tiny_folder)), "--run", str(run)]
    child = started(arguments, tmp_path / "said", {}, [signal.SIGHUP])
    wait_for(lambda: updates_of(run) >= 1, child)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGHUP)
    seen = updates_of(run)
    wait_for(lambda: updates_of(run) >= seen + 5, child)
    os.kill(child.pid, signal.SIGTERM)
    child.join(60)
    assert child.exitcode == 128 + signal.SIGTERM


def in_a_terminal(arguments: list[str], slave: str) -> None:
    """Act as `ziggurat` as the first process of its own terminal, as after `ssh -t host ziggurat train`."""
    os.setsid()
    terminal = os.open(slave, os.O_RDWR)
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    for number in (0, 1, 2):
        os.dup2(terminal, number)
    os.close(terminal)
    os.environ["TERM"] = "xterm"
    _default_signals()
    _fresh_streams()
    main(arguments)


@pytest.mark.slow
def test_a_terminal_that_goes_away(tiny_folder: Path, tmp_path: Path) -> None:
    """The terminal has a progress bar. The kernel sends SIGHUP, every message fails with EIO, and the checkpoint is
    written.
    """
    run = tmp_path / "run"
    master, slave = pty.openpty()
    arguments = ["train", str(endless(tmp_path, tiny_folder)), "--run", str(run)]
    child = forkserver().Process(target=in_a_terminal, args=(arguments, os.ttyname(slave)))
    child.start()
    os.set_blocking(master, False)

    def drawn() -> bool:
        with contextlib.suppress(BlockingIOError, OSError):
            os.read(master, 1 << 16)
        return updates_of(run) >= 3

    wait_for(drawn, child)  # type: ignore[arg-type]
    os.close(slave)
    os.close(master)
    child.join(60)
    assert child.exitcode == 128 + signal.SIGHUP
    assert load_checkpoint(run / "last").progress.update >= 3
    log = (run / "log.txt").read_text()
    assert log.count("standard error cannot be written (Input/output error)") == 1
    assert "to resume: `ziggurat train --run" in log


@pytest.mark.slow
def test_python_itself_ends_with_the_status_of_the_verb(tmp_path: Path) -> None:
    """On exit Python flushes what was left in a stream, so this is a separate process that runs to its very end."""
    command = f"{sys.executable} -m ziggurat explain training.schedule"
    for redirection, status in (("2>/dev/full", 0), ("2>&-", 0), (">/dev/full", 2), (">&-", 2)):
        assert subprocess.run(["sh", "-c", f"{command} {redirection}"], capture_output=True).returncode == status
    wrong = f"{sys.executable} -m ziggurat explain nothing.of.that.name"
    for redirection in ("2>/dev/full", "2>&-"):
        assert subprocess.run(["sh", "-c", f"{wrong} {redirection}"], capture_output=True).returncode == 2


def test_a_stream_that_never_fails(capfd: pytest.CaptureFixture[str]) -> None:
    with Path("/dev/full").open("w", buffering=1) as stream:
        messages = Messages(stream)
        assert messages.write("a\n") == 2
        messages.flush()
        assert messages.failure == "No space left on device"
        os.dup2(2, stream.fileno())  # there is room again
        messages.write("heard\n")
    assert "heard" in capfd.readouterr().err
    assert Messages(None).failure == "it is closed"
    messages.write("after it was closed")
    with pytest.raises(TypeError):
        messages.write(b"bytes")  # type: ignore[arg-type]
    before = sys.stderr
    with standard_streams():
        assert isinstance(sys.stderr, Messages)
    assert sys.stderr is before


def test_signals_wait_for_the_former_handlers() -> None:
    """Ray replaces the handlers while it connects."""
    heard: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append("ours"))
    try:
        with signals_waiting():
            signal.signal(signal.SIGTERM, lambda number, frame: heard.append("theirs"))
            # Not to the process, where another thread of the tests would receive it.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
            assert heard == []
        assert heard == ["ours"]
    finally:
        signal.signal(signal.SIGTERM, before)


_LOSES = """
import contextlib, gc, os, signal, sys, time, weakref
import ziggurat.cli

class Node: pass

def in_a_callback():
    node = Node()
    kept = weakref.ref(node, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    del node

def in_a_finaliser():
    class Last:
        def __del__(self): os.kill(os.getpid(), signal.SIGTERM)
    Last()

def where_all_is_caught():
    with contextlib.suppress(BaseException): os.kill(os.getpid(), signal.SIGTERM)
    sys.exit_now = True

def where_all_is_caught_in_a_loop():
    with contextlib.suppress(BaseException): os.kill(os.getpid(), signal.SIGTERM)

def in_a_long_clean_up():
    try: os.kill(os.getpid(), signal.SIGTERM)
    finally:
        for _ in range(120):
            try: raise OSError
            except OSError: time.sleep(0.01)
        print("cleaned up")

def verb(arguments, debug):
    {where}()
    end = time.monotonic() + 60
    while time.monotonic() < end and not hasattr(sys, "exit_now"): time.sleep(0.01)
    print("went on to the end" if time.monotonic() >= end else "caught")
    return 0

def caught(arguments, debug):
    try: return verb(arguments, debug)
    except ziggurat.cli._Ended as ended: return ziggurat.cli._stopped_by(ended.number)
ziggurat.cli._run = caught
ziggurat.cli.main(["nothing"])
"""


@pytest.mark.parametrize(
    "where", ["in_a_callback", "in_a_finaliser", "where_all_is_caught", "where_all_is_caught_in_a_loop"]
)
def test_a_signal_whose_exception_python_drops_still_ends_the_verb(where: str) -> None:
    began = time.monotonic()
    child = subprocess.run([sys.executable, "-c", _LOSES.replace("{where}", where)], capture_output=True, text=True)
    assert time.monotonic() - began < 30  # it would continue for a minute
    assert child.returncode == 128 + signal.SIGTERM
    assert child.stderr == "ziggurat: stopped by SIGTERM\n"  # and there is no "Exception ignored in"
    assert ("caught" in child.stdout) == (where == "where_all_is_caught")


def test_a_signal_is_not_raised_again_in_a_clean_up() -> None:
    program = _LOSES.replace("{where}", "in_a_long_clean_up")
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (child.returncode, child.stdout) == (128 + signal.SIGTERM, "cleaned up\n")
    assert child.stderr == "ziggurat: stopped by SIGTERM\n"
