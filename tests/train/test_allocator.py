"""Freed memory stays in the process or is returned at once, as requested."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

CODE = """
import ctypes, os, sys
from ziggurat.train import memory

libc, size = ctypes.CDLL(None), 64 << 20
libc.malloc.restype = ctypes.c_void_p

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

assert getattr(memory, sys.argv[1])()
block = libc.malloc(ctypes.c_size_t(size))
ctypes.memset(block, 1, size)
before = resident()
libc.free(ctypes.c_void_p(block))
print((before - resident()) / size)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
@pytest.mark.parametrize(("setting", "share"), [("keep_freed_memory", 0.0), ("give_back_freed_memory", 1.0)])
def test_a_large_freed_block_is_kept_or_returned(setting: str, share: float) -> None:
    child = subprocess.run([sys.executable, "-c", CODE, setting], capture_output=True, text=True, check=True)
    assert float(child.stdout) == pytest.approx(share, abs=0.05)
