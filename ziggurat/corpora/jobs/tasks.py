"""Jobs of lines: each line in, its result out as one line or several, in order.

Alignment, translation and scoring are such tasks. PyTorch is imported by those that need a model, when they begin.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch

from ziggurat.config.data import Symmetrisation
from ziggurat.corpora.jobs.launchers import Manifest, Shard, StageFiles
from ziggurat.corpora.jobs.models import ModelChoice, opened
from ziggurat.corpora.jobs.run import JobOutcome, Plan, Work, complete_shards, run_job
from ziggurat.data.aligner import Aligner, format_links, read_aligner
from ziggurat.translate.options import TranslateOptions
from ziggurat.translate.results import Notices, Translation, TranslationWarning
from ziggurat.translate.terminology import read_constraints

Taken = TypeVar("Taken")


class Line(NamedTuple):
    """A line, and what stands beside it in other files."""

    text: str
    beside: tuple[Any, ...] = ()


class Task(Protocol):
    """A pure function of the lines of a shard, which processes on other machines can be given."""

    def __call__(self, lines: Sequence[Line], first: int) -> tuple[Sequence[str], Mapping[str, int]]:
        """Return the results, without line ends, and counts; `first` is the number of the first line, from 0."""


class Merged(NamedTuple):
    """The end of a job of lines.

    Attributes:
        taken: what the merge made of the results.
        lines: number of lines read.
        counts: what the task counted.
    """

    taken: Any
    lines: int
    counts: Mapping[str, int]


def run_text_job(
    plan: Plan,
    task: Task,
    lines: Callable[[], Iterable[Line]],
    take: Callable[[Iterator[bytes]], Taken],
    work: Work,
) -> JobOutcome[Merged]:
    """Do the rest of a job of lines; see run_job. `take` gets the results of the shards, in order."""
    files = StageFiles(plan.folder, plan.verb, plan.fingerprint, "txt")

    def merge() -> Merged:
        manifests = list(complete_shards(plan, files))
        counts = sum((Counter(manifest.dropped) for manifest in manifests), Counter())
        taken = take(files.read(manifest) for manifest in manifests)
        return Merged(taken, sum(manifest.read for manifest in manifests), counts)

    return run_job(plan, files, partial(_do, task, files), lines, merge, work)


def _do(task: Task, files: StageFiles, shard: Shard[Line]) -> Manifest:
    results, counts = task(shard.items, shard.first)
    content = "".join(result + "\n" for result in results).encode()
    return files.write(shard.index, content, read=len(shard.items), kept=len(results), dropped=counts)


@dataclass(frozen=True)
class Aligning:
    """Word alignments of lines, each with its translation beside it.

    Attributes:
        model: file of the aligner.
        how: symmetrisation.
    """

    model: str
    how: Symmetrisation

    def __call__(self, lines: Sequence[Line], first: int) -> tuple[list[str], Mapping[str, int]]:
        """Return the links of each pair, and how many there are."""
        found = _aligner(self.model).align([line.text for line in lines], [line.beside[0] for line in lines], self.how)
        counts = {"links": sum(map(len, found)), "without_links": sum(not links for links in found)}
        return [format_links(links) for links in found], counts


@lru_cache(maxsize=1)
def _aligner(path: str) -> Aligner:
    """Read an aligner, once in a worker's life."""
    return read_aligner(path)


@dataclass(frozen=True)
class Translating:
    """Translation of lines; all lines of a shard are one window, so the result does not depend on other shards.

    Attributes:
        choice: the models.
        form: of the output (ziggurat.translate.results.Translation); `best`: the text of the best translation alone,
            whatever `n_best` is.
        options: what is asked of the translations.
        beside: what stands beside the lines, in this order: `prefixes`, `constraints` (separated by tabs).
    """

    choice: ModelChoice
    form: Literal["text", "best", "quality", "json"] = "text"
    options: TranslateOptions = field(default_factory=TranslateOptions, hash=False)
    beside: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise ConfigError for what the engine or the model does not have; opens the models in this process."""
        self._translated([], 0)
        opened.cache_clear()  # this process translates nothing itself
        torch.cuda.empty_cache()  # and PyTorch keeps what was freed on a GPU

    def _translated(self, lines: Sequence[Line], first: int) -> list[Any]:
        translator = opened(self.choice)
        extras: dict[str, Any] = {name: [line.beside[n] for line in lines] for n, name in enumerate(self.beside)}
        if "constraints" in extras:
            extras["constraints"] = list(read_constraints(extras["constraints"]))
        translator.notices = Notices()
        with warnings.catch_warnings(action="ignore", category=TranslationWarning):  # they are counted
            texts = [line.text for line in lines]
            window = max(1, len(texts))
            return list(translator.translate_stream(texts, self.options, window=window, first=first, **extras))

    def __call__(self, lines: Sequence[Line], first: int) -> tuple[list[str], Mapping[str, int]]:
        """Return the translations, and how many were not made in the ordinary way."""
        found = self._translated(lines, first)
        translator = opened(self.choice)
        n_best = translator.decoding.n_best
        results = [self._written(each, number, n_best) for number, each in enumerate(found, start=first + 1)]
        return results, +translator.notices

    def _written(self, found: Translation, number: int, n_best: int) -> str:
        if self.form == "best":
            return found.text
        return found.to_json() if self.form == "json" else found.to_text(number, n_best, quality=self.form == "quality")


@dataclass(frozen=True)
class Scoring:
    """Log-probabilities of lines, each with its translation beside it.

    Attributes:
        choice: the models; PyTorch's.
        tag: tag for every line, or None.
        json: results as JSON.
    """

    choice: ModelChoice
    tag: str | None = None
    json: bool = False

    def __call__(self, lines: Sequence[Line], first: int) -> tuple[list[str], Mapping[str, int]]:
        """Return the scores."""
        translator = opened(self.choice)
        targets = [line.beside[0] for line in lines]
        found = translator.score([line.text for line in lines], targets, tag=self.tag, first=first)
        return [score.to_json() if self.json else score.to_text() for score in found], {}
