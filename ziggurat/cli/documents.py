"""`translate --document`: documents through the engine of the verb, each written whole or not at all."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ziggurat.cli.engine import ModelOptions, notices_text, open_engine, warnings_shown
from ziggurat.cli.output import (
    check_input,
    check_output,
    counted,
    line_progress,
    output_stream,
    refuse_overwriting,
    say,
)
from ziggurat.system.duration import duration
from ziggurat.system.errors import ConfigError
from ziggurat.system.small_files import read_bounded
from ziggurat.translate.engines import tells_alignments

if TYPE_CHECKING:
    from ziggurat.serve.text.work import Rendered, Sentence

_NOTICES = {
    "unaligned": "translated by segments for lack of an alignment",
    "protected_again": "translated again since something was missing",
    "in_segments": "paragraphs divided at their tags",
}


def refuse_for_documents(given: Mapping[str, bool]) -> None:
    """Raise ConfigError for options of lines of text; `given` tells of each whether it was given."""
    for option, is_given in given.items():
        if is_given:
            raise ConfigError(f"`{option}` is for lines of text; with `--document` leave it out")


def translate_documents(
    models: Sequence[str], opening: ModelOptions, paths: Sequence[str], output: str, **extras: Any
) -> None:
    """Translate documents; `output` is a file, or a folder in which they keep their names.

    A folder is made where several documents, or one and a name that ends in `/`, find none.

    `extras` are further arguments of the translator: `tag`, `terminology`.
    """
    from ziggurat.serve.text.documents.kinds import document, document_kind
    from ziggurat.serve.text.documents.settings import Settings
    from ziggurat.serve.text.sentences import Options
    from ziggurat.serve.text.splitting import sentencex_splitter
    from ziggurat.serve.text.work import run

    # Everything that can be wrong with the files is found before the model is loaded.
    places = _places(paths, output)
    source, target = _languages(models[0])
    split = sentencex_splitter(source)
    limits = Settings(Options(split)).limits
    contents = {path: read_bounded(Path(path), limits.size) for path in paths}
    for path in paths:
        document_kind(path)
        next(document(contents[path], path, Settings(Options(split), source, target)), None)
    with (
        warnings_shown(),
        open_engine(models, opening, beside_lines="terminology" in extras) as engine,
    ):
        translator: Any = engine
        aligned = tells_alignments(translator)
        if not aligned:
            say("no alignments from this model: text with tags inside of sentences is translated segment by segment")
        settings = Settings(Options(split, aligned), source, target)
        for path in paths:
            began, sentences = time.perf_counter(), Counter[str]()

            def translate(
                asked: list[Sentence], sentences: Counter[str] = sentences, path: str = path
            ) -> list[Rendered]:
                sentences["asked"] += len(asked)
                return _rendered(translator, asked, Path(path).name, aligned=aligned, extras=extras)

            outcome = run(document(contents[path], path, settings), translate)
            if _is_folder(paths, output):  # made now, so that whatever went wrong before leaves none behind
                Path(output).mkdir(exist_ok=True)
            with output_stream(places[path]) as out:
                out.write(outcome.value)
            told = "".join(f", {n:,} {_NOTICES[kind]}" for kind, n in sorted(outcome.notices.items()))
            told = f"{duration(time.perf_counter() - began)}{told}{notices_text(translator.notices)}"
            say(f"{places[path]}: {counted(sentences['asked'], 'sentence')} in {told}")
            translator.notices.clear()


def _places(paths: Sequence[str], output: str) -> dict[str, str]:
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
        refuse_overwriting(place, *paths)
        check_output(place if not into or Path(output).is_dir() else str(Path(output)))
    return places


def _is_folder(paths: Sequence[str], output: str) -> bool:
    """Return whether documents are written into the folder `output`, which may have to be made."""
    return len(paths) > 1 or output.endswith("/") or Path(output).is_dir()


def _languages(model: str) -> tuple[str, str]:
    """Return the source and target language of a model; empty where it does not say."""
    from ziggurat.config import load_experiment
    from ziggurat.model.run_folder import config_file

    config = config_file(Path(model))
    if not config.is_file():
        return "", ""
    data = load_experiment(config).data
    return data.source_language, data.target_language


def _rendered(
    translator: Any, asked: Sequence[Sentence], name: str, *, aligned: bool, extras: Mapping[str, Any]
) -> list[Rendered]:
    """Return the translations of sentences, under a progress bar."""
    from ziggurat.serve.text.alignment import control_pieces, rendered

    control = control_pieces(translator.source_tokenizer)
    options = {"alignments": True} if aligned else {}
    with line_progress(name, len(asked)) as advance:
        translator.on_finished = advance
        lines = translator.translate_stream([sentence.text for sentence in asked], **options, **extras)
        return [rendered(translation, control) for translation in lines]
