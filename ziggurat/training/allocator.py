"""What glibc does with memory that an update frees: keep it, for speed, or give it back, for memory."""

from __future__ import annotations

import ctypes
import sys

__all__ = ["give_back_freed_memory", "keep_freed_memory"]

# Parameters of glibc's mallopt (malloc.h).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4
_GIGABYTE = 1 << 30


def keep_freed_memory() -> bool:
    """Tell glibc's allocator not to hand memory back between updates; False where there is no glibc.

    Page faults of freed and re-mapped memory cost a few percent of an update on CPU.
    """
    return _set({_MMAP_MAX: 0, _TRIM_THRESHOLD: _GIGABYTE, _TOP_PAD: 64 << 20})


def give_back_freed_memory() -> bool:
    """Tell glibc's allocator to map every block of 256 KiB or more by itself; False where there is no glibc.

    Where layers are recomputed, blocks that stay and blocks that are freed at once take turns, and the heap closes few
    of the holes between: torch asks for aligned blocks, and a freed one is too small for another of its size, so that
    up to three times the memory is resident that tensors have. Page faults of fresh blocks take up to half as much time
    again as the update itself (benchmarks/README.md has both).
    """
    return _set({_MMAP_MAX: 1 << 15, _MMAP_THRESHOLD: 256 << 10, _TRIM_THRESHOLD: 64 << 20, _TOP_PAD: 1 << 20})


def _set(values: dict[int, int]) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # musl has no mallopt
        return False
    return all(mallopt(parameter, value) for parameter, value in values.items())
