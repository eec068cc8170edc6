"""Words of a line by sacreBLEU's tokenizers, and how often each stands in a text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from ziggurat.evaluation.scores import sacrebleu_metric

__all__ = ["Words", "bucket_index", "bucket_labels"]


class Words:
    """Splits lines into the words that BLEU counts."""

    def __init__(
        self, *, target_language: str | None = None, tokenize: str | None = None, lowercase: bool = False
    ) -> None:
        """Arguments and errors: as in ziggurat.evaluation.scores.evaluate."""
        metric = sacrebleu_metric("bleu", target_language=target_language, tokenize=tokenize, lowercase=lowercase)
        self._tokenizer = metric.tokenizer
        self._lowercase = lowercase
        self.name = str(metric.tokenizer_signature)
        """sacreBLEU's name of the tokenizer."""

    def __call__(self, line: str) -> list[str]:
        """Return the words of a line."""
        line = line.rstrip()
        return str(self._tokenizer(line.lower() if self._lowercase else line)).split()

    def counts(self, lines: Iterable[str]) -> Counter[str]:
        """Return how often each word stands in `lines`, which are read one by one."""
        found: Counter[str] = Counter()
        for line in lines:
            found.update(self(line))
        return found


def bucket_index(value: float, cutoffs: Sequence[int]) -> int:
    """Return which bucket `value` falls into: below the first of `cutoffs` (0), ..., at least the last."""
    return next((index for index, cutoff in enumerate(cutoffs) if value < cutoff), len(cutoffs))


def bucket_labels(cutoffs: Sequence[int], *, whole: bool = True) -> list[str]:
    """Return the names of the buckets, as compare-mt writes them; `whole`: values are whole numbers."""
    between = [str(low) if whole and high == low + 1 else f"[{low},{high})" for low, high in pairwise(cutoffs)]
    return [f"<{cutoffs[0]}", *between, f">={cutoffs[-1]}"]
