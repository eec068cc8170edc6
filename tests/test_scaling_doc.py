"""docs/scaling.md: its commands run, and two processes hold and send as many bytes as it states."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
import weakref
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.run import parse_args
from torch.utils._python_dispatch import TorchDispatchMode

from tests.train.launch import run_together
from ziggurat.config.model import ModelConfig
from ziggurat.config.train import LossConfig, OptimiserConfig, Recompute, RecomputeConfig
from ziggurat.data.loader import Batch, SpecialIds, collate
from ziggurat.model.build import build_model, count_parameters, parameter_roles, set_recompute
from ziggurat.model.counts import bare_model
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.model.tensors import local
from ziggurat.train.distributed import Processes, joined
from ziggurat.train.optim import Optimiser
from ziggurat.train.parallel import Replicated, Sharded
from ziggurat.train.update import train_update

HERE = "tests.test_scaling_doc"
TEXT = (Path(__file__).resolve().parents[1] / "docs" / "scaling.md").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Size:
    """The sizes of a model."""

    encoder: int
    decoder: int
    width: int
    heads: int
    parameters: int = 0
    root: int = 0


def config_of(size: Size) -> ModelConfig:
    """A model as `benchmarks.memory` builds it."""
    depths = {"encoder": {"layers": size.encoder}, "decoder": {"layers": size.decoder}}
    return ModelConfig.model_validate({"d_model": size.width, "d_ff": 4 * size.width, "heads": size.heads, **depths})


def counted(size: Size, vocabulary: int) -> Size:
    """Count the parameters of the real model, without allocating them."""
    model = bare_model(config_of(size), vocabulary, vocabulary)
    layers = [count_parameters(layer) for stack in (model.encoder, model.decoder) for layer in stack.layers]  # type: ignore[union-attr]
    total = count_parameters(model)
    return Size(size.encoder, size.decoder, size.width, size.heads, total, total - sum(layers))


def fixed_bytes(size: Size, kind: str, count: int) -> list[float]:
    """Return the bytes of weights, gradients and moments in one process."""
    share = size.parameters / (count if kind == "fsdp" else 1)
    return [4 * share, 4 * share, 8 * share]


def bytes_sent(size: Size, kind: str, count: int) -> float:
    """Return the bytes that a process sends: ddp per update, fsdp per batch."""
    ring = (count - 1) / count * 4
    return ring * (2 * size.parameters if kind == "ddp" else 3 * size.parameters - size.root)


def batch_of(pairs: int, vocabulary: int) -> Batch:
    """Return sentence pairs of 28 tokens per side."""
    generator = np.random.default_rng(1)
    sides = [list(generator.integers(4, vocabulary, (pairs, 27), dtype=np.int32)) for _ in range(2)]
    return collate(sides[0], sides[1], np.arange(pairs), SpecialIds(0, 3, 1, 2, 3))


SMALL = Size(4, 2, 64, 4)
"""SMALL is the model that two processes train here."""


class Watch(TorchDispatchMode):
    """Adds up the values that are sent, and keeps track of bf16 copies of matrices."""

    def __init__(self, model: Seq2Seq) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        layers = [p for stack in (model.encoder, model.decoder) for p in stack.parameters()]
        self.shapes = {p.shape for p in layers if p.dim() == 2}
        self.sent: Counter[str] = Counter()
        self.narrow: list[weakref.ref[torch.UntypedStorage]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = function(*args, **(kwargs or {})), str(function)
        if name.startswith("c10d."):
            tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor)]
            if tensors[0].dtype == torch.float32:  # counts and flags have other types
                self.sent[name.split(".")[1]] += max(t.numel() for t in tensors)
        if "_to_copy" in name and result.dtype == torch.bfloat16 and result.shape in self.shapes:
            self.narrow.append(weakref.ref(result.untyped_storage()))
        return result

    def narrow_bytes(self) -> int:
        """Return the bytes of the copies that still exist."""
        return sum(storage.nbytes() for there in self.narrow if (storage := there()) is not None)


def measure(kind: str, precision: str, recompute: str) -> None:
    """Run in every process: print what the process holds and sends."""
    with joined(1.0) as processes:
        found = measured(kind, precision, ast.literal_eval(recompute), processes)
        print(json.dumps(found))


def measured(kind: str, precision: str, recompute: Recompute, processes: Processes) -> dict[str, Any]:
    model = build_model(config_of(SMALL), 100, 100)
    roles = parameter_roles(model)
    set_recompute(model, RecomputeConfig(encoder=recompute, decoder=recompute))
    watch = Watch(model)
    wrapper = Replicated if kind == "ddp" else Sharded
    parallel = wrapper(model, LossConfig(), precision, processes)
    optimiser = Optimiser(model, roles, OptimiserConfig())
    batches = [batch_of(4, 100)] * 2
    train_update(parallel, batches, optimiser, rate=1e-3, clip_norm=None)  # fixes buckets, creates moments
    where: list[set[int]] = []
    narrow: list[int] = []
    backward = Tensor.backward

    def spied(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        narrow.append(watch.narrow_bytes())
        backward(loss, *args, **kwargs)  # type: ignore[no-untyped-call]
        where.append({local(p.grad).untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None})

    with pytest.MonkeyPatch.context() as patch, watch:
        patch.setattr(Tensor, "backward", spied)
        in_forward: list[int] = []
        parallel.objective.register_forward_hook(lambda *_: in_forward.append(watch.narrow_bytes()))
        parallel.accumulate(batches, parallel.size(batches))
    return {
        "weights": sum(local(p).nbytes for p in model.parameters()),
        "gradients": sum(local(p.grad).nbytes for p in model.parameters() if p.grad is not None),
        "moments": sum(local(m).nbytes for m in optimiser.state().values() if m.dim()),
        "sent": watch.sent,
        "outside of buckets": not where[0] & where[1],
        "narrow": sum(2 * shape.numel() * n for shape, n in Counter(_shapes(model)).items()),
        "narrow in forward": in_forward,
        "narrow before backward": narrow,
    }


def _shapes(model: Seq2Seq) -> list[torch.Size]:
    return [p.shape for stack in (model.encoder, model.decoder) for p in stack.parameters() if p.dim() == 2]


def measured_in_two_processes(kind: str, precision: str = "fp32", recompute: Recompute = None) -> list[dict[str, Any]]:
    return [json.loads(said) for said in run_together(HERE, "measure", 2, kind, precision, repr(recompute))]


@pytest.mark.slow
def test_ddp_holds_and_sends_the_stated_bytes() -> None:
    size = counted(SMALL, 100)
    for found in measured_in_two_processes("ddp"):
        assert [found["weights"], found["gradients"], found["moments"]] == fixed_bytes(size, "ddp", 2)
        assert not found["outside of buckets"]  # nor in the batches before the last
        # One of two batches is sent; each of two processes sends half of the sum, twice.
        assert 4 * found["sent"]["allreduce_"] == bytes_sent(size, "ddp", 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "recompute"),
    [
        pytest.param("fp32", None, marks=pytest.mark.slow),
        pytest.param("bf16", None, marks=pytest.mark.slow),
        ("bf16", 1),
    ],
)
def test_fsdp_holds_and_sends_the_stated_bytes(precision: str, recompute: Recompute) -> None:
    size = counted(SMALL, 100)
    for found in measured_in_two_processes("fsdp", precision, recompute):
        assert [found["weights"], found["gradients"], found["moments"]] == fixed_bytes(size, "fsdp", 2)
        volume = found["sent"]["_allgather_base_"], found["sent"]["_reduce_scatter_base_"]
        assert volume == (2 * (2 * size.parameters - size.root), 2 * size.parameters)  # for both batches
        assert 2 * sum(volume) == 2 * bytes_sent(size, "fsdp", 2)  # half of the 4 bytes: the other process has the rest
        whole = found["narrow"] if precision == "bf16" else 0
        assert found["narrow in forward"] == [whole] * 2
        assert found["narrow before backward"] == [0 if recompute else whole] * 2


def commands() -> list[str]:
    joined_lines = TEXT.replace("\\\n", " ")
    return [line.strip() for line in joined_lines.splitlines() if line.startswith("    torchrun ")]


def test_torchrun_understands_the_commands() -> None:
    assert len(commands()) == 3
    for command in commands():
        o = parse_args(shlex.split(command, comments=True)[1:])
        assert (o.module, o.training_script, o.training_script_args[:2]) == (True, "ziggurat", ["train", "my.yaml"])
        processes = int(o.nproc_per_node) * int(o.nnodes.split(":")[0])
        assert f"training.batch.accumulate={processes}" in o.training_script_args


STAND_INS = {
    "srun": "shift\nfor i in 0 1; do\n"
    'SLURM_PROCID=$i SLURM_LOCALID=$i SLURM_NTASKS=2 "$@" &\ndone\nwait -n; status=$?; wait; exit $status',
    "ziggurat": 'echo $$ $RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $MASTER_PORT "$@" >> "$HERE/started"\n'
    '[ -n "$ENDS" ] && exit "$ENDS"\ntrap "echo saved >> $HERE/saved; exit 143" TERM\n'
    "while true; do sleep 0.05; done",
    "scancel": 'echo "$@" >> "$HERE/cancelled"; while read -r pid rest; do kill -TERM "$pid"; done < "$HERE/started"',
    "scontrol": 'if [ "$1" = show ]; then printf "node1\\nnode2\\n"; else echo "$@" >> "$HERE/controlled"; fi',
}


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a job in which commands only record their calls."""
    for name, body in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    found = re.search(r"```bash\n(.*?)```", TEXT, re.DOTALL)
    assert found is not None
    (tmp_path / "job").write_text(found[1], encoding="utf-8")
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    job = {"SLURM_JOB_ID": "10007", "SLURM_JOB_NODELIST": "node[1-2]", "HERE": str(tmp_path), "ENDS": ""}
    return {**os.environ, **job, "PATH": path}


needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="the script needs bash")


@needs_bash
def test_the_job_saves_and_is_requeued_before_its_time_is_up(slurm: dict[str, str], tmp_path: Path) -> None:
    job = subprocess.Popen(["bash", str(tmp_path / "job")], env=slurm)
    started = tmp_path / "started"
    until = time.monotonic() + 20
    while time.monotonic() < until and not (started.is_file() and started.read_text().count("\n") == 2):
        time.sleep(0.02)
    time.sleep(0.2)  # for the stand-ins to set their traps
    job.send_signal(signal.SIGUSR1)
    job.wait(20)
    lines = sorted(line.split(maxsplit=1)[1] for line in started.read_text().splitlines())
    said = "2 node1 20007 train my.yaml --run runs/a training.batch.accumulate=16"
    assert lines == [f"0 0 {said}", f"1 1 {said}"]
    assert (tmp_path / "saved").read_text() == "saved\n" * 2
    assert (tmp_path / "controlled").read_text() == "requeue 10007\n"


@needs_bash
@pytest.mark.parametrize(
    ("status", "restarts", "again"), [("0", "0", False), ("1", "0", True), ("1", "4", True), ("1", "5", False)]
)
def test_a_failed_job_is_requeued_a_few_times(
    status: str, restarts: str, again: bool, slurm: dict[str, str], tmp_path: Path
) -> None:
    environment = {**slurm, "ENDS": status, "SLURM_RESTART_COUNT": restarts}
    ended = subprocess.run(["bash", str(tmp_path / "job")], env=environment, timeout=20)
    assert ended.returncode == int(status)
    assert (tmp_path / "controlled").is_file() == again
