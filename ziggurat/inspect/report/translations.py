"""Translations of the same sentences by runs, kept in each run's folder so that a second report is quick."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ziggurat.config import DecodingConfig
from ziggurat.data.corpus import Store
from ziggurat.inspect.report.runs import ReportRun
from ziggurat.model.directory import locate_weights, weights_origin
from ziggurat.model.low_rank_updates import weights_fingerprint
from ziggurat.system.errors import DataError
from ziggurat.system.files import write_atomically
from ziggurat.system.small_files import built, parse_json, read_bounded
from ziggurat.translate.results import TranslationWarning, translate_tagged
from ziggurat.translate.translator import load_translator

_FORMAT = 1
_FOLDER = "translations"


@dataclass(frozen=True)
class Sentences:
    """Sentences to be translated by all runs.

    Attributes:
        name: a description, such as `all 500 sentences of the dev set`.
        sources: source sentences.
        references: reference translations.
        tags: for each source the tag of a training corpus, or None.
        target_language: language code of the references.
    """

    name: str
    sources: Sequence[str]
    references: Sequence[str]
    tags: Sequence[str | None]
    target_language: str

    @property
    def identity(self) -> str:
        """Checksum of the input to the models."""
        inputs = json.dumps([list(self.sources), list(self.tags)])
        return xxhash.xxh3_64(inputs.encode()).hexdigest()


@dataclass(frozen=True)
class Translated:
    """Translations of sentences by one run.

    Attributes:
        origin: a description of the weights.
        search: a description of the search.
        outputs: one line for each sentence.
        unfinished: number of lines that were cut at the length limit.
    """

    origin: str
    search: str
    outputs: list[str]
    unfinished: int


def dev_sentences(runs: Sequence[ReportRun], count: int) -> Sentences:
    """Return `count` sentences spread evenly over the dev set of the first of `runs` whose store is there.

    Raises DataError when no run has one: there is no store where the configuration says, or it has no dev set.
    """
    reasons = []
    for run in runs:
        try:
            return _of_dev_set(run, count)
        except DataError as error:
            reasons.append(error)
    raise reasons[0]  # the other runs were only a way out


def _of_dev_set(run: ReportRun, count: int) -> Sentences:
    store = Store.open(Path(run.experiment.data.store).expanduser())
    if store.dev is None or not len(store.dev):
        raise DataError(f"{store.path}: the store has no dev set")
    total = len(store.dev)
    lines = np.unique(np.linspace(0, total - 1, min(count, total)).round().astype(np.int64))
    sources, references = store.dev.texts(lines)
    part = f"all {total:,}" if len(lines) == total else f"{len(lines):,} of {total:,}"
    return Sentences(
        f"{part} sentences of the dev set",
        sources,
        references,
        store.dev_tags(lines),
        run.experiment.data.target_language,
    )


def translated(run: ReportRun, sentences: Sentences, say: Callable[[str], None]) -> Translated:
    """Return the translations of `sentences` by the model of `run` that `translate` takes, with its settings.

    The result is kept in the run, and reused while weights, settings and sentences are the same; `say` takes a message
    before translating. Raises CheckpointError where the run has no checkpoint, or a damaged one.
    """
    weights, _ = locate_weights(run.folder)
    decoding = run.experiment.decoding.model_dump(mode="json")
    made_of = weights_fingerprint(weights)
    key = {"format": _FORMAT, "weights": made_of, "decoding": decoding, "sentences": sentences.identity}
    kept = run.folder / _FOLDER / f"{sentences.identity}.json"
    found = _kept(kept, key, len(sentences.sources))
    if found is None:
        say(f"{run.name}: translating {sentences.name} with {weights_origin(run.folder, weights)}")
        found = _translate(run, sentences)
        try:
            kept.parent.mkdir(exist_ok=True)
            write_atomically(kept, json.dumps({"key": key, **asdict(found)}, ensure_ascii=False, indent=1).encode())
        except OSError as error:
            say(f"{kept}: cannot be written ({error.strerror}); the next report translates again")
    return found


def _translate(run: ReportRun, sentences: Sentences) -> Translated:
    translator = load_translator(run.folder)
    with warnings.catch_warnings(action="ignore", category=TranslationWarning):  # the report has their number
        found = translate_tagged(translator.translate, sentences.sources, sentences.tags)
    outputs = [translation.text for translation in found]
    return Translated(translator.origin, _search(translator.decoding), outputs, translator.notices["unfinished"])


def _search(decoding: DecodingConfig) -> str:
    """Return a search in a few words."""
    if decoding.search == "sample":
        return f"the most typical of {decoding.mbr} samples" if decoding.mbr else "samples"
    return f"beam of {decoding.beam_size}" if decoding.beam_size > 1 else "greedy search"


def _kept(path: Path, key: dict[str, Any], count: int) -> Translated | None:
    """Return the translations that an earlier report kept; None if there are none, or of other weights, or damaged."""
    try:
        document = parse_json(read_bounded(path, 1 << 28), str(path))
        if document.pop("key") != key:
            return None
        found = built(Translated, document)
    except (OSError, DataError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return found if len(found.outputs) == count else None
