"""The interfaces that a server has, and how each says that something is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ziggurat.serve.interfaces.schemas import Schema, record, text


@dataclass(frozen=True)
class Dialect:
    """An interface as programs know it: its paths, and how it says that something is wrong.

    Attributes:
        name: for people.
        prefix: its paths begin so.
        error: an error's content, given the status and a text.
        error_schema: the schema of that.
        security: how a key is given, by a name of that way; as OpenAPI has it. Empty: in a field.
    """

    name: str
    prefix: str
    error: Callable[[int, str], Schema]
    error_schema: Schema
    security: Mapping[str, Schema] = field(default_factory=dict)


def _plain(status: int, said: str) -> Schema:
    return {"error": said}


def _deepl(status: int, said: str) -> Schema:
    return {"message": said}


def _openai(status: int, said: str) -> Schema:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": said, "type": kind, "param": None, "code": None}}


_PLAIN = record({"error": text()})
_NULL: Schema = {"type": ["string", "null"]}
_KIND = text("", "invalid_request_error", "server_error")
_OPENAI = record({"error": record({"message": text(), "type": _KIND, "param": _NULL, "code": _NULL})})
_BEARER: Schema = {"bearer": {"type": "http", "scheme": "bearer"}}
_KEY: Schema = {
    "type": "apiKey",
    "in": "header",
    "name": "Authorization",
    "description": "`DeepL-Auth-Key` and the key",
}

LIBRETRANSLATE = Dialect("LibreTranslate", "/", _plain, _PLAIN)
SERVER = Dialect("Server", "/", _plain, _PLAIN, _BEARER)
DEEPL = Dialect("DeepL", "/v2", _deepl, record({"message": text()}), {"DeepL-Auth-Key": _KEY})
OPENAI = Dialect("OpenAI", "/v1", _openai, _OPENAI, _BEARER)
OWN = Dialect("Ziggurat", "/v1", _openai, _OPENAI, _BEARER)


def dialect_of(path: str) -> Dialect:
    """Return the interface that a path belongs to, even one that there is not."""
    own = (each for each in (DEEPL, OPENAI) if f"{path}/".startswith(f"{each.prefix}/"))
    return next(own, LIBRETRANSLATE)
