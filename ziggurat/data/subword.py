"""Text to subword ids and back: the tokenizer protocol, SentencePiece, and the vocabulary files of a store or model.

Random segmentations of a sentence are a function of (text, seed), by BPE-dropout or unigram sampling. SentencePiece has
both, but draws from thread-local generators that cannot be reseeded, so a resumed run could not repeat what an
uninterrupted one draws. The other tokenizer, for segmented text, is in ziggurat.data.vocabulary.
"""

from __future__ import annotations

import heapq
import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import numpy as np
import sentencepiece

from ziggurat.config.data import RegularisationConfig
from ziggurat.data.lines import UnicodeForm, normalise
from ziggurat.data.vocabulary import VocabularyTokenizer
from ziggurat.system.errors import DataError, Problem, Remedy, other_format
from ziggurat.system.files import check_file, write_atomically
from ziggurat.system.small_files import JsonForm, inside, parse_json, read_bounded, shaped

_UNKNOWN_PENALTY = 10.0  # SentencePiece scores an unknown character this much below its worst piece


class BpeDropout:
    """BPE-dropout (Provilkov, Emelianenko and Voita 2020, algorithm 1) over the merges of a SentencePiece model.

    A SentencePiece BPE model has no list of merges: two neighbours merge if their concatenation is a piece, best score
    first, leftmost among equals. Each merge is dropped with probability alpha when its turn comes. As in SentencePiece,
    a dropped merge returns only if one of its sides changes; alpha = 0 gives exactly the model's own segmentation.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        count = int(processor.get_piece_size())
        self._ids: dict[str, int] = {}
        for index in range(count):
            piece = cast(str, processor.id_to_piece(index))
            special = processor.is_control(index) or processor.is_unknown(index) or processor.is_byte(index)
            if not special and not processor.is_unused(index):
                self._ids[piece] = index
        scores = {piece: float(processor.get_score(index)) for piece, index in self._ids.items()}
        # SentencePiece does not reveal which pieces are user-defined symbols. They precede the trained pieces and have
        # score 0; the trained ones have 0, -1, -2, ... in the order of merging. So the last 0 is the first merge.
        frozen = [piece for piece, score in scores.items() if score == 0.0][:-1]
        frozen.sort(key=len, reverse=True)  # user-defined symbols match before all merges, the longest first
        self._frozen = frozenset(frozen)
        self._scores = scores
        self._symbols = re.compile("|".join([*map(re.escape, frozen), "."]), flags=re.DOTALL)
        byte_ids = {processor.id_to_piece(i): i for i in range(count) if processor.is_byte(i)}
        self._bytes = [byte_ids[f"<0x{value:02X}>"] for value in range(256)] if len(byte_ids) == 256 else None
        self._unknown = int(processor.unk_id())

    def sample(self, text: str, seed: int, regularisation: RegularisationConfig) -> list[int]:
        """Return one segmentation of `text`."""
        symbols = self._symbols.findall(cast(str, self._processor.normalize(text)))
        return self._to_ids(self._merge(symbols, random.Random(seed), regularisation.alpha))

    def _merge(self, symbols: list[str], generator: random.Random, alpha: float) -> list[str]:
        # A doubly linked list over the symbols: a merged symbol stays at its left end, the right end becomes empty.
        left = list(range(-1, len(symbols) - 1))
        right = [*range(1, len(symbols)), -1]
        scores, frozen = self._scores, self._frozen
        agenda: list[tuple[float, int, int, str]] = []

        def consider(first: int, second: int) -> None:
            if first < 0 or second < 0 or symbols[first] in frozen or symbols[second] in frozen:
                return
            piece = symbols[first] + symbols[second]
            score = scores.get(piece)
            if score is not None:
                heapq.heappush(agenda, (-score, first, second, piece))

        for position in range(len(symbols) - 1):
            consider(position, position + 1)
        while agenda:
            _, first, second, piece = heapq.heappop(agenda)
            # Stale entry: one side has been merged into another symbol since.
            if not symbols[first] or not symbols[second] or symbols[first] + symbols[second] != piece:
                continue
            if alpha and generator.random() < alpha:
                continue
            symbols[first], symbols[second] = piece, ""
            after = right[first] = right[second]
            if after >= 0:
                left[after] = first
            consider(left[first], first)
            consider(first, after)
        return [symbol for symbol in symbols if symbol]

    def _to_ids(self, symbols: list[str]) -> list[int]:
        """Look up symbols; unknown ones become bytes, or without byte pieces one unknown id per run."""
        ids: list[int] = []
        unknown_before = False
        for symbol in symbols:
            index = self._ids.get(symbol)
            if index is not None:
                ids.append(index)
            elif self._bytes is not None:
                ids.extend(self._bytes[value] for value in symbol.encode())
            elif not unknown_before:
                ids.append(self._unknown)
            unknown_before = index is None
        return ids


class UnigramSampler:
    """Subword regularisation (Kudo 2018, section 3.2): x ~ P(x)^alpha over the n best segmentations."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        count = int(processor.get_piece_size())
        scores = np.array([processor.get_score(index) for index in range(count)])
        tests = (processor.is_control, processor.is_byte, processor.is_unknown)
        special = np.array([any(test(index) for test in tests) for index in range(count)])
        unknown = float(scores[~special].min()) - _UNKNOWN_PENALTY
        # Every segmentation spells unknown characters with the same bytes, so any common score will do.
        self._scores = np.where(special, unknown, scores)

    def sample(self, text: str, seed: int, regularisation: RegularisationConfig) -> list[int]:
        """Return one segmentation of `text`."""
        best = self._processor.nbest_encode(text, nbest_size=regularisation.nbest, out_type=int)
        if len(best) < 2:
            return cast(list[int], best[0] if best else [])
        scores = [float(self._scores[ids].sum()) * regularisation.alpha for ids in best]
        top = max(scores)
        # Relative to the best one, since exp of a long text's log-probability is 0 for every segmentation.
        weights = [math.exp(score - top) for score in scores]
        return cast(list[int], random.Random(seed).choices(best, weights)[0])


VOCABULARY_FORMAT = 1

MAX_MODEL_BYTES = 1 << 25
"""Largest SentencePiece model or vocabulary file, 32 MiB: seven times the size of NLLB's with 256,000 pieces."""

_VOCABULARY_FILE = "vocabulary.json"

# SentencePiece writes a space as U+2581, so a U+2581 in the text would come back as a space. It is spelt with an escape
# character, a noncharacter that Unicode reserves for use inside programs. The escape character itself is escaped as
# well, so that decode(encode(text)) is the text, whatever it contains.
_ESCAPE = "\ufdd0"
_BLANK_MARK = "\u2581"
_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPED = re.compile(f"{_ESCAPE}(.?)", flags=re.DOTALL)


class Tokenizer(Protocol):
    """Tokenizer of one side. Ids run from 0 to `size - 1`; no text can produce the id of a control symbol or tag."""

    size: int
    """Number of ids, including control symbols and tags; also the number of rows of the embedding."""
    pad: int
    unk: int
    """Id of the unknown piece, for text that the vocabulary cannot spell."""
    bos: int
    eos: int
    tags: Mapping[str, int]
    """Ids of the corpora's tags, such as `{"<bt>": 8000}`."""
    unicode: UnicodeForm
    """Normalisation of text before it is segmented."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Normalise and segment each text; no bos, no eos."""

    def encode_normalised(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        """Segment texts that are already normalised (ziggurat.data.lines.normalise)."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text on one line, without control symbols and tags."""

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the written form of each id, including control ids and tags."""

    def sample(
        self, texts: Sequence[str], seeds: Sequence[int], regularisation: RegularisationConfig
    ) -> list[list[int]]:
        """Segment each text at random, as a function of the text and its seed (subword regularisation)."""


class SentencePieceTokenizer:
    """A SentencePiece model (Kudo and Richardson 2018). Control symbols that it lacks and tags follow its pieces.

    Tags are tokens that only `prepare` and the translator add; text cannot produce them. Raises DataError: `model` is
    not a serialised SentencePiece model.
    """

    def __init__(self, model: bytes, unicode: UnicodeForm = "none", tags: Sequence[str] = ()) -> None:
        self.model = model
        self.unicode = unicode
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise DataError(f"not a SentencePiece model ({error})") from None
        self._model_size = int(self._processor.get_piece_size())
        if not self._model_size:
            raise DataError("not a SentencePiece model (no pieces)")
        try:
            self._processor.id_to_piece(list(range(self._model_size)))
        except UnicodeDecodeError as error:  # SentencePiece loads such a model, but every use of the piece would raise
            raise DataError(f"damaged SentencePiece model (a piece is not valid UTF-8: {error.reason})") from None
        self._names: list[str] = []  # the ids that follow the model's own
        self.unk = int(self._processor.unk_id())
        self.pad = self._control(self._processor.pad_id(), "<pad>")
        self.bos = self._control(self._processor.bos_id(), "<s>")
        self.eos = self._control(self._processor.eos_id(), "</s>")
        first_tag = self._model_size + len(self._names)
        self.tags: Mapping[str, int] = {tag: first_tag + number for number, tag in enumerate(tags)}
        self._names += tags
        self.size = self._model_size + len(self._names)
        self._sampler: BpeDropout | UnigramSampler | None = None

    @property
    def is_unigram(self) -> bool:
        """True for a unigram model, which has n-best segmentations; SentencePiece itself does not reveal the kind."""
        try:
            self._processor.nbest_encode("a", nbest_size=2, out_type=int)
        except RuntimeError:
            return False
        return True

    def _control(self, model_id: int, name: str) -> int:
        """Return the model's id of a control symbol if text cannot produce it, else a new id after the model's own."""
        if model_id >= 0 and self._processor.is_control(model_id):
            return int(model_id)
        self._names.append(name)
        return self._model_size + len(self._names) - 1

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Normalise and segment each text; no bos, no eos. Lone surrogates become U+FFFD."""
        # Through UTF-16, so that two surrogate halves in a row become their character.
        texts = [
            text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if _SURROGATE.search(text) else text
            for text in texts
        ]
        return self.encode_normalised(normalise(texts, self.unicode))

    def encode_normalised(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        """Segment texts that are already normalised, on `threads` threads."""
        escaped = escape_blank_marks(list(texts))
        if threads == 1:  # a list would start a thread, which takes as long as hundreds of texts on a busy machine
            return [cast(list[int], self._processor.encode(text, out_type=int)) for text in escaped]
        return cast(list[list[int]], self._processor.encode(escaped, out_type=int, num_threads=threads))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text on one line, without control symbols and tags; an unknown piece is shown as ` ⁇ `.

        Line ends become spaces: a model may spell them in bytes, although no training text contains them.
        """
        known = [int(index) for index in ids if 0 <= index < self._model_size]
        text = self._processor.decode(known) if known else ""
        if _ESCAPE in text:
            text = _ESCAPED.sub(lambda found: {"_": _BLANK_MARK, _ESCAPE: _ESCAPE}.get(found[1], found[1]), text)
        return text.replace("\n", " ").replace("\r", " ")

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the written form of each id, including control ids and tags."""
        name, size = self._processor.id_to_piece, self._model_size
        return [name(int(index)) if index < size else self._names[index - size] for index in ids]

    def sample(
        self, texts: Sequence[str], seeds: Sequence[int], regularisation: RegularisationConfig
    ) -> list[list[int]]:
        """Segment each text at random, as a function of (text, seed); see ziggurat.data.subword."""
        if self._sampler is None:
            self._sampler = (UnigramSampler if self.is_unigram else BpeDropout)(self._processor)
        escaped = escape_blank_marks(normalise(texts, self.unicode))
        return [self._sampler.sample(t, s, regularisation) for t, s in zip(escaped, seeds, strict=True)]


def escape_blank_marks(texts: list[str]) -> list[str]:
    """Escape U+2581, SentencePiece's symbol for a space, so that it survives training, encoding and decoding."""
    joined = "".join(texts)
    if _BLANK_MARK not in joined and _ESCAPE not in joined:
        return texts
    return [text.replace(_ESCAPE, _ESCAPE * 2).replace(_BLANK_MARK, f"{_ESCAPE}_") for text in texts]


def save_tokenizers(directory: Path, source: Tokenizer, target: Tokenizer) -> None:
    """Write the model files and, last, `vocabulary.json`. If `source is target`, the vocabulary is joint."""
    joint = source is target
    sides = {"joint": source} if joint else {"source": source, "target": target}
    described: dict[str, Any] = {}
    for name, tokenizer in sides.items():
        if isinstance(tokenizer, SentencePieceTokenizer):
            kind, file, content = "sentencepiece", f"{name}.spm", tokenizer.model
        else:
            tokenizer = cast(VocabularyTokenizer, tokenizer)
            kind, file, content = "vocabulary", f"{name}.vocab", tokenizer.content()
        write_atomically(directory / file, content)
        described[name] = {"kind": kind, "file": file, "unicode": tokenizer.unicode}
        described[name] |= {"tags": list(tokenizer.tags), "size": tokenizer.size}
    document = {"format": VOCABULARY_FORMAT, "joint": joint, **described}
    write_atomically(directory / _VOCABULARY_FILE, json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n")


def load_tokenizers(directory: Path | str) -> tuple[Tokenizer, Tokenizer]:
    """Return the source and target tokenizer of a store, run or model directory: the same object if they are joint.

    Raises DataError: missing or damaged files, or another format version; CheckpointError: a file differs from its
    checksum.
    """
    directory = Path(directory)
    described = _description(directory)
    sides = [described.joint] if described.joint else [described.source, described.target]
    if None in sides:
        raise DataError(Problem("", f"{directory / _VOCABULARY_FILE}: damaged (a side is missing)", Remedy.PREPARE))
    loaded = [_load(directory, side) for side in sides if side]
    return loaded[0], loaded[-1]


def same_vocabulary(one: Tokenizer, other: Tokenizer) -> bool:
    """Return True if ids mean the same in both: equal pieces and tags in equal order."""
    ids = range(one.size)
    return one.size == other.size and one.tags == other.tags and one.pieces(ids) == other.pieces(ids)


def copy_tokenizers(from_directory: Path | str, to_directory: Path | str) -> None:
    """Copy the tokenizers' files; each appears whole or not at all, `vocabulary.json` last."""
    source, target = load_tokenizers(from_directory)  # loaded first, so that a damaged original is refused, not copied
    Path(to_directory).mkdir(parents=True, exist_ok=True)
    save_tokenizers(Path(to_directory), source, target)


class _Side(JsonForm):
    kind: Literal["sentencepiece", "vocabulary"]
    file: str
    unicode: UnicodeForm
    tags: list[str]
    size: int


class _Description(JsonForm):
    format: int
    joint: Literal[False] | _Side
    source: _Side | None = None
    target: _Side | None = None


def _description(directory: Path) -> _Description:
    path = directory / _VOCABULARY_FILE
    check_file(path)
    try:
        document = parse_json(read_bounded(inside(directory, _VOCABULARY_FILE)), str(path), remedy=Remedy.PREPARE)
    except FileNotFoundError:
        raise DataError(f"{directory}: no {_VOCABULARY_FILE}: not a store, run or model directory") from None
    version = document.get("format") if isinstance(document, dict) else None
    if isinstance(version, int) and version != VOCABULARY_FORMAT:
        raise DataError(other_format(path, version, VOCABULARY_FORMAT, Remedy.PREPARE))
    return shaped(document, _Description, f"{path}: damaged", remedy=Remedy.PREPARE)


def _load(directory: Path, described: _Side) -> Tokenizer:
    path = inside(directory, described.file)
    check_file(path)  # before parsing, because SentencePiece does not notice a changed score
    make = SentencePieceTokenizer if described.kind == "sentencepiece" else VocabularyTokenizer
    try:
        content = read_bounded(path, MAX_MODEL_BYTES)
    except FileNotFoundError:
        raise DataError(f"{path}: cannot be read: no such file, but {_VOCABULARY_FILE} names it") from None
    try:
        tokenizer: Tokenizer = make(content, described.unicode, described.tags)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    if tokenizer.size != described.size:
        raise DataError(f"{path}: {tokenizer.size} pieces instead of the {described.size} of {_VOCABULARY_FILE}")
    return tokenizer
