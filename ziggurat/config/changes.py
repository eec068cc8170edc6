"""Which keys differ between two configurations, for messages that name them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ziggurat.errors import printable

__all__ = ["changed", "flattened", "shown"]


def flattened(content: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings and lists by dotted key, list items by number from 0.

    An empty mapping or list is a value: one that has lost its last item differs from one that never was.
    """
    if isinstance(content, Mapping) and content:
        items = [(str(key), value) for key, value in content.items()]
    elif isinstance(content, list) and content:
        items = [(str(number), value) for number, value in enumerate(content)]
    else:
        return {prefix: content}
    return {
        key: value
        for name, inner in items
        for key, value in flattened(inner, f"{prefix}.{name}" if prefix else name).items()
    }


def changed(before: Any, after: Any) -> list[str]:
    """Return `key: old -> new` for every dotted key whose value differs or that only one of the two has."""
    old, new = flattened(before), flattened(after)
    keys = [*old, *(key for key in new if key not in old)]
    return [
        f"{key}: {_said(old, key)} -> {_said(new, key)}"
        for key in keys
        # 1, 1.0 and true are equal in Python and not in a configuration; JSON spells them apart.
        if (key in old) != (key in new) or _spelt(old[key]) != _spelt(new[key])
    ]


def shown(changes: list[str], most: int = 6) -> str:
    """Return `changes` for one line of a message, at most `most` of them written out."""
    more = f"; and {len(changes) - most} more" if len(changes) > most else ""
    return "; ".join(changes[:most]) + more


def _said(values: Mapping[str, Any], key: str) -> str:
    return printable(_spelt(values[key]), 40) if key in values else "(not given)"


def _spelt(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
