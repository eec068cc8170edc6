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
from ziggurat.cli import corpora as alignment
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


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make shards of seven lines."""
    for module, name in ((alignment, "_SHARD_PAIRS"), (jobs, "SHARD_LINES")):
        monkeypatch.setattr(module, name, 7)


def commands(run: Path, sides: tuple[Path, Path]) -> dict[str, tuple[Any, ...]]:
    """The verbs, without what is in bulk and without output."""
    source, target = sides
    texts = ("--source", source, "--reference", target)
    return {
        "translate": ("translate", run, *SHORT, "-i", source, "--window", 7),
        "translate-json": ("translate", run, *SHORT, "n_best=2", "-i", source, "--window", 7, "--json"),
        "translate-prefix": ("translate", run, *SHORT, "-i", source, "--window", 7, "--prefix", target, "--quality"),
        "translate-sample": ("translate", run, *SHORT, "search=sample", "seed=3", "-i", source, "--window", 7),
        "score": ("score", run, "--source", source, "--target", target, "--device", "cpu"),
        "evaluate": ("evaluate", run, *SHORT, "n_best=2", *texts, "--metrics", "chrf"),
        "align": ("align", source, target, "--hmm-iterations", 2, "--symmetrise", "union"),
    }


NAMES = ("translate", "translate-json", "translate-prefix", "translate-sample", "score", "evaluate", "align")


def quick(*names: str, but: str = "") -> list[Any]:
    """Return all calls `but` one; those that are not named belong to the slow suite."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in NAMES if name != but]


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("name", quick("translate"))
def test_parts_and_kills_make_what_one_call_makes(
    name: str,
    ziggurat: Ziggurat,
    trained: Path,
    pairs: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = commands(trained, pairs)[name]
    whole, out = tmp_path / "whole", tmp_path / "out"
    first = ziggurat(*command, "-o", whole, "--job", tmp_path / "one")
    assert first.status == 0, first.err
    again = ziggurat(*command, "-o", out, "--job", tmp_path / "one")  # all shards are there
    assert (again.status, again.out, out.read_bytes()) == (0, first.out, whole.read_bytes())
    out.unlink()

    job = (*command, "-o", out, "--job", tmp_path / "parts")
    early = ziggurat(*job, "--merge")
    assert (early.status, "shard 0 of 4 is missing" in " ".join(early.err.split())) == (2, True)
    told = ziggurat(*job, "--shard", "2/3")
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
def test_a_job_gives_what_the_verb_gives(
    name: str, ziggurat: Ziggurat, trained: Path, pairs: tuple[Path, Path], tmp_path: Path
) -> None:
    """Where the shards are the windows in which the verb translates (those of `evaluate` are longer)."""
    command = commands(trained, pairs)[name]
    plain = ziggurat(*command, "-o", tmp_path / "plain")
    job = ziggurat(*command, "-o", tmp_path / "out", "--job", tmp_path / "job")
    assert (plain.status, job.status, plain.out) == (0, 0, job.out)
    assert (tmp_path / "out").read_bytes() == (tmp_path / "plain").read_bytes()


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_scores_of_a_job_are_those_of_the_verb(
    ziggurat: Ziggurat, trained: Path, pairs: tuple[Path, Path], tmp_path: Path
) -> None:
    """To rounding: the verb scores all lines in common batches."""
    command = commands(trained, pairs)["score"]
    plain = ziggurat(*command, "--json")
    job = ziggurat(*command, "--json", "--job", tmp_path / "job")
    for one, other in zip(plain.out.splitlines(), job.out.splitlines(), strict=True):
        assert json.loads(one)["log_probability"] == pytest.approx(json.loads(other)["log_probability"], abs=1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_settings_and_inputs_of_a_job_stay(
    ziggurat: Ziggurat, trained: Path, pairs: tuple[Path, Path], tmp_path: Path
) -> None:
    job = ("--job", tmp_path / "job", "-o", tmp_path / "out")
    command = ("translate", trained, *SHORT, "-i", pairs[0], *job)
    assert ziggurat(*command, "--shard", "1/2").status == 0
    before = tree(tmp_path / "job")
    for other, said in (
        ((*command, "beam_size=3"), "decoding.beam_size (4 -> 3)"),
        ((*command, "--quality"), 'form ("text" -> "quality")'),
        (("translate", trained, *SHORT, "-i", pairs[1], *job), "inputs.0.files: other content"),
        (("score", trained, "--source", pairs[0], "--target", pairs[1], *job), 'verb ("translate" -> "score")'),
    ):
        told = ziggurat(*other)
        assert (told.status, said in " ".join(told.err.split())) == (2, True), told.err
    assert tree(tmp_path / "job") == before


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--shard", "1/2"), "`--shard` goes with `--job FOLDER`"),
        (("--ray", "auto"), "`--ray` goes with `--job FOLDER`"),
        (("--job", "job", "--merge", "--shard", "1/2"), "leave out `--shard`"),
        (("--job", "job", "--shard", "3/2"), "write i/n such as 1/4"),
        (("--job", "job", "--tag", "<x>"), "unknown tag '<x>'"),
        (("--job", "job", "beam_size=0"), "beam_size"),
        (("--job", "job", "precision=auto"), "name the precision"),
        (("--job", "."), "exists and is no folder of a `translate`"),
        (("--job", "job", "-i", "-"), "none can be standard input"),
        (("--job", "job", "-i", "bad"), "bad, line 2: not valid UTF-8"),
        (("--job", "job", "--prefix", "short"), "they must pair up"),
        (("--job", "job", "--ray", "auto", "--device", "cuda:1"), "write `cuda`"),
        (("--job", "job", "--ray", "local"), "`ray` is not installed"),
        (("--job", "job", "--document", "text"), "`--job` is for lines of text"),
    ],
)
def test_mistakes_are_told_before_anything_is_done(
    more: tuple[str, ...], said: str, ziggurat: Ziggurat, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    Path("text").write_text("Su divusim.\nNe gokun.\n")
    Path("short").write_text("go\n")
    Path("bad").write_bytes(b"good\n\xff\n")
    before = tree(tmp_path)
    text = () if {"-i", "--document"} & set(more) else ("-i", "text")
    told = ziggurat("translate", trained, *text, "-o", "out", *more)
    assert (told.status, said in " ".join(told.err.split())) == (2, True), told.err
    assert tree(tmp_path) == before


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_what_changes_while_a_job_runs_is_told(
    ziggurat: Ziggurat, trained: Path, pairs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that grows."""
    text = tmp_path / "text"
    text.write_bytes(pairs[0].read_bytes())
    command = ("translate", trained, *SHORT, "-i", text, "--window", 7, "-o", tmp_path / "out")
    write = StageFiles.write

    def grows(self: StageFiles, index: int, *arguments: Any, **counts: Any) -> Any:
        with text.open("a") as file:
            file.write("Ne gokun.\n")
        return write(self, index, *arguments, **counts)

    with monkeypatch.context() as patch:
        patch.setattr(StageFiles, "write", grows)
        told = ziggurat(*command, "--job", tmp_path / "job")
    assert (told.status, "text: changed while being read; begin again in" in " ".join(told.err.split())) == (2, True)
    assert not (tmp_path / "out").exists()


def test_what_a_job_knows_of_its_models(trained: Path, tmp_path: Path) -> None:
    """A run whose best checkpoint is another one when a worker opens it is refused, as is one of other vocabularies."""
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
    """One that was written again under the same name is another; what only scores does not read it."""
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
    """Samples are drawn, and n-best lists numbered, by the number of the line in the whole input."""
    settings = {"search": "sample", "n_best": 2, "beam_size": 2, "seed": 3, "max_length": {"limit": 6}, "min_length": 0}
    task = Translating(ModelChoice((str(trained),), device="cpu", decoding=settings).identified().choice)
    lines = [LineWithInputs("Su divusim."), LineWithInputs("Ne gokun."), LineWithInputs("Su divusim.")]
    whole, last = task(lines, 40)[0], task(lines[2:], 42)[0]
    assert last == whole[2:]
    assert [result.split()[0] for result in whole] == ["41", "42", "43"]
    assert replace(task, form="best")(lines[2:], 42)[0] == [last[0].split(" ||| ")[1]]  # as `evaluate` scores it


@pytest.mark.parametrize(
    ("verb", "said"),
    [
        (("score", "--source", "text", "--target", "text", "--workers", "2"), "`--workers` goes with `--job FOLDER`"),
        (
            ("evaluate", "--source", "text", "--reference", "text", "--perturb", "caps", "--job", "job"),
            "`--perturb` cannot be a job",
        ),
    ],
)
def test_what_bulk_work_does_not_go_with(
    verb: tuple[str, ...], said: str, ziggurat: Ziggurat, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("Su divusim.\nNe gokun.\n")
    told = ziggurat(verb[0], trained, *verb[1:])
    assert (told.status, told.out, said in " ".join(told.err.split())) == (2, "", True), told.err
    assert not Path("job").exists()


def test_progress_is_told_with_a_total_or_without(
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
