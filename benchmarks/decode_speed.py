"""Decoding speed, ours and other toolkits'; the latency of one sentence; speed against decoder depth and length.

    python -m benchmarks.decode_speed [--shape T3 ...] [--beam 4 1] [--peer ctranslate2 hf ...] [--rounds 2] [--json]
        [--precision float32 int8]
    python -m benchmarks.decode_speed --latency
    python -m benchmarks.decode_speed --depth
    python -m benchmarks.decode_speed --whole [--data FOLDER]
    python -m benchmarks.decode_speed --model MODEL --text TEXT [--beam 4 1] [--precision float32 int8]

1,000 sentences of random tokens, as long as those of Multi30k's test set (`$BENCH_DATA`; of log-normal lengths without
it), 64 at a time, every output 15 tokens long, untrained weights (speed does not depend on them), 2 threads, only the
search. T3: d_model 512, d_ff 2048, 8 heads, 6+6 layers; T2: d_model 256, d_ff 1024,
4 heads, 30+6; M12: T3 with 12+12 layers and merged attention. Our 15 tokens are 14 and end-of-sentence, so every system
runs its decoder 15 times, except fairseq, which also scores end-of-sentence.

Peers are measured by drivers outside this repository: `$PEERS/decode_peer.py`, run by
`$BENCH/venv/<environment>/bin/python`. Marian (`benchmarks.marian_peer`) is the `pymarian` of `make marian` or of
`$ZIGGURAT_MARIAN`. Missing peers are left out with the reason. `2x1` is two workers of one thread each instead of one
with two threads, timed from the start of both to the end of the last; Marian's threads are workers, so it has `1x1` and
`2x1`, and ours gets `1x1`, too. Every run is a separate process; each round runs every system once, so a disturbance of
the machine hits all; figures are medians, and ratios compare them.

`--whole` measures whole processes from start to end: `ziggurat --version` and `--help`, the translation of one sentence
with an untrained T3 whose vocabulary comes from Multi30k, the same with CTranslate2 and SentencePiece, and the peak
memory of processes that translate 1,000 sentences.

`--model` measures lines per second of a trained model, such as a student, and of what `export --to marian` makes of it,
with the text's own lengths and each toolkit's segmentation included.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import marian_peer

SHAPES = {"T3": (512, 2048, 8, 6, 6), "T2": (256, 1024, 4, 30, 6), "M12": (512, 2048, 8, 12, 12)}
"""SHAPES are d_model, d_ff, heads, encoder layers and decoder layers."""
VOCABULARY, SENTENCES, BATCH, LENGTH = 8000, 1000, 64, 15
ENVIRONMENTS = {"ctranslate2": "core", "hf": "core", "fairseq": "fairseq", "onmt": "onmt", "eole": "eole"}
"""ENVIRONMENTS maps a peer to the name of its virtual environment."""
PEERS = (*ENVIRONMENTS, "marian")
_CTRANSLATE2 = """
import sys, time, ctranslate2
path, lines, kind, dtype, inter, intra, beam, length = sys.argv[1:]
source = [line.split() for line in open(lines, encoding="utf8")]
translator = ctranslate2.Translator(path, compute_type=dtype, inter_threads=int(inter), intra_threads=int(intra))
options = dict(beam_size=int(beam), min_decoding_length=int(length), max_decoding_length=int(length))
translator.translate_batch(source[:16], **options)
began = time.perf_counter()
if kind == "latency":
    for one in source[:100]:
        translator.translate_batch([one], **options)
    print("RESULT", (time.perf_counter() - began) / 100)
else:
    translator.translate_batch(source, max_batch_size=64, batch_type="examples", **options)
    print("RESULT", len(source) * int(length) / (time.perf_counter() - began))
"""


_WHOLE_CTRANSLATE2 = """
import sys, ctranslate2, sentencepiece
path, pieces, lines, dtype = sys.argv[1:]
encode = sentencepiece.SentencePieceProcessor(model_file=pieces).encode
source = [encode(line.strip(), out_type=str) + ["</s>"] for line in open(lines, encoding="utf8")]
translator = ctranslate2.Translator(path, compute_type=dtype, intra_threads=2)
options = dict(beam_size=4, max_decoding_length=15, min_decoding_length=15)
translator.translate_batch(source, max_batch_size=64, **options)
"""


_TEXT = """
import sys, time, ziggurat
path, lines, precision, beam, batch = sys.argv[1:]
text = open(lines, encoding="utf8").read().splitlines()
translator = ziggurat.load(path, device="cpu", precision=precision, beam_size=int(beam), batch_sentences=int(batch))
translator.translate(text[:16])
began = time.perf_counter()
translator.translate(text)
print("RESULT", len(text) / (time.perf_counter() - began))
"""


_WATCHED = """
import resource, subprocess, sys, time
began = time.perf_counter()
done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
passed = time.perf_counter() - began
print("RESULT", passed)
print("RESULT", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)
sys.exit(done.returncode)
"""


PRECISIONS = ("float32", "bfloat16", "int8")


def sentences(count: int, length: int) -> list[Any]:
    """Return random sentences as long as those of the test set, or with log-normal lengths if it is missing."""
    from ziggurat.translate.settings import Sentence

    draw = random.Random(1)
    path = Path(os.environ.get("BENCH_DATA", "")) / "test_2016_flickr.en.sp"
    if path.is_file():
        lengths = [len(line.split()) for line in path.read_text("utf-8").splitlines()]
    else:
        lengths = [max(3, round(draw.lognormvariate(2.6, 0.35))) for _ in range(count)]
    drawn = [[*(draw.randrange(10, VOCABULARY) for _ in range(n)), 3] for n in lengths[:count]]
    return [Sentence(ids, length - 1, length - 1) for ids in sorted(drawn, key=len, reverse=True)]


def searcher(sizes: Sequence[int], attention: str, precision: str, beam: int, batch: int = BATCH) -> Any:
    """Return a function that translates sentences with an untrained model."""
    from ziggurat.config import ModelConfig
    from ziggurat.model.build import build_model
    from ziggurat.model.fast.packed import make_fast
    from ziggurat.translate.scorers import ModelScorer
    from ziggurat.translate.search import search
    from ziggurat.translate.settings import SearchSettings

    d, ff, heads, encoder, decoder = sizes
    values = {"d_model": d, "d_ff": ff, "heads": heads, "residual": "pre", "encoder": {"layers": encoder}}
    values["decoder"] = {"layers": decoder, "attention": attention}
    model = build_model(ModelConfig.model_validate(values), VOCABULARY, VOCABULARY, seed=1).eval()
    make_fast(model, precision)  # type: ignore[arg-type]
    scorer = ModelScorer(model)
    settings = SearchSettings(beam, 1, 2, 3, forbidden=(0, 1, 2), batch_sentences=batch)
    return lambda given: search(scorer, given, settings)


def ours(shape: str, beam: int, precision: str, kind: str, count: int) -> float:
    """Return output tokens/s for `count` sentences; with `kind` latency the seconds for one, with worker only the
    tokens.
    """
    attention = "merged" if shape == "M12" else "full"
    find, given = searcher(SHAPES[shape], attention, precision, beam), sentences(SENTENCES, LENGTH)
    given = given[:: SENTENCES // count]  # with all lengths, even if a worker gets only a part
    find(given[:16])
    if kind == "worker":  # they start together, and the last one to end counts
        print("READY", flush=True)
        sys.stdin.readline()
        return float(sum(len(results[0].tokens) + 1 for results in find(given)))
    began = time.perf_counter()
    if kind == "latency":
        for one in given[:: max(1, len(given) // 100)][:100]:
            find([one])
        return (time.perf_counter() - began) / 100
    found = find(given)
    return sum(len(results[0].tokens) + 1 for results in found) / (time.perf_counter() - began)


def run(command: Sequence[str], threads: int = 2, **variables: str) -> list[float]:
    """Return the figures that the processes of `command` print after RESULT."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **variables}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    found = re.findall(r"RESULT (\S.*)", done.stdout)
    if done.returncode or not found:
        raise SystemExit(f"{' '.join(command[:6])} failed:\n{done.stderr[-2000:]}")
    return [float(json.loads(each)["tok_s"] if each.startswith("{") else each) for each in found]


def run_ours(shape: str, beam: int, precision: str, kind: str = "speed", workers: int = 1, threads: int = 2) -> float:
    """Return the figure of one process with `threads`, or of several that start together with one thread each."""
    one = [sys.executable, "-m", "benchmarks.decode_speed", "--one", shape, str(beam), precision, kind]
    if workers == 1:
        return run([*one, str(SENTENCES)], threads)[0]
    command = [*one[:-1], "worker", str(SENTENCES // workers)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    processes = [subprocess.Popen(command, **pipes) for _ in range(workers)]  # type: ignore[call-overload]
    for process in processes:
        while "READY" not in (line := process.stdout.readline()):
            assert line, "a worker ended before it began"
    began = time.perf_counter()
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.communicate()[0] for process in processes]
    passed = time.perf_counter() - began
    return sum(float(text.split("RESULT")[1]) for text in said) / passed


def python_of(peer: str) -> Path:
    """Return the interpreter of a peer's environment."""
    return Path(os.environ.get("BENCH", "")) / "venv" / ENVIRONMENTS[peer] / "bin" / "python"


def run_ctranslate2(shape: str, beam: int, dtype: str, kind: str, inter: int, intra: int) -> float:
    """Return CTranslate2's figure; its model was converted as the peers' README describes."""
    model = Path(os.environ["BENCH_RUNS"]) / f"ct2-{shape}-fp32"
    lines = Path(os.environ["BENCH_DATA"]) / "test_2016_flickr.en.sp"
    arguments = [str(model), str(lines), kind, dtype, str(inter), str(intra), str(beam), str(LENGTH)]
    return run([str(python_of("ctranslate2")), "-c", _CTRANSLATE2, *arguments])[0]


def run_peer(peer: str, shape: str, beam: int) -> float:
    """Return the figure of another peer, in fp32."""
    driver = str(Path(os.environ["PEERS"]) / "decode_peer.py")
    sources = {"PYTHONPATH": os.environ.get("FAIRSEQ_SRC", "")} if peer == "fairseq" else {}
    return run([str(python_of(peer)), driver, peer, shape, str(beam)], **sources)[0]


def left_out(peer: str) -> str:
    """Return why a peer is left out, or nothing if it is available."""
    if peer == "marian":
        return marian_peer.missing()
    return "" if python_of(peer).is_file() else f"there is no {python_of(peer)} (set BENCH and PEERS)"


@contextmanager
def marian_searches(peers: Sequence[str], shape: str, beam: int, batch: int = BATCH) -> Iterator[dict[str, Any]]:
    """Context with a function that measures Marian, if it is a peer: output tokens/s, or seconds for one sentence."""
    if "marian" not in peers:
        yield {}
        return
    given = [sentence.source for sentence in sentences(SENTENCES, LENGTH)]
    given = given[:: SENTENCES // 100][:100] if batch == 1 else given
    sizes = {"types": VOCABULARY, "length": LENGTH, "beam": beam, "batch": batch}

    def measured(search: Any) -> float:
        tokens, seconds = search()
        return float(seconds / len(given) if batch == 1 else tokens / seconds)

    with tempfile.TemporaryDirectory(prefix="ziggurat-bench-") as folder:
        found = marian_peer.searches(Path(folder), SHAPES[shape], given, **sizes)
        yield {name: lambda s=search: measured(s) for name, search in found.items()}


def in_turns(systems: dict[str, Any], rounds: int) -> dict[str, float]:
    """Return the median figure of each system."""
    figures: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(rounds):
        for name, measure in systems.items():
            figures[name].append(measure())
            print(f"  {name}: {figures[name][-1]:,.4g}", file=sys.stderr, flush=True)
    return {name: statistics.median(values) for name, values in figures.items()}


def table(
    shape: str, beam: int, peers: Sequence[str], rounds: int, precisions: Sequence[str] = PRECISIONS
) -> dict[str, float]:
    """Measure all systems on one shape, ours in these precisions."""
    systems: dict[str, Any] = {}
    for precision in precisions:
        systems[f"ours {precision}"] = lambda p=precision: run_ours(shape, beam, p)
        systems[f"ours {precision} 2x1"] = lambda p=precision: run_ours(shape, beam, p, workers=2)
    if shape == "T3" and tuple(precisions) == PRECISIONS:
        systems["ours MAtt 12-12 float32"] = lambda: run_ours("M12", beam, "float32")
        systems["ours MAtt 12-12 bfloat16"] = lambda: run_ours("M12", beam, "bfloat16")
    if "marian" in peers:
        for precision in precisions:
            systems[f"ours {precision} 1x1"] = lambda p=precision: run_ours(shape, beam, p, threads=1)
    for peer in peers:
        if peer == "marian":
            continue
        if peer != "ctranslate2":
            systems[f"{peer} float32"] = lambda p=peer: run_peer(p, shape, beam)
            continue
        for dtype in ("float32", "int8"):
            for inter, intra in ((1, 2), (2, 1)):
                name = f"ctranslate2 {dtype}" + (" 2x1" if inter == 2 else "")
                systems[name] = lambda d=dtype, a=inter, b=intra: run_ctranslate2(shape, beam, d, "speed", a, b)
    with marian_searches(peers, shape, beam) as marian:
        return in_turns(systems | marian, rounds)


def latency(peers: Sequence[str], rounds: int) -> dict[str, float]:
    """Return the milliseconds that one sentence takes, shape T3, beam 4."""
    systems: dict[str, Any] = {
        f"ours {p}": lambda p=p: run_ours("T3", 4, p, "latency") for p in ("float32", "bfloat16", "int8")
    }
    if "ctranslate2" in peers:
        for dtype in ("float32", "int8"):
            systems[f"ctranslate2 {dtype}"] = lambda d=dtype: run_ctranslate2("T3", 4, d, "latency", 1, 2)
    with marian_searches(peers, "T3", 4, batch=1) as marian:
        return {name: 1000 * seconds for name, seconds in in_turns(systems | marian, rounds).items()}


def trained(
    model: Path, text: Path, beam: int, peers: Sequence[str], rounds: int, precisions: Sequence[str]
) -> dict[str, float]:
    """Return lines per second of a Ziggurat model on two threads and on one, and of its export in Marian."""
    systems: dict[str, Any] = {}
    for precision in precisions:
        command = [sys.executable, "-c", _TEXT, str(model), str(text), precision, str(beam), str(BATCH)]
        systems[f"ours {precision}"] = lambda c=command: run(c)[0]
        systems[f"ours {precision} 1x1"] = lambda c=command: run(c, 1)[0]
    with tempfile.TemporaryDirectory(prefix="ziggurat-bench-") as folder:
        if "marian" in peers:
            lines = len(text.read_text(encoding="utf-8").splitlines())
            for name, command in marian_peer.exported(Path(folder), model, text, beam=beam, batch=BATCH).items():
                systems[name] = lambda c=command: lines / marian_peer.decode(c)[1]
        return in_turns(systems, rounds)


def whole(data: Path, peers: Sequence[str], rounds: int) -> dict[str, dict[str, float]]:
    """Return the seconds of short whole processes, and the peak memory of those that translate 1,000 lines."""
    from benchmarks.train_speed import prepared
    from ziggurat.config.recipes import load_named
    from ziggurat.data.corpus import Store
    from ziggurat.model.build import build_model
    from ziggurat.model.directory import write_model_directory
    from ziggurat.model.tensors import weights

    store = prepared(data)
    d, ff, heads, encoder, decoder = SHAPES["T3"]
    sizes = f"d_model: {d}, d_ff: {ff}, heads: {heads}, encoder: {{layers: {encoder}}}, decoder: {{layers: {decoder}}}"
    experiment = load_named("multi30k-en-de", [f"model={{{sizes}}}", f"data.store={store}"])
    opened, folder = Store.open(store), store.parent / "model"
    model = build_model(experiment.model, opened.source.size, opened.target.size)
    write_model_directory(folder, weights(model), experiment, store)
    with gzip.open(data / "test_2016_flickr.en.gz", "rt", encoding="utf-8") as file:
        text = file.read().splitlines()
    one, many = store.parent / "one", store.parent / "many"
    one.write_text(text[0] + "\n", encoding="utf-8")
    many.write_text("".join(line + "\n" for line in text), encoding="utf-8")

    def translating(lines: Path) -> dict[str, list[str]]:
        ours = [sys.executable, "-m", "ziggurat", "translate", str(folder), "-i", str(lines), "--threads", "2"]
        ours += ["max_length.limit=14", "min_length=14", "batch_sentences=64"]
        commands = {f"ours {p}": [*ours, f"precision={p}"] for p in ("float32", "bfloat16", "int8")}
        if "ctranslate2" in peers:
            path, pieces = Path(os.environ["BENCH_RUNS"]) / "ct2-T3-fp32", Path(os.environ["BENCH_DATA"]) / "spm.model"
            theirs = [str(python_of("ctranslate2")), "-c", _WHOLE_CTRANSLATE2, str(path), str(pieces), str(lines)]
            commands |= {f"ctranslate2 {dtype}": [*theirs, dtype] for dtype in ("float32", "int8")}
        if "marian" in peers:
            commands |= marian_peer.whole_processes(store.parent, lines, beam=4, batch=BATCH, length=LENGTH)
        return commands

    if "marian" in peers:
        marian_peer.untrained(store.parent, SHAPES["T3"], marian_peer.written(store.parent, opened.source), text[:8])

    little = {f"ziggurat {o}": [sys.executable, "-m", "ziggurat", o] for o in ("--version", "--help")}
    short = {**little, **translating(one)}
    for command in short.values():
        _process(command)  # not counted, but brings files into memory
    seconds = in_turns({name: lambda c=command: _process(c)[0] for name, command in short.items()}, rounds)
    peaks = {name: _process(command)[1] for name, command in translating(many).items()}
    return {"whole processes, one sentence, seconds": seconds, "peak memory of 1,000 lines, MiB": peaks}


def _process(command: Sequence[str]) -> tuple[float, float]:
    """Return the seconds of a process from start to end, and its peak memory in MiB.

    A small process starts it, because a process's peak includes the memory of the one that starts it.
    """
    seconds, peak = run([sys.executable, "-c", _WATCHED, *command])
    return seconds, peak


def depth(precision: str = "float32") -> None:
    """Print output tokens/s by depth, attention and target length: d_model 256, beam 4, 32 sentences at a time."""
    lengths = (16, 64, 256)
    print("| decoder layers | attention | " + " | ".join(f"{n} tokens" for n in lengths) + " |")
    print("|" + "---|" * (2 + len(lengths)))
    for layers in (6, 12, 24):
        for attention in ("full", "average", "simplified_average", "merged"):
            find, row = searcher((256, 1024, 4, 6, layers), attention, precision, 4, batch=32), []
            for length in lengths:
                given = sentences(32, length)
                find(given[:4])
                began = time.perf_counter()
                find(given)
                row.append(f"{32 * length / (time.perf_counter() - began):,.0f}")
            print(f"| {layers} | {attention} | {' | '.join(row)} |", flush=True)


def main() -> None:
    """Measure what the options request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=["T3", "T2"], default=["T3"])
    parser.add_argument("--beam", nargs="+", type=int, default=[4, 1])
    parser.add_argument("--peer", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--latency", action="store_true")
    parser.add_argument("--depth", action="store_true")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/multi30k"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if (options.model is None) != (options.text is None):
        parser.error("--model and --text go together")
    if options.one:
        import torch

        shape, beam, precision, kind, count = options.one
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
        print("RESULT", ours(shape, int(beam), precision, kind, int(count)))
        return
    if options.depth:
        depth()
        return
    reasons = {peer: left_out(peer) for peer in options.peer}
    peers = [peer for peer, reason in reasons.items() if not reason]
    for peer, reason in reasons.items():
        if reason:
            print(f"{peer} is left out: {reason}", file=sys.stderr)
    if options.whole:
        results = whole(options.data, peers, options.rounds)
    elif options.latency:
        results = {"latency, ms": latency(peers, options.rounds)}
    elif options.model:
        results = {
            f"{options.model.name}, beam {beam}, lines/s": trained(
                options.model, options.text, beam, peers, options.rounds, options.precision
            )
            for beam in options.beam
        }
    else:
        results = {
            f"{shape}, beam {beam}": table(shape, beam, peers, options.rounds, options.precision)
            for shape in options.shape
            for beam in options.beam
        }
    if options.json:
        print(json.dumps(results))
        return
    for title, figures in results.items():
        print(title)
        for name, value in figures.items():
            print(f"  {name:<28}{value:10,.{1 if value >= 10 else 3}f}")


if __name__ == "__main__":
    main()
