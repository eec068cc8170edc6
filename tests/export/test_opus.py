"""A folder as OPUS-MT models are downloaded: imported by the README's command, translated with, trained on."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import sentencepiece
import torch

from tests.cli.conftest import ziggurat as ziggurat  # the command line as a fixture
from tests.export.examples import SENTENCES
from tests.export.test_import import Harm
from ziggurat.config import load_experiment
from ziggurat.data.subword import SentencePieceTokenizer, load_tokenizers
from ziggurat.decoding.translator import load_translator
from ziggurat.errors import ConfigError, DataError
from ziggurat.export.importer import import_checkpoint
from ziggurat.models.directory import open_model, weights

pytestmark = pytest.mark.filterwarnings("ignore:.*is a pickle")

TARGETS = [" ".join(reversed(line.lower().split())) for line in SENTENCES]
TAGS = [">>fra<<", ">>ita<<"]


def trained(sentences: list[str]) -> bytes:
    """A model as theirs: unigram, its own control symbols, no padding."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences * 3),
        model_writer=model,
        model_type="unigram",
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return model.getvalue()


Downloaded = Callable[..., Path]


@pytest.fixture
def downloaded(tmp_path: Path, transformers: ModuleType) -> Downloaded:
    """Write such a folder of a tiny MarianMT; weights in `files` files, in torch's old format or the new."""

    def write(*, files: int = 1, zipped: bool = False, tags: bool = False) -> Path:
        folder = tmp_path / "opus-mt-de-en"
        folder.mkdir()
        pieces: list[str] = ["</s>", "<unk>"]
        for side, sentences in (("source", SENTENCES), ("target", TARGETS)):
            model = trained(sentences)
            (folder / f"{side}.spm").write_bytes(model)
            tokenizer = SentencePieceTokenizer(model)
            pieces += tokenizer.pieces(range(3, tokenizer.size - 1))  # behind <unk>, <s> and </s>; our padding is last
        pieces = [*dict.fromkeys([*pieces, *(TAGS if tags else [])]), "<pad>"]
        pieces.remove(missing := SentencePieceTokenizer((folder / "target.spm").read_bytes()).pieces([5])[0])
        assert missing not in pieces  # a piece that never occurred in their training data has no id
        pad = len(pieces) - 1
        (folder / "vocab.json").write_text(json.dumps({piece: number for number, piece in enumerate(pieces)}))
        described = {"source_lang": "de", "target_lang": "en"}
        (folder / "tokenizer_config.json").write_text(json.dumps(described))
        torch.manual_seed(8)
        config = transformers.MarianConfig(
            vocab_size=pad + 1,
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
        )
        model = transformers.MarianMTModel(config)
        model.save_pretrained(folder)  # config.json, generation_config.json
        (folder / "model.safetensors").unlink()
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


@pytest.mark.parametrize(("files", "zipped"), [(1, False), (1, True), (2, True)])
def test_what_is_downloaded_is_imported_and_scores_as_in_transformers(
    files: int, zipped: bool, downloaded: Downloaded, tmp_path: Path, transformers: ModuleType
) -> None:
    folder = downloaded(files=files, zipped=zipped)
    with pytest.warns(UserWarning, match=r"pytorch_model.*is a pickle"):
        import_checkpoint(folder, tmp_path / "ours")
    theirs = transformers.MarianMTModel.from_pretrained(folder).eval()
    tokenizer = transformers.MarianTokenizer.from_pretrained(folder)
    ours = load_translator(tmp_path / "ours")
    assert (ours.target_language, load_experiment(tmp_path / "ours" / "config.yaml").model.activation) == ("en", "silu")
    found = ours.score(SENTENCES, TARGETS)
    # Their one vocabulary also has the pieces of the source side, which ours does not write.
    known = json.loads((folder / "vocab.json").read_text())
    target = ours.target_tokenizer
    shared = torch.tensor(sorted({known[p] for p in target.pieces(range(target.size)) if p in known}))
    assert len(shared) < len(known)
    for line, translation, mine in zip(SENTENCES, TARGETS, found, strict=True):
        ids = tokenizer(line, text_target=translation, return_tensors="pt")
        if tokenizer.unk_token_id in ids.labels:  # the piece that only our vocabulary has
            assert mine.log_probability < -1e8
            continue
        with torch.inference_mode():
            logits = theirs(**ids).logits[0]
        gold = logits.gather(1, ids.labels[0][:, None])[:, 0]
        wanted = (gold - logits[:, shared].logsumexp(-1)).sum()
        assert mine.log_probability == pytest.approx(float(wanted), abs=2e-4)
    assert any(mine.log_probability > -1e8 for mine in found)


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
    """Write the sentences as a corpus; return what the command line needs to be told of it."""
    for side, sentences in (("de", SENTENCES), ("en", TARGETS)):
        (folder / f"text.{side}").write_text("".join(f"{line}\n" for line in sentences * 4))
    named = f"{{source: {folder / 'text.de'}, target: {folder / 'text.en'}}}"
    return [f"data.store={folder / 'store'}", f"data.train=[{named}]", f"data.dev=[{named}]"]


def losses_of(run: Path) -> list[float]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["kind"] == "train"]


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
    assert losses[0] < 4 * math.log(vocabulary)  # a bias of -1e9 beside label smoothing would make it 10^6
    assert losses[-1] < losses[0]
    before, after = (weights(open_model(path).model) for path in (imported, run))
    ruled_out = before["output.bias"] < -1e8
    assert 2 <= int(ruled_out.sum()) < 10
    assert torch.equal(after["output.bias"][ruled_out], before["output.bias"][ruled_out])
    assert not torch.equal(after["output.bias"][~ruled_out], before["output.bias"][~ruled_out])
    assert ziggurat("translate", run, "-i", tmp_path / "text.de", "-o", tmp_path / "out.en").status == 0
    # A resumed run knows what is ruled out from its checkpoint.
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
