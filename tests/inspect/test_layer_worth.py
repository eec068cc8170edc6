"""The worth of layers, compared with loops written here, in which layers are skipped or swapped."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.train.test_probe import LOSS, batch, built, close
from ziggurat.inspect import diagnose
from ziggurat.inspect.diagnose import LAYER_MEASURES, effective_depth, layer_measures, near_pairs, passes_needed
from ziggurat.model.attention.cache import causal_mask, padding_mask
from ziggurat.model.attention.multihead import FirstValues
from ziggurat.model.history.base import HistoryState
from ziggurat.model.layers import SourceView, WholeTarget
from ziggurat.model.seq2seq import Memory, Seq2Seq
from ziggurat.model.transformer import Decoder

SOME = batch()


def run(model: Seq2Seq, encoder: list[int | None], decoder: list[int | None]) -> tuple[float, Tensor, dict[str, Any]]:
    """Loss, logits of real tokens and each layer's [input, output] in a plain stack with these layers in this order.

    None stands for an omitted layer.
    """
    mask, target_mask = SOME.source_mask, SOME.target_mask
    states: dict[str, Any] = {"encoder": [], "decoder": []}
    x = model.source_embedding(SOME.source)
    source_view = SourceView(padding_mask(mask, x.dtype), FirstValues())
    for number in encoder:
        y = x if number is None else model.encoder.layers[number](x, source_view)
        states["encoder"].append((x[mask], y[mask]))
        x = y
    memory = Memory((x if model.encoder.final_norm is None else model.encoder.final_norm(x),), mask)  # type: ignore[operator]
    x = model.target_embedding(SOME.target_in)
    length = x.shape[1]
    view = WholeTarget(
        causal_mask(length, x.dtype, x.device),
        memory.of(0),
        padding_mask(mask, x.dtype, queries=length),
        FirstValues(),
        FirstValues(),
    )
    for number in decoder:
        y = x if number is None else model.decoder.layers[number](x, view)
        states["decoder"].append((x[target_mask], y[target_mask]))
        x = y
    hidden = x if model.decoder.final_norm is None else model.decoder.final_norm(x)  # type: ignore[operator]
    logits = model.logits(hidden)[target_mask]
    return float(F.cross_entropy(logits, SOME.target_out[target_mask])), logits, states


@pytest.mark.parametrize("residual", ["pre", "post"])
def test_every_measure_follows_its_definition(residual: str) -> None:
    model = built(3, 3, residual=residual)
    with torch.no_grad():
        found = layer_measures(model, SOME, LOSS)
        assert tuple(found) == LAYER_MEASURES
        full: dict[str, list[int | None]] = {"encoder": [0, 1, 2], "decoder": [0, 1, 2]}
        whole, logits, states = run(model, **full)
        for stack in ("encoder", "decoder"):
            z = [states[stack][0][0], *(given for _, given in states[stack])]
            cosines = [[F.cosine_similarity(a, b, dim=-1).clamp(-1, 1) for b in z] for a in z]
            angles = [[float((cosine.arccos() / math.pi).mean()) for cosine in row] for row in cosines]
            torch.testing.assert_close(
                torch.tensor(found["angular_distance"][stack], dtype=torch.float64),
                torch.tensor(angles, dtype=torch.float64),
                atol=1e-6,
                rtol=0,
            )
            alone = []
            for s in range(3):
                skipped = [None if n == s else n for n in range(3)]
                rise, _, changed = run(model, **{**full, stack: skipped})
                alone.append(rise - whole)
                for number in range(3):
                    score = found["causal_score"][stack][s][number]
                    if number <= s:
                        assert math.isnan(score)
                        continue
                    u, v = (part[stack][number][1] - part[stack][number][0] for part in (states, changed))
                    close(score, float(((v - u).square().sum(-1).sqrt() / u.square().sum(-1).sqrt()).mean()))
            rises = found["loss_without"][stack]
            close([rises[n][n] for n in range(3)], alone)
            close(rises[1][2], run(model, **{**full, stack: [0, None, None]})[0] - whole)
            assert math.isnan(rises[2][0])
            exchanged = run(model, **{**full, stack: [2, 1, 0]})[0]
            close(found["permutation_score"][stack][0][2], abs(exchanged - whole) / whole)
            worst = sorted(range(3), key=lambda n: alone[n])
            kept: list[int | None] = [n if n == worst[2] else None for n in range(3)]
            close(found["pruning_curve"][stack], [0, min(alone), run(model, **{**full, stack: kept})[0] - whole])
        # The lens: the decoder's loss if it ended after layer l.
        for layer in range(4):
            early = full["decoder"][:layer]
            nll, its, _ = run(model, full["encoder"], early)
            close(found["logit_lens"]["nll"][layer], nll)
            close(found["logit_lens"]["agreement"][layer], float((its.argmax(-1) == logits.argmax(-1)).double().mean()))


@pytest.mark.parametrize(
    "choices",
    [
        {"encoder": {"history": "dlcl"}, "decoder": {"history": "blocks"}, "combination": {"unit": "sublayer"}},
        {"residual": "siamese"},
        {"residual": "hyper", "memory": "transparent"},
        {"residual": "none", "encoder": {"history": "attention_residuals"}, "combination": {"unit": "sublayer"}},
        {"attention": {"value_residual": "single"}},
        {"encoder": {"solver": "rk2_gated"}, "norm": "scale"},
        {"encoder": {"history": "cross_module"}, "memory": "hierarchical", "combination": {"period": 1}},
        {"encoder": {"tied_layers": [1, 2, 1]}, "decoder": {"tied_layers": [1]}, "residual": "branch_norm"},
        {"decoder": {"attention": "merged"}, "residual": "keel"},
    ],
    ids=str,
)
def test_any_wiring_is_measured_and_left_unchanged(choices: dict[str, Any]) -> None:
    model = built(3, 2, **choices)
    before = {name: p.clone() for name, p in model.named_parameters()}
    found = layer_measures(model, SOME, LOSS)
    fixed = "attention" in choices
    for stack, count in (("encoder", 3), ("decoder", 2)):
        alone = [found["loss_without"][stack][n][n] for n in range(count)]
        assert math.isnan(alone[0]) == fixed
        assert all(math.isfinite(rise) for rise in alone[1:])
        assert found["pruning_curve"][stack][0] == 0
        assert len(found["angular_distance"][stack]) == count + 1
    whole = float(LOSS(model, SOME)[1]) / SOME.target_tokens
    close(found["logit_lens"]["nll"][-1], whole)
    assert found["logit_lens"]["agreement"][-1] == 1
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(before[name], p) for name, p in after.items())


ATTENTIVE: dict[str, Any] = {"residual": "none", "combination": {"unit": "sublayer"}}


@pytest.mark.parametrize(
    "choices",
    [
        {"decoder": {"history": "dlcl"}},
        {"decoder": {"history": "attention_residuals"}, **ATTENTIVE},
        {"decoder": {"history": "block_attention_residuals"}, **ATTENTIVE},
    ],
    ids=lambda choices: choices["decoder"]["history"],
)
def test_the_lens_ends_a_decoder_with_its_history_of_the_layers_so_far(choices: dict[str, Any]) -> None:
    model = built(2, 3, **choices)
    decoder = cast(Decoder, model.decoder)
    with torch.no_grad():
        for weights in decoder.history.parameters():  # so that sources count unequally
            weights.copy_(torch.linspace(-1, 2, weights.numel()).view_as(weights))
    lens = layer_measures(model, SOME, LOSS)["logit_lens"]
    push, states = decoder.history.push, list[HistoryState]()

    def pushed(state: HistoryState, y: Tensor) -> HistoryState:
        states.append(push(state, y))
        return states[-1]

    decoder.history.push = pushed  # type: ignore[method-assign]
    with torch.no_grad():
        whole = model(SOME.source, SOME.source_mask, SOME.target_in)
        units = len(states) // 3
        norm = cast(nn.Module, decoder.final_norm)
        read = [norm(decoder.history.output(state)) for state in states[units - 1 :: units]]
        best, *its = (model.logits(hidden)[SOME.target_mask].argmax(-1) for hidden in (whole, *read))
    assert units == (3 if decoder.split else 1)
    for number, words in enumerate(its, start=1):
        close(lens["agreement"][number], float((words == best).double().mean()))
    assert lens["agreement"][-1] == 1 > min(lens["agreement"])


def test_a_layer_without_a_stream_adds_its_whole_output() -> None:
    model = built(2, 3, decoder={"history": "attention_residuals"}, **ATTENTIVE)
    score = layer_measures(model, SOME, LOSS)["causal_score"]["decoder"][0][2]
    gave = list[Tensor]()
    decoder = cast(Decoder, model.decoder)
    top = cast(Any, decoder.layers[2])
    top.ffn_residual.register_forward_hook(lambda _module, _args, y: gave.append(y[SOME.target_mask]))
    with torch.no_grad():
        model(SOME.source, SOME.source_mask, SOME.target_in)
        decoder.layers[0] = diagnose._LeftOut(decoder.layers[0])
        model(SOME.source, SOME.source_mask, SOME.target_in)
    before, now = gave
    change, size = (torch.linalg.vector_norm(u, dim=-1) for u in (now - before, before))
    close(score, float((change / size).mean()))


def test_rnmt_has_no_such_measures() -> None:
    from tests.train.test_probe import RNMT

    assert layer_measures(built(2, 2, **RNMT), SOME, LOSS) == {}


def test_deep_stacks_are_measured_at_their_nearest_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnose, "PASSES", 5)
    assert near_pairs(4, 0) == [(0, 0), (1, 1), (2, 2), (3, 3), (0, 1)]
    assert near_pairs(4, 1) == [(0, 1), (1, 2), (2, 3), (0, 2), (1, 3)]
    passes, model = 0, built(4, 2)

    def counted(*args: Any) -> Any:
        nonlocal passes
        passes += 1
        return LOSS(*args)

    found = layer_measures(model, SOME, counted)
    assert passes == passes_needed([4, 2])
    assert math.isnan(found["permutation_score"]["encoder"][0][3])
    assert math.isnan(found["loss_without"]["encoder"][1][2])


def test_effective_depth_counts_layers_until_the_loss_rises() -> None:
    assert effective_depth([0, 0.01, 0.04, 0.06, 0.01], 1.0) == 3  # two of the five make no difference
    assert effective_depth([0, 0.2, 0.3], 1.0) == 3
    assert effective_depth([0, -0.1, -0.1], 1.0) == 1
    assert effective_depth([0, math.nan], 1.0) == 2
    assert math.isnan(effective_depth([0, math.nan], math.nan))  # a model that has diverged
    assert math.isnan(effective_depth([0, 0], math.inf))
