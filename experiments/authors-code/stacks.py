"""SiameseNorm and HybridNorm: the authors' vision transformer and OLMo, and our stacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from checkouts import Checkouts, TwoMaps, as_precise_as
from comparing import Case, Pair, encoded, encoder_of, matching, rows
from torch import Tensor, nn

D, HEADS, INNER, LAYERS = 32, 4, 64, 6
GATED = {"d_model": D, "d_ff": 96, "heads": HEADS, "activation": "swiglu", "norm": "rms", "layer_norm_epsilon": 1e-5}
ROTARY = {"embedding": {"positions": "rotary"}}


def siamese(checkouts: Checkouts, dtype: torch.dtype) -> Iterator[Case]:
    """SiameseNorm: the whole vision transformer except patches and classes."""
    path = "deit-model-siamesenorm.py"
    code = checkouts.file(f"SiameseNorm/{path}")
    code.Mlp = TwoMaps
    with as_precise_as(dtype):
        theirs = code.VisionTransformer(
            embed_layer=_Patches, embed_dim=D, depth=LAYERS, num_heads=HEADS, mlp_ratio=2, num_classes=0
        )
    ours = encoder_of(
        LAYERS,
        dtype,
        d_model=D,
        d_ff=INNER,
        heads=HEADS,
        activation="gelu",
        layer_norm_epsilon=1e-6,
        residual="siamese",
    )
    pairs: list[Pair] = []
    for mine, other in zip(ours.layers, theirs.blocks, strict=True):
        pairs += matching(mine.self_attn.qkv_proj, other.attn.qkv)
        pairs += matching(mine.self_attn.out_proj, other.attn.proj)
        pairs += [*matching(mine.ffn.in_proj, other.mlp.fc1), *matching(mine.ffn.out_proj, other.mlp.fc2)]
        for number, residual in enumerate((mine.self_attn_residual, mine.ffn_residual), start=1):
            pairs += matching(residual.x_norm, getattr(other, f"post_norm{number}"))
            pairs += matching(residual.y_norm, getattr(other, f"pre_norm{number}"))
            pairs += matching(residual.in_norm, getattr(other, f"input_norm{number}"))
    assert ours.end is not None
    pairs += [*matching(ours.end.x_norm, theirs.pre_norm), *matching(ours.end.y_norm, theirs.post_norm)]
    pairs += matching(ours.final_norm, theirs.final_norm)
    yield Case(
        "siamese",
        "`residual: siamese`, stack of 6, to the final norm",
        "SiameseNorm",
        path,
        ours,
        theirs,
        pairs,
        lambda x: encoded(ours, torch.cat([theirs.cls_token.detach().expand(len(x), 1, D), x], 1), causal=False),
        lambda x: given_by(theirs.final_norm, lambda: theirs.forward_features(x)),
        D,
        fixed=[theirs.cls_token, theirs.pos_embed],
    )


class _Patches(nn.Module):
    """A replacement for the embedding of patches that returns its input."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.num_patches = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`."""
        return x


def given_by(module: nn.Module, run: Callable[[], Any]) -> Tensor:
    """Return the output of `module` while `run` runs."""
    given: list[Tensor] = []
    hook = module.register_forward_hook(lambda module, inputs, y: given.append(y))
    run()
    hook.remove()
    return given[0]


def hybrid(checkouts: Checkouts, dtype: torch.dtype) -> Iterator[Case]:
    """HybridNorm and its starred form, whose first layer is pre-norm but keeps the norms of attention."""
    code = checkouts.package("HybridNorm/dense_model", "olmo.model")
    for star in (False, True):
        yield _hybrid(code, star, dtype)


def _hybrid(code: Any, star: bool, dtype: torch.dtype) -> Case:
    # The published configuration (configs/exps/1.2B-dense-HybriedNorm.yaml) except sizes, groups of heads and theta.
    choices = {
        **dict.fromkeys(("use_query_norm", "use_key_norm", "use_value_norm", "ffn_norm"), True),
        **dict.fromkeys(("attn_norm", "attn_residual_after_norm", "flash_attention", "include_bias"), False),
        **{"ffn_residual_after_norm": True, "block_type": "sequential", "bias_for_layer_norm": False},
        **{"layer_norm_type": "rms", "layer_norm_eps": 1e-5, "activation_type": "swiglu", "rope": True},
        **{"weight_tying": True, "attention_layer_norm_with_affine": True, "init_device": "cpu"},
        **{"d_model": D, "n_heads": HEADS, "n_layers": LAYERS, "mlp_hidden_size": 2 * INNER, "vocab_size": 8},
        **{"max_sequence_length": 64, "embedding_size": 8, "rope_theta": 10000},
        **{"attention_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    }
    if star:
        choices["norm_pos_special_config"] = "_{0:{'attn_norm':True,'ffn_residual':False}}_"
    with as_precise_as(dtype):
        theirs = code.OLMo(code.ModelConfig(**choices))
    ranges = {"ranges": [{"layers": 1, "residual": "pre"}]} if star else {}
    norms = {"qk_norm": "rms", "value_norm": "rms"}
    ours = encoder_of(LAYERS, dtype, **GATED, **ROTARY, residual="hybrid", attention=norms, encoder=ranges)
    pairs = [*matching(ours.final_norm, theirs.transformer.ln_f)]
    for mine, other in zip(ours.layers, theirs.transformer.blocks, strict=True):
        pairs.append(Pair(mine.self_attn.qkv_proj.weight, other.att_proj.weight))
        pairs.append(Pair(mine.self_attn.out_proj.weight, other.attn_out.weight))
        inside = mine.ffn.in_proj.weight, other.ff_proj.weight  # theirs has the gate in the lower half
        pairs.append(Pair(*inside, rows(INNER, 2 * INNER), rows(0, INNER)))
        pairs.append(Pair(*inside, rows(0, INNER), rows(INNER, 2 * INNER)))
        pairs.append(Pair(mine.ffn.out_proj.weight, other.ff_out.weight))
        for part, name in (("query_norm", "q_norm"), ("key_norm", "k_norm"), ("value_norm", "v_norm")):
            pairs += matching(getattr(mine.self_attn.scaling, part), getattr(other, name))
        pairs += matching(mine.ffn_residual.in_norm, other.ff_norm)
        if other.attn_norm is not None:
            pairs += matching(mine.self_attn_residual.in_norm, other.attn_norm)

    def run(x: Tensor) -> Tensor:
        ids = torch.zeros(x.shape[:2], dtype=torch.long)
        return theirs(ids, input_embeddings=x, output_hidden_states=True).hidden_states[-1]

    return Case(
        "hybrid-star" if star else "hybrid",
        f"`residual: hybrid`, `qk_norm` and `value_norm: rms`{', first layer `pre`' * star}, stack of 6",
        "HybridNorm",
        "dense_model/olmo/model.py",
        ours,
        theirs,
        pairs,
        partial(encoded, ours, causal=True),
        run,
        D,
        fixed=[theirs.transformer.wte.weight],
    )
