"""Babel: a small artificial language pair for trying and testing the toolkit without a download.

Low Babel (`qlo`) keeps verb and object together and has little inflection; High Babel (`qhi`) puts the verb last and
has agreement in gender, number and case. A translator must move words across a whole clause, and their forms depend on
distant words, yet every source sentence has exactly one translation.

In the grammar `[ ]` is optional and `|` is a choice. Cases are in parentheses; if none is given, the rule that uses the
phrase determines it:

    Low Babel                                             High Babel
    sentence  = subject [ne] verb                         sentence  = [ku] subject auxiliary
                [object] [particle] [ta receiver]                     [adverb] [place postposition] [receiver]
                [preposition place] [adverb] ("." | "?")              [object] verb [nai] ("." | "?")
    full      = simple                                    full      = simple
              | simple da simple                                    | simple(oblique) zu simple
              | simple ", " relative ","                            | simple ", " relative ","
    simple    = name | numeral noun                       simple    = name | noun numeral
              | determiner [adjective [adjective]] noun             | determiner noun [adjective [adjective]]
    relative  = ke verb simple [particle]                 relative  = w-(nominative) simple(accusative) verb
              | ke simple verb [particle]                           | w-(accusative) simple(nominative) verb

- Subject (nominative) and object (accusative) are `full`; receiver and place (oblique) are `simple`. Intransitive verbs
  have no object, transitive verbs an object, ditransitive verbs an object and a receiver.
- Nouns of Low Babel have no gender and no case, and a plural in `-im`. Names end in `-o` (masculine) or `-a` (feminine)
  and are copied, as are numerals (2 to 99, before a plural noun).
- The auxiliary has tense and the number of the subject. Only the adverb marks tense in Low Babel; without one it is
  present. A question has only its mark in Low Babel, and `ku` in High Babel.
- Verb and auxiliary agree with the head of their subject. A verb in a relative clause agrees with the noun outside if
  that is its subject, otherwise with the noun inside. Adjectives agree in gender and number, determiners also in case.
- Every third transitive verb has three unrelated meanings: alone, with `ul` and with `eb`.
- Ten nouns are homographs with two translations; the field of their clause's verb decides between them.
- There is no comma before the final mark, and the first letter is a capital. Sentences have 4 to 20 Low Babel words,
  which are drawn by the Zipf-Mandelbrot law, p ~ 1 / (rank + 2.7), among words of their kind.

Words and rules are constants; `seed` chooses only the sentences. The module first defines the words (endings of the two
languages, and a lexicon invented from their sounds), then the sentences.
"""

from __future__ import annotations

import itertools
import random
from bisect import bisect
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from ziggurat.system.errors import DataError, is_full_disk
from ziggurat.system.files import write_atomically

_LEXICON_SEED = 20_000  # determines the invented words: another seed is another language pair

MASCULINE, FEMININE, NEUTER = range(3)
NOMINATIVE, ACCUSATIVE, OBLIQUE = range(3)
PAST, PRESENT, FUTURE = range(3)

# Low Babel: "who/which", "of", "to", "not"; the particles that change a verb's meaning; the mark of the plural.
LOW_RELATIVE, LOW_OF, LOW_TO, LOW_NOT = "ke", "da", "ta", "ne"
_LOW_PARTICLES = ("ul", "eb")
_LOW_PLURAL = "im"
# High Babel: opening of a question, "not", mark of a possessor; auxiliary by tense, then number.
HIGH_QUESTION, HIGH_NOT, HIGH_OF = "ku", "nai", "zu"
HIGH_AUXILIARY = (("vo", "von"), ("sha", "shan"), ("mei", "mein"))
# Endings by gender. Nouns and determiners: number * 3 + case. Adjectives and verbs: number.
_NOUN_ENDINGS = (
    ("o", "on", "or", "i", "in", "ir"),
    ("a", "an", "ar", "ei", "ein", "eir"),
    ("u", "u", "ur", "ou", "ou", "our"),
)
DETERMINER_ENDINGS = (
    ("e", "en", "er", "es", "ens", "ers"),
    ("a", "an", "ar", "as", "ans", "ars"),
    ("o", "o", "or", "os", "os", "ors"),
)
_ADJECTIVE_ENDINGS = (("el", "eli"), ("al", "ali"), ("ol", "oli"))
_VERB_ENDINGS = (("ek", "ekim"), ("ak", "akim"), ("ok", "okim"))
DETERMINERS = (("ma", "th"), ("su", "kr"), ("po", "br"), ("vi", "zh"))
_RELATIVE_STEM = "w"

# Syllables: onsets, vowels, codas. The two languages share letters, as real pairs do.
_LOW_SOUNDS = (list("bdgklmnprstv"), list("aeiou"), ["", "", "n", "l", "r", "s"])
_HIGH_SOUNDS = (
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
        # Only with `rng.random()`: its stream is the same in all versions of Python, unlike that of choice().
        return self.items[bisect(self._bounds, rng.random())]


class _Coiner:
    """Generator of words that differ from all other words of both languages."""

    def __init__(self, taken: set[str]) -> None:
        self.rng = random.Random(_LEXICON_SEED)
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
        return self.word(_LOW_SOUNDS, 2, ("", *endings))

    def high(self, table: Sequence[Sequence[str]], syllables: int = 1) -> tuple[str, ...]:
        """Invent a High Babel stem; return all its forms, row by row."""
        endings = [ending for row in table for ending in row]
        stem = self.word(_HIGH_SOUNDS, syllables, endings)
        return tuple(stem + ending for ending in endings)

    def noun(self) -> Noun:
        """Invent a High Babel noun, whose gender does not show in Low Babel."""
        gender = int(self.rng.random() * 3)
        return Noun(gender, self.high([_NOUN_ENDINGS[gender]], 1))

    def verbs(self, count: int, phrasal_every: int = 0) -> Ranked[Verb]:
        """Invent `count` verbs; every `phrasal_every`-th has another meaning with each particle."""
        verbs: list[Verb] = []
        for rank in range(count):
            low, field = self.low(), rank % 2
            phrasal = _LOW_PARTICLES if phrasal_every and rank % phrasal_every == 0 else ()
            verbs += (Verb(low, particle, field, self.high(_VERB_ENDINGS)) for particle in ("", *phrasal))
        return Ranked(verbs)


class BabelLexicon:
    """All words of the pair. Every tenth noun is a homograph; transitive verbs may be phrasal."""

    def __init__(self) -> None:
        determiner_forms = {stem + e for _, stem in DETERMINERS for row in DETERMINER_ENDINGS for e in row}
        coin = _Coiner(
            {LOW_RELATIVE, LOW_OF, LOW_TO, LOW_NOT, *_LOW_PARTICLES, *(low for low, _ in DETERMINERS)}
            | {HIGH_QUESTION, HIGH_NOT, HIGH_OF, *(form for row in HIGH_AUXILIARY for form in row)}
            | {_RELATIVE_STEM + e for row in DETERMINER_ENDINGS for e in row}
            | determiner_forms
        )
        nouns = []
        for rank in range(100):
            low, noun = coin.low(_LOW_PLURAL), coin.noun()
            nouns.append(Homograph(low, (noun, coin.noun() if rank % 10 == 3 else noun)))
        self.nouns = Ranked(nouns)
        self.adjectives = Ranked([Adjective(coin.low(), coin.high(_ADJECTIVE_ENDINGS)) for _ in range(36)])
        self.determiners = Ranked(
            [(low, tuple(tuple(stem + e for e in row) for row in DETERMINER_ENDINGS)) for low, stem in DETERMINERS]
        )
        self.relatives = tuple(tuple(_RELATIVE_STEM + e for e in row) for row in DETERMINER_ENDINGS)
        self.intransitive = coin.verbs(14)
        self.transitive = coin.verbs(26, phrasal_every=3)
        self.ditransitive = coin.verbs(8)
        self.prepositions = Ranked([(coin.low(), coin.high([[""]])[0]) for _ in range(6)])
        self.adverbs = Ranked([Adverb(coin.low(), coin.high([[""]])[0], rank % 3) for rank in range(12)])
        vowels = ("o", "a")  # by gender, which shows in names but not in nouns
        names = [(coin.word((*_LOW_SOUNDS[:2], ["n" + vowels[rank % 2]]), 2, ("",)), rank % 2) for rank in range(150)]
        self.names = Ranked([(name.capitalize(), gender) for name, gender in names])


LEXICON = BabelLexicon()


SOURCE_LANGUAGE = "qlo"
"""Code of Low Babel; ISO 639-2 keeps qaa to qtz for private use."""
TARGET_LANGUAGE = "qhi"

SHORTEST, LONGEST = 4, 20  # words of a source sentence


class AlignedPair(NamedTuple):
    """A sentence pair with its gold alignment, as numbers of (source word, target word) from 0.

    Words are those of ziggurat.data.aligner.split_words: punctuation counts.
    """

    low: str
    high: str
    sure: set[tuple[int, int]]
    """Links between words with the same meaning; a verb's particle has the meaning of its verb."""
    possible: set[tuple[int, int]]
    """Further links: the auxiliary with the verb it serves and with the adverb of its tense, the opening of a question
    with its sign."""


class _Word(str):
    """A word with its meaning; words of the two languages that share a meaning are linked.

    Attributes:
        meaning: number of its meaning; -1: no word of the other language has its meaning.
        loosely: meanings to which it contributes.
    """

    meaning = -1
    loosely: tuple[int, ...] = ()

    @classmethod
    def of(cls, text: str, meaning: int = -1, *loosely: int) -> _Word:
        """Return a word with these meanings."""
        word = cls(text)
        word.meaning, word.loosely = meaning, loosely
        return word


class Phrase(NamedTuple):
    """A noun phrase in both languages, with its gender and number for the agreement of verbs."""

    low: list[_Word]
    high: list[_Word]
    agreement: int  # gender * 2 + number


class _Speaker:
    """Generator of random sentences in both languages at once."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.lexicon = LEXICON
        self._meanings = itertools.count()

    def _both(self, low: str, high: str) -> tuple[_Word, _Word]:
        """Return two words with the same meaning."""
        meaning = next(self._meanings)
        return _Word.of(low, meaning), _Word.of(high, meaning)

    def _noun(self, field: int, number: int, case: int) -> tuple[_Word, _Word, int]:
        noun = self.lexicon.nouns.draw(self.rng)
        gender, forms = noun.senses[field]
        return *self._both(noun.low + _LOW_PLURAL * number, forms[number * 3 + case]), gender

    def _verb(self, verb: Verb, agreement: int) -> tuple[_Word, list[_Word], _Word]:
        """Return the Low Babel verb, its particle, if any, in a list, and the High Babel verb."""
        low, high = self._both(verb.low, verb.forms[agreement])
        return low, [_Word.of(verb.particle, low.meaning)] if verb.particle else [], high

    def simple(self, field: int, case: int) -> Phrase:
        """A name, a numeral with a noun, or determiner, adjectives and noun."""
        rng, kind = self.rng, self.rng.random()
        if kind < 0.25:
            name, gender = self.lexicon.names.draw(rng)
            named = self._both(name, name)
            return Phrase([named[0]], [named[1]], gender * 2)
        if kind < 0.35:
            digits = str(2 + int(98 * rng.random() ** 2))
            numerals = self._both(digits, digits)
            low, high, gender = self._noun(field, 1, case)
            return Phrase([numerals[0], low], [high, numerals[1]], gender * 2 + 1)
        number = int(rng.random() < 0.35)
        low, high, gender = self._noun(field, number, case)
        low_determiner, forms = self.lexicon.determiners.draw(rng)
        determiners = self._both(low_determiner, forms[gender][number * 3 + case])
        low_words, high_words = [determiners[0]], [determiners[1], high]
        for share in (0.3, 0.15):
            if rng.random() >= share:
                break
            adjective = self.lexicon.adjectives.draw(rng)
            adjectives = self._both(adjective.low, adjective.forms[gender * 2 + number])
            low_words.append(adjectives[0])
            high_words.append(adjectives[1])
        low_words.append(low)
        return Phrase(low_words, high_words, gender * 2 + number)

    def full(self, field: int, case: int) -> Phrase:
        """A noun phrase of the main clause: simple, with a possessor, or with a relative clause."""
        head, kind = self.simple(field, case), self.rng.random()
        if kind < 0.1:
            owner = self.simple(field, OBLIQUE)
            of = self._both(LOW_OF, HIGH_OF)
            return Phrase([*head.low, of[0], *owner.low], [*owner.high, of[1], *head.high], head.agreement)
        if kind < 0.25:
            low, high = self.relative(head.agreement)
            begin, end = self._both(",", ","), self._both(",", ",")
            return Phrase([*head.low, begin[0], *low, end[0]], [*head.high, begin[1], *high, end[1]], head.agreement)
        return head

    def relative(self, agreement: int) -> tuple[list[_Word], list[_Word]]:
        """A relative clause without its commas; `agreement` is that of the noun it belongs to."""
        verb = self.lexicon.transitive.draw(self.rng)
        gender, number = divmod(agreement, 2)
        of_subject = self.rng.random() < 0.6  # "who sees the dog": the verb agrees with the noun outside
        other = self.simple(verb.field, ACCUSATIVE if of_subject else NOMINATIVE)
        case = NOMINATIVE if of_subject else ACCUSATIVE
        who = self._both(LOW_RELATIVE, self.lexicon.relatives[gender][number * 3 + case])
        low, particle, high = self._verb(verb, agreement if of_subject else other.agreement)
        said = [low, *other.low] if of_subject else [*other.low, low]
        return [who[0], *said, *particle], [who[1], *other.high, high]

    def sentence(self) -> tuple[list[_Word], list[_Word]]:
        """One sentence as words and commas, final sign last."""
        rng, lexicon, kind = self.rng, self.lexicon, self.rng.random()
        valency = 1 if kind < 0.25 else 2 if kind < 0.8 else 3
        verb = (lexicon.intransitive, lexicon.transitive, lexicon.ditransitive)[valency - 1].draw(rng)
        subject = self.full(verb.field, NOMINATIVE)
        low_verb, particle, high_verb = self._verb(verb, subject.agreement)
        low, high, end = [*subject.low], list[_Word](), [high_verb]
        if rng.random() < 0.12:
            no = self._both(LOW_NOT, HIGH_NOT)
            low.append(no[0])
            end.append(no[1])
        low.append(low_verb)
        if valency > 1:
            thing = self.full(verb.field, ACCUSATIVE)
            low += thing.low
            high = thing.high
        low += particle
        if valency > 2:
            receiver = self.simple(verb.field, OBLIQUE)
            low += [_Word.of(LOW_TO), *receiver.low]
            high = [*receiver.high, *high]
        if rng.random() < 0.3:
            positions, place = self._both(*lexicon.prepositions.draw(rng)), self.simple(verb.field, OBLIQUE)
            low += [positions[0], *place.low]
            high = [*place.high, positions[1], *high]
        tense, told = PRESENT, [low_verb.meaning]
        if rng.random() < 0.4:
            adverb = lexicon.adverbs.draw(rng)
            tense, adverbs = adverb.tense, self._both(adverb.low, adverb.high)
            told.append(adverbs[0].meaning)
            low.append(adverbs[0])
            high = [adverbs[1], *high]
        auxiliary = _Word.of(HIGH_AUXILIARY[tense][subject.agreement % 2], -1, *told)
        high = [*subject.high, auxiliary, *high, *end]
        if rng.random() < 0.15:
            signs = self._both("?", "?")
            return [*low, signs[0]], [_Word.of(HIGH_QUESTION, -1, signs[0].meaning), *high, signs[1]]
        stops = self._both(".", ".")
        return [*low, stops[0]], [*high, stops[1]]


def _aligned(low: list[_Word], high: list[_Word]) -> AlignedPair:
    """Return both sides as text, with their links."""
    # There is no comma before the final sign.
    sides = [[*(words[:-2] if words[-2] == "," else words[:-1]), words[-1]] for words in (low, high)]
    places: dict[int, list[int]] = {word.meaning: [] for word in sides[0]}
    for place, word in enumerate(sides[0]):
        places[word.meaning].append(place)
    sure, possible = set[tuple[int, int]](), set[tuple[int, int]]()
    for place, word in enumerate(sides[1]):
        sure |= {(other, place) for other in places.get(word.meaning, ()) if word.meaning >= 0}
        possible |= {(other, place) for meaning in word.loosely for other in places[meaning]}
    return AlignedPair(_written(sides[0]), _written(sides[1]), sure, possible)


def _written(words: list[_Word]) -> str:
    """Return words as text, with punctuation attached and a capital at the start."""
    text = " ".join(words[:-1]).replace(" ,", ",")
    return text[0].upper() + text[1:] + words[-1]


_COMMA = _Word(",")


def _stream(seed: int) -> Iterator[AlignedPair]:
    speaker = _Speaker(seed)
    while True:
        low, high = speaker.sentence()
        if SHORTEST <= len(low) - 1 - low.count(_COMMA) <= LONGEST:
            yield _aligned(low, high)


def generate_aligned(pairs: int, seed: int) -> Iterator[AlignedPair]:
    """Yield the pairs of `generate`, each with its gold alignment."""
    return itertools.islice(_stream(seed), pairs)


def generate(pairs: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yield `pairs` sentence pairs (Low Babel, High Babel), which are the same for a `seed` on every machine.

    Sentences have 4 to 20 source words, not counting punctuation. Short ones may be repeated, as in real text.
    """
    return ((pair.low, pair.high) for pair in generate_aligned(pairs, seed))


def write_corpus(
    directory: str | Path, train: int = 20_000, dev: int = 500, test: int = 500, seed: int = 1
) -> dict[str, tuple[Path, Path]]:
    """Write `train`, `dev` and `test` pairs as aligned text files `<split>.qlo` and `<split>.qhi`; return both, by
    split.

    The sources of dev and test are all different, and none is in train. Each file appears whole or not at all. Raises
    DataError if `directory` cannot be written to.
    """
    stream, held_out, splits = _stream(seed), set[str](), {}
    # Training pairs come last, so that test and dev are the same for every size of the training set and not part of it.
    for split, count in (("test", test), ("dev", dev), ("train", train)):
        pairs: list[tuple[str, str]] = []
        while len(pairs) < count:
            low, high, *_ = next(stream)
            if low in held_out:
                continue
            pairs.append((low, high))
            if split != "train":
                held_out.add(low)
        splits[split] = pairs
    directory = Path(directory)
    paths = {
        split: (directory / f"{split}.{SOURCE_LANGUAGE}", directory / f"{split}.{TARGET_LANGUAGE}")
        for split in ("train", "dev", "test")
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for split, files in paths.items():
            for side, path in enumerate(files):
                write_atomically(path, "".join(pair[side] + "\n" for pair in splits[split]).encode())
    except OSError as error:
        if is_full_disk(error):
            raise
        raise DataError(
            f"cannot write the embedded corpus to {directory}: {error.strerror}; choose another folder"
        ) from error
    return paths
