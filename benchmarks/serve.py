"""Serving under load, compared with LibreTranslate using the same model.

    python -m benchmarks.serve MODEL --text FILE [--peer PYTHON] [--package FILE.argosmodel] [--rounds 3] [--json]

MODEL is a model that CTranslate2 can run; it is exported in int8 for both servers. PYTHON belongs to an environment
with LibreTranslate, `$BENCH_LIBRETRANSLATE` by default; `--package` is the same model for it (`ziggurat export --to
argos`). The systems are ours with PyTorch (fp32), ours with the CTranslate2 export, and LibreTranslate.

Each round restarts every server and measures the seconds to its first answer; 200 requests of one sentence from 16
clients (requests per second, and the 95th percentile of milliseconds per request); one request of 200 texts (texts per
second); the CPU seconds of the server's processes for both, which other programs hardly affect; and their resident
memory afterwards. Figures are medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

REQUESTS, CLIENTS, START_SECONDS = 200, 16, 1200.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(port: int, q: str | list[str], pair: tuple[str, str]) -> Any:
    """Return the translation of a text or of a list."""
    body = json.dumps({"q": q, "source": pair[0], "target": pair[1]}).encode()
    address = f"http://127.0.0.1:{port}/translate"
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.loads(answer.read())["translatedText"]


@contextmanager
def started(command: list[str], environment: dict[str, str]) -> Iterator[psutil.Process]:
    """Context with a server in its own process group, which ends with the context."""
    with subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield psutil.Process(process.pid)
        finally:
            found = psutil.Process(process.pid)
            for each in [*found.children(recursive=True), found]:
                each.terminate()


def computed(server: psutil.Process) -> float:
    """Return the CPU seconds of a server's processes."""
    times = [process.cpu_times() for process in [server, *server.children(recursive=True)]]
    return sum(each.user + each.system for each in times)


def measure(
    command: list[str], environment: dict[str, str], port: int, texts: list[str], pair: tuple[str, str]
) -> dict[str, float]:
    """Return the figures of one server, measured from its start on."""
    began = time.perf_counter()
    with started(command, environment) as server:
        while True:
            try:
                ask(port, texts[0], pair)
                break
            except (urllib.error.URLError, ConnectionError):
                if time.perf_counter() - began > START_SECONDS or not server.is_running():
                    raise
                time.sleep(0.05)
        first = time.perf_counter() - began
        ask(port, texts[:8], pair)  # not counted

        def one(text: str) -> float:
            start = time.perf_counter()
            ask(port, text, pair)
            return time.perf_counter() - start

        used = [computed(server)]
        start = time.perf_counter()
        with ThreadPoolExecutor(CLIENTS) as pool:
            each = sorted(pool.map(one, texts))
        many = time.perf_counter() - start
        used.append(computed(server))
        start = time.perf_counter()
        found = ask(port, texts, pair)
        together = time.perf_counter() - start
        used.append(computed(server))
        assert len(found) == len(texts)
        memory = sum(p.memory_info().rss for p in [server, *server.children(recursive=True)])
    return {
        "first_answer_s": first,
        "requests_per_second": len(texts) / many,
        "p95_ms": 1000 * each[int(0.95 * len(each))],
        "texts_per_second": len(texts) / together,
        "requests_cpu_s": used[1] - used[0],
        "texts_cpu_s": used[2] - used[1],
        "memory_mib": memory / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="source text, one sentence per line")
    parser.add_argument("--peer", default=os.environ.get("BENCH_LIBRETRANSLATE"))
    parser.add_argument("--package", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    from ziggurat.config import load_experiment
    from ziggurat.exchange.exporter import export_model

    data = load_experiment(o.model / "config.yaml").data
    pair = data.source_language, data.target_language
    lines = [line for line in o.text.read_text("utf-8").splitlines() if line.strip()]
    texts = (lines * REQUESTS)[:REQUESTS]
    with tempfile.TemporaryDirectory() as folder:
        served = Path(folder) / "served"
        export_model(o.model, "ctranslate2", served, quantization="int8", verify=o.text, lines=50)
        own = [sys.executable, "-m", "ziggurat", "serve"]
        systems: dict[str, tuple[list[str], dict[str, str], int]] = {}
        for name, model in (("ours, PyTorch", o.model), ("ours, CTranslate2", served)):
            port = free_port()
            systems[name] = ([*own, str(model), "--port", str(port)], {}, port)
        if o.peer is not None and o.package is not None:
            port, program = free_port(), str(Path(__file__).with_name("libretranslate_peer.py"))
            command = [o.peer, program, "--port", str(port), "--threads", str(CLIENTS), "--disable-web-ui"]
            systems["LibreTranslate"] = (command, {"ARGOS_FILES": str(o.package.resolve())}, port)
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in systems}
        for _ in range(o.rounds):
            for name, (command, environment, port) in systems.items():
                runs[name].append(measure(command, environment, port, texts, pair))
                print(f"  {name}: {runs[name][-1]}", file=sys.stderr, flush=True)
    found = {name: {k: statistics.median(run[k] for run in of) for k in of[0]} for name, of in runs.items()}
    if o.json:
        print(json.dumps(found, indent=1))
        return
    for name, figures in found.items():
        print(f"{name:<18} " + ", ".join(f"{key} {value:,.4g}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
