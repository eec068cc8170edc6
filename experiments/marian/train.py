"""Trains models with Marian for `compare.py`, with one vocabulary for both sides.

python experiments/marian/train.py WORK            # WORK of run.py; folders in WORK/models
python experiments/marian/train.py WORK --models wide
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections import Counter
from pathlib import Path

import sentencepiece
from run import write_texts

from ziggurat.exchange.marian_program import WITHOUT_MARIAN, marian_program

PIECES = 512
SSRU = ("--transformer-decoder-autoreg", "rnn", "--dec-cell", "ssru")
MODELS: dict[str, tuple[str | int, ...]] = {
    "noproj": ("--transformer-no-projection", "--transformer-postprocess", "dan"),
    "gelu": ("--transformer-ffn-activation", "gelu", "--transformer-postprocess", "dan"),
    # Marian's own search of pre-norm self-attention differs from its training.
    "peri": (
        *(*SSRU, "--transformer-preprocess", "n", "--transformer-postprocess", "dna"),
        *("--transformer-postprocess-top", "n", "--transformer-postprocess-emb", "dn"),
    ),
    "rms": ("--transformer-postprocess", "dar"),
    "wide": ("--transformer-postprocess", "dan", "--dim-vocabs", PIECES + 88, PIECES + 88),
}
"""MODELS maps a name to options that differ from a Transformer of 2-2 layers of width 32.

`wide` has a vocabulary of words, because a list may be shorter than the matrix, but a SentencePiece model may not.
"""
OPTIONS = (
    *("--type", "transformer", "--dim-emb", 32, "--transformer-dim-ffn", 64, "--transformer-heads", 4),
    *("--enc-depth", 2, "--dec-depth", 2, "--tied-embeddings-all", "--transformer-dropout", 0.1),
    *("--mini-batch", 64, "--maxi-batch", 100, "--max-length", 250, "--label-smoothing", 0.1),
    *("--learn-rate", 3e-3, "--lr-warmup", 100, "--lr-decay-inv-sqrt", 100, "--clip-norm", 1, "--seed", 1),
    *("--after-batches", 600, "--save-freq", "600u", "--cpu-threads", 1, "-w", 500, "--overwrite", "--quiet"),
)


def pieces(work: Path) -> Path:
    """Return the SentencePiece model of the training text, made if it is missing."""
    made = work / "joint.spm"
    if not made.exists():
        sentencepiece.SentencePieceTrainer.train(
            input=f"{work / 'train.qlo'},{work / 'train.qhi'}",
            model_prefix=str(work / "joint"),
            vocab_size=PIECES,
            bos_id=-1,
            eos_id=0,
            unk_id=1,
            minloglevel=2,
        )
        (work / "joint.model").rename(made)
    return made


def words(work: Path) -> Path:
    """Return a list of the most frequent words of the training text."""
    counts = Counter(word for side in ("qlo", "qhi") for word in (work / f"train.{side}").read_text("utf-8").split())
    listed = ["</s>", "<unk>", *(word for word, _ in counts.most_common(PIECES - 2))]
    lines = (f"{json.dumps(word, ensure_ascii=False)}: {number}\n" for number, word in enumerate(listed))
    (work / "words.yml").write_text("".join(lines), encoding="utf-8")
    return work / "words.yml"


def main() -> None:
    """Train the models that are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    given = parser.parse_args()
    marian = marian_program()
    assert marian is not None, WITHOUT_MARIAN
    given.work.mkdir(parents=True, exist_ok=True)
    write_texts(given.work)
    for name in given.models:
        folder = given.work / "models" / name
        if (folder / "model.npz.decoder.yml").exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        made = words(given.work) if name == "wide" else pieces(given.work)
        (folder / made.name).write_bytes(made.read_bytes())
        sides = [given.work / "train.qlo", given.work / "train.qhi"]
        files = ["-m", folder / "model.npz", "-t", *sides, "-v", *[folder / made.name] * 2]
        subprocess.run([marian, "train", *map(str, [*files, *OPTIONS, *MODELS[name]])], check=True)


if __name__ == "__main__":
    main()
