"""Recipes for the systems of five papers: one file per paper, each row of its tables composed of fragments.

A file of ziggurat/recipes/papers names the paper, fragments of configuration, and for each system the fragments to
merge, in order, together with the figures that the paper reports.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import Field

from ziggurat.config.base import Section, joined
from ziggurat.config.experiment import Experiment
from ziggurat.config.reference import entries
from ziggurat.system.yaml_text import parse_yaml, to_yaml

_FOLDER = resources.files("ziggurat") / "recipes" / "papers"
_COMMENT_WIDTH = 116


class Paper(Section):
    """The paper that recipes come from."""

    key: str
    """Beginning of its recipes' names, and the name of its file."""
    authors: str
    """Family names."""
    year: int
    """Year of publication."""
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
    """Figures that a paper reports about one system."""

    parameters: int | float | None = None
    """Parameters in millions: an integer where the paper rounds to millions, else rounded to 0.1."""
    count_differs: str | None = None
    """Reason why the recipe has another number of parameters than published; null: it has the same, to rounding."""
    scores: dict[str, float] = Field(default_factory=dict)
    """Metric -> score. `bleu` is tokenised BLEU, `sacrebleu` BLEU on plain text."""
    costs: dict[str, float] = Field(default_factory=dict)
    """Times and the like, with the unit in the name."""
    saving_differs: str | None = None
    """Reason why growing saves another share of layer passes than the published share of time; null: it saves that
    share, to three points."""
    fails: bool = False
    """True if the paper reports that training failed."""

    @property
    def count(self) -> int | None:
        """Published number of parameters, in full."""
        return None if self.parameters is None else round(self.parameters * 10) * 100_000

    @property
    def rounding(self) -> int | None:
        """Unit that the published number was rounded to, in parameters."""
        if self.parameters is None:
            return None
        return 1_000_000 if isinstance(self.parameters, int) else 100_000

    def words(self) -> str:
        """Return all figures on one line, an empty one where there are none."""
        facts = [f"{self.parameters}M parameters"] if self.parameters is not None else []
        facts += [f"{name} {value}" for name, value in (*self.scores.items(), *self.costs.items())]
        return ", ".join([*facts, *(["training failed"] if self.fails else [])])

    def document(self) -> dict[str, Any]:
        """Return the figures for JSON, with parameters in full."""
        return {
            "published_parameters": self.count,
            "published_parameters_rounded_to": self.rounding,
            "published_parameters_differ": self.count_differs,
            "published_scores": self.scores,
            "published_costs": self.costs,
            "published_saving_differs": self.saving_differs,
            "published_failure": self.fails,
        }


class TableRow(Section):
    """One row of a table in a paper."""

    table: str
    """Heading of the table."""
    row: str | int
    """Number or name of the row."""
    published: Published = Published()
    """Figures in the row."""

    def document(self) -> dict[str, Any]:
        """Return the row for JSON."""
        return {"table": self.table, "row": self.row, **self.published.document()}


class _Fragment(Section):
    """Part of a configuration, shared by several systems."""

    comment: str | None = None
    """Comment for readers of the resolved recipe."""
    set: dict[str, Any]
    """Keys and values, as in a configuration file."""


class SystemRow(TableRow):
    """One system of a paper: its main row, other rows with the same system, and its fragments."""

    name: str
    """Name of the recipe."""
    system: str
    """The system, in words."""
    note: str | None = None
    """A remark on the published figures."""
    also: list[TableRow] = Field(default_factory=list)
    use: list[str] = Field(min_length=1)
    set: dict[str, Any] = Field(default_factory=dict)


class _PaperFile(Section):
    paper: Paper
    fragments: dict[str, _Fragment]
    rows: list[SystemRow]


@dataclass(frozen=True)
class PaperRecipe:
    """One system of a paper, as a recipe."""

    paper: Paper
    table_row: SystemRow
    comments: tuple[str, ...]
    """Remarks on the settings."""
    content: Mapping[str, Any]
    """The configuration, as in a file."""

    @property
    def name(self) -> str:
        """Name of the recipe."""
        return self.table_row.name

    @property
    def summary(self) -> str:
        """One line: system, paper, table and row."""
        return f"{self.table_row.system} ({self.paper.short}, {self.table_row.table}: {self.table_row.row})"

    @property
    def table_rows(self) -> tuple[TableRow, ...]:
        """All rows with this system, the main one first."""
        return (self.table_row, *self.table_row.also)

    def document(self) -> dict[str, Any]:
        """Return everything but the configuration for JSON."""
        return {
            "name": self.name,
            "summary": self.summary,
            "system": self.table_row.system,
            "paper": self.paper.citation,
            "paper_key": self.paper.key,
            **self.table_row.document(),
            "also": [row.document() for row in self.table_row.also],
            "note": self.table_row.note,
        }

    @property
    def data_source(self) -> str:
        """The source of the corpora and the folder to put them into, in a sentence."""
        folder = Path(self.content["data"]["train"][0]["source"]).parent
        source = next(source for start, source in _CORPORA.items() if folder.name.startswith(start))
        return f"Data, to be put into {folder}/: {source}. `ziggurat fetch {self.name}` gets what of it is free."

    def text(self) -> str:
        """Return the recipe as a configuration file, which begins with comments."""
        lines = [self.summary, self.paper.citation, *map(_published, self.table_rows)]
        lines += [*([f"Note: {note}"] if (note := self.table_row.note) else []), *self.comments, self.data_source]
        return as_comments(lines) + to_yaml(self.content, compact=True)


_CORPORA = {
    "wmt14": "parallel text and test sets of WMT 2014, https://www.statmt.org/wmt14/translation-task.html",
    "wmt15": "parallel text and test sets of WMT 2015, https://www.statmt.org/wmt15/translation-task.html",
    "wmt16": "parallel text and test sets of WMT 2016, https://www.statmt.org/wmt16/translation-task.html",
    "wmt18": "parallel text and test sets of WMT 2018, https://www.statmt.org/wmt18/translation-task.html",
    "iwslt14": "the TED talks of IWSLT 2014 (WIT3), https://wit3.fbk.eu/2014-01",
    "zh-en-small": "bitext of NIST OpenMT 2012, from the Linguistic Data Consortium for a fee, https://www.ldc.upenn.edu",
    "zh-en-large": "CWMT, UN and News Commentary of WMT 2018, https://www.statmt.org/wmt18/translation-task.html",
}
"""Sources of the papers' corpora, by the beginning of the folder's name."""


def as_comments(lines: Iterable[str]) -> str:
    """Return lines as comments of YAML, long ones wrapped."""
    wrapped = [part for line in lines for part in textwrap.wrap(line, _COMMENT_WIDTH, break_on_hyphens=False)]
    return "".join(f"# {line}\n" for line in wrapped)


def _published(row: TableRow) -> str:
    published = row.published
    differs = "".join(f"; {why}" for why in (published.count_differs, published.saving_differs) if why)
    return f"Published, {row.table}: {row.row}: {published.words()}{differs}" if published.words() else ""


def paper_keys() -> list[str]:
    """Return the keys of the papers, sorted."""
    return sorted(file.name.removesuffix(".yaml") for file in _FOLDER.iterdir() if file.name.endswith(".yaml"))


@cache
def paper_recipes(key: str) -> Mapping[str, PaperRecipe]:
    """Return the recipes of the paper `key` by name, in the order of its tables; a file is parsed only once."""
    content, _ = parse_yaml((_FOLDER / f"{key}.yaml").read_text(encoding="utf-8"), f"recipes/papers/{key}.yaml")
    file = _PaperFile.model_validate(content)
    return {row.name: _resolve(file, row) for row in file.rows}


def find_paper_recipe(name: str) -> PaperRecipe | None:
    """Return the recipe called `name`, None where no paper has it; reads one file at most."""
    keys = [key for key in paper_keys() if name.startswith(f"{key}-")]
    return paper_recipes(keys[0]).get(name) if keys else None


def _resolve(file: _PaperFile, row: SystemRow) -> PaperRecipe:
    """Merge the fragments of a system in their order, its own settings last."""
    content: dict[str, Any] = {}
    used = [file.fragments[name] for name in row.use]
    for part in (*(fragment.set for fragment in used), row.set):
        content = joined(content, part)
    comments = tuple(fragment.comment for fragment in used if fragment.comment)
    # Merging leaves the keys in the order of the fragments, which no reader expects.
    return PaperRecipe(file.paper, row, comments, ordered(content))


@cache
def _positions() -> Mapping[str, int]:
    return {entry.path.replace("[]", ""): number for number, entry in enumerate(entries(Experiment))}


def ordered(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return `content` in the order of the configuration reference."""
    keys = sorted(content, key=lambda key: _positions().get(prefix + key, len(_positions())))
    return {
        key: ordered(value, f"{prefix}{key}.") if isinstance(value := content[key], Mapping) else value for key in keys
    }
