"""Messages in a pipeline's words: keys that its file has, and ways out that its user has."""

from __future__ import annotations

import pytest

from tests.corpora.pipeline.conftest import parsed, trained, whole
from ziggurat.config.pipeline import ModelName
from ziggurat.corpora.pipeline.context import Corpora, PipelineContext
from ziggurat.corpora.pipeline.wording import errors_worded, held_out_worded, worded
from ziggurat.system.errors import DataError


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
        ("2 sentences of data.dev.0 (0.qhi)", "teacher", "2 sentences of bitext.dev.0"),
        ("2 sentences of data.dev.1 (dev.qhi), of which", "teacher", "2 sentences of bitext.hold_out.dev, of which"),
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
    found = worded(text, model, Corpora(PipelineContext(parsed(content))).keys(model))
    assert found.startswith(said)
    assert "data." not in found
    assert "ziggurat prepare" not in found


NO_FILTER = "they are machine translations that came out as such sentences, which no filter drops"


@pytest.mark.parametrize(
    ("rule", "own", "held", "way_out"),
    [
        ("keep", None, "bitext.dev.0", "`cleaning.held_out: sides` drops such pairs of the bitext, and what is dis"),
        ("pairs", None, "bitext.dev.0", "`cleaning.held_out: sides` drops such pairs of the bitext, and what is dis"),
        ("sides", None, "bitext.dev.0", NO_FILTER),
        ("pairs", "sides", "bitext.dev.0", NO_FILTER),
        ("sides", "pairs", "bitext.dev.0", "`bitext.train.0.filters.held_out: sides` drops such pairs of the bitext"),
        ("pairs", None, "bitext.hold_out.dev", NO_FILTER),
    ],
)
def test_the_way_out_of_contamination_is_one_that_is_left(rule: str, own: str | None, held: str, way_out: str) -> None:
    content = whole(cleaning={"held_out": rule})
    content["bitext"]["train"][0]["filters"] = {} if own is None else {"held_out": own}
    for text in ("3 of 20 sentences of {}: `data.filters.held_out: pairs` drops the 1, `sides` all 4",
                 "4 training pairs among {}: `data.filters.held_out: sides` drops them too"):  # fmt: skip
        found = held_out_worded(worded(text.format(held), "student"), parsed(content))
        assert found.startswith(text.split(": `")[0].format(held))
        assert found.split(": ", 1)[1].startswith(way_out)
        assert not found.endswith(("all 4", "too"))
    other = "student: `cleaning.max_pieces` dropped all"
    assert held_out_worded(other, parsed(content)) == other
