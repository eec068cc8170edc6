"""The verb that shows what runs did: report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ziggurat.cli.output import OUT, check_input, check_output, console, counted, output_stream, print_json
from ziggurat.cli.preparation import Json
from ziggurat.cli.translation import pair_up, read_text
from ziggurat.data.files import write_atomically
from ziggurat.errors import ConfigError
from ziggurat.models.run_folder import refuse_missing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ziggurat.report.figure import Figure
    from ziggurat.report.runs import ReportRun
    from ziggurat.report.translations import Sentences

__all__ = ["report"]


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, at most 8; the first has the first colour.")],
    out: Annotated[
        Path | None,
        typer.Option(
            *OUT, help="HTML file, or - for standard output; default: RUN/report.html, of several report.html."
        ),
    ] = None,
    translations: Annotated[
        int, typer.Option("--translations", min=0, help="Sentences of the dev set that are translated; 0: none.")
    ] = 200,
    source: Annotated[
        str | None, typer.Option("--source", help="Translate this text instead of the dev set; with --reference.")
    ] = None,
    reference: Annotated[str | None, typer.Option("--reference", help="Its translation, line by line.")] = None,
    figures: Annotated[
        Path | None,
        typer.Option("--figures", metavar="FOLDER", help="Also write figures and their numbers here."),
    ] = None,
    format: Annotated[
        str, typer.Option("--format", help="Of these files: png, svg, pdf; separated by commas.")
    ] = "png,svg,pdf",
    json: Json = False,
) -> None:
    """Write what runs did, side by side, as one HTML file that needs no network.

    It shows whether each run trained, learning curves, throughput, what was measured over depth, scores with their
    signatures, translations, and in which settings the runs differ.

    Example: `ziggurat report runs/a runs/b --out report.html`
    """
    for run in runs:
        refuse_missing(run, "run")
    from ziggurat.report.content import as_record, gather
    from ziggurat.report.page import page
    from ziggurat.report.paper import FORMATS
    from ziggurat.report.runs import read_runs

    formats = [name.strip().lower() for name in format.split(",") if name.strip()]
    if unknown := [name for name in formats if name not in FORMATS]:
        raise ConfigError(f"`--format {unknown[0]}`: choose of {', '.join(FORMATS)}")
    if (source is None) != (reference is None):
        raise ConfigError("`--source` and `--reference` belong together")
    for path in (source, reference):
        if path is not None:
            check_input(path)
    piped = out is not None and str(out) == "-"
    if piped and json:
        raise ConfigError("`--out -` and `--json` both write to standard output; name a file")
    read = read_runs(runs)
    target = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    check_output(str(target))
    shown = console()

    def say(text: str) -> None:
        shown.print(text, markup=False, highlight=False, soft_wrap=True)

    content = gather(read, _sentences(read, translations, source, reference), say)
    with output_stream(str(target)) as file:
        file.write(page(content).encode())
    written = _figure_files(content.figures, figures, formats) if figures is not None else []
    if json:
        print_json({"report": str(target), "files": [str(path) for path in written], **as_record(content)})
        return
    told = [f"{run.name}: {standing.verdict}" for run, standing in zip(content.runs, content.standings, strict=True)]
    if figures:
        told.append(f"{counted(len(content.figures), 'figure')} in {figures}")
    if piped:  # standard output is the page's
        say("\n".join(told))
    else:
        print("\n".join([*told, f"report: {target.resolve()}"]))


def _figure_files(figures: Sequence[Figure], folder: Path, formats: Sequence[str]) -> list[Path]:
    """Write every figure in each of the formats, and its numbers as CSV; return the files."""
    from ziggurat.report.figure import numbers
    from ziggurat.report.paper import save

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for figure in figures:
        table = folder / f"{figure.key}.csv"
        write_atomically(table, numbers(figure).encode())
        written += [*save(figure, folder, formats), table]
    return written


def _sentences(
    runs: Sequence[ReportRun], count: int, source: str | None, reference: str | None
) -> Callable[[], Sentences] | None:
    """Return what gives the sentences to translate; None: none are to be."""
    from ziggurat.report.translations import Sentences, dev_sentences

    if source is not None and reference is not None:
        sources, references = read_text(source), read_text(reference)
        pair_up((source, sources), (reference, references))
        name = f"{counted(len(sources), 'sentence')} of {source}"
        language = runs[0].experiment.data.target_language
        return lambda: Sentences(name, sources, references, [None] * len(sources), language)
    return (lambda: dev_sentences(runs, count)) if count else None
