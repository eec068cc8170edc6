"""The word aligner: both directions, trained on the same pairs (ziggurat.data.hmm), and their symmetrised links.

The module starts with the words that alignments count and the links between them, in the Pharaoh format that all
aligners write.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import regex
from numpy.typing import NDArray

from ziggurat.config.data import Symmetrisation
from ziggurat.data.hmm import (
    JUMPS,
    Emissions,
    JumpCounts,
    Jumps,
    Lexicon,
    Posteriors,
    posteriors,
    translation_table,
)
from ziggurat.system.errors import DataError, printable
from ziggurat.system.small_files import arrays_content, check_regular, read_arrays

Sentences = Sequence[NDArray[np.int32]]
"""Word ids of each sentence; -1: a word that the model does not know."""

_CELLS = 1 << 18  # maximum number of pairs of words in a batch, to bound memory: each takes about 100 bytes


class TrainingOptions(NamedTuple):
    """Settings of an aligner's training."""

    model1_iterations: int = 5
    """Iterations of IBM Model 1, which the HMM starts from."""
    hmm_iterations: int = 5
    empty: float = 0.2
    """Probability that a word comes from the empty word, and so from no word of the other side."""


class Direction:
    """A trained direction: translation probabilities, weights of jumps, and the probability of the empty word."""

    def __init__(self, lexicon: Lexicon, jumps: Jumps, empty: float) -> None:
        self.lexicon = lexicon
        self.jumps = jumps
        self.empty = empty

    def links(self, sources: Sentences, targets: Sentences) -> list[NDArray[np.int64]]:
        """Return for each pair the source word of each target word, [target words], or -1 for none.

        Each target word gets its most probable source word by the posterior of the HMM, or none if the empty word is
        more probable. A sentence without words has no links on either side.
        """
        found = [np.full(len(target), -1, np.int64) for target in targets]
        for batch in _batches(sources, targets):
            links = self._run(batch)[0].links
            best = links.argmax(2)
            chosen = np.where(links.max(2) > 1.0 - links.sum(2), best, -1)
            for row, pair in enumerate(batch.pairs):
                found[pair] = chosen[row, : len(found[pair])]
        return found

    def improved(self, sources: Sentences, targets: Sentences) -> tuple[Direction, float]:
        """Return the direction after one iteration on these pairs, and the log-likelihood before it in nats."""
        counts, jumps, likelihood = self.lexicon.counts(), JumpCounts(), 0.0
        for batch in _batches(sources, targets):
            found, places, empty_places = self._run(batch)
            np.add.at(counts, places.ravel(), found.links.ravel())
            # Words that no source word generated come from the empty word; positions after a target's end do not count.
            np.add.at(counts, empty_places.ravel(), (batch.present - found.links.sum(2)).ravel())
            jumps.add(found.jumps, found.endings)
            likelihood += found.log_likelihood
        return Direction(self.lexicon.estimate(counts), jumps.weights(), self.empty), likelihood

    def _run(self, batch: _Batch) -> tuple[Posteriors, NDArray[np.int64], NDArray[np.int64]]:
        """Return the posteriors of a batch and the lexicon's entries [B, J, I] and [B, J] used for them."""
        places = self.lexicon.places(batch.source[:, None, :], batch.target[:, :, None])
        empty_places = self.lexicon.places(np.array(self.lexicon.source_size), batch.target)
        emissions = Emissions(self.lexicon[places], self.lexicon[empty_places], batch.lengths)
        return posteriors(emissions, self.jumps, self.empty), places, empty_places


def train_direction(
    sources: Sentences,
    targets: Sentences,
    sizes: tuple[int, int],
    options: TrainingOptions,
    report: Callable[[int, float], None] = lambda iteration, likelihood: None,
) -> Direction:
    """Return a direction trained on these pairs (IBM Model 1, then the HMM), in which all ids are known.

    `sizes` are the numbers of source and of target words. `report` is called with the number of each finished iteration
    of the HMM, from 1, and the log-likelihood before it.
    """
    rows = translation_table(sources, targets, *sizes, iterations=options.model1_iterations)
    direction = Direction(Lexicon.of_rows(rows, *sizes), Jumps.initial(), options.empty)
    for iteration in range(1, options.hmm_iterations + 1):
        direction, likelihood = direction.improved(sources, targets)
        report(iteration, likelihood)
    return direction


class _Batch(NamedTuple):
    """Pairs whose sources are equally long, longest target first; see Emissions."""

    pairs: NDArray[np.int64]
    """[B] indices of the pairs."""
    source: NDArray[np.int64]
    """[B, I] ids."""
    target: NDArray[np.int64]
    """[B, J] ids, -1 after the end."""
    lengths: NDArray[np.int64]
    present: NDArray[np.bool_]
    """[B, J], True at target words."""


def _batches(sources: Sentences, targets: Sentences) -> Iterator[_Batch]:
    """Yield all pairs with words on both sides, in batches of at most _CELLS pairs of words, but at least one pair."""
    rows, columns = (np.fromiter(map(len, side), np.int64, len(side)) for side in (sources, targets))
    order = np.lexsort((-columns, rows))
    order = order[(rows[order] > 0) & (columns[order] > 0)]
    start = 0
    while start < len(order):
        length, longest = int(rows[order[start]]), int(columns[order[start]])
        most = max(1, _CELLS // (length * longest))
        chosen = order[start : start + most]
        chosen = chosen[rows[chosen] == length]
        start += len(chosen)
        present = np.arange(longest) < columns[chosen][:, None]
        target = np.full(present.shape, -1, np.int64)
        target[present] = np.concatenate([targets[pair] for pair in chosen])
        source = np.stack([sources[pair] for pair in chosen]).astype(np.int64)
        yield _Batch(chosen, source, target, columns[chosen], present)


WordRule = Literal["split", "blanks"]
"""`split`: by white space and punctuation, for ordinary text. `blanks`: for text that is already tokenised."""

# Scripts whose words are not separated: each character, with the marks on it, counts as a word.
_UNSPACED = "".join(
    rf"\p{{Script={name}}}" for name in ("Han", "Hiragana", "Katakana", "Thai", "Lao", "Khmer", "Myanmar", "Tibetan")
)
_SPLIT = regex.compile(
    # (1) one character of such a script; U+30FC lengthens a vowel and belongs to the character before it
    rf"[{_UNSPACED}][\p{{M}}\u30FC]*"
    # (2) a run of letters, digits, marks and connectors such as the underscore
    rf"|[[\p{{L}}\p{{M}}\p{{N}}\p{{Pc}}]--[{_UNSPACED}]]+"
    # (3) any other character, such as a comma or an apostrophe, with the marks on it
    r"|\S\p{M}*",
    flags=regex.V1,
)
# Separators of words in Moses, fast_align and eflomal, which treat a no-break space as part of a word.
_BLANKS = regex.compile(r"[^ \t\r\n]+")


def split_words(text: str, rule: WordRule) -> list[str]:
    """Return the words of `text` in order; word i of an alignment is number i of this list, from 0.

    With `split` a word is a run of letters, digits and combining marks. Every other character that is not white space
    is a separate word, and so is every character of a script written without spaces (Chinese, Japanese, Thai, ...).
    With `blanks` words are separated by spaces and tabs.
    """
    found: list[str] = (_SPLIT if rule == "split" else _BLANKS).findall(text)
    return found


def word_spans(text: str, rule: WordRule) -> list[tuple[int, int]]:
    """Return the start and end of each word of `split_words`, so that `text[first:end]` is the word."""
    return [match.span() for match in (_SPLIT if rule == "split" else _BLANKS).finditer(text)]


Link = tuple[int, int]
"""Number of a source word and of a target word, both from 0."""

_LINKS = re.compile(r"(?:\d{1,9}-\d{1,9}(?:[ \t]+|$))*", flags=re.ASCII)


def format_links(links: Iterable[Link]) -> str:
    """Return links as a line of the Pharaoh format, `0-0 1-2`, by source word and then by target word."""
    return " ".join(f"{source}-{target}" for source, target in sorted(links))


def parse_links(line: str, source_words: int | None, target_words: int | None, place: str) -> list[Link]:
    """Return the links of a line such as `0-0 1-2` in the order of the line; a repeated link counts once.

    `source_words` and `target_words` are the numbers of words of both sides, or None if unknown; `place` is file and
    line. Raises DataError for anything other than numbers joined by `-`, or a word that the sentence does not have.
    """
    text = line.strip(" \t")
    if not _LINKS.fullmatch(text):
        raise DataError(
            f"{place}: not a word alignment: {printable(line, 80)}; expected links such as `0-0 1-2`, from 0"
        )
    links = list(dict.fromkeys((int(i), int(j)) for i, _, j in (link.partition("-") for link in text.split())))
    for side, words, number in (("source", source_words, 0), ("target", target_words, 1)):
        worst = max(links, key=lambda link: link[number], default=None)
        if words is not None and worst is not None and worst[number] >= words:
            raise DataError(
                f"{place}: the link {worst[0]}-{worst[1]} names {side} word {worst[number]}, but the {side} has "
                f"{words} (from 0): is it an alignment of other text, or of words split by another rule?"
            )
    return links


class AlignmentScore(NamedTuple):
    """Agreement of alignments with gold alignments, each figure a share between 0 and 1."""

    error_rate: float
    """AER = 1 - (|A and S| + |A and P|) / (|A| + |S|) (Och and Ney 2003); 0 is best."""
    precision: float
    """|A and P| / |A|."""
    recall: float
    """|A and S| / |S|."""


def error_rate(
    found: Sequence[Collection[Link]], sure: Sequence[Collection[Link]], possible: Sequence[Collection[Link]]
) -> AlignmentScore:
    """Return the agreement of the alignments `found` (A) with gold ones, over all pairs together.

    `sure` (S) are links that must be present, `possible` (P) those that may be; those in S also count as possible.
    """
    links = gold = right = allowed = 0
    for a, s, p in zip(map(set, found), map(set, sure), map(set, possible), strict=True):
        links, gold = links + len(a), gold + len(s)
        right, allowed = right + len(a & s), allowed + len(a & (p | s))
    return AlignmentScore(
        error_rate=1.0 - (right + allowed) / (links + gold) if links + gold else 0.0,
        precision=allowed / links if links else 1.0,
        recall=right / gold if gold else 1.0,
    )


_NEIGHBOURS = ((-1, 0), (0, -1), (1, 0), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1))


def symmetrise(forward: Collection[Link], backward: Collection[Link], how: Symmetrisation) -> set[Link]:
    """Return one alignment from the source-to-target and target-to-source ones, both as (source, target)."""
    one, other = set(forward), set(backward)
    links, union = one & other, one | other
    if how in ("intersection", "union"):
        return links if how == "intersection" else union
    sources, targets = {source for source, _ in links}, {target for _, target in links}

    def add_if(enough: Callable[[tuple[bool, bool]], bool], link: Link) -> None:
        """Add a link if `enough` (any or all) of its two words have none yet."""
        if link not in links and enough((link[0] not in sources, link[1] not in targets)):
            links.add(link)
            sources.add(link[0])
            targets.add(link[1])

    # In word order, with additions visible at once, as in Moses: the result depends on this.
    before = -1
    while len(links) != before:
        before = len(links)
        for source, target in sorted(union):
            if (source, target) in links:
                for down, right in _NEIGHBOURS:
                    if (beside := (source + down, target + right)) in union:
                        add_if(any, beside)
    if how != "grow-diag":
        for link in (*sorted(one), *sorted(other)):
            add_if(any if how == "grow-diag-final" else all, link)
    return links


MOST_WORDS = 1000
"""Maximum number of words on a side of a pair to align: time grows with the square of one side times the other."""
_TRAINING_WORDS = 200  # maximum number of words on a side of a training pair

_FORMAT = "ziggurat-aligner-1"
_MOST_BYTES = 1 << 34
_RULES: tuple[WordRule, ...] = get_args(WordRule)
_DIRECTIONS = ("forward", "backward")


class Aligner:
    """A trained word aligner.

    `rule` says how it splits text into words. `words` has the lower-cased source and target words in the order of their
    numbers. `directions` are source to target and target to source.
    """

    def __init__(
        self, rule: WordRule, words: tuple[Sequence[str], Sequence[str]], directions: tuple[Direction, Direction]
    ) -> None:
        self.rule = rule
        self.words = words
        self.directions = directions
        self._numbers = [{word: number for number, word in enumerate(side)} for side in words]

    @classmethod
    def train(
        cls,
        pairs: Iterable[tuple[str, str]],
        rule: WordRule = "split",
        options: TrainingOptions | None = None,
        report: Callable[[str, int, float], None] = lambda direction, iteration, likelihood: None,
    ) -> Aligner:
        """Return an aligner trained on pairs of texts, read once; a pair of 10 words takes about 1 kB of memory.

        Pairs with an empty side or with more than _TRAINING_WORDS words on one are left out. The two directions run in
        two threads, which does not affect the result. `report` is called after each iteration of the HMM with the
        direction, the iteration's number and the log-likelihood before it in nats. Raises DataError if no pair is left.
        """
        numbers: tuple[dict[str, int], dict[str, int]] = ({}, {})
        sides: tuple[list[NDArray[np.int32]], list[NDArray[np.int32]]] = ([], [])
        for texts in pairs:
            split = [split_words(text.lower(), rule) for text in texts]
            if not all(0 < len(words) <= _TRAINING_WORDS for words in split):
                continue
            for words, known, side in zip(split, numbers, sides, strict=True):
                side.append(np.array([known.setdefault(word, len(known)) for word in words], np.int32))
        if not sides[0]:
            raise DataError(f"no pair to train an aligner on: all have an empty side, or over {_TRAINING_WORDS} words")

        def train(source: int) -> Direction:
            target = 1 - source
            return train_direction(
                sides[source],
                sides[target],
                (len(numbers[source]), len(numbers[target])),
                options or TrainingOptions(),
                lambda iteration, likelihood: report(_DIRECTIONS[source], iteration, likelihood),
            )

        with ThreadPoolExecutor(2) as pool:  # numpy releases Python's lock in all long operations
            forward, backward = pool.map(train, (0, 1))
        return cls(rule, (list(numbers[0]), list(numbers[1])), (forward, backward))

    def align(
        self, sources: Sequence[str], targets: Sequence[str], how: Symmetrisation = "grow-diag-final-and"
    ) -> list[set[Link]]:
        """Return the links of each pair of texts, as indices of the words that `rule` finds.

        A pair with an empty side, or with more than MOST_WORDS words on a side, has no links.
        """
        split = [[split_words(text.lower(), self.rule) for text in texts] for texts in (sources, targets)]
        for source, target in zip(*split, strict=True):
            if max(len(source), len(target)) > MOST_WORDS:
                source.clear()
                target.clear()
        sides = [
            [np.array([numbers.get(word, -1) for word in words], np.int32) for words in side]
            for side, numbers in zip(split, self._numbers, strict=True)
        ]
        with ThreadPoolExecutor(2) as pool:
            ahead = pool.submit(self.directions[0].links, *sides)
            back = pool.submit(self.directions[1].links, *sides[::-1])
            found = zip(ahead.result(), back.result(), strict=True)
            return [
                symmetrise(
                    {(i, j) for j, i in enumerate(forward.tolist()) if i >= 0},
                    {(i, j) for i, j in enumerate(backward.tolist()) if j >= 0},
                    how,
                )
                for forward, backward in found
            ]

    def content(self) -> bytes:
        """Return the aligner as a safetensors file, the same bytes every time; see read_aligner."""
        tensors: dict[str, NDArray[Any]] = {}
        for side, words in zip(("source", "target"), self.words, strict=True):
            tensors[f"{side}_words"] = np.frombuffer("\n".join(words).encode(), np.uint8)
        for name, direction in zip(_DIRECTIONS, self.directions, strict=True):
            tensors[f"{name}.keys"] = direction.lexicon.keys
            tensors[f"{name}.probabilities"] = direction.lexicon.probabilities
            tensors |= {f"{name}.{part}": weights for part, weights in direction.jumps._asdict().items()}
            tensors[f"{name}.empty"] = np.array([direction.empty])
        return arrays_content(tensors, {"format": _FORMAT, "rule": self.rule})


def read_aligner(path: Path | str) -> Aligner:
    """Read a file made by Aligner.content.

    Raises DataError if it is missing, damaged, or has another format.
    """
    path = Path(path)
    try:
        if check_regular(path) > _MOST_BYTES:
            raise DataError(f"{path}: too large for an aligner of `ziggurat align --save-model`")
        metadata, tensors = read_arrays(path, _FORMAT, "aligner", "train it again")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; `ziggurat align ... --save-model {path}` writes one") from None
    try:
        rule = next(rule for rule in _RULES if rule == metadata.get("rule"))
        words = [bytes(_part(tensors, f"{side}_words", np.uint8)).decode() for side in ("source", "target")]
        sides = [text.split("\n") for text in words]
        forward = _direction(tensors, "forward", len(sides[0]), len(sides[1]))
        backward = _direction(tensors, "backward", len(sides[1]), len(sides[0]))
    except (ValueError, OverflowError, StopIteration) as error:
        raise DataError(f"{path}: damaged ({error}); train it again") from None
    return Aligner(rule, (sides[0], sides[1]), (forward, backward))


def _part(tensors: dict[str, NDArray[Any]], name: str, dtype: type, size: int | None = None) -> NDArray[Any]:
    """Return a tensor. Raises ValueError unless it has one dimension, this type and, if given, this size."""
    found = tensors.get(name)
    if found is None or found.ndim != 1 or found.dtype != dtype or size not in (None, len(found)):
        raise ValueError(f"`{name}` is missing or has another form")
    return found


def _direction(tensors: dict[str, NDArray[Any]], name: str, source_size: int, target_size: int) -> Direction:
    keys = _part(tensors, f"{name}.keys", np.int64)
    probabilities = _part(tensors, f"{name}.probabilities", np.float64, len(keys))
    sizes = {"between": 2 * JUMPS + 1, "first": JUMPS, "last": JUMPS}
    jumps = Jumps(**{part: _part(tensors, f"{name}.{part}", np.float64, size) for part, size in sizes.items()})
    empty = float(_part(tensors, f"{name}.empty", np.float64, 1)[0])
    ordered = not len(keys) or (
        keys[0] >= 0 and keys[-1] < (source_size + 1) * target_size and (np.diff(keys) > 0).all()
    )
    positive = all(np.isfinite(weights).all() and (weights > 0).all() for weights in (*jumps, probabilities))
    if not (ordered and positive and 0.0 < empty < 1.0):
        raise ValueError(f"`{name}` has numbers that no aligner has")
    return Direction(Lexicon(keys, probabilities, source_size, target_size), jumps, empty)
