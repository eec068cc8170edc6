"""Keeps freed memory in the process: an update's large short-lived tensors else cost a page fault each time."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator

__all__ = ["keep_freed_memory", "return_freed_memory", "returning_freed_memory"]

# Parameters of glibc's mallopt (malloc.h), and how many mappings it may hold by default.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_DEFAULT_MMAP_MAX = 65536
_GIGABYTE = 1 << 30


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        library = ctypes.CDLL(None)
        return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
    except OSError:
        return None


def keep_freed_memory() -> bool:
    """Tell glibc's allocator not to hand memory back between updates; False where there is no glibc.

    Page faults of freed and re-mapped memory cost a few percent of an update on CPU. The peak stays the same.
    """
    library = _glibc()
    if library is None:  # musl has no mallopt
        return False
    mallopt = library.mallopt
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, _GIGABYTE) and mallopt(_TOP_PAD, 64 << 20))


@contextlib.contextmanager
def returning_freed_memory() -> Iterator[None]:
    """Context in which large tensors are mapped one by one and handed back when they are freed.

    What a trial takes does not stay with the process, cut into pieces of the wrong size. Ends as keep_freed_memory.
    """
    library = _glibc()
    if library is not None:
        library.mallopt(_MMAP_MAX, _DEFAULT_MMAP_MAX)
    try:
        yield
    finally:
        if library is not None:
            library.mallopt(_MMAP_MAX, 0)


def return_freed_memory() -> None:
    """Hand back to the system what is free at this moment, after an update that ran out of memory."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)
