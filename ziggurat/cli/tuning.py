"""The verb that finds the learning rate of a large model on small ones (tune), and `diagnose --coordinates`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ziggurat.cli.arguments import ConfigArgument, Overrides
from ziggurat.cli.output import (
    OUT,
    Json,
    check_output,
    counted,
    figure_files,
    file_named,
    print_json,
    refuse_overwriting,
    say,
    write_parts,
)
from ziggurat.config import Experiment, load_experiment
from ziggurat.config.load import change_section, dump, parse_experiment
from ziggurat.config.recipes import load_named, read_named
from ziggurat.config.train import BatchConfig
from ziggurat.model.run_folder import CONFIG_FILE
from ziggurat.system.errors import ConfigError, printable

if TYPE_CHECKING:
    from ziggurat.inspect.report.figure import Figure
    from ziggurat.inspect.tuning import Coordinates, Size, Tried


_MOVED = 3.0
"""_MOVED is the ratio of two depths' best rates that raises doubt: one step of the sweep, a factor of 2, is noise."""
_FAR = 4
"""_FAR is the factor by which batches may be larger or smaller than those tried."""
_LEAN = (
    "short trials favour high rates: on Multi30k at 6-6 layers 200 updates preferred 0.008, and 600 preferred "
    "0.002, by 0.27 nats; for long training use more `--updates`, or try a half and a quarter of this rate too"
)
"""_LEAN is a warning based on a measurement in experiments/depth-benchmark."""
_KEPT = ".trials.json"
"""_KEPT is the suffix of the file that keeps finished trials, replacing that of `--out`."""


def tune(
    config: ConfigArgument,
    overrides: Overrides = None,
    out: Annotated[
        str | None,
        typer.Option(
            *OUT,
            help="YAML file to write: the whole configuration with the rate found. Finished trials are "
            "kept next to it; an interrupted call resumes from them.",
        ),
    ] = None,
    width: Annotated[
        int | None, typer.Option("--width", min=2, help="Width of the small models. Default: about 64.")
    ] = None,
    depths: Annotated[
        str,
        typer.Option("--depths", help="Their layers, encoder-decoder; the first is the base, the others a check."),
    ] = "3-3,6-6",
    rates: Annotated[
        str | None,
        typer.Option(
            "--rates",
            help="Peaks to try; if the best is at an end of the range, up to three more beyond it are tried. "
            "Default: 5e-4,1e-3,2e-3,4e-3.",
        ),
    ] = None,
    updates: Annotated[
        int,
        typer.Option("--updates", min=10, help="Updates per trial; short ones favour high rates."),
    ] = 200,
    tokens: Annotated[
        int,
        typer.Option(
            "--tokens",
            min=1,
            help="Tokens per update instead of `training.batch`, padding included; more if the longest pair has "
            "more. A rate suits one batch size.",
        ),
    ] = 512,
    seeds: Annotated[int, typer.Option("--seeds", min=1, max=100, help="Seeds over which losses are averaged.")] = 1,
    figure: Annotated[
        Path | None, typer.Option("--figure", metavar="FOLDER", help="Draw loss against rate into this folder.")
    ] = None,
    json: Json = False,
) -> None:
    """Find the learning rate of a large model on small ones.

    The small models are trained for some updates with several rates. With `model.transfer` (CompleteP), their best rate
    also suits the large model, which is never trained here.

    Example: `ziggurat tune my.yaml --out tuned.yaml`
    """
    named, given = read_named(config), overrides or []
    experiment = parse_experiment(named.text, named.label, given)
    out = None if out is None else file_named(out)
    kept_in = None if out is None else _kept_file(out, config)
    from ziggurat.inspect.trial import KeptTrials, TrialOptions, open_data, trial_experiment
    from ziggurat.inspect.tuning import RATES, Size, base_width, best, resized, sweep, with_base

    model = experiment.model
    across = width or base_width(model)
    sizes = [Size(across, *layers) for layers in _depths(depths)]
    for size in sizes:
        resized(model, size)  # refuse what cannot be built before spending time
    based = with_base(experiment, sizes[0])
    tried_rates = RATES if rates is None else _numbers(rates)
    kept = KeptTrials(kept_in)
    if figure is not None:
        import_module("ziggurat.inspect.report.drawing")  # fail now if its library is missing, or the folder is a file
        figure.mkdir(parents=True, exist_ok=True)
    with open_data(experiment) as (store, data):
        batch = trial_experiment(based, store, TrialOptions(updates, tokens)).training.batch.max_tokens
        say(f"tuning on {data}, {updates} updates of {batch:,} tokens per rate")
        if kept_in is not None:
            say(f"finished trials are kept in {kept_in}; if interrupted, the same command resumes from there")
        tried = sweep(
            based,
            store,
            sizes,
            rates=tried_rates,
            updates=updates,
            tokens=tokens,
            seeds=range(1, seeds + 1),
            kept=kept,
            told=_say_tried,
        )
    if kept.found:
        say(f"{counted(kept.found, 'trial')} reused from {kept_in}")
    at_base = [one for one in tried if one.size == sizes[0]]
    if not math.isfinite(best(at_base).loss):
        raise ConfigError(
            f"every trial at {sizes[0]} diverged, even at a rate of {min(one.rate for one in at_base):g}; try lower "
            "`--rates`, or see what `ziggurat inspect` reports on the configuration"
        )
    rate = best(at_base).rate
    training = change_section(based.training, {"schedule": {"peak": rate}}, "training")
    if out is not None:
        tuned = based.model_copy(update={"training": training})
        write_parts(out, [dump(tuned).encode()])
    if json:
        losses = [{**one.size._asdict(), "rate": one.rate, "loss": one.loss} for one in tried]
        tried_with = {"updates": updates, "tokens": batch}
        print_json({"rate": rate, "base": sizes[0]._asdict(), **tried_with, "tried": losses})
    else:
        _print_found(based, sizes, tried, batch)
        target = Size(model.d_model, model.encoder.layers, model.decoder.layers)
        print(f"{out}: the configuration of {target} with both" if out else "`--out FILE` writes the configuration")
    if figure is not None:
        figure_files([_figure(tried)], figure)


def _kept_file(out: str, config: str) -> Path | None:
    """Return the file for finished trials next to `out`, None if `out` is a pipe or device.

    Raises ConfigError if either cannot be written, or is the configuration itself.
    """
    kept_in = Path(out).with_suffix(_KEPT) if not Path(out).exists() or Path(out).is_file() else None
    for written in (out, *([] if kept_in is None else [str(kept_in)])):
        refuse_overwriting(written, config)
        check_output(written)
    return kept_in


def _print_found(experiment: Experiment, sizes: Sequence[Size], tried: Sequence[Tried], tokens: int) -> None:
    """Print all losses, the best base with its rate, and the reasons to doubt them; `tokens` are those of an update."""
    from ziggurat.inspect.tuning import best

    at_base = [one for one in tried if one.size == sizes[0]]
    rate = best(at_base).rate
    print(_table(tried))
    print(f"\nbest at {sizes[0]}; set")
    print("".join(f"    model.transfer.{key}={value}\n" for key, value in sizes[0]._asdict().items()), end="")
    print(f"    training.schedule.peak={rate:g}")
    if rate in (at_base[0].rate, at_base[-1].rate):
        print(
            "WARNING: that is at the end of the rates tried, so a better one may lie beyond it: try other "
            "`--rates` or more `--updates`"
        )
    for size in sizes[1:]:
        print(_beside(best([one for one in tried if one.size == size]), rate))
    if (doubt := _other_batch(experiment.training.batch, tokens)) is not None:
        print(doubt)
    print(_LEAN)


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


def _other_batch(batch: BatchConfig, tried: int) -> str | None:
    """Return a warning if a configuration's batches are far from the `tried` tokens used for tuning."""
    if batch.fit:
        has = "`training.batch.fit` sizes it by memory"
    else:
        tokens = batch.max_tokens * batch.accumulate
        if max(tokens, tried) < _FAR * min(tokens, tried):
            return None
        has = f"`training.batch` has {tokens:,} (`max_tokens` times `accumulate`)"
    return (
        f"WARNING: an update had {tried:,} tokens here, but {has}: larger batches usually tolerate higher rates; "
        "`--tokens` tries others that fit into memory"
    )


def _by_size(tried: Sequence[Tried]) -> dict[Size, dict[float, float]]:
    found: dict[Size, dict[float, float]] = {}
    for one in tried:
        found.setdefault(one.size, {})[one.rate] = one.loss
    return found


def _beside(tried: Tried, rate: float) -> str:
    """Return a line on whether the best rate at another size agrees with the base's."""
    size, other = tried.size, tried.rate
    if not math.isfinite(tried.loss):
        return f"WARNING: every trial at {size} diverged: with `model.transfer` this rate should hold there"
    apart = max(other, rate) / min(other, rate)
    if apart < 1.5:
        return f"the same at {size}: with `model.transfer` it should hold at any size"
    if apart < _MOVED:
        return f"at {size} {other:g}, one step of the sweep away; averaging over several `--seeds` tells them apart"
    return f"WARNING: at {size} {other:g} was best: try more `--updates` or `--seeds` before trusting either"


def _table(tried: Sequence[Tried]) -> str:
    rates = sorted({one.rate for one in tried})
    lines = [f"{'loss after rate':<24}" + "".join(f"{rate:>11g}" for rate in rates)]
    for size, losses in _by_size(tried).items():
        least = min(filter(math.isfinite, losses.values()), default=None)
        cells = [f"{losses[r]:.4f}{'*' if losses[r] == least else ' '}" if r in losses else "" for r in rates]
        lines.append(f"{size!s:<24}" + "".join(f"{cell:>11}" for cell in cells))
    return "\n".join(lines)


def _figure(tried: Sequence[Tried]) -> Figure:
    from ziggurat.inspect.report.figure import Figure, Panel, Series, in_words
    from ziggurat.inspect.report.panels import finite

    lines = [
        Series(str(size), tuple(sorted(losses)), finite(losses[rate] for rate in sorted(losses)), number)
        for number, (size, losses) in enumerate(_by_size(tried).items())
    ]
    panels = (Panel("loss by learning rate", "peak learning rate", "nats per token", tuple(lines), log_x=True),)
    caption = "Loss of small models after a few updates, without dropout, by peak learning rate."
    return Figure("loss-by-rate", "Tuning", "Loss by learning rate", caption, in_words(panels), panels)


_LAYERS = 3
"""_LAYERS is the number of layers of the smallest model when no base is set."""
_FLAT = 2.5
"""_FLAT is the factor by which changes may differ over all sizes if a rate should carry over. With `model.transfer`
logits fall by up to a factor of 2 when the width quadruples, because the part due to chance agreement between
channels scales as 1/sqrt(width)."""


def check_coordinates(config: str, device: str | None = None, *, json: bool) -> None:
    """Print how much the first ten updates change models of several widths and depths, and whether that is flat.

    `device` overrides the configuration's.
    """
    saved = Path(config) / CONFIG_FILE  # if it is a run or model
    experiment = load_experiment(saved) if saved.is_file() else load_named(config)
    if device is not None:
        experiment = change_section(experiment, {"training": {"device": device}}, "")
    from ziggurat.inspect.trial import open_data
    from ziggurat.inspect.tuning import Size, base_width, coordinates, resized, spread

    base = experiment.model.transfer
    smallest = (
        Size(base_width(experiment.model), _LAYERS, _LAYERS)
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
    from ziggurat.inspect.tuning import with_base

    if flat:
        return f"flat: all within a factor of {_FLAT:g}, so a rate tuned on a small model should hold for a large one"
    if experiment.model.transfer is not None:
        return f"not flat: beyond a factor of {_FLAT:g} despite `model.transfer`; do not reuse a rate from another size"
    try:
        with_base(experiment, smallest)
    except ConfigError as error:
        return f"not flat: beyond a factor of {_FLAT:g}, so tune each size by itself; no base is possible: {error}"
    return f"not flat: beyond a factor of {_FLAT:g}; `model.transfer` (`ziggurat tune`) makes a small model's rate hold"
