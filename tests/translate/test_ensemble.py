"""Ensembles: arithmetic means of probabilities, compared with sums by hand and a search of all sequences."""

from __future__ import annotations

import copy
import itertools
import math
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import ziggurat
from tests.translate.doubles import CopyModel
from ziggurat.config import DecodingConfig, LengthPenaltyConfig, MaxLengthConfig
from ziggurat.config.load import parse_experiment
from ziggurat.config.model import ModelConfig
from ziggurat.data.lines import UnicodeForm
from ziggurat.data.subword import SentencePieceTokenizer, save_tokenizers
from ziggurat.model.build import build_model
from ziggurat.model.directory import write_model_directory
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.model.tensors import weights
from ziggurat.system.errors import CheckpointError, ConfigError, DataError
from ziggurat.translate.hypotheses import IdHypothesis, LengthPenalty
from ziggurat.translate.results import TranslationWarning
from ziggurat.translate.scorers import (
    EnsembleScorer,
    ModelScorer,
    force_score,
    log_mean_probability,
    log_probabilities,
    padded,
    scorer_of,
)
from ziggurat.translate.search import search
from ziggurat.translate.settings import SearchSettings, Sentence
from ziggurat.translate.translator import Translator, load_translator

PAD, BOS, EOS, VOCABULARY = 0, 2, 3, 7
WORDS = [1, 4, 5, 6]
KINDS: dict[str, dict[str, Any]] = {
    "post": {"residual": "post", "encoder": {"layers": 2}, "decoder": {"layers": 2}},
    "dlcl": {
        "encoder": {"layers": 3, "history": "dlcl"},
        "decoder": {"layers": 3, "history": "dlcl"},
        "d_model": 16,
    },
    "merged": {"encoder": {"layers": 1}, "decoder": {"layers": 2, "attention": "merged"}},
    "rnmt": {
        "family": "rnmt",
        "encoder": {"layers": 2},
        "decoder": {"layers": 3},
        "embedding": {"positions": "none", "sharing": "none"},
    },
}


def member(kind: str, vocabulary: int = VOCABULARY) -> Seq2Seq:
    """A model in double precision whose distributions are far from flat."""
    content = {"d_model": 8, "d_ff": 12, "heads": 2, **KINDS[kind]}
    model = build_model(ModelConfig.model_validate(content), vocabulary, vocabulary, seed=len(kind)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return model


@pytest.fixture(scope="module")
def members() -> list[Seq2Seq]:
    return [member(kind) for kind in KINDS]


@torch.no_grad()
def by_hand(models: list[Seq2Seq], source: list[int], prefix: list[int]) -> list[float]:
    """Return the log of the mean probability of each next token, for one unpadded sentence in plain floats."""
    means = [0.0] * models[0].vocabulary_size
    for model in models:
        ids = torch.tensor([source])
        memory = model.encode(ids, torch.ones_like(ids, dtype=torch.bool))
        logits = model.logits(model.decode(torch.tensor([[BOS, *prefix]]), memory))[0, -1].tolist()
        total = math.fsum(math.exp(x) for x in logits)
        means = [mean + math.exp(x) / total / len(models) for mean, x in zip(means, logits, strict=True)]
    return [math.log(p) for p in means]


def found_by(
    models: list[Seq2Seq], sources: list[list[int]], wanted: SearchSettings, min_length: int = 0
) -> list[list[IdHypothesis]]:
    return search(scorer_of(models), [Sentence(s, len(s) + 4, min_length) for s in sources], wanted)


@torch.no_grad()
def test_step_by_step_scores_are_logs_of_mean_probabilities_through_any_reordering(members: list[Seq2Seq]) -> None:
    draw = random.Random(1)
    sources = [[4, 5, EOS], [6, EOS], [5, 5, 1, 4, EOS]]
    beam = 2
    scorer = EnsembleScorer([ModelScorer(model) for model in members])
    scorer.start(beam, len(sources) + 1)
    scorer.admit(*padded(sources, PAD, "cpu"), 6)
    prefixes: list[list[list[int]]] = [[[] for _ in range(beam)] for _ in sources]
    tokens = torch.full((len(sources), beam), BOS)
    for step in range(6):
        if step == 3:  # a sentence arrives while others are in progress
            scorer.admit(*padded([[4, 4, 6, EOS]], PAD, "cpu"), 4)
            sources.append([4, 4, 6, EOS])
            prefixes.append([[] for _ in range(beam)])
            tokens = torch.cat([tokens, torch.full((1, beam), BOS)])
        scores = scorer.step(tokens)
        assert scores.shape == (len(sources), beam, VOCABULARY)
        for source, row, got in zip(sources, prefixes, scores.tolist(), strict=True):
            for prefix, values in zip(row, got, strict=True):
                assert values == pytest.approx(by_hand(members, source, prefix), abs=1e-10)
        kept = {1: [0, 2], 4: [2, 1]}.get(step, list(range(len(sources))))
        scorer.keep(torch.tensor(kept))
        parents = [[draw.randrange(beam) for _ in range(beam)] for _ in kept]
        scorer.follow(torch.tensor(parents))
        sources = [sources[i] for i in kept]
        chosen = [[draw.choice(WORDS) for _ in range(beam)] for _ in kept]
        prefixes = [
            [[*prefixes[i][parent], token] for parent, token in zip(line, new, strict=True)]
            for i, line, new in zip(kept, parents, chosen, strict=True)
        ]
        tokens = torch.tensor(chosen)


def test_a_wide_beam_finds_the_best_of_all_sequences(members: list[Seq2Seq]) -> None:
    source, longest = [4, 6, EOS], 3
    every: list[tuple[float, list[int]]] = []
    totals: dict[tuple[int, ...], float] = {(): 0.0}
    for length in range(longest + 1):
        for words in itertools.product(WORDS, repeat=length):
            following = by_hand(members, source, list(words))
            every.append((totals[words] + following[EOS], list(words)))
            totals.update({(*words, word): totals[words] + following[word] for word in WORDS})
    for alpha in (0.0, 0.6):
        best = sorted(every, key=lambda e: -e[0] / (len(e[1]) + 1) ** alpha)[:10]
        wanted = SearchSettings(64, 10, BOS, EOS, forbidden=(PAD, BOS), penalty=LengthPenalty("power", alpha))
        found = search(scorer_of(members), [Sentence(source, longest)], wanted)[0]
        assert [h.tokens for h in found] == [words for _, words in best]
        assert [h.log_probability for h in found] == pytest.approx([total for total, _ in best], abs=1e-10)
        scores = [total / (len(words) + 1) ** alpha for total, words in best]
        assert [h.score for h in found] == pytest.approx(scores, abs=1e-10)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-6)])
@pytest.mark.parametrize("kind", KINDS)
def test_an_ensemble_of_a_model_with_itself_is_the_model(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    model = member(kind).to(dtype)
    sources = [[4, 5, EOS], [6, EOS], [5, 5, 1, 4, EOS]]
    wanted = SearchSettings(3, 3, BOS, EOS, (PAD, BOS), penalty=LengthPenalty("lingvo", 0.5, 0.2))
    alone = found_by([model], sources, wanted, 2)
    for one, three in zip(alone, found_by([model] * 3, sources, wanted, 2), strict=True):
        assert [h.tokens for h in one] == [h.tokens for h in three]
        assert [h.score for h in one] == pytest.approx([h.score for h in three], abs=tolerance, rel=tolerance)
        for a, b in zip(one, three, strict=True):
            assert a.token_log_probabilities == pytest.approx(b.token_log_probabilities, abs=tolerance, rel=tolerance)
    targets = [row[0].tokens for row in alone]
    ids = {"bos": BOS, "eos": EOS, "pad": PAD}
    single = force_score(model, sources, targets, **ids)
    assert force_score([model], sources, targets, **ids) == single
    for a, b in zip(single, force_score([model, model], sources, targets, **ids), strict=True):
        assert a == pytest.approx(b, abs=tolerance, rel=tolerance)


def test_forced_scores_are_logs_of_mean_probabilities(members: list[Seq2Seq]) -> None:
    sources, targets = [[4, 5], [6], [5, 5, 1, 4]], [[6, 6, 5], [], [4]]
    for batch_tokens in (1, 4096):
        ended = [[*source, EOS] for source in sources]
        scores = force_score(members, ended, targets, bos=BOS, eos=EOS, pad=PAD, batch_tokens=batch_tokens)
        for source, target, score in zip(sources, targets, scores, strict=True):
            path = [*target, EOS]
            exact = [by_hand(members, [*source, EOS], path[:i])[token] for i, token in enumerate(path)]
            assert score == pytest.approx(exact, abs=1e-10)


def test_search_scores_are_forced_scores_whatever_the_batch(members: list[Seq2Seq]) -> None:
    sources = [[4, 5, 6], [6], [5, 5, 1, 4, 1, 1], [1, 4]]
    wanted = SearchSettings(3, 3, BOS, EOS, (PAD, BOS))
    ended = [[*source, EOS] for source in sources]
    found = found_by(members, ended, wanted, 3)
    for source, row in zip(sources, found, strict=True):
        ((alone),) = found_by(members, [[*source, EOS]], wanted, 3)
        assert [h.tokens for h in alone] == [h.tokens for h in row]
        targets = [h.tokens for h in row]
        scores = force_score(members, [[*source, EOS]] * len(row), targets, bos=BOS, eos=EOS, pad=PAD)
        for hypothesis, score in zip(row, scores, strict=True):
            steps = len(hypothesis.token_log_probabilities)
            assert hypothesis.token_log_probabilities == pytest.approx(score[:steps], abs=1e-10)


@torch.no_grad()
def test_attention_is_the_mean_over_members_that_have_any(members: list[Seq2Seq]) -> None:
    source, mask = padded([[4, 5, EOS], [6, EOS]], PAD, "cpu")
    copying = CopyModel(VOCABULARY, EOS)  # has no attention
    mixed: list[Any] = [members[0], copying, *members[1:]]
    tokens = torch.full((2, 2), BOS)
    scorer, alone = scorer_of(mixed), [ModelScorer(m) for m in members]
    for each in (scorer, *alone):
        each.start(2, 2, keep_attention=True)
        each.admit(source, mask, 1)
        each.step(tokens)
    expected = sum(each.attention for each in alone if each.attention is not None) / len(members)
    assert scorer.attention is not None
    torch.testing.assert_close(scorer.attention, expected, atol=1e-12, rtol=0)
    assert float((scorer.attention * ~mask[:, None]).abs().max()) == 0
    torch.testing.assert_close(scorer.attention.sum(-1), torch.ones(2, 2, dtype=torch.float64))
    without = scorer_of(members)
    assert without.attention is None
    without.start(2, 2)
    without.admit(source, mask, 1)
    without.step(tokens)
    assert without.attention is None


def test_means_stay_finite_where_probabilities_vanish() -> None:
    never = -math.inf
    one = torch.tensor([-0.1, -300.0, -1e5, never, never])
    other = torch.tensor([-0.1, -400.0, -2e5, -50.0, never])
    half = math.log(2)
    expected = torch.tensor([-0.1, -300.0 - half, -1e5 - half, -50.0 - half, never])
    torch.testing.assert_close(log_mean_probability([one, other]), expected)
    assert torch.equal(log_mean_probability(iter([one])), one)
    logits = torch.tensor([[1e4, -1e4, 0.0]])
    assert log_probabilities(logits).tolist() == [[0.0, -2e4, -1e4]]


@pytest.mark.parametrize(
    ("dtypes", "wide"),
    [
        ((torch.bfloat16, torch.bfloat16), torch.float32),
        ((torch.float16, torch.bfloat16), torch.float32),
        ((torch.float32, torch.float64), torch.float64),
    ],
)
def test_means_are_taken_in_fp32_or_wider(dtypes: tuple[torch.dtype, ...], wide: torch.dtype) -> None:
    scores = [torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(i)).to(d) for i, d in enumerate(dtypes)]
    got = log_mean_probability(log_probabilities(s) for s in scores)
    assert got.dtype == wide
    exact = torch.stack([s.double().softmax(-1) for s in scores]).mean(0).log()
    torch.testing.assert_close(got.double(), exact, atol=1e-5, rtol=0)


def test_a_diverged_member_is_noticed(members: list[Seq2Seq]) -> None:
    broken = copy.deepcopy(members[0])
    with torch.no_grad():
        broken.output.weight[4] = math.nan
    with pytest.raises(ziggurat.system.errors.ZigguratError, match="not finite"):
        found_by([members[1], broken], [[4, EOS]], SearchSettings(2, 1, BOS, EOS))


def test_members_must_have_one_target_vocabulary(members: list[Seq2Seq]) -> None:
    with pytest.raises(ValueError, match=r"one target vocabulary, not with sizes \[7, 9\]"):
        scorer_of([members[0], member("post", VOCABULARY + 2)])
    with pytest.raises(ValueError, match=r"sizes \[\]"):
        EnsembleScorer([])
    with pytest.raises(ConfigError, match="name at least one"):
        load_translator([])


def test_a_translator_takes_several_models(tokenizer: SentencePieceTokenizer) -> None:
    models = [member(kind, tokenizer.size) for kind in KINDS]
    short = MaxLengthConfig(ratio=0.0, extra=4)
    decoding = DecodingConfig(
        beam_size=2, min_length=2, length_penalty=LengthPenaltyConfig(kind="none"), max_length=short
    )
    translator = Translator(models, tokenizer, tokenizer, decoding)
    texts = ["A dog runs!", "Where?"]
    ids = tokenizer.encode(texts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TranslationWarning)
        translations = translator.translate(texts)
        # The coverage term needs attention, and refuses a scorer without it.
        covering = LengthPenaltyConfig(kind="lingvo", alpha=0.0, coverage=0.5)
        assert len(translator.translate(texts, length_penalty=covering)) == 2
    for source, found in zip(ids, translations, strict=True):
        best, prefix = found.hypotheses[0], []
        for piece, log_probability in zip(best.tokens, best.token_log_probabilities, strict=False):
            token = next(t for t in range(tokenizer.size) if tokenizer.pieces([t]) == [piece])
            exact = by_hand(models, [*source, tokenizer.eos], prefix)[token]
            assert log_probability == pytest.approx(exact, abs=1e-10)
            prefix.append(token)
        assert len(prefix) >= 2
    (score,) = translator.score(["A dog runs!"], ["Where?"])
    path = [*ids[1], tokenizer.eos]
    exact = [by_hand(models, [*ids[0], tokenizer.eos], path[:i])[token] for i, token in enumerate(path)]
    assert score.token_log_probabilities == pytest.approx(exact, abs=1e-10)
    assert score.log_probability == pytest.approx(math.fsum(exact), abs=1e-10)


EXPERIMENT = """
data: {source_language: de, target_language: LANGUAGE, store: store}
model: {d_model: 16, d_ff: 32, heads: 2, encoder: {layers: LAYERS}, decoder: {layers: 2}, embedding: {POSITIONS}}
decoding: {beam_size: BEAM}
"""


def directory(
    folder: Path, source: SentencePieceTokenizer, target: SentencePieceTokenizer, layers: int, positions: str = ""
) -> Path:
    """Write a directory of a random model whose beam size equals its depth."""
    text = EXPERIMENT.replace("LAYERS", str(layers)).replace("POSITIONS", positions or "positions: sinusoidal")
    text = text.replace("LANGUAGE", f"e{layers}").replace("BEAM", str(layers))
    experiment = parse_experiment(text.replace("embedding: {", "embedding: {sharing: decoder, "), "test")
    vocabularies = folder / "vocabularies"
    vocabularies.mkdir(parents=True)
    save_tokenizers(vocabularies, source, target)
    model = build_model(experiment.model, source.size, target.size, seed=layers)
    write_model_directory(folder / "model", weights(model), experiment, vocabularies)
    return folder / "model"


@pytest.mark.slow
def test_several_directories_open_as_one_translator(tmp_path: Path, tokenizer: SentencePieceTokenizer) -> None:
    paths = [
        directory(tmp_path / "a", tokenizer, tokenizer, 3),
        directory(tmp_path / "b", tokenizer, tokenizer, 1, "positions: learned, max_positions: 40"),
        directory(tmp_path / "c", tokenizer, tokenizer, 2, "positions: learned, max_positions: 30"),
    ]
    translator = ziggurat.load(paths, device="cpu")
    assert [len(model.encoder.layers) for model in translator.models] == [3, 1, 2]  # type: ignore[arg-type]
    assert translator.model is translator.models[0]
    assert (translator.decoding.beam_size, translator.target_language) == (3, "e3"), "the first model's"
    assert translator.max_positions == 30
    said = "; ".join(f"{path}: model directory" for path in paths)
    assert translator.origin == f"ensemble of 3: {said}"
    opened = [load_translator(path, device="cpu").model for path in paths]
    expected = Translator(opened, tokenizer, tokenizer, translator.decoding, max_positions=30)
    texts = ["A dog runs!", "Where?"]
    limits: dict[str, Any] = {"min_length": 2, "max_length": MaxLengthConfig(ratio=0.0, extra=4)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TranslationWarning)
        assert translator.translate(texts, **limits) == expected.translate(texts, **limits)
    with pytest.raises(DataError, match="the model has 30 positions"):
        translator.score(["A dog runs over the green meadow! " * 4], ["Where?"])
    assert load_translator([paths[1]], device="cpu").origin == f"{paths[1]}: model directory"
    with pytest.raises(CheckpointError, match="is a model directory, it has no checkpoint `best`"):
        load_translator(paths, device="cpu", which="best")


def test_maps_of_all_members_are_checked_in_the_precision_of_translation(
    tmp_path: Path, tokenizer: SentencePieceTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[set[tuple[int, int]]] = []

    def wrong(maps: set[tuple[int, int]], precision: str) -> list[str]:
        checked.append(maps)
        return ["16 to 24 (off by 41%)"]

    monkeypatch.setattr("ziggurat.model.fast.precision.wrong_packed", wrong)
    monkeypatch.setattr("ziggurat.model.fast.precision.available", lambda precision: True)
    paths = [
        directory(tmp_path / "a", tokenizer, tokenizer, 1),
        directory(tmp_path / "b", tokenizer, tokenizer, 1, "positions: learned, max_positions: 40"),
    ]
    with pytest.raises(ConfigError, match=r"`decoding.precision: bfloat16`.*16 to 24 \(off by 41%\).*use float32"):
        load_translator(paths, device="cpu", precision="bfloat16")
    assert {(16, 32), (32, 16), (16, tokenizer.size), (16, 40)} <= checked[0], "(16, 40): the second model's positions"
    load_translator(paths, device="cpu")
    assert len(checked) == 1, "nothing is checked in float32"


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize(
    ("tags", "unicode", "message"),
    [
        (["<new>", "<bt>"], "none", "its {side} vocabulary is not that of"),  # the same size, but different ids
        (["<bt>", "<new>"], "nfkc", "normalised by `data.unicode: nfkc`, but that of .* by `none`"),
    ],
)
def test_other_vocabularies_are_refused(
    tmp_path: Path, tokenizer: SentencePieceTokenizer, side: str, tags: list[str], unicode: UnicodeForm, message: str
) -> None:
    tokenizer = SentencePieceTokenizer(tokenizer.model, tags=["<bt>", "<new>"])
    other = SentencePieceTokenizer(tokenizer.model, unicode, tags)
    assert other.size == tokenizer.size
    sides = {"source": tokenizer, "target": tokenizer, side: other}
    paths = [directory(tmp_path / "a", tokenizer, tokenizer, 1), directory(tmp_path / "b", **sides, layers=1)]
    with pytest.raises(ConfigError, match=message.format(side=side)) as refused:
        load_translator(paths, device="cpu")
    assert all(str(path) in str(refused.value) for path in paths)
    assert len(load_translator([paths[1]] * 2, device="cpu").models) == 2
