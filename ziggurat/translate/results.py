"""Results of a translator, and lines of text before and after translation: one line in, one line out.

Lines are read from a stream, collected in windows, and split if they are too long for the model; at the end the parts
of a line are joined. `Notices` counts the lines that needed special handling. PyTorch is not needed here, because an
exported model gives results of the same form (ziggurat.translate.ctranslate2).
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import takewhile
from typing import Any, BinaryIO

import regex

from ziggurat.data.lines import is_blank
from ziggurat.data.subword import Tokenizer
from ziggurat.data.vocabulary import VocabularyTokenizer, language_tags, text_signs, unknown_text
from ziggurat.system.errors import ConfigError, DataError, printable

Encode = Callable[[list[str]], list[list[int]]]
"""The type of a function from texts to the pieces of each."""

WINDOW_LINES = 2048
"""WINDOW_LINES is the number of lines of a stream that are read, sorted by length and translated together."""

MAX_LINE_BYTES = 1 << 20
"""MAX_LINE_BYTES is the longest accepted line: segmenting takes 80 times its size in memory, and seconds per MiB."""

UNSPACED_SCRIPTS = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
"""UNSPACED_SCRIPTS lists scripts without spaces between words, for a class of the `regex` module."""

_WINDOW_CHARACTERS = 1 << 22  # a window also ends at this size, so that very long lines do not pile up
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

# NUL, and every character that ends a line in str.splitlines(), wc, editors or JavaScript.
_LINE_ENDS = regex.compile(r"[\x00\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]+")

# After sentence-final punctuation with closing quotes or brackets: before a space, or immediately in scripts without
# spaces. At most four of them, because an unbounded lookbehind takes quadratic time on a long row of quotes.
_SENTENCE_END = regex.compile(
    r"""(?<=[.!?…։؟۔।॥]["'”’»)\]]{0,4})\s+|(?<=[。！？｡][」』”’）]{0,4})(?![。！？｡」』”’）])"""
)
_NO_BLANKS = rf"[{UNSPACED_SCRIPTS}。、！？｡」』）]"
_ENDS_UNSPACED = regex.compile(_NO_BLANKS + r"\Z")
_STARTS_UNSPACED = regex.compile(_NO_BLANKS)


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


def one_line(text: str) -> str:
    """Return `text` with every run of line ends or NULs replaced by one space, and stripped of them at both ends.

    A model can generate any byte. Line ends are LF and CR, but also vertical tab, form feed, U+001C to U+001E, U+0085,
    U+2028 and U+2029: some programs treat each of them as a line end, and lines would shift.
    """
    return _LINE_ENDS.sub(" ", text).strip(" ") if _LINE_ENDS.search(text) else text


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


def join_parts(texts: Iterable[str]) -> str:
    """Join the translations of a line's parts with spaces, but without them between letters of unspaced scripts."""
    joined = ""
    for text in filter(None, texts):
        unspaced = _ENDS_UNSPACED.search(joined[-1:]) and _STARTS_UNSPACED.match(text)
        joined += text if unspaced or not joined else f" {text}"
    return joined


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


class TranslationWarning(UserWarning):
    """Part of the input needed special handling; counted in `Translator.notices`."""


class Notices(Counter[str]):
    """Counts, by kind, of lines that needed special handling.

    `told` has the first message of each kind that warns.
    """

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[str, str] = {}

    def add(self, kind: str, message: str) -> None:
        """Count one; the first of its kind warns."""
        self[kind] += 1
        self._tell(kind, message)

    def merge(self, counts: Mapping[str, int], told: Mapping[str, str]) -> None:
        """Add the counts and messages of another process; only the first of a kind here warns."""
        self.update(counts)
        for kind, message in told.items():
            self._tell(kind, message)

    def _tell(self, kind: str, message: str) -> None:
        if kind not in self.told:
            self.told[kind] = message
            warnings.warn(f"{message}; further ones are only counted", TranslationWarning, stacklevel=5)


def translate_tagged(
    translate: Callable[..., list[Translation]],
    texts: Sequence[str],
    tags: Sequence[str | None],
    longest: Sequence[int] | None = None,
) -> list[Translation]:
    """Return the translations of texts with individual tags, in the same order.

    `translate` is a translator's method, which takes one tag for all of its texts; `longest` as there.
    """
    found: dict[int, Translation] = {}
    for tag in dict.fromkeys(tags):
        own = [number for number, its in enumerate(tags) if its == tag]
        limits = None if longest is None else [longest[number] for number in own]
        found.update(zip(own, translate([texts[number] for number in own], tag=tag, longest=limits), strict=True))
    return [found[number] for number in range(len(texts))]


@dataclass(frozen=True)
class Alignment:
    """Attention of each token of a translation to the source.

    It comes from the head that guided alignment trained, or from the last decoder layer, mean over its heads.
    """

    source_tokens: list[str]
    """Pieces of the source as read by the model, including tag and end-of-sentence."""
    soft: list[list[float]]
    """Per target token, one weight for each source token; they add up to 1."""
    hard: list[int]
    """Per target token, the source token with the largest weight, excluding tag and end-of-sentence."""

    @classmethod
    def of(cls, source_tokens: list[str], soft: list[list[float]], tags: int) -> Alignment:
        """Return the alignment with these weights; the first `tags` source tokens are tags."""
        own = range(tags, len(source_tokens) - 1)
        return cls(source_tokens, soft, [max(own, key=row.__getitem__) for row in soft])


@dataclass(frozen=True)
class Hypothesis:
    """One translation of a line."""

    text: str
    """The text, without line ends."""
    score: float
    """Log-probability after the length penalty, or mean chrF with `mbr`; the n-best list is ranked by it."""
    log_probability: float
    """Natural logarithm of the probability given the source, including end-of-sentence."""
    tokens: list[str] = field(repr=False)
    """Pieces, without end-of-sentence."""
    token_log_probabilities: list[float] = field(repr=False)
    """One per token, and one for end-of-sentence if the hypothesis (or a part of it) ended."""
    finished: bool
    """False if cut at the length limit, or forced to end there (`endings: fairseq`)."""
    alignment: Alignment | None = field(default=None, repr=False)
    """The alignment, or None if it was not requested."""
    unmet_constraints: list[str] | None = None
    """Phrases that should be in the text but are not; None for a line without such phrases."""
    ends: int = 0
    """Number of times that end-of-sentence was generated: once for each part that ended."""

    @property
    def quality(self) -> float:
        """Mean log-probability per token, including any end-of-sentence; 0 for a blank line."""
        # Not computed from token scores, which CTranslate2 returns only on request.
        return self.log_probability / max(1, len(self.tokens) + self.ends)

    def as_record(self) -> dict[str, Any]:
        """Return the fields as a dictionary, without those that do not apply."""
        record = {**asdict(self), "quality": self.quality}
        return {key: value for key, value in record.items() if value is not None and key != "ends"}


@dataclass(frozen=True)
class Translation:
    """The n best translations of one line, best first; there is always at least one."""

    source: str
    hypotheses: list[Hypothesis]
    parts: int = 1
    """Number of parts in which a very long line was translated; 0 for a blank line, which the model never saw."""

    @property
    def text(self) -> str:
        """The best translation."""
        return self.hypotheses[0].text

    @property
    def score(self) -> float:
        """The best translation's score."""
        return self.hypotheses[0].score

    def to_text(self, number: int, n_best: int, *, quality: bool = False) -> str:
        """Return the text: one line, or several with `n_best` above 1, with the line's `number` and scores.

        `quality` adds the mean log-probability per token.
        """
        lines = []
        for hypothesis in self.hypotheses:
            columns = [hypothesis.text] if n_best == 1 else [str(number), hypothesis.text, f"{hypothesis.score:.4f}"]
            lines.append(" ||| ".join([*columns, f"{hypothesis.quality:.4f}"] if quality else columns))
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return one line of JSON: the fields of the best hypothesis, `parts`, and the `n_best` list."""
        best = self.hypotheses[0].as_record()
        return json_line({**best, "parts": self.parts, "n_best": [h.as_record() for h in self.hypotheses]})


@dataclass(frozen=True)
class TargetScore:
    """The score of a given target sentence."""

    score: float
    """Log-probability after the length penalty."""
    log_probability: float
    """Natural logarithm of the probability given the source, including end-of-sentence."""
    tokens: list[str]
    """Pieces of the target, without end-of-sentence."""
    token_log_probabilities: list[float]
    """One per token, and one for end-of-sentence."""

    def to_text(self) -> str:
        """Return the log-probability as text."""
        return f"{self.log_probability:.6f}"

    def to_json(self) -> str:
        """Return one line of JSON."""
        return json_line(asdict(self))


def json_line(record: dict[str, Any]) -> str:
    """Return `record` as JSON on one line; raises ValueError for NaN."""
    # Characters that JSON does not escape, although some readers treat them as line ends.
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    return text.replace("\x85", r"\u0085").replace("\u2028", r"\u2028").replace("\u2029", r"\u2029")


def side_by_side(
    source: str, parts: Sequence[Sequence[Hypothesis]], n_best: int, *, mean_score: bool = False
) -> Translation:
    """Return the translation of a line of one or more parts: its k-th best joins the k-th best of each part.

    A part with fewer results repeats its best one. Log-probabilities add up, as do scores, unless `mean_score` asks for
    their mean (for scores that are not logarithms, such as chrF). With several parts, finished translations rank first.
    """
    hypotheses = []
    for rank in range(min(n_best, max(map(len, parts)))):
        hypotheses.append(_joined([part[rank] if rank < len(part) else part[0] for part in parts], mean_score))
    # The hypotheses of a single part keep the search's order; with `endings: fairseq`, a forced end may be first.
    if len(parts) > 1 or mean_score:
        hypotheses.sort(key=lambda h: (not h.finished, -h.score))
    return Translation(source, hypotheses, len(parts))


def _joined(parts: Sequence[Hypothesis], mean_score: bool) -> Hypothesis:
    if len(parts) == 1:
        return parts[0]
    total = sum(h.score for h in parts)
    wanted = [h.unmet_constraints for h in parts if h.unmet_constraints is not None]
    return Hypothesis(
        text=join_parts(h.text for h in parts),
        score=total / len(parts) if mean_score else total,
        log_probability=sum(h.log_probability for h in parts),
        tokens=[p for h in parts for p in h.tokens],
        token_log_probabilities=[p for h in parts for p in h.token_log_probabilities],
        finished=all(h.finished for h in parts),
        alignment=_joined_alignment([h.alignment for h in parts if h.alignment is not None]),
        unmet_constraints=[phrase for row in wanted for phrase in row] if wanted else None,
        ends=sum(h.ends for h in parts),
    )


def _joined_alignment(parts: Sequence[Alignment]) -> Alignment | None:
    """Return the alignments of the parts of a line as one, 0 between tokens of different parts."""
    if not parts:
        return None
    whole = Alignment([], [], [])
    width = sum(len(part.source_tokens) for part in parts)
    for part in parts:
        first = len(whole.source_tokens)
        after = width - first - len(part.source_tokens)
        whole.soft.extend([[0.0] * first + row + [0.0] * after for row in part.soft])
        whole.hard.extend(first + place for place in part.hard)
        whole.source_tokens.extend(part.source_tokens)
    return whole


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
