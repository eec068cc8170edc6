"""The search's features through a translator: text in, text out."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import sacrebleu
import torch
from test_hostile_input import HOSTILE

from tests.translate.doubles import CopyModel
from ziggurat.config import DecodingConfig, MaxLengthConfig
from ziggurat.data.subword import SentencePieceTokenizer
from ziggurat.data.vocabulary import VocabularyTokenizer
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.system.errors import ConfigError, DataError
from ziggurat.translate.assembly import mean_chrf
from ziggurat.translate.results import Translation, TranslationWarning
from ziggurat.translate.terms import Terms, read_constraints, read_terminology, unmet
from ziggurat.translate.translator import Translator

TEXTS = ["A dog runs!", "The little house stands by the river.", "", "Where is the old bridge?", "17 apples;"]
SHORT: dict[str, Any] = {"max_length": MaxLengthConfig(ratio=1.0, extra=6)}


@pytest.fixture
def translator(tiny_model: Seq2Seq, tokenizer: SentencePieceTokenizer) -> Translator:
    return Translator(tiny_model, tokenizer, tokenizer, DecodingConfig(min_length=0, **SHORT))


@pytest.fixture(autouse=True)
def without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TranslationWarning)
        yield


def are_same(one: list[Translation], other: list[Translation]) -> bool:
    """Return whether both are equal up to the rounding of sums."""
    ours = [h for translation in one for h in translation.hypotheses]
    theirs = [h for translation in other for h in translation.hypotheses]
    scores = pytest.approx([h.score for h in theirs], abs=1e-9)
    return [h.tokens for h in ours] == [h.tokens for h in theirs] and [h.score for h in ours] == scores


def tokens_of(translations: list[Translation]) -> list[list[str]]:
    return [t.hypotheses[0].tokens for t in translations]


@pytest.mark.slow
def test_samples_depend_on_seed_and_line_only(translator: Translator) -> None:
    drawing: dict[str, Any] = {"search": "sample", "temperature": 1.3, "top_k": 40}
    whole = translator.translate(TEXTS, seed=3, **drawing)
    assert are_same(whole, list(translator.translate_stream(TEXTS, window=2, seed=3, batch_tokens=9, **drawing)))
    assert are_same(whole[3:], translator.translate(TEXTS[3:], first=3, seed=3, **drawing))
    assert are_same(whole[3:], list(translator.translate_stream(TEXTS[3:], first=3, seed=3, **drawing)))
    others = [tokens_of(translator.translate(TEXTS, **changes, **drawing)) for changes in ({"seed": 4}, {"first": 1})]
    assert tokens_of(whole) not in others
    three = translator.translate(TEXTS[:2], seed=3, n_best=3, **drawing)
    assert [len(t.hypotheses) for t in three] == [3, 3]
    of_three = [h.tokens for h in three[0].hypotheses]
    assert whole[0].hypotheses[0].tokens in of_three, "more samples do not change the first"
    many = translator.translate([TEXTS[0]] * 20, seed=3, **drawing)
    assert len({tuple(tokens) for tokens in tokens_of(many)}) > 5


def test_samples_of_a_long_line_differ_from_part_to_part(translator: Translator) -> None:
    line = " ".join([TEXTS[0]] * 8)
    (found,) = translator.translate([line], search="sample", max_source_pieces=9, max_length=MaxLengthConfig(extra=3))
    assert found.parts > 4
    again = translator.translate([line], search="sample", max_source_pieces=9, max_length=MaxLengthConfig(extra=3))
    assert are_same(again, [found])
    alone = tokens_of(translator.translate([TEXTS[0]] * 1, search="sample"))
    assert found.hypotheses[0].tokens != alone[0] * found.parts


def test_mbr_returns_the_samples_most_like_all_others(translator: Translator) -> None:
    (found,) = translator.translate(TEXTS[:1], search="sample", mbr=6, n_best=6)
    texts = [h.text for h in found.hypotheses]
    metric = sacrebleu.CHRF()
    plain = [sum(metric.sentence_score(a, [b]).score for b in texts) / 6 for a in texts]
    assert [h.score for h in found.hypotheses] == pytest.approx(plain)
    ranked = [(not h.finished, -h.score) for h in found.hypotheses]
    assert ranked == sorted(ranked)
    (best,) = translator.translate(TEXTS[:1], search="sample", mbr=6)
    assert best.hypotheses == found.hypotheses[:1]


def test_mean_chrf_against_a_double_loop() -> None:
    texts = ["a dog runs", "the dog runs", "a dog runs", "", "seventeen apples"]
    metric = sacrebleu.CHRF()
    plain = [math.fsum(metric.sentence_score(a, [b]).score for b in texts) / len(texts) for a in texts]
    assert mean_chrf(texts) == pytest.approx(plain)
    assert mean_chrf(["x"]) == [100.0]


def test_translations_begin_with_their_prefix(translator: Translator, tokenizer: SentencePieceTokenizer) -> None:
    prefixes = ["Where is", "", "A", "Two children, three books", "\0"]
    free = translator.translate(TEXTS)
    found = translator.translate(TEXTS, prefixes=prefixes)
    streamed = list(translator.translate_stream(TEXTS, window=2, prefixes=iter(prefixes)))
    assert are_same(streamed, found)
    for text, prefix, bound, unbound in zip(TEXTS, prefixes, found, free, strict=True):
        ids = tokenizer.encode([prefix.replace("\0", " ")])[0] if text and prefix.strip("\0") else []
        assert bound.hypotheses[0].tokens[: len(ids)] == tokenizer.pieces(ids)
        if not ids:
            assert bound.text == unbound.text
    forced = translator.translate(
        TEXTS[:1], prefixes=["Two children, three books"], max_length=MaxLengthConfig(limit=1)
    )
    assert forced[0].text.startswith("Two children, three books")


@pytest.mark.parametrize("count", [1, 7])
def test_prefixes_and_constraints_must_pair_up_with_lines(translator: Translator, count: int) -> None:
    for extras in ({"prefixes": ["a"] * count}, {"constraints": [["a"]] * count}):
        with pytest.raises(DataError, match="must pair up"):
            translator.translate(TEXTS, **extras)
        with pytest.raises(DataError, match="must pair up"):
            list(translator.translate_stream(TEXTS, window=2, **extras))


def lacking(phrases: list[str], text: str) -> list[str]:
    """Return the phrases that occur as whole words in `text` less often than given, using the standard library."""
    return [
        phrase
        for number, phrase in enumerate(phrases)
        if len(re.findall(rf"(?<!\w){re.escape(phrase)}(?!\w)", text)) <= phrases[:number].count(phrase)
    ]


def test_constraints_are_met_or_named(translator: Translator) -> None:
    wanted = [["bridge", "three books"], [], ["dog"], ["ᏣᎳᎩ meadow"], ["the", "the"]]
    found = translator.translate(TEXTS, constraints=wanted)
    for phrases, translation in zip(wanted, found, strict=True):
        assert translation.hypotheses[0].unmet_constraints == (lacking(phrases, translation.text) if phrases else None)
    # The search inserted all of them; an untrained model may continue where a word should end.
    assert all(found[line].text.count(p) >= wanted[line].count(p) for line in (0, 3, 4) for p in wanted[line])
    assert "unmet_constraints" not in json.loads(found[1].to_json())
    streamed = list(translator.translate_stream(TEXTS, window=2, constraints=wanted, batch_sentences=2))
    assert [t.text for t in streamed] == [t.text for t in found]
    assert are_same(translator.translate([TEXTS[1]]), [found[1]]), "a line without constraints is as ever"
    (banned,) = translator.translate(TEXTS[:1], constraints=[["dog"]], banned=["dog"])
    assert banned.hypotheses[0].unmet_constraints == ["dog"]
    assert translator.notices["unmet"] >= 1


def test_terms_of_the_source_appear_in_the_output(translator: Translator) -> None:
    terms = {"dog": "apples", "house": "old bridge", "hous": "never", "river.": "meadow"}
    found = translator.translate(TEXTS, terminology=terms)
    assert "apples" in found[0].text
    assert "old bridge" in found[1].text
    assert "meadow" in found[1].text
    assert [t.hypotheses[0].unmet_constraints is None for t in found] == [False, False, True, True, True]
    assert found[1].hypotheses[0].unmet_constraints == lacking(["old bridge", "meadow"], found[1].text)
    sentence = "A dog runs over the green meadow!"
    (long,) = translator.translate([f"{TEXTS[1]} {sentence}"], terminology=terms, max_source_pieces=25)
    assert long.parts == 2
    assert all(term in long.text for term in ("old bridge", "meadow", "apples"))


def test_terms_are_whole_words_and_the_longest_wins() -> None:
    terms = Terms.of({"house": "A", "house boat": "B", "C++": "C", "家": "D", "Bus": "E"})
    assert terms.wanted("a house boat, a house, houses, C++! 大家好 Busse bus") == ["B", "A", "C", "D"]
    assert Terms.of({}).wanted("a") == []
    with pytest.raises(ConfigError, match="empty"):
        Terms.of({"a": " "})


def test_files_of_terms_and_constraints() -> None:
    assert read_terminology(["a b\tc", "", "d \t e"], "terms") == {"a b": "c", "d": "e"}
    assert list(read_constraints(["a\t b c \t", ""])) == [["a", "b c"], []]
    for lines, message in ((["a"], "terms, line 1: not a source term"), (["a\tb", "a\tc"], "line 2: 'a' has another")):
        with pytest.raises(DataError, match=message):
            read_terminology(lines, "terms")


def test_banned_phrases_and_repetition_in_text(translator: Translator, copying: Translator) -> None:
    assert "dog" in copying.translate(TEXTS)[0].text
    assert "dog" not in copying.translate(TEXTS, banned=["green", "dog"])[0].text
    for found in translator.translate(TEXTS, no_repeat_ngram_size=1, min_length=5):
        assert len(set(found.hypotheses[0].tokens)) == len(found.hypotheses[0].tokens)
    with pytest.raises(ConfigError, match=r"`decoding\.banned`: ' ' is blank"):
        translator.translate(TEXTS, banned=[" "])


def test_alignments_are_the_models_attention(translator: Translator, tokenizer: SentencePieceTokenizer) -> None:
    model = translator.model
    source = [tokenizer.tags["<bt>"], *tokenizer.encode(TEXTS[:1])[0], tokenizer.eos]
    (found,) = translator.translate(TEXTS[:1], tag="<bt>", alignments=True)
    best = found.hypotheses[0]
    assert best.alignment is not None
    assert best.alignment.source_tokens == tokenizer.pieces(source)
    ids = torch.tensor([source])
    state = model.start(1, 1, keep_attention=True)
    model.admit(model.encode(ids, torch.ones_like(ids, dtype=torch.bool)), state)
    produced = [next(t for t in range(tokenizer.size) if tokenizer.pieces([t]) == [piece]) for piece in best.tokens]
    with torch.no_grad():
        for place, token in enumerate([tokenizer.bos, *produced][: len(produced)]):
            model.step(torch.tensor([[token]]), state)
            assert state.cross_attention is not None
            weights = state.cross_attention[0, 0].tolist()
            assert best.alignment.soft[place] == pytest.approx(weights, abs=1e-9)
            own = range(1, len(source) - 1)
            assert best.alignment.hard[place] == max(own, key=weights.__getitem__)
    record = json.loads(found.to_json())
    assert record["alignment"]["hard"] == best.alignment.hard
    assert record["quality"] == pytest.approx(best.log_probability / len(best.token_log_probabilities))
    assert "alignment" not in json.loads(translator.translate(TEXTS[:1])[0].to_json())


def test_alignments_of_the_parts_of_a_long_line_are_joined(translator: Translator) -> None:
    (found,) = translator.translate([" ".join(TEXTS[:2])], alignments=True, max_source_pieces=15)
    best = found.hypotheses[0]
    assert found.parts == 3
    assert best.alignment is not None
    assert len(best.alignment.soft) == len(best.alignment.hard) == len(best.tokens)
    assert {len(row) for row in best.alignment.soft} == {len(best.alignment.source_tokens)}
    assert [sum(row) for row in best.alignment.soft] == pytest.approx([1.0] * len(best.tokens))


class Attentive(CopyModel):
    """A model that copies, and attends to the copied token; an unknown token stays unknown."""

    def step(self, tokens: torch.Tensor, state: Any) -> torch.Tensor:
        width = max(map(len, state.rows))
        places = torch.tensor(state.positions).clamp(max=width - 1)
        scores = super().step(tokens, state)
        weights = torch.nn.functional.one_hot(places, width).double()
        state.cross_attention = weights[:, None].expand(-1, tokens.shape[1], -1)
        return scores


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("the Zyx runs", "the Zyx runs"),
        ("Zyx", "Zyx"),
        ("the Zyx  Abc house", "the Zyx Abc house"),
        ("ho@@ use Zyx", "house Zyx"),
    ],
)
def test_unknown_words_are_copied(source: str, wanted: str) -> None:
    vocabulary = VocabularyTokenizer(b"the\nho@@\nuse\nhouse\nruns\n")
    model: Any = Attentive(vocabulary.size, vocabulary.eos)
    translator = Translator(model, vocabulary, vocabulary, DecodingConfig(beam_size=2))
    source = " ".join(source.split())
    assert "<unk>" not in translator.translate([source])[0].text
    assert "<unk>" in translator.translate([source], unknown=True)[0].text
    (found,) = translator.translate([source], replace_unknown=True)
    assert found.text == wanted
    assert "<unk>" in found.hypotheses[0].tokens
    assert found.hypotheses[0].alignment is None


def test_features_that_need_attention_are_refused_without_it(copying: Translator) -> None:
    for changes in ({"alignments": True}, {"replace_unknown": True}):
        with pytest.raises(ConfigError, match="need attention weights"):
            copying.translate(["A dog"], **changes)


def test_diverse_groups_give_different_translations(translator: Translator) -> None:
    settings: dict[str, Any] = {"beam_size": 4, "n_best": 4, "diverse_groups": 4}
    alike = translator.translate(TEXTS[:1], diverse_strength=0.0, **settings)[0]
    different = translator.translate(TEXTS[:1], diverse_strength=9.0, **settings)[0]
    assert len({h.tokens[0] if h.tokens else "" for h in alike.hypotheses}) == 1
    assert len({h.tokens[0] if h.tokens else "" for h in different.hypotheses}) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.5}, "`temperature`: for sampling only"),
        ({"mbr": 4}, "`mbr`: for sampling only"),
        ({"search": "sample", "mbr": 1}, "nothing to choose from"),
        ({"search": "sample", "mbr": 2, "n_best": 3}, "larger than `mbr`"),
        ({"search": "sample", "diverse_groups": 2}, "`diverse_groups` is for `search: beam`"),
        ({"search": "sample", "prune": 2.0}, "`prune` is for `search: beam`"),
        ({"diverse_groups": 3}, "must divide `beam_size`"),
        ({"search": "sample", "terminology": {"a": "b"}}, "need `decoding.search: beam`"),
        ({"beam_size": 1, "constraints": []}, "`decoding.beam_size` of at least 2"),
        ({"diverse_groups": 2, "terminology": {"a": "b"}}, "do not go with `decoding.diverse_groups`"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_at_once(
    translator: Translator, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        translator.translate([], **changes)
    with pytest.raises(ConfigError, match=message):
        translator.translate_stream([], **changes)


MODES: dict[str, dict[str, Any]] = {
    "sample": {"search": "sample", "top_p": 0.9, "epsilon": 0.001},
    "mbr": {"search": "sample", "mbr": 2},
    "diverse": {"diverse_groups": 2, "n_best": 2},
    "rules": {"no_repeat_ngram_size": 2, "repetition_penalty": 1.2, "prune": 3.0, "eos_margin": 5.0, "banned": ["dog"]},
    "alignments": {"alignments": True, "replace_unknown": True},
    "terminology": {"terminology": {"dog": "river", "ქართული": "bridge", "\\n": "&amp;"}},
    "itself": {},  # every line is its own prefix and constraint
}


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_hostile_lines_give_one_line_each_in_every_mode(
    tiny_model: Seq2Seq, tokenizer: SentencePieceTokenizer, mode: str, several: bool
) -> None:
    models = [tiny_model] * 2 if several else tiny_model
    short = MaxLengthConfig(ratio=0.0, extra=3)
    decoding = DecodingConfig(beam_size=2, max_source_pieces=40, max_length=short, batch_tokens=500)
    translator = Translator(models, tokenizer, tokenizer, decoding)
    lines = [text[:60] for text in HOSTILE.values()]
    extras: dict[str, Any] = dict(MODES[mode])
    if mode == "itself":
        extras = {"prefixes": [line[:9] for line in lines], "constraints": [[line[-9:]] for line in lines]}
    found = list(translator.translate_stream(lines, window=7, **extras))
    assert len(found) == len(lines)
    for translation in found:
        for hypothesis in translation.hypotheses:
            assert len(hypothesis.text.splitlines()) <= 1
            assert "\0" not in hypothesis.text
        assert len(translation.to_json().splitlines()) == 1


def test_a_constraint_is_met_by_whole_words_only(tokenizer: SentencePieceTokenizer) -> None:
    (dog,), (dogs,) = (tokenizer.encode([text]) for text in ("A dog", "A dogged"))
    assert unmet(["dog"], "A dog", dog, tokenizer) == []
    assert unmet(["dog"], "A dogged", dogs, tokenizer) == ["dog"]
    assert unmet(["dog"], "A dogged", [*dog, *dogs], tokenizer) == ["dog"]  # whatever the pieces are
    assert unmet(["犬"], "白犬が", [], tokenizer) == []
    assert unmet(["dog", "dog"], "A dog", dog, tokenizer) == ["dog"]
    assert unmet(["dog", "dog"], "A dog A dog", [*dog, *dog], tokenizer) == []
