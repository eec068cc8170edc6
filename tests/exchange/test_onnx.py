"""Graphs for onnxruntime compute the same as the model, for every value on every axis of the architecture."""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.composition import covering
from tests.composition import model as composed
from tests.exchange.conftest import Written
from tests.exchange.examples import SENTENCES
from tests.exchange.stepping import worst_difference
from tests.small import moved
from ziggurat.config import LengthPenaltyConfig
from ziggurat.exchange.exporter import export_model
from ziggurat.exchange.onnx import write_onnx
from ziggurat.exchange.onnx_runtime import OnnxScorer, load_onnx, open_onnx
from ziggurat.model.build import build_model
from ziggurat.model.seq2seq import AlignmentHead, Seq2Seq
from ziggurat.system.errors import CheckpointError, ConfigError
from ziggurat.translate.hypotheses import LengthPenalty
from ziggurat.translate.scorers import ModelScorer
from ziggurat.translate.search import search
from ziggurat.translate.settings import SearchSettings, Sentence

for package in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(package)

Choices = dict[str, Any]
EOS = 2

ONE_LAYER = {"encoder.layers": 1, "decoder.layers": 1}
pytestmark = pytest.mark.slow  # because an export takes 20 seconds

SMALL: dict[str, Choices] = {
    "full": ONE_LAYER,
    "averaged": {**ONE_LAYER, "decoder.attention": "merged", "embedding.positions": "none"},
}
NAMES = ["full", "averaged"]
RNMT = {
    "family": "rnmt",
    "embedding.positions": "none",
    "embedding.sharing": "none",
    "dropout.activation": 0.0,
    "decoder.layers": 2,
}
OPTIONS: list[Choices] = [
    RNMT,
    {**RNMT, "memory": "transparent"},
    {
        "encoder.history": "dlcl",
        "decoder.history": "dlcl",
        "combination.groups": 4,
        "combination.softmax": True,
        "combination.window": 2,
    },
    {"residual": "hyper", "wiring.dynamic": True},
    {"encoder.attention": "relative", "decoder.attention": "relative", "attention.relative_values": True},
    {"encoder.d_model": 24, "embedding.sharing": "decoder"},
    {"attention.query_scale": True},
    {"embedding.zero_start": True, "embedding.shared_bias": True, "embedding.output_bias": True},
    {"decoder.attention": "average", "attention.average_ffn": True},
    {"decoder.attention": "merged", "attention.share_value": False},
]
"""OPTIONS are choices outside the axes of tests.composition."""


@cache
def small(name: str) -> Seq2Seq:
    return built(SMALL[name])


def built(choices: Choices) -> Seq2Seq:
    model = moved(build_model(composed(choices), 11, 11), 0.05).eval()
    model.decoder.aligned = AlignmentHead(0, 1)  # as if trained with guided alignment
    return model


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a small model, exported on first use, because that takes seconds."""

    @cache
    def folder(name: str) -> Path:
        path = tmp_path_factory.mktemp("onnx")
        write_onnx(path, small(name), composed(SMALL[name]), positions=40)
        return path

    return folder


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("beams", [1, 3])
def test_steps_equal_the_whole_model(exported: Callable[[str], Path], name: str, beams: int) -> None:
    scorer = OnnxScorer(open_onnx(exported(name), threads=1))
    assert worst_difference(small(name), scorer, beams=beams, steps=10) < 1e-5


def test_the_target_is_verified_and_translates(written: Written, listed: str, text: Path, tmp_path: Path) -> None:
    choices: Choices = {
        "residual": "rezero",
        "encoder": {"layers": 1, "history": "dlcl"},
        "decoder": {"layers": 1, "attention": "simplified_average"},
    }
    path = written(decoding={"precision": "bfloat16", "shortlist": listed}, **choices)
    report = export_model(path, "onnx", tmp_path / "out", verify=text)
    assert report["search_without"] == [f"`decoding.shortlist: {listed}`"]
    found = report["verification"]
    assert found["identical"] + found["ties"] == found["lines"] == len(SENTENCES)
    served = load_onnx(tmp_path / "out", beam_size=2, precision="auto")
    assert (served.decoding.beam_size, served.decoding.precision) == (2, "float32")
    with pytest.raises(ConfigError, match=r"decoding\.precision: int8`.* float32"):
        load_onnx(tmp_path / "out", precision="int8")
    with pytest.raises(ConfigError, match="need the model itself"):
        served.score(["a"], ["b"])


@pytest.mark.parametrize("choices", [*covering(1), *OPTIONS], ids=str)
def test_every_architecture_can_be_exported(tmp_path: Path, choices: Choices) -> None:
    model = built(choices)
    write_onnx(tmp_path, model, composed(choices), positions=40)
    scorer = OnnxScorer(open_onnx(tmp_path, threads=1))
    assert worst_difference(model, scorer, beams=3, steps=10) < 1e-5


def test_a_scorer_can_be_started_again(exported: Callable[[str], Path]) -> None:
    scorer = OnnxScorer(open_onnx(exported("full"), threads=1))
    for seed in range(2):
        assert worst_difference(small("full"), scorer, beams=2, steps=4, seed=seed) < 1e-5


def test_attention_is_returned_on_request(exported: Callable[[str], Path]) -> None:
    scorer = OnnxScorer(open_onnx(exported("full"), threads=1))
    scorer.start(2, 1)
    scorer.admit(torch.tensor([[4, 2]]), torch.ones(1, 2, dtype=torch.bool), 3)
    scorer.step(torch.tensor([[1, 1]]))
    assert scorer.attention is None


def test_more_positions_than_the_tables_have_are_refused(exported: Callable[[str], Path]) -> None:
    model = open_onnx(exported("full"), threads=1)
    assert model.manifest.max_positions == 40
    scorer = OnnxScorer(model)
    scorer.start(1, 1)
    for source, steps in ((41, 40), (40, 41)):
        ids = torch.full((1, source), 4)
        with pytest.raises(ConfigError, match="40 positions, but 41"):
            scorer.admit(ids, torch.ones_like(ids, dtype=torch.bool), steps)
    ids = torch.full((1, 40), 4)
    scorer.admit(ids, torch.ones_like(ids, dtype=torch.bool), 40)
    for _ in range(40):
        assert scorer.step(torch.tensor([[5]])).isfinite().all()


def test_models_without_a_table_have_no_limit(exported: Callable[[str], Path]) -> None:
    opened = open_onnx(exported("averaged"), threads=1)
    assert opened.manifest.max_positions is None
    scorer = OnnxScorer(opened)
    scorer.start(1, 1)
    ids = torch.full((1, 50), 4)
    scorer.admit(ids, torch.ones_like(ids, dtype=torch.bool), 50)
    for _ in range(50):
        assert scorer.step(torch.tensor([[5]])).isfinite().all()


def test_graphs_contain_no_paths(exported: Callable[[str], Path]) -> None:
    folder = exported("full")
    for name in ("encoder.onnx", "step.onnx"):
        content = (folder / name).read_bytes()
        assert b"site-packages" not in content
        assert b".py" not in content
        assert str(Path.cwd()).encode() not in content


def test_folders_that_cannot_be_opened_are_named(exported: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"onnx\.json: No such file"):
        open_onnx(tmp_path)
    folder = tmp_path / "model"
    shutil.copytree(exported("full"), folder)
    (folder / "step.onnx").write_bytes(b"no graph")
    with pytest.raises(CheckpointError, match=r"step\.onnx: cannot be opened"):
        open_onnx(folder)
    manifest = json.loads((folder / "onnx.json").read_text())
    (folder / "onnx.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        open_onnx(folder)
    (folder / "onnx.json").write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        open_onnx(folder)


def test_missing_packages_are_named(
    exported: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ConfigError, match=r"onnxscript: pip install 'ziggurat-mt\[export\]'"):
        write_onnx(tmp_path, small("full"), composed(ONE_LAYER), positions=40)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ConfigError, match="pip install"):
        open_onnx(exported("full"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["none", "power", "lingvo"])
def test_the_search_finds_the_same(exported: Callable[[str], Path], name: str, kind: str) -> None:
    draw = random.Random(3)
    sentences = [
        Sentence([*(draw.randrange(3, 11) for _ in range(length)), EOS], max_length=2 * length + 3, min_length=1)
        for length in sorted((draw.randint(1, 12) for _ in range(17)), reverse=True)
    ]
    penalty = LengthPenalty.of(LengthPenaltyConfig(kind=kind, coverage=0.3 if kind == "lingvo" else 0.0))
    settings = SearchSettings(
        beam_size=4,
        n_best=4,
        bos=1,
        eos=EOS,
        pad=0,
        forbidden=(0, 1),
        penalty=penalty,
        batch_sentences=5,  # so that new sentences replace finished ones
    )
    expected = search(ModelScorer(small(name)), sentences, settings)
    found = search(OnnxScorer(open_onnx(exported(name), threads=1)), sentences, settings)
    assert [[h.tokens for h in hypotheses] for hypotheses in found] == [
        [h.tokens for h in hypotheses] for hypotheses in expected
    ]
    for mine, theirs in zip(chain(*found), chain(*expected), strict=True):
        assert mine.score == pytest.approx(theirs.score, abs=1e-4)


class Recording:
    """A session that records the lengths of the states that it receives."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.steps: list[int] = []

    def run(self, names: list[str], inputs: dict[str, Any]) -> Any:
        self.steps.append(inputs["state.0.key"].shape[3])
        return self.session.run(names, inputs)


def test_slots_of_finished_sentences_are_freed(exported: Callable[[str], Path]) -> None:
    model = open_onnx(exported("full"), threads=1)
    recording = Recording(model.step)
    scorer = OnnxScorer(replace(model, step=recording))
    source = torch.tensor([[4, 2]])
    scorer.start(1, 2)
    for number in range(6):
        if number in (0, 3):
            scorer.admit(source, torch.ones_like(source, dtype=torch.bool), 9)
        scorer.step(torch.full((1 + (number in (3, 4)), 1), 5))
        if number == 4:
            scorer.keep(torch.tensor([1]))
    assert recording.steps == [0, 1, 2, 3, 4, 2]
