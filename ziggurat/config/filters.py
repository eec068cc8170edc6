"""Cleaning of training pairs: repair, filters with their thresholds, scores that other tools wrote."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ziggurat.config.base import Length, PathText, Real, Section

Share = Annotated[float, Field(ge=0, le=1)]
Bound = Annotated[float, Field(ge=-1e9, le=1e9)]


class ScoreConfig(Section):
    """A score that another tool gave every pair of a corpus, such as Bicleaner or OpusFilter, and its limits."""

    path: PathText | None = None
    """File with the scores (or glob, with as many files as the corpus), line by line: a number alone, a .tsv or a
    .jsonl; each also .gz, .xz or .zst. null: the corpus's own file, which then has them beside the texts."""
    column: str | Annotated[int, Field(ge=-1000, le=100_000)] | None = None
    """TSV: number of the column from 0, or from the end with -1 for the last. JSON lines, Parquet: name of the field,
    with dots and numbers for what is inside, such as `LanguageIDFilter.cld2.0`. null: the line is the number."""
    min: Bound | None = None
    """Pairs with a lower score are dropped."""
    max: Bound | None = None
    """Pairs with a higher score are dropped (OpusFilter's `CrossEntropyFilter`, say, is lower for better pairs)."""

    @model_validator(mode="after")
    def _some_limit(self) -> Self:
        if self.min is None and self.max is None:
            raise ValueError("give `min` or `max`, or both: without them no pair is dropped")
        if self.path is None and self.column is None:
            raise ValueError("give `path`, a file with the scores, or `column` of the corpus's own file")
        return self


class LanguageFilterConfig(Section):
    """Identification of the two sides' languages, by py3langid (`pip install 'ziggurat-mt[clean]'`)."""

    source: Share | None = 0.05
    """Pairs whose source is in `data.source_language` with less than this confidence are dropped; null: any source."""
    target: Share | None = 0.05
    """The same of the target and `data.target_language`."""
    min_letters: Length = Field(default=5, ge=0)
    """A side with fewer letters passes: so little text says nothing of its language."""


class AgreementConfig(Section):
    """What must stand on both sides alike. `null` or `false` leaves a pair as it is."""

    numbers: Share | None = None
    """Smallest share of the numbers of both sides that have their like on the other; 0.5 suits most corpora. Numbers
    are compared by their digits; those up to 12 may be words on the other side, and do not count."""
    punctuation: Annotated[int, Field(ge=0, le=10_000)] | None = None
    """Most marks without their like on the other side: ends of sentences, question and exclamation marks, colons,
    brackets, quotation marks; 2 or 3 suits most corpora. Commas, apostrophes and hyphens do not count."""
    urls: bool = False
    """Drop pairs whose web addresses are not the same on both sides."""
    emails: bool = False
    """Drop pairs whose e-mail addresses are not the same on both sides."""


class NearDuplicateConfig(Section):
    """Pairs that are nearly the same as an earlier one, by sketches of their characters, in memory of fixed size."""

    similarity: Annotated[float, Field(ge=0.5, le=0.95)] = 0.8
    """Share of common character sequences (Jaccard) from which at least half of such pairs are found; case, digits,
    punctuation and blanks do not count."""
    memory: Annotated[int, Field(ge=1, le=1 << 20)] = 256
    """MiB. 256 are enough for some 15 million pairs; with more, the earliest are forgotten one after another."""


class PairScoreConfig(Section):
    """A score from 0 to 1 for how likely the sides translate each other, learnt from the training corpora."""

    min: Share = 0.5
    """Pairs with a lower score are dropped."""
    pairs: Annotated[int, Field(ge=100, le=2**31 - 1)] = 500_000
    """Pairs to learn from at most, evenly spread; memory grows with them, about 2 kB each."""


class FilterConfig(Section):
    """Filters of sentence pairs; dropped pairs are counted by reason. `null` switches a filter off.

    Pairs with an empty side are always dropped. Lengths are taken after repair, Unicode and whitespace normalisation.
    """

    max_characters: Length | None = Field(default=4000, ge=1)
    """Longest sentence on either side, in characters; applied before segmentation, whose time grows with length."""
    max_pieces: Length | None = Field(default=250, ge=1)
    """Longest sentence on either side, in subword pieces, end-of-sentence not counted."""
    max_words: Length | None = Field(default=None, ge=1)
    """Longest sentence on either side, in whitespace-separated words. Text of a language without blanks has to be
    segmented before: otherwise a sentence is one word."""
    max_length_ratio: Real | None = Field(default=None, gt=1)
    """Largest ratio of the sides' lengths, in whitespace-separated words (in characters where a side has no
    blanks)."""
    identical: bool = False
    """Drop pairs whose sides are the same text (copied source)."""
    duplicates: bool = False
    """Drop pairs seen before, by 64-bit hash of both sides, in any training corpus with this filter."""
    control_characters: bool = False
    """Drop pairs with control characters (Unicode category Cc) other than tab. Pairs with NUL are always dropped."""
    source_script: str | None = None
    """Unicode script of the source, such as `Latin` or `Cyrillic`; null: any."""
    target_script: str | None = None
    """Unicode script of the target; null: any."""
    min_script_share: float = Field(default=0.5, gt=0, le=1)
    """Smallest share of a side's letters that must be in its script."""
    repair: bool = False
    """Mend text first, by ftfy (`pip install 'ziggurat-mt[clean]'`): bytes that were decoded wrongly (`fÃ¼r`), HTML
    entities, remains of terminals. Changed pairs are counted, and have no word alignments."""
    languages: LanguageFilterConfig | None = None
    """Drop pairs whose sides are in other languages; null: off, `{}`: with the defaults."""
    agreement: AgreementConfig = AgreementConfig()
    """Numbers, punctuation and addresses that must stand on both sides."""
    near_duplicates: NearDuplicateConfig | None = None
    """Drop pairs that are nearly the same as an earlier one, over all training corpora; null: off, `{}`: with the
    defaults."""
    pair_score: PairScoreConfig | None = None
    """Drop pairs whose sides hardly translate each other, by a score learnt from the corpora; null: off, `{}`: with the
    defaults."""
    held_out: Literal["keep", "pairs", "sides"] = "keep"
    """Pairs that the development corpora or `data.held_out` have too, case and punctuation aside: `pairs` drops those
    with both sides there, `sides` those with either. What stays in training is named loudly."""
