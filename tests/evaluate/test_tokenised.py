from __future__ import annotations

import sys

import pytest
import sacrebleu

from ziggurat.evaluate.scores import check_language, compound_split_bleu, split_compounds, tokenised_bleu
from ziggurat.system.errors import ConfigError, DataError

HYPOTHESES = [
    "Das Rich-Text-Format ist gut-bekannt.",
    "Er sagte „ja“ – heute, nicht morgen!",
    "Das ist ein Haus, sagt er.",
]
REFERENCES = [
    "Das Rich-Text-Blatt ist gut-bekannt.",
    'Er sagte "ja" - heute und nicht morgen!',
    "Das ist ein Haus, sagt er.",
]
LAST = "Das ist ein Haus , sagt er ."


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("rich-text format", "rich ##AT##-##AT## text format"),
        ("Stratford-upon-Avon", "Stratford ##AT##-##AT## upon ##AT##-##AT## Avon"),
        ("a-b-c", "a ##AT##-##AT## b-c"),  # perl's s///g does not overlap
        ("a - b -c d- --", "a - b -c d- --"),
        ("a--b", "a ##AT##-##AT## -b"),
        ("", ""),
    ],
)
def test_compounds_are_split_as_the_perl_expression_does(line: str, wanted: str) -> None:
    assert split_compounds(line) == wanted


def bleu(hypotheses: list[str], references: list[str]) -> float:
    metric = sacrebleu.BLEU(tokenize="none", smooth_method="none", force=True)
    return float(metric.corpus_score(hypotheses, [references]).score)


def test_tokenised_bleu_counts_moses_tokens() -> None:
    tokenised = ["Das Rich-Text-Format ist gut-bekannt .", "Er sagte „ ja “ – heute , nicht morgen !", LAST]
    reference = [
        "Das Rich-Text-Blatt ist gut-bekannt .",
        "Er sagte &quot; ja &quot; - heute und nicht morgen !",
        LAST,
    ]
    score = tokenised_bleu(HYPOTHESES, [REFERENCES], language="de")
    assert score.value == pytest.approx(bleu(tokenised, reference), abs=1e-12)
    assert (score.name, score.sentences, score.comparable) == ("tokenised BLEU", 3, False)


def test_compound_split_bleu_replaces_punctuation_and_splits() -> None:
    at = "##AT##-##AT##"
    prepared = [
        f"Das Rich {at} Text {at} Format ist gut {at} bekannt .",
        "Er sagte „ ja &quot; – heute , nicht morgen !",  # the Perl script leaves „ and – alone
        LAST,
    ]
    reference = [
        f"Das Rich {at} Text {at} Blatt ist gut {at} bekannt .",
        "Er sagte &quot; ja &quot; - heute und nicht morgen !",
        LAST,
    ]
    score = compound_split_bleu(HYPOTHESES, [REFERENCES])
    assert score.value == pytest.approx(bleu(prepared, reference), abs=1e-12)
    assert score.value > tokenised_bleu(HYPOTHESES, [REFERENCES], language="de").value > 0


def test_signatures_say_that_nothing_may_be_compared() -> None:
    tokenised = tokenised_bleu(HYPOTHESES, [REFERENCES], language="de", confidence=True)
    split = compound_split_bleu(HYPOTHESES, [REFERENCES], lowercase=True)
    for score in (tokenised, split):
        assert score.signature.startswith("NOT-comparable-with-sacreBLEU|nrefs:1|")
        assert "smooth:none" in score.signature
        assert "|sacremoses:" in score.signature
    assert "|tok:moses-de|" in tokenised.signature
    assert "|bs:1000|seed:12345|" in tokenised.signature
    assert "|tok:moses-de+unicode-punctuation+compound-split|" in split.signature
    assert "|case:lc|" in split.signature


def test_several_references_and_unequal_lines() -> None:
    both = tokenised_bleu(HYPOTHESES, [REFERENCES, HYPOTHESES], language="de")
    assert both.value == pytest.approx(100)
    assert "nrefs:2" in both.signature
    with pytest.raises(DataError, match="3 of hypotheses, 1 of the reference"):
        compound_split_bleu(HYPOTHESES, [REFERENCES[:1]])


@pytest.mark.parametrize("score", [tokenised_bleu, compound_split_bleu])
@pytest.mark.parametrize("language", ["xx", "german", "DE", ""])
def test_a_language_without_rules_is_refused(score, language: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=f"no rules for language '{language}'; it knows as, .*, de, .*, ja, .*zh"):
        score(HYPOTHESES, [REFERENCES], language=language)


def test_every_language_that_is_listed_works() -> None:
    with pytest.raises(ConfigError) as error:
        check_language("xx")
    for language in str(error.value).partition("it knows ")[2].split(", "):
        check_language(language)
    for language in ("cs", "yue", "ko"):
        assert f"moses-{language}|" in tokenised_bleu(["A b."], [["A b."]], language=language).signature


@pytest.mark.parametrize("score", [tokenised_bleu, compound_split_bleu])
def test_the_message_for_a_missing_tokeniser_names_the_extra(monkeypatch: pytest.MonkeyPatch, score) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    monkeypatch.delitem(sys.modules, "sacremoses.corpus", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'ziggurat-mt\[tokenised\]'"):
        score(HYPOTHESES, [REFERENCES], language="de")
