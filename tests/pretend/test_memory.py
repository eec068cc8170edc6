"""The calculated memory of an update agrees with the bytes of tensors that the pretend accelerator counts."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.inspect.test_cost_flops import experiment, rnmt
from tools.pretend_device import NAME, counted
from ziggurat.config import Experiment
from ziggurat.data.loader import SpecialIds, collate
from ziggurat.inspect.device_memory import GIB, RESERVED, largest_batches
from ziggurat.inspect.machine import BatchShape, simulate_update
from ziggurat.model.build import build_model, parameter_roles, set_recompute
from ziggurat.train.objective import as_trained
from ziggurat.train.optim import Optimiser
from ziggurat.train.parallel import Parallel
from ziggurat.train.update import train_update

V = 500
SHAPE = BatchShape(12, 14, 11)
BF16, INT8 = "training.precision=bf16", "training.quantise=int8"
AGAIN = ["training.recompute.encoder=1", "training.recompute.decoder=1"]
WIDTHS = ["model.d_model=32", "model.d_ff=96"]


def counted_peak(config: Experiment) -> int:
    """Return the peak memory, in bytes, of the pretend accelerator in the second update."""
    before = memory()
    training, rng = config.training, np.random.default_rng(1)
    model = build_model(config.model, V, V)
    as_trained(model, training)
    model.to(NAME)
    set_recompute(model, training.recompute)
    optimiser = Optimiser(model, parameter_roles(model), training.optimiser)
    parallel = Parallel(model, training.loss, training.precision)
    source, target = (list(rng.integers(4, V, (SHAPE.sentences, n - 1), dtype=np.int32)) for n in SHAPE[1:])
    batches = [collate(source, target, np.arange(SHAPE.sentences), SpecialIds(0, 3, 0, 2, 3)).to(NAME)]
    for _ in range(2):
        gc.collect()
        with counted() as counts:
            assert train_update(parallel, batches, optimiser, rate=1e-4, clip_norm=training.clip_norm).taken
    return counts.peak - before


def memory() -> int:
    """Return the bytes that earlier tests left on the device."""
    gc.collect()
    with counted() as counts:
        return counts.peak


def deep(encoder: int, decoder: int, *overrides: str, build: Callable[..., Experiment] = experiment) -> Experiment:
    """Return a narrow model."""
    widths = WIDTHS if build is experiment else WIDTHS[:1]
    return build(*widths, f"model.encoder.layers={encoder}", f"model.decoder.layers={decoder}", *overrides)


CONFIGS = {
    "1-1 int8 bf16": deep(1, 1, INT8, BF16),
    "2-2 merged, recomputed": deep(2, 2, "model.decoder.attention=merged", *AGAIN),
    "6-6": deep(6, 6),
    "6-6 bf16": deep(6, 6, BF16),
    "6-6 recomputed": deep(6, 6, *AGAIN),
    "6-6 recomputed bf16": deep(6, 6, *AGAIN, BF16),
    "6-6 merged": deep(6, 6, "model.decoder.attention=merged"),
    "6-6 merged bf16": deep(6, 6, "model.decoder.attention=merged", BF16),
    "6-6 relative": deep(6, 6, "model.encoder.attention=relative"),
    "6-6 pre, dlcl": deep(6, 6, "model.residual=pre", "model.encoder.history=dlcl"),
    "6-6 hyper bf16": deep(6, 6, "model.residual=hyper", BF16),
    "6-6 int8": deep(6, 6, INT8),
    "6-6 int8 recomputed": deep(6, 6, INT8, *AGAIN),
    "30-6 int8 bf16": deep(30, 6, "model.residual=pre", INT8, BF16),
    "6-6 narrow moments": deep(6, 6, "training.optimiser.moments=bf16"),
    "6-6 muon": deep(6, 6, "training.optimiser.kind=muon"),
    "30-6": deep(30, 6, "model.residual=pre"),
    "30-6 bf16": deep(30, 6, "model.residual=pre", BF16),
    "30-6 segments": deep(30, 6, "model.residual=pre", "training.recompute.encoder=segments"),
    "60-12": deep(60, 12, "model.residual=admin"),
    "60-12 bf16": deep(60, 12, "model.residual=admin", BF16),
    "60-12 recomputed bf16": deep(60, 12, "model.residual=admin", *AGAIN, BF16),
    "rnmt": deep(6, 8, build=rnmt),
    "rnmt bf16": deep(6, 8, BF16, build=rnmt),
    "rnmt recomputed": deep(6, 8, *AGAIN, build=rnmt),
}
QUICK = list(CONFIGS)[:2]


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CONFIGS])
def test_calculated_memory_equals_counted_memory(name: str) -> None:
    update = simulate_update(CONFIGS[name], (V, V), SHAPE, torch.device("cpu"), stands_in=True)
    peak = counted_peak(CONFIGS[name])
    print(f"{name}: {peak:,} bytes counted, {update.peak:,} estimated, {update.peak / peak:.3f}")
    assert update.peak == pytest.approx(peak, rel=0.01)
    assert sum(update.at_peak.values()) == update.peak


@pytest.mark.slow
def test_the_largest_batches_fill_their_devices() -> None:
    depths, widths = ["model.encoder.layers=1", "model.decoder.layers=1"], ["model.d_model=512", "model.d_ff=2048"]
    config, shape = experiment(*depths, *widths, "training.loss.chunk_tokens=65536"), BatchShape(1, 28, 22)
    found = largest_batches(config, (V, V), shape)
    assert [batch.tokens for batch in found] == [28 * batch.sentences for batch in found]
    for batch in (found[0], found[-1]):
        full = shape._replace(sentences=batch.sentences)
        peak = simulate_update(config, (V, V), full, torch.device("cpu"), stands_in=True).peak
        assert peak == pytest.approx(batch.gib * GIB - RESERVED, rel=0.03)
        assert peak <= batch.gib * GIB - RESERVED
