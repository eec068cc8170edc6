"""The registry: names, the user's own files, and the data of every recipe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ziggurat.config.recipes import load_named, paper_keys, paper_recipes, plain_recipe_names
from ziggurat.corpora.fetch.downloads import Downloads, place_of
from ziggurat.corpora.fetch.indexes import Names
from ziggurat.corpora.fetch.pairs import tasks_of_config
from ziggurat.corpora.fetch.registry import any_pair, fitting_pairs, load_registry
from ziggurat.system.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_registry_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def test_names_are_found_in_either_direction() -> None:
    registry = load_registry()
    for name in ("europarl/v7/de-en", "europarl/v7/en-de"):
        found = registry.find(name)
        assert (found.name, found.languages) == ("europarl/v7/de-en", ("de", "en"))
        assert found.take == ["training/europarl-v7.de-en.de", "training/europarl-v7.de-en.en"]
    assert registry.find("opus/GNOME/v1/zh_CN-en").files[0].url.endswith("/OPUS-GNOME/v1/moses/en-zh_CN.txt.zip")
    assert registry.find("newstest-sgm/2016/de-en").take != registry.find("newstest-sgm/2016/en-de").take
    assert registry.find("news-crawl/2019/de").languages == ("de",)
    assert registry.find("flores200/dev/deu_Latn-eng_Latn").take[0] == "flores200_dataset/dev/deu_Latn.dev"


def test_lists_of_several_pairs_show_entries_that_have_all_of_them() -> None:
    registry = load_registry()
    of_one = {pair: dict(registry.listed([pair])) for pair in ("de-en", "fr-en")}
    of_both = dict(registry.listed(["de-en", "fr-en"]))
    assert {"europarl/v7/de-en", "europarl/v7/fr-en"} <= of_both.keys()
    for pair, only in (("de-en", "iwslt14/train/de-en"), ("fr-en", "giga/wmt10/fr-en")):
        assert only in of_one[pair]
        assert only not in of_both
        assert of_one[pair].keys() & of_both.keys() == {
            name for name, entry in of_one[pair].items() if entry in of_both.values()
        }
    assert [name for name, _ in registry.listed(["fr-en", "europarl/v7", "de-en"])] == [
        "europarl/v7/fr-en", "europarl/v7/de-en",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("europarl/v7/de-pt", r"europarl/v7/\{a\}-\{b\} has pairs cs-en de-en"),
        ("news-crawl/1999/de", "year: 2007 2008"),
        ("newsdev/2018/zh-en", "has pairs en-et et-en; year: 2015"),
        ("multi30k/test_2017_flickr/cs-en", "has any two of de en fr; set: train"),
        ("flores200/dev/zh-en", "these languages are zho_Hans-eng_Latn or zho_Hant-eng_Latn there"),
        ("europrl/v7/de-en", r"the nearest names are `europarl/v7/\{a\}-\{b\}`"),
        ("opus/../v1/de-en", "no corpus"),
        ("opus/Tatoeba/v1/../de-en", "no corpus"),
    ],
)
def test_unknown_names(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_registry().find(name)


def test_a_pair_lists_entries_with_its_codes_and_separately_those_with_unknown_pairs() -> None:
    registry = load_registry()

    def listed(*words: str) -> tuple[list[str], list[str]]:
        found = list(registry.listed(words))
        return (
            [name for name, entry in found if not any_pair(entry)],
            [name for name, entry in found if any_pair(entry)],
        )

    known, unknown = listed("zh-en")
    assert {"news-commentary/v13/zh-en", "un/v1.0/en-zh", "newsdev/2017/zh-en", "newsdev/2017/en-zh"} <= set(known)
    assert [name for name in known if name.startswith("flores200")] == [
        "flores200/{set}/zho_Hans-eng_Latn", "flores200/{set}/zho_Hant-eng_Latn",
    ]  # fmt: skip
    assert not [name for name in known if name.startswith(("multi30k", "newstest/", "newsdev/2018"))]
    assert unknown[0] == "opus/{corpus}/{version}/{a}-{b}"
    assert listed("xx-yy") == ([], unknown)
    assert [n for n in listed("de-ru")[0] if "newstest/" in n] == ["newstest/2012/de-ru", "newstest/2013/de-ru"]
    assert [n for n in listed("en-cs")[0] if "multi30k" in n] == [
        f"multi30k/{name}/en-cs" for name in ("train", "val", "test_2016_flickr", "test_2018_flickr")
    ]
    assert "flores101/{set}/ara-npi" in listed("ar-ne")[0]
    assert "flores200/{set}/arb_Arab-npi_Deva" in listed("ar-ne")[0]
    assert "europarl/v7/de-en" in listed("eng-deu")[0]
    assert [name for name, _ in registry.listed(["news-crawl"])] == ["news-crawl/{year}/{a}"]
    for name in known:
        assert registry.find(name.format_map({"set": "dev", "part": "neu2017"}))


def test_every_entry_can_be_filled_and_lies_in_the_folder() -> None:
    registry = load_registry()
    assert len(registry.entries) > 25
    for pattern, entry in registry.entries.items():
        values = {"a": "de", "b": "en", "corpus": "X", "version": "v1", "set": "x", "part": "x", "year": "2000"}
        values |= {part: words.split()[0] for part, words in entry.where.items()}
        if not any_pair(entry):
            pair = next(filter(None, (fitting_pairs(entry, values, one) for one in ("de-en", *_PAIRS))))[0]
            values["a"], values["b"] = pair.split("-")
        found = registry.find(pattern.format_map(values))
        for file in found.files:
            assert "{" not in file.url
            assert place_of(file.url)
            assert (file.sha256 is None) == (file.bytes is None), f"{pattern}: a length alone proves nothing"
        assert "{" not in "".join(found.take)
        assert entry.licence
        assert entry.known_from, "asked of the built-in registry only"


@pytest.mark.slow
def test_the_registry_has_the_data_of_every_recipe(tmp_path: Path) -> None:
    names = Names(load_registry(), Downloads(tmp_path, offline=True))
    seen: set[tuple[str, ...]] = set()
    for recipe in [*plain_recipe_names(), *(name for key in paper_keys() for name in paper_recipes(key))]:
        data = load_named(recipe).data
        if recipe == "demo" or recipe.startswith("student-"):
            continue  # its text is embedded, or a teacher's translation of the user's text
        paths = tuple(corpus.source or "" for corpus in (*data.train, *data.dev))
        if paths in seen:
            continue
        seen.add(paths)
        tasks = tasks_of_config(data, names, recipe)
        named = {path for corpus in (*data.train, *data.dev) for path in (corpus.source, corpus.target)}
        made = {str(path) for task in tasks for path in task.target.files.values()}
        made |= {str(path) for task in tasks if task.held_out for path in task.held_out[1].files.values()}
        assert named <= made, recipe
        for task in tasks:
            assert task.corpora or task.by_hand, task.target.name
            assert all(set(corpus.languages) == set(task.target.files) for corpus in task.corpora), task.target.name
    assert {Path(path).parent.name for paths in seen for path in paths} == set(names.registry.folders)


def test_licences_are_stated(tmp_path: Path) -> None:
    names = Names(load_registry(), Downloads(tmp_path, offline=True))
    nist = next(name for name in paper_recipes("dlcl") if "small" in name)
    tasks = tasks_of_config(load_named(nist).data, names, nist)
    assert all(task.missing and "licensed: " in (task.by_hand or "") for task in tasks)
    assert len(tasks) == 2


_PAIRS = ("fi-en", "zh-en", "fr-en", "ro-en", "cs-en")  # for entries without de-en
OWN = """
corpora:
  mine/{{a}}-{{b}}:
    title: Mine
    files: [{{url: "http://example.invalid/{{a}}-{{b}}.tsv"}}]
    layout: tsv
    licence: mine
    known_from: me
  europarl/v7/{{a}}-{{b}}:
    title: {title}
    files: [{{url: "http://example.invalid/e.{{a}}"}}, {{url: "http://example.invalid/e.{{b}}"}}]
    licence: mine
    known_from: me
"""
_OF_TWO = OWN[OWN.index("mine/") : OWN.index("    licence")].format()


def test_a_registry_of_the_users_own_comes_first(tmp_path: Path) -> None:
    (tmp_path / "config" / "ziggurat").mkdir(parents=True)
    (tmp_path / "config" / "ziggurat" / "corpora.yaml").write_text(OWN.format(title="the user's"))
    assert load_registry().find("mine/de-en").files[0].url == "http://example.invalid/de-en.tsv"
    assert load_registry().find("europarl/v7/de-pt").title == "the user's"
    given = tmp_path / "given.yaml"
    given.write_text(OWN.format(title="given"))
    assert load_registry([str(given)]).find("europarl/v7/de-pt").title == "given"
    assert load_registry([str(given)]).find("newstest/2013/de-en")


def test_users_need_not_say_where_an_address_comes_from(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(OWN.format(title="x").replace("    known_from: me\n", ""))
    assert load_registry([str(path)]).find("mine/de-en").known_from is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("licence: mine", "license: mine"), "license"),
        (("title: Mine", "title: [Mine]"), "line 4: corpora.mine/{a}-{b}.title"),
        (("{a}-{b}.tsv", "{a}-{c}.tsv"), r"{c} in http://example.invalid/{a}-{c}.tsv is not a part of the name"),
        (("layout: tsv", "layout: text"), "2 files needed for the layout text"),
        (("mine/{a}-{b}:", "mine {a}-{b}:"), "a name has slashes and {a}"),
        (
            ("mine/{a}-{b}:", "mine/{a}-{b}/{a}:"),
            "each part of a name is a word in braces, such as {version}, and occurs",
        ),
        (("mine/{a}-{b}:", "mine/{1}/{a}-{b}:"), "each part of a name is a word in braces"),
        (("title: Mine", "title: Mine {year}"), "{year} in Mine {year} is not a part of the name"),
        (("licence: mine", "licence: mine\n    terms: http://x/{year}"), "{year} in http://x/{year} is not a part"),
        (("layout: tsv", "layout: tsv\n    columns: [1]"), "`columns` needs two entries, one for each language"),
        *(
            (
                (_OF_TWO, _OF_TWO.replace("-{b}", "").replace("layout: tsv", key)),
                f"`{key.split(':')[0]}` is for two languages",
            )
            for key in ("pairs: de-en", "languages: de en", "sorted: true", "layout: tmx")
        ),
        (("layout: tsv", "layout: tsv\n    pairs: de-en\n    languages: de en"), "not both"),
        (("layout: tsv", "layout: tsv\n    pairs: {x: de-en}"), "`pairs` by values needs one part in `where`"),
        (("known_from: me", "known_from: me\n    sha256: 0"), "sha256"),
        (("corpora:", "corpora: ["), "not valid YAML"),
    ],
)
def test_invalid_registries(change: tuple[str, str], says: str, tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(OWN.format(title="x").replace(*change, 1))
    with pytest.raises(ConfigError) as caught:
        load_registry([str(path)])
    assert says in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_registry_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xff\xfe")
    for name in ("a", "none", "."):
        with pytest.raises(ConfigError, match=re.escape(str(tmp_path / name))):
            load_registry([str(tmp_path / name)])
