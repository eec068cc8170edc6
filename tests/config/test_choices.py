"""Methods by name: every value of every enumeration is found, with its paper and a correct description."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from tests.composition import refusal
from tests.docs.pages import anchors
from ziggurat.config.choices import (
    NamedChoice,
    choices,
    choices_named,
    methods_of_paper,
    names_like,
    recipes_with,
    refused_with,
)
from ziggurat.config.depth import CopyStrategy
from ziggurat.config.experiment import Experiment
from ziggurat.config.pipeline import PipelineConfig
from ziggurat.config.recipes import load_named, paper_keys, recipe_names
from ziggurat.config.reference import ALIASES, KEYS, METHODS, axis_of, entries, other_names_of, spelled
from ziggurat.config.section import inner_section

ROOT = Path(__file__).resolve().parents[2]


def named(annotation: Any) -> Iterator[str]:
    """Yield the texts of every Literal inside an annotation."""
    if get_origin(annotation) is Literal:
        yield from (value for value in get_args(annotation) if isinstance(value, str))
    else:
        for inner in get_args(annotation):
            yield from named(inner)


def enumerations(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, value) for every named value in a section and all sections inside it."""
    for name, field in section.model_fields.items():
        inner, is_list = inner_section(field.annotation)
        if inner is not None:
            yield from enumerations(inner, f"{prefix}{name}{'[]' * is_list}.")
        for value in named(field.annotation) if inner is None else ():
            yield f"{prefix}{name}", value


def choice(name: str) -> NamedChoice:
    """Return the choice called `key: value`, or `key` if the key is the method."""
    (found,) = [c for c in choices() if c.name == name]
    return found


VALUES = sorted(set(enumerations(Experiment)))


def test_every_sort_of_enumeration_occurs() -> None:
    assert {key.split(".")[0] for key, _ in VALUES} == {"data", "model", "training", "decoding"}
    assert {("model.encoder.ranges[].residual", "keel"), ("training.recompute.decoder", "segments")} <= set(VALUES)


@pytest.mark.parametrize(("key", "value"), VALUES)
def test_every_value_is_found_by_its_name_and_key(key: str, value: str) -> None:
    for spelling in (value, value.upper(), value.replace("_", "-"), value.replace("_", " ")):
        (found,) = [c for c in choices_named(spelling) if key in c.keys]
        assert found.value == value
    assert found.what
    assert (found.paper is None) != (found.reason is None)


def test_values_of_a_pipeline_alone_are_found_too() -> None:
    assert ("backtranslation.method", "noised-beam") in set(enumerations(PipelineConfig))
    assert {c.paper for c in choices_named("noised beam")} == {"Edunov et al. 2018"}


def test_every_paper_is_reported() -> None:
    told = {(axis, value) for axis in METHODS for value in METHODS[axis]}
    with_paper = {(c.keys[0], c.value): c.paper for c in choices() if c.paper}
    assert len([value for _, value in with_paper if value]) >= len(told)  # an axis can have two keys
    assert {paper for kinds in METHODS.values() for paper in kinds.values()} <= set(with_paper.values())
    assert {key for c in choices() if c.value is None for key in c.keys} == set(KEYS)
    plain = [value for value in ("relu", "latest", "top", "full", "constant") for c in choices_named(value) if c.reason]
    assert plain == ["relu", "latest", "top", "full", "constant"]


@pytest.mark.parametrize("target", ALIASES)
def test_every_alias_means_its_choice(target: str) -> None:
    for name in ALIASES[target].split(", "):
        for spelling in (name, name.lower(), name.replace("-", " "), name.replace(" ", "")):
            key, _, value = target.partition("=")
            assert [c for c in choices_named(spelling) if key in c.keys and c.value == (value or None)], spelling


@pytest.mark.parametrize("key", ["model.residual", "model.encoder.history", "model.init.kind", "decoding.search"])
def test_a_name_at_a_key_that_does_not_take_it_means_one_of_its_choices(key: str) -> None:
    for name in (name for names in ALIASES.values() for name in names.split(", ")):
        meant, _ = other_names_of(name.upper(), key)
        targets = [target for target, names in ALIASES.items() if spelled(name) in map(spelled, names.split(", "))]
        here = [target for target in targets if axis_of(target.partition("=")[0]) == axis_of(key)]
        assert meant in targets or meant in [target.partition("=")[2] for target in here], name
    assert other_names_of("nothing", key) == ("", "")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("MAtt", ["model.decoder.attention: merged"]),
        ("SAAN", ["model.decoder.attention: simplified_average"]),
        ("aan", ["model.decoder.attention: average"]),
        ("DLCL", ["model.encoder.history: dlcl"]),
        ("ADMIN", ["model.residual: admin", "model.init.kind: admin"]),
        ("SDT", ["training.growth"]),
        ("t-fixup", ["model.init.kind: t_fixup", "model.residual: no_norm"]),
        ("DeepNorm", ["model.residual: deepnorm", "model.init.kind: deepnorm"]),
        ("\N{MICRO SIGN}P", ["model.transfer"]),
        ("\N{GREEK SMALL LETTER MU}p", ["model.transfer"]),
        ("CompleteP", ["model.transfer"]),
        ("mHC", ["model.residual: manifold_hyper"]),
        ("ds init", ["model.init.kind: depth_scaled"]),
        ("gnmt+", ["training.schedule.kind: gnmt+"]),
        ("gnmt", ["decoding.length_penalty.kind: gnmt"]),
        ("nothing of that name", []),
        ("", []),
    ],
)
def test_methods_are_found_by_the_names_of_papers(name: str, found: list[str]) -> None:
    assert [c.name for c in choices_named(name)] == found


@pytest.mark.parametrize(
    ("typed", "meant"), [("adnim", "admin"), ("merged attentio", "merged attention"), ("SDTT", "sdt")]
)
def test_the_nearest_names_are_suggested(typed: str, meant: str) -> None:
    assert meant in names_like(typed)


def test_options_and_other_halves_are_keys_and_choices() -> None:
    keys, names = {e.path for e in entries()}, {c.name for c in choices()}
    for c in choices():
        assert set(c.options) <= keys, c.name
        assert {*c.heeded_with, *c.usual_with} <= names, c.name
    assert choice("model.residual: admin").usual_with == ("model.init.kind: admin",)
    assert choice("model.init.kind: admin").usual_with == ("model.residual: admin",)
    assert choice("model.init.omega: log").heeded_with == ("model.init.kind: admin",)


def test_every_page_has_its_heading() -> None:
    pages = {c.page for c in choices()}
    assert len(pages) > 20
    for page in pages:
        file, _, anchor = page.partition("#")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert not anchor or anchor in anchors(text), page
    for name in ("model.residual: admin", "model.encoder.history: dlcl", "training.growth"):
        assert "#" in choice(name).page


def recipes() -> dict[str, Experiment]:
    """Return all recipes."""
    return {name: load_named(name) for name in recipe_names()}


@pytest.mark.slow
def test_the_recipes_of_a_choice_are_those_that_have_it() -> None:
    loaded = recipes()

    def those(has: Any) -> set[str]:
        return {name for name, experiment in loaded.items() if has(experiment)}

    def transformer(experiment: Experiment) -> bool:
        return experiment.model.family == "transformer"

    def residuals(experiment: Experiment) -> set[str]:
        return {*experiment.model.residuals(decoder=False), *experiment.model.residuals(decoder=True)}

    expected = {
        "model.residual: lingvo": those(lambda e: transformer(e) and "lingvo" in residuals(e)),
        "model.residual: pre": those(lambda e: transformer(e) and "pre" in residuals(e)),
        "model.encoder.history: dlcl": those(
            lambda e: "dlcl" in (e.model.encoder.history, e.model.decoder.history),
        ),
        "model.init.omega: profiled": those(lambda e: e.model.init.kind == "admin"),
        "training.growth": those(lambda e: e.training.growth is not None),
        "training.growth.copy_strategy: g_top": those(
            lambda e: e.training.growth is not None and e.training.growth.copy_strategy == "g_top"
        ),
        "training.loss.inter_sim": those(lambda e: e.training.loss.inter_sim > 0),
        "data.subword.kind: unigram": those(lambda e: e.data.subword.kind == "unigram"),
        "training.optimiser.kind: radam": those(lambda e: e.training.optimiser.kind == "radam"),
        "decoding.top_p": those(lambda e: e.decoding.top_p < 1),
        "training.adaptive_clip": those(lambda e: e.training.adaptive_clip),
    }
    assert {name: set(recipes_with(choice(name))) for name in expected} == expected
    assert all(expected[name] for name in expected if name not in ("data.subword.kind: unigram", "decoding.top_p"))


@pytest.mark.parametrize("key", paper_keys())
def test_each_paper_of_recipes_has_methods_that_its_recipes_use(key: str) -> None:
    methods = methods_of_paper(key)
    assert methods
    used = {name for c in methods for name in recipes_with(c)}
    assert any(name.startswith(f"{key}-") for name in used)


def test_every_copy_strategy_has_the_paper_of_growth() -> None:
    middle = {"midas": "Saunshi et al. 2024 (MIDAS)", "lidas": "Kapl et al. 2025 (LIDAS)"}
    for value in get_args(CopyStrategy):
        paper = middle.get(value, KEYS["training.growth"])
        assert choice(f"training.growth.copy_strategy: {value}").paper == paper


REFUSED = [
    match.groups()
    for line in (ROOT / "tests/golden/refused_pairs.txt").read_text(encoding="utf-8").splitlines()
    if (match := re.match(r"(\S+)=(\S+) (\S+)=(\S+): ", line))
]
"""REFUSED are pairs of choices that are refused regardless of the rest of the model: (key, value, key, value)."""


@pytest.mark.slow
def test_choices_that_are_refused_together_are_reported_on_both_sides() -> None:
    by_key = {(key, c.value): c for c in choices() for key in c.keys}
    told = 0
    for a, x, b, y in REFUSED:
        one, other = by_key.get((f"model.{a}", x)), by_key.get((f"model.{b}", y))
        if one is None or other is None:
            continue  # a switch, or an optional section
        if f"model.{a}" == one.keys[0]:
            assert f"model.{b}: {y}" in refused_with(one), (a, x, b, y)
            told += 1
        if f"model.{b}" == other.keys[0]:
            assert f"model.{a}: {x}" in refused_with(other), (a, x, b, y)
            told += 1
    assert told > 100


@pytest.mark.parametrize(
    "name", ["model.residual: hybrid", "model.residual: post", "model.embedding.positions: rotary"]
)
def test_combinations_listed_as_refused_are_refused(name: str) -> None:
    found = choice(name)
    key = found.keys[0].removeprefix("model.")
    reasons = refused_with(found)
    assert reasons
    for other, reason in reasons.items():
        other_key, value = other.removeprefix("model.").split(": ")
        assert refusal({key: found.value, other_key: value}) is not None, other
        assert reason
