"""Whole stacks of every residual kind compared with equations, from before the first layer to after the last.

The references take attention, the feed-forward network (Fixup's is written out) and parameters from the model; how they
are joined is written out here, following the table in docs/depth.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from tests.model.sentences import MASK, SOURCE, TARGET
from tests.model.sentences import built as small_model
from tests.small import moved
from ziggurat.config.kinds import ResidualKind
from ziggurat.model.attention.cache import Mask
from ziggurat.model.layers import WholeTarget
from ziggurat.model.seq2seq import Seq2Seq

N, M = 3, 2
HIDDEN = Mask(torch.zeros(MASK.shape, dtype=torch.float64).masked_fill(~MASK, -math.inf)[:, None, None, :])
FUTURE = Mask(torch.full((4, 4), -math.inf, dtype=torch.float64).triu(1)[None, None])
KINDS = get_args(ResidualKind)

STREAMS = {"hyper", "manifold_hyper", "siamese"}
PRE = {"pre", "sandwich", "hybrid", "sub_ln", "res_post", "layer_scale", "ln_scaling", "peri", "none", *STREAMS}
FINAL_NORM = {*PRE, "keel"}
CONSUMERS = {"post", "admin", "deepnorm", "branch_norm", "b2t"}
SOURCES = {*PRE, "lingvo"}
GATED = ("post", "pre", "deepnorm", "ln_scaling", "peri", "sandwich", "res_post")


def built(residual: str, **choices: Any) -> Seq2Seq:
    """Return a small model in fp64 whose norms, scales, shifts and biases are away from their neutral initial
    values.
    """
    return moved(small_model(residual=residual, encoder__layers=N, decoder__layers=M, **choices), 0.2)


def ln(x: Tensor, norm: Any) -> Tensor:
    """Layer normalisation with the gain and bias of `norm`."""
    assert isinstance(norm, nn.LayerNorm)
    centred = x - x.mean(-1, keepdim=True)
    return norm.weight * centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() + norm.bias


def opened(kind: str, x: Tensor, stack: Any) -> Tensor:
    """Return what the first layer reads: the embedding, normalised (peri), or copied to the streams."""
    if kind == "peri":
        return ln(x, stack.entry_norm)
    return torch.stack([x, x], dim=-2) if kind in STREAMS else x


def closed(kind: str, x: Tensor, stack: Any, *, decoder: bool) -> Tensor:
    """Return the stack's output for the last layer's output."""
    if kind in STREAMS:
        x = final_output(kind, x, stack)
    if kind == "fixup":
        return x + stack.final_norm.shift if decoder else (x + stack.final_norm.shift) * stack.final_norm.scale
    return ln(x, stack.final_norm) if kind in FINAL_NORM else x


def final_output(kind: str, x: Tensor, stack: Any) -> Tensor:
    """Return one stream from two, at the end of a stack."""
    one, other = x.unbind(-2)
    return ln(one, stack.end.x_norm) + ln(other, stack.end.y_norm) if kind == "siamese" else one + other


def feed_forward(kind: str, ffn: Any) -> Callable[[Tensor], Tensor]:
    """Fixup's has a scalar before each linear map and before the activation, and no biases."""
    if kind != "fixup":
        return ffn

    def shifted(x: Tensor) -> Tensor:
        inner = torch.relu((x + ffn.in_proj.shift) @ ffn.in_proj.weight.T + ffn.shift)
        return (inner + ffn.out_proj.shift) @ ffn.out_proj.weight.T

    return shifted


def joined(
    kind: str, x: Tensor, f: Callable[[Tensor], Tensor], r: Any, below: Tensor, *, attention: bool, decoder: bool
) -> Tensor:
    """Return the stream after one sub-layer `f` with the parameters `r`, for the stream `x`; `below` is the layer's
    input.
    """
    match kind:
        case "post" | "branch_norm":  # the second factor is 1 before the first update
            return ln(x + f(x), r.out_norm)
        case "b2t":
            return ln(x + f(x) if attention else x + f(x) + below, r.out_norm)
        case "pre" | "sub_ln":
            return x + f(ln(x, r.in_norm))
        case "lingvo":
            u = ln(x, r.in_norm)
            return (u if attention else x) + f(u)
        case "none":
            return f(ln(x, r.in_norm))
        case "admin":
            return ln(r.skip * x + f(x), r.out_norm)
        case "deepnorm":
            alpha = (3 * M) ** (1 / 4) if decoder else 0.81 * (N**4 * M) ** (1 / 16)
            return ln(alpha * x + f(x), r.out_norm)
        case "rezero" | "fixup":
            return x + r.branch * f(x)
        case "layer_scale":
            return x + r.branch * f(ln(x, r.in_norm))
        case "ln_scaling":
            return x + f(ln(x, r.in_norm.norm) * r.in_norm.factor)
        case "peri" | "sandwich":
            return x + ln(f(ln(x, r.in_norm)), r.branch_norm)
        case "res_post":
            return x + ln(f(x), r.branch_norm)
        case "no_norm":
            return x + f(x)
        case "hyper":
            h, (read, keep) = x.transpose(-1, -2), r.alpha.split([1, 2], dim=1)  # h [..., d, n]
            branch_output = f(ln((h @ read).squeeze(-1), r.in_norm))
            return (h @ keep + branch_output[..., None] * r.beta).transpose(-1, -2)
        case "manifold_hyper":
            return manifold(x, f, r)
        case "siamese":
            post, pre = ln(x[..., 0, :], r.x_norm), x[..., 1, :]
            z = f(ln(post + ln(pre, r.y_norm), r.in_norm))
            return torch.stack([post + z * r.factor, pre + z], -2)
        case "hybrid":
            u = x if attention else ln(x, r.in_norm)
            return u + f(u)
        case "keel":
            if r.out_norm is None:  # the first sub-layer
                return x + f(ln(x, r.in_norm))
            alpha = 1 if r.skip is None else 3 * M if decoder else 2 * N
            return ln(alpha * x + f(ln(x, r.in_norm)), r.out_norm)
    raise AssertionError(f"residual `{kind}` has no equation: write it into `joined` (tests/model/test_stacks.py)")


def gated(
    kind: str, x: Tensor, f: Callable[[Tensor], Tensor], r: Any, below: Tensor, gate: Any, **place: bool
) -> Tensor:
    """Return the same with the layer's gate g (Chen et al. 2025): s - silu(g) s replaces the sum s, or the skip."""
    if gate is None:
        return joined(kind, x, f, r, below, **place)
    smaller = 1 - gate * torch.sigmoid(gate)
    if kind in ("post", "deepnorm"):
        return joined(kind, smaller * x, lambda _: f(x), r, below, **place)
    return smaller * joined(kind, x, f, r, below, **place)


def manifold(x: Tensor, f: Callable[[Tensor], Tensor], r: Any) -> Tensor:
    """Equations 7 to 9 of Xie et al. 2025 for two streams."""
    flat = x.flatten(-2)
    seen = flat / (flat.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    c = seen @ r.weight.T
    read = torch.sigmoid(r.scale[0] * c[..., 0:2] + r.bias[0:2])
    write = 2 * torch.sigmoid(r.scale[1] * c[..., 2:4] + r.bias[2:4])
    mix = (r.scale[2] * c[..., 4:8] + r.bias[4:8]).exp().unflatten(-1, (2, 2))
    for _ in range(20):
        mix = mix / mix.sum(-2, keepdim=True)
        mix = mix / mix.sum(-1, keepdim=True)
    branch_output = f(ln((read[..., None] * x).sum(-2), r.in_norm))
    streams = [mix[..., i, 0, None] * x[..., 0, :] + mix[..., i, 1, None] * x[..., 1, :] for i in range(2)]
    return torch.stack([stream + write[..., i, None] * branch_output for i, stream in enumerate(streams)], -2)


def encoder_layer(kind: str, layer: Any) -> Callable[[Tensor], Tensor]:
    def layered(x: Tensor) -> Tensor:
        attend, ffn = lambda u: layer.self_attn(u, HIDDEN), feed_forward(kind, layer.ffn)
        gate = layer.self_attn_residual.gate
        y = gated(kind, x, attend, layer.self_attn_residual, x, gate, attention=True, decoder=False)
        return gated(kind, y, ffn, layer.ffn_residual, x, gate, attention=False, decoder=False)

    return layered


def decoder_layer(kind: str, layer: Any, memory: Tensor) -> Callable[[Tensor], Tensor]:
    def layered(x: Tensor) -> Tensor:
        view = WholeTarget(FUTURE, memory, HIDDEN)
        cross = lambda u: layer.cross_attn(u, view.remembered(layer.cross_attn))  # noqa: E731
        own, ffn = lambda u: layer.self_attn(u, FUTURE), feed_forward(kind, layer.ffn)
        gate = layer.self_attn_residual.gate
        y = gated(kind, x, own, layer.self_attn_residual, x, gate, attention=True, decoder=True)
        y = gated(kind, y, cross, layer.cross_attn_residual, x, gate, attention=True, decoder=True)
        return gated(kind, y, ffn, layer.ffn_residual, x, gate, attention=False, decoder=True)

    return layered


def layers_of(kind: str, model: Any, memory: Tensor | None = None) -> list[Callable[[Tensor], Tensor]]:
    if memory is None:
        return [encoder_layer(kind, layer) for layer in model.encoder.layers]
    return [decoder_layer(kind, layer, memory) for layer in model.decoder.layers]


def plain(kind: str, model: Any, memory: Tensor | None = None) -> list[Tensor]:
    """Return the stream before the first layer and after each layer, of the encoder or (given `memory`) the decoder."""
    stack = model.encoder if memory is None else model.decoder
    x = model.source_embedding(SOURCE) if memory is None else model.target_embedding(TARGET)
    outputs = [opened(kind, x, stack)]
    for layer in layers_of(kind, model, memory):
        outputs.append(layer(outputs[-1]))
    return outputs


def assert_same(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_an_encoder_follows_its_equations(kind: str) -> None:
    model = built(kind)
    outputs: list[Tensor] = []
    memory = model.encode(SOURCE, MASK, outputs)
    expected = plain(kind, model)
    assert_same(memory.of(0), closed(kind, expected[-1], model.encoder, decoder=False))
    for got, layer in zip(outputs, expected[1:], strict=True):
        assert_same(got, layer.mean(-2) if kind in STREAMS else layer)


@pytest.mark.parametrize("kind", KINDS)
def test_a_decoder_follows_its_equations(kind: str) -> None:
    model = built(kind)
    memory = model.encode(SOURCE, MASK)
    expected = closed(kind, plain(kind, model, memory.of(0))[-1], model.decoder, decoder=True)
    assert_same(model.decode(TARGET, memory), expected)


@pytest.mark.parametrize("kind", GATED)
def test_a_gate_of_each_layer_makes_the_stream_smaller(kind: str) -> None:
    model = built(kind, wiring__gpas=True)
    gates = [name for name, _ in model.named_parameters() if name.endswith(".gate")]
    assert len(gates) == N + M, "one for all sub-layers of a layer"
    memory = model.encode(SOURCE, MASK)
    assert_same(memory.of(0), closed(kind, plain(kind, model)[-1], model.encoder, decoder=False))
    expected = plain(kind, model, memory.of(0))[-1]
    assert_same(model.decode(TARGET, memory), closed(kind, expected, model.decoder, decoder=True))


@pytest.mark.parametrize(("lower", "above"), [("post", "peri"), ("peri", "post")])
def test_kinds_may_differ_by_ranges_of_layers(lower: str, above: str) -> None:
    """Mix-LN and similar: a stack starts like its lowest layers, and ends like its top ones, which are pre-norm."""
    parts = [{"layers": 1, "residual": lower}, {"layers": 1, "residual": above}]
    model = built("pre", encoder__ranges=parts, decoder__ranges=parts[:1])
    x = opened(lower, model.source_embedding(SOURCE), model.encoder)
    for kind, layer in zip((lower, above, "pre"), model.encoder.layers, strict=True):
        x = encoder_layer(kind, layer)(x)
    memory = model.encode(SOURCE, MASK)
    assert_same(memory.of(0), ln(x, model.encoder.final_norm))
    y = opened(lower, model.target_embedding(TARGET), model.decoder)
    for kind, layer in zip((lower, "pre"), model.decoder.layers, strict=True):
        y = decoder_layer(kind, layer, memory.of(0))(y)
    assert_same(model.decode(TARGET, memory), ln(y, model.decoder.final_norm))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([{"layers": 3, "residual": "post"}], "leaving none of the 3 above"),
        ([{"layers": 1, "residual": "siamese"}], "`siamese` cannot be mixed with other kinds: it has several streams"),
    ],
)
def test_ranges_that_fit_no_stack_are_refused(parts: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        built("pre", encoder__ranges=parts)


def test_sub_ln_has_a_norm_before_the_last_map_of_attention_and_feed_forward_networks() -> None:
    """Attention to the memory has none (Wang et al. 2022, section 3.2)."""
    model = built("sub_ln")
    layer: Any = model.encoder.layers[1]
    x = model.source_embedding(SOURCE)
    ffn, last = layer.ffn, layer.ffn.out_proj
    inner = ln(torch.relu(x @ ffn.in_proj.weight.T + ffn.in_proj.bias), last.norm)
    assert_same(ffn(x), inner @ last.map.weight.T + last.map.bias)
    attention, last = layer.self_attn, layer.self_attn.out_proj
    parts = (x @ attention.qkv_proj.weight.T + attention.qkv_proj.bias).chunk(3, -1)
    query, key, value = (part.unflatten(-1, (attention.heads, -1)).transpose(1, 2) for part in parts)
    weights = (query @ key.mT / query.shape[-1] ** 0.5 + HIDDEN.bias).softmax(-1)
    joined_heads = (weights @ value).transpose(1, 2).flatten(2)
    assert_same(attention(x, HIDDEN), ln(joined_heads, last.norm) @ last.map.weight.T + last.map.bias)
    above: Any = model.decoder.layers[0]
    assert isinstance(above.cross_attn.out_proj, nn.Linear)


def test_ln_scaling_counts_layers_in_each_stack() -> None:
    model = built("ln_scaling")
    for stack, depth in ((model.encoder, N), (model.decoder, M)):
        factors = [
            float(r.in_norm.factor) for layer in stack.layers for r in (layer.self_attn_residual, layer.ffn_residual)
        ]
        assert factors == [1 / math.sqrt(number) for number in range(1, depth + 1) for _ in range(2)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stack_has_no_parameter_beyond_its_equations(kind: str) -> None:
    model = built(kind)
    for stack, decoder in ((model.encoder, False), (model.decoder, True)):
        around = {name for name, _ in stack.named_parameters() if not name.startswith("layers.")}
        final = {"final_norm.weight", "final_norm.bias"} if kind in FINAL_NORM else set()
        if kind == "fixup":
            final = {"final_norm.shift"} if decoder else {"final_norm.shift", "final_norm.scale"}
            assert not [name for name, _ in stack.named_parameters() if name.endswith("bias")]
        if kind == "siamese":
            final |= {f"end.{stream}_norm.{name}" for stream in "xy" for name in ("weight", "bias")}
        assert around == final | ({"entry_norm.weight", "entry_norm.bias"} if kind == "peri" else set())


@pytest.mark.parametrize("side", ["encoder", "decoder"])
@pytest.mark.parametrize("host", KINDS)
def test_a_stack_without_residuals_ends_as_its_host_does(host: str, side: str) -> None:
    model = built(host, **{f"{side}__residual": "none"})
    memory = model.encode(SOURCE, MASK)
    decoder = side == "decoder"
    last = plain("none", model, memory.of(0) if decoder else None)[-1]
    end = "none" if host in STREAMS else host  # the host's norm; there is only one stream
    got = model.decode(TARGET, memory) if decoder else memory.of(0)
    assert_same(got, closed(end, last, getattr(model, side), decoder=decoder))


def combined(norm_at: str, kind: str, model: Any, memory: Tensor | None = None) -> Tensor:
    """Return the output of a stack with `dlcl` (Wang et al. 2019): layer l + 1 reads G_l, and the stack ends with G_L.

    G_l is sum_k W[l, k] LN_k(y_k) (sources) or LN_l(sum_k W[l, k] y_k) (consumers), without LN_0, or has no norm.
    """
    stack = model.encoder if memory is None else model.decoder
    x = model.source_embedding(SOURCE) if memory is None else model.target_embedding(TARGET)
    weight, norms = stack.history.weight, stack.history.norms
    outputs: list[Tensor] = [opened(kind, x, stack)]

    def read() -> Tensor:
        row = len(outputs) - 1
        terms = [ln(y, norms[k]) if norm_at == "sources" and k else y for k, y in enumerate(outputs)]
        total = sum((weight[row, k] * term for k, term in enumerate(terms)), torch.zeros_like(terms[0]))
        return ln(total, norms[row]) if norm_at == "consumers" and row else total

    for layer in layers_of(kind, model, memory):
        outputs.append(layer(read()))
    return closed(kind, read(), stack, decoder=memory is not None)


@pytest.mark.parametrize("norm", ["auto", "sources", "consumers", "none"])
@pytest.mark.parametrize("kind", KINDS)
def test_combinations_of_layers_normalise_where_the_residual_kind_does(kind: str, norm: str) -> None:
    model = built(kind, encoder__history="dlcl", decoder__history="dlcl", combination__norm=norm)
    by_kind = "consumers" if kind in CONSUMERS else "sources" if kind in SOURCES else "none"
    norm_at = by_kind if norm == "auto" else norm
    memory = model.encode(SOURCE, MASK)
    assert_same(memory.of(0), combined(norm_at, kind, model))
    assert_same(model.decode(TARGET, memory), combined(norm_at, kind, model, memory.of(0)))


def test_every_kind_states_where_combinations_normalise() -> None:
    assert not set(KINDS) ^ (CONSUMERS | SOURCES | {"rezero", "no_norm", "fixup", "keel"})


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "siamese"])  # `siamese` is refused
def test_a_transparent_memory_mixes_the_layers_and_nothing_ends_the_encoder(kind: str) -> None:
    model = built(kind, memory="transparent")
    assert model.encoder.final_norm is None
    memory = model.encode(SOURCE, MASK)
    streams = [x.mean(-2) if kind in STREAMS else x for x in plain(kind, model)]
    shares = model.encoder.transparent.weight.softmax(-1)  # type: ignore[operator, union-attr]
    assert shares.shape == (M, N + 1)
    for reader, row in enumerate(shares):
        assert_same(memory.of(reader), sum(share * x for share, x in zip(row, streams, strict=True)))
