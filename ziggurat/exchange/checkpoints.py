"""Checkpoints of other toolkits: recognised and refused, or read as pickles without running any code."""

from __future__ import annotations

import pickle
import re
import struct
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ziggurat.system.errors import DataError, ExportError, ZigguratError, out_of_memory, printable, refuse_passing
from ziggurat.system.files import folder_kind
from ziggurat.system.small_files import check_regular

_CONVERTED = "`ziggurat translate` runs what `{}` turns it into"
_RETRAIN = "let {} translate a corpus, and train a model here on that (docs/students.md)"

_WAYS = {
    "OpenNMT-py": f"{_CONVERTED.format('ct2-opennmt-py-converter')}; or {_RETRAIN.format('OpenNMT-py')}",
    "OpenNMT-tf": f"{_CONVERTED.format('ct2-opennmt-tf-converter')}; or {_RETRAIN.format('OpenNMT-tf')}",
    "OpenNMT of Lua": "its toolkit is no longer maintained; train a model here on the same corpus",
    "CTranslate2": "`ziggurat translate` translates with it as it is (docs/export.md); import the model that it was "
    "converted from, if that is one of fairseq, Marian or transformers",
}
"""Ways out for another toolkit's model; toolkits not listed here get _RETRAIN."""

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
"""Python packages whose objects a pickle may contain -> toolkit."""

_TENSORFLOW = re.compile(r".*\.(index|meta|pb|data-\d{5}-of-\d{5})")


def refusal_of(path: Path, toolkit: str) -> ExportError:
    """Return the error for a model of `toolkit` in the file or folder `path`, with a remedy."""
    way = _WAYS.get(toolkit) or _RETRAIN.format(toolkit)
    return ExportError(f"{path}: a model of {toolkit}, which `import` does not read; {way}")


def toolkit_of_class(name: str) -> str | None:
    """Return the toolkit that defines the class `name`, such as `onmt.inputters.TextField`; None if unknown."""
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
"""Toolkit -> whether a pickle with these keys, and with these parameter names under `model`, was written by it."""


def refuse_folder(folder: Path) -> None:
    """Raise ExportError for a folder with another toolkit's model, DataError if the user should name another path.

    The only exports that are read are those for transformers, recognised by their config.json.
    """
    names = {path.name for path in folder.iterdir()}
    ours = "config.yaml" in names or ("export.json" in names and "config.json" not in names)
    if ours and (kind := folder_kind(folder)):
        raise DataError(f"{folder}: not a model of another toolkit, but {kind}")
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
    beside = printable(", ".join(sorted(names)), 200) or "nothing"
    raise DataError(f"{folder}: not a model: neither transformers' config.json nor a Marian .npz file; it has {beside}")


def refuse_file(path: Path) -> None:
    """Raise ExportError if a file's name is that of another toolkit's model, DataError if another path is needed."""
    name = path.name
    beside = {entry.name for entry in path.parent.iterdir()} if path.parent.is_dir() else set()
    # TensorFlow's own tools refer to a checkpoint by the stem of its files, which is not a file itself.
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
        raise ExportError(f"{path}: a model in a format of Keras, ONNX or llama.cpp, which `import` does not read")
    if name.endswith(".safetensors"):
        raise DataError(f"{path}: name its folder, which has config.json and the vocabulary as well")
    if re.fullmatch(r".*\.(tar|tgz|zip|7z)|.*\.tar\.\w+", name):
        raise DataError(f"{path}: an archive; unpack it, and name the checkpoint or the folder that was in it")


def _of_tensorflow(names: set[str]) -> str:
    """Return the toolkit that wrote a TensorFlow checkpoint with files of these names next to it."""
    if _any(names, "hparams.", "flags", "model.ckpt", "t2t"):
        return "Tensor2Tensor"
    return "OpenNMT-tf" if _any(names, "ckpt", "avg", "model_description") else "TensorFlow"


def load_pickled(path: Path, what: str, *, classes: Sequence[type] = (), packages: Sequence[str] = ()) -> Any:
    """Return the content of a torch.save file, with tensors on the CPU, and warn that it is a pickle.

    Args:
        path: the file, as zip or in the format before torch 1.6.
        what: description of the expected content, for messages.
        classes: classes allowed in addition to tensors and plain values.
        packages: packages, and names of Python's built-in types, whose objects are allowed and are read as Values.

    Raises:
        DataError: the content is different, or the file is not of this kind.
        ExportError: it contains objects of another toolkit.
        MachineError: it cannot be read now, for a reason unrelated to its content.
    """
    _refuse_packed(path)
    warnings.warn(
        f"{path} is a pickle, read by torch.load(weights_only=True), which runs no code from it; import only "
        "checkpoints from people you trust",
        UserWarning,
        stacklevel=3,
    )
    allowed: list[Any] = list(classes)
    try:
        while True:
            try:
                with torch.serialization.safe_globals(allowed):
                    return torch.load(path, map_location="cpu", weights_only=True)
            except pickle.UnpicklingError as error:
                # torch stops at the first unknown class.
                found = _CLASS.search(str(error))
                if found is None or found[1].partition(".")[0] not in packages or len(allowed) > _MOST_CLASSES:
                    raise _unpickled(path, what, None if found is None else found[1]) from None
                # torch omits the module of built-in types.
                modules = ("",) if "." in found[1] else ("builtins.", "__builtin__.")
                allowed += [(Values, module + found[1]) for module in modules]
    except _DAMAGE as error:
        if out_of_memory(error):  # a RuntimeError from torch
            raise
        refuse_passing(path, error)
        said = printable(str(error).partition("\n")[0], 200)
        raise DataError(f"{path}: damaged, or not written by torch.save ({type(error).__name__}: {said})") from None


_DAMAGE = (
    OSError,
    RuntimeError,
    EOFError,
    AttributeError,
    AssertionError,
    LookupError,
    TypeError,
    ValueError,
    struct.error,
)
"""Errors that torch raises for a damaged pickle, depending on where the damage is."""

_CLASS = re.compile(r"GLOBAL (\S+) was not an allowed global")
_MOST_CLASSES = 50


class Values:
    """An object in a pickle whose attributes are read without loading its class."""

    def __init__(self, *_arguments: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        """Keep the attributes; a state in any other form is ignored."""
        if isinstance(state, dict):
            self.__dict__.update({key: value for key, value in state.items() if isinstance(key, str)})


def _unpickled(path: Path, what: str, name: str | None) -> ZigguratError:
    """Return the error for a pickle with an object of the class `name`; None: with content that is not a pickle."""
    if name is None:
        return DataError(f"{path}: holds more than {what}, or was not written by torch.save, so it is not read")
    if (toolkit := toolkit_of_class(name)) is not None:
        return refusal_of(path, toolkit)
    return DataError(
        f"{path}: holds more than {what}, so it is not read: an object of {printable(name)}, which only the toolkit "
        "that wrote it should load. Save it there again with torch.save, with options as a dict"
    )


def _refuse_packed(path: Path) -> None:
    """Raise DataError if the file is missing, or if it is a compressed zip file, which torch never writes.

    A few kilobytes of a compressed file could unpack to fill the whole memory.
    """
    try:
        size = check_regular(path)
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as packed:
                if sum(entry.file_size for entry in packed.infolist()) > size:
                    raise DataError(f"{path}: a compressed zip file, not a checkpoint as torch writes it")
    except (FileNotFoundError, zipfile.BadZipFile, NotImplementedError, ValueError) as error:  # ValueError: bad names
        raise DataError(f"{path}: damaged, or not written by torch.save ({error})") from None


def tensors_of(path: Path, content: object) -> dict[str, Tensor]:
    """Return the named tensors that the file `path` held. Raises DataError for any other content."""
    if not isinstance(content, Mapping) or not all(isinstance(key, str) for key in content):
        raise DataError(f"{path}: not the weights of a model (names and tensors)")
    for key, tensor in content.items():
        # A view may repeat one number a billion times; copying it would fill the memory.
        if not isinstance(tensor, Tensor) or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise DataError(f"{path}: parameter {printable(key)} is not a tensor that the file holds")
    return dict(content)
