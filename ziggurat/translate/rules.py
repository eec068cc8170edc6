"""Rules that forbid tokens, or make them less likely, given the tokens that a hypothesis already has.

They edit log-probabilities in place before anything is chosen. The probability of a forbidden token is not
redistributed. Definitions are those of Hugging Face's logits processors of the same names, over generated tokens.

Shapes: N live sentences, K beams, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ziggurat.translate.hypotheses import NEVER
from ziggurat.translate.settings import SearchSettings, Sentence


def _may_hold(condition: Tensor) -> bool:
    """Return whether a condition holds anywhere; always true on an accelerator, since a step would have to wait for it.

    A mask over all rows costs one more pass over the vocabulary, which a CPU skips if the mask would do nothing.
    """
    return condition.device.type != "cpu" or bool(condition.any())


def _put(values: Tensor, rows: Tensor, new: Tensor) -> None:
    """Set `values` [N, K] to `new` [N, K] in the rows where `rows` [N] is true."""
    values.copy_(torch.where(rows[:, None], new, values))


class Rules:
    """All rules of a search: its options, and per live sentence the prefix and (if needed) the beams' tokens."""

    def __init__(self, settings: SearchSettings) -> None:
        options, beam_size, device = settings.rules, settings.beam_size, settings.device
        self.options = options
        self.eos = settings.eos
        self._ends_at_limit = settings.endings == "fairseq"
        single = [*settings.forbidden, *(phrase[0] for phrase in options.banned if len(phrase) == 1)]
        self._never = torch.tensor(sorted(set(single)), dtype=torch.int64, device=device)
        longer = [phrase for phrase in options.banned if len(phrase) > 1]
        self._phrases = BannedPhrases(longer, device) if longer else None
        self._prefix = torch.zeros(0, 0, dtype=torch.int64, device=device)  # [N, P], -1 beyond its end
        self._begin = torch.zeros(0, dtype=torch.int64, device=device)  # [N] tokens of the prefix
        self._complete = torch.zeros(0, dtype=torch.bool, device=device)  # [N] whether it ends with a whole word
        self._boundary = torch.tensor(options.boundary, dtype=torch.int64, device=device)
        # Tokens of the beams, -1 after their ends; kept only if a rule uses them.
        remembers = self._phrases or options.no_repeat_ngram_size or options.repetition_penalty != 1
        self._held = torch.zeros(0, beam_size, 0, dtype=torch.int64, device=device) if remembers else None

    @property
    def change_scores(self) -> bool:
        """Return whether allowed tokens may get a score that differs from the model's."""
        return self.options.repetition_penalty != 1

    def admit(self, sentences: Sequence[Sentence]) -> None:
        """Append new sentences to the live ones."""
        width = max(self._prefix.shape[1], *(len(s.prefix) for s in sentences))
        rows = [[*s.prefix, *[-1] * (width - len(s.prefix))] for s in sentences]
        new = torch.tensor(rows, dtype=torch.int64, device=self._prefix.device).view(len(rows), width)
        self._prefix = torch.cat((_widened(self._prefix, width), new))
        self._begin = torch.cat((self._begin, self._begin.new_tensor([len(s.prefix) for s in sentences])))
        self._complete = torch.cat((self._complete, self._complete.new_tensor([s.complete for s in sentences])))
        if self._held is not None:
            shape = (len(sentences), *self._held.shape[1:])
            self._held = torch.cat((self._held, self._held.new_full(shape, -1)))

    def keep(self, rows: Tensor) -> None:
        """Make row i the old row `rows`[i]."""
        self._prefix = self._prefix.index_select(0, rows)
        self._begin, self._complete = self._begin.index_select(0, rows), self._complete.index_select(0, rows)
        if self._held is not None:
            self._held = self._held.index_select(0, rows)

    def follow(self, parents: Tensor, tokens: Tensor, position: Tensor, longest: int) -> None:
        """Make beam k of sentence i continue its old beam `parents`[i, k] with `tokens`[i, k] at `position`[i].

        `longest` is the largest position.
        """
        if self._held is None:
            return
        held = self._held.gather(1, parents[..., None].expand(-1, -1, self._held.shape[2]))
        if longest >= held.shape[2]:
            held = _widened(held, 2 * held.shape[2] + 8)  # doubled, so that few steps have to copy all of it
        place = position[:, None, None].expand(-1, parents.shape[1], 1)
        self._held = held.scatter(2, place, tokens[..., None])

    def apply(self, log_probabilities: Tensor, position: Tensor, min_length: Tensor, max_length: Tensor) -> None:
        """Edit log_probabilities [N, K, V] of sentences at `position` [N] in place.

        A forced prefix takes precedence over all other rules, as does the end at `max_length` [N] with `endings:
        fairseq`.
        """
        # (1) Save scores that the other rules must not change: the end at the limit, and the next token of a prefix.
        own_end = log_probabilities[..., self.eos].clone() if self._ends_at_limit else None
        width = self._prefix.shape[1]
        if width:
            inside = position.clamp(max=width - 1)[:, None]
            forced = self._prefix.gather(1, inside).masked_fill(inside != position[:, None], -1)[..., None]
            forced = forced.expand(-1, log_probabilities.shape[1], -1)
            kept = log_probabilities.gather(-1, forced.clamp(min=0))

        # (2) Rules for single tokens. The margin comes first, because it is measured from the model's best token,
        # forbidden or not.
        if self.options.eos_margin is not None:
            ends = log_probabilities[..., self.eos]
            ends.masked_fill_(ends < log_probabilities.amax(-1) - self.options.eos_margin, NEVER)
        log_probabilities.index_fill_(-1, self._never, NEVER)
        log_probabilities[..., self.eos].masked_fill_((position < min_length)[:, None], NEVER)

        # (3) Rules for the tokens that a hypothesis already has.
        if self._held is not None:
            penalise_repetition(log_probabilities, self._held, self.options.repetition_penalty)
            ban_repeated_ngrams(log_probabilities, self._held, position, self.options.no_repeat_ngram_size)
            if self._phrases is not None:
                self._phrases.ban(log_probabilities, self._held, position)

        if self.options.boundary:
            self._end_words(log_probabilities, position)

        # (4) Inside a prefix only its next token remains, with the model's score.
        if width:
            free = log_probabilities.gather(-1, forced.clamp(min=0))
            log_probabilities.masked_fill_(forced >= 0, NEVER)
            log_probabilities.scatter_(-1, forced.clamp(min=0), torch.where(forced >= 0, kept, free))

        # (5) At the limit only end-of-sentence remains. Prefixes are at most as long as the limit, so (4) and (5) never
        # coincide.
        if own_end is not None and _may_hold(at_limit := position >= max_length):
            log_probabilities.masked_fill_(at_limit[:, None, None], NEVER)
            _put(log_probabilities[..., self.eos], at_limit, own_end)

    def _end_words(self, log_probabilities: Tensor, position: Tensor) -> None:
        """Enforce word ends: after a complete prefix and, with `one_word`, at the end of the result."""
        first = position == self._begin
        if _may_hold(ending := first & self._complete):
            kept = log_probabilities.index_select(-1, self._boundary)
            log_probabilities.masked_fill_(ending[:, None, None], NEVER)
            log_probabilities.index_copy_(-1, self._boundary, kept)
        if not self.options.one_word:
            return
        ends = log_probabilities[..., self.eos]
        ends.masked_fill_(first[:, None], NEVER)  # there must be a word
        if _may_hold(later := position > self._begin):
            boundary = log_probabilities.index_select(-1, self._boundary)
            log_probabilities.index_copy_(-1, self._boundary, boundary.masked_fill(later[:, None, None], NEVER))
            _put(ends, later, boundary.logsumexp(-1))


def penalise_repetition(log_probabilities: Tensor, held: Tensor, penalty: float) -> None:
    """Multiply log_probabilities [N, K, V] of the tokens `held` [N, K, T] (-1: none) by `penalty` (Keskar et al. 2019).

    A token counts once, however often it occurs. Works in place.
    """
    if penalty == 1:  # another rule may use `held`
        return
    tokens = held.clamp(min=0)
    own = log_probabilities.gather(-1, tokens)
    # A token is written as often as it occurs, and the first one once for each empty slot. The value decides which
    # write wins: the penalised one is the smaller or, with a penalty below 1, the larger.
    wins: Literal["amin", "amax"] = "amin" if penalty > 1 else "amax"
    log_probabilities.scatter_reduce_(-1, tokens, torch.where(held >= 0, own * penalty, own), wins)


def ban_repeated_ngrams(log_probabilities: Tensor, held: Tensor, position: Tensor, size: int) -> None:
    """Rule out tokens that would end a sequence of `size` tokens that `held` [N, K, T] already has; in place.

    position: [N] number of tokens held.
    """
    windows = held.shape[2] - size + 1
    if not size or windows < 1:
        return
    before = held.unfold(2, size, 1)[..., :-1]  # [N, K, windows, size - 1]
    ending = held[..., size - 1 :]  # [N, K, windows]
    last = (position[:, None] + torch.arange(1 - size, 0, device=held.device)).clamp(min=0)
    suffix = held.gather(2, last[:, None].expand(-1, held.shape[1], -1))
    same = (before == suffix[:, :, None]).all(-1) & (ending >= 0)
    tokens = ending.clamp(min=0)
    own = log_probabilities.gather(-1, tokens)
    log_probabilities.scatter_reduce_(-1, tokens, own.masked_fill(same, NEVER), "amin")


class BannedPhrases:
    """Tree of banned phrases of two or more tokens; a step's cost hardly grows with their number.

    A node is a prefix that some phrases share. `_follow` advances from the nodes of all hypotheses at once, by a binary
    search in the sorted codes `node * base + token` of the tree's edges.

    Args:
        phrases: each at least two ids.
        device: where scores are.
    """

    def __init__(self, phrases: Sequence[tuple[int, ...]], device: torch.device | str) -> None:
        self._base = 1 + max(token for phrase in phrases for token in phrase)
        children: dict[tuple[int, int], int] = {}
        last: dict[tuple[int, int], set[int]] = defaultdict(set)  # (length of the phrase, node) -> last tokens
        for phrase in phrases:
            node = 0
            for token in phrase[:-1]:
                node = children.setdefault((node, token), len(children) + 1)
            last[len(phrase), node].add(phrase[-1])
        edges = sorted((node * self._base + token, child) for (node, token), child in children.items())
        self._edges, self._children = torch.tensor(edges, dtype=torch.int64, device=device).T.contiguous().unbind(0)
        ends = sorted(node * self._base + token for (_, node), tokens in last.items() for token in tokens)
        self._ends = torch.tensor(ends, dtype=torch.int64, device=device)  # by node, then token
        # For each length, the largest number of last tokens of phrases with the same beginning.
        self._most: dict[int, int] = {}
        for (length, _), tokens in last.items():
            self._most[length] = max(len(tokens), self._most.get(length, 0))

    def ban(self, log_probabilities: Tensor, held: Tensor, position: Tensor) -> None:
        """Rule out the last token of each phrase if `held` [N, K, T] ends with the others; in place.

        log_probabilities: [N, K, V]; position: [N] number of tokens held.
        """
        for length, most in self._most.items():
            before = position[:, None] + torch.arange(1 - length, 0, device=held.device)
            if before.shape[1] > held.shape[2]:
                continue
            suffix = held.gather(2, before.clamp(min=0)[:, None].expand(-1, held.shape[1], -1))
            node = torch.where(before[:, :1] >= 0, 0, -1).expand(-1, held.shape[1])
            for token in suffix.unbind(2):
                node = self._follow(node, token)
            if not _may_hold(there := node > 0):
                continue
            # Handles the largest possible number of tokens for every hypothesis, because counting them would mean
            # waiting for the device.
            first = (node * self._base)[..., None]
            place = torch.searchsorted(self._ends, first) + torch.arange(most, device=held.device)
            token = self._ends[place.clamp(max=len(self._ends) - 1)] - first
            ends = there[..., None] & (place < len(self._ends)) & (token >= 0) & (token < self._base)
            token = token.where(ends, 0)
            own = log_probabilities.gather(-1, token)
            log_probabilities.scatter_reduce_(-1, token, own.masked_fill(ends, NEVER), "amin")

    def _follow(self, node: Tensor, token: Tensor) -> Tensor:
        """Return the child [N, K] to which `token` [N, K] leads from `node` [N, K]; -1: none."""
        code = node * self._base + token
        place = torch.searchsorted(self._edges, code.contiguous()).clamp(max=len(self._edges) - 1)
        there = (node >= 0) & (token >= 0) & (token < self._base) & (self._edges[place] == code)
        return torch.where(there, self._children[place], -1)


def _widened(rows: Tensor, width: int) -> Tensor:
    """Return `rows` [..., T] with -1 up to `width`."""
    return torch.nn.functional.pad(rows, (0, width - rows.shape[-1]), value=-1)
