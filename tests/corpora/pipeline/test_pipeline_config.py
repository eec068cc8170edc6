"""A pipeline's file: errors name file, line and key; sections may be omitted; and which steps a configuration has."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.corpora.pipeline.conftest import MakeContext, parsed, trained, whole
from ziggurat.config.load import dump, parse_as
from ziggurat.config.pipeline import MODELS, BitextConfig, PipelineConfig
from ziggurat.config.pipeline_models import TrainedConfig
from ziggurat.config.recipes import load_named
from ziggurat.corpora.jobs.job import JobOutcome
from ziggurat.corpora.jobs.tasks import job_decoding
from ziggurat.corpora.pipeline.context import DISTILLED, Corpora, PipelineContext
from ziggurat.corpora.pipeline.demo_data import EMBEDDED, embedded_text
from ziggurat.corpora.pipeline.models import (
    experiment_of,
    in_fresh_state,
    refuse_any_language,
    refuse_tags_alone,
    shipped,
)
from ziggurat.corpora.pipeline.steps import pipeline_of, steps_of
from ziggurat.corpora.synthesis.backtranslation import BackTranslationJob
from ziggurat.data.subword import save_tokenizers
from ziggurat.data.vocabulary import VocabularyTokenizer
from ziggurat.model.tensors import write_tensors
from ziggurat.system.errors import ConfigError, ExportError, ZigguratError


def refused(content: dict[str, Any], *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        parsed(content, *overrides)
    return str(error.value)


EXPERIMENT = Path(__file__).parents[3] / "experiments" / "pipeline" / "pipeline.yaml"


@pytest.mark.parametrize("name", [*EMBEDDED, "experiment"])
def test_translating_steps_pass_their_checks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = EXPERIMENT.read_text("utf-8") if name == "experiment" else embedded_text(name)
    config = parse_as(PipelineConfig, text, name)
    steps = steps_of(PipelineContext(config))
    assert steps[-1].name == "report"
    jobs: list[BackTranslationJob] = []

    def back_translate(job: BackTranslationJob, work: object) -> JobOutcome[Any]:
        jobs.append(job)
        return JobOutcome(None, None)

    monkeypatch.setattr("ziggurat.corpora.pipeline.synthesis.back_translate", back_translate)
    translating = [step for step in steps if step.name in ("backtranslate", *DISTILLED)]
    for step in translating:
        step.check()
        step.work(tmp_path)
    assert len(jobs) == len(translating) == (1 if name == "starter" else 3)
    for job in jobs:
        model = config.teacher if job.forward else config.backward
        assert model is not None
        found = job_decoding(model.decoding, job.settings())
        assert found.n_best == (job.n_best if job.references else 1)


@pytest.mark.parametrize("folder", ["elsewhere", "a, b", "a] #1: x", 'the "best"', "3", "/x/demo-pipeline", "Türme\\1"])
def test_the_folder_of_the_demo_may_have_any_name(folder: str) -> None:
    config = parse_as(PipelineConfig, embedded_text("demo", folder), "demo")
    assert config.folder == folder
    assert config.fetch.registry == [f"{folder}/corpora.yaml"]
    assert (config.fetch.cache, config.fetch.mirror) == (f"{folder}/downloads", [f"{folder}/mirror"])


def test_errors_name_file_line_and_key() -> None:
    text = embedded_text("demo")
    line = 1 + text[: text.index("backward:")].count("\n")
    with pytest.raises(ConfigError, match=rf"my.yaml, line {line + 1}: unknown key `backward.subwords`; did you mean"):
        parse_as(PipelineConfig, text.replace("backward:\n  subword:", "backward:\n  subwords:"), "my.yaml")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("studnet={}", "unknown key `studnet`; did you mean `student`?"),
        ("student.model.width=2", "unknown key `student.model.width`; did you mean `student.model.d_model`?"),
        ("bitext.hold_out={valid: 300}", "unknown key `bitext.hold_out.valid`; did you mean `bitext.hold_out.dev`?"),
        ("bitext.hold_out={train: 300}", "unknown key `bitext.hold_out.train`; did you mean `bitext.train`?"),
        ("bitext.hold_out={decod: 300}", "unknown key `bitext.hold_out.decod`; valid here: dev, test"),
        ("student.model.encoder.layer=2", "unknown key `student.model.encoder.layer`; did you mean `student.model.enc"),
        ("student.training.stop.updates=many", "`student.training.stop.updates`: input should be a valid integer"),
        ("bitext.train=[]", "`bitext.train`: list should have at least 1 item"),
        ("bitext.train.0.alignment=a.links", "`bitext.train.0`: `alignment` is useless here"),
        ("bitext.train.0.target=null", "`bitext.train.0`: give both `source` and `target`"),
        ("bitext.train.0.fetch=opus/x/y/de-en", "`bitext.train.0`: give `fetch`, or `source` and `target`"),
        ("bitext.dev.0.filters={identical: true}", "`bitext`: `dev.0.filters`: development corpora are not filtered"),
        ("bitext.dev.0.scores=[{column: 2, min: 1}]", "`bitext`: `dev.0.scores`: development corpora are not filt"),
        ("bitext.dev.0.weight=2", "`bitext`: `dev.0.weight`: development corpora are not drawn from; remove it"),
        ("bitext.dev.0.tag=<web>", "`bitext`: `dev.0.tag`: no corpus of `train` has <web>, so no model would learn it"),
        ("bitext.dev=[]", "`bitext.dev` is missing: it selects the models; or take pairs out of the"),
        ("test=[]", "`test` is missing: `evaluation` needs a test set"),
        ("teacher=null", "`teacher` is missing: `distillation` translates with it"),
        ("distillation=null", "`distillation` is missing: `filter` filters its corpus"),
        ("cleaning.max_length_ration=3", "unknown key `cleaning.max_length_ration`; did you mean `cleaning.max"),
        ("bitext.train.0.source_language=de", "a pipeline has one direction"),
        ("export=null", "`export.ctranslate2` is missing: `shortlist` is for it"),
        ("student=null", "`student` is missing: `distillation` is for it"),
        ("backward=null", "`backward` is missing: `backtranslation` translates with it"),
        ("monolingual.target=[]", "`monolingual.target` is missing: `backtranslation` translates it"),
        ("distillation={bitext: false, monolingual: false}", "`monolingual.source` is missing: `distillation` has no"),
        ("alignment=null", "`student.training.loss.alignment` needs word alignments: add section `alignment`"),
        ("teacher.existing=runs/a", "`teacher`: `existing` uses a model unchanged: leave out `decoding`"),
        ("student={existing: runs/a}", "`student.existing`: the student is trained here"),
        ("student.training.start_from=runs/a", "`training.start_from` is not for a pipeline"),
        ("student.recipe=dmeo", "`student`: no recipe `dmeo`; did you mean `demo`"),
        ("backward.corpora={distillation: 1}", "`backward.corpora.distillation`: no such corpus is made"),
        ("teacher.corpora={bitexts: 1}", "`teacher.corpora.bitexts.[key]`: input should be 'bitext', 'back-transl"),
        ("teacher.subword.joint=false teacher.model.embedding.sharing=all", "`teacher.model.embedding.sharing"),
        ("backtranslation.decoding={beam_sizes: 3}", "unknown key `decoding.beam_sizes`"),
        ("backtranslation.decoding={seed: 3}", "`decoding.seed`: use this section's key for that"),
        ("quantisation.training={stopp: {}}", "unknown key `training.stopp`"),
        ("target_language=qlo", "`source_language` and `target_language` are both `qlo`"),
        ("distillation={decoding: {beam_size: 4}}", "`distillation`: a beam of 4 (`decoding.beam_size`) cannot give 8"),
        ("teacher.decoding.precision=auto", "`teacher.decoding.precision: auto` would make the result of `distillat"),
        ("backward.decoding.precision=auto", "`backward.decoding.precision: auto` would make the result of `backtr"),
        ("backward.decoding.precision=auto backtranslation.decoding={precision: float32}", "the result of `filter`"),
        ("distillation={decoding: {precision: auto}}", "`distillation.decoding.precision: auto` would make"),
        ("teacher.modifiers.terms.probability=0.1", "`teacher.modifiers` needs word alignments: a pipeline"),
        ("bitext.train.0.weight=2 teacher.stages=[{mix: {train: 1}, until: {corpus: train}}]",
         "`teacher`: `stages` sets how corpora are mixed: leave out `sampling_temperature` and `weight`"),
        ("source_language=a/b", "`source_language`: string should match pattern"),
        ("format=2", "pipeline format 2 is unknown"),
        ("test=[{name: a, source: x}]", "`test.0`: give either `source` and `target`, or `fetch`"),
        ("folder=$HOME/w", "`folder`: `$HOME` is not expanded here as in a shell"),
    ],
)  # fmt: skip
def test_what_is_refused(override: str, message: str) -> None:
    changes = re.split(r" (?=\w+\.\w+)", override)
    assert message in refused(whole(), *changes)


def test_rules_of_the_whole_file_are_reported_at_the_key_that_they_name() -> None:
    def place(written: str, content: dict[str, Any]) -> str:
        lines = [line.strip() for line in yaml.safe_dump(content).splitlines()]
        return f"my.yaml, line {1 + lines.index(written)}"

    begun = whole(student={"without_layers": "decoder.9"}, alignment=None)
    assert refused(begun).startswith(f"{place('without_layers: decoder.9', begun)}: `student.without_layers`: ")
    for section, user in {"backward": "backtranslation", "student": "distillation", "teacher": "distillation"}.items():
        content = whole(**{section: None})  # the section that needs the missing one
        assert refused(content).startswith(f"{place(f'{user}:', content)}: `{section}` is missing: `{user}`")
    content = whole(alignment=None)
    assert refused(content).startswith(f"{place('alignment: {}', content)}: `student.training.loss.alignment` needs")
    message = f"{place('backtranslation:', whole())}, with your overrides: `backward` is missing"
    assert refused(whole(), "backward=null").startswith(message)
    assert refused(whole(format=2)).startswith("my.yaml: pipeline format 2 is unknown")


def test_everything_missing_is_reported_at_once() -> None:
    content = whole(test=None)
    del content["bitext"]["dev"]
    message = refused(content)
    assert "`bitext.hold_out: {dev: 1000}`; `test` is missing: `evaluation` needs a test set" in message


def test_a_text_occurs_only_once(place: Path, context: MakeContext) -> None:
    def bitext(**dev: str) -> dict[str, Any]:
        return {"train": [{"path": "data/all.tsv"}], "dev": [{"source": "d.qlo", "target": "d.qhi"} | dev]}

    (place / "linked.qhi").symlink_to("data/test.qhi")
    (place / "a[1]").touch()
    others = "; give others, or take some out by `bitext.hold_out`"
    tested = f"sentences that the model is chosen by do not test it{others}"
    trained_on = f"sentences that a model was trained on do not show how good it is{others}"
    test = {"name": "a", "source": "t.qlo", "target": "t.qhi"}
    globbed = {
        "train": [{"source": "data/*.qlo", "target": "t.qhi"}],
        "dev": [{"source": "data/dev.qlo", "target": "u"}],
    }
    public = {"train": [{"fetch": "x/de-en"}], "dev": [{"fetch": "x/de-en"}]}
    twice = {**bitext(), "train": [{"path": "a.tsv"}, {"path": "./a.tsv", "name": "b", "weight": 2}]}
    for sections, message in (
        (
            {"bitext": bitext(source=f"{place}/data/../data/test.qlo")},
            f"`test.0.source`: the same text as `bitext.dev.0.source`, data/test.qlo: {tested}",
        ),
        (
            {"bitext": bitext(target="linked.qhi")},
            f"`test.0.target`: the same text as `bitext.dev.0.target`, data/test.qhi: {tested}",
        ),
        (
            {"bitext": globbed},
            f"`bitext.dev.0.source`: the same text as `bitext.train.0.source`, data/dev.qlo: {trained_on}",
        ),
        (
            {"bitext": public},
            f"`bitext.dev.0.fetch`: the same text as `bitext.train.0.fetch`, x/de-en: {trained_on}",
        ),
        (
            {"bitext": twice},
            "`bitext.train.1`: the same text as `bitext.train.0`; leave one of them out; `weight` says",
        ),
        ({"bitext": bitext(target="d.qlo")}, "`bitext.dev.0`: `source` and `target` are the same text, d.qlo"),
        ({"test": [test, {**test, "name": "b"}]}, "`test.1`: the same text as `test.0`; leave one"),
    ):
        with pytest.raises(ConfigError) as error:
            steps_of(context(whole(**sections)))
        assert message in str(error.value)
    # A second reference, another tag, other columns of a table, a name that looks like a pattern.
    steps_of(context(whole(test=[test, {**test, "name": "b", "target": "u.qhi"}])))
    plain = {"source": "a[1]", "target": "a[2]"}
    train = [{"path": "all.tsv"}, {"path": "all.tsv", "columns": [0, 2]}, plain, {**plain, "tag": "<t>"}]
    steps_of(context(whole(bitext={**bitext(), "train": train})))


def test_names_of_test_sets_differ() -> None:
    two = whole(test=[{"name": "a", "source": "x", "target": "y"}] * 2)
    assert "names of test sets must differ" in refused(two)
    held = whole(test=[{"name": "held-out", "source": "x", "target": "y"}])
    assert "`held-out` is the one from `bitext.hold_out`" in refused(held, "bitext.hold_out={test: 5}")


def test_a_recipe_is_the_basis_of_a_section() -> None:
    config = parsed(whole(student={"recipe": "demo", "model": {"encoder": {"layers": 9}}}, alignment=None))
    recipe = load_named("demo")
    assert config.student is not None
    assert config.student.model.encoder.layers == 9
    assert config.student.model.decoder == recipe.model.decoder
    assert config.student.training == recipe.training
    assert config.student.subword == recipe.data.subword
    over = {"recipe": "student-12-1-base", "model": {"preset": "tiny", "d_ff": 99}}
    model = TrainedConfig.model_validate(over).model
    assert (model.d_model, model.d_ff, model.heads, model.encoder.layers) == (128, 99, 4, 12)


def names(config: PipelineConfig) -> list[str]:
    return [step.name for step in steps_of(PipelineContext(config))]


def test_sections_that_are_left_out_leave_their_steps_out() -> None:
    small = {
        "distillation": None,
        "filter": None,
        "backtranslation": None,
        "backward": None,
        "alignment": None,
        "quantisation": None,
        "shortlist": None,
    }
    content = whole(**small, monolingual=None, teacher=None, export=None, evaluation=None, student=trained())
    assert names(parsed(content)) == ["sets", "clean", "student-data", "student", "report"]
    assert names(parsed(whole(student=None, **small))) == [
        *("sets", "clean", "monolingual", "teacher-data", "teacher", "export-ctranslate2", "evaluate", "report"),
    ]  # fmt: skip


def test_corpora_of_the_models() -> None:
    config = parsed(whole(backward=trained() | {"corpora": {"bitext": 2.0}}), "bitext.train.0.weight=3")
    corpora = Corpora(PipelineContext(config))
    (backward,) = corpora.train("backward")
    assert (backward.source, backward.target) == ("w/clean/train/train.qhi", "w/clean/train/train.qlo")
    assert backward.weight == 6
    assert [(corpus.name, corpus.tag) for corpus in corpora.train("teacher")] == [
        ("train", None),
        ("back-translation", "<bt>"),
    ]
    assert [(corpus.name, corpus.alignment) for corpus in corpora.train("student")] == [
        ("distillation", "w/align/links/distillation.links"),
    ]
    unfiltered = Corpora(PipelineContext(parsed(whole(filter=None)))).train("student")
    assert [(corpus.name, corpus.source) for corpus in unfiltered] == [
        ("distillation", "w/distil/corpus/source.txt"),
        ("distillation-monolingual", "w/distil-monolingual/corpus/source.txt"),
    ]
    assert corpora.dev("backward")[0].source == "w/sets/dev/0.qhi"


def tagged_bitext(*tags: str | None, dev: str | None = None, **more: Any) -> dict[str, Any]:
    """Return a section `bitext` with a training corpus for each tag, and a development set."""
    train = [{"source": f"{n}.qlo", "target": f"{n}.qhi", "tag": tag} for n, tag in enumerate(tags)]
    return {"train": train, "dev": [{"source": "dev.qlo", "target": "dev.qhi", "tag": dev}], **more}


def test_a_tag_of_the_dev_set_is_for_the_models_that_learn_it() -> None:
    plain = PipelineContext(parsed(whole(bitext=tagged_bitext(None, "<news>"))))
    tagged = PipelineContext(parsed(whole(bitext=tagged_bitext(None, "<news>", dev="<news>"))))
    found = {name: [corpus.tag for corpus in experiment_of(tagged, name).data.dev] for name in MODELS}
    assert found == {"backward": [None], "teacher": ["<news>"], "student": [None]}
    keys = [
        next(s for s in steps_of(context) if s.name == "teacher-data").settings.keys() for context in (plain, tagged)
    ]
    assert keys[1] - keys[0] == {"dev_tags"}  # the data is prepared again


def test_sentences_without_a_tag_are_for_models_that_learn_some() -> None:
    config = parsed(whole(), "distillation.n_best=1", "export.ctranslate2.tolerance=0")  # parsed once: it is slow
    others = ("backtranslation", "distillation", "filter", "alignment", "student", "quantisation", "export")

    def context(**sections: Any) -> PipelineContext:
        bitext = BitextConfig.model_validate(sections.pop("bitext", tagged_bitext("<a>", "<b>", dev="<b>")))
        least = dict.fromkeys((*others, "shortlist", "evaluation")) | {"bitext": bitext}
        return PipelineContext(config.model_copy(update=least | sections))

    distilled = {"distillation": config.distillation, "student": config.student}
    evaluated = {"evaluation": config.evaluation}
    for sections, name, reader in (
        ({"bitext": tagged_bitext("<a>", "<b>")}, "teacher", "bitext.dev.0"),
        ({"bitext": tagged_bitext("<a>", dev="<a>", hold_out={"dev": 2})}, "teacher", "bitext.hold_out.dev"),
        (distilled, "teacher", "distillation"),
        (evaluated | {"backtranslation": config.backtranslation}, "teacher", "evaluation"),
        ({"export": config.export}, "teacher", "export.ctranslate2.tolerance"),
        (evaluated | {"teacher": None, "student": config.student}, "student", "evaluation"),
    ):
        with pytest.raises(ConfigError, match=rf"^`bitext.train.0.tag`: each corpus that the {name} .*`{reader}` has"):
            steps_of(context(**sections))
    assert config.backtranslation is not None
    untagged = config.backtranslation.model_copy(update={"tag": None})
    refuse_tags_alone(context())
    refuse_tags_alone(context(bitext=tagged_bitext(None, "<crawl>"), **distilled, **evaluated))
    refuse_tags_alone(context(backtranslation=untagged, **distilled, **evaluated))


def test_sentences_without_a_tag_are_for_models_of_one_language(place: Path, context: MakeContext) -> None:
    many = Path("runs/many")
    many.mkdir(parents=True)
    write_tensors(many / "model.safetensors", {})
    (many / "config.yaml").write_text(dump(parsed(whole()).experiment("teacher", [], [], "store")))
    words = b"a\nb\n"
    save_tokenizers(many, VocabularyTokenizer(words, tags=["<2de>", "<2fr>"]), VocabularyTokenizer(words))
    least: dict[str, Any] = {"shortlist": None, "export": None, "evaluation": None}
    for sections, name, reader in (
        ({"backward": {"existing": "runs/many"}}, "backward model", "backtranslation"),
        ({"backward": {"existing": "runs/many"}, "backtranslation": None}, "backward model", "filter"),
        ({"teacher": {"existing": "runs/many"}}, "teacher", "distillation"),
    ):
        with pytest.raises(
            ConfigError, match=rf"^`.*existing`: the tags of the {name} .*<2de>, <2fr>.*, and `{reader}`"
        ):
            refuse_any_language(context(whole(**least, **sections)))
    save_tokenizers(many, VocabularyTokenizer(words, tags=["<2de>", "<bt>"]), VocabularyTokenizer(words))
    refuse_any_language(context(whole(**least, teacher={"existing": "runs/many"})))
    with pytest.raises(ConfigError, match=r"^`bitext.train`: the tags of the teacher .*<2de>, <2fr>"):
        steps_of(context(whole(**least, bitext=tagged_bitext(None, "<2de>", "<2fr>"))))


def test_corpora_of_one_name_get_separate_files() -> None:
    corpora = [{"source": f"{place}/train.qlo.gz", "target": f"{place}/train.qhi.gz"} for place in "abcd"]
    train = [*corpora[:2], {**corpora[2], "name": "my own/text"}]
    config = parsed(whole(bitext={"train": train, "dev": corpora[3:]}))
    assert PipelineContext(config).bitext_names() == ["train", "train-2", "my_own_text"]
    with pytest.raises(
        ConfigError, match=r"bitext.train.0: a pipeline makes a corpus `distillation`: give another `na"
    ):
        names(parsed(whole(), "bitext.train.0.name=distillation"))


def test_limits_of_length_hold_when_the_data_of_a_model_are_prepared() -> None:
    own = "bitext.train.0.filters={max_pieces: 9, max_length_ratio: 5}"
    context = PipelineContext(parsed(whole(), "cleaning.max_characters=20000", own))
    data = experiment_of(context, "teacher").data
    assert [data.filters_of(corpus).max_pieces for corpus in data.train] == [9, 250]
    assert [data.filters_of(corpus).max_characters for corpus in data.train] == [20_000, 20_000]
    settings = [
        next(s for s in steps_of(of) if s.name == "teacher-data").settings
        for of in (context, PipelineContext(parsed(whole())))
    ]
    assert settings[0] != settings[1]


def test_fine_tuning_for_int8_continues_with_the_last_mix_of_the_student() -> None:
    noise = {"modifiers": {"upper_case": {"probability": 0.1}}}
    web = {"mix": {"train": 1, "distillation": 3}, "until": {"corpus": "train", "epochs": 2}}
    clean = {"mix": {"distillation": 1}, "until": {"corpus": "distillation", "epochs": 5}} | noise
    student = trained() | {"corpora": {"bitext": 1, "distillation": 1}, "stages": [web, clean]}
    settings = next(
        s for s in steps_of(PipelineContext(parsed(whole(student=student)))) if s.name == "quantise"
    ).settings
    (stage,) = settings["stages"]
    assert stage["mix"] == {"distillation": 1.0}
    assert stage["until"] == {"corpus": "distillation", "epochs": None, "patience": None}
    assert {name: one for name, one in stage["modifiers"].items() if one} == noise["modifiers"]


def test_the_shipped_model_is_named_with_its_translate_command() -> None:
    def said(**sections: Any) -> list[str]:
        return shipped(PipelineContext(parsed(whole(**sections))))

    export = "w/export-ctranslate2/ctranslate2"
    command = "to translate: ziggurat translate"
    assert said() == [f"the student for ctranslate2: {export}", f"{command} {export} < text.qlo"]
    for sections, model in (
        ({"export": None, "shortlist": None}, "w/quantise/run"),
        ({"export": None, "shortlist": None, "quantisation": None, "folder": "my w"}, "'my w/student/run'"),
    ):
        assert said(**sections) == [f"{command} {model} < text.qlo"]
    others = {"onnx": {}, "argos": {}}
    assert said(export=others, shortlist=None) == [
        "the student for argos: w/export-argos/argos",
        "the student for onnx: w/export-onnx/onnx",
        f"{command} w/quantise/run < text.qlo",  # neither file is read here
    ]


def test_missing_files_are_named_with_their_keys(place: Path, context: MakeContext) -> None:
    for change, message in (
        ("bitext.train.0.source=data/none", r"bitext.train.0.source: no such file: data/none"),
        ("monolingual.target.0.path=data/none*", r"monolingual.target.0.path: no file matches 'data/none\*'"),
        ("test.0.target=data/none", r"test.0.target: no such file: data/none"),
        ("teacher={existing: runs/none}", r"runs/none: no such run or model directory"),
    ):
        with pytest.raises(ZigguratError, match=message):
            pipeline_of(context(whole(), change)).run()
    assert not list((place / "w").glob("*/begun.json"))


def test_certain_failures_are_reported_before_anything_is_done(place: Path, context: MakeContext) -> None:
    unreachable = trained()
    unreachable["model"] = {**unreachable["model"], "encoder": {"layers": 1, "history": "dlcl"}}
    with pytest.raises(ExportError, match=r"export.ctranslate2: the student cannot be written for it: .*dlcl"):
        pipeline_of(context(whole(student=unreachable, alignment=None))).run()
    with pytest.raises(ConfigError, match=r"export.ctranslate2.quantization: int4; there are: int8"):
        pipeline_of(context(whole(), "export.ctranslate2.quantization=int4")).run()
    with pytest.raises(ConfigError, match=r"`evaluation.perturb`: 'tpyos' is not a perturbation; choose from caps"):
        pipeline_of(context(whole(), "evaluation.perturb=[tpyos]")).run()
    groups = "backtranslation.method=beam", "backtranslation.decoding={diverse_groups: 2}"
    with pytest.raises(ConfigError, match=r"step backtranslate, with the backward model: `decoding`: `diverse_groups`"):
        pipeline_of(context(whole(), *groups, "backward.decoding.beam_size=3")).run()
    existing = Path("runs/old")
    existing.mkdir(parents=True)
    write_tensors(existing / "model.safetensors", {})
    experiment = parsed(whole()).experiment("backward", [], [], "store")
    (existing / "config.yaml").write_text(dump(experiment).replace("precision: float32", "precision: auto"))
    with pytest.raises(ConfigError, match=r"step filter, with the backward model: `decoding.precision: auto` may mean"):
        pipeline_of(context(whole(backward={"existing": "runs/old"}, backtranslation=None))).run()
    turned = "source_language=qhi", "target_language=qlo"
    with pytest.raises(ConfigError, match=r"`backward.existing`: runs/old translates from qhi to qlo; .*qlo to qhi"):
        steps_of(context(whole(backward={"existing": "runs/old"}, backtranslation=None), *turned))
    assert not list((place / "w").glob("*/begun.json"))


def test_a_step_leaves_the_process_unchanged() -> None:
    """A step that resumes after a kill runs in a new process; all others must use the same number of threads."""
    before = torch.get_num_threads()
    with contextlib.suppress(KeyboardInterrupt), in_fresh_state():
        torch.set_num_threads(before + 1)
        raise KeyboardInterrupt
    assert torch.get_num_threads() == before
