"""Undamaged files of every kind that is read, for the fuzzer: the newest set in tests/golden, and foreign files."""

from __future__ import annotations

import argparse
import gzip
import io
import json
import lzma
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import sentencepiece
import torch
import yaml
import zstandard
from torch import Tensor

from ziggurat.config import dump, load_experiment
from ziggurat.config.load import change_section
from ziggurat.corpora.jobs.launchers import cut
from ziggurat.corpora.synthesis.backtranslation import BackTranslationJob, make_plan, make_shard
from ziggurat.corpora.synthesis.lines import readable_lines
from ziggurat.data.aligner import Aligner
from ziggurat.data.shortlist import read_shortlist, write_shortlist
from ziggurat.data.subword import load_tokenizers, save_tokenizers
from ziggurat.data.vocabulary import VocabularyTokenizer
from ziggurat.exchange.anatomy import dissect
from ziggurat.exchange.imported import layer_names
from ziggurat.model.directory import open_model
from ziggurat.model.tensors import weights


def newest_set() -> Path:
    """Return the newest set of tests/golden."""
    return max(path for path in (Path(__file__).parents[1] / "golden").glob("v*") if path.is_dir())


def write_material(folder: Path, golden: Path) -> None:
    """Write everything into the new folder `folder`; `foreign-*` are folders without checksums."""
    shutil.copytree(golden, folder, symlinks=True)
    shutil.copy(folder / "expected" / "sources.txt", folder / "sources.txt")
    shutil.copy(folder / "expected" / "resumed.safetensors", folder / "weights.safetensors")
    pairs = list(
        zip(*((folder / "corpus" / f"train.{s}").read_text().splitlines() for s in ("qlo", "qhi")), strict=True)
    )
    _write_corpora(folder, pairs)
    _write_lines(folder, pairs)
    # The set's own files may be older than their checksums.
    shortlist = folder / "shortlist.safetensors"
    write_shortlist(shortlist, read_shortlist(shortlist, *load_tokenizers(folder / "run")))
    (folder / "aligner.safetensors").write_bytes(Aligner.train(pairs[:30]).content())
    for kind in ("bpe", "unigram"):
        (folder / f"{kind}.spm").write_bytes(_sentencepiece(kind, [text for pair in pairs for text in pair]))
    words = "".join(f"{word} 1\n" for word in sorted({word for pair in pairs for word in pair[0].split()}))
    (folder / "words").mkdir()
    save_tokenizers(
        folder / "words", VocabularyTokenizer(words.encode(), "nfc", ["<bt>"]), load_tokenizers(folder / "run")[1]
    )
    experiment = load_experiment(folder / "config.yaml")
    (folder / "overrides.txt").write_text(
        "model.d_model=16\ntraining.seed=3\nmodel.encoder.layers=2\ndata.train.0.weight=1e-3\n"
    )
    data = change_section(experiment.data, {"store": "prepared"}, "data")
    (folder / "prepared.yaml").write_text(dump(experiment.model_copy(update={"data": data})))
    for name in ("grown", "ctranslate2", "onnx", "huggingface"):
        shutil.copytree(folder / name, folder / f"foreign-{name}")
        (folder / f"foreign-{name}" / "checksums.json").unlink(missing_ok=True)
    _write_fairseq(folder)
    _write_marian(folder)
    _write_synthetic(folder)


def _write_corpora(folder: Path, pairs: list[tuple[str, str]]) -> None:
    (folder / "corpus" / "train.qhi.gz").write_bytes(
        gzip.compress((folder / "corpus" / "train.qhi").read_bytes(), mtime=0)
    )
    table = "".join(f"{source}\t{target}\n" for source, target in pairs).encode()
    (folder / "corpus.tsv").write_bytes(table)
    (folder / "corpus.tsv.gz").write_bytes(gzip.compress(table, mtime=0))
    (folder / "corpus.tsv.xz").write_bytes(lzma.compress(table))
    (folder / "corpus.tsv.zst").write_bytes(zstandard.ZstdCompressor().compress(table))
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"qlo": a, "qhi": b, "n": 1}) + "\n" for a, b in pairs))
    columns = {"qlo": [pair[0] for pair in pairs], "qhi": pa.array([pair[1] for pair in pairs]).dictionary_encode()}
    pq.write_table(pa.table(columns), folder / "corpus.parquet")
    packed = zstandard.ZstdCompressor().compress((folder / "corpus.parquet").read_bytes())
    (folder / "corpus.parquet.zst").write_bytes(packed)


def _write_lines(folder: Path, pairs: list[tuple[str, str]]) -> None:
    for name in ("lines", "mono"):
        (folder / f"{name}.txt").write_text("".join(pair[0] + "\n" for pair in pairs[:6]))
    (folder / "prefixes.txt").write_text("".join(pair[1].split()[0] + "\n" for pair in pairs[:6]))
    (folder / "constraints.txt").write_text("".join("\t".join(pair[1].split()[:2]) + "\n" for pair in pairs[:6]))
    (folder / "terms.txt").write_text("".join(f"{pair[0].split()[1]}\t{pair[1].split()[1]}\n" for pair in pairs[:3]))


def _sentencepiece(kind: str, texts: list[str]) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        model_type=kind,
        vocab_size=80,
        hard_vocab_limit=False,
        byte_fallback=False,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    return model.getvalue()


def _write_fairseq(folder: Path) -> None:
    """Write the averaged model as fairseq would."""
    opened = open_model(folder / "run")
    config = opened.experiment.model
    anatomy = dissect(config, weights(opened.model), config.embedding.max_positions)
    model: dict[str, Tensor] = {}
    for name, stack in (("encoder", anatomy.encoder), ("decoder", anatomy.decoder)):
        assert stack.positions is not None
        model[f"{name}.embed_tokens.weight"] = stack.embedding.clone()
        model[f"{name}.embed_positions.weight"] = torch.cat([torch.zeros(2, config.d_model), stack.positions])
        for number, layer in enumerate(stack.layers):
            model |= {f"{name}.layers.{number}.{key}": tensor.clone() for key, tensor in layer_names(layer)}
    model["decoder.output_projection.weight"] = anatomy.output.weight.clone()
    values: dict[str, Any] = {
        "arch": "transformer_iwslt_de_en",
        "encoder_layers": config.encoder.layers,
        "decoder_layers": config.decoder.layers,
        "encoder_attention_heads": config.heads,
        "decoder_attention_heads": config.heads,
        "encoder_embed_dim": config.d_model,
        "decoder_embed_dim": config.d_model,
        "encoder_normalize_before": False,
        "decoder_normalize_before": False,
        "activation_fn": "relu",
        "max_source_positions": config.embedding.max_positions,
        "max_target_positions": config.embedding.max_positions,
        "source_lang": "qlo",
        "target_lang": "qhi",
    }
    (folder / "fairseq").mkdir()
    content = {"args": None, "cfg": {"model": argparse.Namespace(**values)}, "model": model}
    torch.save(content, folder / "fairseq" / "checkpoint.pt")
    source, _ = load_tokenizers(folder / "run")
    pieces = source.pieces(range(4, source.size))
    (folder / "fairseq" / "dict.txt").write_text("".join(f"{piece} 1\n" for piece in pieces))
    shutil.copy(folder / "run" / "joint.spm", folder / "fairseq" / "joint.spm")


def _write_marian(folder: Path) -> None:
    """Write a Marian model with token lists and a text shortlist, and a Firefox one, half of it packed."""
    given = Path(__file__).parents[1] / "golden"
    (folder / "marian").mkdir()
    for name in ("model.npz", "model.npz.yml"):
        shutil.copy(given / "marian" / "ssru" / name, folder / "marian" / name)
    model = sentencepiece.SentencePieceProcessor(model_file=str(given / "marian" / "ssru" / "v.spm"))
    pieces = [model.id_to_piece(number) for number in range(model.get_piece_size())]
    listed = yaml.safe_dump({piece: number for number, piece in enumerate(pieces)}, allow_unicode=True)
    (folder / "marian" / "v.yml").write_text(listed, encoding="utf-8")
    pairs = "".join(f"{pieces[-number]} {piece} 0.{number + 1}\n" for number, piece in enumerate(pieces) if number)
    (folder / "marian" / "lex.s2t").write_text(pairs, encoding="utf-8")
    search = {
        "relative-paths": True,
        "models": ["model.npz"],
        "vocabs": ["v.yml"] * 2,
        "beam-size": 2,
        "normalize": 0.6,
    }
    search |= {"shortlist": ["lex.s2t", 50, 50]}
    (folder / "marian" / "decoder.yml").write_text(yaml.safe_dump(search))
    shutil.copytree(given / "firefox", folder / "firefox", ignore=shutil.ignore_patterns("expected.json"))
    for path in [*(folder / "firefox").glob("model.*"), *(folder / "firefox").glob("*.spm")]:
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
        path.unlink()


def _write_synthetic(folder: Path) -> None:
    """Write a back-translation whose shards are done but not merged, as `--shard` leaves it."""
    job = BackTranslationJob(
        models=(str(folder / "run"),),
        inputs=(str(folder / "mono.txt"),),
        out=folder / "synthetic",
        device="cpu",
        shard_lines=4,
    )
    plan, choice = make_plan(job)
    for shard in cut(readable_lines(job.files), plan.shard_lines, lambda index: True):
        make_shard(job, choice, plan.fingerprint, shard)
