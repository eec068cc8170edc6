"""Options of other toolkits: what the hint says is there, and the value given is in it."""

from __future__ import annotations

import re

import pytest

from ziggurat.cli import main
from ziggurat.cli.hints import HINTS
from ziggurat.config.reference import entries

KEYS = {entry.path for entry in entries()}


def test_every_key_that_a_hint_names_exists() -> None:
    wrong = []
    for verb, hints in HINTS.items():
        prefix = "decoding." if verb in ("translate", "evaluate", "score") else ""
        for name, instead in hints.items():
            key = re.match(r"([\w.]+)=", instead)
            if key and prefix + key[1] not in KEYS:
                wrong.append((verb, name, instead))
    assert not wrong


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["translate", "x", "--beam", "8"], "beam_size=8"),
        (["translate", "x", "--lenpen=0.6"], "length_penalty.alpha=0.6"),
        (["translate", "x", "--gpu"], "--device cuda"),
        (["train", "x", "--max-tokens", "4096"], "training.batch.max_tokens=4096"),
        (["train", "x", "--update-freq", "--seed", "1"], "training.batch.accumulate=VALUE"),
        (["train", "x", "--lr", "3e-4"], "training.schedule.peak=3e-4"),
        (["prepare", "x", "--joined-dictionary"], "data.subword.joint=true"),
        (["evaluate", "x", "--ref", "a.de"], "--reference a.de"),
        (["translate", "x", "--batch-size", "32"], "batch_sentences=32"),  # sentences, elsewhere too
        (["translate", "x", "-src", "a.de"], "--input a.de"),
        (["train", "x", "--share-all-embeddings"], "model.embedding.sharing=all"),
        (["average", "x", "--num-epoch-checkpoints", "5"], "--last 5"),
    ],
)
def test_hint(arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"Here that is: {hint}"


@pytest.mark.parametrize("verb", ["train", "prepare"])
def test_options_with_one_hyphen_are_read_whole(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([verb, "-config", "my.yaml"])
    assert capsys.readouterr().err.splitlines()[-1] == "Here, give the configuration as the first argument"


def test_options_that_nobody_has_get_no_hint(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "x", "--colour", "blue"])
    assert "Here" not in capsys.readouterr().err
