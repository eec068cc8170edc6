"""Counts of a model's parameters by part, before it is trained and without allocating any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import nn

from ziggurat.config import Experiment, ModelConfig
from ziggurat.config.data import DataConfig
from ziggurat.config.notices import unread_files
from ziggurat.config.reference import Method, methods_in_use
from ziggurat.data.corpus import read_manifest
from ziggurat.data.store_checks import unlike_store
from ziggurat.data.subword import Tokenizer, load_tokenizers
from ziggurat.data.subword_training import existing_tokenizers
from ziggurat.model.build import assemble, count_parameters
from ziggurat.model.directory import refuse_two_vocabularies
from ziggurat.model.seq2seq import Seq2Seq
from ziggurat.system.errors import ConfigError
from ziggurat.system.files import MANIFEST

_PART = {"source_embedding": "embeddings", "target_embedding": "embeddings"}
# Keys of `data` on which the vocabularies depend, besides the text.
_VOCABULARY = ("data.subword", "data.unicode")


@dataclass(frozen=True)
class VocabularySizes:
    """Numbers of tokens, including control symbols and tags; `origin` describes where they were read from."""

    source: int
    target: int
    origin: str
    joint: bool = False


@dataclass(frozen=True)
class Inspection:
    """The size of the model of a configuration, and the published methods that it uses.

    Attributes:
        parameters: values that are trained; a shared matrix counts once.
        parts: parameters by part: embeddings, encoder, decoder, output; a shared matrix counts at its first occurrence.
        layers: encoder and decoder layers.
        layer_parameters: values in the topmost layer of the encoder and of the decoder.
    """

    parameters: int
    parts: Mapping[str, int]
    layers: Mapping[str, int]
    layer_parameters: Mapping[str, int]
    vocabulary: VocabularySizes
    methods: tuple[Method, ...]


def inspect_experiment(experiment: Experiment, folder: Path | None = None) -> Inspection:
    """Return the inspection of `experiment`; `folder` is the run or model directory it comes from, if any.

    Raises ConfigError and DataError as vocabulary_sizes and build_model do.
    """
    tokenizers, origin = _vocabularies(experiment.data, folder)
    if tokenizers is not None and folder is None:  # a trained model is shown unchanged
        refuse_two_vocabularies(experiment.model, *tokenizers)
    sizes = _sizes(experiment.data, tokenizers, origin)
    model = bare_model(experiment.model, sizes.source, sizes.target)
    stacks = {side: cast(nn.ModuleList, getattr(model, side).layers) for side in ("encoder", "decoder")}
    return Inspection(
        parameters=count_parameters(model),
        parts=parts(model),
        layers={side: len(layers) for side, layers in stacks.items()},
        layer_parameters={side: count_parameters(layers[-1]) for side, layers in stacks.items()},
        vocabulary=sizes,
        methods=tuple(methods_in_use(experiment)),
    )


def vocabulary_sizes(data: DataConfig, folder: Path | None = None) -> VocabularySizes:
    """Return the sizes of the vocabularies, from the first of these sources that exists.

    The run or model directory `folder`; the store, if it was made with the vocabularies that `data` requests; the files
    that `data.subword` names, or the sizes it requests (a model trained on a small corpus may have fewer). Raises
    DataError: a folder or file that cannot be read.
    """
    return _sizes(data, *_vocabularies(data, folder))


def _vocabularies(data: DataConfig, folder: Path | None) -> tuple[tuple[Tokenizer, Tokenizer] | None, str]:
    """Return the tokenizers, None if they are still to be trained, and a description of where they were read from."""
    if folder is not None:
        return load_tokenizers(folder), str(folder)
    store = Path(data.store).expanduser()
    stale = ""
    if (store / MANIFEST).is_file():
        if not any(difference.startswith(_VOCABULARY) for difference in unlike_store(data, read_manifest(store))):
            return load_tokenizers(store), str(store)
        stale = f"; {store} was prepared with others"
    if data.subword.kind in ("existing", "vocabulary"):
        return existing_tokenizers(data.subword, data.unicode, _tags(data)), f"the files of data.subword{stale}"
    if unread := unread_files(data.subword):
        raise ConfigError(unread[0])
    return None, f"data.subword{stale}"


def _sizes(data: DataConfig, tokenizers: tuple[Tokenizer, Tokenizer] | None, origin: str) -> VocabularySizes:
    if tokenizers is not None:
        source, target = tokenizers
        return VocabularySizes(source.size, target.size, origin, joint=source is target)
    subword = data.subword
    size = subword.vocabulary_size + len(_tags(data))
    if subword.joint:
        return VocabularySizes(size, size, origin, joint=True)
    return VocabularySizes(size, subword.target_vocabulary_size or subword.vocabulary_size, origin)


def _tags(data: DataConfig) -> list[str]:
    return list(dict.fromkeys(corpus.tag for corpus in (*data.train, *data.dev) if corpus.tag is not None))


def bare_model(config: ModelConfig, source_vocabulary: int, target_vocabulary: int) -> Seq2Seq:
    """Return the model on torch's meta device: every shape and name, no values, no memory.

    Raises ConfigError as build_model does.
    """
    with torch.device("meta"):
        return assemble(config, source_vocabulary, target_vocabulary)


def parts(model: Seq2Seq) -> dict[str, int]:
    """Return the number of parameters of embeddings, encoder, decoder and output; their sum is the model's."""
    found = {"embeddings": 0, "encoder": 0, "decoder": 0, "output": 0}
    for name, parameter in model.named_parameters():
        top = name.partition(".")[0]
        found[_PART.get(top, top)] += parameter.numel()
    return found
