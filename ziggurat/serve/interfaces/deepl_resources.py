"""DeepL's glossaries (v2) and documents, as its client libraries request them."""

from __future__ import annotations

import hmac
import math
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ziggurat.serve.documents import Document, Documents
from ziggurat.serve.glossaries import Glossary, read_entries
from ziggurat.serve.interfaces.deepl import FORMALITY, GLOSSARY, KEY, REFUSED, SOURCE, TARGET, DeepL
from ziggurat.serve.interfaces.files import name_of, sent
from ziggurat.serve.requests import DEEPL, Described, Field, Operation, Refused, flag, listed, record, text, whole
from ziggurat.serve.text.documents.kinds import document_kind
from ziggurat.system.errors import DataError

_STATUS = {"waiting": "queued", "translating": "translating", "done": "done", "failed": "error"}
_TELLS = record(
    {
        "glossary_id": text(),
        "name": text(),
        "ready": flag(),
        "source_lang": text(),
        "target_lang": text(),
        "creation_time": text("", format="date-time"),
        "entry_count": whole(),
    }
)
_PAIRS = record({"supported_languages": listed(record({"source_lang": text(), "target_lang": text()}))})
PAIRS = Operation(DEEPL, (), _PAIRS)
CREATE = Operation(
    DEEPL,
    (
        Field("name", text("", maxLength=1000), required=True),
        Field("source_lang", SOURCE.schema, required=True),
        TARGET,
        Field("entries", text("a term and its translation on each line"), required=True),
        Field("entries_format", text("the default is `tsv`", "tsv", "csv")),
        KEY,
    ),
    _TELLS,
    status=201,
)
LISTED = Operation(DEEPL, (), record({"glossaries": listed(_TELLS)}))
ONE = Operation(DEEPL, (), _TELLS)
REMOVE = Operation(DEEPL, status=204)
ENTRIES = Operation(DEEPL, kinds={"text/tab-separated-values": "separated by tabs"})

SUBMIT = Operation(
    DEEPL,
    (
        SOURCE,
        TARGET,
        Field("filename", text("the name of the file, if the form does not have it")),
        Field("output_format", text("the file's own format")),
        GLOSSARY,
        FORMALITY,
        *REFUSED,
        KEY,
    ),
    record({"document_id": text(), "document_key": text()}),
    file=True,
)
_DOCUMENT_KEY = Field("document_key", text("the key returned when the document was sent"), required=True)
STATUS = Operation(
    DEEPL,
    (_DOCUMENT_KEY,),
    record(
        {
            "document_id": text(),
            "status": text("", *_STATUS.values()),
            "seconds_remaining": whole(),
            "billed_characters": whole(),
            "error_message": text(),
        },
        optional=("seconds_remaining", "billed_characters", "error_message"),
    ),
)
RESULT = Operation(DEEPL, (_DOCUMENT_KEY,), kinds={"*/*": "the document"}, noticed=True)


class DeepLResources:
    """DeepL's paths for glossaries and documents.

    `deepl` identifies clients, languages and glossaries; `documents` are those that are translated.
    """

    def __init__(self, deepl: DeepL, documents: Documents) -> None:
        self._deepl, self._documents = deepl, documents
        self._server, self._glossaries = deepl.server, deepl.glossaries

    def routes(self) -> list[Described]:
        """Return the paths."""
        return [
            Described("/v2/glossary-language-pairs", self.pairs, PAIRS),
            Described("/v2/glossaries", self.create, CREATE, ["POST"]),
            Described("/v2/glossaries", self.listed, LISTED),
            Described("/v2/glossaries/{id}", self.one, ONE),
            Described("/v2/glossaries/{id}", self.remove, REMOVE, ["DELETE"]),
            Described("/v2/glossaries/{id}/entries", self.entries, ENTRIES),
            Described("/v2/document", self.submit, SUBMIT, ["POST"]),
            Described("/v2/document/{id}", self.status, STATUS, ["GET", "POST"]),
            Described("/v2/document/{id}/result", self.result, RESULT, ["GET", "POST"]),
        ]

    async def pairs(self, request: Request) -> Response:
        """List the language pairs that glossaries support: all pairs that are translated."""
        self._owner(request, {})
        languages = self._server.pool.languages.items()
        pairs = [{"source_lang": s, "target_lang": t} for s, targets in languages for t in targets]
        return JSONResponse({"supported_languages": pairs})

    async def create(self, request: Request) -> Response:
        """Keep a glossary."""
        fields = await CREATE.fields(request)
        owner = self._owner(request, fields)
        name, entries = fields.get("name"), fields.get("entries")
        if not isinstance(name, str) or not name.strip() or len(name) > 1000:
            raise Refused(400, "Parameter 'name' not specified.")
        if not isinstance(entries, str) or not entries.strip():
            raise Refused(400, "Parameter 'entries' not specified.")
        if not fields.get("source_lang"):
            raise Refused(400, "Parameter 'source_lang' not specified.")
        source, target = self._deepl.pair(fields)
        if source is None or source == target:
            raise Refused(400, "A glossary needs two languages.")
        kind = str(fields.get("entries_format") or "tsv")

        def make() -> Glossary:
            try:
                return self._glossaries.add(owner, name, source, target, read_entries(entries, kind, (source, target)))
            except DataError as error:
                raise Refused(400, f"Invalid glossary entries provided: {error}") from None

        return JSONResponse(_told(await self._server.in_thread(make)), 201)

    async def listed(self, request: Request) -> Response:
        """List the glossaries of a client."""
        owner = self._owner(request, {})
        found = await self._server.in_thread(lambda: self._glossaries.of(owner))
        return JSONResponse({"glossaries": [_told(glossary) for glossary in found]})

    async def one(self, request: Request) -> Response:
        """Describe a glossary."""
        return JSONResponse(_told(self._glossary(request)))

    async def entries(self, request: Request) -> Response:
        """Return the entries of a glossary."""
        lines = "\n".join(f"{source}\t{target}" for source, target in self._glossary(request).entries)
        return Response(lines, media_type="text/tab-separated-values")

    async def remove(self, request: Request) -> Response:
        """Forget a glossary."""
        owner, name = self._owner(request, {}), request.path_params["id"]
        await self._server.in_thread(lambda: self._glossaries.remove(owner, name))
        return Response(status_code=204)

    async def submit(self, request: Request) -> Response:
        """Take a document."""
        disabled = "Documents are not translated on this server."
        async with self._documents.uploading(request, SUBMIT, disabled) as (fields, upload):
            self._deepl.refuse_unsupported(fields)
            name = name_of(str(fields.get("filename") or upload.filename or ""))
            try:
                kind = document_kind(name)
            except DataError:
                raise Refused(400, "Invalid file data.") from None
            wanted = str(fields.get("output_format") or "").lower().removeprefix(".")
            if wanted and f".{wanted}" not in kind.endings:
                raise Refused(400, "Value for 'output_format' not supported.")
            source, target = self._deepl.pair(fields)
            client = self._deepl.client(request, fields)
            terms = self._deepl.terms(fields, client, source, target)
            given = await self._documents.submit(Document(client, name, source or "auto", target, terms), upload.file)
        return JSONResponse({"document_id": given.id, "document_key": given.key})

    async def status(self, request: Request) -> Response:
        """Report the progress of a document."""
        given = self._document(request, await STATUS.fields(request))
        told: dict[str, Any] = {"document_id": given.id, "status": _STATUS[given.status]}
        if given.status == "translating" and given.done:
            left = (time.monotonic() - given.began) * (given.total - given.done) / given.done
            told["seconds_remaining"] = max(1, math.ceil(left))
        elif given.status == "done":
            told["billed_characters"] = given.characters
        elif given.error is not None:
            told["error_message"] = str(given.error)
        return JSONResponse(told)

    async def result(self, request: Request) -> Response:
        """Return a translated document."""
        given = self._document(request, await RESULT.fields(request))
        if given.status != "done":
            raise Refused(503, "Document translation is not done.")
        return sent(self._documents.opened(given), given)

    def _owner(self, request: Request, fields: Mapping[str, Any]) -> str:
        return self._server.access.account(self._deepl.client(request, fields))

    def _glossary(self, request: Request) -> Glossary:
        return self._glossaries.get(self._owner(request, {}), request.path_params["id"])

    def _document(self, request: Request, fields: Mapping[str, Any]) -> Document:
        try:
            given = self._documents.get(request.path_params["id"])
        except Refused:
            raise Refused(404, "Document not found.") from None
        key = str(fields.get("document_key") or "").encode("utf-8", "surrogatepass")
        if not hmac.compare_digest(key, given.key.encode()):
            raise Refused(404, "Document not found.")
        return given


def _told(glossary: Glossary) -> dict[str, Any]:
    return {
        "glossary_id": glossary.id,
        "name": glossary.name,
        "ready": True,
        "source_lang": glossary.source.lower(),
        "target_lang": glossary.target.lower(),
        "creation_time": datetime.fromtimestamp(glossary.created, UTC).isoformat(),
        "entry_count": len(glossary.entries),
    }
