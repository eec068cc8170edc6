"""Reader of checkpoints that are pickles, by torch with `weights_only=True`.

That reader runs no code of the file: it knows tensors, numbers, strings, lists and dictionaries, and the classes that a
caller allows, which must only hold values. Any other content is refused. Still, import only checkpoints of people you
trust: the reader has had security flaws.
"""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ziggurat.system.errors import DataError, out_of_memory, printable, refuse_passing
from ziggurat.system.small_files import check_regular


def load_pickled(path: Path, what: str, *, classes: Sequence[type] = ()) -> Any:
    """Return the content of a file of torch.save, tensors on the CPU, and warn that it is a pickle.

    Args:
        path: the file, as zip or in the format before torch 1.6.
        what: description of the content that is expected, for messages.
        classes: classes allowed besides tensors and plain values.

    Raises:
        DataError: it has other content, or is no such file.
        MachineError: it cannot be read now, which says nothing about its content.
    """
    _refuse_packed(path)
    warnings.warn(
        f"{path} is a pickle, read by torch.load(weights_only=True), which runs no code of it; import only checkpoints "
        "of people you trust",
        UserWarning,
        stacklevel=3,
    )
    try:
        with torch.serialization.safe_globals(list(classes)):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise DataError(f"{path}: holds more than {what}, and is not read ({error})") from None
    except (OSError, RuntimeError, EOFError, AttributeError, KeyError, TypeError, ValueError) as error:
        if out_of_memory(error):  # a RuntimeError of torch's
            raise
        refuse_passing(path, error)
        raise DataError(f"{path}: damaged, or not written by torch.save ({type(error).__name__}: {error})") from None


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
