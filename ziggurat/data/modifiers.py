"""The modifiers of a sentence pair: what each changes, as edits that keep its word alignment right.

Each takes the pair, its section of the configuration, a generator and the number of the first word to change, counted
among the words that it may change; modifiers of whole sentences ignore this number. Links are derived from the edits in
one place. Typing errors are those of OpusTrainer's package `typo`.
"""

from __future__ import annotations

import math
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from random import Random
from typing import Any, NamedTuple

import regex

from ziggurat.config.modifiers import (
    TYPO_KINDS,
    InlineConfig,
    NoiseConfig,
    PrefixConfig,
    TermsConfig,
    TyposConfig,
    template_parts,
)
from ziggurat.data.aligner import word_spans

SOURCE, TARGET = 0, 1
Span = tuple[int, int]
"""First character and end of a part of a text."""


class Edit(NamedTuple):
    """Replacement of a part of a text; if the part is empty, an insertion."""

    first: int
    end: int
    text: str


class EditablePair:
    """A sentence pair with its word alignment.

    `links` are pairs of linked words: a span of the source and one of the target, each with at least one character.
    """

    def __init__(self, source: str, target: str, links: Sequence[tuple[Span, Span]] = ()) -> None:
        self.texts = [source, target]
        # Normalisation may remove a whole word, such as a no-break space between spaces.
        self.links = [link for link in links if all(first < end for first, end in link)]

    def copy(self) -> EditablePair:
        """Return a pair that can be changed without changing this one."""
        return EditablePair(self.texts[SOURCE], self.texts[TARGET], self.links)

    def edit(self, side: int, edits: Sequence[Edit]) -> list[Span]:
        """Apply `edits`, in ascending order and without overlap, to one side; return where their texts are now.

        A linked word keeps its remaining characters and gets the text that replaces parts of it or is inserted into it,
        but not text inserted before or after it. Text that replaces parts of several words belongs to the first. A word
        of which nothing is left loses its links.
        """
        text, parts, spans, at, size = self.texts[side], [], [], 0, 0
        for first, end, new in edits:
            if not at <= first <= end:
                raise ValueError(f"edits overlap or are not in ascending order: {list(edits)}")
            parts += [text[at:first], new]
            size += first - at
            spans.append((size, size + len(new)))
            size, at = size + len(new), end
        self.texts[side] = "".join([*parts, text[at:]])
        words = _moved_words({link[side] for link in self.links}, edits)
        if side == SOURCE:
            links = [(words[source], target) for source, target in self.links]
        else:
            links = [(source, words[target]) for source, target in self.links]
        self.links = [link for link in links if link[side][0] < link[side][1]]
        return spans

    def one_to_one(self) -> list[tuple[Span, Span]]:
        """Return the links between words that have no other link, in source order."""
        sources: dict[Span, int] = {}
        targets: dict[Span, int] = {}
        for source, target in self.links:
            sources[source] = sources.get(source, 0) + 1
            targets[target] = targets.get(target, 0) + 1
        return sorted(link for link in self.links if sources[link[0]] == targets[link[1]] == 1)


def _moved_words(words: set[Span], edits: Sequence[Edit]) -> dict[Span, Span]:
    """Return the position of each word after `edits`: words that shared no character still share none."""
    found: dict[Span, Span] = {}
    last = taken = 0  # ends of the words so far, before and after
    for word in sorted(words):
        first, end = moved(word, edits)
        if word[0] >= last:  # one edit may replace the end of a word and the start of the next
            first = max(first, taken)
        found[word] = first, end
        last, taken = max(last, word[1]), max(taken, end)
    return found


def moved(span: Span, edits: Sequence[Edit]) -> Span:
    """Return the position of a part of a text after `edits`."""
    (first, end), (begin, shift) = span, (0, 0)
    found: int | None = None
    for edit in edits:
        grown = len(edit.text) - (edit.end - edit.first)
        if edit.end <= first:
            begin += grown
        elif edit.first >= end:
            break
        elif edit.first < first:
            found = edit.first + begin  # the start of the word is replaced together with the text before it
        if edit.end > end:  # the same for its end
            return (first + begin if found is None else found), edit.first + shift + len(edit.text)
        shift += grown
    return (first + begin if found is None else found), end + shift


def one_to_one_count(links: list[list[int]]) -> int:
    """Return the number of a store's links between words that have no other link, as Pair.one_to_one has them."""
    sources = Counter((link[0], link[1]) for link in links)
    targets = Counter((link[2], link[3]) for link in links)
    return sum(sources[link[0], link[1]] == targets[link[2], link[3]] == 1 for link in links)


# Rows of keyboards from left to right, the upper rows first; each row is half a key to the right of the one above.
_KEYBOARDS = (
    ("1234567890", "qwertyuiop", "asdfghjkl", "zxcvbnm"),
    ("1234567890", "йцукенгшщзхъ", "фывапролджэ", "ячсмитьбю"),
    ("1234567890", "ςερτυθιοπ", "ασδφγηξκλ", "ζχψωβνμ"),
    ("1234567890", "קראטוןםפ", "שדגכעיחלךף", "זסבהנמצתץ"),
    ("1234567890", "ضصثقفغعهخحجد", "شسيبلاتنمكط", "ئءؤرىةوزظ"),
)
_ALIKE = ("0Oo", "1lI", "2Z", "5S", "6b", "8B", "9gq", "uv", "ceo", "nm", "hb", "ij")
"""Groups of characters that look similar."""
_CYRILLIC_ALIKE = ("a\u0430", "e\u0435", "o\u043e", "p\u0440", "c\u0441", "x\u0445")  # Latin and Cyrillic ones

_LETTER = regex.compile(r"[\p{L}\p{N}]")
_NEIGHBOURS = regex.compile(r"[\p{L}\p{N}]{2}", flags=regex.V1)
_INSIDE = regex.compile(r"(?<=[\p{L}\p{N}])(?=[\p{L}\p{N}])")
_SPACE = regex.compile(" ")
_DOUBLE = regex.compile(r"([\p{L}\p{N}])\1")
# Each character of these scripts is a word: swapping two of them is not a typing error.
_UNSPACED = regex.compile(r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}]")


@cache
def _near() -> dict[str, str]:
    found: dict[str, str] = {}
    for keyboard in _KEYBOARDS:
        for number, row in enumerate(keyboard):
            for place, key in enumerate(row):
                keys = [row[place - 1] if place else "", row[place + 1 : place + 2]]
                above = keyboard[number - 1] if number else ""
                below = keyboard[number + 1] if number + 1 < len(keyboard) else ""
                keys += [above[place : place + 2], below[max(0, place - 1) : place + 1]]
                found.setdefault(key, "".join(keys))
    return found


@cache
def _alike() -> dict[str, str]:
    """Return the other characters of each one's groups."""
    found: dict[str, str] = {}
    for group in (*_ALIKE, *_CYRILLIC_ALIKE):
        for character in group:
            found[character] = found.get(character, "") + group.replace(character, "")
    return found


def _neighbour(character: str, rng: Random) -> str:
    """Return a key next to that of a character, in its case; "" if the keyboard is unknown."""
    base = unicodedata.normalize("NFD", character.lower())[0]
    keys = _near().get(base, "")
    key = rng.choice(keys) if keys else ""
    return key.upper() if character.isupper() and len(key.upper()) == 1 else key


def _look_alike(character: str, rng: Random) -> str:
    base = unicodedata.normalize("NFD", character)[0]
    others = _alike().get(character, "") + (base if base != character else "")
    return rng.choice(others) if others else ""


def _swapped(found: str, rng: Random) -> str:
    return "" if found[0] == found[1] or _UNSPACED.search(found) else found[::-1]


def _extra(found: str, rng: Random) -> str:
    return found + key if (key := _neighbour(found, rng)) else ""


def _typo(
    pattern: regex.Pattern[str], replacement: Callable[[str, Random], str] | None
) -> Callable[[str, Random], Edit | None]:
    """Return a typing error: an edit of a random match of a pattern.

    `replacement` gives its new text, "" for no error; None: the match is deleted, unless it is the whole text.
    """

    def edit(text: str, rng: Random) -> Edit | None:
        places = [match.span() for match in pattern.finditer(text, overlapped=True)]
        if not places:
            return None
        first, end = rng.choice(places)
        if replacement is None:
            return None if end - first == len(text) else Edit(first, end, "")
        return Edit(first, end, new) if (new := replacement(text[first:end], rng)) else None

    return edit


TYPOS: dict[str, Callable[[str, Random], Edit | None]] = {
    "char_swap": _typo(_NEIGHBOURS, _swapped),
    "missing_char": _typo(_LETTER, None),
    "extra_char": _typo(_LETTER, _extra),
    "nearby_char": _typo(_LETTER, _neighbour),
    "similar_char": _typo(_LETTER, _look_alike),
    "skipped_space": _typo(_SPACE, None),
    "random_space": _typo(_INSIDE, lambda found, rng: " "),
    "repeated_char": _typo(_LETTER, lambda found, rng: found * 2),
    "unichar": _typo(_DOUBLE, lambda found, rng: found[0]),
}
"""Kind -> function that returns an edit at a random position of a text; None if there is no such position."""


# Characters of the scripts used for noise, as in OpusTrainer, except those that are not letters, digits or signs and
# those that normalisation would change.
_SCRIPTS = (
    *((0x21, 0x7F), (0xA1, 0x100), (0x370, 0x400), (0x400, 0x500), (0x531, 0x590), (0x5D0, 0x5F0), (0x620, 0x700)),
    *((0x904, 0x980), (0xA85, 0xB00), (0xE01, 0xE80), (0x1000, 0x10A0), (0x10A0, 0x1100), (0x1780, 0x1800)),
    *((0x3041, 0x30A0), (0x30A1, 0x3100), (0x4E00, 0x9FFF), (0xAC00, 0xD7A4), (0x1F600, 0x1F650)),
)
PLACEHOLDERS = (
    *("{0}", "{1}", "{2}", "{name}", "{count}", "{{user}}", "%s", "%d", "%1$s", "%(name)s", "$1", "${path}", "#{id}"),
    *("__1__", "<x/>", "&nbsp;", "https://example.org/a?b=1", "name@example.org", "@user", "#tag", "v1.2.3", "\\n"),
    *("🙂", "👍", "❤️", "🎉", "→", "©"),
)
TAGS = (
    *(("<b>", "</b>"), ("<i>", "</i>"), ("<em>", "</em>"), ("<strong>", "</strong>"), ("<u>", "</u>")),
    *(('<a href="https://example.org">', "</a>"), ("<span>", "</span>"), ('<g id="1">', "</g>"), ("[b]", "[/b]")),
)
_TURKIC, _TURKIC_I = ("tr", "tur", "az", "aze", "crh", "tt", "tat"), {"i": "İ", "ı": "I"}
_NOISE_BYTES = 12
"""Maximum size in bytes of noise inside a sentence, where each byte may take a piece: noise of arbitrary length, as in
OpusTrainer, would make batches uneven."""
_END_MARKS = (".。．।۔。", "?？؟;", "!！¡")
"""Marks at the end of a sentence: those of a group mean the same. The `;` is the Greek question mark's normal form."""


@cache
def _alphabets() -> list[str]:
    def usable(character: str) -> bool:
        return unicodedata.category(character)[0] in "LNPS" and unicodedata.is_normalized("NFKC", character)

    return ["".join(c for c in map(chr, range(*script)) if usable(c)) for script in _SCRIPTS]


def _random_words(rng: Random, lengths: tuple[int, int], most: int) -> list[str]:
    """Return one to `most` words of random characters of one script, all of one length."""
    alphabet, length = rng.choice(_alphabets()), rng.randint(*lengths)
    return ["".join(rng.choices(alphabet, k=length)) for _ in range(rng.randint(1, most))]


def inserted_noise(rng: Random) -> str:
    """Return noise for the inside of a sentence."""
    alphabet, words = rng.choice(_alphabets()), rng.randint(1, 3)
    length = max(1, _NOISE_BYTES // len(alphabet[0].encode()) // words)
    return " ".join("".join(rng.choices(alphabet, k=length)) for _ in range(words))


def merged(pairs: list[EditablePair]) -> EditablePair:
    """Return several pairs as one, with spaces between them."""
    whole = EditablePair("", "")
    for pair in pairs:
        at, and_ = [len(text) + 1 if text else 0 for text in whole.texts], pair.texts
        whole.links += [(_shifted(source, at[0]), _shifted(target, at[1])) for source, target in pair.links]
        whole.texts = [f"{before} {text}" if before else text for before, text in zip(whole.texts, and_, strict=True)]
    return whole


def _shifted(span: Span, by: int) -> Span:
    return span[0] + by, span[1] + by


def _noise(pair: EditablePair, config: NoiseConfig, rng: Random, first: int, languages: tuple[str, str]) -> None:
    words = _random_words(rng, (config.min_word_length, config.max_word_length), config.max_words)
    text = " ".join(words)
    spans = word_spans(text, "blanks")
    pair.texts, pair.links = [text, text], list(zip(spans, spans, strict=True))


def _no_end_punctuation(pair: EditablePair, config: Any, rng: Random, first: int, languages: tuple[str, str]) -> None:
    source, target = pair.texts
    same = any(source.endswith(tuple(marks)) and target.endswith(tuple(marks)) for marks in _END_MARKS)
    if not same or any(text[-2:-1] in ("", " ", text[-1:]) for text in pair.texts):  # not `...` or `!!`
        return
    for side, text in enumerate(pair.texts):
        pair.edit(side, [Edit(len(text) - 1, len(text), "")])


def _upper_case(pair: EditablePair, config: Any, rng: Random, first: int, languages: tuple[str, str]) -> None:
    for side, language in enumerate(languages):
        _recased(pair, side, range(len(pair.texts[side])), language, str.upper)


def _title_case(pair: EditablePair, config: Any, rng: Random, first: int, languages: tuple[str, str]) -> None:
    for side, language in enumerate(languages):
        text = pair.texts[side]
        firsts = (next((n for n in range(*word) if text[n].isalnum()), None) for word in word_spans(text, "blanks"))
        # A word that starts with a digit has no first letter to capitalise: `1980s`, `3rd`.
        initials = (n for n in firsts if n is not None and text[n].isalpha())
        _recased(pair, side, initials, language, str.title)


def _recased(pair: EditablePair, side: int, places: Iterable[int], language: str, recase: Callable[[str], str]) -> None:
    """Change the case of some characters of one side, in ascending order; ß, for one, becomes two."""
    text, own = pair.texts[side], _TURKIC_I if language.split("-")[0].lower() in _TURKIC else {}
    pair.edit(side, [Edit(n, n + 1, new) for n in places if (new := own.get(text[n]) or recase(text[n])) != text[n]])


def _typos(pair: EditablePair, config: TyposConfig, rng: Random, first: int, languages: tuple[str, str]) -> None:
    for kind in TYPO_KINDS:
        if rng.random() < getattr(config, kind) and (edit := TYPOS[kind](pair.texts[SOURCE], rng)) is not None:
            pair.edit(SOURCE, [edit])


def next_hit(uniform: float, probability: float) -> int:
    """Return the number of words skipped before the next chosen one, each being chosen with `probability`."""
    return 0 if probability >= 1 else min(sys.maxsize, int(math.log1p(-uniform) / math.log1p(-probability)))


def _hits(rng: Random, first: int, count: int, probability: float) -> Iterator[int]:
    """Yield the indices of the chosen ones among `count` words, the first of which is known."""
    at = first
    while at < count:
        yield at
        at += 1 + next_hit(rng.random(), probability)


def _differing(pair: EditablePair) -> list[tuple[Span, Span]]:
    """Return the links of words with exactly one, different partner."""
    source, target = pair.texts
    return [link for link in pair.one_to_one() if source[slice(*link[SOURCE])] != target[slice(*link[TARGET])]]


BY_WORD: dict[str, Callable[[EditablePair], list[tuple[Span, Span]]]] = {
    "inline": EditablePair.one_to_one,
    "terms": _differing,
}
"""Modifiers whose probability is that of a word -> the words of a pair that each may change."""


def _inline(pair: EditablePair, config: InlineConfig, rng: Random, first: int, languages: tuple[str, str]) -> None:
    words = BY_WORD["inline"](pair)
    # Position, whether it precedes a word, number of the item (the same on both sides), and the edit: in this order,
    # since text after a word comes before text in front of the next word at the same position.
    found: tuple[list[tuple[int, bool, int, Edit]], ...] = ([], [])
    for hit in _hits(rng, first, len(words), config.probability):
        kind = rng.choices(("tags", "placeholders", "noise"), (config.tags, config.placeholders, config.noise))[0]
        opening, closing = rng.choice(TAGS)
        added = rng.choice(PLACEHOLDERS)
        if kind == "noise":
            added = inserted_noise(rng)
        for side, (begin, end) in enumerate(words[hit]):
            if kind == "tags":
                found[side].append((begin, True, 2 * hit, Edit(begin, begin, opening)))
                found[side].append((end, False, 2 * hit + 1, Edit(end, end, closing)))
            else:
                blank = " " if pair.texts[side][end : end + 1].isalnum() else ""
                found[side].append((end, False, 2 * hit, Edit(end, end, f" {added}{blank}")))
    copies: list[dict[int, Span]] = []
    for side, numbered in enumerate(found):
        numbered.sort()
        spans = pair.edit(side, [edit for *_, edit in numbered])
        copies.append({number: span for (_, _, number, _), span in zip(numbered, spans, strict=True)})
    for number, span in copies[SOURCE].items():
        sides = zip(pair.texts, (span, copies[TARGET][number]), strict=True)
        pair.links += zip(*(_words_in(text, part) for text, part in sides), strict=True)


def _words_in(text: str, span: Span) -> list[Span]:
    return [_shifted(word, span[0]) for word in word_spans(text[slice(*span)], "blanks")]


def _terms(pair: EditablePair, config: TermsConfig, rng: Random, first: int, languages: tuple[str, str]) -> None:
    words, (source, target) = BY_WORD["terms"](pair), pair.texts
    before, name, between, _, after = template_parts(config.template, ("src", "trg"))
    edits: list[Edit] = []
    hints: list[tuple[int, int, int, Span]] = []  # number of the edit, place in its text, size, the translation
    replaced: list[Edit] = []
    for hit in _hits(rng, first, len(words), config.probability):
        (begin, end), translation = words[hit]
        hint = target[slice(*translation)]
        if config.replace and rng.random() < config.replace:
            hint = inserted_noise(rng)
            replaced.append(Edit(*translation, hint))
        # In a script without spaces, spaces are put around the marks.
        front = (" " if before and source[max(0, begin - 1) : begin].isalnum() else "") + before
        back = after + (" " if after and source[end : end + 1].isalnum() else "")
        if name == "src":
            hints.append((len(edits) + 1, len(between), len(hint), translation))
            edits += [Edit(begin, begin, front), Edit(end, end, between + hint + back)]
        else:
            hints.append((len(edits), len(front), len(hint), translation))
            edits += [Edit(begin, begin, front + hint + between), Edit(end, end, back)]
    spans = pair.edit(SOURCE, edits)
    replaced.sort()
    pair.edit(TARGET, replaced)
    for number, place, size, translation in hints:
        at = spans[number][0] + place
        pair.links.append(((at, at + size), moved(translation, replaced)))


def _prefix(pair: EditablePair, config: PrefixConfig, rng: Random, first: int, languages: tuple[str, str]) -> None:
    target = pair.texts[TARGET]
    words, count = word_spans(target, "split"), rng.randint(config.min_words, config.max_words)
    if count > len(words):
        return
    at = rng.randrange(len(words) - count + 1)
    chosen = words[at : at + count]
    before, _, after = template_parts(config.template, ("trg",))
    begin = chosen[0][0]
    pair.edit(SOURCE, [Edit(0, 0, before + target[begin : chosen[-1][1]] + after)])
    pair.links += [(_shifted(word, len(before) - begin), word) for word in chosen]


MODIFIERS: dict[str, Callable[[EditablePair, Any, Random, int, tuple[str, str]], None]] = {
    "noise": _noise,
    "no_end_punctuation": _no_end_punctuation,
    "upper_case": _upper_case,
    "title_case": _title_case,
    "typos": _typos,
    "inline": _inline,
    "terms": _terms,
    "prefix": _prefix,
}
"""Name of a modifier -> its function, in the order in which they are applied; `merge` comes before them."""
