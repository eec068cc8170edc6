"""A plain Transformer of another toolkit on its way to a model directory: rows put in the order of our vocabularies."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ziggurat.config import Experiment
from ziggurat.data.subword import SentencePieceTokenizer, Tokenizer
from ziggurat.errors import ExportError
from ziggurat.export.anatomy import Affine, Anatomy, compose

__all__ = ["ACTIVATIONS", "MAX_POSITIONS", "Control", "ForeignModel", "positions_from", "width_of"]

ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "silu": "silu", "swish": "silu"}
"""What other toolkits call a non-linearity -> `model.activation`."""

MAX_POSITIONS = 16_384
"""Most positions of a model that is taken in: four times those of the longest ones; their table is computed whole."""

_NEVER = -1e9
"""Output bias of a token that the other toolkit does not have."""


@dataclass(frozen=True)
class Control:
    """Ids of the other toolkit's control symbols; `first` is the decoder's first input."""

    pad: int
    unk: int
    eos: int
    first: int


@dataclass(frozen=True)
class ForeignModel:
    """What an importer has read.

    Attributes:
        kind: what it was, in words for people.
        anatomy: its matrices, rows in its own order.
        scaled: embeddings are multiplied by the square root of the width.
        source_ids, target_ids: its ids by piece.
        control: ids of its control symbols.
        source, target: our tokenizers.
        languages: codes of source and target.
    """

    kind: str
    anatomy: Anatomy
    scaled: bool
    source_ids: Mapping[str, int]
    target_ids: Mapping[str, int]
    control: Control
    source: Tokenizer
    target: Tokenizer
    languages: tuple[str, str]

    def checked(self, name: str) -> ForeignModel:
        """Return the model if its parts fit each other; `name` says in errors what it was read from.

        Raises ExportError: ids beyond the rows of a matrix, a matrix of another shape, heads that do not divide it.
        """
        reasons = []
        for side, stack, ids in (
            ("source", self.anatomy.encoder, self.source_ids),
            ("target", self.anatomy.decoder, self.target_ids),
        ):
            rows, width = stack.embedding.shape
            control = dataclasses.asdict(self.control)
            control = {key: control[key] for key in (control if side == "target" else ("pad", "unk", "eos"))}
            largest = max(ids.values(), default=-1)
            reasons += [
                f"{side}: the id of `{key}` is {number}, the matrix has rows 0 to {rows - 1:,}"
                for key, number in control.items()
                if not 0 <= number < rows
            ]
            if largest >= rows:
                reasons.append(f"{side}: the dictionary has {largest + 1:,} tokens, the model {rows:,}")
            if width % stack.heads:
                reasons.append(f"{side}: {stack.heads} heads do not divide the width {width}")
            if stack.positions is not None and (stack.positions.ndim != 2 or stack.positions.shape[1] != width):
                reasons.append(f"{side}: positions of shape {list(stack.positions.shape)} for the width {width}")
        output, decoder = self.anatomy.output, self.anatomy.decoder
        if output.weight.shape != decoder.embedding.shape:
            reasons.append(f"the output has shape {list(output.weight.shape)}, not {list(decoder.embedding.shape)}")
        elif output.bias is not None and output.bias.shape != output.weight.shape[:1]:
            reasons.append(f"the output's bias has shape {list(output.bias.shape)}")
        if reasons:
            raise ExportError(f"{name}: {'; '.join(reasons)}")
        return self

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters by our names, every row where our tokenizers expect it.

        A token that the other model does not have is read as its unknown token and never written. Its first input to
        the decoder is a token of its vocabulary (end-of-sentence, padding), ours is one of its own.
        """
        encoder, decoder, output = self.anatomy.encoder, self.anatomy.decoder, self.anatomy.output
        read = _rows(self.source, self.source_ids, self.control)
        begun = _rows(self.target, self.target_ids, self.control)
        written = list(begun)
        begun[self.target.bos] = self.control.first
        rows = torch.tensor([row is not None for row in written])
        known = torch.tensor([row or 0 for row in written])
        bias = output.bias[known] if output.bias is not None else torch.zeros(len(written))
        anatomy = dataclasses.replace(
            self.anatomy,
            encoder=dataclasses.replace(encoder, embedding=encoder.embedding[self._filled(read)]),
            decoder=dataclasses.replace(decoder, embedding=decoder.embedding[self._filled(begun)]),
            output=Affine(
                torch.where(rows[:, None], output.weight[known], 0.0),
                torch.where(rows, bias.clamp(min=_NEVER), _NEVER),  # -inf would make sums of biases NaN
            ),
        )
        return compose(anatomy)

    def _filled(self, rows: Sequence[int | None]) -> Tensor:
        return torch.tensor([self.control.unk if row is None else row for row in rows])

    def _subword(self, out: str) -> dict[str, str]:
        """Return the section `data.subword` by which `prepare` takes the vocabularies of the model directory `out`."""
        if isinstance(self.source, SentencePieceTokenizer):
            return {"kind": "existing", "source_model": out}
        if self.source is self.target:
            return {"kind": "vocabulary", "source_vocabulary": f"{out}/joint.vocab"}
        return {"kind": "vocabulary", **{f"{side}_vocabulary": f"{out}/{side}.vocab" for side in ("source", "target")}}

    def experiment(self, out: str) -> Experiment:
        """Return the configuration of the model directory `out`."""
        encoder, decoder = self.anatomy.encoder, self.anatomy.decoder
        positions = encoder.positions
        stacks: dict[str, Any] = {
            name: {"layers": len(stack.layers), "layer_norm_epsilon": stack.epsilon}
            for name, stack in (("encoder", encoder), ("decoder", decoder))
        }
        kinds = ["pre" if stack.pre_norm else "post" for stack in (encoder, decoder)]
        stacks["encoder"] |= {
            "residual": kinds[0] if kinds[0] != kinds[1] else None,
            "heads": encoder.heads,
            "d_ff": encoder.layers[0].ffn_in.weight.shape[0],
        }
        return Experiment.model_validate(
            {
                "data": {
                    "source_language": self.languages[0],
                    "target_language": self.languages[1],
                    "store": out,
                    "subword": self._subword(out),
                },
                "model": {
                    "d_model": decoder.embedding.shape[1],
                    "d_ff": decoder.layers[0].ffn_in.weight.shape[0],
                    "heads": decoder.heads,
                    "residual": kinds[1],
                    "activation": self.anatomy.activation,
                    "embedding": {
                        "sharing": "none",
                        "positions": "none" if positions is None else "learned",
                        "max_positions": 1 if positions is None else positions.shape[0],
                        "scale": self.scaled,
                        "output_bias": True,
                    },
                    **stacks,
                },
                "decoding": {"length_penalty": {"kind": "power", "alpha": 1.0}},
            }
        )


def _rows(tokenizer: Tokenizer, ids: Mapping[str, int], control: Control) -> list[int | None]:
    """Return of each of our ids the other toolkit's, or None."""
    rows = [ids.get(piece) for piece in tokenizer.pieces(range(tokenizer.size))]
    rows[tokenizer.pad], rows[tokenizer.unk], rows[tokenizer.eos] = control.pad, control.unk, control.eos
    if rows[tokenizer.bos] == control.eos:
        rows[tokenizer.bos] = None
    return rows


def width_of(embedding: Tensor, name: str) -> int:
    """Return the width of an embedding [rows, width]. Raises ExportError when it is no matrix."""
    if embedding.ndim != 2 or 0 in embedding.shape:
        raise ExportError(f"{name} has shape {list(embedding.shape)}; is it a plain Transformer?")
    return int(embedding.shape[1])


def positions_from(first: int, count: int, width: int) -> Tensor:
    """Return sinusoids [count, width] of the positions from `first` on, in fp32 as fairseq and M2M100 compute them."""
    half = width // 2
    step = torch.log(torch.tensor(10000.0)) / (half - 1)
    rates = torch.exp(torch.arange(half, dtype=torch.float32) * -step)
    angles = torch.arange(first, first + count, dtype=torch.float32)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)
