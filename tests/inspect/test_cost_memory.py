"""Estimated memory compared with the allocator's report while the real update runs."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.inspect.test_cost_flops import experiment, rnmt
from ziggurat.config import Experiment
from ziggurat.data.loader import SpecialIds, collate
from ziggurat.inspect.ledger import Ledger
from ziggurat.inspect.machine import PURPOSES, BatchShape, SimulatedUpdate, simulate_update
from ziggurat.model.build import build_model, parameter_roles, set_recompute
from ziggurat.train.objective import as_trained
from ziggurat.train.optim import Optimiser
from ziggurat.train.parallel import Parallel
from ziggurat.train.update import train_update

V = 500
SHAPE = BatchShape(12, 14, 11)
CPU = torch.device("cpu")


def measured_peak(config: Experiment) -> int:
    """Return the peak bytes of tensors during the second update, as the allocator reports them."""
    training = config.training
    model = build_model(config.model, V, V)
    as_trained(model, training)
    set_recompute(model, training.recompute)
    optimiser = Optimiser(model, parameter_roles(model), training.optimiser)
    parallel = Parallel(model, training.loss, training.precision)
    rng = np.random.default_rng(1)
    source, target = (list(rng.integers(4, V, (SHAPE.sentences, n - 1), dtype=np.int32)) for n in SHAPE[1:])
    batch = collate(source, target, np.arange(SHAPE.sentences), SpecialIds(0, 3, 0, 2, 3))
    batches = [batch] * min(2, training.batch.accumulate)
    train_update(parallel, batches, optimiser, rate=1e-4, clip_norm=training.clip_norm)
    gc.collect()
    known = [*model.parameters(), *model.buffers(), *optimiser.state().values()]
    known += [batch.source, batch.source_mask, batch.target_in, batch.target_out, batch.target_mask]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        train_update(parallel, batches, optimiser, rate=1e-4, clip_norm=training.clip_norm)
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    reports = sorted((event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]")
    changes = np.cumsum([size for _, size in reports])
    assert len(changes) > 100
    return sum(tensor.nbytes for tensor in known) + int(changes.max())


WIDE = ["model.d_model=32", "model.d_ff=96"]
TRANSFORMERS = {
    "post": [],
    "pre": ["model.residual=pre"],
    "bf16": ["training.precision=bf16"],
    "recompute": ["training.recompute.encoder=1", "training.recompute.decoder=segments", "model.encoder.layers=6"],
    "accumulate": ["training.batch.accumulate=3", "training.clip_norm=0.1"],
    "dlcl": ["model.residual=pre", "model.encoder.history=dlcl", "model.decoder.history=dlcl"],
    "transparent": ["model.memory=transparent"],
    "average": ["model.decoder.attention=average"],
    "merged": ["model.decoder.attention=merged"],
    "relative": ["model.encoder.attention=relative"],
    "hyper": ["model.residual=hyper"],
    "radam": ["training.optimiser.kind=radam"],
    "muon": ["training.optimiser.kind=muon"],
    "narrow moments": ["training.optimiser.moments=bf16"],
    "int8": ["training.quantise=int8"],
    "inter_sim, exact dropout": ["training.loss.inter_sim=0.1", "training.exact_dropout=true"],
    "smoothed": ["training.optimiser.weight_smoothing=1e-4"],
    "r_drop": ["training.loss.r_drop=5"],
}
MIXED = {
    "pre, dlcl, transparent, average, bf16, narrow moments": [
        "pre", "dlcl", "transparent", "average", "bf16", "narrow moments",
    ],
    "post, relative, merged, muon, inter_sim, exact dropout": [
        "post", "relative", "merged", "muon", "inter_sim, exact dropout",
    ],
}  # fmt: skip
"""MIXED are choices that the quick suite tries together, and the slow suite one at a time."""
CONFIGS = {
    **{name: experiment(*WIDE, *overrides) for name, overrides in TRANSFORMERS.items()},
    **{name: experiment(*WIDE, *(o for one in mixed for o in TRANSFORMERS[one])) for name, mixed in MIXED.items()},
    "rnmt": rnmt("model.d_model=32"),
    "rnmt recompute bf16": rnmt("model.d_model=32", "training.recompute.encoder=1", "training.precision=bf16"),
}


QUICK = set(MIXED)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CONFIGS])
def test_memory_is_within_15_percent_of_the_allocators(name: str) -> None:
    update = simulate_update(CONFIGS[name], (V, V), SHAPE, CPU)
    assert update.peak == pytest.approx(measured_peak(CONFIGS[name]), rel=0.15)
    assert sum(update.at_peak.values()) == update.peak
    assert set(update.at_peak) <= set(PURPOSES)


def simulated(*overrides: str) -> SimulatedUpdate:
    return simulate_update(experiment(*WIDE, *overrides), (V, V), SHAPE, CPU)


@pytest.mark.slow
def test_parts_are_named_correctly() -> None:
    shallow = ["model.encoder.layers=1", "model.decoder.layers=1"]
    plain, model = simulated(*shallow), build_model(experiment(*WIDE, *shallow).model, V, V)
    weights = sum(p.nbytes for p in model.parameters())
    assert plain.at_peak["weights"] == weights
    assert plain.at_peak["moments"] == pytest.approx(2 * weights, rel=0.01)
    assert "copies" not in plain.at_peak
    maps = [p for module in model.modules() if isinstance(module, torch.nn.Linear) for p in module.parameters()]
    copied = sum(p.numel() for p in (*maps, model.output.weight))
    assert simulated(*shallow, "training.precision=bf16").at_peak["copies"] == 2 * copied
    several = simulated(*shallow, "training.batch.accumulate=2").at_peak
    assert several["gradients"] == weights
    assert simulated(*shallow, "training.optimiser.moments=bf16").at_peak["moments"] == weights
    assert simulated(*shallow, "training.optimiser.kind=muon").at_peak["moments"] < 1.5 * weights
    frozen = simulated(*shallow, "training.freeze=[encoder]")
    encoder = sum(p.nbytes for p in model.encoder.parameters())
    assert frozen.trained == plain.trained - encoder
    assert frozen.at_peak["moments"] == pytest.approx(2 * (weights - encoder), rel=0.01)
    again, whole = simulated("training.recompute.encoder=1").at_peak, simulated().at_peak
    assert again["encoder"] < 0.3 * whole["encoder"]
    assert again["decoder"] == whole["decoder"]


def test_the_global_random_state_and_gradients_are_left_alone() -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    simulated("training.recompute.encoder=1")
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_ledger_counts_each_storage_once_while_it_lives() -> None:
    with Ledger() as ledger:
        ledger.purpose = "a"
        x = torch.zeros(1000)
        y = x.view(10, 100).t()[2:]
        ledger.purpose = "b"
        z = x + 1
        assert ledger.live == {"a": 4000, "b": 4000}
        x.add_(z)
        del z
        ledger.hold([y], "c")
        assert +ledger.live == {"c": 4000}
        del x, y
        assert not +ledger.live
    assert (ledger.peak, ledger.at_peak) == (8000, {"a": 4000, "b": 4000})
