"""Tables of scores for papers and other programs: `evaluate --format csv`, `markdown` or `latex`."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ziggurat.system.errors import ConfigError, printable

if TYPE_CHECKING:
    from ziggurat.evaluate.comparison import Comparison
    from ziggurat.evaluate.scores import Score

TABLE_FORMATS = ("csv", "markdown", "latex")
"""TABLE_FORMATS are the formats of tables other than plain text."""

_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_LATEX |= {character: f"\\{character}" for character in "&%$#_{}"}
_MARKDOWN = {character: f"\\{character}" for character in "\\|*_`[]<>"}


class ScoreCell(NamedTuple):
    """A score in a table.

    Attributes:
        metric: name of the metric, used as the column's heading.
        value: the score.
        spread: half of its 95 % confidence interval, or the standard deviation over seeds; None: unknown.
        signature: the settings behind it.
        decimals: number of decimals to show.
    """

    metric: str
    value: float
    spread: float | None
    signature: str
    decimals: int

    def __str__(self) -> str:
        spread = "" if self.spread is None else f" ± {self.spread:.{self.decimals}f}"
        return f"{self.value:.{self.decimals}f}{spread}"


def table_format(given: str) -> str | None:
    """Return the value of `--format`, None for plain text. Raises ConfigError for another one."""
    if given not in ("text", *TABLE_FORMATS):
        raise ConfigError(f"`--format {printable(given)}`: choose from text, {', '.join(TABLE_FORMATS)}")
    return None if given == "text" else given


def scores_table(scores: Mapping[str, Sequence[Score]], form: str) -> str:
    """Return a table of `scores`, row name -> scores; all rows have the same metrics."""
    rows = {
        name: [ScoreCell(s.name, s.value, s.interval, s.signature, max(2, s.decimals)) for s in found]
        for name, found in scores.items()
    }
    return _table(rows, form)


def comparison_table(comparison: Comparison, form: str) -> str:
    """Return the table of the scores of all systems."""
    rows = {
        system.name: [
            ScoreCell(s.metric, s.systems[number].mean, s.systems[number].deviation, s.signature, s.decimals)
            for s in comparison.scores
        ]
        for number, system in enumerate(comparison.systems)
    }
    return _table(rows, form)


def _table(rows: Mapping[str, Sequence[ScoreCell]], form: str) -> str:
    signatures = dict.fromkeys(f"{cell.metric}|{cell.signature}" for cells in rows.values() for cell in cells)
    if form == "csv":  # one row per score, with each number in its own cell for programs to read
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["system", "metric", "score", "spread", "signature"])
        for name, cells in rows.items():
            writer.writerows([printable(name), cell.metric, cell.value, cell.spread, cell.signature] for cell in cells)
        return text.getvalue().rstrip("\n")
    escapes = str.maketrans(_LATEX if form == "latex" else _MARKDOWN)
    head, *body = [
        ["", *(cell.metric.translate(escapes) for cell in next(iter(rows.values())))],
        *([printable(name).translate(escapes), *map(str, cells)] for name, cells in rows.items()),
    ]
    if form == "markdown":
        ruled = [head, ["---", *["---:"] * (len(head) - 1)], *body]
        lines = [f"| {' | '.join(row)} |" for row in ruled]
        return "\n".join([*lines, "", *(f"- `{signature}`" for signature in signatures)])
    lines = [" & ".join(row).replace(" ± ", r" $\pm$ ") + r" \\" for row in (head, *body)]
    return "\n".join(
        [
            *(f"% {signature}" for signature in signatures),
            f"\\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
            *["\\toprule", lines[0], "\\midrule", *lines[1:], "\\bottomrule"],
            "\\end{tabular}",
        ]
    )
