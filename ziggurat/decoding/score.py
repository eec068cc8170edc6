"""One model as a scorer for the search, and forced scoring by one or several: the probability of given targets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ziggurat.decoding.batches import length_batches, padded
from ziggurat.models.seq2seq import DecoderState, Seq2Seq

__all__ = ["ForcedScore", "ModelScorer", "force_score", "log_mean_probability", "log_probabilities"]

_LOGIT_ROWS = 1024
"""Target tokens whose logits [rows, vocabulary] exist at a time in forced scoring."""


class ModelScorer:
    """The scorer (decoding.scorer.Scorer) of a single model.

    A state of the model has all its sentences at one position, so sentences that entered together share one, and a
    step is one call of the model for each of these groups.
    """

    def __init__(self, model: Seq2Seq) -> None:
        self.model = model
        self.vocabulary_size = model.vocabulary_size
        self.attention: Tensor | None = None
        self.start(1, 1)

    def start(self, beam_size: int, slots: int, *, keep_attention: bool = False) -> None:
        """Begin with no sentence."""
        self._beam_size = beam_size
        self._keep_attention = keep_attention
        self._states: list[DecoderState] = []
        self._rows: list[Tensor] = []  # of each state: the row of the batch that each of its sentences is
        self.attention = None

    def admit(self, source: Tensor, source_mask: Tensor, max_steps: int) -> None:
        """Encode source ids [n, S]."""
        memory = self.model.encode(source, source_mask)
        first = sum(map(len, self._rows))
        self._states.append(self.model.start(memory, self._beam_size, keep_attention=self._keep_attention))
        self._rows.append(torch.arange(first, first + len(source), device=source.device))

    def step(self, tokens: Tensor) -> Tensor:
        """Return logits [N, K, V] of the token after `tokens` [N, K]."""
        logits = [self.model.step(tokens[rows], state) for state, rows in zip(self._states, self._rows, strict=True)]
        order = torch.cat(self._rows).argsort()
        self.attention = None
        weights = [state.cross_attention for state in self._states]
        if self._keep_attention and (offered := [w for w in weights if w is not None]):
            width = max(w.shape[2] for w in offered)
            padded_weights = [nn.functional.pad(w, (0, width - w.shape[2])) for w in offered]
            self.attention = torch.cat(padded_weights)[order]
        return torch.cat(logits)[order]

    def follow(self, parents: Tensor) -> None:
        """Let beam k of sentence i continue its old beam `parents`[i, k]."""
        for state, rows in zip(self._states, self._rows, strict=True):
            state.reorder(torch.arange(len(rows), device=rows.device), parents[rows])

    def keep(self, sentences: Tensor) -> None:
        """Keep `sentences` [N'] of the batch; a state that has none of them goes."""
        beams = torch.arange(self._beam_size, device=sentences.device)
        kept = []
        for state, rows in zip(self._states, self._rows, strict=True):
            new, old = (sentences[:, None] == rows).nonzero().unbind(1)
            if len(new):
                state.reorder(old, beams.expand(len(old), -1))
                kept.append((state, new))
        self._states = [state for state, _ in kept]
        self._rows = [rows for _, rows in kept]


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
