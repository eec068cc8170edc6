"""The first two passes of `prepare` over its corpora: counting, and sampling for the subword model and the aligner.

Counting itself is in ziggurat.data.inputs, the third pass in ziggurat.data.encoding. Every pass streams the files
again, so memory does not grow with the corpora.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, compress
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ziggurat.alignment.eflomal import refuse_without_eflomal
from ziggurat.config.data import DataConfig
from ziggurat.data.clean import Cleaner
from ziggurat.data.encoded import EncodedBlock
from ziggurat.data.inputs import Corpus, Progress, count_pairs, nothing_left, side_notices
from ziggurat.data.lines import normalise
from ziggurat.data.subword import Tokenizer, save_tokenizers
from ziggurat.data.subword_training import existing_tokenizers, train_tokenizers
from ziggurat.data.word_links import run_eflomal, train_aligner, words_of

__all__ = ["Parts", "learn", "sample_sentences"]


_SAMPLE_SEED = 20_17  # any number: the sample must only be the same every time


def sample_sentences(corpora: Sequence[Corpus], config: DataConfig, side: str, progress: Progress) -> Iterator[str]:
    """Yield the normalised sentences that the subword model is trained on, in file order, in constant memory.

    A random choice (a function of the counts alone) of at most `subword.sample_pairs` pairs, equally many from each
    corpus as far as it has them. Pairs that the filters drop are left out, except that duplicates stay.

    Args:
        corpora: Training corpora with their counts.
        config: The data section.
        side: `source`, `target`, or `joint` for both.
        progress: Called with the number of pairs read.

    Raises:
        DataError: the filters leave none of the sampled pairs.
    """
    generator = np.random.default_rng(_SAMPLE_SEED)
    # The hashes that find duplicates would grow with the corpus, and this pass takes constant memory.
    cleaner = Cleaner(config.filters.model_copy(update={"duplicates": False}))
    counts: Counter[str] = Counter()
    shares = _even_shares([corpus.read for corpus in corpora], config.subword.sample_pairs)
    kept = done = 0
    for corpus, share in zip(corpora, shares, strict=True):
        picks = _Picks(generator, corpus.read, share)
        for source, target in corpus.reader.blocks():
            picked = picks.take(len(source))
            sides = [normalise(list(compress(texts, picked)), config.unicode) for texts in (source, target)]
            sources, targets, _ = cleaner.clean(sides[0], sides[1], counts)
            kept += len(sources)
            yield from {"source": sources, "target": targets}.get(side) or chain(sources, targets)
            done += len(source)
            progress("sample", done, sum(corpus.read for corpus in corpora))
    if not kept:
        raise nothing_left(sum(shares), counts, corpora)


class _Picks:
    """A random choice of `wanted` out of `total` items without replacement, revealed in order, in constant memory.

    Items are drawn in windows of fixed size, with a hypergeometric number of chosen items in each, so the choice does
    not depend on how many items are asked for at a time.
    """

    _WINDOW = 8192

    def __init__(self, generator: np.random.Generator, total: int, wanted: int) -> None:
        self._generator = generator
        self._total = total
        self._wanted = wanted
        self._mask = np.zeros(0, np.bool_)

    def take(self, count: int) -> NDArray[np.bool_]:
        """Return the mask of the chosen items among the next `count`, bool [count]."""
        while len(self._mask) < count and self._total:
            size = min(self._WINDOW, self._total)
            chosen = int(self._generator.hypergeometric(self._wanted, self._total - self._wanted, size))
            window = np.zeros(size, np.bool_)
            window[self._generator.choice(size, chosen, replace=False)] = True
            self._total -= size
            self._wanted -= chosen
            self._mask = np.concatenate([self._mask, window])
        mask, self._mask = self._mask[:count], self._mask[count:]
        return mask


def _even_shares(sizes: Sequence[int], total: int) -> list[int]:
    """Split `total` evenly over corpora of `sizes` pairs; the shares that small ones cannot fill go to the others."""
    shares = [0] * len(sizes)
    left = min(total, sum(sizes))
    # From the smallest: what it leaves is then shared by all larger ones.
    for position, number in enumerate(sorted(range(len(sizes)), key=lambda n: sizes[n])):
        shares[number] = min(sizes[number], left // (len(sizes) - position))
        left -= shares[number]
    return shares


class Parts(Protocol):
    """Parts of a store that were made elsewhere (ziggurat.jobs.preparation)."""

    def learnt(self, directory: Path) -> tuple[tuple[Tokenizer, Tokenizer], list[str]]:
        """Return what `learn` does."""

    def blocks(self, split: str) -> Iterator[EncodedBlock]:
        """Yield what ziggurat.data.encoding.encode_corpora does."""


def learn(
    corpora: Sequence[Corpus], config: DataConfig, directory: Path, progress: Progress
) -> tuple[tuple[Tokenizer, Tokenizer], list[str]]:
    """Return the tokenizers, which are saved in `directory`, and notices on the corpora.

    The corpora are counted and checked, and get an aligner if `data.alignment.compute` asks for one.

    Raises ConfigError for an aligner that is not installed, and the errors of what it calls.
    """
    if config.alignment.compute == "eflomal":
        refuse_without_eflomal()
    tags = list(dict.fromkeys(c.config.tag for c in corpora if c.config.tag is not None))
    subword = config.subword
    if subword.kind in ("existing", "vocabulary"):
        # Before the long passes, since errors here are cheap to find.
        tokenizers = existing_tokenizers(subword, config.unicode, tags)
        count_pairs(corpora, progress, words_of(config, tokenizers))
    else:
        count_pairs(corpora, progress, words_of(config, None))
        training = [corpus for corpus in corpora if corpus.split == "train"]
        tokenizers = train_tokenizers(
            subword, config.unicode, tags, lambda side: sample_sentences(training, config, side, progress)
        )
    save_tokenizers(directory, *tokenizers)
    _align_corpora(corpora, config, tokenizers, directory, progress)
    return tokenizers, side_notices(corpora, config)


def _align_corpora(
    corpora: Sequence[Corpus],
    config: DataConfig,
    tokenizers: tuple[Tokenizer, Tokenizer],
    folder: Path,
    progress: Progress,
) -> None:
    """Give the corpora without files of alignments an aligner, if `data.alignment.compute` asks for it.

    Ours learns from the training corpora among them, or from all training corpora where only others are among them;
    eflomal aligns them all, with temporary files in `folder`.
    """
    options, unaligned = config.alignment, [corpus for corpus in corpora if corpus.alignments is None]
    if options.compute == "none" or not unaligned:
        return
    words = words_of(config, tokenizers)
    if options.compute == "eflomal":
        progress("run eflomal", 0, None)
        maker = run_eflomal([corpus.reader for corpus in unaligned], words, options.symmetrise, folder)
    else:
        progress("train aligner", 0, None)
        training = [corpus for corpus in corpora if corpus.split == "train"]
        chosen = [corpus for corpus in training if corpus.alignments is None] or training
        readers = [(corpus.reader, corpus.read) for corpus in chosen]
        maker = train_aligner(readers, words, options.pairs, options.symmetrise)
    for corpus in unaligned:
        corpus.maker = maker
