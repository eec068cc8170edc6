"""The verb `align`: word alignments of a parallel corpus."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ziggurat.cli.jobs import JobFolder, JobOptions, JobWorkers, MergeOnly, RayAddress, ShardPart, line_job
from ziggurat.cli.output import (
    OUT,
    Json,
    check_output,
    counted,
    line_progress,
    output_stream,
    print_json,
    refuse_overwriting,
    say,
    write_parts,
)
from ziggurat.config.data import Symmetrisation
from ziggurat.system.errors import ConfigError
from ziggurat.system.files import fingerprint, write_atomically
from ziggurat.system.terminal import duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ziggurat.corpora.jobs.job import Plan
    from ziggurat.data.aligner import Aligner, Link, TrainingOptions
    from ziggurat.data.readers import CorpusReader

_MODEL_FILE = "aligner"  # in the folder of a job
_SHARD_PAIRS = 10_000  # of a shard of a job
_TRAINING, _FORM = "Training", "Form of the alignments"


def align(
    source: Annotated[str, typer.Argument(help="Source text, one sentence per line; a glob names several files.")],
    target: Annotated[str, typer.Argument(help="Target text, aligned line by line.")],
    output: Annotated[str, typer.Option(*OUT, help="File, or - for standard output.")] = "-",
    symmetrise: Annotated[
        Symmetrisation, typer.Option("--symmetrise", help="How the two directions are merged.", rich_help_panel=_FORM)
    ] = "grow-diag-final-and",
    words: Annotated[
        Literal["split", "blanks"] | None,
        typer.Option(
            "--words",
            help="`split`: words end at white space and punctuation. `blanks`: the text is tokenised. Default: split, "
            "or as the `--input-model` was trained.",
            rich_help_panel=_FORM,
        ),
    ] = None,
    model1_iterations: Annotated[
        int | None,
        typer.Option("--model1-iterations", min=1, max=1000, help="Default: 5.", rich_help_panel=_TRAINING),
    ] = None,
    hmm_iterations: Annotated[
        int | None, typer.Option("--hmm-iterations", min=0, max=1000, help="Default: 5.", rich_help_panel=_TRAINING)
    ] = None,
    null: Annotated[
        float | None,
        typer.Option(
            "--null",
            min=1e-6,
            max=0.999,
            help="Probability that a word stands for no word of the other side. Default: 0.2.",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    pairs: Annotated[
        int | None,
        typer.Option(
            "--pairs",
            min=1,
            help="Pairs to train on at most, evenly spread; memory grows with them. Default: 1,000,000.",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    input_model: Annotated[
        str | None,
        typer.Option("--input-model", help="Align with this trained model; do not train.", rich_help_panel=_TRAINING),
    ] = None,
    save_model: Annotated[
        str | None, typer.Option("--save-model", help="Write the trained model here.", rich_help_panel=_TRAINING)
    ] = None,
    workers: JobWorkers = None,
    job: JobFolder = None,
    shard: ShardPart = None,
    merge: MergeOnly = False,
    ray: RayAddress = None,
    json: Json = False,
) -> None:
    """Align the words of a parallel corpus: an HMM over IBM Model 1 in both directions, symmetrised.

    Example: `ziggurat align train.de train.en -o train.de-en.align`
    """
    from ziggurat.config.data import CorpusConfig
    from ziggurat.data.aligner import TrainingOptions, read_aligner
    from ziggurat.data.readers import CorpusReader

    training = {
        "--words": words,
        "--model1-iterations": model1_iterations,
        "--hmm-iterations": hmm_iterations,
        "--null": null,
        "--pairs": pairs,
        "--save-model": save_model,
    }
    if input_model is not None and (given := [name for name, value in training.items() if value is not None]):
        raise ConfigError(f"`{given[0]}` is for training, and `--input-model` says not to train; leave out one of them")
    bulk = JobOptions(job, shard, merge, ray, workers, noun="pair")
    if json and output == "-":
        raise ConfigError("`--json` and the alignments would both go to standard output; name a file with `-o`")
    if save_model == "-":
        save_model = "./-"  # a file of this name: the model is binary, so standard output makes no sense
    for path in (output, save_model):
        if path is not None:
            check_output(path)
            refuse_overwriting(path, source, target, input_model)
    started = time.perf_counter()
    reader = CorpusReader.of(CorpusConfig(source=source, target=target, format="text"), "align", ("source", "target"))
    usual = TrainingOptions()
    options = TrainingOptions(
        usual.model1_iterations if model1_iterations is None else model1_iterations,
        usual.hmm_iterations if hmm_iterations is None else hmm_iterations,
        usual.empty if null is None else null,
    )

    def trained() -> Aligner:
        if input_model is not None:
            return read_aligner(input_model)
        return _trained(reader, words or "split", options, pairs)

    def save(content: bytes) -> None:
        if save_model is not None:
            write_parts(save_model, [content])

    if job is not None:
        settings = {**training, "--save-model": None, "--symmetrise": symmetrise}
        settings["--input-model"] = None if input_model is None else fingerprint(Path(input_model))
        found = _by_job(bulk, reader, trained, save, settings, symmetrise, output)
        if found is None:
            return
        counts = found
    else:
        made = trained()
        save(made.content())
        counts = _written((made.align(*block, symmetrise) for block in reader.blocks()), output)
    if json:
        print_json({"output": output, **counts, "seconds": time.perf_counter() - started})
        return
    say(
        f"{counted(counts['pairs'], 'pair')} with {counted(counts['links'], 'link')} in "
        f"{duration(time.perf_counter() - started)}; without any link: {counts['without_links']:,}"
    )


def _written(blocks: Iterator[list[set[Link]]], output: str) -> dict[str, int]:
    """Write the links of each pair; return the counts of the report."""
    from ziggurat.data.aligner import format_links

    counts = {"pairs": 0, "links": 0, "without_links": 0}
    with line_progress("aligning", None) as advance, output_stream(output) as out:
        for aligned in blocks:
            out.write("".join(format_links(links) + "\n" for links in aligned).encode())
            counts["pairs"] += len(aligned)
            counts["links"] += sum(map(len, aligned))
            counts["without_links"] += sum(not links for links in aligned)
            advance(len(aligned))
    return counts


def _by_job(
    bulk: JobOptions,
    reader: CorpusReader,
    trained: Callable[[], Aligner],
    save: Callable[[bytes], None],
    settings: dict[str, Any],
    how: Symmetrisation,
    output: str,
) -> dict[str, int] | None:
    """Align the corpus in bulk, all parts with one aligner; return the counts of the report, None for a part."""
    from ziggurat.corpora.jobs.job import made_once
    from ziggurat.corpora.jobs.tasks import Aligning, LineWithInputs

    def lines() -> Iterator[LineWithInputs]:
        return (LineWithInputs(s, (t,)) for block in reader.blocks() for s, t in zip(*block, strict=True))

    def train(plan: Plan) -> None:
        with made_once(plan, _MODEL_FILE) as path:
            if not path.exists():
                write_atomically(path, trained().content())
            save(path.read_bytes())

    task = Aligning(str(Path(bulk.folder or "") / _MODEL_FILE), how)
    inputs = [str(path) for part in reader.files for path in part]
    merged = line_job(
        bulk, "align", task, settings, inputs, lines, partial(write_parts, output), _SHARD_PAIRS, before=train
    )
    return None if merged is None else {"pairs": merged.lines, "links": 0, "without_links": 0, **merged.counts}


def _trained(
    reader: CorpusReader, rule: Literal["split", "blanks"], options: TrainingOptions, most: int | None
) -> Aligner:
    """Return an aligner trained on the corpus, of which at most `most` pairs are read into memory."""
    from ziggurat.data.aligner import Aligner
    from ziggurat.data.word_links import TRAINING_PAIRS, spread_pairs

    with line_progress("counting", None) as advance:
        total = 0
        for block in reader.blocks():
            total += len(block[0])
            advance(len(block[0]))

    def report(direction: str, iteration: int, likelihood: float) -> None:
        say(f"{direction}, iteration {iteration}: log-likelihood {likelihood:,.0f}")

    return Aligner.train(spread_pairs(reader.blocks(), total, most or TRAINING_PAIRS), rule, options, report)
