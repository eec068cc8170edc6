"""Peak memory of training: 60-12 base under 8 GiB, and a deep encoder whose memory grows with the square root of its
depth.

    python -m benchmarks.memory [--part base deep] [--moments fp32 bf16] [--depths 100 250 500 1000] [--no-compact]
                                [--base-recompute 1] [--recompute segments] [--device cpu] [--json]

Every figure comes from a separate child process. `base`: a 60-12 Transformer of width 512 with a vocabulary of 32,000
on both sides, an update of one sentence pair, which creates the moments, and one of 3,584 tokens per side, all in fp32;
peak resident memory of the whole process. `deep`: encoders of width 64 with one decoder layer, one forward and backward
pass over 4,088 tokens per side; memory beyond libraries, parameters and gradients, and its ratio to the square root of
depth, relative to the first depth. On a GPU both are torch's peak allocation, on the pretend one
(tools/pretend_device.py) the bytes of live tensors. With `--no-compact` the process keeps freed memory, as training
does without `training.recompute.compact`. Exit status 1 if a limit is missed.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

GIB, MIB = 1 << 30, 1 << 20
LIMIT = 8 * GIB
SLACK = 1.15  # allowed excess over growth with the square root
LENGTH = 28  # tokens per sentence, including end-of-sentence
BASE_TOKENS, DEEP_TOKENS = 128 * LENGTH, 146 * LENGTH


def peak_bytes(device: str) -> int:
    """Return the most memory so far: allocated on a GPU, resident on a CPU."""
    if device != "cpu":
        import torch

        from ziggurat.model.accelerator import runtime

        return int(runtime(torch.device(device)).max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def held_bytes(device: str) -> int:
    """Return the memory held now."""
    if device != "cpu":
        import torch

        from ziggurat.model.accelerator import memory_in_use

        return memory_in_use(torch.device(device))
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def random_batch(tokens: int, vocabulary: int) -> Any:
    """Return sentence pairs of `LENGTH` tokens per side, `tokens` in total."""
    import numpy as np

    from ziggurat.data.loader import SpecialIds, collate

    generator = np.random.default_rng(1)
    pairs = tokens // LENGTH
    sides = [list(generator.integers(4, vocabulary, (pairs, LENGTH - 1), dtype=np.int32)) for _ in range(2)]
    return collate(*sides, np.arange(pairs), SpecialIds(0, 3, 1, 2, 3))


def built(layers: tuple[int, int], width: int, heads: int, vocabulary: int, o: dict[str, Any]) -> Any:
    """Return a model built as in training, with the allocator set as in training."""
    import torch

    from ziggurat.config.model import ModelConfig
    from ziggurat.config.train import RecomputeConfig
    from ziggurat.model.build import build_model, set_recompute
    from ziggurat.train.device import give_back_freed_memory, keep_freed_memory

    if o["compact"]:
        give_back_freed_memory()
    else:
        keep_freed_memory()
    choices = {"d_model": width, "d_ff": 4 * width, "heads": heads}
    depths = {"encoder": {"layers": layers[0]}, "decoder": {"layers": layers[1]}}
    model = (
        build_model(ModelConfig.model_validate({**choices, **depths}), vocabulary, vocabulary).to(o["device"]).train()
    )
    set_recompute(model, RecomputeConfig(encoder=o["recompute"], decoder=o["recompute"]))
    torch.manual_seed(1)
    return model


def measure_base(o: dict[str, Any]) -> dict[str, Any]:
    """Train a few updates of the 60-12 base model."""
    from ziggurat.config.train import LossConfig, OptimiserConfig
    from ziggurat.model.build import count_parameters, parameter_roles
    from ziggurat.train.optim import Optimiser
    from ziggurat.train.parallel import Parallel
    from ziggurat.train.update import train_update

    model = built((60, 12), 512, 8, 32_000, o)
    optimiser = Optimiser(model, parameter_roles(model), OptimiserConfig(moments=o["moments"]))
    losses: list[float] = []

    def update(tokens: int) -> float:
        """Return the seconds that an update takes."""
        batch, began = random_batch(tokens, 32_000), time.perf_counter()
        losses.append(train_update(Parallel(model, LossConfig()), [batch], optimiser, rate=1e-4, clip_norm=1.0).loss)
        return time.perf_counter() - began

    update(LENGTH)  # creates the moments, so that later updates need as much memory as any
    seconds = [update(BASE_TOKENS) for _ in range(o["updates"])]
    return {
        "parameters": count_parameters(model),
        "tokens": BASE_TOKENS,
        "moments_bytes": sum(v.nbytes for v in optimiser.state().values()),
        "peak_bytes": peak_bytes(o["device"]),
        "losses": losses,
        "seconds": sum(seconds) / len(seconds),
    }


def measure_deep(o: dict[str, Any]) -> dict[str, Any]:
    """Go forward and backward through a deep, narrow encoder once, with gradients already allocated."""
    from ziggurat.config.train import LossConfig
    from ziggurat.model.accelerator import runtime
    from ziggurat.model.build import count_parameters
    from ziggurat.train.objective import batch_loss

    model = built((o["depth"], 1), 64, 4, 1000, o)

    def both_ways(tokens: int) -> float:
        batch = random_batch(tokens, 1000).to(model.device)
        loss = batch_loss(model, batch, LossConfig(), tokens=batch.target_tokens, sentences=batch.sentences).objective
        loss.backward()
        return float(loss.detach())

    both_ways(LENGTH)  # allocates the gradients, and the libraries' own buffers
    if o["device"] != "cpu":
        runtime(model.device).reset_peak_memory_stats(o["device"])
    before, began = held_bytes(o["device"]), time.perf_counter()
    loss = both_ways(DEEP_TOKENS)
    return {
        "depth": o["depth"],
        "parameters": count_parameters(model),
        "before_bytes": before,
        "above_bytes": peak_bytes(o["device"]) - before,
        "loss": loss,
        "seconds": time.perf_counter() - began,
    }


def in_child(part: str, **options: Any) -> dict[str, Any]:
    """Measure in a separate process."""
    command = [sys.executable, "-m", "benchmarks.memory", "--child", json.dumps({"part": part, **options})]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return found


def base(o: argparse.Namespace, say: Any) -> tuple[list[dict[str, Any]], bool]:
    """Measure 60-12 base with moments of each kind; return the rows, and whether all are within the limit."""
    rows = []
    for moments in o.moments:
        options = {"recompute": o.base_recompute, "compact": o.compact, "updates": o.updates, "device": o.device}
        row = {"moments": moments, **in_child("base", moments=moments, **options)}
        rows.append(row)
        say(
            f"60-12 base, {row['parameters'] / 1e6:.0f}M parameters, {row['tokens']:,} tokens, {o.device} fp32, "
            f"recompute {o.base_recompute}, compact {o.compact}, moments {moments} "
            f"({row['moments_bytes'] / GIB:.2f} GiB): "
            f"peak {row['peak_bytes'] / GIB:.2f} GiB, {row['seconds']:.0f} s per update"
        )
    return rows, all(row["peak_bytes"] < LIMIT for row in rows)


def deep(o: argparse.Namespace, say: Any) -> tuple[list[dict[str, Any]], bool]:
    """Measure every depth; return the rows, and whether memory grows no faster than the square root of depth."""
    rows: list[dict[str, Any]] = []
    say(
        f"encoders of width 64, {DEEP_TOKENS:,} tokens per side, {o.device} fp32, recompute {o.recompute}, "
        f"compact {o.compact}"
    )
    say("layers  parameters and gradients  above them  per root of depth   seconds")
    for depth in o.depths:
        row = in_child("deep", depth=depth, recompute=o.recompute, compact=o.compact, device=o.device)
        row["per_root"] = row["above_bytes"] / depth**0.5
        row["ratio"] = row["per_root"] / (rows[0]["per_root"] if rows else row["per_root"])
        rows.append(row)
        say(
            f"{depth:6}  {8 * row['parameters'] / MIB:20.0f} MiB  {row['above_bytes'] / MIB:6.0f} MiB  "
            f"{row['ratio']:17.2f}  {row['seconds']:8.1f}"
        )
    return rows, max(row["ratio"] for row in rows) <= SLACK


def rule(text: str) -> str | int | None:
    """Read a value of `training.recompute`."""
    return int(text) if text.isdigit() else None if text in ("null", "none") else text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=["base", "deep"], default=["base", "deep"])
    parser.add_argument("--moments", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--updates", type=int, default=1, help="whole updates, after one of a single pair")
    parser.add_argument("--depths", type=int, nargs="+", default=[100, 250, 500, 1000])
    parser.add_argument("--base-recompute", type=rule, default=1)
    parser.add_argument("--recompute", type=rule, default="segments")
    parser.add_argument("--compact", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, pretend, ...")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.child:
        from benchmarks.gpu_counts import being_there

        with being_there(o.child["device"]):
            print(json.dumps({"base": measure_base, "deep": measure_deep}[o.child.pop("part")](o.child)))
        return
    say = (lambda _: None) if o.json else (lambda text: print(text, flush=True))
    results: dict[str, Any] = {}
    within = True
    for part in o.part:
        results[part], good = {"base": base, "deep": deep}[part](o, say)
        within = within and good
    if o.json:
        print(json.dumps({**results, "within_limits": within}, indent=2))
    verdict = "within" if within else "OUTSIDE"
    say(f"{verdict} the limits: base under 8 GiB, deep at most {SLACK} times the growth of the root")
    raise SystemExit(0 if within else 1)


if __name__ == "__main__":
    main()
