from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from tests.config.update_golden import GOLDEN, load_once, paper_dump
from tests.inspect.hand_made import trained
from ziggurat.config import Experiment, dump, parse_experiment
from ziggurat.config.depth import saved_passes
from ziggurat.config.recipes import (
    PaperRecipe,
    find_paper_recipe,
    load_named,
    paper_keys,
    paper_recipes,
    plain_recipe_names,
    recipe_names,
    recipe_summary,
    recipe_text,
)
from ziggurat.inspect.report.figures import figures_of
from ziggurat.system.errors import ConfigError
from ziggurat.system.yaml_text import parse_yaml

FILES = {path.stem: path for path in (GOLDEN.parents[2] / "ziggurat" / "recipes" / "papers").glob("*.yaml")}

UNSEEN = "not described in the text at hand"
COMMAND = re.compile(r"ziggurat [a-z]+( .+)?|python -m [a-z_.]+( .+)?")

Shown = dict[str, int] | tuple[str, ...] | str
"""Shown is what stands for a table or figure: headings of recipes' rows, with their number; figures of `ziggurat
report`; a command; or UNSEEN.
"""

EXHIBITS: dict[str, dict[str, Shown]] = {
    "ds-init": {
        "table 1": ("variance", "beta", "beta-ln", "beta-rc"),
        "table 2": UNSEEN,
        "table 3": {"Table 3 (WMT14 En-De)": 16},
        "table 4": {"Table 4 (train and dev)": 7},
        "table 5": {"Other tasks": 8},
        "table 6": {"Big (WMT14 En-De)": 3},
        "figure 1": ("gradient-profile",),
        "figure 2": UNSEEN,
        "figure 3": {"Figure 3 (WMT14 En-De)": 1},  # the other depths have rows in table 3
        "figure 4": ("first-and-last-layer",),
    },
    "dlcl": {
        "tables 1 to 4": {"WMT16 En-De": 10, "16 layers (WMT16 En-De)": 5, "Zh-En small": 5, "Zh-En large": 4},
        "table 5": {"Table 5, decoder depth (WMT16 En-De)": 3},
        "table 6": {"Ablation at 20 layers": 9},
        "figure 1": UNSEEN,
        "figure 2": "ziggurat explain model.encoder.history",  # drawings of kinds of connections between layers
        "figures 3 to 4": ("against-depth",),
        "figure 5": ("history-weights",),
    },
    # Three kinds at four depths, and big.
    "transparent": {
        "table 1": {f"WMT14 En-De, {family}": 13 for family in ("Transformer", "RNMT+")},
        "table 2": {f"WMT15 Cs-En, {family}": 13 for family in ("Transformer", "RNMT+")},
        "figures 1 to 3": ("gradient-ratio",),
        "figure 4": ("transparent-weights",),
    },
    "admin": {
        # The text that we have does not give their numbers.
        "tables": {
            "WMT14 En-Fr": 5,
            "WMT14 En-De": 5,
            "Depth (WMT14 En-Fr)": 7,
            "Wider (WMT14 En-Fr)": 3,
            "Back-translation (WMT14 En-Fr)": 3,
        },
        "figure 1": UNSEEN,
        "figure 2": ("learning-curves",),
        "figure 3": "ziggurat compare RUN RUN --train-target FILE",
    },
    "sdt": {
        "tables 1 to 2": {"WMT16 En-De": 14, "WMT14 En-Fr": 10, "Ablation (SDT-RPR-48L, WMT16 En-De)": 4},
        "table 3": {"Copy strategies (SDT-RPR-48L, WMT16 En-De)": 3},
        "table 4": {"Schedules (SDT-RPR-48L, WMT16 En-De)": 4},
        "table 5": {"Against DLCL (WMT16 En-De)": 7},
        "table 6": {"Table 6 (WMT16 En-De)": 4},
        "figure 1": UNSEEN,
        "figure 2": ("similarity-profiles",),
        "figures 3 to 5": UNSEEN,
        "figure 6": ("against-depth",),
        "figures 7 to 8": ("similarity-profiles", "similarity-map"),
    },
}
"""EXHIBITS maps every table and figure of the five papers to its counterpart here; rows were counted by hand."""

ELSEWHERE: dict[str, dict[str, int]] = {
    "ds-init": {"Text (WMT14 En-De)": 2, "Documentation of the code (WMT14 En-De)": 1},
    "dlcl": {},
    "transparent": {f"{pair}, pre-norm (not in the paper)": 8 for pair in ("WMT14 En-De", "WMT15 Cs-En")},
    "admin": {"Pages of the code (WMT14 En-De)": 2},
    "sdt": {},
}
"""ELSEWHERE are rows that come from no table or figure but from the text or the code's pages, or are our own."""

PATTERN = re.compile(
    r"(?P<key>[a-z]+(-init)?)-(iwslt-)?(?P<source>[a-z]{2})-(?P<target>[a-z]{2})(-(small|large))?"
    r"-(?P<size>base|big|768|rnmt-\d+)-(?P<encoder>\d+)-(?P<decoder>\d+)(-[a-z0-9-]+)?"
)
WIDTH = {"base": 512, "big": 1024, "768": 768, "rnmt-512": 512, "rnmt-1024": 1024}


def all_recipes() -> dict[str, PaperRecipe]:
    return {name: recipe for key in paper_keys() for name, recipe in paper_recipes(key).items()}


@pytest.mark.parametrize("key", paper_keys())
def test_every_row_of_every_table_is_a_recipe(key: str) -> None:
    found = Counter(place.table for recipe in paper_recipes(key).values() for place in recipe.table_rows)
    shown = [item for item in EXHIBITS[key].values() if isinstance(item, dict)]
    headings = [heading for item in (*shown, ELSEWHERE[key]) for heading in item]
    assert len(set(headings)) == len(headings), "a heading stands for one table"
    assert found == {heading: rows for item in (*shown, ELSEWHERE[key]) for heading, rows in item.items()}
    rows = [(place.table, place.row) for recipe in paper_recipes(key).values() for place in recipe.table_rows]
    assert len(set(rows)) == len(rows)


@pytest.mark.parametrize("key", paper_keys())
def test_every_table_and_figure_of_a_paper_is_accounted_for(key: str) -> None:
    numbers: dict[str, list[int]] = {"table": [], "figure": []}
    every_figure = {figure.key for figure in figures_of([trained()])}
    for name, shown in EXHIBITS[key].items():
        said = re.fullmatch(r"(table|figure)s?(?: (\d+))?(?: to (\d+))?", name)
        assert said is not None, name
        if said[2] is not None:
            numbers[said[1]] += range(int(said[2]), int(said[3] or said[2]) + 1)
        if isinstance(shown, tuple):
            assert set(shown) <= {*every_figure, "against-depth"}, name  # the latter only for several runs
        elif isinstance(shown, str):
            assert shown == UNSEEN or COMMAND.fullmatch(shown), name
    for kind, found in numbers.items():
        assert found == list(range(1, len(found) + 1)), f"{kind}: numbers are missing"


def test_names_are_unique_and_every_fragment_is_used() -> None:
    names: list[str] = []
    for key, path in FILES.items():
        content, _ = parse_yaml(path.read_text(encoding="utf-8"), path.name)
        names += [row["name"] for row in content["rows"]]
        used = {fragment for row in content["rows"] for fragment in row["use"]}
        assert used == set(content["fragments"]), key
        assert content["paper"]["key"] == key
    assert len(names) == len(set(names)) == len(all_recipes())
    assert recipe_names() == plain_recipe_names() + list(all_recipes())


@pytest.mark.parametrize("key", paper_keys())
def test_recipes_match_their_names_and_read_back(key: str) -> None:
    for number, name in enumerate(paper_recipes(key)):
        try:
            check_name(name, key)
            if number % 8 == 0:  # checking all of them takes seconds
                assert parse_experiment(dump(load_once(name)), "again") == load_once(name)
        except AssertionError as error:
            error.add_note(f"recipe: {name}")
            raise


def check_name(name: str, key: str) -> None:
    experiment = load_once(name)
    assert recipe_text(name).startswith(f"# {recipe_summary(name)}"[:80])
    said = PATTERN.fullmatch(name)
    assert said is not None
    assert said["key"] == key == paper_recipes(key)[name].paper.key
    model = experiment.model
    assert (experiment.data.source_language, experiment.data.target_language) == (said["source"], said["target"])
    assert (model.d_model, model.encoder.layers) == (WIDTH[said["size"]], int(said["encoder"]))
    assert model.decoder.layers == int(said["decoder"])
    assert (model.family == "rnmt") == ("rnmt" in name)
    assert model.d_model % 64 == 0
    assert model.family == "rnmt" or model.d_model // model.heads == 64
    methods: dict[str, bool] = {
        "-pre": model.residual == "pre",
        "-post": model.residual == "post",
        "-dlcl": model.encoder.history == "dlcl",
        "-matt": model.decoder.attention.startswith("merged"),
        "-ds": any(init.kind == "depth_scaled" for init in model.inits.values()),
        "-t2t": model.residual == "pre",
        "-transparent": model.memory == "transparent",
        "-no-residuals": model.encoder.residual == "none",
        "-admin": model.residual == "admin",
        "-rpr": (model.encoder.attention, model.decoder.attention) == ("relative", "relative"),
        "-sdt": experiment.training.growth is not None,
    }
    tail = name[said.end("decoder") :]
    for word, chosen in methods.items():
        if re.search(rf"{word}(-|$)", tail):
            assert chosen, word
    if said["key"] in ("ds-init", "transparent", "sdt"):  # elsewhere the name of the paper's own method is not a suffix
        for word in ("-matt", "-ds", "-no-residuals", "-rpr", "-sdt"):
            assert bool(re.search(rf"{word}(-|$)", tail)) == methods[word], word


def test_stages_of_growth_save_as_much_as_in_the_paper_or_have_a_reason() -> None:
    told = 0
    for name, recipe in all_recipes().items():
        if (growth := load_once(name).training.growth) is None:
            continue
        saved = saved_passes(growth, load_once(name).model, load_once(name).training.stop)
        assert saved is not None, name
        for row in recipe.table_rows:
            published = row.published.costs.get("train_time_saved_percent")
            if published is not None:
                told += 1
                near = abs(100 * saved - published) <= 3
                assert near == (row.published.saving_differs is None), (name, row.row, 100 * saved, published)
    assert told == 15


@pytest.mark.parametrize("key", paper_keys())
def test_recipes_of_a_paper_resolve_to_their_reviewed_golden_dump(key: str) -> None:
    """A changed default cannot hide: `python -m tests.config.update_golden` rewrites the files for review."""
    assert paper_dump(key) == (GOLDEN / "papers" / f"{key}.yaml").read_text(encoding="utf-8")


def test_published_figures_are_complete() -> None:
    for name, recipe in all_recipes().items():
        for place in recipe.table_rows:
            said = place.published
            if "not in the paper" in place.table:
                assert said.words() == ""
                continue
            assert said.words() or recipe.table_row.note, name
            assert not (said.fails and said.scores), name
            assert said.count_differs is None or said.parameters is not None, name
            assert all(0 < score < 100 for score in said.scores.values()), name


def values(name: str) -> dict[str, Any]:
    e: Experiment = load_once(name)
    t, m, d = e.training, e.model, e.decoding
    return {
        "adam": (*t.optimiser.betas, t.optimiser.epsilon),
        "tokens": t.batch.max_tokens * t.batch.accumulate,
        "updates": t.stop.updates,
        "epochs": t.stop.epochs,
        "dropout": (m.dropout.residual, m.dropout.attention, m.dropout.activation),
        "epsilon": m.layer_norm_epsilon,
        "qkv": m.init.qkv,
        "average": t.checkpoint.average_last,
        "search": (d.beam_size, d.length_penalty.kind, d.length_penalty.alpha),
        "rate": (t.schedule.kind, t.schedule.factor if t.schedule.kind == "noam" else t.schedule.peak),
        "warmup": t.schedule.warmup_updates,
        "smoothing": (t.loss.label_smoothing, t.loss.smoothing),
    }


# The hyper-parameter tables of the five papers, read again for single systems.
HYPER_PARAMETERS: dict[str, dict[str, Any]] = {
    "ds-init-en-de-base-6-6": {
        "adam": (0.9, 0.98, 1e-9), "tokens": 25_000, "updates": 300_000, "dropout": (0.1, 0.1, 0.1), "epsilon": 1e-8,
        "qkv": "fused_self", "average": 5, "search": (4, "gnmt", 0.6), "rate": ("noam", 1.0), "warmup": 4000,
        "smoothing": (0.1, "others"),
    },
    "ds-init-en-de-base-20-20-ds-matt": {"tokens": 44_000, "dropout": (0.3, 0.2, 0.1)},
    "ds-init-en-de-base-30-30-ds-matt": {"tokens": 48_000},
    "ds-init-iwslt-de-en-base-12-12-ds-matt": {"dropout": (0.5, 0.3, 0.1), "updates": 300_000},
    "ds-init-zh-en-base-6-6": {"updates": 500_000},
    "ds-init-en-de-big-20-20-ds-matt": {
        "adam": (0.9, 0.998, 1e-9), "tokens": 54_000, "warmup": 16_000, "dropout": (0.3, 0.1, 0.1),
    },
    "dlcl-en-de-base-6-6-post": {
        "adam": (0.9, 0.98, 1e-8), "tokens": 32_768, "updates": 100_000, "dropout": (0.1, 0.0, 0.0), "epsilon": 1e-5,
        "qkv": "fused", "average": 5, "search": (4, "power", 0.6), "rate": ("isqrt", 7e-4), "warmup": 4000,
        "smoothing": (0.1, "uniform"),
    },
    "dlcl-en-de-big-6-6-pre": {
        "adam": (0.9, 0.997, 1e-8), "tokens": 32_768, "updates": 300_000, "dropout": (0.3, 0.1, 0.1),
        "rate": ("isqrt", 7e-4), "warmup": 8000,
    },
    "dlcl-en-de-base-25-6-post-dlcl": {
        "adam": (0.9, 0.98, 1e-8), "tokens": 65_536, "updates": 50_000, "dropout": (0.1, 0.0, 0.0),
        "rate": ("isqrt", 2e-3), "warmup": 16_000,
    },
    "dlcl-zh-en-small-base-25-6-pre-dlcl": {"updates": 25_000, "search": (6, "power", 1.0)},
    "transparent-en-de-base-20-6-transparent": {
        "adam": (0.9, 0.98, 1e-9), "tokens": 32_768, "dropout": (0.1, 0.0, 0.0), "epsilon": 1e-6, "qkv": "separate",
        "average": 0, "search": (8, "lingvo", 0.5), "rate": ("noam", 3.0), "warmup": 40_000,
        "smoothing": (0.1, "others"),
    },
    "transparent-en-de-rnmt-512-20-8-transparent": {
        "adam": (0.9, 0.999, 1e-6), "dropout": (0.3, 0.3, 0.0), "search": (16, "lingvo", 0.2), "warmup": 500,
    },
    "admin-en-de-base-60-12-admin": {
        "adam": (0.9, 0.98, 1e-8), "tokens": 57_344, "updates": None, "epochs": 50, "dropout": (0.1, 0.1, 0.1),
        "average": 10, "search": (4, "power", 0.6), "rate": ("isqrt", 1e-3), "warmup": 4000,
    },
    "admin-en-fr-base-60-12-admin": {
        "tokens": 57_344, "updates": None, "epochs": 50, "search": (5, "power", 0.8), "rate": ("isqrt", 7e-4),
        "warmup": 8000,
    },
    "sdt-en-de-base-48-6-rpr-sdt": {
        "adam": (0.9, 0.997, 1e-8), "tokens": 65_536, "updates": 50_000, "dropout": (0.1, 0.1, 0.1), "average": 5,
        "search": (4, "power", 0.6), "rate": ("isqrt", 2e-3), "warmup": 8000,
    },
    "sdt-en-fr-base-48-6": {"updates": 150_000},
    "sdt-en-de-big-24-6-sdt": {"dropout": (0.3, 0.1, 0.1)},
    "sdt-en-fr-big-6-6": {"dropout": (0.1, 0.1, 0.1)},
}  # fmt: skip


@pytest.mark.parametrize("name", HYPER_PARAMETERS)
def test_hyper_parameters_match_the_paper(name: str) -> None:
    found = values(name)
    assert {key: found[key] for key in HYPER_PARAMETERS[name]} == HYPER_PARAMETERS[name]


def test_peak_rates_match_the_schedules() -> None:
    """Noam's peak is factor / sqrt(d_model * warm-up); the figures are of Zhang et al. 2019 and Bapna et al. 2018."""
    names = {
        "ds-init-en-de-base-6-6": 6.99e-4,
        "ds-init-en-de-big-6-6": 2.47e-4,
        "transparent-en-de-base-6-6": 6.63e-4,
    }
    for name, peak in names.items():
        experiment = load_named(name)
        schedule = experiment.training.schedule
        assert schedule.factor * (experiment.model.d_model * schedule.warmup_updates) ** -0.5 == pytest.approx(
            peak, abs=5e-7
        )


def test_a_paper_recipe_takes_overrides_and_reports_wrong_ones() -> None:
    assert load_named("admin-en-fr-base-60-12-admin", ["model.encoder.layers=36"]).model.encoder.layers == 36
    with pytest.raises(ConfigError, match=r"command line: unknown key `model\.encoder\.layer`"):
        load_named("admin-en-fr-base-60-12-admin", ["model.encoder.layer=36"])


def test_an_unknown_name_gets_the_nearest_names() -> None:
    assert find_paper_recipe("admin-en-fr-base-60-12") is None
    with pytest.raises(ConfigError, match="did you mean `admin-en-fr-base-60-12-p"):
        recipe_text("admin-en-fr-base-60-12")
    with pytest.raises(ConfigError, match=r"nothing\.yaml: no such configuration file"):
        load_named("nothing.yaml")
