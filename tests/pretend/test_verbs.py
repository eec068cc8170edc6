"""The verbs on the pretend accelerator answer as on the CPU and refuse what they refuse on a GPU."""

from __future__ import annotations

import shutil
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import pytest

import ziggurat
from tests.pretend.conftest import DEVICES, LINES, experiment_of, opened, waits_of
from tests.small import moved, small_config
from tests.train.runs import QUIET
from tests.translate.test_shortlist import MODELS, ROWS, SIZE, TABLE, WANTED
from tools.pretend_device import NAME, counted
from ziggurat.config import DecodingConfig
from ziggurat.config.kinds import DecoderAttentionKind
from ziggurat.inspect.check import check_depth
from ziggurat.inspect.cost import estimate_cost
from ziggurat.inspect.diagnose import diagnose
from ziggurat.inspect.trial import TrialOptions
from ziggurat.model.build import build_model
from ziggurat.serve.config import ServeConfig
from ziggurat.system.errors import ConfigError
from ziggurat.train.loop import train
from ziggurat.translate.scorers import Shortlist, force_score, scorer_of
from ziggurat.translate.search import search
from ziggurat.translate.settings import SearchSettings, Sentence

MEMBERS = [1, pytest.param(2, marks=pytest.mark.slow)]


@pytest.fixture
def ensemble(members: int, request: pytest.FixtureRequest) -> tuple[Path, ...]:
    """As many models as a test has members."""
    found: tuple[Path, ...] = (request.getfixturevalue("run"),) if members == 1 else request.getfixturevalue("runs")
    return found


def assert_near(one: Any, other: Any) -> None:
    """Assert that two nested results agree up to rounding."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        one, other = list(one.values()), list(other.values())
    if isinstance(one, list | tuple):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_near(*pair)
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
    assert_near(of_device.as_record()["trial"], of_cpu.as_record()["trial"])


@pytest.mark.slow
def test_the_cost_is_estimated(tiny_folder: Path) -> None:
    cost = [estimate_cost(experiment_of(tiny_folder, device=name), (400, 400)) for name in DEVICES]
    assert cost[0].forward == cost[1].forward


@pytest.mark.slow
def test_diagnosis_measures_the_same(run: Path, tmp_path: Path) -> None:
    found = []
    for name in DEVICES:
        copy = shutil.copytree(run, tmp_path / name)
        found.append([record.values for record in diagnose(copy, device=name, layers=True, translate=3)])
    assert_near(found[1], found[0])


@pytest.mark.parametrize(
    ("columns", "options"),
    [
        pytest.param({"prefixes": ["Kras", "", "Kras kr"]}, {}, marks=pytest.mark.slow),
        pytest.param({"constraints": [["krar"], [], ["shan", "droul"]]}, {"beam_size": 3}, marks=pytest.mark.slow),
        ({}, {"search": "sample", "top_k": 5, "seed": 3}),
        ({}, {"next_words": 2}),
    ],
    ids=["prefixes", "constraints", "samples", "next words"],
)
@pytest.mark.parametrize("members", MEMBERS)
def test_searches_find_the_same(columns: dict[str, Any], options: dict[str, Any], ensemble: tuple[Path, ...]) -> None:
    found = [[t.text for t in opened(name, *ensemble).translate(LINES, **columns, **options)] for name in DEVICES]
    assert found[0] == found[1]


@pytest.mark.parametrize("members", MEMBERS)
def test_scores_are_the_same(ensemble: tuple[Path, ...]) -> None:
    targets = ["Kras krounei.", "Shan", "Droul krar zanar toul."]
    scored = [opened(name, *ensemble).score(LINES, targets) for name in DEVICES]
    assert_near([asdict(score) for score in scored[1]], [asdict(score) for score in scored[0]])


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
    assert waits_of(counts)[1] == 2 * members  # for their lengths, and for the number of columns
    assert all(place.endswith("copy") for place in counts.to_device)  # and no index for PyTorch to copy


DECODERS: dict[str, dict[str, Any]] = {
    **{kind: {"decoder": {"attention": kind}} for kind in get_args(DecoderAttentionKind)},
    "rnmt": {"family": "rnmt", "embedding": {"positions": "none", "sharing": "none"}},
}
SOURCES = [[5, 7, 3], [4, 3], [9, 12, 13, 6, 3]]
SAMPLED = replace(WANTED, beam_size=2, sampling=DecodingConfig(search="sample", top_k=5))
SEARCHES: dict[str, tuple[SearchSettings, dict[str, Any], bool]] = {
    "beam": (WANTED, {}, False),
    "beam of a shortlist": (WANTED, {}, True),
    "beam with constraints": (WANTED, {"constraints": ((6,), (8, 9))}, False),
    "beam after a prefix": (WANTED, {"prefix": (6, 8)}, False),
    "samples": (SAMPLED, {}, False),
    "samples of a shortlist": (SAMPLED, {}, True),
    "samples after a prefix": (SAMPLED, {"prefix": (6, 8)}, False),
}
"""SEARCHES are (settings, requests of each sentence, whether there is a shortlist); not all combine."""


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.slow) for kind in DECODERS])
def test_every_decoder_searches_and_scores_the_same(kind: str) -> None:
    built = build_model(small_config(2, 2, **DECODERS[kind]), ROWS, ROWS, seed=1)
    members = dict.fromkeys(DEVICES, moved(built, 0.4).double().eval())
    members[NAME] = deepcopy(members["cpu"]).to(NAME)
    for settings, asked, listed in SEARCHES.values():
        sentences = [Sentence(source, 8, key=number, **asked) for number, source in enumerate(SOURCES)]
        found = []
        for name, member in members.items():
            scorer = scorer_of([member], Shortlist(TABLE, SIZE, name) if listed else None)
            with counted() as counts:
                results = search(scorer, sentences, replace(settings, device=name))
            found.append([[(one.tokens, one.score) for one in each] for each in results])
        assert_near(found[1], found[0])
        assert waits_of(counts)[1] == 1 + listed
    ids = {"bos": WANTED.bos, "eos": WANTED.eos, "pad": WANTED.pad}
    scored = [force_score(m, SOURCES, [[6, 8], [], [9]], **ids, device=name) for name, m in members.items()]
    assert_near([asdict(score) for score in scored[1]], [asdict(score) for score in scored[0]])


@pytest.mark.slow  # its translator is that of the other tests
def test_a_server_answers_the_same(run: Path) -> None:
    pytest.importorskip("starlette")
    from starlette.testclient import TestClient

    from ziggurat.serve.server import app_of

    models = [{"path": str(run), "device": NAME, "threads": 1}]
    with TestClient(app_of(ServeConfig.model_validate({"models": models}), lambda _: None)) as client:
        answer = client.post("/translate", json={"q": LINES * 2, "source": "qlo", "target": "qhi"})
    assert answer.json()["translatedText"] == [each.text for each in opened("cpu", run).translate(LINES * 2)]


def test_translating_in_int8_is_refused(run: Path) -> None:
    with pytest.raises(ConfigError, match="int8"):
        ziggurat.load(run, device=NAME, precision="int8")


def test_layers_are_not_compiled_for_a_device_that_the_compiler_does_not_know(
    tiny_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="is not for the device `pretend`"):
        train(tmp_path / "run", experiment_of(tiny_folder, device=NAME, compile="layers"), console=QUIET)
