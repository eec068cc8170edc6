"""Language identification: confidences, short text, languages that py3langid does not know."""

from __future__ import annotations

import pytest
from py3langid.langid import MODEL_FILE, LanguageIdentifier

from ziggurat.data.cleaning.filters import confidences, known_language, likeliest
from ziggurat.system.errors import ConfigError

TEXTS = [
    "Das Haus steht am Fluss, und der Hund schläft vor der Tür.",
    "The house is near the river, and the dog sleeps in front of the door.",
    "La maison est près de la rivière et le chien dort devant la porte.",
    "Дом стоит у реки, и собака спит перед дверью.",
]


@pytest.mark.slow
def test_confidences_are_those_of_py3langid() -> None:
    theirs = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    wanted = [dict(theirs.rank(text))["de"] for text in TEXTS]
    found = confidences(TEXTS, "de")
    assert found.tolist() == wanted
    assert found[0] > 0.9 > 0.01 > found[1:].max()
    assert likeliest([*TEXTS, "12 !"]) == ["de", "en", "fr", "ru", None]


def test_text_in_another_language_has_no_confidence() -> None:
    found = confidences(TEXTS, "de")
    assert found[0] > 0.9 > 0.01 > found[1:].max()


def test_short_text_passes() -> None:
    assert confidences(["", "123 %", "OK", "Oui"], "de", min_letters=4).tolist() == [1.0, 1.0, 1.0, 1.0]
    assert confidences(["Bonjour à tous"], "de", min_letters=12).max() < 1.0  # 12 letters
    assert confidences(["Bonjour à tous"], "de", min_letters=13).tolist() == [1.0]


def test_only_the_beginning_of_long_text_is_read() -> None:
    text = TEXTS[0] * 40
    assert confidences([text + TEXTS[1] * 200], "de") == confidences([text], "de")


@pytest.mark.parametrize(("code", "name"), [("de", "de"), ("deu", "de"), ("pt-BR", "pt"), ("zh_Hant", "zh")])
def test_codes_of_the_configuration(code: str, name: str) -> None:
    assert known_language(code, "source") == name


def test_an_unknown_language_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"languages: py3langid does not know the target language `qlo`; .*de"):
        known_language("qlo", "target")
