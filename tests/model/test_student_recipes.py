"""The recipes for students: their sizes and export targets match their summaries."""

from __future__ import annotations

import re

import pytest
import torch

from ziggurat.config.recipes import load_named, plain_recipe_names, recipe_summary
from ziggurat.exchange.exporter import reachable
from ziggurat.model.build import assemble, count_parameters

STUDENTS = [name for name in plain_recipe_names() if name.startswith("student-")]


@pytest.mark.parametrize("name", STUDENTS)
def test_a_student_matches_its_summary(name: str) -> None:
    experiment, summary = load_named(name), recipe_summary(name)
    model, size = experiment.model, experiment.data.subword.vocabulary_size
    with torch.device("meta"):
        parameters = count_parameters(assemble(model, size, size))
    assert f"{parameters / 1e6:.0f}M parameters" in summary
    layers = f"{model.encoder.layers}-{model.decoder.layers}"
    assert f"Student of {layers} layers and width {model.d_model}" in summary
    assert (f"{model.residual}-norm" in summary, name.split("-")[1:3]) == (True, layers.split("-"))
    assert ("CTranslate2" in summary) == (not reachable(experiment)["ctranslate2"])
    kinds = {"full": "", "ssru": "recurrent", "average": "average attention", "merged": "merged attention"}
    assert kinds[model.decoder.attention] in summary
    assert model.decoder.attention == "full" or name.endswith(f"-{model.decoder.attention}")


def test_there_are_students_of_every_shape() -> None:
    shapes = {re.match(r"student-(\d+-\d+)-", name)[1] for name in STUDENTS}  # type: ignore[index]
    assert shapes == {"6-2", "6-4", "12-1", "12-2", "18-1"}
