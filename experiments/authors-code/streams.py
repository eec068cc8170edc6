"""Hyper-connections: stacks with several streams, theirs around copies of our sub-layers.

These are the manifold-constrained form by DeepSeek (TileKernels' reference functions, and the model in transformers)
and by the authors of mHC-lite, mHC-lite itself, and the plain form by lucidrains, since its authors published no code.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from checkouts import Checkouts, as_precise_as
from comparing import Case, Pair, View, encoded, encoder_of, matching, rows
from stacks import HEADS, INNER, D
from torch import Tensor, nn
from torch.nn import functional as F

from ziggurat.model.residual.base import Residual
from ziggurat.model.transformer import Encoder

N, LAYERS = 4, 3


class _Branch(nn.Module):
    """A copy of one of our sub-layers, with its norm."""

    def __init__(self, residual: Residual, sublayer: nn.Module) -> None:
        super().__init__()
        self.norm, self.sublayer = copy.deepcopy(residual.in_norm), copy.deepcopy(sublayer)
        for parameter in self.sublayer.parameters():
            nn.init.zeros_(parameter)  # its parameters are not initialised

    def forward(self, x: Tensor) -> Tensor:
        """Return the branch of one stream, [batch, length, d_model]."""
        return self.bare(self.norm(x))

    def bare(self, x: Tensor, **options: Any) -> Tensor:
        """Return the same of `x` normalised."""
        attends = hasattr(self.sublayer, "qkv_proj")
        return self.sublayer(x, None) if attends else self.sublayer(x)


class _Stack(nn.Module):
    """The authors' connections one after the other, from n copies of the input to the sum of the streams.

    Args:
        connections: each is called with the streams [batch, length, n, d_model], or as described for `folded`.
        folded: streams are part of the batch, [batch n, length, d_model].
    """

    def __init__(self, connections: list[nn.Module], *, folded: bool = False) -> None:
        super().__init__()
        self.connections = nn.ModuleList(connections)
        self.folded = folded

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the streams after the last connection."""
        streams = x.unsqueeze(-2).expand(*x.shape[:-1], N, D).contiguous()
        if self.folded:
            streams = x.repeat_interleave(N, dim=0)
        for connection in self.connections:
            streams = connection(streams)
        return streams.unflatten(0, (-1, N)).sum(1) if self.folded else streams.sum(-2)


def _ours(dtype: torch.dtype, residual: str, epsilon: float, **wiring: Any) -> tuple[Encoder, list[Any]]:
    """Return our encoder without its final norm, and its sub-layers: (Residual, sub-layer)."""
    sizes = {"d_model": D, "d_ff": INNER, "heads": HEADS, "norm": "rms", "layer_norm_epsilon": epsilon}
    plain = {"embedding": {"positions": "none"}, "activation": "gelu"}
    encoder = encoder_of(LAYERS, dtype, **sizes, **plain, residual=residual, wiring={"streams": N, **wiring})
    encoder.final_norm = None  # theirs end differently (README.md)
    joined = [
        ((layer.self_attn_residual, layer.self_attn), (layer.ffn_residual, layer.ffn)) for layer in encoder.layers
    ]
    return encoder, list(itertools.chain.from_iterable(joined))


def _case(name: str, what: str, at: tuple[str, str], ours: Encoder, theirs: nn.Module, pairs: list[Pair]) -> Case:
    gammas = [parameter for n, parameter in theirs.named_parameters() if n.endswith("connection.norm.gamma")]
    run = partial(encoded, ours, causal=False)
    started = name == "hyper"  # the others choose initial values of their own
    return Case(name, f"{what}, stack of 6 sub-layers", *at, ours, theirs, pairs, run, theirs, D, gammas, started)


# Their weights are transposed: our [new, old] is their [old, new].
def _turned(values: Tensor) -> Tensor:
    return values[2 * N :].unflatten(0, (N, N)).transpose(0, 1).flatten(0, 1)


def _of_deepseek(residual: Any, theirs: Any, scale: nn.Parameter) -> Iterator[Pair]:
    fn, base = theirs
    yield Pair(residual.weight, fn, rows(0, 2 * N), rows(0, 2 * N))
    yield Pair(residual.weight, fn, rows(2 * N, 3 * N * N), _turned)
    yield Pair(residual.bias, base, rows(0, 2 * N), rows(0, 2 * N))
    yield Pair(residual.bias, base, rows(2 * N, 3 * N * N), _turned)
    yield Pair(residual.scale, scale)


def manifold(checkouts: Checkouts, dtype: torch.dtype) -> Iterator[Case]:
    """Manifold-constrained hyper-connections, and the form with permutations."""
    for epsilon in (0.0, 1e-6):  # as in the paper's equations, and as released
        yield _tile_kernels(checkouts.file("TileKernels/tile_kernels/torch/mhc.py"), epsilon, dtype)
        yield _transformers(epsilon, dtype)
    for mixing, path, kind in (
        ("sinkhorn", "hyper_conn/mhc.py", "ManifoldConstrainedHyperConnections"),
        ("permutations", "hyper_conn/mhc_lite.py", "MHCLite"),
    ):
        code = checkouts.file(f"mhc-lite/{path}")
        getattr(code, "perm_mats", {}).clear()  # their cache would return matrices of another type
        for published in (False, True):
            yield _mhc_lite(code, kind, path, mixing, published, dtype)


class _Reference(nn.Module):
    """One connection made of DeepSeek's reference functions."""

    def __init__(self, code: Any, branch: nn.Module, epsilon: float) -> None:
        super().__init__()
        self.code, self.branch, self.epsilon = code, branch, epsilon
        self.fn, self.base = nn.Parameter(torch.zeros(2 * N + N * N, N * D)), nn.Parameter(torch.zeros(2 * N + N * N))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, streams: Tensor) -> Tensor:
        """Return the streams after the branch."""
        logits = self.code.mhc_pre_norm_fn_ref(streams, self.fn, None, 1e-6)
        read, write, mix = self.code.mhc_pre_split_mixes_ref(logits, self.scale, self.base, N, 2.0, self.epsilon)
        mix = self.code.sinkhorn_normalize_ref(mix, 20, self.epsilon)
        return self.code.mhc_post_ref(self.branch(self.code.mhc_pre_apply_mix_ref(streams, read)), streams, write, mix)


def _tile_kernels(code: Any, epsilon: float, dtype: torch.dtype) -> Case:
    ours, sublayers = _ours(dtype, "manifold_hyper", 1e-6)
    with as_precise_as(dtype):
        theirs = _Stack([_Reference(code, _Branch(*joined), epsilon) for joined in sublayers])
    pairs: list[Pair] = []
    for (residual, sublayer), its in zip(sublayers, theirs.connections, strict=True):
        pairs += _of_deepseek(residual, (its.fn, its.base), its.scale)
        pairs += [*matching(residual.in_norm, its.branch.norm), *matching(sublayer, its.branch.sublayer)]
    name = "manifold-deepseek" if epsilon == 0 else "manifold-deepseek-published"
    what = f"`residual: manifold_hyper`, DeepSeek's functions with epsilon {epsilon:g}"
    return _case(name, what, ("TileKernels", "tile_kernels/torch/mhc.py"), ours, theirs, pairs)


def _transformers(epsilon: float, dtype: torch.dtype) -> Case:
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as code

    ours, sublayers = _ours(dtype, "manifold_hyper", 1e-6)
    config = SimpleNamespace(hidden_size=D, rms_norm_eps=1e-6, hc_mult=N, hc_sinkhorn_iters=20, hc_eps=epsilon)
    made = iter([_Sublayer(_Branch(*joined)) for joined in sublayers])
    # Replaces its attention and its experts; the norms before them and the rest of the layer are its own.
    with as_precise_as(dtype), contextlib.ExitStack() as stack:
        for name in ("DeepseekV4Attention", "DeepseekV4SparseMoeBlock"):
            stack.enter_context(mock.patch.object(code, name, mock.Mock(side_effect=made)))
        theirs = _Stack([code.DeepseekV4DecoderLayer(config, number) for number in range(LAYERS)])
    pairs: list[Pair] = []
    for number, (residual, sublayer) in enumerate(sublayers):
        layer: Any = theirs.connections[number // 2]
        attention = number % 2 == 0
        its = layer.attn_hc if attention else layer.ffn_hc
        nn.init.zeros_(its.base)  # their model, not the layer, sets these values
        nn.init.ones_(its.scale)
        pairs += _of_deepseek(residual, (its.fn, its.base), its.scale)
        pairs += matching(residual.in_norm, layer.input_layernorm if attention else layer.post_attention_layernorm)
        pairs += matching(sublayer, (layer.self_attn if attention else layer.mlp).sublayer)
    name = "manifold-transformers" if epsilon == 0 else "manifold-transformers-published"
    what = f"`residual: manifold_hyper`, layers of DeepSeek-V4 with epsilon {epsilon:g}"
    return _case(name, what, ("transformers", "models/deepseek_v4/modeling_deepseek_v4.py"), ours, theirs, pairs)


class _Sublayer(nn.Module):
    """A copy of one of our sub-layers as DeepSeek's layer calls it."""

    def __init__(self, branch: _Branch) -> None:
        super().__init__()
        self.sublayer = branch.sublayer
        self.compute = branch.bare

    def forward(self, x: Tensor, **options: Any) -> Any:
        """Return the sub-layer's output; attention also returns its weights."""
        y = self.compute(x)
        return y if "input_ids" in options else (y, None)


def _mhc_lite(code: Any, kind: str, path: str, mixing: str, published: bool, dtype: torch.dtype) -> Case:
    ours, sublayers = _ours(dtype, "manifold_hyper", 1e-6, mixing=mixing)
    with as_precise_as(dtype):
        connections = [getattr(code, kind)(N, dim=D, branch=_Branch(*joined)) for joined in sublayers]
        theirs = _Stack([_Wrapped(connection) for connection in connections], folded=True)
    pairs: list[Pair] = []
    for (residual, sublayer), wrapped in zip(sublayers, theirs.connections, strict=True):
        its: Any = wrapped.connection
        read, write, mix = rows(0, N), rows(N, 2 * N), rows(2 * N, len(residual.bias))
        of_read, of_mix = _permuted() if mixing == "permutations" else _squared()
        pairs.append(Pair(residual.weight, its.dynamic_alpha_fn, read, lambda w, part=of_read: part(w.T)))
        pairs.append(Pair(residual.weight, its.dynamic_alpha_fn, mix, lambda w, part=of_mix: part(w.T)))
        pairs.append(Pair(residual.weight, its.dynamic_beta_fn, write, lambda w: w.T))
        pairs.append(Pair(residual.bias, its.static_alpha, read, lambda b, part=of_read: part(b.flatten())))
        pairs.append(Pair(residual.bias, its.static_alpha, mix, lambda b, part=of_mix: part(b.flatten())))
        pairs.append(Pair(residual.bias, its.static_beta, write))
        for number, scale in enumerate((its.pre_branch_scale, its.h_post_scale, its.residual_scale)):
            pairs.append(Pair(residual.scale, scale, rows(number, number + 1), lambda s: s.reshape(1)))
        pairs += [*matching(residual.in_norm, its.branch.norm), *matching(sublayer, its.branch.sublayer)]
    name = "mhc-lite" if mixing == "permutations" else "manifold-mhc-lite"
    as_ours = "" if published else ", epsilon as ours" if mixing == "permutations" else ", epsilon and order as ours"
    what = f"`residual: manifold_hyper`, `mixing: {mixing}`{as_ours}"
    at = ("mhc-lite", path)
    case = _case(f"{name}-published" if published else name, what, at, ours, theirs, pairs)
    if not published:
        case.run_ours = _without_epsilon(case.run_ours)
        if mixing == "sinkhorn":
            case.run_theirs = _rows_last(code, case.run_theirs)
    return case


class _Wrapped(nn.Module):
    """A connection that is a sub-module, so that its norm of streams can be found by name."""

    def __init__(self, connection: nn.Module) -> None:
        super().__init__()
        self.connection = connection

    def forward(self, streams: Tensor) -> Tensor:
        """Return the streams after the branch."""
        return self.connection(streams)


def _squared() -> tuple[View, View]:
    """Return views of the reading and the mixing weights: their row s has stream s's reading weight, then its n
    shares.
    """
    read = lambda values: values.unflatten(0, (N, 1 + N))[:, 0]  # noqa: E731
    return read, lambda values: values.unflatten(0, (N, 1 + N))[:, 1:].transpose(0, 1).flatten(0, 1)


def _permuted() -> tuple[View, View]:
    """Return the same for mHC-lite: each of their permutations, [old, new], inverts one of our permutations."""
    orders = list(itertools.permutations(range(N)))
    inverse = [orders.index(tuple(order.index(k) for k in range(N))) for order in orders]
    return rows(0, N), lambda values: values[N:][inverse]


def _without_epsilon(run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return `run` with their norm over all streams, the only one without a gain, with hardly any epsilon."""
    norm = F.rms_norm

    def streams_as_theirs(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        return norm(x, shape, weight, 1e-30 if weight is None else eps)

    def replaced(x: Tensor) -> Tensor:
        with mock.patch.object(F, "rms_norm", streams_as_theirs):
            return run(x)

    return replaced


def _rows_last(code: Any, run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return `run` with Sinkhorn's rounds ending at the shares of a new stream, as in the paper.

    Their rounds end at the shares of an old stream. Both are equal only where the rounds have converged.
    """
    published = code.sinkhorn_knopps

    def turned(logits: Tensor, rounds: int) -> Tensor:
        return published(logits.transpose(-1, -2), rounds).transpose(-1, -2)

    def replaced(x: Tensor) -> Tensor:
        with mock.patch.object(code, "sinkhorn_knopps", turned):
            return run(x)

    return replaced


def hyper(checkouts: Checkouts, dtype: torch.dtype) -> Iterator[Case]:
    """Dynamic hyper-connections."""
    path = "hyper_connections/hyper_connections.py"
    code = checkouts.file(f"hyper-connections/{path}")
    ours, sublayers = _ours(dtype, "hyper", 1e-30, dynamic=True)  # their norm has a negligible epsilon
    with as_precise_as(dtype):
        branches = enumerate(_Branch(*joined) for joined in sublayers)
        made = [code.HyperConnections(N, dim=D, layer_index=number, branch=branch) for number, branch in branches]
        theirs = _Stack(made, folded=True)
    pairs: list[Pair] = []
    for (residual, sublayer), its in zip(sublayers, theirs.connections, strict=True):
        pairs += [Pair(residual.alpha, its.static_alpha), Pair(residual.beta, its.static_beta)]
        pairs += [Pair(residual.alpha_map, its.dynamic_alpha_fn), Pair(residual.beta_map, its.dynamic_beta_fn)]
        pairs.append(Pair(residual.alpha_scale, its.dynamic_alpha_scale, their_part=lambda s: s.reshape(1)))
        pairs.append(Pair(residual.beta_scale, its.dynamic_beta_scale, their_part=lambda s: s.reshape(1)))
        pairs.append(Pair(residual.stream_norm.weight, its.norm.gamma, offset=1.0))
        pairs += [*matching(residual.in_norm, its.branch.norm), *matching(sublayer, its.branch.sublayer)]
    yield _case("hyper", "`residual: hyper`, `dynamic: true`", ("hyper-connections", path), ours, theirs, pairs)
