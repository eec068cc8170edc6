"""The verb tune, and the coordinate check behind `diagnose --coordinates`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ziggurat.cli.options import ConfigArgument, Json, Overrides
from ziggurat.cli.output import OUT, check_output, counted, file_named, print_json, refuse_overwriting, say, write_parts
from ziggurat.config import Experiment, load_experiment
from ziggurat.config.edit import edited
from ziggurat.config.load import change_section, parse_experiment
from ziggurat.config.recipes import load_named, read_named
from ziggurat.data.files import write_atomically
from ziggurat.errors import ConfigError, printable
from ziggurat.models.run_folder import CONFIG_FILE

if TYPE_CHECKING:
    from ziggurat.report.figure import Figure
    from ziggurat.trainability.tuning import Coordinates, Size, Tried

__all__ = ["check_coordinates", "tune"]

_BASE_WIDTH, _BASE_LAYERS = 64, 3
_FLAT = 2.5
"""Times by which changes may differ over all sizes where a rate is to carry over. With `model.transfer` logits fall by
up to 2 times where the width is fourfold: what they have of channels that agree by chance goes with 1/sqrt(width)."""
_MOVED = 3.0
"""Ratio of the best rates of two depths that is a doubt: one step of the sweep, twice the rate, is within its noise."""
_FEW_UPDATES = 100
_KEPT = ".trials.json"
"""Ending of the file of finished trainings, in place of that of `--out`."""


def tune(
    config: ConfigArgument,
    overrides: Overrides = None,
    out: Annotated[
        str | None,
        typer.Option(
            *OUT,
            help="YAML file to write: your configuration with the rate that was found. Finished trainings are kept "
            "beside it, and a call that was cut off goes on from there.",
        ),
    ] = None,
    width: Annotated[
        int | None, typer.Option("--width", min=2, help="Width of the small models. Default: about 64.")
    ] = None,
    depths: Annotated[
        str,
        typer.Option("--depths", help="Their layers, encoder-decoder; the first is the base, the others are a check."),
    ] = f"{_BASE_LAYERS}-{_BASE_LAYERS},{2 * _BASE_LAYERS}-{2 * _BASE_LAYERS}",
    rates: Annotated[
        str | None,
        typer.Option(
            "--rates",
            help="Peaks to try; while one at an end is best, the next is tried too, three at most. "
            "Default: 5e-4,1e-3,2e-3,4e-3.",
        ),
    ] = None,
    updates: Annotated[int, typer.Option("--updates", min=10, help="Updates of each training.")] = 200,
    seeds: Annotated[int, typer.Option("--seeds", min=1, max=100, help="Seeds over which losses are averaged.")] = 1,
    figure: Annotated[
        Path | None, typer.Option("--figure", metavar="FOLDER", help="Draw loss against rate into this folder.")
    ] = None,
    json: Json = False,
) -> None:
    """Find the learning rate of a large model on small ones.

    The small models are trained for some updates with several rates. With `model.transfer` (CompleteP) the rate that is
    best for them is right for the large one, which is never trained here.

    Example: `ziggurat tune my.yaml --out tuned.yaml`
    """
    named, given = read_named(config), overrides or []
    experiment = parse_experiment(named.text, named.label, given)
    kept_in: Path | None = None
    if out is not None:
        out = file_named(out)
        # Beside a pipe or device is no place for a file.
        if not Path(out).exists() or Path(out).is_file():
            kept_in = Path(out).with_suffix(_KEPT)
        for written in (out, *([] if kept_in is None else [str(kept_in)])):
            refuse_overwriting(written, config)
            check_output(written)
    from ziggurat.trainability.kept import KeptTrials
    from ziggurat.trainability.trial import open_data
    from ziggurat.trainability.tuning import RATES, Size, best, resized, sweep, with_base

    model = experiment.model
    across = width or _base_width(experiment)
    sizes = [Size(across, *layers) for layers in _depths(depths)]
    for size in sizes:
        resized(experiment.model, size)  # what cannot be built is refused before anything takes time
    based = with_base(experiment, sizes[0])
    tried_rates = RATES if rates is None else _numbers(rates)
    kept = KeptTrials(kept_in)
    with open_data(experiment) as (store, data):
        say(f"tuning on {data}, {updates} updates for each rate")
        if kept_in is not None:
            say(f"finished trainings are kept in {kept_in}: cut off, the same call goes on from there")
        tried = sweep(
            based,
            store,
            sizes,
            rates=tried_rates,
            updates=updates,
            seeds=range(1, seeds + 1),
            kept=kept,
            told=_say_tried,
        )
    if kept.found:
        say(f"{counted(kept.found, 'training')} taken over from {kept_in}")
    at_base = [one for one in tried if one.size == sizes[0]]
    if not math.isfinite(best(at_base).loss):
        raise ConfigError(
            f"every training at {sizes[0]} diverged, down to a rate of {min(one.rate for one in at_base):g}; try lower "
            "`--rates`, or see what `ziggurat inspect` says of the configuration"
        )
    rate = best(at_base).rate
    training = change_section(based.training, {"schedule": {"peak": rate}}, "training")
    if out is not None:
        base = {f"model.transfer.{key}": value for key, value in sizes[0]._asdict().items()}
        changes = {**base, "training.schedule.peak": rate}
        tuned = based.model_copy(update={"training": training})
        write_parts(out, [edited(named, given, changes, tuned).encode()])
    if figure is not None:
        from ziggurat.report.figure import numbers
        from ziggurat.report.paper import save

        figure.mkdir(parents=True, exist_ok=True)
        drawn = _figure(tried)
        save(drawn, figure)
        write_atomically(figure / f"{drawn.key}.csv", numbers(drawn).encode())
    if json:
        losses = [{**one.size._asdict(), "rate": one.rate, "loss": one.loss} for one in tried]
        print_json({"rate": rate, "base": sizes[0]._asdict(), "tried": losses})
        return
    print(_table(tried))
    print(f"\nbest at {sizes[0]}: `training.schedule.peak: {rate:g}`")
    if rate in (at_base[0].rate, at_base[-1].rate):
        print(
            "WARNING: that is an end of the rates that were tried, so a better one may lie beyond it: try other "
            "`--rates` or more `--updates`"
        )
    for size in sizes[1:]:
        print(_beside(best([one for one in tried if one.size == size]), rate))
    if updates < _FEW_UPDATES:
        print(f"{updates} updates are few, so this says little about long trainings (default: 200)")
    target = Size(model.d_model, model.encoder.layers, model.decoder.layers)
    print(f"{out}: the configuration of {target} with both" if out else "`--out FILE` writes the configuration")


def _base_width(experiment: Experiment) -> int:
    """Return the width of small models: about 64, whole heads."""
    head = experiment.model.d_model // experiment.model.heads
    return min(experiment.model.d_model, -(-_BASE_WIDTH // head) * head)


def _depths(text: str) -> list[tuple[int, int]]:
    found = []
    for part in text.split(","):
        if (match := re.fullmatch(r"([1-9]\d{0,3})-([1-9]\d{0,3})", part.strip())) is None:
            raise ConfigError(f"`--depths {printable(text)}`: write layers of encoder and decoder, such as `3-3,6-6`")
        found.append((int(match[1]), int(match[2])))
    return list(dict.fromkeys(found))


def _numbers(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < rate < 1 for rate in found):
        raise ConfigError(f"`--rates {printable(text)}`: write numbers between 0 and 1, such as `1e-3,2e-3`")
    return sorted(set(found))


def _say_tried(tried: Tried) -> None:
    again = ", trained by an earlier call" if tried.kept else ""
    say(f"{tried.size}: rate {tried.rate:g}, loss {tried.loss:.4f}{again}")


def _by_size(tried: Sequence[Tried]) -> dict[Size, dict[float, float]]:
    found: dict[Size, dict[float, float]] = {}
    for one in tried:
        found.setdefault(one.size, {})[one.rate] = one.loss
    return found


def _beside(tried: Tried, rate: float) -> str:
    """Say whether the best that was tried at another size agrees with the base's rate."""
    size, other = tried.size, tried.rate
    if not math.isfinite(tried.loss):
        return f"WARNING: every training at {size} diverged: with `model.transfer` this rate ought to hold there"
    apart = max(other, rate) / min(other, rate)
    if apart < 1.5:
        return f"the same at {size}: with `model.transfer` it is to hold at any size"
    if apart < _MOVED:
        return f"at {size} {other:g}, one step of the sweep away; means over several `--seeds` tell them apart"
    return f"WARNING: at {size} {other:g} was best: try more `--updates` or `--seeds` before you trust either"


def _table(tried: Sequence[Tried]) -> str:
    """Return losses, a row for each size, the lowest of a row marked."""
    rates = sorted({one.rate for one in tried})
    lines = [f"{'loss after rate':<24}" + "".join(f"{rate:>11g}" for rate in rates)]
    for size, losses in _by_size(tried).items():
        least = min(filter(math.isfinite, losses.values()), default=None)
        cells = [f"{losses[r]:.4f}{'*' if losses[r] == least else ' '}" if r in losses else "" for r in rates]
        lines.append(f"{size!s:<24}" + "".join(f"{cell:>11}" for cell in cells))
    return "\n".join(lines)


def _figure(tried: Sequence[Tried]) -> Figure:
    from ziggurat.report.figure import Figure, Panel, Series, in_words
    from ziggurat.report.panels import finite

    lines = [
        Series(str(size), tuple(sorted(losses)), finite(losses[rate] for rate in sorted(losses)), number)
        for number, (size, losses) in enumerate(_by_size(tried).items())
    ]
    panels = (Panel("loss by learning rate", "peak learning rate", "nats per token", tuple(lines), log_x=True),)
    caption = "Loss of small models after a few updates, without dropout, by the highest learning rate."
    return Figure("loss-by-rate", "Tuning", "Loss by learning rate", caption, in_words(panels), panels)


def check_coordinates(config: str, device: str | None = None, *, json: bool) -> None:
    """Print by how much the first ten updates change models of several widths and depths, and whether that is flat.

    `device` replaces that of the configuration.
    """
    saved = Path(config) / CONFIG_FILE  # of a run or model
    experiment = load_experiment(saved) if saved.is_file() else load_named(config)
    if device is not None:
        experiment = change_section(experiment, {"training": {"device": device}}, "")
    from ziggurat.trainability.trial import open_data
    from ziggurat.trainability.tuning import Size, coordinates, resized, spread

    base = experiment.model.transfer
    smallest = (
        Size(_base_width(experiment), _BASE_LAYERS, _BASE_LAYERS)
        if base is None
        else Size(base.width, base.encoder_layers, base.decoder_layers)
    )
    axes = {
        "width": [smallest._replace(width=smallest.width * times) for times in (1, 2, 4)],
        "depth": [Size(smallest.width, smallest[1] * times, smallest[2] * times) for times in (1, 2, 4, 8)],
    }
    for size in {*axes["width"], *axes["depth"]}:
        resized(experiment.model, size)
    found: dict[Size, Coordinates] = {}
    with open_data(experiment) as (store, data):
        say(f"coordinate check on {data}, 10 updates at each size")
        for size in dict.fromkeys((*axes["width"], *axes["depth"])):
            found[size] = coordinates(experiment, store, size)
    names = tuple(found[smallest].changes)
    spreads = {axis: {n: spread([found[s] for s in sizes], n) for n in names} for axis, sizes in axes.items()}
    flat = all(value <= _FLAT for of_axis in spreads.values() for value in of_axis.values())
    if json:
        sizes = [{**s._asdict(), "states": one.states, "changes": one.changes} for s, one in found.items()]
        print_json({"sizes": sizes, "spread": spreads, "flat": flat})
        return
    print(f"{'change by 10 updates':<24}" + "".join(f"{name:>11}" for name in names))
    for size, one in found.items():
        print(f"{size!s:<24}" + "".join(f"{one.changes[name][-1]:>11.4f}" for name in names))
    for axis, of_axis in spreads.items():
        print(f"{'largest / smallest, ' + axis:<24}" + "".join(f"{of_axis[name]:>11.2f}" for name in names))
    print(_said(flat, experiment, smallest))


def _said(flat: bool, experiment: Experiment, smallest: Size) -> str:
    from ziggurat.trainability.tuning import with_base

    if flat:
        return (
            f"flat: all within {_FLAT:g} times, so a learning rate tuned on a small model should hold for a large one"
        )
    if experiment.model.transfer is not None:
        return f"not flat: beyond {_FLAT:g} times although `model.transfer` is set; do not take over a rate from afar"
    try:
        with_base(experiment, smallest)
    except ConfigError as error:
        return f"not flat: beyond {_FLAT:g} times, so tune each size by itself; a base cannot be had: {error}"
    return f"not flat: beyond {_FLAT:g} times; `model.transfer` (`ziggurat tune`) makes a small model's rate hold"
