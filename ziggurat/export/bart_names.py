"""The parameter names that fairseq, and the BART family of transformers after it, give to a layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from ziggurat.errors import ExportError
from ziggurat.export.anatomy import Affine, Attention, Layer

__all__ = ["layer_from", "layer_names", "take"]

_MAPS = (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value"), ("out_proj", "out"))


def layer_names(layer: Layer) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a layer by those names; a missing bias is one of zeros, as the classes have biases."""
    attentions = [("self_attn", layer.self_attn)]
    if layer.cross_attn is not None:
        attentions.append(("encoder_attn", layer.cross_attn))
    for name, attention in attentions:
        for theirs, ours in _MAPS:
            yield from _affine(f"{name}.{theirs}", getattr(attention, ours))
        yield from _affine(f"{name}_layer_norm", attention.norm)
    yield from _affine("fc1", layer.ffn_in)
    yield from _affine("fc2", layer.ffn_out)
    yield from _affine("final_layer_norm", layer.ffn_norm)


def layer_from(tensors: Mapping[str, Tensor], prefix: str, *, decoder: bool) -> Layer:
    """Return the layer whose parameters begin with `prefix`. Raises ExportError: a parameter is missing."""
    attentions = []
    for name in ("self_attn", "encoder_attn")[: 1 + decoder]:
        query, key, value, out = (take(tensors, f"{prefix}.{name}.{theirs}") for theirs, _ in _MAPS)
        attentions.append(Attention(query, key, value, out, take(tensors, f"{prefix}.{name}_layer_norm")))
    return Layer(
        attentions[0],
        attentions[1] if decoder else None,
        take(tensors, f"{prefix}.fc1"),
        take(tensors, f"{prefix}.fc2"),
        take(tensors, f"{prefix}.final_layer_norm"),
    )


def take(tensors: Mapping[str, Tensor], name: str) -> Affine:
    """Return the map `name` in fp32. Raises ExportError: it is missing."""
    try:
        return Affine(tensors[f"{name}.weight"].float(), tensors[f"{name}.bias"].float())
    except KeyError as error:
        raise ExportError(f"the checkpoint has no parameter {error.args[0]}; is it a plain Transformer?") from None


def _affine(name: str, affine: Affine) -> Iterator[tuple[str, Tensor]]:
    yield f"{name}.weight", affine.weight
    bias = affine.bias if affine.bias is not None else affine.weight.new_zeros(affine.weight.shape[0])
    yield f"{name}.bias", bias
