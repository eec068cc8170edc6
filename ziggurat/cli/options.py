"""Options and arguments that several verbs share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ziggurat.config.load import apply_override
from ziggurat.system.errors import ConfigError, printable

WHO, HOW, WHAT = "Which model", "Speed", "What to translate"
"""Groups of options in the help of verbs."""

ConfigArgument = Annotated[str, typer.Argument(help="YAML file, or the name of a built-in recipe.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Values that replace the file's: path.to.key=value.")]
Model = Annotated[str, typer.Argument(help="Run or model directory.")]
Tag = Annotated[
    str | None,
    typer.Option("--tag", help="Tag for every line, such as `<bt>`, as in the training corpora.", rich_help_panel=WHAT),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
DecodingOverrides = Annotated[
    list[str] | None, typer.Argument(help="Decoding settings: beam_size=8 length_penalty.alpha=1")
]
Ensemble = Annotated[
    list[str] | None,
    typer.Option(
        "--ensemble",
        metavar="RUN",
        help="Another model with the same vocabularies, of any architecture; repeat for more. Their probabilities are "
        "averaged.",
        rich_help_panel=WHO,
    ),
]
Which = Annotated[
    str | None,
    typer.Option(
        "--which",
        help="Checkpoint of a run: averaged, best, best-en-de (of a direction), last or an update's number.",
        rich_help_panel=WHO,
    ),
]
Checkpoints = Annotated[
    str | None,
    typer.Option(
        "--checkpoints",
        metavar="KIND:N",
        help="Several checkpoints of a run: last:5 (the newest), last-epochs:5 (that end an epoch), around-best:21.",
        rich_help_panel=WHO,
    ),
]
WithoutLayers = Annotated[
    str | None,
    typer.Option(
        "--without-layers",
        metavar="LAYERS",
        help="Leave layers out, such as `encoder.5-8,decoder.3`: faster, and worse unless trained for it "
        "(`layer_drop`). `ziggurat diagnose --layers` tells what each is worth.",
        rich_help_panel=WHO,
    ),
]
Engine = Annotated[
    str, typer.Option("--engine", help="auto, torch, or ctranslate2 (an exported model).", rich_help_panel=HOW)
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...", rich_help_panel=HOW)]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, max=1024, help="CPU threads; default: PyTorch's.", rich_help_panel=HOW),
]


def is_setting(text: str) -> bool:
    """Return True for an argument `key=value`, unless a file or folder has that name."""
    return "=" in text and not os.path.exists(text)  # which takes what is too long for a path, as a setting may be


def decoding_settings(overrides: Sequence[str] | None, text_option: str) -> dict[str, Any]:
    """Return decoding settings from `key=value`; `text_option` is the verb's option for the text, for the message."""
    settings: dict[str, Any] = {}
    for override in overrides or []:
        if "=" not in override:
            shown = printable(override, 4096)  # in full, so that it can be copied
            raise ConfigError(
                f"`{shown}` is not a decoding setting such as beam_size=8; to translate a file, write "
                f"`{text_option} {shown}`"
            )
        apply_override(settings, override.removeprefix("decoding."))
    return settings
