"""Agreement between the parts of another toolkit's model: dictionary, segmenter and rows of the matrices.

If one part comes from another model of the same publisher, nothing fails, but rows stand for other tokens, and text is
split into pieces that the dictionary lacks. So parts without a counterpart are counted, and reported or refused.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import sentencepiece

from ziggurat.data.subword import SentencePieceTokenizer, Tokenizer
from ziggurat.system.errors import printable

MOST_UNMATCHED = 0.05
"""MOST_UNMATCHED is the largest share of unmatched rows or tokens with which a model is still imported."""

_MOST_UNLISTED = 0.2
"""_MOST_UNLISTED is the largest share of a BPE model's pieces that the dictionary may lack. About 8 % of 8,000 BPE
pieces are only steps towards longer ones; they never occur in the training text, so its dictionary lacks them (0.1 % of
unigram pieces)."""

_MOST_UNSPELT = 0.5
"""_MOST_UNSPELT is the largest share of tokens with characters that the segmenter does not know. A dictionary that was
counted on segmented text lists rare characters of all scripts, each as a token."""

_EXAMPLES = 5

# Tokens that no text is segmented into: padding of fairseq's dictionaries, control symbols (<mask>, <unk_7>, [CLS]).
_RESERVED = re.compile(r"madeupword\d+|<[\w/ ]+>|\[\w+\]")

_TAG = re.compile(r">>[^<>\s]+<<|__[a-z]{2,3}(?:[-_][A-Za-z0-9]{2,8}){0,3}__|<2[A-Za-z][\w-]*>|\[[a-z]{2,3}_[A-Z]{2}\]")
"""_TAG matches tokens that name a language, as OPUS-MT, fairseq, Google and mBART spell them; not rows of
underscores."""

_MARKS = {
    "\u2581": "SentencePiece (`\u2581`)",
    "\u0120": "byte-level BPE (`\u0120`)",
    "##": "WordPiece (`##`)",
    "@@": "subword-nmt or fastBPE (`@@`)",
    "</w>": "BPE (`</w>`)",
    "\uffed": "pyonmttok (`\uffed`)",
}
"""Marks that segmenters put on their pieces, and the segmenters' names."""
_MARKED = 0.05  # least share of marked tokens in a dictionary of pieces


@dataclass(frozen=True)
class Unmatched:
    """Parts of an imported model without a counterpart in another part.

    Attributes:
        what: description of them, such as `source: tokens of the dictionary that the segmenter never gives`.
        count: their number.
        of: the number of parts that were checked.
        examples: some of them.
        most: largest share of unmatched parts with which the model is imported.
    """

    what: str
    count: int
    of: int
    examples: tuple[str, ...]
    most: float

    @classmethod
    def among(cls, what: str, found: Sequence[object], of: int, most: float = MOST_UNMATCHED) -> list[Unmatched]:
        """Return a one-element list describing what was `found` among `of`; an empty list if nothing was."""
        examples = tuple(printable(str(one), 30) for one in found[:_EXAMPLES])
        return [cls(what, len(found), of, examples, most)] if found else []

    @property
    def too_many(self) -> bool:
        """True if the unmatched parts are too many for the parts of one model; a single one never is."""
        return self.count > max(1, self.most * self.of)

    def __str__(self) -> str:
        return f"{self.what}: {self.count:,} of {self.of:,}, such as {' '.join(self.examples)}"


@dataclass(frozen=True)
class VocabularySide:
    """The dictionary, segmenter and matrix of the source or the target."""

    name: str
    rows: int
    ids: Mapping[str, int]
    control: frozenset[int]
    """Rows of control symbols, in the dictionary or not."""
    tokenizer: Tokenizer


def unmatched(source: VocabularySide, target: VocabularySide) -> list[Unmatched]:
    """Return the parts without a counterpart on the other side; a finding that holds for both sides is listed once."""
    given = [_given(side.tokenizer) for side in (source, target)]
    # Two segmenters may share one dictionary, and two dictionaries one segmenter. But a segmenter that by itself gives
    # the whole dictionary serves both sides.
    one_for_two = any(_gives_all(side, pieces) for side, pieces in zip((source, target), given, strict=True))
    pieces = [given[0] | given[1]] * 2 if source.ids == target.ids and not one_for_two else given
    listed = [source.ids.keys(), target.ids.keys()]
    tokens = [listed[0] | listed[1]] * 2 if given[0] == given[1] else listed
    found: dict[Unmatched, list[str]] = {}
    for number, side in enumerate((source, target)):
        findings = _rows(side)
        if not isinstance(side.tokenizer, SentencePieceTokenizer):
            lost = [token for token, row in side.ids.items() if row not in side.control and token not in given[number]]
            what = "tokens of the dictionary that text split at spaces cannot have"
            findings += Unmatched.among(what, lost, len(side.ids))
        else:
            findings += _tokens(side, side.tokenizer, pieces[number])
            lacking = sorted(given[number] - tokens[number] - {""})
            findings += Unmatched.among(
                "pieces of the segmenter that the dictionary lacks, which are read as unknown",
                lacking,
                len(given[number]),
                MOST_UNMATCHED if side.tokenizer.is_unigram else _MOST_UNLISTED,
            )
        for one in findings:
            found.setdefault(one, []).append(side.name)
    return [dataclasses.replace(one, what=f"{' and '.join(names)}: {one.what}") for one, names in found.items()]


def _rows(side: VocabularySide) -> list[Unmatched]:
    """Return the rows without a token, and the tokens that share a row with another."""
    first: dict[int, str] = {}
    shared = [token for token, row in side.ids.items() if first.setdefault(row, token) != token]
    without = [row for row in range(side.rows) if row not in first and row not in side.control]
    return [
        *Unmatched.among("rows of the matrix without a token in the dictionary", without, side.rows),
        *Unmatched.among("tokens of the dictionary with the id of another", shared, len(side.ids)),
    ]


def _given(tokenizer: Tokenizer) -> frozenset[str]:
    """Return the pieces that a text can be segmented into; for a plain list, the whole list."""
    if not isinstance(tokenizer, SentencePieceTokenizer):
        return frozenset(tokenizer.pieces(range(tokenizer.size)))
    model = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
    tests = (model.is_control, model.is_unknown, model.is_unused)
    return frozenset(model.id_to_piece(n) for n in range(len(model)) if not any(test(n) for test in tests))


def _counted(side: VocabularySide) -> list[str]:
    """Return the tokens of the dictionary that text should be segmented into."""
    own = {token for token, row in side.ids.items() if row in side.control} | side.tokenizer.tags.keys()
    return [token for token in side.ids if token not in own and not _RESERVED.fullmatch(token)]


def _gives_all(side: VocabularySide, pieces: frozenset[str]) -> bool:
    """Return whether nearly all tokens of the dictionary are among the pieces of the side's own segmenter."""
    counted = _counted(side)
    return sum(token not in pieces for token in counted) <= MOST_UNMATCHED * len(counted)


def _tokens(side: VocabularySide, tokenizer: SentencePieceTokenizer, pieces: frozenset[str]) -> list[Unmatched]:
    """Return the dictionary's tokens that neither `tokenizer` nor the other side's ever produces."""
    counted = _counted(side)
    never = [token for token in counted if token not in pieces]
    spelt: list[str] = []
    unspelt: list[str] = []
    for token in never:
        ids = tokenizer.encode([token.replace("\u2581", " ")])[0]
        (unspelt if tokenizer.unk in ids else spelt).append(token)
    return [
        *Unmatched.among("tokens of the dictionary that the segmenter never gives", spelt, len(counted)),
        *Unmatched.among(
            "tokens of the dictionary with characters that the segmenter does not know, which are read as unknown",
            unspelt,
            len(counted),
            _MOST_UNSPELT,
        ),
    ]


def language_tokens(ids: Iterable[str], models: Iterable[SentencePieceTokenizer]) -> list[str]:
    """Return the tokens whose spelling names a language and that the models never segment text into."""
    segmented = frozenset[str]().union(*(_given(model) for model in models))
    return [token for token in ids if _TAG.fullmatch(token) and (token not in segmented or token.startswith(">>"))]


def segmented_by(ids: Iterable[str]) -> str | None:
    """Return the name of the segmenter whose marks a dictionary's tokens have; None if they have none."""
    tokens = [token for token in ids if not _RESERVED.fullmatch(token)]
    for mark, name in _MARKS.items():
        marked = sum(token != mark and (token.startswith(mark) or token.endswith(mark)) for token in tokens)
        if marked > _MARKED * len(tokens):
            return name
    if sum(token.isdecimal() for token in tokens) > len(tokens) / 2:
        return "GPT-2's BPE, as the numbers that fairseq gives them"
    return None
