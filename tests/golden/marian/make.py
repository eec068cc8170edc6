"""Trains the small models of this folder with Marian, and records its results (README.md).

`python -m tests.golden.marian.make PYMARIAN`: the command in an environment that has Marian.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import sentencepiece

from ziggurat.data.babel import generate

HERE = Path(__file__).parent

SSRU = ("--transformer-decoder-autoreg", "rnn", "--dec-cell", "ssru")
PERI = ("--transformer-preprocess", "n", "--transformer-postprocess", "dna", "--transformer-postprocess-top", "n")
MODELS: dict[str, tuple[str, ...]] = {
    "ssru": (*SSRU, "--transformer-postprocess", "dan", "--transformer-ffn-activation", "relu", "--dec-depth", "2"),
    "guided": (
        *("--guided-alignment", "train.align", "--transformer-guided-alignment-layer", "1", "--dec-depth", "2"),
        *("--transformer-postprocess", "dan", "--transformer-ffn-activation", "swish"),
    ),
    "odd": (
        *(*SSRU, *PERI, "--transformer-postprocess-emb", "dn", "--transformer-tied-layers", "1", "1"),
        *("--transformer-ffn-depth", "1", "--transformer-decoder-ffn-depth", "3", "--transformer-no-projection"),
        *("--transformer-ffn-activation", "gelu", "--dec-depth", "2"),
    ),
    "rms": (
        *("--transformer-preprocess", "r", "--transformer-postprocess", "da", "--transformer-postprocess-top", "r"),
        *("--transformer-ffn-activation", "relu", "--dec-depth", "1"),
    ),
}
TRAINING = (
    *("--type", "transformer", "--dim-emb", "16", "--transformer-heads", "2", "--transformer-dim-ffn", "24"),
    *("--enc-depth", "1", "--mini-batch", "64", "--maxi-batch", "10", "--learn-rate", "0.01", "--lr-warmup", "50"),
    *("--label-smoothing", "0.1", "--clip-norm", "1", "--cpu-threads", "1", "-w", "300", "--max-length", "80"),
    *("--seed", "1", "--after-batches", "400", "--overwrite", "--save-freq", "9999", "--quiet"),
)
SEARCHES = (
    {"beam-size": 1},
    {"beam-size": 4, "normalize": 0.6},
    {"beam-size": 4, "word-penalty": -1.5},
    {"beam-size": 6, "normalize": 1.0, "max-length-factor": 0.5},
)


def make_model(marian: str, name: str, work: Path) -> None:
    """Write the folder of one model, trained in the folder `work` with its data and vocabularies."""
    two = name == "guided"  # separate vocabularies
    sides = ["a.spm", "b.spm"] if two else ["v.spm", "v.spm"]
    tied = ["--tied-embeddings"] if two else ["--tied-embeddings-all"]
    out = work / name
    out.mkdir()
    data = ["--train-sets", "train.a", "train.b", "--vocabs", *sides, *tied, "--model", f"{name}/model.npz"]
    subprocess.run([marian, "train", *TRAINING, *data, *MODELS[name]], cwd=work, check=True)
    model = ["-m", f"{name}/model.npz", "-v", *sides, "--quiet", "--cpu-threads", "1"]

    def said(*words: str, text: str = "") -> list[str]:
        ran = subprocess.run([marian, *words], cwd=work, input=text, capture_output=True, text=True, check=True)
        return ran.stdout.splitlines()

    text = (work / "test.a").read_text("utf-8")
    found: dict[str, Any] = {
        "sources": text.splitlines(),
        "targets": (work / "test.b").read_text("utf-8").splitlines(),
        "scores": list(map(float, said("score", *model, "-t", "test.a", "test.b"))),
        "searches": [],
    }
    for search in SEARCHES:
        asked = [word for key, value in search.items() for word in (f"--{key}", str(value))]
        alone = ["--n-best", "--mini-batch", "1", "--maxi-batch", "1"]
        lines = [line.split(" ||| ") for line in said("decode", *model, *alone, *asked, text=text)]
        lists = [(row[1], float(row[3]), int(row[0])) for row in lines]
        n_best = [[list(row[:2]) for row in lists if row[2] == line] for line in range(len(found["sources"]))]
        found["searches"].append({"options": search, "n_best": n_best})
    if two:
        rows = said("decode", *model, "-b", "1", "--mini-batch", "1", "--alignment", "hard", text=text)
        found["alignments"] = [row.split(" ||| ")[1] for row in rows]
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for file in (f"{name}/model.npz", f"{name}/model.npz.decoder.yml", f"{name}/model.npz.yml", *sides):
        shutil.copyfile(work / file, folder / Path(file).name)
    (folder / "expected.json").write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _data(work: Path) -> None:
    pairs = [(a, b) for a, b in generate(6000, seed=3) if len(a) < 60]
    rows = {"train": pairs[:-12], "test": pairs[-12:]}
    for part, some in rows.items():
        for side, lines in zip("ab", zip(*some, strict=True), strict=True):
            (work / f"{part}.{side}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    for name, sides in (("v", "ab"), ("a", "a"), ("b", "b")):
        sentencepiece.SentencePieceTrainer.train(
            input=",".join(str(work / f"train.{side}") for side in sides),
            model_prefix=str(work / name),
            vocab_size=110 if name == "v" else 80,
            character_coverage=0.995,
            normalization_rule_name="identity",  # others take 200 kB
            bos_id=-1,
            eos_id=0,
            unk_id=1,
            minloglevel=2,
        )
        (work / f"{name}.model").rename(work / f"{name}.spm")
    models = [sentencepiece.SentencePieceProcessor(model_file=str(work / f"{side}.spm")) for side in "ab"]
    with (work / "train.align").open("w") as file:
        for a, b in rows["train"]:
            one, other = (len(model.encode(text)) for model, text in zip(models, (a, b), strict=True))
            # Along the diagonal; it does not matter what the head is taught.
            file.write(" ".join(f"{math.floor(t * one / other)}-{t}" for t in range(other)) + "\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        _data(Path(folder))
        for each in sys.argv[2:] or MODELS:
            make_model(sys.argv[1], each, Path(folder))
