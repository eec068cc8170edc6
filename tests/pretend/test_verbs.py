"""The verbs on the pretend accelerator: the CPU's answers, and the refusals of a GPU."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ziggurat
from tests.conftest import tiny_experiment
from tests.train.runs import QUIET, records
from tests.translate.test_shortlist import MODELS, SIZE, TABLE, WANTED
from tools.pretend_device import NAME, counted
from ziggurat.config import Experiment
from ziggurat.config.load import change_section
from ziggurat.inspect.check import check_depth
from ziggurat.inspect.cost import estimate_cost
from ziggurat.inspect.diagnose import diagnose
from ziggurat.inspect.trial import TrialOptions
from ziggurat.serve.config import ServeConfig
from ziggurat.system.errors import ConfigError
from ziggurat.train.loop import train
from ziggurat.translate.choice import Sentence
from ziggurat.translate.scorers import Shortlist, scorer_of
from ziggurat.translate.search import search

DEVICES = ("cpu", NAME)
LINES = ["Madona dogun nobelim.", "Vi vados.", "", "Ko madon vados la dogun ko nobelim de vi."]
MEMBERS = [1, pytest.param(2, marks=pytest.mark.slow)]
NO_DROPOUT = {"residual": 0.0, "embedding": 0.0, "attention": 0.0, "activation": 0.0}


def experiment_of(folder: Path, **training: Any) -> Experiment:
    """The tiny experiment without dropout, whose random numbers are those of a device."""
    tiny = tiny_experiment(folder, **{"stop": {"updates": 6}, "device": "cpu", **training})
    return tiny.model_copy(update={"model": change_section(tiny.model, {"dropout": NO_DROPOUT}, "model")})


@pytest.fixture(scope="module")
def runs(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two trained models."""
    folder = tmp_path_factory.mktemp("verbs")
    for seed in (1, 2):
        train(folder / str(seed), experiment_of(tiny_folder, seed=seed), console=QUIET)
    return [folder / "1", folder / "2"]


def near(one: Any, other: Any) -> None:
    """Hold two nested results against each other; numbers may differ by rounding."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        one, other = list(one.values()), list(other.values())
    if isinstance(one, list | tuple):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            near(*pair)
    else:
        assert one == (pytest.approx(other, rel=2e-3, abs=2e-4, nan_ok=True) if isinstance(one, float) else other)


@pytest.mark.slow
def test_the_depth_check_finds_the_same(tiny_folder: Path) -> None:
    settings = TrialOptions(updates=4, tokens=200, measured_tokens=100, width=None)
    of_cpu, of_device = (
        check_depth(experiment_of(tiny_folder, device=name), settings, lambda *_: lambda _: None, remedies=False)
        for name in DEVICES
    )
    assert of_device.verdict.label == of_cpu.verdict.label
    near(of_device.as_record()["trial"], of_cpu.as_record()["trial"])


@pytest.mark.slow
def test_the_cost_is_estimated(tiny_folder: Path) -> None:
    cost = [estimate_cost(experiment_of(tiny_folder, device=name), (400, 400)) for name in DEVICES]
    assert cost[0].forward == cost[1].forward


@pytest.mark.slow
def test_diagnosis_measures_the_same(runs: list[Path], tmp_path: Path) -> None:
    found = []
    for name in DEVICES:
        copy = shutil.copytree(runs[0], tmp_path / name)
        found.append([record.values for record in diagnose(copy, device=name, layers=True, translate=3)])
    near(found[1], found[0])


@pytest.mark.parametrize(
    ("columns", "options"),
    [
        ({"prefixes": ["Kras", "", "", "Kras kr"]}, {}),
        ({"constraints": [["krar"], [], [], ["shan", "droul"]]}, {"beam_size": 4}),
        ({}, {"search": "sample", "top_k": 5, "seed": 3}),
        ({}, {"next_words": 2}),
    ],
    ids=["prefixes", "constraints", "samples", "next words"],
)
@pytest.mark.parametrize("members", MEMBERS)
def test_searches_find_the_same(
    columns: dict[str, Any], options: dict[str, Any], members: int, runs: list[Path]
) -> None:
    found = [
        [t.text for t in ziggurat.load(runs[:members], device=name).translate(LINES, **columns, **options)]
        for name in DEVICES
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("members", MEMBERS)
def test_scores_are_the_same(members: int, runs: list[Path]) -> None:
    targets = ["Kras krounei.", "Shan", "", "Droul krar zanar toul."]
    scored = [ziggurat.load(runs[:members], device=name).score(LINES, targets) for name in DEVICES]
    near([vars(one) for one in scored[1]], [vars(one) for one in scored[0]])


@pytest.mark.parametrize("members", MEMBERS)
def test_shortlists_allow_the_same(members: int) -> None:
    sentences = [Sentence([5, 7, 3], 8), Sentence([4, 3], 8, 2), Sentence([9, 12, 13, 6, 3], 8)]
    found = []
    for name in DEVICES:
        models = [model.to(name) for model in MODELS[:members]]
        with counted() as counts:
            results = search(scorer_of(models, Shortlist(TABLE, SIZE, name)), sentences, replace(WANTED, device=name))
        found.append([[one.tokens for one in each] for each in results])
    for model in MODELS:
        model.to("cpu")
    assert found[0] == found[1]
    steps = sum(n for place, n in counts.waits.items() if "hypotheses.py" in place)
    assert counts.waits.total() - steps == 2 * members  # when they enter: their lengths, and the number of columns


def test_a_server_answers_the_same(runs: list[Path]) -> None:
    pytest.importorskip("starlette")
    from starlette.testclient import TestClient

    from ziggurat.serve.server import app_of

    answers = []
    for name in DEVICES:
        models = [{"path": str(runs[0]), "device": name, "threads": 1}]
        with TestClient(app_of(ServeConfig.model_validate({"models": models}), lambda _: None)) as client:
            asked = {"q": LINES * 8, "source": "qlo", "target": "qhi"}
            answers.append(client.post("/translate", json=asked).json()["translatedText"])
    assert answers[0] == answers[1]
    assert len(answers[0]) == 8 * len(LINES)


@pytest.mark.slow
def test_training_in_int8_is_of_every_device_and_translating_in_int8_is_not(tiny_folder: Path, tmp_path: Path) -> None:
    losses = []
    for name in DEVICES:
        train(
            tmp_path / name,
            experiment_of(tiny_folder, device=name, quantise="int8", log_every_updates=1),
            console=QUIET,
        )
        losses.append([record["loss"] for record in records(tmp_path / name) if "loss" in record])
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    with pytest.raises(ConfigError, match="int8"):
        ziggurat.load(tmp_path / NAME, device=NAME, precision="int8")
    assert torch.isfinite(torch.tensor(losses)).all()


def test_layers_are_not_compiled_for_a_device_that_the_compiler_does_not_know(
    tiny_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="is not for the device `pretend`"):
        train(tmp_path / "run", experiment_of(tiny_folder, device=NAME, compile="layers"), console=QUIET)
