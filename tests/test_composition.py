"""Every pair of choices is built and trained; a sample is decoded, saved and compiled (all of them: `-m slow`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from tests.composition import covering, model, refused_by_rnmt, refused_pairs
from ziggurat.config.train import GuidedAlignmentConfig, LossConfig, OptimiserConfig
from ziggurat.data.loader import Batch
from ziggurat.model.accelerator import default_device
from ziggurat.model.build import build_model, count_parameters, parameter_roles
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.model.tensors import load_weights, read_tensors, weights, write_tensors
from ziggurat.train.optim import Optimiser
from ziggurat.train.parallel import Parallel
from ziggurat.train.update import train_update

VOCABULARY = 13
GOLDEN = Path(__file__).parent / "golden" / "refused_pairs.txt"
PAIRS = list(covering(2))
HERE = default_device()  # with --pretend, the pretend accelerator


def named(choices: dict[str, Any]) -> str:
    return ",".join(str(value) for value in choices.values())


def padded_batch() -> Batch:
    """Three sentence pairs of lengths (5, 4), (3, 6), (1, 2)."""
    generator = torch.Generator().manual_seed(3)
    source = torch.randint(4, VOCABULARY, (3, 5), generator=generator)
    target = torch.randint(4, VOCABULARY, (3, 6), generator=generator)
    source_mask = torch.arange(5) < torch.tensor([5, 3, 1])[:, None]
    target_mask = torch.arange(6) < torch.tensor([4, 6, 2])[:, None]
    target_in = torch.cat([torch.full((3, 1), 1), target[:, :-1]], dim=1)
    source, target = source.masked_fill(~source_mask, 0), target.masked_fill(~target_mask, 0)
    target_in = target_in.masked_fill(~target_mask, 0)
    # Links of five target tokens, the first with two source tokens; the last sentence has none.
    links = {"link_places": torch.tensor([0, 4, 8, 31, 35, 42]), "link_shares": torch.tensor([0.5, 0.5, 1, 1, 1, 1])}
    sides = source, source_mask, target_in, target, target_mask
    return Batch(*sides, np.arange(3), source_tokens=9, target_tokens=12, **links)


def one_update(built: Seq2Seq, batch: Batch, loss: LossConfig) -> None:
    """Train one update and require a finite gradient for every parameter that is trained."""
    built.to(HERE).train()
    batch = batch.to(HERE)
    seen: dict[str, Tensor] = {}
    hooks = [
        p.register_post_accumulate_grad_hook(lambda p, n=name: seen.__setitem__(n, p.grad.clone()))  # type: ignore[misc]
        for name, p in built.named_parameters()
        if p.requires_grad
    ]
    optimiser = Optimiser(built, parameter_roles(built), OptimiserConfig())
    result = train_update(Parallel(built, loss), [batch], optimiser, rate=1e-2, clip_norm=None)
    for hook in hooks:
        hook.remove()
    assert result.finite
    if loss.alignment is not None and not built.decoder.layer_drop:  # otherwise its layer may have been skipped
        assert result.aligned == 5
        assert result.alignment > 0
    trained = {name for name, p in built.named_parameters() if p.requires_grad}
    if not any(stack.layer_drop for stack in (built.encoder, built.decoder)):  # otherwise a layer may have been skipped
        assert seen.keys() == trained
    assert all(gradient.isfinite().all() for gradient in seen.values())


@torch.no_grad()
def stepwise(built: Seq2Seq, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return logits for two hypotheses per sentence, step by step and over whole targets, [3, 2, 6, V] each.

    The last sentence enters two steps after the others and takes four; after every step the hypotheses swap places, and
    after the third the middle sentence leaves. Logits that no step computed are NaN.
    """
    built.eval()
    memory = built.encode(batch.source, batch.source_mask)
    first = batch.target_in
    second = torch.cat([first[:, :1], first[:, 1:].roll(1, dims=0)], dim=1)
    prefixes = torch.stack([first, second], dim=1)
    whole = torch.stack([built.logits(built.decode(prefixes[:, beam], memory)) for beam in range(2)], dim=1)
    steps = torch.full_like(whole, torch.nan)
    state = built.start(2, slots=3)
    sentences, at = [0, 1], {0: 0, 1: 0, 2: 0}
    built.admit(built.encode(batch.source[:2], batch.source_mask[:2]), state)
    for t in range(prefixes.shape[2]):
        if t == 2:
            built.admit(built.encode(batch.source[2:], batch.source_mask[2:]), state)
            sentences.append(2)
        order = [[at[s] % 2, 1 - at[s] % 2] for s in sentences]
        tokens = torch.stack([prefixes[s, o, at[s]] for s, o in zip(sentences, order, strict=True)])
        for s, o, logits in zip(sentences, order, built.step(tokens, state), strict=True):
            steps[s, o, at[s]] = logits
            at[s] += 1
        if t == 2:
            sentences = [0, 2]
            state.keep(torch.tensor([0, 2]))
        state.follow(torch.tensor([1, 0], device=built.device).expand(len(sentences), 2))
    return steps, whole


def check(choices: dict[str, Any], folder: Path) -> None:
    """Build one configuration, train it for one update, decode with it, save and reload it."""
    config = model(choices)
    batch = padded_batch().to(HERE)
    # float64 from the start: fixup with dense and swiglu, without any norm, has a loss of 3e27 here, and fp32 cannot
    # hold the norm of its gradients
    built = build_model(config, VOCABULARY, VOCABULARY, seed=5).double()
    one_update(built, batch, LossConfig())

    steps, whole = stepwise(built, batch)
    done = ~steps.isnan()
    assert done.sum() == (6 + 3 + 4) * 2 * VOCABULARY
    torch.testing.assert_close(steps[done], whole[done], atol=1e-10, rtol=1e-10)

    write_tensors(folder / "model.safetensors", weights(built))
    again = build_model(config, VOCABULARY, VOCABULARY, seed=6).double().to(HERE)
    load_weights(again, read_tensors(folder / "model.safetensors"), "saved")
    again.eval()
    with torch.no_grad():
        memory = again.encode(batch.source, batch.source_mask)
        assert torch.equal(again.logits(again.decode(batch.target_in, memory)), whole[:, 0])
    assert count_parameters(again) == count_parameters(built)


def some(every: int) -> list[Any]:
    """Return the pairs as cases of a test, one in `every` of them for the quick suite."""
    marked = ((c, () if number % every == 0 else pytest.mark.slow) for number, c in enumerate(PAIRS))
    return [pytest.param(choices, id=named(choices), marks=marks) for choices, marks in marked]


@pytest.mark.parametrize("choices", PAIRS, ids=named)
def test_every_pair_of_choices_trains(choices: dict[str, Any]) -> None:
    built = build_model(model(choices), VOCABULARY, VOCABULARY, seed=5)
    if choices["residual"] in ("no_norm", "fixup"):  # without any norm a few of them overflow in fp32, as in `check`
        built.double()
    one_update(built, padded_batch(), LossConfig(alignment=GuidedAlignmentConfig()))


@pytest.mark.parametrize("choices", some(4))
def test_every_pair_of_choices_decodes_and_is_saved(choices: dict[str, Any], tmp_path: Path) -> None:
    check(choices, tmp_path)


OPTIONS: list[dict[str, Any]] = [
    {"encoder.d_model": 24, "encoder.d_ff": 20, "encoder.heads": 3, "embedding.sharing": "decoder"},
    {"encoder.d_model": 24, "embedding.sharing": "none", "memory": "transparent", "decoder.history": "dlcl"},
    {"encoder.residual": "admin", "decoder.residual": "pre", "init.kind": "admin", "init.omega": "log"},
    {"encoder.residual": "none", "residual": "lingvo", "memory": "transparent"},
    {"encoder.residual": "hyper", "decoder.residual": "post", "wiring.dynamic": True, "encoder.history": "blocks"},
    {"residual": "hyper", "wiring.dynamic": True, "wiring.streams": 3, "decoder.attention": "merged"},
    {"residual": "manifold_hyper", "wiring.mixing": "permutations", "wiring.streams": 3, "decoder.history": "dlcl"},
    {"residual": "manifold_hyper", "wiring.stream_start": "normal", "decoder.residual": "siamese"},
    {
        "residual": "none",
        "encoder.history": "attention_residuals",
        "decoder.history": "block_attention_residuals",
        "combination.unit": "sublayer",
    },
    {"residual": "admin", "init.kind": "admin", "init.omega": "linear", "wiring.omega_trainable": False},
    {"encoder.layer_drop": 0.4, "decoder.layer_drop": 0.4, "decoder.history": "dlcl"},
    {"dropout.sublayer": 0.3, "dropout.sublayer_unit": "sample", "residual": "post"},
    {"dropout.sublayer": 0.3, "residual": "layer_scale", "wiring.layer_scale": 0.5},
    {"decoder.attention": "average", "attention.average_ffn": True},
    {"decoder.attention": "average", "attention.average_gate": False},
    {"decoder.attention": "merged_gated", "attention.average_ffn": True, "residual": "post"},
    {"decoder.attention": "merged", "attention.share_value": False, "encoder.d_model": 24, "embedding.sharing": "none"},
    {"encoder.attention": "relative", "decoder.attention": "relative", "attention.relative_values": True},
    {"encoder.attention": "relative", "attention.relative_clip": 2, "attention.query_scale": True},
    {"encoder.history": "dlcl", "decoder.history": "dlcl", "combination.softmax": True, "combination.window": 2},
    {"encoder.history": "dlcl", "combination.groups": 16, "combination.dropout": 0.2, "combination.start": "one"},
    {"encoder.history": "blocks", "combination.learnable": False, "combination.normalize_embedding": True},
    {"encoder.history": "depth_weighted", "combination.period": 2, "combination.dilation": 2},
    {"encoder.solver": "rk2", "encoder.history": "dlcl", "decoder.history": "dlcl", "encoder.layer_drop": 0.3},
    {"encoder.tied_layers": [1], "decoder.tied_layers": [1], "residual": "post", "decoder.attention": "merged"},
    {"encoder.tied_layers": [1], "decoder.tied_layers": [2, 1, 2], "residual": "hyper", "decoder.history": "dlcl"},
    {"embedding.shared_bias": True, "embedding.zero_start": True, "embedding.output_bias": True},
    {"init.kind": "depth_scaled", "init.exponent": 0.5, "init.qkv": "fused_self", "residual": "post"},
    {"encoder.init": {"kind": "depth_scaled", "exponent": 0.5}, "init.qkv": "fused_self", "residual": "post"},
    {
        "encoder.residual": "admin",
        "encoder.init": {"kind": "admin", "omega": "log"},
        "decoder.residual": "deepnorm",
        "decoder.init": {"kind": "deepnorm"},
    },
]


@pytest.mark.parametrize("choices", OPTIONS, ids=named)
def test_every_option_works(choices: dict[str, Any], tmp_path: Path) -> None:
    check(choices, tmp_path)


@pytest.mark.slow
def test_every_triple_of_choices_works(tmp_path: Path) -> None:
    for choices in covering(3):
        check(choices, tmp_path)


def test_the_pairs_cover_every_value_and_every_pair() -> None:
    covered = {frozenset(((a, c[a]), (b, c[b]))) for c in PAIRS for a in c for b in c if a < b}
    refused = {frozenset(pair) for pair in refused_pairs()}
    axes: dict[str, set[Any]] = {}
    for choices in PAIRS:
        for axis, value in choices.items():
            axes.setdefault(axis, set()).add(value)
    everything = {frozenset(((a, x), (b, y))) for a in axes for b in axes if a < b for x in axes[a] for y in axes[b]}
    assert everything - covered == refused


def test_refused_pairs_and_their_messages() -> None:
    lines = [f"{a}={x} {b}={y}: {reason}" for ((a, x), (b, y)), reason in refused_pairs().items()]
    lines += [f"family=rnmt {a}={x}: {reason}" for (a, x), reason in refused_by_rnmt().items()]
    golden = GOLDEN.read_text(encoding="utf-8").splitlines()
    for said, what in ((set(lines) - set(golden), "not listed"), (set(golden) - set(lines), "no longer refused so")):
        assert not said, f"{GOLDEN.name}: {what}:\n" + "\n".join(line for line in [*lines, *golden] if line in said)
    assert sorted(golden) == sorted(lines)


class _Counted:
    """A compiler backend that runs graphs unchanged and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Any:
        self.graphs += 1
        return graph.forward


def _gradients(built: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Compare one update with dropout, whose masks depend only on the seed."""
    torch.manual_seed(3)
    built.zero_grad()
    built(batch.source, batch.source_mask, batch.target_in).square().mean().backward()
    return {name: p.grad.clone() for name, p in built.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("choices", some(400))
def test_layers_compile_once_for_all_depths(choices: dict[str, Any]) -> None:
    batch, graphs = padded_batch(), {}
    # One graph for each stack, and another for a first layer that passes its values to others, reads one stream, or has
    # a different kind.
    built_as = model(choices)
    first = [
        stack
        for decoder, stack in enumerate((built_as.encoder, built_as.decoder))
        if built_as.value_residuals(decoder=bool(decoder))
        or stack.history == "mudd"
        or stack.ranges
        or "keel" in built_as.residuals(decoder=bool(decoder))
    ]
    for layers in (3, 7):
        sized = {**choices, "encoder.layers": layers, "decoder.layers": layers, "wiring.planned_encoder_layers": 7}
        built = build_model(model(sized), VOCABULARY, VOCABULARY).double().train()  # as in `check`
        expected = _gradients(built, batch)
        torch._dynamo.reset()
        backend = _Counted()
        for stack in (built.encoder, built.decoder):
            for layer in stack.layers:  # type: ignore[union-attr]
                nn.Module.compile(layer, backend=backend, fullgraph=True)
        # A few stacks without any norm overflow at seven layers; then both models overflow.
        torch.testing.assert_close(_gradients(built, batch), expected, equal_nan=True)
        graphs[layers] = backend.graphs
    split = choices.get("combination.unit") == "sublayer"  # then only sub-layers are called: nothing compiles
    assert graphs[3] == graphs[7] <= 2 + len(first) or split
