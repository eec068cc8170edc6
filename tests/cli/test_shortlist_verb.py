"""`ziggurat shortlist`, and translation with the file that it writes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.cli.conftest import Ziggurat
from tests.conftest import tiny_experiment
from ziggurat.config import load_experiment


@pytest.mark.slow
def test_translation_uses_a_shortlist_from_the_store(
    ziggurat: Ziggurat, trained: Path, text: Path, tmp_path: Path
) -> None:
    store = load_experiment(trained / "config.yaml").data.store
    file = tmp_path / "list"
    made = ziggurat("shortlist", store, "-o", file, "--best", 5, "--frequent", 7, "--json")
    assert made.status == 0, made.err
    report = json.loads(made.out)
    assert 0 < report["mean_candidates"] <= 6
    assert report["always"] >= 7
    found = ziggurat("translate", trained, "-i", text, f"shortlist={file}")
    assert found.status == 0, found.err
    assert len(found.out.splitlines()) == 2
    file.write_bytes(file.read_bytes()[:-1])
    refused = ziggurat("translate", trained, "-i", text, f"shortlist={file}")
    assert refused.status == 2
    assert "damaged" in refused.err


def test_impossible_shortlists_are_refused(ziggurat: Ziggurat, tmp_path: Path) -> None:
    refused = ziggurat("shortlist", tmp_path, "-o", tmp_path / "list")
    assert refused.status == 2
    assert "no store" in refused.err
    assert not (tmp_path / "list").exists()


def test_a_pipe_stays_a_pipe(ziggurat: Ziggurat, tiny_folder: Path, tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # so that the writer does not have to wait
    store = tiny_experiment(tiny_folder).data.store
    assert ziggurat("shortlist", store, "-o", pipe, "--best", 5, "--frequent", 7, "--pairs", 50).status == 0
    assert pipe.is_fifo()
    assert b"candidates" in os.read(reader, 1 << 16)
