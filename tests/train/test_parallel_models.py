"""For every architecture two processes compute the same gradients as one, replicated and with FSDP2."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from tests.composition import AXES, covering, model, refusal
from tests.small import small_config
from tests.train.batches import batches
from tests.train.launch import run_together
from ziggurat.config.model import ModelConfig
from ziggurat.config.train import GuidedAlignmentConfig, LossConfig, RecomputeConfig
from ziggurat.data.loader import Batch
from ziggurat.model.build import build_model, set_recompute
from ziggurat.model.embedding import SinusoidalPositions
from ziggurat.model.fast.int8 import quantise
from ziggurat.model.seq2seq import AlignmentHead, Seq2Seq
from ziggurat.model.tensors import whole
from ziggurat.train.device import Shortage
from ziggurat.train.distributed import Processes, joined
from ziggurat.train.parallel import Parallel, Replicated, Sharded

HERE = "tests.train.test_parallel_models"
RNMT: dict[str, Any] = {"family": "rnmt", "embedding": {"positions": "none", "sharing": "none"}}
LOSS = LossConfig(inter_sim=0.3, normalisation="sentence_mean", alignment=GuidedAlignmentConfig(weight=0.3))


def architectures(share: str) -> dict[str, ModelConfig]:
    """Return architectures with every value of every axis ("all"), or a quarter of a few that cover them ("some")."""
    if share == "some":
        return {f"array {number}": model(choices) for number, choices in enumerate(list(covering(1))[::4])}
    return {
        f"{axis}={value}": model({axis: value})
        for axis, values in AXES.items()
        for value in values
        if refusal({axis: value}) is None
    }


def built(config: ModelConfig) -> Seq2Seq:
    """Return the model in fp64, the same in every process."""
    model = build_model(config, 20, 20, seed=3).double().train()
    model.decoder.aligned = AlignmentHead.of(LOSS.alignment)
    return model


def update(masks: int = 0) -> list[Batch]:
    """Three batches: the first process has two of them, the second has one."""
    return [replace(batch, seed=masks + number) for number, batch in enumerate(batches([2, 3, 2], linked=True))]


def gradients(parallel: Parallel, mine: list[Batch]) -> dict[str, Tensor]:
    """Return the update's gradients, unsharded."""
    sums = parallel.accumulate(mine, parallel.size(mine))
    assert not isinstance(sums, Shortage)
    return {n: whole(p.grad) for n, p in parallel.model.named_parameters() if p.grad is not None}


def compare(
    kind: str,
    processes: Processes,
    config: ModelConfig,
    recompute: RecomputeConfig | None = None,
    change: Callable[[Seq2Seq], None] = lambda model: None,
) -> float:
    """Return the largest difference between a gradient of two processes and that of one, twice in a row."""
    models = [built(config) for _ in range(2)]
    for each in models:
        change(each)
    together = (Replicated if kind == "ddp" else Sharded)(models[0], LOSS, "fp32", processes)
    alone, worst = Parallel(models[1], LOSS), 0.0
    for each in (together, alone):
        set_recompute(each.model, recompute or RecomputeConfig())
    for masks in (0, 10):
        expected = gradients(alone, update(masks))
        found = gradients(together, update(masks)[processes.rank :: 2])
        assert found.keys() == expected.keys()
        worst = max(worst, *(float((found[n] - expected[n]).abs().max()) for n in expected))
        for each in (together, alone):
            each.model.zero_grad(set_to_none=True)
    return worst


def differences(kind: str, share: str) -> None:
    """Run in both processes: print the differences."""
    with joined(timeout_minutes=2.0) as processes:
        found = {name: compare(kind, processes, config) for name, config in architectures(share).items()}
        found["split"] = compare(kind, processes, model({"encoder.history": "dlcl", "combination.unit": "sublayer"}))
        found["recomputed"] = compare(kind, processes, model({}), RecomputeConfig(encoder=1, decoder="segments"))
        found["int8"] = compare(kind, processes, model({}), change=quantise)
        found["rnmt"] = compare(kind, processes, small_config(3, 3, **RNMT))
        if kind == "ddp":
            found["layer drop"] = layer_drop(processes)
    print(json.dumps(found))


def layer_drop(processes: Processes) -> float:
    """Return the difference when each batch leaves out different layers; a layer that none has gets no gradient."""
    config = small_config(6, 1, encoder={"layers": 6, "layer_drop": 0.7})
    together = Replicated(built(config), LOSS, "fp32", processes, layer_drop=True)
    alone, worst, without = Parallel(built(config), LOSS), 0.0, 0
    for masks in range(0, 80, 10):
        whole_update = update(masks)[: 3 if masks % 20 else 1]
        expected = gradients(alone, whole_update)
        found = gradients(together, whole_update[processes.rank :: 2] or [whole_update[0].idle()])
        assert found.keys() == expected.keys()
        without += sum(name not in found for name, _ in together.model.named_parameters())
        worst = max(worst, *(float((found[n] - expected[n]).abs().max()) for n in expected))
        for each in (together, alone):
            each.model.zero_grad(set_to_none=True)
    assert without
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("share", ["some", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_two_processes_compute_the_gradients_of_one(kind: str, share: str) -> None:
    # More than a hundred models: five minutes on a busy machine
    said = run_together(HERE, "differences", 2, kind, share, timeout=900.0)
    first, second = (json.loads(each.splitlines()[-1]) for each in said)
    assert first == second
    assert len(first) > (6 if share == "some" else 60)
    assert {name: worst for name, worst in first.items() if worst > 1e-10} == {}


SHORTAGES = 6


def short_of_memory(layer_drop: str) -> None:
    """Run in both processes: the second one runs out of memory, at a different point in each update."""
    drop = 0.4 if layer_drop else 0.0
    config = small_config(6, 1, encoder={"layers": 6, "layer_drop": drop})
    with joined(timeout_minutes=0.5) as processes:
        together = Replicated(built(config), LOSS, "fp32", processes, bucket_mib=0.005, layer_drop=bool(drop))
        alone = Parallel(built(config), LOSS)
        mine = update()[processes.rank :: 2]
        gradients(together, mine)
        buckets, met = len(together.buckets), []
        together.model.zero_grad(set_to_none=True)
        if processes.rank == 0:  # it has seen a longer sentence, so its buffers are larger
            tables = [module for module in together.model.modules() if isinstance(module, SinusoidalPositions)]
            assert tables
            for table in tables:
                table(300)
        for number in range(SHORTAGES):
            parameters = list(together.model.parameters())

            def fail(gradient: Tensor) -> Tensor:
                raise MemoryError("no room")

            hook = (
                parameters[number * len(parameters) // SHORTAGES].register_hook(fail) if processes.rank == 1 else None
            )
            sums = together.accumulate(mine, together.size(mine))
            if hook is not None:
                hook.remove()
            together.model.zero_grad(set_to_none=True)
            met.append(isinstance(sums, Shortage))
            found, expected = gradients(together, mine), gradients(alone, update())
            assert found.keys() == expected.keys()
            assert max(float((found[n] - expected[n]).abs().max()) for n in expected) < 1e-10
            for each in (together, alone):
                each.model.zero_grad(set_to_none=True)
        print(json.dumps([buckets, met]))


@pytest.mark.slow
@pytest.mark.parametrize("layer_drop", [pytest.param("", marks=pytest.mark.slow), "layer drop"])
def test_running_out_of_memory_in_a_backward_pass_stops_no_other_process(layer_drop: str) -> None:
    """The buckets of the other process are answered; both skip the update, and the next one is correct."""
    for said in run_together(HERE, "short_of_memory", 2, layer_drop):
        buckets, met = json.loads(said.splitlines()[-1])
        assert buckets > 3
        assert met == ([True] * SHORTAGES if not layer_drop else met)
        assert sum(met) > 1


def replaced() -> None:
    """Run in both processes: release what trained a model, as growth does."""
    with joined(timeout_minutes=0.5) as processes:
        together = Replicated(built(model({})), LOSS, "fp32", processes)
        gradients(together, update()[processes.rank :: 2])
        gone = [weakref.ref(each) for each in (together.model, *together.model.parameters())]
        del together
        gc.collect()
        print(all(each() is None for each in gone))


def test_a_model_that_was_trained_is_freed() -> None:
    assert [said.splitlines()[-1] for said in run_together(HERE, "replaced", 2)] == ["True", "True"]
