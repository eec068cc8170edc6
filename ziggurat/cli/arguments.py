"""Arguments that tabs complete: recipes, keys and methods, once `ziggurat --install-completion` has told the shell.

What is offered is looked up when a tab asks for it, so neither help nor a verb waits for it. Where nothing is offered,
shells complete the names of files.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer


def _beginning(incomplete: str, words: Iterable[str]) -> list[str]:
    return [word for word in dict.fromkeys(words) if word.startswith(incomplete)]


def configurations(incomplete: str) -> list[str]:
    """Return recipes that begin so."""
    from ziggurat.config.recipes import recipe_names

    return _beginning(incomplete, recipe_names())


def settings(incomplete: str) -> list[str]:
    """Return keys of an experiment that begin so, each with `=`."""
    from ziggurat.config.reference import entries

    return _beginning(incomplete, (f"{_typed(entry.path)}=" for entry in entries() if entry.type != "section"))


def search_settings(incomplete: str) -> list[str]:
    """Return keys of the search that begin so, without `decoding.`, each with `=`."""
    return [key.removeprefix("decoding.") for key in settings(f"decoding.{incomplete.removeprefix('decoding.')}")]


def pipeline_settings(incomplete: str) -> list[str]:
    """Return keys of a pipeline that begin so, each with `=`."""
    from ziggurat.config.pipeline import PipelineConfig
    from ziggurat.config.reference import entries

    keys = (entry for entry in entries(PipelineConfig) if entry.type != "section")
    return _beginning(incomplete, (f"{_typed(entry.path)}=" for entry in keys))


def explained_names(incomplete: str) -> list[str]:
    """Return what `explain` knows that begins so: keys and sections of experiments and pipelines, methods, papers."""
    from ziggurat.config.choices import choices
    from ziggurat.config.pipeline import PipelineConfig
    from ziggurat.config.recipes import paper_keys
    from ziggurat.config.reference import entries

    keys = (_typed(entry.path) for entry in (*entries(), *entries(PipelineConfig)))
    methods = (str(choice.value) for choice in choices() if choice.value)
    return _beginning(incomplete, (*keys, *methods, *paper_keys()))


def _typed(path: str) -> str:
    """Return a key as it is typed: the first item of a list stands for all."""
    return path.replace("[]", ".0")


ConfigArgument = Annotated[
    str, typer.Argument(help="YAML file, or the name of a built-in recipe.", autocompletion=configurations)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Values that replace the file's: path.to.key=value.", autocompletion=settings),
]
DecodingOverrides = Annotated[
    list[str] | None,
    typer.Argument(help="Decoding settings: beam_size=8 length_penalty.alpha=1", autocompletion=search_settings),
]
