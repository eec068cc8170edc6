"""The tables of `evaluate --compare` as plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ziggurat.cli.output import counted
from ziggurat.evaluate.findings import FEWEST_CASES
from ziggurat.system.errors import printable

if TYPE_CHECKING:
    from ziggurat.evaluate.comparison import Comparison
    from ziggurat.evaluate.findings import BucketTable, NgramTable, OverSeeds, Scores, SentenceTable

_EXAMPLES = 3  # sentences shown for each of two systems; the JSON has more
_LINE = 4096  # characters shown of a sentence


def comparison_text(comparison: Comparison) -> str:
    """Return all tables, with the first few examples of sentences."""
    originals = [system.name for system in comparison.systems]
    names = [printable(name) for name in originals]
    parts = [_head(comparison)]
    parts.append(_scores(comparison))
    parts += [_tests(scores, originals) for scores in comparison.scores if scores.pairs]
    rows = [[count.title, *(_figure(value, 0) for value in count.systems)] for count in comparison.counts]
    parts.append(_lines("Outputs", aligned([["sentences", *names], *rows])))
    parts += [_bucket_table(table, names) for table in comparison.buckets]
    parts += [_ngrams(table) for table in comparison.ngrams]
    parts += [_sentences(table) for table in comparison.sentence_tables]
    parts += [f"Left out: {note}" for note in comparison.notes]
    return "\n\n".join(parts)


def _head(comparison: Comparison) -> str:
    lines = [f"{counted(comparison.sentences, 'sentence')}, {counted(comparison.references, 'reference')}"]
    for system in comparison.systems:
        origins = "; ".join(printable(origin, _LINE) for origin in system.origins)
        lines.append(f"{printable(system.name)}: {counted(system.seeds, 'seed')}{': ' if origins else ''}{origins}")
    if any(system.seeds > 1 for system in comparison.systems):
        lines.append("Figures are means over seeds, ± their standard deviation.")
    return "\n".join(lines)


def _scores(comparison: Comparison) -> str:
    """Return the table of scores, followed by their signatures."""
    rows = [["", *(scores.metric for scores in comparison.scores)]]
    for number, system in enumerate(comparison.systems):
        figures = (_figure(scores.systems[number], scores.decimals) for scores in comparison.scores)
        rows.append([printable(system.name), *figures])
    signatures = [
        f"{scores.metric}|{printable(scores.signature, _LINE)}{'' if scores.higher_is_better else ' (lower is better)'}"
        for scores in comparison.scores
    ]
    return _lines("Scores", aligned(rows), *signatures)


def _tests(scores: Scores, originals: Sequence[str]) -> str:
    """Return the differences and p-values of all pairs, and for three systems or more who beats whom."""
    several = len(scores.pairs) > 1  # a single p-value needs no correction for their number
    head = ["p bootstrap", *(["adjusted"] * several), "p randomisation", *(["adjusted"] * several)]
    rows = [["", "difference", *head]]
    for pair in scores.pairs:
        values = [pair.bootstrap, pair.bootstrap_adjusted, pair.randomisation, pair.randomisation_adjusted]
        label = f"{printable(pair.left)} - {printable(pair.right)}"
        shown_values = (f"{value:.4f}" for value in (values if several else values[::2]))
        rows.append([label, f"{pair.difference:+.{scores.decimals}f}", *shown_values])
    shown = [f"{scores.metric}: differences and p-values ({scores.test_signature})", aligned(rows)]
    if scores.too_few:
        assert scores.sentences is not None
        shown.append(
            f"{counted(scores.sentences, 'sentence')}: too few to tell. With fewer than {FEWEST_CASES}, these p-values "
            "come out far too small."
        )
    if len(originals) > 2 and not scores.too_few:
        matrix = [
            [printable(row), *("" if row == column else scores.verdict(row, column) for column in originals)]
            for row in originals
        ]
        shown.append("+ row better than column, - worse, = no significant difference (bootstrap, adjusted p < 0.05)")
        shown.append(aligned([["", *map(printable, originals)], *matrix]))
    return _lines(*shown)


def _bucket_table(table: BucketTable, names: Sequence[str]) -> str:
    sized = bool(table.size_of)
    decimals = 0 if table.measure == "sentences" else 2
    rows = [[table.by, *([table.size_of] if sized else []), *names]]
    for bucket in table.buckets:
        figures = (_figure(value, decimals) for value in bucket.systems)
        rows.append([bucket.label, *([f"{bucket.size:,}"] if sized else []), *figures])
    return _lines(f"{table.title} ({table.measure})", aligned(rows))


def _ngrams(table: NgramTable) -> str:
    """Return the n-grams that one of the systems gets right more often than the other."""
    left, right = printable(table.left), printable(table.right)
    rows = [
        [printable(n.ngram), f"{n.left:.4g}", f"{n.right:.4g}", f"{n.score:.3f}"]
        for n in (*table.more_in_left, *table.more_in_right)
    ]
    return _lines(f"N-grams that {left} or {right} gets right more often", aligned([["", left, right, "score"], *rows]))


def _sentences(table: SentenceTable) -> str:
    """Return the numbers of wins and losses, and the first examples of both."""
    left, right = printable(table.left), printable(table.right)
    shown = [
        f"Sentences, {left} against {right}: {table.wins:,} better, {table.losses:,} worse, {table.ties:,} equal "
        f"({table.measure})"
    ]
    for name, examples in ((left, table.left_best), (right, table.right_best)):
        if examples:
            shown.append(f"\nWhere {name} is better by most")
        for example in examples[:_EXAMPLES]:
            shown.append(f"  line {example.line}")
            lines = [] if example.source is None else [("source", "", example.source)]
            lines.append(("reference", "", example.reference))
            for system, score, outputs in (
                (left, example.left_score, example.left),
                (right, example.right_score, example.right),
            ):
                several = "mean " if len(outputs) > 1 else ""  # one score for the outputs of all seeds
                lines += [(system, f"{several}{score:.1f}", output) for output in dict.fromkeys(outputs)]
            width = max(len(label) for label, _, _ in lines)
            shown += [f"    {label:<{width}} {score:>5}  {printable(line, _LINE)}" for label, score, line in lines]
    return "\n".join(shown)


def _figure(value: OverSeeds, decimals: int) -> str:
    """Return the mean over seeds, with the standard deviation if there are several."""
    if value.deviation is None:
        return f"{value.mean:.{decimals}f}"
    return f"{value.mean:.{max(decimals, 1)}f} ± {value.deviation:.{max(decimals, 1)}f}"


def _lines(*parts: str) -> str:
    return "\n".join(parts)


def aligned(rows: Iterable[Sequence[str]]) -> str:
    """Return rows in aligned columns: the first column to the left, the others to the right."""
    cells = [list(row) for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return "\n".join(
        "  ".join(
            [f"{row[0]:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()
        for row in cells
    )
