"""Checks of the GPU path; each reports what it compared, what it found and whether that is correct.

Some need a GPU, and report that on a machine without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu_counts import waits_of
from benchmarks.gpu_models import Ours, config_of, random_batch
from ziggurat.config.train import LossConfig
from ziggurat.data.loader import Batch, Group, LoaderState
from ziggurat.model.accelerator import copies_aside
from ziggurat.model.attention import cache as mask
from ziggurat.model.build import build_model, compile_layers
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.system.errors import printable
from ziggurat.train.device import send_ahead
from ziggurat.train.objective import autocast, batch_loss

LENGTHS = [(30, 25), (7, 31), (22, 3), (15, 15), (30, 31), (1, 2)]
NO_DROPOUT = {"residual": 0.0, "embedding": 0.0, "attention": 0.0, "activation": 0.0}


class Check(NamedTuple):
    """The name, the finding in words, and whether it is correct; None if this device cannot show it."""

    name: str
    found: str
    right: bool | None


class _Setting(NamedTuple):
    device: torch.device
    width: int
    heads: int
    vocabulary: int

    def model(self, attention: str = "full") -> Seq2Seq:
        """Return a small model without dropout, always the same."""
        decoder = {"layers": 2, "attention": attention}
        config = config_of(
            "base 6-6", self.width, self.heads, encoder={"layers": 2}, decoder=decoder, dropout=NO_DROPOUT
        )
        return build_model(config, self.vocabulary, self.vocabulary).to(self.device).train()

    def batch(self) -> Batch:
        return random_batch(LENGTHS, self.vocabulary).to(self.device)


def _gradients(model: Seq2Seq, batch: Batch, precision: str) -> tuple[float, Tensor]:
    """Return the loss of a batch, and all gradients as one vector."""
    model.zero_grad(set_to_none=True)
    with autocast(model.device, precision):
        counts = {"tokens": batch.target_tokens, "sentences": batch.sentences}
        loss = batch_loss(model, batch, LossConfig(), **counts).objective
    loss.backward()
    gradients = [p.grad.flatten().double() for p in model.parameters() if p.grad is not None]
    return float(loss.detach()), torch.cat(gradients)


def _apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def _padded_batches(s: _Setting, attention: str) -> Check:
    """Gradients with varlen_attn must be as close to those in fp32 as those with biases are."""
    model, batch = s.model(attention), s.batch()
    _, exact = _gradients(model, batch, "fp32")
    _, flash = _gradients(model, batch, "bf16")
    with mock.patch.object(mask, "_takes_bounds", return_value=False):
        _, padded = _gradients(model, batch, "bf16")
    near, limit = _apart(flash, exact), _apart(padded, exact)
    found = f"gradients in bf16 are {near:.4f} from fp32 with flash attention, {limit:.4f} with biases"
    right = near <= 1.5 * limit and bool(flash.isfinite().all())
    return Check(f"padded batches, {attention} attention", found, right if mask._takes_bounds(s.device) else None)


def _precision(s: _Setting) -> Check:
    model, batch = s.model(), s.batch()
    (fp32, exact), (bf16, rough) = (_gradients(model, batch, precision) for precision in ("fp32", "bf16"))
    found = f"loss {fp32:.5f} in fp32, {bf16:.5f} in bf16; gradients {_apart(rough, exact):.4f} apart"
    return Check("fp32 and bf16", found, abs(bf16 / fp32 - 1) < 0.01 and _apart(rough, exact) < 0.1)


def _compiled(s: _Setting) -> Check:
    model, batch = s.model(), s.batch()
    _, eager = _gradients(model, batch, "fp32")
    compile_layers(model)
    _, compiled = _gradients(model, batch, "fp32")
    apart = _apart(compiled, eager)
    return Check("compiled layers and eager ones", f"gradients in fp32 {apart:.1e} apart", apart < 1e-3)


def _graphs(s: _Setting) -> Check:
    """Three rounds over two shapes with dropout: run normally, recorded, replayed."""
    if s.device.type != "cuda":
        return Check("CUDA graphs and eager passes", "needs a GPU", None)
    batches = [random_batch(LENGTHS, s.vocabulary), random_batch(LENGTHS[:4], s.vocabulary, seed=2)] * 3
    config = config_of("base 6-6", s.width, s.heads, encoder={"layers": 2}, decoder={"layers": 2})
    losses = []
    for variant in ("eager", "graphs"):
        torch.manual_seed(3)
        ours = Ours(config, s.vocabulary, s.device, variant)
        torch.manual_seed(4)
        losses.append([ours.update(batch) for batch in batches])
    apart = max(abs(a / b - 1) for a, b in zip(*losses, strict=True))
    found = f"losses of 6 updates with dropout at most {apart:.1e} apart (some sums are not in a fixed order)"
    return Check("CUDA graphs and eager passes", found, apart < 2e-3)


def _prefetch(s: _Setting) -> Check:
    if not copies_aside(s.device):
        return Check("batches sent ahead", "needs a GPU", None)
    batches = [random_batch(LENGTHS[:n], s.vocabulary, seed=n) for n in range(1, 7)]
    got = send_ahead((Group([b], LoaderState(0, n)) for n, b in enumerate(batches)), s.device)
    same = all(torch.equal(next(got).batches[0].source.cpu(), batch.source) for batch in batches[:-1])
    return Check("batches sent ahead", "arrive as they were" if same else "ARE NOT WHAT WAS SENT", same)


def _waits(s: _Setting) -> Check:
    """An update may wait for the device once, for its loss and norm; its batch arrives beforehand."""
    config = config_of("base 6-6", s.width, s.heads, encoder={"layers": 2}, decoder={"layers": 2})
    ours, batch = Ours(config, s.vocabulary, s.device), s.batch()
    for _ in range(2):  # optimisers create their state in the first one
        ours.update(batch)
    places = waits_of(s.device, lambda: ours.update(batch))
    if places is None:
        return Check("an update waits once", "needs a GPU", None)
    return Check("an update waits once", f"{len(places)}: {', '.join(places)}", len(places) <= 1)


def checks(device: torch.device, width: int, heads: int, vocabulary: int, *, compiled: bool) -> Iterator[Check]:
    """Yield the checks one by one; an error is a finding, too. `compiled`: also check compiled layers, last."""
    s = _Setting(device, width, heads, vocabulary)
    todo: dict[str, Callable[[], Check]] = {
        **{
            f"padded batches, {kind} attention": lambda kind=kind: _padded_batches(s, kind)  # type: ignore[misc]
            for kind in ("full", "merged", "relative")
        },
        "fp32 and bf16": lambda: _precision(s),
        "CUDA graphs and eager passes": lambda: _graphs(s),
        "batches sent ahead": lambda: _prefetch(s),
        "an update waits once": lambda: _waits(s),
    }
    if compiled:
        todo["compiled layers and eager ones"] = lambda: _compiled(s)
    for name, check in todo.items():
        try:
            yield check()
        except Exception as error:  # one broken path must not hide the results of the others
            yield Check(name, f"{type(error).__name__}: {printable(str(error), 300)}", False)
