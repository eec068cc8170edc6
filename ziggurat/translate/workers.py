"""Translation by worker processes side by side, each with a copy of the model and a share of the CPU threads.

Each window of lines goes to one worker as a whole; the translations come back in order.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ziggurat.config import DecodingConfig
from ziggurat.system.processes import in_order, worker_pool
from ziggurat.translate.call import LineExtras, line_extras
from ziggurat.translate.lines import WINDOW_LINES, Notices, TranslationWarning, refuse_single, windows
from ziggurat.translate.results import Translation
from ziggurat.translate.translator import Translator, load_translator

WINDOWS_PER_WORKER = 2
"""Windows of each worker that are read and not yet yielded: one that it translates and one that waits for it."""


@dataclass(frozen=True)
class _Opening:
    """Arguments for `load_translator` in each worker; `threads` are those of all workers together."""

    models: tuple[str, ...]
    workers: int
    threads: int | None
    which: str | None
    without_layers: str | None
    device: str
    decoding: Mapping[str, Any] = field(compare=False)  # of one WorkerTranslator; a worker serves no other


class _ModelFacts(NamedTuple):
    """The opened model's settings and description, for this process."""

    decoding: DecodingConfig
    origin: str
    target_language: str
    about_precision: Mapping[bool, str]  # with hints or without


class _TranslatedWindow(NamedTuple):
    """A window's translations, and its notices (ziggurat.translate.lines)."""

    translations: list[Translation]
    counts: dict[str, int]
    told: dict[str, str]


class WorkerTranslator:
    """Translator of streams of text by worker processes; `open_workers` creates one.

    `decoding`, `origin`, `target_language`, `about_precision`, `notices` and `on_finished` are as in a Translator;
    `notices` adds up those of all workers.
    """

    def __init__(self, submit: Callable[..., Future[Any]], opening: _Opening) -> None:
        self._submit = submit
        self._opening = opening
        model: _ModelFacts = submit(_introduce, opening).result()
        # Where the precision is `auto`, this worker has chosen: the others might find something else.
        self._opening = replace(opening, decoding={**opening.decoding, "precision": model.decoding.precision})
        self.decoding = model.decoding
        self.origin = f"{model.origin}; {opening.workers} workers"
        self.about_precision: Callable[[bool], str] = model.about_precision.__getitem__
        self.target_language = model.target_language
        self.notices = Notices()
        self.on_finished: Callable[[int], object] = lambda count: None

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

        One worker translates a window as a whole. Up to WINDOWS_PER_WORKER windows for each worker are read before the
        first translation is yielded. Other arguments are as in Translator.translate_stream.
        """
        refuse_single(lines=lines, prefixes=prefixes, constraints=constraints)

        def start(texts: list[str], extras: LineExtras) -> Future[_TranslatedWindow]:
            of_lines = {
                "first": extras.first,
                "prefixes": None if prefixes is None else extras.prefixes,
                "constraints": None if constraints is None else extras.constraints,
            }
            return self._submit(_translate, self._opening, texts, {**options, **of_lines})

        start([], LineExtras()).result()  # refuses settings before any text is read
        tasks = line_extras(windows(lines, window), first, prefixes, constraints)
        limit = WINDOWS_PER_WORKER * self._opening.workers
        return chain.from_iterable(map(self._received, in_order(lambda task: start(*task), tasks, limit)))

    def _received(self, done: _TranslatedWindow) -> list[Translation]:
        self.notices.merge(done.counts, done.told)
        self.on_finished(len(done.translations))
        return done.translations


@contextlib.contextmanager
def open_workers(
    path: str | Path | Sequence[str | Path],
    *,
    workers: int,
    threads: int | None = None,
    device: str = "auto",
    which: str | None = None,
    without_layers: str | None = None,
    **decoding: Any,
) -> Iterator[WorkerTranslator]:
    """Open a run or a model directory, or several as an ensemble, in worker processes that end with the block.

    The workers import the calling script again, so a script needs `if __name__ == "__main__":` around its own work.

    Args:
        path: folder of a run or a model, or a list of them; this, `device`, `which`, `without_layers` and
            `decoding` as in `load_translator`.
        workers: number of processes.
        threads: CPU threads of all workers together (None: as many as PyTorch would take); each worker has an equal
            share, at least one.
        device: `auto`, `cpu`, `cuda`, ...; the same for all workers.
        which: checkpoint of a run.
        without_layers: layers to leave out.
        decoding: keys of the `decoding` section that replace the saved ones.

    Raises the errors of `load_translator`, and DataError where a worker died.
    """
    paths = [path] if isinstance(path, str | Path) else path
    opening = _Opening(tuple(map(str, paths)), workers, threads, which, without_layers, device, decoding)
    with worker_pool(workers, way_out="use fewer `--workers` or a smaller `batch_tokens`") as submit:
        yield WorkerTranslator(submit, opening)


# A worker process serves one WorkerTranslator, so one model at a time.
@lru_cache(maxsize=1)
def _opened(opening: _Opening) -> Translator:
    """Load the model, once in the life of a worker."""
    torch.set_num_threads(max(1, (opening.threads or torch.get_num_threads()) // opening.workers))
    return load_translator(
        opening.models,
        which=opening.which,
        without_layers=opening.without_layers,
        device=opening.device,
        **opening.decoding,
    )


def _introduce(opening: _Opening) -> _ModelFacts:
    translator = _opened(opening)
    about = {hints: translator.about_precision(hints) for hints in (False, True)}
    return _ModelFacts(translator.decoding, translator.origin, translator.target_language, about)


def _translate(opening: _Opening, texts: list[str], options: dict[str, Any]) -> _TranslatedWindow:
    translator = _opened(opening)
    translator.notices = Notices()
    # Notices.merge gives these warnings in the parent, each kind once for all workers.
    with warnings.catch_warnings(action="ignore", category=TranslationWarning):
        translations = translator.translate(texts, **options)
    return _TranslatedWindow(translations, dict(translator.notices), translator.notices.told)
