"""`ziggurat backtranslate`: what it prints and refuses, its result in `prepare`, and kills of the whole program."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.conftest import Ziggurat
from tests.cli.conftest import ziggurat as ziggurat
from tests.conftest import tiny_experiment
from tests.corpora.synthesis.conftest import here, tree
from ziggurat.corpora.jobs import job, launchers
from ziggurat.data.babel import generate
from ziggurat.data.corpus import Store
from ziggurat.data.prepare import prepare
from ziggurat.data.subword import load_tokenizers

COMMON = ("--method", "beam", "--max-ratio", "50", "--device", "cpu")


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work without other processes."""
    monkeypatch.setattr(launchers, "worker_pool", here)


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_prepare_takes_the_corpus_with_its_tag_and_weight(
    ziggurat: Ziggurat, reverse: Path, mono: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "bt"
    call = ("backtranslate", reverse, "--input", mono, "--out", out, *COMMON, "--weight", "0.5")
    status, printed, errors = ziggurat(*call)
    assert status == 0, errors
    assert re.search(r"42 of 42 lines  [\d.]+ lines/s  0 s left", errors)
    first, _, snippet = printed.partition("\n")
    pairs = int(re.fullmatch(r".*: (\d+) pairs of 42 lines; dropped: 1 empty, 1 encoding, 1 nul, .*", first)[1])
    corpora = yaml.safe_load((out / "corpus.yaml").read_text())["data"]["train"]
    assert yaml.safe_load(snippet.partition("\n")[2])["data"]["train"] == corpora
    assert [(c["weight"], c["tag"]) for c in corpora] == [(0.5, "<bt>")]

    data = tiny_experiment(tiny_folder).data.model_dump(mode="json")
    swapped = [{"source": c["target"], "target": c["source"]} for c in data["train"]]
    corpora = [*swapped, *corpora]
    train = {**data, "train": corpora, "source_language": "qhi", "target_language": "qlo", "dev": []}
    report = prepare(
        type(tiny_experiment(tiny_folder).data).model_validate({**train, "store": str(tmp_path / "store")})
    )
    assert [(c.name, c.kept) for c in report.corpora] == [("train.qhi", 300), ("back-translation", pairs)]
    store = Store.open(tmp_path / "store")
    assert [(c["weight"], c["tag"]) for c in store.manifest["corpora"]["train"]] == [(1.0, None), (0.5, "<bt>")]
    assert list(load_tokenizers(tmp_path / "store")[0].tags) == ["<bt>"]

    status, printed, _ = ziggurat(*call, "--json")
    assert json.loads(printed)["kept"] == pairs
    status, printed, _ = ziggurat(*call[:-2], "--tag", "", "--weight", "2")  # they change no pair
    assert yaml.safe_load((out / "corpus.yaml").read_text())["data"]["train"][0].get("tag", "none") == "none"
    assert (status, "weight: 2.0" in printed) == (0, True)


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_parts_and_their_merge(ziggurat: Ziggurat, reverse: Path, mono: Path, tmp_path: Path) -> None:
    call = ("backtranslate", reverse, "beam_size=2", mono, "--input", mono, "--out", tmp_path / "bt", *COMMON)
    bulk = ("bulk", "--shard-lines", "20")
    assert "part 1/2 of 5 shards is complete" in " ".join(ziggurat(*bulk, "--shard", "1/2", *call).err.split())
    status, _, errors = ziggurat(*bulk, "--merge", *call)
    assert status == 2
    assert "shard 1 of 5 is missing" in errors
    assert ziggurat(*bulk, "--shard", "2/2", *call).status == 0
    status, printed, _ = ziggurat(*bulk, "--merge", *call)
    assert status == 0
    assert "pairs of 84 lines" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "o"], "`--input FILE` is missing"),
        (["--input", "x"], "`--out FOLDER` is missing"),
        (["--input", "x", "--out", "o", "--method", "noise"], "choose one of sample, top-k, beam, noised-beam"),
        (["--input", "x", "--out", "o", "--tag", "bt"], "tag"),
        (["--input", "x", "--out", "o", "--weight", "0"], "weight"),
        (["--input", "x", "--out", "o"], "--input: no such file: x"),
        (["--input", "{mono}", "--out", "{mono}"], "exists and is not a folder of a `backtranslate`"),
        (["--input", "{mono}", "--out", "o", "beams=4"], "unknown key `decoding.beams`"),
        (["--input", "{mono}", "--out", "o", "seed=4"], "`--seed`"),
    ],
)
def test_mistakes_are_reported(
    arguments: list[str], message: str, ziggurat: Ziggurat, reverse: Path, mono: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    status, _, errors = ziggurat("backtranslate", reverse, *(a.replace("{mono}", str(mono)) for a in arguments))
    assert status == 2
    assert message in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("more", "wanted"), [((), "a model from `qhi` to `qlo`"), (("--forward", "--tag", ""), "text in `qlo`")]
)
def test_text_in_the_models_target_language_is_reported(
    more: tuple[str, ...], wanted: str, ziggurat: Ziggurat, reverse: Path, mono: Path, tmp_path: Path
) -> None:
    text = tmp_path / "news.qhi"
    text.write_bytes(mono.read_bytes().splitlines()[0] + b"\n")
    for name, said in (("news.qhi", True), ("news.qlo", False)):
        text = text.rename(tmp_path / name)
        call = ("backtranslate", reverse, "-i", text, "-o", tmp_path / name[5:], *COMMON, *more)
        status, _, errors = ziggurat(*call)
        assert status == 0, errors
        assert (f"is in `qhi` already: this takes {wanted}" in " ".join(errors.split())) == said


@pytest.mark.usefixtures("in_process")
def test_a_signal_determines_the_exit_status(
    ziggurat: Ziggurat, reverse: Path, mono: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = job.cut

    def signalled(*arguments: Any) -> Iterator[Any]:
        os.kill(os.getpid(), signal.SIGTERM)
        yield from cut(*arguments)

    monkeypatch.setattr(job, "cut", signalled)
    status, printed, errors = ziggurat("backtranslate", reverse, "-i", mono, "-o", tmp_path / "bt", *COMMON)
    assert (status, printed) == (143, "")
    assert "stopped; run the same command to continue" in errors


def start(reverse: Path, text: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    """Start the program in its own process group."""
    bulk = [sys.executable, "-m", "ziggurat", "bulk", "--shard-lines", "5", *more]
    return subprocess.Popen(
        [*bulk, "backtranslate", str(reverse), "-i", str(text), "-o", str(out), *COMMON],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def gone(group: int) -> bool:
    """Return whether the process group is empty, now or within a minute."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def long_text(tmp_path: Path) -> Path:
    """600 lines: 120 shards."""
    path = tmp_path / "mono.qlo"
    path.write_text("".join(pair[0] + "\n" for pair in generate(600, seed=3)), encoding="utf-8")
    return path


@pytest.mark.slow
def test_twenty_kills_give_the_same_corpus(reverse: Path, long_text: Path, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "bt"
    assert start(reverse, long_text, whole, "--workers", "1").wait() == 0
    draw = random.Random(20)
    for kill in range(20):
        process = start(reverse, long_text, out, "--workers", str(1 + kill % 3))
        wanted = len(list(out.rglob("*.json"))) + draw.randrange(9)  # two per shard, so that the kills spread
        while process.poll() is None and len(list(out.rglob("*.json"))) < wanted:
            time.sleep(0.005)
        time.sleep(draw.random() * 0.05)
        assert process.poll() is None, process.communicate()[0]  # otherwise it was not killed while working
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    done = len(list((out / "filtered").glob("*.json")))
    assert 20 < done < 120
    process = start(reverse, long_text, out, "--workers", "2")
    printed = process.communicate()[0]
    assert process.returncode == 0, printed
    assert "lines were done before" in printed
    found, expected = tree(out), tree(whole)
    del found["corpus.yaml"], expected["corpus.yaml"]  # it names the folder
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_by_a_signal_leaves_no_process_and_is_resumed(
    number: signal.Signals, reverse: Path, long_text: Path, tmp_path: Path
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "bt"
    parts = [start(reverse, long_text, whole, "--shard", f"{i}/3", "--workers", "1") for i in (1, 2, 3)]
    assert [part.wait() for part in parts] == [0, 0, 0]
    assert start(reverse, long_text, whole, "--merge").wait() == 0
    process = start(reverse, long_text, out, "--workers", "3")
    while len(list(out.rglob("filtered/*.json"))) < 3:
        time.sleep(0.01)
    if number != signal.SIGTERM:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    printed = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + number, printed
    assert "stopped; run the same command to continue" in printed
    assert "Traceback" not in printed
    assert gone(process.pid)
    assert start(reverse, long_text, out, "--workers", "3").wait() == 0
    found, expected = tree(out), tree(whole)
    del found["corpus.yaml"], expected["corpus.yaml"]
    assert found == expected


@pytest.mark.slow
def test_workers_end_with_a_parent_that_is_killed(reverse: Path, long_text: Path, tmp_path: Path) -> None:
    process = start(reverse, long_text, tmp_path / "bt", "--workers", "2")
    while not list(tmp_path.rglob("filtered/*.json")):
        time.sleep(0.01)
    process.kill()  # only the parent
    process.wait()
    assert gone(process.pid)
