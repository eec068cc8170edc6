"""Opens the model behind a verb, on one of two engines (ziggurat.translate.engines) or with PyTorch."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ziggurat.cli.output import say
from ziggurat.model.run_folder import refuse_missing
from ziggurat.system.errors import ConfigError, printable
from ziggurat.system.processes import usable_cpus
from ziggurat.system.terminal import importing

if TYPE_CHECKING:
    from ziggurat.translate.engines import Engine
    from ziggurat.translate.interface import StreamTranslator
    from ziggurat.translate.translator import Translator

_LINES_PER_WORKER = 1000  # fewer do not make up for the seconds it takes a process to start and load the model
_BYTES_PER_WORKER = 2 << 30  # PyTorch, a model of a hundred million parameters, and a batch in the search
HINT_LINES = 1000
"""HINT_LINES is the number of lines from which a hint on faster translation is worth printing."""


@dataclass(frozen=True)
class ModelOptions:
    """Options that say how to open a model; None: the engine's default.

    `segmenters` are SentencePiece models of source and target, for a CTranslate2 folder from another toolkit.
    """

    which: str | None
    device: str
    threads: int | None
    settings: dict[str, Any] = field(default_factory=dict)
    without_layers: str | None = None
    engine: Engine = "auto"
    segmenters: tuple[Path | None, Path | None] = (None, None)

    @property
    def of_torch(self) -> dict[str, Any]:
        """Arguments of the functions that open a model with PyTorch."""
        return {"which": self.which, "without_layers": self.without_layers, "device": self.device, **self.settings}

    def export_folder(self, paths: Sequence[str], *, converted: bool = False) -> Path | None:
        """Return the folder with which CTranslate2 should translate; None if PyTorch should."""
        from ziggurat.translate.engines import export_folder

        return export_folder(
            self.engine, paths, which=self.which, without_layers=self.without_layers, converted=converted
        )


def open_model(paths: Sequence[str], options: ModelOptions, *, lines: int | None) -> Translator:
    """Return a PyTorch translator for one model, or several as an ensemble; prints which weights are used.

    `lines` is the number of lines to translate, None if unknown; small numbers get no hints on speed.
    """
    _refuse_missing(paths)
    with importing():
        import torch

        from ziggurat.translate.translator import load_translator

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    translator = load_translator(paths, **options.of_torch)
    _introduce(translator, lines)
    return translator


def model_languages(path: str, options: ModelOptions, *, converted: bool = False) -> tuple[str, str]:
    """Return the source and target language of a model without opening it; empty if unknown.

    `converted`: the folder may be one for CTranslate2 that another toolkit wrote, whose languages are unknown.
    """
    from ziggurat.config import load_experiment
    from ziggurat.model.run_folder import config_file

    _refuse_missing([path])
    served = options.export_folder([path], converted=converted)
    config = config_file(served or Path(path).expanduser())
    if not config.is_file():
        return "", ""
    data = load_experiment(config).data
    return data.source_language, data.target_language


def _introduce(translator: StreamTranslator, lines: int | None) -> None:
    """Print which weights are used, and for HINT_LINES lines or more whether another precision would be faster.

    With fewer lines it would save a few seconds at most, and users with many short texts would see it each time.
    """
    say(translator.origin)
    if about := translator.about_precision(lines is not None and lines >= HINT_LINES):
        say(about)


def say_hint(translator: StreamTranslator) -> None:
    """Print whether another precision would be faster, once a text of unknown length has turned out to be long."""
    about = translator.about_precision
    if (said := about(True)) != about(False):
        say(said)


@contextlib.contextmanager
def open_engine(
    paths: Sequence[str],
    options: ModelOptions,
    *,
    workers: int = 1,
    beside_lines: bool = False,
    lines: int | None = None,
) -> Iterator[StreamTranslator]:
    """Context with a translator; prints which weights are used, and ends its worker processes on exit.

    Args:
        paths: run or model directories; several form an ensemble.
        options: how to open the model.
        workers: number of processes, or of CTranslate2's workers, that translate in parallel.
        beside_lines: whether there are prefixes, constraints or terminology.
        lines: number of lines to translate; None: unknown.

    Raises ConfigError for anything the engine cannot do.
    """
    _refuse_missing(paths)
    folder = options.export_folder(paths, converted=True)
    if folder is None and any(options.segmenters):
        raise ConfigError(
            f"{paths[0]}: `--source-model` and `--target-model` are for a CTranslate2 folder that another toolkit "
            "wrote; leave them out"
        )
    if folder is not None:
        from ziggurat.translate.ctranslate2 import CTranslate2Translator
        from ziggurat.translate.engines import NO_LINE_INPUTS

        if beside_lines:
            raise ConfigError(NO_LINE_INPUTS)
        export = CTranslate2Translator(
            folder,
            device=options.device,
            threads=options.threads,
            workers=workers,
            segmenters=options.segmenters,
            **options.settings,
        )
        _introduce(export, lines)
        yield export
        return
    if workers == 1:
        yield open_model(paths, options, lines=lines)
        return
    with importing():
        from ziggurat.translate.translator import open_workers

    with open_workers(paths, workers=workers, threads=options.threads, **options.of_torch) as translator:
        _introduce(translator, lines)
        yield translator


def worker_count(asked: str, paths: Sequence[str], options: ModelOptions, lines: int | None) -> int:
    """Return the number of processes that `--workers` asks for.

    With `auto` on a CPU it is one per thread (two workers with one thread were 12 to 26 % faster than one with two), as
    long as each gets _LINES_PER_WORKER of the text's `lines` and finds _BYTES_PER_WORKER of free memory; CTranslate2's
    workers share one model. On a GPU, and for a stream of unknown length, it is one. Raises ConfigError for anything
    but `auto` or a number from 1 to 1024.
    """
    if asked != "auto":
        if not (re.fullmatch("[0-9]{1,4}", asked) and 1 <= int(asked) <= 1024):
            raise ConfigError(f"`--workers {printable(asked)}`: give a number from 1 to 1024, or `auto`")
        return int(asked)
    _refuse_missing(paths)
    most = min(options.threads or usable_cpus(), (lines or 0) // _LINES_PER_WORKER)
    if most < 2 or options.device.partition(":")[0] not in ("auto", "cpu"):
        return 1
    from ziggurat.translate.engines import is_converted, is_export

    # CTranslate2's workers share one model, and may not need PyTorch.
    if any(is_export(path) or is_converted(path) for path in paths):
        return most
    with importing():
        from ziggurat.model.accelerator import default_device
        from ziggurat.train.device import available_memory

    if options.device == "auto" and default_device().type != "cpu":
        return 1
    free = available_memory()
    return most if free is None else max(1, min(most, free // _BYTES_PER_WORKER))


def _refuse_missing(paths: Sequence[str]) -> None:
    """Raise CheckpointError for a missing folder, before the seconds that importing PyTorch takes."""
    for path in paths:
        refuse_missing(Path(path))


@contextlib.contextmanager
def warnings_shown() -> Iterator[None]:
    """Context that prints Python warnings as messages, without file and line number."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_args, **_kwargs: say(f"warning: {message}")
        yield


def notices_text(notices: Mapping[str, int]) -> str:
    """Return a translator's counts of unusual lines as the end of a sentence; empty if there are none."""
    from ziggurat.serve.notices import notice_text

    counts = [notice_text(kind, count) for kind, count in notices.items() if count]
    return "; " + ", ".join(counts) if counts else ""
