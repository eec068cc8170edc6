"""Which engine translates: PyTorch with a run or model directory, CTranslate2 with an exported one."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ziggurat.cli.output import console
from ziggurat.errors import ConfigError

if TYPE_CHECKING:
    from ziggurat.decoding.served import ServedTranslator

__all__ = ["ENGINES", "open_served"]

ENGINES = ("auto", "torch", "ctranslate2")

_TWIN = "ctranslate2"
"""Folder in a run or model directory where its export is looked for."""


def open_served(
    paths: Sequence[str],
    engine: str,
    which: str | None,
    device: str,
    threads: int | None,
    settings: dict[str, Any],
    *,
    token_scores: bool,
) -> ServedTranslator | None:
    """Return a translator by CTranslate2, and say so on standard error, or None where PyTorch is to translate.

    `auto` goes by what the folder holds: an exported directory is translated with by CTranslate2; a run or model
    directory by PyTorch, which is exact for every model and setting, or, where PyTorch is not installed, by its export
    in the folder `ctranslate2` inside. `ctranslate2` takes that export too.

    Raises ConfigError: an unknown engine, an ensemble or a checkpoint asked of CTranslate2, no export there.
    """
    if engine not in ENGINES:
        raise ConfigError(f"`--engine {engine}`: choose one of {', '.join(ENGINES)}")
    from ziggurat.decoding.served import ServedTranslator, is_served

    exported = [path for path in paths if is_served(path)]
    twin = Path(paths[0]) / _TWIN
    if engine == "torch" or (engine == "auto" and not exported):
        if exported:
            raise ConfigError(
                f"{exported[0]}: exported for CTranslate2; PyTorch translates with the run it was made of"
            )
        if engine == "torch" or importlib.util.find_spec("torch") is not None or not is_served(twin):
            return None
    if len(paths) > 1 or which is not None:
        raise ConfigError("CTranslate2 translates with one exported model: leave out `--ensemble` and `--which`")
    if not exported and not is_served(twin):
        raise ConfigError(
            f"{paths[0]}: no export for CTranslate2; this makes one: "
            f"`ziggurat export {paths[0]} --to ctranslate2 --out {twin}`"
        )
    path = exported[0] if exported else twin
    translator = ServedTranslator(path, device=device, threads=threads, token_scores=token_scores, **settings)
    console().print(translator.origin, markup=False, highlight=False, soft_wrap=True)
    return translator
