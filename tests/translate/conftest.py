"""Fixtures: a trained tokenizer and tiny models for tests of translation."""

from __future__ import annotations

import pytest
import torch

from tests.small import small_config
from tests.translate.doubles import CopyModel
from tests.vocabulary import SENTENCES, trained_tokenizer
from ziggurat.config import DecodingConfig
from ziggurat.data.subword import SentencePieceTokenizer
from ziggurat.model.build import build_model
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.translate.translator import Translator


@pytest.fixture(scope="session")
def tokenizer() -> SentencePieceTokenizer:
    return trained_tokenizer(SENTENCES, 360, ["<bt>", "<new>"])


@pytest.fixture
def copying(tokenizer: SentencePieceTokenizer) -> Translator:
    """A model that returns its source."""
    model = CopyModel(tokenizer.size + 2, tokenizer.eos, frozenset(tokenizer.tags.values()))
    return Translator(model, tokenizer, tokenizer, DecodingConfig(beam_size=2))  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def tiny_model(tokenizer: SentencePieceTokenizer) -> Seq2Seq:
    """An untrained model in double precision, with distributions far from flat and a likely end at every position."""
    config = small_config(2, 2, d_model=16, d_ff=32, embedding={"sharing": "none"})
    model = build_model(config, tokenizer.size, tokenizer.size).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
        # A constant part of the decoder's states, to which the output row for end of sentence responds.
        constant = torch.linspace(-1, 1, 16, dtype=torch.float64)
        assert isinstance(model.decoder.final_norm, torch.nn.LayerNorm)
        model.decoder.final_norm.bias.copy_(constant)
        model.output.weight[tokenizer.eos] = 4 * constant / constant.square().sum()
    return model
