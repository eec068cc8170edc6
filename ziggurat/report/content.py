"""Everything that a report of runs shows, gathered before any of it is drawn."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ziggurat import __version__
from ziggurat.data.corpus import Store
from ziggurat.depth.trial_data import unigram_entropy
from ziggurat.errors import CheckpointError, ConfigError, DataError
from ziggurat.evaluation.comparison import Comparison, System, compare
from ziggurat.report.differences import Setting, differing, set_away
from ziggurat.report.figure import Figure, numbers
from ziggurat.report.figures import figures_of
from ziggurat.report.runs import ReportRun
from ziggurat.report.samples import SampleGroup, sample_groups
from ziggurat.report.summary import Standing, standings
from ziggurat.report.translations import Sentences, Translated, translated

__all__ = ["Content", "Missing", "Translations", "as_record", "gather", "translate_all"]


@dataclass(frozen=True)
class Missing:
    """What a report cannot show: of which run, why, and how to get it."""

    run: int
    what: str
    way: str


@dataclass(frozen=True)
class Translations:
    """What the runs make of the same sentences.

    Attributes:
        sentences: which.
        by_run: of each run of the report; None: it has none.
        comparison: scores, tests and counts of those that have some, in their order.
        groups: sentences worth reading.
    """

    sentences: Sentences
    by_run: tuple[Translated | None, ...]
    comparison: Comparison
    groups: tuple[SampleGroup, ...]


@dataclass(frozen=True)
class Content:
    """All that a report shows.

    Attributes:
        runs: in their order.
        standings: one for each run.
        figures: of all runs.
        settings: that the runs differ in; of a single run those set away from the defaults, the default first.
        translations: None where none were asked for, or no run has any.
        missing: what cannot be shown.
        environment: versions and machine of this report; the runs' own are in their logs.
    """

    runs: tuple[ReportRun, ...]
    standings: tuple[Standing, ...]
    figures: tuple[Figure, ...]
    settings: tuple[Setting, ...]
    translations: Translations | None
    missing: tuple[Missing, ...]
    environment: tuple[tuple[str, str], ...]


def gather(
    runs: Sequence[ReportRun],
    sentences: Callable[[], Sentences] | None,
    say: Callable[[str], None] = lambda _: None,
) -> Content:
    """Return everything that a report of `runs` shows.

    Args:
        runs: from ziggurat.report.runs.read_runs.
        sentences: gives what the runs are to translate; its DataError becomes a part of the report. None: nothing.
        say: told what takes time.
    """
    missing = [lack for run in runs for lack in _lacks(run)]
    floors, found = [], []
    for run in runs:
        floor, lack = _floor(run)
        floors.append(floor)
        found += lack
    translations, failed = translate_all(runs, sentences, say) if sentences is not None else (None, [])
    settings = differing([run.experiment for run in runs]) if len(runs) > 1 else set_away(runs[0].experiment)
    return Content(
        tuple(runs),
        tuple(standings(runs, floors)),
        tuple(figures_of(runs)),
        tuple(settings),
        translations,
        (*missing, *found, *failed),
        _environment(),
    )


def _lacks(run: ReportRun) -> list[Missing]:
    """Return what was not recorded of a run, and how to have it."""
    lacks = []
    if not run.train:
        way = f"It left no record; `{run.folder / 'log.txt'}` says how far it came."
        lacks.append(Missing(run.colour, "learning curves", way))
    elif not run.validations:
        way = (
            f"The first is due after {run.experiment.training.validation.every_updates:,} updates "
            "(`training.validation.every_updates`)."
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
    """Return the loss that bare word frequencies give, or why it is not known."""
    try:
        return unigram_entropy(Store.open(Path(run.experiment.data.store).expanduser())), []
    except DataError as error:
        lack = Missing(run.colour, "loss that word frequencies alone give", _sentence(error))
        return None, [lack]


def _sentence(error: Exception) -> str:
    """Return the message of an error as a sentence. Paths in it are relative to where the report is made."""
    return f"{error}."


def translate_all(
    runs: Sequence[ReportRun], sentences: Callable[[], Sentences], say: Callable[[str], None]
) -> tuple[Translations | None, list[Missing]]:
    """Return what the runs make of the sentences, and which of them have no translations, and why."""
    try:
        shown = sentences()
    except DataError as error:
        way = f"{_sentence(error)} Or name a test set by `--source` and `--reference`."
        return None, [Missing(run.colour, "translations", way) for run in runs]
    found: list[Translated | None] = []
    failed = []
    for run in runs:
        try:
            found.append(translated(run, shown, say))
        except (CheckpointError, DataError, ConfigError) as error:
            found.append(None)
            failed.append(Missing(run.colour, "translations", _sentence(error)))
    systems = [
        System(run.name, [its.outputs], [its.origin]) for run, its in zip(runs, found, strict=True) if its is not None
    ]
    if not systems:
        return None, failed
    comparison = compare(systems, [shown.references], shown.sources, target_language=shown.target_language, say=say)
    names, outputs = [run.name for run in runs], [None if its is None else its.outputs for its in found]
    groups = sample_groups(names, outputs, shown.sources, shown.references)
    return Translations(shown, tuple(found), comparison, tuple(groups)), failed


def _environment() -> tuple[tuple[str, str], ...]:
    """Return versions and machine, by name."""
    found = [("ziggurat", __version__), ("Python", platform.python_version())]
    found += [(name, metadata.version(name)) for name in ("torch", "sacrebleu", "matplotlib")]
    return (*found, ("machine", f"{platform.system()} {platform.machine()}"))


def as_record(content: Content) -> dict[str, Any]:
    """Return the content as a document for JSON; numbers that are not finite become None."""
    translations = content.translations
    document = {
        "runs": [
            {
                "name": run.name,
                "folder": str(run.folder),
                "ending": run.ending.said,
                "verdict": its.verdict,
                "reasons": its.reasons,
                "complaints": its.complaints,
                "remedies": its.remedies,
                "figures": dict(its.figures),
            }
            for run, its in zip(content.runs, content.standings, strict=True)
        ],
        "settings": [asdict(setting) for setting in content.settings],
        "missing": [
            {"run": content.runs[lack.run].name, "what": lack.what, "way": lack.way} for lack in content.missing
        ],
        "figures": [{"key": f.key, "section": f.section, "title": f.title, "csv": numbers(f)} for f in content.figures],
        "comparison": translations and translations.comparison.as_record(),
        "environment": dict(content.environment),
    }
    return _finite(document)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value
