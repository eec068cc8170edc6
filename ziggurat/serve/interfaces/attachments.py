"""Files in requests and answers: names that are no paths, and documents that no browser shows as a page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO

from starlette.responses import Response, StreamingResponse

from ziggurat.serve.document_translation import Document
from ziggurat.serve.text.documents.kinds import document_kind

_BLOCK = 1 << 16


def sent(file: BinaryIO, given: Document) -> Response:
    """Return an answer with a translated file, which is closed at its end."""

    def blocks() -> Iterator[bytes]:
        with file:
            while block := file.read(_BLOCK):
                yield block

    # Never as a page: whatever a stranger translates would else have the rights of the server's own.
    headers = {
        "Content-Disposition": f'attachment; filename="{given.translated_name}"',
        "Content-Length": str(given.size),
        "Content-Security-Policy": "default-src 'none'; sandbox",
    }
    return StreamingResponse(blocks(), media_type=document_kind(given.name).media_type, headers=headers)


def name_of(given: str | None) -> str:
    """Return a file's name without folders and characters that are not shown, at most 100; empty: it has none."""
    last = re.split(r"[/\\]", given or "")[-1]
    shown = "".join(character for character in last if character.isprintable()).strip()
    return shown if len(shown) <= 100 else shown[-100:]
