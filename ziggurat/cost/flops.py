"""Arithmetic per token, counted on the real model: encoder, decoder, attention, output layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ziggurat.config import Experiment
from ziggurat.cost.ledger import Ledger, Work
from ziggurat.cost.simulation import SimulatedUpdate, without_values
from ziggurat.models.memory import Memory
from ziggurat.models.seq2seq import Seq2Seq
from ziggurat.nn.attention import CrossAttention, OwnAttention
from ziggurat.nn.attention.additive import AdditiveAttention

__all__ = ["TokenFlops", "forward_flops", "training_flops"]


@dataclass(frozen=True)
class TokenFlops:
    """Additions and multiplications per token, matrix products alone.

    Attributes:
        encoder: per source token, attention left out.
        encoder_attention: per source token, products of positions with positions in sentences of a given length.
        memory: per source token, what the decoder makes of the memory once: keys and values.
        decoder: per target token, attention left out.
        decoder_attention: per target token, to the target and to the memory.
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
        """Of one source token."""
        return self.encoder + self.encoder_attention + self.memory

    @property
    def target(self) -> float:
        """Of one target token."""
        return self.decoder + self.decoder_attention + self.output


def forward_flops(experiment: Experiment, sizes: tuple[int, int], source: int, target: int) -> TokenFlops:
    """Return what one forward pass takes per token of a sentence of `source` and `target` tokens.

    The real model runs, on tensors without values; `sizes` are those of the vocabularies. What the decoder does for the
    memory is what more it does when the memory is twice as long, attention apart. Raises ConfigError as build_model
    does.
    """
    with without_values(experiment, sizes, torch.device("cpu")) as model, torch.no_grad():
        mask = torch.ones(1, source, dtype=torch.bool)
        encoder, memory = _counted(model, lambda: model.encode(torch.zeros(1, source, dtype=torch.int64), mask))
        ids = torch.zeros(1, target, dtype=torch.int64)
        decoder, hidden = _counted(model, lambda: model.decode(ids, memory))
        double = Memory(tuple(torch.cat([s, s], dim=1) for s in memory.states), torch.cat([mask, mask], dim=1))
        longer, _ = _counted(model, lambda: model.decode(ids, double))
        output, _ = _counted(model, lambda: model.logits(hidden))
    of_memory = longer.apart - decoder.apart
    return TokenFlops(
        encoder=encoder.apart / source,
        encoder_attention=encoder.attention / source,
        memory=of_memory / source,
        decoder=(decoder.apart - of_memory) / target,
        decoder_attention=decoder.attention / target,
        output=output.apart / target,
    )


def training_flops(forward: TokenFlops, update: SimulatedUpdate, target_tokens: int) -> TokenFlops:
    """Return the same for training: forward and backward pass, recomputed layers counted again.

    Each part takes as many times its forward pass as in `update`, whose batch has so many target tokens.
    """

    def times(part: str) -> float:
        ahead, back = (update.work.get(name, Work()).flops for name in (part, f"{part} backward"))
        return (ahead + back) / ahead if ahead else 1.0

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
    apart: int
    attention: int


def _counted(model: Seq2Seq, compute: Callable[[], Any]) -> tuple[_Count, Any]:
    """Return the operations of `compute`, and what it gives."""
    ledger = Ledger()
    with _attention_apart(model, ledger), ledger:
        result = compute()
    attention = ledger.work.get("attention", Work()).operations
    between = sum(count for kind, count in attention.items() if kind.batched)
    return _Count(sum(work.flops for work in ledger.work.values()) - between, between), result


@contextmanager
def _attention_apart(model: nn.Module, ledger: Ledger) -> Iterator[None]:
    """Context in which the insides of attention have a phase of their own."""

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
