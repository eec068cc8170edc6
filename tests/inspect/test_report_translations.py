"""Translations for reports: which sentences are translated, when results are kept, and which are shown."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sacrebleu import sentence_chrf

from tests.conftest import tiny_experiment
from ziggurat.config import DecodingConfig
from ziggurat.data.corpus import Store
from ziggurat.inspect.report.runs import _search, as_csv, dev_sentences, read_run, sample_groups, translated
from ziggurat.model.directory import write_model_directory
from ziggurat.model.run_folder import MODEL_FILE
from ziggurat.model.tensors import read_tensors
from ziggurat.system.errors import CheckpointError
from ziggurat.train.loop import train
from ziggurat.translate.translator import load_translator


@pytest.fixture(scope="module")
def trained(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("report") / "run"
    train(run, tiny_experiment(tiny_folder, stop={"updates": 2}), console=Console(file=io.StringIO()))
    return run


def test_dev_sentences_are_spread_over_the_set(trained: Path, tiny_folder: Path) -> None:
    run = read_run(trained)
    sources, references = Store.open(tiny_folder / "store").dev.texts(range(20))  # type: ignore[union-attr]
    some = dev_sentences([run], 3)
    assert list(some.sources) == [sources[0], sources[10], sources[19]]
    assert list(some.references) == [references[0], references[10], references[19]]
    assert "3 of 20" in some.name
    assert list(dev_sentences([run], 99).sources) == sources


@pytest.mark.parametrize(
    ("decoding", "said"),
    [
        ({"beam_size": 4}, "beam of 4"),
        ({"beam_size": 1}, "greedy search"),
        ({"search": "sample"}, "samples"),
        ({"search": "sample", "mbr": 8}, "the most typical of 8 samples"),
    ],
)
def test_a_search_is_described_correctly(decoding: dict[str, Any], said: str) -> None:
    assert _search(DecodingConfig(**decoding)) == said


@pytest.mark.slow
def test_translations_come_from_the_best_model_and_are_kept(trained: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(trained, tmp_path / "run", symlinks=True)
    run = read_run(folder)
    sentences, said = dev_sentences([run], 4), list[str]()
    first = translated(run, sentences, said.append)
    assert first.outputs == [t.text for t in load_translator(folder).translate(list(sentences.sources))]
    assert "best, update 2" in first.origin
    assert len(said) == 1
    assert translated(run, sentences, said.append) == first
    assert len(said) == 1  # taken from the run
    (kept,) = (folder / "translations").iterdir()
    damaged = json.loads(kept.read_text()) | {"outputs": ["x"]}
    for content in (json.dumps(damaged), "{", "[]"):
        kept.write_text(content)
        assert translated(run, sentences, said.append) == first
    assert len(said) == 4
    other = run.experiment.decoding.model_copy(update={"beam_size": 1})
    object.__setattr__(run, "experiment", run.experiment.model_copy(update={"decoding": other}))
    translated(run, sentences, said.append)
    assert len(said) == 5
    weights = {name: tensor + 0.01 for name, tensor in read_tensors(folder / "best" / MODEL_FILE).items()}
    write_model_directory(folder / "averaged", weights, run.experiment, folder)
    assert "averaged" in translated(run, sentences, said.append).origin
    assert len(said) == 6


def test_a_run_without_a_checkpoint_is_named(trained: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(trained, tmp_path / "run", symlinks=True)
    run = read_run(folder)
    for name in ("best", "last", "averaged"):
        (folder / name).unlink(missing_ok=True)
    for checkpoint in (folder / "checkpoints").iterdir():  # otherwise the links would be repaired
        shutil.rmtree(checkpoint)
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        translated(run, dev_sentences([run], 2), lambda _: None)


def test_groups_hold_the_sentences_on_which_runs_differ_most() -> None:
    references = [
        f"the {word} cat sat here" for word in ("red", "blue", "green", "grey", "black", "white", "pink", "old")
    ]
    left = [*references[:2], "no", "the cat", *references[4:]]
    right = ["no", "the cat", *references[2:4], *references[4:]]
    groups = sample_groups(["left", "none", "right"], [left, None, right], ["source"] * 8, references)
    lines = {group.title: [sample.line for sample in group.samples] for group in groups}
    assert lines["left is ahead by most"] == [1, 2]
    assert lines["right is ahead by most"] == [3, 4]
    shown = [line for its in lines.values() for line in its]
    assert len(shown) == len(set(shown))
    sample = groups[0].samples[0]
    assert [output.run for output in sample.outputs] == [0, 2]
    assert [output.score for output in sample.outputs] == [
        pytest.approx(sentence_chrf(line, [references[0]]).score) for line in (left[0], right[0])
    ]


def test_sentences_with_middling_scores_are_in_between() -> None:
    reference = "one two three four five six seven eight nine ten"
    words = reference.split()
    outputs = [" ".join(words[:kept]) for kept in (6, 10, 1, 9, 2, 8, 3, 7, 4, 5, 0)]  # unordered
    groups = sample_groups(["a"], [outputs], ["x"] * len(outputs), [reference] * len(outputs))
    shown = {group.title: [len(outputs[sample.line - 1].split()) for sample in group.samples] for group in groups}
    assert shown["It does best here"] == [10, 9, 8]
    assert shown["It does worst here"] == [0, 1, 2]
    assert sorted(shown["In between"]) == [4, 5, 6]


def test_words_that_the_reference_lacks_are_marked_one_by_one() -> None:
    (group, *_) = sample_groups(["a"], [["A dog, a cat a ."]], ["x"], ["a cat and a dog"])
    assert group.samples[0].outputs[0].words == (
        ("A", True), ("dog,", True), ("a", True), ("cat", True), ("a", False), (".", False),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("line", "reference", "marked"),
    [
        ("我昨天买了两本书。", "我昨天买了三本书。", [("我昨天买了", True), ("两", False), ("本书。", True)]),
        ("他说他买了 iPad", "他说他买了 iPod", [("他说他买了 ", True), ("iPad", False)]),
        ("น้ำนี้ดีมากจริงๆ", "น้ำนั้ดีมากจริงๆ", [("น้ำ", True), ("นี้", False), ("ดีมากจริงๆ", True)]),
    ],
)
def test_text_without_blanks_is_marked_by_character(line: str, reference: str, marked: list[tuple[str, bool]]) -> None:
    (group, *_) = sample_groups(["a"], [[line]], ["x"], [reference])
    (output,) = group.samples[0].outputs
    assert (list(output.words), output.between) == (marked, "")


def test_the_table_of_all_translations() -> None:
    table = as_csv(["a", "b"], [['say "x"', ""], None], ["s1", "s2"], ["r,1", "r2"])
    assert list(csv.reader(io.StringIO(table))) == [
        ["line", "source", "reference", "a"], ["1", "s1", "r,1", 'say "x"'], ["2", "s2", "r2", ""],
    ]  # fmt: skip
