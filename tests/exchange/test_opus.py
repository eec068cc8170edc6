"""A folder like a downloaded OPUS-MT model: imported with the README's command, used to translate, trained further."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import sentencepiece
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.conftest import ziggurat as ziggurat  # the command line as a fixture
from tests.exchange.examples import SENTENCES
from tests.exchange.test_import import Harm
from tests.vocabulary import trained_tokenizer
from ziggurat.config import DecodingConfig, load_experiment
from ziggurat.data.subword import SentencePieceTokenizer, load_tokenizers, same_vocabulary
from ziggurat.exchange.import_huggingface import Generation, decoding_of, notes_of, ruled_out
from ziggurat.exchange.imported import with_vocabularies
from ziggurat.exchange.importer import import_checkpoint
from ziggurat.model.directory import open_model
from ziggurat.model.tensors import weights
from ziggurat.system.errors import ConfigError, DataError
from ziggurat.translate.translator import load_translator

pytestmark = pytest.mark.filterwarnings("ignore:.*is a pickle")

TARGETS = [" ".join(reversed(line.lower().split())) for line in SENTENCES]
TAGS = [">>fra<<", ">>ita<<"]


def trained(sentences: list[str], **options: Any) -> bytes:
    """A SentencePiece model like theirs: unigram, with its own control symbols and without padding."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences * 3),
        model_writer=model,
        **{"model_type": "unigram", "vocab_size": 60, "hard_vocab_limit": False, "minloglevel": 2, **options},
    )
    return model.getvalue()


Downloaded = Callable[..., Path]

PUBLISHED = {
    "activation_dropout": 0.0,
    "add_bias_logits": False,
    "add_final_layer_norm": False,
    "attention_dropout": 0.0,
    "classif_dropout": 0.0,
    "decoder_layerdrop": 0.0,
    "dropout": 0.1,
    "encoder_layerdrop": 0.0,
    "extra_pos_embeddings": 58101,
    "id2label": {"0": "LABEL_0"},
    "num_hidden_layers": 2,
    "normalize_before": False,
    "normalize_embedding": False,
    "static_position_embeddings": True,
    "use_cache": True,
}
"""PUBLISHED are keys in the config.json of published models (opus-mt-en-de) that today's class does not know."""


@pytest.fixture
def downloaded(tmp_path: Path, transformers: ModuleType) -> Downloaded:
    """Write such a folder of a tiny MarianMT with a final bias.

    Weights are in `files` files, in torch's old or new format. `separate`: each side has its own vocabulary and matrix;
    `tied`: the output matrix is that of the target embedding; `learned`: the model knows the sentences.
    """

    def write(
        *,
        files: int = 1,
        zipped: bool = False,
        tags: bool = False,
        separate: bool = False,
        tied: bool = True,
        learned: bool = False,
    ) -> Path:
        folder = tmp_path / "opus-mt-de-en"
        folder.mkdir()
        sides: dict[str, list[str]] = {}
        for side, sentences in (("source", SENTENCES), ("target", TARGETS)):
            model = trained(sentences)
            (folder / f"{side}.spm").write_bytes(model)
            tokenizer = SentencePieceTokenizer(model)
            sides[side] = tokenizer.pieces(range(3, tokenizer.size - 1))  # after <unk>, <s> and </s>; padding is last
        sides["target"].remove(sides["target"][2])  # pieces that never occurred in their training data have no id
        lists = list(sides.values()) if separate else [[*sides["source"], *sides["target"]]]
        longest = max(map(len, lists))
        lists = [[*pieces, *(f"filler{n}" for n in range(longest - len(pieces)))] for pieces in lists]  # one padding id
        sizes = []
        for name, pieces in zip(("vocab.json", "target_vocab.json"), lists, strict=False):
            written = [*dict.fromkeys(["</s>", "<unk>", *pieces, *(TAGS if tags else [])]), "<pad>"]
            (folder / name).write_text(json.dumps({piece: number for number, piece in enumerate(written)}))
            sizes.append(len(written))
        pad = sizes[-1] - 1
        described = {"source_lang": "de", "target_lang": "en", "separate_vocabs": separate}
        (folder / "tokenizer_config.json").write_text(json.dumps(described))
        torch.manual_seed(8)
        config = transformers.MarianConfig(
            vocab_size=sizes[0],
            decoder_vocab_size=sizes[-1],
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            activation_function="swish",
            scale_embedding=True,
            max_position_embeddings=64,
            decoder_start_token_id=pad,
            pad_token_id=pad,
            eos_token_id=0,
            bos_token_id=0,
            init_std=0.3,
            share_encoder_decoder_embeddings=not separate,
            tie_word_embeddings=tied,
        )
        model = transformers.MarianMTModel(config)
        model.final_logits_bias.normal_()
        model.save_pretrained(folder)  # config.json, and the other files that its tokenizer needs
        if learned:
            learn(model, transformers.MarianTokenizer.from_pretrained(folder))
        (folder / "model.safetensors").unlink()
        plain = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(PUBLISHED | plain))
        searched: dict[str, Any] = {"num_beams": 4, "length_penalty": 0.8, "max_length": 64}
        searched |= {"bad_words_ids": [[pad]], "renormalize_logits": True}
        control = {"decoder_start_token_id": pad, "eos_token_id": 0, "forced_eos_token_id": 0, "pad_token_id": pad}
        (folder / "generation_config.json").write_text(json.dumps(searched | control))
        values = list(model.state_dict().items())
        names = ["pytorch_model.bin"]
        if files > 1:
            names = [f"pytorch_model-{n:05d}-of-{files:05d}.bin" for n in range(1, files + 1)]
            places = {key: names[number % files] for number, (key, _) in enumerate(values)}
            (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
        for number, name in enumerate(names):
            part = dict(values[number::files])
            torch.save(part, folder / name, _use_new_zipfile_serialization=zipped)
        return folder

    return write


def learn(model: Any, tokenizer: Any) -> None:
    """Train a little, because the translations of an untrained model never end or are empty."""
    batch = tokenizer(SENTENCES, text_target=TARGETS, return_tensors="pt", padding=True)
    batch["labels"][batch["labels"] == tokenizer.pad_token_id] = -100
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimiser.zero_grad()
        model(**batch).loss.backward()
        optimiser.step()
    model.eval()


@pytest.mark.parametrize(
    ("files", "zipped", "separate", "tied", "sharing"),
    [
        (1, False, False, True, "all"),
        pytest.param(2, True, False, True, "all", marks=pytest.mark.slow),
        pytest.param(1, True, True, True, "decoder", marks=pytest.mark.slow),
        (1, True, True, False, "none"),
    ],
)
def test_an_imported_download_scores_and_translates_as_in_transformers(
    files: int,
    zipped: bool,
    separate: bool,
    tied: bool,
    sharing: str,
    downloaded: Downloaded,
    tmp_path: Path,
    transformers: ModuleType,
) -> None:
    folder = downloaded(files=files, zipped=zipped, separate=separate, tied=tied, learned=True)
    with pytest.warns(UserWarning, match=r"pytorch_model.*is a pickle"):
        import_checkpoint(folder, tmp_path / "ours")
    theirs = transformers.MarianMTModel.from_pretrained(folder).eval()
    tokenizer = transformers.MarianTokenizer.from_pretrained(folder)
    ours = load_translator(tmp_path / "ours")
    experiment = load_experiment(tmp_path / "ours" / "config.yaml")
    model, decoding = experiment.model, experiment.decoding
    assert (ours.target_language, model.activation, model.embedding.sharing) == ("en", "silu", sharing)
    assert (decoding.beam_size, decoding.max_length.limit, decoding.endings) == (4, 62, "beam")
    found = ours.score(SENTENCES, TARGETS)
    exact = 0
    for line, translation, mine in zip(SENTENCES, TARGETS, found, strict=True):
        ids = tokenizer(line, text_target=translation, return_tensors="pt")
        if tokenizer.unk_token_id in ids.labels:  # this piece is only in our vocabulary
            assert mine.log_probability < -1e8
            continue
        with torch.inference_mode():
            logits = theirs(**ids).logits[0].clone()
            logits[:, tokenizer.pad_token_id] = -math.inf  # renormalize_logits
        wanted = logits.log_softmax(-1).gather(1, ids.labels[0][:, None]).sum()
        assert mine.log_probability == pytest.approx(float(wanted), rel=1e-5)
        exact += 1
    assert exact >= 3
    with torch.inference_mode():
        # Their search must continue while a better translation is possible, as ours does.
        batch = tokenizer(SENTENCES, return_tensors="pt", padding=True)
        generated = theirs.generate(**batch, early_stopping="never")
    written = json.loads((folder / ("target_vocab.json" if separate else "vocab.json")).read_text())
    names = {number: piece for piece, number in written.items()}
    wanted_pieces = {
        number: [names[index] for index in row[: row.index(0)]]
        for number, row in enumerate(generated[:, 1:].tolist())
        if 0 in row[:62]  # outputs cut at the limit rank differently there
    }
    assert len(wanted_pieces) > len(SENTENCES) // 2
    assert len({tuple(pieces) for pieces in wanted_pieces.values()}) >= 3
    translated = ours.translate(SENTENCES, unknown=True)
    assert {number: translated[number].hypotheses[0].tokens for number in wanted_pieces} == wanted_pieces


@given(st.lists(st.text("The little house stands. ßé\u2581", max_size=40), max_size=4))
def test_a_model_over_another_vocabulary_segments_and_reads_as_before(lines: list[str]) -> None:
    separate, united = over_one_vocabulary()
    for before, after in zip(separate, united, strict=True):
        for ids, others in zip(before.encode(lines), after.encode(lines), strict=True):
            assert after.pieces(others) == before.pieces(ids)
            assert after.decode(others) == before.decode(ids)
    # Pieces from the source side, written as a translation.
    source, target = united
    for line, known in zip(SENTENCES, separate[0].encode(SENTENCES), strict=True):
        assert target.decode(source.encode([line])[0]) == separate[0].decode(known)


@cache
def over_one_vocabulary() -> tuple[list[SentencePieceTokenizer], list[SentencePieceTokenizer]]:
    """Two models of different text: as they were trained, and over one vocabulary."""
    sides = [SentencePieceTokenizer(trained(sentences)) for sentences in (SENTENCES, TARGETS)]
    pieces = dict.fromkeys(
        ["</s>", "<unk>", *(p for side in sides for p in side.pieces(range(3, side.size - 1))), "<pad>"]
    )
    ids = {piece: number for number, piece in enumerate(pieces)}
    united = list(with_vocabularies(sides[0], sides[1], ids, ids))
    assert same_vocabulary(*united)
    assert united[0].pieces(range(len(ids))) == list(ids)
    assert united[0].size == len(ids) + 1  # <s>, which only the models have
    return sides, united


def test_models_that_cannot_change_their_vocabulary_keep_it() -> None:
    bpe = trained_tokenizer(SENTENCES, 320, [])
    unigram = SentencePieceTokenizer(trained(TARGETS))
    ids = {"</s>": 0, "<unk>": 1, "something": 2}
    assert with_vocabularies(bpe, unigram, ids, ids) == (bpe, unigram)
    assert with_vocabularies(bpe, unigram, ids, {**ids, "else": 3})[0] is bpe


def test_search_settings_are_imported_or_reported() -> None:
    greedy = decoding_of(Generation(num_beams=1, max_new_tokens=20, min_length=4, early_stopping=True), 512)
    assert (greedy["beam_size"], greedy["max_length"]["limit"], greedy["min_length"]) == (1, 19, 3)
    assert greedy["endings"] == "fairseq"
    other = decoding_of(Generation(length_penalty=0.6, no_repeat_ngram_size=3, max_length=10_000), 512)
    assert (other["length_penalty"]["alpha"], other["no_repeat_ngram_size"]) == (0.6, 3)
    assert (other["max_length"]["limit"], other["min_length"], other["endings"]) == (511, 0, "beam")
    DecodingConfig.model_validate(other)
    words = [[7], [8], [3, 4]]
    assert ruled_out(Generation(bad_words_ids=words, renormalize_logits=True), {8}) == {7, 8}
    assert ruled_out(Generation(bad_words_ids=words, suppress_tokens=[8, 9]), {8}) == {7, 9}
    notes = notes_of(Generation(bad_words_ids=words, length_penalty=-1.0, forced_bos_token_id=5, do_sample=False))
    assert notes == ("forced_bos_token_id: 5", "length_penalty: -1.0", "bad_words_ids of several tokens")


def test_a_pickle_that_holds_more_than_weights_is_refused_and_runs_no_code(
    downloaded: Downloaded, tmp_path: Path
) -> None:
    folder = downloaded()
    torch.save({"harm": Harm(tmp_path / "harm")}, folder / "pytorch_model.bin")
    with pytest.raises(DataError, match=r"pytorch_model\.bin: holds more than weights"):
        import_checkpoint(folder, tmp_path / "ours")
    torch.save([torch.zeros(2)], folder / "pytorch_model.bin")
    with pytest.raises(DataError, match="not the weights of a model"):
        import_checkpoint(folder, tmp_path / "ours")
    (folder / "pytorch_model.bin").write_bytes(b"no checkpoint")
    with pytest.raises(DataError, match=r"pytorch_model\.bin"):
        import_checkpoint(folder, tmp_path / "ours")
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(DataError, match=r"neither model\.safetensors nor pytorch_model\.bin"):
        import_checkpoint(folder, tmp_path / "ours")
    assert not (tmp_path / "harm").exists()
    assert not (tmp_path / "ours").exists()


def corpus(folder: Path) -> list[Any]:
    """Write the sentences as a corpus; return its options for the command line."""
    for side, sentences in (("de", SENTENCES), ("en", TARGETS)):
        (folder / f"text.{side}").write_text("".join(f"{line}\n" for line in sentences * 4))
    named = f"{{source: {folder / 'text.de'}, target: {folder / 'text.en'}}}"
    return [f"data.store={folder / 'store'}", f"data.train=[{named}]", f"data.dev=[{named}]"]


def losses_of(run: Path) -> list[float]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["kind"] == "train"]


@pytest.mark.slow
def test_an_imported_model_is_fine_tuned_by_the_documented_commands(
    downloaded: Downloaded, tmp_path: Path, ziggurat: Any
) -> None:
    imported, run = tmp_path / "imported", tmp_path / "run"
    assert ziggurat("import", downloaded(), "--out", imported).status == 0
    data = corpus(tmp_path)
    assert ziggurat("prepare", imported / "config.yaml", *data).status == 0
    assert [t.size for t in load_tokenizers(tmp_path / "store")] == [t.size for t in load_tokenizers(imported)]
    again = ziggurat("prepare", imported / "config.yaml", *data)
    assert (again.status, "already" in again.out + again.err) == (0, True)
    short = ["training.stop.updates=12", "training.schedule.kind=constant", "training.schedule.warmup_updates=0"]
    short += ["training.schedule.peak=0.002", "training.log_every_updates=4", "training.validation.every_updates=12"]
    short += ["training.validation.decode=false", "training.tensorboard=false"]
    start = f"training.start_from={imported}"
    trained = ziggurat("train", imported / "config.yaml", *data, start, *short, "--run", run)
    assert trained.status == 0, trained.err
    assert "tokens that its output bias rules out have no loss" in trained.err
    losses = losses_of(run)
    vocabulary = load_tokenizers(imported)[1].size
    assert losses[0] < 4 * math.log(vocabulary)  # with label smoothing a bias of -1e9 would make it 10^6
    assert losses[-1] < losses[0]
    before, after = (weights(open_model(path).model) for path in (imported, run))
    ruled_out = before["output.bias"] < -1e8
    assert 2 <= int(ruled_out.sum()) < 10
    assert torch.equal(after["output.bias"][ruled_out], before["output.bias"][ruled_out])
    assert not torch.equal(after["output.bias"][~ruled_out], before["output.bias"][~ruled_out])
    assert ziggurat("translate", run, "-i", tmp_path / "text.de", "-o", tmp_path / "out.en").status == 0
    # A resumed run takes the ruled-out tokens from its checkpoint.
    resumed = ziggurat("train", "--run", run, "--resume", "training.stop.updates=16")
    assert resumed.status == 0, resumed.err
    assert max(losses_of(run)[len(losses) :]) < losses[0]


def test_tags_of_an_imported_model_are_those_of_the_corpora(downloaded: Downloaded, tmp_path: Path) -> None:
    from ziggurat.data.corpus import Store
    from ziggurat.data.prepare import prepare

    import_checkpoint(downloaded(tags=True), tmp_path / "imported")
    data = load_experiment(tmp_path / "imported" / "config.yaml").data
    corpus(tmp_path)
    entry = {"source": str(tmp_path / "text.de"), "target": str(tmp_path / "text.en")}
    wanted = {"store": str(tmp_path / "store"), "train": [entry | {"tag": ">>ita<<"}]}
    prepare(type(data).model_validate(data.model_dump() | wanted))
    store = Store.open(tmp_path / "store")
    assert list(store.source.tags) == TAGS
    for change, reason in (
        ({"train": [entry | {"tag": "<bt>"}]}, r"`tag: <bt>` is not in the vocabulary of .*>>fra<<, >>ita<<"),
        ({"unicode": "nfc"}, r"`data\.unicode: nfc`, but .* `none`"),
        ({"subword": data.subword.model_dump() | {"target_model": str(tmp_path / "text.en")}}, "leave it out"),
    ):
        with pytest.raises(ConfigError, match=reason):
            prepare(type(data).model_validate(data.model_dump() | wanted | {"store": str(tmp_path / "other")} | change))
