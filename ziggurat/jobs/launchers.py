"""Launchers: where the shards of a job are done.

A launcher opens a `Run`, which takes shards from an iterator as it has room for them and yields what comes of each, in
any order. `processes` are those of this machine; `ray_actors` those of a cluster, which may change while they work.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from ziggurat.decoding.pool import worker_pool
from ziggurat.errors import ConfigError, DataError, printable
from ziggurat.jobs.shards import Manifest, Shard

__all__ = ["Launcher", "Run", "cluster_library", "processes", "ray_actors"]

_WAIT_SECONDS = 0.2  # between two looks at whether to stop: signals do not end a wait
_KNOCK_SECONDS = 10.0  # for a cluster to answer
_MOST_DEATHS = 5
"""A shard that ended so many actors is refused: more memory may be needed than there is."""
_PER_WORKER = 2
"""One shard of a worker waits behind the one that it does; more would only take memory."""


class Run(Protocol):
    """Does shards."""

    def __call__(
        self, do: Callable[[Shard[Any]], Manifest], shards: Iterator[Shard[Any]], stopped: Callable[[], bool]
    ) -> Iterator[Manifest]:
        """Yield what `do` returns of each shard, as they end, until none is left or `stopped` says so."""


Launcher = Callable[[], AbstractContextManager[Run]]


@contextlib.contextmanager
def processes(workers: int) -> Iterator[Run]:
    """Context with `workers` processes of this machine, which are ended with it: a shard is complete or absent."""
    with worker_pool(workers, when_killed=". What was done is kept") as submit:

        def run(
            do: Callable[[Shard[Any]], Manifest], shards: Iterator[Shard[Any]], stopped: Callable[[], bool]
        ) -> Iterator[Manifest]:
            pending: set[Future[Manifest]] = set()
            more = True
            while (more or pending) and not stopped():
                if more and len(pending) < _PER_WORKER * workers:
                    shard = next(shards, None)
                    more = shard is not None
                    pending |= {submit(do, shard)} if more else set()
                    continue
                ended, pending = wait(pending, timeout=_WAIT_SECONDS, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in ended)

        yield run


@contextlib.contextmanager
def ray_actors(address: str, workers: int | None, *, cpus: int = 1, gpus: int = 0) -> Iterator[Run]:
    """Context with actors of a Ray cluster, each of which keeps what it has loaded.

    An actor that dies, or whose node does, starts again wherever there is room, and others do its shard meanwhile. More
    actors than the cluster has room for wait for nodes to come.

    Args:
        address: Of the cluster, as `ray.init` takes it: `auto`, `local` (a new one, on this machine), `HOST:PORT`.
        workers: Number of actors; None: as many as the cluster has room for now.
        cpus: CPU cores of each.
        gpus: GPUs of each.

    Raises ConfigError where Ray is not installed, there is no such cluster, or no node could hold an actor.
    """
    with _connected(address) as ray:
        if workers is None:
            here = ray.cluster_resources()
            rooms = [here.get("CPU", 0) // cpus] + ([here.get("GPU", 0) // gpus] if gpus else [])
            workers = int(min(rooms))
            if not workers:
                raise ConfigError(
                    f"`--ray {address}`: the cluster has {here.get('CPU', 0):g} CPUs and {here.get('GPU', 0):g} GPUs, "
                    f"a worker takes {cpus} and {gpus}; wait for a node with `--workers N`, or take fewer `--threads`"
                )
        of_class = ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=-1, max_task_retries=0)(_Actor)
        # On other machines the folder must be the same: the paths of a job may be relative.
        actors = [of_class.remote(os.getcwd()) for _ in range(workers)]
        try:
            yield _RayRun(ray, actors)
        finally:
            for actor in actors:
                ray.kill(actor)


@contextlib.contextmanager
def _connected(address: str) -> Iterator[ModuleType]:
    """Context with Ray, connected to a cluster."""
    ray = cluster_library(address)
    if ray.is_initialized():  # by the program that calls us
        yield ray
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        raise _absent(address, error) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def cluster_library(address: str) -> ModuleType:
    """Return the module `ray`, where something listens at the address of a cluster; it is not connected to.

    Raises ConfigError where Ray is not installed, or nothing listens there.
    """
    try:
        ray = importlib.import_module("ray")
    except ModuleNotFoundError:
        raise ConfigError("`ray` is not installed: pip install 'ziggurat-mt[ray]'") from None
    if not ray.is_initialized():
        try:
            _knock(address)
        except (OSError, ValueError) as error:
            raise _absent(address, error) from None
    return ray


def _absent(address: str, error: Exception) -> ConfigError:
    said = printable(str(error).strip().split("\n")[0], 200)
    return ConfigError(
        f"`--ray {printable(address)}`: no cluster there ({said}); start one with `ray start --head`, or write "
        "auto, local or HOST:PORT"
    )


def _knock(address: str) -> None:
    """Raise OSError or ValueError unless something listens at an address: Ray would try for twenty minutes."""
    if address == "local":
        return
    if address == "auto":
        noted = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "ray", "ray_current_cluster")
        address = os.environ.get("RAY_ADDRESS") or (noted.read_text().strip() if noted.is_file() else "")
        if not address:
            raise ValueError("`ray start` has noted none on this machine, and RAY_ADDRESS is not set")
    host, _, port = address.rpartition(":")
    if not (host and re.fullmatch("[0-9]{1,5}", port)) or "/" in host:
        raise ValueError("not an address")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_SECONDS).close()


class _Actor:
    """A worker of a cluster."""

    def __init__(self, folder: str) -> None:
        os.chdir(folder)

    def ready(self) -> None:
        """Answer, once it has started."""

    def do(self, do: Callable[[Shard[Any]], Manifest], shard: Shard[Any]) -> Manifest:
        """Return what `do` returns."""
        return do(shard)


class _RayRun:
    """A `Run` by actors; Ray starts them again, and this gives the shards of dead ones to those that live."""

    def __init__(self, ray: ModuleType, actors: list[Any]) -> None:
        self._ray, self._actors = ray, actors

    def __call__(
        self, do: Callable[[Shard[Any]], Manifest], shards: Iterator[Shard[Any]], stopped: Callable[[], bool]
    ) -> Iterator[Manifest]:
        ray = self._ray
        function = ray.put(do)
        lost: list[Shard[Any]] = []
        deaths: Counter[int] = Counter()
        idle: list[Any] = []
        # An actor gets a shard when it has answered: one that waits for a node must not keep a shard waiting.
        waking = {actor.ready.remote(): actor for actor in self._actors}
        working: dict[Any, tuple[Any, Shard[Any]]] = {}
        while not stopped():
            while idle and (shard := lost.pop() if lost else next(shards, None)) is not None:
                actor = idle.pop()
                working[actor.do.remote(function, shard)] = actor, shard
            if idle and not working:  # the last shard is done; other actors may still be waiting
                return
            ended, _ = ray.wait([*working, *waking], num_returns=1, timeout=_WAIT_SECONDS)
            for answer in ended:
                actor, shard = working.pop(answer) if answer in working else (waking.pop(answer), None)
                try:
                    result = ray.get(answer)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from error  # whose text is the traceback in the worker
                except ray.exceptions.RayActorError:
                    if shard is not None:
                        lost.append(shard)
                        deaths[shard.index] += 1
                        if deaths[shard.index] == _MOST_DEATHS:
                            raise _deadly(shard) from None
                    time.sleep(_WAIT_SECONDS)  # until it is known to be dead, asking it fails at once
                    waking[actor.ready.remote()] = actor
                    continue
                idle.append(actor)
                if shard is not None:
                    yield result


def _deadly(shard: Shard[Any]) -> DataError:
    return DataError(
        f"shard {shard.index} ended its worker {_MOST_DEATHS} times, perhaps for want of memory: give workers more, or "
        "take a smaller `batch_tokens`. What was done is kept"
    )
