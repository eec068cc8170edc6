"""JSON Schemas (2020-12) of what paths take and answer, in few words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Schema = dict[str, Any]


def text(about: str = "", *values: str, **more: Any) -> Schema:
    """Return the schema of a text, of these `values` where any are given."""
    return _about({"type": "string", **({"enum": list(values)} if values else {}), **more}, about)


def whole(about: str = "", **more: Any) -> Schema:
    """Return the schema of a whole number."""
    return _about({"type": "integer", **more}, about)


def number(about: str = "", **more: Any) -> Schema:
    """Return the schema of a number."""
    return _about({"type": "number", **more}, about)


def flag(about: str = "") -> Schema:
    """Return the schema of true or false."""
    return _about({"type": "boolean"}, about)


def listed(items: Schema, about: str = "", **more: Any) -> Schema:
    """Return the schema of a list."""
    return _about({"type": "array", "items": items, **more}, about)


def record(properties: Mapping[str, Schema], about: str = "", *, optional: Sequence[str] = ()) -> Schema:
    """Return the schema of an object that has these properties, but for the `optional` ones always."""
    required = [name for name in properties if name not in optional]
    return _about({"type": "object", "properties": dict(properties), "required": required}, about)


def _about(schema: Schema, about: str) -> Schema:
    return {**schema, "description": about} if about else schema
