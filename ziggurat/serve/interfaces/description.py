"""What paths take and answer, declared once: requests are read by it, and `GET /spec` tells it (OpenAPI 3.1).

Whoever answers a request sees the declared fields alone, so that no path takes what /spec does not say.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ziggurat import __version__
from ziggurat.serve.interfaces.dialects import Dialect
from ziggurat.serve.interfaces.schemas import Schema, record, text
from ziggurat.serve.requests import Refused, fields_of, upload_of
from ziggurat.system.errors import printable

_CONVERTER = re.compile(r":\w+\}")
_JSON, _FORM, _UPLOAD = "application/json", "application/x-www-form-urlencoded", "multipart/form-data"


@dataclass(frozen=True)
class Field:
    """A field of a request: its name, its schema, and whether there must be one."""

    name: str
    schema: Schema
    required: bool = False


@dataclass(frozen=True)
class Operation:
    """What is done at a path.

    Attributes:
        dialect: whose it is.
        summary: in a line.
        takes: fields of the request, in the query or, where it is posted, as JSON or a form.
        answer: the schema of the answer as JSON; None: it is none.
        kinds: further kinds of content, each with what it is; of documents, any.
        status: of the answer.
        file: whether the request is a form with a file.
        strict: whether other fields than its own are refused (400). Programs written for another server send some that
            do not matter here; a field of ours that is misspelt would be a wish that nobody hears.
    """

    dialect: Dialect
    summary: str
    takes: Sequence[Field] = ()
    answer: Schema | None = None
    kinds: Mapping[str, str] = field(default_factory=dict)
    status: int = 200
    file: bool = False
    strict: bool = False

    async def fields(self, request: Request) -> dict[str, Any]:
        """Return the fields of a request, as `fields_of` does; only those that it takes."""
        return self._declared(await fields_of(request))

    @asynccontextmanager
    async def upload(self, request: Request) -> AsyncIterator[tuple[dict[str, Any], UploadFile]]:
        """Read a form with a file, as `upload_of` does; only the fields that it takes."""
        async with upload_of(request) as (fields, file):
            yield self._declared(fields), file

    def _declared(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        names = [each.name for each in self.takes]
        if self.strict and (unknown := [name for name in fields if name not in names]):
            near = difflib.get_close_matches(unknown[0], names, n=1, cutoff=0.6)
            hint = f"did you mean `{near[0]}`?" if near else f"there are: {', '.join(names)}"
            raise Refused(400, f"unknown field `{printable(unknown[0])}`; {hint}")
        return {each.name: fields[each.name] for each in self.takes if each.name in fields}

    def described(self, path: str, method: str) -> Schema:
        """Return the operation as OpenAPI has it."""
        parameters = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"\{(\w+)\}", path)
        ]
        found: Schema = {
            "operationId": re.sub(r"\W+", "_", f"{method}{path}").strip("_").lower(),
            "summary": self.summary,
            "tags": [self.dialect.name],
            "responses": {
                str(self.status): {"description": "the answer", **self._content()},
                "default": {
                    "description": "what is wrong",
                    "content": {_JSON: {"schema": {"$ref": f"#/components/schemas/{_error_name(self.dialect)}"}}},
                },
            },
        }
        if self.takes and method == "POST":
            kinds = (_UPLOAD,) if self.file else (_JSON, _FORM)
            found["requestBody"] = {"content": {kind: {"schema": self._body()} for kind in kinds}, "required": True}
        elif method == "GET":
            parameters += [
                {"name": each.name, "in": "query", "required": each.required, "schema": each.schema}
                for each in self.takes
            ]
        if parameters:
            found["parameters"] = parameters
        if self.dialect.security:
            found["security"] = [{}, *({name: []} for name in self.dialect.security)]
        return found

    def _content(self) -> Schema:
        content: Schema = {kind: {"schema": text(what)} for kind, what in self.kinds.items()}
        if self.answer is not None:
            content[_JSON] = {"schema": self.answer}
        return {"content": content} if content else {}

    def _body(self) -> Schema:
        properties = {each.name: each.schema for each in self.takes}
        if self.file:
            properties = {"file": text("the document", format="binary"), **properties}
        required = [each.name for each in self.takes if each.required]
        return {**record(properties), "required": [*(["file"] if self.file else []), *required]}


class Described(Route):
    """A path whose operation is declared."""

    def __init__(
        self,
        path: str,
        endpoint: Callable[[Request], Awaitable[Response]],
        operation: Operation,
        methods: Sequence[str] = ("GET",),
    ) -> None:
        super().__init__(path, endpoint, methods=list(methods))
        self.operation = operation


def specification(routes: Sequence[Described]) -> Schema:
    """Return the description of all paths (OpenAPI 3.1). Some programs recognise a server by its title."""
    paths: dict[str, Schema] = {}
    dialects = {route.operation.dialect.name: route.operation.dialect for route in routes}
    for route in routes:
        path = _CONVERTER.sub("}", route.path)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = route.operation.described(path, method)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "LibreTranslate",
            "version": "1.9.6",
            "description": f"An interface compatible with LibreTranslate, and others, by Ziggurat {__version__}.",
        },
        "tags": [{"name": name} for name in dialects],
        "paths": paths,
        "components": {
            "schemas": {_error_name(each): each.error_schema for each in dialects.values()},
            "securitySchemes": {name: way for each in dialects.values() for name, way in each.security.items()},
        },
    }


def _error_name(dialect: Dialect) -> str:
    return re.sub(r"\W", "", dialect.name) + "Error"
