"""Low-rank updates of linear maps whose own weights are frozen: LoRA (Hu et al. 2021, arXiv 2106.09685)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ziggurat.model.dropout import Dropout
from ziggurat.model.linear import linear
from ziggurat.model.roles import Role, Slot


class Factors(nn.Module):
    """The matrices of one update: `down` A [rank, in] and `up` B [out, rank], without values until `LowRank.reset`.

    Args:
        width_in: in.
        width_out: out.
        rank: of the product B A.
        device: that of the map's weight.
    """

    def __init__(self, width_in: int, width_out: int, rank: int, device: torch.device) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(rank, width_in, device=device))
        self.up = nn.Parameter(torch.empty(width_out, rank, device=device))

    def forward(self, x: Tensor, scale: float) -> Tensor:
        """Return scale B A x, [..., out], for `x` [..., in]."""
        return linear(linear(x, self.down) * scale, self.up)


class LowRank(nn.Module):
    """Updates of a linear map: part p of its output becomes W_p x + b_p + scale B_p A_p dropout(x).

    That is equation 3 of Hu et al. 2021, scale being their alpha / r. A map that is several in one matrix (queries,
    keys and values) has as many equal parts, each with factors of its own; parts not chosen stay as they are.

    Args:
        width_in: width of the map's input.
        width_out: width of its output, all parts together.
        parts: number of its parts.
        chosen: numbers of those with an update, from 0.
        rank: of every update.
        scale: factor of every update.
        dropout: on what the updates read.
        device: that of the map's weight.
    """

    def __init__(
        self,
        width_in: int,
        width_out: int,
        *,
        parts: int,
        chosen: Sequence[int],
        rank: int,
        scale: float,
        dropout: Dropout,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.parts = parts
        self.chosen = tuple(sorted(chosen))
        self.scale = scale
        self.dropout = dropout
        for number in self.chosen:  # parameters are called `low_rank.0.down`
            self.add_module(str(number), Factors(width_in, width_out // parts, rank, device))

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """Draw A from the uniform distribution up to 1 / sqrt(in), as the authors' code does; set B to 0.

        So every update is 0 at first, and the map computes what it did before.
        """
        for number in self.chosen:
            factors = self._factors(number)
            bound = factors.down.shape[1] ** -0.5
            factors.down.uniform_(-bound, bound, generator=generator)
            factors.up.zero_()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return `y` [..., out], the map's own output for `x` [..., in], with the updates of all parts added."""
        read = self.dropout(x)
        if self.parts == 1:
            updated: Tensor = y + self._factors(0)(read, self.scale)
            return updated
        outputs = list(y.chunk(self.parts, dim=-1))
        for number in self.chosen:
            outputs[number] = outputs[number] + self._factors(number)(read, self.scale)
        return torch.cat(outputs, dim=-1)

    def of_part(self, x: Tensor, y: Tensor, number: int) -> Tensor:
        """Return `y` [..., out / parts], part `number` of the map's own output for `x` [..., in], with its update."""
        if number not in self.chosen:
            return y
        updated: Tensor = y + self._factors(number)(self.dropout(x), self.scale)
        return updated

    def _factors(self, number: int) -> Factors:
        factors: Factors = getattr(self, str(number))
        return factors

    def slots(self) -> Iterator[Slot]:
        """Yield the role of each factor."""
        for number in self.chosen:
            for name, values in self._factors(number).named_parameters():
                yield Slot(values, Role.LOW_RANK, f"{number}.{name}")
