"""The words of Babel: endings of its two languages, and a lexicon invented from their sounds.

docs/embedded-data.md describes the languages; ziggurat.data.babel makes the sentences.
"""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

LEXICON_SEED = 20_000  # determines the invented words: another seed is another language pair

MASCULINE, FEMININE, NEUTER = range(3)
NOMINATIVE, ACCUSATIVE, OBLIQUE = range(3)
PAST, PRESENT, FUTURE = range(3)

# Low Babel: "who/which", "of", "to", "not"; the particles that change a verb's meaning; the mark of the plural.
LOW_RELATIVE, LOW_OF, LOW_TO, LOW_NOT = "ke", "da", "ta", "ne"
LOW_PARTICLES = ("ul", "eb")
LOW_PLURAL = "im"
# High Babel: opening of a question, "not", mark of a possessor; auxiliary by tense, then number.
HIGH_QUESTION, HIGH_NOT, HIGH_OF = "ku", "nai", "zu"
HIGH_AUXILIARY = (("vo", "von"), ("sha", "shan"), ("mei", "mein"))
# Endings by gender. Nouns and determiners: number * 3 + case. Adjectives and verbs: number.
NOUN_ENDINGS = (
    ("o", "on", "or", "i", "in", "ir"),
    ("a", "an", "ar", "ei", "ein", "eir"),
    ("u", "u", "ur", "ou", "ou", "our"),
)
DETERMINER_ENDINGS = (
    ("e", "en", "er", "es", "ens", "ers"),
    ("a", "an", "ar", "as", "ans", "ars"),
    ("o", "o", "or", "os", "os", "ors"),
)
ADJECTIVE_ENDINGS = (("el", "eli"), ("al", "ali"), ("ol", "oli"))
VERB_ENDINGS = (("ek", "ekim"), ("ak", "akim"), ("ok", "okim"))
DETERMINERS = (("ma", "th"), ("su", "kr"), ("po", "br"), ("vi", "zh"))
RELATIVE_STEM = "w"

# Syllables: onsets, vowels, codas. The two languages share letters, as real pairs do.
LOW_SOUNDS = (list("bdgklmnprstv"), list("aeiou"), ["", "", "n", "l", "r", "s"])
HIGH_SOUNDS = (
    ["br", "dr", "f", "gr", "h", "kr", "n", "sh", "sk", "st", "t", "th", "tr", "v", "y", "z", "zh"],
    ["a", "e", "i", "o", "u", "ai", "ou"],
    ["f", "l", "m", "n", "r", "sk", "sh", "th", "z"],
)

Item = TypeVar("Item")


class Noun(NamedTuple):
    """A High Babel noun: its gender and its six forms by number and case (`number * 3 + case`)."""

    gender: int
    forms: tuple[str, ...]


class Homograph(NamedTuple):
    """A Low Babel noun and its two translations, chosen by the verb's field; for ordinary nouns they are the same."""

    low: str
    senses: tuple[Noun, Noun]


class Adjective(NamedTuple):
    """A Low Babel adjective and its six High Babel forms (`gender * 2 + number`)."""

    low: str
    forms: tuple[str, ...]


class Verb(NamedTuple):
    """A Low Babel verb and its six High Babel forms (`gender * 2 + number`)."""

    low: str
    particle: str  # "" for none
    field: int  # 0 or 1: decides the meaning of homographs in its clause
    forms: tuple[str, ...]


class Adverb(NamedTuple):
    """A time adverb in both languages, the only mark of tense in Low Babel."""

    low: str
    high: str
    tense: int


class Ranked(Generic[Item]):
    """Words in order of frequency, drawn by the Zipf-Mandelbrot law: probability ~ 1 / (rank + 2.7)."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = tuple(items)
        weights = list(accumulate(1 / (rank + 2.7) for rank in range(len(self.items))))
        self._bounds = [weight / weights[-1] for weight in weights[:-1]]

    def draw(self, rng: random.Random) -> Item:
        """Draw one item."""
        # By `rng.random()` alone: Python keeps its stream the same in all versions, which it does not for choice().
        return self.items[bisect(self._bounds, rng.random())]


class _Coiner:
    """Generator of words that differ from all other words of both languages."""

    def __init__(self, taken: set[str]) -> None:
        self.rng = random.Random(LEXICON_SEED)
        self.taken = taken

    def _pick(self, options: Sequence[str]) -> str:
        return options[int(self.rng.random() * len(options))]

    def word(self, sounds: tuple[list[str], ...], syllables: int, endings: Sequence[str]) -> str:
        """Invent a stem whose forms with `endings` are all new; only the last syllable has a coda."""
        onsets, vowels, codas = sounds
        while True:
            stem = "".join(self._pick(onsets) + self._pick(vowels) for _ in range(syllables)) + self._pick(codas)
            forms = {stem + ending for ending in endings}
            if not forms & self.taken:
                self.taken |= forms
                return stem

    def low(self, *endings: str) -> str:
        """Invent a Low Babel word of two syllables."""
        return self.word(LOW_SOUNDS, 2, ("", *endings))

    def high(self, table: Sequence[Sequence[str]], syllables: int = 1) -> tuple[str, ...]:
        """Invent a High Babel stem; return all its forms, row by row."""
        endings = [ending for row in table for ending in row]
        stem = self.word(HIGH_SOUNDS, syllables, endings)
        return tuple(stem + ending for ending in endings)

    def noun(self) -> Noun:
        """Invent a High Babel noun, whose gender does not show in Low Babel."""
        gender = int(self.rng.random() * 3)
        return Noun(gender, self.high([NOUN_ENDINGS[gender]], 1))

    def verbs(self, count: int, phrasal_every: int = 0) -> Ranked[Verb]:
        """Invent `count` verbs; every `phrasal_every`-th has another meaning with each particle."""
        verbs: list[Verb] = []
        for rank in range(count):
            low, field = self.low(), rank % 2
            phrasal = LOW_PARTICLES if phrasal_every and rank % phrasal_every == 0 else ()
            verbs += (Verb(low, particle, field, self.high(VERB_ENDINGS)) for particle in ("", *phrasal))
        return Ranked(verbs)


class Lexicon:
    """All words of the pair. Every tenth noun is a homograph; transitive verbs may be phrasal."""

    def __init__(self) -> None:
        determiner_forms = {stem + e for _, stem in DETERMINERS for row in DETERMINER_ENDINGS for e in row}
        coin = _Coiner(
            {LOW_RELATIVE, LOW_OF, LOW_TO, LOW_NOT, *LOW_PARTICLES, *(low for low, _ in DETERMINERS)}
            | {HIGH_QUESTION, HIGH_NOT, HIGH_OF, *(form for row in HIGH_AUXILIARY for form in row)}
            | {RELATIVE_STEM + e for row in DETERMINER_ENDINGS for e in row}
            | determiner_forms
        )
        nouns = []
        for rank in range(100):
            low, noun = coin.low(LOW_PLURAL), coin.noun()
            nouns.append(Homograph(low, (noun, coin.noun() if rank % 10 == 3 else noun)))
        self.nouns = Ranked(nouns)
        self.adjectives = Ranked([Adjective(coin.low(), coin.high(ADJECTIVE_ENDINGS)) for _ in range(36)])
        self.determiners = Ranked(
            [(low, tuple(tuple(stem + e for e in row) for row in DETERMINER_ENDINGS)) for low, stem in DETERMINERS]
        )
        self.relatives = tuple(tuple(RELATIVE_STEM + e for e in row) for row in DETERMINER_ENDINGS)
        self.intransitive = coin.verbs(14)
        self.transitive = coin.verbs(26, phrasal_every=3)
        self.ditransitive = coin.verbs(8)
        self.prepositions = Ranked([(coin.low(), coin.high([[""]])[0]) for _ in range(6)])
        self.adverbs = Ranked([Adverb(coin.low(), coin.high([[""]])[0], rank % 3) for rank in range(12)])
        vowels = ("o", "a")  # by gender: it shows in names, unlike in nouns
        names = [(coin.word((*LOW_SOUNDS[:2], ["n" + vowels[rank % 2]]), 2, ("",)), rank % 2) for rank in range(150)]
        self.names = Ranked([(name.capitalize(), gender) for name, gender in names])


LEXICON = Lexicon()
