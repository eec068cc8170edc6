"""Files of Marian: weights with their options inside, vocabularies as YAML, JSON or text, `decoder.yml`.

Weights are `.npz` or binary files (ziggurat.exchange.marian_binary).

An .npz file is a zip of arrays. They are read here rather than by numpy.load, so that each header is compared with its
entry before memory is allocated for it; nothing is unpickled.
"""

from __future__ import annotations

import io
import lzma
import re
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ziggurat.exchange.agreement import Unmatched
from ziggurat.exchange.firefox_files import FIREFOX_SEARCH, is_published, packed_or_not, published_vocabularies
from ziggurat.exchange.imported import plain_suffix, read_file
from ziggurat.exchange.marian_binary import MOST_UNPACKED, OPTIONS_ENTRY, SCALE_OF_INPUT, is_binary_model, read_binary
from ziggurat.system.errors import DataError, ExportError, printable, refuse_passing
from ziggurat.system.small_files import check_regular, inside, parse_json
from ziggurat.system.yaml_text import MAX_YAML_BYTES, parse_yaml

Array = NDArray[Any]

ACTIVATIONS = {"relu": "relu", "swish": "silu", "gelu": "gelu"}
"""ACTIVATIONS maps Marian's names of activations to ziggurat's."""


_YAML = (".yml", ".yaml")


@dataclass(frozen=True)
class MarianWeights:
    """The weights of a model.

    Attributes:
        arrays: parameters by name, in fp32 where they were quantised.
        options: the options with which Marian builds the model.
        quantised: number of matrices of each quantised type.
    """

    arrays: Mapping[str, Array]
    options: Mapping[str, Any]
    quantised: Mapping[str, int]

    @property
    def notes(self) -> tuple[str, ...]:
        """Differences from what Marian has or had, worded for the import's report."""
        found = [
            f"the weights before quantisation ({count:,} matrices of {kind}, each divided by its own scale)"
            for kind, count in self.quantised.items()
        ]
        is_pre_norm = bool({"n", "r"} & set(str(self.options.get("transformer-preprocess") or "")))
        if is_pre_norm and self.options.get("transformer-decoder-autoreg", "self-attention") == "self-attention":
            found.append(
                "Marian's own search of a pre-norm decoder with self-attention, which leaves out a norm that its "
                "training has, so translations differ (docs/export.md)"
            )
        return tuple(found)


def read_weights(path: Path) -> MarianWeights:
    """Return the weights in an .npz or a binary file, and the options inside it.

    Raises DataError if the file has a different format, is damaged, lacks options, or unpacks to more than 16 times its
    size; ExportError for a binary file of an unreadable type.
    """
    arrays, quantised = read_binary(path) if is_binary_model(path) else (_read_npz(path), {})
    if OPTIONS_ENTRY not in arrays:
        raise DataError(f"{path}: has no `{OPTIONS_ENTRY}`, in which Marian keeps a model's options")
    text = arrays.pop(OPTIONS_ENTRY).tobytes().partition(b"\0")[0]
    arrays = {name: array for name, array in arrays.items() if not name.endswith(SCALE_OF_INPUT)}
    return MarianWeights(arrays, _mapping(text, f"{path}: {OPTIONS_ENTRY}"), quantised)


def _read_npz(path: Path) -> dict[str, Array]:
    """Return the arrays of an .npz file by name. Raises DataError: see read_weights."""
    try:
        size = check_regular(path)
        with zipfile.ZipFile(path) as packed:
            entries = packed.infolist()
            if sum(entry.file_size for entry in entries) > MOST_UNPACKED * size:
                raise DataError(
                    f"{path}: unpacks to more than {MOST_UNPACKED} times its size; Marian writes no such file"
                )
            return {entry.filename.removesuffix(".npy"): _array(packed.read(entry)) for entry in entries}
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (OSError, ValueError, EOFError, SyntaxError, NotImplementedError, RuntimeError) as error:
        refuse_passing(path, error)
        raise DataError(f"{path}: damaged, or not a Marian .npz file ({printable(str(error), 120)})") from None
    # numpy treats a header that is not valid Python as Python 2, and tokenises it.
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, tokenize.TokenError) as error:
        raise DataError(f"{path}: damaged, or not a Marian .npz file ({error})") from None


def _array(content: bytes) -> Array:
    """Return the array of an entry. Raises ValueError unless it is an array of plain numbers of the right length."""
    file = io.BytesIO(content)
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"an array of format {version}")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if dtype.kind not in "fiu" or fortran:
        raise ValueError(f"an array of {dtype}, {'column' if fortran else 'row'} by {'column' if fortran else 'row'}")
    if prod(shape) * dtype.itemsize != len(content) - file.tell():
        raise ValueError(f"an array of {list(shape)} in {len(content) - file.tell():,} bytes")
    return np.frombuffer(content, dtype, offset=file.tell()).reshape(shape)


def _mapping(text: bytes, name: str) -> dict[str, Any]:
    try:
        return parse_yaml(text.decode("utf-8"), name)[0]
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: not valid UTF-8 (byte {error.start}, from 0)") from None


def is_marian(path: Path) -> bool:
    """Return True for a Marian model, .npz or binary, and for a folder with one, or with a decoder.yml.

    Transformers folders, recognised by their config.json, do not count.
    """
    if not path.is_dir():
        return path.suffix == ".npz" or (path.name.endswith((".bin", ".bin.gz")) and is_binary_model(path))
    if (path / "config.json").exists():
        return False
    named = any(is_published(file) for file in path.glob("model.*"))
    return (
        named or bool(_models_in(path)) or any(next(path.glob(name), None) for name in ("decoder.yml", "*.decoder.yml"))
    )


def _models_in(folder: Path) -> tuple[Path, ...]:
    """Return the .npz files of a folder; if there is none, the binary models."""
    return tuple(sorted(folder.glob("*.npz"))) or _binary_in(folder)


def _binary_in(folder: Path) -> tuple[Path, ...]:
    return tuple(filter(is_binary_model, packed_or_not(folder, "*.bin")))


@dataclass(frozen=True)
class MarianFiles:
    """The files of one model.

    Attributes:
        weights: the .npz or binary file.
        vocabularies: of source and target, or one for both.
        options: content of decoder.yml (beam size, length normalisation), or Firefox's settings for weights named like
            Firefox's; otherwise empty.
        training: options of the training, which Marian writes next to the weights; empty if they are missing.
        shortlist: the lexical shortlist named in decoder.yml, or the only binary file named like Firefox's.
    """

    weights: Path
    vocabularies: tuple[Path, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    shortlist: Path | None = None


def find_files(path: Path) -> MarianFiles:
    """Return the files of the model in the folder `path`, or of the .npz or binary file `path`.

    Marian writes a `decoder.yml` (or `model.npz.decoder.yml`) that names them. Without one, a folder must hold one
    model, or a final .npz file, and the caller must name the vocabularies unless they are named like Firefox's.

    Raises DataError naming the files that are missing, or that there are too many of.
    """
    folder = path if path.is_dir() else path.parent
    weights = None if folder == path else path
    written = folder / "decoder.yml"
    if weights is None and not written.is_file():
        weights = _final(folder)
    if weights is not None and (own := weights.with_name(f"{weights.name}.decoder.yml")).is_file():
        written = own
    options = _mapping(read_file(written, MAX_YAML_BYTES), str(written)) if written.is_file() else {}
    models, vocabularies = (_names(options.get(key), written) for key in ("models", "vocabs"))
    listed = options.get("shortlist")
    named = listed[:1] if isinstance(listed, list) else []
    shortlists = [inside(folder, PurePosixPath(str(name)).name) for name in named]
    shortlists = shortlists or packed_or_not(folder, "lex.*.bin")
    shortlists = [file for file in shortlists if file.is_file()]
    here = tuple(dict.fromkeys(inside(folder, PurePosixPath(name).name) for name in models))
    if weights is None:
        if len(here) > 1:
            raise DataError(f"{folder}: has {_several([file.name for file in here])}; name the file of one")
        weights = here[0] if here else _final(folder)
    elif weights not in here:
        vocabularies, shortlists = [], [] if here else shortlists
    start = _start(weights, folder, models, options)
    found = tuple(_vocabulary(folder, start, name, written) for name in dict.fromkeys(vocabularies))
    if not options and is_published(weights):
        options = dict(FIREFOX_SEARCH)
    training = weights.with_name(f"{weights.name}.yml")
    said = _mapping(read_file(training, MAX_YAML_BYTES), str(training)) if training.is_file() else {}
    shortlist = shortlists[0] if len(shortlists) == 1 else None
    return MarianFiles(weights, found if here else found or published_vocabularies(folder), options, said, shortlist)


_UNFINISHED = re.compile(r"(?P<final>.+\.npz)\.(best-.+|orig|optimizer)\.npz|(?P<stem>.+)\.iter[0-9]+\.npz")
"""Names of files that Marian saves next to a model: the best by some metric, the state of training, snapshots."""


def _final(folder: Path) -> Path:
    """Return the only model of a folder, ignoring the files that Marian saves next to it in training."""
    models = _models_in(folder)
    names = [file.name for file in models if not file.name.endswith(".optimizer.npz")]
    others = [
        name
        for name in names
        if (said := _UNFINISHED.fullmatch(name)) and (said["final"] or f"{said['stem']}.npz") in names
    ]
    left = [name for name in names if name not in others]
    if len(left) != 1:
        missing = "holds no Marian model" if not left else f"has {_several(left)}; name the file of one"
        raise DataError(f"{folder}: {missing}")
    if others:
        warnings.warn(f"{folder}: {left[0]} is used, the last of its training, not {', '.join(others)}", stacklevel=6)
    if binary := [file.name for file in _binary_in(folder) if file not in models]:
        warnings.warn(
            f"{folder}: {left[0]} is used, whose weights are not rounded, not {', '.join(binary)}", stacklevel=6
        )
    return inside(folder, left[0])


def _several(names: list[str]) -> str:
    return f"{len(names)} models ({printable(', '.join(names), 200)})"


def _names(names: Any, written: Path) -> list[str]:
    if names is None:
        return []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{written}: `models` and `vocabs` are lists of files")
    return names


def _start(weights: Path, folder: Path, models: list[str], options: Mapping[str, Any]) -> Path:
    """Return the folder to which paths in decoder.yml are relative: its own, or the one where Marian was started.

    The latter is known if the path of the weights ends with their path in `models`.
    """
    if options.get("relative-paths"):
        return folder
    place = weights.absolute()
    for name in models:
        parts = PurePosixPath(name).parts
        if place.parts[-len(parts) :] == parts and len(parts) < len(place.parts):
            return place.parents[len(parts) - 1]
    return folder


def _vocabulary(folder: Path, start: Path, name: str, written: Path) -> Path:
    """Return the vocabulary that decoder.yml names: next to the weights, otherwise below `start`."""
    named = PurePosixPath(name)
    beside, below = inside(folder, named.name), start / named
    if beside.is_file() and below.is_file() and beside.samefile(below):
        return beside
    if beside.is_file() or named.is_absolute() or ".." in named.parts or not below.is_file():
        if beside.is_file() and len(named.parts) > 1:
            warnings.warn(f"{written}: names {printable(name)}; {beside} is used", stacklevel=7)
        return beside
    return below


def read_ids(path: Path) -> dict[str, int]:
    """Return a vocabulary's ids by token: .yml or .yaml as Marian writes it, .json, or text with one token per line.

    Raises DataError naming the file and line.
    """
    content = read_file(path)
    kind = plain_suffix(path)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not valid UTF-8 (byte {error.start}, from 0); is it a vocabulary?") from None
    if kind == ".json":
        found = parse_json(content, str(path))
        if not isinstance(found, dict) or not all(type(value) is int and value >= 0 for value in found.values()):
            raise DataError(f"{path}: not a list of ids by token")
        return found
    ids: dict[str, int] = {}
    if kind in _YAML:
        for line, token, number in _entries(text, path):
            ids.setdefault(_whole(token, f"{path}: line {line}"), number)
        return ids
    for line, token in enumerate(text.removesuffix("\n").split("\n"), start=1):
        token = token.removesuffix("\r")
        if token in ids or not token:  # Marian refuses both, since ids are line numbers: later ones would be wrong
            raise DataError(f"{path}: line {line}: {repr(printable(token)) + ' again' if token else 'no token'}")
        ids[token] = len(ids)
    return ids


def unknown_and_end(ids: Mapping[str, int], path: Path) -> tuple[int, int]:
    """Return the ids of the unknown token and of end-of-sentence, which Nematus called `UNK` and `eos`.

    Raises DataError, naming the vocabulary's file `path`, if it lacks one.
    """
    unk, eos = ids.get("<unk>", ids.get("UNK")), ids.get("</s>", ids.get("eos"))
    if unk is None or eos is None:
        raise DataError(f"{path}: has no {'<unk>' if unk is None else '</s>'}; is it the vocabulary of this model?")
    return unk, eos


def refuse_beyond(
    path: Path, vocabularies: Sequence[Path], ids: Sequence[Mapping[str, int]], rows: Sequence[int]
) -> None:
    """Raise ExportError for ids beyond a matrix.

    Args:
        path: file of the weights, for the message.
        vocabularies: files of source and target.
        ids: their ids by token.
        rows: rows of the two matrices.
    """
    reasons = [
        f"{side}: {file} has {max(known.values()) + 1:,} tokens, the model {count:,} rows"
        for side, file, known, count in zip(("source", "target"), vocabularies, ids, rows, strict=True)
        if max(known.values()) >= count
    ]
    if reasons:
        raise ExportError(f"{path}: {'; '.join(dict.fromkeys(reasons))}; is it the vocabulary of this model?")


_BEYOND = "<row_{}>"
"""_BEYOND is the name here of a row beyond the vocabulary."""


def with_every_row(ids: Mapping[str, int], rows: int) -> dict[str, int]:
    """Return the ids with a name for each row beyond them, as a `--dim-vocabs` above the vocabulary's size makes them.

    Label smoothing gives these rows probability, so without them all tokens would have more.
    """
    return {**{_BEYOND.format(row): row for row in range(max(ids.values()) + 1, rows)}, **ids}


def rows_beyond(*sides: Mapping[str, int]) -> list[Unmatched]:
    """Return how many rows with_every_row has named on each side; what holds for both is listed once."""
    what = "rows of a matrix beyond its vocabulary, at which Marian's search fails"
    found = []
    for ids in sides:
        rows = [name for name, row in ids.items() if name == _BEYOND.format(row)]
        found += Unmatched.among(what, rows, max(ids.values()) + 1, most=1.0)
    return list(dict.fromkeys(found))


def _whole(token: str, place: str) -> str:
    """Return a token with each surrogate pair, as JSON escapes it, replaced by the one character that it stands for.

    Raises DataError for half of such a pair; `place` is the file and line.
    """
    try:
        return token.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise DataError(f"{place}: {printable(token)!r} has half of a character that was escaped in two") from None


def _entries(text: str, path: Path) -> Iterator[tuple[int, str, int]]:
    """Yield lines, tokens and ids; YAML itself would read `1` and `01`, or `~` and `null`, as the same key.

    A line is `token: 5`, with the token bare or in quotes, or `? token` followed by `: 5`.
    """
    key: str | None = None
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.rstrip("\r")
        if line.startswith("? "):
            key = line[2:]
            continue
        if not line.strip() or (line in ("---", "...") and key is None):
            continue
        token, _, value = line.rpartition(":")
        if key is not None and not token.strip():
            token = key
        if not re.fullmatch(r" *[0-9]{1,9} *", value) or not token:
            raise DataError(f"{path}: line {number}: {printable(line)!r} is not `token: id`")
        yield number, _unquoted(token.rstrip(" ")), int(value)
        key = None


_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "a": "\a", "v": "\v", "e": "\x1b"}
_ESCAPES |= {"N": "\x85", "_": "\xa0", "L": "\u2028", "P": "\u2029"}
_ESCAPED = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", flags=re.DOTALL)


def _unquoted(token: str) -> str:
    if len(token) >= 2 and token[0] == token[-1] == "'":
        return token[1:-1].replace("''", "'")
    if len(token) >= 2 and token[0] == token[-1] == '"':
        return _ESCAPED.sub(_character, token[1:-1])
    return token


def _character(found: re.Match[str]) -> str:
    code = found[1] or found[2] or found[3]
    if code is None:
        return _ESCAPES.get(found[4], found[4])
    return chr(int(code, 16)) if int(code, 16) < 0x110000 else "\ufffd"
