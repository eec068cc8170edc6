"""Guided alignment: its loss against plain loops, for all models and ways to cut an update; runs; what it teaches."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.conftest import tiny_experiment
from tests.small import small_config
from tests.train.batches import LENGTHS, LINKS, batches
from tests.train.runs import QUIET, final_bytes, records
from ziggurat.config import Experiment
from ziggurat.config.depth import LeftOut
from ziggurat.config.experiment import Experiment as Checked
from ziggurat.config.load import change_section
from ziggurat.config.train import LossConfig, RecomputeConfig
from ziggurat.data.aligner import error_rate, format_links
from ziggurat.data.babel import generate_aligned
from ziggurat.data.corpus import Store
from ziggurat.data.loader import Batch, SpecialIds, collate
from ziggurat.data.prepare import prepare
from ziggurat.data.subword import Tokenizer
from ziggurat.data.word_links import LinkMapper, PieceUnits, WordCounter
from ziggurat.model.attention.cache import KeptWeights
from ziggurat.model.build import build_model, set_recompute
from ziggurat.model.depth import pruned_experiment
from ziggurat.model.directory import open_model
from ziggurat.model.seq2seq import AlignmentHead, Seq2Seq
from ziggurat.system.errors import DataError
from ziggurat.train.loop import train
from ziggurat.train.objective import autocast, batch_loss

KINDS: dict[str, dict[str, Any]] = {
    "pre": {},
    "post": {"residual": "post"},
    **{
        kind: {"decoder": {"attention": kind}}
        for kind in ("relative", "average", "simplified_average", "ssru", "merged", "merged_full", "merged_gated")
    },
    "transparent": {"memory": "transparent"},
    "hyper": {"residual": "hyper", "wiring": {"streams": 2}},
    "by sub-layers": {"decoder": {"history": "dlcl"}, "combination": {"unit": "sublayer"}},
    "value residual": {"attention": {"cross_value_residual": "learned"}},
    "rnmt": {"family": "rnmt", "embedding": {"positions": "none", "sharing": "none"}},
}


def tiny(kind: str = "pre", layer: int = -1, head: int | None = 1, **choices: Any) -> Seq2Seq:
    still = {"dropout": {"residual": 0.0, "embedding": 0.0, "transparent": 0.0}, "embedding": {"sharing": "none"}}
    model = build_model(small_config(2, 2, **{**still, **KINDS[kind], **choices}), 20, 20).double()
    model.decoder.aligned = AlignmentHead(layer, head)
    with torch.no_grad():  # attention that is far from uniform
        for parameter in model.parameters():
            parameter *= 1.5
    return model


def loss_config(weight: float | None, normalisation: str = "tokens") -> LossConfig:
    alignment = None if weight is None else {"weight": weight}
    return LossConfig.model_validate({"alignment": alignment, "normalisation": normalisation})


def attention_of(model: Seq2Seq, batch: Batch) -> Tensor:
    kept = KeptWeights(model.decoder.aligned.head)
    model(batch.source, batch.source_mask, batch.target_in, None, kept)
    assert kept.weights is not None
    return kept.weights


def plain_loss(attention: Tensor, normalisation: str, tokens: int, sentences: int) -> Tensor:
    """Return the loss of the first pairs by loops, differentiable."""
    total = attention.new_zeros(())
    for row, links in enumerate(LINKS[: len(attention)]):
        length = LENGTHS[row][1] + 1
        weight = {"tokens": 1 / tokens, "sentence_sum": 1 / sentences, "sentence_mean": 1 / (length * sentences)}
        for target in range(length):
            linked = [s for s, t in links if t == target]
            for source in linked:
                total = total - weight[normalisation] / len(linked) * torch.log(attention[row, target, source])
    return total


@pytest.mark.parametrize("normalisation", ["tokens", "sentence_mean", "sentence_sum"])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradient_are_those_of_plain_loops(kind: str, normalisation: str) -> None:
    model, (batch,) = tiny(kind), batches([4], linked=True)
    assert batch.source.shape[1] != batch.target_in.shape[1]
    counts = {"tokens": 31, "sentences": 8}
    guided, without = (batch_loss(model, batch, loss_config(w, normalisation), **counts) for w in (0.7, None))
    found = torch.autograd.grad(guided.objective, list(model.parameters()), allow_unused=True)
    plain = plain_loss(attention_of(model, batch), normalisation, **counts)
    expected = torch.autograd.grad(without.objective + 0.7 * plain, list(model.parameters()), allow_unused=True)
    added = float((guided.objective - without.objective).detach())
    assert added == pytest.approx(0.7 * float(plain.detach()), rel=1e-7)  # shares are stored in fp32
    assert added > 0.1
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert guided.alignment is not None
    assert guided.alignment[1] == pytest.approx(sum(len({t for _, t in links}) for links in LINKS[:4]))
    assert torch.equal(guided.nll, without.nll)
    assert without.alignment is None


def test_the_requested_head_and_layer_are_taught() -> None:
    (batch,) = batches([7], linked=True)
    model = tiny("pre")
    seen: list[Tensor] = []
    for layer in model.decoder.layers:
        attention = layer.cross_attn
        attention.dropout.register_forward_hook(lambda module, given, result: seen.append(given[0]))
    for layer in (0, 1):
        for head in (0, 1, None):
            model.decoder.aligned = AlignmentHead(layer, head)
            seen.clear()
            found = attention_of(model, batch)
            expected = seen[layer].mean(1) if head is None else seen[layer][:, head]
            torch.testing.assert_close(found, expected)
    model.decoder.aligned = AlignmentHead()
    torch.testing.assert_close(attention_of(model, batch), seen[1].mean(1))


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_search_sees_the_head_that_was_taught(kind: str) -> None:
    model, (batch,) = tiny(kind).eval(), batches([4], linked=True)
    whole = attention_of(model, batch)
    state = model.start(1, 4, keep_attention=True)
    model.admit(model.encode(batch.source, batch.source_mask), state)
    for place in range(batch.target_in.shape[1]):
        model.step(batch.target_in[:, place, None], state)
        assert state.cross_attention is not None
        real = batch.target_mask[:, place]
        torch.testing.assert_close(state.cross_attention[real, 0], whole[real, place])


def test_weights_of_zero_have_a_finite_loss_and_gradient() -> None:
    model, (batch,) = tiny("pre").float(), batches([7], linked=True)
    with torch.no_grad():
        for layer in model.decoder.layers:
            layer.cross_attn.q_proj.weight *= 1e4
    sums = batch_loss(model, batch, loss_config(1.0), tokens=31, sentences=7)
    sums.objective.backward()
    assert float((attention_of(model, batch) == 0).sum()) > 0
    assert math.isfinite(float(sums.objective.detach()))
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_bf16_stays_close() -> None:
    model, (batch,) = tiny("pre").float(), batches([7], linked=True)
    exact = batch_loss(model, batch, loss_config(1.0), tokens=31, sentences=7)
    with autocast(torch.device("cpu"), "bf16"):
        rough = batch_loss(model, batch, loss_config(1.0), tokens=31, sentences=7)
    assert exact.alignment is not None
    assert rough.alignment is not None
    assert rough.alignment.dtype == torch.float32
    torch.testing.assert_close(rough.alignment, exact.alignment, atol=0.0, rtol=0.02)


def test_an_idle_batch_teaches_nothing() -> None:
    (batch,) = batches([7], linked=True)
    idle = batch_loss(tiny("pre"), batch.idle(), loss_config(1.0), tokens=31, sentences=7)
    assert float(idle.objective.detach()) == 0.0
    assert idle.alignment is not None
    assert idle.alignment.tolist() == [0.0, 0.0]


def gradients(model: Seq2Seq, batch: Batch) -> list[Tensor | None]:
    objective = batch_loss(model, batch, loss_config(1.0), tokens=31, sentences=7).objective
    return list(torch.autograd.grad(objective, list(model.parameters()), allow_unused=True))


@pytest.mark.parametrize("kind", ["pre", "merged", "rnmt", "by sub-layers"])
@pytest.mark.parametrize("recompute", [1, "segments"])
def test_recomputed_layers_learn_the_same(kind: str, recompute: Any) -> None:
    (batch,) = batches([7], linked=True)
    dropped = {} if kind == "rnmt" else {"dropout": {"residual": 0.2, "embedding": 0.0, "attention": 0.2}}
    model = tiny(kind, **dropped).train()
    torch.manual_seed(1)
    expected = gradients(model, batch)
    set_recompute(model, RecomputeConfig(encoder=recompute, decoder=recompute))
    torch.manual_seed(1)
    for ours, plain in zip(gradients(model, batch), expected, strict=True):
        assert (ours is None and plain is None) or torch.equal(ours, plain)  # type: ignore[arg-type]


@pytest.mark.slow  # compiling takes half a minute
def test_compiled_layers_learn_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    (batch,) = batches([7], linked=True)
    for kind in ("pre", "merged"):
        model = tiny(kind, layer=0)
        expected = gradients(model, batch)
        for stack in (model.encoder, model.decoder):
            for layer in stack.layers:
                layer.compile(dynamic=True, backend="aot_eager")
        for ours, plain in zip(gradients(model, batch), expected, strict=True):
            torch.testing.assert_close(ours, plain)
    torch.compiler.reset()


def test_a_layer_that_was_left_out_teaches_nothing() -> None:
    model = tiny("pre", decoder={"layers": 2, "layer_drop": 0.9}).train()
    torch.manual_seed(0)
    (batch,) = batches([7], linked=True)
    found = [batch_loss(model, batch, loss_config(1.0), tokens=31, sentences=7).alignment for _ in range(30)]
    counts = {round(float(sums[1])) for sums in found if sums is not None}
    assert counts == {0, 9}


def experiment(folder: Path, *, guided: bool = True, **training: Any) -> Experiment:
    """The tiny experiment with gold alignments of its pairs; its store is prepared."""
    plain = tiny_experiment(folder, **training)
    values, gold = plain.model_dump(), [format_links(pair.sure) + "\n" for pair in generate_aligned(320, 5)]
    for split, part in (("train", gold[:300]), ("dev", gold[300:])):
        (folder / f"{split}.align").write_text("".join(part))
        values["data"][split][0]["alignment"] = str(folder / f"{split}.align")
    if guided:
        values["training"]["loss"]["alignment"] = {"weight": 0.5, "layer": 1, "head": 1}
    found = Checked.model_validate(values)
    prepare(found.data)
    return found


@pytest.fixture(scope="module")
def guided(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    return experiment(tmp_path_factory.mktemp("guided"), checkpoint={"every_updates": 3}, log_every_updates=4)


EVERYTHING: dict[str, Any] = {
    "precision": "bf16",
    "batch": {"accumulate": 2},
    "growth": {"stages": [{"layers": 1, "decoder_layers": 1, "updates": 4}], "keep_stages": False},
    "loss": {"alignment": {"layer": None, "weight": 0.5}},
}


@pytest.mark.parametrize("choices", [{}, EVERYTHING], ids=["plain", "bf16, accumulation, growth"])
def test_a_run_reports_it_and_resumes_exactly(choices: dict[str, Any], guided: Experiment, tmp_path: Path) -> None:
    guided = change_section(guided, {"training": choices}, "")
    train(tmp_path / "whole", guided, console=QUIET)
    found = [record["alignment_loss"] for record in records(tmp_path / "whole", "train")]
    assert len(found) == 2
    assert found[0] > found[1] > 0
    short = change_section(guided, {"training": {"stop": {"updates": 5}}}, "")
    train(tmp_path / "parts", short, console=QUIET)
    train(tmp_path / "parts", guided, resume=True, console=QUIET)
    assert final_bytes(tmp_path / "parts", 8) == final_bytes(tmp_path / "whole", 8)
    assert [record["alignment_loss"] for record in records(tmp_path / "parts", "train")] == found
    assert "alignment " in (tmp_path / "whole" / "log.txt").read_text()


def by_pairs(model: Seq2Seq, store: Store) -> float:
    """Return the mean cross-entropy of the links of the dev set's target tokens, computed pair by pair."""
    table, total, count = store.dev, 0.0, 0
    assert table is not None
    mapper, head = LinkMapper(store.source, store.target), model.decoder.aligned
    for index in range(len(table)):
        sides = tuple([ids[0]] for ids in table.pairs([index]))
        batch = collate(*sides, np.array([index]), SpecialIds.of(store.source, store.target))
        attention, linked = attention_of(model, batch)[0].detach(), defaultdict(list)
        _, targets, sources = mapper.piece_links(table.links([index]), *sides)
        for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
            linked[target].append(source)
        for target, of_target in linked.items():
            total -= sum(math.log(attention[target, source]) for source in of_target) / len(of_target)
        count += len(linked)
    assert head == AlignmentHead(0, 0)
    return total / count


@pytest.mark.slow
def test_validation_reports_it(guided: Experiment, tmp_path: Path) -> None:
    train(tmp_path / "run", guided, console=QUIET)
    (found,) = [record["alignment_loss"] for record in records(tmp_path / "run", "validation")]
    opened = open_model(tmp_path / "run")
    assert found == pytest.approx(by_pairs(opened.model, Store.open(guided.data.store)), rel=1e-4)
    assert f"alignment {found:.3f}" in (tmp_path / "run" / "log.txt").read_text().split("dev nll")[1]


def test_a_store_without_alignments_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    plain = tiny_experiment(tiny_folder)
    wanting = change_section(plain, {"training": {"loss": {"alignment": {}}}}, "")
    with pytest.raises(DataError, match="holds no word alignments"):
        train(tmp_path / "run", wanting, console=QUIET)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_without_guidance_ignores_alignments(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    train(tmp_path / "run", experiment(folder, guided=False), console=QUIET)
    assert all("alignment_loss" not in record for record in records(tmp_path / "run"))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"training": {"loss": {"alignment": {"layer": 7}}}}, "`layer: 7`, but the decoder has"),
        ({"training": {"loss": {"alignment": {"head": 9}}}}, "`head: 9`, but the decoder's attention has"),
        ({"training": {"loss": {"alignment": {"head": 0}}}}, "heads are counted from 1"),
        (
            {"training": {"loss": {"alignment": {"layer": 1}}, "growth": {"stages": [{"layers": 1, "updates": 3}]}}},
            "new layers change the numbers",
        ),
        (
            {
                "training": {"loss": {"alignment": {"layer": 2}}},
                "model": {
                    "family": "rnmt",
                    "embedding": {"positions": "none", "sharing": "none"},
                    "dropout": {"activation": 0.0},
                },
            },
            "only in decoder layer 1",
        ),
    ],
)
def test_models_that_cannot_be_guided_are_refused(guided: Experiment, changes: dict[str, Any], complaint: str) -> None:
    values = guided.model_dump()
    values["model"]["encoder"]["layers"] = values["model"]["decoder"]["layers"] = 2
    for section, keys in changes.items():
        for key, value in keys.items():
            old = values[section][key]
            values[section][key] = {**old, **value} if isinstance(old, dict) else value
    with pytest.raises(ValueError, match=complaint):
        Checked.model_validate(values)


def test_the_taught_layer_keeps_its_role_where_others_are_left_out(guided: Experiment) -> None:
    def after(layers: int, layer: int | None, left_out: set[int]) -> int | str | None:
        deep = change_section(guided.model, {"decoder": {"layers": layers}}, "model")
        loss = change_section(guided.training, {"loss": {"alignment": {"layer": layer}}}, "training")
        model = guided.model_copy(update={"model": deep, "training": loss})
        found = pruned_experiment(model, deep, LeftOut(decoder=frozenset(left_out))).training.loss.alignment
        return "none" if found is None else found.layer

    assert after(6, 4, {1, 5}) == 3
    assert after(6, None, {2, 3}) == 4  # the last one, with its new number
    assert after(6, None, set()) is None
    assert after(6, 4, {4}) == "none"
    assert after(6, None, {6}) == "none"


def test_growth_stages_keep_the_taught_layer(guided: Experiment) -> None:
    stages = {"growth": {"stages": [{"layers": 1, "updates": 5}]}}
    grown = guided.model_copy(update={"training": change_section(guided.training, stages, "training")})
    smaller = change_section(guided.model, {"encoder": {"layers": 1}}, "model")
    found = pruned_experiment(grown, smaller, LeftOut(encoder=frozenset({2})))
    assert Experiment.model_validate(found.model_dump()).training.growth is None


def words_of_pieces(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[set[int]]]:
    """Return the ids of a text, and the word of each piece."""
    spans, _ = WordCounter("split", tokenizer).units(text, text)
    ids = np.array(tokenizer.encode([text])[0], np.int32)
    begin, end = PieceUnits(tokenizer).find([ids], np.zeros(len(spans), np.int64), np.array(spans))
    return ids.tolist(), [
        {word for word, (b, e) in enumerate(zip(begin, end, strict=True)) if b <= place < e}
        for place in range(len(ids))
    ]


def attended_error(run: Path) -> float:
    """Return the AER of each target piece's largest attention, with the reference as decoder input, on unseen pairs."""
    opened, pairs = open_model(run), list(generate_aligned(2100, 1))[2000:]
    (source, target), model = opened.tokenizers, opened.model
    found = []
    for pair in pairs:
        ids, words = words_of_pieces(source, pair.low)
        target_ids, target_words = words_of_pieces(target, pair.high)
        kept = KeptWeights(model.decoder.aligned.head)
        given = torch.tensor([[*ids, source.eos]])
        with torch.no_grad():
            memory = model.encode(given, torch.ones_like(given, dtype=torch.bool))
            model.decode(torch.tensor([[target.bos, *target_ids]]), memory, kept)
        assert kept.weights is not None
        best = kept.weights[0, : len(target_ids), : len(ids)].argmax(1).tolist()
        found.append({(i, j) for t, s in enumerate(best) for i in words[s] for j in target_words[t]})
    return error_rate(found, [pair.sure for pair in pairs], [pair.possible for pair in pairs]).error_rate


@pytest.mark.slow  # two runs of 15 seconds each
def test_a_taught_head_looks_at_the_right_words(tmp_path: Path) -> None:
    values = tiny_experiment(tmp_path).model_dump()
    pairs = list(generate_aligned(2000, 1))
    for side, name in enumerate(("qlo", "qhi")):
        (tmp_path / f"train.{name}").write_text("".join(pair[side] + "\n" for pair in pairs))
    values["data"]["alignment"] = {"compute": "hmm"}
    values["model"] |= {"d_model": 64, "d_ff": 128, "heads": 4}
    values["training"] |= {
        "batch": {"max_tokens": 1000},
        "schedule": {"peak": 4e-3, "warmup_updates": 50},
        "stop": {"updates": 300},
    }
    plain = Checked.model_validate(values)
    values["training"]["loss"]["alignment"] = {"weight": 0.3}
    guided = Checked.model_validate(values)
    prepare(plain.data)
    errors = {}
    for name, choice in (("plain", plain), ("guided", guided)):
        train(tmp_path / name, choice, console=QUIET)
        errors[name] = attended_error(tmp_path / name)
    assert errors["guided"] < 0.35, errors
    assert errors["guided"] < errors["plain"] - 0.15, errors
