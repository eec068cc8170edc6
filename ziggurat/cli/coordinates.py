"""The coordinate check behind `diagnose --coordinates`: its sizes, and its result as text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ziggurat.cli.output import print_json, say
from ziggurat.config import Experiment, load_experiment
from ziggurat.config.load import change_section
from ziggurat.config.recipes import load_named
from ziggurat.model.run_folder import CONFIG_FILE
from ziggurat.system.errors import ConfigError

if TYPE_CHECKING:
    from ziggurat.inspect.tuning import Coordinates, Size

_LAYERS = 3
"""Of the smallest model, where no base is given."""
_FLAT = 2.5
"""Times by which changes may differ over all sizes where a rate is to carry over. With `model.transfer` logits fall by
up to 2 times where the width is fourfold: the part that comes from chance agreement between channels scales as
1/sqrt(width)."""


def check_coordinates(config: str, device: str | None = None, *, json: bool) -> None:
    """Print by how much the first ten updates change models of several widths and depths, and whether that is flat.

    `device` replaces that of the configuration.
    """
    saved = Path(config) / CONFIG_FILE  # of a run or model
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
