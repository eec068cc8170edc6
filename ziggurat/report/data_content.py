"""What a report on a store shows: counts of each corpus, lengths, scripts, languages, what was dropped, test sets.

All of it comes from the store: its manifest, the examples of dropped pairs, and a sample of its pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ziggurat.cleaning.held_out import HeldOut, Overlap, side_hashes
from ziggurat.cleaning.languages import confidences, identifier, likeliest, scripts
from ziggurat.config.languages import main_language
from ziggurat.data.comparisons import CONTAMINATION, overlap_notice
from ziggurat.data.corpus import Store
from ziggurat.data.lines import normalise
from ziggurat.data.prepare import CLEANING
from ziggurat.data.table import PairTable
from ziggurat.report.data_figures import MOST_CURVES, LengthCurve, length_figures
from ziggurat.report.figure import Figure, numbers
from ziggurat.small_files import Form, json_safe, parse_json, read_bounded, shaped

__all__ = ["CorpusFacts", "DataContent", "Side", "data_record", "gather_data"]

_MOST_CORPORA = 60  # that are shown one by one
_SAMPLED = 20_000  # pairs of all corpora together that are looked at for scripts and languages
_SAMPLED_OF_CORPUS = 500
_MEASURED = 200_000  # pairs of a corpus whose lengths are looked at
_CHUNK = 10_000  # pairs that are decoded at a time


@dataclass(frozen=True)
class Side:
    """One side of a corpus.

    Attributes:
        language: Its code, by the configuration.
        pieces: Mean length in subword pieces.
        longest: Longest sentence, in subword pieces.
        scripts: Share of the letters of the sample in each script, the largest first.
        languages: Share of the sampled sentences by the likeliest language; None without py3langid.
        confidence: Mean confidence that the sampled sentences are in `language`; None where that is not known.
    """

    language: str
    pieces: float
    longest: int
    scripts: Mapping[str, float]
    languages: Mapping[str, float] | None
    confidence: float | None


@dataclass(frozen=True)
class CorpusFacts:
    """One corpus of a store, or several that are summed up in a line.

    Attributes:
        name, split, tag, weight, read, kept, dropped, repaired, licences: As in the manifest.
        examples: Source and target of a few dropped pairs, by reason.
        overlap: What its pairs share with each held-out set.
        sides: Source and target; None of corpora that are summed up, or without a pair.
        sampled: Pairs that scripts and languages are of.
    """

    name: str
    split: str
    tag: str | None
    weight: float | None
    read: int
    kept: int
    dropped: Mapping[str, int]
    repaired: int
    licences: Mapping[str, str]
    examples: Mapping[str, Sequence[Sequence[str]]]
    overlap: Mapping[str, Overlap]
    sides: tuple[Side, Side] | None
    sampled: int


@dataclass(frozen=True)
class DataContent:
    """Everything that a report on a store shows.

    Attributes:
        store: Its folder.
        languages: Codes of source and target.
        corpora: Its corpora, training corpora first; those beyond the largest summed up.
        contamination: Sentences on held-out sets in training pairs.
        notices: Other suspicious findings.
        overlap: What the training pairs share with each held-out set.
        figures: Figures.
        missing: What cannot be shown, and why.
        vocabulary: Ids of both sides.
    """

    store: str
    languages: tuple[str, str]
    corpora: tuple[CorpusFacts, ...]
    contamination: tuple[str, ...]
    notices: tuple[str, ...]
    overlap: Mapping[str, Overlap]
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


class _Overlap(Form):
    sentences: int
    found: int
    pairs: int
    sides: int


class _Overlaps(Form):
    held_out: dict[str, _Overlap]


def gather_data(
    store: Store,
    test_set: tuple[str, Sequence[str], Sequence[str]] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> DataContent:
    """Return everything that a report on a store shows.

    Args:
        store: The store.
        test_set: Name, sources and references of a test set that the training pairs are to be compared with.
        say: Takes messages on steps that take time.

    Raises DataError where a file of the store is damaged.
    """
    manifest, config = store.manifest, store.manifest["config"]
    missing = []
    if "held_out" not in manifest and config["dev"]:
        missing.append(
            "What training pairs share with the development corpora: the store is of an earlier version. "
            "`ziggurat prepare --force` prepares it anew."
        )
    try:
        identifier(None)
    except ModuleNotFoundError:
        missing.append("Languages: py3langid is not installed. `pip install 'ziggurat-mt[clean]'`.")
    facts, curves = [], []
    examples = _examples(store, missing)
    for split, table in (("train", store.train), ("dev", store.dev)):
        entries = manifest["corpora"][split]
        if table is None:
            continue
        largest = sorted(range(len(entries)), key=lambda n: -entries[n]["kept"])
        shown = set(largest[:_MOST_CORPORA]) if len(entries) > _MOST_CORPORA + 1 else set(largest)
        say(f"looking at a sample of the {split} pairs") if split == "train" else None
        for number in sorted(shown):
            shares = min(_SAMPLED_OF_CORPUS, max(2, _SAMPLED // len(shown)))
            of_split = examples[number] if split == "train" and number < len(examples) else {}
            facts.append(_facts(store, split, table, number, of_split, shares))
        if split == "train":
            curves = [_curve(table, number, entries[number]["name"]) for number in largest[:MOST_CURVES]]
        if len(shown) < len(entries):
            facts.append(_summed(split, [entry for n, entry in enumerate(entries) if n not in shown]))
    overlap = _overlaps(manifest)
    notices = list(manifest.get("notices", []))
    if test_set is not None:
        say(f"comparing {len(store.train):,} training pairs with {test_set[0]}")
        overlap = {**overlap, test_set[0]: (found := _compared(store, *test_set))}
        notices += [notice] if (notice := overlap_notice(test_set[0], found)) else []
    return DataContent(
        str(store.path),
        (config["source_language"], config["target_language"]),
        tuple(facts),
        tuple(notice for notice in notices if notice.startswith(CONTAMINATION)),
        tuple(notice for notice in notices if not notice.startswith(CONTAMINATION)),
        overlap,
        tuple(length_figures([curve for curve in curves if curve is not None])),
        tuple(missing),
        (store.source.size, store.target.size),
    )


def _overlaps(entry: Mapping[str, Any]) -> dict[str, Overlap]:
    """Return the overlaps in the manifest or in its entry of a corpus. Raises DataError where they are nonsense."""
    found = shaped({"held_out": entry.get("held_out", {})}, _Overlaps, "manifest: held_out")
    return {name: Overlap(**overlap.model_dump()) for name, overlap in found.held_out.items()}


def _examples(store: Store, missing: list[str]) -> list[dict[str, list[list[str]]]]:
    """Return the examples of dropped pairs of each training corpus; where there are none, add why to `missing`."""
    path = Path(store.path) / CLEANING
    if CLEANING in store.manifest["files"]:
        return shaped(parse_json(read_bounded(path), str(path)), _Cleaning, str(path)).train
    if any(sum(entry["dropped"].values()) for entry in store.manifest["corpora"]["train"]):
        missing.append(
            "Examples of what was dropped: the store is of an earlier version. `ziggurat prepare --force` prepares it "
            "anew."
        )
    return []


def _range(table: PairTable, corpus: int) -> tuple[int, int]:
    """Return the first pair of a corpus, and the one after its last: corpora follow each other."""
    return int(np.searchsorted(table.corpora, corpus)), int(np.searchsorted(table.corpora, corpus, "right"))


def _facts(
    store: Store, split: str, table: PairTable, number: int, examples: Mapping[str, Any], most: int
) -> CorpusFacts:
    """Return the facts of one corpus."""
    entry, config = store.manifest["corpora"][split][number], store.manifest["config"]
    first, last = _range(table, number)
    places = np.unique(np.linspace(first, max(first, last - 1), min(most, last - first)).astype(np.int64))
    sides = None
    if len(places):
        texts = _decoded(store, table, places)
        own = config[split][number]
        codes = [own.get(f"{side}_language") or config[f"{side}_language"] for side in ("source", "target")]
        lengths = [column[first:last] for column in (table.source_lengths, table.target_lengths)]
        source, target = (_side(code, text, n) for code, text, n in zip(codes, texts, lengths, strict=True))
        sides = source, target
    return CorpusFacts(
        **{key: entry[key] for key in ("name", "tag", "weight", "read", "kept", "dropped")},
        split=split,
        repaired=entry.get("repaired", 0),
        licences={part["name"]: part["licence"] for part in entry.get("origin", [])},
        examples=examples,
        overlap=_overlaps(entry),
        sides=sides,
        sampled=len(places),
    )


def _decoded(store: Store, table: PairTable, places: Any) -> tuple[list[str], list[str]]:
    """Return the texts of pairs, as their ids spell them."""
    sources, targets = table.pairs(places)
    return [store.source.decode(ids.tolist()) for ids in sources], [store.target.decode(i.tolist()) for i in targets]


def _side(code: str, texts: Sequence[str], lengths: NDArray[np.int32]) -> Side:
    letters = scripts(texts)
    total = max(1, sum(letters.values()))
    languages, confidence = None, None
    try:
        known = main_language(code) in identifier(None).labels
    except ModuleNotFoundError:
        pass
    else:
        found = [language for language in likeliest(texts) if language is not None]
        counts = sorted({(-found.count(language), language) for language in set(found)})
        languages = {language: -count / len(found) for count, language in counts}
        confidence = float(confidences(texts, main_language(code)).mean()) if known else None
    shares = {name: count / total for name, count in letters.items()}
    return Side(code, float(lengths.mean()), int(lengths.max()), shares, languages, confidence)


def _curve(table: PairTable, number: int, name: str) -> LengthCurve | None:
    """Return the lengths of a corpus, of at most _MEASURED pairs; None where it has no pairs."""
    first, last = _range(table, number)
    if first == last:
        return None
    chosen = slice(first, last, max(1, -(-(last - first) // _MEASURED)))
    return LengthCurve(name, number, np.array(table.source_lengths[chosen]), np.array(table.target_lengths[chosen]))


def _summed(split: str, entries: Sequence[Mapping[str, Any]]) -> CorpusFacts:
    """Return a line for the corpora that are not shown one by one."""
    total: dict[str, int] = {}
    for entry in entries:
        for reason, count in entry["dropped"].items():
            total[reason] = total.get(reason, 0) + count
    read, kept, repaired = (sum(entry.get(key, 0) for entry in entries) for key in ("read", "kept", "repaired"))
    name = f"{len(entries):,} smaller corpora"
    return CorpusFacts(name, split, None, None, read, kept, total, repaired, {}, {}, {}, None, 0)


def _compared(store: Store, name: str, sources: Sequence[str], references: Sequence[str]) -> Overlap:
    """Return what the training pairs share with a test set."""
    form = store.manifest["config"]["unicode"]
    held_out = HeldOut()
    held_out.add_pairs(name, [(normalise(list(sources), form), normalise(list(references), form))])
    for first in range(0, len(store.train), _CHUNK):
        places = range(first, min(first + _CHUNK, len(store.train)))
        held_out.look(side_hashes(*_decoded(store, store.train, places)))
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
            "missing": content.missing,
            "figures": [{"key": f.key, "title": f.title, "csv": numbers(f)} for f in content.figures],
        }
    )
