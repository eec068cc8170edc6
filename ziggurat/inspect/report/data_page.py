"""The report on a store as one HTML file without scripts that loads nothing.

Everything in it comes from the store: its manifest, the examples of dropped pairs, and a sample of its pairs. It shows
the counts of each corpus, lengths of sentences and their ratios, scripts, languages, dropped pairs, and test sets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ziggurat.config.languages import main_language
from ziggurat.data.cleaning.cleaner import CONTAMINATION, overlap_notice
from ziggurat.data.cleaning.filters import confidences, identifier, likeliest, scripts
from ziggurat.data.cleaning.held_out import HeldOut, Overlap, side_hashes
from ziggurat.data.corpus import Store
from ziggurat.data.lines import normalise
from ziggurat.data.prepare import CLEANING
from ziggurat.data.table import PairTable
from ziggurat.inspect.report.figure import Figure, Panel, Series, described, numbers
from ziggurat.inspect.report.template import page_templates, table_link
from ziggurat.system.small_files import JsonForm, json_safe, parse_json, read_bounded, shaped


@dataclass(frozen=True)
class Side:
    """One side of a corpus.

    Attributes:
        language: its code in the configuration.
        pieces: mean length in subword pieces.
        longest: length of the longest sentence in subword pieces.
        scripts: share of the letters of the sample in each script, largest first.
        languages: share of the sampled sentences by the most likely language; None without py3langid.
        confidence: mean confidence that the sampled sentences are in `language`; None if unknown.
    """

    language: str
    pieces: float
    longest: int
    scripts: Mapping[str, float]
    languages: Mapping[str, float] | None
    confidence: float | None


@dataclass(frozen=True)
class CorpusFacts:
    """One corpus of a store, or several summarised in a line.

    Attributes:
        name, split, tag, weight, read, kept, dropped, repaired, licences: as in the manifest.
        examples: source and target of a few dropped pairs, by reason.
        overlap: overlap of its pairs with each held-out set, before any are dropped.
        held_out: the rule by which such pairs are dropped (`data.filters.held_out`); "" for summarised corpora.
        sides: source and target; None for summarised corpora, or without pairs.
        sampled: number of pairs from which scripts and languages were determined.
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
    held_out: str
    sides: tuple[Side, Side] | None
    sampled: int


class _Overlap(JsonForm):
    sentences: int
    found: int
    pairs: int
    sides: int


class _Overlaps(JsonForm):
    held_out: dict[str, _Overlap]


def _overlaps_in(entry: Mapping[str, Any]) -> dict[str, Overlap]:
    """Return the overlaps in the manifest or in its entry of a corpus. Raises DataError if they are invalid."""
    found = shaped({"held_out": entry.get("held_out", {})}, _Overlaps, "manifest: held_out")
    return {name: Overlap(**overlap.model_dump()) for name, overlap in found.held_out.items()}


def _held_out_rule(config: Mapping[str, Any], corpus: int) -> str:
    own = config["train"][corpus]["filters"] or {}
    return str(own.get("held_out") or config["filters"]["held_out"])


def _corpus_range(table: PairTable, corpus: int) -> tuple[int, int]:
    """Return the number of a corpus's first pair and that after its last; corpora are consecutive."""
    return int(np.searchsorted(table.corpora, corpus)), int(np.searchsorted(table.corpora, corpus, "right"))


def _corpus_facts(
    store: Store, split: str, table: PairTable, number: int, examples: Mapping[str, Any], most: int
) -> CorpusFacts:
    entry, config = store.manifest["corpora"][split][number], store.manifest["config"]
    first, last = _corpus_range(table, number)
    places = np.unique(np.linspace(first, max(first, last - 1), min(most, last - first)).astype(np.int64))
    sides = None
    if len(places):
        texts = decoded(store, table, places)
        own = config[split][number]
        codes = [own[f"{side}_language"] or config[f"{side}_language"] for side in ("source", "target")]
        lengths = _sentence_lengths(table, slice(first, last), entry["tag"])
        source, target = (_side(code, text, n) for code, text, n in zip(codes, texts, lengths, strict=True))
        sides = source, target
    return CorpusFacts(
        **{key: entry[key] for key in ("name", "tag", "weight", "read", "kept", "dropped")},
        split=split,
        repaired=entry.get("repaired", 0),
        licences={
            part["name"]: part["licence"] + "".join(f"; {name} changed since" for name in part.get("changed", []))
            for part in entry.get("origin", [])
        },
        examples=examples,
        overlap=_overlaps_in(entry),
        held_out=_held_out_rule(config, number) if split == "train" else "",
        sides=sides,
        sampled=len(places),
    )


def _sentence_lengths(table: PairTable, chosen: slice, tag: str | None) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the pieces of sources and targets of a corpus, without its tag, which is stored with the source."""
    source, target = np.array(table.source_lengths[chosen]), np.array(table.target_lengths[chosen])
    return source - (tag is not None), target


def decoded(store: Store, table: PairTable, places: Any) -> tuple[list[str], list[str]]:
    """Return the texts of pairs, decoded from their ids."""
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


def _summed_facts(split: str, entries: Sequence[Mapping[str, Any]]) -> CorpusFacts:
    total: dict[str, int] = {}
    for entry in entries:
        for reason, count in entry["dropped"].items():
            total[reason] = total.get(reason, 0) + count
    read, kept, repaired = (sum(entry.get(key, 0) for entry in entries) for key in ("read", "kept", "repaired"))
    name = f"{len(entries):,} smaller corpora"
    return CorpusFacts(name, split, None, None, read, kept, total, repaired, {}, {}, {}, "", None, 0)


_MOST_CURVES = 8
"""_MOST_CURVES is the largest number of corpora with a curve, limited by the number of colours."""

_SECTION = "Lengths"
_PER_DOUBLING = 4  # bins of lengths
_RATIO_STEP = 0.25  # width of a bin of ratios, in doublings
_WIDEST_FIGURE = 3.0  # doublings; larger ratios count in the last bins


class LengthCurve(NamedTuple):
    """Lengths of a corpus's pairs in subword pieces."""

    name: str
    corpus: int
    source: NDArray[np.int32]
    target: NDArray[np.int32]


def length_figures(curves: Sequence[LengthCurve]) -> list[Figure]:
    """Return the figures of these corpora, largest first."""
    panels = tuple(
        Panel(
            f"{side} sentences",
            "subword pieces",
            "% of sentences",
            tuple(_lengths(curve.name, colour, getattr(curve, side)) for colour, curve in enumerate(curves)),
            log_x=True,
        )
        for side in ("source", "target")
    )
    ratios = Panel(
        "target over source",
        "pieces of the target per piece of the source",
        "% of pairs",
        tuple(_ratios(curve, colour) for colour, curve in enumerate(curves)),
        log_x=True,
    )
    found = [
        described(
            "lengths", _SECTION, "Length of sentences",
            f"Share of the sentences of each training corpus by length; {_PER_DOUBLING} points for each doubling. "
            f"At most {_MOST_CURVES} corpora, the largest.",
            panels,
        ),
        described(
            "length-ratios", _SECTION, "Ratio of lengths",
            "Share of the pairs of each training corpus by the ratio of their lengths. A second peak, or a high end "
            "of a curve, is a sign of pairs that are not translations of each other.",
            (ratios,),
        ),
    ]  # fmt: skip
    return [figure for figure in found if figure is not None] if curves else []


def _lengths(name: str, colour: int, lengths: NDArray[np.int32]) -> Series:
    """Return the share of sentences in each bin, at the bin's geometric mean."""
    bins = np.round(np.log2(np.maximum(lengths, 1)) * _PER_DOUBLING).astype(np.int64)
    counts = np.bincount(bins)
    first = int(bins.min())
    x = tuple(float(2 ** (n / _PER_DOUBLING)) for n in range(first, len(counts)))
    return Series(name, x, tuple(float(100 * count / len(lengths)) for count in counts[first:]), colour)


def _ratios(curve: LengthCurve, colour: int) -> Series:
    doublings = np.log2(np.maximum(curve.target, 1) / np.maximum(curve.source, 1)).clip(-_WIDEST_FIGURE, _WIDEST_FIGURE)
    bins = np.round((doublings + _WIDEST_FIGURE) / _RATIO_STEP).astype(np.int64)
    counts = np.bincount(bins, minlength=round(2 * _WIDEST_FIGURE / _RATIO_STEP) + 1)
    x = tuple(float(2 ** (n * _RATIO_STEP - _WIDEST_FIGURE)) for n in range(len(counts)))
    return Series(curve.name, x, tuple(float(100 * count / len(bins)) for count in counts), colour)


_MOST_CORPORA = 60  # shown individually
_SAMPLED = 20_000  # pairs of all corpora together whose scripts and languages are examined
_SAMPLED_OF_CORPUS = 500
_MEASURED = 200_000  # pairs of a corpus whose lengths are examined
_CHUNK = 10_000  # pairs decoded at a time


@dataclass(frozen=True)
class DataContent:
    """Everything that a report on a store shows.

    Attributes:
        store: its folder.
        languages: codes of source and target.
        corpora: its corpora, training corpora first; all but the largest are summarised.
        contamination: sentences about held-out sets in training pairs.
        notices: other suspicious findings.
        overlap: overlap of the training pairs with each held-out set, before any are dropped.
        staying: for each set, the number of remaining training pairs with both sides in it, and with at least one.
        figures: figures.
        missing: items that cannot be shown, and why.
        vocabulary: number of ids of source and target; one number if both sides share a vocabulary.
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
    vocabulary: tuple[int, ...]

    @property
    def training(self) -> list[CorpusFacts]:
        """The training corpora."""
        return [corpus for corpus in self.corpora if corpus.split == "train"]


class _Cleaning(JsonForm):
    """Format of CLEANING."""

    train: list[dict[str, list[Annotated[list[str], Field(min_length=2, max_length=2)]]]]


def gather_data(
    store: Store,
    test_set: tuple[str, Sequence[str], Sequence[str]] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> DataContent:
    """Return everything that a report on a store shows.

    Args:
        store: the store.
        test_set: name, sources and references of a test set to compare with the training pairs.
        say: takes messages on steps that take time.

    Raises DataError if a file of the store is damaged.
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
    overlap, staying = _overlaps_in(manifest), _staying(manifest)
    notices = list(manifest["notices"])
    if test_set is not None:
        say(f"comparing {len(store.train):,} training pairs with {test_set[0]}")
        overlap = {**overlap, test_set[0]: (found := _compared(store, *test_set))}
        staying[test_set[0]] = found.staying("keep")  # the store has only the pairs left
        drops = "pairs` (or `sides`)" if found.pairs else "sides`"
        way_out = f"name its files in `data.held_out`, set `data.filters.held_out: {drops}, and prepare again"
        notice = overlap_notice(test_set[0], found, of_pairs=True, way_out=way_out)
        notices += [str(notice)] if notice else []
    joint = any(name.startswith("joint.") for name in store.manifest["files"])
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
        (store.source.size,) if joint else (store.source.size, store.target.size),
    )


def _staying(manifest: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return, by held-out set, how many remaining training pairs have both sides in it, and at least one."""
    found: dict[str, tuple[int, int]] = {}
    for number, entry in enumerate(manifest["corpora"]["train"]):
        for name, overlap in _overlaps_in(entry).items():
            pairs, sides = overlap.staying(_held_out_rule(manifest["config"], number))
            before = found.get(name, (0, 0))
            found[name] = before[0] + pairs, before[1] + sides
    return found


def _examples(store: Store) -> list[dict[str, list[list[str]]]]:
    path = Path(store.path) / CLEANING
    if CLEANING not in store.manifest["files"]:
        return []
    return shaped(parse_json(read_bounded(path), str(path)), _Cleaning, str(path)).train


def _all_facts(
    store: Store, split: str, table: PairTable, examples: Sequence[Mapping[str, Sequence[Sequence[str]]]]
) -> list[CorpusFacts]:
    """Return the facts of the corpora of one split; those beyond the largest share one line."""
    entries = store.manifest["corpora"][split]
    shown = _largest(entries, _MOST_CORPORA) if len(entries) > _MOST_CORPORA + 1 else range(len(entries))
    most = min(_SAMPLED_OF_CORPUS, max(2, _SAMPLED // max(1, len(shown))))
    facts = [_corpus_facts(store, split, table, n, examples[n] if examples else {}, most) for n in sorted(shown)]
    rest = [entry for number, entry in enumerate(entries) if number not in set(shown)]
    return facts + ([_summed_facts(split, rest)] if rest else [])


def _largest(entries: Sequence[Mapping[str, Any]], most: int) -> list[int]:
    """Return the indices of the corpora with the most pairs in the store, largest first."""
    return sorted(range(len(entries)), key=lambda number: -entries[number]["kept"])[:most]


def _curves(store: Store) -> list[LengthCurve]:
    """Return the lengths in the largest training corpora, for at most _MEASURED pairs each."""
    entries, table, found = store.manifest["corpora"]["train"], store.train, []
    for number in _largest(entries, _MOST_CURVES):
        first, last = _corpus_range(table, number)
        chosen = slice(first, last, max(1, -(-(last - first) // _MEASURED)))
        lengths = _sentence_lengths(table, chosen, entries[number]["tag"])
        if last > first:
            found.append(LengthCurve(entries[number]["name"], number, *lengths))
    return found


def _compared(store: Store, name: str, sources: Sequence[str], references: Sequence[str]) -> Overlap:
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


_WIDEST = 14.0
"""_WIDEST is the width (rem) of the longest bar."""
_LISTED = 5  # maximum number of scripts and languages shown per side

REASONS = {
    "empty": "a side with no text",
    "nul": "a side with U+0000",
    "score": "a score of another tool beyond its limits",
    "too_long": "a side with too many characters",
    "too_many_words": "a side with too many words",
    "length_ratio": "sides whose lengths differ too much",
    "identical": "the same text on both sides",
    "control_characters": "control characters",
    "markup": "HTML tags",
    "wrong_script": "letters of another script",
    "urls": "different web addresses on the two sides",
    "emails": "different e-mail addresses on the two sides",
    "numbers": "different numbers on the two sides",
    "punctuation": "different punctuation on the two sides",
    "source_language": "the source is in another language",
    "target_language": "the target is in another language",
    "pair_score": "sides that are probably not translations of each other, by the score learned from the corpora",
    "duplicate": "seen before",
    "near_duplicate": "nearly the same as an earlier pair",
    "held_out": "in a development or test set",
    "too_many_pieces": "a side with too many subword pieces",
}
"""REASONS maps each reason for dropping pairs to its description."""


def data_page(content: DataContent, *, subject: str = "") -> str:
    """Return the page; `subject` as in ziggurat.inspect.report.page.page."""
    environment = page_templates()
    environment.filters |= {"percent": _percent, "shares": _shares}
    totals = sum((Counter(corpus.dropped) for corpus in content.training), Counter[str]())
    read = sum(corpus.read for corpus in content.training)
    return environment.get_template("data.html").render(
        content=content,
        subject=subject,
        read=read,
        kept=sum(corpus.kept for corpus in content.training),
        reasons=[(reason, REASONS.get(reason, ""), count) for reason, count in totals.most_common()],
        width=lambda count: f"{_WIDEST * count / max(totals.values()):.2f}",
        examples=lambda reason: _example_rows(content.training, reason),
        downloads={figure.key: table_link(figure.key, numbers(figure)) for figure in content.figures},
    )


def _example_rows(corpora: list[CorpusFacts], reason: str) -> list[tuple[str, str, str]]:
    """Return corpus, source and target of examples for a reason, alternating between corpora; at most 20."""
    lists = [[(corpus.name, pair[0], pair[1]) for pair in corpus.examples.get(reason, [])] for corpus in corpora]
    turns = [found[turn] for turn in range(max(map(len, lists), default=0)) for found in lists if turn < len(found)]
    return turns[:20]


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %" if 0 < share < 0.01 else f"{100 * share:.1f} %"


def _shares(shares: dict[str, float]) -> str:
    listed = list(shares.items())[:_LISTED]
    text = ", ".join(f"{name} {_percent(share)}" for name, share in listed)
    rest = 1.0 - sum(share for _, share in listed)
    return f"{text}, others {_percent(rest)}" if len(shares) > _LISTED else text or "–"
