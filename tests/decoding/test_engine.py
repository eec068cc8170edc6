"""Models made fast: the same scores, whatever the architecture; what a device cannot do is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ziggurat.config import ModelConfig
from ziggurat.decoding.request import SearchSettings, Sentence
from ziggurat.decoding.scorers import ModelScorer
from ziggurat.decoding.search import search
from ziggurat.errors import ConfigError
from ziggurat.models.build import build_model
from ziggurat.models.seq2seq import Seq2Seq
from ziggurat.nn import compiled, packed
from ziggurat.nn.compiled import Precision
from ziggurat.nn.packed import available, make_fast
from ziggurat.training.objective import autocast

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
    """Logits of six steps of two sentences whose beams change places."""
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
    assert precision == "float32" or float(error) > 1e-4  # it is another precision


@pytest.mark.slow
def test_a_packed_model_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole searches with sentences of unlike lengths, which enter and leave, over several blocks of the caches."""
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
    """Under autocast the encoder's output may be bf16, and masks with it; a whole model of bf16 takes nothing else."""
    sentences = [Sentence([5 + n, 6, 7 + n, 3], 6) for n in range(4)]
    settings = SearchSettings(2, 1, 2, 3, forbidden=(0, 1, 2))
    none = build_model(ModelConfig.model_validate({**SIZES, "residual": "none"}), 61, 61, seed=3).eval()
    with autocast(torch.device("cpu"), "bf16"):
        assert len(search(ModelScorer(none), sentences, settings)) == 4
    assert len(search(ModelScorer(model("pre").bfloat16()), sentences, settings)) == 4


def test_what_the_device_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "available", lambda precision: False)
    built = model("pre")
    make_fast(built, "float32")  # stays as it is
    assert type(built.output).__name__ == "OutputProjection"
    with pytest.raises(ConfigError, match=r"decoding\.precision: int8.*VNNI"):
        make_fast(built, "int8")
    with pytest.raises(ConfigError, match=r"decoding\.precision: bfloat16.*AVX-512-BF16"):
        make_fast(built, "bfloat16")
