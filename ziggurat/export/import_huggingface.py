"""Reader of plain Transformers of transformers: MarianMT, Pegasus, M2M100 and Blenderbot.

Weights are read from safetensors if there are any, else from `pytorch_model.bin`, a pickle (ziggurat.export.pickled).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from pydantic import BaseModel, Field, RootModel
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ziggurat.data.checksums import check_folder
from ziggurat.data.subword import MAX_MODEL_BYTES, SentencePieceTokenizer
from ziggurat.errors import DataError, ExportError, refuse_passing
from ziggurat.export.anatomy import Affine, Anatomy, StackMatrices
from ziggurat.export.imported import (
    ACTIVATIONS,
    MAX_POSITIONS,
    NORM_EPSILON,
    ControlIds,
    ForeignModel,
    layer_from,
    positions_from,
    take,
    width_of,
)
from ziggurat.export.pickled import load_pickled, tensors_of
from ziggurat.small_files import Form, check_opens, inside, read_bounded, read_json

__all__ = ["read_huggingface"]

_PRE_NORM = {"marian": False, "pegasus": True, "m2m_100": True, "blenderbot": True}
"""Model types that are plain Transformers, and whether they are pre-norm."""

_INDEX = "model.safetensors.index.json"
"""Index of weights that are split over several files."""

Shape = TypeVar("Shape", bound=BaseModel)


def read_huggingface(folder: Path, models: Sequence[Path], languages: tuple[str, str] | None) -> ForeignModel:
    """Read a directory of transformers.

    Args:
        folder: folder with config.json, model.safetensors or pytorch_model.bin, vocab.json and SentencePiece models.
        models: SentencePiece models of source and target, if they are not `source.spm` and `target.spm` in the folder.
        languages: codes of source and target; None: those of the tokenizer's configuration.

    Raises ExportError with all reasons why the model is not a plain Transformer; DataError: files missing or damaged;
    CheckpointError: a file differs from its checksum.
    """
    # An index from elsewhere in a folder of ours would lead to other weights than those that were verified.
    listed = check_folder(folder)
    if listed and _INDEX not in listed and (folder / _INDEX).exists():
        raise ExportError(f"{folder / _INDEX}: not of this export, whose weights are in one file; remove it")
    config = _read(folder, "config.json", _AnyConfig).model_dump()
    if reasons := _reasons(config):
        raise ExportError(f"{folder}: not a plain Transformer that can be imported: {'; '.join(reasons)}")
    config = _read(folder, "config.json", _Config).model_dump()
    tensors = _tensors(folder)
    source_ids = _read(folder, "vocab.json", _Ids).root
    tokenizers = _read(folder, "tokenizer_config.json", _TokenizerConfig, _TokenizerConfig())
    target_ids = _read(folder, "target_vocab.json", _Ids).root if tokenizers.separate_vocabs else source_ids
    files = list(models) or [folder / "source.spm", folder / "target.spm"]
    # Language codes: `>>fra<<` of OPUS-MT, `__fr__` of M2M100.
    tags = [token for token in source_ids if (token[:2], token[-2:]) in ((">>", "<<"), ("__", "__"))]
    read = [_tokenizer(file, tags) for file in (files[0], files[-1])]
    joint = source_ids == target_ids and read[0].model == read[1].model
    named = (tokenizers.source_lang or "source", tokenizers.target_lang or "target")
    return ForeignModel(
        kind=str(config["model_type"]),
        anatomy=_anatomy(config, tensors),
        scaled=bool(config["scale_embedding"]),
        source_ids=source_ids,
        target_ids=target_ids,
        control=ControlIds(
            config["pad_token_id"],
            source_ids.get("<unk>", config["pad_token_id"]),
            config["eos_token_id"],
            config["decoder_start_token_id"],
        ),
        source=read[0],
        target=read[0] if joint else read[1],
        languages=languages or named,
    ).checked(str(folder))


def _reasons(config: Mapping[str, Any]) -> list[str]:
    """Return the reasons why a model with this config.json cannot be imported."""
    kind, activation = config.get("model_type"), config.get("activation_function")
    reasons = []
    if kind not in _PRE_NORM:
        why = " (it normalises embeddings)" if kind in ("bart", "mbart", "plbart", "mvp", "blenderbot-small") else ""
        reasons.append(f"`model_type: {kind}`{why}; known are {', '.join(_PRE_NORM)}")
    if activation not in ACTIVATIONS:
        reasons.append(f"`activation_function: {activation}`; known are {', '.join(ACTIVATIONS)}")
    return reasons


class _AnyConfig(Form):
    """Keys of any model that decide if it can be imported."""

    model_type: str
    activation_function: str | None = None


class _Config(Form):
    """Keys of a model that can be imported; transformers writes all of them."""

    model_type: str
    activation_function: str
    encoder_layers: int = Field(ge=1, le=4096)
    decoder_layers: int = Field(ge=1, le=4096)
    encoder_attention_heads: int = Field(ge=1, le=1 << 20)
    decoder_attention_heads: int = Field(ge=1, le=1 << 20)
    max_position_embeddings: int = Field(ge=1, le=MAX_POSITIONS)
    scale_embedding: bool
    pad_token_id: int = Field(ge=0)
    eos_token_id: int = Field(ge=0)
    decoder_start_token_id: int = Field(ge=0)


class _TokenizerConfig(Form):
    separate_vocabs: bool = False
    source_lang: str | None = None
    target_lang: str | None = None


class _Ids(RootModel[dict[str, Annotated[int, Field(ge=0, strict=True)]]]):
    """Ids by piece."""


class _Index(Form):
    weight_map: dict[str, str]


def _read(folder: Path, name: str, form: type[Shape], default: Shape | None = None) -> Shape:
    """Return the content of a JSON file of the folder. Raises DataError."""
    try:
        return read_json(inside(folder, name), form)
    except FileNotFoundError:
        if default is not None:
            return default
        raise DataError(f"{folder / name}: no such file; it belongs to the model") from None


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Return all parameters: of `model.safetensors`, else of `pytorch_model.bin`, each in one file or several."""
    for whole, read in (("model.safetensors", _safetensors), ("pytorch_model.bin", _pickled)):
        index = _read(folder, f"{whole}.index.json", _Index, _Index(weight_map={}))
        names = sorted(set(index.weight_map.values())) or [whole]
        if index.weight_map or (folder / whole).is_file():
            tensors: dict[str, Tensor] = {}
            for name in names:
                path = inside(folder, name)
                if not path.is_file():
                    raise DataError(f"{path}: no such file, but {whole}.index.json lists it")
                tensors |= read(path)
            return tensors
    raise DataError(f"{folder}: neither model.safetensors nor pytorch_model.bin, which have the weights, is there")


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        check_opens(path)
        with safe_open(path, framework="pt", device="cpu") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as error:
        refuse_passing(path, error)
        raise DataError(f"{path}: damaged or not a safetensors file ({error})") from None


def _pickled(path: Path) -> dict[str, Tensor]:
    return tensors_of(path, load_pickled(path, "weights"))


def _tokenizer(path: Path, tags: list[str]) -> SentencePieceTokenizer:
    try:
        content = read_bounded(path, MAX_MODEL_BYTES)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; name the SentencePiece model by `--sentencepiece`") from None
    try:
        return SentencePieceTokenizer(content, tags=tags)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def _anatomy(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Anatomy:
    encoder, decoder = (_stack(config, tensors, name) for name in ("encoder", "decoder"))
    weight = tensors.get("lm_head.weight", decoder.embedding).float()
    bias = tensors.get("final_logits_bias")
    return Anatomy(
        encoder,
        decoder,
        Affine(weight, None if bias is None else bias.flatten().float()),
        ACTIVATIONS[config["activation_function"]],
        "layer",
    )


def _stack(config: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str) -> StackMatrices:
    prefix, kind = f"model.{name}", config["model_type"]
    # A checkpoint with tied embeddings saves one table, `model.shared`.
    embedding = tensors.get(f"{prefix}.embed_tokens.weight", tensors.get("model.shared.weight"))
    if embedding is None:
        raise ExportError(f"the checkpoint has neither {prefix}.embed_tokens.weight nor model.shared.weight")
    width = width_of(embedding, f"{prefix}.embed_tokens.weight")
    layers = range(config[f"{name}_layers"])
    return StackMatrices(
        pre_norm=_PRE_NORM[kind],
        heads=config[f"{name}_attention_heads"],
        epsilon=NORM_EPSILON,
        layers=tuple(layer_from(tensors, f"{prefix}.layers.{n}", decoder=name == "decoder") for n in layers),
        final_norm=take(tensors, f"{prefix}.layer_norm") if _PRE_NORM[kind] else None,
        embedding=embedding.float(),
        scale=width**0.5 if config["scale_embedding"] else 1.0,
        positions=_positions(config, tensors, prefix, width),
    )


def _positions(config: Mapping[str, Any], tensors: Mapping[str, Tensor], prefix: str, width: int) -> Tensor:
    """Return the table from the checkpoint, or the one that the class computes if it saves none."""
    count = config["max_position_embeddings"]
    saved = tensors.get(f"{prefix}.embed_positions.weight")
    if saved is not None:
        return saved.float()
    if config["model_type"] == "m2m_100":
        return positions_from(config["pad_token_id"] + 1, count, width)
    # Marian and Pegasus: first the sines, then the cosines, computed in float64 and rounded once, as in transformers.
    half = (width + 1) // 2
    channel = torch.arange(width, dtype=torch.float64)
    rates = 10000.0 ** (-2 * (channel // 2) / width)
    angles = torch.arange(count, dtype=torch.float64)[:, None] * rates
    table = torch.empty(count, width)
    table[:, :half], table[:, half:] = angles[:, 0::2].sin().float(), angles[:, 1::2].cos().float()
    return table
