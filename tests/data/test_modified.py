"""Modified pairs in batches: equal in any order and for any number of processes, within the budget, with alignments."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ziggurat.config.data import DataConfig
from ziggurat.config.modifiers import ModifiersConfig
from ziggurat.config.train import BatchConfig
from ziggurat.data.aligner import format_links
from ziggurat.data.babel import generate_aligned
from ziggurat.data.corpus import Store
from ziggurat.data.loader import Batch, Loader, LoaderState
from ziggurat.data.modified import PairModifier
from ziggurat.data.prepare import prepare
from ziggurat.system.errors import DataError

PAIRS = list(generate_aligned(300, 3))
BATCH = BatchConfig(max_tokens=480, accumulate=2, length_multiple=4)
ALL = {
    "merge": {"probability": 0.2},
    "noise": {"probability": 0.05},
    **{name: {"probability": 0.2} for name in ("no_end_punctuation", "upper_case", "title_case", "typos", "prefix")},
    **{name: {"probability": 0.05} for name in ("inline", "terms")},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of two corpora with the alignments from their generation, the second with a tag."""
    folder = tmp_path_factory.mktemp("modified")
    corpora = []
    for number, (pairs, tag) in enumerate(((PAIRS[:200], None), (PAIRS[200:], "<bt>"))):
        stem = f"{folder}/{number}"
        Path(f"{stem}.low").write_text("".join(pair.low + "\n" for pair in pairs))
        Path(f"{stem}.high").write_text("".join(pair.high + "\n" for pair in pairs))
        Path(f"{stem}.align").write_text("".join(format_links(pair.sure) + "\n" for pair in pairs))
        paths = {"source": f"{stem}.low", "target": f"{stem}.high", "alignment": f"{stem}.align"}
        corpora.append({**paths, "tag": tag, "name": f"c{number}"})
    prepare(config(folder, train=corpora))
    return folder


def config(folder: Path, **settings: Any) -> DataConfig:
    section = {"source_language": "qlo", "target_language": "qhi", "store": str(folder / "store")}
    return DataConfig.model_validate({**section, "subword": {"vocabulary_size": 400}, **settings})


def loader(folder: Path, modifiers: dict[str, Any], rank: int = 0, count: int = 1, **settings: Any) -> Loader:
    store = Store.open(folder / "store")
    data = config(folder, modifiers=modifiers, **settings)
    return Loader(store.train, store.source, store.target, BATCH, seed=3, data=data, links=True, rank=rank, count=count)


def modifier(folder: Path, modifiers: dict[str, Any], longest: int = 200) -> tuple[Store, PairModifier]:
    store = Store.open(folder / "store")
    section = ModifiersConfig.model_validate(modifiers)
    tokenizers = store.source, store.target
    return store, PairModifier(section, store.train, tokenizers, ("qlo", "qhi"), seed=3, longest=longest)


def rows(batch: Batch) -> dict[int, tuple[object, ...]]:
    """Return a map from the index of each pair to its ids and links."""
    links: dict[int, list[tuple[int, int]]] = {}
    if batch.link_places is not None:
        places = batch.link_places.numpy()
        depth, width = batch.source.shape[1], batch.target_out.shape[1]
        for row, j, i in zip(places // (depth * width), places // depth % width, places % depth, strict=True):
            links.setdefault(int(row), []).append((int(i), int(j)))
    return {
        int(index): (
            tuple(batch.source[row][batch.source_mask[row]].tolist()),
            tuple(batch.target_out[row][batch.target_mask[row]].tolist()),
            tuple(links.get(row, [])),
        )
        for row, index in enumerate(batch.indices)
    }


def epoch_of(loaders: list[Loader], epoch: int) -> dict[int, tuple[object, ...]]:
    found: dict[int, tuple[object, ...]] = {}
    for one in loaders:
        groups = one.groups(LoaderState(epoch))
        for group in islice(groups, -(-len(one.plan(LoaderState(epoch))) // BATCH.accumulate)):
            for batch in group.batches:
                found |= rows(batch) if batch.target_tokens else {}
        groups.close()  # type: ignore[attr-defined]
    return found


@pytest.mark.slow
def test_a_modified_pair_is_a_function_of_seed_epoch_and_index(folder: Path) -> None:
    one = epoch_of([loader(folder, ALL)], 1)
    assert one == epoch_of([loader(folder, ALL, rank, 3) for rank in range(3)], 1)
    assert len(one) == 300
    # Alone, in any order, and in a batch with others.
    store, pairs = modifier(folder, ALL)
    whole = pairs.modified(np.arange(300), 1, *store.train.pairs(range(300)), store.train.links(range(300)))
    for index in reversed(range(0, 300, 7)):
        sides = store.train.pairs([index])
        single = pairs.modified(np.array([index]), 1, *sides, store.train.links([index]))
        for name in ("sources", "targets", "links"):
            assert (getattr(single, name)[0] == getattr(whole, name)[index]).all()
    plain, later = epoch_of([loader(folder, {})], 1), epoch_of([loader(folder, ALL)], 2)
    changed = [{i for i in plain if found[i][:2] != plain[i][:2]} for found in (one, later)]
    assert 120 < len(changed[0]) < 280
    assert changed[0] != changed[1]
    assert all(one[i] == plain[i] for i in plain.keys() - changed[0])


@pytest.mark.slow
def test_a_resumed_run_sees_the_same_batches(folder: Path) -> None:
    def taken(state: LoaderState, count: int) -> list[tuple[LoaderState, object]]:
        groups = loader(folder, ALL).groups(state)
        found: list[tuple[LoaderState, object]] = [
            (group.state_after, [rows(batch) for batch in group.batches]) for group in islice(groups, count)
        ]
        groups.close()  # type: ignore[attr-defined]
        return found

    whole = taken(LoaderState(), 30)
    for done in (1, 7, 22):
        assert taken(whole[done - 1][0], 30 - done) == whole[done:]


@pytest.mark.slow
def test_batches_keep_their_budget_without_being_split(folder: Path) -> None:
    found = loader(folder, ALL)
    for epoch in range(3):
        for number in range(len(found.plan(LoaderState(epoch)))):
            (batch,) = found.load(LoaderState(epoch, number))
            assert batch.sentences * max(batch.source.shape[1], batch.target_in.shape[1]) <= BATCH.max_tokens


def test_pairs_that_several_modifiers_change_fit_into_the_length_that_is_planned(folder: Path) -> None:
    """Applying a factor twice would plan far too much length; applying it to the wrong share would plan too little."""
    every = {name: {"probability": 1.0} for name in ("no_end_punctuation", "upper_case", "title_case")}
    store, pairs = modifier(folder, every)
    sides = store.train.pairs(range(300))
    found = pairs.modified(np.arange(300), 1, *sides, [])
    assert len(found.texts) >= 265
    assert all(text.isupper() and text[-1].isalnum() for texts in found.texts.values() for text in texts)
    for room, ids in zip(pairs.lengths(1), (found.sources, found.targets), strict=True):
        assert room.sum() < 1.15 * sum(map(len, ids))


@pytest.mark.parametrize("name", ALL)
def test_most_drawn_pairs_fit_into_the_length_that_is_planned(folder: Path, name: str) -> None:
    share = 0.02 if name in ("inline", "terms") else 1.0
    store, pairs = modifier(folder, {name: {"probability": share}})
    sides = store.train.pairs(range(300))
    wanted = {"no_end_punctuation": 300, "typos": 130}.get(name, 265)  # half of the pairs get no kind of error
    if name in ("inline", "terms"):  # words with one partner, that is, almost all words with a link
        links = store.train.links(range(300))
        wanted = int(sum(1 - (1 - share) ** len(of_pair) for of_pair in links) * 0.6)
    for epoch in range(3):
        found = pairs.modified(np.arange(300), epoch, *sides, [])
        assert wanted <= len(found.texts)
        for room, ids, stored in zip(pairs.lengths(epoch), (found.sources, found.targets), sides, strict=True):
            lengths = np.array(list(map(len, ids)))
            assert (lengths <= room).all()
            assert (room >= np.array(list(map(len, stored)))).all()
            assert room.sum() < 2.6 * lengths.sum()  # noise in bytes varies most


def test_a_pair_that_would_get_an_unknown_piece_stays_unchanged(folder: Path, tmp_path: Path) -> None:
    """The vocabulary has no bytes; noise has many scripts, the store one; typing errors are only in the source."""
    data = config(folder, subword={"vocabulary_size": 200, "byte_fallback": False})
    corpora = [{"source": f"{folder}/0.low", "target": f"{folder}/0.high"}]
    prepare(config(tmp_path, subword=data.subword, train=corpora))
    for name in ("noise", "typos"):
        store, pairs = modifier(tmp_path, {name: {"probability": 1.0}})
        stored = store.train.pairs(range(200))
        found = pairs.modified(np.arange(200), 1, *stored, [])
        sides = found.sources, found.targets
        assert not any((ids == store.source.unk).any() for side in sides for ids in side)
        assert 0 < len(found.texts) < 200
        kept = set(range(200)) - found.texts.keys()
        assert all((side[i] == old[i]).all() for side, old in zip(sides, stored, strict=True) for i in kept)


Linked = Counter[tuple[str, str]]


def spelt(store: Store, source: Any, target: Any) -> list[str]:
    """Return the characters of both sides that the ids encode, without blanks."""
    sides = zip((store.source, store.target), (source, target), strict=True)
    return [tokenizer.decode(ids.tolist()).replace(" ", "") for tokenizer, ids in sides]


def linked(store: Store, source: Any, target: Any, links: Any) -> Linked:
    """Return the linked texts, found by counting the characters that the ids encode."""
    low, high = spelt(store, source, target)
    return Counter((low[a:b], high[c:d]) for a, b, c, d in links.tolist())


def folded(links: Linked) -> Linked:
    return Counter((low.casefold(), high.casefold()) for low, high in links.elements())


def check_linked(name: str, before: Linked, after: Linked) -> None:
    """Compare the linked texts of a pair before and after a modifier."""
    if name in ("upper_case", "title_case"):
        assert folded(after) == folded(before)
    elif name == "no_end_punctuation":
        assert before - after in (Counter(), {(".", "."): 1}, {("?", "?"): 1}, {("!", "!"): 1})
        assert not after - before
    elif name == "noise":
        assert all(low == high for low, high in after)
    elif name == "merge":
        assert not before - after
    elif name == "typos":  # a word may lose its last letter and its links, or absorb its neighbour
        highs = [Counter(high for _, high in links.elements()) for links in (after, before)]
        assert not highs[0] - highs[1]
        assert sum((highs[1] - highs[0]).values()) <= max(Counter(low for low, _ in before.elements()).values())
    else:
        assert not before - after
        assert all(low == high for low, high in after - before)


@pytest.mark.parametrize("name", ALL)
def test_links_join_the_same_words(folder: Path, name: str) -> None:
    check_links(folder, name, epochs=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_links_of_a_million_pairs_join_the_same_words(folder: Path, name: str) -> None:
    check_links(folder, name, epochs=1_000_000 // 300 + 1)


def check_links(folder: Path, name: str, epochs: int) -> None:
    """Modify all pairs of the store, which has the generator's links, and check which words the links join."""
    store, pairs = modifier(folder, {name: {"probability": 0.3 if name in ("inline", "terms") else 1.0}})
    indices = np.arange(300)
    sides, links = store.train.pairs(indices), store.train.links(indices)
    before = [linked(store, *pair) for pair in zip(*sides, links, strict=True)]
    for epoch in range(epochs):
        found = pairs.modified(indices, epoch, *sides, links)
        for index, texts in found.texts.items():
            ids = found.sources[index], found.targets[index]
            assert spelt(store, *ids) == [text.replace(" ", "") for text in texts]
            check_linked(name, before[index], linked(store, *ids, found.links[index]))


def test_merged_pairs_are_of_one_corpus_and_short(folder: Path) -> None:
    store, pairs = modifier(folder, {"merge": {"probability": 1.0, "max_pieces": 60, "max_pairs": 3}})
    indices = np.arange(300)
    found = pairs.modified(indices, 0, *store.train.pairs(indices), [])
    stored = {(pair.low, pair.high): index for index, pair in enumerate(PAIRS)}
    assert len(found.texts) > 100
    for index, (source, target) in found.texts.items():
        parts = [index for (low, high), index in stored.items() if low in source and high in target]
        assert {part >= 200 for part in parts} == {index >= 200}
        assert source.startswith(PAIRS[index].low)
        assert target.startswith(PAIRS[index].high)
        assert len(found.targets[index]) <= 60 >= len(found.sources[index])
        assert (found.sources[index][0] in store.source.tags.values()) == (index >= 200)


@pytest.mark.slow
def test_the_probability_is_the_share_of_pairs(folder: Path) -> None:
    store, pairs = modifier(folder, {"upper_case": {"probability": 0.1}, "title_case": {"probability": 0.3}})
    counts: Counter[str] = Counter()
    for epoch in range(60):
        found = pairs.modified(np.arange(300), epoch, *store.train.pairs(range(300)), [])
        for source, _ in found.texts.values():
            counts["upper" if source.isupper() else "title"] += 1
    assert abs(counts["upper"] / 18_000 - 0.1) < 0.012
    assert abs(counts["title"] / 18_000 - 0.3 * 0.9) < 0.02


def test_sampled_segmentations_are_of_modified_text(tmp_path: Path, folder: Path) -> None:
    corpora = [{"source": f"{folder}/0.low", "target": f"{folder}/0.high"}]
    subword = {"vocabulary_size": 400, "regularisation": {"alpha": 0.3, "target": True}}
    prepare(config(tmp_path, train=corpora, subword=subword))
    store = Store.open(tmp_path / "store")
    data = config(tmp_path, subword=subword, modifiers={"upper_case": {"probability": 0.5}})
    found = Loader(store.train, store.source, store.target, BATCH, seed=3, data=data)
    capitals = 0
    for number in range(len(found.plan(LoaderState()))):
        for batch in found.load(LoaderState(0, number)):
            for index, (source, target, _) in rows(batch).items():
                texts = store.source.decode(source), store.target.decode(target)  # type: ignore[arg-type]
                assert [text.casefold() for text in texts] == [text.casefold() for text in PAIRS[index][:2]]
                capitals += texts[0].isupper()
    assert 60 < capitals < 140


def test_modifiers_that_need_alignments_say_so(tmp_path: Path, folder: Path) -> None:
    prepare(config(tmp_path, train=[{"source": f"{folder}/0.low", "target": f"{folder}/0.high"}]))
    with pytest.raises(DataError, match=r"data\.modifiers\.terms.*data\.alignment\.compute=hmm"):
        modifier(tmp_path, {"terms": {"probability": 0.1}})


def test_marks_can_be_separate_pieces(tmp_path: Path, folder: Path) -> None:
    corpora = [
        {name: f"{folder}/0.{end}" for name, end in (("source", "low"), ("target", "high"), ("alignment", "align"))}
    ]
    marks = ["__source__", "__target__", "__done__", "<>"]
    prepare(config(tmp_path, train=corpora, subword={"vocabulary_size": 400, "symbols": [*marks, "<>"]}))
    store, pairs = modifier(tmp_path, {"terms": {"probability": 0.3}})
    text = "Su __source__ ma __target__ tho__done__ <>"
    ids = store.source.encode([text])[0]
    pieces = store.source.pieces(ids)
    assert store.source.decode(ids) == text
    assert [piece for piece in pieces if piece in marks] == marks
    found = pairs.modified(np.arange(200), 0, *store.train.pairs(range(200)), [])
    assert len(found.texts) > 100
    for row, (source, _) in found.texts.items():
        pieces = store.source.pieces(found.sources[row].tolist())
        assert pieces.count("__target__") == source.count("__target__") > 0
    with pytest.raises(ValueError, match="`symbols` needs a model to train"):
        config(tmp_path, subword={"kind": "vocabulary", "source_vocabulary": "x", "symbols": ["<>"]})


def test_other_pairs_are_drawn_in_every_epoch(folder: Path) -> None:
    store, pairs = modifier(folder, {"upper_case": {"probability": 0.3}})
    drawn = [pairs.modified(np.arange(300), epoch, *store.train.pairs(range(300)), []).texts for epoch in range(3)]
    for one, other in ((0, 1), (1, 2), (0, 2)):
        assert 10 < len(drawn[one].keys() & drawn[other].keys()) < 45  # 27 of 90 by chance


@pytest.mark.parametrize(("least", "most"), [(2, 4), (3, 3), (3, 4)])
def test_the_given_share_of_pairs_is_merged(folder: Path, least: int, most: int) -> None:
    section = {"probability": 1.0, "min_pairs": least, "max_pairs": most, "max_pieces": 1000}
    _, pairs = modifier(folder, {"merge": section}, longest=1000)
    merged = 1 + (pairs._partners(np.arange(300), 0) >= 0).sum(axis=1)
    assert set(merged.tolist()) == set(range(least, most + 1))
