"""Trains small models, exports them with `--to marian`, and compares Marian's translations and scores with ours.

    python experiments/marian/run.py WORK              # trains and exports what is not there yet; results/exported.json
    python experiments/marian/run.py WORK --models post

Marian is that of `make marian`. A row of the result has the lines that differ and the largest difference of a score, by
beam; int8 is what `pymarian convert --gemm-type intgemm8` makes of the export.
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

from measuring import commit, processor

from ziggurat.data.babel import generate
from ziggurat.evaluate.scores import evaluate
from ziggurat.exchange.marian_program import MarianTranslator, run_marian
from ziggurat.translate.translator import load_translator

HERE = Path(__file__).resolve().parent
BEAMS = (1, 4, 12)
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
}
"""MODELS are the choices by which each differs from a post-norm model of 2-2 layers of width 64."""


def configuration(work: Path, name: str) -> dict[str, Any]:
    """Return the configuration of a model."""
    choices = dict(MODELS[name])
    joint, guided = choices.pop("joint", True), choices.pop("guided", False)
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
        "stop": {"updates": UPDATES},
        "batch": {"max_tokens": 2048},
        "schedule": {"peak": 3e-3, "warmup_updates": 200},
        "validation": {"every_updates": UPDATES},
        "checkpoint": {"every_updates": UPDATES, "average_last": 1},
    }
    if guided:
        training["loss"] = {"alignment": {}}
    return {"data": data, "model": model, "training": training}


def ziggurat(*words: str | Path) -> None:
    """Run the command line."""
    subprocess.run([sys.executable, "-m", "ziggurat", *map(str, words)], check=True)


def made(work: Path, name: str) -> None:
    """Train and export a model that is not there yet."""
    for part, pairs in (("train", 20_000), ("dev", 200), ("test", 1_000)):
        if not (work / f"{part}.qhi").exists():
            sides = zip(*generate(pairs, seed={"train": 1, "dev": 2, "test": 3}[part]), strict=True)
            for side, lines in zip(("qlo", "qhi"), sides, strict=True):
                (work / f"{part}.{side}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
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
    """Return what Marian and we make of the test set with one model."""
    made(work, name)
    out = work / "marian" / name
    lines = (work / "test.qlo").read_text(encoding="utf-8").splitlines()
    references = (work / "test.qhi").read_text(encoding="utf-8").splitlines()
    row: dict[str, Any] = {"export": json.loads((out / "export.json").read_text())["verification"]}
    # As Marian searches, over the files that it reads: neither padding nor begin-of-sentence has a probability there.
    imported = work / "imported" / name
    if not imported.exists():
        ziggurat("import", out, "--out", imported)
    ours = load_translator(imported, device="cpu")
    theirs = MarianTranslator(out)
    for beam in BEAMS:
        settings = {
            "beam_size": beam,
            "length_penalty": {"kind": "none", "alpha": 0.0, "coverage": 0.0},
            "min_length": 0,
            "endings": "marian",
            "max_length": {"ratio": 3.0, "extra": 3, "limit": 1000},
        }
        found = [list(side.translate_stream(lines, **settings)) for side in (ours, theirs)]
        same = [(a, b) for a, b in zip(*found, strict=True) if a.text == b.text]
        finished = [pair for pair in same if all(one.hypotheses[0].finished for one in pair)]
        differences = [abs(a.hypotheses[0].log_probability - b.hypotheses[0].log_probability) for a, b in finished]
        other = [(a, b) for a, b in zip(*found, strict=True) if a.text != b.text]
        row[f"beam {beam}"] = {
            "lines": len(lines),
            "other": len(other),
            "of these cut at the limit": sum(not b.hypotheses[0].finished for _, b in other),
            "of these with an unknown token of ours": sum("\u2047" in a.text for a, _ in other),
            "largest difference of a score": max(differences, default=None),
            "example": [other[0][0].source, other[0][0].text, other[0][1].text] if other else None,
        }
        if beam == 4:
            before = [translation.text for translation in found[1]]
    row |= quantised(out, lines, references, before)
    return row


def quantised(out: Path, lines: list[str], references: list[str], before: list[str]) -> dict[str, Any]:
    """Return BLEU of Marian's translations, beam 4, before and after `pymarian convert --gemm-type intgemm8`."""
    packed = out.with_name(f"{out.name}-int8")
    packed.mkdir(exist_ok=True)
    run_marian("convert", "-f", out / "model.npz", "-t", packed / "model.bin", "--gemm-type", "intgemm8")
    search = yaml.safe_load((out / "decoder.yml").read_text()) | {"models": ["model.bin"]}
    (packed / "decoder.yml").write_text(yaml.safe_dump(search))
    for vocabulary in out.glob("*.spm"):
        (packed / vocabulary.name).write_bytes(vocabulary.read_bytes())
    settings = {"beam_size": 4, "length_penalty": {"alpha": 0.0}, "max_length": {"ratio": 3.0}}
    after = [translation.text for translation in MarianTranslator(packed).translate_stream(lines, **settings)]
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
            "marian": run_marian("--version").strip(),
            "commit": commit(),
            "processor": processor(),
            "updates": UPDATES,
            "models": rows,
        }
        path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
