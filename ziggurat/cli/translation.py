"""The verb that translates lines and documents: translate."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, cast

import typer

from ziggurat.cli.engine import (
    HINT_LINES,
    ModelOptions,
    model_languages,
    notices_text,
    open_engine,
    say_hint,
    warnings_shown,
    worker_count,
)
from ziggurat.cli.jobs import (
    JobFolder,
    JobOptions,
    MergeOnly,
    RayAddress,
    ShardPart,
    model_choice,
    translation_job,
)
from ziggurat.cli.output import (
    HOW,
    OUT,
    WHAT,
    DecodingOverrides,
    Device,
    Engine,
    Ensemble,
    Model,
    Tag,
    Threads,
    Which,
    WithoutLayers,
    check_input,
    check_one_stream,
    check_output,
    counted,
    decoding_settings,
    input_stream,
    line_count,
    line_progress,
    output_stream,
    refuse_overwriting,
    say,
    write_parts,
)
from ziggurat.system.errors import ConfigError
from ziggurat.system.small_files import read_bounded
from ziggurat.system.terminal import duration

if TYPE_CHECKING:
    from ziggurat.serve.text.sentences import SentenceTranslation
    from ziggurat.translate.options import StreamTranslator, TextTranslator, TranslateOptions
    from ziggurat.translate.results import Translation


def _refuse(given: Mapping[str, bool], reason: str) -> None:
    """Raise ConfigError with the reason for an option of which `given` tells that it was given."""
    for option, is_given in given.items():
        if is_given:
            raise ConfigError(f"`{option}` {reason}")


class DocumentForm(NamedTuple):
    """Options of documents: patterns to protect, keys to leave, and whether results are also printed as JSON."""

    protect: tuple[str, ...]
    leave: tuple[str, ...]
    json: bool


def _translate_documents(
    models: Sequence[str],
    opening: ModelOptions,
    paths: Sequence[str],
    output: str,
    tag: str | None,
    terminology: str | None,
    form: DocumentForm,
) -> None:
    """Translate documents; `output` is a file, or a folder in which they keep their names.

    A folder is made where several documents, or one and a name that ends in `/`, find none.
    """
    from ziggurat.serve.text.documents.kinds import document, document_kind
    from ziggurat.serve.text.sentences import Options, run
    from ziggurat.serve.text.settings import Settings
    from ziggurat.serve.text.splitting import Protection, sentencex_splitter

    # Everything that can be wrong with the files is found before the model is loaded.
    places, asked = _places(paths, output, terminology), _asked(tag, terminology)
    source, target = model_languages(models[0], opening)
    split = sentencex_splitter(source)

    def settings(*, aligned: bool) -> Settings:  # for each document, of which the patterns have their time
        options = Options(split, aligned, protect=Protection(form.protect) if form.protect else None)
        return Settings(options, source, target, leave=form.leave)

    if form.leave and not any(document_kind(path).keyed for path in paths):
        raise ConfigError("`--leave` is for documents whose texts have keys, such as .json, .po or .xml")
    contents = {path: read_bounded(Path(path), settings(aligned=True).limits.size) for path in paths}
    for path in paths:
        document_kind(path)
        next(document(contents[path], path, settings(aligned=True)), None)
    with warnings_shown(), open_engine(models, opening, beside_lines=asked.terms is not None) as engine:
        translator = cast("TextTranslator", engine)  # it is in this process
        from ziggurat.translate.options import tells_alignments

        aligned = tells_alignments(translator)
        if not aligned:
            say("no alignments from this model: text with tags inside of sentences is translated segment by segment")
        for path in paths:
            began, sentences = time.perf_counter(), Counter[str]()

            def translate(
                wanted: list[str], sentences: Counter[str] = sentences, path: str = path
            ) -> list[SentenceTranslation]:
                sentences["asked"] += len(wanted)
                return _rendered(translator, wanted, Path(path).name, replace(asked, alignments=aligned))

            outcome = run(document(contents[path], path, settings(aligned=aligned)), translate)
            if _is_folder(paths, output):  # made now, so that whatever went wrong before leaves none behind
                Path(output).mkdir(exist_ok=True)
            with output_stream(places[path]) as out:
                out.write(outcome.value)
            took, records = time.perf_counter() - began, outcome.notices.records()
            if form.json:
                record = {"document": path, "output": places[path], "sentences": sentences["asked"]}
                print(json.dumps({**record, "seconds": round(took, 3), "notices": records}), flush=True)
            told = "".join(f", {each['text']}" for each in records)
            told = f"{duration(took)}{told}{notices_text(translator.notices)}"
            say(f"{places[path]}: {counted(sentences['asked'], 'sentence')} in {told}")
            translator.notices.clear()


def _places(paths: Sequence[str], output: str, terminology: str | None) -> dict[str, str]:
    """Return where each document is written. Raises ConfigError for names that would meet."""
    for path in paths:
        if path == "-":
            raise ConfigError("`--document -`: a document's kind is known from its name; give a file")
        check_input(path)
    if output == "-":
        raise ConfigError("`--document` needs `--output`: a file, or a folder for several documents")
    into = _is_folder(paths, output)
    if into and Path(output).exists() and not Path(output).is_dir():
        raise ConfigError(f"{output}: is not a folder, where documents would keep their names")
    places = {path: str(Path(output) / Path(path).name) if into else output for path in paths}
    if len(set(places.values())) < len(places):
        raise ConfigError("two of the documents have the same name; write them to different folders")
    for place in places.values():
        refuse_overwriting(place, *paths, *([] if terminology is None else [terminology]))
        check_output(place if not into or Path(output).is_dir() else str(Path(output)))
    return places


def _is_folder(paths: Sequence[str], output: str) -> bool:
    return len(paths) > 1 or output.endswith("/") or Path(output).is_dir()


def _rendered(
    translator: TextTranslator, sentences: Sequence[str], name: str, asked: TranslateOptions
) -> list[SentenceTranslation]:
    from ziggurat.serve.text.alignment import control_pieces, rendered

    control = control_pieces(translator.source_tokenizer)
    with line_progress(name, len(sentences)) as advance:
        translator.on_finished = advance
        lines = translator.translate_stream(sentences, asked)
        return [rendered(translation, control) for translation in lines]


_FORM = "Form of the output"


def translate(
    model: Model,
    overrides: DecodingOverrides = None,
    input: Annotated[str, typer.Option("--input", "-i", help="Text file, or - for standard input.")] = "-",
    output: Annotated[str, typer.Option(*OUT, help="File, or - for standard output.")] = "-",
    document: Annotated[
        list[str] | None,
        typer.Option(
            "--document",
            metavar="FILE",
            help="Word, OpenDocument, PowerPoint, EPUB, HTML, subtitles, XLIFF, ...: translated whole, by its name's "
            "ending; repeat for more, with a folder as --output.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    protect: Annotated[
        list[str] | None,
        typer.Option(
            "--protect",
            metavar="REGEX",
            help="With --document: what this pattern matches comes through unchanged; repeat for more.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    leave: Annotated[
        list[str] | None,
        typer.Option(
            "--leave",
            metavar="KEY",
            help="With --document: text of this key (JSON, Android, gettext, XLIFF) stays; `*` for any characters.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="JSON lines: text, tokens, scores, n-best; of each document its notices.",
            rich_help_panel=_FORM,
        ),
    ] = False,
    window: Annotated[
        int | None,
        typer.Option(
            "--window",
            min=1,
            help="Lines to read before translating; 1 answers each line at once.",
            rich_help_panel=HOW,
        ),
    ] = None,
    tag: Tag = None,
    prefix: Annotated[
        str | None,
        typer.Option(
            "--prefix",
            help="File with the beginning of each translation, line by line; may be blank.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    constraints: Annotated[
        str | None,
        typer.Option(
            "--constraints",
            help="File with the phrases that each translation must contain, separated by tabs.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    terminology: Annotated[
        str | None,
        typer.Option(
            "--terminology",
            help="File of lines `source term TAB target term`, applied where the source term occurs.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    quality: Annotated[
        bool,
        typer.Option(
            "--quality", help="Write `translation ||| mean log-probability per token`.", rich_help_panel=_FORM
        ),
    ] = False,
    ensemble: Ensemble = None,
    which: Which = None,
    without_layers: WithoutLayers = None,
    device: Device = "auto",
    threads: Threads = None,
    workers: Annotated[
        str | None,
        typer.Option(
            "--workers",
            metavar="N",
            help="Parallel processes, each with the model and its share of the threads; auto: as is fastest here. "
            "Default: 1; with --job one per CPU core.",
            rich_help_panel=HOW,
        ),
    ] = None,
    engine: Engine = "auto",
    source_model: Annotated[
        Path | None,
        typer.Option(
            "--source-model",
            metavar="FILE",
            help="SentencePiece model of the source, for a folder of CTranslate2 by another toolkit's converter.",
            rich_help_panel=HOW,
        ),
    ] = None,
    target_model: Annotated[
        Path | None,
        typer.Option(
            "--target-model",
            metavar="FILE",
            help="The same for the target; default: that of the source.",
            rich_help_panel=HOW,
        ),
    ] = None,
    job: JobFolder = None,
    shard: ShardPart = None,
    merge: MergeOnly = False,
    ray: RayAddress = None,
) -> None:
    """Translate line by line: one output line for each input line, in order; or whole documents with `--document`.

    With `n_best=N` the text output is `line ||| translation ||| score`, up to N lines for each input line.

    Example: `ziggurat translate runs/a < test.de > output.en`
    """
    from ziggurat.data.lines import refuse_records
    from ziggurat.translate.results import WINDOW_LINES, read_lines

    # (1) Options and files are checked before the model is loaded, which takes seconds.
    opening = ModelOptions(
        which,
        device,
        threads,
        decoding_settings(overrides, "--document" if document else "--input"),
        without_layers,
        engine,
        (source_model, target_model),
    )
    if document:
        by_line = {"--input": input != "-", "--window": window is not None, "--quality": quality}
        by_line |= {"--prefix": prefix is not None, "--constraints": constraints is not None}
        bulk = {"--job": job is not None, "--shard": shard is not None, "--merge": merge, "--ray": ray is not None}
        lines_only = {**by_line, "--workers": workers is not None, **bulk}
        _refuse(lines_only, "is for lines of text; with `--document` leave it out")
        form_of = DocumentForm(tuple(protect or ()), tuple(leave or ()), as_json)
        _translate_documents([model, *(ensemble or [])], opening, document, output, tag, terminology, form_of)
        return
    _refuse({"--protect": bool(protect), "--leave": bool(leave)}, "goes with `--document`")
    beside = [path for path in (prefix, constraints, terminology) if path is not None]
    check_one_stream(input, *beside)
    refuse_records(Path(input), "--input")
    refuse_overwriting(output, input, *beside)
    for path in (input, *beside):
        check_input(path)
    check_output(output)
    models, total = [model, *(ensemble or [])], line_count(input)
    asked = None if workers is None or job is None else worker_count(workers, models, opening, total)
    options = JobOptions(job, shard, merge, ray, asked, threads, device)
    if job is not None:
        if any(opening.segmenters):
            raise ConfigError("`--source-model` and `--target-model` do not go with `--job`; translate without it")
        inputs = {"lines": input, "prefixes": prefix, "constraints": constraints, "terminology": terminology}
        shown: Literal["json", "quality", "text"] = "text"
        if as_json or quality:
            shown = "json" if as_json else "quality"
        size = window or WINDOW_LINES
        wanted, take = _asked(tag, terminology, scores=as_json), partial(write_parts, output)
        with warnings_shown():
            chosen = model_choice(models, opening).identified()
            merged = translation_job(
                options, "translate", chosen, inputs, take, form=shown, asked=wanted, shard_lines=size
            )
        if merged is not None:
            say(f"{counted(merged.lines, 'line')}{notices_text(merged.counts)}")
        return
    interactive = input == "-" and sys.stdin.isatty()
    lines_ahead = window or (1 if interactive else WINDOW_LINES)
    processes = worker_count(workers or "1", models, opening, None if lines_ahead == 1 else total)
    if workers == "auto" and processes > 1 and window is None and total is not None:
        # Several windows for each worker: one that is given the last window would keep the others waiting.
        lines_ahead = min(WINDOW_LINES, -(-total // (4 * processes)))
    if processes > 1 and lines_ahead == 1:
        raise ConfigError("several `--workers` read ahead; answering each line before the next is read takes one")
    # (2) Files beside the lines are opened; a model is loaded.
    wanted, columns = _asked(tag, terminology, scores=as_json), _columns(prefix, constraints)
    beside_lines = bool(columns) or wanted.terms is not None
    with (
        warnings_shown(),
        open_engine(models, opening, workers=processes, beside_lines=beside_lines, lines=total) as translator,
    ):
        n_best = translator.decoding.n_best
        if translator.decoding.alignments and not as_json:
            say("warning: `alignments=true` shows only in the results of `--json`; this text has none")
        if interactive:
            say("One sentence a line; Ctrl-D ends.")
        # (3) Translations are written while later lines are still being read.
        began = time.perf_counter()
        lines = read_lines(*input_stream(input))
        translations = translator.translate_stream(lines, wanted, window=lines_ahead, **columns)

        def form(translation: Translation, number: int) -> str:
            return translation.to_json() if as_json else translation.to_text(number, n_best, quality=quality)

        # With a window of 1 somebody waits for each line before writing the next.
        flush = interactive or window == 1
        count = _write(translator, translations, form, output, total=total, flush=flush, hint=not interactive)
        seconds = time.perf_counter() - began
        if not interactive:
            rate = f"{count / seconds:,.1f} lines/s" if seconds > 0 else ""
            say(f"{counted(count, 'line')} in {duration(seconds)} ({rate}){notices_text(translator.notices)}")


def _asked(tag: str | None, terminology: str | None, *, scores: bool = False) -> TranslateOptions:
    """Return what is asked of all translations; the path of a terminology may be `-`."""
    from ziggurat.translate.options import TranslateOptions
    from ziggurat.translate.results import read_lines
    from ziggurat.translate.terminology import Terms, read_terminology

    terms = None
    if terminology is not None:
        stream, name = input_stream(terminology)
        terms = Terms.of(read_terminology(read_lines(stream, name), name))
    return TranslateOptions(tag=tag, terms=terms, scores=scores)


def _columns(prefix: str | None, constraints: str | None) -> dict[str, Any]:
    """Return the files with a line for each line, as arguments of `translate_stream`; a path may be `-`."""
    from ziggurat.translate.results import read_lines
    from ziggurat.translate.terminology import read_constraints

    columns: dict[str, Any] = {}
    if prefix is not None:
        columns["prefixes"] = read_lines(*input_stream(prefix))
    if constraints is not None:
        columns["constraints"] = read_constraints(read_lines(*input_stream(constraints)))
    return columns


def _write(
    translator: StreamTranslator,
    translations: Iterable[Translation],
    form: Callable[[Translation, int], str],
    output: str,
    *,
    total: int | None,
    flush: bool,
    hint: bool,
) -> int:
    """Write translations as they come, in `form`, under a progress bar over `total` lines; return their number.

    `hint`: print a hint on speed where the text turns out to be long; where `total` is known it was printed before.
    """
    on_screen = output == "-" and sys.stdout.isatty()  # a bar would break up the translations
    number = 0
    with output_stream(output) as out, line_progress("translating", total, shown=not on_screen) as advance:
        translator.on_finished = advance
        for number, translation in enumerate(translations, start=1):
            out.write(form(translation, number).encode() + b"\n")
            if flush:
                out.flush()
            if hint and total is None and number == HINT_LINES:
                say_hint(translator)
    return number
