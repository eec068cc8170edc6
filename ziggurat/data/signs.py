"""Signs that the text of a corpus is not what it seems, counted with the location of the first.

They are a first row with column names; text that is already cut into subword pieces, or that starts with a language
tag; marks left by a file format or another program (ziggurat.data.damage); and accented letters spelt both composed
(NFC) and decomposed (NFD), or letters of two widths.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ziggurat.config.data import DataConfig, FilterConfig
from ziggurat.config.languages import main_language
from ziggurat.data.damage import KINDS, TAG, marks_of
from ziggurat.data.vocabulary import PIECE_MARKS, leading_tag, names_language, segmentation_mark
from ziggurat.system.errors import Problem, printable

SIDES = ("source", "target")
_SHARE = 0.001  # below this share of a corpus's lines, a hit counts as accidental
_MOST_TAGS = 1000  # maximum number of tags that are remembered
_MOST_WORDS = 4  # maximum number of words of a column name
_COLUMN_NAMES = (
    "sources targets inputs outputs raw txt tok column col post edited postedit "
    "source src sl tl target tgt trg text texts sentence sentences sent segment seg line string input output "
    "original translation translated translations reference ref hypothesis hyp mt human lang language s t l pe "
    "orig trans simplified traditional phrase document doc l1 l2 1 2 0 a b english german french spanish "
    "italian portuguese dutch russian ukrainian polish czech slovak slovene hungarian romanian bulgarian "
    "croatian serbian greek turkish arabic hebrew persian hindi bengali urdu tamil chinese mandarin japanese "
    "korean thai vietnamese indonesian malay khmer lao burmese swedish danish norwegian finnish estonian "
    "latvian lithuanian icelandic irish welsh catalan basque galician swahili latin esperanto tagalog filipino "
    "transcript transcription prompt completion string quelle ziel quelltext zieltext origen destino cible "
    "原文 译文 翻译 訳文 原语 译语 원문 번역 оригинал перевод "
    "englisch deutsch anglais français francais español espanol inglés ingles italiano português 英语 中文 日本語"
)
_COLUMN_WORDS = frozenset(_COLUMN_NAMES.split())
_NAME_ENDS = re.compile(r"[\W_]+")
_NAME_JOINT = re.compile(r"(?<=[a-z])(?=[A-Z])")


_WIDTHS = {
    "full-width letters or digits": (
        re.compile("[\uff10-\uff19\uff21-\uff3a\uff41-\uff5a]"),
        re.compile("[0-9A-Za-z]"),
    ),
    "half-width katakana": (re.compile("[\uff66-\uff9d]"), re.compile("[\u30a1-\u30fa]")),
}
"""_WIDTHS are forms that NFKC replaces, and the ordinary forms that replace them."""
_MOST_USUAL = 100_000  # maximum number of lines with ordinary forms that are counted


@dataclass
class Sign:
    """Lines that have a sign."""

    lines: int = 0
    first: str = ""
    """Location of the first line, and what was found in it."""

    def see(self, where: str, number: int, found: str = "") -> None:
        """Count line `number` of a file, and what was `found` in it."""
        self.lines += 1
        if not self.first:
            self.first = f"{where}, line {number}{f': `{printable(found)}`' if found else ''}"


@dataclass
class SideSigns:
    """Signs in one side of a corpus."""

    lines: int = 0
    segmented: Sign = field(default_factory=Sign)
    tags: set[str] = field(default_factory=set)
    tagged: Sign = field(default_factory=Sign)
    damaged: list[Sign] = field(default_factory=lambda: [Sign() for _ in KINDS])
    decomposed: Sign = field(default_factory=Sign)
    composed: bool = False
    """True if any line has letters that NFD would take apart."""
    compatible: dict[str, Sign] = field(default_factory=lambda: {name: Sign() for name in _WIDTHS})
    usual: Counter[str] = field(default_factory=Counter)
    """Lines with the ordinary forms of what `compatible` counts."""

    def see(self, texts: Sequence[str], before: int, where: str) -> None:
        """Look at the lines of a block; `before` is the number of lines before it in its file, called `where`."""
        self.lines += len(texts)
        joined = "\n".join(texts)
        pieces = any(mark in joined for mark in PIECE_MARKS)
        nfc = joined.isascii() or unicodedata.is_normalized("NFC", joined)
        if not self.composed and not joined.isascii():
            composed = joined if nfc else "\n".join(t for t in texts if unicodedata.is_normalized("NFC", t))
            self.composed = not unicodedata.is_normalized("NFD", composed)
        widths = () if joined.isascii() else [name for name, (odd, _) in _WIDTHS.items() if odd.search(joined)]
        for name, (_, ordinary) in _WIDTHS.items():
            if self.usual[name] < _MOST_USUAL and ordinary.search(joined):
                self.usual[name] += sum(bool(ordinary.search(text)) for text in texts)
        for kind, place, found in marks_of(texts):
            self.damaged[kind].see(where, before + place + 1, found)
        for number, text in enumerate(texts, before + 1):
            for name in widths:
                if _WIDTHS[name][0].search(text):
                    self.compatible[name].see(where, number)
            if (tag := leading_tag(text)) is not None:
                self.tagged.see(where, number, tag)
                if len(self.tags) < _MOST_TAGS:
                    self.tags.add(tag)
            if pieces and (mark := segmentation_mark(text)) is not None:
                self.segmented.see(where, number, mark)
            if not nfc and not unicodedata.is_normalized("NFC", text):
                self.decomposed.see(where, number)


@dataclass
class CorpusSigns:
    """Signs in a corpus."""

    sides: tuple[SideSigns, SideSigns] = field(default_factory=lambda: (SideSigns(), SideSigns()))
    headers: list[str] = field(default_factory=list)
    """First rows with column names: file and row of each."""

    def see(
        self, pairs: tuple[Sequence[str], Sequence[str]], before: int, files: Sequence[object], languages: Sequence[str]
    ) -> None:
        """Look at a block of pairs of a part of the corpus, of which `before` pairs came earlier."""
        if not before and pairs[0] and is_header(pairs[0][0], pairs[1][0], languages):
            row = " and ".join(f"`{printable(side[0].strip(), 40)}`" for side in pairs)
            self.headers.append(f"{files[0]}: {row}")
        for side, texts, file in zip(self.sides, pairs, (files[0], files[-1]), strict=True):
            side.see(texts, before, str(file))


def is_header(source: str, target: str, languages: Sequence[str]) -> bool:
    """Return True if two texts are names of columns: `source` and `target`, `text_en` and `text_de`, `en` and `de`.

    Two-letter codes must be those of the corpus's `languages`: `no` and `ne` may be words.
    """
    codes = {main_language(language).lower() for language in languages}
    names = [_NAME_JOINT.sub("_", name.strip()).casefold() for name in (source, target)]
    return names[0] != names[1] and all(_is_column(name, codes) for name in names)


def _is_column(name: str, codes: set[str]) -> bool:
    words = [word.rstrip("0123456789") or word for word in _NAME_ENDS.split(name) if word]
    if not words or len(words) > _MOST_WORDS or len(name) > 40:
        return False
    words = [part for word in words for part in _parts(word)]
    known = [word in _COLUMN_WORDS or word in codes or (len(word) == 3 and names_language(word)) for word in words]
    regions = [place > 0 and known[place - 1] and len(word) in (2, 4) for place, word in enumerate(words)]
    return known[0] and all(map(bool.__or__, known, regions)) and not words[0].isdigit()


def _parts(word: str) -> list[str]:
    """Return the two names that make up a word, such as `sourcetext` or `srclang`, or the word itself."""
    joints = [place for place in range(3, len(word) - 2) if {word[:place], word[place:]} <= _COLUMN_WORDS]
    return [word[: joints[0]], word[joints[0] :]] if joints else [word]


def sign_notices(
    corpora: Mapping[str, CorpusSigns], config: DataConfig, *, segmented: bool, symbols: Collection[str] = ()
) -> list[Problem]:
    """Return a warning for each sign in each corpus, by the corpus's key in the configuration.

    `segmented`: whether text is meant to be cut into pieces. `symbols`: text that is always one piece: tags that are
    among them are meant to be text.
    """
    notices = list[Problem]()
    filters = {key: config.filters_of(corpus) for _, key, corpus in config.corpora()}
    for key, signs in corpora.items():
        if signs.headers:
            rows = "; ".join(signs.headers[:3]) + (f"; and {len(signs.headers) - 3} more" * (len(signs.headers) > 3))
            said = f"{key}: the first row looks like column names ({rows}), but is read as a pair:"
            notices.append(Problem(key, said, "remove it, with `tail -n +2`, say", "warning"))
        for name, side in zip(SIDES, signs.sides, strict=True):
            many = f"{key}: {{}} of {side.lines:,} {name} lines"
            of_text = _side_notices(many, side, segmented, symbols)
            found = [*of_text, *_damage_notices(many, side, filters[key], symbols)]
            named = ("data.subword.kind", "data.filters.repair", "data.filters.markup")
            notices += [Problem(key, text, severity="warning", named=named) for text in found]
    notices += _form_notices(corpora) if config.unicode == "none" else []
    return notices + (list(_width_notices(corpora)) if config.unicode != "nfkc" else [])


def _side_notices(many: str, side: SideSigns, segmented: bool, symbols: Collection[str]) -> Iterator[str]:
    least = _SHARE * side.lines
    if not segmented and side.segmented.lines > least:
        yield (
            f"{many.format(f'{side.segmented.lines:,}')} are cut into subword pieces already, the first in "
            f"{side.segmented.first}: they would be cut again. Give the plain text, or a vocabulary for such text "
            "(`data.subword.kind: vocabulary`)"
        )
    if side.tagged.lines > least and not side.tags <= set(symbols):
        yield (
            f"{many.format(f'{side.tagged.lines:,}')} begin with a language tag as text, the first in "
            f"{side.tagged.first}: it is cut into pieces as any word is. Take it out of the text and give it as `tag` "
            "of a corpus, so that `--tag` can set it"
        )


def _damage_notices(many: str, side: SideSigns, filters: FilterConfig, symbols: Collection[str]) -> Iterator[str]:
    wanted = any(map(TAG.fullmatch, symbols))  # a model that is meant to learn tags
    for mark, seen in zip(KINDS, side.damaged, strict=True):
        handled = mark.filter and (getattr(filters, mark.filter) or (mark.filter == "markup" and wanted))
        if seen.lines > mark.share * side.lines and not handled:
            yield f"{many.format(f'{seen.lines:,}')} {mark.said}, the first in {seen.first}: {mark.way_out}"


def _form_notices(corpora: Mapping[str, CorpusSigns]) -> list[Problem]:
    """Return a warning if the same letters are spelt both composed and decomposed; either alone is fine."""
    sides = [(key, name, side) for key, s in corpora.items() for name, side in zip(SIDES, s.sides, strict=True)]
    if not any(side.composed for _, _, side in sides):
        return []
    return [
        Problem(
            key,
            f"{key}: {side.decomposed.lines:,} of {side.lines:,} {name} lines have decomposed letters (not in NFC), "
            f"the first in {side.decomposed.first}, and others have them composed: the vocabulary spells each in two "
            "ways. Set `data.unicode: nfc`",
            severity="warning",
            named=("data.unicode",),
        )
        for key, name, side in sides
        if side.decomposed.lines
    ]


def _width_notices(corpora: Mapping[str, CorpusSigns]) -> Iterator[Problem]:
    """Yield a warning if a side has letters of unusual width as well as ordinary ones; either alone is fine."""
    for key, signs in corpora.items():
        for name, side in zip(SIDES, signs.sides, strict=True):
            for what, seen in side.compatible.items():
                if min(seen.lines, side.usual[what]) > _SHARE * side.lines:
                    yield Problem(
                        key,
                        f"{key}: {seen.lines:,} of {side.lines:,} {name} lines have {what}, the first in {seen.first}, "
                        "and others have the ordinary ones: the vocabulary spells each in two ways. Set `data.unicode: "
                        "nfkc`",
                        severity="warning",
                        named=("data.unicode",),
                    )
