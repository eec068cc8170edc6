"""The verb that looks at a model before it is trained: inspect."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ziggurat.cli.cost import cost_record, cost_text, estimated
from ziggurat.cli.depth import check_text, checked, suggest
from ziggurat.cli.output import check_output, console, print_json
from ziggurat.cli.preparation import Json, Overrides
from ziggurat.config import Experiment, load_experiment
from ziggurat.config.compatibility import unheeded
from ziggurat.config.notices import notices
from ziggurat.config.papers import PaperRecipe, find_paper_recipe
from ziggurat.config.recipes import load_named, recipe_names
from ziggurat.data.checksums import check_file
from ziggurat.errors import ConfigError

if TYPE_CHECKING:
    from ziggurat.models.inspection import Inspection

__all__ = ["inspect"]


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
            help="Try whether this depth trains; by default for configurations, not for runs and models.",
            show_default=False,
        ),
    ] = None,
    updates: Annotated[int, typer.Option(min=10, help="Updates of each trial of the depth check.")] = 80,
    width: Annotated[
        int | None,
        typer.Option(
            min=0, help="Model width in the trials; 0: the model's own. Default: at most 128 on a CPU, else 0."
        ),
    ] = None,
    remedies: Annotated[bool, typer.Option(help="Try what could rescue a configuration that may not train.")] = True,
    suggested: Annotated[
        Path | None,
        typer.Option("--suggest", metavar="FILE", help="Write the configuration with the best remedy to this file."),
    ] = None,
    json: Json = False,
) -> None:
    """Tell what a model amounts to before it is trained: parameters, methods, costs, and whether its depth will train.

    Costs are counted on tensors without values, at rates that this machine shows in a fraction of a second. The depth
    check trains a narrow copy for a few dozen updates (docs/depth-check.md).

    Examples: `ziggurat inspect multi30k-de-en model.residual=post model.encoder.layers=18 --suggest better.yaml`,
    `ziggurat inspect ds-init-en-de-base-20-20-ds-matt --no-check`
    """
    from ziggurat.models.directory import CONFIG_FILE
    from ziggurat.models.inspection import inspect_experiment

    saved = Path(config) / CONFIG_FILE
    if Path(config).is_dir() and not saved.is_file() and config not in recipe_names():
        raise ConfigError(f"{config}: is a folder, but neither a run nor a model directory (no {CONFIG_FILE})")
    folder = saved.parent if saved.is_file() else None
    check_file(saved)
    experiment = load_experiment(saved, overrides or []) if folder else load_named(config, overrides or [])
    recipe = None if folder or overrides or Path(config).is_file() else find_paper_recipe(config)
    wanted = folder is None if check is None else check
    if suggested is not None:
        if not wanted:
            raise ConfigError("`--suggest` needs the depth check; leave out `--no-check`, or say `--check`")
        check_output(str(suggested))
    inspection = inspect_experiment(experiment, folder)
    if not json:
        print(_text(config, experiment, inspection, recipe), flush=True)
    document = _document(config, experiment, inspection, recipe) if json else {}
    if cost:
        costs = estimated(experiment, inspection.vocabulary.source, inspection.vocabulary.target)
        document["cost"] = cost_record(costs)
        if not json:
            print(f"\n{cost_text(costs, experiment.training)}", flush=True)
    if wanted:
        found = checked(experiment, updates=updates, width=width, remedies=remedies)
        document["depth_check"] = found.as_record()
        if not json:
            print(f"\n{check_text(found)}")
        if suggested is not None:
            said = suggest(found, experiment, suggested)
            console().print(said, markup=False, highlight=False, soft_wrap=True)
    if json:
        print_json(document)


def _document(name: str, experiment: Experiment, inspection: Inspection, recipe: PaperRecipe | None) -> dict[str, Any]:
    published = recipe.place.published.count if recipe else None
    return {
        "name": name,
        **asdict(inspection),
        "published_parameters": published,
        "unheeded": unheeded(experiment.model),
        "notices": notices(experiment),
    }


def _text(name: str, experiment: Experiment, inspection: Inspection, recipe: PaperRecipe | None) -> str:
    """Return the table for people."""
    total, model = inspection.parameters, experiment.model
    lines = [f"{name}", "", f"{'parameters':<12}  {total:>15,}"]
    for part, count in inspection.parts.items():
        line = f"  {part:<10}  {count:>15,}  {count / total:>6.1%}"
        if part in inspection.layers:
            line += f"   {inspection.layers[part]} layers, {inspection.layer_parameters[part]:,} in the top one"
        elif part == "output" and model.embedding.sharing != "none":
            line += "   shared with the target embedding"
        lines.append(line)
    said = recipe.place.published if recipe else None
    if said is not None and said.count is not None:
        lines.append(f"  {'published':<10}  {said.count:>15,}")
        lines += [f"  {said.count_differs}"] if said.count_differs else []
    sizes = inspection.vocabulary
    lines += ["", f"vocabulary    {sizes.source:,} source and {sizes.target:,} target tokens, from {sizes.origin}", ""]
    width = max(len(f"{method.key}: {method.value}") for method in inspection.methods)
    lines += [f"{f'{method.key}: {method.value}':<{width}}  {method.paper}" for method in inspection.methods]
    return "\n".join([*lines, *notices(experiment)])
