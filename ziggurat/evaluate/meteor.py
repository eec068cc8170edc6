"""METEOR by nltk: the mean over sentences; the signature names the kinds of matches.

Lavie and Agarwal 2007 with nltk's parameters. It is not METEOR 1.5, the Java program behind most papers, which has
parameters for each language and paraphrases, and sums counts over the test set. Compare only equal signatures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ziggurat.config.languages import main_language
from ziggurat.evaluate.scores import MeanMetric, MeanSignature, Words, check_lines
from ziggurat.system.errors import ConfigError

_SNOWBALL = {  # of nltk, by language code; English has Porter's stemmer, nltk's default
    "ar": "arabic",
    "da": "danish",
    "de": "german",
    "es": "spanish",
    "fi": "finnish",
    "fr": "french",
    "hu": "hungarian",
    "it": "italian",
    "nl": "dutch",
    "no": "norwegian",
    "pt": "portuguese",
    "ro": "romanian",
    "ru": "russian",
    "sv": "swedish",
}


class Meteor(MeanMetric):
    """METEOR from 0 to 100, ignoring case; of several references the best one counts, for each sentence.

    Equal words match first, then words with equal stems (in languages with a stemmer in nltk), then synonyms (in
    English, where WordNet's data is installed).
    """

    name = "METEOR"

    def __init__(
        self, references: Sequence[Sequence[str]], *, target_language: str | None, tokenize: str | None = None
    ) -> None:
        """`target_language` is a code such as `en`, which chooses the stemmer; None: words must be equal.

        Raises ConfigError when nltk is not installed, and the errors of Words.
        """
        try:
            import nltk
        except ImportError:
            raise ConfigError("METEOR needs nltk: pip install 'ziggurat-mt[meteor]'") from None
        self._words = Words(target_language=target_language, tokenize=tokenize)
        self._references = [[self._words(line) for line in reference] for reference in references]
        self._raw = references
        code = main_language(target_language or "")
        self._stemmer, stemmer = _stemmer(code)
        self._wordnet, with_wordnet = _wordnet(code)
        matches = ["exact", *(["stem"] if stemmer else []), *(["wordnet"] if with_wordnet else [])]
        self._entries = {
            "nrefs": len(references),
            "case": "lc",
            "tok": self._words.name,
            "match": "+".join(matches),
            **({"stem": stemmer} if stemmer else {}),
            "alpha": 0.9,
            "beta": 3.0,
            "gamma": 0.5,
            "mean": "sentences",
        }
        self._version = f"nltk-{nltk.__version__}"

    def sentence_scores(self, outputs: Sequence[Sequence[str]]) -> list[list[float]]:
        """Return the score of each line of each of `outputs`."""
        from nltk.translate.meteor_score import meteor_score

        scores = []
        for lines in outputs:
            check_lines(lines, self._raw)
            scores.append(
                [
                    100.0 * meteor_score(references, self._words(line), stemmer=self._stemmer, wordnet=self._wordnet)
                    for line, *references in zip(lines, *self._references, strict=True)
                ]
            )
        return scores

    def signature(self) -> MeanSignature:
        """Return the signature, with the kinds of matches."""
        return MeanSignature(dict(self._entries), self._version)


class _NoStems:
    """Stemmer that leaves words as they are."""

    def stem(self, word: str) -> str:
        return word


class _NoSynonyms:
    """WordNet without entries."""

    def synsets(self, word: str) -> list[Any]:
        return []


def _stemmer(code: str) -> tuple[Any, str | None]:
    """Return nltk's stemmer for a language, and its name; a stemmer that does nothing, and None, where it has none."""
    from nltk.stem import PorterStemmer, SnowballStemmer

    if code == "en":
        return PorterStemmer(), "porter"
    if code in _SNOWBALL:
        return SnowballStemmer(_SNOWBALL[code]), f"snowball-{_SNOWBALL[code]}"
    return _NoStems(), None


def _wordnet(code: str) -> tuple[Any, bool]:
    """Return WordNet and True for English, where its data is installed; otherwise an empty one and False."""
    if code == "en":
        from nltk.corpus import wordnet

        try:
            wordnet.ensure_loaded()
        except LookupError:
            return _NoSynonyms(), False
        return wordnet, True
    return _NoSynonyms(), False
