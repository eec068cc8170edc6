"""Several models as one: the next token's probability is the mean of theirs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ziggurat.data.subword import load_tokenizers, same_vocabulary
from ziggurat.decoding.beam import Scorer
from ziggurat.decoding.score import ModelScorer, log_mean_probability, log_probabilities
from ziggurat.errors import ConfigError
from ziggurat.models.directory import CHECKPOINTS, OpenedModel, open_model
from ziggurat.models.seq2seq import Seq2Seq

__all__ = ["EnsembleScorer", "open_members", "scorer_of"]


class EnsembleScorer:
    """The scorer (decoding.beam.Scorer) of an ensemble: p(token) = (p_1(token) + ... + p_K(token)) / K.

    This is what zero and fairseq do. The members may differ in depth, width and architecture, since all that they
    share is the sequence of tokens: each has its own memory and caches.

    Args:
        models: the members, on one device.
        keep_attention: needed for a coverage penalty.

    Raises ValueError for no models, or for models with different numbers of target tokens.
    """

    def __init__(self, models: Sequence[Seq2Seq], *, keep_attention: bool = False) -> None:
        sizes = [model.vocabulary_size for model in models]
        if len(set(sizes)) != 1:
            raise ValueError(f"an ensemble needs models with one target vocabulary, not with sizes {sizes}")
        self.vocabulary_size = sizes[0]
        self._scorers = [ModelScorer(model, keep_attention=keep_attention) for model in models]

    @property
    def attention(self) -> Tensor | None:
        """Attention [B, K, S] of the last step, mean over the members that offer it; None if none does."""
        offered = [weights for scorer in self._scorers if (weights := scorer.attention) is not None]
        return torch.stack(offered).mean(0) if offered else None

    def start(self, source: Tensor, source_mask: Tensor, beam_size: int) -> None:
        """Let every member encode source ids [B, S]."""
        for scorer in self._scorers:
            scorer.start(source, source_mask, beam_size)

    def step(self, tokens: Tensor) -> Tensor:
        """Return log-probabilities [B, K, V] of the token after `tokens` [B, K], in fp32 or wider."""
        return log_mean_probability(log_probabilities(scorer.step(tokens)) for scorer in self._scorers)

    def reorder(self, sentences: Tensor, parents: Tensor) -> None:
        """Keep `sentences` [B'] and let beam k of row i continue old beam `parents`[i, k], in every member."""
        for scorer in self._scorers:
            scorer.reorder(sentences, parents)


def scorer_of(models: Sequence[Seq2Seq], *, keep_attention: bool = False) -> Scorer:
    """Return the scorer of one model, or of the ensemble of several; see EnsembleScorer."""
    if len(models) == 1:
        return ModelScorer(models[0], keep_attention=keep_attention)
    return EnsembleScorer(models, keep_attention=keep_attention)


def open_members(paths: Sequence[str | Path], *, which: str | None = None, device: str = "auto") -> list[OpenedModel]:
    """Open runs or model directories that translate together; `device` as in open_model.

    `which` (as in open_model) holds for every run among them: a model directory has only one model. Raises
    ConfigError for no path, or for two models whose vocabularies are not the same on both sides, and what open_model
    raises.
    """
    if not paths:
        raise ConfigError("name at least one run or model directory")
    runs = {path for path in paths if (Path(path) / CHECKPOINTS).is_dir()}
    opened = [open_model(path, which=which if path in runs or not runs else None, device=device) for path in paths]
    first = load_tokenizers(opened[0].directory)
    for path, model in zip(paths[1:], opened[1:], strict=True):
        for side, ours, theirs in zip(("source", "target"), first, load_tokenizers(model.directory), strict=True):
            if not same_vocabulary(ours, theirs):
                raise ConfigError(
                    f"{path}: its {side} vocabulary is not that of {paths[0]}; the models of an ensemble need the same "
                    "ones (prepare the data of one with the other's: `data.subword.kind: existing`)"
                )
    return opened
