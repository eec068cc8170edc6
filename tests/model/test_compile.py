"""Layers are compiled one by one, in place; one graph must serve every depth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, fx, nn

from tests.small import merged, small_config
from ziggurat.config.kinds import ResidualKind
from ziggurat.model.build import build_model
from ziggurat.model.build import compile_layers as make_compiled
from ziggurat.model.seq2seq import Seq2Seq

VOCABULARY = 11
VARIANTS: dict[str, dict[str, Any]] = {
    **{kind: {"residual": kind} for kind in get_args(ResidualKind)},
    "frozen admin": {"residual": "admin", "wiring": {"omega_trainable": False}},
    "hyper, dynamic": {"residual": "hyper", "wiring": {"streams": 2, "dynamic": True}},
    "swiglu": {"activation": "swiglu"},
    "rms": {"norm": "rms"},
    "scale": {"norm": "scale", "embedding": {"unit_length": True}},
}


def tiny(layers: int, **model: Any) -> Seq2Seq:
    choices = merged({"d_ff": 16, "dropout": {"residual": 0.0, "embedding": 0.0}}, model)
    return build_model(small_config(layers, layers, **choices), VOCABULARY, VOCABULARY, seed=3).double()


def run(model: Seq2Seq) -> Tensor:
    """Teacher-forced hidden states of two sentences, one of them padded."""
    generator = torch.Generator().manual_seed(1)
    source, target = (torch.randint(VOCABULARY, (2, length), generator=generator) for length in (5, 4))
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    return model(source, mask, target)


def compile_layers(model: Seq2Seq) -> list[fx.GraphModule]:
    """Compile every layer in place; each new graph is added to the list."""
    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    for stack in (model.encoder, model.decoder):
        for layer in stack.layers:
            layer.compile(fullgraph=True, backend=keep)
    return graphs


QUICK = {"post", "hyper, dynamic"}


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in VARIANTS])
def test_one_graph_serves_every_depth(name: str) -> None:
    model = tiny(6, **VARIANTS[name])
    names = list(model.state_dict())
    expected = run(model)
    graphs = compile_layers(model)
    torch.testing.assert_close(run(model), expected, atol=1e-10, rtol=0)
    assert list(model.state_dict()) == names
    # For 12 layers: one graph per stack, and another where the first layer's input differs from that of the others.
    assert 2 <= len(graphs) <= 4


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["batch", "sample"])
def test_stochastic_sublayers_differ_by_depth_within_one_graph(unit: str) -> None:
    model = tiny(6, dropout={"sublayer": 0.5, "sublayer_unit": unit}).train()
    torch.manual_seed(5)
    expected = run(model)
    graphs = compile_layers(model)
    torch.manual_seed(5)
    torch.testing.assert_close(run(model), expected, atol=1e-10, rtol=0)
    assert len(graphs) == 2
    chances = [float(layer.ffn_residual.dropout.p) for layer in model.encoder.layers]  # type: ignore[union-attr]
    assert chances == pytest.approx([0.5 * number / 6 for number in range(1, 7)])


@pytest.mark.slow
def test_many_shapes_make_a_bounded_number_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stack gets two graphs, for training and evaluation, which serve all sizes above 1."""
    model = build_model(small_config(2, 2), VOCABULARY, VOCABULARY)
    graphs: list[fx.GraphModule] = []
    runs: list[int] = []

    def keep(graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return lambda *args: runs.append(1) or graph(*args)

    compiled = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **how: compiled(self, backend=keep, **how))
    torch.compiler.reset()
    make_compiled(model)
    generator = torch.Generator().manual_seed(2)
    shapes = [[4, 4, 4], [4, 4, 5], *torch.randint(2, 9, (20, 3), generator=generator).tolist()]
    for batch, source, target in shapes:
        for training in (True, False):
            model.train(training)
            mask = torch.ones(batch, source, dtype=torch.bool)
            with torch.set_grad_enabled(training):
                model(mask.long(), mask, torch.ones(batch, target, dtype=torch.long))
    assert len(graphs) == 4
    assert len(runs) == len(shapes) * 2 * 4
    model.train()
    ones = [(1, 3, 3)]
    for batch, source, target in ones:
        mask = torch.ones(batch, source, dtype=torch.bool)
        model(mask.long(), mask, torch.ones(batch, target, dtype=torch.long))
    assert len(graphs) <= 4 + 2 * len(ones)  # a size of 1 has a separate graph
    assert len(runs) == len(shapes) * 2 * 4 + len(ones) * 4
