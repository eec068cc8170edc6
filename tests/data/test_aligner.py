"""The aligner as a whole: its quality on known alignments, its file, and the verb."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save

from tests.cli.conftest import Ziggurat
from tests.cli.conftest import ziggurat as ziggurat
from ziggurat.data.aligner import MOST_WORDS, Aligner, error_rate, format_links, parse_links, read_aligner
from ziggurat.data.babel import AlignedPair, generate_aligned
from ziggurat.system.errors import DataError


@pytest.fixture(scope="module")
def pairs() -> list[AlignedPair]:
    return list(generate_aligned(2000, 1))


@pytest.fixture(scope="module")
def aligner(pairs: list[AlignedPair]) -> Aligner:
    return Aligner.train((pair.low, pair.high) for pair in pairs)


def test_the_embedded_pair_is_aligned_well(pairs: list[AlignedPair], aligner: Aligner) -> None:
    new = list(generate_aligned(300, 2))
    for some in (pairs[:300], new):
        found = aligner.align([pair.low for pair in some], [pair.high for pair in some])
        score = error_rate(found, [pair.sure for pair in some], [pair.possible for pair in some])
        assert score.error_rate < 0.12, score  # 0.08 as measured
    assert not any(aligner.align([""], ["Madona."]))


def test_pairs_that_are_too_long_have_no_links(aligner: Aligner) -> None:
    long = "Madona " * (MOST_WORDS + 1)
    assert aligner.align([long, "Madona."], ["Madona.", "Madona."]) == [set(), {(0, 0), (1, 1)}]


def test_unknown_words_are_aligned_by_position(aligner: Aligner) -> None:
    assert aligner.align(["xxx yyy zzz"], ["XXX YYY ZZZ"]) == [{(0, 0), (1, 1), (2, 2)}]


def test_a_stored_aligner_gives_the_same_links(aligner: Aligner, pairs: list[AlignedPair], tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(aligner.content())
    kept = read_aligner(path)
    assert kept.content() == aligner.content()
    texts = [pair.low for pair in pairs[:50]], [pair.high for pair in pairs[:50]]
    assert kept.align(*texts) == aligner.align(*texts)


def test_damaged_files_are_refused(aligner: Aligner, tmp_path: Path) -> None:
    content = aligner.content()
    tensors = load(content)
    metadata = {"format": "ziggurat-aligner-1", "rule": "split"}
    backwards = {**tensors, "forward.keys": tensors["forward.keys"][::-1].copy()}
    outside = {**tensors, "backward.keys": tensors["backward.keys"] + (1 << 40)}
    negative = {**tensors, "forward.first": -tensors["forward.first"]}
    words = {**tensors, "source_words": np.full(3, 0xFF, np.uint8)}
    short = {**tensors, "backward.probabilities": tensors["backward.probabilities"][1:]}
    certain = {**tensors, "forward.empty": np.array([1.0])}
    missing = {name: tensor for name, tensor in tensors.items() if name != "forward.last"}
    cases = [save(t, metadata) for t in (backwards, outside, negative, words, short, certain, missing)]
    cases += [
        content[:-1],
        b"",
        b"{}",
        save(tensors, {**metadata, "format": "2"}),
        save(tensors, {**metadata, "rule": ""}),
    ]
    for number, case in enumerate(cases):
        path = tmp_path / str(number)
        path.write_bytes(case)
        with pytest.raises(DataError, match=rf"{number}: .*train it again"):
            read_aligner(path)
    with pytest.raises(DataError, match="no such file"):
        read_aligner(tmp_path / "none")


def test_the_verb_writes_a_line_for_each_pair(pairs: list[AlignedPair], ziggurat: Ziggurat, tmp_path: Path) -> None:
    source, target, out, model = (tmp_path / name for name in ("source", "target", "out", "model"))
    lows, highs = [pair.low for pair in pairs[:400]], [pair.high for pair in pairs[:400]]
    lows[7] = ""
    source.write_text("".join(line + "\n" for line in lows))
    target.write_text("".join(line + "\n" for line in highs))
    done = ziggurat("align", source, target, "-o", out, "--save-model", model, "--pairs", "100", "--json")
    assert done.status == 0, done.err
    report = json.loads(done.out)
    lines = out.read_text().splitlines()
    assert (report["pairs"], report["without_links"], len(lines), lines[7]) == (400, 1, 400, "")
    assert report["links"] == sum(len(parse_links(line, None, None, "here")) for line in lines)
    # Every fourth pair was used for training; that model was kept.
    known = Aligner.train(list(zip(lows, highs, strict=True))[::4])
    assert lines == [format_links(links) for links in known.align(lows, highs)]
    again = ziggurat("align", source, target, "--input-model", model)
    assert again.out.splitlines() == lines
    union = ziggurat("align", source, target, "--input-model", model, "--symmetrise", "union")
    assert len(union.out) > len(again.out)


def test_the_verb_reports_what_is_wrong(ziggurat: Ziggurat, tmp_path: Path) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    source.write_text("a\nb\n")
    target.write_text("a\n")
    empty = tmp_path / "empty"
    empty.write_text("\n\n")
    for arguments, message in (
        ((source, target), "not aligned"),
        ((source, empty), "no pair to train"),
        ((source, source, "--input-model", target, "--null", "0.1"), "`--null` is for training"),
        ((source, source, "--input-model", target), "damaged, or no aligner"),
        ((source, source, "-o", source), "is an input"),
        ((source, source, "--json"), "standard output"),
    ):
        out = () if "--json" in arguments or "-o" in arguments else ("-o", tmp_path / "out")
        done = ziggurat("align", *arguments, *out)
        assert (done.status, message in done.err) == (2, True), done.err
        assert not (tmp_path / "out").exists()
    assert source.read_text() == "a\nb\n"
