"""Data section: the corpora, and how they are cleaned, scored, segmented and mixed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from ziggurat.config.modifiers import ModifiersConfig, StageConfig
from ziggurat.config.section import Beams, Length, PathText, Real, Section, Size, Vocabulary, joined
from ziggurat.system.errors import ConfigError

Share = Annotated[float, Field(ge=0, le=1)]
Bound = Annotated[float, Field(ge=-1e9, le=1e9)]


class ScoreConfig(Section):
    """A score from another tool, such as Bicleaner or OpusFilter, for every pair of a corpus, and its limits."""

    path: PathText | None = None
    """File with one score per line (or a glob that matches as many files as the corpus): plain numbers, .tsv or .jsonl,
    optionally compressed as .gz, .xz or .zst. null: the corpus's own file, with the scores next to the texts."""
    column: str | Annotated[int, Field(ge=-1000, le=100_000)] | None = None
    """TSV: number of the column, from 0, or from -1 for the last. JSON lines, Parquet: name of the field, with dots and
    numbers for nested values, such as `LanguageIDFilter.cld2.0`. null: the whole line is the number."""
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
    """Identification of both sides' languages with py3langid (`pip install 'ziggurat-mt[clean]'`)."""

    source: Share | None = 0.05
    """Pairs whose source is in `data.source_language` with less than this confidence are dropped; null: any source."""
    target: Share | None = 0.05
    """The same for the target and `data.target_language`."""
    min_letters: Length = Field(default=5, ge=0)
    """A side with fewer letters passes, since so little text does not reveal its language."""


class AgreementConfig(Section):
    """Items that must match on both sides. `null` or `false` switches a check off."""

    numbers: Share | None = None
    """Smallest share of the numbers on both sides that also occur on the other side; 0.5 suits most corpora. Numbers
    are compared by their digits. Numbers up to 12 do not count, because they may be words on the other side."""
    punctuation: Annotated[int, Field(ge=0, le=10_000)] | None = None
    """Largest number of marks without a counterpart on the other side: ends of sentences, question and exclamation
    marks, colons, brackets, quotation marks. 2 or 3 suits most corpora. Commas, apostrophes and hyphens do not
    count."""
    urls: bool = False
    """Drop pairs whose web addresses are not the same on both sides."""
    emails: bool = False
    """Drop pairs whose e-mail addresses are not the same on both sides."""


class NearDuplicateConfig(Section):
    """Removal of near-duplicates of earlier pairs, found by sketches of their characters in fixed memory."""

    similarity: Annotated[float, Field(ge=0.5, le=0.95)] = 0.8
    """Share of common character sequences (Jaccard similarity) at which at least half of such pairs are found. Case,
    digits, punctuation and spaces do not count."""
    memory: Annotated[int, Field(ge=1, le=1 << 20)] = 256
    """Memory in MiB. 256 is enough for about 15 million pairs; beyond that, the earliest pairs are forgotten first."""


class PairScoreConfig(Section):
    """A score from 0 to 1 for how likely the sides are translations of each other, learnt from the training corpora."""

    min: Share = 0.5
    """Pairs with a lower score are dropped."""
    pairs: Annotated[int, Field(ge=100, le=2**31 - 1)] = 500_000
    """Maximum number of pairs to learn from, evenly spread; each takes about 2 kB of memory."""


class FilterConfig(Section):
    """Filters of sentence pairs; dropped pairs are counted by reason. `null` switches a filter off.

    Pairs with an empty side are always dropped. Lengths are taken after repair, Unicode and whitespace normalisation.
    """

    max_characters: Length | None = Field(default=4000, ge=1)
    """Longest sentence on either side, in characters; applied before segmentation, whose time grows with length."""
    max_pieces: Length | None = Field(default=250, ge=1)
    """Longest sentence on either side, in subword pieces, end-of-sentence not counted."""
    max_words: Length | None = Field(default=None, ge=1)
    """Longest sentence on either side, in whitespace-separated words. In scripts without spaces, a word is as many
    characters as carry the meaning of five English letters (two in Chinese, five in Thai)."""
    max_length_ratio: Real | None = Field(default=None, gt=1)
    """Largest ratio of the sides' lengths, in whitespace-separated words, or in characters if a side has one word. If a
    side is in a script without spaces, characters are weighted by the meaning they carry (docs/data.md)."""
    identical: bool = False
    """Drop pairs whose sides are the same text (copied source)."""
    duplicates: bool = False
    """Drop pairs seen before, by 64-bit hash of both sides, in any training corpus with this filter."""
    control_characters: bool = False
    """Drop pairs with control characters (Unicode category Cc) other than tab. Pairs with NUL are always dropped."""
    markup: bool = False
    """Drop pairs with HTML tags (`<p>`, `<br/>`, `</a>`) or comments as text on either side."""
    source_script: str | None = None
    """Unicode script of the source, such as `Latin` or `Cyrillic`; null: any."""
    target_script: str | None = None
    """Unicode script of the target; null: any."""
    min_script_share: float = Field(default=0.5, gt=0, le=1)
    """Smallest share of a side's letters that must be in its script."""
    repair: bool = False
    """Repair text first with ftfy (`pip install 'ziggurat-mt[clean]'`): wrongly decoded bytes (`fÃ¼r`), HTML entities,
    terminal escape sequences. Changed pairs are counted and get no word alignments."""
    languages: LanguageFilterConfig | None = None
    """Drop pairs whose sides are in other languages; null: off; `{}`: on, with the defaults."""
    agreement: AgreementConfig = AgreementConfig()
    """Numbers, punctuation and addresses that must match on both sides."""
    near_duplicates: NearDuplicateConfig | None = None
    """Drop pairs nearly equal to an earlier one in any training corpus; null: off; `{}`: on, with the defaults."""
    pair_score: PairScoreConfig | None = None
    """Drop pairs whose sides are unlikely to be translations of each other, by a score learnt from the corpora; null:
    off; `{}`: on, with the defaults."""
    held_out: Literal["keep", "pairs", "sides"] = "keep"
    """Training pairs that also occur in the development corpora or `data.held_out`, ignoring case and punctuation:
    `pairs` drops those with both sides there, `sides` those with either side. A warning names those that are kept."""


_MAX_CORPORA = 10_000  # a store numbers them with 16 bits
CorpusFormat = Literal["auto", "text", "tsv", "jsonl", "parquet"]
Language = Annotated[str, Field(pattern=r"^[A-Za-z]{2,8}([-_][A-Za-z0-9]{1,8})*$")]
SubwordKind = Literal["bpe", "unigram", "existing", "vocabulary"]
Symmetrisation = Literal["grow-diag-final-and", "grow-diag-final", "grow-diag", "intersection", "union"]


class CorpusConfig(Section):
    """One parallel corpus: either `source` + `target` (aligned text files) or `path` (both sides in one file)."""

    source: PathText | None = None
    """Source side as plain text, one sentence per line: path or glob; .gz, .xz and .zst are read as streams."""
    target: PathText | None = None
    """Target side, aligned line by line with `source`; a glob must match as many files, paired in sorted order."""
    path: PathText | None = None
    """One file (or glob) with both sides: .tsv, .jsonl or .parquet, each also .gz, .xz or .zst."""
    format: CorpusFormat = "auto"
    """File format; `auto` goes by the file name."""
    source_language: Language | None = None
    """Code of its source language, if that is not `data.source_language`: a multilingual model has corpora in several
    directions (docs/fine-tuning.md#many-languages)."""
    target_language: Language | None = None
    """The same for the target."""
    alignment: PathText | None = None
    """Word alignments of the pairs, for guided alignment: a text file (or a glob that matches as many files as the
    corpus) with lines such as `0-0 1-2`, in the order of the pairs (docs/students.md)."""
    alignment_column: Annotated[int, Field(ge=0, le=100_000)] | None = None
    """Column of `alignment` with the alignments, from 0, if that file is a TSV file, such as the corpus itself; null:
    whole lines are alignments."""
    columns: list[str | Annotated[int, Field(ge=0, le=100_000)]] = Field(default_factory=list)
    """Source and target column: numbers from 0 for TSV (default [0, 1]), names for JSON lines and Parquet
    (default: the codes of its languages)."""
    row_columns: Annotated[int, Field(ge=2, le=100_000)] | None = None
    """TSV: required number of columns. Rows with fewer are skipped and counted, further columns are ignored, as with
    OpusTrainer's `num_fields`. null: all rows must have as many columns as the first."""
    weight: Real = Field(default=1.0, gt=0)
    """Frequency of drawing a pair of this corpus, relative to its natural share."""
    tag: str | None = Field(default=None, pattern=r"^(<[^\s<>]+>|>>[^\s<>]+<<|__[^\s<>]+__)$")
    """Token put before each source sentence of this corpus, such as `<bt>` (in imported models `>>fra<<` or
    `__fr__`); no text can produce it."""
    name: str | None = None
    """Name in reports; default: the file name."""
    filters: dict[str, Any] = Field(default_factory=dict, max_length=100)
    """Values that override `data.filters` for this corpus, such as `{max_length_ratio: 3, languages: {source: 0.2}}`;
    for training corpora."""
    scores: list[ScoreConfig] = Field(default_factory=list, max_length=100)
    """Scores of its pairs from other tools, with limits (docs/data.md); for training corpora."""

    @model_validator(mode="after")
    def _one_layout(self) -> Self:
        aligned = self.source is not None and self.target is not None
        if (self.path is not None) == aligned or (self.source is None) != (self.target is None):
            raise ValueError("give either `source` and `target` (aligned text files) or `path` (one file)")
        if self.alignment_column is not None and self.alignment is None:
            raise ConfigError.of("alignment_column", "needs `alignment`, the file that has this column")
        if self.columns and len(self.columns) != 2:
            raise ConfigError.of("columns", "needs two entries: the source column and the target column")
        return self

    @model_validator(mode="after")
    def _rows_of_one_file(self) -> Self:
        if self.row_columns is not None:
            if self.scores or self.alignment not in (None, self.path):
                raise ConfigError.of(
                    "row_columns", "leaves out rows, but `scores` or an `alignment` in another file would not"
                )
            wanted = [*(self.columns or (0, 1)), self.alignment_column or 0]
            if (most := max(column for column in wanted if isinstance(column, int))) >= self.row_columns:
                raise ConfigError.of(
                    f"row_columns: {self.row_columns}", f"does not reach column {most}, counted from 0"
                )
        return self


class AlignmentConfig(Section):
    """Word alignments of the corpora, kept in the store for guided alignment (`training.loss.alignment`)."""

    compute: Literal["none", "hmm"] = "none"
    """Method by which `prepare` aligns corpora without an `alignment`. `hmm`: as `ziggurat align` does, with one model
    trained on the training corpora among them."""
    words: Literal["split", "blanks"] = "split"
    """Definition of the words that alignments number. `split`: text is split at white space and punctuation, as by
    `ziggurat align`. `blanks`: text is split at spaces and tabs, for files that other aligners made from tokenised
    text. With `subword.kind: vocabulary` the words are always those that the pieces spell."""
    symmetrise: Symmetrisation = "grow-diag-final-and"
    """`compute`: how the two directions are merged."""
    pairs: Size = Field(default=1_000_000, ge=1)
    """`compute: hmm`: maximum number of pairs to train the aligner on; memory grows with it."""


class RegularisationConfig(Section):
    """Subword regularisation during training (Kudo 2018; BPE-dropout, Provilkov et al. 2020)."""

    source: bool = True
    """Sample segmentations of the source side."""
    target: bool = False
    """Sample segmentations of the target side."""
    alpha: Real = Field(default=0.1, gt=0)
    """BPE: probability of dropping a merge. Unigram: smoothing of the n-best distribution."""
    nbest: Beams = Field(default=64, ge=2)
    """Unigram: sample from this many best segmentations."""


class SubwordConfig(Section):
    """Segmentation of text into subword pieces."""

    kind: SubwordKind = "bpe"
    """`bpe` and `unigram` train a SentencePiece model; `existing` uses a trained one; `vocabulary` reads text that is
    already segmented (subword-nmt's `@@ `) with a plain vocabulary file."""
    vocabulary_size: Vocabulary = Field(default=8000, ge=8)
    """Pieces per model, control symbols included (`bpe`, `unigram`)."""
    target_vocabulary_size: Vocabulary | None = Field(default=None, ge=8)
    """`joint: false`: pieces of the target side's model (`vocabulary_size` is then for the source); null: the same."""
    joint: bool = True
    """One model for both sides; false: one each."""
    byte_fallback: bool = True
    """Spell unknown characters as bytes, so that nothing is unknown."""
    character_coverage: float = Field(default=1.0, gt=0, le=1)
    """`bpe`, `unigram`: share of the training text's characters that get a piece (SentencePiece)."""
    symbols: list[Annotated[str, Field(pattern=r"^[^\s\u2581\ufdd0]+$", max_length=100)]] | None = Field(
        default=None, max_length=1000
    )
    """Strings that are always one piece (`bpe`, `unigram`), such as the marks of terminology hints, `[__source__,
    __target__, __done__]`; null: none. They count towards the vocabulary's size."""
    sample_pairs: Size = Field(default=200_000, ge=1)
    """Train the model on at most this many sentence pairs, drawn evenly from the corpora."""
    source_model: PathText | None = None
    """`existing`: SentencePiece model of the source side (or of both sides); or the folder of a model, run or store,
    to use its vocabularies unchanged and fine-tune that model."""
    target_model: PathText | None = None
    """`existing`: SentencePiece model of the target side; default: the source model."""
    source_vocabulary: PathText | None = None
    """`vocabulary`: file with one token per line, optionally followed by a space and a count, as fairseq's dict.txt."""
    target_vocabulary: PathText | None = None
    """`vocabulary`: the same for the target side; default: the source vocabulary."""
    regularisation: RegularisationConfig | None = None
    """Sample new segmentations in every epoch; null: always the best one."""

    @property
    def separate(self) -> bool:
        """True if each side has its own vocabulary; equal paths mean one vocabulary for both."""
        if self.kind == "existing":
            return self.target_model not in (None, self.source_model)
        if self.kind == "vocabulary":
            return self.target_vocabulary not in (None, self.source_vocabulary)
        return not self.joint

    @model_validator(mode="after")
    def _files_present(self) -> Self:
        # With `existing` these two have no effect, like other settings of a run whose vocabulary is reused.
        fixed = self.kind == "vocabulary"
        if self.target_vocabulary_size is not None and (fixed or (self.joint and self.kind != "existing")):
            raise ConfigError.of(
                "target_vocabulary_size", "needs two models to train: `joint: false`, with `kind: bpe` or `unigram`"
            )
        if self.symbols and fixed:
            raise ConfigError.of("symbols", "needs a model to train: `kind: bpe` or `unigram`, not `vocabulary`")
        if self.kind == "existing" and self.source_model is None:
            raise ConfigError.of("kind: existing", "needs `source_model`")
        if self.kind == "vocabulary" and self.source_vocabulary is None:
            raise ConfigError.of("kind: vocabulary", "needs `source_vocabulary`")
        if self.kind == "vocabulary" and self.regularisation is not None:
            raise ValueError(
                "pre-segmented text (`kind: vocabulary`) cannot be segmented again: remove `regularisation`"
            )
        return self


class DataConfig(Section):
    """Parallel text and the store made from it (`ziggurat prepare`)."""

    source_language: str = Field(min_length=1)
    """ISO 639 code of the source language, such as `de`."""
    target_language: str = Field(min_length=1)
    """ISO 639 code of the target language, such as `en`."""
    store: PathText = Field(min_length=1)
    """Folder of the prepared data."""
    train: list[CorpusConfig] = Field(default_factory=list, max_length=_MAX_CORPORA)
    """Training corpora (for `prepare`)."""
    dev: list[CorpusConfig] = Field(default_factory=list, max_length=_MAX_CORPORA)
    """Development corpora, never filtered except for empty sides (for `prepare`)."""
    sampling_temperature: Real = Field(default=1.0, ge=0.1)
    """Corpora are drawn in proportion to (pairs * weight)^(1/temperature); 1 keeps their natural shares."""
    unicode: Literal["none", "nfc", "nfkc"] = "none"
    """Unicode normalisation, of training text and of all text translated later."""
    filters: FilterConfig = FilterConfig()
    """Cleaning of the training corpora (docs/data.md)."""
    held_out: list[PathText] = Field(default_factory=list, max_length=1000)
    """Text files (or globs) of test sets, in either language. Training pairs are compared with them and with the
    development corpora; a warning names the pairs in common, and `data.filters.held_out` drops them."""
    subword: SubwordConfig = SubwordConfig()
    """Segmentation."""
    alignment: AlignmentConfig = AlignmentConfig()
    """Word alignments."""
    stages: list[StageConfig] = Field(default_factory=list, max_length=1000)
    """Stages of training, each with its own mix of the corpora (docs/fine-tuning.md#modifiers). Without stages,
    `sampling_temperature` and the weights of the corpora set the mix."""
    modifiers: ModifiersConfig = ModifiersConfig()
    """Random changes of training pairs: upper case, typing errors, terminology hints and others."""

    @model_validator(mode="after")
    def _stages_can_follow(self) -> Self:
        for number, stage in enumerate(self.stages[:-1]):
            if stage.until.epochs is None and stage.until.patience is None:
                raise ConfigError.of(f"stages.{number}", "never ends: give its `until` either `epochs` or `patience`")
        if self.stages and self.stages[-1].until.patience is not None:
            raise ConfigError.of("patience", "of the last stage is that of the run: set `training.stop.patience`")
        if self.stages and (self.sampling_temperature != 1 or any(corpus.weight != 1 for corpus in self.train)):
            raise ConfigError.of("stages", "sets how corpora are mixed: leave out `sampling_temperature` and `weight`")
        changed = [self.modifiers, *(stage.modifiers for stage in self.stages if stage.modifiers)]
        if self.subword.kind == "vocabulary" and any(modifiers.chosen for modifiers in changed):
            raise ValueError("text that is already segmented (`subword.kind: vocabulary`) cannot have `modifiers`")
        return self

    def stage_modifiers(self, stage: int) -> ModifiersConfig:
        """Return the modifiers of a stage, from 0."""
        own = self.stages[stage].modifiers if self.stages else None
        return self.modifiers if own is None else own

    @model_validator(mode="after")
    def _filters_of_corpora(self) -> Self:
        for number, corpus in enumerate(self.train):
            try:
                self.filters_of(corpus)
            except ValidationError as error:
                found = error.errors()[0]
                place = ".".join(str(step) for step in ("train", number, "filters", *found["loc"]))
                raise ConfigError.of(f"{place}", f": {found['msg']}") from None
        # Filters shared by all corpora cannot differ between them.
        shared = [(f.near_duplicates, f.pair_score and f.pair_score.pairs) for f in map(self.filters_of, self.train)]
        for key, chosen in zip(("near_duplicates", "pair_score.pairs"), zip(*shared, strict=True), strict=False):
            if len({value for value in chosen if value is not None}) > 1:
                raise ConfigError.of(f"filters.{key}", "is shared by all corpora: set it only in `data.filters`")
        for number, corpus in enumerate(self.dev):
            for key in ("filters", "scores"):
                if getattr(corpus, key):
                    raise ConfigError.of(f"dev.{number}.{key}", ": development corpora are not filtered; remove it")
        return self

    def corpora(self) -> Iterator[tuple[str, str, CorpusConfig]]:
        """Yield the split, key and section of each corpus, such as `train` and `data.train.0`; development last."""
        for split, corpora in (("train", self.train), ("dev", self.dev)):
            yield from ((split, f"data.{split}.{number}", corpus) for number, corpus in enumerate(corpora))

    def filters_of(self, corpus: CorpusConfig) -> FilterConfig:
        """Return the filters of a training corpus: `filters`, overridden by its own values.

        Raises ValidationError for keys or values that `filters` does not allow.
        """
        if not corpus.filters:
            return self.filters
        return FilterConfig.model_validate(joined(self.filters.model_dump(), corpus.filters))

    def languages_of(self, corpus: CorpusConfig) -> tuple[str, str]:
        """Return the codes of a corpus's source and target language."""
        return corpus.source_language or self.source_language, corpus.target_language or self.target_language

    def aligned(self, split: str) -> bool:
        """Return whether the store needs word alignments for a split, `train` or `dev`."""
        corpora = self.train if split == "train" else self.dev
        named = any(corpus.alignment is not None for corpus in corpora)
        return named or (bool(corpora) and self.alignment.compute != "none")
