"""Marian itself, if its commands are installed (`make marian`), and its translations."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ziggurat.system.errors import ExportError, printable
from ziggurat.translate.results import Hypothesis, Translation, one_line

MARIAN_VARIABLE = "ZIGGURAT_MARIAN"
"""MARIAN_VARIABLE is the environment variable that names the folder of Marian's environment."""

WITHOUT_MARIAN = f"Marian is not installed: `make marian`, or ${MARIAN_VARIABLE} names the folder of its environment"
"""WITHOUT_MARIAN is the reason for skipping whatever needs Marian."""


def marian_program() -> Path | None:
    """Return the command `pymarian`, or None if it is not installed.

    It is looked up in the environment $ZIGGURAT_MARIAN (and nowhere else if that is set; it may also name the command
    itself), next to this Python, and in the user's cache, where `make marian` puts it.
    """
    if given := os.environ.get(MARIAN_VARIABLE):
        if (program := Path(given).expanduser()).is_file():
            return program
        folders = [program]
    else:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folders = [Path(sys.prefix), cache / "ziggurat" / "marian"]
    found = (shutil.which("pymarian", path=str(folder / "bin")) for folder in folders)
    return next((Path(path) for path in found if path is not None), None)


def run_marian(*words: str | Path, text: str | None = None, folder: Path | None = None) -> str:
    """Return what a command of Marian prints, such as `decode` with its options.

    Args:
        words: the command and its options.
        text: its standard input.
        folder: its working directory; None: the current one.

    Raises ExportError if it is not installed or fails; the message has the last line of its output.
    """
    program = marian_program()
    if program is None:
        raise ExportError(WITHOUT_MARIAN)
    command = [str(program), *map(str, words)]
    done = subprocess.run(command, input=text, capture_output=True, encoding="utf-8", errors="replace", cwd=folder)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "rror" in line] or done.stderr.splitlines()[-1:]
        said = printable(lines[0] if lines else f"status {done.returncode}", 300)
        raise ExportError(f"`pymarian {words[0]}` failed: {said}")
    return done.stdout


class MarianTranslator:
    """Translator by `pymarian decode`, with the `decoder.yml` of a folder.

    Args:
        path: the folder.

    Raises ExportError if Marian is not installed.
    """

    def __init__(self, path: str | Path) -> None:
        if marian_program() is None:
            raise ExportError(WITHOUT_MARIAN)
        self._path = Path(path)
        # Without `--allow-special` Marian never writes the bytes of control characters, which a model may.
        self._options = ["--cpu-threads", "1", "--mini-batch", "16", "--maxi-batch", "100", "--maxi-batch-sort", "src"]
        self._options.append("--allow-special")

    def translate_stream(self, lines: Sequence[str], **decoding: Any) -> list[Translation]:
        """Return one Translation per line, with the search of decoder.yml or the settings in `decoding`.

        Of `decoding` only `beam_size`, `length_penalty.alpha`, `length_penalty.word_penalty`, `max_length.ratio` and
        `unknown` are used. Marian rounds the scores of tokens to five decimals.
        """
        options = list(self._options)
        if decoding:
            options += ["--beam-size", str(decoding["beam_size"])]
            options += ["--normalize", str(decoding["length_penalty"]["alpha"])]
            options += ["--word-penalty", str(decoding["length_penalty"]["word_penalty"])]
            options += ["--allow-unk", str(decoding["unknown"]).lower()]
            options += ["--max-length-factor", str(decoding["max_length"]["ratio"] or 3)]
        given = "".join(f"{line}\n" for line in lines)
        command = ["decode", "-c", "decoder.yml", "--n-best", "--no-spm-decode", "--word-scores", "--quiet", *options]
        best: dict[int, str] = {}
        for row in run_marian(*command, text=given, folder=self._path).splitlines():
            number, _, rest = row.partition(" ||| ")
            best.setdefault(int(number), rest)
        if len(best) != len(lines):
            raise ExportError(f"`pymarian decode` translated {len(best):,} of {len(lines):,} lines")
        return [Translation(line, [_hypothesis(best[number])]) for number, line in enumerate(lines)]


def _hypothesis(row: str) -> Hypothesis:
    """Return the hypothesis of a row `pieces ||| WordScores= ... ||| F0= ... ||| score`."""
    text, words, whole, score = row.rsplit(" ||| ", 3)
    pieces = text.split(" ") if text else []
    scores = [float(word) for word in words.split(" ")[1:]]
    finished = len(scores) > len(pieces)
    joined = one_line("".join(pieces).replace("\u2581", " ").removeprefix(" "))
    return Hypothesis(joined, float(score), float(whole.split(" ")[1]), pieces, scores, finished, ends=int(finished))
