"""The depth check on the command line: its progress, its text, and the configuration that it suggests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ziggurat.cli.output import console
from ziggurat.config import Experiment, dump
from ziggurat.data.files import write_atomically
from ziggurat.duration import duration

if TYPE_CHECKING:
    from ziggurat.depth.check import DepthCheck
    from ziggurat.depth.trial import Trial

__all__ = ["check_text", "checked", "suggest"]


def checked(experiment: Experiment, *, updates: int, width: int | None, remedies: bool) -> DepthCheck:
    """Make the depth check of `experiment`, with a bar on a terminal and a line per trial elsewhere.

    Args:
        experiment: the configuration.
        updates: length of each trial.
        width: model width in the trials; None: 128 on a CPU, the model's own on a GPU; 0: the model's own.
        remedies: whether to try what could rescue it.
    """
    from ziggurat.depth.check import check_depth
    from ziggurat.depth.trial import Settings
    from ziggurat.models.device import usable_device

    if width is None:
        width = Settings.width if usable_device(experiment.training.device, "training.device").type == "cpu" else 0
    shown = console()
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=shown,
        transient=True,
        disable=not shown.is_terminal,
    )

    def begun(name: str) -> Callable[[int], None]:
        if not shown.is_terminal:
            shown.print(f"depth check: trying {name}", markup=False, highlight=False, soft_wrap=True)
        for task in progress.task_ids:
            progress.update(task, visible=False)
        bar = progress.add_task(f"trying {name}", total=updates)
        return lambda update: progress.update(bar, completed=update)

    def say(message: str) -> None:
        shown.print(message, markup=False, highlight=False, soft_wrap=True)

    with progress:
        settings = Settings(updates=updates, width=width or None)
        return check_depth(experiment, settings, begun, remedies=remedies, say=say)


def check_text(check: DepthCheck) -> str:
    """Return the depth check for people."""
    trial, verdict, settings = check.trial, check.verdict, check.settings
    lines = [
        f"depth check: {verdict.label.upper()}",
        f"  {trial.updates} updates of {settings.tokens} tokens at width {trial.width}, peak rate {trial.peak:.1e}, on "
        f"{check.data} ({duration(check.seconds)})",
    ]
    lines += [*_profile(trial), ""]
    lines += [f"  {'ok' if finding.healthy else '!!'} {finding.part:<8} {finding.said}" for finding in verdict.findings]
    if check.untried:
        lines += ["", f"what could help, not tried (`--no-remedies`): {'; '.join(check.untried)}"]
    if not check.remedies:
        return "\n".join(lines)
    lines += ["", "what to change, tried in the same way, best first:"]
    width = max(len(outcome.remedy.name) for outcome in check.remedies)
    for number, outcome in enumerate(check.remedies, start=1):
        said = outcome.verdict.findings[0].said
        lines.append(f"  {number}. {outcome.remedy.name:<{width}}  {outcome.verdict.label:<14}  {said}")
    return "\n".join(lines)


def _profile(trial: Trial) -> list[str]:
    """Return gradient norm, beta and Var(r) at some depths, before the trial and after it."""
    lines: list[str] = []
    for update in sorted({0, *trial.points} & {0, trial.updates}):
        lines.append(f"  {'at initialisation' if update == 0 else f'after {update} updates'}")
        values = trial.points[update]
        for stack in ("encoder", "decoder"):
            norms = values["gradient_norm"][stack]
            chosen = sorted({round(share * (len(norms) - 1) / 4) for share in range(5)})
            rows = {"gradient norm": norms, "beta": _means(values, "beta", stack)}
            rows["Var(r)"] = _means(values, "variance", stack)
            lines.append(f"    {stack + ' layer':<15}" + "".join(f"{layer + 1:>9}" for layer in chosen))
            lines += [
                f"      {name:<13}" + "".join(f"{row[layer]:>9.1e}" for layer in chosen)
                for name, row in rows.items()
                if row
            ]
    return lines


def _means(values: dict[str, Any], measure: str, stack: str) -> list[float]:
    """Return a measure of each layer, the mean over its sub-layers; nothing where the model has no such thing."""
    places = [row for place, row in values.get(measure, {}).items() if place.startswith(f"{stack}.")]
    return [sum(layer) / len(layer) for layer in zip(*places, strict=True)]


def suggest(check: DepthCheck, experiment: Experiment, path: Path) -> str:
    """Write the best configuration that the check found to `path`; return for people which that is."""
    rescued = [outcome for outcome in check.remedies if outcome.verdict.label == "trains"]
    chosen = rescued[0] if rescued else None
    write_atomically(path, dump(chosen.experiment if chosen else experiment).encode())
    if chosen is not None:
        return f"{path}: the configuration with {chosen.remedy.name}"
    if check.verdict.label == "trains":
        return f"{path}: the configuration as it is, since it trains"
    return f"{path}: the configuration as it is, since no remedy that was tried trains"
