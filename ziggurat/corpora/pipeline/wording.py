"""Problems of other parts of the toolkit, with the names that a pipeline's file has for settings, and its ways out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from ziggurat.config.pipeline import ModelName, PipelineConfig
from ziggurat.system.errors import Problem, Remedy, ZigguratError

_OF_PIPELINE = {
    "data.filters": "cleaning",
    "data.train": "bitext.train",
    "data.dev": "bitext.dev",
    "data.held_out": "test",
    "data.alignment": "alignment",
    "data.source_language": "source_language",
    "data.target_language": "target_language",
}
_OF_MODEL = ("subword", "unicode", "stages", "modifiers", "sampling_temperature")
"""Keys of `data` that are keys of a model in a pipeline's file."""


def pipeline_names(model: ModelName | None = None, corpora: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the names of a pipeline for keys of an experiment, and for ways out of the command line.

    Args:
        model: the model whose experiment it is; None: it is the data of cleaning.
        corpora: key of a corpus in the experiment, such as `data.train.0`, -> key in the pipeline's file.
    """
    found = {**_OF_PIPELINE, **(corpora or {})}
    if model is None:
        return found
    if model == "backward":  # its source is the pipeline's target
        found |= {"data.source_language": "target_language", "data.target_language": "source_language"}
    found |= {section: f"{model}.{section}" for section in ("model", "training", "decoding")}
    found |= {f"data.{key}": f"{model}.{key}" for key in _OF_MODEL}
    # A change of the file makes the store again, and the command for the whole is the one that goes on.
    found |= dict.fromkeys((Remedy.PREPARE, Remedy.PREPARE_ANEW, Remedy.REBUILD), f"give `--force {model}-data`")
    return found | {Remedy.THEN_PREPARE: "", Remedy.PREPARE_AFTER: "", Remedy.RESUME: "the same command"}


def with_way_out(problem: Problem, config: PipelineConfig, known: Mapping[str, str]) -> Problem:
    """Return a notice on what a model's data share with a held-out set, with the way out that there is; others as is.

    `prepare` knows of none that was tried; but the bitext was cleaned before. `known` are the names of the model.
    """
    if not problem.remedy.startswith("`data.filters.held_out: "):
        return problem
    own = {f"bitext.train.{n}.filters": corpus.filters for n, corpus in enumerate(config.bitext.train)}
    rules = {
        where if "held_out" in filters else "cleaning": filters.get("held_out", config.cleaning.held_out)
        for where, filters in own.items()
    }
    # What is held out of the bitext has no side in common with what stays of it.
    of_bitext = any(known.get(name.partition(" (")[0]) == "bitext.hold_out.dev" for name in problem.named)
    weak = [] if of_bitext else [where for where, rule in rules.items() if rule != "sides"]
    way_out = "they are machine translations that came out as such sentences, which no filter drops"
    if weak:
        keys = ", ".join(f"`{where}.held_out: sides`" for where in weak[:3])
        way_out = f"{keys} drops such pairs of the bitext, and what is distilled from them"
    return replace(problem, remedy=way_out)


@contextlib.contextmanager
def errors_renamed(
    model: ModelName | None = None, corpora: Callable[[], Mapping[str, str]] = dict[str, str]
) -> Iterator[None]:
    """Context in which errors have the names of a pipeline; `corpora` is called where there is an error."""
    try:
        yield
    except ZigguratError as error:
        raise error.with_names(pipeline_names(model, corpora())) from None
