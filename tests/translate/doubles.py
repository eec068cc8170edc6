"""Scorers and models with known probabilities, for tests of search and translation."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn

Prefix = tuple[int, ...]


def random_log_probabilities(seed: int, vocabulary: int, sharpness: float) -> Callable[[int, Prefix], list[float]]:
    """A distribution over the next token that depends on the sentence and on the whole prefix."""

    def log_probabilities(sentence: int, prefix: Prefix) -> list[float]:
        draw = random.Random(f"{seed} {sentence} {prefix}")
        logits = torch.tensor([draw.gauss(0, sharpness) for _ in range(vocabulary)], dtype=torch.float64)
        return logits.log_softmax(0).tolist()

    return log_probabilities


def random_attention(seed: int, sentence: int, prefix: Prefix, length: int) -> list[float]:
    draw = random.Random(f"attention {seed} {sentence} {prefix}")
    weights = torch.tensor([draw.gauss(0, 2) for _ in range(length)], dtype=torch.float64)
    return weights.softmax(0).tolist()


class TableScorer:
    """Scores by a function of (sentence, prefix); it tracks sentences and beams only through its calls.

    The sentence's number is its first source token.
    """

    def __init__(
        self,
        log_probabilities: Callable[[int, Prefix], list[float]],
        vocabulary: int,
        *,
        dtype: torch.dtype = torch.float64,
        attention_seed: int | None = None,
    ) -> None:
        self.log_probabilities = log_probabilities
        self.vocabulary_size = vocabulary
        self.dtype = dtype
        self.attention_seed = attention_seed
        self.attention: Tensor | None = None
        self.batch_sizes: list[int] = []
        self.admitted: list[list[int]] = []

    def start(self, beam_size: int, slots: int, *, keep_attention: bool = False) -> None:
        self.beam_size = beam_size
        self.slots = slots
        self.keep_attention = keep_attention
        self.sentences: list[int] = []
        self.source_lengths: list[int] = []
        self.steps_left: list[int] = []
        self.prefixes: list[list[Prefix] | None] = []  # None: before the first step

    def admit(self, source: Tensor, source_mask: Tensor, max_steps: int) -> None:
        self.admitted.append(source[:, 0].tolist())
        self.sentences += source[:, 0].tolist()
        self.source_lengths += source_mask.sum(1).tolist()
        self.steps_left += [max_steps] * len(source)
        self.prefixes += [None] * len(source)
        assert len(self.sentences) <= self.slots

    def step(self, tokens: Tensor) -> Tensor:
        assert tokens.shape == (len(self.sentences), self.beam_size)
        self.batch_sizes.append(len(tokens))
        self.steps_left = [left - 1 for left in self.steps_left]
        assert min(self.steps_left) >= 0
        # The first tokens are begin-of-sentence.
        self.prefixes = [
            [()] * self.beam_size if row is None else [(*p, token) for p, token in zip(row, ids, strict=True)]
            for row, ids in zip(self.prefixes, tokens.tolist(), strict=True)
        ]
        if self.attention_seed is not None and self.keep_attention:
            width = max(self.source_lengths)
            self.attention = torch.tensor(
                [
                    [random_attention(self.attention_seed, s, p, n) + [0.0] * (width - n) for p in row or ()]
                    for s, n, row in zip(self.sentences, self.source_lengths, self.prefixes, strict=True)
                ],
                dtype=self.dtype,
            )
        return torch.tensor(
            [
                [self.log_probabilities(sentence, prefix) for prefix in row or ()]
                for sentence, row in zip(self.sentences, self.prefixes, strict=True)
            ],
            dtype=self.dtype,
        )

    def follow(self, parents: Tensor) -> None:
        self.prefixes = [
            row and [row[parent] for parent in line] for row, line in zip(self.prefixes, parents.tolist(), strict=True)
        ]

    def keep(self, sentences: Tensor) -> None:
        kept = sentences.tolist()
        self.prefixes = [self.prefixes[row] for row in kept]
        self.sentences = [self.sentences[row] for row in kept]
        self.source_lengths = [self.source_lengths[row] for row in kept]
        self.steps_left = [self.steps_left[row] for row in kept]


class CopyState:
    """The desired outputs [n, length] of every live sentence, and how far each has got."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []
        self.positions: list[int] = []
        self.cross_attention: Tensor | None = None

    def follow(self, parents: Tensor) -> None:
        pass

    def keep(self, sentences: Tensor) -> None:
        self.rows = [self.rows[row] for row in sentences.tolist()]
        self.positions = [self.positions[row] for row in sentences.tolist()]


class CopyModel(nn.Module):
    """A model with Seq2Seq's methods that returns the source token by token, without tags at its start.

    It counts its calls, so that tests can see which sentences never reached the model.
    """

    def __init__(self, vocabulary: int, eos: int, tags: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self.vocabulary_size = vocabulary
        self.eos = eos
        self.tags = tags
        self.sentences = 0
        self.shapes: list[tuple[int, int]] = []
        self.seen: list[list[int]] = []

    def encode(self, source: Tensor, source_mask: Tensor) -> Tensor:
        self.sentences += len(source)
        self.shapes.append((source.shape[0], source.shape[1]))
        lengths = source_mask.sum(1).tolist()
        rows = [row[:length] for row, length in zip(source.tolist(), lengths, strict=True)]
        self.seen += rows
        kept = [[t for t in row if t not in self.tags] for row in rows]
        width = max(map(len, kept))
        return torch.tensor([row + [self.eos] * (width - len(row)) for row in kept])

    def start(self, beam_size: int, slots: int, *, keep_attention: bool = False) -> CopyState:
        return CopyState()

    def admit(self, memory: Tensor, state: CopyState) -> None:
        state.rows += memory.tolist()
        state.positions += [0] * len(memory)

    def step(self, tokens: Tensor, state: CopyState) -> Tensor:
        wanted = [row[min(at, len(row) - 1)] for row, at in zip(state.rows, state.positions, strict=True)]
        state.positions = [at + 1 for at in state.positions]
        return self.scores(torch.tensor(wanted)[:, None].expand(tokens.shape))

    def decode(self, target_in: Tensor, memory: Tensor) -> Tensor:
        extra = memory.new_full((len(memory), max(0, target_in.shape[1] - memory.shape[1])), self.eos)
        return torch.cat([memory, extra], 1)[:, : target_in.shape[1]]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.scores(hidden)

    def scores(self, wanted: Tensor) -> Tensor:
        return nn.functional.one_hot(wanted, self.vocabulary_size).float() * 20
