"""Steps that train a model, and what steps that use a model depend on.

Lexical shortlists that models of a pipeline translate with, on whose content steps depend.

Steps that write the final model for other toolkits.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ziggurat.config.decode import DecodingConfig
from ziggurat.config.experiment import Experiment
from ziggurat.config.load import load_experiment
from ziggurat.config.pipeline import MODELS, ModelName
from ziggurat.config.pipeline_models import ExportTarget, ShortlistConfig, TrainedConfig
from ziggurat.config.pruning import LeftOut
from ziggurat.config.train import TrainingConfig
from ziggurat.corpora.pipeline.costs import Costs
from ziggurat.corpora.pipeline.road import Corpora, Road
from ziggurat.corpora.pipeline.settings import Settings, as_begun, joined, settings_of
from ziggurat.corpora.pipeline.step import Done, Step, updates_done
from ziggurat.corpora.pipeline.wording import errors_renamed
from ziggurat.system.errors import CheckpointError, ConfigError, DataError, ExportError, printable
from ziggurat.system.staging import discard

VOCABULARIES = ("vocabulary.json", "*.spm", "*.vocab")
"""Files of the vocabularies of a store, or a run."""
_OF_TRAINING = {"model", "without_layers", "training", "decoding", "modifiers", "stages", "sampling_temperature"}
"""Keys of a model's section that its store and its training depend on."""
_NOT_OF_RESULT = {
    *("start_from", "device", "threads"),  # a path; rounding, as by another machine
    *("recompute", "distributed"),  # gradients stay the same bit for bit; one process trains
    *("log_every_updates", "diagnostics", "tensorboard", "wandb", "mlflow"),
}
"""Keys of `training` that the weights do not depend on; what `start_from` leads to is in `Step.after`."""
_NOT_OF_KEEPING = {
    *("keep_last", "keep_every", "keep_best", "keep_around_best", "keep_best_per_direction", "asynchronous"),
}
"""The same of `training.checkpoint`: an average is of `average_last`, never more than what `keep_last` keeps."""


def said(name: ModelName) -> str:
    """Return what a model is called in messages."""
    return "backward model" if name == "backward" else name


def refuse_other_direction(road: Road) -> None:
    """Raise ConfigError for a model that is there already and translates in the other direction than it should.

    A model that is missing is told by the steps that use it; languages by other codes are not compared.
    """
    for name in MODELS:
        place, (source, target) = getattr(road.config, name), road.languages
        if place is None or place.existing is None:
            continue
        wanted = (target, source) if name == "backward" else (source, target)
        with contextlib.suppress(CheckpointError):
            data = experiment_there(road, name)[0].data
            if (data.target_language, data.source_language) == wanted:
                raise ConfigError(
                    f"`{name}.existing`: {place.existing} translates from {wanted[1]} to {wanted[0]}; the {said(name)} "
                    f"of this pipeline is to translate from {wanted[0]} to {wanted[1]}"
                )


def experiment_there(road: Road, name: ModelName) -> tuple[Experiment, Path]:
    """Return the experiment of a model that is there already, and the folder with its configuration and vocabulary.

    The experiment is that of the weights: those of a growing run may be shallower than its configuration says.
    """
    from ziggurat.model.directory import locate_weights, weights_experiment

    weights, root = locate_weights(road.model(name))  # of a checkpoint, the run's folder
    return weights_experiment(weights.parent, root), root


def with_pruned_student(road: Road) -> Road:
    """Return the road with all that the student has from the teacher that it begins as, if it does.

    Raises ConfigError: layers that cannot be left out; CheckpointError: no teacher where it should be there already.
    """
    teacher, student = road.config.teacher, road.config.student
    if teacher is None or student is None or student.without_layers is None:
        return road
    model, unicode, vocabulary = teacher.model, teacher.unicode, road.model("teacher")
    if teacher.existing is not None:
        there, vocabulary = experiment_there(road, "teacher")
        model, unicode = there.model, there.data.unicode
    try:
        return replace(road, config=road.config.with_student_of(model, unicode, str(vocabulary)))
    except ValueError as error:
        raise ConfigError(str(error)) from None


def experiment_of(road: Road, name: ModelName) -> Experiment:
    """Return the experiment that a model is trained by, as the corpora are now: without those that cleaning emptied.

    Raises ConfigError where its stages name a corpus that it does not learn from.
    """
    corpora = Corpora(road)
    names = [str(corpus.name) for corpus in corpora.train(name)]
    for number, stage in enumerate(getattr(road.config, name).stages):
        if unknown := [corpus for corpus in stage.mix if corpus not in names]:
            has = f"the {said(name)} learns from {', '.join(names)}"
            raise ConfigError(f"`{name}.stages.{number}.mix`: no corpus {printable(unknown[0], 60)}; {has}")
    store = str(road.at(f"{name}-data", "store"))
    return road.config.experiment(name, corpora.with_pairs(name), corpora.dev(name), store)


def refuse_empty_stages(road: Road) -> None:
    """Raise DataError where stages of any model name a corpus of which cleaning left nothing.

    Steps that take long ask before they begin, also those of other models.
    """
    empty = Corpora(road).empty()
    for name in MODELS:
        chosen: TrainedConfig | None = getattr(road.config, name)
        for number, stage in enumerate(() if chosen is None else chosen.stages):
            if gone := [corpus for corpus in stage.mix if corpus in empty]:
                why = f"cleaning left no pair of {gone[0]} ({road.at('clean', 'report.json')} has the reasons)"
                raise DataError(f"`{name}.stages.{number}.mix`: {why}; take it out of the mix, or change `cleaning`")


def train_step(road: Road, name: ModelName, costs: Costs) -> Step:
    """Return the step that trains a model."""
    chosen: TrainedConfig = getattr(road.config, name)
    experiment, pruned = experiment_of(road, name), chosen.without_layers

    def work(folder: Path) -> int | None:
        with errors_renamed(name, lambda: Corpora(road).keys(name)):
            present = experiment_of(road, name)
            start = folder / "start"
            if pruned is not None:
                present = _begun_as_teacher(road, start, present, pruned)
            signal = train_or_go_on(road, folder / "run", present)
            if signal is None and start.exists():
                discard(start)  # a copy of the teacher's weights, as large as those of the run
            return signal

    model = chosen.model
    # However it is written.
    left_out = {} if pruned is None else {"without_layers": LeftOut.parse(pruned).names()}
    depth = f"{model.encoder.layers}-{model.decoder.layers}"
    growth = chosen.training.growth
    before = f", grown from {growth.stages[0].layers}" if growth is not None else ""
    if pruned is not None:
        before = f", begun as the teacher without {pruned}"
    return Step(
        name,
        f"trains the {said(name)}: {depth} layers of width {model.d_model}{before}",
        joined(settings_of(chosen, include=_OF_TRAINING), {"training": _of_result(chosen.training)}, left_out),
        work,
        {f"{name}-data": ["store/*"], **(of_model(road, "teacher") if pruned is not None else {})},
        (lambda: model_files(road, "teacher")) if pruned is not None else dict,
        outputs=_weights_of(experiment),
        cost=lambda: costs.training(name),
        done=lambda: costs.trained(name, *updates_done(road.at(name, "run"))),
    )


def _begun_as_teacher(road: Road, folder: Path, student: Experiment, without_layers: str) -> Experiment:
    """Write the teacher without some layers to `folder`; return the experiment that trains the student from it."""
    from ziggurat.model.directory import open_model, write_model_directory
    from ziggurat.model.tensors import weights

    if not folder.exists():  # written whole or not at all
        teacher = open_model(road.model("teacher"), without_layers=without_layers)
        write_model_directory(folder, weights(teacher.model), teacher.experiment, teacher.directory)
    training = student.training.model_copy(update={"start_from": str(folder)})
    return student.model_copy(update={"training": training})


def quantise_step(road: Road, updates: int, costs: Costs) -> Step:
    """Return the step that fine-tunes the student for int8, for so many updates."""

    def quantised() -> Experiment:
        return road.config.quantised(experiment_of(road, "student"), str(road.model("student")))

    def work(folder: Path) -> int | None:
        with errors_renamed("student", lambda: Corpora(road).keys("student")):
            return train_or_go_on(road, folder / "run", quantised())

    experiment = quantised()
    return Step(
        "quantise",
        "fine-tunes the student for int8",
        joined({"training": _of_result(experiment.training)}, settings_of(experiment.data, include={"stages"})),
        work,
        {"student-data": ["store/*"], **of_model(road, "student")},
        outputs=_weights_of(experiment),
        cost=lambda: costs.quantising(updates),
        done=lambda: _quantised(updates, *updates_done(road.at("quantise", "run"))),
    )


def _of_result(training: TrainingConfig) -> Settings:
    """Return the settings of a training without those that its weights do not depend on.

    Of the best checkpoints only whether there is one matters: with none the last one is handed on.
    """
    best = {"keep_best": min(1, training.checkpoint.keep_best)}
    kept = settings_of(training.checkpoint, exclude=_NOT_OF_KEEPING)
    return joined(settings_of(training, exclude=_NOT_OF_RESULT), {"checkpoint": joined(kept, best)})


def _quantised(updates: int, done: int, seconds: float) -> Done:
    return Done(min(1.0, done / updates), f"{min(done, updates):,} of {updates:,} updates", seconds)


def _weights_of(experiment: Experiment) -> tuple[str, ...]:
    """Return the files of a run that translation reads: an average that turns out worse than `best` gives way to it."""
    from ziggurat.model.directory import AVERAGED, SCORE_FILE

    checkpoint = experiment.training.checkpoint
    files = ["best/model.safetensors" if checkpoint.keep_best else "last/model.safetensors", "config.yaml"]
    if checkpoint.average_last:
        files += [f"{AVERAGED}/model.safetensors", f"{AVERAGED}/{SCORE_FILE}"]
    return tuple(f"run/{file}" for file in (*files, *VOCABULARIES))


def train_or_go_on(road: Road, run: Path, experiment: Experiment) -> int | None:
    """Train a model in a run folder, from its newest checkpoint if there is one; return the signal that stopped it."""
    from ziggurat.model.run_folder import CHECKPOINTS
    from ziggurat.train.loop import train

    with in_fresh_state():
        resume = (run / CHECKPOINTS).is_dir()
        experiment = as_begun(run, experiment)
        return train(run, experiment, resume=resume, console=road.console, advice=False).signal


@contextlib.contextmanager
def in_fresh_state() -> Iterator[None]:
    """Context of a step that computes: what it sets in PyTorch for the whole process is as before afterwards.

    A step that goes on after a kill runs in a new process; the others must find the same number of threads, or their
    sums would be rounded differently. And the memory of a model that was trained goes back to the system.
    """
    import torch

    from ziggurat.train.device import give_back_freed_memory

    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        gc.collect()
        give_back_freed_memory()


def of_model(road: Road, name: ModelName) -> dict[str, list[str]]:
    """Return the dependence on a model, for `Step.after`; none on one that is there already."""
    return {} if getattr(road.config, name).existing is not None else {name: ["run/*"]}


def decoding_of(road: Road, name: ModelName) -> DecodingConfig:
    """Return the decoding settings of a model, also of one that is there already."""
    from ziggurat.model.directory import locate_weights
    from ziggurat.model.run_folder import CONFIG_FILE

    chosen: TrainedConfig = getattr(road.config, name)
    if chosen.existing is None:
        return chosen.decoding
    return load_experiment(locate_weights(road.model(name))[1] / CONFIG_FILE).decoding


def model_files(road: Road, *names: ModelName) -> dict[str, list[Path]]:
    """Return the files of those models that are there already, by key. Raises CheckpointError where there is none."""
    there = [name for name in names if getattr(road.config, name).existing is not None]
    return {f"{name}.existing": _files_of(road.model(name)) for name in there}


def _files_of(folder: Path) -> list[Path]:
    from ziggurat.model.directory import locate_weights
    from ziggurat.model.low_rank import weights_files
    from ziggurat.model.run_folder import CONFIG_FILE

    weights, root = locate_weights(folder)
    vocabularies = [path for pattern in VOCABULARIES for path in sorted(root.glob(pattern))]
    return [*weights_files(weights), root / CONFIG_FILE, *vocabularies]


SHORTLIST = "student.shortlist"
"""File that the step `shortlist` makes."""


def shortlist_made_here(road: Road) -> bool:
    """Return whether the student's own decoding names what step `shortlist` makes: there is none before that step."""
    if road.config.student is None or road.config.shortlist is None:
        return False
    listed = road.config.student.decoding.shortlist
    return listed is not None and Path(listed).expanduser().absolute() == road.at("shortlist", SHORTLIST).absolute()


def shortlists(road: Road, *names: ModelName, changes: Mapping[str, Any] | None = None) -> dict[str, list[Path]]:
    """Return the files from outside that models translate with, by key; also of models that are there already.

    Args:
        road: the road.
        names: the models.
        changes: keys of the `decoding` section that replace the models' own; `Step.check` checks them.

    Raises CheckpointError where a model is missing that should be there already, DataError for a missing file.
    """
    found: dict[str, list[Path]] = {}
    for name in names:
        listed = {"shortlist": decoding_of(road, name).shortlist, **(changes or {})}["shortlist"]
        if not isinstance(listed, str) or (name == "student" and shortlist_made_here(road)):
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


def final_model(road: Road) -> tuple[ModelName, Path, dict[str, list[str]]]:
    """Return the model that the pipeline is for, its folder, and the dependence on it."""
    if road.config.quantisation is not None:
        return "student", road.at("quantise", "run"), {"quantise": ["run/*"]}
    name: ModelName = "teacher" if road.config.student is None else "student"
    return name, road.model(name), of_model(road, name)


def shipped(road: Road) -> list[str]:
    """Return lines on what the pipeline was for: the exports, and the command that translates with one or the model."""
    chosen = road.config.export
    places = {to: road.at(f"export-{to}", to) for to, target in chosen or () if target is not None}
    name, model, _ = final_model(road)
    exports = [f"the {name} for {to}: {place}" for to, place in places.items()]
    translating = shlex.quote(str(places.get("ctranslate2", model)))  # no other export is read here
    return [*exports, f"to translate: ziggurat translate {translating} < text.{road.languages[0]}"]


def _of_dev(road: Road) -> tuple[Path, dict[str, list[str]]]:
    """Return the source side of a development set, and the dependence on it."""
    if road.config.bitext.dev:
        return road.sides("sets", "dev", "0")[0], {"sets": [f"dev/0.{road.languages[0]}"]}
    return road.sides("clean", "held-out", "dev")[0], {"clean": [f"held-out/dev.{road.languages[0]}"]}


def shortlist_step(road: Road, how: ShortlistConfig) -> Step:
    """Return the step that estimates a shortlist from the student's data: `student.shortlist`."""

    def work(folder: Path) -> None:
        from ziggurat.data.corpus import Store
        from ziggurat.data.shortlist import estimate_shortlist, write_shortlist

        store = Store.open(road.at("student-data", "store"))
        options = {"pairs": how.pairs, "best": how.best, "frequent": how.frequent}
        write_shortlist(str(folder / SHORTLIST), estimate_shortlist(store, floor=how.floor, **options))

    return Step(
        "shortlist",
        "estimates which pieces a sentence allows",
        settings_of(how),
        work,
        {"student-data": ["store/*"]},
        outputs=(SHORTLIST,),
    )


def export_steps(road: Road) -> list[Step]:
    """Return a step for each target."""
    chosen = road.config.export
    return [] if chosen is None else [_export_step(road, to, target) for to, target in chosen if target is not None]


def _export_step(road: Road, to: str, target: ExportTarget) -> Step:
    """Return the step that writes the final model for `to`, and compares it with the model."""
    name, model, after = final_model(road)
    dev, of_texts = _of_dev(road)
    after |= of_texts
    test = road.test_set(road.test_names()[0]) if target.tolerance is not None else None
    if test is not None:
        step = test[0].relative_to(road.folder).parts[0]
        after[step] = [*after.get(step, []), *(path.relative_to(road.at(step)).as_posix() for path in test)]
    shortlist = None
    if road.config.shortlist is not None and to == "ctranslate2":
        shortlist, after["shortlist"] = str(road.at("shortlist", SHORTLIST)), [SHORTLIST]

    def files() -> dict[str, list[Path]]:
        # Without one of the pipeline this export contains the model's own.
        return model_files(road, name) | (shortlists(road, name) if to == "ctranslate2" and not shortlist else {})

    def work(folder: Path) -> None:
        from ziggurat.exchange.argos import package_choices
        from ziggurat.exchange.exporter import Gate, export_model

        package = package_choices([f"{key}={value}" for key, value in target.metadata.items()], None)
        with in_fresh_state():
            export_model(
                model,
                to,
                folder / to,
                quantization=target.quantization,
                verify=dev,
                lines=target.lines,
                gate=None if test is None or target.tolerance is None else Gate(*test, target.tolerance),
                force=True,  # an export that was interrupted just before the manifest was written
                package=package if target.metadata else None,
                shortlist=shortlist,
                say=road.say,
            )

    return Step(
        f"export-{to}",
        f"writes the {name} for {to}" + (f", {target.quantization}" if target.quantization else ""),
        settings_of(target),
        work,
        after,
        files,
        (f"{to}/**/*",),
        check=partial(_check, road, name, to, target),
    )


def _check(road: Road, name: ModelName, to: str, target: ExportTarget) -> None:
    """Raise ConfigError for a missing package or what the target does not have; ExportError: it cannot be reached."""
    missing = [package for package in _NEEDS.get(to, ()) if importlib.util.find_spec(package) is None]
    if missing:
        extra = "translate" if to in ("ctranslate2", "argos") else "export"
        raise ConfigError(
            f"export.{to}: needs {missing[0]}, which is not installed: pip install 'ziggurat-mt[{extra}]'"
        )
    from ziggurat.exchange.argos import package_choices
    from ziggurat.exchange.targets import target_named

    package = package_choices([f"{key}={value}" for key, value in target.metadata.items()], None)
    format_ = target_named(to, package if target.metadata else None)
    if target.quantization not in (None, "float32", *format_.quantizations):
        known = ", ".join(format_.quantizations) or "none"
        raise ConfigError(f"export.{to}.quantization: {target.quantization}; there are: {known}, float32")
    existing = getattr(road.config, name).existing
    experiment = experiment_of(road, name) if existing is None else experiment_there(road, name)[0]
    if reasons := format_.reasons(experiment):
        raise ExportError(f"export.{to}: the {name} cannot be written for it: {'; '.join(reasons)}")
