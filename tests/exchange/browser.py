"""Bergamot's int8 arithmetic in torch: inputs as integers, and 16 bits for the sum of two products.

Inputs are multiplied by the file's scale for each matrix and shifted by 127, which makes them unsigned. The engine's
instruction multiplies them with the weights and adds up neighbours in 16 bits, which saturate; this module reproduces
those sums exactly. Without saturation, 51 of a model's 200 translations differed from the engine's; with it, none did.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ziggurat.data.shortlist import read_shortlist
from ziggurat.exchange.firefox import matrices_of
from ziggurat.exchange.importer import SHORTLIST_FILE
from ziggurat.exchange.marian_binary import SCALE_OF_INPUT, read_binary
from ziggurat.model.directory import open_model
from ziggurat.model.embedding import OutputProjection
from ziggurat.model.linear import Linear
from ziggurat.translate.scorers import Shortlist, scorer_of
from ziggurat.translate.translator import Translator

LARGEST = 127


@torch.no_grad()
def browser_translator(folder: Path, imported: Path) -> Translator:
    """Return the model of `folder`, computed as the engine does, with its shortlist; `imported` is its import."""
    opened = open_model(imported)
    source, target = opened.tokenizers
    listed = imported / SHORTLIST_FILE
    shortlist = _Eights(read_shortlist(listed, source, target), target.size) if listed.exists() else None
    [weights] = folder.glob("model.*.bin")
    arrays, _ = read_binary(weights)
    for path, module in opened.model.named_modules():
        if isinstance(module, Linear | OutputProjection):
            names = matrices_of(path, arrays)
            scale = float(arrays[names[0] + SCALE_OF_INPUT][0])
            if path == "output":  # a shortlist picks rows of it, but the scale stays that of the whole matrix
                module.multiply = _Product(scale, len(module.weight), LARGEST / float(module.weight.abs().max()))
            else:
                module.multiply = _Product(scale, len(module.weight) // len(names))
    decoding, limit = opened.experiment.decoding, opened.experiment.model.embedding.limit
    scorer = partial(scorer_of, [opened.model], shortlist)
    return Translator(opened.model, source, target, decoding, max_positions=limit, scorer=scorer)


class _Eights(Shortlist):
    """A shortlist as in the engine: padded to a multiple of eight pieces with the first ones that it lacks."""

    def allowed(self, source: Tensor, source_mask: Tensor, vocabulary_size: int) -> Tensor:
        """Return bool [n, V]; see Shortlist. The ids are Marian's, whose binary shortlist has no first pieces."""
        mask = super().allowed(source, source_mask, vocabulary_size)
        for row in mask:
            missing = (~row).nonzero()[:, 0]
            row[missing[: int(-row.sum()) % 8]] = True
        return mask


class _Product:
    """The product with a matrix that has one scale per `rows` rows; `scale` is that of its input."""

    def __init__(self, scale: float, rows: int, factor: float | None = None) -> None:
        self.scale, self.rows, self.factor = scale, rows, factor

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        given = (x.reshape(-1, x.shape[-1]) * self.scale).round().clamp(-LARGEST, LARGEST) + LARGEST
        found = torch.cat([self._of(given, part) for part in weight.split(self.rows)], -1)
        return (found if bias is None else found + bias).view(*x.shape[:-1], -1)

    def _of(self, given: Tensor, weight: Tensor) -> Tensor:
        factor = LARGEST / float(weight.abs().max()) if self.factor is None else self.factor
        integers = (weight * factor).round()
        pairs = torch.einsum("nkp,okp->nok", given.view(len(given), -1, 2), integers.view(len(integers), -1, 2))
        total = pairs.clamp(-(2**15), 2**15 - 1).sum(-1) - LARGEST * integers.sum(-1)
        return total / (self.scale * factor)
