"""Raw files: character sets, settings and limits of documents, archives."""

from __future__ import annotations

import codecs
import copy
import io
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import regex

from ziggurat.config.languages import main_language
from ziggurat.serve.text.sentences import Options
from ziggurat.system.errors import DataError, printable

# Longer marks first, since the mark of UTF-32-LE is that of UTF-16-LE followed by NULs.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
# Python's names of the character sets of files. Its other codecs are not character sets (punycode, unicode_escape), or
# take quadratic time.
_NAMES = (
    "ascii utf-8 iso8859-1 iso8859-2 iso8859-3 iso8859-4 iso8859-5 iso8859-6 iso8859-7 iso8859-8 iso8859-9 iso8859-10 "
    "iso8859-11 iso8859-13 iso8859-14 iso8859-15 iso8859-16 cp1250 cp1251 cp1252 cp1253 cp1254 cp1255 cp1256 cp1257 "
    "cp1258 cp437 cp850 cp852 cp855 cp866 cp874 cp932 cp949 koi8-r koi8-u mac-roman mac-cyrillic tis-620 gb2312 gbk "
    "gb18030 big5 big5hkscs euc_jp shift_jis iso2022_jp euc_kr johab"
)
_CODECS = frozenset(_NAMES.split())
# The superset that browsers use when a page names the smaller set (encoding.spec.whatwg.org).
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
    """The encoding that turns a file's text into bytes.

    Attributes:
        codec: Python's name.
        mark: the byte order mark at the start of the file; empty for none.
        declared: whether the file declares it: by its mark, its declaration, or, for UTF-8, by having neither.
    """

    codec: str = "utf-8"
    mark: bytes = b""
    declared: bool = True

    def encoded(self, text: str, errors: str = "replace") -> bytes:
        """Return the bytes of a file; `errors` is as in `str.encode`."""
        return self.mark + text.encode(self.codec, errors)


def codec_named(label: str) -> str | None:
    """Return Python's name of the character set that a file declares; None for an unsupported one."""
    try:
        name = codecs.lookup(_OTHER_NAMES.get(label.lower(), label)).name
    except (LookupError, ValueError):
        return None
    return name if name in _CODECS else None


def decoded(content: bytes, name: str, label: str = "") -> tuple[str, Charset]:
    """Return the text of a file without its mark, and its character set.

    Text that is valid UTF-8 and not ASCII is read as UTF-8, whatever is declared: no other character set gives such
    bytes.

    Args:
        content: the file.
        name: its name, for messages.
        label: the character set that the file declares; empty or unknown: UTF-8.

    Raises DataError if the bytes are invalid in the character set.
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


LINES = tuple(end.encode() for end in "\n\r\v\f\x85\u2028\u2029")
"""LINES are byte strings in UTF-8 of which each line of a file contains one."""

TAGS = (b"<", b"&")
"""TAGS are bytes of which each piece of markup contains one: tags, comments, entities."""


@dataclass(frozen=True)
class Limits:
    """Limits of a document.

    Attributes:
        size: maximum size of the file in bytes.
        unpacked: maximum size of all members of an archive in bytes, unpacked.
        members: maximum number of members of an archive.
        pieces: maximum number of tags and entities, lines or strings in a file, or in all members of an archive that
            are read, counted in the bytes before anything is read.
    """

    size: int = 64 << 20
    unpacked: int = 256 << 20
    members: int = 10_000
    pieces: int = 2_000_000

    def refuse_many(self, count: int, name: str) -> None:
        """Raise DataError for a document called `name` with more than `pieces` pieces."""
        if count > self.pieces:
            raise DataError(f"{name}: more than {self.pieces:,} tags, lines or strings; divide it")


@dataclass(frozen=True)
class Settings:
    """Settings for translating a document.

    Attributes:
        options: how text is split and reassembled.
        source, target: language codes, for formats that hold them; empty: not known.
        leave: keys whose text is not translated, in formats with keys (`DocumentKind.keyed`); `*` stands for any
            characters.
        limits: limits of the file.
    """

    options: Options
    source: str = ""
    target: str = ""
    leave: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)

    def refuse_languages(self, source: str, target: str, name: str) -> None:
        """Raise DataError for a file called `name` in languages other than these; empty codes are unknown."""
        pairs = ((source, self.source), (target, self.target))
        if any(differ(of_file, own) for of_file, own in pairs):
            raise DataError(
                f"{name}: is from {printable(source or '?')!r} to {printable(target or '?')!r}, and the model from "
                f"{self.source or '?'!r} to {self.target or '?'!r}; use another model, or change the file's languages"
            )

    def becomes_target(self, language: str, name: str) -> bool:
        """Return whether a file's language, which its translation also states, is the source and becomes the target.

        Raises DataError for a language other than these two: an untranslated copy may already state the target.
        """
        if not language.strip() or is_same(language, self.target):
            return False
        self.refuse_languages(language, "", name)
        return bool(self.target)

    def leaves(self, *keys: str) -> bool:
        """Return whether a value is left untranslated: one of its keys, or a dotted path of the first, is listed."""
        dotted = [".".join(keys[:number]) for number in range(2, len(keys) + 1)]
        return any(key == named or fnmatchcase(key, named) for named in self.leave for key in (*keys, *dotted))


_SAME = {"iw": "he", "in": "id", "ji": "yi", "nb": "no", "nn": "no", "tl": "fil", "sh": "sr", "mo": "ro"}
"""_SAME maps language codes to equivalent ones."""


def language_of(code: str) -> str:
    """Return a language code without region, script and character set, with two letters if such a code exists."""
    first = regex.split("[-_@.]", code.strip().lower())[0]
    short = main_language(first)
    return _SAME.get(short, short)


_SCRIPTS = {"zh": {"cn": "hans", "sg": "hans", "my": "hans", "tw": "hant", "hk": "hant", "mo": "hant"}}
"""_SCRIPTS maps languages to their scripts by region."""


def _script_of(code: str) -> str:
    """Return the script that a language code names, or that its region implies; empty if unknown."""
    regions = _SCRIPTS.get(language_of(code), {})
    for part in regex.split("[-_@.]", code.strip().lower())[1:]:
        script = {"latin": "latn", "cyrillic": "cyrl"}.get(part, part)
        if len(script) == 4 and script.isalpha():
            return script
        if part in regions:
            return regions[part]
    return ""


def is_same(one: str, other: str) -> bool:
    """Return whether two codes denote the same language, and not different scripts of it (zh-Hant and zh-CN)."""
    scripts = {_script_of(one), _script_of(other)} - {""}
    return language_of(one) == language_of(other) and len(scripts) < 2


def differ(one: str, other: str) -> bool:
    """Return whether two codes denote different languages or scripts; codes of different lengths are not compared."""
    first, second = language_of(one), language_of(other)
    is_known = first not in ("", "und", "mul", "mis", "zxx", "x", "i", "*all*") and 1 < len(first) == len(second) < 4
    return is_known and not is_same(one, other)


_MAX_RATIO = 200
"""_MAX_RATIO is how many bytes a byte of an archive may expand to, checked once there are _RATIO_FREE bytes."""
_RATIO_FREE = 1 << 24
_BLOCK = 1 << 18
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


class Archive:
    """A zip archive in memory. Nothing from it is ever written under a name that it contains.

    Raises DataError if it is damaged, encrypted, beyond the limits, compressed in an unusual way, or contains duplicate
    names or names that lead out of a folder.
    """

    def __init__(self, content: bytes, name: str, limits: Limits) -> None:
        self.name, self.limits = name, limits
        self._pieces = 0
        # Every entry of the directory starts with this signature; counted before zipfile creates an object for each.
        if content.count(b"PK\x01\x02") > limits.members:
            raise DataError(f"{name}: more than {limits.members:,} members")
        try:
            self._zip = zipfile.ZipFile(io.BytesIO(content))
        except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError, UnicodeError) as error:
            raise DataError(f"{name}: not a zip archive, or a damaged one ({error})") from None
        self.names = [info.filename for info in self._zip.infolist()]
        self._check(len(content))

    def _check(self, packed: int) -> None:
        if len(set(self.names)) != len(self.names):
            raise DataError(f"{self.name}: two members have the same name")
        total = 0
        for info in self._zip.infolist():
            shown = f"{self.name}: member {printable(info.filename)!r}"
            parts = info.filename.replace("\\", "/").split("/")
            if ".." in parts or info.filename.startswith(("/", "\\")) or ":" in parts[0]:
                raise DataError(f"{shown} has a name that leads out of the archive")
            if info.flag_bits & 1:
                raise DataError(f"{shown} is encrypted; save the document without a password")
            if info.compress_type not in _METHODS:
                raise DataError(f"{shown} is packed in a way that documents do not use")
            total += info.file_size
        if total > self.limits.unpacked:
            raise DataError(f"{self.name}: its members have {total:,} bytes, more than {self.limits.unpacked:,}")
        if total > _RATIO_FREE and total > _MAX_RATIO * packed:
            raise DataError(
                f"{self.name}: {packed:,} bytes expand to {total:,}, over {_MAX_RATIO} times as many; documents "
                "do not compress so well"
            )

    def read(self, member: str) -> bytes:
        """Return the content of a member, never more than the size in the directory.

        Raises DataError if there is no such member, or it is damaged.
        """
        try:
            with self._zip.open(member) as file:
                return b"".join(iter(lambda: file.read(_BLOCK), b""))
        except KeyError:
            raise DataError(f"{self.name}: has no {printable(member)!r}; is it a document of another kind?") from None
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, ValueError) as error:
            raise DataError(f"{self.name}: member {printable(member)!r} is damaged ({error})") from None

    def markup(self, member: str) -> bytes:
        """Return the content of a markup member. Raises DataError, also if it has too many pieces."""
        content = self.read(member)
        self._pieces += sum(map(content.count, TAGS))
        self.limits.refuse_many(self._pieces, self.name)
        return content

    def replaced(self, members: Mapping[str, bytes]) -> bytes:
        """Return the archive with the content of some members replaced; order, names, dates and methods stay the same.

        Raises DataError if a member is damaged.
        """
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as packed:
            packed.comment = self._zip.comment
            for info in self._zip.infolist():
                content = members.get(info.filename)
                packed.writestr(copy.copy(info), self.read(info.filename) if content is None else content)
        return out.getvalue()
