"""Sections of the file of `ziggurat pipeline` about corpora: where they come from, what is held out of them."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ziggurat.config.base import PathText, Real, Section, Size
from ziggurat.config.data import CorpusConfig
from ziggurat.config.filters import FilterConfig

Name = Annotated[str, Field(pattern=r"^[\w][\w.+-]*$", max_length=100)]


class FetchConfig(Section):
    """How public corpora are fetched (docs/fetch.md)."""

    registry: list[PathText] = Field(default_factory=list, max_length=100)
    """Registries of your own, laid over the built-in one."""
    cache: PathText | None = None
    """Folder of downloads; null: `$ZIGGURAT_DOWNLOADS`, or ~/.cache/ziggurat/downloads."""
    mirror: list[str] = Field(default_factory=list, max_length=100)
    """Folders or addresses with files at HOST/PATH, asked before the files' own servers."""
    offline: bool = False
    """Use downloads and mirrors only."""
    proxy: str | None = None
    """Proxy for all addresses; null: `$https_proxy`."""
    retries: Annotated[int, Field(ge=0, le=1000)] = 5
    """Failures in a row to bear."""


class BitextCorpus(CorpusConfig):
    """A parallel corpus: files as in `data.train`, or the name of a public one."""

    fetch: str | None = Field(default=None, min_length=1, max_length=500)
    """Name of a public corpus, such as `opus/Tatoeba/v2023-04-12/de-en`, in place of files (docs/fetch.md)."""

    @model_validator(mode="after")
    def _one_layout(self) -> Self:
        if self.alignment is not None:
            raise ValueError("`alignment` is of no use here: pairs are dropped and split up; add section `alignment`")
        if self.source_language or self.target_language:
            raise ValueError("a pipeline has one direction: leave out the languages of single corpora")
        if (self.fetch is None) == (self.path is None and self.source is None and self.target is None):
            raise ValueError("give `fetch`, or `source` and `target` (aligned text files), or `path` (one file)")
        if self.fetch is None and self.path is not None and (self.source or self.target):
            raise ValueError("give either `source` and `target` (aligned text files) or `path` (one file)")
        if self.fetch is None and self.path is None and (self.source is None or self.target is None):
            raise ValueError("give both `source` and `target`, aligned line by line")
        if self.columns and len(self.columns) != 2:
            raise ValueError("`columns` needs two entries: the source column and the target column")
        return self


class CleaningConfig(FilterConfig):
    """Cleaning of the training corpora, as `data.filters` (docs/cleaning.md); more of it is on."""

    max_length_ratio: Real | None = Field(default=3.0, gt=1)
    """As in `data.filters`."""
    identical: bool = True
    """As in `data.filters`."""
    duplicates: bool = True
    """As in `data.filters`."""
    control_characters: bool = True
    """As in `data.filters`."""
    held_out: Literal["keep", "pairs", "sides"] = "pairs"
    """Pairs that the development or test sets have, too; as in `data.filters`."""


class HoldOutConfig(Section):
    """Pairs that are taken out of the training corpora where there is no other development or test set."""

    dev: Size = Field(default=0, ge=0)
    """Pairs for development; 0: none."""
    test: Size = Field(default=0, ge=0)
    """Pairs for a test set, called `held-out`; 0: none."""


class BitextConfig(Section):
    """Parallel text."""

    train: list[BitextCorpus] = Field(min_length=1, max_length=1000)
    """Training corpora. A `tag` is for some of them: what is held out, distilled or tested has none."""
    dev: list[BitextCorpus] = Field(default_factory=list, max_length=100)
    """Development corpora; they are not cleaned. A `tag` is put before the sentences for models that learn from a
    corpus with the same one."""
    hold_out: HoldOutConfig | None = None
    """Take pairs for development and test out of the cleaned training corpora: no pair that shares a side with them
    stays there."""

    @model_validator(mode="after")
    def _dev_has_no_keys_of_training(self) -> Self:
        tags = {corpus.tag for corpus in self.train}
        for number, corpus in enumerate(self.dev):
            for key, why in (("filters", "filtered"), ("scores", "filtered"), ("weight", "drawn from")):
                if getattr(corpus, key) != BitextCorpus.model_fields[key].get_default(call_default_factory=True):
                    raise ValueError(f"`dev.{number}.{key}`: development corpora are not {why}; remove it")
            if corpus.tag is not None and corpus.tag not in tags:
                raise ValueError(f"`dev.{number}.tag`: no corpus of `train` has {corpus.tag}: nothing would learn it")
        return self


class TestSetConfig(Section):
    """A test set."""

    name: Name
    """Name in the report."""
    source: PathText | None = None
    """Source text, one sentence per line."""
    target: PathText | None = None
    """Its translation."""
    fetch: str | None = Field(default=None, min_length=1, max_length=500)
    """Name of a public test set, such as `sacrebleu/wmt20/de-en`, in place of files."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        files = self.source is not None and self.target is not None
        if (self.source is None) != (self.target is None) or (self.fetch is None) == (not files):
            raise ValueError("give either `source` and `target`, or `fetch`")
        return self


class MonolingualText(Section):
    """Text of one language."""

    path: PathText | None = None
    """One sentence per line: path or glob; .gz, .xz and .zst are read as streams."""
    fetch: str | None = Field(default=None, min_length=1, max_length=500)
    """Name of a public corpus, such as `news-crawl/2019/de`, in place of files."""
    lines: Size | None = Field(default=None, ge=1)
    """Take the first lines only, after cleaning; null: all."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.path is None) == (self.fetch is None):
            raise ValueError("give either `path` or `fetch`")
        return self


class MonolingualConfig(Section):
    """Text of one language each; without duplicates and without the sentences of development and test sets."""

    source: list[MonolingualText] = Field(default_factory=list, max_length=1000)
    """Text of the source language, for `distillation`."""
    target: list[MonolingualText] = Field(default_factory=list, max_length=1000)
    """Text of the target language, for `backtranslation`."""
