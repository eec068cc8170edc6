"""Problems are described in a pipeline's terms: with the keys of its file, and ways out that its user has."""

from __future__ import annotations

import pytest

from tests.corpora.pipeline.conftest import parsed, trained, whole
from ziggurat.config.pipeline import ModelName, pipeline_names
from ziggurat.corpora.pipeline.context import Corpora, PipelineContext, errors_renamed, with_way_out
from ziggurat.system.errors import DataError, Problem, Remedy


def test_errors_name_the_models_section() -> None:
    with pytest.raises(DataError) as error, errors_renamed("teacher"):
        raise DataError(
            "data.subword: no model; raise data.subword.vocabulary_size or set `model.embedding.sharing`",
            key="data.subword",
            named=["data.subword.vocabulary_size", "model.embedding.sharing"],
        )
    message = (
        "teacher.subword: no model; raise teacher.subword.vocabulary_size or set `teacher.model.embedding.sharing`"
    )
    assert str(error.value) == message


PIECES = "data.filters.max_pieces"


@pytest.mark.parametrize(
    ("problem", "model", "message"),
    [
        (Problem("data.train.0", "data.train.0: no pairs"), "teacher", "bitext.train.0: no pairs"),
        (Problem("data.train.1", "data.train.1: 3 pairs; `data.filters.identical`", named=("data.filters.identical",)),
         "teacher", "backtranslation: 3 pairs; `cleaning.ident"),
        (Problem("data.train.0", "data.train.0: its source"), "student", "distillation: its source"),
        (Problem("", "2 of data.dev.0 (0.qhi)", named=("data.dev.0 (0.qhi)",)), "teacher", "2 of bitext.dev.0"),
        (Problem("", "2 of data.dev.1 (dev.qhi), of which", named=("data.dev.1 (dev.qhi)",)), "teacher",
         "2 of bitext.hold_out.dev, of which"),
        (Problem("data.dev.1", "data.dev.1: its source"), "teacher", "bitext.hold_out.dev: its source"),
        (Problem("training.batch.max_tokens", "set training.batch.max_tokens to 9, or lower data.filters.max_pieces "
                 "and run `ziggurat prepare` again", named=(PIECES, Remedy.THEN_PREPARE)),
         "student", "set student.training.batch.max_tokens to 9, or lower cleaning.max_pieces"),
        (Problem("", "raise it, or lower `data.filters.max_pieces` (which) and prepare again",
                 named=(PIECES, Remedy.PREPARE_AFTER)), "student", "raise it, or lower `cleaning.max_pieces` (which)"),
        (Problem("", "w/x: missing", Remedy.PREPARE_ANEW), "student", "w/x: missing; give `--force student-data`"),
        (Problem("training.checkpoint.keep_last", "make room (or lower `training.checkpoint.keep_last`), then "
                 "`--resume`", named=(Remedy.RESUME,)),
         "backward", "make room (or lower `backward.training.checkpoint.keep_last`), then the same command"),
        (Problem("data.source_language", "data.source_language: german is not a code"), "backward",
         "target_language: german is not a code"),
        (Problem("training.loss", "w/training.loss/best/model.safetensors: damaged"), "student",
         "w/training.loss/best/model.safetensors: damaged"),
    ],
)  # fmt: skip
def test_keys_and_ways_out_are_those_of_a_pipeline(problem: Problem, model: ModelName, message: str) -> None:
    content = whole(student=trained(), teacher=trained())
    content["bitext"]["hold_out"] = {"dev": 1}
    found = problem.shown(pipeline_names(model, Corpora(PipelineContext(parsed(content))).keys(model)))
    assert found.startswith(message)
    assert "data." not in found
    assert "ziggurat prepare" not in found


NO_FILTER = "they are machine translations that equal such sentences, which no filter drops"


@pytest.mark.parametrize(
    ("rule", "own", "held", "way_out"),
    [
        ("keep", None, "data.dev.0", "`cleaning.held_out: sides` drops such pairs of the bitext, and what is dis"),
        ("pairs", None, "data.dev.0", "`cleaning.held_out: sides` drops such pairs of the bitext, and what is dis"),
        ("sides", None, "data.dev.0", NO_FILTER),
        ("pairs", "sides", "data.dev.0", NO_FILTER),
        ("sides", "pairs", "data.dev.0", "`bitext.train.0.filters.held_out: sides` drops such pairs of the bitext"),
        ("pairs", None, "data.dev.1", NO_FILTER),
    ],
)
def test_the_way_out_of_contamination_is_still_available(rule: str, own: str | None, held: str, way_out: str) -> None:
    content = whole(cleaning={"held_out": rule})
    content["bitext"]["train"][0]["filters"] = {} if own is None else {"held_out": own}
    config = parsed(content)
    known = pipeline_names("student", Corpora(PipelineContext(config)).keys("student"))
    drops = "`data.filters.held_out: pairs` drops the 1, `sides` all 4"
    overlap = Problem(
        "data.filters.held_out", f"3 of 20 sentences of {held} (a.qhi):", drops, "warning", (f"{held} (a.qhi)",)
    )
    found = with_way_out(overlap, config, known)
    assert found.remedy.startswith(way_out)
    assert found.shown(known).startswith(f"3 of 20 sentences of {known[held]}: {way_out}")
    other = Problem("", "`cleaning.max_pieces` dropped all")
    assert with_way_out(other, config, known) == other
