"""Tags that name the language a model is to write: where it has several, a line without one is in any of these."""

from __future__ import annotations

from collections.abc import Iterable

import regex

from ziggurat.errors import printable

__all__ = ["language_tags", "several_languages"]

_LANGUAGE_TAG = regex.compile(r"<2[a-z].*>|>>[a-z].*<<|__[a-z].*__")  # `<bt>` and its like name no language


def language_tags(known: Iterable[str]) -> list[str]:
    """Return the tags that name a language, in the same order."""
    return [tag for tag in known if _LANGUAGE_TAG.fullmatch(tag)]


def several_languages(known: Iterable[str]) -> str:
    """Return the tags that name a language, as text for a message, where they are several; else nothing."""
    languages = language_tags(known)
    return printable(", ".join(languages), 200) if len(languages) > 1 else ""
