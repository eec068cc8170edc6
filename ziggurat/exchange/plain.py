"""The plain Transformer that a trained model is or folds into, and the model in the form that exporters take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, assert_never

import torch
from torch import Tensor

from ziggurat.config import DecodingConfig, Experiment
from ziggurat.config.kinds import ATTENTIONS, RESIDUALS, ResidualKind
from ziggurat.config.load import change_section
from ziggurat.config.model import ModelConfig, StackConfig
from ziggurat.data.subword import Tokenizer
from ziggurat.exchange.anatomy import Anatomy, dissect, with_usual_parts
from ziggurat.model.build import assemble, build_model
from ziggurat.model.depth import untied
from ziggurat.model.directory import OpenedModel
from ziggurat.model.kinds import ATTENTION, HISTORY, RESIDUAL
from ziggurat.model.rate_transfer import branch_factor, output_factor
from ziggurat.model.residual.kinds import deepnorm_constants
from ziggurat.model.seq2seq import AlignmentHead, Seq2Seq
from ziggurat.model.tensors import load_weights, weights
from ziggurat.system.errors import ConfigError
from ziggurat.translate.engines import positions_for, unsupported_keys

PLAIN_ATTENTIONS = ("full", "relative")
"""PLAIN_ATTENTIONS are the kinds of `decoder.attention` of a plain Transformer."""


class NotPlainError(ConfigError):
    """No plain Transformer computes the same as the model; `reasons` lists every one."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__(f"not equal to any plain Transformer: {'; '.join(reasons)}")
        self.reasons = reasons


def fold(
    config: ModelConfig, tensors: Mapping[str, Tensor], entries: dict[str, Tensor] | None = None
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Return configuration and weights of a plain Transformer with the same outputs as the model in evaluation mode.

    These conversions are exact for any weights (outputs are equal up to rounding):

    - `admin` to `post`: omega_i, i >= 2, goes into gain and bias of the norm before sub-layer i, and 1/omega_i into the
      matrices through which that sub-layer reads the stream: queries, keys and values of self-attention, queries of
      cross-attention, W_1. Nothing else may read that norm. omega_1 goes into the embedding and learned positions. It
      must be 1 if these cannot be scaled, because positions are sinusoidal or both stacks share them. If the embedding
      is also the output projection, 1/omega_1 goes into the last norm. If a stack's omegas are all equal, they are
      folded like DeepNorm's alpha instead.
    - `deepnorm` to `post`: LN_e(alpha x + f(x)) = LN_e'(x + f(x) / alpha) with e' = e / alpha^2, so 1/alpha goes into
      the maps through which sub-layers write. The stacks get separate `layer_norm_epsilon`, since their alphas differ.
    - `layer_scale` to `pre`: lambda goes into the maps through which sub-layers write.
    - `ln_scaling` to `pre`: 1/sqrt(l) goes into gain and bias of the norms before the sub-layers of layer l.
    - `norm: scale` to `rms`, with the gain g / sqrt(d_model) in every channel; `embedding.unit_length`: scaled rows.
    - `transfer`: a stack's factor goes into the maps through which sub-layers write, the logits' into the last norm.

    `post` and `pre` stay unchanged, and tied layers are written out. The two stacks may be of different kinds, as may
    ranges of layers that all become `pre`; everything else is kept. Only evaluation is equivalent: in training, norms
    and matrices would learn at different speeds, and LayerDrop would skip a layer's omega.

    Args:
        config: the model's configuration.
        tensors: its parameters by name (ziggurat.model.tensors.weights); they are not changed.
        entries: for formats that can multiply a stack's input (embedding and position) by a factor [d_model]; receives
            that factor by stack, and omega_1 need not be 1. None: the format has no such factor.

    Raises NotPlainError with all reasons why this model cannot be folded.
    """
    (config, tensors), reasons = untied(config, tensors), list[str]()
    folded = with_usual_parts(config, tensors)
    encoder, decoder = (_Stack(config, above, folded, reasons, entries).fold() for above in (False, True))
    if reasons:
        raise NotPlainError(reasons)
    values = config.model_dump()
    values["residual"] = decoder.kind
    values["encoder"] |= {"residual": encoder.kind if encoder.kind != decoder.kind else None, "ranges": []}
    values["decoder"] |= {"residual": None, "ranges": []}
    for name, stack in (("encoder", encoder), ("decoder", decoder)):
        if stack.epsilon is not None:
            values[name] |= {"layer_norm_epsilon": stack.epsilon}
    values |= {"transfer": None, "norm": "rms" if config.norm == "scale" else config.norm}
    values["embedding"]["unit_length"] = False
    for section in (values, values["encoder"], values["decoder"]):
        if section["init"] is not None and section["init"]["kind"] == "admin":
            section["init"] |= {"kind": "xavier"}
    return ModelConfig.model_validate(values), folded


_KEPT_AT_1 = "training with `model.wiring.omega_trainable: false` keeps a profiled first omega at 1"


class _Folded(NamedTuple):
    kind: ResidualKind
    epsilon: float | None = None


class _Sublayer(NamedTuple):
    """A sub-layer by the names of its linear maps.

    Attributes:
        prefix: prefix of its parameters' names, in its layer or in the model.
        reads: linear maps that read the stream and nothing else; None: something other than a linear map reads it too.
        writes: linear maps whose sum is the sub-layer's output; None: its output is computed differently.
        norm: the norm whose only reader it is; None: there is no such norm.
    """

    prefix: str
    reads: tuple[str, ...] | None
    writes: tuple[str, ...] | None
    norm: str | None = None


def _branches(config: ModelConfig, decoder: bool) -> list[_Sublayer]:
    ffn = _Sublayer("ffn", ("in_proj",), ("out_proj",))
    kind = config.decoder.attention if decoder else config.encoder.attention
    row = ATTENTION[kind]
    if not ATTENTIONS[kind].merged:
        own = _Sublayer("self_attn", row.reads, row.writes)
        cross = _Sublayer("cross_attn", ("q_proj",), ("out_proj",))  # its keys and values read the memory
        return [own, cross, ffn] if decoder else [own, ffn]
    merged = _Sublayer("merged_attn", row.reads, row.writes)
    if kind == "merged" and config.attention.share_value:
        merged = merged._replace(reads=None)  # the value map reads the memory too
    return [merged, ffn]


class _Stack:
    """One stack of a model; `fold` replaces its entries of `tensors` and adds obstacles to `reasons`."""

    def __init__(
        self,
        config: ModelConfig,
        decoder: bool,
        tensors: dict[str, Tensor],
        reasons: list[str],
        entries: dict[str, Tensor] | None,
    ) -> None:
        self.config, self.decoder = config, decoder
        self.tensors, self.reasons, self.entries = tensors, reasons, entries
        self.name = "decoder" if decoder else "encoder"
        self.stack: StackConfig = config.decoder if decoder else config.encoder
        self.kinds = config.residuals(decoder=decoder)

    def fold(self) -> _Folded:
        if self.config.transfer is not None:
            self._base()
        if not self.decoder and self.config.encoder.solver != "euler":
            self._refuse(f"`encoder.solver: {self.config.encoder.solver}` computes layers several times")
        if self.config.wiring.gpas and any("wiring.gpas" in RESIDUALS[kind].options for kind in self.kinds):
            self._refuse("`wiring.gpas` has no plain form: its gates act on the stream")
        kind, foldings = self.kinds[-1], {RESIDUAL[kind].folding for kind in self.kinds}
        if len(set(self.kinds)) > 1 and not foldings <= {"pre", "branch_vector", "norm_constant"}:
            self._refuse("`ranges`: layers of several kinds have no plain form, unless each becomes pre-norm")
            return _Folded(kind)
        match RESIDUAL[kind].folding:
            case "pre" | "branch_vector" | "norm_constant":
                return self._pre()
            case "post":
                return _Folded("post")
            case "skip_vector":
                return self._skip_vector()
            case "alpha":
                planned, above = self.config.planned_encoder_layers, self.config.planned_decoder_layers
                return self._skip_constant(deepnorm_constants(planned, above, self.decoder)[0])
            case None:
                foldable = ", ".join(kind for kind, row in RESIDUAL.items() if row.folding is not None)
                self._refuse(f"`residual: {kind}` has no plain form; {foldable} have")
                return _Folded(kind)
            case other:
                assert_never(other)

    def _refuse(self, reason: str) -> None:
        self.reasons.append(f"{self.name}: {reason}")

    def _sublayers(self) -> Iterator[_Sublayer]:
        branches = _branches(self.config, self.decoder)
        split = self.config.combination.splits(self.stack.history)
        below: str | None = None
        for layer in range(self.stack.layers):
            for number, branch in enumerate(branches):
                prefix = f"{self.name}.layers.{layer}.{branch.prefix}"
                norm = below
                if number == 0 or split:
                    norm = self._norm_read(layer * len(branches) + number if split else layer, below)
                if number == 0 and not self.decoder and self._is_mixed():
                    norm = None  # the mixtures also read it
                yield branch._replace(prefix=prefix, norm=norm)
                below = f"{prefix}_residual.out_norm"

    def _norm_read(self, unit: int, below: str | None) -> str | None:
        """Return the norm whose only reader is layer `unit`, counted from 0; None if there is none.

        `below` is the norm at the end of the layer below. With a split history a unit is a sub-layer.
        """
        options, history = self.config.combination, self.stack.history
        match HISTORY[history].feeding(unit, options.period_of(history)):
            case "below":
                return below
            case "shared":
                return None
            case int(row):
                # `auto` means consumers here: only post-norm kinds move a factor into a norm (ziggurat.model.kinds).
                normed = options.norm in ("auto", "consumers") and (row > 0 or options.normalize_embedding)
                return f"{self.name}.history.norms.{row}" if normed else None
            case other:
                assert_never(other)

    def _is_mixed(self) -> bool:
        return self.config.memory != "top"

    def _skip_vector(self) -> _Folded:
        omegas = [self.tensors.pop(f"{sublayer.prefix}_residual.skip") for sublayer in self._sublayers()]
        # If all are equal, norms undo them as they undo DeepNorm's alpha, and the embedding needs no factor.
        if not bool((omegas[0] == 1).all()) and bool((torch.stack(omegas) == omegas[0][0]).all()):
            return self._skip_constant(float(omegas[0][0]))
        for sublayer, omega in zip(self._sublayers(), omegas, strict=True):
            if not bool((omega == 1).all()):
                self._move(sublayer, omega)
        return _Folded("post")

    def _move(self, sublayer: _Sublayer, omega: Tensor) -> None:
        """Multiply the norm that feeds a sub-layer by omega, and the maps with which the sub-layer reads it by 1/omega.

        If it is fed by the stack's input instead of a norm, that input is multiplied.
        """
        at_entry = sublayer.norm is None and self._is_entry(sublayer)
        if sublayer.norm is None and not at_entry:
            self._refuse(
                f"omega of {sublayer.prefix} is not 1, and its input, an embedding or an output that others read too, "
                f"cannot be scaled ({_KEPT_AT_1})"
            )
        elif sublayer.reads is None:
            self._refuse(f"omega of {sublayer.prefix} is not 1, and not only linear maps read its input")
        elif not bool((omega.isfinite() & (omega != 0)).all()):
            self._refuse(f"omega of {sublayer.prefix} is 0 or not finite in some channel")
        elif at_entry and self.entries is None and (fixed := self._fixed_input()):
            self._refuse(
                f"omega of {sublayer.prefix} is not 1, and its input, the embedding, cannot be scaled: {fixed} "
                f"({_KEPT_AT_1}; `--to ctranslate2` and `--to huggingface` have separate embeddings, which can be)"
            )
        else:
            if sublayer.norm is not None:
                self._scale(sublayer.norm, omega)
            elif self.entries is not None:
                self.entries[self.name] = omega
            else:
                self._scale_input(omega)
            for name in sublayer.reads:
                matrix = f"{sublayer.prefix}.{name}.weight"
                self.tensors[matrix] = self.tensors[matrix] / omega

    def _is_entry(self, sublayer: _Sublayer) -> bool:
        plain = self.stack.history == "latest" and (self.decoder or not self._is_mixed())
        return plain and sublayer.prefix == f"{self.name}.layers.0.self_attn"

    def _fixed_input(self) -> str:
        """Return which part of the stack's input cannot be multiplied by a vector; "" if all of it can."""
        embedding = self.config.embedding
        if embedding.positions == "sinusoidal":
            return "`embedding.positions: sinusoidal` are not weights"
        if embedding.sharing == "all":
            return "with `embedding.sharing: all` both stacks read one matrix"
        return "`embedding.shared_bias` is one vector for both stacks" if embedding.shared_bias else ""

    def _scale_input(self, omega: Tensor) -> None:
        """Multiply embedding and positions by omega [d_model].

        If the embedding is also the output projection, the last norm, read by nothing else, is multiplied by 1/omega.
        """
        side = "target_embedding" if self.decoder else "source_embedding"
        for module in (f"{side}.tokens", f"{side}.positions"):
            self._scale(module, omega)
        if self.decoder and self.config.embedding.sharing == "decoder":
            self._scale(f"decoder.layers.{self.stack.layers - 1}.ffn_residual.out_norm", 1 / omega)

    def _scale(self, module: str, factor: Tensor) -> None:
        for name in self._parameters(module):
            self.tensors[name] = self.tensors[name] * factor

    def _skip_constant(self, skip: float) -> _Folded:
        """Divide norms' inputs by the stack's single skip factor, which a norm undoes except for its epsilon."""
        if any(name.startswith(f"{self.name}.history.norms.") for name in self.tensors):
            self._refuse(
                f"the norms of `history: {self.stack.history}` keep their epsilon while those of sub-layers change it"
            )
        for sublayer in self._sublayers():
            self._write(sublayer, torch.tensor(1.0 / skip, dtype=torch.float64))
        epsilon = self.stack.layer_norm_epsilon or self.config.layer_norm_epsilon
        return _Folded("post", epsilon / skip**2)

    def _base(self) -> None:
        """Multiply the branches and the output projection's input by the factors of `transfer`."""
        factor, last = branch_factor(self.config, self.decoder), output_factor(self.config)
        assert factor is not None
        assert last is not None
        for sublayer in self._sublayers():
            self._write(sublayer, torch.tensor(factor, dtype=torch.float64))
        for name in ("weight", "bias") if self.decoder else ():
            if (values := self.tensors.pop(f"decoder.final_norm.norm.{name}", None)) is not None:
                self.tensors[f"decoder.final_norm.{name}"] = values * last

    def _pre(self) -> _Folded:
        for sublayer in self._sublayers():
            residual, layer = f"{sublayer.prefix}_residual", int(sublayer.prefix.split(".")[2])
            folding = RESIDUAL[self.kinds[layer]].folding
            if folding == "branch_vector":
                self._write(sublayer, self.tensors.pop(f"{residual}.branch"))
            elif folding == "norm_constant":
                for name in self._parameters(f"{residual}.in_norm.norm"):
                    plain = name.replace(".in_norm.norm.", ".in_norm.")
                    self.tensors[plain] = self.tensors.pop(name) / (layer + 1) ** 0.5
        return _Folded("pre")

    def _write(self, sublayer: _Sublayer, factor: Tensor) -> None:
        """Multiply the output of a sub-layer by `factor`, [] or [d_model]."""
        if sublayer.writes is None:
            self._refuse(f"the output of {sublayer.prefix} is not that of a linear map, which could be scaled")
            return
        for name in sublayer.writes:
            for parameter in self._parameters(f"{sublayer.prefix}.{name}"):
                old = self.tensors[parameter]
                scaled = factor[:, None] if factor.dim() and old.dim() == 2 else factor
                self.tensors[parameter] = old * scaled.to(old)

    def _parameters(self, module: str) -> list[str]:
        return [name for name in (f"{module}.weight", f"{module}.bias") if name in self.tensors]


SearchRules = Callable[[DecodingConfig], Collection[str]]
"""SearchRules maps a search's settings to the keys of them that a toolkit supports beyond the plain beam search."""


@dataclass(frozen=True)
class ExportedModel:
    """A trained model to be exported.

    Attributes:
        experiment: its configuration.
        tensors: its parameters by name.
        directory: folder with the vocabulary files.
        source, target: its tokenizers.
        sample: text of the kind that it translates, for measuring the scales of quantised inputs.
    """

    experiment: Experiment
    tensors: dict[str, Tensor]
    directory: Path
    source: Tokenizer
    target: Tokenizer
    sample: Sequence[str] = ()

    @classmethod
    def of(cls, opened: OpenedModel) -> ExportedModel:
        """Return an opened model as one to be exported."""
        return cls(opened.experiment, weights(opened.model), opened.directory, *opened.tokenizers)

    @property
    def positions(self) -> int:
        """Positions of either side in exported tables, including begin- or end-of-sentence and a tag."""
        return positions_for(self.experiment.model, self.experiment.decoding)

    def seq2seq(self) -> Seq2Seq:
        """Return the model in torch, in evaluation mode on the CPU."""
        model = build_model(self.experiment.model, self.source.size, self.target.size)
        load_weights(model, self.tensors, str(self.directory))
        model.decoder.aligned = self.aligned
        return model.eval()

    @property
    def aligned(self) -> AlignmentHead:
        """The attention head that provides alignments."""
        return AlignmentHead.of(self.experiment.training.loss.alignment)

    def plain(self) -> ExportedModel:
        """Return the plain Transformer that computes the same. Raises NotPlainError with all reasons."""
        config, tensors = _fold_to_plain(self.experiment.model, self.tensors)
        experiment = self.experiment.model_copy(update={"model": config})
        return dataclasses.replace(self, experiment=experiment, tensors=tensors)

    def anatomy(self, attentions: Collection[str] = PLAIN_ATTENTIONS, *, scaled_input: bool = True) -> Anatomy:
        """Return the matrices of the plain model. Raises NotPlainError; the arguments are those of not_plain."""
        entries: dict[str, Tensor] = {}
        given = entries if scaled_input else None
        config, tensors = _fold_to_plain(self.experiment.model, self.tensors, given, attentions)
        return dissect(config, tensors, self.positions, entries)

    def searching_as_others(self, also: SearchRules = lambda decoding: ()) -> Experiment:
        """Return the experiment with other toolkits' search: a beam, `power` penalties, and only the rules `also`."""
        decoding, usual = self.experiment.decoding, DecodingConfig()
        kept = also(decoding)
        changes: dict[str, object] = {"shortlist": None} | ({} if "endings" in kept else {"endings": "beam"})
        changes |= {key: getattr(usual, key) for key in unsupported_keys(dict(decoding)) if key not in kept}
        if decoding.search == "sample":  # there may be more samples than the beam has hypotheses
            changes["n_best"] = 1
        none = {"kind": "none", "alpha": 0.0, "coverage": 0.0}
        kind = {} if decoding.length_penalty.kind == "power" else none
        changes["length_penalty"] = kind | ({} if "word_penalty" in kept else {"word_penalty": 0.0})
        decoding = change_section(decoding, changes, "decoding")
        return self.experiment.model_copy(update={"decoding": decoding})

    def unlike_others(self, also: SearchRules = lambda decoding: ()) -> list[str]:
        """Return the model's own search settings that a toolkit lacks, for messages; `also` as above."""
        decoding = self.experiment.decoding
        penalty, kept = decoding.length_penalty, also(decoding)
        found = [text for key, text in unsupported_keys(dict(decoding)).items() if key not in kept]
        if decoding.shortlist is not None and "shortlist" not in kept:
            found.append(f"`decoding.shortlist: {decoding.shortlist}`")
        if decoding.endings in ("fairseq", "marian") and "endings" not in kept:
            found.append(f"`decoding.endings: {decoding.endings}` (the export stops by its toolkit's own rule)")
        if penalty.kind in ("gnmt", "lingvo") and (penalty.alpha or penalty.coverage):
            found.append(f"`decoding.length_penalty.kind: {penalty.kind}` (the export has no penalty)")
        if penalty.word_penalty and "word_penalty" not in kept:
            found.append(f"`decoding.length_penalty.word_penalty: {penalty.word_penalty}`")
        return found


def not_plain(
    config: ModelConfig, *, scaled_input: bool = False, attentions: Collection[str] = PLAIN_ATTENTIONS
) -> list[str]:
    """Return all reasons why no model of this configuration is, or folds into, a plain Transformer.

    With `scaled_input` each stack's input may have a factor per channel, as in formats where every stack has separate
    embeddings. `attentions` are the kinds that the decoder may have.
    """
    if config.family == "rnmt":
        return ["`family: rnmt` is not a Transformer"]
    return [*_shape(config, attentions), *_unfoldable(config, {} if scaled_input else None)]


def _fold_to_plain(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    entries: dict[str, Tensor] | None = None,
    attentions: Collection[str] = PLAIN_ATTENTIONS,
) -> tuple[ModelConfig, dict[str, Tensor]]:
    if config.family == "rnmt":
        raise NotPlainError(not_plain(config))
    reasons = list(_shape(config, attentions))
    try:
        folded = fold(config, tensors, entries)
    except NotPlainError as error:
        reasons += error.reasons
    if reasons:
        raise NotPlainError(reasons)
    return folded


def _shape(config: ModelConfig, attentions: Collection[str]) -> Iterator[str]:
    for side, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        if stack.history != "latest":
            yield f"`{side}.history: {stack.history}`: in a plain Transformer a layer reads the one below"
        if stack.ffn_depth != 2:
            yield f"`{side}.ffn_depth: {stack.ffn_depth}`: in a plain Transformer feed-forward networks have two maps"
    if config.memory != "top":
        yield f"`memory: {config.memory}`: in a plain Transformer the decoder attends to the encoder's output"
    if config.decoder.attention not in attentions:
        yield f"`decoder.attention: {config.decoder.attention}` is not an attention of the plain Transformer"


def _unfoldable(config: ModelConfig, entries: dict[str, Tensor] | None) -> list[str]:
    """Return the reasons that `fold` gives for a narrow model of the same structure, with arbitrary trained weights.

    `fold` decides by the weights, which a configuration alone lacks; a narrow model takes no time.
    """
    values = config.model_dump()
    values |= {"preset": None, "d_model": 4, "d_ff": 4, "heads": 1, "dropout": {}}
    values["encoder"] |= {"d_model": None, "d_ff": None, "heads": None}
    values["combination"] |= {"groups": 1}
    values["embedding"] |= {"max_positions": 1}
    narrow = ModelConfig.model_validate(values)
    tensors = weights(assemble(narrow, 4, 4))
    generator = torch.Generator().manual_seed(0)
    first = dict.fromkeys(("encoder", "decoder"), True)
    for name, tensor in tensors.items():
        # Not 0 or 1, and all different, because a trained model's factors cannot be relied on to be trivial. Untrained
        # skips keep their initial values; profiling leaves the first one of a stack at 1.
        noise = 1.5 + 0.1 * torch.randn(tensor.shape, generator=generator)
        stack = name.split(".")[0]
        if name.endswith("_residual.skip") and not config.wiring.omega_trainable:
            init = config.stack_init(decoder=stack == "decoder")
            if init.kind != "admin":
                noise = torch.ones(tensor.shape)
            elif init.omega != "profiled":
                noise = torch.full(tensor.shape, 1.0 if init.omega == "one" else 1.5)
            elif first[stack]:
                noise = torch.ones(tensor.shape)
            first[stack] = False
        tensor.copy_(noise)
    try:
        fold(narrow, tensors, entries)
    except NotPlainError as error:
        return error.reasons
    return []
