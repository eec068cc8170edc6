"""A student that starts as its teacher without some layers: what its training starts from, and what is refused."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import tiny_experiment
from tests.corpora.pipeline.conftest import TRAINING, MakeContext, parsed, trained, whole
from tests.small import checkpoint_meta, merged
from ziggurat.config import Experiment, dump
from ziggurat.corpora.pipeline.steps import pipeline_of
from ziggurat.corpora.pipeline.training import as_begun
from ziggurat.model.directory import open_model
from ziggurat.model.run_folder import write_meta
from ziggurat.model.tensors import weights
from ziggurat.system.errors import ConfigError
from ziggurat.system.staging import discard

QUICK: dict[str, Any] = {"validation": {"decode": False}, "checkpoint": {"every_updates": 60, "average_last": 0}}
STILL: dict[str, Any] = {"schedule": {"kind": "constant", "peak": 1e-9}, "stop": {"updates": 2}, **QUICK}
OTHERS = ("backward", "backtranslation", "distillation", "filter", "alignment", "shortlist", "export", "evaluation")


def teacher(**training: Any) -> dict[str, Any]:
    return merged(trained(2, **QUICK, **training), {"model": {"decoder": {"layers": 3}}})


def content(**sections: Any) -> dict[str, Any]:
    student = {"without_layers": "encoder.1,decoder.2-3", "training": merged(TRAINING, STILL)}
    parts = {"teacher": teacher(stop={"updates": 4}), "student": student, "quantisation": None, "monolingual": None}
    return whole(**{**dict.fromkeys(OTHERS), **parts, **sections})


def test_it_starts_with_the_remaining_layers_of_the_teacher(
    place: Path, context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(folder: Path) -> None:
        """Stop like a process killed once the student is trained and its starting model is gone."""
        discard(folder)
        raise SystemExit

    monkeypatch.setattr("ziggurat.corpora.pipeline.training.discard", killed)
    with pytest.raises(SystemExit):
        pipeline_of(context(content())).run()
    monkeypatch.setattr("ziggurat.corpora.pipeline.training.discard", discard)
    trained_at = (place / "w/student/run/last/model.safetensors").stat().st_mtime_ns
    (place / "w").rename(place / "moved")  # this moves the run's corpora, vocabulary and starting model
    assert pipeline_of(context(content(folder="moved"))).run().done == ("student", "report")
    (place / "moved").rename(place / "w")
    assert (place / "w/student/run/last/model.safetensors").stat().st_mtime_ns == trained_at
    begun = open_model("w/teacher/run", without_layers="encoder.1,decoder.2-3")
    student = open_model("w/student/run", which="last")
    assert (student.experiment.model.encoder.layers, student.experiment.model.decoder.layers) == (1, 1)
    assert student.tokenizers[0].size == begun.tokenizers[0].size
    # Two updates at rates below 1e-7 hardly change the starting weights.
    torch.testing.assert_close(weights(student.model), weights(begun.model), atol=1e-6, rtol=0)
    assert not (place / "w/student/start").exists()
    assert pipeline_of(context(content())).run().done == ()
    assert pipeline_of(context(content(), "student.without_layers='decoder.3, decoder.2,encoder.1'")).run().done == ()
    # Another teacher has other weights, and the same vocabulary.
    again = pipeline_of(context(content(teacher=teacher(stop={"updates": 5})))).run().done
    assert again == ("teacher", "student", "report")
    # Another vocabulary changes the student's; other layers change its weights.
    changes = "student.without_layers=decoder.1-2", "teacher.subword.vocabulary_size=140"
    again = pipeline_of(context(content(), *changes)).run().done
    assert again == ("teacher-data", "teacher", "student-data", "student", "report")
    begun, student = open_model("w/teacher/run", without_layers="decoder.1-2"), open_model("w/student/run")
    torch.testing.assert_close(weights(student.model), weights(begun.model), atol=1e-6, rtol=0)
    assert student.tokenizers[0].size == 140


def test_once_there_is_a_checkpoint_the_original_paths_count(tmp_path: Path) -> None:
    run = tmp_path / "run"
    then, now = (
        tiny_experiment(folder, start_from=str(folder / "model"), seed=seed)
        for folder, seed in ((tmp_path, 1), (tmp_path / ".." / tmp_path.name, 2))
    )
    assert now.data.train != then.data.train
    (run / "checkpoints/step-00000002").mkdir(parents=True)
    (run / "config.yaml").write_text(dump(then))
    # Without a readable checkpoint the files are read from their current paths.
    assert as_begun(run, now) == now
    checkpoint = run / "checkpoints/step-00000001"
    checkpoint.mkdir()
    kept = then.model_dump(mode="json")
    write_meta(checkpoint, checkpoint_meta(configuration=kept))
    training = now.training.model_copy(update={"start_from": then.training.start_from})
    data = then.data.model_copy(update={"store": now.data.store})
    assert as_begun(run, now) == now.model_copy(update={"data": data, "training": training})
    # A different number of corpora is not just a different path.
    more = now.model_copy(update={"data": now.data.model_copy(update={"train": now.data.train * 2})})
    assert as_begun(run, more).data.train == more.data.train


def test_an_existing_teacher_gives_the_same_start(place: Path, context: MakeContext) -> None:
    there = content(folder="other", teacher={"existing": "there/last"})

    def exchange(*changes: str) -> tuple[str, ...]:
        """Replace the teacher; return the steps that run because of that."""
        pipeline_of(context(content(student=None), "teacher.unicode=nfkc", *changes)).run()
        if (place / "there").exists():
            shutil.rmtree(place / "there")
        (place / "w/teacher/run").rename(place / "there")
        done = pipeline_of(context(there)).run().done
        begun = open_model("there", which="last", without_layers="encoder.1,decoder.2-3")
        student = open_model("other/student/run")
        torch.testing.assert_close(weights(student.model), weights(begun.model), atol=1e-6, rtol=0)
        assert student.tokenizers[0].size == begun.tokenizers[0].size
        assert student.experiment.data.unicode == "nfkc"
        return done

    assert exchange() == ("sets", "clean", "student-data", "student", "report")
    assert exchange("teacher.training.seed=3") == ("student", "report")
    assert exchange("teacher.subword.vocabulary_size=140") == ("student-data", "student", "report")
    turned = ("source_language=qhi", "target_language=qlo")
    with pytest.raises(ConfigError, match=r"`teacher.existing`: there/last translates from qlo to qhi; .*qhi to qlo"):
        pipeline_of(context(there, *turned))
    with pytest.raises(ConfigError, match=r"`student.without_layers`: .*the decoder has 3 layers, no layer 7"):
        pipeline_of(context(there, "student.without_layers=decoder.7"))


def test_its_costs_are_known_before_the_teacher_exists(
    place: Path, context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, tuple[int, int]]] = []

    def estimate(experiment: Experiment, vocabularies: tuple[int, int], reader: object) -> None:
        asked.append((experiment.model.decoder.layers, vocabularies))

    monkeypatch.setattr("ziggurat.inspect.cost.estimate_cost", estimate)
    student = next(step for step in pipeline_of(context(content())).steps if step.name == "student")
    with contextlib.suppress(AttributeError):  # stands for the cost, which is None here
        student.cost()
    assert asked == [(1, (150, 150))]


@pytest.mark.parametrize(
    ("sections", "overrides", "word"),
    [
        ({}, ["student.without_layers=decoder"], "`student.without_layers`: `decoder`: `decoder` does not name layers"),
        ({}, ["student.without_layers=decoder.1-3"], "nothing would be left of the decoder"),
        ({}, ["student.model.d_model=32"], "`without_layers` takes the teacher's `model`: leave it out"),
        (
            {},
            ["student.training.growth={stages: [{layers: 1, updates: 1}]}"],
            "trains from scratch: leave out either it or `without_layers`",
        ),
        ({}, ["student.training.lora={}"], "`training.lora` adapts an already trained model"),
        ({"teacher": None}, [], "`teacher` is missing: the student starts from it"),
        ({"teacher": {"without_layers": "decoder.1"}}, [], "`teacher.without_layers`: only a `student`"),
        (
            {},
            ["teacher.model.encoder.history=dlcl"],
            "`encoder.history: dlcl` has weights for the outputs of all layers",
        ),
    ],
    ids=str,
)
def test_impossible_students_are_refused(sections: dict[str, Any], overrides: list[str], word: str) -> None:
    with pytest.raises(ConfigError) as error:
        parsed(content(**sections), *overrides)
    assert word in str(error.value)


def test_a_recipe_sets_only_training_and_decoding() -> None:
    config = parsed(content(student={"recipe": "student-12-1-base", "without_layers": "decoder.1"}))
    assert config.student is not None
    assert config.student.training.schedule.warmup_updates > 1000
    assert config.student.model == type(config.student.model)()
