"""Turns: between models, and between clients of one model."""

from __future__ import annotations

import threading
import time
from itertools import pairwise

import pytest

from tests.translate.doubles import CopyModel
from tests.vocabulary import SENTENCES, trained_tokenizer
from ziggurat.config import DecodingConfig
from ziggurat.serve.engine import MOST_LINES, Engine, LineBatch, Opened
from ziggurat.serve.queue import DeadlineExceeded, FairLock, FairQueue, QueuedLine
from ziggurat.translate.options import TranslateOptions
from ziggurat.translate.results import Translation
from ziggurat.translate.translator import Translator


def test_waiters_get_the_lock_in_order_of_arrival() -> None:
    turns, order = FairLock(), list[int]()
    threads: list[threading.Thread] = []

    def take(number: int) -> None:
        with turns:
            order.append(number)

    with turns:
        for number in range(5):
            threads.append(threading.Thread(target=take, args=(number,)))
            threads[-1].start()
            end = time.monotonic() + 5
            while len(turns._waiting) <= number and time.monotonic() < end:
                time.sleep(0.001)
    for thread in threads:
        thread.join(10)
    assert order == list(range(5))


def test_two_repeated_users_take_turns() -> None:
    turns, order = FairLock(), list[str]()
    both = threading.Barrier(2)

    def work(name: str) -> None:
        both.wait(10)
        for _ in range(200):
            with turns:
                order.append(name)
                time.sleep(0.0002)

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    middle = order[20:300]
    alternations = sum(a != b for a, b in pairwise(middle))
    assert alternations > 0.8 * len(middle)


@pytest.fixture(scope="module")
def copying() -> Translator:
    tokenizer = trained_tokenizer(SENTENCES, 360, ["<bt>", "<new>"])
    model = CopyModel(tokenizer.size + 2, tokenizer.eos, frozenset(tokenizer.tags.values()))
    return Translator(model, tokenizer, tokenizer, DecodingConfig(beam_size=2))  # type: ignore[arg-type]


def test_a_short_request_is_not_kept_waiting_by_a_long_one(copying: Translator) -> None:
    gate, order, done = threading.Event(), list[str](), threading.Event()
    engine = Engine("m", lambda: (gate.wait(30), Opened(copying, 1))[1], lambda: 1, FairQueue(1000))

    def queued(client: str) -> QueuedLine:
        def finish(result: Translation | Exception) -> None:
            assert isinstance(result, Translation)
            order.append(client)
            if len(order) == 403:
                done.set()

        return QueuedLine(SENTENCES[0], client, TranslateOptions(), time.monotonic() + 120, finish)

    engine.queue.put([queued("long") for _ in range(400)])
    engine.queue.put([queued("short") for _ in range(3)])
    gate.set()
    assert done.wait(60)
    assert max(place for place, client in enumerate(order) if client == "short") < MOST_LINES
    assert engine.close(30)


def test_lines_that_are_cancelled_leave_the_queue_and_a_whole_batch(copying: Translator) -> None:
    def queued(deadline: float = 60.0) -> QueuedLine:
        return QueuedLine(SENTENCES[0], "c", TranslateOptions(), time.monotonic() + deadline, results.append)

    results: list[Translation | Exception] = []
    queue, lines = FairQueue(4), [queued() for _ in range(4)]
    queue.put(lines)
    queue.remove(lines[1:3])
    assert len(queue) == 2
    queue.put([queued(), queued(-1.0)])
    queue.check("other", 1)  # the late line loses its place
    assert len(queue) == 3
    assert [type(result) for result in results] == [DeadlineExceeded]
    batch = LineBatch(copying, TranslateOptions(next_words=True), 8)
    batch.add(lines[0])
    batch.add(lines[3])
    batch.cancel([0])
    assert list(batch.step()) == [1]


def test_a_constrained_search_is_bounded_and_ends_once_no_client_waits(copying: Translator) -> None:
    options = TranslateOptions(constrained=True)
    assert LineBatch(copying, options, 64).most_lines == 8
    results: list[Translation | Exception] = []
    batch = LineBatch(copying, options, 64)
    late = QueuedLine(SENTENCES[0], "c", options, time.monotonic() - 1, results.append, ("dog",))
    batch.add(late)
    began = time.monotonic()
    assert batch.step() == {}
    assert time.monotonic() - began < 5
    assert [type(result) for result in results] == [DeadlineExceeded]
    assert batch.lines == {}
    batch.add(QueuedLine(SENTENCES[0], "c", options, time.monotonic() + 60, results.append, ("dog",)))
    assert list(batch.step()) == [1]
