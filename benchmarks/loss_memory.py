"""Peak memory of the loss with a large vocabulary: in chunks, and with all logits at once.

Each variant runs in a separate process; its figure is how far the peak resident size exceeds that with only the inputs.
    python -m benchmarks.loss_memory [--tokens 4096] [--d-model 512] [--vocabulary 32000] [--json]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(variant: str, tokens: int, d_model: int, vocabulary: int) -> dict[str, float]:
    import torch
    from torch.nn import functional as F

    from ziggurat.config.train import LossConfig
    from ziggurat.train.loss import Labels, sequence_loss

    torch.manual_seed(0)
    hidden = torch.randn(1, tokens, d_model, requires_grad=True)
    weight = (torch.randn(vocabulary, d_model) * d_model**-0.5).requires_grad_()
    target = torch.randint(vocabulary, (1, tokens))
    mask = torch.ones(1, tokens, dtype=torch.bool)
    (torch.randn(64, 64) @ torch.randn(64, 64)).sum()  # libraries' own buffers
    before = peak_mib()
    began = time.perf_counter()
    if variant == "chunked":
        gold = Labels(target, mask, tokens)
        loss = sequence_loss(hidden, weight, gold, LossConfig(), tokens=tokens, sentences=1).objective
    elif variant == "torch linear_cross_entropy":
        loss = F.linear_cross_entropy(hidden[0], weight, target[0])  # no label smoothing
    else:
        loss = F.cross_entropy(F.linear(hidden[0], weight), target[0], label_smoothing=0.1)
    loss.backward()
    return {"peak_mib": peak_mib() - before, "seconds": time.perf_counter() - began, "loss": float(loss)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--d-model", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--variant")
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    if o.variant:
        print(json.dumps(measure(o.variant, o.tokens, o.d_model, o.vocabulary)))
        return
    results = {}
    for variant in ("chunked", "whole logits", "torch linear_cross_entropy"):
        sizes = ["--tokens", str(o.tokens), "--d-model", str(o.d_model), "--vocabulary", str(o.vocabulary)]
        command = [sys.executable, "-m", "benchmarks.loss_memory", "--variant", variant, *sizes]
        results[variant] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    if o.json:
        print(json.dumps(results, indent=2))
        return
    whole = results["whole logits"]["peak_mib"]
    print(f"forward and backward, {o.tokens} tokens, d_model {o.d_model}, vocabulary {o.vocabulary}, fp32")
    for variant, r in results.items():
        print(f"{variant:<28} {r['peak_mib']:8.0f} MiB ({r['peak_mib'] / whole:4.0%} of whole)  {r['seconds']:.2f} s")


if __name__ == "__main__":
    main()
