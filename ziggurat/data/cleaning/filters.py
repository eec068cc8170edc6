"""Filters of sentence pairs, as pure predicates over blocks of pairs, and repair of their text.

The filters check lengths and characters; agreement of both sides in numbers, punctuation and addresses; and languages
(py3langid) and scripts. `HashSet` finds duplicates. ziggurat.data.cleaning.cleaner applies them by a configuration.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import regex
import xxhash
from numpy.typing import NDArray

from ziggurat.config.data import FilterConfig
from ziggurat.config.languages import main_language
from ziggurat.data.damage import TAG
from ziggurat.data.lines import character_lengths, has_unspaced, is_blank, visible_lengths, word_counts
from ziggurat.system.errors import ConfigError

Mask = NDArray[np.bool_]
"""Mask over the pairs of a block."""
Predicate = Callable[[Sequence[str], Sequence[str]], Mask]
"""Function from source and target texts to a mask `[pairs]`, True for pairs to drop."""


def empty(source: Sequence[str], target: Sequence[str]) -> Mask:
    """Either side is blank as defined by ziggurat.data.lines.is_blank."""
    return _mask((is_blank(s) or is_blank(t) for s, t in zip(source, target, strict=True)), len(source))


def nul(source: Sequence[str], target: Sequence[str]) -> Mask:
    """Either side contains U+0000: it is binary data, or text in another encoding."""
    return _either(source, target, lambda text: "\0" in text)


def too_long(source: Sequence[str], target: Sequence[str], *, limit: int) -> Mask:
    """Either side has more than `limit` characters."""
    lengths = np.maximum(_lengths(map(len, source), len(source)), _lengths(map(len, target), len(source)))
    return lengths > limit


def too_many_words(source: Sequence[str], target: Sequence[str], *, limit: int) -> Mask:
    """Either side has more than `limit` words; in scripts without spaces, the equivalent number of characters."""
    return np.maximum(word_counts(source), word_counts(target)) > limit


_FEW_WORDS = 2


def length_ratio(source: Sequence[str], target: Sequence[str], *, limit: float) -> Mask:
    """The longer side is more than `limit` times as long as the shorter.

    Lengths are in words separated by white space, or in characters if a side has only one word; if it has two, both
    ratios must be too large. If either side has text in a script without spaces, lengths are in visible characters,
    weighted by how much meaning they carry (ziggurat.data.lines), so spaces inserted into such text have no effect.
    """
    sides = source, target
    lengths = [_lengths((len(text.split()) for text in side), len(side)) for side in sides]
    unspaced = has_unspaced(source) | has_unspaced(target)
    single = (np.minimum(*lengths) <= 1) & ~unspaced
    for places, measure in ((single.nonzero()[0], character_lengths), (unspaced.nonzero()[0], visible_lengths)):
        if places.size:
            for found, side in zip(lengths, sides, strict=True):
                found[places] = measure([side[place] for place in places.tolist()])
    unlike: Mask = np.maximum(*lengths) > limit * np.minimum(*lengths)
    few = unlike & ~single & ~unspaced & (np.minimum(*lengths) <= _FEW_WORDS)
    if few.any():  # two words of Turkish may be ten of English
        shown = [character_lengths([side[place] for place in few.nonzero()[0].tolist()]) for side in sides]
        unlike[few] = np.maximum(*shown) > limit * np.minimum(*shown)
    return unlike


def identical(source: Sequence[str], target: Sequence[str]) -> Mask:
    """Both sides are the same text."""
    return _mask((s == t for s, t in zip(source, target, strict=True)), len(source))


def control_characters(source: Sequence[str], target: Sequence[str]) -> Mask:
    """Either side contains a character of Unicode category Cc other than tab."""
    return _either(source, target, lambda text: _CONTROL.search(text) is not None)


_CONTROL = regex.compile(r"[\p{Cc}--\t]", flags=regex.V1)


def markup(source: Sequence[str], target: Sequence[str]) -> Mask:
    """Either side contains a tag or a comment of HTML."""
    return _either(source, target, lambda text: "<" in text and TAG.search(text) is not None)


def wrong_script(
    source: Sequence[str],
    target: Sequence[str],
    *,
    source_pattern: regex.Pattern[str] | None,
    target_pattern: regex.Pattern[str] | None,
    share: float,
) -> Mask:
    """Less than `share` of a side's letters are in its script; sides without letters are kept."""
    drop = np.zeros(len(source), np.bool_)
    for side, pattern in ((source, source_pattern), (target, target_pattern)):
        if pattern is not None:
            drop |= _mask((_script_share(text, pattern) < share for text in side), len(side))
    return drop


def script_pattern(scripts: str, key: str) -> regex.Pattern[str]:
    """Return a pattern for runs of letters in `scripts`: one Unicode script name, or several joined by `+`.

    Raises ConfigError for an unknown script; `key` is its key in the configuration.
    """
    try:
        names = "".join(rf"\p{{Script={name}}}" for name in scripts.split("+"))
        return regex.compile(rf"[\p{{L}}&&[{names}]]+", flags=regex.V1)
    except regex.error as error:
        raise ConfigError(
            f"{key}: {scripts!r} is not a Unicode script ({error}); examples: Latin, Cyrillic, Han+Hiragana+Katakana",
            key=key,
        ) from None


_LETTERS = regex.compile(r"\p{L}+")


def script_filter(filters: FilterConfig) -> Predicate:
    """Return `wrong_script` with the patterns of `filters`."""
    source, target = (
        script_pattern(scripts, f"data.filters.{side}_script") if scripts else None
        for side, scripts in (("source", filters.source_script), ("target", filters.target_script))
    )
    return partial(wrong_script, source_pattern=source, target_pattern=target, share=filters.min_script_share)


def _script_share(text: str, pattern: regex.Pattern[str]) -> float:
    letters, of_script = (len("".join(found.findall(text))) for found in (_LETTERS, pattern))
    return of_script / letters if letters else 1.0


def _mask(values: object, count: int) -> Mask:
    return np.fromiter(values, np.bool_, count)  # type: ignore[call-overload]


def _lengths(values: object, count: int) -> NDArray[np.int64]:
    return np.fromiter(values, np.int64, count)  # type: ignore[call-overload]


def _either(source: Sequence[str], target: Sequence[str], test: Callable[[str], bool]) -> Mask:
    """Return a mask of the pairs for which `test` is true on either side."""
    drop = np.zeros(len(source), np.bool_)
    for side in (source, target):
        if test("".join(side)):  # once on the whole block, since it is rarely true for any text
            drop |= _mask(map(test, side), len(side))
    return drop


def pair_hashes(source: Sequence[str], target: Sequence[str]) -> NDArray[np.uint64]:
    """Return a 64-bit xxHash for each pair, uint64 [pairs]."""
    # Texts contain no line feed, so different pairs are never joined to the same text.
    digest = xxhash.xxh3_64_intdigest
    pairs = zip(source, target, strict=True)
    return np.fromiter((digest(f"{s}\n{t}".encode()) for s, t in pairs), np.uint64, len(source))


class HashSet:
    """A growing set of 64-bit hashes: 8 bytes per element, and a sixteenth more while a part is merged.

    Hashes are grouped by their first four bits, each group as sorted runs, each less than an eighth as long as the
    previous one. So a look-up searches few runs, however many hashes there are. The probability that any two of n
    different pairs share a hash is about n^2 / 2^65 (4e-5 for 40 million, 0.2 % for 300 million).
    """

    _BORDERS = np.arange(1, 16, dtype=np.uint64) << np.uint64(60)
    _RATIO = 8

    def __init__(self) -> None:
        self._parts: list[list[NDArray[np.uint64]]] = [[] for _ in range(len(self._BORDERS) + 1)]

    def __len__(self) -> int:
        return sum(len(run) for runs in self._parts for run in runs)

    def add(self, hashes: NDArray[np.uint64]) -> Mask:
        """Add `hashes` [n]; return a mask [n], True where a hash was in the set or occurs earlier in `hashes`."""
        unique, first = np.unique(hashes, return_index=True)
        of_parts = np.split(unique, np.searchsorted(unique, self._BORDERS))
        known = [self._added(runs, new) for runs, new in zip(self._parts, of_parts, strict=True)]
        seen = np.ones(len(hashes), np.bool_)
        seen[first[~np.concatenate(known)]] = False
        return seen

    def _added(self, runs: list[NDArray[np.uint64]], hashes: NDArray[np.uint64]) -> Mask:
        """Add sorted hashes to the runs of a part; return a mask of those that were there."""
        known = np.zeros(len(hashes), np.bool_)
        for run in runs:
            # A hash above all of the run would be looked up after its end.
            places = np.minimum(np.searchsorted(run, hashes), len(run) - 1)
            known |= run[places] == hashes
        new = hashes[~known]
        if len(new):
            while runs and len(runs[-1]) <= self._RATIO * len(new):
                new = np.concatenate([runs.pop(), new])
                new.sort()
            runs.append(new)
        return known


_WORDS = 12  # numbers up to this one are often written as words

# Digits are matched by `re`, which shares `unicodedata`'s Unicode tables; `regex` has newer ones, with more digits.
# The pattern finds a digit first and then looks behind it, which more than halves the time.
_GROUPED = re.compile(r"(\d(?<![\d.,]\d)\d{0,2})((?:[.,'’ \u00A0\u202F\u2009]\d{3})+)(?!\d)")
_DIGITS = re.compile(r"\d+")
_URL = regex.compile(r"(?:https?://|ftp://|www\.)[^\s<>\"“”„«»]+", flags=regex.IGNORECASE)
# A name is matched only from its first character (or after the previous address, \G), not from each of a long word.
_EMAIL = regex.compile(r"(?:\G|(?<![\p{L}\p{N}._%+-]))[\p{L}\p{N}._%+-]++@[\p{L}\p{N}-]+(?:\.[\p{L}\p{N}-]+)+")
_TRAILING = ".,;:!?)]}'…。，、）」』"

_MARKS = {
    mark: name
    for name, marks in (
        ("stop", ".。．｡।۔။።"),
        ("question", "?？؟\u037e՞"),
        ("exclamation", "!！"),
        ("colon", ":："),
        ("ellipsis", "…"),
        ("quotation", '"“”„‟«»「」『』'),
        ("bracket", "()[]{}（）［］｛｝"),
    )
    for mark in marks
}
_MARK = regex.compile(f"[{regex.escape(''.join(_MARKS), special_only=False)}]")
_GREEK = regex.compile(r"\p{Greek}{2}")
_DOTS = regex.compile(r"\.{2,}")
_INNER = regex.compile(r"(?<=[\p{L}\p{N}])[.:](?=[\p{L}\p{N}])")


def numbers(text: str) -> Counter[str]:
    """Return the numbers of a text by their digits 0 to 9, without leading zeros and separators of thousands.

    The parts of a date or time, or around a decimal sign, are separate numbers, because their order varies by language.
    """
    grouped = _GROUPED.sub(lambda found: found[1] + "".join(_DIGITS.findall(found[2])), text)
    return Counter(_plain(digits) for digits in _DIGITS.findall(grouped))


def _plain(digits: str) -> str:
    if not digits.isascii():
        digits = "".join(str(unicodedata.digit(digit)) for digit in digits)
    return digits.lstrip("0") or "0"


def number_share(source: str, target: str) -> float:
    """Return the share of the numbers in both texts that also occur on the other side; 1 without any numbers.

    An unmatched number up to 12 does not count, because it may be a word on the other side.
    """
    first, second = numbers(source), numbers(target)
    common = sum((first & second).values())
    alone = sum(
        n for digits, n in ((first - second) + (second - first)).items() if len(digits) > 2 or int(digits) > _WORDS
    )
    return 2 * common / (2 * common + alone) if alone else 1.0


def unmatched_marks(source: str, target: str) -> int:
    """Return the number of marks in both texts without a mark of the same kind on the other side.

    Kinds are full stops, question marks, exclamation marks, colons, ellipses, brackets, and quotation marks; a stop or
    colon inside a word or number does not count.
    """
    first, second = _marks(source), _marks(target)
    return sum(abs(first[name] - second[name]) for name in first.keys() | second.keys())


def greek_questions(text: str) -> str:
    """Return text with `?` for semicolons if it has a Greek word: there they are question marks."""
    return text.replace(";", "?") if ";" in text and _GREEK.search(text) else text


def _marks(text: str) -> Counter[str]:
    plain = _DOTS.sub("…", _INNER.sub("", greek_questions(text)))
    return Counter(_MARKS[mark] for mark in _MARK.findall(plain))


def web_addresses(text: str) -> Counter[str]:
    """Return the web addresses in a text, in lower case."""
    return Counter(found.lower().rstrip(_TRAILING) for found in _URL.findall(text))


def email_addresses(text: str) -> Counter[str]:
    """Return the e-mail addresses in a text, in lower case."""
    return Counter(found.lower() for found in _EMAIL.findall(text))


def addresses_differ(
    sources: Sequence[str], targets: Sequence[str], find: Callable[[str], Counter[str]], sign: str
) -> Mask:
    """Return a mask of the pairs whose addresses are not the same on both sides; `sign` is in all addresses."""
    drop = np.zeros(len(sources), np.bool_)
    for number, pair in enumerate(zip(sources, targets, strict=True)):
        if any(sign in text for text in pair):
            drop[number] = find(pair[0]) != find(pair[1])
    return drop


# Plain ASCII text without entities needs no repair, so most English lines are checked no further.
_SUSPICIOUS = regex.compile(r"[^\x20-\x7E\t]|&")


def repair_with() -> Callable[[Sequence[str]], tuple[list[str], NDArray[np.bool_]]]:
    """Return a function from texts to the repaired texts and a mask of those that it changed.

    Quotation marks, ligatures and full-width letters are left unchanged, and so are texts with NUL, which are not text.
    Raises ConfigError if ftfy is not installed.
    """
    try:
        mended = _fixer()
    except ModuleNotFoundError:
        raise ConfigError(
            "data.filters.repair: needs ftfy, which is not installed: pip install 'ziggurat-mt[clean]'",
            key="data.filters.repair",
        ) from None

    def repaired(texts: Sequence[str]) -> tuple[list[str], NDArray[np.bool_]]:
        found = [mended(text) if _SUSPICIOUS.search(text) and "\0" not in text else text for text in texts]
        changed = (before != after for before, after in zip(texts, found, strict=True))
        return found, np.fromiter(changed, np.bool_, len(texts))

    return repaired


@lru_cache(maxsize=1)
def _fixer() -> Callable[[str], str]:
    from ftfy import TextFixerConfig, fix_text

    # Repairs that are a matter of taste, or that `data.unicode` covers, are left out.
    settings = TextFixerConfig(
        uncurl_quotes=False, fix_latin_ligatures=False, fix_character_width=False, normalization=None, explain=False
    )
    return lambda text: fix_text(text, settings)


MOST_CHARACTERS = 2000
"""Maximum number of characters of a text that are examined."""


_OTHER_SCRIPT = "other"
_SCRIPTS = (
    "Latin", "Cyrillic", "Greek", "Arabic", "Hebrew", "Han", "Hiragana", "Katakana", "Hangul", "Devanagari", "Bengali",
    "Gurmukhi", "Gujarati", "Oriya", "Tamil", "Telugu", "Kannada", "Malayalam", "Sinhala", "Thai", "Lao", "Khmer",
    "Myanmar", "Tibetan", "Georgian", "Armenian", "Ethiopic", "Mongolian", "Cherokee", "Tifinagh",
)  # fmt: skip


def scripts(texts: Sequence[str]) -> dict[str, int]:
    """Return the number of letters in each script, most frequent first; OTHER_SCRIPT stands for all others.

    A letter that belongs to no single script, such as U+30FC (which lengthens vowels), is among the others.
    """
    joined = "".join(texts)
    letters = len(_script("").findall(joined))
    counts = {name: len(_script(name).findall(joined)) for name in _SCRIPTS}
    counts[_OTHER_SCRIPT] = letters - sum(counts.values())
    return {name: count for name, count in sorted(counts.items(), key=lambda item: -item[1]) if count}


@lru_cache(maxsize=64)
def _script(name: str) -> regex.Pattern[str]:
    """Return the pattern of a letter of a script, or of any letter if the script has no name."""
    return regex.compile(rf"[\p{{L}}&&\p{{Script={name}}}]" if name else r"\p{L}", flags=regex.V1)


def known_language(code: str, side: str) -> str:
    """Return py3langid's name of the language `code` of `side`: `source` or `target`.

    Raises ConfigError if py3langid does not know the language, or is not installed.
    """
    try:
        known = identifier(None).labels
    except ModuleNotFoundError:
        raise ConfigError(
            "data.filters.languages: needs py3langid, which is not installed: pip install 'ziggurat-mt[clean]'",
            key="data.filters.languages",
        ) from None
    if (name := main_language(code)) not in known:
        raise ConfigError(
            f"data.filters.languages: py3langid does not know the {side} language `{code}`; it knows "
            f"{', '.join(sorted(known))}. Set data.filters.languages.{side} to null",
            key="data.filters.languages",
            named=[f"data.filters.languages.{side}"],
        )
    return name


def confidences(texts: Sequence[str], language: str, min_letters: int = 0) -> NDArray[np.float64]:
    """Return the probability of each text being in `language`, [texts], among all languages that py3langid knows.

    It is 1 for a text with fewer than `min_letters` letters.
    """
    found = np.ones(len(texts))
    for number, text in enumerate(texts):
        if sum(map(str.isalpha, text)) >= max(1, min_letters):
            # Most texts are in the expected language, and ranking all others would double the time.
            first, found[number] = identifier(None).classify(text[:MOST_CHARACTERS])
            if first != language:
                found[number] = dict(identifier(None).rank(text[:MOST_CHARACTERS]))[language]
    return found


def likeliest(texts: Sequence[str]) -> list[str | None]:
    """Return the likeliest language of each text, by its code; None for a text without letters."""
    return [
        str(identifier(None).classify(text[:MOST_CHARACTERS])[0]) if any(map(str.isalpha, text)) else None
        for text in texts
    ]


@lru_cache(maxsize=64)
def identifier(names: tuple[str, ...] | None) -> Any:
    """Return py3langid's identifier for these languages; None: all. Raises ModuleNotFoundError without py3langid."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier  # here: its model takes half a second

    found = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    if names is not None:
        found.set_languages(list(names))
    return found
