"""The shared context of a pipeline's steps: its configuration, paths of results, execution of jobs, messages.

Errors from other parts of the toolkit use the pipeline's names for settings and remedies.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from ziggurat.config.data import CorpusConfig
from ziggurat.config.pipeline import (
    BACK_TRANSLATION,
    DISTILLATION,
    HELD_OUT,
    PREPARED_BY,
    ModelName,
    PipelineConfig,
    pipeline_names,
)
from ziggurat.config.pipeline_models import TargetConfig
from ziggurat.system.errors import ConfigError, Problem, ZigguratError, printable
from ziggurat.system.files import atomic_file
from ziggurat.system.processes import usable_cpus
from ziggurat.system.terminal import duration

if TYPE_CHECKING:
    from ziggurat.corpora.jobs import job as job_run


DISTILLED = ("distil", "distil-monolingual")
"""Steps that distil the bitext and the monolingual source text."""
Say = Callable[[str], None]
_DISTILLED_TEXT = f"{DISTILLATION}-monolingual"
_MADE = (BACK_TRANSLATION, DISTILLATION, _DISTILLED_TEXT)
"""Names of the corpora that a pipeline makes."""
_MESSAGE_SECONDS = 20.0  # time between two messages on the progress of a step


@dataclass(frozen=True)
class ExecutionOptions:
    """Execution settings of steps that are jobs (ziggurat.corpora.jobs), which do not affect any result."""

    ray: str | None = None
    """Address of a Ray cluster; None: processes on this machine."""
    workers: int | None = None
    """Number of processes, or of actors on the cluster; None: the number in the step's section, or else one per core,
    one on a GPU, and on a cluster as many as its nodes can hold."""
    part: tuple[int, int] = (0, 1)
    """(i, n): only every n-th shard, starting with shard i, and no merge."""

    @property
    def shared(self) -> bool:
        """True if more than one process is requested."""
        return self.ray is not None or self.workers is not None or self.part[1] > 1

    def processes(self, workers: int | None, threads: int, device: str) -> int:
        """Return the number of processes on this machine; `workers` is that in the step's section."""
        return self.workers or workers or (1 if _on_gpu(device) else max(1, usable_cpus() // threads))

    def check(self, step: str, device: str) -> None:
        """Raise ConfigError for a device that does not exist, or that workers on a cluster cannot have."""
        if self.ray is not None and ":" in device:
            raise ConfigError(
                f"step {step}, `device: {printable(device)}`: Ray chooses the GPU of each worker; write `cuda`"
            )
        _on_gpu(device)

    def work(self, workers: int | None, threads: int, device: str, progress: job_run.Progress) -> job_run.Work:
        """Return this call's work on a job; see `processes`."""
        from ziggurat.corpora.jobs.job import Work
        from ziggurat.corpora.jobs.launchers import processes, ray_actors

        if self.ray is None:
            launch = partial(processes, self.processes(workers, threads, device))
        else:
            launch = partial(ray_actors, self.ray, self.workers, cpus=threads, gpus=int(_on_gpu(device)))
        return Work(launch, self.part, progress=progress)


def _on_gpu(device: str) -> bool:
    if device == "cpu":
        return False
    from ziggurat.model.accelerator import usable_device

    return usable_device(device, "device").type != "cpu"


@dataclass(frozen=True)
class PipelineContext:
    """The configuration of a pipeline, with the paths and messages of its steps."""

    config: PipelineConfig
    say: Say = lambda text: None
    """Takes messages."""
    console: Console | None = None
    """Console for the messages of training; None: standard error."""
    execution: ExecutionOptions = field(default_factory=ExecutionOptions)

    @property
    def folder(self) -> Path:
        """Folder of all results."""
        return Path(self.config.folder).expanduser()

    @property
    def languages(self) -> tuple[str, str]:
        """Codes of source and target."""
        return self.config.source_language, self.config.target_language

    def at(self, step: str, *parts: str) -> Path:
        """Return a path in the folder of a step."""
        return self.folder.joinpath(step, *parts)

    def model(self, name: ModelName) -> Path:
        """Return the run or model directory of a model."""
        existing = getattr(self.config, name).existing
        return self.at(name, "run") if existing is None else Path(existing).expanduser()

    def exports(self) -> dict[str, TargetConfig]:
        """Return the targets of the exports, by name."""
        return {to: target for to, target in self.config.export or () if target is not None}

    def bitext_names(self) -> list[str]:
        """Return the names of the training corpora, which are unique and also name their files.

        Raises ConfigError for the name of a corpus that the pipeline itself makes.
        """
        names: list[str] = []
        for place, corpus in enumerate(self.config.bitext.train):
            # `train` of `data/train.de.gz`.
            given = corpus.name or corpus.fetch or Path(corpus.path or corpus.source or "").name.split(".")[0]
            base = slug(given) or "bitext"
            if base in _MADE:
                raise ConfigError(f"bitext.train.{place}: a pipeline makes a corpus `{base}`: give another `name`")
            names.append(base)
            number = 2
            while names.count(names[-1]) > 1:
                names[-1], number = f"{base}-{number}", number + 1
        return names

    def test_names(self) -> list[str]:
        """Return the names of the test sets; the held-out one comes last."""
        held = self.config.bitext.hold_out
        return [test.name for test in self.config.test] + ([HELD_OUT] if held and held.test else [])

    def test_set(self, name: str) -> tuple[Path, Path]:
        """Return source and reference of a test set."""
        if name == HELD_OUT:
            return self.sides("clean", "held-out", "test")
        return self.sides("sets", "test", name)

    def sides(self, step: str, *parts: str) -> tuple[Path, Path]:
        """Return the files of both sides of a text: `PARTS.LANGUAGE`."""
        place = self.at(step, *parts)
        first, second = (place.with_name(f"{place.name}.{language}") for language in self.languages)
        return first, second


class Corpora:
    """The training and development corpora of each model."""

    def __init__(self, context: PipelineContext) -> None:
        self._context = context
        self._config = context.config

    def train(self, name: ModelName) -> list[CorpusConfig]:
        """Return the training corpora of a model, with their weights."""
        found: list[CorpusConfig] = []
        for kind, weight in self._config.weights(name).items():
            found += self._of_kind(kind, weight)
        return [self._turned(corpus, name) for corpus in found]

    def empty(self) -> set[str]:
        """Return the names of the bitext's corpora that cleaning has emptied."""
        sources = {name: self._context.sides("clean", "train", name)[0] for name in self._context.bitext_names()}
        return {name for name, path in sources.items() if path.is_file() and not path.stat().st_size}

    def with_pairs(self, name: ModelName) -> list[CorpusConfig]:
        """Return the training corpora of a model, without those that cleaning has emptied."""
        empty = self.empty()
        return [corpus for corpus in self.train(name) if corpus.name not in empty]

    def keys(self, name: ModelName) -> dict[str, str]:
        """Return the key in the pipeline's file of each corpus of a model's experiment."""
        bitext = {corpus: f"bitext.train.{number}" for number, corpus in enumerate(self._context.bitext_names())}
        keys = {**bitext, BACK_TRANSLATION: "backtranslation", DISTILLATION: "distillation"}
        train = [keys.get(str(corpus.name), "distillation") for corpus in self.with_pairs(name)]
        dev = [*(f"bitext.dev.{number}" for number in range(len(self._config.bitext.dev))), "bitext.hold_out.dev"]
        return {f"data.{split}.{n}": key for split, of in (("train", train), ("dev", dev)) for n, key in enumerate(of)}

    def dev(self, name: ModelName) -> list[CorpusConfig]:
        """Return the development corpora of a model, with only those tags that its training corpora also have."""
        learned = {corpus.tag for corpus in self.train(name)}
        sets = [
            (self._context.sides("sets", "dev", str(number)), corpus.tag if corpus.tag in learned else None)
            for number, corpus in enumerate(self._config.bitext.dev)
        ]
        held = self._config.bitext.hold_out
        if held is not None and held.dev:
            sets.append((self._context.sides("clean", "held-out", "dev"), None))
        return [
            self._turned(CorpusConfig(source=str(source), target=str(target), tag=tag), name)
            for (source, target), tag in sets
        ]

    def inputs(self, name: ModelName) -> dict[str, list[str]]:
        """Return the dependencies of a model's data, for `Step.after`."""
        found: dict[str, list[str]] = {}
        kinds = self._config.weights(name)
        if "bitext" in kinds:
            found.setdefault("clean", []).append("train/*")
        if BACK_TRANSLATION in kinds:
            found["backtranslate"] = ["corpus/*.txt"]
        if DISTILLATION in kinds:
            found |= {step: ["corpus/*.txt"] for step in self.distilled()}
        if self._config.bitext.dev:
            found["sets"] = ["dev/*"]
        held = self._config.bitext.hold_out
        if held is not None and held.dev:
            found.setdefault("clean", []).append("held-out/dev.*")
        if name == "student" and self._config.alignment is not None:
            found["align"] = ["links/*"]
        return found

    def distilled(self) -> list[str]:
        """Return the steps that make the distilled corpora of the student."""
        if self._config.filter is not None:
            return ["filter"]
        return self.translated()

    def translated(self) -> list[str]:
        """Return the steps in which the teacher translates."""
        chosen = self._config.distillation
        assert chosen is not None
        of_text = chosen.monolingual and bool(self._config.monolingual.source)
        return [step for step, made in zip(DISTILLED, (chosen.bitext, of_text), strict=True) if made]

    def _of_kind(self, kind: str, weight: float) -> list[CorpusConfig]:
        if kind == BACK_TRANSLATION:
            assert self._config.backtranslation is not None
            return [self._synthetic("backtranslate", kind, weight, self._config.backtranslation.tag)]
        if kind == DISTILLATION:
            names = {DISTILLED[1]: _DISTILLED_TEXT}
            return [self._synthetic(step, names.get(step, kind), weight, None) for step in self.distilled()]
        return [
            CorpusConfig(
                name=name,
                source=str(source),
                target=str(target),
                weight=corpus.weight * weight,
                tag=corpus.tag,
                filters={key: corpus.filters[key] for key in PREPARED_BY if key in corpus.filters},
            )
            for name, corpus in zip(self._context.bitext_names(), self._config.bitext.train, strict=True)
            for source, target in [self._context.sides("clean", "train", name)]
        ]

    def _synthetic(self, step: str, name: str, weight: float, tag: str | None) -> CorpusConfig:
        source, target = (str(self._context.at(step, "corpus", f"{side}.txt")) for side in ("source", "target"))
        return CorpusConfig(name=name, source=source, target=target, weight=weight, tag=tag)

    def _turned(self, corpus: CorpusConfig, name: ModelName) -> CorpusConfig:
        """Return a corpus in the form a model needs: with swapped sides for the backward model, and with links if any.

        The tags of the bitext belong to its source sentences, so the backward model has none.
        """
        if name == "backward":
            return corpus.model_copy(update={"source": corpus.target, "target": corpus.source, "tag": None})
        if name == "student" and self._config.alignment is not None and corpus.name is not None:
            return corpus.model_copy(
                update={"alignment": str(self._context.at("align", "links", f"{corpus.name}.links"))}
            )
        return corpus


class Progress:
    """Messages on the progress of a step, one every few seconds; `noun` names the counted items."""

    def __init__(self, say: Say, noun: str = "lines") -> None:
        self._say, self._noun = say, noun
        self._began = self._last = time.monotonic()
        self._told = False

    def show(self, before: int, now: int, total: int | None) -> None:
        """Record the number of lines done by earlier calls and by this one, and the total (None: unknown)."""
        clock, of_all = time.monotonic(), "" if total is None else f" of {total:,}"
        if now == 0:
            self._began = self._last = clock
            # At once, because a program that prints nothing for minutes seems to hang.
            done = f"{before:,}{of_all} {self._noun} were done before"
            self._say(done if before or total is None else f"{total:,} {self._noun} to do")
        elif before + now != total and (clock - self._last >= _MESSAGE_SECONDS or not self._told):
            self._last, self._told = clock, True
            seconds = None if total is None else (total - before - now) * (clock - self._began) / now
            left = "" if seconds is None else f", {duration(seconds)} left"
            self._say(f"{before + now:,}{of_all} {self._noun}{left}")

    def phase(self, name: str, done: int, total: int | None) -> None:
        """Record a phase, the amount done and the total."""
        clock = time.monotonic()
        if clock - self._last >= _MESSAGE_SECONDS:
            self._last = clock
            self._say(f"{name}: {done:,}{'' if total is None else f' of {total:,}'} {self._noun}")


def slug(name: str) -> str:
    """Return a name in a form for file names: letters, digits, dots and hyphens."""
    return re.sub(r"[^\w.+-]+", "_", name).strip("._")[:100]


def write_side(path: Path, blocks: Iterable[Sequence[str]]) -> int:
    """Write blocks of lines to a file, whole or not at all; return their number."""
    return write_sides([path], ([block] for block in blocks))


def write_sides(files: Sequence[Path], blocks: Iterable[Sequence[Sequence[str]]]) -> int:
    """Write blocks of pairs to two files, each whole or not at all; return the number of pairs."""
    pairs = 0
    with ExitStack() as stack:
        for path in files:
            path.parent.mkdir(parents=True, exist_ok=True)
        sinks = [stack.enter_context(atomic_file(path)) for path in files]
        for block in blocks:
            for file, side in zip(sinks, block, strict=True):
                file.write("".join(f"{line}\n" for line in side).encode())
            pairs += len(block[0])
    return pairs


def with_way_out(problem: Problem, config: PipelineConfig, known: Mapping[str, str]) -> Problem:
    """Return a notice on overlap of a model's data with a held-out set, with a way out that works; others unchanged.

    `prepare` does not know that the bitext has already been cleaned. `known` are the names of the model.
    """
    if not problem.remedy.startswith("`data.filters.held_out: "):
        return problem
    own = {f"bitext.train.{n}.filters": corpus.filters for n, corpus in enumerate(config.bitext.train)}
    rules = {
        where if "held_out" in filters else "cleaning": filters.get("held_out", config.cleaning.held_out)
        for where, filters in own.items()
    }
    # Held-out pairs of the bitext share no side with the remaining ones.
    of_bitext = any(known.get(name.partition(" (")[0]) == "bitext.hold_out.dev" for name in problem.named)
    weak = [] if of_bitext else [where for where, rule in rules.items() if rule != "sides"]
    way_out = "they are machine translations that equal such sentences, which no filter drops"
    if weak:
        keys = ", ".join(f"`{where}.held_out: sides`" for where in weak[:3])
        way_out = f"{keys} drops such pairs of the bitext, and what is distilled from them"
    return replace(problem, remedy=way_out)


@contextlib.contextmanager
def errors_renamed(
    model: ModelName | None = None, corpora: Callable[[], Mapping[str, str]] = dict[str, str]
) -> Iterator[None]:
    """Context in which errors use the names of a pipeline; `corpora` is called if there is an error."""
    try:
        yield
    except ZigguratError as error:
        raise error.with_names(pipeline_names(model, corpora())) from None
