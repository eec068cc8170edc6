"""Hints for users of other toolkits and earlier versions: after "no such option", what to write (hints.yaml)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from importlib import resources
from types import MappingProxyType

from ziggurat.system.errors import printable

_PARTS: Mapping[str, tuple[str, ...]] = {
    "translate": ("bulk", "search", "model", "text"),
    "evaluate": ("bulk", "search", "model", "evaluate", "moved"),
    "compare": ("search", "model", "evaluate"),
    "perturb": ("search", "model", "evaluate"),
    "score": ("bulk", "search", "model", "score"),
    "backtranslate": ("bulk", "model"),
    "filter": ("bulk", "model"),
    "align": ("bulk",),
    "pipeline": ("bulk",),
    "prepare": ("bulk", "data"),
    "train": ("data", "train"),
    "inspect": ("data", "train"),
    "average": ("average",),
}
"""Verb -> parts of hints.yaml; the later one counts where two have a name."""


@functools.cache
def hints(verb: str) -> Mapping[str, str]:
    """Return option of another toolkit -> what to write here, for a verb; empty for a verb that has none.

    Names are without hyphens before them, and have hyphens for underscores. In what to write, VALUE is the value that
    was typed, and VERB the verb.
    """
    import yaml  # only an error needs it so early

    if verb not in _PARTS:
        return MappingProxyType({})
    parts = yaml.safe_load((resources.files("ziggurat") / "cli" / "hints.yaml").read_text(encoding="utf-8"))
    groups = (group for part in _PARTS[verb] for group in parts[part].items())
    return MappingProxyType({name: instead for instead, names in groups for name in names.split()})


def option_hint(error: Exception, arguments: Sequence[str]) -> str:
    """Return what to write for the unknown option that `error` is about; empty where it is not known.

    `arguments` are those of the command line, for the value. Typer's errors about options have an `option_name` and
    the context of the verb.
    """
    option, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if option is None or context is None:
        return ""
    return _hint(context.info_name, option, arguments)


def single_hyphen_hint(arguments: Sequence[str]) -> str:
    """Return the message for an option of another toolkit that has one hyphen and several letters, as `-report_every`.

    The parser would read it as `-r` with the value `eport_every`. Empty where there is none before `--`.
    """
    verb, *rest = arguments or [""]
    end = rest.index("--") if "--" in rest else len(rest)
    for argument in rest[:end]:
        option = argument.partition("=")[0]
        if len(option) > 2 and option[1] != "-" and (hint := _hint(verb, option, rest)):
            return f"No such option: {option}\n{hint}"
    return ""


def _hint(verb: str, option: str, arguments: Sequence[str]) -> str:
    instead = hints(verb).get(option.lstrip("-").replace("_", "-")) if option.startswith("-") else None
    if instead is None:
        return ""
    return f"Here: {instead.replace('VERB', verb).replace('VALUE', _value(option, arguments) or 'VALUE')}"


def _value(option: str, arguments: Sequence[str]) -> str:
    """Return the value of `option`, given as `--beam 8` or `--beam=8`; empty where there is none."""
    for position, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == option and equals:
            return printable(value, 80)
        following = arguments[position + 1 : position + 2]
        if argument == option and following and not following[0].startswith("-"):
            return printable(following[0], 80)
    return ""
