"""Character sets of files: known by a mark or a declaration, and written again as they were read."""

from __future__ import annotations

import codecs
from dataclasses import dataclass

import regex

from ziggurat.system.errors import DataError

# Longer marks first: that of UTF-32-LE begins as that of UTF-16-LE does, and is it where a NUL follows.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
# Python's names of the character sets of files. Its other codecs are no character sets (punycode, unicode_escape), or
# take quadratic time.
_NAMES = (
    "ascii utf-8 iso8859-1 iso8859-2 iso8859-3 iso8859-4 iso8859-5 iso8859-6 iso8859-7 iso8859-8 iso8859-9 iso8859-10 "
    "iso8859-11 iso8859-13 iso8859-14 iso8859-15 iso8859-16 cp1250 cp1251 cp1252 cp1253 cp1254 cp1255 cp1256 cp1257 "
    "cp1258 cp437 cp850 cp852 cp855 cp866 cp874 cp932 cp949 koi8-r koi8-u mac-roman mac-cyrillic tis-620 gb2312 gbk "
    "gb18030 big5 big5hkscs euc_jp shift_jis iso2022_jp euc_kr johab"
)
_CODECS = frozenset(_NAMES.split())
# What browsers read where a page names the smaller set (encoding.spec.whatwg.org).
_WIDER = {
    "ascii": "cp1252",
    "iso8859-1": "cp1252",
    "iso8859-9": "cp1254",
    "iso8859-11": "cp874",
    "tis-620": "cp874",
    "gb2312": "gbk",
    "big5": "big5hkscs",
    "shift_jis": "cp932",
    "euc_kr": "cp949",
}
_OTHER_NAMES = {
    "windows-874": "cp874",
    "windows-31j": "cp932",
    "x-sjis": "cp932",
    "x-gbk": "gbk",
    "iso-8859-8-i": "iso8859-8",
    "x-mac-cyrillic": "mac-cyrillic",
}
_CONTROLS = regex.compile(r"[\x80-\x84\x86-\x9f]")


@dataclass(frozen=True)
class Charset:
    """The encoding by which a file's text becomes bytes.

    Attributes:
        codec: Python's name.
        mark: the byte order mark that the file begins with; empty for none.
        declared: whether the file says so: by its mark, its declaration, or, as UTF-8, by having neither.
    """

    codec: str = "utf-8"
    mark: bytes = b""
    declared: bool = True

    def encoded(self, text: str, errors: str = "replace") -> bytes:
        """Return the bytes of a file; `errors` is as in `str.encode`."""
        return self.mark + text.encode(self.codec, errors)


def codec_named(label: str) -> str | None:
    """Return Python's name of the character set that a file names; None for one that is not read."""
    try:
        name = codecs.lookup(_OTHER_NAMES.get(label.lower(), label)).name
    except (LookupError, ValueError):
        return None
    return name if name in _CODECS else None


def decoded(content: bytes, name: str, label: str = "") -> tuple[str, Charset]:
    """Return the text of a file without its mark, and its character set.

    Text that is UTF-8 and not ASCII is UTF-8, whatever is declared: no other character set gives such bytes.

    Args:
        content: the file.
        name: of the file, for messages.
        label: the character set that the file declares; empty, or one that is not known: UTF-8.

    Raises DataError where the bytes are not of the character set.
    """
    for mark, codec in _MARKS:
        if content.startswith(mark) and (len(mark) < 4 or _is(codec, content)):
            return _strictly(content[len(mark) :], codec, name), Charset(codec, mark)
    declared = codec_named(label) if label else "utf-8"
    if declared in (None, "utf-8") or (not content.isascii() and _is("utf-8", content)):
        return _strictly(content, "utf-8", name), Charset(declared=declared == "utf-8")
    wider = _WIDER.get(declared)
    if wider is not None and _CONTROLS.search(content.decode(declared, "replace").replace("\ufffd", "\x80")):
        try:
            return content.decode(wider), Charset(wider)
        except UnicodeDecodeError:
            pass
    return _strictly(content, declared, name), Charset(declared)


def _is(codec: str, content: bytes) -> bool:
    try:
        content.decode(codec)
    except UnicodeDecodeError:
        return False
    return True


def _strictly(content: bytes, codec: str, name: str) -> str:
    try:
        return content.decode(codec)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name}: not valid {codec.upper()} (byte {error.start}, from 0); convert it to UTF-8"
        ) from None
