"""What a request wants of the translations of its texts, and what it gets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ziggurat.serve.asking import Recorded
from ziggurat.serve.queue import SearchOptions
from ziggurat.serve.text.glossary import Tally, Terms
from ziggurat.serve.text.markup import Rules, html, xml
from ziggurat.serve.text.paragraphs import AlignedText, aligned_text
from ziggurat.serve.text.sentences import Options
from ziggurat.serve.text.work import Outcome, Work


@dataclass(frozen=True)
class Wanted:
    """Wishes of a request beside the best translations.

    Attributes:
        markup: the rules of its tags; None: plain text.
        more: further translations of each text; none of markup.
        alignments: links between the words of text and translation.
        scores: the log-probability of each token.
        prefix: what the translation must begin with; of one sentence.
        complete: the prefix ends with a whole word.
        next_words: further translations differ in the word after the prefix; of one sentence.
        terms: a glossary.
        split: whether text ends a sentence at the ends of `lines`, too, only where `sentences` end, or never (`none`).
    """

    markup: Rules | None = None
    more: int = 0
    alignments: bool = False
    scores: bool = False
    prefix: str = ""
    complete: bool = False
    next_words: bool = False
    terms: Terms | None = None
    split: Literal["lines", "sentences", "none"] = "lines"

    @property
    def begun(self) -> bool:
        """Whether it is about one sentence and how its translation begins."""
        return bool(self.prefix) or self.next_words

    @property
    def options(self) -> SearchOptions:
        """The options of its sentences."""
        return SearchOptions(
            n_best=self.more + 1,
            # Hard terms are put back by the alignment where a translation has lost them.
            alignments=self.alignments or self.markup is not None or (self.terms is not None and self.terms.hard),
            scores=self.scores,
            prefixed=bool(self.prefix),
            complete=self.complete and bool(self.prefix),
            next_words=self.next_words,
        )


@dataclass(frozen=True)
class TextTranslation:
    """The translation of a text.

    Attributes:
        source: the text.
        best: the translation; of markup without sentences.
        others: further ones, none like the best or like each other.
        ranks: which of its sentences' translations, from 1, each of `others` is made of.
        recorded: the translations of its sentences; None: it is in the target language already.
        tally: what came of the glossary.
    """

    source: str
    best: AlignedText
    others: list[AlignedText] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    recorded: Recorded | None = None
    tally: Tally = field(default_factory=Tally)


def work_of(text: str, options: Options, wanted: Wanted) -> Work[AlignedText]:
    """Return the work of translating a text; of markup the result has no sentences."""
    if wanted.markup is None:
        outcome: Outcome[AlignedText] = yield from aligned_text(text, options, lines=wanted.split == "lines")
        return outcome.value
    marked = yield from (xml if wanted.markup.xml else html)(text, options, wanted.markup)
    return AlignedText(marked.value, [], [])
