"""p-values equal those of sacreBLEU's command; several seeds are drawn together; Holm's correction follows Holm."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.evaluate.test_scores import WORDS, corpus
from ziggurat.evaluate.metrics import TestSet
from ziggurat.evaluate.scores import MeanMetric, MeanSignature
from ziggurat.evaluate.significance import compare_scores, holm

COMMAND = """
import functools, json
json.dumps = functools.partial(json.dumps, default=float)  # sacreBLEU 2.6 fails on numpy's floats of chrF and TER
from sacrebleu.sacrebleu import main
main()
"""


def three_systems() -> tuple[list[list[str]], list[str]]:
    """Outputs of a mediocre, a good and a second mediocre system, and the reference."""
    reference, _ = corpus(11, 40, 0.0)
    draw = random.Random(2)

    def worse(noise: float) -> list[str]:
        return [" ".join(draw.choice(WORDS) if draw.random() < noise else w for w in r.split()) for r in reference]

    return [worse(0.5), worse(0.2), worse(0.47)], reference


def command(folder: Path, outputs: list[list[str]], reference: list[str], *options: str) -> list[dict[str, object]]:
    paths = []
    for name, lines in [("ref", reference), *((f"out{i}", lines) for i, lines in enumerate(outputs))]:
        paths.append(folder / name)
        paths[-1].write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    run = [sys.executable, "-c", COMMAND, *map(str, [paths[0], "-i", *paths[1:]]), "-f", "json"]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    found = subprocess.run([*run, *options], capture_output=True, check=True, env=environment, text=True)
    answer = json.loads(found.stdout)
    assert isinstance(answer, list)
    return answer


def test_p_values_equal_the_command_line(tmp_path: Path) -> None:
    outputs, reference = three_systems()
    names = ["a", "b", "c"]
    said = {}
    for first in (0, 1):  # the command compares all with its first system
        for kind, count in (("bs", "100"), ("ar", "200")):
            options = ["-m", "bleu", "chrf", "ter", f"--paired-{kind}", f"--paired-{kind}-n", count]
            said[kind, first] = command(tmp_path, outputs[first:], reference, *options)
    for name in ("bleu", "chrf", "ter"):
        metric = TestSet([reference]).metric(name)
        statistics = [[table] for table in metric.statistics(outputs)]
        found = compare_scores(metric, names, statistics, resamplings=100, trials=200)
        assert [(pair.left, pair.right) for pair in found.pairs] == [("a", "b"), ("a", "c"), ("b", "c")]
        for pair, first, second in zip(found.pairs, (0, 0, 1), (1, 2, 2), strict=True):
            for kind, ours in (("bs", pair.bootstrap), ("ar", pair.randomisation)):
                theirs = said[kind, first][second - first][found.metric]
                assert isinstance(theirs, dict)
                assert ours == theirs["p_value"]
                assert found.systems[second].mean == theirs["score"]
        verdicts = {(row, column): found.verdict(row, column) for row in names for column in names if row != column}
        assert verdicts["b", "a"] == verdicts["b", "c"] == "+"
        assert verdicts["a", "b"] == verdicts["c", "b"] == "-"
        assert verdicts["a", "c"] == verdicts["c", "a"] == "="
        assert found.test_signature.startswith("bs:100|ar:200|seed:12345|version:")
        assert found.signature == str(metric.signature())


class GivenScores(MeanMetric):
    """A metric whose sentence scores are the outputs."""

    name = "GIVEN"

    def sentence_scores(self, outputs: Sequence[Sequence[str]]) -> list[list[float]]:
        return [[float(line) for line in lines] for lines in outputs]

    def signature(self) -> MeanSignature:
        return MeanSignature({"made": "up"}, "1")


def reference_p_values(left: np.ndarray, right: np.ndarray, resamplings: int, trials: int) -> tuple[float, float]:
    """Return both tests by plain loops, with sacreBLEU's random numbers, on one score per sentence."""
    difference, count = abs(left.mean() - right.mean()), len(left)
    drawn = np.random.default_rng(12345).choice(count, size=(resamplings, count), replace=True)
    resampled = np.array([abs(left[row].mean() - right[row].mean()) for row in drawn])
    bootstrap = (sum(resampled - resampled.mean() > difference) + 1) / (resamplings + 1)
    stays = np.random.default_rng(12345).integers(2, size=(trials, count), dtype=bool)
    beyond = 0
    for row in stays:
        one = np.where(row, left, right).mean()
        other = np.where(row, right, left).mean()
        beyond += abs(one - other) > difference + 1e-12
    return bootstrap, (beyond + 1) / (trials + 1)


def test_a_sentence_is_drawn_with_the_translations_of_all_seeds() -> None:
    draw = np.random.default_rng(1)
    left = draw.normal(0.1, 1, size=(2, 30))  # [seeds, sentences]
    right = draw.normal(0.0, 1, size=(3, 30))
    metric = GivenScores()
    statistics = [metric.statistics([[repr(float(v)) for v in seed] for seed in system]) for system in (left, right)]
    found = compare_scores(metric, ["left", "right"], statistics, resamplings=300, trials=300)
    (pair,) = found.pairs
    wanted = reference_p_values(left.mean(0), right.mean(0), 300, 300)
    assert (pair.bootstrap, pair.randomisation) == pytest.approx(wanted, abs=2 / 301)  # float32 there, float64 here
    assert 0.02 < wanted[0] < 0.9
    assert pair.difference == pytest.approx(left.mean() - right.mean())
    assert found.systems[0].deviation == pytest.approx(left.mean(1).std(ddof=1))
    assert found.metric == "GIVEN"


def test_the_same_output_as_several_seeds_changes_nothing() -> None:
    outputs, reference = three_systems()
    metric = TestSet([reference]).metric("bleu")
    once = metric.statistics(outputs)
    plain = compare_scores(metric, ["a", "b", "c"], [[s] for s in once], resamplings=50, trials=50)
    seeds = [[once[0]] * 2, [once[1]], [once[2]] * 3]
    assert compare_scores(metric, ["a", "b", "c"], seeds, resamplings=50, trials=50).pairs == plain.pairs


def test_equal_systems_do_not_differ() -> None:
    outputs, reference = three_systems()
    metric = TestSet([reference]).metric("chrf")
    found = compare_scores(metric, ["a", "b"], [metric.statistics(outputs[:1])] * 2, resamplings=20, trials=20)
    assert found.pairs[0].difference == 0
    assert (found.pairs[0].bootstrap, found.pairs[0].randomisation) == (1.0, 1.0)
    assert found.verdict("a", "b") == "="
    alone = compare_scores(metric, ["a"], [metric.statistics(outputs[:1])])
    assert (alone.pairs, alone.test_signature) == ((), "")


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_rejects_like_the_step_down_procedure(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    for level in (0.01, 0.05, 0.3, 0.9):
        rejected = set()
        for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
            if p_values[index] > level / (len(p_values) - rank):
                break
            rejected.add(index)
        near = [abs(p * (len(p_values) - r) - level) < 1e-12 for p in p_values for r in range(len(p_values))]
        if not any(near):
            assert {i for i, p in enumerate(adjusted) if p <= level} == rejected
    assert all(0 <= p <= a <= 1 for p, a in zip(p_values, adjusted, strict=True))


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []
