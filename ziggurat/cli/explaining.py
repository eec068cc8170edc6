"""The verb explain: keys of the configuration, methods and papers, by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ziggurat.cli.output import Json, print_json
from ziggurat.config.choices import (
    NamedChoice,
    choices_named,
    explained,
    methods_of_paper,
    names_like,
    recipes_with,
    refused_with,
    resembling,
)
from ziggurat.config.papers import paper_keys, paper_recipes
from ziggurat.config.recipes import find_small_recipe, recipe_names
from ziggurat.config.reference import KeyDescription
from ziggurat.system.errors import ConfigError, printable

_SHOWN = 3
"""Names of a list that are printed where it is long; `--json` has all."""


def explain(
    name: Annotated[
        str,
        typer.Argument(help="Key or section, such as training.schedule; or a method, such as DLCL or muon."),
    ] = "",
    json: Json = False,
) -> None:
    """Explain a key, a method or a paper: what it means, who published it, and which keys and recipes have it.

    Keys are those of an experiment and of a pipeline. A method is found by the value that chooses it and by its usual
    names, whatever their case and punctuation.

    Example: `ziggurat explain training.schedule`, `ziggurat explain "merged attention"`, `ziggurat explain sdt`
    """
    key = re.sub(r"\.\d+(?=\.|$)", "[]", name)  # data.train.0.weight: any item of the list
    entries, choices = explained(key), choices_named(name)
    paper = next((key for key in paper_keys() if key == name.casefold()), None)
    if not entries and not choices and paper is None:
        raise ConfigError(_unknown(name))
    if json:
        papers = [_paper_document(paper)] if paper else []
        print_json([*(e._asdict() for e in entries), *papers, *map(_document, choices)])
        return
    parts = [*map(_entry_text, entries), *([_explained_paper(paper)] if paper else []), *map(_choice_text, choices)]
    print("\n".join(parts))


def _unknown(name: str) -> str:
    if name in recipe_names() or find_small_recipe(name) is not None:
        return f"`{name}` is a recipe: `ziggurat recipes {name}` prints it"
    methods = [] if "." in name else names_like(name)
    near = [*methods, *(key for key in resembling(name) if key not in methods)]
    what = "key" if "." in name else "key or method"
    return f"no {what} `{printable(name)}`; did you mean {', '.join(f'`{n}`' for n in near)}?"


def _entry_text(entry: KeyDescription) -> str:
    kind = entry.type if entry.type == "section" else f"{entry.type}; default: {entry.default}"
    return f"{entry.path}  ({kind})\n    {entry.meaning}"


def _choice_text(choice: NamedChoice) -> str:
    found = recipes_with(choice)
    facts = {
        "also set by": ", ".join(choice.keys[1:]),
        "paper": _published(choice) if choice.paper else f"none: {choice.reason}",
        "options": ", ".join(choice.options),
        "means something with": _by_key(choice.heeded_with),
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
    """Return choices such as `model.init.kind: admin` with each key named once."""
    values: dict[str, list[str]] = {}
    for choice in chosen:
        key, *value = choice.split(": ")
        values.setdefault(key, []).extend(value)
    return "; ".join(f"{key}: {', '.join(of_key)}" if of_key else key for key, of_key in values.items())


def _first(names: Sequence[str]) -> str:
    """Return the first of some names and the number of the others; "" where there are none."""
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
    return "\n    ".join([*lines, "more: docs/recipes.md#systems-of-papers"])


def _paper_document(key: str) -> dict[str, Any]:
    return {
        "paper_key": key,
        "paper": next(iter(paper_recipes(key).values())).paper.citation,
        "methods": [choice.name for choice in methods_of_paper(key)],
        "recipes": list(paper_recipes(key)),
        "page": "docs/recipes.md#systems-of-papers",
    }
