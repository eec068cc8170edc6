"""Import of a plain Transformer trained with another toolkit, as a model directory."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from ziggurat.config import dump
from ziggurat.data.shortlist import ShortlistTable, write_shortlist
from ziggurat.data.subword import SentencePieceTokenizer, save_tokenizers
from ziggurat.exchange.agreement import segmented_by
from ziggurat.exchange.checkpoints import refuse_file, refuse_folder
from ziggurat.exchange.import_fairseq import read_fairseq
from ziggurat.exchange.import_huggingface import read_huggingface
from ziggurat.exchange.import_marian import read_marian
from ziggurat.exchange.imported import ForeignModel
from ziggurat.exchange.marian_files import is_marian
from ziggurat.exchange.marian_shortlist import shortlist_beside
from ziggurat.model.build import build_model
from ziggurat.model.directory import refuse_replacing
from ziggurat.model.run_folder import CONFIG_FILE, MODEL_FILE
from ziggurat.model.tensors import load_weights, write_tensors
from ziggurat.system.errors import ConfigError, DataError, ExportError, out_of_memory, printable
from ziggurat.system.files import made_by, write_atomically, write_checksums
from ziggurat.system.small_files import check_name
from ziggurat.system.staging import building, recover

SHORTLIST_FILE = "lexical.shortlist"
"""SHORTLIST_FILE is the name of a model's lexical shortlist in its directory, for `decoding.shortlist`."""


def import_checkpoint(
    checkpoint: Path,
    out: Path,
    *,
    dictionaries: Sequence[Path] = (),
    models: Sequence[Path] = (),
    languages: str | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Read a transformers, Marian or fairseq model and write a model directory; return a summary.

    Args:
        checkpoint: transformers folder with config.json and model.safetensors, Marian's .npz or binary file or a
            folder with one, or fairseq's .pt file.
        out: folder to write; must be missing or empty.
        force: replace a model in `out`.
        dictionaries: vocabularies; see read_fairseq and read_marian.
        models: SentencePiece models; see read_fairseq, read_huggingface and read_marian.
        languages: codes of source and target, such as `de-en` (language_pair); None: those of the checkpoint.

    Raises ExportError if it is not a plain Transformer (with all reasons), ConfigError or DataError for faulty
    arguments.
    """
    refuse_replacing(out, force=force)
    pair = None if languages is None else language_pair(languages)
    if len(dictionaries) > 2 or len(models) > 2:
        raise ConfigError("`--dictionary` and `--sentencepiece` may be given once, or once for each side")
    model = _read(checkpoint, dictionaries, models, pair)
    listed = shortlist_beside(checkpoint, model) if is_marian(checkpoint) else None
    for said in _losses(model):
        warnings.warn(f"{checkpoint}: {said}", UserWarning, stacklevel=2)
    given = {"dictionary": list(dictionaries), "sentencepiece": list(models), "languages": languages}
    again = made_by("import", checkpoint, **given, out=out, force=True)
    parameters = _write_imported(model, out, again, listed)
    return {
        "out": str(out),
        "kind": model.kind,
        "parameters": parameters,
        "sharing": model.sharing(),
        "unmatched": [dataclasses.asdict(one) for one in model.unmatched],
        "not_taken_over": list(model.notes),
        "shortlist": None if listed is None else str(out / SHORTLIST_FILE),
    }


def _read(
    checkpoint: Path, dictionaries: Sequence[Path], models: Sequence[Path], pair: tuple[str, str] | None
) -> ForeignModel:
    """Return the model in a file or folder, read as its toolkit's. Raises as `import_checkpoint` does."""
    check_name(checkpoint)
    recover(checkpoint)
    if not checkpoint.is_dir():
        refuse_file(checkpoint)
    elif not is_marian(checkpoint):
        refuse_folder(checkpoint)
    if not checkpoint.exists():
        raise DataError(f"{checkpoint}: no such file or folder")
    if is_marian(checkpoint):
        return read_marian(checkpoint, dictionaries, models, pair)
    if checkpoint.is_dir():
        if dictionaries:
            raise ConfigError(
                f"{checkpoint}: a transformers folder has its vocabulary in vocab.json; leave out `--dictionary`"
            )
        return read_huggingface(checkpoint, models, pair)
    if checkpoint.suffix == ".bin":
        raise DataError(
            f"{checkpoint}: name the folder of a pytorch_model.bin; a binary Marian model begins with another number"
        )
    return read_fairseq(checkpoint, dictionaries, models, pair)


def _losses(model: ForeignModel) -> Iterator[str]:
    """Yield what the imported model lacks or does differently, for warnings."""
    if model.notes:
        yield f"not taken over: {', '.join(model.notes)}"
    yield from map(str, model.unmatched)
    segmenter = segmented_by(model.source_ids)
    if segmenter is not None and not isinstance(model.source, SentencePieceTokenizer):
        remedy = "Give its model with `--sentencepiece`, or pass" if "SentencePiece" in segmenter else "Pass"
        joined = any(name in segmenter for name in ("@@", "SentencePiece"))
        written = "joined again" if joined else "written as such pieces"
        yield (
            f"its tokens are pieces of {segmenter}, but no segmenter is imported. {remedy} segmented text; "
            f"translations are {written}"
        )


_CODE = re.compile(r"[a-z]{2,3}([-_][A-Z][a-z]{3})?([-_]([A-Z]{2}|[0-9]{3}))?")
"""_CODE is a language code with script and region, cased as usual: pt-BR, zh_Hans, sr-Latn-RS, es-419."""
_PART = re.compile(r"[A-Z][a-z]{3}|[A-Z]{2}|[0-9]{3}")
"""_PART is a script or region."""


def language_pair(languages: str) -> tuple[str, str]:
    """Return the two codes in a text such as `de-en`, `pt-BR-en` or `pt-br:en`.

    Raises ConfigError for a text that can be split in several ways, or in none.
    """
    if ":" in languages:
        cuts = [tuple(languages.split(":"))]
    else:
        parts = languages.split("-")
        cuts = [("-".join(parts[:place]), "-".join(parts[place:])) for place in range(1, len(parts))]
    cuts = [tuple(map(str.strip, cut)) for cut in cuts]
    cuts = [cut for cut in cuts if len(cut) == 2 and all(code.split() == [code] for code in cut)]
    if len(cuts) > 1 or (cuts and _CODE.match(cuts[0][0]) and _PART.fullmatch(cuts[0][1])):
        cuts = [cut for cut in cuts if all(map(_CODE.fullmatch, cut))]
    if len(cuts) != 1:
        raise ConfigError(
            f"`--languages {printable(languages)}`: give two codes with a hyphen between them, such as de-en, or with "
            "a colon if a code itself has hyphens, such as pt-br:en"
        )
    return cuts[0][0], cuts[0][1]


def _is_broken(tensor: Tensor) -> bool:
    """Return whether a parameter has numbers that no training produces; minus infinity in a bias forbids a token."""
    return not bool((tensor.isfinite() | (tensor.isneginf() if tensor.ndim == 1 else False)).all())


def _write_imported(model: ForeignModel, out: Path, again: str, listed: ShortlistTable | None) -> int:
    """Write the model directory, with its shortlist if there is one; return the number of parameters.

    `again` is the command that rewrites the folder (ziggurat.system.files.write_checksums).
    """
    try:
        experiment, tensors = model.experiment(str(out)), model.tensors()
    # Shapes that do not fit raise any of these; lack of memory is also a RuntimeError.
    except (ValidationError, RuntimeError, IndexError, ValueError) as error:
        if isinstance(error, ConfigError) or out_of_memory(error):
            raise
        said = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise ExportError(f"{model.kind}: its parts do not fit each other: {printable(str(said), 300)}") from None
    if bad := [name for name, tensor in tensors.items() if _is_broken(tensor)]:
        raise ExportError(f"{model.kind}: parameters hold NaN or infinite numbers, here named {', '.join(bad[:3])}")
    # Built once before anything is written, which finds parameters of the wrong shape.
    load_weights(build_model(experiment.model, model.source.size, model.target.size), tensors, model.kind)
    with building(out) as folder:
        save_tokenizers(folder, model.source, model.target)
        write_atomically(folder / CONFIG_FILE, dump(experiment).encode())
        if listed is not None:
            write_shortlist(folder / SHORTLIST_FILE, listed)
        checksum = write_tensors(folder / MODEL_FILE, tensors)
        write_checksums(folder, again, known={MODEL_FILE: checksum})
    return sum(tensor.numel() for tensor in tensors.values())
