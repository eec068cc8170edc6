"""Vocabularies: tags that name languages, pieces that training hardly ever sees, and plain vocabulary files.

The tokenizer for text that is already segmented (subword-nmt) exists to reproduce published set-ups; its protocol is in
ziggurat.data.subword.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ziggurat.config.data import CorpusConfig, DataConfig, RegularisationConfig, SubwordConfig
from ziggurat.data.lines import UnicodeForm, normalise
from ziggurat.system.errors import DataError, Problem, Remedy, printable
from ziggurat.system.yaml_text import shown

_CONTINUES = re.compile(r"@@(?: |$)")
_CONTROL_NAMES = ("<pad>", "<unk>", "<s>", "</s>")


class VocabularyTokenizer:
    """Tokenizer by a plain list of tokens, which blanks separate. Decoding joins a token that ends in `@@` to the next.

    Args:
        content: the vocabulary file: UTF-8, one token per line; anything after the first blank or tab (a count)
            is ignored. `<pad>`, `<unk>`, `<s>` and `</s>` are control symbols, which text cannot produce; those that
            are not listed follow the last token.
        unicode: normalisation of text before it is looked up.
        tags: tokens that only `prepare` and the translator set; text cannot produce them.

    Raises:
        DataError: not UTF-8, an empty line, or a token listed twice; names the line.
    """

    def __init__(self, content: bytes, unicode: UnicodeForm = "none", tags: Sequence[str] = ()) -> None:
        self.unicode = unicode
        self._listed = _tokens(content)
        self._names = [*self._listed, *(name for name in _CONTROL_NAMES if name not in set(self._listed))]
        first_tag = len(self._names)
        ids = {name: number for number, name in enumerate(self._names)}
        self.pad, self.unk, self.bos, self.eos = (ids.pop(name) for name in _CONTROL_NAMES)
        self._ids = ids  # without the control symbols: text cannot produce them
        self._control = frozenset((self.pad, self.bos, self.eos))
        self._first_tag = first_tag
        self.tags: Mapping[str, int] = {tag: first_tag + number for number, tag in enumerate(tags)}
        self._names += tags
        self.size = len(self._names)

    def content(self) -> bytes:
        """Return a vocabulary file that gives the same tokenizer."""
        return "".join(f"{token}\n" for token in self._listed).encode()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Look up each blank-separated token; no bos, no eos."""
        return self.encode_normalised(normalise(texts, self.unicode))

    def encode_normalised(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        """Look up the tokens of texts that are already normalised (`threads` has no effect here)."""
        get, unk = self._ids.get, self.unk
        return [[get(token, unk) for token in text.split(" ")] if text else [] for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text with `@@ ` joined; control ids and tags vanish, an unknown token is `<unk>`."""
        names = [self._names[i] for i in ids if 0 <= i < self._first_tag and i not in self._control]
        return self.joined(" ".join(names))

    @staticmethod
    def joined(text: str) -> str:
        """Undo subword-nmt's segmentation of `text`."""
        return _CONTINUES.sub("", text)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the written form of each id, control ids and tags included."""
        return [self._names[index] for index in ids]

    def sample(
        self, texts: Sequence[str], seeds: Sequence[int], regularisation: RegularisationConfig
    ) -> list[list[int]]:
        """Raise DataError: text that is already segmented cannot be segmented again."""
        raise DataError(
            "pre-segmented text (`data.subword.kind: vocabulary`) cannot be segmented again", key="data.subword.kind"
        )


def _tokens(content: bytes) -> list[str]:
    """Return the listed tokens in order."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        bad_line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"line {bad_line}: not valid UTF-8 (byte {error.start} of the file, from 0)") from None
    lines = text.removesuffix("\n").split("\n")
    first_line: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        token = re.split(r"[ \t\r]", line, maxsplit=1)[0]
        if not token:
            raise DataError(f"line {number}: no token")
        if token in first_line:
            raise DataError(f"line {number}: {printable(token)!r} is listed already in line {first_line[token]}")
        first_line[token] = number
    return list(first_line)


_OFTEN = 10
"""Occurrences from which on a piece counts as seen often. On 3,599 pairs of captions 85 % of 8,000 joint pieces have
fewer, and 25 % of 2,000; on 157,571 pairs of Tatoeba 8 % of 8,000."""
_TOO_MANY = 0.5
"""Share of rare pieces from which on there is a notice."""
_SMALL = 1000  # smaller vocabularies are for trials
_BYTES = 256  # pieces that only characters outside the vocabulary need


class PieceCounts:
    """The number of occurrences of each piece."""

    def __init__(self) -> None:
        self.of: NDArray[np.int64] = np.zeros(0, np.int64)

    def add(self, ids: NDArray[np.int32]) -> None:
        """Count the pieces with these numbers."""
        found = np.bincount(ids, minlength=len(self.of))
        found[: len(self.of)] += self.of
        self.of = found


def rare_notices(
    config: SubwordConfig, sizes: tuple[int, int], counts: tuple[PieceCounts, PieceCounts]
) -> list[Problem]:
    """Return a warning for each vocabulary trained for this store most of whose pieces occur less than 10 times.

    Args:
        config: section `data.subword`.
        sizes: numbers of source and target pieces.
        counts: those of both sides' training text.
    """
    if config.kind not in ("bpe", "unigram"):
        return []
    source, target = (np.pad(count.of, (0, size - len(count.of))) for count, size in zip(counts, sizes, strict=True))
    if config.joint:
        return _notice(config, "vocabulary_size", "", source + target)
    of_target = "target_vocabulary_size" if config.target_vocabulary_size is not None else "vocabulary_size"
    return _notice(config, "vocabulary_size", "source ", source) + _notice(config, of_target, "target ", target)


def _notice(config: SubwordConfig, key: str, side: str, counts: NDArray[np.int64]) -> list[Problem]:
    often = int(np.count_nonzero(counts >= _OFTEN))
    learned = len(counts) - (_BYTES if config.byte_fallback else 0)
    if len(counts) < _SMALL or learned - often <= _TOO_MANY * learned:
        return []
    fewer = -(-often * 3 // 2 // 100) * 100
    return [
        Problem(
            f"data.subword.{key}",
            f"{learned - often:,} of {learned:,} {side}pieces occur fewer than {_OFTEN} times in the training text: "
            f"too rarely to be learned well. With so little text, lower `data.subword.{key}`, to {max(fewer, 500)}, "
            "say, and prepare again",
            severity="warning",
            named=(Remedy.PREPARE_AFTER,),
        )
    ]


_LANGUAGE_TAG = re.compile(r"<2[a-z].*>|>>[a-z].*<<|__[a-z].*__")  # `<bt>` and its like name no language
_SEVERAL = "mul"  # ISO 639's code for text of several languages, which tells none


def language_tags(known: Iterable[str]) -> list[str]:
    """Return those of a model's tags that name languages."""
    return [tag for tag in known if _LANGUAGE_TAG.fullmatch(tag)]


def several_languages(known: Iterable[str]) -> str:
    """Return the tags that name a language, as text for a message, where they are several; else nothing."""
    languages = language_tags(known)
    return printable(", ".join(languages), 200) if len(languages) > 1 else ""


def tag_notices(config: DataConfig, known: Iterable[str]) -> list[Problem]:
    """Return warnings on corpora whose sources do not tell a model which language it is to write.

    They have no tag beside tags of several languages, or one tag (or none) with targets of several languages.

    Args:
        config: the data section.
        known: tags of the source vocabulary.
    """
    notices, languages = [], language_tags(known)
    ambiguous = len(languages) > 1
    if ambiguous and (untagged := [key for key, corpus in _corpora(config) if corpus.tag is None]):
        why = "no `tag`, although the vocabulary has tags of several languages, so nothing tells the model which one to"
        can = f"`tag` can be {', '.join(languages)}"
        notices.append(
            Problem(untagged[0], f"{shown(untagged, 10)}: {why} write", can, severity="warning", named=(*untagged,))
        )
    targets: dict[str | None, dict[str, str]] = {}  # tag -> language of targets -> the first of its corpora
    for key, corpus in _corpora(config):
        language = config.languages_of(corpus)[1]
        if language != _SEVERAL and not (ambiguous and corpus.tag is None):
            targets.setdefault(corpus.tag, {}).setdefault(language, key)
    for tag, first in targets.items():
        if len(first) > 1:
            found = shown([f"{key} is into `{language}`" for language, key in first.items()], 10)
            same = "none has a `tag`" if tag is None else f"all have `tag: {tag}`"
            said = (
                f"{found}; {same}: nothing tells the model which language to write. Give the corpora of each target "
                f"language a tag of their own, such as `<2{next(iter(first))}>`"
            )
            notices.append(Problem(next(iter(first.values())), said, severity="warning", named=(*first.values(),)))
    return notices


def _corpora(config: DataConfig) -> Iterator[tuple[str, CorpusConfig]]:
    """Yield each corpus with its key, such as `data.train.0`."""
    for split, corpora in (("train", config.train), ("dev", config.dev)):
        yield from ((f"data.{split}.{number}", corpus) for number, corpus in enumerate(corpora))
