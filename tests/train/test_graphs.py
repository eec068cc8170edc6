"""CUDA graphs; a stand-in reruns recorded work, so everything except capturing is tested without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import tiny_experiment
from tests.small import small_config
from tests.train.batches import batches
from ziggurat.config import Experiment
from ziggurat.config.train import LossConfig, OptimiserConfig
from ziggurat.model.build import build_model, parameter_roles
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.system.errors import ConfigError
from ziggurat.train import cuda_graphs
from ziggurat.train.cuda_graphs import GraphedPasses, refuse_unrecordable
from ziggurat.train.optim import Optimiser
from ziggurat.train.parallel import Parallel
from ziggurat.train.update import train_update

CUTS = [[3, 4], [7], [3, 4], [7], [3, 4], [2, 5], [3, 4]]
"""CUTS are, for each update, the sizes of the batches into which the seven pairs are cut."""


class Work:
    """A stand-in for CUDAGraph: recording the work changed nothing, and every replay does it."""

    recorded = 0
    replayed = 0

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        Work.recorded += 1

    def replay(self) -> None:
        Work.replayed += 1
        with torch.enable_grad():
            self.work()


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Seq2Seq:
    model = tiny()

    def captured(work: Callable[[], None], pool: Any) -> Work:
        assert pool == "pool"
        before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        work()
        for p, gradient in zip(model.parameters(), before, strict=True):
            if p.grad is not None and gradient is not None:
                p.grad.copy_(gradient)
        return Work(work)

    monkeypatch.setattr(Work, "recorded", 0)
    monkeypatch.setattr(Work, "replayed", 0)
    monkeypatch.setattr(cuda_graphs, "_captured", captured)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    return model


def tiny() -> Seq2Seq:
    return build_model(small_config(2, 1, dropout={"residual": 0.0, "embedding": 0.0}), 20, 20).double()


def losses(model: Seq2Seq, passes: GraphedPasses | None) -> list[float]:
    optimiser, found = Optimiser(model, parameter_roles(model), OptimiserConfig()), []
    for sizes in CUTS:
        if passes is not None:
            passes.__enter__()
        result = train_update(Parallel(model, LossConfig()), batches(sizes), optimiser, rate=1e-2, clip_norm=0.5)
        if passes is not None:
            passes.__exit__()
        assert all(p.grad is None for p in model.parameters())
        found.append(result.loss)
    return found


def test_updates_are_the_same_and_shapes_are_recorded_when_they_come_again(model: Seq2Seq) -> None:
    passes, other = GraphedPasses(model, 9), tiny()
    assert losses(model, passes) == pytest.approx(losses(other, None), abs=1e-12)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=0)
    # The two batches of [3, 4] and the one of [7] came again; those of [2, 5] came once.
    assert passes.shapes == 3
    assert Work.recorded == 2 * 3
    assert Work.replayed == 2 * (2 + 1 + 2 + 2)


def test_a_replay_reads_its_own_batch(model: Seq2Seq) -> None:
    passes, (batch,) = GraphedPasses(model, 9), batches([7])
    with passes:
        for seed in range(4):
            ids = torch.randint(4, 20, batch.source.shape, generator=torch.Generator().manual_seed(seed))
            inputs = ids, batch.source_mask.roll(seed, 0), batch.target_in.roll(seed, 1)
            torch.testing.assert_close(model(*inputs), passes._plain(*inputs), atol=1e-12, rtol=0)
    assert Work.replayed == 3


def test_no_more_shapes_are_recorded_than_allowed(model: Seq2Seq) -> None:
    passes = GraphedPasses(model, 1)
    assert losses(model, passes) == pytest.approx(losses(tiny(), None), abs=1e-12)
    assert passes.shapes == 1


def test_gradients_are_added_where_a_recording_expects_them(model: Seq2Seq) -> None:
    """The optimiser drops gradients after each update, but recordings still write to the first tensors."""
    passes, places = GraphedPasses(model, 9), []
    for sizes in ([7], [7], [3, 4]):
        with passes:
            places.append([p.grad.data_ptr() for p in model.parameters() if p.grad is not None])
            assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)
            train_update(
                Parallel(model, LossConfig()),
                batches(sizes),
                Optimiser(model, parameter_roles(model), OptimiserConfig()),
                rate=1e-3,
                clip_norm=None,
            )
    assert places[0] == places[1] == places[2]


def test_nothing_but_updates_is_recorded(model: Seq2Seq) -> None:
    passes, (batch,) = GraphedPasses(model, 9), batches([7])
    for _ in range(3):
        model(batch.source, batch.source_mask, batch.target_in)
    with passes:
        model(batch.source, batch.source_mask, batch.target_in)
    assert "forward" not in vars(model)
    assert Work.recorded == 0


def test_a_shape_that_cannot_be_recorded_is_not_tried_again(model: Seq2Seq, monkeypatch: pytest.MonkeyPatch) -> None:
    passes, (batch,), tried = GraphedPasses(model, 9), batches([7]), []

    def short(work: Callable[[], None], pool: Any) -> Work:
        tried.append(work)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(cuda_graphs, "_captured", short)
    inputs = batch.source, batch.source_mask, batch.target_in
    with passes:
        model(*inputs)
        with pytest.raises(torch.OutOfMemoryError):
            model(*inputs)
        assert torch.equal(model(*inputs), passes._plain(*inputs))
    assert len(tried) == 1


def with_graphs(folder: Path, model: dict[str, Any] | None = None, **training: Any) -> Experiment:
    return tiny_experiment(folder, model, **{"cuda_graphs": 8, **training})


@pytest.mark.parametrize(
    ("device", "choices", "message"),
    [
        ("cpu", {}, "`training.device` is cpu"),
        ("cuda", {"recompute": {"encoder": 1}}, "`training.recompute`"),
        ("cuda", {"model": {"decoder": {"layer_drop": 0.1}}}, "`layer_drop`"),
        ("cuda", {"loss": {"inter_sim": 0.1}}, "`training.loss.inter_sim`"),
        ("cuda", {"loss": {"alignment": {}}}, "a recording does not return attention"),
    ],
)
def test_settings_that_cannot_be_recorded_are_refused(
    device: str, choices: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"training.cuda_graphs.*cannot be used.*set it to 0") as caught:
        refuse_unrecordable(with_graphs(tmp_path, **choices), torch.device(device))
    assert message in str(caught.value)
    refuse_unrecordable(with_graphs(tmp_path), torch.device("cuda"))
    refuse_unrecordable(with_graphs(tmp_path, **{**choices, "cuda_graphs": 0}), torch.device(device))


def test_dropout_is_drawn_again_at_every_replay(model: Seq2Seq) -> None:
    for module in model.modules():
        if hasattr(module, "exact"):
            module.p = 0.5  # type: ignore[assignment]
    passes, (batch,) = GraphedPasses(model.train(), 9), batches([7])
    with passes:
        states: list[Tensor] = [model(batch.source, batch.source_mask, batch.target_in) for _ in range(4)]
    assert Work.replayed == 3
    assert not torch.equal(states[2], states[3])
