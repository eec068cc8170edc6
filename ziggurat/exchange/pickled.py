"""Reader of pickled checkpoints.

Pickles are read by torch with `weights_only=True`, which runs no code of the file: it knows tensors, numbers, strings,
lists, dictionaries, and the classes that a caller allows, which must only hold values. Still, import only checkpoints
of people you trust: that reader has had security flaws.
"""

from __future__ import annotations

import pickle
import re
import struct
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ziggurat.exchange.toolkits import refusal_of, toolkit_of_class
from ziggurat.system.errors import DataError, ZigguratError, out_of_memory, printable, refuse_passing
from ziggurat.system.small_files import check_regular


def load_pickled(path: Path, what: str, *, classes: Sequence[type] = (), packages: Sequence[str] = ()) -> Any:
    """Return the content of a file of torch.save, tensors on the CPU, and warn that it is a pickle.

    Args:
        path: the file, as zip or in the format before torch 1.6.
        what: description of the content that is expected, for messages.
        classes: classes allowed besides tensors and plain values.
        packages: packages, and names of Python's own types, whose objects may be there, and are read as Values.

    Raises:
        DataError: it has other content, or is no such file.
        ExportError: it has objects of another toolkit.
        MachineError: it cannot be read now, which says nothing about its content.
    """
    _refuse_packed(path)
    warnings.warn(
        f"{path} is a pickle, read by torch.load(weights_only=True), which runs no code of it; import only checkpoints "
        "of people you trust",
        UserWarning,
        stacklevel=3,
    )
    allowed: list[Any] = list(classes)
    try:
        while True:
            try:
                with torch.serialization.safe_globals(allowed):
                    return torch.load(path, map_location="cpu", weights_only=True)
            except pickle.UnpicklingError as error:
                # torch stops at the first class that it does not know.
                found = _CLASS.search(str(error))
                if found is None or found[1].partition(".")[0] not in packages or len(allowed) > _MOST_CLASSES:
                    raise _unpickled(path, what, None if found is None else found[1]) from None
                # torch leaves out the module of Python's own types.
                modules = ("",) if "." in found[1] else ("builtins.", "__builtin__.")
                allowed += [(Values, module + found[1]) for module in modules]
    except _DAMAGE as error:
        if out_of_memory(error):  # a RuntimeError of torch's
            raise
        refuse_passing(path, error)
        said = printable(str(error).partition("\n")[0], 200)
        raise DataError(f"{path}: damaged, or not written by torch.save ({type(error).__name__}: {said})") from None


_DAMAGE = (
    OSError,
    RuntimeError,
    EOFError,
    AttributeError,
    AssertionError,
    LookupError,
    TypeError,
    ValueError,
    struct.error,
)
"""Errors that a damaged pickle makes torch raise, by where the damage is."""

_CLASS = re.compile(r"GLOBAL (\S+) was not an allowed global")
_MOST_CLASSES = 50


class Values:
    """An object in a pickle, of which its attributes are read and nothing of its class."""

    def __init__(self, *_arguments: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        """Keep the attributes; a state of another form than theirs is not read."""
        if isinstance(state, dict):
            self.__dict__.update({key: value for key, value in state.items() if isinstance(key, str)})


def _unpickled(path: Path, what: str, name: str | None) -> ZigguratError:
    """Return the error for a pickle with an object of the class `name`; None: with something that is no pickle."""
    if name is None:
        return DataError(f"{path}: holds more than {what}, or was not written by torch.save, and is not read")
    if (toolkit := toolkit_of_class(name)) is not None:
        return refusal_of(path, toolkit)
    return DataError(
        f"{path}: holds more than {what}, and is not read: an object of {printable(name)}, which only the toolkit that "
        "wrote it should load. Save it again there with torch.save, options as a dict"
    )


def _refuse_packed(path: Path) -> None:
    """Raise DataError if there is no such file, or if it is a compressed zip file: torch writes none.

    A few kilobytes of a compressed file could unpack to all of the memory.
    """
    try:
        size = check_regular(path)
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as packed:
                if sum(entry.file_size for entry in packed.infolist()) > size:
                    raise DataError(f"{path}: a compressed zip file, not a checkpoint as torch writes it")
    except (FileNotFoundError, zipfile.BadZipFile, NotImplementedError, ValueError) as error:  # ValueError: bad names
        raise DataError(f"{path}: damaged, or not written by torch.save ({error})") from None


def tensors_of(path: Path, content: object) -> dict[str, Tensor]:
    """Return the named tensors that the file `path` held. Raises DataError for content that is anything else."""
    if not isinstance(content, Mapping) or not all(isinstance(key, str) for key in content):
        raise DataError(f"{path}: not the weights of a model (names and tensors)")
    for key, tensor in content.items():
        # A view may repeat one number a billion times, and a copy of it would fill the memory.
        if not isinstance(tensor, Tensor) or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise DataError(f"{path}: parameter {printable(key)} is not a tensor that the file holds")
    return dict(content)
