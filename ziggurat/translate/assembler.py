"""Assembly of translations from the hypotheses of a search: ids become text, and parts of a line are joined.

On the way unknown tokens are replaced, alignments get their pieces, and samples are ranked by minimum Bayes risk: the
one most like all of them first (Eikema and Aziz 2020).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ziggurat.config import DecodingConfig
from ziggurat.data.subword import Tokenizer
from ziggurat.translate.hypotheses import IdHypothesis
from ziggurat.translate.lines import join_parts, one_line
from ziggurat.translate.results import Alignment, Hypothesis, Translation, side_by_side
from ziggurat.translate.terminology import unmet

_WORD_START = "\u2581"  # SentencePiece
_CONTINUES = "@@"  # subword-nmt


@dataclass(frozen=True)
class SourcePart:
    """A line, or a part of a very long one, as the model reads it."""

    text: str
    """The source; for a part of a line, as the tokenizer decodes it."""
    tag: tuple[int, ...]
    """Ids before the source's own."""
    ids: list[int]
    """Ids of the source, without tag and end-of-sentence."""
    constraints: tuple[str, ...] = ()
    """Phrases that its translation should contain."""


class Assembler:
    """Builder of the translations of lines from the hypotheses of their parts.

    Args:
        source, target: the tokenizers.
        decoding: settings: what the results contain, and how many there are.
    """

    def __init__(self, source: Tokenizer, target: Tokenizer, decoding: DecodingConfig) -> None:
        self.source = source
        self.target = target
        self.decoding = decoding

    def line(
        self, text: str, parts: Sequence[SourcePart], found: Sequence[list[IdHypothesis]], *, asked: Sequence[str] = ()
    ) -> Translation:
        """Return the translation of a line, given the search's results for each of its parts.

        A blank line has no parts; its empty translation lacks all phrases that were `asked` for.
        """
        if not parts:
            return Translation(text, [Hypothesis("", 0.0, 0.0, [], [], True, unmet_constraints=list(asked) or None)], 0)
        of_parts = [self._ranked(part, results) for part, results in zip(parts, found, strict=True)]
        return side_by_side(text, of_parts, self.decoding.n_best, mean_score=self.decoding.mbr > 0)

    def _ranked(self, part: SourcePart, results: Sequence[IdHypothesis]) -> list[Hypothesis]:
        """Return the results of a part, best first: as the search ranks them, or with `mbr` the most typical first."""
        hypotheses = [self._hypothesis(part, result) for result in results]
        if not self.decoding.mbr:
            return hypotheses
        utilities = mean_chrf([h.text for h in hypotheses])
        scored = [replace(h, score=utility) for h, utility in zip(hypotheses, utilities, strict=True)]
        return sorted(scored, key=lambda h: -h.score)

    def _hypothesis(self, part: SourcePart, result: IdHypothesis) -> Hypothesis:
        alignment = None
        text = one_line(self.target.decode(result.tokens))
        if result.attention or self.decoding.alignments:
            pieces = self.source.pieces([*part.tag, *part.ids, self.source.eos])
            alignment = Alignment.of(pieces, result.attention, len(part.tag))
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
            ends=int(result.finished),
        )

    def _replaced(self, part: SourcePart, tokens: Sequence[int], hard: Sequence[int]) -> str:
        """Return the text with the source word that it is aligned to in place of each unknown token."""
        # Decoded in stretches between unknown tokens: the decoded text does not show where they were.
        words = self._words(part)
        stretches: list[str] = []
        begin = 0
        for place, token in enumerate(tokens):
            if token == self.target.unk:
                stretches += [self.target.decode(tokens[begin:place]), words[hard[place] - len(part.tag)]]
                begin = place + 1
        return one_line(join_parts(s.strip() for s in [*stretches, self.target.decode(tokens[begin:])]))

    def _words(self, part: SourcePart) -> list[str]:
        """Return for each piece of the source the word that it belongs to, as the source has it."""
        # (1) Number the words: a word begins with SentencePiece's mark, or after a piece without subword-nmt's.
        pieces = self.source.pieces(part.ids)
        spaced = any(piece.startswith(_WORD_START) for piece in pieces)
        number, numbers = -1, []
        for place, piece in enumerate(pieces):
            begins = piece.startswith(_WORD_START) if spaced else not (place and pieces[place - 1].endswith(_CONTINUES))
            number += begins or not place
            numbers.append(number)
        words = part.text.split()
        # (2) Take the words of the text. If their number differs, the text was segmented (each of its words is a piece)
        # or normalisation changed its blanks: join the pieces.
        if len(words) != number + 1:
            segmented = words if len(words) == len(pieces) else None
            words = []
            for word in range(number + 1):
                own = [place for place, n in enumerate(numbers) if n == word]
                if segmented is not None:
                    words.append("".join(segmented[place].removesuffix(_CONTINUES) for place in own))
                else:
                    words.append(self.source.decode([part.ids[place] for place in own]).strip())
        return [words[n] for n in numbers]


def mean_chrf(texts: Sequence[str]) -> list[float]:
    """Return the mean sentence chrF (sacreBLEU's defaults, 0 to 100) of each text against all, itself included.

    Samples of a translation are often the same. Each ordered pair of different texts is compared once, so the time
    grows with the square of their number.
    """
    import sacrebleu  # here, since its import is slow and only `mbr` needs it

    metric = sacrebleu.CHRF()
    counts = Counter(texts)
    utility = {
        text: sum(count * metric.sentence_score(text, [other]).score for other, count in counts.items())
        for text in counts
    }
    return [utility[text] / len(texts) for text in texts]
