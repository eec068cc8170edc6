"""Ziggurat: machine translation with very deep Transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ziggurat.translate.translator import Translator

__version__ = "0.1.0"


def load(path: str | Path | Sequence[str | Path], **options: Any) -> Translator:
    """Open a run, a model directory or an ensemble of several; see ziggurat.translate.translator.load_translator."""
    from ziggurat.translate.translator import load_translator

    return load_translator(path, **options)
