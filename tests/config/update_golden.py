"""Rewrites the golden dumps of the recipes: `python -m tests.config.update_golden`, then review the diff."""

from __future__ import annotations

from pathlib import Path

from ziggurat.config import dump
from ziggurat.config.recipes import load_named, recipe_names

if __name__ == "__main__":
    folder = Path(__file__).parent / "golden"
    for old in folder.glob("*.yaml"):
        old.unlink()
    for name in recipe_names():
        (folder / f"{name}.yaml").write_text(dump(load_named(name)), encoding="utf-8")
