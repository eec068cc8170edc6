"""Export of a plain Transformer to a directory for transformers: as MarianMT if post-norm, as Pegasus if pre-norm.

Both classes belong to the BART family and read positions from the checkpoint, so a model's own are preserved bit for
bit. M2M100 computes its own, starting from position 2; BART and mBART normalise the embeddings, which a plain
Transformer cannot undo.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ziggurat.config import DecodingConfig
from ziggurat.config.load import change_section
from ziggurat.config.model import ModelConfig
from ziggurat.data.subword import SentencePieceTokenizer, Tokenizer
from ziggurat.exchange.anatomy import Anatomy, with_epsilon
from ziggurat.exchange.imported import NORM_EPSILON, layer_names
from ziggurat.model.kinds import RESIDUAL
from ziggurat.model.tensors import write_tensors
from ziggurat.system.errors import ConfigError, ExportError
from ziggurat.system.files import check_folder
from ziggurat.translate.results import Hypothesis, Translation
from ziggurat.translate.scorers import length_batches

MAX_NEW_TOKENS = 256
"""MAX_NEW_TOKENS is the longest output of `generate`, including end-of-sentence, unless the caller sets another
limit."""
_FILLER_LOGIT = -1e9
"""_FILLER_LOGIT is the output bias of rows without a token."""


def huggingface_reasons(config: ModelConfig) -> Iterator[str]:
    """Yield the reasons why no stock class of transformers can represent a plain Transformer of this configuration."""
    if "relative" in (config.encoder.attention, config.decoder.attention):
        yield "`attention: relative`: the stock encoder-decoder classes have no Shaw et al. (2018) positions"
    if config.activation == "swiglu":
        yield "`activation: swiglu`: the stock classes have no gate in the feed-forward network"
    if config.norm != "layer":
        yield f"`norm: {config.norm}`: the stock classes have layer normalisation with a bias"
    if config.encoder_width != config.d_model:
        yield f"`encoder.d_model: {config.encoder_width}`: the stacks of the stock classes are equally wide"
    kinds = (config.encoder_residual, config.decoder_residual)
    places = {RESIDUAL[kind].folding in ("pre", "branch_vector") for kind in kinds}
    if len(places) > 1:
        yield (
            f"`encoder.residual: {config.encoder_residual}` and `decoder.residual: {config.decoder_residual}`: the "
            "stock classes have pre-norm in both stacks or post-norm in both"
        )


def huggingface_rules(decoding: DecodingConfig) -> tuple[str, ...]:
    """Return the keys of the rules that `generate` applies as ziggurat's search does.

    In a greedy search its repetition penalty applies to logits rather than log-probabilities, so it is a different
    rule.
    """
    return ("no_repeat_ngram_size", *(("repetition_penalty",) if decoding.beam_size > 1 else ()))


def transformers() -> Any:
    """Return the module transformers. Raises ConfigError if it is not installed."""
    try:
        import transformers as module
    except ModuleNotFoundError:
        raise ConfigError("`transformers` is not installed: pip install 'ziggurat-mt[export]'") from None
    return module


def write_huggingface(
    folder: Path,
    anatomy: Anatomy,
    tokenizers: Sequence[Tokenizer],
    positions: int,
    languages: Sequence[str],
    decoding: DecodingConfig,
) -> None:
    """Write `config.json`, `model.safetensors`, `generation_config.json` and the tokenizer into `folder`.

    Args:
        folder: an existing folder.
        anatomy: the model's matrices.
        tokenizers: tokenizers of source and target, SentencePiece models.
        positions: rows of the position tables, for tables that the model does not already have.
        languages: codes of source and target.
        decoding: search settings for `generate`; a length penalty of any kind but `power` is dropped.

    Raises ExportError for tokenizers without a SentencePiece model, ConfigError if transformers is not installed.
    """
    module = transformers()
    anatomy = dataclasses.replace(
        anatomy,
        encoder=with_epsilon(anatomy.encoder, NORM_EPSILON),
        decoder=with_epsilon(anatomy.decoder, NORM_EPSILON),
    )
    model_class = "Pegasus" if anatomy.encoder.pre_norm else "Marian"
    tensors, options = _weights(anatomy, tokenizers[1], positions)
    options |= _sizes(anatomy, positions) | _tokens(tokenizers[1])
    if model_class == "Pegasus":
        # Pegasus has one vocabulary size for both sides, and ties the output to both embeddings or to neither.
        rows = max(options["vocab_size"], options.pop("decoder_vocab_size"))
        tensors = _one_vocabulary(tensors, rows)
        options["vocab_size"] = rows
        options["tie_word_embeddings"] = options.pop("share_encoder_decoder_embeddings")
    config = getattr(module, f"{model_class}Config")(**options)
    config.architectures = ["PegasusForConditionalGeneration" if model_class == "Pegasus" else "MarianMTModel"]
    config.dtype = "float32"
    config.save_pretrained(folder)
    _generation(module, tokenizers[1], decoding, options["max_position_embeddings"]).save_pretrained(folder)
    # Not by save_pretrained, which leaves out the position tables.
    write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
    _write_tokenizer(folder, tokenizers, languages, options["max_position_embeddings"])


def _sizes(anatomy: Anatomy, positions: int) -> dict[str, Any]:
    options: dict[str, Any] = {
        "activation_function": anatomy.activation,
        "d_model": anatomy.encoder.embedding.shape[1],
        "max_position_embeddings": anatomy.encoder.position_table(positions).shape[0],
        "dropout": 0.0,
    }
    for name, stack in (("encoder", anatomy.encoder), ("decoder", anatomy.decoder)):
        options[f"{name}_layers"] = len(stack.layers)
        options[f"{name}_attention_heads"] = stack.heads
        options[f"{name}_ffn_dim"] = stack.layers[0].ffn_in.weight.shape[0]
    return options


def _tokens(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "pad_token_id": tokenizer.pad,
        "bos_token_id": tokenizer.bos,
        "eos_token_id": tokenizer.eos,
        "decoder_start_token_id": tokenizer.bos,
        "forced_eos_token_id": None,
    }


def _weights(anatomy: Anatomy, target: Tokenizer, positions: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the parameters by their names there, and options for the scale and sharing of embeddings.

    The classes scale embeddings by sqrt(D) or not at all. Any other factor is multiplied into the embeddings, which
    then no longer equal the output matrix. The same holds if the first input is not an embedding: its row becomes 0.
    """
    encoder, decoder, root = anatomy.encoder, anatomy.decoder, math.sqrt(anatomy.encoder.embedding.shape[1])
    tables, scale = [encoder.embedding, decoder.embedding], encoder.scale
    if encoder.scale != decoder.scale or scale not in (1.0, root):
        # The scale goes into the tables, which then differ from the output matrix: `tied` below is False.
        tables, scale = [stack.embedding * stack.scale for stack in (encoder, decoder)], 1.0
    if decoder.zero_start:
        tables[1] = tables[1].clone()
        # The decoder reads begin-of-sentence only as its first input, whose embedding counts as 0.
        tables[1][target.bos] = 0
    output = anatomy.output
    # Matrices are tied if they share the same memory.
    tied = tables[1].data_ptr() == output.weight.data_ptr()
    shared = tied and tables[0].data_ptr() == tables[1].data_ptr()
    tensors = {
        f"model.{name}.layers.{number}.{key}": tensor
        for name, stack in (("encoder", encoder), ("decoder", decoder))
        for number, layer in enumerate(stack.layers)
        for key, tensor in layer_names(layer)
    }
    for name, stack, table in (("encoder", encoder, tables[0]), ("decoder", decoder, tables[1])):
        tensors[f"model.{name}.embed_positions.weight"] = stack.position_table(positions)
        tensors[f"model.{name}.embed_tokens.weight"] = table
        if stack.final_norm is not None:
            tensors |= stack.final_norm.named(f"model.{name}.layer_norm")
    tensors["lm_head.weight"] = output.weight
    bias = output.bias if output.bias is not None else output.weight.new_zeros(output.weight.shape[0])
    # The classes always have an output bias.
    tensors["final_logits_bias"] = bias[None]
    options: dict[str, Any] = {
        "vocab_size": tables[0].shape[0],
        "decoder_vocab_size": tables[1].shape[0],
        "scale_embedding": scale != 1.0,
        "tie_word_embeddings": tied,
        "share_encoder_decoder_embeddings": shared,
    }
    # The classes tie these matrices to others.
    copies = ["lm_head.weight"] if tied else []
    if shared:
        tensors["model.shared.weight"] = tables[0]
        copies += [f"model.{name}.embed_tokens.weight" for name in ("encoder", "decoder")]
    return {name: tensor for name, tensor in tensors.items() if name not in copies}, options


def _one_vocabulary(tensors: dict[str, Tensor], rows: int) -> dict[str, Tensor]:
    """Pad the matrices with one row per token to `rows` rows, since Pegasus has one vocabulary size.

    The bias keeps added rows from being generated. Unless one matrix serves all three purposes, none are tied, because
    the class ties either all three or none.
    """
    tensors = dict(tensors)
    if "model.shared.weight" not in tensors:
        tensors.setdefault("lm_head.weight", tensors["model.decoder.embed_tokens.weight"])
        tensors["model.shared.weight"] = tensors["model.encoder.embed_tokens.weight"]
    for name in ("model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head"):
        if (table := tensors.get(f"{name}.weight")) is not None:
            filler = table.new_zeros(rows - table.shape[0], table.shape[1])
            tensors[f"{name}.weight"] = torch.cat([table, filler])
    bias = tensors["final_logits_bias"]
    tensors["final_logits_bias"] = torch.cat([bias, bias.new_full((1, rows - bias.shape[1]), _FILLER_LOGIT)], dim=1)
    return tensors


def _generation(module: Any, target: Tokenizer, decoding: DecodingConfig, positions: int) -> Any:
    """Return the settings under which `generate` finds what ziggurat's search finds with `endings: beam`."""
    penalty = decoding.length_penalty
    tokens = _tokens(target)
    del tokens["forced_eos_token_id"]
    unknown = () if decoding.writes_unknown else (target.unk,)
    never = sorted({target.pad, target.bos, *target.tags.values(), *unknown} - {target.eos})
    return module.GenerationConfig(
        **tokens,
        num_beams=decoding.beam_size,
        # transformers refuses to save one for a greedy search.
        length_penalty=None if decoding.beam_size == 1 else penalty.alpha if penalty.kind == "power" else 0.0,
        # Continue until no beam can become better, as ziggurat's search does.
        early_stopping="never" if decoding.beam_size > 1 else False,
        max_new_tokens=min(MAX_NEW_TOKENS, decoding.max_length.limit + 1, positions),
        min_new_tokens=decoding.min_length or None,
        no_repeat_ngram_size=decoding.no_repeat_ngram_size or None,
        repetition_penalty=decoding.repetition_penalty if decoding.repetition_penalty != 1 else None,
        suppress_tokens=never,
    )


def _write_tokenizer(folder: Path, tokenizers: Sequence[Tokenizer], languages: Sequence[str], positions: int) -> None:
    """Write SentencePiece models and vocabularies for MarianTokenizer, which also segments by SentencePiece."""
    source, target = tokenizers
    for side, tokenizer in (("source", source), ("target", target)):
        if not isinstance(tokenizer, SentencePieceTokenizer):
            raise ExportError("the tokenizer is a plain vocabulary, but transformers needs a SentencePiece model")
        (folder / f"{side}.spm").write_bytes(trimming(tokenizer.model))
    separate = source is not target
    for name, tokenizer in (("vocab.json", source), ("target_vocab.json", target))[: 1 + separate]:
        ids = {piece: number for number, piece in enumerate(tokenizer.pieces(range(tokenizer.size)))}
        (folder / name).write_text(json.dumps(ids, ensure_ascii=False, indent=0), "utf-8")
    unk, eos, pad = target.pieces([target.unk, target.eos, target.pad])
    described = {
        "tokenizer_class": "MarianTokenizer",
        "source_lang": languages[0],
        "target_lang": languages[1],
        "unk_token": unk,
        "eos_token": eos,
        "pad_token": pad,
        "additional_special_tokens": list(source.tags),
        "separate_vocabs": separate,
        "model_max_length": positions,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described, ensure_ascii=False, indent=2), "utf-8")


def trimming(model: bytes) -> bytes:
    """Return a SentencePiece model that removes spare spaces, as ziggurat's normalisation does."""
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(model)  # type: ignore[attr-defined]
    proto.normalizer_spec.remove_extra_whitespaces = True
    return bytes(proto.SerializeToString())


@contextlib.contextmanager
def _quiet(module: Any) -> Iterator[None]:
    """Silence transformers' progress bars, and its recommendation of a package that is not needed."""
    logging = module.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            # MarianTokenizer would normalise punctuation by sacremoses, but ziggurat's models are trained on
            # unnormalised text.
            warnings.filterwarnings("ignore", message="Recommended: pip install sacremoses")
            yield
    finally:
        if shown:
            logging.enable_progress_bar()


class HuggingFaceTranslator:
    """Translator by `AutoTokenizer` and `AutoModelForSeq2SeqLM.generate`, called as users of transformers call them.

    Args:
        path: directory with model and tokenizer; nothing is downloaded.

    Raises ConfigError if transformers is not installed, CheckpointError if a file has changed since it was written.
    """

    def __init__(self, path: str | Path) -> None:
        module = transformers()
        check_folder(Path(path))
        with _quiet(module):
            self._tokenizer = module.AutoTokenizer.from_pretrained(str(path), local_files_only=True)
            self._model = module.AutoModelForSeq2SeqLM.from_pretrained(str(path), local_files_only=True).eval()

    @torch.inference_mode()
    def translate_stream(self, lines: Sequence[str], **decoding: Any) -> list[Translation]:
        """Return one Translation per line, by `generate` with its saved settings or with those in `decoding`.

        Only `beam_size`, `length_penalty`, `min_length` and `max_length.limit` of `decoding` are used. Scores are those
        of `generate`.
        """
        options: dict[str, Any] = {}
        if decoding:
            section = change_section(DecodingConfig(), decoding, "decoding")
            options = {
                "num_beams": section.beam_size,
                "early_stopping": "never" if section.beam_size > 1 else False,
                "length_penalty": section.length_penalty.alpha,
                "max_new_tokens": section.max_length.limit + 1,
                "min_new_tokens": section.min_length,  # otherwise the saved one would apply
            }
        lengths = [len(ids) for ids in self._tokenizer(list(lines)).input_ids]
        found: dict[int, Translation] = {}
        # Batches of similar lengths, longest first; results are put back into the order of the lines.
        for batch in length_batches(lengths, 1024):
            inputs = self._tokenizer([lines[i] for i in batch], return_tensors="pt", padding=True)
            given = self._model.generate(**inputs, **options, return_dict_in_generate=True, output_scores=True)
            scores = getattr(given, "sequences_scores", None)
            for row, i in enumerate(batch):
                score = 0.0 if scores is None else float(scores[row])
                # Without the first token, the decoder's first input.
                found[i] = Translation(lines[i], [self._hypothesis(given.sequences[row].tolist()[1:], score)])
        return [found[i] for i in range(len(lines))]

    def _hypothesis(self, ids: list[int], score: float) -> Hypothesis:
        eos = self._tokenizer.eos_token_id
        finished = eos in ids
        kept = ids[: ids.index(eos)] if finished else ids
        text = self._tokenizer.decode(kept, skip_special_tokens=True)
        pieces = self._tokenizer.convert_ids_to_tokens(kept)
        return Hypothesis(text, score, score, pieces, [], finished, ends=int(finished))
