"""The program that runs in COMET's environment: it reads a request, scores the sentences and writes the answer.

`python -I comet_program.py REQUEST ANSWER`, both JSON files. It imports nothing from ziggurat, and runs on Python 3.8.

Request: {"protocol": 1, "model": name or checkpoint file, "batch_size": n, "device": "auto" | "cpu" | "cuda:1",
"samples": [{"src": text, "mt": text, "ref": text}, ...]}. Answer: {"protocol": 1, "scores": [number per sample],
"version": of unbabel-comet}, or {"protocol": 1, "error": text}.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time


def main(request_path: str, answer_path: str) -> None:
    """Read the request and write the answer, which appears in one piece.

    The program ends with the process that started it, since no one then waits for the answer.
    """
    threading.Thread(target=_leave_with, args=(os.getppid(),), daemon=True).start()
    with open(request_path, encoding="utf-8") as file:
        request = json.load(file)
    try:
        answer = _score(request)
    except ImportError as error:
        answer = {"error": f"{error}; install it there: pip install unbabel-comet"}
    except Exception as error:  # the process that waits for the answer reports any error
        answer = {"error": f"{type(error).__name__}: {error}"}
    with open(f"{answer_path}.part", "w", encoding="utf-8") as file:
        json.dump({"protocol": 1, **answer}, file)
    os.replace(f"{answer_path}.part", answer_path)


def _leave_with(asker: int) -> None:
    while os.getppid() == asker:
        time.sleep(1.0)
    os._exit(1)


def _score(request: dict[str, object]) -> dict[str, object]:
    """Return scores and version, by the interface of unbabel-comet 2."""
    if request["protocol"] != 1:
        raise ValueError(f"a request of protocol {request['protocol']}, expected 1")
    from importlib.metadata import version

    from comet import download_model, load_from_checkpoint  # before torch, so that a missing package is noticed at once
    from torch import cuda

    name = str(request["model"])
    model = load_from_checkpoint(name if os.path.isfile(name) else download_model(name))
    device, _, index = str(request["device"]).partition(":")
    gpus = 1 if device == "cuda" or (device == "auto" and cuda.is_available()) else 0
    devices = [int(index)] if index else None
    found = model.predict(request["samples"], batch_size=request["batch_size"], gpus=gpus, devices=devices)
    return {"scores": [float(score) for score in found.scores], "version": version("unbabel-comet")}


if __name__ == "__main__":
    main(*sys.argv[1:])
