"""Marian's binary models, compared with the .npz files from which they were made, and damaged in every way."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.confined import confined, refusal
from ziggurat.exchange.marian_binary import is_binary_model
from ziggurat.exchange.marian_files import MarianWeights, read_weights
from ziggurat.exchange.marian_program import WITHOUT_MARIAN, marian_program, run_marian
from ziggurat.system.errors import DataError, ExportError

MODELS = Path(__file__).with_name("marian_models")
"""MODELS are models that Marian 1.12.42 trained for 30 updates, and their conversions by `pymarian convert --gemm-type
intgemm8`.
"""

FLOAT, INT8, BROWSER_INT8 = 0x404, 0x10001, 0x4101
OPTIONS = ("special:model.yml", 0x101, (8,), b"type: s\0")


def binary(*entries: tuple[str, int, tuple[int, ...], bytes], count: int | None = None, version: int = 1) -> bytes:
    """Return a file as Marian writes it: all headers, all names, all shapes, then all bytes starting at a multiple of
    256.
    """
    heads = b"".join(
        struct.pack("<4Q", len(name) + 1, kind, len(shape), len(data)) for name, kind, shape, data in entries
    )
    names = b"".join(name.encode() + b"\0" for name, *_ in entries)
    shapes = b"".join(struct.pack(f"<{len(shape)}i", *shape) for _, _, shape, _ in entries)
    head = struct.pack("<2Q", version, len(entries) if count is None else count) + heads + names + shapes
    skipped = -(len(head) + 8) % 256
    return head + struct.pack("<Q", skipped) + bytes(skipped) + b"".join(data for *_, data in entries)


def int8(values: Any, factor: float) -> bytes:
    return np.asarray(values, np.int8).tobytes() + struct.pack("<f", factor) + bytes(60)


def test_every_weight_equals_that_of_the_npz_file_up_to_rounding() -> None:
    before = read_weights(MODELS / "ssru.npz")
    after = read_weights(MODELS / "ssru.intgemm8.bin")
    assert after.arrays.keys() == before.arrays.keys()
    assert after.options == before.options
    assert not before.quantised
    assert sum(after.quantised.values()) == len(
        [name for name in before.arrays if name[-3:-1] == "_W" or name[-2:] == "_W"]
    )
    for name, wanted in before.arrays.items():
        step = np.abs(wanted).max() / 127 if "_W" in name else 0
        np.testing.assert_allclose(after.arrays[name], wanted, atol=0.501 * step, rtol=0, err_msg=name)
    assert "divided by its own scale" in after.notes[0]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"transformer-preprocess": "n", "transformer-decoder-autoreg": "self-attention"}, 1),
        ({"transformer-preprocess": "r"}, 1),
        ({"transformer-preprocess": "n", "transformer-decoder-autoreg": "rnn"}, 0),
        ({"transformer-preprocess": "d", "transformer-postprocess": "dan"}, 0),
        ({"transformer-preprocess": None}, 0),
    ],
)
def test_a_search_in_marian_that_differs_from_its_training_is_reported(options: dict[str, Any], told: int) -> None:
    assert len(MarianWeights({}, options, {}).notes) == told


def test_the_browsers_fork_numbers_types_differently_and_keeps_embeddings(tmp_path: Path) -> None:
    values = np.arange(6).reshape(2, 3)
    path = tmp_path / "model.bin"
    path.write_bytes(
        binary(
            ("Wemb", BROWSER_INT8, (2, 3), int8(values, 2.0)),
            ("encoder_l1_ffn_W1", BROWSER_INT8, (2, 3), int8(values.T, 2.0)),
            ("encoder_l1_ffn_W1_QuantMultA", FLOAT, (1, 1), struct.pack("<f", 3.0)),
            OPTIONS,
        )
    )
    read = read_weights(path)
    assert read.arrays.keys() == {"Wemb", "encoder_l1_ffn_W1"}, "scales of inputs are not weights"
    for array in read.arrays.values():
        np.testing.assert_array_equal(array, values / 2)


@pytest.mark.slow
@pytest.mark.skipif(marian_program() is None, reason=WITHOUT_MARIAN)
@pytest.mark.parametrize("kind", ["float32", "intgemm8", "intgemm16", "packed16", "packed8avx2", "packed8avx512"])
def test_every_type_that_marian_writes_is_read_or_refused_by_name(kind: str, tmp_path: Path) -> None:
    run_marian("convert", "-f", MODELS / "ssru.npz", "-t", tmp_path / "model.bin", "--gemm-type", kind)
    if kind.startswith("packed"):
        with pytest.raises(ExportError, match=f"is of the type {kind}, in an order for one kind of processor"):
            read_weights(tmp_path / "model.bin")
        return
    wanted, found = (read_weights(path).arrays for path in (MODELS / "ssru.npz", tmp_path / "model.bin"))
    assert wanted.keys() == found.keys()
    for name, array in wanted.items():
        step = {"float32": 0.0, "intgemm8": np.abs(array).max() / 127, "intgemm16": 1 / 1024}[kind]
        np.testing.assert_allclose(found[name], array, atol=0.501 * step if "_W" in name else 0, rtol=0)


def test_damaged_or_hostile_files_are_refused_cheaply(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    weight = ("encoder_Wemb", FLOAT, (2, 2), bytes(16))

    def said(content: bytes) -> str:
        path.write_bytes(content)
        return refusal(lambda: read_weights(path))

    assert "encrypted" in said(binary(weight, OPTIONS, version=2))
    assert "arrays in" in said(binary(weight, OPTIONS, count=1 << 60))
    assert "has no `special:model.yml`" in said(binary(weight))
    assert "twice" in said(binary(weight, weight, OPTIONS))
    assert "in 16 bytes" in said(binary(("Wemb", FLOAT, (1 << 30, 1 << 30), bytes(16)), OPTIONS))
    assert "in 16 bytes" in said(binary(("Wemb", FLOAT, (2, 3), bytes(16)), OPTIONS))
    assert "of shape [-1, 4]" in said(binary(("Wemb", FLOAT, (-1, 4), bytes(16)), OPTIONS))
    assert "unknown type 0x777" in said(binary(("Wemb", 0x777, (2, 2), bytes(16)), OPTIONS))
    assert "multiplied by 0.0" in said(binary(("a_W", INT8, (2, 2), int8(np.ones((2, 2)), 0.0)), OPTIONS))
    assert "in 4 bytes" in said(binary(("a_W", INT8, (2, 2), bytes(4)), OPTIONS))
    huge = bytearray(binary(weight, OPTIONS))
    huge[16 + 24 : 16 + 32] = struct.pack("<Q", 1 << 62)
    assert "more bytes than it has" in said(bytes(huge))
    huge = bytearray(binary(weight, OPTIONS))
    huge[16 + 16 : 16 + 24] = struct.pack("<Q", 1 << 40)
    assert "more bytes than it has" in said(bytes(huge))


@pytest.mark.parametrize("name", ["ssru.intgemm8.bin", "ssru.npz"])
def test_any_damage_to_a_marian_file_gives_one_message(name: str, tmp_path: Path) -> None:
    whole = (MODELS / name).read_bytes()
    # A binary file has its headers at the start; an .npz file has them everywhere, most of them at the end.
    heads = range(8, 4600) if name.endswith(".bin") else range(len(whole) - 4600, len(whole))
    generator = random.Random(5)
    path = tmp_path / name
    messages: set[str] = set()

    def attempts() -> None:
        for attempt in range(400):
            content = bytearray(whole)
            for _ in range(1 + attempt % 5):
                content[generator.choice(heads)] = generator.choice((0, 0x7F, 0xFF, generator.randrange(256)))
            if attempt % 2:
                content = content[: generator.randrange(8, 6000 if attempt % 4 == 1 else len(whole))]
            path.write_bytes(content)
            try:
                read_weights(path)
            except (DataError, ExportError) as error:
                messages.add(str(error))
        assert len(messages) > 9
        assert not any("\n" in message for message in messages)

    assert not confined(attempts, seconds=30).error


def test_binary_models_are_recognised(tmp_path: Path) -> None:
    assert is_binary_model(MODELS / "ssru.intgemm8.bin")
    assert not is_binary_model(MODELS / "ssru.npz")
    assert not is_binary_model(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"\6\0\0\0\x10\0TransformerSpec")
    assert not is_binary_model(tmp_path / "model.bin"), "CTranslate2's"
