"""One normalisation of text for training and translation alike: blanks, and Unicode form where asked for."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Literal, cast

__all__ = ["UnicodeForm", "normalise"]

UnicodeForm = Literal["none", "nfc", "nfkc"]


def normalise(texts: Sequence[str], form: UnicodeForm) -> list[str]:
    """Return each text on one line, trimmed, runs of blanks made one blank, in Unicode form `form`.

    A blank is U+0020, tab, carriage return or line feed: what would otherwise reach the vocabulary as a
    stray piece or break one-line-per-sentence files. All other white space (U+00A0, U+3000, U+2028, ...)
    carries meaning in some script and stays as it is; `nfkc` turns some of it into blanks, which are then
    collapsed. Works on the whole list at once, since the common case is that nothing has to change.
    """
    joined = "\n".join(texts)
    if joined.count("\n") != max(len(texts) - 1, 0):
        texts = [text.replace("\n", " ") for text in texts]
        joined = "\n".join(texts)
    changed = False
    if form != "none" and not joined.isascii():
        name = cast(Literal["NFC", "NFKC"], form.upper())
        # No character composes with, or decomposes to, a line feed: the lines stay what they were.
        if not unicodedata.is_normalized(name, joined):
            joined, changed = unicodedata.normalize(name, joined), True
    if _has_spare_blanks(joined):
        joined = joined.replace("\t", " ").replace("\r", " ")
        while "  " in joined:  # halves every run of blanks; many times faster than a regular expression
            joined = joined.replace("  ", " ")
        joined = joined.replace(" \n", "\n").replace("\n ", "\n").strip(" ")
        changed = True
    return joined.split("\n") if changed else list(texts)


def _has_spare_blanks(joined: str) -> bool:
    """Whether any line of `joined` has a tab, a carriage return, two blanks in a row or one at an end."""
    return (
        "  " in joined
        or "\t" in joined
        or "\r" in joined
        or " \n" in joined
        or "\n " in joined
        or joined.startswith(" ")
        or joined.endswith(" ")
    )
