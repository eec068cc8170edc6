"""Ziggurat: machine translation with very deep Transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ziggurat.decoding.translator import Translator

__version__ = "0.1.0"
__all__ = ["__version__", "load"]


def load(path: str, **options: Any) -> Translator:
    """Open a run or a model directory for translation; see ziggurat.decoding.translator.load_translator."""
    from ziggurat.decoding.translator import load_translator

    return load_translator(path, **options)
