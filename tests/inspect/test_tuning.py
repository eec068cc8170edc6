"""Tuning on small models: their sizes, the sweep, and the coordinate check over sizes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import tiny_experiment
from ziggurat.config import Experiment, ModelConfig
from ziggurat.config.load import change_section
from ziggurat.data.corpus import Store
from ziggurat.data.prepare import prepare
from ziggurat.inspect import tuning
from ziggurat.inspect.trial import KeptTrials, TrialOptions
from ziggurat.inspect.tuning import Size, Tried, best, coordinates, resized, spread, sweep, with_base
from ziggurat.system.errors import ConfigError, DataError
from ziggurat.train.learner import Learner


def test_another_size_keeps_heads_and_proportions() -> None:
    model = ModelConfig.model_validate(
        {
            "preset": "base",
            "encoder": {"layers": 30, "d_ff": 4096, "history": "top_only"},
            "transfer": {"width": 64, "encoder_layers": 3, "decoder_layers": 3},
            "wiring": {"planned_encoder_layers": 60, "planned_decoder_layers": 12},
        }
    )
    small = resized(model, Size(128, 3, 2))
    assert (small.d_model, small.heads, small.d_ff, small.encoder_d_ff) == (128, 2, 512, 1024)
    assert (small.encoder.layers, small.decoder.layers, small.encoder.history) == (3, 2, "top_only")
    assert small.transfer == model.transfer
    assert (small.planned_encoder_layers, small.planned_decoder_layers) == (3, 2), "not those of the large model"
    with pytest.raises(ConfigError, match="not a multiple of 64"):
        resized(model, Size(96, 3, 3))
    narrow = resized(change_section(model, {"encoder": {"heads": 16}}, "model"), Size(128, 3, 2))
    assert (narrow.heads, narrow.encoder_heads) == (2, 4)
    wide = {"encoder": {"d_model": 1024, "heads": 16}, "embedding": {"sharing": "decoder"}, "transfer": None}
    with pytest.raises(ConfigError, match="equally wide"):
        resized(change_section(model, wide, "model"), Size(128, 3, 3))


@pytest.mark.parametrize(
    ("layers", "kept"),
    [(36, [8, 10]), (18, [4, 5]), (9, [2, 2]), (6, [1, 2]), (3, [1, 1]), (2, [1]), (1, [])],
)
def test_another_depth_keeps_the_shares_of_its_kinds_of_layers(layers: int, kept: list[int]) -> None:
    ranges = [{"layers": 4, "residual": "post"}, {"layers": 5, "residual": "peri"}]
    model = ModelConfig.model_validate({"encoder": {"layers": 18, "ranges": ranges}})
    small = resized(model, Size(512, layers, 3))
    assert [part.layers for part in small.encoder.ranges] == kept
    assert [part.residual for part in small.encoder.ranges] == ["post", "peri"][: len(kept)]
    assert small.residuals(decoder=False)[-1] == "pre"


def test_a_base_needs_a_peak_and_a_supported_model(experiment: Experiment) -> None:
    based = with_base(experiment, Size(16, 2, 2))
    assert based.model.transfer is not None
    assert based.model.transfer.width == 16
    noam = change_section(experiment.training, {"schedule": {"kind": "noam"}}, "training")
    with pytest.raises(ConfigError, match="noam"):
        with_base(experiment.model_copy(update={"training": noam}), Size(16, 2, 2))
    post = change_section(experiment.model, {"residual": "post"}, "model")
    with pytest.raises(ConfigError, match="residual: post"):
        with_base(experiment.model_copy(update={"model": post}), Size(16, 2, 2))
    low_rank = {"training": {"start_from": "elsewhere", "lora": {}}}
    with pytest.raises(ConfigError, match="lora"):
        with_base(change_section(experiment, low_rank, ""), Size(16, 2, 2))


@pytest.mark.parametrize(
    ("optimum", "tried"),
    [
        (2e-3, [1e-3, 2e-3, 4e-3]),
        (8e-3, [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2]),
        (5e-4, [2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3]),
        (1.0, [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2]),  # the search is bounded
    ],
)
def test_a_sweep_continues_until_the_best_is_inside(
    experiment: Experiment, optimum: float, tried: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[TrialOptions] = []

    def loss(sized: Experiment, _store: Any, options: TrialOptions) -> float:
        seen.append(options)
        return abs(math.log(sized.training.schedule.peak / optimum)) + options.seed

    monkeypatch.setattr(tuning, "_loss", loss)
    size = Size(16, 2, 2)
    found = sweep(experiment, None, [size], rates=(2e-3, 1e-3, 4e-3), updates=7, seeds=(1, 3))  # type: ignore[arg-type]
    assert [one.rate for one in found] == pytest.approx(tried)
    assert best(found).rate == pytest.approx(min(tried, key=lambda rate: abs(math.log(rate / optimum))))
    assert best(found).loss == pytest.approx(abs(math.log(best(found).rate / optimum)) + 2)
    assert {(options.updates, options.width) for options in seen} == {(7, None)}


def test_an_interrupted_sweep_resumes_from_kept_results(
    experiment: Experiment, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[tuple[float, int, int]] = []

    def loss(sized: Experiment, _store: Any, options: TrialOptions) -> float:
        if len(trained) == 3:
            raise KeyboardInterrupt
        peak = sized.training.schedule.peak
        trained.append((peak, sized.model.encoder.layers, options.seed))
        return math.inf if peak > 3e-3 else abs(math.log(peak / 2e-3)) + options.seed

    monkeypatch.setattr(tuning, "_loss", loss)
    file, based = tmp_path / "trials.json", with_base(experiment, Size(16, 1, 1))

    def run_sweep(based: Experiment = based, updates: int = 6) -> list[Tried]:
        sizes, rates = [Size(16, 1, 1)], (1e-3, 2e-3, 4e-3)
        return sweep(based, store, sizes, rates=rates, updates=updates, seeds=(1, 2), kept=KeptTrials(file))

    with pytest.raises(KeyboardInterrupt):
        run_sweep()
    first = [*trained]
    trained.clear()
    found = run_sweep()
    assert not {*first} & {*trained}, "nothing is trained twice"
    assert [*first, *trained] == [(rate, 1, seed) for rate in (1e-3, 2e-3, 4e-3) for seed in (1, 2)]
    assert [one.kept for one in found] == [True, False, False]
    assert found[1].loss == pytest.approx(1.5)
    trained.clear()
    assert run_sweep() == found, "what failed is kept, too"
    assert not trained
    assert all(one.kept for one in run_sweep())
    # A change in anything on which a loss depends makes it a different run.
    other = change_section(based.training, {"clip_norm": 0.5}, "training")
    for again in (
        lambda: run_sweep(updates=7),
        lambda: run_sweep(based.model_copy(update={"training": other})),
        lambda: (monkeypatch.setattr(store, "fingerprint", "other data"), run_sweep()),
        lambda: (monkeypatch.setattr("ziggurat.inspect.trial.__version__", "9"), run_sweep()),
    ):
        trained.clear()
        with pytest.raises(KeyboardInterrupt):
            again()
        assert len(trained) == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "damaged"), ('{"format": 2, "losses": {}}', "`format`"), ('{"format": 1, "losses": {"a": "b"}}', "losses")],
)
def test_a_damaged_file_of_trainings_is_named_with_the_way_out(content: str, message: str, tmp_path: Path) -> None:
    (file := tmp_path / "trials.json").write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=f"trials.json.*{message}.*; remove it to train everything again"):
        KeptTrials(file)


def test_losses_that_are_not_finite_are_never_best(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_loss", lambda sized, *_: math.inf if sized.training.schedule.peak > 1e-3 else 5.0)
    found = sweep(experiment, None, [Size(16, 2, 2)], rates=(2e-3, 4e-3))  # type: ignore[arg-type]
    assert best(found).rate == pytest.approx(2.5e-4)  # the lower of equal rates, down to the lowest one tried
    assert best([Tried(Size(1, 1, 1), 1.0, math.inf), Tried(Size(1, 1, 1), 2.0, 3.0)]).rate == 2.0


def test_a_small_sweep_trains(experiment: Experiment, store: Store) -> None:
    told: list[Tried] = []
    based = with_base(experiment, Size(16, 1, 1))
    found = sweep(based, store, [Size(16, 1, 1)], rates=(1e-3, 1e-2, 1e-1), updates=6, tokens=200, told=told.append)
    assert sorted(told, key=lambda one: one.rate) == found
    assert len({one.loss for one in found}) == len(found)


def test_coordinates_begin_at_the_start_and_grow(experiment: Experiment, store: Store) -> None:
    found = coordinates(experiment, store, Size(16, 1, 1), updates=3, tokens=200)
    for name in ("memory", "decoder", "logits"):
        assert found.changes[name][0] == 0
        assert found.changes[name] == sorted(found.changes[name])
        assert len(found.states[name]) == 4
    assert found.states["memory"][0] == pytest.approx(1, rel=0.01)  # pre-norm ends with a norm
    assert found.states["encoder_stream"][0] > 1.1  # the final norm reads the sum of embedding and branches
    assert len(found.states["decoder_stream"]) == 4


def test_coordinates_are_measured_on_the_model_as_trained(
    experiment: Experiment, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin = change_section(experiment, {"model": {"residual": "admin", "init": {"kind": "admin"}}}, "")
    skips: list[float] = []
    seen = Learner.profile

    def profiled(learner: Learner) -> object:
        found = seen(learner)
        skips.extend(float(p.detach().mean()) for name, p in learner.model.named_parameters() if name.endswith(".skip"))
        return found

    monkeypatch.setattr(Learner, "profile", profiled)
    coordinates(admin, store, Size(16, 2, 1), updates=1, tokens=200)
    assert len(skips) == 7
    assert max(skips) > 1.1


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [[Size(w, 3, 3) for w in (64, 128, 256, 512)], [Size(64, n, n) for n in (3, 6, 12, 24, 48)]],
    ids=["width", "depth"],
)
def test_changes_are_flat_with_a_base_and_grow_without(tmp_path: Path, sizes: list[Size]) -> None:
    made = tiny_experiment(tmp_path)
    prepare(made.data)
    store = Store.open(made.data.store)
    sized = change_section(made.model, {"d_model": 64, "heads": 4, "d_ff": 256}, "model")
    plain = made.model_copy(update={"model": sized})
    based = with_base(plain, Size(64, 3, 3))
    flat, steep = ([coordinates(one, store, size) for size in sizes] for one in (based, plain))
    for name in ("memory", "decoder", "logits"):
        assert spread(flat, name) < 2.5 < spread(steep, name)
    by_depth = sizes[0].width == sizes[-1].width
    for name in ("encoder_stream", "decoder_stream"):
        assert spread(flat, name) < 1.6
        assert not by_depth or spread(steep, name) > 2
