"""Translation with several processes, and their pool."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cli.conftest import Ziggurat
from tests.cli.conftest import trained as trained
from tests.cli.conftest import ziggurat as ziggurat
from ziggurat.config import DecodingConfig
from ziggurat.system.errors import CheckpointError, ConfigError, DataError
from ziggurat.system.processes import in_order, worker_pool
from ziggurat.translate import translator
from ziggurat.translate.results import TranslationWarning
from ziggurat.translate.translator import load_translator, open_workers

SHORT: dict[str, Any] = {"max_length": {"limit": 6}, "min_length": 0}
LINES = ["Su divusim ne gokun.", "Madona dogun.", "", "dogun su " * 9, "Ne madona.", " ", "Gokun!"]


def running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_they_give_the_results_of_one_process(trained: Path) -> None:
    drawing = {**SHORT, "search": "sample", "seed": 3, "temperature": 1.5}
    beside = {"prefixes": ["go", *[""] * 6], "first": 11, "max_source_pieces": 12}
    wanted = {"constraints": [[], ["di", "go"], *[[]] * 5], "terminology": {"Gokun": "su"}}
    one = load_translator(trained, device="cpu", **SHORT)
    with open_workers(trained, workers=2, threads=2, device="cpu", **SHORT) as several:
        assert several.origin == f"{one.origin}; 2 workers"
        options: dict[str, Any]
        for options in (beside, wanted, drawing):
            with pytest.warns(TranslationWarning) as expected:
                alone = list(one.translate_stream(LINES, window=2, **options))
            several.notices.clear()
            several.notices.told.clear()
            with pytest.warns(TranslationWarning) as caught:
                assert list(several.translate_stream(LINES, window=2, **options)) == alone
            assert [str(w.message) for w in caught] == [str(w.message) for w in expected]
            assert +several.notices == +one.notices
            one.notices.clear()
            one.notices.told.clear()


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_settings_are_refused_before_any_text_is_read(trained: Path, tmp_path: Path) -> None:
    unread: Iterator[str] = iter(LINES)
    with open_workers(trained, workers=2, device="cpu", **SHORT) as several:
        with pytest.raises(ConfigError, match="unknown tag '<xy>'"):
            several.translate_stream(unread, tag="<xy>")
        with pytest.raises(ConfigError, match="`window` must be at least 1"):
            several.translate_stream(unread, window=0)
        with pytest.raises(ConfigError, match=r"need `decoding\.beam_size` of at least 2"):
            several.translate_stream(unread, constraints=iter([["a"]]), beam_size=1)
        assert len(list(unread)) == len(LINES)
        with pytest.raises(DataError, match="prefixes: 1 lines, but there are more"):
            list(several.translate_stream(LINES, window=1, prefixes=["a"]))
    with pytest.raises(CheckpointError, match="nothing"), open_workers(tmp_path / "nothing", workers=2):
        pass


def test_results_keep_the_order_with_few_tasks_at_a_time() -> None:
    under_way: list[Future[int]] = []
    most = 0

    def start(task: int) -> Future[int]:
        nonlocal most
        future: Future[int] = Future()
        under_way.append(future)
        most = max(most, len(under_way))
        if len(under_way) == 4 or task == 17:
            for number, waiting in enumerate(reversed(under_way)):  # the task that starts last ends first
                if not waiting.done():
                    waiting.set_result(task - number)
        return future

    given = []
    for result in in_order(start, range(18), 4):
        under_way.pop(0)
        given.append(result)
    assert given == list(range(18))
    assert most == 4


def test_results_before_an_unreadable_line_come_first() -> None:
    def tasks() -> Iterator[int]:
        yield from range(5)
        raise DataError("line 6")

    def start(task: int) -> Future[int]:
        future: Future[int] = Future()
        future.set_result(task)
        return future

    results = in_order(start, tasks(), 3)
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(DataError, match="line 6"):
        next(results)


@pytest.mark.usefixtures("forked_workers")
def test_a_dead_worker_is_one_plain_error() -> None:
    def wait_for_the_dead() -> None:
        with worker_pool(2, way_out="use fewer") as submit:
            submit(time.sleep, 60)
            submit(os._exit, 9).result()

    with pytest.raises(DataError, match=r"a worker process was killed.*: use fewer$") as caught:
        wait_for_the_dead()
    assert caught.value.__suppress_context__


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("ending", [KeyboardInterrupt, BrokenPipeError])
def test_the_end_of_the_block_ends_the_workers(ending: type[BaseException]) -> None:
    seen: list[int] = []

    def work() -> None:
        with worker_pool(1, way_out="") as submit:
            seen.append(submit(os.getpid).result())
            assert running(seen[0])
            submit(time.sleep, 60)
            raise ending

    with pytest.raises(ending):
        work()
    assert not running(seen[0])


WORKING = """
import time
from ziggurat.system.processes import worker_pool
if __name__ == "__main__":
    with worker_pool(2, way_out="") as submit:
        asked = [submit(time.sleep, seconds) for seconds in (0.0, 0.0, 600.0, 600.0)]
        {then}
        print("now", flush=True)
        time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("then", ["pass", "asked[0].result()"], ids=["while they start", "at work"])
def test_no_worker_outlives_a_killed_process(then: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(WORKING.replace("{then}", then))
    root = Path(__file__).resolve().parents[2]
    parent = subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(root)}
    )
    assert parent.stdout is not None
    with parent.stdout:
        assert parent.stdout.readline() == b"now\n"
        children = psutil.Process(parent.pid).children(recursive=True)
        assert len(children) >= 2
        parent.kill()
        parent.wait()
    left = psutil.wait_procs(children, timeout=20)[1]
    for child in left:
        child.kill()
    assert left == []


@pytest.mark.usefixtures("forked_workers")
def test_the_verb_takes_them(ziggurat: Ziggurat, trained: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes("".join(line + "\n" for line in LINES).encode() + b"\xff\n")
    arguments = [
        "translate",
        trained,
        "max_length.limit=6",
        "-i",
        text,
        "--window",
        3,
        "--threads",
        1,
        "--device",
        "cpu",
    ]
    with warnings.catch_warnings():
        alone, several = ziggurat(*arguments), ziggurat(*arguments, "--workers", 2)
    assert alone.status == several.status == 2
    assert several.out == alone.out
    assert len(several.out.splitlines()) == len(LINES)
    assert "line 8: not valid UTF-8" in several.err
    assert "; 2 workers" in several.err
    refused = ziggurat("translate", trained, "-i", text, "--window", 1, "--workers", 2)
    assert refused.status == 2
    assert "several `--workers` read ahead" in refused.err


def test_an_automatic_precision_is_chosen_once_for_all_workers(trained: Path) -> None:
    """Measurements by several workers could differ, so later workers get the result of the first."""
    asked: list[dict[str, Any]] = []

    def submit(function: Callable[..., Any], opening: translator._Opening, *arguments: Any) -> Future[Any]:
        asked.append(dict(opening.decoding))
        done: Future[Any] = Future()
        if function is translator._introduce:
            done.set_result((DecodingConfig(precision="bfloat16"), "a model", "en", {True: "chosen"}))
        else:
            done.set_result(([], {}, {}))
        return done

    opening = translator._Opening((str(trained),), 2, 2, None, None, "cpu", {"precision": "auto", "beam_size": 2})
    several = translator.WorkerTranslator(submit, opening)
    assert list(several.translate_stream(["Su."])) == []
    assert several.about_precision(True) == "chosen"
    assert asked[0] == {"precision": "auto", "beam_size": 2}
    assert asked[1:] == [{"precision": "bfloat16", "beam_size": 2}] * 2
    # The first worker recognises its model by all other settings, and does not load it again.
    assert replace(opening, decoding={"precision": "bfloat16"}) == opening
    assert hash(replace(opening, decoding={"precision": "bfloat16"})) == hash(opening)
