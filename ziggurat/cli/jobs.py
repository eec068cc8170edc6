"""Bulk work: the verb `bulk`, which runs other verbs as jobs, their progress, and the closing message."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
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

SHARD_LINES = 2048
"""SHARD_LINES is the number of lines in a shard unless the verb has its own: a translator's window."""
_MESSAGE_SECONDS = 10.0  # between two progress messages


@dataclass(frozen=True)
class JobOptions:
    """Settings of bulk work: the options of `ziggurat bulk` and what the verb adds.

    Attributes:
        folder: folder of the job; None: no job.
        shard: `--shard` as typed.
        ray: address of a Ray cluster; None: local processes.
        workers: number of workers, each with `threads` CPU threads on `device`; None: the default.
        shard_lines: lines per shard; None: the verb's default.
        noun: unit of progress.
    """

    folder: str | None = None
    shard: str | None = None
    merge: bool = False
    ray: str | None = None
    workers: int | None = None
    shard_lines: int | None = None
    threads: int | None = None
    device: str = "cpu"
    noun: str = "line"

    @property
    def part(self) -> tuple[int, int]:
        """(i, n) from `--shard i/n`, with i counted from 0 here and from 1 there."""
        if self.shard is None:
            return 0, 1
        found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", self.shard)
        if not found or not 1 <= int(found[1]) <= int(found[2]):
            raise ConfigError(f"`--shard {printable(self.shard)}`: write i/n such as 1/4, with i from 1 to n")
        return int(found[1]) - 1, int(found[2])

    def work(self) -> Work:
        """Return which part of the work this call does."""
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


_CURRENT: ContextVar[JobOptions | None] = ContextVar("bulk", default=None)
"""_CURRENT holds the options that `ziggurat bulk` passes to the verb it runs; None without `bulk`."""


def job_options(
    folder: str | None = None,
    *,
    threads: int | None = None,
    device: str = "cpu",
    noun: str = "line",
    cluster: bool = True,
) -> JobOptions:
    """Return how the verb should work; `folder` belongs to a verb that always runs as a job.

    Without `cluster`, for a verb that only inspects, the Ray cluster is ignored. Raises ConfigError for a missing
    cluster now, since a vocabulary or an aligner may be learned before workers start.
    """
    given = _CURRENT.get() or JobOptions()
    ray = given.ray if cluster else None
    found = replace(given, folder=folder or given.folder, ray=ray, threads=threads, device=device, noun=noun)
    if ray is not None and ":" in device:
        raise ConfigError(f"`--device {printable(device)}`: Ray chooses the GPU of each worker; write `cuda`")
    if ray is not None and not found.merge:
        from ziggurat.corpora.jobs.launchers import cluster_library

        cluster_library(ray)
    return found


_WITH_FOLDER = ("align", "evaluate", "prepare", "score", "translate")
_OWN_FOLDER = {"backtranslate": "its `--output`", "filter": "its `--output`", "pipeline": "the folder of its file"}
"""_WITH_FOLDER are the verbs that need `--job`; _OWN_FOLDER is where the others keep their parts."""

_VERBS = sorted((*_WITH_FOLDER, *_OWN_FOLDER))


def _verbs_beginning(incomplete: str) -> list[str]:
    return [verb for verb in _VERBS if verb.startswith(incomplete)]


_PARTS, _MACHINES = "Parts", "Workers"


def bulk(
    context: typer.Context,
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND",
            autocompletion=_verbs_beginning,
            help=f"Command to run, without `ziggurat`: one of {', '.join(_VERBS)}.",
        ),
    ],
    job: Annotated[
        str | None,
        typer.Option(
            "--job",
            metavar="FOLDER",
            help="Where finished parts are kept; all machines must see it. backtranslate, filter and pipeline have "
            "their own.",
            rich_help_panel=_PARTS,
        ),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option("--shard", metavar="I/N", help="Do part I of N; do not merge.", rich_help_panel=_PARTS),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Only merge the finished parts.", rich_help_panel=_PARTS)
    ] = False,
    shard_lines: Annotated[
        int | None,
        typer.Option(
            "--shard-lines",
            metavar="N",
            min=1,
            help="Lines per shard, the smallest piece of work. Default: about 2,000; align 10,000.",
            rich_help_panel=_PARTS,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            metavar="N",
            min=1,
            max=1024,
            help="Processes. Default: one per CPU core, 1 on a GPU; with --ray as many as fit the cluster.",
            rich_help_panel=_MACHINES,
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="ADDRESS",
            help="Workers on a Ray cluster: auto, local, or HOST:PORT.",
            rich_help_panel=_MACHINES,
        ),
    ] = None,
) -> None:
    """Run another command on many processes or machines, or in several sessions; the result is the same.

    Repeat a stopped command to resume it.

    Example: `ziggurat bulk --job work --shard 3/40 translate runs/a -i mono.en -o mono.de`, then the same with
    `--merge` instead of `--shard 3/40`
    """
    options = JobOptions(job, shard, merge, ray, workers, shard_lines)
    verb, *words = command
    if verb not in _VERBS:
        raise ConfigError(f"`bulk {printable(verb)}`: `bulk` works with the commands {', '.join(_VERBS)}")
    root = context.parent
    assert root is not None
    inner = root.command.get_command(root, verb)  # type: ignore[attr-defined]
    before = _CURRENT.set(options)
    try:
        with inner.make_context(verb, words, parent=root) as called:  # may print the verb's help
            _check_bulk(verb, options)
            inner.invoke(called)
    finally:
        _CURRENT.reset(before)


def _check_bulk(verb: str, options: JobOptions) -> None:
    """Raise ConfigError for options that contradict the verb, or each other."""
    if verb in _WITH_FOLDER and options.folder is None:
        raise ConfigError(f"`--job FOLDER` is missing before `{verb}`: where should finished parts be kept?")
    if verb in _OWN_FOLDER and options.folder is not None:
        raise ConfigError(f"`{verb}` keeps its parts in {_OWN_FOLDER[verb]}; leave out `--job`")
    if options.merge and options.shard is not None:
        raise ConfigError("`--merge` puts all parts together; leave out `--shard`")
    if options.merge and verb == "pipeline":
        raise ConfigError("`pipeline` merges by itself when it is called without `--shard`; leave out `--merge`")
    if options.shard_lines is not None and verb in ("pipeline", "prepare"):
        raise ConfigError(f"`{verb}` chooses the size of its shards; leave out `--shard-lines`")
    options.part  # noqa: B018 - reading it checks the value


class _Progress:
    """Messages every few seconds: lines done, lines per second, time left."""

    def __init__(self, noun: str) -> None:
        self._noun = noun
        self._start = self._last_message = time.monotonic()

    def show(self, before: int, now: int, total: int | None) -> None:
        """Show progress, given the lines done by earlier calls, by this one, and in total (None: unknown)."""
        clock = time.monotonic()
        if now == 0:  # the rate counts from here, including the time workers take to load models
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
    """Return the report of a merged job; None if only a part was done, after printing what to do next.

    Ends the program if a signal stopped the work.
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
    shard_lines: int = SHARD_LINES,
    before: Callable[[Plan], None] = lambda plan: None,
) -> Merged | None:
    """Run a job over lines; return the merged result, or None if this call did only a part.

    The result depends on `settings` and the files `inputs`, which supply `lines`. `before` makes what all shards need,
    once their plan is written; `take` receives the results of all shards, in order. A shard has `shard_lines` unless
    `options` say otherwise.
    """
    from ziggurat.corpora.jobs.job import fix_plan
    from ziggurat.corpora.jobs.tasks import run_text_job
    from ziggurat.data.store_checks import InputWatch

    assert options.folder is not None
    for path in inputs:
        if path == "-":
            raise ConfigError("`--job` reads its inputs more than once, so none can be standard input (`-`)")
        check_input(path)
    shard_lines = options.shard_lines or shard_lines
    settings = {"verb": verb, "shard_lines": shard_lines, **settings}
    watch = InputWatch()
    settings["inputs"] = [{"files": watch.fingerprint(Path(path))} for path in inputs]
    plan = fix_plan(Path(options.folder), verb, settings, watch, shard_lines, lambda: sum(1 for _ in lines()))
    if not options.merge:
        before(plan)
    return finished(run_text_job(plan, task, lines, take, options.work()), options)


def lines_beside(text: str, *beside: str) -> Iterator[LineWithInputs]:
    """Yield the lines of a file, each with the matching lines of other files. Raises DataError if the counts differ."""
    from ziggurat.corpora.jobs.tasks import LineWithInputs
    from ziggurat.translate.text_lines import read_lines

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
) -> Merged | None:
    """Translate the file `inputs["lines"]` as a job; see line_job.

    `inputs` may also have `prefixes` and `constraints`, line by line, and the file from which the `terminology` in
    `asked`, the translation options, was read.
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
    return line_job(options, verb, task, settings, list(files.values()), lines, take)
