"""Trains small models, exports them with `--to marian`, and compares Marian's translations and scores with ours.

    python experiments/marian/run.py WORK              # trains and exports what is missing; results/exported.json
    python experiments/marian/run.py WORK --models post

Marian is that of `make marian`. A row of the result has the counts of `compare.py` for each search; int8 is the export
after `pymarian convert --gemm-type intgemm8`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from compare import SEARCHES_OF_FEW, compared, named, ours, settled, theirs, version
from measuring import commit, processor

from ziggurat.data.babel import generate
from ziggurat.evaluate.scores import evaluate
from ziggurat.exchange.marian_program import WITHOUT_MARIAN, MarianTranslator, marian_program, run_marian
from ziggurat.translate.translator import load_translator

HERE = Path(__file__).resolve().parent
UPDATES = 300
SSRU = {"decoder": {"layers": 2, "attention": "ssru"}}
MODELS: dict[str, dict[str, Any]] = {
    "post": {},
    "post-epsilon-1e-5": {"layer_norm_epsilon": 1e-5},
    "deepnorm": {"residual": "deepnorm"},
    "pre-ssru": {"residual": "pre", **SSRU},
    "ssru-1": {"decoder": {"layers": 1, "attention": "ssru"}},
    "ssru-2": SSRU,
    "decoder-tied-silu": {"embedding": {"sharing": "decoder"}, "activation": "silu"},
    "two-vocabularies": {"embedding": {"sharing": "none"}, "joint": False},
    "big-network": {"d_ff": 512, "decoder": {"layers": 2}},
    "guided-head": {"guided": True},
    "student": {
        "d_model": 256,
        "d_ff": 1536,
        "heads": 8,
        "encoder": {"layers": 6},
        "decoder": {"layers": 2, "attention": "ssru"},
        "dropout": {"residual": 0.0, "embedding": 0.0},
        "updates": 1000,
        "peak": 8e-4,
    },
}
"""MODELS maps a name to how it differs from a post-norm model of 2-2 layers of width 64.

`student` is the recipe `student-6-2-tiny-ssru` with fewer pieces. It is trained on the embedded language pair, which is
as regular as a teacher's output, without label smoothing.
"""


def configuration(work: Path, name: str) -> dict[str, Any]:
    """Return the configuration of a model."""
    choices = dict(MODELS[name])
    joint, guided = choices.pop("joint", True), choices.pop("guided", False)
    updates, peak = choices.pop("updates", UPDATES), choices.pop("peak", 3e-3)
    embedding = {"sharing": "all", "zero_start": True, "max_positions": 256} | choices.pop("embedding", {})
    model = {"d_model": 64, "d_ff": 128, "heads": 4, "residual": "post", "layer_norm_epsilon": 1e-6}
    model |= {"encoder": {"layers": 2}, "decoder": {"layers": 2}, "embedding": embedding} | choices
    data: dict[str, Any] = {
        "source_language": "qlo",
        "target_language": "qhi",
        "store": str(work / ("store" if joint and not guided else f"store-{name}")),
        "train": [{"source": str(work / "train.qlo"), "target": str(work / "train.qhi")}],
        "dev": [{"source": str(work / "dev.qlo"), "target": str(work / "dev.qhi")}],
        "subword": {"joint": joint, "vocabulary_size": 512},
    }
    if guided:
        data["alignment"] = {"compute": "hmm"}
    training: dict[str, Any] = {
        "stop": {"updates": updates},
        "batch": {"max_tokens": 2048},
        "schedule": {"peak": peak, "warmup_updates": 200},
        "validation": {"every_updates": updates},
        "checkpoint": {"every_updates": updates, "average_last": 1},
    }
    if guided:
        training["loss"] = {"alignment": {}}
    elif name == "student":
        training["loss"] = {"label_smoothing": 0.0}
    return {"data": data, "model": model, "training": training}


def ziggurat(*words: str | Path) -> None:
    """Run the command line."""
    subprocess.run([sys.executable, "-m", "ziggurat", *map(str, words)], check=True)


def write_texts(work: Path) -> None:
    """Write the texts of the embedded language pair that are missing."""
    for part, pairs in (("train", 20_000), ("dev", 200), ("test", 1_000)):
        if not (work / f"{part}.qhi").exists():
            sides = zip(*generate(pairs, seed={"train": 1, "dev": 2, "test": 3}[part]), strict=True)
            for side, lines in zip(("qlo", "qhi"), sides, strict=True):
                (work / f"{part}.{side}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def made(work: Path, name: str) -> None:
    """Train and export a model if it is missing."""
    write_texts(work)
    config = configuration(work, name)
    (work / f"{name}.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    run = work / "runs" / name
    if not Path(config["data"]["store"]).exists():
        ziggurat("prepare", work / f"{name}.yaml")
    if not (run / "averaged").exists() and not any(run.glob("checkpoints/*")):
        ziggurat("train", work / f"{name}.yaml", "--run", run, "--device", "cpu", "-q")
    out = work / "marian" / name
    if not (out / "export.json").exists():
        ziggurat("export", run, "--to", "marian", "--out", out, "--verify", work / "test.qlo", "--lines", "200")


def measured(work: Path, name: str) -> dict[str, Any]:
    """Return how Marian's and our translations of the test set compare for one model."""
    marian = marian_program()
    assert marian is not None, WITHOUT_MARIAN
    made(work, name)
    out = work / "marian" / name
    text, references = (path.read_text(encoding="utf-8") for path in (work / "test.qlo", work / "test.qhi"))
    verified = json.loads((out / "export.json").read_text())["verification"]
    row: dict[str, Any] = {"export": verified | {"text": Path(verified["text"]).name}}
    # As Marian searches, over the files that it reads: neither padding nor begin-of-sentence has a probability there.
    imported = work / "imported" / name
    if not imported.exists():
        ziggurat("import", out, "--out", imported)
    translator = load_translator(imported, device="cpu")
    row["searches"] = {}
    for search in SEARCHES_OF_FEW:
        found = compared(theirs(marian, out, text, search), ours(translator, text, search))
        row["searches"][named(search)] = found = settled(found, translator, text, search)
        print(name, named(search), found["same"], found["ties"], found["score_gap"], flush=True)
    return row | quantised(out, text.splitlines(), references.splitlines())


def quantised(out: Path, lines: list[str], references: list[str]) -> dict[str, Any]:
    """Return BLEU of Marian's translations, beam 4, before and after `pymarian convert --gemm-type intgemm8`."""
    packed = out.with_name(f"{out.name}-int8")
    packed.mkdir(exist_ok=True)
    run_marian("convert", "-f", out / "model.npz", "-t", packed / "model.bin", "--gemm-type", "intgemm8")
    search = yaml.safe_load((out / "decoder.yml").read_text()) | {"models": ["model.bin"]}
    (packed / "decoder.yml").write_text(yaml.safe_dump(search))
    for vocabulary in out.glob("*.spm"):
        (packed / vocabulary.name).write_bytes(vocabulary.read_bytes())
    settings = {"beam_size": 4, "length_penalty": {"alpha": 0.0, "word_penalty": 0.0}, "max_length": {"ratio": 3.0}}
    settings |= {"unknown": False}
    before, after = (
        [translation.text for translation in MarianTranslator(folder).translate_stream(lines, **settings)]
        for folder in (out, packed)
    )
    scores = [evaluate(texts, [references], metrics=["bleu"])[0] for texts in (before, after)]
    sizes = [path.stat().st_size for path in (out / "model.npz", packed / "model.bin")]
    return {
        "intgemm8": {
            "lines as before": sum(a == b for a, b in zip(before, after, strict=True)),
            "BLEU": [score.value for score in scores],
            "signature": scores[0].signature,
            "bytes": sizes,
        }
    }


def main() -> None:
    """Measure the models and write results/exported.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--train", action="store_true", help="only train")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    path = HERE / "results" / "exported.json"
    rows = json.loads(path.read_text())["models"] if path.exists() else {}
    for name in options.models:
        if options.train:
            made(options.work, name)
            continue
        rows[name] = measured(options.work, name)
        print(name, json.dumps(rows[name], ensure_ascii=False)[:600], flush=True)
        record = {
            "command": "python experiments/marian/run.py WORK",
            "marian": version(marian_program() or Path("pymarian")),
            "commit": commit(),
            "processor": processor(),
            "updates": UPDATES,
            "models": rows,
        }
        path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
