"""The verbs that run every step: demo, on the embedded language pair, and pipeline, from corpora to a small model."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ziggurat.cli.arguments import pipeline_settings
from ziggurat.cli.engine import warnings_shown
from ziggurat.cli.jobs import job_options
from ziggurat.cli.output import Json, console, counted, print_json, say
from ziggurat.config import Experiment, dump
from ziggurat.config.recipes import load_named
from ziggurat.system.errors import ConfigError, ZigguratError, printable
from ziggurat.system.files import write_atomically
from ziggurat.system.terminal import duration

if TYPE_CHECKING:
    from ziggurat.corpora.pipeline.context import PipelineContext
    from ziggurat.corpora.pipeline.engine import Pipeline, Selection
    from ziggurat.corpora.pipeline.step import Expected, StepStatus
    from ziggurat.inspect.report.runs import Sentences


def demo(
    folder: Annotated[
        Path,
        typer.Option(
            "--folder", help="Folder for everything; resumes an interrupted demo in it, replaces a finished one."
        ),
    ] = Path("demo"),
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Values that override the recipe `demo`: path.to.key=value.")
    ] = None,
    json: Json = False,
) -> None:
    """Train and score a translator from scratch, in under five minutes on two CPU cores.

    Example: `ziggurat demo`
    """
    from ziggurat.data.babel import write_corpus
    from ziggurat.data.prepare import prepare
    from ziggurat.evaluate.scores import evaluate
    from ziggurat.inspect.report.content import gather
    from ziggurat.inspect.report.page import page
    from ziggurat.inspect.report.runs import read_run, translated
    from ziggurat.train.loop import train

    began = time.perf_counter()

    def say_with_time(text: str) -> None:
        say(f"[{duration(time.perf_counter() - began)}] {text}")

    experiment = _experiment(folder, overrides or [])
    resume = _make_room(folder, dump(experiment))
    say_with_time("1/6 writing the embedded language pair: 20,000 training pairs of Low Babel and High Babel")
    files = write_corpus(folder / "corpus")
    write_atomically(folder / _CONFIG, dump(experiment).encode())

    say_with_time(f"2/6 prepare: cleaning, {experiment.data.subword.vocabulary_size:,} BPE pieces, memory-mapped store")
    report = prepare(experiment.data, force=resume)
    layers = f"{experiment.model.encoder.layers}+{experiment.model.decoder.layers}"
    say_with_time(f"3/6 train: {report.kept:,} pairs, {layers} layers of width {experiment.model.d_model}")
    run = folder / "run"
    result = train(run, experiment, resume=resume, console=console(), advice=False)
    if result.signal is not None:
        say(f"{folder}: repeat the command to resume this demo")
        raise typer.Exit(128 + result.signal)

    say_with_time("4/6 translate: the 500 sentences of the test set, beam 4")
    sentences = _test_set(*files["test"])
    outputs = translated(read_run(run), sentences, say_with_time).outputs
    write_atomically(folder / "test.output", "".join(f"{line}\n" for line in outputs).encode())
    say_with_time("5/6 evaluate")
    scores = evaluate(outputs, [sentences.references])
    say_with_time("6/6 report")
    page_file = folder / _REPORT
    write_atomically(page_file, page(gather([read_run(run)], lambda: sentences)).encode())
    seconds = time.perf_counter() - began
    if json:
        document: dict[str, Any] = {"scores": [score.as_record() for score in scores], "seconds": seconds}
        print_json({**document, "run": str(run), "report": str(page_file)})
        return
    print()
    for i in range(3):
        print(f"source     {sentences.sources[i]}\noutput     {outputs[i]}\nreference  {sentences.references[i]}\n")
    print(*scores, sep="\n")
    print(f"\nAll of this took {duration(seconds)}. What to try next:\n{_next_steps(folder, files['test'])}")
    print(f"\nWhat the run did, to open in a browser: {page_file}")


_CONFIG, _REPORT = "demo.yaml", Path("run") / "report.html"


def _make_room(folder: Path, config: str) -> bool:
    """Create the folder; return True if a demo with the same `config` was interrupted during training or later.

    Removes what another or a finished demo wrote into it; other files stay. The corpus and the store, which are the
    same every time, are not compared here: `prepare` does that.
    """
    mark = folder / ".ziggurat-demo"
    if folder.exists():
        if not mark.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} exists and is not a demo of ziggurat; choose another with `--folder`")
        written = folder / _CONFIG
        same = written.is_file() and written.read_text("utf-8") == config and not (folder / _REPORT).exists()
        if same and any(folder.glob("run/checkpoints/*")):
            say(f"{folder}: resuming the demo interrupted there")
            return True
        if (folder / "corpus").exists():
            say(f"{folder}: removed the earlier demo; starting from the first step")
        for name in ("corpus", "store", "run"):
            shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    mark.touch()
    return False


def _experiment(folder: Path, overrides: Sequence[str]) -> Experiment:
    from ziggurat.data.babel import SOURCE_LANGUAGE, TARGET_LANGUAGE

    paths = {"data.store": folder / "store"}
    for split in ("train", "dev"):
        for side, language in (("source", SOURCE_LANGUAGE), ("target", TARGET_LANGUAGE)):
            paths[f"data.{split}.0.{side}"] = folder / "corpus" / f"{split}.{language}"
    # Quoted: values are read as YAML, where ` #` and `: ` in a name are special.
    return load_named("demo", [*(f"{key}={json.dumps(str(path))}" for key, path in paths.items()), *overrides])


def _test_set(source: Path, target: Path) -> Sentences:
    from ziggurat.data.babel import TARGET_LANGUAGE
    from ziggurat.inspect.report.runs import Sentences

    sources, references = (path.read_text(encoding="utf-8").splitlines() for path in (source, target))
    name = f"the {len(sources)} sentences of the test set"
    return Sentences(name, sources, references, [None] * len(sources), TARGET_LANGUAGE)


def _next_steps(demo_folder: Path, test: tuple[Path, Path]) -> str:
    """Return commands to try next; each can be pasted into a shell."""
    folder, source, target = (shlex.quote(str(path)) for path in (demo_folder, *test))
    commands = (
        (f"head -3 {source} | ziggurat translate {folder}/run", "text of your own"),
        (f"ziggurat serve {folder}/run", "the same in a browser: open the address it prints"),
        (f"ziggurat evaluate {folder}/run --source {source} \\", ""),
        (f"    --reference {target} --confidence", "score it, with confidence intervals"),
        (f"ziggurat train {folder}/demo.yaml --run {folder}/deep \\", ""),
        ("    model.encoder.layers=12", "another model on the same data"),
        (f"ziggurat report {folder}/run {folder}/deep", "compare the two"),
        ("ziggurat recipes", "configurations to start from"),
        ("ziggurat recipes multi30k-de-en > my.yaml", "then edit the paths and:"),
        ("ziggurat prepare my.yaml", ""),
        ("ziggurat train my.yaml --run runs/mine", ""),
    )
    # The shell ignores what follows a `#`, but after a trailing backslash it would break the command.
    width = max(len(command) for command, comment in commands if comment)
    return "\n".join(
        f"  {command:<{width}}  # {comment}" if comment else f"  {command}" for command, comment in commands
    )


_CHOICE, _LOOK = "Which steps", "Only look"


def pipeline(
    file: Annotated[str, typer.Argument(help="YAML file, or `demo`; `starter`, with --print: one to edit.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Values that override the file: path.to.key=value.", autocompletion=pipeline_settings),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Show what would be done, and why, with time and memory.", rich_help_panel=_LOOK
        ),
    ] = False,
    status: Annotated[
        bool, typer.Option("--status", help="Show progress, without estimates.", rich_help_panel=_LOOK)
    ] = False,
    show: Annotated[bool, typer.Option("--print", help="Print the file, to edit it.", rich_help_panel=_LOOK)] = False,
    only: Annotated[
        str | None,
        typer.Option("--only", metavar="STEP", help="Run this step alone.", rich_help_panel=_CHOICE),
    ] = None,
    first: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="STEP",
            help="Begin with this step and use earlier results as they are.",
            rich_help_panel=_CHOICE,
        ),
    ] = None,
    until: Annotated[
        str | None, typer.Option("--until", metavar="STEP", help="End with this step.", rich_help_panel=_CHOICE)
    ] = None,
    force: Annotated[
        list[str] | None,
        typer.Option(
            "--force", metavar="STEP", help="Redo this step even if it is done; repeat.", rich_help_panel=_CHOICE
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Turn corpora into a small, fast student with one file; stop at any time and repeat the command to resume.

    Examples: `ziggurat pipeline demo`, `ziggurat pipeline starter --print > my.yaml`, `ziggurat pipeline my.yaml`
    """
    if only is not None and (first is not None or until is not None):
        raise ConfigError("`--only` runs one step; leave out `--from` and `--until`")
    if sum((dry_run, status, show)) > 1:
        raise ConfigError("choose one of `--dry-run`, `--status` and `--print`")
    bulk = job_options(cluster=not (dry_run or status))
    if bulk.shard is not None and force:
        raise ConfigError("`--force` with `--shard`: every part would restart the step; remove its folder instead")
    from ziggurat.corpora.pipeline.demo_data import DEMO, STARTER, write_demo

    given = overrides or []
    text, label = _read(file, given)
    if show:
        print(text, end="")
        return
    if file == STARTER and not Path(file).is_file():
        raise ConfigError(f"`{STARTER}` is a template to edit: `ziggurat pipeline {STARTER} --print > my.yaml`")
    from ziggurat.config.load import parse_as
    from ziggurat.config.pipeline import PipelineConfig

    config = parse_as(PipelineConfig, text, label, given)
    from ziggurat.corpora.pipeline.context import ExecutionOptions, PipelineContext
    from ziggurat.corpora.pipeline.engine import Selection
    from ziggurat.corpora.pipeline.steps import pipeline_of

    looks = dry_run or status
    context = PipelineContext(config, say, console(), ExecutionOptions(bulk.ray, bulk.workers, bulk.part))
    if file == DEMO and not Path(file).is_file():
        write_demo(context.folder)
    with _located(text, label, given):
        steps = pipeline_of(context)
    selection = Selection(only or first, only or until, frozenset(force or []))
    if looks:
        with _located(text, label, given):
            _show(steps, selection, costs=dry_run, json=json)
        return
    if bulk.shard is not None:
        _do_part(steps, only, bulk.shard)
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
    """Context that adds the line number to errors that begin with a key of the file, as in errors from reading it."""
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
    """Return the text of a pipeline's file and its name in errors; `folder=` relocates the whole demo."""
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
        # `--force` would restart what it already started.
        forced = [f"`--force {name}`" for name in steps.begun if name in selection.forced]
        return f"the same command{' without ' if forced else ''}{' and '.join(forced)} resumes from here"

    try:
        with located:
            end = steps.run(selection, tell)
    except ZigguratError as error:
        if told:
            raise type(error)(f"error: {error}\nWhat is done is kept; once this is fixed, {again()}.") from error
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
            f"stopped in part {shard} of step {step.name}; what is done is kept, and the same command resumes from here"
        )
        raise typer.Exit(128 + signal)
    say(f"part {shard} of step {step.name} is done; the same command without `--only` and `--shard` merges all parts")


def _show(steps: Pipeline, selection: Selection, *, costs: bool, json: bool) -> None:
    states = steps.statuses(selection)
    expected = {state.step.name: state.expected() for state in states if costs and not state.settled}
    if json:
        print_json([_record(state, expected.get(state.step.name)) for state in states])
        return
    times = [_time(state, expected.get(state.step.name)) for state in states]
    width, of_time = max(len(state.step.name) for state in states), max(map(len, times))
    for state, taken in zip(states, times, strict=True):
        line = f"{state.step.name:<{width}}  {taken:>{of_time}}  {state.explanation}"
        print(line if state.settled else f"{line}: {state.step.title}" if state.state == "new" else line)
        if (cost := expected.get(state.step.name)) is not None and cost.said:
            memory = f"; {cost.memory / 2**20:,.0f} MiB" if cost.memory else ""
            print(f"{'':<{width}}  {'':>{of_time}}  {cost.said}{memory}")
    for name in steps.left_over():
        print(f"{steps.folder / name}: from a step that this pipeline no longer has")
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
    more = f", plus {counted(unknown, 'step')} whose time cannot be estimated" if unknown else ""
    return f"{counted(len(expected), 'step')} to do: about {duration(sum(known))} on an idle machine{more}"


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
        say(f"{context.at('report', RECORD)}: cannot be read; `--force report` rewrites it")
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
