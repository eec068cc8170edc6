"""Argos Translate's own translations of lines, as JSON; run with the Python of an environment that has it (README.md).

`python theirs.py PACKAGE TEXT ANSWER`: a .argosmodel, a text file with a sentence per line, the file to write.

Each line is one sentence: a splitter that does not split replaces the original, so its packages are not needed.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType


class Whole:
    """A sentence splitter that treats a line as a sentence."""

    def split_sentences(self, text: str) -> list[str]:
        """Return the line."""
        return [text]


def main(package_path: str, text_path: str, answer_path: str) -> None:
    with tempfile.TemporaryDirectory() as home:
        # Set before the import, which creates these folders.
        os.environ |= {f"XDG_{kind}_HOME": home for kind in ("DATA", "CONFIG", "CACHE")}
        os.environ["ARGOS_COMPUTE_TYPE"] = "default"  # as stored; `auto` would compute fp32 matrices in int8
        os.environ["ARGOS_INTRA_THREADS"] = "1"  # translating one sentence at a time gains nothing from more
        stanza, minisbd = ModuleType("stanza"), ModuleType("minisbd")
        minisbd.SBDetect, minisbd.models = None, ModuleType("minisbd.models")
        minisbd.models.list_models = lambda: ["en"]
        sys.modules |= {"stanza": stanza, "minisbd": minisbd}
        from argostranslate import package, translate

        package.install_from_path(Path(package_path))
        (installed,) = package.get_installed_packages()
        translation = translate.get_translation_from_codes(installed.from_code, installed.to_code)
        translation.underlying.sentencizer = Whole()
        lines = Path(text_path).read_text(encoding="utf-8").splitlines()
        names = ("argostranslate", "argos-translate-lt", "ctranslate2", "sentencepiece")
        found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
        answer = {
            "versions": {name: found[name] for name in names if name in found},
            "installed": repr(installed),
            "readme": installed.get_readme(),
            "translations": [translation.translate(line) for line in lines],
        }
    Path(answer_path).write_text(json.dumps(answer, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
