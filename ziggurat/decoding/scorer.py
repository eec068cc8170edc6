"""What a search asks of a model: scores of every next token, for sentences that come, go and change their beams."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

__all__ = ["Scorer"]


class Scorer(Protocol):
    """A model, or several as one, with N live sentences of K beams each.

    Sentences enter and leave at any time, and each is at its own position: the one that came first may take its
    30th step while another takes its first. Shapes: N live sentences, K beams, S source, V vocabulary.
    """

    @property
    def vocabulary_size(self) -> int:
        """Number V of tokens that get a score."""

    @property
    def attention(self) -> Tensor | None:
        """Attention [N, K, S] to the source at the last step, 0 beyond a source's end; None when not offered.

        The mean over the heads of the last layer. S is at least the length of the longest live source.
        """

    def start(self, beam_size: int, slots: int, *, keep_attention: bool = False) -> None:
        """Begin with no sentence; at most `slots` will be live at a time, each with `beam_size` beams."""

    def admit(self, source: Tensor, source_mask: Tensor, max_steps: int) -> None:
        """Read source ids [n, S] (mask: True for real tokens) of new sentences, which come behind the N live ones.

        Each of them takes at most `max_steps` steps.
        """

    def step(self, tokens: Tensor) -> Tensor:
        """Take the last tokens [N, K]; return scores [N, K, V] whose softmax gives the next token.

        A new sentence's first tokens are begin-of-sentence. Log-probabilities are such scores (the softmax keeps
        them), logits are cheaper. The caller may overwrite what it gets, and is done with it at the next step.
        """

    def follow(self, parents: Tensor) -> None:
        """From now on beam k of sentence i continues its old beam `parents`[i, k]; [N, K]."""

    def keep(self, sentences: Tensor) -> None:
        """Keep only some sentences: row i is now old row `sentences`[i], [N'].

        The search fills the holes of those that leave with rows from the end, so `sentences`[i] is i for most.
        """
