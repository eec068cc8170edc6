"""Arithmetic per token, counted while the real model runs: encoder, decoder, attention, output layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ziggurat.config import Experiment
from ziggurat.inspect.cost.ledger import Ledger, Work
from ziggurat.inspect.cost.simulation import SimulatedUpdate, without_values
from ziggurat.model.attention.additive import AdditiveAttention
from ziggurat.model.attention.base import OwnAttention
from ziggurat.model.attention.multihead import CrossAttention
from ziggurat.model.seq2seq import Memory, Seq2Seq


@dataclass(frozen=True)
class TokenFlops:
    """Additions and multiplications per token in matrix products.

    Attributes:
        encoder: per source token, without attention.
        encoder_attention: per source token, products between positions in a sentence of a given length.
        memory: per source token, the decoder's keys and values, computed once per sentence.
        decoder: per target token, without attention.
        decoder_attention: per target token, attention to the target and to the memory.
        output: per target token, the projection to the vocabulary.
    """

    encoder: float
    encoder_attention: float
    memory: float
    decoder: float
    decoder_attention: float
    output: float

    @property
    def source(self) -> float:
        """All operations per source token."""
        return self.encoder + self.encoder_attention + self.memory

    @property
    def target(self) -> float:
        """All operations per target token."""
        return self.decoder + self.decoder_attention + self.output


def forward_flops(experiment: Experiment, sizes: tuple[int, int], source: int, target: int) -> TokenFlops:
    """Return the operations of a forward pass, per token of a sentence of `source` and `target` tokens.

    The real model runs on tensors without values; `sizes` are those of the vocabularies. The decoder's keys and values
    are not a separate call: their cost is the increase when the memory is twice as long, attention left out. Raises
    the ConfigError of build_model.
    """
    with without_values(experiment, sizes, torch.device("cpu")) as model, torch.no_grad():
        mask = torch.ones(1, source, dtype=torch.bool)
        encoder, memory = _counted(model, lambda: model.encode(torch.zeros(1, source, dtype=torch.int64), mask))
        ids = torch.zeros(1, target, dtype=torch.int64)
        decoder, hidden = _counted(model, lambda: model.decode(ids, memory))
        double = Memory(tuple(torch.cat([s, s], dim=1) for s in memory.states), torch.cat([mask, mask], dim=1))
        longer, _ = _counted(model, lambda: model.decode(ids, double))
        output, _ = _counted(model, lambda: model.logits(hidden))
    of_memory = longer.others - decoder.others
    return TokenFlops(
        encoder=encoder.others / source,
        encoder_attention=encoder.attention / source,
        memory=of_memory / source,
        decoder=(decoder.others - of_memory) / target,
        decoder_attention=decoder.attention / target,
        output=output.others / target,
    )


def training_flops(forward: TokenFlops, update: SimulatedUpdate, target_tokens: int) -> TokenFlops:
    """Return the operations of training: forward and backward pass, with recomputed layers counted again.

    Each part has the ratio of training to forward pass that it has in `update`, whose batch has `target_tokens`.
    """

    def times(part: str) -> float:
        forward_pass, backward_pass = (update.work.get(name, Work()).flops for name in (part, f"{part} backward"))
        return (forward_pass + backward_pass) / forward_pass if forward_pass else 1.0

    encoder, decoder = times("encoder"), times("decoder")
    return TokenFlops(
        encoder=encoder * forward.encoder,
        encoder_attention=encoder * forward.encoder_attention,
        memory=decoder * forward.memory,
        decoder=decoder * forward.decoder,
        decoder_attention=decoder * forward.decoder_attention,
        output=update.work["loss"].flops / target_tokens,
    )


@dataclass
class _Count:
    """Operations of attention, and all others."""

    others: int
    attention: int


def _counted(model: Seq2Seq, compute: Callable[[], Any]) -> tuple[_Count, Any]:
    """Return the operations of `compute`, and its result."""
    ledger = Ledger()
    with _attention_apart(model, ledger), ledger:
        result = compute()
    attention = ledger.work.get("attention", Work()).operations
    # Batched products are those between positions; the projections inside attention modules are not batched.
    between = sum(count for kind, count in attention.items() if kind.batched)
    return _Count(sum(work.flops for work in ledger.work.values()) - between, between), result


@contextmanager
def _attention_apart(model: nn.Module, ledger: Ledger) -> Iterator[None]:
    """Context in which operators inside attention modules count for a separate phase."""

    def enter(module: nn.Module, args: object) -> None:
        ledger.phase = "attention"

    def leave(module: nn.Module, args: object, result: Tensor) -> None:
        ledger.phase = ""

    hooks = []
    for module in model.modules():
        if isinstance(module, OwnAttention | CrossAttention | AdditiveAttention):
            hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
