"""Text that is segmented already (subword-nmt) and a plain vocabulary file, to reproduce published set-ups."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ziggurat.config.data import RegularisationConfig
from ziggurat.data.normalise import UnicodeForm, normalise
from ziggurat.errors import DataError, printable

__all__ = ["VocabularyTokenizer"]

_CONTINUES = re.compile(r"@@(?: |$)")
_CONTROL_NAMES = ("<pad>", "<unk>", "<s>", "</s>")


class VocabularyTokenizer:
    """Blank-separated tokens <-> ids by a plain list. `@@` at a token's end joins it to the next when decoding.

    Args:
        content: The vocabulary file: UTF-8, one token per line; anything after the first blank or tab (a count)
            is ignored. `<pad>`, `<unk>`, `<s>` and `</s>` keep their place as control symbols where they are
            listed and come after the last token where they are not. Text never yields them.
        unicode: Normalisation of text before it is looked up.
        tags: Tokens that only `prepare` and the translator set, never text.

    Raises:
        DataError: not UTF-8, an empty line, or a token that is listed twice; names the line.
    """

    def __init__(self, content: bytes, unicode: UnicodeForm = "none", tags: Sequence[str] = ()) -> None:
        self.unicode = unicode
        self._listed = _tokens(content)
        self._names = [*self._listed, *(name for name in _CONTROL_NAMES if name not in set(self._listed))]
        first_tag = len(self._names)
        ids = {name: number for number, name in enumerate(self._names)}
        self.pad, self.unk, self.bos, self.eos = (ids.pop(name) for name in _CONTROL_NAMES)
        self._ids = ids  # what text may become
        self._control = frozenset((self.pad, self.bos, self.eos))
        self._first_tag = first_tag
        self.tags: Mapping[str, int] = {tag: first_tag + number for number, tag in enumerate(tags)}
        self._names += tags
        self.size = len(self._names)

    def content(self) -> bytes:
        """Return the vocabulary file this tokenizer can be made from again."""
        return "".join(f"{token}\n" for token in self._listed).encode()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Look up each blank-separated token; no bos, no eos."""
        return self.encode_normalised(normalise(texts, self.unicode))

    def encode_normalised(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        """Look up the tokens of texts that `normalise` has seen already (`threads` changes nothing here)."""
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
        """Refuse: text that is segmented already cannot be segmented anew."""
        raise DataError("pre-segmented text (`data.subword.kind: vocabulary`) cannot be segmented anew")


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
