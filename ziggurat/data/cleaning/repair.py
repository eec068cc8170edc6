"""Repair of text by ftfy: bytes that were decoded wrongly, HTML entities, remains of terminals and of controls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import regex
from numpy.typing import NDArray

from ziggurat.system.errors import ConfigError

# Text of plain ASCII without entities has nothing that is repaired; most lines of English are looked at only so far.
_SUSPICIOUS = regex.compile(r"[^\x20-\x7E\t]|&")


def repair_with() -> Callable[[Sequence[str]], tuple[list[str], NDArray[np.bool_]]]:
    """Return a function from texts to the repaired texts and a mask of those that it changed.

    Quotation marks, ligatures and full-width letters stay as they are, and so does text with NUL, which is no text.

    Raises ConfigError where ftfy is not installed.
    """
    try:
        mended = _fixer()
    except ModuleNotFoundError:
        raise ConfigError(
            "data.filters.repair: needs ftfy, which is not installed: pip install 'ziggurat-mt[clean]'"
        ) from None

    def repaired(texts: Sequence[str]) -> tuple[list[str], NDArray[np.bool_]]:
        found = [mended(text) if _SUSPICIOUS.search(text) and "\0" not in text else text for text in texts]
        changed = (before != after for before, after in zip(texts, found, strict=True))
        return found, np.fromiter(changed, np.bool_, len(texts))

    return repaired


@lru_cache(maxsize=1)
def _fixer() -> Callable[[str], str]:
    from ftfy import TextFixerConfig, fix_text

    # What is a matter of taste, or of `data.unicode`, is left out.
    settings = TextFixerConfig(
        uncurl_quotes=False, fix_latin_ligatures=False, fix_character_width=False, normalization=None, explain=False
    )
    return lambda text: fix_text(text, settings)
