"""Sentences that enter, leave and change beams at random, in a scorer under test and in plain whole-target passes."""

from __future__ import annotations

import random
from copy import deepcopy

import torch
from torch import Tensor

from ziggurat.model.attention.cache import KeptWeights
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.translate.scorers import padded

BOS = 1


class Sentence:
    """A source and the tokens of each beam so far."""

    def __init__(self, source: list[int], beams: int) -> None:
        self.source = source
        self.taken: list[list[int]] = [[] for _ in range(beams)]


def worst_difference(model: Seq2Seq, scorer, *, beams: int, steps: int, seed: int = 0) -> float:
    """Return the largest difference of any logit, as a share of the largest logit of its token, or of any attention.

    The reference is the model in double precision, one sentence and one hypothesis at a time, without caches.
    """
    exact = deepcopy(model).double()
    draw = random.Random(seed)
    vocabulary = model.vocabulary_size
    live: list[Sentence] = []
    worst = 0.0
    scorer.start(beams, 8, keep_attention=True)
    for number in range(steps):
        if number == 0 or draw.random() < 0.4 or not live:
            count = draw.randint(1, 3)
            new = [[draw.randrange(3, vocabulary) for _ in range(draw.randint(1, 7))] for _ in range(count)]
            scorer.admit(*padded(new, 0, "cpu"), steps)
            live += [Sentence(source, beams) for source in new]
        for sentence in live:
            for taken in sentence.taken:
                taken.append(draw.randrange(vocabulary) if taken else BOS)
        got = scorer.step(torch.tensor([[taken[-1] for taken in sentence.taken] for sentence in live]))
        assert got.shape == (len(live), beams, vocabulary)
        attends_to_the_source_alone(scorer.attention, live)
        for i, sentence in enumerate(live):
            for k, taken in enumerate(sentence.taken):
                want, attended = whole(exact, sentence.source, taken)
                worst = max(worst, float((got[i, k] - want).abs().max() / want.abs().max()))
                here = scorer.attention[i, k, : len(sentence.source)]
                worst = max(worst, float((here - attended).abs().max()))
        parents = [[draw.randrange(beams) for _ in range(beams)] for _ in live]
        scorer.follow(torch.tensor(parents))
        for sentence, origins in zip(live, parents, strict=True):
            sentence.taken = [list(sentence.taken[origin]) for origin in origins]
        if draw.random() < 0.4:
            kept = draw.sample(range(len(live)), draw.randint(0, len(live)))
            scorer.keep(torch.tensor(kept, dtype=torch.int64))
            live = [live[i] for i in kept]
    return worst


@torch.inference_mode()
def whole(model: Seq2Seq, source: list[int], taken: list[int]) -> tuple[Tensor, Tensor]:
    """Return logits [V] of the token after `taken`, and the attention [source] that determines alignments."""
    mask, kept = torch.ones(1, len(source), dtype=torch.bool), KeptWeights(model.decoder.aligned.head)
    hidden: Tensor = model(torch.tensor([source]), mask, torch.tensor([taken]), None, kept)
    assert kept.weights is not None
    return model.logits(hidden)[0, -1], kept.weights[0, -1]


def attends_to_the_source_alone(attention: Tensor, live: list[Sentence]) -> None:
    for weights, sentence in zip(attention, live, strict=True):
        real = weights[:, : len(sentence.source)]
        torch.testing.assert_close(real.sum(-1), torch.ones(len(real)))
        assert not weights[:, len(sentence.source) :].any()
