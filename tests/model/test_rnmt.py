"""RNMT+ compared with its description (Chen et al. 2018; Bapna et al. 2018), written with loops (fp64)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.model.checks import (
    EXACT,
    V,
    batch,
    check_every_source_token_reaches_every_output,
    check_padding_and_batch_order,
    check_steps_equal_full_decoding,
)
from tests.model.lstm_reference import plain_layer, plain_step
from tests.parameter_counts import rnmt
from tests.small import merged, moved
from tests.train.batches import batches
from ziggurat.config import ModelConfig
from ziggurat.config.train import LossConfig, OptimiserConfig
from ziggurat.model.build import build_model, count_parameters, model_slots, parameter_roles
from ziggurat.model.dropout import Dropout
from ziggurat.model.rnmt import RnmtEncoder, build_rnmt
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.system.errors import ConfigError
from ziggurat.train.objective import batch_loss
from ziggurat.train.optim import Optimiser
from ziggurat.train.parallel import Parallel
from ziggurat.train.update import train_update
from ziggurat.translate.hypotheses import LengthPenalty
from ziggurat.translate.scorers import ModelScorer
from ziggurat.translate.search import search
from ziggurat.translate.settings import SearchSettings, Sentence

WIDTH, HEADS = 8, 2
VARIANTS = {
    "transparent": {"memory": "transparent"},
    "top": {},
    "no residuals": {"encoder": {"residual": "none"}},
    "transparent, no residuals": {"memory": "transparent", "encoder": {"residual": "none"}},
}


def configured(**more: Any) -> ModelConfig:
    defaults = {
        "family": "rnmt",
        "d_model": WIDTH,
        "heads": HEADS,
        "encoder": {"layers": 4},
        "decoder": {"layers": 4},
        "embedding": {"positions": "none", "sharing": "none", "scale": False, "output_bias": True},
        "init": {"kind": "uniform"},
    }
    return ModelConfig.model_validate(merged(defaults, more))


def tiny(**more: Any) -> Seq2Seq:
    """Return the model in evaluation mode, every parameter away from its neutral initial value."""
    return moved(build_model(configured(**more), V, V, seed=3).double().eval(), 0.3)


class Written:
    """The model from its equations, with the parameters of `model`, for one sentence pair without padding."""

    def __init__(self, model: Seq2Seq, config: ModelConfig) -> None:
        self.get = model.get_parameter
        self.modules = model
        self.config = config

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.get(f"{name}.weight").T + self.get(f"{name}.bias")

    def cells(self, side: str, layer: int) -> nn.ModuleList:
        found = self.modules.get_submodule(f"{side}.layers.{layer}.lstm.cells")
        assert isinstance(found, nn.ModuleList)
        return found

    def memory(self, source: Tensor) -> Tensor:
        """[source, width]: bidirectional layers, residuals from the third on, merge of the N outputs, projection."""
        x = self.get("source_embedding.tokens.weight")[source][None]
        real = torch.ones(1, len(source), dtype=torch.bool)
        outputs = []
        for layer in range(self.config.encoder.layers):
            y = plain_layer(self.cells("encoder", layer), x, real)
            x = x + y if layer >= 2 and self.config.encoder.residual != "none" else y
            outputs.append(x)
        if self.config.memory == "transparent":
            shares = torch.exp(self.get("encoder.transparent.weight")[0])
            x = sum(share * y for share, y in zip(shares / shares.sum(), outputs, strict=True))  # type: ignore[assignment]
        return self.linear("encoder.out_proj", x)[0]

    def attend(self, m: Tensor, memory: Tensor) -> Tensor:
        """[width] for the query [width]."""
        keys, query = self.linear("decoder.attention.k_proj", memory), self.linear("decoder.attention.q_proj", m)
        a, b, v = (self.get(f"decoder.attention.{name}") for name in ("key_map", "query_map", "score"))
        context = []
        for k, q in zip(keys.chunk(HEADS, dim=-1), query.chunk(HEADS, dim=-1), strict=True):
            energies = torch.stack([v @ torch.tanh(row @ a + q @ b) for row in k])
            context.append(torch.softmax(energies, dim=0) @ k)
        return torch.cat(context)

    def logits(self, source: Tensor, target_in: Tensor) -> Tensor:
        """[target, vocabulary]: the context is fed back, all layers see it, softmax of [x; context]."""
        memory, layers = self.memory(source), self.config.decoder.layers
        context = self.attend(torch.zeros(WIDTH, dtype=torch.float64), memory)
        states = [torch.zeros(2, 1, WIDTH, dtype=torch.float64) for _ in range(layers)]
        rows = []
        for word in self.get("target_embedding.tokens.weight")[target_in]:
            x = word
            for layer in range(layers):
                (cell,) = self.cells("decoder", layer)
                states[layer] = torch.stack(plain_step(torch.cat([x, context])[None], *states[layer], cell))
                y = states[layer][0, 0]
                x = x + y if layer >= 2 else y
                if layer == 0:
                    context = self.attend(y, memory)
            rows.append(torch.cat([x, context]) @ self.get("output.weight").T + self.get("output.bias"))
        return torch.stack(rows)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_the_model_is_rnmt_plus(variant: str) -> None:
    config = configured(**VARIANTS[variant])
    model = tiny(**VARIANTS[variant])
    source, mask, target = batch()
    written = Written(model, config)
    logits = model.logits(model(source, mask, target))
    for sentence, length in enumerate(mask.sum(1).tolist()):
        expected = written.logits(source[sentence, :length], target[sentence])
        torch.testing.assert_close(logits[sentence], expected, **EXACT)


def test_gradients_are_those_of_the_description() -> None:
    model = tiny(memory="transparent")
    written = Written(model, configured(memory="transparent"))
    source, mask, target = batch()
    names, parameters = zip(*model.named_parameters(), strict=True)
    upstream = torch.randn(3, 7, V, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    ours = torch.autograd.grad((model.logits(model(source, mask, target)) * upstream).sum(), parameters)
    lengths = mask.sum(1).tolist()
    total = sum((written.logits(source[b, :n], target[b]) * upstream[b]).sum() for b, n in enumerate(lengths))
    for name, mine, reference in zip(names, ours, torch.autograd.grad(total, parameters), strict=True):  # type: ignore[arg-type]
        torch.testing.assert_close(mine, reference, **EXACT, msg=lambda text, name=name: f"{name}: {text}")
        assert float(mine.abs().max()) > 1e-6


def test_the_softmax_reads_twice_the_width() -> None:
    model = tiny()
    source, mask, target = batch()
    assert model(source, mask, target).shape == (3, 7, 2 * WIDTH)
    assert model.output.weight.shape == (V, 2 * WIDTH)
    outputs: list[Tensor] = []
    memory = model.encode(source, mask, outputs)
    assert [y.shape for y in outputs] == [(3, 6, 2 * WIDTH)] * 4
    assert [states.shape for states in memory.states] == [(3, 6, WIDTH)]


@pytest.mark.parametrize("memory", ["top", "transparent"])
@settings(max_examples=8)
@given(data=st.data())
def test_steps_equal_full_decoding_through_reordering(memory: str, data: st.DataObject) -> None:
    check_steps_equal_full_decoding(tiny(memory=memory), data, keep_attention=True)


def test_padding_and_batch_order_change_nothing() -> None:
    check_padding_and_batch_order(tiny(memory="transparent"))


def test_a_target_token_reaches_only_its_own_and_later_positions() -> None:
    model = tiny()
    source, mask, target = batch()
    before = model(source, mask, target)
    for k in range(target.shape[1]):
        changed = target.clone()
        changed[:, k] = (changed[:, k] + 1) % V
        after = model(source, mask, changed)
        assert torch.equal(after[:, :k], before[:, :k])
        assert bool(((after - before)[:, k:].abs().amax(-1) > 1e-9).all())


def test_every_source_token_reaches_every_output_of_its_sentence() -> None:
    check_every_source_token_reaches_every_output(tiny(memory="transparent"))


@pytest.mark.parametrize("memory", ["top", "transparent"])
@pytest.mark.parametrize(("layers", "heads"), [((1, 1), 1), ((2, 3), 2), ((5, 2), 4)])
def test_parameter_count_follows_the_formula(layers: tuple[int, int], heads: int, memory: str) -> None:
    config = configured(heads=heads, memory=memory, encoder={"layers": layers[0]}, decoder={"layers": layers[1]})
    model = build_model(config, V, V)
    assert count_parameters(model) == rnmt(WIDTH, heads, *layers, V) + (layers[0] if memory == "transparent" else 0)


@pytest.mark.parametrize(
    ("width", "layers", "millions"),
    [(512, 6, 127.55), (512, 12, 165.35), (512, 16, 190.55), (512, 20, 215.75), (1024, 6, 378.87)],
)
def test_parameter_counts_of_the_paper(width: int, layers: int, millions: float) -> None:
    config = configured(d_model=width, heads=4, encoder={"layers": layers}, decoder={"layers": 8})
    with torch.device("meta"):
        count = count_parameters(build_rnmt(config, 32000, 32000))
    assert count / 1e6 == pytest.approx(millions, abs=0.005)
    assert count == rnmt(width, 4, layers, 8, 32000)


def test_initial_values() -> None:
    model = build_model(configured(d_model=64, heads=4, memory="transparent"), 500, 500)
    uniform, glorot, seen = 0.04, (6 / (2 * 64)) ** 0.5, set()
    for slot in model_slots(model):
        values, role = slot.values.detach(), slot.role.value
        seen.add(role)
        if role in ("embedding", "output", "lstm", "projection"):
            assert uniform * 0.99 < float(values.abs().max()) <= uniform
        elif role in ("attention_key", "attention_query"):
            assert glorot * 0.99 < float(values.abs().max()) <= glorot
        elif role == "additive":
            assert float(values.std()) == pytest.approx(16**-0.5, rel=0.35)
        else:
            assert torch.equal(values, torch.full_like(values, 1.0 if role == "norm_gain" else 0.0))
    assert seen == {
        *("embedding", "output", "lstm", "projection", "attention_key", "attention_query", "additive"),
        *("bias", "norm_gain", "norm_bias", "wiring"),
    }
    layers = {(slot.decoder, slot.layer) for slot in model_slots(model) if slot.role.value == "lstm"}
    assert layers == {(decoder, layer) for decoder in (False, True) for layer in range(1, 5)}


@pytest.mark.parametrize(
    ("place", "expected"), [("residual", 7), ("attention", 1), ("embedding", 2), ("transparent", 0)]
)
def test_each_dropout_is_where_it_belongs(place: str, expected: int) -> None:
    """Each option alone changes training: the outputs of all layers except the decoder's first."""
    none = dict.fromkeys(("residual", "attention", "embedding", "transparent"), 0.0)
    model = build_model(configured(memory="transparent", dropout={**none, place: 0.5}), V, V)
    source, mask, target = batch()
    calls: list[nn.Module] = []
    for module in {m for m in model.modules() if isinstance(m, Dropout) and m.p > 0}:
        module.register_forward_hook(lambda module, *_: calls.append(module))
    model.train()
    torch.manual_seed(0)
    assert not torch.equal(model(source, mask, target), model(source, mask, target))
    steps = (target.shape[1] + 1) if place == "attention" else 1  # one attention per step, and one for the zero query
    assert len(calls) == 2 * expected * steps
    model.eval()
    assert torch.equal(model(source, mask, target), model(source, mask, target))


def test_transparent_memory_starts_as_the_mean_of_all_layers() -> None:
    model = build_model(configured(memory="transparent"), V, V).double().eval()
    assert isinstance(model.encoder, RnmtEncoder)
    source, mask, _ = batch()
    outputs: list[Tensor] = []
    memory = model.encode(source, mask, outputs).states[0]
    torch.testing.assert_close(memory, model.encoder.out_proj(torch.stack(outputs).mean(0)), **EXACT)


@pytest.mark.slow
def test_training_learns_a_batch_by_heart() -> None:
    dropout = {"residual": 0.0, "embedding": 0.0, "transparent": 0.0}
    config = configured(d_model=16, memory="transparent", encoder={"layers": 3}, decoder={"layers": 2}, dropout=dropout)
    model = build_model(config, V, V)
    optimiser, loss = Optimiser(model, parameter_roles(model), OptimiserConfig()), LossConfig(label_smoothing=0.0)
    losses = [
        train_update(Parallel(model, loss), batches([7]), optimiser, rate=2e-2, clip_norm=None).loss for _ in range(80)
    ]
    assert losses[0] > 2.0
    assert losses[-1] < 0.3


def test_bf16_hardly_changes_the_loss() -> None:
    model, (one,) = tiny(memory="transparent").float(), batches([7])
    exact = float(batch_loss(model, one, LossConfig(), tokens=32, sentences=7).nll)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = float(batch_loss(model, one, LossConfig(), tokens=32, sentences=7).nll)
    assert narrow == pytest.approx(exact, rel=0.02)
    assert narrow != exact


@pytest.mark.parametrize("coverage", [0.0, 0.2])
@torch.no_grad()
def test_beams_find_better_translations_than_greedy_search(coverage: float) -> None:
    model = tiny().eval()
    source, mask, _ = batch()
    scores = []
    for beam in (1, 4, 12):
        settings_of_search = SearchSettings(beam, 1, bos=2, eos=3, penalty=LengthPenalty(coverage=coverage))
        sentences = [Sentence(row[real].tolist(), 4) for row, real in zip(source, mask, strict=True)]
        results = search(ModelScorer(model), sentences, settings_of_search)
        scores.append([found[0].score for found in results])
        for sentence, found in enumerate(results):
            tokens = torch.tensor([[2, *found[0].tokens]])
            hidden = model.decode(tokens, model.encode(source[sentence : sentence + 1], mask[sentence : sentence + 1]))
            steps = model.logits(hidden).log_softmax(-1)[0]
            given = [*found[0].tokens, 3][: len(found[0].token_log_probabilities)]
            expected = [float(row[token]) for row, token in zip(steps, given, strict=False)]
            assert found[0].token_log_probabilities == pytest.approx(expected, abs=1e-9)
    assert all(wide >= narrow - 1e-12 for narrow, wide in zip(scores[0], scores[-1], strict=True))


def test_settings_that_do_not_fit_rnmt_are_refused_with_the_reason() -> None:
    for values, message in (
        ({"embedding": {"sharing": "all"}}, "embedding.sharing: none"),
        ({"embedding": {"positions": "sinusoidal"}}, "embedding.positions: none"),
        ({"decoder": {"attention": "average"}}, "is for `family: transformer`"),
        ({"encoder": {"residual": "post"}}, "is for `family: transformer`"),
    ):
        with pytest.raises(ValueError, match=message):
            configured(**values)
    with pytest.raises(ConfigError):
        build_model(ModelConfig(), 5, 6)
