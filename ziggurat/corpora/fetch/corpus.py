"""From the files of corpora to a file for each language: fetched, taken out of archives, read, written, recorded.

Files appear whole or not at all. The record of their origin has their fingerprints, and whatever reads it compares
them; so nothing is done where they are there already, and a set of which a kill left a part is written anew.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import lzma
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import xxhash

from ziggurat.corpora.fetch.archives import Member, is_archive, take_out
from ziggurat.corpora.fetch.downloads import Downloads, Held
from ziggurat.corpora.fetch.entries import Corpus, HoldOut
from ziggurat.corpora.fetch.layouts import Block, Counts, read
from ziggurat.data.origins import Origin, read_origin, record_of, write_origin
from ziggurat.system.compressed import compression_of
from ziggurat.system.errors import DamageError, DataError, printable, written_whole
from ziggurat.system.files import atomic_file, fingerprint


@dataclass(frozen=True)
class Target:
    """The files that a set of pairs is written to."""

    name: str
    """Name in the record: that of the corpus, or `folder/set`."""
    files: dict[str, Path]
    """Language -> file; its ending says how it is compressed."""

    @property
    def record(self) -> Path:
        """The place of the record."""
        return record_of(next(iter(self.files.values())))


@dataclass(frozen=True)
class Written:
    """What became of a target."""

    target: Target
    origin: Origin
    reused: bool
    """True if it was there already."""
    terms: dict[str, str] = field(default_factory=dict)


def write_set(
    target: Target,
    corpora: Sequence[Corpus],
    downloads: Downloads,
    *,
    force: bool = False,
    held_out: tuple[HoldOut, Target] | None = None,
) -> list[Written]:
    """Write the pairs of `corpora`, in order, to the files of `target`; return it, and what was held out.

    Args:
        target: the files, one for each language.
        corpora: all of the same languages.
        downloads: gets the files of the corpora.
        force: write anew what is there.
        held_out: every n-th pair goes to a target of its own.

    Raises ConfigError, DataError with the way out; nothing half-written is left.
    """
    targets = [target, *([held_out[1]] if held_out else [])]
    there = [None if force else _there(one, corpora) for one in targets]
    if all(there):
        return [Written(one, cast(Origin, origin), True) for one, origin in zip(targets, there, strict=True)]
    for one in targets:
        _refuse_foreign(one, force)
    fetched = _fetched(corpora, downloads)
    parts: list[dict[str, Any]] = []
    terms: dict[str, str] = {}
    with contextlib.ExitStack() as files:
        writers = [_Writer(files, one) for one in targets]
        with contextlib.ExitStack() as packed:
            for writer in writers:
                writer.open(packed)
            for corpus, held in zip(corpora, fetched, strict=True):
                counts = Counts()
                for block in _blocks(corpus, held, counts, downloads):
                    _share_out(_by_language(corpus, block, target), writers, held_out)
                    downloads.progress(f"read {corpus.name}", counts.pairs, None)
                terms |= {f"{corpus.name}: {name}": text for name, text in counts.terms.items()}
                parts.append(_part(corpus, held, counts))
        # The records before the files get their names: killed in between, what is there is known to be ours.
        for writer in writers:
            write_origin(writer.target.record, writer.record(parts), writer.written())
    return [Written(one.target, cast(Origin, read_origin(one.target.record)), False, terms) for one in writers]


def _fetched(corpora: Sequence[Corpus], downloads: Downloads) -> list[list[Held]]:
    """Return the files of each corpus. Raises DataError with all that cannot be had, not only with the first."""
    fetched, problems = list[list[Held]](), dict[str, None]()
    for corpus in corpora:
        fetched.append([])
        for remote in corpus.files:
            try:
                fetched[-1].append(downloads.get(remote))
            except DataError as error:
                problems[str(error)] = None
    if problems:
        raise DataError("\n".join(problems))
    return fetched


def _share_out(block: Block, writers: Sequence[_Writer], held_out: tuple[HoldOut, Target] | None) -> None:
    """Write a block to the target, and what is held out of it to the other."""
    if held_out is None:
        writers[0].write(block)
        return
    first, every = sum(writer.pairs for writer in writers) + 1, held_out[0].every
    for writer, apart in zip(writers, (False, True), strict=True):
        writer.write(tuple([x for n, x in enumerate(side, first) if (n % every == 0) == apart] for side in block))


def _part(corpus: Corpus, held: Sequence[Held], counts: Counts) -> dict[str, Any]:
    """Return the record of a corpus."""
    return {
        "name": corpus.name,
        "title": corpus.title,
        "licence": corpus.licence,
        **({"terms": corpus.terms} if corpus.terms else {}),
        "pairs": counts.pairs,
        "skipped": counts.skipped,
        "files": [one.document() for one in held],
    }


def _there(target: Target, corpora: Sequence[Corpus]) -> Origin | None:
    """Return the record of a target that is there whole, made of the same corpora; None where it is not.

    Raises DataError for files that changed since, or that were made of other corpora.
    """
    origin, there = read_origin(target.record), [path for path in target.files.values() if path.exists()]
    if origin is None or not there:
        return None
    for path in there:
        known = origin.files.get(path.name)
        if known is None or known.bytes != path.stat().st_size or fingerprint(path) != known.xxh3_128:
            raise DataError(f"{path}: changed since it was fetched; `--force` writes it anew")
    names = [part.name for part in origin.parts]
    if names != [corpus.name for corpus in corpora]:
        raise DataError(f"{target.record}: is of {', '.join(names)}; `--force` writes it anew of the corpora named now")
    return origin if len(there) == len(target.files) else None


def _refuse_foreign(target: Target, force: bool) -> None:
    """Raise DataError for files that `fetch` did not write, or did not finish."""
    there = [path for path in target.files.values() if path.exists()]
    if there and not force and read_origin(target.record) is None:
        raise DataError(
            f"{there[0]}: is there, but not with a record that it was fetched whole ({target.record.name}); remove it, "
            "or give `--force` to replace it"
        )


def _blocks(corpus: Corpus, held: Sequence[Held], counts: Counts, downloads: Downloads) -> Iterator[Block]:
    """Yield the pairs of a corpus. Raises DataError; a damaged download is removed, so that it can be fetched anew."""
    with tempfile.TemporaryDirectory(prefix="ziggurat-fetch-") as scratch:
        try:
            yield from _read_parts(corpus, held, counts, Path(scratch))
        except DamageError as error:
            damaged = [one for one in held if str(one.path) in str(error)]
            if not damaged:
                raise
            raise DataError(f"{error}; {downloads.discard(damaged[0])}") from None
        except DataError as error:
            if corpus.take or all(remote.bytes or remote.sha256 or remote.md5 for remote in corpus.files):
                raise  # archives tell by themselves whether they are cut
            paths = " or ".join(str(one.path) for one in held)
            way_out = f"if it was cut, remove {paths} and run this again, with its `bytes` or `sha256` in a registry"
            raise DataError(f"{error}; {way_out}") from None


def _read_parts(corpus: Corpus, held: Sequence[Held], counts: Counts, scratch: Path) -> Iterator[Block]:
    """Yield the pairs of each group of files: members of archives in sorted order, or the files themselves."""
    if not corpus.take:
        yield from read(corpus, [one.path for one in held], counts)
        return
    members: dict[str, list[Member]] = {pattern: [] for pattern in corpus.take}
    for number, one in enumerate(held):
        if not is_archive(one.path):
            raise DataError(f"{one.path}: is not called .zip or .tar, .tgz, .tar.gz, so nothing can be taken out of it")
        inside = scratch / str(number)
        inside.mkdir()
        found, terms = take_out(one.path, list(members), inside)
        counts.terms |= {name if len(held) == 1 else f"{one.url}: {name}": text for name, text in terms.items()}
        for pattern, more in found.items():
            members[pattern] += more
    archives = ", ".join(str(one.path) for one in held)
    numbers = {pattern: len(found) for pattern, found in members.items()}
    if 0 in numbers.values() or len(set(numbers.values())) > 1:
        said = ", ".join(f"{printable(pattern, 120)}: {number}" for pattern, number in numbers.items())
        raise DataError(
            f"{archives}: wanted are equally many files for each side, found {said}; the languages or the version may "
            "not be in it, or it has another layout than the registry says"
        )
    for group in zip(*members.values(), strict=True):
        try:
            yield from read(corpus, [member.path for member in group], counts)
        except DataError as error:
            raise type(error)(_with_names(str(error), group, archives)) from None
        for member in group:
            member.path.unlink()


def _with_names(message: str, group: Sequence[Member], archives: str) -> str:
    """Return a message with the names of members in place of those of their copies."""
    for member in group:
        message = message.replace(str(member.path), f"{archives}, member {printable(member.name, 200)}")
    return message


def _by_language(corpus: Corpus, block: Block, target: Target) -> Block:
    """Return the sides of a block in the order of the target's languages. Raises DataError for other languages."""
    if sorted(corpus.languages) != sorted(target.files):
        raise DataError(f"{corpus.name}: is {'-'.join(corpus.languages)}, wanted is {'-'.join(target.files)}")
    return tuple(block[corpus.languages.index(language)] for language in target.files)


class _Writer:
    """Writes the sides of a target; its files get their names when the stack `files` closes without an error."""

    def __init__(self, files: contextlib.ExitStack, target: Target) -> None:
        self.target, self.pairs = target, 0
        for path in target.files.values():
            path.parent.mkdir(parents=True, exist_ok=True)
        self._files = [_Digesting(files.enter_context(atomic_file(path))) for path in target.files.values()]
        self._sides: list[Any] = []

    def open(self, packed: contextlib.ExitStack) -> None:
        """Begin to write; the files are complete when `packed` closes."""
        for path, file in zip(self.target.files.values(), self._files, strict=True):
            self._sides.append(packed.enter_context(_packed(file, compression_of(path))))

    def write(self, block: Block) -> None:
        """Write the sides of a block."""
        self.pairs += len(block[0])
        for path, side, lines in zip(self.target.files.values(), self._sides, block, strict=True):
            if lines:
                with written_whole(path):
                    side.write("\n".join([*lines, ""]).encode("utf-8"))

    def record(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the record, without the files."""
        languages = list(self.target.files)
        return {"name": self.target.name, "languages": languages, "pairs": self.pairs, "parts": list(parts)}

    def written(self) -> dict[str, dict[str, Any]]:
        """Return length and fingerprint of each file by its name."""
        files = zip(self.target.files.values(), self._files, strict=True)
        return {path.name: {"bytes": file.size, "xxh3_128": file.digest.hexdigest()} for path, file in files}


class _Digesting(io.RawIOBase):
    """A file being written, with its fingerprint; closing it leaves the file behind it open, to be renamed."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.size, self.digest = file, 0, xxhash.xxh3_128()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.size += len(data)
        return self._file.write(data)


@contextlib.contextmanager
def _packed(file: _Digesting, compression: str | None) -> Iterator[Any]:
    """Context with a stream that compresses into `file`; equal content gives equal bytes."""
    if compression is None:
        yield file
    elif compression == ".gz":
        with gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=cast(Any, file), mtime=0) as packed:
            yield packed
    elif compression == ".xz":
        with lzma.open(cast(Any, file), "wb") as packed_xz:
            yield packed_xz
    else:
        import pyarrow as pa  # a tenth of a second, which `--list` need not wait for

        with pa.CompressedOutputStream(pa.PythonFile(file, mode="w"), "zstd") as packed_zst:
            yield packed_zst
