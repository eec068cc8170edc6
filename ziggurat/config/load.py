"""YAML <-> configuration: strict, with the file, line, dotted path and nearest valid name in every error."""

from __future__ import annotations

import datetime
import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from ziggurat.config.experiment import Experiment
from ziggurat.errors import ConfigError, printable

__all__ = ["apply_override", "change_section", "dump", "load_experiment", "parse_experiment", "parse_yaml", "to_yaml"]

Lines = dict[tuple[str | int, ...], int]
AnySection = TypeVar("AnySection", bound=BaseModel)


class _Loader(yaml.SafeLoader):
    """Safe loader that reads `1e-3` as a number (YAML 1.1 takes it for text) and refuses duplicate keys."""


class _Dumper(yaml.SafeDumper):
    """Safe dumper that puts in quotes what _Loader would take for a number."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)$"),
        list("-+0123456789."),
    )


def parse_yaml(text: str, name: str) -> tuple[dict[str, Any], Lines]:
    """Return the mapping in `text` and the line (from 1) of each of its keys; `name` is used in errors.

    Raises ConfigError for broken YAML, a duplicate key, or anything but a mapping at the top.
    """
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return {}, {}
        lines: Lines = {}
        _collect_lines(root, (), lines, name)
        content = loader.construct_document(root)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}, line {mark.line + 1}, column {mark.column + 1}" if mark else name
        raise ConfigError(f"{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    except RecursionError:
        raise ConfigError(f"{name}: nested too deeply, or an alias that contains itself") from None
    finally:
        loader.dispose()
    if not isinstance(content, dict):
        raise ConfigError(f"{name}: expected sections such as `data:` and `model:`, found {type(content).__name__}")
    return content, lines


def _collect_lines(node: yaml.Node, path: tuple[str | int, ...], lines: Lines, name: str) -> None:
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            key = str(key_node.value)
            here = (*path, key)
            if here in lines:
                raise ConfigError(
                    f"{name}, line {key_node.start_mark.line + 1}: `{_dotted(here)}` is given twice "
                    f"(first in line {lines[here]}); remove one"
                )
            lines[here] = key_node.start_mark.line + 1
            _collect_lines(value_node, here, lines, name)
    elif isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            _collect_lines(item, (*path, i), lines, name)


def apply_override(content: dict[str, Any], override: str) -> tuple[str | int, ...]:
    """Set `path.to.key=value` inside `content`; the value is read as YAML. Returns the path.

    List items are addressed by number (`data.train.0.weight=2`). Raises ConfigError for a malformed override.
    """
    dotted, equals, value_text = override.partition("=")
    parts = dotted.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"`{printable(override)}` is not an override: write path.to.key=value")
    try:
        value = yaml.load(value_text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"`{printable(override)}`: the value is not valid YAML: {error}") from None
    at: Any = content
    path: list[str | int] = []
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        if isinstance(at, list):
            if not part.isdecimal() or int(part) >= len(at):
                raise ConfigError(f"`{dotted}`: `{_dotted(path)}` {_entries(len(at))}")
            key: str | int = int(part)
        elif isinstance(at, dict):
            key = part
        else:
            raise ConfigError(f"`{dotted}`: `{_dotted(path)}` is a value, it has no `{part}` inside")
        path.append(key)
        if last:
            at[key] = value
        else:
            if isinstance(at, dict) and at.get(part) is None:
                if parts[i + 1].isdecimal() and _is_key(path):
                    raise ConfigError(
                        f"`{dotted}`: no `{_dotted(path)}` is given, so there is no entry {parts[i + 1]} to change; "
                        f"write the whole list: {_dotted(path)}=[...]"
                    )
                at[part] = {}
            at = at[key]
    return tuple(path)


def _entries(count: int) -> str:
    """Say how many entries a list has and how to name one."""
    if count == 0:
        return "has no entries"
    if count == 1:
        return "has 1 entry, number 0"
    return f"has {count} entries, numbers 0 to {count - 1}"


def load_experiment(path: str | Path, overrides: Sequence[str] = ()) -> Experiment:
    """Read one YAML file, apply the overrides and return the checked configuration.

    Raises ConfigError: file missing, not UTF-8, broken YAML, unknown or ill-typed key, keys in conflict.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        beside = [entry.name for entry in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        near = [str(path.with_name(name)) for name in difflib.get_close_matches(path.name, beside, n=1, cutoff=0.7)]
        hint = f"did you mean `{near[0]}`?" if near else "`ziggurat recipes` lists the built-in ones"
        raise ConfigError(f"{path}: no such configuration file; {hint}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder, expected a YAML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    return parse_experiment(text, str(path), overrides)


def parse_experiment(text: str, name: str, overrides: Sequence[str] = ()) -> Experiment:
    """Like load_experiment, for YAML text that is called `name` in errors."""
    content, lines = parse_yaml(text, name)
    overridden = {apply_override(content, override) for override in overrides}
    try:
        return Experiment.model_validate(content)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(e, name, lines, overridden) for e in error.errors())) from None


def change_section(section: AnySection, changes: Mapping[str, Any], path: str) -> AnySection:
    """Return `section`, which stands under `path` in the configuration, with `changes`, checked as a whole.

    Inside `changes` a mapping replaces single keys of an inner section, anything else the whole value. Raises
    ConfigError, worded as for a file: unknown or ill-typed key, keys in conflict.
    """
    try:
        return type(section).model_validate(_merged(section, changes))
    except ValidationError as error:
        said = [_problem(e, (*path.split("."), *e["loc"]), from_command_line=False) for e in error.errors()]
        raise ConfigError("\n".join(said)) from None


def _merged(section: BaseModel, changes: Mapping[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {name: getattr(section, name) for name in type(section).model_fields}
    for name, value in changes.items():
        old = merged.get(name)
        merged[name] = _merged(old, value) if isinstance(old, BaseModel) and isinstance(value, Mapping) else value
    return merged


def _explain(error: Any, name: str, lines: Lines, overridden: set[tuple[str | int, ...]]) -> str:
    """Return what is wrong, behind the place where it was written."""
    location: tuple[str | int, ...] = tuple(error["loc"])
    known = location
    while known and known not in lines:
        known = known[:-1]
    from_command_line = any(location[: len(o)] == o or o[: len(location)] == location for o in overridden)
    where = "command line" if from_command_line else f"{name}, line {lines[known]}" if known in lines else name
    return f"{where}: {_problem(error, location, from_command_line)}"


def _problem(error: Any, location: tuple[str | int, ...], from_command_line: bool) -> str:
    """Return what pydantic found wrong with the key at `location`, in the words of this configuration."""
    dotted = _dotted(location)
    kind = error["type"]
    if kind == "extra_forbidden":
        return f"unknown key `{dotted}`{_suggest(location)}"
    if kind == "missing":
        return f"`{dotted}` is missing"
    if kind == "model_type" and (section := _section_at(location)):
        return f"`{dotted}` is a section, not a value; its keys: {', '.join(section.model_fields)}"
    given = f", not {printable(repr(error['input']), 60)}" if not isinstance(error["input"], dict) else ""
    message = error["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        return f"`{dotted}`: {message}" if dotted else message
    hint = _suggest_value(error) or _suggest_quotes(error, dotted, from_command_line)
    return f"`{dotted}`: {message[0].lower()}{message[1:]}{given}{hint}"


def _section_at(location: Sequence[str | int]) -> type[BaseModel] | None:
    """Return the section class that a dotted path leads to, if it is one."""
    section: type[BaseModel] | None = Experiment
    for key in location:
        if section is None or isinstance(key, int):
            continue
        field = section.model_fields.get(key)
        section = next((s for s in _classes(field.annotation) if issubclass(s, BaseModel)), None) if field else None
    return section


def _classes(annotation: Any) -> list[type]:
    if isinstance(annotation, type) and not get_args(annotation):
        return [annotation]
    return [c for argument in get_args(annotation) for c in _classes(argument)]


def _suggest(location: Sequence[str | int]) -> str:
    wrong, section = str(location[-1]), _section_at(location[:-1])
    if section is None:
        return ""
    names = list(section.model_fields)
    if near := difflib.get_close_matches(wrong, names, n=2, cutoff=0.6):
        return "; did you mean " + " or ".join(f"`{_dotted((*location[:-1], n))}`" for n in near) + "?"
    inside = _dotted(location[:-1])
    elsewhere = [p for p in _all_paths(Experiment) if p.rsplit(".", 1)[-1].startswith(wrong)]
    if elsewhere:
        near_by = sorted(elsewhere, key=lambda p: (not p.startswith(inside), len(p), p))
        return f"; did you mean `{near_by[0]}`?"
    return "; valid here: " + ", ".join(names)


def _suggest_value(error: Any) -> str:
    if error["type"] != "literal_error" or not isinstance(error["input"], str):
        return ""
    choices = re.findall(r"'([^']*)'", error["ctx"]["expected"])
    near = [choice for choice in choices if error["input"].startswith(choice)]
    near = near or difflib.get_close_matches(error["input"], choices, n=1, cutoff=0.5)
    return f"; did you mean `{near[0]}`?" if near else ""


def _suggest_quotes(error: Any, dotted: str, from_command_line: bool) -> str:
    """Return a hint where YAML took text for a truth value, a number or a date."""
    given = error["input"]
    if error["type"] != "string_type" or not isinstance(given, bool | int | float | datetime.date):
        return ""
    if not isinstance(given, bool):
        return "; put text that looks like a number or a date in quotes"
    word = "yes" if given else "no"
    quoted = f"\"{dotted}='{word}'\"" if from_command_line else f"'{word}'"
    others = "`yes`, `on` and `true`" if given else "`no`, `off` and `false`"
    return f"; YAML takes {others} for truth values: put the word in quotes, {quoted}"


def _is_key(path: Sequence[str | int]) -> bool:
    """Whether a dotted path leads to a key of the configuration."""
    section = _section_at(path[:-1])
    return section is not None and path[-1] in section.model_fields


def _all_paths(section: type[BaseModel], prefix: str = "") -> list[str]:
    paths = []
    for name, field in section.model_fields.items():
        paths.append(prefix + name)
        for inner in _classes(field.annotation):
            if issubclass(inner, BaseModel):
                paths += _all_paths(inner, f"{prefix}{name}.")
    return paths


def _dotted(path: Sequence[str | int]) -> str:
    return ".".join(str(p) for p in path)


def dump(config: BaseModel) -> str:
    """Return the resolved configuration as YAML; load_experiment reads it back to an equal object."""
    return to_yaml(config.model_dump(mode="json"))


def to_yaml(content: Mapping[str, Any], *, compact: bool = False) -> str:
    """Return `content` as YAML that parse_yaml reads back; `compact` puts innermost mappings and lists on one line."""
    flow = None if compact else False
    return yaml.dump(
        dict(content), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110, default_flow_style=flow
    )
