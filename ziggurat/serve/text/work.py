"""Works: text that is to be translated, as generators which ask for translations of sentences and are sent them.

Nothing in this package calls a translator. A work yields a list of sentences, is sent back their translations in the
same order, may ask again (a retry, a fall-back), and returns its outcome. So one caller can translate sentence by
sentence (`run`), and a server can put the sentences of many requests into one search.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeAlias, TypeVar

Result = TypeVar("Result")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Sentence:
    """A sentence to be translated; it has at least one letter, and no white space at its ends."""

    text: str


class Link(NamedTuple):
    """A stretch of the source and the stretch of its translation that says the same; ends are exclusive."""

    source_start: int
    source_end: int
    target_start: int
    target_end: int


@dataclass(frozen=True)
class Rendered:
    """The translation of a sentence.

    Attributes:
        text: the translation.
        links: which characters of the sentence became which of `text`, the surest first where two disagree; None:
            not known.
    """

    text: str
    links: Sequence[Link] | None = None


@dataclass(frozen=True)
class Outcome(Generic[Value]):
    """What a work returns.

    Attributes:
        value: the translated text or document.
        notices: what was not translated in the ordinary way, by kind (docs/documents.md).
    """

    value: Value
    notices: Counter[str] = field(default_factory=Counter)


Work: TypeAlias = Generator[list[Sentence], list[Rendered], Result]
"""A generator that yields sentences, is sent their translations, and returns its result."""


def run(work: Work[Result], translate: Callable[[list[Sentence]], list[Rendered]]) -> Result:
    """Return the result of `work`, whose sentences `translate` translates, one Rendered for each, in order."""
    try:
        asked = next(work)
        while True:
            asked = work.send(translate(asked))
    except StopIteration as ended:
        result: Result = ended.value
        return result


def together(works: Sequence[Work[Result]]) -> Work[list[Result]]:
    """Return several works as one, which asks for the sentences of all at once; its result is the list of theirs."""
    results: dict[int, Result] = {}
    answers: dict[int, list[Rendered]] | None = None  # None: the works have not begun
    while True:
        asked: dict[int, list[Sentence]] = {}
        for place in range(len(works)) if answers is None else answers:
            try:
                asked[place] = next(works[place]) if answers is None else works[place].send(answers[place])
            except StopIteration as ended:
                results[place] = ended.value
        if not asked:
            return [results[place] for place in range(len(works))]
        rendered = yield [sentence for sentences in asked.values() for sentence in sentences]
        answers, begin = {}, 0
        for place, sentences in asked.items():
            answers[place] = rendered[begin : begin + len(sentences)]
            begin += len(sentences)
