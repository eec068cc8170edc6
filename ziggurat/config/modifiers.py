"""Modifiers of training pairs, and stages that mix corpora: the parts of the data section that only training reads.

A stage may have different modifiers. Fields of `ModifiersConfig` are in the order in which they are applied.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from ziggurat.config.section import Count, Length, Real, Section
from ziggurat.system.errors import ConfigError, printable

Probability = Annotated[float, Field(ge=0, le=1)]
Words = Annotated[int, Field(ge=1, le=100)]


def template_parts(template: str, names: tuple[str, ...]) -> list[str]:
    """Return `template` split at its placeholders: text, name, text, name, ..., text.

    Raises ValueError unless it contains each of `names` exactly once, in braces.
    """
    parts = re.split(rf"\{{({'|'.join(names)})\}}", template)
    if sorted(parts[1::2]) != sorted(names):
        wanted = " and ".join(f"`{{{name}}}`" for name in names)
        raise ValueError(f"the template {printable(repr(template), 60)} must have {wanted}, each once")
    return parts


class ModifierConfig(Section):
    """A modifier without options."""

    probability: Probability
    """Share of the suitable pairs that it changes."""


class MergeConfig(ModifierConfig):
    """Several short pairs of a corpus joined into one, separated by spaces."""

    min_pairs: Annotated[int, Field(ge=2, le=16)] = 2
    """Minimum number of pairs in a merged pair."""
    max_pairs: Annotated[int, Field(ge=2, le=16)] = 4
    """Maximum number of pairs in a merged pair; added pairs come from the same corpus and also occur on their own."""
    max_pieces: Length = Field(default=100, ge=2)
    """Longest merged pair on either side, in subword pieces; if it would be longer, fewer pairs or none are merged."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        _check_order("pairs", self.min_pairs, self.max_pairs)
        return self


class NoiseConfig(ModifierConfig):
    """Replacement of a pair by random words, the same on both sides, so that the model learns to copy."""

    min_word_length: Words = 2
    """Minimum number of characters in a word."""
    max_word_length: Words = 5
    """Maximum number of characters in a word."""
    max_words: Words = 6
    """Maximum number of words on a side."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        _check_order("word_length", self.min_word_length, self.max_word_length)
        return self


class TyposConfig(ModifierConfig):
    """Typing errors in the source. A selected pair gets each kind at most once, with that kind's probability."""

    char_swap: Probability = 0.1
    """Two neighbouring characters of a word are swapped."""
    missing_char: Probability = 0.1
    """A character is left out."""
    extra_char: Probability = 0.1
    """A neighbouring key is pressed as well."""
    nearby_char: Probability = 0.1
    """A neighbouring key is pressed instead."""
    similar_char: Probability = 0.1
    """A character is replaced with one that looks similar: 0 for O, e for é, Cyrillic for Latin."""
    skipped_space: Probability = 0.1
    """A space is left out."""
    random_space: Probability = 0.1
    """A space is inserted into a word."""
    repeated_char: Probability = 0.1
    """A character is doubled."""
    unichar: Probability = 0.1
    """A double character is written once."""


TYPO_KINDS = tuple(name for name in TyposConfig.model_fields if name != "probability")
"""TYPO_KINDS are the kinds of typing errors, in order of application."""


class InlineConfig(Section):
    """Items to copy, at aligned words of both sides: tags around the words, or placeholders or noise after them.

    Needs word alignments (`data.alignment`). The shares need not add up to 1.
    """

    probability: Probability
    """Share of the words aligned to exactly one word that get an item."""
    tags: Real = Field(default=1.0, ge=0)
    """Relative share of tags such as `<b>...</b>`."""
    placeholders: Real = Field(default=1.0, ge=0)
    """Relative share of placeholders such as `{0}`, `%s`, an address or an emoji."""
    noise: Real = Field(default=1.0, ge=0)
    """Relative share of noise: one to three words of random characters."""

    @model_validator(mode="after")
    def _some_share(self) -> Self:
        if not self.tags + self.placeholders + self.noise:
            raise ValueError("one of `tags`, `placeholders` and `noise` must be above 0")
        return self


class TermsConfig(Section):
    """Terminology hints: the translation of a word, written after it in the source (Dinu et al. 2019).

    Needs word alignments (`data.alignment`).
    """

    probability: Probability
    """Share of the words aligned to exactly one, different word that get a hint."""
    template: str = "__source__ {src} __target__ {trg} __done__"
    """Text that replaces the word: `{src}` is the word, `{trg}` its translation."""
    replace: Probability = 0.0
    """Share of the hints replaced with random words on both sides, so that the model learns to copy the hint."""

    @model_validator(mode="after")
    def _whole_template(self) -> Self:
        template_parts(self.template, ("src", "trg"))
        return self


class PrefixConfig(ModifierConfig):
    """A part of the translation written before the source: the model learns to use given words."""

    min_words: Words = 2
    """Minimum number of words in that part; a target with fewer words is left unchanged."""
    max_words: Words = 5
    """Maximum number of words in that part."""
    template: str = "__start__ {trg} __end__ "
    """Text before the source: `{trg}` is the part."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        _check_order("words", self.min_words, self.max_words)
        template_parts(self.template, ("trg",))
        return self


def _check_order(name: str, least: int, most: int) -> None:
    if least > most:
        raise ConfigError.of(f"min_{name}", f"({least}) is above `max_{name}` ({most})")


class ModifiersConfig(Section):
    """Random changes of training pairs, different in every epoch (docs/fine-tuning.md#modifiers)."""

    merge: MergeConfig | None = None
    """Merging of short pairs."""
    noise: NoiseConfig | None = None
    """Random words to copy."""
    no_end_punctuation: ModifierConfig | None = None
    """Removal of a full stop, question mark or exclamation mark at the end if both sides have the same one."""
    upper_case: ModifierConfig | None = None
    """Conversion of both sides to capitals."""
    title_case: ModifierConfig | None = None
    """Conversion of both sides to title case, with a capital at the start of every word."""
    typos: TyposConfig | None = None
    """Typing errors in the source."""
    inline: InlineConfig | None = None
    """Placeholders and inline tags."""
    terms: TermsConfig | None = None
    """Terminology hints."""
    prefix: PrefixConfig | None = None
    """A part of the translation given before the source."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, content: Any) -> Any:
        known = list(cls.model_fields)
        unknown = [key for key in content if key not in known] if isinstance(content, dict) else []
        if unknown:
            raise ValueError(f"unknown modifier `{printable(str(unknown[0]), 60)}`; valid: {', '.join(known)}")
        return content

    @property
    def chosen(self) -> dict[str, Any]:
        """Sections of the active modifiers by name, in order of application."""
        sections = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: section for name, section in sections.items() if section and section.probability}

    @property
    def need_links(self) -> bool:
        """True if one of them needs word alignments."""
        return bool({"inline", "terms"} & self.chosen.keys())


class UntilConfig(Section):
    """The end of a stage, counted by one of its corpora."""

    corpus: str
    """Name of a corpus of the mix; an epoch of the stage is one pass over it."""
    epochs: Count | None = Field(default=None, ge=1)
    """The stage ends after this many of these epochs."""
    patience: Count | None = Field(default=None, ge=1)
    """The stage ends after this many validations without a better metric, counted within the stage. For the last stage
    set `training.stop.patience` instead."""

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if self.epochs is not None and self.patience is not None:
            raise ValueError("give a stage either `epochs` or `patience` to say when it ends")
        return self


class StageConfig(Section):
    """One stage of training, with its own mix of corpora."""

    mix: dict[str, Annotated[float, Field(ge=0, le=1e9)]]
    """Name of a corpus -> its share of the pairs; shares need not add up to 1. Other corpora are not used in this
    stage."""
    until: UntilConfig
    """The end of the stage."""
    modifiers: ModifiersConfig | None = None
    """Modifiers of this stage, instead of `data.modifiers`; `{}`: none."""

    @model_validator(mode="after")
    def _until_is_mixed(self) -> Self:
        if not self.mix.get(self.until.corpus):
            raise ConfigError.of(
                "until",
                f"counts epochs of `{printable(self.until.corpus, 60)}`, which is not in the mix with a share above 0",
            )
        return self
