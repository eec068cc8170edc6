"""Steps pass every setting in their sections to the code that does the work; no default replaces one."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.corpora.pipeline.conftest import parsed, whole
from tests.small import merged
from ziggurat.config.pipeline import BitextCorpus, MonolingualText
from ziggurat.corpora.jobs.job import JobOutcome, Work
from ziggurat.corpora.jobs.launchers import processes, ray_actors
from ziggurat.corpora.pipeline.context import ExecutionOptions, PipelineContext, Progress
from ziggurat.corpora.pipeline.step import Step, settings_changed
from ziggurat.corpora.pipeline.steps import steps_of
from ziggurat.corpora.synthesis.backtranslation import BackTranslationJob
from ziggurat.corpora.synthesis.cross_entropy import FilterJob
from ziggurat.corpora.synthesis.lines import PairFilter
from ziggurat.exchange.argos import PackageChoices
from ziggurat.exchange.verification import Gate
from ziggurat.system.errors import ConfigError, DataError

W = Path("w")
IN_JOB: dict[str, Any] = {"seed": 9, "shard_lines": 33, "threads": 2, "device": "cuda:1"}
"""IN_JOB are the settings of a translating step as its job receives them."""
OF_STEP: dict[str, Any] = {**IN_JOB, "max_pieces": 77, "max_ratio": 4.5, "ratio_slack": 2, "workers": 3}


def step_of(content: dict[str, Any], name: str, execution: ExecutionOptions | None = None) -> Step:
    context = PipelineContext(parsed(content), execution=execution or ExecutionOptions())
    return next(step for step in steps_of(context) if step.name == name)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Work]]:
    """The settings passed to translation and to the filter."""
    asked: list[tuple[Any, Work]] = []

    def done(job: Any, work: Work) -> JobOutcome[Any]:
        asked.append((job, work))
        return JobOutcome(None, None)

    monkeypatch.setattr("ziggurat.corpora.pipeline.synthesis.back_translate", done)
    monkeypatch.setattr("ziggurat.corpora.pipeline.synthesis.filter_pairs", done)
    return asked


def launched(work: Work) -> tuple[Any, ...]:
    assert isinstance(work.launch, partial)
    return (work.launch.func, *work.launch.args)


def test_settings_of_back_translation(tmp_path: Path, jobs: list[tuple[Any, Work]]) -> None:
    section = {**OF_STEP, "method": "top-k", "decoding": {"length_penalty": {"alpha": 0.3}}}
    step_of(whole(backtranslation=section), "backtranslate").work(tmp_path)
    ((job, work),) = jobs
    assert job == BackTranslationJob(
        models=("w/backward/run",),
        inputs=("w/monolingual/target.txt",),
        out=tmp_path / "corpus",
        method="top-k",
        forward=False,
        filters=PairFilter(max_pieces=77, max_ratio=4.5, ratio_slack=2),
        decoding={"length_penalty": {"alpha": 0.3}},
        **IN_JOB,
    )
    assert launched(work) == (processes, 3)


@pytest.mark.parametrize("name", ["distil", "distil-monolingual"])
def test_settings_of_distillation(name: str, tmp_path: Path, jobs: list[tuple[Any, Work]]) -> None:
    decoding = {"beam_size": 6, "length_penalty": {"alpha": 0.3}}
    section = {**OF_STEP, "method": "noised-beam", "decoding": decoding}
    step_of(whole(distillation={**section, "n_best": 5, "nearest": "bleu"}), name).work(tmp_path)
    # References choose among candidates, and monolingual text has none.
    nearest: dict[str, Any] = {"references": ("w/clean/train/train.qhi",), "n_best": 5, "nearest": "bleu"}
    ((job, work),) = jobs
    assert job == BackTranslationJob(
        models=("w/teacher/run",),
        inputs=("w/clean/train/train.qlo" if name == "distil" else "w/monolingual/source.txt",),
        out=tmp_path / "corpus",
        method="noised-beam",
        forward=True,
        filters=PairFilter(max_pieces=77, max_ratio=4.5, ratio_slack=2),
        decoding=decoding,
        **IN_JOB,
        **(nearest if name == "distil" else {}),
    )
    assert launched(work) == (processes, 3)


@pytest.mark.parametrize(("lines", "shard"), [(0, 200), (19_999, 200), (30_000, 300), (200_000, 2000), (250_000, 2000)])
def test_shards_are_a_hundredth_of_the_text(
    lines: int, shard: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: list[tuple[Any, Work]]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w" / "clean" / "train").mkdir(parents=True)
    (tmp_path / "w" / "clean" / "train" / "train.qlo").write_text("a\n" * lines)
    step = step_of(whole(distillation={}), "distil")
    step.work(tmp_path)
    assert jobs[0][0].shard_lines == shard
    assert step.settings["shard_lines"] is None  # the text, on which it already depends, determines the rest


def test_every_key_of_a_corpus_that_affects_its_text_counts() -> None:
    """A new key counts, too: `row_columns` did not."""
    names = {name: step_of(whole(), name).settings for name in ("clean", "sets", "monolingual")}
    of_train, of_dev = names["clean"]["corpora"][0], names["sets"]["dev"][0]
    assert set(BitextCorpus.model_fields) - set(of_dev) == {"name", "weight", "tag", "source", "target", "path"}
    assert set(of_train) == {*of_dev, "name"}  # its files are named after it
    assert set(MonolingualText.model_fields) - set(names["monolingual"]["target"][0]) == {"path"}


def test_progress_is_reported_at_once_and_after_the_first_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("ziggurat.corpora.pipeline.context.time.monotonic", lambda: clock[0])
    said: list[str] = []
    progress = Progress(said.append)
    for seconds, done in ((0, 0), (2, 10), (4, 20), (23, 100), (24, 120)):
        clock[0] = seconds
        progress.show(0, done, 120)
    assert said == ["120 lines to do", "10 of 120 lines, 22 s left", "100 of 120 lines, 5 s left"]
    said.clear()
    Progress(said.append).show(40, 0, 120)
    assert said == ["40 of 120 lines were done before"]


def test_where_jobs_run(tmp_path: Path, jobs: list[tuple[Any, Work]]) -> None:
    """How a call executes a step is not one of the step's settings."""
    content = whole(backtranslation={**OF_STEP, "device": "cpu"}, filter={"threads": 4, "device": "cpu"})
    for name, threads in (("backtranslate", 2), ("filter", 4)):
        plain = step_of(content, name)
        for execution in (
            ExecutionOptions(workers=7, part=(1, 5)),
            ExecutionOptions("auto", 7),
            ExecutionOptions("auto"),
        ):
            step = step_of(content, name, execution)
            step.work(tmp_path)
            work = jobs.pop()[1]
            if execution.ray is None:
                assert (*launched(work), work.part) == (processes, 7, (1, 5))
            else:
                assert (*launched(work), work.part) == (ray_actors, "auto", execution.workers, (0, 1))
                assert isinstance(work.launch, partial)
                assert work.launch.keywords == {"cpus": threads, "gpus": 0}
            assert (step.settings, step.after) == (plain.settings, plain.after)
    with pytest.raises(ConfigError, match="step filter, `device: cuda:1`: Ray chooses the GPU"):
        step_of(whole(filter={"device": "cuda:1"}), "filter", ExecutionOptions("auto")).check()


def test_settings_of_the_filter(tmp_path: Path, jobs: list[tuple[Any, Work]]) -> None:
    """It drops no pair that distillation may produce, and the backward model translates targets into sources."""
    section = {"keep": 0.7, "threads": 2, "workers": 3, "device": "cuda:1"}
    step = step_of(whole(filter=section, distillation={"max_pieces": 500}), "filter")
    step.work(tmp_path)
    ((job, work),) = jobs
    assert job == FilterJob(
        models=("w/backward/run",),
        sources=("w/distil/corpus/source.txt", "w/distil-monolingual/corpus/source.txt"),
        targets=("w/distil/corpus/target.txt", "w/distil-monolingual/corpus/target.txt"),
        out=tmp_path / "corpus",
        keep=0.7,
        reverse=True,
        max_pieces=500,
        device="cuda:1",
        threads=2,
    )
    assert launched(work) == (processes, 3)
    assert step.settings["max_pieces"] == 500


def test_settings_of_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, dict[str, Any]] = {}

    def export_model(path: Path, to: str, out: Path, **options: Any) -> None:
        asked[to] = {"path": path, "out": out, **options}

    monkeypatch.setattr("ziggurat.exchange.exporter.export_model", export_model)
    section = {
        "ctranslate2": {"quantization": "int8", "lines": 8, "tolerance": 0.7},
        "argos": {"lines": 9, "metadata": {"package_version": "2.5", "license": "a = b"}},
    }
    unquantised = whole(export={"onnx": {}}, quantisation=None, shortlist=None)
    for content, names in ((whole(export=section), section), (unquantised, ["onnx"])):
        for to in names:
            step_of(content, f"export-{to}").work(tmp_path)
    for options in asked.values():
        del options["say"]
    usual: dict[str, Any] = {"path": W / "quantise/run", "verify": W / "sets/dev/0.qlo", "force": True, "gate": None,
                             "quantization": None, "package": None, "shortlist": None}  # fmt: skip
    assert asked == {
        "ctranslate2": usual | {
            "out": tmp_path / "ctranslate2",
            "lines": 8,
            "quantization": "int8",
            "gate": Gate(W / "sets/test/babel.qlo", W / "sets/test/babel.qhi", 0.7),
            "shortlist": "w/shortlist/student.shortlist",
        },
        "argos": usual | {
            "out": tmp_path / "argos",
            "lines": 9,
            "package": PackageChoices({"package_version": "2.5", "license": "a = b"}),
        },
        "onnx": usual | {"out": tmp_path / "onnx", "lines": 1000, "path": W / "student/run"},
    }  # fmt: skip


def test_settings_of_the_shortlist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def estimate_shortlist(store: Path, **options: Any) -> str:
        asked.append((store, options))
        return "table"

    monkeypatch.setattr("ziggurat.data.corpus.Store.open", lambda path: path)
    monkeypatch.setattr("ziggurat.data.shortlist.estimate_shortlist", estimate_shortlist)
    monkeypatch.setattr("ziggurat.data.shortlist.write_shortlist", lambda *given: asked.append(given))
    section = {"best": 7, "frequent": 8, "floor": 0.01, "pairs": 9}
    step_of(whole(shortlist=section), "shortlist").work(tmp_path)
    assert asked == [(W / "student-data/store", section), (str(tmp_path / "student.shortlist"), "table")]


def test_training_outputs_the_models_for_translation() -> None:
    """Whether the average is used is known only after it has been scored."""
    averaging = {"checkpoint": {"average_last": 2}}
    content = whole()
    plain = set(step_of(content, "student").outputs)
    content["student"]["training"] = merged(content["student"]["training"], averaging)
    average = {"run/averaged/model.safetensors", "run/averaged/validation.json"}
    assert set(step_of(content, "student").outputs) == plain | average
    assert "run/best/model.safetensors" in plain


def shortlists_of(content: dict[str, Any]) -> dict[str, list[str]]:
    """Return the shortlists among the files of the steps that have any."""
    steps = [
        step for step in steps_of(PipelineContext(parsed(content))) if step.name not in ("sets", "clean", "monolingual")
    ]
    files = {step.name: [path.name for paths in step.inputs().values() for path in paths] for step in steps}
    return {name: found for name, found in files.items() if found}


def test_shortlists_are_files_of_the_steps_that_translate_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They count by content: a rewritten one keeps its name. Scores and validation do not use them."""
    monkeypatch.chdir(tmp_path)
    content, made = whole(), "w/shortlist/student.shortlist"
    for name in ("teacher", "student", "backward"):
        content[name]["decoding"] = {"shortlist": f"list-of-{name}"}
    with pytest.raises(DataError, match="list-of-backward: no such file, but the backward model is to translate"):
        shortlists_of(content)
    for name in ("teacher", "student", "backward", "step"):
        Path(f"list-of-{name}").touch()
    content["distillation"]["decoding"] = {"shortlist": "list-of-step"}
    assert shortlists_of(content) == {
        "backtranslate": ["list-of-backward"],
        "distil": ["list-of-step"],
        "distil-monolingual": ["list-of-step"],
        "evaluate": ["list-of-teacher", "list-of-student"],
    }
    content["distillation"]["decoding"] = {"shortlist": None}
    assert not {"distil", "distil-monolingual"} & shortlists_of(content).keys()
    assert shortlists_of({**content, "shortlist": None})["export-ctranslate2"] == ["list-of-student"]
    # A shortlist that the pipeline makes does not exist beforehand.
    content["student"]["decoding"]["shortlist"] = made
    assert shortlists_of(content)["evaluate"] == ["list-of-teacher"]
    assert step_of(content, "evaluate").after["shortlist"] == ["student.shortlist"]


def kept(*overrides: str) -> dict[str, Any]:
    """The settings that make each step run again."""
    return {step.name: (step.settings, step.after) for step in steps_of(PipelineContext(parsed(whole(), *overrides)))}


@pytest.mark.parametrize(
    "override",
    [
        "teacher.training.log_every_updates=10",
        "teacher.training.tensorboard=true",
        "teacher.training.wandb={project: mine}",
        "teacher.training.mlflow={experiment: mine}",
        "teacher.training.diagnostics={every_updates: 7}",
        "teacher.training.checkpoint.keep_last=9",
        "teacher.training.checkpoint.keep_best=3",
        "teacher.training.checkpoint.keep_every=60",
        "teacher.training.checkpoint.asynchronous=true",
        "teacher.training.recompute={encoder: 1}",
        "teacher.training.device=cpu",
        "teacher.training.threads=2",
        "quantisation.training={log_every_updates: 3}",
        "distillation.threads=2",
        "distillation.workers=2",
        "filter.device=cpu",
    ],
)
def test_options_that_do_not_change_a_result_are_not_settings(override: str) -> None:
    assert kept(override) == kept()


@pytest.mark.parametrize(
    ("override", "step", "said"),
    [
        ("teacher.training.precision=bf16", "teacher", 'training.precision: "fp32" -> "bf16"'),
        ("teacher.training.checkpoint.keep_best=0", "teacher", "training.checkpoint.keep_best: 1 -> 0"),
        ("teacher.training.checkpoint.average_last=2", "teacher", "training.checkpoint.average_last: 0 -> 2"),
        ("teacher.training.checkpoint.every_updates=20", "teacher", "training.checkpoint.every_updates: 30 -> 20"),
        ("distillation.max_ratio=1.5", "distil", "max_ratio: 1000.0 -> 1.5"),
        ("evaluation.threads=2", "evaluate", "threads: 1 -> 2"),
        ("cleaning.identical=false", "clean", "cleaning.identical: true -> false"),
    ],
)
def test_options_that_may_change_a_result_are_settings(override: str, step: str, said: str) -> None:
    before = json.loads(json.dumps(kept()[step][0]))
    assert settings_changed(before, kept(override)[step][0]) == [said]


@pytest.mark.parametrize("name", ["distil", "filter"])
def test_the_device_of_a_job_is_resolved_from_auto(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_of(whole(distillation={}, filter={}), name)
    for there in (False, True):
        found = torch.device("cuda") if there else None
        monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available, found=found: found)
        assert step.machine() == {"threads": 1, "device": "auto: cuda" if there else "auto: cpu"}
    assert step_of(whole(), name).machine()["device"] == "cpu"


def test_distilled_text_keeps_the_order_of_the_bitext() -> None:
    """An earlier version did not record it: its results stay."""
    corpora = [{"name": name, "source": f"{name}.qlo", "target": f"{name}.qhi"} for name in "ab"]
    bitext = whole()["bitext"]
    one, other = (step_of(whole(bitext={**bitext, "train": c}), "distil") for c in (corpora, corpora[::-1]))
    assert settings_changed(one.settings, other.settings) == ['corpora.0: "a" -> "b"', 'corpora.1: "b" -> "a"']
    earlier = {key: value for key, value in one.settings.items() if key != "corpora"}
    assert settings_changed(earlier, other.settings) == []


def test_every_setting_is_recorded_even_defaults() -> None:
    found = kept()
    assert found["teacher"][0]["training"]["optimiser"]["epsilon"] == 1e-9
    assert found["distil"][0]["max_pieces"] == 250
    assert found["clean"][0]["cleaning"]["max_length_ratio"] == 3
    assert found["export-ctranslate2"][0]["tolerance"] is None
