"""LibreTranslate with the packages in $ARGOS_FILES (paths separated by colons), run by the Python that has it.

    ARGOS_FILES=a.argosmodel PYTHON benchmarks/libretranslate_peer.py --port 5001 ...

A pattern replaces its sentence splitter, a network that it downloads; without the Internet it could not start, and the
pattern is faster.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import minisbd


class Pattern:
    """A splitter that cuts after sentence-final punctuation."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def sentences(self, text: str) -> list[str]:
        """Return the sentences of a text."""
        return [found for found in re.split(r"(?<=[.!?])\s+", text) if found]


def main() -> None:
    minisbd.SBDetect, minisbd.download_models = Pattern, lambda *_, **__: None
    with tempfile.TemporaryDirectory() as home:
        # Set before the import, which creates these folders.
        os.environ |= {f"XDG_{kind}_HOME": home for kind in ("DATA", "CONFIG", "CACHE")}
        os.environ |= {"ARGOS_PACKAGES_DIR": f"{home}/packages", "ARGOS_DEVICE_TYPE": "cpu"}
        from argostranslate import package

        for path in os.environ["ARGOS_FILES"].split(":"):
            package.install_from_path(Path(path))
        from libretranslate.main import main as serve

        serve()


if __name__ == "__main__":
    main()
