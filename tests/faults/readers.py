"""Everything in this package that reads files, as functions that read the current folder, for the fuzzer (fuzzing.py).

Most of them are verbs of the command line, because the tests are about what users see. The undamaged files come from
tests/faults/material.py.
"""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ziggurat.cli
from ziggurat.config.data import CorpusConfig, RegularisationConfig, SubwordConfig
from ziggurat.config.load import parse_experiment
from ziggurat.data.corpus import Store
from ziggurat.data.readers import CorpusReader
from ziggurat.data.subword import Tokenizer, load_tokenizers
from ziggurat.data.subword_training import existing_tokenizers
from ziggurat.exchange.onnx_runtime import load_onnx
from ziggurat.model.run_folder import checkpoint_folders
from ziggurat.model.tensors import read_tensors
from ziggurat.system.errors import ConfigError
from ziggurat.train.checkpoint import load_checkpoint


class RefusedError(Exception):
    """A verb ended with status 2, with this message."""


class FailedError(Exception):
    """A verb ended with a status other than 0 and 2, with this message."""


def checksummed(path: Path) -> bool:
    """Return whether the folder of a file lists checksums."""
    return (path.parent / "checksums.json").exists()


@dataclass(frozen=True)
class Reader:
    """One way to read files.

    Attributes:
        name: name of the reader.
        parts: the material that it needs in its folder.
        files: patterns of the files to damage.
        read: called in the folder; returns equal values if it read the same.
        checked: whether damage to this file must be noticed if it changes the result.
        outputs: files that must not exist after a refusal.
    """

    name: str
    parts: tuple[str, ...]
    files: tuple[str, ...]
    read: Callable[[], Any]
    checked: Callable[[Path], bool] = lambda path: False
    outputs: tuple[str, ...] = ()


def verb(*arguments: str) -> str:
    """Run one verb and return its standard output. Raises RefusedError and FailedError."""
    out, said = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    with redirect_stdout(out), redirect_stderr(said), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        status = ziggurat.cli._run(list(arguments), "--debug" in sys.argv)
    if status == 2:
        raise RefusedError(said.getvalue())
    if status:
        raise FailedError(said.getvalue())
    out.flush()
    buffer: Any = out.buffer
    return str(buffer.getvalue().decode())


def translated(model: str, *options: str) -> str:
    """Translate with a model in the folder; the result has scores, so it depends on all weights."""
    return verb("translate", model, *options, "-i", "sources.txt", "--json", "--threads", "1", "--device", "cpu")


def store_at(path: str) -> Any:
    """Return everything in a store."""
    store = Store.open(path)
    found: list[Any] = [store.fingerprint, tokenized((store.source, store.target))]
    for table in (store.train, store.dev):
        if table is not None:
            rows = range(len(table))
            found += [[ids.tolist() for ids in side] for side in table.pairs(rows)]
            found += [array.tolist() for array in (table.corpora, table.source_lengths, table.target_lengths)]
            found += [table.corpus_names, table.corpus_weights, table.texts(rows) if table.has_text else []]
    return found


def tokenized(pair: tuple[Tokenizer, Tokenizer]) -> Any:
    """Return a pair of tokenizers' output for a few texts, and all their pieces."""
    texts = ["Thas stailei voufali", "q\ufdd0 \u2581 \u4e00 <bt> zz", ""]
    return [
        [
            tokenizer.size,
            dict(tokenizer.tags),
            tokenizer.encode(texts),
            tokenizer.pieces(range(tokenizer.size)),
            tokenizer.decode(range(tokenizer.size)),
        ]
        for tokenizer in pair
    ]


def _sentencepiece() -> Any:
    config = SubwordConfig(kind="existing", source_model="bpe.spm", target_model="unigram.spm")
    pair = existing_tokenizers(config, "nfkc", ["<bt>"])
    drawn = [tokenizer.sample(["Thas stailei"], [3], RegularisationConfig()) for tokenizer in pair]
    return [tokenized(pair), drawn]


def _checkpoint() -> Any:
    found = load_checkpoint(checkpoint_folders(Path("run"))[-1])
    tensors = [
        (name, t.dtype, t.numpy().tobytes()) for part in (found.weights, found.optimiser) for name, t in part.items()
    ]
    return [found.progress, found.store, tensors]


def _resumed() -> Any:
    verb("train", "--run", "run", "--resume", "training.stop.updates=402")
    last = checkpoint_folders(Path("run"))[-1]
    return [last.name, (last / "model.safetensors").read_bytes()]


def _begun() -> Any:
    verb("train", "config.yaml", "--run", "begun", "training.start_from=plain", "training.stop.updates=2")
    return (checkpoint_folders(Path("begun"))[-1] / "model.safetensors").read_bytes()


def _average() -> Any:
    verb("average", "run", "--last", "1", "--out", "mean")
    return Path("mean/model.safetensors").read_bytes()


def _corpus(config: CorpusConfig) -> Any:
    return list(CorpusReader.of(config, "data.train.0", ("qlo", "qhi")).blocks())


def _prepared() -> Any:
    verb("prepare", "prepared.yaml")
    return store_at("prepared")


def _imported(*arguments: str) -> Any:
    verb("import", *arguments, "--out", "imported")
    Path("imported").rename("whole")
    try:
        return translated("whole", "max_length.extra=5")
    except RefusedError as error:
        if "not finite" not in str(error):  # damaged weights may become NaN
            raise
        return str(error)


def _onnx(folder: str) -> Any:
    lines = Path("sources.txt").read_text().splitlines()
    return [translation.to_json() for translation in load_onnx(folder, threads=1).translate(lines)]


def _overridden() -> Any:
    given = Path("overrides.txt").read_text("utf-8", "surrogateescape").splitlines()
    text = Path("config.yaml").read_text()
    try:
        return [parse_experiment(text, "config.yaml", [line]) for line in given if line]
    except ConfigError as error:
        raise RefusedError(f"overrides.txt: {error}") from None


def _tensors() -> Any:
    tensors = read_tensors(Path("weights.safetensors"))
    return [(name, t.dtype, list(t.shape), t.numpy().tobytes()) for name, t in tensors.items()]


def _fairseq() -> Any:
    options = ("--dictionary", "fairseq/dict.txt", "--sentencepiece", "fairseq/joint.spm")
    return _imported("fairseq/checkpoint.pt", *options)


def _lines() -> Any:
    beside = ("--prefix", "prefixes.txt", "--constraints", "constraints.txt", "--terminology", "terms.txt")
    verb("translate", "run", "-i", "lines.txt", *beside, "-o", "out", "--threads", "1", "--device", "cpu")
    return Path("out").read_bytes()


def _merged() -> Any:
    verb(
        *("bulk", "--shard-lines", "4", "--merge"),
        *("backtranslate", "run", "-i", "mono.txt", "-o", "synthetic", "--device", "cpu"),
    )
    return [Path("synthetic", name).read_bytes() for name in ("source.txt", "target.txt")]


def _model(folder: str, read: Callable[[str], Any], outputs: tuple[str, ...] = ()) -> Iterator[Reader]:
    """Yield two readers, for a model folder with and without checksums."""
    for name in (folder, f"foreign-{folder}"):
        yield Reader(name, (name, "sources.txt"), (f"{name}/*",), partial(read, name), checksummed, outputs)


_CORPORA = ("tsv", "tsv.gz", "tsv.xz", "tsv.zst", "jsonl", "parquet", "parquet.zst")
_STATE = (".safetensors", ".spm", ".arrow", ".npy", ".yaml")
"""_STATE are the files of a run and its store whose content determines how it resumes."""

READERS: dict[str, Reader] = {
    reader.name: reader
    for reader in (
        Reader("store", ("store",), ("store/*",), lambda: store_at("store"), lambda path: True),
        Reader("checkpoint", ("run",), ("run/checkpoints/**/*",), _checkpoint, lambda path: True),
        Reader("resume", ("run", "store"), ("run/**/*", "store/*"), _resumed, lambda path: path.suffix in _STATE),
        Reader("begin", ("plain", "store", "config.yaml"), ("plain/*",), _begun, checksummed, ("begun",)),
        Reader("average", ("run",), ("run/**/*",), _average, lambda path: path.suffix == ".safetensors", ("mean",)),
        Reader("run", ("run", "sources.txt"), ("run/averaged/*",), lambda: translated("run"), checksummed),
        *_model("grown", translated),
        *_model("ctranslate2", translated),
        *_model("onnx", _onnx),
        *_model("huggingface", _imported, ("imported",)),
        Reader("fairseq", ("fairseq", "sources.txt"), ("fairseq/*",), _fairseq, outputs=("imported",)),
        Reader("marian", ("marian", "sources.txt"), ("marian/*",), lambda: _imported("marian"), outputs=("imported",)),
        Reader(
            "firefox",
            ("firefox", "sources.txt"),
            ("firefox/*",),
            lambda: _imported("firefox"),
            lambda path: path.name.startswith("model."),
            ("imported",),
        ),
        Reader("safetensors", ("weights.safetensors",), ("weights.safetensors",), _tensors),
        Reader(
            "shortlist",
            ("run", "shortlist.safetensors", "sources.txt"),
            ("shortlist.safetensors",),
            lambda: translated("run", "shortlist=shortlist.safetensors"),
            lambda path: True,
        ),
        Reader(
            "aligner",
            ("aligner.safetensors", "lines.txt", "mono.txt"),
            ("aligner.safetensors",),
            lambda: verb("align", "lines.txt", "mono.txt", "--input-model", "aligner.safetensors"),
        ),
        Reader("sentencepiece", ("bpe.spm", "unigram.spm"), ("*.spm",), _sentencepiece),
        Reader("vocabulary", ("words",), ("words/*",), lambda: tokenized(load_tokenizers("words"))),
        Reader(
            "yaml",
            ("config.yaml",),
            ("config.yaml",),
            lambda: verb("inspect", "config.yaml", "--json", "--no-cost", "--no-check"),
        ),
        Reader("overrides", ("config.yaml", "overrides.txt"), ("overrides.txt",), _overridden),
        Reader(
            "report",
            ("run",),
            ("run/*.*", "run/diagnostics/*"),
            lambda: verb("report", "run", "--json", "--translations", "0"),
            outputs=("run/report.html",),
        ),
        Reader(
            "text",
            ("corpus",),
            ("corpus/train.qlo", "corpus/train.qhi.gz"),
            lambda: _corpus(CorpusConfig(source="corpus/train.qlo", target="corpus/train.qhi.gz")),
        ),
        *(
            Reader(
                kind,
                (f"corpus.{kind}",),
                (f"corpus.{kind}",),
                lambda kind=kind: _corpus(CorpusConfig(path=f"corpus.{kind}")),
            )
            for kind in _CORPORA
        ),
        Reader(
            "prepare",
            ("corpus", "prepared.yaml"),
            ("corpus/train.q??", "corpus/dev.*"),
            _prepared,
            outputs=("prepared",),
        ),
        Reader(
            "lines",
            ("run", "lines.txt", "prefixes.txt", "constraints.txt", "terms.txt"),
            ("*.txt",),
            _lines,
            outputs=("out",),
        ),
        Reader(
            "evaluate",
            ("lines.txt", "mono.txt"),
            ("*.txt",),
            lambda: verb("evaluate", "--hypothesis", "lines.txt", "--reference", "mono.txt", "--json"),
        ),
        Reader(
            "backtranslate",
            ("synthetic", "run", "mono.txt"),
            ("synthetic/**/*",),
            _merged,
            lambda path: path.suffix == ".tsv",
        ),
    )
}
