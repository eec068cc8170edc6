"""Whether freed memory stays in the process or goes back: glibc's allocator, told what an update is like."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator

__all__ = ["give_back_freed_memory", "keep_freed_memory", "return_freed_memory", "returning_freed_memory"]

# Parameters of glibc's mallopt (malloc.h).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4
_KEEPING = {_MMAP_MAX: 0, _TRIM_THRESHOLD: 1 << 30, _TOP_PAD: 64 << 20}
_GIVING_BACK = {_MMAP_MAX: 1 << 15, _MMAP_THRESHOLD: 256 << 10, _TRIM_THRESHOLD: 64 << 20, _TOP_PAD: 1 << 20}


class _State:
    values = _GIVING_BACK


def _glibc() -> ctypes.CDLL | None:
    """Return the C library if its allocator can be told anything; musl's cannot."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        library = ctypes.CDLL(None)
        _ = library.mallopt, library.malloc_trim
    except (OSError, AttributeError):
        return None
    return library


def _set(values: dict[int, int]) -> bool:
    library = _glibc()
    return library is not None and all(library.mallopt(parameter, value) for parameter, value in values.items())


def keep_freed_memory() -> bool:
    """Tell glibc's allocator not to hand memory back between updates; False where there is no glibc.

    Page faults of freed and re-mapped memory cost a few percent of an update on CPU.
    """
    _State.values = _KEEPING
    return _set(_KEEPING)


def give_back_freed_memory() -> bool:
    """Tell glibc's allocator to map every block of 256 KiB or more by itself; False where there is no glibc.

    Where layers are recomputed, blocks that stay and blocks that are freed at once take turns, and the heap closes few
    of the holes between: torch asks for aligned blocks, and a freed one is too small for another of its size, so that
    up to three times the memory is resident that tensors have. Page faults of fresh blocks take up to half as much time
    again as the update itself (benchmarks/README.md has both).
    """
    _State.values = _GIVING_BACK
    return _set(_GIVING_BACK)


@contextlib.contextmanager
def returning_freed_memory() -> Iterator[None]:
    """Context in which large tensors are mapped one by one and handed back when they are freed.

    What a trial takes does not stay with the process, cut into pieces of the wrong size.
    """
    _set(_GIVING_BACK)
    try:
        yield
    finally:
        _set(_State.values)


def return_freed_memory() -> None:
    """Hand back to the system what is free at this moment, after an update that ran out of memory."""
    if (library := _glibc()) is not None:
        library.malloc_trim(0)
