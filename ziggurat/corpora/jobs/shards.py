"""Shards of a job, and the files that a stage writes for each: complete or absent."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import xxhash

from ziggurat.system.errors import DataError
from ziggurat.system.files import write_atomically
from ziggurat.system.small_files import built, parse_json, read_bounded

Item = TypeVar("Item")


@dataclass(frozen=True)
class Shard(Generic[Item]):
    """Consecutive items of the input.

    Attributes:
        index: number of the shard.
        first: number of its first item; where items have weights, what those before it weigh.
        items: the items.
    """

    index: int
    first: int
    items: list[Item]


def cut(
    items: Iterable[Item],
    size: int,
    wanted: Callable[[int], bool],
    *,
    start: int = 0,
    weight: Callable[[Item], int] = lambda item: 1,
) -> Iterator[Shard[Item]]:
    """Yield, in order, the shards whose number is `wanted`.

    Args:
        items: all items: those of other shards are read too, since only reading finds their ends, but not kept.
        size: a shard ends with the item that brings it to this weight; the last one may weigh less.
        wanted: whether the shard with this number is to be kept.
        start: number of the first shard.
        weight: weight of an item.
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
    """Record of a stage's result for one shard.

    Attributes:
        stage: name of the stage.
        shard: number of the shard.
        plan: fingerprint of the plan (ziggurat.corpora.jobs.plan).
        output: checksum of the file.
        bytes: size of the file.
        read: items of the shard, or their weight.
        kept: rows of the file.
        dropped: items that this stage and those before dropped, or noticed, by reason.
        input: checksum of the file of the stage before; empty for the first.
    """

    stage: str
    shard: int
    plan: str
    output: str
    bytes: int
    read: int
    kept: int
    dropped: Mapping[str, int] = field(default_factory=dict)
    input: str = ""


class StageFiles:
    """Files of one stage: `<shard>.<ending>`, and its manifest `<shard>.json`, which is written last.

    A shard is complete if its manifest exists and is of the same plan, and the file has the size in the manifest.

    Args:
        folder: folder of the job.
        stage: name of the stage, and of its folder in there.
        plan: fingerprint of the plan.
        ending: ending of the files' names.
    """

    def __init__(self, folder: Path, stage: str, plan: str, ending: str = "tsv") -> None:
        self.folder = folder / stage
        self.stage, self.plan, self.ending = stage, plan, ending

    def path(self, index: int) -> Path:
        """Return the file of a shard."""
        return self.folder / f"{index:08d}.{self.ending}"

    def complete(self, index: int) -> Manifest | None:
        """Return the manifest of a complete shard, else None. Raises DataError, MachineError when it cannot be read."""
        try:
            content = read_bounded(self.path(index).with_suffix(".json"))
            size = self.path(index).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:  # a folder that cannot be searched, for example: no reason to do the shard again
            where = error.filename or self.path(index)
            raise DataError(f"{where}: cannot be read: {error.strerror or error}") from None
        try:
            manifest = built(Manifest, parse_json(content, ""))
        except (DataError, ValueError):  # cut off by a full disk, or of another format
            return None
        whole = (manifest.plan, manifest.stage, manifest.shard, manifest.bytes)
        return manifest if whole == (self.plan, self.stage, index, size) else None

    def finished(self) -> list[Manifest]:
        """Return the manifests of all complete shards, in order; raises as `complete`."""
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

        The content is a function of the plan, so an older manifest of the same plan describes it, too, and it does no
        harm if two processes do one shard.
        """
        # Without sweeps: folders have very many files, and `run_job` sweeps them once.
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path(index), content, sweeps=False)
        output = xxhash.xxh3_128_hexdigest(content)
        counts = dict(sorted(dropped.items()))
        manifest = Manifest(self.stage, index, self.plan, output, len(content), read, kept, counts, input)
        document = json.dumps(asdict(manifest), indent=1, sort_keys=True) + "\n"
        write_atomically(self.path(index).with_suffix(".json"), document.encode(), sweeps=False)
        return manifest

    def read(self, manifest: Manifest) -> bytes:
        """Return the content of a complete shard. Raises DataError when the file has another checksum."""
        path = self.path(manifest.shard)
        content = path.read_bytes()
        if xxhash.xxh3_128_hexdigest(content) != manifest.output:
            raise DataError(f"{path}: damaged (other checksum than in {path.stem}.json); remove it and run again")
        return content
