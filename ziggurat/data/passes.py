"""The first two passes of `prepare` over its corpora: counting, and sampling for the subword model and the aligner.

Counting itself is in ziggurat.data.inputs, the third pass in ziggurat.data.encoding. Every pass streams the files
again, so memory does not grow with the corpora.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Protocol

from ziggurat.config.data import DataConfig
from ziggurat.data.cleaning.cleaner import Scorers, cleaners_of
from ziggurat.data.cleaning.comparisons import Comparisons
from ziggurat.data.encoding import EncodedBlock
from ziggurat.data.inputs import Corpus, Progress, count_pairs, nothing_left, short_row_notices, side_notices
from ziggurat.data.subword import Tokenizer, save_tokenizers
from ziggurat.data.subword_training import (
    even_shares,
    existing_tokenizers,
    sampled_blocks,
    train_pair_scores,
    train_tokenizers,
)
from ziggurat.data.vocabulary import tag_notices
from ziggurat.data.word_links import train_aligner, words_of


def sample_sentences(
    corpora: Sequence[Corpus],
    config: DataConfig,
    side: str,
    progress: Progress,
    scorers: Scorers | None = None,
) -> Iterator[str]:
    """Yield the normalised sentences that the subword model is trained on, in file order, in constant memory.

    A random choice (a function of the counts alone) of at most `subword.sample_pairs` pairs, equally many from each
    corpus as far as it has them. Pairs that the filters drop are left out, except those that they compare with others:
    duplicates stay.

    Args:
        corpora: training corpora with their counts.
        config: the data section.
        side: `source`, `target`, or `joint` for both.
        progress: called with the number of pairs read.
        scorers: the pair scores, where a filter goes by them.

    Raises:
        DataError: the filters leave none of the sampled pairs.
    """
    cleaners = cleaners_of(config, corpora, scorers)
    counts: Counter[str] = Counter()
    shares = even_shares([corpus.read for corpus in corpora], config.subword.sample_pairs)
    kept = 0
    for sources, targets in sampled_blocks(corpora, cleaners, shares, config.unicode, counts, progress):
        kept += len(sources)
        yield from {"source": sources, "target": targets}.get(side) or chain(sources, targets)
    if not kept:
        raise nothing_left(sum(shares), counts, corpora)


class Learnt(NamedTuple):
    """What is learnt of the corpora before any pair is encoded."""

    tokenizers: tuple[Tokenizer, Tokenizer]
    notices: list[str]
    """Suspicious findings."""
    scorers: Scorers
    """The pair scores that filters go by."""


class Parts(Protocol):
    """Parts of a store that were made elsewhere (ziggurat.corpora.jobs.preparation)."""

    def learnt(self, directory: Path) -> Learnt:
        """Return what `learn` does."""

    def blocks(self, split: str, comparisons: Comparisons) -> Iterator[EncodedBlock]:
        """Yield what ziggurat.data.encoding.encode_corpora does."""


def learn(corpora: Sequence[Corpus], config: DataConfig, directory: Path, progress: Progress) -> Learnt:
    """Return what is learnt of the corpora; the tokenizers are saved in `directory`.

    The corpora are counted and checked, and get an aligner if `data.alignment.compute` asks for one.

    Raises ConfigError for a filter that is not installed, and the errors of what it calls.
    """
    training = [corpus for corpus in corpora if corpus.split == "train"]
    cleaners_of(config, training)  # before the long passes: a package may be missing, a script unknown
    tags = list(dict.fromkeys(c.config.tag for c in corpora if c.config.tag is not None))
    subword = config.subword
    if subword.kind in ("existing", "vocabulary"):
        # Before the long passes, since errors here are cheap to find.
        tokenizers = existing_tokenizers(subword, config.unicode, tags)
        count_pairs(corpora, progress, words_of(config, tokenizers))
        scorers = train_pair_scores(training, config, progress)
    else:
        count_pairs(corpora, progress, words_of(config, None))
        scorers = train_pair_scores(training, config, progress)
        tokenizers = train_tokenizers(
            subword, config.unicode, tags, lambda side: sample_sentences(training, config, side, progress, scorers)
        )
    save_tokenizers(directory, *tokenizers)
    _align_corpora(corpora, config, tokenizers, progress)
    notices = short_row_notices(corpora) + side_notices(corpora, config) + tag_notices(config, tokenizers[0].tags)
    return Learnt(tokenizers, notices, scorers)


def _align_corpora(
    corpora: Sequence[Corpus],
    config: DataConfig,
    tokenizers: tuple[Tokenizer, Tokenizer],
    progress: Progress,
) -> None:
    """Give the corpora without files of alignments an aligner, if `data.alignment.compute` asks for it.

    It learns from the training corpora among them, or from all training corpora where only others are among them.
    """
    options, unaligned = config.alignment, [corpus for corpus in corpora if corpus.alignments is None]
    if options.compute == "none" or not unaligned:
        return
    words = words_of(config, tokenizers)
    progress("train aligner", 0, None)
    training = [corpus for corpus in corpora if corpus.split == "train"]
    chosen = [corpus for corpus in training if corpus.alignments is None] or training
    readers = [(corpus.reader, corpus.read) for corpus in chosen]
    maker = train_aligner(readers, words, options.pairs, options.symmetrise)
    for corpus in unaligned:
        corpus.maker = maker
