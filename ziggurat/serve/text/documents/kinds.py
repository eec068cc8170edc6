"""Kinds of documents, by the ending of a file's name, and the work of translating any of them."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ziggurat.serve.text.documents import bilingual, lines, markdown, messages, office, opendocument
from ziggurat.serve.text.documents.archive import LINES, TAGS, Settings
from ziggurat.serve.text.sentences import Result, SentenceRequests
from ziggurat.system.errors import DataError, printable

Reader = Callable[[bytes, str, Settings], SentenceRequests[Result[bytes]]]


@dataclass(frozen=True)
class DocumentKind:
    """A kind of document.

    Attributes:
        name: short name.
        endings: endings of file names, the usual one first.
        media_type: of its files.
        work: the file's bytes, its name for messages and settings -> the work whose outcome is the translated bytes; it
            raises DataError for a damaged or hostile file, before the first sentence is asked for.
        marks: bytes of which each piece of a file has one; an archive counts those of its members itself.
    """

    name: str
    endings: tuple[str, ...]
    media_type: str
    work: Reader
    marks: tuple[bytes, ...] = LINES


_OFFICE = "application/vnd.openxmlformats-officedocument"
_OPEN = "application/vnd.oasis.opendocument"
KINDS = (
    DocumentKind("text", (".txt",), "text/plain", lines.text_file),
    DocumentKind("Markdown", (".md", ".markdown"), "text/markdown", markdown.markdown),
    DocumentKind("HTML", (".html", ".htm", ".xhtml"), "text/html", lines.html_file, TAGS),
    DocumentKind("Word", (".docx",), f"{_OFFICE}.wordprocessingml.document", office.docx, ()),
    DocumentKind("PowerPoint", (".pptx",), f"{_OFFICE}.presentationml.presentation", office.pptx, ()),
    DocumentKind("OpenDocument text", (".odt",), f"{_OPEN}.text", opendocument.opendocument, ()),
    DocumentKind("OpenDocument presentation", (".odp",), f"{_OPEN}.presentation", opendocument.opendocument, ()),
    DocumentKind("EPUB", (".epub",), "application/epub+zip", opendocument.epub, ()),
    DocumentKind("SubRip", (".srt",), "application/x-subrip", lines.srt),
    DocumentKind("WebVTT", (".vtt",), "text/vtt", lines.vtt),
    DocumentKind("XLIFF", (".xlf", ".xliff"), "application/xliff+xml", bilingual.xliff, TAGS),
    DocumentKind("TMX", (".tmx",), "application/x-tmx+xml", bilingual.tmx, TAGS),
    DocumentKind("gettext", (".po", ".pot"), "text/x-gettext-translation", messages.gettext),
    DocumentKind("JSON", (".json",), "application/json", messages.json_values, (b'"',)),
)
"""All kinds."""


def document_kind(name: str) -> DocumentKind:
    """Return the kind of a file by the ending of its name, in any letter case. Raises DataError for another ending."""
    for kind in KINDS:
        if name.lower().endswith(kind.endings):
            return kind
    known = " ".join(kind.endings[0] for kind in KINDS)
    raise DataError(f"{printable(name, 200)}: not a kind of document that can be translated; known are {known}")


def document(content: bytes, name: str, settings: Settings) -> SentenceRequests[Result[bytes]]:
    """Return the work of translating a document of any kind.

    Args:
        content: the file.
        name: its name, for its kind and messages.
        settings: how it is read; a file of more than `settings.limits.size` bytes is refused.

    Raises DataError, when the work begins, for an unknown kind, and for a damaged or hostile file.
    """
    kind = document_kind(name)
    if len(content) > settings.limits.size:
        raise DataError(f"{name}: {len(content):,} bytes, more than {settings.limits.size:,}")
    # Told at once: reading and cutting a large file take minutes.
    settings.limits.refuse_many(_count(content, kind.marks), name)
    return (yield from _watched(kind.work(content, name, settings)))


def _watched(work: SentenceRequests[Result[bytes]]) -> SentenceRequests[Result[bytes]]:
    """Return the same work, which tells it where no sentence was asked for."""
    count = 0
    try:
        asked = next(work)
        while True:
            count += len(asked)
            asked = work.send((yield asked))
    except StopIteration as ended:
        outcome: Result[bytes] = ended.value
    if not count:
        outcome.notices["nothing_to_translate"] += 1
    return outcome


def _count(content: bytes, marks: Collection[bytes]) -> int:
    """Return how many marks a file has; CR and LF together are one."""
    if marks and content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        # There the ends of lines are also bytes of letters, of Tamil for one.
        content = content.decode("utf-16", "replace").encode()
    return sum(map(content.count, marks)) - (content.count(b"\r\n") if b"\r" in marks else 0)
