"""Marian as a peer in the speed benchmarks: training and decoding with `pymarian`, where it is installed.

`make marian` installs it, or `$ZIGGURAT_MARIAN` names the folder of its environment. Training is pre-norm like ours,
with one mini-batch of the given number of words per update, which `--sync-sgd` divides between two workers of one
thread. Decoding uses a post-norm model of the same size after one update, since Marian's own search computes a
different self-attention for pre-norm. End of sentence is ruled out, so `--max-length-factor` sets the lengths, relative
to the longest sentence of a batch: outputs have the requested number of tokens on average, and are counted.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml
from sentencepiece import SentencePieceProcessor

from ziggurat.data.subword import SentencePieceTokenizer, Tokenizer
from ziggurat.exchange.exporter import export_model
from ziggurat.exchange.marian import MODEL_FILE, SEARCH_FILE
from ziggurat.exchange.marian_program import WITHOUT_MARIAN, marian_program, run_marian

PRECISIONS = ("float32", "int8")
"""PRECISIONS are those in which Marian decodes: fp32, and the int8 of `pymarian convert --gemm-type intgemm8`."""
_NEVER = -1e9
_TRAINING = (
    *("--type", "transformer", "--transformer-ffn-activation", "relu", "--tied-embeddings-all"),
    *("--transformer-dropout", "0.1", "--transformer-dropout-attention", "0.1", "--label-smoothing", "0.1"),
    *("--learn-rate", "1e-5", "--optimizer-params", "0.9", "0.98", "1e-9", "--clip-norm", "1", "--max-length", "200"),
    *("--save-freq", "1000000", "--disp-freq", "1", "--overwrite", "--seed", "1"),
)
_PRE_NORM = (
    *("--transformer-preprocess", "n", "--transformer-postprocess", "da", "--transformer-postprocess-top", "n"),
)
_UPDATE = re.compile(r"Up\. ([\d,]+) : .* after ([\d,]+) : ")


def missing() -> str:
    """Return why Marian is left out, or nothing if it is available."""
    return "" if marian_program() else WITHOUT_MARIAN


def version() -> str:
    """Return Marian's version."""
    return run_marian("--version").strip()


def architecture(sizes: Sequence[int]) -> list[str]:
    """Return the options of d_model, d_ff, heads, encoder layers, decoder layers."""
    names = ("--dim-emb", "--transformer-dim-ffn", "--transformer-heads", "--enc-depth", "--dec-depth")
    return [word for name, size in zip(names, sizes, strict=True) for word in (name, str(size))]


def progress(line: str) -> tuple[int, int] | None:
    """Return the updates and target tokens so far from a line of the training log; None if it has none."""
    found = _UPDATE.search(line)
    return (int(found[1].replace(",", "")), int(found[2].replace(",", ""))) if found else None


def train(
    sizes: Sequence[int], vocabulary: Path, texts: Sequence[Path], tokens: int, warm_up: float, seconds: float
) -> dict[str, float]:
    """Train for `seconds` after the warm-up, with two workers; return the figures.

    Args:
        sizes: as for `architecture`.
        vocabulary: a SentencePiece model for both sides.
        texts: source and target.
        tokens: tokens of a batch.
        warm_up: seconds from the first update on that do not count.
        seconds: least number of seconds that count; at least three updates do.

    Raises SystemExit with the end of the log when Marian fails.
    """
    with tempfile.TemporaryDirectory(prefix="ziggurat-bench-") as folder:
        command = [str(marian_program()), "train", *_TRAINING, *_PRE_NORM, *architecture(sizes)]
        command += ["-m", f"{folder}/model.npz", "-T", folder, "-v", str(vocabulary), str(vocabulary), "-t"]
        command += [*map(str, texts), "--cpu-threads", "2", "--sync-sgd", "--mini-batch-words", str(tokens)]
        pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, env=_environment(), **pipes) as process:
            try:
                return _followed(process, warm_up, seconds)
            finally:
                process.kill()  # it handles other signals, and would save the model


def _followed(process: subprocess.Popen[str], warm_up: float, seconds: float) -> dict[str, float]:
    """Return the figures of a training process once it has run for long enough."""
    begun, began, log = 0.0, None, []
    assert process.stderr is not None
    for line in process.stderr:
        log.append(line)
        if (done := progress(line)) is None:
            continue
        now, computed = time.perf_counter(), _computed(psutil.Process(process.pid))
        begun = begun or now
        if began is None:
            if now - begun >= warm_up:
                began = (now, *done, computed)
        elif now - began[0] >= seconds and done[0] >= began[1] + 3:
            passed = now - began[0]
            others = (computed[1] - began[3][1] - computed[0] + began[3][0]) / passed
            return {
                "tokens_per_second": (done[1] - began[2]) / passed,
                "other_cores": round(max(0.0, others), 2),
                "peak_gib": _peak(process.pid),
            }
    raise SystemExit(f"`pymarian train` ended:\n{''.join(log[-8:])}")


def _computed(process: psutil.Process) -> tuple[float, float]:
    """Return the CPU seconds of a process, and those of the machine."""
    times = psutil.cpu_times()
    return sum(process.cpu_times()[:2]), float(sum(times[:7]) - times.idle - times.iowait)


def _peak(pid: int) -> float:
    """Return the peak memory of a running process in GiB, without that of the process that started it."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0]) / 2**20


def _environment() -> dict[str, str]:
    """Return the environment in which each worker of Marian has one thread."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def listed(folder: Path, types: int) -> Path:
    """Write a vocabulary of the words t2 ... and return its path."""
    path = folder / "vocabulary.yml"
    words = ("</s>", "<unk>", *(f"t{number}" for number in range(2, types)))
    path.write_text("".join(f"{word}: {number}\n" for number, word in enumerate(words)), encoding="utf-8")
    return path


def written(folder: Path, tokenizer: Tokenizer) -> Path:
    """Write the SentencePiece model of a joint vocabulary and return its path."""
    if not isinstance(tokenizer, SentencePieceTokenizer):
        raise SystemExit("Marian is measured with a SentencePiece model")
    path = folder / "vocabulary.spm"
    path.write_bytes(tokenizer.model)
    return path


def spelt(sentences: Iterable[Sequence[int]]) -> list[str]:
    """Return the tokens as lines of words from `listed`, without end of sentence."""
    return [" ".join(f"t{number}" for number in ids[:-1]) for ids in sentences]


def length_factor(widths: Sequence[int], batch: int, length: int) -> float:
    """Return the `--max-length-factor` that gives outputs `length` tokens on average.

    Args:
        widths: tokens of each sentence including end of sentence; Marian sorts by them.
        batch: sentences of a batch.
        length: of outputs, on average.
    """
    ordered = sorted(widths, reverse=True)
    longest = [ordered[first] for first in range(0, len(ordered), batch) for _ in ordered[first : first + batch]]
    return length * len(longest) / sum(longest)


def untrained(folder: Path, sizes: Sequence[int], vocabulary: Path, text: Sequence[str]) -> None:
    """Write `model.npz`, and `model.bin` in int8, into `folder`: a model after one update that never ends a sentence.

    Args:
        folder: where to.
        sizes: as for `architecture`.
        vocabulary: for both sides; in a SentencePiece vocabulary the end of sentence is found by its name.
        text: lines of both sides of its update.
    """
    lines, model = folder / "update", folder / "model.npz"
    lines.write_text("".join(f"{line}\n" for line in text), encoding="utf-8")
    command: list[str | Path] = ["train", *_TRAINING, "--transformer-postprocess", "dan", *architecture(sizes)]
    command += ["-m", model, "-v", vocabulary, vocabulary, "-t", lines, lines, "-T", folder, "--cpu-threads", "1"]
    run_marian(*command, "--mini-batch", "8", "--maxi-batch", "1", "-w", "512", "--after-batches", "1", "--quiet")
    with np.load(model) as stored:
        arrays = {name: stored[name] for name in stored.files}
    arrays["decoder_ff_logit_out_b"][0, _end(vocabulary)] = _NEVER
    np.savez(model, **arrays)
    run_marian("convert", "-f", model, "-t", folder / "model.bin", "--gemm-type", "intgemm8")


def _end(vocabulary: Path) -> int:
    """Return the id of end of sentence."""
    if vocabulary.suffix == ".yml":
        return 0
    return int(SentencePieceProcessor(model_file=str(vocabulary)).eos_id())


def decode_command(
    folder: Path, vocabulary: Path, lines: Path, *, beam: int, precision: str, threads: int, batch: int, factor: float
) -> list[str]:
    """Return the command that translates `lines` with a model of `untrained`, `batch` sentences at a time."""
    model = folder / ("model.bin" if precision == "int8" else "model.npz")
    command = [str(marian_program()), "decode", "-m", str(model), "-v", str(vocabulary), str(vocabulary), "-i"]
    command += [str(lines), "--beam-size", str(beam), "--cpu-threads", str(threads), "--mini-batch", str(batch)]
    command += ["--maxi-batch", "1000", "--maxi-batch-sort", "src", "--max-length-factor", f"{factor:.4f}"]
    return [*command, "--no-spm-decode", "--quiet-translation"]


def decode(command: Sequence[str]) -> tuple[int, float]:
    """Run `decode_command` and return the output tokens and the seconds of the search, without loading the model.

    Raises SystemExit with the end of the log when Marian fails.
    """
    done = subprocess.run(command, capture_output=True, text=True, env=_environment())
    found = re.search(r"Total time: ([\d.]+)s wall", done.stderr)
    if done.returncode or found is None:
        raise SystemExit(f"`pymarian decode` failed:\n{done.stderr[-2000:]}")
    return len(done.stdout.split()), float(found[1])


def searches(
    folder: Path,
    sizes: Sequence[int],
    given: Sequence[Sequence[int]],
    *,
    types: int,
    length: int,
    beam: int,
    batch: int,
) -> dict[str, Callable[[], tuple[int, float]]]:
    """Make a model in `folder`; return functions that measure it, by precision and workers, such as `marian int8 2x1`.

    Args:
        folder: where to.
        sizes: as for `architecture`.
        given: tokens of each sentence including end of sentence.
        types: of the vocabulary.
        length: output tokens, on average.
        beam: hypotheses.
        batch: sentences of a batch; 1: one worker alone.
    """
    vocabulary, lines = listed(folder, types), folder / "lines"
    lines.write_text("".join(f"{line}\n" for line in spelt(given)), encoding="utf-8")
    untrained(folder, sizes, vocabulary, spelt(given[:8]))
    factor = length_factor([len(ids) for ids in given], batch, length)
    systems: dict[str, Callable[[], tuple[int, float]]] = {}
    for precision in PRECISIONS:
        for threads in (1, 2) if batch > 1 else (1,):
            options: dict[str, Any] = {"precision": precision, "threads": threads, "factor": factor}
            command = decode_command(folder, vocabulary, lines, beam=beam, batch=batch, **options)
            systems[f"marian {precision} {threads}x1"] = partial(decode, command)
    return systems


def exported(folder: Path, model: Path, lines: Path, *, beam: int, batch: int) -> dict[str, list[str]]:
    """Export a Ziggurat model into `folder`; return the commands with which Marian translates the text `lines` with it.

    Their names are as in `searches`. The search is that of the exported `decoder.yml`, apart from the beam.
    """
    out = folder / "exported"
    export_model(model, "marian", out, verify=lines, lines=32)
    run_marian("convert", "-f", out / MODEL_FILE, "-t", out / "model.bin", "--gemm-type", "intgemm8")
    search = yaml.safe_load((out / SEARCH_FILE).read_text(encoding="utf-8"))
    search |= {"beam-size": beam, "mini-batch": batch, "maxi-batch": 1000, "maxi-batch-sort": "src"}
    commands = {}
    for precision, file in zip(PRECISIONS, (MODEL_FILE, "model.bin"), strict=True):
        described = out / f"{precision}.yml"
        described.write_text(yaml.safe_dump(search | {"models": [file]}), encoding="utf-8")
        for threads in (1, 2):
            command = [str(marian_program()), "decode", "-c", str(described), "-i", str(lines.resolve())]
            commands[f"marian {precision} {threads}x1"] = [
                *command,
                "--cpu-threads",
                str(threads),
                "--quiet-translation",
            ]
    return commands


def whole_processes(folder: Path, lines: Path, *, beam: int, batch: int, length: int) -> dict[str, list[str]]:
    """Return the commands that translate text with the model of `untrained` and the vocabulary of `written`.

    Two workers share several batches; a single batch gets one worker.
    """
    vocabulary = folder / "vocabulary.spm"
    encode = SentencePieceProcessor(model_file=str(vocabulary)).encode
    widths = [len(encode(line)) + 1 for line in lines.read_text(encoding="utf-8").splitlines()]
    options: dict[str, Any] = {"beam": beam, "batch": batch, "factor": length_factor(widths, batch, length)}
    options["threads"] = 2 if len(widths) > batch else 1
    return {f"marian {p}": decode_command(folder, vocabulary, lines, precision=p, **options) for p in PRECISIONS}
