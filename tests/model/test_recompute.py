"""Recomputed layers: the same gradients bit for bit, less memory, nothing else changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.composition import covering
from tests.composition import model as composed
from tests.config.test_config_rules import DATA
from tests.small import merged, moved, small_config
from tests.train.batches import batches
from ziggurat.config.experiment import Experiment
from ziggurat.config.notices import notices
from ziggurat.config.train import LossConfig, Recompute, RecomputeConfig, TrainingConfig
from ziggurat.model import seq2seq
from ziggurat.model.build import build_model, set_recompute
from ziggurat.model.seq2seq import LayerRange, Seq2Seq, runs
from ziggurat.train.objective import as_trained, batch_loss

V = 20
DROPOUT = {"residual": 0.1, "attention": 0.1, "activation": 0.1, "embedding": 0.1}
RULES: list[tuple[Recompute, Recompute]] = [(1, 1), (2, None), (None, 2), ("segments", "segments"), (3, 1)]
RANDOM: dict[str, dict[str, Any]] = {
    "layer drop": {"encoder": {"layers": 5, "layer_drop": 0.4}, "decoder": {"layers": 4, "layer_drop": 0.4}},
    "stochastic sub-layers": {"dropout": {"sublayer": 0.5}},
    "drop path": {"dropout": {"sublayer": 0.5, "sublayer_unit": "sample"}},
    "layer drop between sub-layers": {
        "encoder": {"layer_drop": 0.4, "history": "dlcl"},
        "combination": {"unit": "sublayer", "dropout": 0.1},
    },
    "transparent, dropped": {"memory": "transparent", "dropout": {"transparent": 0.3}},
    "rnmt": {"family": "rnmt", "embedding": {"positions": "none", "sharing": "none"}, "dropout": {"activation": 0.0}},
    "rnmt, transparent": {
        "family": "rnmt",
        "memory": "transparent",
        "embedding": {"positions": "none", "sharing": "none"},
        "dropout": {"activation": 0.0},
    },
}


@pytest.fixture(autouse=True)
def _short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the inside of a layer takes as much memory as one input, four layers make segments of two."""
    monkeypatch.setattr(seq2seq, "_INSIDE", 1)


def small(**choices: Any) -> Seq2Seq:
    return moved(build_model(small_config(5, 4, **merged({"dropout": DROPOUT}, choices)), V, V, seed=3), 0.1)


def gradients(
    model: Seq2Seq, encoder: Recompute = None, decoder: Recompute = None, *, r_drop: float = 0.0
) -> dict[str, Tensor]:
    """Return gradients of two batches, with a penalty on the outputs of all encoder layers, and torch's random state
    afterwards.
    """
    set_recompute(model, RecomputeConfig(encoder=encoder, decoder=decoder))
    model.train().zero_grad()
    torch.manual_seed(7)
    for part in batches([4, 3]):
        sums = batch_loss(model, part, LossConfig(inter_sim=0.3, r_drop=r_drop), tokens=30, sentences=7)
        sums.objective.backward()  # type: ignore[no-untyped-call]
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {**found, "random state": torch.get_rng_state(), "loss": sums.objective.detach()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@contextmanager
def counted(stack: nn.Module) -> Iterator[list[int]]:
    """Count how often each layer of a stack starts to compute."""
    calls = [0] * len(stack.layers)  # type: ignore[arg-type]

    def count(number: int) -> Any:
        def hook(*_: Any) -> None:
            calls[number] += 1

        return hook

    layers = list(stack.layers)  # type: ignore[arg-type]
    first = [next(m for m in layer.modules() if not list(m.children()) and list(m.parameters())) for layer in layers]
    handles = [module.register_forward_pre_hook(count(number)) for number, module in enumerate(first)]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@given(st.integers(1, 300), st.one_of(st.integers(1, 400), st.sampled_from([None, "segments"])))
def test_runs_are_all_layers_in_their_order(layers: int, rule: Recompute) -> None:
    found = runs(layers, rule)
    assert [number for run in found for number in run.layers] == list(range(layers))
    assert all(run.layers for run in found)


def test_every_kth_layer_starts_a_run() -> None:
    assert runs(5, None) == [LayerRange(range(5), False)]
    assert runs(2, 1) == [LayerRange(range(1), True), LayerRange(range(1, 2), True)]
    kept, again = (
        [LayerRange(range(2), False), LayerRange(range(3, 5), False)],
        [LayerRange(range(2, 3), True), LayerRange(range(5, 6), True)],
    )
    assert runs(7, 3) == [kept[0], again[0], kept[1], again[1], LayerRange(range(6, 7), False)]
    assert runs(2, 3) == [LayerRange(range(2), False)]


def test_segments_keep_the_minimum_for_equal_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is the inputs of runs plus the inside of the longest: within 5 % of the optimum, about 2 sqrt(16 L)."""
    monkeypatch.undo()

    def kept(count: int, layers: int) -> int:
        return count + 16 * -(-layers // count)

    for layers in (1, 6, 16, 60, 100, 250, 500, 1000, 4000):
        found = runs(layers, "segments")
        lengths = {len(run.layers) for run in found}
        assert max(lengths) - min(lengths) <= 1
        assert all(run.again for run in found)
        assert kept(len(found), layers) <= 1.05 * min(kept(count, layers) for count in range(1, layers + 1))
        if layers >= 16:
            assert kept(len(found), layers) <= 1.1 * 2 * (16 * layers) ** 0.5


@pytest.mark.parametrize("choices", list(covering(1)), ids=lambda c: "-".join(map(str, c.values()))[:60])
def test_gradients_are_the_same_bit_for_bit_in_every_composition(choices: dict[str, Any]) -> None:
    model = moved(build_model(composed(choices), V, V, seed=3), 0.1)
    expected = gradients(model)
    for rule in ((1, 1), ("segments", 2)):
        assert_same(gradients(model, *rule), expected)  # type: ignore[arg-type]


def some_rules() -> list[Any]:
    """Random parts are tested under every rule; the quick suite tries two rules, and all of them on one model."""
    cases = []
    for name, rule in product(RANDOM, RULES):
        quick = name == "layer drop" or rule in ((1, 1), ("segments", "segments"))
        cases.append(pytest.param(name, rule, id=f"{name}-{rule}", marks=() if quick else pytest.mark.slow))
    return cases


@pytest.mark.parametrize(("name", "rule"), some_rules())
def test_random_parts_are_drawn_again(name: str, rule: tuple[Recompute, Recompute]) -> None:
    model = small(**RANDOM[name])
    expected = gradients(model)
    assert_same(gradients(model, *rule), expected)


@pytest.mark.parametrize("rule", [(1, 1), ("segments", "segments")], ids=str)
def test_layers_that_are_used_twice_and_batches_that_pass_twice(rule: tuple[Recompute, Recompute]) -> None:
    encoder = {"layers": 6, "tied_layers": [1, 2], "solver": "rk2"}
    model = small(
        encoder=encoder, decoder={"tied_layers": [1, 2, 2, 1]}, memory="hierarchical", combination={"period": 2}
    )
    assert_same(gradients(model, *rule, r_drop=5.0), gradients(model, r_drop=5.0))


@pytest.mark.parametrize("precision", ["bf16", "exact dropout"])
def test_the_same_under_autocast_and_with_exact_dropout(precision: str) -> None:
    config = small_config(4, 4, dropout=DROPOUT)
    model = build_model(config, V, V)
    as_trained(model, TrainingConfig(exact_dropout=precision == "exact dropout"))
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        assert_same(gradients(model, 1, "segments"), gradients(model))


@pytest.mark.slow
@pytest.mark.parametrize("rule", [("segments", "segments"), (1, 1)], ids=str)
def test_the_same_with_compiled_layers(rule: tuple[Recompute, Recompute]) -> None:
    """The backend runs the graph unchanged, so compiled and plain layers also agree bit for bit."""
    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    model = small(dropout={"sublayer": 0.3})
    for stack in (model.encoder, model.decoder):
        for layer in stack.layers:  # type: ignore[union-attr]
            layer.compile(dynamic=True, backend=keep)
    expected = gradients(model)
    graphs_before = len(graphs)
    assert graphs_before
    assert_same(gradients(model, *rule), expected)
    assert len(graphs) == graphs_before, "recomputing compiled something again"


def test_recomputed_layers_run_twice_in_training_and_once_elsewhere() -> None:
    model = small()
    part = batches([4])[0]
    with counted(model.encoder) as encoder, counted(model.decoder) as decoder:
        gradients(model, 2, "segments")  # two batches
        assert encoder == [2, 4, 2, 4, 2]
        assert decoder == [4, 4, 4, 4]
        encoder[:], decoder[:] = [0] * 5, [0] * 4
        with torch.no_grad():
            model(part.source, part.source_mask, part.target_in)
        hidden = model.eval()(part.source, part.source_mask, part.target_in)
        hidden.sum().backward()
        assert encoder == [2] * 5
        assert decoder == [2] * 4


def test_evaluation_and_decoding_do_not_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seq2seq, "checkpoint", None)
    model = small()
    part = batches([4])[0]
    with pytest.raises(TypeError):
        gradients(model, 1, 1)
    model.eval()
    memory = model.encode(part.source, part.source_mask)
    model.decode(part.target_in, memory)
    with torch.no_grad():
        state = model.start(1, len(part.source))
        model.admit(memory, state)
        model.step(part.target_in[:, :1], state)


def test_names_and_saved_tensors_are_those_of_the_plain_model() -> None:
    model = small()
    names = list(model.state_dict())
    set_recompute(model, RecomputeConfig(encoder=1, decoder="segments"))
    assert list(model.state_dict()) == names


class _Alive(TorchDispatchMode):
    """Context that counts the bytes of tensors created in it that still exist, except views of `parameters`."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        self.parameters = {p.untyped_storage().data_ptr() for p in parameters}
        self.made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if storage.data_ptr() not in self.parameters:
                    self.made[StorageWeakRef(storage)] = storage.nbytes()
        return result

    @property
    def bytes(self) -> int:
        return sum(size for reference, size in self.made.items() if not reference.expired())


def kept_by(layers: int, rule: Recompute) -> int:
    """Return the bytes that the encoder keeps for its backward pass."""
    model = build_model(small_config(layers, 1, dropout=DROPOUT), V, V).train()
    set_recompute(model, RecomputeConfig(encoder=rule))
    source = torch.randint(4, V, (8, 16))
    x = model.source_embedding(source).detach()
    with _Alive(model.parameters()) as alive:
        memory = model.encoder(x, torch.ones(8, 16, dtype=torch.bool))
        kept = alive.bytes
    del memory
    return kept


@pytest.mark.slow
def test_less_is_kept_between_the_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    state = 8 * 16 * 8 * 4  # a tensor [batch, source, d_model]
    everything, every, half = (kept_by(12, rule) for rule in (None, 1, 2))
    assert everything > 12 * 12 * state
    assert every <= 16 * state  # the input of every layer, the stack's output, masks
    assert half == pytest.approx((everything + every) / 2, rel=0.1)
    shallow, deep = (kept_by(layers, "segments") for layers in (64, 256))
    assert deep / shallow < 2.2  # four times the layers


@pytest.mark.parametrize("value", [0, -1, "segment", True, 1.0])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(ValidationError):
        RecomputeConfig.model_validate({"encoder": value})


def test_a_rule_that_reaches_no_layer_is_noticed() -> None:
    model = {"encoder": {"layers": 3}, "decoder": {"layers": 2}}
    training = {"recompute": {"encoder": 3, "decoder": 3}}
    (found,) = notices(Experiment.model_validate({"data": DATA, "model": model, "training": training}))
    assert (found.key, found.severity) == ("training.recompute.decoder", "warning")
