"""The runs of a report: configuration, records, and their translations of the same sentences."""

from __future__ import annotations

import csv
import io
import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import regex
import xxhash
from pydantic import RootModel
from sacrebleu import CHRF

from ziggurat.config import DecodingConfig, Experiment, load_experiment
from ziggurat.data.corpus import Store
from ziggurat.evaluate.tokenisation import unspaced_script
from ziggurat.model.directory import locate_weights, weights_origin
from ziggurat.model.low_rank import weights_fingerprint
from ziggurat.model.run_folder import (
    CHECKPOINTS,
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    DecodingSpeed,
    KeptScore,
    read_scores,
    read_speed,
    refuse_missing,
)
from ziggurat.system.errors import CheckpointError, ConfigError, DataError
from ziggurat.system.files import folder_kind, write_atomically
from ziggurat.system.small_files import built, parse_json, read_bounded, read_json, read_json_lines
from ziggurat.train.records import Record, read_records
from ziggurat.translate.interface import translate_tagged
from ziggurat.translate.results import TranslationWarning
from ziggurat.translate.translator import load_translator

MAX_DRAWN = 8
"""MAX_DRAWN is the maximum number of runs with individual curves in a report, as colours must be distinguishable."""
MAX_RUNS = 200
"""MAX_RUNS is the maximum number of runs in one report. With more than MAX_DRAWN, it has only the figure against depth,
with a line per method."""

_METRICS = "metrics.jsonl"
_LOG = "log.txt"


@dataclass(frozen=True)
class Ending:
    """The end of the latest training in a run.

    Attributes:
        finished: True if a limit of `training.stop` was reached; False if it was stopped, failed, was killed, or is
            still training.
        text: a description.
    """

    finished: bool
    text: str


@dataclass(frozen=True)
class ReportRun:
    """A run without its weights, so that reading it takes milliseconds.

    Attributes:
        name: unique among the runs of the report.
        folder: folder of the run.
        colour: index of its colour, from 0, which is the same in every figure.
        experiment: its configuration.
        train: records of kind `train` from `metrics.jsonl`, by update; a number may be NaN or infinite.
        validations: records of kind `validation`, by update.
        depth: diagnostics, by update; empty if none were collected.
        ending: the end of the latest training.
        environment: versions and hardware at its latest start, by name; empty if the file is missing.
        scores: scores on test sets, by name of the test set; see ziggurat.model.run_folder.
        speed: decoding speed; None if it was not measured.
    """

    name: str
    folder: Path
    colour: int
    experiment: Experiment
    train: list[dict[str, Any]]
    validations: list[dict[str, Any]]
    depth: list[Record]
    ending: Ending
    environment: Mapping[str, str] = field(default_factory=dict)
    scores: Mapping[str, Sequence[KeptScore]] = field(default_factory=dict)
    speed: DecodingSpeed | None = None

    @property
    def late_depth(self) -> Record | None:
        """The last diagnostics if they reflect the run's current state, which requires its second half of updates."""
        if not self.depth or not self.train or 2 * self.depth[-1].update < self.train[-1]["update"]:
            return None
        return self.depth[-1]


def read_runs(folders: Sequence[str | Path]) -> list[ReportRun]:
    """Return the runs in `folders`, in this order, each with a different colour and name.

    Raises:
        ConfigError: a folder is named twice, or there are more than MAX_RUNS.
        CheckpointError: a folder is not a run.
        DataError: records are damaged.
    """
    paths = [Path(folder) for folder in folders]
    resolved = [path.resolve() for path in paths]
    if twice := next((p for i, p in enumerate(paths) if resolved[i] in resolved[:i]), None):
        raise ConfigError(f"{twice}: this run is named twice")
    if len(paths) > MAX_RUNS:
        raise ConfigError(f"{len(paths)} runs are too many for one report; at most {MAX_RUNS}")
    return [
        read_run(path, colour=i, name=name) for i, (path, name) in enumerate(zip(paths, _names(resolved), strict=True))
    ]


def read_run(folder: str | Path, *, colour: int = 0, name: str | None = None) -> ReportRun:
    """Return the run in `folder`, named after the folder unless another name is given.

    Raises:
        CheckpointError: the folder is not a run.
        ConfigError: its configuration cannot be read.
        DataError: records are damaged; the message has file and line.
    """
    run = Path(folder)
    refuse_missing(run, "run")
    if not (run / CONFIG_FILE).is_file() or not (run / CHECKPOINTS).is_dir():
        kind = folder_kind(run)
        what = f"not a run, but {kind}" if kind else f"not a run (no {CONFIG_FILE} or no {CHECKPOINTS}/)"
        raise CheckpointError(f"{run}: {what}; reports are made of runs")
    # Of several records for one update, the last counts.
    by_kind: dict[str, dict[int, dict[str, Any]]] = {"train": {}, "validation": {}}
    for record in _records(run / _METRICS):
        if record["kind"] in by_kind:
            by_kind[record["kind"]][record["update"]] = record
    train, validations = ([records[update] for update in sorted(records)] for records in by_kind.values())
    return ReportRun(
        name or run.resolve().name,
        run,
        colour,
        load_experiment(run / CONFIG_FILE),
        train,
        validations,
        read_records(run),
        _ending(run / _LOG),
        _environment(run / ENVIRONMENT_FILE),
        read_scores(run),
        read_speed(run),
    )


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the ends of the paths, with as many parts as needed to distinguish them."""
    longest = max((len(folder.parts) for folder in folders), default=0)
    for count in range(1, longest + 1):
        names = ["/".join(folder.parts[-count:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _records(path: Path) -> Iterator[dict[str, Any]]:
    return read_json_lines(path, _record, "a record of a run")


def _record(record: Any, where: str) -> dict[str, Any]:
    """Return a line of `metrics.jsonl`. Raises ValueError unless it has a kind, an update, and otherwise numbers."""
    numbers = [value for key, value in record.items() if key not in ("kind", "partial") and value is not None]
    if not isinstance(record["kind"], str) or type(record["update"]) is not int:
        raise ValueError(where)
    if not all(type(value) in (int, float) and (type(value) is float or abs(value) < 1 << 63) for value in numbers):
        raise ValueError(where)
    return dict(record)


def _ending(path: Path) -> Ending:
    """Return the end of the run, from the last message of its log that reports it."""
    lines = path.read_text("utf-8", "replace").splitlines() if path.is_file() else []
    messages = [line.partition("  ")[2] for line in lines]
    for line in reversed(messages):
        stopped = re.match(r"stopped after update (\d+): (.+) \(", line)
        # A run that had ended and was resumed without changes
        stopped = stopped or re.match(r"nothing to do after update (\d+): (.+?)(?:; to |$)", line)
        if stopped:
            by_signal = stopped[2].startswith("SIG")
            reached = f"{'stopped by' if by_signal else 'ended:'} {stopped[2]}, after update {int(stopped[1]):,}"
            return Ending(not by_signal, reached)
        if line.startswith(("first update", "resumed after update")):
            break  # earlier lines belong to an earlier run
    return Ending(False, "its log does not report an end: it failed, was killed, or is still training")


class _Environment(RootModel[dict[str, Any]]):
    """The content of `environment.json`: values by name."""


def _environment(path: Path) -> dict[str, str]:
    try:
        found = read_json(path, _Environment, error=DataError, remedy="remove the file").root
    except FileNotFoundError:
        return {}
    return {key: str(value)[:1000] for key, value in found.items()}


_FORMAT = 1
_FOLDER = "translations"


@dataclass(frozen=True)
class Sentences:
    """Sentences to be translated by all runs, with a name such as `all 500 sentences of the dev set`.

    Each source has the tag of a training corpus, or None.
    """

    name: str
    sources: Sequence[str]
    references: Sequence[str]
    tags: Sequence[str | None]
    target_language: str

    @property
    def identity(self) -> str:
        """Checksum of the input to the models."""
        inputs = json.dumps([list(self.sources), list(self.tags)])
        return xxhash.xxh3_64(inputs.encode()).hexdigest()


@dataclass(frozen=True)
class Translated:
    """Translations of sentences by one run: a line for each, and how many were cut at the length limit.

    `origin` describes the weights, `search` the search.
    """

    origin: str
    search: str
    outputs: list[str]
    unfinished: int


def dev_sentences(runs: Sequence[ReportRun], count: int) -> Sentences:
    """Return `count` sentences spread evenly over the dev set of the first of `runs` whose store exists.

    Raises DataError when no run has one: the configured store does not exist, or it has no dev set.
    """
    reasons = []
    for run in runs:
        try:
            return _of_dev_set(run, count)
        except DataError as error:
            reasons.append(error)
    raise reasons[0]  # the other runs were only alternatives


def _of_dev_set(run: ReportRun, count: int) -> Sentences:
    store = Store.open(Path(run.experiment.data.store).expanduser())
    if store.dev is None or not len(store.dev):
        raise DataError(f"{store.path}: the store has no dev set")
    total = len(store.dev)
    lines = np.unique(np.linspace(0, total - 1, min(count, total)).round().astype(np.int64))
    sources, references = store.dev.texts(lines)
    part = f"all {total:,}" if len(lines) == total else f"{len(lines):,} of {total:,}"
    return Sentences(
        f"{part} sentences of the dev set",
        sources,
        references,
        store.dev_tags(lines),
        run.experiment.data.target_language,
    )


def translated(
    run: ReportRun, sentences: Sentences, say: Callable[[str], None], which: str | None = None
) -> Translated:
    """Return the translations of `sentences` by the weights `which` of `run`, with its settings.

    None stands for the default of `translate`.

    The result is kept in the run, and reused while weights, settings and sentences are the same; `say` receives a
    message before translating. Raises CheckpointError if the run has no checkpoint, or a damaged one.
    """
    weights, _ = locate_weights(run.folder, which)
    decoding = run.experiment.decoding.model_dump(mode="json")
    made_of = weights_fingerprint(weights)
    key = {"format": _FORMAT, "weights": made_of, "decoding": decoding, "sentences": sentences.identity}
    kept = run.folder / _FOLDER / f"{sentences.identity}.json"
    found = _kept(kept, key, len(sentences.sources))
    if found is None:
        say(f"{run.name}: translating {sentences.name} with {weights_origin(run.folder, weights, which)}")
        found = _translate(run, sentences, which)
        try:
            kept.parent.mkdir(exist_ok=True)
            write_atomically(kept, json.dumps({"key": key, **asdict(found)}, ensure_ascii=False, indent=1).encode())
        except OSError as error:
            say(f"{kept}: cannot be written ({error.strerror}); the next report translates again")
    return found


def _translate(run: ReportRun, sentences: Sentences, which: str | None) -> Translated:
    translator = load_translator(run.folder, which=which)
    with warnings.catch_warnings(action="ignore", category=TranslationWarning):  # the report shows their number
        found = translate_tagged(translator.translate, sentences.sources, sentences.tags)
    outputs = [translation.text for translation in found]
    return Translated(translator.origin, _search(translator.decoding), outputs, translator.notices["unfinished"])


def _search(decoding: DecodingConfig) -> str:
    if decoding.search == "sample":
        return f"the most typical of {decoding.mbr} samples" if decoding.mbr else "samples"
    return f"beam of {decoding.beam_size}" if decoding.beam_size > 1 else "greedy search"


def _kept(path: Path, key: dict[str, Any], count: int) -> Translated | None:
    """Return the translations kept by an earlier report; None if missing, damaged or made with other weights."""
    try:
        document = parse_json(read_bounded(path, 1 << 28), str(path))
        if document.pop("key") != key:
            return None
        found = built(Translated, document)
    except (OSError, DataError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return found if len(found.outputs) == count else None


_PER_GROUP = 3
# A character with its combining marks, a whole foreign word or number, or a run of spaces.
_CHARACTERS = regex.compile(r"\s+|[\p{Latin}\p{N}]+|\X")


@dataclass(frozen=True)
class Output:
    """The translation of a sentence by one run.

    Attributes:
        run: number of the run in the report.
        score: chrF of the sentence, 0 to 100.
        words: the words, each with True if the reference has it; the k-th occurrence needs a k-th one there. In a
            script without spaces, runs of characters. between: the separator of words: a space, or nothing in a script
            without spaces.
    """

    run: int
    score: float
    words: tuple[tuple[str, bool], ...]
    between: str = " "


@dataclass(frozen=True)
class Sample:
    """One sentence with all translations; `line` counts from 1."""

    line: int
    source: str
    reference: str
    outputs: tuple[Output, ...]


@dataclass(frozen=True)
class SampleGroup:
    """Sentences chosen for the same reason, given by the title."""

    title: str
    samples: tuple[Sample, ...]


def sample_groups(
    names: Sequence[str], outputs: Sequence[Sequence[str] | None], sources: Sequence[str], references: Sequence[str]
) -> list[SampleGroup]:
    """Return sentences worth reading, each in one group only.

    Args:
        names: names of all runs of the report.
        outputs: lines of each run, one for each sentence; None if a run has no translations.
        sources: source sentences.
        references: reference translations.
    """
    chrf = CHRF()
    scores = {
        run: [chrf.sentence_score(line, [reference]).score for line, reference in zip(lines, references, strict=True)]
        for run, lines in enumerate(outputs)
        if lines is not None
    }
    spaced = unspaced_script(references) is None
    lines = range(len(references))
    means = [sum(of_run[i] for of_run in scores.values()) / len(scores) for i in lines]
    wanted: list[tuple[str, list[int]]] = []
    for run, own in scores.items() if len(scores) > 1 else ():
        ahead = {i: own[i] - max(theirs[i] for other, theirs in scores.items() if other != run) for i in lines}
        order = [i for i in sorted(lines, key=lambda i: -ahead[i]) if ahead[i] > 0]
        wanted.append((f"{names[run]} is ahead by most", order))
    ranked = sorted(lines, key=lambda i: means[i])
    whose = "All do" if len(scores) > 1 else "It does"
    wanted += [
        (f"{whose} best here", ranked[::-1]),
        (f"{whose} worst here", ranked),
        ("In between", [ranked[n] for n in sorted(range(len(ranked)), key=lambda n: abs(n + 0.5 - len(ranked) / 2))]),
    ]
    groups, taken = [], set[int]()  # a sentence is shown once, in the first group that selects it
    for title, order in wanted:
        chosen = [i for i in order if i not in taken][:_PER_GROUP]
        taken.update(chosen)
        samples = tuple(_sample(i, sources, references, outputs, scores, spaced) for i in chosen)
        groups += [SampleGroup(title, samples)] if samples else []
    return groups


def _sample(
    i: int,
    sources: Sequence[str],
    references: Sequence[str],
    outputs: Sequence[Sequence[str] | None],
    scores: dict[int, list[float]],
    spaced: bool,
) -> Sample:
    found = tuple(
        Output(run, scores[run][i], _marked(lines[i], references[i], spaced), " " if spaced else "")
        for run, lines in enumerate(outputs)
        if lines is not None
    )
    return Sample(i + 1, sources[i], references[i], found)


def _marked(line: str, reference: str, spaced: bool) -> tuple[tuple[str, bool], ...]:
    """Return the words of a line, or runs of its characters, each with True if the reference has it."""
    split = str.split if spaced else _CHARACTERS.findall
    left = Counter(_bare(word) for word in split(reference))
    marked = []
    for word in split(line):
        hit = word.isspace() or left[_bare(word)] > 0
        left[_bare(word)] -= hit
        marked.append((word, hit))
    if spaced:
        return tuple(marked)
    return tuple(("".join(word for word, _ in its), hit) for hit, its in groupby(marked, key=itemgetter(1)))


def _bare(word: str) -> str:
    """Return a word in lower case without surrounding punctuation; a word of only punctuation is kept."""
    return word.strip(".,;:!?\"'()[]«»„“”‚‘’").lower() or word


def as_csv(
    names: Sequence[str], outputs: Sequence[Sequence[str] | None], sources: Sequence[str], references: Sequence[str]
) -> str:
    """Return all translations as CSV: line, source, reference, and a column for each run with translations."""
    columns = [(name, lines) for name, lines in zip(names, outputs, strict=True) if lines is not None]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["line", "source", "reference", *(name for name, _ in columns)])
    for i, (source, reference) in enumerate(zip(sources, references, strict=True)):
        writer.writerow([i + 1, source, reference, *(lines[i] for _, lines in columns)])
    return text.getvalue()
