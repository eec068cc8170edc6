"""Whole documents for `translate --document`: checked before a model is loaded, then translated one by one."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from ziggurat.cli.engine import ModelOptions, model_languages, notices_text, open_engine, warnings_shown
from ziggurat.cli.output import (
    check_input,
    check_output,
    counted,
    line_progress,
    output_stream,
    refuse_overwriting,
    say,
)
from ziggurat.system.errors import ConfigError
from ziggurat.system.small_files import read_bounded
from ziggurat.system.terminal import duration

if TYPE_CHECKING:
    from ziggurat.serve.text.sentences import Result, SentenceRequests, SentenceTranslation
    from ziggurat.translate.interface import TextTranslator
    from ziggurat.translate.options import TranslateOptions


class DocumentForm(NamedTuple):
    """Options for documents: patterns to protect, keys to leave, and whether results are also printed as JSON."""

    protect: tuple[str, ...]
    leave: tuple[str, ...]
    json: bool


def translate_documents(
    models: Sequence[str],
    opening: ModelOptions,
    paths: Sequence[str],
    output: str,
    asked: TranslateOptions,
    terminology: str | None,
    form: DocumentForm,
) -> None:
    """Translate documents; `output` is a file, or a folder where they keep their names.

    If there is no such folder, it is created for several documents, or for one if the name ends in `/`. `terminology`
    is the file from which the terms in `asked` were read; no output may overwrite it. Raises ConfigError for options
    that do not fit the documents, DataError for a document that cannot be read.
    """
    from ziggurat.serve.text.documents.kinds import document, document_kind
    from ziggurat.serve.text.files import Settings
    from ziggurat.serve.text.sentences import Options
    from ziggurat.serve.text.splitting import Protection, sentencex_splitter

    # Every problem with the files is found before the model is loaded.
    places = _places(paths, output, terminology)
    source, target = model_languages(models[0], opening)
    split = sentencex_splitter(source)

    def settings(*, aligned: bool) -> Settings:  # one per document, since patterns have a time limit per document
        options = Options(split, aligned, protect=Protection(form.protect) if form.protect else None)
        return Settings(options, source, target, leave=form.leave)

    if form.leave and not any(document_kind(path).keyed for path in paths):
        raise ConfigError("`--leave` is for documents whose texts have keys, such as .json, .po or .xml")
    contents = {path: read_bounded(Path(path), settings(aligned=True).limits.size) for path in paths}
    for path in paths:
        next(document(contents[path], path, settings(aligned=True)), None)
    with warnings_shown(), open_engine(models, opening, beside_lines=asked.terms is not None) as engine:
        translator = cast("TextTranslator", engine)  # always in this process here
        from ziggurat.translate.interface import tells_alignments

        aligned = tells_alignments(translator)
        if not aligned:
            say("no alignments from this model: text with tags inside sentences is translated segment by segment")
        for path in paths:
            began = time.perf_counter()
            work = document(contents[path], path, settings(aligned=aligned))
            outcome, sentences = _translated(translator, work, Path(path).name, replace(asked, alignments=aligned))
            if _is_folder(paths, output):  # created this late so that an earlier failure leaves none behind
                Path(output).mkdir(exist_ok=True)
            with output_stream(places[path]) as out:
                out.write(outcome.value)
            took, records = time.perf_counter() - began, outcome.notices.records()
            if form.json:
                record = {"document": path, "output": places[path], "sentences": sentences}
                print(json.dumps({**record, "seconds": round(took, 3), "notices": records}), flush=True)
            told = "".join(f", {each['text']}" for each in records)
            told = f"{duration(took)}{told}{notices_text(translator.notices)}"
            say(f"{places[path]}: {counted(sentences, 'sentence')} in {told}")
            translator.notices.clear()


def _places(paths: Sequence[str], output: str, terminology: str | None) -> dict[str, str]:
    """Return where each document is written. Raises ConfigError for names that clash or are for other documents."""
    from ziggurat.serve.text.documents.kinds import KINDS, document_kind

    for path in paths:
        if path == "-":
            raise ConfigError("`--document -`: a document's kind is recognised by its name; give a file")
        check_input(path)
    if output == "-":
        raise ConfigError("`--document` needs `--output`: a file, or a folder for several documents")
    into = _is_folder(paths, output)
    if into and Path(output).exists() and not Path(output).is_dir():
        raise ConfigError(f"{output}: is not a folder; several documents need one")
    places = {path: str(Path(output) / Path(path).name) if into else output for path in paths}
    if len(set(places.values())) < len(places):
        raise ConfigError("two of the documents have the same name; write them to different folders")
    for place in places.values():
        refuse_overwriting(place, *paths, *([] if terminology is None else [terminology]))
        check_output(place if not into or Path(output).is_dir() else str(Path(output)))
    for path, place in places.items():
        named, kind = [each for each in KINDS if place.lower().endswith(each.endings)], document_kind(path)
        if kind not in named:
            other = f"is for {named[0].name}, and " if named else ""
            raise ConfigError(f"{place}: {other}{path} stays {kind.name}; end it in {kind.endings[0]}")
    return places


def _is_folder(paths: Sequence[str], output: str) -> bool:
    return len(paths) > 1 or output.endswith("/") or Path(output).is_dir()


def _translated(
    translator: TextTranslator, work: SentenceRequests[Result[bytes]], name: str, asked: TranslateOptions
) -> tuple[Result[bytes], int]:
    """Return a translated document, and the number of its sentences; the progress bar shows its `name`."""
    from ziggurat.serve.text.alignment import control_pieces, rendered
    from ziggurat.serve.text.sentences import run

    control = control_pieces(translator.source_tokenizer)
    count = 0

    def translate(sentences: list[str]) -> list[SentenceTranslation]:
        nonlocal count
        count += len(sentences)
        with line_progress(name, len(sentences)) as advance:
            translator.on_finished = advance
            lines = translator.translate_stream(sentences, asked)
            return [rendered(translation, control) for translation in lines]

    return run(work, translate), count
