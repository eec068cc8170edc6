"""Random segmentations of a sentence as a function of (text, seed): BPE-dropout and unigram sampling.

SentencePiece has both methods, but draws from thread-local generators that cannot be reseeded, so a resumed run could
not repeat what an uninterrupted one draws.
"""

from __future__ import annotations

import heapq
import math
import random
import re
from typing import Any, cast

import numpy as np

from ziggurat.config.data import RegularisationConfig

_UNKNOWN_PENALTY = 10.0
"""SentencePiece scores an unknown character this much below its worst piece."""


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
        # SentencePiece does not tell which pieces are user-defined symbols. They precede the trained pieces and have
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
        """Merge neighbours, best first, dropping each candidate with probability `alpha`."""
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
        # Bytes spell unknown characters, the same ones in every segmentation, so any common score will do.
        self._scores = np.where(special, unknown, scores)

    def sample(self, text: str, seed: int, regularisation: RegularisationConfig) -> list[int]:
        """Return one segmentation of `text`."""
        best = self._processor.nbest_encode(text, nbest_size=regularisation.nbest, out_type=int)
        if len(best) < 2:
            return cast(list[int], best[0] if best else [])
        scores = [float(self._scores[ids].sum()) * regularisation.alpha for ids in best]
        top = max(scores)
        # Less the best one: exp of a long text's log-probability is 0 for every segmentation.
        weights = [math.exp(score - top) for score in scores]
        return cast(list[int], random.Random(seed).choices(best, weights)[0])


def make_sampler(processor: Any) -> BpeDropout | UnigramSampler:
    """Return the sampler for the model's kind."""
    try:  # SentencePiece does not tell the kind, but has n-best segmentation for unigram models only
        processor.nbest_encode("a", nbest_size=2, out_type=int)
    except RuntimeError:
        return BpeDropout(processor)
    return UnigramSampler(processor)
