"""Measures of a model on a batch, compared with forward and backward passes written here."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.composition import model as composed
from tests.small import moved, small_config
from ziggurat.config.kinds import HistoryKind, ResidualKind
from ziggurat.config.train import LossConfig
from ziggurat.data.loader import Batch
from ziggurat.model.attention.cache import causal_mask, padding_mask
from ziggurat.model.build import build_model
from ziggurat.model.layers import WholeTarget
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.model.transformer import Decoder, Encoder
from ziggurat.train.depth_records import measured
from ziggurat.train.diagnosis.probe import MEASURES, measure
from ziggurat.train.objective import batch_loss, probe_loss

VOCABULARY = 13
LOSS = probe_loss(LossConfig(), "fp32")
RNMT: dict[str, Any] = {
    "family": "rnmt",
    "embedding": {"positions": "none", "sharing": "none"},
    "dropout": {"activation": 0.0},
}


def batch(seed: int = 3) -> Batch:
    """Three sentence pairs of lengths (5, 4), (3, 6), (1, 2)."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(4, VOCABULARY, (3, 5), generator=generator)
    target = torch.randint(4, VOCABULARY, (3, 6), generator=generator)
    source_mask = torch.arange(5) < torch.tensor([5, 3, 1])[:, None]
    target_mask = torch.arange(6) < torch.tensor([4, 6, 2])[:, None]
    target_in = torch.cat([torch.full((3, 1), 1), target[:, :-1]], dim=1).masked_fill(~target_mask, 0)
    source, target = source.masked_fill(~source_mask, 0), target.masked_fill(~target_mask, 0)
    return Batch(source, source_mask, target_in, target, target_mask, np.arange(3), source_tokens=9, target_tokens=12)


def built(below: int = 3, above: int = 2, **choices: Any) -> Seq2Seq:
    """Return a small model in fp64 with this many layers and parameters away from their initial values."""
    return moved(build_model(small_config(below, above, **choices), VOCABULARY, VOCABULARY).double(), 0.1).eval()


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(
        torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64), atol=1e-9, rtol=1e-7
    )


def plain_nll(model: Seq2Seq, some: Batch) -> float:
    """-log p of every real token, one by one."""
    logits = model.logits(model(some.source, some.source_mask, some.target_in)).log_softmax(-1)
    lengths = some.target_mask.sum(1).tolist()
    terms = [-float(logits[i, t, some.target_out[i, t]]) for i, n in enumerate(lengths) for t in range(n)]
    return math.fsum(terms) / len(terms)


@torch.no_grad()
def test_nll_and_dependence_on_the_source() -> None:
    model, some = built(), batch()
    values = measure(model, some, LOSS, ("nll", "source_dependence"))
    close(values["nll"], plain_nll(model, some))
    order = [2, 0, 1]
    other = Batch(
        some.source[order],
        some.source_mask[order],
        some.target_in,
        some.target_out,
        some.target_mask,
        some.indices,
        some.source_tokens,
        some.target_tokens,
    )
    close(values["source_dependence"], plain_nll(model, other) - plain_nll(model, some))


def test_gradient_norms_are_those_that_backward_leaves() -> None:
    model, some = built(embedding={"sharing": "none", "output_bias": True}), batch()
    found = measure(model, some, LOSS, ("gradient_norm",))["gradient_norm"]
    batch_loss(model, some, LossConfig(), tokens=12, sentences=3).objective.backward()

    def norm(*prefixes: str) -> float:
        named = [p.grad for name, p in model.named_parameters() if name.startswith(prefixes)]
        return math.sqrt(math.fsum(v * v for g in named if g is not None for v in g.flatten().tolist()))

    assert found.keys() == {"embeddings", "encoder", "decoder", "output"}
    close(found["embeddings"], norm("source_embedding.", "target_embedding."))
    close(found["encoder"], [norm(f"encoder.layers.{n}.") for n in range(3)])
    close(found["decoder"], [norm(f"decoder.layers.{n}.") for n in range(2)])
    close(found["output"], norm("output."))


def test_the_mean_of_gradient_norms_is_that_of_a_loop_over_batches() -> None:
    model, batches = built(embedding={"sharing": "none", "output_bias": True}), [batch(seed) for seed in (3, 4, 5)]
    found = measured(model, batches, LOSS)
    norms: dict[str, list[float]] = {f"{stack}.layers.{n}.": [] for stack, n in (("encoder", 0), ("decoder", 1))}
    norms["output."] = []
    for some in batches:
        model.zero_grad()
        batch_loss(model, some, LossConfig(), tokens=12, sentences=3).objective.backward()
        for prefix, of_batches in norms.items():
            grads = [p.grad for name, p in model.named_parameters() if name.startswith(prefix)]
            of_batches.append(math.sqrt(math.fsum(v * v for g in grads if g is not None for v in g.flatten().tolist())))
    means = {prefix: math.fsum(of_batches) / 3 for prefix, of_batches in norms.items()}
    close(found["gradient_norm"]["encoder"][0], means["encoder.layers.0."])
    close(found["gradient_norm"]["decoder"][1], means["decoder.layers.1."])
    close(found["gradient_norm"]["output"], means["output."])
    assert found["gradient_batches"] == 3
    # Everything else comes from the first batch.
    alone = measured(model, batches[:1], LOSS)
    assert "gradient_batches" not in alone
    assert {k: v for k, v in found.items() if not k.startswith("gradient_")} == {
        k: v for k, v in alone.items() if k != "gradient_norm"
    }


def test_a_matrix_shared_with_the_output_is_the_embeddings() -> None:
    found = measure(built(), batch(), LOSS, ("gradient_norm",))["gradient_norm"]
    assert found.keys() == {"embeddings", "encoder", "decoder"}


class _ByHand:
    """Post-norm or pre-norm stacks written out, with the gradients of all intermediate states."""

    def __init__(self, model: Seq2Seq, some: Batch, post: bool) -> None:
        assert isinstance(model.encoder, Encoder)
        assert isinstance(model.decoder, Decoder)
        self.post = post
        self.seen: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
        x = model.source_embedding(some.source)
        hidden = padding_mask(some.source_mask, x.dtype)
        self.states: dict[str, list[Tensor]] = {"encoder": [], "decoder": []}
        for layer in model.encoder.layers:
            x = self.sublayer("encoder.self_attn", x, layer.self_attn_residual, partial(layer.self_attn, mask=hidden))
            x = self.sublayer("encoder.ffn", x, layer.ffn_residual, layer.ffn)
            self.states["encoder"].append(x)
        memory = x if post else model.encoder.final_norm(x)  # type: ignore[misc]
        y = model.target_embedding(some.target_in)
        view = WholeTarget(
            causal_mask(y.shape[1], y.dtype, y.device),
            memory,
            padding_mask(some.source_mask, y.dtype, queries=y.shape[1]),
        )
        for layer in model.decoder.layers:
            y = self.sublayer("decoder.self_attn", y, layer.self_attn_residual, partial(layer.self_attn, mask=view[0]))
            cache = view.remembered(layer.cross_attn)
            y = self.sublayer(
                "decoder.cross_attn", y, layer.cross_attn_residual, partial(layer.cross_attn, cache=cache)
            )
            y = self.sublayer("decoder.ffn", y, layer.ffn_residual, layer.ffn)
            self.states["decoder"].append(y)
        y = y if post else model.decoder.final_norm(y)  # type: ignore[misc]
        logits = model.logits(y)[some.target_mask]
        gold = some.target_out[some.target_mask]
        F.cross_entropy(logits, gold, label_smoothing=0.1).backward()

    def sublayer(self, place: str, x: Tensor, residual: Any, f: Any) -> Tensor:
        z = x * 1.0
        norm = residual.out_norm if self.post else residual.in_norm

        def normalised(t: Tensor) -> Tensor:
            mean = t.mean(-1, keepdim=True)
            deviation = ((t - mean) ** 2).mean(-1, keepdim=True).add(norm.eps).sqrt()
            return norm.weight * (t - mean) / deviation + norm.bias

        r = z + f(z if self.post else normalised(z))
        o = normalised(r) if self.post else r * 1.0
        for tensor in (z, r, o):
            tensor.retain_grad()
        self.seen.setdefault(place, []).append((z, r, o))
        return o


def length(gradient: Tensor | None) -> float:
    assert gradient is not None
    return math.sqrt(math.fsum(v * v for v in gradient.flatten().tolist()))


@pytest.mark.parametrize("residual", ["post", "pre"])
def test_betas_variance_and_r_against_passes_by_hand(residual: str) -> None:
    model, some = built(residual=residual), batch()
    values = measure(model, some, LOSS, ("beta_ln", "beta_rc", "beta", "variance", "r"))
    hand = _ByHand(model, some, residual == "post")
    assert ("beta_ln" in values) == (residual == "post")
    for place, row in hand.seen.items():
        lengths = [[length(t.grad) for t in triple] for triple in row]
        close(values["beta_rc"][place], [z / r for z, r, _ in lengths])
        close(values["beta"][place], [z / o for z, _, o in lengths])
        if residual == "post":
            close(values["beta_ln"][place], [r / o for _, r, o in lengths])
        mask = (some.source_mask if place.startswith("encoder") else some.target_mask).tolist()
        for found, (_, r, _) in zip(values["variance"][place], row, strict=True):
            rows = [v for i, line in enumerate(mask) for v, real in zip(r[i].tolist(), line, strict=True) if real]
            variances = [math.fsum((c - math.fsum(v) / len(v)) ** 2 for c in v) / len(v) for v in rows]
            assert found == pytest.approx(math.fsum(variances) / len(variances), rel=1e-6)
    for stack, states in hand.states.items():
        close(values["r"][stack], length(states[0].grad) / length(states[-1].grad))


def everything(model: Seq2Seq) -> dict[str, Any]:
    return measure(model, batch(), LOSS)


CHOICES: list[dict[str, Any]] = [
    # Without a skip no gradient of the decoder's first layers passes the attention to the memory: 0/0.
    *({"residual": kind} for kind in get_args(ResidualKind) if kind != "none"),
    {"encoder.residual": "none", "decoder.residual": "pre"},
    *({"encoder.history": kind, "decoder.history": kind} for kind in get_args(HistoryKind)),
    {"combination.unit": "sublayer", "encoder.history": "dlcl", "decoder.history": "dlcl"},
    *({"decoder.attention": kind} for kind in ("relative", "average", "merged", "merged_full")),
    {"memory": "transparent"},
    {"memory": "hierarchical", "decoder.history": "cross_module"},
    *({"encoder.solver": kind} for kind in ("rk2", "rk2_gated", "rk4")),
    {"encoder.tied_layers": [1, 2, 2], "decoder.tied_layers": [1], "residual": "branch_norm", "norm": "scale"},
    {"encoder.layer_drop": 0.9, "decoder.layer_drop": 0.9},
]


WITHOUT_TABLE = {"latest", "attention_residuals", "block_attention_residuals", "mudd", "cross_module"}


@pytest.mark.parametrize("choices", CHOICES, ids=str)
def test_every_kind_is_measured_and_left_unchanged(choices: dict[str, Any]) -> None:
    model = moved(build_model(composed(choices), VOCABULARY, VOCABULARY), 0.05).eval()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    model.output.weight.grad = kept = torch.ones_like(model.output.weight)
    values = everything(model)
    assert set(values) >= set(MEASURES) - {"beta_ln", "history_weights", "transparent_weights"}
    assert ("history_weights" in values) == (choices.get("encoder.history", "latest") not in WITHOUT_TABLE)
    assert ("transparent_weights" in values) == (choices.get("memory") == "transparent")
    for name in ("beta_rc", "beta", "variance"):
        for row in values[name].values():
            assert len(row) == 3
            assert all(math.isfinite(v) and v >= 0 for v in row)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert model.output.weight.grad is kept
    assert all(p.grad is None or p.grad is kept for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert str(everything(model)) == str(values)  # NaN is not equal to itself


def test_rnmt_has_gradients_and_no_sublayers() -> None:
    model = moved(build_model(small_config(3, 3, **RNMT), VOCABULARY, VOCABULARY).double(), 0.1).eval()
    values = everything(model)
    absent = {"beta_ln", "beta_rc", "beta", "variance", "residual_dependency", "history_weights", "transparent_weights"}
    assert set(values) == set(MEASURES) - absent
    states: list[Tensor] = []
    x: list[Tensor] = []
    handle = model.decoder.layers[1].register_forward_hook(lambda _m, i, o: x.extend((i[0], o)))  # type: ignore[index]
    last = model.decoder.layers[2].register_forward_hook(lambda _m, _i, o: x.append(o))  # type: ignore[index]
    some = batch()
    hidden = model(some.source, some.source_mask, some.target_in, states)
    logits = model.logits(hidden)[some.target_mask]
    loss = F.cross_entropy(logits, some.target_out[some.target_mask], label_smoothing=0.1)
    handle.remove()
    last.remove()
    ends = torch.autograd.grad(loss, (states[0], states[-1], x[0], x[2]))
    norms = [length(g) for g in ends]
    close([values["r"]["encoder"], values["r"]["decoder"]], [norms[0] / norms[1], norms[2] / norms[3]])


def test_in_training_mode_recomputed_layers_count_once_and_dropped_ones_are_nan() -> None:
    model = built(dropout={"residual": 0.0, "attention": 0.0, "activation": 0.0, "embedding": 0.0})
    plain = everything(model)
    model.train()
    for stack in (model.encoder, model.decoder):
        stack.recompute = 1  # type: ignore[assignment]
    assert str(everything(model)) == str(plain)
    assert model.encoder.recompute == model.decoder.recompute == 1
    model.encoder.layer_drop = 1.0  # type: ignore[assignment]
    values = everything(model)
    assert all(math.isnan(v) for v in values["variance"]["encoder.ffn"] + values["beta"]["encoder.ffn"])
    assert all(math.isnan(v) for v in values["output_change"]["encoder"])
    assert all(math.isnan(v) for v in values["attention_entropy"]["encoder.self_attn"])
    assert values["gradient_norm"]["encoder"] == [0.0] * 3
    assert math.isnan(values["r"]["encoder"])
    assert "similarity" not in values
    assert values["residual_dependency"].keys() == {"decoder"}


def test_only_requested_measures_are_taken() -> None:
    model = built()
    whole = everything(model)
    for name in MEASURES:
        if name in whole:
            assert str(measure(model, batch(), LOSS, (name,))) == str({name: whole[name]})
