"""A trained model as exporters take it, and the plain Transformer that it is or folds into.

`ExportedModel` holds configuration, weights and tokenizers. `not_plain` and `unlike_plain` give the reasons why a model
has no plain equivalent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ziggurat.config import DecodingConfig, Experiment
from ziggurat.config.load import change_section
from ziggurat.config.model import ModelConfig
from ziggurat.data.subword import Tokenizer
from ziggurat.exchange.anatomy import Anatomy, dissect
from ziggurat.exchange.fold import NotPlainError, fold
from ziggurat.model.build import assemble, build_model
from ziggurat.model.directory import OpenedModel
from ziggurat.model.seq2seq import AlignmentHead, Seq2Seq
from ziggurat.model.tensors import load_weights, weights
from ziggurat.translate.engines import positions_for, unsupported_keys

SearchRules = Callable[[DecodingConfig], Collection[str]]
"""Settings of a search -> keys of what a toolkit has beyond the beam search that all have."""


@dataclass(frozen=True)
class ExportedModel:
    """A trained model to be exported.

    Attributes:
        experiment: its configuration.
        tensors: its parameters by name.
        directory: folder with the vocabulary files.
        source, target: its tokenizers.
    """

    experiment: Experiment
    tensors: dict[str, Tensor]
    directory: Path
    source: Tokenizer
    target: Tokenizer

    @classmethod
    def of(cls, opened: OpenedModel) -> ExportedModel:
        """Return an opened model as one to be exported."""
        return cls(opened.experiment, weights(opened.model), opened.directory, *opened.tokenizers)

    @property
    def positions(self) -> int:
        """Positions of either side in exported tables; begin- or end-of-sentence and a tag are counted."""
        return positions_for(self.experiment.model, self.experiment.decoding)

    def seq2seq(self) -> Seq2Seq:
        """Return the model in torch, in evaluation mode on the CPU."""
        model = build_model(self.experiment.model, self.source.size, self.target.size)
        load_weights(model, self.tensors, str(self.directory))
        model.decoder.aligned = self.aligned
        return model.eval()

    @property
    def aligned(self) -> AlignmentHead:
        """The attention that alignments are taken from."""
        return AlignmentHead.of(self.experiment.training.loss.alignment)

    def plain(self) -> ExportedModel:
        """Return the plain Transformer that computes the same. Raises NotPlainError with all reasons."""
        config, tensors = _fold_to_plain(self.experiment.model, self.tensors)
        return dataclasses.replace(
            self, experiment=self.experiment.model_copy(update={"model": config}), tensors=tensors
        )

    def anatomy(self) -> Anatomy:
        """Return the matrices of the plain model. Raises NotPlainError."""
        entries: dict[str, Tensor] = {}
        config, tensors = _fold_to_plain(self.experiment.model, self.tensors, entries)
        return dissect(config, tensors, self.positions, entries)

    def searching_as_others(self, also: SearchRules = lambda decoding: ()) -> Experiment:
        """Return the experiment with the search of another toolkit.

        It is a beam search with one kind of length penalty, without coverage, fairseq's stopping rule, a shortlist or
        any rules but those that the toolkit has `also`.
        """
        decoding, usual = self.experiment.decoding, DecodingConfig()
        kept = also(decoding)
        changes: dict[str, object] = {"endings": "beam", "shortlist": None}
        changes |= {key: getattr(usual, key) for key in unsupported_keys(dict(decoding)) if key not in kept}
        if decoding.search == "sample":  # of samples there may be more than the beam has hypotheses
            changes["n_best"] = 1
        if decoding.length_penalty.kind != "power":
            changes["length_penalty"] = {"kind": "none", "alpha": 0.0, "coverage": 0.0}
        decoding = change_section(decoding, changes, "decoding")
        return self.experiment.model_copy(update={"decoding": decoding})

    def unlike_others(self, also: SearchRules = lambda decoding: ()) -> list[str]:
        """Return the model's own search settings that a toolkit lacks, for messages; `also` as above."""
        decoding = self.experiment.decoding
        penalty, kept = decoding.length_penalty, also(decoding)
        found = [text for key, text in unsupported_keys(dict(decoding)).items() if key not in kept]
        if decoding.shortlist is not None and "shortlist" not in kept:
            found.append(f"`decoding.shortlist: {decoding.shortlist}`")
        if decoding.endings == "fairseq":
            found.append("`decoding.endings: fairseq` (the export stops by its toolkit's own rule)")
        if penalty.kind in ("gnmt", "lingvo") and (penalty.alpha or penalty.coverage):
            found.append(f"`decoding.length_penalty.kind: {penalty.kind}` (the export has no penalty)")
        return found


def not_plain(config: ModelConfig, *, scaled_input: bool = False) -> list[str]:
    """Return all reasons why no model of this configuration is, or folds into, a plain Transformer.

    With `scaled_input` each stack's input may have a factor per channel: in other formats every stack has separate
    embeddings, which can take it.
    """
    if config.family == "rnmt":
        return ["`family: rnmt` is no Transformer"]
    return [*_shape(config), *_unfoldable(config, {} if scaled_input else None)]


def unlike_plain(config: ModelConfig) -> Iterator[str]:
    """Yield the choices inside attention that matrices alone do not express in other toolkits."""
    if config.attention.qk_norm != "none":
        yield f"`attention.qk_norm: {config.attention.qk_norm}`: other toolkits do not normalise queries and keys"
    if config.attention.value_norm != "none":
        yield f"`attention.value_norm: {config.attention.value_norm}`: other toolkits do not normalise values"
    for key in ("value_residual", "cross_value_residual"):
        if (kind := getattr(config.attention, key)) != "none":
            yield f"`attention.{key}: {kind}`: in other toolkits no layer reads the values of another"
    if config.attention.query_scale:
        yield "`attention.query_scale`: other toolkits have no scale per dimension of queries"
    if config.embedding.positions == "rotary":
        yield "`embedding.positions: rotary`: other toolkits add positions to embeddings"


def _fold_to_plain(
    config: ModelConfig, tensors: Mapping[str, Tensor], entries: dict[str, Tensor] | None = None
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Return configuration and weights of the plain model; the arguments are those of ziggurat.exchange.fold.fold.

    Raises NotPlainError with all reasons.
    """
    if config.family == "rnmt":
        raise NotPlainError(not_plain(config))
    reasons = list(_shape(config))
    try:
        folded = fold(config, tensors, entries)
    except NotPlainError as error:
        reasons += error.reasons
    if reasons:
        raise NotPlainError(reasons)
    return folded


def _shape(config: ModelConfig) -> Iterator[str]:
    for side, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        if stack.history != "latest":
            yield f"`{side}.history: {stack.history}`: in a plain Transformer a layer reads the one below"
    if config.memory != "top":
        yield f"`memory: {config.memory}`: in a plain Transformer the decoder attends to the encoder's output"
    if config.decoder.attention not in ("full", "relative"):
        yield f"`decoder.attention: {config.decoder.attention}` is not an attention of the plain Transformer"


def _unfoldable(config: ModelConfig, entries: dict[str, Tensor] | None) -> list[str]:
    """Return the reasons of `fold` for a narrow model of the same structure, with weights as training may leave them.

    `fold` decides by the weights, which a configuration alone does not have; a narrow model takes no time.
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
        # Away from 0 and 1, and all different: no factor of a trained model can be counted on to be trivial. Skips that
        # are not trained keep the values of their initialisation; profiling leaves the first one of a stack at 1.
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
