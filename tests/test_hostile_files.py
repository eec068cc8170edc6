"""Files from strangers: each is refused with the reason, in under 5 seconds and 500 MB."""

from __future__ import annotations

import contextlib
import gzip
import json
import lzma
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from tests.confined import cli, confined, refusal
from tests.conftest import tiny_experiment
from ziggurat.config import dump, load_experiment, parse_experiment
from ziggurat.config.load import apply_override
from ziggurat.data.corpus import Store
from ziggurat.data.lines import LineStream
from ziggurat.data.prepare import prepare
from ziggurat.data.subword import load_tokenizers
from ziggurat.model.build import build_model
from ziggurat.model.directory import open_model, write_model_directory
from ziggurat.model.run_folder import read_meta
from ziggurat.model.tensors import weights
from ziggurat.system import compressed
from ziggurat.system.compressed import byte_blocks, uncompressed_file
from ziggurat.system.errors import ConfigError, DataError
from ziggurat.system.files import CHECKSUMS_FILE
from ziggurat.train.diagnosis.health import read_warnings
from ziggurat.train.records import read_records

GIB = 1 << 30
MINIMAL = "data: {source_language: de, target_language: en, store: s}\n"


def bomb(path: Path, content: bytes, times: int) -> Path:
    """A compressed file that unpacks to `content`, `times` over."""
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".zst": zstandard.open}
    with openers[path.suffix](path, "wb") as file:
        for _ in range(times):
            file.write(content)
    return path


def drained(path: Path) -> int:
    return LineStream(path).drain()


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("content", [b"\n", b"x"], ids=["newlines", "one line"])
def test_a_bomb_is_refused(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = bomb(tmp_path / f"bomb{suffix}", content * (1 << 20), 30)
    message = refusal(lambda: drained(path), megabytes=250)
    assert str(path) in message
    assert "unpack it yourself" in message or "longer than 64 MiB" in message


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_text_that_repeats_itself_is_read_in_bounded_memory(tmp_path: Path, suffix: str) -> None:
    path = bomb(
        tmp_path / f"honest{suffix}", b"".join(os.urandom(1 << 9).hex().encode() + b"\n" for _ in range(100)), 40
    )
    outcome = confined(lambda: drained(path), megabytes=200)
    assert (outcome.error, outcome.text) == ("", "4000")
    assert all(len(block) <= 1 << 18 for block in byte_blocks(path))


def test_a_bomb_of_huge_blocks_costs_no_more_than_a_block(tmp_path: Path) -> None:
    path = tmp_path / "blocks.zst"
    # One frame of a thousand blocks, each one byte that stands for 128 KiB: 4 kB become 128 MiB.
    block = (1 << 1 | (1 << 17) << 3).to_bytes(3, "little") + b"\n"
    last = (1 | 1 << 1 | (1 << 17) << 3).to_bytes(3, "little") + b"\n"
    path.write_bytes(b"\x28\xb5\x2f\xfd" + b"\x00\x38" + block * 999 + last)
    assert "unpack it yourself" in refusal(lambda: sum(map(len, byte_blocks(path))), megabytes=100)


def test_a_window_of_gigabytes_is_refused(tmp_path: Path) -> None:
    window = zstandard.ZstdCompressionParameters(window_log=30, compression_level=1)
    path = tmp_path / "window.zst"
    stream = zstandard.ZstdCompressor(compression_params=window).compressobj()
    path.write_bytes(stream.compress(b"a\n" * 1000) + stream.flush())
    assert "128 MiB of memory" in refusal(lambda: drained(path), megabytes=100)
    path = tmp_path / "dictionary.xz"
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 1, "dict_size": 1 << 29}]
    path.write_bytes(lzma.compress(b"a\n", filters=filters))
    assert "128 MiB of memory" in refusal(lambda: drained(path), megabytes=100)


def test_unpacking_stops_where_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = bomb(tmp_path / "table.parquet.gz", os.urandom(1 << 16), 2)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(compressed.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(DataError, match=r"does not fit into .*TMPDIR"), uncompressed_file(path):
        pass


ALIASES = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
MERGED = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 12))
DOUBLED = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 12))
YAML = {
    "aliases": (ALIASES, "values"),
    "merged": (MERGED, "values"),
    "itself": ("a: &a [*a]\n", "alias that contains itself"),
    "nested": ("a: " + "[" * 100_000, "nested"),
    "nested blocks": ("a:\n" + "".join(" " * i + "- \n" for i in range(1, 400)), "nested"),
    "many": ("a: [" + "x," * 200_000 + "]", "values"),
    "long": ("a: '" + "x" * (1 << 21) + "'", "1 MiB"),
    "digits": ("training: {seed: " + "9" * 5000 + "}", "5,000 characters"),
    "hexadecimal": ("training: {seed: 0x" + "f" * 5000 + "}", "characters"),
    "base 60": ("a: 1" + ":59" * 100_000, "characters"),
    "control": ("a: \x01\n", "U+0001"),
    "escaped NUL": ('data: {store: "a\\0b"}', "NUL"),
    "escaped surrogate": ('data: {store: "\\uD800"}', "half a character"),
    "no character": ('a: "\\UFFFFFFFF"', "not valid YAML"),
    "month 13": ("a: 2001-13-01", "is not a value"),
    "no integer": ("a: !!int x", "is not a value"),
    "no truth value": ("a: !!bool x", "is not a value"),
    "python": ("a: !!python/object/apply:os.system [ls]", "not valid YAML"),
    "key of aliases": (DOUBLED + "? *a11\n: 1\n", "a key must be a word"),
    "unknown keys": ("".join(f"k{i}: 1\n" for i in range(15_000)), "and 14,9"),
    "seed": (MINIMAL + "training: {seed: 18446744073709551616}", "training.seed"),
    "vocabulary": (MINIMAL + "model: {d_model: 100000000000}", "model.d_model"),
}  # fmt: skip


@pytest.mark.parametrize("case", YAML)
def test_yaml_made_to_hurt_is_refused(case: str) -> None:
    text, reason = YAML[case]
    assert reason in refusal(lambda: parse_experiment(text, "x.yaml"))


def test_overrides_have_the_same_limits() -> None:
    for value in ("9" * 5000, "[" * 5000, "2001-13-01", "\x01", '"\\0"'):
        with pytest.raises(ConfigError):
            apply_override({}, f"training.seed={value}")
    with pytest.raises(ConfigError, match="not an override"):
        apply_override({}, "a." * 5000 + "a=1")


def test_an_override_of_an_alias_changes_one_place() -> None:
    text = MINIMAL + "model:\n  encoder: &stack {layers: 3}\n  decoder: *stack\n"
    model = parse_experiment(text, "x.yaml", ["model.encoder.layers=4"]).model
    assert (model.encoder.layers, model.decoder.layers) == (4, 3)


def test_a_pipe_is_not_a_configuration_of_a_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.yaml")
    assert "not a regular file" in refusal(lambda: load_experiment(tmp_path / "config.yaml"))


@pytest.fixture
def model(tiny_folder: Path, tmp_path: Path) -> Path:
    """A stranger's model directory, without the list of checksums, or with a correct list for bad files."""
    experiment = tiny_experiment(tmp_path)
    source, target = load_tokenizers(tiny_folder / "store")
    built = build_model(experiment.model, source.size, target.size)
    write_model_directory(tmp_path / "model", weights(built), experiment, tiny_folder / "store")
    (tmp_path / "model" / CHECKSUMS_FILE).unlink()
    return tmp_path / "model"


def edited(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; `joint__file` is `file` inside `joint`."""
    document = json.loads(path.read_text())
    for name, value in changes.items():
        *folders, key = name.split("__")
        at = document
        for folder in folders:
            at = at[folder]
        at[key] = value
    path.write_text(json.dumps(document))


MODEL_ATTACKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "layers of another model": (
        lambda m: (m / "config.yaml").write_text(
            (m / "config.yaml").read_text().replace("layers: 2", "layers: 4000", 1)
        ),
        "configuration says 4000",
    ),
    "layers without end": (
        lambda m: (m / "config.yaml").write_text(
            (m / "config.yaml").read_text().replace("layers: 2", "layers: 1000000000", 1)
        ),
        "model.encoder.layers",
    ),
    "width of another model": (
        lambda m: (m / "config.yaml").write_text(
            (m / "config.yaml").read_text().replace("d_model: 16", "d_model: 1000000", 1)
        ),
        "shape",
    ),
    "aliases": (lambda m: (m / "config.yaml").write_text(ALIASES), "values"),
    "model is a pipe": (lambda m: ((m / "joint.spm").unlink(), os.mkfifo(m / "joint.spm")), "not a regular file"),
    "model is a device": (
        lambda m: ((m / "joint.spm").unlink(), (m / "joint.spm").symlink_to("/dev/zero")),
        "outside its folder",
    ),
    "model is large": (
        lambda m: os.truncate(m / "joint.spm", GIB),
        "larger than 32 MiB",
    ),
    "a file above the folder": (lambda m: edited(m / "vocabulary.json", joint__file="../secret"), "not in it"),
    "a file elsewhere": (lambda m: edited(m / "vocabulary.json", joint__file="/etc/passwd"), "not in it"),
    "a link that leaves": (
        lambda m: ((m / "joint.spm").unlink(), (m / "joint.spm").symlink_to("/etc/passwd")),
        "outside its folder",
    ),
    "nested vocabulary": (lambda m: (m / "vocabulary.json").write_text("[" * 100_000), "nested"),
    "vocabulary of another type": (lambda m: edited(m / "vocabulary.json", joint__tags=3), "joint"),
    "tags": (lambda m: edited(m / "vocabulary.json", joint__tags=["<a>", 3]), "tags"),
    "vocabulary is large": (lambda m: os.truncate(m / "vocabulary.json", GIB), "larger than"),
    "weights are a pipe": (
        lambda m: ((m / "model.safetensors").rename(m / "w"), os.mkfifo(m / "model.safetensors")),
        "model.safetensors",
    ),
    "header is large": (
        lambda m: (m / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 62) + b"{}"),
        "header",
    ),
    "header lies": (
        lambda m: (m / "model.safetensors").write_bytes(
            (lambda h: struct.pack("<Q", len(h)) + h)(
                b'{"__metadata__":{"format":"1"},"a":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4]}}'
            )
        ),
        "damaged",
    ),
}


@pytest.mark.parametrize("case", MODEL_ATTACKS)
def test_a_strangers_model_is_refused(model: Path, case: str) -> None:
    attack, reason = MODEL_ATTACKS[case]
    attack(model)
    message = refusal(lambda: open_model(model))
    assert reason in message, message


@pytest.mark.parametrize("content", [None, b"[" * 100_000, b" " * (1 << 25)], ids=["pipe", "nested", "large"])
@pytest.mark.parametrize("name", ["checksums.json", "export.json", "manifest.json", "config.json"])
def test_files_that_are_only_inspected_do_no_harm(model: Path, name: str, content: bytes | None) -> None:
    (model / name).unlink(missing_ok=True)
    if content is None:
        os.mkfifo(model / name)
    else:
        (model / name).write_bytes(content)
    if name == "checksums.json":
        assert name in refusal(lambda: open_model(model))
        return
    (model / "model.safetensors").unlink()
    (model / "checksums.json").unlink(missing_ok=True)
    assert str(model) in refusal(lambda: open_model(model))


def test_links_inside_a_folder_and_in_a_cache_are_followed(model: Path, tmp_path: Path) -> None:
    (model / "joint.spm").rename(model / "other.spm")
    (model / "joint.spm").symlink_to("other.spm")
    assert open_model(model).model.encoder is not None
    blobs, snapshot = tmp_path / "cache" / "blobs", tmp_path / "cache" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, name in enumerate(("model.safetensors", "config.yaml", "vocabulary.json", "joint.spm")):
        shutil.copy(model / name, blobs / str(number))
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    assert open_model(snapshot).experiment == open_model(model).experiment


JSON_ATTACKS = {
    "nested": "[" * 100_000,
    "nested objects": '{"a":' * 5000 + "1" + "}" * 5000,
    "digits": '{"format": ' + "9" * 5000 + "}",
    "large numbers": '{"format": 1e999, "update": 1e999, "kind": "train"}',
    "null": "null",
    "list": "[1, 2]",
    "number": "3",
    "text": '"x"',
    "empty": "{}",
    "surrogate": '{"format": "\\ud800", "kind": "\\ud800", "update": 1}',
    "not UTF-8": "\udcff",
    "wrong types": json.dumps({"format": 1, "update": "x", "kind": 3, "layers": [], "values": 3, "time": "x",
                               "files": 3, "tables": 3, "corpora": 3, "fingerprint": 3, "progress": 3, "checksums": 3,
                               "positions": -1, "joint": 3}),
}  # fmt: skip


@pytest.mark.parametrize("case", JSON_ATTACKS)
def test_errors_in_every_json_file_are_described(tmp_path: Path, tiny_folder: Path, case: str) -> None:
    from ziggurat.inspect.report.runs import _environment, _records
    from ziggurat.translate.engines import read_report

    content = JSON_ATTACKS[case].encode("utf-8", "surrogateescape")
    run, store = tmp_path / "run", tmp_path / "store"
    (run / "diagnostics").mkdir(parents=True)
    store.mkdir()
    for name in ("diagnostics/depth.jsonl", "diagnostics/warnings.jsonl", "metrics.jsonl"):
        (run / name).write_bytes(content + b"\n")
    for name in ("environment.json", "meta.json", "export.json", "vocabulary.json"):
        (run / name).write_bytes(content)
    (store / "manifest.json").write_bytes(content)
    readers: list[Callable[[], object]] = [
        lambda: read_records(run),
        lambda: read_warnings(run),
        lambda: list(_records(run / "metrics.jsonl")),
        lambda: read_meta(run),
        lambda: load_tokenizers(run),
        lambda: read_report(run),
        lambda: Store.open(store),
    ]

    def all_refuse() -> str:
        for number, reader in enumerate(readers):
            try:
                reader()
            except (DataError, ConfigError, Exception) as error:
                if not type(error).__module__.startswith("ziggurat"):
                    raise AssertionError(f"reader {number}: {type(error).__name__}: {error}") from error
            else:
                raise AssertionError(f"reader {number} takes it")
        with contextlib.suppress(DataError):  # an object with other keys is accepted
            _environment(run / "environment.json")
        return "all"

    outcome = confined(all_refuse)
    assert (outcome.error, outcome.text) == ("", "all")


def test_two_hundred_thousand_banned_phrases_are_refused(model: Path) -> None:
    from ziggurat.translate.translator import load_translator

    banned = [f"word{i} other" for i in range(200_000)]
    assert "decoding.banned" in refusal(lambda: load_translator(model, banned=banned))
    few = confined(lambda: load_translator(model, banned=banned[:10_000]).translate(["a b"])[0].text)
    assert not few.error


def test_streams_closed_by_the_shell(model: Path) -> None:
    def closed(number: int, *arguments: str) -> Callable[[], object]:
        def run() -> object:
            import sys

            from ziggurat.cli import main

            os.close(number)
            read, write = os.pipe()  # the message goes here, since standard error is the parent's
            sys.stderr = os.fdopen(write, "w")
            setattr(sys, ("stdin", "stdout")[number], None)
            try:
                main(list(arguments))
            except SystemExit as stop:
                sys.stderr.flush()
                return stop.code, os.read(read, 4096).decode()
            return None

        return run

    said = confined(closed(0, "translate", str(model))).text
    assert "(2, " in said
    assert "standard input is closed" in said
    said = confined(closed(1, "explain", "training.seed")).text
    assert "(2, " in said
    assert "standard output is closed" in said


@pytest.mark.slow
def test_verbs_report_it(model: Path, tmp_path: Path) -> None:
    path = bomb(tmp_path / "bomb.gz", b"x" * (1 << 20), 30)
    assert "longer than 1 MiB" in refusal(cli("translate", str(model), "-i", str(path)))
    path = bomb(tmp_path / "bomb.tsv.gz", (b"x" * 1000 + b"\ty\n") * 1000, 30)
    corpus = f"data.train=[{{path: '{path}'}}]"
    config = tmp_path / "x.yaml"
    config.write_text(dump(tiny_experiment(tmp_path)))
    assert "unpack it yourself" in refusal(cli("prepare", str(config), corpus))
    (tmp_path / "line").write_bytes(b"x" * (2 << 20))
    assert "longer than 1 MiB" in refusal(cli("translate", str(model), "-i", str(tmp_path / "line")))
    for override in ("beam_size=1000000000", "max_length.limit=" + "9" * 30, "seed=" + "9" * 5000):
        assert "ziggurat:" in refusal(cli("translate", str(model), override))
    for override in ("data.subword.vocabulary_size=100000000000", f"training.batch.max_tokens={10**20}"):
        assert override.split("=")[0] in refusal(cli("prepare", str(config), override))


def places(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Return the paths of values in a document, for lists only the first item."""
    inside = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    return [path, *(place for key, part in inside for place in places(part, (*path, key)))]


@pytest.mark.slow
def test_a_manifest_with_any_value_of_another_type(tiny_folder: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(tiny_folder / "store", store)
    data = tiny_experiment(tmp_path).data  # the same text
    whole = json.loads((store / "manifest.json").read_text())
    tried = 0
    for place in places(whole)[1:]:
        for value in (None, -1, "x", [], 10**30):
            document = json.loads(json.dumps(whole))
            at: Any = document
            for key in place[:-1]:
                at = at[key]
            at[place[-1]] = value
            (store / "manifest.json").write_text(json.dumps(document))
            tried += 1
            for read in (lambda: len(Store.open(store).train), lambda: prepare(data)):
                with contextlib.suppress(DataError, ConfigError):
                    read()
    assert tried > 250
