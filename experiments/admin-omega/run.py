"""Profiles ADMIN's omega and compares it with the published example: `run.py [--layers 100] [--store STORE]`.

The model has the base size; the batch consists of random tokens, Zipf-distributed, or is a sample of a prepared store.
Prints one Markdown row per sub-layer of the published example (admin-torch, 100L-100L WMT En-De).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from ziggurat.config import ModelConfig
from ziggurat.data.corpus import Store
from ziggurat.model.build import build_model, count_parameters, stack_residuals
from ziggurat.model.init import profile_omega
from ziggurat.train.profiling import profile_batch

PUBLISHED = {
    "encoder": {1: 1.0, 2: 1.319, 12: 2.173, 36: 3.621, 120: 6.765, 200: 8.836},
    "decoder": {1: 1.0, 2: 1.343, 12: 2.380, 18: 2.830, 36: 3.927, 90: 6.158, 300: 11.250},
}
VOCABULARY = 32768


def zipf_batch(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return source, its mask, decoder input and its mask: sentences of 10 to 50 random tokens, `tokens` per side."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(10, 51, (tokens // 30,), generator=generator)
    mask = torch.arange(50) < lengths[:, None]
    frequencies = (1 / torch.arange(1, VOCABULARY + 1).double()).expand(len(lengths), -1)
    source, target = (frequencies.multinomial(50, True, generator=generator) for _ in range(2))
    return source, mask, target, mask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=100, help="of encoder and decoder")
    parser.add_argument("--preset", default="base")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--store", type=Path, help="a folder made by `ziggurat prepare`; default: random tokens")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    config = ModelConfig.model_validate(
        {
            "preset": options.preset,
            "residual": "admin",
            "encoder": {"layers": options.layers},
            "decoder": {"layers": options.layers},
            "dropout": {"residual": 0.1, "attention": 0.1, "activation": 0.1, "embedding": 0.1},
            "init": {"kind": "admin"},
        }
    )
    vocabulary = VOCABULARY
    if options.store is None:
        batch = zipf_batch(options.tokens, options.seed)
    else:
        store = Store.open(options.store)
        vocabulary = store.target.size
        sample = profile_batch(store, options.tokens, seed=options.seed)
        batch = sample.source, sample.source_mask, sample.target_in, sample.target_mask
    source, source_mask, target, target_mask = (side.to(options.device) for side in batch)
    started = time.perf_counter()
    model = build_model(config, vocabulary, vocabulary, seed=options.seed).to(options.device).train()
    print(f"{count_parameters(model):,} parameters, {source_mask.sum()} source and {target_mask.sum()} target tokens")
    torch.manual_seed(options.seed)
    found = profile_omega(
        [stack_residuals(model.encoder), stack_residuals(model.decoder)],
        lambda: model(source, source_mask, target),
        [source_mask, target_mask],
    )
    print(f"built and profiled in {time.perf_counter() - started:.0f} s\n")
    print("| stack | sub-layer | published | profiled | ratio |\n|---|---|---|---|---|")
    for (name, published), omegas in zip(PUBLISHED.items(), found, strict=True):
        for number, value in published.items():
            if number <= len(omegas):
                omega = omegas[number - 1]
                print(f"| {name} | {number} | {value:.3f} | {omega:.3f} | {omega / value:.3f} |")


if __name__ == "__main__":
    main()
