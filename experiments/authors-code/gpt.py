"""CompleteP: the authors' GPT-2 and our stack, from the embedded input to the logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from checkouts import Checkouts, as_precise_as
from comparing import Case, Pair, config_of, encoded, matching, model_of
from torch import Tensor, nn

from ziggurat.config import ModelConfig
from ziggurat.model.seq2seq import Seq2Seq

PATH = "nanoGPT-mup/model.py"
BASE_WIDTH, BASE_LAYERS, D_HEAD = 16, 2, 8
VOCABULARY = 8


def gpt(code: Any, width: int, depth: int, exponent: float) -> Any:
    """Return their model, wider and deeper than the base by these factors, configured as in their scripts.

    One flag differs: their scale of attention is 1/d_head, and the flag switches to ours, 1/sqrt(d_head). Heads are as
    wide as the base's, so the two differ by a constant.
    """
    scaled = {"mup_enabled": True, "depth_alpha_enabled": True, "depth_alpha_exp": exponent}
    d = BASE_WIDTH * width
    config = code.GPTConfig(
        **scaled,
        mup_width_multiplier=width,
        depth_multiplier=depth,
        mup_disable_attention_scaling=True,
        n_layer=BASE_LAYERS * depth,
        n_head=d // D_HEAD,
        n_embd=d,
        block_size=64,
        vocab_size=VOCABULARY,
    )
    return code.GPT(config)


def completep_config(width: int, depth: int, exponent: float) -> ModelConfig:
    """Return our model of that size. Its encoder corresponds to their decoder."""
    d = BASE_WIDTH * width
    base = {"width": BASE_WIDTH, "encoder_layers": BASE_LAYERS, "decoder_layers": 1, "exponent": exponent}
    sizes = {"d_model": d, "d_ff": 4 * d, "heads": d // D_HEAD, "activation": "gelu", "transfer": base}
    return config_of(BASE_LAYERS * depth, **sizes, embedding={"sharing": "none", "positions": "none"})


def transfer(checkouts: Checkouts, dtype: torch.dtype) -> Iterator[Case]:
    """CompleteP and depth-muP."""
    code = checkouts.file(PATH)
    for exponent in (1.0, 0.5):
        yield transfer_case(code, model_of(completep_config(2, 3, exponent), dtype), exponent, dtype)


def transfer_case(code: Any, model: Seq2Seq, exponent: float, dtype: torch.dtype) -> Case:
    """Return the comparison of `model`, twice as wide and 3 times as deep as the base, with theirs."""
    with as_precise_as(dtype):
        theirs = gpt(code, 2, 3, exponent)
    d = 2 * BASE_WIDTH
    end, output = model.decoder.final_norm, model.output
    assert end is not None
    pairs = [
        *matching(model.encoder.final_norm, theirs.transformer.ln_f),
        Pair(output.weight, theirs.lm_head.weight, factor=d**-0.5),  # ours is E / sqrt(d_model)
    ]
    for mine, other in zip(model.encoder.layers, theirs.transformer.h, strict=True):
        pairs += matching(mine.self_attn_residual.in_norm, other.ln_1)
        pairs += matching(mine.ffn_residual.in_norm, other.ln_2)
        pairs += matching(mine.self_attn.qkv_proj, other.attn.c_attn)
        pairs += matching(mine.self_attn.out_proj, other.attn.c_proj)
        pairs += [*matching(mine.ffn.in_proj, other.mlp.c_fc), *matching(mine.ffn.out_proj, other.mlp.c_proj)]

    def logits(x: Tensor) -> Tensor:
        # The encoder's norm replaces the decoder's, which differs only by its fixed factor.
        return output(encoded(model.encoder, x, causal=True) * end.factor.to(x.dtype)) * BASE_WIDTH**0.5

    def their_logits(x: Tensor) -> Tensor:
        hook = theirs.transformer.drop.register_forward_hook(lambda *_: x.clone())
        ids = torch.zeros(x.shape[:2], dtype=torch.long)
        found, _ = theirs(ids, targets=ids)  # without targets their code omits the factor for logits
        hook.remove()
        return found

    return Case(
        "transfer" if exponent == 1 else "transfer-half",
        f"`model.transfer`, `exponent: {exponent:g}`, m_N = 2, m_L = 3: from the embedded input to the logits",
        "nanoGPT-mup",
        "model.py",
        nn.ModuleList([model.encoder, output]),
        theirs,
        pairs,
        logits,
        their_logits,
        d,
        fixed=[theirs.transformer.wpe.weight],
    )
