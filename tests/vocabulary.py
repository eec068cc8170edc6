"""A few sentences, and a small vocabulary trained on them."""

from __future__ import annotations

import io
from collections.abc import Sequence

import sentencepiece

from ziggurat.data.subword import SentencePieceTokenizer

SENTENCES = (
    "The little house stands by the river.",
    "A dog runs over the green meadow!",
    "Where is the old bridge? Nobody knows.",
    "Two children, three books and 17 apples; that is all.",
    'She said: "We will meet tomorrow."',
)


def trained_tokenizer(
    sentences: Sequence[str], size: int, tags: Sequence[str], *, byte_fallback: bool = True
) -> SentencePieceTokenizer:
    """A joint BPE vocabulary of at most `size` pieces, plus `tags`."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*sentences] * 3),
        model_writer=model,
        model_type="bpe",
        vocab_size=size,
        byte_fallback=byte_fallback,
        character_coverage=1.0,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        pad_id=0,
        unk_id=1,
        bos_id=2,
        eos_id=3,
        minloglevel=2,
    )
    return SentencePieceTokenizer(model.getvalue(), tags=tags)
