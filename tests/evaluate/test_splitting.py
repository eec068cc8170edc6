"""Text without blanks: which tokenizer BLEU uses, and what is reported about it."""

from __future__ import annotations

import pytest

from ziggurat.config.languages import check_language_code, language_doubt, main_language
from ziggurat.evaluate.scores import MissingTokenizerError, evaluate
from ziggurat.evaluate.tokenisation import splitting, unspaced_script
from ziggurat.system.errors import ConfigError

JAPANESE = ["私は毎朝コーヒーを飲みます。", "彼女は図書館で本を読んでいる。", "はい。"]
CHINESE = ["我每天早上喝咖啡。", "她在图书馆看书。"]
THAI = ["ฉันดื่มกาแฟทุกเช้า", "เธออ่านหนังสืออยู่ในห้องสมุด"]
KOREAN = ["나는 매일 아침 커피를 마신다.", "그녀는 도서관에서 책을 읽고 있다."]
GERMAN = ["Ich trinke jeden Morgen Kaffee.", "Donaudampfschifffahrtsgesellschaftskapitän!"]


@pytest.fixture
def _without_mecab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sacrebleu.tokenizers.tokenizer_ja_mecab.MeCab", None)


@pytest.mark.parametrize(
    ("lines", "script"),
    [
        (JAPANESE, "Japanese"),
        (CHINESE, "Chinese"),
        (THAI, "Thai"),
        (KOREAN, None),
        (GERMAN, None),
        ([" ".join(line) for line in JAPANESE], None),  # split into words already
        ([*GERMAN * 3, JAPANESE[0]], None),
        ([], None),
        (["", " "], None),
    ],
)
def test_text_without_blanks_is_recognised(lines: list[str], script: str | None) -> None:
    assert unspaced_script(lines) == script


@pytest.mark.parametrize(
    ("lines", "language", "tokenize", "expected"),
    [
        (JAPANESE, "ja", None, ("ja-mecab", True, "")),
        (JAPANESE, "jpn", None, ("ja-mecab", True, "")),
        (JAPANESE, None, None, ("ja-mecab", True, "its language not given")),
        (JAPANESE, "de", None, ("ja-mecab", True, "given as German")),
        (JAPANESE, "ja", "13a", ("13a", True, "a line as one word")),
        (JAPANESE, None, "char", ("char", True, "")),
        (CHINESE, "zh_Hant", None, ("zh", True, "")),
        (CHINESE, None, None, ("zh", True, "its language not given")),
        (THAI, "th", None, ("char", False, "tokenizer `char`")),
        (KOREAN, "ko", None, ("ko-mecab", False, "")),
        (KOREAN, None, None, (None, False, "")),
        (GERMAN, "de", None, (None, False, "")),
    ],
)
def test_the_tokenizer_follows_language_and_text(
    lines: list[str], language: str | None, tokenize: str | None, expected: tuple[str | None, bool, str]
) -> None:
    how = splitting([lines], language, tokenize)
    assert (how.bleu, how.ter_by_character) == expected[:2]
    assert (expected[2] in how.bleu_notice) if how.bleu_notice else not expected[2]
    assert (how.ter_notice is None) == (lines in (KOREAN, GERMAN))


def test_scores_of_text_without_blanks_tell_good_from_bad() -> None:
    good, bad = [line.replace("我", "你") for line in CHINESE], ["这是苹果。", "天气好。"]
    scores = [evaluate(outputs, [CHINESE]) for outputs in (good, bad)]
    bleu, _, ter = zip(*scores, strict=True)
    assert bleu[0].value > 50 > bleu[1].value
    assert ter[0].value < 20 < ter[1].value
    assert "tok:zh" in bleu[0].signature
    assert "norm:yes" in ter[0].signature


@pytest.mark.usefixtures("_without_mecab")
def test_a_tokenizer_that_is_missing_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(MissingTokenizerError, match=r"`ja-mecab` is not installed: pip install 'ziggurat-mt\[ja\]'"):
        evaluate(JAPANESE, [JAPANESE], target_language="ja")
    assert [score.name for score in evaluate(JAPANESE, [JAPANESE], metrics=["chrf"], target_language="ja")] == ["chrF2"]


@pytest.mark.parametrize(
    ("code", "main"), [("ja", "ja"), ("ja_JP", "ja"), ("jpn", "ja"), ("cmn-Hans", "zh"), ("qhi", "qhi"), ("fre", "fr")]
)
def test_languages_have_several_codes(code: str, main: str) -> None:
    assert main_language(code) == main
    check_language_code(code, "--language")


@pytest.mark.parametrize(
    ("code", "meant"), [("jaa", "`ja` (Japanese)"), ("japanese", "`ja` (Japanese)"), ("Germn", "`de` (German)")]
)
def test_an_unknown_language_gets_the_nearest_one(code: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_language_code(code, "--language")
    assert meant in str(caught.value)
    with pytest.raises(ConfigError, match=r"affects a score\. It takes codes"):
        check_language_code("xx", "--language")


@pytest.mark.parametrize(
    ("code", "proposed"),
    [
        *[(code, None) for code in ("en", "EN", "en_US", "zh-Hant", "eng", "gsw", "qlo")],
        ("english", "`en` (English)"),
        ("German", "`de` (German)"),
        ("chinese-simplified", "`zh` (Chinese)"),
        ("xx", ""),
        ("klingonese", ""),
    ],
)
def test_names_that_are_not_codes_get_a_warning(code: str, proposed: str | None) -> None:
    found = language_doubt(code, "data.source_language")
    assert bool(found) == (proposed is not None)
    if proposed is not None:
        assert str(found).startswith(f"`data.source_language: {code}` is not an ISO 639 language code")
        assert ("did you mean" in str(found)) == bool(proposed)
        assert proposed in str(found)
