"""The whole configuration of an experiment (one YAML file), and the keys in which two configurations differ."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Self

from pydantic import model_validator

from ziggurat.config.base import Count, Section
from ziggurat.config.data import DataConfig
from ziggurat.config.decode import DecodingConfig
from ziggurat.config.freezing import freeze_refused
from ziggurat.config.growth import growth_refused
from ziggurat.config.guidance import alignment_refused
from ziggurat.config.lora import lora_refused
from ziggurat.config.model import ModelConfig
from ziggurat.config.train import TrainingConfig
from ziggurat.errors import printable

CONFIG_FORMAT = 1
"""Version of the configuration format, written into every saved config."""


class Experiment(Section):
    """Sections `data`, `model`, `training` and `decoding`."""

    format: Count = CONFIG_FORMAT
    """Version of this format."""
    data: DataConfig
    """Corpora, cleaning and segmentation."""
    model: ModelConfig = ModelConfig()
    """Architecture."""
    training: TrainingConfig = TrainingConfig()
    """Optimisation."""
    decoding: DecodingConfig = DecodingConfig()
    """Search."""

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        if self.format != CONFIG_FORMAT:
            raise ValueError(
                f"configuration format {self.format} is not known here (this version reads {CONFIG_FORMAT})"
            )
        subword = self.data.subword
        # As ziggurat.data.subword_training decides it; equal paths of both sides mean one joint vocabulary.
        separate = (
            (subword.kind in ("bpe", "unigram") and not subword.joint)
            or (subword.kind == "existing" and subword.target_model not in (None, subword.source_model))
            or (subword.kind == "vocabulary" and subword.target_vocabulary not in (None, subword.source_vocabulary))
        )
        if separate and self.model.embedding.sharing == "all":
            raise ValueError(
                "`model.embedding.sharing: all` needs one vocabulary for both sides, but `data.subword` has two; "
                "set `data.subword.joint: true` or `model.embedding.sharing: decoder`"
            )
        if self.model.transfer is not None and self.training.optimiser.kind == "muon":
            raise ValueError("`model.transfer` scales the rates of Adam: `training.optimiser.kind` cannot be muon")
        if self.model.transfer is not None and self.training.schedule.kind == "noam":
            schedule = self.training.schedule
            peak = schedule.factor * (self.model.transfer.width * schedule.warmup_updates) ** -0.5
            raise ValueError(
                "`model.transfer` scales rates by the width, and so does `training.schedule.kind: noam`: choose "
                f"`kind: isqrt` with `peak: {peak:.3g}`, the highest rate of noam for the base"
            )
        if reasons := alignment_refused(self.training.loss.alignment, self.model, self.training.growth is not None):
            raise ValueError(f"`training.loss.alignment`: {'; '.join(reasons)}")
        if self.training.quantise is not None and (reasons := _quantisation_refused(self.model)):
            raise ValueError(f"`training.quantise: {self.training.quantise}`: {'; '.join(reasons)}; set it to null")
        growth = self.training.growth
        if growth is not None and (reasons := growth_refused(growth, self.model)):
            raise ValueError(f"`training.growth`: {'; '.join(reasons)}")
        if reasons := freeze_refused(self.training, self.model):
            raise ValueError(f"`training.freeze`: {'; '.join(reasons)}")
        if reasons := lora_refused(self.training, self.model):
            raise ValueError(f"`training.lora`: {'; '.join(reasons)}")
        return self


def _quantisation_refused(model: ModelConfig) -> list[str]:
    """Return why training with bytes would not teach what int8 translation computes."""
    if model.family == "rnmt":
        return ["int8 translation leaves LSTM cells in fp32, so there is next to nothing to get used to"]
    shifted = [
        f"{side} has `residual: fixup`, whose maps with shifts int8 translation leaves in fp32"
        for side, kinds in (("encoder", model.residuals(decoder=False)), ("decoder", model.residuals(decoder=True)))
        if "fixup" in kinds
    ]
    return [f"the {' and the '.join(shifted)}"] if shifted else []


def changed(before: Any, after: Any) -> list[str]:
    """Return `key: old -> new` for every dotted key whose value differs or that only one of the two has."""
    old, new = settings_by_key(before, items=True), settings_by_key(after, items=True)
    keys = [*old, *(key for key in new if key not in old)]
    return [
        f"{key}: {_said(old, key)} -> {_said(new, key)}"
        for key in keys
        # 1, 1.0 and True are equal in Python but not in a configuration; JSON spells them differently.
        if ((key in old) != (key in new) or _spelt(old[key]) != _spelt(new[key]))
        and not _filled(key, old, new)
        and not _filled(key, new, old)
    ]


def _filled(key: str, settings: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Return True if a section is empty in `settings` and has keys in `others`, which say all."""
    empty = key in settings and settings[key] in ({}, [])
    return empty and any(other.startswith(f"{key}.") for other in others)


def shown(changes: list[str], most: int = 6) -> str:
    """Return `changes` on one line for a message, at most `most` of them written out."""
    more = f"; and {len(changes) - most} more" if len(changes) > most else ""
    return "; ".join(changes[:most]) + more


def settings_by_key(content: Any, prefix: str = "", *, items: bool = False) -> dict[str, Any]:
    """Return the values of nested sections by dotted key; `items`: those of lists too, by number from 0."""
    # An empty section or list counts as a value: a list that lost its last item differs from a missing one.
    if isinstance(content, Mapping) and content:
        inner = [(str(key), value) for key, value in content.items()]
    elif items and isinstance(content, list) and content:
        inner = [(str(number), value) for number, value in enumerate(content)]
    else:
        return {prefix: content}
    return {
        key: value
        for name, part in inner
        for key, value in settings_by_key(part, f"{prefix}.{name}" if prefix else name, items=items).items()
    }


def _said(values: Mapping[str, Any], key: str) -> str:
    return printable(_spelt(values[key]), 40) if key in values else "(not given)"


def _spelt(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
