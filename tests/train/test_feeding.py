"""Batches on their way to a GPU, with stand-ins for streams and page-locked memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.conftest import tiny_experiment
from ziggurat.data.corpus import Store
from ziggurat.data.loader import Group, LoaderState
from ziggurat.train import device as feeding

CPU = torch.device("cpu")
TENSORS = ("source", "source_mask", "target_in", "target_out", "target_mask")


@pytest.fixture
def events_of_feeding(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The order of events, recorded without a GPU."""
    events: list[str] = []
    current = ["main"]

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def record_event(self) -> str:
            assert current[-1] == self.name, "the event is behind the copies"
            events.append("sent")
            return f"event {events.count('sent')}"

        def wait_event(self, event: str) -> None:
            events.append(f"{self.name} waits for {event}")

    @contextmanager
    def within(stream: Stream) -> Iterator[None]:
        current.append(stream.name)
        yield
        current.pop()

    def moved(self: Tensor, *_: object, **how: object) -> Tensor:
        assert current[-1] == "side"
        assert how == {"non_blocking": True}
        return self.clone()

    monkeypatch.setattr("ziggurat.train.device.runtime", lambda device: torch.cuda)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side"))
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(events.append("its GPU")))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("main"))
    monkeypatch.setattr(Tensor, "to", moved)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: events.append(f"used by {stream.name}"))
    return events


def contents(groups: list[Group]) -> list[list[int]]:
    return [getattr(batch, name).flatten().tolist() for group in groups for batch in group.batches for name in TENSORS]


def test_on_a_cpu_groups_pass_unchanged(tiny_folder: Path) -> None:
    loader = feeding.loader_of(tiny_experiment(tiny_folder), Store.open(str(tiny_folder / "store")))
    got = list(islice(feeding.to_device(loader, LoaderState(0, 2), CPU), 3))
    expected = list(islice(loader.groups(LoaderState(0, 2)), 3))
    assert contents(got) == contents(expected)
    assert [group.state_after for group in got] == [group.state_after for group in expected]


def test_the_next_group_is_sent_before_one_is_returned(tiny_folder: Path, events_of_feeding: list[str]) -> None:
    loader = feeding.loader_of(tiny_experiment(tiny_folder), Store.open(str(tiny_folder / "store")))
    expected = list(islice(loader.groups(), 3))
    groups = feeding.send_ahead(iter(islice(loader.groups(), 9)), CPU)
    first = next(groups)
    assert events_of_feeding == ["sent", "sent", "main waits for event 1", *["used by main"] * len(TENSORS)]
    rest = list(islice(groups, 2))
    assert events_of_feeding.count("sent") == 4
    assert [event for event in events_of_feeding if "waits" in event] == [
        f"main waits for event {n}" for n in (1, 2, 3)
    ]
    assert contents([first, *rest]) == contents(expected)
    assert [group.state_after for group in (first, *rest)] == [group.state_after for group in expected]
    assert first.batches[0].target_tokens == expected[0].batches[0].target_tokens


def test_pages_are_locked_in_the_thread_on_the_run_s_own_gpu(
    tiny_folder: Path, events_of_feeding: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from threading import current_thread

    threads: set[str] = set()

    def locked(self: Tensor) -> Tensor:
        threads.add(current_thread().name)
        assert "its GPU" in events_of_feeding
        return self

    monkeypatch.setattr(Tensor, "pin_memory", locked)
    loader = feeding.loader_of(tiny_experiment(tiny_folder), Store.open(str(tiny_folder / "store")))
    device = torch.device("cuda", 1)
    next(feeding.to_device(loader, LoaderState(), device))
    assert threads == {"ziggurat-loader"}


def test_sentences_are_as_long_as_learned_positions_allow(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding, "Loader", lambda *_, longest, **__: longest)
    plain = tiny_experiment(tiny_folder)
    learned = tiny_experiment(tiny_folder, {"embedding": {"positions": "learned", "max_positions": 60}})
    store = Store.open(plain.data.store)
    assert feeding.loader_of(plain, store) is None
    assert feeding.loader_of(learned, store) == 59  # plus end-of-sentence
