"""Import of the authors' code from its checkouts."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import subprocess
import sys
from collections.abc import Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

# Imported by the authors' modules but not used by anything compared: images, cloud storage, data.
_ABSENT = frozenset({"timm", "boto3", "botocore", "google", "cached_path", "datasets", "importlib_resources"})


class _Anything:
    """A class, function or base class that is imported but not used."""

    recoverable_errors: tuple[type[Exception], ...] = ()  # one of OLMo's classes extends that of its base

    def __init__(self, *arguments: Any, **options: Any) -> None: ...

    def __call__(self, *arguments: Any, **options: Any) -> _Anything:
        return self

    def __getattr__(self, name: str) -> type[_Anything]:
        return _Anything


class _Empty(ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Anything,), {})


class _Absent(MetaPathFinder, Loader):
    """Finder and loader of the unused modules that are not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return a specification that makes an empty module."""
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in _ABSENT else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the empty module."""
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave it empty."""


class Checkouts:
    """The folder whose sub-folders are checkouts of the authors' repositories, under the repositories' names.

    Args:
        folder: that folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        sys.meta_path.append(_Absent())  # last, so that installed modules are used

    def commit(self, repository: str, path: str) -> str:
        """Return the commit of the checkout, with `+` if the file differs from it, or the version of a package."""
        if not (self.folder / repository).exists():
            return importlib.metadata.version(repository)
        git = ["git", "-C", str(self.folder / repository)]
        head = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--", path], capture_output=True, text=True, check=True
        )
        return head.stdout.strip() + ("+" if changed.stdout.strip() else "")

    def file(self, path: str) -> ModuleType:
        """Return the module in the file `path`, which begins with the name of the repository."""
        name = "authors_" + path.replace("/", "_").replace("-", "_").replace(".", "_")
        if name in sys.modules:
            return sys.modules[name]
        specification = importlib.util.spec_from_file_location(name, self.folder / path)
        assert specification is not None
        assert specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        sys.modules[name] = module  # dataclasses look up their module
        with _quiet():
            specification.loader.exec_module(module)
        return module

    def package(self, folder: str, name: str) -> ModuleType:
        """Return the module `name` of the package in `folder`, which begins with the name of the repository."""
        place = str(self.folder / folder)
        if place not in sys.path:
            sys.path.append(place)
        with _quiet():
            return importlib.import_module(name)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Context that silences modules that print while they are imported or built."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


@contextlib.contextmanager
def as_precise_as(dtype: torch.dtype) -> Iterator[None]:
    """Context in which the authors' code computes nothing less precisely than in `dtype`.

    Their code computes norms, softmax, rotations and weights of streams in fp32, and DeepSeek's functions return bf16,
    which would hide whether the rest agrees to the last digits. So with fp64, what their code calls fp32 is fp64.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    to_dtype = Tensor.double if dtype == torch.float64 else Tensor.float
    changes = [mock.patch.object(Tensor, "bfloat16", to_dtype)]
    if dtype == torch.float64:
        changes += [mock.patch.object(torch, name, dtype) for name in ("float32", "float")]
        changes.append(mock.patch.object(Tensor, "float", to_dtype))
    try:
        with contextlib.ExitStack() as stack:
            for change in changes:
                stack.enter_context(change)
            stack.enter_context(_quiet())
            yield
    finally:
        torch.set_default_dtype(default)


class TwoMaps(nn.Module):
    """The feed-forward network of timm (its class Mlp), which the vision models of SiameseNorm import."""

    def __init__(self, in_features: int, hidden_features: int, act_layer: type[nn.Module], drop: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(in_features, hidden_features)
        self.act = act_layer()
        self.fc2 = nn.Linear(hidden_features, in_features)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        return self.fc2(self.act(self.fc1(x)))
