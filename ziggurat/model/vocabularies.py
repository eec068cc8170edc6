"""Checks that vocabularies fit weights: one for a shared embedding, and ids of text as weights learnt them."""

from __future__ import annotations

from ziggurat.config.model import ModelConfig
from ziggurat.data.subword import Tokenizer, same_vocabulary
from ziggurat.system.errors import ConfigError

Sides = tuple[Tokenizer, Tokenizer]
"""Tokenizers of source and target."""


def refuse_other_vocabulary(its: Sides, others: Sides, name: str, other: str, way_out: str) -> None:
    """Raise ConfigError when a text has other ids with `others` than with `its`, or is normalised in another way.

    The message calls their owners `name` and `other`. Equal pieces do not tell of the normalisation: it is no part of a
    SentencePiece file.
    """
    for side, mine, theirs in zip(("source", "target"), its, others, strict=True):
        if not same_vocabulary(mine, theirs):
            raise ConfigError(f"{name}: its {side} vocabulary is not that of {other}; {way_out}")
        if mine.unicode != theirs.unicode:
            raise ConfigError(
                f"{name}: its text is normalised by `data.unicode: {mine.unicode}`, but that of {other} by "
                f"`{theirs.unicode}`; {way_out}"
            )


def refuse_two_vocabularies(config: ModelConfig, source: Tokenizer, target: Tokenizer) -> None:
    """Raise ConfigError where one row of a shared embedding would stand for one piece here and another there.

    Equal sizes do not tell: two vocabularies that were trained apart have the same one by default.
    """
    if config.embedding.sharing == "all" and source is not target and not same_vocabulary(source, target):
        raise ConfigError(
            "`model.embedding.sharing: all` needs one vocabulary for both sides, but the data have two; use `decoder`, "
            "or prepare the data with a joint vocabulary"
        )
