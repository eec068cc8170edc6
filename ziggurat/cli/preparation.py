"""The verbs before training: explain, recipes, prepare, shortlist."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from ziggurat.cli.arguments import ConfigArgument, Overrides, configurations, explained_names
from ziggurat.cli.hints import hints
from ziggurat.cli.jobs import finished, job_options
from ziggurat.cli.output import (
    OUT,
    Json,
    PhaseBars,
    check_output,
    counted,
    file_named,
    print_json,
    progress_bars,
    say,
    write_parts,
)
from ziggurat.config.choices import (
    NamedChoice,
    choices_named,
    explained,
    methods_of_paper,
    names_like,
    recipes_with,
    refused_with,
    resembling,
    term_named,
)
from ziggurat.config.notices import data_notices
from ziggurat.config.recipes import (
    SUFFIX,
    PaperRecipe,
    SmallCorpus,
    find_paper_recipe,
    find_small_recipe,
    load_named,
    paper_keys,
    paper_recipes,
    plain_recipe_names,
    recipe_names,
    recipe_summary,
    recipe_text,
)
from ziggurat.config.reference import KeyDescription
from ziggurat.system.errors import ConfigError, DataError, printable
from ziggurat.system.terminal import duration

if TYPE_CHECKING:
    from ziggurat.data.prepare import PrepareReport


_SHOWN = 3
"""_SHOWN is how many names of a long list are printed; `--json` has all."""


def explain(
    name: Annotated[
        str,
        typer.Argument(
            help="Key or section, such as training.schedule, method, such as DLCL or muon, or measure, such as beta.",
            autocompletion=explained_names,
        ),
    ] = "",
    json: Json = False,
) -> None:
    """Explain a key, method, paper or measure: what it means, who published it, and which keys and recipes use it.

    Keys may be those of experiments and pipelines. A method is found by the value that selects it and by its usual
    names, ignoring case and punctuation.

    Example: `ziggurat explain training.schedule`, `ziggurat explain "merged attention"`, `ziggurat explain sdt`
    """
    key = re.sub(r"\.\d+(?=\.|$)", "[]", name)  # data.train.0.weight: any item of the list
    entries, choices = explained(key), choices_named(name)
    paper = next((key for key in paper_keys() if key == name.casefold()), None)
    term = term_named(name)
    if not entries and not choices and paper is None and term is None:
        raise ConfigError(_unknown(name))
    if json:
        papers = [_paper_document(paper)] if paper else []
        terms = [{"term": term.name, "what": term.what, "page": term.page}] if term else []
        print_json([*(e._asdict() for e in entries), *papers, *map(_document, choices), *terms])
        return
    parts = [*_entry_texts(entries), *([_explained_paper(paper)] if paper else []), *map(_choice_text, choices)]
    parts += [f"{term.name}  (term)\n    {term.what}\n    more: {term.page}"] if term else []
    print("\n".join(parts))


def _unknown(name: str) -> str:
    if name in recipe_names() or find_small_recipe(name) is not None:
        return f"`{name}` is a recipe: `ziggurat recipes {name}` prints it"
    option = name.lower().replace("_", "-")
    if instead := next((known[option] for known in map(hints, ("train", "translate")) if option in known), None):
        return f"no key or method `{printable(name)}`; other toolkits' option of that name is {instead} here"
    methods = [] if "." in name else names_like(name)
    near = [*methods, *(key for key in resembling(name) if key not in methods)]
    what = "key" if "." in name else "key or method"
    return f"no {what} `{printable(name)}`; did you mean {', '.join(f'`{n}`' for n in near)}?"


def _entry_texts(found: Sequence[KeyDescription]) -> list[str]:
    """Return the text of each key found; of the sections inside the first, only how many keys they have."""
    listed = {e.path for e in found}
    texts = []
    for entry in found:
        parent = entry.path.rpartition(".")[0].removesuffix("[]")
        if parent in listed and parent != found[0].path:
            continue
        inside = sum(e.path.startswith((f"{entry.path}.", f"{entry.path}[].")) for e in found)
        more = f" {inside} keys: `ziggurat explain {entry.path}`." if inside and entry is not found[0] else ""
        texts.append(_entry_text(entry) + more)
    return texts


def _entry_text(entry: KeyDescription) -> str:
    kind = entry.type if entry.type == "section" else f"{entry.type}; default: {entry.default}"
    meaning = re.sub(r"(?<=[.:]) (?=`\w+`: )", "\n      ", entry.meaning)  # one line for each value described
    return f"{entry.path}  ({kind})\n    {meaning}"


def _choice_text(choice: NamedChoice) -> str:
    found = recipes_with(choice)
    facts = {
        "also set by": ", ".join(choice.keys[1:]),
        "paper": _published(choice) if choice.paper else f"none: {choice.reason}",
        "options": ", ".join(choice.options),
        "has an effect with": _by_key(choice.heeded_with),
        "goes with": ", ".join(choice.usual_with),
        "refused with": _by_key(list(refused_with(choice))),
        "recipes": _first(found),
        "more": choice.page,
    }
    return "\n    ".join([choice.name, choice.what, *(f"{name}: {fact}" for name, fact in facts.items() if fact)])


def _published(choice: NamedChoice) -> str:
    paper = choice.published_in
    text = f"{choice.paper}: {paper.title}" if paper else str(choice.paper)
    return f"{text}, {choice.place}" if choice.place else text


def _by_key(chosen: Sequence[str]) -> str:
    """Return choices such as `model.init.kind: admin` naming each key once."""
    values: dict[str, list[str]] = {}
    for choice in chosen:
        key, *value = choice.split(": ")
        values.setdefault(key, []).extend(value)
    return "; ".join(f"{key}: {', '.join(of_key)}" if of_key else key for key, of_key in values.items())


def _first(names: Sequence[str]) -> str:
    """Return the first of some names and the number of the others; "" if there are none."""
    others = len(names) - _SHOWN
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {others} more" if others > 0 else shown


def _document(choice: NamedChoice) -> dict[str, Any]:
    return {
        "method": choice.name,
        "keys": choice.keys,
        "value": choice.value,
        "what": choice.what,
        "paper": choice.paper,
        "no_paper": choice.reason,
        "title": choice.published_in.title if choice.published_in else None,
        "place": choice.place or None,
        "options": choice.options,
        "means_something_with": choice.heeded_with,
        "goes_with": choice.usual_with,
        "refused_with": refused_with(choice),
        "recipes": recipes_with(choice),
        "page": choice.page,
    }


def _explained_paper(key: str) -> str:
    recipes = list(paper_recipes(key).values())
    methods = _by_key([choice.name for choice in methods_of_paper(key)])
    lines = [f"{key}  (paper)", recipes[0].paper.citation, f"methods: {methods}"]
    lines.append(
        f"recipes: {_first([recipe.name for recipe in recipes])}; `ziggurat recipes {key}` lists them by table"
    )
    return "\n    ".join([*lines, "more: docs/papers.md#systems-of-papers"])


def _paper_document(key: str) -> dict[str, Any]:
    return {
        "paper_key": key,
        "paper": next(iter(paper_recipes(key).values())).paper.citation,
        "methods": [choice.name for choice in methods_of_paper(key)],
        "recipes": list(paper_recipes(key)),
        "page": "docs/papers.md#systems-of-papers",
    }


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Print this recipe's YAML, or list the recipes of this paper.", autocompletion=configurations
        ),
    ] = None,
    find: Annotated[
        str | None,
        typer.Option(
            "--find", metavar="TEXT", help="List only recipes with these words in their name, description or paper."
        ),
    ] = None,
    small: Annotated[
        bool, typer.Option("--small", help="Shrink a paper's recipe to minutes on two cores, with the same method.")
    ] = False,
    corpus: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--corpus", metavar="SOURCE TARGET", help="With --small: train on these files, not the embedded pair."
        ),
    ] = None,
    dev: Annotated[
        tuple[str, str] | None,
        typer.Option("--dev", metavar="SOURCE TARGET", help="With --corpus: its dev set."),
    ] = None,
    from_: Annotated[
        str | None,
        typer.Option("--from", metavar="FILE", help="Convert an OpusTrainer file to the section `data` and print it."),
    ] = None,
    json: Json = False,
) -> None:
    """List the built-in configurations and the papers' systems, or print one of them.

    Example: `ziggurat recipes multi30k-de-en > my.yaml`, `ziggurat recipes admin`, `ziggurat recipes --find en-fr`
    """
    if from_ is not None:
        if name or find or small or corpus or dev or json:
            raise ConfigError("`--from FILE` converts and prints that file: leave out the other options")
        from ziggurat.exchange.opustrainer import opustrainer_text

        print(opustrainer_text(from_), end="")
        return
    if small or corpus or dev:
        _check_small(name, small, corpus, dev)
        name = name if name is None or find_small_recipe(name) else f"{name}{SUFFIX}"
    if name is not None and name not in paper_keys():
        if find is not None:
            raise ConfigError(f"`--find` searches a list, but `{name}` is one recipe; leave out one of the two")
        text = recipe_text(name, corpus=SmallCorpus(corpus, dev, None) if corpus and dev else None)
        if json:
            print_json({**_listed(name), "text": text})
        else:
            print(text, end="")
        return
    plain = [] if name else [n for n in plain_recipe_names() if _has(find, n, recipe_summary(n))]
    papers = [paper_recipes(key).values() for key in paper_keys() if name in (None, key)]
    listed = [{r.name: r for r in recipes if _has(find, r.name, r.summary, r.paper.citation)} for recipes in papers]
    listed = [of_paper for of_paper in listed if of_paper]
    if not plain and not listed:
        raise ConfigError(f"no recipe has `{find}` in its name, description or paper")
    if json:
        print_json([_listed(n) for n in (*plain, *(n for of_paper in listed for n in of_paper))])
        return
    width = max(map(len, plain), default=0)
    lists = ["\n".join(f"{n:<{width}}  {recipe_summary(n)}" for n in plain)] if plain else []
    print("\n\n".join([*lists, *(_paper_text(list(of_paper.values())) for of_paper in listed)]))


def _check_small(name: str | None, small: bool, corpus: tuple[str, str] | None, dev: tuple[str, str] | None) -> None:
    """Raise ConfigError for a small recipe that is not from a paper, or that has only half of a corpus."""
    if not small:
        raise ConfigError("`--corpus` and `--dev` are for a small recipe: add `--small`")
    if name is None or (find_paper_recipe(name) or find_small_recipe(name)) is None:
        asked = "name one" if name is None else f"`{name}` is not one"
        raise ConfigError(f"`--small` is for the recipes of papers: {asked}; `ziggurat recipes` lists them")
    if (corpus is None) != (dev is None):
        raise ConfigError("`--corpus SOURCE TARGET` and `--dev SOURCE TARGET` go together: give both or neither")
    missing = [file for file in (*(corpus or ()), *(dev or ())) if not Path(file).is_file()]
    if missing:  # a note only, since the recipe may be meant for another machine
        say(f"note: not on this machine: {', '.join(missing)}")


def _has(find: str | None, *texts: str) -> bool:
    """Return True if every word of `find` is in one of the texts, ignoring case."""
    together = "\n".join(texts).casefold()
    return all(word in together for word in (find or "").casefold().split())


def _listed(name: str) -> dict[str, Any]:
    if (recipe := find_paper_recipe(name)) is not None:
        return recipe.document()
    no_paper = dict.fromkeys(("paper", "table", "row", "published_parameters"))
    return {"name": name, "summary": recipe_summary(name), **no_paper, "published_scores": {}}


def _paper_text(listed: Sequence[PaperRecipe]) -> str:
    tables: dict[str, list[tuple[str, str, str]]] = {}
    for recipe in listed:
        for place in recipe.table_rows:
            line = (recipe.name, str(place.row), place.published.words())
            tables.setdefault(place.table, []).append(line)
    names = max(len(recipe.name) for recipe in listed)
    lines = [f"{listed[0].paper.key}: {listed[0].paper.citation}"]
    for table, rows in tables.items():
        width = max(len(row) for _, row, _ in rows)
        lines += [f"  {table}", *(f"    {n:<{names}}  {row:<{width}}  {words}".rstrip() for n, row, words in rows)]
    return "\n".join(lines)


def prepare(
    config: ConfigArgument,
    overrides: Overrides = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a store made with other settings.")] = False,
    json: Json = False,
) -> None:
    """Clean parallel text, split it into subwords, and write it to a store for training.

    Example: `ziggurat prepare my.yaml data.subword.vocabulary_size=16000`
    """
    from ziggurat.data.prepare import prepare as prepare_store

    options = job_options(noun="pair")
    experiment = load_named(config, overrides or [])
    for doubt in data_notices(experiment.data):
        say(f"warning: {doubt}")
    if not experiment.data.dev:
        say("no `data.dev`: runs cannot validate or keep their best weights; see docs/tutorial.md to hold out pairs")
    done = TextColumn("{task.completed:,.0f}")
    try:
        with progress_bars(TextColumn("{task.description}"), BarColumn(), done, TimeRemainingColumn()) as bars:
            show = PhaseBars(bars).show
            if options.folder is None:
                report = prepare_store(experiment.data, force=force, progress=show)
            else:
                from ziggurat.corpora.jobs.preparation import prepare_job

                outcome = prepare_job(experiment.data, Path(options.folder), options.work(), force=force, progress=show)
                merged = finished(outcome, options)
                if merged is None:
                    return
                report = merged
    except DataError as error:
        fetched = find_small_recipe(config) is not None or (config in recipe_names() and config != "demo")
        if fetched and ": no such file: " in str(error):
            raise DataError(f"{error}; `ziggurat fetch {config}` gets the recipe's data") from None
        raise
    for notice in report.notices:
        say(f"warning: {notice}")
    if json:
        print_json(report.as_dict())
    else:
        print(_report_text(report))


def _report_text(report: PrepareReport) -> str:
    lines = []
    for corpus in report.corpora:
        dropped = ", ".join(f"{count:,} {reason}" for reason, count in sorted(corpus.dropped.items()) if count)
        line = f"{corpus.split:<5}  {corpus.name}: {corpus.kept:,} of {counted(corpus.read, 'pair')} kept"
        lines.append(f"{line}; dropped: {dropped}" if dropped else line)
        if corpus.aligned is not None:
            lines.append(f"       {counted(corpus.aligned, 'pair')} with word alignments")
        lines += [f"       of {name}: {licence}" for name, licence in corpus.licences.items()]
        if corpus.short_rows:
            lines.append(f"       {counted(corpus.short_rows, 'row')} left out for having too few columns")
        if corpus.changed:
            lines.append(f"       {' and '.join(corpus.changed)} changed since they were fetched; licences still apply")
        if corpus.repaired:
            lines.append(f"       {counted(corpus.repaired, 'pair')} mended")
        if corpus.carriage_returns:
            lines.append(f"       {counted(corpus.carriage_returns, 'line')} ended in CR LF; the CR was removed")
    source, target = report.source_vocabulary, report.target_vocabulary
    if report.joint_vocabulary:
        vocabulary = f"joint vocabulary: {counted(source, 'piece')}"
    else:
        vocabulary = f"vocabularies: {source:,} source and {target:,} target pieces"
    how = "already there, nothing to do" if report.reused else f"written in {duration(report.seconds)}"
    return "\n".join([*lines, f"store  {report.store}; {vocabulary}; {how}"])


def shortlist(
    store: Annotated[str, typer.Argument(help="Folder that `ziggurat prepare` wrote.")],
    output: Annotated[str, typer.Option(*OUT, metavar="FILE", help="File to write.")],
    best: Annotated[
        int, typer.Option("--best", min=0, help="Number of likely target pieces to keep per source piece.")
    ] = 100,
    frequent: Annotated[
        int, typer.Option("--frequent", min=0, help="Number of frequent target pieces to allow in every sentence.")
    ] = 100,
    floor: Annotated[
        float, typer.Option("--floor", min=0, max=1, help="Lowest probability of a target piece given a source piece.")
    ] = 1e-4,
    pairs: Annotated[int, typer.Option("--pairs", min=1, help="Maximum number of training pairs to read.")] = 200_000,
    json: Json = False,
) -> None:
    """Estimate a lexical shortlist from training pairs (IBM Model 1), for `decoding.shortlist`.

    Example: `ziggurat shortlist stores/de-en -o de-en.shortlist`
    """
    from ziggurat.data.corpus import Store
    from ziggurat.data.shortlist import estimate_shortlist, shortlist_bytes

    output = file_named(output)  # the shortlist is binary
    check_output(output)
    opened = Store.open(store)
    table = estimate_shortlist(opened, pairs=pairs, best=best, frequent=frequent, floor=floor)
    write_parts(output, [shortlist_bytes(table)])
    candidates = table.candidates
    report = {
        "shortlist": output,
        "pairs": min(pairs, len(opened.train)),
        "source_pieces": len(candidates),
        "target_pieces": opened.target.size,
        "mean_candidates": float((candidates < opened.target.size).sum() / len(candidates)),
        "always": len(table.always),
    }
    if json:
        print_json(report)
        return
    print(
        f"{output}: {report['mean_candidates']:.1f} of {opened.target.size:,} target pieces per source piece, "
        f"{len(table.always)} for every sentence; from {report['pairs']:,} pairs"
    )
