"""Models that `import` does not read: known by the names of their files and parameters, and refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ziggurat.system.errors import DataError, ExportError, printable
from ziggurat.system.files import folder_kind

_CONVERTED = "`ziggurat translate` runs what `{}` makes of it"
_RETRAIN = "let {} translate a corpus, and train a model here on that (docs/students.md)"

_WAYS = {
    "OpenNMT-py": f"{_CONVERTED.format('ct2-opennmt-py-converter')}; or {_RETRAIN.format('OpenNMT-py')}",
    "OpenNMT-tf": f"{_CONVERTED.format('ct2-opennmt-tf-converter')}; or {_RETRAIN.format('OpenNMT-tf')}",
    "OpenNMT of Lua": "its toolkit is no longer kept; train a model here on the corpus that it was trained on",
    "CTranslate2": "`ziggurat translate` translates with it as it is (docs/export.md); import the model that it was "
    "converted from, if that is of fairseq, Marian or transformers",
}
"""Ways out for another toolkit's model; for the others _RETRAIN."""

_MODULES = {
    "onmt": "OpenNMT-py",
    "torchtext": "OpenNMT-py",
    "eole": "Eole",
    "joeynmt": "JoeyNMT",
    "sockeye": "Sockeye",
    "fairseq2": "fairseq2",
    "nemo": "NeMo",
    "pytorch_lightning": "PyTorch Lightning",
    "tensor2tensor": "Tensor2Tensor",
}
"""Python packages whose objects a pickle may hold -> toolkit."""

_TENSORFLOW = re.compile(r".*\.(index|meta|pb|data-\d{5}-of-\d{5})")


def refusal_of(path: Path, toolkit: str) -> ExportError:
    """Return the error for a model of `toolkit` in the file or folder `path`, with the way out."""
    way = _WAYS.get(toolkit) or _RETRAIN.format(toolkit)
    return ExportError(f"{path}: a model of {toolkit}, which `import` does not read; {way}")


def toolkit_of_class(name: str) -> str | None:
    """Return the toolkit whose objects are of the class `name`, such as `onmt.inputters.TextField`; None: unknown."""
    return _MODULES.get(name.partition(".")[0])


def refuse_checkpoint(path: Path, content: Any) -> None:
    """Raise ExportError if `content`, read from the pickle `path`, is a checkpoint of a toolkit other than fairseq."""
    if not isinstance(content, Mapping):
        return
    keys = {key for key in content if isinstance(key, str)}
    weights = content.get("model")
    names = {key for key in weights if isinstance(key, str)} if isinstance(weights, Mapping) else set()
    for toolkit, known in _CHECKPOINTS.items():
        if known(keys, names):
            raise refusal_of(path, toolkit)


def _any(names: set[str], *beginnings: str) -> bool:
    return any(name.startswith(beginnings) for name in names)


_CHECKPOINTS: dict[str, Callable[[set[str], set[str]], bool]] = {
    "OpenNMT-py": lambda keys, names: (
        {"generator", "opt"} <= keys or _any(names, "encoder.embeddings.make_embedding", "encoder.transformer.")
    ),
    "JoeyNMT": lambda keys, names: "model_state" in keys,
    "Sockeye": lambda keys, names: _any(keys, "embedding_source.", "decoder.layers.0.autoregr_layer"),
    "fairseq2": lambda keys, names: "fs2" in keys or _any(names, "encoder_frontend.", "decoder_frontend."),
    "PyTorch Lightning": lambda keys, names: {"state_dict", "pytorch-lightning_version"} <= keys,
    "transformers, without its folder,": lambda keys, names: _any(keys, "model.encoder.", "model.shared.weight"),
    "torch.nn.Transformer, without a toolkit,": lambda keys, names: _any(keys, "transformer.encoder.layers."),
}
"""Toolkit -> whether it writes a pickle with these keys, and under `model` these parameters."""


def refuse_folder(folder: Path) -> None:
    """Raise ExportError for a folder with another toolkit's model, DataError where another path is to be named.

    Of exports only those for transformers, with their config.json, are read.
    """
    names = {path.name for path in folder.iterdir()}
    ours = "config.yaml" in names or ("export.json" in names and "config.json" not in names)
    if ours and (kind := folder_kind(folder)):
        raise DataError(f"{folder}: no model of another toolkit, but {kind}")
    vocabularies = ("shared_vocabulary", "source_vocabulary", "target_vocabulary", "source_1_vocabulary")
    if "model.bin" in names and _any(names, *vocabularies):
        raise refusal_of(folder, "CTranslate2")
    if "config.json" in names:
        if any(re.fullmatch(r"model\.\d\d\.safetensors", name) for name in names):
            raise refusal_of(folder, "Eole")
        return
    if _any(names, "params.best", "params.0") and "config" in names:
        raise refusal_of(folder, "Sockeye")
    if "saved_model.pb" in names or any(map(_TENSORFLOW.fullmatch, names)):
        raise refusal_of(folder, _of_tensorflow(names))
    if checkpoints := sorted(name for name in names if name.endswith((".pt", ".ckpt"))):
        raise DataError(f"{folder}: name the checkpoint itself, such as {folder / printable(checkpoints[0])}")


def refuse_file(path: Path) -> None:
    """Raise ExportError for a file of another toolkit, by its name, DataError where another path is to be named."""
    name = path.name
    beside = {entry.name for entry in path.parent.iterdir()} if path.parent.is_dir() else set()
    # TensorFlow's own tools name the stem of a checkpoint's files, which is no file.
    files = {name} if path.exists() else {one for one in beside if one.startswith(f"{name}.")}
    if any(map(_TENSORFLOW.fullmatch, files)):
        raise refusal_of(path, _of_tensorflow(beside))
    if re.fullmatch(r"params\.(best|\d+)|.*\.params", name):
        raise refusal_of(path, "Sockeye")
    if name.endswith(".t7"):
        raise refusal_of(path, "OpenNMT of Lua")
    if name.endswith(".nemo"):
        raise refusal_of(path, "NeMo")
    if name.endswith((".h5", ".hdf5", ".keras", ".onnx", ".gguf")):
        raise ExportError(f"{path}: a model as Keras, ONNX or llama.cpp store it, which `import` does not read")
    if name.endswith(".safetensors"):
        raise DataError(f"{path}: name its folder, which has config.json and the vocabulary as well")
    if re.fullmatch(r".*\.(tar|tgz|zip|7z)|.*\.tar\.\w+", name):
        raise DataError(f"{path}: an archive; unpack it, and name the checkpoint or the folder that was in it")


def _of_tensorflow(names: set[str]) -> str:
    """Return the toolkit that wrote a checkpoint of TensorFlow beside files of these names."""
    if _any(names, "hparams.", "flags", "model.ckpt", "t2t"):
        return "Tensor2Tensor"
    return "OpenNMT-tf" if _any(names, "ckpt", "avg", "model_description") else "TensorFlow"
