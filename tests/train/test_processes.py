"""Messages between processes, two and three of them over gloo."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore

from tests.train.launch import finish, launch, run_together
from ziggurat.exchange.plain import NotPlainError
from ziggurat.system.errors import CheckpointError, ConfigError, DataError, TrainingError
from ziggurat.system.staging import BeingBuiltError
from ziggurat.train.distributed import Processes, _meeting_place, joined
from ziggurat.translate.search import NonFiniteScoreError

HERE = "tests.train.test_processes"


def talk() -> None:
    """Run in every process: print the messages that it receives."""
    with joined(timeout_minutes=1.0) as processes:
        rank = processes.rank
        print(
            json.dumps(
                {
                    "rank": [rank, processes.count, processes.local_rank, processes.first],
                    "sums": processes.sums([1.0, rank, 0.1]),
                    "any": [processes.any(rank == 1), processes.any(False)],
                    "largest": processes.largest([float(rank), -float(rank)]),
                    "texts": processes.texts([f"größe {rank}"] * rank),
                }
            )
        )


def hang() -> None:
    """Run in every process: the second does not reach update 3."""
    with joined(timeout_minutes=2.0 / 60) as processes:
        for update in range(6):
            processes.update = update
            if processes.rank == 1 and update == 3:
                time.sleep(60)  # it is killed before that
            try:
                processes.sums([1.0])
            except RuntimeError as error:
                print(processes.hanging(error))
                return


@pytest.mark.parametrize("count", [2, 3])
def test_all_processes_hear_the_same(count: int) -> None:
    said = [json.loads(output) for output in run_together(HERE, "talk", count)]
    assert [one["rank"] for one in said] == [[rank, count, rank, rank == 0] for rank in range(count)]
    for one in said:
        assert one["sums"] == pytest.approx([count, sum(range(count)), 0.1 * count])
        assert one["any"] == [True, False]
        assert one["largest"] == [count - 1, 0]
        assert one["texts"] == [[f"größe {rank}"] * rank for rank in range(count)]


@pytest.mark.slow
def test_a_process_that_hangs_is_named() -> None:
    started = launch(HERE, "hang", 3)
    started[0].process.join(30)
    started[1].kill()
    status, output, errors = finish(started)[0]
    assert status == 0, errors
    assert "lost contact at update 3; behind: process 1 (in or after update 2)." in output


def test_a_process_that_never_answered_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=1))  # then torch raises RuntimeError
    store.set("ziggurat/arrivals/0", "7 3")
    monkeypatch.setattr("ziggurat.train.distributed._store", lambda: store)
    message = str(Processes(0, 2, 0, 2).hanging(RuntimeError("gloo")))
    assert "behind: process 1 (in or after update 0)" in message


def test_one_process_needs_no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined(timeout_minutes=1.0) as alone:
        assert alone == Processes()
        assert alone.first
        assert alone.sums([1.0, 2.0]) == [1.0, 2.0]
        assert alone.any(True)
        assert alone.texts(["a"]) == [["a"]]
        alone.arrive()


@pytest.mark.parametrize(
    ("raised", "heard"),
    [
        (CheckpointError("damaged"), CheckpointError),
        (BeingBuiltError("another process builds it"), DataError),
        (NotPlainError("one that has no name here"), ConfigError),
        (NonFiniteScoreError("one of no known kind"), TrainingError),
        (OSError(28, "No space left"), OSError),
    ],
)
def test_an_error_of_the_first_process_has_the_same_type_in_all(
    raised: Exception, heard: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[list[str]] = []
    monkeypatch.setattr(Processes, "texts", lambda self, mine: told.append(list(mine)) or told[:1])

    def work() -> None:
        raise raised

    with pytest.raises(type(raised)) as first:
        Processes(0, 2).first_does(work)
    assert first.value is raised
    with pytest.raises(heard, match=told[0][1]) as other:
        Processes(1, 2).first_does(work)
    assert type(other.value) is heard


def test_half_of_torchruns_variables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match="'RANK' is missing"), joined(timeout_minutes=1.0):
        pass


@pytest.mark.parametrize("value", ["", "two"])
def test_an_invalid_number_of_processes_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", value)
    with pytest.raises(ConfigError, match=rf"WORLD_SIZE is set, but .* not a number .*'{value}'"), joined(1.0):
        pass


def test_a_restart_uses_other_keys_than_the_previous_start() -> None:
    """Both starts share one store, which still has the messages and answers of the first."""
    store, places = HashStore(), []
    for _ in range(3):
        with ThreadPoolExecutor(3) as pool:
            met = [pool.submit(_meeting_place, store, rank, 3, timedelta(seconds=20)) for rank in range(3)]
        assert len({place.result() for place in met}) == 1
        places.append(met[0].result())
    assert len(set(places)) == 3


def test_missing_processes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    store.set("ziggurat/word/1", "of a process that is gone")
    with pytest.raises(RuntimeError, match=r"processes \[1\] did not answer"):
        _meeting_place(store, 0, 2, timedelta(seconds=0.2))
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with (
        pytest.raises(ConfigError, match=r"the processes cannot connect: .*MASTER_ADDR.*start them with torchrun"),
        joined(0.1),
    ):
        pass


@pytest.mark.parametrize(
    ("gpus", "fails", "left"), [(2, False, True), (2, True, False), (0, False, True), (0, True, True)]
)
def test_a_process_that_fails_alone_does_not_wait_for_the_others_of_its_machine(
    gpus: int, fails: bool, left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All processes of a machine destroy NCCL's groups together; gloo's are destroyed by each separately."""
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    calls: list[object] = []
    monkeypatch.setattr("atexit.register", lambda function: calls.append(function.__name__))
    found = torch.device("cuda") if gpus else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(device))
    monkeypatch.setattr("ziggurat.train.distributed._meet", lambda backend, processes: calls.append(backend))
    monkeypatch.setattr(Processes, "arrive", lambda self: None)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: calls.append("left"))
    with pytest.raises(TrainingError) if fails else nullcontext(), joined(0.1, "auto"):
        if fails:
            raise TrainingError("out of memory in the middle of a layer")
    joining = [torch.device("cuda", 1), "cpu:gloo,cuda:nccl"] if gpus else ["gloo"]
    assert calls == [*joining, "left" if left else "end_at_once"]
