"""The verbs that examine runs and data: diagnose, report."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ziggurat.cli.output import (
    OUT,
    Json,
    check_input,
    check_one_stream,
    check_page,
    counted,
    figure_files,
    output_stream,
    pair_up,
    print_json,
    read_text,
    say,
)
from ziggurat.cli.tuning import check_coordinates
from ziggurat.model.run_folder import refuse_missing
from ziggurat.system.errors import ConfigError
from ziggurat.system.files import MANIFEST, is_store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ziggurat.inspect.report.figure import Figure
    from ziggurat.inspect.report.runs import ReportRun, Sentences
    from ziggurat.train.records import Record

_BEGUN = "begun.json"
"""_BEGUN is a file in the folder of every pipeline step."""


def diagnose(
    run: Annotated[
        Path,
        typer.Argument(
            help="Run (measures all its kept checkpoints) or model directory; with --coordinates a configuration."
        ),
    ],
    store: Annotated[
        Path | None, typer.Option("--store", help="Prepared data; default: data.store of the configuration.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            help="auto, cpu, cuda, cuda:1, ...; default: auto, or with --coordinates the configuration's.",
        ),
    ] = None,
    layers: Annotated[
        bool,
        typer.Option("--layers", help="Also measure what each layer is worth: losses with layers removed or swapped."),
    ] = False,
    translate: Annotated[
        int,
        typer.Option(
            "--translate", min=0, help="With --layers: translate this many dev sentences without the weakest layers."
        ),
    ] = 0,
    coordinates: Annotated[
        bool,
        typer.Option(
            "--coordinates",
            help="Check instead whether the first updates change small and large models of a configuration alike.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Measure the gradients, states and wiring of a trained model layer by layer, as training does.

    Records go to RUN/diagnostics/depth.jsonl, from which reports draw their figures (docs/report.md).

    Examples: `ziggurat diagnose runs/a --layers`, `ziggurat diagnose my.yaml --coordinates`
    """
    if coordinates:
        if layers or translate or store is not None:
            raise ConfigError("`--coordinates` is for a configuration: leave out `--layers`, `--translate`, `--store`")
        check_coordinates(str(run), device, json=json)
        return
    refuse_missing(run)
    if translate and not layers:
        raise ConfigError("`--translate N` uses the layers that `--layers` measures: give both")
    from ziggurat.inspect.diagnose import diagnose as diagnose_run
    from ziggurat.train.records import DEPTH_FILE

    records = diagnose_run(run, store=store, device=device or "auto", layers=layers, translate=translate, say=say)
    if json:
        print_json({"records": [record.as_dict() for record in records]})
    else:
        print("\n\n".join(map(_record_text, records)))
        print(f"\nall measures: {run / DEPTH_FILE}")


def _record_text(record: Record) -> str:
    """Return the part of a record that fits on a screen: the loss and each stack's gradients."""
    from ziggurat.inspect.diagnose import pruning_order

    values: dict[str, Any] = record.values
    lines = [
        f"update {record.update}: nll {values['nll']:.4f}, {values['source_dependence']:+.4f} with other sources",
        f"{'':<10}{'layers':>8}{'gradient of layer 1':>21}{'of the last':>13}{'r':>11}",
    ]
    for stack, layers in record.layers.items():
        norms = values["gradient_norm"][stack]
        lines.append(f"{stack:<10}{layers:>8}{norms[0]:>21.2e}{norms[-1]:>13.2e}{values['r'][stack]:>11.2e}")
    for stack, depth in values.get("effective_depth", {}).items():
        curve, bleu = values["pruning_curve"][stack], values.get("pruning_bleu", {}).get(stack)
        steps = ", ".join(f"{n}: {rise:+.2f}{f' ({bleu[n]:.1f})' if bleu else ''}" for n, rise in enumerate(curve))
        known = f"{depth:.0f}" if math.isfinite(depth) else "–"  # not finite for a model that has diverged
        lines.append(f"{stack}: effective depth {known}; loss{' (BLEU)' if bleu else ''} without n layers: {steps}")
        order = pruning_order([row[n] for n, row in enumerate(values["loss_without"][stack])])
        lines.append(f"  worth least, lowest first: {', '.join(f'{stack}.{n + 1}' for n in order)}")
    return "\n".join(lines)


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of runs, in the order of their colours; more than 8: only against depth. Or one store, or a "
            "pipeline's folder or step."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            *OUT,
            help="HTML file, or - for standard output; default: RUN/report.html or report.html; with --json none.",
        ),
    ] = None,
    translations: Annotated[
        int | None, typer.Option("--translations", min=0, help="Sentences of the dev set to translate [200]; 0: none.")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--source",
            help="Translate this text instead of the dev set; with --reference. For a store: look for it in the pairs.",
        ),
    ] = None,
    reference: Annotated[str | None, typer.Option("--reference", help="Its translation, line by line.")] = None,
    figures: Annotated[
        Path | None,
        typer.Option("--figures", metavar="FOLDER", help="Also write the figures and their numbers to this folder."),
    ] = None,
    format: Annotated[
        str, typer.Option("--format", help="Formats of these files: png, svg, pdf; separated by commas.")
    ] = "png,svg,pdf",
    force: Annotated[bool, typer.Option("--force", help="Replace the page of another report.")] = False,
    json: Json = False,
) -> None:
    """Write a report comparing runs, or on prepared data, as one HTML file that needs no network.

    For runs it shows whether each trained, learning curves, throughput, measures over depth, scores with their
    signatures, translations, and the settings in which they differ. For a store it shows what was dropped and why, with
    examples, lengths, scripts and languages, and test sentences in training pairs. A pipeline writes its own report:
    for its folder, and for steps without a run or a store, this verb prints what is there and where.

    Examples: `ziggurat report runs/a runs/b --out report.html`, `ziggurat report stores/de-en`
    """
    for run in runs:
        refuse_missing(run, "run or store")
    runs = [_described(run) for run in runs]
    if len(runs) == 1 and (found := _pipeline_of(runs[0])) is not None:
        if out is not None or translations is not None or source is not None or figures is not None:
            raise ConfigError(f"{runs[0]}: a pipeline writes its own report; leave out the other options but `--json`")
        _tell_pipeline(*found, json=json)
        return
    of_data = any(map(_is_store, runs))
    if of_data and (len(runs) > 1 or translations is not None):
        which = "one store alone" if len(runs) > 1 else "a store, which translates nothing: leave out `--translations`"
        raise ConfigError(f"a report is about runs, or about {which}")
    from ziggurat.inspect.report.drawing import FORMATS

    formats = [name.strip().lower() for name in format.split(",") if name.strip()]
    if unknown := [name for name in formats if name not in FORMATS]:
        raise ConfigError(f"`--format {unknown[0]}`: choose from {', '.join(FORMATS)}")
    if (source is None) != (reference is None):
        raise ConfigError("`--source` and `--reference` belong together")
    if source is not None and translations is not None:
        raise ConfigError(
            "`--translations N` is for the dev set, but `--source` is translated whole: leave out one of them"
        )
    check_one_stream(source, reference)
    for path in (source, reference):
        if path is not None:
            check_input(path)
    piped = out is not None and str(out) == "-"
    if piped and json:
        raise ConfigError("`--out -` and `--json` both write to standard output; name a file")
    target = out or (runs[0] / "report.html" if len(runs) == 1 and not of_data else Path("report.html"))
    written = not json or out is not None
    subject = "\n".join(sorted(os.path.relpath(run.resolve(), target.resolve().parent) for run in runs))
    if written:
        check_page(str(target), "--out", source, reference)
        if not force:
            _refuse_other_report(target, subject)
    if of_data:
        made = _report_on_store(runs[0], source, reference, subject)
    else:
        made = _report_on_runs(runs, translations, source, reference, subject)
    if written:
        with output_stream(str(target)) as file:
            file.write(made.page.encode())
    files = figure_files(made.figures, figures, formats) if figures is not None else []
    if files and (unlike := made.record.get("unlike")):
        say(f"warning: the runs in these figures differ: {'; '.join(unlike)}")
    if json:
        page = str(target) if written else None
        print_json({"report": page, "files": [str(path) for path in files], **made.record})
        return
    lines = made.lines + ([f"{counted(len(made.figures), 'figure')} in {figures}"] if figures else [])
    if piped:  # `-`: standard output holds the page
        say("\n".join(lines))
    else:
        print("\n".join([*lines, f"report: {target.resolve()}"]))


def _is_store(folder: Path) -> bool:
    """Return whether a folder is a store, even a damaged one."""
    return is_store(folder) or ((folder / MANIFEST).is_file() and any(folder.glob("*.arrow")))


def _described(folder: Path) -> Path:
    """Return the run or store that a pipeline step made in its folder, else the folder itself."""
    made = [folder / name for name in ("run", "store") if (folder / _BEGUN).is_file() and (folder / name).is_dir()]
    return made[0] if made else folder


def _pipeline_of(folder: Path) -> tuple[Path, str | None] | None:
    """Return the pipeline's folder and the step's name if `folder` belongs to a pipeline; None for other folders."""
    if (folder / _BEGUN).is_file():
        return folder.parent, folder.resolve().name
    return (folder, None) if any(folder.glob(f"*/{_BEGUN}")) else None


def _refuse_other_report(page: Path, subject: str) -> None:
    """Raise ConfigError if `page` reports on anything but `subject`, given relative to its folder."""
    if not page.is_file() or not page.stat().st_size:
        return
    from ziggurat.inspect.report.template import subject_mark

    if subject_mark(subject) not in page.read_text("utf-8", "replace"):
        raise ConfigError(f"{page}: holds another report; name another file with `--out`, or replace it with `--force`")


def _tell_pipeline(folder: Path, step: str | None, *, json: bool) -> None:
    """Print the readable results of all steps of a pipeline, or of one, and where its report is."""
    from ziggurat.corpora.pipeline.step import read_document

    def document(path: Path) -> dict[str, Any]:
        return read_document(path) or {}

    chosen = step or "*"
    corpora = dict(document(folder / "clean" / "report.json").get("corpora", {})) if step in (None, "clean") else {}
    for manifest in sorted(folder.glob(f"{chosen}/corpus/manifest.json")):
        corpora[manifest.parent.parent.name] = document(manifest)
    scores = document(folder / "evaluate" / "scores.json").get("tests", {}) if step in (None, "evaluate") else {}
    made = [str(path) for name in ("run", "store") for path in sorted(folder.glob(f"{chosen}/{name}"))]
    pages = [str(path) for path in sorted(folder.glob(f"{chosen}/*.html"))]
    begun = [path.parent for path in sorted(folder.glob(f"{chosen}/{_BEGUN}"))]
    unfinished = [each.name for each in begun if not (each / MANIFEST).is_file()]
    report = folder / "report" / "report.html"
    pages += [str(report)] if report.is_file() and str(report) not in pages else []
    counts = {
        name: {key: corpus[key] for key in ("read", "kept", "dropped")}
        for name, corpus in corpora.items()
        if {"read", "kept", "dropped"} <= corpus.keys()
    }
    if json:
        print_json(
            {
                "pipeline": str(folder),
                "step": step,
                "corpora": counts,
                "scores": scores,
                "unfinished": unfinished,
                "reports": made,
                "pages": pages,
            }
        )
        return
    for name, corpus in counts.items():
        reasons = "".join(f", {reason} {count:,}" for reason, count in corpus["dropped"].items())
        print(f"{name}: {corpus['kept']:,} of {corpus['read']:,} kept{reasons}")
    for test, by_system in scores.items():
        for system, found in by_system.items():
            shown = "  ".join(f"{score['name']} {score['value']:.1f}" for score in found)
            print(f"{test}, {system}: {shown}")
    if step in (None, "report"):
        for verdict in document(folder / "report" / "report.json").get("verdicts", []):
            print(verdict["said"])
    if unfinished:
        print(f"started but not finished: {', '.join(unfinished)}")
    for path in made:
        print(f"more on {path}: ziggurat report {path}")
    for page in pages:
        print(f"report: {Path(page).resolve()}")
    if not report.is_file():
        say(f"{folder}: the report on all steps is not there yet; `ziggurat pipeline FILE` writes it at the end")


class _Made(NamedTuple):
    """A report: its page, figures, content for JSON, and lines to print."""

    page: str
    figures: Sequence[Figure]
    record: dict[str, Any]
    lines: list[str]


def _report_on_runs(
    runs: Sequence[Path], translations: int | None, source: str | None, reference: str | None, subject: str
) -> _Made:
    from ziggurat.inspect.report.content import as_record, gather
    from ziggurat.inspect.report.page import differences, page
    from ziggurat.inspect.report.runs import MAX_DRAWN, read_runs

    if len(runs) > MAX_DRAWN and (translations or source is not None):
        raise ConfigError(
            f"a report compares translations of at most {MAX_DRAWN} runs, not {len(runs)}; leave out `--translations` "
            "and `--source`, and it shows the runs against depth"
        )
    read = read_runs(runs)
    count = (200 if len(runs) <= MAX_DRAWN else 0) if translations is None else translations
    content = gather(read, _sentences(read, count, source, reference), say)
    lines = [f"{run.name}: {standing.verdict}" for run, standing in zip(content.runs, content.standings, strict=True)]
    record = {**as_record(content), "unlike": differences(content)}
    return _Made(page(content, subject=subject), content.figures, record, lines)


def _report_on_store(path: Path, source: str | None, reference: str | None, subject: str) -> _Made:
    from ziggurat.data.corpus import Store
    from ziggurat.inspect.report.data_page import data_page, data_record, gather_data

    test_set = None
    if source is not None and reference is not None:
        test_set = (source, read_text(source), read_text(reference))
        pair_up((source, test_set[1]), (reference, test_set[2]))
    content = gather_data(Store.open(path), test_set, say)
    kept, read = (sum(getattr(corpus, count) for corpus in content.training) for count in ("kept", "read"))
    for notice in (*content.contamination, *content.notices):
        say(f"warning: {notice}")
    lines = [f"{path}: {kept:,} of {counted(read, 'training pair')} kept"]
    return _Made(data_page(content, subject=subject), content.figures, data_record(content), lines)


def _sentences(
    runs: Sequence[ReportRun], count: int, source: str | None, reference: str | None
) -> Callable[[], Sentences] | None:
    """Return the function that reads the sentences to translate; None if none are requested."""
    from ziggurat.inspect.report.runs import Sentences, dev_sentences

    if source is not None and reference is not None:
        sources, references = read_text(source), read_text(reference)
        pair_up((source, sources), (reference, references))
        name = f"{counted(len(sources), 'sentence')} of {source}"
        language = runs[0].experiment.data.target_language
        return lambda: Sentences(name, sources, references, [None] * len(sources), language)
    return (lambda: dev_sentences(runs, count)) if count else None
