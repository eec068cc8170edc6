"""The same training in Marian and here: loss on the development set after equal updates, three seeds each.

    python experiments/marian/curves.py WORK           # WORK of run.py; results/curves.json

The settings are the equivalents in docs/coming-from/marian.md. Finally, a model that Marian trained with its own
vocabulary is imported and trained further at a rate of 0: its first loss on the development set must be Marian's last.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from compare import version
from measuring import commit, processor
from run import write_texts, ziggurat

from ziggurat.exchange.marian_program import WITHOUT_MARIAN, marian_program

HERE = Path(__file__).resolve().parent
SEEDS = (1, 2, 3)
UPDATES, EVERY = 400, 50
WIDTH, INNER, HEADS, LAYERS, SENTENCES, PEAK, WARMUP = 32, 64, 4, 2, 64, 3e-3, 100
SETTINGS: dict[str, Any] = {
    "model": {
        "d_model": WIDTH,
        "d_ff": INNER,
        "heads": HEADS,
        "encoder": {"layers": LAYERS},
        "decoder": {"layers": LAYERS},
        "residual": "post",
        "layer_norm_epsilon": 1e-6,
        "activation": "relu",
        "embedding": {"sharing": "all", "output_bias": True, "zero_start": True},
        "dropout": {"residual": 0.1, "embedding": 0.1, "attention": 0.0, "activation": 0.0},
        "init": {"qkv": "separate"},
    },
    "training": {
        "precision": "fp32",
        "threads": 1,
        "batch": {"max_tokens": 16384, "max_sentences": SENTENCES},
        "loss": {"label_smoothing": 0.1, "normalisation": "tokens"},
        "optimiser": {"betas": [0.9, 0.98], "epsilon": 1e-9},
        "schedule": {"kind": "isqrt", "peak": PEAK, "warmup_updates": WARMUP},
        "clip_norm": 1.0,
        "validation": {"every_updates": EVERY, "decode": False},
        "checkpoint": {"every_updates": UPDATES},
        "stop": {"updates": UPDATES},
        "diagnostics": {"every_updates": None},
        "tensorboard": False,
    },
}
OPTIONS = (
    *("--type", "transformer", "--dim-emb", WIDTH, "--transformer-dim-ffn", INNER, "--transformer-heads", HEADS),
    *("--enc-depth", LAYERS, "--dec-depth", LAYERS, "--transformer-postprocess", "dan"),
    *("--transformer-ffn-activation", "relu", "--tied-embeddings-all", "--transformer-dropout", 0.1),
    *("--mini-batch", SENTENCES, "--maxi-batch", 100, "--max-length", 250, "--label-smoothing", 0.1),
    *("--cost-type", "ce-mean-words", "--optimizer-params", 0.9, 0.98, 1e-9, "--learn-rate", PEAK),
    *("--lr-warmup", WARMUP, "--lr-decay-inv-sqrt", WARMUP, "--clip-norm", 1, "--after-batches", UPDATES),
    *("--valid-metrics", "ce-mean-words", "--valid-freq", f"{EVERY}u", "--early-stopping", 0),
    *("--save-freq", f"{UPDATES}u", "--cpu-threads", 1, "-w", 500, "--overwrite", "--quiet"),
)


def data(work: Path) -> dict[str, Any]:
    """Return the section `data`."""
    return {
        "source_language": "qlo",
        "target_language": "qhi",
        "store": str(work / "store"),
        "train": [{"source": str(work / "train.qlo"), "target": str(work / "train.qhi")}],
        "dev": [{"source": str(work / "dev.qlo"), "target": str(work / "dev.qhi")}],
        "subword": {"joint": True, "vocabulary_size": 512},
    }


def losses(run: Path) -> dict[int, float]:
    """Return the loss of each validation of a run, in nats per token, by update."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {row["update"]: row["nll"] for row in rows if row["kind"] == "validation"}


def ours(work: Path, seed: int) -> dict[int, float]:
    """Train here and return the losses."""
    run, path = work / f"curve-{seed}", work / f"curve-{seed}.yaml"
    settings = {"data": data(work), **SETTINGS, "training": {**SETTINGS["training"], "seed": seed}}
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    if not (work / "store").exists():
        ziggurat("prepare", path)
    if UPDATES not in (losses(run) if run.exists() else {}):
        shutil.rmtree(run, ignore_errors=True)
        ziggurat("train", path, "--run", run, "--device", "cpu", "-q")
    return losses(run)


def theirs(work: Path, marian: Path, seed: int, *, own: bool = False) -> dict[int, float]:
    """Train with Marian and return the losses; `own`: with a vocabulary made by Marian instead of the store's."""
    folder = work / ("curve-marian-own" if own else f"curve-marian-{seed}")
    log = folder / "valid.log"
    if not (folder / "model.npz.progress.yml").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        if not own:
            shutil.copy(work / "store" / "joint.spm", folder / "joint.spm")
        sides = [work / f"{part}.{side}" for part in ("train", "dev") for side in ("qlo", "qhi")]
        files = [
            "-t",
            *sides[:2],
            "--valid-sets",
            *sides[2:],
            "-v",
            *[folder / "joint.spm"] * 2,
            "--dim-vocabs",
            512,
            512,
        ]
        command = [marian, "train", "-m", folder / "model.npz", *files, *OPTIONS, "--seed", seed, "--valid-log", log]
        subprocess.run(list(map(str, command)), check=True)
    found = re.findall(r"Up\. (\d+) : ce-mean-words : ([0-9.]+)", log.read_text(encoding="utf-8"))
    return {int(update): float(loss) for update, loss in found}


def continued(work: Path, marian: Path) -> dict[str, float]:
    """Return Marian's last loss with its own vocabulary, and the first when training continues from there."""
    wanted = theirs(work, marian, 1, own=True)[UPDATES]
    imported, run, store = (work / f"curve-{name}" for name in ("imported", "continued", "store"))
    if not run.exists():
        shutil.rmtree(imported, ignore_errors=True)
        shutil.rmtree(store, ignore_errors=True)
        ziggurat("import", work / "curve-marian-own", "--out", imported)
        texts = data(work)
        settings = [imported / "config.yaml", f"data.store={store}"]
        settings += [f"data.{part}={json.dumps(texts[part])}" for part in ("train", "dev")]
        ziggurat("prepare", *settings)
        settings += ["training.schedule.kind=constant", "training.schedule.peak=1e-12", "training.stop.updates=1"]
        settings += ["training.validation.every_updates=1", "training.validation.decode=false"]
        ziggurat("train", *settings, f"training.start_from={imported}", "--run", run, "--device", "cpu", "-q")
    return {"marian, last": wanted, "ziggurat, first": losses(run)[1]}


def main() -> None:
    """Train what is missing and write results/curves.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    work = parser.parse_args().work
    marian = marian_program()
    if marian is None:
        raise SystemExit(WITHOUT_MARIAN)
    write_texts(work)
    curves: dict[str, list[dict[int, float]]] = {"ziggurat": [], "marian": []}
    for seed in SEEDS:
        curves["ziggurat"].append(ours(work, seed))
        curves["marian"].append(theirs(work, marian, seed))
    table = {}
    for update in range(EVERY, UPDATES + 1, EVERY):
        sides = {name: [curve[update] for curve in runs] for name, runs in curves.items()}
        table[update] = {name: [statistics.mean(each), statistics.stdev(each)] for name, each in sides.items()}
        print(update, *(f"{name} {mean:.4f} +- {spread:.4f}" for name, (mean, spread) in table[update].items()))
    record = {
        "command": "python experiments/marian/curves.py WORK",
        "marian": version(marian),
        "commit": commit(),
        "processor": processor(),
        "losses": curves,
        "mean and standard deviation": table,
        "continued": continued(work, marian),
    }
    print(record["continued"])
    (HERE / "results" / "curves.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
