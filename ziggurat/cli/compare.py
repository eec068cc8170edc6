"""`evaluate --compare`: systems are read from files or translated with, compared, and printed as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ziggurat.cli.compare_tables import comparison_text
from ziggurat.cli.engine import ModelOptions, open_engine, warnings_shown
from ziggurat.cli.options import is_setting
from ziggurat.cli.output import (
    check_input,
    input_stream,
    output_folder,
    pair_up,
    print_json,
    read_text,
    refuse_empty,
    refuse_overwriting,
    say,
)
from ziggurat.cli.scoring import ScoreOptions, check_test_set, translated, warn_of_sides
from ziggurat.system.errors import ConfigError, printable


@dataclass(frozen=True)
class CompareOptions:
    """The options of `evaluate --compare`.

    Attributes:
        systems: each `[NAME=]PATH[,PATH...]`.
        source: path of the source text.
        references: paths of the reference translations.
        train_target: paths of the training text's target side.
        output: folder for the translations that models make.
        scoring: metrics, and how they are computed.
        opening: how models are opened.
    """

    systems: Sequence[str]
    source: str | None
    references: Sequence[str]
    train_target: Sequence[str]
    output: str | None
    scoring: ScoreOptions
    opening: ModelOptions


def compare_systems(options: CompareOptions, *, json: bool) -> None:
    """Translate where a system is a model, compare all systems, and print the tables."""
    from ziggurat.evaluate.comparison import System, compare

    # (1) Texts are read and paired, options and metrics checked, before a model is opened.
    systems = parse_systems(options.systems)
    paths = [path for _, of_system in systems for path in of_system]
    models = [path for path in paths if Path(path).is_dir()]
    references = [read_text(path) for path in options.references]
    files, sources = _read(options, references, [path for path in paths if path not in models], models)
    scoring, opening = options.scoring, options.opening
    of_models = opening.settings or options.output or scoring.tag or opening.which or opening.threads
    if not models and (of_models or opening.engine != "auto" or (opening.device != "auto" and scoring.comet is None)):
        raise ConfigError(
            "decoding settings, `--output`, `--tag`, `--which`, `--engine`, `--threads` and (but for COMET) `--device` "
            "are for models; all systems are files of translations"
        )
    # The tables of sentences need BLEU and chrF, whatever is asked for.
    needed = list(dict.fromkeys((*scoring.metrics, "bleu", "chrf")))
    test_set = scoring.test_set(references, sources)
    language_known = test_set.target_language is not None or not models
    if language_known:
        check_test_set(test_set, needed, scoring.comet, compare=True)
    folder = output_folder(options.output)
    inputs = [options.source, *options.references, *options.train_target, *files]
    for name, of_system in systems:
        for seed in range(1, len(of_system) + 1):
            refuse_overwriting(_kept(folder, name, seed), *inputs)
    # (2) Outputs are collected, one for each path. The first model names the language where no option did.
    found = []
    for name, of_system in systems:
        outputs, origins = [], []
        for seed, path in enumerate(of_system, start=1):
            if path in files:
                outputs.append(files[path])
                origins.append(path)
                continue
            assert sources is not None
            with (
                warnings_shown(),
                open_engine([path], opening, lines=len(sources)) as translator,
            ):
                if not language_known:
                    test_set = scoring.test_set(references, sources, translator.target_language)
                    check_test_set(test_set, needed, scoring.comet, compare=True)
                    language_known = True
                outputs.append(translated(translator, sources, _kept(folder, name, seed), scoring.tag))
                origins.append(translator.origin)
        warn_of_sides(outputs[0], test_set, f"the output of {printable(name)}")
        found.append(System(name, outputs, origins))
    # (3) The comparison
    comparison = compare(
        found,
        references,
        sources,
        _lines(options.train_target) if options.train_target else None,
        metrics=scoring.metrics,
        target_language=test_set.target_language,
        tokenize=scoring.tokenizer,
        lowercase=scoring.lowercase,
        comet=scoring.comet,
        say=say,
    )
    if json:
        print_json(comparison.as_record())
    else:
        print(comparison_text(comparison))


def _kept(folder: Path | None, name: str, seed: int) -> str | None:
    """Return the path of the translations that a model of a system makes; None where none are to be kept."""
    return None if folder is None else str(folder / f"{name}.{seed}.txt")


def _read(
    options: CompareOptions, references: Sequence[list[str]], files: Sequence[str], models: Sequence[str]
) -> tuple[dict[str, list[str]], list[str] | None]:
    """Return the lines of each of `files` by path, and those of the source text; None where none is given.

    Raises DataError for a file that cannot be read or does not pair up, ConfigError when `models` have no source text.
    """
    if models and options.source is None:
        raise ConfigError(f"`--source FILE` is missing: what should {models[0]} translate?")
    for path in (*files, *options.train_target):
        check_input(path)
    named_references = list(zip(options.references, references, strict=True))
    for name, of_reference in named_references:
        refuse_empty(name, of_reference)
    sources = None
    if options.source is not None:
        sources = read_text(options.source)
        refuse_empty(options.source, sources)
        pair_up((options.source, sources), *named_references)
    lines = {path: read_text(path) for path in files}
    for path, of_file in lines.items():
        refuse_empty(path, of_file)
        pair_up((path, of_file), *named_references)
    return lines, sources


def parse_systems(given: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return the name and the paths of each `[NAME=]PATH[,PATH...]`; the default name is the first path's last part.

    A path that exists is taken whole, even if it contains `=` or commas.

    Raises ConfigError for an empty path or name, a name that cannot be part of a file name, or two equal names.
    """
    systems: list[tuple[str, list[str]]] = []
    for system in given:
        named = is_setting(system)
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


def _lines(paths: Sequence[str]) -> Iterator[str]:
    """Yield the lines of all files, read as they are asked for."""
    from ziggurat.translate.lines import read_lines

    for path in paths:
        yield from read_lines(*input_stream(path))
