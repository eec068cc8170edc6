"""Validation during training: loss, BLEU and chrF of the model on the dev set, for each direction and overall."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ziggurat.config import DecodingConfig, TrainingConfig
from ziggurat.config.train import LossConfig
from ziggurat.data.corpus import Store, unigram_entropy
from ziggurat.data.loader import fixed_batches
from ziggurat.evaluate.scores import Metric, MissingTokenizerError, evaluate, sacrebleu_metric
from ziggurat.evaluate.tokenisation import splitting
from ziggurat.model.run_folder import checkpoint_name
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.system.errors import ConfigError
from ziggurat.train.checkpoint import RunProgress
from ziggurat.train.distributed import Processes
from ziggurat.train.objective import autocast, batch_loss
from ziggurat.translate.interface import translate_tagged
from ziggurat.translate.results import TranslationWarning
from ziggurat.translate.translator import Translator


class DevLoss(NamedTuple):
    """Sums over target tokens; sums of several processes add up.

    Attributes:
        nll: -log p(gold), nats.
        tokens: number of target tokens.
        alignment: cross-entropy of guided alignment, nats.
        aligned: number of target tokens that have links; 0 without guided alignment, or links in the dev set.
    """

    nll: float = 0.0
    tokens: float = 0.0
    alignment: float = 0.0
    aligned: float = 0.0

    @property
    def mean(self) -> float:
        """Mean -log p(gold) of a token, nats."""
        return self.nll / max(1.0, self.tokens)

    @property
    def alignment_mean(self) -> float | None:
        """Mean cross-entropy of a token with links, nats; None without any."""
        return self.alignment / self.aligned if self.aligned else None


def dev_loss(
    model: Seq2Seq,
    store: Store,
    config: TrainingConfig,
    processes: Processes,
    go_on: Callable[[], None],
    rows: NDArray[np.int64] | None = None,
) -> DevLoss:
    """Return the losses on this process's part of the dev set; `go_on` is called before each batch.

    `rows` are the pairs to use; None: all.
    """
    dev, guided = store.dev, config.loss.alignment
    assert dev is not None
    links = guided is not None and dev.has_links
    loss = LossConfig(label_smoothing=0.0, chunk_tokens=config.loss.chunk_tokens, alignment=guided if links else None)
    found = DevLoss()
    batches = fixed_batches(dev, store.source, store.target, config.batch, links=links, rows=rows)
    for batch in islice(batches, processes.rank, None, processes.count):
        go_on()
        with autocast(model.device, config.precision):
            # Only sums are read, so the sizes that divide the objective do not matter.
            sums = batch_loss(model, batch.to(model.device), loss, tokens=1, sentences=1)
        alignment = [0.0, 0.0] if sums.alignment is None else sums.alignment.tolist()
        new = (float(sums.nll), float(batch.target_tokens), *alignment)
        found = DevLoss(*map(sum, zip(found, new, strict=True)))
    return found


@dataclass(frozen=True)
class DevDirection:
    """A translation direction and its part of the dev set.

    Attributes:
        name: `en-de`.
        target_language: code of the language translated into.
        rows: its pairs in the dev set, ascending.
        trained: False for zero-shot translation, when no training corpus has this direction.
    """

    name: str
    target_language: str
    rows: NDArray[np.int64]
    trained: bool = True


def directions_of(store: Store) -> list[DevDirection]:
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
            found.append(DevDirection("-".join(pair), pair[1], rows, pair in trained))
    if not any(direction.trained for direction in found):  # no training corpus has the dev set's direction
        return [DevDirection(one.name, one.target_language, one.rows) for one in found]
    return found


def _languages(corpus: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[str, str]:
    source, target = (corpus[key] or config[key] for key in ("source_language", "target_language"))
    return str(source), str(target)


def loss_over(directions: list[DevDirection], losses: list[DevLoss]) -> DevLoss:
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
        """Return the scores, or the loss if there are none, as text that starts with the direction's name."""
        scores = (("BLEU", self.bleu), ("chrF", self.chrf))
        said = [f"{label} {value:.2f}" for label, value in scores if value is not None] or [f"nll {self.nll:.4f}"]
        return f"{name}{'' if self.trained else ' (zero-shot)'} {' '.join(said)}"


@dataclass(frozen=True)
class Validation:
    """Results on the dev set; with several directions, over the trained ones, BLEU and chrF as means.

    Attributes:
        nll: mean -log p(gold) per target token, nats; perplexity is its exponential.
        bleu, chrf: scores of the decoded dev set, or None (BLEU also if its tokenizer is not installed).
        unfinished: number of translations cut at the length limit, or None.
        left_out: why decoding was skipped although `training.validation` requests it.
        alignment: mean cross-entropy of guided alignment per target token with links, nats, or None.
        directions: results of each direction, if there are several.
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

    def count(self, p: RunProgress, name: str) -> bool:
        """Record this validation, by metric `name`, in `p`; return whether it is the best so far."""
        # A diverged model may give NaN, which is never the best.
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
        """Return the figures by name; a direction's figures have names such as `bleu/en-de`."""
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


Result = TypeVar("Result")


_SHORT_SECONDS = 10.0
"""_SHORT_SECONDS is the duration below which a decoding is never skipped, so that records of small runs do not depend
on the clock."""


class _InterruptedError(Exception):
    """Ends a validation early."""


class _DecodingClock:
    """Context that times the decodings since this start of training; `share`, if set, bounds their time."""

    def __init__(self, share: float | None) -> None:
        self._share = share
        self.excuse = f"(not translated: over {share or 0:.0%} of the time; see `training.validation.max_share`)"
        self._started = self._began = time.perf_counter()
        self._spent = self._latest = 0.0

    def affordable(self) -> bool:
        """True if another decoding as long as the latest would be short or within the allowed share of the time."""
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
    """Return the search settings with another beam; beam groups that do not divide it are dropped.

    Sampling is always turned off, because random translations are no basis for choosing checkpoints.
    """
    groups = 1 if beam % decoding.diverse_groups else decoding.diverse_groups
    return decoding.by_beam().model_copy(update={"beam_size": beam, "n_best": 1, "diverse_groups": groups})


_WITHOUT_EFFECT = frozenset(
    {"beam_size", "n_best", "precision", "shortlist", "alignments", "batch_tokens", "batch_sentences"}
)
"""Keys of `decoding` that do not affect validation scores, because validation replaces or ignores them."""


def settings_of_scores(decoding: Mapping[str, Any], beam: int) -> dict[str, Any]:
    """Return the part of section `decoding`, a dump, that affects validation scores with this beam."""
    without = _WITHOUT_EFFECT
    if beam % (groups := decoding.get("diverse_groups", 1)) or groups == 1:
        without |= {"diverse_groups", "diverse_strength"}  # see _with_beam
    return {key: value for key, value in decoding.items() if key not in without}


class Validator:
    """Measures a model on the dev set of a store. It draws no random numbers, so it does not change training.

    Each process evaluates its part of the dev set, which must not be empty, and all get the same figures. `notices` are
    sentences for the log about anything unusual in how scores are computed.

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
        self.directions = directions_of(store)
        # Always the first pairs of each direction, because scores of one run must be comparable.
        self._rows = [direction.rows[: config.validation.max_sentences] for direction in self.directions]
        rows = np.concatenate(self._rows)
        self.sources, self.references = self.dev.texts(rows) if config.validation.decode else ([], [])
        rule, lengths = config.validation.max_length, self.dev.target_lengths[rows]
        self.longest = None if rule is None else [int(rule.ratio * n + rule.extra) for n in lengths]
        self._clock = _DecodingClock(None if config.validation.metric != "loss" else config.validation.max_share)
        self._frequencies: float | None = None
        self._metrics: tuple[Metric, ...] = ("bleu", "chrf")
        self.notices: list[str] = []
        if self.sources:
            self._find_tokenizer()
        self.tags: list[str | None] = store.dev_tags(rows) if self.sources else []

    @torch.inference_mode()
    def measure(
        self,
        model: Seq2Seq,
        interrupted: Callable[[], bool] = lambda: False,
        *,
        last: Callable[[float], bool] = lambda nll: False,
        decode: bool = True,
    ) -> Validation | None:
        """Return the scores of `model`, which is left in evaluation mode; interrupted results are discarded.

        `interrupted` is called before every batch and every step of the search; once it is true, None is returned.
        `last` is called with the mean nll; if it returns true (in the first process), decoding is not skipped.
        `decode`: False if losses suffice, whatever the configuration.
        """

        def go_on() -> None:
            if interrupted():
                raise _InterruptedError

        try:
            return self._measure(model, go_on, last, decode=decode)
        except _InterruptedError:
            return None

    def _measure(
        self, model: Seq2Seq, go_on: Callable[[], None], last: Callable[[float], bool], *, decode: bool
    ) -> Validation:
        model.eval()
        several = len(self.directions) > 1
        parts = [direction.rows if several else None for direction in self.directions]
        of_part = self._in_all(
            lambda: [dev_loss(model, self.store, self.config, self.processes, go_on, rows) for rows in parts]
        )
        sums = self.processes.sums([figure for loss in of_part for figure in loss])
        losses = [DevLoss(*sums[start : start + 4]) for start in range(0, len(sums), 4)]
        loss = loss_over(self.directions, losses)
        mean, alignment = loss.mean, loss.alignment_mean

        def found(
            scores: list[dict[str, float]] | None = None, unfinished: int | None = None, left_out: str = ""
        ) -> Validation:
            of_each = {
                direction.name: DirectionScores(own.mean, direction.trained, its.get("bleu"), its.get("chrf"))
                for direction, own, its in zip(self.directions, losses, scores or [{}] * len(losses), strict=True)
            }
            bleu, chrf = (_mean_score(list(of_each.values()), name) for name in ("bleu", "chrf"))
            return Validation(mean, bleu, chrf, unfinished, left_out, alignment, of_each if several else {})

        if not (decode and self.config.validation.decode):
            return found()
        # Clocks differ between processes, so the first process's decides for all.
        if not self.processes.of_first(self._clock.affordable() or last(mean)):
            return found(left_out=self._clock.excuse)
        beam = self.decoding.beam_size
        if beam > 1:  # not worthwhile for a model that knows only word frequencies
            self._frequencies = self._frequencies or unigram_entropy(self.store)
            beam = beam if mean <= self._frequencies else 1
        # Process r has translated sentences r, r + count, ...
        with self._clock:
            mine, unfinished = self._in_all(lambda: self._translations(model, beam, go_on))
        outputs = [""] * len(self.tags)
        for rank, texts in enumerate(self.processes.texts(mine)):
            outputs[rank :: self.processes.count] = texts
        (cut,) = self.processes.sums([unfinished])
        return found(self._scores(outputs), int(cut))

    def _in_all(self, work: Callable[[], Result]) -> Result:
        """Return this process's result of `work`. Raises _InterruptedError when it was interrupted in any process.

        Agreeing here keeps processes together; one that continued alone would wait for the others' next message.
        """
        result: Result | None = None
        with contextlib.suppress(_InterruptedError):
            result = work()
        if self.processes.any(result is None):
            raise _InterruptedError
        return result  # type: ignore[return-value]  # not None here

    def _translations(self, model: Seq2Seq, beam: int, go_on: Callable[[], None]) -> tuple[list[str], int]:
        """Return this process's part of the translations, and how many were cut at the length limit."""
        translator = Translator(
            model,
            self.store.source,
            self.store.target,
            _with_beam(self.decoding, beam),
            max_positions=self.max_positions,
            device=model.device,
            before_step=go_on,
        )
        counted = warnings.catch_warnings(action="ignore", category=TranslationWarning)
        with autocast(model.device, self.config.precision), counted:
            mine = slice(self.processes.rank, None, self.processes.count)
            longest = None if self.longest is None else self.longest[mine]
            found = translate_tagged(translator.translate, self.sources[mine], self.tags[mine], longest)
        return [translation.text for translation in found], translator.notices["unfinished"]

    def _find_tokenizer(self) -> None:
        """Leave BLEU out if its tokenizer is missing and no decision depends on it; checked now, not hours later."""
        for direction, (references,) in zip(self.directions, self._by_direction(self.references), strict=True):
            language = direction.target_language
            how = splitting([references], language)
            try:
                sacrebleu_metric("bleu", tokenize=how.bleu)
            except MissingTokenizerError as error:
                if self.config.validation.metric == "bleu":
                    raise ConfigError(
                        f"`training.validation.metric: bleu` on text in `{language}`: {error}. Or use "
                        "`training.validation.metric=chrf` or `loss`, which need no other package",
                        key="training.validation.metric",
                    ) from None
                self._metrics = ("chrf",)
                self.notices.append(f"validation leaves BLEU out and uses chrF: {error}")
                return
            if how.bleu_notice and how.bleu_notice not in self.notices:
                self.notices.append(how.bleu_notice)

    def _by_direction(self, *lines: list[str]) -> list[list[list[str]]]:
        """Return each direction's part of each of `lines`, which are in the order of `sources`."""
        ends = np.cumsum([0, *map(len, self._rows)]).tolist()
        return [[each[start:end] for each in lines] for start, end in pairwise(ends)]

    def _scores(self, outputs: list[str]) -> list[dict[str, float]]:
        """Return BLEU, with the tokenizer that suits the target language, and chrF, by name, of each direction."""
        found: list[dict[str, float]] = []
        for direction, (mine, references) in zip(
            self.directions, self._by_direction(outputs, self.references), strict=True
        ):
            scores = evaluate(mine, [references], metrics=self._metrics, target_language=direction.target_language)
            found.append({name: score.value for name, score in zip(self._metrics, scores, strict=True)})
        return found


def _mean_score(of_each: list[DirectionScores], name: str) -> float | None:
    """Return the mean of a score over the trained directions; None if it was not measured."""
    values = [getattr(scores, name) for scores in of_each if scores.trained]
    return None if None in values else sum(values) / len(values)
