"""CUDA graphs of the passes through a model, one for each shape of batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ziggurat.config import Experiment
from ziggurat.system.errors import ConfigError

_Shape = tuple[int, ...]


def refuse_unrecordable(experiment: Experiment, device: torch.device) -> None:
    """Raise ConfigError, listing every obstacle, when `training.cuda_graphs` is set and cannot work."""
    model, training = experiment.model, experiment.training
    if not training.cuda_graphs:
        return
    obstacles = {
        f"`training.device` is {device.type}: only NVIDIA GPUs have them": device.type != "cuda",
        "`training.recompute`: a recorded pass cannot restore random numbers": training.recompute.encoder is not None
        or training.recompute.decoder is not None,
        "`layer_drop`: every replay would leave out the layers of the recorded pass": model.encoder.layer_drop > 0
        or model.decoder.layer_drop > 0,
        "`training.loss.inter_sim`: a recording does not return the output of every layer": training.loss.inter_sim > 0,
        "`training.loss.alignment`: a recording does not return attention": training.loss.alignment is not None,
        "several processes train together": torch.distributed.is_available() and torch.distributed.is_initialized(),
    }
    if found := [reason for reason, holds in obstacles.items() if holds]:
        raise ConfigError(
            f"`training.cuda_graphs` cannot be used ({'; '.join(found)}); set it to 0",
            key="training.cuda_graphs",
            named=["training.device", "training.recompute", "training.loss.inter_sim", "training.loss.alignment"],
        )


class GraphedPasses:
    """A context of updates in which a model's passes are recorded once for every shape of batch, and replayed.

    In a deep, narrow model a kernel takes less time than its launch, so the GPU waits for Python. A replayed CUDA graph
    launches all kernels of a pass at once. It is valid for one shape, reads and writes fixed addresses, and repeats
    Python's decisions. So shapes must be few (`training.batch.length_multiple`), inputs are copied to the addresses of
    a recording, gradients are added to tensors that stay allocated, and settings that decide in Python at every pass
    are refused. The loss, whose number of rows differs from batch to batch, and the optimiser's step are not recorded.
    All recordings share one pool of memory, since only one is in use at a time. Random numbers are the same as without
    graphs (torch's philox offsets).

    A shape runs without a recording the first time, which loads and compiles its kernels; neither can be recorded. The
    second time, it is recorded, up to a maximum number of shapes.

    Args:
        model: takes (source, source_mask, target_in) and returns hidden states; its parameters keep their addresses.
        most: largest number of recorded shapes.
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
        """Give every trained parameter a zero gradient, to which recordings add, and intercept the model's calls."""
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
            self._recordings[shape] = None  # before the attempt, so that one which runs out of memory is not repeated
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            self._recordings[shape] = _Recording(self._plain, inputs, list(self._model.buffers()), self._pool)
        recording = self._recordings.get(shape)
        if recording is None:
            return self._plain(*inputs)
        # Any trained tensor will do as the first argument: autograd then calls the backward pass of _Replay.
        hidden: Tensor = _Replay.apply(self._gradients[0][0], recording, inputs)  # type: ignore[no-untyped-call]
        return hidden


class _Recording:
    """The recorded forward and backward pass for the shape of `inputs`.

    The graphs read the model's buffers, so these are kept alive here: the model replaces its positional tables for
    longer inputs.
    """

    hidden: Tensor

    def __init__(
        self, forward: Callable[..., Tensor], inputs: tuple[Tensor, ...], buffers: list[Tensor], pool: Any
    ) -> None:
        # Separate memory: a graph reads the addresses at which it was recorded, so each replay copies its inputs there.
        self.inputs = [tensor.clone() for tensor in inputs]
        self._forward, self._buffers = forward, buffers
        # Casts must be part of the recording, and autocast's cache would keep them beyond it.
        kind = inputs[0].device.type
        with torch.autocast(
            kind, torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind), cache_enabled=False
        ):
            self.ahead = _captured(self._pass, pool)
        self.gradient = torch.zeros_like(self.hidden)
        self.back = _captured(lambda: self.hidden.backward(self.gradient), pool)
        # Otherwise its autograd graph would keep the parameters' nodes, and with them the stream of the recording, for
        # later passes.
        self.hidden = self.hidden.detach()

    def _pass(self) -> None:
        self.hidden = self._forward(*self.inputs)


def _captured(work: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    """Return a graph of the kernels of `work`; they do not run now."""
    graph = torch.cuda.CUDAGraph()
    # By default, an unsafe call in any thread breaks a capture. Meanwhile the loader's thread locks pages and the
    # saver's thread copies, neither on this thread's stream.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        work()
    return graph


class _Replay(torch.autograd.Function):
    """Hidden states from a recording; its backward pass adds directly to the gradients of the parameters."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, recording: _Recording, inputs: tuple[Tensor, ...]) -> Tensor:
        """Replay on `inputs`; `anchor` is a trained tensor, so that autograd runs the backward pass."""
        for buffer, tensor in zip(recording.inputs, inputs, strict=True):
            buffer.copy_(tensor)
        recording.ahead.replay()
        ctx.recording = recording
        return recording.hidden.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.recording.gradient.copy_(gradients[0])
        ctx.recording.back.replay()
        return None, None, None
