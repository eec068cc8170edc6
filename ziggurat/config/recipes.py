"""Built-in recipes: papers' systems, composed of fragments; plain files; and small forms of papers' recipes."""

from __future__ import annotations

import copy
import difflib
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from pydantic import Field

from ziggurat.config.experiment import Experiment
from ziggurat.config.load import parse_experiment, read_config
from ziggurat.config.model import PRESETS
from ziggurat.config.reference import entries
from ziggurat.config.section import Section, joined
from ziggurat.system.errors import ConfigError, printable
from ziggurat.system.yaml_text import parse_yaml, to_yaml

_FOLDER = resources.files("ziggurat") / "recipes" / "papers"
_COMMENT_WIDTH = 116


class Paper(Section):
    """The paper that recipes come from."""

    key: str
    """Prefix of its recipes' names, and the name of its file."""
    authors: str
    """Family names."""
    year: int
    title: str

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
    """Parameters in millions: an integer if the paper rounds to millions, otherwise rounded to 0.1."""
    count_differs: str | None = None
    """Reason why the recipe's parameter count differs from the published one; null: equal after rounding."""
    scores: dict[str, float] = Field(default_factory=dict)
    """Metric -> score. `bleu` is tokenised BLEU, `sacrebleu` BLEU on plain text."""
    costs: dict[str, float] = Field(default_factory=dict)
    """Times and the like, with the unit in the name."""
    saving_differs: str | None = None
    """Reason why growing saves a different share of layer passes than of published time; null: within 3 points."""
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
        """Return all figures on one line, which is empty if there are none."""
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
    row: str | int
    published: Published = Published()

    def document(self) -> dict[str, Any]:
        """Return the row for JSON."""
        return {"table": self.table, "row": self.row, **self.published.document()}


class _Fragment(Section):
    comment: str | None = None  # shown in the resolved recipe
    set: dict[str, Any]


class SystemRow(TableRow):
    """One system of a paper: its main row, other rows for the same system, and its fragments."""

    name: str
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
        """All rows for this system, the main one first."""
        return (self.table_row, *self.table_row.also)

    def document(self) -> dict[str, Any]:
        """Return everything except the configuration for JSON."""
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
        """A sentence that names the corpora's source and the folder for them."""
        folder = Path(self.content["data"]["train"][0]["source"]).parent
        source = next(source for start, source in _CORPORA.items() if folder.name.startswith(start))
        return f"Data, expected in {folder}/: {source}. `ziggurat fetch {self.name}` fetches the free parts."

    def text(self) -> str:
        """Return the recipe as a configuration file that begins with comments."""
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
"""_CORPORA maps the prefix of a folder's name to the source of the corpora."""


def _yaml_names(folder: Traversable) -> list[str]:
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))


def as_comments(lines: Iterable[str]) -> str:
    """Return lines as YAML comments, with long ones wrapped."""
    wrapped = [part for line in lines for part in textwrap.wrap(line, _COMMENT_WIDTH, break_on_hyphens=False)]
    return "".join(f"# {line}\n" for line in wrapped)


def _published(row: TableRow) -> str:
    published = row.published
    differs = "".join(f"; {why}" for why in (published.count_differs, published.saving_differs) if why)
    return f"Published, {row.table}: {row.row}: {published.words()}{differs}" if published.words() else ""


def paper_keys() -> list[str]:
    """Return the keys of the papers, sorted."""
    return _yaml_names(_FOLDER)


@cache
def paper_recipes(key: str) -> Mapping[str, PaperRecipe]:
    """Return the recipes of the paper `key` by name, in the order of its tables; a file is parsed only once."""
    content, _ = parse_yaml((_FOLDER / f"{key}.yaml").read_text(encoding="utf-8"), f"recipes/papers/{key}.yaml")
    file = _PaperFile.model_validate(content)
    return {row.name: _resolve(file, row) for row in file.rows}


def find_paper_recipe(name: str) -> PaperRecipe | None:
    """Return the recipe called `name`, or None if no paper has it; reads at most one file."""
    keys = [key for key in paper_keys() if name.startswith(f"{key}-")]
    return paper_recipes(keys[0]).get(name) if keys else None


def _resolve(file: _PaperFile, row: SystemRow) -> PaperRecipe:
    content: dict[str, Any] = {}
    used = [file.fragments[name] for name in row.use]
    for part in (*(fragment.set for fragment in used), row.set):
        content = joined(content, part)
    comments = tuple(fragment.comment for fragment in used if fragment.comment)
    # Merging leaves the keys in the fragments' order, which would surprise readers.
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


SUFFIX = "-small"
"""SUFFIX is the end of a small recipe's name."""

_UPDATES = 600
_WARMUP = 120
_TOKENS = 512
_PIECES = 1200
_NARROWER = 4
_FEWER_HEADS = 2
_DEEP = 12
_DIVISORS = {"d_model": _NARROWER, "d_ff": _NARROWER, "heads": _FEWER_HEADS}
_CHECKPOINTS = 50
_VALIDATIONS = 6
_MEASUREMENTS = 12


class SmallCorpus(NamedTuple):
    """Parallel text to train a small recipe on, by default the embedded language pair.

    `train` and `dev` are pairs of source and target; `languages` is None to keep the recipe's.
    """

    train: tuple[str, str] = ("data/babel/train.qlo", "data/babel/train.qhi")
    dev: tuple[str, str] = ("data/babel/dev.qlo", "data/babel/dev.qhi")
    languages: tuple[str, str] | None = ("qlo", "qhi")


def _sizes(content: dict[str, Any]) -> None:
    model = content["model"]
    whole = {**PRESETS[model.pop("preset", "base")], **model}  # without a preset, the defaults are those of `base`
    model |= {key: whole[key] for key in _DIVISORS if key != "d_ff" or model.get("family") != "rnmt"}
    for stack in (model, model.get("encoder", {}), model.get("decoder", {})):
        stack |= {key: stack[key] // divisor for key, divisor in _DIVISORS.items() if stack.get(key) is not None}


def _vocabulary(content: dict[str, Any]) -> None:
    subword = content["data"]["subword"]
    for key in ("vocabulary_size", "target_vocabulary_size"):
        if subword.get(key) is not None:
            subword[key] = _PIECES


def _batch(content: dict[str, Any]) -> None:
    content["training"]["batch"] |= {"max_tokens": _TOKENS, "accumulate": 1}


def _rate(content: dict[str, Any]) -> None:
    schedule = content["training"]["schedule"]
    if schedule["kind"] == "noam":  # peak = factor / sqrt(d_model * warm-up); d_model is already the small width
        narrower_and_sooner = _NARROWER * schedule["warmup_updates"] / _WARMUP
        deep = content["model"]["decoder"]["layers"] > _DEEP
        schedule["factor"] = float(f"{schedule['factor'] / (2 if deep else 1) / math.sqrt(narrower_and_sooner):.4g}")


def _warmup(content: dict[str, Any]) -> None:
    schedule, stop = content["training"]["schedule"], content["training"]["stop"]
    schedule["warmup_updates"] = _WARMUP // schedule.get("replicas", 1)
    for key in ("decay_start", "decay_end"):  # gnmt+: counted in batches over all replicas
        if key in schedule:
            schedule[key] = round(schedule[key] * _UPDATES / stop["updates"])


def _growth(content: dict[str, Any]) -> None:
    if growth := content["training"].get("growth"):
        longer = content["training"]["stop"]["updates"] / _UPDATES
        growth["stages"] = [{**stage, "updates": round(stage["updates"] / longer)} for stage in growth["stages"]]


def _length(content: dict[str, Any]) -> None:
    content["training"]["stop"] = {"updates": _UPDATES}


def _cadence(content: dict[str, Any]) -> None:
    training = content["training"]
    for section, times in (("checkpoint", _CHECKPOINTS), ("validation", _VALIDATIONS)):
        training[section].pop("every_epochs", None)
        training[section]["every_updates"] = _UPDATES // times
    training["validation"]["max_sentences"] = 100
    training["log_every_updates"] = _UPDATES // _CHECKPOINTS


def _measures(content: dict[str, Any]) -> None:
    measures = content["training"].setdefault("diagnostics", {})
    measures |= {"every_updates": _UPDATES // _MEASUREMENTS, "max_share": None}


def _precision(content: dict[str, Any]) -> None:
    content["training"].pop("precision", None)


def _search(content: dict[str, Any]) -> None:
    content["decoding"]["max_length"] |= {"ratio": 2.0, "extra": 10}


RULES: tuple[tuple[str, Callable[[dict[str, Any]], None]], ...] = (
    (
        f"Width and inner width are 1/{_NARROWER} (`base`: 128), heads 1/{_FEWER_HEADS}, so that deep models take "
        "minutes; the depth is unchanged.",
        _sizes,
    ),
    (f"Vocabularies have {_PIECES:,} pieces, since there is less text to learn them from.", _vocabulary),
    (f"Each update is one batch of {_TOKENS} tokens: in a few minutes, many small updates teach a model more.", _batch),
    (
        "The factor of `noam` gives the paper's highest rate at the new width and warm-up; the paper's factor would "
        "give 12 to 37 times as much. It is halved if the decoder has more than "
        f"{_DEEP} layers, which bear less in such updates: DS-Init at 18-18 stalls at the full rate and trains "
        "at half; plain post-norm stalls at both. Other schedules state their highest rate, which is unchanged.",
        _rate,
    ),
    (
        f"The warm-up has {_WARMUP} updates, a fifth of all, as in the papers' deep runs; with the proportions of the "
        "shallow runs it would be too short for Adam's moments. A decay begins and ends at the same share of updates.",
        _warmup,
    ),
    ("Stages of growth end at the same share of all updates.", _growth),
    (
        f"Training ends after {_UPDATES} updates: enough to see what trains and what does not, not to rank methods.",
        _length,
    ),
    (
        f"{_CHECKPOINTS} checkpoints, so that an average of the last 5 or 10 covers a tenth or a fifth of training, "
        f"as in the papers; {_VALIDATIONS} validations, each of which translates 100 sentences.",
        _cadence,
    ),
    (f"Depth is measured {_MEASUREMENTS} times, whatever share of the time that takes, for the figures.", _measures),
    ("Precision is fp32, the fastest for small products on a CPU.", _precision),
    ("A translation has at most twice its source's tokens plus 10: a failed model ends none by itself.", _search),
)
"""RULES are the changes in order, each with its reason: rates and growth need the paper's original lengths."""


def small_content(full: Mapping[str, Any], corpus: SmallCorpus | None = None) -> tuple[dict[str, Any], list[str]]:
    """Return the small form of a paper's recipe `full`, and the reasons given by the rules that changed it.

    It trains on `corpus`, by default the embedded language pair.
    """
    own, corpus = corpus is not None, corpus or SmallCorpus()
    content = copy.deepcopy(dict(full))
    data = content["data"]
    if corpus.languages is not None:
        data["source_language"], data["target_language"] = corpus.languages
    place = PurePosixPath("stores/small") / PurePosixPath(data["store"]).relative_to("stores")
    # A different corpus must not replace the embedded pair's store.
    data["store"] = str(place.with_name(f"{place.name}-own") if own else place)
    if (start := content["training"].get("start_from")) is not None:  # then start from the small form of that model
        content["training"]["start_from"] = start.replace("runs/", "runs/small/", 1)
    for split, (source, target) in (("train", corpus.train), ("dev", corpus.dev)):
        data[split] = [{"source": source, "target": target}]
    reasons = []
    for reason, change in RULES:
        before = copy.deepcopy(content)
        change(content)
        reasons += [reason] if content != before else []
    return ordered(content), reasons


def _small_text(recipe: PaperRecipe, corpus: SmallCorpus | None = None) -> str:
    content, reasons = small_content(recipe.content, corpus)
    lines = [
        f"Small: {recipe.summary}",
        recipe.paper.citation,
        f"The method and its settings are those of `{recipe.name}`, except for these keys (docs/papers.md):",
        *(f"- {reason}" for reason in reasons),
        "Data: " + ("`ziggurat fetch babel` writes the embedded language pair." if corpus is None else "your own."),
    ]
    return as_comments(lines) + to_yaml(content, compact=True)


_PLAIN_FOLDER = resources.files("ziggurat") / "recipes"


def plain_recipe_names() -> list[str]:
    """Return the names of the recipes that do not belong to a paper, sorted; each is one file."""
    return _yaml_names(_PLAIN_FOLDER)


def recipe_names() -> list[str]:
    """Return the names of all built-in recipes: the plain ones, then those of each paper in the order of its tables."""
    return [*plain_recipe_names(), *(name for key in paper_keys() for name in paper_recipes(key))]


def find_small_recipe(name: str) -> PaperRecipe | None:
    """Return the paper's recipe whose small form is called `name`, such as `NAME-small`; None if there is none."""
    return find_paper_recipe(name.removesuffix(SUFFIX)) if name.endswith(SUFFIX) else None


def recipe_text(name: str, *, corpus: SmallCorpus | None = None) -> str:
    """Return the YAML text of a recipe. Raises ConfigError for an unknown name, with the nearest ones.

    `corpus` is the training corpus of a small recipe, by default the embedded language pair.
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
        return (_PLAIN_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    if (full := find_small_recipe(name)) is not None:
        return _small_text(full, corpus)
    recipe = find_paper_recipe(name)
    return None if recipe is None else recipe.text()


def recipe_summary(name: str) -> str:
    """Return one line about a recipe; for a plain recipe, its first comment. Raises ConfigError for an unknown name."""
    recipe = find_paper_recipe(name)
    return recipe.summary if recipe else recipe_text(name).splitlines()[0].removeprefix("#").strip()


class NamedText(NamedTuple):
    """The text of a configuration: the user's file, or the built-in recipe `recipe`.

    `label` is its name in errors.
    """

    text: str
    label: str
    recipe: str | None


def load_named(name: str, overrides: Sequence[str] = ()) -> Experiment:
    """Load the configuration file `name`, or the built-in recipe of that name if there is no such file."""
    named = read_named(name)
    return parse_experiment(named.text, named.label, overrides)


def read_named(name: str) -> NamedText:
    """Return the text that `load_named` loads; a pipe can be read only once. Raises ConfigError if there is none."""
    if not Path(name).is_file():
        if (text := _text(name)) is not None:
            return NamedText(text, f"recipe {name}", name)
        if not Path(name).exists() and not Path(name).suffix:
            near = _near(name, 0.7)
            hint = f"did you mean the recipe `{near[0]}`?" if near else "`ziggurat recipes` lists the built-in ones"
            raise ConfigError(f"{printable(name)}: neither a file nor a recipe; {hint}")
    return NamedText(read_config(name, piped=True), name, None)
