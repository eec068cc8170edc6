"""Reader of fairseq's plain Transformers. Its checkpoints are pickles (ziggurat.exchange.checkpoints).

Their options are an `argparse.Namespace`, the only class allowed: it holds values and runs nothing. Checkpoints of 2020
and 2021 hold omegaconf containers instead; omegaconf is not imported, only its objects' attributes are read.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field
from torch import Tensor

from ziggurat.data.subword import SentencePieceTokenizer, Tokenizer
from ziggurat.data.vocabulary import VocabularyTokenizer, listing, read_listing
from ziggurat.exchange.agreement import language_tokens
from ziggurat.exchange.anatomy import Affine, Anatomy, StackMatrices, one_of, width_of
from ziggurat.exchange.checkpoints import Values, load_pickled, refuse_checkpoint, tensors_of
from ziggurat.exchange.imported import (
    ACTIVATIONS,
    MAX_POSITIONS,
    NORM_EPSILON,
    ControlIds,
    ForeignModel,
    layer_from,
    positions_from,
    read_file,
    read_segmenter,
    take,
)
from ziggurat.system.errors import DataError, ExportError, printable
from ziggurat.system.small_files import JsonForm, shaped

_BOS, _PAD, _EOS, _UNK = range(4)  # ids in every fairseq dictionary; the tokens of dict.txt follow
_REFUSED: dict[str, Any] = {
    "adaptive_input": False,
    "adaptive_softmax_cutoff": None,
    "character_embeddings": False,
    "cross_self_attention": False,
    "layernorm_embedding": False,
    "merge_src_tgt_embed": False,
    "no_cross_attention": False,
    "no_decoder_final_norm": False,
}
"""Options with the values that they have in a plain Transformer; a model with any other value is refused."""

_MULTILINGUAL = re.compile(
    r"multilingual_\w+|translation_multi_simple_epoch|translation_from_pretrained_\w+|semisupervised_translation"
    r"|online_backtranslation|m?bart\w*|m2m\w*"
)
"""Tasks and architectures whose models write several languages, chosen by codes that the task adds to the batches."""

_PACKAGES = (
    *("fairseq", "numpy"),  # averages and timings of the training run, options as dataclasses
    *(
        "omegaconf",
        "typing",
        "types",
        "collections",
        "_operator",
    ),  # options in omegaconf's containers, with the types of their values
    *("bool", "bytes", "complex", "dict", "float", "int", "list", "long", "object", "set", "str", "tuple", "unicode"),
)
"""Packages and Python types whose objects checkpoints may contain; all of them are read as Values."""

_REFERENCE = re.compile(r"\$\{(\w+)\.(\w+)\}")
"""_REFERENCE matches an omegaconf value that refers to a key in another section."""

_UNREAD = re.compile(
    r"(en|de)coder\.version|\w+\.embed_positions\.(_float_tensor|weights)"
    # copies that fairseq's layers keep for torch's fused inference; they are not trained
    r"|encoder\.layers\.\d+\.(in_proj|out_proj|fc1|fc2)_(weight|bias)"
)


def read_fairseq(
    path: Path, dictionaries: Sequence[Path], models: Sequence[Path], languages: tuple[str, str] | None
) -> ForeignModel:
    """Read a checkpoint of an architecture whose name starts with `transformer`, and warn that it is a pickle.

    Args:
        path: checkpoint (.pt), of any version since 2017.
        dictionaries: dict.XX.txt of source and target, or one for both.
        models: SentencePiece models of source and target, or one for both; none: text is already segmented.
        languages: codes of source and target; None: those of the checkpoint.

    Raises ExportError with all reasons why the model is not a plain Transformer, or why the dictionaries do not fit its
    matrices; DataError for files that cannot be read.
    """
    options, tensors = _load(path)
    tensors = _renamed(tensors)
    if reasons := _of_several_languages(options, tensors) or _reasons(options, tensors):
        raise ExportError(f"{path}: not a plain Transformer that can be imported: {'; '.join(reasons)}")
    shaped(options, _Options, f"{path}: its options have")
    if not dictionaries:
        raise DataError(f"{path}: name its dictionaries, dict.XX.txt of source and target, with `--dictionary`")
    named_contents = [(file, read_file(file)) for file in dictionaries]
    read = [_ids(content, file) for file, content in (named_contents[0], named_contents[-1])]
    ids = [found for found, _ in read]
    anatomy = _anatomy(options, tensors)
    pairs = ((dictionaries[0], anatomy.encoder, read[0][1]), (dictionaries[-1], anatomy.decoder, read[-1][1]))
    said = [_shown(options.get(f"{side}_lang") or side) for side in ("source", "target")]
    _refuse_other_dictionaries(path, options, pairs, (said[0], said[1]), ids[0] == ids[1])
    if len(dictionaries) == 1 and anatomy.encoder.embedding is not anatomy.decoder.embedding:
        warnings.warn(
            f"{path}: {dictionaries[0]} is used for both sides, whose matrices differ: correct if it was made with "
            "`--joined-dictionary`; otherwise name the source's, then the target's",
            UserWarning,
            stacklevel=2,
        )
    alone = [read_segmenter(model) for model in models]
    # Tokens that name languages are not pieces of the models: they come from a corpus's `tag`, never from text.
    tags = language_tokens({**ids[0], **ids[1]}, alone) if alone else []
    segmenters = [SentencePieceTokenizer(model.model, tags=tags) for model in alone]
    # Equal dictionaries become one vocabulary, unless each side has a separate segmentation model.
    joint = ids[0] == ids[1] and len(models) < 2
    source: Tokenizer = segmenters[0] if segmenters else _listed(ids[0])
    target = source if joint else (segmenters[-1] if segmenters else _listed(ids[1]))
    return ForeignModel(
        kind=f"fairseq {_shown(options.get('arch') or options.get('_name'))}",
        anatomy=anatomy,
        scaled=not options.get("no_scale_embedding", False),
        source_ids=ids[0],
        target_ids=ids[1],
        control=ControlIds(_PAD, _UNK, _EOS, _EOS),
        source=source,
        target=target,
        languages=languages or (said[0], said[1]),
    ).checked(str(path))


def _load(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the options of the model and the task, and the parameters. Raises DataError, ExportError."""
    content = load_pickled(path, "weights and options", classes=[argparse.Namespace], packages=_PACKAGES)
    refuse_checkpoint(path, content)
    try:
        # Options are in `args` in older checkpoints, in `cfg.model` and `cfg.task` in newer ones.
        configured = _held(content.get("cfg")) or {}
        options = _flat(content.get("args") or configured["model"])
        task = _flat(configured.get("task"))
        for key, value in options.items():
            if isinstance(value, str) and (found := _REFERENCE.fullmatch(value)):
                options[key] = _flat(configured.get(found[1])).get(found[2])
        tensors = content["model"]
    except (AttributeError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}: not a checkpoint of fairseq, which has `model`, and its options in `args` or `cfg` "
            f"({type(error).__name__}: {printable(str(error))})"
        ) from None
    if not all(isinstance(key, str) for key in (*options, *task)):
        raise DataError(f"{path}: not a checkpoint of fairseq (options without names)")
    kind = task.pop("_name", None)
    return {**task, **options, "task": options.get("task") or task.get("task") or kind}, tensors_of(path, tensors)


def _held(options: Any) -> Any:
    """Return the content of an omegaconf object or a dataclass of options; anything else unchanged."""
    if not isinstance(options, Values):
        return options
    held = vars(options)
    return held.get("_val", held.get("_content", held))


def _flat(options: Any) -> dict[str, Any]:
    """Return the options under their names on fairseq's command line.

    Those of its newest models are nested: `encoder: {layers: 6}` becomes `encoder_layers`.
    """
    found = _held(options)
    named = {} if found is None else found if isinstance(found, dict) else vars(found)
    given = {name: _held(value) for name, value in named.items()}
    nested = {name: part for name in ("encoder", "decoder") if isinstance(part := given.get(name), dict)}
    return given | {f"{name}_{key}": _held(value) for name, part in nested.items() for key, value in part.items()}


def _renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters under fairseq 0.12's names, renaming those of 2017 to 2019 as `upgrade_state_dict` does."""
    renamed: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        joined = re.fullmatch(r"((?:en|de)coder\.layers\.\d+\.\w+)\.in_proj_(weight|bias)", key)
        if joined and tensor.ndim and tensor.shape[0] % 3 == 0:
            parts = zip("qkv", tensor.chunk(3), strict=True)
            renamed |= {f"{joined[1]}.{name}_proj.{joined[2]}": part for name, part in parts}
        elif norm := re.fullmatch(r"((en|de)coder\.layers\.\d+)\.layer_norms\.(\d)\.(weight|bias)", key):
            names = _NORMS if norm[2] == "de" else (_NORMS[0], _NORMS[2])
            place = int(norm[3])
            renamed[f"{norm[1]}.{names[place]}.{norm[4]}" if place < len(names) else key] = tensor
        else:
            renamed[key] = tensor
    if (output := renamed.pop("decoder.embed_out", None)) is not None:
        renamed.setdefault("decoder.output_projection.weight", output)
    return renamed


_NORMS = ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm")
"""Norms of a decoder layer, which used to be numbered; an encoder layer lacks the second."""


class _Options(JsonForm):
    """The options that are used."""

    encoder_layers: int = Field(ge=1, le=4096)
    decoder_layers: int = Field(ge=1, le=4096)
    encoder_attention_heads: int = Field(ge=1, le=1 << 20)
    decoder_attention_heads: int = Field(ge=1, le=1 << 20)
    encoder_normalize_before: bool
    decoder_normalize_before: bool
    decoder_embed_dim: int = Field(ge=1)
    max_source_positions: int | None = Field(default=None, ge=1, le=MAX_POSITIONS)
    max_target_positions: int | None = Field(default=None, ge=1, le=MAX_POSITIONS)
    max_positions: int | None = Field(default=None, ge=1, le=MAX_POSITIONS)


def _shown(value: Any) -> str:
    """Return an option's value for messages; for a list only its type, since it may contain itself a million times."""
    return printable(str(value)) if isinstance(value, str | int | float | None) else type(value).__name__


def _of_several_languages(options: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the reason why a multilingual model cannot be imported; an empty list for any other model."""
    name, task = _shown(options.get("arch") or options.get("_name")), _shown(options.get("task"))
    languages = options.get("langs") or options.get("lang_pairs")
    tokens = [key for key in ("encoder_langtok", "decoder_langtok") if options.get(key)]
    several = any(_MULTILINGUAL.match(one) for one in (name, task)) or any(key.startswith("models.") for key in tensors)
    listed = languages.split(",") if isinstance(languages, str) else languages
    if not (several or tokens or options.get("lang_dict") or (isinstance(listed, list) and len(listed) > 1)):
        return []
    said = [f"`arch: {name}`", f"`task: {task}`", *(f"`{key}: {_shown(options[key])}`" for key in tokens)]
    named = f" ({printable(str(languages))})" if isinstance(languages, str) else ""
    return [
        f"{', '.join(said)}: a model of several languages{named}: fairseq adds their codes to the text or "
        "forces them as first tokens, which models here do not support. Translate with fairseq, for example a corpus "
        "to train a model on"
    ]


def _reasons(options: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
    name = _shown(options.get("arch") or options.get("_name"))
    reasons = [] if name.startswith("transformer") else [f"`arch: {name}` is not transformer..."]
    reasons += [
        f"`{key}: {_shown(options[key])}`"
        for key, plain in _REFUSED.items()
        if options.get(key, plain) not in (plain, 0, None)
    ]
    if options.get("activation_fn", "relu") not in ACTIVATIONS:
        reasons.append(f"`activation_fn: {_shown(options['activation_fn'])}`; known are {', '.join(ACTIVATIONS)}")
    width = options.get("decoder_embed_dim")
    for key in ("encoder_embed_dim", "decoder_input_dim", "decoder_output_dim"):
        if width is not None and options.get(key, width) != width:
            reasons.append(f"`{key}: {_shown(options[key])}` is not the decoder's width {width}")
    known = re.compile(
        r"(en|de)coder\.(embed_tokens|embed_positions|layer_norm)\.(weight|bias)|decoder\.output_projection\.weight"
        r"|(en|de)coder\.layers\.\d+\.(self_attn|encoder_attn)\.[qkv]_proj\.(weight|bias)"
        r"|(en|de)coder\.layers\.\d+\.(self_attn|encoder_attn)\.out_proj\.(weight|bias)"
        r"|(en|de)coder\.layers\.\d+\.((self_attn|encoder_attn|final)_layer_norm|fc1|fc2)\.(weight|bias)"
    )
    unknown = [key for key in tensors if not known.fullmatch(key) and not _UNREAD.fullmatch(key)]
    if unknown:
        reasons.append(f"parameter {printable(unknown[0])} is unknown ({len(unknown)} in all)")
    for name in ("encoder", "decoder"):
        layers, numbers = options.get(f"{name}_layers"), re.compile(rf"{name}\.layers\.(\d{{1,6}})\.")
        highest = max((int(found[1]) for key in tensors if (found := numbers.match(key))), default=-1)
        if isinstance(layers, int) and highest >= layers:
            reasons.append(f"`{name}_layers: {layers}`, but there are parameters of layer {highest + 1}")
        pre_norm, final = bool(options.get(f"{name}_normalize_before")), f"{name}.layer_norm.weight" in tensors
        if pre_norm != final:
            why = "without a norm at the end of the stack, as before 2019" if pre_norm else "with a norm at the end"
            reasons.append(f"`{name}_normalize_before: {str(pre_norm).lower()}` {why}")
    shared = options.get("share_all_embeddings") or options.get("share_decoder_input_output_embed", True)
    if not shared and "decoder.output_projection.weight" not in tensors:
        reasons.append("`share_decoder_input_output_embed: false`, but the output has no matrix")
    return reasons


def _refuse_other_dictionaries(
    path: Path,
    options: Mapping[str, Any],
    sides: Sequence[tuple[Path, StackMatrices, int]],
    languages: tuple[str, str],
    joint: bool,
) -> None:
    """Raise ExportError for dictionaries that do not fit the matrices: ids are line numbers, so one extra line shifts
    all.

    `sides` has the dictionary file, the stack and the number of ids for source and target; `languages` are the codes
    that the checkpoint names; `joint`: the dictionaries are equal.
    """
    reasons = []
    for side, (file, stack, count) in zip(("source", "target"), sides, strict=True):
        if (rows := stack.embedding.shape[0]) != count:
            reasons.append(f"{side}: the dictionary {file} has {count:,} tokens, the model {rows:,} rows")
    names = tuple(file.name for file, _, _ in sides)
    swapped = tuple(f"dict.{language}.txt" for language in reversed(languages))
    if names == swapped and languages[0] != languages[1] and not joint:
        reasons.append(f"the model translates {languages[0]} to {languages[1]}: name {swapped[1]} first")
    if options.get("share_all_embeddings") and not joint:
        reasons.append("`share_all_embeddings: true`, but the dictionaries of source and target are not one")
    if reasons:
        raise ExportError(
            f"{path}: {'; '.join(reasons)}. Name the dictionaries of this model; a model of a task that adds "
            "further rows, such as language codes, cannot be imported"
        )


def _ids(dictionary: bytes, path: Path) -> tuple[dict[str, int], int]:
    """Return the ids by token, and their number: four control symbols, then the file's lines, as fairseq counts them.

    A token marked `#fairseq:overwrite` may be listed earlier in the file; it has the later id, and the earlier one is
    lost.

    Raises DataError for a file that is not UTF-8, or for a repeated token, which fairseq also refuses.
    """
    ids = {"<s>": _BOS, "<pad>": _PAD, "</s>": _EOS, "<unk>": _UNK}
    count = len(ids)
    try:
        for number, token, replaces in read_listing(dictionary):
            if token in ids and not replaces:
                raise DataError(
                    f"line {number}: {printable(token)!r} is listed twice, so later ids are unknown. In fairseq a "
                    "token that replaces an earlier one has ` #fairseq:overwrite` at the end of its line"
                )
            ids[token] = count
            count += 1
    except DataError as error:
        raise DataError(f"{path}: {error}; is it a dictionary of fairseq?") from None
    return ids, count


def _listed(ids: Mapping[str, int]) -> VocabularyTokenizer:
    """Return the tokenizer for text that is already segmented into the dictionary's tokens."""
    return VocabularyTokenizer(
        listing(token for token in ids if token and token not in ("<s>", "<pad>", "</s>", "<unk>"))
    )


def _anatomy(options: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Anatomy:
    encoder, decoder = (_stack(options, tensors, name) for name in ("encoder", "decoder"))
    encoder = dataclasses.replace(encoder, embedding=one_of(encoder.embedding, decoder.embedding))
    output = one_of(tensors.get("decoder.output_projection.weight", decoder.embedding).float(), decoder.embedding)
    return Anatomy(encoder, decoder, Affine(output), ACTIVATIONS[options.get("activation_fn", "relu")], "layer")


def _stack(options: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str) -> StackMatrices:
    pre_norm = bool(options[f"{name}_normalize_before"])
    if (embedding := tensors.get(f"{name}.embed_tokens.weight")) is None:
        raise ExportError(f"the checkpoint has no parameter {name}.embed_tokens.weight; is it a plain Transformer?")
    width_of(embedding, f"{name}.embed_tokens.weight")
    embedding = embedding.float()
    # fairseq's default for old checkpoints that do not record it.
    own = "max_source_positions" if name == "encoder" else "max_target_positions"
    count = int(options.get(own) or options.get("max_positions") or 1024)
    positions: Tensor | None = None
    if not options.get("no_token_positional_embeddings", False):
        learned = tensors.get(f"{name}.embed_positions.weight")
        first = _PAD + 1  # fairseq counts positions from just after the padding id
        positions = positions_from(first, count, embedding.shape[1]) if learned is None else learned[first:].float()
    layers = range(options[f"{name}_layers"])
    return StackMatrices(
        residual="pre" if pre_norm else "post",
        heads=options[f"{name}_attention_heads"],
        epsilon=NORM_EPSILON,
        layers=tuple(layer_from(tensors, f"{name}.layers.{n}", decoder=name == "decoder") for n in layers),
        final_norm=take(tensors, f"{name}.layer_norm") if pre_norm else None,
        embedding=embedding,
        scale=1.0 if options.get("no_scale_embedding", False) else embedding.shape[1] ** 0.5,
        positions=positions,
    )
