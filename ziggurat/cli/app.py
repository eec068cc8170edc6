"""The verbs; each is one function that parses, calls and prints."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

from ziggurat import __version__
from ziggurat.cli import (
    backtranslation,
    demo,
    diagnosis,
    evaluation,
    export,
    inspection,
    preparation,
    reporting,
    shortlist,
    training,
    translation,
)

__all__ = ["app"]

app = typer.Typer(
    name="ziggurat",
    help="Machine translation with very deep Transformers: prepare, train, translate, evaluate.",
    epilog="`ziggurat VERB --help` shows an example. `--debug` shows the traceback of an error.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo.demo)
app.command()(preparation.recipes)
app.command()(preparation.explain)
app.command()(preparation.prepare)
app.command()(inspection.inspect)
app.command()(shortlist.shortlist)
app.command()(training.train)
app.command()(training.grow)
app.command()(training.average)
app.command()(diagnosis.diagnose)
app.command()(translation.translate)
app.command()(translation.score)
app.command()(evaluation.evaluate)
app.command()(reporting.report)
app.command()(export.export)
app.command("import")(export.import_model)
app.command()(backtranslation.backtranslate)


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        torch = f" (torch {metadata.version('torch')})"  # importing torch takes seconds
    except metadata.PackageNotFoundError:
        torch = ""
    print(f"ziggurat {__version__}{torch}")
    raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options that need no verb."""
