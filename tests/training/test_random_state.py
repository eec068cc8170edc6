"""Random state of a process with a GPU; its generators are stood in for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ziggurat.training.checkpoint import random_state, restore_random_state


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """What the present GPU, number 1, has for a state; no other may be asked."""
    held = {"state": torch.tensor([7], dtype=torch.uint8)}

    def only_its_own(*device: object) -> None:
        assert device == (), "the present GPU is asked, by default"

    def get(*device: object) -> Tensor:
        only_its_own(*device)
        return held["state"]

    def put(state: Tensor, *device: object) -> None:
        only_its_own(*device)
        held["state"] = state

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_rng_state", get)
    monkeypatch.setattr(torch.cuda, "set_rng_state", put)
    return held


def test_a_process_keeps_the_state_of_its_own_gpu(gpu: dict[str, Tensor]) -> None:
    state = random_state()
    assert sorted(state) == ["cpu", "cuda"]
    gpu["state"] = torch.tensor([9], dtype=torch.uint8)
    drawn = torch.rand(3)
    restore_random_state(state)
    assert gpu["state"].tolist() == [7]
    assert torch.equal(torch.rand(3), drawn)


def test_older_checkpoints_hold_every_gpu(gpu: dict[str, Tensor]) -> None:
    state = {"cpu": torch.get_rng_state(), "cuda-0": torch.tensor([1]), "cuda-1": torch.tensor([2])}
    restore_random_state(state)
    assert gpu["state"].tolist() == [2]


def test_a_checkpoint_from_a_cpu_leaves_the_gpu_alone(gpu: dict[str, Tensor]) -> None:
    restore_random_state({"cpu": torch.get_rng_state()})
    assert gpu["state"].tolist() == [7]


def test_without_a_gpu_in_use_there_is_the_cpu_s_alone() -> None:
    assert sorted(random_state()) == ["cpu"]
