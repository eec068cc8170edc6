"""Files: finding them by pattern, fingerprints, and writes that appear whole or not at all.

Among the modules about files and folders, in order of use: compressed (reading), temporary (names and locks), files,
staging and workspace (the same for folders), checksums, folder_kinds.
"""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterator
from pathlib import Path
from re import Pattern
from typing import BinaryIO

import xxhash

from ziggurat.system.compressed import compression_of
from ziggurat.system.errors import DataError, refuse_passing, written_whole
from ziggurat.system.small_files import check_regular
from ziggurat.system.temporary import make_temporary, remove_dead, sync_folder


def find_files(pattern: str, key: str) -> list[Path]:
    """Return the files that match `pattern` (a path or a glob, `**` included), sorted.

    `key` is the configuration key of the pattern, for messages.

    Raises:
        DataError: no file, something that is not a regular file, or one file both compressed and not, which would be
            read twice.
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

    Raises DataError: there is no such file, it cannot be read, or it is a pipe or device, which might never end.
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


def holds_only(folder: Path, names: Pattern[str]) -> bool:
    """Return True if `folder` is a folder whose entries are all files with such names (or that is empty)."""
    return folder.is_dir() and all(entry.is_file() and names.fullmatch(entry.name) for entry in folder.iterdir())


def write_atomically(path: Path, content: bytes, *, sweeps: bool = True) -> None:
    """Write `content` so that `path` has either its old content or all of the new, even after a power cut.

    `sweeps`: see atomic_file.
    """
    with atomic_file(path, sweeps=sweeps) as file:
        file.write(content)


@contextlib.contextmanager
def atomic_file(path: Path, *, sweeps: bool = True) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` at the end of the block; after an error no trace of it is left.

    A killed process leaves a temporary file, which the next writer of `path` removes. `sweeps` is False in folders with
    very many files, where looking for it would take long; there ziggurat.system.workspace.sweep does so once.
    """
    if sweeps:
        remove_dead(path)
    with written_whole(path):
        descriptor, temporary = make_temporary(path)
        try:
            # Closed only after the rename: until then the lock tells others that the writer lives.
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fchmod(file.fileno(), 0o666 & ~_UMASK)
                # Content before name: otherwise a power cut could leave an empty file under the name.
                os.fsync(file.fileno())
                os.replace(temporary, path)
            # Without this the name may reach the disk seconds later. Until then a power cut would bring back the old
            # content, while files written afterwards may already be on the disk.
            sync_folder(path.parent)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise


def _umask() -> int:
    """Return the process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


# Read once, at import: setting the mask affects files that other threads create meanwhile.
_UMASK = _umask()
