"""Reader of checkpoints that are pickles, by torch with `weights_only=True`.

That reader runs no code of the file: it knows tensors, numbers, strings, lists and dictionaries, and the classes that a
caller allows, which must only hold values. Any other content is refused. Still, import only checkpoints of people you
trust: the reader has had security flaws.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ziggurat.errors import DataError

__all__ = ["load_pickled"]


def load_pickled(path: Path, what: str, *, classes: Sequence[type] = ()) -> Any:
    """Return the content of a file of torch.save, tensors on the CPU, and warn that it is a pickle.

    Args:
        path: the file, as zip or in the format before torch 1.6.
        what: description of the content that is expected, for messages.
        classes: classes allowed besides tensors and plain values.

    Raises DataError: it has other content, or is no such file.
    """
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
        raise DataError(f"{path}: damaged, or not written by torch.save ({type(error).__name__}: {error})") from None
