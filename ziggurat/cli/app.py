"""The Typer application: all verbs, in groups. A verb is one function that parses, calls and prints."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Annotated

import typer

from ziggurat import __version__
from ziggurat.cli import (
    alignment,
    backtranslation,
    demo,
    evaluation,
    explaining,
    export,
    fetching,
    inspection,
    pipeline,
    preparation,
    reporting,
    serving,
    training,
    translation,
    tuning,
)

app = typer.Typer(
    name="ziggurat",
    help="Machine translation with very deep Transformers: prepare, train, translate, evaluate.",
    epilog="`ziggurat VERB --help` shows an example. With every verb, `-q` (`--quiet`) shows nothing but errors and "
    "results, and `--debug` shows the traceback of an error.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
_VERBS: dict[str, dict[str, Callable[..., None]]] = {
    "Begin": {
        "demo": demo.demo,
        "pipeline": pipeline.pipeline,
        "recipes": preparation.recipes,
        "explain": explaining.explain,
    },
    "Train": {
        "fetch": fetching.fetch,
        "align": alignment.align,
        "prepare": preparation.prepare,
        "inspect": inspection.inspect,
        "tune": tuning.tune,
        "train": training.train,
        "grow": training.grow,
        "average": training.average,
    },
    "Translate": {
        "translate": translation.translate,
        "serve": serving.serve,
        "score": evaluation.score,
        "backtranslate": backtranslation.backtranslate,
        "filter": backtranslation.filter_corpus,
        "shortlist": preparation.shortlist,
    },
    "Judge": {"evaluate": evaluation.evaluate, "diagnose": reporting.diagnose, "report": reporting.report},
    "Hand over": {"export": export.export, "import": export.import_model},
}
for _group, _verbs in _VERBS.items():
    for _name, _verb in _verbs.items():
        app.command(_name, rich_help_panel=_group)(_verb)


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
        bool,
        typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Options that need no verb."""
