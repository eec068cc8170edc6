"""The whole road on the embedded language pair: generate, prepare, train, translate, evaluate, report."""

from __future__ import annotations

import shlex
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ziggurat.cli.output import console, print_json
from ziggurat.cli.preparation import Json
from ziggurat.config import dump
from ziggurat.config.recipes import load_named
from ziggurat.data.files import write_atomically
from ziggurat.duration import duration
from ziggurat.errors import ConfigError

if TYPE_CHECKING:
    from ziggurat.report.translations import Sentences

__all__ = ["demo"]


def demo(
    folder: Annotated[Path, typer.Option("--folder", help="Where everything goes; replaced if it is a demo.")] = Path(
        "demo"
    ),
    overrides: Annotated[list[str] | None, typer.Argument(help="path.to.key=value of the recipe `demo`")] = None,
    json: Json = False,
) -> None:
    """Train and score a translator from nothing, in under five minutes on two CPU cores.

    Example: `ziggurat demo`
    """
    from ziggurat.data.babel import write_corpus
    from ziggurat.data.prepare import prepare
    from ziggurat.evaluation.scores import evaluate
    from ziggurat.report.content import gather
    from ziggurat.report.page import page
    from ziggurat.report.runs import read_run
    from ziggurat.report.translations import translated
    from ziggurat.training.loop import train

    began, shown = time.perf_counter(), console()

    def say(text: str) -> None:
        shown.print(f"[{duration(time.perf_counter() - began)}] {text}", markup=False, highlight=False, soft_wrap=True)

    _make_room(folder)
    say("1/6 writing the embedded language pair: 20,000 training pairs of Low Babel and High Babel")
    files = write_corpus(folder / "corpus")
    paths = [f"data.store={folder}/store"]
    for split in ("train", "dev"):
        source, target = files[split]
        paths += [f"data.{split}.0.source={source}", f"data.{split}.0.target={target}"]
    experiment = load_named("demo", [*paths, *(overrides or [])])
    config = folder / "demo.yaml"
    config.write_text(dump(experiment), encoding="utf-8")

    say(f"2/6 prepare: cleaning, {experiment.data.subword.vocabulary_size:,} BPE pieces, memory-mapped store")
    report = prepare(experiment.data)
    layers = f"{experiment.model.encoder.layers}+{experiment.model.decoder.layers}"
    say(f"3/6 train: {report.kept:,} pairs, {layers} layers of width {experiment.model.d_model}")
    run = folder / "run"
    result = train(run, experiment, console=shown)
    if result.signal is not None:
        raise typer.Exit(128 + result.signal)

    say("4/6 translate: the 500 sentences of the test set, beam 4")
    sentences = _test_set(*files["test"])
    outputs = translated(read_run(run), sentences, say).outputs
    write_atomically(folder / "test.output", "".join(f"{line}\n" for line in outputs).encode())
    say("5/6 evaluate")
    scores = evaluate(outputs, [sentences.references])
    say("6/6 report")
    page_file = run / "report.html"
    write_atomically(page_file, page(gather([read_run(run)], lambda: sentences)).encode())
    seconds = time.perf_counter() - began
    if json:
        document: dict[str, Any] = {"scores": [s.as_record() for s in scores], "seconds": seconds}
        print_json({**document, "run": str(run), "report": str(page_file)})
        return
    print()
    for i in range(3):
        print(f"source     {sentences.sources[i]}\noutput     {outputs[i]}\nreference  {sentences.references[i]}\n")
    for s in scores:
        print(s)
    print(f"\nFrom nothing to this in {duration(seconds)}. What to try next:\n{_next_steps(folder, files['test'])}")
    print(f"\nWhat the run did, to open in a browser: {page_file}")


def _make_room(folder: Path) -> None:
    """Make the folder, without what an earlier demo wrote; anything else in it stays."""
    mark = folder / ".ziggurat-demo"
    if folder.exists():
        if not mark.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} exists and is not a demo of ziggurat; choose another with `--folder`")
        for name in ("corpus", "store", "run"):
            shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    mark.touch()


def _test_set(source: Path, target: Path) -> Sentences:
    from ziggurat.data.babel import TARGET_LANGUAGE
    from ziggurat.report.translations import Sentences

    sources, references = (path.read_text(encoding="utf-8").splitlines() for path in (source, target))
    name = f"the {len(sources)} sentences of the test set"
    return Sentences(name, sources, references, [None] * len(sources), TARGET_LANGUAGE)


def _next_steps(place: Path, test: tuple[Path, Path]) -> str:
    """Return commands to go on with, each of which can be pasted into a shell."""
    folder, source, target = (shlex.quote(str(path)) for path in (place, *test))
    commands = (
        (f"head -3 {source} | ziggurat translate {folder}/run", "text of your own"),
        (f"ziggurat evaluate {folder}/run --source {source} \\", ""),
        (f"    --reference {target} --confidence", "score it, with confidence intervals"),
        (f"ziggurat train {folder}/demo.yaml --run {folder}/deep \\", ""),
        ("    model.encoder.layers=12", "another model on the same data"),
        (f"ziggurat report {folder}/run {folder}/deep", "both side by side"),
        ("ziggurat recipes", "configurations to start from"),
        ("ziggurat recipes multi30k-de-en > my.yaml", "then edit the paths and:"),
        ("ziggurat prepare my.yaml", ""),
        ("ziggurat train my.yaml --run runs/mine", ""),
    )
    # What is meant stands behind a `#`, and never behind a line that goes on.
    wide = max(len(command) for command, meaning in commands if meaning)
    return "\n".join(
        f"  {command:<{wide}}  # {meaning}" if meaning else f"  {command}" for command, meaning in commands
    )
