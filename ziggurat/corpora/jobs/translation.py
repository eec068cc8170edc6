"""Translation and scoring of lines as tasks of a job (ziggurat.corpora.jobs.text)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ziggurat.corpora.jobs.models import ModelChoice, opened
from ziggurat.corpora.jobs.text import Line
from ziggurat.system.errors import ConfigError
from ziggurat.translate.lines import Notices, TranslationWarning
from ziggurat.translate.results import Translation
from ziggurat.translate.served import ServedTranslator
from ziggurat.translate.terminology import read_constraints


@dataclass(frozen=True)
class Translating:
    """Translation of lines; all lines of a shard are one window, so the result does not depend on other shards.

    Attributes:
        choice: the models.
        form: of the output (ziggurat.translate.results.Translation); `best`: the text of the best translation alone,
            whatever `n_best` is.
        tag: tag for every line, or None.
        beside: what stands beside the lines, in this order: `prefixes`, `constraints` (separated by tabs).
        terminology: source terms and their translations.
    """

    choice: ModelChoice
    form: Literal["text", "best", "quality", "json"] = "text"
    tag: str | None = None
    beside: tuple[str, ...] = ()
    terminology: Mapping[str, str] | None = field(default=None, hash=False)

    def check(self) -> None:
        """Raise ConfigError for what the engine or the model does not have; opens the models in this process."""
        self._translated([], 0)
        opened.cache_clear()  # this process translates nothing itself
        torch.cuda.empty_cache()  # and PyTorch keeps what was freed on a GPU

    def _translated(self, lines: Sequence[Line], first: int) -> list[Any]:
        translator = opened(self.choice)
        extras: dict[str, Any] = {name: [line.beside[n] for line in lines] for n, name in enumerate(self.beside)}
        if "constraints" in extras:
            extras["constraints"] = list(read_constraints(extras["constraints"]))
        if self.terminology is not None:
            extras["terminology"] = self.terminology
        if isinstance(translator, ServedTranslator):
            if extras:
                raise ConfigError(
                    "CTranslate2 takes no `--prefix`, `--constraints` or `--terminology`; take the model it was "
                    "exported from"
                )
            extras["token_scores"] = self.form == "json"
        translator.notices = Notices()
        with warnings.catch_warnings(action="ignore", category=TranslationWarning):  # they are counted
            texts = [line.text for line in lines]
            return list(
                translator.translate_stream(texts, window=max(1, len(texts)), first=first, tag=self.tag, **extras)
            )

    def __call__(self, lines: Sequence[Line], first: int) -> tuple[list[str], Mapping[str, int]]:
        """Return the translations, and how many were not made in the ordinary way."""
        found = self._translated(lines, first)
        translator = opened(self.choice)
        n_best = translator.decoding.n_best
        results = [self._written(each, number, n_best) for number, each in enumerate(found, start=first + 1)]
        return results, +translator.notices

    def _written(self, found: Translation, number: int, n_best: int) -> str:
        if self.form == "best":
            return found.text
        return found.to_json() if self.form == "json" else found.to_text(number, n_best, quality=self.form == "quality")


@dataclass(frozen=True)
class Scoring:
    """Log-probabilities of lines, each with its translation beside it.

    Attributes:
        choice: the models; PyTorch's.
        tag: tag for every line, or None.
        json: results as JSON.
    """

    choice: ModelChoice
    tag: str | None = None
    json: bool = False

    def __call__(self, lines: Sequence[Line], first: int) -> tuple[list[str], Mapping[str, int]]:
        """Return the scores."""
        translator = opened(self.choice)
        assert not isinstance(translator, ServedTranslator)
        targets = [line.beside[0] for line in lines]
        found = translator.score([line.text for line in lines], targets, tag=self.tag, first=first)
        return [score.to_json() if self.json else score.to_text() for score in found], {}
