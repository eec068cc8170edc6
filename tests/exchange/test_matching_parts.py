"""Dictionary, segmenter and matrices from one model and from several, as Marian and transformers store them."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.exchange.examples import SENTENCES
from tests.exchange.marian import POST_NORM, random_arrays, write_npz, write_vocabulary
from tests.exchange.test_fairseq import parameters
from tests.exchange.test_opus import TARGETS, trained
from ziggurat.data.subword import SentencePieceTokenizer, load_tokenizers
from ziggurat.data.vocabulary import VocabularyTokenizer, listing
from ziggurat.exchange.agreement import MOST_UNMATCHED, VocabularySide, language_tokens, unmatched
from ziggurat.exchange.importer import import_checkpoint
from ziggurat.system.errors import DataError, ExportError

OTHER = ["zwei kurze Namen", "viele gute Bilder", "sechs rote Vögel", "quer über den Bach"] * 3


@cache
def model(kind: str) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(trained({"source": SENTENCES, "target": TARGETS, "other": OTHER}[kind]))


def pieces(kind: str) -> list[str]:
    return model(kind).pieces(range(3, model(kind).size - 1))


def of_transformers(folder: Path, ids: dict[str, int], rows: int, source: str = "source", **config: Any) -> Path:
    """Write a MarianMT folder with one layer and shared matrices of `rows` rows; padding is row 2."""
    folder.mkdir(exist_ok=True)
    made = {f"model.{key}": tensor for key, tensor in parameters((rows, rows)).items() if "layers" in key}
    torch.manual_seed(1)
    save_file({**made, "model.shared.weight": torch.randn(rows, 8)}, folder / "model.safetensors")
    described = {
        "model_type": "marian",
        "activation_function": "relu",
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "max_position_embeddings": 16,
        "scale_embedding": True,
        "pad_token_id": 2,
        "eos_token_id": 0,
        "decoder_start_token_id": 2,
        **config,
    }
    written = {key: value for key, value in described.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(written))
    (folder / "vocab.json").write_text(json.dumps(ids))
    for side, kind in (("source", source), ("target", "target")):
        (folder / f"{side}.spm").write_bytes(model(kind).model)
    return folder


def listed(*more: str) -> dict[str, int]:
    tokens = dict.fromkeys(["</s>", "<unk>", "<pad>", *pieces("source"), *pieces("target"), *more])
    return {token: number for number, token in enumerate(tokens)}


def rows_of(folder: Path, out: Path) -> dict[str, int]:
    """Return the row of each piece in the imported source vocabulary."""
    theirs = load_file(folder / "model.safetensors")["model.shared.weight"]
    ours = load_file(out / "model.safetensors")["source_embedding.tokens.weight"]
    source, _ = load_tokenizers(out)
    return dict(zip(source.pieces(range(source.size)), torch.cdist(ours, theirs).argmin(1).tolist(), strict=True))


def test_a_model_with_matching_parts_gets_no_notice(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    ids = listed()
    report = import_checkpoint(of_transformers(tmp_path / "in", ids, len(ids)), tmp_path / "out")
    assert report["unmatched"] == []
    assert not list(recwarn)
    found = rows_of(tmp_path / "in", tmp_path / "out")
    assert all(found[token] == row for token, row in ids.items())


def test_parts_of_other_models_are_refused(tmp_path: Path) -> None:
    ids = listed()
    half = dict(list(ids.items())[: len(ids) // 2])
    renamed = {token if row < 8 else f"{token}x": row for token, row in ids.items()}
    for number, (given_ids, rows, source, message) in enumerate(
        (
            (half, len(ids), "source", "rows of the matrix without a token"),
            (ids, len(ids), "other", "pieces of the segmenter that the dictionary lacks"),
            (renamed, len(ids), "source", "tokens of the dictionary"),
            (ids, 2 * len(ids), "source", "rows of the matrix without a token"),
            ({token: min(row, 20) for token, row in ids.items()}, len(ids), "source", "with the id of another"),
            (ids, len(ids) - 3, "source", "tokens, the model"),
        )
    ):
        folder = of_transformers(tmp_path / str(number), given_ids, rows, source)
        with pytest.raises(ExportError, match=message):
            import_checkpoint(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_little_that_is_unmatched_is_reported_with_its_examples(tmp_path: Path) -> None:
    ids = listed("\u2603")  # a single character, counted in segmented text
    del ids[pieces("source")[-1]]
    folder = of_transformers(tmp_path / "in", ids, len(ids) + 1)
    with pytest.warns(UserWarning, match="segmenter does not know.*\u2603"):
        report = import_checkpoint(folder, tmp_path / "out")
    found = {
        one["what"].partition(": ")[2].split(",")[0]: (one["count"], one["examples"]) for one in report["unmatched"]
    }
    assert found["tokens of the dictionary with characters that the segmenter does not know"] == (1, ("\u2603",))
    assert found["pieces of the segmenter that the dictionary lacks"] == (1, (pieces("source")[-1],))
    assert found["rows of the matrix without a token in the dictionary"][0] == 1


TOKENS = [f"w{number}" for number in range(60)]


@given(st.sets(st.integers(0, 59)), st.integers(0, 12))
def test_random_dictionaries_against_matrices(missing: set[int], more: int) -> None:
    """Every row, token and piece without a counterpart is counted, whatever is missing."""
    ids = {token: row for row, token in enumerate(TOKENS) if row not in missing}
    tokenizer = VocabularyTokenizer(listing(TOKENS))
    side = VocabularySide("source", len(TOKENS) + more, ids, frozenset(), tokenizer)
    other = VocabularySide(
        "target", len(TOKENS), {token: row for row, token in enumerate(TOKENS)}, frozenset(), tokenizer
    )
    found = unmatched(side, other)
    assert sum(one.count for one in found) == len(missing) + more
    rows = {row for one in found for row in one.examples}
    assert rows <= {str(row) for row in missing} | {str(len(TOKENS) + n) for n in range(more)}
    refused = len(missing) + more > max(1, MOST_UNMATCHED * (len(TOKENS) + more))
    assert any(one.too_many for one in found) == refused


@given(st.data())
def test_random_dictionaries_against_segmenters(data: st.DataObject) -> None:
    own = pieces("source")
    missing = data.draw(st.sets(st.sampled_from(own)))
    # They consist of letters that the segmenter knows, but are not pieces.
    added = data.draw(st.sets(st.text("tehous", min_size=4, max_size=9).filter(lambda token: token not in own)))
    tokens = ["</s>", "<unk>", "<pad>", *(piece for piece in own if piece not in missing), *added, "madeupword0000"]
    ids = {token: row for row, token in enumerate(tokens)}
    side = VocabularySide("source", len(tokens), ids, frozenset((0, 1, 2)), model("source"))
    counts = {one.what: one.count for one in unmatched(side, side)}
    assert sum(count for what, count in counts.items() if "lacks" in what) == len(missing)
    assert sum(count for what, count in counts.items() if "never gives" in what) == len(added)
    assert len(counts) == bool(missing) + bool(added)


@pytest.mark.parametrize(
    "token",
    ["__", "____", "_____", "▁____", "__ __", "__1__", "__INIT__", "__init__", "__main__", ">><<", ">>", "<<", ">> <<"],
)
def test_pieces_of_underscores_and_arrows_are_not_tags(token: str) -> None:
    assert language_tokens([token], []) == []


@pytest.mark.parametrize(
    "token",
    [">>fra<<", ">>zho_Hans<<", ">>cmn_Hans<<", "__fr__", "__zh_CN__", "__pt-BR__", "<2de>", "[de_DE]", ">>id<<"],
)
def test_tokens_that_name_a_language_are_tags(token: str) -> None:
    assert language_tokens(["a", token], []) == [token]


def test_pieces_that_the_segmenter_produces_are_not_tags(tmp_path: Path) -> None:
    segmenter = SentencePieceTokenizer(trained(SENTENCES, user_defined_symbols=["__fr__", "____"]))
    ids = {token: n for n, token in enumerate(["__fr__", "____", "__de__"])}
    assert language_tokens(ids, [segmenter]) == ["__de__"]


@pytest.mark.parametrize("start", [0, 1, 2, 5, 9])
def test_any_token_may_be_the_decoders_first(start: int, tmp_path: Path) -> None:
    ids = listed()
    folder = of_transformers(tmp_path / "in", ids, len(ids), decoder_start_token_id=start)
    import_checkpoint(folder, tmp_path / "out")
    theirs = load_file(folder / "model.safetensors")["model.shared.weight"]
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    ours = tensors.get("target_embedding.tokens.weight", tensors["source_embedding.tokens.weight"])
    _, target = load_tokenizers(tmp_path / "out")
    assert torch.equal(ours[target.bos], theirs[start])
    assert torch.equal(ours[target.eos], theirs[0])


def test_the_decoders_first_token_may_be_in_the_other_configuration(tmp_path: Path) -> None:
    ids = listed()
    folder = of_transformers(tmp_path / "in", ids, len(ids), decoder_start_token_id=None)
    with pytest.raises(DataError, match="decoder_start_token_id"):
        import_checkpoint(folder, tmp_path / "out")
    (folder / "generation_config.json").write_text('{"decoder_start_token_id": 2}')
    import_checkpoint(folder, tmp_path / "out")


@pytest.mark.parametrize("kind", ["m2m_100", "pegasus", "marian"])
def test_models_that_come_without_a_list_of_pieces(kind: str, tmp_path: Path) -> None:
    folder = of_transformers(tmp_path / "in", listed(), len(listed()), model_type=kind)
    (folder / "vocab.json").unlink()
    message = {"m2m_100": "NLLB", "pegasus": r"spiece\.model", "marian": r"has no vocab\.json"}[kind]
    with pytest.raises(ExportError, match=message):
        import_checkpoint(folder, tmp_path / "out")


# Marian


def of_marian(folder: Path, tokens: list[str], rows: int, ending: str = "yml") -> Path:
    folder.mkdir(exist_ok=True)
    for side in ("source", "target"):
        (folder / f"{side}.spm").write_bytes(model(side).model)
    if ending == "yml":
        write_vocabulary(folder / "vocab.yml", tokens)
    elif ending == "json":
        (folder / "vocab.json").write_text(json.dumps({token: row for row, token in enumerate(tokens)}))
    else:
        (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens))
    write_npz(folder / "model.npz", random_arrays(POST_NORM, (rows, rows), 3), POST_NORM)
    return folder


@pytest.mark.parametrize("ending", ["yml", "json", "txt"])
def test_marians_lists_of_another_model(ending: str, tmp_path: Path) -> None:
    tokens = [token for token in listed() if token != "<pad>"]

    def refused(folder: Path) -> str:
        with pytest.raises(ExportError) as caught:
            import_checkpoint(folder / "model.npz", tmp_path / "out", dictionaries=[folder / f"vocab.{ending}"])
        return str(caught.value)

    short = of_marian(tmp_path / "short", tokens[:-20], len(tokens), ending)
    assert "pieces of the segmenter that the dict" in refused(short)
    long = of_marian(tmp_path / "long", tokens, len(tokens) - 1, ending)
    assert "tokens, the model" in refused(long)
    others = of_marian(tmp_path / "other", ["</s>", "<unk>", *pieces("other"), "x"], len(pieces("other")) + 3, ending)
    assert "not of one model" in refused(others)
    right = of_marian(tmp_path / "right", tokens, len(tokens), ending)
    report = import_checkpoint(right / "model.npz", tmp_path / "out", dictionaries=[right / f"vocab.{ending}"])
    assert report["unmatched"] == []


@pytest.mark.parametrize("lines", [["</s>", "<unk>", "the", "the"], ["</s>", "<unk>", "", "the"]])
def test_marians_text_has_every_token_once(lines: list[str], tmp_path: Path) -> None:
    folder = of_marian(tmp_path / "in", lines, 4, "txt")
    with pytest.raises(DataError, match=r"vocab\.txt: line"):
        import_checkpoint(folder / "model.npz", tmp_path / "out", dictionaries=[folder / "vocab.txt"])


ESCAPES = {
    '"\\ud83d\\ude01"': "\U0001f601",
    '"a\\ud83d\\ude01b"': "a\U0001f601b",
    '"\\U0001f601"': "\U0001f601",
    '"\\u00e9"': "é",
    '"\\uD83D\\uDE01\\uD83D\\uDE01"': "\U0001f601" * 2,
}


@pytest.mark.parametrize("ending", ["yml", "json"])
@pytest.mark.parametrize("written", ESCAPES)
def test_characters_that_are_escaped_in_two(written: str, ending: str, tmp_path: Path) -> None:
    if ending == "json":
        written = written.replace("\\U0001f601", "\\ud83d\\ude01")
    content = {"yml": f'"</s>": 0\n"<unk>": 1\n{written}: 2\n', "json": f'{{"</s>": 0, "<unk>": 1, {written}: 2}}'}
    folder = of_marian(tmp_path / "in", ["</s>", "<unk>", "x"], 3, ending)
    for side in ("source", "target"):
        (folder / f"{side}.spm").unlink()
    (folder / f"vocab.{ending}").write_text(content[ending])
    import_checkpoint(folder / "model.npz", tmp_path / "out", dictionaries=[folder / f"vocab.{ending}"])
    source, _ = load_tokenizers(tmp_path / "out")
    token = json.loads(written.replace("\\U0001f601", "\\ud83d\\ude01"))
    assert source.pieces(source.encode([token])[0]) == [token]
    assert token in ESCAPES.values()


@pytest.mark.parametrize("written", ['"\\ud83d"', '"\\ude01\\ud83d"', '"a\\ud83db"', '"\\ude01"', '"\\ud83d\\ud83d"'])
def test_half_a_character_is_an_error_with_its_position(written: str, tmp_path: Path) -> None:
    folder = of_marian(tmp_path / "in", ["</s>", "<unk>", "x"], 3)
    for name, content, place in (
        ("v.yml", f'"</s>": 0\n"<unk>": 1\n{written}: 2\n', r"v\.yml: line 3.*half of a character"),
        ("v.json", f'{{"</s>": 0, "<unk>": 1, {written}: 2}}', r"v\.json.*half of a character"),
    ):
        (folder / name).write_text(content)
        with pytest.raises(DataError, match=place):
            import_checkpoint(folder / "model.npz", tmp_path / "out", dictionaries=[folder / name])
    ids = listed()
    theirs = of_transformers(tmp_path / "theirs", ids, len(ids))
    (theirs / "vocab.json").write_text(json.dumps(ids)[:-1] + f", {written}: 3}}")
    with pytest.raises(DataError, match=r"vocab\.json.*half of a character"):
        import_checkpoint(theirs, tmp_path / "out")
    shutil.rmtree(theirs)


# Two segmenters that share one dictionary


WRONG = {
    "a smaller one of the same text": lambda: trained(SENTENCES, vocab_size=42),
    "one of half the text": lambda: trained(SENTENCES[::2] + TARGETS[:2], vocab_size=45),
    "one of another text": lambda: trained(OTHER),
    "that of its source alone": lambda: trained(SENTENCES),
    "that of its target alone": lambda: trained(TARGETS, vocab_size=45),
    "one of characters": lambda: trained(SENTENCES, model_type="char"),
}


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("wrong", WRONG)
def test_one_wrong_segmenter_next_to_a_right_one(wrong: str, side: str, tmp_path: Path) -> None:
    """The right one covers the whole dictionary, so only counting shows what the wrong one lacks."""
    joint = trained(SENTENCES + TARGETS, vocab_size=90)
    right = SentencePieceTokenizer(joint)
    tokens = dict.fromkeys(["</s>", "<unk>", "<pad>", *right.pieces(range(3, right.size - 1))])
    ids = {token: number for number, token in enumerate(tokens)}
    folder = of_transformers(tmp_path / "in", ids, len(ids))
    for name in ("source", "target"):
        (folder / f"{name}.spm").write_bytes(joint)
    assert import_checkpoint(folder, tmp_path / "right")["unmatched"] == []
    (folder / f"{side}.spm").write_bytes(WRONG[wrong]())
    with pytest.raises(ExportError, match=rf"{side}.*such as"):
        import_checkpoint(folder, tmp_path / "out")


def test_a_unigram_model_lacks_hardly_a_piece(tmp_path: Path) -> None:
    """Each of its pieces occurred in its training text; some of BPE's are only steps towards other pieces."""
    ids = listed()
    for piece in pieces("source")[-8:]:
        del ids[piece]
    ids = {token: row for row, token in enumerate(ids)}
    folder = of_transformers(tmp_path / "in", ids, len(ids))
    with pytest.raises(ExportError, match=r"8 of .*such as"):
        import_checkpoint(folder, tmp_path / "out")
    for side, text in (("source", SENTENCES), ("target", TARGETS)):
        (folder / f"{side}.spm").write_bytes(trained(text, model_type="bpe"))
    segmenters = [SentencePieceTokenizer(trained(text, model_type="bpe")) for text in (SENTENCES, TARGETS)]
    tokens = ["</s>", "<unk>", "<pad>", *(piece for one in segmenters for piece in one.pieces(range(11, one.size - 1)))]
    ids = {token: row for row, token in enumerate(dict.fromkeys(tokens))}
    of_transformers(folder, ids, len(ids))
    for side, one in zip(("source", "target"), segmenters, strict=True):
        (folder / f"{side}.spm").write_bytes(one.model)
    with pytest.warns(UserWarning, match="the dictionary lacks"):
        import_checkpoint(folder, tmp_path / "out")
