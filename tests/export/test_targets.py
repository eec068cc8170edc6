"""Every recipe, made narrow: each target that it reaches computes the same; the others say why not."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.config.update_golden import load_once
from tests.export.examples import SENTENCES, random_model
from ziggurat.config import Experiment, ModelConfig
from ziggurat.config.recipes import recipe_names
from ziggurat.data.subword import SentencePieceTokenizer, save_tokenizers
from ziggurat.export.plain import ExportedModel
from ziggurat.export.targets import TARGETS
from ziggurat.models.directory import weights
from ziggurat.models.seq2seq import Seq2Seq

CLOSE = {"atol": 3e-5, "rtol": 0.0}


def narrow(experiment: Experiment) -> Experiment:
    """The same structure with few, narrow layers."""
    model = experiment.model
    values = model.model_dump() | {"preset": None, "d_model": 16, "d_ff": 24, "heads": 2}
    for side, layers in (("encoder", 3), ("decoder", 2)):
        values[side] |= {"layers": min(layers, values[side]["layers"])}
    wider = {"d_model": 24, "heads": 3} if model.encoder_width != model.d_model else {"d_model": None, "heads": None}
    values["encoder"] |= {**wider, "d_ff": None}
    values["wiring"] |= {"planned_encoder_layers": None}
    values["embedding"] |= {"max_positions": 64}
    return experiment.model_copy(update={"model": ModelConfig.model_validate(values)})


@cache
def structures() -> dict[str, Experiment]:
    """One recipe of each structure, by name."""
    found: dict[str, tuple[str, Experiment]] = {}
    for name in recipe_names():
        experiment = narrow(load_once(name))
        free = {"dropout", "init"}
        key = json.dumps({k: v for k, v in experiment.model.model_dump().items() if k not in free}, sort_keys=True)
        found.setdefault(key, (name, experiment))
    return dict(found.values())


def log_probabilities(model: Seq2Seq, source: list[int], target: list[int]) -> Tensor:
    """Return [target + 1, V] of the model itself, in fp64."""
    with torch.inference_mode():
        ids = torch.tensor([source])
        memory = model.encode(ids, torch.ones_like(ids, dtype=torch.bool))
        return model.logits(model.decode(torch.tensor([target]), memory))[0].log_softmax(-1)


def test_every_recipe_computes_the_same_in_every_target_it_reaches(
    tokenizer: SentencePieceTokenizer, transformers: ModuleType, tmp_path: Path
) -> None:
    for name, experiment in structures().items():
        (tmp_path / name).mkdir()
        try:
            check(experiment, tokenizer, tmp_path / name)
        except AssertionError as error:
            error.add_note(f"recipe: {name}")
            raise


def check(experiment: Experiment, tokenizer: SentencePieceTokenizer, work: Path) -> None:
    """Compare what each target computes of three pairs with the model itself."""
    torch_model = random_model(experiment.model, tokenizer)
    save_tokenizers(work, tokenizer, tokenizer)
    model = ExportedModel(experiment, weights(torch_model), work, tokenizer, tokenizer)
    sources = tokenizer.encode(SENTENCES[:3])
    targets = tokenizer.encode(SENTENCES[2::-1])
    reference = torch_model.double()
    pairs = list(zip(sources, targets, strict=True))
    expected = [log_probabilities(reference, [*s, tokenizer.eos], [tokenizer.bos, *t]) for s, t in pairs]
    for target, check_target in (("ctranslate2", check_ctranslate2), ("huggingface", check_huggingface)):
        reasons = TARGETS[target].reasons(experiment)
        if reasons:
            assert all(len(reason) > 20 for reason in reasons)
            continue
        folder = work / target
        folder.mkdir()
        model = dataclasses.replace(model, tensors={k: t.float() for k, t in model.tensors.items()})
        TARGETS[target].write(folder, model, None)
        check_target(folder, tokenizer, pairs, expected)


def check_ctranslate2(
    folder: Path, tokenizer: SentencePieceTokenizer, pairs: list[tuple[list[int], list[int]]], expected: list[Tensor]
) -> None:
    import ctranslate2

    translator = ctranslate2.Translator(str(folder), intra_threads=1)
    scored = translator.score_batch([tokenizer.pieces(s) for s, _ in pairs], [tokenizer.pieces(t) for _, t in pairs])
    for (_, target), wanted, result in zip(pairs, expected, scored, strict=True):
        steps = torch.tensor([*target, tokenizer.eos])[:, None]
        torch.testing.assert_close(torch.tensor(result.log_probs).double(), wanted.gather(-1, steps)[:, 0], **CLOSE)


def check_huggingface(
    folder: Path, tokenizer: SentencePieceTokenizer, pairs: list[tuple[list[int], list[int]]], expected: list[Tensor]
) -> None:
    from transformers import AutoModelForSeq2SeqLM

    model, notes = AutoModelForSeq2SeqLM.from_pretrained(folder, output_loading_info=True)
    assert not any(notes.values())
    for (source, target), wanted in zip(pairs, expected, strict=True):
        with torch.inference_mode():
            given = model.eval()(
                input_ids=torch.tensor([[*source, tokenizer.eos]]),
                decoder_input_ids=torch.tensor([[tokenizer.bos, *target]]),
            )
        found = given.logits[0, :, : wanted.shape[1]].double().log_softmax(-1)
        torch.testing.assert_close(found, wanted, **CLOSE)


def test_which_recipes_reach_what() -> None:
    experiments = structures().values()
    counts = {name: sum(not target.reasons(e) for e in experiments) for name, target in TARGETS.items()}
    assert counts["ziggurat"] == len(experiments) > 20
    assert 0 < counts["huggingface"] <= counts["ctranslate2"] < len(experiments)


@pytest.mark.parametrize(
    ("choices", "target", "count"),
    [
        ({"family": "rnmt", "embedding": {"positions": "none", "sharing": "none"}}, "plain", 1),
        ({"encoder": {"history": "dlcl"}, "memory": "transparent", "residual": "rezero"}, "plain", 4),
        ({"encoder": {"attention": "relative"}}, "ctranslate2", 1),
        ({"encoder": {"attention": "relative"}, "embedding": {"positions": "none"}}, "ctranslate2", 0),
        ({"norm": "rms", "activation": "swiglu", "encoder": {"residual": "post"}}, "huggingface", 3),
        ({"norm": "rms", "activation": "swiglu", "encoder": {"residual": "post"}}, "ctranslate2", 0),
        ({"embedding": {"positions": "rotary"}, "attention": {"qk_norm": "l2", "query_scale": True}}, "huggingface", 3),
        ({"residual": "deepnorm"}, "huggingface", 0),
        ({"residual": "layer_scale"}, "ctranslate2", 0),
        ({"residual": "admin"}, "plain", 2),
        ({"residual": "admin"}, "ctranslate2", 0),
        ({"residual": "admin", "wiring": {"omega_trainable": False}}, "plain", 0),
    ],
)
def test_all_reasons_come_together(choices: dict[str, object], target: str, count: int) -> None:
    data = {"source_language": "de", "target_language": "en", "store": "none"}
    reasons = TARGETS[target].reasons(Experiment.model_validate({"data": data, "model": choices}))
    assert len(reasons) == count, reasons
