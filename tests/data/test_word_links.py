"""Word alignments on their way into a store: from files, from the aligner, faulty, filtered, or missing."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ziggurat.config.data import DataConfig
from ziggurat.config.train import BatchConfig
from ziggurat.data.aligner import Aligner, Link, format_links, split_words
from ziggurat.data.babel import AlignedPair, generate_aligned
from ziggurat.data.corpus import Store
from ziggurat.data.loader import Batch, Loader, LoaderState, fixed_batches
from ziggurat.data.prepare import PrepareReport, prepare
from ziggurat.data.store_checks import other_files, unlike_store
from ziggurat.data.word_links import spread_pairs
from ziggurat.system.errors import ConfigError, DataError
from ziggurat.system.files import MANIFEST

PAIRS = list(generate_aligned(240, 3))


class Corpora:
    """A folder with two training corpora, the second with a tag and, unless given, without alignments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings: dict[str, Any] = {
            **{"source_language": "qlo", "target_language": "qhi", "store": str(folder / "store"), "dev": []},
            **{"train": [], "subword": {"vocabulary_size": 330}},
        }

    def add(self, pairs: list[AlignedPair], links: list[str] | None = None, **options: Any) -> None:
        stem = self.folder / f"corpus{len(self.settings['train'])}"
        corpus = {"source": f"{stem}.low", "target": f"{stem}.high", **options}
        Path(corpus["source"]).write_text("".join(pair.low + "\n" for pair in pairs))
        Path(corpus["target"]).write_text("".join(pair.high + "\n" for pair in pairs))
        if links is not None:
            corpus["alignment"] = f"{stem}.align"
            Path(corpus["alignment"]).write_text("".join(line + "\n" for line in links))
        self.settings["train"].append(corpus)

    def config(self) -> DataConfig:
        return DataConfig.model_validate(self.settings)

    def prepare(self, **options: Any) -> PrepareReport:
        return prepare(self.config(), **options)

    def store(self) -> Store:
        return Store.open(self.settings["store"])


def sure(pairs: list[AlignedPair]) -> list[str]:
    return [format_links(pair.sure) for pair in pairs]


@pytest.fixture
def corpora(tmp_path: Path) -> Corpora:
    return Corpora(tmp_path)


def piece_words(store: Store, side: int, ids: np.ndarray[Any, Any]) -> list[int]:
    """Return the word of each piece, for text whose pieces never span words: by the letters, from left to right."""
    tokenizer = (store.source, store.target)[side]
    words = split_words(tokenizer.decode(ids.tolist()), "split")
    ends = np.cumsum([len(word) for word in words]).tolist()
    found, at = [], 0
    for piece in tokenizer.pieces(ids.tolist()):
        if piece in tokenizer.tags:
            found.append(-1)
            continue
        bare = piece.replace("\u2581", "")
        number = next(n for n, end in enumerate(ends) if at < end)
        assert at + len(bare) <= ends[number], "a piece of two words: this reference cannot tell"
        found.append(number)
        at += len(bare)
    return found


def linked_words(store: Store, epochs: range = range(1), **options: Any) -> dict[int, set[Link]]:
    """Return a map from the index of each pair to links between its words, from the batches of some epochs."""
    loader = Loader(store.train, store.source, store.target, BatchConfig(max_tokens=300), seed=1, links=True, **options)
    plans = ((epoch, range(len(loader.plan(LoaderState(epoch))))) for epoch in epochs)
    places = (LoaderState(epoch, number) for epoch, numbers in plans for number in numbers)
    return words_of_batches(store, chain.from_iterable(map(loader.load, places)))


def words_of_batches(store: Store, batches: Iterable[Batch]) -> dict[int, set[Link]]:
    """Return a map from the index of each pair to links between its words."""
    found: dict[int, set[Link]] = {}
    for batch in batches:
        rows, width, depth = batch.target_out.shape[0], batch.target_out.shape[1], batch.source.shape[1]
        weights = np.zeros((rows, width, depth))
        if batch.link_places is not None and batch.link_shares is not None:
            weights.reshape(-1)[batch.link_places.numpy()] = batch.link_shares.numpy()
        sums = weights.sum(2)
        assert np.isclose(sums[sums > 0], 1, atol=1e-6).all()
        for row, index in enumerate(batch.indices.tolist()):
            sides = [
                piece_words(store, side, ids[row][mask[row]].numpy()[:-1])
                for side, (ids, mask) in enumerate(
                    ((batch.source, batch.source_mask), (batch.target_out, batch.target_mask))
                )
            ]
            cells = {(int(s), int(t)) for t, s in zip(*weights[row].nonzero(), strict=True)}
            found[index] = {(sides[0][s], sides[1][t]) for s, t in cells}
            # All pieces of both words are linked, not only some.
            whole = {(s, t) for s, i in enumerate(sides[0]) for t, j in enumerate(sides[1]) if (i, j) in found[index]}
            assert cells == whole
    return found


@pytest.mark.slow
def test_links_stay_with_their_pairs_through_filters_tags_and_weights(corpora: Corpora) -> None:
    first, second, third = PAIRS[:100], PAIRS[100:160], PAIRS[160:]
    first = [first[0]._replace(low=""), *first[1:60], first[1], *first[60:]]  # dropped: empty, and a duplicate
    blank = min(first[2:60], key=lambda pair: len(pair.low))
    corpora.add(first, ["" if pair in (first[0], blank) else format_links(pair.sure) for pair in first])
    corpora.add(second, None, tag="<bt>", weight=2.0)
    corpora.add(third[::-1], sure(third[::-1]), tag="<x>")
    corpora.settings["filters"] = {"duplicates": True, "max_pieces": 45}
    report = corpora.prepare()
    assert all(corpus.kept and sum(corpus.dropped.values()) for corpus in report.corpora)
    store = corpora.store()
    sources, targets = store.train.pairs(np.arange(len(store.train)))
    found = linked_words(store, epochs=range(6))  # with this weight, a pair is not drawn in every epoch
    assert len(found) > 0.9 * len(store.train)
    texts = {(pair.low, pair.high): pair.sure for pair in PAIRS}
    assert [corpus.aligned for corpus in report.corpora] == [report.corpora[0].kept - 1, 0, report.corpora[2].kept]
    for index, (source, target) in enumerate(zip(sources, targets, strict=True)):
        pair = store.source.decode(source.tolist()), store.target.decode(target.tolist())
        without = store.train.corpora[index] == 1 or pair == (blank.low, blank.high)
        expected = set() if without else texts[pair]
        assert found.get(index, expected) == expected


def test_links_follow_sampled_segmentations(corpora: Corpora) -> None:
    corpora.add(PAIRS, sure(PAIRS))
    corpora.settings["subword"]["regularisation"] = {"target": True, "alpha": 0.4}
    corpora.prepare()
    found = linked_words(corpora.store(), data=corpora.config())
    assert found == {number: pair.sure for number, pair in enumerate(PAIRS)}


@pytest.mark.slow
def test_the_aligner_of_prepare_is_that_of_align(corpora: Corpora) -> None:
    corpora.add(PAIRS[:200])
    corpora.add(PAIRS[200:], sure(PAIRS[200:]))
    corpora.settings["alignment"] = {"compute": "hmm", "symmetrise": "intersection"}
    report = corpora.prepare()
    assert corpora.prepare().reused
    texts = [[pair[side] for pair in PAIRS[:200]] for side in (0, 1)]
    links = Aligner.train(zip(*texts, strict=True)).align(texts[0], texts[1], "intersection")
    found = linked_words(corpora.store())
    assert [found[n] for n in range(240)] == [*links, *(pair.sure for pair in PAIRS[200:])]
    assert [corpus.aligned for corpus in report.corpora] == [sum(map(bool, links)), 40]


def test_segmented_text_has_alignments_of_its_words(corpora: Corpora) -> None:
    vocabulary = corpora.folder / "words"
    vocabulary.write_text("a@@\nb\nc\n")
    corpora.settings["subword"] = {"kind": "vocabulary", "source_vocabulary": str(vocabulary)}
    corpora.add([AlignedPair("a@@ b zz", "c a@@ a@@ b", set(), set())], ["0-1 1-0"])
    corpora.prepare()
    assert corpora.store().train.links([0])[0].tolist() == [[0, 2, 1, 4], [2, 3, 0, 1]]


def test_compressed_and_several_files_are_read_in_order(corpora: Corpora) -> None:
    halves = PAIRS[:30], PAIRS[30:70]
    for number, half in enumerate(halves):
        for suffix, lines in (
            ("low", [pair.low for pair in half]),
            ("high", [pair.high for pair in half]),
            ("align.gz", sure(half)),
        ):
            content = "".join(line + "\n" for line in lines).encode()
            path = corpora.folder / f"part{number}.{suffix}"
            path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    stem = f"{corpora.folder}/part*."
    corpora.settings["train"] = [{"source": stem + "low", "target": stem + "high", "alignment": stem + "align.gz"}]
    corpora.prepare()
    assert linked_words(corpora.store()) == {number: pair.sure for number, pair in enumerate(PAIRS[:70])}
    (corpora.folder / "part1.align.gz").unlink()
    with pytest.raises(DataError, match="matches 1 files, but the corpus has 2"):
        corpora.prepare(force=True)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("0-0 40-0", r"align, line 18: the link 40-0 names source word 40, but the source has \d+"),
        ("0-99", r"align, line 18: the link 0-99 names target word 99"),
        ("0:0", "align, line 18: not a word alignment: 0:0;"),
        (None, "align has 39 lines of word alignments, but .*low and .*high has 40 pairs"),
        ("0-0\n" * 23, "align has 41 lines of word alignments, but .* has 40 pairs"),
    ],
    ids=["source", "target", "form", "too few", "too many"],
)
def test_faulty_alignments_are_refused_before_anything_is_made(
    corpora: Corpora, line: str | None, complaint: str
) -> None:
    links = sure(PAIRS[:40])
    links[17:18] = [] if line is None else [line]
    if line is not None and "\n" in line:  # everything after it is one line late
        links[18:] = []
    corpora.add(PAIRS[:40], links)
    with pytest.raises(DataError, match=complaint):
        corpora.prepare()
    assert not (corpora.folder / "store").exists()


def test_development_text_has_its_own_alignments(corpora: Corpora) -> None:
    corpora.add(PAIRS[:200], sure(PAIRS[:200]))
    corpora.add(PAIRS[200:], sure(PAIRS[200:]))
    corpora.settings["dev"] = [corpora.settings["train"].pop()]
    report = corpora.prepare()
    assert [corpus.aligned for corpus in report.corpora] == [200, 40]
    store = corpora.store()
    assert store.dev is not None
    loaded = fixed_batches(store.dev, store.source, store.target, BatchConfig(max_tokens=300), links=True)
    assert words_of_batches(store, loaded) == {number: pair.sure for number, pair in enumerate(PAIRS[200:])}
    del corpora.settings["dev"][0]["alignment"]
    assert [corpus.aligned for corpus in corpora.prepare(force=True).corpora] == [200, None]
    store = corpora.store()
    assert store.dev is not None
    assert (store.train.has_links, store.dev.has_links) == (True, False)


@pytest.mark.slow
def test_development_text_is_aligned_by_the_model_of_training_text(corpora: Corpora) -> None:
    corpora.add(PAIRS[:200], sure(PAIRS[:200]))
    corpora.add(PAIRS[200:])
    corpora.settings |= {"dev": [corpora.settings["train"].pop()], "alignment": {"compute": "hmm"}}
    corpora.prepare()
    store = corpora.store()
    assert store.dev is not None
    loaded = fixed_batches(store.dev, store.source, store.target, BatchConfig(max_tokens=300), links=True)
    texts = [[pair[side] for pair in PAIRS] for side in (0, 1)]
    aligner = Aligner.train(zip(*(side[:200] for side in texts), strict=True))
    links = aligner.align(*(side[200:] for side in texts))
    assert words_of_batches(store, loaded) == dict(enumerate(links))


def test_different_alignments_make_a_different_store(corpora: Corpora) -> None:
    corpora.add(PAIRS, sure(PAIRS))
    corpora.prepare()
    manifest = json.loads((corpora.folder / "store" / MANIFEST).read_text())
    assert manifest["tables"]["train"]["has_links"]
    assert corpora.prepare().reused
    # Different alignments make a different store; a moved file does not.
    path = Path(corpora.settings["train"][0]["alignment"])
    corpora.settings["train"][0]["alignment"] = str(path.rename(path.with_name("moved")))
    assert corpora.prepare().reused
    path.with_name("moved").write_text("\n" * len(PAIRS))
    with pytest.raises(DataError, match="prepared from other settings or files"):
        corpora.prepare()
    del corpora.settings["train"][0]["alignment"]
    with pytest.raises(DataError, match="prepared from other settings or files"):
        corpora.prepare()


def test_a_store_without_alignments_does_not_mention_them(corpora: Corpora) -> None:
    corpora.add(PAIRS)
    corpora.prepare()
    manifest = json.loads((corpora.folder / "store" / MANIFEST).read_text())
    assert "has_links" not in manifest["tables"]["train"]
    assert "aligned" not in manifest["corpora"]["train"][0]
    # The aligner's settings have no effect then: others do not make a different store.
    assert "alignment" not in manifest["prepared_from"]
    assert not corpora.store().train.has_links


def test_a_store_with_another_aligner_is_different(corpora: Corpora) -> None:
    corpora.add(PAIRS[:120], sure(PAIRS[:120]))
    corpora.add(PAIRS[120:])
    corpora.prepare()
    manifest = corpora.store().manifest

    def unlike(**changes: Any) -> list[str]:
        return unlike_store(DataConfig.model_validate({**corpora.settings, **changes}), manifest)

    first, second = corpora.settings["train"]
    assert unlike() == unlike(train=[], alignment={"compute": "hmm"}) == []
    both = [first, {**second, "alignment": first["alignment"]}]
    assert unlike(train=both) == ["data.train.1.alignment (false -> true)"]
    assert unlike(alignment={"compute": "hmm"}) == ['data.alignment.compute ("none" -> "hmm")']
    moved = DataConfig.model_validate({**corpora.settings, "train": [{**first, "alignment": "elsewhere"}, second]})
    assert unlike_store(moved, manifest) == []
    assert [name.split(" ")[0] for name in other_files(moved, manifest)] == ["data.train.0.alignment"]


def test_invalid_links_are_damage(corpora: Corpora, monkeypatch: pytest.MonkeyPatch) -> None:
    corpora.add(PAIRS[:20], sure(PAIRS[:20]))
    corpora.prepare()
    for numbers in ([1, 2, 3], [2, 1, 0, 1], [-1, 1, 0, 1]):
        table = corpora.store().train
        batch, _ = table.shards[0].locate(0)
        wrong = np.array([0, len(numbers)]), np.array(numbers, np.int32)
        monkeypatch.setitem(batch.__dict__, "_links", wrong)
        with pytest.raises(DataError, match=r"damaged .*an impossible word alignment"):
            table.links([0])


@pytest.mark.parametrize(("total", "most"), [(10, 3), (10, 10), (10, 20), (7, 1), (1, 1)])
def test_a_sample_is_even(total: int, most: int) -> None:
    blocks = [([str(n)], [str(n)]) for n in range(total)]
    found = [int(source) for source, _ in spread_pairs(iter(blocks), total, most)]
    assert len(found) == min(total, most)
    assert found[0] == 0
    gaps = np.diff(found)
    assert not len(gaps) or gaps.max() - gaps.min() <= 1


def test_missing_training_text_for_an_aligner_is_reported(corpora: Corpora) -> None:
    corpora.add([AlignedPair("a b " * 150, "x", set(), set())])
    corpora.settings |= {"alignment": {"compute": "hmm"}, "filters": {"max_pieces": None}}
    corpora.settings["subword"] = {"vocabulary_size": 270}
    with pytest.raises((DataError, ConfigError), match="no pair to train an aligner on"):
        corpora.prepare()
    assert not (corpora.folder / "store").exists()


def test_alignments_in_a_column_of_the_corpus_itself(corpora: Corpora) -> None:
    path = corpora.folder / "all.tsv"
    path.write_text("".join(f"{pair.low}\t{pair.high}\t{format_links(pair.sure)}\n" for pair in PAIRS))
    own = {"path": str(path), "alignment": str(path), "alignment_column": 2}
    corpora.settings["train"] = [own]
    assert corpora.prepare().corpora[0].aligned == len(PAIRS)
    assert linked_words(corpora.store()) == {index: set(pair.sure) for index, pair in enumerate(PAIRS)}
    corpora.settings |= {"train": [{**own, "alignment_column": 3}], "store": str(corpora.folder / "other")}
    with pytest.raises(DataError, match=r"all\.tsv, line 1: 3 columns, but column 3 \(from 0\) is the alignment"):
        corpora.prepare()
    with pytest.raises(ValueError, match="`alignment_column` needs `alignment`"):
        DataConfig.model_validate({**corpora.settings, "train": [{"path": str(path), "alignment_column": 2}]})
