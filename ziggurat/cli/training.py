"""The verbs that change weights: train, grow, average."""

from __future__ import annotations

import errno
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from ziggurat.cli.arguments import Overrides, configurations
from ziggurat.cli.output import OUT, Checkpoints, Json, console, is_first_process, is_setting, print_json, say
from ziggurat.config.depth import CopyStrategy
from ziggurat.config.recipes import load_named, recipe_names
from ziggurat.system.errors import ConfigError, printable
from ziggurat.system.terminal import importing, let_go, why
from ziggurat.train.signals import leave_with_launcher


def train(
    config: Annotated[
        str | None,
        typer.Argument(
            help="YAML file or recipe; not with --resume, which uses the run's.",
            autocompletion=configurations,
        ),
    ] = None,
    overrides: Overrides = None,
    run: Annotated[Path | None, typer.Option("--run", "-r", help="Folder of the run (-r under torchrun).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest complete checkpoint.")] = False,
    device: Annotated[
        str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...; the same as training.device=...")
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, max=1024, help="CPU threads; the same as training.threads=...")
    ] = None,
    json: Json = False,
) -> None:
    """Train a model; you can stop it with Ctrl-C or SIGTERM and resume at any time.

    Example: `ziggurat train my.yaml --run runs/a model.encoder.layers=12`, later `ziggurat train --run runs/a --resume`
    """
    if run is None:
        if resume:
            which = printable(config) if config and not is_setting(config) else "FOLDER"
            raise ConfigError(f"which run should be resumed? Write `ziggurat train --run {which} --resume`")
        raise ConfigError("`--run FOLDER` is missing: where should the run be kept?")
    given = [a for a in (config, *(overrides or [])) if a is not None]
    _refuse_swapped(run, given, resume=resume)
    options = {"device": device, "threads": threads}
    given += [f"training.{key}={value}" for key, value in options.items() if value is not None]
    if resume and given and not is_setting(given[0]):
        raise ConfigError(f"`--resume` takes its configuration from {run}; leave out `{given[0]}`")
    if not resume and (not given or is_setting(given[0])):
        raise ConfigError("name a configuration file or recipe first (or use `--resume`)")
    # Report mistakes in the configuration before importing PyTorch, which takes seconds.
    named = None if resume else load_named(given[0], given[1:])
    leave_with_launcher()
    with importing():
        from ziggurat.train.loop import train as train_run
        from ziggurat.train.run import reopen_run, was_requeued

    if not resume and was_requeued(run):
        resume, named, given = True, None, []
        if is_first_process():
            say(f"{run} was started by this job: resuming it with its config.yaml")
    experiment = named or reopen_run(run, given)
    result = train_run(run, experiment, resume=resume, console=console())
    if json and is_first_process():
        _print_result(asdict(result), ends_well=result.signal is None)
    if result.signal is not None:
        raise typer.Exit(128 + result.signal)


def _refuse_swapped(run: Path, given: list[str], *, resume: bool) -> None:
    """Raise ConfigError if `--run` names a configuration; it may have been swapped with the run."""
    named = given[0] if given and not is_setting(given[0]) else None
    is_yaml = run.suffix in (".yaml", ".yml")
    if run.is_file():
        what = "is a configuration" if is_yaml else "is a file"
    elif named is None and not resume and not run.exists() and (is_yaml or str(run) in recipe_names()):
        what = "looks like a configuration" if is_yaml else "is a recipe"
    else:
        return
    has_config = named is not None and (Path(named).is_file() or named in recipe_names())
    folder = "FOLDER" if named is None or has_config else shlex.quote(named)
    words = [] if resume else [named if named is not None and has_config else str(run)]
    settings = [] if resume else given[0 if named is None else 1 :]
    command = ["ziggurat train", *map(shlex.quote, words), "--run", folder, *map(shlex.quote, settings)]
    meant = printable(" ".join([*command, *(["--resume"] if resume else [])]), 1000)
    said = f"`--run` takes the folder of a run, but {printable(str(run))} {what}"
    raise ConfigError(f"{said}; did you mean `{meant}`?")


def _print_result(result: dict[str, Any], *, ends_well: bool) -> None:
    """Print the result. If standard output is closed, the exit status remains that of the training.

    Raises OSError if training `ends_well` but only part of the result reaches a file.
    """
    try:
        print_json(result)
        sys.stdout.flush()
    except OSError as error:
        if ends_well and error.errno not in (errno.EPIPE, errno.EBADF, errno.EIO):
            raise
        let_go(sys.stdout)
        say(f"the result cannot be written to standard output ({why(error)}); the run itself is unharmed")


def grow(
    model: Annotated[Path, typer.Argument(help="Run, checkpoint or model directory.")],
    out: Annotated[Path, typer.Option(*OUT, help="Model directory to write.")],
    layers: Annotated[
        int | None, typer.Option("--layers", min=2, help="Encoder layers of the deeper model; default: unchanged.")
    ] = None,
    decoder_layers: Annotated[
        int | None, typer.Option("--decoder-layers", min=2, help="Decoder layers; default: unchanged.")
    ] = None,
    copy: Annotated[
        str,
        typer.Option("--copy", help="Initial weights of the new layers: " + ", ".join(get_args(CopyStrategy)) + "."),
    ] = "g_top",
    which: Annotated[str | None, typer.Option("--which", help="Checkpoint of a run, such as best or 2000.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a model in the folder.")] = False,
    json: Json = False,
) -> None:
    """Deepen a trained model, to train further with `training.start_from=OUT`.

    Example: `ziggurat grow runs/a --layers 24 --out grown`
    """
    from ziggurat.train.growth import grow_model

    if copy not in get_args(CopyStrategy):
        raise ConfigError(f"`--copy {printable(copy)}`: choose one of {', '.join(get_args(CopyStrategy))}")
    if layers is None and decoder_layers is None:
        raise ConfigError("nothing to grow: give `--layers N`, `--decoder-layers M` or both")
    grown, parameters = grow_model(
        model,
        out,
        strategy=cast(CopyStrategy, copy),
        layers=layers,
        decoder_layers=decoder_layers,
        which=which,
        force=force,
    )
    depth = {"encoder_layers": grown.encoder.layers, "decoder_layers": grown.decoder.layers}
    if json:
        print_json({"out": str(out), **depth, "parameters": parameters})
    else:
        layers_of = f"{grown.encoder.layers} encoder and {grown.decoder.layers} decoder layers"
        print(f"wrote {out}: {layers_of}, {parameters:,} parameters; to train it further on the same data:")
        print(f"  ziggurat train {out}/config.yaml --run FOLDER training.start_from={out}")


def average(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")],
    last: Annotated[
        int | None, typer.Option("--last", min=1, help="The newest N, as `--checkpoints last:N`; default: 5.")
    ] = None,
    checkpoints: Checkpoints = None,
    out: Annotated[Path | None, typer.Option(*OUT, help="Model directory; default: RUN/averaged.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a model in the folder.")] = False,
    json: Json = False,
) -> None:
    """Average the weights of several checkpoints into a model directory.

    Examples: `ziggurat average runs/a --last 5`, `ziggurat average runs/a --checkpoints last-epochs:5`
    """
    from ziggurat.train.average import CheckpointSelection, average_run

    if last is not None and checkpoints is not None:
        raise ConfigError("give either `--last` or `--checkpoints`")
    selection = (
        CheckpointSelection("last", last or 5) if checkpoints is None else CheckpointSelection.parse(checkpoints)
    )
    where, updates = average_run(run, selection, out=out, force=force)
    if json:
        print_json({"out": str(where), "updates": updates})
    else:
        print(f"averaged the checkpoints of updates {', '.join(map(str, updates))} into {where}")
    if out is None:
        rival = "best" if (run / "best").exists() else "last"
        evaluate = f"ziggurat evaluate {shlex.quote(str(run))} --source FILE --reference FILE --which"
        say(
            f"all commands now use it instead of `{rival}`, although it has no dev score and may be worse: "
            f"compare `{evaluate} {where.name}` with `{evaluate} {rival}`; to undo this, remove {where}"
        )
