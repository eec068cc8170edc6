"""Jobs on a Ray cluster of two nodes with one CPU each: nodes that leave and join, workers and callers that are
killed.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.corpora.synthesis.conftest import mono as mono
from tests.corpora.synthesis.conftest import reverse as reverse
from tests.killing import tree
from ziggurat.config.data import DataConfig
from ziggurat.corpora.jobs import launchers
from ziggurat.corpora.jobs.job import Work
from ziggurat.corpora.jobs.launchers import Manifest, Shard, ray_actors
from ziggurat.corpora.jobs.preparation import prepare_job
from ziggurat.corpora.synthesis.backtranslation import BackTranslationJob, back_translate
from ziggurat.corpora.synthesis.lines import PairFilter
from ziggurat.data.babel import generate
from ziggurat.data.prepare import prepare
from ziggurat.system.errors import ConfigError, DataError

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'ziggurat-mt[ray]'")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]
NODE = {"num_cpus": 1, "object_store_memory": 100 << 20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head and another node, each with one CPU."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # Workers get functions from this module, and find Ray where we do.
        places = [str(ROOT), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(places))
        made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        try:
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


@pytest.fixture
def nodes(cluster: Any) -> Any:
    """The cluster with its two nodes."""
    while len(cluster.list_all_nodes()) < 2:
        cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    return cluster


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    """A corpus of 2,000 pairs with duplicates."""
    found = [*generate(1500, seed=3), *generate(500, seed=3)]
    for number, side in enumerate(("qlo", "qhi")):
        (tmp_path / f"train.{side}").write_text("".join(f"{pair[number]}\n" for pair in found), encoding="utf-8")
    return DataConfig.model_validate(
        {
            "source_language": "qlo",
            "target_language": "qhi",
            "store": str(tmp_path / "store"),
            "train": [{"source": str(tmp_path / "train.qlo"), "target": str(tmp_path / "train.qhi")}],
            "filters": {"duplicates": True},
            "subword": {"vocabulary_size": 400},
        }
    )


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ziggurat.data.readers.BLOCK_PAIRS", 10)


def on(cluster: Any, workers: int | None = 2, **work: Any) -> Work:
    return Work(partial(ray_actors, cluster.address, workers), **work)


@pytest.mark.usefixtures("small_blocks")
def test_prepare_on_two_nodes_gives_the_store_of_one_process(nodes: Any, data: DataConfig, tmp_path: Path) -> None:
    prepare(data)
    whole = tree(tmp_path / "store")
    (tmp_path / "store").rename(tmp_path / "whole")
    report = prepare_job(data, tmp_path / "job", on(nodes, None), shard_pairs=100).report
    assert report is not None
    assert report.kept == 1500
    assert tree(tmp_path / "store") == whole


@pytest.mark.usefixtures("small_blocks")
def test_a_node_that_leaves_mid_run_and_one_that_joins(nodes: Any, data: DataConfig, tmp_path: Path) -> None:
    prepare(data)
    whole = tree(tmp_path / "store")
    (tmp_path / "store").rename(tmp_path / "whole")
    gone: list[Any] = []
    come: list[Any] = []

    def disturbed(before: int, now: int, total: int | None) -> None:
        if now > 300 and not gone:
            gone.append(nodes.worker_nodes.copy().pop())
            nodes.remove_node(gone[0], allow_graceful=False)
        if now > 900 and not come:
            come.append(nodes.add_node(**NODE))

    prepare_job(data, tmp_path / "job", on(nodes, progress=disturbed), shard_pairs=50)
    assert len(gone) == len(come) == 1
    assert tree(tmp_path / "store") == whole


def test_workers_killed_at_random_give_the_same_corpus(nodes: Any, reverse: Path, mono: Path, tmp_path: Path) -> None:
    job = partial(
        BackTranslationJob,
        (str(reverse),),
        (str(mono),),
        method="noised-beam",
        device="cpu",
        shard_lines=2,
        filters=PairFilter(max_ratio=50.0),
        decoding={"beam_size": 4},
    )
    back_translate(job(tmp_path / "whole"), Work())
    draw = random.Random(4)
    killed: list[int] = []

    def disturbed(before: int, now: int, total: int | None) -> None:
        if now >= 6 * (len(killed) + 1) and len(killed) < 3:
            killed.append(draw.choice(actors()))
            os.kill(killed[-1], signal.SIGKILL)

    report = back_translate(job(tmp_path / "bt"), on(nodes, progress=disturbed)).report
    assert report is not None
    assert len(killed) == 3
    assert tree(tmp_path / "bt") == tree(tmp_path / "whole")


def actors() -> list[int]:
    """Return the processes of actors on our nodes, found by the title that Ray gives them."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found += [process.pid] if process.cmdline()[:1] == ["ray::_Actor"] else []
    return found


def test_a_caller_killed_at_random_moments_ends_with_the_same_links(nodes: Any, tmp_path: Path) -> None:
    text = tmp_path / "text.qlo"
    text.write_text("".join(pair[0] + "\n" for pair in generate(400, seed=8)), encoding="utf-8")
    target = tmp_path / "text.qhi"
    target.write_text("".join(pair[1] + "\n" for pair in generate(400, seed=8)), encoding="utf-8")
    ziggurat, align = [sys.executable, "-m", "ziggurat"], ["align", str(text), str(target)]
    subprocess.run([*ziggurat, *align, "-o", str(tmp_path / "whole")], check=True, cwd=ROOT)
    bulk = ["bulk", "--job", str(tmp_path / "job"), "--ray", nodes.address, "--shard-lines", "5"]
    command = [*ziggurat, *bulk, *align, "-o", str(tmp_path / "out")]
    draw = random.Random(7)
    for _ in range(4):
        process = subprocess.Popen(command, cwd=ROOT)
        wanted = len(list(tmp_path.glob("job/align/*.json"))) + draw.randrange(1, 8)
        while process.poll() is None and len(list(tmp_path.glob("job/align/*.json"))) < wanted:
            time.sleep(0.01)
        assert process.poll() is None
        process.kill()
        process.wait()
    assert not (tmp_path / "out").exists()
    assert 4 <= len(list(tmp_path.glob("job/align/*.json"))) < 80
    done = subprocess.run(command, cwd=ROOT, check=False)
    assert done.returncode == 0
    assert (tmp_path / "out").read_bytes() == (tmp_path / "whole").read_bytes()


def refused(shard: Shard[Any]) -> Manifest:
    raise DataError(f"shard {shard.index} cannot be")


def deadly(shard: Shard[Any]) -> Manifest:
    os._exit(1)


@pytest.mark.parametrize(
    ("do", "message"), [(refused, "^shard 0 cannot be$"), (deadly, "shard 0 killed its worker 5 times")]
)
def test_errors_in_workers_are_errors_of_the_package(
    do: Callable[[Shard[Any]], Manifest], message: str, nodes: Any
) -> None:
    with ray_actors(nodes.address, 1) as run, pytest.raises(DataError, match=message):
        list(run(do, iter([Shard(0, 0, [])]), lambda: False))


@pytest.mark.parametrize("address", ["127.0.0.1:9", "nowhere", "ray://127.0.0.1:9", "auto"])
def test_a_missing_cluster_is_reported(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    ray.shutdown()
    with pytest.raises(ConfigError, match="no cluster there"), ray_actors(address, 1):
        pass


@pytest.mark.parametrize("workers", [None, 3])
def test_more_than_a_node_has_is_reported(workers: int | None, nodes: Any) -> None:
    """Two nodes with one CPU each cannot hold an actor that needs two."""
    with pytest.raises(ConfigError, match="but the nodes have 1 and 0;"), ray_actors(nodes.address, workers, cpus=2):
        pass


def test_a_folder_that_workers_cannot_see_is_reported(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getcwd", lambda: "/no/such")
    with (
        pytest.raises(ConfigError, match=r"FileNotFoundError.*every node must see /no/such under"),
        ray_actors(nodes.address, 2) as run,
    ):
        list(run(refused, iter([Shard(0, 0, [])]), lambda: False))


def killed_for_good(shard: Shard[Any]) -> Manifest:
    ray.kill(ray.get_runtime_context().current_actor)
    time.sleep(60)
    raise DataError("it lives")


def test_an_actor_that_does_not_restart_gets_no_more_calls(nodes: Any) -> None:
    with ray_actors(nodes.address, 1) as run, pytest.raises(DataError, match=r"the last worker .* will not restart"):
        list(run(killed_for_good, iter([Shard(0, 0, [])]), lambda: False))


def done(shard: Shard[Any]) -> Manifest:
    return Manifest("", shard.index, "", "", 0, 0, 0)


def test_workers_that_do_not_start_are_reported(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other actors occupy both CPUs."""
    monkeypatch.setattr(launchers, "_SILENT_SECONDS", 1)
    with ray_actors(nodes.address, 2) as others:
        next(others(done, iter([Shard(0, 0, []), Shard(1, 1, [])]), lambda: False))
        end = time.monotonic() + 3
        with (
            pytest.warns(UserWarning, match="no worker on the Ray cluster has started for 1 s"),
            ray_actors(nodes.address, 1) as run,
        ):
            assert not list(run(done, iter([Shard(0, 0, [])]), lambda: time.monotonic() > end))
