"""Precision of translation: a trained model is changed for the one asked for, and for nothing but translation."""

from __future__ import annotations

import torch

from ziggurat.errors import ConfigError
from ziggurat.models.seq2seq import Seq2Seq
from ziggurat.nn.packed import Precision, available, pack

__all__ = ["make_fast"]


def make_fast(model: Seq2Seq, precision: Precision) -> None:
    """Change `model`, in fp32 and evaluation mode, for translation alone: it can then no longer be trained or saved.

    On a CPU its linear maps are packed (ziggurat.nn.packed); on a GPU bf16 is the whole model's type.

    Raises ConfigError when the device does not compute with `precision`.
    """
    if model.device.type == "cpu":
        if available(precision):
            pack(model, precision)
        elif precision != "float32":
            needs = "AVX-512-BF16 or AMX" if precision == "bfloat16" else "VNNI"
            raise ConfigError(f"`decoding.precision: {precision}` needs a CPU with {needs}; use float32")
    elif precision == "int8":
        raise ConfigError("`decoding.precision: int8` is for CPUs; on a GPU use bfloat16")
    elif precision == "bfloat16":
        model.to(torch.bfloat16)
