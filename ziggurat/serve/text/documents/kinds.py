"""Kinds of documents, recognised by file name suffix, and the translation of any of them."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ziggurat.serve.text.documents import bilingual, lines, markdown, messages, office, opendocument
from ziggurat.serve.text.documents import strings as android
from ziggurat.serve.text.documents import strings as json_files
from ziggurat.serve.text.files import LINES, TAGS, Settings
from ziggurat.serve.text.sentences import Result, SentenceRequests, watched
from ziggurat.system.errors import DataError, printable

Reader = Callable[[bytes, str, Settings], SentenceRequests[Result[bytes]]]


@dataclass(frozen=True)
class DocumentKind:
    """A kind of document.

    Attributes:
        name: short name.
        endings: file name suffixes, the usual one first.
        media_type: media type of its files.
        work: (bytes of the file, its name for messages, settings) -> the work that yields the translated bytes; it
            raises DataError for a damaged or hostile file, before it requests the first sentence.
        marks: byte strings of which each piece of a file contains one; an archive counts those of its members itself.
        keyed: whether its texts have keys, by which they can be excluded from translation.
    """

    name: str
    endings: tuple[str, ...]
    media_type: str
    work: Reader
    marks: tuple[bytes, ...] = LINES
    keyed: bool = False


_OFFICE = "application/vnd.openxmlformats-officedocument"
_OPEN = "application/vnd.oasis.opendocument"
KINDS = (
    DocumentKind("text", (".txt",), "text/plain", lines.text_file),
    DocumentKind("Markdown", (".md", ".markdown", ".mdx"), "text/markdown", markdown.markdown),
    DocumentKind("HTML", (".html", ".htm", ".xhtml", ".xht"), "text/html", lines.html_file, TAGS),
    DocumentKind("Word", (".docx", ".docm", ".dotx", ".dotm"), f"{_OFFICE}.wordprocessingml.document", office.docx, ()),
    DocumentKind(
        "PowerPoint",
        (".pptx", ".pptm", ".potx", ".potm", ".ppsx", ".ppsm"),
        f"{_OFFICE}.presentationml.presentation",
        office.pptx,
        (),
    ),
    DocumentKind("OpenDocument text", (".odt", ".ott"), f"{_OPEN}.text", opendocument.opendocument, ()),
    DocumentKind("OpenDocument presentation", (".odp", ".otp"), f"{_OPEN}.presentation", opendocument.opendocument, ()),
    DocumentKind("EPUB", (".epub",), "application/epub+zip", opendocument.epub, ()),
    DocumentKind("SubRip", (".srt",), "application/x-subrip", lines.srt),
    DocumentKind("WebVTT", (".vtt",), "text/vtt", lines.vtt),
    DocumentKind(
        "XLIFF",
        (".xlf", ".xliff", ".sdlxliff", ".mqxliff", ".mxliff"),
        "application/xliff+xml",
        bilingual.xliff,
        TAGS,
        keyed=True,
    ),
    DocumentKind("TMX", (".tmx",), "application/x-tmx+xml", bilingual.tmx, TAGS, keyed=True),
    DocumentKind("gettext", (".po", ".pot"), "text/x-gettext-translation", messages.gettext, keyed=True),
    DocumentKind("JSON", (".json", ".arb", ".webmanifest"), "application/json", json_files.json_values, (b'"',), True),
    DocumentKind("Android", (".xml",), "application/xml", android.android, TAGS, keyed=True),
)
"""All kinds."""


# Kinds of files recognised by their first bytes, whatever their names; no document of the kinds above starts like this.
_OTHERS = {
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": "is protected by a password, or a file of Word or PowerPoint 97 (.doc, .ppt); "
    "save it as .docx or .pptx without a password",
    b"%PDF-": "is a PDF; translate the document that it was made from",
    b"{\\rtf": "is RTF; save it as .docx",
    b"\x1f\x8b": "is compressed with gzip; unpack it",
    b"7z\xbc\xaf\x27\x1c": "is compressed with 7-Zip; unpack it",
    b"Rar!": "is compressed with RAR; unpack it",
    b"version https://git-lfs.github.com/": "is a Git LFS pointer to the file; `git lfs pull` fetches it",
    b"\x89PNG\r\n": "is a picture",
    b"\xff\xd8\xff": "is a picture",
}


def _refuse_other(content: bytes, kind: DocumentKind, name: str) -> None:
    for begins, what in _OTHERS.items():
        if content.startswith(begins):
            raise DataError(f"{name}: {what}")
    if not content and kind.media_type.startswith("application/") and not kind.marks:
        raise DataError(f"{name}: is empty")
    if content.startswith(b"PK\x03\x04") and kind.marks:
        raise DataError(f"{name}: is a zip archive, such as a .docx, .odt or .epub, under another name")


def document_kind(name: str) -> DocumentKind:
    """Return the kind of a file by the suffix of its name, ignoring case. Raises DataError for an unknown suffix."""
    for kind in KINDS:
        if name.lower().endswith(kind.endings):
            return kind
    known = " ".join(kind.endings[0] for kind in KINDS)
    raise DataError(f"{printable(name, 200)}: not a kind of document that can be translated; known are {known}")


def document(content: bytes, name: str, settings: Settings) -> SentenceRequests[Result[bytes]]:
    """Yield the texts of a document of any kind to translate; return the translated document.

    Args:
        content: the file.
        name: its name, for its kind and messages.
        settings: settings of the translation; a file of more than `settings.limits.size` bytes is refused.

    Raises DataError, when it starts, for an unknown kind, and for a damaged or hostile file.
    """
    kind = document_kind(name)
    if len(content) > settings.limits.size:
        raise DataError(f"{name}: {len(content):,} bytes, more than {settings.limits.size:,}")
    _refuse_other(content, kind, name)
    # Checked first, because reading and splitting a large file takes minutes.
    settings.limits.refuse_many(_count(content, kind.marks), name)
    asked = list[str]()
    outcome = yield from watched(kind.work(content, name, settings), lambda sentences: asked.extend(sentences[:1]))
    if not asked:
        outcome.notices["nothing_to_translate"] += 1
    return outcome


def _count(content: bytes, marks: Collection[bytes]) -> int:
    """Return how many marks a file has; CR LF counts once."""
    if marks and content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        # In UTF-16 and UTF-32 the bytes of line ends also occur inside letters, for example in Tamil.
        content = content.decode("utf-16", "replace").encode()
    return sum(map(content.count, marks)) - (content.count(b"\r\n") if b"\r" in marks else 0)
