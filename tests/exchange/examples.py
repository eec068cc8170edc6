"""Small models with random weights, and text for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests import vocabulary
from tests.small import moved
from ziggurat.config import ModelConfig
from ziggurat.data.subword import SentencePieceTokenizer
from ziggurat.model.build import build_model
from ziggurat.model.seq2seq import Seq2Seq

SENTENCES = [
    *vocabulary.SENTENCES,
    "  spare   blanks ",
    "Nobody stands here.",
    "The dog, the house and the bridge.",
]

SMALL: dict[str, Any] = {
    "d_model": 16,
    "d_ff": 24,
    "heads": 2,
    "encoder": {"layers": 2},
    "decoder": {"layers": 2},
    "embedding": {"output_bias": True, "sharing": "none"},
}


def random_model(config: ModelConfig, tokenizer: SentencePieceTokenizer, seed: int = 4) -> Seq2Seq:
    """Return a model moved away from its initial values; its output bias lets sentences end without control symbols."""
    model = moved(build_model(config, tokenizer.size, tokenizer.size, seed=seed), 0.2, seed).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("_residual.skip"):
            parameter.data += 1.5  # away from 0, because the inputs of a sub-layer are divided by it
    if model.output.bias is not None:
        with torch.no_grad():
            model.output.weight *= 4.0  # distributions far from flat, so that the best translation is not empty
            model.output.bias[tokenizer.eos] += 8.0
            model.output.bias[[tokenizer.pad, tokenizer.bos, *tokenizer.tags.values()]] = -1e4
    return model


def log_probabilities(model: Seq2Seq, source: list[int], target: list[int]) -> Tensor:
    """Return the model's own log-probabilities [target, V]."""
    with torch.inference_mode():
        ids = torch.tensor([source])
        memory = model.encode(ids, torch.ones_like(ids, dtype=torch.bool))
        return model.logits(model.decode(torch.tensor([target]), memory))[0].log_softmax(-1)
