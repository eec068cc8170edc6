"""Tokens/s of RNMT+ training updates, compared with the same model as a plain loop over steps and gates.

    python -m benchmarks.rnmt [--widths 128 256] [--depths 6 20] [--sentences 64] [--rounds 5] [--threads 1] [--json]

The plain model has the same weights; its LSTM layers are written as in a textbook, with separate operations for each
direction, step and gate, differentiated by autograd. The two take turns in one process. Seconds are CPU time, which
with one thread is wall time minus that of other processes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ziggurat.config import ModelConfig
from ziggurat.config.train import LossConfig, OptimiserConfig
from ziggurat.data.loader import Batch, SpecialIds, collate
from ziggurat.model.build import build_model, count_parameters, parameter_roles
from ziggurat.model.lstm import CELL_CLIP, EPSILON, LstmCell, LstmLayer, LstmState, StepOrder
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.train.device import keep_freed_memory
from ziggurat.train.optim import Optimiser
from ziggurat.train.parallel import Parallel
from ziggurat.train.update import train_update

VOCABULARY, SHORTEST, LONGEST = 8000, 18, 22


def one_by_one(cell: LstmCell, sums: Tensor, state: LstmState) -> LstmState:
    """A step, gate by gate."""
    parts = zip(sums.chunk(4, dim=-1), cell.gain, cell.bias, strict=True)
    g, i, f, o = (F.layer_norm(part, part.shape[-1:], gain, bias, EPSILON) for part, gain, bias in parts)
    new = (torch.sigmoid(f) * state.cell + torch.sigmoid(i) * torch.tanh(g)).clamp(-CELL_CLIP, CELL_CLIP)
    return LstmState(torch.sigmoid(o) * new, new)


def step_by_step(layer: LstmLayer, x: Tensor, order: StepOrder) -> Tensor:
    """A layer, direction by direction and step by step; every step multiplies [x; m] by the whole matrix."""
    directions = []
    for read, cell in zip(order.reads, (cast(LstmCell, cell) for cell in layer.cells), strict=True):
        state = cell.start(x.shape[0])
        outputs = [state.output]
        for now in x.flatten(0, 1)[read].unflatten(0, (x.shape[1], -1)).unbind():
            state = one_by_one(cell, F.linear(torch.cat([now, state.output], dim=-1), cell.weight), state)
            outputs.append(state.output)
        directions.append(torch.stack(outputs))
    return torch.stack(directions, dim=2).flatten(0, 2)[order.states].view(*x.shape[:2], -1)


@contextmanager
def plain() -> Iterator[None]:
    """A context in which LSTM layers are plain loops."""
    kept: tuple[Any, Any] = LstmLayer.forward, LstmCell.advance
    LstmLayer.forward, LstmCell.advance = step_by_step, one_by_one  # type: ignore[method-assign]
    try:
        yield
    finally:
        LstmLayer.forward, LstmCell.advance = kept  # type: ignore[method-assign]


def sentence_pairs(count: int) -> Batch:
    """Return random pairs of 18 to 22 tokens per side: a batch of nearly equal lengths, like a bucket of real data."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(SHORTEST, LONGEST + 1, (2, count))
    source, target = ([rng.integers(4, VOCABULARY, n).astype(np.int32) for n in side] for side in lengths)
    return collate(source, target, np.arange(count), SpecialIds(0, 3, 0, 2, 3))


def seconds(model: Seq2Seq, optimiser: Optimiser, batch: Batch) -> float:
    began = time.process_time()
    train_update(Parallel(model, LossConfig()), [batch], optimiser, rate=1e-4, clip_norm=None)
    return time.process_time() - began


def measure(width: int, depth: int, sentences: int, rounds: int) -> dict[str, float]:
    config = ModelConfig.model_validate(
        {
            "family": "rnmt",
            "d_model": width,
            "heads": 4,
            "memory": "transparent",
            "encoder": {"layers": depth},
            "decoder": {"layers": 8},
            "embedding": {"positions": "none", "sharing": "none", "scale": False, "output_bias": True},
            "dropout": {"residual": 0.3, "embedding": 0.3, "attention": 0.3},
            "init": {"kind": "uniform"},
        }
    )
    model = build_model(config, VOCABULARY, VOCABULARY)
    optimiser, batch = Optimiser(model, parameter_roles(model), OptimiserConfig()), sentence_pairs(sentences)
    times: dict[str, list[float]] = {"ours": [], "plain": []}
    for turn in range(rounds + 1):
        for name, found in times.items():
            with plain() if name == "plain" else nullcontext():
                found.append(seconds(model, optimiser, batch))
        if turn == 0:  # the first allocates memory and moments
            times = {name: [] for name in times}
    ours, loop = (statistics.median(found) for found in times.values())
    return {
        "width": width,
        "depth": depth,
        "parameters": count_parameters(model),
        "source_tokens_per_second": batch.source_tokens / ours,
        "target_tokens_per_second": batch.target_tokens / ours,
        "plain_target_tokens_per_second": batch.target_tokens / loop,
        "ratio": loop / ours,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--depths", type=int, nargs="+", default=[6, 20])
    parser.add_argument("--sentences", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    torch.set_num_threads(o.threads)
    keep_freed_memory()
    rows = []
    if not o.json:
        lengths = f"{SHORTEST} to {LONGEST} tokens per side"
        print(
            f"{o.sentences} sentence pairs, {lengths}; decoder of 8 layers, fp32, {o.threads} threads, "
            f"median of {o.rounds} updates"
        )
    for width in o.widths:
        for depth in o.depths:
            rows.append(r := measure(width, depth, o.sentences, o.rounds))
            if not o.json:
                print(
                    f"width {width:>4}, encoder {depth:>2}: {r['source_tokens_per_second']:6,.0f} source and "
                    f"{r['target_tokens_per_second']:6,.0f} target tokens/s   plain loop "
                    f"{r['plain_target_tokens_per_second']:6,.0f} target tokens/s   ratio {r['ratio']:.2f}",
                    flush=True,
                )
    if o.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
