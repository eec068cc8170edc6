"""Which side of a corpus is which: what `prepare` notices of sides that were swapped, or are one text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ziggurat.config.data import CorpusConfig, DataConfig
from ziggurat.data.compressed import compression_of
from ziggurat.data.passes import Corpus
from ziggurat.data.resemblance import looks_swapped

__all__ = ["named_language", "side_notices"]

_COPIES = 0.5  # share of equal pairs that no parallel corpus has


def side_notices(corpora: Sequence[Corpus], config: DataConfig) -> list[str]:
    """Return for people which corpora seem to have their sides swapped, or the same text on both.

    By text, each corpus is compared with the largest training corpus of its tag, since tags such as `<2en>` tell the
    directions of a model of both apart; by name, with the two language codes.
    """
    notices = []
    training = sorted((corpus for corpus in corpora if corpus.split == "train"), key=lambda c: -c.read)
    for corpus in corpora:
        if corpus.sides.equal > _COPIES * corpus.sides.lines:
            notices.append(
                f"{corpus.key}: {corpus.sides.equal:,} of {corpus.sides.lines:,} pairs looked at have the same text on "
                "both sides: is the source given as target, too? (`data.filters.identical` drops such pairs)"
            )
            continue
        if _named_the_other_way(corpus.config, config):
            notices.append(
                f"{corpus.key}: by their names {corpus.config.source} is in `{config.target_language}` and "
                f"{corpus.config.target} in `{config.source_language}`: exchange `source` and `target`, or "
                "`data.source_language` and `data.target_language`"
            )
            continue
        larger = training[: training.index(corpus)] if corpus in training else training
        largest = next((c for c in larger if _same_direction(c.config.tag, corpus.config.tag)), None)
        if largest is None:
            continue
        if looks_swapped(largest.sides.trigrams, corpus.sides.trigrams):
            notices.append(
                f"{corpus.key}: its source looks like the target of {largest.key}, its target like the source there: "
                "exchange `source` and `target` (or the columns) of one of the two"
            )
    return notices


def _same_direction(first: str | None, second: str | None) -> bool:
    return first == second or None in (first, second)


def _named_the_other_way(corpus: CorpusConfig, config: DataConfig) -> bool:
    """Whether the files of both sides end in the code of the other side's language."""
    if corpus.source is None or corpus.target is None:
        return False
    endings = [named_language(path) for path in (corpus.source, corpus.target)]
    wanted = [code.lower() for code in (config.source_language, config.target_language)]
    return endings == wanted[::-1] and endings[0] != endings[1]


def named_language(path: str) -> str:
    """Return the last part of a text file's name, in lower case: the code of its language in `mono.en.gz`."""
    name = Path(path).with_suffix("") if compression_of(Path(path)) else Path(path)
    return re.split(r"[._-]", name.name)[-1].lower()
