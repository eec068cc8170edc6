"""The systems of five papers as recipes: one file per paper, whose rows put fragments of configuration together."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import Field

from ziggurat.config.base import Section
from ziggurat.config.experiment import Experiment
from ziggurat.config.reference import entries
from ziggurat.config.yaml_text import parse_yaml, to_yaml

__all__ = ["Paper", "PaperRecipe", "Place", "Published", "find_paper_recipe", "paper_keys", "paper_recipes"]

_FOLDER = resources.files("ziggurat") / "recipes" / "papers"
_COMMENT_WIDTH = 116


class Paper(Section):
    """Where recipes come from."""

    key: str
    """What the names of its recipes begin with; the name of its file."""
    authors: str
    """Family names."""
    year: int
    """Of publication."""
    title: str
    """Title."""

    @property
    def short(self) -> str:
        """First author and year."""
        return f"{self.authors.split(',')[0]} et al. {self.year}"

    @property
    def citation(self) -> str:
        """Authors, year and title on one line."""
        return f"{self.authors} {self.year}: {self.title}"


class Published(Section):
    """What a paper reports of one system."""

    parameters: int | float | None = None
    """Parameters in millions: a whole number where the paper rounds to millions, else rounded to 0.1."""
    count_differs: str | None = None
    """Why the parameters of the recipe are not those published; null: they are, to rounding."""
    scores: dict[str, float] = Field(default_factory=dict)
    """Metric -> score. `bleu` is tokenised BLEU, `sacrebleu` BLEU on plain text."""
    costs: dict[str, float] = Field(default_factory=dict)
    """Times and the like, with the unit in the name."""
    fails: bool = False
    """The paper says that training failed."""

    @property
    def count(self) -> int | None:
        """The published number of parameters, not in millions."""
        return None if self.parameters is None else round(self.parameters * 10) * 100_000

    @property
    def rounding(self) -> int | None:
        """The unit, in parameters, that the published number was rounded to."""
        if self.parameters is None:
            return None
        return 1_000_000 if isinstance(self.parameters, int) else 100_000

    def words(self) -> str:
        """Return all of it on one line, nothing for nothing."""
        facts = [f"{self.parameters}M parameters"] if self.parameters is not None else []
        facts += [f"{name} {value}" for name, value in (*self.scores.items(), *self.costs.items())]
        return ", ".join([*facts, *(["training failed"] if self.fails else [])])

    def document(self) -> dict[str, Any]:
        """Return it for JSON, parameters not in millions."""
        return {
            "published_parameters": self.count,
            "published_parameters_rounded_to": self.rounding,
            "published_parameters_differ": self.count_differs,
            "published_scores": self.scores,
            "published_costs": self.costs,
            "published_failure": self.fails,
        }


class Place(Section):
    """One row of one table."""

    table: str
    """Heading of the table."""
    row: str | int
    """Its row, by number or name."""
    published: Published = Published()
    """What stands there."""

    def document(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {"table": self.table, "row": self.row, **self.published.document()}


class _Fragment(Section):
    """Part of a configuration that rows share."""

    comment: str | None = None
    """What a reader of the resolved recipe should know."""
    set: dict[str, Any]
    """Keys and values, as in a configuration file."""


class _Row(Place):
    """One system: its place in the paper and the fragments it is made of."""

    name: str
    system: str
    note: str | None = None
    also: list[Place] = Field(default_factory=list)
    use: list[str] = Field(min_length=1)
    set: dict[str, Any] = Field(default_factory=dict)


class _File(Section):
    """A file of ziggurat/recipes/papers."""

    paper: Paper
    fragments: dict[str, _Fragment]
    rows: list[_Row]


@dataclass(frozen=True)
class PaperRecipe:
    """One system of a paper.

    Attributes:
        name: of the recipe.
        paper: where it comes from.
        system: what it is, in words.
        place: its row, with what was published.
        also: other tables that the same system stands in.
        note: what to know about the published figures; None: nothing.
        comments: what to know about the settings.
        content: the configuration, as in a file.
    """

    name: str
    paper: Paper
    system: str
    place: Place
    also: tuple[Place, ...]
    note: str | None
    comments: tuple[str, ...]
    content: Mapping[str, Any]

    @property
    def summary(self) -> str:
        """One line: system, paper, table and row."""
        return f"{self.system} ({self.paper.short}, {self.place.table}: {self.place.row})"

    @property
    def places(self) -> tuple[Place, ...]:
        """Every table that it stands in, its own first."""
        return (self.place, *self.also)

    def document(self) -> dict[str, Any]:
        """Return all but the configuration for JSON."""
        return {
            "name": self.name,
            "summary": self.summary,
            "system": self.system,
            "paper": self.paper.citation,
            "paper_key": self.paper.key,
            **self.place.document(),
            "also": [place.document() for place in self.also],
            "note": self.note,
        }

    @property
    def data_source(self) -> str:
        """Where the corpora are to be had, in a sentence."""
        folder = Path(self.content["data"]["train"][0]["source"]).parent
        where = next(said for start, said in _CORPORA.items() if folder.name.startswith(start))
        return f"Data, to be put into {folder}/: {where}"

    def text(self) -> str:
        """Return the recipe as a configuration file that begins with comments."""
        lines = [self.summary, self.paper.citation, *map(_said, self.places)]
        lines += [*([f"Note: {self.note}"] if self.note else []), *self.comments, self.data_source]
        wrapped = [part for line in lines for part in textwrap.wrap(line, _COMMENT_WIDTH, break_on_hyphens=False)]
        return "".join(f"# {line}\n" for line in wrapped) + to_yaml(self.content, compact=True)


_CORPORA = {
    "wmt14": "parallel text and test sets of WMT 2014, https://www.statmt.org/wmt14/translation-task.html",
    "wmt15": "parallel text and test sets of WMT 2015, https://www.statmt.org/wmt15/translation-task.html",
    "wmt16": "parallel text and test sets of WMT 2016, https://www.statmt.org/wmt16/translation-task.html",
    "wmt18": "parallel text and test sets of WMT 2018, https://www.statmt.org/wmt18/translation-task.html",
    "iwslt14": "the TED talks of IWSLT 2014 (WIT3), https://wit3.fbk.eu/2014-01",
    "zh-en-small": "bitext of NIST OpenMT 2012, from the Linguistic Data Consortium for a fee, https://www.ldc.upenn.edu",
    "zh-en-large": "CWMT, UN and News Commentary of WMT 2018, https://www.statmt.org/wmt18/translation-task.html",
}
"""Where the corpora of the papers are to be had, by how their folder's name begins."""


def _said(place: Place) -> str:
    """Return what was published there, in words; nothing for nothing."""
    published = place.published
    differs = f"; {published.count_differs}" if published.count_differs else ""
    return f"Published, {place.table}: {place.row}: {published.words()}{differs}" if published.words() else ""


def paper_keys() -> list[str]:
    """Return the keys of the papers, sorted."""
    return sorted(file.name.removesuffix(".yaml") for file in _FOLDER.iterdir() if file.name.endswith(".yaml"))


@cache
def paper_recipes(key: str) -> Mapping[str, PaperRecipe]:
    """Return the recipes of the paper `key` by name, in the order of its tables."""
    content, _ = parse_yaml((_FOLDER / f"{key}.yaml").read_text(encoding="utf-8"), f"recipes/papers/{key}.yaml")
    file = _File.model_validate(content)
    return {row.name: _resolve(file, row) for row in file.rows}


def find_paper_recipe(name: str) -> PaperRecipe | None:
    """Return the recipe of that name, None where no paper has it; reads one file at most."""
    keys = [key for key in paper_keys() if name.startswith(f"{key}-")]
    return paper_recipes(keys[0]).get(name) if keys else None


def _resolve(file: _File, row: _Row) -> PaperRecipe:
    content: dict[str, Any] = {}
    used = [file.fragments[name] for name in row.use]
    for part in (*(fragment.set for fragment in used), row.set):
        content = _merged(content, part)
    return PaperRecipe(
        row.name,
        file.paper,
        row.system,
        Place(table=row.table, row=row.row, published=row.published),
        tuple(row.also),
        row.note,
        tuple(fragment.comment for fragment in used if fragment.comment),
        _ordered(content),
    )


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return `old` with `new` over it; mappings are merged, anything else is replaced."""
    merged = dict(old)
    for key, value in new.items():
        before = merged.get(key)
        merged[key] = _merged(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return merged


@cache
def _positions() -> Mapping[str, int]:
    return {entry.path.replace("[]", ""): number for number, entry in enumerate(entries(Experiment))}


def _ordered(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return `content` in the order of the configuration reference."""
    keys = sorted(content, key=lambda key: _positions().get(prefix + key, len(_positions())))
    return {
        key: _ordered(value, f"{prefix}{key}.") if isinstance(value := content[key], Mapping) else value for key in keys
    }
