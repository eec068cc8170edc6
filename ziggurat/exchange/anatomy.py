"""Matrices of a plain Transformer, independent of ziggurat's parameter names; every exporter reads them, every importer
builds them.

`dissect` takes a model's parameters apart and `compose` puts them together again. `with_epsilon` changes the epsilon of
a stack's norms without changing its output, for toolkits with a single epsilon for all norms or a fixed one.

Shapes: D width of a stack, F inner width, V vocabulary, P positions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ziggurat.config.kinds import ResidualKind
from ziggurat.config.model import ModelConfig
from ziggurat.model.embedding import sinusoids
from ziggurat.model.seq2seq import AlignmentHead
from ziggurat.system.errors import ExportError


@dataclass(frozen=True)
class Affine:
    """A linear map y = x W^T + b, or the gain W [D] and bias of a normalisation."""

    weight: Tensor
    bias: Tensor | None = None

    def named(self, name: str) -> dict[str, Tensor]:
        """Return weight and bias, if there is one, as the parameters of the module `name`."""
        weight = {f"{name}.weight": self.weight}
        return weight if self.bias is None else weight | {f"{name}.bias": self.bias}

    def times(self, factor: float, *, bias: bool = True) -> Affine:
        """Return the map with its weight, and its bias if `bias`, multiplied by `factor`."""
        b = self.bias * factor if bias and self.bias is not None else self.bias
        return Affine(self.weight * factor, b)

    @classmethod
    def joined(cls, *parts: Affine) -> Affine:
        """Return one map whose output is the outputs of all `parts`, concatenated."""
        biases = [part.bias for part in parts if part.bias is not None]
        return cls(torch.cat([part.weight for part in parts]), torch.cat(biases) if biases else None)


@dataclass(frozen=True)
class AttentionMatrices:
    """The four maps of an attention, the norms of its sub-layer, and the tables of relative positions.

    `norms` are in the order in which a forward pass meets them; a plain stack has one per sub-layer.
    """

    query: Affine
    key: Affine
    value: Affine
    out: Affine
    norms: tuple[Affine, ...]
    key_table: Tensor | None = None
    value_table: Tensor | None = None

    @property
    def norm(self) -> Affine:
        """The norm of a sub-layer with a single norm."""
        (norm,) = self.norms
        return norm


@dataclass(frozen=True)
class CellMatrices:
    """The two maps of an SSRU, which takes the place of a decoder's self-attention, and the norms of its sub-layer."""

    value: Affine
    gate: Affine
    norms: tuple[Affine, ...]


@dataclass(frozen=True)
class LayerMatrices:
    """Matrices of a layer: self-attention or SSRU, cross-attention (in a decoder), feed-forward network, norms.

    In a gated network the non-linearity is applied to the output of `gate`, not to that of `ffn_in`. `ffn_between` are
    maps between `ffn_in` and `ffn_out`, each followed by the non-linearity; a plain Transformer has none.
    """

    own: AttentionMatrices | CellMatrices
    cross_attn: AttentionMatrices | None
    ffn_in: Affine
    ffn_out: Affine
    ffn_norms: tuple[Affine, ...]
    gate: Affine | None = None
    ffn_between: tuple[Affine, ...] = ()

    @property
    def self_attn(self) -> AttentionMatrices:
        """Self-attention, which every layer of a plain Transformer has."""
        assert isinstance(self.own, AttentionMatrices)
        return self.own

    @property
    def ffn_norm(self) -> Affine:
        """The norm of a feed-forward network with a single norm."""
        (norm,) = self.ffn_norms
        return norm


@dataclass(frozen=True)
class StackMatrices:
    """Encoder or decoder: input(token, position) = scale * embedding[token] + positions[position].

    Attributes:
        residual: how sub-layers join the stream; exports support `pre` and `post`, imports all of SLOTS.
        heads: heads of every attention.
        epsilon: epsilon of the norms.
        layers: the layers, bottom first.
        final_norm: norm of the stack's output, or None.
        embedding: [V, D].
        scale: factor of the embedding.
        positions: [P, D], including a vector that is added to every embedding; None if nothing is added.
        zero_start: the embedding of the first input counts as 0.
        entry_norm: norm of the stack's input, or None.
    """

    residual: ResidualKind
    heads: int
    epsilon: float
    layers: tuple[LayerMatrices, ...]
    final_norm: Affine | None
    embedding: Tensor
    scale: float
    positions: Tensor | None
    zero_start: bool = False
    entry_norm: Affine | None = None

    @property
    def pre_norm(self) -> bool:
        """True if norms are at the inputs of sub-layers."""
        return self.residual == "pre"

    def position_table(self, count: int) -> Tensor:
        """Return the vectors added to the embeddings, [P, D]; zeros [count, D] if nothing is added."""
        return self.embedding.new_zeros(count, self.embedding.shape[1]) if self.positions is None else self.positions


SLOTS: dict[ResidualKind, tuple[str, ...]] = {
    "post": ("out_norm",),
    "pre": ("in_norm",),
    "no_norm": (),
    "res_post": ("branch_norm",),
    "sandwich": ("in_norm", "branch_norm"),
    "peri": ("in_norm", "branch_norm"),
}
"""SLOTS are the names of the norms of a sub-layer, in the order of `norms`."""


@dataclass(frozen=True)
class Anatomy:
    """A plain Transformer: two stacks and the output projection, with or without bias."""

    encoder: StackMatrices
    decoder: StackMatrices
    output: Affine
    activation: str
    norm: str


def dissect(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    positions: int,
    entries: Mapping[str, Tensor] | None = None,
) -> Anatomy:
    """Return the matrices of a model with residuals `post` or `pre`, history `latest`, and full or relative attention.

    Its decoder may have an SSRU in place of self-attention.

    Args:
        config: the model's configuration.
        tensors: its parameters by name.
        positions: number of sinusoidal positions in the tables.
        entries: for each stack, a factor [D] by which its input is multiplied.
    """
    stacks = [_stack(config, tensors, decoder, positions) for decoder in (False, True)]
    # Without a separate output matrix the model uses the decoder's embedding.
    weight = tensors.get("output.weight")
    if weight is None:
        weight = stacks[1].embedding
    output = Affine(weight, tensors.get("output.bias"))
    factors = entries or {}
    encoder, decoder = _entered(stacks[0], factors.get("encoder")), _entered(stacks[1], factors.get("decoder"))
    return Anatomy(encoder, decoder, output, config.activation, config.norm)


def with_usual_parts(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with a gain per channel in place of ScaleNorm's length, and embeddings of unit length."""
    found = dict(tensors)
    for name in [name for name in found if name.endswith(".length")]:
        width = config.encoder_width if name.startswith("encoder.") else config.d_model
        found[name.replace(".length", ".weight")] = found.pop(name).expand(width) / width**0.5
    tables = ("source_embedding.tokens.weight", "target_embedding.tokens.weight", "output.weight")
    for name in found.keys() & tables if config.embedding.unit_length else ():
        found[name] = F.normalize(found[name], dim=-1)
    return found


def _entered(stack: StackMatrices, factor: Tensor | None) -> StackMatrices:
    """Return the stack with its input multiplied by `factor` [D]."""
    if factor is None:
        return stack
    positions = None if stack.positions is None else stack.positions * factor
    return dataclasses.replace(stack, embedding=stack.embedding * factor, positions=positions)


def _affine(tensors: Mapping[str, Tensor], name: str) -> Affine:
    return Affine(tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))


def _parts(whole: Affine, count: int) -> list[Affine]:
    weights = whole.weight.chunk(count)
    biases = [None] * count if whole.bias is None else whole.bias.chunk(count)
    return [Affine(weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def _stack(config: ModelConfig, tensors: Mapping[str, Tensor], decoder: bool, positions: int) -> StackMatrices:
    name, side = ("decoder", "target") if decoder else ("encoder", "source")
    stack = config.decoder if decoder else config.encoder
    # A side without its own table uses the source's.
    embedding = tensors.get(f"{side}_embedding.tokens.weight")
    if embedding is None:
        embedding = tensors["source_embedding.tokens.weight"]
    residual = config.decoder_residual if decoder else config.encoder_residual
    zero_start = decoder and config.embedding.zero_start
    return StackMatrices(
        residual=residual,
        heads=config.heads if decoder else config.encoder_heads,
        epsilon=stack.layer_norm_epsilon or config.layer_norm_epsilon,
        layers=tuple(_layer(config, tensors, f"{name}.layers.{i}", decoder, residual) for i in range(stack.layers)),
        final_norm=_affine(tensors, f"{name}.final_norm") if f"{name}.final_norm.weight" in tensors else None,
        embedding=embedding,
        scale=math.sqrt(embedding.shape[1]) if config.embedding.scale else 1.0,
        positions=_positions(config, tensors, side, embedding.shape[1], positions, zero_start),
        zero_start=zero_start,
    )


def _positions(
    config: ModelConfig, tensors: Mapping[str, Tensor], side: str, width: int, count: int, zero_start: bool
) -> Tensor | None:
    """Return the sum [P, D] that is added to the embeddings: positions and the vector shared by both sides."""
    table: Tensor | None = None
    if config.embedding.positions == "sinusoidal":
        # Computed in fp64 and rounded once, as in the model.
        table = sinusoids(count, width).float()
    elif config.embedding.positions == "learned":
        table = tensors[f"{side}_embedding.positions.weight"]
    bias = tensors.get("source_embedding.bias")
    if bias is None:
        return table
    table = torch.zeros(count, width) if table is None else table
    summed = table + bias
    if zero_start:  # the first input is not an embedding, so the vector is not added to it
        summed[0] = table[0]
    return summed


def _layer(
    config: ModelConfig, tensors: Mapping[str, Tensor], name: str, decoder: bool, residual: ResidualKind
) -> LayerMatrices:
    (norm,) = SLOTS[residual]
    own: AttentionMatrices | CellMatrices
    norms = (_affine(tensors, f"{name}.self_attn_residual.{norm}"),)
    if f"{name}.self_attn.gate_proj.weight" in tensors:
        own = CellMatrices(
            _affine(tensors, f"{name}.self_attn.v_proj"), _affine(tensors, f"{name}.self_attn.gate_proj"), norms
        )
    else:
        # One product computes queries, keys and values; other toolkits keep three matrices.
        query, key, value = _parts(_affine(tensors, f"{name}.self_attn.qkv_proj"), 3)
        own = AttentionMatrices(
            query,
            key,
            value,
            _affine(tensors, f"{name}.self_attn.out_proj"),
            norms,
            tensors.get(f"{name}.self_attn.key_table"),
            tensors.get(f"{name}.self_attn.value_table"),
        )
    cross_attn = None
    if decoder:
        key, value = _parts(_affine(tensors, f"{name}.cross_attn.kv_proj"), 2)
        cross_attn = AttentionMatrices(
            _affine(tensors, f"{name}.cross_attn.q_proj"),
            key,
            value,
            _affine(tensors, f"{name}.cross_attn.out_proj"),
            (_affine(tensors, f"{name}.cross_attn_residual.{norm}"),),
        )
    ffn_in, gate = _affine(tensors, f"{name}.ffn.in_proj"), None
    if config.activation == "swiglu":
        # The rows of the gate come first (ziggurat.model.linear).
        gate, ffn_in = _parts(ffn_in, 2)
    return LayerMatrices(
        own,
        cross_attn,
        ffn_in,
        _affine(tensors, f"{name}.ffn.out_proj"),
        (_affine(tensors, f"{name}.ffn_residual.{norm}"),),
        gate,
    )


def compose(anatomy: Anatomy) -> dict[str, Tensor]:
    """Return the parameters, by ziggurat's names, of a model with learned positions.

    The inverse of `dissect` for `embedding: {positions: learned}`; embedding matrices that are the same tensor are
    shared (`sharing: decoder` or `all`).
    """
    tensors = anatomy.output.named("output")
    if anatomy.output.weight is anatomy.decoder.embedding:
        del tensors["output.weight"]
    for name, side, stack in (("encoder", "source", anatomy.encoder), ("decoder", "target", anatomy.decoder)):
        if side == "source" or stack.embedding is not anatomy.encoder.embedding:
            tensors[f"{side}_embedding.tokens.weight"] = stack.embedding
        if stack.positions is not None:
            tensors[f"{side}_embedding.positions.weight"] = stack.positions
        for end, norm in (("entry_norm", stack.entry_norm), ("final_norm", stack.final_norm)):
            if norm is not None:
                tensors |= norm.named(f"{name}.{end}")
        for number, layer in enumerate(stack.layers):
            tensors |= _composed(layer, f"{name}.layers.{number}", SLOTS[stack.residual])
    return tensors


def _composed(layer: LayerMatrices, at: str, slots: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the parameters of the layer `at`, whose sub-layers have norms in `slots`."""
    own, cross = layer.own, layer.cross_attn
    if isinstance(own, CellMatrices):
        tensors = own.value.named(f"{at}.self_attn.v_proj") | own.gate.named(f"{at}.self_attn.gate_proj")
    else:
        tensors = Affine.joined(own.query, own.key, own.value).named(f"{at}.self_attn.qkv_proj")
        tensors |= own.out.named(f"{at}.self_attn.out_proj")
    norms = {"self_attn": own.norms, "ffn": layer.ffn_norms}
    if cross is not None:
        tensors |= cross.query.named(f"{at}.cross_attn.q_proj")
        tensors |= Affine.joined(cross.key, cross.value).named(f"{at}.cross_attn.kv_proj")
        tensors |= cross.out.named(f"{at}.cross_attn.out_proj")
        norms["cross_attn"] = cross.norms
    tensors |= layer.ffn_in.named(f"{at}.ffn.in_proj")
    for number, inner in enumerate(layer.ffn_between):
        tensors |= inner.named(f"{at}.ffn.between.{number}")
    tensors |= layer.ffn_out.named(f"{at}.ffn.out_proj")
    for sublayer, its in norms.items():
        for slot, norm in zip(slots, its, strict=True):
            tensors |= norm.named(f"{at}.{sublayer}_residual.{slot}")
    return tensors


def with_head_first(stack: StackMatrices, aligned: AlignmentHead) -> StackMatrices:
    """Return a decoder that computes the same, with the alignment head moved to the first head of its layer."""
    if not aligned.head:
        return stack
    number = aligned.layer % len(stack.layers)
    cross = stack.layers[number].cross_attn
    assert cross is not None
    order = [aligned.head, *(head for head in range(stack.heads) if head != aligned.head)]
    width = cross.query.weight.shape[0]
    rows = torch.arange(width).view(stack.heads, -1)[order].flatten()

    def moved(affine: Affine) -> Affine:
        return Affine(affine.weight[rows], None if affine.bias is None else affine.bias[rows])

    cross = dataclasses.replace(
        cross,
        query=moved(cross.query),
        key=moved(cross.key),
        value=moved(cross.value),
        out=Affine(cross.out.weight[:, rows], cross.out.bias),
    )
    layers = list(stack.layers)
    layers[number] = dataclasses.replace(layers[number], cross_attn=cross)
    return dataclasses.replace(stack, layers=tuple(layers))


def with_epsilon(stack: StackMatrices, epsilon: float) -> StackMatrices:
    """Return a stack that computes the same with a different epsilon in its norms.

    LN_e(y) = LN_{c^2 e}(c y), so the whole stream is multiplied by c = sqrt(epsilon / e): its input (embeddings,
    positions) and the outputs of sub-layers. Post-norm: all norms but the last also multiply by c, and the maps that
    read them divide by c. Pre-norm: the norms themselves remove c.
    """
    # c goes into the factor `scale`, not into the table, which may be shared with the output.
    c = math.sqrt(epsilon / stack.epsilon)
    if epsilon == stack.epsilon:
        return stack
    last = len(stack.layers) - 1
    layers = tuple(_scaled(layer, c, stack.pre_norm, number == last) for number, layer in enumerate(stack.layers))
    positions = None if stack.positions is None else stack.positions * c
    return dataclasses.replace(
        stack,
        epsilon=epsilon,
        layers=layers,
        scale=stack.scale * c,
        positions=positions,
    )


def _scaled(layer: LayerMatrices, c: float, pre_norm: bool, last: bool) -> LayerMatrices:
    """Return the layer for a stream that is c times as large."""
    # A map that reads a stream c times as large divides its weight by c; its bias is added afterwards and stays. The
    # last layer's outer norm restores the scale, so that the stack's readers, including cross-attention's keys, stay
    # unchanged.
    read = 1.0 if pre_norm else 1 / c
    inner_norm = 1.0 if pre_norm else c
    outer_norm = 1.0 if pre_norm or last else c
    self_attn, cross_attn = layer.self_attn, layer.cross_attn
    self_attn = dataclasses.replace(
        self_attn,
        query=self_attn.query.times(read, bias=False),
        key=self_attn.key.times(read, bias=False),
        value=self_attn.value.times(read, bias=False),
        out=self_attn.out.times(c),
        norms=(self_attn.norm.times(inner_norm),),
    )
    if cross_attn is not None:
        cross_attn = dataclasses.replace(
            cross_attn,
            query=cross_attn.query.times(read, bias=False),
            out=cross_attn.out.times(c),
            norms=(cross_attn.norm.times(inner_norm),),
        )
    return LayerMatrices(
        self_attn,
        cross_attn,
        layer.ffn_in.times(read, bias=False),
        layer.ffn_out.times(c),
        (layer.ffn_norm.times(outer_norm),),
        None if layer.gate is None else layer.gate.times(read, bias=False),
    )


def one_of(tensor: Tensor, other: Tensor) -> Tensor:
    """Return `tensor` if it differs from `other`, otherwise `other` itself: equal matrices become one shared matrix."""
    return other if tensor.shape == other.shape and bool(torch.equal(tensor, other)) else tensor


def width_of(embedding: Tensor, name: str) -> int:
    """Return the width of an embedding [rows, width]. Raises ExportError if it is not a matrix."""
    if embedding.ndim != 2 or 0 in embedding.shape:
        raise ExportError(f"{name} has shape {list(embedding.shape)}; is it a plain Transformer?")
    return int(embedding.shape[1])
