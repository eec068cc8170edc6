"""The engine: every line gets its own translation, whichever lines enter, leave or fail meanwhile."""

from __future__ import annotations

import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.translate.doubles import CopyModel
from tests.vocabulary import SENTENCES, trained_tokenizer
from ziggurat.config import DecodingConfig
from ziggurat.data.subword import SentencePieceTokenizer
from ziggurat.serve import engine as engine_module
from ziggurat.serve.engine import Engine, ModelFailed, Opened
from ziggurat.serve.queue import DeadlineExceeded, FairQueue, QueuedLine
from ziggurat.system.errors import ConfigError, DataError
from ziggurat.translate.options import TranslateOptions
from ziggurat.translate.results import Translation
from ziggurat.translate.translator import Translator

LINES = [line for line in SENTENCES if line]


@pytest.fixture(scope="module")
def tokenizer() -> SentencePieceTokenizer:
    return trained_tokenizer(SENTENCES, 360, ["<bt>", "<new>"])


@pytest.fixture(scope="module")
def copying(tokenizer: SentencePieceTokenizer) -> Translator:
    """A translator that returns its source."""
    model = CopyModel(tokenizer.size + 2, tokenizer.eos, frozenset(tokenizer.tags.values()))
    return Translator(model, tokenizer, tokenizer, DecodingConfig(beam_size=2))  # type: ignore[arg-type]


class Asker:
    """Puts lines into an engine's queue, and collects the results."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.results: dict[int, Translation | Exception] = {}
        self.all = threading.Condition()
        self.asked = 0

    def ask(self, text: str, client: str = "c", seconds: float = 60.0, **more: Any) -> QueuedLine:
        number, self.asked = self.asked, self.asked + 1

        def done(result: Translation | Exception) -> None:
            with self.all:
                assert number not in self.results, "answered twice"
                self.results[number] = result
                self.all.notify_all()

        queued = QueuedLine(
            text, client, more.pop("options", TranslateOptions()), time.monotonic() + seconds, done, **more
        )
        self.engine.queue.put([queued])
        return queued

    def wait(self, count: int | None = None) -> list[Translation | Exception]:
        wanted = self.asked if count is None else count
        with self.all:
            assert self.all.wait_for(lambda: len(self.results) >= wanted, timeout=60), self.results
        return [self.results[number] for number in sorted(self.results)]


def texts(results: list[Translation | Exception]) -> list[str]:
    return [result.text if isinstance(result, Translation) else repr(result) for result in results]


Make = Callable[..., Asker]


@pytest.fixture
def make(copying: Translator) -> Iterator[Make]:
    engines: list[Engine] = []

    def build(opening: Callable[[], Opened] | None = None, version: Callable[[], object] = lambda: 1) -> Asker:
        engine = Engine("m", opening or (lambda: Opened(copying, 1)), version, FairQueue(1000))
        engines.append(engine)
        return Asker(engine)

    yield build
    for engine in engines:
        assert engine.close(30)


def test_every_line_gets_its_own_translation(make: Make) -> None:
    asker = make()
    wanted = [f"{LINES[n % len(LINES)]} {n}" for n in range(60)]

    def some(part: int) -> None:
        for text in wanted[part::4]:
            asker.ask(text, f"client {part}")
            time.sleep(0.002)

    order = [n for part in range(4) for n in range(part, 60, 4)]
    for part in range(4):  # the caller's numbers follow the order of the requests
        some(part)
    assert texts(asker.wait()) == [wanted[n] for n in order]
    state = asker.engine.state
    assert (state.status, state.lines, state.live, asker.engine.busy) == ("ready", 60, 0, False)
    assert state.tokens > 200


def test_lines_with_different_options_are_separated(make: Make) -> None:
    asker = make()
    for n in range(12):
        phrase = (LINES[0].split()[0],) if n % 3 == 2 else ()
        options = (TranslateOptions(), TranslateOptions(n_best=2), TranslateOptions(constrained=True))[n % 3]
        asker.ask(LINES[n % 2], options=options, constraints=phrase)
    results = asker.wait()
    for n, result in enumerate(results):
        assert isinstance(result, Translation)
        assert len(result.hypotheses) == (2 if n % 3 == 1 else 1)
        assert (result.hypotheses[0].unmet_constraints is not None) == (n % 3 == 2)


def test_cancelled_and_late_lines_get_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    asker = make(lambda: (gate.wait(30), Opened(asker.translator, 1))[1])  # type: ignore[attr-defined]
    asker.translator = make().engine._opening().translator  # type: ignore[attr-defined]
    asked = [asker.ask(line, seconds=0.05 if n == 1 else 60) for n, line in enumerate(LINES[:4])]
    asked[2].cancel()
    time.sleep(0.1)
    gate.set()
    results = asker.wait(3)
    assert sorted(asker.results) == [0, 1, 3]
    assert [type(result) for result in results] == [Translation, DeadlineExceeded, Translation]


def test_a_line_at_fault_does_not_harm_others(make: Make) -> None:
    asker = make()
    asker.ask("a", options=TranslateOptions(tag="<no>"))
    asker.ask(LINES[0])
    failed, done = asker.wait()
    assert isinstance(failed, ConfigError)
    assert "unknown tag" in str(failed)
    assert texts([done]) == [LINES[0]]


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        (TranslateOptions(n_best=2, next_words=True), "prefix"),
        (TranslateOptions(constrained=True), "constraints"),
    ],
    ids=["next words", "soft terms"],
)
def test_a_line_at_fault_does_not_harm_others_of_its_batch(
    options: TranslateOptions, asked: str, make: Make, copying: Translator
) -> None:
    gate = threading.Event()
    asker = make(lambda: (gate.wait(30), Opened(copying, 1))[1])
    good = LINES[0].split()[0]
    for client, phrase in (("a", good), ("b", good * 3000), ("c", good)):
        wanted = replace(options, prefix=phrase) if asked == "prefix" else options
        more: dict[str, Any] = {"options": wanted, **({"constraints": (phrase,)} if asked == "constraints" else {})}
        asker.ask(LINES[0], client, **more)
    gate.set()
    first, failed, last = asker.wait()
    assert isinstance(failed, DataError)
    assert re.search(r"prefix and constraints have \d+ tokens, but at most \d+ .*; shorten them", str(failed))
    assert texts([first, last]) == [LINES[0]] * 2
    assert (asker.engine.state.failures, asker.engine.state.lines, asker.engine.busy) == (0, 2, False)


def test_a_model_that_fails_is_tried_again(make: Make, copying: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_RETRY", (0.05, 0.05))
    broken = [True]

    def opening() -> Opened:
        if broken[0]:
            raise ConfigError("damaged weights")
        return Opened(copying, 1)

    asker = make(opening)
    asker.ask("a")
    (failed,) = asker.wait()
    assert isinstance(failed, ModelFailed)
    assert "could not be opened" in str(failed)
    assert "damaged weights" not in str(failed)  # it may contain paths
    assert (asker.engine.state.status, asker.engine.busy) == ("failed", False)
    broken[0] = False
    time.sleep(0.1)
    asker.ask(LINES[0])
    assert texts(asker.wait())[1] == LINES[0]
    assert (asker.engine.state.status, asker.engine.state.reason) == ("ready", "")


def test_a_step_that_fails_ends_only_the_lines_under_way(
    make: Make, copying: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copying.model
    step, times = model.step, [0]

    def failing(*arguments: Any) -> Any:
        times[0] += 1
        if times[0] == 3:
            raise RuntimeError("out of memory, say")
        return step(*arguments)

    monkeypatch.setattr(model, "step", failing)
    asker = make()
    asker.ask(LINES[0])
    (failed,) = asker.wait()
    assert isinstance(failed, ModelFailed)
    assert "out of memory, say" not in str(failed)
    assert asker.engine.state.live == 0
    asker.ask(LINES[1])
    assert texts(asker.wait())[1] == LINES[1]
    assert asker.engine.state.status == "ready"


def test_out_of_memory_reduces_the_number_of_lines_at_a_time(
    make: Make, copying: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "MOST_LINES", 32)
    step, live = copying.model.step, list[int]()

    def cramped(tokens: Any, state: Any) -> Any:
        live.append(len(tokens))
        if len(tokens) > 4:
            raise RuntimeError("CUDA error: out of memory")
        return step(tokens, state)

    gate = threading.Event()
    monkeypatch.setattr(copying.model, "step", cramped)
    asker = make(lambda: (gate.wait(30), Opened(copying, 1))[1])
    for number in range(64):
        asker.ask(f"{LINES[0]} {number}")
    gate.set()
    results = asker.wait()
    assert [n for n, found in enumerate(results) if isinstance(found, ModelFailed)] == list(range(32 + 16 + 8))
    assert texts(results[56:]) == [f"{LINES[0]} {number}" for number in range(56, 64)]
    assert sorted(set(live), reverse=True)[:4] == [32, 16, 8, 4]
    # More failures in a row than close a model, but this model was never lost.
    assert (asker.engine.state.status, asker.engine.state.failures) == ("ready", 3)


def test_a_model_that_fails_each_time_is_opened_again_and_ready_only_when_it_translates(
    make: Make, copying: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_RETRY", (0.0, 0.0))
    broken, opened, step, meanwhile = [True], [0], copying.model.step, list[str]()

    def opening() -> Opened:
        opened[0] += 1
        return Opened(copying, 1)

    def failing(*arguments: Any) -> Any:
        if broken[0]:
            meanwhile.append(asker.engine.state.status)
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return step(*arguments)

    monkeypatch.setattr(copying.model, "step", failing)
    asker, found = make(opening), []
    for _ in range(5):
        asker.ask(LINES[0])
        assert all(isinstance(result, ModelFailed) for result in asker.wait())
        found.append((asker.engine.state.status, opened[0]))
    # The third failure closes it. Opening alone does not prove that it works.
    assert found == [("ready", 1), ("ready", 1), ("failed", 1), ("failed", 2), ("failed", 3)]
    assert meanwhile == ["ready", "ready", "ready", "failed", "failed"]
    assert "3 times without a translation" not in asker.engine.state.reason
    assert "5 times without a translation" in asker.engine.state.reason
    broken[0] = False
    asker.ask(LINES[0])
    assert texts(asker.wait()[-1:]) == [LINES[0]]
    assert (asker.engine.state.status, asker.engine.state.reason) == ("ready", "")


def test_a_changed_model_is_loaded_again_and_no_line_is_lost(
    make: Make, copying: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_CHANGED", 0.01)
    version, opened = [1], []

    def opening() -> Opened:
        opened.append(version[0])
        if version[0] == 2:
            raise ConfigError("half-written")
        return Opened(copying, version[0])

    asker = make(opening, lambda: version[0])
    asked = 0
    for version[0] in (1, 2, 3):
        least = asked + 30
        while asked < least or (version[0] not in opened and asked < 900):  # it checks only while it translates
            asker.ask(f"{LINES[asked % 5]} {asked}")
            asked += 1
            time.sleep(0.003)
    assert texts(asker.wait()) == [f"{LINES[n % 5]} {n}" for n in range(asked)]
    assert opened[0] == 1
    assert {2, 3} <= set(opened)  # the half-written model was tried, and the old one stayed
    assert asker.engine.state.reloads == opened.count(3) >= 1


def test_unloading_waits_for_current_lines(make: Make) -> None:
    asker = make()
    for n in range(20):
        asker.ask(f"{LINES[0]} {n}")
    asker.engine.unload()
    assert texts(asker.wait()) == [f"{LINES[0]} {n}" for n in range(20)]
    end = time.monotonic() + 30
    while asker.engine.state.status != "cold" and time.monotonic() < end:
        time.sleep(0.01)
    assert asker.engine.state.status == "cold"
    assert asker.engine._opened is None
    asker.ask(LINES[1])
    assert texts(asker.wait())[20] == LINES[1]


def test_closing_translates_waiting_lines(copying: Translator) -> None:
    asker = Asker(Engine("m", lambda: Opened(copying, 1), lambda: 1, FairQueue(1000)))
    for n in range(30):
        asker.ask(f"{LINES[0]} {n}")
    assert asker.engine.close(60)
    assert texts(asker.wait()) == [f"{LINES[0]} {n}" for n in range(30)]


def test_a_line_has_its_notices() -> None:
    """Notices belong to a line, although the lines of many requests are translated together."""
    lacking = trained_tokenizer(SENTENCES, 360, ["<bt>", "<new>"], byte_fallback=False)
    model = CopyModel(lacking.size + 2, lacking.eos, frozenset(lacking.tags.values()))
    translator = Translator(model, lacking, lacking, DecodingConfig(max_source_pieces=8))  # type: ignore[arg-type]
    engine = Engine("m", lambda: Opened(translator, 1), lambda: 1, FairQueue(1000))
    asker = Asker(engine)
    lines = {
        "a dog": {},
        "a 漢 dog": {"unknown": 1},
        "<new> a": {"tag_as_text": 1, "unknown": 1},  # the vocabulary has no `<`
        f"{LINES[0]} {LINES[0]}": {"long_lines": 1},
    }
    asked = [asker.ask(line) for line in lines]
    with warnings.catch_warnings(action="ignore"):
        asker.wait()
    assert [dict(line.notices) for line in asked] == list(lines.values())
    assert engine.close(30)
