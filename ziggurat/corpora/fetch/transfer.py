"""One file over HTTP: resumed where the connection dropped, never mixed from two versions, never a page in its place.

What has arrived stays beside the future file as `NAME.part`, locked while a process writes it; `NAME.part.json` has the
address, the version (ETag or date) and the length that the server gave. A later request asks for the rest of that
version only (If-Range). Answers that will not change (a page in place of data, a missing file) are errors with the way
out; overload and dropped connections are tried again.
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
    """The part of a file that has arrived; the file is open and locked."""

    path: Path
    """The future file."""
    file: BinaryIO
    size: int = 0
    """Bytes in the part."""
    url: str = ""
    """Address that they came from."""
    version: str = ""
    """ETag or date of the version that they belong to; empty: the part cannot be continued."""
    total: int | None = None
    """Length of that version."""

    @classmethod
    @contextlib.contextmanager
    def opened(cls, path: Path, waiting: Callable[[], object] = lambda: None) -> Iterator[Part]:
        """Context with the part of `path`, new or continued, once no other process has it; `waiting` says so."""
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
        """Drop what has arrived, and note what comes instead."""
        self._notes.unlink(missing_ok=True)  # first: a part without notes is never continued
        self.file.truncate(0)
        self.size, self.url, self.version, self.total = 0, url, version, total
        if version:
            notes = {"url": url, "version": version, "total": total}
            write_atomically(self._notes, json.dumps(notes).encode())

    def write(self, block: bytes) -> None:
        """Add a block. Raises DataError when the disk is full."""
        try:
            self.file.write(block)
        except OSError as error:
            if is_full_disk(error):
                raise DataError(f"{self.path}: the disk is full; make room and run this again to go on") from None
            raise
        self.size += len(block)

    def finish(self, check: Callable[[Path], object]) -> None:
        """Give the file its name. Raises DataError, and drops it, where its length is wrong or `check` raises."""
        self.file.flush()
        try:
            if self.total is not None and (found := os.fstat(self.file.fileno()).st_size) != self.total:
                raise DataError(
                    f"{self.path}: has {found:,} bytes, wanted are {self.total:,}; it was dropped, run this again"
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
    """Context with the file `name`, open for appending and locked. Raises DataError where there are no locks."""
    while True:
        with name.open("ab") as file:
            try:
                if not try_lock(file.fileno()):
                    waiting()
                    fcntl.flock(file.fileno(), fcntl.LOCK_EX)
            except OSError as error:
                raise lock_missing(name, error) from None
            if is_same(name, file.fileno()):  # else the other has given it its final name, or removed it
                file.seek(0, os.SEEK_END)  # the other may have written on after it was opened here
                yield file
                return


_BRING = "or fetch it by other means and put it into a mirror (`--mirror`, docs/fetch.md)"
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
_NOTE_TYPES = {"application/json", "application/problem+json", "application/ld+json"}
"""Types of what programs are told in place of a file, often with status 200, unless the file is JSON by its name."""


def _refuse_answer(url: str, status: int, retry_after: str | None) -> float:
    """Return the seconds to wait after an answer that may pass. Raises DataError for any other."""
    if status in _PASSING:
        return float(retry_after) if retry_after and re.fullmatch(r"\d{1,5}", retry_after) else 0.0
    meaning = _MEANING.get(status, "an answer that asking again does not change")
    raise DataError(
        f"{url}: the server answered {status}: {meaning}; give the new address in a registry of your own "
        f"(`--registry`), {_BRING}"
    )


def refuse_page(url: str, head: bytes, content_type: str) -> None:
    """Raise DataError if a file is a web page, by its first bytes or its type, or is not what its name says.

    The type counts only where the name does not say how the file begins.
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
    """Raise DataError unless the first bytes of a file are what the ending of its name says."""
    magic = _magic(name)
    if magic is not None and not head.startswith(magic):
        raise DataError(
            f"{name}: what came is not what the name says: it begins with {printable(repr(head[:16]), 60)}{remark}; "
            f"open it in a browser, {_BRING}"
        )


def _magic(name: str) -> bytes | None:
    """Return the first bytes of a file of this name or address; None where its ending tells none."""
    return _MAGIC.get(name.partition("?")[0].rpartition(".")[2].lower())


Progress = Callable[[str, int, int | None], None]
"""Called with what is being done, the bytes or pairs so far and the total (None: not known)."""

_BLOCK_BYTES = 1 << 16
_HEAD_BYTES = 512
_GAIN_BYTES = (
    1 << 14
)  # growth after which failures are counted from zero; near the end a tenth of what is missing will do
_SPARE_BYTES = 1 << 26  # left free on the disk
_SMALL_BYTES = 1 << 26
_AWAY = {errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL}
"""Errors of a network that went away, which Python has no class for."""


class _Dropped(Exception):  # noqa: N818
    """The connection failed, which may pass; `wait` is the number of seconds that the server asked for."""

    def __init__(self, why: str, *, tries: int | None = None, wait: float = 0.0) -> None:
        super().__init__(why)
        self.tries, self.wait = tries, wait


def download(
    url: str, path: Path, network: Network, progress: Progress, check: Callable[[Path, str], object] | None = None
) -> None:
    """Fetch `url` to the file `path`, which appears whole or not at all.

    What has arrived stays as a part when this fails or is killed, and the next call goes on from there. `check` gets
    the complete file before it has its name, and the address that it came from; if it raises, the file is dropped.

    Another process that fetches the same file is waited for; what it brought is not fetched again, nor checked.

    Raises DataError with the way out: nothing there, no room, or the connection failed again and again.
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
                # Not any byte: a server that sends one a try would hold us for ever.
                gain = _GAIN_BYTES if part.total is None else max(1, (part.total - furthest) // 10)
                if network.retries and part.size - furthest >= min(gain, _GAIN_BYTES):  # 0 retries: not one
                    failures, furthest = 0, part.size
                kept = f"; {part.size:,} bytes are kept, run this again to go on" if part.size else ""
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
                        raise DataError(f"{url}: longer than {_SMALL_BYTES >> 20} MiB, which no such answer is")
            return b"".join(blocks)
        except _Dropped as dropped:
            failures += 1
            _wait(url, dropped, failures, network)


def _wait(url: str, dropped: _Dropped, failures: int, network: Network, kept: str = "") -> None:
    """Wait before the next try. Raises DataError after too many failures in a row."""
    if failures > (network.retries if dropped.tries is None else min(dropped.tries, network.retries)):
        times = f", {failures} times in a row" if failures > 1 else ""
        raise DataError(f"{url}: {dropped}{times}{kept}") from None
    network.pause(max(min(2.0 ** (failures - 1), 60.0), min(dropped.wait, 300.0)))


def size_of(url: str, network: Network) -> int | None:
    """Return the length that the server gives for `url`; None where it gives none or cannot be asked."""
    try:
        with _answered(url, network, {}, method="HEAD") as response:
            return _natural(response.headers.get("Content-Length"))
    except (_Dropped, DataError):
        return None


def _receive(url: str, part: Part, network: Network, progress: Progress) -> str:
    """Fetch what is missing of `part` in one request; return the address that answered. Raises _Dropped, DataError."""
    # Not what came from another address: a mirror may lack the file, and then the file's own server goes on with it.
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
    """Make the part ready for the body, `blocks`; return what was read of it: the first bytes of a whole file.

    `rest` says whether the rest of the part was asked for. The part is dropped only when the file that comes in its
    place is known to be no page and to fit on the disk.

    Raises _Dropped where the body is not what was asked for; DataError.
    """
    headers = response.headers
    if headers.get("Content-Encoding", "identity").lower() not in ("identity", "x-gzip", "gzip"):
        raise DataError(
            f"{url}: sent in the encoding {printable(headers['Content-Encoding'])}, which was not asked for"
        )
    if len(set(headers.get_all("Content-Length", []))) > 1:
        raise DataError(f"{url}: sent with several lengths, of which nobody knows the right one; {_BRING}")
    version, length = _version(headers), response.length
    if response.status == 206:
        found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", headers.get("Content-Range", ""))
        total = _natural(found[3]) if found else None
        same = part.total is None or total is None or total == part.total
        if not rest or not found or int(found[1]) != part.size or not same or (version and version != part.version):
            if rest:
                part.restart()
            raise _Dropped("the file changed between two requests, or the server sent another part than asked for")
        # The first answer may have had no length (chunks), and http.client ends a body that is cut short in silence.
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
    """Return the address if the part is already the whole file, which a 416 says. Raises _Dropped otherwise."""
    found = re.fullmatch(r"bytes \*/(\d+)", response.headers.get("Content-Range", ""))
    version = _version(response.headers)
    if found and int(found[1]) == part.size and version in ("", part.version):
        part.total = part.size  # the first answer may have claimed more
        return response.url
    part.restart()
    raise _Dropped("the file changed between two requests")


def _version(headers: Message) -> str:
    """Return what If-Range may be sent with: a strong ETag, else the date; empty where there is neither."""
    tag = headers.get("ETag", "").strip()
    return tag if tag and not tag.startswith("W/") else headers.get("Last-Modified", "").strip()


def _natural(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"\d{1,18}", text.strip()) else None


@contextlib.contextmanager
def _answered(
    url: str, network: Network, headers: dict[str, str], method: str = "GET"
) -> Iterator[http.client.HTTPResponse]:
    """Context with a server's answer (200, 206 or 416). Raises _Dropped for what may pass, else DataError."""
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
                f"{url}: leads to an address that cannot be ({printable(str(error), 120)}); give the right one in a "
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
        raise _Dropped(f"the network went away ({os.strerror(error.errno)})") from None


def _blocks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yield the body as it arrives. Raises _Dropped where it is cut, and as http.client does."""
    length = response.length
    while block := response.read1(_BLOCK_BYTES):
        yield block
    if length and response.length:  # http.client ends such a body in silence, and counts what is missing
        raise _Dropped(f"ended after {length - response.length:,} of {length:,} bytes")
