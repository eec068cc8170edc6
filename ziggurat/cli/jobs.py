"""Bulk work from the command line: the options that the verbs share, progress, and what is said at the end."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from ziggurat.cli.output import check_input, counted, input_stream, say
from ziggurat.system.errors import ConfigError, DataError, printable
from ziggurat.system.processes import usable_cpus
from ziggurat.system.terminal import duration

if TYPE_CHECKING:
    from ziggurat.cli.engine import ModelOptions
    from ziggurat.corpora.jobs.job import JobOutcome, Plan, Work
    from ziggurat.corpora.jobs.tasks import Identified, LineWithInputs, Merged, ModelChoice, Task
    from ziggurat.translate.options import TranslateOptions

Report = TypeVar("Report")

_BULK = "Bulk work on many machines"
JobFolder = Annotated[
    str | None,
    typer.Option(
        "--job",
        metavar="FOLDER",
        help="Keep what is done in this folder, which machines may share; the same command goes on from there.",
        rich_help_panel=_BULK,
    ),
]
ShardPart = Annotated[
    str | None,
    typer.Option(
        "--shard",
        metavar="I/N",
        help="i/n: do only the i-th of n equal parts, and do not merge.",
        rich_help_panel=_BULK,
    ),
]
MergeOnly = Annotated[bool, typer.Option("--merge", help="Only merge what all parts have done.", rich_help_panel=_BULK)]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray", metavar="ADDRESS", help="Workers on a Ray cluster: auto, local, or HOST:PORT.", rich_help_panel=_BULK
    ),
]
JobWorkers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        max=1024,
        help="Parallel processes of a job; default: one per CPU core, 1 on a GPU; with --ray as many as it can hold.",
        rich_help_panel=_BULK,
    ),
]

SHARD_LINES = 2048
"""Lines of a shard, unless the verb has others: the window of a translator."""
_MESSAGE_SECONDS = 10.0  # between two messages on the progress


@dataclass(frozen=True)
class JobOptions:
    """The options of a verb on bulk work.

    Attributes:
        folder: folder of the job; None: no job.
        shard: `--shard`, as it was typed.
        ray: address of a Ray cluster; None: processes of this machine.
        workers: number of workers, each with `threads` CPU threads on `device`; None: the default.
        noun: what progress is counted in.
    """

    folder: str | None
    shard: str | None
    merge: bool
    ray: str | None
    workers: int | None = None
    threads: int | None = None
    device: str = "cpu"
    noun: str = "line"

    def __post_init__(self) -> None:
        """Raise ConfigError for options that contradict each other, and for a cluster that is not there."""
        given = {"--shard": self.shard, "--merge": self.merge, "--ray": self.ray, "--workers": self.workers}
        if self.folder is None and (alone := [name for name, value in given.items() if value]):
            raise ConfigError(f"`{alone[0]}` goes with `--job FOLDER`, where parts of the work are kept")
        if self.merge and self.shard is not None:
            raise ConfigError("`--merge` puts all parts together; leave out `--shard`")
        if self.ray is not None and ":" in self.device:
            raise ConfigError(f"`--device {printable(self.device)}`: Ray chooses the GPU of each worker; write `cuda`")
        self.part  # noqa: B018 - it is checked now
        if self.ray is not None and not self.merge:
            from ziggurat.corpora.jobs.launchers import cluster_library

            cluster_library(self.ray)  # now: a vocabulary or an aligner may be learned before workers are started

    @property
    def part(self) -> tuple[int, int]:
        """(i, n), i from 0, of `--shard i/n`, where i counts from 1."""
        if self.shard is None:
            return 0, 1
        found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", self.shard)
        if not found or not 1 <= int(found[1]) <= int(found[2]):
            raise ConfigError(f"`--shard {printable(self.shard)}`: write i/n such as 1/4, with i from 1 to n")
        return int(found[1]) - 1, int(found[2])

    def work(self) -> Work:
        """Return the work of this call."""
        from ziggurat.corpora.jobs.job import Work
        from ziggurat.corpora.jobs.launchers import processes, ray_actors

        threads, gpu = self.threads or 1, False
        if self.device != "cpu":
            from ziggurat.model.accelerator import usable_device

            gpu = usable_device(self.device, "--device").type != "cpu"
        if self.ray is not None:
            launch = partial(ray_actors, self.ray, self.workers, cpus=threads, gpus=int(gpu))
        else:
            usual = 1 if gpu else max(1, usable_cpus() // threads)
            launch = partial(processes, self.workers or usual)
        return Work(launch, self.part, self.merge, _Progress(self.noun).show)


class _Progress:
    """Messages every few seconds: lines done, lines per second, time left."""

    def __init__(self, noun: str) -> None:
        self._noun = noun
        self._start = self._last_message = time.monotonic()

    def show(self, before: int, now: int, total: int | None) -> None:
        """Take the number of lines done by earlier calls of the verb, by this one, and of all (None: not known)."""
        clock = time.monotonic()
        if now == 0:  # the rate counts from here, the time in which workers load the models included
            self._start = self._last_message = clock
            if before:
                say(f"{self._amount(before, total)} were done before")
        elif clock - self._last_message >= _MESSAGE_SECONDS or before + now == total:
            self._last_message = clock
            rate = now / max(clock - self._start, 1e-9)
            left = "" if total is None else f"  {duration((total - before - now) / rate)} left"
            say(f"{self._amount(before + now, total)}  {rate:,.1f} {self._noun}s/s{left}")

    def _amount(self, done: int, total: int | None) -> str:
        return counted(done, self._noun) if total is None else f"{done:,} of {counted(total, self._noun)}"


def finished(outcome: JobOutcome[Report], options: JobOptions) -> Report | None:
    """Return the report of a merged job; None where only a part was done, with what to do next printed.

    Ends the program where a signal stopped the work.
    """
    if outcome.signal is not None:
        say("stopped; run the same command to continue")
        raise typer.Exit(128 + outcome.signal)
    if outcome.report is None:
        shards = "" if outcome.shards is None else f" of {outcome.shards:,} shards"
        say(
            f"part {options.shard}{shards} is complete; when all parts are, run the same command "
            "with `--merge` instead of `--shard`"
        )
    return outcome.report


def line_job(
    options: JobOptions,
    verb: str,
    task: Task,
    settings: dict[str, Any],
    inputs: Sequence[str],
    lines: Callable[[], Iterable[LineWithInputs]],
    take: Callable[[Iterator[bytes]], Any],
    shard_lines: int | None = None,
    before: Callable[[Plan], None] = lambda plan: None,
) -> Merged | None:
    """Do a job of lines; return what was merged, or None where this call did only a part.

    The result depends on `settings` and the files `inputs`, from which `lines` come. `before` makes what all shards
    need, once their plan is written; `take` takes the results of all shards, in order. A shard has `shard_lines`, by
    default SHARD_LINES.
    """
    from ziggurat.corpora.jobs.job import fix_plan
    from ziggurat.corpora.jobs.tasks import run_text_job
    from ziggurat.data.store_checks import InputWatch

    assert options.folder is not None
    for path in inputs:
        if path == "-":
            raise ConfigError("`--job` reads its inputs more than once, so none can be standard input (`-`)")
        check_input(path)
    shard_lines = shard_lines or SHARD_LINES
    settings = {"verb": verb, "shard_lines": shard_lines, **settings}
    watch = InputWatch()
    settings["inputs"] = [{"files": watch.fingerprint(Path(path))} for path in inputs]
    plan = fix_plan(Path(options.folder), verb, settings, watch, shard_lines, lambda: sum(1 for _ in lines()))
    if not options.merge:
        before(plan)
    return finished(run_text_job(plan, task, lines, take, options.work()), options)


def lines_beside(text: str, *beside: str) -> Iterator[LineWithInputs]:
    """Yield the lines of a file, each with the lines of others beside it. Raises DataError unless they pair up."""
    from ziggurat.corpora.jobs.tasks import LineWithInputs
    from ziggurat.translate.results import read_lines

    for number, row in enumerate(zip_longest(*(read_lines(*input_stream(path)) for path in (text, *beside)))):
        if None in row:
            ended = (text, *beside)[row.index(None)]
            raise DataError(
                f"{ended} ends after {counted(number, 'line')}, {text} and others do not: they must pair up"
            )
        yield LineWithInputs(row[0], row[1:])


def model_choice(models: Sequence[str], opening: ModelOptions) -> ModelChoice:
    """Return the models of a job."""
    from ziggurat.corpora.jobs.tasks import ModelChoice

    return ModelChoice(
        tuple(models),
        opening.which,
        opening.without_layers,
        opening.device,
        opening.threads or 1,
        opening.engine,
        opening.settings,
    )


def translation_job(
    options: JobOptions,
    verb: str,
    models: Identified,
    inputs: dict[str, str | None],
    take: Callable[[Iterator[bytes]], Any],
    *,
    form: Literal["text", "best", "quality", "json"] = "text",
    asked: TranslateOptions | None = None,
    shard_lines: int | None = None,
) -> Merged | None:
    """Translate the file `inputs["lines"]` as a job; see line_job.

    `inputs` may also have `prefixes` and `constraints`, line by line, and the file that the `terminology` of `asked`,
    what is asked of the translations, was read from.
    """
    from ziggurat.corpora.jobs.tasks import Translating
    from ziggurat.translate.options import TranslateOptions

    files = {name: path for name, path in inputs.items() if path is not None}
    beside = tuple(name for name in ("prefixes", "constraints") if name in files)
    asked = asked or TranslateOptions()
    task = Translating(models.choice, form, asked, beside)
    task.check()
    settings = {**models.settings, "form": form, "tag": asked.tag, "files": list(files)}
    lines = partial(lines_beside, files["lines"], *(files[name] for name in beside))
    return line_job(options, verb, task, settings, list(files.values()), lines, take, shard_lines)
