"""Search with a lexical shortlist equals search with scores of -inf for everything else, in any batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.small import moved, small_config
from ziggurat.config import DecodingConfig
from ziggurat.data.shortlist import ShortlistTable
from ziggurat.data.subword import SentencePieceTokenizer
from ziggurat.model.build import build_model
from ziggurat.model.fast.packed import make_fast
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.system.errors import ConfigError
from ziggurat.translate.scorers import ModelScorer, Shortlist, scorer_of
from ziggurat.translate.search import search
from ziggurat.translate.settings import SearchSettings, Sentence
from ziggurat.translate.translator import Translator

PAD, BOS, EOS, SIZE, ROWS = 0, 2, 3, 14, 16
WANTED = SearchSettings(3, 2, bos=BOS, eos=EOS, forbidden=(PAD, BOS, 14, 15))
CANDIDATES = np.random.default_rng(3).integers(4, SIZE + 1, (ROWS, 3)).astype(np.int32)
TABLE = ShortlistTable(CANDIDATES, np.array([1, EOS, 5], np.int32), ("", ""))
SOURCES = st.lists(st.lists(st.integers(4, 13), min_size=1, max_size=5), min_size=1, max_size=5)


def small_model(seed: int = 1) -> Seq2Seq:
    return moved(build_model(small_config(1, 2), ROWS, ROWS, seed=seed), 0.4, seed).eval()


MODELS = [small_model(seed).double() for seed in (1, 2)]


class Plain(ModelScorer):
    """Compute all scores, then set those to -inf that a sentence's own source does not allow, token by token."""

    def start(self, beam_size: int, slots: int, *, keep_attention: bool = False) -> None:
        super().start(beam_size, slots, keep_attention=keep_attention)
        self.sources: list[list[int]] = []

    def admit(self, source: Tensor, source_mask: Tensor, max_steps: int) -> None:
        super().admit(source, source_mask, max_steps)
        self.sources += [row[real].tolist() for row, real in zip(source, source_mask, strict=True)]

    def keep(self, sentences: Tensor) -> None:
        super().keep(sentences)
        self.sources = [self.sources[row] for row in sentences.tolist()]

    def step(self, tokens: Tensor) -> Tensor:
        scores = super().step(tokens).clone()
        for row, source in enumerate(self.sources):
            allowed = {1, EOS, 5} | {int(c) for token in source for c in CANDIDATES[token]}
            for token in range(ROWS):
                if token not in allowed or token >= SIZE:
                    scores[row, :, token] = -torch.inf
        return scores


def sentences(sources: list[list[int]]) -> list[Sentence]:
    return [Sentence([*row, EOS], len(row) + 3) for row in sources]


@settings(max_examples=15)
@given(SOURCES)
def test_search_equals_that_with_everything_else_forbidden(sources: list[list[int]]) -> None:
    wanted = SearchSettings(3, 2, bos=BOS, eos=EOS, forbidden=WANTED.forbidden, batch_sentences=3)
    shortlist = Shortlist(TABLE, SIZE)
    found = search(ModelScorer(MODELS[0], shortlist), sentences(sources), wanted)
    plain = search(Plain(MODELS[0]), sentences(sources), wanted)
    for ours, theirs in zip(found, plain, strict=True):
        assert [h.tokens for h in ours] == [h.tokens for h in theirs]
        assert [h.score for h in ours] == pytest.approx([h.score for h in theirs], abs=1e-9)


@pytest.mark.slow
@settings(max_examples=15)
@given(SOURCES)
def test_results_do_not_depend_on_the_other_sentences(sources: list[list[int]]) -> None:
    scorer = scorer_of(MODELS, Shortlist(TABLE, SIZE))
    together = search(scorer, sentences(sources), WANTED)
    for each, found in zip(sentences(sources), together, strict=True):
        (alone,) = search(scorer, [each], WANTED)
        assert [h.tokens for h in found] == [h.tokens for h in alone]
        assert [h.score for h in found] == pytest.approx([h.score for h in alone], abs=1e-9)


@pytest.mark.parametrize("packed", [False, True])
def test_a_full_shortlist_changes_nothing(packed: bool) -> None:
    model = small_model()
    if packed:
        make_fast(model, "float32")
    nothing = ShortlistTable(np.full((ROWS, 1), ROWS, np.int32), np.arange(ROWS, dtype=np.int32), ("", ""))
    texts = sentences([[4, 5, 6], [7], [8, 9, 10, 11]])
    whole = search(ModelScorer(model), texts, WANTED)
    found = search(ModelScorer(model, Shortlist(nothing, ROWS)), texts, WANTED)
    assert [[h.tokens for h in row] for row in found] == [[h.tokens for h in row] for row in whole]
    for ours, theirs in zip(found, whole, strict=True):
        assert [h.score for h in ours] == pytest.approx([h.score for h in theirs], abs=1e-4)


def test_tokens_that_the_source_does_not_allow_cannot_be_requested(
    tiny_model: Seq2Seq, tokenizer: SentencePieceTokenizer
) -> None:
    translator = Translator(tiny_model, tokenizer, tokenizer, DecodingConfig(shortlist="list"))
    with pytest.raises(ConfigError, match=r"prefixes do not go with `decoding.shortlist`"):
        translator.translate(["A dog"], prefixes=["The"])
    with pytest.raises(ConfigError, match=r"constraints and terminology do not go with `decoding.shortlist`"):
        translator.translate(["A dog"], constraints=[["dog"]])
    for asked in ({"shortlist": "other"}, {"precision": "bfloat16"}):
        with pytest.raises(ConfigError, match="is set when a model is opened"):
            translator.translate(["A dog"], **asked)
