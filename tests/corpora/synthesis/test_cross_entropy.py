"""The cross-entropy filter: the pairs that stay, checked by a loop over the model's scores; parts; refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Ziggurat
from tests.cli.conftest import ziggurat as ziggurat
from tests.corpora.synthesis.conftest import tree
from ziggurat.corpora.jobs import launchers
from ziggurat.corpora.jobs.job import JobOutcome, Work
from ziggurat.corpora.synthesis.backtranslation import Report
from ziggurat.corpora.synthesis.cross_entropy import FilterJob, filter_pairs
from ziggurat.data.babel import generate
from ziggurat.system.errors import ConfigError, DataError
from ziggurat.translate.translator import Translator, load_translator

MakeFilter = Callable[..., FilterJob]
BAD = [("", "nothing"), ("something", " \t "), ("nul \0", "here"), ("w " * 300, "many pieces")]


@pytest.fixture(scope="module")
def pairs() -> list[tuple[str, str]]:
    """Pairs, every fifth of which has the translation of another one, and four that cannot be scored."""
    found = list(generate(40, seed=21))
    for n in range(0, 40, 5):
        found[n] = found[n][0], found[(n + 7) % 40][1]
    found[7:7] = BAD
    return found


@pytest.fixture
def make_filter(reverse: Path, pairs: list[tuple[str, str]], tmp_path: Path) -> MakeFilter:
    for side, name in enumerate(("source", "target")):
        (tmp_path / name).write_text("".join(pair[side] + "\n" for pair in pairs), encoding="utf-8")

    def make(out: str = "out", **changes: Any) -> FilterJob:
        given = {"sources": (str(tmp_path / "source"),), "targets": (str(tmp_path / "target"),), "keep": 0.8}
        given |= {"models": (str(reverse),), "device": "cpu", "shard_lines": 9}
        return FilterJob(out=tmp_path / out, **{**given, **changes})

    return make


def filtered(job: FilterJob, **work: Any) -> JobOutcome[Report]:
    return filter_pairs(job, Work(partial(launchers.processes, 1), **work))


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="module")
def model(reverse: Path) -> Translator:
    return load_translator(reverse, device="cpu")


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(("keep", "backwards"), [(0.8, False), (0.5, True), (1.0, False)])
def test_the_least_likely_share_is_dropped(
    keep: float, backwards: bool, make_filter: MakeFilter, pairs: list[tuple[str, str]], model: Translator
) -> None:
    job = make_filter(keep=keep, reverse=backwards)
    good = [pair for pair in pairs if pair not in BAD]
    if backwards:  # the model reads qlo, so the sides of its corpus are swapped
        job = make_filter(keep=keep, reverse=True, sources=job.targets, targets=job.sources)
    scored = model.score([source for source, _ in good], [target for _, target in good])
    means = [score.log_probability / len(score.token_log_probabilities) for score in scored]
    worst = sorted(means)[: round((1 - keep) * len(good))]
    expected = [pair for pair, mean in zip(good, means, strict=True) if mean not in worst]
    report = filtered(job).report
    assert report is not None
    sides = ("target.txt", "source.txt") if backwards else ("source.txt", "target.txt")
    assert list(zip(*(lines_of(job.out / side) for side in sides), strict=True)) == expected
    unlikely = {"cross_entropy": len(worst)} if worst else {}
    assert report.dropped == {"empty": 2, "nul": 1, "too_long": 1, **unlikely}
    assert (report.read, report.kept) == (44, len(expected))
    assert report.scores["threshold"] == pytest.approx(min(m for m in means if m not in worst), abs=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_parts_and_a_damaged_shard_give_the_same_corpus(make_filter: MakeFilter, tmp_path: Path) -> None:
    whole, parts = make_filter("whole"), make_filter("parts")
    report = filtered(whole).report
    assert filtered(parts, part=(1, 2)).report is None
    assert filtered(parts, part=(0, 2)).report is None
    (parts.out / "scored" / "00000001.json").unlink()  # as a kill leaves it
    with pytest.raises(DataError, match="shard 1 of 5 is missing"):
        filtered(parts, only_merge=True)
    assert filtered(parts).report == report
    assert tree(parts.out) == tree(whole.out)
    before = (whole.out / "source.txt").stat().st_mtime_ns
    assert filtered(whole).report == report
    assert (whole.out / "source.txt").stat().st_mtime_ns == before
    for changes, named in (({"keep": 0.7}, "keep"), ({"reverse": True}, "reverse")):
        with pytest.raises(DataError, match=rf"was started with other settings or files \(there -> now\): {named}"):
            filtered(make_filter("whole", **changes))


@pytest.mark.usefixtures("in_process")
def test_impossible_filters_are_refused(make_filter: MakeFilter, tmp_path: Path) -> None:
    (tmp_path / "few").write_text("one\n")
    for changes, error, message in (
        ({"keep": 0.0}, ConfigError, "--keep 0"),
        ({"keep": 1.5}, ConfigError, "--keep 1.5"),
        ({"targets": (str(tmp_path / "few"),)}, DataError, "source has 44 lines, .*few has 1: they must pair up"),
        ({"targets": (str(tmp_path / "none"),)}, DataError, "--target: no such file"),
        ({"decoding": {"precision": "auto"}}, ConfigError, "name the precision, `precision=float32`"),
    ):
        with pytest.raises(error, match=message):
            filtered(make_filter(**changes))
    assert not (tmp_path / "out").exists()
    (tmp_path / "blank").write_text("\n")
    with pytest.raises(DataError, match="no pair of 1 could be scored"):
        filtered(make_filter(sources=(str(tmp_path / "blank"),), targets=(str(tmp_path / "few"),)))


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_the_verb(ziggurat: Ziggurat, reverse: Path, make_filter: MakeFilter, tmp_path: Path) -> None:
    job = make_filter()
    texts = ("--source", *job.sources, "--target", *job.targets)
    call = ("filter", reverse, "precision=float32", *texts, "-o", tmp_path / "kept", "--device", "cpu", "--keep", "0.9")
    status, printed, errors = ziggurat(*call)
    assert status == 0, errors
    assert re.search(r"kept: 36 pairs of 44 lines; dropped: 4 cross_entropy, 2 empty, 1 nul, 1 too_long", printed)
    assert re.search(r"threshold -[\d.]+, median -[\d.]+", errors)
    assert "kept/source.txt" in printed
    found = json.loads(ziggurat(*call, "--json").out)
    assert (found["kept"], found["dropped"]["cross_entropy"]) == (36, 4)
    assert found["threshold"] <= found["median"] < 0
    swapped = (*call[:3], "--reverse", *texts, "-o", tmp_path / "wrong", "--device", "cpu")
    assert "did you mean to use it without `--reverse`" in " ".join(ziggurat(*swapped).err.split())
    for wrong, message in (
        (call[:3], "`--source FILE` is missing"),
        (call[:7], "`--out FOLDER` is missing"),
        ((*call, "kept.txt"), "`kept.txt` is not a decoding setting"),
        ((*call, "precision=auto"), "name the precision"),
    ):
        status, _, errors = ziggurat(*wrong)
        assert (status, message in errors) == (2, True)
