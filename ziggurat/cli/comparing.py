"""How `evaluate --compare` reads its systems, and translates with those that are models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ziggurat.cli.compared import text
from ziggurat.cli.engine import open_model
from ziggurat.cli.output import check_input, console, line_progress, output_stream, print_json
from ziggurat.cli.translated import notices
from ziggurat.cli.translation import pair_up, read_text
from ziggurat.data.resemblance import Trigrams, resembles_more
from ziggurat.errors import ConfigError, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ziggurat.decoding.translator import Translator
    from ziggurat.evaluation.comet import CometEnvironment
    from ziggurat.evaluation.metrics import TestSet

__all__ = ["CompareOptions", "check_test_set", "compare_systems", "parse_systems", "translated", "warn_of_sides"]

_LOOKED_AT = 2000  # lines that tell whether the output is in the right language


@dataclass(frozen=True)
class CompareOptions:
    """What `evaluate --compare` was asked for."""

    systems: Sequence[str]
    """Each `[NAME=]PATH[,PATH...]`."""
    source: str | None
    references: Sequence[str]
    """Paths."""
    test_set: TestSet
    """The references' lines, and how to score; its sources are not read yet."""
    metrics: Sequence[str]
    comet: CometEnvironment | None
    train_target: Sequence[str]
    output: str | None
    """Folder for the translations that models make."""


def compare_systems(
    asked: CompareOptions,
    *,
    which: str | None,
    device: str,
    threads: int | None,
    settings: dict[str, Any],
    json: bool,
) -> None:
    """Translate where a system is a model, compare, and print. The options are those of `translate`."""
    from ziggurat.evaluation.comparison import System, compare

    parsed = parse_systems(asked.systems)
    models = [path for _, paths in parsed for path in paths if Path(path).is_dir()]
    files, sources = _read(asked, [path for _, paths in parsed for path in paths if path not in models], models)
    if not models and (settings or asked.output):
        raise ConfigError("decoding settings and `--output` are for models; all systems are files of translations")
    language = asked.test_set.target_language
    needed = dict.fromkeys((*asked.metrics, "bleu", "chrf"))  # the tables of sentences take the latter two
    if language or not models:  # else the first model says which it is
        check_test_set(replace(asked.test_set, sources=sources), needed, asked.comet, tables=True)
    folder = _output_folder(asked.output)
    systems = []
    for name, paths in parsed:
        outputs, origins = [], []
        for number, path in enumerate(paths, start=1):
            if path in files:
                outputs.append(files[path])
                origins.append(path)
                continue
            assert sources is not None
            with notices():
                translator = open_model([path], which, device, threads, settings)
                if not language:
                    language = translator.target_language
                    asked = replace(asked, test_set=replace(asked.test_set, target_language=language))
                    check_test_set(replace(asked.test_set, sources=sources), needed, asked.comet, tables=True)
                kept = None if folder is None else str(folder / f"{name}.{number}.txt")
                outputs.append(translated(translator, sources, kept))
            origins.append(translator.origin)
        warn_of_sides(outputs[0], replace(asked.test_set, sources=sources), f"the output of {printable(name)}")
        systems.append(System(name, outputs, origins))
    comparison = compare(
        systems,
        asked.test_set.references,
        sources,
        _lines(asked.train_target) if asked.train_target else None,
        metrics=asked.metrics,
        target_language=language,
        tokenize=asked.test_set.tokenize,
        lowercase=asked.test_set.lowercase,
        comet=asked.comet,
        say=lambda said: console().print(said, markup=False, highlight=False, soft_wrap=True),
    )
    print_json(comparison.as_record()) if json else print(text(comparison))


def check_test_set(
    test_set: TestSet, metrics: Iterable[str], comet: CometEnvironment | None, *, tables: bool = False
) -> None:
    """Say how lines are split where that is out of the ordinary; `tables`: BLEU's words are needed whatever is asked.

    Raises ConfigError: a metric cannot be had. It is told before anything is translated.
    """
    from ziggurat.evaluation.scores import MissingTokenizerError

    how = test_set.splitting
    names = list(metrics)
    for metric in names:
        try:
            test_set.metric(metric, comet)
        except MissingTokenizerError as error:
            way = f"{error}. Or name another by `--bleu-tokenizer`, such as `char` (single characters)"
            raise ConfigError(way if tables else f"{way}, or leave BLEU out: `--metrics chrf,ter`") from None
    said = [how.bleu_notice if {"bleu", "meteor"} & set(names) else None, how.ter_notice if "ter" in names else None]
    for notice in filter(None, said):
        console().print(f"warning: {notice}", markup=False, highlight=False, soft_wrap=True)


def warn_of_sides(outputs: Sequence[str], test_set: TestSet, name: str = "the output") -> None:
    """Say on standard error where `outputs` are in the language of the source text rather than of the reference."""
    if test_set.sources is None:
        return
    source, reference = (Trigrams(lines[:_LOOKED_AT]) for lines in (test_set.sources, test_set.references[0]))
    if resembles_more(Trigrams(outputs[:_LOOKED_AT]), source, reference):
        console().print(
            f"warning: {name} looks like the source text, not like the reference: are `--source` and `--reference` "
            "swapped, or does the system copy its input?",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def _read(
    asked: CompareOptions, files: Sequence[str], models: Sequence[str]
) -> tuple[dict[str, list[str]], list[str] | None]:
    """Return the lines of each of `files`, and the source text if one is given.

    Raises DataError for what cannot be read or does not pair up, ConfigError when `models` lack a source text.
    """
    if models and asked.source is None:
        raise ConfigError(f"`--source FILE` is missing: what should {models[0]} translate?")
    for path in (*files, *asked.train_target):
        check_input(path)
    paired = list(zip(asked.references, asked.test_set.references, strict=True))
    sources = None
    if asked.source is not None:
        sources = read_text(asked.source)
        pair_up((asked.source, sources), *paired)
    lines = {path: read_text(path) for path in files}
    for path, of_file in lines.items():
        pair_up((path, of_file), *paired)
    return lines, sources


def parse_systems(given: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return the name and the paths of each `[NAME=]PATH[,PATH...]`; the default name is the first path's last part.

    A path that exists is taken as it is, whatever characters it has.

    Raises ConfigError for an empty path or name, a name that cannot be part of a file's name, or two equal ones.
    """
    systems: list[tuple[str, list[str]]] = []
    for system in given:
        named = "=" in system and not Path(system).exists()
        name, _, listed = system.partition("=") if named else ("", "", system)
        paths = [listed] if listed and Path(listed).exists() else listed.split(",")
        if not all(paths) or (named and not name):
            raise ConfigError(f"`--compare {printable(system, 4096)}`: expected [NAME=]PATH[,PATH...]")
        name = name or Path(paths[0]).resolve().name
        if "/" in name or name.startswith("."):
            raise ConfigError(f"`--compare`: {printable(repr(name))} cannot be a system's name; leave out `/`")
        if name in (other for other, _ in systems):
            raise ConfigError(
                f"`--compare`: two systems are called {printable(repr(name))}; tell them apart, NAME=PATH"
            )
        systems.append((name, paths))
    return systems


def translated(translator: Translator, sources: list[str], output: str | None) -> list[str]:
    """Return the translations of `sources`, written to the file `output` too if there is one."""
    with line_progress("translating", len(sources)) as advance:
        translator.told = advance
        hypotheses = [translation.text for translation in translator.translate(sources)]
    if output is not None:
        with output_stream(output) as out:
            out.write("".join(line + "\n" for line in hypotheses).encode())
    return hypotheses


def _output_folder(path: str | None) -> Path | None:
    """Return the folder for translations, made if it is not there. Raises ConfigError when a file is in its place."""
    if path is None:
        return None
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{path}: is a file; with `--compare`, `--output` names a folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _lines(paths: Sequence[str]) -> Iterator[str]:
    """Yield the lines of all files, as they are read."""
    from ziggurat.cli.output import input_stream
    from ziggurat.decoding.lines import read_lines

    for path in paths:
        yield from read_lines(*input_stream(path))
