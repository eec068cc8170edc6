"""Broken or hostile requests: each gets a clear refusal or a correct answer, and none causes an internal error.

The slow test prints how each kind was answered:

    python -m pytest -m slow -s tests/serve/test_hostile_requests.py
"""

from __future__ import annotations

import json
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.serve.hostile import GOOD, KINDS
from tests.serve.programs import Server, served, statuses
from ziggurat.translate.translator import load_translator

CLIENTS = 8
MEMORY = 300 << 20
"""MEMORY is how many bytes hostile requests may add to the memory of a warm server."""
ALLOWED = {200, 202, 204, 400, 403, 404, 405, 408, 409, 413, 415, 429, 431}


def ask(server: Server, kind: str, seed: int, right: str) -> list[int]:
    """Send a request of this kind; return the statuses of the answer, which must be one."""
    attack = KINDS[kind][1](random.Random(seed))
    answer = server.exchange(*attack.parts, pause=attack.pause, patience=60)
    found = statuses(answer)
    assert 1 <= len(found) <= attack.answers, (kind, seed, [part[:300] for part in attack.parts[:9]], answer[:600])
    assert set(found) <= ALLOWED, (kind, seed, attack.parts[0][:600], answer[:600])
    assert not any(word in answer for word in (b"Traceback", b"root:x:", b'File "')), answer[:600]
    if kind == "good ones among them":
        assert found == [200]
        assert json.loads(answer.partition(b"\r\n\r\n")[2]) == {"translatedText": right}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("count", [60, pytest.param(10_000, marks=pytest.mark.slow, id="ten thousand")])
def test_hostile_requests(count: int, folders: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    right = load_translator(folders["en", "de"]).translate([GOOD["q"]])[0].text
    draw = random.Random(7)
    # The first requests include one of each kind, so that the server is warm after them.
    kinds = [*KINDS, *draw.choices([*KINDS], [share for share, _ in KINDS.values()], k=count - len(KINDS))]
    limits = {"characters": 500, "texts": 5, "file_bytes": 2_000_000, "reading_seconds": 1.5}
    documents = {"keep_seconds": 1, "characters": 3000, "waiting_of_client": 50}
    seen: dict[str, Counter[int]] = {kind: Counter() for kind in KINDS}
    memory: list[int] = []
    with (
        served(tmp_path, folders["en", "de"], limits=limits, documents=documents) as server,
        ThreadPoolExecutor(CLIENTS) as pool,
    ):
        for begin, end in ((0, count // 10), (count // 10, count // 2), (count // 2, count)):
            numbers = range(begin, end)
            found = pool.map(lambda number: ask(server, kinds[number], number, right), numbers)
            for number, own in zip(numbers, found, strict=True):
                seen[kinds[number]].update(own)
            memory.append(server.process.memory_info().rss)
        peak = server.high_water()
    assert peak < memory[0] + MEMORY, (memory, peak)
    columns = sorted({status for counts in seen.values() for status in counts})
    print(f"\n| request | {' | '.join(map(str, columns))} |\n|---|{'---|' * len(columns)}")
    for kind, counts in seen.items():
        print(f"| {kind} | {' | '.join(f'{counts[each]:,}' if counts[each] else '' for each in columns)} |")
    resident = ", ".join(f"{each >> 20:,}" for each in (*memory, peak))
    print(f"MiB resident after a tenth, a half and all of them, and at most: {resident}")
    if count > 1000:
        assert memory[2] < 1.1 * memory[1], memory
        assert {200, 400, 404, 408, 413, 431} <= set(columns)
