"""A changed configuration as text: the user's own where there is one, else the shortest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from ziggurat.config import Experiment, dump
from ziggurat.config.edit import edited, shortest
from ziggurat.config.load import apply_override, parse_experiment
from ziggurat.config.recipes import NamedText, plain_recipe_names, read_named
from ziggurat.config.yaml_text import in_line, parse_yaml

MINE = """\
# Mine
data:
  source_language: de   # from
  target_language: en
  store: stores/a
  train:
    - {source: a.de, target: a.en, weight: 2}
    - source: b.de
      target: b.en
model:
  preset: tiny
  encoder: {layers: 6}  # deep
  # and
  decoder:
    layers: 4
    attention: average

  transfer: null
training:
"""
CHANGES = {"model.transfer.width": 64, "model.transfer.encoder_layers": 3, "model.transfer.decoder_layers": 3}
RATE = {"training.schedule.peak": 1.6e-2}


def changed(named: NamedText, overrides: Sequence[str], changes: Mapping[str, Any]) -> tuple[str, Experiment]:
    """Return the text, and the configuration that it is to say."""
    puts = [*overrides, *(f"{key}={in_line(value)}" for key, value in changes.items())]
    result = parse_experiment(named.text, named.label, puts)
    return edited(named, overrides, changes, result), result


def test_what_the_user_wrote_stays_and_changed_keys_are_put_into_it() -> None:
    overrides = ["model.encoder.layers=12", "data.train.1.weight=3", "decoding.beam_size=8", "model.decoder.layers=2"]
    text, result = changed(NamedText(MINE, "my.yaml", None), overrides, {**CHANGES, **RATE})
    assert parse_experiment(text, "tuned") == result
    assert result.model.transfer is not None
    expected = MINE.replace("{layers: 6}", "{layers: 12}").replace("    layers: 4\n", "    layers: 2\n")
    expected = expected.replace("transfer: null", "transfer: {width: 64, encoder_layers: 3, decoder_layers: 3}")
    expected = expected.replace("      target: b.en\n", "      target: b.en\n      weight: 3\n")
    expected = expected.replace("training:\n", "training: {schedule: {peak: 0.016}}\ndecoding: {beam_size: 8}\n")
    assert text == expected


@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        ("model: {}\n", []),
        ("model: {preset: base,}\n", []),
        ("model: &m\n  preset: base\n", ["model.encoder={layers: 3}"]),
        ("model:\n  encoder: &stack {layers: 3}\n  decoder: *stack\n", ["model.encoder.layers=4"]),
        ("model:\n  encoder: &stack {layers: 3}\n  decoder: {<<: *stack}\n", ["model.decoder.layers=4"]),
        ("model:\n  encoder:\n    layers: 3\n  decoder:\n    layers: 3\n", ["model.encoder={layers: 5}"]),
        ("model:\n  d_model: 192\n", ["model.preset=base", "model.d_ff=64"]),
        ('"model": {"preset": "base"}\n', ["data.store='a, b]'", "data.target_language='no'"]),
        ("model: {preset: base} # no line feed", []),
        ("model:\n\n\n", []),
        ("", []),
    ],
)
def test_whatever_the_style_the_text_says_what_it_should(model: str, overrides: list[str]) -> None:
    data = "data: {source_language: de, target_language: en, store: s}\n"
    text, result = changed(NamedText(data + model, "my.yaml", None), overrides, {**CHANGES, **RATE})
    assert parse_experiment(text, "tuned") == result
    assert len(text) < 600, "not everything is written out"


def test_a_section_that_is_already_there_gets_only_what_changed() -> None:
    mine = "data: {source_language: de, target_language: en, store: s}\ntraining: {schedule: {peak: 1e-3}} # rate\n"
    text, _ = changed(NamedText(mine, "my.yaml", None), [], RATE)
    assert text == mine.replace("1e-3", "0.016")


@pytest.mark.parametrize("name", plain_recipe_names())
def test_of_a_recipe_the_shortest_is_written(name: str) -> None:
    overrides = ["training.seed=7", "data.store=other"]
    text, result = changed(read_named(name), overrides, RATE)
    assert parse_experiment(text, "tuned") == result
    assert text.startswith(f"# recipe {name} training.seed=7 data.store=other, changed in `training`\n")
    assert len(text) < 0.3 * len(dump(result))
    content, _ = parse_yaml(text, "tuned")
    assert shortest(content, result) == content
    for path in ("training.seed", "training.schedule.peak", "data.store"):
        at: Any = content
        for key in path.split("."):
            at = at[key]


def test_the_shortest_has_no_key_that_could_be_left_out() -> None:
    content, _ = parse_yaml(MINE, "my.yaml")
    apply_override(content, "training={schedule: {kind: isqrt, peak: 2e-3}, seed: 1}")
    apply_override(content, "model.d_model=128")  # as the preset says
    found = shortest(content, Experiment.model_validate(content))
    assert found["model"] == {"preset": "tiny", "decoder": {"layers": 4, "attention": "average"}}
    assert found["training"] == {"schedule": {"peak": 2e-3}}
