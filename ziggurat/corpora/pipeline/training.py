"""Steps that train a model: preparing its data, training, fine-tuning for int8.

A run with checkpoints refuses file paths other than those it started with, since it cannot know whether the files have
the same content; the manifests of the steps can. So training resumes with its original paths (`as_begun`), and for a
store only the existence of files counts, not their location (`_without_paths`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ziggurat.config.data import CorpusConfig, DataConfig
from ziggurat.config.depth import LeftOut
from ziggurat.config.experiment import Experiment
from ziggurat.config.pipeline import PREPARED_BY, ModelName, pipeline_names
from ziggurat.config.pipeline_models import TrainedConfig
from ziggurat.config.train import TrainingConfig
from ziggurat.corpora.jobs.job import JobOutcome
from ziggurat.corpora.jobs.preparation import prepare_job
from ziggurat.corpora.pipeline.context import Corpora, PipelineContext, Progress, errors_renamed, with_way_out
from ziggurat.corpora.pipeline.costs import PAIRS_PREPARED, CorpusSizes, Costs, by_rate, updates_done
from ziggurat.corpora.pipeline.models import (
    VOCABULARIES,
    experiment_of,
    in_fresh_state,
    model_files,
    of_model,
    refuse_empty_stages,
    said,
)
from ziggurat.corpora.pipeline.step import Expected, Step, StepProgress, StepSettings, joined, settings_of
from ziggurat.data.corpus import read_manifest
from ziggurat.data.prepare import PrepareReport, prepare
from ziggurat.model.directory import AVERAGED, SCORE_FILE, open_model, write_model_directory
from ziggurat.model.run_folder import CHECKPOINTS, checkpoint_folders, read_meta
from ziggurat.model.tensors import weights
from ziggurat.system.errors import CheckpointError, DataError
from ziggurat.system.files import MANIFEST, content_checksum, find_files
from ziggurat.system.staging import discard

_OF_STORE = {"subword", "unicode"}
_OF_TRAINING = {"model", "without_layers", "training", "decoding", "modifiers", "stages", "sampling_temperature"}
"""Keys of a model's section on which its store and its training depend."""
_NOT_OF_RESULT = {
    *("start_from", "device", "threads"),  # a path; and one that affects only rounding, like another machine
    *("recompute", "distributed"),  # gradients stay the same bit for bit; one process trains
    *("log_every_updates", "diagnostics", "tensorboard", "wandb", "mlflow"),
}
"""Keys of `training` that do not affect the weights; the model of `start_from` is in `Step.after`."""
_NOT_OF_KEEPING = {
    *("keep_last", "keep_every", "keep_best", "keep_around_best", "keep_best_per_direction", "asynchronous"),
}
"""Such keys of `training.checkpoint`: an average is over `average_last`, never more than `keep_last` keeps."""
_MANIFEST = f"store/{MANIFEST}"
_FOR_READERS = {"prepared_from", "notices", "held_out", "files", "checksum"}
"""Keys of a store's manifest unrelated to its pairs and settings; `fingerprint` covers all files of the store."""
_COUNTS = {
    *("read", "kept", "dropped", "repaired", "aligned", "held_out", "origin"),
    *("carriage_returns", "byte_order_marks", "short_rows"),
}
"""Keys of a corpus in that manifest that are only counts of its lines."""


class DataStep(Step):
    """The step that prepares the store of a model from the cleaned and translated corpora."""

    outputs = (_MANIFEST, "store/vocabulary.json", "store/*.spm", "store/*.vocab", "store/train-*", "store/dev-*")
    is_job = True

    def __init__(self, context: PipelineContext, model: ModelName) -> None:
        self.name, self.title = f"{model}-data", f"prepares the data of the {said(model)}"
        self._context, self._model, self._corpora = context, model, Corpora(context)
        self._chosen: TrainedConfig = getattr(context.config, model)
        data = experiment_of(context, model).data
        subword, vocabulary = {}, dict[str, list[str]]()
        if self._chosen.without_layers is not None:
            # By content, not by path, since the whole folder may be moved; only the teacher's vocabulary matters here.
            subword = {"subword": "the teacher's"}
            vocabulary = {step: [f"run/{file}" for file in VOCABULARIES] for step in of_model(context, "teacher")}
        train = [
            {"name": c.name, "weight": c.weight, "tag": c.tag, **({"filters": c.filters} if c.filters else {})}
            for c in self._corpora.train(model)
        ]
        tags = [corpus.tag for corpus in self._corpora.dev(model)]
        self.settings = joined(
            settings_of(self._chosen, include=_OF_STORE),
            subword,
            {"languages": [data.source_language, data.target_language]},
            settings_of(context.config.cleaning, include=set(PREPARED_BY)),
            {"corpora": train, **({"dev_tags": tags} if any(tags) else {})},
        )
        self.after = self._corpora.inputs(model) | vocabulary

    def inputs(self) -> dict[str, list[Path]]:
        """Return the files of existing vocabularies."""
        if self._chosen.without_layers is not None:
            there = model_files(self._context, "teacher").items()
            return {key: [path for path in paths if any(map(path.match, VOCABULARIES))] for key, paths in there}
        given = ("source_model", "target_model", "source_vocabulary", "target_vocabulary")
        named = {f"{self._model}.subword.{key}": getattr(self._chosen.subword, key) for key in given}
        return {key: _vocabulary(path, key) for key, path in named.items() if path}

    def cost(self) -> Expected:
        """Return the expected cost of preparation."""
        return by_rate(CorpusSizes(self._context).of(self._model), PAIRS_PREPARED)

    def read_hash(self, name: str, path: Path) -> str | None:
        """Return, for the store's manifest, a hash of the parts that training reads."""
        return read_of_store(path) if name == _MANIFEST else None

    def work(self, folder: Path) -> int | None:
        """Prepare the store, without the corpora that cleaning emptied."""
        context, name, corpora = self._context, self._model, self._corpora
        refuse_empty_stages(context)
        empty = corpora.empty()
        if not corpora.with_pairs(name):
            nothing = f"nothing to learn from: cleaning left no pair of {', '.join(sorted(empty))}"
            where = f"({context.at('clean', 'report.json')} has the reasons)"
            raise DataError(f"the {said(name)} has {nothing} {where}; change `cleaning` or `bitext`")
        for corpus in corpora.train(name):
            if corpus.name in empty:
                context.say(f"warning: {corpus.name}: cleaning left none of its pairs; it is left out")
        with errors_renamed(name, lambda: corpora.keys(name)):
            outcome = _prepared(context, folder / "job", experiment_of(context, name).data)
        if (report := outcome.report) is not None:
            known = pipeline_names(name, corpora.keys(name))
            for notice in report.problems:
                context.say(f"warning: {with_way_out(notice, context.config, known).shown(known)}")
            context.say(f"{report.kept:,} pairs, {report.pieces()}")
        return outcome.signal


def read_of_store(manifest: Path) -> str:
    """Return a hash of a store, from its manifest, that changes only if something that training reads changes.

    It leaves out only what training does not read: the paths of the text and the counts of its lines. It includes all
    settings, such as `max_pieces`, which modifiers use.
    """
    store = {key: value for key, value in read_manifest(manifest.parent).items() if key not in _FOR_READERS}
    corpora = {
        split: [{key: value for key, value in corpus.items() if key not in _COUNTS} for corpus in of_split]
        for split, of_split in store["corpora"].items()
    }
    return content_checksum({**store, "config": _without_paths(store["config"]), "corpora": corpora})


def _prepared(context: PipelineContext, job: Path, data: DataConfig) -> JobOutcome[PrepareReport]:
    """Prepare data; as a job, in the folder `job`, if other calls take or took part in it."""
    progress = Progress(context.say, "pairs")
    if not (context.execution.shared or job.exists()):
        return JobOutcome(None, prepare(data, progress=progress.phase))
    outcome = prepare_job(data, job, context.execution.work(None, 1, "cpu", progress.show), progress=progress.phase)
    if outcome.report is not None and job.exists():
        discard(job)
    return outcome


def _vocabulary(place: str, key: str) -> list[Path]:
    folder = Path(place).expanduser()
    if not folder.is_dir():
        return find_files(place, key)
    return [path for pattern in VOCABULARIES for path in sorted(folder.glob(pattern))]


class TrainStep(Step):
    """The step that trains a model."""

    def __init__(self, context: PipelineContext, model: ModelName, costs: Costs) -> None:
        self._context, self._model, self._costs = context, model, costs
        chosen: TrainedConfig = getattr(context.config, model)
        self._pruned, growth = chosen.without_layers, chosen.training.growth
        before = f", grown from {growth.stages[0].layers}" if growth is not None else ""
        left_out = {}
        if self._pruned is not None:
            before = f", started as the teacher without {self._pruned}"
            left_out = {"without_layers": LeftOut.parse(self._pruned).names()}  # however it is written
        depth = f"{chosen.model.encoder.layers}-{chosen.model.decoder.layers}"
        self.name = model
        self.title = f"trains the {said(model)}: {depth} layers of width {chosen.model.d_model}{before}"
        training = {"training": _of_result(chosen.training)}
        self.settings = joined(settings_of(chosen, include=_OF_TRAINING), training, left_out)
        teacher = of_model(context, "teacher") if self._pruned is not None else {}
        self.after = {f"{model}-data": ["store/*"], **teacher}
        self.outputs = _weights_of(experiment_of(context, model))

    def inputs(self) -> dict[str, list[Path]]:
        """Return the files of an existing teacher, if the student starts as it."""
        return {} if self._pruned is None else model_files(self._context, "teacher")

    def cost(self) -> Expected:
        """Return the expected cost of training."""
        return self._costs.training(self._model)

    def progress(self) -> StepProgress | None:
        """Return the share of updates completed at its newest checkpoint."""
        return self._costs.trained(self._model, *updates_done(self._context.at(self.name, "run")))

    def work(self, folder: Path) -> int | None:
        """Train, from the newest checkpoint if there is one."""
        context, start = self._context, folder / "start"
        with errors_renamed(self._model, lambda: Corpora(context).keys(self._model)):
            experiment = experiment_of(context, self._model)
            if self._pruned is not None:
                experiment = _begun_as_teacher(context, start, experiment, self._pruned)
            signal = train_or_go_on(context, folder / "run", experiment)
            if signal is None and start.exists():
                discard(start)  # a copy of the teacher's weights, as large as those of the run
            return signal


def _begun_as_teacher(context: PipelineContext, folder: Path, student: Experiment, without_layers: str) -> Experiment:
    """Write the teacher without some layers to `folder`; return the experiment that trains the student from it."""
    if not folder.exists():  # written whole or not at all
        teacher = open_model(context.model("teacher"), without_layers=without_layers)
        write_model_directory(folder, weights(teacher.model), teacher.experiment, teacher.directory)
    training = student.training.model_copy(update={"start_from": str(folder)})
    return student.model_copy(update={"training": training})


class QuantiseStep(Step):
    """The step that fine-tunes the student for int8."""

    name, title = "quantise", "fine-tunes the student for int8"

    def __init__(self, context: PipelineContext, updates: int, costs: Costs) -> None:
        self._context, self._updates, self._costs = context, updates, costs
        experiment = self._experiment()
        training = {"training": _of_result(experiment.training)}
        self.settings = joined(training, settings_of(experiment.data, include={"stages"}))
        self.after = {"student-data": ["store/*"], **of_model(context, "student")}
        self.outputs = _weights_of(experiment)

    def _experiment(self) -> Experiment:
        student = experiment_of(self._context, "student")
        return self._context.config.quantised(student, str(self._context.model("student")))

    def cost(self) -> Expected:
        """Return the expected cost of fine-tuning."""
        return self._costs.quantising(self._updates)

    def progress(self) -> StepProgress:
        """Return the share of updates completed at its newest checkpoint."""
        done, seconds = updates_done(self._context.at(self.name, "run"))
        said = f"{min(done, self._updates):,} of {self._updates:,} updates"
        return StepProgress(min(1.0, done / self._updates), said, seconds)

    def work(self, folder: Path) -> int | None:
        """Fine-tune, from the newest checkpoint if there is one."""
        with errors_renamed("student", lambda: Corpora(self._context).keys("student")):
            return train_or_go_on(self._context, folder / "run", self._experiment())


def _of_result(training: TrainingConfig) -> StepSettings:
    """Return the settings of a training without those that do not affect its weights.

    The number of best checkpoints matters only if it is 0, because the output is then the last checkpoint.
    """
    best = {"keep_best": min(1, training.checkpoint.keep_best)}
    kept = settings_of(training.checkpoint, exclude=_NOT_OF_KEEPING)
    return joined(settings_of(training, exclude=_NOT_OF_RESULT), {"checkpoint": joined(kept, best)})


def _weights_of(experiment: Experiment) -> tuple[str, ...]:
    """Return the files of a run that translation reads; `best` replaces an average that turns out worse."""
    checkpoint = experiment.training.checkpoint
    files = ["best/model.safetensors" if checkpoint.keep_best else "last/model.safetensors", "config.yaml"]
    if checkpoint.average_last:
        files += [f"{AVERAGED}/model.safetensors", f"{AVERAGED}/{SCORE_FILE}"]
    return tuple(f"run/{file}" for file in (*files, *VOCABULARIES))


def train_or_go_on(context: PipelineContext, run: Path, experiment: Experiment) -> int | None:
    """Train a model in a run folder, from its newest checkpoint if there is one; return the signal that stopped it."""
    from ziggurat.train.loop import train

    with in_fresh_state():
        resume = (run / CHECKPOINTS).is_dir()
        experiment = as_begun(run, experiment)
        return train(run, experiment, resume=resume, console=context.console, advice=False).signal


_OF_CORPUS = ("source", "target", "path", "alignment")
_OF_SUBWORD = ("source_model", "target_model", "source_vocabulary", "target_vocabulary")
"""Keys whose values are paths of files."""


def _without_paths(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dumped section `data` in which paths are replaced by whether there are files."""
    kept = {**data, "store": None, "subword": _hidden(data["subword"], _OF_SUBWORD)}
    return kept | {split: [_hidden(corpus, _OF_CORPUS) for corpus in data[split]] for split in ("train", "dev")}


def _hidden(content: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {**content, **{key: content.get(key) is not None for key in keys}}


def as_begun(run: Path, experiment: Experiment) -> Experiment:
    """Return an experiment with the file paths with which its training, in the folder `run`, started.

    A run with checkpoints refuses other paths, since it cannot know whether the files have the same content; the
    manifest of the step can. These files are not read again: a run resumes from the store and its checkpoint. Without a
    checkpoint it starts from `training.start_from`, so the current paths stay.
    """
    for folder in reversed(checkpoint_folders(run)):
        try:
            kept = read_meta(folder)["configuration"]
        except CheckpointError:
            continue  # damaged; the configuration of the previous checkpoint is the same
        return _placed(experiment, kept)
    return experiment


def _placed(experiment: Experiment, kept: Mapping[str, Any]) -> Experiment:
    data, training = experiment.data, experiment.training
    subword = data.subword.model_copy(update=_places(data.subword.model_dump(), kept["data"]["subword"], _OF_SUBWORD))
    corpora = {split: _corpora(getattr(data, split), kept["data"][split]) for split in ("train", "dev")}
    start = _places(training.model_dump(), kept["training"], ("start_from",))
    return experiment.model_copy(
        update={
            "data": data.model_copy(update={**corpora, "subword": subword}),
            "training": training.model_copy(update=start),
        }
    )


def _corpora(now: Sequence[CorpusConfig], before: Sequence[Mapping[str, Any]]) -> list[CorpusConfig]:
    if len(now) != len(before):
        return list(now)
    return [
        corpus.model_copy(update=_places(corpus.model_dump(), kept, _OF_CORPUS))
        for corpus, kept in zip(now, before, strict=True)
    ]


def _places(now: Mapping[str, Any], before: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Return the former values of `keys` that both have; a key that only one has is a different setting."""
    return {key: before[key] for key in keys if before.get(key) is not None and now[key] is not None}
