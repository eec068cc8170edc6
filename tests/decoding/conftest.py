"""A trained tokenizer and tiny models for the tests of translation."""

from __future__ import annotations

import io

import pytest
import sentencepiece
import torch
from doubles import CopyModel

from tests.small import small_config
from ziggurat.config import DecodingConfig
from ziggurat.data.subword import SentencePieceTokenizer
from ziggurat.decoding.translator import Translator
from ziggurat.models.build import build_model
from ziggurat.models.seq2seq import Seq2Seq

SENTENCES = [
    "The little house stands by the river.",
    "A dog runs over the green meadow!",
    "Where is the old bridge? Nobody knows.",
    "Two children, three books and 17 apples; that is all.",
    'She said: "We will meet tomorrow."',
]


@pytest.fixture(scope="session")
def tokenizer() -> SentencePieceTokenizer:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 3),
        model_writer=model,
        model_type="bpe",
        vocab_size=360,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        pad_id=0,
        unk_id=1,
        bos_id=2,
        eos_id=3,
        minloglevel=2,
    )
    return SentencePieceTokenizer(model.getvalue(), tags=["<bt>", "<new>"])


@pytest.fixture
def copying(tokenizer: SentencePieceTokenizer) -> Translator:
    """Gives the source back."""
    model = CopyModel(tokenizer.size + 2, tokenizer.eos, frozenset(tokenizer.tags.values()))
    return Translator(model, tokenizer, tokenizer, DecodingConfig(beam_size=2))  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def tiny_model(tokenizer: SentencePieceTokenizer) -> Seq2Seq:
    """An untrained model in double precision: distributions far from flat, and ends that are likely everywhere."""
    config = small_config(2, 2, d_model=16, d_ff=32, embedding={"sharing": "none"})
    model = build_model(config, tokenizer.size, tokenizer.size).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
        # A constant part of the decoder's states, which the end of a sentence's row of the output matrix picks up.
        constant = torch.linspace(-1, 1, 16, dtype=torch.float64)
        assert isinstance(model.decoder.final_norm, torch.nn.LayerNorm)
        model.decoder.final_norm.bias.copy_(constant)
        model.output.weight[tokenizer.eos] = 4 * constant / constant.square().sum()
    return model
