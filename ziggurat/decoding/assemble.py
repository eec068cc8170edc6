"""Results of a search -> the translation of a line: parts joined, unknown tokens replaced, alignments in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ziggurat.config import DecodingConfig
from ziggurat.data.subword import Tokenizer
from ziggurat.decoding.hypotheses import IdHypothesis
from ziggurat.decoding.lines import join_parts, one_line
from ziggurat.decoding.mbr import mean_chrf
from ziggurat.decoding.parts import side_by_side
from ziggurat.decoding.phrases import unmet
from ziggurat.decoding.results import Alignment, Hypothesis, Translation

__all__ = ["Assembler", "Part"]

_WORD_START = "\u2581"  # SentencePiece
_GOES_ON = "@@"  # subword-nmt


@dataclass(frozen=True)
class Part:
    """A line, or a part of a very long one, as the model reads it."""

    text: str
    """The source; of a part of a line, as the tokenizer gives it back."""
    tag: tuple[int, ...]
    """Ids before the source's own."""
    ids: list[int]
    """Ids of the source, without tag and end-of-sentence."""
    constraints: tuple[str, ...] = ()
    """Phrases that its translation should hold."""


class Assembler:
    """Makes translations of lines from the results of their parts.

    Args:
        source, target: the tokenizers.
        decoding: what the results are to hold.
    """

    def __init__(self, source: Tokenizer, target: Tokenizer, decoding: DecodingConfig) -> None:
        self.source = source
        self.target = target
        self.decoding = decoding

    def line(self, text: str, parts: Sequence[Part], found: Sequence[list[IdHypothesis]]) -> Translation:
        """Return the translation of a line, given the search's results for each of its parts."""
        of_parts = [self._ranked(part, results) for part, results in zip(parts, found, strict=True)]
        return side_by_side(text, of_parts, self.decoding.n_best, mean_score=self.decoding.mbr > 0)

    def _ranked(self, part: Part, results: Sequence[IdHypothesis]) -> list[Hypothesis]:
        """Return the results of a part, best first."""
        hypotheses = [self._hypothesis(part, result) for result in results]
        if not self.decoding.mbr:
            return hypotheses
        utilities = mean_chrf([h.text for h in hypotheses])
        scored = [replace(h, score=utility) for h, utility in zip(hypotheses, utilities, strict=True)]
        return sorted(scored, key=lambda h: -h.score)

    def _hypothesis(self, part: Part, result: IdHypothesis) -> Hypothesis:
        alignment = None
        text = one_line(self.target.decode(result.tokens))
        if result.attention or self.decoding.alignments:
            alignment = self._alignment(part, result.attention)
            if self.decoding.replace_unknown and self.target.unk in result.tokens:
                text = self._replaced(part, result.tokens, alignment.hard)
        missing = unmet(part.constraints, text, result.tokens, self.target) if part.constraints else None
        return Hypothesis(
            text=text,
            score=result.score,
            log_probability=result.log_probability,
            tokens=self.target.pieces(result.tokens),
            token_log_probabilities=result.token_log_probabilities,
            finished=result.finished and not result.forced,
            alignment=alignment if self.decoding.alignments else None,
            unmet_constraints=missing,
        )

    def _alignment(self, part: Part, attention: list[list[float]]) -> Alignment:
        first = len(part.tag)
        own = range(first, first + len(part.ids))
        hard = [max(own, key=row.__getitem__) for row in attention]
        return Alignment(self.source.pieces([*part.tag, *part.ids, self.source.eos]), attention, hard)

    def _replaced(self, part: Part, tokens: Sequence[int], hard: Sequence[int]) -> str:
        """Return the text with each unknown token replaced by the source word that it is aligned to."""
        words = self._words(part)
        stretches: list[str] = []
        begun = 0
        for place, token in enumerate(tokens):
            if token == self.target.unk:
                stretches += [self.target.decode(tokens[begun:place]), words[hard[place] - len(part.tag)]]
                begun = place + 1
        return one_line(join_parts(s.strip() for s in [*stretches, self.target.decode(tokens[begun:])]))

    def _words(self, part: Part) -> list[str]:
        """Return for each piece of the source the word that it belongs to, as it is written."""
        pieces = self.source.pieces(part.ids)
        spaced = any(piece.startswith(_WORD_START) for piece in pieces)
        number, numbers = -1, []
        for place, piece in enumerate(pieces):
            begins = piece.startswith(_WORD_START) if spaced else not (place and pieces[place - 1].endswith(_GOES_ON))
            number += begins or not place
            numbers.append(number)
        words = part.text.split()
        if len(words) != number + 1:  # segmented text, or normalisation changed the blanks
            segmented = words if len(words) == len(pieces) else None
            words = []
            for word in range(number + 1):
                own = [place for place, n in enumerate(numbers) if n == word]
                if segmented is not None:
                    words.append("".join(segmented[place].removesuffix(_GOES_ON) for place in own))
                else:
                    words.append(self.source.decode([part.ids[place] for place in own]).strip())
        return [words[n] for n in numbers]
