"""Translation on a GPU for benchmarks.gpu_speed: ours by precision, and CTranslate2 with the same weights."""

from __future__ import annotations

import importlib.util
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_counts import HEAD, counts_of, is_real, said, shared_out
from benchmarks.gpu_models import config_of
from ziggurat.config.model import ModelConfig
from ziggurat.exchange.anatomy import dissect
from ziggurat.exchange.ctranslate2 import write_ctranslate2
from ziggurat.model.accelerator import synchronize
from ziggurat.model.build import build_model
from ziggurat.model.fast.compiled import Precision
from ziggurat.model.fast.packed import make_fast
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.model.tensors import weights
from ziggurat.system.errors import printable
from ziggurat.translate.scorers import ModelScorer
from ziggurat.translate.search import search
from ziggurat.translate.settings import SearchSettings, Sentence

DECODED, LENGTH, BEAM, BATCH = ("base 6-6", "60-12", "MAtt 12-12"), 20, 4, 64
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")
PEER_TYPES = {"cuda": ("float16", "bfloat16", "int8_float16"), "cpu": ("float32", "int8_float32")}
"""PEER_TYPES maps a device to CTranslate2's computation types; float16 is its fastest type with 16 bits."""


class _Numbers:
    """A vocabulary whose pieces are numbers, for CTranslate2."""

    def __init__(self, size: int) -> None:
        self.size, self.unk, self.bos, self.eos = size, 0, 1, 2

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [str(number) for number in ids]


_Translate = Callable[[list[Sentence]], object]


def translation(width: int, heads: int, vocabulary: int, device: torch.device) -> list[dict[str, Any]]:
    """Return output tokens/s for many sentences and milliseconds for one, by model and system, or the counts of a
    step.
    """
    draw, rows = random.Random(1), []
    given = [
        Sentence([*(draw.randrange(4, vocabulary) for _ in range(LENGTH - 1)), 2], LENGTH - 1, LENGTH - 1)
        for _ in range(256 if device.type == "cuda" else 8)
    ]
    if not is_real(device):
        print(f"{f'a decoding step; {LENGTH} steps of {len(given)} sentences':<46} {HEAD}   {HEAD}", flush=True)
    for name in DECODED:
        config = config_of(name, width, heads)
        model = build_model(config, vocabulary, vocabulary).eval()
        makers: dict[str, Callable[[], _Translate]] = {
            precision: partial(_ours, config, model, precision, device) for precision in PRECISIONS
        }
        if name != "MAtt 12-12":  # CTranslate2 does not support it
            makers |= {
                f"CTranslate2 {kind}": partial(_ctranslate2, config, model, kind, device)
                for kind in PEER_TYPES.get(device.type, ())
            }
        for candidate, make in makers.items():
            row: dict[str, Any] = {"model": name, "candidate": f"translate {candidate}"}
            try:
                translate = make()
                found = _timed(translate, given, device) if is_real(device) else _counted(translate, given, device)
            except Exception as error:  # a failure of one must not hide the others
                row["skipped"] = text = f"failed: {type(error).__name__}: {printable(str(error), 300)}"
            else:
                row |= found
                text = _line(row)
            print(f"{name:<11} {row['candidate']:<34} {text}", flush=True)
            rows.append(row)
    return rows


def _timed(translate: _Translate, given: list[Sentence], device: torch.device) -> dict[str, Any]:
    seconds = []
    for sentences in (given[:BATCH], given, given[:1], given[:1]):  # the first of each kind is not counted
        began = time.perf_counter()
        translate(sentences)
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return {"tokens_per_second": len(given) * LENGTH / seconds[1], "one_sentence_ms": 1000 * seconds[3]}


def _counted(translate: _Translate, given: list[Sentence], device: torch.device) -> dict[str, Any]:
    """Return the counts of a search, and of one of its steps from the difference to a search with half as many."""
    half = [replace(each, max_length=LENGTH // 2 - 1, min_length=LENGTH // 2 - 1) for each in given]
    translate(given)  # one-time work is not counted
    whole, shorter = (shared_out(counts_of(device, partial(translate, each)), 1) for each in (given, half))
    assert whole is not None
    assert shorter is not None
    step = {name: (number - shorter[name]) / (LENGTH - LENGTH // 2) for name, number in whole.items()}
    return {"tokens_per_second": None, "one_sentence_ms": None, "a_step": step, "a_search": whole}


def _line(row: dict[str, Any]) -> str:
    if row["tokens_per_second"] is None:
        return f"{said(row['a_step'])}   {said(row['a_search'])}"
    return f"{row['tokens_per_second']:>9,.0f} output tok/s, one sentence {row['one_sentence_ms']:,.0f} ms"


def _ours(config: ModelConfig, model: Seq2Seq, precision: Precision, device: torch.device) -> _Translate:
    """Return our search over a copy of `model` that is prepared for translation."""
    copy = build_model(config, model.vocabulary_size, model.vocabulary_size).eval()
    copy.load_state_dict(model.state_dict())
    copy.to(device)
    make_fast(copy, precision)
    settings = SearchSettings(BEAM, 1, 2, 3, forbidden=(0, 1, 3), batch_sentences=BATCH, device=device)
    scorer = ModelScorer(copy)
    return lambda sentences: search(scorer, sentences, settings)


def _ctranslate2(config: ModelConfig, model: Seq2Seq, kind: str, device: torch.device) -> _Translate:
    """Return CTranslate2 with the weights of `model`. Raises ModuleNotFoundError if it is not installed."""
    if importlib.util.find_spec("ctranslate2") is None:
        raise ModuleNotFoundError("ctranslate2 is not installed")
    import ctranslate2

    numbers: Any = _Numbers(model.vocabulary_size)
    with tempfile.TemporaryDirectory() as folder:
        write_ctranslate2(Path(folder), dissect(config, weights(model), 1024), (numbers, numbers), 1024)
        translator = ctranslate2.Translator(folder, device=device.type, compute_type=kind)

    def translate(sentences: list[Sentence]) -> object:
        return translator.translate_batch(
            [numbers.pieces(sentence.source[:-1]) for sentence in sentences],  # it appends end-of-sentence itself
            beam_size=BEAM,
            max_batch_size=BATCH,
            min_decoding_length=LENGTH,
            max_decoding_length=LENGTH,
        )

    return translate
