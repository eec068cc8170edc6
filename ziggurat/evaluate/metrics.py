"""Metrics by name: sacreBLEU's (ziggurat.evaluate.scores), METEOR, COMET, and perplexity.

METEOR (Lavie and Agarwal 2007) is nltk's, with nltk's parameters: the mean over sentences. It is not METEOR 1.5, the
Java program behind most papers, which has parameters for each language and paraphrases, and sums counts over the test
set. Compare only equal signatures, which name the kinds of matches.

COMET (Rei et al. 2020, 2022) runs in a separate Python environment, because unbabel-comet pins versions of packages
that conflict with ours: its Python runs comet_program.py, reads the sentences as JSON and writes the scores back.
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
"""Trained on human judgements up to 2021; needs a reference. Apache-2.0."""

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
"""Model, by its name at huggingface.co -> licence."""

_PROGRAM = Path(__file__).with_name("comet_program.py")
_PROTOCOL = 1


@dataclass(frozen=True)
class CometEnvironment:
    """The environment that COMET runs in, and its options."""

    python: str
    """Python of an environment with unbabel-comet."""
    model: str = DEFAULT_MODEL
    """Name at huggingface.co, or the path of a checkpoint file."""
    batch_size: int = 16
    """Sentences in a batch."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, or `auto`: a GPU where there is one."""
    say: Callable[[str], None] = print
    """Takes a message with the model and its licence before anything is downloaded."""


class Comet(MeanMetric):
    """COMET as unbabel-comet reports it: the mean over sentences, about 0 to 1 for most models.

    Of several references only the first is used.
    """

    name = "COMET"
    decimals = 4

    def __init__(
        self, references: Sequence[Sequence[str]], sources: Sequence[str], environment: CometEnvironment
    ) -> None:
        """`sources` are the lines of the source text. Raises ConfigError where the Python does not exist."""
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

        Raises ConfigError, with the program's message, when the scores are not complete.
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
        """Return the signature; its version is known after sentences were scored."""
        return MeanSignature({"nrefs": 1, "model": self._environment.model}, self._version)

    def _ask(self, samples: list[dict[str, str]]) -> tuple[list[float], str]:
        """Return one score for each sample, and COMET's version."""
        environment = self._environment
        licence = LICENCES.get(environment.model, f"see https://huggingface.co/{environment.model}")
        if Path(environment.model).is_file():
            licence = "of the file's origin"
        environment.say(f"COMET: model {environment.model}, licence {licence}; downloaded unless it is there already")
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
            # -I keeps our PYTHONPATH and the program's folder out of sys.path, where they would hide its packages.
            command = [environment.python, "-I", str(_PROGRAM), str(asked), str(answered)]
            # Our standard output is for results; the program's output goes to standard error.
            ended = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2, check=False)
            return _answer(answered, len(samples), environment.python, ended.returncode)


def _answer(path: Path, expected: int, python: str, status: int) -> tuple[list[float], str]:
    """Return scores and version from the program's answer. Raises ConfigError where they are not complete."""
    who = f"COMET by {printable(python, 4096)}"
    try:
        answer: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ConfigError(f"{who}: ended with status {status} and without an answer; see its messages above") from None
    if not isinstance(answer, dict) or answer.get("protocol") != _PROTOCOL:
        raise ConfigError(f"{who}: an answer in another protocol than {_PROTOCOL}")
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
"""CHRF_WORDS is chrF with pairs of words beside characters (Popović 2017)."""
OTHER_NAMES = {"chrf2": "chrf", "chrf2++": _CHRF_WORDS, "chrfpp": _CHRF_WORDS, "ppl": "perplexity"}
"""OTHER_NAMES is what signatures and other programs call a metric -> its name here."""
ALL_METRICS: tuple[str, ...] = (*METRICS, _CHRF_WORDS, "meteor", "comet")


def check_metrics(names: Sequence[str]) -> None:
    """Raise ConfigError unless there are `names`, all of known metrics."""
    if not names:
        raise ConfigError(f"no metric is named; valid: {', '.join(ALL_METRICS)}")
    if unknown := [name for name in names if name not in ALL_METRICS]:
        raise ConfigError(f"unknown metric `{unknown[0]}`; valid: {', '.join(ALL_METRICS)}")


@dataclass(frozen=True)
class TestSet:
    """The texts that outputs are scored against, and the settings of scoring."""

    __test__ = False  # pytest takes a class of this name for tests

    references: Sequence[Sequence[str]]
    """One list of lines per reference translation."""
    sources: Sequence[str] | None = None
    """The source text; COMET needs it."""
    target_language: str | None = None
    """Code such as `en`: chooses BLEU's tokenizer where a language needs its own, and METEOR's stemmer."""
    tokenize: str | None = None
    """BLEU's and METEOR's tokenizer by sacreBLEU's name; None: by the language, else by the text, else 13a."""
    lowercase: bool = False
    """Ignore case in BLEU and chrF (TER and METEOR always do)."""
    split: Splitting | None = None
    """The splitting of another test set, whose scores are to be compared; None: that of these references."""

    @property
    def splitting(self) -> Splitting:
        """The splitting of lines into words by BLEU, METEOR and TER."""
        return self.split or splitting(self.references, self.target_language, self.tokenize)

    def metric(self, name: str, comet: CometEnvironment | None = None) -> SegmentMetric:
        """Return the metric of this name, with these references.

        Raises ConfigError for an unknown name, a missing package, and where COMET lacks its Python or the source text.
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
    """Return nltk's stemmer for a language, and its name; a stemmer that does nothing, and None, where it has none."""
    from nltk.stem import PorterStemmer, SnowballStemmer

    if code == "en":
        return PorterStemmer(), "porter"
    if code in _SNOWBALL:
        return SnowballStemmer(_SNOWBALL[code]), f"snowball-{_SNOWBALL[code]}"
    return SimpleNamespace(stem=lambda word: word), None


def _wordnet(code: str) -> tuple[Any, bool]:
    """Return WordNet and True for English, where its data is installed; otherwise an empty one and False."""
    if code == "en":
        from nltk.corpus import wordnet

        with contextlib.suppress(LookupError):
            wordnet.ensure_loaded()
            return wordnet, True
    return SimpleNamespace(synsets=lambda word: []), False


@dataclass(frozen=True)
class Likelihood:
    """The probability that a model gives a text, line by line given the source."""

    log_probability: float
    """Of all lines: natural logarithm, summed in float64."""
    tokens: int
    """Pieces of all lines, with one end-of-sentence for each line."""
    sentences: int
    """Lines."""

    @classmethod
    def of(cls, tokens: Iterable[Sequence[float]]) -> Self:
        """Return that of lines, each given by the log-probabilities of its tokens, end-of-sentence included."""
        lines = list(tokens)
        return cls(math.fsum(value for line in lines for value in line), sum(map(len, lines)), len(lines))

    @property
    def perplexity(self) -> float:
        """exp(-log_probability / tokens); inf where that is too large for a float. Raises DataError without a line."""
        if not self.tokens:
            raise DataError("perplexity: there is no line")
        try:
            return math.exp(-self.log_probability / self.tokens)
        except OverflowError:
            return math.inf

    def line(self) -> str:
        """Return all figures in words."""
        return (
            f"{self.sentences:,} lines, {self.tokens:,} tokens (pieces and ends of sentences): log-probability "
            f"{self.log_probability:.4f}, perplexity {self.perplexity:.4f} per token"
        )

    def score(self, vocabulary: Iterable[str]) -> Score:
        """Return the perplexity as a score, whose signature has a mark of the `vocabulary`: pieces are its unit."""
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
