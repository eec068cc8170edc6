"""Our tables by buckets equal compare-mt's on the same words; it runs in its own environment."""

from __future__ import annotations

import importlib.util
import os
import random
from pathlib import Path

import pytest

from tests.evaluate.test_scores import WORDS, corpus
from ziggurat.evaluate.scores import BleuWords

RUN = Path(__file__).resolve().parents[2] / "experiments" / "compare-mt" / "run.py"


@pytest.mark.slow
def test_buckets_and_ngrams_equal_compare_mts() -> None:
    python = os.environ.get("ZIGGURAT_COMPARE_MT")
    if not python:
        pytest.skip("$ZIGGURAT_COMPARE_MT is not set to the Python of an environment with compare-mt 0.2.10 and six")
    specification = importlib.util.spec_from_file_location("compare_mt_run", RUN)
    assert specification is not None
    assert specification.loader is not None
    run = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(run)
    first, references = corpus(8, 300, 0.3)
    draw = random.Random(4)
    second = [" ".join(w for w in line.split() if draw.random() < 0.9) for line in references[1]]
    words = BleuWords()
    long = [  # compare-mt counts an n-gram for outputs that are too short to have one
        number for number in range(300) if min(len(words(lines[number])) for lines in (first, second)) >= 4
    ]
    outputs = [[lines[number] for number in long] for lines in (first, second)]
    reference = [references[0][number] for number in long]
    training = [" ".join(draw.choices(WORDS, weights=[4**-n for n in range(len(WORDS))], k=20)) for _ in range(400)]
    ours = run.our_figures(reference, outputs, training)
    theirs = run.their_figures(python, reference, outputs, training)
    for key in ("accuracy-by-frequency", "bleu-by-length", "length-difference", "ngrams"):
        mine, other = run.flat(ours[key]), run.flat(theirs[key])
        assert len(other) > 10
        assert mine == pytest.approx(other, abs=1e-9), key
    assert len(theirs["accuracy-by-frequency"][0]) >= 5
