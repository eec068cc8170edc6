"""The verb compare: several systems side by side, with tests and tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ziggurat.cli.engine import ModelOptions, model_languages, open_engine, warnings_shown
from ziggurat.cli.output import (
    OUT,
    Device,
    Json,
    Threads,
    Which,
    check_input,
    check_one_stream,
    counted,
    decoding_settings,
    input_stream,
    is_setting,
    output_folder,
    pair_up,
    print_json,
    read_text,
    refuse_empty,
    refuse_overwriting,
    say,
)
from ziggurat.cli.score_options import (
    TEXTS,
    BleuTokenizer,
    CometModel,
    Language,
    Lowercase,
    Metrics,
    Reference,
    Source,
    SourceTag,
    SystemOptions,
    TableFormat,
    check_test_set,
    score_options,
)
from ziggurat.cli.score_tables import comparison_table
from ziggurat.cli.scored_text import check_scored
from ziggurat.cli.scoring import kept_file, translated, warn_of_sides
from ziggurat.system.errors import ConfigError, printable

if TYPE_CHECKING:
    from ziggurat.evaluate.comparison import Comparison
    from ziggurat.evaluate.findings import BucketTable, NgramTable, OverSeeds, Scores, SentenceTable

_EXAMPLES = 3  # example sentences shown for each of two systems; the JSON has more
_LINE = 4096  # a longer sentence is cut to this many characters


def comparison_text(comparison: Comparison) -> str:
    """Return all tables, with a few example sentences."""
    originals = [system.name for system in comparison.systems]
    names = [printable(name) for name in originals]
    parts = [_head(comparison), _scores(comparison)]
    parts += [_tests(scores, originals) for scores in comparison.scores if scores.pairs]
    rows = [[count.title, *(_figure(value, 0) for value in count.systems)] for count in comparison.counts]
    parts.append("\n".join(["Outputs", aligned([["sentences", *names], *rows])]))
    parts += [_bucket_table(table, names) for table in comparison.buckets]
    parts += [_ngrams(table) for table in comparison.ngrams]
    parts += [_sentences(table) for table in comparison.sentence_tables]
    parts += [f"Left out: {note}" for note in comparison.notes]
    return "\n\n".join(parts)


def _head(comparison: Comparison) -> str:
    lines = [f"{counted(comparison.sentences, 'sentence')}, {counted(comparison.references, 'reference')}"]
    for system in comparison.systems:
        origins = "; ".join(printable(origin, _LINE) for origin in system.origins)
        lines.append(f"{printable(system.name)}: {counted(system.seeds, 'seed')}{': ' if origins else ''}{origins}")
    if any(system.seeds > 1 for system in comparison.systems):
        lines.append("Figures are means over seeds, ± their standard deviation.")
    return "\n".join(lines)


def _scores(comparison: Comparison) -> str:
    rows = [["", *(scores.metric for scores in comparison.scores)]]
    for number, system in enumerate(comparison.systems):
        figures = (_figure(scores.systems[number], scores.decimals) for scores in comparison.scores)
        rows.append([printable(system.name), *figures])
    signatures = [
        f"{scores.metric}|{printable(scores.signature, _LINE)}{'' if scores.higher_is_better else ' (lower is better)'}"
        for scores in comparison.scores
    ]
    return "\n".join(["Scores", aligned(rows), *signatures])


def _tests(scores: Scores, originals: Sequence[str]) -> str:
    """Return the differences and p-values of all pairs, and for three systems or more which beats which."""
    from ziggurat.evaluate.findings import FEWEST_CASES, USELESS_BLEU

    several = len(scores.pairs) > 1  # a single p-value needs no correction for multiple tests
    head = ["p bootstrap", *(["adjusted"] * several), "p randomisation", *(["adjusted"] * several)]
    rows = [["", "difference", *head]]
    for pair in scores.pairs:
        values = [pair.bootstrap, pair.bootstrap_adjusted, pair.randomisation, pair.randomisation_adjusted]
        label = f"{printable(pair.left)} - {printable(pair.right)}"
        shown_values = (f"{value:.4f}" for value in (values if several else values[::2]))
        rows.append([label, f"{pair.difference:+.{scores.decimals}f}", *shown_values])
    shown = [f"{scores.metric}: differences and p-values ({scores.test_signature})", aligned(rows)]
    if scores.too_few:
        assert scores.sentences is not None
        shown.append(
            f"{counted(scores.sentences, 'sentence')}: too few to tell. With fewer than {FEWEST_CASES}, these p-values "
            "come out far too small."
        )
    if len(scores.useless) > 1:
        named = ", ".join(map(printable, scores.useless))
        shown.append(f"{named}: BLEU below {USELESS_BLEU:g}, so none translates and none beats another.")
    if len(originals) > 2 and not scores.too_few:
        matrix = [
            [printable(row), *("" if row == column else scores.verdict(row, column) for column in originals)]
            for row in originals
        ]
        neither = "; 0 neither translates" if len(scores.useless) > 1 else ""
        meaning = "+ row better than column, - worse, = no significant difference (bootstrap, adjusted p < 0.05)"
        shown.append(f"{meaning}{neither}")
        shown.append(aligned([["", *map(printable, originals)], *matrix]))
    return "\n".join(shown)


def _bucket_table(table: BucketTable, names: Sequence[str]) -> str:
    sized = bool(table.size_of)
    decimals = 0 if table.measure == "sentences" else 2
    rows = [[table.by, *([table.size_of] if sized else []), *names]]
    for bucket in table.buckets:
        figures = (_figure(value, decimals) for value in bucket.systems)
        rows.append([bucket.label, *([f"{bucket.size:,}"] if sized else []), *figures])
    return f"{table.title} ({table.measure})\n{aligned(rows)}"


def _ngrams(table: NgramTable) -> str:
    left, right = printable(table.left), printable(table.right)
    rows = [
        [printable(n.ngram), f"{n.left:.4g}", f"{n.right:.4g}", f"{n.score:.3f}"]
        for n in (*table.more_in_left, *table.more_in_right)
    ]
    head = f"N-grams that {left} or {right} gets right more often"
    return f"{head}\n{aligned([['', left, right, 'score'], *rows])}"


def _sentences(table: SentenceTable) -> str:
    left, right = printable(table.left), printable(table.right)
    shown = [
        f"Sentences, {left} against {right}: {table.wins:,} better, {table.losses:,} worse, {table.ties:,} equal "
        f"({table.measure})"
    ]
    for name, examples in ((left, table.left_best), (right, table.right_best)):
        if examples:
            shown.append(f"\nWhere {name} is better by most")
        for example in examples[:_EXAMPLES]:
            shown.append(f"  line {example.line}")
            lines = [] if example.source is None else [("source", "", example.source)]
            lines.append(("reference", "", example.reference))
            for system, score, outputs in (
                (left, example.left_score, example.left),
                (right, example.right_score, example.right),
            ):
                several = "mean " if len(outputs) > 1 else ""  # one score covers the outputs of all seeds
                lines += [(system, f"{several}{score:.1f}", output) for output in dict.fromkeys(outputs)]
            width = max(len(label) for label, _, _ in lines)
            shown += [f"    {label:<{width}} {score:>5}  {printable(line, _LINE)}" for label, score, line in lines]
    return "\n".join(shown)


def _figure(value: OverSeeds, decimals: int) -> str:
    if value.deviation is None:
        return f"{value.mean:.{decimals}f}"
    return f"{value.mean:.{max(decimals, 1)}f} ± {value.deviation:.{max(decimals, 1)}f}"


def aligned(rows: Iterable[Sequence[str]]) -> str:
    """Return rows in aligned columns: the first column left-aligned, the others right-aligned."""
    cells = [list(row) for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return "\n".join(
        "  ".join(
            [f"{row[0]:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()
        for row in cells
    )


def systems_and_settings(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the systems among a verb's arguments, and the decoding settings, recognised by their keys."""
    from ziggurat.config import DecodingConfig

    def is_decoding(word: str) -> bool:
        return is_setting(word) and re.split("[.=]", word.removeprefix("decoding."))[0] in DecodingConfig.model_fields

    settings = decoding_settings([word for word in words if is_decoding(word)], "--source")
    return [word for word in words if not is_decoding(word)], settings


def compare(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="SYSTEM",
            help="[NAME=]PATH[,PATH...]: runs, model directories or files of translations, one per seed. Decoding "
            "settings may follow.",
        ),
    ],
    source: Source = None,
    reference: Reference = None,
    train_target: Annotated[
        list[str] | None,
        typer.Option(
            "--train-target",
            metavar="FILE",
            help="Target side of the training text, for word accuracy by frequency; repeatable.",
            rich_help_panel=TEXTS,
        ),
    ] = None,
    tag: SourceTag = None,
    metrics: Metrics = "bleu,chrf,ter",
    language: Language = None,
    bleu_tokenizer: BleuTokenizer = None,
    lowercase: Lowercase = False,
    comet_model: CometModel = None,
    output: Annotated[
        str | None, typer.Option(*OUT, metavar="FOLDER", help="Keep the translations here, as NAME.SEED.txt.")
    ] = None,
    format: TableFormat = "text",
    json: Json = False,
    which: Which = None,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Compare systems: scores, significance tests, and tables that show where they differ.

    Example: `ziggurat compare plain=runs/a-1,runs/a-2 other=b.txt --source test.de --reference test.en`
    """
    systems, settings = systems_and_settings(words)
    references = reference or []
    if not references:
        raise ConfigError("`--reference FILE` is missing")
    check_one_stream(source, *references)
    scoring = score_options(metrics, language, comet_model, bleu_tokenizer, lowercase, device, tag=tag, format=format)
    if scoring.table is not None and json:
        raise ConfigError("`--format` is of tables of scores: leave out `--json`")
    scoring.refuse_others("compare")
    opening = ModelOptions(which, device, threads, settings)
    options = SystemOptions(systems, source, references, scoring, opening)
    _compare(options, train_target=train_target or [], output=output, json=json)


def _compare(options: SystemOptions, *, train_target: Sequence[str], output: str | None, json: bool) -> None:
    """Translate with each system that is a model, compare all systems, and print the tables.

    `train_target` are paths to the training text's target side; `output` is the folder for the models' translations.
    """
    from ziggurat.evaluate.comparison import System, compare

    # (1) Read and pair texts and check options and metrics before a model is opened.
    systems = parse_systems(options.systems)
    paths = [path for _, of_system in systems for path in of_system]
    models = [path for path in paths if Path(path).is_dir()]
    references = [read_text(path) for path in options.references]
    files, sources = _read(options, references, [path for path in paths if path not in models], models)
    for path in train_target:
        check_input(path)
    _check_options(options, models, output)
    scoring = options.scoring
    language = model_languages(models[0], options.opening, converted=True)[1] if models else None
    test_set = scoring.test_set(references, sources, language)
    # The sentence tables need BLEU and chrF, whatever metrics are requested.
    check_test_set(test_set, dict.fromkeys((*scoring.metrics, "bleu", "chrf")), scoring.comet, compare=True)
    folder = output_folder(output)
    inputs = [options.source, *options.references, *train_target, *files]
    for name, of_system in systems:
        for seed in range(1, len(of_system) + 1):
            refuse_overwriting(kept_file(folder, f"{name}.{seed}"), *inputs)
    # (2) Collect outputs, one for each path.
    found = []
    for name, of_system in systems:
        outputs, origins = [], []
        for seed, path in enumerate(of_system, start=1):
            if path in files:
                outputs.append(files[path])
                origins.append(path)
                continue
            assert sources is not None
            with warnings_shown(), open_engine([path], options.opening, lines=len(sources)) as translator:
                outputs.append(translated(translator, sources, kept_file(folder, f"{name}.{seed}"), scoring.tag))
                origins.append(translator.origin)
        warn_of_sides(outputs[0], test_set, f"the output of {printable(name)}")
        found.append(System(name, outputs, origins))
    # (3) The comparison
    comparison = compare(
        found,
        references,
        sources,
        _lines(train_target) if train_target else None,
        metrics=scoring.metrics,
        target_language=test_set.target_language,
        tokenize=scoring.tokenizer,
        lowercase=scoring.lowercase,
        comet=scoring.comet,
        say=say,
    )
    if json:
        print_json(comparison.as_record())
    elif scoring.table is not None:
        print(comparison_table(comparison, scoring.table))
    else:
        print(comparison_text(comparison))


def _check_options(options: SystemOptions, models: Sequence[str], output: str | None) -> None:
    """Raise ConfigError for options of models if there are none; warn of runs with different kinds of weights."""
    from ziggurat.model.directory import common_weights
    from ziggurat.model.run_folder import CHECKPOINTS

    scoring, opening = options.scoring, options.opening
    of_models = opening.settings or output or scoring.tag or opening.which or opening.threads
    if not models and (of_models or (opening.device != "auto" and scoring.comet is None)):
        raise ConfigError(
            "decoding settings, `--output`, `--tag`, `--which`, `--threads` and (except for COMET) `--device` "
            "are for models; all systems are files of translations"
        )
    runs = [Path(path) for path in models if (Path(path) / CHECKPOINTS).is_dir()]
    if opening.which is None and (which := common_weights(runs)):
        say(
            "warning: not all of these runs have averaged weights, and averaging by itself raises scores; "
            f"`--which {which}` compares like with like"
        )


def _read(
    options: SystemOptions, references: Sequence[list[str]], files: Sequence[str], models: Sequence[str]
) -> tuple[dict[str, list[str]], list[str] | None]:
    """Return the lines of each of `files` by path, and those of the source text (None if none is given).

    Raises DataError for a file that cannot be read or does not pair up, ConfigError if `models` have no source text.
    """
    if models and options.source is None:
        raise ConfigError(f"`--source FILE` is missing: what should {models[0]} translate?")
    for path in files:
        check_input(path)
    named_references = list(zip(options.references, references, strict=True))
    for name, of_reference in named_references:
        check_scored(name, of_reference)
    sources = None
    if options.source is not None:
        sources = read_text(options.source)
        refuse_empty(options.source, sources)
        pair_up((options.source, sources), *named_references)
    lines = {path: read_text(path) for path in files}
    for path, of_file in lines.items():
        check_scored(path, of_file)
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
            raise ConfigError(f"`{printable(system, 4096)}`: a system is [NAME=]PATH[,PATH...]")
        name = name or Path(paths[0]).resolve().name
        if "/" in name or name.startswith("."):
            raise ConfigError(f"{printable(repr(name))} cannot be a system's name; leave out `/`")
        if name in (other for other, _ in systems):
            raise ConfigError(f"two systems are called {printable(repr(name))}; give them different names, NAME=PATH")
        systems.append((name, paths))
    return systems


def _lines(paths: Sequence[str]) -> Iterator[str]:
    from ziggurat.translate.text_lines import read_lines

    for path in paths:
        yield from read_lines(*input_stream(path))
