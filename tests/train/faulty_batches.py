"""Faults in certain batches of a run, in whichever process and however often they run."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ziggurat.config import Experiment
from ziggurat.data.corpus import Store
from ziggurat.data.loader import Group, LoaderState
from ziggurat.model.build import build_model
from ziggurat.train.device import loader_of


def planned(experiment: Experiment, first: int, last: int) -> list[Group]:
    """Return the batches of updates `first` to `last` of a run that starts from the beginning."""
    loader = loader_of(experiment, Store.open(experiment.data.store))
    return list(islice(loader.groups(LoaderState()), first - 1, last))


def _key(source: Tensor, target_in: Tensor) -> tuple[int, ...]:
    return (*source.shape, int(source.sum()), int(target_in.sum()))


def poison(patch: pytest.MonkeyPatch, groups: list[Group], module: str, fault: Callable[[Tensor], Tensor]) -> None:
    """Make later models of training apply `fault` to the output of `module` for the batches of `groups`."""
    bad = {_key(batch.source, batch.target_in) for group in groups for batch in group.batches}

    def build(*args: Any, **options: Any) -> nn.Module:
        model = build_model(*args, **options)
        met = torch.zeros(1)

        def look(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
            met.fill_(model.training and _key(inputs[0], inputs[2]) in bad)

        def spoil(_module: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> Tensor:
            return fault(output) if met else output

        model.register_forward_pre_hook(look)
        model.get_submodule(module).register_forward_hook(spoil)
        return model

    patch.setattr("ziggurat.train.learner.build_model", build)
