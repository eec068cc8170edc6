"""Cleaning by `prepare`: every filter alone and per corpus, examples, held-out sets, and the same store every time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.killing import tree
from ziggurat.config.data import DataConfig
from ziggurat.data.babel import generate
from ziggurat.data.cleaning.cleaner import Examples
from ziggurat.data.corpus import Store
from ziggurat.data.prepare import CLEANING, PrepareReport, prepare
from ziggurat.system.errors import ConfigError, DataError

Pairs = list[tuple[str, str]]
GERMAN = ["Der Hund schläft vor der Tür.", "Am Fluss steht ein altes Haus.", "Wir gehen morgen in die Stadt."]
ENGLISH = ["The dog sleeps at the door.", "There is an old house near the river.", "Tomorrow we go to town."]
FRENCH = ["Le chien dort devant la porte.", "Il y a une vieille maison près du fleuve.", "Demain nous allons en ville."]


class Corpora:
    """A folder with corpora and their configuration."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.store = folder, folder / "store"
        self.settings: dict[str, Any] = {
            "source_language": "de", "target_language": "en", "store": str(self.store),
            "train": [], "dev": [], "subword": {"vocabulary_size": 300, "byte_fallback": False}, **settings,
        }  # fmt: skip

    def add(self, split: str, pairs: Pairs, **options: Any) -> None:
        stem = self.folder / f"{split}{len(self.settings[split])}"
        for number, side in enumerate(("de", "en")):
            Path(f"{stem}.{side}").write_text("".join(f"{pair[number]}\n" for pair in pairs), "utf-8")
        self.settings[split].append({"source": f"{stem}.de", "target": f"{stem}.en", **options})

    def prepare(self, **options: Any) -> PrepareReport:
        return prepare(DataConfig.model_validate(self.settings), **options)

    def examples(self) -> Any:
        return json.loads((self.store / CLEANING).read_text("utf-8"))["train"]

    def texts(self) -> Pairs:
        opened = Store.open(self.store)
        sides = opened.train.pairs(range(len(opened.train)))
        decoded = (
            [tokenizer.decode(ids.tolist()) for ids in side]
            for tokenizer, side in zip((opened.source, opened.target), sides, strict=True)
        )
        return list(zip(*decoded, strict=True))


@pytest.fixture
def corpora(tmp_path: Path) -> Corpora:
    return Corpora(tmp_path / "project")


def babel(count: int, seed: int = 1) -> Pairs:
    return [(pair[0], pair[1]) for pair in generate(count, seed=seed)]


def test_each_filter_drops_and_shows_what_it_dropped(corpora: Corpora) -> None:
    right = list(zip(GERMAN, ENGLISH, strict=True))
    wrong = {
        "target_language": (GERMAN[0], FRENCH[0]),
        "source_language": (FRENCH[1], ENGLISH[1]),
        "numbers": ("Im Jahr 1994 schlief der Hund.", "The dog slept in the year 1993."),
        "punctuation": ("Schläft der Hund? Steht das Haus?", "The dog sleeps. The house is there."),
        "urls": ("Das Haus steht auf www.haus.de im Netz.", "The house is on the net."),
        "emails": ("Der Hund heißt hund@haus.de im Netz.", "The dog has another name there."),
        "near_duplicate": (GERMAN[1] + "..", ENGLISH[1] + "!"),
        "duplicate": right[2],
    }
    corpora.add("train", [*right, *wrong.values()])
    corpora.settings["filters"] = {
        "languages": {}, "duplicates": True, "near_duplicates": {"memory": 1},
        "agreement": {"numbers": 0.5, "punctuation": 3, "urls": True, "emails": True},
    }  # fmt: skip
    report = corpora.prepare()
    assert report.dropped == dict.fromkeys(wrong, 1)
    assert corpora.texts() == right
    assert corpora.examples() == [{reason: [list(pair)] for reason, pair in sorted(wrong.items())}]


def test_filters_of_a_corpus_replace_those_of_all_corpora(corpora: Corpora) -> None:
    pairs = [("Der Hund", "The dog sleeps at the door"), ("Haus", "Haus"), ("Der Hund", "The dog sleeps at the door")]
    corpora.add("train", pairs)
    corpora.add("train", pairs, filters={"identical": False, "max_length_ratio": None, "duplicates": False})
    corpora.add("train", pairs, filters={"max_length_ratio": 20, "agreement": {"urls": True}})
    corpora.settings["filters"] = {
        "identical": True, "max_length_ratio": 2, "duplicates": True, "agreement": {"numbers": 0.5}
    }  # fmt: skip
    report = corpora.prepare()
    found = [corpus.dropped for corpus in report.corpora]
    assert found == [{"length_ratio": 2, "identical": 1}, {}, {"identical": 1, "duplicate": 1}]
    config = DataConfig.model_validate(corpora.settings)
    third = config.filters_of(config.train[2])
    assert (third.agreement.numbers, third.agreement.urls, third.max_characters) == (0.5, True, 4000)


def test_limits_by_corpus_also_after_segmentation(corpora: Corpora) -> None:
    long = " ".join(str(n * 7919) for n in range(40))
    pairs = [(long, "x"), (GERMAN[0], ENGLISH[0])]
    corpora.add("train", pairs)
    corpora.add("train", pairs, filters={"max_pieces": 250})
    corpora.settings["filters"] = {"max_pieces": 30}
    assert [corpus.dropped for corpus in corpora.prepare().corpora] == [{"too_many_pieces": 1}, {}]
    assert corpora.examples()[0] == {"too_many_pieces": [[long, "x"]]}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train": [{"filters": {"max_lenght_ratio": 3}}]}, r"train\.0\.filters\.max_lenght_ratio"),
        ({"train": [{}, {"filters": {"languages": {"source": 2}}}]}, r"train\.1\.filters\.languages\.source"),
        (
            {"train": [{"filters": {"near_duplicates": {"memory": 1}}}, {"filters": {"near_duplicates": {}}}]},
            r"`filters\.near_duplicates` is shared by all corpora: set it only in `data\.filters`",
        ),
        (
            {"train": [{"filters": {"pair_score": {"pairs": n}}} for n in (100, 200)]},
            r"`filters\.pair_score\.pairs` is shared by all corpora",
        ),
        ({"train": [{}], "dev": [{"filters": {"identical": True}}]}, r"dev\.0\.filters.*development corpora are not"),
        ({"train": [{}], "dev": [{"scores": [{"path": "a", "min": 0}]}]}, r"dev\.0\.scores.*are not filtered"),
        ({"train": [{"scores": [{"path": "a"}]}]}, r"give `min` or `max`, or both"),
        ({"train": [{"scores": [{"min": 1}]}]}, r"give `path`, a file with the scores, or `column`"),
    ],
)
def test_impossible_filters_are_refused(settings: dict[str, Any], message: str) -> None:
    for corpus in [*settings["train"], *settings.get("dev", [])]:
        corpus.update(source="a", target="b")
    with pytest.raises(ValidationError, match=message):
        DataConfig.model_validate({"source_language": "de", "target_language": "en", "store": "s", **settings})


def test_development_sentences_in_training_pairs_are_named(corpora: Corpora, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ziggurat.data.readers.BLOCK_PAIRS", 90)
    train, dev = babel(300), babel(40, seed=2)
    planted = [*train[:100], dev[3], *train[100:], (dev[4][0].upper(), dev[4][1] + " !"), (dev[5][0], train[7][1])]
    corpora.add("train", planted)
    corpora.add("train", [dev[3], dev[6]], name="more")
    corpora.add("dev", dev)
    lines = "".join(f"{line}\n" for line in (train[0][0], train[1][1], "anders", dev[0][1]))
    (corpora.folder / "test.txt").write_text(lines, "utf-8")
    corpora.settings["held_out"] = [str(corpora.folder / "test.txt")]
    report = corpora.prepare()
    dev_notice, test_notice = (notice for notice in report.notices if notice.startswith("CONTAMINATION: "))
    # Dev has 80 sentences as sources and targets; train has both sides of three of its pairs and one side of another.
    assert "7 of 80 sentences of data.dev.0 (dev0.de), sources and targets together, are in training pai" in dev_notice
    assert "both sides of 4 pairs, and at least one side of 5" in dev_notice
    assert dev_notice.endswith("seem to: `data.filters.held_out: pairs` drops the 4, `sides` all 5")
    assert f"2 of 4 sentences of {corpora.folder / 'test.txt'} are in training pairs" in test_notice
    assert "both sides of 0 pairs, and at least one side of 2" in test_notice
    assert test_notice.endswith("seem to: `data.filters.held_out: sides` drops such pairs")
    assert report.kept == len(planted) + 2
    manifest = Store.open(corpora.store).manifest
    by_corpus = [entry["held_out"]["data.dev.0 (dev0.de)"] for entry in manifest["corpora"]["train"]]
    assert [(found["found"], found["pairs"], found["sides"]) for found in by_corpus] == [(5, 2, 3), (2, 2, 2)]
    assert corpora.prepare().notices == report.notices, "also where the store is reused"


@pytest.mark.parametrize(("how", "left"), [("pairs", 2), ("sides", 1), ("keep", 3)])
def test_held_out_pairs_can_be_dropped(corpora: Corpora, how: str, left: int) -> None:
    pairs = list(zip(GERMAN, ENGLISH, strict=True))
    corpora.add("train", [pairs[0], (GERMAN[1], "There was an old house."), ("Wir gehen in die Stadt.", ENGLISH[1])])
    corpora.add("dev", [(GERMAN[0].lower(), ENGLISH[0]), (GERMAN[1], "x")])
    corpora.settings["filters"] = {"held_out": how}
    report = corpora.prepare()
    assert report.kept == left
    assert report.dropped == ({} if how == "keep" else {"held_out": 3 - left})
    messages = " ".join(report.notices)
    of_set = "4 sentences of data.dev.0 (dev0.de), sources and targets together,"
    assert (f"3 of {of_set} are in training pairs" in messages) == (how == "keep")
    left = f"CONTAMINATION: 1 training pairs have one side among the {of_set} and stay"
    assert (left in messages) == (how == "pairs")
    assert ("CONTAMINATION" in messages) == (how != "sides")


@pytest.mark.parametrize("languages", [("en", "de"), ("de", "en"), ("en-GB", "deu")])
@pytest.mark.parametrize(("how", "dropped"), [("keep", 0), ("pairs", 60), ("sides", 70)])
def test_held_out_pairs_are_found_in_the_other_direction(
    corpora: Corpora, languages: tuple[str, str], how: str, dropped: int
) -> None:
    """It holds whether or not the corpus is marked as the other direction, as in a file for one language pair."""
    dev, other = babel(100, seed=2), babel(10, seed=3)
    whole = [*dev[:30], *((source.upper(), f"{target} !") for source, target in dev[30:60])]
    one = [*((source, other[0][1]) for source, _ in dev[60:65]), *((other[1][0], target) for _, target in dev[65:70])]
    corpora.add("train", babel(50))
    exchanged = [(target, source) for source, target in [*whole, *one, *other]]
    corpora.add("train", exchanged, source_language=languages[0], target_language=languages[1])
    corpora.add("dev", dev)
    corpora.settings["filters"] = {"held_out": how}
    report = corpora.prepare()
    assert report.dropped.get("held_out", 0) == dropped
    (found,) = Store.open(corpora.store).manifest["held_out"].values()
    assert found == {"sentences": 200, "found": 130, "pairs": 60, "sides": 70}
    assert any(notice.startswith("CONTAMINATION") for notice in report.notices) == (how != "sides")


def test_a_few_common_sentences_are_not_contamination(corpora: Corpora) -> None:
    dev = babel(200, seed=2)
    corpora.add("train", [*babel(50), (dev[0][0], "kein"), (dev[1][0], "nein")])
    corpora.add("dev", dev)
    report = corpora.prepare()
    assert report.notices == []
    (entry,) = Store.open(corpora.store).manifest["corpora"]["train"]
    assert entry["held_out"]["data.dev.0 (dev0.de)"] == {"sentences": 400, "found": 2, "pairs": 0, "sides": 2}


def test_mended_text_is_counted_and_has_no_links(corpora: Corpora) -> None:
    pairs = [("Der Hund schlÃ¤ft.", "The dog sleeps."), ("Ein Haus", "A house"), ("Ja", "It\x92s so")]
    corpora.add("train", pairs, alignment=str(corpora.folder / "links"))
    (corpora.folder / "links").write_text("0-0\n" * 3)
    corpora.settings["filters"] = {"repair": True}
    report = corpora.prepare()
    assert corpora.texts() == [("Der Hund schläft.", "The dog sleeps."), pairs[1], ("Ja", "It’s so")]
    assert (report.corpora[0].repaired, report.corpora[0].aligned) == (2, 1)


def test_scores_of_other_tools_are_read_next_to_the_text(corpora: Corpora) -> None:
    pairs = babel(30)
    (corpora.folder / "scores").write_text("".join(f"{number % 3 / 2}\n" for number in range(30)))
    corpora.add("train", pairs, scores=[{"path": str(corpora.folder / "scores"), "min": 0.5}])
    report = corpora.prepare()
    assert report.dropped == {"score": 10}
    assert corpora.texts() == [pair for number, pair in enumerate(pairs) if number % 3]
    (corpora.folder / "scores").write_text("0\n" * 30)
    with pytest.raises(Exception, match=r"prepared from other settings or files: data\.train\.0\.scores\.0\.files"):
        corpora.prepare()


@pytest.mark.slow
def test_the_pair_score_finds_exchanged_targets(corpora: Corpora) -> None:
    pairs = babel(1500)
    wrong = range(0, 1500, 10)
    for number in wrong:
        pairs[number] = pairs[number][0], babel(1)[0][1] if number == 0 else pairs[number - 7][1]
    corpora.settings["filters"] = {"pair_score": {}}
    corpora.add("train", pairs)
    corpora.add("train", pairs[:50], filters={"pair_score": None})
    report = corpora.prepare()
    dropped = report.corpora[0].dropped["pair_score"]
    kept = set(corpora.texts()[: report.corpora[0].kept])
    found = sum(pairs[number] not in kept for number in wrong)
    assert found > 0.9 * len(wrong)
    assert dropped - found < 0.06 * len(pairs)
    assert report.corpora[1].dropped == {}


def test_languages_must_be_known(corpora: Corpora) -> None:
    corpora.add("train", babel(5))
    corpora.settings.update(source_language="qlo", filters={"languages": {}})
    with pytest.raises(ConfigError, match="py3langid does not know the source language `qlo`"):
        corpora.prepare()
    assert not corpora.store.exists()
    corpora.settings["train"][0]["source_language"] = "de"  # the corpus's own language counts
    with pytest.raises(DataError, match=r"5 of 5 pairs skipped \(source_language 5\)"):
        corpora.prepare()


def test_everything_at_once_gives_the_same_store_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ziggurat.data.cleaning.pair_score.LEAST_PAIRS", 20)
    stores = []
    for block, threads in ((16_384, 1), (7, 2), (1, 1)):
        monkeypatch.setattr("ziggurat.data.readers.BLOCK_PAIRS", block)
        corpora = Corpora(tmp_path / "project")
        pairs = babel(60)
        corpora.add(
            "train", [*pairs, *((s, t + "!") for s, t in pairs[:9]), ("schlÃ¤ft", "x"), *pairs[20:31], ("", "")]
        )
        corpora.add("train", babel(20, seed=3), filters={"pair_score": {"min": 0.2}, "max_pieces": 30})
        corpora.add("dev", babel(10, seed=3))
        corpora.settings["filters"] = {
            "repair": True, "duplicates": True, "near_duplicates": {"memory": 1}, "held_out": "pairs",
            "pair_score": {"min": 0.01}, "agreement": {"punctuation": 3},
        }  # fmt: skip
        corpora.prepare(threads=threads, force=True)
        stores.append({name: content for name, content in tree(corpora.store).items() if name != "train-00000.arrow"})
    assert stores[0][CLEANING] == stores[1][CLEANING] == stores[2][CLEANING]
    manifests = [json.loads(cast(bytes, store["manifest.json"])) for store in stores]
    for key in ("corpora", "held_out", "notices", "prepared_from"):
        assert manifests[0][key] == manifests[1][key] == manifests[2][key]
    reasons = set(manifests[0]["corpora"]["train"][0]["dropped"])
    assert {"empty", "duplicate", "near_duplicate"} <= reasons


KEYS = st.lists(st.integers(0, 30), max_size=20)


@given(st.lists(st.tuples(st.sampled_from("ab"), KEYS), max_size=6), st.integers(0, 6))
def test_examples_have_the_smallest_hashes_however_parts_are_merged(
    seen: list[tuple[str, list[int]]], cut: int
) -> None:
    parts = Examples(), Examples()
    for number, (reason, keys) in enumerate(seen):

        def text(place: int, keys: list[int] = keys) -> tuple[str, str]:
            return f"s{keys[place]}", "t"

        parts[number >= cut].see(reason, np.array(keys, np.uint64), text)
    parts[0].join(Examples(json.loads(json.dumps(parts[1].record()))))
    every = {reason: sorted({key for r, keys in seen if r == reason for key in keys}) for reason in "ab"}
    wanted = {reason: [(key, f"s{key}", "t") for key in keys[:5]] for reason, keys in every.items() if keys}
    assert {reason: pairs for reason, pairs in parts[0].record().items() if pairs} == wanted
    assert parts[0].listed(2).get("a", []) == [[s, t] for _, s, t in wanted.get("a", [])[:2]]


def test_examples_are_cut_and_safe_to_print() -> None:
    examples = Examples()
    examples.see("too_long", np.array([1], np.uint64), lambda place: ("x" * 1000, "\x1b[31m\u202e"))
    ((_, source, target),) = examples.record()["too_long"]
    assert len(source) == 300
    assert target == r"\x1b[31m\u202e"
