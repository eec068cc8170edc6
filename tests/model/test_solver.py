"""Layers as steps of Runge-Kutta methods, compared with the equations of Li et al. 2022 in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.composition import model as small_model
from tests.composition import refusal
from tests.model.sentences import MASK, SOURCE, TARGET, V, built
from tests.model.test_stacks import HIDDEN, ln
from tests.small import moved
from ziggurat.exchange.plain import NotPlainError, fold
from ziggurat.model.build import build_model, count_parameters
from ziggurat.model.depth import at_depth, deepening, grow_weights
from ziggurat.model.layers import SourceView
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.model.tensors import weights
from ziggurat.train.diagnosis.gradients import Trace

N = 3


def solver_model(solver: str, **choices: Any) -> Seq2Seq:
    return moved(built(encoder__solver=solver, encoder__layers=N, **choices), 0.2)


def stepped(solver: str, f: Any, y: Tensor, gate: Any) -> Tensor:
    """One step of the method, number by number if there is a gate."""
    one = f(y)
    if solver == "rk4":
        two = f(y + 0.5 * one)
        three = f(y + 0.5 * two)
        return y + one / 6 + two / 3 + three / 3 + f(y + three) / 6
    two = f(y + one)
    if solver == "rk2":
        return y + 0.5 * one + 0.5 * two
    width = y.shape[-1]
    logit = (one * gate.weight[0, :width]).sum(-1) + (two * gate.weight[0, width:]).sum(-1) + gate.bias
    share = (1 / (1 + (-logit).exp()))[..., None]
    return y + share * one + (1 - share) * two


@pytest.mark.parametrize("residual", ["pre", "post"])
@pytest.mark.parametrize("solver", ["rk2", "rk2_gated", "rk4"])
def test_a_layer_is_a_step(solver: str, residual: str) -> None:
    model = solver_model(solver, residual=residual)
    encoder: Any = model.encoder
    outputs: list[Tensor] = []
    with Trace(model) as trace:
        memory = model.encode(SOURCE, MASK, outputs)
    y = model.source_embedding(SOURCE)
    for number, layer in enumerate(encoder.layers):
        y = stepped(solver, lambda x, layer=layer: layer(x, SourceView(HIDDEN)), y, encoder.solver.gate)
        for found in (outputs[number], trace.outputs["encoder"][number]):
            assert found is not None
            torch.testing.assert_close(found, y, atol=1e-10, rtol=1e-12)
    last = ln(y, encoder.final_norm) if residual == "pre" else y
    torch.testing.assert_close(memory.of(0), last, atol=1e-10, rtol=1e-12)


def test_the_only_parameters_are_one_gate_shared_by_all_layers() -> None:
    plain, gated = (solver_model(solver) for solver in ("euler", "rk2_gated"))
    assert count_parameters(solver_model("rk4")) == count_parameters(plain)
    width = small_model({}).encoder_width
    assert count_parameters(gated) - count_parameters(plain) == 2 * width + 1
    start = built(encoder__solver="rk2_gated").encoder.solver.gate.requires_grad_(False)  # type: ignore[union-attr]
    assert float(start.weight.abs().max()) <= (6 / (2 * width + 1)) ** 0.5
    assert float(start.bias) == 0


@pytest.mark.parametrize(
    ("choices", "key"),
    [
        ({"encoder.history": "dlcl", "combination.unit": "sublayer"}, "encoder.solver"),
        ({"encoder.history": "mudd", "residual": "pre"}, "encoder.solver"),
        ({"attention.value_residual": "half"}, "encoder.solver"),
        ({"residual": "admin", "init.kind": "admin"}, "encoder.solver"),
        ({"transfer": "base"}, "transfer"),
    ],
)
def test_options_that_a_repeatedly_computed_layer_cannot_have(choices: dict[str, Any], key: str) -> None:
    reason = refusal({**choices, "encoder.solver": "rk4"})
    assert reason is not None
    assert [problem.key.partition(":")[0] for problem in reason.problems] == [key]


def test_a_stack_with_a_solver_grows_but_does_not_fold() -> None:
    deep = small_model({"encoder.solver": "rk2_gated", "encoder.layers": 4})
    shallow = moved(build_model(at_depth(deep, 2), V, V, seed=1), 0.1)
    grown = build_model(deep, V, V, seed=2)
    grow_weights(grown, weights(shallow), deepening("g_top", at_depth(deep, 2), deep))
    name = "encoder.solver.gate.weight"
    assert torch.equal(grown.get_parameter(name), shallow.get_parameter(name))
    assert grown(SOURCE, MASK, TARGET).isfinite().all()
    with pytest.raises(NotPlainError, match="several times"):
        fold(deep, weights(grown))
