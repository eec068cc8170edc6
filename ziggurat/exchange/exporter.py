"""Export of a model: write it for a target, compare its translations with the model's, and measure the loss of BLEU.

The folder appears only if the same beam search over the same text has given the same translations. Toolkits sum in a
different order from ours, and redistribute the probability of tokens that are never written, such as padding
(ziggurat.translate.rules does not); so two translations with nearly equal scores may swap ranks. The model itself
distinguishes such ties from real differences: by its scores in fp64, and by searches with weights perturbed in their
last digits and with that probability redistributed.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ziggurat import __version__
from ziggurat.config import Experiment
from ziggurat.config.load import change_section
from ziggurat.data.babel import generate
from ziggurat.data.corpus import Store
from ziggurat.data.subword import Tokenizer
from ziggurat.data.vocabulary import several_languages
from ziggurat.evaluate.scores import evaluate, sacrebleu_metric
from ziggurat.evaluate.tokenisation import splitting
from ziggurat.exchange.argos import PackageChoices
from ziggurat.exchange.huggingface import MAX_NEW_TOKENS
from ziggurat.exchange.plain import ExportedModel
from ziggurat.exchange.targets import TARGETS, ExportTarget, ExportTranslator, target_named
from ziggurat.model.directory import OpenedModel, open_model
from ziggurat.model.low_rank import weights_fingerprint
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.system.compressed import byte_stream
from ziggurat.system.errors import ConfigError, DataError, ExportError, printable
from ziggurat.system.files import made_by, write_atomically, write_checksums
from ziggurat.system.small_files import parse_json, read_bounded
from ziggurat.system.staging import building, tidy
from ziggurat.translate.results import Translation, TranslationWarning
from ziggurat.translate.scorers import force_score
from ziggurat.translate.text_lines import read_lines
from ziggurat.translate.translator import Translator

BEAM = 4
_TIE = 1e-4
"""_TIE is the difference below which log-probabilities are equal: about the error of an fp32 sum over tokens."""
_TRIALS = 8
_IMPOSSIBLE = -1e9  # bias of a token that is never written
_NOISE = 2.0**-21
"""_NOISE is the relative change of every weight in a trial: a few units in the last place of fp32."""


@dataclass(frozen=True)
class ExportVerification:
    """Counts of the compared lines.

    Attributes:
        lines: lines compared.
        identical: lines with the same translation.
        ties: another translation with the same score, or one that our own search finds when weights change in their
            last digits or when tokens that are never written have no probability.
        cut: another translation, where one of the two did not end within the limit; toolkits rank those differently.
        different: another translation for none of the reasons above.
        example: the first line that is different.
    """

    lines: int
    identical: int
    ties: int
    cut: int
    different: int
    example: str = ""

    def check(self) -> None:
        """Raise ExportError unless both are the same model."""
        if self.different:
            raise ExportError(
                f"the exported model gives a different text for {self.different:,} of {self.lines:,} lines "
                f"({self.ties:,} more are ties), such as {self.example}; nothing was written"
            )
        if self.cut > self.lines // 2:
            raise ExportError(
                f"{self.cut:,} of {self.lines:,} translations hit the length limit, so they prove nothing; is the "
                "model trained? Pass text of the kind it was trained on with `--verify FILE`. Nothing was written"
            )


def search_settings(positions: int, limit: int) -> dict[str, Any]:
    """Return settings under which all toolkits search alike: a plain beam, no penalty, one limit for all lines.

    `limit` is the model's own limit, in tokens; at most MAX_NEW_TOKENS - 1 are used.
    """
    limit = min(MAX_NEW_TOKENS - 1, positions - 1, limit)
    return {
        "beam_size": BEAM,
        "n_best": 1,
        "min_length": 1,
        "endings": "beam",
        "shortlist": None,
        # Whatever search the model itself uses, none of its settings may be combined with `endings: beam`.
        **{"search": "beam", "diverse_groups": 1},
        **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "epsilon": 0.0, "mbr": 0},
        "length_penalty": {"kind": "none", "alpha": 0.0, "coverage": 0.0, "word_penalty": 0.0},
        "unknown": False,
        "replace_unknown": False,
        "max_length": {"ratio": 0.0, "extra": limit, "limit": limit},
    }


def compare(
    ours: Translator,
    theirs: ExportTranslator,
    texts: Sequence[str],
    settings: dict[str, Any],
) -> ExportVerification:
    """Translate `texts` with the model and with its export, and compare the translations.

    Warns if the model's tags name several languages, because the texts here have no tag.
    """
    if languages := several_languages(ours.source_tokenizer.tags):
        warnings.warn(
            f"the model's tags name several languages ({languages}), and the export is compared without a tag: both "
            "models choose the language, which still compares their weights; BLEU of a `--reference` mixes languages",
            stacklevel=2,
        )
    mine = list(ours.translate_stream(texts, **settings))
    others = list(theirs.translate_stream(texts, **settings))
    counts = {"identical": 0, "ties": 0, "cut": 0, "different": 0}
    unlike: list[int] = []
    for number, (a, b) in enumerate(zip(mine, others, strict=True)):
        if a.text == b.text:
            counts["identical"] += 1
        # Translations that were cut off prove nothing: toolkits rank them differently.
        elif a.hypotheses[0].finished and b.hypotheses[0].finished:
            unlike.append(number)
        else:
            counts["cut"] += 1
    tied = _ties(ours, [mine[n] for n in unlike], [others[n] for n in unlike], settings)
    counts["ties"] = sum(tied)
    counts["different"] = len(unlike) - sum(tied)
    example = ""
    for number, is_tie in zip(unlike, tied, strict=True):
        if not is_tie:
            shown = (printable(text) for text in (texts[number], mine[number].text, others[number].text))
            example = "`{}`: `{}`, exported `{}`".format(*shown)
            break
    return ExportVerification(len(texts), **counts, example=example)


def _ties(ours: Translator, mine: list[Translation], others: list[Translation], settings: dict[str, Any]) -> list[bool]:
    """Return, for each pair of different translations, True if only rounding separates them."""
    if not mine:
        return []
    sources = [translation.source for translation in mine]
    scores = [_log_probabilities(ours, sources, side) for side in (mine, others)]
    # (1) The model gives both the same score in fp64.
    tied = [abs(a - b) <= _TIE for a, b in zip(*scores, strict=True)]
    generator = torch.Generator().manual_seed(0)
    # (2) A search finds the export's translation, in fp64 (the first two trials) or with weights perturbed in their
    # last digits. Every other trial redistributes the probability of tokens that are never written. That probability is
    # large in small vocabularies, because label smoothing gives each token a share.
    for trial in range(2 * _TRIALS + 2):
        left = [number for number, tie in enumerate(tied) if not tie]
        if not left:
            break
        shaken = _shaken(ours, generator if trial > 1 else None, shares_out=trial % 2 == 1)
        found = shaken.translate_stream([sources[n] for n in left], **settings)
        for number, translation in zip(left, found, strict=True):
            tied[number] = translation.text == others[number].text
    return tied


def _log_probabilities(ours: Translator, sources: list[str], translations: list[Translation]) -> list[float]:
    """Return the log-probability of each translation by the model itself, in fp64."""
    tokenizer = ours.target_tokenizer
    ids = {piece: number for number, piece in enumerate(tokenizer.pieces(range(tokenizer.size)))}
    targets = [[ids.get(piece, tokenizer.unk) for piece in t.hypotheses[0].tokens] for t in translations]
    scored = force_score(
        # fp64 leaves no ties to rounding; a copy, because the weights may be exported again, quantised.
        copy.deepcopy(ours.model).double(),
        [[*ids, ours.source_tokenizer.eos] for ids in ours.source_tokenizer.encode(sources)],
        targets,
        bos=tokenizer.bos,
        eos=tokenizer.eos,
        pad=tokenizer.pad,
    )
    return [sum(of_tokens) for of_tokens in scored]


@torch.no_grad()
def _shaken(ours: Translator, generator: torch.Generator | None, *, shares_out: bool) -> Translator:
    """Return the translator in fp64, with its weights perturbed in their last digits if a generator is given.

    `shares_out`: tokens that are never written have no probability, so that the others have more.
    """
    model = copy.deepcopy(ours.model).double()
    if generator is not None:
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.mul_(1 + _NOISE * noise)
    if shares_out:
        _rule_out(model, ours.target_tokenizer, ours.target_tokenizer.unk)
    return _with_model(ours, model)


@torch.no_grad()
def _rule_out(model: Seq2Seq, tokenizer: Tokenizer, *more: int) -> None:
    """Remove the probability of tokens that are not text, and of the ids `more`, so that the others have more."""
    given = model.output.bias
    bias = torch.zeros_like(model.output.weight[:, 0]) if given is None else given.clone()
    never = {tokenizer.pad, tokenizer.bos, *tokenizer.tags.values(), *more} - {tokenizer.eos}
    bias[sorted(never)] = _IMPOSSIBLE
    model.output.bias = torch.nn.Parameter(bias)


def _with_model(ours: Translator, model: Seq2Seq) -> Translator:
    return Translator(
        model, ours.source_tokenizer, ours.target_tokenizer, ours.decoding, max_positions=ours.max_positions
    )


def _text_only(ours: Translator) -> Translator:
    """Return the translator without tokens that are not text; the unknown token keeps its probability, as in Marian."""
    _rule_out(model := copy.deepcopy(ours.model), ours.target_tokenizer)
    return _with_model(ours, model)


_REPORT_FILE = "export.json"
"""_REPORT_FILE is the report of an export: its origin and the results of its checks."""

REPORT_FORMAT = 1


@dataclass(frozen=True)
class Gate:
    """A test set on which the result must be as good as the model.

    Attributes:
        source: text file.
        reference: its translation.
        tolerance: largest loss of BLEU that is allowed.
    """

    source: Path
    reference: Path
    tolerance: float = 0.2


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
    # (1) Refuse what cannot succeed, before anything slow.
    target = target_named(to, package)
    stored = _stored_form(target, to, quantization)
    if shortlist is not None and to not in ("ctranslate2", "firefox"):
        raise ConfigError(f"`--shortlist` is for `--to ctranslate2` and `firefox`; for `--to {to}` leave it out")
    # The folder first, because opening a model takes seconds.
    _refuse_other_folder(out, force)
    opened = open_model(path, which=which, without_layers=without_layers)
    if shortlist is not None:
        decoding = change_section(opened.experiment.decoding, {"shortlist": shortlist}, "decoding")
        opened = replace(opened, experiment=opened.experiment.model_copy(update={"decoding": decoding}))
    if reasons := target.reasons(opened.experiment):
        raise ExportError(f"`{to}` cannot be reached: {'; '.join(reasons)}")
    # (2) Prepare the comparison: the model, searching as the target's toolkit does, and text.
    texts, origin = _texts(opened.experiment, verify, lines)
    model = replace(ExportedModel.of(opened), sample=texts)
    ours = _translator(opened, model, opened.experiment)
    checked = _translator(opened, model, model.searching_as_others(target.rules)) if target.own_search else ours
    checked = _text_only(checked) if target.text_only else checked
    # Now, to learn before the export that the files do not pair up or that BLEU's tokenizer is not installed.
    judged = None if gate is None else (gate, *_test_set(gate, ours.target_language))
    report = _report_head(opened, model, to, stored)
    with building(out) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", TranslationWarning)  # the report counts the translations that were cut off
        # (3) Write and compare in fp32, the only precision in which the translations must be the same.
        say(f"{opened.origin}: writing for {to}")
        target.write(folder, model, None)
        _write_report(folder, report)
        say(f"comparing it with the model: both translate {len(texts):,} lines ({origin})")
        report["verification"] = {"text": origin, **_verified(checked, target, folder, model, texts)}
        if target.checked_by is not None:
            report["verification"]["by"] = target.checked_by()
        # (4) Write once more, quantised, and count the translations that changed.
        if stored is not None:
            say(f"{stored}: writing and comparing again")
            _empty(folder)
            target.write(folder, model, stored)
            _write_report(folder, report)
            report["quantized"] = _unchanged(checked if target.search else ours, target, folder, texts)
        # (5) Compare BLEU and finish the folder; checksums come last, because they cover everything else.
        if judged is not None:
            report["gate"] = _passed(ours, target.translator(folder), *judged)
        _write_report(folder, report)
        unusual = None if stored == target.usual else stored or "float32"
        options = {
            "which": which,
            "without-layers": without_layers,
            "quantization": unusual,
            "shortlist": shortlist,
        }
        chosen = [word for name, value in options.items() if value is not None for word in (f"--{name}", value)]
        chosen += package.words() if package is not None else []
        write_checksums(folder, made_by("export", path, "--to", to, *chosen, "--out", out, "--force"))
    return report


def _stored_form(target: ExportTarget, to: str, quantization: str | None) -> str | None:
    """Return the type of the stored matrices, None for fp32. Raises ConfigError for a type that the target lacks."""
    stored = quantization or target.usual
    if stored not in (None, "float32", *target.quantizations):
        known = ", ".join(target.quantizations) or "none"
        raise ConfigError(f"`--quantization {stored}`: `--to {to}` has: {known}")
    return None if stored == "float32" else stored


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
        return f"an export ({printable(str(report['target']))}, {printable(str(report['quantization'] or 'fp32'))})"
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
    """Return text to verify with, at most `lines` lines, and a description of its origin.

    Raises DataError if the text is empty or the store cannot be read. It may be missing.
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
    """Return the lines of a text file, compressed or not. Raises DataError if it cannot be read."""
    with byte_stream(path) as stream:
        return list(read_lines(stream, str(path)))


def _verified(
    ours: Translator, target: ExportTarget, folder: Path, model: ExportedModel, texts: Sequence[str]
) -> dict[str, Any]:
    """Return the figures of the comparison, without lines that are too long. Raises ExportError: the models differ."""
    settings = search_settings(model.positions, ours.decoding.max_length.limit) | dict(target.settings)
    # Longer lines than these are translated in parts by our search, but not by every other toolkit.
    longest = min(MAX_NEW_TOKENS - 1, model.positions - 1, ours.decoding.max_source_pieces + 1)
    lengths = [len(ids) for ids in model.source.encode(list(texts))]
    short = [text for text, length in zip(texts, lengths, strict=True) if length < longest]
    if not short:
        raise DataError(f"no line to verify the export with is shorter than {longest} pieces")
    verification = compare(ours, target.translator(folder), short, settings)
    verification.check()
    return {**asdict(verification), "left_out": len(texts) - len(short), "settings": settings}


def _unchanged(ours: Translator, target: ExportTarget, folder: Path, texts: Sequence[str]) -> dict[str, int]:
    """Return the number of texts that are translated as before, with the model's own search or the target's."""
    sides = (each.translate_stream(texts, **target.search) for each in (ours, target.translator(folder)))
    same = sum(a.text == b.text for a, b in zip(*sides, strict=True))
    return {"lines": len(texts), "identical": same}


def _test_set(gate: Gate, language: str | None) -> tuple[list[str], list[str]]:
    """Return the lines of source and reference. Raises DataError, or ConfigError if BLEU's tokenizer is missing."""
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
    """Return BLEU before and after. Raises ExportError if it falls by more than the tolerance."""
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
    gc.collect()  # translators of the first export may still hold its files open
    for file in folder.iterdir():
        file.unlink()


def _write_report(folder: Path, report: dict[str, Any]) -> None:
    write_atomically(folder / _REPORT_FILE, json.dumps(report, indent=2, ensure_ascii=False).encode() + b"\n")
