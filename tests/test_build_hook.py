"""The hook that compiles the loops of translation: the package can be built, whatever the compiler does."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The hook for a tree that has only the source; hatchling is not needed, since only builds have it."""
    interface = types.ModuleType("hatchling.builders.hooks.plugin.interface")
    interface.BuildHookInterface = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    (tmp_path / "ziggurat" / "model" / "fast").mkdir(parents=True)
    shutil.copy(ROOT / "ziggurat" / "model" / "fast" / "compiled.c", tmp_path / "ziggurat" / "model" / "fast")
    made = module.CompileHook()
    made.root, made.said = str(tmp_path), []
    made.app = types.SimpleNamespace(display_warning=made.said.append)
    return made


def build(hook: Any) -> dict[str, Any]:
    data: dict[str, Any] = {"artifacts": [], "pure_python": True, "tag": None}
    hook.initialize("standard", data)
    return data


@pytest.mark.skipif(not shutil.which("gcc"), reason="there is no gcc")
@pytest.mark.slow
def test_the_library_is_part_of_a_wheel_for_one_platform(hook: Any) -> None:
    data = build(hook)
    assert hook.said == []
    assert data["artifacts"] == ["/ziggurat/model/fast/_compiled.so"]
    assert re.fullmatch(r"py3-none-(linux|manylinux_2_\d+)_\w+", data["tag"])
    assert data["pure_python"] is False
    assert sorted(os.listdir(Path(hook.root, "ziggurat", "model", "fast"))) == ["_compiled.so", "compiled.c"]


@pytest.mark.parametrize(
    ("symbols", "tag"),
    [
        (b"GLIBC_2.2.5\0GLIBC_2.14\0", "manylinux_2_17_"),  # package indexes accept nothing older
        (b"GLIBC_2.2.5\0GLIBC_2.34\0GLIBC_2.9\0", "manylinux_2_34_"),
        (b"", "linux_"),  # musl
    ],
)
def test_a_wheel_has_the_tag_that_its_library_needs(hook: Any, symbols: bytes, tag: str, tmp_path: Path) -> None:
    (tmp_path / "library.so").write_bytes(b"\x7fELF" + symbols)
    assert sys.modules[type(hook).__module__].platform_tag(tmp_path / "library.so").startswith(tag)


@pytest.mark.parametrize("kind", ["silent", "not UTF-8", "missing", "without a result"])
def test_a_compiler_that_fails_leaves_a_pure_package(
    hook: Any, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = {"silent": "exit 1", "not UTF-8": r"printf 'd\351faut' >&2; exit 1", "without a result": "exit 0"}
    compiler = tmp_path / "a compiler"
    if kind != "missing":
        compiler.write_text(f"#!/bin/sh\n{said[kind]}\n")
        compiler.chmod(0o755)
    monkeypatch.setenv("CC", f"'{compiler}' -x")
    data = build(hook)
    assert data == {"artifacts": [], "pure_python": True, "tag": None}
    assert len(hook.said) == 1
    assert os.listdir(Path(hook.root, "ziggurat", "model", "fast")) == ["compiled.c"]
