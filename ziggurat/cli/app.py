"""The Typer application: all verbs, in groups. Each verb is one function that parses, calls and prints."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ziggurat import __version__
from ziggurat.cli.backtranslation import backtranslate, filter_corpus
from ziggurat.cli.compare import compare
from ziggurat.cli.corpora import align, fetch
from ziggurat.cli.evaluation import evaluate, score
from ziggurat.cli.export import export, import_model
from ziggurat.cli.inspection import inspect
from ziggurat.cli.jobs import bulk
from ziggurat.cli.perturb import perturb
from ziggurat.cli.pipeline import demo, pipeline
from ziggurat.cli.preparation import explain, prepare, recipes, shortlist
from ziggurat.cli.reporting import diagnose, report
from ziggurat.cli.training import average, grow, train
from ziggurat.cli.translation import serve, translate
from ziggurat.cli.tuning import tune
from ziggurat.system.errors import ConfigError, printable

app = typer.Typer(
    name="ziggurat",
    help="Machine translation with very deep Transformers: prepare, train, translate, evaluate.",
    epilog="`ziggurat COMMAND --help` shows an example. Every command takes `-q` (`--quiet`), which shows only errors "
    "and results, and `--debug`, which shows the traceback of an error.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
_VERBS: dict[str, dict[str, Callable[..., None]]] = {
    "Begin": {"demo": demo, "pipeline": pipeline, "recipes": recipes, "explain": explain},
    "Train": {
        "fetch": fetch,
        "align": align,
        "prepare": prepare,
        "inspect": inspect,
        "tune": tune,
        "train": train,
        "grow": grow,
        "average": average,
    },
    "Translate": {
        "translate": translate,
        "serve": serve,
        "score": score,
        "backtranslate": backtranslate,
        "filter": filter_corpus,
        "shortlist": shortlist,
        "bulk": bulk,
    },
    "Judge": {"evaluate": evaluate, "compare": compare, "perturb": perturb, "diagnose": diagnose, "report": report},
    "Hand over": {"export": export, "import": import_model},
}
_SETTING = re.compile(r"([a-z][a-z0-9_]*(?:\.[A-Za-z0-9_]+)*)=")
"""_SETTING is the beginning of an argument that sets a configuration key."""


class _Verb(TyperCommand):
    """A verb that refuses an option with a single value when it is given twice, since only one could count."""

    def make_parser(self, ctx: Any) -> Any:
        parser = super().make_parser(ctx)
        parse = parser.parse_args

        def parse_once(args: list[str]) -> Any:
            typed = [word.partition("=")[0] for word in args]  # copied first, since parsing empties the list
            values, rest, order = parse(args)
            times = Counter(id(parameter) for parameter in order)
            for parameter in order:
                if times[id(parameter)] > 1 and _takes_one(parameter):
                    names = dict.fromkeys(word for word in typed if word in parameter.opts)
                    name = "` or `".join(names or [max(parameter.opts, key=len)])
                    raise ConfigError(f"`{name}` is given {times[id(parameter)]} times, but only one of them can count")
            arguments = [values.get(each.name or "") for each in self.params if each.param_type_name == "argument"]
            _refuse_repeated_settings(arguments)
            return values, rest, order

        parser.parse_args = parse_once  # type: ignore[method-assign]
        return parser


def _takes_one(parameter: Any) -> bool:
    """Return True for an option whose second value would replace the first; repeating a flag changes nothing."""
    if parameter.param_type_name != "option" or parameter.multiple or getattr(parameter, "count", False):
        return False
    return not getattr(parameter, "is_flag", False) or bool(parameter.secondary_opts)


def _refuse_repeated_settings(arguments: Iterable[object]) -> None:
    """Raise ConfigError if the arguments set a key twice; search keys may omit `decoding.`."""
    lists = (found if isinstance(found, list | tuple) else [found] for found in arguments)
    words = [word for found in lists for word in found if isinstance(word, str)]
    keys = Counter(setting[1].removeprefix("decoding.") for word in words if (setting := _SETTING.match(word)))
    if twice := [key for key, times in keys.items() if times > 1]:
        raise ConfigError(f"`{printable(twice[0])}=` is given {keys[twice[0]]} times, but only one of them can count")


for _group, _verbs in _VERBS.items():
    for _name, _verb in _verbs.items():
        # What follows the name of the verb that `bulk` runs belongs to that verb.
        settings = {"allow_interspersed_args": _verb is not bulk}
        app.command(_name, cls=_Verb, rich_help_panel=_group, context_settings=settings)(_verb)


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
