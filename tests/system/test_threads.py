"""How OpenMP's threads wait (ziggurat/system/processes.py) on a busy machine, and idle teams held and released."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ziggurat
from ziggurat.config import load_experiment
from ziggurat.config.load import change_section
from ziggurat.inspect.diagnose import diagnose
from ziggurat.system import processes as threads
from ziggurat.system.processes import CoreContention, SystemLoad, idle_team, share_cores, sleeping_at_once, usable_cpus
from ziggurat.train.loop import train
from ziggurat.translate.translator import load_translator


def test_crowded_at_once_and_calm_only_after_a_while() -> None:
    crowd = CoreContention(threads=2, cpus=2)
    assert [crowd.look(others) for others in (0.0, 0.2, 0.9)] == [False, False, True]
    assert [crowd.look(0.0) for _ in range(5)] == [True] * 5
    assert crowd.look(0.2), "neither calm nor crowded: the wait begins again"
    assert [crowd.look(0.0) for _ in range(6)] == [True] * 5 + [False]


def test_cores_left_to_other_processes_do_not_count() -> None:
    crowd = CoreContention(threads=2, cpus=8)
    assert not crowd.look(6.0)
    assert crowd.look(6.9)


def test_times_leave_out_this_process_low_priority_and_foreign_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = min(os.sched_getaffinity(0))
    stat = tmp_path / "stat"
    monkeypatch.setattr(threads, "_STAT", stat)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {ours})
    monkeypatch.setattr(time, "process_time", lambda: 1.5)
    foreign = f"cpu{ours + 1} 999 999 999 999 999 999 999 999 0 0\n"
    #                        user nice system idle iowait irq softirq steal
    stat.write_text(
        f"cpu  9 9 9 9 9 9 9 9 0 0\ncpu{ours} 700 4000 200 50 60 30 20 50 0 0\n{foreign}intr 5 0\n", "ascii"
    )
    second = os.sysconf("SC_CLK_TCK")
    niced = 4000 if os.getpriority(os.PRIO_PROCESS, 0) > 0 else 0
    assert threads._times().others == pytest.approx((1000 + niced) / second - 1.5)


def test_an_idle_team_is_held_and_released() -> None:
    torch.ones(8).sum()  # loads the library
    before = len(os.listdir("/proc/self/task"))
    let_go = idle_team(3)
    held = len(os.listdir("/proc/self/task"))
    let_go()
    end = time.monotonic() + 10  # threads of a team end a moment after their owner
    while len(os.listdir("/proc/self/task")) > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threads._openmp(), "torch's wheel for Linux comes with libgomp"
    assert held >= before + 3
    assert len(os.listdir("/proc/self/task")) <= before


def test_the_load_is_the_share_of_others_and_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool | None] = []
    times = iter([threads._Times(10.0, 5.0), threads._Times(12.0, 8.0)] * 2)

    def now(*, low: bool | None = None) -> threads._Times:
        asked.append(low)
        return next(times)

    monkeypatch.setattr(threads, "_times", now)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    assert SystemLoad().look(4) == (1.5 / 4, True)
    assert SystemLoad().look(2) == (1.5 / 4, False), "two CPUs are left to others"
    assert asked == [True] * 4, "low priority delays short measurements, too"
    monkeypatch.undo()
    monkeypatch.setattr(threads, "_STAT", Path("/nowhere/stat"))
    assert SystemLoad().look(2) == (0.0, False), "where nobody tells, nobody is blamed"


@pytest.mark.parametrize(("count", "setting", "held"), [(2, None, 1), (1, None, 0), (2, "OMP_WAIT_POLICY", 0)])
def test_threads_sleep_at_once_within_a_context(
    count: int, setting: str | None, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in threads._SETTINGS:
        monkeypatch.delenv(name, raising=False)
    if setting is not None:
        monkeypatch.setenv(setting, "1")
    teams: list[int] = []
    monkeypatch.setattr(threads, "idle_team", lambda size: teams.append(size) or teams.clear)
    with sleeping_at_once(count):
        assert len(teams) == held
    assert not teams


@pytest.mark.parametrize(("asked", "held"), [(4, 2), (3, 3), (5, 1), (6, 1), (64, 1)])
def test_a_crowded_machine_gets_a_team_while_it_is_crowded(
    asked: int, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = iter([0.0, 1.5, 3.0, 3.0, 3.0, *[3.0] * 5])  # of other processes: busy for two checks, then calm
    clock = iter(range(100))
    events: list[str] = []

    def times() -> threads._Times:
        try:
            return threads._Times(float(next(clock)), next(others))
        except StopIteration:
            raise OSError from None  # ends the watch

    def team(size: int) -> object:
        events.append(f"team of {size}")
        return lambda: events.append("let go")

    monkeypatch.setattr(threads, "_times", times)
    monkeypatch.setattr(threads, "idle_team", team)
    monkeypatch.setattr(threads, "_SECONDS", 0.0)
    threads._watching(CoreContention(threads=asked, cpus=4))
    assert events == [f"team of {held}", "let go"]


@pytest.mark.parametrize("name", [None, "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_settings_of_the_user_stay(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    for setting in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(setting, raising=False)
    if name is not None:
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(threads, "_start", started.append)
    monkeypatch.setattr(threads, "_watch", None)  # from earlier tests in this process
    share_cores(1)
    assert not started, "one thread waits for no other"
    share_cores(2)
    assert started == ([2] if name is None else [])


class _StartedError(Exception):
    """Check that this many threads are being watched."""


def _train(folder: Path) -> None:
    experiment = load_experiment(folder / "config.yaml")
    training = {"stop": {"updates": 1}, "threads": 2, "checkpoint": {"average_last": 0}}
    section = change_section(experiment.training, training, "training")
    train(folder / "new", experiment.model_copy(update={"training": section}))


@pytest.mark.parametrize(
    "work",
    [_train, lambda folder: diagnose(folder / "plain", store=folder / "store"), lambda f: load_translator(f / "plain")],
    ids=["train", "diagnose", "translate"],
)
def test_long_computations_share_cores(
    work: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shutil.copytree(Path(__file__).parents[1] / "golden" / "v1", tmp_path / "set", symlinks=True))
    for setting in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(setting, raising=False)

    def start(threads: int) -> None:
        raise _StartedError(threads)  # the rest takes seconds

    monkeypatch.setattr(threads, "_start", start)
    monkeypatch.setattr(threads, "_watch", None)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(_StartedError, match="2"):
            work(tmp_path / "set")
    finally:
        torch.set_num_threads(before)


def test_cpus_on_systems_without_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3})
    assert usable_cpus() == 2
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert usable_cpus() == os.cpu_count()
    assert not any(
        "sched_getaffinity" in path.read_text("utf-8")
        for path in Path(ziggurat.__file__).parent.rglob("*.py")
        if path.name != "processes.py"
    )
