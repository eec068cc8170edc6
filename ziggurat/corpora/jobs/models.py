"""Models that the workers of a job open: what of them the result depends on, and each worker's copy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import xxhash

from ziggurat.config import DecodingConfig, Experiment, load_experiment
from ziggurat.config.load import change_section
from ziggurat.data.vocabulary import several_languages
from ziggurat.model.directory import locate_weights, open_model, usable_device
from ziggurat.model.low_rank import weights_fingerprint
from ziggurat.model.run_folder import CONFIG_FILE
from ziggurat.system.errors import CheckpointError, ConfigError, DataError
from ziggurat.system.files import fingerprint
from ziggurat.translate.ctranslate2 import CTranslate2Translator
from ziggurat.translate.engines import EXPORT_FILE, EXPORT_SHORTLIST, export_folder
from ziggurat.translate.options import TextTranslator
from ziggurat.translate.results import check_tag
from ziggurat.translate.translator import load_translator


@dataclass(frozen=True)
class ModelChoice:
    """Models of a job, and the settings that they translate with.

    Attributes:
        models: runs or model directories: one, or the members of an ensemble.
        which: checkpoint of a run; see ziggurat.model.directory.open_model.
        without_layers: layers to leave out; None: none.
        device: `auto`, `cpu`, `cuda`, ...
        threads: CPU threads of each worker. The result depends on them: another number of threads sums matrix products
            in another order, which rounds differently.
        engine: `torch`, `ctranslate2`, or `auto`: the latter for an exported model. Never by speed: parts of the work
            may be done on several machines.
        decoding: keys of the `decoding` section that replace the model's own.
        weights: fingerprints of the weights of each model, once they are known; workers refuse others.
        shortlist: fingerprint of the lexical shortlist that the search uses, likewise; None: not known, or none.
    """

    models: tuple[str, ...]
    which: str | None = None
    without_layers: str | None = None
    device: str = "auto"
    threads: int = 1
    engine: str = "auto"
    decoding: Mapping[str, Any] = field(default_factory=dict, hash=False)
    weights: tuple[str, ...] = ()
    shortlist: str | None = None

    def identified(self, *, searched: bool = True) -> Identified:
        """Open the models, so that what is wrong with them or the settings is said now; return what they are.

        Args:
            searched: translations are searched for; scores of given ones do not depend on a shortlist.

        Raises ConfigError, CheckpointError: settings or models that cannot be used. DataError: no such shortlist.
        """
        served = export_folder(self.engine, self.models, which=self.which, without_layers=self.without_layers)
        if served is None:
            device = usable_device(self.device, "device").type
            # On the CPU: memory of a GPU is for the workers.
            found = [open_model(path, which=self.which, without_layers=self.without_layers) for path in self.models]
            experiments = [model.experiment for model in found]
            tags = list(found[0].tokenizers[0].tags)
            contents = [
                _identity(model.experiment, weights_fingerprint(model.weights), model.directory) for model in found
            ]
        else:
            translator = CTranslate2Translator(served, device=self.device, threads=self.threads, **self.decoding)
            experiments, device = [load_experiment(served / CONFIG_FILE)], translator.device
            tags = list(translator.source_tokenizer.tags)
            contents = [_identity(experiments[0], fingerprint(served / EXPORT_FILE), served)]
        decoding = job_decoding(experiments[0].decoding, self.decoding)
        # By content as well: one that is written again goes by the same name.
        listed = _shortlist(decoding, served) if searched else None
        shortlist = None if listed is None else fingerprint(listed)
        settings = {
            "threads": self.threads,
            "device": device,
            "decoding": decoding.model_dump(mode="json"),
            "models": contents,
            **({"without_layers": self.without_layers} if self.without_layers else {}),
            **({} if shortlist is None else {"shortlist": shortlist}),
        }
        # A worker on another machine must not choose for itself.
        fixed = replace(
            self,
            device=device if self.device == "auto" else self.device,
            weights=tuple(content["weights"] for content in contents),
            shortlist=shortlist,
        )
        return Identified(fixed, experiments[0], decoding, settings, tags)


@dataclass(frozen=True)
class Identified:
    """Facts about opened models.

    Attributes:
        choice: the choice, with a device that is not `auto` and with the fingerprints of the weights.
        experiment: configuration of the first model.
        decoding: settings of the search.
        settings: all that the result depends on, as JSON can represent it without loss.
        tags: tags that can stand before a source sentence.
    """

    choice: ModelChoice
    experiment: Experiment
    decoding: DecodingConfig
    settings: dict[str, Any]
    tags: list[str]

    def tag_settings(self, tag: str | None) -> dict[str, str]:
        """Return what the result depends on where the models are given `tag` before every sentence: nothing without.

        Raises ConfigError for a tag that they do not have, and without one where their tags name several languages:
        everything would be in whatever language.
        """
        check_tag(tag, self.tags)
        if tag is None and (languages := several_languages(self.tags)):
            raise ConfigError(
                f"`--model-tag TAG` is missing: the tags of {self.choice.models[0]} name several languages "
                f"({languages}), and without one it writes in whatever language"
            )
        return {} if tag is None else {"model_tag": tag}


def job_decoding(own: DecodingConfig, changes: Mapping[str, Any]) -> DecodingConfig:
    """Return the decoding settings of a job: those of the model with `changes`.

    Raises ConfigError where they contradict each other, or may mean something else on each machine.
    """
    decoding = change_section(own, changes, "decoding")
    if decoding.precision == "auto":
        raise ConfigError(
            "`decoding.precision: auto` may mean something else on each machine that takes part: name the "
            "precision, `precision=float32` or `bfloat16`"
        )
    return decoding


def _shortlist(decoding: DecodingConfig, served: Path | None) -> Path | None:
    """Return the file of the shortlist that a search uses: that of an export lies in its folder, `served`."""
    if decoding.shortlist is None:
        return None
    return Path(decoding.shortlist).expanduser() if served is None else served / EXPORT_SHORTLIST


def _identity(experiment: Experiment, weights: str, directory: Path) -> dict[str, str]:
    """Return the fingerprints of a model's weights, which are `weights`, architecture and vocabularies."""
    # By content, since a run may have been trained further and folders may be renamed.
    vocabularies = sorted(
        path for path in directory.iterdir() if path.name == "vocabulary.json" or path.suffix in (".spm", ".vocab")
    )
    architecture = json.dumps(experiment.model.model_dump(mode="json"), sort_keys=True)
    return {
        "weights": weights,
        "architecture": xxhash.xxh3_128_hexdigest(architecture.encode()),
        "vocabulary": xxhash.xxh3_128_hexdigest("".join(fingerprint(path) for path in vocabularies).encode()),
    }


@lru_cache(maxsize=1)
def opened(choice: ModelChoice) -> TextTranslator:
    """Open the models, once in a worker's life: it works for one job.

    Raises CheckpointError for other weights than `choice` says: those of a run that is being trained, for example;
    DataError for another shortlist.
    """
    torch.set_num_threads(choice.threads)
    served = export_folder(choice.engine, choice.models, which=choice.which, without_layers=choice.without_layers)
    translator: TextTranslator
    if served is not None:
        translator = CTranslate2Translator(served, device=choice.device, threads=choice.threads, **choice.decoding)
        found = [fingerprint(served / EXPORT_FILE)]
    else:
        translator = load_translator(
            choice.models,
            which=choice.which,
            without_layers=choice.without_layers,
            device=choice.device,
            **choice.decoding,
        )
        # After they are read, so that a file that is replaced meanwhile is noticed.
        found = [weights_fingerprint(locate_weights(Path(path), choice.which)[0]) for path in choice.models]
    for path, weights, known in zip(choice.models, found, choice.weights, strict=False):
        if weights != known:
            raise CheckpointError(
                f"{path}: its weights changed after the job had begun; name a checkpoint that stays (`--which N`), "
                "and another folder"
            )
    listed = None if choice.shortlist is None else _shortlist(translator.decoding, served)
    if listed is not None and fingerprint(listed) != choice.shortlist:
        raise DataError(f"{listed}: this shortlist changed after the job had begun; name another folder")
    return translator
