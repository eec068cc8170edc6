"""Models of a pipeline: dependencies of the steps that use them, and steps that export the final model."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ziggurat.config.decode import DecodingConfig
from ziggurat.config.experiment import Experiment
from ziggurat.config.load import load_experiment
from ziggurat.config.pipeline import BITEXT, MODELS, ModelName
from ziggurat.config.pipeline_models import ShortlistConfig, TargetConfig, TrainedConfig
from ziggurat.corpora.pipeline.context import Corpora, PipelineContext
from ziggurat.corpora.pipeline.step import Step, settings_of
from ziggurat.data.subword import load_tokenizers
from ziggurat.data.vocabulary import several_languages
from ziggurat.model.directory import locate_weights, weights_experiment
from ziggurat.model.low_rank import weights_files
from ziggurat.model.run_folder import CONFIG_FILE
from ziggurat.system.errors import CheckpointError, ConfigError, DataError, ExportError, printable
from ziggurat.train.device import give_back_freed_memory

VOCABULARIES = ("vocabulary.json", "*.spm", "*.vocab")
"""Files of the vocabularies of a store, or a run."""


def said(name: ModelName) -> str:
    """Return the name of a model in messages."""
    return "backward model" if name == "backward" else name


def refuse_other_direction(context: PipelineContext) -> None:
    """Raise ConfigError for an existing model that translates in the wrong direction.

    The steps that use a model report it if missing; languages with other codes are not compared.
    """
    for name in MODELS:
        place, (source, target) = getattr(context.config, name), context.languages
        if place is None or place.existing is None:
            continue
        wanted = (target, source) if name == "backward" else (source, target)
        with contextlib.suppress(CheckpointError):
            data = _experiment_there(context, name)[0].data
            if (data.target_language, data.source_language) == wanted:
                raise ConfigError(
                    f"`{name}.existing`: {place.existing} translates from {wanted[1]} to {wanted[0]}; the {said(name)} "
                    f"of this pipeline is to translate from {wanted[0]} to {wanted[1]}"
                )


def _experiment_there(context: PipelineContext, name: ModelName) -> tuple[Experiment, Path]:
    """Return the experiment of an existing model, and the folder with its configuration and vocabulary.

    The experiment is that of the weights: those of a growing run may be shallower than its configuration says.
    """
    weights, root = locate_weights(context.model(name))  # for a checkpoint, `root` is the run's folder
    return weights_experiment(weights.parent, root), root


def with_pruned_student(context: PipelineContext) -> PipelineContext:
    """Return the context with all settings that the student inherits from the teacher, if it starts as the teacher.

    Raises ConfigError if layers cannot be left out, and CheckpointError if an existing teacher is missing.
    """
    teacher, student = context.config.teacher, context.config.student
    if teacher is None or student is None or student.without_layers is None:
        return context
    model, unicode, vocabulary = teacher.model, teacher.unicode, context.model("teacher")
    if teacher.existing is not None:
        there, vocabulary = _experiment_there(context, "teacher")
        model, unicode = there.model, there.data.unicode
    return replace(context, config=context.config.with_student_of(model, unicode, str(vocabulary)))


def experiment_of(context: PipelineContext, name: ModelName) -> Experiment:
    """Return the experiment of a model with the current corpora, without those that cleaning emptied.

    Raises ConfigError if its stages name a corpus that it does not learn from.
    """
    corpora = Corpora(context)
    names = [str(corpus.name) for corpus in corpora.train(name)]
    for number, stage in enumerate(getattr(context.config, name).stages):
        if unknown := [corpus for corpus in stage.mix if corpus not in names]:
            has = f"the {said(name)} learns from {', '.join(names)}"
            raise ConfigError(f"`{name}.stages.{number}.mix`: no corpus {printable(unknown[0], 60)}; {has}")
    store = str(context.at(f"{name}-data", "store"))
    return context.config.experiment(name, corpora.with_pairs(name), corpora.dev(name), store)


def refuse_empty_stages(context: PipelineContext) -> None:
    """Raise DataError if stages of any model name a corpus that cleaning emptied.

    Long steps check this before they start, even for other models.
    """
    empty = Corpora(context).empty()
    for name in MODELS:
        chosen: TrainedConfig | None = getattr(context.config, name)
        for number, stage in enumerate(() if chosen is None else chosen.stages):
            if gone := [corpus for corpus in stage.mix if corpus in empty]:
                why = f"cleaning left no pair of {gone[0]} ({context.at('clean', 'report.json')} has the reasons)"
                raise DataError(f"`{name}.stages.{number}.mix`: {why}; take it out of the mix, or change `cleaning`")


@contextlib.contextmanager
def in_fresh_state() -> Iterator[None]:
    """Context for a step that computes, after which PyTorch's process-wide settings are restored.

    A step that resumes after a kill runs in a new process; the others must find the same number of threads, or their
    sums would be rounded differently. The context also returns the memory of a trained model to the system.
    """
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        gc.collect()
        give_back_freed_memory()


def of_model(context: PipelineContext, name: ModelName) -> dict[str, list[str]]:
    """Return the dependency on a model, for `Step.after`; none on an existing model."""
    return {} if getattr(context.config, name).existing is not None else {name: ["run/*"]}


def decoding_of(context: PipelineContext, name: ModelName) -> DecodingConfig:
    """Return the decoding settings of a model, whether trained here or existing."""
    chosen: TrainedConfig = getattr(context.config, name)
    if chosen.existing is None:
        return chosen.decoding
    return load_experiment(locate_weights(context.model(name))[1] / CONFIG_FILE).decoding


def model_files(context: PipelineContext, *names: ModelName) -> dict[str, list[Path]]:
    """Return the files of those models that exist already, by key. Raises CheckpointError if one is missing."""
    there = [name for name in names if getattr(context.config, name).existing is not None]
    return {f"{name}.existing": _files_of(context.model(name)) for name in there}


def _files_of(folder: Path) -> list[Path]:
    weights, root = locate_weights(folder)
    vocabularies = [path for pattern in VOCABULARIES for path in sorted(root.glob(pattern))]
    return [*weights_files(weights), root / CONFIG_FILE, *vocabularies]


SHORTLIST = "student.shortlist"
"""File that the step `shortlist` makes."""


def shortlist_made_here(context: PipelineContext) -> bool:
    """Return whether the student's decoding uses the shortlist that step `shortlist` makes later."""
    if context.config.student is None or context.config.shortlist is None:
        return False
    listed = context.config.student.decoding.shortlist
    return listed is not None and Path(listed).expanduser().absolute() == context.at("shortlist", SHORTLIST).absolute()


def shortlists(
    context: PipelineContext, *names: ModelName, changes: Mapping[str, Any] | None = None
) -> dict[str, list[Path]]:
    """Return the external files that models, including existing ones, translate with, by key.

    `changes` replace keys of the models' own `decoding`; `Step.check` checks them.

    Raises CheckpointError for a missing `existing` model, DataError for a missing file.
    """
    found: dict[str, list[Path]] = {}
    for name in names:
        listed = {"shortlist": decoding_of(context, name).shortlist, **(changes or {})}["shortlist"]
        if not isinstance(listed, str) or (name == "student" and shortlist_made_here(context)):
            continue
        path = Path(listed).expanduser()
        if not path.is_file():
            raise DataError(
                f"{path}: no such file, but the {said(name)} is to translate with it (`decoding.shortlist`); this "
                f"makes a shortlist: `ziggurat shortlist STORE -o {path}`"
            )
        found[f"{name}.decoding.shortlist"] = [path]
    return found


_NEEDS = {
    "ctranslate2": ("ctranslate2",),
    "argos": ("ctranslate2",),
    "huggingface": ("transformers",),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
}


def final_model(context: PipelineContext) -> tuple[ModelName, Path, dict[str, list[str]]]:
    """Return the final model of the pipeline, its folder, and the dependency on it."""
    if context.config.quantisation is not None:
        return "student", context.at("quantise", "run"), {"quantise": ["run/*"]}
    name: ModelName = "teacher" if context.config.student is None else "student"
    return name, context.model(name), of_model(context, name)


def shipped(context: PipelineContext) -> list[str]:
    """Return lines on the final results: the exports, and the command to translate with an export or the model."""
    places = {to: context.at(f"export-{to}", to) for to in context.exports()}
    name, model, _ = final_model(context)
    exports = [f"the {name} for {to}: {place}" for to, place in places.items()]
    translating = shlex.quote(str(places.get("ctranslate2", model)))  # ziggurat reads no other export
    return [*exports, f"to translate: ziggurat translate {translating} < text.{context.languages[0]}"]


def _of_dev(context: PipelineContext) -> tuple[Path, dict[str, list[str]]]:
    if context.config.bitext.dev:
        return context.sides("sets", "dev", "0")[0], {"sets": [f"dev/0.{context.languages[0]}"]}
    return context.sides("clean", "held-out", "dev")[0], {"clean": [f"held-out/dev.{context.languages[0]}"]}


_MODELS: tuple[ModelName, ...] = ("teacher", "student")  # the backward model reads the other side, which has no tags


def refuse_tags_alone(context: PipelineContext) -> None:
    """Raise ConfigError if a model is to read text without a tag, but all its training corpora have one.

    Tags belong to training corpora and development sets; text that is held out, distilled or tested has none.
    """
    for name in _MODELS:
        chosen = getattr(context.config, name)
        if chosen is None or chosen.existing is not None or BITEXT not in context.config.weights(name):
            continue
        learns_untagged = any(corpus.tag is None for corpus in Corpora(context).train(name))
        if not learns_untagged and (reader := next(_readers_without_tag(context, name), None)) is not None:
            raise ConfigError(
                f"`bitext.train.0.tag`: each corpus that the {name} learns from has a tag, so it would never see a "
                f"sentence without one, as `{reader}` has them; leave out the `tag` of at least one corpus"
            )


def refuse_any_language(context: PipelineContext) -> None:
    """Raise ConfigError if a model whose tags name several languages is to read text without a tag.

    Its output language would be arbitrary. The steps that use a model report it if missing.
    """
    for name in MODELS:
        chosen = getattr(context.config, name)
        if chosen is None:
            continue
        known: list[str] = []
        if chosen.existing is None:
            known = list(dict.fromkeys(corpus.tag for corpus in Corpora(context).train(name) if corpus.tag is not None))
        else:
            with contextlib.suppress(CheckpointError, DataError):
                known = list(load_tokenizers(_experiment_there(context, name)[1])[0].tags)
        if (languages := several_languages(known)) and (reader := next(_uses(context, name), None)) is not None:
            key = "bitext.train" if chosen.existing is None else f"{name}.existing"
            raise ConfigError(
                f"`{key}`: the tags of the {said(name)} name several languages ({languages}), and `{reader}` gives it "
                "sentences without one, which it would translate into an arbitrary language; use a model of one "
                "language, or make its corpus beforehand (`ziggurat backtranslate --model-tag TAG`) and give that as "
                "`bitext`"
            )


def _readers_without_tag(context: PipelineContext, name: ModelName) -> Iterator[str]:
    """Yield the keys through which a model gets sentences without a tag."""
    config = context.config
    for number, corpus in enumerate(Corpora(context).dev(name)):
        if corpus.tag is None:
            yield f"bitext.dev.{number}" if number < len(config.bitext.dev) else "bitext.hold_out.dev"
    yield from _uses(context, name)


def _uses(context: PipelineContext, name: ModelName) -> Iterator[str]:
    """Yield the keys through which a trained model gets sentences, none of which has a tag."""
    config = context.config
    if name == "backward":
        yield from (key for key in ("backtranslation", "filter") if getattr(config, key) is not None)
        return
    if name == "teacher" and config.distillation is not None:
        yield "distillation"
    if config.evaluation is not None:
        yield "evaluation"
    if name == final_model(context)[0]:
        yield from (f"export.{to}.tolerance" for to, one in context.exports().items() if one.tolerance is not None)


class ShortlistStep(Step):
    """The step that estimates a shortlist from the student's data: `student.shortlist`."""

    name, title = "shortlist", "estimates which pieces a sentence allows"
    outputs = (SHORTLIST,)
    after = MappingProxyType({"student-data": ["store/*"]})

    def __init__(self, context: PipelineContext, how: ShortlistConfig) -> None:
        self._context, self._how, self.settings = context, how, settings_of(how)

    def work(self, folder: Path) -> None:
        """Write the shortlist."""
        from ziggurat.data.corpus import Store
        from ziggurat.data.shortlist import estimate_shortlist, write_shortlist

        store, how = Store.open(self._context.at("student-data", "store")), self._how
        options = {"pairs": how.pairs, "best": how.best, "frequent": how.frequent}
        write_shortlist(str(folder / SHORTLIST), estimate_shortlist(store, floor=how.floor, **options))


class ExportStep(Step):
    """The step that writes the final model for another toolkit, `to`, and compares it with the model."""

    def __init__(self, context: PipelineContext, to: str, target: TargetConfig) -> None:
        self._context, self._to, self._target = context, to, target
        self._model, self._folder, of_final = final_model(context)
        self._dev, of_dev = _of_dev(context)
        after = of_final | of_dev
        self._test = context.test_set(context.test_names()[0]) if target.tolerance is not None else None
        if self._test is not None:
            step = self._test[0].relative_to(context.folder).parts[0]
            files = [path.relative_to(context.at(step)).as_posix() for path in self._test]
            after[step] = [*after.get(step, []), *files]
        self._shortlist = None
        if context.config.shortlist is not None and to == "ctranslate2":
            self._shortlist, after["shortlist"] = str(context.at("shortlist", SHORTLIST)), [SHORTLIST]
        self.name, self.outputs = f"export-{to}", (f"{to}/**/*",)
        precision = f", {target.quantization}" if target.quantization else ""
        self.title = f"writes the {self._model} for {to}{precision}"
        self.settings, self.after = settings_of(target), after

    def inputs(self) -> dict[str, list[Path]]:
        """Return the files of an existing model, and of its shortlist if the export contains it."""
        own = self._to == "ctranslate2" and not self._shortlist
        return model_files(self._context, self._model) | (shortlists(self._context, self._model) if own else {})

    def check(self) -> None:
        """Refuse a missing package, options that the target lacks, and a model that cannot be exported to it."""
        to, target = self._to, self._target
        missing = [package for package in _NEEDS.get(to, ()) if importlib.util.find_spec(package) is None]
        if missing:
            extra = "translate" if to in ("ctranslate2", "argos") else "export"
            raise ConfigError(
                f"export.{to}: needs {missing[0]}, which is not installed: pip install 'ziggurat-mt[{extra}]'"
            )
        from ziggurat.exchange.targets import target_named

        format_ = target_named(to, self._package())
        if target.quantization not in (None, "float32", *format_.quantizations):
            known = ", ".join(format_.quantizations) or "none"
            raise ConfigError(f"export.{to}.quantization: {target.quantization}; there are: {known}, float32")
        existing = getattr(self._context.config, self._model).existing is not None
        found = (
            _experiment_there(self._context, self._model)[0] if existing else experiment_of(self._context, self._model)
        )
        if reasons := format_.reasons(found):
            raise ExportError(f"export.{to}: the {self._model} cannot be written for it: {'; '.join(reasons)}")

    def _package(self) -> Any:
        """Return the options of a package for Argos Translate; None if there are none."""
        from ziggurat.exchange.argos import package_choices

        package = package_choices([f"{key}={value}" for key, value in self._target.metadata.items()], None)
        return package if self._target.metadata else None

    def work(self, folder: Path) -> None:
        """Write the export."""
        from ziggurat.exchange.exporter import export_model
        from ziggurat.exchange.verification import Gate

        tolerance = self._target.tolerance
        with in_fresh_state():
            export_model(
                self._folder,
                self._to,
                folder / self._to,
                quantization=self._target.quantization,
                verify=self._dev,
                lines=self._target.lines,
                gate=None if self._test is None or tolerance is None else Gate(*self._test, tolerance),
                force=True,  # an export that was interrupted just before the manifest was written
                package=self._package(),
                shortlist=self._shortlist,
                say=self._context.say,
            )
