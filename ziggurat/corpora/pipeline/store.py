"""The step that prepares a model's data: its store, from what cleaning and translating left of the corpora."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ziggurat.config.data import DataConfig
from ziggurat.config.pipeline import PREPARED_BY, ModelName
from ziggurat.config.pipeline_models import TrainedConfig
from ziggurat.corpora.pipeline.costs import PAIRS_PREPARED, Amounts, by_rate
from ziggurat.corpora.pipeline.models import (
    VOCABULARIES,
    experiment_of,
    model_files,
    of_model,
    refuse_empty_stages,
    said,
)
from ziggurat.corpora.pipeline.road import Corpora, Progress, Road
from ziggurat.corpora.pipeline.settings import joined, settings_of, without_places
from ziggurat.corpora.pipeline.step import Step
from ziggurat.corpora.pipeline.wording import errors_renamed, pipeline_names, with_way_out
from ziggurat.system.errors import DataError
from ziggurat.system.files import MANIFEST, content_checksum, find_files

if TYPE_CHECKING:
    from ziggurat.corpora.jobs.run import JobOutcome
    from ziggurat.data.prepare import PrepareReport

_OF_STORE = {"subword", "unicode"}
_MANIFEST = f"store/{MANIFEST}"
_FOR_READERS = {"prepared_from", "notices", "held_out", "files", "checksum"}
"""Keys of a store's manifest that concern no pair and no setting of it; its `fingerprint` is of all its files."""
_COUNTS = {
    *("read", "kept", "dropped", "repaired", "aligned", "held_out", "origin"),
    *("carriage_returns", "byte_order_marks", "short_rows"),
}
"""The same of a corpus in it: what became of its lines."""


def data_step(road: Road, name: ModelName) -> Step:
    """Return the step that prepares the store of a model."""
    chosen: TrainedConfig = getattr(road.config, name)
    corpora, experiment = Corpora(road), experiment_of(road, name)
    subword, vocabulary = {}, dict[str, list[str]]()
    if pruned := chosen.without_layers is not None:
        # By what it is, not by where: the whole may be moved. And of the teacher nothing but its vocabulary.
        subword = {"subword": "the teacher's"}
        vocabulary = {model: [f"run/{file}" for file in VOCABULARIES] for model in of_model(road, "teacher")}

    def work(folder: Path) -> int | None:
        refuse_empty_stages(road)
        empty = corpora.empty()
        if not corpora.with_pairs(name):
            nothing = f"nothing to learn from: cleaning left no pair of {', '.join(sorted(empty))}"
            where = f"({road.at('clean', 'report.json')} has the reasons)"
            raise DataError(f"the {said(name)} has {nothing} {where}; change `cleaning` or `bitext`")
        for corpus in corpora.train(name):
            if corpus.name in empty:
                road.say(f"warning: {corpus.name}: cleaning left none of its pairs; it is left out")
        with errors_renamed(name, lambda: corpora.keys(name)):
            outcome = _prepared(road, folder / "job", experiment_of(road, name).data)
        if (report := outcome.report) is not None:
            known = pipeline_names(name, corpora.keys(name))
            for notice in report.problems:
                road.say(f"warning: {with_way_out(notice, road.config, known).shown(known)}")
            road.say(f"{report.kept:,} pairs, {report.pieces()}")
        return outcome.signal

    def files() -> dict[str, list[Path]]:
        if pruned:
            there = model_files(road, "teacher").items()
            return {key: [path for path in paths if any(map(path.match, VOCABULARIES))] for key, paths in there}
        given = ("source_model", "target_model", "source_vocabulary", "target_vocabulary")
        named = {f"{name}.subword.{key}": getattr(chosen.subword, key) for key in given}
        return {key: _vocabulary(place, key) for key, place in named.items() if place}

    train = [
        {"name": c.name, "weight": c.weight, "tag": c.tag, **({"filters": c.filters} if c.filters else {})}
        for c in corpora.train(name)
    ]
    tags = [corpus.tag for corpus in corpora.dev(name)]
    return Step(
        f"{name}-data",
        f"prepares the data of the {said(name)}",
        joined(
            settings_of(chosen, include=_OF_STORE),
            subword,
            {"languages": [experiment.data.source_language, experiment.data.target_language]},
            settings_of(road.config.cleaning, include=set(PREPARED_BY)),
            {"corpora": train, **({"dev_tags": tags} if any(tags) else {})},
        ),
        work,
        corpora.inputs(name) | vocabulary,
        files,
        (
            _MANIFEST,
            "store/vocabulary.json",
            "store/*.spm",
            "store/*.vocab",
            "store/train-*",
            "store/dev-*",
        ),
        lambda: by_rate(Amounts(road).of(name), PAIRS_PREPARED),
        is_job=True,
        read_as={_MANIFEST: read_of_store},
    )


def read_of_store(manifest: Path) -> str:
    """Return a hash of a store by its manifest: of all that training reads, so that it stays where that is the same.

    Left out is only what no training reads: where the text was, and what became of its lines. All settings stay, such
    as `max_pieces`, by which modifiers go.
    """
    from ziggurat.data.corpus import read_manifest

    store = {key: value for key, value in read_manifest(manifest.parent).items() if key not in _FOR_READERS}
    corpora = {
        split: [{key: value for key, value in corpus.items() if key not in _COUNTS} for corpus in of_split]
        for split, of_split in store["corpora"].items()
    }
    return content_checksum({**store, "config": without_places(store["config"]), "corpora": corpora})


def _prepared(road: Road, job: Path, data: DataConfig) -> JobOutcome[PrepareReport]:
    """Prepare data; as a job, in the folder `job`, where others take part in it or have done so."""
    from ziggurat.corpora.jobs.preparation import prepare_job
    from ziggurat.corpora.jobs.run import JobOutcome
    from ziggurat.data.prepare import prepare
    from ziggurat.system.staging import discard

    progress = Progress(road.say, "pairs")
    if not (road.bulk.shared or job.exists()):
        return JobOutcome(None, prepare(data, progress=progress.phase))
    outcome = prepare_job(data, job, road.bulk.work(None, 1, "cpu", progress.show), progress=progress.phase)
    if outcome.report is not None and job.exists():
        discard(job)
    return outcome


def _vocabulary(place: str, key: str) -> list[Path]:
    """Return the files of a vocabulary, a file or a folder with some."""
    folder = Path(place).expanduser()
    if not folder.is_dir():
        return find_files(place, key)
    return [path for pattern in VOCABULARIES for path in sorted(folder.glob(pattern))]
