"""OpusTrainer's files converted to our configuration, and modifiers that neither side knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ziggurat.cli import main
from ziggurat.config.data import CorpusConfig, DataConfig
from ziggurat.config.load import parse_experiment
from ziggurat.config.modifiers import TYPO_KINDS
from ziggurat.config.pipeline import BitextCorpus
from ziggurat.data.corpus import Store
from ziggurat.data.prepare import prepare
from ziggurat.exchange.opustrainer import opustrainer_text, read_opustrainer
from ziggurat.system.errors import ConfigError, DataError
from ziggurat.system.yaml_text import parse_yaml

FULL = """\
datasets:
  clean: data/clean
  dirty: /corpora/dirty.gz
stages: [start, end]
start:
  - clean 0.8
  - dirty 0.2
  - until clean 2
end:
  mix: [clean 1, until clean inf]
  modifiers: [UpperCase: 0.5]
modifiers:
  - UpperCase: 0.05
  - [TitleCase: 0.05, RemoveEndPunct: 0.2]
  - Prefix: 0.05
    min_words: 1
    template: "<{trg}> "
  - Merge: 0.01
    max_lines: 3
  - Noise: 0.0005
    max_words: 2
    min_word_legnth: 3
  - Typos: 0.1
    char_swap: 0.3
    unichar: 1
seed: 1111
trainer: /usr/bin/cat
"""
"""FULL follows the README and the examples of OpusTrainer 04cc492."""


def read(folder: Path, text: str, **settings: Any) -> DataConfig:
    (folder / "trainer.yml").write_text(text)
    section = {"source_language": "de", "target_language": "en", "store": "store", **settings}
    converted = parse_yaml(opustrainer_text(str(folder / "trainer.yml")), "converted")[0]["data"]
    return DataConfig.model_validate({**converted, **section})


def without_effect(folder: Path, text: str) -> list[str]:
    """Settings without effect become comments."""
    (folder / "trainer.yml").write_text(text)
    return list(read_opustrainer(str(folder / "trainer.yml"))["said"])


def test_a_whole_file(tmp_path: Path) -> None:
    data = read(tmp_path, FULL).model_dump(exclude_defaults=True)
    assert data["train"] == [
        {"path": f"{tmp_path}/data/clean", "format": "tsv", "name": "clean"},
        {"path": "/corpora/dirty.gz", "format": "tsv", "name": "dirty"},
    ]
    assert data["stages"] == [
        {"mix": {"clean": 0.8, "dirty": 0.2}, "until": {"corpus": "clean", "epochs": 2}},
        {"mix": {"clean": 1.0}, "until": {"corpus": "clean"}, "modifiers": {"upper_case": {"probability": 0.5}}},
    ]
    others = {kind: 0.0 for kind in TYPO_KINDS if kind not in ("char_swap", "unichar")}
    assert data["modifiers"] == {
        "merge": {"probability": 0.01, "max_pairs": 3},
        "noise": {"probability": 0.0005, "max_words": 2, "min_word_length": 3},
        "no_end_punctuation": {"probability": 0.2},
        "upper_case": {"probability": 0.05},
        "title_case": {"probability": 0.05},
        "typos": {"probability": 0.1, "char_swap": 0.3, "unichar": 1.0, **others},
        "prefix": {"probability": 0.05, "min_words": 1, "template": "<{trg}> "},
    }
    assert read(tmp_path, FULL.replace("min_word_legnth", "min_word_length")).model_dump(exclude_defaults=True) == data


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"terms": {"probability": 0.2}}),
        ({"replace": 0.5}, {"terms": {"probability": 0.2, "replace": 0.5}}),
        ({"augment": 1, "tag": 0}, {"inline": {"probability": 0.2, "tags": 0.0, "placeholders": 0.0}}),
        (
            {"augment": 0.5, "replace": 0.25, "custom_detok_trg": "spaces", "template": "{src} <{trg}>"},
            {
                "inline": {"probability": 0.1, "tags": 0.0, "placeholders": 0.0},
                "terms": {"probability": 0.1, "replace": 0.5, "template": "{src} <{trg}>"},
            },
        ),
    ],
)
def test_tags_are_two_modifiers_and_need_the_third_column(
    tmp_path: Path, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    lines = "".join(f"    {key}: '{value}'\n" for key, value in options.items())
    text = FULL[: FULL.index("modifiers:\n  - Upper")] + f"modifiers:\n  - Tags: 0.2\n{lines}"
    data = read(tmp_path, text).model_dump(exclude_defaults=True)
    assert data["modifiers"] == expected
    assert data["alignment"] == {"words": "blanks"}
    assert data["train"][0]["alignment"] == data["train"][0]["path"]
    assert data["train"][0]["alignment_column"] == 2
    ours = read(tmp_path, text, alignment={"words": "split"})
    assert ours.alignment.words == "split"


def test_tokenised_files_are_refused_and_vocabularies_of_others_named(tmp_path: Path) -> None:
    """OpusTrainer detokenises every line of files with `custom_detok_*`; we would train on the tokens."""
    tags = "modifiers:\n  - Tags: 0.2\n    custom_detok_src: {}\n    spm_vocab_trg: en.spm\n"
    for how in ("moses:en", "icu:de", "zh"):
        with pytest.raises(ConfigError, match=f"yml, line 14: `Tags`: custom_detok_src: {how} changes the text"):
            read(tmp_path, FULL[: FULL.index("modifiers:\n  - Upper")] + tags.format(how))
    for how in ("null", "spaces"):
        (message,) = without_effect(tmp_path, FULL[: FULL.index("modifiers:\n  - Upper")] + tags.format(how))
        assert message.startswith(f"{tmp_path}/trainer.yml, line 15: `Tags`: spm_vocab_trg has no effect")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "UpperCase: 0.05",
            "LowerCase: 0.05",
            "line 13: unknown modifier `LowerCase`; known are: UpperCase, TitleCase",
        ),
        ("UpperCase: 0.05", "UpperCase: often", "line 13: 'often' is not a number"),
        (
            "UpperCase: 0.05",
            "UpperCase: 1.5",
            "line 13: `UpperCase`: probability: .* less than or equal to 1",
        ),
        ("[TitleCase: 0.05", "[UpperCase: 0.05", "a second `upper_case`"),
        ("max_lines: 3", "most: 3", "`Merge` has no `most`; it has: min_lines, max_lines"),
        ("unichar: 1", "unichar: x", "'x' is not a number"),
        ('"<{trg}> "', '"<>"', r"must have `\{trg\}`"),
        ("- clean 0.8", "- clear 0.8", "line 6: unknown data set `clear`; known are: clean, dirty"),
        ("- dirty 0.2", "- clean 0.2", "line 7: the data set `clean` is named twice: give it one share"),
        ("  modifiers: [", "  modifier: [", "line 11: a stage has no `modifier`; it has: mix, modifiers"),
        ("- until clean 2", "- clean 2", "line 8: expected `until`, a data set and epochs"),
        ("- until clean 2", "- until rest 2", "line 8: expected `until`, a data set that the stage reads"),
        ("stages: [start, end]", "stages: [start, middle]", "the stage `middle` is not described"),
        ("stages: [start, end]", "stages: []", "`stages` is missing or empty"),
        ("seed: 1111", "version: 2", "version 2 is not known"),
        ("until clean inf", "until clean two", "'two' is not a number"),
        ("- until clean 2", "- until clean 1.9", "line 8: expected a number of epochs from 1, or `inf`; not 1.9"),
        ("- until clean 2", "- until clean 0", "line 8: expected a number of epochs"),
        ("mix: [", "mix: {", "not valid YAML"),
    ],
)
def test_faults_are_named_with_their_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in FULL
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path, FULL.replace(old, new, 1))
    assert str(tmp_path / "trainer.yml") in str(caught.value)


def test_keys_without_effect_are_reported_with_their_line(tmp_path: Path) -> None:
    """These are misspelt keys, unlisted stages, and settings for other programs; a file may have YAML anchors."""
    said = without_effect(tmp_path, f"{FULL}modifierz: []\nmiddle: [clean 1, until clean 1]\n")
    assert [line.removeprefix(f"{tmp_path}/trainer.yml, line ").partition(" has no effect: ")[0] for line in said] == [
        "26: `seed`",
        "27: `trainer`",
        "28: `modifierz`",
        "29: `middle`",
    ]


RETOKENIZE = """\
  - Retokenize: 0
    src: {tokenize: "spm:vocab.spm"}
    trg: {detokenize: spaces, tokenize: "moses:en"}
"""


def test_retokenize_only_numbers_alignments_again(tmp_path: Path) -> None:
    text = FULL.replace("seed: 1111\n", f"{RETOKENIZE}num_fields: 3\nseed: 1111\n")
    data, without = read(tmp_path, text), read(tmp_path, FULL)
    assert data.modifiers == without.modifiers
    assert data.train[0].alignment_column == 2, "the trainer gets alignments"
    (message,) = (message for message in without_effect(tmp_path, text) if "Retokenize" in message)
    assert message.startswith(f"{tmp_path}/trainer.yml, line 26: `Retokenize` has no effect")
    assert not any("Retokenize" in message for message in without_effect(tmp_path, FULL))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "detokenize: spaces",
            'detokenize: "moses:en"',
            "line 26: `Retokenize`: trg.detokenize: moses:en changes the text",
        ),
        ("spm:vocab.spm", "bpe:vocab", "src.tokenize: bpe:vocab; known are: spaces, moses, spm"),
        ("src: {", "source: {", "`src` and `trg`, each with `detokenize` and `tokenize`; not source"),
        ("{tokenize", "{join", "`src` and `trg`, each with `detokenize` and `tokenize`; not src"),
        ("num_fields: 3", "num_fields: 2", "line 29: `num_fields: 2` lacks the alignments that a modifier needs"),
        ("num_fields: 3", "num_fields: 1", "line 29: expected 2, or 3 with alignments; not 1"),
        ("num_fields: 3", "num_fields: all", "line 29: 'all' is not a number"),
    ],
)
def test_invalid_values_of_retokenize_and_num_fields(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = FULL.replace("seed: 1111\n", f"{RETOKENIZE}num_fields: 3\nseed: 1111\n")
    assert old in text
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text.replace(old, new, 1))


def test_rows_with_too_few_columns_are_left_out_and_counted(tmp_path: Path) -> None:
    """This is what OpusTrainer does; alignments stay with their pairs."""
    rows = [f"low {n} ufer\thigh {n}\t0-0 1-1" for n in range(300)]
    short = {0: "alone", 7: "two\tcolumns", 150: "", 299: "low\thigh"}
    lines = [short.get(n, row) if n % 10 else f"{row}\tmore" for n, row in enumerate(rows)]
    lines[0] = short[0]
    (tmp_path / "text.tsv").write_text("".join(f"{line}\n" for line in lines))
    stages = "datasets: {all: text.tsv}\nstages: [only]\nonly: [all 1, until all 1]\nseed: 1\n"
    settings = {"store": str(tmp_path / "store"), "subword": {"vocabulary_size": 320}}
    report = prepare(read(tmp_path, f"{stages}num_fields: 3\n", **settings))
    (corpus,) = report.corpora
    assert (corpus.read, corpus.kept, corpus.short_rows, corpus.aligned) == (297, 297, 3, 297)
    assert report.notices == []
    store = Store.open(str(tmp_path / "store"))
    assert all(len(links) == 2 for links in store.train.links(range(len(store.train))))

    with pytest.raises(DataError, match=r"text\.tsv, line 1: 1 columns, but column 1"):
        prepare(read(tmp_path, stages, **{**settings, "store": str(tmp_path / "strict")}))
    (tmp_path / "text.tsv").write_text("".join(f"{line}\n" for line in (*rows[:90], *["low\thigh"] * 10)))
    (message,) = prepare(read(tmp_path, f"{stages}num_fields: 3\n", **settings), force=True).notices
    assert "data.train.0: 10 of 100 rows" in message
    assert "have fewer than 3 columns and were left out" in message


@pytest.mark.parametrize(
    ("corpus", "message"),
    [
        ({"row_columns": 2, "alignment": "other"}, "an `alignment` in another file"),
        ({"row_columns": 3, "scores": [{"column": 2, "min": 0}]}, "leaves out rows"),
        ({"row_columns": 2, "columns": [0, 2]}, "`row_columns: 2` does not reach column 2"),
    ],
)
def test_rows_cannot_be_left_out_of_only_one_of_two_files(corpus: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CorpusConfig.model_validate({"path": "a.tsv", **corpus})
    if "alignment" not in corpus:
        with pytest.raises(ValueError, match=message):
            BitextCorpus.model_validate({"path": "a.tsv", **corpus})


def test_the_verb_prints_the_section_and_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def status(*arguments: object) -> int:
        with pytest.raises(SystemExit) as stop:
            main(["recipes", *map(str, arguments)])
        return int(stop.value.code or 0)

    (tmp_path / "trainer.yml").write_text(FULL)
    assert status("--from", tmp_path / "trainer.yml") == 0
    printed = capsys.readouterr().out
    comments = " ".join(line.removeprefix("# ") for line in printed.splitlines() if line.startswith("#"))
    assert "data.source_language, data.target_language, data.store" in comments
    assert "`trainer` has no effect" in comments
    assert status("--from", tmp_path / "none.yml") == 2
    assert "none.yml: no such OpusTrainer file" in capsys.readouterr().err
    assert status("demo", "--from", tmp_path / "trainer.yml") == 2


def test_unknown_modifiers_are_reported_with_the_known_ones() -> None:
    text = (
        "data:\n  source_language: de\n  target_language: en\n  store: s\n  modifiers: {UpperCase: {probability: 1}}\n"
    )
    known = "merge, noise, no_end_punctuation, upper_case, title_case, typos, inline, terms, prefix"
    with pytest.raises(ConfigError, match=f"line 5: `data.modifiers`: unknown modifier `UpperCase`; valid: {known}"):
        parse_experiment(text, "x.yaml")


@pytest.mark.parametrize(
    ("modifiers", "message"),
    [
        ({"terms": {"probability": 0.1, "template": "{src} {src} {trg}"}}, "each once"),
        (
            {"merge": {"probability": 0.1, "min_pairs": 4, "max_pairs": 3}},
            r"`min_pairs` \(4\) is above `max_pairs` \(3\)",
        ),
        ({"inline": {"probability": 0.1, "tags": 0, "placeholders": 0, "noise": 0}}, "must be above 0"),
        ({"upper_case": {"probability": -0.1}}, "greater than or equal to 0"),
        ({"upper_case": 0.1}, "upper_case"),
    ],
)
def test_invalid_modifiers(modifiers: dict[str, Any], message: str) -> None:
    section = {"source_language": "de", "target_language": "en", "store": "store", "modifiers": modifiers}
    with pytest.raises(ValueError, match=message):
        DataConfig.model_validate(section)
