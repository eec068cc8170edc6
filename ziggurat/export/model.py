"""A trained model as exporters take it: configuration, weights, tokenizers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ziggurat.config import Experiment
from ziggurat.config.load import change_section
from ziggurat.data.subword import Tokenizer, load_tokenizers
from ziggurat.export.anatomy import Anatomy, dissect
from ziggurat.export.plain import fold_to_plain
from ziggurat.models.build import build_model
from ziggurat.models.directory import OpenedModel, load_weights, weights
from ziggurat.models.seq2seq import Seq2Seq

__all__ = ["ExportedModel"]


@dataclass(frozen=True)
class ExportedModel:
    """What is exported.

    Attributes:
        experiment: its configuration.
        tensors: its parameters by name.
        directory: folder that holds the vocabulary files.
        source, target: its tokenizers.
    """

    experiment: Experiment
    tensors: dict[str, Tensor]
    directory: Path
    source: Tokenizer
    target: Tokenizer

    @classmethod
    def of(cls, opened: OpenedModel) -> ExportedModel:
        """Take an opened model."""
        source, target = load_tokenizers(opened.directory)
        return cls(opened.experiment, weights(opened.model), opened.directory, source, target)

    @property
    def positions(self) -> int:
        """Positions of either side that exported tables hold, begin- or end-of-sentence and a tag counted."""
        embedding, decoding = self.experiment.model.embedding, self.experiment.decoding
        if embedding.positions == "learned":
            return embedding.max_positions
        return max(decoding.max_source_pieces, decoding.max_length.limit) + 2

    def seq2seq(self) -> Seq2Seq:
        """Return the model in torch, in evaluation mode on the CPU."""
        model = build_model(self.experiment.model, self.source.size, self.target.size)
        load_weights(model, self.tensors, str(self.directory))
        return model.eval()

    def plain(self) -> ExportedModel:
        """Return the plain Transformer that computes the same. Raises NotPlainError with all reasons."""
        config, tensors = fold_to_plain(self.experiment.model, self.tensors)
        return dataclasses.replace(
            self, experiment=self.experiment.model_copy(update={"model": config}), tensors=tensors
        )

    def anatomy(self) -> Anatomy:
        """Return the matrices of the plain model. Raises NotPlainError."""
        entries: dict[str, Tensor] = {}
        config, tensors = fold_to_plain(self.experiment.model, self.tensors, entries)
        return dissect(config, tensors, self.positions, entries)

    def searching_as_others(self) -> Experiment:
        """Return the experiment with the search of other toolkits: one kind of length penalty, no coverage, none of
        lingvo's rules, and neither fairseq's end of a search nor a shortlist.
        """
        changes: dict[str, object] = {"endings": "beam", "shortlist": None, "prune": None, "eos_margin": None}
        if self.experiment.decoding.length_penalty.kind != "power":
            changes["length_penalty"] = {"kind": "none", "alpha": 0.0, "coverage": 0.0}
        decoding = change_section(self.experiment.decoding, changes, "decoding")
        return self.experiment.model_copy(update={"decoding": decoding})

    def unlike_others(self) -> list[str]:
        """Return which of the model's own settings of the search `searching_as_others` leaves out, for people."""
        decoding = self.experiment.decoding
        penalty = decoding.length_penalty
        rules = {key: getattr(decoding, key) for key in ("prune", "eos_margin", "shortlist")}
        found = [f"`decoding.{key}: {value}`" for key, value in rules.items() if value is not None]
        if decoding.endings == "fairseq":
            found.append("`decoding.endings: fairseq` (the export stops by its toolkit's own rule)")
        if penalty.kind in ("gnmt", "lingvo") and (penalty.alpha or penalty.coverage):
            found.append(f"`decoding.length_penalty.kind: {penalty.kind}` (the export has no penalty)")
        return found
