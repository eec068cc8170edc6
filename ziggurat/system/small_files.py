"""Safe reading of small, possibly untrusted files: regular files of bounded size, JSON of bounded depth.

No file can make a reader hang (a pipe, a device), exhaust memory, or fail without being named in the message. The
caller chooses the class of errors, which report the file, the key and a remedy. Path checks come first, then bytes,
JSON and its forms, JSON lines, and deterministic safetensors files.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from ziggurat.system.errors import ConfigError, DataError, Problem, ZigguratError, printable, refuse_passing

MAX_BYTES = 1 << 24
"""MAX_BYTES (16 MiB) limits a document or a line of JSON lines. The largest real ones are vocabularies of 250,000
pieces, about 8 MB. Parsed, `[[],[],` takes 25 times its size, so no document takes more than 400 MB of memory."""

MAX_DEPTH = 64

MAX_POINTER_BYTES = 1024
"""MAX_POINTER_BYTES limits a pointer file, according to the specification of Git LFS."""

_POINTERS = {
    b"version https://git-lfs.github.com/spec/": ("Git LFS", "git lfs pull"),
    b"version https://hawser.github.com/spec/": ("Git LFS", "git lfs pull"),  # its name until 2014
    b"/annex/objects/": ("git-annex", "git annex get"),
}
"""_POINTERS maps the first bytes of a pointer file in a Git repository to its writer and the fetch command."""

Shape = TypeVar("Shape", bound=BaseModel)
Taken = TypeVar("Taken")


class JsonForm(BaseModel):
    """Base class for JSON objects: declared keys are checked without type conversion, others ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


def check_name(path: Path) -> None:
    """Raise ConfigError for a path that is not UTF-8: Linux allows such names, but several libraries do not."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{path}: its name, or that of a folder above it, is not UTF-8; rename it") from None


def check_regular(path: Path, *, error: type[ZigguratError] = DataError) -> int:
    """Return the size of the regular file `path` in bytes.

    Raises FileNotFoundError if it does not exist, and `error` for a folder, pipe, device, inaccessible path or Git LFS
    pointer file.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        raise
    except NotADirectoryError:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
    except (OSError, ValueError) as problem:  # ValueError: NUL in a name
        refuse_passing(path, problem)
        raise error(f"{path}: cannot be read: {getattr(problem, 'strerror', None) or problem}") from None
    if not stat.S_ISREG(found.st_mode):
        what = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe, device or socket"
        raise error(f"{path}: is {what}, not a regular file")
    if 0 < found.st_size <= MAX_POINTER_BYTES:
        with contextlib.suppress(OSError):  # reading it later reports why it cannot be read
            refuse_pointer(path, path.read_bytes(), error=error)
    return found.st_size


def check_opens(path: Path | str) -> None:
    """Open and close a file, for libraries that report every file they cannot open as missing (safetensors).

    Raises OSError with the reason, DataError for a Git LFS pointer file.
    """
    with Path(path).open("rb") as file:
        refuse_pointer(path, file.read(MAX_POINTER_BYTES + 1))


def refuse_pointer(path: Path | str, start: bytes, *, error: type[ZigguratError] = DataError) -> None:
    """Raise `error` if a file that starts with `start` is a pointer file of Git LFS or git-annex.

    `start` is the whole file, or its first MAX_POINTER_BYTES + 1 bytes. A repository cloned or downloaded without its
    large files contains such short texts instead.
    """
    if len(start) > MAX_POINTER_BYTES:
        return
    for beginning, (writer, command) in _POINTERS.items():
        if start.startswith(beginning):
            raise error(
                f"{path}: a pointer of {writer}, not the file itself, which was not downloaded: run `{command}` in "
                "its repository, or download the file again"
            )


def inside(folder: Path, name: str, *, error: type[ZigguratError] = DataError) -> Path:
    """Return the path of the file that a document in `folder` calls `name`.

    Raises `error` for a name with folders in it, or a link that leads outside the folder: otherwise an untrusted folder
    could get a private file copied into the output.
    """
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        raise error(f"{folder}: lists {printable(name)!r} among its files, which is not in it")
    path, home = folder / name, Path(os.path.realpath(folder))
    # Snapshots in Hugging Face's cache consist of links to the folder `blobs` next to them.
    allowed = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
    where = Path(os.path.realpath(path))
    if not any(where.is_relative_to(place) for place in allowed):
        raise error(f"{path}: is a link to {where}, outside its folder; if that is intended, copy the file there")
    return path


def read_bounded(
    path: Path, limit: int = MAX_BYTES, *, error: type[ZigguratError] = DataError, piped: bool = False
) -> bytes:
    """Return the content of a regular file of at most `limit` bytes; `piped`: it may also be a pipe or device.

    Raises FileNotFoundError if there is no file, `error` for everything else.
    """
    if not piped:
        check_regular(path, error=error)
    extra = 0 if piped else os.O_NONBLOCK  # a pipe may have replaced the file since: opening it must not wait
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | extra)) as file:
            if not piped and not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise error(f"{path}: is not a regular file")
            content = file.read(limit + 1)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as problem:
        refuse_passing(path, problem)
        raise error(f"{path}: cannot be read: {getattr(problem, 'strerror', None) or problem}") from None
    if len(content) > limit:
        raise error(f"{path}: larger than {limit / (1 << 20):g} MiB, which is too much for a file of this kind")
    return content


def parse_json(content: bytes, name: str, *, error: type[ZigguratError] = DataError, remedy: str = "") -> Any:
    """Return the JSON value in `content`, which errors call `name`; `remedy` is what they suggest.

    Raises `error` if it is not UTF-8, not JSON, nested deeper than MAX_DEPTH, or has text that is not Unicode.
    """
    try:
        document = json.loads(content.decode("utf-8"))
    except RecursionError:
        raise error(Problem("", f"{name}: damaged (nested too deeply)", remedy)) from None
    except ValueError as problem:
        raise error(Problem("", f"{name}: damaged ({printable(str(problem), 120)})", remedy)) from None
    if _is_deeper(document, MAX_DEPTH):
        raise error(Problem("", f"{name}: damaged (nested too deeply)", remedy))
    if b"\\ud" in content.lower() and (lone := _lone_surrogate(document)):  # such text could not be written again
        raise error(Problem("", f"{name}: {lone} has half of a character (\\ud800 to \\udfff come in pairs)", remedy))
    return document


_SURROGATE = re.compile("[\ud800-\udfff]")


def _lone_surrogate(document: Any) -> str | None:
    """Return the location, in words, of the first string in a JSON value that is not Unicode; None if there is none."""
    waiting: list[tuple[tuple[str, ...], Any]] = [((), document)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [part for key in reversed(value) for part in (((*path, key), value[key]), ((*path, key), key))]
        elif isinstance(value, list):
            waiting += [((*path, str(number)), part) for number, part in reversed(list(enumerate(value)))]
        elif isinstance(value, str) and _SURROGATE.search(value):
            return f"`{printable('.'.join(path), 120)}`" if path else "its text"
    return None


def _is_deeper(document: Any, limit: int) -> bool:
    layer = [document]  # level by level: a recursive function would itself overflow the stack
    for _ in range(limit + 1):
        containers = [part for part in layer if isinstance(part, dict | list)]
        if not containers:
            return False
        layer = [x for part in containers for x in (part.values() if isinstance(part, dict) else part)]
    return True


def shaped(
    document: Any, form: type[Shape], name: str, *, error: type[ZigguratError] = DataError, remedy: str = ""
) -> Shape:
    """Return `document` as the form `form`. Raises `error`, which names up to three missing or wrong keys."""
    try:
        return form.model_validate(document)
    except ValidationError as problem:
        said = "; ".join(_said(fault) for fault in problem.errors()[:3])
        raise error(Problem("", f"{name}: {said}", remedy)) from None


def _said(fault: Any) -> str:
    """Return pydantic's complaint about a key, reworded."""
    key = printable(".".join(map(str, fault["loc"])), 120)
    if fault["type"] == "missing":
        return f"no `{key}`"
    if fault["type"] == "value_error" and not key:
        return str(fault["msg"]).removeprefix("Value error, ")
    if not key:
        wanted = "a list" if fault["type"] == "list_type" else "an object of keys"
        return f"not {wanted} but {type(fault['input']).__name__}"
    message = fault["msg"].removeprefix("Value error, ")
    given = fault["input"]
    shown = type(given).__name__ if isinstance(given, dict | list) else printable(repr(given)[:200], 60)
    return f"`{key}`: {message[0].lower()}{message[1:]}, not {shown}"


def built(kind: type[Taken], document: Any) -> Taken:
    """Return the dataclass `kind` made from `document`, whose keys must be its fields, with their types.

    Raises ValueError (pydantic's) for other keys or types.
    """
    form: Any = kind  # mypy takes a class for something without a hash
    checked = _model_of(form).model_validate(document)
    return kind(**{name: getattr(checked, name) for name in type(checked).model_fields})


@cache
def _model_of(kind: Any) -> type[BaseModel]:
    """Return a model with the fields of a dataclass: in strict mode, pydantic itself accepts no mapping for one."""
    types = get_type_hints(kind, include_extras=True)
    given: dict[str, Any] = {f.name: (types[f.name], ... if f.default is MISSING else f.default) for f in fields(kind)}
    return create_model(kind.__name__, __config__=ConfigDict(strict=True, extra="forbid"), **given)


def read_json(path: Path, form: type[Shape], *, error: type[ZigguratError] = DataError, remedy: str = "") -> Shape:
    """Return the JSON object in the file `path` as the form `form`.

    Raises FileNotFoundError if there is no file, and `error`, ending with `remedy`, for everything else.
    """
    document = parse_json(read_bounded(path, error=error), str(path), error=error, remedy=remedy)
    return shaped(document, form, str(path), error=error, remedy=remedy)


def read_json_lines(path: Path, take: Callable[[Any, str], Taken], what: str) -> Iterator[Taken]:
    """Yield `take(document, place)` for each line; nothing if there is no file.

    A damaged last line without LF is skipped, because its writer was killed while writing it. `take` raises ValueError,
    KeyError, TypeError, AttributeError or OverflowError for a line that is not `what`, such as `a record of a run`;
    `place` is the file and line. Raises DataError with both for any other damaged line, or one longer than MAX_BYTES.
    """
    if not path.exists():
        return
    check_regular(path)
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_BYTES + 1), b""), start=1):
            place = f"{path}, line {number}"
            if len(line) > MAX_BYTES:
                raise DataError(f"{place}: longer than {MAX_BYTES >> 20} MiB; remove the line")
            try:
                taken = take(parse_json(line, place, error=_NoJsonError), place)
            except (_NoJsonError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
                if not line.endswith(b"\n"):
                    return
                shown = printable(line[:400].decode("utf-8", "replace").rstrip("\n"))
                raise DataError(f"{place}: damaged, not {what}: {shown}; remove the line") from None
            yield taken


class _NoJsonError(ZigguratError):
    """Raised for a line that is not JSON."""


def json_safe(value: Any) -> Any:
    """Return `value` with None instead of every number that JSON lacks: NaN and infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: json_safe(part) for key, part in value.items()}
    return [json_safe(part) for part in value] if isinstance(value, list | tuple) else value


def read_arrays(path: Path, form: str, what: str, again: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Return metadata and numpy arrays of a safetensors file whose metadata give its `format` as `form`.

    Raises FileNotFoundError if there is no file. Raises DataError, which calls it `what` and ends with `again` (the way
    out), if it is damaged or has another format. Files from before checksums were introduced have none.
    """
    from safetensors import SafetensorError, safe_open  # imports numpy, which would delay error messages

    try:
        check_opens(path)
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError) as error:
        refuse_passing(path, error)
        raise DataError(f"{path}: damaged, or no {what} ({error}); {again}") from None
    if metadata.get("format") != form:
        raise DataError(f"{path}: no {what} that this version of ziggurat reads ({form}); {again}")
    checksum = metadata.pop("checksum", None)
    if checksum is not None and checksum != _checksum(arrays, metadata):
        raise DataError(f"{path}: damaged (wrong checksum); {again}")
    return metadata, arrays


def _checksum(arrays: Mapping[str, Any], metadata: Mapping[str, str]) -> str:
    """Return the checksum of numpy arrays with their names, types and shapes, and of the other metadata."""
    digest = xxhash.xxh3_128(json.dumps(dict(metadata), sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def arrays_content(arrays: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    """Return numpy arrays as a safetensors file with a checksum.

    The bytes are the same every time, although the library's order of metadata is not.
    """
    from safetensors.numpy import save

    content: bytes = save(dict(arrays), {**metadata, "checksum": _checksum(arrays, metadata)})
    end = 8 + int.from_bytes(content[:8], "little")  # the header, as JSON, follows its length in 8 bytes
    text = json.dumps(json.loads(content[8:end]), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors stay aligned
    return len(text).to_bytes(8, "little") + text + content[end:]
