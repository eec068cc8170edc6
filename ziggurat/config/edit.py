"""A configuration with some keys changed, as the text that a person would have written.

What stands in a file stays there, comments included; only the values of changed keys are replaced, and keys that are
not there are added. Of a recipe and its overrides the shortest configuration is written, without a value that is the
default anyway. Either way the text is parsed again: where it does not say what it should, everything is written out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from pydantic import ValidationError

from ziggurat.config.experiment import Experiment
from ziggurat.config.load import apply_override, dump, make_room_for_presets, parse_experiment
from ziggurat.config.recipes import NamedText
from ziggurat.config.yaml_text import compose, dotted, in_line, parse_yaml, to_yaml
from ziggurat.errors import ConfigError, printable

__all__ = ["edited", "shortest"]

_Path = tuple[str | int, ...]


def edited(named: NamedText, overrides: Sequence[str], changes: Mapping[str, Any], result: Experiment) -> str:
    """Return YAML text that loads as `result`: `named` with `overrides`, and then with `changes`.

    Args:
        named: a file or recipe.
        overrides: `path.to.key=value`, as on the command line.
        changes: dotted key -> value.
        result: the configuration with all of this.
    """
    content, _ = parse_yaml(named.text, named.label)
    put: list[tuple[_Path, Any]] = []
    make_room_for_presets(content, overrides)
    for override in (*overrides, *(f"{key}={in_line(value)}" for key, value in changes.items())):
        path = apply_override(content, override)
        put.append((path, _at(content, path)))
    if named.recipe is None:
        text = named.text
        for path, value in put:
            text = _with(text, path, value)
        if _content(text) != content:  # anchors, merged keys, commas before closing braces, ...
            text = to_yaml(content)
    else:
        set_there = " ".join(printable(override) for override in overrides)
        added = ", ".join(f"`{key}`" for key in dict.fromkeys(key.partition(".")[0] for key in changes))
        origin = f"recipe {named.recipe} {set_there}".rstrip()
        text = f"# {origin}, changed in {added}\n{to_yaml(shortest(content, result), compact=True)}"
    try:
        same = parse_experiment(text, named.label) == result
    except ConfigError:
        same = False
    return text if same else dump(result)


def shortest(content: Mapping[str, Any], result: Experiment) -> dict[str, Any]:
    """Return `content` without any key that is not needed for it to be the configuration `result`."""
    kept = dict(content)
    for path in _sections_first(kept):
        less = _without(kept, path)
        try:
            same = less is not None and Experiment.model_validate(less) == result
        except ValidationError:
            same = False
        if same and less is not None:
            kept = less
    return kept


def _sections_first(content: Mapping[str, Any], above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the paths of all keys, a section before what is in it."""
    found: list[tuple[str, ...]] = []
    for key, value in content.items():
        found.append((*above, key))
        if isinstance(value, Mapping):
            found += _sections_first(value, (*above, key))
    return found


def _without(content: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any] | None:
    """Return a copy without the key at `path`; None where it has gone with its section."""
    if path[0] not in content:
        return None
    if len(path) == 1:
        return {key: value for key, value in content.items() if key != path[0]}
    inner = _without(content[path[0]], path[1:])
    return None if inner is None else {**content, path[0]: inner}


def _at(content: Any, path: _Path) -> Any:
    for key in path:
        content = content[key]
    return content


def _content(text: str) -> Any:
    try:
        return parse_yaml(text, "")[0]
    except ConfigError:
        return None


def _with(text: str, path: _Path, value: Any) -> str:
    """Return YAML text with `value` at `path`: in place of the value there, or behind the keys of its section."""
    try:
        node = compose(text)
    except (yaml.YAMLError, ConfigError):  # by an edit before this one
        return text
    for done, key in enumerate(path):
        inner = _child(node, key)
        if inner is None:
            return _inserted(text, node, key, _nested(path[done + 1 :], value))
        rest = path[done + 1 :]
        if not rest or isinstance(inner, yaml.ScalarNode):  # the value itself, or null where a section is to be
            return _replaced(text, inner, _nested(rest, value))
        node = inner
    return text


def _nested(path: _Path, value: Any) -> Any:
    for key in reversed(path):
        value = {key: value}
    return value


def _child(node: yaml.Node | None, key: str | int) -> yaml.Node | None:
    if isinstance(node, yaml.SequenceNode) and isinstance(key, int):
        return node.value[key] if key < len(node.value) else None
    if isinstance(node, yaml.MappingNode):
        return next((value for name, value in node.value if name.value == key), None)
    return None


def _replaced(text: str, node: yaml.Node, value: Any) -> str:
    start = node.start_mark.index
    gap = " " if text[:start].endswith(":") else ""  # of a key without a value
    return f"{text[:start]}{gap}{in_line(value)}{text[max(start, _end(text, node)) :]}"


def _inserted(text: str, node: yaml.Node | None, key: str | int, value: Any) -> str:
    entry = f"{dotted([key])}: {in_line(value)}"
    if not isinstance(node, yaml.MappingNode):
        return f"{text.rstrip()}\n{entry}\n".lstrip("\n")
    if node.flow_style:
        brace = node.end_mark.index - 1
        return f"{text[:brace]}{', ' if node.value else ''}{entry}{text[brace:]}"
    line = text.find("\n", _end(text, node))
    before, after = (text, "\n") if line < 0 else (text[:line], text[line:])
    return f"{before}\n{' ' * node.start_mark.column}{entry}{after}"


def _end(text: str, node: yaml.Node) -> int:
    """Return the place behind the last character of a value; that of a block would be where the next key begins."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(text, last[1] if isinstance(last, tuple) else last)
    return len(text[: node.end_mark.index].rstrip())
