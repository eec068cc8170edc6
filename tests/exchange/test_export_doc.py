"""The programs in docs/export.md are run exactly as printed."""

from __future__ import annotations

import contextlib
import io
import re
from ast import literal_eval
from pathlib import Path

import pytest

from tests.exchange.conftest import Written
from tests.exchange.examples import SENTENCES
from ziggurat.exchange.exporter import export_model
from ziggurat.translate.translator import load_translator

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
PROGRAMS = {
    "ctranslate2" if "import ctranslate2" in code else "huggingface": code
    for code in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
}
FOLDERS = {"ctranslate2": "served", "huggingface": "hub"}


@pytest.mark.slow
@pytest.mark.parametrize("target", FOLDERS)
def test_programs_translate_as_the_model_does(
    target: str, written: Written, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(residual="post", decoding={"endings": "beam", "length_penalty": {"kind": "none", "alpha": 0.0}})
    export_model(path, target, tmp_path / FOLDERS[target], verify=text)
    monkeypatch.chdir(tmp_path)
    translations = load_translator(path).translate(SENTENCES)
    # Toolkits rank unfinished outputs differently, so the example is replaced by a sentence that the random model ends.
    expected = next(
        t for t in translations if t.hypotheses[0].finished and t.text.isprintable() and "\ufffd" not in t.text
    )
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(PROGRAMS[target].replace('"Ein Hund rennt."', repr(expected.source)), {})
    assert literal_eval(said.getvalue()) == [expected.text]
