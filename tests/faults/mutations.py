"""Damage that disks, transfers, editors and enemies do to a file's bytes, determined only by a seed."""

from __future__ import annotations

import copy
import gzip
import io
import json
import os
import random
import re
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

Change = Callable[[random.Random, bytes], bytes]

_PAGE = 4096

_NUMBERS = (0, 1, 2, 7, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)

_TOKENS = (
    *("0", "-1", "1e9", "1e20", "-1e400", "1e400", "NaN", ".nan", "Infinity", "-.inf", "9" * 5000, "9" * 30, "0x10"),
    *("1_000", "1e-320", "9223372036854775808", "18446744073709551616", "100000000000", "0.1", "-0.0", "12:30:45"),
    *("true", "null", "~", "[]", "{}", "''", '""', "[[]]", "{a: b}", "text", "yes", "2001-01-01", "!!binary x", "*a"),
    *("&a [*a]", "!!python/object:os.system x", "<<: *a", "? a", "---", "...", "%YAML 2.0", "|", ">", "\t", "\0"),
    *(
        "\x1b[2J",
        "\ufeff",
        "\u202e",
        "\ud7ff",
        "\uffff",
        "\U0010ffff",
        '"\\ud800"',
        '"\\u0000"',
        "\r",
        "\x85",
        "\u2028",
    ),
    *('"../../../etc/passwd"', '"/dev/zero"', '"/dev/stdin"', '"."', '""', '"a/b"', '"' + "a" * 300 + '"'),
)
_DEEP = (20, 200, 2000, 100_000)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 10**9, 10**20, -(10**20), 2**63, 1e300, -1e-300, float("nan"), float("inf")),
    *("", "x", "0", "1", "\0", "\ud800", "../../etc/passwd", "/dev/zero", "a" * 5000, [], {}, [[]], {"a": {}}, [0, 1]),
    *([-1] * 3, ["a", 1], {"": 0}, [[[[[[[[[]]]]]]]]]),
)
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


def damage(file: Path, seed: int, *, special: bool) -> str:
    """Damage `file` in one way or, rarely, remove it or replace it; return what was done.

    `special`: also use pipes and devices, which nobody expects inside a folder; a user who names one may intend it.
    """
    rng = random.Random(seed)
    if rng.random() < 0.04:
        return _replace(file, rng.randrange(6 if special else 4))
    content = file.read_bytes()
    changes = list(_ANY)
    if _is_text(content):
        changes += [*_TEXT, *_TEXT]
    if _json_of(content) is not None:
        changes += [_json_value] * 12
    if _header_of(content) is not None:
        changes += [_safetensors_header] * 14
    if content.startswith(b"\x1f\x8b"):
        changes += [_inside_gzip] * 4
    if content.startswith(b"PK\x03\x04"):
        changes += [_inside_zip] * 14
    said = []
    for _ in range(rng.choice((1, 1, 1, 1, 2, 4))):
        change = rng.choice(changes)
        content = change(rng, content)
        said.append(change.__name__.removeprefix("_"))
    file.unlink()  # not written in place, because the old file may still be mapped
    file.write_bytes(content)
    return ", ".join(said)


def _replace(file: Path, kind: int) -> str:
    file.unlink()
    if kind == 0:
        return "missing"
    if kind == 1:
        file.mkdir()
        return "a folder"
    if kind == 2:
        file.symlink_to(file.name)
        return "a link to itself"
    if kind == 3:
        file.write_bytes(b"")
        return "empty"
    if kind == 4:
        os.mkfifo(file)
        return "a pipe"
    file.symlink_to("/dev/zero")
    return "a link to /dev/zero"


def _place(rng: random.Random, content: bytes) -> int:
    """Return an offset, more often near the start or the end, where headers are."""
    size = len(content)
    where = rng.random()
    if where < 0.3:
        return rng.randrange(min(size, 512) or 1)
    if where < 0.5:
        return max(0, size - 1 - rng.randrange(min(size, 2048) or 1))
    return rng.randrange(size or 1)


def _part(rng: random.Random, content: bytes) -> tuple[int, int]:
    """Return start and end of a part."""
    start = _place(rng, content)
    return start, min(len(content), start + rng.choice((1, 2, 4, 8, 16, 64, 512, _PAGE, len(content) or 1)))


def _flip_a_bit(rng: random.Random, content: bytes) -> bytes:
    if not content:
        return b"\x01"
    place = _place(rng, content)
    return content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]


def _set_bytes(rng: random.Random, content: bytes) -> bytes:
    start, end = _part(rng, content)
    value = rng.choice((0, 1, 0x7F, 0x80, 0xFF, 10, 32, 34))
    return content[:start] + bytes([value]) * (end - start) + content[end:]


def _noise(rng: random.Random, content: bytes) -> bytes:
    start, end = _part(rng, content)
    return content[:start] + rng.randbytes(end - start) + content[end:]


def _cut_short(rng: random.Random, content: bytes) -> bytes:
    return content[: rng.choice((_place(rng, content), len(content) - 1, len(content) // 2))]


def _cut_out(rng: random.Random, content: bytes) -> bytes:
    start, end = _part(rng, content)
    return content[:start] + content[end:]


def _append(rng: random.Random, content: bytes) -> bytes:
    return content + rng.choice((b"\0", b" ", b"\n", b"\xff" * 8, bytes(_PAGE), content))


def _double_a_part(rng: random.Random, content: bytes) -> bytes:
    start, end = _part(rng, content)
    return content[:end] + content[start:end] * rng.choice((1, 1, 2, 50)) + content[end:]


def _swap_parts(rng: random.Random, content: bytes) -> bytes:
    size = rng.choice((1, 4, 8, 64, 512, _PAGE))
    first, second = sorted((_place(rng, content), _place(rng, content)))
    if first + size > second:
        return content[::-1][:16] + content[16:]
    parts = (content[:first], content[second : second + size], content[first + size : second])
    return b"".join((*parts, content[first : first + size], content[second + size :]))


def _length_field(rng: random.Random, content: bytes) -> bytes:
    """Write an extreme number, as formats write lengths and offsets: 4 or 8 bytes, aligned."""
    code = rng.choice(("<I", "<Q", ">I", "<i", "<q"))
    size = struct.calcsize(code)
    place = _place(rng, content) // size * size
    number = rng.choice(_NUMBERS) % 256**size
    if code in ("<i", "<q"):
        number -= 256**size // 2
    return content[:place] + struct.pack(code, number) + content[place + size :]


def _varint(rng: random.Random, content: bytes) -> bytes:
    """Write a number as protocol buffers (SentencePiece, ONNX) write lengths."""
    place = _place(rng, content)
    number, written = rng.choice(_NUMBERS), bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return content[:place] + bytes(written) + content[place + rng.choice((1, len(written))) :]


_ANY: tuple[Change, ...] = (
    *(_flip_a_bit, _flip_a_bit, _flip_a_bit, _set_bytes, _set_bytes, _noise, _cut_short, _cut_out, _append),
    *(_double_a_part, _swap_parts, _length_field, _length_field, _length_field, _varint),
)


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in content


def _token(rng: random.Random) -> bytes:
    return rng.choice(_TOKENS).encode("utf-8", "surrogatepass")


def _number(rng: random.Random, content: bytes) -> bytes:
    """Replace one number by something else."""
    found = list(_NUMBER.finditer(content))
    if not found:
        return _insert(rng, content)
    number = rng.choice(found)
    return content[: number.start()] + _token(rng) + content[number.end() :]


def _insert(rng: random.Random, content: bytes) -> bytes:
    place = _place(rng, content)
    return content[:place] + _token(rng) + content[place:]


def _change_a_value(rng: random.Random, content: bytes) -> bytes:
    """Replace everything after a colon or a blank, up to the end of the line."""
    lines = content.split(b"\n")
    number = rng.randrange(len(lines))
    head, sign, _ = lines[number].partition(rng.choice((b": ", b" ", b"\t")))
    lines[number] = head + sign + _token(rng)
    return b"\n".join(lines)


def _lines(rng: random.Random, content: bytes) -> bytes:
    lines = content.split(b"\n")
    first, second = rng.randrange(len(lines)), rng.randrange(len(lines))
    kind = rng.randrange(4)
    if kind == 0:
        del lines[first]
    elif kind == 1:
        lines.insert(second, lines[first])
    elif kind == 2:
        lines[first], lines[second] = lines[second], lines[first]
    else:
        lines[first] = b" " * rng.choice((1, 2, 50)) + lines[first]
    return b"\n".join(lines)


def _deep(rng: random.Random, content: bytes) -> bytes:
    depth = rng.choice(_DEEP)
    opening = rng.choice((b"[", b'{"a":', b"- ", b"{a: ", b"? "))
    place = rng.choice((0, _place(rng, content)))
    return content[:place] + opening * depth + content[place:]


_TEXT: tuple[Change, ...] = (_number, _number, _insert, _change_a_value, _lines, _deep)


def _json_of(content: bytes) -> Any:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict | list) else None


def _json_value(rng: random.Random, content: bytes) -> bytes:
    """Replace, remove or rename something anywhere in a JSON document."""
    document = _json_of(content)
    if document is None:
        return _flip_a_bit(rng, content)
    _change_inside(rng, document)
    return json.dumps(document, ensure_ascii=True).encode()


def _change_inside(rng: random.Random, document: Any) -> None:
    places = list(_places(document))
    if not places:
        return
    holder, key = rng.choice(places)
    kind = rng.random()
    if kind < 0.15:
        del holder[key]
    elif kind < 0.25 and isinstance(holder, dict):
        holder[rng.choice(("", "x", "format", key + " "))] = holder.pop(key)
    elif kind < 0.35:
        other, there = rng.choice(places)
        holder[key], other[there] = copy.deepcopy(other[there]), copy.deepcopy(holder[key])  # one may hold the other
    elif kind < 0.5 and type(holder[key]) is int:
        holder[key] = rng.choice((holder[key] + 1, holder[key] - 1, -holder[key], holder[key] * 2, *_NUMBERS))
    else:
        holder[key] = rng.choice(_VALUES)


def _places(document: Any) -> list[tuple[Any, Any]]:
    keys = document.keys() if isinstance(document, dict) else range(len(document))
    found = [(document, key) for key in keys]
    for key in keys:
        if isinstance(document[key], dict | list):
            found += _places(document[key])
    return found


def _header_of(content: bytes) -> tuple[dict[str, Any], bytes] | None:
    """Return header and rest of a safetensors file."""
    size = int.from_bytes(content[:8], "little")
    if not 2 <= size <= len(content) - 8:
        return None
    header = _json_of(content[8 : 8 + size])
    return (header, content[8 + size :]) if isinstance(header, dict) else None


def _safetensors_header(rng: random.Random, content: bytes) -> bytes:
    found = _header_of(content)
    if found is None:
        return _flip_a_bit(rng, content)
    header, rest = found
    _change_inside(rng, header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + rest


def _inside_gzip(rng: random.Random, content: bytes) -> bytes:
    """Damage the uncompressed content and compress it again, so that its checksum is right."""
    try:
        plain = gzip.decompress(content)
    except (OSError, EOFError, zlib.error):
        return _flip_a_bit(rng, content)
    return gzip.compress(rng.choice((*_ANY, *_TEXT))(rng, plain), mtime=0)


def _inside_zip(rng: random.Random, content: bytes) -> bytes:
    """Damage a file in an archive such as torch's checkpoints, with a correct checksum."""
    written = io.BytesIO()
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive, zipfile.ZipFile(written, "w") as changed:
            parts = {name: archive.read(name) for name in archive.namelist()}
            chosen = rng.choice([*parts, *[name for name in parts if name.endswith(".pkl")] * 50])
            for name, part in parts.items():
                changed.writestr(name, rng.choice(_ANY)(rng, part) if name == chosen else part)
    except (zipfile.BadZipFile, ValueError, EOFError, OSError, NotImplementedError, IndexError, zlib.error):
        return _flip_a_bit(rng, content)
    return written.getvalue()
