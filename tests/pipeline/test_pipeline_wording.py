"""Messages in a pipeline's words: keys that its file has, and ways out that its user has."""

from __future__ import annotations

import pytest

from tests.pipeline.conftest import parsed, trained, whole
from ziggurat.config.pipeline import ModelName
from ziggurat.errors import DataError
from ziggurat.pipeline.road import Corpora, Road
from ziggurat.pipeline.wording import errors_worded, worded


def test_errors_name_the_keys_of_the_model() -> None:
    with pytest.raises(DataError) as error, errors_worded("teacher"):
        raise DataError("data.subword: no model; raise data.subword.vocabulary_size or set `model.embedding.sharing`")
    said = "teacher.subword: no model; raise teacher.subword.vocabulary_size or set `teacher.model.embedding.sharing`"
    assert str(error.value) == said


@pytest.mark.parametrize(
    ("text", "model", "said"),
    [
        ("data.train.0: no pairs", "teacher", "bitext.train.0: no pairs"),
        ("data.train.1: 3 pairs; `data.filters.identical`", "teacher", "backtranslation: 3 pairs; `cleaning.ident"),
        ("data.train.0: its source", "student", "distillation: its source"),
        ("2 sentences of data.dev.0 (0.qhi)", "teacher", "2 sentences of bitext.dev.0 (0.qhi)"),
        ("data.dev.1: its source", "teacher", "bitext.hold_out.dev: its source"),
        ("set training.batch.max_tokens to 9, or lower data.filters.max_pieces and run `ziggurat prepare` again",
         "student", "set student.training.batch.max_tokens to 9, or lower cleaning.max_pieces"),
        ("raise it, or lower `data.filters.max_pieces` (which) and prepare again", "student",
         "raise it, or lower `cleaning.max_pieces` (which)"),
        ("w/x: missing; run `ziggurat prepare --force` again", "student", "w/x: missing; give `--force student-data`"),
        ("make room (or lower `training.checkpoint.keep_last`), then `--resume`", "backward",
         "make room (or lower `backward.training.checkpoint.keep_last`), then the same command"),
        ("data.source_language: german is no code", "backward", "target_language: german is no code"),
        ("w/training.loss/best/model.safetensors: damaged", "student",
         "w/training.loss/best/model.safetensors: damaged"),
    ],
)  # fmt: skip
def test_keys_and_ways_out_are_those_of_a_pipeline(text: str, model: ModelName, said: str) -> None:
    content = whole(student=trained(), teacher=trained())
    content["bitext"]["hold_out"] = {"dev": 1}
    found = worded(text, model, Corpora(Road(parsed(content))).keys(model))
    assert found.startswith(said)
    assert "data." not in found
    assert "ziggurat prepare" not in found
