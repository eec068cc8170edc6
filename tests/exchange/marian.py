"""Models as Marian stores them, with random weights, and Marian's computation with them, in numpy.

It follows Marian's documentation and source (src/models/transformer.h, src/layers, src/data/default_vocab.cpp of
version 1.12), and shares no code with the importer, because no published model could be downloaded where this was
written.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

Array = NDArray[np.float32]

POST_NORM: dict[str, Any] = {
    "bert-train-type-embeddings": True,
    "bert-type-vocab-size": 2,
    "dec-cell": "gru",
    "dec-cell-base-depth": 2,
    "dec-cell-high-depth": 1,
    "dec-depth": 2,
    "dim-emb": 16,
    "dim-rnn": 1024,
    "enc-cell": "gru",
    "enc-cell-depth": 1,
    "enc-depth": 3,
    "enc-type": "bidirectional",
    "factors-combine": "sum",
    "input-types": [],
    "layer-normalization": False,
    "lemma-dim-emb": 0,
    "output-omit-bias": False,
    "right-left": False,
    "separator-symbol": None,
    "skip": False,
    "tied-embeddings": False,
    "tied-embeddings-all": True,
    "tied-embeddings-src": False,
    "transformer-aan-activation": "swish",
    "transformer-aan-depth": 2,
    "transformer-aan-nogate": False,
    "transformer-decoder-autoreg": "self-attention",
    "transformer-dim-aan": 2048,
    "transformer-dim-ffn": 24,
    "transformer-decoder-dim-ffn": 20,
    "transformer-ffn-activation": "swish",
    "transformer-ffn-depth": 2,
    "transformer-decoder-ffn-depth": 0,
    "transformer-guided-alignment-layer": "last",
    "transformer-heads": 4,
    "transformer-no-projection": False,
    "transformer-postprocess": "dan",
    "transformer-postprocess-emb": "d",
    "transformer-postprocess-top": "",
    "transformer-preprocess": "",
    "transformer-tied-layers": [],
    "transformer-train-position-embeddings": False,
    "type": "transformer",
    "ulr": False,
    "ulr-dim-emb": 0,
    "ulr-trainable-transformation": False,
    "version": "v1.12.0 65bf82ff 2023-02-21 09:56:29 -0800",
}
"""POST_NORM are the options of an OPUS-MT model (transformer-align), made smaller."""

PRE_NORM = POST_NORM | {
    "transformer-preprocess": "n",
    "transformer-postprocess": "da",
    "transformer-postprocess-top": "n",
    "transformer-ffn-activation": "relu",
    "tied-embeddings-all": False,
    "tied-embeddings": True,
}


def random_arrays(options: dict[str, Any], rows: tuple[int, int], seed: int) -> dict[str, Array]:
    """Return all parameters by Marian's names, in its shapes; `rows` are the sizes of the vocabularies."""
    generator = np.random.default_rng(seed)
    width = options["dim-emb"]
    arrays: dict[str, Array] = {}

    def draw(name: str, *shape: int, scale: float = 0.4, mean: float = 0.0) -> None:
        arrays[name] = generator.normal(mean, scale, shape).astype(np.float32)

    if options["tied-embeddings-all"] or options["tied-embeddings-src"]:
        draw("Wemb", rows[0], width)
    else:
        draw("encoder_Wemb", rows[0], width)
        draw("decoder_Wemb", rows[1], width)
    if not (options["tied-embeddings-all"] or options["tied-embeddings"]):
        draw("decoder_ff_logit_out_Wt", rows[1], width)
    if not options["output-omit-bias"]:
        draw("decoder_ff_logit_out_b", 1, rows[1])
    suffix = "_pre" if options["transformer-preprocess"] == "n" else ""
    for name, depth, inner in (
        ("encoder", options["enc-depth"], options["transformer-dim-ffn"]),
        ("decoder", options["dec-depth"], options["transformer-decoder-dim-ffn"]),
    ):
        for layer in range(1, depth + 1):
            at = f"{name}_l{layer}"
            for kind in ("self", "context")[: 1 + (name == "decoder")]:
                for part in "qkvo":
                    draw(f"{at}_{kind}_W{part}", width, width)
                    draw(f"{at}_{kind}_b{part}", 1, width, scale=0.1)
                draw(f"{at}_{kind}_Wo_ln_scale{suffix}", 1, width, mean=1.0, scale=0.2)
                draw(f"{at}_{kind}_Wo_ln_bias{suffix}", 1, width, scale=0.2)
            draw(f"{at}_ffn_W1", width, inner)
            draw(f"{at}_ffn_b1", 1, inner)
            draw(f"{at}_ffn_W2", inner, width)
            draw(f"{at}_ffn_b2", 1, width)
            draw(f"{at}_ffn_ffn_ln_scale{suffix}", 1, width, mean=1.0, scale=0.2)
            draw(f"{at}_ffn_ffn_ln_bias{suffix}", 1, width, scale=0.2)
        if options["transformer-postprocess-top"] == "n":
            draw(f"{name}_top_ln_scale", 1, width, mean=1.0, scale=0.2)
            draw(f"{name}_top_ln_bias", 1, width, scale=0.2)
    return arrays


def write_npz(path: Path, arrays: dict[str, Any], options: dict[str, Any], block: int = 256) -> Path:
    """Write weights, and options as bytes padded with NUL to a multiple of `block`; nothing is compressed.

    Early versions of Marian wrote one NUL (`block` 1), which CTranslate2's converter expects.
    """
    text = yaml.safe_dump(options).encode() + b"\0"
    stored = np.frombuffer(text + b"\0" * (-len(text) % block), np.int8)
    entries: dict[str, Any] = {**arrays, "special:model.yml": stored}
    np.savez(path, **entries)
    with zipfile.ZipFile(path) as packed:
        assert all(entry.compress_type == zipfile.ZIP_STORED for entry in packed.infolist())
    return path


def write_vocabulary(path: Path, tokens: list[str]) -> Path:
    """Write a vocabulary as YAML, one token per line."""
    path.write_text("".join(f"{_scalar(token)}: {number}\n" for number, token in enumerate(tokens)), encoding="utf-8")
    return path


def _scalar(token: str) -> str:
    """Return the token, in quotes unless it begins with a letter or SentencePiece's blank (yaml-cpp quotes less)."""
    if token.replace("\u2581", "").isalpha():
        return token
    return '"' + token.replace("\\", "\\\\").replace('"', '\\"') + '"'


def position_table(count: int, width: int) -> Array:
    """Return sin and cos of p / 10000^(i / (D/2 - 1)), sines first: Marian has D/2 - 1 where Vaswani et al. have
    D/2.
    """
    half = width // 2
    angles = np.arange(count)[:, None] * np.exp(np.arange(half) * -np.log(10000.0) / (half - 1))
    return np.concatenate([np.sin(angles), np.cos(angles)], 1).astype(np.float32)


def log_probabilities(options: dict[str, Any], arrays: dict[str, Array], source: list[int], target: list[int]) -> Array:
    """Return log p(next token) [target + 1, V] after each prefix of `target`; `source` ends with end-of-sentence."""
    own: dict[str, Any] = {name: array.astype(np.float64) for name, array in arrays.items()}
    width = options["dim-emb"]
    table = position_table(100, width).astype(np.float64)

    def norm(x: Any, name: str) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
        return scaled * own[name] + own[name.replace("_ln_scale", "_ln_bias")]

    def before(x: Any, name: str) -> Any:
        return norm(x, f"{name}_ln_scale_pre") if options["transformer-preprocess"] == "n" else x

    def after(branch: Any, x: Any, name: str) -> Any:
        return norm(branch + x, f"{name}_ln_scale") if options["transformer-postprocess"] == "dan" else branch + x

    def attention(x: Any, memory: Any, name: str, causal: bool) -> Any:
        queries = before(x, f"{name}_Wo")
        keys = queries if memory is None else memory
        heads = options["transformer-heads"]
        parts = [
            (rows @ own[f"{name}_W{part}"] + own[f"{name}_b{part}"]).reshape(len(rows), heads, -1).transpose(1, 0, 2)
            for part, rows in (("q", queries), ("k", keys), ("v", keys))
        ]
        scores = parts[0] @ parts[1].transpose(0, 2, 1) / np.sqrt(width / heads)
        if causal:
            scores = scores + np.triu(np.full(scores.shape[1:], -1e9), 1)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        joined = (weights @ parts[2]).transpose(1, 0, 2).reshape(len(x), width)
        return after(joined @ own[f"{name}_Wo"] + own[f"{name}_bo"], x, f"{name}_Wo")

    def network(x: Any, name: str) -> Any:
        inner = before(x, f"{name}_ffn") @ own[f"{name}_W1"] + own[f"{name}_b1"]
        inner = (
            np.maximum(inner, 0) if options["transformer-ffn-activation"] == "relu" else inner / (1 + np.exp(-inner))
        )
        return after(inner @ own[f"{name}_W2"] + own[f"{name}_b2"], x, f"{name}_ffn")

    def top(x: Any, name: str) -> Any:
        return norm(x, f"{name}_top_ln_scale") if options["transformer-postprocess-top"] == "n" else x

    def embedded(rows: Any) -> Any:
        return rows * np.sqrt(width) + table[: len(rows)]

    memory = embedded(own.get("Wemb", own.get("encoder_Wemb"))[source])
    for layer in range(1, options["enc-depth"] + 1):
        memory = attention(memory, None, f"encoder_l{layer}_self", False)
        memory = network(memory, f"encoder_l{layer}_ffn")
    memory = top(memory, "encoder")
    words = own.get("Wemb", own.get("decoder_Wemb"))
    hidden = embedded(np.concatenate([np.zeros((1, width)), words[target]]))
    for layer in range(1, options["dec-depth"] + 1):
        hidden = attention(hidden, None, f"decoder_l{layer}_self", True)
        hidden = attention(hidden, memory, f"decoder_l{layer}_context", False)
        hidden = network(hidden, f"decoder_l{layer}_ffn")
    hidden = top(hidden, "decoder")
    logits = hidden @ own.get("decoder_ff_logit_out_Wt", words).T + own.get("decoder_ff_logit_out_b", 0.0)
    largest = logits.max(-1, keepdims=True)
    return np.asarray(logits - largest - np.log(np.exp(logits - largest).sum(-1, keepdims=True)), np.float32)
