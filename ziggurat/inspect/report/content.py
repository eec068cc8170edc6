"""The content of a report, gathered before anything is drawn."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ziggurat import __version__
from ziggurat.config.lifecycle import ValidationConfig
from ziggurat.data.corpus import Store, unigram_entropy
from ziggurat.evaluate.comparison import Comparison, System, compare
from ziggurat.inspect.report.figure import Figure, numbers
from ziggurat.inspect.report.figures import figures_of
from ziggurat.inspect.report.runs import MAX_DRAWN, ReportRun
from ziggurat.inspect.report.samples import SampleGroup, sample_groups
from ziggurat.inspect.report.summary import Setting, Standing, differing, set_away, standings
from ziggurat.inspect.report.translations import Sentences, Translated, translated
from ziggurat.system.errors import CheckpointError, ConfigError, DataError
from ziggurat.system.small_files import json_safe


@dataclass(frozen=True)
class Missing:
    """Something that a report cannot show: the number of the run, what is missing, and why or how to get it."""

    run: int
    what: str
    way: str


@dataclass(frozen=True)
class Translations:
    """Translations of the same sentences by all runs.

    Attributes:
        sentences: the sentences.
        by_run: translations of each run of the report; None where a run has none.
        comparison: scores, tests and counts of the runs that have translations, in their order.
        groups: sentences worth reading.
    """

    sentences: Sentences
    by_run: tuple[Translated | None, ...]
    comparison: Comparison
    groups: tuple[SampleGroup, ...]


@dataclass(frozen=True)
class Content:
    """Everything that a report shows.

    Attributes:
        runs: the runs, in the order given.
        standings: one for each run.
        figures: figures of all runs.
        settings: settings that differ between runs; for a single run those that are not the default, the default first.
        translations: None where none were asked for, or no run has any.
        missing: everything that cannot be shown.
        environment: versions and machine of this report; those of the runs are in ReportRun.environment.
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
        runs: from ziggurat.inspect.report.runs.read_runs.
        sentences: reads the sentences to translate; a DataError becomes part of the report. None: no translations.
        say: takes messages on steps that take time.

    Raises ConfigError for more than MAX_DRAWN runs that are all of one depth: nothing could be drawn of them.
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
    translations, untranslated = translate_all(runs, sentences, say) if sentences is not None else (None, [])
    settings = differing([run.experiment for run in runs]) if len(runs) > 1 else set_away(runs[0].experiment)
    return Content(
        tuple(runs),
        tuple(standings(runs, floors)),
        tuple(figures),
        tuple(settings),
        translations,
        (*missing, *untranslated),
        _environment(),
    )


def _first_due(config: ValidationConfig) -> str:
    """Return when a run validates for the first time, in words."""
    due = [f"{config.every_updates:,} updates (`training.validation.every_updates`)"] if config.every_updates else []
    due += [f"{config.every_epochs} epochs (`training.validation.every_epochs`)"] if config.every_epochs else []
    return " or ".join(due)


def _lacks(run: ReportRun) -> list[Missing]:
    """Return the records that a run does not have, and how to get them."""
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
    """Return the loss that word frequencies alone give, or None and why it is not known."""
    try:
        return unigram_entropy(Store.open(Path(run.experiment.data.store).expanduser())), []
    except DataError as error:
        lack = Missing(run.colour, "loss that word frequencies alone give", _sentence(error))
        return None, [lack]


def _sentence(error: Exception) -> str:
    """Return the message of an error as a sentence."""
    return f"{error}."


def translate_all(
    runs: Sequence[ReportRun], sentences: Callable[[], Sentences], say: Callable[[str], None]
) -> tuple[Translations | None, list[Missing]]:
    """Return the runs' translations of the sentences, and the runs that have none, with the reason."""
    try:
        chosen = sentences()
    except DataError as error:
        way = f"{_sentence(error)} Or name a test set by `--source` and `--reference`."
        return None, [Missing(run.colour, "translations", way) for run in runs]
    found: list[Translated | None] = []
    failed = []
    for run in runs:
        try:
            found.append(translated(run, chosen, say))
        except (CheckpointError, DataError, ConfigError) as error:
            found.append(None)
            failed.append(Missing(run.colour, "translations", _sentence(error)))
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
    except ConfigError as error:  # BLEU's tokenizer for Japanese or Korean is an extra, which may not be installed
        return None, [*failed, *(Missing(run.colour, "scores and translations", _sentence(error)) for run in runs)]
    names, outputs = [run.name for run in runs], [None if of_run is None else of_run.outputs for of_run in found]
    groups = sample_groups(names, outputs, chosen.sources, chosen.references)
    return Translations(chosen, tuple(found), comparison, tuple(groups)), failed


def _environment() -> tuple[tuple[str, str], ...]:
    """Return the versions of the main packages, and the machine."""
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
                "ending": run.ending.text,
                "verdict": standing.verdict,
                "reasons": standing.reasons,
                "complaints": standing.complaints,
                "remedies": standing.remedies,
                "figures": dict(standing.figures),
            }
            for run, standing in zip(content.runs, content.standings, strict=True)
        ],
        "settings": [asdict(setting) for setting in content.settings],
        "missing": [
            {"run": content.runs[lack.run].name, "what": lack.what, "way": lack.way} for lack in content.missing
        ],
        "figures": [
            {"key": figure.key, "section": figure.section, "title": figure.title, "csv": numbers(figure)}
            for figure in content.figures
        ],
        "comparison": translations and translations.comparison.as_record(),
        "environment": dict(content.environment),
    }
    return json_safe(document)
