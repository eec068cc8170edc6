"""Export to a model folder as Firefox, Bergamot and translateLocally use it.

The folder holds the weights in the binary form of the browsers' fork of Marian, in int8 with scales for the inputs of
its products; the vocabularies; a lexical shortlist; `metadata.json`; and `config.yml` for programs other than Firefox,
which has these settings built in. `ziggurat.exchange.marian` computes the weights themselves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from torch import Tensor

from ziggurat.config import Experiment
from ziggurat.data.shortlist import read_shortlist
from ziggurat.data.subword import SentencePieceTokenizer
from ziggurat.exchange.firefox_files import FIREFOX_SEARCH, METADATA_FILE
from ziggurat.exchange.import_marian import imported_translator
from ziggurat.exchange.marian import (
    marian_parameters,
    marian_rows,
    options_text,
    places_of_norms,
    sentencepiece_model,
)
from ziggurat.exchange.marian_binary import SCALE_OF_INPUT, browser_binary
from ziggurat.exchange.marian_shortlist import binary_shortlist
from ziggurat.exchange.plain import ExportedModel
from ziggurat.model.embedding import OutputProjection
from ziggurat.model.linear import Linear, linear
from ziggurat.system.errors import ExportError
from ziggurat.system.files import write_atomically
from ziggurat.translate.translator import Translator

Array = NDArray[Any]

_WIDTHS, _ROWS = 64, 8
"""int8 products require widths, and the size of the target's vocabulary, to be multiples of these."""

_SEPARATE_OUTPUT = "decoder_ff_logit_out_Wt"
"""_SEPARATE_OUTPUT is the output matrix if it is not an embedding. The fork transposes it wrongly and quantises it
itself when it is fp32."""

_BATCH, _MEASURED = 32, 512
"""Number of sentences whose largest input is one measurement, as for Firefox's own models, and the maximum measured."""

_LISTED = 50
"""_LISTED is the number in the name of a shortlist, as in Firefox's models."""

_MATRICES: Mapping[str, tuple[str, ...]] = {
    "self_attn.qkv_proj": ("self_Wq", "self_Wk", "self_Wv"),
    "self_attn.out_proj": ("self_Wo",),
    "self_attn.v_proj": ("rnn_W",),
    "self_attn.gate_proj": ("rnn_Wf",),
    "cross_attn.q_proj": ("context_Wq",),
    "cross_attn.kv_proj": ("context_Wk", "context_Wv"),
    "cross_attn.out_proj": ("context_Wo",),
    "ffn.in_proj": ("ffn_W1",),
    "ffn.out_proj": ("ffn_W2",),
}
"""Linear map of a layer -> Marian's names of its matrices."""


def firefox_reasons(experiment: Experiment) -> Iterator[str]:
    """Yield the reasons, in addition to Marian's own, why no model of this configuration can be such a folder."""
    config = experiment.model
    for key, width in (("d_model", config.d_model), ("d_ff", config.d_ff)):
        if width % _WIDTHS:
            yield f"`{key}: {width}`: products in int8 need a multiple of {_WIDTHS}"
    # Features of Marian before 1.11, from which the browsers' fork was made.
    if True in places_of_norms(experiment):
        yield "`residual`: pre-norm in the browsers' fork leaves keys and values of self-attention without their norm"
    if config.encoder_d_ff != config.d_ff:
        yield f"`encoder.d_ff: {config.encoder_d_ff}`: in the browsers' fork both stacks have the same width"
    if config.norm != "layer":
        yield f"`norm: {config.norm}`: the browsers' fork has LayerNorm alone"
    if config.activation == "gelu":
        yield "`activation: gelu`: the browsers' fork has a different function of that name"
    if config.embedding.positions == "none":
        yield "`embedding.positions: none`: the browsers' fork always adds sinusoids"
    if experiment.data.subword.kind == "vocabulary":
        yield "`data.subword.kind: vocabulary`: the browser's engine needs SentencePiece models"


def write_firefox(folder: Path, model: ExportedModel, quantization: str | None) -> None:
    """Write the folder; without `quantization` the weights are fp32, which Bergamot accepts and Firefox does not.

    Raises ExportError if Marian cannot compute the same, or if a vocabulary has an unusable kind or size.
    """
    data = model.experiment.data
    pair = f"{data.source_language}{data.target_language}"
    arrays, options = marian_parameters(model)
    if (rows := marian_rows(model.target)) % _ROWS:
        raise ExportError(
            f"the target vocabulary has {rows:,} pieces: the browser's engine needs a multiple of {_ROWS} "
            "(`data.subword.vocabulary_size`)"
        )
    vocabularies = _write_vocabularies(folder, model, pair)
    name, quantised, precision = f"model.{pair}.bin", list[str](), "float32"
    content = browser_binary(arrays, options_text(options), quantised)
    write_atomically(folder / name, content)
    if quantization is not None:
        arrays |= _input_scales(imported_translator(folder), model.sample, arrays)
        quantised = [one for one in arrays if one.rpartition("_")[2].startswith("W") and one != _SEPARATE_OUTPUT]
        content = browser_binary(arrays, options_text(options), quantised)
        (folder / name).unlink()
        name, precision = f"model.{pair}.intgemm.alphas.bin", "int8shiftAlphaAll"
        write_atomically(folder / name, content)
    shortlist = _write_shortlist(folder, model, pair)
    search = {
        "relative-paths": True,
        "models": [name],
        "vocabs": vocabularies,
        **({} if shortlist is None else {"shortlist": [shortlist, False]}),
        **FIREFOX_SEARCH,
        "gemm-precision": precision,
    }
    write_atomically(folder / "config.yml", yaml.safe_dump(search, sort_keys=False).encode())
    metadata = {
        "architecture": _architecture(model.experiment.model.d_model),
        "byteSize": len(content),
        "hash": hashlib.sha256(content).hexdigest(),
        "modelConfig": options,
        "modelStatistics": _statistics(arrays, quantised),
        "sourceLanguage": data.source_language,
        "targetLanguage": data.target_language,
    }
    text = json.dumps(metadata, indent=2, sort_keys=True, ensure_ascii=False)
    write_atomically(folder / METADATA_FILE, f"{text}\n".encode())


def _write_vocabularies(folder: Path, model: ExportedModel, pair: str) -> list[str]:
    """Write the vocabularies; return the file names for source and target."""
    contents = []
    for side, tokenizer in (("source", model.source), ("target", model.target)):
        assert isinstance(tokenizer, SentencePieceTokenizer)  # firefox_reasons
        contents.append(sentencepiece_model(tokenizer, side))
    joint = contents[0] == contents[1]
    names = [f"{'' if joint else side}vocab.{pair}.spm" for side in ("src", "trg")]
    for name, content in zip(names, contents, strict=True):
        write_atomically(folder / name, content)
    return names


def _write_shortlist(folder: Path, model: ExportedModel, pair: str) -> str | None:
    """Write the model's shortlist, if it has one; return its name.

    Pieces that every sentence may use are in the row of end-of-sentence, which every sentence contains, since they need
    not come first in the vocabulary.
    """
    path = model.experiment.decoding.shortlist
    if path is None:
        return None
    table = read_shortlist(path, model.source, model.target)
    rows, columns = marian_rows(model.source), marian_rows(model.target)
    listed = [[one for one in row if one < columns] for row in table.candidates[:rows].tolist()]
    listed[model.source.eos] += [one for one in table.always.tolist() if one < columns]
    name = f"lex.{_LISTED}.{_LISTED}.{pair}.s2t.bin"
    write_atomically(folder / name, binary_shortlist(listed, first=0, best=max(map(len, listed), default=0)))
    return name


def _architecture(width: int) -> str:
    """Return the name of the largest kind of Firefox student that is not wider: 256, 384 or 512."""
    return "tiny" if width < 384 else "base-memory" if width < 512 else "base"


def _statistics(arrays: Mapping[str, Array], quantised: Collection[str]) -> dict[str, int]:
    counts = {"parameters": 0, "embeddings_bytes": 0}
    counts |= {f"{stack}_{what}": 0 for stack in ("encoder", "decoder") for what in ("parameters", "bytes")}
    for name, array in arrays.items():
        size = array.size * (1 if name in quantised else 4)
        counts["parameters"] += array.size
        stack = name.partition("_")[0]
        if stack in ("encoder", "decoder"):
            counts[f"{stack}_parameters"] += array.size
            counts[f"{stack}_bytes"] += size
        elif name == "Wemb":
            counts["embeddings_bytes"] += size
    return counts


@torch.inference_mode()
def _input_scales(translator: Translator, texts: Sequence[str], arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return the factors of the inputs of all products, by the names that the fork looks for.

    127 stands for the mean of the largest inputs plus 1.1 standard deviations. The largest input is taken once per
    batch for products of the encoder and for keys and values of its output, and once per step for products of the
    decoder.
    """
    found: dict[str, list[Tensor]] = {}

    def recorded(name: str, per_step: bool, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        steps = x.abs().amax(-1).flatten()
        found.setdefault(name, []).append(steps if per_step else steps.amax(0, keepdim=True))
        return linear(x, weight, bias)

    for path, module in translator.model.named_modules():
        if isinstance(module, Linear | OutputProjection):
            per_step = not path.startswith("encoder.") and not path.endswith("cross_attn.kv_proj")
            module.multiply = partial(recorded, path, per_step)
    tokenizer = translator.target_tokenizer
    ids = {piece: number for number, piece in enumerate(tokenizer.pieces(range(tokenizer.size)))}
    largest: dict[str, list[float]] = {}
    translations = list(translator.translate_stream(texts[:_MEASURED], beam_size=1))
    for start in range(0, len(translations), _BATCH):
        sentences: dict[str, list[list[float]]] = {}
        for translation in translations[start : start + _BATCH]:
            found.clear()
            source = [*translator.source_tokenizer.encode([translation.source])[0], translator.source_tokenizer.eos]
            written = [tokenizer.bos, *(ids[piece] for piece in translation.hypotheses[0].tokens)]
            given = torch.tensor([source])
            memory = translator.model.encode(given, torch.ones_like(given, dtype=torch.bool))
            translator.model.logits(translator.model.decode(torch.tensor([written]), memory))
            for path, values in found.items():
                sentences.setdefault(path, []).append(values[0].tolist())
        for path, rows in sentences.items():
            largest.setdefault(path, []).extend(map(max, zip_longest(*rows, fillvalue=0.0)))
    scales: dict[str, Array] = {}
    for path, maxima in largest.items():
        bound = np.mean(maxima) + 1.1 * np.std(maxima)
        factor = np.array([127 / max(float(bound), 1e-6)], np.float32)
        scales |= {f"{name}{SCALE_OF_INPUT}": factor for name in matrices_of(path, arrays)}
    return scales


def matrices_of(path: str, arrays: Mapping[str, Array]) -> list[str]:
    """Return Marian's names of the matrices in the linear map `path`."""
    if path == "output":
        tables = (_SEPARATE_OUTPUT, "Wemb", "decoder_Wemb")
        # The second name is used when a shortlist picks some of its rows.
        return [next(name for name in tables if name in arrays), "none"]
    stack, _, number, rest = path.split(".", 3)
    return [f"{stack}_l{int(number) + 1}_{name}" for name in _MATRICES[rest]]
