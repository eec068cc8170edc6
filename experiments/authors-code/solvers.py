"""The ODE Transformer and Depth Growing: the authors' encoder forward passes around copies of our layers.

The first file cannot be run as released: a colon is missing, and its constructor refuses all kinds but the gated one.
Both files are parts of old versions of fairseq. So only `forward` is taken from each class, and the classes here
provide the attributes that it reads.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from checkouts import Checkouts
from comparing import Case, Pair, encoded, encoder_of, matching
from torch import Tensor, nn
from torch.nn import functional as F

from ziggurat.model.layers import SourceView
from ziggurat.model.transformer import Encoder

D, LAYERS = 32, 3
PATH = "fairseq/models/ode_transformer.py"
KINDS = {"rk2": (2, "standard"), "rk2_gated": (2, "learnable"), "rk4": (4, "standard")}


def forward_of(checkouts: Checkouts, repository: str, path: str, name: str) -> Callable[..., dict[str, Tensor]]:
    """Return `forward` of the encoder `name` in one of their files."""
    text = (checkouts.folder / repository / path).read_text("utf-8")
    text = re.sub(r'(== "initialization")\n', r"\1:\n", text, count=1)
    (encoder,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == name)
    (function,) = (node for node in encoder.body if isinstance(node, ast.FunctionDef) and node.name == "forward")
    names: dict[str, Any] = {"torch": torch, "F": F}
    exec(compile(ast.Module([function], []), path, "exec"), names)
    forward: Callable[..., dict[str, Tensor]] = names["forward"]
    return forward


class _Layer(nn.Module):
    """A copy of our layer with their signature: it is called with [length, batch, d_model]."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = copy.deepcopy(layer)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)  # the model was built with uninitialised parameters

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return the layer's output; nothing is padded."""
        assert mask is None
        return self.layer(x.transpose(0, 1), SourceView(None)).transpose(0, 1)


class _Theirs(nn.Module):
    """The object of their `forward`: no history, no positions, and tokens in place of the input."""

    history = embed_positions = None
    embed_scale, dropout, padding_idx = 1.0, 0.0, 0
    use_word_dropout, normalize = False, True

    def __init__(self, ours: Encoder, kind: str, forward: Callable[..., dict[str, Tensor]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(layer) for layer in ours.layers)
        self.layer_norm = copy.deepcopy(ours.final_norm)
        self.calculate_num, self.rk_type = KINDS[kind]
        assert ours.solver is not None
        self.gate_linear = copy.deepcopy(ours.solver.gate)
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        """Return the encoder's output [batch, length, d_model] for the embedded input `x`."""
        self.embed_tokens = lambda tokens: x
        return self._forward(self, torch.ones(x.shape[:2], dtype=torch.int64), None)["encoder_out"].transpose(0, 1)


def solver(checkouts: Checkouts, dtype: torch.dtype) -> Iterator[Case]:
    """Steps of second order, with and without a gate, and of fourth order."""
    forward = forward_of(checkouts, "ODE-Transformer", PATH, "ODETransformerEncoder")
    for kind in KINDS:
        ours = encoder_of(LAYERS, dtype, d_model=D, d_ff=64, heads=4, encoder={"solver": kind})
        theirs = _Theirs(ours, kind, forward).to(dtype)
        pairs: list[Pair] = []
        for mine, other in zip(ours.layers, theirs.layers, strict=True):
            pairs += matching(mine, other.layer)
        pairs += matching(ours.final_norm, theirs.layer_norm)
        if theirs.gate_linear is not None:
            assert ours.solver is not None
            pairs += matching(ours.solver.gate, theirs.gate_linear)
        what, run = f"`encoder.solver: {kind}`, stack of {LAYERS} layers", partial(encoded, ours, causal=False)
        yield Case(f"solver-{kind}", what, "ODE-Transformer", PATH, ours, theirs, pairs, run, theirs, D, starts=False)


class _Grown(nn.Module):
    """The object of Depth Growing's `forward`: positions replace the input, since it adds them in place."""

    embed_scale, dropout, padding_idx = 1.0, 0.0, 0
    use_encoder_cross_block_resnet = True

    def __init__(self, ours: Encoder, lower: int, forward: Callable[..., dict[str, Tensor]]) -> None:
        super().__init__()
        layers = [_Layer(layer) for layer in ours.layers]
        self.layers, self.additional_layers = nn.ModuleList(layers[:lower]), nn.ModuleList(layers[lower:])
        self.norm_embedding = copy.deepcopy(ours.history.norm)
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of both modules [batch, length, d_model] for the embedded input `x`."""
        self.embed_tokens = lambda tokens: torch.zeros_like(x)
        self.embed_positions = lambda tokens: x
        given = self._forward(self, torch.ones(x.shape[:2], dtype=torch.int64), None)
        return given["encoder_additional_out"].transpose(0, 1)


def growing(checkouts: Checkouts, dtype: torch.dtype) -> Iterator[Case]:
    """Depth Growing: two layers on top of three, post-norm like theirs."""
    repository, path = "Depth_Growing_NMT", "deepNMT/fairseq/models/transformer_deep.py"
    choices: dict[str, Any] = {"residual": "post", "combination": {"period": 3}}
    ours = encoder_of(5, dtype, d_model=D, d_ff=64, heads=4, encoder={"history": "cross_module"}, **choices)
    theirs = _Grown(ours, 3, forward_of(checkouts, repository, path, "TransformerEncoder")).to(dtype)
    pairs = [*matching(ours.history.norm, theirs.norm_embedding)]
    for mine, other in zip(ours.layers, [*theirs.layers, *theirs.additional_layers], strict=True):
        pairs += matching(mine, other.layer)
    what, run = "`history: cross_module`, 2 layers on 3, `post`", partial(encoded, ours, causal=False)
    yield Case("growing", what, repository, path, ours, theirs, pairs, run, theirs, D, starts=False)
