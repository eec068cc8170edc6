"""Documents that a server translates: a queue of files, their progress, and results that are stored for a while.

Clients' files are stored in a folder of the server under random names. Nothing sent by a client becomes part of a path.
Any client that knows the random name, which cannot be guessed, may have the document.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import stat
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import regex
from starlette.datastructures import UploadFile
from starlette.requests import Request

from ziggurat.serve.access import ConcurrencyLimit
from ziggurat.serve.config import DocumentsConfig
from ziggurat.serve.notices import TextNotices
from ziggurat.serve.queue import DeadlineExceeded
from ziggurat.serve.requests import REQUEST, Operation, Refused, failure
from ziggurat.serve.text.documents.kinds import document, document_kind
from ziggurat.serve.text.files import Limits, Settings
from ziggurat.serve.text.glossary import Run, Tally
from ziggurat.serve.text.sentences import Options
from ziggurat.serve.translation_request import PLAIN, TextTranslation, TranslationRequest
from ziggurat.serve.translations import Translations
from ziggurat.system.errors import DataError, ZigguratError
from ziggurat.system.files import write_atomically
from ziggurat.system.small_files import read_bounded
from ziggurat.system.staging import is_same, try_lock
from ziggurat.translate.terms import Terms

UNKNOWN = "there is no such document, or it has expired"
_UNSAFE = regex.compile(r"[^A-Za-z0-9_-]++")
_PLAIN = ("text/plain", "text/markdown")  # files that consist of little but text
_DETECTED = 2000  # characters used to detect a document's language


@dataclass(eq=False)
class Document:
    """A document that is waiting, being translated, done or failed.

    Attributes:
        id: random; any client that knows it may have the document.
        key: another random text, for an interface that asks for one.
        client: the client that sent it.
        name: its name at the client, without folders; for display and for the file kind, never a path.
        source, target: language codes; `auto` until it is detected.
        terms: a glossary.
        protect: patterns of text that must stay unchanged.
        leave: keys whose text is not translated.
        status: `waiting`, `translating`, `done` or `failed`.
        done, total: sentences translated so far, and sentences known so far.
        characters: characters of the sentences, counting repeated sentences once.
        error: the reason of a failure.
        tally: what became of the glossary's terms.
        notices: counts of what needed special handling.
        size: bytes that it takes up in the folder.
        ended: `time.monotonic()` when it was done or failed.
    """

    client: str
    name: str
    source: str
    target: str
    terms: Terms | None = None
    protect: Sequence[str] = ()
    leave: tuple[str, ...] = ()
    id: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    key: str = field(default_factory=lambda: secrets.token_hex(32))
    status: str = "waiting"
    done: int = 0
    total: int = 0
    characters: int = 0
    error: Exception | None = None
    tally: Tally = field(default_factory=Tally)
    notices: TextNotices = field(default_factory=TextNotices)
    size: int = 0
    ended: float = 0.0
    began: float = 0.0
    task: asyncio.Task[None] | None = None

    @property
    def file_name(self) -> str:
        """A name for the translated file: the random one, and the parts of the client's name that are safe anywhere."""
        return f"{self.id}.{self.translated_name}"

    @property
    def translated_name(self) -> str:
        """A name for people, such as `letter_en.docx`."""
        ending = Path(self.name).suffix.lower()
        stem = _UNSAFE.sub("_", self.name[: -len(ending)]).strip("_")[:50] or "document"
        return f"{stem}_{_UNSAFE.sub('_', self.target)}{ending}"


async def translated(
    given: Document,
    content: bytes,
    server: Translations,
    config: DocumentsConfig,
    run: Run,
) -> bytes:
    """Return a document's translation; `run` runs slow work in a thread.

    Its characters count against the client's limit as soon as they are known. Raises DataError for a document that is
    damaged, hostile or too long; Refused if no model translates its language or it exceeds the client's limit (429, or
    413 if it exceeds a whole minute's limit); DeadlineExceeded after `config.seconds`; ModelFailed.
    """
    # Checked before it is decoded: a character has at most four bytes.
    if document_kind(given.name).media_type in _PLAIN and len(content) > 4 * config.characters:
        raise DataError(f"{given.name}: {len(content):,} bytes are more than {config.characters:,} characters")
    limits = Limits(size=server.limits.file_bytes, unpacked=config.unpacked_bytes, pieces=config.pieces)
    if given.source == "auto":
        beginning = await run(lambda: _beginning(given, content, limits))
        ((given.source, _),) = await server.detect_sources([beginning], given.target)
    if given.source == given.target:
        return content
    route = server.route(given.source, given.target)
    if not route:
        raise Refused(400, f"no model translates from {given.source} into {given.target}")
    cut = replace(
        server.cut(given.source, route, given.terms, given.tally),
        admit=_bounded(given.name, config),
        protect=server.protection(given.protect),
    )
    leave = (*config.leave, *given.leave)
    work = document(content, given.name, Settings(cut, given.source, given.target, leave=leave, limits=limits))
    text = TextTranslation(route)

    def progress(done: int, total: int) -> None:
        if not given.total:  # before the first sentence is translated
            characters = sum(map(len, text.new))
            server.access.spend(given.client, characters)
            given.characters = characters
        given.done, given.total = done, total

    options = replace(PLAIN, alignments=True, terms=given.terms)
    request = TranslationRequest(given.client, time.monotonic() + config.seconds, options, run, progress)
    (outcome,) = await request.results([work], [text])
    server.used[server.access.account(given.client)] += given.characters
    given.notices = outcome.notices
    given.notices.include(text.notices)
    return outcome.value


def _bounded(name: str, config: DocumentsConfig) -> Callable[[Sequence[str]], None]:
    """Return a function that checks a document's unsplit paragraphs and raises DataError beyond its limits."""
    most = {"characters": config.characters, "paragraphs, cells, strings or lines": config.paragraphs}
    found: Counter[str] = Counter()

    def admit(texts: Sequence[str]) -> None:
        for kind, count in zip(most, (sum(map(len, texts)), len(texts)), strict=True):
            found[kind] += count
            if found[kind] > most[kind]:
                raise DataError(f"{name}: more than {most[kind]:,} {kind}; divide it")

    return admit


def _beginning(given: Document, content: bytes, limits: Limits) -> str:
    found: list[str] = []

    def admit(texts: Sequence[str]) -> None:
        for text in texts:
            found.append(text[:_DETECTED])
            if sum(map(len, found)) > _DETECTED:
                raise _EnoughError

    settings = Settings(Options(split=None, admit=admit), target=given.target, limits=limits)
    work = document(content, given.name, settings)
    with contextlib.suppress(_EnoughError, StopIteration):
        next(work)
    work.close()
    return "\n".join(found)


class _EnoughError(Exception):
    """Signals that enough of a document has been read."""


_PREFIX, _LOCK = "ziggurat-documents-", "lock"


class Documents:
    """The documents of a server.

    Args:
        translations: the server's models.
        config: limits, and the folder for files.
        say: receives messages for the operator.
    """

    def __init__(self, translations: Translations, config: DocumentsConfig, say: Callable[[str], object]) -> None:
        self.config, self._server, self._say = config, translations, say
        self._known: dict[str, Document] = {}
        self._folder: Path | None = None
        self._lock = -1
        self._turns = asyncio.Semaphore(config.at_once)
        self._uploads = ConcurrencyLimit(config.uploads, config.uploads_of_client)

    # Storage

    def open(self) -> None:
        """Create the folder, and remove those of killed servers. Raises OSError if it cannot be created."""
        parent = Path(tempfile.gettempdir() if self.config.folder is None else self.config.folder).expanduser()
        _sweep(parent)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))  # for this user alone
        self._folder, self._lock = folder, _locked(folder)

    def _reopen(self) -> None:
        """Make another folder if a cleaner of temporary files has removed this one. Raises OSError.

        It gets a new name, since somebody else may have taken the old one.
        """
        if self._folder is not None and not _is_own(self._folder):
            former = self._lock
            self.open()
            os.close(former)

    async def close(self) -> None:
        """Abandon unfinished documents, and remove everything."""
        for each in list(self._known.values()):
            await self.remove(each)
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
            os.close(self._lock)

    def get(self, name: str) -> Document:
        """Return a document. Raises Refused (404) if there is none, or it has expired."""
        found = self._known.get(name)
        if found is None:
            raise Refused(404, UNKNOWN)
        return found

    async def expire(self) -> None:
        """Remove what has been kept for long enough."""
        now = time.monotonic()
        for each in list(self._known.values()):
            if each.ended and now - each.ended > self.config.keep_seconds:
                await self.remove(each)

    async def remove(self, given: Document) -> None:
        """Remove a document; an unfinished one leaves the queue."""
        self._known.pop(given.id, None)
        try:
            if given.task is not None:
                given.task.cancel()
                await asyncio.wait([given.task])  # awaiting it directly would hide that this task is cancelled, too
        finally:
            await asyncio.to_thread(self._unlink, given)

    def _unlink(self, given: Document) -> None:
        for kind in ("in", "out"):
            self._path(given, kind).unlink(missing_ok=True)

    def _path(self, given: Document, kind: str) -> Path:
        assert self._folder is not None, "the server has not been opened"
        return self._folder / f"{given.id}.{kind}"

    def opened(self, given: Document) -> BinaryIO:
        """Return the translated file, open; it stays readable if the document is removed in the meantime."""
        try:
            return self._path(given, "out").open("rb")
        except FileNotFoundError:
            raise Refused(404, UNKNOWN) from None

    # Receiving

    @contextlib.asynccontextmanager
    async def uploading(
        self, request: Request, operation: Operation, disabled: str
    ) -> AsyncIterator[tuple[dict[str, Any], UploadFile]]:
        """Receive a form with a file, in an upload slot; yield its other fields and the file.

        Raises Refused: documents are disabled (403, with the text of `disabled`), no slot is free (429), the file
        arrived too slowly (408), and as `operation.upload` does.
        """
        if not self.config.enabled:
            raise Refused(403, disabled)
        with self._uploads.held(self._server.holder(request), "Slowdown: too many files are being received"):
            try:
                async with asyncio.timeout(self.config.seconds), operation.upload(request) as received:
                    yield received
            except TimeoutError:
                raise Refused(408, "the file did not come in time", {"Connection": "close"}) from None

    async def submit(self, given: Document, file: BinaryIO) -> Document:
        """Queue a document; its file is read now.

        Raises Refused: no room (429), or the file is too large (413); DataError for an unknown kind of file.
        """
        document_kind(given.name)
        waiting = [each.client for each in self._known.values() if not each.ended]
        if len(waiting) >= self.config.waiting or waiting.count(given.client) >= self.config.waiting_of_client:
            raise Refused(429, "Slowdown: too many documents wait; try again later", {"Retry-After": "60"})
        self._known[given.id] = given  # from here on it counts against the limits
        try:
            self._reopen()
            given.size = await asyncio.to_thread(self._store, given, file)
            await self._make_room(given)
        except BaseException:
            await self.remove(given)
            raise
        given.task = asyncio.create_task(self._translate(given))
        return given

    def _store(self, given: Document, file: BinaryIO) -> int:
        most, size = self._server.limits.file_bytes, 0
        with self._path(given, "in").open("xb") as out:
            while block := file.read(1 << 18):
                size += len(block)
                if size > most:
                    raise Refused(413, f"the file is larger than {most:,} bytes")
                out.write(block)
        self._unless_removed(given)
        return size

    def _finish(self, given: Document, value: bytes) -> None:
        write_atomically(self._path(given, "out"), value)
        self._path(given, "in").unlink(missing_ok=True)
        self._unless_removed(given)

    def _unless_removed(self, given: Document) -> None:
        """Delete the files of a document that was removed while a thread wrote to it: threads cannot be cancelled."""
        if given.id not in self._known:
            self._unlink(given)

    async def _make_room(self, given: Document) -> None:
        """Remove a client's oldest results until everything fits.

        Raises Refused if that is not enough, and then removes nothing: 413 for a document that would never fit, 429
        while documents of other clients take the room.
        """
        most = self.config.total_bytes
        if given.size > most:
            raise Refused(413, f"the file is larger than {most:,} bytes, which all documents together may take")
        while (taken := sum(each.size for each in self._known.values())) > most:
            own = [each for each in self._known.values() if each.ended and each.client == given.client]
            if taken - sum(each.size for each in own) > most:
                raise Refused(429, "Slowdown: no room for more documents; try again later", {"Retry-After": "60"})
            await self.remove(min(own, key=lambda each: each.ended))

    # Translating

    async def _translate(self, given: Document) -> None:
        """Translate a document when its turn comes; the outcome is in its attributes."""
        try:
            await self._turns.acquire()
            threads = _Threads()
            try:
                given.status, given.began = "translating", time.monotonic()
                async with asyncio.timeout(self.config.seconds):
                    most = self._server.limits.file_bytes
                    content = await threads.run(partial(read_bounded, self._path(given, "in"), most))
                    value = await translated(given, content, self._server, self.config, threads.run)
                    await threads.run(partial(self._finish, given, value))
                    given.size = len(value)
            except TimeoutError:
                raise DeadlineExceeded("the deadline passed") from None
            finally:
                threads.then(self._turns.release)
            given.status = "done"
        except asyncio.CancelledError:
            raise
        except Exception as error:  # an error in one document must not stop the others
            given.status, given.error = "failed", error
            if not isinstance(error, (ZigguratError, Refused)):
                given.error, said = failure(error)
                self._say(f"request {REQUEST.get()}: a document failed: {said}")
        finally:
            given.ended = time.monotonic()


class _Threads:
    """The threads of one document, which the event loop does not wait for: they run on if the document is abandoned.

    Python waits for the threads of an executor, and a large document may occupy one for a minute.
    """

    def __init__(self) -> None:
        self._running = 0
        self._last: Callable[[], object] | None = None

    async def run(self, work: Callable[[], Any]) -> Any:
        """Return the result of `work`, run in a thread that does not keep the process from ending."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def finish(put: Callable[[], None]) -> None:
            if not future.done():  # otherwise nothing is waiting for it
                put()
            self._running -= 1
            self._end()

        def run() -> None:
            put: Callable[[], None]
            try:
                put = partial(future.set_result, work())
            except Exception as error:
                put = partial(future.set_exception, error)
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(finish, put)

        self._running += 1
        threading.Thread(target=run, name="document", daemon=True).start()
        return await future

    def then(self, last: Callable[[], object]) -> None:
        """Call `last` as soon as no thread is running; until then it takes up memory and computing time."""
        self._last = last
        self._end()

    def _end(self) -> None:
        if self._last is not None and not self._running:
            self._last()
            self._last = None


def _locked(folder: Path) -> int:
    """Return the descriptor of a new lock file, which the kernel unlocks when this process ends, for any reason."""
    descriptor, name = tempfile.mkstemp(dir=folder)
    with contextlib.suppress(OSError):  # no locks here, so no other server can lock it and remove the folder either
        try_lock(descriptor)
    os.replace(name, folder / _LOCK)  # made visible only once it is locked
    return descriptor


def _is_own(folder: Path) -> bool:
    """Return whether a folder of this user is there.

    In a folder that everybody may write to, anybody can create a link or folder with such a name.
    """
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _sweep(parent: Path) -> None:
    """Remove the folders in `parent` that dead servers of this user left behind: those whose lock is free."""
    for folder in parent.glob(f"{_PREFIX}*"):
        lock = folder / _LOCK
        try:
            if not _is_own(folder):
                continue
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # no lock yet: a server is creating it right now
            continue
        try:
            if try_lock(descriptor) and is_same(lock, descriptor):
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # no locks here
            pass
        finally:
            os.close(descriptor)
