"""CUDA graphs: the passes through the model, recorded once for every shape of batch and then replayed.

A kernel of a deep, narrow model takes less time than its launch, so the GPU waits for Python; a replayed graph launches
all kernels of a pass at once. A graph holds for one shape, reads and writes fixed addresses and repeats what Python
decided. So the shapes are few (`training.batch.length_multiple`), inputs are copied to where a recording expects them,
gradients are added to tensors that stay, and what decides anew in Python is refused.

Embeddings, layers and their backward pass are recorded; the loss, whose rows differ from batch to batch, and the step
of the optimiser are not. All recordings share one pool of memory, since no two are under way at once: together they
take about what the largest takes. Random numbers go on as they do without graphs (torch's philox offsets).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ziggurat.config import Experiment
from ziggurat.errors import ConfigError

__all__ = ["GraphedPasses", "refuse_unrecordable"]

_Shape = tuple[int, ...]


def refuse_unrecordable(experiment: Experiment, device: torch.device) -> None:
    """Raise ConfigError when `training.cuda_graphs` is set and cannot work, naming what stands against it."""
    model, training = experiment.model, experiment.training
    if not training.cuda_graphs:
        return
    obstacles = {
        f"`training.device` is {device.type}: only NVIDIA GPUs have them": device.type != "cuda",
        "`training.recompute`: a recorded pass cannot put back random numbers": training.recompute.encoder is not None
        or training.recompute.decoder is not None,
        "`layer_drop`: which layers are left out would be recorded, too": model.encoder.layer_drop > 0
        or model.decoder.layer_drop > 0,
        "`training.loss.inter_sim`: what every layer gives is not kept": training.loss.inter_sim > 0,
        "several processes train together": torch.distributed.is_available() and torch.distributed.is_initialized(),
    }
    if found := [reason for reason, holds in obstacles.items() if holds]:
        raise ConfigError(f"`training.cuda_graphs` cannot be used ({'; '.join(found)}); set it to 0")


class GraphedPasses:
    """A context of updates within which a model's passes are recorded and replayed.

    A shape runs as ever when it first comes, which loads and compiles what it needs; it is recorded when it comes
    again, up to a number of shapes.

    Args:
        model: takes (source, source_mask, target_in) and returns hidden states; its parameters stay where they are.
        most: shapes that are recorded.
    """

    def __init__(self, model: nn.Module, most: int) -> None:
        self._model = model
        self._most = most
        self._seen: Counter[_Shape] = Counter()
        self._recordings: dict[_Shape, _Recording | None] = {}
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        self._pool: Any = None
        self._plain: Callable[..., Tensor] = model.forward

    @property
    def shapes(self) -> int:
        """Number of shapes recorded."""
        return sum(recording is not None for recording in self._recordings.values())

    def __enter__(self) -> None:
        """Give every trained parameter the gradient, zero, that recordings add to, and take the model's calls."""
        if not self._gradients:
            self._gradients = [(p, torch.zeros_like(p)) for p in self._model.parameters() if p.requires_grad]
        else:
            torch._foreach_zero_([gradient for _, gradient in self._gradients])
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._model.forward = self._forward  # as torch.cuda.make_graphed_callables does

    def __exit__(self, *error: object) -> None:
        del self._model.forward

    def _forward(self, source: Tensor, source_mask: Tensor, target_in: Tensor, outputs: None = None) -> Tensor:
        assert outputs is None
        inputs = source, source_mask, target_in
        shape = (*source.shape, target_in.shape[1])
        self._seen[shape] += 1
        if self._seen[shape] > 1 and shape not in self._recordings and self.shapes < self._most:
            self._recordings[shape] = None  # once is enough: it may not fit into memory
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            self._recordings[shape] = _Recording(self._plain, inputs, list(self._model.buffers()), self._pool)
        recording = self._recordings.get(shape)
        if recording is None:
            return self._plain(*inputs)
        hidden: Tensor = _Replay.apply(self._gradients[0][0], recording, inputs)  # type: ignore[no-untyped-call]
        return hidden


class _Recording:
    """Both passes of one shape.

    Args:
        forward: of the model.
        inputs: an example.
        buffers: of the model, which the graphs read; positional tables are replaced when longer inputs come.
        pool: memory of the graphs.
    """

    hidden: Tensor

    def __init__(
        self, forward: Callable[..., Tensor], inputs: tuple[Tensor, ...], buffers: list[Tensor], pool: Any
    ) -> None:
        self.inputs = [tensor.clone() for tensor in inputs]
        self._forward, self._buffers = forward, buffers
        # Casts are part of the recording; autocast's own cache of them would outlive it.
        kind = inputs[0].device.type
        with torch.autocast(
            kind, torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind), cache_enabled=False
        ):
            self.ahead = _captured(self._pass, pool)
        self.gradient = torch.zeros_like(self.hidden)
        self.back = _captured(lambda: self.hidden.backward(self.gradient), pool)
        # Else its graph would keep the parameters' nodes of autograd, and with them this stream, for passes to come.
        self.hidden = self.hidden.detach()

    def _pass(self) -> None:
        self.hidden = self._forward(*self.inputs)


def _captured(work: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    """Return the kernels of `work`, which does not run now."""
    graph = torch.cuda.CUDAGraph()
    # The loader's thread locks pages and the saver's copies meanwhile; neither concerns this thread's stream.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        work()
    return graph


class _Replay(torch.autograd.Function):
    """Hidden states by a recording; its backward pass adds to the gradients of the parameters by itself."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, recording: _Recording, inputs: tuple[Tensor, ...]) -> Tensor:
        """Replay on `inputs`; `anchor` is any tensor that is trained, so that the backward pass comes here."""
        for place, tensor in zip(recording.inputs, inputs, strict=True):
            place.copy_(tensor)
        recording.ahead.replay()
        ctx.recording = recording
        return recording.hidden.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.recording.gradient.copy_(gradients[0])
        ctx.recording.back.replay()
        return None, None, None
