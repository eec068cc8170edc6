"""Translation by several processes, each with its own copy of the model and its share of the CPU threads."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ziggurat.config import DecodingConfig
from ziggurat.decoding.job import LineExtras, line_extras, refuse_single
from ziggurat.decoding.lines import WINDOW_LINES, windows
from ziggurat.decoding.notices import Notices, TranslationWarning
from ziggurat.decoding.pool import in_order, worker_pool
from ziggurat.decoding.results import Translation
from ziggurat.decoding.translator import Translator, load_translator
from ziggurat.errors import ConfigError

__all__ = ["WINDOWS_PER_WORKER", "WorkerTranslator", "open_workers"]

WINDOWS_PER_WORKER = 2
"""Windows that are read and not yet given back: one that a worker translates and one that waits for it."""


@dataclass(frozen=True)
class _Opening:
    """How each worker opens the model: arguments of `load_translator`, and its CPU threads (None: of all, a share)."""

    models: tuple[str, ...]
    workers: int
    threads: int | None
    which: str | None
    device: str
    decoding: Mapping[str, Any] = field(hash=False)


class _Model(NamedTuple):
    """What this process must know of the model."""

    decoding: DecodingConfig
    origin: str
    target_language: str


class _Done(NamedTuple):
    """A window's translations, and its notices (ziggurat.decoding.notices)."""

    translations: list[Translation]
    counts: dict[str, int]
    told: dict[str, str]


class WorkerTranslator:
    """Translates streams of text with worker processes; `open_workers` makes one.

    `decoding`, `origin`, `target_language`, `notices` and `told` are as in a Translator; `notices` sums up those of all
    workers.
    """

    def __init__(self, submit: Callable[..., Future[Any]], opening: _Opening) -> None:
        self._submit = submit
        self._opening = opening
        model: _Model = submit(_introduce, opening).result()
        self.decoding = model.decoding
        self.origin = f"{model.origin}; {opening.workers} workers"
        self.target_language = model.target_language
        self.notices = Notices()
        self.told: Callable[[int], object] = lambda count: None

    def translate_stream(
        self,
        lines: Iterable[str],
        *,
        window: int = WINDOW_LINES,
        first: int = 0,
        prefixes: Iterable[str] | None = None,
        constraints: Iterable[Sequence[str]] | None = None,
        **options: Any,
    ) -> Iterator[Translation]:
        """Yield one Translation per line, in order, in memory that does not grow with the number of lines.

        Each window is translated whole by one worker. Up to WINDOWS_PER_WORKER windows for each worker are read before
        the first translation is yielded. The rest is as in Translator.translate_stream.
        """
        if window < 1:
            raise ConfigError(f"`window` must be at least 1, not {window}")
        refuse_single(lines=lines, prefixes=prefixes, constraints=constraints)

        def start(texts: list[str], extras: LineExtras) -> Future[_Done]:
            beside = {
                "first": extras.first,
                "prefixes": None if prefixes is None else extras.prefixes,
                "constraints": None if constraints is None else extras.constraints,
            }
            return self._submit(_translate, self._opening, texts, {**options, **beside})

        start([], LineExtras()).result()  # refuses settings before any text is read
        beside = line_extras(windows(lines, window), first, prefixes, constraints)
        limit = WINDOWS_PER_WORKER * self._opening.workers
        return chain.from_iterable(map(self._received, in_order(lambda task: start(*task), beside, limit)))

    def _received(self, done: _Done) -> list[Translation]:
        self.notices.merge(done.counts, done.told)
        self.told(len(done.translations))
        return done.translations


@contextlib.contextmanager
def open_workers(
    path: str | Path | Sequence[str | Path],
    *,
    workers: int,
    threads: int | None = None,
    device: str = "auto",
    which: str | None = None,
    **decoding: Any,
) -> Iterator[WorkerTranslator]:
    """Open a run or a model directory, or several as an ensemble, in worker processes, which end with the block.

    As every program that starts processes anew, a script needs `if __name__ == "__main__":` around what it does.

    Args:
        path: folder of a run or a model, or a list of them; this and what follows is as in `load_translator`.
        workers: how many processes.
        threads: CPU threads of all together, as many as PyTorch would take if None; each worker has an equal share, at
            least one.
        device: `auto`, `cpu`, `cuda`, ...; the same for all workers.
        which: checkpoint of a run.
        decoding: keys of the `decoding` section that replace the saved ones.

    Raises what `load_translator` raises, and DataError where a worker died.
    """
    paths = [path] if isinstance(path, str | Path) else path
    opening = _Opening(tuple(map(str, paths)), workers, threads, which, device, decoding)
    with worker_pool(workers) as submit:
        yield WorkerTranslator(submit, opening)


@lru_cache(maxsize=1)
def _opened(opening: _Opening) -> Translator:
    """Load the model, once in the life of a worker."""
    torch.set_num_threads(max(1, (opening.threads or torch.get_num_threads()) // opening.workers))
    return load_translator(opening.models, which=opening.which, device=opening.device, **opening.decoding)


def _introduce(opening: _Opening) -> _Model:
    translator = _opened(opening)
    return _Model(translator.decoding, translator.origin, translator.target_language)


def _translate(opening: _Opening, texts: list[str], options: dict[str, Any]) -> _Done:
    translator = _opened(opening)
    translator.notices = Notices()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TranslationWarning)  # told by the process that started this one
        translations = translator.translate(texts, **options)
    return _Done(translations, dict(translator.notices), translator.notices.told)
