"""Healthy bands of measures, and a run's warnings: when a measure leaves its band, and when it has recovered.

A measure has recovered after CALM consecutive healthy readings, so that one at the edge of its band does not warn
repeatedly (docs/report.md).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ziggurat.config import Experiment
from ziggurat.config.freezing import Frozen
from ziggurat.system.errors import DataError, other_format
from ziggurat.system.small_files import built, read_json_lines
from ziggurat.train.records import Record

# The choice of each band, and figures of healthy and stuck runs, are in docs/report.md and experiments/health-bands.
FADING = 1e-3
"""FADING is the lowest healthy gradient norm of a stack's first layer, relative to its last layer."""
FLAT_R = 0.02
"""FLAT_R is the lowest healthy r of the encoder, unless it rises."""
SOURCE = 1e-4
"""SOURCE is the smallest healthy rise of the loss, in nats per token, when sources are exchanged; judged after
`LATE_WARMUPS` warm-ups."""
LATE_WARMUPS = 2
VARIANCE, VARIANCE_GROWTH = 1e6, 100.0
"""VARIANCE is the highest healthy Var(r) of a sub-layer, and VARIANCE_GROWTH its largest growth between records."""
LEAST_UPDATE, MOST_UPDATE = 0.01, 0.1
"""LEAST_UPDATE is the smallest healthy change of a layer's weights in an update, relative to the layer that changes
most; MOST_UPDATE is the largest, relative to the weights."""
ENTROPY = 0.05
"""ENTROPY is the lowest healthy attention entropy of a layer, in nats, mean over heads and queries."""

_METHODS = {
    "pre": "`model.residual: pre`",
    "admin": "`model.residual: admin`",
    "deepnorm": "`model.residual: deepnorm`",
    "depth_scaled": "`model.init.kind: depth_scaled`",
    "dlcl": "`model.encoder.history: dlcl`",
}
"""_METHODS maps a method for deep models to the setting that advice names."""


_OTHER_RESIDUAL = ", or use a kind that normalises or scales branches (`model.residual`)"


def in_use(experiment: Experiment) -> frozenset[str]:
    """Return the settings in use by `experiment` that advice could name, so that it does not.

    The key that sets the rate is included; advice about the rate and its warm-up names that key.
    """
    training = experiment.training
    of_others = experiment.model.family != "transformer"  # settings that RNMT+ does not have
    settings = {
        "transparent": of_others,
        "qk_norm": of_others or experiment.model.attention.qk_norm != "none",
        "clip_norm": training.clip_norm is not None,
        "fp32": training.precision == "fp32",
    }
    rate = training.schedule.rate_key
    return frozenset((*experiment.model.methods(), rate, *(name for name, has in settings.items() if has)))


def _advice(used: Collection[str], first: str, *others: tuple[str, str]) -> str:
    """Return `first` and the further options (name of the setting, what to do) that are not in use."""
    ways = [first, *(way for name, way in others if name not in used)]
    return ", or ".join(ways)


def _slower(used: Collection[str]) -> str:
    """Return advice for a run whose updates are too large."""
    rate = next((key for key in ("factor", "base") if key in used), "peak")
    return f"lower `training.schedule.{rate}` or lengthen `training.schedule.warmup_updates`"


def _deeper(used: Collection[str]) -> str:
    """Return advice for a stack whose lower layers do not learn; RNMT+ supports none of the methods."""
    if "rnmt" in used:
        return "use fewer layers"
    methods = ", ".join(setting for name, setting in _METHODS.items() if name not in used)
    return f"use methods for deep models ({methods}) or fewer layers"


@dataclass(frozen=True)
class HealthReading:
    """A measure with its band.

    Attributes:
        measure: measure and place, such as `gradient_ratio.decoder`.
        value: the number; None if it was not finite.
        low, high: the band; None: no limit on that side.
        message: the number, the band and what to do; healthy readings also have one.
        healthy: True if the number is in its band.
    """

    measure: str
    value: float | None
    low: float | None
    high: float | None
    message: str
    healthy: bool


def readings(
    record: Record,
    before: Sequence[Record],
    *,
    warmup_updates: int,
    frozen: Sequence[str] = (),
    used: Collection[str] = (),
) -> list[HealthReading]:
    """Return the readings of a record; measures that it lacks are not judged.

    Args:
        record: the newest record.
        before: the records before it, oldest first.
        warmup_updates: `training.schedule.warmup_updates`; some bands hold only after it.
        frozen: `training.freeze`; layers that it names have no gradient, which counts as 0.
        used: settings that no message recommends, since the run already uses them (`in_use`).
    """
    late = [r for r in (*before, record) if r.update >= LATE_WARMUPS * max(1, warmup_updates)]
    found = [*_finiteness(record, used), *_gradient_ratio(record, Frozen.parse(frozen), used)]
    for check in (_flat_r, _variance, _update_ratio, _entropy):
        found += check(record, before, used)
    return found + list(_source(late, used))


def _reading(
    measure: str, value: float, *, low: float | None = None, high: float | None = None, said: str
) -> HealthReading:
    healthy = (low is None or value >= low) and (high is None or value <= high)
    return HealthReading(measure, value, low, high, said, healthy)


def _finiteness(record: Record, used: Collection[str]) -> Iterator[HealthReading]:
    """Judge whether loss and gradients are finite; other measures may be undefined at some places."""
    for measure in ("nll", "gradient_norm"):
        if measure in record.values:
            where = [place for place, value in _leaves(record.values[measure]) if value is None]
            said = f"{measure} is not finite"
            said += f" ({', '.join(p for p in where if p)})" if any(where) else ""
            ways = (("clip_norm", "set `training.clip_norm`"), ("fp32", "train in `training.precision: fp32`"))
            said += f": {_advice(used, _slower(used), *ways)}"
            yield HealthReading(f"finite.{measure}", None if where else 0.0, None, None, said, not where)


def _gradient_ratio(record: Record, frozen: Frozen, used: Collection[str]) -> Iterator[HealthReading]:
    """Judge whether the gradient reaches the lowest layer of each trained stack."""
    for stack in ("encoder", "decoder"):
        all_norms = record.values.get("gradient_norm", {}).get(stack, [])
        norms = [norm for number, norm in enumerate(all_norms, start=1) if not frozen.has(stack, number)]
        if len(norms) > 1 and norms[0] is not None and norms[-1]:
            ratio = norms[0] / norms[-1]
            said = (
                f"the gradient of the first {stack} layer is {ratio:.1e} of the last one's (healthy: at least "
                f"{FADING:g}): the lower layers hardly learn; {_deeper(used)}"
            )
            yield _reading(f"gradient_ratio.{stack}", ratio, low=FADING, said=said)


def _flat_r(record: Record, before: Sequence[Record], used: Collection[str]) -> Iterator[HealthReading]:
    """Judge whether r of the encoder (Bapna et al. 2018, section 4) is small in three records and does not rise."""
    r = record.values.get("r", {}).get("encoder")
    if r is not None:
        earlier = [b.values.get("r", {}).get("encoder") for b in before[-2:]]
        # A small r that has doubled within two records is rising.
        flat = len(earlier) == 2 and all(e is not None and e < FLAT_R and r < 2 * e for e in earlier)
        ways = _advice(used, _deeper(used), ("transparent", "`model.memory: transparent`"))
        said = (
            f"r of the encoder is {r:.1e} and does not rise (healthy: at least {FLAT_R:g}): the output of its first "
            f"layer gets hardly any of the gradient that its last one gets; {ways}"
        )
        yield HealthReading("r.encoder", r, FLAT_R, None, said, r >= FLAT_R or not flat)


def _variance(record: Record, before: Sequence[Record], used: Collection[str]) -> Iterator[HealthReading]:
    """Judge whether the stream explodes: by its size, or by its growth since the last record that has it."""
    earlier: dict[str, list[float | None]] = next(
        (b.values["variance"] for b in reversed(before) if "variance" in b.values), {}
    )
    for place, values in record.values.get("variance", {}).items():
        finite = [v for v in values if v is not None]
        if finite:
            largest = max(finite)
            was = max((v for v in earlier.get(place, []) if v is not None), default=math.inf)
            # A variance below 1 counts as 1, because growth from almost 0 is not an explosion.
            high = min(VARIANCE, VARIANCE_GROWTH * max(1.0, was))
            said = (
                f"the variance of the stream at {place} is {largest:.1e} (healthy: at most {high:.1e}): it explodes; "
                f"{_slower(used)}{'' if 'rnmt' in used else _OTHER_RESIDUAL}"
            )
            yield _reading(f"variance.{place}", largest, high=high, said=said)


def _update_ratio(record: Record, before: Sequence[Record], used: Collection[str]) -> Iterator[HealthReading]:
    """Judge whether a layer's weights change too much, or much less than those of the layer that changes most."""
    ratios = record.values.get("update_ratio", {})
    layers = [v for stack in ("encoder", "decoder") for v in ratios.get(stack, []) if v is not None]
    if not layers:
        return
    said = (
        f"an update changes the weights of a layer by {max(layers):.1e} of their size (healthy: at most "
        f"{MOST_UPDATE:g}): {_slower(used)}"
    )
    yield _reading("update_ratio.largest", max(layers), high=MOST_UPDATE, said=said)
    for stack in ("encoder", "decoder"):
        values = [v for v in ratios.get(stack, []) if v is not None]
        if values and max(layers) > 0:
            share = min(values) / max(layers)
            layer = ratios[stack].index(min(values)) + 1
            said = (
                f"updates change {stack} layer {layer} by {share:.1e} of what they change the layer that moves most "
                f"(healthy: at least {LEAST_UPDATE:g}): it hardly learns; {_deeper(used)}"
            )
            yield _reading(f"update_ratio.{stack}", share, low=LEAST_UPDATE, said=said)


def _entropy(record: Record, before: Sequence[Record], used: Collection[str]) -> Iterator[HealthReading]:
    """Judge whether attention has collapsed to single positions (Zhai et al. 2023)."""
    for place, values in record.values.get("attention_entropy", {}).items():
        finite = [v for v in values if v is not None]
        if finite:
            least = min(finite)
            said = (
                f"the attention entropy at {place}, layer {values.index(least) + 1}, is {least:.1e} nats (healthy: at "
                f"least {ENTROPY:g}): every head looks at one position only; "
                f"{_advice(used, _slower(used), ('qk_norm', 'set `model.attention.qk_norm`'))}"
            )
            yield _reading(f"attention_entropy.{place}", least, low=ENTROPY, said=said)


def _source(late: Sequence[Record], used: Collection[str]) -> Iterator[HealthReading]:
    """Judge, by three consecutive records after the warm-up, whether the model uses its source."""
    costs = [r.values.get("source_dependence") for r in late[-3:]]
    if costs and costs[-1] is not None:
        said = (
            f"the loss is {costs[-1]:+.1e} nats per token higher with other sentences' sources (healthy by now: at "
            f"least {SOURCE:g}): the decoder ignores the encoder; check that source and target are aligned, then "
            f"{_deeper(used)}"
        )
        ignored = len(costs) == 3 and all(c is not None and c < SOURCE for c in costs)
        yield HealthReading("source_dependence", costs[-1], SOURCE, None, said, not ignored)


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, float | None]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(part, key)
    elif isinstance(value, list):
        for number, part in enumerate(value, start=1):
            yield from _leaves(part, f"{place} layer {number}")
    else:
        yield place, value


WARNINGS_FILE = Path("diagnostics") / "warnings.jsonl"
"""WARNINGS_FILE is the file in a run's folder with its warnings, one JSON object per line."""

_WARNING_FORMAT = 1
"""_WARNING_FORMAT is the format version of these lines."""

CALM = 3
"""CALM is the number of consecutive healthy readings after which a measure has recovered."""


@dataclass(frozen=True)
class RunWarning:
    """One line of WARNINGS_FILE.

    Attributes:
        kind: `warning`: the measure left its band; `recovered`: it is back.
        update, time: update and time (seconds since 1970) of the record that showed it.
        measure, value, low, high, message: as in HealthReading.
    """

    kind: Literal["warning", "recovered"]
    update: int
    time: float
    measure: str
    value: float | None
    low: float | None
    high: float | None
    message: str

    def line(self) -> str:
        """Return the warning as one line of the file, including the line feed."""
        return json.dumps({"format": _WARNING_FORMAT, **asdict(self)}, allow_nan=False) + "\n"


class Watch:
    """State of a run's warnings, updated by its records in order.

    Args:
        warmup_updates: `training.schedule.warmup_updates`.
        frozen: `training.freeze`.
        used: see `readings`.
    """

    def __init__(self, warmup_updates: int, frozen: Sequence[str] = (), used: Collection[str] = ()) -> None:
        self._judge = partial(readings, warmup_updates=warmup_updates, frozen=frozen, used=used)
        self._seen: list[Record] = []
        self._calm: dict[str, int] = {}
        self.standing: dict[str, HealthReading] = {}
        """Warnings from which the run has not recovered, by measure, newest last."""

    def see(self, record: Record) -> list[RunWarning]:
        """Return the warnings of this record, and the recoveries that it completes."""
        found = []
        for reading in self._judge(record, self._seen):
            measure = reading.measure
            # The count of healthy readings starts again at every unhealthy one.
            if not reading.healthy or self._still_above(reading):
                self._calm[measure] = 0
                if measure not in self.standing:
                    found.append(_warned("warning", record, reading, reading.message))
                    self.standing[measure] = reading
            elif measure in self.standing:
                self._calm[measure] += 1
                if self._calm[measure] == CALM:
                    del self.standing[measure]
                    found.append(_warned("recovered", record, reading, f"{measure} is back in its healthy band"))
        self._seen.append(record)
        return found

    def _still_above(self, reading: HealthReading) -> bool:
        """Return whether a value is still above the band it left; a growth band has moved up with the value."""
        left = self.standing.get(reading.measure)
        if left is None or left.high is None or reading.value is None:
            return False
        return reading.value > left.high


def _warned(kind: Literal["warning", "recovered"], record: Record, reading: HealthReading, message: str) -> RunWarning:
    where = (reading.measure, reading.value, reading.low, reading.high)
    return RunWarning(kind, record.update, record.time, *where, message)


def read_warnings(run: Path) -> list[RunWarning]:
    """Return the warnings of a run, oldest first; none if there is no file.

    A last line truncated by a kill is ignored. Raises DataError, with file and line, for a damaged line, or one of
    another format.
    """
    return list(read_json_lines(run / WARNINGS_FILE, _line, "a warning of a run"))


def _line(document: Any, place: str) -> RunWarning:
    version = document.pop("format")
    if version != _WARNING_FORMAT:
        raise DataError(other_format(place, version, _WARNING_FORMAT, "remove the file"))
    return built(RunWarning, document)
