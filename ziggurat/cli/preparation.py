"""Verbs before training: recipes, explain, prepare."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ziggurat.cli.output import console, counted, print_json
from ziggurat.config.recipes import load_named, recipe_names, recipe_summary, recipe_text
from ziggurat.config.reference import entries, nearest
from ziggurat.duration import duration
from ziggurat.errors import ConfigError

if TYPE_CHECKING:
    from ziggurat.data.prepare import PrepareReport

__all__ = ["explain", "prepare", "recipes"]

ConfigArgument = Annotated[str, typer.Argument(help="YAML file, or the name of a built-in recipe.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Values that replace the file's: path.to.key=value.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]


def recipes(
    name: Annotated[str | None, typer.Argument(help="Print this recipe's YAML.")] = None, json: Json = False
) -> None:
    """List the built-in configurations, or print one.

    Example: `ziggurat recipes multi30k-de-en > my.yaml`
    """
    if name is not None:
        text = recipe_text(name)
        print_json({"name": name, "text": text}) if json else print(text, end="")
        return
    listed = [{"name": n, "summary": recipe_summary(n)} for n in recipe_names()]
    if json:
        print_json(listed)
        return
    width = max(len(n) for n in recipe_names())
    for recipe in listed:
        print(f"{recipe['name']:<{width}}  {recipe['summary']}")


def explain(
    key: Annotated[str, typer.Argument(help="Dotted key or section, such as training.schedule.")] = "",
    json: Json = False,
) -> None:
    """Say what a configuration key means, its type and default.

    Example: `ziggurat explain training.schedule`
    """
    path = re.sub(r"\.\d+(?=\.|$)", "[]", key)  # data.train.0.weight: any item of the list
    found = [e for e in entries() if not key or e.path == path or e.path.startswith((f"{path}.", f"{path}[]"))]
    if not found:
        raise ConfigError(f"no key `{key}`; did you mean {', '.join(f'`{n}`' for n in nearest(key))}?")
    if json:
        print_json([e._asdict() for e in found])
        return
    for e in found:
        kind = e.type if e.type == "section" else f"{e.type}; default: {e.default}"
        print(f"{e.path}  ({kind})\n    {e.meaning}")


def prepare(
    config: ConfigArgument,
    overrides: Overrides = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a store made from other settings.")] = False,
    json: Json = False,
) -> None:
    """Clean, segment and store parallel text.

    Example: `ziggurat prepare my.yaml data.subword.vocabulary_size=16000`
    """
    from ziggurat.data.prepare import prepare as prepare_store

    experiment = load_named(config, overrides or [])
    with _Bars() as bars:
        report = prepare_store(experiment.data, force=force, progress=bars.show)
    if json:
        print_json(report.as_dict())
    else:
        print(_report_text(report))


def _report_text(report: PrepareReport) -> str:
    """Return the report for people: one line per corpus, then the store."""
    lines = []
    for corpus in report.corpora:
        dropped = ", ".join(f"{count:,} {reason}" for reason, count in sorted(corpus.dropped.items()) if count)
        line = f"{corpus.split:<5}  {corpus.name}: {corpus.kept:,} of {counted(corpus.read, 'pair')} kept"
        lines.append(f"{line}; dropped: {dropped}" if dropped else line)
        if corpus.carriage_returns:
            lines.append(f"       {counted(corpus.carriage_returns, 'line')} ended in CR LF; the CR was removed")
    source, target = report.source_vocabulary, report.target_vocabulary
    if report.joint_vocabulary:
        vocabulary = f"joint vocabulary: {counted(source, 'piece')}"
    else:
        vocabulary = f"vocabularies: {source:,} source and {target:,} target pieces"
    how = "already there, nothing to do" if report.reused else f"written in {duration(report.seconds)}"
    return "\n".join([*lines, f"store  {report.store}; {vocabulary}; {how}"])


class _Bars:
    """One progress bar per phase; plain lines off a terminal."""

    def __init__(self) -> None:
        self._console = console()
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> _Bars:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def show(self, phase: str, done: int, total: int | None) -> None:
        if phase not in self._tasks:
            self._tasks[phase] = self._bars.add_task(phase, total=total)
            if self._bars.disable:
                self._console.print(f"{phase} ...", highlight=False, markup=False)
        self._bars.update(self._tasks[phase], completed=done, total=total)
