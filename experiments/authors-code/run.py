"""Largest differences between Ziggurat and the authors' own code, with the same weights and input.

`python experiments/authors-code/run.py --checkouts FOLDER [--only NAME...]`; FOLDER has a checkout of each repository
that README.md names. Writes results/NAME.json.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import gpt  # noqa: E402
import llama  # noqa: E402
import rates  # noqa: E402
import solvers  # noqa: E402
import stacks  # noqa: E402
import streams  # noqa: E402
import translation  # noqa: E402
from checkouts import Checkouts  # noqa: E402
from comparing import BATCH, LENGTH, Case, compared  # noqa: E402
from controls import controls  # noqa: E402
from measuring import commit  # noqa: E402

CASES: dict[str, Callable[[Checkouts, torch.dtype], Iterator[Case]]] = {
    "siamese": stacks.siamese,
    "gpas": llama.gpas,
    "value_residual": llama.value_residual,
    "hybrid": stacks.hybrid,
    "transfer": gpt.transfer,
    "manifold": streams.manifold,
    "hyper": streams.hyper,
    "translation": translation.scale_norm,
    "solver": solvers.solver,
    "growing": solvers.growing,
}
FAMILIES = [*CASES, "controls"]
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkouts", required=True, type=Path)
    parser.add_argument("--only", nargs="*", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    asked = parser.parse_args()
    asked.out.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    checkouts = Checkouts(asked.checkouts)
    for name in asked.only:
        if name == "controls":
            found = {"machine": machine(), "seed": asked.seed, "controls": controls(checkouts, asked.seed)}
        else:
            found = measured(name, checkouts, asked.seed)
        (asked.out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
        print(*(row(case, record) for case, record in found.get("cases", {}).items()), sep="\n", flush=True)


def measured(family: str, checkouts: Checkouts, seed: int) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {}
    for precision, dtype in DTYPES.items():
        random.seed(seed)  # some of their constructors draw a stream
        for case in CASES[family](checkouts, dtype):
            record = found.setdefault(
                case.name,
                {
                    "what": case.what,
                    "theirs": {
                        "repository": case.repository,
                        "file": case.path,
                        "commit": checkouts.commit(case.repository, case.path),
                    },
                },
            )
            record[precision] = compared(case, dtype, seed)
    if family == "transfer":
        extra = {"rules": rates.rules(checkouts), "updates": rates.updates(checkouts, seed)}
    else:
        extra = {"others": translation.others(checkouts, seed)} if family == "translation" else {}
    return {"machine": machine(), "seed": seed, "input": [BATCH, LENGTH, stacks.D], "cases": found, **extra}


def row(name: str, case: dict[str, Any]) -> str:
    """Return a row of README.md's table."""
    double, single = case["fp64"], case["fp32"]
    keys = ("output_relative", "input_gradient_relative", "parameter_gradients_relative")
    figures = " | ".join(f"{double[key]:.1e}" for key in keys)
    return f"| `{name}` | {case['what']} | {figures} | {single['output_relative']:.1e} |"


def machine() -> dict[str, str]:
    return {
        "ziggurat": commit(),
        **{name: importlib.metadata.version(name) for name in ("torch", "transformers", "einops", "omegaconf")},
        "Python": platform.python_version(),
        "processor": processor(),
    }


def processor() -> str:
    """Return the processor's name; Python knows only its architecture on Linux."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    main()
