"""The n best next words: the most probable ones under the model, however many pieces they have."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest

from tests.translate.doubles import TableScorer, random_log_probabilities
from tests.translate.plain import BOS, EOS
from tests.vocabulary import SENTENCES
from ziggurat.config import DecodingConfig
from ziggurat.data.subword import SentencePieceTokenizer
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.system.errors import DataError
from ziggurat.translate.call import ContinuousTranslation
from ziggurat.translate.ctranslate2 import Call, SearchResult, by_next_word, heads_of
from ziggurat.translate.interface import tells_alignments
from ziggurat.translate.options import TranslateOptions
from ziggurat.translate.results import Hypothesis
from ziggurat.translate.search import search
from ziggurat.translate.settings import RuleOptions, SearchSettings, Sentence
from ziggurat.translate.text_lines import begins_word, boundary_ids, ends_in_word, first_word
from ziggurat.translate.translator import Translator

BOUNDARY = (EOS, 2, 3)
GOES_ON = (4, 5)
LONGEST = 3
WORDS = TranslateOptions(6, next_words=True)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("prefix", [(), (2,), (3, 4)])
def test_words_are_ranked_by_their_probability(seed: int, complete: bool, prefix: tuple[int, ...]) -> None:
    """Compare with every word of up to three tokens."""
    table = random_log_probabilities(seed, 6, 1.5)
    expected = {}
    for length in range(1, LONGEST + 1):
        for word in product((2, 3, *(() if complete else GOES_ON)), *[GOES_ON] * (length - 1)):
            tokens = (*prefix, *word)
            path = [table(0, tokens[:i])[token] for i, token in enumerate(tokens)]
            end = math.log(sum(math.exp(table(0, tokens)[token]) for token in BOUNDARY if token != BOS))
            expected[tokens] = math.fsum([*path, end])
    rules = RuleOptions(boundary=BOUNDARY, one_word=True)
    settings = SearchSettings(64, 5, BOS, EOS, (BOS,), rules)
    sentence = Sentence([0], len(prefix) + LONGEST, 0, prefix, complete=complete)
    (found,) = search(TableScorer(table, 6), [sentence], settings)
    best = sorted(expected, key=lambda tokens: -expected[tokens])[:5]
    assert [tuple(each.tokens) for each in found] == best
    assert [each.score for each in found] == pytest.approx([expected[tokens] for tokens in best], abs=1e-9)


def test_where_words_end(tokenizer: SentencePieceTokenizer) -> None:
    for piece in ("▁", "▁dog", "▁42", "</s>", ".", "-", "'s", "…", "狗", "ひ", "ท"):
        assert begins_word(piece), piece
    for piece in ("s", "Dog", "é", "7", "\u0301a", "\u0e31", "<0xE2>", "собака"):
        assert not begins_word(piece), piece
    assert [ends_in_word(piece) for piece in ("▁dog", "7", "é", "▁(", "-", "▁", "<0xE2>")] == 3 * [True] + 4 * [False]
    assert first_word(["▁d", "og", "s", "▁run"]) == ("▁d", "og", "s")
    assert first_word(["s", "▁run"]) == ("s",)
    assert first_word([]) == ()
    ids = boundary_ids(tokenizer)
    assert tokenizer.eos in ids
    assert 0 < len(ids) < tokenizer.size


@pytest.fixture
def untrained(tokenizer: SentencePieceTokenizer, tiny_model: Seq2Seq) -> Translator:
    decoding = DecodingConfig.model_validate({"beam_size": 2, "max_length": {"ratio": 0.0, "extra": 12}})
    return Translator(tiny_model, tokenizer, tokenizer, decoding)


def next_words(translator: Translator, hypotheses: list[Hypothesis], prefix: str) -> list[str]:
    """Return what follows the prefix in each hypothesis, up to the end of the first word."""
    (begun,) = translator.target_tokenizer.encode([prefix])
    assert all(hypothesis.text.startswith(prefix) for hypothesis in hypotheses)
    return ["".join(first_word(hypothesis.tokens[len(begun) :])) for hypothesis in hypotheses]


def test_translations_differ_in_the_next_word(untrained: Translator) -> None:
    texts, prefixes = [*SENTENCES[:2], ""], ["the dog", "", ""]
    found = untrained.translate(texts, replace(WORDS, complete=True), prefixes=prefixes)
    assert found[2].text == ""
    for each, prefix in zip(found[:2], prefixes, strict=False):
        words = next_words(untrained, each.hypotheses, prefix)
        assert len(set(words)) == len(words) == 6
        assert all(begins_word(word) for word in words if prefix), "the prefix ends with a whole word"
        usual = untrained.translate([each.source], prefixes=[prefix], n_best=6, beam_size=6)[0]
        assert len(set(next_words(untrained, usual.hypotheses, prefix))) < 6, "or there would be nothing to see"
    bracket = untrained.translate(texts[:1], TranslateOptions(16, prefix="the (", complete=True, next_words=True))[0]
    assert not all(begins_word(word) for word in next_words(untrained, bracket.hypotheses, "the ("))
    inside = untrained.translate(texts[:1], replace(WORDS, prefix="the d"))[0]
    assert not all(begins_word(word) for word in next_words(untrained, inside.hypotheses, "the d"))


def test_a_whole_word_is_not_continued(untrained: Translator) -> None:
    live = {whole: ContinuousTranslation(untrained, slots=4, complete=whole) for whole in (False, True)}
    said: dict[bool, list[str]] = {False: [], True: []}
    for whole, running in live.items():
        for text in SENTENCES[:6]:
            running.add(text, "the d")
        while running.lines:
            said[whole] += [translation.text for translation in running.step().values()]
    rest = {whole: [text.removeprefix("the d") for text in texts] for whole, texts in said.items()}
    assert any(text[:1].isalnum() for text in rest[False]), "or there would be nothing to see"
    assert not any(text[:1].isalnum() for text in rest[True])


def test_results_of_ctranslate2_are_distinguished_by_their_words() -> None:
    def found(*said: str) -> list[SearchResult]:
        return [SearchResult(each.split(), -1.0, ended=not each.endswith("~")) for each in said]

    call = Call(DecodingConfig(n_best=3), TranslateOptions(next_words=True), ["▁a"])
    whole = call._replace(options=replace(call.options, complete=True))
    pieces = found("▁a s ~", "▁a", "▁a ▁d ~", "▁a . ~")
    next_pieces = [each._replace(pieces=[piece for piece in each.pieces if piece != "~"]) for each in pieces]
    assert heads_of(next_pieces, call) == [["▁a", "s"], ["▁a", "▁d"], ["▁a", "."]]
    assert heads_of(next_pieces, whole) == [["▁a", "▁d"], ["▁a", "."]]
    assert heads_of(next_pieces[:1], whole._replace(forced=[])) == [["▁a", "s"]]
    with pytest.raises(DataError, match="as a whole word"):
        heads_of(next_pieces[:2], whole)
    every = [[each] for each in found("▁a ▁d og", "▁a ▁d og ▁x", "▁a ▁d ot", "▁a ▁cat ▁x", "▁a s")]
    best = by_next_word(every, call, 3)
    assert [" ".join(each.pieces) for each in best] == ["▁a ▁d og", "▁a ▁d ot", "▁a ▁cat ▁x"]
    assert [(each.pieces, each.ended) for each in by_next_word(every[1:2], call, 2)] == [(["▁a", "▁d"], False)]


@pytest.mark.parametrize("options", [TranslateOptions(prefix="the dog"), replace(WORDS, prefix="the", complete=True)])
def test_options_apply_to_every_line_of_a_stream(untrained: Translator, options: TranslateOptions) -> None:
    whole = untrained.translate(SENTENCES[:3], options)
    stream = list(untrained.translate_stream(SENTENCES[:3], options, window=2))
    said = [[[hypothesis.text for hypothesis in each.hypotheses] for each in found] for found in (whole, stream)]
    assert said[0] == said[1]
    assert all(text.startswith(options.prefix) for each in said[1] for text in each)


def test_keywords_win_over_the_options_that_they_change(untrained: Translator) -> None:
    asked = TranslateOptions.of(TranslateOptions(n_best=8, alignments=True), {"n_best": 2, "alignments": False})
    assert asked.changes(untrained.decoding) == {"n_best": 2, "alignments": False}
    wide = TranslateOptions(n_best=2, decoding={"beam_size": 5})
    assert wide.changes(untrained.decoding) == {"n_best": 2, "beam_size": 5}
    assert replace(wide, constrained=True).changes(untrained.decoding)["beam_size"] == 5


def test_looking_for_alignments_counts_nothing(untrained: Translator) -> None:
    untrained.notices["unfinished"] = 3
    tells_alignments(untrained)
    assert dict(untrained.notices) == {"unfinished": 3}
