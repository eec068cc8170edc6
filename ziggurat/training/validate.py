"""What is measured on the dev set during training."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ziggurat.config import DecodingConfig, Experiment, TrainingConfig
from ziggurat.config.train import LossConfig
from ziggurat.data.corpus import Store
from ziggurat.data.loader import fixed_batches
from ziggurat.decoding.results import Translation
from ziggurat.decoding.translator import TranslationWarning, Translator
from ziggurat.errors import ConfigError
from ziggurat.evaluation.scores import Score, evaluate
from ziggurat.models.seq2seq import Seq2Seq
from ziggurat.training.step import autocast, batch_loss

__all__ = ["Validation", "Validator", "position_limit"]


@dataclass(frozen=True)
class Validation:
    """Results on the dev set.

    Attributes:
        nll: mean -log p(gold) per target token, nats; perplexity is its exponential.
        bleu: sacreBLEU of the decoded dev set, or None.
        chrf: chrF of the same, or None.
        unfinished: translations that were cut at the length limit, or None.
    """

    nll: float
    bleu: float | None = None
    chrf: float | None = None
    unfinished: int | None = None

    @property
    def perplexity(self) -> float:
        """exp(nll)."""
        return math.exp(min(self.nll, 700.0))

    def metric(self, name: str) -> float:
        """Return the value of `training.validation.metric`."""
        value = {"loss": self.nll, "bleu": self.bleu, "chrf": self.chrf}[name]
        assert value is not None  # the configuration refuses a metric that is not measured
        return value

    def record(self) -> dict[str, float | int | None]:
        """Return the figures by name."""
        figures = {"nll": self.nll, "perplexity": self.perplexity, "bleu": self.bleu, "chrf": self.chrf}
        return {**figures, "unfinished": self.unfinished}

    def line(self) -> str:
        """Return the figures for people."""
        text = f"dev nll {self.nll:.4f}  perplexity {self.perplexity:.2f}"
        if self.bleu is not None:
            text += f"  BLEU {self.bleu:.2f}  chrF {self.chrf:.2f}"
        return text + (f"  {self.unfinished} cut at the length limit" if self.unfinished else "")


class _InterruptedError(Exception):
    """The rest of a validation is not wanted now."""


class Validator:
    """Measures a model on the dev set of a store. Draws no random number, so training is the same with or without.

    Args:
        store: its dev set must not be empty.
        config: section `training`.
        decoding: section `decoding`, whose length penalty and limits are used.
        max_positions: longest input of the model, in tokens, if it has a limit.
    """

    def __init__(
        self, store: Store, config: TrainingConfig, decoding: DecodingConfig, max_positions: int | None = None
    ) -> None:
        assert store.dev is not None
        self.store = store
        self.dev = store.dev
        self.config = config
        self.max_positions = max_positions
        beam = config.validation.beam_size
        self.decoding = decoding.model_copy(update={"beam_size": beam, "n_best": 1})
        count = min(len(self.dev), config.validation.max_sentences or len(self.dev))
        self.sources, self.references = self.dev.texts(np.arange(count)) if config.validation.decode else ([], [])
        tags = [corpus["tag"] for corpus in store.manifest["corpora"]["dev"]]
        if self.sources:
            self._scores(["a"], ["a"])  # a tokenizer that is not installed is missed now, not after hours
        self.tags: list[str | None] = [tags[number] for number in self.dev.corpora[: len(self.sources)]]

    @torch.inference_mode()
    def measure(self, model: Seq2Seq, interrupted: Callable[[], bool] = lambda: False) -> Validation | None:
        """Return the scores of `model`, which is left in evaluation mode.

        `interrupted` is asked before every batch and every step of the search: once it holds, None is returned.
        """

        def go_on() -> None:
            if interrupted():
                raise _InterruptedError

        try:
            return self._measure(model, go_on)
        except _InterruptedError:
            return None

    def _measure(self, model: Seq2Seq, go_on: Callable[[], None]) -> Validation:
        model.eval()
        config = LossConfig(label_smoothing=0.0, chunk_tokens=self.config.loss.chunk_tokens)
        nll, tokens = 0.0, 0
        for batch in fixed_batches(self.dev, self.store.source, self.store.target, self.config.batch):
            go_on()
            on_device = batch.to(model.device)
            with autocast(model.device, self.config.precision):
                nll += float(batch_loss(model, on_device, config, tokens=1, sentences=1).nll)
            tokens += batch.target_tokens
        mean = nll / max(1, tokens)
        return Validation(mean, *self._decode(model, go_on)) if self.config.validation.decode else Validation(mean)

    def _decode(self, model: Seq2Seq, go_on: Callable[[], None]) -> tuple[float, float, int]:
        """Return BLEU, chrF and the number of translations cut at the length limit."""
        translator = Translator(
            model,
            self.store.source,
            self.store.target,
            self.decoding,
            max_positions=self.max_positions,
            device=model.device,
            before_step=go_on,
        )
        with autocast(model.device, self.config.precision), warnings.catch_warnings():
            warnings.simplefilter("ignore", TranslationWarning)  # counted instead
            found: dict[int, Translation] = {}
            for tag in dict.fromkeys(self.tags):
                chosen = [i for i, its_tag in enumerate(self.tags) if its_tag == tag]
                found.update(zip(chosen, translator.translate([self.sources[i] for i in chosen], tag=tag), strict=True))
        outputs = [found[i].text for i in range(len(found))]
        bleu, chrf = self._scores(outputs, self.references)
        return bleu.value, chrf.value, translator.notices["unfinished"]

    def _scores(self, outputs: list[str], references: list[str]) -> list[Score]:
        """Return BLEU, with the tokenizer that sacreBLEU has for the target language, and chrF."""
        language = self.store.manifest["config"]["target_language"]
        return evaluate(outputs, [references], metrics=("bleu", "chrf"), target_language=language)


def position_limit(experiment: Experiment, store: Store) -> int | None:
    """Return the longest sequence the model can read, in tokens; None: any.

    Raises ConfigError up front when a pair of the training or the dev set is longer.
    """
    embedding = experiment.model.embedding
    if embedding.positions != "learned":
        return None
    tables = [table for table in (store.train, store.dev) if table is not None and len(table)]
    longest = 1 + max(int(lengths.max()) for t in tables for lengths in (t.source_lengths, t.target_lengths))
    if longest > embedding.max_positions:
        raise ConfigError(
            f"the longest sentence of the training and dev sets has {longest} tokens, "
            f"`model.embedding.max_positions` is {embedding.max_positions}; raise it, or lower "
            "`data.filters.max_pieces` (which leaves the dev set as it is) and prepare again"
        )
    return embedding.max_positions
