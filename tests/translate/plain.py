"""Searches by plain loops over dictionaries and Python floats, without early stopping; the real search matches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tests.translate.doubles import Prefix, TableScorer, random_attention
from ziggurat.translate.hypotheses import LengthPenalty
from ziggurat.translate.settings import RuleOptions, SearchSettings

BOS, EOS = 0, 1


@dataclass
class Plain:
    """A result of the plain search."""

    tokens: list[int]
    log_probability: float
    score: float
    finished: bool


def penalised(penalty: LengthPenalty, log_probability: float, length: int, attention: list[float]) -> float:
    """The penalties once more, written from the docs, without ziggurat.translate.hypotheses."""
    base = {"none": 1.0, "power": length, "gnmt": (5 + length) / 6, "lingvo": (5 + length) / 5}[penalty.kind]
    rho = penalty.length_ratio
    coverage = sum(math.log(min(max(a / rho, 0.001), 0.5)) for a in attention)
    return (log_probability - penalty.word * length) / base**penalty.alpha + (
        penalty.coverage * rho * coverage if penalty.coverage else 0.0
    )


def edited(scores: Sequence[float], prefix: Prefix, limits: RuleOptions, forced: Prefix) -> list[float]:
    """The rules of `limits`, one token at a time."""
    result = list(scores)
    for token, score in enumerate(scores):
        path = (*prefix, token)
        if token in prefix:
            result[token] = score * limits.repetition_penalty
        margin = limits.eos_margin
        if token == EOS and margin is not None and score < max(scores) - margin:
            result[token] = -math.inf
        if any(path[-len(phrase) :] == phrase for phrase in limits.banned):
            result[token] = -math.inf
        size = limits.no_repeat_ngram_size
        if size and path[-size:] in [path[i : i + size] for i in range(len(path) - size)]:
            result[token] = -math.inf
        if len(prefix) < len(forced):
            result[token] = score if token == forced[len(prefix)] else -math.inf
    return result


def plain_search(
    scorer: TableScorer,
    sentence: int,
    source_length: int,
    max_length: int,
    wanted: SearchSettings,
    min_length: int = 0,
    forced: Prefix = (),
) -> list[Plain]:
    """Search one sentence at a time, with all steps up to the limit."""
    alive: list[tuple[float, Prefix, list[float]]] = [(0.0, (), [0.0] * source_length)]
    finished: list[Plain] = []
    before = alive
    best_finished = -math.inf
    for step in range(max_length + 1):
        extensions = []
        for rank, (total, prefix, attended) in enumerate(alive):
            if scorer.attention_seed is not None:
                new = random_attention(scorer.attention_seed, sentence, prefix, source_length)
                attended = [a + b for a, b in zip(attended, new, strict=True)]
            scores = edited(scorer.log_probabilities(sentence, prefix), prefix, wanted.rules, forced)
            for token, p in enumerate(scores):
                is_forced = step < len(forced)
                too_short = token == EOS and step < min(min_length, max_length) and not is_forced
                never = token in wanted.forbidden and not is_forced
                if not never and not too_short and p > -math.inf:
                    extensions.append((-(total + p), rank, token, prefix, attended))
        extensions.sort(key=lambda e: e[:3])
        extensions = extensions[: 2 * wanted.beam_size if wanted.beam_size > 1 else 1]
        if wanted.rules.prune is not None and extensions:
            floor = max(best_finished, -extensions[0][0]) - wanted.rules.prune
            extensions = [e for e in extensions if -e[0] >= floor]
        for number, (total, _, token, prefix, attended) in enumerate(extensions):
            if token == EOS and (wanted.endings == "candidates" or number < wanted.beam_size):
                score = penalised(wanted.penalty, -total, step + 1, attended)
                finished.append(Plain(list(prefix), -total, score, True))
                best_finished = max(best_finished, -total)
        before = alive
        alive = [(-t, (*prefix, token), a) for t, _, token, prefix, a in extensions if token != EOS]
        alive = alive[: wanted.beam_size]
        if not alive:
            break
    finished.sort(key=lambda f: -f.score)
    if finished:
        return finished[: wanted.n_best]
    total, prefix, _ = before[0]
    score = penalised(wanted.penalty, total, len(prefix), []) if prefix else 0.0
    return [Plain(list(prefix), total, score, False)]


def fairseq_search(
    scorer: TableScorer, sentence: int, max_length: int, wanted: SearchSettings, min_length: int = 0
) -> list[Plain]:
    """Search one sentence by the rules in fairseq's sequence_generator: `finalize_hypos`, `is_finished`.

    fairseq never returns fewer than `min_length` tokens, which must not exceed `max_length`.
    """
    beams: list[tuple[float, Prefix]] = [(0.0, ())]
    finalised: list[Plain] = []
    for step in range(max_length + 1):
        candidates = []
        for rank, (total, prefix) in enumerate(beams):
            for token, p in enumerate(scorer.log_probabilities(sentence, prefix)):
                allowed = token not in wanted.forbidden and p > -math.inf
                if step == max_length:
                    allowed = allowed and token == EOS
                elif step < min_length:
                    allowed = allowed and token != EOS
                if allowed:
                    candidates.append((total + p, rank, token, prefix))
        candidates.sort(key=lambda c: (-c[0], c[1], c[2]))
        candidates = candidates[: 2 * wanted.beam_size]
        if wanted.rules.prune is not None and candidates:  # a rule from lingvo, which fairseq does not have
            best = max([candidates[0][0], *(f.log_probability for f in finalised)])
            candidates = [c for c in candidates if c[0] >= best - wanted.rules.prune]
        for total, _, token, prefix in candidates[: wanted.beam_size]:
            if token == EOS and len(finalised) < wanted.beam_size:
                score = penalised(wanted.penalty, total, step + 1, [])
                finalised.append(Plain(list(prefix), total, score, True))
        if len(finalised) == wanted.beam_size:
            break
        beams = [(total, (*prefix, token)) for total, _, token, prefix in candidates if token != EOS]
        beams = beams[: wanted.beam_size]
    return sorted(finalised, key=lambda f: -f.score)[: wanted.n_best]


def marian_search(scorer: TableScorer, sentence: int, max_length: int, wanted: SearchSettings) -> list[Plain]:
    """Search one sentence by Marian's rules: every hypothesis that ends or reaches the limit narrows the beam."""
    beams: list[tuple[float, Prefix]] = [(0.0, ())]
    room = wanted.beam_size
    results: list[Plain] = []
    for length in range(1, max_length + 1):
        extensions = [
            (total + p, rank, token, prefix)
            for rank, (total, prefix) in enumerate(beams)
            for token, p in enumerate(scorer.log_probabilities(sentence, prefix))
            if token not in wanted.forbidden
        ]
        extensions.sort(key=lambda e: (-e[0], e[1], e[2]))
        beams = []
        for total, _, token, prefix in extensions[:room]:
            if token == EOS:
                results.append(Plain(list(prefix), total, penalised(wanted.penalty, total, length, []), True))
            else:
                beams.append((total, (*prefix, token)))
        room = len(beams)
    for total, prefix in beams:
        results.append(Plain(list(prefix), total, penalised(wanted.penalty, total, max_length, []), False))
    return sorted(results, key=lambda r: -r.score)[: wanted.n_best]
