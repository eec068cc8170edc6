"""Messages of other parts of the toolkit, in a pipeline's words: the keys of its file, and ways out that it has."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping

from ziggurat.config.decode import DecodingConfig
from ziggurat.config.model import ModelConfig
from ziggurat.config.pipeline import ModelName, PipelineConfig
from ziggurat.config.train import TrainingConfig
from ziggurat.system.errors import ZigguratError

_OF_SECTION = "|".join({*ModelConfig.model_fields, *TrainingConfig.model_fields, *DecodingConfig.model_fields})
# Not `model.safetensors`, nor a part of a path, nor what has the name of a model before it already.
_OF_MODEL = re.compile(
    rf"(?<![\w./-])(?:((?:model|training|decoding)\.(?:{_OF_SECTION}))\b"
    r"|data\.((?:subword|unicode|stages|modifiers|sampling_temperature)\b))"
)
_CORPUS = re.compile(r"\b(data\.(?:train|dev)\.\d+)\b(?: \(([^()]*)\))?")  # sometimes with its name
_OF_PIPELINE = {
    "data.filters": "cleaning",
    "data.train": "bitext.train",
    "data.dev": "bitext.dev",
    "data.held_out": "test",
    "data.alignment": "alignment",
    "data.source_language": "source_language",
    "data.target_language": "target_language",
}
_AGAIN = re.compile(r"run `ziggurat prepare(?: --force)?` again|rebuild it with `--force`")


def worded(text: str, model: ModelName | None = None, corpora: Mapping[str, str] | None = None) -> str:
    """Return a message with the keys and the ways out of a pipeline.

    Args:
        text: the message, with keys of an experiment.
        model: the model that it is about; None: it is about cleaning.
        corpora: key of a corpus in the experiment, such as `data.train.0`, -> key in the pipeline's file.
    """
    known = corpora or {}

    def renamed(found: re.Match[str]) -> str:
        key = known.get(found[1], found[1])
        # A development corpus is called after a copy in a step's folder, which its user does not know.
        own = found[2] is None or key == found[2] or (key != found[1] and ".dev." in found[1])
        return key if own else f"{key} ({found[2]})"

    text = _CORPUS.sub(renamed, text)
    if model is not None:
        text = _OF_MODEL.sub(lambda found: f"{model}.{found[1] or found[2]}", text)
        # A change of the file makes the store again, and the command for the whole is the one that goes on.
        text = re.sub(r" and (?:prepare again|run `ziggurat prepare`(?: again)?)", "", text)
        text = _AGAIN.sub(f"give `--force {model}-data`", text).replace("`--resume`", "the same command")
    if model == "backward":  # its source is the pipeline's target
        text = re.sub(r"data\.(source|target)_language", lambda found: _OTHER[found[1]], text)
    for key, ours in _OF_PIPELINE.items():
        text = text.replace(key, ours)
    return text


def held_out_worded(text: str, config: PipelineConfig) -> str:
    """Return a notice of `worded` on what a model's data share with a held-out set, with the way out that there is.

    `prepare` knows of none that was tried; but the bitext was cleaned before.
    """
    own = {f"bitext.train.{n}.filters": corpus.filters for n, corpus in enumerate(config.bitext.train)}
    rules = {
        where if "held_out" in filters else "cleaning": filters.get("held_out", config.cleaning.held_out)
        for where, filters in own.items()
    }
    # What is held out of the bitext has no side in common with what stays of it.
    weak = [] if "bitext.hold_out" in text else [where for where, rule in rules.items() if rule != "sides"]
    way_out = "they are machine translations that came out as such sentences, which no filter drops"
    if weak:
        keys = ", ".join(f"`{where}.held_out: sides`" for where in weak[:3])
        way_out = f"{keys} drops such pairs of the bitext, and what is distilled from them"
    return _DROPS.sub(way_out, text)


_DROPS = re.compile(r"`cleaning\.held_out: .*")  # to the end of the notice
_OTHER = {"source": "target_language", "target": "source_language"}


@contextlib.contextmanager
def errors_worded(
    model: ModelName | None = None, corpora: Callable[[], Mapping[str, str]] = dict[str, str]
) -> Iterator[None]:
    """Context in which errors are worded as messages are; `corpora` is called where there is one."""
    try:
        yield
    except ZigguratError as error:
        raise type(error)(worded(str(error), model, corpora())) from None
