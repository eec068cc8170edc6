"""Methods of a report: the runs that make one line against depth.

A method is what runs have in common apart from depth and seed. Its runs of equal depth differ in the seed alone, so
that their spread is that of seeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ziggurat.config.experiment import settings_by_key
from ziggurat.report.runs import ReportRun

__all__ = ["Method", "methods_of"]

_ENCODER, _DECODER = "model.encoder.layers", "model.decoder.layers"
_SCRATCH, _GROWN = "from scratch", "grown"
_KINDS = {
    "model.residual": None,
    "model.family": "transformer",
    "model.encoder.history": "latest",
    "model.decoder.history": "latest",
    "model.encoder.attention": "full",
    "model.decoder.attention": "full",
    "model.memory": "top",
    "model.init.kind": "xavier",
    "model.encoder.init.kind": None,
    "model.decoder.init.kind": None,
}
"""Settings that tell methods apart at any depth, each with the usual value, which labels leave out."""
_SHOWN = (*_KINDS, _DECODER, "growth", "start")
"""What a label has wherever methods differ in it; the kind of residual is always in it."""
_NO_METHOD = (
    "data.store",
    "training.seed",
    "training.threads",
    "training.log_every_updates",
    "training.diagnostics.",
    "training.tensorboard",
    "training.wandb",
    "training.mlflow",
)
"""Beginnings of the settings that make no other model, but for the seed, which is what error bars are over."""


@dataclass(frozen=True)
class Method:
    """Runs that differ in depth and seed alone.

    Attributes:
        label: the settings that tell it from the other methods.
        runs: its runs by place on the axis, the shallowest first.
    """

    label: str
    runs: Mapping[int, Sequence[ReportRun]]


def methods_of(runs: Sequence[ReportRun]) -> tuple[str, list[Method]] | None:
    """Return the label of the depth to draw against, and the methods in the order of their first runs.

    None where depths are equal. The depth is the encoder's where it varies, else the decoder's. A decoder that varies
    beside the encoder without following from it makes methods of its own.
    """
    settings = [settings_by_key(run.experiment.model_dump(mode="json")) for run in runs]
    depths = [(its[_ENCODER], its[_DECODER]) for its in settings]
    place = 0 if len({depth[0] for depth in depths}) > 1 else 1
    if len({depth[place] for depth in depths}) < 2:
        return None
    free = place == 0 and len(set(depths)) > len({encoder for encoder, _ in depths})
    label = "decoder layers" if place else "encoder layers"
    if all(encoder == decoder for encoder, decoder in depths):
        label = "layers of each stack"
    # (1) By kinds, which differ between methods whatever the depth.
    kinds = [_kinds(its, [_DECODER] if free else []) for its in settings]
    groups: dict[tuple[Any, ...], list[int]] = {}
    for number, its in enumerate(kinds):
        groups.setdefault(tuple(its.values()), []).append(number)
    # (2) By whatever else differs between runs of equal depth; what differs with the depth alone belongs to it.
    split: dict[tuple[Any, ...], list[int]] = {}
    marks: dict[int, dict[str, Any]] = {}
    for members in groups.values():
        keys = _other_keys([settings[n] for n in members], [depths[n] for n in members])
        for n in members:
            marks[n] = {**kinds[n], **{key: settings[n].get(key) for key in keys}}
            split.setdefault((*kinds[n].values(), *(repr(marks[n][key]) for key in keys)), []).append(n)
    labels = _labels([marks[members[0]] for members in split.values()])
    methods = []
    for name, members in zip(labels, split.values(), strict=True):
        by_depth: dict[int, list[ReportRun]] = {}
        for n in sorted(members, key=lambda n: depths[n][place]):
            by_depth.setdefault(depths[n][place], []).append(runs[n])
        methods.append(Method(name, by_depth))
    return label, methods


def _kinds(settings: Mapping[str, Any], more: Iterable[str]) -> dict[str, Any]:
    """Return what tells methods apart whatever the depth; growth and a trained model to start from count as such."""
    kinds = {key: settings.get(key) for key in (*_KINDS, *more)}
    grows = any(key.startswith("training.growth.") for key in settings)
    started = settings.get("training.start_from") is not None
    return {**kinds, "growth": _GROWN if grows else _SCRATCH, "start": "started from a model" if started else ""}


def _other_keys(settings: Sequence[Mapping[str, Any]], depths: Sequence[tuple[int, int]]) -> list[str]:
    """Return the keys in which runs of equal depth differ, besides those that make no other model."""
    by_depth: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for its, depth in zip(settings, depths, strict=True):
        by_depth.setdefault(depth, []).append(its)
    keys = dict.fromkeys(key for its in settings for key in its if not key.startswith(_NO_METHOD))
    return [
        key
        for key in keys
        if any(any(its.get(key) != alike[0].get(key) for its in alike) for alike in by_depth.values())
    ]


def _labels(marks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a name for each method: as few of the settings in which they differ as tell them all apart."""
    keys = list(dict.fromkeys(key for its in marks for key in its))
    differing = [key for key in keys if len({repr(its.get(key)) for its in marks}) > 1]
    chosen = ["model.residual", *(key for key in differing if key in _SHOWN and key != "model.residual")]
    for key in (key for key in differing if key not in _SHOWN):
        if len({tuple(repr(its.get(k)) for k in chosen) for its in marks}) == len(marks):
            break
        chosen.append(key)
    said = ([_said(its, key) for key in chosen] for its in marks)
    return [", ".join(dict.fromkeys(word for word in words if word)) for words in said]


def _said(marks: Mapping[str, Any], key: str) -> str:
    """Return a setting as part of a label: a kind by its value, another with the end of its key; "" for a usual one."""
    value = marks.get(key)
    if key not in marks or (key in _KINDS and value == _KINDS[key]):
        return ""
    if key == _DECODER:
        return f"decoder of {value} layers"
    if key not in _SHOWN:
        return f"{key.removeprefix('model.').removeprefix('training.')} {value}"
    for stack, other in (("encoder", "decoder"), ("decoder", "encoder")):
        if key.startswith(f"model.{stack}.") and marks.get(key.replace(stack, other)) != value:
            return f"{stack} {value}"
    return str(value)
