"""OpenDocument and EPUB: XML archives and pages."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from urllib.parse import unquote

import regex

from ziggurat.serve.notices import TextNotices
from ziggurat.serve.text.documents import direction
from ziggurat.serve.text.documents.direction import Turn
from ziggurat.serve.text.elements import PAGES, MarkupRules
from ziggurat.serve.text.files import Archive, Settings
from ziggurat.serve.text.markup import Template, markup_template, written
from ziggurat.serve.text.sentences import Result, SentenceRequests, together
from ziggurat.serve.text.tokens import Token, Xml, read_xml, spelt
from ziggurat.system.errors import DataError


def _named(prefix: str, names: str) -> frozenset[str]:
    return frozenset(f"{prefix}:{name}" for name in names.split())


_PREFIXES = {"drawing": "draw", "svg-compatible": "svg", "xsl-fo-compatible": "fo"}
_OPEN_DOCUMENT = {
    f"urn:oasis:names:tc:opendocument:xmlns:{name}:1.0": _PREFIXES.get(name, name)
    for name in "text table drawing office presentation style meta form script svg-compatible xsl-fo-compatible".split()  # noqa: SIM905
} | {
    "http://purl.org/dc/elements/1.1/": "dc",
    "http://www.w3.org/1999/xlink": "xlink",
    "urn:org:documentfoundation:names:experimental:office:xmlns:loext:1.0": "loext",
}
_TEXT = MarkupRules(
    # Fields that contain words are read with the sentence; programs regenerate most of them, from translated text.
    inline=_named(
        "text",
        "span a meta meta-field ruby ruby-base bookmark-ref reference-ref sequence-ref note-ref chapter title subject "
        "keywords description text-input variable-input variable-get variable-set user-field-get user-field-input "
        "expression database-display conditional-text placeholder execute-macro",
    )
    | _named("loext", "content-control"),
    blank=_named("text", "line-break"),
    spaces=_named("text", "s"),
    points=_named(
        "text",
        "bookmark bookmark-start bookmark-end reference-mark reference-mark-start reference-mark-end sequence "
        "page-number page-count date time change change-start change-end soft-page-break toc-mark-end "
        "alphabetical-index-mark-end user-index-mark-end author-name author-initials file-name sheet-name number "
        "creation-date creation-time modification-date modification-time print-date print-time "
        "editing-cycles editing-duration printed-by initial-creator creator character-count word-count paragraph-count "
        "table-count image-count object-count bibliography-mark ruby-text",
    )
    | _named("office", "annotation-end")
    | _named("draw", "image control object object-ole"),
    copied=_named("office", "scripts settings automatic-styles font-face-decls meta")
    | _named("text", "tracked-changes sequence-decls variable-decls user-field-decls")
    | _named("style", "style default-style")
    | _named("dc", "creator date")  # in an annotation
    | _named("meta", "date-string creator-initials")
    | {"sender-initials", "loext:sender-initials"},
    nested=_named("text", "note drop-down hidden-text alphabetical-index-mark alphabetical-index-mark-start")
    | _named("text", "toc-mark toc-mark-start user-index-mark user-index-mark-start")
    | _named("office", "annotation")
    | _named("loext", "list-item")
    | _named("draw", "frame custom-shape rect ellipse circle line g connector path polygon polyline regular-polygon")
    | _named("draw", "caption a"),
    seen=_named("text", "page-number page-count date time sheet-name number sequence drop-down")
    | _named("draw", "image object object-ole control frame custom-shape"),
    # Drop-down choices, conditional text, index entries, questions and tooltips, form buttons.
    attributes=_named("text", "value string-value string-value-if-true string-value-if-false key1 key2 description")
    | _named("form", "label title")
    | {"loext:display-text", "office:title", "xlink:title"},
    xml=True,
)  # fmt: skip


PROPERTIES = MarkupRules(
    inline=frozenset(),
    copied=_named("meta", "generator initial-creator creation-date print-date printed-by user-defined")
    | _named("meta", "editing-cycles editing-duration")
    | _named("dc", "creator date language")
    | frozenset(("creator", "lastModifiedBy", "revision", "created", "modified", "category", "contentStatus"))
    | frozenset(("version", "language", "identifier", "contentType", "lastPrinted")),
    xml=True,
)
"""PROPERTIES are the rules for document properties: title, subject, keywords and description, shown in fields."""
_WORD = regex.compile(r"\p{L}{2}")
_SIGNATURE = regex.compile(r"_xmlsignatures/.*\.xml|META-INF/\w*signatures\.xml", flags=regex.IGNORECASE)
_LISTED = "META-INF/manifest.xml"


def opendocument(content: bytes, name: str, settings: Settings) -> SentenceRequests[Result[bytes]]:
    """Yield the texts of an OpenDocument file to translate, including headers and footers; return the file."""
    archive = Archive(content, name, settings.limits)
    if _LISTED in archive.names and b"encryption-data" in archive.read(_LISTED):
        raise DataError(f"{name}: is protected by a password; save it without one")
    archive.read("content.xml")
    parts = [part for part in archive.names if part in ("content.xml", "styles.xml", "meta.xml")]
    documents = {part: read_xml(archive.markup(part), f"{name}: {part}", _OPEN_DOCUMENT) for part in parts}
    rules = {"meta.xml": PROPERTIES}
    templates = {part: markup_template(xml.tokens, rules.get(part, _TEXT)) for part, xml in documents.items()}
    left = [part for part in archive.names if part.endswith("/content.xml") and _WRITTEN.search(archive.read(part))]
    left += [part for part, xml in documents.items() for token in xml.tokens if _is_left(token)]
    return (yield from xml_members(archive, documents, templates, settings, left, turn=direction.opendocument))


_WRITTEN = regex.compile(rb"<text:(?:p|h|span)(?:\s[^<>]*+)?>[^<]*?(?:[A-Za-z]|[\xc3-\xf4][\x80-\xbf])")


def _is_left(token: Token) -> bool:
    """Return whether a tag has untranslated text: text around numbers, or the value of a user-defined field."""
    is_value = token.name == "text:user-field-decl"
    names = ["office:string-value"] if is_value else ["style:num-prefix", "style:num-suffix"]
    return any(_WORD.search(token.attributes.get(name, "")) for name in names)


def xml_members(
    archive: Archive,
    documents: dict[str, Xml],
    templates: dict[str, Template],
    settings: Settings,
    left: Iterable[str],
    notices: TextNotices | None = None,
    turn: Turn | None = None,
) -> SentenceRequests[Result[bytes]]:
    """Yield the texts of an archive's templates to translate; return the archive. Other members keep their bytes.

    Args:
        archive: the archive.
        documents: the members to translate, by name.
        templates: templates of these members.
        settings: settings of the translation.
        left: members with text that is not read; they are counted.
        notices: notices counted so far.
        turn: writes a member in the other direction; None: nothing is mirrored.
    """
    notices = TextNotices() if notices is None else notices
    for part in left:
        notices.add("left_out", part)
    said = yield from together([written(template, settings.options, notices) for template in templates.values()])
    changed = {part: documents[part].encoded(text) for part, text in zip(templates, said, strict=True)}
    if turn is not None and (to_right := direction.turned(settings)) is not None:
        for part, content in changed.items():
            written_again = read_xml(content, f"{archive.name}: {part}", documents[part].prefixes)
            changed[part] = written_again.encoded(turn(written_again.tokens, to_right))
    if any(content != archive.read(part) for part, content in changed.items()):
        for part in filter(_SIGNATURE.fullmatch, archive.names):
            notices.add("signed", part)
    return Result(archive.replaced(changed), notices)


# EPUB

_CONTAINER = "META-INF/container.xml"
_ENCRYPTED = "META-INF/encryption.xml"
_PAGES = ("application/xhtml+xml", "application/x-dtbook+xml")
_OTHER_PAGES = ("text/html", "text/x-oeb1-document", "text/plain", "application/pdf")
_PAGE_NAMES = (".xhtml", ".html", ".htm")  # pages that the package does not list, or lists under another name
_PICTURE = "image/svg+xml"
_WRITTEN_IN_PICTURE = regex.compile(
    rb"<(?:\w++:)?+(?:text|title|desc|tspan|textPath|p|div|span)\b[^<>]*+>[^<]*?(?:[A-Za-z]|[\xc3-\xf4][\x80-\xbf])"
)
_CONTENTS = "application/x-dtbncx+xml"
_NCX = MarkupRules(inline=frozenset(), copied=frozenset(("head",)), xml=True)
_LANGUAGE = regex.compile(r"(<(?:[\w.-]++:)?+language\b[^<>]*+>)[^<]*+(</)")


def epub(content: bytes, name: str, settings: Settings) -> SentenceRequests[Result[bytes]]:
    """Yield the texts of an EPUB to translate; return the book, with the target as its language."""
    archive = Archive(content, name, settings.limits)
    package = _package(archive, name)
    book = read_xml(archive.markup(package), f"{name}: {package}")
    rules = replace(PAGES, xml=True, languages=(settings.source, settings.target))
    documents: dict[str, Xml] = {}
    templates: dict[str, Template] = {}
    left: list[str] = []
    notices = TextNotices()
    encrypted = _encrypted(archive, name)
    for token in book.tokens:
        if token.name != "item" or token.kind not in ("open", "empty"):
            continue
        kind = token.attributes.get("media-type", "")
        part = posixpath.normpath(posixpath.join(posixpath.dirname(package), unquote(token.attributes.get("href", ""))))
        if part not in archive.names:
            continue
        if part in encrypted and kind in (*_PAGES, _CONTENTS):
            raise DataError(f"{name}: {part} is encrypted, to keep it from being copied")
        if kind in _OTHER_PAGES or (kind == _PICTURE and _WRITTEN_IN_PICTURE.search(archive.read(part))):
            left.append(part)
        if part not in documents and kind in (*_PAGES, _CONTENTS):
            documents[part] = read_xml(archive.markup(part), f"{name}: {part}")
            templates[part] = markup_template(documents[part].tokens, _NCX if kind == _CONTENTS else rules, notices)
    left += [part for part in archive.names if part not in (*documents, *left) and part.lower().endswith(_PAGE_NAMES)]
    if settings.target and package not in documents:
        text = "".join(_directed(book.tokens, settings))
        documents[package], templates[package] = book, [_LANGUAGE.sub(rf"\g<1>{spelt(settings.target)}\g<2>", text)]
    return (yield from xml_members(archive, documents, templates, settings, left, notices))


def _directed(tokens: Sequence[Token], settings: Settings) -> Iterator[str]:
    """Yield a package whose spine has the target's page direction, if that differs from the source's."""
    to_right, can = direction.turned(settings), False  # EPUB 2 has no such attribute
    for token in tokens:
        can = can or (token.name == "package" and not token.attributes.get("version", "").startswith("2"))
        if token.name == "spine" and token.kind in ("open", "empty") and can and to_right is not None:
            yield direction.with_attribute(token.raw, "page-progression-direction", "rtl" if to_right else "ltr")
        else:
            yield token.raw


def _encrypted(archive: Archive, name: str) -> set[str]:
    """Return the members that are encrypted; fonts often are, to keep them in the book."""
    if _ENCRYPTED not in archive.names:
        return set()
    tokens = read_xml(archive.markup(_ENCRYPTED), f"{name}: {_ENCRYPTED}").tokens
    return {unquote(token.attributes.get("URI", "")).lstrip("/") for token in tokens if token.name == "CipherReference"}


def _package(archive: Archive, name: str) -> str:
    for token in read_xml(archive.markup(_CONTAINER), f"{name}: {_CONTAINER}").tokens:
        if token.name == "rootfile" and (path := token.attributes.get("full-path")):
            return path
    raise DataError(f"{name}: {_CONTAINER} names no package; is it an EPUB?")
