"""Ziggurat: machine translation with very deep Transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ziggurat.translate.translator import Translator

__version__ = "1.0.0"


def load(
    path: str | Path | Sequence[str | Path],
    *,
    device: str = "auto",
    which: str | None = None,
    without_layers: str | None = None,
    **decoding: Any,
) -> Translator:
    """Open a run, a model directory or an ensemble of several; see ziggurat.translate.translator.load_translator.

    Args:
        path: folder of a run or a model, or a list of them: an ensemble.
        device: `auto` uses a GPU if there is one; otherwise `cpu`, `cuda`, `cuda:1`, ...
        which: checkpoint of a run, such as `best`.
        without_layers: layers to leave out, such as `encoder.5,decoder.3`.
        decoding: keys of the `decoding` section that replace the saved ones, such as `beam_size=8`.
    """
    from ziggurat.translate.translator import load_translator

    return load_translator(path, device=device, which=which, without_layers=without_layers, **decoding)
