from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.cli.conftest import Ziggurat, tiny_config
from tests.config.update_golden import load_once
from tests.parameter_counts import decoder, encoder, rnmt
from ziggurat.cli.inspection import _published_saving
from ziggurat.config import Experiment
from ziggurat.config.kinds import (
    Activation,
    Family,
    NormKind,
    PositionKind,
)
from ziggurat.config.recipes import PaperRecipe, find_paper_recipe, load_named, paper_keys, paper_recipes, recipe_names
from ziggurat.config.reference import METHODS, methods_in_use
from ziggurat.inspect.cost import Cost, estimate_cost
from ziggurat.inspect.device_memory import LargestBatch
from ziggurat.inspect.machine import BatchShape
from ziggurat.model.build import build_model
from ziggurat.model.counts import bare_model, inspect_experiment, parts

MILLION = 1_000_000


def counted(key: str) -> dict[str, PaperRecipe]:
    """Return a paper's recipes for which it gives the number of parameters."""
    return {n: recipe for n, recipe in paper_recipes(key).items() if recipe.table_row.published.parameters is not None}


@pytest.mark.slow
@pytest.mark.parametrize("key", paper_keys())
def test_parameter_counts_are_those_published(key: str) -> None:
    """Counts agree within 0.1 million, or 0.6 where the paper rounds to millions; where a recipe states a difference,
    there is one.
    """
    for name, recipe in counted(key).items():
        published = recipe.table_row.published
        assert published.count is not None
        tolerance = 600_000 if published.rounding == MILLION else 100_000
        distance = abs(inspect_experiment(load_once(name)).parameters - published.count)
        assert (distance <= tolerance) == (published.count_differs is None), name


def test_counts_are_skipped_only_where_the_paper_contradicts_itself() -> None:
    recipes = {name: recipe for key in paper_keys() for name, recipe in counted(key).items()}
    assert len(recipes) > 100
    differ = {name for name, recipe in recipes.items() if recipe.table_row.published.count_differs}
    base = {name for name in recipes if name.startswith("transparent-") and "-base-" in name}
    assert len(base) == 24
    assert differ == base | {"sdt-en-de-base-6-6", "dlcl-zh-en-small-big-6-6-pre"}


EXACT = {
    "ds-init-en-de-base-6-6": 6 * encoder(512, 2048) + 6 * decoder(512, 2048) + 55_023 * 512 + 512,
    "ds-init-en-de-base-20-20-ds-t2t": 20 * (encoder(512, 2048) + decoder(512, 2048)) + 55_023 * 512 + 512 + 4 * 512,
    "ds-init-en-de-base-20-20-ds-matt": 40 * encoder(512, 2048) + 55_023 * 512 + 512,
    # Apart from the norm of its sub-layer, self-attention has the same four maps as in a decoder layer.
    "ds-init-en-de-base-6-6-matt-self": 6 * encoder(512, 2048) + 6 * (decoder(512, 2048) - 1024) + 55_023 * 512 + 512,
    "ds-init-en-de-big-20-20-ds-matt": 40 * encoder(1024, 4096) + 55_023 * 1024 + 1024,
    # Pre-norm has one LN for each layer's output; all (L + 1)^2 weights of a stack are stored.
    "dlcl-en-de-base-30-6-pre-dlcl": 30 * encoder(512, 2048) + 6 * decoder(512, 2048) + 34_040 * 512 + 4 * 512
    + 36 * 1024 + 31**2 + 7**2,
    "transparent-en-de-rnmt-512-20-8": rnmt(512, 4, 20, 8, 32_000),
    "transparent-en-de-rnmt-512-20-8-transparent": rnmt(512, 4, 20, 8, 32_000) + 20,
    "transparent-en-de-rnmt-1024-6-8": rnmt(1024, 4, 6, 8, 32_000),
    # One scale of the queries per attention of width 64, one weight per decoder layer and merged state.
    "transparent-en-de-base-20-6-transparent": 20 * encoder(512, 2048) + 6 * decoder(512, 2048)
    + 3 * 32_000 * 512 + 32_000 + 32 * 64 + 6 * 21,
    "admin-en-fr-base-60-12-admin": 60 * encoder(512, 2048) + 12 * decoder(512, 2048) + 44_512 * 512
    + (120 + 36) * 512,
    # Each self-attention has 17 x 64 relative positions; connecting 8 blocks takes their norms and 9 x 9 weights.
    "sdt-en-de-base-48-6-rpr-sdt": 48 * encoder(512, 2048) + 6 * decoder(512, 2048) + 33_230 * 512 + 4 * 512
    + 54 * 17 * 64 + 8 * 1024 + 9**2,
}  # fmt: skip
"""EXACT are counts by formulas for the papers' layers."""


@pytest.mark.parametrize("name", EXACT)
def test_parameter_counts_by_formula(name: str) -> None:
    assert inspect_experiment(load_once(name)).parameters == EXACT[name]


@pytest.mark.parametrize("name", ["demo", "ds-init-en-de-base-12-12-ds-matt", "transparent-en-de-rnmt-512-6-8"])
def test_parts_add_up_and_layers_are_counted(name: str, ziggurat: Ziggurat) -> None:
    found = json.loads(ziggurat("inspect", name, "--no-check", "--no-cost", "--json").out)
    assert found["parameters"] == sum(found["parts"].values())
    assert found["layers"] == {"encoder": load_named(name).model.encoder.layers, "decoder": found["layers"]["decoder"]}
    text = ziggurat("inspect", name, "--no-check", "--no-cost").out
    assert f"{found['parameters']:,}" in text
    for count in (*found["parts"].values(), *found["layer_parameters"].values()):
        assert f"{count:,}" in text


def test_shared_matrices_count_as_embeddings_others_by_their_use() -> None:
    apart = inspect_experiment(load_once("transparent-en-de-base-6-6")).parts
    assert (apart["embeddings"], apart["output"]) == (2 * 32_000 * 512, 32_000 * 512 + 32_000)
    shared = inspect_experiment(load_once("dlcl-zh-en-small-base-6-6-pre")).parts
    assert (shared["embeddings"], shared["output"]) == (77_000 * 512, 0)
    assert shared["decoder"] == 6 * decoder(512, 2048) + 2 * 512
    assert inspect_experiment(load_once("demo")).parts["embeddings"] == 1200 * 128


def test_a_bare_model_has_the_names_and_shapes_of_a_real_one_and_no_values() -> None:
    config = load_named("demo", ["model.residual=admin", "model.encoder.history=dlcl"]).model
    bare, real = bare_model(config, 30, 30), build_model(config, 30, 30)
    assert {n: p.shape for n, p in bare.named_parameters()} == {n: p.shape for n, p in real.named_parameters()}
    assert all(p.is_meta for p in bare.parameters())
    assert parts(bare) == parts(real)


def test_methods_are_shown_with_their_paper(ziggurat: Ziggurat) -> None:
    found = json.loads(ziggurat("inspect", "sdt-en-de-base-48-6-rpr-sdt", "--no-check", "--no-cost", "--json").out)
    by_key = {method["key"]: (method["value"], method["paper"]) for method in found["methods"]}
    assert by_key["model.encoder.history"] == ("blocks", "Li et al. 2020")
    assert by_key["training.growth"] == ("6-12-18-24-30-36-42-48", "Li et al. 2020")
    assert by_key["model.decoder.attention"] == ("relative", "Shaw et al. 2018")
    assert "model.decoder.history" not in by_key
    assert found["published_parameters"] is None
    assert found["published_costs"] == {"train_hours": 11.75, "train_time_saved_percent": 40.0}
    mixed = load_named("demo", ["model.encoder.residual=deepnorm", "model.encoder.layer_drop=0.1"])
    keys = {method.key: method.value for method in methods_in_use(mixed)}
    assert methods_in_use(load_once("sdt-en-de-base-6-6-inter-sim"))[-1].key == "training.loss.inter_sim"
    assert (keys["model.encoder.residual"], keys["model.decoder.residual"]) == ("deepnorm", "pre")
    assert keys["model.encoder.layer_drop"] == "0.1"


@pytest.mark.parametrize(
    ("name", "saving", "explained"),
    [
        ("sdt-en-de-base-24-6-sdt", ["28.9 %"], False),
        ("sdt-en-de-base-48-6-rpr-sdt", ["40.0 %"], True),
        ("sdt-en-de-base-24-6", [], False),
    ],
)
def test_the_published_saving_is_shown_next_to_the_counted_one(name: str, saving: list[str], explained: bool) -> None:
    recipe = find_paper_recipe(name)
    assert recipe is not None
    lines = _published_saving(recipe)
    assert [word for line in lines for word in re.findall(r"[\d.]+ %", line)][:1] == saving
    why = recipe.table_row.published.saving_differs
    assert (why is not None) == explained
    assert all(line.endswith(f"; {why}") == explained for line in lines)
    assert _published_saving(None) == []


@pytest.mark.parametrize(
    ("axis", "kinds", "plain"),
    [
        ("family", Family, set()),
        ("positions", PositionKind, {"sinusoidal", "none"}),
        ("activation", Activation, {"relu"}),
        ("norm", NormKind, {"layer"}),
    ],
)
def test_every_kind_without_a_row_of_facts_has_a_paper(axis: str, kinds: Any, plain: set[str]) -> None:
    assert set(METHODS[axis]) == set(get_args(kinds)) - plain


def test_a_recipe_shows_published_figures_until_it_is_changed(ziggurat: Ziggurat) -> None:
    name = "sdt-en-de-base-6-6"
    assert (
        json.loads(ziggurat("inspect", name, "--no-check", "--no-cost", "--json").out)["published_parameters"]
        == 63 * MILLION
    )
    assert "all other rows of the table" in ziggurat("inspect", name, "--no-check", "--no-cost").out
    changed = ziggurat("inspect", name, "model.encoder.layers=7", "--no-check", "--no-cost", "--json")
    found = json.loads(changed.out)
    assert found["published_parameters"] is None
    assert found["layers"]["encoder"] == 7


@pytest.mark.slow
def test_sizes_come_from_the_folder_the_store_or_the_configuration(
    ziggurat: Ziggurat, trained: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # away from what `make demo` leaves in the repository

    def vocabulary(*arguments: object) -> tuple[int, int, str]:
        result = ziggurat("inspect", *arguments, "--no-check", "--no-cost", "--json")
        assert result.status == 0, result.err
        found = json.loads(result.out)["vocabulary"]
        return found["source"], found["target"], found["origin"]

    assert vocabulary(trained) == (400, 400, str(trained))
    config = tiny_config(tmp_path, tiny_folder)
    store = str(tiny_folder / "store")
    assert vocabulary(config) == (400, 400, store)
    other = vocabulary(config, "data.subword.vocabulary_size=500", "data.train.0.tag=<bt>")
    assert other == (501, 501, f"data.subword; {store} was prepared with others")
    two = ["data.subword.joint=false", "model.embedding.sharing=decoder", "data.train.0.tag=<bt>"]
    sizes = ["data.subword.vocabulary_size=300", "data.subword.target_vocabulary_size=200"]
    assert vocabulary("demo", *two, *sizes) == (301, 200, "data.subword")
    files = ["data.subword.kind=existing", f"data.subword.source_model={store}/joint.spm"]
    assert vocabulary("demo", *files) == (400, 400, "the files of data.subword")
    missing = ziggurat("inspect", "demo", "data.subword.kind=existing", "data.subword.source_model=none.spm")
    assert (missing.status, missing.out) == (2, "")
    assert "data.subword.source_model: no such file: none.spm" in missing.err


def test_a_folder_that_is_not_a_run_hides_no_recipe(
    ziggurat: Ziggurat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    assert ziggurat("inspect", "demo", "--no-check", "--no-cost").status == 0
    wrong = ziggurat("inspect", tmp_path)
    assert wrong.status == 2
    assert "neither a run nor a model directory" in wrong.err


def test_recipes_are_listed_by_paper_table_and_row(ziggurat: Ziggurat) -> None:
    listed = json.loads(ziggurat("recipes", "--json").out)
    assert [recipe["name"] for recipe in listed] == recipe_names()
    keys = {"name", "summary", "paper", "table", "row", "published_parameters", "published_scores"}
    assert all(keys <= recipe.keys() for recipe in listed)
    found = {recipe["name"]: recipe for recipe in listed}
    row = found["ds-init-en-de-base-20-20-ds-matt"]
    assert row["paper"].startswith("Zhang, Titov and Sennrich 2019: Improving Deep Transformer")
    assert (row["table"], row["row"], row["published_parameters"]) == ("Table 3 (WMT14 En-De)", 16, 154_300_000)
    assert row["published_scores"] == {"bleu": 28.67, "sacrebleu": 28.0}
    assert row["also"][0]["published_scores"]["dev_bleu"] == 26.56
    assert found["admin-en-de-base-60-12-post"]["published_failure"] is True
    assert found["demo"]["paper"] is None
    name = "admin-en-fr-base-60-12-admin"
    one = json.loads(ziggurat("recipes", name, "--json").out)
    recipe = paper_recipes("admin")[name]
    assert one == {**recipe.document(), "text": recipe.text()}
    text = ziggurat("recipes").out
    assert all(f"{name} " in text for name in recipe_names())
    of_paper = ziggurat("recipes", "admin").out.splitlines()
    assert of_paper[0].startswith("admin: Liu, Duh, Liu and Gao 2020")
    assert of_paper[1] == "  WMT14 En-Fr"
    row = "60-12, ADMIN 262M parameters, bleu 43.8, sacrebleu 41.8, ter 40.3, meteor 62.4, train_days_on_16_v100 2.5"
    assert " ".join(of_paper[5].split()) == f"admin-en-fr-base-60-12-admin {row}"
    assert not any(line.startswith("demo") for line in of_paper)


def test_a_printed_recipe_is_a_configuration(ziggurat: Ziggurat, tmp_path: Path) -> None:
    name = "transparent-en-de-rnmt-512-6-8-transparent"
    printed = tmp_path / "printed.yaml"
    printed.write_text(ziggurat("recipes", name).out)
    assert load_named(str(printed)) == load_once(name)


@pytest.mark.slow
def test_costs_are_shown_as_tables_and_as_json(
    ziggurat: Ziggurat, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found_before: list[Cost] = []  # both calls report one estimate, which takes seconds

    def once(*arguments: Any) -> Cost:
        found_before[:] = found_before or [estimate_cost(*arguments)]
        return found_before[0]

    monkeypatch.setattr("ziggurat.inspect.cost.estimate_cost", once)
    config, shallow = tiny_config(tmp_path, tiny_folder), ["model.encoder.layers=1", "model.decoder.layers=1"]
    call = ("inspect", config, *shallow, "training.recompute.encoder=1", "--no-check")
    text = ziggurat(*call).out
    found = json.loads(ziggurat(*call, "--json").out)["cost"]
    forward, memory = found["flops_per_token"]["forward"], found["memory"]
    assert f"{'    encoder layers':<36}{forward['encoder'] / 1e6:>12,.1f}" in text
    assert f"memory of an update, MiB (cpu)      {memory['peak'] / 2**20:>12,.1f}" in text
    assert "kept by the encoder (recompute 1)" in text
    assert memory["peak"] == sum(memory["parts"].values())
    batch = memory["batch"]
    assert f"{batch['sentences']} x {batch['source']} source and {batch['target']} target tokens" in text
    assert found["batches"]["origin"] == str(tiny_folder / "store")
    assert f"({found['batches']['origin']})" in text
    assert found["time"]["seconds"] > 0
    assert "seconds per update (cpu" in text
    idle, busy = (replace(found_before[0], time=replace(found_before[0].time, others=0.6, delay=d)) for d in (1.0, 2.5))
    for cost, said in ((idle, False), (busy, True)):
        found_before[:] = [cost]
        text = ziggurat(*call).out
        assert ("the machine is busy: 60% of its CPU time" in text) is said
        assert ("at least 2.5 times as long" in text) is said


def test_several_configurations_are_one_table(ziggurat: Ziggurat, tiny_folder: Path, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, tiny_folder)
    deep = tmp_path / "deep.yaml"
    deep.write_text(config.read_text().replace("layers: 2", "layers: 3"))
    call = ("inspect", config, deep, "transformer-base", "model.d_ff=16", "--no-cost", "--no-check")
    lines = ziggurat(*call).out.splitlines()
    assert [line.split()[0] for line in lines] == ["parameters", str(config), str(deep), "transformer-base"]
    rows = json.loads(ziggurat(*call, "--json").out)["configurations"]
    assert [row["name"] for row in rows] == [str(config), str(deep), "transformer-base"]
    assert all(f"{row['parameters']:,}" in line for row, line in zip(rows, lines[1:], strict=True))
    assert ziggurat(*call, "--suggest", tmp_path / "x.yaml").status == 2
    for wrong, message in (("nothing.yaml", "nothing.yaml"), ("model.d_ff", "model.d_ff"), (tmp_path, "neither a run")):
        result = ziggurat("inspect", config, wrong, "--no-cost", "--no-check")
        assert result.status == 2
        assert message in result.err


@pytest.mark.slow
def test_the_table_has_costs_and_verdicts(ziggurat: Ziggurat, tiny_folder: Path, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, tiny_folder)
    result = ziggurat("inspect", config, config, "--updates", 10, "--json")
    assert result.status == 0, result.err
    rows = json.loads(result.out)["configurations"]
    assert all({"flops", "seconds", "memory", "verdict"} <= row.keys() for row in rows)


def test_the_largest_batch_for_a_gpu_is_reported(
    ziggurat: Ziggurat, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, BatchShape]] = []

    def simulated(experiment: Experiment, sizes: tuple[int, int], shape: BatchShape) -> list[LargestBatch]:
        asked.append((experiment.training.precision, shape))
        return [LargestBatch(16, 0, 0), LargestBatch(24, 1200, 36_000)]

    monkeypatch.setattr("ziggurat.inspect.device_memory.largest_batches", simulated)
    call = ("inspect", tiny_config(tmp_path, tiny_folder), "--no-check", "--no-cost", "--device-memory")
    text = ziggurat(*call, "training.precision=auto").out
    assert f"{'  24 GiB':<36}{'36,000':>12}{'1,200':>12}" in text
    assert f"{'  16 GiB':<36}{'-':>12}{'-':>12}" in text
    found = json.loads(ziggurat(*call, "training.precision=fp32", "--json").out)["device_memory"]
    assert found["largest"][1] == {"gib": 24, "sentences": 1200, "tokens": 36_000}
    assert [precision for precision, _ in asked] == ["bf16", "fp32"]
    assert (found["source_length"], found["target_length"]) == asked[0][1][1:]


@pytest.mark.slow
def test_costs_of_a_run_are_reported(ziggurat: Ziggurat, trained: Path) -> None:
    assert "memory of an update" in ziggurat("inspect", trained).out
