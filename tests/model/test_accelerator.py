from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ziggurat.model.accelerator import usable_device
from ziggurat.system.errors import ConfigError


@pytest.fixture
def with_cudnn() -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.usefixtures("with_cudnn")
def test_attention_on_a_gpu_does_not_use_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_device("cpu", "device").type == "cpu"
    assert torch.backends.cuda.cudnn_sdp_enabled()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    assert usable_device("auto", "device").type == "cuda"
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_apples_gpus_are_refused_for_lack_of_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("mps"))
    assert usable_device("auto", "device") == torch.device("cpu")
    with pytest.raises(ConfigError, match="float64"):
        usable_device("mps", "device")
