"""Training speed on the shapes T1, T2 and T3, ours and other toolkits': target tokens/s and share of matmul peak.

    python -m benchmarks.train_speed [--shape T1 ...] [--precision fp32 bf16] [--peer fairseq ...] [--rounds 2]
        [--seconds 40] [--tokens 4096] [--compiled] [--modified] [--profile] [--data FOLDER] [--json]

T1: d_model 256, d_ff 1024, 4 heads, 6+6 layers, vocabulary 8,000; T2: T1 with 30+6 layers; T3: d_model 512, d_ff 2048,
8 heads, 6+6 layers; D, only if named: T3 with 60+12. Multi30k en-de in batches of 4,096 tokens; dropout 0.1 also on
attention, label smoothing 0.1.

Peers are measured by drivers outside this repository: `$PEERS/train_peer.py`, run by
`$BENCH/venv/<environment>/bin/python` (their README explains how to make both; fairseq is also looked for in
`$FAIRSEQ_SRC`). Only installed peers are measured. Marian (`benchmarks.marian_peer`, in fp32) is the `pymarian` of
`make marian` or `$ZIGGURAT_MARIAN`, with two workers; its share of the peak assumes our operations per target token.

Every run is a separate process: 8 s of warm-up, then updates for at least `--seconds`. Only real tokens count,
including end-of-sentence. Each round runs ours and then every peer, so a disturbance of the machine hits all; figures
are medians of the rounds. The share of the peak divides 6 operations per weight and token, and 12 d L L per
attention, by torch's fastest 2048 x 2048 product of that precision, measured first. Memory is the peak of the process.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from benchmarks import marian_peer

if TYPE_CHECKING:
    from ziggurat.data.loader import Batch
    from ziggurat.train.update import UpdateResult

SHAPES = {
    "T1": (256, 1024, 4, 6, 6),
    "T2": (256, 1024, 4, 30, 6),
    "T3": (512, 2048, 8, 6, 6),
    "D": (512, 2048, 8, 60, 12),
}
"""SHAPES are d_model, d_ff, heads, encoder layers and decoder layers."""
VOCABULARY, WARM_UP = 8000, 8.0
ENVIRONMENTS = {"fairseq": "fairseq", "eole": "eole", "onmt": "onmt", "hf": "core", "torch": "core", "joeynmt": "joey"}
"""ENVIRONMENTS maps a peer to the name of its virtual environment."""
PEERS = (*ENVIRONMENTS, "marian")


def operations(shape: str, source: list[int], target: list[int]) -> float:
    """Return the operations that an update on sentences of these lengths needs, forward and backward."""
    d, ff, _, encoder, decoder = SHAPES[shape]
    in_encoder = encoder * (4 * d * d + 2 * d * ff) + decoder * 2 * d * d  # and cross-attention's keys and values
    in_decoder = decoder * (6 * d * d + 2 * d * ff) + d * VOCABULARY
    products = sum(source) * in_encoder + sum(target) * in_decoder
    attention = sum(encoder * s * s + decoder * (t * t + s * t) for s, t in zip(source, target, strict=True))
    return 6.0 * products + 12.0 * d * attention


def prepared(data: Path, aligned: bool = False) -> Path:
    """Return a store of Multi30k en-de with a joint vocabulary of 8,000, prepared in a temporary folder.

    `aligned`: with word alignments, for modifiers.
    """
    from ziggurat.config.recipes import load_named
    from ziggurat.data.prepare import prepare

    store = Path(tempfile.mkdtemp(prefix="ziggurat-bench-")) / "store"
    corpora = {
        s: f"[{{source: {data}/{f}.en.gz, target: {data}/{f}.de.gz}}]" for s, f in (("train", "train"), ("dev", "val"))
    }
    overrides = [f"data.store={store}", *(f"data.{split}={corpus}" for split, corpus in corpora.items())]
    prepare(load_named("multi30k-en-de", [*overrides, *["data.alignment.compute=hmm"] * aligned]).data)
    return store


def _stepper(
    shape: str, precision: str, store: str, tokens: int, compiled: bool = False, modified: bool = False
) -> Callable[[], tuple[UpdateResult, Sequence[Batch]]]:
    """Return a function that trains one of our updates and returns its result and its batches."""
    from benchmarks.modifiers import FIREFOX
    from ziggurat.config.recipes import load_named
    from ziggurat.data.corpus import Store
    from ziggurat.data.loader import Loader
    from ziggurat.model.build import build_model, compile_layers, parameter_roles
    from ziggurat.train.device import keep_freed_memory
    from ziggurat.train.optim import Optimiser
    from ziggurat.train.parallel import Parallel
    from ziggurat.train.update import train_update

    keep_freed_memory()
    d, ff, heads, encoder, decoder = SHAPES[shape]
    experiment = load_named(
        "multi30k-en-de",
        [
            f"model={{d_model: {d}, d_ff: {ff}, heads: {heads}, dropout: {{residual: 0.1, attention: 0.1}}}}",
            f"model.encoder.layers={encoder}",
            f"model.decoder.layers={decoder}",
            f"training.precision={precision}",
            f"training.batch={{max_tokens: {tokens}}}",
            f"data.store={store}",
            f"data.modifiers={json.dumps(FIREFOX if modified else {})}",
        ],
    )
    training, opened = experiment.training, Store.open(store)
    model = build_model(experiment.model, opened.source.size, opened.target.size)
    if compiled:
        compile_layers(model)
    optimiser = Optimiser(model, parameter_roles(model), training.optimiser)
    parallel = Parallel(model, training.loss, training.precision)
    tables = opened.train, opened.source, opened.target
    groups = Loader(*tables, training.batch, seed=training.seed, data=experiment.data).groups()

    def step() -> tuple[UpdateResult, Sequence[Batch]]:
        batches = next(groups).batches
        return train_update(parallel, batches, optimiser, rate=1e-5, clip_norm=1.0), batches

    return step


def ours(
    shape: str,
    precision: str,
    store: str,
    seconds: float,
    max_tokens: int,
    compiled: bool = False,
    modified: bool = False,
) -> dict[str, Any]:
    """Train for `seconds` and return the figures.

    `compiled`: with `training.compile: layers`; `modified`: with the modifiers of Firefox's teachers.
    """
    import psutil
    import torch

    step = _stepper(shape, precision, store, max_tokens, compiled, modified)
    began, updates, tokens, work = time.perf_counter(), 0, 0, 0.0
    counting, busy, own = False, 0.0, 0.0
    while True:
        now = time.perf_counter()
        # Compiled layers get separate graphs for lengths that occur only in some batches.
        if not counting and now - began >= WARM_UP and updates >= (12 if compiled else 2):
            counting, began, updates, tokens, work = True, now, 0, 0, 0.0
            busy, own = _busy(), sum(psutil.Process().cpu_times()[:2])
        elif counting and now - began >= seconds and updates >= 3:
            break
        result, batches = step()
        updates, tokens = updates + 1, tokens + result.target_tokens
        for batch in batches:
            work += operations(shape, batch.source_mask.sum(1).tolist(), batch.target_mask.sum(1).tolist())
    passed = now - began
    others = (_busy() - busy - sum(psutil.Process().cpu_times()[:2]) + own) / passed
    threads = torch.get_num_threads()
    return {
        "tokens_per_second": tokens / passed,
        "gflops": work / passed / 1e9,
        "other_cores": round(max(0.0, others), 2),
        "threads": threads,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


_GROUPS = {
    "products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "mkldnn::", "aten::mkldnn", "aten::_mkldnn"),
    "optimiser and clipping": ("aten::_foreach", "aten::_fused_adam", "Optimizer.step"),
    "softmax": ("aten::_softmax", "aten::_log_softmax", "aten::softmax"),
    "normalisation": ("aten::native_layer_norm",),
    "random numbers": ("aten::bernoulli", "aten::random", "aten::native_dropout"),
    "copies": ("aten::copy_", "aten::cat", "aten::clone", "aten::contiguous"),
}
"""_GROUPS maps a part of an update to prefixes of its operators; the rest is element-wise work and overhead."""


def profile(shape: str, precision: str, store: str, tokens: int, updates: int = 6) -> dict[str, float]:
    """Return the share of each group of operators in the time of an update, and the share of padding in its batches."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    step, real, room = _stepper(shape, precision, store, tokens), 0, 0
    for _ in range(3):
        step()
    with profiled(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(updates):
            for batch in step()[1]:
                real += batch.target_tokens + batch.source_tokens
                room += batch.target_mask.numel() + batch.source_mask.numel()
    times = {event.key: float(event.self_cpu_time_total) for event in seen.key_averages()}
    total, shares = sum(times.values()), {}
    for group, beginnings in _GROUPS.items():
        shares[group] = sum(t for name, t in times.items() if name.startswith(beginnings)) / total
    return {**shares, "the rest": 1 - sum(shares.values()), "padding": 1 - real / room}


def _busy() -> float:
    """Return the CPU seconds that the whole machine has spent."""
    import psutil

    times = psutil.cpu_times()
    return float(sum(times[:7]) - times.idle - times.iowait)


def peak(precision: str) -> float:
    """Return the GFLOP/s of the fastest product of two 2048 x 2048 matrices."""
    import torch

    from ziggurat.model.linear import product

    a, b = (torch.randn(2048, 2048).to(torch.bfloat16 if precision == "bf16" else torch.float32) for _ in range(2))
    best = 0.0
    for name in ("torch", "onednn") if precision == "fp32" else ("torch",):
        with mock.patch("ziggurat.model.linear._onednn_is_faster", return_value=name == "onednn"):
            end = time.perf_counter() + 3
            while (began := time.perf_counter()) < end:
                product(a, b)
                best = max(best, 2 * 2048**3 / (time.perf_counter() - began) / 1e9)
    return best


def theirs(peer: str, shape: str, precision: str, seconds: float, tokens: int) -> dict[str, Any]:
    """Run a peer's driver and return the figures it prints. Raises subprocess.CalledProcessError when it fails."""
    command = [_python(peer), str(_drivers() / "train_peer.py"), peer, shape, precision]
    environment = dict(os.environ)
    if peer == "fairseq":
        environment["PYTHONPATH"] = os.environ.get("FAIRSEQ_SRC", "")
    command += ["--warm", str(int(WARM_UP)), "--secs", str(int(seconds)), "--max-tokens", str(tokens)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    found = re.search(r"RESULT (\{.*\})", output)
    assert found is not None, output[-2000:]
    said = json.loads(found[1])
    return {
        "tokens_per_second": float(said["tgt_tok_s"]),
        "gflops": float(said["useful_gflops"]),
        "other_cores": said["other_cores"],
        "peak_gib": float(said["peak_rss_gib"]),
    }


def marian(
    shape: str, store: Path, data: Path, seconds: float, tokens: int, ours_did: dict[str, Any]
) -> dict[str, Any]:
    """Train with Marian and return the figures, assuming the operations per target token that `ours_did` reports."""
    from ziggurat.data.corpus import Store

    vocabulary = marian_peer.written(store.parent, Store.open(store).source)
    texts = [data / f"train.{side}.gz" for side in ("en", "de")]
    figures = marian_peer.train(SHAPES[shape], vocabulary, texts, tokens, WARM_UP, seconds)
    work = ours_did["gflops"] / ours_did["tokens_per_second"]
    return {**figures, "gflops": figures["tokens_per_second"] * work}


def left_out(peer: str) -> str:
    """Return why a peer is left out, or nothing if it is available."""
    if peer == "marian":
        return marian_peer.missing()
    there = (_drivers() / "train_peer.py").is_file() and Path(_python(peer)).is_file()
    return "" if there else "not installed (set BENCH and PEERS)"


def there(peers: Iterable[str]) -> list[str]:
    """Return the available peers, and report why the others are left out."""
    reasons = {peer: left_out(peer) for peer in peers}
    for peer, reason in reasons.items():
        if reason:
            print(f"{peer} is left out: {reason}", file=sys.stderr)
    return [peer for peer, reason in reasons.items() if not reason]


def _drivers() -> Path:
    return Path(os.environ.get("PEERS", "../shared/peers"))


def _python(peer: str) -> str:
    return str(Path(os.environ.get("BENCH", "bench")) / "venv" / ENVIRONMENTS[peer] / "bin" / "python")


def table(shape: str, precision: str, runs: dict[str, list[dict[str, Any]]], limit: float) -> str:
    """Return the medians of one shape and precision as lines."""
    lines = [f"{shape} {precision}  (matmul peak {limit:.0f} GFLOP/s)"]
    speed = {name: statistics.median(r["tokens_per_second"] for r in figures) for name, figures in runs.items()}
    for name, figures in runs.items():
        share = statistics.median(r["gflops"] for r in figures) / limit
        others = max(r["other_cores"] for r in figures)
        each = [r["tokens_per_second"] for r in figures]
        spread = f"{min(each):,.0f} to {max(each):,.0f}"
        memory = statistics.median(r["peak_gib"] for r in figures)
        ratio = "" if name == "ziggurat" else f"   ziggurat / {name} {speed['ziggurat'] / speed[name]:.2f}"
        lines.append(
            f"  {name:<9} {speed[name]:8,.0f} target tokens/s ({spread})  {share:4.0%} of peak  "
            f"{memory:.2f} GiB  others {others}{ratio}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="*", choices=SHAPES, default=["T1", "T2", "T3"])
    parser.add_argument("--precision", nargs="*", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--peer", nargs="*", choices=PEERS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--tokens", type=int, default=4096, help="of a batch")
    parser.add_argument("--data", type=Path, default=Path("../shared/data/multi30k"))
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--compiled", action="store_true", help="also ours with `training.compile: layers`")
    parser.add_argument("--modified", action="store_true", help="also ours with modifiers (benchmarks.modifiers)")
    parser.add_argument("--profile", action="store_true", help="only shares of one of our updates")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.once:
        print(json.dumps(ours(o.shape[0], o.precision[0], o.store, o.seconds, o.tokens, o.compiled, o.modified)))
        return
    if o.profile:
        store = o.store or str(prepared(o.data))
        for shape in o.shape:
            for precision in o.precision:
                shares = ", ".join(
                    f"{name} {share:.0%}" for name, share in profile(shape, precision, store, o.tokens).items()
                )
                print(f"{shape} {precision}: {shares}", flush=True)
        return
    peers = there(PEERS if o.peer is None else o.peer)
    store = o.store or str(prepared(o.data, aligned=o.modified))
    variants = {"ziggurat": [], "compiled": ["--compiled"] * o.compiled, "modified": ["--modified"] * o.modified}
    variants = {name: flags for name, flags in variants.items() if flags or name == "ziggurat"}
    document = []
    for shape in o.shape:
        for precision in o.precision:
            limit = peak(precision)
            runs: dict[str, list[dict[str, Any]]] = {}
            for _ in range(o.rounds):
                own = [sys.executable, "-m", "benchmarks.train_speed", "--once", "--store", store]
                own += ["--shape", shape, "--precision", precision, "--seconds", str(o.seconds)]
                own += ["--tokens", str(o.tokens)]
                for name, flags in variants.items():
                    said = subprocess.run([*own, *flags], check=True, capture_output=True, text=True).stdout
                    runs.setdefault(name, []).append(json.loads(said.splitlines()[-1]))
                for peer in peers:
                    if peer == "marian":
                        if precision == "fp32":
                            found = marian(shape, Path(store), o.data, o.seconds, o.tokens, runs["ziggurat"][-1])
                            runs.setdefault(peer, []).append(found)
                        continue
                    try:
                        runs.setdefault(peer, []).append(theirs(peer, shape, precision, o.seconds, o.tokens))
                    except subprocess.CalledProcessError as error:
                        del runs[peer]
                        peers = [p for p in peers if p != peer]
                        print(f"{peer} fails at {shape} {precision}: {error.stderr[-300:]}", file=sys.stderr)
            document.append({"shape": shape, "precision": precision, "peak_gflops": limit, "runs": runs})
            if not o.json:
                print(table(shape, precision, runs, limit), flush=True)
    if o.json:
        print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
