"""The verb that looks at a model before it is trained: inspect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from ziggurat.cli.arguments import configurations, settings
from ziggurat.cli.output import (
    Json,
    check_output,
    counted,
    file_named,
    is_setting,
    print_json,
    progress_bars,
    refuse_overwriting,
    say,
    write_parts,
)
from ziggurat.config import Experiment, TrainingConfig, dump, load_experiment
from ziggurat.config.notices import notices, unused_settings
from ziggurat.config.recipes import PaperRecipe, find_paper_recipe, find_small_recipe, load_named, recipe_names
from ziggurat.model.run_folder import CONFIG_FILE
from ziggurat.system.errors import ConfigError
from ziggurat.system.files import check_file
from ziggurat.system.processes import busy_notice
from ziggurat.system.terminal import duration

if TYPE_CHECKING:
    from ziggurat.inspect.check import DepthCheck
    from ziggurat.inspect.cost import Cost
    from ziggurat.inspect.device_memory import LargestBatch
    from ziggurat.inspect.machine import BatchShape
    from ziggurat.inspect.trial import TrialMeasures
    from ziggurat.model.counts import Inspection


def _run_check(experiment: Experiment, *, updates: int, width: int | None, remedies: bool) -> DepthCheck:
    """Run the depth check of `experiment`, with a progress bar on a terminal and a message per trial elsewhere.

    `width` is the model width in trials; None: 128 on a CPU, the model's own on a GPU; 0: the model's own.
    """
    from ziggurat.inspect.check import check_depth
    from ziggurat.inspect.trial import TrialOptions
    from ziggurat.model.accelerator import usable_device

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


def _check_text(check: DepthCheck) -> str:
    trial, verdict, settings, reference = check.trial, check.verdict, check.settings, check.reference
    lines = [
        f"depth check: {verdict.label.upper()}",
        f"  {trial.updates} updates of {settings.tokens} tokens at width {trial.width}, peak rate {trial.peak:.1e}, on "
        f"{check.data} ({duration(check.seconds)})",
        f"  loss below that of word frequencies alone by {_nats(verdict.learned)}; a shallow model's by "
        f"{_nats(reference.learned)}; to train, at least {_nats(reference.bar)} are needed",
    ]
    if not reference.enough:
        lines.append(
            f"  the shallow model hardly learned anything in {reference.updates} updates: try more (`--updates`)"
        )
    lines += [*_profile(trial), ""]
    lines += [f"  {'ok' if finding.healthy else '!!'} {finding.part:<8} {finding.said}" for finding in verdict.findings]
    if check.untried:
        lines += ["", f"what could help, not tried (`--no-remedies`): {'; '.join(check.untried)}"]
    if not check.remedies:
        return "\n".join(lines)
    lines += ["", "what to change, tried the same way, best first:"]
    width = max(len(outcome.remedy.name) for outcome in check.remedies)
    for number, outcome in enumerate(check.remedies, start=1):
        said = outcome.verdict.findings[0].said
        lines.append(f"  {number}. {outcome.remedy.name:<{width}}  {outcome.verdict.label:<18}  {said}")
    return "\n".join(lines)


def _nats(value: float) -> str:
    return f"{value:.2f} nats"


def _profile(trial: TrialMeasures) -> list[str]:
    """Return gradient norm, beta and Var(r) at up to five depths, before and after the trial."""
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
    return [*lines, "  (`ziggurat explain beta` and `ziggurat explain variance` say what these rows are)"]


def _means(values: dict[str, Any], measure: str, stack: str) -> list[float]:
    """Return a measure by layer, averaged over its sub-layers; empty if the model lacks it."""
    rows = [row for sub_layer, row in values.get(measure, {}).items() if sub_layer.startswith(f"{stack}.")]
    return [sum(layer) / len(layer) for layer in zip(*rows, strict=True)]


def suggest(check: DepthCheck, experiment: Experiment, path: str) -> str:
    """Write the best configuration found by the check to `path`; return a message that says which one it is."""
    chosen = next((outcome for outcome in check.remedies if outcome.verdict.label == "trains"), None)
    write_parts(path, [dump(chosen.experiment if chosen else experiment).encode()])
    if chosen is not None:
        return f"{path}: the configuration with {chosen.remedy.name}"
    if check.verdict.label == "trains":
        return f"{path}: the configuration as it is, since it trains"
    return f"{path}: the configuration unchanged, since it trains with none of the remedies tried"


def inspect(
    config: Annotated[
        str,
        typer.Argument(help="YAML file, built-in recipe, or folder of a run or model.", autocompletion=configurations),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Values that override the file: path.to.key=value. Or further configurations.",
            autocompletion=settings,
        ),
    ] = None,
    cost: Annotated[
        bool, typer.Option("--cost/--no-cost", help="Estimate arithmetic, memory and time of training.")
    ] = True,
    device_memory: Annotated[
        bool, typer.Option("--device-memory", help="Show the largest batch that fits into a GPU's memory.")
    ] = False,
    check: Annotated[
        bool | None,
        typer.Option(
            "--check/--no-check",
            help="Try whether this depth trains; default: for configurations, not for runs and models.",
            show_default=False,
        ),
    ] = None,
    updates: Annotated[int, typer.Option(min=10, help="Updates in each depth-check trial.")] = 80,
    width: Annotated[
        int | None,
        typer.Option(
            min=0, help="Model width in the trials; 0: the model's width. Default: at most 128 on a CPU, else 0."
        ),
    ] = None,
    remedies: Annotated[bool, typer.Option(help="Try remedies for a configuration that may not train.")] = True,
    suggested: Annotated[
        str | None,
        typer.Option("--suggest", metavar="FILE", help="Write the configuration with the best remedy to this file."),
    ] = None,
    json: Json = False,
) -> None:
    """Summarise a model before it is trained: parameters, methods, costs, and whether its depth will train.

    Costs come from a simulated update and a short measurement on this machine. The depth check trains a narrow copy for
    a few dozen updates (docs/depth-check.md). Several configurations become one table.

    Examples: `ziggurat inspect multi30k-de-en model.residual=post model.encoder.layers=18 --suggest better.yaml`,
    `ziggurat inspect ds-init-en-de-base-20-20-ds-matt --no-check`
    """
    from ziggurat.inspect.cost import estimate_cost, expected_batches
    from ziggurat.inspect.device_memory import largest_batches, on_accelerator
    from ziggurat.model.counts import inspect_experiment

    others = [word for word in overrides or [] if _is_configuration(word)]
    overrides = [word for word in overrides or [] if word not in others]
    if others:
        if suggested is not None:
            raise ConfigError(f"`--suggest` is for one configuration, not {len(others) + 1}")

        def checked(experiment: Experiment) -> DepthCheck:
            return _run_check(experiment, updates=updates, width=width, remedies=False)

        _tabulate([_opened(name, overrides) for name in (config, *others)], cost, checked, check, json=json)
        return
    _, experiment, folder = _opened(config, overrides)
    # Published figures are shown only for an unchanged recipe of a paper.
    recipe = None if folder or overrides or Path(config).is_file() else find_paper_recipe(config)
    wanted = folder is None if check is None else check
    if suggested is not None:
        if not wanted:
            raise ConfigError("`--suggest` needs the depth check; leave out `--no-check`, or add `--check`")
        suggested = file_named(suggested)
        check_output(suggested)
        refuse_overwriting(suggested, config, str(Path(config) / CONFIG_FILE))
    # Each part is printed as soon as it is known: the depth check takes minutes.
    inspection = inspect_experiment(experiment, folder)
    if not json:
        print(_text(config, experiment, inspection, recipe), flush=True)
    document = _record(config, experiment, inspection, recipe) if json else {}
    sizes = inspection.vocabulary.source, inspection.vocabulary.target
    if cost:
        costs = estimate_cost(experiment, sizes)
        document["cost"] = _cost_record(costs)
        if not json:
            said = [_cost_text(costs, experiment.training), *_published_saving(recipe)]
            print("\n" + "\n".join(said), flush=True)
    if device_memory:
        on_gpu = on_accelerator(experiment)
        shape = max(expected_batches(on_gpu).largest, key=lambda shape: shape.tokens)
        largest, precision = largest_batches(on_gpu, sizes, shape), on_gpu.training.precision
        of = {"precision": precision, "source_length": shape.source, "target_length": shape.target}
        document["device_memory"] = {**of, "largest": [asdict(batch) for batch in largest]}
        if not json:
            print("\n" + "\n".join(_device_memory(largest, shape, precision)), flush=True)
    if wanted:
        found = _run_check(experiment, updates=updates, width=width, remedies=remedies)
        document["depth_check"] = found.as_record()
        if not json:
            print(f"\n{_check_text(found)}")
        if suggested is not None:
            say(suggest(found, experiment, suggested))
    if json:
        print_json(document)


def _is_configuration(word: str) -> bool:
    """Return whether an argument after the first configuration is another configuration, not `key=value`."""
    if is_setting(word):
        return False
    return (
        Path(word).exists()
        or word.endswith((".yaml", ".yml"))
        or word in recipe_names()
        or find_small_recipe(word) is not None
    )


def _opened(config: str, overrides: list[str]) -> tuple[str, Experiment, Path | None]:
    """Return a configuration with its name, and the folder if it belongs to a run or model."""
    saved = Path(config) / CONFIG_FILE
    if Path(config).is_dir() and not saved.is_file() and config not in recipe_names():
        raise ConfigError(f"{config}: is a folder, but neither a run nor a model directory (no {CONFIG_FILE})")
    check_file(saved)
    if saved.is_file():
        return config, load_experiment(saved, overrides), saved.parent
    return config, load_named(config, overrides), None


def _tabulate(
    opened: list[tuple[str, Experiment, Path | None]],
    cost: bool,
    checked: Callable[[Experiment], DepthCheck],
    check: bool | None,
    *,
    json: bool,
) -> None:
    """Print one row per configuration: parameters, verdict, and an update's arithmetic, seconds and memory."""
    from ziggurat.inspect.cost import estimate_cost
    from ziggurat.model.counts import inspect_experiment

    rows = []
    for name, experiment, folder in opened:
        inspection = inspect_experiment(experiment, folder)
        row: dict[str, Any] = {"name": name, "parameters": inspection.parameters}
        if cost:
            costs = estimate_cost(experiment, (inspection.vocabulary.source, inspection.vocabulary.target))
            row |= {"flops": costs.time.flops, "seconds": costs.time.seconds, "delay": costs.time.delay}
            row |= {"memory": costs.memory.peak, "device": costs.device}
        if check or (check is None and folder is None):
            found = checked(experiment)
            row |= {"verdict": found.verdict.label, "learned": found.verdict.learned}
        rows.append(row)
    if json:
        print_json({"configurations": rows})
        return
    shown = {
        "parameters": ("parameters", "{:,}"),
        "verdict": ("verdict", "{}"),
        "flops": ("TFLOP", "{:,.3f}"),
        "seconds": ("s per update", "{:,.2f}"),
        "memory": ("MiB", "{}"),
    }
    columns = [key for key in shown if any(key in row for row in rows)]
    texts = [
        [
            shown[key][1].format(_mebibytes(row[key]) if key == "memory" else row[key]) if key in row else "-"
            for key in columns
        ]
        for row in rows
    ]
    width = max(len(row["name"]) for row in rows)
    table = [("", [shown[key][0] for key in columns]), *zip((row["name"] for row in rows), texts, strict=True)]
    print("\n".join(f"{name:<{width}}" + "".join(f"{text:>16}" for text in line) for name, line in table))
    if any(row.get("delay", 1) > 1 for row in rows):
        print("  seconds assume an idle machine, but this one is busy now")


def _record(name: str, experiment: Experiment, inspection: Inspection, recipe: PaperRecipe | None) -> dict[str, Any]:
    published = recipe.table_row.published.count if recipe else None
    return {
        "name": name,
        **asdict(inspection),
        "published_parameters": published,
        "published_costs": recipe.table_row.published.costs if recipe else {},
        "unheeded": list(unused_settings(experiment.model)),
        "notices": [str(notice) for notice in notices(experiment)],
    }


def _text(name: str, experiment: Experiment, inspection: Inspection, recipe: PaperRecipe | None) -> str:
    total, model = inspection.parameters, experiment.model
    lines = [f"{name}", "", f"{'parameters':<12}  {total:>15,}"]
    for part, count in inspection.parts.items():
        line = f"  {part:<10}  {count:>15,}  {count / total:>6.1%}"
        if part in inspection.layers:
            line += f"   {inspection.layers[part]} layers, {inspection.layer_parameters[part]:,} in the top one"
            if (different := len(set(getattr(model, part).owners()))) < inspection.layers[part]:
                line += f", {different} different"
        elif part == "output" and model.embedding.sharing != "none":
            line += "   shared with the target embedding"
        lines.append(line)
    published = recipe.table_row.published if recipe else None
    if published is not None and published.count is not None:
        lines.append(f"  {'published':<10}  {published.count:>15,}")
        lines += [f"  {published.count_differs}"] if published.count_differs else []
    sizes = inspection.vocabulary
    tokens = f"{sizes.source:,} joint" if sizes.joint else f"{sizes.source:,} source and {sizes.target:,} target"
    lines += ["", f"vocabulary    {tokens} tokens, from {sizes.origin}", ""]
    width = max(len(f"{method.key}: {method.value}") for method in inspection.methods)
    lines += [f"{f'{method.key}: {method.value}':<{width}}  {method.paper}" for method in inspection.methods]
    return "\n".join([*lines, *map(str, notices(experiment))])


# Costs as text and for JSON

_WIDTH = 34  # width of the first column


def _cost_record(cost: Cost) -> dict[str, Any]:
    """Return the costs for JSON: operations count additions and multiplications, memory is in bytes."""
    batches, shape = cost.batches, cost.memory.batch
    return {
        "device": cost.device,
        "threads": cost.threads,
        "batches": {**asdict(batches), "largest": [shape._asdict() for shape in batches.largest]},
        "flops_per_token": {
            "source_length": cost.length[0],
            "target_length": cost.length[1],
            "forward": asdict(cost.forward),
            "training": asdict(cost.training),
        },
        "memory": {**asdict(cost.memory), "batch": shape._asdict()},
        "time": asdict(cost.time),
        "notes": list(cost.notes),
    }


def _cost_text(cost: Cost, training: TrainingConfig) -> str:
    return "\n\n".join(
        ["\n".join(table) for table in (_arithmetic(cost), _memory(cost, training), _time(cost, training), cost.notes)]
    ).rstrip()


def _published_saving(recipe: PaperRecipe | None) -> list[str]:
    """Return a line with the share of time that growing saves according to the paper, and why the recipe differs."""
    published = recipe.table_row.published if recipe else None
    if published is None or "train_time_saved_percent" not in published.costs:
        return []
    differs = f"; {published.saving_differs}" if published.saving_differs else ""
    return [f"published: growing saves {published.costs['train_time_saved_percent']} % of the time{differs}"]


def _row(name: str, *values: str) -> str:
    return f"  {name:<{_WIDTH}}" + "".join(f"{value:>12}" for value in values)


def _arithmetic(cost: Cost) -> list[str]:
    forward, training = cost.forward, cost.training
    source, target = cost.length
    rows = (
        ("source token, total", forward.source, training.source),
        ("  encoder layers", forward.encoder, training.encoder),
        (f"  attention, {source} tokens", forward.encoder_attention, training.encoder_attention),
        ("  keys and values for the decoder", forward.memory, training.memory),
        ("target token, total", forward.target, training.target),
        ("  decoder layers", forward.decoder, training.decoder),
        (f"  attention, {target} and {source} tokens", forward.decoder_attention, training.decoder_attention),
        ("  output layer", forward.output, training.output),
    )
    return [
        f"{'MFLOP per token':<{_WIDTH + 2}}{'forward':>12}{'training':>12}",
        *(_row(name, f"{once / 1e6:,.1f}", f"{trained / 1e6:,.1f}") for name, once, trained in rows),
        f"  for sentences of {source} source and {target} target tokens ({cost.batches.origin})",
    ]


def _memory(cost: Cost, training: TrainingConfig) -> list[str]:
    memory, optimiser = cost.memory, training.optimiser
    names = {
        "weights": "weights, fp32",
        "tables": "tables, such as positions",
        "copies": "their bf16 copies",
        "gradients": "gradients",
        "moments": f"moments ({optimiser.kind}, {optimiser.moments})",
        "encoder": "kept by the encoder" + _recomputed(training.recompute.encoder),
        "decoder": "kept by the decoder" + _recomputed(training.recompute.decoder),
        "loss": f"loss, {training.loss.chunk_tokens:,} tokens at a time",
        "backward": "created in the backward pass",
        "step": "created in the optimiser's step",
        "batch": "the batch itself",
    }
    rows = [_row(name, _mebibytes(memory.parts[key])) for key, name in names.items() if memory.parts.get(key)]
    batch = memory.batch
    lines = [
        f"{f'memory of an update, MiB ({cost.device})':<{_WIDTH + 2}}{_mebibytes(memory.peak):>12}",
        *rows,
        f"  at its peak, with the largest batch: {batch.sentences} x {batch.source} source and {batch.target} target "
        "tokens",
    ]
    if memory.checkpoint:
        lines.append(f"  asynchronous checkpoints keep {_mebibytes(memory.checkpoint)} MiB more of main memory")
    return lines


def _device_memory(largest: list[LargestBatch], shape: BatchShape, precision: str) -> list[str]:
    return [
        f"{f'largest batch on a GPU ({precision})':<{_WIDTH + 2}}{'tokens':>12}{'sentences':>12}",
        *(
            _row(f"{batch.gib} GiB", *(f"{n:,}" if n else "-" for n in (batch.tokens, batch.sentences)))
            for batch in largest
        ),
        f"  of {shape.source} source and {shape.target} target tokens; tokens count the longer side, as "
        "in `training.batch.max_tokens`",
    ]


def _recomputed(recompute: object) -> str:
    return "" if recompute is None else f" (recompute {recompute})"


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f}"


def _time(cost: Cost, training: TrainingConfig) -> list[str]:
    time, batches = cost.time, cost.batches
    threads = f", {counted(cost.threads, 'thread')}" if cost.device == "cpu" else ""
    names = {
        "layers": "encoder and decoder",
        "loss": "output layer and loss",
        "step": "the optimiser's step",
    }
    accumulate = training.batch.accumulate
    count = "1 batch" if accumulate == 1 else f"{accumulate} batches"
    busy = (
        f"  {busy_notice(time.others)}. These seconds assume an idle machine; now an update takes at least "
        f"{time.delay:.1f} times as long"
    )
    return [
        f"{f'seconds per update ({cost.device}{threads})':<{_WIDTH + 2}}{time.seconds:>12,.2f}",
        *(_row(name, f"{time.parts[key]:,.2f}") for key, name in names.items()),
        f"  {count} of {batches.source_tokens:,.0f} source and {batches.target_tokens:,.0f} target tokens on average, "
        f"padding included; {time.target_tokens_per_second:,.0f} target tokens per second without it",
        f"  {time.flops / 1e12:,.3f} TFLOP, at rates measured just now on a shallow copy (docs/depth-check.md)",
        *([busy] if time.delay > 1 else []),
    ]
