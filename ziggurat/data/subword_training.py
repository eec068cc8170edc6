"""Training of SentencePiece models and of the pair score on random samples of the corpora; existing tokenizers."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, compress
from pathlib import Path
from threading import Event, Thread

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from ziggurat.config.data import DataConfig, SubwordConfig
from ziggurat.data.cleaning.cleaner import Cleaner, Scorers, cleaners_of
from ziggurat.data.cleaning.pair_score import PairScorer, read_pair_score
from ziggurat.data.inputs import Corpus, Progress
from ziggurat.data.lines import UnicodeForm
from ziggurat.data.readers import PairBlock
from ziggurat.data.subword import (
    MAX_MODEL_BYTES,
    SentencePieceTokenizer,
    Tokenizer,
    escape_blank_marks,
    load_tokenizers,
)
from ziggurat.data.vocabulary import VocabularyTokenizer
from ziggurat.system.errors import ConfigError, DataError
from ziggurat.system.files import check_file, find_files, write_atomically
from ziggurat.system.small_files import read_bounded

# SentencePiece sums unigram counts per thread: with a fixed number the model is the same on every machine.
_TRAINING_THREADS = 4
_LARGE_SAMPLE = 2_000_000  # with more pairs SentencePiece needs 64-bit text positions

Sample = Callable[[str], Iterator[str]]
"""Function from `source`, `target` or `joint` to normalised sentences (not escaped)."""


def train_tokenizers(
    config: SubwordConfig, unicode: UnicodeForm, tags: list[str], sample: Sample
) -> tuple[Tokenizer, Tokenizer]:
    """Train one model for both sides, or one each (`kind: bpe` or `unigram`); deterministic.

    Raises DataError: SentencePiece cannot make a vocabulary of this size.
    """
    size = config.vocabulary_size
    if config.joint:
        joint = SentencePieceTokenizer(_train(config, size, sample("joint"), "joint"), unicode, tags)
        return joint, joint
    target_size = config.target_vocabulary_size or size
    return (
        SentencePieceTokenizer(_train(config, size, sample("source"), "source"), unicode, tags),
        SentencePieceTokenizer(_train(config, target_size, sample("target"), "target"), unicode),
    )


def _train(config: SubwordConfig, size: int, sentences: Iterator[str], side: str) -> bytes:
    """Return a serialised model. It may have fewer pieces than requested if the corpus is small."""
    writer = io.BytesIO()
    failed: list[BaseException] = []

    def guarded() -> Iterator[str]:
        # SentencePiece would turn an exception of the iterator into a RuntimeError, so it is kept and raised below.
        try:
            for sentence in sentences:
                yield from escape_blank_marks([sentence])
        except BaseException as error:
            failed.append(error)

    _demand_threads(_TRAINING_THREADS)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=guarded(),
            model_writer=writer,
            model_type=config.kind,
            vocab_size=size,
            hard_vocab_limit=False,  # a small corpus may have fewer pieces
            byte_fallback=config.byte_fallback,
            character_coverage=config.character_coverage,
            # Text is normalised already (ziggurat.data.lines); SentencePiece's NFKC could not be undone when decoding.
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            pad_id=0,
            unk_id=1,
            bos_id=2,
            eos_id=3,
            pad_piece="<pad>",
            user_defined_symbols=list(dict.fromkeys(config.symbols or [])),
            max_sentence_length=1 << 14,
            num_threads=_TRAINING_THREADS,
            train_extremely_large_corpus=config.sample_pairs > _LARGE_SAMPLE,
            minloglevel=2,
        )
    except RuntimeError as error:
        if failed:
            raise failed[0] from None
        key = "target_vocabulary_size" if side == "target" and config.target_vocabulary_size else "vocabulary_size"
        reason = _said(str(error), config, key)
        raise DataError(
            f"data.subword: no {config.kind} model of {size} pieces for the {side} side: {reason}",
            key="data.subword",
            named=[f"data.subword.{key}", "data.subword.character_coverage"],
        ) from None
    if failed:
        raise failed[0]
    return writer.getvalue()


def _said(error: str, config: SubwordConfig, key: str) -> str:
    """Return SentencePiece's reason in terms of configuration keys; `key` is that of the vocabulary's size."""
    if "sentences_.empty()" in error:
        return "there is no text to train it on"
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", error):
        what = "characters, bytes and control symbols" if config.byte_fallback else "characters and control symbols"
        return (
            f"its {what} alone are {int(found[1]):,}; raise data.subword.{key} to at least that, or lower "
            "data.subword.character_coverage, which sets how many rare characters get a piece of their own"
        )
    detail = error.rpartition("] ")[2].strip() or error
    return f"{detail} (data.subword.{key} and data.subword.character_coverage determine its pieces)"


def _demand_threads(count: int) -> None:
    """Raise RuntimeError unless `count` threads can be started: with fewer, SentencePiece would abort the process."""
    gate, threads = Event(), []
    try:
        for _ in range(count):
            threads.append(Thread(target=gate.wait))
            threads[-1].start()
    finally:
        gate.set()
        for thread in threads:
            if thread.ident is not None:  # started
                thread.join()


def existing_tokenizers(config: SubwordConfig, unicode: UnicodeForm, tags: list[str]) -> tuple[Tokenizer, Tokenizer]:
    """Load the models (`kind: existing`) or vocabularies (`kind: vocabulary`) that the configuration names.

    The folder of a model, run or store stands for its vocabularies, including tags. Raises DataError if a file is
    missing, or is not a model or vocabulary. Raises ConfigError if a folder's vocabularies lack some of `tags`, or have
    a normalisation other than `unicode`.
    """
    kind = "model" if config.kind == "existing" else "vocabulary"
    source = config.source_model if kind == "model" else config.source_vocabulary
    target = config.target_model if kind == "model" else config.target_vocabulary
    if source is None:
        raise ConfigError(f"data.subword.source_{kind}: `kind: {config.kind}` needs it")
    if kind == "model" and (folder := Path(source).expanduser()).is_dir():
        return _of_folder(folder, target, unicode, tags)
    first = _read(source, f"data.subword.source_{kind}", kind, unicode, tags)
    if target is None or target == source:
        return first, first
    return first, _read(target, f"data.subword.target_{kind}", kind, unicode, [])


def _of_folder(folder: Path, target: str | None, unicode: UnicodeForm, tags: list[str]) -> tuple[Tokenizer, Tokenizer]:
    if target is not None:
        raise ConfigError(
            f"data.subword.target_model: leave it out; {folder} has the vocabularies of both sides",
            key="data.subword.target_model",
        )
    tokenizers = load_tokenizers(folder)
    for tokenizer in tokenizers:
        if tokenizer.unicode != unicode:
            raise ConfigError(
                f"`data.unicode: {unicode}`, but the vocabularies of {folder} are for text of "
                f"`{tokenizer.unicode}`; set it to that",
                key="data.unicode",
            )
    if unknown := [tag for tag in tags if tag not in tokenizers[0].tags]:
        known = ", ".join(tokenizers[0].tags) or "none"
        raise ConfigError(f"`tag: {unknown[0]}` is not in the vocabulary of {folder}, whose tags are: {known}")
    return tokenizers


def _read(name: str, key: str, kind: str, unicode: UnicodeForm, tags: list[str]) -> Tokenizer:
    found = find_files(name, key)
    if len(found) != 1:
        raise DataError(f"{key}: {name} matches {len(found)} files, but must match one", key=key)
    path: Path = found[0]
    check_file(path)
    try:
        content = read_bounded(path, MAX_MODEL_BYTES)
        if kind == "model":
            return SentencePieceTokenizer(content, unicode, tags)
        return VocabularyTokenizer(content, unicode, tags)
    except OSError as error:
        raise DataError(f"{key}: {path}: cannot be read: {error.strerror}", key=key) from None
    except DataError as error:
        raise DataError(f"{key}: {path}: {error}", key=key) from None


_SAMPLE_SEED = 20_17  # an arbitrary seed, fixed so that the sample is the same every time


def train_pair_scores(corpora: Sequence[Corpus], config: DataConfig, progress: Progress) -> Scorers:
    """Return the pair score of each direction, learned from the training corpora that are filtered by it.

    It sees the pairs that pass the other filters of single pairs. Raises DataError if they are too few.
    """
    directions: dict[tuple[str, str], list[Corpus]] = {}
    for corpus in corpora:
        if config.filters_of(corpus.config).pair_score is not None:
            directions.setdefault(config.languages_of(corpus.config), []).append(corpus)
    found = {}
    for languages, chosen in directions.items():
        wanted = [f.pair_score.pairs for f in (config.filters_of(c.config) for c in chosen) if f.pair_score]
        sizes = np.array([corpus.read for corpus in chosen])
        # In proportion to the corpora, since the others do not need the words of a small one.
        shares = [int(size) for size in np.floor(sizes * min(1.0, wanted[0] / sizes.sum()))]
        blocks = sampled_blocks(chosen, cleaners_of(config, chosen), shares, config.unicode, Counter(), progress)
        pairs = [*chain.from_iterable(zip(*block, strict=True) for block in blocks)]
        progress("learn pair score", 0, None)
        found[languages] = PairScorer.train(pairs)
    return found


def write_pair_scores(folder: Path, scorers: Scorers, config: DataConfig) -> None:
    """Write the pair scores into a folder, for `read_pair_scores`."""
    files = _pair_score_files(config)
    for languages, scorer in scorers.items():
        write_atomically(folder / files[languages], scorer.content())


def read_pair_scores(folder: Path, config: DataConfig) -> Scorers:
    """Return the pair scores in a folder. Raises DataError if one is damaged."""
    files = {languages: folder / name for languages, name in _pair_score_files(config).items()}
    return {languages: read_pair_score(file) for languages, file in files.items() if file.exists()}


def _pair_score_files(config: DataConfig) -> dict[tuple[str, str], str]:
    directions = dict.fromkeys(map(config.languages_of, config.train))
    return {languages: f"pair-score-{number}" for number, languages in enumerate(directions)}


def sampled_blocks(
    corpora: Sequence[Corpus],
    cleaners: Sequence[Cleaner],
    shares: Sequence[int],
    form: UnicodeForm,
    counts: Counter[str],
    progress: Progress,
) -> Iterator[PairBlock]:
    """Yield the mended pairs of a random sample that pass the filters, in file order, in constant memory.

    The choice is a function of the counts alone. `shares` are the pairs to draw from each corpus; dropped pairs are
    added to `counts`.
    """
    generator = np.random.default_rng(_SAMPLE_SEED)
    done, total = 0, sum(corpus.read for corpus in corpora)
    for corpus, cleaner, share in zip(corpora, cleaners, shares, strict=True):
        picks = SampledPositions(generator, corpus.read, share)
        for (source, target), _, unwanted in corpus.blocks():
            picked = picks.take(len(source))
            sides = [list(compress(texts, picked)) for texts in (source, target)]
            first, second, _ = cleaner.mended(sides[0], sides[1], form)
            sources, targets, _ = cleaner.clean(first, second, counts, None if unwanted is None else unwanted[picked])
            yield sources, targets
            done += len(source)
            progress("sample", done, total)


class SampledPositions:
    """A random choice of `wanted` out of `total` items without replacement, revealed in order, in constant memory.

    Items are drawn in windows of fixed size, with a hypergeometric number of chosen items in each, so the choice does
    not depend on how many items are asked for at a time.
    """

    _WINDOW = 8192
    _MOST = 10**9 - 1  # of chosen and of other items, for numpy's hypergeometric

    def __init__(self, generator: np.random.Generator, total: int, wanted: int) -> None:
        self._generator = generator
        self._total = total
        self._wanted = wanted
        self._mask = np.zeros(0, np.bool_)

    def take(self, count: int) -> NDArray[np.bool_]:
        """Return the mask of the chosen items among the next `count`, bool [count]."""
        while len(self._mask) < count and self._total:
            size = min(self._WINDOW, self._total)
            chosen = self._chosen(size, self._total - self._wanted)
            window = np.zeros(size, np.bool_)
            window[self._generator.choice(size, chosen, replace=False)] = True
            self._total -= size
            self._wanted -= chosen
            self._mask = np.concatenate([self._mask, window])
        mask, self._mask = self._mask[:count], self._mask[count:]
        return mask

    def _chosen(self, size: int, others: int) -> int:
        """Draw the number of chosen items in a window of `size` of those left, of which `others` are not chosen."""
        if max(self._wanted, others) <= self._MOST:
            return int(self._generator.hypergeometric(self._wanted, others, size))
        # numpy refuses such numbers. A window is so small a part of a billion items that a binomial number is as good,
        # within these bounds, since the remaining items must be enough for the remaining choices.
        drawn = int(self._generator.binomial(size, self._wanted / self._total))
        return min(max(drawn, size - others), size, self._wanted)


def even_shares(sizes: Sequence[int], total: int) -> list[int]:
    """Split `total` evenly over corpora of `sizes` pairs; the shares that small ones cannot fill go to the others."""
    shares = [0] * len(sizes)
    left = min(total, sum(sizes))
    # Smallest first, so that its unused share goes to all larger ones.
    for position, number in enumerate(sorted(range(len(sizes)), key=lambda n: sizes[n])):
        shares[number] = min(sizes[number], left // (len(sizes) - position))
        left -= shares[number]
    return shares
