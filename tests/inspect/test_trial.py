"""Trials: what they reduce, what they keep, and that a trial is plain training."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ziggurat.config import Experiment, ModelConfig
from ziggurat.config.load import change_section
from ziggurat.config.train import ScheduleConfig
from ziggurat.data.corpus import Store, unigram_entropy
from ziggurat.data.loader import LoaderState
from ziggurat.inspect.trial import (
    TRIAL_MEASURES,
    TrialOptions,
    open_data,
    peak_rate,
    reduced,
    run_trial,
    trial_experiment,
)
from ziggurat.train.device import loader_of
from ziggurat.train.learner import Learner
from ziggurat.train.schedule import learning_rate
from ziggurat.train.update import train_update

SHORT = TrialOptions(updates=4, tokens=200, measured_tokens=100, width=None)


@given(
    head=st.integers(8, 96),
    heads=st.integers(1, 16),
    d_ff=st.integers(1, 5000),
    width=st.sampled_from([32, 64, 128, 256]),
)
def test_reduced_models_are_valid_and_no_wider(head: int, heads: int, d_ff: int, width: int) -> None:
    d_model = 2 * head * heads  # even, because sinusoidal positions need that
    model = ModelConfig(d_model=d_model, d_ff=d_ff, heads=heads)
    small = reduced(model, width)
    if d_model <= width:
        assert small == model
        return
    assert small.d_model <= width
    assert small.d_model % small.heads == 0
    assert small.heads <= heads
    assert abs(small.d_ff / small.d_model - d_ff / d_model) <= 0.5 / small.d_model + 1 / small.d_model
    assert small.model_copy(update={key: getattr(model, key) for key in ("d_model", "d_ff", "heads", "preset")}) == (
        model
    )


@pytest.mark.parametrize(
    ("d_model", "heads", "base", "narrow"),
    [
        (344, 4, 86, (86, 1)),
        (400, 5, 80, (80, 1)),
        (240, 5, 48, (96, 2)),
        (480, 6, 80, (80, 1)),
        (512, 2, 256, (256, 1)),
        (132, 4, 66, (66, 2)),
    ],
)
def test_heads_stay_as_wide_as_those_of_a_base(d_model: int, heads: int, base: int, narrow: tuple[int, int]) -> None:
    transfer = {"width": base, "encoder_layers": 3, "decoder_layers": 3}
    model = ModelConfig.model_validate({"d_model": d_model, "heads": heads, "d_ff": 2 * d_model, "transfer": transfer})
    small = reduced(model, 128)
    assert (small.d_model, small.heads) == (small.encoder_width, small.encoder_heads) == narrow
    assert small.d_ff == 2 * small.d_model


def test_a_wide_encoder_keeps_its_proportion() -> None:
    wide = {"d_model": 1024, "d_ff": 4096, "heads": 16}
    model = ModelConfig.model_validate({"d_model": 512, "encoder": wide, "embedding": {"sharing": "decoder"}})
    small = reduced(model, 128)
    assert (small.d_model, small.encoder_width) == (64, 128)
    assert (small.d_ff, small.encoder_d_ff) == (256, 512)
    assert (small.heads, small.encoder_heads) == (4, 8)


@pytest.mark.parametrize(("d_model", "groups", "narrow"), [(512, 512, 128), (384, 48, 16), (256, 2, 2)])
def test_groups_of_channels_divide_the_narrow_width(d_model: int, groups: int, narrow: int) -> None:
    combination = {"combination": {"groups": groups}, "encoder": {"history": "dlcl"}}
    assert reduced(ModelConfig.model_validate({"d_model": d_model, **combination}), 128).combination.groups == narrow


@pytest.mark.parametrize(
    "schedule",
    [
        {"kind": "isqrt", "peak": 2e-3, "warmup_updates": 30},
        {"kind": "noam", "factor": 2.0, "warmup_updates": 40},
        {"kind": "linear", "peak": 3e-3, "warmup_updates": 10, "decay_updates": 90},
        {"kind": "cosine", "peak": 3e-3, "warmup_updates": 0, "decay_updates": 90},
        {"kind": "constant", "peak": 1e-4, "warmup_updates": 5},
        {"kind": "gnmt+", "base": 1e-4, "replicas": 4, "warmup_updates": 10, "decay_start": 200, "decay_end": 400},
    ],
    ids=lambda schedule: schedule["kind"],
)
def test_the_peak_is_the_highest_rate_of_the_schedule(experiment: Experiment, schedule: dict[str, object]) -> None:
    config = ScheduleConfig.model_validate(schedule)
    training = experiment.training.model_copy(update={"schedule": config})
    changed = experiment.model_copy(update={"training": training})
    rates = [learning_rate(config, t, d_model=experiment.model.d_model, last_update=90) for t in range(1, 200)]
    assert math.isclose(peak_rate(changed), max(rates), rel_tol=1e-12)


def test_a_trial_changes_size_and_schedule_and_nothing_else(experiment: Experiment, store: Store) -> None:
    small = trial_experiment(experiment, store, TrialOptions(updates=50, tokens=256))
    assert small.model == experiment.model
    assert small.training.schedule.warmup_updates == 20
    assert small.training.batch.max_tokens == 256
    assert small.training.optimiser == experiment.training.optimiser
    assert small.training.loss == experiment.training.loss
    assert small.training.clip_norm == experiment.training.clip_norm


def test_a_trial_trains_all_weights_on_the_text_alone_whatever_is_left_out(
    experiment: Experiment, store: Store
) -> None:
    head = experiment.model.heads
    training = {"start_from": "elsewhere", "lora": {"rank": 2}, "loss": {"alignment": {"head": head}}}
    small = trial_experiment(change_section(experiment, {"training": training}, ""), store, SHORT)
    assert (small.training.start_from, small.training.lora, small.training.loss.alignment) == (None, None, None)
    assert all(parameter.requires_grad for parameter in Learner(small, store, torch.device("cpu")).model.parameters())


def test_a_batch_of_a_trial_holds_the_longest_pair(experiment: Experiment, store: Store) -> None:
    longest = 1 + int(max(store.train.source_lengths.max(), store.train.target_lengths.max()))
    eight = change_section(experiment, {"training": {"batch": {"length_multiple": 8}}}, "")
    small = trial_experiment(eight, store, TrialOptions(tokens=longest - 1))
    assert small.training.batch.max_tokens == -(-longest // 8) * 8
    loader_of(small, store)


@pytest.mark.cpu("compares with a training on one, bit by bit")
def test_a_trial_is_plain_training(experiment: Experiment, store: Store) -> None:
    """The losses equal those of a loop written here, and measuring between updates changes none of them."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    ticks: list[int] = []
    trial = run_trial(experiment, store, 5.0, SHORT, ticks.append)
    assert torch.equal(torch.get_rng_state(), before)
    assert ticks == [1, 2, 3, 4]
    assert [*trial.points] == [0, 2, 4]
    assert {*trial.points[0]} == {*TRIAL_MEASURES} - {"source_dependence"}
    assert {*trial.points[2]} == {"nll"}
    assert {*trial.points[4]} == {*TRIAL_MEASURES}
    assert trial.failed is None

    small = trial_experiment(experiment, store, SHORT)
    learner = Learner(small, store, torch.device("cpu"))
    losses = []
    for group in loader_of(small, store).groups(LoaderState()):
        rate = learning_rate(small.training.schedule, len(losses) + 1, d_model=small.model.d_model)
        result = train_update(learner.parallel, group.batches, learner.optimiser, rate=rate, clip_norm=None)
        losses.append(result.nll / result.target_tokens)
        if len(losses) == SHORT.updates:
            break
    assert trial.losses == losses


def test_the_loss_alone_is_that_of_a_whole_trial(experiment: Experiment, store: Store) -> None:
    whole, alone = (run_trial(experiment, store, 5.0, SHORT, loss_only=only) for only in (False, True))
    assert alone.points == {4: {"nll": whole.points[4]["nll"]}}
    assert alone.losses == whole.losses


def test_a_diverging_trial_reports_where(experiment: Experiment, store: Store) -> None:
    diverging = change_section(experiment, {"training": {"schedule": {"peak": 1e9}}}, "")
    trial = run_trial(diverging, store, 5.0, SHORT)
    assert trial.failed is not None
    assert trial.failed == len(trial.losses) == trial.updates


def test_unigram_entropy(store: Store) -> None:
    table = store.train
    counts: Counter[int] = Counter()
    for pair in range(len(table)):
        counts.update(int(token) for token in table.pairs([pair])[1][0])  # type: ignore[arg-type]
    counts[-1] = len(table)
    total = sum(counts.values())
    entropy = -sum(count / total * math.log(count / total) for count in counts.values())
    assert math.isclose(unigram_entropy(store), entropy, rel_tol=1e-9)
    assert store.dev is not None
    dev = [int(token) for ids in store.dev.pairs(range(len(store.dev)))[1] for token in (*ids, -1)]
    of_all = total + store.target.size + 1  # each count is raised by one, so that no token is impossible
    loss = -sum(math.log((counts[token] + 1) / of_all) for token in dev) / len(dev)
    assert math.isclose(unigram_entropy(store, on_dev=True), loss, rel_tol=1e-9)


def test_without_a_store_the_embedded_pair_is_used(experiment: Experiment, tmp_path: Path) -> None:
    with open_data(experiment) as (opened, said):
        assert opened.path == Path(experiment.data.store)
        assert said == f"the data of {experiment.data.store}"
    missing = experiment.data.model_copy(update={"store": str(tmp_path / "none")})
    with open_data(experiment.model_copy(update={"data": missing})) as (opened, said):
        folder = opened.path
        assert len(opened.train) > 3000
        assert f"{tmp_path / 'none'} is not prepared" in said
        # Neither these corpora nor any links exist.
        named = [experiment.data.train[0].model_copy(update={"name": name}) for name in ("a", "b")]
        stages = [
            {"mix": {"a": 1.0}, "until": {"epochs": 1, "corpus": "a"}},
            {"mix": {"b": 1.0}, "until": {"corpus": "b"}},
        ]
        own = {"train": named, "stages": stages, "modifiers": {"terms": {"probability": 0.5}}, "store": missing.store}
        loader_of(trial_experiment(change_section(experiment, {"data": own}, ""), opened, SHORT), opened)
    assert not folder.exists()
