"""Gradient norms of the lowest and the highest layer of each stack before the first update.

python experiments/depth-trainability/gradients.py --store STORE [--depth 18-18 ...] [--method post ...]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from methods import DEPTHS, METHODS, UNEQUAL, common

from ziggurat.config.recipes import load_named
from ziggurat.data.corpus import Store
from ziggurat.model.build import build_model
from ziggurat.train.objective import batch_loss
from ziggurat.train.profiling import profile_admin, profile_batch


def norms(store: str, depth: tuple[int, int], method: str) -> tuple[list[float], list[float]]:
    """Return the gradient norm of every encoder and decoder layer, bottom first, for one batch of 4,096 tokens."""
    overrides = [*common(*depth, 500, 512, 120), *METHODS[method], f"data.store={store}"]
    experiment = load_named("multi30k-de-en", overrides)
    opened = Store.open(experiment.data.store)
    model = build_model(experiment.model, opened.source.size, opened.target.size).train()
    profile_admin(model, experiment, opened)
    torch.manual_seed(1)
    batch = profile_batch(opened, 4096, seed=1)
    tokens, sentences = batch.target_tokens, batch.sentences
    batch_loss(model, batch, experiment.training.loss, tokens=tokens, sentences=sentences).objective.backward()
    return tuple(  # type: ignore[return-value]
        [
            float(torch.nn.utils.get_total_norm([p.grad for p in layer.parameters() if p.grad is not None]))
            for layer in stack.layers  # type: ignore[union-attr]
        ]
        for stack in (model.encoder, model.decoder)
    )


def main() -> None:
    """Print one row per depth and method."""
    depths = {**DEPTHS, **UNEQUAL}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True)
    parser.add_argument("--depth", nargs="*", choices=depths, default=["6-6", "18-18", "36-12", "36-6", "3-12"])
    parser.add_argument("--method", nargs="*", choices=METHODS, default=list(METHODS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| depth | method | encoder: layer 1 | top | decoder: layer 1 | top |")
    print("|---|---|---|---|---|---|")
    for depth in options.depth:
        for method in options.method:
            encoder, decoder = norms(options.store, depths[depth], method)
            ends = (encoder[0], encoder[-1], decoder[0], decoder[-1])
            print(f"| {depth} | {method} | {' | '.join(f'{norm:.1e}' for norm in ends)} |", flush=True)


if __name__ == "__main__":
    main()
