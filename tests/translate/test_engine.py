"""Models prepared for fast decoding: the same scores for any architecture; what a device cannot do is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.small import merged
from ziggurat.config import ModelConfig
from ziggurat.config.kinds import HistoryKind, ResidualKind
from ziggurat.model.attention import cache as cache_module
from ziggurat.model.attention import cache as live_module
from ziggurat.model.build import build_model
from ziggurat.model.fast import compiled, packed
from ziggurat.model.fast.compiled import Precision
from ziggurat.model.fast.packed import available, make_fast
from ziggurat.model.fast.precision import decoding_notice, settled
from ziggurat.model.linear import Linear
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.system.errors import ConfigError
from ziggurat.train.objective import autocast
from ziggurat.translate.scorers import ModelScorer
from ziggurat.translate.search import Search, search
from ziggurat.translate.settings import SearchSettings, Sentence

SIZES: dict[str, Any] = {"d_model": 32, "d_ff": 64, "heads": 2, "encoder": {"layers": 2}}
KINDS: dict[str, dict[str, Any]] = {
    "post": {"residual": "post", "decoder": {"layers": 2}},
    "pre": {"residual": "pre", "decoder": {"layers": 2}},
    "relative": {"residual": "pre", "decoder": {"layers": 2, "attention": "relative"}},
    "rotary": {"embedding": {"positions": "rotary"}, "decoder": {"layers": 2}},
    "average": {"residual": "pre", "decoder": {"layers": 2, "attention": "average"}},
    "merged": {"residual": "pre", "decoder": {"layers": 2, "attention": "merged"}},
    "shared values": {"decoder": {"layers": 2, "attention": "merged"}, "attention": {"share_value": True}},
    "dlcl": {"residual": "pre", "decoder": {"layers": 2, "history": "dlcl"}},
    "transparent": {"residual": "pre", "decoder": {"layers": 2}, "memory": "transparent"},
    "gelu": {"activation": "gelu", "decoder": {"layers": 2}},
    "swiglu": {"activation": "swiglu", "decoder": {"layers": 2}},
    "fixup": {"residual": "fixup", "init": {"kind": "fixup"}, "decoder": {"layers": 2}},
    "lengths": {"norm": "scale", "embedding": {"unit_length": True}, "decoder": {"layers": 2}},
    "modules": {
        "memory": "hierarchical",
        "combination": {"period": 1},
        "encoder": {"layers": 2, "solver": "rk2_gated"},
        "decoder": {"layers": 2, "history": "cross_module"},
    },
    "tied": {"encoder": {"layers": 2, "tied_layers": [1]}, "decoder": {"layers": 3, "tied_layers": [1, 2, 1]}},
    "rnmt": {
        "family": "rnmt",
        "decoder": {"layers": 2},
        "embedding": {"positions": "none", "sharing": "none"},
    },
}


def model(kind: str) -> Seq2Seq:
    values = {**SIZES, **KINDS[kind]}
    return build_model(ModelConfig.model_validate(values), 61, 61, seed=3).eval()


@torch.no_grad()
def scores(built: Seq2Seq) -> Tensor:
    """Return logits for six steps of two sentences whose beams swap places."""
    scorer = ModelScorer(built)
    scorer.start(3, 2)
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    scorer.admit(torch.arange(14).view(2, 7) % 50 + 5, mask, 9)
    found = []
    for step in range(12):
        tokens = torch.full((2, 3), 2) if step == 0 else (torch.arange(6).view(2, 3) * 7 + step) % 50 + 5
        found.append(scorer.step(tokens).clone())
        scorer.follow(torch.tensor([[1, 0, 2], [2, 2, 0]]))
    return torch.stack(found)


@pytest.mark.parametrize("precision", [p for p in ("float32", "bfloat16", "int8") if available(p)])
@pytest.mark.parametrize("kind", KINDS)
def test_fast_models_score_as_the_plain_one(kind: str, precision: Precision, monkeypatch: pytest.MonkeyPatch) -> None:
    built = model(kind)
    with monkeypatch.context() as without:
        without.setattr(compiled, "_library", None)
        plain = scores(built)
    make_fast(built, precision)
    error = (scores(built) - plain).norm() / plain.norm()
    assert float(error) < (1e-5 if precision == "float32" else 4e-2)
    assert precision == "float32" or float(error) > 1e-4  # a different precision


@pytest.mark.slow
def test_a_packed_model_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole searches over several blocks of the caches, while sentences of different lengths enter and leave."""
    sentences = [Sentence([5 + n, *range(6, 6 + n), 7 + n, 3], 45 - 5 * n) for n in range(7)]
    settings = SearchSettings(4, 2, 2, 3, forbidden=(0, 1, 2), batch_sentences=3)
    for kind in ("pre", "rotary", "merged"):
        built = model(kind)
        with monkeypatch.context() as without:
            without.setattr(compiled, "_library", None)
            plain = search(ModelScorer(built), sentences, settings)
        for again in (search(ModelScorer(built), sentences, settings), None):
            if again is None:
                make_fast(built, "float32")
                again = search(ModelScorer(built), sentences, settings)
            assert [[h.tokens for h in each] for each in again] == [[h.tokens for h in each] for each in plain]


def test_models_whose_stream_is_bf16_are_searched() -> None:
    """Under autocast the encoder's output may be bf16, and masks with it."""
    sentences = [Sentence([5 + n, 6, 7 + n, 3], 6) for n in range(4)]
    settings = SearchSettings(2, 1, 2, 3, forbidden=(0, 1, 2))
    none = build_model(ModelConfig.model_validate({**SIZES, "residual": "none"}), 61, 61, seed=3).eval()
    with autocast(torch.device("cpu"), "bf16"):
        assert len(search(ModelScorer(none), sentences, settings)) == 4


@pytest.mark.parametrize(
    "choices",
    [
        *KINDS.values(),
        *({"residual": kind} for kind in get_args(ResidualKind)),
        *({stack: {"history": kind}} for kind in get_args(HistoryKind) for stack in ("encoder", "decoder")),
        *({"encoder": {"solver": kind}} for kind in ("rk2_gated", "rk4")),
        {"norm": "scale", "embedding": {"unit_length": True}, "memory": "hierarchical"},
        {"encoder": {"tied_layers": [1]}, "decoder": {"layers": 3, "tied_layers": [1, 2, 1]}},
    ],
    ids=str,
)
def test_models_that_are_bf16_throughout_translate(choices: dict[str, Any]) -> None:
    """As on a GPU with `precision: bfloat16`: fp32 results inside a kind must not reach maps and norms in bf16."""
    sentences = [Sentence([5 + n, 6, 7 + n, 3], 6) for n in range(4)]
    settings = SearchSettings(2, 1, 2, 3, forbidden=(0, 1, 2), batch_sentences=3)
    deep = {**SIZES, "decoder": {"layers": 3}, "combination": {"period": 2}}
    config = ModelConfig.model_validate(merged(deep, choices))
    built = build_model(config, 61, 61, seed=3).eval().bfloat16()
    types = set[torch.dtype]()
    for module in built.modules():
        if isinstance(module, Linear | nn.LayerNorm):  # a CPU would accept fp32 there, where CUDA accepts one type
            module.register_forward_pre_hook(lambda _, inputs: types.add(inputs[0].dtype))
    assert len(search(ModelScorer(built), sentences, settings)) == 4
    assert types <= {torch.bfloat16}


@torch.no_grad()
def test_caches_take_memory_for_sentences_live_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot is as long as the longest sentence; few other sentences are live then, so not all slots have memory."""
    for module in (cache_module, live_module):
        monkeypatch.setattr(module, "BLOCK", 3)
    lengths = [18, *[1] * 40]
    sentences = [Sentence([*range(5, 4 + n), 3], n, n) for n in lengths]
    scorer = ModelScorer(model("pre"))
    running = Search(scorer, sentences, SearchSettings(2, 1, 2, 3, forbidden=(0, 1, 2), batch_tokens=36))
    assert running.waiting.slots == 36
    found, held, needed = dict[int, Any](), 0, 0
    while len(found) < len(sentences):
        found |= running.step()
        layer = scorer._state.cache.layers[0]  # type: ignore[attr-defined]
        live = layer.own.live
        held = max(held, sum(len(block.key) for block in layer.own._blocks))
        needed = max(needed, live.count * (1 + live.longest // 3))
    assert held <= 3 * needed
    assert live.room == len(layer.cross._buffers[0])
    assert [len(found[n][0].tokens) for n in range(len(sentences))] == lengths


class _Waits(TorchDispatchMode):
    """Counts the operators whose results depend on numbers on a GPU, so that the CPU would have to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = [i for i in args[1] if i is not None and i.dtype == torch.bool] if "index" in str(func) else []
        if masks or func in (torch.ops.aten.nonzero.default, torch.ops.aten._local_scalar_dense.default):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_no_layer_waits_for_the_device_in_a_step(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cache_module, live_module):
        monkeypatch.setattr(module, "BLOCK", 3)
    scorer, mask = ModelScorer(model(kind)), torch.ones(1, 4, dtype=torch.bool)
    scorer.start(2, 2)
    with torch.no_grad():
        for step in range(9):
            if step in (0, 4):  # the second sentence is one block shorter than the first
                scorer.admit(torch.tensor([[5, 6, 7, 3]]), mask, 9)
            with _Waits() as waits:
                scorer.step(torch.full((1 if step < 4 else 2, 2), 5))
            assert waits.found == []


def test_unsupported_settings_of_a_device_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "available", lambda precision: False)
    built = model("pre")
    make_fast(built, "float32")  # stays unchanged
    assert type(built.output).__name__ == "OutputProjection"
    with pytest.raises(ConfigError, match=r"decoding\.precision: int8.*VNNI"):
        make_fast(built, "int8")
    with pytest.raises(ConfigError, match=r"decoding\.precision: bfloat16.*AVX-512-BF16"):
        make_fast(built, "bfloat16")


def test_the_requested_one_of_several_gpus_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one here is too old for bf16, the second is not."""
    current = [0]

    @contextmanager
    def made_current(device: torch.device) -> Iterator[None]:
        current.append(device.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", made_current)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: current[-1] == 1)
    old, new, widths = torch.device("cuda:0"), torch.device("cuda:1"), (64, 128)
    assert [settled("auto", gpu, widths, []) for gpu in (old, new)] == ["float32", "bfloat16"]
    assert settled("bfloat16", new, widths, []) == "bfloat16"
    with pytest.raises(ConfigError, match=r"decoding\.precision: bfloat16.*Ampere"):
        settled("bfloat16", old, widths, [])
    notices = [decoding_notice("float32", "float32", gpu, widths) for gpu in (old, new)]
    assert notices == ["", "this GPU is faster in bfloat16 than in float32: `precision=bfloat16`"]
    assert decoding_notice("float32", "float32", new, widths, hints=False) == ""
