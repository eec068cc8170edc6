"""Remedies: what they change, when they are left out, and how they are ranked."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import tiny_experiment
from ziggurat.config import Experiment
from ziggurat.config.load import change_section
from ziggurat.config.recipes import load_named, recipe_names
from ziggurat.data.prepare import prepare
from ziggurat.inspect.check import REFERENCES_FILE, REMEDIES, Label, TriedRemedy, Verdict, applied, check_depth, ranked
from ziggurat.inspect.trial import TrialOptions, peak_rate

BY_NAME = {remedy.name.split()[0]: remedy for remedy in REMEDIES}


def with_model(experiment: Experiment, **changes: Any) -> Experiment:
    return change_section(experiment, {"model": changes}, "")


@pytest.fixture(scope="module")
def post() -> Experiment:
    return load_named("multi30k-de-en", ["model.residual=post", "model.encoder.layers=18", "model.decoder.layers=18"])


def test_every_remedy_applies_to_deep_post_norm_and_differs(post: Experiment) -> None:
    changed = [applied(remedy, post) for remedy in REMEDIES]
    assert all(changed)
    assert len({experiment.model_dump_json() for experiment in changed if experiment}) == len(REMEDIES)
    for experiment in changed:
        assert experiment is not None
        assert experiment.data == post.data
        assert experiment.model.encoder.layers == 18


def test_settings_of_remedies(post: Experiment) -> None:
    admin = applied(BY_NAME["ADMIN"], post)
    assert admin is not None
    assert (admin.model.residual, admin.model.init.kind) == ("admin", "admin")
    assert (admin.training.optimiser.kind, admin.training.optimiser.rectified_only) == ("radam", True)
    assert admin.training.optimiser.betas == post.training.optimiser.betas
    slow = applied(BY_NAME["a"], post)
    assert slow is not None
    assert peak_rate(slow) == pytest.approx(peak_rate(post) / 3)
    assert slow.model == post.model


@pytest.mark.parametrize("name", ["DeepNorm", "DS-Init,", "pre-norm with DLCL"])
@pytest.mark.parametrize(
    "changes",
    [
        {"decoder": {"residual": "lingvo"}},
        {"encoder": {"ranges": [{"layers": 3, "residual": "res_post"}]}},
        {"wiring": {"gpas": True}},
    ],
    ids=str,
)
def test_a_remedy_replaces_the_residual(post: Experiment, changes: dict[str, Any], name: str) -> None:
    remedy = next(remedy for remedy in REMEDIES if remedy.name.startswith(name))
    changed, plain = (applied(remedy, experiment) for experiment in (with_model(post, **changes), post))
    assert changed is not None
    assert changed == plain


def test_a_method_already_in_use_is_not_a_remedy(post: Experiment) -> None:
    pre = applied(REMEDIES[0], post)
    assert pre is not None
    names = [remedy.name for remedy in REMEDIES if remedy.model and applied(remedy, pre) is None]
    assert names == ["pre-norm"]


@pytest.mark.parametrize("name", [n for n in recipe_names() if "rnmt" in n][:1])
def test_remedies_that_do_not_fit_a_family_are_left_out(name: str) -> None:
    rnmt = load_named(name, [])
    assert rnmt.model.family == "rnmt"
    assert [remedy.name for remedy in REMEDIES if applied(remedy, rnmt)] == ["a third of the learning rate"]


def test_ranking(post: Experiment) -> None:
    def outcome(label: Label, learned: float) -> TriedRemedy:
        return TriedRemedy(REMEDIES[0], Verdict(label, learned, ()), post)

    best, second = outcome("trains", 0.9), outcome("trains", 0.2)
    risky, worst = outcome("risky", 0.99), outcome("will not train", float("-inf"))
    assert ranked([worst, second, risky, best]) == [best, second, risky, worst]


def test_the_check_tries_remedies_only_where_they_are_needed(tmp_path: Path) -> None:
    """A rate of 1e9 diverges; only the requested remedies are tried."""
    experiment = tiny_experiment(tmp_path)
    prepare(experiment.data)
    settings = TrialOptions(updates=2, tokens=200, measured_tokens=100)
    schedule = experiment.training.schedule.model_copy(update={"peak": 1e9})
    hopeless = experiment.model_copy(update={"training": experiment.training.model_copy(update={"schedule": schedule})})
    names: list[str] = []

    def begun(name: str, updates: int) -> Any:
        assert updates in (2, 4, 8)
        names.append(name)
        return lambda update: None

    check = check_depth(hopeless, settings, begun)
    assert check.verdict.label == "will not train"
    # Two updates teach nothing, so the reference takes twice as many, and then twice as many again.
    assert names[:4] == ["a shallow model"] * 3 + ["the configuration"]
    assert check.reference.updates == check.settings.updates == 8
    assert sorted(names[4:]) == sorted(outcome.remedy.name for outcome in check.remedies)
    assert len(names) > 4
    names.clear()
    assert check_depth(hopeless, settings, begun, remedies=False).remedies == ()
    assert names == ["the configuration"]  # the reference is kept in the store
    names.clear()
    data = change_section(hopeless.data, {"modifiers": {"upper_case": {"probability": 1.0}}}, "data")
    check_depth(hopeless.model_copy(update={"data": data}), settings, begun, remedies=False)
    assert names == ["a shallow model"] * 3 + ["the configuration"]  # other text needs another reference
    kept = json.loads((file := Path(experiment.data.store) / REFERENCES_FILE).read_text("utf-8"))
    for damaged in ("[1", "[1.0]", json.dumps(dict.fromkeys(kept, math.nan))):
        names.clear()
        file.write_text(damaged, encoding="utf-8")
        assert check_depth(hopeless, settings, begun, remedies=False).reference == check.reference
        assert names == ["a shallow model"] * 3 + ["the configuration"]
    prepare(experiment.data)  # `prepare` knows that file
    record = check.as_record()
    assert record["verdict"]["label"] == "will not train"
    assert [entry["name"] for entry in record["remedies"]] == [outcome.remedy.name for outcome in check.remedies]
