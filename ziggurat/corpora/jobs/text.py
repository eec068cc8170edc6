"""Jobs of lines: each line in, its result out as one line or several, in order.

The tasks that need models are in ziggurat.corpora.jobs.translation; this module does not import PyTorch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol, TypeVar

from ziggurat.corpora.jobs.plan import Plan
from ziggurat.corpora.jobs.run import JobOutcome, Work, complete_shards, run_job
from ziggurat.corpora.jobs.shards import Manifest, Shard, StageFiles
from ziggurat.data.alignment.aligner import Aligner, read_aligner
from ziggurat.data.alignment.links import format_links
from ziggurat.data.alignment.symmetry import Symmetrisation

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
