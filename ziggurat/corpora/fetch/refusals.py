"""What a server's answer means: pages in place of data, answers that will not change, servers that cannot be reached.

Every message ends with the way out. What may pass (overload, a dropped connection) is no matter for this module, except
that it says how long to wait.
"""

from __future__ import annotations

import html
import re
import ssl

from ziggurat.system.errors import DataError, printable

BRING = "or fetch it by other means and put it into a mirror (`--mirror`, docs/fetch.md)"
"""The way out that always exists."""

_PASSING = {408, 421, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524}
_MEANING = {
    401: "it wants a login",
    402: "it wants to be paid",
    403: "it refuses access: the corpus may need a licence or a login, or the file has moved",
    404: "there is no such file; it has moved, or the name of the version or languages is wrong",
    407: "the proxy wants a login: `--proxy http://USER:PASSWORD@HOST:PORT`",
    410: "the file was taken away",
    451: "the file is withheld for legal reasons",
}
_MAGIC = {
    "gz": b"\x1f\x8b",
    "tgz": b"\x1f\x8b",
    "xz": b"\xfd7zXZ\x00",
    "zst": b"\x28\xb5\x2f\xfd",
    "zip": b"PK",
}
"""First bytes of a file, by the ending of its name."""

# The repetition is possessive: else a comment could end at a later `-->`, and what stands before that would be skipped.
_PAGE = re.compile(
    rb"(?:\xef\xbb\xbf|\s|<!--.*?-->|<\?.*?\?>)*+<(?:!doctype\s+html|html|head|body|script|meta)(?![\w.:-])",
    re.IGNORECASE | re.DOTALL,
)
"""Beginning of a web page, behind comments and XML declarations. SGM, TMX and other XML have other elements."""

# Servers call what they do not know plain text or bytes, or say nothing; no corpus of the built-in registry is known to
# come as a page. Scripts that send a file and leave their type as it was do exist: a packed file tells by itself.
_PAGE_TYPES = {"text/html", "application/xhtml+xml"}
"""Types of web pages."""


def refuse_answer(url: str, status: int, retry_after: str | None) -> float:
    """Return the seconds to wait after an answer that may pass. Raises DataError for any other."""
    if status in _PASSING:
        return float(retry_after) if retry_after and re.fullmatch(r"\d{1,5}", retry_after) else 0.0
    meaning = _MEANING.get(status, "an answer that asking again does not change")
    raise DataError(
        f"{url}: the server answered {status}: {meaning}; give the new address in a registry of your own "
        f"(`--registry`), {BRING}"
    )


def refuse_page(url: str, head: bytes, content_type: str) -> None:
    """Raise DataError if a file is a web page, by its first bytes or its type, or is not what its name says.

    The type counts only where the name does not say how the file begins.
    """
    typed = content_type in _PAGE_TYPES and _magic(url) is None
    if typed or _PAGE.match(head):
        found = re.search(rb"<title[^>]*>(.*?)</title>", head, re.IGNORECASE | re.DOTALL)
        title = html.unescape(found[1].decode("utf-8", "replace")).strip() if found else ""
        title = " ".join(title.split()) or (f"sent as {content_type}" if typed else "")
        says = f" ({printable(title)})" if title else ""
        raise DataError(
            f"{url}: the server sent a web page{says} in place of the file: a login, a licence to accept, an address "
            f"that has moved, or the network's own sign-in page; open it in a browser, {BRING}"
        )
    refuse_content(url, head, f", sent as {printable(content_type)}")


def refuse_content(name: str, head: bytes, remark: str = "") -> None:
    """Raise DataError unless the first bytes of a file are what the ending of its name says."""
    magic = _magic(name)
    if magic is not None and not head.startswith(magic):
        raise DataError(
            f"{name}: what came is not what the name says: it begins with {printable(repr(head[:16]), 60)}{remark}; "
            f"open it in a browser, {BRING}"
        )


def _magic(name: str) -> bytes | None:
    """Return the first bytes of a file of this name or address; None where its ending tells none."""
    return _MAGIC.get(name.partition("?")[0].rpartition(".")[2].lower())


def refuse_unreachable(url: str, reason: object) -> None:
    """Raise DataError for a connection that will fail every time: a certificate that nobody vouches for."""
    if isinstance(reason, ssl.SSLCertVerificationError):
        raise DataError(
            f"{url}: its certificate is not trusted here ({printable(reason.verify_message, 120)}); behind a company's "
            f"proxy set SSL_CERT_FILE to the certificates of the company, {BRING}"
        )
