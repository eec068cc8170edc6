"""`ziggurat compare`: runs and files, seeds, tables for people and JSON for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Ziggurat
from tests.evaluate.test_comet import program
from tests.evaluate.test_findings import from_json
from ziggurat.cli.compare import parse_systems, systems_and_settings
from ziggurat.model.run_folder import CHECKPOINTS, MODEL_FILE
from ziggurat.system.errors import ConfigError

ONE, TWO = (
    ["A small dog runs home now.", "Two <script>alert(1)</script>\x1b[2J old men."],
    ["A dog.", "Two men sat down."],
)


@pytest.fixture
def files(tmp_path: Path, text: Path) -> dict[str, Path]:
    """Two outputs and a reference for the two sentences of `text`."""
    written = {"text": text}
    for name, lines in {"one": ONE, "two": TWO, "ref": ["A small dog runs home.", "Two old men."]}.items():
        written[name] = tmp_path / f"{name}.txt"
        written[name].write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return written


@pytest.mark.slow
def test_files_compared(ziggurat: Ziggurat, files: dict[str, Path]) -> None:
    call = ["compare", files["one"], f"b={files['two']},{files['one']}", f"c={files['two']}"]
    call += ["--reference", files["ref"], "--metrics", "ter"]
    status, out, errors = ziggurat(*call, "--source", files["text"], "--train-target", files["ref"])
    assert status == 0, errors
    assert "scoring by ter" in errors
    for words in (
        "one.txt: 1 seed: ",
        "b: 2 seeds: ",
        "TER|nrefs:1|",
        "(lower is better)",
        "TER: differences and p-values (bs:1000|ar:10000|seed:12345|",
        "one.txt - b ",
        "2 sentences: too few to tell.",
        "Word accuracy by frequency",
        "BLEU by length",
        "Sentences, b against c: ",
        "<script>alert(1)</script>\\x1b[2J",  # no escape sequence reaches the terminal
    ):
        assert words in out
    assert "\x1b" not in out
    assert "Left out" not in out
    assert "row better than column" not in out
    status, out, _ = ziggurat(*call, "--json")
    found = from_json(out)
    assert [system.seeds for system in found.systems] == [1, 2, 1]
    assert found.systems[1].origins == (str(files["two"]), str(files["one"]))
    assert len(found.notes) == 2
    assert {e.left[0] for table in found.sentence_tables for e in table.left_best} >= {ONE[1]}


@pytest.mark.slow
def test_a_run_and_a_file_compared(ziggurat: Ziggurat, trained: Path, files: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "outputs"
    status, out, errors = ziggurat(
        *["compare", "max_length.limit=5", f"model={trained},{trained}", files["one"]],
        *["--source", files["text"], "--reference", files["ref"], "--metrics", "bleu", "-o", folder, "--json"],
    )
    assert status == 0, errors
    found = json.loads(out)
    assert found["systems"][0]["seeds"] == 2
    assert str(trained) in found["systems"][0]["origins"][0]
    assert sorted(path.name for path in folder.iterdir()) == ["model.1.txt", "model.2.txt"]
    kept = (folder / "model.1.txt").read_text(encoding="utf-8").splitlines()
    assert len(kept) == 2
    assert found["scores"][0]["systems"][0]["deviation"] == 0
    shown = ziggurat("compare", folder / "model.1.txt", "--reference", files["ref"], "--json").out
    assert json.loads(shown)["scores"][0]["systems"][0]["mean"] == found["scores"][0]["systems"][0]["mean"]


def test_an_average_on_one_side_only_is_warned_of(ziggurat: Ziggurat, files: dict[str, Path], tmp_path: Path) -> None:
    for kept in ("a/averaged", "a/best", "b/best"):
        (tmp_path / kept).mkdir(parents=True)
        (tmp_path / kept / MODEL_FILE).touch()
    for run in ("a", "b"):
        (tmp_path / run / CHECKPOINTS).mkdir()
    call = ["compare", tmp_path / "a", tmp_path / "b", "--source", files["text"], "--reference", files["ref"]]
    assert "`--which best`" in ziggurat(*call).err
    assert "averaging" not in ziggurat(*call, "--which", "best").err


def test_names_and_paths(tmp_path: Path) -> None:
    odd = tmp_path / "a=b,c.txt"
    odd.write_text("")
    assert parse_systems([str(odd), f"x={odd}", "runs/a,runs/b", "n=p=q"]) == [
        ("a=b,c.txt", [str(odd)]),
        ("x", [str(odd)]),
        ("a", ["runs/a", "runs/b"]),
        ("n", ["p=q"]),
    ]
    for given in (["a="], ["=x"], ["a=x,,y"], [""], ["a/b=x"], ["..=x"], ["a=x", "a=y"], ["p/x", "q/x"]):
        with pytest.raises(ConfigError, match="system"):
            parse_systems(given)


def test_settings_are_known_by_their_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["a=runs/a", "beam_size=8", "runs/b", "decoding.n_best=2", "length_penalty.alpha=0.6", "other=b.txt"]
    systems, settings = systems_and_settings(words)
    assert systems == ["a=runs/a", "runs/b", "other=b.txt"]
    assert settings == {"beam_size": 8, "n_best": 2, "length_penalty": {"alpha": 0.6}}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (["MODEL"], "`--source FILE` is missing: what should"),
        (["one", "--metrics", "chrf,tokenised"], "is for `ziggurat evaluate`, not for `compare`"),
        (["one", "-o", "out"], "are for models"),
        (["one", "beam_size=2"], "are for models"),
        (["one", "--tag", "<bt>"], "are for models"),
        (["one", "--which", "best"], "are for models"),
        (["one", "--threads", "1"], "are for models"),
        (["one", "--device", "cpu"], "are for models"),
        (["none.txt"], "none.txt: no such file"),
        (["one", "--train-target", "none.txt"], "none.txt: no such file"),
        (["one", "--source", "short"], "they must pair up line by line"),
        (["short"], "they must pair up line by line"),
        (["one", "--comet-model", "m"], "goes with `--metrics comet`"),
        (["one", "--metrics", "comet"], "name its Python, `export ZIGGURAT_COMET_PYTHON="),
        (["MODEL", "--source", "text", "-o", "one"], "names a folder"),
    ],
)
def test_mistakes(
    ziggurat: Ziggurat,
    files: dict[str, Path],
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: list[str],
    message: str,
) -> None:
    monkeypatch.delenv("ZIGGURAT_COMET_PYTHON", raising=False)
    (tmp_path / "short.txt").write_text("one line\n")
    places = {**files, "MODEL": trained, "short": tmp_path / "short.txt"}
    status, out, errors = ziggurat("compare", *(places.get(word, word) for word in call), "--reference", files["ref"])
    assert (status, out) == (2, "")
    assert message in errors
    assert errors.count("\n") == 1


def test_the_plain_verb_has_the_other_metrics(ziggurat: Ziggurat, files: dict[str, Path]) -> None:
    pytest.importorskip("nltk")
    call = ["evaluate", "--hypothesis", files["one"], "--reference", files["ref"], "--metrics", "chrf,meteor"]
    status, out, errors = ziggurat(*call, "--language", "en", "--confidence", "--json")
    assert status == 0, errors
    chrf, meteor = json.loads(out)
    assert (chrf["name"], meteor["name"]) == ("chrF2", "METEOR")
    assert "match:exact+stem" in meteor["signature"]
    assert meteor["interval"] is not None
    assert "warning: 2 sentences: too few for `--confidence`" in errors


def test_a_missing_metric_package_is_reported_before_translating(
    ziggurat: Ziggurat, files: dict[str, Path], trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZIGGURAT_COMET_PYTHON", "no/python")
    call = ["--source", files["text"], "--reference", files["ref"], "--metrics", "comet"]
    for verb in ("compare", "evaluate"):
        status, _, errors = ziggurat(verb, trained, *call)
        assert status == 2
        assert "no/python: no such program" in errors
        assert "checkpoint" not in errors  # no weights were opened


def test_comet_through_the_verb(
    ziggurat: Ziggurat, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = "import json, sys; n = len(json.load(open(sys.argv[-2]))['samples'])\n"
    answer += (
        "json.dump({'protocol': 1, 'scores': [0.25 * i for i in range(n)], 'version': '2'}, open(sys.argv[-1], 'w'))"
    )
    monkeypatch.setenv("ZIGGURAT_COMET_PYTHON", str(program(tmp_path, answer)))
    call = ["--source", files["text"], "--reference", files["ref"], "--metrics", "comet"]
    status, out, errors = ziggurat("evaluate", "--hypothesis", files["one"], *call)
    assert status == 0, errors
    assert out == "COMET|nrefs:1|model:Unbabel/wmt22-comet-da|version:comet-2 = 0.1250\n"
    assert "licence Apache-2.0" in errors
    status, out, errors = ziggurat("compare", files["one"], files["two"], *call)
    assert status == 0, errors
    assert "COMET|nrefs:1|model:Unbabel/wmt22-comet-da|version:comet-2\n" in out
    assert "0.1250" in out
    assert "-0.5000" in out
