"""Signs that text is not what it seems: headers, subword pieces, tags as text, two spellings of the same letters."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ziggurat.config.data import DataConfig
from ziggurat.data.prepare import prepare
from ziggurat.data.signs import CorpusSigns, is_header, sign_notices
from ziggurat.data.vocabulary import language_tags, leading_tag, names_language, segmentation_mark, text_signs

WORDS = ["su", "divusim", "ne", "gokun", "madona", "dogun", "élève", "Äpfel", "日本", "x@y.org", "a_b", "#1"]
PLAIN = st.lists(st.sampled_from(WORDS), min_size=1, max_size=8).map(" ".join)


def notices(
    source: list[str], target: list[str], unicode: Any = "none", filters: Mapping[str, bool] = {}, **settings: Any
) -> list[str]:
    """Return the notices about a corpus that is read in blocks of two."""
    signs = CorpusSigns()
    for start in range(0, len(source), 2):
        pairs = source[start : start + 2], target[start : start + 2]
        signs.see(pairs, start, ("a.en", "a.de"), ("en", "de"))
    corpora = [{"source": "a.en", "target": "a.de"}]
    section = {"train": corpora, "unicode": unicode, "filters": filters, "store": "store"}
    config = DataConfig.model_validate({**section, "source_language": "en", "target_language": "de"})
    found = sign_notices({"data.train.0": signs}, config, **{"segmented": False, **settings})
    assert {(one.key, one.severity) for one in found} <= {("data.train.0", "warning")}
    return list(map(str, found))


@pytest.mark.parametrize(
    "row",
    [
        "source target", "src tgt", "SRC TRG", "en de", "EN DE", "de en", "en-US de-DE", "eng deu", "English German",
        "text_en text_de", "source_text target_text",
        "src_text trg_text", "sentence1 sentence2", "translation.en translation.de",
        '"source" "target"', "original translation", "en_US de_DE", "src_lang tgt_lang", "Deutsch Englisch",
        "reference hypothesis", "eng_Latn deu_Latn", "L1 L2", "text1 text2", "sourceText targetText",
        "SourceText TargetText", "sources targets", "inputs targets",
        "en_txt de_txt", "en_raw de_raw", "column1 column2",
        "srclang trglang", "transcript translation", "prompt completion", "Quelle Ziel", "原文 译文",
        "SourceString Translation",
        "sourcetext targettext", "srcText tgtText", "sourceLanguage targetLanguage", "SourceSentence TargetSentence",
        "SL TL", "src_sent trg_sent",
    ],
)  # fmt: skip
def test_headers(row: str) -> None:
    source, target = row.split()
    assert is_header(source, target, ("en", "de"))
    (notice,) = notices([source, "a dog", "text"], [target, "ein Hund", "Text"])
    assert notice.startswith("data.train.0: the first row looks like column names (a.en: `")


@pytest.mark.parametrize(
    "pair",
    [
        ("source", "source"), ("Text", "Text"), ("no", "ne"), ("the source", "die Quelle"), ("English", "Englische"),
        ("a dog", "ein Hund"), ("", ""), ("1", "2"), ("translation", "Übersetzung"), ("it", "is"), ("Yes", "Ja"),
        ("textile", "Textil"), ("sourceror", "Zauberer"), ("Language", "Sprache"), ("McText", "Mc Text"),
    ],
)  # fmt: skip
def test_first_rows_that_are_text(pair: tuple[str, str]) -> None:
    assert not is_header(*pair, ("en", "de"))
    assert not notices([pair[0]], [pair[1]])


def test_only_a_first_row_is_a_header() -> None:
    assert not notices(["a", "b", "source"], ["c", "d", "target"])


@pytest.mark.parametrize(
    ("text", "mark"),
    [
        ("▁the ▁dog s", "▁"), ("hou@@ se", "@@"), ("the hou@@", "@@"), ("hou ￭se", "￭"), ("hou￭ se", "￭"),
        ("hou ##se", "##"), ("h o u se</w> is</w>", "</w>"), ("The Ġdog Ġbarks .", "Ġ"), ("▁日本 語", "▁"),
        ("the▁ hou se▁", "▁"),
        ("Hello￨C world￨l", "￨"), ("｟mrk_case_modifier_C｠ hello", "｟mrk_"),
        ("l' @@ a@@ b", "@@"), ("▁ t h e ▁ h o u s e", "▁"), ("▁ 日 本 ▁ 語 も", "▁"), ("the_ hou se_", "_"),
        ("th e_ hou se_ is_", "_"), ("I_ am_", "_"),
    ],
)  # fmt: skip
def test_pieces(text: str, mark: str) -> None:
    assert segmentation_mark(text) == mark
    (notice,) = notices(["plain", text], ["plain", "plain"])
    assert notice.startswith(
        "data.train.0: 1 of 2 source lines are cut into subword pieces already, the first in a.en, line 2"
    )
    assert not notices(["plain", text], ["plain", "plain"], segmented=True)


@given(PLAIN)
def test_plain_text_shows_no_sign(text: str) -> None:
    assert segmentation_mark(text) is None
    assert leading_tag(text) is None
    for markup in ("</tr> x", "</br> x", "</id> x", "</p> x", "> > and < < x"):
        assert leading_tag(markup) is None, markup
    for odd in (
        *("▁▂▃▄▅", "@@", "# ##", "## Heading", "Ġorġ u Ġanni", "a ▁ b", "##", "me@@you", "a_ b", "snake_ case"),
        *("</tr> <br>", "x_ y z"),
    ):
        assert segmentation_mark(odd) is None, odd


LANGUAGE_TAGS = [
    "<2de>", "<de>", "<DE>", ">>de<<", ">>DEU<<", ">>zho_Hans<<", "__de__", "__DE__", "[de]", "[de_DE]", "<de_DE>",
    "<pt-BR>", "<to_de>", "<2_de>", "<lang:de>", "<|de|>", "<tgt:de>",
    "<<de>>", "＜2de＞", "&gt;&gt;de&lt;&lt;", "#de#", "@de@", "==DE==", "|de|",
    "<en2de>", "<en_to_de>", ">>de <<", "> > de < <", "> >de< <", "</2de>", "</de>", "__label__de",
    "__label__zh_Hans", "__opt_tgt_de",
    "＞＞de＜＜", "«2de»", "‹2de›", "<t2de>", ">>de>>", "__tgt_pt_BR",
    "｟opt_tgt_de｠", "__opt_tgt_de__", "<qhi>", "<zho_Hans>", "<en_XX>",
]  # fmt: skip


@pytest.mark.parametrize("tag", LANGUAGE_TAGS)
def test_tags_of_languages_however_they_are_spelt(tag: str) -> None:
    assert language_tags([tag]) == [tag]
    assert leading_tag(f" {tag} the house") == tag
    assert leading_tag(f"\ufeff{tag} the house") == tag
    assert leading_tag(f"▁{tag} ▁the ▁house") == leading_tag(f"▁ {tag} the house") == tag
    notice = notices([f"{tag} the house"], ["das Haus"])[0]
    assert f"the first in a.en, line 1: `{tag}`" in notice
    for known, said in (([tag, "<2fr>"], "--tag"), (["<2fr>"], "<2fr>"), ([], "no tags")):
        ((kind, message),) = text_signs(f"{tag} the house", known, segmented=False)
        assert kind == "tag_as_text"
        assert said in message


def test_tags_in_the_vocabulary_are_intended() -> None:
    source, target = [">>de<< a", ">>fr<< b"], ["c", "d"]
    assert not notices(source, target, symbols=[">>de<<", ">>fr<<", "x"])
    assert notices(source, target, symbols=[">>de<<"])


def test_a_line_in_a_thousand_is_an_accident() -> None:
    source = ["[it] came", *(["plain"] * 1199)]
    assert not notices(source, ["x"] * 1200)
    assert "2 of 1,200 source lines begin" in notices(["[it] came", *source[:-1]], ["x"] * 1200)[0]


@pytest.mark.parametrize("tag", ["de_DE", "zho_Hans", "en_XX", "qlo_QQ", "zh-CN", "LANG_TOK_DE", "opt_tgt_de", "TO_DE"])
def test_bare_codes_with_a_region(tag: str) -> None:
    assert language_tags([tag]) == [tag]
    assert leading_tag(f"{tag} the house") == tag
    assert leading_tag(f"{tag}s") is None


@pytest.mark.parametrize(
    "tag", ["<bt>", "<ft>", "<syn>", "<domain>", "<news>", "<pad>", "<unk>", "<x1>", "<today>", "<en-to>x"]
)
def test_tags_that_name_no_language(tag: str) -> None:
    assert language_tags([tag]) == []


@pytest.mark.parametrize(
    "text",
    [
        *("<br> text", "<tr><td>", "<b>bold</b>", "[1] note", "[sic] note", "[...]", "__init__ is", "{id} was"),
        *("#hashtag# x", "@me@ x", "&lt;b&gt; x", "«no», he said", "2nd floor", "translate it to me: x"),
        *("== Heading ==", "to_do", ">> quoted", "de la"),
    ],
)
def test_text_that_only_looks_like_a_tag(text: str) -> None:
    assert text.startswith("__") or leading_tag(text) is None
    assert leading_tag("<bt> text") == leading_tag("<bt> text", ["<bt>"]) == "<bt>"
    assert leading_tag("<id> text") is None
    assert leading_tag("translate English to German: the house") == "translate English to German:"


def test_codes() -> None:
    assert all(map(names_language, ["de", "DE", "deu", "pt-BR", "pt_br", "zho_Hans", "es-419", "qaa", "sr-Latn-RS"]))
    assert not any(map(names_language, ["bt", "xx", "house", "d", "", "de-", "de_DEUTSCH", "mul"]))


@given(
    st.lists(st.sampled_from(["élève", "Äpfel", "が", "한국", "Tiếng Việt", "plain", "日本"]), min_size=1, max_size=9),
    st.randoms(),
)
def test_mixed_normal_forms_are_reported_with_counts(words: list[str], random: Any) -> None:
    forms = [unicodedata.normalize(random.choice(["NFC", "NFD"]), word) for word in words]
    decomposed = [word for word in forms if not unicodedata.is_normalized("NFC", word)]
    composed = [
        word for word in forms if unicodedata.is_normalized("NFC", word) and not unicodedata.is_normalized("NFD", word)
    ]
    found = notices(forms, ["x"] * len(forms))
    assert len(found) == bool(decomposed and composed)
    if found:
        first = forms.index(decomposed[0]) + 1
        assert f"{len(decomposed)} of {len(forms)} source lines" in found[0]
        assert f"a.en, line {first}," in found[0]
    assert not notices(forms, ["x"] * len(forms), "nfc")


@pytest.mark.parametrize(
    ("odd", "ordinary", "what"),
    [
        ("Ａｂｃ です", "Abc です", "full-width"),
        ("１２ 回", "12 回", "full-width"),
        ("ｶﾞｷﾞｸﾞ", "ガギグ", "half-width"),
        ("ﾃｽﾄ中", "テスト中", "half-width"),
        ("これはＵＲＬ", "これはURL", "full-width"),
    ],
)
def test_forms_of_two_widths_are_reported(odd: str, ordinary: str, what: str) -> None:
    (found,) = notices([odd, "語", ordinary, odd], ["ひ"] * 4, "nfc")
    assert f"2 of 4 source lines have {what}" in found
    assert "line 1" in found
    assert "nfkc" in found
    assert not notices([odd, "語", odd], ["ひ"] * 3, "none"), "one form alone is fine"
    assert not notices([ordinary, "全角、句読点！（）"], ["ひ"] * 2, "none"), "signs are wide in such text"
    assert not notices([odd, ordinary], ["ひ"] * 2, "nfkc")


def test_forms_mixed_between_the_sides() -> None:
    assert "target lines" in notices(["é", "b"], ["e", "e\u0301"])[0]


@pytest.mark.parametrize("kind", ["tsv", "jsonl"])
def test_prepare_reports_it_and_changes_nothing(kind: str, tmp_path: Path) -> None:
    dogs = ((f"a dog {n}", f"ein Hund {n}") for n in range(30))
    rows = [("source", "target"), *dogs, (">>de<< hou@@ se", "e\u0301 é")]
    path = tmp_path / "pairs"
    lines = ("\t".join(row) if kind == "tsv" else json.dumps(dict(zip(("en", "de"), row, strict=True))) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines))
    corpus = {"path": str(path), "format": kind}
    section = {"source_language": "en", "target_language": "de", "train": [corpus], "store": str(tmp_path / "store")}
    report = prepare(DataConfig.model_validate({**section, "subword": {"vocabulary_size": 350}}))
    assert report.kept == len(rows)
    for said in ("column names", "subword pieces", "language tag as text"):
        assert [notice for notice in report.notices if said in notice]
    assert report.notices == report.as_dict()["notices"]
