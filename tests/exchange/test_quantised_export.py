"""A model trained with `training.quantise` and exported in int8: CTranslate2 gives the scores of training."""

from __future__ import annotations

import copy
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.exchange.conftest import Written
from tests.exchange.examples import SENTENCES
from ziggurat.exchange.plain import ExportedModel
from ziggurat.exchange.targets import TARGETS
from ziggurat.model.directory import open_model
from ziggurat.model.fast.int8 import quantise
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.translate.scorers import force_score

SCORER = """
import json, sys, ctranslate2
model = ctranslate2.Translator(sys.argv[1], device="cpu", compute_type="int8", intra_threads=1)
print(json.dumps([list(map(float, scored.log_probs)) for scored in model.score_batch(*json.load(sys.stdin))]))
"""


def theirs(folder: Path, sources: list[list[str]], targets: list[list[str]]) -> Tensor:
    """Return CTranslate2's log-probabilities of the tokens of all targets.

    On an AMD processor without VNNI its products of bytes saturate, but those of MKL do not; it chooses one of them
    when it is imported.
    """
    ours = {"CT2_USE_MKL": "1"} if platform.machine() == "x86_64" else {}
    command = [sys.executable, "-c", SCORER, str(folder)]
    document = json.dumps([sources, targets])
    done = subprocess.run(
        command, input=document, capture_output=True, text=True, env={**os.environ, **ours}, check=True
    )
    return torch.tensor([number for row in json.loads(done.stdout) for number in row])


@pytest.mark.parametrize(
    "choices",
    [{}, {"residual": "deepnorm"}, {"activation": "swiglu", "norm": "rms"}],
    ids=["pre", "deepnorm", "swiglu"],
)
def test_an_export_in_int8_has_the_scores_of_training(
    choices: dict[str, Any], written: Written, tmp_path: Path
) -> None:
    pytest.importorskip("ctranslate2")
    opened = open_model(written(**choices))
    folder = tmp_path / "out"
    folder.mkdir()
    TARGETS["ctranslate2"].write(folder, ExportedModel.of(opened), "int8")
    tokenizer = opened.tokenizers[0]
    ids = tokenizer.encode(SENTENCES)
    targets = [*ids[1:], *ids[:1]]

    def ours(model: Seq2Seq) -> Tensor:
        special = {"bos": tokenizer.bos, "eos": tokenizer.eos, "pad": tokenizer.pad}
        scores = force_score(model, [[*row, tokenizer.eos] for row in ids], targets, **special)
        return torch.tensor([number for score in scores for number in score])

    fake = copy.deepcopy(opened.model)
    quantise(fake)
    expected, plain = ours(fake), ours(opened.model)
    found = theirs(folder, [tokenizer.pieces(row) for row in ids], [tokenizer.pieces(row) for row in targets])
    # Sums in a different order sometimes round a number to the neighbouring byte, which affects the whole sentence:
    # most tokens agree to fp32 rounding, while the scores of the unquantised model are far off.
    off = (found - expected).abs()
    assert float(off.median()) < 1e-5
    assert float((off < 1e-4).float().mean()) > 0.75
    assert float((plain - expected).abs().median()) > 1e-2
