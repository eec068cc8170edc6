"""A pipeline on a Ray cluster of two nodes, one of which leaves meanwhile: the result equals one machine's."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.corpora.jobs.test_ray import NODE
from tests.corpora.jobs.test_ray import cluster as cluster
from tests.corpora.jobs.test_ray import nodes as nodes
from tests.corpora.pipeline.test_pipeline_kills import handed_on, in_many_shards, kill, prepared, start

pytestmark = pytest.mark.slow


def test_killed_at_random_moments_on_a_cluster_that_changes(nodes: Any, tmp_path: Path) -> None:
    generator = random.Random(5)
    undisturbed = prepared(tmp_path, in_many_shards())
    cut, killed, gone, come = tmp_path / "cut", 0, 0, 0

    def done(step: str) -> int:
        return len(list((cut / "w" / step / "corpus").glob("[fs]*ed/*.json")))

    while True:
        before = done("backtranslate") + done("distil")
        process, end = start(cut, bulk=("--ray", nodes.address)), time.monotonic() + generator.uniform(2, 10)
        soon = generator.uniform(0, 1.5)
        while process.poll() is None and (killed == 6 or time.monotonic() < end):
            if gone == come and done(("backtranslate", "distil")[gone % 2]) >= 2 and gone < 2:
                nodes.remove_node(next(iter(nodes.worker_nodes)), allow_graceful=False)
                gone += 1
            if come < gone and done(("backtranslate", "distil")[come % 2]) >= 6:
                nodes.add_node(**NODE)
                come += 1
            if done("backtranslate") + done("distil") > before:  # on a fast machine everything is done in ten seconds
                end, before = min(end, time.monotonic() + soon), 1 << 30
            time.sleep(0.02)
        if process.poll() is not None:
            break
        kill(process, generator.choice([signal.SIGKILL, signal.SIGTERM]))
        killed += 1
    assert process.wait() == 0, (cut / "log").read_text()[-3000:]
    assert (gone, come) == (2, 2)
    assert killed > 3
    assert handed_on(cut) == undisturbed
