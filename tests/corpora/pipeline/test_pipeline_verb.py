"""`ziggurat pipeline`: what it prints, and how it ends."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.corpora.pipeline.conftest import trained, whole
from ziggurat.cli import main
from ziggurat.corpora.pipeline.demo_data import embedded_text
from ziggurat.corpora.pipeline.step import Expected

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ziggurat(capfd: pytest.CaptureFixture[str]) -> Call:
    """Run the command line; return exit status, standard output and standard error."""

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main(list(arguments))
        captured = capfd.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return call


def small(**sections: Any) -> str:
    """A file with only a student, in YAML."""
    left_out = ("monolingual", "backward", "backtranslation", "teacher", "distillation", "filter", "alignment")
    more = ("quantisation", "shortlist", "export", "evaluation")
    content = whole(**dict.fromkeys((*left_out, *more)), student=trained(stop={"updates": 4}))
    return yaml.safe_dump({**content, **sections})


def test_a_pipeline_from_plan_to_report(place: Path, ziggurat: Call) -> None:
    Path("my.yaml").write_text(small())
    status, out, _ = ziggurat("pipeline", "my.yaml", "--dry-run")
    assert status == 0
    assert not Path("w").exists()
    lines = out.splitlines()
    assert [line.split()[0] for line in lines if line[0] != " "][:5] == [
        *("sets", "clean", "student-data", "student", "report"),
    ]  # fmt: skip
    assert "4 updates" in out
    pairs = Path("data/train.qlo").read_text("utf-8").count("\n")
    assert f"about {pairs:,} pairs" in out
    assert "5 steps to do: about" in lines[-1]
    status, out, err = ziggurat("pipeline", "my.yaml", "--until", "student-data")
    assert (status, out) == (0, "")
    assert "3/3 student-data: done in" in err
    status, out, _ = ziggurat("pipeline", "my.yaml", "student.training.seed=2", "--dry-run", "--json")
    plan = {entry["step"]: entry for entry in json.loads(out)}
    assert plan["clean"]["state"] == "done"
    assert plan["student"]["state"] == "new"
    assert plan["student"]["expected"]["seconds"] > 0
    status, out, err = ziggurat("pipeline", "my.yaml", "--json")
    assert status == 0
    assert [row["name"] for row in json.loads(out)["steps"]] == ["sets", "clean", "student-data", "student"]
    status, out, err = ziggurat("pipeline", "my.yaml")
    assert "the report, to open in a browser: w/report/report.html" in out
    assert out.endswith("\nto translate: ziggurat translate w/student/run < text.qlo\n")
    assert "5/5 report: up to date" in err
    for name in ("report.html", "report.json"):
        Path("w/report", name).unlink()
        _, out, err = ziggurat("pipeline", "my.yaml")
        assert "4/5 student: up to date" in err
        assert f"5/5 report: reports on all of it (w/report/{name} is gone: it is made again)" in err
        assert Path("w/report", name).is_file()
    status, out, err = ziggurat("pipeline", "my.yaml", "--until", "clean")
    assert (status, out) == (0, "")  # the report is from an earlier call
    assert "w: the chosen steps are done" in err
    times = json.loads(Path("w/times.json").read_text())
    times["student"]["seconds"] = 61.0
    Path("w/times.json").write_text(json.dumps(times))
    status, out, _ = ziggurat("pipeline", "my.yaml", "student.training.seed=2", "--status")
    changed = "settings changed (there -> now): training.seed: 1 -> 2"
    assert f"{changed}; it starts over, and work that took 1:01 is discarded" in out
    assert "depends on the output of student" in out


def test_a_folder_is_not_taken_for_a_file_of_that_name(place: Path, ziggurat: Call) -> None:
    for name in ("demo", "starter"):  # as `ziggurat demo` leaves one
        Path(name).mkdir()
        assert ziggurat("pipeline", name, "--print")[:2] == (0, embedded_text(name))
    Path("starter").rmdir()
    assert ziggurat("pipeline", "demo", "folder=elsewhere", "--status")[0] == 0
    assert Path("elsewhere/pipeline.yaml").is_file()


def test_how_errors_end(place: Path, ziggurat: Call) -> None:
    Path("my.yaml").write_text(small())
    for arguments, said in (
        (["nothing.yaml"], "nothing.yaml: no such configuration file"),
        (["strater"], "strater: no such file; the embedded pipelines are demo and starter"),
        (["starter"], "`starter` is a template to edit: `ziggurat pipeline starter --print > my.yaml`"),
        (
            ["my.yaml", "--until", "studnet"],
            "no step `studnet` in this pipeline; did you mean `student`? It has sets,",
        ),
        (["my.yaml", "--from", "xyz"], "no step `xyz` in this pipeline; it has sets, clean,"),
        (["my.yaml", "--only", "clean", "--from", "clean"], "`--only` runs one step"),
        (["my.yaml", "--dry-run", "--status"], "choose one of `--dry-run`, `--status` and `--print`"),
        (["my.yaml", "--only", "student"], "sets: not done yet; leave out `--from` or `--only`"),
        (
            ["my.yaml", "student.model.heads=3"],
            ", with your overrides: `student.model`: `d_model` (16) is not a multiple of `heads`",
        ),
        (["my.yaml", "student.subword.vocabulary_size=20"], "raise student.subword.vocabulary_size"),
    ):
        status, _, err = ziggurat("pipeline", *arguments)
        assert status == 2, arguments
        assert said in err, arguments
        assert "Traceback" not in err
    assert "ziggurat: error: " in err
    assert "\nWhat is done is kept; once this is fixed, the same command resumes from here." in err


def test_errors_in_named_files_have_the_line_of_the_pipelines_file(place: Path, ziggurat: Call) -> None:
    text = small()
    Path("my.yaml").write_text(text.replace("data/train.qhi", "data/mine.eng"))
    line = 1 + next(n for n, line in enumerate(text.splitlines()) if "data/train.qhi" in line)
    said = f"my.yaml, line {line}: bitext.train.0.target: no such file: data/mine.eng"
    for options in ([], ["--status"]):
        assert said in ziggurat("pipeline", "my.yaml", *options)[2]
    _, _, err = ziggurat("pipeline", "my.yaml", "bitext.train.0.target=none")
    assert "ziggurat: bitext.train.0.target: no such file: none" in err
    Path("data/empty").touch()
    _, _, err = ziggurat("pipeline", "my.yaml", "bitext.train.0.target=data/empty", "--status")
    assert "bitext.train.0: data/empty is empty; give a file with sentences, or leave it out" in err
    stages = [{"mix": {"nothing": 1}, "until": {"corpus": "nothing"}}]
    Path("my.yaml").write_text(text := small(student={**trained(), "stages": stages}))
    line = 1 + next(n for n, line in enumerate(text.splitlines()) if line.strip().startswith(("mix:", "- mix:")))
    _, _, err = ziggurat("pipeline", "my.yaml", "--status")
    assert f"my.yaml, line {line}: `student.stages.0.mix`: no corpus nothing" in err


def test_folders_of_others_are_reported_before_any_work(place: Path, ziggurat: Call) -> None:
    Path("my.yaml").write_text(small())
    Path("w/clean").mkdir(parents=True)
    Path("w/clean/notes.txt").touch()
    for arguments, said in (
        ([], "w/clean: is in the way, and no pipeline made it; move it, or give another `folder`"),
        (["folder=data"], "folder: data contains other files (dev.qhi, dev.qlo, test.qhi, ...): results need a folder "
         "of their own, such as `folder: data/pipeline`"),
        (["folder=."], "folder: . contains other files (data, my.yaml, w): results need a folder of their own"),
        (["folder=my.yaml"], "my.yaml is a file; give the name of a folder for the results"),
        (["folder=my.yaml/w"], "my.yaml is a file; give the name of a folder for the results"),
    ):  # fmt: skip
        for option in ([], ["--status"]):
            status, _, err = ziggurat("pipeline", "my.yaml", *arguments, *option)
            assert (status, said in err) == (2, True), (arguments, err)
    assert sorted(path.name for path in Path("w").iterdir()) == ["clean"]


def test_swapped_language_files_are_refused_at_once(place: Path, ziggurat: Call) -> None:
    dev = [{"source": "data/dev.qlo", "target": "data/dev.qhi"}]
    Path("my.yaml").write_text(
        small(bitext={"train": [{"source": "data/train.qhi", "target": "data/train.qlo"}], "dev": dev})
    )
    for more in (["--dry-run"], ["--status"], []):
        status, _, err = ziggurat("pipeline", "my.yaml", *more)
        assert status == 2
        assert (
            "bitext.train.0: judging by their names, data/train.qhi is in `qhi` and data/train.qlo in `qlo`: exchange"
            in err
        )
    assert not Path("w/clean").exists()


@pytest.mark.slow
def test_embedded_files_are_printed(place: Path, ziggurat: Call) -> None:
    for name in ("demo", "starter"):
        status, out, _ = ziggurat("pipeline", name, "--print")
        assert (status, out) == (0, embedded_text(name))
    assert ziggurat("pipeline", "demo", "folder=elsewhere", "--status")[0] == 0
    assert Path("elsewhere/corpora.yaml").is_file()
    assert 'registry: ["elsewhere/corpora.yaml"]' in Path("elsewhere/pipeline.yaml").read_text()
    assert not Path("demo-pipeline").exists()


def test_a_stop_by_a_signal_is_reported(place: Path, ziggurat: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("my.yaml").write_text(small())
    monkeypatch.setattr("ziggurat.corpora.pipeline.training.train_or_go_on", lambda context, run, experiment: 15)
    status, _, err = ziggurat("pipeline", "my.yaml")
    assert status == 143
    assert "stopped in step student; what is done is kept, and the same command resumes from here" in err
    monkeypatch.setattr(
        "ziggurat.corpora.pipeline.costs.Costs.training", lambda *args: Expected(7200.0, None, "4 updates")
    )
    _, out, _ = ziggurat("pipeline", "my.yaml", "--dry-run")
    assert re.search(
        r"about 2:00:00  resumes where it was .*\n +4 updates; for the whole step; .* already been spent on it", out
    )
    assert "2 steps to do: about 2:00:00" in out
    _, _, err = ziggurat("pipeline", "my.yaml", "--force", "clean", "--force", "report")
    assert "stopped in step student; what is done is kept, and the same command without `--force clean` resumes" in err
