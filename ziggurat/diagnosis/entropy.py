"""How spread attention is: the entropy of its weights, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ziggurat.diagnosis.hooks import STACKS, layers_of
from ziggurat.models.seq2seq import Seq2Seq
from ziggurat.nn.attention import CrossAttention, SelfAttention, weights_explicit
from ziggurat.nn.attention.additive import AdditiveAttention

__all__ = ["Entropies"]


class Entropies:
    """Context that sees the weights of every attention in a forward pass: those that its dropout module is given.

    Attention that has no weights (averages) is not seen. Fused kernels, which never have all weights, give way to
    plain products meanwhile.

    Args:
        model: any.
    """

    def __init__(self, model: Seq2Seq) -> None:
        self._handles: list[RemovableHandle] = []
        self._explicit = weights_explicit()
        self._seen: dict[str, list[list[Tensor]]] = {}
        self._attentions = _attentions(model)

    def __enter__(self) -> Entropies:
        for place, attentions in self._attentions.items():
            self._seen[place] = [[] for _ in attentions]
            for dropout, seen in zip(attentions, self._seen[place], strict=True):
                self._handles.append(dropout.register_forward_pre_hook(partial(_keep, seen)))
        self._explicit.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._explicit.__exit__(None, None, None)
        for handle in self._handles:
            handle.remove()

    def means(self, masks: Mapping[str, Tensor]) -> dict[str, list[float]]:
        """Return the mean entropy over heads and real queries, nats, of every layer by place; NaN where none was seen.

        `masks` are [batch, length] by stack, True at real tokens. RNMT+ has one attention, seen step by step; before
        its first step it looks at the memory once without a query, which is left out.
        """
        found: dict[str, list[float]] = {}
        for place, row in self._seen.items():
            mask = masks[place.partition(".")[0]]
            found[place] = [
                float(torch.cat(seen, dim=1)[:, -mask.shape[1] :][mask].mean()) if seen else torch.nan for seen in row
            ]
        return found


def _attentions(model: Seq2Seq) -> dict[str, list[nn.Module]]:
    """Return what is called on attention weights, one module per layer, by place."""
    found: dict[str, list[nn.Module]] = {}
    for stack in STACKS:
        for layer in layers_of(model, stack):
            for module in layer.modules():
                if isinstance(module, SelfAttention):
                    found.setdefault(f"{stack}.self_attn", []).append(module.dropout)
                elif isinstance(module, CrossAttention):
                    found.setdefault(f"{stack}.cross_attn", []).append(module.dropout)
    single = getattr(model.decoder, "attention", None)
    if isinstance(single, AdditiveAttention):
        found["decoder.cross_attn"] = [single.dropout]
    return found


@torch.no_grad()
def _keep(seen: list[Tensor], _dropout: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Keep the entropy [batch, queries] of weights [batch, heads, queries, keys], mean over heads."""
    seen.append(torch.special.entr(inputs[0].float()).sum(-1).mean(1))
