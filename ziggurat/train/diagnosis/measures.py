"""Measures of a model: similarities of layers, weights across depth, attention entropy, and changes by an update.

Similarities are those of Li et al. (2020, figures 2, 7 and 8), over real positions of single sentences. y_i(l) is the
state at source position l: i = 0 the encoder's input (embedding and position), i = 1..N the raw output of encoder layer
i, before any final norm. A zero state has cosine 0 with everything. Half precision is measured in fp32.

Shapes: `states` is a list of [batch, source, d_model], `mask` is [batch, source], True at real positions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from ziggurat.model.attention.multihead import CrossAttention, SelfAttention, weights_explicit
from ziggurat.model.history.base import History
from ziggurat.model.history.kinds import Transparent
from ziggurat.model.rnmt import AdditiveAttention
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.model.transformer import Encoder
from ziggurat.train.diagnosis.gradients import STACKS, Trace, by_part, layers_of, lengths, parts_of


@torch.no_grad()
def encoder_similarities(trace: Trace, mask: Tensor) -> dict[str, Any]:
    """Return `similarity`, `embedding_similarity`, `adjacent_similarity` and `inter_similarity`, means over sentences.

    y_i is as above; with hyper-connections it is the sum of the streams. If the input's width differs from that of the
    layers (RNMT+), its similarities with them are NaN. Empty if a layer was skipped.

    `mask` is [batch, source], True at real tokens.
    """
    if any(state is None for state in trace.outputs["encoder"]):
        return {}
    embedded, outputs = trace.embedded["encoder"], cast(list[Tensor], trace.outputs["encoder"])
    # [batch, source, streams, d_model] with hyper-connections.
    states = [state.sum(-2) if state.dim() == 4 else state for state in outputs]
    comparable = embedded.shape[-1] == states[0].shape[-1]
    inter = torch.cat([inter_similarities([embedded], mask), inter_similarities(states, mask)]).mean(1)
    table = inter.new_full((1 + len(states), 1 + len(states)), torch.nan)
    first = 0 if comparable else 1
    table[first:, first:] = similarities([embedded, *states] if comparable else states, mask).mean(2)
    return {
        "similarity": table.tolist(),
        "embedding_similarity": table[1:, 0].tolist(),
        "adjacent_similarity": table.diagonal(-1).tolist(),
        "inter_similarity": inter.tolist(),
    }


@torch.no_grad()
def history_weights(model: Seq2Seq) -> dict[str, list[list[float]]]:
    """Return the weights of each stack that combines layers, [consumer l][source k] (Wang et al. 2019, figure 5).

    Row l has the weights of the input of layer l + 1 (the last row: of the stack's output), column k those of the
    output y_k, with y_0 the stack's input. With `combination.unit: sublayer` both count sub-layers. NaN: never read.
    See History.table.
    """
    histories = {stack: getattr(getattr(model, stack), "history", None) for stack in STACKS}
    tables = {stack: cast(History, h).table() for stack, h in histories.items() if h is not None}
    return {stack: table.tolist() for stack, table in tables.items() if table is not None}


@torch.no_grad()
def transparent_weights(model: Seq2Seq) -> list[list[float]]:
    """Return the mixtures of transparent attention, [source i][decoder layer j] (Bapna et al. 2018, figure 4).

    Source 0 is the embedding, source i the output of encoder layer i; the weights of a decoder layer sum to 1. RNMT+
    does not mix its embedding, whose weight is NaN, and has one mixture for all layers. Empty if the memory is not
    transparent.
    """
    transparent: Transparent | None = getattr(model.encoder, "transparent", None)
    if transparent is None:
        return []
    rows: list[list[float]] = transparent.weight.softmax(-1).T.tolist()
    missing = len(layers_of(model, "encoder")) + 1 - len(rows)
    assert missing == (not isinstance(model.encoder, Encoder))
    return [[torch.nan] * len(rows[0])] * missing + rows


@contextlib.contextmanager
def entropies(model: Seq2Seq) -> Iterator[dict[str, list[list[Tensor]]]]:
    """Context that records the entropy of every attention's weights, read from the input of their dropout.

    Yields place -> layer -> entropies [batch, queries], which are filled by a pass. Attention without weights
    (averages) is not recorded. Inside, plain products replace fused kernels, which never have all weights in memory.
    """
    attentions = _attentions(model)
    seen: dict[str, list[list[Tensor]]] = {place: [[] for _ in row] for place, row in attentions.items()}
    with weights_explicit(), contextlib.ExitStack() as hooks:
        for place, row in attentions.items():
            for dropout, of_layer in zip(row, seen[place], strict=True):
                hooks.enter_context(dropout.register_forward_pre_hook(partial(_keep, of_layer)))
        yield seen


def mean_entropies(
    entropies: Mapping[str, Sequence[Sequence[Tensor]]], masks: Mapping[str, Tensor]
) -> dict[str, list[float]]:
    """Return the mean entropy of every layer over heads and real queries, in nats, by place; NaN if none was seen.

    `masks` are [batch, length] by stack, True at real tokens. RNMT+ has one attention, which is recorded step by step;
    the attention before its first step has no query and is left out.
    """
    found: dict[str, list[float]] = {}
    for place, row in entropies.items():
        mask = masks[place.partition(".")[0]]
        found[place] = [
            # The last queries, since RNMT+ has one more, before its first step.
            float(torch.cat(list(seen), dim=1)[:, -mask.shape[1] :][mask].mean()) if seen else torch.nan
            for seen in row
        ]
    return found


def _attentions(model: Seq2Seq) -> dict[str, list[nn.Module]]:
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
    """Record the entropy [batch, queries] of weights [batch, heads, queries, keys], mean over heads."""
    seen.append(torch.special.entr(inputs[0].float()).sum(-1).mean(1))


def inter_similarity(states: Tensor, mask: Tensor) -> Tensor:
    """Return sim_in(i) = mean_l cos(y_i(l), mean_l y_i(l)) of each sentence, [batch]; 1 if all positions agree."""
    real, count = _real(states, mask), mask.sum(1)
    # sum_l cos(y(l), m) = (sum_l y(l)/|y(l)|) . m/|m|, which needs only the directions in memory.
    mean = F.normalize(real.sum(1) / count[:, None], dim=-1)
    return (F.normalize(real, dim=-1).sum(1) * mean).sum(-1) / count


def similarities(states: Sequence[Tensor], mask: Tensor) -> Tensor:
    """Return sim(i, j) = mean_l cos(y_i(l), y_j(l)) for all pairs of states, [states, states, batch].

    Raises ValueError for states of different widths, between which no angle is defined.
    """
    if len(shapes := {tuple(state.shape) for state in states}) > 1:
        raise ValueError(f"states of shapes {' and '.join(str(list(s)) for s in sorted(shapes))} cannot be compared")
    directions = torch.stack([F.normalize(_real(state, mask), dim=-1) for state in states], dim=1).flatten(2)
    # One product over positions and channels sums the cosines of a pair of states over all positions.
    return (directions @ directions.transpose(1, 2)).movedim(0, 2) / mask.sum(1)


def inter_similarities(states: Sequence[Tensor], mask: Tensor) -> Tensor:
    """Return sim_in of each of the states, [states, batch]."""
    return torch.stack([inter_similarity(state, mask) for state in states])


def _real(states: Tensor, mask: Tensor) -> Tensor:
    """Return the states in fp32 or wider, with 0 at padding (multiplying by the mask would keep NaN)."""
    wide = states.float() if states.dtype in (torch.bfloat16, torch.float16) else states
    return wide.masked_fill(~mask[..., None], 0.0)


class Snapshot:
    """Copy of the weights before an update, kept in host memory to save GPU memory.

    Args:
        weights: every parameter by name, on any device (ziggurat.model.tensors.weights).
    """

    @torch.no_grad()
    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._before = {name: weight.to("cpu", copy=True) for name, weight in weights.items()}

    @torch.no_grad()
    def changes(self, model: Seq2Seq, weights: Mapping[str, Tensor], rate: float) -> dict[str, Any]:
        """Return `scaled_gradient_norm` and `update_ratio`, each by part (gradients.parts_of).

        Args:
            model: the model, for the part of each parameter; its names are those of `weights`.
            weights: the weights after the update, on any device.
            rate: learning rate of the update.

        The first is |after - before| / rate: the norm of the gradient after clipping, the optimiser's scaling and
        weight decay; NaN at a rate of 0. The second is |after - before| / |before|.
        """
        parts, name_of = parts_of(model), {p: name for name, p in model.named_parameters()}
        names = [name_of[p] for groups in parts.values() for group in groups for p in group]
        moved = dict(zip(names, lengths([self._moved(name, weights[name]) for name in names]), strict=True))
        size = dict(zip(names, lengths([self._before[name] for name in names]), strict=True))

        def norm(of: Mapping[str, float], group: list[torch.nn.Parameter]) -> float:
            return float(sum(of[name_of[p]] ** 2 for p in group) ** 0.5)

        return {
            "scaled_gradient_norm": by_part(parts, lambda group: norm(moved, group) / rate if rate else torch.nan),
            "update_ratio": by_part(parts, lambda group: norm(moved, group) / (norm(size, group) or torch.nan)),
        }

    def _moved(self, name: str, after: Tensor) -> Tensor:
        """Return the norm of the change of one parameter, shape []; only one is on the device at a time."""
        before = self._before[name].to(after.device)
        return torch.linalg.vector_norm(after.float() - before.float())


SIZE = 0.01
"""SIZE is the norm of a matrix's perturbation, relative to the norm of the matrix."""


class _Pass(nn.Module):
    """A forward pass as a module, because functional_call replaces parameters of modules only."""

    def __init__(self, model: Seq2Seq, run: Callable[[], object]) -> None:
        super().__init__()
        self.model = model
        self.run = run

    def forward(self) -> None:
        self.run()


@torch.no_grad()
def perturbed(model: Seq2Seq) -> dict[str, Tensor]:
    """Return every matrix of the layers of both stacks by name, each moved by SIZE times its norm.

    The direction is random (independent normal numbers). The model is unchanged.
    """
    # A separate generator, because the random numbers of training must not change.
    generator = torch.Generator(model.device).manual_seed(1)
    inside = {p for stack in STACKS for layer in layers_of(model, stack) for p in layer.parameters() if p.dim() >= 2}
    moved = {}
    for name, parameter in model.named_parameters():
        if parameter in inside:
            noise = torch.randn(parameter.shape, generator=generator, device=parameter.device, dtype=parameter.dtype)
            length = torch.linalg.vector_norm(parameter) / torch.linalg.vector_norm(noise)
            moved[name] = parameter + SIZE * length * noise
    return moved


@torch.no_grad()
def output_change(
    model: Seq2Seq,
    before: Mapping[str, Sequence[Tensor | None]],
    masks: Mapping[str, Tensor],
    run: Callable[[], object],
) -> dict[str, list[float]]:
    """Return |y_i* - y_i| / |y_i| of every layer's output y_i, over real tokens, by stack.

    y_i* is the layer's output when the matrices of all layers are `perturbed`; the decoder then reads the memory of the
    perturbed encoder. NaN for a layer that was skipped.

    Args:
        model: the model, whose parameters are unchanged.
        before: y_i, [batch, length, d], by stack (Trace.outputs).
        masks: [batch, length] by stack, True at real tokens.
        run: function that passes the same batch through the model.
    """
    # `functional_call` leaves the model's parameters unchanged, even after an error.
    names = {f"model.{name}": tensor for name, tensor in perturbed(model).items()}
    with Trace(model) as trace:
        functional_call(_Pass(model, run), names, ())
    return {
        stack: [_change(y, moved, masks[stack]) for y, moved in zip(before[stack], trace.outputs[stack], strict=True)]
        for stack in STACKS
    }


def _change(before: Tensor | None, after: Tensor | None, mask: Tensor) -> float:
    if before is None or after is None:
        return torch.nan
    was, now = (state[mask].float() if state.dtype.itemsize < 4 else state[mask] for state in (before, after))
    return float(torch.linalg.vector_norm(now - was) / torch.linalg.vector_norm(was))
