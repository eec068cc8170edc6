"""What `translate` reads beside the lines, and how it shows their translations."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ziggurat.cli.output import console, input_stream

if TYPE_CHECKING:
    from ziggurat.decoding.results import Translation
    from ziggurat.decoding.served import ServedTranslator
    from ziggurat.decoding.translator import Translator
    from ziggurat.decoding.workers import WorkerTranslator

__all__ = ["counts", "line_extras", "notices", "text"]


def line_extras(prefix: str | None, constraints: str | None, terminology: str | None) -> dict[str, Any]:
    """Return what files give beside the lines, as arguments of `translate_stream`; a path may be `-`."""
    from ziggurat.decoding.lines import read_lines
    from ziggurat.decoding.phrases import read_constraints, read_terminology

    extras: dict[str, Any] = {}
    if prefix is not None:
        extras["prefixes"] = read_lines(*input_stream(prefix))
    if constraints is not None:
        extras["constraints"] = read_constraints(read_lines(*input_stream(constraints)))
    if terminology is not None:
        stream, name = input_stream(terminology)
        extras["terminology"] = read_terminology(read_lines(stream, name), name)
    return extras


def text(translation: Translation, number: int, n_best: int, *, quality: bool = False) -> str:
    """Return a translation as lines of text; several, numbered and with scores, where `n_best` is above 1."""
    lines = []
    for hypothesis in translation.hypotheses:
        columns = [hypothesis.text] if n_best == 1 else [str(number), hypothesis.text, f"{hypothesis.score:.4f}"]
        lines.append(" ||| ".join([*columns, f"{hypothesis.quality:.4f}"] if quality else columns))
    return "\n".join(lines)


def counts(translator: Translator | ServedTranslator | WorkerTranslator) -> str:
    """Return what was out of the ordinary, to be put behind other counts."""
    names = {
        "blank_lines": "blank",
        "long_lines": "translated in parts",
        "unfinished": "cut at the length limit",
        "unmet": "without what they should hold",
    }
    shown = [f"{count:,} {names.get(kind, kind)}" for kind, count in translator.notices.items() if count]
    return "; " + ", ".join(shown) if shown else ""


@contextmanager
def notices() -> Iterator[None]:
    """Show warnings of the translator as plain lines."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_args, **_kwargs: console().print(
            f"warning: {message}", markup=False, highlight=False, soft_wrap=True
        )
        yield
