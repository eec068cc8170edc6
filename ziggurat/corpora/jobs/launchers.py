"""Launchers: where the shards of a job are done.

A launcher opens a `Run`, which takes shards from an iterator as it has room for them and yields their manifests, in any
order. `processes` uses processes on this machine, `ray_actors` actors on a cluster whose nodes may come and go.

The module also defines the shards of a job and the files that a stage writes for each, which are complete or absent.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
import os
import re
import socket
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

import xxhash

from ziggurat.system.errors import ConfigError, DataError, printable
from ziggurat.system.files import write_atomically
from ziggurat.system.processes import worker_pool
from ziggurat.system.small_files import built, parse_json, read_bounded
from ziggurat.system.terminal import signals_waiting

Item = TypeVar("Item")


@dataclass(frozen=True)
class Shard(Generic[Item]):
    """Consecutive items of the input, and the number of the shard."""

    index: int
    first: int
    """Number of the first item; if items have weights, the total weight of the previous ones."""
    items: list[Item]


def cut(
    items: Iterable[Item],
    size: int,
    wanted: Callable[[int], bool],
    *,
    start: int = 0,
    weight: Callable[[Item], int] = lambda item: 1,
) -> Iterator[Shard[Item]]:
    """Yield, in order, the shards whose number, counted from `start`, is `wanted`.

    A shard ends with the item that brings it to the weight `size`; the last one may weigh less. Items of other shards
    are also read, since their ends are not known otherwise, but not kept.
    """
    index, first, filled, held = start, 0, 0, list[Item]()
    take = wanted(index)
    for item in items:
        if take:
            held.append(item)
        filled += weight(item)
        if filled >= size:
            if take:
                yield Shard(index, first, held)
            index, first, filled, held = index + 1, first + filled, 0, []
            take = wanted(index)
    if held:
        yield Shard(index, first, held)


@dataclass(frozen=True)
class Manifest:
    """Record of a stage's result, a file, for one shard."""

    stage: str
    shard: int
    plan: str
    """Fingerprint of the plan (ziggurat.corpora.jobs.job)."""
    output: str
    """Checksum of the file."""
    bytes: int
    read: int
    """Items of the shard, or their weight."""
    kept: int
    """Rows of the file."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Items that this and earlier stages dropped, or noticed, by reason."""
    input: str = ""
    """Checksum of the file of the previous stage; empty for the first."""


class StageFiles:
    """Files of one stage: `<shard>.<ending>`, and its manifest `<shard>.json`, which is written last.

    A shard is complete if its manifest exists and has the fingerprint of the plan, and the file has the size in the
    manifest. The files are in the subfolder `stage` of the job's folder.
    """

    def __init__(self, folder: Path, stage: str, plan: str, ending: str = "tsv") -> None:
        self.folder = folder / stage
        self.stage, self.plan, self.ending = stage, plan, ending

    def path(self, index: int) -> Path:
        """Return the file of a shard."""
        return self.folder / f"{index:08d}.{self.ending}"

    def complete(self, index: int) -> Manifest | None:
        """Return the manifest of a complete shard, or None. Raises DataError or MachineError if it cannot be read."""
        try:
            content = read_bounded(self.path(index).with_suffix(".json"))
            size = self.path(index).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:  # such as no search permission: not a reason to redo the shard
            where = error.filename or self.path(index)
            raise DataError(f"{where}: cannot be read: {error.strerror or error}") from None
        try:
            manifest = built(Manifest, parse_json(content, ""))
        except (DataError, ValueError):  # cut off by a full disk, or in another format
            return None
        whole = (manifest.plan, manifest.stage, manifest.shard, manifest.bytes)
        return manifest if whole == (self.plan, self.stage, index, size) else None

    def finished(self) -> list[Manifest]:
        """Return the manifests of all complete shards, in order; raises as `complete` does."""
        try:
            names = os.listdir(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise DataError(f"{self.folder}: cannot be read: {error.strerror or error}") from None
        numbers = sorted(int(name[:-5]) for name in names if re.fullmatch(r"[0-9]{8,}\.json", name))
        return [manifest for manifest in map(self.complete, numbers) if manifest is not None]

    def write(
        self, index: int, content: bytes, *, read: int, kept: int, dropped: Mapping[str, int], input: str = ""
    ) -> Manifest:
        """Write the file of a shard and its manifest; return the manifest.

        The content is a function of the plan, so an older manifest of the same plan also describes it, and it is
        harmless if two processes do one shard.
        """
        # Without sweeps, because folders have very many files and `run_job` sweeps them once.
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path(index), content, sweeps=False)
        output = xxhash.xxh3_128_hexdigest(content)
        counts = dict(sorted(dropped.items()))
        manifest = Manifest(self.stage, index, self.plan, output, len(content), read, kept, counts, input)
        document = json.dumps(asdict(manifest), indent=1, sort_keys=True) + "\n"
        write_atomically(self.path(index).with_suffix(".json"), document.encode(), sweeps=False)
        return manifest

    def read(self, manifest: Manifest) -> bytes:
        """Return the content of a complete shard. Raises DataError if the file has another checksum."""
        path = self.path(manifest.shard)
        content = path.read_bytes()
        if xxhash.xxh3_128_hexdigest(content) != manifest.output:
            raise DataError(f"{path}: damaged (other checksum than in {path.stem}.json); remove it and run again")
        return content


_WAIT_SECONDS = 0.2  # time between checks for a stop signal: signals do not end a wait
_KNOCK_SECONDS = 10.0  # longest wait for a cluster to answer
_SILENT_SECONDS = 60.0  # time without any running worker before a message
_MOST_DEATHS = 5
"""Number of actor deaths after which a shard is given up, since it may need more memory than there is."""
_PER_WORKER = 2
"""Shards per worker, one running and one waiting; more would only take memory."""


Do = Callable[[Shard[Any]], Manifest]
Run = Callable[[Do, Iterator[Shard[Any]], Callable[[], bool]], Iterator[Manifest]]
"""Function that yields the first argument's result for each shard, until none is left or the third returns true."""
Launcher = Callable[[], AbstractContextManager[Run]]


@contextlib.contextmanager
def processes(workers: int) -> Iterator[Run]:
    """Context with `workers` processes on this machine, which end with it: a shard is complete or absent."""
    way_out = "use fewer `--workers` or a smaller `batch_tokens`. What was done is kept"
    with worker_pool(workers, way_out=way_out) as submit:

        def run(do: Do, shards: Iterator[Shard[Any]], stopped: Callable[[], bool]) -> Iterator[Manifest]:
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
    """Context with actors on a Ray cluster, which keep their loaded models between shards.

    An actor that dies, or whose node dies, restarts wherever there is room, and others do its shard meanwhile. Actors
    without room wait for nodes to join, or for other work to end.

    Args:
        address: as `ray.init` takes it: `auto`, `local` (a new cluster, on this machine), `HOST:PORT`.
        workers: number of actors; None: as many as the nodes can hold if nothing else runs on them.
        cpus: CPU cores that each actor takes.
        gpus: GPUs that each actor takes.

    Raises ConfigError if Ray is not installed, there is no such cluster, no node could hold an actor, or an actor
    cannot start. Raises DataError for a shard that kills every actor, or if no actor is left. Warns while no actor can
    start.
    """
    with _connected(address) as ray:
        room = _room([node["Resources"] for node in ray.nodes() if node["Alive"]], address, cpus, gpus)
        workers = room if workers is None else workers
        of_class = ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=-1, max_task_retries=0)(_Actor)
        # On other machines the folder must be the same: the paths of a job may be relative.
        actors = [of_class.remote(os.getcwd()) for _ in range(workers)]
        try:
            yield partial(_by_actors, ray, actors)
        finally:
            for actor in actors:
                ray.kill(actor)


def _room(nodes: list[Mapping[str, float]], address: str, cpus: int, gpus: int) -> int:
    """Return how many actors nodes with these resources can hold, each actor on one node.

    Raises ConfigError if there is no room for any.
    """
    have = [(node.get("CPU", 0), node.get("GPU", 0)) for node in nodes]
    room = sum(int(min(cpu // cpus, gpu // gpus if gpus else math.inf)) for cpu, gpu in have)
    if not room:
        found = ", ".join(f"{cpu:g} and {gpu:g}" for cpu, gpu in sorted(set(have), reverse=True))
        raise ConfigError(
            f"`--ray {address}`: a worker takes {cpus} CPUs and {gpus} GPUs of one node, but the nodes have {found}; "
            "take fewer `--threads`, or let a larger node join first"
        )
    return room


@contextlib.contextmanager
def _connected(address: str) -> Iterator[ModuleType]:
    """Context with Ray, connected to a cluster."""
    ray = cluster_library(address)
    if ray.is_initialized():  # by the calling program
        yield ray
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        # During initialisation Ray's own handlers would end the process, some by an abort. But the processes of a
        # cluster started here would inherit the blocked stop signals.
        with signals_waiting() if address != "local" else contextlib.nullcontext():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        raise _absent(address, error) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def cluster_library(address: str) -> ModuleType:
    """Return the module `ray` without connecting, if something listens at the address of a cluster.

    Raises ConfigError if Ray is not installed or nothing listens there.
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
            raise ValueError("`ray start` has recorded none on this machine, and RAY_ADDRESS is not set")
    host, _, port = address.rpartition(":")
    if not (host and re.fullmatch("[0-9]{1,5}", port)) or "/" in host:
        raise ValueError("not an address")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_SECONDS).close()


class _Actor:
    def __init__(self, folder: str) -> None:
        os.chdir(folder)

    def ready(self) -> None:
        """Return once the actor has started."""

    def do(self, do: Do, shard: Shard[Any]) -> Manifest:
        """Return what `do` returns."""
        return do(shard)


def _by_actors(
    ray: ModuleType, actors: Sequence[Any], do: Do, shards: Iterator[Shard[Any]], stopped: Callable[[], bool]
) -> Iterator[Manifest]:
    """Do shards with actors; Ray restarts dead actors, and living ones do their shards meanwhile."""
    function = ray.put(do)
    lost: list[Shard[Any]] = []
    deaths: Counter[int] = Counter()
    idle: list[Any] = []
    # An actor gets a shard only after it has answered: an actor that waits for a node must not hold up a shard.
    waking = {actor.ready.remote(): actor for actor in actors}
    working: dict[Any, tuple[Any, Shard[Any]]] = {}
    worked = time.monotonic()
    while not stopped():
        while idle and (shard := lost.pop() if lost else next(shards, None)) is not None:
            actor = idle.pop()
            working[actor.do.remote(function, shard)] = actor, shard
        if idle and not working:  # the last shard is done; other actors may still be waiting
            return
        if working:
            worked = time.monotonic()
        elif time.monotonic() - worked >= _SILENT_SECONDS:
            worked = time.monotonic()
            warnings.warn(
                f"no worker on the Ray cluster has started for {_SILENT_SECONDS:g} s: it is fully occupied (see "
                "`ray status`), or processes end right after they start (see the logs of the nodes); still waiting",
                stacklevel=2,
            )
        ended, _ = ray.wait([*working, *waking], num_returns=1, timeout=_WAIT_SECONDS)
        for answer in ended:
            actor, shard = working.pop(answer) if answer in working else (waking.pop(answer), None)
            try:
                result = ray.get(answer)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error  # the text of `error` is the worker's traceback
            except ray.exceptions.RayActorError as error:
                # This also covers lack of memory: OutOfMemoryError is only for actors that never restart.
                if error.actor_init_failed:
                    raise _unable(error) from None
                if shard is not None:
                    lost.append(shard)
                    deaths[shard.index] += 1
                    if deaths[shard.index] == _MOST_DEATHS:
                        raise _deadly(shard) from None
                elif isinstance(error, ray.exceptions.ActorDiedError):  # permanently, for example by `ray.kill`
                    if not (idle or working or waking):
                        raise _none_left(error) from None
                    continue
                time.sleep(_WAIT_SECONDS)  # until Ray knows that it is dead, calls fail at once
                waking[actor.ready.remote()] = actor
                continue
            idle.append(actor)
            if shard is not None:
                yield result


def _unable(error: Exception) -> ConfigError:
    node = re.search(r"\bip=([^,)]+)", str(error))
    return ConfigError(
        f"a worker on the Ray cluster cannot start{f' on {node[1]}' if node else ''} ({_last_line(error)}): every node "
        f"must see {os.getcwd()} under the same path, and have this version of ziggurat"
    )


def _none_left(error: Exception) -> DataError:
    return DataError(
        f"the last worker on the Ray cluster is gone and will not restart ({_last_line(error)}). What was done is "
        "kept; run the same command again"
    )


def _last_line(error: Exception) -> str:
    """Return the last line of Ray's message, after a traceback or numbers of actor and process."""
    return printable(str(error).strip().rpartition("\n")[2], 200)


def _deadly(shard: Shard[Any]) -> DataError:
    return DataError(
        f"shard {shard.index} killed its worker {_MOST_DEATHS} times, possibly out of memory: give workers more, or "
        "use a smaller `batch_tokens`. Finished work is kept"
    )
