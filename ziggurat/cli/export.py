"""The verbs that write models for other toolkits and read theirs: export, import."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ziggurat.cli.engine import warnings_shown
from ziggurat.cli.output import OUT, WHO, Json, WithoutLayers, check_input, counted, print_json, say
from ziggurat.config import load_experiment
from ziggurat.config.recipes import load_named
from ziggurat.model.run_folder import refuse_missing
from ziggurat.system.errors import ConfigError
from ziggurat.system.files import check_file

_CONTENT, _TEST = "What is written", "The comparison with the model"


def export(
    model: Annotated[str | None, typer.Argument(help="Run or model directory.")] = None,
    to: Annotated[
        str | None,
        typer.Option("--to", help="Target: ziggurat, plain, ctranslate2, huggingface, argos, marian, firefox, onnx."),
    ] = None,
    out: Annotated[Path | None, typer.Option(*OUT, help="Folder to write.")] = None,
    which: Annotated[
        str | None,
        typer.Option(
            "--which",
            metavar="NAME",
            help="Checkpoint of a run: averaged, best, last or an update number.",
            rich_help_panel=WHO,
        ),
    ] = None,
    without_layers: WithoutLayers = None,
    quantization: Annotated[
        str | None,
        typer.Option(
            "--quantization",
            metavar="NAME",
            rich_help_panel=_CONTENT,
            help="ctranslate2, argos, firefox: int8 (default for the last two), float32. All but "
            "firefox: also int8_float32, int16, float16, bfloat16, ...",
        ),
    ] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option(
            "--metadata",
            metavar="KEY=VALUE",
            rich_help_panel=_CONTENT,
            help="argos: package_version, from_code, from_name, to_code, to_name or license of the package; repeat for "
            "more.",
        ),
    ] = None,
    splitter: Annotated[
        Path | None,
        typer.Option(
            "--splitter",
            metavar="FOLDER",
            help="argos: sentence splitter from MiniSBD, Stanza or spaCy to include.",
            rich_help_panel=_CONTENT,
        ),
    ] = None,
    shortlist: Annotated[
        str | None,
        typer.Option(
            "--shortlist",
            metavar="FILE",
            rich_help_panel=_CONTENT,
            help="ctranslate2, firefox: always search with this file from `ziggurat shortlist`.",
        ),
    ] = None,
    verify: Annotated[
        Path | None,
        typer.Option(
            "--verify",
            metavar="FILE",
            help="Text to verify with; default: the store's development set.",
            rich_help_panel=_TEST,
        ),
    ] = None,
    lines: Annotated[
        int,
        typer.Option("--lines", metavar="N", min=1, help="Number of its lines to verify with.", rich_help_panel=_TEST),
    ] = 1000,
    reference: Annotated[
        Path | None,
        typer.Option(
            "--reference",
            metavar="FILE",
            help="Reference for the `--verify` text: BLEU must not fall.",
            rich_help_panel=_TEST,
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            metavar="X",
            min=0,
            help="With --reference: how far BLEU may fall [0.2].",
            rich_help_panel=_TEST,
        ),
    ] = None,
    check: Annotated[
        str | None, typer.Option("--check", help="Only list the targets for which this configuration can be exported.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export in the folder.")] = False,
    json: Json = False,
) -> None:
    """Write a model for another toolkit, and verify that the same beam search gives the same text.

    Example: `ziggurat export runs/a --to ctranslate2 --quantization int8 --out served`

    Before training: `ziggurat export --check my.yaml`
    """
    if check is not None:
        if model is not None or out is not None:
            raise ConfigError("`--check CONFIG` takes no model and no overrides, and writes nothing")
        _check(check, to, json)
        return
    if model is None or to is None or out is None:
        raise ConfigError("give a model, `--to TARGET` and `--out FOLDER` (or `--check CONFIG`)")
    if reference is not None and verify is None:
        raise ConfigError("`--reference` is the translation of `--verify FILE`, which is missing")
    if tolerance is not None and reference is None:
        raise ConfigError("`--tolerance` is for BLEU against `--reference FILE`, which is missing")
    for path in (verify, reference):
        if path is not None:
            check_input(str(path))
    refuse_missing(Path(model))
    from ziggurat.exchange.argos import package_choices
    from ziggurat.exchange.exporter import export_model
    from ziggurat.exchange.verification import Gate

    package = package_choices(metadata or [], splitter) if metadata or splitter is not None else None
    most = Gate.tolerance if tolerance is None else tolerance
    gate = None if verify is None or reference is None else Gate(verify, reference, most)
    report = export_model(
        model,
        to,
        out,
        which=which,
        without_layers=without_layers,
        quantization=quantization,
        verify=verify,
        lines=lines,
        gate=gate,
        force=force,
        package=package,
        shortlist=shortlist,
        say=say,
    )
    if json:
        print_json(report)
    else:
        print(_report_text(report, out))


def _check(config: str, to: str | None, json: bool) -> None:
    """Print whether the configuration can be exported to each target, or to `to` alone, and if not why."""
    from ziggurat.exchange.exporter import reachable
    from ziggurat.exchange.targets import target_named

    saved = Path(config) / "config.yaml"
    check_file(saved)
    reasons = reachable(load_experiment(saved) if saved.is_file() else load_named(config))
    if to is not None:
        target_named(to)
        reasons = {to: reasons[to]}
    if json:
        print_json({name: {"reachable": not why, "reasons": why} for name, why in reasons.items()})
        return
    for name, why in reasons.items():
        print(f"{name:<12} {'no' if why else 'yes'}")
        for reason in why:
            print(f"             - {reason}")


def _report_text(report: dict[str, Any], out: Path) -> str:
    found = report["verification"]
    packages = [f"the package to install: {path}" for path in sorted(out.glob("*.argosmodel"))]
    lines = [
        f"wrote {out} ({report['target']}) from {report['model']}",
        f"verified on {found['lines']:,} lines ({found['text']}): {found['identical']:,} identical, "
        f"{counted(found['ties'], 'tie')}, {found['cut']:,} cut at the length limit"
        + (f"; by {found['by']}" if "by" in found else ""),
        *packages,
    ]
    if "search_without" in report:
        lines.append(f"its search leaves out {', '.join(report['search_without'])}")
    if "quantized" in report:
        same = report["quantized"]
        lines.append(f"{report['quantization']}: {same['identical']:,} of {same['lines']:,} lines as before")
        if 2 * same["identical"] < same["lines"] and "gate" not in report:
            lines[-1] += "; so few that BLEU should be compared: `--verify TEXT --reference ITS_TRANSLATION`"
    if "gate" in report:
        gate = report["gate"]
        lines.append(f"BLEU {gate['before']:.2f} before, {gate['after']:.2f} after (tolerance {gate['tolerance']})")
    return "\n".join(lines)


def import_model(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            help="Directory of transformers (Marian, Pegasus, ...), Marian model (.npz, .bin, or its folder), or "
            "fairseq checkpoint (.pt)."
        ),
    ],
    out: Annotated[Path, typer.Option(*OUT, help="Model directory to write.")],
    dictionary: Annotated[
        list[Path] | None,
        typer.Option(
            "--dictionary",
            help="Source vocabulary, then the target's if it differs: fairseq's dict.XX.txt; .spm, .yml, "
            ".json or text from Marian.",
        ),
    ] = None,
    sentencepiece: Annotated[
        list[Path] | None,
        typer.Option("--sentencepiece", help="Source model, then the target's if it differs."),
    ] = None,
    languages: Annotated[
        str | None, typer.Option("--languages", help="Source and target codes: de-en, pt-BR-en or pt-br:en.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a model in the folder.")] = False,
    json: Json = False,
) -> None:
    """Convert a plain Transformer trained by another toolkit into a model directory.

    Example: `ziggurat import opus-mt-de-en --out imported`
    """
    from ziggurat.exchange.importer import import_checkpoint

    with warnings_shown():
        report = import_checkpoint(
            checkpoint, out, dictionaries=dictionary or [], models=sentencepiece or [], languages=languages, force=force
        )
    if json:
        print_json(report)
    else:
        stored = f"{report['parameters']:,} parameters (`model.embedding.sharing: {report['sharing']}`)"
        print(f"wrote {out}: {report['kind']}, {stored}; to translate with it:")
        print(f"  ziggurat translate {out} < text")
        if report["shortlist"] is not None:
            print(
                f"  ziggurat translate {out} decoding.shortlist={report['shortlist']} < text     # with its shortlist"
            )
