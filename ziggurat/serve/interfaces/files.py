"""Documents over HTTP: LibreTranslate's paths, and the server's own, which also report progress.

Names in requests never become paths, and no browser shows a returned document as a page.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from ziggurat.serve.documents import UNKNOWN, Document, Documents
from ziggurat.serve.glossaries import entries_of
from ziggurat.serve.interfaces.libretranslate import KEY, SOURCE, TARGET
from ziggurat.serve.interfaces.native import NOTICE
from ziggurat.serve.notices import notice_headers
from ziggurat.serve.requests import (
    LIBRETRANSLATE,
    OWN,
    Described,
    Field,
    Operation,
    Refused,
    listed,
    optional_texts,
    record,
    text,
    unless_gone,
    whole,
)
from ziggurat.serve.text.documents.kinds import document_kind
from ziggurat.serve.translations import Translations
from ziggurat.system.errors import DataError
from ziggurat.system.small_files import parse_json

_BLOCK = 1 << 16


def sent(file: BinaryIO, given: Document) -> Response:
    """Return a response with a translated file, which is closed at its end."""

    def blocks() -> Iterator[bytes]:
        with file:
            while block := file.read(_BLOCK):
                yield block

    # Never as a page: otherwise a stranger's document would get the rights of the server's own pages.
    headers = {
        "Content-Disposition": f'attachment; filename="{given.translated_name}"',
        "Content-Length": str(given.size),
        "Content-Security-Policy": "default-src 'none'; sandbox",
        **notice_headers(given.notices),
    }
    return StreamingResponse(blocks(), media_type=document_kind(given.name).media_type, headers=headers)


def name_of(given: str | None) -> str:
    """Return a file name without folders and unprintable characters, cut to 100 characters; empty if none."""
    last = re.split(r"[/\\]", given or "")[-1]
    shown = "".join(character for character in last if character.isprintable()).strip()
    return shown if len(shown) <= 100 else shown[-100:]


TRANSLATE = Operation(
    LIBRETRANSLATE,
    (SOURCE, TARGET, KEY),
    record({"translatedFileUrl": text("the address of the file", format="uri")}),
    file=True,
)
DOWNLOAD = Operation(LIBRETRANSLATE, kinds={"*/*": "the document"}, noticed=True)
_APPLIED = record(
    {"source": text(), "target": text(), "mode": text("", "soft", "hard"), "found": whole(), "applied": whole()}
)
_STATE = record(
    {
        "id": text("random; any client that knows it may have the document"),
        "status": text("", "waiting", "translating", "done", "failed"),
        "done": whole("sentences translated so far"),
        "total": whole("sentences known so far"),
        "name": text(),
        "source": text(),
        "target": text(),
        "error": text("why it failed"),
        "glossary": listed(_APPLIED, "what became of the terms"),
        "notices": listed(NOTICE, "what needed special handling"),
    },
    optional=("error", "glossary", "notices"),
)
SUBMIT = Operation(
    OWN,
    (
        SOURCE,
        TARGET,
        Field("glossary", text("JSON, as in /v1/translate")),
        Field("protect", listed(text(), "patterns (Python's `regex`) of text that stays unchanged")),
        Field("leave", listed(text(), "keys (JSON, Android, gettext, XLIFF, TMX) whose text is not translated")),
        KEY,
    ),
    _STATE,
    status=202,
    file=True,
)
PROGRESS = Operation(OWN, (), _STATE)
REMOVE = Operation(OWN, status=204)
FILE = Operation(OWN, kinds={"*/*": "the document"}, noticed=True)


class Files:
    """Paths for documents.

    Args:
        translations: the server's models.
        documents: the documents that are translated.
    """

    def __init__(self, translations: Translations, documents: Documents) -> None:
        self._server, self._documents = translations, documents

    def routes(self) -> list[Described]:
        """Return the paths."""
        return [
            Described("/translate_file", self.translate, TRANSLATE, ["POST"]),
            Described("/download_file/{name}", self.download, DOWNLOAD),
            Described("/v1/documents", self.submit, SUBMIT, ["POST"]),
            Described("/v1/documents/{id}", self.progress, PROGRESS),
            Described("/v1/documents/{id}", self.remove, REMOVE, ["DELETE"]),
            Described("/v1/documents/{id}/file", self.file, FILE),
        ]

    async def translate(self, request: Request) -> Response:
        """Translate a document; the response is sent when it is done."""
        disabled = "Files translation are disabled on this server."
        async with self._documents.uploading(request, TRANSLATE, disabled) as (fields, upload):
            for name in ("source", "target"):
                if not fields.get(name):
                    raise Refused(400, f"Invalid request: missing {name} parameter")
            name = name_of(upload.filename)
            if not name:
                raise Refused(400, "Invalid request: missing file parameter")
            try:
                document_kind(name)
            except DataError:
                raise Refused(400, "Invalid request: file format not supported") from None
            client = self._server.client(request, LIBRETRANSLATE, fields.get("api_key"))
            source, target = await self._pair(fields)
            given = await self._documents.submit(Document(client, name, source, target), upload.file)
        assert given.task is not None
        try:
            await unless_gone(request, asyncio.wait([given.task]))
        except Refused:
            await self._documents.remove(given)
            raise
        if given.error is not None:
            await self._documents.remove(given)
            raise given.error
        return JSONResponse({"translatedFileUrl": f"{request.base_url}download_file/{given.file_name}"})

    async def download(self, request: Request) -> Response:
        """Return a translated document."""
        name = request.path_params["name"]
        given = self._documents.get(name.partition(".")[0])
        if name != given.file_name or given.status != "done":
            raise Refused(404, UNKNOWN)
        return sent(self._documents.opened(given), given)

    async def submit(self, request: Request) -> Response:
        """Accept a document; it is translated when its turn comes."""
        disabled = "documents are not translated on this server"
        async with self._documents.uploading(request, SUBMIT, disabled) as (fields, upload):
            name = name_of(upload.filename)
            if not name or not fields.get("source") or not fields.get("target"):
                raise Refused(400, "a form with `file`, `source`, `target` and optionally `glossary` is needed")
            client = self._server.client(request, OWN, fields.get("api_key"))
            source, target = await self._pair(fields)
            entries = entries_of(_glossary(fields.get("glossary")), self._server.limits.glossary_terms)
            terms = self._server.terms(entries, [source], target)
            protect, leave = (optional_texts(fields.get(field), field) for field in ("protect", "leave"))
            self._server.protection(protect)  # refuses invalid patterns
            if leave and not document_kind(name).keyed:
                raise Refused(400, f"`leave`: the texts of {document_kind(name).name} have no keys")
            document = Document(client, name, source, target, terms, protect, leave)
            given = await self._documents.submit(document, upload.file)
        return JSONResponse(_progress(given), 202)

    async def progress(self, request: Request) -> Response:
        """Report the progress of a document."""
        return JSONResponse(_progress(self._documents.get(request.path_params["id"])))

    async def remove(self, request: Request) -> Response:
        """Cancel or remove a document."""
        await self._documents.remove(self._documents.get(request.path_params["id"]))
        return Response(status_code=204)

    async def file(self, request: Request) -> Response:
        """Return a translated document."""
        given = self._documents.get(request.path_params["id"])
        if given.status != "done":
            raise Refused(409, f"the document is not done: it is {given.status}")
        return sent(self._documents.opened(given), given)

    async def _pair(self, fields: Mapping[str, Any]) -> tuple[str, str]:
        """Return the languages of a document, with `auto` if the source language is to be detected."""
        source, target = str(fields["source"]), str(fields["target"])
        if source == "auto":
            await self._server.detect_sources([], self._server.code(target))
            return source, self._server.code(target)
        (source,), target, _ = await self._server.languages([""], source, target)
        return source, target


def _glossary(given: Any) -> Any:
    """Return the value of a form field that holds JSON."""
    if not isinstance(given, str) or not given.strip():
        return None
    try:
        return parse_json(given.encode("utf-8", "surrogatepass"), "`glossary`")
    except DataError as error:
        raise Refused(400, str(error)) from None


def _progress(given: Document) -> dict[str, Any]:
    record: dict[str, Any] = {
        "id": given.id,
        "status": given.status,
        "done": given.done,
        "total": given.total,
        "name": given.translated_name if given.status == "done" else given.name,
        "source": given.source,
        "target": given.target,
    }
    if given.error is not None:
        record["error"] = str(given.error)
    if given.terms is not None and given.status == "done":
        record["glossary"] = given.tally.records(given.terms)
    if given.notices and given.status == "done":
        record["notices"] = given.notices.records()
    return record
