"""Gain of translation's compiled loops (ziggurat/model/fast/compiled.c) over PyTorch's operators.

    python -m benchmarks.compiled_loops [--rounds 3] [--json]

Linear maps of base size with the rows of a decoding step (one sentence: 4 beams; 64 sentences: 256), attention of such
a step at its tenth position, and whole translation (shape T3 of benchmarks.decode_speed, 250 sentences, beam 4), each
in interleaved rounds in one process with 2 threads. There are 16 layers of weights, so that weights come from memory as
in a model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.decode_speed import SHAPES, searcher, sentences
from ziggurat.model.attention.cache import KeyValueBlock
from ziggurat.model.attention.multihead import attend_to_blocks
from ziggurat.model.dropout import Dropout
from ziggurat.model.fast import compiled
from ziggurat.model.fast.compiled import Precision
from ziggurat.model.fast.packed import available, packed

PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "int8")
LAYERS, HEADS, BEAMS, POSITIONS = 16, 8, 4, 10
WIDTHS = ((512, 512), (512, 1536), (512, 2048), (2048, 512), (512, 8000))


def without(make: Callable[[], Any]) -> Any:
    """Return what `make` returns without the library."""
    library, compiled._library = compiled._library, None
    try:
        return make()
    finally:
        compiled._library = library


def in_turns(works: Sequence[Callable[[], object]], rounds: int, repeats: int) -> list[float]:
    """Return the median seconds of one call of each work."""
    seconds: list[list[float]] = [[] for _ in works]
    for work in works:
        work()
    for _ in range(rounds):
        for work, found in zip(works, seconds, strict=True):
            began = time.perf_counter()
            for _ in range(repeats):
                work()
            found.append((time.perf_counter() - began) / repeats)
    return [statistics.median(found) for found in seconds]


def products(rows: int, precision: Precision, rounds: int) -> dict[str, float]:
    """Return how many times as fast the compiled product is, by widths."""
    found = {}
    for inside, outside in WIDTHS:
        weights = [torch.randn(outside, inside) for _ in range(LAYERS)]
        x, bias = torch.randn(rows, inside), torch.randn(outside)
        ours = [packed(weight, bias, precision) for weight in weights]
        theirs = without(lambda w=weights, b=bias: [packed(weight, b, precision) for weight in w])
        kinds = (ours, theirs)
        fast, slow = in_turns([lambda k=kind, x=x: [each(x) for each in k] for kind in kinds], rounds, 5)
        found[f"{inside} x {outside}"] = slow / fast
    return found


def attention(count: int, dtype: torch.dtype, rounds: int) -> float:
    """Return how many times as fast the compiled attention of a step is, for `count` sentences."""
    entries = POSITIONS * BEAMS
    query = torch.randn(count, BEAMS, HEADS, 64).transpose(1, 2).to(dtype)
    blocks = [KeyValueBlock(*(torch.randn(count, HEADS, entries, 64).to(dtype) for _ in range(2)))]
    own = torch.arange(entries) % BEAMS == torch.arange(BEAMS)[:, None]
    bias = torch.zeros(own.shape).masked_fill(~own, -torch.inf).expand(count, 1, -1, -1).contiguous()
    none = Dropout(0.0).eval()
    works = [lambda: compiled.attend(query, blocks, bias), lambda: attend_to_blocks(query, blocks, bias, none)]
    fast, slow = in_turns(works, rounds, 50)
    return slow / fast


def translation(precision: Precision, rounds: int) -> tuple[float, float]:
    """Return how many times as fast 250 sentences are translated together, and 20 one after the other."""
    given = sentences(250, 15)
    find = searcher(SHAPES["T3"], "full", precision, BEAMS)
    other = without(lambda: searcher(SHAPES["T3"], "full", precision, BEAMS))
    alone = given[:: len(given) // 20][:20]
    works = [
        lambda: find(given),
        lambda: without(lambda: other(given)),
        lambda: [find([one]) for one in alone],
        lambda: without(lambda: [other([one]) for one in alone]),
    ]
    fast, slow, quick, late = in_turns(works, rounds, 1)
    return slow / fast, late / quick


def main() -> None:
    """Print the table, or with --json a JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if compiled._library is None:
        raise SystemExit(compiled.notice() or "the library was not compiled")
    torch.set_num_threads(2)
    torch.manual_seed(1)
    found: dict[str, object] = {}
    with torch.inference_mode():
        for precision in PRECISIONS:
            if not (available(precision) and compiled.multiplies(precision)):
                continue
            for rows in (4, 256):
                found[f"{precision}, {rows} rows"] = products(rows, precision, options.rounds)
            together, alone = translation(precision, options.rounds)
            found[f"{precision}, translation"] = {"64 sentences at a time": together, "one sentence": alone}
        for count in (1, 64):
            for dtype in (torch.float32, torch.bfloat16):
                name = f"attention, {count * BEAMS} rows, {str(dtype).removeprefix('torch.')}"
                found[name] = {f"{POSITIONS} positions": attention(count, dtype, options.rounds)}
    if options.json:
        print(json.dumps(found, indent=1))
        return
    for name, ratios in found.items():
        print(f"{name}: " + ", ".join(f"{what} {ratio:.2f}" for what, ratio in ratios.items()))  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
