"""Hashes of four small runs and the manifests of the embedded pipeline, which show that a change alters no number.

    python -m tools.traces --out before.json          # before the change
    python -m tools.traces --against before.json      # after it; names every value that differs, exit status 1

The runs use only the command line: the demo, a 6-6 ADMIN model that grows, RNMT+, and a run in two processes, 20
updates each on the embedded language pair. Traces record every loss and gradient norm in the log, the dev scores, the
hash of every weight, and the translations and scores of 40 test sentences; and for each step of `ziggurat pipeline
demo` its manifest, which has checksums of all its outputs, and the names of its files. Bits depend on CPU, PyTorch and
the number of threads (two here), so make both records on one machine, and do not commit the file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import safetensors.numpy

PATH = [str(Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
"""PATH is where Python finds the package, because commands run in other folders."""
CLOCK = {"time", "seconds", "target_tokens_per_second", "source_tokens_per_second", "data_wait_share"}
CLOCK |= {"checkpoint_wait"}  # differs from run to run
SHORT = ("training.log_every_updates=1", "training.validation.every_updates=10", "training.checkpoint.every_updates=10")
LENGTH = ("training.stop.updates=20", "training.schedule.warmup_updates=10")
MANIFESTS = "embedded pipeline's manifests"
FEW = ("cleaning.max_characters=36", *(f"monolingual.{side}.0.lines=300" for side in ("source", "target")))
BRIEF = (
    *(f"{model}.training.stop.updates=200" for model in ("backward", "teacher", "student")),
    *("teacher.training.growth={stages: [{layers: 3, updates: 100}]}", "quantisation.updates=20"),
)
"""FEW and BRIEF shorten the embedded pipeline: a third of the text, a third of the updates."""
SMALL = ("model.d_model=32", "model.d_ff=64", "model.heads=4")
RUNS: dict[str, tuple[str, ...]] = {
    "admin": (
        *("model.residual=admin", "model.init.kind=admin", "model.encoder.layers=6", "model.decoder.layers=6"),
        "training.growth.stages=[{layers: 3, updates: 8}]",
    ),
    "rnmt": (
        *("model.family=rnmt", "model.encoder.layers=2", "model.decoder.layers=2", "model.memory=transparent"),
        *("model.embedding.positions=none", "model.embedding.sharing=none"),
    ),
    "processes": ("model.encoder.history=dlcl", "model.decoder.attention=merged", "training.batch.accumulate=2"),
}


def ziggurat(*words: str, processes: int = 1, text: str = "", folder: Path | None = None) -> str:
    """Run a verb, in a folder if one is given, and return what it writes to stdout."""
    start = [sys.executable, "-m"]
    if processes > 1:
        start += ["torch.distributed.run", "--nproc_per_node", str(processes), "-m"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1" if processes > 1 else "2", "PYTHONPATH": os.pathsep.join(PATH)}
    command = [*start, "ziggurat", *words]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, env=environment, cwd=folder)
    if done.returncode:
        raise SystemExit(f"ziggurat {' '.join(words)}: exit status {done.returncode}\n{done.stderr[-4000:]}")
    return done.stdout


def hashes(model: Path) -> dict[str, str]:
    """Return the hash of every tensor below a folder: file and name -> SHA-256, 16 digits."""
    found = {}
    for file in sorted(model.rglob("*.safetensors")):
        for name, tensor in sorted(safetensors.numpy.load_file(file).items()):
            found[f"{file.relative_to(model)}:{name}"] = hashlib.sha256(tensor.tobytes()).hexdigest()[:16]
    return found


def trace(run: Path, source: list[str], reference: list[str]) -> dict[str, Any]:
    """Return everything that a finished run must reproduce."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [{key: value for key, value in json.loads(line).items() if key not in CLOCK} for line in lines]
    last = (run / "last").resolve()
    text = "".join(f"{line}\n" for line in source)
    translations = ziggurat("translate", str(run), "--json", text=text).splitlines()
    files = [run.parent / "source.txt", run.parent / "target.txt"]
    for file, content in zip(files, (source, reference), strict=True):
        file.write_text("".join(f"{line}\n" for line in content), encoding="utf-8")
    scores = ziggurat("score", str(run), "--source", str(files[0]), "--target", str(files[1]))
    return {
        "records": records,
        "weights": hashes(last),
        "averaged": hashes(run / "averaged"),
        "translations": [json.loads(line) for line in translations],
        "scores": scores.splitlines(),
    }


def manifests(folder: Path) -> dict[str, Any]:
    """Run the embedded pipeline in a folder; return the manifest of each step, and the names of its files."""
    ziggurat("pipeline", "demo", *FEW, *BRIEF, folder=folder)
    steps = sorted(path.parent for path in folder.glob("demo-pipeline/*/begun.json"))
    return {
        step.name: {
            "manifest": json.loads((step / "manifest.json").read_bytes()),
            "files": sorted(str(path.relative_to(step)) for path in step.rglob("*") if path.is_file()),
        }
        for step in steps
    }


def record(folder: Path) -> dict[str, Any]:
    """Train the four runs, run the pipeline in a folder, and return their traces."""
    demo = folder / "demo"
    ziggurat("demo", "--folder", str(demo), *SHORT, *LENGTH)
    source, reference = ((demo / "corpus" / f"test.{side}").read_text().splitlines()[:40] for side in ("qlo", "qhi"))
    found = {"demo": {**trace(demo / "run", source, reference), "output": (demo / "test.output").read_text()}}
    for name, overrides in RUNS.items():
        run = folder / name
        options = [*SMALL, *SHORT, *LENGTH, *overrides]
        ziggurat("train", str(demo / "demo.yaml"), "-r", str(run), *options, processes=2 if name == "processes" else 1)
        found[name] = trace(run, source, reference)
    return {**found, MANIFESTS: manifests(folder)}


def differences(expected: Any, found: Any, path: str = "") -> list[str]:
    """Name the paths at which two documents differ."""
    if isinstance(expected, dict) and isinstance(found, dict):
        keys = sorted(expected.keys() | found.keys())
        parts = [differences(expected.get(key), found.get(key), f"{path}/{key}") for key in keys]
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        parts = [
            differences(*pair, f"{path}/{number}") for number, pair in enumerate(zip(expected, found, strict=True))
        ]
    else:
        return [] if expected == found else [f"{path}: {expected!r:.80} is now {found!r:.80}"]
    return [line for part in parts for line in part]


def main() -> None:
    """Record traces, or compare them with a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the record goes")
    parser.add_argument("--against", type=Path, help="a record made before")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ziggurat-traces-"))
    try:
        found = record(folder)
    finally:
        shutil.rmtree(folder)
    if options.out:
        options.out.write_text(json.dumps(found, ensure_ascii=False, indent=1), encoding="utf-8")
    for name, part in found.items():
        summary = hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()[:16]
        if name == MANIFESTS:
            print(f"{name}: {len(part)} steps, {summary}")
            continue
        loss = next(r["loss"] for r in reversed(part["records"]) if "loss" in r)
        print(f"{name:10} {len(part['records'])} records, {len(part['weights'])} tensors, loss {loss!r}, {summary}")
    if options.against:
        unlike = differences(json.loads(options.against.read_text(encoding="utf-8")), found)
        print("\n".join(unlike[:50]) if unlike else "everything is the same")
        sys.exit(bool(unlike))


if __name__ == "__main__":
    main()
