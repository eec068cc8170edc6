"""Names from other projects, which are sacreBLEU's test sets and OPUS's corpora, and from the registry.

`Names.find` returns the corpus with any such name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import quote

from pydantic import Field

from ziggurat.corpora.fetch.downloads import Downloads, is_archive
from ziggurat.corpora.fetch.registry import Layout, RegisteredCorpus, Registry, Remote
from ziggurat.system.errors import ConfigError, printable
from ziggurat.system.small_files import JsonForm, parse_json, shaped

_OPUS_API = "https://opus.nlpl.eu/opusapi/"
_SACREBLEU = {
    "FakeSGMLDataset": "sgm",
    "IWSLTXMLDataset": "sgm",
    "WMTXMLDataset": "wmt-xml",
    "PlainTextDataset": "text",
}
_SACREBLEU_LICENCE = "the shared task's; WMT releases its test sets for research use; to be checked"


class IndexEntry(NamedTuple):
    """One corpus in a list."""

    name: str
    title: str
    bytes: int | None
    pairs: int | None
    licence: str
    any_pair: bool = False
    """True if it is unknown whether it has the requested languages, because it has any pair of its origin."""


class _OpusCorpus(JsonForm):
    """A corpus in an answer of the OPUS API."""

    corpus: str
    version: str
    source: str
    target: str
    url: str
    size: int = Field(ge=0)
    """Kibibytes."""
    alignment_pairs: int | None = None


class _OpusAnswer(JsonForm):
    corpora: list[_OpusCorpus]


class Names:
    """Look-up of corpora by name."""

    def __init__(self, registry: Registry, downloads: Downloads) -> None:
        self.registry = registry
        self._downloads = downloads

    def find(self, name: str) -> RegisteredCorpus:
        """Return the corpus of a name: `sacrebleu/SET/PAIR`, `opus/CORPUS/latest/PAIR`, or one in a registry.

        Raises ConfigError with the nearest names, or DataError if an index cannot be reached.
        """
        start, _, rest = name.partition("/")
        if start == "sacrebleu":
            return _sacrebleu(rest)
        if start == "mtdata":
            raise ConfigError(
                f"{printable(name, 200)}: mtdata has its own command: `mtdata get --langs deu-eng --train "
                f"{printable(rest, 200)} --out FOLDER`; then name the files in `data.train` (docs/data.md)"
            )
        if start == "opus" and (found := re.fullmatch(r"([\w.-]+)/latest/(\w+)-(\w+)", rest)):
            return self.registry.find(self._latest(*found.groups()))
        return self.registry.find(name)

    def _latest(self, corpus: str, first: str, second: str) -> str:
        """Return the name of the newest version of an OPUS corpus."""
        found = [one for one in opus_listed(self._downloads, first, second, corpus) if one.name.split("/")[1] == corpus]
        if not found:
            raise ConfigError(
                f"opus/{corpus}: OPUS has none for {first}-{second}; `ziggurat fetch --list opus {first}-{second}` "
                "lists what it has"
            )
        return found[0].name


def opus_listed(downloads: Downloads, first: str, second: str, corpus: str | None = None) -> list[IndexEntry]:
    """Return the newest corpora of OPUS for two languages, the largest first. Raises DataError."""
    source, target = sorted((first, second))
    asked = {"source": source, "target": target, "preprocessing": "moses", "version": "latest"}
    if corpus is not None:
        asked = {"corpus": corpus, **asked}
    url = f"{_OPUS_API}?{'&'.join(f'{key}={quote(value)}' for key, value in asked.items())}"
    answer = parse_json(downloads.get_small(url), url, remedy="the OPUS API may have changed; name the version in full")
    found = shaped(answer, _OpusAnswer, url, remedy="the OPUS API may have changed; name the version in full").corpora
    return [
        IndexEntry(
            f"opus/{one.corpus}/{one.version}/{one.source}-{one.target}",
            f"OPUS {one.corpus} {one.version}",
            one.size << 10,
            one.alignment_pairs,
            "see LICENSE and README in the archive",
        )
        for one in sorted(found, key=lambda one: -(one.alignment_pairs or 0))
    ]


def sacrebleu_listed(words: Sequence[str]) -> Iterator[IndexEntry]:
    """Yield the test sets of sacreBLEU that have all `words` in their name or description, or as language pairs."""
    from sacrebleu.dataset import DATASETS

    for name, known in DATASETS.items():
        if type(known).__name__ not in _SACREBLEU:
            continue
        pairs = [word for word in words if word in known.langpairs]
        text = f"sacrebleu/{name} {known.description}".casefold()
        if all(word in pairs or word.casefold() in text for word in words):
            title = str(known.description) if pairs else f"{known.description} Pairs: {' '.join(known.langpairs)}"
            for pair in pairs or ["{a}-{b}"]:
                yield IndexEntry(f"sacrebleu/{name}/{pair}", title, None, None, _SACREBLEU_LICENCE)


def _sacrebleu(rest: str) -> RegisteredCorpus:
    """Return a test set of sacreBLEU: URLs, checksums, members; with several references, the first."""
    from sacrebleu.dataset import DATASETS

    name, _, pair = rest.rpartition("/")
    known: Any = DATASETS.get(name)
    if known is None or type(known).__name__ not in _SACREBLEU:
        sets = [one for one in DATASETS if one.split("/")[0] == rest.split("/")[0]] or list(DATASETS)
        raise ConfigError(
            f"sacrebleu/{printable(rest, 200)}: expected sacrebleu/SET/PAIR, such as sacrebleu/wmt14/full/en-de; sets "
            f"are {', '.join(sets)}"
        )
    if pair not in known.langpairs:
        raise ConfigError(f"sacrebleu/{name}: has no {printable(pair)}; it has {' '.join(known.langpairs)}")
    layout: Layout = _SACREBLEU[type(known).__name__]  # type: ignore[assignment]
    described = known.langpairs[pair]
    references: list[str] = []
    if layout == "wmt-xml":
        references = list(known.kwargs.get("refs", []))
        if isinstance(described, dict):
            references = list(described.get("refs", references))
            described = [described["path"]]
    take = described[:1] if layout == "wmt-xml" else described[:2]
    remotes = [
        Remote(url=url, md5=md5) for url, md5 in zip(known.data, known.md5 or [None] * len(known.data), strict=True)
    ]
    if not all(is_archive(PurePosixPath(one.url)) for one in remotes):
        raise ConfigError(
            f"sacrebleu/{name}: is a mix of archives and files; see `ziggurat fetch --list {name.split('/')[0]}`"
        )
    # If there are many archives (IWSLT has one per direction), only those whose names begin the members' names are
    # needed.
    needed = [one for one in remotes if PurePosixPath(one.url).stem in {path.split("/")[0] for path in take}]
    return RegisteredCorpus(
        name=f"sacrebleu/{name}/{pair}",
        title=known.description,
        languages=tuple(pair.split("-")),
        files=needed or remotes,
        layout=layout,
        take=list(take),
        references=references,
        licence=_SACREBLEU_LICENCE,
        terms="https://github.com/mjpost/sacrebleu",
        known_from="sacreBLEU's list of data sets (address, layout, checksum)",
    )
