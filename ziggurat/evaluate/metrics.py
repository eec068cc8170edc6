"""All metrics by name: sacreBLEU's, METEOR, COMET."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ziggurat.evaluate.scores import METRICS, Metric, SacrebleuMetric, SegmentMetric
from ziggurat.evaluate.splitting import Splitting, splitting
from ziggurat.system.errors import ConfigError

if TYPE_CHECKING:
    from ziggurat.evaluate.comet import CometEnvironment

ALL_METRICS: tuple[str, ...] = (*METRICS, "meteor", "comet")


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
            from ziggurat.evaluate.meteor import Meteor

            return Meteor(self.references, target_language=self.target_language, tokenize=self.splitting.bleu)
        if name == "comet":
            from ziggurat.evaluate.comet import Comet

            if comet is None:
                raise ConfigError("COMET runs in a separate environment: give its Python (`--comet-python`)")
            if self.sources is None:
                raise ConfigError("COMET needs the source text (`--source FILE`)")
            return Comet(self.references, self.sources, comet)
        return SacrebleuMetric(
            cast(Metric, name),
            self.references,
            tokenize=self.splitting.bleu,
            ter_by_character=self.splitting.ter_by_character,
            lowercase=self.lowercase,
        )
