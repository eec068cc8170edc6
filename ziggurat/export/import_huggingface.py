"""Reads plain Transformers of transformers: MarianMT, Pegasus, M2M100 and Blenderbot.

Weights are read from safetensors where there are any, else from `pytorch_model.bin`, a pickle, in the way of
ziggurat.export.pickled.
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
from ziggurat.documents import Form, inside, read_bounded, read_json
from ziggurat.errors import DataError, ExportError
from ziggurat.export.anatomy import Affine, Anatomy, Stack
from ziggurat.export.bart_names import layer_from, take
from ziggurat.export.imported import ACTIVATIONS, MAX_POSITIONS, Control, ForeignModel, positions_from, width_of
from ziggurat.export.pickled import load_pickled

__all__ = ["read_huggingface"]

_PRE_NORM = {"marian": False, "pegasus": True, "m2m_100": True, "blenderbot": True}
"""Model types that are plain Transformers, and where their norms are."""

_INDEX = "model.safetensors.index.json"
"""Lists the parts of weights that lie in several files."""

Shape = TypeVar("Shape", bound=BaseModel)
_EPSILON = 1e-5  # of torch.nn.LayerNorm


def read_huggingface(folder: Path, models: Sequence[Path], languages: tuple[str, str] | None) -> ForeignModel:
    """Read a directory of transformers.

    Args:
        folder: holds config.json, model.safetensors or pytorch_model.bin, vocab.json and SentencePiece models.
        models: SentencePiece models of source and target, where they are not `source.spm` and `target.spm`.
        languages: codes of source and target; None: those of the tokenizer's configuration.

    Raises ExportError with all reasons why the model is no plain Transformer; DataError: files are missing or damaged.
    """
    listed = check_folder(folder)
    if listed and _INDEX not in listed and (folder / _INDEX).exists():
        raise ExportError(f"{folder / _INDEX}: not of this export, whose weights are in one file; remove it")
    config = _read(folder, "config.json", _AnyConfig).model_dump()
    if reasons := _reasons(config):
        raise ExportError(f"{folder}: not a plain Transformer that can be taken in: {'; '.join(reasons)}")
    config = _read(folder, "config.json", _Config).model_dump()
    tensors = _tensors(folder)
    source_ids = _read(folder, "vocab.json", _Ids).root
    tokenizers = _read(folder, "tokenizer_config.json", _TokenizerConfig, _TokenizerConfig())
    target_ids = _read(folder, "target_vocab.json", _Ids).root if tokenizers.separate_vocabs else source_ids
    files = list(models) or [folder / "source.spm", folder / "target.spm"]
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
        control=Control(
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
    """Return why a model with this config.json is not taken in."""
    kind, activation = config.get("model_type"), config.get("activation_function")
    reasons = []
    if kind not in _PRE_NORM:
        why = " (it normalises embeddings)" if kind in ("bart", "mbart", "plbart", "mvp", "blenderbot-small") else ""
        reasons.append(f"`model_type: {kind}`{why}; known are {', '.join(_PRE_NORM)}")
    if activation not in ACTIVATIONS:
        reasons.append(f"`activation_function: {activation}`; known are {', '.join(ACTIVATIONS)}")
    return reasons


class _AnyConfig(Form):
    """Of any model: what decides whether it can be read."""

    model_type: str
    activation_function: str | None = None


class _Config(Form):
    """Of a model that can be; transformers writes all of these keys."""

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
    """Return what a JSON file of the folder says. Raises DataError."""
    try:
        return read_json(inside(folder, name), form)
    except FileNotFoundError:
        if default is not None:
            return default
        raise DataError(f"{folder / name}: no such file; it belongs to the model") from None


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Return all parameters: of `model.safetensors`, else of `pytorch_model.bin`, or of parts that an index lists."""
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
    raise DataError(f"{folder}: neither model.safetensors nor pytorch_model.bin is there; they have the weights")


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path}: damaged or not a safetensors file ({error})") from None


def _pickled(path: Path) -> dict[str, Tensor]:
    content = load_pickled(path, "weights")
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise DataError(f"{path}: not the weights of a model (names and tensors)")
    return dict(content)


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


def _stack(config: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str) -> Stack:
    prefix, kind = f"model.{name}", config["model_type"]
    embedding = tensors.get(f"{prefix}.embed_tokens.weight", tensors.get("model.shared.weight"))
    if embedding is None:
        raise ExportError(f"the checkpoint has neither {prefix}.embed_tokens.weight nor model.shared.weight")
    width = width_of(embedding, f"{prefix}.embed_tokens.weight")
    layers = range(config[f"{name}_layers"])
    return Stack(
        pre_norm=_PRE_NORM[kind],
        heads=config[f"{name}_attention_heads"],
        epsilon=_EPSILON,
        layers=tuple(layer_from(tensors, f"{prefix}.layers.{n}", decoder=name == "decoder") for n in layers),
        final_norm=take(tensors, f"{prefix}.layer_norm") if _PRE_NORM[kind] else None,
        embedding=embedding.float(),
        scale=width**0.5 if config["scale_embedding"] else 1.0,
        positions=_positions(config, tensors, prefix, width),
    )


def _positions(config: Mapping[str, Any], tensors: Mapping[str, Tensor], prefix: str, width: int) -> Tensor:
    """Return the table from the checkpoint, or what the class computes where it saves none."""
    count = config["max_position_embeddings"]
    saved = tensors.get(f"{prefix}.embed_positions.weight")
    if saved is not None:
        return saved.float()
    if config["model_type"] == "m2m_100":
        return positions_from(config["pad_token_id"] + 1, count, width)
    half = (width + 1) // 2
    channel = torch.arange(width, dtype=torch.float64)
    rates = 10000.0 ** (-2 * (channel // 2) / width)
    angles = torch.arange(count, dtype=torch.float64)[:, None] * rates
    table = torch.empty(count, width)
    table[:, :half], table[:, half:] = angles[:, 0::2].sin().float(), angles[:, 1::2].cos().float()
    return table
