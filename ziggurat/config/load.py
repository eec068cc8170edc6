"""Reading and writing configurations: strict YAML, overrides, and errors with file, line, key and nearest valid name.

Suggestions for unknown keys (the key that was probably meant, or the keys of the same section) come first, then reading
and changing configurations, then the rewording of pydantic's errors.
"""

from __future__ import annotations

import codecs
import datetime
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from ziggurat.config.experiment import Experiment
from ziggurat.config.model import without_sizes
from ziggurat.config.reference import other_names_of
from ziggurat.config.section import inner_section
from ziggurat.system.errors import ConfigError, Problem, printable
from ziggurat.system.small_files import read_bounded
from ziggurat.system.yaml_text import MAX_YAML_BYTES, Lines, dotted, parse_value, parse_yaml, to_yaml

_OTHER_NAMES: Mapping[str, str] = {
    name: ours
    for ours, names in {
        "d_model": "width dim dimension hidden hidden_size hidden_dim embed_dim embedding_dim embedding_size emb_dim "
        "model_dim size",
        "d_ff": "ffn_dim ff_dim ff_size ffn_size feed_forward feedforward_dim intermediate_size filter_size inner_dim",
        "heads": "num_heads attention_heads nhead n_heads",
        "layers": "num_layers depth n_layers",
        "peak": "lr learning_rate max_lr",
        "warmup_updates": "warmup_steps",
        "updates": "steps max_updates max_steps train_steps",
        "epochs": "max_epochs",
        "label_smoothing": "smoothing",
        "vocabulary_size": "vocab_size vocab num_words",
        "beam_size": "beam beams num_beams",
        "alignments": "attention",
        "dev": "valid validation val development",
    }.items()
    for name in names.split()
}
"""_OTHER_NAMES maps a key to its names in other toolkits and everyday use, in sections that have the key."""


def _suggested_key(location: Sequence[str | int], root: type[BaseModel]) -> str:
    """Return the end of a message about an unknown key of `root`: what was probably meant, or what is valid there."""
    wrong, section = str(location[-1]), _section_at(location[:-1], root)
    if section is None:
        return ""
    names = list(section.model_fields)
    other = _OTHER_NAMES.get(wrong.replace("-", "_").lower())
    if other in names:
        return f"; did you mean `{dotted((*location[:-1], str(other)))}`?"
    if near := difflib.get_close_matches(wrong, names, n=2, cutoff=0.6):
        return "; did you mean " + " or ".join(f"`{dotted((*location[:-1], n))}`" for n in near) + "?"
    inside = dotted(location[:-1])
    paths = _all_paths(root)
    below = [path for path in paths if path.startswith(f"{inside}.") or not inside]
    # In other sections only exact names count, because part of a name usually means something else there.
    found = (
        [path for path in below if path.rsplit(".", 1)[-1] == other]
        or [path for path in below if path.rsplit(".", 1)[-1].startswith(wrong)]
        or [path for path in paths if path.rsplit(".", 1)[-1] == wrong]
    )
    if found:
        return f"; did you mean `{min(found, key=lambda path: (len(path), path))}`?"
    return "; valid here: " + ", ".join(names)


def _section_at(location: Sequence[str | int], root: type[BaseModel]) -> type[BaseModel] | None:
    """Return the section class at a path in `root`; None if the path leads to a value or nowhere."""
    section: type[BaseModel] | None = root
    for key in location:
        if section is None or isinstance(key, int):
            continue
        field = section.model_fields.get(key)
        section = inner_section(field.annotation)[0] if field else None
    return section


def _all_paths(section: type[BaseModel], prefix: str = "") -> list[str]:
    paths = []
    for name, field in section.model_fields.items():
        paths.append(prefix + name)
        if (inner := inner_section(field.annotation)[0]) is not None:
            paths += _all_paths(inner, f"{prefix}{name}.")
    return paths


_MAX_PARTS = 16  # parts of an override's key; no key of the configuration has more than five
_MAX_ERRORS = 20  # errors listed one by one: rewording takes time, and thousands would not help
_OF_TEXT = (".tmx", ".csv", ".tsv", ".jsonl", ".parquet", ".xlf", ".xliff", ".po", ".docx", ".gz", ".xz", ".zst")
AnySection = TypeVar("AnySection", bound=BaseModel)


def load_experiment(path: str | Path, overrides: Sequence[str] = (), *, piped: bool = False) -> Experiment:
    """Read one YAML file, apply the overrides and return the checked configuration.

    `piped` allows a pipe, such as the shell's `<(...)`; otherwise a pipe is refused, since reading one may never end.

    Raises ConfigError: the file is missing, not a regular file, not UTF-8, not valid YAML or beyond its limits
    (ziggurat.system.yaml_text); a key is unknown or ill-typed, or keys conflict.
    """
    return parse_experiment(read_config(path, piped=piped), str(path), overrides)


def read_config(path: str | Path, *, piped: bool = False) -> str:
    """Return the unparsed text of a configuration file; see load_experiment."""
    path = Path(path)
    if path.suffix.lower() in _OF_TEXT:
        raise ConfigError(
            f"{path}: by its name this is text, not a configuration: name it in section `data` of a YAML file, and "
            "give that file to `ziggurat prepare` first"
        )
    try:
        return read_bounded(path, MAX_YAML_BYTES, error=ConfigError, piped=piped).decode("utf-8")
    except FileNotFoundError:
        beside = [entry.name for entry in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        near = [str(path.with_name(name)) for name in difflib.get_close_matches(path.name, beside, n=1, cutoff=0.7)]
        hint = f"; did you mean `{near[0]}`?" if near else ""
        raise ConfigError(f"{path}: no such configuration file{hint}") from None
    except UnicodeDecodeError as error:
        utf_16 = error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        hint = "; it is UTF-16: convert it, with `iconv -f UTF-16 -t UTF-8`" if utf_16 else ""
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}{hint}") from None


def parse_experiment(text: str, name: str, overrides: Sequence[str] = ()) -> Experiment:
    """Return the checked configuration in YAML text, which errors call `name`; see load_experiment."""
    return parse_as(Experiment, text, name, overrides)


def parse_as(root: type[AnySection], text: str, name: str, overrides: Sequence[str] = ()) -> AnySection:
    """Return YAML text, which errors call `name`, as the section `root`; errors are worded as for an experiment."""
    content, lines = parse_yaml(text, name)
    _make_room_for_presets(content, overrides)
    overridden = {apply_override(content, override, root) for override in overrides}
    try:
        return root.model_validate(content)
    except ValidationError as error:
        if root is Experiment and "bitext" in content:
            raise ConfigError(f"{name}: `bitext` is a section for files of `ziggurat pipeline`") from None
        raise _errors(error, lambda e: tuple(e["loc"]), lambda e: _explain(e, name, lines, overridden, root)) from None


def dump(config: BaseModel) -> str:
    """Return the resolved configuration as YAML; load_experiment reads it back to an equal object."""
    return to_yaml(config.model_dump(mode="json"))


def _make_room_for_presets(content: dict[str, Any], overrides: Sequence[str]) -> None:
    """Before overrides are applied, remove from `content` the sizes that a `preset` among them replaces.

    Sizes among the overrides win over the preset, whatever the order.
    """
    for override in overrides:
        name, _, value = override.partition("=")
        *above, key = name.strip().split(".", _MAX_PARTS)
        if key == "preset" and above[-1:] == ["model"]:
            section: Any = content
            for part in above:
                section = section.get(part) if isinstance(section, dict) else None
            if isinstance(section, dict):
                kept = without_sizes(section, value.strip())
                section.clear()
                section.update(kept)


def apply_override(content: dict[str, Any], override: str, root: type[BaseModel] = Experiment) -> tuple[str | int, ...]:
    """Set `path.to.key=value` in `content`, the content of a `root`, reading the value as YAML; return the path.

    List items are addressed by number (`data.train.0.weight=2`). Raises ConfigError for a malformed override.
    """
    name, equals, value_text = override.partition("=")
    parts = name.strip().split(".", _MAX_PARTS)
    if not equals or not all(parts) or len(parts) > _MAX_PARTS:
        raise ConfigError(f"`{printable(override)}` is not an override: write path.to.key=value")
    value = parse_value(value_text, f"the value of `{printable(override)}`")
    at: Any = content
    path: list[str | int] = []
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        if isinstance(at, list):
            if not part.isdecimal() or len(part) > 9 or int(part) >= len(at):  # int() refuses thousands of digits
                numbers = f"numbers 0 to {len(at) - 1}" if len(at) > 1 else "number 0"
                has = f"{len(at)} {'entry' if len(at) == 1 else 'entries'}, {numbers}" if at else "no entries"
                raise ConfigError(f"`{printable(name)}`: `{dotted(path)}` has {has}")
            key: str | int = int(part)
        elif isinstance(at, dict):
            key = part
        else:
            raise ConfigError(f"`{printable(name)}`: `{dotted(path)}` is a value, with no `{printable(part)}` inside")
        path.append(key)
        if last:
            at[key] = value
        else:
            if isinstance(at, dict) and at.get(part) is None:  # a section that the file omits or sets to null
                section = _section_at(path[:-1], root)
                if parts[i + 1].isdecimal() and section is not None and path[-1] in section.model_fields:
                    raise ConfigError(
                        f"`{printable(name)}`: `{dotted(path)}` is not given, so there is no entry {parts[i + 1]} to "
                        f"change; write the whole list: {dotted(path)}=[...]"
                    )
                at[part] = {}
            at = at[key]
    return tuple(path)


def change_section(
    section: AnySection, changes: Mapping[str, Any], path: str, besides: Sequence[str] = ()
) -> AnySection:
    """Return `section` with `changes`, checked as a whole; `path` is its key for errors, "" for a whole configuration.

    `besides` are other names that may be confused with keys: further arguments of a function that takes keys by name.

    A mapping in `changes` replaces single keys of an inner section, anything else replaces the whole value. Raises
    ConfigError, worded as for a file: a key is unknown or ill-typed, or keys conflict.
    """
    try:
        return type(section).model_validate(_merged(section, changes))
    except ValidationError as error:
        above, root = (tuple(path.split(".")), Experiment) if path else ((), type(section))
        raise _errors(
            error,
            lambda e: (*above, *e["loc"]),
            lambda e: _unknown_argument(e, besides) or _problem(e, (*above, *e["loc"]), False, root),
        ) from None


def _unknown_argument(error: Any, besides: Sequence[str]) -> str:
    """Return the message about a key that probably means one of the arguments `besides`; empty for others."""
    wrong = str(error["loc"][0]) if len(error["loc"]) == 1 and error["type"] == "extra_forbidden" else ""
    near = difflib.get_close_matches(wrong, besides, n=1, cutoff=0.6)
    others = [name for name in besides if name not in near]
    return f"unknown argument `{wrong}`; did you mean `{near[0]}`, or {', '.join(others)}?" if near else ""


def _merged(section: BaseModel, changes: Mapping[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {name: getattr(section, name) for name in type(section).model_fields}
    for name, value in changes.items():
        old = merged.get(name)
        merged[name] = _merged(old, value) if isinstance(old, BaseModel) and isinstance(value, Mapping) else value
    return merged


def _errors(
    error: ValidationError, location_of: Callable[[Any], tuple[str | int, ...]], said: Callable[[Any], str]
) -> ConfigError:
    """Return pydantic's problems as one error, one per line, with their keys (`location_of`) and texts (`said`)."""
    found = _one_for_each_key(error.errors())
    problems = []
    for e in found[:_MAX_ERRORS]:
        rule, section = _broken_rule(e), list(map(str, location_of(e)))
        key, *named = rule.names if isinstance(rule, ConfigError) and rule.names else ("",)
        whole = (".".join([*section, name]) for name in named)
        problems.append(Problem(".".join([*section, *([key] if key else [])]), said(e), named=tuple(whole)))
    more = [f"and {len(found) - _MAX_ERRORS:,} more"] if len(found) > _MAX_ERRORS else []
    return ConfigError(*problems, *more, between="\n")


def _one_for_each_key(found: Sequence[Any]) -> list[Any]:
    """Return pydantic's errors, one per value: pydantic reports one for each type it may have."""
    joined: list[Any] = []
    for error in found:
        *path, last = error["loc"] or ("",)
        if not (isinstance(last, str) and _TYPE.fullmatch(last)):
            joined.append(error)
        elif joined and joined[-1]["loc"] == tuple(path) and joined[-1]["type"] == _OF_SEVERAL:
            joined[-1]["msg"] += f" or {error['msg'].removeprefix('Input should be ')}"
        else:
            joined.append({**error, "loc": tuple(path), "type": _OF_SEVERAL})
    return joined


_OF_SEVERAL = "none_of_several_types"
_TYPE = re.compile(
    r"int|str|float|bool|(?:literal|list|dict|tuple)\[.*|(?:constrained|function|lax|strict)-.*", re.DOTALL
)
"""_TYPE matches how pydantic's location of an error ends for a value of several types; no key looks like it."""


def _broken_rule(error: Any) -> Exception | None:
    """Return the exception that one of our own rules raised and pydantic wrapped; None for pydantic's own errors."""
    return error["ctx"]["error"] if error["type"] == "value_error" else None


def _explain(error: Any, name: str, lines: Lines, overridden: set[tuple[str | int, ...]], root: type[BaseModel]) -> str:
    """Return the problem, preceded by the file and line (or `command line`, or both) where it was written."""
    location: tuple[str | int, ...] = tuple(error["loc"])
    # A missing key has no line; the line of its section is the nearest.
    known = _nearest_known(location, lines)
    if isinstance(broken := _broken_rule(error), ConfigError):
        known = _complained_of(broken, location, lines, overridden) or known
    inside = any(o[: len(location)] == location for o in overridden)
    # The file alone may break a rule of the whole configuration or of one section.
    of_both = inside and (not location or location in lines) and location not in overridden
    from_command_line = not of_both and (inside or any(location[: len(o)] == o for o in overridden))
    where = "command line" if from_command_line else f"{name}, line {lines[known]}" if known else name
    where += ", with your overrides" if of_both else ""
    return f"{where}: {_problem(error, location, from_command_line, root)}"


def _nearest_known(path: tuple[str | int, ...], lines: Lines) -> tuple[str | int, ...]:
    """Return a path, or that of the innermost enclosing section in the file; () if there is none."""
    while path and path not in lines:
        path = path[:-1]
    return path


def _complained_of(
    error: ConfigError, location: tuple[str | int, ...], lines: Lines, overridden: set[tuple[str | int, ...]]
) -> tuple[str | int, ...]:
    """Return the path of the key that a rule of the section at `location` complains about; () if the file lacks it.

    For a rule of the whole file, it is the first of the rule's keys that the file has: others may be missing.
    """
    first = [error.problems[0].key]
    for key in first if location else [key for problem in error.problems for key in (problem.key, *problem.named)]:
        path = (*location, *(int(part) if part.isdecimal() else part for part in key.split(".")))
        if any(path[: len(o)] == o for o in overridden):
            continue  # the file has a different value there, or none
        if len(known := _nearest_known(path, lines)) > len(location):
            return known
    return ()


def _problem(error: Any, location: tuple[str | int, ...], from_command_line: bool, root: type[BaseModel]) -> str:
    """Return pydantic's complaint about the key at `location`, reworded for users."""
    named = dotted(location)
    kind = error["type"]
    if kind == "extra_forbidden":
        return f"unknown key `{named}`{_suggested_key(location, root)}"
    if kind == "missing":
        return f"`{named}` is missing"
    if kind == "model_type" and (section := _section_at(location, root)):
        return f"`{named}` is a section, not a value; its keys: {', '.join(section.model_fields)}"
    given = f", not {printable(repr(error['input']), 60)}" if not isinstance(error["input"], dict) else ""
    message = error["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        return f"`{named}`: {message}" if named else message
    if kind == _OF_SEVERAL and (section := _section_at(location[:-1], root)) and location[-1] in section.model_fields:
        may_be_null = type(None) in get_args(section.model_fields[str(location[-1])].annotation)
        message += " or null" if may_be_null else ""
    hint = _suggest_value(error, named) or _suggest_quotes(error, named, from_command_line)
    return f"`{named}`: {message[0].lower()}{message[1:]}{given}{hint}"


def _suggest_value(error: Any, named: str) -> str:
    if error["type"] != "literal_error" or not isinstance(error["input"], str):
        return ""
    choices = re.findall(r"'([^']*)'", error["ctx"]["expected"])
    by_name, by_value = other_names_of(error["input"], named)
    near = [choice for choice in choices if error["input"].startswith(choice)] or list(filter(None, [by_name]))
    near = near or difflib.get_close_matches(error["input"], choices, n=1, cutoff=0.5) or list(filter(None, [by_value]))
    return f"; did you mean `{near[0]}`?" if near else ""


def _suggest_quotes(error: Any, named: str, from_command_line: bool) -> str:
    """Return a hint if YAML read text as a truth value, a number or a date."""
    given = error["input"]
    if error["type"] != "string_type" or not isinstance(given, bool | int | float | datetime.date):
        return ""
    if not isinstance(given, bool):
        return "; put text that looks like a number or a date in quotes"
    word = "yes" if given else "no"
    quoted = f"\"{named}='{word}'\"" if from_command_line else f"'{word}'"
    others = "`yes`, `on` and `true`" if given else "`no`, `off` and `false`"
    return f"; YAML reads {others} as truth values: put the word in quotes, {quoted}"
