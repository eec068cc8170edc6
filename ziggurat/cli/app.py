"""The verbs; each is one function that parses, calls and prints."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated

import typer

from ziggurat import __version__
from ziggurat.cli import demo, preparation, training, translation
from ziggurat.errors import ConfigError, printable

__all__ = ["app", "check_verb"]

_VERBS = {
    verb.__name__: verb
    for verb in (
        demo.demo,
        preparation.recipes,
        preparation.explain,
        preparation.prepare,
        training.train,
        training.average,
        translation.translate,
        translation.score,
        translation.evaluate,
    )
}

app = typer.Typer(
    name="ziggurat",
    help="Machine translation with very deep Transformers: prepare, train, translate, evaluate.",
    epilog="`ziggurat VERB --help` shows an example. `--debug` shows the traceback of an error.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _verb in _VERBS.items():
    app.command(_name)(_verb)


def check_verb(arguments: Sequence[str]) -> None:
    """Raise ConfigError with the nearest verb if the first argument names none; options are left to Typer."""
    if not arguments or arguments[0].startswith("-") or arguments[0] in _VERBS:
        return
    near = difflib.get_close_matches(arguments[0], _VERBS, n=1, cutoff=0.5)
    way_out = f"did you mean `{near[0]}`?" if near else f"the verbs are {', '.join(_VERBS)}"
    raise ConfigError(f"no verb `{printable(arguments[0])}`; {way_out}")


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
