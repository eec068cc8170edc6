"""Built-in configurations: the YAML files in ziggurat/recipes, and the systems of papers (ziggurat.config.papers)."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from ziggurat.config.experiment import Experiment
from ziggurat.config.load import parse_experiment, read_config
from ziggurat.config.papers import PaperRecipe, find_paper_recipe, paper_keys, paper_recipes
from ziggurat.config.small import SUFFIX, SmallCorpus, small_text
from ziggurat.system.errors import ConfigError, printable

_FOLDER = resources.files("ziggurat") / "recipes"


def plain_recipe_names() -> list[str]:
    """Return the names of the recipes that belong to no paper, sorted; each is one file."""
    return sorted(f.name.removesuffix(".yaml") for f in _FOLDER.iterdir() if f.name.endswith(".yaml"))


def recipe_names() -> list[str]:
    """Return the names of all built-in recipes: the plain ones, then those of each paper in the order of its tables."""
    return [*plain_recipe_names(), *(name for key in paper_keys() for name in paper_recipes(key))]


def find_small_recipe(name: str) -> PaperRecipe | None:
    """Return the paper's recipe that `name`, such as `NAME-small`, is the small form of; None where it is none."""
    return find_paper_recipe(name.removesuffix(SUFFIX)) if name.endswith(SUFFIX) else None


def recipe_text(name: str, *, corpus: SmallCorpus | None = None) -> str:
    """Return the YAML text of a recipe. Raises ConfigError for an unknown name, with the nearest ones.

    `corpus` is what a small one trains on, by default the embedded language pair.
    """
    text = _text(name, corpus)
    if text is None:
        near = _near(name, 0.4) or plain_recipe_names()
        raise ConfigError(f"no recipe `{name}`; did you mean {', '.join(f'`{n}`' for n in near)}?")
    return text


def _near(name: str, cutoff: float) -> list[str]:
    return difflib.get_close_matches(name, [*paper_keys(), *recipe_names()], n=3, cutoff=cutoff)


def _text(name: str, corpus: SmallCorpus | None = None) -> str | None:
    if name in plain_recipe_names():
        return (_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    if (full := find_small_recipe(name)) is not None:
        return small_text(full, corpus)
    recipe = find_paper_recipe(name)
    return None if recipe is None else recipe.text()


def recipe_summary(name: str) -> str:
    """Return a recipe in one line; for a plain one, its first comment. Raises ConfigError for an unknown name."""
    recipe = find_paper_recipe(name)
    return recipe.summary if recipe else recipe_text(name).splitlines()[0].removeprefix("#").strip()


class NamedText(NamedTuple):
    """The text of a configuration: that of the user's file, or of the built-in recipe `recipe`.

    `label` is its name in errors.
    """

    text: str
    label: str
    recipe: str | None


def load_named(name: str, overrides: Sequence[str] = ()) -> Experiment:
    """Load the configuration file `name`, or the built-in recipe of that name where there is no such file."""
    named = read_named(name)
    return parse_experiment(named.text, named.label, overrides)


def read_named(name: str) -> NamedText:
    """Return the text that `load_named` loads; a pipe can be read only once. Raises ConfigError where there is none."""
    if not Path(name).is_file():
        if (text := _text(name)) is not None:
            return NamedText(text, f"recipe {name}", name)
        if not Path(name).exists() and not Path(name).suffix:
            near = _near(name, 0.7)
            hint = f"did you mean the recipe `{near[0]}`?" if near else "`ziggurat recipes` lists the built-in ones"
            raise ConfigError(f"{printable(name)}: neither a file nor a recipe; {hint}")
    return NamedText(read_config(name, piped=True), name, None)
