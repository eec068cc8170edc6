"""The choice between the two engines that translate: PyTorch on a run or model directory, CTranslate2 on an export.

`auto` goes by the folder: an exported model runs in CTranslate2, a run or model directory in our own engine.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from ziggurat.config import DecodingConfig, ModelConfig
from ziggurat.system.errors import CheckpointError, ConfigError, printable
from ziggurat.system.small_files import JsonForm, read_json
from ziggurat.system.staging import recover

ENGINES = ("auto", "torch", "ctranslate2")

EXPORT_FILE = "model.bin"
"""The weights in a CTranslate2 directory."""
EXPORT_SHORTLIST = "vmap.txt"
"""A lexical shortlist in there, which `decoding.shortlist` names without a folder."""

_SUPPORTED = {
    *("beam_size", "n_best", "length_penalty", "max_length", "min_length", "batch_tokens", "max_source_pieces"),
    *("alignments", "shortlist"),
}
_IGNORED = {"endings", "batch_sentences", "seed", "precision"}  # CTranslate2 does not read them when it translates

NO_LINE_INPUTS = (
    "CTranslate2 takes no `--prefix`, `--constraints` or `--terminology`; take the model it was exported from"
)
"""NO_LINE_INPUTS is the refusal of what stands next to the lines, where an export is to translate."""

_EXPORT_SHORTLIST = "export the model with it: its `decoding.shortlist` then goes into the folder"

_EXPORT_INSIDE = "ctranslate2"
"""Folder of a run or model directory where its own export is looked for."""


def is_export(path: str | Path) -> bool:
    """Return whether `path` is a CTranslate2 directory that `ziggurat export` wrote."""
    recover(path)
    return (Path(path) / EXPORT_FILE).is_file() and (Path(path) / "config.yaml").is_file()


def is_converted(path: str | Path) -> bool:
    """Return whether `path` is a folder of CTranslate2 for translation that another toolkit's converter wrote."""
    folder = Path(path)
    if not (folder / EXPORT_FILE).is_file() or (folder / "config.yaml").is_file():
        return False
    return any(next(folder.glob(f"{name}_vocabulary.*"), None) for name in ("shared", "source", "source_1"))


def unsupported_keys(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return which of these keys of the `decoding` section ask for what only our search has, as text for messages."""
    defaults, ours = DecodingConfig(), DecodingConfig.model_fields.keys() - _SUPPORTED - _IGNORED
    return {
        key: f"`decoding.{key}: {printable(str(value))}`"
        for key, value in settings.items()
        if key in ours and value != getattr(defaults, key)
    }


def unsupported_settings(decoding: DecodingConfig) -> list[str]:
    """Return the settings of the search that CTranslate2 does not have."""
    found = list(unsupported_keys(dict(decoding)).values())
    if decoding.endings == "fairseq":
        found.append("`decoding.endings: fairseq` (take `beam`)")
    if decoding.shortlist not in (None, EXPORT_SHORTLIST):
        found.append(f"`decoding.shortlist: {decoding.shortlist}` ({_EXPORT_SHORTLIST})")
    penalty = decoding.length_penalty
    if penalty.kind in ("gnmt", "lingvo") and (penalty.alpha or penalty.coverage):
        found.append(f"`decoding.length_penalty.kind: {penalty.kind}` (take `power`, or `alpha=0`)")
    return found


def refuse_unsupported(asked: Mapping[str, Any], made: ExportReport | None) -> None:
    """Raise ConfigError where a setting that was asked for is one that CTranslate2, or this export, does not have.

    `made` is the export's report; None: another toolkit's folder, which has none. Called before these settings are
    joined to the saved ones: a conflict with a saved one that the user never set would hide this reason.
    """
    if asked.get("shortlist") not in (None, EXPORT_SHORTLIST):
        raise ConfigError(f"CTranslate2 cannot read `decoding.shortlist: {asked['shortlist']}`; {_EXPORT_SHORTLIST}")
    if missing := ", ".join(unsupported_keys(asked).values()):
        raise ConfigError(f"CTranslate2 has no {missing}; translate with the model that was exported")
    if asked.get("endings") == "candidates":  # exports are written with `beam`, which is how it ends
        raise ConfigError("CTranslate2 has no `decoding.endings: candidates` (take `beam`)")
    if made is None:
        for key in ("precision", "alignments"):
            if asked.get(key):
                raise ConfigError(f"`decoding.{key}` is not for a folder that another toolkit wrote; leave it out")
    elif (wanted := asked.get("precision")) not in (None, made.precision):
        raise ConfigError(
            f"`decoding.precision: {printable(str(wanted))}`: this export is {made.quantization or 'float32'}, as it "
            "was written; `ziggurat export --to ctranslate2 --quantization` makes one in another precision"
        )


def export_folder(
    engine: str,
    paths: Sequence[str],
    *,
    which: str | None = None,
    without_layers: str | None = None,
    converted: bool = False,
) -> Path | None:
    """Return the folder that CTranslate2 is to translate with; None where PyTorch is to translate.

    `auto` goes by the folder: CTranslate2 for an exported model, PyTorch for a run or model directory; only where
    PyTorch is not installed, the export in the subfolder `ctranslate2` is used. `ctranslate2` takes that export, too.

    `converted`: the folder may be another toolkit's. Raises ConfigError for an unknown engine, for an ensemble, a
    checkpoint or left-out layers with CTranslate2, and where there is no export.
    """
    if engine not in ENGINES:
        raise ConfigError(f"`--engine {printable(engine)}`: choose one of {', '.join(ENGINES)}")
    foreign = [path for path in paths if is_converted(path)]
    if foreign and not converted:
        raise ConfigError(
            f"{foreign[0]}: another toolkit's folder for CTranslate2, which only `ziggurat translate` reads, and "
            "`evaluate` without `--perturb`"
        )
    exported = [*foreign, *(path for path in paths if is_export(path))]
    inside = Path(paths[0]) / _EXPORT_INSIDE
    if engine == "torch" or (engine == "auto" and not exported):
        if exported:
            raise ConfigError(
                f"{exported[0]}: exported for CTranslate2; PyTorch translates with the run it was made of"
            )
        if engine == "torch" or importlib.util.find_spec("torch") is not None or not is_export(inside):
            return None
    if len(paths) > 1 or which is not None or without_layers is not None:
        raise ConfigError(
            "CTranslate2 translates with one exported model as it is: leave out `--ensemble`, `--which` and "
            "`--without-layers` (which `ziggurat export` takes, too)"
        )
    if not exported and not is_export(inside):
        raise ConfigError(
            f"{paths[0]}: no export for CTranslate2; this makes one: "
            f"`ziggurat export {paths[0]} --to ctranslate2 --out {inside}`"
        )
    return Path(exported[0]) if exported else inside


def positions_for(model: ModelConfig, decoding: DecodingConfig) -> int:
    """Return the positions of either side that this search takes; begin- or end-of-sentence and a tag are counted."""
    return model.embedding.limit or max(decoding.max_source_pieces, decoding.max_length.limit) + 2


class ExportReport(JsonForm):
    """The part of an export's report that is read."""

    positions: int = Field(ge=1, le=1 << 31)
    """Positions that the model has on either side."""
    weights: str = Field(max_length=100)
    """Fingerprint of the file with the weights that it was made of."""
    quantization: str | None = Field(max_length=100)

    @property
    def precision(self) -> str | None:
        """Name in `decoding.precision`; None: not one of ours."""
        return {None: "float32", "int8": "int8", "int8_float32": "int8", "bfloat16": "bfloat16"}.get(self.quantization)


def read_report(folder: Path) -> ExportReport:
    """Return the report of an export. Raises CheckpointError where it is missing or damaged."""
    path, again = folder / "export.json", "export the model again"
    try:
        return read_json(path, ExportReport, error=CheckpointError, remedy=again)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; {again}") from None
