"""Random hostile requests: what strangers may send to a server, as bytes on the socket."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import httpx

from tests.serve.programs import head
from tests.serve.text.files import FILES, members, packed
from tests.serve.text.test_hostile_documents import XML_ATTACKS, with_part

PATHS = ("/translate", "/detect", "/languages", "/suggest", "/v2/translate", "/v2/languages", "/v1/chat/completions",
         "/v1/translate", "/v1/settings", "/translate_file", "/v1/documents", "/v1/documents/x", "/v1/documents/x/file",
         "/download_file/x", "/v2/document", "/v2/document/x", "/v2/document/x/result", "/v2/glossaries",
         "/v2/glossaries/x", "/v2/glossaries/x/entries", "/v2/glossary-language-pairs")  # fmt: skip
VALUES: list[Any] = [
    None, True, 0, -1, 1e308, 10**400, "", " ", "a", "\0", "\ud800", "\u202e", "🙂" * 50, "x" * 3000, "%s{0}{{a}}", [],
    [[]], [None], ["a", 1], {}, {"a": {"b": []}}, "auto", "de", "en", "qlo", "../../etc/passwd", "<b>", "</b></p>",
    "<!DOCTYPE x [<!ENTITY a 'b'>]><x>&a;</x>", "html", "text", "1e5", "９", [*"abc"], "xml", "hund\thaus", "a,b\n\"",
    {"dog": "Hund"}, [{"source": "dog", "target": "Hund", "mode": "hard"}], [{"source": "dog", "target": "\0"}], "csv",
]  # fmt: skip
FIELDS = ("q", "source", "target", "format", "alternatives", "api_key", "text", "source_lang", "target_lang",
          "tag_handling", "messages", "model", "stream", "type", "glossary", "prefix", "scores", "alignments", "name",
          "entries", "entries_format", "glossary_id", "split_sentences", "ignore_tags", "splitting_tags",
          "outline_detection", "document_key", "filename", "output_format")  # fmt: skip
WHOLE = {"q": "A dog runs.", "source": "en", "target": "de", "text": ["A dog"], "target_lang": "DE", "model": "en-de",
         "messages": [{"role": "user", "content": "A dog"}]}  # fmt: skip
BITS = ["<b>", "</b>", "<i class='", '">', "</p>", "<br/>", "<!--", "-->", "<![CDATA[", "]]>", "&#0;", "&amp",
        "<a b c>", "<script>", "</script>", "<?xml?>", "A dog", " runs. ", "<", ">", "\0", "<b translate=no>", "</>",
        "&#x110000;", "<x y=1 y=2>"]  # fmt: skip
PAIR = {"source": "en", "target": "de"}
GOOD = {"q": "A dog runs.", **PAIR}
LARGE = 10_000_000


class Attack(NamedTuple):
    """The bytes to send, in parts with pauses between them (seconds), and the right numbers of answers."""

    parts: list[bytes]
    answers: int = 1
    pause: float = 0.0


def sent(method: str, path: str, **content: Any) -> bytes:
    """Return a request as httpx encodes it."""
    request = httpx.Request(method, f"http://x{path}", **content)
    lines = [f"{name}: {value}" for name, value in request.headers.items() if name != "host"]
    return head(*lines, "Connection: close", method=method, path=request.url.raw_path.decode()) + request.read()


def fields(draw: random.Random) -> Attack:
    """Wrong values in JSON, forms, files and queries that are intact, cut off or mixed up."""
    path, method = draw.choice(PATHS), draw.choice(["POST"] * 8 + ["GET", "PUT", "DELETE"])
    given = {key: value for key, value in WHOLE.items() if draw.random() < 0.8}
    for _ in range(draw.randrange(4)):
        given[draw.choice(FIELDS)] = draw.choice(VALUES)
    kind = draw.randrange(7)
    content = json.dumps(given).encode("utf-8", "surrogatepass")
    plain = {key: str(value).encode("utf-8", "replace").decode()[:500] for key, value in given.items()}
    more: dict[str, Any]
    if kind == 0:
        more = {"content": bytes(draw.randrange(256) for _ in range(draw.randrange(200)))}
    elif kind == 1:  # JSON that ends early, or goes on after its end
        at = draw.randrange(len(content) + 1)
        more = {"content": content[:at] + draw.choice([b"", b"}", b"\xff", b"," * 9, b"[" * 900])}
    elif kind == 2:
        more = {"data": plain} if draw.random() < 0.7 else {"params": plain}
    elif kind == 3:
        boundary = draw.choice(["x", "", "y" * 300])
        parts = b"".join(
            b"--x\r\nContent-Disposition: form-data; name=" + draw.choice([b'"q"', b'"', b"q; filename=../x", b""]) +
            b"\r\n\r\nA\r\n" for _ in range(draw.randrange(5))
        )  # fmt: skip
        more = {"content": parts + b"--x--", "headers": {"content-type": f"multipart/form-data; boundary={boundary}"}}
    elif kind == 4:
        names = ["a.txt", "a.docx", "a.po", "a.json", "a.xlf", "../a.srt", "", "x" * 300 + ".md", "a.html", "\n"]
        values = [b"", b"A dog.", b"PK\x03\x04", b"\xff\xfe", b"[" * 99, b"<a>", bytes(range(256)), b"x" * 2500]
        file = draw.choice(names), draw.choice(values)
        more = {"data": plain, "files": {draw.choice(["file", "q"]): file}}
    else:
        kinds = ["application/json", "text/plain", "application/x-www-form-urlencoded", 'a/b; charset="', ""]
        more = {"content": content, "headers": {"content-type": draw.choice(kinds)}}
    return Attack([sent(method, path, **more)])


def large(draw: random.Random) -> Attack:
    """Ten megabytes: as JSON, as a form, in chunks, for a path that accepts none, as a file."""
    filling = draw.choice([b"a", b"[", b"\xff", b"<b>", b"A dog runs. "])
    filling *= LARGE // len(filling)
    kind = draw.randrange(6)
    if kind == 0:
        return Attack([sent("POST", draw.choice(PATHS), json={**GOOD, "q": "a" * LARGE})])
    if kind == 1:
        return Attack([sent("POST", "/translate", content=filling)])
    if kind == 2:
        return Attack([sent("POST", draw.choice(PATHS), data={**GOOD, "q": "a" * LARGE})])
    if kind == 3:
        top = head("Content-Type: application/json", "Transfer-Encoding: chunked", "Connection: close")
        return Attack([top, *[b"10000\r\n%s\r\n" % filling[:65_536]] * (LARGE >> 16), b"0\r\n\r\n"])
    if kind == 4:
        return Attack([head(f"Content-Length: {LARGE}", "Connection: close", path="/nowhere"), filling])
    name = draw.choice(["a.txt", "a.html", "a.docx", "a.json", "a.po", "a.srt", "a.xlf", "a.md"])
    path = draw.choice(["/translate_file", "/v1/documents", "/v2/document"])
    return Attack([sent("POST", path, data={**PAIR, "target_lang": "DE"}, files={"file": (name, filling)})])


def flood(draw: random.Random) -> Attack:
    """Endless headers: many, long, or a long path, in one piece or in several."""
    size = draw.choice([60_000, 70_000, 300_000, 2_000_000])
    kind = draw.randrange(4)
    lines = ["X: " + "a" * size] if kind == 0 else [f"X-{n}: a" for n in range(size // 12)] if kind == 1 else []
    path = "/health?" + "a" * size if kind == 2 else "/" + "a/" * (size // 2) if kind == 3 else "/health"
    whole = head(*lines, "Connection: close", method="GET", path=path)
    step = draw.choice([len(whole), 1 << 14, 1 << 16])
    return Attack([whole[at : at + step] for at in range(0, len(whole), step)])


def slow(draw: random.Random) -> Attack:
    """Heads and bodies that arrive byte by byte, or stop arriving."""
    whole = sent("POST", "/translate", json=GOOD)
    begin = draw.choice([0, 1, 30, whole.index(b"\r\n\r\n") + 4, len(whole) - 3])
    rest = [whole[at : at + 1] for at in range(begin, len(whole))]
    return Attack([whole[:begin], *rest[: draw.choice([0, 8])]], pause=0.2)


def deep(draw: random.Random) -> Attack:
    """Nesting: of JSON, of tags in texts, of documents."""
    depth = draw.choice([65, 1000, 30_000, 200_000])
    kind = draw.randrange(4)
    if kind == 0:
        opening, closing = draw.choice([(b"[", b"]"), (b'{"a":', b"}")])
        value = opening * depth + b"1" + closing * draw.choice([0, depth])
        field = draw.choice([b"q", b"text", b"messages", b"glossary"])
        content = b'{"source": "en", "target": "de", "%s": %s}' % (field, value)
        return Attack([sent("POST", draw.choice(PATHS), content=content, headers={"content-type": "application/json"})])
    tags = "<b>" * depth + "A dog" + "</b>" * draw.choice([0, depth])
    if kind == 1:
        return Attack([sent("POST", "/translate", json={"q": tags[:900_000], **PAIR, "format": "html"})])
    if kind == 2:
        more = {"text": [tags[:900_000]], "target_lang": "DE", "source_lang": "EN", "tag_handling": "xml"}
        return Attack([sent("POST", "/v2/translate", json=more)])
    name = draw.choice(["a.html", "a.xlf", "a.json", "a.md"])
    nested = {"a.json": b"[" * depth, "a.md": b"> " * depth + b"a"}.get(name, tags.encode())
    return Attack([sent("POST", "/translate_file", data=PAIR, files={"file": (name, nested)})])


@cache
def bombs() -> list[tuple[str, bytes]]:
    """Archives that unpack to far more than their size, and XML that expands excessively or names files of the
    machine.
    """
    zeros = bytes(40 << 20)
    found = [
        ("a.docx", with_part("a.docx", "x", zeros)),
        ("a.docx", with_part("a.docx", "word/document.xml", b"<a/>" + zeros)),
        ("a.odt", with_part("a.odt", "content.xml", b" " * (40 << 20))),
        ("a.epub", with_part("a.epub", "x", packed({"y": zeros}))),
        ("a.docx", packed({**members(FILES["a.docx"]), **{f"n{n}": b"" for n in range(20_000)}})),
    ]
    places = [("a.xlf", ""), ("a.tmx", ""), ("a.docx", "word/document.xml"), ("a.odt", "content.xml"),
              ("a.pptx", "ppt/slides/slide1.xml"), ("a.epub", "META-INF/container.xml")]  # fmt: skip
    return found + [
        (name, with_part(name, part, attack) if part else attack) for name, part in places for attack in XML_ATTACKS
    ]


def bomb(draw: random.Random) -> Attack:
    """Zip and XML bombs, and entities that name files of the machine, as files or as texts with tags."""
    if draw.random() < 0.2:
        text = draw.choice(XML_ATTACKS)[:100_000].decode("utf-8", "replace")
        kind = {"text": [text], "target_lang": "DE", "source_lang": "EN", "tag_handling": draw.choice(["xml", "html"])}
        return Attack([sent("POST", "/v2/translate", json=kind)])
    path = draw.choice(["/translate_file", "/v1/documents"])
    return Attack([sent("POST", path, data=PAIR, files={"file": draw.choice(bombs())})])


def traversal(draw: random.Random) -> Attack:
    """Ways out of the server's folder: in paths, in file names, in names inside archives."""
    up = draw.choice(["../", "..%2f", "%2e%2e/", "..\\", "....//", "%00../", "/"]) * draw.randrange(1, 9) + "etc/passwd"
    if draw.random() < 0.5:
        where = draw.choice(["/", "/page.js/", "/download_file/", "/v1/documents/", "/v2/document/", "/static/"])
        return Attack([head("Connection: close", method="GET", path=where + up.replace("\\", "%5c"))])
    name = draw.choice([up, up + ".txt", up + ".docx", "C:\\" + up + ".txt", "a\0.txt", "." * 200 + ".txt", "CON.txt"])
    content = b"A dog." if draw.random() < 0.5 else packed({**members(FILES["a.docx"]), up: b"x"})
    return Attack([sent("POST", "/translate_file", data=PAIR, files={"file": (name, content)})])


def smuggled(draw: random.Random) -> Attack:
    """A request that is hidden in another's body: by two lengths, or by chunks that two readers count differently."""
    hidden = head("Connection: close", method="GET", path="/v1/settings")
    coding, length = "Transfer-Encoding: chunked", f"Content-Length: {len(hidden)}"
    chunk = b"%x\r\n%s\r\n0\r\n\r\n" % (len(hidden), hidden)
    kind = draw.randrange(6)
    if kind == 0:
        return Attack([head(*draw.sample([coding, "Content-Length: 4"], 2)) + b"0\r\n\r\n" + hidden])
    if kind == 1:
        return Attack([head(length, draw.choice(["Content-Length: 0", "Content-Length: 5"])) + hidden])
    if kind == 2:
        odd = draw.choice(["xchunked", "chunked, identity", "identity, chunked", "\x0bchunked", "chunked;x", "gzip"])
        return Attack([head(f"Transfer-Encoding: {odd}", length) + chunk])
    if kind == 3:
        odd_size = [b"-1", b"0x5", b"5 ", b"+5", b"0" * 40 + b"5", b"f" * 16, b"5\n", b"", b"5;" + b"a" * 70_000]
        size = draw.choice(odd_size)
        return Attack([head(coding) + size + b"\r\nabcde\r\n0\r\n\r\n" + hidden], answers=2)
    if kind == 4:  # in its proper place, this is a body and nothing else
        return Attack([head(coding, "Connection: close") + chunk])
    blank = draw.choice([coding.replace(":", " :"), f" {coding}", f"Content-Length: 5\r\n {length}"])
    return Attack([head("X: a", blank, "Connection: close") + chunk])


def markup(draw: random.Random) -> Attack:
    """Tags that close what was not opened, open what is not closed, or are not tags."""
    text = "".join(draw.choices(BITS, k=draw.randrange(1, 25)))
    if draw.random() < 0.5:
        return Attack([sent("POST", "/translate", json={"q": text, **PAIR, "format": "html"})])
    more = {"text": [text], "target_lang": "DE", "source_lang": "EN", "tag_handling": draw.choice(["xml", "html"])}
    return Attack([sent("POST", "/v2/translate", json=more)])


def good(draw: random.Random) -> Attack:
    """A valid request among the hostile ones."""
    return Attack([sent("POST", "/translate", json=GOOD)])


KINDS: dict[str, tuple[int, Callable[[random.Random], Attack]]] = {
    "wrong values, broken JSON and forms": (680, fields),
    "good ones among them": (50, good),
    "10 MB": (10, large),
    "floods of headers": (30, flood),
    "slow senders": (20, slow),
    "deep nesting": (50, deep),
    "zip and XML bombs, entities": (40, bomb),
    "ways out of folders": (40, traversal),
    "requests hidden in others": (40, smuggled),
    "broken markup": (40, markup),
}
"""KINDS are kinds of requests, each with its number per thousand and a function that draws one."""
