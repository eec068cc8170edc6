"""Low-rank updates of linear maps whose weights are frozen: LoRA (Hu et al. 2021, arXiv 2106.09685).

A run keeps its initial weights once, in `base/`, a model directory. Its checkpoints hold only the updates,
`<map>.low_rank.<part>.down` and `.up` for every part of a map that has one. Opening a checkpoint merges both, under the
names of a model without updates.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from ziggurat.config.train import LoraConfig, LoraMap
from ziggurat.model.build import model_slots
from ziggurat.model.dropout import Dropout
from ziggurat.model.linear import Linear, ShiftedLinear, linear
from ziggurat.model.roles import Role, Roles, Slot
from ziggurat.model.run_folder import BASE, MODEL_FILE, read_meta, run_of
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.model.tensors import read_shapes
from ziggurat.system.errors import CheckpointError, ConfigError, printable
from ziggurat.system.files import fingerprint


class Factors(nn.Module):
    """The matrices of one update: `down` A [rank, in] and `up` B [out, rank], without values until `LowRank.reset`."""

    roles: ClassVar[Roles] = {"down": Role.LOW_RANK, "up": Role.LOW_RANK}

    def __init__(self, width_in: int, width_out: int, rank: int, device: torch.device) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(rank, width_in, device=device))
        self.up = nn.Parameter(torch.empty(width_out, rank, device=device))

    def forward(self, x: Tensor, scale: float) -> Tensor:
        """Return scale B A x, [..., out], for `x` [..., in]."""
        return linear(linear(x, self.down) * scale, self.up)


class LowRank(nn.Module):
    """Updates of a linear map: part p of its output becomes W_p x + b_p + scale B_p A_p dropout(x).

    This is equation 3 of Hu et al. 2021, where scale is their alpha / r. A matrix that combines several maps (queries,
    keys and values) has an equal part for each map, with separate factors; parts that are not chosen stay unchanged.

    Args:
        width_in: width of the map's input.
        width_out: width of its output, all parts together.
        parts: number of its parts.
        chosen: indices of the parts with an update, from 0.
        rank: rank of every update.
        scale: factor of every update.
        dropout: dropout on the updates' input.
        device: device of the map's weight.
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

        So every update is 0 at first, and the map's output is unchanged.
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
            return y + self._factors(0)(read, self.scale)
        outputs = list(y.chunk(self.parts, dim=-1))
        for number in self.chosen:
            outputs[number] = outputs[number] + self._factors(number)(read, self.scale)
        return torch.cat(outputs, dim=-1)

    def of_part(self, x: Tensor, y: Tensor, number: int) -> Tensor:
        """Return `y` [..., out / parts], part `number` of the map's own output for `x` [..., in], with its update."""
        if number not in self.chosen:
            return y
        return y + self._factors(number)(self.dropout(x), self.scale)

    def _factors(self, number: int) -> Factors:
        return getattr(self, str(number))


_UPDATE = re.compile(r"(.+)\.low_rank\.(\d{1,4})\.(down|up)")
_ROLES: dict[LoraMap, frozenset[Role]] = {
    "query": frozenset({Role.ATTENTION_QUERY}),
    "key": frozenset({Role.ATTENTION_KEY}),
    "value": frozenset({Role.ATTENTION_VALUE}),
    "output": frozenset({Role.ATTENTION_OUT}),
    "feed_forward": frozenset({Role.FFN_IN, Role.FFN_OUT}),
    "gate": frozenset({Role.GATE}),
}


def adapt(model: Seq2Seq, config: LoraConfig, *, seed: int | None = None) -> None:
    """Freeze `model` and add low-rank updates to the maps that `config` chooses, in place; its output is unchanged.

    `seed` determines the initial values of A; without it, the updates are left uninitialised. Raises ConfigError when
    the model lacks one of these maps.
    """
    there = maps_of(model)
    if missing := [name for name in config.maps if name not in there]:
        raise ConfigError(
            f"`training.lora.maps: [{', '.join(config.maps)}]`: this model has no `{missing[0]}`; it has "
            + ", ".join(there)
        )
    roles = frozenset().union(*(_ROLES[name] for name in config.maps))
    maps, chosen = _linear_maps(model), defaultdict[int, list[Slot]](list)
    for slot in model_slots(model):
        if slot.role in roles and slot.place[0] in maps:
            chosen[slot.place[0]].append(slot)
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed or 0)
    for place, slots in chosen.items():
        weight = maps[place][0].weight
        height = slots[0].values.shape[0]
        updates = LowRank(
            weight.shape[1],
            weight.shape[0],
            parts=weight.shape[0] // height,
            # Parts are consecutive rows of the matrix.
            chosen=[
                (slot.values.storage_offset() - weight.storage_offset()) // (height * weight.shape[1]) for slot in slots
            ],
            rank=config.rank,
            scale=config.alpha / config.rank,
            dropout=Dropout(config.dropout),
            device=weight.device,
        )
        if seed is not None:
            updates.reset(generator)
        for module in maps[place]:
            module.low_rank = updates


def maps_of(model: Seq2Seq) -> list[LoraMap]:
    """Return the maps of a model that can have updates."""
    maps = _linear_maps(model)
    roles = {slot.role for slot in model_slots(model) if slot.place[0] in maps}
    return [name for name, wanted in _ROLES.items() if wanted & roles]


def _linear_maps(model: Seq2Seq) -> dict[int, list[Linear | ShiftedLinear]]:
    """Return the linear maps of a model by the memory location of their weights; those of tied layers share one."""
    maps: dict[int, list[Linear | ShiftedLinear]] = defaultdict(list)
    for module in model.modules():
        if isinstance(module, Linear | ShiftedLinear):
            maps[module.weight.untyped_storage()._cdata].append(module)
    return dict(maps)


def is_update(name: str) -> bool:
    """Return whether a parameter is a factor of a low-rank update."""
    return _UPDATE.fullmatch(name) is not None


def merged(base: Mapping[str, Tensor], updates: Mapping[str, Tensor], scale: float, name: str) -> dict[str, Tensor]:
    """Return `base` with every W replaced by W + scale * B A, computed in fp64 and rounded once to W's type.

    Errors use `name` for the origin of `updates`. Raises CheckpointError when they do not fit `base`.
    """
    factors: dict[tuple[str, int], dict[str, Tensor]] = defaultdict(dict)
    for key, tensor in updates.items():
        found = _UPDATE.fullmatch(key)
        if found is None or f"{found[1]}.weight" not in base:
            raise CheckpointError(f"{name}: {printable(key)} belongs to no map of the model that was adapted")
        factors[f"{found[1]}.weight", int(found[2])][found[3]] = tensor
    tensors = dict(base)
    for key in {weight for weight, _ in factors}:
        tensors[key] = base[key].clone()
    for (key, part), pair in factors.items():
        matrix, nothing = tensors[key], torch.empty(0)
        down, up = pair.get("down", nothing), pair.get("up", nothing)
        fits = down.dim() == up.dim() == 2 and down.shape == (up.shape[1], matrix.shape[1])
        if not fits or (part + 1) * up.shape[0] > matrix.shape[0]:
            raise CheckpointError(f"{name}: the update of part {part} does not fit {key} {list(matrix.shape)}")
        rows = matrix[part * up.shape[0] : (part + 1) * up.shape[0]]
        rows.copy_(rows.double() + scale * (up.double() @ down.double()))
    return tensors


def base_file(weights_file: Path) -> Path | None:
    """Return the file with the base weights of the updates in `weights_file`; None: it holds complete weights.

    Raises CheckpointError if that file is missing or `weights_file` cannot be read.
    """
    if not any(map(is_update, read_shapes(weights_file))):
        return None
    if not (found := run_of(weights_file.parent) / BASE / MODEL_FILE).is_file():
        raise CheckpointError(
            f"{found}: missing, and {weights_file} holds low-rank updates of it alone; copy `{BASE}/` back from where "
            "the run was, or name the run's own checkpoint"
        )
    return found


def weights_files(weights_file: Path) -> list[Path]:
    """Return the files of the weights in `weights_file`: itself and the base of its updates. Raises as base_file."""
    base = base_file(weights_file)
    return [weights_file] if base is None else [weights_file, base]


def weights_fingerprint(weights_file: Path) -> str:
    """Return the fingerprints of `weights_files`, joined by +. Raises as base_file."""
    return "+".join(map(fingerprint, weights_files(weights_file)))


def with_base(
    weights_file: Path, tensors: Mapping[str, Tensor], read: Callable[[Path], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Return the tensors of `weights_file`, low-rank updates merged with the weights that they belong to.

    `read` reads those. Raises CheckpointError: they are missing or do not fit.
    """
    base = base_file(weights_file)
    if base is None:
        return dict(tensors)
    folder = weights_file.parent
    try:
        # The section used in training, whatever the run's config.yaml contains now.
        config = LoraConfig.model_validate((read_meta(folder).get("configuration") or {})["training"]["lora"])
    except (KeyError, TypeError, ValidationError):
        raise CheckpointError(
            f"{folder}: holds low-rank updates, but not the section `training.lora` that they were trained with"
        ) from None
    return merged(read(base), tensors, config.alpha / config.rank, str(weights_file))
