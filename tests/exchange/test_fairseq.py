"""fairseq checkpoints of all versions: names and options from 2017 to 2022, odd dictionary lines, wrong dictionaries.

fairseq itself is not installed here; the rules come from its repository (dictionary.py, functions upgrade_state_dict).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from tests.exchange.examples import SENTENCES
from tests.exchange.test_opus import trained
from ziggurat.config import load_experiment
from ziggurat.data.subword import SentencePieceTokenizer, load_tokenizers
from ziggurat.exchange.importer import import_checkpoint
from ziggurat.system.errors import DataError, ExportError

pytestmark = pytest.mark.filterwarnings("ignore:.*(is a pickle|its tokens are pieces of|is used for both sides)")

OPTIONS: dict[str, Any] = {
    "arch": "transformer_iwslt_de_en",
    "task": "translation",
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_embed_dim": 8,
    "decoder_embed_dim": 8,
    "encoder_normalize_before": False,
    "decoder_normalize_before": False,
    "max_source_positions": 16,
    "max_target_positions": 16,
    "source_lang": "de",
    "target_lang": "en",
}
CONTROL = 4
Change = Callable[[dict[str, Any]], object]


def parameters(rows: tuple[int, int], seed: int = 3) -> dict[str, Tensor]:
    """Return the parameters of fairseq 0.12 for a model of one layer and width 8."""
    torch.manual_seed(seed)
    made: dict[str, Tensor] = {}
    for name, count, attentions in (
        ("encoder", rows[0], ("self_attn",)),
        ("decoder", rows[1], ("self_attn", "encoder_attn")),
    ):
        at = f"{name}.layers.0"
        made |= {f"{name}.version": torch.tensor([3.0]), f"{name}.embed_tokens.weight": torch.randn(count, 8)}
        for attention in attentions:
            for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
                made |= {f"{at}.{attention}.{part}.weight": torch.randn(8, 8)}
                made |= {f"{at}.{attention}.{part}.bias": torch.randn(8)}
        for norm in (*(f"{attention}_layer_norm" for attention in attentions), "final_layer_norm"):
            made |= {f"{at}.{norm}.weight": torch.randn(8), f"{at}.{norm}.bias": torch.randn(8)}
        made |= {f"{at}.fc1.weight": torch.randn(12, 8), f"{at}.fc1.bias": torch.randn(12)}
        made |= {f"{at}.fc2.weight": torch.randn(8, 12), f"{at}.fc2.bias": torch.randn(8)}
    made["decoder.output_projection.weight"] = made["decoder.embed_tokens.weight"].clone()
    return made


def write(path: Path, model: dict[str, Tensor], changed: Change | None = None, **options: Any) -> Path:
    """Write a checkpoint as fairseq 0.12 does for a model that is older than nested options."""
    content = {"args": None, "cfg": {"model": argparse.Namespace(**OPTIONS, **options)}, "model": model}
    if changed is not None:
        changed(content)
    torch.save(content, path)
    return path


def words(path: Path, lines: list[str], end: str = "\n") -> Path:
    path.write_text("".join(f"{line}{end}" for line in lines), encoding="utf-8", newline="")
    return path


LINES = ["the 9", "house@@ 7", "s 3", ". 1"]


def imported(tmp_path: Path, checkpoint: Path, *dictionaries: Path, **more: Any) -> dict[str, Tensor]:
    import_checkpoint(checkpoint, tmp_path / "out", dictionaries=dictionaries, force=True, **more)
    return load_file(tmp_path / "out" / "model.safetensors")


def old_names(model: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters under the names in checkpoints of 2018."""
    old: dict[str, Tensor] = {}
    numbers = {"self_attn_layer_norm": 0, "encoder_attn_layer_norm": 1, "final_layer_norm": 2}
    for key, tensor in model.items():
        if part := re.fullmatch(r"(.*_attn)\.([qkv])_proj\.(\w+)", key):
            if part[2] == "q":
                whole = [model[f"{part[1]}.{name}_proj.{part[3]}"] for name in "qkv"]
                old[f"{part[1]}.in_proj_{part[3]}"] = torch.cat(whole)
        elif norm := re.fullmatch(r"(.*\.layers\.0)\.(\w+_layer_norm)\.(\w+)", key):
            place = 1 if key.startswith("encoder") and norm[2] == "final_layer_norm" else numbers[norm[2]]
            old[f"{norm[1]}.layer_norms.{place}.{norm[3]}"] = tensor
        elif key == "decoder.output_projection.weight":
            old["decoder.embed_out"] = tensor
        elif not key.endswith("version"):
            old[key] = tensor
    return old | {f"{name}.embed_positions.weights": torch.zeros(3, 8) for name in ("encoder", "decoder")}


def test_names_of_2018_give_the_same_model(tmp_path: Path) -> None:
    model = parameters((8, 8))
    model["decoder.output_projection.weight"] = torch.randn(8, 8)
    dictionary = words(tmp_path / "dict.txt", LINES)
    today = imported(tmp_path, write(tmp_path / "new.pt", model), dictionary)

    def of_2018(content: dict[str, Any]) -> None:
        options = {k: v for k, v in OPTIONS.items() if not k.startswith("max_") and k != "task"} | {"max_positions": 16}
        meter = {"train_meters": {}, "best": 1.0}
        del content["cfg"]
        content |= {"args": argparse.Namespace(**options), "optimizer_history": [], "extra_state": meter}

    old = imported(tmp_path, write(tmp_path / "old.pt", old_names(model), of_2018), dictionary)
    assert old.keys() == today.keys()
    assert all(torch.equal(old[key], today[key]) for key in today)


@pytest.mark.parametrize(
    "change",
    [
        lambda names, model: names.pop("decoder.output_projection.weight"),  # the embedding replaces it
        lambda names, model: names.update({"encoder.embed_positions._float_tensor": torch.zeros(1)}),
        lambda names, model: names.update({"encoder.layers.0.in_proj_weight": torch.zeros(1)}),  # for inference
        lambda names, model: [names.pop(f"{side}.version") for side in ("encoder", "decoder")],
        lambda names, model: names.update(
            {"decoder.layers.0.encoder_attn.in_proj_weight": joined(names, "decoder.layers.0.encoder_attn", "weight")}
        ),
    ],
)
def test_checkpoints_between_the_versions(change: Any, tmp_path: Path) -> None:
    model = parameters((8, 8))
    dictionary = words(tmp_path / "dict.txt", LINES)
    today = imported(tmp_path, write(tmp_path / "new.pt", model), dictionary)
    names = dict(model)
    change(names, model)
    other = imported(tmp_path, write(tmp_path / "other.pt", names), dictionary)
    assert all(torch.equal(other[key], today[key]) for key in today)


def joined(names: dict[str, Tensor], at: str, kind: str) -> Tensor:
    return torch.cat([names.pop(f"{at}.{part}_proj.{kind}") for part in "qkv"])


def test_nested_options_of_the_newest_checkpoints(tmp_path: Path) -> None:
    sides = {
        side: {key.removeprefix(f"{side}_"): value for key, value in OPTIONS.items() if key.startswith(f"{side}_")}
        for side in ("encoder", "decoder")
    }
    options = {"_name": "transformer", **sides, "max_source_positions": 16, "max_target_positions": 16}
    task = {"_name": "translation", "source_lang": "cs", "target_lang": "sk"}
    checkpoint = write(
        tmp_path / "new.pt", parameters((8, 8)), lambda content: content.update(cfg={"model": options, "task": task})
    )
    imported(tmp_path, checkpoint, words(tmp_path / "dict.txt", LINES))
    data = load_experiment(tmp_path / "out" / "config.yaml").data
    assert (data.source_language, data.target_language) == ("cs", "sk")


@pytest.mark.parametrize("before", ["encoder", "decoder"])
def test_pre_norm_without_the_last_norm_is_refused(before: str, tmp_path: Path) -> None:
    def changed(content: dict[str, Any]) -> None:
        setattr(content["cfg"]["model"], f"{before}_normalize_before", True)

    checkpoint = write(tmp_path / "old.pt", parameters((8, 8)), changed)
    with pytest.raises(ExportError, match=rf"{before}_normalize_before: true` without a norm at the end"):
        imported(tmp_path, checkpoint, words(tmp_path / "dict.txt", LINES))


@pytest.mark.parametrize(("stack", "number"), [("encoder", "1"), ("decoder", "7"), ("encoder", "999999")])
def test_more_layers_than_the_options_say_are_refused(stack: str, number: str, tmp_path: Path) -> None:
    model = parameters((8, 8))
    model[f"{stack}.layers.{number}.fc1.bias"] = torch.zeros(12)
    checkpoint = write(tmp_path / "deep.pt", model)
    with pytest.raises(ExportError, match=rf"`{stack}_layers: 1`, but there are parameters of layer {int(number) + 1}"):
        imported(tmp_path, checkpoint, words(tmp_path / "dict.txt", LINES))


def rows_of(tmp_path: Path, checkpoint: Path) -> dict[str, int]:
    """Return, for each piece of the imported model, its row in the source matrix."""
    theirs = torch.load(checkpoint, weights_only=False)["model"]["encoder.embed_tokens.weight"]
    ours = load_file(tmp_path / "out" / "model.safetensors")["source_embedding.tokens.weight"]
    source, _ = load_tokenizers(tmp_path / "out")
    near = torch.cdist(ours, theirs).argmin(1).tolist()
    return dict(zip(source.pieces(range(source.size)), near, strict=True))


@pytest.mark.parametrize(
    ("lines", "rows"),
    [
        (["the 9", "und 5 #fairseq:overwrite", "s 3"], {"the": 4, "und": 5, "s": 6}),
        (["the 9", "s 3", "the 5 #fairseq:overwrite"], {"the": 6, "s": 5}),
        (["<unk> 5 #fairseq:overwrite", "the 9"], {"the": 5}),
        (["the  9", " s 3", "a b 2", ". 1 "], {"the": 4, "s": 5, "a b": 6, ".": 7}),
        (["\ufeffthe 9", "s 3"], {"the": 4, "s": 5}),
        (["\u00a0 9", "\u3000 4", "s 3", "\u2028 2"], {"\u00a0": 4, "\u3000": 5, "s": 6, "\u2028": 7}),
        (["the\t9 9", "5 5", "# 1", "#fairseq:overwrite 1"], {"the\t9": 4, "5": 5, "#": 6, "#fairseq:overwrite": 7}),
        (["the -1", "s +3", ". 0"], {"the": 4, "s": 5, ".": 6}),
        (["the", "s"], {"the": 4, "s": 5}),
        (["the 9", "madeupword0000 0", "madeupword0001 0"], {"the": 4}),
    ],
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_that_fairseq_reads_have_their_rows(
    lines: list[str], rows: dict[str, int], end: str, tmp_path: Path
) -> None:
    checkpoint = write(tmp_path / "a.pt", parameters((CONTROL + len(lines),) * 2))
    imported(tmp_path, checkpoint, words(tmp_path / "dict.txt", lines, end))
    found = rows_of(tmp_path, checkpoint)
    assert {token: found[token] for token in rows} == rows
    source, _ = load_tokenizers(tmp_path / "out")
    split = [token for token in rows if not re.search(r"\s", token)]
    assert source.pieces(source.encode([" ".join(split)])[0]) == split


TOKEN = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r"), min_size=1, max_size=6).filter(
    lambda token: token == token.strip() and not token.startswith("\ufeff")
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(TOKEN, unique=True, min_size=1, max_size=12), st.integers(0, 3))
def test_any_tokens_have_their_rows(tmp_path: Path, tokens: list[str], more: int) -> None:
    tokens = [token for token in tokens if token not in ("<s>", "<pad>", "</s>", "<unk>")]
    checkpoint = write(tmp_path / "a.pt", parameters((CONTROL + len(tokens) + more,) * 2))
    dictionary = words(tmp_path / "dict.txt", [f"{token} {n}" for n, token in enumerate(tokens)])
    if more or not tokens:
        with pytest.raises((ExportError, DataError), match=r"tokens, the model|no token"):
            imported(tmp_path, checkpoint, dictionary)
        return
    imported(tmp_path, checkpoint, dictionary)
    found = rows_of(tmp_path, checkpoint)
    assert [found[token] for token in tokens] == list(range(CONTROL, CONTROL + len(tokens)))


def test_a_duplicate_token_is_refused_with_its_line(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "a.pt", parameters((7, 7)))
    for lines, message in (
        (["the 9", "s 3", "the 5"], "line 3: 'the' is listed twice"),
        (["<pad> 9", "s 3", "the 5"], "line 1: '<pad>' is listed twice"),
        (["the 9", "", "s 3"], "line 2: no token"),
    ):
        with pytest.raises(DataError, match=message):
            imported(tmp_path, checkpoint, words(tmp_path / "dict.txt", lines))


def test_a_token_that_is_replaced_leaves_a_row_that_is_reported(tmp_path: Path) -> None:
    lines = [f"w{n} 1" for n in range(30)]
    checkpoint = write(tmp_path / "a.pt", parameters((35, 35)))
    dictionary = words(tmp_path / "dict.txt", [*lines, "w3 1 #fairseq:overwrite"])
    with pytest.warns(UserWarning, match="rows of the matrix without a token"):
        report = import_checkpoint(checkpoint, tmp_path / "out", dictionaries=[dictionary])
    assert [(one["count"], one["of"], one["examples"]) for one in report["unmatched"]] == [(1, 35, ("7",))]


def test_dictionaries_of_another_model_are_refused(tmp_path: Path) -> None:
    german = words(tmp_path / "dict.de.txt", LINES)
    english = words(tmp_path / "dict.en.txt", [*LINES, "runs 1"])
    other = words(tmp_path / "dict.txt", ["red 1", *LINES[:-1]])
    apart, equal = (write(tmp_path / f"{n}.pt", parameters(rows)) for n, rows in enumerate([(8, 9), (8, 8)]))
    for checkpoint, dictionaries, message in (
        (apart, [german], "target: the dictionary .* has 8 tokens, the model 9 rows"),
        (apart, [english], "source: the dictionary .* has 9 tokens, the model 8 rows"),
        (apart, [english, german], "source: .*; target: .*; the model translates de to en: name dict.de.txt first"),
        (
            write(tmp_path / "one.pt", parameters((8, 8)), share_all_embeddings=True),
            [german, other],
            "share_all_embeddings: true",
        ),
        (equal, [words(tmp_path / "dict.short.txt", LINES[:-1])], "has 7 tokens, the model 8 rows"),
    ):
        with pytest.raises(ExportError, match=message):
            imported(tmp_path, checkpoint, *dictionaries)
    imported(tmp_path, apart, german, english)
    imported(tmp_path, equal, german, other)


def test_one_dictionary_for_two_matrices_is_reported(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    model, dictionary = parameters((8, 8)), words(tmp_path / "dict.txt", LINES)
    with pytest.warns(UserWarning, match="--joined-dictionary"):
        imported(tmp_path, write(tmp_path / "two.pt", model), dictionary)
    shared = model | {"encoder.embed_tokens.weight": model["decoder.embed_tokens.weight"]}
    recwarn.clear()
    imported(tmp_path, write(tmp_path / "one.pt", shared), dictionary)
    assert not [one for one in recwarn if "--joined-dictionary" in str(one.message)]


def test_dictionaries_of_one_length_in_the_wrong_order_are_known_by_their_names(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "a.pt", parameters((8, 8)))
    german, english = words(tmp_path / "dict.de.txt", LINES), words(tmp_path / "dict.en.txt", ["red 1", *LINES[1:]])
    with pytest.raises(ExportError, match=r"name dict\.de\.txt first"):
        imported(tmp_path, checkpoint, english, german)
    imported(tmp_path, checkpoint, german, english)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "translation_multi_simple_epoch", "langs": "de,en,fr"}, "several languages .de,en,fr."),
        ({"task": "multilingual_translation", "lang_pairs": "de-en,fr-en"}, "several languages .de-en,fr-en."),
        ({"task": "translation_from_pretrained_bart", "langs": "de_DE,en_XX"}, "translation_from_pretrained_bart"),
        ({"arch": "mbart_large"}, "`arch: mbart_large`"),
        ({"arch": "multilingual_transformer_iwslt_de_en"}, "several languages"),
        ({"encoder_langtok": "tgt"}, "`encoder_langtok: tgt`"),
        ({"decoder_langtok": True}, "`decoder_langtok: True`"),
        ({"lang_dict": "langs.txt"}, "several languages"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_multilingual_models_are_refused_as_such(
    options: dict[str, Any], message: str, nested: bool, tmp_path: Path
) -> None:
    def changed(content: dict[str, Any]) -> None:
        model, task = OPTIONS | options, {key: value for key, value in options.items() if key != "arch"}
        if nested:  # without the task's options
            model = {key: value for key, value in model.items() if key not in task and key != "task"}
            task |= {"_name": task.pop("task", "translation")}
        content["cfg"] = {"model": argparse.Namespace(**model), "task": task}

    checkpoint = write(tmp_path / "multi.pt", parameters((8, 8)), changed)
    with pytest.raises(ExportError, match=message):  # before dictionaries are requested
        import_checkpoint(checkpoint, tmp_path / "out")


def test_models_with_a_stack_per_language_pair_are_multilingual(tmp_path: Path) -> None:
    model = {f"models.de-en.{key}": tensor for key, tensor in parameters((8, 8)).items()}
    with pytest.raises(ExportError, match="several languages"):
        import_checkpoint(write(tmp_path / "multi.pt", model), tmp_path / "out")


def pieces(tokenizer: SentencePieceTokenizer) -> list[str]:
    return tokenizer.pieces(range(3, tokenizer.size - 1))


def test_only_a_segmenter_of_other_text_is_refused(tmp_path: Path) -> None:
    own = trained(SENTENCES)
    listed = pieces(SentencePieceTokenizer(own))
    (tmp_path / "own.model").write_bytes(own)
    foreign = ["zwei kurze Namen", "viele gute Bilder", "sechs rote Vögel", "quer über den Bach"]
    (tmp_path / "other.model").write_bytes(trained(foreign * 3))
    checkpoint = write(tmp_path / "a.pt", parameters((CONTROL + len(listed) + 2,) * 2))
    dictionary = words(tmp_path / "dict.txt", [*(f"{piece} 1" for piece in listed), "__de__ 1", "[de_DE] 1"])
    imported(tmp_path, checkpoint, dictionary, models=[tmp_path / "own.model"])
    source, _ = load_tokenizers(tmp_path / "out")
    assert list(source.tags) == ["__de__", "[de_DE]"]
    with pytest.raises(ExportError, match=r"not of one model: .*the segmenter never gives"):
        imported(tmp_path, checkpoint, dictionary, models=[tmp_path / "other.model"])


@pytest.mark.filterwarnings("default:.*its tokens are pieces of")
@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["▁the", "▁house", "s"], r"pieces of SentencePiece.*--sentencepiece"),
        (["the", "house@@", "s"], r"pieces of subword-nmt.*joined again"),
        (["the", "Ġhouse", "s"], r"pieces of byte-level BPE"),
        (["the", "##house", "s"], r"pieces of WordPiece"),
        (["262", "13", "s"], r"pieces of GPT-2's BPE"),
        (["the</w>", "house", "s</w>"], r"pieces of BPE"),
        (["the", "\uffedhouse", "s"], r"pieces of pyonmttok"),
    ],
)
def test_pieces_without_a_segmenter_are_reported(tokens: list[str], message: str, tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "a.pt", parameters((7, 7)))
    dictionary = words(tmp_path / "dict.txt", [f"{token} 1" for token in tokens])
    with pytest.warns(UserWarning, match=message):
        imported(tmp_path, checkpoint, dictionary)


def test_whole_words_get_no_notice(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    checkpoint = write(tmp_path / "a.pt", parameters((7, 7)))
    dictionary = words(tmp_path / "dict.txt", ["the 1", "house 1", "@@ 1"])
    imported(tmp_path, checkpoint, dictionary, dictionary)
    assert not [one for one in recwarn if "is a pickle" not in str(one.message)]
