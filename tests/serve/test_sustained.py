"""A server under load from clients that translate, vanish, send slowly or send garbage: no wrong answer, no leak.

Each answered request has a sentence with a known translation.
"""

from __future__ import annotations

import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ziggurat.translate.translator import load_translator

CLIENTS = 16
WORDS = ("dog", "house", "river", "meadow", "bridge", "apples", "books", "children", "tomorrow", "old")


@pytest.fixture(scope="module")
def known(folders: dict[tuple[str, str], Path]) -> dict[str, str]:
    """Sentences and their translations."""
    draw = random.Random(1)
    lines = [" ".join(["The", *draw.sample(WORDS, draw.randrange(1, 6)), "runs"]) for _ in range(60)]
    found = load_translator(folders["en", "de"]).translate(lines)
    return {line: translation.text for line, translation in zip(lines, found, strict=True)}


@pytest.fixture
def server(folders: dict[tuple[str, str], Path]) -> Iterator[tuple[psutil.Process, int]]:
    """A server in a separate process, and its port."""
    command = [sys.executable, "-m", "ziggurat", "serve", str(folders["en", "de"]), "--port", "0", "--threads", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        found = re.search(r":(\d+) ", process.stderr.readline())
        assert found is not None
        yield psutil.Process(process.pid), int(found[1])
        process.send_signal(signal.SIGTERM)
        messages = process.stderr.read()
        assert process.wait(60) in (0, 143)
        assert "Traceback" not in messages, messages


def request(text: str) -> bytes:
    body = json.dumps({"q": text, "source": "en", "target": "de"}).encode()
    head = f"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + body


def exchange(port: int, parts: list[bytes], pause: float, *, read: bool) -> bytes:
    """Send the parts with pauses between them; return the answer, or nothing if the client leaves."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(pause)
        answer = b""
        while read and (new := connection.recv(65536)):
            answer += new
        return answer


def client(port: int, count: int, seed: int, known: dict[str, str], seen: Counter[str]) -> None:
    draw, lines = random.Random(seed), list(known)
    for _ in range(count):
        kind, text = draw.choices(("asks", "slowly", "vanishes", "rubbish"), (16, 1, 2, 1))[0], draw.choice(lines)
        sent = request(text)
        if kind == "slowly":
            at = sorted(draw.sample(range(1, len(sent)), 3))
            parts = [sent[a:b] for a, b in zip([0, *at], [*at, len(sent)], strict=True)]
            answer = exchange(port, parts, 0.02, read=True)
        elif kind == "vanishes":
            exchange(port, [sent[: draw.choice([20, len(sent) - 3, len(sent)])]], draw.choice([0, 0.005]), read=False)
            seen[kind] += 1
            continue
        elif kind == "rubbish":
            rubbish = bytes(draw.randrange(256) for _ in range(draw.randrange(1, 400))) + b"\r\n\r\n"
            try:
                answer = exchange(port, [rubbish], 0, read=True)
            except ConnectionError:  # the server closed the connection early
                answer = b""
            seen["rubbish " + ("refused" if b" 400 " in answer[:20] or not answer else answer[:20].decode())] += 1
            continue
        else:
            answer = exchange(port, [sent], 0, read=True)
        head, _, body = answer.partition(b"\r\n\r\n")
        if b" 200 " in head[:20]:
            seen["right" if json.loads(body)["translatedText"] == known[text] else "WRONG"] += 1
        else:
            seen[head[:30].decode()] += 1


@pytest.mark.parametrize("count", [256, pytest.param(20_480, marks=pytest.mark.slow, id="twenty thousand")])
def test_load(count: int, server: tuple[psutil.Process, int], known: dict[str, str]) -> None:
    process, port = server
    seen: Counter[str] = Counter()
    memory = []
    for part in range(4):  # the first quarter opens the model and fills the allocator's pools
        threads = [
            threading.Thread(target=client, args=(port, count // 4 // CLIENTS, 100 * part + n, known, seen))
            for n in range(CLIENTS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(600)
            assert not thread.is_alive(), "a client got no answer"
        memory.append(process.memory_info().rss)
    assert seen.keys() <= {"right", "vanishes", "rubbish refused"}, seen
    assert seen["right"] > 0.75 * count
    assert sum(seen.values()) == count
    if count > 1000:
        assert memory[3] < 1.05 * memory[1], memory
    found = json.loads(exchange(port, [b"GET /health HTTP/1.0\r\n\r\n"], 0, read=True).partition(b"\r\n\r\n")[2])
    assert found["models"]["en-de"]["status"] == "ready"
    figures = exchange(port, [b"GET /metrics HTTP/1.0\r\n\r\n"], 0, read=True).decode()
    assert 'ziggurat_waiting_lines{model="en-de"} 0.0' in figures
    assert 'ziggurat_live_lines{model="en-de"} 0.0' in figures
