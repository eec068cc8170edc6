"""`evaluate` on several test sets, or of several checkpoints: each one's scores, and their mean or spread."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ziggurat.cli.engine import ModelOptions, open_engine, warnings_shown
from ziggurat.cli.output import check_one_stream, counted, output_folder, print_json, refuse_overwriting, say
from ziggurat.cli.scoring import ScoreOptions, Texts, check_test_set, model_scores, read_texts
from ziggurat.system.errors import ConfigError, printable

if TYPE_CHECKING:
    from ziggurat.evaluate.scores import Score


@dataclass(frozen=True)
class _Spread:
    """One metric over several checkpoints or test sets."""

    name: str
    """Name of the metric."""
    signature: str
    """Signature of all scores; where they differ each once, and then the scores do not compare."""
    mean: float
    deviation: float
    """Standard deviation of a sample (n - 1); 0 of a single score."""
    min: float
    max: float

    def line(self, decimals: int, of: str) -> str:
        """Return the figures in words; `of` says over what."""
        mean, deviation, low, high = (
            f"{value:.{decimals}f}" for value in (self.mean, self.deviation, self.min, self.max)
        )
        return f"{self.name}|{self.signature} = mean {mean}, standard deviation {deviation}, {low} to {high} ({of})"


def parse_test_sets(given: Sequence[str]) -> dict[str, tuple[str, list[str]]]:
    """Return source and references of each `[NAME=]SOURCE,REFERENCE[,REFERENCE...]` by name. Raises ConfigError."""
    found: dict[str, tuple[str, list[str]]] = {}
    for text in given:
        name, equals, paths = text.partition("=")
        if not equals or not re.fullmatch(r"[\w.+-]+", name):
            name, paths = "", text
        source, *references = paths.split(",")
        if not source or not references or not all(references):
            raise ConfigError(
                f"`--test-set {printable(text)}`: say [NAME=]SOURCE,REFERENCE[,REFERENCE...], such as "
                "wmt14=newstest2014.en,newstest2014.de"
            )
        name = name or Path(source).name.partition(".")[0]
        if name in found:
            raise ConfigError(
                f"two test sets are called `{printable(name)}`: give them names, `NAME={printable(paths)}`"
            )
        found[name] = source, references
    return found


def score_test_sets(
    models: Sequence[str],
    test_sets: Sequence[str],
    output: str | None,
    scoring: ScoreOptions,
    opening: ModelOptions,
    *,
    json: bool,
) -> None:
    """Translate and score each of `test_sets`; print the scores of each and their mean."""
    named = parse_test_sets(test_sets)
    check_one_stream(*(path for source, references in named.values() for path in (source, *references)))
    for _, references in named.values():
        scoring.refuse_references(len(references))
    sets = {name: read_texts(source, references) for name, (source, references) in named.items()}
    folder = output_folder(output)
    for name, texts in sets.items():
        refuse_overwriting(_kept(folder, name), *texts.paths)
    lines = sum(len(texts.sources) for texts in sets.values())
    found: dict[str, list[Score]] = {}
    with warnings_shown(), open_engine(models, opening, lines=lines) as translator:
        for texts in sets.values():
            test_set = scoring.test_set(texts.references, texts.sources, translator.target_language)
            check_test_set(test_set, scoring.metrics, scoring.comet)
        for name, texts in sets.items():
            say(f"test set {name}: {counted(len(texts.sources), 'line')}")
            found[name] = model_scores(translator, texts, _kept(folder, name), scoring)
    spreads = _spreads(list(found.values()))
    if json:
        document = [{"name": name, "scores": [s.as_record() for s in scores]} for name, scores in found.items()]
        print_json({"test_sets": document, "summary": [asdict(spread) for spread in spreads]})
        return
    for name, scores in found.items():
        print("\n".join(f"{name}: {score}" for score in scores))
    of_any = next(iter(found.values()))
    for spread, score in zip(spreads, of_any, strict=True):
        print(spread.line(score.decimals, counted(len(found), "test set")))


def score_checkpoints(
    run: str,
    checkpoints: str,
    texts: Texts,
    output: str | None,
    scoring: ScoreOptions,
    opening: ModelOptions,
    *,
    json: bool,
) -> None:
    """Translate with each of the `checkpoints` of a run and score it; print all scores, and their mean and spread."""
    from ziggurat.config import load_experiment
    from ziggurat.model.run_folder import CHECKPOINTS, CONFIG_FILE, checkpoint_update, refuse_missing
    from ziggurat.train.selection import CheckpointSelection, selected_checkpoints

    selection = CheckpointSelection.parse(checkpoints)
    refuse_missing(Path(run), "run")
    if not (Path(run) / CHECKPOINTS).is_dir():
        raise ConfigError(f"{run}: not a run (no {CHECKPOINTS}/): `--checkpoints` chooses among those of one")
    training = load_experiment(Path(run) / CONFIG_FILE).training
    updates = [checkpoint_update(folder) for folder in selected_checkpoints(Path(run), training, selection)]
    folder = output_folder(output)
    for update in updates:
        refuse_overwriting(_kept(folder, str(update)), *texts.paths)
    found: dict[int, list[Score]] = {}
    for update in updates:
        this = replace(opening, which=str(update))
        with (
            warnings_shown(),
            open_engine([run], this, lines=len(texts.sources)) as translator,
        ):
            if not found:
                test_set = scoring.test_set(texts.references, texts.sources, translator.target_language)
                check_test_set(test_set, scoring.metrics, scoring.comet)
            found[update] = model_scores(translator, texts, _kept(folder, str(update)), scoring)
    spreads = _spreads(list(found.values()))
    if json:
        document = [{"update": update, "scores": [s.as_record() for s in scores]} for update, scores in found.items()]
        print_json({"checkpoints": document, "summary": [asdict(spread) for spread in spreads]})
        return
    for update, scores in found.items():
        shown = "  ".join(f"{score.name} {score.value:.{max(2, score.decimals)}f}" for score in scores)
        print(f"update {update}: {shown}")
    for spread in spreads:
        print(spread.line(2, f"{counted(len(found), 'checkpoint')}, {selection}"))


def _kept(folder: Path | None, name: str) -> str | None:
    return None if folder is None else str(folder / f"{name}.txt")


def _spreads(scores: Sequence[Sequence[Score]]) -> list[_Spread]:
    """Return the spread of each metric over [checkpoints or test sets][metrics]; warn of signatures that differ."""
    found = []
    for of_metric in zip(*scores, strict=True):
        values, signatures = [score.value for score in of_metric], list(dict.fromkeys(s.signature for s in of_metric))
        if len(signatures) > 1:
            say(f"warning: the scores by {of_metric[0].name} have different signatures: their mean says little")
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        signature = " or ".join(signatures)
        found.append(
            _Spread(of_metric[0].name, signature, statistics.fmean(values), deviation, min(values), max(values))
        )
    return found
