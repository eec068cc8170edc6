"""Transfer of one file over HTTP: resumed after a dropped connection, never mixed from two versions, never a web page.

The part received so far stays next to the destination file as `NAME.part`, locked while a process writes
it; `NAME.part.json` has the URL, the version (ETag or date) and the length given by the server. A later request asks
only for the rest of that version (If-Range). Permanent failures (a page instead of data, a missing file) are errors
with a remedy; overload and dropped connections are retried.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import html
import http.client
import itertools
import json
import os
import re
import shutil
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import BinaryIO

from ziggurat.corpora.fetch.network import Network
from ziggurat.system.errors import DataError, is_full_disk, printable, written_whole
from ziggurat.system.files import write_atomically
from ziggurat.system.staging import is_same, lock_missing, sync_folder, try_lock


@dataclass
class Part:
    """The part of a file received so far; the file is open and locked."""

    path: Path
    """The destination."""
    file: BinaryIO
    size: int = 0
    """Bytes in the part."""
    url: str = ""
    """URL that they came from."""
    version: str = ""
    """ETag or date of their version; empty: the part cannot be resumed."""
    total: int | None = None
    """Length of that version."""

    @classmethod
    @contextlib.contextmanager
    def opened(cls, path: Path, waiting: Callable[[], object] = lambda: None) -> Iterator[Part]:
        """Context with the part of `path`, new or resumed, once no other process has it; `waiting` reports the wait."""
        name = path.with_name(f"{path.name}.part")
        with written_whole(path), _alone(name, waiting) as file:
            part = cls(path, file, file.tell())
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                known = json.loads(part._notes.read_bytes())
                part.url, part.version, part.total = str(known["url"]), str(known["version"]), known["total"]
            try:
                yield part
            finally:
                if not part.size:
                    name.unlink(missing_ok=True)
                    part._notes.unlink(missing_ok=True)

    @property
    def _notes(self) -> Path:
        return self.path.with_name(f"{self.path.name}.part.json")

    def restart(self, url: str = "", version: str = "", total: int | None = None) -> None:
        """Discard the part, and record what replaces it."""
        self._notes.unlink(missing_ok=True)  # first: a part without notes is never resumed
        self.file.truncate(0)
        self.size, self.url, self.version, self.total = 0, url, version, total
        if version:
            notes = {"url": url, "version": version, "total": total}
            write_atomically(self._notes, json.dumps(notes).encode())

    def write(self, block: bytes) -> None:
        """Add a block. Raises DataError if the disk is full."""
        try:
            self.file.write(block)
        except OSError as error:
            if is_full_disk(error):
                raise DataError(f"{self.path}: the disk is full; make room and run this again to resume") from None
            raise
        self.size += len(block)

    def finish(self, check: Callable[[Path], object]) -> None:
        """Give the file its name. Raises DataError, and discards it, if its length is wrong or `check` raises."""
        self.file.flush()
        try:
            if self.total is not None and (found := os.fstat(self.file.fileno()).st_size) != self.total:
                raise DataError(
                    f"{self.path}: has {found:,} bytes instead of {self.total:,}; it was discarded, run this again"
                )
            check(Path(self.file.name))
        except DataError:
            self.restart()
            raise
        os.fsync(self.file.fileno())
        self._notes.unlink(missing_ok=True)
        os.replace(self.file.name, self.path)
        sync_folder(self.path.parent)


@contextlib.contextmanager
def _alone(name: Path, waiting: Callable[[], object]) -> Iterator[BinaryIO]:
    """Context with the file `name`, open for appending and locked. Raises DataError if there are no locks."""
    while True:
        with name.open("ab") as file:
            try:
                if not try_lock(file.fileno()):
                    waiting()
                    fcntl.flock(file.fileno(), fcntl.LOCK_EX)
            except OSError as error:
                raise lock_missing(name, error) from None
            if is_same(name, file.fileno()):  # otherwise the other process has renamed or removed it
                file.seek(0, os.SEEK_END)  # the other process may have appended after it was opened here
                yield file
                return


_BRING = "or fetch it by other means and put it into a mirror (`--mirror`, docs/data.md)"
"""The remedy that always exists."""

_PASSING = {408, 421, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524}
_MEANING = {
    401: "it requires a login",
    402: "it requires payment",
    403: "it refuses access: the corpus may need a licence or a login, or the file has moved",
    404: "there is no such file; it has moved, or the name of the version or languages is wrong",
    407: "the proxy requires a login: `--proxy http://USER:PASSWORD@HOST:PORT`",
    410: "the file was removed",
    451: "the file is withheld for legal reasons",
}
_MAGIC = {
    "gz": b"\x1f\x8b",
    "tgz": b"\x1f\x8b",
    "xz": b"\xfd7zXZ\x00",
    "zst": b"\x28\xb5\x2f\xfd",
    "zip": b"PK",
}
"""Suffix of a file's name -> its first bytes."""

# The repetition is possessive: otherwise a comment could end at a later `-->`, skipping the text before it.
_PAGE = re.compile(
    rb"(?:\xef\xbb\xbf|\s|<!--.*?-->|<\?.*?\?>)*+<(?:!doctype\s+html|html|head|body|script|meta)(?![\w.:-])",
    re.IGNORECASE | re.DOTALL,
)
"""Start of a web page, after comments and XML declarations. SGM, TMX and other XML have other elements."""

# Servers send unknown files as plain text or bytes, or without a type, and no corpus of the built-in registry is known
# to have a page's type. Some scripts do send files with the wrong type, but compressed files can be recognised.
_PAGE_TYPES = {"text/html", "application/xhtml+xml"}
"""Types of web pages."""
_NOTE_TYPES = {"application/json", "application/problem+json", "application/ld+json"}
"""Types of messages to programs, sent instead of a file, often with status 200, unless the file is JSON by its name."""


def _refuse_answer(url: str, status: int, retry_after: str | None) -> float:
    """Return the seconds to wait after a transient error answer. Raises DataError for any other."""
    if status in _PASSING:
        return float(retry_after) if retry_after and re.fullmatch(r"\d{1,5}", retry_after) else 0.0
    meaning = _MEANING.get(status, "asking again will not change that")
    raise DataError(
        f"{url}: the server answered {status}: {meaning}; give the new address in a registry of your own "
        f"(`--registry`), {_BRING}"
    )


def refuse_page(url: str, head: bytes, content_type: str) -> None:
    """Raise DataError if a file's first bytes or type show that it is a web page, or do not match its name's suffix.

    The type counts only if the suffix does not determine the first bytes.
    """
    noted = content_type in _NOTE_TYPES and not url.partition("?")[0].lower().endswith(("json", "jsonl"))
    typed = (noted or content_type in _PAGE_TYPES) and _magic(url) is None
    if typed or _PAGE.match(head):
        found = re.search(rb"<title[^>]*>(.*?)</title>", head, re.IGNORECASE | re.DOTALL)
        title = html.unescape(found[1].decode("utf-8", "replace")).strip() if found else ""
        title = " ".join(title.split()) or (f"sent as {content_type}" if typed else "")
        says = f" ({printable(title)})" if title else ""
        raise DataError(
            f"{url}: the server sent a {'message' if noted else 'web page'}{says} in place of the file: a login, a "
            f"licence to accept, an address that has moved, or the network's own sign-in page; open it in a browser, "
            f"{_BRING}"
        )
    refuse_content(url, head, f", sent as {printable(content_type)}")


def refuse_content(name: str, head: bytes, remark: str = "") -> None:
    """Raise DataError unless the first bytes of a file match the suffix of its name."""
    magic = _magic(name)
    if magic is not None and not head.startswith(magic):
        raise DataError(
            f"{name}: the content does not match the name: it begins with {printable(repr(head[:16]), 60)}{remark}; "
            f"open it in a browser, {_BRING}"
        )


def _magic(name: str) -> bytes | None:
    """Return the first bytes of a file of this name or URL; None if its suffix does not determine them."""
    return _MAGIC.get(name.partition("?")[0].rpartition(".")[2].lower())


Progress = Callable[[str, int, int | None], None]
"""Function called with the current activity, the bytes or pairs so far and the total (None: unknown)."""

_BLOCK_BYTES = 1 << 16
_HEAD_BYTES = 512
_GAIN_BYTES = 1 << 14  # growth after which failures are counted from zero; near the end a tenth of the rest is enough
_SPARE_BYTES = 1 << 26  # bytes left free on the disk
_SMALL_BYTES = 1 << 26
_AWAY = {errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL}
"""Errors of a lost network, for which Python has no class."""


class _Dropped(Exception):  # noqa: N818
    """A transient connection failure; `wait` is the number of seconds requested by the server."""

    def __init__(self, why: str, *, tries: int | None = None, wait: float = 0.0) -> None:
        super().__init__(why)
        self.tries, self.wait = tries, wait


def download(
    url: str, path: Path, network: Network, progress: Progress, check: Callable[[Path, str], object] | None = None
) -> None:
    """Fetch `url` to the file `path`, which appears whole or not at all.

    If this fails or is killed, the part received so far stays, and the next call resumes from it. `check` gets the
    complete file before it has its name, and the URL that it came from; if it raises, the file is discarded.

    If another process fetches the same file, this waits for it; the result is neither fetched again nor checked.

    Raises DataError with a remedy if there is no such file, no room, or the connection fails repeatedly.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with Part.opened(path, lambda: progress(f"wait for another process that fetches {path}", 0, None)) as part:
        if path.exists():
            return
        failures, furthest = 0, part.size
        while True:
            try:
                came_from = _receive(url, part, network, progress)
                break
            except _Dropped as dropped:
                failures += 1
                # Not just any byte: a server that sends one per attempt would block for ever.
                gain = _GAIN_BYTES if part.total is None else max(1, (part.total - furthest) // 10)
                if network.retries and part.size - furthest >= min(gain, _GAIN_BYTES):  # 0 retries: not one
                    failures, furthest = 0, part.size
                kept = f"; {part.size:,} bytes are kept, run this again to resume" if part.size else ""
                _wait(url, dropped, failures, network, kept)
        part.finish(lambda file: check(file, came_from) if check else None)


def read_small(url: str, network: Network) -> bytes:
    """Return the content at `url`, at most 64 MiB, such as an index. Raises DataError."""
    failures = 0
    while True:
        try:
            blocks, size = list[bytes](), 0
            with _answered(url, network, {}) as response:
                for block in _blocks(response):
                    blocks.append(block)
                    size += len(block)
                    if size > _SMALL_BYTES:
                        raise DataError(f"{url}: longer than {_SMALL_BYTES >> 20} MiB, too long for such an answer")
            return b"".join(blocks)
        except _Dropped as dropped:
            failures += 1
            _wait(url, dropped, failures, network)


def _wait(url: str, dropped: _Dropped, failures: int, network: Network, kept: str = "") -> None:
    """Wait before the next attempt. Raises DataError after too many consecutive failures."""
    if failures > (network.retries if dropped.tries is None else min(dropped.tries, network.retries)):
        times = f", {failures} times in a row" if failures > 1 else ""
        raise DataError(f"{url}: {dropped}{times}{kept}") from None
    network.pause(max(min(2.0 ** (failures - 1), 60.0), min(dropped.wait, 300.0)))


def size_of(url: str, network: Network) -> int | None:
    """Return the length that the server gives for `url`; None if it gives none or cannot be reached."""
    try:
        with _answered(url, network, {}, method="HEAD") as response:
            return _natural(response.headers.get("Content-Length"))
    except (_Dropped, DataError):
        return None


def _receive(url: str, part: Part, network: Network, progress: Progress) -> str:
    """Fetch the rest of `part` in one request; return the URL that answered. Raises _Dropped or DataError."""
    # A part from another URL is kept but not resumed: a mirror may lack the file, and its own server then resumes it.
    goes_on = part.size and part.url == url and part.version and (part.total is None or part.size <= part.total)
    asked = {"Range": f"bytes={part.size}-", "If-Range": part.version} if goes_on else {}
    with _answered(url, network, asked) as response:
        if response.status == 416:
            return _at_the_end(part, response)
        blocks = _blocks(response)
        head = _accept(url, part, response, blocks, rest=bool(asked))
        for block in itertools.chain([head], blocks):
            part.write(block)
            progress(part.path.name, part.size, part.total)
        part.file.flush()
        if part.total is not None and part.size < part.total:
            raise _Dropped(f"ended after {part.size:,} of {part.total:,} bytes")
        return response.url


def _accept(url: str, part: Part, response: http.client.HTTPResponse, blocks: Iterator[bytes], *, rest: bool) -> bytes:
    """Prepare the part for the body, `blocks`; return the bytes already read of it, the first of a whole file.

    `rest`: whether the rest of the part was requested. The part is discarded only if the file that replaces it is
    known not to be a page and to fit on the disk.

    Raises _Dropped if the body is not what was requested, and DataError.
    """
    headers = response.headers
    if headers.get("Content-Encoding", "identity").lower() not in ("identity", "x-gzip", "gzip"):
        raise DataError(
            f"{url}: sent in the encoding {printable(headers['Content-Encoding'])}, which was not requested"
        )
    if len(set(headers.get_all("Content-Length", []))) > 1:
        raise DataError(f"{url}: sent with several lengths, so the right one is unknown; {_BRING}")
    version, length = _version(headers), response.length
    if response.status == 206:
        found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", headers.get("Content-Range", ""))
        total = _natural(found[3]) if found else None
        same = part.total is None or total is None or total == part.total
        if not rest or not found or int(found[1]) != part.size or not same or (version and version != part.version):
            if rest:
                part.restart()
            raise _Dropped("the file changed between two requests, or the server sent another part than requested")
        # The first answer may have had no length (chunks), and http.client silently ends a truncated body.
        part.total = part.total or total or int(found[2]) + 1
        return b""
    if length is not None and length > shutil.disk_usage(part.path.parent).free + part.size - _SPARE_BYTES:
        raise DataError(
            f"{url}: {length:,} bytes do not fit on the disk of {part.path.parent}; make room, or set `--cache`"
        )
    head = b""
    while len(head) < _HEAD_BYTES and (block := next(blocks, b"")):
        head += block
    if not head:
        raise DataError(f"{url}: the server sent an empty file; look for another address (`--registry`, `--mirror`)")
    refuse_page(url, head, headers.get_content_type())
    part.restart(url, version, length)
    return head


def _at_the_end(part: Part, response: http.client.HTTPResponse) -> str:
    """Return the URL if the part is already the whole file, as a 416 states. Raises _Dropped otherwise."""
    found = re.fullmatch(r"bytes \*/(\d+)", response.headers.get("Content-Range", ""))
    version = _version(response.headers)
    if found and int(found[1]) == part.size and version in ("", part.version):
        part.total = part.size  # the first answer may have claimed more
        return response.url
    part.restart()
    raise _Dropped("the file changed between two requests")


def _version(headers: Message) -> str:
    """Return the value for If-Range: a strong ETag, or else the date; "" if there is neither."""
    tag = headers.get("ETag", "").strip()
    return tag if tag and not tag.startswith("W/") else headers.get("Last-Modified", "").strip()


def _natural(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"\d{1,18}", text.strip()) else None


@contextlib.contextmanager
def _answered(
    url: str, network: Network, headers: dict[str, str], method: str = "GET"
) -> Iterator[http.client.HTTPResponse]:
    """Context with a server's answer (200, 206 or 416). Raises _Dropped for transient errors, otherwise DataError."""
    try:
        try:
            response = network.open(url, headers, method)
        except urllib.error.HTTPError as error:
            if error.code != 416 or "Range" not in headers:
                wait = _refuse_answer(url, error.code, error.headers.get("Retry-After"))
                raise _Dropped(f"the server answered {error.code} ({error.reason})", wait=wait) from None
            response = error  # type: ignore[assignment]
        except (ValueError, http.client.InvalidURL) as error:  # such as UnicodeError: `www..example.org`
            raise DataError(
                f"{url}: leads to an impossible address ({printable(str(error), 120)}); give the right one in a "
                f"registry of your own (`--registry`), {_BRING}"
            ) from None
        with response:
            yield response
    except (urllib.error.URLError, ssl.SSLError, socket.gaierror, ConnectionRefusedError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):  # which will fail every time
            raise DataError(
                f"{url}: its certificate is not trusted here ({printable(reason.verify_message, 120)}); behind a "
                f"company's proxy set SSL_CERT_FILE to the certificates of the company, {_BRING}"
            ) from None
        away = isinstance(reason, socket.gaierror | ConnectionRefusedError)
        raise _Dropped(f"cannot be reached ({printable(str(reason), 120)})", tries=2 if away else None) from None
    except (http.client.HTTPException, TimeoutError, ConnectionError) as error:
        raise _Dropped(f"the connection failed ({type(error).__name__}: {printable(str(error), 120)})") from None
    except OSError as error:
        if error.errno not in _AWAY:  # the disk's, for example
            raise
        raise _Dropped(f"the network was lost ({os.strerror(error.errno)})") from None


def _blocks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yield the body as it arrives. Raises _Dropped if it is cut, and as http.client does."""
    length = response.length
    while block := response.read1(_BLOCK_BYTES):
        yield block
    if length and response.length:  # http.client silently ends such a body, and counts the missing bytes
        raise _Dropped(f"ended after {length - response.length:,} of {length:,} bytes")
