"""Files below the corpora: which ones a pattern names, fingerprints, atomic writes."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterator
from pathlib import Path
from re import Pattern
from typing import BinaryIO

import xxhash

from ziggurat.data.compressed import compression_of
from ziggurat.data.temporary import make_temporary, remove_dead, sync_folder
from ziggurat.documents import check_regular
from ziggurat.errors import DataError, refuse_passing, written_whole

__all__ = [
    "atomic_file",
    "find_files",
    "fingerprint",
    "holds_only",
    "write_atomically",
]


def _umask() -> int:
    """Return the process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


_UMASK = _umask()  # once: setting it in one thread would change what another is creating


def find_files(pattern: str, key: str) -> list[Path]:
    """Return the files that `pattern` (a path or a glob, `**` included) names, sorted.

    `key` is the configuration key that holds the pattern, for the message.

    Raises:
        DataError: nothing there, something that is not a regular file, or a file both packed and unpacked, which
            would be read twice.
    """
    plain = Path(pattern).expanduser()
    if plain.exists() or not glob.has_magic(pattern):
        found = [plain]
    else:
        found = sorted(Path(name) for name in glob.glob(str(plain), recursive=True) if os.path.isfile(name))
        if not found:
            raise DataError(f"{key}: no file matches {pattern!r} (looked in {Path.cwd()})")
    together = set(found)
    for path in found:
        if not path.exists():
            raise DataError(f"{key}: no such file: {path} (relative paths start from {Path.cwd()})")
        if not path.is_file():
            raise DataError(f"{key}: {path} is not a regular file; corpora are read more than once")
        if compression_of(path) and (unpacked := path.with_suffix("")) in together:
            raise DataError(f"{key}: {pattern!r} names {path} and {unpacked}; remove one, or name it more closely")
    return found


def fingerprint(path: Path) -> str:
    """Return the 128-bit xxHash of the file's bytes in hexadecimal (an identity, not a signature).

    Raises DataError: there is none, or it cannot be read; a pipe or device, which might never end, is not.
    """
    digest = xxhash.xxh3_128()
    try:
        check_regular(path)
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        refuse_passing(path, error)
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    return str(digest.hexdigest())


def write_atomically(path: Path, content: bytes, *, sweeps: bool = True) -> None:
    """Write `content` so that `path` has either its old content or all of the new, even after a power cut.

    `sweeps` is as in atomic_file.
    """
    with atomic_file(path, sweeps=sweeps) as file:
        file.write(content)


@contextlib.contextmanager
def atomic_file(path: Path, *, sweeps: bool = True) -> Iterator[BinaryIO]:
    """Open a file that takes the place of `path` at the end of the block; after an error there is no trace of it.

    A killed process leaves a temporary file, which the next one to write `path` removes; `sweeps` is False where it
    would have to look through very many files, and ziggurat.data.workspace.sweep does it once for all.
    """
    if sweeps:
        remove_dead(path)
    with written_whole(path):
        yield from _atomic_file(path)


def _atomic_file(path: Path) -> Iterator[BinaryIO]:
    descriptor, temporary = make_temporary(path)
    try:
        # Closed after the rename: until then the lock says that the writer lives.
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fchmod(file.fileno(), 0o666 & ~_UMASK)
            os.fsync(file.fileno())  # before it has its name: else a power cut could leave an empty file under it
            os.replace(temporary, path)
        # Without this the new name may come to the disk seconds later. Until then a power cut would bring the old
        # content back, though we have said that we wrote it, and what was written after it may be there already.
        sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def holds_only(folder: Path, names: Pattern[str]) -> bool:
    """Whether `folder` is a folder with nothing in it but files called so (an empty one is)."""
    return folder.is_dir() and all(entry.is_file() and names.fullmatch(entry.name) for entry in folder.iterdir())
