"""Scores the newest checkpoint a run had at given times: `score.py RUN START SOURCE REFERENCE [--marks 66,201,...]`.

START is a file with the Unix time at which the training command started, so that imports and saving count.
Prints one Markdown row per checkpoint: wall seconds, updates, sacreBLEU (beam 4).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ziggurat.evaluate.scores import evaluate
from ziggurat.model.run_folder import checkpoint_folders
from ziggurat.translate.translator import load_translator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("start", type=Path)
    parser.add_argument("source", type=Path)
    parser.add_argument("reference", type=Path)
    parser.add_argument("--marks", default="66,201,337,473,603,900,1200,1500,1800")
    options = parser.parse_args()
    started = float(options.start.read_text())
    saved = [
        (folder.joinpath("meta.json").stat().st_mtime - started, folder) for folder in checkpoint_folders(options.run)
    ]
    before = [[s for s in saved if s[0] <= float(mark)] for mark in options.marks.split(",")]
    chosen = {max(found) for found in before if found}
    sources, references = (p.read_text(encoding="utf-8").splitlines() for p in (options.source, options.reference))
    print("| wall s | updates | sacreBLEU |\n|---|---|---|")
    for seconds, folder in sorted(chosen):
        update = str(int(folder.name.removeprefix("step-")))
        outputs = [t.text for t in load_translator(options.run, which=update, device="cpu").translate(sources)]
        (score,) = evaluate(outputs, [references], metrics=("bleu",))
        print(f"| {seconds:.0f} | {update} | {score.value:.2f} |", flush=True)
    print(f"\n{score.signature}")


if __name__ == "__main__":
    main()
