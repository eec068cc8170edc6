"""Trains models with Marian for `compare.py`, and converts some of them.

python experiments/marian/train.py WORK            # WORK of run.py; folders in WORK/models
python experiments/marian/train.py WORK --models wide

Marian is that of `make marian`; with one thread a model takes a minute or two.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import sentencepiece
import yaml
from run import write_texts

from ziggurat.exchange.marian import write_npz
from ziggurat.exchange.marian_files import read_weights
from ziggurat.exchange.marian_program import WITHOUT_MARIAN, marian_program, run_marian

PIECES = 512
OPTIONS: dict[str, Any] = {
    "type": "transformer",
    "dim-emb": 32,
    "transformer-dim-ffn": 64,
    "transformer-heads": 4,
    "enc-depth": 2,
    "dec-depth": 2,
    "transformer-postprocess": "dan",
    "transformer-dropout": 0.1,
    "tied-embeddings-all": True,
    "mini-batch": 64,
    "maxi-batch": 100,
    "max-length": 250,
    "label-smoothing": 0.1,
    "learn-rate": 3e-3,
    "lr-warmup": 100,
    "lr-decay-inv-sqrt": [100],
    "clip-norm": 1,
    "seed": 1,
    "after-batches": 600,
    "save-freq": "600u",
    "cpu-threads": 1,
    "workspace": 500,
    "overwrite": True,
    "quiet": True,
}
"""OPTIONS are those of `post`; its training is that of all models."""

SSRU = {"transformer-decoder-autoreg": "rnn", "dec-cell": "ssru"}
PRE = {"transformer-preprocess": "n", "transformer-postprocess": "da", "transformer-postprocess-top": "n"}
BROAD = {"dim-emb": 64, "transformer-dim-ffn": 128}
MODELS: dict[str, dict[str, Any]] = {
    "post": {},
    "pre": PRE,
    "dna": {"transformer-postprocess": "dna", "transformer-postprocess-top": "n"},
    "da": {"transformer-postprocess": "da"},
    "peri": {**SSRU, **PRE, "transformer-postprocess": "dna", "transformer-postprocess-emb": "dn"},
    "ssru1": SSRU | {"dec-depth": 1},
    "ssru2": SSRU,
    "ssru6": SSRU | {"dec-depth": 6},
    "ssru2tied": SSRU | {"transformer-tied-layers": [1, 1]},
    "ssrupre": SSRU | PRE,
    "tied4": {"dec-depth": 4, "transformer-tied-layers": [1, 1, 2, 2]},
    "two": {"tied-embeddings-all": False, "tied-embeddings": True},
    "wide": {"dim-vocabs": [PIECES + 88] * 2},
    "bigffn": {
        "transformer-ffn-depth": 1,
        "transformer-decoder-ffn-depth": 3,
        "transformer-decoder-dim-ffn": 256,
    },
    "noproj": {"transformer-no-projection": True},
    "gelu": {"transformer-ffn-activation": "gelu"},
    "rms": {"transformer-postprocess": "dar"},
    "guided": {"guided-alignment": "train.align", "transformer-guided-alignment-layer": "1"},
    "post64": BROAD,
    "ssru64": BROAD | SSRU,
}
"""MODELS maps a name to the options in which the model differs from `post`.

`wide` has a vocabulary of words, because Marian widens the matrix of a list when asked, but not that of a SentencePiece
model.
"""
CONVERTED = {"float32": "float32", "int8": "intgemm8"}
"""CONVERTED maps the ending of a folder's name to the `--gemm-type` of its binary model; int8 needs a width of 64."""


def pieces(work: Path, name: str, sides: tuple[str, ...] = ("qlo", "qhi")) -> Path:
    """Return the SentencePiece model for the training text of some sides; train it if it is missing."""
    made = work / f"{name}.spm"
    if not made.exists():
        sentencepiece.SentencePieceTrainer.train(
            input=",".join(str(work / f"train.{side}") for side in sides),
            model_prefix=str(work / name),
            vocab_size=PIECES,
            bos_id=-1,
            eos_id=0,
            unk_id=1,
            minloglevel=2,
        )
        (work / f"{name}.model").rename(made)
    return made


def words(work: Path) -> Path:
    """Return a list of the most frequent words of the training text."""
    counts = Counter(word for side in ("qlo", "qhi") for word in (work / f"train.{side}").read_text("utf-8").split())
    listed = ["</s>", "<unk>", *(word for word, _ in counts.most_common(PIECES - 2))]
    lines = (f"{json.dumps(word, ensure_ascii=False)}: {number}\n" for number, word in enumerate(listed))
    (work / "words.yml").write_text("".join(lines), encoding="utf-8")
    return work / "words.yml"


def vocabularies(work: Path, name: str) -> list[Path]:
    """Return the vocabularies of both sides."""
    if name == "two":
        return [pieces(work, side, (side,)) for side in ("qlo", "qhi")]
    return [words(work) if name == "wide" else pieces(work, "joint")] * 2


def align(work: Path) -> None:
    """Write links along the diagonal; it does not matter what the head is taught."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(pieces(work, "joint")))
    sides = [(work / f"train.{side}").read_text("utf-8").splitlines() for side in ("qlo", "qhi")]
    lengths = zip(*([len(row) for row in processor.encode(side)] for side in sides), strict=True)
    lines = (" ".join(f"{t * one // other}-{t}" for t in range(other)) for one, other in lengths)
    (work / "train.align").write_text("".join(f"{line}\n" for line in lines))


def train(work: Path, name: str) -> None:
    """Train a model that is not there yet."""
    folder = work / "models" / name
    if (folder / "model.npz.decoder.yml").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    options = OPTIONS | MODELS[name]
    if "guided-alignment" in options:
        align(work)
    copies = []
    for made in vocabularies(work, name):
        copies.append(folder / made.name)
        copies[-1].write_bytes(made.read_bytes())
    options |= {"model": str(folder / "model.npz"), "vocabs": list(map(str, copies))}
    options |= {"train-sets": [str(work / f"train.{side}") for side in ("qlo", "qhi")]}
    (folder / "options.yml").write_text(yaml.safe_dump(options), encoding="utf-8")
    run_marian("train", "-c", folder / "options.yml", folder=work)


def convert(work: Path, name: str) -> None:
    """Write the binary models of a model, and the weights of the int8 one as fp32 (`rounded`).

    With those, Marian computes with the same numbers as our import.
    """
    for ending, kind in CONVERTED.items():
        out = beside(work, name, ending, "model.bin")
        run_marian("convert", "-f", work / "models" / name / "model.npz", "-t", out, "--gemm-type", kind)
    read = read_weights(work / "models" / f"{name}-int8" / "model.bin")
    write_npz(beside(work, name, "rounded", "model.npz"), read.arrays, read.options)


def beside(work: Path, name: str, ending: str, file: str) -> Path:
    """Make a folder for other weights of a model, and return the path of the weights."""
    folder, out = work / "models" / name, work / "models" / f"{name}-{ending}"
    out.mkdir(exist_ok=True)
    (out / "joint.spm").write_bytes((folder / "joint.spm").read_bytes())
    search = yaml.safe_load((folder / "model.npz.decoder.yml").read_text("utf-8"))
    search |= {"relative-paths": True, "models": [file], "vocabs": ["joint.spm"] * 2}
    (out / "decoder.yml").write_text(yaml.safe_dump(search), encoding="utf-8")
    return out / file


def main() -> None:
    """Train the models that are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    given = parser.parse_args()
    assert marian_program() is not None, WITHOUT_MARIAN
    given.work.mkdir(parents=True, exist_ok=True)
    write_texts(given.work)
    for name in given.models:
        train(given.work.resolve(), name)
        if MODELS[name].items() >= BROAD.items():
            convert(given.work.resolve(), name)


if __name__ == "__main__":
    main()
