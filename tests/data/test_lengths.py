"""Lengths that treat scripts fairly. The sentences were written for these tests."""

from __future__ import annotations

import re
import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ziggurat.data.cleaning.filters import length_ratio, too_many_words
from ziggurat.data.lines import character_lengths, has_unspaced, visible_lengths, word_counts

PAIRS = {
    "chinese": (
        "The old man walked slowly to the market because his car was broken.",
        "老人慢慢地走到市场，因为他的汽车坏了。",
    ),
    "traditional": (
        "I bought three books about the history of the city in the shop near the station.",
        "我昨天在車站附近的書店買了三本關於這座城市歷史的書。",
    ),
    "japanese": ("We will meet again at the same place next week.", "来週もう一度同じ場所で会いましょう。"),
    "katakana": ("The computer is next to the printer.", "コンピューターはプリンターの隣にあります。"),
    "thai": ("The children had already eaten and gone to bed.", "เด็กๆ กินข้าวและเข้านอนกันแล้ว"),
    "khmer": ("I want to drink cold water.", "ខ្ញុំចង់ផឹកទឹកត្រជាក់"),
    "lao": ("I want to drink cold water.", "ຂ້ອຍຢາກດື່ມນ້ຳເຢັນ"),
    "burmese": ("I want to drink cold water.", "ကျွန်တော် ရေအေး သောက်ချင်တယ်"),
    "one word": ("Congratulations!", "恭喜你！"),
    "mixed": ("Install Visual Studio Code before you open the project.", "打开项目之前请安装 Visual Studio Code。"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_ordinary_pairs_pass_a_ratio_of_two(name: str) -> None:
    source, target = PAIRS[name]
    for pair in ((source, target), (target, source)):
        assert not length_ratio(*([text] for text in pair), limit=2).any()
    longer = target * 5
    assert length_ratio([source], [longer], limit=2).all(), "and five times as much does not"


@given(st.sampled_from(sorted(PAIRS)), st.lists(st.integers(0, 60), max_size=12), st.sampled_from(" \u3000\u200b"))
def test_blanks_in_text_without_blanks_change_nothing(name: str, places: list[int], blank: str) -> None:
    source, target = PAIRS[name]
    if name == "mixed":  # a blank inside a Latin word splits it in two
        places = []
    spaced = target
    for place in sorted({place % len(target) for place in places}, reverse=True):
        spaced = spaced[:place] + blank + spaced[place:]
    assert visible_lengths([spaced]) == visible_lengths([target])
    for limit in (1.2, 1.5, 2, 3):
        assert length_ratio([source], [spaced], limit=limit) == length_ratio([source], [target], limit=limit)
    assert word_counts([spaced]) == word_counts([target])


@given(
    st.lists(st.tuples(*[st.text("ab é,\u00a0ждß\u2019 ", max_size=30)] * 2), max_size=9), st.sampled_from([1.5, 2, 3])
)
def test_scripts_with_blanks_are_counted_as_before(pairs: list[tuple[str, str]], limit: float) -> None:
    def dropped(source: str, target: str) -> bool:
        measures = [(len(source.split()), len(target.split())), (len(source), len(target))]
        fewest = min(measures[0])
        used = measures[1:] if fewest <= 1 else measures if fewest == 2 else measures[:1]
        return all(max(lengths) > limit * min(lengths) for lengths in used)

    sides = [s for s, _ in pairs], [t for _, t in pairs]
    assert length_ratio(*sides, limit=limit).tolist() == [dropped(*pair) for pair in pairs]
    assert word_counts(sides[0]).tolist() == [len(text.split()) for text in sides[0]]
    assert not has_unspaced(sides[0]).any()


def test_words_of_text_without_blanks_are_estimated_by_weight() -> None:
    for name, (source, target) in PAIRS.items():
        english, other = len(source.split()), int(word_counts([target])[0])
        assert english / 2 <= other <= 2 * english, name
    assert too_many_words(["人" * 200], ["a"], limit=100).all()
    assert not too_many_words(["人" * 100], ["a"], limit=100).any()
    assert word_counts(["Python 3 人人"]).tolist() == [4]


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_a_text_is_measured_as_its_characters_are(text: str) -> None:
    plain = re.sub(r"[\n]", "", text)
    one_by_one = sum(int(visible_lengths([c])[0]) for c in plain if int(visible_lengths([c + "a"])[0]) > 10)
    assert visible_lengths([plain])[0] == max(1, one_by_one)
    around = ["a b", plain, "人 人"]
    assert character_lengths(around)[1] == character_lengths([plain])[0]
    assert np.array_equal(word_counts(around)[1:2], word_counts([plain]))


@pytest.mark.parametrize("text", ["Tiếng Việt", "한국어입니다", "ガギグゲゴ", "élève"])
def test_a_decomposed_text_is_about_as_long(text: str) -> None:
    composed, decomposed = (int(visible_lengths([unicodedata.normalize(form, text)])[0]) for form in ("NFC", "NFD"))
    assert composed == pytest.approx(decomposed, rel=0.25)


@pytest.mark.parametrize(
    ("source", "target", "drop"),
    [
        ("I did not know that you would not have been able to come.", "Gelemeyeceğinizi bilmiyordum.", False),
        ("Are you one of those whom we could not make into one of us?", "Siz yapamadıklarımızdanmısınız", False),
        ("I would like to have a look at it in our house as well", "Talossanikin katselisin", False),
        ("They said that he would not be able to see it at all", "Láthatatlannak mondták", False),
        ("Because of what you had not been able to do then", "Yapamayacaklarınızdan dolayı", False),
        ("one two three four five six seven eight nine ten", "no no", True),
        ("a word and a word and a word and more words than before", "ja ja", True),
        ("one two three four five six seven eight nine ten one two three four five six seven", "a b c dddddddd", True),
    ],
)
def test_a_few_long_words_can_match_many_short_ones(source: str, target: str, drop: bool) -> None:
    assert length_ratio([source], [target], limit=4).tolist() == [drop]
    assert length_ratio([target], [source], limit=4).tolist() == [drop]
