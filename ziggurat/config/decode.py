"""Decoding section: beam search and its limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from ziggurat.config.section import Beams, Length, PathText, Real, Section, Size, Vocabulary
from ziggurat.system.errors import ConfigError


class LengthPenaltyConfig(Section):
    """Length normalisation: a hypothesis scores log-probability / penalty(length), counting end-of-sentence."""

    kind: Literal["none", "gnmt", "power", "lingvo"] = "power"
    """`gnmt`: ((5+len)/6)^alpha (Wu et al. 2016; tensor2tensor, zero). `power`: len^alpha (fairseq).
    `lingvo`: ((5+len)/5)^alpha plus coverage. The same alpha means different things in each."""
    alpha: float = Field(default=0.6, ge=0, le=10)
    """Strength: 0 compares raw log-probabilities, larger values favour longer output."""
    coverage: Real = Field(default=0.0, ge=0)
    """`lingvo` only: weight beta of the coverage term."""
    length_ratio: Real = Field(default=1.0, gt=0)
    """`lingvo` only: expected target/source length ratio of the coverage term."""
    word_penalty: float = Field(default=0.0, ge=-1e6, le=1e6)
    """Subtracted from the log-probability for each token, before the division (Marian); below 0 it is a reward."""

    @model_validator(mode="after")
    def _coverage_needs_lingvo(self) -> Self:
        if self.coverage and self.kind != "lingvo":
            raise ConfigError.of("coverage", "belongs to `kind: lingvo`")
        return self


class MaxLengthConfig(Section):
    """Longest output: min(ratio * source tokens + extra, limit), in tokens without end-of-sentence."""

    ratio: Real = Field(default=1.0, ge=0)
    """Factor for the source length."""
    extra: Length = Field(default=50, ge=0)
    """Tokens added to that."""
    limit: Length = Field(default=1024, ge=1)
    """Upper limit, whatever the source length."""


WITHOUT_SAMPLING: Mapping[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "epsilon": 0.0, "mbr": 0}
"""WITHOUT_SAMPLING are the values that the sampling keys must have in beam search."""
WITHOUT_BEAM: Mapping[str, Any] = {"endings": "candidates", "diverse_groups": 1, "prune": None}
"""WITHOUT_BEAM are the values that the beam-search keys must have in sampling."""


class DecodingConfig(Section):
    """Search, for `translate` and validation."""

    search: Literal["beam", "sample"] = "beam"
    """`beam`: the best translations found. `sample`: `n_best` (or `mbr`) independent random ones; validation still uses
    beam search."""
    beam_size: Beams = Field(default=4, ge=1)
    """Hypotheses per sentence; 1 is greedy search. `search: sample` ignores it."""
    n_best: Beams = Field(default=1, ge=1)
    """Translations returned per sentence, at most `beam_size` (when sampling: any number)."""
    length_penalty: LengthPenaltyConfig = LengthPenaltyConfig()
    """Comparison of hypotheses of different lengths."""
    max_length: MaxLengthConfig = MaxLengthConfig()
    """Longest output."""
    min_length: Length = Field(default=1, ge=0)
    """Minimum number of tokens before end-of-sentence is allowed."""
    prune: Real | None = Field(default=None, gt=0)
    """Drop hypotheses whose log-probability is more than this below the best of the sentence (lingvo: 3.0)."""
    eos_margin: Real | None = Field(default=None, ge=0)
    """Allow end-of-sentence only where its logit is within this of the best token's (lingvo: 5.0)."""
    banned: list[str] = Field(default_factory=list, max_length=10_000)
    """Words or phrases that never occur in the output, as the vocabulary segments them at the start of a word."""
    no_repeat_ngram_size: Size = Field(default=0, ge=0)
    """Allow no sequence of this many tokens twice in a translation; 0: off."""
    repetition_penalty: Real = Field(default=1.0, ge=1)
    """In the search, multiply the log-probabilities of tokens already in the translation by this; 1: off."""
    diverse_groups: Beams = Field(default=1, ge=1)
    """Groups of diverse beam search (Vijayakumar et al. 2016); divides `beam_size`."""
    diverse_strength: Real = Field(default=0.5, ge=0)
    """Penalty of a token for each beam of an earlier group that takes it at the same step."""
    temperature: Real = Field(default=1.0, ge=1e-6)
    """Sampling: divide log-probabilities by this; below 1, likely tokens become likelier."""
    top_k: Vocabulary = Field(default=0, ge=0)
    """Sampling: only the k likeliest tokens; 0: all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sampling: only the smallest set of likeliest tokens whose probabilities add up to this (nucleus)."""
    epsilon: float = Field(default=0.0, ge=0, lt=1)
    """Sampling: only tokens at least this likely (Hewitt et al. 2022)."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Sampling: the random numbers depend only on this, the line's number and the position in the translation."""
    mbr: Beams = Field(default=0, ge=0)
    """Sampling: draw this many translations and return the `n_best` with the highest mean chrF against all; 0: off."""
    alignments: bool = False
    """Return the source tokens that each target token attended to, by the head trained with guided alignment
    (`training.loss.alignment`), or by the last layer's mean over heads if there is none."""
    unknown: bool = False
    """Allow unknown tokens in translations, which SentencePiece shows as ` ⁇ `; a prefix may always have them."""
    replace_unknown: bool = False
    """Replace an unknown token with the source word that it attended to most; implies `unknown`."""
    batch_tokens: Size = Field(default=4096, ge=1)
    """Maximum source tokens in the search at a time, with padding. Finished sentences make room for others."""
    batch_sentences: Size = Field(default=256, ge=1)
    """Maximum number of sentences in the search at a time."""
    precision: Literal["auto", "float32", "bfloat16", "int8"] = "float32"
    """Precision of matrix products when a model is loaded for translation; validation uses that of training. `auto`:
    the faster of float32 and bfloat16 on this machine, measured with one product each. `backtranslate` does not take
    `auto`, because several machines may share its work."""
    shortlist: PathText | None = Field(default=None, min_length=1)
    """File written by `ziggurat shortlist`, read when a model is loaded for translation: only target pieces that the
    source sentence allows get a score. It cannot be combined with prefixes or words that must appear, and is not used
    in validation. An export for CTranslate2 contains it as `vmap.txt`."""
    endings: Literal["candidates", "beam", "fairseq", "marian"] = "candidates"
    """Rule for which extensions in a step may end a hypothesis, and when the search stops. `candidates`: the 2 *
    `beam_size` best may end one; the search stops when no better hypothesis is possible. `beam`: the `beam_size` best
    may, as in CTranslate2 and transformers; the search stops as for `candidates`. `fairseq`: the `beam_size` best may;
    the search stops once `beam_size` hypotheses have ended, and a hypothesis at the length limit ends there, scored
    with end-of-sentence. `marian`: each hypothesis that ends narrows the beam by one; the search stops when the beam
    is empty or at the length limit, where unfinished hypotheses are ranked with the others, without
    end-of-sentence; bytes of control characters are never written."""
    max_source_pieces: Length = Field(default=1024, ge=1)
    """Longer source lines are translated in parts of this many pieces, which are then joined; the log reports it."""

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        if self.min_length > self.max_length.limit:
            raise ConfigError.of(
                "min_length", f"({self.min_length}) is above `max_length.limit` ({self.max_length.limit})"
            )
        if self.endings != "candidates" and (self.search == "sample" or self.diverse_groups > 1):
            raise ConfigError.of(f"endings: {self.endings}", "is for ordinary beam search without groups")
        if self.search == "sample":
            self._check_sampling()
            return self
        if self.n_best > self.beam_size:
            raise ConfigError.of("n_best", f"({self.n_best}) is larger than `beam_size` ({self.beam_size})")
        if self.beam_size % self.diverse_groups:
            raise ConfigError.of(
                "diverse_groups", f"({self.diverse_groups}) must divide `beam_size` ({self.beam_size})"
            )
        if needed := [f"`{key}`" for key, value in WITHOUT_SAMPLING.items() if getattr(self, key) != value]:
            raise ValueError(f"{', '.join(needed)}: for sampling only; set `search: sample` as well")
        return self

    @property
    def writes_unknown(self) -> bool:
        """True if a translation may contain unknown tokens."""
        return self.unknown or self.replace_unknown

    def by_beam(self) -> DecodingConfig:
        """Return the settings with beam search instead of sampling."""
        return self.model_copy(update={"search": "beam", "seed": 0, **WITHOUT_SAMPLING})

    def _check_sampling(self) -> None:
        for key in ("diverse_groups", "prune"):
            if getattr(self, key) != WITHOUT_BEAM[key]:
                raise ConfigError.of(key, "is for `search: beam`")
        if self.mbr == 1:
            raise ConfigError.of("mbr: 1", "leaves nothing to choose from; draw more")
        if self.mbr and self.n_best > self.mbr:
            raise ConfigError.of("n_best", f"({self.n_best}) is larger than `mbr` ({self.mbr})")
