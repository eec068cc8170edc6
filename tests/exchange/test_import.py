"""Plain Transformers from transformers and fairseq as model directories, compared with the originals."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.exchange.conftest import Written
from tests.exchange.examples import SENTENCES, log_probabilities
from ziggurat.data.subword import SentencePieceTokenizer
from ziggurat.exchange.anatomy import dissect
from ziggurat.exchange.exporter import export_model
from ziggurat.exchange.import_fairseq import _ids
from ziggurat.exchange.imported import TokenizerConfig, layer_names, positions_from, refuse_languages_apart
from ziggurat.exchange.importer import import_checkpoint
from ziggurat.model.directory import open_model
from ziggurat.model.tensors import weights
from ziggurat.system.errors import ConfigError, DataError, ExportError
from ziggurat.translate.translator import load_translator

CLOSE = {"atol": 3e-5, "rtol": 0.0}
SIZES = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 20,
    "max_position_embeddings": 64,
    "init_std": 0.4,
}


def their_ids(tokenizer: SentencePieceTokenizer) -> dict[str, int]:
    """Return our pieces in a different order, without the tag."""
    pieces = [p for p in tokenizer.pieces(range(tokenizer.size - 1)) if p not in ("<s>", "<pad>", "</s>", "<unk>")]
    return {piece: number for number, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", *reversed(pieces)])}


@pytest.mark.parametrize(
    ("name", "classes", "choices"),
    [
        ("Marian", "MarianMTModel", {"activation_function": "relu", "scale_embedding": True}),
        ("Marian", "MarianMTModel", {"activation_function": "swish", "scale_embedding": True}),
        ("Pegasus", "PegasusForConditionalGeneration", {"activation_function": "gelu", "scale_embedding": False}),
        ("M2M100", "M2M100ForConditionalGeneration", {"activation_function": "relu", "scale_embedding": True}),
        ("Blenderbot", "BlenderbotForConditionalGeneration", {"activation_function": "gelu"}),
    ],
)
def test_a_model_of_transformers_computes_the_same(
    name: str,
    classes: str,
    choices: dict[str, Any],
    tokenizer: SentencePieceTokenizer,
    transformers: ModuleType,
    tmp_path: Path,
) -> None:
    size = tokenizer.size - 1  # without the tag
    control = {"pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0, "decoder_start_token_id": 2, "vocab_size": size}
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**SIZES, **choices, **control, forced_eos_token_id=None)
    theirs = getattr(transformers, classes)(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    ids = their_ids(tokenizer)
    (tmp_path / "theirs" / "vocab.json").write_text(json.dumps(ids))
    for side in ("source", "target"):
        (tmp_path / "theirs" / f"{side}.spm").write_bytes(tokenizer.model)
    report = import_checkpoint(tmp_path / "theirs", tmp_path / "ours", languages="de-en")
    assert report["kind"] == config.model_type
    ours = open_model(tmp_path / "ours").model
    source, target = tokenizer.encode(SENTENCES[:2])
    names = tokenizer.pieces(range(size))
    found = log_probabilities(ours, [*source, tokenizer.eos], [tokenizer.bos, *target])
    with torch.inference_mode():
        wanted = (
            theirs(
                input_ids=torch.tensor([[ids[names[i]] for i in (*source, tokenizer.eos)]]),
                decoder_input_ids=torch.tensor([[2, *(ids[names[i]] for i in target)]]),
            )
            .logits[0]
            .log_softmax(-1)
        )
    order = [ids[n] for n in names]
    torch.testing.assert_close(found[:, : len(order)], wanted[:, order], **CLOSE)


def test_m2m100_is_refused_if_its_tokenizer_has_the_languages(
    tokenizer: SentencePieceTokenizer, transformers: ModuleType, tmp_path: Path
) -> None:
    """The model's own tokenizer writes the folder, so vocab.json has no language code."""
    ids, folder = their_ids(tokenizer), tmp_path / "theirs"
    (tmp_path / "ids").write_text(json.dumps(ids))
    theirs = transformers.M2M100Tokenizer(str(tmp_path / "ids"), str(_model(tokenizer, tmp_path / "spm")))
    theirs.save_pretrained(folder)
    languages = theirs.lang_code_to_id
    assert min(languages.values()) == len(ids)
    config = transformers.M2M100Config(**SIZES, vocab_size=len(ids) + len(languages) + theirs.num_madeup_words)
    transformers.M2M100ForConditionalGeneration(config).save_pretrained(folder)
    for side in ("source", "target"):
        _model(tokenizer, folder / f"{side}.spm")
    with pytest.raises(ExportError, match=rf"theirs: M2M100 with languages .* has {len(languages) + 8} rows more than"):
        import_checkpoint(folder, tmp_path / "ours", languages="de-en")
    refuse_languages_apart(folder, ids, len(ids) + 8, 8)  # only padding


@pytest.mark.slow
def test_export_and_import(written: Written, text: Path, tmp_path: Path, transformers: ModuleType) -> None:
    decoding = {"length_penalty": {"kind": "power", "alpha": 1.0}}
    path = written(residual="post", embedding={"zero_start": True}, decoding=decoding)
    export_model(path, "huggingface", tmp_path / "out", verify=text)
    import_checkpoint(tmp_path / "out", tmp_path / "back")
    with pytest.raises(ConfigError, match="already holds a model; `--force` replaces it"):
        import_checkpoint(tmp_path / "out", tmp_path / "back")
    back = load_translator(tmp_path / "back", max_length={"ratio": 0.0, "extra": 20, "limit": 20})
    assert back.target_language == "en"
    ours = load_translator(path, endings="beam")  # as written for transformers
    assert list(back.source_tokenizer.tags) == list(back.target_tokenizer.tags) == ["<bt>"]
    for tag in (None, "<bt>"):
        texts = [t.text for t in ours.translate(SENTENCES, tag=tag)]
        assert [t.text for t in back.translate(SENTENCES, tag=tag)] == texts


@pytest.mark.parametrize("key", ["additional_special_tokens", "extra_special_tokens"])
def test_special_tokens_that_no_text_contains_are_tags(key: str, tokenizer: SentencePieceTokenizer) -> None:
    known = SentencePieceTokenizer(tokenizer.model)
    ids = {"</s>": 0, "<old>": 1, "__fr__": 2, "<bt>": 3, "a": 4}
    config = TokenizerConfig.model_validate({key: ["<bt>", "</s>", {"content": "<old>", "special": True}]})
    assert (config.tags(ids, [known]), config.unknown(ids)) == (["<old>", "__fr__", "<bt>"], [])
    named = TokenizerConfig.model_validate({key: {"noise": "<noise>"}})
    assert named.tags(ids, [known]) == ["__fr__"]
    assert named.unknown(ids) == ["special tokens without an id in vocab.json, such as <noise>"]


def fairseq_checkpoint(path: Path, folder: Path, *, learned: bool, **options: Any) -> Path:
    """Write the model in `path` as a checkpoint in fairseq's layout, with rows in the dictionary's order."""
    opened = open_model(path)
    config = opened.experiment.model
    anatomy = dissect(config, weights(opened.model), 64)
    model: dict[str, Tensor] = {}
    for name, stack in (("encoder", anatomy.encoder), ("decoder", anatomy.decoder)):
        model[f"{name}.version"] = torch.tensor([3.0])
        model[f"{name}.embed_tokens.weight"] = stack.embedding.clone()
        if learned:
            assert stack.positions is not None
            model[f"{name}.embed_positions.weight"] = torch.cat([torch.zeros(2, 16), stack.positions])
        else:
            model[f"{name}.embed_positions._float_tensor"] = torch.zeros(1)
        if stack.final_norm is not None:
            model[f"{name}.layer_norm.weight"] = stack.final_norm.weight
            model[f"{name}.layer_norm.bias"] = stack.final_norm.bias  # type: ignore[assignment]
        for number, layer in enumerate(stack.layers):
            model |= {f"{name}.layers.{number}.{key}": tensor.clone() for key, tensor in layer_names(layer)}
            if name == "encoder":
                model[f"{name}.layers.{number}.fc1_weight"] = torch.zeros(1)
    model["decoder.output_projection.weight"] = anatomy.output.weight.clone()
    values: dict[str, Any] = {
        "arch": "transformer_iwslt_de_en",
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_embed_dim": 16,
        "decoder_embed_dim": 16,
        "encoder_normalize_before": config.residual == "pre",
        "decoder_normalize_before": config.residual == "pre",
        "activation_fn": "relu",
        "max_source_positions": 64,
        "max_target_positions": 64,
        "source_lang": "de",
        "target_lang": "en",
        **options,
    }
    folder.mkdir(exist_ok=True)
    content = {"args": None, "cfg": {"model": argparse.Namespace(**values)}, "model": model}
    torch.save(content, folder / "checkpoint.pt")
    return folder / "checkpoint.pt"


def dictionary(tokenizer: SentencePieceTokenizer, path: Path) -> Path:
    """fairseq's ids are 0 <s>, 1 <pad>, 2 </s>, 3 <unk>, then the file; ours are 0 <pad>, 1 <unk>, 2 <s>, 3 </s>."""
    path.write_text("".join(f"{piece} 1\n" for piece in tokenizer.pieces(range(4, tokenizer.size))))
    return path


@pytest.mark.parametrize(("residual", "learned"), [("pre", True), ("post", False)])
def test_a_fairseq_checkpoint_computes_the_same(
    residual: str, learned: bool, written: Written, tokenizer: SentencePieceTokenizer, tmp_path: Path
) -> None:
    positions = {"positions": "learned", "max_positions": 64, "sharing": "none", "output_bias": False}
    path = written(residual=residual, embedding=positions)
    original = open_model(path).model
    if not learned:
        for embedding in (original.source_embedding, original.target_embedding):
            embedding.positions.weight.data = positions_from(2, 64, 16)  # type: ignore[union-attr]
    checkpoint = fairseq_checkpoint(path, tmp_path / "fairseq", learned=learned)
    with pytest.warns(UserWarning, match="is a pickle"):
        report = import_checkpoint(
            checkpoint,
            tmp_path / "ours",
            dictionaries=[dictionary(tokenizer, tmp_path / "dict.txt")],
            models=[_model(tokenizer, tmp_path / "spm.model")],
        )
    assert report["sharing"] == "none"
    ours = open_model(tmp_path / "ours").model
    source, target = tokenizer.encode(SENTENCES[:2])
    # The first four rows are control symbols in a different order; fairseq's </s>, which starts the target, is row 2.
    wanted = log_probabilities(original, [*source, 2], [2, *target])
    found = log_probabilities(ours, [*source, tokenizer.eos], [tokenizer.bos, *target])
    order = [1, 3, 0, 2, *range(4, tokenizer.size - 1)]  # without the tag, which the imported model does not have
    assert found.shape[1] == len(order)
    torch.testing.assert_close(found, wanted[:, order].log_softmax(-1), **CLOSE)


def test_only_a_line_feed_ends_a_line_of_fairseqs_dictionary(tmp_path: Path) -> None:
    tokens = ["the", "\u2028", "a\x85b", "\x0b", "bar"]
    content = "".join(f"{token} 1{end}" for token, end in zip(tokens, ("\n", "\r\n", *"\n\n\n"), strict=True))
    control = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
    ids = control | {token: number for number, token in enumerate(tokens, start=4)}
    assert _ids(content.encode(), tmp_path) == (ids, 9)


def _model(tokenizer: SentencePieceTokenizer, path: Path) -> Path:
    path.write_bytes(tokenizer.model)
    return path


@pytest.mark.filterwarnings("ignore:.*is a pickle")
def test_fairseq_models_that_are_not_plain_are_refused_with_all_reasons(
    written: Written, tokenizer: SentencePieceTokenizer, tmp_path: Path
) -> None:
    path = written(embedding={"sharing": "none", "positions": "learned", "max_positions": 64})
    words = [dictionary(tokenizer, tmp_path / "dict.txt")]
    unlike = {"arch": "lightconv", "layernorm_embedding": True, "activation_fn": "tanh", "encoder_embed_dim": 8}
    checkpoint = fairseq_checkpoint(path, tmp_path / "fairseq", learned=True, **unlike)
    with pytest.raises(ExportError, match=r"lightconv.*layernorm_embedding.*tanh.*encoder_embed_dim: 8"):
        import_checkpoint(checkpoint, tmp_path / "out", dictionaries=words)
    checkpoint = fairseq_checkpoint(path, tmp_path / "fairseq", learned=True)
    with pytest.raises(DataError, match="--dictionary"):
        import_checkpoint(checkpoint, tmp_path / "out")
    with pytest.raises(DataError, match="no such file"):
        import_checkpoint(tmp_path / "nothing.pt", tmp_path / "out", dictionaries=words)
    with pytest.raises(ConfigError, match="de-en"):
        import_checkpoint(checkpoint, tmp_path / "out", dictionaries=words, languages="german")
    assert not (tmp_path / "out").exists()


class Harm:
    """Unpickling it would create a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.filterwarnings("ignore:.*is a pickle")
def test_a_checkpoint_runs_no_code(tokenizer: SentencePieceTokenizer, tmp_path: Path) -> None:
    torch.save({"args": Harm(tmp_path / "harm"), "model": {}}, tmp_path / "checkpoint.pt")
    with pytest.raises(DataError, match="holds more than weights and options"):
        import_checkpoint(
            tmp_path / "checkpoint.pt", tmp_path / "out", dictionaries=[dictionary(tokenizer, tmp_path / "dict.txt")]
        )
    assert not (tmp_path / "harm").exists()


def test_directories_that_are_not_plain_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mbart", "activation_function": "tanh"}))
    with pytest.raises(ExportError, match=r"mbart.*normalises embeddings.*tanh.*known are relu, gelu, silu, swish"):
        import_checkpoint(tmp_path, tmp_path / "out")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataError, match=r"config\.json"):
        import_checkpoint(tmp_path, tmp_path / "out")
    with pytest.raises(ConfigError, match="leave out `--dictionary`"):
        import_checkpoint(tmp_path, tmp_path / "out", dictionaries=[tmp_path / "dict.txt"])
