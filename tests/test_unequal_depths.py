"""Encoders much deeper or shallower than their decoders, with every initialisation."""

from __future__ import annotations

import math
from itertools import pairwise, product
from typing import Any

import pytest

from tests.composition import model as small_model
from tests.test_composition import HERE, VOCABULARY, one_update, padded_batch
from ziggurat.config.train import LossConfig
from ziggurat.model.build import build_model, stack_residuals
from ziggurat.model.init import profile_omega
from ziggurat.translate.scorers import ModelScorer
from ziggurat.translate.search import search
from ziggurat.translate.settings import SearchSettings, Sentence

# The residual kind for which each initialisation was designed.
MADE_FOR: dict[str, dict[str, Any]] = {
    "xavier": {"residual": "post"},
    "depth_scaled": {"residual": "post"},
    "admin profiled": {"residual": "admin", "init.kind": "admin"},
    "admin log": {"residual": "admin", "init.kind": "admin", "init.omega": "log"},
    "admin linear": {"residual": "admin", "init.kind": "admin", "init.omega": "linear"},
    "deepnorm": {"residual": "deepnorm", "init.kind": "deepnorm"},
    "lipschitz": {"residual": "post", "init.kind": "lipschitz"},
    "t_fixup": {"residual": "no_norm", "init.kind": "t_fixup"},
    "fixup": {"residual": "fixup", "init.kind": "fixup"},
    "uniform": {"residual": "pre", "init.kind": "uniform"},
}


DEPTHS = (12, 3), (12, 1), (3, 12), (36, 6)
CASES = list(product(MADE_FOR, DEPTHS))


@pytest.mark.parametrize(
    ("name", "depth"),
    [pytest.param(*case, marks=pytest.mark.slow if number % 3 else ()) for number, case in enumerate(CASES)],
)
def test_unequal_depths_build_profile_train_and_decode(name: str, depth: tuple[int, int]) -> None:
    choices = {"init.kind": name, **MADE_FOR[name], "encoder.layers": depth[0], "decoder.layers": depth[1]}
    built = build_model(small_model(choices), VOCABULARY, VOCABULARY, seed=2).to(HERE)
    batch = padded_batch().to(HERE)
    residuals = [stack_residuals(built.encoder), stack_residuals(built.decoder)]
    assert [len(found) for found in residuals] == [2 * depth[0], 3 * depth[1]]
    if name == "admin profiled":
        masks = [batch.source_mask, batch.target_mask]
        omegas = profile_omega(
            residuals, lambda: built.train()(batch.source, batch.source_mask, batch.target_in), masks
        )
        for found, stack in zip(omegas, residuals, strict=True):
            assert len(found) == len(stack)
            assert found[0] == 1.0
            assert all(a < b for a, b in pairwise(found[1:]))
    one_update(built, batch, LossConfig())
    settings = SearchSettings(beam_size=2, n_best=1, bos=1, eos=2, forbidden=(0, 1), device=HERE)
    scorer = ModelScorer(built.eval())
    sentences = [Sentence(row[real].tolist(), 4) for row, real in zip(batch.source, batch.source_mask, strict=True)]
    results = search(scorer, sentences, settings)
    assert all(math.isfinite(found[0].log_probability) for found in results)
