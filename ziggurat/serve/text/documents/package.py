"""Packages of Office files: content types, the main part, and unread parts with text."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from urllib.parse import unquote

import regex

from ziggurat.serve.text.files import Archive
from ziggurat.serve.text.tokens import read_xml

_MAIN = regex.compile(r".*(?:wordprocessingml|presentationml|ms-word|ms-powerpoint)\.[\w.]*main\+xml")
# Documents embedded in the document, by name or content type; they are not read.
_EMBEDDED = regex.compile(
    r"(?:word|ppt)/embeddings/.+|.*/afchunk[^/]*|.+\.(?:docx|docm|xlsx|pptx|odt|html?|xhtml|mht|mhtml|rtf|txt|pdf|eml)",
    flags=regex.IGNORECASE,
)
_EMBEDDED_TYPES = regex.compile(r"text/(?:html|plain|rtf|richtext)|application/(?:rtf|pdf|xhtml\+xml)|message/rfc822")
# Other parts; those with text are reported: comments on slides, newer kinds of charts, building blocks, numbering.
_STAYING = regex.compile(r"(?:customXml|docProps)/.*|.*/(?:(?:slide|notes|handout)Masters|slideLayouts|theme)/.*")
_HAS_TEXT = regex.compile(
    r"""<(?:\w++:)?(?:t|text|v|pt)(?:\s[^<>]*+)?>[^<]*?\p{L}
      | <(?:\w++:)?lvlText\s[^<>]*?val="[^"<>]*?\p{L}{2}""",
    flags=regex.VERBOSE,
)
PACKED = b"PK\x03\x04"
"""PACKED is the start of a part that is itself an archive, such as an embedded document."""


def is_left(archive: Archive, part: str, kind: str) -> bool:
    """Return whether an unread part, of the content type `kind`, has text for readers."""
    if _EMBEDDED.fullmatch(part) or _EMBEDDED_TYPES.match(kind) or archive.read(part).startswith(PACKED):
        return True
    if not part.endswith(".xml") or _STAYING.fullmatch(part):
        return False
    return _HAS_TEXT.search(archive.read(part).decode("utf-8", "replace")) is not None


def content_types(archive: Archive, name: str) -> dict[str, str]:
    """Return the content type of each member that has one; `name` is for messages."""
    part = "[Content_Types].xml"
    if part not in archive.names:
        return {}
    named, by_ending = dict[str, str](), dict[str, str]()
    for token in read_xml(archive.markup(part), f"{name}: {part}").tokens:
        kind = token.attributes.get("ContentType", "")
        if token.name == "Override":
            named[unquote(token.attributes.get("PartName", "")).lstrip("/").lower()] = kind
        elif token.name == "Default":
            by_ending[token.attributes.get("Extension", "").lower()] = kind
    return {
        member: named.get(member.lower()) or by_ending.get(member.rpartition(".")[2].lower(), "")
        for member in archive.names
    }


def main_part(archive: Archive, name: str, types: Mapping[str, str], usual: str) -> str:
    """Return the name of the document's main part: from the relations, the content types, or the usual one."""
    members = {member.lower(): member for member in archive.names}
    if "_rels/.rels" in archive.names:
        for token in read_xml(archive.markup("_rels/.rels"), f"{name}: _rels/.rels").tokens:
            target = posixpath.normpath(unquote(token.attributes.get("Target", "")).lstrip("/")).lower()
            if token.attributes.get("Type", "").endswith("/officeDocument") and target in members:
                return members[target]
    if usual in archive.names:
        return usual
    return next((member for member in archive.names if _MAIN.fullmatch(types.get(member, ""))), usual)
