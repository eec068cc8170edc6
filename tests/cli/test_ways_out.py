"""The command named in a message about damage rewrites the folder when pasted unchanged."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.conftest import Ziggurat
from tests.faults.foreign import write_fairseq

QUICKLY = ("--lines", "1")
VERBS = {
    "average": ("{run}", "--last", "2"),
    "grow": ("{run}", "--layers", "4", "--copy", "interpolate", "--which", "last"),
    "export": ("{run}", "--to", "plain", *QUICKLY),
    "import": ("{fairseq}/checkpoint.pt", "--dictionary", "{fairseq}/dict.txt", "--languages", "de-en"),
}


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_the_command_named_for_damage_repairs_it(
    verb: str, ziggurat: Ziggurat, trained: Path, text: Path, tmp_path: Path
) -> None:
    if verb == "import":
        write_fairseq(trained, tmp_path / "fairseq")
    arguments = [word.format(run=trained, fairseq=tmp_path / "fairseq") for word in VERBS[verb]]
    out = tmp_path / "out of it"
    made = ziggurat(verb, *arguments, "--out", out)
    assert made.status == 0
    assert (f"warning: {tmp_path}/fairseq/checkpoint.pt is a pickle" in made.err) == (verb == "import")
    whole = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    told = ziggurat("translate", out, "--input", text)
    assert told.status == 2
    found = re.search(r"model\.safetensors: damaged.*; `ziggurat (.*)` writes the folder again", told.err)
    assert found, told.err
    assert ziggurat(*shlex.split(found[1]), *(QUICKLY if verb == "export" else ())).status == 0
    assert (out / "model.safetensors").read_bytes() == whole
