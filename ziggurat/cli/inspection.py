"""The verb that looks at a model before it is trained: inspect.

In the order of its output: parameters and methods, costs, the depth check (ziggurat.cli.trainability).
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ziggurat.cli.options import Json, Overrides
from ziggurat.cli.output import check_output, counted, file_named, print_json, refuse_overwriting, say
from ziggurat.cli.trainability import check_text, run_check, suggest
from ziggurat.config import Experiment, TrainingConfig, load_experiment
from ziggurat.config.compatibility import unheeded
from ziggurat.config.notices import notices
from ziggurat.config.papers import PaperRecipe, find_paper_recipe
from ziggurat.config.recipes import load_named, recipe_names
from ziggurat.system.checksums import check_file
from ziggurat.system.errors import ConfigError

if TYPE_CHECKING:
    from ziggurat.inspect.cost.estimate import Cost
    from ziggurat.model.inspection import Inspection


def inspect(
    config: Annotated[str, typer.Argument(help="YAML file, built-in recipe, or folder of a run or model.")],
    overrides: Overrides = None,
    cost: Annotated[
        bool, typer.Option("--cost/--no-cost", help="Estimate arithmetic, memory and time of training.")
    ] = True,
    check: Annotated[
        bool | None,
        typer.Option(
            "--check/--no-check",
            help="Try out whether this depth trains; default: for configurations, not for runs and models.",
            show_default=False,
        ),
    ] = None,
    updates: Annotated[int, typer.Option(min=10, help="Updates in each trial of the depth check.")] = 80,
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

    Costs come from a simulated update and a short measurement of this machine (docs/inspect.md). The depth check trains
    a narrow copy for a few dozen updates (docs/depth-check.md).

    Examples: `ziggurat inspect multi30k-de-en model.residual=post model.encoder.layers=18 --suggest better.yaml`,
    `ziggurat inspect ds-init-en-de-base-20-20-ds-matt --no-check`
    """
    from ziggurat.inspect.cost.estimate import estimate_cost
    from ziggurat.model.inspection import inspect_experiment
    from ziggurat.model.run_folder import CONFIG_FILE

    saved = Path(config) / CONFIG_FILE
    if Path(config).is_dir() and not saved.is_file() and config not in recipe_names():
        raise ConfigError(f"{config}: is a folder, but neither a run nor a model directory (no {CONFIG_FILE})")
    folder = saved.parent if saved.is_file() else None
    check_file(saved)
    experiment = load_experiment(saved, overrides or []) if folder else load_named(config, overrides or [])
    # Published figures are shown only for a paper's recipe as it is.
    recipe = None if folder or overrides or Path(config).is_file() else find_paper_recipe(config)
    wanted = folder is None if check is None else check
    if suggested is not None:
        if not wanted:
            raise ConfigError("`--suggest` needs the depth check; leave out `--no-check`, or add `--check`")
        suggested = file_named(suggested)
        check_output(suggested)
        refuse_overwriting(suggested, config, str(saved))
    # Each part is printed as soon as it is known: the depth check takes minutes.
    inspection = inspect_experiment(experiment, folder)
    if not json:
        print(_text(config, experiment, inspection, recipe), flush=True)
    document = _record(config, experiment, inspection, recipe) if json else {}
    if cost:
        costs = estimate_cost(experiment, (inspection.vocabulary.source, inspection.vocabulary.target))
        document["cost"] = _cost_record(costs)
        if not json:
            said = [_cost_text(costs, experiment.training), *_published_saving(recipe)]
            print("\n" + "\n".join(said), flush=True)
    if wanted:
        found = run_check(experiment, updates=updates, width=width, remedies=remedies)
        document["depth_check"] = found.as_record()
        if not json:
            print(f"\n{check_text(found)}")
        if suggested is not None:
            say(suggest(found, experiment, suggested))
    if json:
        print_json(document)


def _record(name: str, experiment: Experiment, inspection: Inspection, recipe: PaperRecipe | None) -> dict[str, Any]:
    """Return the inspection for JSON."""
    published = recipe.table_row.published.count if recipe else None
    return {
        "name": name,
        **asdict(inspection),
        "published_parameters": published,
        "published_costs": recipe.table_row.published.costs if recipe else {},
        "unheeded": unheeded(experiment.model),
        "notices": notices(experiment),
    }


def _text(name: str, experiment: Experiment, inspection: Inspection, recipe: PaperRecipe | None) -> str:
    """Return parameters, vocabulary and methods as text."""
    total, model = inspection.parameters, experiment.model
    lines = [f"{name}", "", f"{'parameters':<12}  {total:>15,}"]
    for part, count in inspection.parts.items():
        line = f"  {part:<10}  {count:>15,}  {count / total:>6.1%}"
        if part in inspection.layers:
            line += f"   {inspection.layers[part]} layers, {inspection.layer_parameters[part]:,} in the top one"
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
    return "\n".join([*lines, *notices(experiment)])


# Costs as text and for JSON

_WIDTH = 34  # of the first column


def _cost_record(cost: Cost) -> dict[str, Any]:
    """Return the costs for JSON; operations are additions and multiplications, memory is in bytes."""
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
    """Return the costs as tables."""
    return "\n\n".join(
        ["\n".join(table) for table in (_arithmetic(cost), _memory(cost, training), _time(cost, training), cost.notes)]
    ).rstrip()


def _published_saving(recipe: PaperRecipe | None) -> list[str]:
    """Return a line with the share of time that growing saves by the paper, and why the recipe saves another one."""
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
        ("source token, in all", forward.source, training.source),
        ("  encoder layers", forward.encoder, training.encoder),
        (f"  attention, {source} tokens", forward.encoder_attention, training.encoder_attention),
        ("  keys and values for the decoder", forward.memory, training.memory),
        ("target token, in all", forward.target, training.target),
        ("  decoder layers", forward.decoder, training.decoder),
        (f"  attention, {target} and {source} tokens", forward.decoder_attention, training.decoder_attention),
        ("  output layer", forward.output, training.output),
    )
    return [
        f"{'MFLOP per token':<{_WIDTH + 2}}{'forward':>12}{'training':>12}",
        *(_row(name, f"{once / 1e6:,.1f}", f"{trained / 1e6:,.1f}") for name, once, trained in rows),
        f"  in sentences of {source} source and {target} target tokens ({cost.batches.origin})",
    ]


def _memory(cost: Cost, training: TrainingConfig) -> list[str]:
    memory, optimiser = cost.memory, training.optimiser
    names = {
        "weights": "weights, fp32",
        "copies": "their copies in bf16",
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
        lines.append(f"  asynchronous checkpoints keep {_mebibytes(memory.checkpoint)} MiB of main memory in addition")
    return lines


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
        f"  the machine is busy: {time.others:.0%} of its processors' time went to other processes. These seconds are "
        f"those of an idle machine; now an update takes at least {time.delay:.1f} times as long"
    )
    return [
        f"{f'seconds of an update ({cost.device}{threads})':<{_WIDTH + 2}}{time.seconds:>12,.2f}",
        *(_row(name, f"{time.parts[key]:,.2f}") for key, name in names.items()),
        f"  {count} of {batches.source_tokens:,.0f} source and {batches.target_tokens:,.0f} target tokens on average, "
        f"padding included; {time.target_tokens_per_second:,.0f} target tokens a second without it",
        f"  {time.flops / 1e12:,.3f} TFLOP, at rates just measured on a shallow copy (docs/inspect.md)",
        *([busy] if time.delay > 1 else []),
    ]
