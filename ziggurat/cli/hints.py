"""Hints for users of other toolkits and earlier versions: what to write instead of an unknown option (hints.yaml)."""

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
"""_PARTS maps each verb to its parts of hints.yaml; a later part takes precedence."""


@functools.cache
def hints(verb: str) -> Mapping[str, str]:
    """Return another toolkit's options -> what to write here, for a verb; empty if it has none.

    Names have no leading hyphens, and hyphens instead of underscores. In the values, VALUE stands for the value that
    was typed, and VERB for the verb.
    """
    return _of_parts(_PARTS.get(verb, ()))


def _of_parts(wanted: Sequence[str]) -> Mapping[str, str]:
    import yaml  # imported here, since only an error needs it

    parts = yaml.safe_load((resources.files("ziggurat") / "cli" / "hints.yaml").read_text(encoding="utf-8"))
    groups = (group for part in wanted for group in parts[part].items())
    return MappingProxyType({name: instead for instead, names in groups for name in names.split()})


def option_hint(error: Exception, arguments: Sequence[str]) -> str:
    """Return what to write for the unknown option that `error` reports; empty if there is no hint.

    `arguments` is the command line, in which values are looked up; its other unknown options get their hints, too.
    Typer's errors about options have an `option_name` and the verb's context.
    """
    option, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if option is None or context is None:
        return ""
    own = {name for parameter in context.command.params for name in parameter.opts}
    others = (argument.partition("=")[0] for argument in arguments if argument.startswith("--"))
    unknown = dict.fromkeys([option, *(name for name in others if name not in own)])
    found = {name: hint for name in unknown if (hint := _hint(context.info_name, name, arguments))}
    if list(found) in ([], [option]):
        return f"Here: {found[option]}" if found else ""
    return "\n".join(["Here, instead of", *(f"  {name}: {hint}" for name, hint in found.items())])


def command_hint(error: Exception, arguments: Sequence[str]) -> str:
    """Return what to write instead of another toolkit's command that `error` reports; empty if there is no hint."""
    context = getattr(error, "ctx", None)
    if context is None or context.parent is not None:  # the error is about a verb's argument
        return ""
    known = _of_parts(("commands",))
    return next(
        (f"Here: {known[name]}" for name in (word.replace("_", "-") for word in arguments) if name in known), ""
    )


def single_hyphen_hint(arguments: Sequence[str]) -> str:
    """Return the message for another toolkit's option with one hyphen and several letters, such as `-report_every`.

    The parser would read it as `-r` with the value `eport_every`. Empty if there is none before `--`.
    """
    verb, *rest = arguments or [""]
    end = rest.index("--") if "--" in rest else len(rest)
    for argument in rest[:end]:
        option = argument.partition("=")[0]
        if len(option) > 2 and option[1] != "-" and (hint := _hint(verb, option, rest)):
            return f"No such option: {option}\nHere: {hint}"
    return ""


def _hint(verb: str, option: str, arguments: Sequence[str]) -> str:
    instead = hints(verb).get(option.lstrip("-").replace("_", "-")) if option.startswith("-") else None
    if instead is None:
        return ""
    return instead.replace("VERB", verb).replace("VALUE", _value(option, arguments) or "VALUE")


def _value(option: str, arguments: Sequence[str]) -> str:
    """Return the value of `option`, given as `--beam 8` or `--beam=8`; empty if there is none."""
    for position, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == option and equals:
            return printable(value, 80)
        following = arguments[position + 1 : position + 2]
        if argument == option and following and not following[0].startswith("-"):
            return printable(following[0], 80)
    return ""
