"""The report on a store: counts, examples, overlap, samples, hostile text, what is refused."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.inspect.test_report_page import AS_TEXT, HOSTILE, sound
from ziggurat.config.data import DataConfig
from ziggurat.data.cleaning.filters import scripts
from ziggurat.data.corpus import Store
from ziggurat.data.prepare import prepare
from ziggurat.inspect.report import data_page as data_content
from ziggurat.inspect.report.data_page import REASONS, LengthCurve, data_page, data_record, gather_data, length_figures
from ziggurat.system.errors import DataError

GERMAN = ["Der Hund schläft vor der Tür.", "Am Fluss steht ein altes Haus.", "Wir gehen morgen in die Stadt."]
ENGLISH = ["The dog sleeps at the door.", "There is an old house near the river.", "Tomorrow we go to town."]
RUSSIAN = "Собака спит перед дверью дома"
DEV = "data.dev.0 (dev.de)"


def write(folder: Path, name: str, pairs: list[tuple[str, str]]) -> dict[str, str]:
    for number, side in enumerate(("de", "en")):
        (folder / f"{name}.{side}").write_text("".join(f"{pair[number]}\n" for pair in pairs), "utf-8")
    return {"source": str(folder / f"{name}.de"), "target": str(folder / f"{name}.en")}


def prepared(folder: Path, held_out: str = "keep", of_news: str | None = None) -> Path:
    """Return a store of two training corpora, with planted development sentences, duplicates and hostile text."""
    right = list(zip(GERMAN, ENGLISH, strict=True))
    news = [*right, *right[:2], (HOSTILE, HOSTILE), ("Eins 1", "One 1"), (GERMAN[1] + " Ja.", RUSSIAN)]
    web = [("Das ist neu hier.", "This is new here."), ("", "x"), ("Ja", "x " * 300)]
    (folder / "test.de").write_text("Morgen gehen wir.\nDas ist neu hier!\n", "utf-8")
    own = {} if of_news is None else {"held_out": of_news}
    settings = {
        "source_language": "de", "target_language": "en", "store": str(folder / "store"),
        "train": [
            {**write(folder, "news", news), "name": f"News {HOSTILE}", "weight": 2.0, "filters": own},
            {**write(folder, "web", web), "tag": "<web>"},
        ],
        "dev": [write(folder, "dev", [(GERMAN[0].upper(), ENGLISH[0]), ("Etwas anderes.", ENGLISH[2])])],
        "held_out": [str(folder / "test.de")],
        "filters": {"identical": True, "duplicates": True, "max_pieces": 150, "held_out": held_out},
        "subword": {"vocabulary_size": 350},
    }  # fmt: skip
    prepare(DataConfig.model_validate(settings))
    return folder / "store"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store.open(prepared(tmp_path_factory.mktemp("data")))


def test_content_is_that_of_the_store(store: Store) -> None:
    content = gather_data(store)
    news, web, _ = content.corpora
    assert [(c.split, c.read, c.kept, c.weight, c.tag) for c in content.corpora] == [
        ("train", 8, 5, 2.0, None), ("train", 3, 1, 1.0, "<web>"), ("dev", 2, 2, 1.0, None)
    ]  # fmt: skip
    assert (dict(news.dropped), dict(web.dropped)) == (
        {"identical": 1, "duplicate": 2}, {"empty": 1, "too_many_pieces": 1}
    )  # fmt: skip
    assert set(map(tuple, news.examples["duplicate"])) == set(zip(GERMAN[:2], ENGLISH[:2], strict=True))
    assert news.examples["identical"] == [[HOSTILE, HOSTILE]]
    # Shared with training: both sides of the first dev pair, the target of the second, and a line of the test set.
    test = next(name for name in content.overlap if name.endswith("test.de"))
    assert content.overlap[DEV] == (4, 3, 1, 2)
    assert content.overlap[test] == (2, 1, 0, 1)
    assert (news.overlap[DEV].sides, web.overlap[DEV].sides, web.overlap[test].sides) == (2, 0, 1)
    assert [notice.split(" sentences of ")[0] for notice in content.contamination] == [
        "CONTAMINATION: 3 of 4", "CONTAMINATION: 1 of 2"
    ]  # fmt: skip
    assert content.missing == ()
    assert news.sides is not None
    source, target = news.sides
    assert (news.sampled, source.language, target.language) == (5, "de", "en")
    lengths = store.train.source_lengths[:5]
    assert (source.pieces, source.longest) == (float(lengths.mean()), int(lengths.max()))
    # The tag that the store puts before a source is not one of the sentence's pieces.
    assert web.sides is not None
    its = len(store.source.encode(["Das ist neu hier."])[0])
    assert (web.sides[0].pieces, web.sides[0].longest, int(store.train.source_lengths[5])) == (its, its, its + 1)
    assert [curve.source.tolist() for curve in data_content._curves(store)] == [lengths.tolist(), [its]]
    assert next(iter(source.languages or {})) == "de"
    assert source.confidence is not None
    letters = Counter("Cyrillic" if "а" <= c.lower() <= "я" else "Latin" for c in RUSSIAN if c.isalpha())
    latin = sum(map(str.isalpha, "".join([*ENGLISH, "One"])))
    total = latin + letters["Cyrillic"]
    assert dict(target.scripts) == pytest.approx({"Latin": latin / total, "Cyrillic": letters["Cyrillic"] / total})
    json.dumps(data_record(content))


def test_a_vocabulary_that_both_sides_share_is_counted_once(store: Store) -> None:
    content = gather_data(store)
    joint = any(path.name.startswith("joint.") for path in store.path.iterdir())
    assert content.vocabulary == ((store.source.size,) if joint else (store.source.size, store.target.size))
    shared, apart = (data_page(replace(content, vocabulary=sizes)) for sizes in ((71,), (71, 73)))
    assert ("71 pieces" in shared, "73" in shared.split("Vocabulary")[1][:80]) == (True, False)
    assert "71 source and 73 target" in apart


def test_the_page_is_valid_and_shows_warnings_prominently(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda *_: "then")
    content = gather_data(store)
    page = data_page(content)
    tags = sound(page)
    assert page == data_page(content)
    assert HOSTILE not in page
    assert AS_TEXT in page
    alarm = page[page.index('role="alert"') :].split("</div>")[0]
    assert alarm.count("CONTAMINATION") == 2
    assert f"3 of 4 sentences of {DEV}" in alarm
    assert "6 of 11\ntraining pairs were kept (54.5 %)" in page
    for reason in ("identical", "duplicate", "empty", "too_many_pieces"):
        assert f"<code>{reason}</code>: {REASONS[reason]}" in page
    assert tags.tags.count("svg") >= 3
    assert len(page) < 5_000_000
    assert re.search(r"News .*?</th><td>train</td><td class=\"n\">5</td>\s*<td>source, de</td>", page)


def test_a_given_test_set_is_searched_for(store: Store) -> None:
    content = gather_data(store, ("mine", ["wir gehen morgen in die stadt", "Ganz anders"], [ENGLISH[2], ENGLISH[1]]))
    assert content.overlap["mine"] == (4, 3, 1, 2)
    (notice,) = (notice for notice in content.contamination if "of mine" in notice)
    assert "3 of 4 sentences of mine, sources and targets together, are in training pairs" in notice
    way_out = "name its files in `data.held_out`, set `data.filters.held_out: pairs` (or `sides`), and prepare again"
    assert notice.endswith(f": {way_out}")
    clean = gather_data(store, ("mine", ["Ganz anders"], ["Quite different"]))
    assert clean.overlap["mine"] == (2, 0, 0, 0)
    assert not any("mine" in notice for notice in clean.contamination)


def test_a_given_test_set_is_searched_for_in_the_other_direction(store: Store) -> None:
    content = gather_data(store, ("mine", [ENGLISH[2].upper(), "Quite different"], [GERMAN[2], GERMAN[1]]))
    assert content.overlap["mine"] == (4, 3, 1, 2)


@pytest.mark.parametrize(
    ("rule", "own", "staying"),
    [
        ("keep", None, {DEV: (1, 2), "test": (0, 1)}),
        ("pairs", None, {DEV: (0, 1), "test": (0, 1)}),
        ("sides", None, {DEV: (0, 0), "test": (0, 0)}),
        ("pairs", "keep", {DEV: (1, 2), "test": (0, 1)}),  # the corpus's own rule counts
    ],
)
def test_contamination_found_and_remaining(
    tmp_path: Path, rule: str, own: str | None, staying: dict[str, tuple[int, int]]
) -> None:
    content = gather_data(Store.open(prepared(tmp_path, held_out=rule, of_news=own)))
    assert content.overlap[DEV] == (4, 3, 1, 2), "counted before any pair is dropped"
    assert {"test" if name.endswith("test.de") else name: stay for name, stay in content.staying.items()} == staying
    record = data_record(content)["staying"][DEV]
    assert (record["pairs"], record["sides"]) == staying[DEV]
    row = data_page(content).split(f'<th scope="row">{DEV}</th>')[1].split("</tr>")[0]
    kind = "bad" if staying[DEV][0] else "good"
    assert re.findall(r'<span class="(\w+)">(\d+)</span>', row) == [(kind, str(staying[DEV][0]))]
    assert f": 2 (<code>{own or rule}</code>)" in row


def test_all_pairs_are_searched_for_a_test_set(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_content, "_CHUNK", 2)
    test_set = ("mine", [GERMAN[0], GERMAN[2]], ["x", "This is new here"])
    assert gather_data(store, test_set).overlap["mine"] == (4, 3, 0, 3)


def test_corpora_beyond_the_largest_are_summed_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_content, "_MOST_CORPORA", 0)
    content = gather_data(store)
    first = content.corpora[0]
    assert (first.name, first.split, first.read, first.kept) == ("2 smaller corpora", "train", 11, 6)
    assert dict(first.dropped) == {"identical": 1, "duplicate": 2, "empty": 1, "too_many_pieces": 1}
    sound(data_page(content))


def test_nonsense_in_the_store_is_refused(store: Store) -> None:
    manifest: dict[str, Any] = json.loads(json.dumps(store.manifest))
    manifest["corpora"]["train"][0]["held_out"] = {"x": {"sentences": "many"}}
    with pytest.raises(DataError, match=r"held_out"):
        gather_data(Store(store.path, manifest, verified=True))


def test_without_py3langid_languages_are_missing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(names: Any) -> Any:
        raise ModuleNotFoundError("py3langid")

    monkeypatch.setattr(data_content, "identifier", absent)
    content = gather_data(store)
    assert content.missing == ("Languages: py3langid is not installed. `pip install 'ziggurat-mt[clean]'`.",)
    assert content.corpora[0].sides is not None
    assert (content.corpora[0].sides[0].languages, content.corpora[0].sides[0].confidence) == (None, None)
    sound(data_page(content))


def test_curves_add_up_and_match_the_lengths() -> None:
    generator = np.random.default_rng(0)
    source = generator.integers(1, 200, 5000).astype(np.int32)
    curve = LengthCurve("a", 0, source, (2 * source).astype(np.int32))
    lengths, ratios = length_figures([curve])
    for series, values in zip((panel.series[0] for panel in lengths.panels), (source, 2 * source), strict=True):
        assert sum(y or 0 for y in series.y) == pytest.approx(100)
        for x, y in zip(series.x, series.y, strict=True):
            # The bin at x holds the lengths that are nearer to x than to its neighbours, on a logarithmic scale.
            near = (np.log2(values) > np.log2(x) - 0.125) & (np.log2(values) < np.log2(x) + 0.125)
            assert y == pytest.approx(100 * near.mean())
    (ratio,) = ratios.panels[0].series
    assert [(x, y) for x, y in zip(ratio.x, ratio.y, strict=True) if y] == [(2.0, 100.0)]
    assert length_figures([]) == []


def test_scripts_of_letters() -> None:
    assert scripts(["Ab 1!", "かなカ", "漢字", "Жж"]) == {
        "Latin": 2,
        "Cyrillic": 2,
        "Han": 2,
        "Hiragana": 2,
        "Katakana": 1,
    }
    assert scripts(["ー\u1780𐌰"]) == {"other": 2, "Khmer": 1}  # a lengthening mark, Gothic
    assert scripts(["12 !"]) == {}
