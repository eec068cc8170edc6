"""The first table of a report: whether each run trained, its figures, and anything that looks unhealthy.

Below it, the settings in which runs differ from each other or from the defaults.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

from ziggurat.config import Experiment
from ziggurat.inspect.report.runs import ReportRun
from ziggurat.inspect.verdict import READS
from ziggurat.system.duration import duration
from ziggurat.system.yaml_text import settings_by_key
from ziggurat.train.diagnosis.health import readings

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
"""Distance below the loss of word frequencies alone, from which a loss counts as learning.

Stalled deep post-norm models get 0.2 below it (experiments/depth-trainability, 18-18 layers).
"""
WORSE_NATS = 0.5
"""Distance above its best from which a dev loss has got worse."""
TRANSLATES_BLEU = 5.0
"""Dev BLEU that only models reach that translate; used where the loss of word frequencies is not known."""
EARLY_UPDATES = 100
"""Updates before which a run without signs of learning is not judged."""


@dataclass(frozen=True)
class Standing:
    """The state of a run, judged from its records.

    Attributes:
        verdict: the judgement in a few words.
        level: `good`, `warning`, `bad` or `unknown`.
        reasons: sentences with the numbers behind the verdict.
        complaints: sentences on everything unhealthy, in training or over depth.
        remedies: sentences on what to do about it.
        figures: the numbers of the table: `update`, `seconds`, `tokens_per_second`, `train_nll`, `best_nll`,
            `best_update`, `last_nll`, `bleu`, `chrf`; None where there is none.
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
    """Return the state of `run`.

    `floor` is the loss that word frequencies alone give (ziggurat.data.corpus.unigram_entropy), None if unknown.
    """
    figures = _figures(run)
    verdict, reasons = _judged(run, figures, floor)
    unhealthy, remedies = _unhealthy(run)
    complaints = (*_events(run), *unhealthy)
    return Standing(verdict, LEVELS[verdict], reasons, complaints, tuple(remedies), figures)


def _figures(run: ReportRun) -> dict[str, float | None]:
    """Return the numbers of the table."""
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
    """Return the verdict on a run, and the sentences that give the reasons."""
    # (1) Runs without a usable loss
    if not run.train:
        return "no record", ("It left no record of training; its log.txt has its messages.",)
    of_dev = bool(run.validations)
    now = figures["last_nll"] if of_dev else run.train[-1].get("nll")
    where = "dev" if of_dev else "training"
    if not _finite(now):
        return "diverged", (f"Its latest {where} loss is not a finite number.",)
    best = figures["best_nll"] if of_dev else now
    assert best is not None  # the latest is finite
    # (2) Has it learnt more than word frequencies?
    loss = f"{'Best dev' if of_dev else 'Latest training'} loss {best:.2f} nats per token"
    update = run.train[-1]["update"]
    if floor is not None:
        reasons = [f"{loss}; word frequencies alone give {floor:.2f}."]
        if floor - best < LEARNT_NATS:
            early = update < EARLY_UPDATES
            reasons += [f"{update} updates are too few to judge it."] if early else []
            return "too early" if early else "did not train", tuple(reasons)
    else:
        reasons = [f"{loss}; without its store, the loss of word frequencies alone is not known."]
    # (3) Does it read the source?
    dependence = run.depth[-1].values.get("source_dependence") if run.depth else None
    if _finite(dependence) and update >= EARLY_UPDATES and dependence < READS:
        reasons.append(f"Wrong sources raise its loss by only {dependence:.3f} nats: it is a language model so far.")
        return "ignores its source so far", tuple(reasons)
    if _finite(dependence) and dependence >= READS:
        reasons.append(f"Wrong sources raise its loss by {dependence:.2f} nats, so it does read them.")
    elif floor is None and (figures["bleu"] or 0.0) < TRANSLATES_BLEU:
        return "unclear", tuple(reasons)
    # (4) Is it still learning?
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
        "out_of_memory": "updates were left out for lack of memory",
        "rejected": "updates were rejected by adaptive clipping",
    }
    found = []
    for key, meaning in counted.items():
        if total := sum(int(record.get(key) or 0) for record in run.train):
            found.append(f"{total:,} {meaning}.")
    if run.train and (back := int(run.train[-1].get("roll_backs") or 0)):
        found.append(f"It rolled back to an earlier checkpoint {back} time{'s' if back > 1 else ''}.")
    if (share := _waiting_share(run)) > 0.1:
        found.append(f"It spent {100 * share:.0f} % of its time waiting for data.")
    if not run.ending.finished:
        spent = run.train[-1].get("seconds") if run.train else None
        found.append(f"Not finished: {run.ending.text}{f' ({duration(spent)} of training)' if spent else ''}.")
    return found


def _waiting_share(run: ReportRun) -> float:
    """Return the share of the time that a run has waited for data; a record counts by the time since the one before."""
    waited = spent = 0.0
    for record in run.train:
        now = record.get("seconds")
        if _finite(now) and now > spent:
            waited += float(record.get("data_wait_share") or 0.0) * (now - spent)
            spent = now
    return waited / spent if spent else 0.0


def _unhealthy(run: ReportRun) -> tuple[list[str], list[str]]:
    """Return sentences on the measures outside their healthy bands at the last record, and remedies."""
    if not run.depth:
        return [], []
    training = run.experiment.training
    found = [
        reading.message.partition("; ")
        for reading in readings(
            run.depth[-1], run.depth[:-1], warmup_updates=training.schedule.warmup_updates, frozen=training.freeze
        )
        if not reading.healthy
    ]
    # Remedies repeat between measures, and some contain others: each is told once, in its longest form.
    remedies = list(dict.fromkeys(remedy for _, _, remedy in found if remedy))
    longest = [one for one in remedies if not any(one in other for other in remedies if other != one)]
    return [_sentence(problem) for problem, _, _ in found], [_sentence(remedy) for remedy in longest]


def _sentence(text: str) -> str:
    """Return a clause as a sentence; a symbol at its beginning, such as `r`, keeps its case."""
    return f"{text if text[1:2] == ' ' else text[:1].upper() + text[1:]}."


def _highest(run: ReportRun, key: str) -> float | None:
    return max((v[key] for v in run.validations if _finite(v.get(key))), default=None)


def _finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


# Settings


@dataclass(frozen=True)
class Setting:
    """One key of the configuration.

    Attributes:
        key: such as `model.encoder.layers`.
        values: one for each run, as YAML would show it; from `set_away` the default, then that of the run.
    """

    key: str
    values: tuple[str, ...]


def differing(experiments: Sequence[Experiment]) -> list[Setting]:
    """Return the settings that differ between `experiments`."""
    flat = [settings_by_key(experiment.model_dump(mode="json")) for experiment in experiments]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    rows = [Setting(key, tuple(_shown(one, key) for one in flat)) for key in keys]
    return [row for row in rows if len(set(row.values)) > 1]


def set_away(experiment: Experiment) -> list[Setting]:
    """Return the settings of one experiment that are not the defaults; corpora and languages have no defaults."""
    required = {
        key: getattr(experiment.data, key)
        for key, field in type(experiment.data).model_fields.items()
        if field.is_required()
    }
    return differing([Experiment(data=type(experiment.data)(**required)), experiment])


def _shown(flat: Mapping[str, Any], key: str) -> str:
    if key not in flat:
        return "–"
    value = flat[key]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
