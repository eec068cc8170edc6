"""Forward and backward time of the two attention kernels by sequence length: where to switch on a CPU.

python -m benchmarks.attention_kernel [--tokens 4096] [--threads 2] [--dropout 0.1] [--json]
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from ziggurat.model.attention import multihead as base
from ziggurat.model.attention.cache import padding_mask
from ziggurat.model.attention.multihead import attend
from ziggurat.model.dropout import Dropout


def seconds(length: int, tokens: int, explicit: bool, p: float, rounds: int = 5) -> float:
    base._explicit_is_faster = lambda *_: explicit  # type: ignore[assignment]
    batch = max(1, tokens // length)
    query, key, value = (torch.randn(batch, 4, length, 64, requires_grad=True) for _ in range(3))
    padding = padding_mask(torch.ones(batch, length, dtype=torch.bool), torch.float32)
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        attend(query, key, value, padding, Dropout(p)).context.sum().backward()
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    torch.set_num_threads(o.threads)
    rows = []
    for length in (8, 16, 32, 64, 128, 256, 512, 1024):
        plain, fused = (seconds(length, o.tokens, explicit, o.dropout) for explicit in (True, False))
        rows.append(
            {"length": length, "explicit_ms": 1e3 * plain, "sdpa_ms": 1e3 * fused, "sdpa/explicit": fused / plain}
        )
    if o.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{o.tokens} tokens, 4 heads of 64, attention dropout {o.dropout:g}, {o.threads} threads, fp32, best of 5")
    for r in rows:
        print(
            f"length {r['length']:>4}: explicit {r['explicit_ms']:7.1f} ms   scaled_dot_product_attention "
            f"{r['sdpa_ms']:7.1f} ms   ratio {r['sdpa/explicit']:.2f}"
        )


if __name__ == "__main__":
    main()
