"""Checks that the translation files given to `evaluate` are plain text, one sentence per line."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Sequence

from ziggurat.cli.output import counted, refuse_empty, say
from ziggurat.system.errors import DataError, printable

_FEW = 0.001  # share of lines
_MOST = 0.5

_XML = re.compile(r"\s*<(?:\?xml|!DOCTYPE|srcset|refset|tstset|mteval|dataset|xliff|tmx)\b", re.IGNORECASE)
_FORMS: tuple[tuple[str, Callable[[str], object], str], ...] = (
    ("an n-best list", re.compile(r"\d+ \|\|\| ").match, "keep the first of each sentence, without number and scores"),
    (
        "output of fairseq-generate",
        re.compile(r"[STHDPA]-\d+\t").match,
        "take the lines `D-` (`H-`) in the order of their numbers, and keep their last column",
    ),
    ("JSON lines", lambda line: _is_object(line), "extract the text of each line"),
)
"""_FORMS are other forms of translations: the name, a test for a line, and the remedy."""


def _is_object(line: str) -> bool:
    if not line.lstrip().startswith("{") or not line.rstrip().endswith("}"):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def check_scored(path: str, lines: Sequence[str]) -> None:
    """Check a text to score, or to score against.

    Raises DataError if it is empty, or is an n-best list, a table, JSON lines, XML or the like. Warns of subword
    pieces, language tags, blank lines and leftovers of other programs.
    """
    from ziggurat.data.damage import KINDS, marks_of
    from ziggurat.data.vocabulary import leading_tag, segmentation_mark

    refuse_empty(path, lines)
    first = next((line for line in lines[:20] if line.strip()), "")
    if _XML.match(first):
        raise DataError(f"{path}: is XML or SGM (`{printable(first, 40)}`): extract the text, one segment per line")
    for name, has_form, way_out in _FORMS:
        having = [line for line in lines if has_form(line)]
        if len(having) > _MOST * len(lines):
            raise DataError(f"{path}: is {name} (`{printable(having[0], 40)}`): {way_out}")
    said = [
        ("cut into subword pieces", "join the pieces first", _FEW, [*filter(None, map(segmentation_mark, lines))]),
        ("with a language tag before the text", "remove it", _FEW, [*filter(None, map(leading_tag, lines))]),
        ("blank", "is the text complete?", _FEW, [line for line in lines if not line.strip()]),
        ("with tabs", "take the column with the text", _MOST, [line for line in lines if "\t" in line.strip()]),
    ]
    found: dict[int, list[str]] = {}
    for kind, _, mark in marks_of(lines):
        if KINDS[kind].filter == "markup":  # translations of documents have tags
            continue
        found.setdefault(kind, []).append(mark)
    said += [(f"that {KINDS[n].said}", "write the text as it is", KINDS[n].share, marks) for n, marks in found.items()]
    for what, way_out, share, marks in said:
        if len(marks) > share * len(lines):
            example = f" (`{printable(marks[0], 40)}`)" if marks[0].strip() else ""
            say(
                f"warning: {path}: {len(marks):,} of {counted(len(lines), 'line')} {what}{example}: scores need "
                f"plain text; {way_out}"
            )


def warn_of_forms(outputs: Sequence[str], references: Sequence[Sequence[str]], name: str) -> None:
    """Print a warning if letters are composed (NFC) in outputs and decomposed in references, or vice versa."""
    for reference in references:
        pairs = zip(outputs, reference, strict=False)
        differing = [
            number
            for number, sides in enumerate(pairs, 1)
            if not all(map(str.isascii, sides)) and len({unicodedata.is_normalized("NFC", side) for side in sides}) > 1
        ]
        if len(differing) > _FEW * len(reference):
            say(
                f"warning: {len(differing):,} of {counted(len(reference), 'line')} (the first: {differing[0]:,}) have "
                f"composed letters (NFC) in {name} or the reference, and decomposed ones in the other: no score treats "
                "them as equal. Normalise both"
            )
            return
