"""Options of `translate` that apply to lines, and search features as settings."""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
import warnings
from pathlib import Path

import pytest

from tests.cli.conftest import Ziggurat
from ziggurat.cli.engine import ModelOptions, warnings_shown, worker_count
from ziggurat.cli.output import check_output, line_count, line_progress, output_stream
from ziggurat.model.fast import precision
from ziggurat.model.fast.packed import available
from ziggurat.system.errors import ConfigError
from ziggurat.translate.translator import load_translator

SHORT = ["max_length.limit=4", "min_length=0"]


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.mark.slow
def test_prefixes_constraints_and_terms_come_from_files(
    ziggurat: Ziggurat, trained: Path, text: Path, tmp_path: Path
) -> None:
    options = [
        *("--prefix", write(tmp_path / "prefix", "go", "")),
        *("--constraints", write(tmp_path / "constraints", "", "di\tgo")),
        *("--terminology", write(tmp_path / "terms", "Madona\tsu", "divus\tnever")),
    ]
    status, out, _ = ziggurat("translate", trained, *SHORT, *options, "-i", text, "--json")
    assert status == 0
    translator = load_translator(trained, device="cpu", max_length={"limit": 4}, min_length=0)
    lines = text.read_text(encoding="utf-8").splitlines()
    terms = {"Madona": "su", "divus": "never"}
    asked = translator.translate(lines, prefixes=["go", ""], constraints=[[], ["di", "go"]], terminology=terms)
    assert out.splitlines() == [t.to_json() for t in asked]
    first, second = (json.loads(line) for line in out.splitlines())
    assert first["text"].startswith("go")
    assert second["unmet_constraints"] == []
    assert all(phrase in second["text"] for phrase in ("di", "go", "su"))


@pytest.mark.parametrize("name", ["a.tsv", "a.TSV.gz", "a.jsonl", "a.jsonl.zst", "a.parquet"])
def test_files_of_records_are_not_text(ziggurat: Ziggurat, tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, "go\tdi")
    for call in (["translate", "none"], ["backtranslate", "none", "--out", tmp_path / "bt"]):
        status, _, errors = ziggurat(*call, "--input", path)
        assert status == 2
        assert f"--input: {path} holds records" in errors.replace("\n", " ")
        assert not (tmp_path / "bt").exists()


@pytest.mark.slow
def test_settings_of_the_search_are_overrides(ziggurat: Ziggurat, trained: Path, text: Path) -> None:
    drawing = ["search=sample", "seed=5", "temperature=1.5", *SHORT]
    status, out, _ = ziggurat("translate", trained, *drawing, "-i", text)
    assert status == 0
    assert ziggurat("translate", trained, *drawing, "--window", 1, "-i", text)[1] == out
    assert ziggurat("translate", trained, *drawing[:1], "seed=6", *drawing[2:], "-i", text)[1] != out
    status, out, _ = ziggurat("translate", trained, *SHORT, "--quality", "-i", text)
    assert [len(line.split(" ||| ")) for line in out.splitlines()] == [2, 2]
    status, out, _ = ziggurat("translate", trained, *SHORT, "n_best=2", "--quality", "-i", text)
    assert {len(line.split(" ||| ")) for line in out.splitlines()} == {4}
    assert (
        "`alignments=true` shows only with `--json`"
        in ziggurat("translate", trained, *SHORT, "alignments=true", "-i", text)[2]
    )
    status, out, errors = ziggurat("translate", trained, *SHORT, "alignments=true", "--json", "-i", text)
    assert "alignments" not in errors
    record = json.loads(out.splitlines()[0])
    assert len(record["alignment"]["hard"]) == len(record["tokens"])


def test_contradictions_get_one_message(ziggurat: Ziggurat, trained: Path, text: Path, tmp_path: Path) -> None:
    def said(*arguments: object) -> str:
        status, out, errors = ziggurat("translate", trained, "-i", text, *arguments)
        assert (status, out) == (2, "")
        return errors

    assert "`decoding`: `top_k`: for sampling only; set `search: sample` as well" in said("top_k=4")
    assert "need `decoding.beam_size` of at least 2" in said("beam_size=1", "--constraints", text)
    one = write(tmp_path / "one", "a")
    assert "prefixes: 1 lines, but there are more to translate" in said("--prefix", one)
    assert f"{one}, line 1: not a source term, a tab and a target term" in said("--terminology", one)
    assert "only one of the inputs can be standard input" in said("--prefix", "-", "--constraints", "-")
    assert "nothing-there" in said("--prefix", "nothing-there")


def test_quiet_keeps_errors_and_results(ziggurat: Ziggurat, trained: Path, text: Path, tmp_path: Path) -> None:
    loud = ziggurat("translate", trained, *SHORT, "-i", text)
    quiet = ziggurat("-q", "translate", trained, *SHORT, "-i", text)
    assert "2 lines in" in loud.err
    assert (quiet.out, quiet.err) == (loud.out, "")
    assert "2 lines in" in ziggurat("translate", trained, *SHORT, "-i", text).err, "quiet does not outlast its verb"
    assert "no such file" in ziggurat("translate", trained, "-i", tmp_path / "none", "--quiet").err


def test_quiet_leaves_the_environment_unchanged(ziggurat: Ziggurat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZIGGURAT_QUIET", "yes")
    assert ziggurat("--quiet", "--version").status == 0
    assert os.environ["ZIGGURAT_QUIET"] == "yes"


@pytest.mark.slow
def test_the_output_option_has_its_name_and_the_old_one(
    ziggurat: Ziggurat, trained: Path, text: Path, tmp_path: Path
) -> None:
    written = []
    for number, option in enumerate(("--output", "-o", "--out")):
        assert ziggurat("translate", trained, *SHORT, "-i", text, option, tmp_path / str(number)).status == 0
        written.append((tmp_path / str(number)).read_bytes())
        assert ziggurat("average", trained, "--last", 1, option, tmp_path / f"average-{number}").status == 0
    assert len(set(written)) == 1


def test_a_search_reports_every_sentence_it_has_settled(trained: Path) -> None:
    translator = load_translator(trained, device="cpu", max_length={"limit": 4}, batch_sentences=3)
    told: list[int] = []
    translator.on_finished = told.append
    translator.translate(["Su divusim ne gokun.", "", *["Madona dogun."] * 8])
    assert sum(told) == 9, "the search never sees a blank line"
    assert len(told) > 1


def test_lines_are_counted_where_that_is_quick(text: Path, tmp_path: Path) -> None:
    assert line_count(str(text)) == 2
    assert line_count("-") is None
    assert line_count(str(write(tmp_path / "some.gz", "not read"))) is None


def test_uncompressed_output_with_the_name_of_a_compressed_file_is_refused(
    ziggurat: Ziggurat, trained: Path, text: Path, tmp_path: Path
) -> None:
    status, _, errors = ziggurat("translate", trained, "-i", text, "-o", tmp_path / "out.EN.gz")
    assert status == 2
    assert "out.EN.gz: output is plain text, not compressed: name it out.EN" in errors
    assert list(tmp_path.glob("*.gz")) == []


def test_a_warning_next_to_a_progress_bar_has_its_own_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes standard error for a terminal
    monkeypatch.setenv("TERM", "xterm")
    with warnings_shown(), line_progress("translating", 3) as advance:
        advance(1)
        warnings.warn("cut", stacklevel=1)
    before = re.split(r"warning: cut", capsys.readouterr().err)
    assert len(before) == 2
    assert before[0].endswith(("\x1b[2K", "\r", "\n")), repr(before[0])


def test_output_to_an_unnamed_pipe(tmp_path: Path) -> None:
    """The shell gives such a file for `-o >(gzip > out.gz)`, or for /dev/stdout before a pipe."""
    reading, writing = os.pipe()
    check_output(f"/dev/fd/{writing}")
    with output_stream(f"/dev/fd/{writing}") as stream:
        stream.write(b"text\n")
    os.close(writing)
    with open(reading, "rb") as pipe:
        assert pipe.read() == b"text\n"


@pytest.mark.slow
def test_a_faster_precision_is_named_and_taken_by_auto(
    ziggurat: Ziggurat, trained: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {"float32": 2e9, "bfloat16": 1e9}
    monkeypatch.setattr(precision, "decoding_rates", lambda _: rates)
    _, out, messages = ziggurat("translate", trained, *SHORT, "-i", text)
    assert "times as fast" not in messages
    status, same, messages = ziggurat("translate", trained, *SHORT, "precision=auto", "-i", text)
    assert (status, same) == (0, out)
    assert "precision: float32, chosen by `auto`" in messages
    rates["bfloat16"] = 5e9
    assert "times as fast" not in ziggurat("translate", trained, *SHORT, "-i", text)[2], "two lines: nothing to gain"
    monkeypatch.setattr("ziggurat.cli.engine.HINT_LINES", 2)
    messages = ziggurat("translate", trained, *SHORT, "-i", text)[2]
    assert "bfloat16 products are 2.5 times as fast as float32 on this CPU" in messages
    assert "`precision=bfloat16`" in messages
    score = ("score", trained, "--source", text, "--target", text)
    assert "times as fast" in ziggurat(*score)[2]
    assert not available("bfloat16") or ziggurat(*score, "precision=bfloat16").status == 0, "its advice works"


@pytest.mark.parametrize(("most", "settings", "said"), [(3, [], 0), (2, [], 1), (2, ["precision=auto"], 0)])
def test_a_text_of_unknown_length_gets_the_hint_once_it_is_long(
    ziggurat: Ziggurat,
    trained: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    most: int,
    settings: list[str],
    said: int,
) -> None:
    if settings and not available("bfloat16"):
        pytest.skip("this processor cannot multiply bfloat16")
    monkeypatch.setattr(precision, "decoding_rates", lambda _: {"float32": 1e9, "bfloat16": 5e9})
    monkeypatch.setattr("ziggurat.cli.translation.HINT_LINES", most)
    (packed := tmp_path / "test.qlo.gz").write_bytes(gzip.compress(text.read_bytes()))
    found = ziggurat("translate", trained, *SHORT, *settings, "-i", packed)
    assert (found.status, found.err.count("times as fast")) == (0, said)
    assert found.err.count("chosen by `auto`") == len(settings)


def test_automatic_workers_follow_threads_text_and_memory(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = [1 << 50]
    monkeypatch.setattr("ziggurat.train.device.available_memory", lambda: free[0])

    def workers(asked: str = "auto", lines: int | None = 100_000, threads: int | None = 4, device: str = "cpu") -> int:
        return worker_count(asked, [str(trained)], ModelOptions(None, device, threads), lines)

    assert workers() == 4
    assert workers(threads=None) == len(os.sched_getaffinity(0))
    assert [workers(lines=n) for n in (None, 0, 1_999, 2_000, 3_999, 9_999)] == [1, 1, 1, 2, 3, 4]
    assert workers(device="cuda:1") == 1
    free[0] = 3 * (2 << 30)
    assert workers() == 3
    free[0] = 0
    assert workers() == 1
    assert workers("7", lines=None) == 7
    for wrong in ("0", "1025", "-1", "many", "", "\u0663", "9" * 5000):
        with pytest.raises(ConfigError, match="a number from 1 to 1024, or `auto`"):
            workers(wrong)


def test_automatic_workers_of_an_exported_model_need_no_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("ziggurat.translate.engines.is_export", lambda path: True)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert worker_count("auto", [str(tmp_path)], ModelOptions(None, "auto", 2), 5_000) == 2
