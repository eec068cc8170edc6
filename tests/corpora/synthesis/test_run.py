"""The same corpus after any kills and with any number of workers and parts; refusals."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.corpora.synthesis.conftest import BackTranslate, MakeJob, back_translated, tree
from ziggurat.corpora.jobs import launchers
from ziggurat.corpora.synthesis.backtranslation import BackTranslationJob, add_noise
from ziggurat.corpora.synthesis.lines import PairFilter, count_lines
from ziggurat.exchange.exporter import export_model
from ziggurat.system import files
from ziggurat.system.errors import ConfigError, DataError
from ziggurat.translate.results import TranslationWarning
from ziggurat.translate.translator import load_translator


@pytest.mark.slow
def test_an_exported_model_translates(make_job: MakeJob, in_process: BackTranslate, tmp_path: Path) -> None:
    """CTranslate2 gives the corpus of the model itself if both engines search in the same way."""
    alike = {"beam_size": 4, "endings": "beam", "length_penalty": {"kind": "none", "alpha": 0.0}, "min_length": 0}
    job = make_job(method="beam", decoding=alike)
    served = tmp_path / "served"
    export_model(job.models[0], "ctranslate2", served)
    theirs = replace(job, models=(str(served),), out=tmp_path / "theirs")
    ours, found = in_process(job).report, in_process(theirs).report
    assert ours is not None
    assert found is not None
    assert found.kept == ours.kept > 3  # few of the model's translations end
    for side in ("source.txt", "target.txt"):
        assert lines_of(theirs.out / side) == lines_of(job.out / side)
    assert in_process(theirs).report == found  # repeated, it finds its result
    with pytest.raises(DataError, match="models"):
        in_process(replace(job, out=theirs.out))
    with pytest.raises(ConfigError, match=r"CTranslate2 has no `decoding\.search: sample`"):
        in_process(replace(theirs, method="sample", decoding={}, out=tmp_path / "other"))


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        pytest.param("beam", {"beam_size": 4}, marks=pytest.mark.slow),
        ("noised-beam", {"beam_size": 4}),
        pytest.param("sample", {"search": "sample", "seed": 7}, marks=pytest.mark.slow),
        ("top-k", {"search": "sample", "seed": 7, "top_k": 10}),
    ],
)
def test_pairs_are_the_models_translations_filtered_and_noised(
    method: str, settings: dict[str, Any], make_job: MakeJob, mono: Path, in_process: BackTranslate
) -> None:
    job = make_job(shard_lines=21, seed=7, method=method)
    report = in_process(job).report
    assert report is not None
    texts = [raw.decode("utf-8", "replace") for raw in mono.read_bytes().split(b"\n")]
    translator = load_translator(job.models[0], device="cpu", **settings)
    good = [text if number not in (3, 4, 5, 6) else "" for number, text in enumerate(texts)]
    pairs, dropped = [], Counter({"empty": 1, "encoding": 1, "nul": 1, "too_long": 1})
    with pytest.warns(TranslationWarning):
        translations = [t for first in (0, 21) for t in translator.translate(good[first : first + 21], first=first)]
    for number, found in enumerate(translations):
        tokenizers = (translator.source_tokenizer, found.source), (translator.target_tokenizer, found.text)
        source, target = (len(tokenizer.encode([text])[0]) for tokenizer, text in tokenizers)
        if found.source and not found.hypotheses[0].finished:
            dropped["unfinished"] += 1
        elif found.source and max(source, target) > 50 * min(source, target):
            dropped["ratio"] += 1
        elif found.source:
            clean = re.sub("[ \t]+", " ", found.text).strip(" ")
            noisy = add_noise(clean, seed=7, line=number) if method == "noised-beam" else clean
            pairs.append((noisy, found.source))
    assert 5 < len(pairs) <= 38  # otherwise the test would show nothing
    assert list(zip(lines_of(job.out / "source.txt"), lines_of(job.out / "target.txt"), strict=True)) == pairs
    assert (report.read, report.kept, report.dropped) == (42, len(pairs), dropped)


@pytest.mark.slow
def test_samples_depend_on_the_seed_and_resume_unchanged(make_job: MakeJob, in_process: BackTranslate) -> None:
    whole, job, other = (make_job(name, method="sample", seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    for each in (whole, other):
        in_process(each)
    for part in (2, 0, 1):
        in_process(job, part=(part, 3))
    in_process(job)
    assert tree(job.out) == tree(whole.out)
    drawn, again = (lines_of(each.out / "source.txt") for each in (whole, other))
    assert len(set(drawn) - set(again)) > len(drawn) / 2


class Killed(BaseException):
    """A kill in the middle of the work."""


@contextlib.contextmanager
def killed_at(moment: int, *, before: bool, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Kill at the given write, before or after the file is in place; returns the number of writes so far."""
    writes, dead = [0], [False]
    replace_file, unlink = os.replace, os.unlink

    def replacing(source: str, target: str) -> None:
        writes[0] += 1
        dead[0] = writes[0] == moment + 1
        if dead[0] and before:
            raise Killed
        replace_file(source, target)
        if dead[0]:
            raise Killed

    def unlinking(path: str) -> None:
        if not dead[0]:  # a killed process cleans up nothing
            unlink(path)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", replacing)
        patch.setattr(files.os, "unlink", unlinking)
        yield writes


@pytest.mark.usefixtures("without_model")
def test_a_kill_at_any_write_gives_the_same_corpus(
    make_job: MakeJob, in_process: BackTranslate, monkeypatch: pytest.MonkeyPatch
) -> None:
    with killed_at(-1, before=True, monkeypatch=monkeypatch) as writes:
        in_process(make_job("whole", shard_lines=21))
    expected = tree(make_job("whole").out)
    assert writes[0] == 1 + 2 * 2 * 2 + 3  # the plan, files and manifests of both stages, both sides and their manifest
    for moment in range(writes[0]):
        job = make_job(str(moment), shard_lines=21)
        with pytest.raises(Killed), killed_at(moment, before=True, monkeypatch=monkeypatch):
            in_process(job)
        assert in_process(job).report is not None
        assert tree(job.out) == expected, moment


@pytest.mark.slow
@pytest.mark.usefixtures("without_model")
def test_kills_at_every_fourth_write_give_the_same_corpus(
    make_job: MakeJob, in_process: BackTranslate, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job()
    for kills in range(100):
        try:
            with killed_at(3, before=kills % 2 == 0, monkeypatch=monkeypatch):
                in_process(job)
        except Killed:
            continue
        break
    assert 3 < kills < 10
    in_process(make_job("whole"))
    assert tree(job.out) == tree(make_job("whole").out)


@pytest.mark.slow
def test_parts_are_merged_to_the_same_corpus(make_job: MakeJob, in_process: BackTranslate) -> None:
    whole, job = make_job("whole"), make_job()
    in_process(whole)
    seen: list[tuple[int, int, int | None]] = []
    assert in_process(job, part=(1, 3), progress=lambda *counts: seen.append(counts)).report is None
    assert seen == [(0, 0, 11), (0, 11, 11)]  # shard 1 of 4
    with pytest.raises(DataError, match="shard 0 of 4 is missing"):
        in_process(job, only_merge=True)
    in_process(job, part=(0, 3))
    in_process(job, part=(2, 3))
    assert in_process(job, only_merge=True).report == in_process(whole).report
    assert tree(job.out) == tree(whole.out)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_several_processes_give_the_same_corpus(make_job: MakeJob, in_process: BackTranslate) -> None:
    whole, job = make_job("whole"), make_job()
    in_process(whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launchers, "worker_pool", POOL)
        assert back_translated(job, workers=2).report is not None
    assert tree(job.out) == tree(whole.out)


POOL = launchers.worker_pool


@pytest.mark.usefixtures("without_model")
def test_a_complete_corpus_is_not_made_again(make_job: MakeJob, in_process: BackTranslate) -> None:
    job = make_job()
    report = in_process(job).report
    for path in (*job.out.glob("translated/*"), *job.out.glob("filtered/*")):
        path.unlink()  # no longer needed
    before = tree(job.out)
    assert in_process(job).report == report
    assert tree(job.out) == before
    (job.out / "source.txt").write_text("cut off")
    assert in_process(job).report == report
    assert tree(job.out).items() > before.items()


OTHER_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"seed": 2}, "decoding.seed (1 -> 2)"),
    ({"method": "beam"}, 'method ("noised-beam" -> "beam")'),
    ({"decoding": {"beam_size": 3}}, "decoding.beam_size (4 -> 3)"),
    ({"filters": PairFilter(max_pieces=9, max_ratio=50.0)}, "filters.max_pieces (250 -> 9)"),
    ({"shard_lines": 12}, "shard_lines (11 -> 12)"),
    ({"threads": 2}, "threads (1 -> 2)"),
    ({"forward": True}, "forward (false -> true)"),
    ({"which": "30"}, "models.0.weights ("),
]


@pytest.mark.slow
def test_other_settings_are_refused_by_name(make_job: MakeJob, in_process: BackTranslate) -> None:
    job = make_job()
    in_process(job, part=(0, 2))
    before = tree(job.out)
    for changes, message in OTHER_SETTINGS:
        with pytest.raises(DataError, match=re.escape(message)):
            in_process(replace(job, **changes))
        assert tree(job.out) == before
    in_process(replace(job, which="60"))  # the same weights under another name


@pytest.mark.slow
def test_other_files_and_models_are_refused(
    make_job: MakeJob, in_process: BackTranslate, mono: Path, tmp_path: Path
) -> None:
    job = make_job()
    in_process(job, part=(0, 2))
    copy = tmp_path / "copy"
    copy.write_bytes(mono.read_bytes())
    in_process(replace(job, inputs=(str(copy),)), part=(0, 2))  # the content counts, not the name
    copy.write_bytes(mono.read_bytes() + b"\n")
    with pytest.raises(DataError, match=r"inputs\.0\.files: other content"):
        in_process(replace(job, inputs=(str(copy),)))
    with pytest.raises(DataError, match=r"models \("):
        in_process(replace(job, models=job.models * 2))
    (job.out / "plan.json").write_text("{}")
    with pytest.raises(DataError, match=r"plan.json: damaged"):
        in_process(job)


def test_impossible_jobs_are_refused_before_anything_is_done(
    make_job: MakeJob, in_process: BackTranslate, tmp_path: Path
) -> None:
    nothing = tmp_path / "nothing"
    nothing.touch()
    with pytest.raises(DataError, match="no line in"):
        in_process(make_job(inputs=(str(nothing),)))
    with pytest.raises(DataError, match="--input: no such file"):
        in_process(make_job(inputs=("missing",)))
    with pytest.raises(ConfigError, match="beam_size"):
        in_process(make_job(decoding={"beam_size": 0}))
    with pytest.raises(ConfigError, match="n_best"):
        in_process(make_job(decoding={"n_best": 2}))
    assert not make_job().out.exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    with pytest.raises(DataError, match="exists and is not a folder of a `backtranslate`"):
        in_process(make_job("full"))


def test_a_text_without_a_usable_line_is_an_error_with_counts(
    make_job: MakeJob, in_process: BackTranslate, tmp_path: Path
) -> None:
    (tmp_path / "bad").write_bytes(b"\xff\n\n\n")
    with pytest.raises(DataError, match="none of 3 lines gave a pair; dropped: 2 empty, 1 encoding"):
        in_process(make_job(inputs=(str(tmp_path / "bad"),)))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.usefixtures("without_model")
def test_a_job_stopped_by_a_signal_resumes(number: int, make_job: MakeJob, in_process: BackTranslate) -> None:
    whole, job = make_job("whole"), make_job()
    in_process(whole)

    def signalled(before: int, now: int, total: int | None) -> None:
        if now >= 22:
            os.kill(os.getpid(), number)

    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    outcome = in_process(job, progress=signalled)
    assert (outcome.signal, outcome.report) == (number, None)
    assert len(list(job.out.glob("filtered/*.json"))) == 2
    assert not (job.out / "source.txt").exists()
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert in_process(job).report is not None
    assert tree(job.out) == tree(whole.out)


@pytest.mark.usefixtures("without_model")
def test_two_cannot_work_in_one_folder(make_job: MakeJob, in_process: BackTranslate) -> None:
    job = make_job()
    told = []

    def again(before: int, now: int, total: int | None) -> None:
        with pytest.raises(DataError, match="another backtranslate is at work here"):
            in_process(job)
        told.append(now)

    in_process(job, progress=again)
    assert (len(told), told[-1]) == (5, 42)


@pytest.mark.slow
def test_the_text_is_the_source_in_distillation_by_an_ensemble(
    make_job: MakeJob, in_process: BackTranslate, mono: Path
) -> None:
    single = make_job().models[0]
    forward = make_job(forward=True, method="beam", models=(single, single))
    in_process(forward)
    back = make_job("back", method="beam")
    in_process(back)
    assert lines_of(forward.out / "source.txt") == lines_of(back.out / "target.txt")
    assert lines_of(forward.out / "target.txt") == lines_of(back.out / "source.txt")
    assert set(lines_of(forward.out / "source.txt")) < set(mono.read_text("utf-8", "replace").split("\n"))


@pytest.mark.slow
@pytest.mark.usefixtures("without_model")
def test_hostile_files_lose_lines_or_are_refused_by_name(
    make_job: MakeJob, in_process: BackTranslate, shared_data: Path
) -> None:
    files = sorted((shared_data / "hostile").iterdir())
    records = [path for path in files if {".tsv", ".jsonl", ".parquet"} & set(path.suffixes)]
    for path in records:
        with pytest.raises(DataError, match=rf"--input: .*{path.name} holds records"):
            in_process(make_job(path.name, inputs=(str(path),)))
    inputs, refused = [], []
    for path in [path for path in files if path not in records]:
        with contextlib.suppress(DataError):
            count_lines([path])
            inputs.append(str(path))
            continue
        refused.append(path)
    for path in refused:  # damaged as files: their lines cannot be known
        assert path.suffix == ".gz"
        with pytest.raises(DataError, match=path.name):
            in_process(make_job(path.name, inputs=(str(path),)))
    assert (len(inputs) > 40, len(refused)) == (True, 5)
    job = make_job(inputs=tuple(inputs), method="beam", shard_lines=200)
    report = in_process(job).report
    assert report is not None
    assert report.kept + sum(report.dropped.values()) == report.read == count_lines([Path(path) for path in inputs])
    assert {"empty", "encoding", "nul", "too_long"} < set(report.dropped)
    sides = [(job.out / name).read_bytes() for name in ("source.txt", "target.txt")]
    assert [side.count(b"\n") for side in sides] == [report.kept] * 2
    assert not any(b"\0" in side or b"\r" in side for side in sides)
    assert not any(line in (b"", b" ") for side in sides for line in side.split(b"\n")[:-1])


def test_jobs_with_different_settings_differ(make_job: MakeJob) -> None:
    """A worker keeps its model for one job; another job must not get it, even if only its settings differ."""
    first: BackTranslationJob = make_job()
    assert first == make_job()
    assert first != make_job(decoding={"beam_size": 3})
    assert hash(first) == hash(make_job(decoding={"beam_size": 3}))
