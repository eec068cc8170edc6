"""Documents over HTTP: the translations of their sentences, progress, limits, and no leftovers."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from starlette.testclient import TestClient

from tests.serve.conftest import Serve
from tests.vocabulary import SENTENCES
from ziggurat.serve.access import Access, ConcurrencyLimit, new_key
from ziggurat.serve.config import DocumentsConfig, LimitsConfig
from ziggurat.serve.documents import Document, Documents
from ziggurat.serve.pool import ModelSource
from ziggurat.serve.requests import Refused
from ziggurat.serve.server import COLLECTED
from ziggurat.serve.text.paragraphs import aligned_text
from ziggurat.serve.text.sentences import Options
from ziggurat.serve.text.splitting import sentencex_splitter
from ziggurat.system.small_files import read_bounded
from ziggurat.translate.translator import load_translator

LINES = [SENTENCES[0], SENTENCES[1]]
DE_EN = {"source": "de", "target": "en"}
MULTIPART = {"content-type": "multipart/form-data; boundary=x"}
UNNAMED = (
    "".join(
        f'--x\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n{value}\r\n'
        for name, value, more in (("file", "a", '; filename=""'), ("source", "de", ""), ("target", "en", ""))
    ).encode()
    + b"--x--\r\n"
)
TEXT = f"{LINES[0]}\n\n  {LINES[1]}\n".encode()


@pytest.fixture(scope="module")
def wanted(folders: dict[tuple[str, str], Path]) -> bytes:
    first, second = (each.text for each in load_translator(folders["de", "en"]).translate(LINES))
    return f"{first}\n\n  {second}\n".encode()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An event that lets models open when it is set; documents wait until then."""
    opened = threading.Event()
    opening = ModelSource.open
    monkeypatch.setattr(ModelSource, "open", lambda self: (opened.wait(30), opening(self))[1])
    yield opened
    opened.set()


def wait_until(client: TestClient, name: str, *statuses: str) -> dict[str, Any]:
    end = time.monotonic() + 30
    while (found := client.get(f"/v1/documents/{name}").json())["status"] not in statuses:
        assert time.monotonic() < end, found
        time.sleep(0.02)
    return dict(found)


def files(folder: Path) -> list[str]:
    """Return the names of the document files in the server's folder below `folder`."""
    (own,) = folder.iterdir()
    return sorted(path.name for path in own.iterdir() if path.name != "lock")


def test_files_are_translated_as_by_libretranslate(serve: Serve, wanted: bytes, tmp_path: Path) -> None:
    client = serve(documents={"folder": str(tmp_path)})
    answer = client.post("/translate_file", files={"file": ("../../etc/f x.txt", TEXT)}, data=DE_EN)
    assert answer.status_code == 200, answer.text
    (url,) = answer.json().values()
    assert re.fullmatch(r"http://testserver/download_file/[\w-]{32}\.f_x_en\.txt", url)
    found = client.get(url)
    assert (found.content, found.headers["content-type"]) == (wanted, "text/plain; charset=utf-8")
    assert "attachment" in found.headers["content-disposition"]
    assert [name.partition(".")[2] for name in files(tmp_path)] == ["out"]
    assert client.get(url.replace("f_x", "f_y")).status_code == 404
    settings = client.get("/frontend/settings").json()
    assert settings["filesTranslation"] is True
    assert ".docx" in settings["supportedFilesFormat"]


@pytest.mark.parametrize("instead", ["nothing", "a folder of somebody else", "a link", "no parent"])
def test_a_folder_that_a_cleaner_removed_is_made_again(
    instead: str, serve: Serve, tmp_path: Path, wanted: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = tmp_path / "parent"
    parent.mkdir()
    client = serve(documents={"folder": str(parent)})
    sent: dict[str, Any] = {"files": {"file": ("f.txt", TEXT)}, "data": DE_EN}
    before = client.post("/translate_file", **sent).json()["translatedFileUrl"]
    (own,) = parent.iterdir()
    shutil.rmtree(parent if instead == "no parent" else own)
    if instead == "a link":
        own.symlink_to(tmp_path)
    elif instead == "a folder of somebody else":
        other = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)
        own.mkdir()
    elif instead == "no parent":
        assert client.post("/translate_file", **sent).status_code == 503
        parent.mkdir()
    if "else" in instead:
        assert client.post("/translate_file", **sent).status_code == 200
        assert list(own.iterdir()) == []  # nothing is written where others may read it
        return
    assert client.get(before).status_code == 404
    assert client.get(client.post("/translate_file", **sent).json()["translatedFileUrl"]).content == wanted


@pytest.mark.parametrize(
    ("form", "status", "said"),
    [
        ({"data": DE_EN}, 400, "The browser (or proxy) sent a request that this server could not understand."),
        ({"files": {"other": ("f.txt", b"a")}, "data": DE_EN}, 400, "could not understand"),
        (
            {"files": {"file": ("f.txt", b"a")}, "data": {"target": "en"}},
            400,
            "Invalid request: missing source parameter",
        ),
        ({"files": {"file": ("f.txt", b"a")}, "data": {**DE_EN, "target": "zz"}}, 400, "zz is not supported"),
        (
            {"files": {"file": ("f.txt", b"a")}, "data": {"source": "qlo", "target": "de"}},
            400,
            "German (de) is not available as a target language from Qlo (qlo)",
        ),
        ({"files": {"file": ("f.exe", b"a")}, "data": DE_EN}, 400, "Invalid request: file format not supported"),
        ({"files": {"file": ("f.txt", b"a" * 3600)}, "data": DE_EN}, 413, "larger than 3,500 bytes"),
        ({"files": {"file": ("f.txt", b"a" * 9000)}, "data": DE_EN}, 413, "larger than 7,500 bytes"),
        ({"files": {"file": ("f.txt", b"\xff\xff")}, "data": DE_EN}, 400, "UTF-8"),
        ({"files": {"file": ("f.docx", b"PK")}, "data": DE_EN}, 400, "zip"),
        ({"files": {"file": ("f.txt", b"ab cd " * 60)}, "data": DE_EN}, 400, "f.txt: more than 300 characters"),
        (
            {"files": {"file": ("f.txt", b"ab cd " * 210)}, "data": DE_EN},
            400,
            "1,260 bytes are more than 300 characters",
        ),
        ({"files": {"file": ("f.html", b"<p>ab" * 5)}, "data": DE_EN}, 400, "f.html: more than 4 paragraphs"),
        (
            {"files": {"file": ("f.json", b'["a","b","c","d","e"]')}, "data": DE_EN},
            400,
            "f.json: more than 4 paragraphs",
        ),
        ({"files": {"file": ("f.txt", b"a\n\n" * 5)}, "data": DE_EN}, 400, "f.txt: more than 4 paragraphs"),
        ({"files": {"file": ("f.html", b"<i>" * 1001)}, "data": DE_EN}, 400, "f.html: more than 1,000 tags"),
        ({"content": UNNAMED, "headers": MULTIPART}, 400, "Invalid request: missing file parameter"),
        ({"content": b"--x--", "headers": MULTIPART}, 400, "understand"),
    ],
)
def test_files_that_are_refused(serve: Serve, form: dict[str, Any], status: int, said: str, tmp_path: Path) -> None:
    limits = {"file_bytes": 3500, "body_bytes": 4000}
    documents = {"folder": str(tmp_path), "characters": 300, "paragraphs": 4, "pieces": 1000}
    client = serve(limits=limits, documents=documents)
    answer = client.post("/translate_file", **form)
    assert answer.status_code == status, answer.text
    assert said in answer.json()["error"]
    assert files(tmp_path) == []  # nothing is left of it


def test_progress(serve: Serve, wanted: bytes, gate: threading.Event) -> None:
    client = serve()
    answer = client.post("/v1/documents", files={"file": ("f.txt", TEXT)}, data=DE_EN)
    assert answer.status_code == 202
    name = answer.json()["id"]
    found = wait_until(client, name, "translating")
    while found["total"] == 0:
        found = wait_until(client, name, "translating")
    assert (found["done"], found["total"], found["name"]) == (0, 2, "f.txt")
    assert client.get(f"/v1/documents/{name}/file").status_code == 409
    gate.set()
    found = wait_until(client, name, "done", "failed")
    assert (found["status"], found["done"], found["total"], found["name"]) == ("done", 2, 2, "f_en.txt")
    assert client.get(f"/v1/documents/{name}/file").content == wanted
    assert client.delete(f"/v1/documents/{name}").status_code == 204
    assert client.get(f"/v1/documents/{name}").status_code == 404
    assert client.get(f"/v1/documents/{name}/file").status_code == 404


def test_an_abandoned_document_keeps_its_place_until_its_thread_ends(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread cannot be cancelled: until it ends, it computes and keeps its input in memory."""
    ended, threads = threading.Event(), list[str]()

    def slow(path: Path, most: int) -> bytes:
        content = read_bounded(path, most)
        threads.append(threading.current_thread().name)
        assert b"first" not in content or ended.wait(30)
        return content

    monkeypatch.setattr("ziggurat.serve.documents.read_bounded", slow)
    client = serve(documents={"at_once": 1})
    first = client.post("/v1/documents", files={"file": ("f.txt", b"first")}, data=DE_EN).json()["id"]
    wait_until(client, first, "translating")
    while not threads:
        time.sleep(0.01)
    assert client.delete(f"/v1/documents/{first}").status_code == 204
    second = client.post("/v1/documents", files={"file": ("g.txt", b"dog")}, data=DE_EN).json()["id"]
    time.sleep(0.2)
    assert client.get(f"/v1/documents/{second}").json()["status"] == "waiting"
    assert threads == ["document"]
    ended.set()
    assert wait_until(client, second, "done", "failed")["status"] == "done"


def test_places_for_uploads_are_shared(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers occupy at most their share, so there is always a place for clients with a key."""
    key = new_key(tmp_path / "keys", "a")
    many = [("", "a"), ("x", "b"), ("", "c")]  # invalid keys, from anywhere
    places, access = ConcurrencyLimit(4, 2), Access(LimitsConfig(), tmp_path / "keys")
    with ExitStack() as held:
        for wrong, address in many[:2]:
            held.enter_context(places.held(access.holder(wrong, address), "full"))
        with pytest.raises(Refused, match="full"), places.held(access.holder(*many[2]), "full"):
            pass
        for _ in range(2):
            held.enter_context(places.held(access.holder(key, "a"), "full"))
        with pytest.raises(Refused), places.held("somebody", "full"):
            pass
    with places.held(access.holder("", "a"), "full"):
        pass
    assert {Access(LimitsConfig()).holder(None, address) for address in "abc"} == {f"address {a}" for a in "abc"}

    client = serve(documents={"uploads_of_client": 1})
    begun, sent, submit = threading.Event(), threading.Event(), Documents.submit

    async def slowly(self: Documents, given: Document, file: BinaryIO) -> Document:
        begun.set()
        await asyncio.to_thread(sent.wait, 30)
        return await submit(self, given, file)

    monkeypatch.setattr(Documents, "submit", slowly)

    def send() -> int:
        return client.post("/v1/documents", files={"file": ("f.txt", b"17")}, data=DE_EN).status_code

    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(send)
        assert begun.wait(30)
        assert send() == 429
        sent.set()
        assert slow.result() == 202
    assert send() == 202


def test_a_document_has_a_time_limit(serve: Serve, gate: threading.Event) -> None:
    client = serve(documents={"seconds": 0.3})
    name = client.post("/v1/documents", files={"file": ("f.txt", TEXT)}, data=DE_EN).json()["id"]
    assert wait_until(client, name, "done", "failed")["error"] == "the deadline passed"


def test_deleted_documents_leave_the_queue(serve: Serve, gate: threading.Event) -> None:
    client = serve()
    lines = "".join(f"A dog number {n} runs.\n" for n in range(200)).encode()
    name = client.post("/v1/documents", files={"file": ("f.txt", lines)}, data=DE_EN).json()["id"]
    while wait_until(client, name, "translating")["total"] == 0:
        pass
    waiting = re.compile(r'ziggurat_waiting_lines\{model="de-en"\} (\d+)')

    def waits() -> int:
        found = waiting.search(client.get("/metrics").text)
        assert found is not None
        return int(found[1])

    assert 0 < waits() <= 64  # never the whole document
    assert client.delete(f"/v1/documents/{name}").status_code == 204
    assert waits() == 0


def test_a_client_that_removes_a_document_can_be_cancelled(tmp_path: Path) -> None:
    async def slow_to_end() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)

    async def cancelled() -> None:
        documents = Documents(None, DocumentsConfig(folder=str(tmp_path)), print)  # type: ignore[arg-type]
        documents.open()
        given = Document("c", "f.txt", "de", "en", task=asyncio.create_task(slow_to_end()))
        documents._path(given, "in").touch()
        removing = asyncio.create_task(documents.remove(given))
        await asyncio.sleep(0.001)
        removing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await removing
        assert files(tmp_path) == []
        await documents.close()

    asyncio.run(cancelled())


def test_damaged_documents_fail_with_the_reason(serve: Serve) -> None:
    client = serve()
    name = client.post("/v1/documents", files={"file": ("a.docx", b"no zip")}, data=DE_EN).json()["id"]
    found = wait_until(client, name, "done", "failed")
    assert found["status"] == "failed"
    assert "a.docx: not a zip archive" in found["error"]


def test_documents_are_bounded_in_number_and_size(serve: Serve, gate: threading.Event) -> None:
    client = serve(documents={"waiting_of_client": 2, "total_bytes": 1000, "at_once": 1})

    def send(size: int) -> Any:
        content = b"a\n" + b"1" * (size - 2)  # digits pass unchanged
        return client.post("/v1/documents", files={"file": ("f.txt", content)}, data=DE_EN)

    first, second = send(400).json()["id"], send(400).json()["id"]
    assert (send(10).status_code, send(10).headers["retry-after"]) == (429, "60")
    client.delete(f"/v1/documents/{second}")
    assert send(900).status_code == 429  # the first one still waits, and keeps its place
    gate.set()
    wait_until(client, first, "done")
    answer = send(1001)
    assert (answer.status_code, "1,000 bytes" in answer.json()["error"]["message"]) == (413, True)
    assert client.get(f"/v1/documents/{first}").status_code == 200  # nothing is removed for one that never fits
    assert send(950).status_code == 202  # the oldest result of the same client makes room
    assert client.get(f"/v1/documents/{first}").status_code == 404


def test_nothing_is_removed_if_that_would_not_be_enough(serve: Serve, tmp_path: Path) -> None:
    keys = [{"Authorization": f"Bearer {new_key(tmp_path / 'keys', name)}"} for name in "ab"]
    client = serve(keys=str(tmp_path / "keys"), documents={"total_bytes": 1000})

    def send(size: int, key: int) -> Any:
        content = b"a\n" + b"1" * (size - 2)
        return client.post("/v1/documents", files={"file": ("f.txt", content)}, data=DE_EN, headers=keys[key])

    names = [send(400, 0).json()["id"], send(400, 1).json()["id"]]
    for name in names:
        wait_until(client, name, "done")
    answer = send(700, 0)  # the other document's 400 leave no room for it
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "60")
    assert [client.get(f"/v1/documents/{name}").status_code for name in names] == [200, 200]


def test_characters_of_documents_count(serve: Serve, tmp_path: Path) -> None:
    """They count against the limit of the client (that of a key, or else the server's) and in the reported usage."""
    path = tmp_path / "keys"
    names = {name: new_key(path, name) for name in ("a", "b")}
    stored = json.loads(path.read_text())
    stored["keys"][1]["characters_per_minute"] = 1000
    path.write_text(json.dumps(stored))
    client = serve(keys=str(path), limits={"characters_per_minute": 100})

    def send(key: str, *lines: str) -> dict[str, Any]:
        given, bearer = "".join(f"{line}\n" for line in lines).encode(), {"Authorization": f"Bearer {names[key]}"}
        answer = client.post("/v1/documents", files={"file": ("f.txt", given)}, data=DE_EN, headers=bearer)
        return wait_until(client, answer.json()["id"], "done", "failed")

    def used(key: str) -> int:
        answer = client.get("/v2/usage", headers={"Authorization": f"DeepL-Auth-Key {names[key]}"})
        return int(answer.json()["character_count"])

    four, six, ten, twenty = ("".join(f"A dog number {n:02} runs. " for n in range(count)) for count in (4, 6, 10, 20))
    size = len("A dog number 00 runs.")
    assert send("a", four, four)["status"] == "done"  # equal sentences count once
    assert used("a") == 4 * size
    found = send("a", four)
    assert (found["status"], found["error"]) == ("failed", "Slowdown: 100 characters per 1 minute")
    assert send("a", six)["error"] == "at most 100 characters are allowed in a minute"
    form = {**DE_EN, "api_key": names["a"]}
    for count, status in ((four, 429), (ten, 413)):
        answer = client.post("/translate_file", files={"file": ("f.txt", count.encode())}, data=form)
        assert answer.status_code == status
    assert client.post("/translate", json={"q": four, **form}).status_code == 429  # one account for all of them
    assert used("a") == 4 * size
    assert send("b", twenty)["status"] == "done"
    assert client.post("/translate", json={"q": "Ein Hund", **DE_EN, "api_key": names["b"]}).status_code == 200
    assert used("b") == 20 * size + len("Ein Hund")


@pytest.mark.slow
def test_results_expire(serve: Serve, tmp_path: Path) -> None:
    client = serve(documents={"keep_seconds": 0.5, "folder": str(tmp_path)})
    name = client.post("/v1/documents", files={"file": ("f.txt", b"17")}, data=DE_EN).json()["id"]
    wait_until(client, name, "done")
    end = time.monotonic() + 10
    while client.get(f"/v1/documents/{name}").status_code == 200:
        assert time.monotonic() < end
        time.sleep(0.1)
    while files(tmp_path):  # a thread removes them
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_glossary_and_the_language_of_a_document(serve: Serve) -> None:
    client = serve()
    said = "Das Haus steht am Fluss, und der Hund schläft vor der Tür.\n".encode()
    form = {"source": "auto", "target": "en", "glossary": '[{"source": "Haus", "target": "XQZ", "mode": "hard"}]'}
    name = client.post("/v1/documents", files={"file": ("f.txt", said)}, data=form).json()["id"]
    found = wait_until(client, name, "done", "failed")
    assert (found["source"], found["glossary"]) == (
        "de",
        [{"source": "Haus", "target": "XQZ", "mode": "hard", "found": 1, "applied": 1}],
    )
    assert b"XQZ" in client.get(f"/v1/documents/{name}/file").content
    bad = client.post("/v1/documents", files={"file": ("f.txt", said)}, data={**form, "glossary": "{"})
    assert bad.status_code == 400


def test_patterns_and_keys_of_a_document(serve: Serve) -> None:
    client = serve(documents={"leave": ["id"]})
    file = {"file": ("f.json", b'{"id": "Das Haus", "note": "Der Hund", "text": "Der Zorb Cloud ist da."}')}
    form = {**DE_EN, "protect": ["Zorb Cloud", "x{2}"], "leave": "no*"}
    name = client.post("/v1/documents", files=file, data=form).json()["id"]
    found = wait_until(client, name, "done", "failed")
    assert ("left_by_key", 2, "key id") in [
        (each["kind"], each["count"], each.get("place")) for each in found["notices"]
    ]
    said = client.get(f"/v1/documents/{name}/file").json()
    assert (said["id"], said["note"]) == ("Das Haus", "Der Hund")
    assert "Zorb Cloud" in said["text"] != "Der Zorb Cloud ist da."
    for more, reason in (({"protect": "("}, "cannot be read"), ({"leave": ["a"] * 51}, "`leave`")):
        answer = client.post("/v1/documents", files=file, data={**form, **more})
        assert answer.status_code == 400
        assert reason in answer.json()["error"]["message"]
    answer = client.post("/v1/documents", files={"file": ("f.txt", TEXT)}, data=form)
    assert (answer.status_code, "no keys" in answer.json()["error"]["message"]) == (400, True)


def test_documents_can_be_forbidden(serve: Serve) -> None:
    client = serve(documents={"enabled": False})
    answer = client.post("/translate_file", files={"file": ("f.txt", TEXT)}, data=DE_EN)
    assert (answer.status_code, answer.json()["error"]) == (403, "Files translation are disabled on this server.")
    assert client.get("/frontend/settings").json()["filesTranslation"] is False
    assert client.get("/v1/settings").json()["files"] == []


def test_a_large_document_causes_hardly_any_full_collection() -> None:
    """A collection holds the interpreter's lock until it ends, so no other request is answered."""
    thresholds, options = gc.get_threshold(), Options(sentencex_splitter("en"))
    gc.set_threshold(*COLLECTED)
    try:
        before = gc.get_stats()[2]["collections"]
        cut = aligned_text(" ".join(f"House {n} is by the river." for n in range(20_000)), options)
        assert len(next(cut)) == 20_000
        assert gc.get_stats()[2]["collections"] - before <= 1
    finally:
        gc.set_threshold(*thresholds)
