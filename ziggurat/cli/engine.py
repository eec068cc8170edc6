"""Opening the model behind a verb, and the forms in which its translations are shown.

`translate` runs on one of two engines: PyTorch on a run or model directory, or CTranslate2 on an exported one. All
other verbs use PyTorch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ziggurat.cli import importing
from ziggurat.cli.output import input_stream, say
from ziggurat.errors import ConfigError, printable
from ziggurat.models.run_folder import refuse_missing

if TYPE_CHECKING:
    from ziggurat.decoding.results import Translation
    from ziggurat.decoding.served import ServedTranslator
    from ziggurat.decoding.translator import Translator
    from ziggurat.decoding.workers import WorkerTranslator

__all__ = [
    "HINT_LINES",
    "ModelOptions",
    "inputs_beside_lines",
    "notices_text",
    "open_engine",
    "open_model",
    "say_hint",
    "text_form",
    "warnings_shown",
    "worker_count",
]

_LINES_PER_WORKER = 1000
"""Fewer do not win back the seconds in which a process starts and loads the model."""
HINT_LINES = 1000
"""Fewer are not worth a hint on how to translate them faster."""
_WORKER_BYTES = 1 << 29
"""Memory of a process without a model: PyTorch, and the search of a batch. A model takes up to three times its file,
as it is read and as it is packed."""

_ENGINES = ("auto", "torch", "ctranslate2")

_EXPORT_INSIDE = "ctranslate2"
"""Folder of a run or model directory where its own export is looked for."""


@dataclass(frozen=True)
class ModelOptions:
    """The options of a verb on how to open a model.

    Attributes:
        which: checkpoint of a run.
        device: `auto`, `cpu`, ...
        threads: CPU threads; None: the engine's default.
        settings: decoding settings.
        without_layers: layers to leave out; None: none.
    """

    which: str | None
    device: str
    threads: int | None
    settings: dict[str, Any] = field(default_factory=dict)
    without_layers: str | None = None


def open_model(paths: Sequence[str], options: ModelOptions, *, lines: int | None) -> Translator:
    """Return a PyTorch translator with a model, or with several as an ensemble; prints which weights are used.

    `lines` is the number of lines to translate, None if it is not known: for few there are no hints on speed.
    """
    _refuse_missing(paths)
    with importing():
        import torch

        from ziggurat.decoding.translator import load_translator

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    translator = load_translator(
        paths,
        which=options.which,
        without_layers=options.without_layers,
        device=options.device,
        **options.settings,
    )
    _introduce(translator, lines)
    return translator


def _introduce(translator: Translator | WorkerTranslator, lines: int | None) -> None:
    """Print which weights are used, and for a text of HINT_LINES or more whether another precision would be faster.

    In fewer lines it saves a few seconds at most, and whoever translates many short texts would read it each time.
    """
    say(translator.origin)
    if about := translator.about_precision(lines is not None and lines >= HINT_LINES):
        say(about)


def say_hint(translator: Translator | ServedTranslator | WorkerTranslator) -> None:
    """Print whether another precision would be faster, once a text of unknown length has turned out to be long."""
    about = getattr(translator, "about_precision", None)  # CTranslate2's has none: it is set at the export
    if about is not None and (said := about(True)) != about(False):
        say(said)


@contextlib.contextmanager
def open_engine(
    name: str,
    paths: Sequence[str],
    options: ModelOptions,
    *,
    workers: int,
    token_scores: bool,
    beside_lines: bool,
    lines: int | None,
) -> Iterator[Translator | ServedTranslator | WorkerTranslator]:
    """Context with a translator; prints which weights it has, and ends its worker processes.

    Args:
        name: `auto`, `torch` or `ctranslate2`.
        paths: run or model directories; several form an ensemble.
        options: how the model is opened.
        workers: number of processes, or of CTranslate2's workers, that translate in parallel.
        token_scores: whether results need the score of each token.
        beside_lines: whether there are prefixes, constraints or terminology.
        lines: number of lines to translate; None: not known.

    Raises ConfigError for anything that the engine cannot do.
    """
    _refuse_missing(paths)
    served = _open_served(name, paths, options, workers=workers, token_scores=token_scores)
    if served and beside_lines:
        raise ConfigError(
            "CTranslate2 takes no `--prefix`, `--constraints` or `--terminology`; take the model it was exported from"
        )
    if served:
        yield served
    elif workers == 1:
        yield open_model(paths, options, lines=lines)
    else:
        with importing():
            from ziggurat.decoding.workers import open_workers

        with open_workers(
            paths,
            workers=workers,
            threads=options.threads,
            device=options.device,
            which=options.which,
            without_layers=options.without_layers,
            **options.settings,
        ) as translator:
            _introduce(translator, lines)
            yield translator


def worker_count(asked: str, paths: Sequence[str], options: ModelOptions, lines: int | None) -> int:
    """Return the number of processes that `--workers` asks for.

    `auto` on a CPU is one for each thread: two workers of one thread were 12 to 26 % faster than one of two. It is
    fewer where a worker would get less than _LINES_PER_WORKER of the text's `lines`, or memory is short, and one for a
    stream, whose length is not known. Raises ConfigError for anything but `auto` or a number from 1 to 1024.
    """
    if asked != "auto":
        if not (re.fullmatch("[0-9]{1,4}", asked) and 1 <= int(asked) <= 1024):
            raise ConfigError(f"`--workers {printable(asked)}`: give a number from 1 to 1024, or `auto`")
        return int(asked)
    _refuse_missing(paths)
    most = min(options.threads or len(os.sched_getaffinity(0)), (lines or 0) // _LINES_PER_WORKER)
    if most < 2 or options.device.partition(":")[0] not in ("auto", "cpu"):
        return 1
    from ziggurat.decoding.served import is_served

    if any(is_served(path) for path in paths):  # its workers share one model, and may not need PyTorch
        return most
    with importing():
        import torch

        from ziggurat.models.directory import CHECKPOINTS, locate_weights
        from ziggurat.training.memory import available_memory

    if options.device == "auto" and torch.cuda.is_available():
        return 1
    each, free = _WORKER_BYTES, available_memory()
    for path in map(Path, paths):
        weights, _ = locate_weights(path, options.which if (path / CHECKPOINTS).is_dir() else None)
        with contextlib.suppress(OSError):  # a run in training may just have deleted this checkpoint
            each += 3 * weights.stat().st_size
    return most if free is None else max(1, min(most, free // (2 * each)))


def _open_served(
    name: str, paths: Sequence[str], options: ModelOptions, *, workers: int, token_scores: bool
) -> ServedTranslator | None:
    """Return a CTranslate2 translator and print which weights it has; None where PyTorch is to translate.

    `auto` goes by the folder. An exported model runs on CTranslate2. A run or model directory runs on PyTorch, which
    is exact for every model and setting; only where PyTorch is not installed, its export in the subfolder
    `ctranslate2` is used. `ctranslate2` takes that export, too.

    Raises ConfigError for an unknown engine, for an ensemble or a checkpoint with CTranslate2, and where there is no
    export.
    """
    if name not in _ENGINES:
        raise ConfigError(f"`--engine {name}`: choose one of {', '.join(_ENGINES)}")
    from ziggurat.decoding.served import ServedTranslator, is_served

    exported = [path for path in paths if is_served(path)]
    inside = Path(paths[0]) / _EXPORT_INSIDE
    if name == "torch" or (name == "auto" and not exported):
        if exported:
            raise ConfigError(
                f"{exported[0]}: exported for CTranslate2; PyTorch translates with the run it was made of"
            )
        if name == "torch" or importlib.util.find_spec("torch") is not None or not is_served(inside):
            return None
    if len(paths) > 1 or options.which is not None or options.without_layers is not None:
        raise ConfigError(
            "CTranslate2 translates with one exported model as it is: leave out `--ensemble`, `--which` and "
            "`--without-layers` (which `ziggurat export` takes, too)"
        )
    if not exported and not is_served(inside):
        raise ConfigError(
            f"{paths[0]}: no export for CTranslate2; this makes one: "
            f"`ziggurat export {paths[0]} --to ctranslate2 --out {inside}`"
        )
    translator = ServedTranslator(
        exported[0] if exported else inside,
        device=options.device,
        threads=options.threads,
        workers=workers,
        token_scores=token_scores,
        **options.settings,
    )
    say(translator.origin)
    return translator


def _refuse_missing(paths: Sequence[str]) -> None:
    """Raise CheckpointError for a folder that does not exist, before PyTorch is imported, which takes seconds."""
    for path in paths:
        refuse_missing(Path(path))


@contextlib.contextmanager
def warnings_shown() -> Iterator[None]:
    """Context that prints Python warnings as messages, without file and line number."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_args, **_kwargs: say(f"warning: {message}")
        yield


def inputs_beside_lines(prefix: str | None, constraints: str | None, terminology: str | None) -> dict[str, Any]:
    """Return the content of the files beside the lines, as arguments of `translate_stream`; a path may be `-`."""
    from ziggurat.decoding.lines import read_lines
    from ziggurat.decoding.terminology import read_constraints, read_terminology

    inputs: dict[str, Any] = {}
    if prefix is not None:
        inputs["prefixes"] = read_lines(*input_stream(prefix))
    if constraints is not None:
        inputs["constraints"] = read_constraints(read_lines(*input_stream(constraints)))
    if terminology is not None:
        stream, name = input_stream(terminology)
        inputs["terminology"] = read_terminology(read_lines(stream, name), name)
    return inputs


def text_form(translation: Translation, number: int, n_best: int, *, quality: bool = False) -> str:
    """Return a translation as text: one line, or with `n_best` above 1 several, numbered and with scores."""
    lines = []
    for hypothesis in translation.hypotheses:
        columns = [hypothesis.text] if n_best == 1 else [str(number), hypothesis.text, f"{hypothesis.score:.4f}"]
        lines.append(" ||| ".join([*columns, f"{hypothesis.quality:.4f}"] if quality else columns))
    return "\n".join(lines)


def notices_text(translator: Translator | ServedTranslator | WorkerTranslator) -> str:
    """Return the translator's counts of unusual lines, as the end of a sentence; empty where there are none."""
    names = {
        "blank_lines": "blank",
        "long_lines": "translated in parts",
        "unfinished": "cut at the length limit",
        "unmet": "without phrases they should contain",
    }
    counts = [f"{count:,} {names.get(kind, kind)}" for kind, count in translator.notices.items() if count]
    return "; " + ", ".join(counts) if counts else ""
