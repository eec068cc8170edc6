"""The average that a run makes when it has ended, and its score on the dev set, by which it is taken or passed over."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from ziggurat.config import TrainingConfig
from ziggurat.model.averaged import AVERAGED, AverageScore, write_score
from ziggurat.model.directory import read_weights
from ziggurat.model.run_folder import MODEL_FILE, checkpoint_name, ranked
from ziggurat.system.duration import duration
from ziggurat.system.errors import CheckpointError, ZigguratError
from ziggurat.system.workspace import discard
from ziggurat.train.average import average_newest
from ziggurat.train.metrics import MetricsWriter, RunLog
from ziggurat.train.run_state import Progress
from ziggurat.train.setup import Setup


def remove_average(run: Path, log: RunLog) -> None:
    """Remove the average of a run that goes on."""
    if (run / AVERAGED).exists():
        log.say("removing averaged/: it is of older checkpoints than the ones to come")
        discard(run / AVERAGED)


def average_ended(setup: Setup, p: Progress, log: RunLog, metrics: MetricsWriter) -> None:
    """Average the newest checkpoints of a run that has ended, as `training.checkpoint.average_last` says, and score it.

    All processes call this. Until it is scored, the average is passed over: whatever ends the process meanwhile, no
    worse model is handed on, and resuming does it again. Nothing that is in the way makes a failure of the run, whose
    checkpoints are all there: it is logged. The learner has the averaged weights afterwards.
    """
    run, training, made = setup.run, setup.experiment.training, list[int]()
    score = _not_measured(p, training) if setup.validator is not None else None
    try:
        # The others wait here, not in NCCL, whose watchdog would end them before long.
        setup.processes.first_does(lambda: made.extend(average_newest(run, training, score)))
    except (ZigguratError, OSError) as error:  # things that the user keeps there, a checkpoint damaged, a full disk
        log.say(f"NOT AVERAGED: {error}", "bold red")
        return
    if not setup.processes.of_first(len(made)):
        return
    said = f"averaged checkpoints {', '.join(map(str, made))} into {run / AVERAGED}"
    if score is None:
        log.say(said)
        return
    try:
        log.say(f"{said}{_measured(setup, p, score, metrics)}")
    except (ZigguratError, OSError) as error:
        log.say(f"{said}, NOT SCORED: {error}", "bold red")


def _not_measured(p: Progress, config: TrainingConfig) -> AverageScore | None:
    """Return a score without its value, beside what is taken without an average; None: that has no score."""
    metric = config.validation.metric
    if config.checkpoint.keep_best:
        names = ranked(p.scores, smaller_is_better=metric == "loss")[:1]
    else:
        names = [name for name in (checkpoint_name(p.update),) if name in p.scores]
    rival = "best" if config.checkpoint.keep_best else "last"
    return AverageScore(metric, None, rival, p.scores[names[0]]) if names else None


def _measured(setup: Setup, p: Progress, score: AverageScore, metrics: MetricsWriter) -> str:
    """Score the averaged model by the metric that `best` is chosen by, keep the score beside it; return it in words.

    Raises what keeps it from being scored, in all processes.
    """
    assert setup.validator is not None
    began, folder, metric = time.perf_counter(), setup.run / AVERAGED, score.metric
    setup.learner.take_weights(_read_by_all(setup, folder), str(folder))
    with setup.learner.parallel.whole() as model:
        result = setup.validator.measure(model, decode=metric != "loss")
    assert result is not None  # nothing interrupts it
    seconds = time.perf_counter() - began
    metrics.write("average", p.update, {**result.record(), "seconds": seconds})
    found = AverageScore(metric, result.metric(metric), score.rival, score.rival_value)
    setup.processes.first_does(lambda: write_score(folder, found))
    said = f": {result.line()}  [{duration(seconds)}]"
    if found.worse:
        said += (
            f"; WORSE than {found.rival} ({found.said()}), which is taken unless `--which {AVERAGED}` says otherwise"
        )
    return said


def _read_by_all(setup: Setup, folder: Path) -> Mapping[str, Tensor]:
    """Return the weights of the averaged model in every process; raise in all of them what one cannot read."""
    found: Mapping[str, Tensor] = {}
    failed = ""
    try:
        found = read_weights(folder / MODEL_FILE)
    except (ZigguratError, OSError) as error:
        failed = str(error)
    reasons = [reason for (reason,) in setup.processes.texts([failed]) if reason]
    if reasons:
        raise CheckpointError(reasons[0])
    return found
