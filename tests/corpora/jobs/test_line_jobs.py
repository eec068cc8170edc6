"""translate, score, evaluate and align in bulk: the same results from one call, from parts, and after kills."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.conftest import Ziggurat
from tests.killing import tree
from ziggurat.cli import jobs
from ziggurat.corpora.jobs.launchers import StageFiles
from ziggurat.corpora.jobs.tasks import Identified, LineWithInputs, ModelChoice, Translating, opened
from ziggurat.data.shortlist import ShortlistTable, _fingerprint, write_shortlist
from ziggurat.data.store_checks import differences
from ziggurat.model.accelerator import usable_device
from ziggurat.system.errors import CheckpointError, DataError
from ziggurat.system.files import CHECKSUMS_FILE

SHORT = ("max_length.limit=6", "min_length=0")


class Killed(BaseException):
    """A kill."""


def bulk(folder: Path, *options: object) -> tuple[object, ...]:
    """Options that run a command in bulk in this folder, with shards of seven lines."""
    return ("bulk", "--job", folder, "--shard-lines", 7, *options)


def commands(run: Path, sides: tuple[Path, Path]) -> dict[str, tuple[Any, ...]]:
    """The verbs, without options for bulk work and without output."""
    source, target = sides
    texts = ("--source", source, "--reference", target)
    return {
        "translate": ("translate", run, *SHORT, "-i", source),
        "translate-json": ("translate", run, *SHORT, "n_best=2", "-i", source, "--json"),
        "translate-prefix": ("translate", run, *SHORT, "-i", source, "--prefix", target, "--quality"),
        "translate-sample": ("translate", run, *SHORT, "search=sample", "seed=3", "-i", source),
        "score": ("score", run, "--source", source, "--target", target, "--device", "cpu"),
        "evaluate": ("evaluate", run, *SHORT, "n_best=2", *texts, "--metrics", "chrf"),
        "align": ("align", source, target, "--hmm-iterations", 2, "--symmetrise", "union"),
    }


NAMES = ("translate", "translate-json", "translate-prefix", "translate-sample", "score", "evaluate", "align")


def quick(*names: str, but: str = "") -> list[Any]:
    """Return the calls, all but the named ones marked as slow."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in NAMES if name != but]


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("name", quick("translate"))
def test_parts_and_kills_give_the_result_of_one_call(
    name: str,
    ziggurat: Ziggurat,
    trained: Path,
    pairs: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = commands(trained, pairs)[name]
    whole, out = tmp_path / "whole", tmp_path / "out"
    first = ziggurat(*bulk(tmp_path / "one"), *command, "-o", whole)
    assert first.status == 0, first.err
    again = ziggurat(*bulk(tmp_path / "one"), *command, "-o", out)  # all shards exist
    assert (again.status, again.out, out.read_bytes()) == (0, first.out, whole.read_bytes())
    out.unlink()

    command = (*command, "-o", out)
    job = (*bulk(tmp_path / "parts"), *command)
    early = ziggurat(*bulk(tmp_path / "parts", "--merge"), *command)
    assert (early.status, "shard 0 of 4 is missing" in " ".join(early.err.split())) == (2, True)
    told = ziggurat(*bulk(tmp_path / "parts", "--shard", "2/3"), *command)
    assert (told.status, told.out) == (0, "")
    assert "part 2/3 of 4 shards is complete" in " ".join(told.err.split())
    write, writes = StageFiles.write, []

    def killed(self: StageFiles, index: int, *arguments: Any, **counts: Any) -> Any:
        writes.append(index)
        if len(writes) == 2:
            raise Killed
        return write(self, index, *arguments, **counts)

    with monkeypatch.context() as patch:
        patch.setattr(StageFiles, "write", killed)
        with pytest.raises(Killed):
            ziggurat(*job)
    assert writes == [0, 2]
    assert not out.exists()
    ended = ziggurat(*job)
    assert (ended.status, ended.out) == (0, first.out)
    assert out.read_bytes() == whole.read_bytes()
    assert whole.read_bytes().count(b"\n") >= 25
    assert tree(tmp_path / "parts") == tree(tmp_path / "one")


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("name", quick("translate", "align", but="score"))
def test_a_job_gives_the_verbs_output(
    name: str, ziggurat: Ziggurat, trained: Path, pairs: tuple[Path, Path], tmp_path: Path
) -> None:
    """This holds if shards are the windows in which the verb translates (those of `evaluate` are longer)."""
    command = commands(trained, pairs)[name]
    window = ("--window", 7) if command[0] == "translate" else ()
    plain = ziggurat(*command, "-o", tmp_path / "plain", *window)
    job = ziggurat(*bulk(tmp_path / "job"), *command, "-o", tmp_path / "out")
    assert (plain.status, job.status, plain.out) == (0, 0, job.out)
    assert (tmp_path / "out").read_bytes() == (tmp_path / "plain").read_bytes()


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_scores_of_a_job_are_those_of_the_verb(
    ziggurat: Ziggurat, trained: Path, pairs: tuple[Path, Path], tmp_path: Path
) -> None:
    """The scores agree to rounding, because the verb scores all lines in common batches."""
    command = commands(trained, pairs)["score"]
    plain = ziggurat(*command, "--json")
    job = ziggurat(*bulk(tmp_path / "job"), *command, "--json")
    for one, other in zip(plain.out.splitlines(), job.out.splitlines(), strict=True):
        assert json.loads(one)["log_probability"] == pytest.approx(json.loads(other)["log_probability"], abs=1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_settings_and_inputs_of_a_job_stay(
    ziggurat: Ziggurat, trained: Path, pairs: tuple[Path, Path], tmp_path: Path
) -> None:
    out = ("-o", tmp_path / "out")
    command = ("translate", trained, *SHORT, "-i", pairs[0], *out)
    assert ziggurat(*bulk(tmp_path / "job", "--shard", "1/2"), *command).status == 0
    before = tree(tmp_path / "job")
    for other, message in (
        ((*command, "beam_size=3"), "decoding.beam_size (4 -> 3)"),
        ((*command, "--quality"), 'form ("text" -> "quality")'),
        (("translate", trained, *SHORT, "-i", pairs[1], *out), "inputs.0.files: other content"),
        (("score", trained, "--source", pairs[0], "--target", pairs[1], *out), 'verb ("translate" -> "score")'),
    ):
        told = ziggurat(*bulk(tmp_path / "job"), *other)
        assert (told.status, message in " ".join(told.err.split())) == (2, True), told.err
    assert tree(tmp_path / "job") == before


@pytest.mark.parametrize(
    ("bulk_options", "more", "message"),
    [
        (("--shard", "1/2"), (), "`--job FOLDER` is missing before `translate`"),
        (("--ray", "auto"), (), "`--job FOLDER` is missing before `translate`"),
        (("--job", "job", "--merge", "--shard", "1/2"), (), "leave out `--shard`"),
        (("--job", "job", "--shard", "3/2"), (), "write i/n such as 1/4"),
        (("--job", "job"), ("--tag", "<x>"), "unknown tag '<x>'"),
        (("--job", "job"), ("beam_size=0",), "beam_size"),
        (("--job", "job"), ("precision=auto",), "name the precision"),
        (("--job", "."), (), "exists and is not a folder of a `translate`"),
        (("--job", "job"), ("-i", "-"), "none can be standard input"),
        (("--job", "job"), ("-i", "bad"), "bad, line 2: not valid UTF-8"),
        (("--job", "job"), ("--prefix", "short"), "they must pair up"),
        (("--job", "job", "--ray", "auto"), ("--device", "cuda:1"), "write `cuda`"),
        (("--job", "job", "--ray", "local"), (), "`ray` is not installed"),
        (("--job", "job"), ("--document", "text"), "`ziggurat bulk` is for lines of text"),
        (("--job", "job"), ("--workers", "2"), "`ziggurat bulk --workers N translate ...`"),
        (("--job", "job"), ("--window", "2"), "`ziggurat bulk --shard-lines N ...`"),
    ],
)
def test_mistakes_are_reported_before_anything_is_done(
    bulk_options: tuple[str, ...],
    more: tuple[str, ...],
    message: str,
    ziggurat: Ziggurat,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    Path("text").write_text("Su divusim.\nNe gokun.\n")
    Path("short").write_text("go\n")
    Path("bad").write_bytes(b"good\n\xff\n")
    before = tree(tmp_path)
    text = () if {"-i", "--document"} & set(more) else ("-i", "text")
    told = ziggurat("bulk", *bulk_options, "translate", trained, *text, "-o", "out", *more)
    assert (told.status, message in " ".join(told.err.split())) == (2, True), told.err
    assert tree(tmp_path) == before


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_changes_while_a_job_runs_are_reported(
    ziggurat: Ziggurat, trained: Path, pairs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that grows."""
    text = tmp_path / "text"
    text.write_bytes(pairs[0].read_bytes())
    command = ("translate", trained, *SHORT, "-i", text, "-o", tmp_path / "out")
    write = StageFiles.write

    def grows(self: StageFiles, index: int, *arguments: Any, **counts: Any) -> Any:
        with text.open("a") as file:
            file.write("Ne gokun.\n")
        return write(self, index, *arguments, **counts)

    with monkeypatch.context() as patch:
        patch.setattr(StageFiles, "write", grows)
        told = ziggurat(*bulk(tmp_path / "job"), *command)
    assert (told.status, "text: changed while being read; begin again in" in " ".join(told.err.split())) == (2, True)
    assert not (tmp_path / "out").exists()


def test_a_job_notices_changed_models(trained: Path, tmp_path: Path) -> None:
    """A run whose best checkpoint has changed when a worker opens it is refused, as is one with other vocabularies."""
    known = ModelChoice((str(trained),)).identified()
    assert known.choice.device == usable_device("auto", "--device").type
    assert opened(known.choice).decoding.beam_size == 4
    with pytest.raises(CheckpointError, match="its weights changed after the job had started"):
        opened(replace(known.choice, weights=(known.choice.weights[0][::-1],)))
    other = shutil.copytree(trained, tmp_path / "other")
    assert ModelChoice((str(other),)).identified().settings == known.settings
    (other / CHECKSUMS_FILE).unlink()
    with (other / "vocabulary.json").open("a") as file:
        file.write("\n")
    (before,), (after,) = known.settings["models"], ModelChoice((str(other),)).identified().settings["models"]
    assert {name for name in before if before[name] != after[name]} == {"vocabulary"}


def test_a_job_knows_its_shortlist_by_content(trained: Path, tmp_path: Path) -> None:
    """A file that was rewritten under the same name counts as different; jobs that only score do not read it."""
    plain, listed = (ModelChoice((str(trained),), decoding=d) for d in ({}, {"shortlist": str(tmp_path / "list")}))
    translator = opened(plain)
    sides = translator.source_tokenizer, translator.target_tokenizer

    def identified(target: int) -> Identified:
        candidates, always = np.full((sides[0].size, 1), target, np.int32), np.array([sides[1].eos], np.int32)
        vocabularies = _fingerprint(sides[0]), _fingerprint(sides[1])
        write_shortlist(tmp_path / "list", ShortlistTable(candidates, always, vocabularies))
        return listed.identified()

    first, second = identified(5), identified(6)
    assert differences(first.settings, second.settings, "") != []
    assert "shortlist" not in plain.identified().settings.keys() | listed.identified(searched=False).settings.keys()
    opened(second.choice)
    with pytest.raises(DataError, match="list: this shortlist changed after the job had started"):
        opened(first.choice)


def test_lines_are_numbered_through_all_shards(trained: Path) -> None:
    """Line numbers in the whole input determine samples and the numbering of n-best lists."""
    settings = {"search": "sample", "n_best": 2, "beam_size": 2, "seed": 3, "max_length": {"limit": 6}, "min_length": 0}
    task = Translating(ModelChoice((str(trained),), device="cpu", decoding=settings).identified().choice)
    lines = [LineWithInputs("Su divusim."), LineWithInputs("Ne gokun."), LineWithInputs("Su divusim.")]
    whole, last = task(lines, 40)[0], task(lines[2:], 42)[0]
    assert last == whole[2:]
    assert [result.split()[0] for result in whole] == ["41", "42", "43"]
    assert replace(task, form="best")(lines[2:], 42)[0] == [last[0].split(" ||| ")[1]]  # as `evaluate` scores it


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (("--job", "job", "perturb", "run"), "`bulk` works with the commands align, backtranslate, evaluate"),
        (("--job", "job", "backtranslate", "run"), "`backtranslate` keeps its parts in its `--output`"),
        (("--merge", "pipeline", "my.yaml"), "`pipeline` merges by itself"),
        (("--job", "job", "--shard-lines", "7", "prepare", "my.yaml"), "`prepare` chooses the size of its shards"),
        (("--job", "job", "score", "run", "--beam", "8"), "No such option: --beam"),
    ],
)
def test_options_that_exclude_bulk_work(
    call: tuple[str, ...], message: str, ziggurat: Ziggurat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = ziggurat("bulk", *call)
    assert (told.status, told.out, message in " ".join(told.err.split())) == (2, "", True), told.err
    assert not Path("job").exists()


def test_help_of_a_verb_behind_bulk(ziggurat: Ziggurat) -> None:
    assert ziggurat("bulk", "align", "--help").out == ziggurat("align", "--help").out


def test_progress_is_reported_with_a_total_or_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jobs, "_MESSAGE_SECONDS", 0.0)
    progress = jobs._Progress("pair")
    for total in (400, None):
        progress.show(100, 0, total)
        progress.show(100, 300, total)
    assert re.sub(r"[0-9,.]+ pairs/s", "n pairs/s", capsys.readouterr().err).splitlines() == [
        "100 of 400 pairs were done before",
        "400 of 400 pairs  n pairs/s  0 s left",
        "100 pairs were done before",
        "400 pairs  n pairs/s",
    ]
