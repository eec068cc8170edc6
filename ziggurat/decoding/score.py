"""One model as a scorer for the search, and forced scoring by one or several: the probability of given targets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ziggurat.decoding.batches import length_batches, padded
from ziggurat.decoding.shortlist import Shortlist, ShortlistedOutput
from ziggurat.models.seq2seq import Seq2Seq

__all__ = ["ForcedScore", "ModelScorer", "force_score", "log_mean_probability", "log_probabilities"]

_LOGIT_ROWS = 1024
"""Target tokens whose logits [rows, vocabulary] exist at a time in forced scoring."""


class ModelScorer:
    """The scorer (decoding.scorer.Scorer) of a single model.

    Args:
        model: the model.
        shortlist: tokens that a sentence's source does not allow get no score (-inf), and no time.
    """

    def __init__(self, model: Seq2Seq, shortlist: Shortlist | None = None) -> None:
        self.model = model
        self._shortlist = shortlist
        self._output: ShortlistedOutput | None = None
        self.vocabulary_size = model.vocabulary_size
        self._state = model.start(1, 1)

    @property
    def attention(self) -> Tensor | None:
        """Last layer's cross-attention [N, K, S] at the last step, mean over heads; None if not kept."""
        return self._state.cross_attention

    def start(self, beam_size: int, slots: int, *, keep_attention: bool = False) -> None:
        """Begin with no sentence."""
        self._state = self.model.start(beam_size, slots, keep_attention=keep_attention)
        if self._shortlist is not None:
            self._output = ShortlistedOutput(self.model.output, self._shortlist)

    def admit(self, source: Tensor, source_mask: Tensor, max_steps: int) -> None:
        """Encode source ids [n, S]; caches grow with the steps, whatever the most is."""
        self.model.admit(self.model.encode(source, source_mask), self._state)
        if self._output is not None:
            self._output.admit(source, source_mask)

    def step(self, tokens: Tensor) -> Tensor:
        """Return logits [N, K, V] of the token after `tokens` [N, K]."""
        if self._output is None:
            return self.model.step(tokens, self._state)
        return self._output(self.model.advance(tokens, self._state), tokens.shape[1])

    def follow(self, parents: Tensor) -> None:
        """Let beam k of sentence i continue its old beam `parents`[i, k]."""
        self._state.follow(parents)

    def keep(self, sentences: Tensor) -> None:
        """Keep `sentences` [N'] of the batch."""
        self._state.keep(sentences)
        if self._output is not None:
            self._output.keep(sentences)


@dataclass(frozen=True)
class ForcedScore:
    """Log-probabilities (natural logarithm) of one given target, end-of-sentence included."""

    log_probability: float
    token_log_probabilities: list[float]


@torch.inference_mode()
def force_score(
    model: Seq2Seq | Sequence[Seq2Seq],
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    *,
    bos: int,
    eos: int,
    pad: int,
    batch_tokens: int = 4096,
    device: torch.device | str = "cpu",
) -> list[ForcedScore]:
    """Return the score of each target given its source, in the order of the input.

    model: one model, or an ensemble: then a token's probability is the mean of what its members give it.
    sources, targets: ids without begin- and end-of-sentence; batch_tokens: most tokens per batch, padding
    counted, on the longer side. Raises ValueError for unequal numbers of sources and targets.
    """
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} sources, but {len(targets)} targets")
    members = model if isinstance(model, Sequence) else [model]
    scores: dict[int, ForcedScore] = {}
    lengths = [max(len(s), len(t)) + 1 for s, t in zip(sources, targets, strict=True)]
    for batch in length_batches(lengths, batch_tokens):
        source, source_mask = padded([[*sources[i], eos] for i in batch], pad, device)
        target_in, _ = padded([[bos, *targets[i]] for i in batch], pad, device)
        target, target_mask = padded([[*targets[i], eos] for i in batch], pad, device)
        of_members = []
        for member in members:
            hidden = member.decode(target_in, member.encode(source, source_mask))
            of_members.append(_of_targets(member, hidden[target_mask], target[target_mask]))
        tokens = log_mean_probability(of_members)
        for i, row in zip(batch, tokens.split(target_mask.sum(1).tolist()), strict=True):
            scores[i] = ForcedScore(float(row.double().sum()), row.tolist())
    return [scores[i] for i in range(len(sources))]


def log_probabilities(scores: Tensor) -> Tensor:
    """Return the log-softmax of scores [..., V], in fp32 or wider."""
    wide = torch.float32 if scores.dtype in (torch.bfloat16, torch.float16) else scores.dtype
    return scores.log_softmax(-1, dtype=wide)


def log_mean_probability(members: Iterable[Tensor]) -> Tensor:
    """Return log((p_1 + ... + p_K) / K) for the log-probabilities log p_k of K >= 1 models, all of one shape.

    The sum never leaves the logarithm: what is too unlikely for a float as a probability keeps its score.
    """
    remaining = iter(members)
    total, count = next(remaining), 1
    for member in remaining:
        total, count = torch.logaddexp(total, member), count + 1
    return total - math.log(count)


def _of_targets(model: Seq2Seq, hidden: Tensor, target: Tensor) -> Tensor:
    """Return log p(target) [tokens] after decoder states `hidden` [tokens, D], in chunks of tokens."""
    chunks = []
    for states, wanted in zip(hidden.split(_LOGIT_ROWS), target.split(_LOGIT_ROWS), strict=True):
        chunks.append(log_probabilities(model.logits(states)).gather(-1, wanted[:, None])[:, 0])
    return torch.cat(chunks)
