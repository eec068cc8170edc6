"""The verb that estimates which target pieces each source piece needs: shortlist."""

from __future__ import annotations

from typing import Annotated

import typer

from ziggurat.cli.output import OUT, check_output, print_json
from ziggurat.cli.preparation import Json

__all__ = ["shortlist"]


def shortlist(
    store: Annotated[str, typer.Argument(help="Folder that `ziggurat prepare` wrote.")],
    output: Annotated[str, typer.Option(*OUT, metavar="FILE", help="File to write.")],
    best: Annotated[int, typer.Option("--best", min=0, help="Target pieces of a source piece, the likeliest.")] = 100,
    frequent: Annotated[
        int, typer.Option("--frequent", min=0, help="Target pieces of every sentence, the most frequent.")
    ] = 100,
    floor: Annotated[
        float, typer.Option("--floor", min=0, max=1, help="Least probability of a source piece's target piece.")
    ] = 1e-4,
    pairs: Annotated[int, typer.Option("--pairs", min=1, help="Training pairs read, at most.")] = 200_000,
    json: Json = False,
) -> None:
    """Estimate a lexical shortlist from training pairs (IBM Model 1), for `decoding.shortlist`.

    Example: `ziggurat shortlist stores/de-en -o de-en.shortlist`
    """
    from ziggurat.data.corpus import Store
    from ziggurat.data.shortlist import estimate_shortlist, write_shortlist

    if output == "-":
        output = "./-"  # a name like any other: the file is no text
    check_output(output)
    opened = Store.open(store)
    table = estimate_shortlist(opened, pairs=pairs, best=best, frequent=frequent, floor=floor)
    write_shortlist(output, table)
    candidates = table.candidates
    report = {
        "shortlist": output,
        "pairs": min(pairs, len(opened.train)),
        "source_pieces": len(candidates),
        "target_pieces": opened.target.size,
        "mean_candidates": float((candidates < opened.target.size).sum() / len(candidates)),
        "always": len(table.always),
    }
    if json:
        print_json(report)
        return
    print(
        f"{output}: {report['mean_candidates']:.1f} of {opened.target.size:,} target pieces for a source piece, "
        f"{len(table.always)} for every sentence; from {report['pairs']:,} pairs"
    )
