"""Rewrites the golden dumps of the recipes: `python -m tests.config.update_golden`, then review the diff."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ziggurat.config import Experiment, dump
from ziggurat.config.recipes import load_named, paper_keys, paper_recipes, plain_recipe_names
from ziggurat.system.yaml_text import to_yaml

GOLDEN = Path(__file__).parent / "golden"
CORPORA = ("data.train", "data.dev", "data.store")


@cache
def load_once(name: str) -> Experiment:
    """Return the recipe, which is read only once."""
    return load_named(name)


def paper_dump(key: str) -> str:
    """Return what a paper's recipes resolve to: keys that are equal in all, and value counts for the others."""
    resolved = [dict(_flat(load_once(name).model_dump(mode="json"))) for name in paper_recipes(key)]
    common: dict[str, Any] = {}
    varying: dict[str, dict[str, int]] = {}
    for path in dict.fromkeys(path for keys in resolved for path in keys if path not in CORPORA):
        values = Counter(json.dumps(keys[path]) if path in keys else "no such section" for keys in resolved)
        if len(values) == 1:
            common[path] = resolved[0][path]
        else:
            varying[path] = dict(values)
    return to_yaml({"recipes": len(resolved), "common": common, "varying": varying})


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


if __name__ == "__main__":
    for old in (*GOLDEN.glob("*.yaml"), *GOLDEN.glob("papers/*.yaml")):
        old.unlink()
    for plain in plain_recipe_names():
        (GOLDEN / f"{plain}.yaml").write_text(dump(load_named(plain)), encoding="utf-8")
    (GOLDEN / "papers").mkdir(exist_ok=True)
    for paper in paper_keys():
        (GOLDEN / "papers" / f"{paper}.yaml").write_text(paper_dump(paper), encoding="utf-8")
