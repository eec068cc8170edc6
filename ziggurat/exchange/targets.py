"""Table of export targets: reasons why a configuration cannot reach them, their writers and their translators."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ziggurat.config import DecodingConfig, Experiment, ModelConfig, dump
from ziggurat.config.load import change_section
from ziggurat.data.shortlist import read_shortlist
from ziggurat.data.subword import copy_tokenizers
from ziggurat.exchange.argos import ArgosTranslator, PackageChoices, argos_reasons, write_argos
from ziggurat.exchange.ctranslate2 import QUANTIZATIONS, ctranslate2_reasons, write_ctranslate2, write_shortlist_map
from ziggurat.exchange.firefox import firefox_reasons, write_firefox
from ziggurat.exchange.huggingface import (
    HuggingFaceTranslator,
    huggingface_reasons,
    huggingface_rules,
    write_huggingface,
)
from ziggurat.exchange.import_marian import POSITIONS, imported_translator
from ziggurat.exchange.marian import MARIAN_ATTENTIONS, marian_reasons, write_marian
from ziggurat.exchange.marian_program import MarianTranslator, marian_program
from ziggurat.exchange.onnx import write_onnx
from ziggurat.exchange.onnx_runtime import load_onnx
from ziggurat.exchange.plain import ExportedModel, SearchRules, not_plain
from ziggurat.model.directory import fill_model_directory
from ziggurat.model.run_folder import CONFIG_FILE
from ziggurat.system.errors import ConfigError
from ziggurat.system.files import write_atomically
from ziggurat.translate.ctranslate2 import CTranslate2Translator
from ziggurat.translate.engines import EXPORT_SHORTLIST
from ziggurat.translate.results import Translation
from ziggurat.translate.translator import Translator, load_translator


class ExportTranslator(Protocol):
    """A translator that uses the result of an export."""

    def translate_stream(self, lines: Sequence[str], **decoding: Any) -> Iterable[Translation]:
        """Yield one Translation per line; `decoding` are keys of that section."""


@dataclass(frozen=True)
class ExportTarget:
    """A format that a model can be exported to.

    Attributes:
        reasons: experiment -> all reasons why its models cannot reach the target; empty if they can.
        write: (folder, model, quantization) -> None; writes the result into an empty folder.
        translator: folder -> a translator that uses the result, for verification.
        quantizations: types other than fp32 in which matrices may be stored.
        own_search: the result is searched with its toolkit's search, not with ziggurat's.
        rules: keys of `decoding` that this search supports beyond those that all support.
        settings: settings of the comparison's search, if the toolkit cannot use the usual ones.
        text_only: tokens that are not text have no probability, except the unknown token, which is never written.
        checked_by: description for the report of what computes the comparison's translations; None: the toolkit itself.
        usual: type of the matrices if none is requested; None: fp32.
        shortlists: ziggurat's search on the result may have a lexical shortlist.
        search: options with which texts are translated before and after quantisation; empty: the model's own.
    """

    reasons: Callable[[Experiment], list[str]]
    write: Callable[[Path, ExportedModel, str | None], None]
    translator: Callable[[Path], ExportTranslator]
    quantizations: tuple[str, ...] = ()
    own_search: bool = False
    rules: SearchRules = lambda decoding: ()
    usual: str | None = None
    shortlists: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)
    text_only: bool = False
    checked_by: Callable[[], str] | None = None
    search: Mapping[str, Any] = field(default_factory=dict)

    def left_out(self, model: ExportedModel) -> list[str]:
        """Return the settings of the model's search that the result lacks, for messages."""
        if self.own_search:
            return model.unlike_others(self.rules)
        listed = model.experiment.decoding.shortlist
        return [f"`decoding.shortlist: {listed}`"] if listed is not None and not self.shortlists else []


def _unlike_plain(config: ModelConfig) -> Iterator[str]:
    """Yield the attention options that other toolkits cannot express by matrices alone."""
    if config.attention.qk_norm != "none":
        yield f"`attention.qk_norm: {config.attention.qk_norm}`: other toolkits do not normalise queries and keys"
    if config.attention.value_norm != "none":
        yield f"`attention.value_norm: {config.attention.value_norm}`: other toolkits do not normalise values"
    for key in ("value_residual", "cross_value_residual"):
        if (kind := getattr(config.attention, key)) != "none":
            yield f"`attention.{key}: {kind}`: in other toolkits no layer reads the values of another"
    if config.attention.query_scale:
        yield "`attention.query_scale`: other toolkits have no scale per dimension of queries"
    if config.embedding.positions == "rotary":
        yield "`embedding.positions: rotary`: other toolkits add positions to embeddings"


def _plain_reasons(model: ModelConfig) -> list[str]:
    return [*not_plain(model, scaled_input=True), *_unlike_plain(model)]


def _ctranslate2_reasons(experiment: Experiment) -> list[str]:
    return [*_plain_reasons(experiment.model), *ctranslate2_reasons(experiment.model)]


def _huggingface_reasons(experiment: Experiment) -> list[str]:
    reasons = [*_plain_reasons(experiment.model), *huggingface_reasons(experiment.model)]
    if experiment.data.subword.kind == "vocabulary":
        reasons.append("`data.subword.kind: vocabulary`: its tokenizers need a SentencePiece model")
    return reasons


def _in_fp32(folder: Path) -> Translator:
    """Return the translator of a model directory for comparisons: in fp32 and without a shortlist, like the model.

    A shortlist allows the pieces of all sentences in a batch, so with one the same model may give other texts.
    """
    return load_translator(folder, precision="float32", shortlist=None)


def _write_ziggurat(folder: Path, model: ExportedModel, quantization: str | None) -> None:
    fill_model_directory(folder, model.tensors, model.experiment, model.directory, again="export the model again")


def _write_plain(folder: Path, model: ExportedModel, quantization: str | None) -> None:
    _write_ziggurat(folder, model.plain(), quantization)


def _write_ctranslate2(folder: Path, model: ExportedModel, quantization: str | None) -> None:
    copy_tokenizers(model.directory, folder)
    experiment, tokenizers = model.searching_as_others(), (model.source, model.target)
    if (listed := model.experiment.decoding.shortlist) is not None:
        write_shortlist_map(folder / EXPORT_SHORTLIST, read_shortlist(listed, *tokenizers), tokenizers)
        decoding = change_section(experiment.decoding, {"shortlist": EXPORT_SHORTLIST}, "decoding")
        experiment = experiment.model_copy(update={"decoding": decoding})
    write_atomically(folder / CONFIG_FILE, dump(experiment).encode())
    write_ctranslate2(folder, model.anatomy(), tokenizers, model.positions, quantization, aligned=model.aligned)


def _write_huggingface(folder: Path, model: ExportedModel, quantization: str | None) -> None:
    data = model.experiment.data
    languages = (data.source_language, data.target_language)
    decoding = model.searching_as_others(huggingface_rules).decoding
    write_huggingface(folder, model.anatomy(), (model.source, model.target), model.positions, languages, decoding)


def _write_onnx(folder: Path, model: ExportedModel, quantization: str | None) -> None:
    copy_tokenizers(model.directory, folder)
    # The graphs score every piece.
    decoding = change_section(model.experiment.decoding, {"shortlist": None}, "decoding")
    experiment = model.experiment.model_copy(update={"decoding": decoding})
    write_atomically(folder / CONFIG_FILE, dump(experiment).encode())
    write_onnx(folder, model.seq2seq(), model.experiment.model, positions=model.positions)


def _argos_reasons(experiment: Experiment) -> list[str]:
    return [*_ctranslate2_reasons(experiment), *argos_reasons(experiment)]


def _marian_reasons(experiment: Experiment) -> list[str]:
    config = experiment.model
    return [*not_plain(config, attentions=MARIAN_ATTENTIONS), *_unlike_plain(config), *marian_reasons(experiment)]


def _firefox_reasons(experiment: Experiment) -> list[str]:
    return [*_marian_reasons(experiment), *firefox_reasons(experiment)]


def _write_marian(folder: Path, model: ExportedModel, quantization: str | None) -> None:
    write_marian(folder, model, model.searching_as_others(_marian_rules).decoding)


def _marian_rules(decoding: DecodingConfig) -> Collection[str]:
    return ("endings", "word_penalty") if decoding.endings == "marian" else ("word_penalty",)


def _marian_translator(folder: Path) -> ExportTranslator:
    """Return Marian on the folder or, if it is not installed, ziggurat's own forward pass over its files."""
    return MarianTranslator(folder) if marian_program() is not None else imported_translator(folder)


_OURSELVES = "our own forward pass over the written files"


def _checked_by() -> str:
    return "pymarian" if marian_program() is not None else _OURSELVES


_FIREFOX_SEARCH = {
    "beam_size": 1,
    "n_best": 1,
    "min_length": 0,
    "endings": "marian",
    "length_penalty": {"kind": "power", "alpha": 1.0, "coverage": 0.0, "word_penalty": 0.0},
    "max_length": {"ratio": 2.0, "extra": 2, "limit": POSITIONS - 1},
}
_MARIAN_SEARCH = {
    "min_length": 0,
    "endings": "marian",
    # Marian's limit: three times the source, including end-of-sentence.
    "max_length": {"ratio": 3.0, "extra": 3, "limit": POSITIONS - 1},
}

TARGETS: dict[str, ExportTarget] = {
    "ziggurat": ExportTarget(lambda _: [], _write_ziggurat, _in_fp32),
    "plain": ExportTarget(lambda experiment: not_plain(experiment.model), _write_plain, _in_fp32),
    "ctranslate2": ExportTarget(
        _ctranslate2_reasons,
        _write_ctranslate2,
        CTranslate2Translator,
        QUANTIZATIONS,
        own_search=True,
        rules=lambda _: ("shortlist",),
    ),
    "huggingface": ExportTarget(
        _huggingface_reasons,
        _write_huggingface,
        HuggingFaceTranslator,
        own_search=True,
        rules=huggingface_rules,
    ),
    "argos": ExportTarget(_argos_reasons, write_argos, ArgosTranslator, QUANTIZATIONS, True, usual="int8"),
    "marian": ExportTarget(
        _marian_reasons,
        _write_marian,
        _marian_translator,
        own_search=True,
        rules=_marian_rules,
        settings=_MARIAN_SEARCH,
        text_only=True,
        checked_by=_checked_by,
    ),
    "firefox": ExportTarget(
        _firefox_reasons,
        write_firefox,
        imported_translator,
        ("int8",),
        own_search=True,
        rules=lambda _: ("shortlist",),
        usual="int8",
        settings=_MARIAN_SEARCH,
        text_only=True,
        checked_by=lambda: _OURSELVES,
        search=_FIREFOX_SEARCH,
    ),
    "onnx": ExportTarget(lambda _: [], _write_onnx, load_onnx, shortlists=False),
}
"""TARGETS are the export targets by name."""


def target_named(name: str, package: PackageChoices | None = None) -> ExportTarget:
    """Return the target; `package` are a user's choices for a package.

    Raises ConfigError for an unknown name, or if package options are given for a target that is not a package.
    """
    if name not in TARGETS:
        raise ConfigError(f"`--to {name}`: choose one of {', '.join(TARGETS)}")
    if package is None:
        return TARGETS[name]
    if name != "argos":
        raise ConfigError(f"`--metadata` and `--splitter` are for packages (`--to argos`), not for `--to {name}`")
    return dataclasses.replace(TARGETS[name], write=partial(write_argos, choices=package))
