"""Export of a model: write it for a target, compare its translations with the model's, measure how far BLEU falls.

The folder appears only when all of that has succeeded.
"""

from __future__ import annotations

import gc
import json
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ziggurat import __version__
from ziggurat.config import Experiment
from ziggurat.config.load import change_section
from ziggurat.data.babel import generate
from ziggurat.data.corpus import Store
from ziggurat.evaluate.scores import evaluate, sacrebleu_metric
from ziggurat.evaluate.splitting import splitting
from ziggurat.exchange.huggingface import MAX_NEW_TOKENS
from ziggurat.exchange.package import PackageChoices
from ziggurat.exchange.plain import ExportedModel
from ziggurat.exchange.targets import TARGETS, ExportTarget, ExportTranslator, target_named
from ziggurat.exchange.verification import compare, search_settings
from ziggurat.model.directory import OpenedModel, open_model
from ziggurat.model.low_rank_updates import weights_fingerprint
from ziggurat.system.checksums import made_by, write_checksums
from ziggurat.system.compressed import byte_stream
from ziggurat.system.errors import ConfigError, DataError, ExportError, printable
from ziggurat.system.files import write_atomically
from ziggurat.system.small_files import parse_json, read_bounded
from ziggurat.system.workspace import building, tidy
from ziggurat.translate.lines import TranslationWarning, read_lines
from ziggurat.translate.translator import Translator

REPORT_FILE = "export.json"
"""Report of an export: its origin and the results of its checks."""

REPORT_FORMAT = 1


@dataclass(frozen=True)
class Gate:
    """A test set on which the result must be as good as the model.

    Attributes:
        source: text file.
        reference: its translation.
        tolerance: greatest loss of BLEU that is allowed.
    """

    source: Path
    reference: Path
    tolerance: float = 0.2


def reachable(experiment: Experiment) -> dict[str, list[str]]:
    """Return, for each target, all reasons why no model of this configuration reaches it; none: it does."""
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
    """Export a model; return the report, which is also `export.json` of the result.

    Args:
        path: run or model directory.
        to: name of the target.
        out: folder to write.
        which: checkpoint of a run; see ziggurat.model.directory.open_model.
        without_layers: layers to leave out; likewise.
        quantization: type of the stored matrices; None: the target's usual one, fp32 for most (`float32` everywhere).
            The fp32 form is verified in any case.
        verify: text to verify with; None: the development set of the model's store, or embedded sentences.
        lines: number of its lines that are used.
        gate: a test set that can refuse the result.
        force: replace an earlier export, of whichever model, and nothing else.
        package: metadata and sentence splitter of a package (`argos`).
        shortlist: a lexical shortlist in place of the model's own (`ctranslate2`).
        say: receives a message before each step that takes long.

    Raises ExportError: the target cannot be reached (with all reasons), the result is not the same model, or it is
    worse than the gate allows. ConfigError, DataError, CheckpointError: faults of the arguments.
    """
    # (1) Refuse what cannot succeed, before anything takes time.
    target = target_named(to, package)
    stored = quantization or target.usual
    if stored not in (None, "float32", *target.quantizations):
        known = ", ".join(target.quantizations) or "none"
        raise ConfigError(f"`--quantization {stored}`: `--to {to}` has: {known}")
    stored = None if stored == "float32" else stored
    if shortlist is not None and to != "ctranslate2":
        raise ConfigError(f"`--shortlist` is for `--to ctranslate2`; for `--to {to}` leave it out")
    # The folder first: opening a model takes seconds.
    _refuse_other_folder(out, force)
    opened = open_model(path, which=which, without_layers=without_layers)
    if shortlist is not None:
        decoding = change_section(opened.experiment.decoding, {"shortlist": shortlist}, "decoding")
        opened = replace(opened, experiment=opened.experiment.model_copy(update={"decoding": decoding}))
    if reasons := target.reasons(opened.experiment):
        raise ExportError(f"`{to}` cannot be reached: {'; '.join(reasons)}")
    # (2) Prepare the comparison: the model, searching as the target's toolkit does, and text.
    model = ExportedModel.of(opened)
    ours = _translator(opened, model, opened.experiment)
    checked = _translator(opened, model, model.searching_as_others(target.rules)) if target.own_search else ours
    # Now, to learn before the export that the files do not pair up, or that BLEU's tokenizer is not installed.
    judged = None if gate is None else (gate, *_test_set(gate, ours.target_language))
    texts, origin = _texts(opened.experiment, verify, lines)
    report = _report_head(opened, model, to, stored)
    with building(out) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", TranslationWarning)  # the report counts translations that were cut
        # (3) Write and compare in fp32: only there must the translations be the same.
        say(f"{opened.origin}: writing for {to}")
        target.write(folder, model, None)
        _write_report(folder, report)
        say(f"comparing it with the model: both translate {len(texts):,} lines ({origin})")
        report["verification"] = {"text": origin, **_verified(checked, target, folder, model, texts)}
        # (4) Write once more, quantised, and count the translations that changed.
        if stored is not None:
            say(f"{stored}: writing and comparing again")
            _empty(folder)
            target.write(folder, model, stored)
            _write_report(folder, report)
            report["quantized"] = _unchanged(ours, target.translator(folder), texts)
        # (5) Compare BLEU, and finish the folder; checksums come last, since they are of everything else.
        if judged is not None:
            report["gate"] = _passed(ours, target.translator(folder), *judged)
        _write_report(folder, report)
        chosen = ["--which", which] if which is not None else []
        chosen += ["--without-layers", without_layers] if without_layers is not None else []
        chosen += ["--quantization", stored or "float32"] if stored != target.usual else []
        chosen += ["--shortlist", shortlist] if shortlist is not None else []
        chosen += package.words() if package is not None else []
        write_checksums(folder, made_by("export", path, "--to", to, *chosen, "--out", out, "--force"))
    return report


def _report_head(opened: OpenedModel, model: ExportedModel, to: str, quantization: str | None) -> dict[str, Any]:
    """Return the report of an export before its checks."""
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
    if out.exists() and not (out / REPORT_FILE).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: exists and holds no earlier export; give another folder")
    if not force and (out / REPORT_FILE).is_file():
        raise ConfigError(f"{out}: already holds {_earlier(out)}; `--force` replaces it, or choose another folder")


def _earlier(out: Path) -> str:
    """Return a description of an earlier export."""
    try:
        report = parse_json(read_bounded(out / REPORT_FILE), REPORT_FILE)
        quantization = report["quantization"] or "fp32"
        return f"an export ({printable(str(report['target']))}, {printable(str(quantization))})"
    except (OSError, DataError, KeyError, TypeError):
        return "an export"


def _translator(opened: OpenedModel, model: ExportedModel, experiment: Experiment) -> Translator:
    return Translator(
        opened.model,
        model.source,
        model.target,
        experiment.decoding,
        max_positions=experiment.model.embedding.limit,
        origin=opened.origin,
        target_language=experiment.data.target_language,
    )


def _texts(experiment: Experiment, verify: Path | None, lines: int) -> tuple[list[str], str]:
    """Return text to verify with, at most `lines` lines, and its origin.

    Raises DataError: the text is empty, or the store cannot be read. It may be missing: models are copied without it.
    """
    store = Path(experiment.data.store).expanduser()
    if verify is not None:
        texts, origin = _read(verify), str(verify)
    else:
        try:
            dev = Store.open(store).dev if os.path.lexists(store) else None
        except DataError as error:
            raise DataError(f"{error}; or give text to compare the export by as `--verify FILE`") from None
        if dev is not None:
            texts, origin = dev.texts(range(min(lines, len(dev))))[0], f"{experiment.data.store}: development set"
        else:
            texts, origin = [source for source, _ in generate(lines, seed=1)], "embedded sentences (Babel)"
    texts = [text for text in texts if text.strip()][:lines]
    if not texts:
        raise DataError(f"{origin}: no text to verify the export with")
    return texts, origin


def _read(path: Path) -> list[str]:
    """Return the lines of a text file, compressed or not. Raises DataError when it cannot be read."""
    with byte_stream(path) as stream:
        return list(read_lines(stream, str(path)))


def _verified(
    ours: Translator, target: ExportTarget, folder: Path, model: ExportedModel, texts: Sequence[str]
) -> dict[str, Any]:
    """Return the figures of the comparison, without lines too long for it. Raises ExportError: not the same model."""
    settings = search_settings(model.positions, ours.decoding.max_length.limit)
    # Longer lines than these are translated in parts by ours, but not by every other toolkit.
    longest = min(MAX_NEW_TOKENS - 1, model.positions - 1, ours.decoding.max_source_pieces + 1)
    lengths = [len(ids) for ids in model.source.encode(list(texts))]
    short = [text for text, length in zip(texts, lengths, strict=True) if length < longest]
    if not short:
        raise DataError(f"no line to verify the export with is shorter than {longest} pieces")
    verification = compare(ours, target.translator(folder), short, settings)
    verification.check()
    return {**verification.record(), "left_out": len(texts) - len(short), "settings": settings}


def _unchanged(ours: Translator, theirs: ExportTranslator, texts: Sequence[str]) -> dict[str, int]:
    """Return the number of texts that are translated as before, with the model's own search."""
    sides = (translator.translate_stream(texts) for translator in (ours, theirs))
    same = sum(a.text == b.text for a, b in zip(*sides, strict=True))
    return {"lines": len(texts), "identical": same}


def _test_set(gate: Gate, language: str | None) -> tuple[list[str], list[str]]:
    """Return the lines of source and reference. Raises DataError, or ConfigError where BLEU's tokenizer is missing."""
    sources, references = _read(gate.source), _read(gate.reference)
    if len(sources) != len(references):
        raise DataError(
            f"{gate.source} has {len(sources):,} lines, but {gate.reference} has {len(references):,}: they must pair up"
        )
    sacrebleu_metric("bleu", tokenize=splitting([references], language).bleu)
    return sources, references


def _passed(
    ours: Translator, theirs: ExportTranslator, gate: Gate, sources: list[str], references: list[str]
) -> dict[str, Any]:
    """Return BLEU before and after. Raises ExportError when it falls by more than the tolerance."""
    scores = []
    for translator in (ours, theirs):
        hypotheses = [translation.text for translation in translator.translate_stream(sources)]
        scores += evaluate(hypotheses, [references], metrics=["bleu"], target_language=ours.target_language)
    before, after = (score.value for score in scores)
    if before - after > gate.tolerance:
        raise ExportError(
            f"BLEU falls from {before:.2f} to {after:.2f} on {gate.source}, by more than "
            f"`--tolerance {gate.tolerance}`; nothing was written"
        )
    return {
        "source": str(gate.source),
        "reference": str(gate.reference),
        "before": before,
        "after": after,
        "tolerance": gate.tolerance,
        "signature": scores[0].signature,
    }


def _empty(folder: Path) -> None:
    """Remove all files."""
    gc.collect()  # translators of the first export may still hold its files open
    for file in folder.iterdir():
        file.unlink()


def _write_report(folder: Path, report: dict[str, Any]) -> None:
    write_atomically(folder / REPORT_FILE, json.dumps(report, indent=2, ensure_ascii=False).encode() + b"\n")
