"""Commands as a newcomer types them: mistakes get a way out, and every verb reports what it did."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import typer

from tests.cli.conftest import Ziggurat, tiny_config
from ziggurat.cli.app import app
from ziggurat.cli.output import counted
from ziggurat.config import load_experiment
from ziggurat.config.recipes import load_named, paper_keys, paper_recipes
from ziggurat.data.babel import generate
from ziggurat.train.loop import TrainingResult

DOCS = Path(__file__).parents[2] / "docs"
VERBS = cast(Any, typer.main.get_command(app))


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["", "decoding."])
def test_wrong_decoding_settings_are_named_like_those_of_a_file(ziggurat: Ziggurat, trained: Path, prefix: str) -> None:
    for setting, message in (
        ("beam=8", "unknown key `decoding.beam`; did you mean `decoding.beam_size`?"),
        ("beam_size=many", "`decoding.beam_size`: input should be a valid integer, not 'many'"),
        ("length_penalty.alphaa=1", "did you mean `decoding.length_penalty.alpha`?"),
    ):
        status, _, errors = ziggurat("translate", trained, f"{prefix}{setting}")
        assert status == 2
        assert message in errors


@pytest.mark.parametrize(
    "verb",
    [
        ["translate"],
        ["evaluate", "--source", "my.yaml", "--reference", "my.yaml"],
        ["export", "--to", "plain", "--out", "new"],
        ["report"],
        ["diagnose"],
    ],
)
def test_a_wrong_folder_gets_a_way_out(
    verb: list[str], ziggurat: Ziggurat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "my.yaml").write_text("data: {}\n")
    for given, message in (
        ("runs/First", "; did you mean `runs/first`?"),
        ("my.yaml", "my.yaml: is a configuration, expected a run"),
    ):
        status, _, errors = ziggurat(verb[0], given, *verb[1:])
        assert status == 2
        assert message in errors


@pytest.mark.slow
def test_decoding_settings_with_and_without_their_prefix_do_the_same(
    ziggurat: Ziggurat, trained: Path, text: Path
) -> None:
    outputs = {
        ziggurat("translate", trained, "-i", text, f"{prefix}n_best=2", f"{prefix}max_length.limit=2")[1]
        for prefix in ("", "decoding.")
    }
    assert len(outputs) == 1
    assert "2 ||| " in outputs.pop()


def test_a_file_given_as_a_setting_gets_a_hint_to_its_option(
    ziggurat: Ziggurat, trained: Path, text: Path, tmp_path: Path
) -> None:
    status, _, errors = ziggurat("translate", trained, text)
    assert status == 2
    assert f"`--input {text}`" in errors
    status, _, errors = ziggurat("evaluate", trained, text)
    assert status == 2
    assert f"`--source {text}`" in errors


@pytest.mark.slow
def test_each_verb_reports_which_weights_it_uses(ziggurat: Ziggurat, trained: Path, text: Path, tmp_path: Path) -> None:
    assert ziggurat("average", trained, "--last", "2")[0] == 0
    update = int((trained / "last").resolve().name.removeprefix("step-"))
    pairs = ["--source", text, "--reference", text, "--metrics", "chrf"]
    for which, said in (
        ([], "averaged checkpoints"),
        (["--which", "averaged"], "averaged checkpoints"),
        (["--which", "last"], f"last, update {update}"),
        (["--which", str(update)], f"update {update}"),
    ):
        for verb in (
            ["translate", trained, "max_length.limit=2", "-i", text],
            ["score", trained, "--source", text, "--target", text],
            ["evaluate", trained, "max_length.limit=2", *pairs],
        ):
            status, out, errors = ziggurat(*verb, *which)
            assert status == 0
            assert errors.splitlines()[0] == f"{trained}: {said}"
            assert said not in out
    checkpoint = trained / "checkpoints" / f"step-{update:08d}"
    assert f"{checkpoint}: update {update}\n" in ziggurat("score", checkpoint, "--source", text, "--target", text)[2]
    averaged = trained / "averaged"
    assert f"{averaged}: model directory\n" in ziggurat("score", averaged, "--source", text, "--target", text)[2]


@pytest.mark.slow
def test_threads_reach_torch(ziggurat: Ziggurat, trained: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    translate = ["translate", trained, "max_length.limit=2", "-i", text]
    score = ["score", trained, "--source", text, "--target", text]
    evaluate = ["evaluate", trained, "max_length.limit=2", "--source", text, "--reference", text, "--metrics", "chrf"]
    for verb in (translate, score, evaluate):
        assert ziggurat(*verb)[0] == 0
        assert asked == []
        assert ziggurat(*verb, "--threads", "3")[0] == 0
        assert asked == [3]
        asked.clear()
    status, _, errors = ziggurat(*translate, "--threads", "0")
    assert status == 2
    assert "--threads" in errors


@pytest.mark.parametrize("verb", sorted(VERBS.commands))
def test_help_shows_every_word_and_an_example(ziggurat: Ziggurat, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich takes text in angle brackets for HTML and some text in square brackets for a style, and shows neither."""
    monkeypatch.setenv("COLUMNS", "1000")
    shown = " ".join(ziggurat(verb, "--help").out.split())
    command = VERBS.commands[verb]
    texts = [getattr(parameter, "help", None) for parameter in command.params]
    texts += (command.help or "").split("\n\n")
    for text in filter(None, texts):
        assert " ".join(text.replace("`", "").split()) in shown
    assert f"ziggurat {verb}" in shown.partition("Example")[2]


def test_a_section_is_explained_without_an_empty_default(ziggurat: Ziggurat) -> None:
    _, out, _ = ziggurat("explain", "model.encoder")
    assert out.startswith("model.encoder  (section)\n    Encoder stack.\nmodel.encoder.layers  (integer; default: 6)\n")
    assert "default: )" not in ziggurat("explain")[1]


def test_the_end_of_a_key_matches_all_keys_that_end_so(ziggurat: Ziggurat) -> None:
    def told(key: str) -> list[str]:
        return [line.split()[0] for line in ziggurat("explain", key)[1].splitlines() if line[0] != " "]

    assert told("hold_out") == ["bitext.hold_out", "bitext.hold_out.dev", "bitext.hold_out.test"]
    assert told("pair_score") == ["data.filters.pair_score", "cleaning.pair_score"]
    assert told("without_layers") == [f"{model}.without_layers" for model in ("backward", "teacher", "student")]
    assert told("stop.updates") == ["training.stop.updates"]
    assert told("updates") == ["training.stop.updates", "training.growth.stages[].updates", "quantisation.updates"]
    assert "did you mean" in ziggurat("explain", "pdates").err  # not a whole part of a key


def test_a_section_shows_its_own_keys_and_counts_those_inside_its_sections(ziggurat: Ziggurat) -> None:
    shown = [line.split()[0] for line in ziggurat("explain", "training.batch")[1].splitlines() if line[0] != " "]
    assert {"training.batch", "training.batch.max_tokens"} <= set(shown)
    out = ziggurat("explain", "training")[1]
    assert "training.batch.max_tokens  (" not in out
    assert f"{len(shown) - 1} keys: `ziggurat explain training.batch`." in out
    documents = json.loads(ziggurat("explain", "training", "--json")[1])
    assert {"training.batch.max_tokens", "training.schedule.kind"} <= {d["path"] for d in documents}


def test_keys_of_list_items_are_explained_by_number_too(ziggurat: Ziggurat) -> None:
    assert ziggurat("explain", "data.train.0.weight")[1].startswith("data.train[].weight  (number; default: 1.0)")
    assert "data.dev[].tag" in ziggurat("explain", "data.dev")[1]
    assert ziggurat("explain", "bitext.train.0.weight")[1].startswith("bitext.train[].weight  (number; default: 1.0)")
    assert ziggurat("explain", "data.train.0")[1] == ziggurat("explain", "data.train[]")[1]


def test_a_method_is_explained_by_value_name_and_paper(ziggurat: Ziggurat) -> None:
    out = ziggurat("explain", "DS-Init")[1]
    assert out.startswith("ds-init  (paper)\n    Zhang, Titov and Sennrich 2019: ")
    assert "\nmodel.init.kind: depth_scaled\n" in out
    for fact in ("equation 15", "model.init.exponent", "ds-init-en-de-base-6-6-ds,", " more", "docs/depth.md#init"):
        assert fact in out
    merged = ziggurat("explain", "merged attention")[1]
    assert merged.startswith("model.decoder.attention: merged\n")
    assert merged == ziggurat("explain", "MAtt")[1]
    assert "paper: none: the plain case\n" in ziggurat("explain", "relu")[1]


@pytest.mark.parametrize(("name", "term"), [("beta", "beta"), ("Var(r)", "variance"), ("Depth-Check", "depth check")])
def test_a_word_of_the_output_is_explained_with_a_page(ziggurat: Ziggurat, name: str, term: str) -> None:
    status, out, _ = ziggurat("explain", name)
    (record,) = json.loads(ziggurat("explain", name, "--json")[1])
    assert (status, record["term"]) == (0, term)
    assert record["what"] in out
    page, anchor = record["page"].split("#")
    text = (Path(__file__).parents[2] / page).read_text(encoding="utf-8")
    assert f"## {anchor.replace('-', ' ').capitalize()}\n" in text


def test_a_name_of_a_key_and_a_method_is_explained_as_both(ziggurat: Ziggurat) -> None:
    out = ziggurat("explain", "transparent")[1]
    places = [out.index(part) for part in ("model.dropout.transparent  (", "transparent  (paper)", "model.memory: ")]
    assert places == sorted(places)
    found = json.loads(ziggurat("explain", "transparent", "--json")[1])
    assert [next(iter(record)) for record in found] == ["path", "paper_key", "method"]
    assert len(found[2]["recipes"]) > 20
    assert "model.residual: siamese" in found[2]["refused_with"]
    for key in ("training", "training.schedule", "model.heads", ""):
        assert {next(iter(record)) for record in json.loads(ziggurat("explain", key, "--json")[1])} == {"path"}


@pytest.mark.parametrize(
    ("typed", "meant"), [("trainn", "train"), ("eval", "evaluate"), ("translat", "translate"), ("recipe", "recipes")]
)
def test_an_unknown_verb_gets_the_nearest_one(ziggurat: Ziggurat, typed: str, meant: str) -> None:
    status, out, errors = ziggurat(typed, "x")
    assert (status, out) == (2, "")
    assert re.search(rf"Did you mean .*'{meant}'", errors)


def test_counts_use_the_singular_and_the_plural() -> None:
    assert [counted(n, "line") for n in (0, 1, 2, 2000)] == ["0 lines", "1 line", "2 lines", "2,000 lines"]


def test_texts_that_do_not_pair_up_are_named(
    ziggurat: Ziggurat, trained: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = tmp_path / "one.txt"
    one.write_text("Madona.\n", encoding="utf-8")
    monkeypatch.setattr("ziggurat.translate.translator.load_translator", None)  # noticed before anything is opened
    for verb in (
        ["evaluate", "--hypothesis", text, "--reference", text, "--reference", one],
        ["evaluate", trained, "--source", text, "--reference", one],
        ["score", trained, "--source", text, "--target", one],
    ):
        status, out, errors = ziggurat(*verb)
        assert (status, out) == (2, "")
        assert f"{text} has 2 lines, but {one} has 1 line: they must pair up" in errors


def test_wrong_scores_are_refused_before_anything_is_translated(
    ziggurat: Ziggurat, trained: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ziggurat.translate.translator.load_translator", None)
    evaluate = ["evaluate", trained, "--source", text, "--reference", text]
    status, _, errors = ziggurat(*evaluate, "--metrics", "tokenised", "--language", "sw")
    assert status == 2
    assert "no rules for language 'sw'; it knows as, " in errors
    status, _, errors = ziggurat(*evaluate, "--metrics", "blue")
    assert status == 2
    assert "unknown metric `blue`" in errors


def test_prepare_reports_its_vocabularies(ziggurat: Ziggurat, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, tmp_path)
    (tmp_path / "dev.qhi").write_bytes((tmp_path / "dev.qhi").read_bytes().replace(b"\n", b"\r\n", 1))
    _, out, _ = ziggurat("prepare", config)
    assert "; joint vocabulary: 400 pieces; " in out
    assert "1 line ended in CR LF" in out
    size = json.loads(ziggurat("prepare", config, "--json")[1])["source_vocabulary"]
    assert size == 400
    separate = ["data.subword.joint=false", "model.embedding.sharing=decoder", f"data.store={tmp_path / 'two'}"]
    _, out, _ = ziggurat("prepare", config, *separate)
    assert "; vocabularies: 400 source and 400 target pieces; " in out


def _buffered() -> dict[str, str]:
    """Return an environment in which Python buffers output, as it does for users."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"} | {"OMP_NUM_THREADS": "1"}


@pytest.mark.slow
@pytest.mark.parametrize("window", [pytest.param([], marks=pytest.mark.slow), ["--window", "2"]])
def test_a_reader_that_goes_away_ends_translate_quietly(trained: Path, tmp_path: Path, window: list[str]) -> None:
    """With records of 200 bytes, a few lines fill the buffer and the pipe."""
    source = tmp_path / "many"
    source.write_text("Su divusim ne gokun.\n" * 600, encoding="utf-8")
    command = [sys.executable, "-m", "ziggurat", "translate", str(trained), "-i", str(source), "beam_size=1", *window]
    process = subprocess.Popen(
        [*command, "max_length.limit=2", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_buffered(),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read().decode()
    assert process.wait(120) == 141
    unexpected = [line for line in errors.splitlines() if not line.startswith(("warning: a translation", str(trained)))]
    assert unexpected == []


@pytest.mark.parametrize("arguments", [["recipes", "demo"], ["recipes", "--help"]])
def test_a_pipe_without_a_reader_ends_every_verb_quietly(arguments: list[str]) -> None:
    """This is about readers of results; a reader of messages that leaves ends nothing (test_terminal.py)."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "ziggurat", *arguments]
    process = subprocess.Popen(command, env=_buffered(), stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert process.communicate(timeout=120)[1] == b""
    assert process.returncode == 141


@pytest.mark.parametrize("recipe", ["multi30k-de-en", "multi30k-en-de"])
def test_the_data_page_names_the_sources_of_recipes_corpora(recipe: str) -> None:
    written = (DOCS / "data.md").read_text(encoding="utf-8")
    data = load_named(recipe).data
    for corpus in (*data.train, *data.dev):
        for path in (corpus.source, corpus.target):
            assert path is not None
            assert Path(path).parent == Path("data/multi30k")
            assert f"`{Path(path).name}`" in written
    assert "https://github.com/multi30k/dataset" in written


def test_evaluate_reports_what_looks_wrong(ziggurat: Ziggurat, tmp_path: Path) -> None:
    pairs = list(generate(60, seed=2))
    for name, side in (("source", 0), ("reference", 1)):
        (tmp_path / name).write_text("".join(f"{pair[side]}\n" for pair in pairs))
    source, reference = ("--source", tmp_path / "source"), ("--reference", tmp_path / "reference")
    copied = ziggurat("evaluate", "--hypothesis", tmp_path / "source", *source, *reference)
    assert copied.status == 0
    assert "the output looks like the source text, not like the reference" in copied.err
    assert "looks like" not in ziggurat("evaluate", "--hypothesis", tmp_path / "reference", *source, *reference).err
    japanese = tmp_path / "ja"
    japanese.write_text("私は毎朝コーヒーを飲みます。\n彼女は図書館で本を読んでいる。\n")
    scored = ("evaluate", "--hypothesis", japanese, "--reference", japanese)
    named = ziggurat(*scored, "--language", "jaa")
    assert (named.status, "did you mean `ja` (Japanese)?" in named.err) == (2, True)
    found = ziggurat(*scored, "--bleu-tokenizer", "13a")
    assert "BLEU's tokenizer `13a` treats a line as one word" in " ".join(found.err.split())
    assert "TER counts Chinese and Japanese characters one by one" in " ".join(found.err.split())


def test_evaluate_names_the_way_to_a_tokenizer_that_is_missing(
    ziggurat: Ziggurat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sacrebleu.tokenizers.tokenizer_ja_mecab.MeCab", None)
    text = tmp_path / "ja"
    text.write_text("私は毎朝コーヒーを飲みます。\n彼女は図書館で本を読んでいる。\n")
    for more in ((), ("--language", "ja")):
        status, out, errors = ziggurat("evaluate", "--hypothesis", text, "--reference", text, *more)
        assert (status, out) == (2, "")
        assert "pip install 'ziggurat-mt[ja]'. Or name another with `--bleu-tokenizer`" in errors
        assert "`--metrics chrf,ter`" in errors
    compared = ziggurat("compare", text, "--reference", text, "--metrics", "chrf")
    assert (compared.status, "--bleu-tokenizer" in compared.err, "--metrics" in compared.err) == (2, True, False)


def test_paths_that_the_shell_did_not_expand(
    ziggurat: Ziggurat, trained: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert ziggurat("translate", trained, "-i", f"~/{text.name}", f"--output=~/{'out'}").status == 0
    assert (tmp_path / "out").is_file()
    result = ziggurat("translate", trained, "-i", text, "--output=$HOME/other")
    assert result.status == 2
    assert "the shell did not expand `$HOME`" in result.err
    result = ziggurat("prepare", "demo", "data.store=${HOME}/store")
    assert "the shell did not expand `${HOME}`" in result.err


@pytest.mark.parametrize("paper", paper_keys())
def test_recipes_of_papers_name_the_sources_of_their_corpora(paper: str) -> None:
    for name, recipe in paper_recipes(paper).items():
        text = recipe.text()
        assert f"# {recipe.data_source.split(' of ')[0]}" in text, name
        assert "https://" in text, name


def test_translations_never_overwrite_an_input(ziggurat: Ziggurat, trained: Path, text: Path) -> None:
    before, config = text.read_bytes(), trained / "config.yaml"
    for call in (
        ["translate", trained, "-i", text, "-o", text],
        ["evaluate", trained, "--source", text, "--reference", text, "-o", text],
        ["report", trained, "--source", text, "--reference", text, "-o", text],
        ["inspect", config, "--suggest", config],
    ):
        status, _, errors = ziggurat(*call)
        assert status == 2
        assert "is an input" in errors
    assert text.read_bytes() == before


def test_evaluate_takes_a_tokenizer(ziggurat: Ziggurat, text: Path) -> None:
    given = ["evaluate", "--hypothesis", text, "--reference", text, "--metrics", "bleu"]
    assert "|tok:char|" in ziggurat(*given, "--bleu-tokenizer", "char")[1]
    status, _, errors = ziggurat(*given, "--bleu-tokenizer", "chars")
    assert status == 2
    assert "unknown tokenizer `chars`" in errors
    assert "`--metrics` is empty" in ziggurat(*given[:-1], "")[2]


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["--run", "my.yaml"], "train my.yaml --run FOLDER"),
        (["--run", "my.yaml", "model.memory=top"], "train my.yaml --run FOLDER model.memory=top"),
        (["runs/a", "--run", "my.yaml", "data.store=a b"], "train my.yaml --run runs/a 'data.store=a b'"),
        (["--run", "my.yaml", "--resume"], "train --run FOLDER --resume"),
        (["other.yaml", "--run", "my.yaml"], "train other.yaml --run FOLDER"),
        (["demo", "--run", "text"], "train demo --run FOLDER"),
        (["--run", "mine.yml"], "train mine.yml --run FOLDER"),
        (["--run", "demo"], "train demo --run FOLDER"),
    ],
)
def test_swapped_arguments_of_train_are_named(
    arguments: list[str], meant: str, ziggurat: Ziggurat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("my.yaml", "other.yaml", "text"):
        (tmp_path / name).write_text("data: {}\n")
    status, _, errors = ziggurat("train", *arguments)
    assert status == 2
    assert "`--run` takes the folder of a run, but " in errors
    assert f"did you mean `ziggurat {meant}`?" in errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my.yaml", "other.yaml", "text"]


def test_a_language_by_its_name_is_doubted_and_the_code_proposed(
    ziggurat: Ziggurat, tiny_folder: Path, tmp_path: Path
) -> None:
    config, store = tiny_config(tmp_path, tiny_folder), f"data.store={tmp_path}/store"
    doubted = "`data.target_language: english` is not an ISO 639 language code; did you mean `en` (English)?"
    status, _, errors = ziggurat("prepare", config, store, "data.target_language=english")
    assert (status, errors.count("ISO 639")) == (0, 1)
    assert f"warning: {doubted}" in errors
    assert "ISO 639" not in ziggurat("prepare", config, store)[2], "codes for private use are codes"
    shown = ziggurat("inspect", config, store, "data.target_language=english", "--no-cost", "--no-check")
    assert doubted in shown.out


def test_evaluate_refuses_empty_files_before_it_opens_a_model(ziggurat: Ziggurat, text: Path, tmp_path: Path) -> None:
    (empty := tmp_path / "empty").touch()
    missing = tmp_path / "no-model"
    missing.mkdir()
    for call in (
        ["evaluate", missing, "--source", empty, "--reference", empty],
        ["evaluate", missing, "--source", empty, "--reference", text],
        ["evaluate", missing, "--source", text, "--reference", text, "--reference", empty],
        ["evaluate", "--hypothesis", empty, "--reference", empty],
        ["compare", f"a={missing}", "--source", empty, "--reference", empty],
        ["compare", empty, "--reference", empty],
    ):
        status, _, errors = ziggurat(*call)
        assert status == 2
        assert f"{empty}: is empty, so there is nothing to score" in errors


@pytest.mark.slow
def test_a_checkpoint_may_be_called_by_the_name_of_its_folder(ziggurat: Ziggurat, trained: Path, text: Path) -> None:
    assert ziggurat("translate", trained, "-i", text, "--which", "step-00000002")[0] == 0
    assert "best, last, 2, 4" in ziggurat("translate", trained, "-i", text, "--which", "bset")[2]
    assert "no checkpoint" in ziggurat("translate", trained, "-i", text, "--which", "\u00b2")[2]


def test_out_of_memory_and_signals_have_their_own_message_and_status(
    ziggurat: Ziggurat, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(*_arguments: object, **_options: object) -> None:
        torch.empty(10**15)

    monkeypatch.setattr("ziggurat.train.loop.train", allocate)
    status, _, errors = ziggurat("train", "--run", trained, "--resume")
    assert status == 2
    assert "out of memory; use smaller batches" in errors
    stopped = TrainingResult("SIGTERM", 1, 1.0, 1, None, None, signal.SIGTERM)
    monkeypatch.setattr("ziggurat.train.loop.train", lambda *_arguments, **_options: stopped)
    assert ziggurat("train", "--run", trained, "--resume")[0] == 143


def test_yaml_that_never_ends_is_refused(ziggurat: Ziggurat, tmp_path: Path) -> None:
    for number, content in enumerate(("data: " + "[" * 3000 + "]" * 3000, "data: &a [*a]")):
        path = tmp_path / f"{number}.yaml"
        path.write_text(content)
        status, _, errors = ziggurat("prepare", path)
        assert status == 2, errors
        assert "internal error" not in errors


@pytest.mark.slow
def test_recipes_are_found_by_words(ziggurat: Ziggurat) -> None:
    listed = json.loads(ziggurat("recipes", "--find", "RPR sdt en-de-base", "--json").out)
    assert listed
    assert all("rpr" in r["name"] and "en-de-base" in r["name"] for r in listed)
    everything = json.loads(ziggurat("recipes", "--json").out)
    assert {r["name"] for r in everything} > {r["name"] for r in listed}
    shown = ziggurat("recipes", "--find", "Low Babel embedded").out + ziggurat("recipes", "--find", "embedded").out
    assert shown.startswith("demo  The embedded language pair")
    assert len(shown.splitlines()) == 1
    of_paper = ziggurat("recipes", "admin", "--find", "60-12").out
    assert of_paper.startswith("admin: Liu")
    assert all("60" in line for line in of_paper.splitlines() if line.startswith("    "))
    nothing = ziggurat("recipes", "--find", "zzz")
    assert (nothing.status, nothing.out) == (2, "")
    assert "no recipe has `zzz`" in nothing.err
    assert ziggurat("recipes", "demo", "--find", "x").status == 2


@pytest.mark.slow
def test_train_takes_device_and_threads_as_translate_does(
    ziggurat: Ziggurat, tiny_folder: Path, tmp_path: Path
) -> None:
    """They also apply to a resumed run; if they can be used, its config.yaml has them from then on."""
    config, run = tiny_config(tmp_path, tiny_folder, stop={"updates": 1}), tmp_path / "run"
    result = ziggurat("train", config, "--run", run, "--device", "cpu", "--threads", 1)
    assert result.status == 0, result.err
    assert "cpu with 1 thread," in result.err
    assert load_experiment(run / "config.yaml").training.device == "cpu"
    assert load_experiment(run / "config.yaml").training.threads == 1
    before = (run / "config.yaml").read_bytes()
    refused = ziggurat("train", "--run", run, "--resume", "--device", "cuda:77", "training.stop.updates=2")
    assert refused.status == 2
    assert "`training.device: cuda:77` cannot be used" in refused.err
    assert (run / "config.yaml").read_bytes() == before
    result = ziggurat("train", "--run", run, "--resume", "--threads", 2, "training.stop.updates=2")
    try:
        assert result.status == 0, result.err
        assert "cpu with 2 threads" in result.err
    finally:
        torch.set_num_threads(1)
    assert load_experiment(run / "config.yaml").training.threads == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["translate", "MODEL", "-i", "none.txt"], "none.txt: no such file"),
        (["translate", "MODEL", "-i", "TEXT", "-o", "none/out.txt"], "none/out.txt: folder"),
        (["translate", "MODEL", "-i", "TEXT", "-o", "."], ".: is a folder"),
        (["score", "MODEL", "--source", "TEXT", "--target", "none.txt"], "none.txt: no such file"),
        (["evaluate", "MODEL", "--source", "none.txt", "--reference", "TEXT"], "none.txt: no such file"),
        (["evaluate", "MODEL", "--source", "TEXT", "--reference", "TEXT", "-o", "none/out"], "none/out: folder"),
    ],
)
def test_files_are_looked_for_before_the_model_is_loaded(
    arguments: list[str],
    message: str,
    ziggurat: Ziggurat,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model does not even exist, and the complaint is about the file."""
    monkeypatch.chdir(tmp_path)
    result = ziggurat(*({"MODEL": "nowhere", "TEXT": text.name}.get(a, a) for a in arguments))
    assert result.status == 2
    assert message in result.err
    assert "nowhere" not in result.err


@pytest.mark.parametrize(
    ("arguments", "status"), [(["--version"], 0), (["translate", "none"], 2), (["train", "none.yaml", "--run", "x"], 2)]
)
def test_verbs_that_do_not_need_pytorch_do_not_load_it(arguments: list[str], status: int, tmp_path: Path) -> None:
    code = (
        "import sys; from ziggurat.cli import main\n"
        f"try: main({arguments})\n"
        "except SystemExit as stop: print(stop.code or 0, 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert result.stdout.splitlines()[-1] == f"{status} False"


def test_a_path_with_an_equals_sign_is_a_path(ziggurat: Ziggurat, trained: Path, text: Path, tmp_path: Path) -> None:
    run = tmp_path / "rate=0.1"
    run.symlink_to(trained)
    banned = f"banned=[{', '.join(['word'] * 2000)}]"  # too long for a file name
    assert ziggurat("evaluate", banned, "--source", text, "--reference", text, "--hypothesis", text).status == 2
    found = ziggurat("evaluate", run, "beam_size=1", "--source", text, "--reference", text)
    assert found.status == 0, found.err
    config = tmp_path / "c=1.yaml"
    config.write_text("format: 9")
    assert "c=1.yaml: `data` is missing" in ziggurat("train", config, "--run", tmp_path / "run").err
