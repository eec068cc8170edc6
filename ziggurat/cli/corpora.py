"""The verbs on corpora: fetch, align."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn

from ziggurat.cli.arguments import configurations
from ziggurat.cli.jobs import JobOptions, job_options, line_job
from ziggurat.cli.output import (
    OUT,
    Json,
    PhaseBars,
    check_output,
    counted,
    line_progress,
    output_stream,
    print_json,
    progress_bars,
    refuse_overwriting,
    say,
    write_parts,
)
from ziggurat.config.data import Symmetrisation
from ziggurat.config.load import parse_experiment
from ziggurat.config.recipes import find_small_recipe, read_named
from ziggurat.system.errors import ConfigError, DataError, printable
from ziggurat.system.files import fingerprint, write_atomically
from ziggurat.system.terminal import duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ziggurat.corpora.fetch.downloads import Downloads
    from ziggurat.corpora.fetch.indexes import IndexEntry, Names
    from ziggurat.corpora.fetch.pairs import FetchTask, Written
    from ziggurat.corpora.jobs.job import Plan
    from ziggurat.data.aligner import Aligner, Link, TrainingOptions
    from ziggurat.data.readers import CorpusReader


_NETWORK = "Network"
EMBEDDED = "babel"
"""EMBEDDED is the name of the embedded language pair (docs/data.md), which is generated, not downloaded."""
_EMBEDDED_TITLE = "Babel, the synthetic pair qlo-qhi of `ziggurat demo` and small recipes: generated, not downloaded"


def fetch(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Corpora such as opus/Tatoeba/latest/de-en, recipes, or configurations; words with --list.",
            autocompletion=configurations,
        ),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List corpora with sizes and licences; fetch nothing.")] = False,
    output: Annotated[
        str, typer.Option("--output", "-o", "--out", metavar="FOLDER", help="Folder for corpora given by name.")
    ] = "data",
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    registry: Annotated[
        list[str] | None,
        typer.Option("--registry", metavar="FILE", help="Your own registry, added to the built-in one; repeat."),
    ] = None,
    cache: Annotated[
        str | None,
        typer.Option(
            "--cache",
            metavar="FOLDER",
            help="Folder for downloads; default: $ZIGGURAT_DOWNLOADS, or ~/.cache/ziggurat/downloads.",
        ),
    ] = None,
    mirror: Annotated[
        list[str] | None,
        typer.Option(
            "--mirror",
            metavar="PLACE",
            help="Folder or URL with files at HOST/PATH, tried before their servers; repeatable.",
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
        int, typer.Option("--retries", min=0, max=1000, help="Failures in a row allowed.", rich_help_panel=_NETWORK)
    ] = 5,
    json: Json = False,
) -> None:
    """Get public corpora and test sets by name, or all that a recipe names, and record their licences.

    Example: `ziggurat fetch multi30k-de-en`, `ziggurat fetch opus/Tatoeba/latest/de-en`, `ziggurat fetch --list de-en`
    """
    from ziggurat.corpora.fetch.downloads import Downloads, default_folder
    from ziggurat.corpora.fetch.indexes import Names
    from ziggurat.corpora.fetch.network import Network
    from ziggurat.corpora.fetch.registry import load_registry

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
    """Generate and write the embedded language pair, which small recipes train on; return its sets."""
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
            f"the data of `demo` comes with the package: `ziggurat demo` or `ziggurat fetch {EMBEDDED}` writes it"
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
            say(f"{task.target.name}: exists and was not fetched, so it is left alone")
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
    """Return the entries to list: an index's corpora, one corpus with its file sizes, or search results."""
    from ziggurat.corpora.fetch.indexes import IndexEntry, opus_listed, sacrebleu_listed
    from ziggurat.corpora.fetch.registry import any_pair, described

    if words and words[0] == "opus":
        pair = re.fullmatch(r"(\w+)-(\w+)", words[1]) if len(words) > 1 else None
        if pair is None:
            raise ConfigError("name two languages: `ziggurat fetch --list opus de-en`")
        every = opus_listed(downloads, pair[1], pair[2])
        return [one for one in every if all(word.casefold() in one.name.casefold() for word in words[2:])]
    own = IndexEntry(EMBEDDED, _EMBEDDED_TITLE, 0, 21_000, "ziggurat's own")
    listed, by_pair = list[IndexEntry](), bool(names.registry.pairs_among(words))
    if all(word.casefold() in f"{own.name} {own.title}".casefold() for word in words):
        listed.append(own)
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
            print("Any pair that the source offers; whether it has these languages is not known here:")
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


_MODEL_FILE = "aligner"  # in the folder of a job
_SHARD_PAIRS = 10_000  # per shard of a job
_TRAINING, _FORM = "Training", "Form of the alignments"


def align(
    source: Annotated[str, typer.Argument(help="Source text, one sentence per line; a glob names several files.")],
    target: Annotated[str, typer.Argument(help="Target text, aligned line by line.")],
    output: Annotated[str, typer.Option(*OUT, help="File, or - for standard output.")] = "-",
    symmetrise: Annotated[
        Symmetrisation,
        typer.Option(
            "--symmetrise",
            metavar="NAME",
            help="How the two directions are merged: grow-diag-final-and, grow-diag-final, grow-diag, intersection or "
            "union.",
            rich_help_panel=_FORM,
        ),
    ] = "grow-diag-final-and",
    words: Annotated[
        Literal["split", "blanks"] | None,
        typer.Option(
            "--words",
            help="`split`: words end at white space and punctuation. `blanks`: the text is already tokenised. Default: "
            "split, or as the `--input-model` was trained.",
            rich_help_panel=_FORM,
        ),
    ] = None,
    model1_iterations: Annotated[
        int | None,
        typer.Option("--model1-iterations", min=1, max=1000, help="Default: 5.", rich_help_panel=_TRAINING),
    ] = None,
    hmm_iterations: Annotated[
        int | None, typer.Option("--hmm-iterations", min=0, max=1000, help="Default: 5.", rich_help_panel=_TRAINING)
    ] = None,
    null: Annotated[
        float | None,
        typer.Option(
            "--null",
            min=1e-6,
            max=0.999,
            help="Probability that a word stands for no word of the other side. Default: 0.2.",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    pairs: Annotated[
        int | None,
        typer.Option(
            "--pairs",
            min=1,
            help="Maximum number of pairs to train on, evenly spread; memory grows with it. Default: 1,000,000.",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    input_model: Annotated[
        str | None,
        typer.Option("--input-model", help="Align with this trained model; do not train.", rich_help_panel=_TRAINING),
    ] = None,
    save_model: Annotated[
        str | None, typer.Option("--save-model", help="Write the trained model here.", rich_help_panel=_TRAINING)
    ] = None,
    json: Json = False,
) -> None:
    """Align the words of a parallel corpus: an HMM over IBM Model 1 in both directions, symmetrised.

    Example: `ziggurat align train.de train.en -o train.de-en.align`
    """
    from ziggurat.config.data import CorpusConfig
    from ziggurat.data.aligner import TrainingOptions, read_aligner
    from ziggurat.data.readers import CorpusReader

    training = {
        "--words": words,
        "--model1-iterations": model1_iterations,
        "--hmm-iterations": hmm_iterations,
        "--null": null,
        "--pairs": pairs,
        "--save-model": save_model,
    }
    if input_model is not None and (given := [name for name, value in training.items() if value is not None]):
        raise ConfigError(f"`{given[0]}` is for training, but `--input-model` skips training; leave out one of them")
    bulk = job_options(noun="pair")
    if json and output == "-":
        raise ConfigError("`--json` and the alignments both write to standard output; name a file with `-o`")
    if save_model == "-":
        save_model = "./-"  # here `-` is a file's name: a binary model makes no sense on standard output
    for path in (output, save_model):
        if path is not None:
            check_output(path)
            refuse_overwriting(path, source, target, input_model)
    started = time.perf_counter()
    reader = CorpusReader.of(CorpusConfig(source=source, target=target, format="text"), "align", ("source", "target"))
    usual = TrainingOptions()
    options = TrainingOptions(
        usual.model1_iterations if model1_iterations is None else model1_iterations,
        usual.hmm_iterations if hmm_iterations is None else hmm_iterations,
        usual.empty if null is None else null,
    )

    def trained() -> Aligner:
        if input_model is not None:
            return read_aligner(input_model)
        return _trained(reader, words or "split", options, pairs)

    def save(content: bytes) -> None:
        if save_model is not None:
            write_parts(save_model, [content])

    if bulk.folder is not None:
        settings = {**training, "--save-model": None, "--symmetrise": symmetrise}
        settings["--input-model"] = None if input_model is None else fingerprint(Path(input_model))
        found = _by_job(bulk, reader, trained, save, settings, symmetrise, output)
        if found is None:
            return
        counts = found
    else:
        made = trained()
        save(made.content())
        counts = _written((made.align(*block, symmetrise) for block in reader.blocks()), output)
    if json:
        print_json({"output": output, **counts, "seconds": time.perf_counter() - started})
        return
    say(
        f"{counted(counts['pairs'], 'pair')} with {counted(counts['links'], 'link')} in "
        f"{duration(time.perf_counter() - started)}; without any link: {counts['without_links']:,}"
    )


def _written(blocks: Iterator[list[set[Link]]], output: str) -> dict[str, int]:
    """Write the links of each pair; return the counts for the report."""
    from ziggurat.data.aligner import format_links

    counts = {"pairs": 0, "links": 0, "without_links": 0}
    with line_progress("aligning", None) as advance, output_stream(output) as out:
        for aligned in blocks:
            out.write("".join(format_links(links) + "\n" for links in aligned).encode())
            counts["pairs"] += len(aligned)
            counts["links"] += sum(map(len, aligned))
            counts["without_links"] += sum(not links for links in aligned)
            advance(len(aligned))
    return counts


def _by_job(
    bulk: JobOptions,
    reader: CorpusReader,
    trained: Callable[[], Aligner],
    save: Callable[[bytes], None],
    settings: dict[str, Any],
    how: Symmetrisation,
    output: str,
) -> dict[str, int] | None:
    """Align the corpus in bulk, all parts with one aligner; return the counts for the report, None for a part."""
    from ziggurat.corpora.jobs.job import made_once
    from ziggurat.corpora.jobs.tasks import Aligning, LineWithInputs

    def lines() -> Iterator[LineWithInputs]:
        return (LineWithInputs(s, (t,)) for block in reader.blocks() for s, t in zip(*block, strict=True))

    def train(plan: Plan) -> None:
        with made_once(plan, _MODEL_FILE) as path:
            if not path.exists():
                write_atomically(path, trained().content())
            save(path.read_bytes())

    task = Aligning(str(Path(bulk.folder or "") / _MODEL_FILE), how)
    inputs = [str(path) for part in reader.files for path in part]
    merged = line_job(
        bulk, "align", task, settings, inputs, lines, partial(write_parts, output), _SHARD_PAIRS, before=train
    )
    return None if merged is None else {"pairs": merged.lines, "links": 0, "without_links": 0, **merged.counts}


def _trained(
    reader: CorpusReader, rule: Literal["split", "blanks"], options: TrainingOptions, most: int | None
) -> Aligner:
    """Return an aligner trained on at most `most` pairs of the corpus, which are read into memory."""
    from ziggurat.data.aligner import Aligner
    from ziggurat.data.word_links import TRAINING_PAIRS, spread_pairs

    with line_progress("counting", None) as advance:
        total = 0
        for block in reader.blocks():
            total += len(block[0])
            advance(len(block[0]))

    def report(direction: str, iteration: int, likelihood: float) -> None:
        say(f"{direction}, iteration {iteration}: log-likelihood {likelihood:,.0f}")

    return Aligner.train(spread_pairs(reader.blocks(), total, most or TRAINING_PAIRS), rule, options, report)
