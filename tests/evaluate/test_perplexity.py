"""Perplexity against a loop over a model's float64 logits, one token at a time; ensembles; and derived figures."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import tiny_experiment
from ziggurat.data.prepare import prepare
from ziggurat.data.subword import load_tokenizers
from ziggurat.evaluate.metrics import Likelihood
from ziggurat.model.build import build_model
from ziggurat.model.directory import write_model_directory
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.model.tensors import weights
from ziggurat.system.errors import DataError
from ziggurat.translate.translator import load_translator


def reference(models: Sequence[Seq2Seq], source: list[int], target: list[int], bos: int, eos: int) -> list[float]:
    """Return log((p_1 + ... + p_K) / K) for each token of a sentence, by a float64 softmax of the models' logits."""
    found = []
    for place, wanted in enumerate([*target, eos]):
        p = 0.0
        for model in models:
            ids = torch.tensor([source])
            before = torch.tensor([[bos, *target[:place]]])
            memory = model.encode(ids, torch.ones_like(ids, dtype=torch.bool))
            logits = model.logits(model.decode(before, memory))[0, -1]
            p += float(torch.exp(logits[wanted]) / torch.exp(logits).sum()) / len(models)
        found.append(math.log(p))
    return found


@pytest.mark.parametrize("members", [1, 2])
@torch.inference_mode()
def test_perplexity_is_that_of_the_logits(members: int, tmp_path) -> None:  # type: ignore[no-untyped-def]
    experiment = tiny_experiment(tmp_path)
    prepare(experiment.data)
    store = tmp_path / "store"
    source_tokenizer, tokenizer = load_tokenizers(store)
    models, paths = [], []
    for seed in range(members):
        model = build_model(experiment.model, source_tokenizer.size, tokenizer.size, seed=seed).eval()
        for parameter in model.parameters():
            parameter.mul_(2)  # with new weights all tokens are about equally likely
        paths.append(str(tmp_path / f"model-{seed}"))
        write_model_directory(tmp_path / f"model-{seed}", weights(model), experiment, store, again="-")
        models.append(copy.deepcopy(model).double())
    lines = [(tmp_path / f"dev.{language}").read_text().splitlines()[:7] for language in ("qlo", "qhi")]
    lines[1][3] = ""  # only end-of-sentence is scored
    found = Likelihood.of(s.token_log_probabilities for s in load_translator(paths, device="cpu").score(*lines))
    expected = []
    for source, target in zip(*lines, strict=True):
        ids = [*source_tokenizer.encode([source])[0], source_tokenizer.eos]
        expected += reference(models, ids, tokenizer.encode([target])[0], tokenizer.bos, tokenizer.eos)
    assert (found.tokens, found.sentences) == (len(expected), 7)
    assert found.log_probability == pytest.approx(sum(expected), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(-sum(expected) / len(expected)), rel=1e-5)


@given(st.lists(st.lists(st.floats(-30, 0), min_size=1, max_size=5), min_size=1, max_size=5))
def test_figures_of_a_text_are_sums_over_its_lines(lines: list[list[float]]) -> None:
    every = [value for line in lines for value in line]
    found = Likelihood.of(lines)
    assert (found.tokens, found.sentences) == (len(every), len(lines))
    assert found.log_probability == pytest.approx(sum(every))
    assert found.perplexity == pytest.approx(math.exp(-sum(every) / len(every)))
    assert found.score(["a"]).value == found.perplexity


def test_signatures_tell_vocabularies_apart() -> None:
    found = Likelihood.of([[-1.0, -2.0]])
    assert found.score(["a", "b"]).signature == found.score(iter(["a", "b"])).signature
    assert found.score(["a", "b"]).signature != found.score(["a", "c"]).signature
    assert not found.score(["a"]).comparable


def test_extremes() -> None:
    assert Likelihood(-1e6, 1, 1).perplexity == math.inf
    with pytest.raises(DataError, match="no line"):
        _ = Likelihood.of([]).perplexity
