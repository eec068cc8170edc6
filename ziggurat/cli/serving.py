"""The verb that answers over HTTP: serve."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ziggurat.cli.output import decoding_settings, is_setting, say
from ziggurat.config.base import joined
from ziggurat.config.load import change_section, parse_as, read_config
from ziggurat.system.errors import ConfigError
from ziggurat.system.terminal import importing


def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(help="Runs, model directories or exported CTranslate2 folders; decoding settings for all."),
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="YAML file for what options cannot say.")] = None,
    host: Annotated[
        str | None, typer.Option("--host", help="Address to listen at; default: this machine alone.")
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", min=0, max=65535, help="Port; default 5000; 0: a free one.")
    ] = None,
    keys: Annotated[Path | None, typer.Option("--keys", help="File of API keys, without which nobody may ask.")] = None,
    new_key: Annotated[
        str | None,
        typer.Option("--new-key", metavar="NAME", help="Add a key to the file of --keys, print it, and end."),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            "--metrics", metavar="TOKEN", help="Token that /metrics asks for; without one it answers everybody."
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, max=1024, help="CPU threads of each model.")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...; default: the file's, else auto.")
    ] = None,
) -> None:
    """Serve translations over HTTP: a page for people, and the interfaces of LibreTranslate, DeepL and OpenAI.

    Example: `ziggurat serve runs/de-en runs/en-de --port 5000`
    """
    try:
        with importing():
            from ziggurat.serve.access import new_key as make_key
            from ziggurat.serve.config import ServeConfig
            from ziggurat.serve.server import run_server
    except ModuleNotFoundError as error:
        raise ConfigError(f"`{error.name}` is not installed: pip install 'ziggurat-mt[serve]'") from None

    if new_key is not None:
        if keys is None:
            raise ConfigError("`--new-key NAME` goes with `--keys FILE`")
        print(make_key(keys, new_key))
        return
    settings = decoding_settings([text for text in models or [] if is_setting(text)], "--input")
    shared = {key: value for key, value in (("threads", threads), ("device", device)) if value is not None}
    named = [{"path": path, **shared, "decoding": settings} for path in models or [] if not is_setting(path)]
    found = ServeConfig()
    if config is not None:
        found = parse_as(ServeConfig, read_config(config), str(config))
    changes = {
        "host": host,
        "port": port,
        "keys": None if keys is None else str(keys),
        "metrics_token": metrics,
    }
    given: dict[str, Any] = {key: value for key, value in changes.items() if value is not None}
    # What is typed goes before what is written.
    of_file = [joined(entry.model_dump(), {**shared, "decoding": settings}) for entry in found.models]
    given["models"] = [*named, *of_file]
    found = change_section(found, given, "")
    if not found.models:
        raise ConfigError("name at least one model: `ziggurat serve RUN`")
    run_server(found, say)
