"""The facts about each corpus of a store: its counts, and the scripts and languages of a sample of its pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ziggurat.config.languages import main_language
from ziggurat.data.cleaning.held_out import Overlap
from ziggurat.data.cleaning.languages import confidences, identifier, likeliest, scripts
from ziggurat.data.corpus import Store
from ziggurat.data.table import PairTable
from ziggurat.system.small_files import Form, shaped


@dataclass(frozen=True)
class Side:
    """One side of a corpus.

    Attributes:
        language: its code, by the configuration.
        pieces: mean length in subword pieces.
        longest: longest sentence, in subword pieces.
        scripts: share of the letters of the sample in each script, the largest first.
        languages: share of the sampled sentences by the likeliest language; None without py3langid.
        confidence: mean confidence that the sampled sentences are in `language`; None where that is not known.
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
        name, split, tag, weight, read, kept, dropped, repaired, licences: as in the manifest.
        examples: source and target of a few dropped pairs, by reason.
        overlap: what its pairs share with each held-out set, before any is dropped for it.
        held_out: the rule by which such pairs are dropped (`data.filters.held_out`); "" of corpora that are summed up.
        sides: source and target; None of corpora that are summed up, or without a pair.
        sampled: pairs that scripts and languages are of.
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


class _Overlap(Form):
    sentences: int
    found: int
    pairs: int
    sides: int


class _Overlaps(Form):
    held_out: dict[str, _Overlap]


def overlaps_in(entry: Mapping[str, Any]) -> dict[str, Overlap]:
    """Return the overlaps in the manifest or in its entry of a corpus. Raises DataError where they are nonsense."""
    found = shaped({"held_out": entry.get("held_out", {})}, _Overlaps, "manifest: held_out")
    return {name: Overlap(**overlap.model_dump()) for name, overlap in found.held_out.items()}


def held_out_rule(config: Mapping[str, Any], corpus: int) -> str:
    """Return `data.filters.held_out` of a training corpus."""
    own = config["train"][corpus]["filters"] or {}
    return str(own.get("held_out") or config["filters"]["held_out"])


def corpus_range(table: PairTable, corpus: int) -> tuple[int, int]:
    """Return the first pair of a corpus, and the one after its last: corpora follow each other."""
    return int(np.searchsorted(table.corpora, corpus)), int(np.searchsorted(table.corpora, corpus, "right"))


def corpus_facts(
    store: Store, split: str, table: PairTable, number: int, examples: Mapping[str, Any], most: int
) -> CorpusFacts:
    """Return the facts of one corpus."""
    entry, config = store.manifest["corpora"][split][number], store.manifest["config"]
    first, last = corpus_range(table, number)
    places = np.unique(np.linspace(first, max(first, last - 1), min(most, last - first)).astype(np.int64))
    sides = None
    if len(places):
        texts = decoded(store, table, places)
        own = config[split][number]
        codes = [own[f"{side}_language"] or config[f"{side}_language"] for side in ("source", "target")]
        lengths = sentence_lengths(table, slice(first, last), entry["tag"])
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
        overlap=overlaps_in(entry),
        held_out=held_out_rule(config, number) if split == "train" else "",
        sides=sides,
        sampled=len(places),
    )


def sentence_lengths(table: PairTable, chosen: slice, tag: str | None) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the pieces of sources and targets of a corpus; its tag, which is stored with the source, is none of it."""
    source, target = np.array(table.source_lengths[chosen]), np.array(table.target_lengths[chosen])
    return source - (tag is not None), target


def decoded(store: Store, table: PairTable, places: Any) -> tuple[list[str], list[str]]:
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


def summed_facts(split: str, entries: Sequence[Mapping[str, Any]]) -> CorpusFacts:
    """Return a line for the corpora that are not shown one by one."""
    total: dict[str, int] = {}
    for entry in entries:
        for reason, count in entry["dropped"].items():
            total[reason] = total.get(reason, 0) + count
    read, kept, repaired = (sum(entry.get(key, 0) for entry in entries) for key in ("read", "kept", "repaired"))
    name = f"{len(entries):,} smaller corpora"
    return CorpusFacts(name, split, None, None, read, kept, total, repaired, {}, {}, {}, "", None, 0)
