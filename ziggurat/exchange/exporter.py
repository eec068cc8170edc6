"""Export of a model: write it for a target, verify that it translates as before, and put the folder in place.

The folder appears only if the verification succeeds (ziggurat.exchange.verification).
"""

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ziggurat import __version__
from ziggurat.config import Experiment
from ziggurat.config.load import change_section
from ziggurat.exchange.argos import PackageChoices
from ziggurat.exchange.plain import ExportedModel
from ziggurat.exchange.targets import TARGETS, ExportTarget, target_named
from ziggurat.exchange.verification import ExportChecks, Gate, verification_text
from ziggurat.model.directory import OpenedModel, open_model
from ziggurat.model.low_rank import weights_fingerprint
from ziggurat.system.errors import ConfigError, DataError, ExportError, printable
from ziggurat.system.files import made_by, write_atomically, write_checksums
from ziggurat.system.small_files import parse_json, read_bounded
from ziggurat.system.staging import building, tidy
from ziggurat.translate.results import TranslationWarning

_REPORT_FILE = "export.json"
"""_REPORT_FILE is the report of an export: its origin and the results of its checks."""

REPORT_FORMAT = 1


def reachable(experiment: Experiment) -> dict[str, list[str]]:
    """Return, for each target, all reasons why no model of this configuration reaches it; empty if one does."""
    return {name: target.reasons(experiment) for name, target in TARGETS.items()}


def export_model(
    path: str | Path,
    to: str,
    out: Path,
    *,
    which: str | None = None,
    without_layers: str | None = None,
    quantization: str | None = None,
    verify: Path | None = None,
    lines: int = 1000,
    gate: Gate | None = None,
    force: bool = False,
    package: PackageChoices | None = None,
    shortlist: str | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> dict[str, Any]:
    """Export a model; return the report, which is also stored in the result as `export.json`.

    Args:
        path: run or model directory.
        to: name of the target.
        out: folder to write.
        which: checkpoint of a run; see ziggurat.model.directory.open_model.
        without_layers: layers to leave out; see there.
        quantization: type of the stored matrices; None: the target's usual one, fp32 for most (`float32` everywhere).
            The fp32 form is always verified.
        verify: text to verify with; None: the development set of the model's store, or embedded sentences.
        lines: number of lines of this text to use.
        gate: a test set by which the result can be refused.
        force: replace an earlier export, of any model, and nothing else.
        package: metadata and sentence splitter of a package (`argos`).
        shortlist: a lexical shortlist in place of the model's own (`ctranslate2`, `firefox`).
        say: receives a message before each slow step.

    Raises ExportError if the target cannot be reached (with all reasons), the result is not the same model, or it is
    worse than the gate allows; ConfigError, DataError or CheckpointError for faulty arguments.
    """
    # (1) Refuse what cannot succeed, before anything slow; the folder first, because opening a model takes seconds.
    target = target_named(to, package)
    stored = _stored_form(target, to, quantization)
    _refuse_other_folder(out, force)
    opened = _opened(path, to, target, which, without_layers, shortlist)
    # (2) Prepare the comparison. Files are read before the export, in case they do not pair up.
    texts, origin = verification_text(opened.experiment, verify, lines)
    model = replace(ExportedModel.of(opened), sample=texts)
    checks = ExportChecks.of(opened, model, target)
    judged = None if gate is None else (gate, *gate.read(checks.ours.target_language))
    report = _report_head(opened, model, to, stored)
    with building(out) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", TranslationWarning)  # the report counts the translations that were cut off
        # (3) Write and compare in fp32, the only precision in which the translations must be the same.
        say(f"{opened.origin}: writing for {to}")
        _write(folder, target, model, None, report)
        say(f"comparing it with the model: both translate {len(texts):,} lines ({origin})")
        report["verification"] = {"text": origin, **checks.verified(folder)}
        # (4) Write once more, quantised, and count the translations that changed.
        if stored is not None:
            say(f"{stored}: writing and comparing again")
            _write(folder, target, model, stored, report)
            report["quantized"] = checks.unchanged(folder)
        # (5) Compare BLEU and finish the folder; checksums come last, because they cover everything else.
        if judged is not None:
            report["gate"] = checks.passed(folder, *judged)
        _write_report(folder, report)
        unusual = None if stored == target.usual else stored or "float32"
        chosen = {"which": which, "without_layers": without_layers, "quantization": unusual, "shortlist": shortlist}
        packaged = (package or PackageChoices()).options()
        again = made_by("export", path, to=to, **chosen, **packaged, out=out, force=True)
        write_checksums(folder, again)
    return report


def _stored_form(target: ExportTarget, to: str, quantization: str | None) -> str | None:
    """Return the type of the stored matrices, None for fp32. Raises ConfigError for a type that the target lacks."""
    stored = quantization or target.usual
    if stored not in (None, "float32", *target.quantizations):
        known = ", ".join(target.quantizations) or "none"
        raise ConfigError(f"`--quantization {stored}`: `--to {to}` has: {known}")
    return None if stored == "float32" else stored


def _opened(
    path: str | Path,
    to: str,
    target: ExportTarget,
    which: str | None,
    without_layers: str | None,
    shortlist: str | None,
) -> OpenedModel:
    """Return the model to export, with the given shortlist if any. Raises ExportError if it cannot reach the target."""
    if shortlist is not None and to not in ("ctranslate2", "firefox"):
        raise ConfigError(f"`--shortlist` is for `--to ctranslate2` and `firefox`; for `--to {to}` leave it out")
    opened = open_model(path, which=which, without_layers=without_layers)
    if shortlist is not None:
        decoding = change_section(opened.experiment.decoding, {"shortlist": shortlist}, "decoding")
        opened = replace(opened, experiment=opened.experiment.model_copy(update={"decoding": decoding}))
    if reasons := target.reasons(opened.experiment):
        raise ExportError(f"`{to}` cannot be reached: {'; '.join(reasons)}")
    return opened


def _report_head(opened: OpenedModel, model: ExportedModel, to: str, quantization: str | None) -> dict[str, Any]:
    report: dict[str, Any] = {
        "format": REPORT_FORMAT,
        "ziggurat": __version__,
        "target": to,
        "model": opened.origin,
        "weights": weights_fingerprint(opened.weights),
        "positions": model.positions,
        "quantization": quantization,
        "alignments": to == "ctranslate2",
    }
    if left_out := TARGETS[to].left_out(model):
        report["search_without"] = left_out
    return report


def _refuse_other_folder(out: Path, force: bool) -> None:
    tidy(out)
    if out.exists() and not (out / _REPORT_FILE).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: exists and holds no earlier export; give another folder")
    if not force and (out / _REPORT_FILE).is_file():
        raise ConfigError(f"{out}: already holds {_earlier(out)}; `--force` replaces it, or choose another folder")


def _earlier(out: Path) -> str:
    try:
        report = parse_json(read_bounded(out / _REPORT_FILE), _REPORT_FILE)
        quantization = report["quantization"] or "fp32"
        return f"an export ({printable(str(report['target']))}, {printable(str(quantization))})"
    except (OSError, DataError, KeyError, TypeError):
        return "an export"


def _write(folder: Path, target: ExportTarget, model: ExportedModel, form: str | None, report: dict[str, Any]) -> None:
    """Write the model with its report in place of what is in the folder; `form` is the type of its matrices."""
    gc.collect()  # translators of the previous content may still hold its files open
    for file in folder.iterdir():
        file.unlink()
    target.write(folder, model, form)
    _write_report(folder, report)


def _write_report(folder: Path, report: dict[str, Any]) -> None:
    write_atomically(folder / _REPORT_FILE, json.dumps(report, indent=2, ensure_ascii=False).encode() + b"\n")
