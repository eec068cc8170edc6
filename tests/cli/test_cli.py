from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import typer

from tests.cli.conftest import Ziggurat, tiny_config
from tests.cli.test_terminal import started, updates_of, wait_for
from ziggurat.cli.app import app
from ziggurat.cli.pipeline import _experiment, _make_room, _next_steps
from ziggurat.corpora.fetch.downloads import default_folder

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "`--run FOLDER` is missing"),
        (["train", "runs/a", "--resume"], "`ziggurat train --run runs/a --resume`"),
        (["train", "--run", "x"], "name a configuration file or recipe"),
        (["train", "nothing.yaml", "--run", "x"], "nothing.yaml: no such configuration file"),
        (["train", "demo", "--run", "x", "training.sed=1"], "command line: unknown key `training.sed`"),
        (["train", "--run", "nowhere", "--resume"], "nowhere: no run to resume"),
        (["prepare", "multi30k-de-en", "data.train.0.source=none.de"], "data.train.0.source: no such file: none.de"),
        (["prepare", "multi30k-de-en"], "`ziggurat fetch multi30k-de-en` gets the recipe's data"),
        (["fetch", "eurparl/v7/de-en"], "the nearest names are `europarl/v7/"),
        (["fetch", "multi30k-de-em"], "did you mean the recipe `multi30k-de-en`"),
        (["recipes", "nothing"], "no recipe `nothing`"),
        (["explain", "model.hedas"], "did you mean `model.heads`"),
        (["explain", "demo"], "`demo` is a recipe: `ziggurat recipes demo` prints it"),
        (["explain", "adnim"], "no key or method `adnim`; did you mean `adam`, `radam`, `admin`"),
        (["explain", "emma"], "no key or method `emma`; did you mean"),
        (["explain", "lr"], "`lr`; other toolkits' option of that name is training.schedule.peak=VALUE here"),
        (["explain", "learning_rate"], "training.schedule.peak=VALUE, or with `noam`"),
        (["explain", "Warmup-Updates"], "training.schedule.warmup_updates=VALUE"),
        (["explain", "batch_size"], "training.batch.max_sentences=VALUE"),
        (["explain", "gpu"], "--device cuda"),
        (["explain", "beam-size"], "beam_size=VALUE"),
        (["explain", "distillation.decodign"], "did you mean `distillation.decoding`"),
        (["translate", "nowhere"], "nowhere: no such run or model directory"),
        (["evaluate", "nowhere"], "`--reference FILE` is missing"),
        (["evaluate", "--hypothesis", "none.txt", "--reference", "none.txt"], "none.txt: no such file"),
        (["average", "nowhere"], "nowhere: not a run"),
        (
            ["export", "nowhere", "--to", "onnx", "--out", "x", "--tolerance", "0.1"],
            "`--reference FILE`, which is missing",
        ),
        (["diagnose", "demo", "--coordinates", "--device", "nothing"], "`training.device: nothing` cannot be used"),
        (["unknown"], "No such command 'unknown'"),
        (["train", "--nonsense"], "No such option"),
    ],
)
def test_mistakes_exit_with_2_and_one_message(  # type: ignore[no-untyped-def]
    arguments: list[str], message: str, ziggurat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = ziggurat(*arguments)
    assert result.status == 2
    assert message in result.err
    assert "Traceback" not in result.err
    assert result.out == ""
    assert list(tmp_path.iterdir()) == [], "a mistake left files behind"


def test_debug_shows_the_traceback(ziggurat) -> None:  # type: ignore[no-untyped-def]
    result = ziggurat("translate", "nowhere", "--debug")
    assert result.status == 2
    assert "Traceback" in result.err


@pytest.mark.slow
def test_prepare_reports_what_it_did(ziggurat, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    config = tiny_config(tmp_path, tmp_path)
    report = json.loads(ziggurat("prepare", config, "--json").out)
    assert (report["reused"], [c["kept"] for c in report["corpora"]]) == (False, [300, 20])
    again = ziggurat("prepare", config)
    assert again.status == 0
    assert "already there, nothing to do" in again.out
    other = ziggurat("prepare", config, "data.unicode=nfc")
    assert other.status == 2
    assert "--force" in other.err
    assert ziggurat("prepare", config, "data.unicode=nfc", "--force").status == 0


def test_translate_prints_one_line_per_line(ziggurat, trained: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    lines = ["Su divusim ne gokun.", "", "   ", "<script>alert(1)</script>", "日本語", "a\rb", "x " * 300]
    source, output = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_bytes("\n".join(lines).encode())
    result = ziggurat("translate", trained, "max_length.extra=2", "max_length.ratio=0", "-i", source, "-o", output)
    assert result.status == 0, result.err
    assert len(output.read_text(encoding="utf-8").split("\n")) == len(lines) + 1
    assert "2 blank" in result.err
    as_json = ziggurat("translate", trained, "beam_size=3", "n_best=2", "max_length.limit=3", "-i", source, "--json")
    records = [json.loads(line) for line in as_json.out.splitlines()]
    assert len(records) == len(lines)
    assert [len(r["n_best"]) for r, line in zip(records, lines, strict=True) if not line.strip()] == [1, 1]
    assert all(1 <= len(r["n_best"]) <= 2 for r in records)
    assert {"text", "score", "tokens", "log_probability"} <= records[0].keys()
    text = ziggurat("translate", trained, "beam_size=3", "n_best=2", "max_length.limit=3", "-i", source).out
    numbers = [int(line.split(" ||| ")[0]) for line in text.splitlines()]
    assert sorted(set(numbers)) == list(range(1, len(lines) + 1))
    assert numbers == sorted(numbers)


def test_bad_input_leaves_no_output_file(ziggurat, trained: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    source, output = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_bytes(b"Su divusim.\nbad \xff\n")
    result = ziggurat("translate", trained, "max_length.limit=2", "-i", source, "-o", output)
    assert result.status == 2
    assert "line 2" in result.err
    assert "byte 4" in result.err
    assert list(tmp_path.iterdir()) == [source]


def test_no_verb_has_more_than_twenty_options_and_all_of_many_are_in_groups() -> None:
    for name, verb in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        options = [parameter for parameter in verb.params if parameter.param_type_name == "option"]
        assert len(options) <= 20, name
        assert sum(option.rich_help_panel is None for option in options) <= 10, name


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("train mul", "multi30k-de-en"),
        ("prepare dem", "demo"),
        ("inspect dem", "demo"),
        ("recipes mul", "multi30k-en-de"),
        ("train my.yaml model.encoder.lay", "model.encoder.layers="),
        ("prepare my.yaml data.train.0.w", "data.train.0.weight="),
        ("translate run beam", "beam_size="),
        ("pipeline my.yaml distil", "distillation.shard_lines="),
        ("explain training.sch", "training.schedule"),
        ("explain dl", "dlcl"),
        ("bulk pre", "prepare"),
    ],
)
def test_tab_completion(typed: str, offered: str, monkeypatch: pytest.MonkeyPatch, ziggurat: Ziggurat) -> None:
    monkeypatch.setenv("_ZIGGURAT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"ziggurat {typed}")
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split())))
    assert offered in ziggurat().out.splitlines()


def test_score_and_evaluate(ziggurat, trained: Path, tiny_folder: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    source, reference = tiny_folder / "dev.qlo", tiny_folder / "dev.qhi"
    scored = ziggurat("score", trained, "--source", source, "--target", reference)
    values = [float(line) for line in scored.out.splitlines()]
    assert len(values) == 20
    assert all(value < 0 for value in values)
    texts = ("--source", source, "--target", reference, "--json")
    settings = ("decoding.precision=float32", "length_penalty.kind=none")
    plain = ziggurat("score", trained, *settings, *texts)
    assert plain.status == 0, plain.err
    scores = [json.loads(line) for line in plain.out.splitlines()]
    assert [score["score"] for score in scores] == [score["log_probability"] for score in scores] != values
    assert "`beam` is not a decoding setting" in ziggurat("score", trained, "beam", *texts).err
    output = tmp_path / "out.txt"
    options = ["--source", source, "--reference", reference, "--json", "--output", output]
    scores = json.loads(ziggurat("evaluate", trained, "max_length.limit=9", *options).out)
    assert [s["name"] for s in scores] == ["BLEU", "chrF2", "TER"]
    shown = ziggurat("evaluate", "--hypothesis", output, "--reference", reference, "--metrics", "chrf").out
    assert shown.startswith(f"chrF2|{scores[1]['signature']} = {scores[1]['value']:.1f}")
    confident = ziggurat(
        "evaluate", "--hypothesis", output, "--reference", reference, "--metrics", "chrf", "--confidence", "--json"
    )
    assert confident.status == 0, confident.err
    assert json.loads(confident.out)[0]["interval"] >= 0
    metrics = ("--metrics", "bleu,chrf,ter,tokenised,compound-split", "--language", "de")
    perfect = ziggurat("evaluate", "--hypothesis", reference, "--reference", reference, *metrics).out
    assert perfect.count("= 100.0") == 4
    assert perfect.count("NOT-comparable-with-sacreBLEU") == 2


def test_resume_and_average_through_the_command_line(ziggurat, trained: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    result = ziggurat("train", "--run", trained, "--resume", "training.stop.updates=6", "--json")
    assert result.status == 0, result.err
    assert json.loads(result.out)["update"] == 6
    averaged = ziggurat("average", trained, "--last", "2", "--out", tmp_path / "mean", "--json")
    assert json.loads(averaged.out) == {"out": str(tmp_path / "mean"), "updates": [4, 6]}
    assert ziggurat("train", trained / "config.yaml", "--run", trained).status == 2
    assert ziggurat("train", trained / "config.yaml", "--run", trained, "--resume").status == 2


@pytest.mark.slow
def test_ctrl_c_while_training_exits_with_130(tiny_folder: Path, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, tiny_folder, stop={"updates": 10**6}, log_every_updates=1)
    run = tmp_path / "run"
    child = started(["train", str(config), "--run", str(run)], tmp_path / "said")
    wait_for(lambda: updates_of(run) > 0, child)
    os.kill(child.pid, signal.SIGINT)  # type: ignore[arg-type]
    child.join(60)
    errors = (tmp_path / "said.err").read_text()
    assert child.exitcode == 130
    assert "SIGINT" in errors
    assert "Traceback" not in errors
    assert list((run / "checkpoints").iterdir())


def test_demo_refuses_a_folder_that_is_not_its_own(ziggurat, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "mine.txt").write_text("keep")
    result = ziggurat("demo", "--folder", tmp_path)
    assert result.status == 2
    assert "is not a demo of ziggurat" in result.err
    assert (tmp_path / "mine.txt").read_text() == "keep"


def test_a_demo_that_is_replaced_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "demo"
    assert not _make_room(folder, "a: 1")
    assert not capsys.readouterr().err
    (folder / "corpus").mkdir()
    assert not _make_room(folder, "a: 1")
    assert "starting from the first step" in capsys.readouterr().err
    assert not (folder / "corpus").exists()


@pytest.mark.parametrize("changed", ["", "settings", "finished", "no checkpoint"])
def test_a_demo_that_was_interrupted_continues(
    changed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _make_room(tmp_path / "demo", "a: 1")
    for name in ("corpus", "store", "run/checkpoints/000000010"):
        (tmp_path / "demo" / name).mkdir(parents=True)
    (tmp_path / "demo" / "demo.yaml").write_text("a: 2" if changed == "settings" else "a: 1")
    if changed == "finished":
        (tmp_path / "demo" / "run" / "report.html").touch()
    if changed == "no checkpoint":
        (tmp_path / "demo" / "run" / "checkpoints" / "000000010").rmdir()
    assert _make_room(tmp_path / "demo", "a: 1") == (not changed)
    assert ("resuming" if not changed else "starting from the first step") in capsys.readouterr().err
    assert all((tmp_path / "demo" / name).exists() == (not changed) for name in ("corpus", "store", "run"))


SMALL_DEMO = (
    *("model.d_model=16", "model.d_ff=16", "model.heads=2", "model.encoder.layers=1", "model.decoder.layers=1"),
    *(
        "training.checkpoints.every_updates=2",
        "training.validation.every_updates=1000",
        "training.batch.max_tokens=512",
    ),
)


@pytest.mark.slow
def test_the_same_command_continues_with_the_demo(ziggurat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    from ziggurat.train import loop

    given = ("demo", "--folder", tmp_path / "demo", *SMALL_DEMO, "training.stop.updates=6", "decoding.beam_size=1")
    whole = loop.train

    def interrupted(run: Path, experiment, **named):  # type: ignore[no-untyped-def]
        result = whole(run, experiment, **named)
        shutil.rmtree(run / "checkpoints" / sorted(path.name for path in (run / "checkpoints").iterdir())[-1])
        return dataclasses.replace(result, signal=2)

    monkeypatch.setattr(loop, "train", interrupted)
    first = ziggurat(*given)
    assert first.status == 130
    assert "repeat the command to resume" in first.err
    before = (tmp_path / "demo" / "store" / "manifest.json").stat().st_mtime_ns
    monkeypatch.setattr(loop, "train", whole)
    second = ziggurat(*given)
    assert second.status == 0, second.err
    assert "resuming the demo" in second.err
    assert (tmp_path / "demo" / "store" / "manifest.json").stat().st_mtime_ns == before
    assert "starting from the first step" in ziggurat(*given).err


def test_the_folder_of_the_demo_may_have_any_name() -> None:
    folder = Path("my: demo #1")
    data = _experiment(folder, ["data.dev.0.source=mine"]).data
    assert (data.store, data.train[0].target) == (f"{folder}/store", f"{folder}/corpus/train.qhi")
    assert (data.dev[0].source, data.dev[0].target) == ("mine", f"{folder}/corpus/dev.qhi")


def test_the_closing_hints_of_the_demo_can_be_pasted(tmp_path: Path) -> None:
    folder = Path("my demo")
    test = folder / "test.qlo", folder / "test.qhi"
    script = (
        f'head() {{ :; }}; ziggurat() {{ printf "%s|" "$@" >> calls; echo >> calls; }}\n{_next_steps(folder, test)}\n'
    )
    subprocess.run(["bash", "-eu"], input=script, text=True, check=True, cwd=tmp_path)
    assert (tmp_path / "calls").read_text().splitlines() == [
        "translate|my demo/run|",
        "serve|my demo/run|",
        "evaluate|my demo/run|--source|my demo/test.qlo|--reference|my demo/test.qhi|--confidence|",
        "train|my demo/demo.yaml|--run|my demo/deep|model.encoder.layers=12|",
        "report|my demo/run|my demo/deep|",
        "recipes|",
        "recipes|multi30k-de-en|",
        "prepare|my.yaml|",
        "train|my.yaml|--run|runs/mine|",
    ]


@pytest.mark.slow
def test_demo_runs_every_step(  # type: ignore[no-untyped-def]
    ziggurat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the folder `demo` must not hide the recipe `demo`
    small = ["training.stop.updates=2", "model.encoder.layers=1", "model.decoder.layers=1", "decoding.beam_size=1"]
    small += ["decoding.max_length.limit=4", "training.validation.every_updates=100"]
    small += ["training.diagnostics.every_updates=null"]  # drawing figures would take most of the time
    for _ in range(2):  # the second replaces the first
        result = ziggurat("demo", *small, "--json")
        assert result.status == 0, result.err
        document = json.loads(result.out)
        assert [s["name"] for s in document["scores"]] == ["BLEU", "chrF2", "TER"]
        assert (tmp_path / "demo" / "test.output").read_text(encoding="utf-8").count("\n") == 500
        assert "Of the 500 sentences of the test set" in Path(document["report"]).read_text(encoding="utf-8")


@pytest.mark.slow
def test_output_goes_where_a_link_or_pipe_leads(ziggurat, trained: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    source, real, link, pipe = (tmp_path / name for name in ("in", "real", "link", "pipe"))
    source.write_text("Su divusim.\n")
    real.write_text("old")
    link.symlink_to(real)
    assert ziggurat("translate", trained, "max_length.limit=2", "-i", source, "-o", link).status == 0
    assert link.is_symlink()
    assert real.read_text() != "old"
    os.mkfifo(pipe)
    writer = subprocess.Popen(["cp", str(source), str(pipe)])
    result = ziggurat("translate", trained, "max_length.limit=2", "-i", pipe, "-o", "/dev/null")
    writer.wait(10)
    assert result.status == 0, result.err
    assert "1 line in" in result.err
    assert not Path("/dev/null").is_file()
    assert ziggurat("translate", trained, "-i", tmp_path).status == 2


@pytest.mark.slow
def test_a_run_that_cannot_start_leaves_nothing(ziggurat, tiny_folder: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    config = tiny_config(tmp_path, tiny_folder, stop={"updates": 1})
    result = ziggurat("train", config, "--run", tmp_path / "run", "training.device=cuda:77")
    assert result.status == 2
    assert "`training.device: cuda:77` cannot be used" in result.err
    assert not (tmp_path / "run").exists()
    assert ziggurat("train", config, "--run", tmp_path / "run", "training.device=cpu").status == 0


def test_prepare_replaces_nothing_but_stores(ziggurat, trained: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    config = tiny_config(tmp_path, tmp_path)
    website = tmp_path / "web"
    website.mkdir()
    (website / "manifest.json").write_text('{"name": "x"}')
    (website / "index.html").write_text("mine")
    for folder in (trained, website):
        before = sorted(folder.rglob("*"))
        result = ziggurat("prepare", config, f"data.store={folder}", "--force")
        assert result.status == 2
        assert "holds something other than a store" in result.err
        assert sorted(folder.rglob("*")) == before


def test_damage_is_exit_status_2_with_the_file_and_the_way_out(
    trained: Path, text: Path, tmp_path: Path, ziggurat: Ziggurat
) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run", symlinks=True))
    ziggurat("average", run, "--last", 1, "--out", tmp_path / "mean")
    for path in (tmp_path / "mean" / "model.safetensors", run / "joint.spm"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        result = ziggurat("translate", path.parent, "-i", text)
        assert result.status == 2, result
        assert f"{path.name}: damaged or changed" in " ".join(result.err.split())
        assert ("ziggurat average" if path.parent != run else "copy it from the store") in " ".join(result.err.split())
    path.write_bytes((trained / path.name).read_bytes())
    edited = (run / "config.yaml").read_text().replace("seed: 1", "seed: 2")
    (run / "config.yaml").write_text(edited)
    result = ziggurat("train", "--run", run, "--resume")
    assert result.status == 2
    assert "training.seed: 1 -> 2" in result.err


def test_the_help_of_fetch_names_the_folder_of_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("ZIGGURAT_DOWNLOADS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    folder = default_folder().relative_to(Path.home())
    cache = next(option for option in COMMANDS["fetch"].params if option.name == "cache")
    assert f"$ZIGGURAT_DOWNLOADS, or ~/{folder}." in cache.help
