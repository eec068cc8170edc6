from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.small import small_config
from tests.train.batches import batches
from ziggurat.config.train import LossConfig, OptimiserConfig
from ziggurat.model.build import build_model, parameter_roles
from ziggurat.model.seq2seq import AlignmentHead, Seq2Seq
from ziggurat.train.optim import Optimiser
from ziggurat.train.parallel import Parallel
from ziggurat.train.update import UpdateResult, train_update


def tiny() -> tuple[Seq2Seq, Optimiser]:
    model = build_model(small_config(1, 1, dropout={"residual": 0.0, "embedding": 0.0}), 20, 20).double()
    return model, Optimiser(model, parameter_roles(model), OptimiserConfig())


def update(sizes: list[int], clip_norm: float | None = None, **loss: Any) -> tuple[UpdateResult, Seq2Seq]:
    model, optimiser = tiny()
    config = LossConfig.model_validate(loss)
    model.decoder.aligned = AlignmentHead.of(config.alignment)
    cut = batches(sizes, linked=True)
    return train_update(Parallel(model, config), cut, optimiser, rate=1e-2, clip_norm=clip_norm), model


@pytest.mark.parametrize(("precision", "used"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_precision_is_that_of_the_matrix_products(precision: str, used: torch.dtype) -> None:
    model, optimiser = tiny()
    model.float()
    seen: set[torch.dtype] = set()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda _module, _inputs, output: seen.add(output.dtype))
    train_update(Parallel(model, LossConfig(), precision), batches([7]), optimiser, rate=1e-2, clip_norm=None)
    assert seen == {used}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("normalisation", ["tokens", "sentence_mean", "sentence_sum"])
@pytest.mark.parametrize("sizes", [[3, 4], [1, 1, 5], [1] * 7])
@pytest.mark.parametrize("loss", [{}, {"inter_sim": 0.7}, {"r_drop": 5.0}, {"alignment": {"weight": 0.5}}], ids=str)
def test_an_update_does_not_depend_on_how_it_is_cut(loss: dict[str, Any], sizes: list[int], normalisation: str) -> None:
    exact = 1e-6 if "alignment" in loss else 1e-12  # shares of links are kept in fp32
    whole, model = update([7], **loss, normalisation=normalisation)
    cut, other = update(sizes, **loss, normalisation=normalisation)
    assert cut.loss == pytest.approx(whole.loss, abs=exact)
    assert cut.nll == pytest.approx(whole.nll, abs=1e-10)
    assert cut.alignment == pytest.approx(whole.alignment, abs=exact)
    assert cut.aligned == pytest.approx(whole.aligned, abs=exact)
    assert cut.grad_norm == pytest.approx(whole.grad_norm, abs=exact)
    assert (cut.source_tokens, cut.target_tokens, cut.sentences) == (31, 32, 7)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=max(1e-9, exact), rtol=0)


def test_clipping_scales_the_whole_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    monkeypatch.setattr(
        Optimiser,
        "step",
        lambda self: seen.append(math.sqrt(sum(float(p.grad.square().sum()) for p in self.parameters))),
    )
    free, _ = update([7])
    clipped, _ = update([7], clip_norm=free.grad_norm / 4)
    loose, _ = update([7], clip_norm=free.grad_norm * 4)
    assert seen == pytest.approx([free.grad_norm, free.grad_norm / 4, loose.grad_norm], rel=1e-4)
    assert clipped.grad_norm == pytest.approx(free.grad_norm)  # reported before clipping


def test_a_device_needs_no_grouped_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apple's GPUs have none, so torch computes the norms one by one."""
    expected, _ = update([7], clip_norm=0.1)
    monkeypatch.setattr(torch.nn.utils.clip_grad, "_has_foreach_support", lambda tensors, device: False)
    monkeypatch.setattr(torch.nn.utils.clip_grad, "_device_has_foreach_support", lambda device: False)
    assert update([7], clip_norm=0.1)[0] == expected


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_update_is_skipped_whole(bad: float) -> None:
    model, optimiser = tiny()
    with torch.no_grad():
        model.decoder.layers[0].get_parameter("ffn.in_proj.weight")[0, 0] = bad
    before = [p.detach().clone() for p in model.parameters()]
    result = train_update(Parallel(model, LossConfig()), batches([7]), optimiser, rate=1e-2, clip_norm=1.0)
    assert not result.finite
    assert optimiser.state() == {}
    for old, parameter in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.detach(), old, equal_nan=True, atol=0, rtol=0)
        assert parameter.grad is None


@pytest.mark.slow
def test_training_learns_the_batch_by_heart() -> None:
    model, optimiser = tiny()
    parallel = Parallel(model, LossConfig(label_smoothing=0.0))
    losses = [train_update(parallel, batches([7]), optimiser, rate=1e-2, clip_norm=None).loss for _ in range(120)]
    assert losses[0] > 2.0
    assert losses[-1] < 0.1
