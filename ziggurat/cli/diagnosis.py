"""The verb that measures trained models layer by layer: diagnose."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ziggurat.cli.output import console, print_json
from ziggurat.cli.preparation import Json

if TYPE_CHECKING:
    from ziggurat.diagnosis.records import Record

__all__ = ["diagnose"]


def diagnose(
    run: Annotated[Path, typer.Argument(help="Run, whose kept checkpoints are measured, or model directory.")],
    store: Annotated[
        Path | None, typer.Option("--store", help="Prepared data; default: data.store of the configuration.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    json: Json = False,
) -> None:
    """Measure gradients, states and wiring of a trained model, layer by layer, as training does on the way.

    Records go to RUN/diagnostics/depth.jsonl, where figures and reports find them (docs/diagnosis.md).

    Example: `ziggurat diagnose runs/a`
    """
    from ziggurat.diagnosis.records import DEPTH_FILE
    from ziggurat.training.diagnose import diagnose as diagnose_run

    def say(message: str) -> None:
        console().print(message, markup=False, highlight=False, soft_wrap=True)

    records = diagnose_run(run, store=store, device=device, say=say)
    if json:
        print_json({"records": [record.as_dict() for record in records]})
    else:
        print("\n\n".join(map(_text, records)))
        print(f"\nall measures: {run / DEPTH_FILE}")


def _text(record: Record) -> str:
    """Return what of a record fits on a screen: the loss, and the gradients from bottom to top."""
    values: dict[str, Any] = record.values
    lines = [
        f"update {record.update}: nll {values['nll']:.4f}, {values['source_dependence']:+.4f} beside other sources",
        f"{'':<10}{'layers':>8}{'gradient of layer 1':>21}{'of the last':>13}{'r':>11}",
    ]
    for stack, layers in record.layers.items():
        norms = values["gradient_norm"][stack]
        lines.append(f"{stack:<10}{layers:>8}{norms[0]:>21.2e}{norms[-1]:>13.2e}{values['r'][stack]:>11.2e}")
    return "\n".join(lines)
