"""The verb perturb: what perturbations of the source cost one model, or several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ziggurat.cli.compare import aligned, parse_systems, systems_and_settings
from ziggurat.cli.engine import ModelOptions, model_languages, open_engine, warnings_shown
from ziggurat.cli.output import (
    Device,
    Ensemble,
    Json,
    Threads,
    Which,
    WithoutLayers,
    check_one_stream,
    check_page,
    counted,
    pair_up,
    print_json,
    read_text,
    refuse_empty,
    say,
    write_parts,
)
from ziggurat.cli.score_options import (
    SCORES,
    TEXTS,
    BleuTokenizer,
    Language,
    Lowercase,
    Reference,
    Source,
    SourceTag,
    SystemOptions,
    check_test_set,
    score_options,
)
from ziggurat.cli.scoring import translated, warn_of_sides
from ziggurat.system.errors import ConfigError, printable

if TYPE_CHECKING:
    from ziggurat.evaluate.significance import Effect, PairwiseTest, Robustness

_SIGNIFICANT = 0.05
_SHOWN = 4096  # a longer path or signature is cut to this many characters


def perturb(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL", help="[NAME=]PATH: a run or model directory, or several. Decoding settings may follow."
        ),
    ],
    source: Source = None,
    reference: Reference = None,
    kinds: Annotated[
        str,
        typer.Option(
            "--kinds",
            metavar="NAME,...",
            help="caps, title, typos, tags, noise, short, long, emoji, untranslatable, or all.",
            rich_help_panel=TEXTS,
        ),
    ] = "all",
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", min=0, help="Seed for random choices.", rich_help_panel=TEXTS)
    ] = 0,
    tag: SourceTag = None,
    metrics: Annotated[
        str, typer.Option("--metrics", metavar="NAME,...", help="Any of bleu, chrf, ter.", rich_help_panel=SCORES)
    ] = "bleu,chrf,ter",
    language: Language = None,
    bleu_tokenizer: BleuTokenizer = None,
    lowercase: Lowercase = False,
    page: Annotated[
        str | None, typer.Option("--page", metavar="FILE", help="Also write an HTML page with the worst cases.")
    ] = None,
    json: Json = False,
    which: Which = None,
    ensemble: Ensemble = None,
    without_layers: WithoutLayers = None,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Measure robustness: what capitals, typos, tags, noise or line length cost a model.

    Example: `ziggurat perturb runs/a --source test.de --reference test.en --kinds caps,typos --page robustness.html`
    """
    systems, settings = systems_and_settings(words)
    references = reference or []
    if not references:
        raise ConfigError("`--reference FILE` is missing")
    if len(systems) > 1 and ensemble:
        raise ConfigError("`--ensemble` goes with one model; leave it out, or all models but one")
    check_one_stream(source, *references)
    scoring = score_options(metrics, language, None, bleu_tokenizer, lowercase, device, tag=tag)
    scoring.refuse_others("perturb")
    opening = ModelOptions(which, device, threads, settings, without_layers)
    options = SystemOptions(systems, source, references, scoring, opening)
    names = perturbation_names(kinds)
    _perturb(options, names, ensemble=ensemble or [], seed=seed, page=page, json=json)


def perturbation_names(listed: str) -> list[str]:
    """Return the perturbations of a comma-separated list, in canonical order; `all` means every one."""
    from ziggurat.evaluate.perturbations import perturbation_names as names_of

    names = [name.strip().lower() for name in listed.split(",") if name.strip()]
    return names_of(names or [""], "--kinds")


def _perturb(
    options: SystemOptions,
    perturbations: Sequence[str],
    *,
    ensemble: Sequence[str],
    seed: int,
    page: str | None,
    json: bool,
) -> None:
    """Translate the test set, clean and perturbed, with every system, and print or write what that costs.

    `ensemble` are further members of a single system; `page` is the path of an HTML file.
    """
    from ziggurat.evaluate.perturbations import PerturbedSet, changes_any
    from ziggurat.evaluate.scores import METRICS

    # (1) Check texts and options before a model is opened.
    scoring = options.scoring
    if unknown := [name for name in scoring.metrics if name not in METRICS]:
        raise ConfigError(f"`perturb` scores by {', '.join(METRICS)}, not by {unknown[0]}")
    systems = _systems(options.systems)
    if options.source is None:
        raise ConfigError(f"`--source FILE` is missing: what should {systems[0][1]} translate?")
    sources, references = read_text(options.source), [read_text(path) for path in options.references]
    named = list(zip(options.references, references, strict=True))
    for name, lines in ((options.source, sources), *named):
        refuse_empty(name, lines)
    pair_up((options.source, sources), *named)
    if not changes_any(perturbations, sources, references, seed):
        raise ConfigError(f"{options.source}: none of {', '.join(perturbations)} changes any line")
    if page is not None:
        if page == "-" and json:
            raise ConfigError("`--page -` and `--json` both write to standard output; name a file")
        check_page(page, "--page", options.source, *options.references)
        if find_spec("jinja2") is None:  # checked here, before hours of translating
            raise ConfigError("`--page` needs jinja2: pip install 'ziggurat-mt[report]'")
    # The first model gives the languages. Upper-casing depends on the source's: in Turkish, capital `i` has a dot.
    languages = model_languages(systems[0][1], options.opening)
    test_set = scoring.test_set(references, sources, languages[1])
    check_test_set(test_set, scoring.metrics, None)
    perturbed = PerturbedSet(perturbations, sources, references, languages, seed)
    # (2) Every system translates all lines, perturbed and not, in one go.
    found, origins = [], []
    for name, path in systems:
        members = [path, *ensemble]
        with warnings_shown(), open_engine(members, options.opening, lines=len(sources)) as translator:
            outputs = perturbed.outputs(translated(translator, perturbed.texts, None, scoring.tag))
            warn_of_sides(outputs.plain, test_set, f"the output of {printable(name)}")
            found.append(outputs)
            origins.append((name, translator.origin))
    # (3) Report the cost
    results = perturbed.judged(origins, found, scoring.metrics, test_set)
    if page != "-":  # `-`: standard output holds the page
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
            raise ConfigError(f"{printable(name)} has {len(paths)} seeds; name one of its models")
        if Path(paths[0]).is_file():
            raise ConfigError(f"`perturb` needs models: {printable(paths[0], _SHOWN)} is a file")
        systems.append((name, paths[0]))
    return systems


def _text(results: Robustness) -> str:
    from ziggurat.evaluate.findings import FEWEST_CASES

    head = [f"{counted(results.sentences, 'sentence')}; {results.tests}; * marks adjusted p < {_SIGNIFICANT}"]
    head += [f"{printable(n)}: {printable(o, _SHOWN)}" for n, o in zip(results.systems, results.origins, strict=True)]
    parts = ["\n".join(head)]
    for metric, signature, up in zip(results.metrics, results.signatures, results.higher_is_better, strict=True):
        direction = "" if up else " (lower is better)"
        tables = []
        for system in results.systems:  # side by side they would not fit a terminal
            name = printable(system) if len(results.systems) > 1 else ""
            rows = [[name, "cases", "as it is", "perturbed", "difference", "adjusted p"]]
            for perturbation in results.perturbations:
                effect = results.effect(system, perturbation.name, metric)
                scores = (f"{effect.undisturbed:.2f}", f"{effect.disturbed:.2f}")
                rows.append([perturbation.name, f"{perturbation.cases:,}", *scores, *_tested(effect)])
            tables.append(aligned(rows))
        parts += [f"{metric}{direction}|{printable(signature, _SHOWN)}\n{tables[0]}", *tables[1:]]
        for title, between in (
            (f"{metric}, perturbed", results.contests),
            (f"{metric}, perturbed - as it is", results.effect_differences),
        ):
            own = [one for one in between if one.metric == metric]
            if own:
                labels = (f"{printable(one.left)} - {printable(one.right)}" for one in own)
                lines = [[one.perturbation, label, *_tested(one)] for one, label in zip(own, labels, strict=True)]
                parts.append(aligned([[title, "", "difference", "adjusted p"], *lines]))
    if any(effect.p is None for effect in results.effects):
        parts.append(f"too few: telling a difference from chance takes {FEWEST_CASES} cases")
    if results.left_out:
        parts.append(f"Left out, since they change no line: {', '.join(results.left_out)}")
    return "\n\n".join(parts)


def _tested(found: Effect | PairwiseTest) -> tuple[str, str]:
    p = found.p_adjusted
    mark = "*" if p is not None and p < _SIGNIFICANT else " "
    return f"{found.difference:+.2f}{mark}", "too few" if p is None else f"{p:.3f}"
