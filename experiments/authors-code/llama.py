"""GPAS and value residuals: the authors' LLaMAs and our stacks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from checkouts import Checkouts, as_precise_as
from comparing import Case, Pair, encoded, encoder_of, matching, rows
from stacks import GATED, HEADS, INNER, LAYERS, ROTARY, D
from torch import Tensor, nn

from ziggurat.model.transformer import Encoder


def _llama(ours: Encoder, theirs: nn.Module) -> list[Pair]:
    """Return the pairs of linear maps and of the final norm of LLaMA's stack."""
    pairs = [*matching(ours.final_norm, theirs.norm)]
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        for number, name in enumerate(("q_proj", "k_proj", "v_proj")):
            if hasattr(other.self_attn, name):
                part = rows(number * D, (number + 1) * D)
                pairs.append(Pair(mine.self_attn.qkv_proj.weight, getattr(other.self_attn, name).weight, part))
        pairs.append(Pair(mine.self_attn.out_proj.weight, other.self_attn.o_proj.weight))
        pairs.append(Pair(mine.ffn.in_proj.weight, other.mlp.gate_proj.weight, rows(0, INNER)))
        pairs.append(Pair(mine.ffn.in_proj.weight, other.mlp.up_proj.weight, rows(INNER, 2 * INNER)))
        pairs.append(Pair(mine.ffn.out_proj.weight, other.mlp.down_proj.weight))
    return pairs


def _llama_config() -> Any:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=8,
        hidden_size=D,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        attn_implementation="eager",
        use_cache=False,
    )
    config.rope_theta = 10000.0  # the place where the authors' versions of transformers expect it
    return config


# Their NORM_TYPE -> our `residual`, and the names in theirs of the norms of attention and the feed-forward network.
_PRE = (("in_norm", "input_layernorm"),), (("in_norm", "post_attention_layernorm"),)
_POST = (("out_norm", "post_attention_layernorm"),), (("out_norm", "post_feedforward_layernorm"),)
_SANDWICH = (
    (("in_norm", "input_layernorm"), ("branch_norm", "post_attention_layernorm")),
    (("in_norm", "pre_feedforward_layernorm"), ("branch_norm", "post_feedforward_layernorm")),
)
_KINDS = {
    "pre": ("pre", _PRE),
    "sandwich": ("sandwich", _SANDWICH),
    "lns": ("ln_scaling", _PRE),
    "deeppost": ("deepnorm", _POST),
    "post_pre": ("pre", _PRE),
}
_POST_LAYERS = 2


def gpas(checkouts: Checkouts, dtype: torch.dtype) -> Iterator[Case]:
    """GPAS: every kind of layer that the authors gate, with and without gates."""
    code = checkouts.package("GPAS", "peft_pretraining.modeling_llama")
    for kind in _KINDS:
        # The published file has `lns` only in the gated form: without gates its layers return their input.
        for gated in (True,) if kind == "lns" else (False, True):
            yield _gpas(code, kind, gated, dtype)


def _gpas(code: Any, kind: str, gated: bool, dtype: torch.dtype) -> Case:
    residual, norms = _KINDS[kind]
    variables = {"NORM_TYPE": kind + "_gpas" * gated, "POST_NUM": str(_POST_LAYERS)}
    with as_precise_as(dtype), mock.patch.dict(os.environ, variables):
        theirs = code.LlamaModel(_llama_config())
    ranges = {"ranges": [{"layers": _POST_LAYERS, "residual": "post"}]} if kind == "post_pre" else {}
    ours = encoder_of(LAYERS, dtype, **GATED, **ROTARY, residual=residual, encoder=ranges, wiring={"gpas": gated})
    if kind == "deeppost":
        # LLaMA normalises the output of any stack; ours of this kind ends with the norm of its last sub-layer.
        ours.final_norm = nn.RMSNorm(D, eps=1e-5, dtype=dtype)
    pairs = _llama(ours, theirs)
    for number, (mine, other) in enumerate(zip(ours.layers, theirs.layers, strict=True), start=1):
        its_norms = _POST if kind == "post_pre" and number <= _POST_LAYERS else norms
        for joined, slots in zip((mine.self_attn_residual, mine.ffn_residual), its_norms, strict=True):
            if kind == "deeppost":
                joined.skip = other.alpha  # theirs is for a decoder alone, ours for an encoder with a decoder
            for slot, name in slots:
                norm = getattr(joined, slot)
                if kind == "lns":  # theirs has 1/sqrt(l) in the initial gain, ours as a separate factor
                    pairs.append(Pair(norm.norm.weight, getattr(other, name).weight, factor=number**0.5))
                else:
                    pairs += matching(norm, getattr(other, name))
        if gated:
            pairs.append(Pair(mine.ffn_residual.gate, other.gpas_block.gate, lambda values: values[0]))

    def run(x: Tensor) -> Tensor:
        with mock.patch.dict(os.environ, variables):  # it is read in every pass
            return theirs(inputs_embeds=x, use_cache=False, return_dict=False)[0]

    return Case(
        f"gpas-{kind.replace('_', '-')}" if gated else f"gpas-baseline-{kind.replace('_', '-')}",
        f"`residual: {residual}`{', lowest 2 layers `post`' * (kind == 'post_pre')}{', gates' * gated}, stack of 6",
        "GPAS",
        "peft_pretraining/modeling_llama.py",
        ours,
        theirs,
        pairs,
        partial(encoded, ours, causal=True),
        run,
        D,
        fixed=[theirs.embed_tokens.weight],
    )


def value_residual(checkouts: Checkouts, dtype: torch.dtype) -> Iterator[Case]:
    """ResFormer and SVFormer, whole stacks."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # transformers 5 no longer has plain rotation in this table.
    plain = {"default": lambda *_, **__: (10000.0 ** (-torch.arange(0, D // HEADS, 2).float() * HEADS / D), 1.0)}
    for name, kind in (("resformer", "half"), ("svformer", "single")):
        path = f"src/modeling/modeling_llama_{name}.py"
        code = checkouts.file(f"Value-Residual-Learning/{path}")
        with as_precise_as(dtype), mock.patch.dict(ROPE_INIT_FUNCTIONS, plain):
            theirs = code.LlamaModel(_llama_config())
        ours = encoder_of(LAYERS, dtype, **GATED, **ROTARY, attention={"value_residual": kind})
        pairs = _llama(ours, theirs)
        for mine, other in zip(ours.layers, theirs.layers, strict=True):
            pairs += matching(mine.self_attn_residual.in_norm, other.input_layernorm)
            pairs += matching(mine.ffn_residual.in_norm, other.post_attention_layernorm)
        yield Case(
            name,
            f"`attention.value_residual: {kind}`, stack of 6",
            "Value-Residual-Learning",
            path,
            ours,
            theirs,
            pairs,
            partial(encoded, ours, causal=True),
            lambda x, model=theirs: model(inputs_embeds=x, use_cache=False, return_dict=False)[0],
            D,
            fixed=[theirs.embed_tokens.weight],
        )
