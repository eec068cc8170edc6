"""The verb that makes a synthetic corpus: backtranslate."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ziggurat.cli.engine import warnings_shown
from ziggurat.cli.options import Ensemble, Json, Which, decoding_settings, is_setting
from ziggurat.cli.output import OUT, counted, print_json, say
from ziggurat.config.data import CorpusConfig
from ziggurat.config.load import change_section
from ziggurat.duration import duration
from ziggurat.errors import ConfigError, printable

if TYPE_CHECKING:
    from ziggurat.backtranslation.run import BackTranslationOutcome

__all__ = ["backtranslate"]

_MESSAGE_SECONDS = 10.0  # between two messages on the progress


def backtranslate(
    model: Annotated[str, typer.Argument(help="Reverse model (a run or model directory); with --forward the teacher.")],
    given: Annotated[
        list[str] | None, typer.Argument(help="Decoding settings such as beam_size=8, and further input files.")
    ] = None,
    input: Annotated[
        list[str] | None, typer.Option("--input", "-i", help="Monolingual text, also .gz, .xz, .zst; file or glob.")
    ] = None,
    out: Annotated[Path | None, typer.Option(*OUT, help="Folder of the corpus.")] = None,
    method: Annotated[
        str | None, typer.Option("--method", help="sample (default), top-k, beam (default of --forward), noised-beam.")
    ] = None,
    forward: Annotated[
        bool, typer.Option("--forward", help="Distillation: the text is the source, its translation the target.")
    ] = False,
    tag: Annotated[
        str | None, typer.Option("--tag", help="Tag of the corpus; default: `<bt>`, with --forward none; '' for none.")
    ] = None,
    weight: Annotated[float, typer.Option("--weight", help="Weight of the corpus.")] = 1.0,
    max_length: Annotated[int, typer.Option("--max-length", min=1, help="Most subword pieces of either side.")] = 250,
    max_ratio: Annotated[
        float, typer.Option("--max-ratio", min=1, help="Largest ratio of the two sides' pieces.")
    ] = 1.5,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of sampling and noise.")] = 1,
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=1, max=1024, help="Parallel processes; default: one per CPU core, 1 on a GPU."),
    ] = None,
    threads: Annotated[int, typer.Option("--threads", min=1, max=1024, help="CPU threads of each worker.")] = 1,
    shard: Annotated[
        str | None, typer.Option("--shard", help="i/n: do only the i-th of n equal parts, and do not merge.")
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Only merge what all parts have translated.")] = False,
    shard_lines: Annotated[int, typer.Option("--shard-lines", min=1, help="Lines per shard.")] = 2000,
    ensemble: Ensemble = None,
    which: Which = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    engine: Annotated[
        str,
        typer.Option("--engine", help="auto (by the folder), torch, or ctranslate2 (an exported model; beam search)."),
    ] = "auto",
    json: Json = False,
) -> None:
    """Translate monolingual text into a synthetic corpus for `prepare`; the same command resumes one that was stopped.

    Example: `ziggurat backtranslate runs/en-de --input mono.en.gz --out bt` makes German for English text.
    """
    # (1) Options are checked before PyTorch is imported, which takes seconds.
    inputs, settings = _inputs(input, given)
    if out is None:
        raise ConfigError("`--out FOLDER` is missing: where should the corpus go?")
    if merge and shard is not None:
        raise ConfigError("`--merge` puts all parts together; leave out `--shard`")
    part = _part(shard)
    tag = (None if forward else "<bt>") if tag is None else tag or None
    # Only for its checks: `prepare` must accept the tag and the weight that are written into the snippet.
    change_section(CorpusConfig(source="-", target="-"), {"tag": tag, "weight": weight}, "data.train.0")

    from ziggurat.backtranslation.filters import PairFilter
    from ziggurat.backtranslation.merge import write_snippet
    from ziggurat.backtranslation.plan import METHODS, Job, Method
    from ziggurat.backtranslation.run import back_translate

    chosen = method or ("beam" if forward else "sample")
    if chosen not in METHODS:
        raise ConfigError(f"`--method {printable(chosen)}`: choose one of {', '.join(METHODS)}")
    # (2) Translate and merge
    job = Job(
        models=(model, *(ensemble or [])),
        inputs=inputs,
        out=out,
        method=cast(Method, chosen),
        forward=forward,
        which=which,
        device=device,
        threads=threads,
        seed=seed,
        shard_lines=shard_lines,
        filters=PairFilter(max_pieces=max_length, max_ratio=max_ratio),
        decoding=settings,
        engine=engine,
    )
    if workers is None:
        workers = 1 if _on_gpu(device) else max(1, len(os.sched_getaffinity(0)) // threads)
    with warnings_shown():
        outcome = back_translate(job, workers=workers, part=part, only_merge=merge, progress=_Progress().show)
    # (3) Results, and the corpus as a snippet for the configuration
    snippet = None
    if outcome.report is not None:
        name = "distillation" if forward else "back-translation"
        snippet = write_snippet(out, name=name, weight=weight, tag=tag)
    _print(outcome, out, shard, snippet, json)
    if outcome.signal is not None:
        raise typer.Exit(128 + outcome.signal)


def _inputs(named: list[str] | None, given: list[str] | None) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the input files and the decoding settings.

    `--input *` reaches us as `--input a b c`, so arguments that are no settings are input files, too.
    """
    inputs = (*(named or []), *(text for text in given or [] if not is_setting(text)))
    if not named:
        raise ConfigError("`--input FILE` is missing: which text should be translated?")
    return inputs, decoding_settings([text for text in given or [] if is_setting(text)], "--input")


def _part(shard: str | None) -> tuple[int, int]:
    """Return (i, n), i from 0, of `--shard i/n`, where i counts from 1."""
    if shard is None:
        return 0, 1
    found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", shard)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise ConfigError(f"`--shard {printable(shard)}`: write i/n such as 1/4, with i from 1 to n")
    return int(found[1]) - 1, int(found[2])


def _on_gpu(device: str) -> bool:
    """Return True where `--device` means a GPU."""
    from ziggurat.models.tensors import usable_device

    return usable_device(device, "--device").type != "cpu"


class _Progress:
    """Messages every few seconds: lines done, lines per second, time left."""

    def __init__(self) -> None:
        self._start = self._last_message = time.monotonic()

    def show(self, before: int, now: int, total: int) -> None:
        """Take the number of lines done by earlier calls of the verb, by this one, and of all."""
        clock = time.monotonic()
        if now == 0:  # the rate counts from here, the time in which workers load the models included
            self._start = self._last_message = clock
            if before:
                say(f"{before:,} of {counted(total, 'line')} were done before")
        elif clock - self._last_message >= _MESSAGE_SECONDS or before + now == total:
            self._last_message = clock
            rate = now / max(clock - self._start, 1e-9)
            left = duration((total - before - now) / rate)
            say(f"{before + now:,} of {counted(total, 'line')}  {rate:,.1f} lines/s  {left} left")


def _print(outcome: BackTranslationOutcome, out: Path, shard: str | None, snippet: str | None, json: bool) -> None:
    """Print the result, or what to do next where there is none yet."""
    report = outcome.report
    if outcome.signal is not None:
        say("stopped; run the same command to continue")
    elif report is None:
        say(
            f"part {shard} of {outcome.plan.shards:,} shards is complete; when all parts are, run the same command "
            "with `--merge` instead of `--shard`"
        )
    elif json:
        print_json({"out": str(out), "read": report.read, "kept": report.kept, "dropped": report.dropped})
    else:
        from ziggurat.backtranslation.merge import CORPUS_FILE, dropped_text

        print(
            f"{out}: {report.kept:,} pairs of {counted(report.read, 'line')}; dropped: {dropped_text(report.dropped)}"
        )
        print(f"{out / CORPUS_FILE}, for the configuration:\n{snippet}", end="")
