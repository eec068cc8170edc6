"""Layers compared with torch.nn's, with copied weights, in double precision: outputs and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ziggurat.model.attention import multihead
from ziggurat.model.attention.cache import causal_mask, padding_mask
from ziggurat.model.attention.multihead import CrossAttention, SelfAttention
from ziggurat.model.dropout import Dropout
from ziggurat.model.kinds import RESIDUAL
from ziggurat.model.layers import DecoderLayer, EncoderLayer, SourceView, WholeTarget
from ziggurat.model.linear import FeedForward
from ziggurat.model.residual.base import Residual, ResidualOptions, SublayerPosition

D_MODEL, D_FF, HEADS = 12, 20, 3
TOLERANCE = {"atol": 1e-10, "rtol": 0.0}


def residuals_of(kind: str, sublayers: int) -> list[Residual]:
    material = ResidualOptions(D_MODEL, lambda: Dropout(0.0), lambda: nn.LayerNorm(D_MODEL))
    places = [SublayerPosition(sublayers == 3, 1, n, sublayers, n < sublayers - 1, 6, 6) for n in range(sublayers)]
    return [RESIDUAL[kind].make(place, material) for place in places]  # type: ignore[index]


def pairs_of(layer: EncoderLayer | DecoderLayer, torch_layer: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """(our parameter, slice of torch's) for every parameter of the layer."""
    attentions = [(layer.self_attn, torch_layer.get_submodule("self_attn"), "norm1", layer.self_attn_residual)]
    if isinstance(layer, DecoderLayer):
        cross = (layer.cross_attn, torch_layer.get_submodule("multihead_attn"), "norm2", layer.cross_attn_residual)
        attentions.append(cross)  # type: ignore[arg-type]
    pairs: list[tuple[Tensor, Tensor]] = []
    for ours, theirs, _, _ in attentions:
        assert isinstance(theirs, nn.MultiheadAttention)
        for part in ("weight", "bias"):
            fused = theirs.get_parameter(f"in_proj_{part}")
            if isinstance(ours, SelfAttention):
                pairs.append((ours.qkv_proj.get_parameter(part), fused))
            else:
                pairs.append((ours.q_proj.get_parameter(part), fused[:D_MODEL]))
                pairs.append((ours.kv_proj.get_parameter(part), fused[D_MODEL:]))
            pairs.append((ours.out_proj.get_parameter(part), theirs.out_proj.get_parameter(part)))
    for part in ("weight", "bias"):
        pairs.append((layer.ffn.in_proj.get_parameter(part), torch_layer.get_parameter(f"linear1.{part}")))
        pairs.append((layer.ffn.out_proj.get_parameter(part), torch_layer.get_parameter(f"linear2.{part}")))
        norms = [(residual, name) for _, _, name, residual in attentions]
        norms.append((layer.ffn_residual, f"norm{len(attentions) + 1}"))
        for residual, name in norms:
            norm = residual.in_norm if residual.in_norm is not None else residual.out_norm
            assert norm is not None
            pairs.append((norm.get_parameter(part), torch_layer.get_parameter(f"{name}.{part}")))
    assert sum(p.numel() for p, _ in pairs) == sum(p.numel() for p in layer.parameters())
    return pairs


def randomise(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)


def gradient_of(theirs: Tensor, layer: nn.Module) -> Tensor:
    """Return the gradient of torch's parameter, or of its slice `theirs`."""
    owner = next(p for p in layer.parameters() if p.untyped_storage().data_ptr() == theirs.untyped_storage().data_ptr())
    assert owner.grad is not None
    if owner.shape == theirs.shape:
        return owner.grad
    first = theirs.storage_offset() // (owner.numel() // owner.shape[0])
    return owner.grad[first : first + theirs.shape[0]]


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("kind", ["post", "pre"])
def test_encoder_layer(kind: str, explicit: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multihead, "EXPLICIT_MAX_LENGTH", 1000 if explicit else 0)
    torch.manual_seed(0)
    theirs = nn.TransformerEncoderLayer(
        D_MODEL, HEADS, D_FF, 0.0, batch_first=True, norm_first=kind == "pre", dtype=torch.float64
    )
    randomise(theirs)
    ours = EncoderLayer(
        SelfAttention(D_MODEL, HEADS, Dropout(0.0)),
        FeedForward(D_MODEL, D_FF, "relu", Dropout(0.0)),
        residuals_of(kind, 2),
    ).double()
    pairs = pairs_of(ours, theirs)
    with torch.no_grad():
        for mine, other in pairs:
            mine.copy_(other)
    x = torch.randn(3, 5, D_MODEL, dtype=torch.float64)
    mask = torch.tensor([[True] * 5, [True] * 4 + [False], [True] * 2 + [False] * 3])
    x_ours, x_theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y_ours = ours(x_ours, SourceView(padding_mask(mask, torch.float64)))
    y_theirs = theirs(x_theirs, src_key_padding_mask=~mask)
    torch.testing.assert_close(y_ours[mask], y_theirs[mask], **TOLERANCE)
    upstream = torch.randn_like(x) * mask[..., None]
    y_ours.backward(upstream)
    y_theirs.backward(upstream)
    torch.testing.assert_close(x_ours.grad, x_theirs.grad, **TOLERANCE)
    for mine, other in pairs:
        torch.testing.assert_close(mine.grad, gradient_of(other, theirs), **TOLERANCE)


@pytest.mark.parametrize("kind", ["post", "pre"])
def test_decoder_layer(kind: str) -> None:
    torch.manual_seed(1)
    theirs = nn.TransformerDecoderLayer(
        D_MODEL, HEADS, D_FF, 0.0, batch_first=True, norm_first=kind == "pre", dtype=torch.float64
    )
    randomise(theirs)
    ours = DecoderLayer(
        SelfAttention(D_MODEL, HEADS, Dropout(0.0)),
        CrossAttention(D_MODEL, D_MODEL, HEADS, Dropout(0.0)),
        FeedForward(D_MODEL, D_FF, "relu", Dropout(0.0)),
        residuals_of(kind, 3),
    ).double()
    pairs = pairs_of(ours, theirs)
    with torch.no_grad():
        for mine, other in pairs:
            mine.copy_(other)
    x = torch.randn(2, 4, D_MODEL, dtype=torch.float64)
    memory = torch.randn(2, 6, D_MODEL, dtype=torch.float64)
    mask = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    inputs = [(x.clone().requires_grad_(), memory.clone().requires_grad_()) for _ in range(2)]
    (x_ours, m_ours), (x_theirs, m_theirs) = inputs
    padding = padding_mask(mask, torch.float64)
    y_ours = ours(x_ours, WholeTarget(causal_mask(4, torch.float64, x.device), m_ours, padding))
    future = nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)
    y_theirs = theirs(x_theirs, m_theirs, tgt_mask=future, memory_key_padding_mask=~mask)
    torch.testing.assert_close(y_ours, y_theirs, **TOLERANCE)
    upstream = torch.randn_like(x)
    y_ours.backward(upstream)
    y_theirs.backward(upstream)
    torch.testing.assert_close(x_ours.grad, x_theirs.grad, **TOLERANCE)
    torch.testing.assert_close(m_ours.grad, m_theirs.grad, **TOLERANCE)
    for mine, other in pairs:
        torch.testing.assert_close(mine.grad, gradient_of(other, theirs), **TOLERANCE)
