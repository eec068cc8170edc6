"""eflomal by subprocess: what it is given, what is made of its links, what happens when it fails; the real program."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.alignment.programs import install
from ziggurat.alignment.aligner import MOST_WORDS
from ziggurat.alignment.eflomal import EFLOMAL, eflomal_links
from ziggurat.alignment.links import error_rate
from ziggurat.cli import main
from ziggurat.data.babel import generate_aligned
from ziggurat.errors import ConfigError, DataError

PAIRS = [("One two, three.", "eins zwei drei"), ("", "leer"), ("a b", "c"), ("x " * (MOST_WORDS + 1), "y"), ("q", "r")]


def test_links_are_those_of_the_program_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "bin", monkeypatch)
    work = tmp_path / "work"
    work.mkdir()
    union = [{(0, 0), (4, 2)}, set(), {(0, 0), (1, 0)}, set(), {(0, 0)}]
    assert list(eflomal_links(iter(PAIRS), "split", "union", work)) == union
    assert list(eflomal_links(iter(PAIRS), "split", "intersection", work)) == [s & {(0, 0)} for s in union]
    found = eflomal_links(iter(PAIRS), "split", "union", work)
    assert list(work.iterdir()) == []  # nothing is left, whether the links are read or not
    found.close()  # type: ignore[attr-defined]


def test_the_program_gets_words_that_it_splits_as_we_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = tmp_path / "seen"
    install(tmp_path / "bin", monkeypatch, f"import json\njson.dump(sides, open({str(seen)!r}, 'w'))\nsys.exit(1)")
    with pytest.raises(DataError):
        eflomal_links([("A\u00a0B c\x0bd e", "F\u2028g \u0085h i")], "blanks", "union")
    (source,), (target,) = json.loads(seen.read_text())
    assert (source.split(), target.split()) == (["a_b", "c_d", "e"], ["f_g", "_h", "i"])


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("print('no room', file=sys.stderr)\nsys.exit(3)", r"failed \(status 3\): no room"),
        ("", "wrote no alignments: it said nothing"),
        ("[open(places[side], 'w').write('0-0\\n\\n') for side in ('-f', '-r')]", "aligned 2 of 5 pairs"),
        ("[open(places[side], 'w').write('0:0\\n' * 5) for side in ('-f', '-r')]", "line 1: no word alignment"),
    ],
    ids=["fails", "writes nothing", "writes too little", "writes something else"],
)
def test_a_program_that_fails_is_told(
    body: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "bin", monkeypatch, body)
    with pytest.raises(DataError, match=complaint):
        list(eflomal_links(iter(PAIRS), "split", "union", tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


def test_without_the_program_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="pip install eflomal"):
        eflomal_links([], "split", "union")
    (tmp_path / EFLOMAL).write_text("neither a program nor a script\n")
    (tmp_path / EFLOMAL).chmod(0o755)
    with pytest.raises(DataError, match="cannot be run: Exec format error"):
        eflomal_links([], "split", "union")


def test_align_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install(tmp_path / "bin", monkeypatch)
    sides = [tmp_path / "source", tmp_path / "target"]
    for number, path in enumerate(sides):
        path.write_text("".join(f"{pair[number]}\n" for pair in PAIRS))
    out = tmp_path / "out"
    arguments = ["align", *map(str, sides), "--aligner", "eflomal", "--symmetrise", "union", "-o", str(out)]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--json"])
    assert ended.value.code == 0
    assert out.read_text() == "0-0 4-2\n\n0-0 1-0\n\n0-0\n"
    assert json.loads(capsys.readouterr().out)["without_links"] == 2
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--null", "0.3"])
    assert ended.value.code == 2
    assert "`--null` is for our own aligner" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which(EFLOMAL) is None, reason="eflomal is not installed")
def test_the_program_itself_aligns() -> None:
    pairs = list(generate_aligned(1000, 3))
    texts = [(pair.low, pair.high) for pair in pairs]
    texts[10] = ("", "nothing")
    found = list(eflomal_links(texts, "split", "grow-diag-final-and"))
    assert len(found) == 1000
    assert found[10] == set()
    rest = [number for number in range(1000) if number != 10]
    gold = [pairs[number].sure for number in rest], [pairs[number].possible for number in rest]
    assert error_rate([found[number] for number in rest], *gold).error_rate < 0.3
