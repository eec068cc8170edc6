"""Quality and speed of every model with every engine that can run it here, in interleaved rounds."""

from __future__ import annotations

import gc
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ziggurat
from ziggurat.config import load_experiment
from ziggurat.evaluate.scores import evaluate
from ziggurat.model.build import assemble, count_parameters
from ziggurat.model.directory import open_model
from ziggurat.model.fast.packed import available
from ziggurat.translate.ctranslate2 import CTranslate2Translator
from ziggurat.translate.results import TranslationWarning

BEAMS = (1, 4)
_WARM_UP = 64
"""_WARM_UP is the number of lines that are translated before the clock starts."""


def engines(run: Path, served: Path, shortlist: Path) -> dict[str, Callable[[], Any]]:
    """Return functions that open a model, by engine; our own int8 only where the processor supports it."""
    threads = len(os.sched_getaffinity(0))
    own = partial(ziggurat.load, run, which="last", device="cpu")
    found: dict[str, Callable[[], Any]] = {"own fp32": partial(own, precision="float32")}
    if available("int8"):
        found["own int8"] = partial(own, precision="int8")
        if shortlist.exists():
            found["own int8, shortlist"] = partial(own, precision="int8", shortlist=str(shortlist))
    if served.exists():
        theirs = partial(CTranslate2Translator, served, threads=threads)
        found["CTranslate2 int8"] = partial(theirs, shortlist=None)
        found["CTranslate2 int8, shortlist"] = theirs
    return found


def measure(
    models: Mapping[str, tuple[Path, Path]],
    shortlists: Mapping[str, Path],
    test: Sequence[list[str]],
    rounds: int,
) -> list[dict[str, Any]]:
    """Return for each model, engine and beam the scores, and the seconds of each round on all cores.

    Args:
        models: run and export (which may be missing) by name.
        shortlists: file by name.
        test: source and reference.
        rounds: each translates the test set once with everything, so that a disturbance hits all equally.
    """
    figures: dict[tuple[str, str, int], dict[str, Any]] = {}
    for _ in range(rounds):
        for name, (run, served) in models.items():
            for engine, opens in engines(run, served, shortlists[name]).items():
                translator = opens()
                for beam, found in _timed(translator, test[0]):
                    key = (name, engine, beam)
                    if key not in figures:
                        figures[key] = {"model": name, "engine": engine, "beam": beam, **_size(run)}
                        figures[key] |= _scores(found["texts"], test[1])
                        figures[key] |= {"tokens": found["tokens"], "lines": len(test[0]), "seconds": [], "cpu": []}
                    figures[key]["seconds"].append(found["seconds"])
                    figures[key]["cpu"].append(found["cpu"])
                    print(f"{name}, {engine}, beam {beam}: {found['seconds']:.1f} s", flush=True)
                del translator
                gc.collect()
    for figure in figures.values():
        figure["tokens_per_second"] = figure["tokens"] / statistics.median(figure["seconds"])
        figure["tokens_per_cpu_second"] = figure["tokens"] / statistics.median(figure["cpu"])
    return list(figures.values())


def _timed(translator: Any, source: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield for each beam the translations, their tokens including end-of-sentence, and the seconds that they took."""
    for beam in BEAMS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TranslationWarning)
            translator.translate(source[:_WARM_UP], beam_size=beam)
            began, cpu = time.perf_counter(), time.process_time()
            found = translator.translate(source, beam_size=beam)
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        best = [translation.hypotheses[0] for translation in found]
        tokens = sum(len(each.tokens) + each.finished for each in best)
        yield beam, {"texts": [each.text for each in best], "tokens": tokens, "seconds": seconds, "cpu": cpu}


def _scores(found: list[str], reference: list[str]) -> dict[str, Any]:
    bleu, chrf = evaluate(found, [reference], metrics=("bleu", "chrf"))
    return {"bleu": bleu.value, "chrf": chrf.value, "signature": [bleu.signature, chrf.signature]}


def _size(run: Path) -> dict[str, int]:
    model, opened = load_experiment(run / "config.yaml").model, open_model(run, which="last")
    return {"parameters": count_parameters(assemble(model, *(tokenizer.size for tokenizer in opened.tokenizers)))}
