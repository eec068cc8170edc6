"""Scores by sacreBLEU, each with the signature that says with which others it can be compared.

BLEU: Papineni et al. 2002; chrF: Popović 2015; TER: Snover et al. 2006; signatures: Post 2018; confidence intervals:
bootstrap resampling, Koehn 2004. All of them run in sacreBLEU, with its defaults, on detokenised text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

from ziggurat.config.languages import main_language
from ziggurat.evaluate.splitting import INSTALLED_BY, splitting
from ziggurat.system.errors import ConfigError, DataError

Metric = Literal["bleu", "chrf", "ter"]
METRICS: tuple[Metric, ...] = ("bleu", "chrf", "ter")
"""Names of the metrics, as sacreBLEU's command line spells them."""

BOOTSTRAP_SAMPLES = 1000
"""Number of resamplings behind a confidence interval: sacreBLEU's default."""


class MissingTokenizerError(ConfigError):
    """BLEU's tokenizer for a language is not installed; the message has the command to install it."""


@dataclass(frozen=True)
class Score:
    """One score of one test set."""

    name: str
    """Such as `BLEU`, `chrF2`, `TER`."""
    value: float
    """From 0 to 100 (TER: from 0 up, smaller is better)."""
    signature: str
    """The settings behind it; scores with different signatures must not be compared."""
    sentences: int
    """Number of lines."""
    details: str
    """sacreBLEU's further figures, such as BLEU's precisions and brevity penalty; may be empty."""
    mean: float | None = None
    """Mean over bootstrap resamplings; None where not asked for."""
    interval: float | None = None
    """Half the width of the 95 % confidence interval around `mean`; None where not asked for."""
    comparable: bool = True
    """False for scores that must not be compared with sacreBLEU's."""
    decimals: int = 1
    """Decimals to show."""

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
        tokenize: BLEU's tokenizer by sacreBLEU's name; default: by `target_language`, else by the references where
            they are written without blanks (ziggurat.evaluate.splitting), else 13a.
        lowercase: ignore case in BLEU and chrF (TER always does, as in the command).
        chrf_word_order: 2 gives chrF++.

    Raises DataError when there are no lines or unequal numbers of them, ConfigError for an unknown metric or a
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
    """Return sacreBLEU's object for a metric, made as its command makes it.

    `references` are stored in it, to score many outputs; they do not choose the tokenizer. `ter_by_character` lets TER
    take Chinese and Japanese characters one by one. The other arguments and the errors are those of `evaluate`.
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
        "ter": lambda: sacrebleu.TER(  # as the command: without regard to case
            references=references, normalized=ter_by_character, asian_support=ter_by_character
        ),
    }
    if name not in makers:
        raise ConfigError(f"unknown metric `{name}`; valid: {', '.join(METRICS)}")
    if tokenize is not None and tokenize not in sacrebleu.BLEU.TOKENIZERS:
        raise ConfigError(f"unknown tokenizer `{tokenize}`; valid: {', '.join(sacrebleu.BLEU.TOKENIZERS)}")
    try:
        return makers[name]()
    except (ImportError, RuntimeError) as error:  # in sacreBLEU, the package of a tokenizer is missing
        tokenizer = tokenize or f"{main_language(target_language or '')}-mecab"
        if tokenizer not in INSTALLED_BY:
            raise ConfigError(f"{name}: {' '.join(str(error).split())}") from None
        raise MissingTokenizerError(
            f"BLEU's tokenizer `{tokenizer}` is not installed: {INSTALLED_BY[tokenizer]}"
        ) from None


def check_lines(hypotheses: Sequence[str], references: Sequence[Sequence[str]], what: str = "hypotheses") -> None:
    """Raise DataError unless there are references, each with as many lines as `hypotheses`, at least one.

    `what` is what messages call the hypotheses, which may be the lines of a source text.
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
    resamplings = BOOTSTRAP_SAMPLES if confidence else 1
    if confidence:
        _score_in_plain_floats(metric)
    found = metric.corpus_score(list(hypotheses), [list(r) for r in references], n_bootstrap=resamplings)
    return Score(
        name=cast(str, found.name),
        value=float(found.score),
        signature=str(metric.get_signature()),
        sentences=len(hypotheses),
        details=str(found._verbose),  # no public attribute has it
        mean=float(found._mean) if confidence else None,
        interval=float(found._ci) if confidence else None,
    )


def _score_in_plain_floats(metric: Any) -> None:
    """Make `metric` return Python floats.

    sacreBLEU 2.6 resamples chrF into a mixture of numpy's float32 and, where nothing matches, Python's float;
    `statistics.mean` refuses that mixture (TypeError) on poor translations.
    """
    compute = metric._compute_score_from_stats

    def compute_plainly(statistics: Any) -> Any:
        found = compute(statistics)
        found.score = float(found.score)
        return found

    metric._compute_score_from_stats = compute_plainly
