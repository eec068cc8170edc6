"""mtdata's index of 290 thousand corpora, asked in a Python environment of its own.

mtdata pins versions that conflict with ours, and it keeps its index as a pickle, which only that environment reads. It
tells address and layout; fetching, checking and reading is done here.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from ziggurat.data.temporary import locked
from ziggurat.errors import ConfigError, DataError, printable
from ziggurat.fetch.downloads import Downloads
from ziggurat.fetch.entries import Corpus, Layout, Remote
from ziggurat.small_files import Form, parse_json, read_bounded, shaped

__all__ = ["MTDATA", "Mtdata"]

MTDATA = "mtdata==0.5.1"
"""What is installed into the environment; its index has no interface that a later version keeps for certain."""

_PROGRAM = Path(__file__).with_name("mtdata_program.py")
_PROTOCOL = 1
_LAYOUTS: dict[str, Layout] = {
    "txt": "text",
    "raw": "text",
    "tsv": "tsv",
    "sgm": "sgm",
    "tmx": "tmx",
    "wmt21xml": "wmt-xml",
}


class _Entry(Form):
    """One entry of the answer."""

    id: str
    languages: list[str]
    spellings: list[list[str]]
    urls: list[str]
    ext: str
    in_ext: str | None
    in_paths: list[str]
    cols: list[int]
    cite: list[str]


class _Answer(Form):
    protocol: int
    version: str = ""
    entries: list[_Entry] = Field(default_factory=list)
    error: str | None = None


class Mtdata:
    """mtdata's index.

    Args:
        downloads: its folder holds the environment, and says whether the network may be used.
        python: Python of an environment that has mtdata; None: one is made in the folder of downloads.
        say: takes a message before the environment is made.
    """

    def __init__(self, downloads: Downloads, python: str | None, say: Any) -> None:
        self._downloads, self._given, self._say = downloads, python, say

    def find(self, name: str) -> Corpus:
        """Return the corpus of an id such as `Statmt-europarl-10-deu-eng`.

        Raises ConfigError: unknown, or of a layout that only mtdata reads.
        """
        (entry,) = self._ask({"ids": [name]})
        return self._corpus(entry)

    def listed(self, languages: Sequence[str], words: Sequence[str]) -> list[tuple[str, str]]:
        """Return id and address of the corpora of one or two languages that have all `words` in their ids."""
        found = self._ask({"languages": list(languages), "words": list(words)})
        return [(entry.id, " ".join(entry.urls)) for entry in found]

    def _corpus(self, entry: _Entry) -> Corpus:
        ends = (entry.in_ext or entry.ext).split(".")
        layout = next((_LAYOUTS[end] for end in ends if end in _LAYOUTS), None)
        if layout is None and not entry.in_paths and len(entry.urls) == len(entry.languages):
            layout = "text"  # as mtdata takes files whose endings say nothing
        if layout is None or entry.ext.endswith("bz2") or (len(entry.in_paths) or len(entry.urls)) > 2:
            get = f"{Path(self._python()).with_name('mtdata')} echo {entry.id}"
            raise ConfigError(
                f"{entry.id}: its layout ({printable(entry.in_ext or entry.ext)}) is one that only mtdata reads; "
                f"`{get} > FILE.tsv` writes it for `prepare` (`path: FILE.tsv`)"
            )
        return Corpus(
            name=f"mtdata/{entry.id}",
            title=f"{entry.id}, by the index of mtdata",
            languages=tuple(entry.languages),
            files=tuple(Remote(url=url) for url in entry.urls),
            layout=layout,
            take=tuple(entry.in_paths),
            columns=tuple(entry.cols[:2]) or (0, 1),
            separator="\t",
            references=(),
            licence="not in mtdata's index; see the corpus's origin"
            + (f" ({', '.join(entry.cite)})" if entry.cite else ""),
            terms=None,
            known_from=MTDATA,
            spellings=tuple(map(tuple, entry.spellings)),
        )

    def _ask(self, request: dict[str, Any]) -> list[_Entry]:
        """Return the entries that mtdata answers with. Raises ConfigError with its message."""
        python = self._python()
        with tempfile.TemporaryDirectory(prefix="ziggurat-mtdata-") as folder:
            asked, answered = Path(folder, "request.json"), Path(folder, "answer.json")
            asked.write_text(json.dumps({"protocol": _PROTOCOL, **request}), encoding="utf-8")
            index = self._downloads.folder / "mtdata-index"
            index.mkdir(parents=True, exist_ok=True)
            environment = {**os.environ, "MTDATA": str(index)}
            # -I keeps our PYTHONPATH out of sys.path, where it would hide its packages. Its messages are many.
            command = [python, "-I", str(_PROGRAM), str(asked), str(answered)]
            ended = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, env=environment, check=False, text=True
            )
            who = f"mtdata by {printable(python, 4096)}"
            try:
                content = read_bounded(answered, 1 << 28)
            except OSError:
                said = printable(ended.stderr.strip()[-400:], 400)
                raise ConfigError(f"{who}: ended with status {ended.returncode} and no answer: {said}") from None
        answer = shaped(parse_json(content, who, error=ConfigError), _Answer, who, error=ConfigError)
        if answer.protocol != _PROTOCOL or answer.error is not None:
            raise ConfigError(f"{who}: {printable(answer.error or 'an answer in another protocol', 500)}")
        return answer.entries

    def _python(self) -> str:
        """Return the Python of the environment, made now if there is none. Raises DataError."""
        if self._given is not None:
            if shutil.which(self._given) is None:
                raise ConfigError(
                    f"{printable(self._given, 4096)}: no such program; `--mtdata` names a Python with mtdata"
                )
            return self._given
        folder = self._downloads.folder / MTDATA.replace("==", "-")
        python = folder / "bin" / "python"
        if (folder / "complete").exists():
            return str(python)
        if self._downloads.offline:
            raise DataError(
                f"{folder}: no environment with mtdata is there, and `--offline` forbids to make it; copy it from a "
                "machine with a network, or name the Python of one (`--mtdata`)"
            )
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f"{folder.name}.lock"), fcntl.LOCK_EX, ""):
            if not (folder / "complete").exists():  # else another process has made it meanwhile
                self._say(f"installing {MTDATA} into an environment of its own, {folder}")
                self._install(folder, python)
        return str(python)

    def _install(self, folder: Path, python: Path) -> None:
        """Make the environment `folder`, whose Python will be `python`. Raises DataError."""
        proxy, environment = self._downloads.network.proxy, dict(os.environ)
        if proxy is not None:  # it is for all addresses, and an empty one means none: pip must look at no other
            environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        by = [] if proxy is None else ["--proxy", proxy]
        # -I: an environment of this process's user must not get into that of mtdata.
        steps = (
            [sys.executable, "-I", "-m", "venv", "--clear", str(folder)],
            [str(python), "-I", "-m", "pip", "--quiet", *by, "install", MTDATA],
        )
        for step in steps:
            done = subprocess.run(
                step, stdin=subprocess.DEVNULL, capture_output=True, env=environment, check=False, text=True
            )
            if done.returncode:
                raise DataError(
                    f"{folder}: mtdata cannot be installed: {printable(done.stderr.strip()[-300:], 300)}; make an "
                    f"environment yourself (python3 -m venv ENV && ENV/bin/pip install {MTDATA}) and name its Python: "
                    "`--mtdata ENV/bin/python`"
                )
        (folder / "complete").touch()
