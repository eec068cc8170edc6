"""Every recipe, made narrow: targets that support it compute the same; the others report why they do not."""

from __future__ import annotations

import dataclasses
import json
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.config.update_golden import load_once
from tests.exchange.conftest import Written
from tests.exchange.examples import SENTENCES, log_probabilities, random_model
from tests.small import merged
from ziggurat.config import Experiment, ModelConfig
from ziggurat.config.recipes import recipe_names
from ziggurat.data.subword import SentencePieceTokenizer, save_tokenizers
from ziggurat.exchange import ctranslate2
from ziggurat.exchange.exporter import export_model
from ziggurat.exchange.marian_program import MARIAN_VARIABLE
from ziggurat.exchange.plain import ExportedModel
from ziggurat.exchange.targets import TARGETS
from ziggurat.model.directory import open_model
from ziggurat.model.tensors import weights
from ziggurat.system.errors import ConfigError, ExportError

CLOSE = {"atol": 3e-5, "rtol": 0.0}


def narrow(experiment: Experiment) -> Experiment:
    """The same architecture with few, narrow layers."""
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
    """One recipe for each architecture, by name."""
    found: dict[str, tuple[str, Experiment]] = {}
    for name in recipe_names():
        experiment = narrow(load_once(name))
        free = {"dropout", "init"}
        key = json.dumps({k: v for k, v in experiment.model.model_dump().items() if k not in free}, sort_keys=True)
        found.setdefault(key, (name, experiment))
    return dict(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("third", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_every_recipe_computes_the_same_in_every_supported_target(
    tokenizer: SentencePieceTokenizer, transformers: ModuleType, tmp_path: Path, third: int
) -> None:
    for name, experiment in list(structures().items())[third::3]:
        (tmp_path / name).mkdir()
        try:
            check(experiment, tokenizer, tmp_path / name)
        except AssertionError as error:
            error.add_note(f"recipe: {name}")
            raise


def check(experiment: Experiment, tokenizer: SentencePieceTokenizer, work: Path) -> None:
    """Compare what each target computes for three pairs with the model itself."""
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


POST: dict[str, Any] = {"residual": "post", "embedding": {"zero_start": True}, "layer_norm_epsilon": 1e-6}
GROWN: dict[str, Any] = {"encoder": {"layers": 3}, "decoder": {"layers": 3}, "combination": {"period": 2}}
NOT_PLAIN = {"plain", "ctranslate2", "huggingface", "argos", "marian"}
DEPTH_METHODS: dict[str, tuple[dict[str, Any], set[str], str]] = {
    "lipschitz": ({"init": {"kind": "lipschitz"}}, set(), ""),
    "branch_norm": ({"residual": "branch_norm"}, set(), ""),
    "scale_norm, fix_norm": ({"norm": "scale", "embedding": {"unit_length": True}}, {"huggingface"}, "norm: scale"),
    "tied layers": (
        {"encoder": {"layers": 4, "tied_layers": [1, 2]}, "decoder": {"layers": 4, "tied_layers": [1, 1, 2, 2]}},
        set(),
        "",
    ),
    **{kind: ({"encoder": {"solver": kind}}, NOT_PLAIN, f"encoder.solver: {kind}") for kind in ("rk2_gated", "rk4")},
    "depth growing": (
        merged(GROWN, {"memory": "hierarchical", "decoder": {"history": "cross_module"}}),
        NOT_PLAIN,
        "memory: hierarchical",
    ),
}
"""DEPTH_METHODS are choices on top of POST, the targets that refuse them, and the key that the refusals name."""


@pytest.mark.parametrize("name", DEPTH_METHODS)
@pytest.mark.parametrize("target", [t if t == "marian" else pytest.param(t, marks=pytest.mark.slow) for t in TARGETS])
def test_a_depth_method_is_verified_or_refused_with_its_key(
    target: str,
    name: str,
    written: Written,
    text: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choices, refused, key = DEPTH_METHODS[name]
    # Marian has no `min_length`, and random weights may prefer an empty translation; test_export_marian runs it.
    monkeypatch.setenv(MARIAN_VARIABLE, str(tmp_path / "nothing"))
    if target == "huggingface":
        request.getfixturevalue("transformers")
    model = written(**merged(POST, choices))
    if target in refused:
        with pytest.raises(ExportError, match=f"`{key}`"):
            export_model(model, target, tmp_path / "out", verify=text)
        return
    found = export_model(model, target, tmp_path / "out", verify=text)["verification"]
    assert found["lines"] == len(SENTENCES)
    assert found["identical"] + found["ties"] >= len(SENTENCES) - 1, "a search of another toolkit may find another tie"


def test_models_without_positions_get_tables_as_long_as_the_model_reads(
    tokenizer: SentencePieceTokenizer, transformers: ModuleType, tmp_path: Path
) -> None:
    experiment = narrow(load_once("transformer-base"))
    values = experiment.model.model_dump()
    values["embedding"] |= {"positions": "none"}
    experiment = experiment.model_copy(update={"model": ModelConfig.model_validate(values)})
    save_tokenizers(tmp_path, tokenizer, tokenizer)
    tensors = weights(random_model(experiment.model, tokenizer))
    model = ExportedModel(experiment, tensors, tmp_path, tokenizer, tokenizer)
    longest = experiment.decoding.max_source_pieces + 1  # plus end-of-sentence
    for target in ("ctranslate2", "huggingface"):
        assert not TARGETS[target].reasons(experiment)
        (tmp_path / target).mkdir()
        TARGETS[target].write(tmp_path / target, model, None)
    rows = json.loads((tmp_path / "huggingface" / "config.json").read_text())["max_position_embeddings"]
    tables = load_file(tmp_path / "huggingface" / "model.safetensors")
    assert longest <= rows == len(tables["model.encoder.embed_positions.weight"])
    import ctranslate2

    source = [tokenizer.pieces([5] * (longest - 1))]
    ctranslate2.Translator(str(tmp_path / "ctranslate2"), intra_threads=1).translate_batch(
        source, max_decoding_length=2
    )


@pytest.mark.slow
def test_the_documented_number_of_recipes_reaches_each_target() -> None:
    recipes = [load_once(name) for name in recipe_names()]
    count = {target: sum(not TARGETS[target].reasons(recipe) for recipe in recipes) for target in TARGETS}
    assert count["ziggurat"] == count["onnx"] == len(recipes)
    assert count["argos"] == count["huggingface"]
    said = {
        "README.md": f"{count['ctranslate2']} of the {len(recipes)} recipes can be exported to CTranslate2",
        "CHANGELOG.md": f"{count['ctranslate2']} of the {len(recipes)} recipes reach CTranslate2",
    }
    for page, words in said.items():
        text = (Path(__file__).resolve().parents[2] / page).read_text(encoding="utf-8")
        assert words in " ".join(text.split()), page


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


@pytest.mark.parametrize("sharing", ["all", "decoder"])
def test_pegasus_ties_all_its_matrices_or_none(
    sharing: str, written: Written, tokenizer: SentencePieceTokenizer, transformers: ModuleType, tmp_path: Path
) -> None:
    opened = open_model(written(embedding={"sharing": sharing, "output_bias": False}))
    folder = tmp_path / "out"
    folder.mkdir()
    model = ExportedModel(opened.experiment, weights(opened.model), tmp_path / "model", tokenizer, tokenizer)
    TARGETS["huggingface"].write(folder, model, None)
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["tie_word_embeddings"]) == ("pegasus", sharing == "all")
    expected = log_probabilities(opened.model.double(), [5, 6, tokenizer.eos], [tokenizer.bos, 7])
    check_huggingface(folder, tokenizer, [([5, 6], [7])], [expected])


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
        ({"residual": "admin", "embedding": {"positions": "learned", "sharing": "decoder"}}, "plain", 0),
    ],
)
def test_all_reasons_are_reported_together(choices: dict[str, object], target: str, count: int) -> None:
    data = {"source_language": "de", "target_language": "en", "store": "none"}
    reasons = TARGETS[target].reasons(Experiment.model_validate({"data": data, "model": choices}))
    assert len(reasons) == count, reasons


@pytest.mark.parametrize("target", ["ctranslate2", "argos"])
def test_without_ctranslate2_its_smallest_extra_is_named(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("transformers", "onnx", "onnxruntime", "onnxscript"):
        monkeypatch.setitem(sys.modules, package, None)
    assert ctranslate2._specs().TransformerSpec, "nothing else of the extra `export` is needed"
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(ConfigError, match=r"`ctranslate2` is not installed: pip install 'ziggurat-mt\[translate\]'"):
        TARGETS["argos"].translator(tmp_path) if target == "argos" else ctranslate2._specs()
