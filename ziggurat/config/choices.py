"""Methods by name (`ziggurat explain NAME`), and the site's reference of a pipeline's keys.

Facts are in ziggurat.config.kinds and ziggurat.config.reference; this module adds aliases, documentation pages,
refusals, and a pipeline's keys.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from ziggurat.config.data import SubwordConfig
from ziggurat.config.decode import DecodingConfig
from ziggurat.config.experiment import Experiment
from ziggurat.config.kinds import ATTENTIONS, HISTORIES, INITIALISATIONS, MEMORIES, RECIPES_OF, RESIDUALS, Facts
from ziggurat.config.model import ModelConfig
from ziggurat.config.modifiers import ModifiersConfig, StageConfig
from ziggurat.config.pipeline import MODELS, PipelineConfig
from ziggurat.config.recipes import Paper, load_named, paper_keys, paper_recipes, plain_recipe_names
from ziggurat.config.reference import (
    ALIASES,
    KEYS,
    METHODS,
    KeyDescription,
    axis_of,
    entries,
    kinds_in_use,
    listed,
    nearest,
    spelled,
)
from ziggurat.config.train import TrainingConfig

_ROWS: Mapping[str, Mapping[Any, Facts]] = {
    "residual": RESIDUALS,
    "history": HISTORIES,
    "memory": MEMORIES,
    "attention": ATTENTIONS,
    "init": INITIALISATIONS,
}
"""_ROWS maps an axis to its rows of facts; values of other axes are described with their key."""

_PAGES: Mapping[str, str] = {
    "data": "docs/data.md",
    "data.alignment": "docs/students.md#word-alignment",
    "data.filters": "docs/data.md#cleaning",
    "data.subword": "docs/data.md#subword-models",
    "model": "docs/depth.md",
    "model.attention": "docs/depth.md#attention-modelencoderattention-modeldecoderattention",
    "model.combination": "docs/depth.md#one-stack-modelencoderhistory-modeldecoderhistory",
    "model.decoder.attention": "docs/depth.md#attention-modelencoderattention-modeldecoderattention",
    "model.encoder.attention": "docs/depth.md#attention-modelencoderattention-modeldecoderattention",
    "model.encoder.history": "docs/depth.md#one-stack-modelencoderhistory-modeldecoderhistory",
    "model.encoder.layer_drop": "docs/depth.md#one-sub-layer-modelresidual",
    "model.encoder.solver": "docs/depth.md#one-sub-layer-modelresidual",
    "model.encoder.tied_layers": "docs/depth.md#one-sub-layer-modelresidual",
    "model.encoder.ranges": "docs/depth.md#one-sub-layer-modelresidual",
    "model.family": "docs/depth.md#rnmt-modelfamily-rnmt",
    "model.init": "docs/depth.md#initialisation-modelinit",
    "model.memory": "docs/depth.md#between-the-stacks-modelmemory",
    "model.residual": "docs/depth.md#one-sub-layer-modelresidual",
    "model.transfer": "docs/depth.md#a-rate-from-a-smaller-model-modeltransfer",
    "model.wiring": "docs/depth.md#one-sub-layer-modelresidual",
    "training": "docs/training.md",
    "training.distributed": "docs/scaling.md#several-gpus-or-machines",
    "training.growth": "docs/depth.md#growing-traininggrowth-and-ziggurat-grow",
    "training.lora": "docs/fine-tuning.md#low-rank-adaptation",
    "training.loss.alignment": "docs/students.md#guided-alignment",
    "training.optimiser": "docs/training.md#optimisers-and-schedules",
    "training.quantise": "docs/students.md#training-in-int8",
    "training.recompute": "docs/training.md#memory",
    "training.schedule": "docs/training.md#optimisers-and-schedules",
    "decoding": "docs/translate.md#search",
    "decoding.diverse_groups": "docs/translate.md#diverse-beams",
    "decoding.precision": "docs/translate.md#precision",
    "alignment": "docs/students.md#word-alignment",
    "backtranslation": "docs/students.md#methods",
    "cleaning": "docs/data.md#cleaning",
    "": "docs/pipeline.md",
}
"""_PAGES maps a key's prefix to its page; the longest matching prefix counts."""


@dataclass(frozen=True)
class NamedChoice:
    """A choice that a configuration makes by name."""

    keys: tuple[str, ...]
    """The keys that select it, the most common first."""
    value: str | None
    """The value they are set to; None: the key itself is the method, whatever its value."""
    what: str
    """The equation or a description."""
    paper: str | None
    """Authors and year; None: no paper describes it, see `reason`."""
    place: str = ""
    """The part of the paper that defines it, such as "equation 3"; "": unknown."""
    options: tuple[str, ...] = ()
    """Keys that have an effect with this choice."""
    heeded_with: tuple[str, ...] = ()
    """The choices with which its keys have an effect; (): with any."""
    usual_with: tuple[str, ...] = ()
    """The choices that are the other half of the method."""

    @property
    def name(self) -> str:
        """Its first key, with the value if there is one."""
        return self.keys[0] if self.value is None else f"{self.keys[0]}: {self.value}"

    @property
    def reason(self) -> str | None:
        """Why no paper describes it; None if one does."""
        if self.paper is not None:
            return None
        if self.heeded_with:
            return "an option of other choices"
        return "the plain case" if axis_of(self.keys[0]) in METHODS else "a setting, not a method"

    @property
    def published_in(self) -> Paper | None:
        """The paper, if its systems are available as recipes."""
        keys = [key for paper, key in RECIPES_OF.items() if paper in (self.paper or "")]
        return next(iter(paper_recipes(keys[0]).values())).paper if keys else None

    @property
    def page(self) -> str:
        """Page of the documentation, with the anchor of a section."""
        key = self.keys[0]
        return _PAGES[max((part for part in _PAGES if not part or f"{key}.".startswith(f"{part}.")), key=len)]


@cache
def choices() -> tuple[NamedChoice, ...]:
    """Return all choices, in the order of the reference: values of keys, then keys that are methods."""
    own = [e for e in entries(PipelineConfig) if e.path.split(".")[0] not in MODELS]  # experiments share the rest
    known = [*entries(), *own]
    groups: dict[tuple[str, str, str], list[KeyDescription]] = {}
    for entry in known:
        for value in re.findall(r"`([^`]+)`", entry.type):
            groups.setdefault((entry.path.split(".")[0], axis_of(entry.path), value), []).append(entry)
    values = [_value(axis, value, group) for (_, axis, value), group in groups.items()]
    methods: dict[tuple[str, str], list[KeyDescription]] = {}
    for entry in known:
        if entry.path in KEYS:
            methods.setdefault((axis_of(entry.path), KEYS[entry.path]), []).append(entry)
    return (
        *values,
        *(
            NamedChoice(
                tuple(e.path for e in group), None, group[0].meaning, paper, heeded_with=_heeding(group[0].path)
            )
            for (_, paper), group in methods.items()
        ),
    )


def _value(axis: str, value: str, group: Sequence[KeyDescription]) -> NamedChoice:
    group = sorted(group, key=lambda entry: entry.path.count("."))  # a key for both stacks comes first
    keys, meaning = tuple(e.path for e in group), group[0].meaning
    facts = _ROWS[axis].get(value) if axis in _ROWS else None
    if facts is None:
        paper = METHODS.get(axis, {}).get(value)
        return NamedChoice(keys, value, meaning, paper, heeded_with=_heeding(keys[0]))
    lead = meaning.split(": `")[0].removesuffix(" (docs/depth.md)")
    options = tuple(sorted(f"model.{option}" for option in facts.options))
    return NamedChoice(
        keys, value, f"{lead}: {facts.what}", facts.paper, facts.place, options, usual_with=_half(axis, value)
    )


def _half(axis: str, value: str) -> tuple[str, ...]:
    halves = {kind: facts.init for kind, facts in RESIDUALS.items() if facts.init is not None}
    if axis == "residual":
        return tuple(f"model.init.kind: {init}" for kind, init in halves.items() if kind == value)
    return tuple(f"model.residual: {kind}" for kind, init in halves.items() if axis == "init" and init == value)


_CHOSEN_BY = {"history": "model.encoder.history", "attention": "model.decoder.attention", "init": "model.init.kind"}
"""_CHOSEN_BY maps an axis to its usual key, if that is not `model.` followed by the axis."""


def _heeding(key: str) -> tuple[str, ...]:
    """Return the choices with which a kind's option has an effect; () if `key` is not such an option."""
    option = key.removeprefix("model.")
    return tuple(
        f"{_CHOSEN_BY.get(axis, f'model.{axis}')}: {kind}"
        for axis, rows in _ROWS.items()
        for kind, facts in rows.items()
        if option in facts.options
    )


@cache
def _by_name() -> Mapping[str, tuple[str, tuple[NamedChoice, ...]]]:
    """Return, for each name in look-up form, the name to show and its choices."""
    found: dict[str, tuple[str, list[NamedChoice]]] = {}
    by_key = {(key, choice.value): choice for choice in choices() for key in choice.keys}
    named = [(choice.value, choice) for choice in choices() if choice.value is not None]
    for target, names in ALIASES.items():
        key, _, value = target.partition("=")
        named += [(name, by_key[key, value or None]) for name in names.split(", ")]
    for name, choice in named:
        there = found.setdefault(spelled(name), (name, []))[1]
        if choice not in there:
            there.append(choice)
    return {name: (shown, tuple(there)) for name, (shown, there) in found.items()}


def choices_named(name: str) -> tuple[NamedChoice, ...]:
    """Return the choices of a name or an alias (ALIASES), ignoring case, spaces and punctuation."""
    return _by_name().get(spelled(name), ("", ()))[1]


class OutputTerm(NamedTuple):
    """A term of the output that is neither a key nor a method."""

    name: str
    what: str
    page: str


_MEASURES = "docs/report.md#the-measures"
TERMS = (
    OutputTerm(
        "nats", "the unit of losses, the natural logarithm's: 1 nat per token is a perplexity of e = 2.72", _MEASURES
    ),
    OutputTerm(
        "nll", "-log p of the gold token, in nats per token, without label smoothing; perplexity is e^nll", _MEASURES
    ),
    OutputTerm("gradient norm", "norm of the loss's gradient over all parameters of a layer", _MEASURES),
    OutputTerm("beta", "factor by which a sub-layer changes the norm of the gradient on its way down", _MEASURES),
    OutputTerm("beta_ln", "the part of beta that comes from layer normalisation after the addition", _MEASURES),
    OutputTerm("beta_rc", "the part of beta that comes from the residual connection", _MEASURES),
    OutputTerm("variance", "Var(r): variance over channels of stream plus branch, before any normalisation", _MEASURES),
    OutputTerm(
        "r", "norm of the gradient at a stack's first output divided by that at its last (Bapna et al. 2018)", _MEASURES
    ),
    OutputTerm(
        "evenness", "smallest over largest gradient norm of a stack's layers", "docs/depth-check.md#the-depth-check"
    ),
    OutputTerm(
        "source dependence", "rise of the loss when sentences get each other's sources; 0: a language model", _MEASURES
    ),
    OutputTerm(
        "depth check",
        "a short trial of a narrow copy at full depth that predicts whether the configuration trains: `ziggurat "
        "inspect`",
        "docs/depth-check.md#the-depth-check",
    ),
)
"""TERMS are the terms known to `explain`, besides keys and methods."""
_TERM_ALIASES = {"Var(r)": "variance", "perplexity": "nll", "dev loss": "nll"}


def term_named(name: str) -> OutputTerm | None:
    """Return the term of a name, ignoring case, spaces and punctuation; None if there is none."""
    known = {spelled(term.name): term for term in TERMS}
    aliases = {spelled(alias): known[spelled(of)] for alias, of in _TERM_ALIASES.items()}
    return (known | aliases).get(spelled(name))


def names_like(name: str) -> list[str]:
    """Return up to three names of methods, papers and terms that resemble `name`, the nearest first."""
    shown = {key: value for key, (value, _) in _by_name().items()}
    shown |= {spelled(key): key for key in (*paper_keys(), *(term.name for term in TERMS))}
    return [shown[near] for near in difflib.get_close_matches(spelled(name), shown, n=3, cutoff=0.6)]


def methods_of_paper(key: str) -> list[NamedChoice]:
    """Return the choices that come from the paper whose recipes have the key `key`."""
    return [choice for choice in choices() if choice.published_in is not None and choice.published_in.key == key]


# Recipes ---------------------------------------------------------------------------------------------------------


@cache
def _recipes() -> Mapping[str, Experiment]:
    found = {
        name: Experiment.model_validate(recipe.content)
        for key in paper_keys()
        for name, recipe in paper_recipes(key).items()
    }
    return found | {name: load_named(name) for name in plain_recipe_names()}


def recipes_with(choice: NamedChoice) -> list[str]:
    """Return the names of the recipes in which the choice has an effect, even as a default."""
    return [name for name, experiment in _recipes().items() if _has(experiment, choice)]


def _has(experiment: Experiment, choice: NamedChoice) -> bool:
    used = {f"{axis}: {value}" for _, axis, value in kinds_in_use(experiment.model)}
    if choice.heeded_with and not used & {f"{axis_of(key)}: {v}" for key, v in map(_pair, choice.heeded_with)}:
        return False
    plain = {(key, axis) for key, axis, _ in kinds_in_use(ModelConfig())}
    if any((key, axis_of(key)) in plain for key in choice.keys):
        # This resolves a stack's own residual, settings that RNMT+ lacks, and similar cases.
        return f"{axis_of(choice.keys[0])}: {choice.value}" in used
    values = [value for key in choice.keys for value in _values(experiment, key.split("."))]
    if choice.value is not None:
        return choice.value in values
    return any(value is True or value not in (None, 0, 1, []) for value in values)  # 1: one group, or all of the mass


def _values(section: Any, names: Sequence[str]) -> Iterator[Any]:
    """Yield the values of a key in a configuration; none if a section above it is null or missing."""
    if not names:
        yield from section if isinstance(section, list) and section else [section]
        return
    inner = getattr(section, names[0].removesuffix("[]"), None)
    for item in inner if isinstance(inner, list) and names[0].endswith("[]") else [inner]:
        yield from _values(item, names[1:])


# Refusals --------------------------------------------------------------------------------------------------------


def refused_with(choice: NamedChoice) -> dict[str, str]:
    """Return `key: value` -> reason for every choice of a model that cannot be combined with this one.

    Each is tried in an otherwise plain model, together with the other halves of both methods.
    """
    if choice.value is None or not choice.keys[0].startswith("model.") or "[]" in choice.keys[0]:
        return {}
    mine = _written(choice, choice.keys[0])
    if _refusal(mine) is not None:
        return {}
    found = {}
    for other in choices():
        if other.value is None or not other.keys[0].startswith("model.") or other.keys[0] in choice.keys:
            continue
        for key in other.keys:
            if key.count(".") == other.keys[0].count("."):  # a key for a single stack is refused like the one for both
                alone = _written(other, key)
                reason = _refusal({**alone, **mine, key: other.value})
                if reason is not None and _refusal(alone) is None:
                    found[f"{key}: {other.value}"] = reason
    return found


def _written(choice: NamedChoice, key: str) -> dict[str, Any]:
    halves = dict(map(_pair, choice.usual_with))
    if choice.value == "rnmt":
        halves = {"model.embedding.positions": "none", "model.embedding.sharing": "none"}
    return {**halves, key: choice.value}


def _pair(name: str) -> tuple[str, str]:
    key, _, value = name.partition(": ")
    return key, value


def _refusal(settings: Mapping[str, Any]) -> str | None:
    content: dict[str, Any] = {}
    for path, value in settings.items():
        *sections, key = path.split(".")[1:]
        at = content
        for section in sections:
            at = at.setdefault(section, {})
        at[key] = value
    try:
        ModelConfig.model_validate(content)
    except ValidationError as error:
        return str(error.errors()[0]["msg"]).removeprefix("Value error, ")
    return None


_OF_EXPERIMENT: Mapping[type[BaseModel], str] = {
    ModelConfig: "model",
    TrainingConfig: "training",
    DecodingConfig: "decoding",
    SubwordConfig: "data.subword",
    ModifiersConfig: "data.modifiers",
    StageConfig: "data.stages",
}
"""_OF_EXPERIMENT maps a section of a pipeline's model to its key in an experiment."""


def explained(key: str) -> list[KeyDescription]:
    """Return the entries of a key, such as `data.train[].weight`, and of all keys inside it; "": a whole experiment.

    Keys that experiments lack are looked up among a pipeline's. The end of a key, such as `pair_score`, stands for all
    keys of both that end with it; if there are several, the keys inside them are left out.
    """
    for section in (None, PipelineConfig):
        known = entries() if section is None else entries(section)
        if found := [e for e in known if not key or e.path == key or e.path.startswith((f"{key}.", f"{key}[]"))]:
            return found
    ends = _ending(key)
    return explained(ends[0].path) if len(ends) == 1 else ends


def _ending(key: str) -> list[KeyDescription]:
    """Return the entries of all keys that end with `key`; those shared by experiments and pipelines appear once."""
    ends = [e for e in entries() if e.path.endswith(f".{key}")]
    told = {e[1:] for e in ends}
    of_pipeline = [e for e in entries(PipelineConfig) if e.path.endswith(f".{key}")]
    return ends + [e for e in of_pipeline if e.path.split(".")[0] not in MODELS or e[1:] not in told]


def resembling(key: str) -> list[str]:
    """Return up to three keys that resemble `key`; a pipeline's keys if it starts with a section of a pipeline."""
    first = re.split(r"[.\[]", key)[0]
    return nearest(key, PipelineConfig) if first in PipelineConfig.model_fields else nearest(key)


def pipeline_markdown() -> str:
    """Return the site's page on pipeline keys, in Markdown."""
    lines = [
        "# Keys of a pipeline",
        "",
        "Every key of a [`ziggurat pipeline`](../pipeline.md) file, with its default. Each can be overridden on",
        "the command line as `path.to.key=value` (list items by number: `bitext.train.0.weight=2`), and",
        "`ziggurat explain KEY` prints its entry. A section whose default is null, and its steps, are left out unless",
        "the file has it.",
        "",
    ]
    told = {section: f"[`{key}`](config.md)" for section, key in _OF_EXPERIMENT.items()}
    return "\n".join([*lines, *listed(entries(PipelineConfig, told=told))]) + "\n"
