"""Scores by sacreBLEU, each with the signature that shows with which others it can be compared.

BLEU: Papineni et al. 2002; chrF: Popović 2015; TER: Snover et al. 2006; signatures: Post 2018; confidence intervals:
bootstrap resampling, Koehn 2004. All of them run in sacreBLEU, with its defaults, on detokenised text.

A metric's statistics are one row of numbers per sentence. Their sum over a test set, or over any part or resampling of
it, gives the score of that part. The numbers are n-gram counts for BLEU and chrF, edits and lengths for TER, and for
metrics that are means over sentences the sentence's score and the number 1.

BLEU on tokenised text, which many papers report, is not comparable with sacreBLEU's, as its signature shows. Both of
its forms correspond to multi-bleu.perl on text tokenised like Moses' tokenizer.perl (sacremoses). Compound-split BLEU
also follows tensor2tensor's utils/get_ende_bleu.sh for English-German, after Luong et al. 2015: Unicode punctuation is
replaced (replace-unicode-punctuation.perl), and after tokenisation each hyphen between two non-space characters becomes
a token, "rich-text" -> "rich ##AT##-##AT## text". The parts of a compound then match one by one, which raises the
score.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal, cast

import numpy as np

from ziggurat.config.languages import main_language
from ziggurat.evaluate.tokenisation import INSTALLED_BY, splitting
from ziggurat.system.errors import ConfigError, DataError, printable

Metric = Literal["bleu", "chrf", "ter"]
METRICS: tuple[Metric, ...] = ("bleu", "chrf", "ter")
"""METRICS are the names of the metrics, as on sacreBLEU's command line."""

_BOOTSTRAP_SAMPLES = 1000
"""_BOOTSTRAP_SAMPLES is the number of resamplings for a confidence interval: sacreBLEU's default."""


class MissingTokenizerError(ConfigError):
    """BLEU's tokenizer for a language is not installed; the message has the command to install it."""


@dataclass(frozen=True)
class Score:
    """One score of one test set."""

    name: str
    """Name of the metric, such as `BLEU`, `chrF2`, `TER`."""
    value: float
    """Value from 0 to 100 (TER: from 0 up, smaller is better)."""
    signature: str
    """The settings of the score; scores with different signatures must not be compared."""
    sentences: int
    """Number of lines."""
    details: str
    """sacreBLEU's further figures, such as BLEU's precisions and brevity penalty; may be empty."""
    mean: float | None = None
    """Mean over bootstrap resamplings; None if not requested."""
    interval: float | None = None
    """Half the width of the 95 % confidence interval around `mean`; None if not requested."""
    comparable: bool = True
    """False for scores that must not be compared with sacreBLEU's."""
    decimals: int = 1
    """Number of decimals to show."""

    def __str__(self) -> str:
        n = self.decimals
        confidence = f" (μ = {self.mean:.{n}f} ± {self.interval:.{n}f})" if self.mean is not None else ""
        return f"{self.name}|{self.signature} = {self.value:.{n}f}{confidence} {self.details}".rstrip()

    def as_record(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return asdict(self)


def evaluate(
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    *,
    metrics: Sequence[Metric] = METRICS,
    confidence: bool = False,
    target_language: str | None = None,
    tokenize: str | None = None,
    lowercase: bool = False,
    chrf_word_order: int = 0,
) -> list[Score]:
    """Return the score of each of `metrics`, in that order, equal to the scores of the `sacrebleu` command.

    Args:
        hypotheses: detokenised translations, one per line of the test set.
        references: one list of lines per reference translation, each as long as `hypotheses`.
        metrics: any of METRICS.
        confidence: also give 95 % confidence intervals (bootstrap, 1,000 resamplings, sacreBLEU's seed).
        target_language: chooses BLEU's tokenizer for languages that need their own (zh, ja, ko).
        tokenize: BLEU's tokenizer by sacreBLEU's name; default: chosen by `target_language`, or by the references if
            they are written without spaces (ziggurat.evaluate.tokenisation), otherwise 13a.
        lowercase: ignore case in BLEU and chrF (TER always does, as in sacreBLEU's command).
        chrf_word_order: 2 gives chrF++.

    Raises DataError if there are no lines or unequal numbers of them, ConfigError for an unknown metric or a
    tokenizer that is unknown or not installed.
    """
    check_lines(hypotheses, references)
    how = splitting(references, target_language, tokenize)
    scores = []
    for name in metrics:
        metric = sacrebleu_metric(
            name,
            tokenize=how.bleu,
            ter_by_character=how.ter_by_character,
            lowercase=lowercase,
            chrf_word_order=chrf_word_order,
        )
        scores.append(corpus_score(metric, hypotheses, references, confidence=confidence))
    return scores


def sacrebleu_metric(
    name: Metric,
    *,
    target_language: str | None = None,
    tokenize: str | None = None,
    ter_by_character: bool = False,
    lowercase: bool = False,
    chrf_word_order: int = 0,
    references: Sequence[Sequence[str]] | None = None,
) -> Any:
    """Return sacreBLEU's object for a metric, created as in its command.

    `references` are stored in it, to score many outputs; they do not choose the tokenizer. `ter_by_character` makes TER
    treat Chinese and Japanese characters one by one. The other arguments and the errors are those of `evaluate`.
    """
    import sacrebleu

    makers: dict[str, Callable[[], Any]] = {
        "bleu": lambda: sacrebleu.BLEU(
            lowercase=lowercase,
            tokenize=tokenize,
            trg_lang=main_language(target_language or ""),
            references=references,
        ),
        "chrf": lambda: sacrebleu.CHRF(lowercase=lowercase, word_order=chrf_word_order, references=references),
        "ter": lambda: sacrebleu.TER(  # ignores case, as the command does
            references=references, normalized=ter_by_character, asian_support=ter_by_character
        ),
    }
    if name not in makers:
        raise ConfigError(f"unknown metric `{name}`; valid: {', '.join(METRICS)}")
    if tokenize is not None and tokenize not in sacrebleu.BLEU.TOKENIZERS:
        raise ConfigError(f"unknown tokenizer `{tokenize}`; valid: {', '.join(sacrebleu.BLEU.TOKENIZERS)}")
    try:
        return makers[name]()
    except (OSError, SystemExit) as error:  # sacreBLEU ends the program if a certificate is not accepted
        said = printable(str(getattr(error, "reason", error)), 120)
        raise ConfigError(
            f"BLEU's tokenizer `{tokenize}` needs a model that could not be downloaded ({said}): score once where "
            "there is a network, and copy ~/.sacrebleu from there; or use a tokenizer that needs none, such as `char`"
        ) from None
    except (ImportError, RuntimeError) as error:  # raised in sacreBLEU if the package of a tokenizer is missing
        tokenizer = tokenize or f"{main_language(target_language or '')}-mecab"
        if tokenizer not in INSTALLED_BY:
            raise ConfigError(f"{name}: {' '.join(str(error).split())}") from None
        raise MissingTokenizerError(
            f"BLEU's tokenizer `{tokenizer}` is not installed: {INSTALLED_BY[tokenizer]}"
        ) from None


def check_lines(hypotheses: Sequence[str], references: Sequence[Sequence[str]], what: str = "hypotheses") -> None:
    """Raise DataError unless there are references, each with as many lines as `hypotheses`, at least one.

    Messages call the hypotheses `what`; they may be the lines of a source text.
    """
    if isinstance(hypotheses, str) or not references or any(isinstance(r, str) for r in references):
        raise DataError(f"needs a list of lines as {what}, and a list of lists of lines as references")
    for number, reference in enumerate(references, start=1):
        if len(reference) != len(hypotheses):
            which = f"reference {number}" if len(references) > 1 else "the reference"
            raise DataError(
                f"unequal numbers of lines: {len(hypotheses)} of {what}, {len(reference)} of {which}; they must pair up"
            )
    if not hypotheses:
        raise DataError(f"nothing to score: 0 lines in {what} and references")


def corpus_score(
    metric: Any, hypotheses: Sequence[str], references: Sequence[Sequence[str]], *, confidence: bool
) -> Score:
    """Return the score by a sacreBLEU `metric` object, for lines that passed check_lines."""
    resamplings = _BOOTSTRAP_SAMPLES if confidence else 1
    if confidence:
        _score_in_plain_floats(metric)
    found = metric.corpus_score(list(hypotheses), [list(r) for r in references], n_bootstrap=resamplings)
    return Score(
        name=cast(str, found.name),
        value=float(found.score),
        signature=str(metric.get_signature()),
        sentences=len(hypotheses),
        details=str(found._verbose),  # not available as a public attribute
        mean=float(found._mean) if confidence else None,
        interval=float(found._ci) if confidence else None,
    )


def _score_in_plain_floats(metric: Any) -> None:
    """Make `metric` return Python floats.

    sacreBLEU 2.6 resamples chrF into a mixture of numpy's float32 and, if nothing matches, Python's float; on poor
    translations `statistics.mean` rejects that mixture (TypeError).
    """
    compute = metric._compute_score_from_stats

    def compute_plainly(statistics: Any) -> Any:
        found = compute(statistics)
        found.score = float(found.score)
        return found

    metric._compute_score_from_stats = compute_plainly


Statistics = list[list[float]]
"""[sentences, numbers]"""


class SegmentMetric(ABC):
    """A metric together with its references."""

    higher_is_better = True
    decimals = 2
    """Number of decimals to show in tables."""

    @abstractmethod
    def statistics(self, outputs: Sequence[Sequence[str]]) -> list[Statistics]:
        """Return the statistics of each of `outputs`, each a list with one line per sentence of the test set."""

    @abstractmethod
    def from_sums(self, sums: Sequence[float]) -> Any:
        """Return sacreBLEU's Score (`name`, `score`) from statistics summed over sentences."""

    @abstractmethod
    def signature(self) -> Any:
        """Return a new sacreBLEU Signature, or an object with its `update` and `str()`."""


class SacrebleuMetric(SegmentMetric):
    """BLEU, chrF or TER by sacreBLEU."""

    def __init__(self, name: Metric, references: Sequence[Sequence[str]], **options: Any) -> None:
        """`references`, `options` and errors are those of `sacrebleu_metric`."""
        self.higher_is_better = name != "ter"
        self.metric = sacrebleu_metric(name, references=references, **options)

    def statistics(self, outputs: Sequence[Sequence[str]]) -> list[Statistics]:
        """Return the statistics of each of `outputs`."""
        return [self.metric._extract_corpus_statistics(list(lines), None) for lines in outputs]

    def from_sums(self, sums: Sequence[float]) -> Any:
        """Return sacreBLEU's score."""
        return self.metric._compute_score_from_stats(sums)

    def signature(self) -> Any:
        """Return sacreBLEU's signature."""
        return self.metric.get_signature()


class MeanSignature:
    """Signature in the form of sacreBLEU's, for other metrics."""

    def __init__(self, entries: dict[str, object], version: str) -> None:
        """`version` is that of the program, such as `nltk-3.9`; it comes last."""
        self._entries = entries
        self._version = version

    def update(self, key: str, value: object) -> None:
        """Add or change an entry."""
        self._entries[key] = value

    def __str__(self) -> str:
        return "|".join([*(f"{key}:{value}" for key, value in self._entries.items()), f"version:{self._version}"])


class MeanMetric(SegmentMetric):
    """A metric whose score of a test set is the mean over sentences."""

    name: str

    @abstractmethod
    def sentence_scores(self, outputs: Sequence[Sequence[str]]) -> list[list[float]]:
        """Return the score of each line of each of `outputs`."""

    def statistics(self, outputs: Sequence[Sequence[str]]) -> list[Statistics]:
        """Return [score, 1] for each sentence: the sums give the mean."""
        return [[[score, 1.0] for score in scores] for scores in self.sentence_scores(outputs)]

    def from_sums(self, sums: Sequence[float]) -> Any:
        """Return the mean."""
        from sacrebleu.metrics.base import Score as SacrebleuScore

        return SacrebleuScore(self.name, float(sums[0]) / float(sums[1]))


def add_up(statistics: Statistics) -> list[float]:
    """Return the sum of the rows, in sacreBLEU's order: floats must round as they do there."""
    from sacrebleu import utils

    total: Any = utils.sum_of_lists  # without type annotations
    return cast(list[float], total(statistics))


def scored(metric: SegmentMetric, output: Sequence[str], *, confidence: bool) -> Score:
    """Return the score of one output, with sacreBLEU's bootstrap interval if `confidence`."""
    from sacrebleu import significance

    resample: Any = significance._bootstrap_resample  # typed for sacreBLEU's metrics, but needs no more than this
    resampled_metric = SimpleNamespace(_compute_score_from_stats=metric.from_sums)
    (statistics,) = metric.statistics([output])
    score, signature = metric.from_sums(add_up(statistics)), metric.signature()
    mean = interval = None
    if confidence:
        seed, resampled = resample(statistics, resampled_metric, _BOOTSTRAP_SAMPLES)
        mean, interval = (
            float(value) for value in significance.estimate_ci(np.array([found.score for found in resampled]))
        )
        signature.update("bs", _BOOTSTRAP_SAMPLES)
        signature.update("seed", seed)
    value, decimals = float(score.score), metric.decimals
    return Score(score.name, value, str(signature), len(output), "", mean, interval, decimals=decimals)


# Words


class BleuWords:
    """Splits lines into the words that BLEU counts, with sacreBLEU's tokenizers."""

    def __init__(
        self, *, target_language: str | None = None, tokenize: str | None = None, lowercase: bool = False
    ) -> None:
        """Arguments and errors are those of ziggurat.evaluate.scores.evaluate."""
        metric = sacrebleu_metric("bleu", target_language=target_language, tokenize=tokenize, lowercase=lowercase)
        self._tokenizer = metric.tokenizer
        self._lowercase = lowercase
        self.name = str(metric.tokenizer_signature)
        """sacreBLEU's name for the tokenizer."""

    def __call__(self, line: str) -> list[str]:
        """Return the words of a line."""
        line = line.rstrip()
        return str(self._tokenizer(line.lower() if self._lowercase else line)).split()

    def counts(self, lines: Iterable[str]) -> Counter[str]:
        """Return the number of occurrences of each word in `lines`, which is read lazily."""
        found: Counter[str] = Counter()
        for line in lines:
            found.update(self(line))
        return found


_COMPOUND = re.compile(r"(\S)-(\S)")
_UNSPACED = ("ja", "ko", "zh", "cjk")  # sacremoses handles them without a list of abbreviations


def tokenised_bleu(
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    *,
    language: str,
    confidence: bool = False,
    lowercase: bool = False,
) -> Score:
    """Return BLEU on both sides tokenised with Moses' rules for `language` (a code such as `de`).

    The texts and errors are those of ziggurat.evaluate.scores.evaluate; check_language adds errors.
    """
    tokenise, version = _moses(language)
    label = f"tok:moses-{language}"
    return _bleu("tokenised BLEU", label, version, tokenise, hypotheses, references, confidence, lowercase)


def compound_split_bleu(
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    *,
    language: str = "de",
    confidence: bool = False,
    lowercase: bool = False,
) -> Score:
    """Return tokenised BLEU with Unicode punctuation replaced and hyphenated compounds split, on both sides.

    For reproducing published English-German scores. Arguments and errors are those of tokenised_bleu.
    """
    tokenise, version = _moses(language)
    replace_punctuation = _punctuation_replacer()

    def prepare(text: str) -> str:
        return split_compounds(tokenise(replace_punctuation(text)))

    label = f"tok:moses-{language}+unicode-punctuation+compound-split"
    return _bleu("compound-split BLEU", label, version, prepare, hypotheses, references, confidence, lowercase)


def check_language(language: str) -> None:
    """Raise ConfigError if Moses' tokeniser has no rules for `language`, or sacremoses is not installed.

    sacremoses would silently use the English rules.
    """
    try:
        from sacremoses.corpus import NonbreakingPrefixes
    except ImportError:
        raise ConfigError(
            "tokenised and compound-split BLEU need sacremoses: pip install 'ziggurat-mt[tokenised]'"
        ) from None
    known = {*NonbreakingPrefixes().available_langs.values(), *_UNSPACED}
    if language not in known:
        listed = ", ".join(sorted(known))
        raise ConfigError(f"Moses' tokeniser has no rules for language {printable(repr(language))}; it knows {listed}")


def split_compounds(tokenised: str) -> str:
    """Return the line with each hyphen between two non-space characters as a separate token, `##AT##-##AT##`.

    As in the original, matches do not overlap: the second hyphen of "a-b-c" is kept, but not that of "one-to-one".
    """
    return _COMPOUND.sub(r"\1 ##AT##-##AT## \2", tokenised)


def _bleu(
    name: str,
    label: str,
    version: str,
    prepare: Callable[[str], str],
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    confidence: bool,
    lowercase: bool,
) -> Score:
    """Return multi-bleu's score of prepared lines, with a name and signature that distinguish it from sacreBLEU's."""
    import sacrebleu

    check_lines(hypotheses, references)
    # No smoothing, as in multi-bleu.perl. `force` suppresses the warning about tokenised text.
    metric = sacrebleu.BLEU(lowercase=lowercase, tokenize="none", smooth_method="none", force=True)
    score = corpus_score(
        metric,
        [prepare(line) for line in hypotheses],
        [[prepare(line) for line in reference] for reference in references],
        confidence=confidence,
    )
    signature = f"NOT-comparable-with-sacreBLEU|{score.signature.replace('tok:none', label)}|sacremoses:{version}"
    return replace(score, name=name, signature=signature, comparable=False)


def _moses(language: str) -> tuple[Callable[[str], str], str]:
    """Return Moses' tokeniser as a function of a line, and the version of sacremoses."""
    check_language(language)
    from importlib.metadata import version

    import sacremoses

    tokenizer = sacremoses.MosesTokenizer(lang=language)

    def tokenise(text: str) -> str:
        return str(tokenizer.tokenize(text, return_str=True))

    return tokenise, version("sacremoses")


def _punctuation_replacer() -> Callable[[str], str]:
    """Return replace-unicode-punctuation.perl as a function of a line."""
    from sacremoses import MosesPunctNormalizer

    normalizer = MosesPunctNormalizer()

    def replace_punctuation(text: str) -> str:
        return str(normalizer.replace_unicode_punct(text))

    return replace_punctuation
