"""COMET's adapter with two stand-ins: for the environment's Python, and for its package `comet`."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ziggurat.evaluate import comet_program
from ziggurat.evaluate.metrics import LICENCES, CometEnvironment, TestSet
from ziggurat.evaluate.scores import scored
from ziggurat.system.errors import ConfigError, DataError

SOURCES, REFERENCE = ["eins", "zwei drei"], ["one", "two three"]
OUTPUTS = [["one", "two"], ["uno", "two three"]]

SPEAKS_THE_PROTOCOL = """
import json, sys
isolated, program, asked, answered = sys.argv[1:]
assert isolated == "-I" and program.endswith("comet_program.py")
request = json.load(open(asked, encoding="utf-8"))
assert request["protocol"] == 1
print("noise of a library")
scores = [0.5 * len(s["mt"]) + 0.25 * (s["mt"] == s["ref"]) + 0.125 * (s["src"] == "eins") for s in request["samples"]]
version = request["model"] + str(request["batch_size"])
json.dump({"protocol": 1, "scores": scores, "version": version}, open(answered, "w"))
"""


def program(folder: Path, text: str) -> str:
    """Write an executable that runs this Python text."""
    path = folder / "python"
    path.write_text(f"#!{sys.executable}\n{text}", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def environment(python: str, said: list[str] | None = None, **settings: object) -> CometEnvironment:
    say: Callable[[str], None] = (said if said is not None else []).append
    return CometEnvironment(python, say=say, **settings)  # type: ignore[arg-type]


ROOT = Path(__file__).resolve().parents[2]


def test_scores_come_back_in_order(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    where = environment(program(tmp_path, SPEAKS_THE_PROTOCOL), said, batch_size=3)
    metric = TestSet([REFERENCE, ["x", "y"]], SOURCES).metric("comet", where)
    assert metric.statistics(OUTPUTS) == [[[1.875, 1.0], [1.5, 1.0]], [[1.625, 1.0], [4.75, 1.0]]]
    assert metric.from_sums([3.375, 2.0]).score == 1.6875
    assert str(metric.signature()) == "nrefs:1|model:Unbabel/wmt22-comet-da|version:comet-Unbabel/wmt22-comet-da3"
    assert said == ["COMET: model Unbabel/wmt22-comet-da, licence Apache-2.0; downloaded if missing"]
    printed = capfd.readouterr()
    assert printed.out == ""  # standard output is only for results
    assert "noise of a library" in printed.err


def test_the_licence_is_named_first(tmp_path: Path) -> None:
    assert "not for commercial use" in LICENCES["Unbabel/wmt22-cometkiwi-da"]
    checkpoint = tmp_path / "model.ckpt"
    checkpoint.write_text("")
    for model, words in [
        ("Unbabel/XCOMET-XL", "licence CC-BY-NC-SA-4.0, not for commercial use"),
        ("somebody/comet", "licence see https://huggingface.co/somebody/comet"),
        (str(checkpoint), "licence of the file's origin"),
    ]:
        said: list[str] = []
        where = environment(program(tmp_path, "raise SystemExit(3)"), said, model=model)
        with pytest.raises(ConfigError, match="ended with status 3 and without an answer"):
            scored(TestSet([REFERENCE], SOURCES).metric("comet", where), OUTPUTS[0], confidence=False)
        assert words in said[0]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ('{"protocol": 1, "error": "KeyError: no such model"}', "KeyError: no such model"),
        ('{"protocol": 2, "scores": [0.1, 0.2]}', "the answer's protocol is not 1"),
        ('{"protocol": 1, "scores": [0.1]}', "expected 2 scores"),
        ('{"protocol": 1, "scores": [0.1, NaN]}', "expected 2 scores"),
        ('{"protocol": 1, "scores": [0.1, "x"]}', "expected 2 scores"),
        ('{"protocol": 1, "scores"', "without an answer"),
        ("[]", "the answer's protocol is not"),
    ],
)
def test_wrong_answers_are_refused(tmp_path: Path, answer: str, words: str) -> None:
    python = program(tmp_path, f"import sys; open(sys.argv[-1], 'w').write({answer!r})")
    with pytest.raises(ConfigError, match=words):
        TestSet([REFERENCE], SOURCES).metric("comet", environment(python)).statistics(OUTPUTS[:1])


def test_missing_requirements_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such program; COMET needs the Python of a separate environment"):
        TestSet([REFERENCE], SOURCES).metric("comet", environment(str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="--source"):
        TestSet([REFERENCE]).metric("comet", environment(sys.executable))
    with pytest.raises(ConfigError, match="its Python"):
        TestSet([REFERENCE], SOURCES).metric("comet")
    with pytest.raises(DataError, match="unequal"):
        TestSet([REFERENCE], SOURCES[:1]).metric("comet", environment(sys.executable))


def test_our_python_lacks_the_package() -> None:
    pytest.importorskip("torch")
    with pytest.raises(ConfigError, match=r"No module named 'comet'; install it there: pip install unbabel-comet"):
        TestSet([REFERENCE], SOURCES).metric("comet", environment(sys.executable)).statistics(OUTPUTS)


@pytest.mark.slow
def test_it_ends_with_its_parent_process(tmp_path: Path) -> None:
    """A killed process cannot tell the program to stop; here it hangs in its own process, importing the package."""
    (tmp_path / "comet.py").write_text("open('began', 'w').close()\nimport time\ntime.sleep(600)")
    request = tmp_path / "request.json"
    request.write_text('{"protocol": 1}')
    folders = f"import sys; sys.path[:0] = ['.', {str(ROOT)!r}]"
    score = f"from ziggurat.evaluate.comet_program import main; main({str(request)!r}, 'answer')"
    command = [sys.executable, "-c", f"{folders}; {score}"]
    asker = subprocess.Popen([sys.executable, "-c", f"import subprocess; subprocess.run({command})"], cwd=tmp_path)
    end = time.monotonic() + 60
    while not (tmp_path / "began").exists() and time.monotonic() < end:
        time.sleep(0.02)
    (program,) = psutil.Process(asker.pid).children()
    asker.kill()
    asker.wait()
    left = psutil.wait_procs([program], timeout=20)[1]
    for process in left:
        process.kill()
    assert left == []


FAKE_COMET = """
class Prediction:
    scores = None

class Model:
    def predict(self, samples, batch_size=16, gpus=1, devices=None):
        assert (batch_size, gpus, devices) == (16, EXPECTED_GPUS, EXPECTED_DEVICES)
        found = Prediction()
        found.scores = [len(s["src"]) + len(s["mt"]) / 8 - (s["mt"] == s["ref"]) for s in samples]
        return found

def download_model(name):
    assert name == "Unbabel/wmt22-comet-da"
    return "/downloaded"

def load_from_checkpoint(path):
    assert path == "/downloaded"
    return Model()
"""


@pytest.mark.parametrize(("device", "gpus", "devices"), [("cpu", 0, None), ("cuda", 1, None), ("cuda:2", 1, [2])])
def test_the_program_speaks_the_protocol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, devices: list[int] | None
) -> None:
    """The program that COMET's Python runs, here with a package that answers like unbabel-comet 2.2.7."""
    fake = f"EXPECTED_GPUS, EXPECTED_DEVICES = {gpus}, {devices}\n{FAKE_COMET}"
    (tmp_path / "comet.py").write_text(fake, encoding="utf-8")
    metadata = tmp_path / "unbabel_comet-2.2.7.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: unbabel-comet\nVersion: 2.2.7\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "comet", raising=False)
    samples = [{"src": "ab", "mt": "x", "ref": "x"}, {"src": "c", "mt": "yy", "ref": "x"}]
    request = {"protocol": 1, "model": "Unbabel/wmt22-comet-da", "batch_size": 16, "device": device, "samples": samples}
    (tmp_path / "request.json").write_text(json.dumps(request))
    comet_program.main(str(tmp_path / "request.json"), str(tmp_path / "answer.json"))
    monkeypatch.delitem(sys.modules, "comet")
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert answer == {"protocol": 1, "scores": [1.125, 1.25], "version": "2.2.7"}


def test_the_program_answers_errors_too(tmp_path: Path) -> None:
    (tmp_path / "request.json").write_text('{"protocol": 7}')
    comet_program.main(str(tmp_path / "request.json"), str(tmp_path / "answer.json"))
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert answer == {"protocol": 1, "error": "ValueError: a request of protocol 7, expected 1"}


def test_the_program_uses_nothing_of_the_package() -> None:
    assert "ziggurat." not in Path(comet_program.__file__).read_text(encoding="utf-8").partition('"""\n\n')[2]
