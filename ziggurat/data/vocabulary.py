"""Tokenizer for text that is already segmented (subword-nmt), with a plain vocabulary file.

It exists to reproduce published set-ups; see ziggurat.data.subword for the protocol.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ziggurat.config.data import RegularisationConfig
from ziggurat.data.lines import UnicodeForm, normalise
from ziggurat.system.errors import DataError, printable

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
        raise DataError("pre-segmented text (`data.subword.kind: vocabulary`) cannot be segmented again")


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
