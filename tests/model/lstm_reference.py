"""RNMT+'s layer-normalised LSTM from its equations (Chen et al. 2018), step by step and gate by gate."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def plain_step(x: Tensor, m: Tensor, c: Tensor, cell: nn.Module) -> tuple[Tensor, Tensor]:
    """Return outputs and cells [rows, width] after one more input, with the parameters of `cell`."""
    weight, gain, bias = (cell.get_parameter(name) for name in ("weight", "gain", "bias"))
    width = c.shape[-1]
    total = torch.cat([x, m], dim=-1) @ weight.T
    gates = []
    for k in range(4):
        part = total[:, k * width : (k + 1) * width]
        centred = part - part.mean(-1, keepdim=True)
        normed = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-8)
        gates.append(normed * gain[k] + bias[k])
    g, i, f, o = gates
    c = torch.clip(torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g), -10.0, 10.0)
    return torch.sigmoid(o) * c, c


def plain_layer(cells: nn.ModuleList, x: Tensor, mask: Tensor) -> Tensor:
    """Return outputs [batch, length, directions * width]: padded steps keep the state, the second direction runs
    backwards.
    """
    parts = []
    for direction, cell in enumerate(cells):
        steps = list(range(x.shape[1]))
        m = c = x.new_zeros(x.shape[0], cell.get_parameter("gain").shape[1])
        outputs = [m] * x.shape[1]
        for t in reversed(steps) if direction else steps:
            new_m, new_c = plain_step(x[:, t], m, c, cell)
            m = torch.where(mask[:, t, None], new_m, m)
            c = torch.where(mask[:, t, None], new_c, c)
            outputs[t] = m
        parts.append(torch.stack(outputs, dim=1))
    return torch.cat(parts, dim=-1)
