"""The verb that gets public corpora and test sets: fetch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn

from ziggurat.cli.output import Json, PhaseBars, counted, print_json, progress_bars, say
from ziggurat.config.load import parse_experiment
from ziggurat.config.recipes import find_small_recipe, read_named
from ziggurat.system.errors import ConfigError, DataError, printable

if TYPE_CHECKING:
    from ziggurat.corpora.fetch.downloads import Downloads
    from ziggurat.corpora.fetch.indexes import IndexEntry, Names
    from ziggurat.corpora.fetch.pairs import FetchTask, Written

_NETWORK = "Network"
EMBEDDED = "babel"
"""Name of the embedded language pair (docs/embedded-data.md), which is made and not downloaded."""


def fetch(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Corpora such as opus/Tatoeba/latest/de-en, recipes, or configurations; words with --list."
        ),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List corpora with sizes and licences; fetch nothing.")] = False,
    output: Annotated[
        str, typer.Option("--output", "-o", "--out", metavar="FOLDER", help="Folder for corpora given by name.")
    ] = "data",
    force: Annotated[bool, typer.Option("--force", help="Write anew what is there.")] = False,
    registry: Annotated[
        list[str] | None,
        typer.Option("--registry", metavar="FILE", help="A registry of your own, laid over the built-in one; repeat."),
    ] = None,
    cache: Annotated[
        str | None,
        typer.Option(
            "--cache",
            metavar="FOLDER",
            help="Folder of downloads; default: $ZIGGURAT_DOWNLOADS, or ~/.cache/ziggurat/downloads.",
        ),
    ] = None,
    mirror: Annotated[
        list[str] | None,
        typer.Option(
            "--mirror",
            metavar="PLACE",
            help="Folder or address with files at HOST/PATH, asked before their servers; repeat.",
            rich_help_panel=_NETWORK,
        ),
    ] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Use downloads and folders only.", rich_help_panel=_NETWORK)
    ] = False,
    proxy: Annotated[
        str | None,
        typer.Option("--proxy", metavar="URL", help="Proxy; default: $https_proxy.", rich_help_panel=_NETWORK),
    ] = None,
    retries: Annotated[
        int, typer.Option("--retries", min=0, max=1000, help="Failures in a row to bear.", rich_help_panel=_NETWORK)
    ] = 5,
    json: Json = False,
) -> None:
    """Get public corpora and test sets by name, or all that a recipe names, with their licences on record.

    Example: `ziggurat fetch multi30k-de-en`, `ziggurat fetch opus/Tatoeba/latest/de-en`, `ziggurat fetch --list de-en`
    """
    from ziggurat.corpora.fetch.downloads import Downloads, default_folder
    from ziggurat.corpora.fetch.indexes import Names
    from ziggurat.corpora.fetch.registry import load_registry
    from ziggurat.corpora.fetch.transfer import Network

    if not names and not list_:
        raise ConfigError("nothing to fetch: name a corpus, a recipe or a configuration; `--list` lists what there is")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with progress_bars(*columns) as bars:
        downloads = Downloads(
            Path(cache).expanduser() if cache else default_folder(),
            mirror or [],
            offline,
            Network(proxy=proxy, retries=retries),
            PhaseBars(bars, once=True).show,
        )
        known = Names(load_registry(registry or []), downloads)
        if list_:
            _print_list(_listed(names or [], known, downloads), json)
            return
        folder = Path(output).expanduser()
        ours = [name for name in names or [] if name == EMBEDDED or find_small_recipe(name) is not None]
        tasks = [task for name in names or [] if name not in ours for task in _tasks(name, known, folder)]
        embedded = _write_embedded(folder / EMBEDDED) if ours else []
        written = _run(tasks, downloads, force)
    if json:
        print_json([*embedded, *(_document(one) for one in written)])
    else:
        print("\n".join([*(_embedded_text(one) for one in embedded), *map(_text, written)]))


def _write_embedded(folder: Path) -> list[dict[str, Any]]:
    """Write the embedded language pair, which the package makes and small recipes train on; return its sets."""
    from ziggurat.data.babel import SOURCE_LANGUAGE, TARGET_LANGUAGE, write_corpus

    written = write_corpus(folder)
    return [
        {
            "name": f"{EMBEDDED}/{split}",
            "files": {SOURCE_LANGUAGE: str(source), TARGET_LANGUAGE: str(target)},
            "reused": False,
            "pairs": source.read_bytes().count(b"\n"),
            "parts": [],
            "terms": None,
        }
        for split, (source, target) in written.items()
    ]


def _embedded_text(one: dict[str, Any]) -> str:
    return f"{' and '.join(one['files'].values())}: {counted(one['pairs'], 'pair')}, written"


def _tasks(name: str, names: Names, folder: Path) -> list[FetchTask]:
    from ziggurat.corpora.fetch.pairs import task_of_name, tasks_of_config

    if name == "demo":
        raise ConfigError(
            f"the data of `demo` come with the package: `ziggurat demo` writes them; `ziggurat fetch {EMBEDDED}`, alone"
        )
    if Path(name).is_file() or "/" not in name or name.endswith((".yaml", ".yml")):
        named = read_named(name)
        return tasks_of_config(parse_experiment(named.text, named.label, []).data, names, named.label)
    return [task_of_name(names.find(name), folder)]


def _run(tasks: Sequence[FetchTask], downloads: Downloads, force: bool) -> list[Written]:
    from ziggurat.corpora.fetch.pairs import by_hand, run_task

    written, failed = [], by_hand(tasks)
    for task in tasks:
        if task.own:
            say(f"{task.target.name}: is there and was not fetched, so it stays as it is")
        try:
            written += run_task(task, downloads, force=force)
        except DataError as error:
            failed.append(str(error))
    if failed:
        for one in written:
            say(_text(one))
        raise DataError("\n".join(failed))
    return written


def _listed(words: Sequence[str], names: Names, downloads: Downloads) -> list[IndexEntry]:
    """Return what a list is to show: the corpora of an index, one corpus with the sizes of its files, or a search."""
    from ziggurat.corpora.fetch.indexes import IndexEntry, opus_listed, sacrebleu_listed
    from ziggurat.corpora.fetch.registry import any_pair, described

    if words and words[0] == "opus":
        pair = re.fullmatch(r"(\w+)-(\w+)", words[1]) if len(words) > 1 else None
        if pair is None:
            raise ConfigError("name two languages: `ziggurat fetch --list opus de-en`")
        every = opus_listed(downloads, pair[1], pair[2])
        return [one for one in every if all(word.casefold() in one.name.casefold() for word in words[2:])]
    listed, by_pair = list[IndexEntry](), bool(names.registry.pairs_among(words))
    for pattern, entry in names.registry.listed(words):
        sizes = [file.bytes for file in entry.files]
        size = sum(filter(None, sizes)) if None not in sizes else None
        pairs = f" ({described(entry, {})})" if "{b}" in pattern and not (by_pair and any_pair(entry)) else ""
        listed.append(IndexEntry(pattern, entry.title + pairs, size, None, entry.licence, by_pair and any_pair(entry)))
    if words:
        listed += sacrebleu_listed(words)
        listed.sort(key=lambda one: one.any_pair)
    if listed or not words:
        return listed
    for word in words:
        corpus = names.find(word)
        listed += [
            IndexEntry(corpus.name, file.url, downloads.size(file), None, corpus.licence) for file in corpus.files
        ]
    return listed


def _print_list(listed: Sequence[IndexEntry], as_json: bool) -> None:
    if as_json:
        print_json([one._asdict() for one in listed])
        return
    width = max((len(one.name) for one in listed), default=0)
    for before, one in zip([None, *listed], listed, strict=False):
        if one.any_pair and not (before and before.any_pair):
            print("Any pair that the origin has; whether it has these languages is not known here:")
        pairs = f", {counted(one.pairs, 'pair')}" if one.pairs is not None else ""
        size = "?" if one.bytes is None else decimal(one.bytes)
        print(f"{one.name:<{min(width, 60)}}  {size:>9}{pairs}  {printable(one.title, 200)}; {one.licence}")


def _text(one: Written) -> str:
    files = " and ".join(map(str, one.target.files.values()))
    how = "already there" if one.reused else "written"
    skipped = sum(part.skipped for part in one.origin.parts)
    noun = "pair" if len(one.target.files) > 1 else "line"
    lines = [f"{files}: {counted(one.origin.pairs, noun)}, {how}"]
    if skipped:
        lines.append(f"  {counted(skipped, 'line')} without both sides left out")
    lines += [f"  {part.name}: {part.licence}{f' ({part.terms})' if part.terms else ''}" for part in one.origin.parts]
    return "\n".join(lines)


def _document(one: Written) -> dict[str, Any]:
    return {
        "name": one.target.name,
        "files": {language: str(path) for language, path in one.target.files.items()},
        "reused": one.reused,
        "pairs": one.origin.pairs,
        "parts": [part.model_dump(mode="json") for part in one.origin.parts],
        "terms": one.terms,
    }
