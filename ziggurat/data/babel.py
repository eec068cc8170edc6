"""Babel: a small artificial language pair, to try and test the toolkit without a download.

Low Babel (`qlo`) keeps verb and object together and has little inflection; High Babel (`qhi`) puts the verb last and
has agreement in gender, number and case. A translator must move words across a whole clause and find their forms far
away, yet every source sentence has exactly one translation. Grammar: docs/embedded-data.md.

Words and rules are constants; `seed` chooses only the sentences.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from ziggurat.data.babel_lexicon import (
    ACCUSATIVE,
    HIGH_AUXILIARY,
    HIGH_NOT,
    HIGH_OF,
    HIGH_QUESTION,
    LEXICON,
    LOW_NOT,
    LOW_OF,
    LOW_PLURAL,
    LOW_RELATIVE,
    LOW_TO,
    NOMINATIVE,
    OBLIQUE,
    PRESENT,
)
from ziggurat.data.files import write_atomically
from ziggurat.errors import DataError, is_full_disk

__all__ = ["SOURCE_LANGUAGE", "TARGET_LANGUAGE", "generate", "write_corpus"]

SOURCE_LANGUAGE = "qlo"
"""Code of Low Babel; ISO 639-2 keeps qaa to qtz for private use."""
TARGET_LANGUAGE = "qhi"
"""Code of High Babel."""

SHORTEST, LONGEST = 4, 20  # words of a source sentence


class Phrase(NamedTuple):
    """A noun phrase in both languages, with its gender and number for the agreement of verbs."""

    low: list[str]
    high: list[str]
    agreement: int  # gender * 2 + number


class _Speaker:
    """Generator of random sentences in both languages at once."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.lexicon = LEXICON

    def _noun(self, field: int, number: int, case: int) -> tuple[str, str, int]:
        noun = self.lexicon.nouns.draw(self.rng)
        gender, forms = noun.senses[field]
        return noun.low + LOW_PLURAL * number, forms[number * 3 + case], gender

    def simple(self, field: int, case: int) -> Phrase:
        """A name, a numeral with a noun, or determiner, adjectives and noun."""
        rng, kind = self.rng, self.rng.random()
        if kind < 0.25:
            name, gender = self.lexicon.names.draw(rng)
            return Phrase([name], [name], gender * 2)
        if kind < 0.35:
            numeral = str(2 + int(98 * rng.random() ** 2))
            low, high, gender = self._noun(field, 1, case)
            return Phrase([numeral, low], [high, numeral], gender * 2 + 1)
        number = int(rng.random() < 0.35)
        low, high, gender = self._noun(field, number, case)
        low_determiner, forms = self.lexicon.determiners.draw(rng)
        low_words, high_words = [low_determiner], [forms[gender][number * 3 + case], high]
        for share in (0.3, 0.15):
            if rng.random() >= share:
                break
            adjective = self.lexicon.adjectives.draw(rng)
            low_words.append(adjective.low)
            high_words.append(adjective.forms[gender * 2 + number])
        low_words.append(low)
        return Phrase(low_words, high_words, gender * 2 + number)

    def full(self, field: int, case: int) -> Phrase:
        """A noun phrase of the main clause: simple, with a possessor, or with a relative clause."""
        head, kind = self.simple(field, case), self.rng.random()
        if kind < 0.1:
            owner = self.simple(field, OBLIQUE)
            return Phrase([*head.low, LOW_OF, *owner.low], [*owner.high, HIGH_OF, *head.high], head.agreement)
        if kind < 0.25:
            low, high = self.relative(head.agreement)
            return Phrase([*head.low, ",", *low, ","], [*head.high, ",", *high, ","], head.agreement)
        return head

    def relative(self, agreement: int) -> tuple[list[str], list[str]]:
        """A relative clause without its commas; `agreement` is that of the noun it belongs to."""
        verb = self.lexicon.transitive.draw(self.rng)
        gender, number = divmod(agreement, 2)
        particle = [verb.particle] if verb.particle else []
        if self.rng.random() < 0.6:  # "who sees the dog": the verb agrees with the noun outside
            other = self.simple(verb.field, ACCUSATIVE)
            pronoun = self.lexicon.relatives[gender][number * 3 + NOMINATIVE]
            return [LOW_RELATIVE, verb.low, *other.low, *particle], [
                pronoun,
                *other.high,
                verb.forms[agreement],
            ]
        other = self.simple(verb.field, NOMINATIVE)
        pronoun = self.lexicon.relatives[gender][number * 3 + ACCUSATIVE]
        return [LOW_RELATIVE, *other.low, verb.low, *particle], [
            pronoun,
            *other.high,
            verb.forms[other.agreement],
        ]

    def sentence(self) -> tuple[list[str], list[str]]:
        """One sentence as words and commas, final sign last."""
        rng, lexicon, kind = self.rng, self.lexicon, self.rng.random()
        valency = 1 if kind < 0.25 else 2 if kind < 0.8 else 3
        verb = (lexicon.intransitive, lexicon.transitive, lexicon.ditransitive)[valency - 1].draw(rng)
        subject = self.full(verb.field, NOMINATIVE)
        low, high = [*subject.low], []
        if negated := rng.random() < 0.12:
            low.append(LOW_NOT)
        low.append(verb.low)
        if valency > 1:
            thing = self.full(verb.field, ACCUSATIVE)
            low += thing.low
            high = thing.high
        if verb.particle:
            low.append(verb.particle)
        if valency > 2:
            receiver = self.simple(verb.field, OBLIQUE)
            low += [LOW_TO, *receiver.low]
            high = [*receiver.high, *high]
        if rng.random() < 0.3:
            (preposition, postposition), place = (
                lexicon.prepositions.draw(rng),
                self.simple(verb.field, OBLIQUE),
            )
            low += [preposition, *place.low]
            high = [*place.high, postposition, *high]
        tense = PRESENT
        if rng.random() < 0.4:
            adverb = lexicon.adverbs.draw(rng)
            tense = adverb.tense
            low.append(adverb.low)
            high = [adverb.high, *high]
        high = [
            *subject.high,
            HIGH_AUXILIARY[tense][subject.agreement % 2],
            *high,
            verb.forms[subject.agreement],
        ]
        if negated:
            high.append(HIGH_NOT)
        if rng.random() < 0.15:
            return [*low, "?"], [HIGH_QUESTION, *high, "?"]
        return [*low, "."], [*high, "."]


def _written(words: list[str]) -> str:
    """Return words as text: punctuation attached, no comma before the final sign, a capital at the beginning."""
    sign = words.pop()
    text = " ".join(words).replace(" ,", ",").rstrip(",")
    return text[0].upper() + text[1:] + sign


def _stream(seed: int) -> Iterator[tuple[str, str]]:
    speaker = _Speaker(seed)
    while True:
        low, high = speaker.sentence()
        if SHORTEST <= len(low) - 1 - low.count(",") <= LONGEST:
            yield _written(low), _written(high)


def generate(pairs: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yield `pairs` sentence pairs (Low Babel, High Babel), which are the same for a `seed` on every machine.

    Sentences have 4 to 20 source words, not counting punctuation. Short ones may be repeated, as in real text.
    """
    return islice(_stream(seed), pairs)


def write_corpus(
    directory: str | Path, train: int = 20_000, dev: int = 500, test: int = 500, seed: int = 1
) -> dict[str, tuple[Path, Path]]:
    """Write `train`, `dev` and `test` pairs as aligned text files `<split>.qlo` and `<split>.qhi`.

    The sources of dev and test are all different, and none is in train. Each file appears whole or not at all.

    Returns: split name -> (source file, target file).
    Raises: DataError when `directory` cannot be written to.
    """
    stream, held_out, splits = _stream(seed), set[str](), {}
    # Training pairs last: test and dev are then the same for every size of the training set, and are left out of it.
    for split, count in (("test", test), ("dev", dev), ("train", train)):
        pairs: list[tuple[str, str]] = []
        while len(pairs) < count:
            pair = next(stream)
            if pair[0] in held_out:
                continue
            pairs.append(pair)
            if split != "train":
                held_out.add(pair[0])
        splits[split] = pairs
    directory = Path(directory)
    paths: dict[str, tuple[Path, Path]] = {}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for split in ("train", "dev", "test"):
            paths[split] = (
                directory / f"{split}.{SOURCE_LANGUAGE}",
                directory / f"{split}.{TARGET_LANGUAGE}",
            )
            for side, path in enumerate(paths[split]):
                write_atomically(path, "".join(pair[side] + "\n" for pair in splits[split]).encode())
    except OSError as error:
        if is_full_disk(error):
            raise
        raise DataError(
            f"cannot write the embedded corpus to {directory}: {error.strerror}; choose another folder"
        ) from error
    return paths
