"""Arguments with tab completion: recipes, keys and methods (`ziggurat --install-completion`).

Completions are computed when the user presses tab, so help and verbs do not wait for them. Where there are none, shells
complete file names.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer


def _beginning(incomplete: str, words: Iterable[str]) -> list[str]:
    return [word for word in dict.fromkeys(words) if word.startswith(incomplete)]


def configurations(incomplete: str) -> list[str]:
    """Return recipes that start with `incomplete`."""
    from ziggurat.config.recipes import recipe_names

    return _beginning(incomplete, recipe_names())


def settings(incomplete: str) -> list[str]:
    """Return experiment keys that start with `incomplete`, each with `=`."""
    from ziggurat.config.reference import entries

    return _beginning(incomplete, (f"{_typed(entry.path)}=" for entry in entries() if entry.type != "section"))


def search_settings(incomplete: str) -> list[str]:
    """Return search keys that start with `incomplete`, each without `decoding.` and with `=`."""
    return [key.removeprefix("decoding.") for key in settings(f"decoding.{incomplete.removeprefix('decoding.')}")]


def pipeline_settings(incomplete: str) -> list[str]:
    """Return pipeline keys that start with `incomplete`, each with `=`."""
    from ziggurat.config.pipeline import PipelineConfig
    from ziggurat.config.reference import entries

    keys = (entry for entry in entries(PipelineConfig) if entry.type != "section")
    return _beginning(incomplete, (f"{_typed(entry.path)}=" for entry in keys))


def explained_names(incomplete: str) -> list[str]:
    """Return the keys, sections, methods, papers and terms known to `explain` that start with `incomplete`."""
    from ziggurat.config.choices import TERMS, choices
    from ziggurat.config.pipeline import PipelineConfig
    from ziggurat.config.recipes import paper_keys
    from ziggurat.config.reference import entries

    keys = (_typed(entry.path) for entry in (*entries(), *entries(PipelineConfig)))
    methods = (str(choice.value) for choice in choices() if choice.value)
    return _beginning(incomplete, (*keys, *methods, *paper_keys(), *(term.name for term in TERMS)))


def _typed(path: str) -> str:
    """Return a key as users type it, with the index of the first item for `[]`."""
    return path.replace("[]", ".0")


ConfigArgument = Annotated[
    str, typer.Argument(help="YAML file, or the name of a built-in recipe.", autocompletion=configurations)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Values that override the file: path.to.key=value.", autocompletion=settings),
]
DecodingOverrides = Annotated[
    list[str] | None,
    typer.Argument(help="Decoding settings: beam_size=8 length_penalty.alpha=1", autocompletion=search_settings),
]
