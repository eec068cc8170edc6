"""Metrics by name: sacreBLEU's (ziggurat.evaluate.scores), METEOR, COMET, and perplexity.

METEOR (Lavie and Agarwal 2007) is nltk's, with nltk's parameters: the mean over sentences. It is not METEOR 1.5, the
Java program used in most papers, which has paraphrases and parameters for each language, and sums counts over the test
set. Compare only scores with equal signatures, which name the kinds of matches.

COMET (Rei et al. 2020, 2022) runs in a separate Python environment, because unbabel-comet pins package versions that
conflict with ziggurat's: its Python runs comet_program.py, reads the sentences as JSON and writes the scores back.
"""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, cast

import xxhash

from ziggurat import __version__
from ziggurat.config.languages import main_language
from ziggurat.evaluate.scores import (
    METRICS,
    BleuWords,
    MeanMetric,
    MeanSignature,
    Metric,
    SacrebleuMetric,
    Score,
    SegmentMetric,
    check_lines,
)
from ziggurat.evaluate.tokenisation import Splitting, splitting
from ziggurat.system.errors import ConfigError, DataError, printable

DEFAULT_MODEL = "Unbabel/wmt22-comet-da"
"""DEFAULT_MODEL was trained on human judgements up to 2021 and needs a reference. Apache-2.0."""

_NON_COMMERCIAL = "CC-BY-NC-SA-4.0, not for commercial use"
LICENCES = {
    "Unbabel/wmt20-comet-da": "Apache-2.0",
    DEFAULT_MODEL: "Apache-2.0",
    "Unbabel/wmt22-cometkiwi-da": _NON_COMMERCIAL,
    "Unbabel/wmt23-cometkiwi-da-xl": _NON_COMMERCIAL,
    "Unbabel/wmt23-cometkiwi-da-xxl": _NON_COMMERCIAL,
    "Unbabel/XCOMET-XL": _NON_COMMERCIAL,
    "Unbabel/XCOMET-XXL": _NON_COMMERCIAL,
}
"""LICENCES maps a model's name at huggingface.co to its licence."""

_PROGRAM = Path(__file__).with_name("comet_program.py")
_PROTOCOL = 1


@dataclass(frozen=True)
class CometEnvironment:
    """The environment in which COMET runs, and its options."""

    python: str
    """Python executable of an environment with unbabel-comet."""
    model: str = DEFAULT_MODEL
    """Name at huggingface.co, or the path of a checkpoint file."""
    batch_size: int = 16
    """Number of sentences in a batch."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, or `auto`: a GPU if there is one."""
    say: Callable[[str], None] = print
    """Receives a message with the model and its licence before anything is downloaded."""


class Comet(MeanMetric):
    """COMET as unbabel-comet reports it: the mean over sentences, about 0 to 1 for most models.

    Only the first of several references is used.
    """

    name = "COMET"
    decimals = 4

    def __init__(
        self, references: Sequence[Sequence[str]], sources: Sequence[str], environment: CometEnvironment
    ) -> None:
        """`sources` are the lines of the source text. Raises ConfigError if the Python executable does not exist."""
        from shutil import which

        if which(environment.python) is None:
            raise ConfigError(
                f"{printable(environment.python, 4096)}: no such program; COMET needs the Python of a separate "
                "environment: python3 -m venv comet-env && comet-env/bin/pip install unbabel-comet"
            )
        check_lines(sources, references, "the source text")
        self._references, self._sources, self._environment = references, sources, environment
        self._version = "comet-unknown"

    def sentence_scores(self, outputs: Sequence[Sequence[str]]) -> list[list[float]]:
        """Return the score of each line of each of `outputs`; the model is loaded once for all.

        Raises ConfigError, with the program's message, if scores are missing.
        """
        for lines in outputs:
            check_lines(lines, self._references)
        samples = [
            {"src": source, "mt": line, "ref": reference}
            for lines in outputs
            for source, line, reference in zip(self._sources, lines, self._references[0], strict=True)
        ]
        scores, self._version = self._ask(samples)
        size = len(self._sources)
        return [scores[start : start + size] for start in range(0, len(scores), size)]

    def signature(self) -> MeanSignature:
        """Return the signature, whose version is known after sentences have been scored."""
        return MeanSignature({"nrefs": 1, "model": self._environment.model}, self._version)

    def _ask(self, samples: list[dict[str, str]]) -> tuple[list[float], str]:
        """Return one score for each sample, and COMET's version."""
        environment = self._environment
        licence = LICENCES.get(environment.model, f"see https://huggingface.co/{environment.model}")
        if Path(environment.model).is_file():
            licence = "of the file's origin"
        environment.say(f"COMET: model {environment.model}, licence {licence}; downloaded if missing")
        with tempfile.TemporaryDirectory(prefix="ziggurat-comet-") as folder:
            asked, answered = Path(folder, "request.json"), Path(folder, "answer.json")
            request = {
                "protocol": _PROTOCOL,
                "model": environment.model,
                "batch_size": environment.batch_size,
                "device": environment.device,
                "samples": samples,
            }
            asked.write_text(json.dumps(request), encoding="utf-8")
            # -I keeps this process's PYTHONPATH and the program's folder out of sys.path, where they would hide the
            # environment's packages.
            command = [environment.python, "-I", str(_PROGRAM), str(asked), str(answered)]
            # Standard output is for results, so the program's output goes to standard error.
            ended = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2, check=False)
            return _answer(answered, len(samples), environment.python, ended.returncode)


def _answer(path: Path, expected: int, python: str, status: int) -> tuple[list[float], str]:
    """Return scores and version from the program's answer. Raises ConfigError if they are incomplete."""
    who = f"COMET with {printable(python, 4096)}"
    try:
        answer: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ConfigError(f"{who}: ended with status {status} and without an answer; see its messages above") from None
    if not isinstance(answer, dict) or answer.get("protocol") != _PROTOCOL:
        raise ConfigError(f"{who}: the answer's protocol is not {_PROTOCOL}")
    if "error" in answer:
        raise ConfigError(f"{who}: {printable(str(answer['error']), 500)}")
    scores = answer.get("scores")
    if (
        not isinstance(scores, list)
        or len(scores) != expected
        or not all(isinstance(score, float) and -1e6 < score < 1e6 for score in scores)  # False for NaN
    ):
        raise ConfigError(f"{who}: expected {expected} scores, one per sentence, and got something else")
    return scores, f"comet-{answer.get('version', 'unknown')}"


_CHRF_WORDS = "chrf++"
"""_CHRF_WORDS is chrF with word pairs in addition to characters (Popović 2017)."""
OTHER_NAMES = {"chrf2": "chrf", "chrf2++": _CHRF_WORDS, "chrfpp": _CHRF_WORDS, "ppl": "perplexity"}
"""OTHER_NAMES maps the name of a metric in signatures and other programs to its name here."""
ALL_METRICS: tuple[str, ...] = (*METRICS, _CHRF_WORDS, "meteor", "comet")


def check_metrics(names: Sequence[str]) -> None:
    """Raise ConfigError unless `names` has at least one name and all are known metrics."""
    if not names:
        raise ConfigError(f"no metric is named; valid: {', '.join(ALL_METRICS)}")
    if unknown := [name for name in names if name not in ALL_METRICS]:
        raise ConfigError(f"unknown metric `{unknown[0]}`; valid: {', '.join(ALL_METRICS)}")


@dataclass(frozen=True)
class TestSet:
    """The texts against which outputs are scored, and the scoring settings."""

    __test__ = False  # pytest would collect a class of this name as tests

    references: Sequence[Sequence[str]]
    """One list of lines per reference translation."""
    sources: Sequence[str] | None = None
    """The source text; COMET needs it."""
    target_language: str | None = None
    """Code such as `en`, which chooses BLEU's tokenizer for languages that need a special one, and METEOR's stemmer."""
    tokenize: str | None = None
    """BLEU's and METEOR's tokenizer by sacreBLEU's name; None: chosen by the language or the text, by default 13a."""
    lowercase: bool = False
    """Ignore case in BLEU and chrF (TER and METEOR always do)."""
    split: Splitting | None = None
    """The splitting of another test set whose scores will be compared; None: that of these references."""

    @property
    def splitting(self) -> Splitting:
        """The splitting of lines into words by BLEU, METEOR and TER."""
        return self.split or splitting(self.references, self.target_language, self.tokenize)

    def metric(self, name: str, comet: CometEnvironment | None = None) -> SegmentMetric:
        """Return the metric of this name, with these references.

        Raises ConfigError for an unknown name or a missing package, or if COMET lacks its Python or the source text.
        """
        check_metrics([name])
        if name == "meteor":
            return Meteor(self.references, target_language=self.target_language, tokenize=self.splitting.bleu)
        if name == "comet":
            if comet is None:
                raise ConfigError("COMET runs in a separate environment: name its Python (docs/evaluate.md)")
            if self.sources is None:
                raise ConfigError("COMET needs the source text (`--source FILE`)")
            return Comet(self.references, self.sources, comet)
        return SacrebleuMetric(
            "chrf" if name == _CHRF_WORDS else cast(Metric, name),
            self.references,
            tokenize=self.splitting.bleu,
            ter_by_character=self.splitting.ter_by_character,
            lowercase=self.lowercase,
            chrf_word_order=2 if name == _CHRF_WORDS else 0,
        )


_SNOWBALL = {  # nltk's stemmers by language code; English uses the default, Porter
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
    """METEOR from 0 to 100, ignoring case; the best of several references counts, for each sentence.

    Equal words match first, then words with equal stems (in languages with a stemmer in nltk), then synonyms (in
    English, if WordNet's data is installed).
    """

    name = "METEOR"

    def __init__(
        self, references: Sequence[Sequence[str]], *, target_language: str | None, tokenize: str | None = None
    ) -> None:
        """`target_language` is a code such as `en`, which chooses the stemmer; None: words must be equal.

        Raises ConfigError if nltk is not installed, and the errors of Words.
        """
        try:
            import nltk
        except ImportError:
            raise ConfigError("METEOR needs nltk: pip install 'ziggurat-mt[meteor]'") from None
        self._words = BleuWords(target_language=target_language, tokenize=tokenize)
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


def _stemmer(code: str) -> tuple[Any, str | None]:
    """Return nltk's stemmer for a language, and its name; if there is none, a stemmer that does nothing, and None."""
    from nltk.stem import PorterStemmer, SnowballStemmer

    if code == "en":
        return PorterStemmer(), "porter"
    if code in _SNOWBALL:
        return SnowballStemmer(_SNOWBALL[code]), f"snowball-{_SNOWBALL[code]}"
    return SimpleNamespace(stem=lambda word: word), None


def _wordnet(code: str) -> tuple[Any, bool]:
    """Return WordNet and True for English if its data is installed; otherwise an empty one and False."""
    if code == "en":
        from nltk.corpus import wordnet

        with contextlib.suppress(LookupError):
            wordnet.ensure_loaded()
            return wordnet, True
    return SimpleNamespace(synsets=lambda word: []), False


@dataclass(frozen=True)
class Likelihood:
    """The probability that a model assigns to a text, line by line given the source."""

    log_probability: float
    """Log-probability of all lines: natural logarithm, summed in float64."""
    tokens: int
    """Number of pieces in all lines, with one end-of-sentence for each line."""
    sentences: int
    """Lines."""

    @classmethod
    def of(cls, tokens: Iterable[Sequence[float]]) -> Self:
        """Return the likelihood of lines, given the log-probabilities of their tokens, including end-of-sentence."""
        lines = list(tokens)
        return cls(math.fsum(value for line in lines for value in line), sum(map(len, lines)), len(lines))

    @property
    def perplexity(self) -> float:
        """exp(-log_probability / tokens); inf if that is too large for a float. Raises DataError without lines."""
        if not self.tokens:
            raise DataError("perplexity: there are no lines")
        try:
            return math.exp(-self.log_probability / self.tokens)
        except OverflowError:
            return math.inf

    def line(self) -> str:
        """Return a sentence with all figures."""
        return (
            f"{self.sentences:,} lines, {self.tokens:,} tokens (pieces and ends of sentences): log-probability "
            f"{self.log_probability:.4f}, perplexity {self.perplexity:.4f} per token"
        )

    def score(self, vocabulary: Iterable[str]) -> Score:
        """Return the perplexity as a score; its signature identifies the `vocabulary`, whose pieces are its unit."""
        mark = xxhash.xxh3_64_hexdigest("\n".join(vocabulary).encode())[:8]
        return Score(
            name="perplexity",
            value=self.perplexity,
            signature=f"unit:piece|eos:yes|vocabulary:{mark}|version:{__version__}",
            sentences=self.sentences,
            details=f"(log-probability = {self.log_probability:.4f} tokens = {self.tokens})",
            comparable=False,
            decimals=4,
        )
