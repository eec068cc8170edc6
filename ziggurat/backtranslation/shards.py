"""Shards of monolingual files, and the files that each stage writes for a shard: complete or absent."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import xxhash

from ziggurat.backtranslation.filters import MAX_CHARACTERS, readable
from ziggurat.data.compressed import byte_blocks
from ziggurat.data.files import write_atomically
from ziggurat.errors import DataError
from ziggurat.small_files import built, parse_json, read_bounded

__all__ = ["Line", "Manifest", "Stage", "StageFiles", "TextShard", "count_lines", "cut", "raw_lines"]

_MAX_BYTES = 4 * MAX_CHARACTERS + 5  # a UTF-8 character has up to 4 bytes, a byte order mark 3, CR and LF 2
Line = tuple[str, str | None]
"""A line's text and None, or "" and the reason to drop it."""
Stage = Literal["translated", "filtered"]


@dataclass(frozen=True)
class TextShard:
    """Consecutive lines of the input.

    Attributes:
        index: Number of the shard, from 0.
        first: Number of its first line over all files, from 0.
        lines: The lines.
        checksum: Hash of the lines' bytes.
    """

    index: int
    first: int
    lines: list[Line]
    checksum: str


def raw_lines(path: Path) -> Iterator[bytes | None]:
    """Yield the lines of a file as bytes without LF, unpacked by its name's ending; None for a line that is too long.

    Memory does not grow with the file or a line. Raises DataError for a file that cannot be read or unpacked.
    """
    begun, too_long = b"", False  # the beginning of a line whose end is in a later block
    for block in byte_blocks(path):
        *ended, rest = block.split(b"\n")
        for piece in ended:
            whole = begun + piece
            yield None if too_long or len(whole) > _MAX_BYTES else whole
            begun, too_long = b"", False
        begun += rest
        # Forget the beginning of a line that is too long, so that memory does not grow with it.
        if len(begun) > _MAX_BYTES:
            begun, too_long = b"", True
    if begun or too_long:
        yield None if too_long else begun


def count_lines(files: Sequence[Path]) -> int:
    """Return the number of lines of all files together. Raises DataError as `raw_lines` does."""
    return sum(1 for path in files for _ in raw_lines(path))


def cut(files: Sequence[Path], size: int, wanted: Callable[[int], bool]) -> Iterator[TextShard]:
    """Yield, in order, the shards of `size` lines (the last may have fewer) whose number is `wanted`."""
    lines: list[Line] = []
    digest = xxhash.xxh3_128()
    number = 0
    # Lines of other shards are read, since only reading finds their ends, but not kept.
    take = wanted(0)
    for path in files:
        for in_file, raw in enumerate(raw_lines(path)):
            if take:
                digest.update(b"\0" if raw is None else raw + b"\n")
                lines.append(readable(raw, first_of_file=in_file == 0))
            number += 1
            if number % size == 0:
                if take:
                    yield TextShard(number // size - 1, number - size, lines, digest.hexdigest())
                lines, digest, take = [], xxhash.xxh3_128(), wanted(number // size)
    if lines:
        yield TextShard(number // size, number - len(lines), lines, digest.hexdigest())


@dataclass(frozen=True)
class Manifest:
    """Record of a stage's result for one shard.

    Attributes:
        stage: Name of the stage.
        shard: Number of the shard.
        plan: Fingerprint of the plan (ziggurat.backtranslation.plan).
        input: Checksum of the stage's input: the lines, or the file of the stage before.
        output: Checksum of the file.
        bytes: Size of the file.
        read: Lines of the shard.
        kept: Rows of the file.
        dropped: Lines that this stage and those before dropped, by reason.
    """

    stage: Stage
    shard: int
    plan: str
    input: str
    output: str
    bytes: int
    read: int
    kept: int
    dropped: Mapping[str, int]


class StageFiles:
    """Files of one stage: `<shard>.tsv`, and its manifest `<shard>.json`, which is written last.

    A shard is complete if its manifest exists and is of the same plan, and the file has the size in the manifest.
    """

    def __init__(self, folder: Path, stage: Stage, plan: str) -> None:
        self.folder = folder / stage
        self.stage: Stage = stage
        self.plan = plan

    def path(self, index: int) -> Path:
        """Return the file of a shard."""
        return self.folder / f"{index:08d}.tsv"

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

    def write(self, index: int, rows: Sequence[Sequence[str]], **counts: Any) -> Manifest:
        """Write the rows of a shard (fields without tabs or line ends) and its manifest; return the manifest.

        The content is a function of the plan, so an older manifest of the same plan describes it, too.
        """
        content = "".join("\t".join(row) + "\n" for row in rows).encode()
        # Without sweeps: folders have very many files, and `back_translate` sweeps them once.
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path(index), content, sweeps=False)
        manifest = Manifest(
            stage=self.stage,
            shard=index,
            plan=self.plan,
            output=xxhash.xxh3_128_hexdigest(content),
            bytes=len(content),
            kept=len(rows),
            **counts,
        )
        document = json.dumps(asdict(manifest), indent=1, sort_keys=True) + "\n"
        write_atomically(self.path(index).with_suffix(".json"), document.encode(), sweeps=False)
        return manifest

    def read(self, manifest: Manifest) -> list[list[str]]:
        """Return the rows of a complete shard. Raises DataError when the file has another checksum."""
        path = self.path(manifest.shard)
        content = path.read_bytes()
        if xxhash.xxh3_128_hexdigest(content) != manifest.output:
            raise DataError(f"{path}: damaged (other checksum than in {path.stem}.json); remove it and run again")
        return [line.split("\t") for line in content.decode().split("\n")[:-1]]
