"""Expected costs of the steps of a pipeline, before they start, and the share already done.

Training is estimated as in `ziggurat inspect`: an update is simulated, and this machine's speed is measured.
Translation follows from the same arithmetic. The costs of steps on text follow from rates that were measured once and
from the size of the text, which is counted if it exists and otherwise bounded by the text it is made from.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from ziggurat.config.data import FilterConfig
from ziggurat.config.experiment import Experiment
from ziggurat.config.notices import warm_up_notice
from ziggurat.config.pipeline import BACK_TRANSLATION, BITEXT, ModelName, MonolingualText, pipeline_names
from ziggurat.config.pipeline_models import EvaluationConfig
from ziggurat.corpora.pipeline.context import DISTILLED, Corpora, PipelineContext, errors_renamed
from ziggurat.corpora.pipeline.corpora import fetched_files, resolved
from ziggurat.corpora.pipeline.step import Expected, StepProgress, read_document
from ziggurat.data.readers import CorpusReader
from ziggurat.evaluate.perturbations import perturbation_names
from ziggurat.system.compressed import compression_of
from ziggurat.system.errors import CheckpointError, ZigguratError
from ziggurat.system.files import find_files
from ziggurat.system.processes import busy_notice

if TYPE_CHECKING:
    from ziggurat.inspect.cost import Cost


_BYTES_PER_LINE = 60
_PACKED = 3  # bytes of text per byte of a compressed file
_COUNTED = 1 << 28  # size in bytes of the largest file whose lines are counted


class LineCount(NamedTuple):
    """A number of lines or pairs."""

    number: int
    most: bool = False
    """Whether it is an upper bound, for text that has yet to be cleaned or translated."""
    rough: bool = False
    """Whether it is estimated from the size of a file."""

    def __str__(self) -> str:
        """Return it in words: `at most 1,000`."""
        return f"{'at most ' if self.most else ''}{'about ' if self.rough or not self.most else ''}{self.number:,}"


class CorpusSizes:
    """Numbers of lines that steps work on; None if unknown, as for a corpus that is not yet fetched."""

    def __init__(self, context: PipelineContext) -> None:
        self._context = context
        self._config = context.config

    def given(self) -> LineCount | None:
        """Return the number of pairs of the bitext before cleaning."""
        return _sum([self._given(number) for number in range(len(self._config.bitext.train))])

    def reader(self, number: int) -> CorpusReader | None:
        """Return the reader of a corpus of the bitext before cleaning; None: it does not exist yet."""
        key, corpus = f"bitext.train.{number}", self._config.bitext.train[number]
        with contextlib.suppress(ZigguratError):  # not fetched, or faulty, which the step reports
            return CorpusReader.of(resolved(self._context, corpus, key), key, self._context.languages)
        return None

    def _given(self, number: int) -> LineCount | None:
        if (reader := self.reader(number)) is None:
            return None
        if reader.kind == "parquet":
            with contextlib.suppress(OSError, pa.ArrowException):
                return LineCount(sum(pq.read_metadata(part[0]).num_rows for part in reader.files))
            return None
        return lines_of(part[0] for part in reader.files)

    def bitext(self) -> LineCount | None:
        """Return the number of pairs of the bitext that are trained on."""
        held = self._config.bitext.hold_out
        less = held.dev + held.test if held is not None else 0
        files = [self._context.sides("clean", "train", name)[0] for name in self._context.bitext_names()]
        return lines_of(files) or _at_most(self.given(), less)

    def text(self, side: str) -> LineCount | None:
        """Return the number of lines of the monolingual text, `source` or `target`."""
        entries: Sequence[MonolingualText] = getattr(self._config.monolingual, side)
        bounds = (self._entry(entry, side, number) for number, entry in enumerate(entries))
        return lines_of([self._context.at("monolingual", f"{side}.txt")]) or _at_most(_sum(list(bounds)))

    def _entry(self, entry: MonolingualText, side: str, number: int) -> LineCount | None:
        key, language = f"monolingual.{side}.{number}", self._context.languages[side == "target"]
        found = self._found(entry.path, entry.fetch, [language], key)
        limit = None if entry.lines is None else LineCount(entry.lines)
        return min((lines for lines in (found, limit) if lines is not None), default=None)

    def _found(self, path: str | None, fetch: str | None, languages: Sequence[str], key: str) -> LineCount | None:
        """Return the number of lines of the files at `path`, or of the first language's file of a fetched corpus."""
        with contextlib.suppress(ZigguratError):  # not there yet, or faulty, which the step reports
            if fetch is None:
                return lines_of(find_files(str(path), f"{key}.path"))
            return lines_of(fetched_files(self._context, fetch, languages, key)[:1])
        return None

    def made(self, step: str) -> LineCount | None:
        """Return the number of pairs that a step (`backtranslate`, `distil`, ... or `filter`) makes."""
        return lines_of([self._context.at(step, "corpus", "target.txt")]) or _at_most(self.read(step))

    def read(self, step: str) -> LineCount | None:
        """Return the number of lines or pairs that such a step reads."""
        if step == "backtranslate":
            return self.text("target")
        if step == "filter":
            return _sum([self.made(other) for other in Corpora(self._context).translated()])
        return self.bitext() if step == DISTILLED[0] else self.text("source")

    def of(self, model: ModelName) -> LineCount | None:
        """Return the number of pairs that a model learns from."""
        found: list[LineCount | None] = []
        for kind in self._config.weights(model):
            if kind == BITEXT:
                found.append(self.bitext())
            elif kind == BACK_TRANSLATION:
                found.append(self.made("backtranslate"))
            else:
                found += [self.made(step) for step in Corpora(self._context).distilled()]
        return _sum(found)

    def evaluated(self, how: EvaluationConfig, rounds: int) -> LineCount | None:
        """Return the number of lines that each system translates; those that measure speed count `rounds` times."""
        held = self._config.bitext.hold_out
        languages = self._context.languages
        sets = [self._found(t.source, t.fetch, languages, f"test.{i}") for i, t in enumerate(self._config.test)]
        sets += [LineCount(held.test)] if held is not None and held.test else []
        if (total := _sum(sets)) is None or sets[0] is None:
            return None
        perturbed = min(how.perturb_lines, sets[0].number) * len(perturbation_names(how.perturb, "evaluation.perturb"))
        timed = rounds * min(how.speed_lines, sets[0].number)
        return total._replace(number=total.number + perturbed + timed)


def lines_of(files: Iterable[Path]) -> LineCount | None:
    """Return the number of lines of files, counted or, if compressed or large, estimated; None if one is missing."""
    total, rough = 0.0, False
    for path in files:
        try:
            status = os.stat(path)
        except OSError:
            return None
        size = status.st_size
        packed = compression_of(path) is not None
        if packed or size > _COUNTED:
            total, rough = total + size * (_PACKED if packed else 1) / _BYTES_PER_LINE, True
        else:
            total += _counted(path, size, status.st_mtime_ns)
    return LineCount(round(total), rough=rough)


@lru_cache
def _counted(path: Path, size: int, modified: int) -> int:
    count = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            count += block.count(b"\n")
    return count


def _sum(parts: Sequence[LineCount | None]) -> LineCount | None:
    known = [lines for lines in parts if lines is not None]
    if len(known) < len(parts):
        return None
    return LineCount(
        sum(lines.number for lines in known), any(lines.most for lines in known), any(x.rough for x in known)
    )


def _at_most(lines: LineCount | None, less: int = 0) -> LineCount | None:
    """Return a number minus `less`, as an upper bound."""
    return None if lines is None else LineCount(max(0, lines.number - less), most=True, rough=lines.rough)


PAIRS_PREPARED, PAIRS_ALIGNED = 25_000, 5_000
"""Pairs per second of each of these steps, on two cores of an AMD EPYC (short sentences)."""
_PAIRS_FILTERED, _PAIRS_IDENTIFIED, _PAIRS_SCORED, _PAIRS_LEARNT = 150_000, 15_000, 16_000, 3_200
"""Pairs per second of the usual filters with reading and writing, of `languages`, of scoring by the pair score, and of
learning it, on one core of an Intel Xeon with AVX-512 (short sentences)."""
UNKNOWN = "is not known yet"  # follows "the number of lines" in an estimate
_OF_TRAINING_SPEED = 0.2
"""Arithmetic speed of a search relative to training: its products are small and depend on each other."""


class Costs:
    """Costs of the models of a pipeline, each estimated once.

    Args:
        experiments: the experiment of each model.
        sizes: sizes of the bitext, used to estimate sentence lengths until a model's store exists.
        existing: folders of the models that already exist.
        pruned: whether the student starts as the teacher, with its vocabulary.
    """

    def __init__(
        self,
        experiments: dict[ModelName, Experiment],
        sizes: CorpusSizes,
        existing: Mapping[ModelName, Path] = MappingProxyType({}),
        *,
        pruned: bool = False,
    ) -> None:
        self._experiments = experiments
        self._sizes = sizes
        self._existing = existing
        self._pruned = pruned
        self._known: dict[ModelName, Cost] = {}

    def of(self, name: ModelName) -> Cost:
        """Return the cost of training a model on this machine, even if the model already exists."""
        from ziggurat.inspect.cost import estimate_cost
        from ziggurat.model.counts import vocabulary_sizes

        if name not in self._known:
            # The teacher's vocabulary may not exist yet, but its settings are known.
            with_vocabulary, folder = self._experiment("teacher" if self._pruned and name == "student" else name)
            with errors_renamed(name):
                sizes = vocabulary_sizes(with_vocabulary.data, folder)
                experiment, _ = self._experiment(name)
                self._known[name] = estimate_cost(experiment, (sizes.source, sizes.target), self._sizes.reader(0))
        return self._known[name]

    def _experiment(self, name: ModelName) -> tuple[Experiment, Path | None]:
        from ziggurat.model.directory import locate_weights, weights_experiment

        if name not in self._existing:
            return self._experiments[name], None
        weights, folder = locate_weights(self._existing[name])
        return weights_experiment(weights.parent, folder), folder

    def training(self, name: ModelName) -> Expected:
        """Return the expected cost of training a model, without validations and checkpoints."""
        cost, training, stages = self.of(name), self._experiments[name].training, self._experiments[name].data.stages
        updates, minutes = training.stop.updates, training.stop.minutes
        limit = None if minutes is None else minutes * 60
        length = f"sentences of {cost.length[1]} target tokens ({cost.batches.origin})"
        memory = cost.memory.peak + cost.memory.checkpoint
        busy = ""
        if cost.time.delay > 1:
            now = f"now an update takes at least {cost.time.delay:.1f} times as long as on an idle machine"
            busy = f"; {busy_notice(cost.time.others)}, and {now}"
        if updates is None:
            unknown = f"{cost.time.seconds:.3g} s an update; how many is not known"
            return Expected(limit, memory, unknown + busy)
        seconds = self._until(name, updates)
        stop, timed = training.stop, limit is not None and limit < seconds
        early = timed or stop.epochs is not None or stop.patience is not None or (stages and stages[-1].until.epochs)
        said = f"{'at most ' if early else ''}{updates:,} updates, {length}"
        if cold := warm_up_notice(training):
            said += f"; {cold.shown(pipeline_names(name))}"
        return Expected(limit if timed else seconds, memory, said + busy)

    def _until(self, name: ModelName, updates: int) -> float:
        """Return the seconds for a number of updates of a model; updates of shallow stages are faster."""
        cost, growth = self.of(name), self._experiments[name].training.growth
        ends = [] if growth is None else [stage.updates for stage in growth.stages]
        spans = [*(min(end, updates) for end in ends if end is not None), updates]
        rates = [*(seconds for *_, seconds in cost.shallower), cost.time.seconds]
        if len(spans) < len(rates):  # stages that end after epochs
            spans, rates = [updates], rates[-1:]
        return sum((end - begin) * rate for (begin, end), rate in zip(pairwise((0, *spans)), rates, strict=True))

    def trained(self, name: ModelName, updates: int, seconds: float) -> StepProgress | None:
        """Return the share of a model's training that `updates`, which took `seconds`, make up; None: unknown."""
        if not updates:
            return None
        stop = self._experiments[name].training.stop
        shares = [] if stop.minutes is None else [seconds / (stop.minutes * 60)]
        if stop.updates is not None:
            shares.append(self._until(name, updates) / self._until(name, stop.updates))
        total = "" if stop.updates is None else f" of {stop.updates:,}"
        return StepProgress(min(1.0, max(shares)), f"{updates:,}{total} updates", seconds) if shares else None

    def quantising(self, updates: int) -> Expected:
        """Return the expected cost of fine-tuning the student for int8, at the speed of its training."""
        cost = self.of("student")
        return Expected(updates * cost.time.seconds, cost.memory.peak, f"{updates:,} updates as those of the student")

    def _of_user(self, name: ModelName) -> Cost | None:
        """Return the cost of a model that is used; None if an existing model lacks a configuration."""
        with contextlib.suppress(*([ZigguratError] if name in self._existing else [])):
            return self.of(name)
        return None

    def translating(self, name: ModelName, lines: LineCount | None, beam: int | None, workers: int) -> Expected:
        """Return the expected cost of translating `lines`; None: their number is unknown. `beam` None: the model's."""
        if lines is None or (cost := self._of_user(name)) is None:
            return Expected(said=f"the number of lines {UNKNOWN}" if lines is None else f"{lines} lines")
        beam = self._experiment(name)[0].decoding.beam_size if beam is None else beam
        source, target = cost.length
        work = lines.number * (source * cost.forward.source + beam * target * cost.forward.target)
        by = "1 worker" if workers == 1 else f"{workers} workers"
        # Rates of training are for all threads together; each worker has a share of these.
        speed = cost.time.flops / cost.time.seconds * _OF_TRAINING_SPEED
        return Expected(work / speed, said=f"{lines} lines, {by}; a rough estimate")

    def scoring(self, lines: LineCount | None) -> Expected:
        """Return the expected cost of the backward model's forward passes over pairs; None: their number is unknown."""
        if lines is None or (cost := self._of_user("backward")) is None:
            return Expected(said=f"the number of pairs {UNKNOWN}" if lines is None else f"{lines} pairs")
        source, target = cost.length
        work = lines.number * (source * cost.forward.source + target * cost.forward.target)
        return Expected(work / (cost.time.flops / cost.time.seconds), said=f"{lines} pairs; a rough estimate")


def cleaning(lines: LineCount | None, filters: FilterConfig, workers: int) -> Expected:
    """Return the expected cost of cleaning pairs in `workers` processes; None: their number is unknown."""
    expected = by_rate(lines, _PAIRS_FILTERED)
    if lines is None:
        return expected
    each, learning = 1 / _PAIRS_FILTERED, 0.0
    if filters.languages is not None:
        each += 1 / _PAIRS_IDENTIFIED
    if filters.pair_score is not None:  # learned by one process, which also cleans the pairs to learn from
        learning = min(lines.number, filters.pair_score.pairs) * (each + 1 / _PAIRS_LEARNT)
        each += 1 / _PAIRS_SCORED
    return replace(expected, seconds=learning + each * lines.number / workers)


def by_rate(lines: LineCount | None, rate: float) -> Expected:
    """Return the expected cost of pairs at a rate of pairs per second; None: their number is unknown."""
    if lines is None:
        return Expected(said=f"the number of pairs {UNKNOWN}")
    return Expected(lines.number / rate, said=f"{lines} pairs")


def updates_done(run: Path) -> tuple[int, float]:
    """Return the updates of a run's newest checkpoint, from which training resumes, and the seconds they took."""
    from ziggurat.model.run_folder import checkpoint_folders, checkpoint_update, read_meta

    for folder in reversed(checkpoint_folders(run)):
        try:
            return checkpoint_update(folder), float(read_meta(folder)["progress"]["seconds"])
        except (CheckpointError, KeyError, TypeError, ValueError):
            continue
    return 0, 0.0


def lines_done(job: Path, stage: str, noun: str) -> StepProgress | None:
    """Return the share of a job's lines whose shards have finished the last stage; None if it has no plan yet."""
    from ziggurat.corpora.jobs.job import PLAN_FILE

    plan = read_document(job / PLAN_FILE)
    try:
        lines, size = (int(number) for number in (plan["lines"], plan["settings"]["shard_lines"]))  # type: ignore[index]
        shards = sum(name.endswith(".json") for name in os.listdir(job / stage))
    except (OSError, KeyError, TypeError, ValueError):
        return None
    done = min(lines, shards * size)
    return StepProgress(done / lines, f"{done:,} of {lines:,} {noun}") if lines > 0 else None
