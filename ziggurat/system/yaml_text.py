"""Conversion between YAML text and values within limits, and comparison of nested settings.

A file of a few hundred bytes must not take gigabytes or minutes. Aliases can double the size of a document with every
line, so values are counted before they are constructed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from ziggurat.system.errors import ConfigError, printable

Lines = dict[tuple[str | int, ...], int]

MAX_YAML_BYTES = 1 << 20
"""MAX_YAML_BYTES limits YAML text. A resolved configuration takes 12 kB, plus 250 bytes per corpus."""

_MAX_NODES = 50_000
"""_MAX_NODES limits the values of a document, including keys; an alias's values count at each use. This is enough for
2,000 corpora and takes PyYAML 3 seconds."""

MAX_DEPTH = 32
_MAX_DIGITS = 100
"""_MAX_DIGITS limits the text of a number. Python itself refuses 4,300 digits, and YAML's base-60 numbers (`1:30:00`)
take quadratic time."""


class _Loader(yaml.SafeLoader):
    """Safe loader with the limits above that reads `1e-3` as a number (text in YAML 1.1)."""

    name = "YAML"
    nodes = depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the next value with everything inside it. Raises ConfigError as soon as a limit is exceeded."""
        self.nodes, self.depth = self.nodes + 1, self.depth + 1
        if self.depth > MAX_DEPTH or self.nodes > _MAX_NODES:
            line = self.line + 1
            raise ConfigError(f"{self.name}, line {line}: {_too_much(self.depth > MAX_DEPTH)}")
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return the value of a node. Raises ConfigError with the line for impossible values, such as month 13."""
        if not isinstance(node, yaml.ScalarNode):
            return super().construct_object(node, deep)
        text = str(node.value)
        kind = node.tag.rpartition(":")[2]
        if kind in ("int", "float") and len(text) > _MAX_DIGITS:
            raise ConfigError(f"{self._place(node)}: a number of {len(text):,} characters; the limit is {_MAX_DIGITS}")
        if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
            raise ConfigError(f"{self._place(node)}: {printable(text)} contains NUL or half a character; remove it")
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError):
            raise ConfigError(f"{self._place(node)}: {printable(text)} is not a value of the kind {kind}") from None

    def _place(self, node: yaml.Node) -> str:
        return f"{self.name}, line {node.start_mark.line + 1}"


class _Dumper(yaml.SafeDumper):
    """Safe dumper that quotes text that _Loader would read as a number."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)$"),
        list("-+0123456789."),
    )


def _too_much(deep: bool) -> str:
    if deep:
        return f"nested more than {MAX_DEPTH} deep, or an alias that contains itself"
    return f"more than {_MAX_NODES:,} values, counting aliases at each use: no configuration has so many"


def parse_yaml(text: str, name: str) -> tuple[dict[str, Any], Lines]:
    """Return the mapping in `text` and the line (from 1) of each of its keys; errors call the text `name`.

    Raises ConfigError for invalid YAML, text beyond the limits above, a duplicate key, or a top level that is not a
    mapping.
    """
    content, lines = _parse(text, name)
    if content is None:
        return {}, {}
    if not isinstance(content, dict):
        raise ConfigError(f"{name}: expected sections such as `data:` and `model:`, found {type(content).__name__}")
    return content, lines


def parse_value(text: str, name: str) -> Any:
    """Return the YAML value in `text`, with the limits and errors of parse_yaml."""
    return _parse(text, name)[0]


def _parse(text: str, name: str) -> tuple[Any, Lines]:
    if len(text) > MAX_YAML_BYTES:
        raise ConfigError(f"{name}: longer than {MAX_YAML_BYTES >> 20} MiB: no configuration is that long")
    lines: Lines = {}
    try:
        loader = _Loader(text)  # raises ReaderError at once for control characters
        loader.name = name
        try:
            root = loader.get_single_node()
            if root is None:
                return None, lines
            # Counted before construction, which copies merge keys (`<<`).
            _collect_lines(root, (), lines, name, [0])
            # PyYAML shares one object between all uses of an alias; an override of one must not change the others.
            return _unshared(loader.construct_document(root)), lines
        finally:
            loader.dispose()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"{name}, line {line}: the character U+{int(error.character):04X} is not allowed in YAML; remove it, or "
            "write it as an escape in double quotes"
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}, line {mark.line + 1}, column {mark.column + 1}" if mark else name
        said = printable(str(getattr(error, "problem", None) or error), 200)
        if alias := re.fullmatch("found undefined alias '(.*)'", said):
            anchor = alias[1]
            gone = f"`*{anchor}` repeats what is marked `&{anchor}` above it, but nothing is"
            raise ConfigError(f"{where}: {gone}; mark a section, or write the values out") from None
        raise ConfigError(f"{where}: not valid YAML: {said}") from None
    except (ValueError, OverflowError, UnicodeError) as error:  # from the scanner, for \UFFFFFFFF
        raise ConfigError(f"{name}: not valid YAML: {printable(str(error), 200)}") from None


def _collect_lines(node: yaml.Node, path: tuple[str | int, ...], lines: Lines, name: str, seen: list[int]) -> None:
    """Store the line of every key in `lines`; aliases are followed, and `seen[0]` counts the values."""
    seen[0] += 1
    if seen[0] > _MAX_NODES or len(path) > MAX_DEPTH:
        raise ConfigError(f"{name}, line {node.start_mark.line + 1}: {_too_much(len(path) > MAX_DEPTH)}")
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{name}, line {line}: a key must be a word, not a list or a section")
            key = str(key_node.value)
            here = (*path, key)
            if here in lines:
                raise ConfigError(
                    f"{name}, line {line}: `{dotted(here)}` is given twice (first in line {lines[here]}); remove one"
                )
            lines[here] = line
            seen[0] += 1
            _collect_lines(value_node, here, lines, name, seen)
    elif isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            _collect_lines(item, (*path, i), lines, name, seen)


def _unshared(value: Any) -> Any:
    """Return a copy in which no section or list is shared between two keys."""
    if isinstance(value, dict):
        return {key: _unshared(part) for key, part in value.items()}
    return [_unshared(part) for part in value] if isinstance(value, list) else value


def dotted(path: Sequence[str | int]) -> str:
    """Return a path as users write it: `data.train.0.source`."""
    return ".".join(printable(str(p)) for p in path)


def to_yaml(content: Mapping[str, Any], *, compact: bool = False) -> str:
    """Return `content` as YAML that parse_yaml reads back; `compact` puts innermost mappings and lists on one line."""
    flow = None if compact else False
    return yaml.dump(
        dict(content), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110, default_flow_style=flow
    )


def changed(before: Any, after: Any) -> list[str]:
    """Return `key: old -> new` for every dotted key whose value differs or that only one side has."""
    old, new = settings_by_key(before, items=True), settings_by_key(after, items=True)
    keys = [*old, *(key for key in new if key not in old)]
    return [
        f"{key}: {_said(old, key)} -> {_said(new, key)}"
        for key in keys
        # 1, 1.0 and True are equal in Python but not in a configuration; JSON spells them differently.
        if ((key in old) != (key in new) or _spelt(old[key]) != _spelt(new[key]))
        and not _filled(key, old, new)
        and not _filled(key, new, old)
    ]


def _filled(key: str, settings: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Return True if a section is empty in `settings` and has keys in `others`, which then show the difference."""
    empty = key in settings and settings[key] in ({}, [])
    return empty and any(other.startswith(f"{key}.") for other in others)


def keys_of(changes: Iterable[str]) -> list[str]:
    """Return the dotted keys at the start of the lines of `changed` or of ziggurat.data.store_checks.differences."""
    return [line.split()[0].rstrip(":") for line in changes]


def shown(changes: list[str], most: int = 6) -> str:
    """Return `changes` on one line for a message, with at most `most` of them in full."""
    more = f"; and {len(changes) - most} more" if len(changes) > most else ""
    return "; ".join(changes[:most]) + more


def settings_by_key(content: Any, prefix: str = "", *, items: bool = False) -> dict[str, Any]:
    """Return the values of nested sections by dotted key; `items`: also those of lists, by number from 0."""
    # An empty section or list counts as a value: a list that lost its last item differs from a missing one.
    if isinstance(content, Mapping) and content:
        inner = [(str(key), value) for key, value in content.items()]
    elif items and isinstance(content, list) and content:
        inner = [(str(number), value) for number, value in enumerate(content)]
    else:
        return {prefix: content}
    return {
        key: value
        for name, part in inner
        for key, value in settings_by_key(part, f"{prefix}.{name}" if prefix else name, items=items).items()
    }


def _said(values: Mapping[str, Any], key: str) -> str:
    return printable(_spelt(values[key]), 40) if key in values else "(not given)"


def _spelt(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
