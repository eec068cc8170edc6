"""Two sentence pairs, the first source unpadded, and small models for them."""

from __future__ import annotations

from typing import Any

import torch

from tests.composition import model as small_model
from ziggurat.model.build import build_model
from ziggurat.model.seq2seq import Seq2Seq

V = 11
SOURCE = torch.tensor([[4, 5, 6, 7, 2], [8, 9, 2, 0, 0]])
MASK = SOURCE != 0
TARGET = torch.tensor([[1, 5, 4, 9], [1, 6, 10, 8]])


def built(**choices: Any) -> Seq2Seq:
    """Return a small model in fp64, in evaluation mode; `choices` are those of tests.composition, with `__` for a dot.

    The same seed gives the same layers, whatever lies between them.
    """
    config = small_model({key.replace("__", "."): value for key, value in choices.items()})
    return build_model(config, V, V, seed=3).double().eval()
