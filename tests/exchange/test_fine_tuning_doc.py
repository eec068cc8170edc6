"""The commands in docs/fine-tuning.md are run exactly as printed, one by one."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.cli.conftest import ziggurat as ziggurat  # the command line as a fixture
from tests.conftest import tiny_experiment
from tests.docs.pages import blocks
from tests.exchange.examples import SENTENCES
from tests.exchange.test_opus import TARGETS, Downloaded
from tests.exchange.test_opus import downloaded as downloaded
from tests.train.runs import QUIET, records
from ziggurat.config import load_experiment
from ziggurat.data.batching import CorpusMix
from ziggurat.data.corpus import Store
from ziggurat.model.directory import open_model
from ziggurat.model.tensors import weights
from ziggurat.train.loop import train

pytestmark = pytest.mark.filterwarnings("ignore:.*is a pickle")

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "fine-tuning.md").read_text(encoding="utf-8")
PAGE = PAGE.partition("\n## Many languages\n")[0]
QUICK = ["training.stop.updates=2", "training.validation.max_sentences=2", "training.tensorboard=false"]
QUICK += ["training.diagnostics.every_updates=null", "training.log_every_updates=1"]


def commands() -> list[list[str]]:
    """Return the page's commands, split as a shell would split them."""
    lines = [line for block in reversed(blocks(PAGE)) for line in block.replace("\\\n", " ").splitlines()]
    order = sorted((line for line in lines if line.startswith("ziggurat ")), key=lambda line: PAGE.index(line[:60]))
    return [shlex.split(line)[1:] for line in order]


@pytest.mark.slow
def test_every_command_of_the_page_works(
    downloaded: Downloaded, tiny_folder: Path, tmp_path: Path, ziggurat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloaded()
    monkeypatch.chdir(tmp_path)
    for name, repeats in (("my", 2), ("dev", 1), ("test", 1), ("general", 6)):
        for side, sentences in (("de", SENTENCES), ("en", TARGETS)):
            Path(f"{name}.{side}").write_text("".join(f"{line}\n" for line in sentences * repeats), encoding="utf-8")
    tiny = tiny_experiment(tiny_folder, stop={"updates": 1})
    six = tiny.model.encoder.model_copy(update={"layers": 6})  # the page grows it to 12
    train(
        tmp_path / "runs" / "a",
        tiny.model_copy(update={"model": tiny.model.model_copy(update={"encoder": six})}),
        console=QUIET,
    )
    typed = commands()
    verbs = [words[0] for words in typed]
    assert [verbs.count(verb) for verb in ("import", "prepare", "train", "evaluate", "export")] == [1, 3, 5, 2, 1]
    for words in typed:
        if words[0] == "train":
            words = [word for word in words if word.split("=")[0] not in {key.split("=")[0] for key in QUICK}] + QUICK
        done = ziggurat(*words)
        assert done.status == 0, (words, done.err)
    before = weights(open_model("imported").model)
    for run, changed in (("mine", 10), ("lora", 1), ("mixed", 10)):
        after = weights(open_model(f"runs/{run}").model)
        unlike = [name for name in before if not torch.equal(before[name], after[name])]
        assert len(unlike) >= changed, run
        losses = [record["nll"] for record in records(tmp_path / "runs" / run, "train")]
        assert all(0 < loss < 20 for loss in losses), run  # with the bias of -1e9 it would be 10^6
        if run == "lora":
            assert all(name.endswith(("qkv_proj.weight", "q_proj.weight", "kv_proj.weight")) for name in unlike)
    # An epoch is the user's own text and the same amount of general text.
    mixed, stages = Store.open("stores/mixed").train, load_experiment("runs/mixed/config.yaml").data.stages
    assert (
        np.bincount(mixed.corpora[CorpusMix(mixed, stages, 1.0, seed=1).chosen(0)]).tolist() == [len(SENTENCES) * 2] * 2
    )
    log = Path("runs/mine/log.txt").read_text(encoding="utf-8")
    assert "tokens that its output bias rules out have no loss" in log
    # A separate vocabulary is refused, and the message names the way out.
    own = ["data.store=other", "data.subword={kind: unigram, vocabulary_size: 320}", *typed[1][3:]]
    assert ziggurat("prepare", "imported/config.yaml", *own).status == 0
    wrong = ziggurat("train", "imported/config.yaml", *own, "training.start_from=imported", "-r", "w")
    assert wrong.status == 2
    assert "`data.subword.kind=existing data.subword.source_model=imported`" in wrong.err
