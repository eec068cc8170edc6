"""Properties of every family of models, checked on three sentence pairs of unequal lengths (fp64)."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from ziggurat.model.seq2seq import Seq2Seq

V = 23
EXACT: dict[str, Any] = {"atol": 1e-10, "rtol": 0.0}


def batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return source [3, 6], its mask, and decoder input [3, 7]."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(4, V, (3, 6), generator=generator)
    mask = torch.arange(6) < torch.tensor([[6], [3], [5]])
    return source, mask, torch.randint(4, V, (3, 7), generator=generator)


@torch.no_grad()
def check_steps_equal_full_decoding(model: Seq2Seq, data: st.DataObject, *, keep_attention: bool = False) -> None:
    """Each hypothesis's logits equal those of a full pass over its own tokens, even as other sentences leave.

    With `keep_attention`, the attention of each step is a distribution over the source's real positions.
    """
    source, mask, _ = batch(data.draw(st.integers(0, 99)))
    beam = data.draw(st.integers(1, 3))
    state = model.start(beam, 3, keep_attention=keep_attention)
    model.admit(model.encode(source, mask), state)
    alive = list(range(3))
    prefixes = [[[2] for _ in range(beam)] for _ in alive]
    for _ in range(5):
        logits = model.step(torch.tensor([[p[-1] for p in row] for row in prefixes]), state)
        if keep_attention:
            attention = state.cross_attention
            assert attention is not None
            torch.testing.assert_close(attention.sum(-1), torch.ones(len(alive), beam, dtype=torch.float64))
            assert float(attention.masked_select(~mask[alive][:, None]).detach().abs().sum()) == 0.0
        for i, sentence in enumerate(alive):
            one = model.encode(source[sentence : sentence + 1], mask[sentence : sentence + 1])
            for k in range(beam):
                full = model.logits(model.decode(torch.tensor([prefixes[i][k]]), one))[0, -1]
                torch.testing.assert_close(logits[i, k], full, **EXACT)
        kept = data.draw(st.lists(st.sampled_from(range(len(alive))), min_size=1, unique=True).map(sorted))
        parents = [data.draw(st.lists(st.integers(0, beam - 1), min_size=beam, max_size=beam)) for _ in kept]
        state.keep(torch.tensor(kept))
        state.follow(torch.tensor(parents))
        tokens = [data.draw(st.lists(st.integers(4, V - 1), min_size=beam, max_size=beam)) for _ in kept]
        prefixes = [
            [[*prefixes[row][p], t] for p, t in zip(chosen, new, strict=True)]
            for row, chosen, new in zip(kept, parents, tokens, strict=True)
        ]
        alive = [alive[row] for row in kept]


def check_padding_and_batch_order(model: Seq2Seq) -> None:
    """Neither padding, nor its content, nor the other sentences of the batch change a sentence's output."""
    source, mask, target = batch()
    full = model(source, mask, target)
    order = torch.tensor([2, 0, 1])
    torch.testing.assert_close(model(source[order], mask[order], target[order]), full[order], **EXACT)
    longer = F.pad(source, (0, 4), value=1)
    torch.testing.assert_close(model(longer, F.pad(mask, (0, 4)), target), full, **EXACT)
    source[~mask] = 5
    torch.testing.assert_close(model(source, mask, target), full, **EXACT)
    torch.testing.assert_close(model(source[1:2, :3], mask[1:2, :3], target[1:2]), full[1:2], **EXACT)


def check_every_source_token_reaches_every_output(model: Seq2Seq) -> None:
    """Changing a source token changes all outputs of its sentence and none of the others."""
    source, mask, target = batch()
    before = model(source, mask, target)
    for sentence, length in enumerate(mask.sum(1).tolist()):
        for position in range(length):
            changed = source.clone()
            changed[sentence, position] = (changed[sentence, position] + 1) % V
            difference = (model(changed, mask, target) - before).abs().amax(-1)
            assert bool((difference[sentence] > 1e-9).all())
            assert float(difference[[i for i in range(3) if i != sentence]].detach().max()) == 0.0
