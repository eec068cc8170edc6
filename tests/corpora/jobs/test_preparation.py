"""`prepare` in bulk: the same store as from one process, byte for byte, from parts in any order and after kills."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.cli.conftest import Ziggurat, tiny_config
from tests.killing import tree
from ziggurat.config import Experiment, dump
from ziggurat.config.data import DataConfig
from ziggurat.corpora.jobs.job import Work
from ziggurat.corpora.jobs.launchers import StageFiles
from ziggurat.corpora.jobs.preparation import prepare_job
from ziggurat.data.babel import generate
from ziggurat.data.cleaning.cleaner import Comparisons, Examples, PairHashes
from ziggurat.data.encoding import EncodedBlock, compared, pack, unpack
from ziggurat.data.inputs import Corpus, Progress
from ziggurat.data.prepare import prepare
from ziggurat.data.table import Lists
from ziggurat.system.errors import DataError

BLOCK, SHARD = 5, 12


class Killed(BaseException):
    """A kill."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch, in_process: None) -> None:
    monkeypatch.setattr("ziggurat.data.readers.BLOCK_PAIRS", BLOCK)
    monkeypatch.setattr("ziggurat.data.cleaning.pair_score.LEAST_PAIRS", 50)


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    """Three corpora in six files, with duplicates within and across shards, tags, alignments and development text."""

    def written(name: str, seed: int, count: int) -> dict[str, str]:
        found = list(generate(count, seed=seed))
        found[3:3] = [("", ""), ("x" * 50, "y"), found[0]]
        for number, side in enumerate(("qlo", "qhi")):
            text = "".join(pair[number] + "\n" for pair in found)
            (tmp_path / f"{name}.{side}").write_text(text, encoding="utf-8")
        (tmp_path / f"{name}.align").write_text("".join("note\t0-0\n" if pair[0] else "note\t\n" for pair in found))
        return {side: str(tmp_path / f"{name}.{code}") for side, code in (("source", "qlo"), ("target", "qhi"))}

    for number in range(3):
        written(f"part-{number}", number, 20)
    again = written("again", 1, 31)
    near = Path(again["target"])
    lines = near.read_text().splitlines()
    lines[20:23] = [line + "!" for line in lines[20:23]]
    near.write_text("".join(line + "\n" for line in lines))
    for number, name in enumerate(("part-0", "part-1", "part-2", "again")):
        (tmp_path / f"{name}.score").write_text(
            "".join(f"{(n + number) % 10}\n" for n in range(34 if number == 3 else 23))
        )
    (tmp_path / "test.qhi").write_text("".join(pair[1] + "\n" for pair in [*generate(31, seed=1)][27:]))
    globbed = {"source": str(tmp_path / "part-*.qlo"), "target": str(tmp_path / "part-*.qhi")}
    return DataConfig.model_validate(
        {
            "source_language": "qlo",
            "target_language": "qhi",
            "store": str(tmp_path / "store"),
            "train": [
                {
                    **{**globbed, "tag": "<t>", "alignment": str(tmp_path / "part-*.align")},
                    "alignment_column": 1,
                    "scores": [{"path": str(tmp_path / "part-*.score"), "min": 2}],
                },
                {
                    **again,
                    "weight": 2.0,
                    "filters": {"repair": True, "pair_score": {"min": 0.6}, "max_pieces": 60, "held_out": "sides"},
                    "scores": [{"path": str(tmp_path / "again.score"), "min": 1}],
                },
            ],
            "dev": [written("dev", 9, 7)],
            "held_out": [str(tmp_path / "test.qhi")],
            "filters": {
                **{"duplicates": True, "max_length_ratio": 3.0, "max_pieces": 40},
                **{"near_duplicates": {"memory": 1}, "pair_score": {"min": 0.001, "pairs": 200}},
            },
            "subword": {"vocabulary_size": 400, "regularisation": {}},
            "alignment": {"compute": "hmm"},
        }
    )


@pytest.fixture
def store_of_one_process(config: DataConfig, tmp_path: Path) -> dict[str, object]:
    """The store that one process makes."""
    prepare(config)
    found = tree(tmp_path / "store")
    (tmp_path / "store").rename(tmp_path / "whole")
    return found


def do(config: DataConfig, tmp_path: Path, shown: Progress = lambda *_: None, **work: Any) -> Any:
    """Return the report; None for a part."""
    return prepare_job(config, tmp_path / "job", Work(**work), progress=shown, shard_pairs=SHARD).report


def test_one_call_gives_the_store_of_one_process(
    config: DataConfig, store_of_one_process: dict[str, object], tmp_path: Path
) -> None:
    seen: list[tuple[int, int, int | None]] = []
    phases: list[tuple[str, int, int | None]] = []
    report = do(config, tmp_path, lambda *of: phases.append(of), progress=lambda *counts: seen.append(counts))
    assert tree(tmp_path / "store") == store_of_one_process
    assert ("merge train", 103, 103) in phases
    assert phases[-1] == ("merge dev", 10, 10)
    total = 3 * 23 + 34 + 10
    assert seen[0] == (0, 0, total)
    assert seen[-1] == (0, total, total)
    assert len(seen) == 1 + 3 * 2 + 3 + 1
    first, again, _ = report.corpora
    assert {"empty", "length_ratio", "duplicate"} <= set(first.dropped)
    assert again.dropped["duplicate"] >= 5  # it repeats a file of the first
    assert {"near_duplicate", "score", "held_out", "pair_score"} <= set(again.dropped)
    assert (first.aligned, again.aligned) == (first.kept, again.kept)
    assert do(config, tmp_path).reused


@pytest.mark.slow
@pytest.mark.parametrize("parts", [2, 7])
def test_parts_in_any_order_give_the_same_store(
    parts: int, config: DataConfig, store_of_one_process: dict[str, object], tmp_path: Path
) -> None:
    """Five files: two parts take whole files, seven share their shards."""
    with pytest.raises(DataError, match="no part is done; run the same command without `--merge`"):
        do(config, tmp_path, only_merge=True)
    made = {}
    for part in range(parts - 1, 0, -1):
        assert do(config, tmp_path, part=(part, parts)) is None
        made[part] = len(list((tmp_path / "job").glob("encoded/*.arrow")))
    assert made == ({1: 5} if parts == 2 else {6: 0, 5: 1, 4: 3, 3: 5, 2: 7, 1: 9})
    with pytest.raises(DataError, match=r"of 113 pairs are encoded; run the same command without `--merge`"):
        do(config, tmp_path, only_merge=True)
    assert not (tmp_path / "store").exists()
    do(config, tmp_path, part=(0, parts))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "job" / "encoded").iterdir()}
    assert do(config, tmp_path, only_merge=True).kept > 0
    assert tree(tmp_path / "store") == store_of_one_process
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "job" / "encoded").iterdir()} == before


def test_a_part_reads_only_its_files(config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a part knows how many pairs it has, unless parts share files."""
    do(config, tmp_path, part=(0, 5))
    read: list[list[tuple[Path, ...]]] = []
    seen: list[tuple[int, int, int | None]] = []
    blocks = Corpus.blocks

    def noted(corpus: Corpus, words: Any) -> Any:
        read.append(corpus.reader.files)
        return blocks(corpus, words)

    def part(number: int, parts: int) -> None:
        do(config, tmp_path, part=(number, parts), progress=lambda *counts: seen.append(counts))

    monkeypatch.setattr(Corpus, "blocks", noted)
    part(3, 5)
    assert [[path.name for path in part] for part in read[0]] == [["again.qlo", "again.qhi"]]
    assert seen == [(0, now, 34) for now in (0, 15, 30, 34)]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "job" / "encoded").iterdir()}
    part(3, 5)  # none is repeated
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "job" / "encoded").iterdir()} == before
    assert len(read) == 1
    with pytest.raises(DataError, match=r"57 of 113 pairs are encoded; run the same command without `--merge`"):
        do(config, tmp_path, only_merge=True)
    sorted((tmp_path / "job").glob("encoded/*.json"))[-1].unlink()
    seen.clear()
    part(3, 5)
    assert seen == [(30, 0, 34), (30, 4, 34)]
    seen.clear()
    part(3, 6)
    assert {total for *_, total in seen} == {None}


@pytest.mark.slow
def test_a_kill_at_any_shard_gives_the_same_store(
    config: DataConfig, store_of_one_process: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = StageFiles.write
    for moment in range(1, 99):
        count = 0

        def killed(self: StageFiles, *arguments: Any, moment: int = moment, **counts: Any) -> Any:
            nonlocal count
            count += 1
            if count == 3:
                raise Killed
            return write(self, *arguments, **counts)

        with monkeypatch.context() as patch:
            patch.setattr(StageFiles, "write", killed)
            try:
                do(config, tmp_path)
            except Killed:
                continue
        break
    assert moment == 5  # ten shards, two at a time, and one merge
    assert tree(tmp_path / "store") == store_of_one_process


PROGRAM = """
import sys
from ziggurat.data.cleaning import pair_score
from ziggurat.cli import main
from ziggurat.data import readers
from ziggurat.corpora.jobs import preparation
pair_score.LEAST_PAIRS = 50
readers.BLOCK_PAIRS = 5
preparation.prepare_job.__kwdefaults__["shard_pairs"] = 12
main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("shards", [(), ("1/2", "2/2")])
def test_kills_at_random_moments_give_the_same_store(
    shards: tuple[str, ...], config: DataConfig, store_of_one_process: dict[str, object], tmp_path: Path
) -> None:
    """It is killed while it learns, encodes or merges, as one call or as two parts at once."""
    file = tmp_path / "data.yaml"
    file.write_text(dump(Experiment(data=config)))
    bulk = [sys.executable, "-c", PROGRAM, "bulk", "--job", str(tmp_path / "job"), "--workers", "2"]
    command = ["prepare", str(file)]
    calls = [[*bulk, "--shard", shard, *command] for shard in shards] or [[*bulk, *command]]
    draw, alive = random.Random(len(shards)), 0
    for _ in range(16):
        if (tmp_path / "store").exists():  # it finished: start over
            shutil.rmtree(tmp_path / "store")
            shutil.rmtree(tmp_path / "job")
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        started = [subprocess.Popen(call, start_new_session=True, **quiet) for call in calls]
        time.sleep(draw.uniform(0.5, 6.0))
        for process in started:
            alive += process.poll() is None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert alive > 3
    for call in [*calls, [*bulk, "--merge", *command]]:
        done = subprocess.run(call, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert tree(tmp_path / "store") == store_of_one_process
    assert not list((tmp_path / "job").rglob("*.tmp"))


def test_a_store_in_the_way_is_reported_before_anything_is_done(config: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "mine").touch()
    with pytest.raises(DataError, match="holds something other than a store"):
        do(config, tmp_path)
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize("address", ["127.0.0.1:9", "nowhere", "auto"])
def test_a_missing_cluster_is_reported_before_anything_is_learnt(
    address: str, config: DataConfig, ziggurat: Ziggurat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # where no cluster is recorded
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    file = tmp_path / "data.yaml"
    file.write_text(dump(Experiment(data=config)))
    bulk = ("bulk", "--job", tmp_path / "job", "--ray", address)
    told = ziggurat(*bulk, "prepare", file)
    assert (told.status, f"`--ray {address}`: no cluster there" in " ".join(told.err.split())) == (2, True), told.err
    assert not (tmp_path / "job").exists()
    merge = ziggurat(*bulk, "--merge", "prepare", file)  # needs no cluster
    assert (merge.status, "no part is done" in " ".join(merge.err.split())) == (2, True), merge.err


def test_a_file_that_changes_while_it_is_encoded_is_reported(config: DataConfig, tmp_path: Path) -> None:
    """A call for a part notices it, too; no later call could."""

    def changed(before: int, now: int, total: int | None) -> None:
        with (tmp_path / "dev.qhi").open("r+b") as file:
            file.write(b"X")

    with pytest.raises(DataError, match=r"dev\.qhi: changed while being read; start again in another folder than"):
        do(config, tmp_path, part=(0, 2), progress=changed)
    with pytest.raises(DataError, match="was started with other settings or files"):
        do(config, tmp_path)


def test_a_damaged_shard_is_refused_by_name(config: DataConfig, tmp_path: Path) -> None:
    do(config, tmp_path, part=(0, 1), only_merge=False)
    for path in (tmp_path / "store").iterdir():
        path.unlink()
    shard = sorted((tmp_path / "job" / "encoded").glob("*.arrow"))[2]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DataError, match=rf"{shard.name}: damaged"):
        do(config, tmp_path)
    assert not list(tmp_path.glob("store/*"))


@pytest.mark.slow
def test_the_verb(ziggurat: Ziggurat, tiny_folder: Path, tmp_path: Path) -> None:
    config, bulk = tiny_config(tmp_path, tiny_folder), ("bulk", "--job", tmp_path / "job")
    plain, store = f"data.store={tmp_path / 'plain'}", f"data.store={tmp_path / 'store'}"
    one = ziggurat("prepare", config, plain)
    told = ziggurat(*bulk, "--shard", "1/2", "prepare", config, store)
    assert (told.status, told.out, "part 1/2 is complete" in " ".join(told.err.split())) == (0, "", True)
    assert ziggurat(*bulk, "--shard", "2/2", "prepare", config, store).status == 0
    other = ziggurat(*bulk, "--merge", "prepare", config, store, "data.unicode=nfkc")
    assert (other.status, 'unicode ("none" -> "nfkc")' in " ".join(other.err.split())) == (2, True), other.err
    merged = ziggurat(*bulk, "--merge", "prepare", config, store)
    assert merged.status == 0, merged.err
    assert merged.out.partition("store  ")[0] == one.out.partition("store  ")[0]
    names = {path.name for path in (tmp_path / "plain").iterdir()} - {"manifest.json"}  # it names the folder
    assert all((tmp_path / "store" / n).read_bytes() == (tmp_path / "plain" / n).read_bytes() for n in names)


numbers = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=4), max_size=8)


def listed(rows: list[list[int]]) -> Lists:
    return (
        np.array([number for row in rows for number in row], np.int32),
        np.array(list(map(len, rows)), np.int32),
    )


def rows_of(lists: Lists) -> list[list[int]]:
    ends = np.cumsum(lists[1])
    return [lists[0][end - length : end].tolist() for end, length in zip(ends, lists[1], strict=True)]


@given(st.lists(numbers, min_size=1, max_size=3), st.booleans(), st.booleans(), st.data())
def test_blocks_are_packed_and_selected_as_they_are(
    blocks: list[list[list[int]]], full: bool, sketched: bool, data: st.DataObject
) -> None:
    text = st.text("aé字\U0001f600\0\t", max_size=3)

    def made(corpus: int, rows: list[list[int]]) -> EncodedBlock:
        texts = data.draw(st.lists(text, min_size=len(rows), max_size=len(rows)))
        keys = np.array(data.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows))), np.uint64)
        bands = np.arange(8 * len(rows), dtype=np.uint64).reshape(-1, 8) << np.uint64(50)
        traces = PairHashes(keys, bands if sketched else None, bands[:, 2:4])
        more: dict[str, Any] = {"texts": (texts, texts[::-1]), "links": listed(rows[::-1])} if full else {}
        counts, examples = Counter({"empty": corpus}), Examples({"empty": [(2**64 - 1, "é", "\ufffd")]})
        return EncodedBlock(
            corpus, len(rows) + corpus, counts, corpus, examples, traces if full else None, listed(rows), listed(rows),
            **more,
        )  # fmt: skip

    def spelt(block: EncodedBlock, place: int) -> tuple[str, str]:
        return str(rows_of(block.source)[place]), "x"

    before = [made(corpus, rows) for corpus, rows in enumerate(blocks)]
    corpora = [{"source": "a", "target": "b"}] * 3
    settings = {"source_language": "a", "target_language": "b", "store": "s", "train": corpora}
    seen = Comparisons(DataConfig.model_validate({**settings, "filters": {"duplicates": True}}))
    known = set[int]()
    for block, again, rows in zip(before, unpack(pack(before)), blocks, strict=True):
        assert (again.corpus, again.read, again.dropped) == (block.corpus, block.read, block.dropped)
        assert (again.repaired, again.examples.record()) == (block.repaired, block.examples.record())
        assert rows_of(again.source) == rows_of(again.target) == rows
        if not full:
            assert (again.traces, again.texts, again.links) == (None, None, None)
            assert compared(again, seen, spelt) is again
            continue
        assert again.traces is not None
        assert again.links is not None
        assert block.traces is not None
        for one, other in zip(block.traces, again.traces, strict=True):
            assert (one is None) == (other is None)
            assert one is None or (one.dtype == other.dtype and one.tolist() == other.tolist())
        assert again.texts == block.texts
        assert rows_of(again.links) == rows[::-1]
        stay: list[bool] = []
        for key in block.traces.keys.tolist():
            stay.append(key not in known)
            known.add(key)
        left = compared(again, seen, spelt)
        assert rows_of(left.source) == [row for row, kept in zip(rows, stay, strict=True) if kept]
        assert left.dropped["duplicate"] == stay.count(False)
        gone = {(int(k), str(row), "x") for k, row, kept in zip(block.traces.keys, rows, stay, strict=True) if not kept}
        assert gone.issuperset(left.examples.record().get("duplicate", []))
        assert left.texts == tuple(
            [t for t, kept in zip(side, stay, strict=True) if kept] for side in block.texts or ()
        )
    mask: NDArray[np.bool_] = np.ones(len(blocks[0]), np.bool_)
    assert before[0].select(mask) is before[0]
