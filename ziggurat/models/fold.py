"""Rewrites a deep model as a plain post-norm or pre-norm Transformer that computes the same (Liu et al. 2020)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ziggurat.config.model import DecoderAttentionKind, ModelConfig, ResidualKind, StackConfig
from ziggurat.errors import ConfigError
from ziggurat.nn.residual.deepnorm import deepnorm_constants

__all__ = ["NotPlainError", "fold"]


class NotPlainError(ConfigError):
    """No plain Transformer computes what the model does; `reasons` has every one."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__(f"not equal to any plain Transformer: {'; '.join(reasons)}")
        self.reasons = reasons


def fold(
    config: ModelConfig, tensors: Mapping[str, Tensor], entries: dict[str, Tensor] | None = None
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Return configuration and weights of a plain Transformer with the outputs of the given model in evaluation mode.

    Exact, whatever the weights (equal outputs up to rounding), are:

    - `admin` to `post`: omega_i, i >= 2, goes into gain and bias of the norm before sub-layer i, and 1/omega_i into
      the matrices by which that sub-layer reads the stream: queries, keys and values of self-attention, queries of
      cross-attention, W_1. That norm must be read by nobody else, and omega_1, which would scale the embedding, must
      be 1. Where all of a stack's omegas are one number, it is folded as DeepNorm's alpha instead.
    - `deepnorm` to `post`: LN_e(alpha x + f(x)) = LN_e'(x + f(x) / alpha) with e' = e / alpha^2, so 1/alpha goes into
      the maps by which sub-layers write. Encoder and decoder get a `layer_norm_epsilon` of their own, since their
      alphas differ. With one epsilon for both there is an error of the order of epsilon.
    - `layer_scale` to `pre`: lambda goes into the maps by which sub-layers write.

    `post` and `pre` stay as they are. The two stacks may be of different kinds; attention, histories and the rest of
    the configuration are kept. What the model would do in training is another matter: norms and matrices then learn
    at other speeds, and LayerDrop skips a layer with its omega.

    Args:
        config: of the model.
        tensors: its parameters by name (ziggurat.models.directory.weights); they are not changed.
        entries: gets, by stack, a factor [d_model] of its input (embedding and position) that the folded model needs,
            for formats that can hold one; omega_1 need not be 1 then. None: there is no place for such a factor.

    Raises NotPlainError with all reasons why this model cannot be folded.
    """
    folded, reasons = dict(tensors), list[str]()
    encoder, decoder = (_Stack(config, above, folded, reasons, entries).fold() for above in (False, True))
    if reasons:
        raise NotPlainError(reasons)
    values = config.model_dump()
    values["residual"] = decoder.kind
    values["encoder"] |= {"residual": encoder.kind if encoder.kind != decoder.kind else None}
    values["decoder"] |= {"residual": None}
    for name, stack in (("encoder", encoder), ("decoder", decoder)):
        if stack.epsilon is not None:
            values[name] |= {"layer_norm_epsilon": stack.epsilon}
    if config.init.kind == "admin":
        values["init"] |= {"kind": "xavier"}
    return ModelConfig.model_validate(values), folded


class _Folded(NamedTuple):
    """What became of a stack: its residual kind, and its epsilon if that is new."""

    kind: ResidualKind
    epsilon: float | None = None


class _Branch(NamedTuple):
    """A sub-layer by the names of its linear maps.

    Attributes:
        name: of the sub-layer in its layer.
        reads: maps that read the stream and nothing else; None: something that is no such map reads it.
        writes: maps whose sum is what the sub-layer gives; None: something else.
    """

    name: str
    reads: tuple[str, ...] | None
    writes: tuple[str, ...] | None


_FULL = ("qkv_proj",), ("out_proj",)
_OWN: dict[DecoderAttentionKind, tuple[tuple[str, ...] | None, tuple[str, ...] | None]] = {
    "full": _FULL,
    "relative": _FULL,
    "simplified_average": (("v_proj",), ("out_proj",)),
    "average": (None, None),  # averages and gates the stream itself
}
_MERGED: dict[DecoderAttentionKind, tuple[tuple[str, ...] | None, tuple[str, ...] | None]] = {
    "merged": (("cross.q_proj", "v_proj"), ("out_proj",)),
    "merged_full": (("own.qkv_proj", "cross.q_proj"), ("own.out_proj", "cross.out_proj")),
    "merged_gated": (None, None),
}


def _branches(config: ModelConfig, decoder: bool) -> list[_Branch]:
    """Return the sub-layers of a layer of one stack, in order."""
    ffn = _Branch("ffn", ("in_proj",), ("out_proj",))
    if not decoder:
        return [_Branch("self_attn", *_FULL), ffn]
    kind = config.decoder.attention
    if kind in _OWN:
        return [_Branch("self_attn", *_OWN[kind]), _Branch("cross_attn", ("q_proj",), ("out_proj",)), ffn]
    merged = _Branch("merged_attn", *_MERGED[kind])
    if kind == "merged" and config.attention.share_value:
        merged = merged._replace(reads=None)  # the value map reads the memory too
    return [merged, ffn]


class _Place(NamedTuple):
    """A sub-layer in its stack: `prefix` of its names, `norm` by whose output alone it is fed, or None."""

    prefix: str
    branch: _Branch
    norm: str | None


class _Stack:
    """One stack of a model, whose entries of `tensors` are replaced; what is in the way is added to `reasons`."""

    def __init__(
        self,
        config: ModelConfig,
        decoder: bool,
        tensors: dict[str, Tensor],
        reasons: list[str],
        entries: dict[str, Tensor] | None,
    ) -> None:
        self.config = config
        self.decoder = decoder
        self.tensors = tensors
        self.reasons = reasons
        self.entries = entries
        self.name = "decoder" if decoder else "encoder"
        self.stack: StackConfig = config.decoder if decoder else config.encoder
        self.kind = config.decoder_residual if decoder else config.encoder_residual

    def fold(self) -> _Folded:
        rules: dict[ResidualKind, Callable[[], _Folded]] = {
            "post": lambda: _Folded("post"),
            "pre": lambda: _Folded("pre"),
            "admin": self._admin,
            "deepnorm": self._deepnorm,
            "layer_scale": self._layer_scale,
        }
        if self.kind not in rules:
            self._refuse(f"`residual: {self.kind}` has no plain form; {', '.join(rules)} have")
            return _Folded(self.kind)
        return rules[self.kind]()

    def _refuse(self, reason: str) -> None:
        self.reasons.append(f"{self.name}: {reason}")

    def _places(self) -> Iterator[_Place]:
        """Yield the sub-layers from the bottom."""
        branches = _branches(self.config, self.decoder)
        split = self.config.combination.unit == "sublayer" and self.stack.history != "latest"
        below: str | None = None
        for layer in range(self.stack.layers):
            for number, branch in enumerate(branches):
                prefix = f"{self.name}.layers.{layer}.{branch.name}"
                norm = below
                if number == 0 or split:
                    norm = self._feeding(layer * len(branches) + number if split else layer, below)
                if number == 0 and not self.decoder and self.config.memory == "transparent":
                    norm = None  # the merges read it too
                yield _Place(prefix, branch, norm)
                below = f"{prefix}_residual.out_norm"

    def _feeding(self, unit: int, below: str | None) -> str | None:
        """Return the norm whose output unit `unit`, from 0, reads and nobody else; `below` is that of the one below."""
        options, row = self.config.combination, unit
        match self.stack.history:
            case "latest":
                return below
            case "blocks" if unit % options.period_of("blocks"):
                return below
            case "blocks":
                row = unit // options.period_of("blocks")
            case "top_only" | "depth_weighted":
                return None
        normed = options.norm in ("auto", "consumers") and (row > 0 or options.normalize_embedding)
        return f"{self.name}.history.norms.{row}" if normed else None

    def _admin(self) -> _Folded:
        omegas = [self.tensors.pop(f"{place.prefix}_residual.skip") for place in self._places()]
        everything = torch.stack(omegas)
        if not bool((omegas[0] == 1).all()) and bool((everything == omegas[0][0]).all()):
            return self._constant(float(omegas[0][0]))
        for place, omega in zip(self._places(), omegas, strict=True):
            if not bool((omega == 1).all()):
                self._move(place, omega)
        return _Folded("post")

    def _move(self, place: _Place, omega: Tensor) -> None:
        """Let the norm that feeds a sub-layer give omega times as much and the sub-layer's maps read 1/omega of it."""
        at_entry = self._is_entry(place)
        if place.norm is None and not at_entry:
            self._refuse(
                f"omega of {place.prefix} is not 1, and its input, an embedding or an output that others read too, "
                "cannot be scaled (`wiring.omega_trainable: false` with a profiled omega keeps the first at 1)"
            )
        elif place.branch.reads is None:
            self._refuse(f"omega of {place.prefix} is not 1, and not only linear maps read its input")
        elif not bool((omega.isfinite() & (omega != 0)).all()):
            self._refuse(f"omega of {place.prefix} is 0 or not finite in some channel")
        else:
            if place.norm is not None:
                for name in self._parameters(place.norm):
                    self.tensors[name] = self.tensors[name] * omega
            elif self.entries is not None:
                self.entries[self.name] = omega
            for name in place.branch.reads:
                matrix = f"{place.prefix}.{name}.weight"
                self.tensors[matrix] = self.tensors[matrix] / omega

    def _is_entry(self, place: _Place) -> bool:
        """Whether the stack's input feeds this sub-layer alone, and may get a factor."""
        first = place.prefix == f"{self.name}.layers.0.{place.branch.name}" and place.branch.name.endswith("self_attn")
        plain = self.stack.history == "latest" and (self.decoder or self.config.memory == "top")
        return self.entries is not None and first and plain

    def _deepnorm(self) -> _Folded:
        planned = self.config.planned_encoder_layers
        alpha, _ = deepnorm_constants(planned, self.config.decoder.layers, self.decoder)
        return self._constant(alpha)

    def _constant(self, skip: float) -> _Folded:
        """Divide norms' inputs by the one skip factor of the stack."""
        if any(name.startswith(f"{self.name}.history.norms.") for name in self.tensors):
            self._refuse(
                f"the norms of `history: {self.stack.history}` keep their epsilon while those of sub-layers change it"
            )
        for place in self._places():
            self._write(place, torch.tensor(1.0 / skip, dtype=torch.float64))
        epsilon = self.stack.layer_norm_epsilon or self.config.layer_norm_epsilon
        return _Folded("post", epsilon / skip**2)

    def _layer_scale(self) -> _Folded:
        for place in self._places():
            self._write(place, self.tensors.pop(f"{place.prefix}_residual.branch"))
        return _Folded("pre")

    def _write(self, place: _Place, factor: Tensor) -> None:
        """Multiply what a sub-layer gives by `factor`, [] or [d_model]."""
        if place.branch.writes is None:
            self._refuse(f"what {place.prefix} gives is not the output of a linear map that could be scaled")
            return
        for name in place.branch.writes:
            for parameter in self._parameters(f"{place.prefix}.{name}"):
                old = self.tensors[parameter]
                scaled = factor[:, None] if factor.dim() and old.dim() == 2 else factor
                self.tensors[parameter] = old * scaled.to(old)

    def _parameters(self, module: str) -> list[str]:
        """Return the names of weight and, if there is one, bias of a module."""
        return [name for name in (f"{module}.weight", f"{module}.bias") if name in self.tensors]
