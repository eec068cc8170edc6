"""Several models as one: the next token's probability is the mean of theirs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ziggurat.data.subword import load_tokenizers, same_vocabulary
from ziggurat.decoding.score import ModelScorer, log_mean_probability, log_probabilities
from ziggurat.decoding.scorer import Scorer
from ziggurat.decoding.shortlist import Shortlist
from ziggurat.errors import ConfigError
from ziggurat.models.directory import CHECKPOINTS, OpenedModel, open_model
from ziggurat.models.seq2seq import Seq2Seq

__all__ = ["EnsembleScorer", "open_members", "scorer_of"]


class EnsembleScorer:
    """The scorer (decoding.scorer.Scorer) of an ensemble: p(token) = (p_1(token) + ... + p_K(token)) / K.

    This is what zero and fairseq do. The members may differ in depth, width and architecture, since all that they
    share is the sequence of tokens: each has its own memory and caches.

    Args:
        members: their scorers, on one device.

    Raises ValueError for no members, or for members with different numbers of target tokens.
    """

    def __init__(self, members: Sequence[Scorer]) -> None:
        sizes = [member.vocabulary_size for member in members]
        if len(set(sizes)) != 1:
            raise ValueError(f"an ensemble needs models with one target vocabulary, not with sizes {sizes}")
        self.vocabulary_size = sizes[0]
        self._members = members

    @property
    def attention(self) -> Tensor | None:
        """Attention [N, K, S] of the last step, mean over the members that offer it; None if none does."""
        offered = [weights for member in self._members if (weights := member.attention) is not None]
        if not offered:
            return None
        width = min(weights.shape[2] for weights in offered)  # of the longest live source; what is beyond it is 0
        return torch.stack([weights[..., :width] for weights in offered]).mean(0)

    def start(self, beam_size: int, slots: int, *, keep_attention: bool = False) -> None:
        """Begin with no sentence, in every member."""
        for member in self._members:
            member.start(beam_size, slots, keep_attention=keep_attention)

    def admit(self, source: Tensor, source_mask: Tensor, max_steps: int) -> None:
        """Let every member encode source ids [n, S]."""
        for member in self._members:
            member.admit(source, source_mask, max_steps)

    def step(self, tokens: Tensor) -> Tensor:
        """Return log-probabilities [N, K, V] of the token after `tokens` [N, K], in fp32 or wider."""
        return log_mean_probability(log_probabilities(member.step(tokens)) for member in self._members)

    def follow(self, parents: Tensor) -> None:
        """Let beam k of sentence i continue its old beam `parents`[i, k], in every member."""
        for member in self._members:
            member.follow(parents)

    def keep(self, sentences: Tensor) -> None:
        """Keep `sentences` [N'] in every member."""
        for member in self._members:
            member.keep(sentences)


def scorer_of(models: Sequence[Seq2Seq], shortlist: Shortlist | None = None) -> Scorer:
    """Return the scorer of one model, or of the ensemble of several (see EnsembleScorer), all with one shortlist."""
    scorers = [ModelScorer(model, shortlist) for model in models]
    return scorers[0] if len(scorers) == 1 else EnsembleScorer(scorers)


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
