from __future__ import annotations

import json
import math
import re
import tracemalloc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ziggurat
from tests.translate.doubles import CopyModel
from tests.vocabulary import SENTENCES, trained_tokenizer
from ziggurat.config import DecodingConfig, LengthPenaltyConfig, MaxLengthConfig
from ziggurat.config.load import parse_experiment
from ziggurat.data.subword import SentencePieceTokenizer, save_tokenizers
from ziggurat.model.directory import write_model_directory
from ziggurat.model.fast.packed import make_fast
from ziggurat.model.seq2seq import DecoderState, Seq2Seq
from ziggurat.model.tensors import weights
from ziggurat.system.errors import CheckpointError, ConfigError, DataError
from ziggurat.translate.results import TranslationWarning
from ziggurat.translate.translator import Translator, load_translator

TEXTS = ["A dog runs!", "The little house stands by the river.", "", "Where?", "17 apples;", "A dog runs!"]


def model_of(translator: Translator) -> CopyModel:
    assert isinstance(translator.model, CopyModel)
    return translator.model


def test_order_and_text_are_kept(copying: Translator) -> None:
    found = copying.translate(TEXTS)
    assert [t.text for t in found] == TEXTS
    assert [t.source for t in found] == TEXTS
    assert [t.parts for t in found] == [1, 1, 0, 1, 1, 1]
    assert copying.translate([]) == []


def test_a_single_string_is_not_taken_for_many_texts(copying: Translator) -> None:
    with pytest.raises(TypeError, match="give a list of texts"):
        copying.translate("A dog runs!")
    for call in (copying.translate, copying.translate_stream):
        with pytest.raises(TypeError, match="prefixes: give a list of texts"):
            list(call(["A dog", "runs"], prefixes="AB"))
        with pytest.raises(TypeError, match="constraints: give a list of phrases for each text"):
            list(call(["A dog", "runs"], constraints=["dog", "runs"]))
    with pytest.raises(TypeError, match="lines: give a list of texts"):
        copying.translate_stream("A dog runs!")


@pytest.mark.parametrize("wrong", [None, 1, 2.5, ["a", 1], [None, "a"]])
def test_inputs_that_are_not_text_are_refused(copying: Translator, wrong: Any) -> None:
    texts = wrong if isinstance(wrong, list) else [wrong]
    for asked in ({"texts": texts}, {"texts": ["a"] * len(texts), "prefixes": texts}):
        with pytest.raises(TypeError, match=r"(texts|prefixes): .* is not text"):
            copying.translate(**asked)


def test_translators_and_translations_have_a_short_repr(copying: Translator) -> None:
    assert repr(copying) == f"<Translator: {copying.origin}>"
    (found,) = copying.translate(["a b c"])
    assert "tokens" not in repr(found)
    assert repr(found.text) in repr(found)


def test_texts_may_come_one_by_one(copying: Translator) -> None:
    texts = ["A dog", "runs"]
    assert [t.text for t in copying.translate(iter(texts))] == [t.text for t in copying.translate(texts)]


def test_batches_stay_within_their_tokens_and_are_well_filled(copying: Translator) -> None:
    copying.translate([*TEXTS, *TEXTS], batch_tokens=40)
    shapes = model_of(copying).shapes
    assert all(rows * width <= 40 or rows == 1 for rows, width in shapes)
    assert [width for _, width in shapes] == sorted((width for _, width in shapes), reverse=True)
    assert len(shapes) < 10  # only ten lines reach the model


def test_blank_lines_never_reach_the_model(copying: Translator) -> None:
    blanks = ["", " ", "\t\t", "\u00a0\u3000", "\0", "\r", "\n \n", "\u2028"]
    found = copying.translate(blanks)
    assert [t.text for t in found] == [""] * len(blanks)
    assert all(t.hypotheses[0].finished and t.hypotheses[0].log_probability == 0 for t in found)
    assert model_of(copying).sentences == 0
    assert copying.notices["blank_lines"] == len(blanks)


def test_n_best_lists_are_ranked_and_different(tiny_model: Seq2Seq, tokenizer: SentencePieceTokenizer) -> None:
    translator = Translator(tiny_model, tokenizer, tokenizer, DecodingConfig(min_length=0))
    (found,) = translator.translate(["A dog"], beam_size=4, n_best=3)
    assert len(found.hypotheses) == 3
    assert found.text == found.hypotheses[0].text
    scores = [h.score for h in found.hypotheses]
    assert scores == sorted(scores, reverse=True)
    assert len({tuple(h.tokens) for h in found.hypotheses}) == 3


def test_json_lines_hold_tokens_scores_and_the_n_best_list(
    tiny_model: Seq2Seq, tokenizer: SentencePieceTokenizer
) -> None:
    translator = Translator(tiny_model, tokenizer, tokenizer, DecodingConfig())
    (found,) = translator.translate(["A dog runs!"], beam_size=3, n_best=2)
    record = json.loads(found.to_json())
    assert record["text"] == found.text
    assert record["tokens"] == found.hypotheses[0].tokens
    assert record["score"] == found.score
    assert [h["score"] for h in record["n_best"]] == [h.score for h in found.hypotheses]
    assert len(record["token_log_probabilities"]) == len(record["tokens"]) + record["finished"]
    (score,) = translator.score(["A dog"], ["runs"])
    assert json.loads(score.to_json())["log_probability"] == score.log_probability


def test_scores_of_own_translations_are_those_of_the_search(copying: Translator) -> None:
    copying.decoding = DecodingConfig(length_penalty=LengthPenaltyConfig(kind="gnmt", alpha=0.7))
    sources = [text for text in TEXTS if text]
    found = copying.translate(sources)
    for translation, score in zip(found, copying.score(sources, [t.text for t in found]), strict=True):
        best = translation.hypotheses[0]
        assert score.tokens == best.tokens
        assert score.token_log_probabilities == pytest.approx(best.token_log_probabilities, abs=1e-6)
        assert score.log_probability == pytest.approx(best.log_probability, rel=1e-5)
        assert score.score == pytest.approx(best.score, rel=1e-5)


def test_score_of_a_copy_is_better_than_of_anything_else(copying: Translator) -> None:
    good, bad = copying.score(["A dog runs!", "A dog runs!"], ["A dog runs!", "A dog sits!"])
    assert good.score > -0.01 > -1 > bad.score
    with pytest.raises(DataError, match="2 of sources, 1 of targets"):
        copying.score(["a", "b"], ["a"])


def test_tags_are_put_before_every_sentence(copying: Translator) -> None:
    (found,) = copying.translate(["A dog"], tag="<bt>")
    assert found.text == "A dog"
    assert [row[0] for row in model_of(copying).seen] == [copying.source_tokenizer.tags["<bt>"]]
    with pytest.raises(ConfigError, match=r"unknown tag '<nt>'; this model has: <bt>, <new>"):
        copying.translate(["A dog"], tag="<nt>")


def test_lines_without_a_tag_are_counted_where_tags_name_languages(copying: Translator) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copying.translate(["A dog"])  # its tags are <bt> and <new>
    copying.source_tokenizer = SentencePieceTokenizer(copying.source_tokenizer.model, tags=["<2de>", ">>fra<<", "<bt>"])
    with pytest.warns(TranslationWarning, match="a line without a tag, .*: `tag` can be <2de>, >>fra<<;"):
        copying.translate(["A dog", "A dog"])
    copying.translate(["A dog"], tag="<2de>")
    assert copying.notices["untagged"] == 2
    with pytest.warns(TranslationWarning, match=r"begins with `>>fra<<`.*: give it as the tag"):
        copying.translate([">>fra<< A dog"])
    assert copying.notices["untagged"] == 2, "it shows which language is meant"


@pytest.mark.parametrize(
    "blank", ["\u200b", "\ufeff", " \u2060\u3000", "\u00ad\u200e", "\ufe0f", "\u3164", "\u2800", "\0", "\U000e0041"]
)
def test_invisible_text_is_a_blank_line(copying: Translator, blank: str) -> None:
    found = copying.translate(["A dog", blank])
    assert [(one.text, one.parts) for one in found] == [("A dog", 1), ("", 0)]
    assert copying.notices["blank_lines"] == 1


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("<bt> A dog", "tag_as_text", r"begins with `<bt>`.*: give it as the tag"),
        (">>por<< A dog", "tag_as_text", r"`>>por<<`.*: this model's tags are <bt>, <new>"),
        ("de_DE A dog", "tag_as_text", "`de_DE`"),
        ("[en] A dog", "tag_as_text", r"`\[en\]`"),
        ("▁A ▁dog", "in_pieces", "`▁`"),
        ("A do@@ g", "in_pieces", "`@@`"),
        ("A do￭ g", "in_pieces", "`￭`"),
        ("A dog “runs” – now", "unknown", "– “ ”; it has .* for some of them"),
        ("A dog ☃ runs", "unknown", "☃;"),
        ("A dog e\u0323", "unknown", "lacks"),
    ],
)
def test_lines_that_do_not_suit_the_model_are_counted(text: str, kind: str, said: str) -> None:
    tokenizer = trained_tokenizer([*SENTENCES, '"A dog" - now'], 60, ["<bt>", "<new>"], byte_fallback=False)
    model = CopyModel(tokenizer.size + 2, tokenizer.eos, frozenset(tokenizer.tags.values()))
    translator = Translator(model, tokenizer, tokenizer, DecodingConfig(beam_size=2))  # type: ignore[arg-type]
    with pytest.warns(TranslationWarning) as told:
        translator.translate([text, "A dog", text])
    assert translator.notices[kind] == 2
    assert [message for message in map(str, (one.message for one in told)) if re.search(said, message)]


def test_scored_lines_that_are_not_plain_text_are_counted(copying: Translator) -> None:
    with pytest.warns(TranslationWarning):
        copying.score(["▁A ▁dog", "A dog", "<new> A dog"], ["A dog", "A do@@ g", "A dog"])
    assert {kind: copying.notices[kind] for kind in ("in_pieces", "tag_as_text")} == {"in_pieces": 2, "tag_as_text": 1}


def test_control_ids_tags_and_filler_rows_are_never_generated(tokenizer: SentencePieceTokenizer) -> None:
    class Wicked(CopyModel):
        def scores(self, wanted: torch.Tensor) -> torch.Tensor:
            scores = super().scores(wanted)
            never = [tokenizer.pad, tokenizer.bos, *tokenizer.tags.values(), self.vocabulary_size - 1]
            scores[..., never] = 21
            return scores

    model = Wicked(tokenizer.size + 2, tokenizer.eos)
    translator = Translator(model, tokenizer, tokenizer)  # type: ignore[arg-type]
    assert translator.translate(["A dog runs!"])[0].text == "A dog runs!"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beam_size": 2, "n_best": 3}, r"`n_best` \(3\) is larger than `beam_size` \(2\)"),
        ({"beam_size": 0}, r"`decoding.beam_size`: .*greater than or equal to 1"),
        ({"batch_tokens": 0}, r"`decoding.batch_tokens`"),
    ],
)
def test_settings_that_cannot_work_are_refused(copying: Translator, changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        copying.translate(["a"], **changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        copying.translate_stream(["a"], **changes)


def test_unknown_settings_of_a_stream_are_refused_at_once(copying: Translator) -> None:
    for wrong, meant in (("taag", "tag"), ("constraint", "constraints"), ("prefix", "prefixes"), ("terms", None)):
        message = (
            f"unknown argument `{wrong}`; did you mean `{meant}`, or" if meant else f"unknown key `decoding.{wrong}`"
        )
        with pytest.raises(ConfigError, match=re.escape(message)):
            copying.translate_stream(["a"], **{wrong: "x"})
    with pytest.raises(ConfigError, match=r"unknown key `decoding\.beam`; did you mean `decoding\.beam_size`\?"):
        copying.translate_stream(["a"], beam=3)
    with pytest.raises(ConfigError, match="`window` must be at least 1"):
        copying.translate_stream(["a"], window=0)


@pytest.mark.parametrize("endings", ["candidates", "fairseq"])
def test_outputs_cut_at_the_limit_are_marked_with_one_warning(tokenizer: SentencePieceTokenizer, endings: str) -> None:
    class Endless(CopyModel):
        def scores(self, wanted: torch.Tensor) -> torch.Tensor:
            return super().scores(torch.full_like(wanted, 30))

    translator = Translator(Endless(tokenizer.size, tokenizer.eos), tokenizer, tokenizer)  # type: ignore[arg-type]
    short = MaxLengthConfig(ratio=0.0, extra=7)
    with pytest.warns(TranslationWarning, match="length limit") as caught:
        found = translator.translate(["A dog", "Where?"], max_length=short, beam_size=1, endings=endings)
    assert len(caught) == 1
    assert translator.notices["unfinished"] == 2
    assert [(len(t.hypotheses[0].tokens), t.hypotheses[0].finished) for t in found] == [(7, False)] * 2
    scored = 8 if endings == "fairseq" else 7  # fairseq scores the end that it forces
    assert [len(t.hypotheses[0].token_log_probabilities) for t in found] == [scored] * 2


def test_long_lines_are_translated_in_parts_and_joined(copying: Translator) -> None:
    copying.decoding = DecodingConfig(max_source_pieces=30)
    sentence = "The little house stands by the river."
    lines = [" ".join([sentence] * 40), "Where?", " ".join(["meadow"] * 200)]
    with pytest.warns(TranslationWarning, match=r"translated in .* parts") as caught:
        found = copying.translate(lines)
    assert [t.text for t in found] == lines
    assert len(caught) == 1
    assert copying.notices["long_lines"] == 2
    assert found[0].parts > 1 == found[1].parts
    assert max(width for _, width in model_of(copying).shapes) <= 31
    assert found[0].hypotheses[0].log_probability == pytest.approx(
        math.fsum(found[0].hypotheses[0].token_log_probabilities), abs=1e-3
    )


def test_forced_text_stays_within_the_limit(copying: Translator) -> None:
    """Every forced token is a step of the search, so a prefix of 200,000 letters took hours and gigabytes."""
    limit = {"max_length": {"limit": 30}, "max_source_pieces": 20}
    assert copying.translate(["A dog"], prefixes=["A dog"], **limit)[0].text.startswith("A dog")
    message = r"line 2: its prefix and constraints have \d+ tokens, but at most 30 are allowed; shorten them, or raise"
    with pytest.raises(DataError, match=message):
        copying.translate(["A dog", "runs"], prefixes=["", "A dog runs! " * 10], **limit)
    with pytest.raises(DataError, match=message):
        copying.translate(["A dog", "runs"], constraints=[[], ["A dog runs! " * 10]], beam_size=4, **limit)


def test_learned_positions_bound_source_and_output(copying: Translator) -> None:
    copying.max_positions = 16
    text = "The little house stands by the river. A dog runs over the green meadow!"
    with pytest.warns(TranslationWarning, match="parts of at most 15 pieces"):
        (found,) = copying.translate([text])
    assert found.text == text
    assert max(width for _, width in model_of(copying).shapes) <= 16
    with pytest.raises(DataError, match=r"line 2: \d+ tokens, but the model has 16 positions"):
        copying.score(["a", text], ["a", "b"])


def test_a_stream_is_translated_window_by_window(copying: Translator) -> None:
    taken: list[int] = []

    def lines() -> Iterator[str]:
        for i in range(7):
            taken.append(i)
            yield TEXTS[i % len(TEXTS)]

    stream = copying.translate_stream(lines(), window=3)
    assert taken == []
    assert next(stream).text == TEXTS[0]
    assert taken == [0, 1, 2]
    assert [t.text for t in stream] == [*TEXTS, *TEXTS][1:7]
    dialogue = copying.translate_stream(lines(), window=1)
    taken.clear()
    next(dialogue)
    assert taken == [0]


def test_an_endless_stream_needs_constant_memory(copying: Translator) -> None:
    def endless() -> Iterator[str]:
        while True:
            yield from TEXTS

    stream = copying.translate_stream(endless(), window=24, beam_size=1)

    def peak(count: int) -> int:
        tracemalloc.reset_peak()
        for _ in range(count):
            next(stream)
            model_of(copying).seen.clear()
            model_of(copying).shapes.clear()
        return tracemalloc.get_traced_memory()[1]

    tracemalloc.start()
    try:
        peak(240)
        early, late = peak(240), peak(1800)
    finally:
        tracemalloc.stop()
    # Keeping 1,800 translations would take megabytes; Python itself keeps a few thousand freed tuples.
    assert late < early + 600_000


def test_when_memory_runs_out_the_rest_is_translated_in_smaller_batches(
    tiny_model: Seq2Seq, tokenizer: SentencePieceTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"{text} {number}" for number in range(4) for text in TEXTS]
    translator = Translator(tiny_model, tokenizer, tokenizer, DecodingConfig(max_length={"limit": 12}))
    wanted = [t.text for t in translator.translate(texts)]
    start, step, steps, failed, finished = tiny_model.start, tiny_model.step, [0], [0], list[int]()

    def started(*arguments: Any, **options: Any) -> DecoderState:
        steps[0] = 0
        return start(*arguments, **options)

    def cramped(tokens: torch.Tensor, state: DecoderState) -> torch.Tensor:
        steps[0] += 1
        if len(tokens) > 6 and steps[0] > 2:  # caches are short at first
            failed[0] += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return step(tokens, state)

    monkeypatch.setattr(tiny_model, "start", started)
    monkeypatch.setattr(tiny_model, "step", cramped)
    translator.on_finished = finished.append
    with pytest.warns(TranslationWarning, match=r"memory ran out.*`decoding\.batch_tokens=\d+`"):
        found = [t.text for t in translator.translate_stream(texts, window=20)]
    assert found == wanted
    assert translator.notices["too_large"] == failed[0] >= 2
    assert sum(finished) == sum(map(bool, texts))  # none is counted twice
    failed[0] = 0
    translator.translate(texts, batch_tokens=6)  # with so few requested, nothing fails
    assert failed[0] == 0

    def broken(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(tiny_model, "step", broken)  # not even a single one
    with pytest.raises(torch.OutOfMemoryError):
        translator.translate(texts)


def test_lines_before_a_fault_of_the_stream_are_translated(copying: Translator) -> None:
    def faulty() -> Iterator[str]:
        yield from TEXTS[:2]
        raise DataError("standard input, line 3: not valid UTF-8")

    found: list[str] = []
    stream = copying.translate_stream(faulty(), window=100)
    with pytest.raises(DataError, match="line 3"):
        found.extend(t.text for t in stream)
    assert found == TEXTS[:2]


def test_coverage_penalty_works_with_a_real_model(tiny_model: Seq2Seq, tokenizer: SentencePieceTokenizer) -> None:
    translator = Translator(tiny_model, tokenizer, tokenizer, DecodingConfig(beam_size=3))
    plain = LengthPenaltyConfig(kind="lingvo", alpha=0.2)
    covering = LengthPenaltyConfig(kind="lingvo", alpha=0.2, coverage=0.5)
    (without,) = translator.translate(["A dog runs!"], length_penalty=plain)
    (found,) = translator.translate(["A dog runs!"], length_penalty=covering)
    source_tokens = len(tokenizer.encode(["A dog runs!"])[0]) + 1
    length = len(found.hypotheses[0].token_log_probabilities)
    coverage = found.score - found.hypotheses[0].log_probability / ((5 + length) / 5) ** 0.2
    assert 0.5 * source_tokens * math.log(0.001) <= coverage <= 0.5 * source_tokens * math.log(0.5) + 1e-9
    assert found.score < without.score


EXPERIMENT = """
data: {source_language: de, target_language: en, store: store}
model: {d_model: 16, d_ff: 32, heads: 2, encoder: {layers: 2}, decoder: {layers: 2}, embedding: {POSITIONS}}
decoding: {beam_size: 3, min_length: 2, length_penalty: {kind: gnmt}}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("positions", "most"), [("positions: sinusoidal", None), ("positions: learned, max_positions: 40", 40)]
)
def test_a_model_directory_opens_with_its_own_settings(
    tmp_path: Path, tokenizer: SentencePieceTokenizer, positions: str, most: int | None
) -> None:
    from ziggurat.model.build import build_model

    experiment = parse_experiment(EXPERIMENT.replace("POSITIONS", positions), "test")
    model = build_model(experiment.model, tokenizer.size, tokenizer.size).eval()
    vocabularies = tmp_path / "vocabularies"
    vocabularies.mkdir()
    save_tokenizers(vocabularies, tokenizer, tokenizer)
    write_model_directory(tmp_path / "model", weights(model), experiment, vocabularies)

    make_fast(model, "float32")  # as loading does
    translator = ziggurat.load(str(tmp_path / "model"), device="cpu")
    assert (translator.decoding.beam_size, translator.decoding.min_length) == (3, 2)
    assert translator.max_positions == most
    assert translator.origin == f"{tmp_path / 'model'}: model directory"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TranslationWarning)
        (found,) = translator.translate(["A dog runs!"])
        assert (
            found.hypotheses
            == Translator(model, tokenizer, tokenizer, experiment.decoding, max_positions=most)
            .translate(["A dog runs!"])[0]
            .hypotheses
        )
        assert len(translator.translate(["A dog runs over the green meadow! " * 9])) == 1
    other = load_translator(tmp_path / "model", device="cpu", beam_size=1)
    assert (other.decoding.beam_size, other.decoding.min_length) == (1, 2)
    kept = load_translator(tmp_path / "model", device="cpu", length_penalty={"alpha": 0.5}).decoding.length_penalty
    assert (kept.kind, kept.alpha) == ("gnmt", 0.5), "what is not named keeps its saved value"
    for wrong, meant in (("wich", "which"), ("devise", "device"), ("without_layer", "without_layers")):
        with pytest.raises(ConfigError, match=rf"unknown argument `{wrong}`; did you mean `{meant}`, or"):
            load_translator(tmp_path / "model", **{wrong: "best"})
    with pytest.raises(ConfigError, match=r"unknown key `decoding\.beam`; did you mean `decoding\.beam_size`\?"):
        load_translator(tmp_path / "model", device="cpu", beam=1)
    with pytest.raises(CheckpointError):
        load_translator(tmp_path / "nothing")
