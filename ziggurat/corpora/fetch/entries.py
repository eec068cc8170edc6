"""What the registry says of corpora and of recipes' folders: the keys of ziggurat/corpora/fetch/corpora.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from ziggurat.config.base import Section

Layout = Literal["text", "tsv", "sgm", "ted", "tmx", "wmt-xml"]
"""`text`: a file a side, line by line; `tsv`: columns; `sgm`: WMT's <seg> lines, a file a side; `ted`: text between the
tags of IWSLT's training files; `tmx`; `wmt-xml`: source and references in one file, from WMT 2021 on."""

_Digest = Annotated[str, Field(pattern="^[0-9a-f]+$")]


class Remote(Section):
    """One file to fetch."""

    url: str
    """Its address; parts in braces are filled from the name."""
    bytes: int | None = Field(default=None, ge=0)
    """Its length."""
    sha256: _Digest | None = Field(default=None, min_length=64, max_length=64)
    md5: _Digest | None = Field(default=None, min_length=32, max_length=32)
    by_hand: str | None = None
    """Why it cannot be fetched, and where people get it."""


class Entry(Section):
    """Corpora of one kind: all that differ only in the parts of the name."""

    title: str
    pairs: str | dict[str, str] | None = None
    """Pairs of languages that there are, such as `de-en fr-en`, or those for each value of the part in `where`; null,
    and no `languages`: any that the origin has."""
    languages: str | dict[str, str] | None = None
    """Languages that there are, where any two of them are a pair; or those for each value of the part in `where`."""
    where: dict[str, str] = Field(default_factory=dict)
    """Values that other parts of the name may have, in words; a part that is not here may be any."""
    sorted: bool = False
    """True if the two languages are in alphabetical order whatever the direction."""
    files: list[Remote] = Field(min_length=1, max_length=64)
    layout: Layout = "text"
    take: list[str] = Field(default_factory=list, max_length=2)
    """Members of the archives: a pattern for each side, or one for both. Without: the files themselves."""
    columns: list[Annotated[int, Field(ge=0, le=1000)]] = Field(default_factory=list, max_length=2)
    """`tsv`: the columns of the two sides; default 0 and 1."""
    separator: str = Field(default="\t", min_length=1)
    """`tsv`: what stands between columns."""
    references: list[str] = Field(default_factory=list)
    """`wmt-xml`: translators whose reference is wanted, the first that there is."""
    licence: str
    """Licence or terms, in words; what the origin says, also where it says nothing."""
    terms: str | None = None
    """Address of the terms or of the corpus's page."""
    known_from: str | None = None
    """Where the addresses, layouts and checksums were read, in the built-in registry, of which none could be tried."""
    note: str | None = None


class HoldOut(Section):
    """Pairs taken out of a set, for another."""

    set: str
    """Name of the set that they make."""
    every: int = Field(ge=2)
    """Every n-th pair."""


class FolderSet(Section):
    """One set of pairs in a recipe's folder: it is made of corpora, or somebody has to bring it."""

    of: list[str] = Field(default_factory=list)
    """Names of corpora, in order."""
    by_hand: str | None = None
    """Why it cannot be fetched, and where it comes from."""
    hold_out: HoldOut | None = None
    extra: bool = False
    """True for a set that recipes do not name, such as a test set; it comes with the others."""


class Folder(Section):
    """The folder of a recipe's data, such as `data/wmt14-en-de`."""

    sets: dict[str, FolderSet]
    note: str | None = None


@dataclass(frozen=True)
class Corpus:
    """A corpus whose name is filled in: all that is needed to fetch and read it."""

    name: str
    title: str
    languages: tuple[str, ...]
    """One or two codes, in the order of sides, members and columns."""
    files: tuple[Remote, ...]
    layout: Layout
    take: tuple[str, ...]
    columns: tuple[int, ...]
    separator: str
    references: tuple[str, ...]
    licence: str
    terms: str | None
    known_from: str | None
    note: str | None = None
    spellings: tuple[tuple[str, ...], ...] = ()
    """`tmx`: codes that stand for each language in the file; none: its code in `languages`."""
