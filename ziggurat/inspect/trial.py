"""The trial of a depth check: a short training on a small scale, with measures before, during and after it.

Depth, methods, initialisation, optimiser, dropout and peak rate are those of the configuration. The model is narrowed
to save time, batches are small, and the warm-up is shortened to fit the trial. experiments/depth-check compares the
verdicts with real runs. At initialisation, plain post-norm hardly differs from its remedies; after a few dozen updates
it does.

Finished trials of a sweep are kept in a file, each under a digest of everything on which its loss depends, so that an
interrupted sweep can resume.
"""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field

from ziggurat import __version__
from ziggurat.config import DataConfig, Experiment, ModelConfig
from ziggurat.config.load import change_section
from ziggurat.config.modifiers import ModifiersConfig
from ziggurat.data.babel import SOURCE_LANGUAGE, TARGET_LANGUAGE, write_corpus
from ziggurat.data.batching import round_up
from ziggurat.data.corpus import Store
from ziggurat.data.loader import Batch, LoaderState
from ziggurat.data.prepare import prepare
from ziggurat.model.accelerator import random_state_kept, usable_device
from ziggurat.model.directory import refuse_two_vocabularies
from ziggurat.system.files import MANIFEST, content_checksum, write_atomically
from ziggurat.system.processes import share_cores
from ziggurat.system.small_files import JsonForm, json_safe, read_json
from ziggurat.train.device import loader_of
from ziggurat.train.diagnosis.probe import measure
from ziggurat.train.learner import Learner
from ziggurat.train.objective import probe_loss, settle_precision
from ziggurat.train.profiling import profile_batch
from ziggurat.train.schedule import learning_rate, peak_update
from ziggurat.train.update import train_update

_PROFILE = ("nll", "gradient_norm", "beta", "variance")
TRIAL_MEASURES = ("nll", "source_dependence", *_PROFILE[1:])
"""TRIAL_MEASURES are the measures taken at the end of a trial. Earlier there are fewer, since all of them take as long
as six updates: at the start all except the second, because nothing reads the source yet, and halfway only the loss, for
its pace."""

_SMALLEST_HEAD = 16  # width
_WARMUP_SHARE = 0.4  # of the updates


@dataclass(frozen=True)
class TrialOptions:
    """The options of a trial.

    Attributes:
        updates: number of updates.
        tokens: tokens of a batch, padding included; more if the longest pair has more.
        measured_tokens: number of tokens in the batch on which measures are taken.
        width: largest `d_model`; wider models are narrowed to it. None: the width is kept.
        seed: seed of data and weights.
    """

    updates: int = 80
    tokens: int = 512
    measured_tokens: int = 1024
    width: int | None = 128
    seed: int = 1


@dataclass(frozen=True)
class TrialMeasures:
    """The measurements of a trial.

    Attributes:
        updates: number of updates taken.
        width: `d_model` of the model that was tried.
        peak: highest learning rate.
        unigram: entropy of the target tokens' frequencies in nats: the loss of a model that learns nothing else.
        points: update -> measures (docs/report.md), without dropout, on one batch outside the training: those of
            TRIAL_MEASURES at the end, fewer before.
        losses: training cross-entropy of each update, nats per token.
        failed: first update with a loss or gradient that was not finite, or None.
    """

    updates: int
    width: int
    peak: float
    unigram: float
    points: dict[int, dict[str, Any]]
    losses: list[float]
    failed: int | None


def peak_rate(experiment: Experiment) -> float:
    """Return the highest learning rate of a schedule."""
    schedule = experiment.training.schedule
    at = peak_update(schedule)
    return learning_rate(schedule, at, d_model=experiment.model.d_model, last_update=max(at + 1, 2))


def reduced(model: ModelConfig, width: int | None) -> ModelConfig:
    """Return `model` narrowed to `width`. Inner widths shrink in proportion; heads stay at least 16 wide.

    With a base (`model.transfer`), heads keep their width, and at least one remains.
    """
    if width is None or max(model.d_model, model.encoder_width) <= width:
        return model
    factor = width / max(model.d_model, model.encoder_width)
    even = 2 - model.d_model % 2  # sinusoidal positions need it
    whole = math.lcm(model.d_model // model.heads, model.encoder_width // model.encoder_heads, even)

    # Widths are multiples of the head width; the number of heads is the largest divisor up to the given number.
    def sizes(d_model: int, d_ff: int, heads: int) -> dict[str, int]:
        if model.transfer is None:
            narrow = max(_SMALLEST_HEAD, round(d_model * factor / _SMALLEST_HEAD) * _SMALLEST_HEAD)
            fitting = max(h for h in range(1, heads + 1) if narrow % h == 0 and narrow // h >= _SMALLEST_HEAD)
        else:  # RNMT+, whose stacks have the same width
            narrow = max(1, width // whole) * whole
            fitting = narrow * heads // d_model
        return {"d_model": narrow, "d_ff": max(1, round(d_ff * narrow / d_model)), "heads": fitting}

    changes: dict[str, Any] = sizes(model.d_model, model.d_ff, model.heads)
    encoder = model.encoder
    if encoder.d_model is not None or encoder.d_ff is not None or encoder.heads is not None:
        changes["encoder"] = sizes(model.encoder_width, model.encoder_d_ff, model.encoder_heads)
    # Channel groups keep their width if it divides the new one; one group per channel remains one per channel.
    widths = changes["d_model"], changes.get("encoder", changes)["d_model"]
    changes["combination"] = {"groups": math.gcd(model.combination.groups, *widths)}
    return change_section(model, changes, "model")


def trial_experiment(experiment: Experiment, store: Store, settings: TrialOptions) -> Experiment:
    """Return the configuration with which `experiment` is tried on the pairs of `store`.

    All weights are trained from the start, only on the text: without growth, low-rank updates and guided alignment. A
    batch is at least as large as the longest pair.
    """
    longest = max(lengths.max(initial=0) for lengths in (store.train.source_lengths, store.train.target_lengths)) + 1
    room = int(round_up(longest, experiment.training.batch.length_multiple))
    warmup = max(1, round(_WARMUP_SHARE * settings.updates))
    training = change_section(
        experiment.training,
        {
            "seed": settings.seed,
            "batch": {"max_tokens": max(settings.tokens, room), "accumulate": 1, "fit": False},
            "schedule": {"kind": "isqrt", "peak": peak_rate(experiment), "warmup_updates": warmup},
            "compile": "none",
            "cuda_graphs": 0,
            "precision": "fp32",
            "start_from": None,
            "growth": None,
            "lora": None,
            "freeze": [],
            "loss": {"alignment": None},
        },
        "training",
    )
    data = experiment.data
    if store.path != Path(data.store).expanduser():  # the embedded pair lacks the corpora and links named here
        data = data.model_copy(update={"stages": [], "modifiers": ModifiersConfig()})
    model = reduced(experiment.model, settings.width)
    if "branch_norm" in (*model.residuals(decoder=False), *model.residuals(decoder=True)):
        model = change_section(model, {"wiring": {"branch_updates": warmup}}, "model")
    return experiment.model_copy(update={"data": data, "model": model, "training": training})


def run_trial(
    experiment: Experiment,
    store: Store,
    unigram: float,
    settings: TrialOptions,
    tick: Callable[[int], None] | None = None,
    *,
    loss_only: bool = False,
) -> TrialMeasures:
    """Try `experiment` on the pairs of `store`; `tick` receives the number of each update.

    With `loss_only`, only the loss at the end is measured.

    Raises ConfigError if the device cannot be used.
    """
    share_cores(torch.get_num_threads())
    device = usable_device(experiment.training.device, "training.device")
    sizes = store.source.size, store.target.size
    small = settle_precision(trial_experiment(experiment, store, settings), device, sizes)
    learner = Learner(small, store, device)
    learner.profile()  # sets ADMIN's omegas; other kinds need nothing
    loader = loader_of(small, store)
    batch = profile_batch(store, settings.measured_tokens, seed=settings.seed + 1)
    looks: dict[int, Collection[str]] = {settings.updates: ("nll",)}
    if not loss_only:
        looks = {0: _PROFILE, math.ceil(settings.updates / 2): ("nll",), settings.updates: TRIAL_MEASURES}
    points = {0: _measured(learner, batch, looks[0])} if 0 in looks else {}
    losses, failed = list[float](), None
    with random_state_kept(learner.device):
        for group in loader.groups(LoaderState()):
            update = len(losses) + 1
            rate = learning_rate(small.training.schedule, update, d_model=small.model.d_model)
            clip = small.training.clip_norm
            learner.begin(update)
            result = train_update(learner.parallel, group.batches, learner.optimiser, rate=rate, clip_norm=clip)
            losses.append(result.nll / max(1, result.target_tokens))
            if not result.finite:
                failed = update
                break
            if tick is not None:
                tick(update)
            if update in looks:
                points[update] = _measured(learner, batch, looks[update])
            if update == settings.updates:
                break
    return TrialMeasures(
        updates=len(losses),
        width=max(small.model.d_model, small.model.encoder_width),
        peak=small.training.schedule.peak,
        unigram=unigram,
        points=points,
        losses=losses,
        failed=failed,
    )


def _measured(learner: Learner, batch: Batch, which: Collection[str]) -> dict[str, Any]:
    training = learner.experiment.training
    learner.model.eval()
    return measure(learner.model, batch, probe_loss(training.loss, training.precision), which)


# Data

_EMBEDDED_PAIRS = 4000
_EMBEDDED_PIECES = 1200


@contextmanager
def open_data(experiment: Experiment) -> Iterator[tuple[Store, str]]:
    """Context with the store that `experiment` trains on, and its description.

    If nothing is prepared yet, a store of the embedded language pair (docs/data.md) is made for the duration of the
    context. Raises DataError for a store that cannot be read, ConfigError for one with two vocabularies if the model
    has one embedding.
    """
    store = Path(experiment.data.store).expanduser()
    if (store / MANIFEST).is_file():
        opened = Store.open(store)
        refuse_two_vocabularies(experiment.model, opened.source, opened.target)
        yield opened, f"the data of {store}"
        return
    with tempfile.TemporaryDirectory(prefix="ziggurat-") as folder:
        files = write_corpus(folder, train=_EMBEDDED_PAIRS, dev=1, test=1)
        source, target = files["train"]
        changes = {
            "source_language": SOURCE_LANGUAGE,
            "target_language": TARGET_LANGUAGE,
            "store": f"{folder}/store",
            "train": [{"source": str(source), "target": str(target)}],
            "subword": {"kind": "bpe", "vocabulary_size": _EMBEDDED_PIECES, "joint": True},
        }
        data = DataConfig.model_validate(changes)
        prepare(data)
        yield Store.open(data.store), f"the embedded language pair, since {store} is not prepared"


_FORMAT: Literal[1] = 1


class KeptTrials:
    """The losses of finished trials, in memory and, if there is a path, in a JSON file.

    Attributes:
        path: the file; None: nothing is kept.
        found: number of losses that were taken from the file instead of training.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Read the file, if it exists. Raises DataError if it is damaged or another kind of file."""
        self.path, self.found = path, 0
        self._losses: dict[str, float | None] = {}
        if path is not None:
            remedy = "remove it to train everything again"
            with contextlib.suppress(FileNotFoundError):
                self._losses = dict(read_json(path, _Document, remedy=remedy).losses)

    def loss(self, experiment: Experiment, store: Store, options: TrialOptions, compute: Callable[[], float]) -> float:
        """Return the loss of a training: the stored one, or that of `compute`, which is then stored."""
        if self.path is None:
            return compute()
        key = trial_digest(experiment, store, options)
        if key in self._losses:
            self.found += 1
            kept = self._losses[key]
            return math.inf if kept is None else kept
        loss = compute()
        self._losses[key] = json_safe(loss)
        document: dict[str, Any] = {"format": _FORMAT, "losses": self._losses}
        write_atomically(self.path, (json.dumps(document, indent=1) + "\n").encode())
        return loss


def trial_digest(experiment: Experiment, store: Store, options: TrialOptions) -> str:
    """Return the digest of everything on which the loss of a trial depends (ziggurat.inspect.trial.run_trial)."""
    tried = trial_experiment(experiment, store, options)
    return content_checksum(
        {
            "experiment": tried.model_dump(mode="json", include={"data", "model", "training"}),
            "store": store.fingerprint,
            "options": asdict(options),
            "device": str(usable_device(experiment.training.device, "training.device")),
            "versions": [__version__, torch.__version__],
        }
    )


class _Document(JsonForm):
    """Format of the file: digest of a training -> its loss, null if it failed."""

    format: Literal[1]
    losses: dict[str, float | None] = Field(max_length=100_000)
