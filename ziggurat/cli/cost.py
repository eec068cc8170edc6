"""What `inspect` says of costs: arithmetic, memory and time as tables for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ziggurat.config import Experiment, TrainingConfig

if TYPE_CHECKING:
    from ziggurat.cost.estimate import Cost

__all__ = ["cost_record", "cost_text", "estimated"]

_WIDTH = 34
"""Of the first column."""


def estimated(experiment: Experiment, source_vocabulary: int, target_vocabulary: int) -> Cost:
    """Return the costs of `experiment`. Raises ConfigError and DataError as estimate_cost does."""
    from ziggurat.cost.estimate import estimate_cost

    return estimate_cost(experiment, (source_vocabulary, target_vocabulary))


def cost_record(cost: Cost) -> dict[str, Any]:
    """Return everything as JSON takes it; operations are additions and multiplications, memory is bytes."""
    from dataclasses import asdict

    batches, shape = cost.batches, cost.memory.batch
    return {
        "device": cost.device,
        "threads": cost.threads,
        "batches": {**asdict(batches), "largest": [shape._asdict() for shape in batches.largest]},
        "flops_per_token": {
            "source_length": cost.length[0],
            "target_length": cost.length[1],
            "forward": asdict(cost.forward),
            "training": asdict(cost.training),
        },
        "memory": {**asdict(cost.memory), "batch": shape._asdict()},
        "time": asdict(cost.time),
        "notes": list(cost.notes),
    }


def cost_text(cost: Cost, training: TrainingConfig) -> str:
    """Return the tables for people."""
    return "\n\n".join(
        ["\n".join(table) for table in (_arithmetic(cost), _memory(cost, training), _time(cost, training), cost.notes)]
    ).rstrip()


def _row(name: str, *values: str) -> str:
    return f"  {name:<{_WIDTH}}" + "".join(f"{value:>12}" for value in values)


def _arithmetic(cost: Cost) -> list[str]:
    ahead, both = cost.forward, cost.training
    source, target = cost.length
    rows = (
        ("source token, in all", ahead.source, both.source),
        ("  encoder layers", ahead.encoder, both.encoder),
        (f"  attention, {source} tokens", ahead.encoder_attention, both.encoder_attention),
        ("  keys and values for the decoder", ahead.memory, both.memory),
        ("target token, in all", ahead.target, both.target),
        ("  decoder layers", ahead.decoder, both.decoder),
        (f"  attention, {target} and {source} tokens", ahead.decoder_attention, both.decoder_attention),
        ("  output layer", ahead.output, both.output),
    )
    return [
        f"{'MFLOP per token':<{_WIDTH + 2}}{'forward':>12}{'training':>12}",
        *(_row(name, f"{a / 1e6:,.1f}", f"{b / 1e6:,.1f}") for name, a, b in rows),
        f"  in sentences of {source} source and {target} target tokens ({cost.batches.origin})",
    ]


def _memory(cost: Cost, training: TrainingConfig) -> list[str]:
    memory, optimiser = cost.memory, training.optimiser
    names = {
        "weights": "weights, fp32",
        "copies": "their copies in bf16",
        "gradients": "gradients",
        "moments": f"moments ({optimiser.kind}, {optimiser.moments})",
        "encoder": "kept by the encoder" + _again(training.recompute.encoder),
        "decoder": "kept by the decoder" + _again(training.recompute.decoder),
        "loss": f"loss, {training.loss.chunk_tokens:,} tokens at a time",
        "backward": "made in the backward pass",
        "step": "made in the optimiser's step",
        "batch": "the batch itself",
    }
    rows = [_row(name, _mebibytes(memory.parts[key])) for key, name in names.items() if memory.parts.get(key)]
    batch = memory.batch
    lines = [
        f"{f'memory of an update, MiB ({cost.device})':<{_WIDTH + 2}}{_mebibytes(memory.peak):>12}",
        *rows,
        f"  at its peak, with the largest batch: {batch.sentences} x {batch.source} source and {batch.target} target "
        "tokens",
    ]
    if memory.checkpoint:
        lines.append(f"  asynchronous checkpoints keep {_mebibytes(memory.checkpoint)} MiB of main memory besides")
    return lines


def _again(recompute: object) -> str:
    return "" if recompute is None else f" (recompute {recompute})"


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f}"


def _time(cost: Cost, training: TrainingConfig) -> list[str]:
    time, batches = cost.time, cost.batches
    threads = f", {cost.threads} thread{'s' * (cost.threads > 1)}" if cost.device == "cpu" else ""
    names = {
        "layers": "encoder and decoder",
        "loss": "output layer and loss",
        "step": "the optimiser's step",
    }
    accumulate = training.batch.accumulate
    count = "1 batch" if accumulate == 1 else f"{accumulate} batches"
    return [
        f"{f'seconds of an update ({cost.device}{threads})':<{_WIDTH + 2}}{time.seconds:>12,.2f}",
        *(_row(name, f"{time.parts[key]:,.2f}") for key, name in names.items()),
        f"  {count} of {batches.source_tokens:,.0f} source and {batches.target_tokens:,.0f} target tokens on average; "
        f"{time.target_tokens_per_second:,.0f} target tokens a second",
        f"  {time.flops / 1e12:,.3f} TFLOP, at rates measured just now on a shallow copy (docs/inspect.md)",
    ]
