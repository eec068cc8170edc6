"""Reproduces figure 1 and table 1 of Zhang, Titov and Sennrich (2019): `run.py [--store STORE]`.

Gradient norms by layer at depths 6, 12 and 18, and the means over 12 layers of beta_LN, beta_RC, beta and Var(r), right
after initialisation at the base size, with Glorot and with depth-scaled initialisation. The batch is a sample of a
prepared store, or random tokens, Zipf-distributed; every seed has its own sample and weights. Writes SVG, CSV and JSON
to `results/`, prints the table as Markdown, and exits with status 1 if the mean over seeds of beta_LN or Var(r)
deviates from the published figure by more than the tolerance.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ziggurat.config import ModelConfig
from ziggurat.config.train import LossConfig
from ziggurat.data.corpus import Store
from ziggurat.data.loader import Batch
from ziggurat.inspect.report.drawing import save
from ziggurat.inspect.report.figure import Panel, Series, described, numbers
from ziggurat.inspect.report.panels import STACKS, SUB_LAYERS, finite
from ziggurat.model.build import build_model
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.system.files import write_atomically
from ziggurat.train.diagnosis.gradients import by_part, lengths, parts_of
from ziggurat.train.diagnosis.probe import measure
from ziggurat.train.objective import Objective, add_gradients, probe_loss
from ziggurat.train.profiling import profile_batch

VOCABULARY = 32000  # for random tokens
TOLERANCE = 0.03
TESTED = ("beta_ln", "variance")
PLACES = ("encoder.self_attn", "encoder.ffn", "decoder.self_attn", "decoder.cross_attn", "decoder.ffn")
INITS: dict[str, dict[str, Any]] = {"base": {}, "DS-Init": {"kind": "depth_scaled"}}
PUBLISHED = {  # table 1, in the order of PLACES
    "base": {
        "beta_ln": (0.86, 0.84, 0.82, 0.74, 0.84),
        "beta_rc": (1.22, 1.10, 1.21, 1.00, 1.11),
        "beta": (1.05, 0.93, 0.98, 0.74, 0.93),
        "variance": (1.38, 1.40, 1.48, 1.84, 1.39),
    },
    "DS-Init": {
        "beta_ln": (0.96, 0.95, 0.95, 0.94, 0.94),
        "beta_rc": (1.04, 1.02, 1.05, 1.00, 1.02),
        "beta": (1.02, 0.98, 1.10, 0.95, 0.98),
        "variance": (1.10, 1.10, 1.13, 1.15, 1.11),
    },
}


@dataclass(frozen=True)
class Data:
    """A batch, and the sizes of its vocabularies."""

    batch: Batch
    source_vocabulary: int
    target_vocabulary: int


def from_store(folder: Path, tokens: int, seed: int) -> Data:
    """Return a random sample of the training pairs, about `tokens` tokens per side."""
    store = Store.open(folder)
    return Data(profile_batch(store, tokens, seed=seed), store.source.size, store.target.size)


def at_random(tokens: int, seed: int) -> Data:
    """Return sentences of 25 random tokens, `tokens` per side."""
    rows = tokens // 25
    zipf = (1 / torch.arange(1, VOCABULARY + 1).double()).expand(2 * rows, -1)
    source, target = zipf.multinomial(25, True, generator=torch.Generator().manual_seed(seed)).split(rows)
    real = torch.ones_like(source, dtype=torch.bool)
    batch = Batch(source, real, target, target.roll(-1, 1), real, np.arange(rows), source.numel(), target.numel())
    return Data(batch, VOCABULARY, VOCABULARY)


def config(layers: int, init: dict[str, Any], sizes: dict[str, int]) -> ModelConfig:
    """Return the model of the paper's released code (zero): see README.md."""
    return ModelConfig.model_validate(
        {
            "preset": "base",
            **sizes,
            "residual": "post",
            "encoder": {"layers": layers},
            "decoder": {"layers": layers},
            "layer_norm_epsilon": 1e-8,
            "embedding": {"sharing": "decoder", "shared_bias": True, "zero_start": True},
            "dropout": {"residual": 0.1, "attention": 0.1, "activation": 0.1, "embedding": 0.1},
            "init": {"qkv": "fused_self", **init},
        }
    )


def new_model(layers: int, name: str, data: Data, *, seed: int, sizes: dict[str, int] | None = None) -> Seq2Seq:
    """Return a new model with `layers` layers in each stack, in training mode."""
    made = config(layers, INITS[name], sizes or {})
    return build_model(made, data.source_vocabulary, data.target_vocabulary, seed=seed).train()


def measured(layers: int, name: str, data: Data, *, seed: int, sizes: dict[str, int] | None = None) -> dict[str, Any]:
    """Return the measures of the table, by layer."""
    model = new_model(layers, name, data, seed=seed, sizes=sizes)
    torch.manual_seed(seed)
    return measure(model, data.batch, probe_loss(LossConfig(), "fp32"), tuple(PUBLISHED["base"]))


def gradient_norms(layers: int, name: str, data: Data, *, seed: int) -> dict[str, Any]:
    """Return the norm of each layer's gradient for the whole batch, computed in parts to save memory."""
    model = new_model(layers, name, data, seed=seed)
    objective, batch = Objective(model, LossConfig()), data.batch
    for part in parts_of_batch(batch, sentences=40):
        cpu = torch.device("cpu")
        add_gradients(objective, part, cpu, "fp32", tokens=batch.target_tokens, sentences=batch.sentences)
    return norms_of(model)


def norms_of(model: Seq2Seq) -> dict[str, Any]:
    """Return the norms of the gradients in `.grad`, by part and layer."""
    return by_part(parts_of(model), lambda group: sum(n**2 for n in lengths([p.grad for p in group])) ** 0.5)


def parts_of_batch(batch: Batch, *, sentences: int) -> Iterator[Batch]:
    """Yield the batch in parts of at most `sentences` sentences, each with its own seed."""
    names = ("source", "source_mask", "target_in", "target_out", "target_mask", "indices")
    for start in range(0, batch.sentences, sentences):
        cut: dict[str, Any] = {field: getattr(batch, field)[start : start + sentences] for field in names}
        tokens: dict[str, Any] = {f"{side}_tokens": int(cut[f"{side}_mask"].sum()) for side in ("source", "target")}
        yield replace(batch, **cut, **tokens, seed=start)


def means(values: dict[str, Any]) -> dict[str, tuple[float, ...]]:
    """Return the mean over layers of each measure of the table, in the order of PLACES."""
    return {key: tuple(sum(found := values[key][place]) / len(found) for place in PLACES) for key in PUBLISHED["base"]}


def over_seeds(tables: list[dict[str, tuple[float, ...]]]) -> dict[str, tuple[float, ...]]:
    """Return the mean of tables over seeds."""
    return {
        key: tuple(sum(values) / len(tables) for values in zip(*(table[key] for table in tables), strict=True))
        for key in tables[0]
    }


def deviations(found: dict[str, dict[str, tuple[float, ...]]]) -> dict[str, float]:
    """Return each measure's largest distance from the published table, over all places and initialisations."""
    return {
        key: max(
            abs(ours - theirs)
            for name, table in found.items()
            for ours, theirs in zip(table[key], PUBLISHED[name][key], strict=True)
        )
        for key in PUBLISHED["base"]
    }


def table(found: dict[str, dict[str, tuple[float, ...]]]) -> str:
    """Return the published figure / ours for each measure and place as Markdown."""
    names = {"beta_ln": "β_LN", "beta_rc": "β_RC", "beta": "β", "variance": "Var(r)"}
    lines = [f"| | | {' | '.join(SUB_LAYERS[place] for place in PLACES)} |", "|---" * (2 + len(PLACES)) + "|"]
    for name, values in found.items():
        for key, symbol in names.items():
            pairs = zip(PUBLISHED[name][key], values[key], strict=True)
            lines.append(f"| {name} | {symbol} | {' | '.join(f'{a:.2f} / {b:.2f}' for a, b in pairs)} |")
    return "\n".join(lines)


def draw(gradients: dict[tuple[int, str], dict[str, Any]], tables: dict[str, dict[str, Any]], folder: Path) -> None:
    """Write figure 1, and the profiles behind the table, as SVG and as CSV."""
    panels = []
    for stack, title in STACKS.items():
        depths = sorted({layers for layers, _ in gradients})
        lines = [
            _series(f"{layers} layers, {name}", values[stack], depths.index(layers), list(INITS).index(name))
            for (layers, name), values in gradients.items()
        ]
        panels.append(Panel(title, "layer", "gradient norm", tuple(lines), log_y=True))
    figures = [described("figure-1", "", "Gradient norm by layer at initialisation", "", tuple(panels))]
    for key, label in (("variance", "Var(r)"), ("beta_ln", "β_LN")):
        panels = [
            Panel(
                SUB_LAYERS[place],
                "layer",
                label,
                tuple(_series(name, values[key][place], 0, i) for i, (name, values) in enumerate(tables.items())),
            )
            for place in PLACES
        ]
        figures.append(described(f"table-1-{key.replace('_', '-')}", "", f"{label} by layer", "", tuple(panels)))
    for figure in figures:
        assert figure is not None
        save(figure, folder, ["svg"])
        write_atomically(folder / f"{figure.key}.csv", numbers(figure).encode())


def _series(label: str, values: list[float], colour: int, variant: int) -> Series:
    return Series(label, tuple(range(1, len(values) + 1)), finite(values), colour, variant)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path, help="a folder made by `ziggurat prepare`; default: random tokens")
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="for the table; figures use the first")
    parser.add_argument("--depths", type=int, nargs="+", default=[6, 12, 18], help="of figure 1")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    gradients: dict[tuple[int, str], dict[str, Any]] = {}
    profiles: dict[str, dict[str, Any]] = {}
    by_seed: dict[str, list[dict[str, tuple[float, ...]]]] = {name: [] for name in INITS}
    sizes = {}
    for seed in options.seeds:
        data = from_store(options.store, options.tokens, seed) if options.store else at_random(options.tokens, seed)
        sizes[seed] = {"source_tokens": data.batch.source_tokens, "target_tokens": data.batch.target_tokens}
        for name in INITS:
            started = time.perf_counter()
            values = measured(12, name, data, seed=seed)
            profiles.setdefault(name, values)
            by_seed[name].append(means(values))
            for layers in options.depths if seed == options.seeds[0] else ():
                gradients[layers, name] = gradient_norms(layers, name, data, seed=seed)
            print(f"seed {seed}, {name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    found = {name: over_seeds(values) for name, values in by_seed.items()}
    off = deviations(found)
    options.out.mkdir(exist_ok=True)
    draw(gradients, profiles, options.out)
    result = {
        "seeds": sizes,
        "torch": torch.__version__,
        "means": found,
        "by_seed": by_seed,
        "largest_deviation": off,
        "gradient_norm": {f"{layers} layers, {name}": values for (layers, name), values in gradients.items()},
    }
    write_atomically(options.out / "table-1.json", (json.dumps(result, indent=1, ensure_ascii=False) + "\n").encode())
    print(table(found))
    print("\nlargest deviation:", ", ".join(f"{key} {value:.3f}" for key, value in off.items()))
    sys.exit(any(off[key] > TOLERANCE for key in TESTED))


if __name__ == "__main__":
    main()
