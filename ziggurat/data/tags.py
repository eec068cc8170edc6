"""Tags that name languages: which those are, and what is noticed of corpora that lack one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ziggurat.config.data import CorpusConfig, DataConfig
from ziggurat.system.errors import printable
from ziggurat.system.yaml_text import shown

_LANGUAGE_TAG = re.compile(r"<2[a-z].*>|>>[a-z].*<<|__[a-z].*__")  # `<bt>` and its like name no language
_SEVERAL = "mul"  # ISO 639's code for text of several languages, which tells none


def language_tags(known: Iterable[str]) -> list[str]:
    """Return those of a model's tags that name languages."""
    return [tag for tag in known if _LANGUAGE_TAG.fullmatch(tag)]


def several_languages(known: Iterable[str]) -> str:
    """Return the tags that name a language, as text for a message, where they are several; else nothing."""
    languages = language_tags(known)
    return printable(", ".join(languages), 200) if len(languages) > 1 else ""


def tag_notices(config: DataConfig, known: Iterable[str]) -> list[str]:
    """Return notices on corpora whose sources do not tell a model which language it is to write.

    They have no tag beside tags of several languages, or one tag (or none) with targets of several languages.

    Args:
        config: the data section.
        known: tags of the source vocabulary.
    """
    notices, languages = [], language_tags(known)
    ambiguous = len(languages) > 1
    if ambiguous and (untagged := [key for key, corpus in _corpora(config) if corpus.tag is None]):
        notices.append(
            f"{shown(untagged, 10)}: no `tag`, although the vocabulary has tags of several languages, so nothing tells "
            f"the model which one to write; `tag` can be {', '.join(languages)}"
        )
    targets: dict[str | None, dict[str, str]] = {}  # tag -> language of targets -> the first of its corpora
    for key, corpus in _corpora(config):
        language = config.languages_of(corpus)[1]
        if language != _SEVERAL and not (ambiguous and corpus.tag is None):
            targets.setdefault(corpus.tag, {}).setdefault(language, key)
    for tag, first in targets.items():
        if len(first) > 1:
            found = shown([f"{key} is into `{language}`" for language, key in first.items()], 10)
            same = "none has a `tag`" if tag is None else f"all have `tag: {tag}`"
            notices.append(
                f"{found}; {same}: nothing tells the model which language to write. Give the corpora of each target "
                f"language a tag of their own, such as `<2{next(iter(first))}>`"
            )
    return notices


def _corpora(config: DataConfig) -> Iterator[tuple[str, CorpusConfig]]:
    """Yield each corpus with its key, such as `data.train.0`."""
    for split, corpora in (("train", config.train), ("dev", config.dev)):
        yield from ((f"data.{split}.{number}", corpus) for number, corpus in enumerate(corpora))
