"""Small versions of the papers' recipes: the method stays, sizes and lengths follow the rules, and all train."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.config.update_golden import load_once
from ziggurat.config import Experiment, parse_experiment
from ziggurat.config.recipes import RULES, SUFFIX, SmallCorpus, paper_keys, paper_recipes, recipe_text, small_content
from ziggurat.data.babel import generate
from ziggurat.data.prepare import prepare
from ziggurat.model.build import build_model
from ziggurat.train.loop import train
from ziggurat.train.schedule import learning_rate, peak_update

NAMES = [name for key in paper_keys() for name in paper_recipes(key)]

SCALED = {
    *("data.source_language", "data.target_language", "data.store", "data.train", "data.dev"),
    "training.start_from",
    *("data.subword.vocabulary_size", "data.subword.target_vocabulary_size"),
    *("model.preset", "model.d_model", "model.d_ff", "model.heads"),
    *(f"model.encoder.{size}" for size in ("d_model", "d_ff", "heads")),
    *("training.precision", "training.batch.max_tokens", "training.batch.accumulate"),
    *(f"training.schedule.{key}" for key in ("peak", "factor", "base", "warmup_updates", "decay_start", "decay_end")),
    *(f"training.stop.{limit}" for limit in ("updates", "epochs")),
    *("training.validation.every_updates", "training.validation.max_sentences"),
    *("training.validation.every_epochs", "training.checkpoint.every_updates", "training.checkpoint.every_epochs"),
    *("training.log_every_updates", "training.diagnostics.every_updates", "training.diagnostics.max_share"),
    *("decoding.max_length.ratio", "decoding.max_length.extra"),
}
"""SCALED are keys for which a small recipe may have other values; all others, written or default, are the paper's."""

METHODS = [
    "ds-init-en-de-base-12-12-ds",
    "ds-init-en-de-base-12-12-ds-matt",
    "dlcl-en-de-base-20-6-post",
    "dlcl-en-de-base-20-6-pre-dlcl",
    "transparent-en-de-base-6-6-transparent",
    "transparent-en-de-rnmt-512-6-8-transparent",
    "admin-en-de-base-6-6-admin",
    "sdt-en-de-base-24-6-rpr-sdt",
]
"""METHODS has one recipe from every family of methods, the shallowest one."""


def flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def small(name: str) -> Experiment:
    return load_once(f"{name}{SUFFIX}")


@pytest.mark.parametrize("key", paper_keys())
def test_only_scaled_settings_differ_from_the_paper(key: str) -> None:
    for name in paper_recipes(key):
        full, scaled = (dict(flat(load_once(one).model_dump(mode="json"))) for one in (name, f"{name}{SUFFIX}"))
        stages = "training.growth.stages"
        assert full.keys() == scaled.keys(), name
        changed = {path for path in full if full[path] != scaled[path] and path not in SCALED}
        assert changed <= {stages}, name
        if stages in changed:
            depths = [[(s["layers"], s["decoder_layers"]) for s in one[stages]] for one in (full, scaled)]
            assert depths[0] == depths[1], name


@pytest.mark.parametrize("key", paper_keys())
def test_the_highest_rate_is_the_papers_or_half_of_it_for_a_quarter_of_the_width(key: str) -> None:
    for name in paper_recipes(key):
        full, scaled = load_once(name), small(name)
        peaks = [
            learning_rate(
                one.training.schedule, peak_update(one.training.schedule), d_model=one.model.d_model, last_update=10**6
            )
            for one in (full, scaled)
        ]
        narrower = full.model.d_model / scaled.model.d_model
        halved = full.training.schedule.kind == "noam" and full.model.decoder.layers > 12
        assert peaks[1] == pytest.approx(peaks[0] / (2 if halved else 1), rel=1e-3), name
        assert full.model.encoder_width / scaled.model.encoder_width == narrower == 4
        assert full.model.heads / scaled.model.heads == full.model.encoder_heads / scaled.model.encoder_heads == 2, name
        assert scaled.model.d_model % scaled.model.heads == scaled.model.encoder_width % scaled.model.encoder_heads == 0
        if scaled.model.family != "rnmt":
            assert scaled.model.d_ff / scaled.model.d_model == full.model.d_ff / full.model.d_model, name
        assert 0.9 < peak_update(scaled.training.schedule) / ((scaled.training.stop.updates or 0) / 5) <= 1, name


def test_growth_keeps_its_shares_of_training() -> None:
    growing = [name for name in NAMES if load_once(name).training.growth is not None]
    assert growing
    for name in growing:
        full, scaled = load_once(name).training, small(name).training
        assert full.growth is not None
        assert scaled.growth is not None
        ends = [
            [(stage.updates or 0) / (training.stop.updates or 0) for stage in growth.stages]
            for training, growth in ((full, full.growth), (scaled, scaled.growth))
        ]
        assert ends[1] == pytest.approx(ends[0], abs=1e-3), name
        assert min(ends[0]) > 0, name


def test_the_file_states_the_rules_that_changed_something() -> None:
    growing, noam = (_comments(name) for name in ("sdt-en-de-base-48-6-rpr-sdt", "ds-init-en-de-base-6-6"))
    for reason, _ in RULES:
        assert reason in growing or reason in noam
    # The rules for growth and precision affect one of these two recipes, the rule for noam the other.
    assert [reason in growing for reason, _ in RULES].count(False) == 1
    assert [reason in noam for reason, _ in RULES].count(False) == 2


def _comments(name: str) -> str:
    return " ".join(line[2:] for line in recipe_text(f"{name}{SUFFIX}").splitlines() if line.startswith("# "))


def test_a_corpus_of_the_users_own_keeps_the_languages() -> None:
    recipe = paper_recipes("admin")["admin-en-de-base-60-12-admin"]
    before = repr(recipe.content)
    content, _ = small_content(recipe.content, SmallCorpus(("a.en", "a.de"), ("b.en", "b.de"), None))
    assert repr(recipe.content) == before, "the recipe itself was changed"
    data = content["data"]
    assert (data["source_language"], data["target_language"]) == ("en", "de")
    assert (data["train"], data["dev"]) == (
        [{"source": "a.en", "target": "a.de"}],
        [{"source": "b.en", "target": "b.de"}],
    )
    assert data["store"] != small_content(recipe.content)[0]["data"]["store"], "one store for two corpora"


@pytest.mark.slow
def test_every_small_recipe_can_be_built() -> None:
    for name in NAMES:
        with torch.device("meta"):
            model = small(name).model
            count = sum(p.numel() for p in build_model(model, 1200, 1200).parameters())
        assert 0 < count < 50_000_000, name


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few hundred pairs of the embedded languages, in files with a small recipe's names."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "data" / "babel").mkdir(parents=True)
    pairs = list(generate(330, seed=3))
    for split, part in (("train", pairs[:300]), ("dev", pairs[300:])):
        for side, language in enumerate(("qlo", "qhi")):
            text = "".join(f"{pair[side]}\n" for pair in part)
            (folder / "data" / "babel" / f"{split}.{language}").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_few_updates_of_every_method_have_finite_losses(
    name: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(corpus)
    experiment = parse_experiment(
        recipe_text(f"{name}{SUFFIX}"),
        name,
        [
            *("data.subword.vocabulary_size=400", "training.batch.max_tokens=128", "training.log_every_updates=1"),
            *(["data.subword.target_vocabulary_size=400"] if not small(name).data.subword.joint else []),
            *("training.validation.decode=false", "training.validation.metric=loss", "training.tensorboard=false"),
            *(f"training.{key}.every_updates=3" for key in ("validation", "checkpoint", "diagnostics")),
            *_shorter(small(name)),
        ],
    )
    prepare(experiment.data, force=True)
    result = train(tmp_path / "run", experiment)
    assert result.update == experiment.training.stop.updates
    assert result.best is not None
    assert 0 < result.best < 3 * math.log(400)


def _shorter(experiment: Experiment) -> list[str]:
    """Return overrides for a run of six updates with one update per stage of growth."""
    growth = experiment.training.growth
    old = growth.stages if growth is not None else []
    stages = [stage.model_dump(exclude_none=True) | {"updates": n} for n, stage in enumerate(old, start=1)]
    return ["training.stop.updates=6", *([f"training.growth.stages={stages}"] if stages else [])]
