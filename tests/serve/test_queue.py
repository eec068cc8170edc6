"""The queue: bounded, fair to clients, and free of lines for which no client is waiting."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ziggurat.serve.queue import DeadlineExceeded, FairQueue, QueuedLine, QueueFull
from ziggurat.translate.options import TranslateOptions

PLAIN = TranslateOptions()


def queued(
    text: str = "a", client: str = "c", done: Callable[[Any], Any] = lambda result: None, **more: Any
) -> QueuedLine:
    return QueuedLine(
        text, client, more.pop("options", PLAIN), more.pop("deadline", time.monotonic() + 60), done, **more
    )


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 5)), max_size=8))
def test_clients_take_turns(requests: list[tuple[str, int]]) -> None:
    queue, expected = FairQueue(1000), dict[str, list[str]]()
    for number, (client, count) in enumerate(requests):
        texts = [f"{number}.{n}" for n in range(count)]
        expected.setdefault(client, []).extend(texts)
        queue.put([queued(text, client) for text in texts])
    taken: list[QueuedLine] = []
    while (first := queue.first()) is not None:
        one = queue.take(PLAIN)
        assert one is first
        taken.append(one)
    assert len(queue) == 0
    for client, texts in expected.items():
        assert [each.text for each in taken if each.client == client] == texts  # the lines of each client are in order
        places = [place for place, each in enumerate(taken) if each.client == client]
        for before, after in pairwise(places):  # clients take turns
            others = {each.client for each in taken[after:]} - {client}
            between = [each.client for each in taken[before + 1 : after]]
            assert sorted(between) == sorted(others | set(between))
            assert len(between) == len(set(between))


def test_a_request_is_admitted_whole_or_not_at_all() -> None:
    queue = FairQueue(5, most_of_client=3)
    queue.put([queued() for _ in range(3)])
    queue.check("d", 2)
    with pytest.raises(QueueFull) as full:
        queue.check("c", 1)
    assert full.value.seconds >= 1
    queue.put([queued(client="d"), queued(client="d")])
    with pytest.raises(QueueFull):
        queue.check("e", 1)
    FairQueue(2).check("c", 9)  # longer than the queue, but no other client waits
    queue.put([queued()])  # lines of an admitted request
    assert len(queue) == 6


def test_the_wait_is_estimated_from_recent_work() -> None:
    queue = FairQueue(100)
    queue.put([queued() for _ in range(40)])
    assert queue.wait() == 1
    queue.measured(1, 0.5)
    queue.measured(3, 0.5)  # four lines a second
    assert queue.wait() == pytest.approx(10, rel=0.01)


def test_no_client_waits_for_late_or_cancelled_work() -> None:
    queue, told = FairQueue(10), list[Any]()
    lines = [queued(str(n), done=told.append, deadline=time.monotonic() + (60 if n else -1)) for n in range(3)]
    queue.put(lines)
    lines[1].cancel()
    taken = queue.take(PLAIN)
    assert taken is lines[2]
    assert [type(result) for result in told] == [DeadlineExceeded]
    lines[1].finish(DeadlineExceeded(""))
    assert len(told) == 1
    assert (queue.first(), queue.take(PLAIN), len(queue)) == (None, None, 0)


def test_lines_with_other_options_stay() -> None:
    queue, other = FairQueue(10), TranslateOptions(n_best=3)
    queue.put([queued("1", options=other), queued("2")])
    queue.put([queued("3", "d")])
    assert queue.oldest(other_than=other) is not None
    taken = queue.take(PLAIN)
    assert taken is not None
    assert taken.text == "3"  # a client's first line decides its turn; its lines keep their order
    assert queue.take(PLAIN) is None
    first, second = queue.take(other), queue.take(PLAIN)
    assert first is not None
    assert second is not None
    assert (first.text, second.text) == ("1", "2")


def test_all_fail_at_once() -> None:
    queue, told = FairQueue(10), list[Any]()
    queue.put([queued(client=client, done=told.append) for client in "abc"])
    why = DeadlineExceeded("over")
    queue.clear(why)
    assert told == [why] * 3
    assert len(queue) == 0
