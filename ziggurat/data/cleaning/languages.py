"""Identification of languages, by py3langid: how probable it is that a text is in the language it should be in.

And of scripts, by the Unicode property of the letters.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import regex
from numpy.typing import NDArray

from ziggurat.config.languages import main_language
from ziggurat.system.errors import ConfigError

MOST_CHARACTERS = 2000
"""Characters of a text that are looked at."""


OTHER_SCRIPT = "other"
_SCRIPTS = (
    "Latin", "Cyrillic", "Greek", "Arabic", "Hebrew", "Han", "Hiragana", "Katakana", "Hangul", "Devanagari", "Bengali",
    "Gurmukhi", "Gujarati", "Oriya", "Tamil", "Telugu", "Kannada", "Malayalam", "Sinhala", "Thai", "Lao", "Khmer",
    "Myanmar", "Tibetan", "Georgian", "Armenian", "Ethiopic", "Mongolian", "Cherokee", "Tifinagh",
)  # fmt: skip


def scripts(texts: Sequence[str]) -> dict[str, int]:
    """Return how many letters of the texts are in each script, the most frequent first; OTHER_SCRIPT is all others.

    A letter without a script of its own, such as U+30FC (which lengthens vowels), is among the others.
    """
    joined = "".join(texts)
    letters = len(_script("").findall(joined))
    counts = {name: len(_script(name).findall(joined)) for name in _SCRIPTS}
    counts[OTHER_SCRIPT] = letters - sum(counts.values())
    return {name: count for name, count in sorted(counts.items(), key=lambda item: -item[1]) if count}


@lru_cache(maxsize=64)
def _script(name: str) -> regex.Pattern[str]:
    """Return the pattern of a letter of a script; of any letter where it has no name."""
    return regex.compile(rf"[\p{{L}}&&\p{{Script={name}}}]" if name else r"\p{L}", flags=regex.V1)


def known_language(code: str, side: str) -> str:
    """Return py3langid's name of the language `code`, which is that of `side`: `source` or `target`.

    Raises ConfigError where it does not know the language, or is not installed.
    """
    try:
        known = identifier(None).labels
    except ModuleNotFoundError:
        raise ConfigError(
            "data.filters.languages: needs py3langid, which is not installed: pip install 'ziggurat-mt[clean]'"
        ) from None
    if (name := main_language(code)) not in known:
        raise ConfigError(
            f"data.filters.languages: py3langid does not know the {side} language `{code}`; it knows "
            f"{', '.join(sorted(known))}. Set data.filters.languages.{side} to null"
        )
    return name


def confidences(texts: Sequence[str], language: str, min_letters: int = 0) -> NDArray[np.float64]:
    """Return how probable it is that each text is in `language`, [texts], among all languages that py3langid knows.

    A text with fewer than `min_letters` letters has 1.
    """
    found = np.ones(len(texts))
    for number, text in enumerate(texts):
        if sum(map(str.isalpha, text)) >= max(1, min_letters):
            # Most texts are in their language, and then ranking all others would take as long again.
            first, found[number] = identifier(None).classify(text[:MOST_CHARACTERS])
            if first != language:
                found[number] = dict(identifier(None).rank(text[:MOST_CHARACTERS]))[language]
    return found


def likeliest(texts: Sequence[str]) -> list[str | None]:
    """Return the likeliest language of each text, by its code; None for a text without letters."""
    return [
        str(identifier(None).classify(text[:MOST_CHARACTERS])[0]) if any(map(str.isalpha, text)) else None
        for text in texts
    ]


@lru_cache(maxsize=64)
def identifier(names: tuple[str, ...] | None) -> Any:
    """Return py3langid's identifier for these languages; None: all. Raises ModuleNotFoundError without py3langid."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier  # here: its model takes half a second

    found = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    if names is not None:
        found.set_languages(list(names))
    return found
