"""Requests when clients leave, queues fill, models fail, change or are slow, and the server ends."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message

from tests.exchange.examples import SMALL, random_model
from tests.serve.conftest import Serve
from tests.small import merged
from tests.vocabulary import SENTENCES
from ziggurat.config import dump, load_experiment
from ziggurat.data.subword import load_tokenizers
from ziggurat.model.directory import write_model_directory
from ziggurat.model.tensors import weights
from ziggurat.serve import engine
from ziggurat.serve import engine as batches
from ziggurat.serve.access import new_key
from ziggurat.serve.config import ModelConfigEntry, ServeConfig
from ziggurat.serve.pool import ModelPool, ModelSource
from ziggurat.serve.queue import QueuedLine
from ziggurat.serve.server import app_of
from ziggurat.serve.translations import Detector
from ziggurat.system.errors import ConfigError
from ziggurat.translate.options import TranslateOptions
from ziggurat.translate.translator import load_translator

LINES = [SENTENCES[0], SENTENCES[1]]
DE_EN = {"source": "de", "target": "en"}
ASKED = {"q": LINES[0], **DE_EN}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An event that lets models open when it is set."""
    opened, opening = threading.Event(), ModelSource.open
    monkeypatch.setattr(ModelSource, "open", lambda self: (opened.wait(30), opening(self))[1])
    yield opened
    opened.set()


def wait_until(found: Any, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end
        time.sleep(0.01)


def waiting(client: Any) -> dict[str, int]:
    """Return the lines that wait for each model."""
    said = client.get("/metrics").text
    return {name: int(n) for name, n in re.findall(r'ziggurat_waiting_lines\{model="([\w-]+)"\} (\d+)', said)}


def test_lines_of_a_disconnected_client_leave_the_search(
    folders: dict[tuple[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search never ends by itself."""
    monkeypatch.setattr(batches.LineBatch, "step", lambda self: (time.sleep(0.005), {})[1])
    app = app_of(ServeConfig.model_validate({"models": [{"path": str(folders["de", "en"])}]}), lambda text: None)

    async def figures() -> str:
        """Return what /metrics reports."""
        parts: list[bytes] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": b""}

        async def send(message: Message) -> None:
            parts.append(message.get("body", b""))

        await app(
            {"type": "http", "method": "GET", "path": "/metrics", "headers": [], "query_string": b""}, receive, send
        )
        return b"".join(parts).decode()

    async def live(count: int) -> None:
        while f'ziggurat_live_lines{{model="de-en"}} {count}.0' not in await figures():
            await asyncio.sleep(0.01)

    async def scenario() -> None:
        body = json.dumps({"q": LINES, **DE_EN}).encode()
        messages: list[Message] = [{"type": "http.request", "body": body}]
        sent: list[Message] = []
        gone = asyncio.Event()

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/translate", "query_string": b"",
                 "headers": [(b"content-type", b"application/json")], "client": ("1.2.3.4", 5)}  # fmt: skip
        async with app.router.lifespan_context(app):
            request = asyncio.ensure_future(app(scope, receive, send))
            await asyncio.wait_for(live(2), 30)
            gone.set()
            await asyncio.wait_for(request, 10)
            await asyncio.wait_for(live(0), 10)

    asyncio.run(scenario())


def test_a_request_is_admitted_whole_or_not_at_all(serve: Serve, gate: threading.Event) -> None:
    client = serve(limits={"waiting": 5, "seconds": 20})
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(client.post, "/translate", json={"q": [*LINES, "Ein Hund", "Zwei"], **DE_EN})
        wait_until(lambda: waiting(client)["de-en"] == 4)
        german, english = (
            "Das Haus steht am Fluss, und der Hund schläft.",
            "The house is near the river and the dog sleeps.",
        )
        mixed = client.post(
            "/translate", json={"q": [english, german, german + " "], "source": "auto", "target": "qlo"}
        )
        assert mixed.status_code == 429, mixed.text
        assert int(mixed.headers["retry-after"]) >= 1
        assert mixed.json()["error"].startswith("Slowdown: ")
        assert waiting(client) == {"de-en": 4, "en-de": 0, "en-qlo": 0}  # nor does the other model get any of it
        too = [client.post(path, json=body) for path, body in (
            ("/v1/translate", {"text": LINES, **DE_EN}),
            ("/v2/translate", {"text": LINES, "source_lang": "DE", "target_lang": "EN"}),
        )]  # fmt: skip
        assert [each.status_code for each in too] == [429, 429]
        assert too[0].json()["error"]["type"] == "invalid_request_error"
        gate.set()
        assert first.result(30).status_code == 200
    assert waiting(client)["de-en"] == 0


def test_failing_models_say_when_to_retry(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: ModelSource) -> Any:
        raise OSError("/secret/path")

    monkeypatch.setattr(ModelSource, "open", broken)
    client = serve()
    for path, body in (("/translate", ASKED), ("/v1/translate", {"text": "a", **DE_EN})):
        answer = client.post(path, json=body)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
        assert "could not be opened" in answer.text
        assert "secret" not in answer.text
    health = client.get("/health")
    assert (health.status_code, health.json()["models"]["de-en"]["status"]) == (200, "failed")


def test_late_answers_are_504_everywhere(serve: Serve, gate: threading.Event) -> None:
    client = serve(limits={"seconds": 0.1})
    answer = client.post("/v1/translate", json={"text": "a", **DE_EN})
    assert (answer.status_code, answer.json()["error"]["type"]) == (504, "server_error")
    answer = client.post("/v2/translate", json={"text": "a", "source_lang": "DE", "target_lang": "EN"})
    assert (answer.status_code, answer.json()) == (504, {"message": "the deadline passed"})
    assert waiting(client)["de-en"] == 0  # no client is waiting for them


def test_rates_count_requests(serve: Serve) -> None:
    client = serve(limits={"requests_per_minute": 2})
    answers = [client.post("/translate", json={"q": ["17"] * 50, **DE_EN}) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert 1 <= int(answers[2].headers["retry-after"]) <= 60


@pytest.mark.slow
def test_a_key_can_be_revoked(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    old = new_key(path, "old")
    client = serve(keys=str(path))
    asked = {"q": "17", **DE_EN}
    assert client.post("/translate", json={**asked, "api_key": old}).status_code == 200
    path.write_text("damaged")
    time.sleep(1.5)
    assert client.post("/translate", json={**asked, "api_key": old}).status_code == 200  # the old keys stay valid
    path.unlink()
    new = new_key(path, "new")
    wait_until(lambda: client.post("/translate", json={**asked, "api_key": old}).status_code == 403, 5)
    assert client.post("/translate", json={**asked, "api_key": new}).status_code == 200


@pytest.mark.slow
def test_long_texts_do_not_stop_the_server(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    began = threading.Event()

    def slow(self: Detector, text: str, among: Any = None) -> list[tuple[str, float]]:
        began.set()
        time.sleep(1.5)
        return [("de", 50.0)]

    client = serve()
    with ThreadPoolExecutor(1) as pool, monkeypatch.context() as patch:
        patch.setattr(Detector, "rank", slow)
        answer = pool.submit(client.post, "/translate", json={**ASKED, "source": "auto"})
        assert began.wait(10)
        before = time.monotonic()
        assert client.get("/health").status_code == 200
        assert time.monotonic() - before < 1.0
        assert answer.result(30).status_code == 200
    import ziggurat.serve.translations as module

    def splitter(language: str) -> Any:
        def split(text: str) -> list[str]:
            began.set()
            time.sleep(1.5)
            return [text]

        return split

    began.clear()
    monkeypatch.setattr(module, "sentencex_splitter", splitter)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.post, "/translate", json={"q": "Ein Hund. " * 300, **DE_EN})
        assert began.wait(10)
        before = time.monotonic()
        assert client.get("/health").status_code == 200
        assert time.monotonic() - before < 1.0
        assert answer.result(30).status_code == 200


@pytest.fixture
def changing(folders: dict[tuple[str, str], Path], tmp_path: Path) -> Path:
    """A copy of a model that may be changed."""
    return Path(shutil.copytree(folders["de", "en"], tmp_path / "changing"))


def served(path: Path, **more: Any) -> ModelSource:
    return ModelSource(ModelConfigEntry(path=str(path), **more))


def test_a_model_whose_library_is_missing_is_refused_at_the_start(
    changing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert served(changing).experiment().data.source_language == "de"
    monkeypatch.setattr("ziggurat.serve.pool.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"changing: `torch` is not installed: pip install"):
        served(changing).experiment()


def test_every_file_of_a_model_is_part_of_its_version(changing: Path) -> None:
    source, seen = served(changing), set()
    for name in ("", "config.yaml", "vocabulary.json", "joint.spm", "model.safetensors"):
        if name:
            os.utime(changing / name, ns=(1, 1))
        seen.add(repr(source.version()))
    (changing / "log.txt").write_text("a run also has logs")
    seen.add(repr(source.version()))
    assert len(seen) == 5


def test_a_shortlist_is_part_of_the_version(changing: Path, tmp_path: Path) -> None:
    """This holds wherever the file is, and whether the configuration of the model or that of the server names it."""
    (shortlist := tmp_path / "elsewhere").write_bytes(b"a")
    plain, named = served(changing), served(changing, decoding={"shortlist": str(shortlist)})
    before = {plain.version(), named.version()}
    os.utime(shortlist, ns=(1, 1))
    assert plain.version() in before
    assert named.version() not in before
    config = changing / "config.yaml"
    experiment = load_experiment(config)
    decoding = experiment.decoding.model_copy(update={"shortlist": str(shortlist)})
    config.write_text(dump(experiment.model_copy(update={"decoding": decoding})))
    before = {plain.version()}
    os.utime(shortlist, ns=(2, 2))
    assert plain.version() not in before
    assert served(changing, decoding={"shortlist": None}).shortlist() is None


def test_a_checkpoint_is_served_with_files_of_its_run(changing: Path) -> None:
    """This includes its configuration, and the weights to which low-rank updates belong."""
    wanted, folder = served(changing).experiment(), changing / "checkpoints" / "step-00000001"
    folder.mkdir(parents=True)
    (changing / "model.safetensors").rename(folder / "model.safetensors")
    (changing / "best").symlink_to(folder)
    source = served(changing / "best")
    assert source.experiment() == wanted
    version, size = source.version(), source.size()
    (changing / "base").mkdir()
    (changing / "base" / "model.safetensors").write_bytes(bytes(1000))
    assert source.version() != version
    assert source.size() == size + 3000


def test_a_model_is_replaced_under_load(serve: Serve, changing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_CHANGED", 0.05)
    old = load_translator(changing).translate([LINES[0]])[0].text
    client = serve(models=[{"path": str(changing), "threads": 1}])
    tokenizer, _ = load_tokenizers(changing)
    experiment = load_experiment(changing / "config.yaml")
    other = random_model(merged_model(), tokenizer, 77)
    fresh = changing.parent / "fresh"
    write_model_directory(fresh, weights(other), experiment, changing)
    new = load_translator(fresh).translate([LINES[0]])[0].text
    assert new != old
    seen: list[tuple[int, str]] = []
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            answer = client.post("/translate", json=ASKED)
            seen.append((answer.status_code, answer.json().get("translatedText", answer.text)))

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask) for _ in range(4)]
        wait_until(lambda: (200, old) in seen)
        for name in ("model.safetensors", "checksums.json"):
            if (fresh / name).exists():
                os.replace(fresh / name, changing / name)
        try:
            wait_until(lambda: (200, new) in seen)
            time.sleep(0.1)
        finally:
            ended.set()
        for each in asking:
            each.result(30)
    assert set(seen) == {(200, old), (200, new)}
    first = seen.index((200, new))
    assert all(text == new for _, text in seen[first + 4 :])  # at most four were in progress
    assert re.search(r'ziggurat_reloads_total\{model="de-en"\} [1-9]', client.get("/metrics").text)


def merged_model() -> Any:
    from ziggurat.config import ModelConfig

    return ModelConfig.model_validate(merged(SMALL, {}))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU])
def test_the_server_ends_after_answering(folders: dict[tuple[str, str], Path], number: int) -> None:
    """Twenty requests are in progress when the server is told to end."""
    program = """
import sys, time
from ziggurat.serve import engine as batches
step = batches.LineBatch.step
batches.LineBatch.step = lambda self: (time.sleep(0.1), step(self))[1]
from ziggurat.cli import main
sys.argv = ["ziggurat", "serve", sys.argv[1], "--port", "0", "--threads", "1"]
main()
"""
    command = [sys.executable, "-c", program, str(folders["de", "en"])]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        found = re.search(r"http://\S+", process.stderr.readline())
        assert found is not None
        import httpx2

        with httpx2.Client(base_url=found[0], timeout=60) as client, ThreadPoolExecutor(20) as pool:
            answers = [
                pool.submit(client.post, "/translate", json={**ASKED, "q": f"{LINES[0]} {n}"}) for n in range(20)
            ]
            wait_until(lambda: 'ziggurat_live_lines{model="de-en"} 0.0' not in client.get("/metrics").text)
            process.send_signal(number)
            assert [answer.result(60).status_code for answer in answers] == [200] * 20
        assert process.wait(30) in (0, 128 + number)
        assert "Traceback" not in process.stderr.read()


@pytest.mark.slow
def test_unfinished_work_is_refused_at_the_end(folders: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    """Searches that never end, documents of such sentences, documents slow to read, and a body that stops arriving."""
    program = """
import sys, time
from ziggurat.serve import documents, engine as batches
batches.LineBatch.step = lambda self: (time.sleep(0.02), {})[1]
read = documents.read_bounded
documents.read_bounded = lambda path, most: (b"long" in read(path, most) and time.sleep(100), read(path, most))[1]
from ziggurat.cli import main
sys.argv = ["ziggurat", "serve", "--config", sys.argv[1]]
main()
"""
    config = tmp_path / "serve.yaml"
    entry = {"path": str(folders["de", "en"]), "threads": 1}
    documents = {"folder": str(tmp_path)}
    config.write_text(json.dumps({"models": [entry], "port": 0, "drain_seconds": 1, "documents": documents}))
    with subprocess.Popen([sys.executable, "-c", program, str(config)], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        found = re.search(r"http://(\S+):(\d+)", process.stderr.readline())
        assert found is not None
        import httpx2

        with (
            httpx2.Client(base_url=found[0], timeout=60) as client,
            ThreadPoolExecutor(10) as pool,
            socket.create_connection((found[1], int(found[2])), timeout=60) as stopped,
        ):
            stopped.sendall(b"POST /v2/translate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            answers = [pool.submit(client.post, "/translate", json=ASKED) for _ in range(5)]
            answers.append(pool.submit(client.post, "/v1/translate", json={"text": LINES, **DE_EN}))
            file = {"file": ("f.txt", LINES[0].encode())}
            answers.append(pool.submit(client.post, "/translate_file", files=file, data=DE_EN))
            assert client.post("/v1/documents", files={"file": ("f.txt", b"long")}, data=DE_EN).status_code == 202
            held = re.compile(r'ziggurat_(?:live|waiting)_lines\{model="de-en"\} (\d+)')
            wait_until(lambda: sum(map(int, held.findall(client.get("/metrics").text))) == 8)
            process.send_signal(signal.SIGTERM)
            for answer in answers:
                refused = answer.result(60)
                assert refused.status_code == 503, refused.text
                assert refused.headers["retry-after"] == "10"
                assert "the server is shutting down" in refused.text
                assert refused.headers["x-request-id"]
            told = stopped.recv(65536)
            assert told.startswith(b"HTTP/1.1 503 ")
            assert told.endswith(b'{"message":"the server is shutting down"}')
        said = process.stderr.read()
        assert process.wait(30) in (0, 143)
        assert said == "ziggurat: stopped by SIGTERM\n"
    assert [path.name for path in tmp_path.iterdir()] == ["serve.yaml"]


@pytest.mark.slow
def test_models_opened_at_once_stay_within_the_memory_limit(
    folders: dict[tuple[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for one of three models, and each takes a while to open; at first one of them cannot be opened."""
    opening, lock, said = ModelSource.open, threading.Lock(), list[str]()
    inside, most, broken = [0], [0], [True]

    def slow(self: ModelSource) -> Any:
        with lock:
            inside[0] += 1
            others = sum(model.engine._opened is not None for model in pool.models.values())
            most[0] = max(most[0], inside[0] + others)
        time.sleep(0.1)
        try:
            if broken[0]:
                broken[0] = False
                raise OSError("broken")
            return opening(self)
        finally:
            with lock:
                inside[0] -= 1

    monkeypatch.setattr(ModelSource, "open", slow)
    monkeypatch.setattr(engine, "_RETRY", (0.01, 0.01))
    sources = [served(path, threads=1) for path in folders.values()]
    pool = ModelPool(sources, memory=int(1.5 * sources[0].size()), say=said.append)
    done: list[Any] = []
    for _ in range(3):
        before = len(done)
        for model in pool.models.values():
            line = QueuedLine(LINES[0], "c", TranslateOptions(), time.monotonic() + 60, done.append)
            model.engine.queue.put([line])
        wait_until(lambda before=before: len(done) == before + 3)
    assert pool.close(30)
    assert [type(each).__name__ for each in done].count("ModelFailed") == 1
    assert most == [1]
    assert [line for line in said if "beyond the limit" in line] == []


def test_leftovers_of_killed_servers_are_removed(serve: Serve, tmp_path: Path) -> None:
    alive = serve(documents={"folder": str(tmp_path)})
    (first,) = tmp_path.iterdir()
    killed = Path(shutil.copytree(first, tmp_path / "ziggurat-documents-killed"))  # nobody holds the lock of the copy
    (killed / "x.in").write_text("what somebody wanted to have translated")
    kept = [first, tmp_path / "ziggurat-documents-new", tmp_path / "ziggurat-documents-link"]
    kept[1].mkdir()  # it belongs to another server that has not locked it yet
    (outside := tmp_path / "outside").mkdir()
    (outside / "lock").touch()
    kept[2].symlink_to(outside)
    serve(documents={"folder": str(tmp_path)})
    assert not killed.exists()
    assert {*kept, outside} < set(tmp_path.iterdir())
    assert (outside / "lock").exists()
    answer = alive.post("/translate_file", files={"file": ("f.txt", b"17")}, data=DE_EN)
    assert answer.status_code == 200
