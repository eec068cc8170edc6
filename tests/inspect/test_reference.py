"""The reference of a depth check: the shallow model with which deep ones are compared."""

from __future__ import annotations

from typing import Any

import pytest

from ziggurat.config import Experiment
from ziggurat.config.load import change_section
from ziggurat.data.corpus import Store
from ziggurat.inspect import check
from ziggurat.inspect.check import reference_of
from ziggurat.inspect.trial import TrialMeasures, TrialOptions, peak_rate


@pytest.mark.parametrize(("width", "rate"), [(64, 2e-3), (128, 2e-3), (256, 1e-3)])
def test_it_is_three_pre_norm_layers_at_a_rate_that_suits_its_width(
    experiment: Experiment, store: Store, width: int, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference always has its own rate: the highest up to width 128, and proportionally lower above."""
    seen: list[Experiment] = []

    def trial(
        shallow: Experiment, _: Store, unigram: float, options: TrialOptions, *__: Any, **___: Any
    ) -> TrialMeasures:
        seen.append(shallow)
        points: dict[int, dict[str, Any]] = {options.updates: {"nll": unigram - 1.25}}
        return TrialMeasures(options.updates, width, rate, unigram, losses=[], points=points, failed=None)

    monkeypatch.setattr(check, "run_trial", trial)
    hopeless = {"d_model": width, "residual": "post", "encoder": {"layers": 30}, "decoder": {"layers": 30}}
    deep = change_section(experiment, {"model": hopeless, "training": {"schedule": {"peak": 1e9}}}, "")
    found = reference_of(deep, store, 5.0, TrialOptions(updates=7, width=None), lambda *_: lambda _: None)
    assert (found.updates, found.learned) == (7, 1.25)
    (shallow,) = seen
    assert (shallow.model.encoder.layers, shallow.model.decoder.layers, shallow.model.d_model) == (3, 3, width)
    assert {*shallow.model.residuals(decoder=False), *shallow.model.residuals(decoder=True)} == {"pre"}
    assert peak_rate(shallow) == pytest.approx(rate)
