"""Reader of transformers' plain Transformers with a vocab.json: MarianMT, Pegasus, M2M100, Blenderbot.

Search settings are in generation_config.json (for old models in config.json). Lengths there include the decoder's first
input, except for `max_new_tokens`; ziggurat's exclude both it and end-of-sentence.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from pydantic import BaseModel, Field, RootModel
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ziggurat.data.subword import SentencePieceTokenizer
from ziggurat.exchange.anatomy import Affine, Anatomy, StackMatrices, one_of, width_of
from ziggurat.exchange.checkpoints import load_pickled, tensors_of
from ziggurat.exchange.imported import (
    ACTIVATIONS,
    MAX_POSITIONS,
    NORM_EPSILON,
    ControlIds,
    ForeignModel,
    TokenizerConfig,
    layer_from,
    positions_from,
    read_segmenter,
    refuse_languages_apart,
    take,
    with_vocabularies,
)
from ziggurat.model.tensors import system_errors
from ziggurat.system.errors import DataError, ExportError, printable, refuse_passing
from ziggurat.system.files import check_folder
from ziggurat.system.small_files import JsonForm, check_opens, check_regular, inside, read_json

_MAX_LENGTH = 20
"""_MAX_LENGTH is transformers' default `max_length`. It is never set on purpose, so it gives the default here."""


class Generation(JsonForm):
    """Settings of `generate` that affect which translation is found; None: not set."""

    num_beams: int | None = Field(default=None, ge=1, le=10_000)
    num_beam_groups: int | None = None
    do_sample: bool | None = None
    early_stopping: bool | str | None = None
    length_penalty: float | None = None
    max_length: int | None = Field(default=None, ge=1)
    max_new_tokens: int | None = Field(default=None, ge=1)
    min_length: int | None = Field(default=None, ge=0)
    min_new_tokens: int | None = Field(default=None, ge=0)
    no_repeat_ngram_size: int | None = Field(default=None, ge=0, le=10_000)
    encoder_no_repeat_ngram_size: int | None = None
    repetition_penalty: float | None = None
    bad_words_ids: list[list[int]] | None = None
    suppress_tokens: list[int] | None = None
    renormalize_logits: bool | None = None
    forced_bos_token_id: int | None = None
    decoder_start_token_id: int | None = Field(default=None, ge=0)


def decoding_of(given: Generation, positions: int) -> dict[str, Any]:
    """Return the section `decoding` for the search that `given` describes.

    Args:
        given: settings of `generate`.
        positions: maximum number of tokens that the model can read, including the decoder's first input.
    """
    decoding: dict[str, Any] = {
        # Of all extensions in a step only the best `num_beams` may end, and with `early_stopping: true` a search ends
        # as soon as that many hypotheses have ended.
        "endings": "fairseq" if given.early_stopping is True else "beam",
        "length_penalty": {"kind": "power", "alpha": 1.0},
    }
    if given.num_beams is not None:
        decoding["beam_size"] = given.num_beams
    if given.length_penalty is not None and 0 <= given.length_penalty <= 10:
        decoding["length_penalty"]["alpha"] = given.length_penalty
    longest = given.max_new_tokens
    if longest is None and given.max_length not in (None, _MAX_LENGTH):
        longest = given.max_length - 1
    if longest is not None:
        limit = max(1, min(longest, positions) - 1)
        decoding["max_length"] = {"ratio": 0.0, "extra": limit, "limit": limit}
    least = given.min_new_tokens if given.min_new_tokens is not None else max(0, (given.min_length or 0) - 1)
    decoding["min_length"] = min(least, decoding.get("max_length", {}).get("limit", least))
    if given.no_repeat_ngram_size:
        decoding["no_repeat_ngram_size"] = given.no_repeat_ngram_size
    return decoding


def ruled_out(given: Generation, ours: Collection[int | None]) -> frozenset[int]:
    """Return the ids that are never generated, whose probability goes to the other tokens.

    `ours`, the ids that ziggurat's search never writes, such as padding, are included only if transformers rules them
    out before it normalises. Otherwise it rules them out afterwards, as ziggurat does.
    """
    single = frozenset(word[0] for word in given.bad_words_ids or [] if len(word) == 1)
    single |= frozenset(given.suppress_tokens or [])
    return single if given.renormalize_logits else single.difference(ours)


def notes_of(given: Generation) -> tuple[str, ...]:
    """Return the search settings of transformers that have no effect here, as `key: value`."""
    plain: Mapping[str, tuple[Any, ...]] = {
        "do_sample": (False,),
        "num_beam_groups": (1,),
        "repetition_penalty": (1.0,),
        "encoder_no_repeat_ngram_size": (0,),
        "forced_bos_token_id": (),
    }
    notes = [f"{key}: {value}" for key, usual in plain.items() if (value := getattr(given, key)) not in (None, *usual)]
    if given.length_penalty is not None and not 0 <= given.length_penalty <= 10:
        notes.append(f"length_penalty: {given.length_penalty}")
    if any(len(word) != 1 for word in given.bad_words_ids or []):
        notes.append("bad_words_ids of several tokens")
    return tuple(notes)


_PRE_NORM = {"marian": False, "pegasus": True, "m2m_100": True, "blenderbot": True}
"""Model types that are plain Transformers, and whether they are pre-norm."""

_OTHER_LISTS = {
    "m2m_100": ": NLLB, whose language codes follow the pieces of sentencepiece.bpe.model and are forced as first "
    "tokens, which models here do not support. Translate with transformers, for example a corpus to train a model on",
    "pegasus": "; Pegasus is published with spiece.model, whose pieces are numbered from 105",
    "blenderbot": "; byte-level BPE is not read",
}
"""Model type -> what such models are published with instead of vocab.json."""

_WEIGHTS = re.compile(r".*\.(safetensors|npz|h5|msgpack)|(pytorch_)?model.*\.bin")
"""Names of files with weights, those of Marian, TensorFlow and Flax among them."""

_INDEX = "model.safetensors.index.json"
"""_INDEX is the index of weights that are split over several files."""

Shape = TypeVar("Shape", bound=BaseModel)


def read_huggingface(folder: Path, models: Sequence[Path], languages: tuple[str, str] | None) -> ForeignModel:
    """Read a directory of transformers.

    Args:
        folder: folder with config.json, model.safetensors or pytorch_model.bin, vocab.json and SentencePiece models.
        models: SentencePiece models of source and target, if they are not `source.spm` and `target.spm` in the folder.
        languages: codes of source and target; None: those of the tokenizer's configuration.

    Raises ExportError with all reasons why the model is not a plain Transformer, DataError for missing or damaged
    files, CheckpointError if a file differs from its checksum.
    """
    # A foreign index in an export of ziggurat's would lead to weights other than the verified ones.
    listed = check_folder(folder)
    if listed and _INDEX not in listed and (folder / _INDEX).exists():
        raise ExportError(f"{folder / _INDEX}: not of this export, whose weights are in one file; remove it")
    described = _read(folder, "config.json", _AnyConfig)
    if reasons := _reasons(described):
        raise ExportError(f"{folder}: not a plain Transformer that can be imported: {'; '.join(reasons)}")
    config = _read(folder, "config.json", _Config)
    generation = _read(folder, "generation_config.json", Generation, _read(folder, "config.json", Generation))
    first = config.decoder_start_token_id
    first = generation.decoder_start_token_id if first is None else first
    if first is None:
        raise DataError(f"{folder}: no `decoder_start_token_id` in config.json or generation_config.json")
    if not (folder / "vocab.json").exists():
        instead = _OTHER_LISTS.get(config.model_type, "")
        raise ExportError(f"{folder}: has no vocab.json with the ids of its pieces{instead}")
    tensors = _tensors(folder)
    if unknown := _unknown(config, tensors):
        raise ExportError(f"{folder}: {unknown}; is it a plain Transformer?")
    source_ids = _read(folder, "vocab.json", _Ids).root
    told = _read(folder, "tokenizer_config.json", TokenizerConfig, TokenizerConfig())
    target_ids = _read(folder, "target_vocab.json", _Ids).root if told.separate_vocabs else source_ids
    anatomy = _anatomy(config, tensors)
    if config.model_type == "m2m_100":
        refuse_languages_apart(folder, source_ids, anatomy.encoder.embedding.shape[0], told.num_madeup_words)
    files = list(models) or [inside(folder, f"{side}.spm") for side in ("source", "target")]
    source, target = _tokenizers(files, told, source_ids, target_ids)
    # Begin-of-sentence and tags are never written here either; they are ruled out after normalising, as in
    # transformers.
    ours = {target_ids.get(piece) for piece in target.pieces([target.bos, *target.tags.values()])}
    named = (told.source_lang or "source", told.target_lang or "target")
    return ForeignModel(
        kind=config.model_type,
        anatomy=anatomy,
        scaled=config.scale_embedding,
        source_ids=source_ids,
        target_ids=target_ids,
        control=ControlIds(
            config.pad_token_id, source_ids.get("<unk>", config.pad_token_id), config.eos_token_id, first
        ),
        source=source,
        target=target,
        languages=languages or named,
        decoding=decoding_of(generation, config.max_position_embeddings),
        never=ruled_out(generation, {config.pad_token_id, *ours}),
        notes=(*notes_of(generation), *told.unknown(source_ids)),
    ).checked(str(folder))


def _reasons(config: _AnyConfig) -> list[str]:
    kind, activation = config.model_type, config.activation_function
    reasons = []
    if kind not in _PRE_NORM:
        why = " (it normalises embeddings)" if kind in ("bart", "mbart", "plbart", "mvp", "blenderbot-small") else ""
        reasons.append(f"`model_type: {kind}`{why}; known are {', '.join(_PRE_NORM)}")
    if activation not in ACTIVATIONS:
        reasons.append(f"`activation_function: {activation}`; known are {', '.join(ACTIVATIONS)}")
    # Options of the single class that transformers once had for all of them; today's classes ignore these.
    pre_norm = _PRE_NORM.get(kind)
    if None not in (pre_norm, config.normalize_before) and config.normalize_before != pre_norm:
        place = "before" if pre_norm else "after"
        reasons.append(
            f"`normalize_before: {str(config.normalize_before).lower()}`, but {kind} normalises {place} sub-layers"
        )
    if config.normalize_embedding:
        reasons.append("`normalize_embedding: true`: it normalises embeddings")
    if config.add_final_layer_norm and pre_norm is False:
        reasons.append(f"`add_final_layer_norm: true`, but {kind} has no norm at the end of a stack")
    return reasons


def _unknown(config: _Config, tensors: Mapping[str, Tensor]) -> str:
    """Return a message naming a parameter that a plain Transformer of this configuration lacks; "" if none."""
    stacks = []
    for name, attentions, layers in (
        ("encoder", "self_attn", config.encoder_layers),
        ("decoder", "self_attn|encoder_attn", config.decoder_layers),
    ):
        numbers = "|".join(map(str, range(layers)))
        inner = rf"(({attentions})\.([qkv]|out)_proj|({attentions}|final)_layer_norm|fc[12])\.(weight|bias)"
        norm = r"|layer_norm\.(weight|bias)" if _PRE_NORM[config.model_type] else ""
        stacks.append(rf"model\.{name}\.(embed_tokens\.weight|embed_positions\.\w+|layers\.({numbers})\.{inner}{norm})")
    known = re.compile(rf"model\.shared\.weight|lm_head\.weight|final_logits_bias|{'|'.join(stacks)}")
    unknown = [key for key in tensors if not known.fullmatch(key)]
    return f"parameter {printable(unknown[0])} is unknown ({len(unknown)} in all)" if unknown else ""


class _AnyConfig(JsonForm):
    """Keys of any model that decide whether it can be imported."""

    model_type: str
    activation_function: str | None = None
    normalize_before: bool | None = None
    normalize_embedding: bool | None = None
    add_final_layer_norm: bool | None = None


class _Config(JsonForm):
    """Keys of a model that can be imported; transformers writes all of those without a default."""

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
    decoder_start_token_id: int | None = Field(default=None, ge=0)
    tie_word_embeddings: bool = True
    static_position_embeddings: bool | None = None


class _Ids(RootModel[dict[str, Annotated[int, Field(ge=0, strict=True)]]]):
    """Ids by piece."""


class _Index(JsonForm):
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
    """Return all parameters, from `model.safetensors` or else `pytorch_model.bin`, in one file or several.

    If both exist, `model.safetensors` is used, as in transformers. Raises DataError: there are none, or two sets of
    files in one form and nothing says which is the model's.
    """
    files = sorted(path.name for path in folder.iterdir() if _WEIGHTS.fullmatch(path.name))
    for whole, read in (("model.safetensors", _safetensors), ("pytorch_model.bin", _pickled)):
        index = _read(folder, f"{whole}.index.json", _Index, _Index(weight_map={}))
        names = sorted(set(index.weight_map.values())) or [whole]
        if index.weight_map or whole in files:
            if whole not in names and whole in files:
                raise DataError(
                    f"{folder}: has {whole}, and with {whole}.index.json weights in several files; remove one of them"
                )
            if others := [name for name in files if name not in names]:
                said = printable(", ".join(others), 200)
                warnings.warn(f"{folder}: {printable(', '.join(names), 200)} is used, not {said}", stacklevel=5)
            tensors: dict[str, Tensor] = {}
            for name in names:
                path = inside(folder, name)
                try:
                    check_regular(path)
                except FileNotFoundError:
                    listed = f", but {whole}.index.json lists it" if index.weight_map else ", but a link to one"
                    raise DataError(f"{path}: no such file{listed}") from None
                tensors |= read(path)
            return tensors
    beside = f"; it has {printable(', '.join(files), 200)}" if files else ""
    raise DataError(
        f"{folder}: neither model.safetensors nor pytorch_model.bin, which have the weights, is there{beside}"
    )


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        check_opens(path)
        with system_errors(), safe_open(path, framework="pt", device="cpu") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as error:
        refuse_passing(path, error)
        raise DataError(f"{path}: damaged or not a safetensors file ({error})") from None


def _pickled(path: Path) -> dict[str, Tensor]:
    return tensors_of(path, load_pickled(path, "weights"))


def _tokenizers(
    files: Sequence[Path], told: TokenizerConfig, source_ids: Mapping[str, int], target_ids: Mapping[str, int]
) -> tuple[SentencePieceTokenizer, SentencePieceTokenizer]:
    """Return the tokenizers of source and target, with the languages' tags, from one SentencePiece model or two."""
    alone = [
        read_segmenter(file, remedy="; name the SentencePiece model with `--sentencepiece`")
        for file in (files[0], files[-1])
    ]
    tags = told.tags(source_ids, alone)
    source, target = (SentencePieceTokenizer(side.model, tags=tags) for side in alone)
    return with_vocabularies(source, target, source_ids, target_ids)


def _anatomy(config: _Config, tensors: Mapping[str, Tensor]) -> Anatomy:
    encoder, decoder = (_stack(config, tensors, name) for name in ("encoder", "decoder"))
    encoder = dataclasses.replace(encoder, embedding=one_of(encoder.embedding, decoder.embedding))
    head = tensors.get("lm_head.weight")
    output = decoder.embedding if head is None else one_of(head.float(), decoder.embedding)
    if config.tie_word_embeddings and output is not decoder.embedding:
        raise ExportError(
            "`tie_word_embeddings` is true, but lm_head.weight differs from the decoder's embedding; set it "
            "to false in config.json if that matrix is the output's"
        )
    bias = tensors.get("final_logits_bias")
    return Anatomy(
        encoder,
        decoder,
        Affine(output, None if bias is None else bias.flatten().float()),
        ACTIVATIONS[config.activation_function],
        "layer",
    )


def _stack(config: _Config, tensors: Mapping[str, Tensor], name: str) -> StackMatrices:
    prefix, pre_norm = f"model.{name}", _PRE_NORM[config.model_type]
    # A checkpoint with tied embeddings saves one table, `model.shared`.
    embedding = tensors.get(f"{prefix}.embed_tokens.weight", tensors.get("model.shared.weight"))
    if embedding is None:
        raise ExportError(f"the checkpoint has neither {prefix}.embed_tokens.weight nor model.shared.weight")
    width = width_of(embedding, f"{prefix}.embed_tokens.weight")
    encoder = name == "encoder"
    layers = range(config.encoder_layers if encoder else config.decoder_layers)
    return StackMatrices(
        residual="pre" if pre_norm else "post",
        heads=config.encoder_attention_heads if encoder else config.decoder_attention_heads,
        epsilon=NORM_EPSILON,
        layers=tuple(layer_from(tensors, f"{prefix}.layers.{n}", decoder=not encoder) for n in layers),
        final_norm=take(tensors, f"{prefix}.layer_norm") if pre_norm else None,
        embedding=embedding.float(),
        scale=width**0.5 if config.scale_embedding else 1.0,
        positions=_positions(config, tensors, prefix, width),
    )


def _positions(config: _Config, tensors: Mapping[str, Tensor], prefix: str, width: int) -> Tensor:
    """Return the table in the checkpoint, or the one that the class computes if it saves none."""
    count, name = config.max_position_embeddings, f"{prefix}.embed_positions.weight"
    saved = tensors.get(name)
    if saved is not None:
        return saved.float()
    if config.static_position_embeddings is False or config.model_type == "blenderbot":
        raise ExportError(f"the checkpoint has no parameter {name}, and its positions are trained ones")
    if config.model_type == "m2m_100":
        return positions_from(config.pad_token_id + 1, count, width)
    # Marian and Pegasus: first the sines, then the cosines, computed in float64 and rounded once, as in transformers.
    half = (width + 1) // 2
    channel = torch.arange(width, dtype=torch.float64)
    rates = 10000.0 ** (-2 * (channel // 2) / width)
    angles = torch.arange(count, dtype=torch.float64)[:, None] * rates
    table = torch.empty(count, width)
    table[:, :half], table[:, half:] = angles[:, 0::2].sin().float(), angles[:, 1::2].cos().float()
    return table
