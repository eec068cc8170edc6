"""Validation: loss, BLEU and chrF of the model on the dev set, during training.

It can be interrupted before every batch and every step of the search, so that a signal is heeded at once; nothing of an
interrupted validation is kept.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from ziggurat.config import DecodingConfig, TrainingConfig
from ziggurat.data.corpus import Store, unigram_entropy
from ziggurat.decoding.results import Translation
from ziggurat.decoding.translator import TranslationWarning, Translator
from ziggurat.errors import ConfigError
from ziggurat.evaluation.scores import Metric, MissingTokenizerError, evaluate, sacrebleu_metric
from ziggurat.evaluation.splitting import splitting
from ziggurat.models.run_folder import checkpoint_name
from ziggurat.models.seq2seq import Seq2Seq
from ziggurat.training.checkpoint import Progress
from ziggurat.training.dev_loss import DevLoss, dev_loss
from ziggurat.training.objective import autocast
from ziggurat.training.processes import Processes

__all__ = ["Validation", "Validator"]


@dataclass(frozen=True)
class Validation:
    """Results on the dev set.

    Attributes:
        nll: mean -log p(gold) per target token, nats; perplexity is its exponential.
        bleu: sacreBLEU of the decoded dev set, or None (also where its tokenizer is not installed).
        chrf: chrF of the same, or None.
        unfinished: number of translations cut at the length limit, or None.
        left_out: why there is no decoding, where `training.validation` asks for one.
        alignment: mean cross-entropy of guided alignment per target token with links, nats, or None.
    """

    nll: float
    bleu: float | None = None
    chrf: float | None = None
    unfinished: int | None = None
    left_out: str = ""
    alignment: float | None = None

    @property
    def perplexity(self) -> float:
        """exp(nll), within the range of a float."""
        return math.exp(min(self.nll, 700.0))

    def metric(self, name: str) -> float:
        """Return the value of `training.validation.metric`."""
        value = {"loss": self.nll, "bleu": self.bleu, "chrf": self.chrf}[name]
        assert value is not None  # the configuration refuses a metric that is not measured
        return value

    def count(self, p: Progress, name: str) -> bool:
        """Count this validation, by metric `name`, in `p`; return whether it is the best so far."""
        # A model that has diverged may give NaN, which is never the best.
        value, sign = self.metric(name), 1.0 if name == "loss" else -1.0
        better = math.isfinite(value) and (p.best is None or sign * value < sign * p.best)
        if better:
            p.best, p.best_update, p.validations_since_best = value, p.update, 0
        else:
            p.validations_since_best += 1
        if math.isfinite(value):
            p.scores[checkpoint_name(p.update)] = value
        return better

    def record(self) -> dict[str, float | int | None]:
        """Return the figures by name."""
        figures = {"nll": self.nll, "perplexity": self.perplexity, "bleu": self.bleu, "chrf": self.chrf}
        return {**figures, "unfinished": self.unfinished, "alignment_loss": self.alignment}

    def line(self) -> str:
        """Return the figures as a line of text."""
        text = f"dev nll {self.nll:.4f}  perplexity {self.perplexity:.2f}"
        text += "" if self.alignment is None else f"  alignment {self.alignment:.3f}"
        if self.bleu is not None:
            text += f"  BLEU {self.bleu:.2f}"
        if self.chrf is not None:
            text += f"  chrF {self.chrf:.2f}"
        text += f"  {self.unfinished} cut at the length limit" if self.unfinished else ""
        return text + (f"  {self.left_out}" if self.left_out else "")


Result = TypeVar("Result")


_SHORT_SECONDS = 10.0
"""A decoding that takes less is never left out: records of small runs do not depend on the clock."""


class _InterruptedError(Exception):
    """Ends a validation early."""


class _DecodingClock:
    """Context that times the decodings of this start of training; their share of its time is bounded, if not None."""

    def __init__(self, share: float | None) -> None:
        self._share = share
        self.excuse = f"(not translated: over {share or 0:.0%} of the time; see `training.validation.max_share`)"
        self._started = self._began = time.perf_counter()
        self._spent = self._latest = 0.0

    def affordable(self) -> bool:
        """True when one more decoding, as long as the latest, is short or stays within its share."""
        if self._share is None or self._latest < _SHORT_SECONDS:
            return True
        passed = time.perf_counter() - self._started
        return self._spent + self._latest <= self._share * (passed + self._latest)

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._latest = time.perf_counter() - self._began
        self._spent += self._latest


def _with_beam(decoding: DecodingConfig, beam: int) -> DecodingConfig:
    """Return the settings with another beam, which groups that do not divide it cannot share."""
    groups = 1 if beam % decoding.diverse_groups else decoding.diverse_groups
    return decoding.model_copy(update={"beam_size": beam, "n_best": 1, "diverse_groups": groups})


class Validator:
    """Measures a model on the dev set of a store. It draws no random number, so it does not change training.

    Each process takes its part of the dev set, and all get the same figures.

    Args:
        store: its dev set must not be empty.
        config: section `training`.
        decoding: section `decoding`, whose length penalty and limits are used.
        max_positions: longest input of the model, in tokens, if it has a limit.
        processes: all that share the work.

    Attributes:
        notices: sentences for the log about anything unusual in how scores are computed.

    Raises ConfigError when `training.validation.metric` is BLEU and its tokenizer for the target language is not
    installed.
    """

    def __init__(
        self,
        store: Store,
        config: TrainingConfig,
        decoding: DecodingConfig,
        max_positions: int | None = None,
        processes: Processes | None = None,
    ) -> None:
        assert store.dev is not None
        self.store = store
        self.dev = store.dev
        self.config = config
        self.max_positions = max_positions
        self.processes = processes or Processes()
        self.decoding = _with_beam(decoding, config.validation.beam_size)
        # The first ones, always the same: scores of one run must compare.
        count = min(len(self.dev), config.validation.max_sentences or len(self.dev))
        self.sources, self.references = self.dev.texts(np.arange(count)) if config.validation.decode else ([], [])
        rule, lengths = config.validation.max_length, self.dev.target_lengths[:count]
        self.longest = None if rule is None else [int(rule.ratio * n + rule.extra) for n in lengths]
        self._clock = _DecodingClock(None if config.validation.metric != "loss" else config.validation.max_share)
        self._frequencies: float | None = None
        tags = [corpus["tag"] for corpus in store.manifest["corpora"]["dev"]]
        self._metrics: tuple[Metric, ...] = ("bleu", "chrf")
        self.notices: list[str] = []
        if self.sources:
            self._find_tokenizer()
        self.tags: list[str | None] = [tags[number] for number in self.dev.corpora[: len(self.sources)]]

    @torch.inference_mode()
    def measure(
        self,
        model: Seq2Seq,
        interrupted: Callable[[], bool] = lambda: False,
        *,
        last: Callable[[float], bool] = lambda nll: False,
    ) -> Validation | None:
        """Return the scores of `model`, which is left in evaluation mode.

        `interrupted` is called before every batch and every step of the search; once it is true, None is returned.
        `last` is called with the mean nll; where it is true (in the first process), no decoding is left out.
        """

        def go_on() -> None:
            if interrupted():
                raise _InterruptedError

        try:
            return self._measure(model, go_on, last)
        except _InterruptedError:
            return None

    def _measure(self, model: Seq2Seq, go_on: Callable[[], None], last: Callable[[float], bool]) -> Validation:
        model.eval()
        of_part = self._in_all(lambda: dev_loss(model, self.store, self.config, self.processes, go_on))
        loss = DevLoss(*self.processes.sums([*of_part]))
        mean, alignment = loss.mean, loss.alignment_mean
        if not self.config.validation.decode:
            return Validation(mean, alignment=alignment)
        # The clocks of several processes differ: the first one's decides for all.
        if not self.processes.of_first(self._clock.affordable() or last(mean)):
            return Validation(mean, left_out=self._clock.excuse, alignment=alignment)
        beam = self.decoding.beam_size
        if beam > 1:  # a model that knows word frequencies at most is not worth it
            self._frequencies = self._frequencies or unigram_entropy(self.store)
            beam = beam if mean <= self._frequencies else 1
        # Process r has translated sentences r, r + count, and so on.
        with self._clock:
            mine, unfinished = self._in_all(lambda: self._translations(model, beam, go_on))
        outputs = [""] * len(self.tags)
        for rank, texts in enumerate(self.processes.texts(mine)):
            outputs[rank :: self.processes.count] = texts
        (cut,) = self.processes.sums([unfinished])
        scores = self._scores(outputs)
        return Validation(mean, scores.get("bleu"), scores["chrf"], int(cut), alignment=alignment)

    def _in_all(self, work: Callable[[], Result]) -> Result:
        """Return this process's result of `work`. Raises _InterruptedError when it was interrupted in any process.

        Agreeing here keeps processes together: one that went on alone would wait for the others' next message.
        """
        result: Result | None = None
        with contextlib.suppress(_InterruptedError):
            result = work()
        if self.processes.any(result is None):
            raise _InterruptedError
        return result  # type: ignore[return-value]  # not None here

    def _translations(self, model: Seq2Seq, beam: int, go_on: Callable[[], None]) -> tuple[list[str], int]:
        """Return this process's part of the translations, and the number of them cut at the length limit."""
        translator = Translator(
            model,
            self.store.source,
            self.store.target,
            _with_beam(self.decoding, beam),
            max_positions=self.max_positions,
            device=model.device,
            before_step=go_on,
        )
        with autocast(model.device, self.config.precision), warnings.catch_warnings():
            warnings.simplefilter("ignore", TranslationWarning)  # counted instead
            found: dict[int, Translation] = {}
            mine = range(self.processes.rank, len(self.tags), self.processes.count)
            for tag in dict.fromkeys(self.tags):  # a call translates into one language
                chosen = [i for i in mine if self.tags[i] == tag]
                texts = [self.sources[i] for i in chosen]
                longest = None if self.longest is None else [self.longest[i] for i in chosen]
                found.update(zip(chosen, translator.translate(texts, tag=tag, longest=longest), strict=True))
        return [found[i].text for i in mine], translator.notices["unfinished"]

    def _find_tokenizer(self) -> None:
        """Leave BLEU out if its tokenizer is missing and no decision depends on it; now, not hours later."""
        language = self.store.manifest["config"]["target_language"]
        how = splitting([self.references], language)
        try:
            sacrebleu_metric("bleu", tokenize=how.bleu)
        except MissingTokenizerError as error:
            if self.config.validation.metric == "bleu":
                raise ConfigError(
                    f"`training.validation.metric: bleu` on text in `{language}`: {error}. Or go by "
                    "`training.validation.metric=chrf` or `loss`, which need nothing more"
                ) from None
            self._metrics = ("chrf",)
            self.notices.append(f"validation leaves BLEU out and uses chrF: {error}")
        else:
            self.notices += [how.bleu_notice] if how.bleu_notice else []

    def _scores(self, outputs: list[str]) -> dict[str, float]:
        """Return BLEU, with the tokenizer that suits the target language, and chrF, by name."""
        language = self.store.manifest["config"]["target_language"]
        scores = evaluate(outputs, [self.references], metrics=self._metrics, target_language=language)
        return {name: score.value for name, score in zip(self._metrics, scores, strict=True)}
