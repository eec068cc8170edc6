"""Corpora and test sets as files of pairs: fetched, read, written and recorded as names and recipes request.

A recipe names files such as `data/wmt14-en-de/train.en.zst`; the section `folders` of the registry defines the corpora
of `train` in the folder `wmt14-en-de`. Corpora that cannot be fetched are reported with their origin.

Files appear whole or not at all. The record of their origin has their fingerprints, which every reader compares. So
existing files are not fetched again, and a set left incomplete by a kill is rewritten.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import lzma
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import xxhash

from ziggurat.config.data import CorpusConfig, DataConfig
from ziggurat.corpora.fetch.downloads import Downloads, Held, Member, is_archive, take_out
from ziggurat.corpora.fetch.indexes import Names
from ziggurat.corpora.fetch.layouts import Block, Counts, read
from ziggurat.corpora.fetch.registry import FolderSet, HoldOut, RegisteredCorpus
from ziggurat.data.inputs import Origin, read_origin, record_of, set_name, write_origin
from ziggurat.system.compressed import compression_of
from ziggurat.system.errors import ConfigError, DamageError, DataError, printable, written_whole
from ziggurat.system.files import atomic_file, fingerprint


@dataclass(frozen=True)
class PairFiles:
    """The files to which a set of pairs is written."""

    name: str
    """Name in the record: that of the corpus, or `folder/set`."""
    files: dict[str, Path]
    """Language -> file, whose suffix determines its compression."""

    @property
    def record(self) -> Path:
        """File of the record."""
        return record_of(next(iter(self.files.values())))


@dataclass(frozen=True)
class Written:
    """The outcome for a target."""

    target: PairFiles
    origin: Origin
    reused: bool
    """True if it existed already."""
    terms: dict[str, str] = field(default_factory=dict)


def _write_set(
    target: PairFiles,
    corpora: Sequence[RegisteredCorpus],
    downloads: Downloads,
    *,
    force: bool = False,
    held_out: tuple[HoldOut, PairFiles] | None = None,
) -> list[Written]:
    """Write the pairs of `corpora`, in order, to the files of `target`; return it and the held-out set.

    Raises ConfigError or DataError with a remedy; nothing half-written is left.
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
                fields = ("name", "title", "licence", "terms")  # in the order in which records have them
                described = {field: value for field in fields if (value := getattr(corpus, field))}
                found = {"pairs": counts.pairs, "skipped": counts.skipped, "files": [one.document() for one in held]}
                parts.append({**described, **found})
        # Records come before the files get their names, so that after a kill in between the files are known to come
        # from `fetch`.
        for writer in writers:
            writer.record(parts)
    return [Written(one.target, cast(Origin, read_origin(one.target.record)), False, terms) for one in writers]


def _fetched(corpora: Sequence[RegisteredCorpus], downloads: Downloads) -> list[list[Held]]:
    """Return the files of each corpus. Raises DataError with all that are unavailable, not only the first."""
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


def _share_out(block: Block, writers: Sequence[_Writer], held_out: tuple[HoldOut, PairFiles] | None) -> None:
    """Write a block to the target, and its held-out pairs to the target for them."""
    if held_out is None:
        writers[0].write(block)
        return
    first, every = sum(writer.pairs for writer in writers) + 1, held_out[0].every
    for writer, apart in zip(writers, (False, True), strict=True):
        writer.write(tuple([x for n, x in enumerate(side, first) if (n % every == 0) == apart] for side in block))


def _there(target: PairFiles, corpora: Sequence[RegisteredCorpus]) -> Origin | None:
    """Return the record of a target that exists in full and was made from the same corpora; otherwise None.

    Raises DataError for files that have changed since, or that were made from other corpora.
    """
    origin, there = read_origin(target.record), [path for path in target.files.values() if path.exists()]
    if origin is None or not there:
        return None
    for path in there:
        known = origin.files.get(path.name)
        if known is None or known.bytes != path.stat().st_size or fingerprint(path) != known.xxh3_128:
            raise DataError(f"{path}: changed since it was fetched; `--force` writes it again")
    names = [part.name for part in origin.parts]
    if names != [corpus.name for corpus in corpora]:
        raise DataError(
            f"{target.record}: was made from {', '.join(names)}; `--force` writes it again from those named now"
        )
    return origin if len(there) == len(target.files) else None


def _refuse_foreign(target: PairFiles, force: bool) -> None:
    """Raise DataError for files that `fetch` did not write, or did not finish."""
    there = [path for path in target.files.values() if path.exists()]
    if there and not force and read_origin(target.record) is None:
        raise DataError(
            f"{there[0]}: exists, but no record says that it was fetched whole ({target.record.name}); remove it, "
            "or give `--force` to replace it"
        )


def _blocks(corpus: RegisteredCorpus, held: Sequence[Held], counts: Counts, downloads: Downloads) -> Iterator[Block]:
    """Yield the pairs of a corpus. Raises DataError; a damaged download is removed, so that it can be fetched again."""
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
                raise  # archives show whether they are truncated
            paths = " or ".join(str(one.path) for one in held)
            way_out = f"if it was cut, remove {paths} and run this again, with its `bytes` or `sha256` in a registry"
            raise DataError(f"{error}; {way_out}") from None


def _read_parts(corpus: RegisteredCorpus, held: Sequence[Held], counts: Counts, scratch: Path) -> Iterator[Block]:
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
            f"{archives}: expected the same number of files for each side, found {said}; the languages or the version "
            "may not be in it, or its layout is not the one in the registry"
        )
    for group in zip(*members.values(), strict=True):
        try:
            yield from read(corpus, [member.path for member in group], counts)
        except DataError as error:
            message = str(error)
            for member in group:
                message = message.replace(str(member.path), f"{archives}, member {printable(member.name, 200)}")
            raise type(error)(message) from None
        for member in group:
            member.path.unlink()


def _by_language(corpus: RegisteredCorpus, block: Block, target: PairFiles) -> Block:
    """Return the sides of a block in the order of the target's languages. Raises DataError for other languages."""
    if sorted(corpus.languages) != sorted(target.files):
        raise DataError(f"{corpus.name}: is {'-'.join(corpus.languages)}, not {'-'.join(target.files)}")
    return tuple(block[corpus.languages.index(language)] for language in target.files)


class _Writer:
    """Writer of both sides of a target; its files get their names when the stack `files` closes without an error."""

    def __init__(self, files: contextlib.ExitStack, target: PairFiles) -> None:
        self.target, self.pairs = target, 0
        for path in target.files.values():
            path.parent.mkdir(parents=True, exist_ok=True)
        self._files = [_Digesting(files.enter_context(atomic_file(path))) for path in target.files.values()]
        self._sides: list[Any] = []

    def open(self, packed: contextlib.ExitStack) -> None:
        """Start writing; the files are complete when `packed` closes."""
        for path, file in zip(self.target.files.values(), self._files, strict=True):
            self._sides.append(packed.enter_context(_packed(file, compression_of(path))))

    def write(self, block: Block) -> None:
        """Write the sides of a block."""
        self.pairs += len(block[0])
        for path, side, lines in zip(self.target.files.values(), self._sides, block, strict=True):
            if lines:
                with written_whole(path):
                    side.write("\n".join([*lines, ""]).encode("utf-8"))

    def record(self, parts: list[dict[str, Any]]) -> None:
        """Write the record, with length and fingerprint of each file."""
        named = zip(self.target.files.values(), self._files, strict=True)
        files = {path.name: {"bytes": file.size, "xxh3_128": file.digest.hexdigest()} for path, file in named}
        about = {"name": self.target.name, "languages": list(self.target.files), "pairs": self.pairs, "parts": parts}
        write_origin(self.target.record, about, files)


class _Digesting(io.RawIOBase):
    """A file being written, with its fingerprint; closing it leaves the underlying file open, to be renamed."""

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
        import pyarrow as pa  # takes 0.1 s, which `--list` should not pay

        with pa.CompressedOutputStream(pa.PythonFile(file, mode="w"), "zstd") as packed_zst:
            yield packed_zst


@dataclass(frozen=True)
class FetchTask:
    """A target and the corpora from which it is made."""

    target: PairFiles
    corpora: tuple[RegisteredCorpus, ...]
    held_out: tuple[HoldOut, PairFiles] | None = None
    own: bool = False
    """True if the files exist but were not fetched: they are the user's and stay."""
    by_hand: str | None = None
    """Reason why it cannot be fetched, and its origin."""

    @property
    def missing(self) -> bool:
        """True if the user has to provide it."""
        return self.by_hand is not None and not self.own


def task_of_name(corpus: RegisteredCorpus, folder: Path) -> FetchTask:
    """Return the task of a corpus by its name: `FOLDER/opus/Tatoeba/v2/de-en.de.zst`. Raises ConfigError."""
    steps = corpus.name.split("/")
    if any(step in ("", ".", "..") or step.startswith(".") for step in steps):
        raise ConfigError(f"{printable(corpus.name, 200)}: its name would lead out of the folder")
    stem = folder.joinpath(*steps)
    files = {language: stem.with_name(f"{stem.name}.{language}.zst") for language in corpus.languages}
    return FetchTask(PairFiles(corpus.name, files), (corpus,))


def tasks_of_config(data: DataConfig, names: Names, where: str) -> list[FetchTask]:
    """Return a task for each set of files that a configuration names and the registry describes, and for extra sets.

    `where` is the configuration's name, for messages.

    Raises ConfigError for corpora that are not named as in a recipe, or whose folder the registry lacks.
    """
    wanted: dict[tuple[Path, str], dict[str, Path]] = {}
    endings: dict[Path, dict[str, str]] = {}
    for _, its_key, corpus in data.corpora():
        key = f"{where}: {its_key}"
        folder, files = _named(corpus, data, key)
        if (described := names.registry.folders.get(folder.name)) is None:
            known = ", ".join(names.registry.folders)
            raise ConfigError(
                f"{key}: no registry says what the folder `{printable(folder.name)}` holds ({known} are known); "
                "fetch its corpora by name, or describe it in a registry of your own (docs/data.md)"
            )
        sets = [*described.sets, *(its.hold_out.set for its in described.sets.values() if its.hold_out is not None)]
        for language, path in files.items():
            if (name := set_name(path)) not in sets:
                has = ", ".join(sets)
                raise ConfigError(f"{key}: the registry has no set `{printable(name)}` of {folder.name}; it has {has}")
            wanted.setdefault((folder, name), {})[language] = path
        # The development corpora come last, because test sets are compressed in the same way.
        endings[folder] = {language: f"{language}{compression_of(path) or ''}" for language, path in files.items()}
    for folder, ending in endings.items():
        for extra in (one for one, its in names.registry.folders[folder.name].sets.items() if its.extra):
            wanted.setdefault((folder, extra), {code: folder / f"{extra}.{end}" for code, end in ending.items()})
    for (folder, name), files in list(wanted.items()):
        for whole, its in names.registry.folders[folder.name].sets.items():
            if its.hold_out is not None and its.hold_out.set == name:  # written together with the set it comes from
                wanted.setdefault((folder, whole), {language: folder / f"{whole}.{language}.zst" for language in files})
    return [
        _task(names.registry.folders[folder.name].sets[name], folder, name, wanted, names)
        for folder, name in wanted
        if name in names.registry.folders[folder.name].sets
    ]


def _named(corpus: CorpusConfig, data: DataConfig, key: str) -> tuple[Path, dict[str, Path]]:
    """Return folder and files of a recipe's corpus: `FOLDER/SET.LANGUAGE`, possibly compressed. Raises ConfigError."""
    if corpus.source is not None and corpus.target is not None:
        source, target = data.languages_of(corpus)
        files = {source: Path(corpus.source).expanduser(), target: Path(corpus.target).expanduser()}
        named = all(path.name.startswith(f"{set_name(path)}.{language}") for language, path in files.items())
        if named and len(files) == 2 and len({path.parent for path in files.values()}) == 1:
            return Path(corpus.source).expanduser().parent, files
    raise ConfigError(
        f"{key}: only files of one side, called FOLDER/SET.LANGUAGE such as data/wmt14-en-de/train.en.zst, can be "
        "fetched for a configuration; fetch other corpora by their names"
    )


def _task(
    described: FolderSet, folder: Path, name: str, wanted: Mapping[tuple[Path, str], dict[str, Path]], names: Names
) -> FetchTask:
    """Return the task of one set of a folder."""
    files = wanted[folder, name]
    target = PairFiles(f"{folder.name}/{name}", files)
    own = all(path.exists() for path in files.values()) and not target.record.exists()
    if described.by_hand is not None or own:
        return FetchTask(target, (), own=own, by_hand=described.by_hand)
    if len(files) != 2:
        raise ConfigError(f"{folder}: the set {name} has two languages, but the configuration names only one side")
    first, second = sorted(files)  # so that recipes of both directions name one corpus
    corpora = tuple(names.find(one.replace("{a}", first).replace("{b}", second)) for one in described.of)
    if (hold_out := described.hold_out) is None:
        return FetchTask(target, corpora)
    plain = {language: folder / f"{hold_out.set}.{language}" for language in files}
    apart = PairFiles(f"{folder.name}/{hold_out.set}", wanted.get((folder, hold_out.set), plain))
    return FetchTask(target, corpora, (hold_out, apart))


def by_hand(tasks: Sequence[FetchTask]) -> list[str]:
    """Return a message for each task whose files the user has to provide."""
    return [f"{' and '.join(map(str, task.target.files.values()))}: {task.by_hand}" for task in tasks if task.missing]


def run_task(task: FetchTask, downloads: Downloads, *, force: bool = False) -> list[Written]:
    """Fetch the files of a task, unless they are the user's own. Raises ConfigError or DataError."""
    if task.own or task.by_hand is not None:
        return []
    return _write_set(task.target, task.corpora, downloads, force=force, held_out=task.held_out)
