"""The parts of the GPU benchmark that a CPU can check."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import gpu_speed, gpu_translation, train_speed
from benchmarks.gpu_models import MODELS, Ours, Plain, batches_of, config_of, operations, random_batch
from ziggurat.config import ModelConfig
from ziggurat.model.build import build_model

CPU = torch.device("cpu")
OF_THE_CPU = ["gpu_speed", "--device", "cpu", "--model", "base 6-6"]
PAIRS = [(7, 5), (3, 9), (11, 1)]


def test_operations_match_the_other_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(train_speed.SHAPES, "tiny", (8, 32, 2, 3, 2))
    monkeypatch.setattr(train_speed, "VOCABULARY", 20)
    sizes = {"d_model": 8, "d_ff": 32, "heads": 2, "encoder": {"layers": 3}, "decoder": {"layers": 2}}
    model = build_model(ModelConfig.model_validate(sizes), 20, 20)
    batch = random_batch(PAIRS, 20)
    source, target = (mask.sum(1).tolist() for mask in (batch.source_mask, batch.target_mask))
    assert operations(model, batch) == train_speed.operations("tiny", source, target)


def test_averages_need_no_queries_or_keys() -> None:
    """For merged attention only the product with the memory is counted: 12 d per target and source token."""
    batch = random_batch(PAIRS, 20)
    model = build_model(config_of("MAtt 12-12", 8, 2), 20, 20)
    source, target = (mask.sum(1).double() for mask in (batch.source_mask, batch.target_mask))
    s, t = float(source.sum()), float(target.sum())
    encoder = 12 * (4 * 64 + 2 * 8 * 32)
    # For the target: query, output and network; for the source: keys, and values that both attentions share.
    of_target, of_source = 12 * (2 * 64 + 2 * 8 * 32) + 8 * 20, 12 * 2 * 64
    products = 12 * 8 * 12 * float((source * source).sum() + (source * target).sum())
    assert operations(model, batch) == 6 * (s * (encoder + of_source) + t * of_target) + products


def test_batches_have_few_shapes_and_keep_the_budget() -> None:
    batches = batches_of(2000, 50, 5, 60)
    for batch in batches:
        assert batch.source.shape[1] % 8 == batch.target_in.shape[1] % 8 == 0
        assert batch.sentences * max(batch.source.shape[1], batch.target_in.shape[1]) <= 2000
        assert batch.source_tokens == int(batch.source_mask.sum())
    assert sum(b.target_tokens for b in batches) > 0.7 * 5 * 2000


@pytest.mark.parametrize("name", MODELS)
def test_every_candidate_trains(name: str) -> None:
    shallow = {"encoder": {"layers": 1}, "decoder": {**MODELS[name]["decoder"], "layers": 1}}
    config = config_of(name, 8, 2, **shallow, dropout={"residual": 0.0, "embedding": 0.0})
    batch = random_batch(PAIRS, 30)
    for trains in (Ours(config, 30, CPU), Ours(config, 30, CPU, "recompute"), Plain(config, 30, CPU, 20)):
        losses = [float(trains.update(batch)) for _ in range(12)]
        assert losses[-1] < losses[0]


@pytest.mark.slow
def test_a_cell_that_breaks_or_does_not_fit_gets_its_own_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def out_of_memory(self: Plain, batch: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def broken(self: Ours, *_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(Plain, "update", out_of_memory)
    monkeypatch.setattr(gpu_speed, "peak", lambda *_: 1.0)
    monkeypatch.setattr(gpu_speed, "checks", lambda *_, **__: iter(()))
    monkeypatch.setattr(gpu_translation, "DECODED", ["base 6-6"])  # the others differ only in depth
    monkeypatch.setattr("sys.argv", [*OF_THE_CPU, "--tokens", "4096", "--seconds", "0.01"])
    with pytest.raises(SystemExit) as ended:
        gpu_speed.main()
    assert ended.value.code == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {row["candidate"].split()[1] for row in found["translation"]} >= {"CTranslate2", "float32", "bfloat16"}
    for row in found["translation"]:
        assert row.get("tokens_per_second", 0) > 0 or "bfloat16` needs a CPU with AVX-512" in row["skipped"]
    rows = {row["candidate"]: row for row in found["rows"]}
    assert rows["eager"]["tokens_per_second"] > 0
    assert "out of memory: 2.0 GiB more needed" in rows["plain loop"]["skipped"]
    assert rows["graphs"]["skipped"] == "CUDA graphs need a GPU"
    monkeypatch.setattr(Ours, "__init__", broken)
    monkeypatch.setattr(gpu_translation, "DECODED", [])
    with pytest.raises(SystemExit) as ended:
        gpu_speed.main()
    assert ended.value.code == 1
    rows = {row["candidate"]: row for row in json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]}
    assert rows["eager"]["skipped"] == "failed: RuntimeError: no such kernel"


@pytest.mark.slow
def test_the_pretend_accelerator_has_counts_in_place_of_speeds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(MODELS, "base 6-6", {"encoder": {"layers": 1}, "decoder": {"layers": 1}})
    monkeypatch.setattr(gpu_translation, "DECODED", ["base 6-6"])
    monkeypatch.setattr("sys.argv", ["gpu_speed", "--device", "pretend", "--model", "base 6-6"])
    with pytest.raises(SystemExit) as ended:
        gpu_speed.main()
    assert ended.value.code == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {check["name"] for check in found["checks"] if check["right"]} == {
        "fp32 and bf16", "batches sent ahead", "an update waits once"
    }  # fmt: skip
    assert found["peak_tflops"] is None
    for row in found["translation"]:
        assert (row["tokens_per_second"], row["one_sentence_ms"]) == (None, None)
        assert (row["a_step"]["waits"], row["a_step"]["copies"]) == (1, 0)
        assert row["a_search"]["launches"] > 20 * row["a_step"]["launches"] > 0
    rows = {row["candidate"]: row for row in found["rows"]}
    assert rows["eager"]["tokens_per_second"] is rows["eager"]["share"] is None
    assert rows["eager"]["an_update"]["waits"] == 1
    assert rows["eager"]["an_update"]["launches"] > 100
    assert rows["eager"]["peak_gib"] > 0
    assert "skipped" in rows["graphs"]


def test_no_cell_starts_once_time_is_up(capsys: pytest.CaptureFixture[str]) -> None:
    import argparse

    options = argparse.Namespace(model=["30-6"], tokens=[4096], compile=False, small=False, seconds=1.0)
    rows = gpu_speed.all_cells(options, gpu_speed.SMALL, CPU, gpu_speed.Clock(0.5), 1.0)
    assert [row["skipped"] for row in rows] == ["no time left"] * 2
    assert "no time left" in capsys.readouterr().out
