"""Where shards run: in processes, and in actors on a stand-in for Ray that start late or die (Ray: test_ray.py)."""

from __future__ import annotations

import math
import os
import pickle
import signal
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.killing import tree
from ziggurat.corpora.jobs import launchers
from ziggurat.corpora.jobs.job import JobOutcome, Work, fix_plan
from ziggurat.corpora.jobs.launchers import Shard, processes, ray_actors
from ziggurat.corpora.jobs.tasks import LineWithInputs, Merged, run_text_job
from ziggurat.data.store_checks import InputWatch
from ziggurat.system.errors import ConfigError, DataError


class Died(BaseException):
    """The end of an actor's process."""


class RayActorError(Exception):
    """The exception that `get` raises for a call to an actor that died, or could not be reached."""

    actor_init_failed = False


class ActorDiedError(RayActorError):
    """The exception for an actor that does not restart, for example because its constructor failed."""

    def __init__(self, said: str, *, actor_init_failed: bool = False) -> None:
        super().__init__(f"The actor died:\n\t(pid=7, ip=10.0.0.7, actor_id=f7cd)\n{said}")
        self.actor_init_failed = actor_init_failed


class RayTaskError(Exception):
    """The exception that `get` raises for a call that raised `cause`: an instance of both classes, with a traceback as
    text.
    """

    def __init__(self, cause: Exception) -> None:
        self.cause = cause

    def __str__(self) -> str:
        return f"ray::_Actor.do() (pid=7)\nTraceback (most recent call last):\n{self.cause}"


class Ref:
    """A future value."""

    done = False
    value: Any = None
    error: Exception | None = None

    def end(self, value: Any = None, error: Exception | None = None) -> Ref:
        self.done, self.value, self.error = True, value, error
        return self


class Handle:
    """Handle of an actor, which executes calls one by one, in order."""

    def __init__(self, make: Callable[[], Any], folder: Path) -> None:
        self._make, self._folder = make, folder
        self._object: Any = None
        self._unreachable = 0
        self.gone: ActorDiedError | None = None  # set once it is dead for good
        self.busy = False
        self.calls: deque[tuple[Ref, str, tuple[Any, ...]]] = deque()

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=partial(self._called, method))

    def _called(self, method: str, *arguments: Any) -> Ref:
        ref = Ref()
        if self.gone is not None:
            return ref.end(error=self.gone)
        if self._unreachable:  # after a death calls fail until the actor has restarted
            self._unreachable -= 1
            return ref.end(error=RayActorError())
        self.calls.append((ref, method, arguments))
        return ref

    def step(self) -> None:
        """Execute the first waiting call, in this process; arguments and results are pickled."""
        ref, method, arguments = self.calls.popleft()
        self.busy = True
        given = [each.value if isinstance(each, Ref) else pickle.loads(pickle.dumps(each)) for each in arguments]
        try:
            if self._object is None and not self._started():
                ref.end(error=self.gone)
                return
            ref.end(pickle.loads(pickle.dumps(getattr(self._object, method)(*given))))
        except Died:
            self._object, self._unreachable = None, 2
            for other, *_ in ((ref,), *self.calls):
                other.end(error=RayActorError())
            self.calls.clear()
        except Exception as error:
            both = type(f"RayTaskError({type(error).__name__})", (RayTaskError, type(error)), {})
            ref.end(error=both(pickle.loads(pickle.dumps(error))))
        finally:
            self.busy = False

    def _started(self) -> bool:
        os.chdir(self._folder)
        try:
            self._object = self._make()
        except Exception as error:
            self.gone = ActorDiedError(f"{type(error).__name__}: {error}", actor_init_failed=True)
        return self.gone is None


class Ray:
    """Stands in for the module `ray`, connected to a cluster.

    Attributes:
        room: Number of actors that it can hold; later ones wait.
        sizes: The resources of its nodes.
        actors: The actors.
    """

    exceptions = SimpleNamespace(RayTaskError=RayTaskError, RayActorError=RayActorError, ActorDiedError=ActorDiedError)

    def __init__(self, folder: Path) -> None:
        self.room: float = math.inf
        self.sizes: list[dict[str, float]] = [{"CPU": 4.0, "memory": 1e9}]
        self.actors: list[Handle] = []
        self._folder = folder  # its workers start there
        self._connected = False
        self.turn = 0

    def is_initialized(self) -> bool:
        return self._connected

    def init(self, **options: Any) -> None:
        assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"  # otherwise it sends usage statistics
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))  # like Ray
        self._connected = True

    def shutdown(self) -> None:
        assert not self.actors
        self._connected = False

    def nodes(self) -> list[dict[str, Any]]:
        dead = {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 64.0}}
        return [dead, *({"Alive": True, "Resources": size} for size in self.sizes)]

    def remote(self, *, max_restarts: int, max_task_retries: int, **needs: int) -> Callable[[type], Any]:
        assert (max_restarts, max_task_retries) == (-1, 0)  # other actors have other limits

        def made(of: type, *arguments: Any) -> Handle:
            self.actors.append(Handle(partial(of, *arguments), self._folder))
            return self.actors[-1]

        return lambda of: SimpleNamespace(remote=partial(made, of))

    def kill(self, actor: Handle) -> None:
        self.actors.remove(actor)

    def put(self, value: Any) -> Ref:
        return Ref().end(value)

    def get(self, ref: Ref) -> Any:
        assert ref.done, "it would wait for ever"
        if ref.error is not None:
            raise ref.error
        return ref.value

    def wait(self, refs: Sequence[Ref], *, num_returns: int, timeout: float) -> tuple[list[Ref], list[Ref]]:
        """Execute calls, actor by actor, until one of `refs` has ended or nothing more can be done."""
        assert len(set(refs)) == len(refs) >= num_returns == 1
        self.turn += 1
        assert self.turn < 1000, "the run does not end"
        placed = [actor for number, actor in enumerate(self.actors) if number < self.room]
        first = self.turn % max(1, len(placed))
        for actor in placed[first:] + placed[:first]:
            if not any(ref.done for ref in refs) and actor.calls:
                actor.step()
        ended = [ref for ref in refs if ref.done][:num_returns]
        return ended, [ref for ref in refs if ref not in ended]


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_process: None) -> Iterator[Ray]:
    """The stand-in, without waits; processes also run in this one. The working folder of Ray's workers is not ours."""
    (tmp_path / "ray").mkdir()
    (tmp_path / "here").mkdir()
    stand_in = Ray(tmp_path / "ray")
    monkeypatch.setitem(sys.modules, "ray", stand_in)
    monkeypatch.setattr(launchers, "_WAIT_SECONDS", 0)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "")
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED")
    monkeypatch.chdir(tmp_path / "here")
    handler = signal.getsignal(signal.SIGTERM)
    yield stand_in
    signal.signal(signal.SIGTERM, handler)


LINES = [f"line {number}" for number in range(11)]


def job(
    folder: Path, task: Any, work: Work, text: Path | None = None, found: Sequence[str] = LINES
) -> JobOutcome[Merged]:
    """Run `task` on LINES, two per shard, as if they came from the file `text`, where `found` exist."""
    watch = InputWatch()
    settings = {"inputs": [] if text is None else watch.fingerprint(text)}
    plan = fix_plan(folder, "turn", settings, watch, 2, lambda: len(LINES))
    return run_text_job(plan, task, lambda: map(LineWithInputs, found), lambda results: b"".join(results), work)


def test_if_two_jobs_start_in_one_new_folder_the_first_plan_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one call counts its lines, another one writes its plan."""
    monkeypatch.chdir(tmp_path)

    def begun(settings: dict[str, int], count: Callable[[], int]) -> int:
        return fix_plan(Path("job"), "turn", settings, InputWatch(), 2, count).lines

    def overtaken(settings: dict[str, int]) -> Callable[[], int]:
        return lambda: begun(settings, lambda: 7) + 1

    with pytest.raises(DataError, match=r"^job: was started with other settings .*beam"):
        begun({"beam": 4}, overtaken({"beam": 2}))
    assert begun({"beam": 2}, overtaken({"beam": 9})) == 7
    Path("job", "plan.json").unlink()
    assert begun({"beam": 2}, overtaken({"beam": 2})) == 7


class Turned:
    """A task that reverses lines. Its worker dies `deaths` times at shards with these first lines."""

    def __init__(self, **deaths: int) -> None:
        self.left = Counter({int(name[4:]): count for name, count in deaths.items()})

    def __call__(self, lines: Sequence[LineWithInputs], first: int) -> tuple[list[str], dict[str, int]]:
        self.left[first] -= 1
        if self.left[first] >= 0:
            raise Died
        return [line.text[::-1] for line in lines], {"turned": len(lines)}


def test_actors_that_die_give_the_same_result_as_processes(ray: Ray) -> None:
    seen: list[tuple[int, int, int | None]] = []
    launch = partial(ray_actors, "local", 2)
    done = job(Path("ray"), Turned(line2=1, line6=4), Work(launch, progress=lambda *counts: seen.append(counts)))
    assert done == job(Path("processes"), Turned(), Work(partial(processes, 2)))
    assert done.report == Merged("".join(line[::-1] + "\n" for line in LINES).encode(), 11, {"turned": 11})
    assert tree(Path("ray")) == tree(Path("processes"))
    assert (seen[0], seen[-1], len(seen)) == ((0, 0, 11), (0, 11, 11), 7)
    assert not ray.actors
    assert not ray.is_initialized()


def run_on(workers: int | None, do: Callable[[Shard[Any]], Any]) -> list[Any]:
    """Return the results of six shards."""
    with ray_actors("local", workers) as run:
        return list(run(do, (Shard(number, number, []) for number in range(6)), lambda: False))


def test_nodes_that_join_late_or_never(ray: Ray) -> None:
    doers: list[Any] = []
    ray.room = 1

    def noted(shard: Shard[Any]) -> int:
        doers.append(next(actor for actor in ray.actors if actor.busy))
        ray.room = 1 if len(doers) < 3 else 2
        return shard.index

    assert sorted(run_on(3, noted)) == list(range(6))
    assert len(set(doers[:3])) == 1
    assert len(set(doers)) == 2


@pytest.mark.usefixtures("ray")
def test_an_error_in_a_shard_is_raised_unchanged() -> None:
    def refused(shard: Shard[Any]) -> int:
        if shard.index == 4:
            raise DataError(f"shard {shard.index} cannot be")
        return shard.index

    with pytest.raises(DataError) as told:
        run_on(2, refused)
    assert type(told.value) is DataError
    assert str(told.value) == "shard 4 cannot be"


def test_a_shard_that_ends_every_actor_is_named(ray: Ray) -> None:
    done: list[int] = []

    def deadly(shard: Shard[Any]) -> int:
        done.append(shard.index)
        if shard.index == 1:
            raise Died
        return shard.index

    with pytest.raises(DataError, match=r"^shard 1 killed its worker 5 times"):
        run_on(2, deadly)
    assert done.count(1) == 5
    assert not ray.actors


@pytest.mark.usefixtures("ray")
def test_a_signal_stops_actors_and_processes_continue() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def signalled(before: int, now: int, total: int | None) -> None:
        if now >= 4:
            Path("job", "turn", ".00000002.txt.0a1b2c3d.tmp").touch()  # a worker in the middle of a shard
            os.kill(os.getpid(), signal.SIGTERM)

    stopped = job(Path("job"), Turned(), Work(partial(ray_actors, "local", 2), progress=signalled))
    assert (stopped.signal, stopped.report) == (signal.SIGTERM, None)
    assert len(list(Path("job").glob("turn/*.json"))) == 2
    assert not list(Path("job").rglob("*.tmp"))
    assert signal.getsignal(signal.SIGTERM) == before
    assert job(Path("job"), Turned(), Work(partial(processes, 2))) == job(Path("whole"), Turned(), Work())
    assert tree(Path("job")) == tree(Path("whole"))


GPU_NODES: list[dict[str, float]] = [{"CPU": 8.0, "GPU": 1.0}, {"CPU": 2.0, "GPU": 4.0}, {"CPU": 64.0}]


@pytest.mark.parametrize(
    ("sizes", "cpus", "gpus", "room"),
    [
        ([{"CPU": 4.0}], 1, 0, 4),
        ([{"CPU": 3.0}, {"CPU": 3.0}, {"memory": 1e9}], 2, 0, 2),  # 3 if they were one node
        (GPU_NODES, 1, 1, 3),
        (GPU_NODES, 4, 1, 1),
    ],
)
def test_as_many_actors_as_the_nodes_can_hold(
    sizes: list[dict[str, float]], cpus: int, gpus: int, room: int, ray: Ray
) -> None:
    ray.sizes = sizes
    with ray_actors("local", None, cpus=cpus, gpus=gpus):
        assert len(ray.actors) == room


@pytest.mark.parametrize("workers", [None, 3])
def test_actors_that_no_node_can_hold_are_refused(workers: int | None, ray: Ray) -> None:
    ray.sizes = [{"CPU": 1.0}, {"CPU": 1.0}, {"memory": 1e9}]
    with (
        pytest.raises(ConfigError, match=r"takes 2 CPUs and 0 GPUs of one node, but the nodes have 1 and 0, 0 and 0;"),
        ray_actors("local", workers, cpus=2),
    ):
        pass


@pytest.mark.usefixtures("ray")
def test_a_folder_that_an_actor_cannot_see_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getcwd", lambda: "/no/such")
    with pytest.raises(
        ConfigError, match=r"start on 10.0.0.7 \(FileNotFoundError.*'/no/such'\): every node must see /no/such under"
    ):
        run_on(2, lambda shard: None)


def test_actors_that_died_for_good_get_no_more_calls(ray: Ray) -> None:
    kept = {1, 4}

    def killing(shard: Shard[Any]) -> int:
        """Another program kills the workers with `ray.kill`: one of two at shard 1, the other at shard 4."""
        if shard.index in kept:
            kept.remove(shard.index)
            next(actor for actor in ray.actors if actor.busy).gone = ActorDiedError("It was killed by `ray.kill`.")
            raise Died
        return shard.index

    done: list[Any] = []
    with (
        ray_actors("local", 2) as run,
        pytest.raises(DataError, match=r"^the last worker .* will not restart \(It was killed by `ray.kill`\.\)"),
    ):
        done.extend(run(killing, (Shard(number, number, []) for number in range(5)), lambda: False))
    assert sorted(done) == [0, 1, 2, 3]


def test_actors_that_do_not_start_are_reported(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "_SILENT_SECONDS", 0)
    ray.room = 0
    with (
        ray_actors("local", 2) as run,
        pytest.warns(UserWarning, match="no worker on the Ray cluster has started"),
    ):
        assert not list(run(lambda shard: None, iter([Shard(0, 0, [])]), lambda: ray.turn > 1))


@pytest.mark.usefixtures("in_process")
def test_processes_take_no_more_shards_than_they_have_room_for() -> None:
    taken: list[int] = []

    def shards() -> Iterator[Shard[Any]]:
        for number in range(12):
            taken.append(number)
            yield Shard(number, number, [])

    with processes(2) as run:
        results = run(lambda shard: shard.index, shards(), lambda: False)
        next(results)
        assert len(taken) == 4
        assert len(list(results)) == 11


@pytest.mark.usefixtures("in_process")
def test_an_input_that_changes_while_it_is_read_is_reported_before_the_merge(tmp_path: Path) -> None:
    """A call for a part notices it, too; no later call could."""
    text = tmp_path / "text"
    text.write_text("as it was\n")
    for number, part in enumerate([(0, 1), (0, 2)]):

        def changed(before: int, now: int, total: int | None) -> None:
            text.write_text(f"longer{'r' * now}\n")

        with pytest.raises(DataError, match=r"text: changed while being read; start again in another folder than"):
            job(tmp_path / str(number), Turned(), Work(part=part, progress=changed), text)


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("part", [(0, 1), (0, 2)])
def test_an_input_that_ends_early_is_reported(part: tuple[int, int], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the input became shorter .*; start again in another folder"):
        job(tmp_path / "job", Turned(), Work(part=part), found=LINES[:5])


@pytest.mark.usefixtures("in_process")
def test_parts_run_at_once_but_not_during_a_merge(tmp_path: Path) -> None:
    do = partial(job, tmp_path / "job", Turned())

    def beside(before: int, now: int, total: int | None) -> None:
        if now == 0:
            assert do(Work(part=(1, 2))).report is None
            with pytest.raises(DataError, match="another turn is at work here"):
                do(Work(only_merge=True))

    do(Work(part=(0, 2), progress=beside))
    assert do(Work(only_merge=True)) == job(tmp_path / "whole", Turned(), Work())


@pytest.mark.usefixtures("in_process")
def test_a_plan_that_another_part_writes_meanwhile_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job").mkdir()
    listed = Path.iterdir

    def beside(folder: Path) -> Iterator[Path]:
        """Another part starts after this one has looked for a plan, and before it looks for anything else."""
        monkeypatch.setattr(Path, "iterdir", listed)
        job(folder, Turned(), Work(part=(1, 2)))
        return listed(folder)

    monkeypatch.setattr(Path, "iterdir", beside)
    assert job(tmp_path / "job", Turned(), Work(part=(0, 2))).report is None
    assert job(tmp_path / "job", Turned(), Work(only_merge=True)) == job(tmp_path / "whole", Turned(), Work())
