"""The verb that runs all steps on the embedded language pair: generate, prepare, train, translate, evaluate, report."""

from __future__ import annotations

import json
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ziggurat.cli.output import Json, console, print_json, say
from ziggurat.config import Experiment, dump
from ziggurat.config.recipes import load_named
from ziggurat.system.errors import ConfigError
from ziggurat.system.files import write_atomically
from ziggurat.system.terminal import duration

if TYPE_CHECKING:
    from ziggurat.inspect.report.samples import Sentences


def demo(
    folder: Annotated[
        Path, typer.Option("--folder", help="Folder for everything; an earlier demo in it is replaced.")
    ] = Path("demo"),
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Values that replace those of the recipe `demo`: path.to.key=value.")
    ] = None,
    json: Json = False,
) -> None:
    """Train and score a translator from nothing, in under five minutes on two CPU cores.

    Example: `ziggurat demo`
    """
    from ziggurat.data.babel import write_corpus
    from ziggurat.data.prepare import prepare
    from ziggurat.evaluate.scores import evaluate
    from ziggurat.inspect.report.content import gather
    from ziggurat.inspect.report.page import page
    from ziggurat.inspect.report.runs import read_run
    from ziggurat.inspect.report.samples import translated
    from ziggurat.train.loop import train

    began = time.perf_counter()

    def say_with_time(text: str) -> None:
        say(f"[{duration(time.perf_counter() - began)}] {text}")

    _make_room(folder)
    say_with_time("1/6 writing the embedded language pair: 20,000 training pairs of Low Babel and High Babel")
    files = write_corpus(folder / "corpus")
    experiment = _experiment(folder, files, overrides or [])
    config = folder / "demo.yaml"
    write_atomically(config, dump(experiment).encode())

    say_with_time(f"2/6 prepare: cleaning, {experiment.data.subword.vocabulary_size:,} BPE pieces, memory-mapped store")
    report = prepare(experiment.data)
    layers = f"{experiment.model.encoder.layers}+{experiment.model.decoder.layers}"
    say_with_time(f"3/6 train: {report.kept:,} pairs, {layers} layers of width {experiment.model.d_model}")
    run = folder / "run"
    result = train(run, experiment, console=console())
    if result.signal is not None:
        raise typer.Exit(128 + result.signal)

    say_with_time("4/6 translate: the 500 sentences of the test set, beam 4")
    sentences = _test_set(*files["test"])
    outputs = translated(read_run(run), sentences, say_with_time).outputs
    write_atomically(folder / "test.output", "".join(f"{line}\n" for line in outputs).encode())
    say_with_time("5/6 evaluate")
    scores = evaluate(outputs, [sentences.references])
    say_with_time("6/6 report")
    page_file = run / "report.html"
    write_atomically(page_file, page(gather([read_run(run)], lambda: sentences)).encode())
    seconds = time.perf_counter() - began
    if json:
        document: dict[str, Any] = {"scores": [score.as_record() for score in scores], "seconds": seconds}
        print_json({**document, "run": str(run), "report": str(page_file)})
        return
    print()
    for i in range(3):
        print(f"source     {sentences.sources[i]}\noutput     {outputs[i]}\nreference  {sentences.references[i]}\n")
    print(*scores, sep="\n")
    print(f"\nFrom nothing to this in {duration(seconds)}. What to try next:\n{_next_steps(folder, files['test'])}")
    print(f"\nWhat the run did, to open in a browser: {page_file}")


def _make_room(folder: Path) -> None:
    """Create the folder, or remove what an earlier demo wrote into it; other files stay."""
    mark = folder / ".ziggurat-demo"
    if folder.exists():
        if not mark.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} exists and is not a demo of ziggurat; choose another with `--folder`")
        for name in ("corpus", "store", "run"):
            shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    mark.touch()


def _experiment(folder: Path, files: Mapping[str, tuple[Path, Path]], overrides: Sequence[str]) -> Experiment:
    paths = {"data.store": folder / "store"}
    for split in ("train", "dev"):
        paths |= {f"data.{split}.0.{side}": path for side, path in zip(("source", "target"), files[split], strict=True)}
    # Quoted: values are read as YAML, where ` #` and `: ` in a name have a meaning.
    return load_named("demo", [*(f"{key}={json.dumps(str(path))}" for key, path in paths.items()), *overrides])


def _test_set(source: Path, target: Path) -> Sentences:
    from ziggurat.data.babel import TARGET_LANGUAGE
    from ziggurat.inspect.report.samples import Sentences

    sources, references = (path.read_text(encoding="utf-8").splitlines() for path in (source, target))
    name = f"the {len(sources)} sentences of the test set"
    return Sentences(name, sources, references, [None] * len(sources), TARGET_LANGUAGE)


def _next_steps(demo_folder: Path, test: tuple[Path, Path]) -> str:
    """Return commands to try next; each can be pasted into a shell."""
    folder, source, target = (shlex.quote(str(path)) for path in (demo_folder, *test))
    commands = (
        (f"head -3 {source} | ziggurat translate {folder}/run", "text of your own"),
        (f"ziggurat serve {folder}/run", "the same in a browser: open the address that it prints"),
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
    # The shell ignores what follows a `#`; after a line that ends in a backslash it would break the command.
    width = max(len(command) for command, comment in commands if comment)
    return "\n".join(
        f"  {command:<{width}}  # {comment}" if comment else f"  {command}" for command, comment in commands
    )
