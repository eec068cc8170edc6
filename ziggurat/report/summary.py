"""What a person wants to know of runs first: did each train, where does it stand, what looks unhealthy inside."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

from ziggurat.depth.verdict import READS
from ziggurat.diagnosis.health import readings
from ziggurat.duration import duration
from ziggurat.report.runs import ReportRun

__all__ = ["Standing", "Verdict", "standing", "standings"]

Verdict = Literal[
    "trains", "got worse", "ignores its source so far", "did not train", "diverged", "too early", "unclear", "no record"
]

LEVELS: Mapping[Verdict, str] = {
    "trains": "good",
    "got worse": "warning",
    "ignores its source so far": "warning",
    "did not train": "bad",
    "diverged": "bad",
    "too early": "unknown",
    "unclear": "unknown",
    "no record": "bad",
}

LEARNT_NATS = 0.3
"""How far below the loss of bare word frequencies a loss must be to count as learning.

Deep post-norm that has stalled gets 0.2 below it (experiments/depth-trainability, 18-18 layers).
"""
WORSE_NATS = 0.5
"""A dev loss so far above its best has got worse."""
TRANSLATES_BLEU = 5.0
"""A dev BLEU that only a model reaches that translates; it counts where the loss of word frequencies is not known."""
EARLY_UPDATES = 100
"""Before so many updates nothing is said of whether a run trains."""


@dataclass(frozen=True)
class Standing:
    """Where a run stands.

    Attributes:
        verdict: in a word or two.
        level: `good`, `warning`, `bad` or `unknown`.
        reasons: sentences with the numbers behind the verdict.
        complaints: sentences on what looks unhealthy, in training or in depth.
        remedies: sentences on what to do about it.
        figures: what the table shows: `update`, `seconds`, `tokens_per_second`, `train_nll`, `best_nll`, `best_update`,
            `last_nll`, `bleu`, `chrf`; None where there is none.
    """

    verdict: Verdict
    level: str
    reasons: tuple[str, ...]
    complaints: tuple[str, ...]
    remedies: tuple[str, ...]
    figures: Mapping[str, float | None]


def standings(runs: Sequence[ReportRun], floors: Sequence[float | None]) -> list[Standing]:
    """Return the standing of each run; `floors` as in `standing`."""
    return [standing(run, floor) for run, floor in zip(runs, floors, strict=True)]


def standing(run: ReportRun, floor: float | None) -> Standing:
    """Return where `run` stands.

    `floor` is the loss that word frequencies alone give (ziggurat.depth.trial_data.unigram_entropy), if known.
    """
    figures = _figures(run)
    verdict, reasons = _judged(run, figures, floor)
    unhealthy, remedies = _unhealthy(run)
    complaints = (*_events(run), *unhealthy)
    return Standing(verdict, LEVELS[verdict], reasons, complaints, tuple(remedies), figures)


def _figures(run: ReportRun) -> dict[str, float | None]:
    """Return the figures of the table."""
    last = run.train[-1] if run.train else {}
    scored = [v for v in run.validations if _finite(v.get("nll"))]
    best = min(scored, key=lambda v: v["nll"], default={})
    nlls = [r["nll"] for r in run.train if _finite(r.get("nll"))]
    rates = [r["target_tokens_per_second"] for r in run.train if _finite(r.get("target_tokens_per_second"))]
    return {
        "update": last.get("update"),
        "seconds": last.get("seconds"),
        "tokens_per_second": sorted(rates)[len(rates) // 2] if rates else None,
        "train_nll": nlls[-1] if nlls else None,
        "best_nll": best.get("nll"),
        "best_update": best.get("update"),
        "last_nll": run.validations[-1].get("nll") if run.validations else None,
        "bleu": _highest(run, "bleu"),
        "chrf": _highest(run, "chrf"),
    }


def _judged(
    run: ReportRun, figures: Mapping[str, float | None], floor: float | None
) -> tuple[Verdict, tuple[str, ...]]:
    if not run.train:
        return "no record", ("It left no record of training; its log.txt says what it was told.",)
    of_dev = bool(run.validations)
    now = figures["last_nll"] if of_dev else run.train[-1].get("nll")
    where = "dev" if of_dev else "training"
    if not _finite(now):
        return "diverged", (f"Its latest {where} loss is not a finite number.",)
    best = figures["best_nll"] if of_dev else now
    assert best is not None  # the latest is finite
    said = f"{'Best dev' if of_dev else 'Latest training'} loss {best:.2f} nats per token"
    update = run.train[-1]["update"]
    if floor is not None:
        reasons = [f"{said}; knowing nothing but how frequent words are gives {floor:.2f}."]
        if floor - best < LEARNT_NATS:
            early = update < EARLY_UPDATES
            reasons += [f"{update} updates are too few to judge it."] if early else []
            return "too early" if early else "did not train", tuple(reasons)
    else:
        reasons = [f"{said}; what word frequencies alone give is not known without its store."]
    dependence = run.depth[-1].values.get("source_dependence") if run.depth else None
    if _finite(dependence) and update >= EARLY_UPDATES and dependence < READS:
        reasons.append(f"Wrong sources raise its loss by {dependence:.3f} nats only: it is a language model so far.")
        return "ignores its source so far", tuple(reasons)
    if _finite(dependence) and dependence >= READS:
        reasons.append(f"Given wrong sources its loss rises by {dependence:.2f} nats, so it does read them.")
    elif floor is None and (figures["bleu"] or 0.0) < TRANSLATES_BLEU:
        return "unclear", tuple(reasons)
    if of_dev and now - best > WORSE_NATS:
        reasons.append(f"Its dev loss has risen to {now:.2f} since update {figures['best_update']:,.0f}.")
        return "got worse", tuple(reasons)
    if len(run.validations) > 1 and figures["best_update"] == run.validations[-1]["update"]:
        reasons.append("Its last validation is its best: it was still learning.")
    return "trains", tuple(reasons)


def _events(run: ReportRun) -> list[str]:
    """Return sentences on updates that failed and on how training ended."""
    counted = {
        "skipped": "updates were skipped for a loss or gradient that was not finite or a loss spike",
        "out_of_memory": "updates were left out for want of memory",
        "rejected": "updates were rejected by adaptive clipping",
    }
    found = []
    for key, meaning in counted.items():
        if total := sum(int(record.get(key) or 0) for record in run.train):
            found.append(f"{total:,} {meaning}.")
    if run.train and (back := int(run.train[-1].get("roll_backs") or 0)):
        found.append(f"It rolled back to an earlier checkpoint {back} time{'s' if back > 1 else ''}.")
    waits = [float(record.get("data_wait_share") or 0.0) for record in run.train]
    if waits and (share := sum(waits) / len(waits)) > 0.1:
        found.append(f"It spent {100 * share:.0f} % of its time waiting for data.")
    if not run.ending.finished:
        spent = run.train[-1].get("seconds") if run.train else None
        found.append(f"Not finished: {run.ending.said}{f' ({duration(spent)} of training)' if spent else ''}.")
    return found


def _unhealthy(run: ReportRun) -> tuple[list[str], list[str]]:
    """Return sentences on the measures that were out of their healthy bands at the last record, and what to do."""
    if not run.depth:
        return [], []
    warmup = run.experiment.training.schedule.warmup_updates
    found = [
        its.message.partition("; ")
        for its in readings(run.depth[-1], run.depth[:-1], warmup_updates=warmup)
        if not its.healthy
    ]
    remedies = list(dict.fromkeys(remedy for _, _, remedy in found if remedy))
    longest = [one for one in remedies if not any(one in other for other in remedies if other != one)]
    return [_sentence(said) for said, _, _ in found], [_sentence(remedy) for remedy in longest]


def _sentence(text: str) -> str:
    """Return a clause as a sentence; a symbol at its beginning, such as `r`, stays as it is."""
    return f"{text if text[1:2] == ' ' else text[:1].upper() + text[1:]}."


def _highest(run: ReportRun, key: str) -> float | None:
    return max((v[key] for v in run.validations if _finite(v.get(key))), default=None)


def _finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)
