"""Words in pieces: where one ends and another may begin.

SentencePiece marks the beginning of a word with `▁`; punctuation and scripts without blanks have no such mark. Of text
that was segmented before, each piece counts as a word. Neither PyTorch nor CTranslate2 is needed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import takewhile

import regex

from ziggurat.data.subword import Tokenizer
from ziggurat.translate.lines import UNSPACED_SCRIPTS

# A byte may be part of a letter, a mark belongs to the letter before it.
_GOES_ON = regex.compile(rf"<0x[0-9A-F]{{2}}>|\p{{M}}|(?![{UNSPACED_SCRIPTS}])[\p{{L}}\p{{N}}]")

_LETTER = regex.compile(r"[\p{L}\p{N}\p{M}]")


def begins_word(piece: str) -> bool:
    """Return whether a piece ends the word before it: it begins another, or is none, as end-of-sentence."""
    return _GOES_ON.match(piece) is None


def ends_in_word(piece: str) -> bool:
    """Return whether a piece ends with a letter or digit: after a bracket or a hyphen a word need not have a mark."""
    return _LETTER.fullmatch(piece[-1:]) is not None


def boundary_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids of a vocabulary whose pieces end the word before them; end-of-sentence is one of them."""
    return _boundary_ids(tuple(tokenizer.pieces(range(tokenizer.size))), tokenizer.eos)


@lru_cache(maxsize=4)  # 32,000 pieces take 20 ms, and a page asks for each word that is clicked
def _boundary_ids(pieces: tuple[str, ...], eos: int) -> tuple[int, ...]:
    ids = {number for number, piece in enumerate(pieces) if begins_word(piece)}
    return tuple(sorted(ids | {eos}))


def first_word(pieces: Sequence[str]) -> tuple[str, ...]:
    """Return the pieces of the first word: at least one, and all that go on with it."""
    return (*pieces[:1], *takewhile(lambda piece: not begins_word(piece), pieces[1:]))
