"""Fixtures shared by the whole suite."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.context
import multiprocessing.forkserver
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.small import merged
from ziggurat.config import Experiment
from ziggurat.data.babel import generate
from ziggurat.data.prepare import prepare

# No deadline and no verdict on speed: busy cores must not make a test fail.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that chooses the device that `auto` means in all tests."""
    told = "run on the pretend accelerator (tools/pretend_device.py), without the tests that are about a CPU"
    parser.addoption("--pretend", action="store_true", help=told)


def pytest_sessionstart(session: pytest.Session) -> None:
    """With --pretend, give the machine the pretend device for the whole session."""
    if session.config.getoption("--pretend"):
        from tools.pretend_device import present

        context = present()
        context.__enter__()
        session.config.add_cleanup(lambda: context.__exit__(None, None, None))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that cannot run with --pretend, and put tests on a Ray cluster last.

    Ray's threads stay in the process, and a child forked while they run may hang.
    """
    if config.getoption("--pretend"):
        for item in items:
            if (mark := item.get_closest_marker("cpu")) is not None:
                item.add_marker(pytest.mark.skip(reason=f"about a CPU: {mark.args[0]}"))
    items.sort(key=lambda item: "nodes" in getattr(item, "fixturenames", ()))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude the objects of thousands of collected tests from later garbage collections."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _one_thread_per_worker() -> None:
    """Tests run in parallel (pytest -n), so each uses one core."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of the public corpora next to the repository; tests that need it are skipped if it is missing."""
    if not SHARED_DATA.is_dir():
        pytest.skip("corpora not present: no ../shared/data next to the repository")
    return SHARED_DATA


def tiny_experiment(folder: Path, model: Mapping[str, Any] | None = None, **training: Any) -> Experiment:
    """A model of a few thousand parameters on a few hundred embedded pairs; `model` changes it, `training` its run."""
    for split, first, count in (("train", 0, 300), ("dev", 300, 20)):
        pairs = list(generate(first + count, seed=5))[first:]
        for side, language in enumerate(("qlo", "qhi")):
            text = "".join(pair[side] + "\n" for pair in pairs)
            (folder / f"{split}.{language}").write_text(text, encoding="utf-8")
    corpora = {
        split: [{"source": str(folder / f"{split}.qlo"), "target": str(folder / f"{split}.qhi")}]
        for split in ("train", "dev")
    }
    defaults: dict[str, Any] = {
        "batch": {"max_tokens": 400},
        "schedule": {"peak": 3e-3, "warmup_updates": 4},
        "validation": {"every_updates": 1000},
        "checkpoint": {"every_updates": 1000},
        "stop": {"updates": 8},
        "tensorboard": False,
        "diagnostics": {"every_updates": None},
    }
    small = {
        "d_model": 16,
        "d_ff": 32,
        "heads": 2,
        "encoder": {"layers": 2},
        "decoder": {"layers": 2},
        "dropout": {"attention": 0.1, "activation": 0.1},
    }
    return Experiment.model_validate(
        {
            "data": {
                "source_language": "qlo",
                "target_language": "qhi",
                "store": str(folder / "store"),
                "subword": {"vocabulary_size": 400},
                **corpora,
            },
            "model": merged(small, model or {}),
            "training": {**defaults, **training},
            "decoding": {"max_length": {"extra": 5}},
        }
    )


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny corpus and its prepared store."""
    folder = tmp_path_factory.mktemp("tiny")
    prepare(tiny_experiment(folder).data)
    return folder


def forkserver() -> multiprocessing.context.ForkServerContext:
    """Return a context that forks processes from one that has imported everything; spawning takes seconds each."""
    context = multiprocessing.get_context("forkserver")
    heavy = [
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "torch._dynamo",
    ]  # optimisers import the last one
    context.set_forkserver_preload([*heavy, "ziggurat.train.loop", "ziggurat.cli.app", "tests.conftest"])
    # Start it now: later it and its forks would inherit the signals that a pool of workers blocks.
    multiprocessing.forkserver.ensure_running()
    return context


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pools fork their workers from one process that has imported everything."""
    context = forkserver()
    monkeypatch.setattr(multiprocessing, "get_context", lambda method=None: context)
