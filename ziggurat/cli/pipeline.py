"""The verb that goes from corpora to a small model by one file: pipeline."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ziggurat.cli.engine import warnings_shown
from ziggurat.cli.jobs import JobOptions, JobWorkers, RayAddress, ShardPart
from ziggurat.cli.output import Json, Overrides, console, counted, print_json, say
from ziggurat.system.errors import ConfigError, ZigguratError, printable
from ziggurat.system.terminal import duration

if TYPE_CHECKING:
    from ziggurat.corpora.pipeline.context import PipelineContext
    from ziggurat.corpora.pipeline.engine import Pipeline, Selection
    from ziggurat.corpora.pipeline.staleness import StepStatus
    from ziggurat.corpora.pipeline.step import Expected

_CHOICE, _LOOK = "Which steps", "Only look"


def pipeline(
    file: Annotated[str, typer.Argument(help="YAML file, or `demo`; `starter`, with --print: one to edit.")],
    overrides: Overrides = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Show what would be done, and why, with time and memory.", rich_help_panel=_LOOK
        ),
    ] = False,
    status: Annotated[
        bool, typer.Option("--status", help="Show how far it is, without estimates.", rich_help_panel=_LOOK)
    ] = False,
    show: Annotated[bool, typer.Option("--print", help="Print the file, to edit it.", rich_help_panel=_LOOK)] = False,
    only: Annotated[
        str | None,
        typer.Option("--only", metavar="STEP", help="This step alone.", rich_help_panel=_CHOICE),
    ] = None,
    first: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="STEP",
            help="Begin with this step: results of those before it are taken as they stand.",
            rich_help_panel=_CHOICE,
        ),
    ] = None,
    until: Annotated[
        str | None, typer.Option("--until", metavar="STEP", help="End with this step.", rich_help_panel=_CHOICE)
    ] = None,
    force: Annotated[
        list[str] | None,
        typer.Option(
            "--force", metavar="STEP", help="Do this step again although it is done; repeat.", rich_help_panel=_CHOICE
        ),
    ] = None,
    shard: ShardPart = None,
    ray: RayAddress = None,
    workers: JobWorkers = None,
    json: Json = False,
) -> None:
    """From corpora to a small fast student, by one file; stop at any time, the same command goes on.

    Examples: `ziggurat pipeline demo`, `ziggurat pipeline starter --print > my.yaml`, `ziggurat pipeline my.yaml`
    """
    if only is not None and (first is not None or until is not None):
        raise ConfigError("`--only` is one step; leave out `--from` and `--until`")
    if sum((dry_run, status, show)) > 1:
        raise ConfigError("choose one of `--dry-run`, `--status` and `--print`")
    if shard is not None and force:
        raise ConfigError("`--force` with `--shard`: every part would begin the step again; remove its folder instead")
    from ziggurat.corpora.pipeline.demo_data import DEMO, STARTER, write_demo

    given = overrides or []
    text, label = _read(file, given)
    if show:
        print(text, end="")
        return
    if file == STARTER and not Path(file).is_file():
        raise ConfigError(f"`{STARTER}` is a file to edit: `ziggurat pipeline {STARTER} --print > my.yaml`")
    from ziggurat.config.load import parse_as
    from ziggurat.config.pipeline import PipelineConfig

    config = parse_as(PipelineConfig, text, label, given)
    from ziggurat.corpora.pipeline.context import ExecutionOptions, PipelineContext
    from ziggurat.corpora.pipeline.engine import Selection
    from ziggurat.corpora.pipeline.steps import pipeline_of

    looks = dry_run or status
    options = JobOptions(config.folder, shard, False, None if looks else ray, workers)
    context = PipelineContext(config, say, console(), ExecutionOptions(options.ray, workers, options.part))
    if file == DEMO and not Path(file).is_file():
        write_demo(context.folder)
    with _located(text, label, given):
        steps = pipeline_of(context)
    selection = Selection(only or first, only or until, frozenset(force or []))
    if looks:
        with _located(text, label, given):
            _show(steps, selection, costs=dry_run, json=json)
        return
    if shard is not None:
        _do_part(steps, only, shard)
        return
    with warnings_shown():
        signal = _run(steps, selection, _located(text, label, given))
    if signal is not None:
        raise typer.Exit(128 + signal)
    if selection.numbers(steps.steps).stop < len(steps.steps):
        say(f"{context.folder}: the chosen steps are done")
        return
    _print_report(context, json)


@contextlib.contextmanager
def _located(text: str, label: str, overrides: Sequence[str]) -> Iterator[None]:
    """Context in which errors that begin with a key of the file get its line, as those of reading it have."""
    from ziggurat.system.yaml_text import parse_yaml

    try:
        yield
    except ZigguratError as error:
        found = re.match(r"`?([a-z_]+(?:\.\w+)*)`?: ", str(error))
        if found is None or any(found[1].startswith(override.partition("=")[0]) for override in overrides):
            raise
        _, lines = parse_yaml(text, label)
        key = tuple(int(part) if part.isdecimal() else part for part in found[1].split("."))
        if key not in lines:
            raise
        raise type(error)(f"{label}, line {lines[key]}: {error}") from None


def _read(file: str, overrides: Sequence[str]) -> tuple[str, str]:
    """Return the text of a pipeline's file and its name in errors; `folder=` moves all of the demo."""
    from ziggurat.config.load import read_config
    from ziggurat.corpora.pipeline.demo_data import DEMO_FOLDER, EMBEDDED, embedded_text
    from ziggurat.system.yaml_text import parse_value

    if file in EMBEDDED and not Path(file).is_file():  # `make demo` leaves a folder `demo`
        folders = [parse_value(text.removeprefix("folder="), text) for text in overrides if text.startswith("folder=")]
        return embedded_text(file, str(folders[-1]) if folders else DEMO_FOLDER), f"the embedded pipeline {file}"
    if not Path(file).exists() and not Path(file).suffix:
        raise ConfigError(f"{printable(file)}: no such file; the embedded pipelines are {' and '.join(EMBEDDED)}")
    return read_config(file, piped=True), file


def _run(steps: Pipeline, selection: Selection, located: AbstractContextManager[None]) -> int | None:
    """Run the steps, in the context that locates errors; return the signal that stopped them, if one did."""
    told = False

    def tell(text: str) -> None:
        nonlocal told
        told = True
        say(text)

    def again() -> str:
        # `--force` would begin once more what it began already.
        forced = [f"`--force {name}`" for name in steps.begun if name in selection.forced]
        return f"the same command{' without ' if forced else ''}{' and '.join(forced)} goes on from here"

    try:
        with located:
            end = steps.run(selection, tell)
    except ZigguratError as error:
        if told:
            raise type(error)(f"error: {error}\nWhat is done is kept; once this is mended, {again()}.") from error
        raise
    if end.stopped is not None:
        say(f"stopped in step {end.stopped}; what is done is kept, and {again()}")
    return end.signal


def _do_part(steps: Pipeline, name: str | None, shard: str) -> None:
    from ziggurat.corpora.pipeline.engine import ShardedRun, shared_step

    step = shared_step(steps.steps, name)
    with warnings_shown():
        signal = ShardedRun(steps.folder, steps.steps).run_part(step, say)
    if signal is not None:
        say(
            f"stopped in part {shard} of step {step.name}; what is done is kept, and the same command goes on from here"
        )
        raise typer.Exit(128 + signal)
    say(f"part {shard} of step {step.name} is done; the same command without `--only` and `--shard` merges all parts")


def _show(steps: Pipeline, selection: Selection, *, costs: bool, json: bool) -> None:
    states = steps.statuses(selection)
    expected = {state.step.name: state.expected() for state in states if costs and not state.settled}
    if json:
        print_json([_record(state, expected.get(state.step.name)) for state in states])
        return
    width = max(len(state.step.name) for state in states)
    for state in states:
        line = f"{state.step.name:<{width}}  {_time(state, expected.get(state.step.name)):>12}  {state.explanation}"
        print(line if state.settled else f"{line}: {state.step.title}" if state.state == "new" else line)
        if (cost := expected.get(state.step.name)) is not None and cost.said:
            memory = f"; {cost.memory / 2**20:,.0f} MiB" if cost.memory else ""
            print(f"{'':<{width}}  {'':>12}  {cost.said}{memory}")
    for name in steps.left_over():
        print(f"{steps.folder / name}: of a step that this pipeline no longer has")
    if costs:
        print(_total(expected))


def _time(state: StepStatus, expected: Expected | None) -> str:
    if state.settled:
        return f"{duration(state.spent.seconds)}"
    if expected is None:
        return "to do"
    return "?" if expected.seconds is None else f"about {duration(expected.seconds)}"


def _total(expected: dict[str, Expected]) -> str:
    known = [cost.seconds for cost in expected.values() if cost.seconds is not None]
    if not expected:
        return "nothing to do"
    unknown = len(expected) - len(known)
    more = f", without {counted(unknown, 'step')} whose time is not known before" if unknown else ""
    return f"{counted(len(expected), 'step')} to do: about {duration(sum(known))}{more}"


def _record(state: StepStatus, expected: Expected | None) -> dict[str, Any]:
    cost = {} if expected is None else {"seconds": expected.seconds, "memory": expected.memory, "said": expected.said}
    return {
        "step": state.step.name,
        "title": state.step.title,
        "state": state.state,
        "why": state.explanation,
        "spent_seconds": state.spent.seconds,
        "calls": state.spent.calls,
        **({"expected": cost} if expected is not None else {}),
    }


def _score(one: dict[str, Any]) -> str:
    interval = "" if one.get("interval") is None else f" ± {one['interval']:.1f}"
    return f"{one['name']} {one['value']:.1f}{interval}"


def _print_report(context: PipelineContext, json: bool) -> None:
    from ziggurat.corpora.pipeline.evaluation import PAGE, RECORD
    from ziggurat.corpora.pipeline.models import shipped
    from ziggurat.corpora.pipeline.step import read_document

    record = read_document(context.at("report", RECORD))
    if record is None:
        say(f"{context.at('report', RECORD)}: cannot be read; `--force report` writes it again")
        return
    if json:
        print_json(record)
        return
    for test, by_system in record["scores"].items():
        for name, scores in by_system.items():
            print(f"{test}  {name:<20}  " + "  ".join(map(_score, scores)))
    for row in record["speed"]:
        print(f"speed  {row['system']:<20}  {row['lines']:,.1f} lines/s, {row['pieces']:,.0f} pieces/s")
    for verdict in record.get("verdicts", []):
        print(verdict["said"])
    without = f" (without {' and '.join(record['existing'])}, there before)" if record.get("existing") else ""
    took = f"all steps{without} took {duration(record['seconds'])}"
    print(f"{took}; the report, to open in a browser: {context.at('report', PAGE)}")
    for line in shipped(context):
        print(line)
