"""Files of released versions still load, resume and translate as before: every set in this folder (README.md)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.golden import make
from tests.train.runs import QUIET
from ziggurat.config import load_experiment
from ziggurat.config.data import FilterConfig
from ziggurat.data.corpus import STORE_FORMAT, Store
from ziggurat.data.prepare import prepare
from ziggurat.data.shortlist import read_shortlist
from ziggurat.data.store_checks import unlike_store
from ziggurat.data.subword import VOCABULARY_FORMAT
from ziggurat.exchange.exporter import REPORT_FORMAT
from ziggurat.exchange.importer import import_checkpoint
from ziggurat.exchange.onnx import FORMAT as ONNX_FORMAT
from ziggurat.exchange.onnx_runtime import load_onnx
from ziggurat.inspect.report.runs import read_run
from ziggurat.model.run_folder import CHECKPOINT_FORMAT, checkpoint_folders
from ziggurat.model.tensors import read_tensors
from ziggurat.system.files import CHECKSUMS_FORMAT
from ziggurat.train.loop import train
from ziggurat.train.records import read_records
from ziggurat.train.run import reopen_run
from ziggurat.translate.ctranslate2 import CTranslate2Translator
from ziggurat.translate.translator import load_translator

SETS = sorted(path for path in Path(__file__).parent.glob("v*") if path.is_dir())

CLOSE = {"abs": 1e-3}
"""CLOSE is the tolerance for scores, because other processors add in a different order; the best texts win by more.
"""


@pytest.fixture(params=SETS, ids=lambda path: path.name)
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of one set, made the current folder because its configurations have relative paths."""
    copy = shutil.copytree(request.param, tmp_path / "set", symlinks=True)
    if not (copy / "run" / "last").is_symlink():  # hatchling's source archives omit links to folders
        (copy / "run" / "last").symlink_to(checkpoint_folders(copy / "run")[-1].relative_to(copy / "run"))
    monkeypatch.chdir(copy)
    return copy


def assert_translates(model: Any, folder: Path, name: str) -> None:
    """Check that `model` gives the answers in the set's file `name`."""
    sources = (folder / "expected" / "sources.txt").read_text().splitlines()
    expected = json.loads((folder / "expected" / "translations.json").read_text())[name]
    found = [(t.hypotheses[0].text, t.hypotheses[0].score) for t in model.translate_stream(sources)]
    assert [text for text, _ in found] == [text for text, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], **CLOSE)


def test_the_first_and_this_version_have_a_set() -> None:
    assert SETS[0].name == "v1"
    newest = SETS[-1]
    checkpoint = checkpoint_folders(newest / "run")[-1]
    formats = {
        "store/manifest.json": STORE_FORMAT,
        "store/vocabulary.json": VOCABULARY_FORMAT,
        f"{checkpoint.relative_to(newest)}/meta.json": CHECKPOINT_FORMAT,
        "grown/checksums.json": CHECKSUMS_FORMAT,
        "onnx/onnx.json": ONNX_FORMAT,
        "onnx/export.json": REPORT_FORMAT,
    }
    found = {name: json.loads((newest / name).read_text())["format"] for name in formats}
    assert found == formats, f"a new format: `python -m tests.golden.make` makes a set next to {newest.name}"


def test_a_store(folder: Path) -> None:
    store = Store.open("store")
    store.verify()
    lines = {side: (folder / "corpus" / f"train.{side}").read_text().splitlines() for side in ("qlo", "qhi")}
    sources, targets = store.train.pairs(range(make.PAIRS))
    assert [store.source.decode(ids.tolist()) for ids in sources] == lines["qlo"]
    assert [store.target.decode(ids.tolist()) for ids in targets] == lines["qhi"]
    assert store.dev is not None
    assert store.dev.texts(range(make.DEV_PAIRS))[0] == (folder / "corpus" / "dev.qlo").read_text().splitlines()


def test_a_store_is_that_of_its_configuration_whatever_keys_came_since(folder: Path) -> None:
    config, before = load_experiment("config.yaml").data, Path("store/manifest.json").read_bytes()
    assert unlike_store(config, json.loads(before)) == []
    assert prepare(config).reused  # it refuses a store with other settings
    assert Path("store/manifest.json").read_bytes() == before
    changed = config.model_copy(update={"filters": FilterConfig(markup=True)})
    assert unlike_store(changed, json.loads(before)) == ["data.filters.markup (false -> true)"]


@pytest.mark.parametrize(("model", "which"), [("run", None), ("run", "last"), ("plain", None), ("grown", None)])
def test_a_model(folder: Path, model: str, which: str | None) -> None:
    translator = load_translator(model, which=which, device="cpu")
    assert_translates(translator, folder, "grown" if model == "grown" else "run")


def test_a_shortlist(folder: Path) -> None:
    store = Store.open("store")
    assert len(read_shortlist("shortlist.safetensors", store.source, store.target).candidates) == store.source.size


def test_an_export_to_ctranslate2(folder: Path) -> None:
    assert_translates(CTranslate2Translator("ctranslate2", device="cpu", threads=1), folder, "ctranslate2")


def test_an_export_to_onnx(folder: Path) -> None:
    assert_translates(load_onnx("onnx"), folder, "run")


def test_an_export_to_transformers_is_imported(folder: Path) -> None:
    import_checkpoint(Path("huggingface"), Path("imported"))
    limit = {"max_length": {"ratio": 1.0, "extra": 5, "limit": 1024}}  # its own settings are the defaults of `generate`
    assert_translates(load_translator("imported", device="cpu", **limit), folder, "ctranslate2")


def test_word_alignments(folder: Path) -> None:
    assert Store.open("store").train.has_links
    expected = json.loads(Path("expected/alignments.json").read_text())
    sources = Path("expected/sources.txt").read_text().splitlines()
    served = CTranslate2Translator("ctranslate2", device="cpu", threads=1)
    for name, model in (("run", load_translator("run")), ("ctranslate2", served), ("run", load_onnx("onnx"))):
        for translation, line in zip(model.translate(sources, alignments=True), expected[name], strict=True):
            alignment = translation.hypotheses[0].alignment
            assert alignment is not None
            # Added in a different order, another source token may win by a tiny margin.
            places = zip(alignment.soft, alignment.hard, map(int, line.split()), strict=True)
            assert all(row[then] > row[now] - 1e-3 for row, now, then in places)


def test_a_run_is_reported(folder: Path) -> None:
    run = read_run(Path("run"))
    assert [record["update"] for record in run.validations] == [make.UPDATES // 2, make.UPDATES]
    assert [record.update for record in read_records(Path("run"))] == [0, make.UPDATES]


def test_a_run_is_resumed(folder: Path) -> None:
    before = everything("run/last/model.safetensors")
    experiment = reopen_run(Path("run"), [f"training.stop.updates={make.RESUMED_UPDATES}"])
    assert experiment.data == load_experiment("config.yaml").data
    train(Path("run"), experiment, resume=True, console=QUIET)
    expected = everything("expected/resumed.safetensors")
    # Bitwise equal on the processor that made the set. Others add in a different order, which the square roots of tiny
    # second moments amplify: they ended up to 2 % of the way off, whereas a run that had lost its moments was off by
    # 100 % or more.
    assert (everything("run/last/model.safetensors") - expected).norm() < 0.1 * (before - expected).norm()


def everything(file: str) -> torch.Tensor:
    """Return all numbers in a file of weights as one vector."""
    tensors = read_tensors(Path(file))
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)]).double()
