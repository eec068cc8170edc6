"""Which engine translates: PyTorch with a run or model directory, CTranslate2 with an exported one."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ziggurat.cli.output import console
from ziggurat.errors import ConfigError

if TYPE_CHECKING:
    from ziggurat.decoding.served import ServedTranslator
    from ziggurat.decoding.translator import Translator
    from ziggurat.decoding.workers import WorkerTranslator

__all__ = ["ENGINES", "Engine", "open_engine", "open_model"]

ENGINES = ("auto", "torch", "ctranslate2")

_TWIN = "ctranslate2"
"""Folder in a run or model directory where its export is looked for."""


@dataclass(frozen=True)
class Engine:
    """What the options of `translate` say of who translates.

    Attributes:
        name: Of the engine, or `auto`.
        models: Run or model directories; several are an ensemble.
        which: Checkpoint of a run.
        device: `auto`, `cpu`, ...
        threads: CPU threads; None: as the engine decides.
        workers: How many translate at the same time.
    """

    name: str
    models: Sequence[str]
    which: str | None
    device: str
    threads: int | None
    workers: int


@contextmanager
def open_engine(
    engine: Engine, settings: dict[str, Any], *, token_scores: bool, extras: bool
) -> Iterator[Translator | ServedTranslator | WorkerTranslator]:
    """Give what translates, say on standard error which weights it has, and end its processes, if it has some.

    Raises ConfigError: what the engine cannot do, `extras` beside the lines among it.
    """
    _refuse_missing(engine.models)
    served = _open_served(engine, settings, token_scores=token_scores)
    if served and extras:
        raise ConfigError(
            "CTranslate2 takes no `--prefix`, `--constraints` or `--terminology`; take the model it was exported from"
        )
    if served:
        yield served
    elif engine.workers == 1:
        yield open_model(engine.models, engine.which, engine.device, engine.threads, settings)
    else:
        from ziggurat.decoding.workers import open_workers

        with open_workers(
            engine.models,
            workers=engine.workers,
            threads=engine.threads,
            device=engine.device,
            which=engine.which,
            **settings,
        ) as translator:
            _say(translator.origin)
            yield translator


def open_model(
    paths: Sequence[str], which: str | None, device: str, threads: int | None, settings: dict[str, Any]
) -> Translator:
    """Open a model, or several as an ensemble, in PyTorch and say on standard error which weights are used."""
    _refuse_missing(paths)
    import torch

    from ziggurat.decoding.translator import load_translator

    if threads is not None:
        torch.set_num_threads(threads)
    translator = load_translator(paths, which=which, device=device, **settings)
    _say(translator.origin)
    return translator


def _open_served(engine: Engine, settings: dict[str, Any], *, token_scores: bool) -> ServedTranslator | None:
    """Return a translator by CTranslate2, and say so on standard error, or None where PyTorch is to translate.

    `auto` goes by what the folder holds: an exported directory is translated with by CTranslate2; a run or model
    directory by PyTorch, which is exact for every model and setting, or, where PyTorch is not installed, by its export
    in the folder `ctranslate2` inside. `ctranslate2` takes that export too.

    Raises ConfigError: an unknown engine, an ensemble or a checkpoint asked of CTranslate2, no export there.
    """
    name, paths = engine.name, engine.models
    if name not in ENGINES:
        raise ConfigError(f"`--engine {name}`: choose one of {', '.join(ENGINES)}")
    from ziggurat.decoding.served import ServedTranslator, is_served

    exported = [path for path in paths if is_served(path)]
    twin = Path(paths[0]) / _TWIN
    if name == "torch" or (name == "auto" and not exported):
        if exported:
            raise ConfigError(
                f"{exported[0]}: exported for CTranslate2; PyTorch translates with the run it was made of"
            )
        if name == "torch" or importlib.util.find_spec("torch") is not None or not is_served(twin):
            return None
    if len(paths) > 1 or engine.which is not None:
        raise ConfigError("CTranslate2 translates with one exported model: leave out `--ensemble` and `--which`")
    if not exported and not is_served(twin):
        raise ConfigError(
            f"{paths[0]}: no export for CTranslate2; this makes one: "
            f"`ziggurat export {paths[0]} --to ctranslate2 --out {twin}`"
        )
    path = exported[0] if exported else twin
    translator = ServedTranslator(
        path,
        device=engine.device,
        threads=engine.threads,
        workers=engine.workers,
        token_scores=token_scores,
        **settings,
    )
    _say(translator.origin)
    return translator


def _refuse_missing(paths: Sequence[str]) -> None:
    """Raise CheckpointError for a folder that is not there, before PyTorch is loaded, which takes seconds."""
    from ziggurat.models.run_folder import refuse_missing

    for path in paths:
        refuse_missing(Path(path).expanduser())


def _say(origin: str) -> None:
    """Print on standard error which weights are used."""
    console().print(origin, markup=False, highlight=False, soft_wrap=True)
