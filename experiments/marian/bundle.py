"""Our models in Firefox's format: the engine's translations and ours, and why lines differ (README.md).

    npm install --prefix ENGINE @browsermt/bergamot-translator@0.4.9
    python experiments/marian/bundle.py RUN --engine ENGINE --text TEXT --reference REFERENCE --out RESULT.json

Bergamot's engine translates every line with the folder in float32 and in int8; our model translates it with its own
weights, with weights rounded to int8, and with these and the engine's arithmetic (tests/exchange/browser.py).
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.exchange.browser import browser_translator
from ziggurat.evaluate.scores import evaluate
from ziggurat.exchange.exporter import export_model
from ziggurat.exchange.importer import import_checkpoint
from ziggurat.translate.translator import Translator, load_translator

NAMES = ("engine float32", "ours", "ours, rounded weights", "ours, the engine's arithmetic", "engine int8")


def engine_lines(engine: Path, folder: Path, lines: Sequence[str]) -> list[str]:
    """Return the translations of Bergamot's engine."""
    given = "".join(f"{line}\n" for line in lines)
    command = ["node", str(Path(__file__).with_name("bergamot.cjs")), str(engine), str(folder)]
    done = subprocess.run(command, input=given, capture_output=True, encoding="utf-8", check=True)
    return done.stdout.removesuffix("\n").split("\n")


def own_lines(translator: Translator, lines: Sequence[str]) -> list[str]:
    """Return our translations with the search of an import, which is that of Firefox."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [translation.text for translation in translator.translate_stream(lines)]


def measured(given: Any) -> dict[str, Any]:
    """Return how many lines adjacent systems in NAMES have in common, and the BLEU of each."""
    lines, references = (
        path.read_text(encoding="utf-8").splitlines()[: given.lines] for path in (given.text, given.reference)
    )
    found: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as work:
        for kind in ("float32", "int8"):
            folder = Path(work) / kind
            options: dict[str, Any] = {"shortlist": given.shortlist, "verify": given.text, "lines": given.lines}
            export_model(given.run, "firefox", folder, quantization=kind, **options)
            found[f"engine {kind}"] = engine_lines(given.engine, folder, lines)
            report = import_checkpoint(folder, Path(work) / f"imported-{kind}")
            translator = load_translator(report["out"], precision="float32", shortlist=report["shortlist"])
            if kind == "float32":
                found["ours"] = own_lines(translator, lines)
                continue
            found["ours, rounded weights"] = own_lines(translator, lines)
            computed = browser_translator(folder, Path(report["out"]))
            found["ours, the engine's arithmetic"] = own_lines(computed, lines)
    same = {
        f"{a} / {b}": sum(x == y for x, y in zip(found[a], found[b], strict=True)) for a, b in itertools.pairwise(NAMES)
    }
    bleu = {name: evaluate(found[name], [references], metrics=["bleu"])[0].value for name in NAMES}
    return {"lines": len(lines), "same": same, "bleu": bleu}


def main() -> None:
    """Measure the run named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--engine", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--lines", type=int, default=200)
    parser.add_argument("--shortlist")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    result = measured(given)
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
