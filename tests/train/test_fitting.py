"""Memory: how much there is, trials of the largest batches, and the token budget that they find."""

from __future__ import annotations

import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import tiny_experiment
from tests.train.runs import QUIET, final_bytes
from ziggurat.config import Experiment, load_experiment
from ziggurat.config.load import change_section
from ziggurat.config.train import BatchConfig
from ziggurat.data.batching import largest
from ziggurat.data.corpus import Store
from ziggurat.data.loader import LoaderState
from ziggurat.system.errors import ConfigError, TrainingError, out_of_memory
from ziggurat.train import device, setup
from ziggurat.train.device import (
    Shortage,
    available_memory,
    limited_to_available_memory,
    loader_of,
    readable,
    within_memory,
)
from ziggurat.train.learner import Learner
from ziggurat.train.loop import train
from ziggurat.train.objective import add_gradients
from ziggurat.train.setup import fit_batches, largest_batches, largest_budget, try_batches

CPU = torch.device("cpu")


def padded_shape(loader: Any, indices: np.ndarray, store: Store, multiple: int) -> tuple[int, int, int]:
    """Return the sentences, source and target length of a planned batch, by a plain loop."""
    longest = [0, 0]
    for index in indices:
        for side, lengths in enumerate((store.train.source_lengths, store.train.target_lengths)):
            longest[side] = max(longest[side], int(lengths[index]) + 1)
    source, target = (-(-length // multiple) * multiple for length in longest)
    return len(indices), source, target


def attention_weights(shape: tuple[int, int, int]) -> int:
    """Return the weights of one layer of each kind of attention: of the encoder, the decoder, and between them."""
    sentences, source, target = shape
    return sentences * (source * source + target * target + source * target)


def test_a_batch_with_a_long_source_only_may_be_the_largest() -> None:
    """Its self-attention has 4 million weights; the batch with most source-target pairs has 0.8 million in all."""
    sentences, source, target = (np.array(side) for side in ((64, 4), (64, 1000), (64, 20)))
    assert largest(sentences, source, target) == [0, 1]


@pytest.mark.parametrize("multiple", [1, 4])
def test_the_largest_batches_are_those_of_the_plan(multiple: int, tiny_folder: Path) -> None:
    experiment = tiny_experiment(tiny_folder, batch={"max_tokens": 150, "length_multiple": multiple})
    store = Store.open(experiment.data.store)
    loader = loader_of(experiment, store)
    shapes = [padded_shape(loader, indices, store, multiple) for indices in loader.plan(LoaderState())]
    found = largest_batches(loader, multiple, LoaderState())
    sizes = [(len(b.source), b.source.shape[1], b.target_in.shape[1]) for b in found]
    assert sizes[0] in shapes
    assert sizes[0][0] * (sizes[0][1] + sizes[0][2]) == max(b * (s + t) for b, s, t in shapes)
    assert max(map(attention_weights, sizes)) == max(map(attention_weights, shapes))


def test_a_trial_leaves_everything_unchanged(tiny_folder: Path) -> None:
    experiment = tiny_experiment(tiny_folder)
    learner = Learner(experiment, Store.open(experiment.data.store), CPU)
    before = {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}
    learner.model.eval()
    loader = loader_of(experiment, learner.store)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    batches = largest_batches(loader, 1, LoaderState())
    assert try_batches(learner, batches, experiment.training) is None
    assert torch.equal(torch.rand(2), expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.model.state_dict().items())
    assert all(p.grad is None for p in learner.model.parameters())
    assert learner.optimiser.state() == {}
    assert not learner.model.training


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_trial_takes_as_much_memory_as_an_update(
    accumulate: int, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moments and all layers are present; with several batches per update, so are the gradients of the first."""
    batch = {"max_tokens": 400, "accumulate": accumulate}
    experiment = tiny_experiment(tiny_folder, {"encoder": {"layer_drop": 0.9}}, batch=batch)
    learner = Learner(experiment, Store.open(experiment.data.store), CPU)
    reserved: list[int] = []
    reserve = learner.optimiser.reserve
    monkeypatch.setattr(learner.optimiser, "reserve", lambda: [reserved.append(1), *reserve()][1:])
    calls: list[int] = []
    for layer in learner.model.encoder.layers:  # type: ignore[union-attr]
        layer.register_forward_hook(lambda *_: calls.append(1))
    gradients: list[bool] = []

    def watched(*args: Any, **options: Any) -> Any:
        gradients.append(learner.model.output.weight.grad is not None)
        return add_gradients(*args, **options)

    monkeypatch.setattr("ziggurat.train.parallel.add_gradients", watched)
    batches = largest_batches(loader_of(experiment, learner.store), 1, LoaderState())
    assert try_batches(learner, batches, experiment.training) is None
    assert sum(reserved) == 1
    parameters = sum(p.numel() for p in learner.model.parameters())
    assert sum(t.numel() for t in reserve()) == 2 * parameters
    assert learner.optimiser.moment_bytes == 8 * parameters
    assert len(calls) == 2 * len(batches) * accumulate
    assert gradients == ([False] * len(batches) if accumulate == 1 else [False] + [True] * (2 * len(batches) - 1))


@pytest.mark.slow
def test_a_trial_changes_nothing_in_training(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    growth = {"stages": [{"layers": 1, "updates": 2}], "keep_stages": False}
    experiment = tiny_experiment(tiny_folder, stop={"updates": 4}, growth=growth)
    tried: list[int] = []
    real = setup.try_batches
    monkeypatch.setattr(
        setup, "try_batches", lambda learner, *rest: [tried.append(learner.depth[0]), real(learner, *rest)][1]
    )
    train(tmp_path / "with", experiment, console=QUIET)
    assert tried == [1, 2]  # before the first update, and of the grown model
    monkeypatch.setattr(setup, "try_batches", lambda *_: None)
    train(tmp_path / "without", experiment, console=QUIET)
    assert final_bytes(tmp_path / "with", 4) == final_bytes(tmp_path / "without", 4)


@pytest.mark.parametrize("limit", [256, 512, 768, 4096, 5120])
@pytest.mark.parametrize("lowest", [256, 512])
def test_the_budget_is_the_largest_that_fits(limit: int, lowest: int) -> None:
    for most in range(0, 6000, 200):
        asked: list[int] = []

        def fits(budget: int, most: int = most, asked: list[int] = asked) -> bool:
            asked.append(budget)
            return budget <= most

        budgets = [b for b in range(lowest, max(limit, lowest) + 1, 256) if b <= most]
        assert largest_budget(fits, lowest, max(limit, lowest)) == max(budgets, default=None)
        assert len(asked) <= 12
        assert asked[0] == lowest
        assert len(set(asked)) == len(asked)


def only_fits(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Batches with more padded tokens than that on their longer side are too large."""

    def judge(_learner: Learner, batches: list[Any], _config: Any, **_options: Any) -> setup.TooLarge | None:
        for batch in batches:
            if max(batch.source.numel(), batch.target_in.numel()) > most:
                return setup.TooLarge(batch, Shortage(1 << 20, 3 << 30))
        return None

    monkeypatch.setattr(setup, "try_batches", judge)


@pytest.mark.slow
def test_the_budget_that_was_found_also_holds_after_resuming(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_fits(monkeypatch, 1300)
    batch = {"fit": True, "fit_limit": 5000, "fit_margin": 0.25}
    run = tmp_path / "run"
    train(run, tiny_experiment(tiny_folder, batch=batch, stop={"updates": 2}), console=QUIET)
    log = (run / "log.txt").read_text()
    assert "`training.batch.fit`: batches of 1,280 tokens fit into memory, 1,536 do not;" in log
    assert "`training.batch.max_tokens` is 768 (`fit_margin: 0.25`)" in log  # three quarters, down to a multiple of 256
    saved = load_experiment(run / "config.yaml")
    assert saved.training.batch == BatchConfig(max_tokens=768)
    monkeypatch.setattr("ziggurat.train.setup.fit_batches", lambda *_: pytest.fail("searched again"))
    longer = change_section(saved, {"training": {"stop": {"updates": 4}}}, "")
    train(run, longer, resume=True, console=QUIET)
    plain = tiny_experiment(tiny_folder, batch={"max_tokens": 768}, stop={"updates": 4})
    train(tmp_path / "plain", plain, console=QUIET)
    assert final_bytes(run, 4) == final_bytes(tmp_path / "plain", 4)


def test_a_resumed_run_keeps_the_budget_found_at_its_start(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call with the original configuration, as pipelines make it, does not repeat the search."""
    only_fits(monkeypatch, 1300)
    monkeypatch.setattr("ziggurat.train.objective.training_precision", lambda *_: "bf16")

    def experiment(updates: int) -> Experiment:
        batch = {"fit": True, "fit_limit": 5000, "fit_margin": 0.25}
        return tiny_experiment(tiny_folder, batch=batch, precision="auto", stop={"updates": updates})

    run = tmp_path / "run"
    train(run, experiment(1), console=QUIET)
    only_fits(monkeypatch, 600)
    monkeypatch.setattr("ziggurat.train.objective.training_precision", lambda *_: "fp32")
    train(run, experiment(2), resume=True, console=QUIET)
    saved = load_experiment(run / "config.yaml").training
    assert (saved.batch, saved.precision, saved.stop.updates) == (BatchConfig(max_tokens=768), "bf16", 2)
    with pytest.raises(ConfigError, match=r"training\.batch\.max_tokens: 768 -> 512"):
        train(
            run, tiny_experiment(tiny_folder, batch={"max_tokens": 512}, precision="auto"), resume=True, console=QUIET
        )


def found(experiment: Experiment) -> tuple[Experiment, str]:
    store = Store.open(experiment.data.store)
    return fit_batches(experiment, store, Learner(experiment, store, CPU))


def test_a_hopeless_search_reports_the_reason(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_fits(monkeypatch, 100)
    with pytest.raises(
        TrainingError, match=r"the largest to come, does not fit into memory: 1\.0 MiB more needed, with"
    ):
        found(tiny_experiment(tiny_folder, batch={"fit": True}))
    experiment = tiny_experiment(tiny_folder, batch={"fit": True, "fit_limit": 256})
    monkeypatch.setattr(setup, "BUDGET_STEP", 1024)
    with pytest.raises(ConfigError, match=r"`training\.batch\.fit_limit: 256` is too low: .*; set it to at least 1024"):
        found(experiment)


def test_a_corpus_that_fits_whole_ends_the_search(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_fits(monkeypatch, 10**9)
    fitted, message = found(tiny_experiment(tiny_folder, batch={"fit": True, "fit_margin": 0.0}))
    assert "more was not tried" in message
    store = Store.open(tiny_experiment(tiny_folder).data.store)
    longest = 1 + max(int(store.train.source_lengths.max()), int(store.train.target_lengths.max()))
    assert fitted.training.batch.max_tokens == -(-300 * longest // 256) * 256


def test_a_growing_model_is_tried_at_full_depth(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    depths: list[tuple[int, int]] = []
    monkeypatch.setattr(setup, "try_batches", lambda learner, *_, **__: depths.append(learner.depth))
    growth = {"stages": [{"layers": 1, "updates": 5}], "keep_stages": False}
    found(tiny_experiment(tiny_folder, batch={"fit": True, "fit_limit": 512}, growth=growth))
    assert set(depths) == {(2, 2)}


def test_only_a_lack_of_memory_is_caught_and_all_processes_agree() -> None:
    def fails() -> int:
        return len(torch.empty(1 << 60))

    short = within_memory(fails, CPU)
    assert isinstance(short, Shortage)
    assert short.wanted == 4 << 60
    assert short.in_use > 1 << 20
    assert within_memory(lambda: 5, CPU) == 5
    seen: list[bool] = []

    def another_failed(mine: bool) -> bool:
        seen.append(mine)
        return True

    elsewhere = within_memory(lambda: 5, CPU, another_failed)
    assert isinstance(elsewhere, Shortage)
    assert str(elsewhere) == "another process ran out of memory"
    here = within_memory(fails, CPU, another_failed)
    assert isinstance(here, Shortage)
    assert here.here
    assert seen == [False, True]
    with pytest.raises(ZeroDivisionError):
        within_memory(lambda: 1 // 0, CPU)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("DefaultCPUAllocator"), False),
    ],
)
def test_ways_of_saying_out_of_memory(error: Exception, expected: bool) -> None:
    assert out_of_memory(error) is expected


def test_sizes_are_readable() -> None:
    assert [readable(n) for n in (0, 1023, 1536, 5 << 20, 3 << 30)] == [
        "0 bytes",
        "1023 bytes",
        "1.5 KiB",
        "5.0 MiB",
        "3.0 GiB",
    ]
    assert str(Shortage(None, 1 << 30, message="could not")) == "could not, with 1.0 GiB in use"
    assert "2.0 GiB more needed, with 1.0 GiB in use" in str(Shortage(2 << 30, 1 << 30))
    assert replace(Shortage(None, 0), in_use=1 << 20).in_use == 1 << 20


def system(root: Path, meminfo: str, cgroup: str, files: dict[str, str]) -> tuple[Path, Path]:
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(meminfo)
    (root / "proc" / "self" / "cgroup").write_text(cgroup)
    for name, content in files.items():
        (root / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "groups" / name).write_text(content)
    return root / "proc", root / "groups"


MEMINFO = "MemTotal:  900 kB\nMemAvailable:   800 kB\n"


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {}, 800 << 10),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/b/memory.current": "5\n"}, 800 << 10),
        (
            "0::/a/b\n",  # the enclosing group has the lower limit; its reclaimable pages count as free
            {
                "a/b/memory.max": "700000\n",
                "a/b/memory.current": "100000\n",
                "a/b/memory.stat": "anon 1\ninactive_file 0\n",
                "a/memory.max": "500000\n",
                "a/memory.current": "450000\n",
                "a/memory.stat": "anon 1\ninactive_file 30000\n",
            },
            80000,
        ),
        (
            "4:cpu,memory:/x\n3:cpuset:/\n",
            {
                "memory/x/memory.limit_in_bytes": "9000\n",
                "memory/x/memory.usage_in_bytes": "8000\n",
                "memory/x/memory.stat": "inactive_file 1\ntotal_inactive_file 500\n",
            },
            1001,
        ),
    ],
)
def test_available_memory_is_the_minimum_over_machine_and_groups(
    cgroup: str, files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    assert available_memory(*system(tmp_path, MEMINFO, cgroup, files)) == expected


def test_unknown_memory_is_none(tmp_path: Path) -> None:
    assert available_memory(tmp_path, tmp_path) is None


CHILD = """
import resource, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from tests.conftest import tiny_experiment
from tests.train.runs import QUIET
from ziggurat.data.corpus import Store
from ziggurat.system.errors import TrainingError
from ziggurat.train import loop
from ziggurat.train.device import _address_space
from ziggurat.train.learner import Learner
from ziggurat.train.setup import fit_batches

folder, runs = Path(sys.argv[1]), Path(sys.argv[2])


def experiment(**batch):
    model = {"d_ff": 2048, "encoder": {"layers": 8}}
    return tiny_experiment(folder, model, batch=batch, stop={"updates": 1}, threads=1)


loop.train(runs / "warm", experiment(max_tokens=256), console=QUIET)
# Threads, their stacks and the pools of libraries are there from now on.
limit = _address_space() + (500 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
store, fit = Store.open(folder / "store"), experiment(fit=True)
learner = Learner(fit, store, torch.device("cpu"))
print(fit_batches(fit, store, learner)[0].training.batch.max_tokens)
try:
    loop.train(runs / "once", experiment(max_tokens=6000), console=QUIET)
except TrainingError as error:
    print(error)
"""


@pytest.mark.slow
def test_under_a_real_limit_a_budget_is_found_and_a_run_that_cannot_fit_leaves_no_folder(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """500 MiB are free, half of which is for the trial; ten inner states of 2,048 values take 80 KiB per token."""
    command = [sys.executable, "-c", CHILD, str(tiny_folder), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    budget, message = done.stdout.splitlines()
    assert int(budget) % 256 == 0
    assert 256 <= int(budget) <= (250 << 20) // (80 << 10)
    assert "sentence pairs of" in message
    assert "does not fit into memory" in message
    assert "in use; weights, gradients and moments alone take 10.6 MiB" in message
    assert "`training.batch.max_tokens` (6000;" in message
    assert not (tmp_path / "once").exists()


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_the_limit_is_a_share_of_free_memory_and_is_lifted_afterwards(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "available_memory", lambda: 64 << 30)
    monkeypatch.setattr(device, "_address_space", lambda: 5 << 30)
    before = resource.getrlimit(resource.RLIMIT_AS)
    with limited_to_available_memory(CPU, share):
        assert resource.getrlimit(resource.RLIMIT_AS) == ((5 << 30) + int(share * (64 << 30)), before[1])
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    with limited_to_available_memory(torch.device("cuda"), share):  # its reservations are not memory
        assert resource.getrlimit(resource.RLIMIT_AS) == before
