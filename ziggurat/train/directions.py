"""The directions of translation of a dev set, and what a validation finds, for each of them and over all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ziggurat.data.corpus import Store
from ziggurat.model.run_folder import checkpoint_name
from ziggurat.train.dev_loss import DevLoss
from ziggurat.train.run_state import Progress


@dataclass(frozen=True)
class Direction:
    """A direction of translation, and its part of the dev set.

    Attributes:
        name: `en-de`.
        target_language: code of the language translated into.
        rows: its pairs in the dev set, ascending.
        trained: False for zero-shot translation: other corpora are trained on, and none of this direction.
    """

    name: str
    target_language: str
    rows: NDArray[np.int64]
    trained: bool = True


def directions_of(store: Store) -> list[Direction]:
    """Return the directions of a store's dev set, in the order of its corpora."""
    assert store.dev is not None
    config = store.manifest["config"]
    languages = [_languages(corpus, config) for corpus in config["dev"]]
    trained = {_languages(corpus, config) for corpus in config["train"]}
    found = []
    for pair in dict.fromkeys(languages):
        corpora = [number for number, its in enumerate(languages) if its == pair]
        rows = np.flatnonzero(np.isin(store.dev.corpora, corpora))
        if len(rows):
            found.append(Direction("-".join(pair), pair[1], rows, pair in trained))
    if not any(direction.trained for direction in found):  # the dev set is of another direction than all corpora
        return [Direction(one.name, one.target_language, one.rows) for one in found]
    return found


def _languages(corpus: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[str, str]:
    source, target = (corpus[key] or config[key] for key in ("source_language", "target_language"))
    return str(source), str(target)


def loss_over(directions: list[Direction], losses: list[DevLoss]) -> DevLoss:
    """Return the losses over all directions that are trained on."""
    counted = [loss for direction, loss in zip(directions, losses, strict=True) if direction.trained]
    return DevLoss(*map(sum, zip(*counted, strict=True)))


@dataclass(frozen=True)
class DirectionScores:
    """Results of one direction.

    Attributes:
        nll: mean -log p(gold) per target token, nats.
        trained: False for zero-shot translation.
        bleu: sacreBLEU, with the tokenizer that suits the target language, or None.
        chrf: chrF, or None.
    """

    nll: float
    trained: bool = True
    bleu: float | None = None
    chrf: float | None = None

    def metric(self, name: str) -> float:
        """Return the value of `training.validation.metric`."""
        value = {"loss": self.nll, "bleu": self.bleu, "chrf": self.chrf}[name]
        assert value is not None  # the configuration refuses a metric that is not measured
        return value

    def line(self, name: str) -> str:
        """Return the scores, or without any the loss, as text that begins with the direction's name."""
        scores = (("BLEU", self.bleu), ("chrF", self.chrf))
        said = [f"{label} {value:.2f}" for label, value in scores if value is not None] or [f"nll {self.nll:.4f}"]
        return f"{name}{'' if self.trained else ' (zero-shot)'} {' '.join(said)}"


@dataclass(frozen=True)
class Validation:
    """Results on the dev set; of several directions over those that are trained on, BLEU and chrF as their means.

    Attributes:
        nll: mean -log p(gold) per target token, nats; perplexity is its exponential.
        bleu: sacreBLEU of the decoded dev set, or None (also where its tokenizer is not installed).
        chrf: chrF of the same, or None.
        unfinished: number of translations cut at the length limit, or None.
        left_out: why there is no decoding, where `training.validation` asks for one.
        alignment: mean cross-entropy of guided alignment per target token with links, nats, or None.
        directions: results of each direction, where there are several.
    """

    nll: float
    bleu: float | None = None
    chrf: float | None = None
    unfinished: int | None = None
    left_out: str = ""
    alignment: float | None = None
    directions: Mapping[str, DirectionScores] = field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        """exp(nll), within the range of a float."""
        return math.exp(min(self.nll, 700.0))

    def metric(self, name: str) -> float:
        """Return the value of `training.validation.metric`."""
        return DirectionScores(self.nll, True, self.bleu, self.chrf).metric(name)

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
            for direction, scores in self.directions.items():
                if math.isfinite(its := scores.metric(name)):
                    p.direction_scores.setdefault(direction, {})[checkpoint_name(p.update)] = its
        return better

    def record(self) -> dict[str, float | int | None]:
        """Return the figures by name; those of a direction as `bleu/en-de`."""
        figures = {"nll": self.nll, "perplexity": self.perplexity, "bleu": self.bleu, "chrf": self.chrf}
        of_directions = {
            f"{name}/{direction}": getattr(scores, name)
            for direction, scores in self.directions.items()
            for name in ("nll", "bleu", "chrf")
        }
        return {**figures, "unfinished": self.unfinished, "alignment_loss": self.alignment, **of_directions}

    def line(self) -> str:
        """Return the figures as a line of text."""
        text = f"dev nll {self.nll:.4f}  perplexity {self.perplexity:.2f}"
        text += "" if self.alignment is None else f"  alignment {self.alignment:.3f}"
        if self.bleu is not None:
            text += f"  BLEU {self.bleu:.2f}"
        if self.chrf is not None:
            text += f"  chrF {self.chrf:.2f}"
        text += f"  {self.unfinished} cut at the length limit" if self.unfinished else ""
        if self.directions:
            text += f"  ({'; '.join(scores.line(name) for name, scores in self.directions.items())})"
        return text + (f"  {self.left_out}" if self.left_out else "")
