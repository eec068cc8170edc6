"""Lines of text before translation: read from a stream, collected in windows, checked, and cut into parts and words.

`Notices` counts the lines that need special handling.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Any, BinaryIO

import regex

from ziggurat.data.lines import is_blank
from ziggurat.data.subword import Tokenizer
from ziggurat.data.vocabulary import VocabularyTokenizer, language_tags, text_signs, unknown_text
from ziggurat.system.errors import ConfigError, DataError, printable
from ziggurat.translate.results import UNSPACED_SCRIPTS, Notices

Encode = Callable[[list[str]], list[list[int]]]
"""The type of a function from texts to the pieces of each."""

WINDOW_LINES = 2048
"""WINDOW_LINES is the number of lines of a stream that are read, sorted by length and translated together."""

MAX_LINE_BYTES = 1 << 20
"""MAX_LINE_BYTES is the longest accepted line: segmenting takes 80 times its size in memory, and seconds per MiB."""

_WINDOW_CHARACTERS = 1 << 22  # a window also ends at this size, so that very long lines do not pile up

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

# After sentence-final punctuation with closing quotes or brackets: before a space, or immediately in scripts without
# spaces. At most four of them, because an unbounded lookbehind takes quadratic time on a long row of quotes.
_SENTENCE_END = regex.compile(
    r"""(?<=[.!?…։؟۔।॥]["'”’»)\]]{0,4})\s+|(?<=[。！？｡][」』”’）]{0,4})(?![。！？｡」』”’）])"""
)


def read_lines(stream: BinaryIO, name: str) -> Iterator[str]:
    """Yield the lines of a UTF-8 byte stream as they arrive; `name` (a file, `standard input`) is for errors.

    Only LF ends a line; one CR before it is removed, as is a byte order mark at the start. The last line
    may lack its LF. Raises DataError naming line (from 1) and byte (from 0) at the first line that is not
    UTF-8 or is longer than 1 MiB; lines before it have been yielded.
    """
    offset = 0
    # One byte more than allowed distinguishes a line that is too long from one that just fits, and reads no further.
    for number, raw in enumerate(iter(lambda: stream.readline(MAX_LINE_BYTES + 1), b""), start=1):
        if len(raw) > MAX_LINE_BYTES:
            raise DataError(
                f"{name}, line {number}: longer than {MAX_LINE_BYTES >> 20} MiB; is this text with LF at the end "
                "of each line? If so, put a sentence or paragraph on each"
            )
        mark = len(_BYTE_ORDER_MARK) if number == 1 and raw.startswith(_BYTE_ORDER_MARK) else 0
        try:
            line = raw[mark:].decode("utf-8")
        except UnicodeDecodeError as error:
            at = error.start + mark
            found = raw[at : at + 4].hex(" ").upper()
            hint = "convert it to UTF-8"
            if number == 1 and raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
                hint = "it looks like UTF-16: convert it, for example with `iconv -f UTF-16 -t UTF-8`"
            raise DataError(
                f"{name}, line {number}: not valid UTF-8: {found} (byte {at} of the line, {offset + at} of the "
                f"input, from 0); {hint}. Nothing after it was read"
            ) from None
        offset += len(raw)
        yield line.removesuffix("\n").removesuffix("\r")


def refuse_single(**given: Any) -> None:
    """Raise TypeError for a single string, which would be read letter by letter, and for items that are not text."""
    for name, texts in given.items():
        if wrong := [each for each in texts if not hasattr(each, "__len__")] if isinstance(texts, list) else []:
            raise TypeError(f"{name}: {printable(repr(wrong[0]), 60)} is not text")
        if isinstance(texts, str):
            raise TypeError(f"{name}: give a list of texts, such as [text]: a string is a sequence of characters")


def without_nul(texts: Sequence[str]) -> list[str]:
    """Return `texts` with each NUL, which no training text contains, replaced by a space."""
    return [text.replace("\0", " ") for text in texts]


def check_tag(tag: str | None, known: Collection[str]) -> None:
    """Raise ConfigError for a tag that the model does not know; None stands for no tag."""
    if tag is not None and tag not in known:
        raise ConfigError(f"unknown tag {printable(tag)!r}; this model has: {', '.join(known) or 'none'}")


def count_untagged(tagged: bool, texts: Sequence[str], tokenizer: Tokenizer, notices: Notices) -> None:
    """Count texts without a tag, those with a tag as text, and those that are already cut into pieces.

    A text counts as untagged if the tags of a model name several languages and the text neither has a tag nor starts
    with one, so that the model chooses the language.
    """
    languages = [] if tagged else language_tags(tokenizer.tags)
    segmented = isinstance(tokenizer, VocabularyTokenizer)
    for text in texts:
        signs = dict(text_signs(text, tokenizer.tags, segmented=segmented))
        for kind, message in signs.items():
            notices.add(kind, f"{message}; the line is: {printable(text, 80)}")
        if len(languages) > 1 and "tag_as_text" not in signs:
            known = ", ".join(languages)
            notices.add("untagged", f"a line without a tag, so its output language is arbitrary: `tag` can be {known}")


def in_parts(
    texts: Sequence[str], encode: Encode, limit: int, notices: Notices, unk: int | None = None
) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield each text to translate, with the pieces of its parts: none for a blank text, several for a long one.

    `limit` is the maximum number of pieces per part; `notices` counts blank and long texts, and those with the unknown
    piece `unk`.
    """
    clean = without_nul(texts)
    for text, ids in zip(clean, encode(clean), strict=True):
        parts = split_long(text, ids, encode, limit) if ids and not is_blank(text) else []
        notices["blank_lines"] += not parts
        if parts and unk is not None and unk in ids:
            lacking = "" if "unknown" in notices.told else unknown_text(text, encode, unk)
            notices.add(
                "unknown", f"a line has text that the vocabulary lacks, and the model cannot read it: {lacking}"
            )
        if len(parts) > 1:
            notices.add(
                "long_lines",
                f"a line of {len(ids)} pieces is translated in {len(parts)} parts of at most {limit} pieces "
                "(`decoding.max_source_pieces`)",
            )
        yield text, parts


def split_long(text: str, ids: list[int], encode: Encode, limit: int) -> list[list[int]]:
    """Return `ids`, the pieces of `text`, as parts of at most `limit` pieces, each as long as possible.

    Parts end at the end of a sentence; a sentence longer than `limit` is cut between words, and a word longer than
    `limit` between characters (never inside one, because part of a character's bytes is meaningless).
    """
    if len(ids) <= limit:
        return [ids]
    units: list[list[int]] = []
    sentences = [s for s in _SENTENCE_END.split(text) if not is_blank(s)]
    for sentence, pieces in zip(sentences, encode(sentences), strict=True):
        if len(pieces) <= limit:
            units.append(pieces)
        else:
            units += _packed(_pieces_of_words(sentence, encode, limit), limit)
    return list(_packed(units, limit))


def _pieces_of_words(sentence: str, encode: Encode, limit: int) -> Iterator[list[int]]:
    """Yield the pieces of each word, a long word in parts of at most `limit`."""
    words = sentence.split()
    for word, pieces in zip(words, encode(words), strict=True):
        yield from _pieces_of_stretch(word, pieces, encode, limit)


def _pieces_of_stretch(text: str, pieces: list[int], encode: Encode, limit: int) -> Iterator[list[int]]:
    """Yield `pieces` of `text`, halved until they fit; the pieces of a single character are cut if necessary."""
    if len(pieces) <= limit:
        yield pieces
    elif len(text) == 1:
        for start in range(0, len(pieces), limit):
            yield pieces[start : start + limit]
    else:
        halves = [text[: len(text) // 2], text[len(text) // 2 :]]
        for half, its_pieces in zip(halves, encode(halves), strict=True):
            yield from _pieces_of_stretch(half, its_pieces, encode, limit)


def _packed(units: Iterable[list[int]], limit: int) -> Iterator[list[int]]:
    """Yield consecutive units joined into lists of at most `limit` pieces; no unit is longer than that."""
    part: list[int] = []
    for unit in units:
        if part and len(part) + len(unit) > limit:
            yield part
            part = []
        part = part + unit
    if part:
        yield part


def windows(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    """Return an iterator over `lines` in lists of `size`; if `lines` raises an error, those before it come first.

    Raises ConfigError immediately for a size below 1.
    """
    if size < 1:
        raise ConfigError(f"`window` must be at least 1, not {size}")
    return _windows(lines, size)


def _windows(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    window: list[str] = []
    characters = 0
    source = iter(lines)
    while True:
        try:
            line = next(source, None)
        except Exception:
            if window:
                yield window
            raise
        if line is None:
            break
        window.append(line)
        characters += len(line)
        if len(window) >= size or characters >= _WINDOW_CHARACTERS:
            yield window
            window, characters = [], 0
    if window:
        yield window


_GOES_ON = regex.compile(rf"<0x[0-9A-F]{{2}}>|\p{{M}}|(?![{UNSPACED_SCRIPTS}])[\p{{L}}\p{{N}}]")

_LETTER = regex.compile(r"[\p{L}\p{N}\p{M}]")


def begins_word(piece: str) -> bool:
    """Return whether a piece ends the word before it: it starts another, or is not text, such as end-of-sentence."""
    return _GOES_ON.match(piece) is None


def ends_in_word(piece: str) -> bool:
    """Return whether a piece ends with a letter or digit; after a bracket or hyphen, a word may lack a mark."""
    return _LETTER.fullmatch(piece[-1:]) is not None


def boundary_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids of a vocabulary whose pieces end the word before them, including end-of-sentence."""
    return _boundary_ids(tuple(tokenizer.pieces(range(tokenizer.size))), tokenizer.eos)


@lru_cache(maxsize=4)  # 32,000 pieces take 20 ms, and a web page requests this for each clicked word
def _boundary_ids(pieces: tuple[str, ...], eos: int) -> tuple[int, ...]:
    ids = {number for number, piece in enumerate(pieces) if begins_word(piece)}
    return tuple(sorted(ids | {eos}))


def first_word(pieces: Sequence[str]) -> tuple[str, ...]:
    """Return the pieces of the first word: at least one, and all that continue it."""
    return (*pieces[:1], *takewhile(lambda piece: not begins_word(piece), pieces[1:]))
