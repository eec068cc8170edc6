"""The registry: URLs, layouts and licences of corpora, and the data of recipes' folders.

A name is a pattern such as `europarl/v7/{a}-{b}`; `europarl/v7/de-en` fills it, and with it the URLs and the members of
archives. An entry also lists its language pairs and their codes. ziggurat/corpora/fetch/corpora.yaml is the built-in
registry; entries in the user's files override it.
"""

from __future__ import annotations

import difflib
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from ziggurat.config.languages import main_language
from ziggurat.config.section import Section
from ziggurat.system.errors import ConfigError, printable
from ziggurat.system.small_files import read_bounded
from ziggurat.system.yaml_text import MAX_YAML_BYTES, parse_yaml

Layout = Literal["text", "tsv", "sgm", "ted", "tmx", "wmt-xml"]
"""`text`: one file per side, line by line; `tsv`: columns; `sgm`: WMT's <seg> lines, one file per side; `ted`: text
between the tags of IWSLT's training files; `tmx`; `wmt-xml`: source and references in one file, from WMT 2021 on."""

_Digest = Annotated[str, Field(pattern="^[0-9a-f]+$")]


class Remote(Section):
    """One file to fetch."""

    url: str
    """Its URL; parts in braces are filled from the name."""
    bytes: int | None = Field(default=None, ge=0)
    """Its length."""
    sha256: _Digest | None = Field(default=None, min_length=64, max_length=64)
    md5: _Digest | None = Field(default=None, min_length=32, max_length=32)
    by_hand: str | None = None
    """Reason why it cannot be fetched, and how to get it."""


class _Described(Section):
    """Everything needed to fetch and read a corpus, and its terms."""

    title: str
    files: list[Remote] = Field(min_length=1, max_length=64)
    layout: Layout = "text"
    take: list[str] = Field(default_factory=list, max_length=2)
    """Members of the archives: a pattern for each side, or one for both. If empty: the files themselves."""
    columns: list[Annotated[int, Field(ge=0, le=1000)]] = Field(default_factory=list, max_length=2)
    """`tsv`: the columns of the two sides; default 0 and 1."""
    separator: str = Field(default="\t", min_length=1)
    """`tsv`: separator of the columns."""
    references: list[str] = Field(default_factory=list)
    """`wmt-xml`: translators in the order of preference; the first available reference is used."""
    licence: str
    """Licence or terms in words, as stated by the origin, or a remark that it states none."""
    terms: str | None = None
    """URL of the terms or of the corpus's page."""
    known_from: str | None = None
    """Source of the URLs, layouts and checksums in the built-in registry, none of which could be tried."""
    note: str | None = None


class RegistryEntry(_Described):
    """Corpora of one kind, which differ only in the parts of the name."""

    pairs: str | dict[str, str] | None = None
    """Available language pairs, such as `de-en fr-en`, or those for each value of the part in `where`; null without
    `languages`: any that the origin has."""
    languages: str | dict[str, str] | None = None
    """Available languages, if any two of them are a pair; or those for each value of the part in `where`."""
    where: dict[str, str] = Field(default_factory=dict)
    """Values that other parts of the name may have, in words; other parts may have any value."""
    sorted: bool = False
    """True if the two languages are in alphabetical order whatever the direction."""


class RegisteredCorpus(_Described):
    """A corpus whose name is filled in."""

    name: str
    languages: tuple[str, ...]
    """One or two codes, in the order of sides, members and columns."""


class HoldOut(Section):
    """Pairs taken out of a set to make another set."""

    set: str
    """Name of the other set."""
    every: int = Field(ge=2)
    """Every n-th pair."""


class FolderSet(Section):
    """One set of pairs in a recipe's folder: it is made from corpora, or the user has to provide it."""

    of: list[str] = Field(default_factory=list)
    """Names of corpora, in order."""
    by_hand: str | None = None
    """Reason why it cannot be fetched, and its origin."""
    hold_out: HoldOut | None = None
    extra: bool = False
    """True for a set that recipes do not name, such as a test set; it comes with the others."""


class Folder(Section):
    """The folder of a recipe's data, such as `data/wmt14-en-de`."""

    sets: dict[str, FolderSet]
    note: str | None = None


_INDIVIDUAL = {
    "als": "sq", "arb": "ar", "azj": "az", "ekk": "et", "fuv": "ff", "gaz": "om", "khk": "mn", "kmr": "ku", "lvs": "lv",
    "npi": "ne", "ory": "or", "pbt": "ps", "pes": "fa", "plt": "mg", "quy": "qu", "swh": "sw", "uzn": "uz", "ydd": "yi",
    "zsm": "ms",
}  # fmt: skip
"""FLORES code of one language of a group -> the group's better known code (ISO 639-3)."""


def any_pair(entry: RegistryEntry) -> bool:
    """Return whether the pairs of an entry are unknown, so that it may have any."""
    return entry.pairs is None and entry.languages is None


def variants(entry: RegistryEntry) -> list[dict[str, str]]:
    """Return the part of the name that determines the languages, with each of its values; [{}] if there is none."""
    known = entry.pairs if entry.languages is None else entry.languages
    return [{part: value} for part in entry.where for value in known] if isinstance(known, dict) else [{}]


def _has_pair(entry: RegistryEntry, values: Mapping[str, str], first: str, second: str) -> bool:
    """Return whether an entry with these parts of its name has a pair of languages, in this order."""
    pairs, languages = _known(entry, entry.pairs, values), _known(entry, entry.languages, values)
    if pairs is not None:
        return f"{first}-{second}" in pairs
    return languages is None or (first != second and {first, second} <= set(languages))


def fitting_pairs(entry: RegistryEntry, values: Mapping[str, str], pair: str) -> list[str]:
    """Return the pairs of an entry that match `pair`, in the order used in its names; empty if there is none.

    They are this pair in either direction; if the entry lacks it, pairs that mean the same languages, such as
    `zho_Hans-eng_Latn` for `zh-en`.
    """
    first, second = pair.split("-")
    if _known(entry, entry.pairs, values) is None:  # one name for both directions
        if _has_pair(entry, values, first, second):
            return [_ordered(entry, first, second)]
        codes = _known(entry, entry.languages, values) or []
        of_both = [[code for code in codes if _language(code) == _language(wanted)] for wanted in (first, second)]
        return [_ordered(entry, a, b) for a in of_both[0] for b in of_both[1] if a != b]
    has = _known(entry, entry.pairs, values) or []
    exact = [given for given in (f"{first}-{second}", f"{second}-{first}") if given in has]
    wanted = {_language(first), _language(second)}
    return list(dict.fromkeys(exact)) or [one for one in has if set(map(_language, one.split("-"))) == wanted]


def described(entry: RegistryEntry, values: Mapping[str, str]) -> str:
    """Return the pairs or languages of an entry as text; without `values`, those of all its variants."""
    said = []
    for variant in [dict(values)] if values else variants(entry):
        named = "" if values else "".join(f"{value}: " for value in variant.values())
        if (pairs := _known(entry, entry.pairs, variant)) is not None:
            said.append(f"{named}{' '.join(pairs)}")
        elif (languages := _known(entry, entry.languages, variant)) is not None:
            more = f" and {len(languages) - 12} more" if len(languages) > 16 else ""
            said.append(f"{named}any two of {' '.join(languages[:12] if more else languages)}{more}")
    return "; ".join(said) or "any pair that its origin has"


def _known(entry: RegistryEntry, given: str | dict[str, str] | None, values: Mapping[str, str]) -> list[str] | None:
    """Return the words of `pairs` or `languages` for these parts of the name; None if they are unknown."""
    if isinstance(given, dict):
        given = next((given[value] for part in entry.where if (value := values.get(part)) in given), None)
    return None if given is None else given.split()


def _ordered(entry: RegistryEntry, first: str, second: str) -> str:
    return "-".join(sorted((first, second)) if entry.sorted else (first, second))


def _language(code: str) -> str:
    start = code.partition("_")[0].lower()
    return _INDIVIDUAL.get(start) or main_language(start)


_BUILT_IN = Path(__file__).with_name("corpora.yaml")
_LANGUAGE = r"[A-Za-z]{2,8}(?:_[A-Za-z0-9]{2,8})*"
_WORD = r"[A-Za-z0-9][A-Za-z0-9_.+-]*"


class _File(Section):
    corpora: dict[str, RegistryEntry] = Field(default_factory=dict)
    folders: dict[str, Folder] = Field(default_factory=dict)


@dataclass(frozen=True)
class Registry:
    """Entries and folders by name; those in the user's files replace built-in ones."""

    entries: Mapping[str, RegistryEntry]
    folders: Mapping[str, Folder]

    def find(self, name: str) -> RegisteredCorpus:
        """Return the corpus `name`; its two languages may be in either order.

        Raises ConfigError with the nearest names, or with the languages that an entry has.
        """
        for given in dict.fromkeys((name, _swapped(name))):
            for pattern, entry in self.entries.items():
                if (values := _match(pattern, entry, given)) is not None:
                    return _filled(given, entry, values)
        raise ConfigError(self._unknown(name))

    def listed(self, words: Sequence[str] = ()) -> Iterator[tuple[str, RegistryEntry]]:
        """Yield name and entry of those that have all `words` in name, title or licence.

        A language pair among the words selects the entries that have it and fills their names; several pairs select
        those that have all of them, once for each pair. Entries with unknown language pairs match every pair.
        """
        pairs = self.pairs_among(words)
        others = [word.casefold() for word in words if word not in pairs]
        for pattern, entry in self.entries.items():
            for values in variants(entry) if pairs else [{}]:
                name, title = _fill(pattern, values), _fill(entry.title, values)
                text = f"{name} {title} {entry.licence}".casefold()
                if not all(word in text for word in others) or (pairs and "{a}-{b}" not in pattern):
                    continue
                filled = entry.model_copy(update={"title": title})
                if not pairs or any_pair(entry):
                    yield name, filled
                elif all(fitting := [fitting_pairs(entry, values, pair) for pair in pairs]):
                    for pair in dict.fromkeys(itertools.chain(*fitting)):
                        yield name.replace("{a}-{b}", pair), filled

    def pairs_among(self, words: Sequence[str]) -> list[str]:
        """Return the words that are language pairs: `de-en`, but not `news-crawl`, with which some names begin."""
        looks = [word for word in words if re.fullmatch(rf"{_LANGUAGE}-{_LANGUAGE}", word)]
        return [word for word in looks if not any(name.startswith(word) for name in self.entries)]

    def _unknown(self, name: str) -> str:
        """Return the message for a name that no entry has."""
        shown = printable(name, 200)
        for pattern, entry in self.entries.items():
            whole = entry.model_copy(update={"pairs": None, "languages": None, "where": {}})
            if (values := _match(pattern, whole, name)) is not None:
                has = [f"{part}: {of_part}" for part, of_part in entry.where.items()]
                exists = all(values[part] in allowed.split() for part, allowed in entry.where.items())
                if exists and "b" in values and not any_pair(entry):
                    has.insert(0, f"{'pairs ' if entry.languages is None else ''}{described(entry, values)}")
                    if near := fitting_pairs(entry, values, f"{values['a']}-{values['b']}"):
                        has.append(f"these languages are {' or '.join(near)} there")
                return f"no corpus `{shown}`: {pattern} has {'; '.join(has)}"
        near = difflib.get_close_matches(name, self.entries, n=3, cutoff=0.4)
        known = ", ".join(f"`{pattern}`" for pattern in near) if near else "those of `ziggurat fetch --list`"
        return (
            f"no corpus, recipe or file `{shown}`; the nearest names are {known}. A registry of your own adds others "
            "(`--registry`, docs/data.md)"
        )


def load_registry(files: Sequence[str] = ()) -> Registry:
    """Return the built-in registry, overridden by the user's and then by `files`.

    Raises ConfigError with file, line and key.
    """
    users = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "ziggurat" / "corpora.yaml"
    entries: dict[str, RegistryEntry] = {}
    folders: dict[str, Folder] = {}
    # Later files first, since the first pattern that matches a name is used.
    own = [_read(path.expanduser()) for path in [*map(Path, reversed(files)), *([users] if users.is_file() else [])]]
    built_in = _built_in()
    for read in [*own, built_in]:
        entries |= {name: entry for name, entry in read.corpora.items() if name not in entries}
    for read in [built_in, *reversed(own)]:
        folders |= read.folders
    return Registry(entries, folders)


@cache
def _built_in() -> _File:
    return _read(_BUILT_IN)


def _read(path: Path) -> _File:
    """Return the content of a registry file. Raises ConfigError."""
    try:
        text = read_bounded(path, MAX_YAML_BYTES, error=ConfigError).decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: a registry is text in UTF-8") from None
    content, lines = parse_yaml(text, str(path))
    try:
        read = _File.model_validate(content or {})
    except ValidationError as problem:
        said = []
        for fault in problem.errors()[:3]:
            place = fault["loc"]
            line = next((lines[place[:n]] for n in range(len(place), 0, -1) if place[:n] in lines), None)
            said.append(f"{f'line {line}: ' if line else ''}{'.'.join(map(str, place))}: {fault['msg']}")
        raise ConfigError(f"{path}: {'; '.join(said)}") from None
    for name, entry in read.corpora.items():
        _check(path, name, entry)
    return read


def _check(path: Path, name: str, entry: RegistryEntry) -> None:
    """Raise ConfigError for an entry whose name, files and members do not fit together."""
    found = re.findall(r"\{(\w+)\}", name)
    parts = set(found)
    sides = 2 if "b" in parts else 1
    if len(parts) < len(found) or not all(map(str.isidentifier, found)):
        raise ConfigError(
            f"{path}: {name}: each part of a name is a word in braces, such as {{version}}, and occurs once"
        )
    for text in (*(file.url for file in entry.files), *entry.take, entry.title, entry.terms or ""):
        if unknown := set(re.findall(r"\{(\w+)\}", text)) - parts:
            raise ConfigError(
                f"{path}: {name}: {{{unknown.pop()}}} in {printable(text, 120)} is not a part of the name"
            )
    both_sides = entry.layout in ("tmx", "wmt-xml")
    both = both_sides or entry.layout == "tsv"
    count = len(entry.take) if entry.take else len(entry.files)
    if "a" not in parts or not re.fullmatch(r"[\w{}.+/-]+", name):
        raise ConfigError(f"{path}: {name}: a name has slashes and {{a}}, for two languages {{a}}-{{b}}, and no spaces")
    for key, known in (("pairs", entry.pairs), ("languages", entry.languages)):
        if isinstance(known, dict) and [set(known)] != [set(values.split()) for values in entry.where.values()]:
            raise ConfigError(f"{path}: {name}: `{key}` by values needs one part in `where`, with exactly its values")
    if entry.pairs is not None and entry.languages is not None:
        raise ConfigError(f"{path}: {name}: give `pairs`, or `languages` of which any two are a pair, not both")
    of_two = {"pairs": entry.pairs, "languages": entry.languages, "sorted": entry.sorted, "layout": both_sides}
    if sides == 1 and (wrong := next((key for key, given in of_two.items() if given), None)):
        raise ConfigError(
            f"{path}: {name}: `{wrong}` is for two languages, but the name has only one: write {{a}}-{{b}}"
        )
    if entry.columns and len(entry.columns) < sides:
        raise ConfigError(f"{path}: {name}: `columns` needs two entries, one for each language")
    if count != (1 if both else sides):
        raise ConfigError(
            f"{path}: {name}: {'one file with both sides' if both else f'{sides} files'} needed for the layout "
            f"{entry.layout} (in `files`, or in `take`), {count} given"
        )


def _swapped(name: str) -> str:
    head, slash, pair = name.rpartition("/")
    first, hyphen, second = pair.partition("-")
    return f"{head}{slash}{second}-{first}" if hyphen and "-" not in second else name


def _match(pattern: str, entry: RegistryEntry, name: str) -> dict[str, str] | None:
    """Match `name` against an entry's pattern and return its named parts; None if it does not match."""
    steps = []
    for step in re.split(r"(\{\w+\})", pattern):
        part = step[1:-1] if step.startswith("{") else ""
        values = entry.where.get(part, "").split()
        any_of = "|".join(map(re.escape, values)) or (_LANGUAGE if part in ("a", "b") else _WORD)
        steps.append(f"(?P<{part}>{any_of})" if part else re.escape(step))
    found = re.fullmatch("".join(steps), name)
    if found is None:
        return None
    values_of = found.groupdict()
    if "b" in values_of and not _has_pair(entry, values_of, values_of["a"], values_of["b"]):
        return None
    if entry.sorted and values_of["a"] > values_of["b"]:
        return None
    return values_of


def _filled(name: str, entry: RegistryEntry, values: Mapping[str, str]) -> RegisteredCorpus:
    filled = {
        "name": name,
        "title": _fill(entry.title, values),
        "languages": tuple(values[part] for part in ("a", "b") if part in values),
        "files": [file.model_copy(update={"url": _fill(file.url, values)}) for file in entry.files],
        "take": [_fill(member, values) for member in entry.take],
        "terms": None if entry.terms is None else _fill(entry.terms, values),
    }
    return RegisteredCorpus(**{key: getattr(entry, key) for key in _Described.model_fields} | filled)


def _fill(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), text)
