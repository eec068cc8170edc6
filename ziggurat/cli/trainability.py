"""The depth check behind `inspect`: its progress, its result as text, and the configuration it suggests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from ziggurat.cli.output import progress_bars, say, write_parts
from ziggurat.config import Experiment, dump
from ziggurat.system.duration import duration

if TYPE_CHECKING:
    from ziggurat.inspect.check import DepthCheck
    from ziggurat.inspect.trial import Trial


def run_check(experiment: Experiment, *, updates: int, width: int | None, remedies: bool) -> DepthCheck:
    """Run the depth check of `experiment`, with a progress bar on a terminal and a message per trial elsewhere.

    Args:
        experiment: the configuration.
        updates: number of updates of each trial.
        width: model width in the trials; None: 128 on a CPU, the model's own on a GPU; 0: the model's own.
        remedies: whether to try remedies where the verdict is not `trains`.
    """
    from ziggurat.inspect.check import check_depth
    from ziggurat.inspect.trial import TrialOptions
    from ziggurat.model.device import usable_device

    if width is None:
        width = TrialOptions.width if usable_device(experiment.training.device, "training.device").type == "cpu" else 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with progress_bars(*columns) as bars:

        def begin(name: str, updates: int) -> Callable[[int], None]:
            if bars.disable:
                say(f"depth check: trying {name}")
            for task in bars.task_ids:
                bars.update(task, visible=False)
            bar = bars.add_task(f"trying {name}", total=updates)
            return lambda update: bars.update(bar, completed=update)

        settings = TrialOptions(updates=updates, width=width or None)
        return check_depth(experiment, settings, begin, remedies=remedies, say=say)


def check_text(check: DepthCheck) -> str:
    """Return the depth check as text."""
    trial, verdict, settings, reference = check.trial, check.verdict, check.settings, check.reference
    lines = [
        f"depth check: {verdict.label.upper()}",
        f"  {trial.updates} updates of {settings.tokens} tokens at width {trial.width}, peak rate {trial.peak:.1e}, on "
        f"{check.data} ({duration(check.seconds)})",
        f"  below the entropy of word frequencies by {_nats(verdict.learned)}; a shallow model by "
        f"{_nats(reference.learned)}, and {_nats(reference.bar)} are asked for",
    ]
    if not reference.enough:
        lines.append(
            f"  the shallow model has hardly learnt anything in {reference.updates} updates: try more (`--updates`)"
        )
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


def _nats(value: float) -> str:
    return f"{value:.2f} nats"


def _profile(trial: Trial) -> list[str]:
    """Return gradient norm, beta and Var(r) at five depths at most, before and after the trial."""
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
    """Return a measure by layer, the mean over its sub-layers; empty where the model does not have it."""
    rows = [row for sub_layer, row in values.get(measure, {}).items() if sub_layer.startswith(f"{stack}.")]
    return [sum(layer) / len(layer) for layer in zip(*rows, strict=True)]


def suggest(check: DepthCheck, experiment: Experiment, path: str) -> str:
    """Write the best configuration that the check found to `path`; return a message that says which one it is."""
    chosen = next((outcome for outcome in check.remedies if outcome.verdict.label == "trains"), None)
    write_parts(path, [dump(chosen.experiment if chosen else experiment).encode()])
    if chosen is not None:
        return f"{path}: the configuration with {chosen.remedy.name}"
    if check.verdict.label == "trains":
        return f"{path}: the configuration as it is, since it trains"
    return f"{path}: the configuration as it is, since no remedy that was tried trains"
