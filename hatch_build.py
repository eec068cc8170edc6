"""Hatchling's hook that compiles ziggurat/model/fast/compiled.c when the package is built or installed.

Where there is no C compiler, or it fails, the package is built without the library: PyTorch's operators then do its
work, more slowly (ziggurat/model/fast/compiled.py). A wheel with it is for one platform, but for every version of
Python.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = ("-std=gnu11", "-O3", "-fno-strict-aliasing", "-fPIC", "-fopenmp", "-Wno-psabi")


def compile_library(source: Path, library: Path) -> str:
    """Compile `source` into `library`; return "", or why that was not possible. Nothing is left of a failed attempt."""
    if not sysconfig.get_platform().startswith("linux-"):
        return "it is compiled on Linux only"
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("gcc") or shutil.which("cc") or ""]
    if not compiler[0]:
        return "there is no C compiler"
    # ziggurat/model/fast/compiled.py compares: a library of another version would be called with other arguments.
    name = hashlib.sha256(source.read_bytes()).hexdigest()
    # In the same folder, so that the library is moved as a whole: another process may be loading the old one.
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".compiling-") as folder:
        unlinked, linked = Path(folder, "compiled.o"), Path(folder, "compiled.so")
        commands = (
            [*compiler, *FLAGS, f'-DSOURCE="{name}"', "-c", str(source), "-o", str(unlinked)],
            # Without -fopenmp: OpenMP's functions are to be found in PyTorch's library, not in a second one.
            [*compiler, "-shared", str(unlinked), "-o", str(linked)],
        )
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace")
            if done.returncode or not Path(command[-1]).is_file():
                return done.stderr.strip() or f"{compiler[0]} ended with {done.returncode}"
        os.replace(linked, library)
    return ""


def platform_tag(library: Path) -> str:
    """Return the wheel's platform: manylinux by the newest glibc symbol of `library`, which needs no library but libc.

    Package indexes take `manylinux_2_17_x86_64` but not `linux_x86_64` (PEP 600). Libraries of other C libraries than
    glibc keep the system's own tag.
    """
    machine = sysconfig.get_platform().removeprefix("linux-").replace("-", "_")
    versions = re.findall(rb"GLIBC_(\d+)\.(\d+)", library.read_bytes())
    if not versions:
        return f"linux_{machine}"
    newest = max((2, 17), *((int(major), int(minor)) for major, minor in versions))
    return f"manylinux_{newest[0]}_{newest[1]}_{machine}"


class CompileHook(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the library beside its source, in a wheel or, for an editable installation, in the tree."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and say so where the package goes without."""
        folder = Path(self.root, "ziggurat", "model", "fast")
        library = folder / "_compiled.so"
        try:
            problem = compile_library(folder / "compiled.c", library)
        except OSError as error:
            problem = str(error)
        if problem:
            # One of an earlier attempt stays in a tree, where compiled.py looks whether it fits, but not in a wheel.
            build_data["pure_python"] = True
            self.app.display_warning(
                f"ziggurat/model/fast/compiled.c was not compiled, so translation is slower: {problem}"
            )
            return
        build_data["artifacts"].append("/ziggurat/model/fast/_compiled.so")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag(library)}"
