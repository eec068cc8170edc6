"""Existing models: what a pipeline and `evaluate` find out about a run's checkpoint."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import tiny_experiment
from tests.corpora.pipeline.conftest import MakeContext, whole
from tests.small import checkpoint_meta
from ziggurat.cli.engine import ModelOptions, model_languages
from ziggurat.config import Experiment, dump
from ziggurat.corpora.pipeline.costs import CorpusSizes, Costs
from ziggurat.corpora.pipeline.evaluation import _models
from ziggurat.corpora.pipeline.steps import steps_of
from ziggurat.model.run_folder import write_meta
from ziggurat.model.tensors import write_tensors

OTHERS = ("backward", "backtranslation", "distillation", "filter", "alignment", "student", "quantisation", "shortlist")


def test_a_checkpoint_of_a_growing_run_is_as_deep_as_its_weights(
    tmp_path: Path, context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint's folder has no configuration, and the run's configuration has the final depth."""
    run = tmp_path / "run"
    folder = run / "checkpoints" / "step-00000001"
    folder.mkdir(parents=True)
    (run / "last").symlink_to(folder)
    grown = tiny_experiment(tmp_path, growth={"stages": [{"layers": 1, "updates": 1}]})
    decoding = grown.decoding.model_copy(update={"shortlist": str(tmp_path / "list")})
    (run / "config.yaml").write_text(dump(grown.model_copy(update={"decoding": decoding})))
    (tmp_path / "list").touch()
    write_tensors(folder / "model.safetensors", {})
    write_meta(folder, checkpoint_meta(encoder_layers=1, decoder_layers=2))

    def inspected(experiment: Experiment, folder: Path) -> SimpleNamespace:
        return SimpleNamespace(parameters=experiment.model.encoder.layers)

    monkeypatch.setattr("ziggurat.model.counts.inspect_experiment", inspected)
    unwanted: dict[str, Any] = dict.fromkeys((*OTHERS, "monolingual", "evaluation"))
    found = context(whole(teacher={"existing": str(run / "last")}, **unwanted))
    (row,) = _models(found)
    assert (row.layers, row.parameters) == ((1, 2), 1)
    costs = Costs({}, CorpusSizes(found), {"teacher": run / "last"})
    assert costs._experiment("teacher")[0].model.encoder.layers == 1
    export = next(step for step in steps_of(found) if step.name == "export-ctranslate2")
    export.check()  # raises nothing
    assert [tmp_path / "list"] in export.inputs().values()
    assert model_languages(str(run / "last"), ModelOptions(None, "cpu", None)) == ("qlo", "qhi")
