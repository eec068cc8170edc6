"""Scorers: the search's interface to a model or an ensemble, and forced scoring of given targets.

A search asks a `Scorer` for the scores of every next token, for sentences that enter and leave the batch and reorder
their beams.

Lexical shortlists restrict the search to target tokens that the source sentence allows (Jean et al. 2015).

Shapes: n new sentences, N live ones, K beams, S source, V vocabulary, U columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ziggurat.data.shortlist import ShortlistTable
from ziggurat.model.directory import OpenedModel, open_model, refuse_other_vocabulary
from ziggurat.model.embedding import OutputProjection
from ziggurat.model.fast.packed import PackedOutput
from ziggurat.model.run_folder import CHECKPOINTS
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.system.errors import ConfigError


class Shortlist:
    """Target tokens that source sentences allow.

    Args:
        table: candidates for each source id.
        size: number of target ids of the tokenizer; a model may have further rows, which are never allowed.
        device: device on which the masks are built.
    """

    def __init__(self, table: ShortlistTable, size: int, device: torch.device | str = "cpu") -> None:
        self.size = size
        self._candidates = torch.from_numpy(table.candidates).to(device)
        self._always = torch.from_numpy(table.always).to(device, torch.int64)

    def allowed(self, source: Tensor, source_mask: Tensor, vocabulary_size: int) -> Tensor:
        """Return bool [n, V] for source ids [n, S] (mask: True for real tokens): a function of each sentence alone."""
        # Column `size` is cleared below; the table's fillers and positions after a source's end write there. A model
        # without rows beyond the tokenizer's ids needs an extra column for it.
        mask = torch.zeros(len(source), vocabulary_size + 1, dtype=torch.bool, device=source.device)
        ids = self._candidates[source].masked_fill(~source_mask[..., None], self.size)
        mask.scatter_(1, ids.flatten(1).long(), True)
        mask[:, self._always] = True
        mask[:, self.size :] = False
        return mask[:, :-1]


class ShortlistedOutput:
    """Output projection for live sentences: one product over the union of their allowed tokens, -inf elsewhere.

    Args:
        output: the whole projection.
        shortlist: tokens that each sentence allows.
    """

    def __init__(self, output: OutputProjection | PackedOutput, shortlist: Shortlist) -> None:
        self._whole = output
        self._shortlist = shortlist
        vocabulary = output.weight.shape[0]
        self._allowed = torch.zeros(0, vocabulary, dtype=torch.bool, device=output.weight.device)
        self._columns = torch.zeros(0, dtype=torch.int64, device=output.weight.device)
        self._forbidden = self._allowed[:, :0]
        self._product: Callable[[Tensor], Tensor] = output
        self._scores: Tensor | None = None

    def admit(self, source: Tensor, source_mask: Tensor) -> None:
        """Append new sentences, ids [n, S], to the live ones."""
        new = self._shortlist.allowed(source, source_mask, self._allowed.shape[1])
        self._allowed = torch.cat((self._allowed, new))
        self._columns = self._allowed.any(0).nonzero()[:, 0]
        self._forbidden = ~self._allowed.index_select(1, self._columns)
        self._product = self._whole.restricted(self._columns)

    def keep(self, sentences: Tensor) -> None:
        """Make row i the old row `sentences`[i]."""
        # Unneeded columns stay until the next admission, because restricting the projection copies rows.
        sentences = sentences.to(self._allowed.device, non_blocking=True)
        self._allowed = self._allowed.index_select(0, sentences)
        self._forbidden = self._forbidden.index_select(0, sentences)

    def __call__(self, hidden: Tensor, beams: int) -> Tensor:
        """Return scores [N, `beams`, V] for hidden states [N, `beams` or 1, d], valid until the next call."""
        product = self._product(hidden)
        some = (product.float() if product.element_size() < torch.float32.itemsize else product).masked_fill_(
            self._forbidden[:, None], -math.inf
        )
        shape = (len(hidden), beams, self._allowed.shape[1])
        # The same memory at every step, because allocating it costs more than filling it.
        if self._scores is None or self._scores.dtype != some.dtype or self._scores.numel() < math.prod(shape):
            self._scores = some.new_empty(math.prod(shape))
        scores = self._scores[: math.prod(shape)].view(shape).fill_(-math.inf)
        return scores.index_copy_(2, self._columns, some.expand(-1, beams, -1))


class Scorer(Protocol):
    """A model, or several combined, with N live sentences of K beams each.

    Sentences enter and leave between steps, and each has a separate position: one may take its 30th step while another
    takes its first. Shapes: N live sentences, K beams, S source, V vocabulary.
    """

    @property
    def vocabulary_size(self) -> int:
        """Number V of tokens with a score."""

    @property
    def attention(self) -> Tensor | None:
        """Attention [N, K, S] to the source at the last step, 0 after a source's end; None when not available.

        It is the mean over the heads of the last layer. S is at least the length of the longest live source.
        """

    def start(self, beam_size: int, slots: int, *, keep_attention: bool = False) -> None:
        """Start without sentences; at most `slots` will be live at a time, each with `beam_size` beams."""

    def admit(self, source: Tensor, source_mask: Tensor, max_steps: int) -> None:
        """Encode new sentences, ids [n, S] (mask: True for real tokens), which follow the N live ones.

        Each of them takes at most `max_steps` steps.
        """

    def step(self, tokens: Tensor) -> Tensor:
        """Take the last tokens [N, K]; return scores [N, K, V] whose softmax gives the next token.

        For a new sentence, `tokens` is begin-of-sentence. Scores may be log-probabilities (which a softmax leaves
        unchanged) or logits, which are cheaper. The caller may overwrite the result, which is valid until the next
        step.
        """

    def follow(self, parents: Tensor) -> None:
        """Make beam k of sentence i continue its old beam `parents`[i, k]; [N, K]."""

    def keep(self, sentences: Tensor) -> None:
        """Keep only some sentences: make row i the old row `sentences`[i], [N'], a tensor on the CPU.

        The search fills the holes of leaving sentences with rows from the end, so `sentences`[i] is i for most.
        """


class EnsembleScorer:
    """Scorer of an ensemble of K models: p(token) = (p_1(token) + ... + p_K(token)) / K, as in zero and fairseq.

    The members may differ in depth, width and architecture: they share only the sequence of tokens.

    Args:
        members: scorers of the members, on one device.

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
        """Attention [N, K, S] of the last step, mean over the members that have it; None if none does."""
        offered = [weights for member in self._members if (weights := member.attention) is not None]
        if not offered:
            return None
        # Members may keep more source positions than the longest live source has; the rest of the weights are 0.
        width = min(weights.shape[2] for weights in offered)
        return torch.stack([weights[..., :width] for weights in offered]).mean(0)

    def start(self, beam_size: int, slots: int, *, keep_attention: bool = False) -> None:
        """Start without sentences, in every member."""
        for member in self._members:
            member.start(beam_size, slots, keep_attention=keep_attention)

    def admit(self, source: Tensor, source_mask: Tensor, max_steps: int) -> None:
        """Encode source ids [n, S] by every member."""
        for member in self._members:
            member.admit(source, source_mask, max_steps)

    def step(self, tokens: Tensor) -> Tensor:
        """Return log-probabilities [N, K, V] of the token after `tokens` [N, K], in fp32 or wider."""
        return log_mean_probability(log_probabilities(member.step(tokens)) for member in self._members)

    def follow(self, parents: Tensor) -> None:
        """Make beam k of sentence i continue its old beam `parents`[i, k], in every member."""
        for member in self._members:
            member.follow(parents)

    def keep(self, sentences: Tensor) -> None:
        """Keep rows `sentences` [N'] in every member."""
        for member in self._members:
            member.keep(sentences)


def scorer_of(models: Sequence[Seq2Seq], shortlist: Shortlist | None = None) -> Scorer:
    """Return the scorer of one model, or of an ensemble of several (see EnsembleScorer), all with one shortlist."""
    scorers = [ModelScorer(model, shortlist) for model in models]
    return scorers[0] if len(scorers) == 1 else EnsembleScorer(scorers)


def open_members(
    paths: Sequence[str | Path],
    *,
    which: str | None = None,
    device: str = "auto",
    without_layers: str | None = None,
) -> list[OpenedModel]:
    """Open runs or model directories that translate together; `device` and `without_layers` as in open_model.

    `which` (as in open_model) applies to every run among them; a model directory has only one model. Raises ConfigError
    for no path, or for models whose vocabularies or normalisations differ on either side, and the errors of open_model.
    """
    if not paths:
        raise ConfigError("name at least one run or model directory")
    # A checkpoint can be chosen only in a run; if it does not exist, open_model explains that.
    runs = {path for path in paths if (Path(path) / CHECKPOINTS).is_dir()}
    if without_layers is not None and len(paths) > 1:
        raise ConfigError("layers can be left out of one model, not of an ensemble: export the smaller model first")
    opened = [
        open_model(
            path, which=which if path in runs or not runs else None, device=device, without_layers=without_layers
        )
        for path in paths
    ]
    way_out = "an ensemble needs the same (prepare the data of one with the other's: `data.subword.kind: existing`)"
    for path, model in zip(paths[1:], opened[1:], strict=True):
        refuse_other_vocabulary(model.tokenizers, opened[0].tokenizers, str(path), str(paths[0]), way_out)
    return opened


_LOGIT_ROWS = 1024
"""_LOGIT_ROWS is the number of target tokens whose logits [rows, vocabulary] are in memory at a time in forced
scoring."""


class ModelScorer:
    """Scorer of a single model.

    Args:
        model: the model.
        shortlist: tokens that no live source allows are left out of the output projection, and others that a sentence
            forbids score -inf.
    """

    def __init__(self, model: Seq2Seq, shortlist: Shortlist | None = None) -> None:
        self.model = model
        self._shortlist = shortlist
        self._output: ShortlistedOutput | None = None
        self.vocabulary_size = model.vocabulary_size
        self._state = model.start(1, 1)

    @property
    def attention(self) -> Tensor | None:
        """The last layer's cross-attention [N, K, S] at the last step, mean over heads; None if not kept."""
        return self._state.cross_attention

    def start(self, beam_size: int, slots: int, *, keep_attention: bool = False) -> None:
        """Start without sentences."""
        self._state = self.model.start(beam_size, slots, keep_attention=keep_attention)
        if self._shortlist is not None:
            self._output = ShortlistedOutput(self.model.output, self._shortlist)

    def admit(self, source: Tensor, source_mask: Tensor, max_steps: int) -> None:
        """Encode source ids [n, S]; caches grow with the steps, so `max_steps` is ignored."""
        self.model.admit(self.model.encode(source, source_mask), self._state)
        if self._output is not None:
            self._output.admit(source, source_mask)

    def step(self, tokens: Tensor) -> Tensor:
        """Return logits [N, K, V] of the token after `tokens` [N, K]."""
        if self._output is None:
            return self.model.step(tokens, self._state)
        return self._output(self.model.advance(tokens, self._state), tokens.shape[1])

    def follow(self, parents: Tensor) -> None:
        """Make beam k of sentence i continue its old beam `parents`[i, k]."""
        self._state.follow(parents)

    def keep(self, sentences: Tensor) -> None:
        """Keep rows `sentences` [N'] of the batch."""
        self._state.keep(sentences)
        if self._output is not None:
            self._output.keep(sentences)


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
) -> list[list[float]]:
    """Return the log-probability of each token of each target given its source, end-of-sentence included.

    They are natural logarithms, in the order of the input. `model` is one model, or the members of an ensemble (see
    EnsembleScorer); `sources` are ids with end-of-sentence, `targets` without it. A batch has at most `batch_tokens`
    tokens on its longer side, including padding.

    Raises ValueError for unequal numbers of sources and targets.
    """
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} sources, but {len(targets)} targets")
    members = model if isinstance(model, Sequence) else [model]
    scores: dict[int, list[float]] = {}
    lengths = [max(len(s), len(t) + 1) for s, t in zip(sources, targets, strict=True)]
    for batch in length_batches(lengths, batch_tokens):
        # The mask hides the padding, which must be an id of the source vocabulary; the target's `pad` may not exist
        # there.
        source, source_mask = padded([sources[i] for i in batch], sources[batch[0]][-1], device)
        target_in, _ = padded([[bos, *targets[i]] for i in batch], pad, device)
        target, target_mask = padded([[*targets[i], eos] for i in batch], pad, device)
        of_members = []
        for member in members:
            hidden = member.decode(target_in, member.encode(source, source_mask))
            of_members.append(_of_targets(member, hidden[target_mask], target[target_mask]))
        tokens = log_mean_probability(of_members).cpu()  # once for all rows, since each would wait for a GPU
        for i, row in zip(batch, tokens.split([len(targets[i]) + 1 for i in batch]), strict=True):
            scores[i] = row.tolist()
    return [scores[i] for i in range(len(sources))]


def log_probabilities(scores: Tensor) -> Tensor:
    """Return the log-softmax of scores [..., V], in fp32 or wider."""
    wide = torch.float32 if scores.dtype in (torch.bfloat16, torch.float16) else scores.dtype
    return scores.log_softmax(-1, dtype=wide)


def log_mean_probability(members: Iterable[Tensor]) -> Tensor:
    """Return log((p_1 + ... + p_K) / K) for the log-probabilities log p_k of K >= 1 models, all of one shape.

    The sum is computed in log space, so that a token whose probability would underflow keeps its score.
    """
    remaining = iter(members)
    total, count = next(remaining), 1
    for member in remaining:
        # In log space, since probabilities of rare tokens underflow fp32.
        total, count = torch.logaddexp(total, member), count + 1
    return total - math.log(count)


def _of_targets(model: Seq2Seq, hidden: Tensor, target: Tensor) -> Tensor:
    """Return log p(target) [tokens] after decoder states `hidden` [tokens, D], in chunks that bound memory."""
    chunks = []
    for states, wanted in zip(hidden.split(_LOGIT_ROWS), target.split(_LOGIT_ROWS), strict=True):
        chunks.append(log_probabilities(model.logits(states)).gather(-1, wanted[:, None])[:, 0])
    return torch.cat(chunks)


def length_batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yield batches of indices into `lengths`, longest first; sentences x longest <= `batch_tokens`.

    Unlike pairs in training (ziggurat.data.batching), a sentence longer than `batch_tokens` is a batch by itself.
    Longest first, so that a batch that does not fit into memory fails at once, not after an hour. Equal lengths keep
    their order.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def padded(rows: Sequence[Sequence[int]], pad: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Return ids [rows, longest], padded with `pad` on the right, and their mask, True for real tokens."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows], dtype=torch.int64)
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(longest) < lengths[:, None]
    return ids.to(device), mask.to(device)
