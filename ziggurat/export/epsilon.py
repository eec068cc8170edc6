"""Another epsilon inside a stack's norms, and the same output: for toolkits that have one for all, or a fixed one."""

from __future__ import annotations

import dataclasses
import math

from ziggurat.export.anatomy import Layer, Stack

__all__ = ["with_epsilon"]


def with_epsilon(stack: Stack, epsilon: float) -> Stack:
    """Return a stack that computes the same with another epsilon inside its norms.

    LN_e(y) = LN_{c^2 e}(c y). So the whole stream becomes c = sqrt(epsilon / e) times as large: what enters it
    (embeddings, positions) and what sub-layers write is multiplied by c. Post-norm: the norms give c times as much, but
    for the last, and what reads them is divided by c. Pre-norm: the norms take c away themselves.
    """
    c = math.sqrt(epsilon / stack.epsilon)
    if epsilon == stack.epsilon:
        return stack
    last = len(stack.layers) - 1
    layers = tuple(_scaled(layer, c, stack.pre_norm, number == last) for number, layer in enumerate(stack.layers))
    positions = None if stack.positions is None else stack.positions * c
    return dataclasses.replace(stack, epsilon=epsilon, layers=layers, scale=stack.scale * c, positions=positions)


def _scaled(layer: Layer, c: float, pre_norm: bool, last: bool) -> Layer:
    """Return a layer whose stream is c times as large."""
    read = 1.0 if pre_norm else 1 / c
    inner_norm = 1.0 if pre_norm else c
    outer_norm = 1.0 if pre_norm or last else c
    self_attn, cross_attn = layer.self_attn, layer.cross_attn
    self_attn = dataclasses.replace(
        self_attn,
        query=self_attn.query.times(read, bias=False),
        key=self_attn.key.times(read, bias=False),
        value=self_attn.value.times(read, bias=False),
        out=self_attn.out.times(c),
        norm=self_attn.norm.times(inner_norm),
    )
    if cross_attn is not None:
        cross_attn = dataclasses.replace(
            cross_attn,
            query=cross_attn.query.times(read, bias=False),
            out=cross_attn.out.times(c),
            norm=cross_attn.norm.times(inner_norm),
        )
    return Layer(
        self_attn,
        cross_attn,
        layer.ffn_in.times(read, bias=False),
        layer.ffn_out.times(c),
        layer.ffn_norm.times(outer_norm),
        None if layer.gate is None else layer.gate.times(read, bias=False),
    )
