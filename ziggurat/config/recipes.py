"""Built-in configurations: one YAML file each under ziggurat/recipes."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from ziggurat.config.experiment import Experiment
from ziggurat.config.load import load_experiment, parse_experiment
from ziggurat.errors import ConfigError

__all__ = ["load_named", "recipe_names", "recipe_summary", "recipe_text"]

_FOLDER = resources.files("ziggurat") / "recipes"


def recipe_names() -> list[str]:
    """Return the names of the built-in recipes, sorted."""
    return sorted(f.name.removesuffix(".yaml") for f in _FOLDER.iterdir() if f.name.endswith(".yaml"))


def recipe_text(name: str) -> str:
    """Return the YAML text of a recipe. Raises ConfigError for an unknown name, with the nearest ones."""
    if name not in recipe_names():
        near = difflib.get_close_matches(name, recipe_names(), n=3, cutoff=0.4) or recipe_names()
        raise ConfigError(f"no recipe `{name}`; did you mean {', '.join(f'`{n}`' for n in near)}?")
    return (_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")


def recipe_summary(name: str) -> str:
    """Return the first comment line of a recipe."""
    return recipe_text(name).splitlines()[0].removeprefix("#").strip()


def load_named(name: str, overrides: Sequence[str] = ()) -> Experiment:
    """Load a configuration file, or, where no such file exists, the built-in recipe of that name."""
    if not Path(name).is_file() and name in recipe_names():
        return parse_experiment(recipe_text(name), f"recipe {name}", overrides)
    return load_experiment(name, overrides)
