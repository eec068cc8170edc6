"""Word alignments by eflomal (Östling and Tiedemann 2016), a program of its own that is run on files."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from ziggurat.alignment.aligner import MOST_WORDS
from ziggurat.alignment.links import Link, parse_links
from ziggurat.alignment.symmetry import Symmetrisation, symmetrise
from ziggurat.alignment.words import WordRule, split_words
from ziggurat.errors import ConfigError, DataError, printable

__all__ = ["EFLOMAL", "eflomal_links", "refuse_without_eflomal"]

EFLOMAL = "eflomal-align"
"""The program, looked for on the PATH."""
_BLANK = re.compile(r"\s")  # inside of a word: a no-break space of tokenised text, which eflomal would split at


def refuse_without_eflomal() -> None:
    """Raise ConfigError where the program is not installed."""
    if shutil.which(EFLOMAL) is None:
        raise ConfigError(
            f"eflomal: no program `{EFLOMAL}` on the PATH; `pip install eflomal` builds it (with a C compiler; its "
            "licence is the GPL), or let our own aligner do it, `hmm`"
        )


def eflomal_links(
    pairs: Iterable[tuple[str, str]], rule: WordRule, how: Symmetrisation, folder: Path | None = None
) -> Iterator[set[Link]]:
    """Return the links of each pair of texts, in order, as eflomal finds them in both directions with its defaults.

    All pairs are aligned before this returns; they wait in files without a name, so memory does not grow with them. A
    pair with an empty side, or with more than MOST_WORDS words on a side, has no links. eflomal draws random numbers
    that nothing can fix: two calls differ in a few links.

    Args:
        pairs: source and target texts, read once.
        rule: how they are split into words.
        how: symmetrisation.
        folder: where temporary files are made, about as large as the text; None: the system's folder.

    Raises ConfigError: eflomal is not installed. DataError: it failed, with what it said.
    """
    refuse_without_eflomal()
    with tempfile.TemporaryDirectory(dir=folder, prefix="eflomal-") as name, ExitStack() as opened:
        places = [Path(name) / part for part in ("source", "target", "forward", "backward")]
        count = _write(pairs, rule, places[0], places[1])
        source, target, forward, backward = map(str, places)
        said = _run([EFLOMAL, "-s", source, "-t", target, "-f", forward, "-r", backward])
        try:
            found = [opened.enter_context(place.open(encoding="utf-8")) for place in places[2:]]
        except FileNotFoundError:
            raise DataError(f"`{EFLOMAL}` wrote no alignments: {printable(said, 500) or 'it said nothing'}") from None
        opened.pop_all()  # the files stay open without their folder, and go when they have been read
    return _merged(found[0], found[1], count, how)


def _write(pairs: Iterable[tuple[str, str]], rule: WordRule, *places: Path) -> int:
    """Write words between blanks, one line for each pair, an empty one where it is not aligned; return their number."""
    count = 0
    with places[0].open("w", encoding="utf-8") as source, places[1].open("w", encoding="utf-8") as target:
        for texts in pairs:
            sides = [split_words(text.lower(), rule) for text in texts]
            if not all(0 < len(words) <= MOST_WORDS for words in sides):
                sides = [[], []]
            for words, file in zip(sides, (source, target), strict=True):
                file.write(" ".join(_BLANK.sub("_", word) for word in words) + "\n")
            count += 1
    return count


def _run(command: list[str]) -> str:
    """Run a program with those that it starts; return what it said. Raises DataError when it fails."""
    # In a group of its own: a signal that ends this process early must end what the program has started, too.
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        process = subprocess.Popen(command, **pipes, start_new_session=True, text=True, errors="replace")
    except OSError as error:
        raise DataError(f"`{EFLOMAL}` cannot be run: {error.strerror}") from None
    with process:
        try:
            said = process.communicate()[0].strip()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise DataError(
            f"`{EFLOMAL}` failed (status {process.returncode}): {printable(said, 500) or 'it said nothing'}"
        )
    return said


def _merged(forward: IO[str], backward: IO[str], count: int, how: Symmetrisation) -> Iterator[set[Link]]:
    with forward, backward:
        for number in range(1, count + 1):
            lines = forward.readline(), backward.readline()
            if not all(line.endswith("\n") for line in lines):
                raise DataError(f"`{EFLOMAL}` aligned {number - 1:,} of {count:,} pairs; is there room on the disk?")
            place = f"{EFLOMAL}, line {number}"
            ahead, back = (parse_links(line.rstrip("\n"), None, None, place) for line in lines)
            yield symmetrise(ahead, back, how)
