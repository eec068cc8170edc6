"""Options of other toolkits: what the hint names exists, and the hint has the given value."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from ziggurat.cli import hints as module
from ziggurat.cli import main
from ziggurat.cli.hints import hints
from ziggurat.config.reference import entries

KEYS = {entry.path for entry in entries()}
VERBS = ("translate", "evaluate", "compare", "perturb", "score", "prepare", "train", "inspect", "average")


@pytest.mark.parametrize("verb", VERBS)
def test_every_key_that_a_hint_names_exists(verb: str) -> None:
    prefix = "decoding." if verb in ("translate", "evaluate", "compare", "perturb", "score") else ""
    named = {(name, key) for name, hint in hints(verb).items() for key in re.findall(r"([a-z][\w.]*)=", hint)}
    assert named or verb == "average"
    assert not [(name, key) for name, key in named if prefix + key.replace(".0.", "[].") not in KEYS]


def test_no_name_occurs_twice_in_a_part() -> None:
    parts = yaml.safe_load(Path(module.__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    for part in parts.values():
        counted = Counter(name for names in part.values() for name in names.split())
        assert not [name for name, n in counted.items() if n > 1 or "_" in name]


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["translate", "x", "--beam", "8"], "beam_size=8"),
        (["translate", "x", "--lenpen=0.6"], "length_penalty.alpha=0.6"),
        (["translate", "x", "--gpu"], "--device cuda"),
        (["train", "x", "--max-tokens", "4096"], "training.batch.max_tokens=4096"),
        (["train", "x", "--update-freq", "--run", "y"], "training.batch.accumulate=VALUE"),
        (["train", "x", "--lr", "3e-4"], "training.schedule.peak=3e-4"),
        (["train", "x", "--activation-fn", "gelu"], "model.activation=gelu (relu, gelu, silu or swiglu)"),
        (
            ["train", "x", "--batch-size", "4096"],  # counts sentences in fairseq and JoeyNMT, words in Sockeye
            "training.batch.max_sentences=4096 for sentences, training.batch.max_tokens=4096 for tokens or words",
        ),
        (
            ["train", "x", "--restore-file", "a.pt"],
            "`ziggurat train --run FOLDER --resume` to resume, or training.start_from=a.pt for a new run",
        ),
        (["prepare", "x", "--joined-dictionary"], "data.subword.joint=true"),
        (["evaluate", "x", "--ref", "a.de"], "--reference a.de"),
        (["translate", "x", "--batch-size", "32"], "batch_sentences=32"),
        (["train", "x", "--share-all-embeddings"], "model.embedding.sharing=all"),
        (["prepare", "x", "--share_vocab"], "data.subword.joint=true"),
        (["average", "x", "--num-epoch-checkpoints", "5"], "--last 5"),
        (["translate", "x", "--shard", "3/40"], "`ziggurat bulk --shard 3/40 translate ...`"),
        (["prepare", "x", "--job=work"], "`ziggurat bulk --job work prepare ...`"),
        (["evaluate", "--compare", "a=x"], "`ziggurat compare a=x ... --source FILE --reference FILE`"),
        (
            ["evaluate", "x", "--perturb", "caps"],
            "`ziggurat perturb MODEL --kinds caps --source FILE --reference FILE`",
        ),
    ],
)
def test_hint(arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"Here: {hint}"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["train", "-config", "my.yaml"], "the configuration as the first argument"),
        (["prepare", "-config", "my.yaml"], "the configuration as the first argument"),
        (["translate", "x", "-src", "a.de"], "--input a.de"),
        (["train", "x", "-report_every", "100"], "training.log_every_updates=100"),  # otherwise `-r eport_every`
        (["train", "x", "-hidden_size=512"], "model.d_model=512"),
        (
            ["translate", "x", "-tgt", "a.en"],
            "`ziggurat score` with --target a.en for scores, or --prefix a.en for a forced beginning",
        ),
    ],
)
def test_options_with_one_hyphen_are_read_whole(
    arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    option = next(argument.partition("=")[0] for argument in arguments if argument.startswith("-"))
    assert capsys.readouterr().err == f"ziggurat: No such option: {option}\nHere: {hint}\n"


def test_all_options_of_other_toolkits_in_a_line_are_answered_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "x", "--lr", "3e-4", "--run", "y", "--colour", "--max-tokens=4096"])
    answered = dict(re.findall(r"^  (--[\w-]+): (.*)$", capsys.readouterr().err, flags=re.MULTILINE))
    assert answered == {"--lr": "training.schedule.peak=3e-4", "--max-tokens": "training.batch.max_tokens=4096"}


@pytest.mark.parametrize(
    ("command", "verb"),
    [
        ("fairseq-generate", "translate"),
        ("onmt_train", "train"),
        ("sockeye-average", "average"),
        ("sacrebleu", "evaluate"),
    ],
)
def test_commands_of_other_toolkits_are_answered(command: str, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "data-bin", "--path", "x"])
    assert stop.value.code == 2
    assert f"Here: `ziggurat {verb} " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["unheard-of", "x"])
    assert "Here:" not in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["train", "x", "--colour", "blue"], ["report", "-config", "x"]])
def test_options_of_no_verb_get_no_hint(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert "Here:" not in capsys.readouterr().err


def test_values_of_short_options_and_words_after_the_options_get_no_hint() -> None:
    assert module.single_hyphen_hint(["train", "x", "-rconfig"]) == ""
    assert module.single_hyphen_hint(["train", "x", "--", "-config"]) == ""
    assert module.single_hyphen_hint(["train", "x", "-config"]) != ""
