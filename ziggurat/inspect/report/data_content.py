"""The content of a report on a store: counts of each corpus, lengths, scripts, languages, what was dropped, test sets.

All of it comes from the store: its manifest, the examples of dropped pairs, and a sample of its pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ziggurat.data.cleaning.comparisons import CONTAMINATION, overlap_notice
from ziggurat.data.cleaning.held_out import HeldOut, Overlap, side_hashes
from ziggurat.data.cleaning.languages import identifier
from ziggurat.data.corpus import Store
from ziggurat.data.lines import normalise
from ziggurat.data.prepare import CLEANING
from ziggurat.data.table import PairTable
from ziggurat.inspect.report.data_facts import (
    CorpusFacts,
    corpus_facts,
    corpus_range,
    decoded,
    held_out_rule,
    overlaps_in,
    sentence_lengths,
    summed_facts,
)
from ziggurat.inspect.report.data_figures import MOST_CURVES, LengthCurve, length_figures
from ziggurat.inspect.report.figure import Figure, numbers
from ziggurat.system.small_files import Form, json_safe, parse_json, read_bounded, shaped

_MOST_CORPORA = 60  # that are shown one by one
_SAMPLED = 20_000  # pairs of all corpora together that are looked at for scripts and languages
_SAMPLED_OF_CORPUS = 500
_MEASURED = 200_000  # pairs of a corpus whose lengths are looked at
_CHUNK = 10_000  # pairs that are decoded at a time


@dataclass(frozen=True)
class DataContent:
    """Everything that a report on a store shows.

    Attributes:
        store: its folder.
        languages: codes of source and target.
        corpora: its corpora, training corpora first; those beyond the largest summed up.
        contamination: sentences on held-out sets in training pairs.
        notices: other suspicious findings.
        overlap: what the training pairs share with each held-out set, before any is dropped for it.
        staying: by set, the pairs with both sides there and those with one at least that are trained on.
        figures: figures.
        missing: what cannot be shown, and why.
        vocabulary: ids of both sides.
    """

    store: str
    languages: tuple[str, str]
    corpora: tuple[CorpusFacts, ...]
    contamination: tuple[str, ...]
    notices: tuple[str, ...]
    overlap: Mapping[str, Overlap]
    staying: Mapping[str, tuple[int, int]]
    figures: tuple[Figure, ...]
    missing: tuple[str, ...]
    vocabulary: tuple[int, int]

    @property
    def training(self) -> list[CorpusFacts]:
        """The training corpora."""
        return [corpus for corpus in self.corpora if corpus.split == "train"]


class _Cleaning(Form):
    """Form of CLEANING."""

    train: list[dict[str, list[Annotated[list[str], Field(min_length=2, max_length=2)]]]]


def gather_data(
    store: Store,
    test_set: tuple[str, Sequence[str], Sequence[str]] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> DataContent:
    """Return everything that a report on a store shows.

    Args:
        store: the store.
        test_set: name, sources and references of a test set that the training pairs are to be compared with.
        say: takes messages on steps that take time.

    Raises DataError where a file of the store is damaged.
    """
    manifest, config = store.manifest, store.manifest["config"]
    missing = []
    try:
        identifier(None)
    except ModuleNotFoundError:
        missing.append("Languages: py3langid is not installed. `pip install 'ziggurat-mt[clean]'`.")
    say("looking at a sample of the pairs")
    facts = _all_facts(store, "train", store.train, _examples(store))
    if store.dev is not None:
        facts += _all_facts(store, "dev", store.dev, [])
    overlap, staying = overlaps_in(manifest), _staying(manifest)
    notices = list(manifest["notices"])
    if test_set is not None:
        say(f"comparing {len(store.train):,} training pairs with {test_set[0]}")
        overlap = {**overlap, test_set[0]: (found := _compared(store, *test_set))}
        staying[test_set[0]] = found.staying("keep")  # the store's pairs are those that stayed
        drops = "pairs` (or `sides`)" if found.pairs else "sides`"
        way_out = f"name its files in `data.held_out`, set `data.filters.held_out: {drops}, and prepare again"
        notice = overlap_notice(test_set[0], found, of_pairs=True, way_out=way_out)
        notices += [notice] if notice else []
    return DataContent(
        str(store.path),
        (config["source_language"], config["target_language"]),
        tuple(facts),
        tuple(notice for notice in notices if notice.startswith(CONTAMINATION)),
        tuple(notice for notice in notices if not notice.startswith(CONTAMINATION)),
        overlap,
        staying,
        tuple(length_figures(_curves(store))),
        tuple(missing),
        (store.source.size, store.target.size),
    )


def _staying(manifest: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return by held-out set the training pairs with both sides there, and with one at least, that were not dropped."""
    found: dict[str, tuple[int, int]] = {}
    for number, entry in enumerate(manifest["corpora"]["train"]):
        for name, overlap in overlaps_in(entry).items():
            pairs, sides = overlap.staying(held_out_rule(manifest["config"], number))
            before = found.get(name, (0, 0))
            found[name] = before[0] + pairs, before[1] + sides
    return found


def _examples(store: Store) -> list[dict[str, list[list[str]]]]:
    """Return the examples of dropped pairs of each training corpus."""
    path = Path(store.path) / CLEANING
    if CLEANING not in store.manifest["files"]:
        return []
    return shaped(parse_json(read_bounded(path), str(path)), _Cleaning, str(path)).train


def _all_facts(
    store: Store, split: str, table: PairTable, examples: Sequence[Mapping[str, Sequence[Sequence[str]]]]
) -> list[CorpusFacts]:
    """Return the facts of the corpora of one split; beyond the largest ones in one line."""
    entries = store.manifest["corpora"][split]
    shown = _largest(entries, _MOST_CORPORA) if len(entries) > _MOST_CORPORA + 1 else range(len(entries))
    most = min(_SAMPLED_OF_CORPUS, max(2, _SAMPLED // max(1, len(shown))))
    facts = [corpus_facts(store, split, table, n, examples[n] if examples else {}, most) for n in sorted(shown)]
    rest = [entry for number, entry in enumerate(entries) if number not in set(shown)]
    return facts + ([summed_facts(split, rest)] if rest else [])


def _largest(entries: Sequence[Mapping[str, Any]], most: int) -> list[int]:
    """Return the numbers of the corpora with most pairs in the store, the largest first."""
    return sorted(range(len(entries)), key=lambda number: -entries[number]["kept"])[:most]


def _curves(store: Store) -> list[LengthCurve]:
    """Return the lengths of the largest training corpora, of at most _MEASURED pairs each."""
    entries, table, found = store.manifest["corpora"]["train"], store.train, []
    for number in _largest(entries, MOST_CURVES):
        first, last = corpus_range(table, number)
        chosen = slice(first, last, max(1, -(-(last - first) // _MEASURED)))
        lengths = sentence_lengths(table, chosen, entries[number]["tag"])
        if last > first:
            found.append(LengthCurve(entries[number]["name"], number, *lengths))
    return found


def _compared(store: Store, name: str, sources: Sequence[str], references: Sequence[str]) -> Overlap:
    """Return what the training pairs share with a test set."""
    form = store.manifest["config"]["unicode"]
    held_out = HeldOut()
    held_out.add_pairs(name, [(normalise(list(sources), form), normalise(list(references), form))])
    for first in range(0, len(store.train), _CHUNK):
        places = range(first, min(first + _CHUNK, len(store.train)))
        held_out.look(side_hashes(*decoded(store, store.train, places)))
    return held_out.overlaps()[name]


def data_record(content: DataContent) -> dict[str, Any]:
    """Return the content for JSON."""
    corpora = [
        {**asdict(corpus), "overlap": {name: found._asdict() for name, found in corpus.overlap.items()}}
        for corpus in content.corpora
    ]
    return json_safe(
        {
            "store": content.store,
            "languages": content.languages,
            "corpora": corpora,
            "contamination": content.contamination,
            "notices": content.notices,
            "overlap": {name: found._asdict() for name, found in content.overlap.items()},
            "staying": {name: {"pairs": pairs, "sides": sides} for name, (pairs, sides) in content.staying.items()},
            "missing": content.missing,
            "figures": [{"key": f.key, "title": f.title, "csv": numbers(f)} for f in content.figures],
        }
    )
