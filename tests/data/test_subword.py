from __future__ import annotations

import io
import json
import re
from collections import Counter
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from ziggurat.config.data import RegularisationConfig, SubwordConfig
from ziggurat.data.subword import (
    SentencePieceTokenizer,
    Tokenizer,
    copy_tokenizers,
    load_tokenizers,
    save_tokenizers,
)
from ziggurat.data.subword_training import existing_tokenizers, train_tokenizers
from ziggurat.data.vocabulary import VocabularyTokenizer
from ziggurat.system.errors import DataError

NOUNS = [
    *("the tower", "a brick", "the old river", "my sister", "some clay", "the engineer", "a lamp", "the winter"),
]
VERBS = ["is lower than", "has built", "carries", "remembers", "was newer than", "could not find", "shows"]
SENTENCES = [f"{a} {verb} {b}." for a in NOUNS for verb in VERBS for b in NOUNS]

ANY_TEXT = st.text(
    st.characters(exclude_categories=["Cs"]) | st.sampled_from("\u2581\ufdd0_ \t\u00a0<s>@"), max_size=30
)


def train(kind: str = "bpe", *, byte_fallback: bool = True, joint: bool = True, size: int = 420) -> Tokenizer:
    config = SubwordConfig.model_validate(
        {"kind": kind, "byte_fallback": byte_fallback, "joint": joint, "vocabulary_size": size}
    )
    return train_tokenizers(config, "none", ["<bt>"], lambda side: iter(SENTENCES))[0]


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train("bpe")


@pytest.fixture(scope="module")
def unigram() -> Tokenizer:
    return train("unigram")


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def tokenizer(request: pytest.FixtureRequest, bpe: Tokenizer, unigram: Tokenizer) -> Tokenizer:
    return {"bpe": bpe, "unigram": unigram}[request.param]


def raw_model(**options: object) -> bytes:
    """A model as others train it: other control ids, SentencePiece's own normalisation."""
    writer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES), model_writer=writer, minloglevel=2, hard_vocab_limit=False,
        **{"vocab_size": 120, "model_type": "bpe", **options},
    )  # fmt: skip
    return writer.getvalue()


def test_control_ids_are_fixed_and_tags_come_last(tokenizer: Tokenizer) -> None:
    assert (tokenizer.pad, tokenizer.unk, tokenizer.bos, tokenizer.eos) == (0, 1, 2, 3)
    assert tokenizer.tags == {"<bt>": tokenizer.size - 1}
    assert tokenizer.pieces([0, 1, 2, 3, tokenizer.size - 1]) == ["<pad>", "<unk>", "<s>", "</s>", "<bt>"]


@given(text=ANY_TEXT)
def test_round_trip_is_exact_for_any_text(bpe: Tokenizer, unigram: Tokenizer, text: str) -> None:
    """Decoding returns the normalised text, whatever it contains: U+2581, the escape, control names."""
    for tokenizer in (bpe, unigram):
        (ids,) = tokenizer.encode([text])
        wanted = " ".join(part for part in text.translate({9: " ", 10: " ", 13: " "}).split(" ") if part)
        assert tokenizer.decode(ids) == wanted
        assert not {tokenizer.pad, tokenizer.unk, tokenizer.bos, tokenizer.eos, *tokenizer.tags.values()} & {*ids}
        assert tokenizer.encode([wanted]) == [ids]


@pytest.mark.parametrize(
    "text", ["<s> a </s>", "<unk> <pad> <bt>", "<0x41>", "\u2581the \u2581tower", "\u2581", "a\0b"]
)
def test_text_never_becomes_a_control_id(tokenizer: Tokenizer, text: str) -> None:
    (ids,) = tokenizer.encode([text])
    assert min(ids) > 3
    assert max(ids) < tokenizer.tags["<bt>"]
    assert tokenizer.decode(ids) == text


def test_decode_drops_control_ids_and_line_ends(tokenizer: Tokenizer) -> None:
    (ids,) = tokenizer.encode(["the tower"])
    assert tokenizer.decode([2, tokenizer.tags["<bt>"], *ids, 3, 0, 0]) == "the tower"
    assert tokenizer.decode([]) == ""
    newline = next(i for i in range(tokenizer.size) if tokenizer.pieces([i]) == ["<0x0A>"])
    assert "\n" not in tokenizer.decode([*ids, newline, *ids])


def test_lone_surrogates_do_not_stop_translation(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(["a\ud800b"])[0]) == "a\ufffdb"


def test_empty_text_has_no_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(["", "  \t", "a"])[:2] == [[], []]


def test_training_is_deterministic() -> None:
    for kind in ("bpe", "unigram"):
        first, second = train(kind), train(kind)
        assert isinstance(first, SentencePieceTokenizer)
        assert isinstance(second, SentencePieceTokenizer)
        assert first.model == second.model


def test_impossible_size_is_refused_with_the_way_out() -> None:
    """The message uses our keys and a sufficient size; SentencePiece would name its own option."""
    way_out = r"data\.subword: no bpe model of 50 pieces.* alone are (\d+); raise data\.subword\.vocab"
    with pytest.raises(DataError, match=way_out) as refused:
        train(size=50)
    assert "--" not in str(refused.value)
    (enough,) = re.findall(way_out, str(refused.value))
    with pytest.raises(DataError, match=f" {enough}; raise"):
        train(size=int(enough) - 1)
    assert train(size=int(enough)).size >= int(enough)


def test_no_text_is_refused_with_a_message_of_the_package() -> None:
    with pytest.raises(DataError, match="there is no text to train it on"):
        train_tokenizers(SubwordConfig(), "none", [], lambda side: iter([]))


def test_the_sides_may_have_vocabularies_of_different_size() -> None:
    sizes = {"joint": False, "vocabulary_size": 420, "target_vocabulary_size": 380}
    config = SubwordConfig.model_validate(sizes)
    source, target = train_tokenizers(config, "none", [], lambda side: iter(SENTENCES))
    assert (source.size, target.size) == (420, 380)
    small = SubwordConfig.model_validate({**sizes, "target_vocabulary_size": 50})
    with pytest.raises(DataError, match=r"50 pieces for the target side.*raise data\.subword\.target_vocabulary_size"):
        train_tokenizers(small, "none", [], lambda side: iter(SENTENCES))


@pytest.mark.parametrize("wrong", [{"joint": True}, {"joint": False, "kind": "vocabulary", "source_vocabulary": "x"}])
def test_a_size_for_the_target_side_needs_a_separate_model(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="`target_vocabulary_size` needs two models to train"):
        SubwordConfig.model_validate({**wrong, "target_vocabulary_size": 400})


def test_errors_of_the_sample_are_not_swallowed() -> None:
    def broken() -> object:
        yield "a sentence"
        raise DataError("the file changed")

    with pytest.raises(DataError, match="the file changed"):
        train_tokenizers(SubwordConfig(vocabulary_size=300), "none", [], lambda side: broken())  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(("pad", "bos", "eos"), [(-1, 1, 2), (-1, -1, -1), (3, 1, 2)])
def test_existing_models_are_completed(pad: int, bos: int, eos: int) -> None:
    model = raw_model(pad_id=pad, unk_id=0, bos_id=bos, eos_id=eos)
    tokenizer = SentencePieceTokenizer(model, "none", ["<bt>", "<mono>"])
    size = sentencepiece.SentencePieceProcessor(model_proto=model).get_piece_size()
    wanted = [pad, bos, eos]
    free = iter(range(size, size + 3))
    assert [tokenizer.pad, tokenizer.bos, tokenizer.eos] == [i if i >= 0 else next(free) for i in wanted]
    assert tokenizer.size == size + wanted.count(-1) + 2
    assert list(tokenizer.tags.values()) == [tokenizer.size - 2, tokenizer.size - 1]
    assert tokenizer.pieces([tokenizer.pad, tokenizer.bos, tokenizer.eos]) == ["<pad>", "<s>", "</s>"]
    assert tokenizer.decode([tokenizer.bos, *tokenizer.encode(["the tower"])[0], tokenizer.eos]) == "the tower"


@pytest.mark.parametrize("eos", [-1, 2])
def test_control_names_that_text_can_spell_are_not_used(eos: int) -> None:
    """A model with `</s>` as a user-defined symbol would let text end a sentence."""
    model = raw_model(user_defined_symbols="</s>", unk_id=0, bos_id=1, eos_id=eos)
    tokenizer = SentencePieceTokenizer(model)
    assert tokenizer.eos == tokenizer.size - 1
    assert tokenizer.eos not in tokenizer.encode(["a </s> b"])[0]


@pytest.mark.parametrize("model", [b"", b"no model at all", b"\x00" * 50])
def test_files_that_are_no_models_are_refused(model: bytes) -> None:
    with pytest.raises(DataError, match="not a SentencePiece model"):
        SentencePieceTokenizer(model)


class TestSampling:
    settings = RegularisationConfig(alpha=0.2, nbest=16)

    def test_is_a_function_of_text_and_seed(self, tokenizer: Tokenizer) -> None:
        texts = SENTENCES[:20]
        first = tokenizer.sample(texts, range(20), self.settings)
        assert tokenizer.sample(texts[::-1], range(20)[::-1], self.settings)[::-1] == first
        assert tokenizer.sample(texts, range(1, 21), self.settings) != first

    def test_gives_back_the_text(self, tokenizer: Tokenizer) -> None:
        texts = [*SENTENCES[:50], "ünbekannte Zeichen \u2581 日本", ""]
        for ids, text in zip(tokenizer.sample(texts, range(len(texts)), self.settings), texts, strict=True):
            assert tokenizer.decode(ids) == text

    @pytest.mark.parametrize("byte_fallback", [True, False])
    @pytest.mark.parametrize(
        "model", [{}, {"user_defined_symbols": "<2de>,ow"}, {"normalization_rule_name": "nmt_nfkc_cf"}]
    )
    def test_without_dropout_is_the_models_own_segmentation(self, model: dict[str, str], byte_fallback: bool) -> None:
        tokenizer = SentencePieceTokenizer(raw_model(byte_fallback=byte_fallback, vocab_size=400, **model))
        texts = [*SENTENCES, "Zwölf  日本 <2de> The TOWER low", "ow ow", "日", "<unk>"]
        never = RegularisationConfig(alpha=1e-15)
        assert tokenizer.sample(texts, range(len(texts)), never) == tokenizer.encode(texts)

    def test_dropout_of_every_merge_leaves_characters(self, bpe: Tokenizer) -> None:
        (ids,) = bpe.sample(["the tower"], [1], RegularisationConfig(alpha=1.0))
        assert bpe.pieces(ids) == list("\u2581the\u2581tower")

    def test_dropout_rate_is_alpha(self, bpe: Tokenizer) -> None:
        """`is` after a blank needs at least one merge of `▁` and one of `is`: count how often the first is dropped."""
        (ids,) = bpe.encode(["a"])
        assert bpe.pieces(ids) == ["\u2581a"]
        draws = bpe.sample(["a"] * 4000, range(4000), RegularisationConfig(alpha=0.3))
        dropped = sum(len(draw) == 2 for draw in draws) / len(draws)
        assert abs(dropped - 0.3) < 0.03  # four standard deviations

    def test_unigram_draws_by_probability_to_the_alpha(self, unigram: Tokenizer) -> None:
        assert isinstance(unigram, SentencePieceTokenizer)
        text, alpha, draws = "the newer tower", 0.5, 4000
        processor = sentencepiece.SentencePieceProcessor(model_proto=unigram.model)
        best = processor.nbest_encode(text, nbest_size=4, out_type=int)
        weights = [2.718281828 ** (alpha * sum(processor.get_score(i) for i in ids)) for ids in best]
        settings = RegularisationConfig(alpha=alpha, nbest=4)
        found = Counter(map(tuple, unigram.sample([text] * draws, range(draws), settings)))
        assert set(found) <= set(map(tuple, best))
        for ids, weight in zip(best, weights, strict=True):
            assert abs(found[tuple(ids)] / draws - weight / sum(weights)) < 0.04


class TestVocabulary:
    content = "the 90\n</s> 7\nto@@ 5\nwer\t4\n<unk>\n"

    def make(self) -> VocabularyTokenizer:
        return VocabularyTokenizer(self.content.encode(), "none", ["<bt>"])

    def test_ids_follow_the_file_and_missing_controls_the_last_token(self) -> None:
        tokenizer = self.make()
        assert tokenizer.encode(["the to@@ wer  the"]) == [[0, 2, 3, 0]]
        assert (tokenizer.eos, tokenizer.unk) == (1, 4)
        assert {tokenizer.pad, tokenizer.bos} == {5, 6}
        assert tokenizer.tags == {"<bt>": 7}
        assert tokenizer.size == 8

    def test_decode_joins_and_drops_controls(self) -> None:
        tokenizer = self.make()
        assert tokenizer.decode([6, 7, 0, 2, 3, 1, 5]) == "the tower"
        assert tokenizer.decode([0, 2]) == "the to"
        assert tokenizer.decode([0, 4]) == "the <unk>"

    def test_text_never_becomes_a_control_id(self) -> None:
        assert self.make().encode(["</s> <unk> <pad> <bt>"]) == [[4, 4, 4, 4]]

    @pytest.mark.parametrize(
        ("pieces", "text"),
        [
            ("\u2581the \u2581to wer s", "the towers"),
            ("the to wer", "thetower"),
            ("\u2581 the \u2581to", "the to"),
            ("\u2581the to@@ \u2581wer", "theto@@ wer"),
            ("\u2581 <0xC3> <0xA9> \u2581the", "\u00e9 the"),
            ("\u2581the <0xC3> \u2581to", "the\ufffd to"),
            ("\u2581the lacking \u2581to", "the<unk> to"),
            ("", ""),
        ],
    )
    def test_pieces_of_sentencepiece_are_joined(self, pieces: str, text: str) -> None:
        listed = ["\u2581", "\u2581the", "\u2581to", "\u2581wer", "the", "to", "to@@", "wer", "s", "<0xC3>", "<0xA9>"]
        tokenizer = VocabularyTokenizer("\n".join(listed).encode())
        assert tokenizer.decode(tokenizer.encode([pieces])[0]) == text
        assert VocabularyTokenizer(tokenizer.content()).decode(tokenizer.encode([pieces])[0]) == text

    def test_words_that_hold_the_mark_do_not_make_a_list_one_of_pieces(self) -> None:
        tokenizer = VocabularyTokenizer("\n".join(["\u2581", *(f"w{n}" for n in range(40))]).encode())
        assert tokenizer.decode(tokenizer.encode(["w1 \u2581 w2"])[0]) == "w1 \u2581 w2"

    @pytest.mark.parametrize(
        ("listed", "line", "ends"),
        [
            ("\u2581a b \u2581c", "\u2581a b \u2581c", [2, 3]),
            ("\u2581a b \u2581c", "b \u2581a b b", [1, 4]),
            ("a@@ b c", "a@@ b c", [2, 3]),
            ("a@@ b c", "c a@@", [1, 2]),
            ("\u2581a b \u2581c", "", []),
        ],
    )
    def test_ends_of_words(self, listed: str, line: str, ends: list[int]) -> None:
        tokenizer = VocabularyTokenizer("\n".join(listed.split()).encode())
        pieces = line.split()
        assert [n + 1 for n in range(len(pieces)) if tokenizer.ends_word(pieces, n)] == ends

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            ("a\n\nb\n", "line 2: no token"),
            ("a\n 2\n", "line 2: no token"),
            ("a\nb\na\n", "line 3: 'a' is listed already in line 1"),
            ("", "line 1"),
        ],
    )
    def test_bad_lists_are_refused(self, content: str, reason: str) -> None:
        with pytest.raises(DataError, match=reason):
            VocabularyTokenizer(content.encode())
        with pytest.raises(DataError, match="line 2: not valid UTF-8"):
            VocabularyTokenizer(b"a\n\xff\n")

    def test_cannot_be_sampled(self) -> None:
        with pytest.raises(DataError, match="cannot be segmented again"):
            self.make().sample(["the"], [1], RegularisationConfig())


class TestFiles:
    def test_joint_and_separate_round_trip(self, tmp_path: Path, bpe: Tokenizer, unigram: Tokenizer) -> None:
        vocabulary = VocabularyTokenizer(b"a\nb\n", "nfc")
        for number, pair in enumerate(((bpe, bpe), (bpe, unigram), (vocabulary, bpe), (vocabulary, vocabulary))):
            first, second = tmp_path / f"a{number}", tmp_path / f"b{number}"
            first.mkdir()
            save_tokenizers(first, *pair)
            copy_tokenizers(first, second)
            assert sorted(p.name for p in first.iterdir()) == sorted(p.name for p in second.iterdir())
            loaded = load_tokenizers(second)
            assert (loaded[0] is loaded[1]) == (pair[0] is pair[1])
            for before, after in zip(pair, loaded, strict=True):
                assert after.encode(["a b the tower"]) == before.encode(["a b the tower"])
                assert (after.size, after.tags) == (before.size, before.tags)

    def test_damage_is_refused(self, tmp_path: Path, bpe: Tokenizer) -> None:
        with pytest.raises(DataError, match=r"no vocabulary\.json"):
            load_tokenizers(tmp_path)
        save_tokenizers(tmp_path, bpe, bpe)
        description = tmp_path / "vocabulary.json"
        document = json.loads(description.read_text())
        for key, value, reason in (("format", 99, "format 99, but"), ("joint", False, "damaged")):
            description.write_text(json.dumps({**document, key: value}))
            with pytest.raises(DataError, match=reason):
                load_tokenizers(tmp_path)
        description.write_text(json.dumps(document))
        (tmp_path / "joint.spm").write_bytes(b"other")
        with pytest.raises(DataError, match=r"joint\.spm: not a SentencePiece model"):
            load_tokenizers(tmp_path)

    def test_existing_files_are_named_in_refusals(self, tmp_path: Path) -> None:
        (tmp_path / "a.spm").write_bytes(b"nothing")
        config = SubwordConfig(kind="existing", source_model=str(tmp_path / "a.spm"))
        with pytest.raises(DataError, match=r"data\.subword\.source_model: .*a\.spm: not a SentencePiece model"):
            existing_tokenizers(config, "none", [])
        config = SubwordConfig(kind="vocabulary", source_vocabulary=str(tmp_path / "none.txt"))
        with pytest.raises(DataError, match=r"data\.subword\.source_vocabulary: no such file"):
            existing_tokenizers(config, "none", [])
