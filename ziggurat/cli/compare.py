"""The verb evaluate on several systems: tables of a comparison, and what disturbances of the source cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ziggurat.cli.engine import model_languages, open_engine, warnings_shown
from ziggurat.cli.output import (
    check_input,
    check_page,
    counted,
    input_stream,
    is_setting,
    output_folder,
    pair_up,
    print_json,
    read_text,
    refuse_empty,
    refuse_overwriting,
    say,
    write_parts,
)
from ziggurat.cli.score_tables import comparison_table
from ziggurat.cli.scored_text import check_scored
from ziggurat.cli.scoring import SystemOptions, check_test_set, kept_file, translated, warn_of_sides
from ziggurat.system.errors import ConfigError, printable

if TYPE_CHECKING:
    from ziggurat.evaluate.comparison import Comparison
    from ziggurat.evaluate.findings import BucketTable, NgramTable, OverSeeds, Scores, SentenceTable
    from ziggurat.evaluate.perturbations import SystemOutputs
    from ziggurat.evaluate.significance import Effect, PairwiseTest, Robustness


_EXAMPLES = 3  # sentences shown for each of two systems; the JSON has more
_LINE = 4096  # characters shown of a sentence


def comparison_text(comparison: Comparison) -> str:
    """Return all tables, with the first few examples of sentences."""
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
    """Return the differences and p-values of all pairs, and for three systems or more who beats whom."""
    from ziggurat.evaluate.findings import FEWEST_CASES, USELESS_BLEU

    several = len(scores.pairs) > 1  # a single p-value needs no correction for their number
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
        shown.append(f"{named}: of a BLEU below {USELESS_BLEU:g}, so none translates and none is better than another.")
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
                several = "mean " if len(outputs) > 1 else ""  # one score for the outputs of all seeds
                lines += [(system, f"{several}{score:.1f}", output) for output in dict.fromkeys(outputs)]
            width = max(len(label) for label, _, _ in lines)
            shown += [f"    {label:<{width}} {score:>5}  {printable(line, _LINE)}" for label, score, line in lines]
    return "\n".join(shown)


def _figure(value: OverSeeds, decimals: int) -> str:
    if value.deviation is None:
        return f"{value.mean:.{decimals}f}"
    return f"{value.mean:.{max(decimals, 1)}f} ± {value.deviation:.{max(decimals, 1)}f}"


def aligned(rows: Iterable[Sequence[str]]) -> str:
    """Return rows in aligned columns: the first column to the left, the others to the right."""
    cells = [list(row) for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return "\n".join(
        "  ".join(
            [f"{row[0]:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()
        for row in cells
    )


def compare_systems(options: SystemOptions, *, train_target: Sequence[str], output: str | None, json: bool) -> None:
    """Translate where a system is a model, compare all systems, and print the tables.

    `train_target` are paths of the training text's target side; `output` is the folder for what models translate.
    """
    from ziggurat.evaluate.comparison import System, compare

    # (1) Texts are read and paired, options and metrics checked, before a model is opened.
    systems = parse_systems(options.systems)
    paths = [path for _, of_system in systems for path in of_system]
    models = [path for path in paths if Path(path).is_dir()]
    references = [read_text(path) for path in options.references]
    files, sources = _read(options, references, [path for path in paths if path not in models], models)
    for path in train_target:
        check_input(path)
    scoring, opening = options.scoring, options.opening
    of_models = opening.settings or output or scoring.tag or opening.which or opening.threads
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
    folder = output_folder(output)
    inputs = [options.source, *options.references, *train_target, *files]
    for name, of_system in systems:
        for seed in range(1, len(of_system) + 1):
            refuse_overwriting(kept_file(folder, f"{name}.{seed}"), *inputs)
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
            with warnings_shown(), open_engine([path], opening, lines=len(sources)) as translator:
                if not language_known:
                    test_set = scoring.test_set(references, sources, translator.target_language)
                    check_test_set(test_set, needed, scoring.comet, compare=True)
                    language_known = True
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


def _read(
    options: SystemOptions, references: Sequence[list[str]], files: Sequence[str], models: Sequence[str]
) -> tuple[dict[str, list[str]], list[str] | None]:
    """Return the lines of each of `files` by path, and those of the source text; None where none is given.

    Raises DataError for a file that cannot be read or does not pair up, ConfigError when `models` have no source text.
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
    from ziggurat.translate.results import read_lines

    for path in paths:
        yield from read_lines(*input_stream(path))


_SIGNIFICANT = 0.05
_SHOWN = 4096  # characters shown of a path or signature


def perturbation_names(listed: str) -> list[str]:
    """Return the perturbations of a comma-separated list, in their own order; `all` stands for all of them."""
    from ziggurat.evaluate.perturbations import perturbation_names as names_of

    names = [name.strip().lower() for name in listed.split(",") if name.strip()]
    return names_of(names or [""], "--perturb")


def perturb_systems(
    options: SystemOptions,
    perturbations: Sequence[str],
    *,
    ensemble: Sequence[str],
    seed: int,
    page: str | None,
    json: bool,
) -> None:
    """Translate the test set as it is and disturbed by every system, and print or write what that costs.

    `ensemble` are further members of the only system; `page` is the path of an HTML file.
    """
    from ziggurat.evaluate.perturbations import DisturbedSet, changes_any
    from ziggurat.evaluate.scores import METRICS

    # (1) Texts and options are checked before a model is opened.
    scoring = options.scoring
    if unknown := [name for name in scoring.metrics if name not in METRICS]:
        raise ConfigError(f"`--perturb` scores by {', '.join(METRICS)}, not by {unknown[0]}")
    systems = _systems(options.systems)
    if options.source is None:
        raise ConfigError(f"`--source FILE` is missing: what should {systems[0][1]} translate?")
    sources, references = read_text(options.source), [read_text(path) for path in options.references]
    named = list(zip(options.references, references, strict=True))
    for name, lines in ((options.source, sources), *named):
        refuse_empty(name, lines)
    pair_up((options.source, sources), *named)
    if not changes_any(perturbations, sources, references, seed):
        raise ConfigError(f"{options.source}: none of {', '.join(perturbations)} changes a line of it")
    if page is not None:
        if page == "-" and json:
            raise ConfigError("`--page -` and `--json` both write to standard output; name a file")
        check_page(page, "--page", options.source, *options.references)
        if find_spec("jinja2") is None:  # before hours of translating
            raise ConfigError("`--page` needs jinja2: pip install 'ziggurat-mt[report]'")
    # (2) Every system translates all lines, disturbed and not, in one go. The first model names the languages.
    disturbed: DisturbedSet | None = None
    found: list[SystemOutputs] = []
    origins = []
    test_set = scoring.test_set(references, sources)
    for name, path in systems:
        members = [path, *ensemble]
        with warnings_shown(), open_engine(members, options.opening, lines=len(sources)) as translator:
            if disturbed is None:
                test_set = scoring.test_set(references, sources, translator.target_language)
                check_test_set(test_set, scoring.metrics, None)
                # Capitals are chosen by the source language: the Turkish one of `i` has a dot.
                languages = (model_languages(path, options.opening)[0], translator.target_language)
                disturbed = DisturbedSet(perturbations, sources, references, languages, seed)
            outputs = disturbed.outputs(translated(translator, disturbed.texts, None, scoring.tag))
            warn_of_sides(outputs.plain, test_set, f"the output of {printable(name)}")
            found.append(outputs)
            origins.append(translator.origin)
    assert disturbed is not None
    # (3) What it costs
    named_systems = [(name, origin) for (name, _), origin in zip(systems, origins, strict=True)]
    results = disturbed.judged(named_systems, found, scoring.metrics, test_set)
    if page != "-":  # else standard output holds the page
        if json:
            print_json(results.as_record())
        else:
            print(_text(results))
    if page is not None:
        from ziggurat.inspect.report.page import robustness_page

        write_parts(page, [robustness_page(results).encode()])
        if page != "-":
            say(f"page: {Path(page).resolve()}")


def _systems(given: Sequence[str]) -> list[tuple[str, str]]:
    systems = []
    for name, paths in parse_systems(given):
        if len(paths) > 1:
            raise ConfigError(f"`--perturb`: {printable(name)} has {len(paths)} seeds; name one model of it")
        if Path(paths[0]).is_file():
            raise ConfigError(f"`--perturb` needs models, which translate: {printable(paths[0], _SHOWN)} is a file")
        systems.append((name, paths[0]))
    return systems


def _text(results: Robustness) -> str:
    from ziggurat.evaluate.findings import FEWEST_CASES

    head = [f"{counted(results.sentences, 'sentence')}; {results.tests}; * marks adjusted p < {_SIGNIFICANT}"]
    head += [f"{printable(n)}: {printable(o, _SHOWN)}" for n, o in zip(results.systems, results.origins, strict=True)]
    parts = ["\n".join(head)]
    for metric, signature, up in zip(results.metrics, results.signatures, results.higher_is_better, strict=True):
        named = len(results.systems) > 1
        columns = ("as it is", "disturbed", "difference", "adjusted p")
        headings = [
            f"{printable(s)}: {c}" if named and c == columns[0] else c for s in results.systems for c in columns
        ]
        rows = [["", "cases", *headings]]
        for disturbance in results.perturbations:
            row = [disturbance.name, f"{disturbance.cases:,}"]
            for system in results.systems:
                effect = results.effect(system, disturbance.name, metric)
                row += [f"{effect.undisturbed:.2f}", f"{effect.disturbed:.2f}", *_tested(effect)]
            rows.append(row)
        direction = "" if up else " (lower is better)"
        parts.append("\n".join([f"{metric}{direction}|{printable(signature, _SHOWN)}", aligned(rows)]))
        for title, between in (
            (f"{metric}, disturbed", results.contests),
            (f"{metric}, disturbed - as it is", results.effect_differences),
        ):
            own = [one for one in between if one.metric == metric]
            if own:
                labels = (f"{printable(one.left)} - {printable(one.right)}" for one in own)
                lines = [[one.perturbation, label, *_tested(one)] for one, label in zip(own, labels, strict=True)]
                parts.append(aligned([[title, "", "difference", "adjusted p"], *lines]))
    if any(effect.p is None for effect in results.effects):
        parts.append(f"too few: {FEWEST_CASES} cases are the fewest that tell a difference from chance")
    if results.left_out:
        parts.append(f"Left out, since they change no line: {', '.join(results.left_out)}")
    return "\n\n".join(parts)


def _tested(found: Effect | PairwiseTest) -> tuple[str, str]:
    p = found.p_adjusted
    mark = "*" if p is not None and p < _SIGNIFICANT else " "
    return f"{found.difference:+.2f}{mark}", "too few" if p is None else f"{p:.3f}"
