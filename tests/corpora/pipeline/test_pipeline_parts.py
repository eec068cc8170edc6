"""Parts of a pipeline step, done by several calls in one folder: who waits for whom, and the result."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.corpora.pipeline.conftest import changed, whole
from tests.corpora.pipeline.test_pipeline_engine import Fake
from tests.corpora.pipeline.test_pipeline_kills import handed_on
from tests.corpora.pipeline.test_pipeline_verb import Call
from tests.corpora.pipeline.test_pipeline_verb import ziggurat as ziggurat
from tests.killing import run_and_kill
from ziggurat.corpora.pipeline.engine import Pipeline, Selection, ShardedRun, shared_step
from ziggurat.corpora.pipeline.step import BEGUN, MANIFEST, Step
from ziggurat.system.errors import ConfigError, DataError
from ziggurat.system.files import write_atomically


class Shards(Fake):
    """A step whose four results are its shards: a part does every n-th of them, a full call whatever is missing."""

    part = (0, 1)
    meanwhile: Callable[[], object] = staticmethod(lambda: None)

    def work(self, folder: Path) -> None:
        self.ran.append(f"{self.name} {self.part[0]}")
        (folder / "out").mkdir(exist_ok=True)
        for shard in range(self.part[0], 4, self.part[1]):
            if not (folder / "out" / str(shard)).exists():
                write_atomically(folder / "out" / str(shard), f"{self.setting} {shard}".encode())
        self.meanwhile()


def steps(
    ran: list[str], part: tuple[int, int] = (0, 1), setting: int = 0, device: str = "cpu", **job: object
) -> tuple[Step, ...]:
    """A step, one that is a job, and one after it."""
    shared = Shards("job", setting=setting, ran=ran)
    shared.part = part
    for name, value in job.items():
        setattr(shared, name, value)
    first, last = (Fake(name, ran=ran).step() for name in ("first", "last"))
    return (
        first,
        changed(shared.step(), is_job=True, after={"first": ["out/*"]}, machine=lambda: {"device": device}),
        changed(last, after={"job": ["out/*"]}),
    )


def shards(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("w/job/out/*"))


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the step before the job is done."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    Pipeline(tmp_path / "w", steps([])).run(Selection(last="first"))
    return tmp_path


def part(folder: Path, number: int, of: int = 2, **how: object) -> list[str]:
    """Do a part; return what ran."""
    ran: list[str] = []
    found = steps(ran, (number, of), **how)  # type: ignore[arg-type]
    assert ShardedRun(folder / "w", found).run_part(found[1]) is None
    return ran


def test_parts_are_merged_by_the_next_call(begun: Path) -> None:
    assert part(begun, 1) == ["job 1"]
    assert shards(begun) == ["1", "3"]
    assert not (begun / "w/job" / MANIFEST).exists()
    record = (begun / "w/job" / BEGUN).read_bytes()
    assert part(begun, 0) == ["job 0"]
    assert shards(begun) == ["0", "1", "2", "3"]
    assert (begun / "w/job" / BEGUN).read_bytes() == record
    states = {found.step.name: found.state for found in Pipeline(begun / "w", steps([])).statuses()}
    assert states == {"first": "done", "job": "begun", "last": "new"}
    end = Pipeline(begun / "w", steps([])).run()
    assert end.done == ("job", "last")
    assert Pipeline(begun / "w", steps([])).statuses()[1].spent.calls == 3
    assert part(begun, 0) == []  # it is done


def test_parts_with_other_settings_restart_when_none_is_running(begun: Path) -> None:
    def other() -> None:
        with pytest.raises(
            DataError, match=r"job: settings changed .*other shards are still running with the old settings"
        ):
            part(begun, 0, setting=1)

    part(begun, 1, meanwhile=other)
    assert shards(begun) == ["1", "3"]
    assert part(begun, 0, setting=1) == ["job 0"]
    assert shards(begun) == ["0", "2"]  # the earlier result is gone
    assert (begun / "w/job/out/0").read_bytes() == b"1 0"


def test_parts_on_machines_of_two_kinds_do_not_discard_each_other(begun: Path) -> None:
    part(begun, 1, device="auto: cuda")
    with pytest.raises(DataError, match="job: was started where `device: auto` is cuda, here it is cpu"):
        part(begun, 0, device="auto: cpu")
    assert shards(begun) == ["1", "3"]
    assert part(begun, 0, device="cpu") == ["job 0"]  # as in the current file
    assert shards(begun) == ["0", "2"]


def test_full_calls_and_parts_wait_for_each_other(begun: Path) -> None:
    said: list[str] = []

    def both() -> None:
        said.append("part")
        with pytest.raises(DataError, match="another pipeline, or a part of a step, is at work here"):
            Pipeline(begun / "w", steps([])).run()
        assert part(begun, 1, 3) == ["job 1"]  # parts do not wait

    part(begun, 0, 3, meanwhile=both)
    assert shards(begun) == ["0", "1", "3"]

    def alone() -> None:
        said.append("whole")
        with pytest.raises(DataError, match="another pipeline, or a part of a step, is at work here"):
            part(begun, 2, 3)

    Pipeline(begun / "w", steps([], meanwhile=alone)).run()
    assert said == ["part", "whole"]


def test_parts_that_start_at_once_agree(begun: Path) -> None:
    threads = [threading.Thread(target=part, args=(begun, number, 4)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shards(begun) == ["0", "1", "2", "3"]


def test_steps_before_it_must_be_done(begun: Path) -> None:
    (begun / "w/first" / MANIFEST).unlink()
    with pytest.raises(DataError, match=r"w/first: not done yet; parts of `job` start .*: `--until first`, without"):
        part(begun, 0)
    assert not (begun / "w/job").exists()
    with pytest.raises(DataError, match=r"nowhere/w/first: not done yet"):
        part(begun / "nowhere", 0)


def test_only_jobs_have_parts() -> None:
    for name, message in (
        (None, "add `--only STEP`; those that"),
        ("last", "done as a whole"),
        ("none", "no such step"),
    ):
        with pytest.raises(ConfigError, match=f"{message}.*can be done in parts are: job"):
            shared_step(steps([]), name)


def test_a_part_killed_at_any_file_operation(begun: Path) -> None:
    for operation in range(1, 400):
        killed = run_and_kill(lambda: part(begun, 0), str(begun), operation)
        assert not (begun / "w/job" / MANIFEST).exists()
        if not killed:
            break
        if operation % 3 == 0:
            part(begun, 0)
            Pipeline(begun / "w", steps([])).run(Selection("job", "job"))
            assert shards(begun) == ["0", "1", "2", "3"]
            (begun / "w/job").rename(begun / f"earlier-{operation}")
    else:
        raise AssertionError("it never ends")
    assert part(begun, 0) == ["job 0"]


def test_parts_of_back_translation_give_the_corpus_of_one_call(
    place: Path, ziggurat: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    after = ("distillation", "filter", "alignment", "quantisation", "shortlist", "export", "evaluation")
    content = whole(**dict.fromkeys((*after, "student")))
    content["backtranslation"]["shard_lines"] = 7
    (place / "my.yaml").write_text(yaml.safe_dump(content))
    step = ("--only", "backtranslate")
    no_ray = "`ray` is not installed" if find_spec("ray") is None else "no cluster there"
    for (part, arguments), said in (
        (
            ("1/2", ()),
            "add `--only STEP`; those that can be done in parts are: backward-data, backtranslate, teacher-data",
        ),
        (("1/2", ("--only", "clean")), "`--only clean` with `--shard`: this step is done as a whole"),
        (("3/2", step), "`--shard 3/2`: write i/n"),
        (("1/2", (*step, "--force", "backtranslate")), "`--force` with `--shard`"),
        (("1/2", step), "w/sets: not done yet; parts of `backtranslate` start when all earlier steps are done"),
    ):
        status, _, err = ziggurat("bulk", "--shard", part, "pipeline", "my.yaml", *arguments)
        assert (status, said in err, "Traceback" in err) == (2, True, False), err
    assert no_ray in ziggurat("bulk", "--ray", "127.0.0.1:9", "pipeline", "my.yaml")[2]
    assert ziggurat("pipeline", "my.yaml", "--until", "backward")[0] == 0
    shutil.copytree(place, place / "whole")
    for number in (2, 1):
        status, _, err = ziggurat("bulk", "--shard", f"{number}/2", "pipeline", "my.yaml", *step)
        assert status == 0
        assert f"part {number}/2 of step backtranslate is done; the same command without `--only` and" in err
        assert not Path("w/backtranslate", MANIFEST).exists()
    assert len(list(Path("w/backtranslate/corpus/filtered").glob("*.json"))) == 5
    status, _, err = ziggurat("bulk", "--workers", "2", "pipeline", "my.yaml", "--until", "backtranslate")
    assert status == 0
    assert "resumes where it was interrupted" in err
    monkeypatch.chdir(place / "whole")
    assert ziggurat("pipeline", "my.yaml", "--until", "backtranslate")[0] == 0
    assert handed_on(place) == handed_on(place / "whole")


def test_parts_of_alignment_and_preparation_give_the_result_of_one_call(
    place: Path, ziggurat: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ziggurat.corpora.pipeline.synthesis._SHARD_PAIRS", 30)
    left_out = ("monolingual", "backward", "backtranslation", "teacher", "distillation", "filter")
    after = ("quantisation", "shortlist", "export", "evaluation")
    (place / "my.yaml").write_text(yaml.safe_dump(whole(**dict.fromkeys((*left_out, *after)))))
    assert ziggurat("pipeline", "my.yaml", "--until", "clean")[0] == 0
    shutil.copytree(place, place / "whole")
    for step in ("align", "student-data"):
        for number in (2, 1):
            status, _, err = ziggurat("bulk", "--shard", f"{number}/2", "pipeline", "my.yaml", "--only", step)
            assert (status, "Traceback" in err) == (0, False), err
        assert Path("w", step, "job").is_dir()
        status, _, err = ziggurat("pipeline", "my.yaml", "--until", step)
        assert (status, "resumes where it was interrupted" in err) == (0, True)
        assert not Path("w", step, "job").exists()
    monkeypatch.chdir(place / "whole")
    assert ziggurat("pipeline", "my.yaml", "--until", "student-data")[0] == 0
    assert handed_on(place) == handed_on(place / "whole")
