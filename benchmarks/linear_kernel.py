"""fp32 linear maps with oneDNN and with torch's own choice (MKL): GFLOP/s of one update's products, forward and
backward.

python -m benchmarks.linear_kernel [--json]
"""

from __future__ import annotations

import argparse
import json
import time
from unittest import mock

import torch

from ziggurat.model.linear import linear

SHAPES = [(4096, 256, 768), (4096, 256, 1024), (4096, 1024, 256), (4096, 512, 2048), (4096, 2048, 512)]
"""SHAPES are tokens, input width and output width."""


def gflops(name: str, tokens: int, width_in: int, width_out: int) -> float:
    """Return the best of the repetitions within a second."""
    x = torch.randn(tokens, width_in, requires_grad=True)
    weight = torch.randn(width_out, width_in, requires_grad=True)
    above = torch.randn(tokens, width_out)
    best, end = float("inf"), time.perf_counter() + 1
    with mock.patch("ziggurat.model.linear._onednn_is_faster", return_value=name == "onednn"):
        while (began := time.perf_counter()) < end:
            torch.autograd.grad(linear(x, weight), (x, weight), above)
            best = min(best, time.perf_counter() - began)
    return 6 * tokens * width_in * width_out / best / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [(shape, gflops("onednn", *shape), gflops("torch", *shape)) for shape in SHAPES]
    if options.json:
        print(json.dumps([{"shape": shape, "onednn": ours, "torch": theirs} for shape, ours, theirs in rows]))
        return
    for shape, ours, theirs in rows:
        said = " x ".join(map(str, shape))
        print(f"{said:>18}: oneDNN {ours:4.0f}   torch's choice {theirs:4.0f} GFLOP/s   ratio {ours / theirs:.2f}")


if __name__ == "__main__":
    main()
