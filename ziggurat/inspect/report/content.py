"""The content of a report, gathered before anything is drawn: verdicts on runs, their settings and translations."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeGuard

from ziggurat import __version__
from ziggurat.config import Experiment
from ziggurat.config.lifecycle import ValidationConfig
from ziggurat.data.corpus import Store, unigram_entropy
from ziggurat.evaluate.comparison import Comparison, System, compare
from ziggurat.evaluate.findings import USELESS_BLEU
from ziggurat.inspect.check import READS
from ziggurat.inspect.report.figure import Figure, numbers
from ziggurat.inspect.report.figures import figures_of
from ziggurat.inspect.report.runs import (
    MAX_DRAWN,
    ReportRun,
    SampleGroup,
    Sentences,
    Translated,
    sample_groups,
    translated,
)
from ziggurat.model.directory import common_weights
from ziggurat.system.errors import CheckpointError, ConfigError, DataError
from ziggurat.system.small_files import json_safe
from ziggurat.system.terminal import duration
from ziggurat.system.yaml_text import settings_by_key
from ziggurat.train.diagnosis.health import in_use, readings

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

_LEARNT_NATS = 0.3
"""_LEARNT_NATS is the distance below the loss of word frequencies at which a loss counts as learning.

Stalled deep post-norm models get 0.2 below it (experiments/depth-trainability, 18-18 layers).
"""
_WORSE_NATS = 0.5
"""_WORSE_NATS is the distance above its best at which a dev loss has become worse."""
_EARLY_UPDATES = 100
"""_EARLY_UPDATES is the number of updates up to which a run without signs of learning is not judged."""
_LONGER = 1.1
"""_LONGER is the factor above which runs count as different in length."""


@dataclass(frozen=True)
class Standing:
    """The state of a run, judged from its records.

    Attributes:
        verdict: the judgement in a few words.
        level: `good`, `warning`, `bad` or `unknown`.
        reasons: sentences with the numbers behind the verdict.
        complaints: sentences about everything unhealthy, in training or over depth.
        remedies: sentences about what to do about it.
        figures: the numbers of the table: `update`, `seconds`, `tokens_per_second`, `train_nll`, `best_nll`,
            `best_update`, `last_nll`, `bleu`, `chrf`; None if missing.
    """

    verdict: Verdict
    level: str
    reasons: tuple[str, ...]
    complaints: tuple[str, ...]
    remedies: tuple[str, ...]
    figures: Mapping[str, float | None]


def standing(run: ReportRun, floor: float | None) -> Standing:
    """Return the state of `run`.

    `floor` is the loss of word frequencies alone on the text of its losses, None if unknown
    (ziggurat.data.corpus.unigram_entropy).
    """
    figures = _figures(run)
    verdict, reasons = _judged(run, figures, floor)
    unhealthy, remedies = _unhealthy(run)
    complaints = (*_events(run), *unhealthy)
    return Standing(verdict, LEVELS[verdict], reasons, complaints, tuple(remedies), figures)


def _figures(run: ReportRun) -> dict[str, float | None]:
    last = run.train[-1] if run.train else {}
    scored = [v for v in run.validations if _finite(v.get("nll"))]
    best = min(scored, key=lambda v: v["nll"], default={})
    # The scores of one checkpoint, not the best BLEU of one with the best chrF of another.
    decoded = [v for v in run.validations if _finite(v.get("bleu")) or _finite(v.get("chrf"))]
    best_decoded = max(decoded, key=_scores, default={})
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
        "bleu": best_decoded.get("bleu"),
        "chrf": best_decoded.get("chrf"),
    }


def _judged(
    run: ReportRun, figures: Mapping[str, float | None], floor: float | None
) -> tuple[Verdict, tuple[str, ...]]:
    # (1) Runs without a usable loss
    if not run.train:
        return "no record", ("It left no record of training; its log.txt has its messages.",)
    of_dev = bool(run.validations)
    now = figures["last_nll"] if of_dev else run.train[-1].get("nll")
    where = "dev" if of_dev else "training"
    if not _finite(now):
        return "diverged", (f"Its latest {where} loss is not a finite number.",)
    best = figures["best_nll"] if of_dev else now
    assert best is not None  # the latest loss is finite
    # (2) Has it learned more than word frequencies?
    loss = f"{'Best dev' if of_dev else 'Latest training'} loss {best:.2f} nats per token"
    update = run.train[-1]["update"]
    if floor is not None:
        reasons = [f"{loss}; word frequencies alone give {floor:.2f}."]
        if floor - best < _LEARNT_NATS:
            if update <= _EARLY_UPDATES:
                return "too early", (*reasons, f"{update} updates are too few to judge it.")
            if _arrives(run, best, floor - _LEARNT_NATS):
                return "too early", (*reasons, "It still falls fast enough to get below that in as many updates again.")
            return "did not train", tuple(reasons)
    else:
        reasons = [f"{loss}; without its store, the loss of word frequencies alone is not known."]
    # (3) Does it read the source?
    dependence = run.late_depth.values.get("source_dependence") if run.late_depth else None
    if _finite(dependence) and update >= _EARLY_UPDATES and dependence < READS:
        reasons.append(f"Wrong sources raise its loss by only {dependence:.3f} nats: it is a language model so far.")
        return "ignores its source so far", tuple(reasons)
    if _finite(dependence) and dependence >= READS:
        reasons.append(f"Wrong sources raise its loss by {dependence:.2f} nats, so it does read them.")
    elif floor is None and (figures["bleu"] or 0.0) < USELESS_BLEU:
        return "unclear", tuple(reasons)
    # (4) Is it still learning?
    if of_dev and now - best > _WORSE_NATS:
        reasons.append(f"Its dev loss has risen to {now:.2f} since update {figures['best_update']:,.0f}.")
        return "got worse", tuple(reasons)
    if len(run.validations) > 1 and figures["best_update"] == run.validations[-1]["update"]:
        reasons.append("Its last validation is its best: it was still learning.")
    return "trains", tuple(reasons)


def _arrives(run: ReportRun, best: float, bar: float) -> bool:
    """Return True for a loss that is below `bar` after falling as much again as in the second half of the run."""
    records = run.validations if len(run.validations) > 1 else run.train
    losses = [(record["update"], record["nll"]) for record in records if _finite(record.get("nll"))]
    before = [nll for update, nll in losses if 2 * update <= losses[-1][0]]
    return bool(before) and best - (before[-1] - losses[-1][1]) <= bar


def unlike(runs: Sequence[ReportRun]) -> dict[str, str]:
    """Return other differences between runs that affect which is better, as text: `updates`, `width` and `depth`."""
    updates = [int(run.train[-1]["update"]) for run in runs if run.train]
    models = [run.experiment.model for run in runs]
    widths = sorted({model.d_model for model in models})
    depths = dict.fromkeys(f"{model.encoder.layers}-{model.decoder.layers}" for model in models)
    found = {}
    if updates and max(updates) > _LONGER * min(updates):
        found["updates"] = f"they had {min(updates):,} to {max(updates):,} updates"
    if len(widths) > 1:
        found["width"] = f"they are {' or '.join(map(str, widths))} wide"
    if len(depths) > 1:
        found["depth"] = f"they have {' or '.join(depths)} layers"
    return found


def _events(run: ReportRun) -> list[str]:
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
    waited = spent = 0.0
    for record in run.train:
        now = record.get("seconds")
        if _finite(now) and now > spent:
            waited += float(record.get("data_wait_share") or 0.0) * (now - spent)
            spent = now
    return waited / spent if spent else 0.0


def _unhealthy(run: ReportRun) -> tuple[list[str], list[str]]:
    if run.late_depth is None:
        return [], []
    training = run.experiment.training
    found = [
        reading.message.partition("; ")
        for reading in readings(
            run.late_depth,
            run.depth[:-1],
            warmup_updates=training.schedule.warmup_updates,
            frozen=training.freeze,
            used=in_use(run.experiment),
        )
        if not reading.healthy
    ]
    # Remedies repeat between measures, and some contain others, so each is given once, in its longest form.
    remedies = list(dict.fromkeys(remedy for _, _, remedy in found if remedy))
    longest = [one for one in remedies if not any(one in other for other in remedies if other != one)]
    return [_as_sentence(problem) for problem, _, _ in found], [_as_sentence(remedy) for remedy in longest]


def _as_sentence(text: str) -> str:
    return f"{text if text[1:2] == ' ' else text[:1].upper() + text[1:]}."


def _scores(validation: Mapping[str, Any]) -> list[float]:
    return [validation[m] if _finite(validation.get(m)) else -math.inf for m in ("bleu", "chrf")]


def _finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


# Settings


@dataclass(frozen=True)
class Setting:
    """One key of the configuration, with its values in YAML notation.

    There is one value for each run; from `set_away`, the default and then the run's value.
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
    """Return the settings of one experiment that differ from the defaults; corpora and languages have no defaults."""
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


@dataclass(frozen=True)
class Missing:
    """Something that a report cannot show: the number of the run, what is missing, and why or how to get it."""

    run: int
    what: str
    way: str


@dataclass(frozen=True)
class SampleTranslations:
    """Translations of the same sentences by all runs.

    Attributes:
        sentences: the sentences.
        by_run: translations of each run of the report; None if a run has none.
        comparison: scores, tests and counts of the runs that have translations, in their order.
        groups: sentences worth reading.
        which: the weights of every run, `best` or `last`; None: the default of other commands, of one kind.
    """

    sentences: Sentences
    by_run: tuple[Translated | None, ...]
    comparison: Comparison
    groups: tuple[SampleGroup, ...]
    which: str | None


@dataclass(frozen=True)
class Content:
    """Everything that a report shows.

    Attributes:
        runs: the runs, in the order given.
        standings: one for each run.
        figures: figures of all runs.
        settings: settings that differ between runs; for a single run those that differ from the default, default first.
        translations: translations of the runs; None if none were requested, or no run has any.
        missing: everything that cannot be shown.
        environment: versions and machine of this report; those of runs are in ReportRun.environment.
    """

    runs: tuple[ReportRun, ...]
    standings: tuple[Standing, ...]
    figures: tuple[Figure, ...]
    settings: tuple[Setting, ...]
    translations: SampleTranslations | None
    missing: tuple[Missing, ...]
    environment: tuple[tuple[str, str], ...]


def gather(
    runs: Sequence[ReportRun],
    sentences: Callable[[], Sentences] | None,
    say: Callable[[str], None] = lambda _: None,
) -> Content:
    """Return everything that a report of `runs` shows.

    Args:
        runs: from ziggurat.inspect.report.runs.read_runs.
        sentences: reads the sentences to translate; a DataError becomes part of the report. None: no translations.
        say: receives messages about steps that take time.

    Raises ConfigError for more than MAX_DRAWN runs of one depth, for which nothing could be drawn.
    """
    figures = figures_of(runs)
    if len(runs) > MAX_DRAWN and not figures:
        raise ConfigError(
            f"{len(runs)} runs of one depth are too many for one report; at most {MAX_DRAWN}, or runs of several depths"
        )
    missing = [lack for run in runs for lack in _lacks(run)]
    floors = []
    for run in runs:
        floor, lacks = _floor(run)
        floors.append(floor)
        missing += lacks
    translations, untranslated = _translate_all(runs, sentences, say) if sentences is not None else (None, [])
    settings = differing([run.experiment for run in runs]) if len(runs) > 1 else set_away(runs[0].experiment)
    return Content(
        tuple(runs),
        tuple(standing(run, floor) for run, floor in zip(runs, floors, strict=True)),
        tuple(figures),
        tuple(settings),
        translations,
        (*missing, *untranslated),
        _environment(),
    )


def _first_due(config: ValidationConfig) -> str:
    due = [f"{config.every_updates:,} updates (`training.validation.every_updates`)"] if config.every_updates else []
    due += [f"{config.every_epochs} epochs (`training.validation.every_epochs`)"] if config.every_epochs else []
    return " or ".join(due)


def _lacks(run: ReportRun) -> list[Missing]:
    lacks = []
    if not run.train:
        way = f"It left no record; `{run.folder / 'log.txt'}` says how far it got."
        lacks.append(Missing(run.colour, "learning curves", way))
    elif not run.validations:
        way = (
            f"The first is due after {_first_due(run.experiment.training.validation)}."
            if run.experiment.data.dev
            else "Name a dev set in `data.dev`, prepare again, and train again."
        )
        lacks.append(Missing(run.colour, "validations", way))
    elif not any("bleu" in record for record in run.validations):
        lacks.append(Missing(run.colour, "BLEU over training", "Train with `training.validation.decode: true`."))
    if not run.depth:
        way = f"`ziggurat diagnose {run.folder}` measures the checkpoints that are kept."
        lacks.append(Missing(run.colour, "profiles over depth", way))
    return lacks


def _floor(run: ReportRun) -> tuple[float | None, list[Missing]]:
    # A dev loss is compared with that of word frequencies on dev text, because training text written by a teacher is
    # simpler and has a lower loss.
    try:
        store = Store.open(Path(run.experiment.data.store).expanduser())
        return unigram_entropy(store, on_dev=bool(run.validations and store.dev)), []
    except DataError as error:
        return None, [Missing(run.colour, "loss that word frequencies alone give", f"{error}.")]


def _translate_all(
    runs: Sequence[ReportRun], sentences: Callable[[], Sentences], say: Callable[[str], None]
) -> tuple[SampleTranslations | None, list[Missing]]:
    try:
        chosen = sentences()
    except DataError as error:
        way = f"{error}. Or name a test set with `--source` and `--reference`."
        return None, [Missing(run.colour, "translations", way) for run in runs]
    found: list[Translated | None] = []
    failed, which = [], common_weights([run.folder for run in runs])
    for run in runs:
        try:
            found.append(translated(run, chosen, say, which))
        except (CheckpointError, DataError, ConfigError) as error:
            found.append(None)
            failed.append(Missing(run.colour, "translations", f"{error}."))
    systems = [
        System(run.name, [of_run.outputs], [of_run.origin])
        for run, of_run in zip(runs, found, strict=True)
        if of_run is not None
    ]
    if not systems:
        return None, failed
    try:
        comparison = compare(
            systems, [chosen.references], chosen.sources, target_language=chosen.target_language, say=say
        )
    except ConfigError as error:  # BLEU's tokenizer for Japanese or Korean is an extra that may not be installed
        return None, [*failed, *(Missing(run.colour, "scores and translations", f"{error}.") for run in runs)]
    names, outputs = [run.name for run in runs], [None if of_run is None else of_run.outputs for of_run in found]
    groups = sample_groups(names, outputs, chosen.sources, chosen.references)
    return SampleTranslations(chosen, tuple(found), comparison, tuple(groups), which), failed


def _environment() -> tuple[tuple[str, str], ...]:
    found = [("ziggurat", __version__), ("Python", platform.python_version())]
    found += [(name, metadata.version(name)) for name in ("torch", "sacrebleu", "matplotlib")]
    return (*found, ("machine", f"{platform.system()} {platform.machine()}"))


def as_record(content: Content) -> dict[str, Any]:
    """Return the content for JSON; numbers that are not finite become None."""
    translations = content.translations
    document = {
        "runs": [
            {
                "name": run.name,
                "folder": str(run.folder),
                "method": run.experiment.model.methods(),
                "ending": run.ending.text,
                "verdict": standing.verdict,
                "reasons": standing.reasons,
                "complaints": standing.complaints,
                "remedies": standing.remedies,
                "figures": dict(standing.figures),
            }
            for run, standing in zip(content.runs, content.standings, strict=True)
        ],
        "unlike": list(unlike(content.runs)),
        "settings": [asdict(setting) for setting in content.settings],
        "missing": [
            {"run": content.runs[lack.run].name, "what": lack.what, "way": lack.way} for lack in content.missing
        ],
        "figures": [
            {"key": figure.key, "section": figure.section, "title": figure.title, "csv": numbers(figure)}
            for figure in content.figures
        ],
        "weights": translations and translations.which,
        "comparison": translations and translations.comparison.as_record(),
        "environment": dict(content.environment),
    }
    return json_safe(document)
