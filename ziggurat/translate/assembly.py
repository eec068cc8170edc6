"""Translations of lines, put together from the hypotheses of their parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ziggurat.config import DecodingConfig
from ziggurat.data.subword import Tokenizer
from ziggurat.translate.hypotheses import IdHypothesis
from ziggurat.translate.results import Alignment, Hypothesis, Translation, join_parts, one_line, side_by_side
from ziggurat.translate.settings import Sentence
from ziggurat.translate.terms import unmet

_WORD_START = "\u2581"  # SentencePiece
_CONTINUES = "@@"  # subword-nmt


@dataclass(eq=False)
class SourcePart:
    """A line, or a part of a very long one, in the form the model reads, with the results of its search."""

    text: str
    """The source text; for a part of a line, as decoded by the tokenizer."""
    tag: tuple[int, ...]
    """Tag ids before those of the source."""
    ids: list[int]
    """Ids of the source, without tag and end-of-sentence."""
    sentence: Sentence
    """The source in the form the search receives."""
    constraints: tuple[str, ...] = ()
    """Phrases that its translation should contain."""
    found: list[IdHypothesis] = field(default_factory=list)
    """The results; at least one once the search has finished the part."""


class Assembler:
    """Builder of the translations of lines from the hypotheses of their parts.

    Args:
        source, target: the tokenizers.
        decoding: settings that determine the contents of the results.
        n_best: maximum number of results per line; None: the number in the settings.
    """

    def __init__(
        self, source: Tokenizer, target: Tokenizer, decoding: DecodingConfig, n_best: int | None = None
    ) -> None:
        self.source = source
        self.target = target
        self.decoding = decoding
        self.n_best = n_best or decoding.n_best

    def line(self, text: str, parts: Sequence[SourcePart], *, asked: Sequence[str] = ()) -> Translation:
        """Return the translation of a line from the search results of its parts.

        A blank line has no parts; its empty translation lacks all phrases in `asked`.
        """
        if not parts:
            return Translation(text, [Hypothesis("", 0.0, 0.0, [], [], True, unmet_constraints=list(asked) or None)], 0)
        return side_by_side(text, list(map(self._ranked, parts)), self.n_best, mean_score=self.decoding.mbr > 0)

    def _ranked(self, part: SourcePart) -> list[Hypothesis]:
        """Return the results of a part, best first: as ranked by the search, or with `mbr` the most typical first."""
        hypotheses = [self._hypothesis(part, result) for result in part.found]
        if not self.decoding.mbr:
            return hypotheses
        utilities = mean_chrf([h.text for h in hypotheses])
        scored = [replace(h, score=utility) for h, utility in zip(hypotheses, utilities, strict=True)]
        return sorted(scored, key=lambda h: (not h.finished, -h.score))

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
        """Return the text with each unknown token replaced by the source word to which it is aligned."""
        # Decoded in segments between unknown tokens, because the decoded text does not show their positions.
        words = self._words(part)
        stretches: list[str] = []
        begin = 0
        for place, token in enumerate(tokens):
            if token == self.target.unk:
                stretches += [self.target.decode(tokens[begin:place]), words[hard[place] - len(part.tag)]]
                begin = place + 1
        return one_line(join_parts(s.strip() for s in [*stretches, self.target.decode(tokens[begin:])]))

    def _words(self, part: SourcePart) -> list[str]:
        """Return, for each piece of the source, the word to which it belongs, as spelled in the source."""
        # (1) Number the words: a word starts with SentencePiece's mark, or after a piece without subword-nmt's.
        pieces = self.source.pieces(part.ids)
        spaced = any(piece.startswith(_WORD_START) for piece in pieces)
        number, numbers = -1, []
        for place, piece in enumerate(pieces):
            begins = piece.startswith(_WORD_START) if spaced else not (place and pieces[place - 1].endswith(_CONTINUES))
            number += begins or not place
            numbers.append(number)
        words = part.text.split()
        # (2) Use the words of the text. If their number differs, the text was already segmented (each of its words is a
        # piece) or normalisation changed its spaces, so join the pieces.
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

    Samples of a translation are often identical. Each ordered pair of different texts is compared once, so the time
    grows with the square of their number.
    """
    import sacrebleu  # imported here, because its import is slow and only `mbr` needs it

    metric = sacrebleu.CHRF()
    counts = Counter(texts)
    utility = {
        text: sum(count * metric.sentence_score(text, [other]).score for other, count in counts.items())
        for text in counts
    }
    return [utility[text] / len(texts) for text in texts]
