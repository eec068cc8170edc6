"""Marian's shortlists, text and binary, with its ids and with ours."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from tests.confined import refusal
from ziggurat.exchange.marian_program import WITHOUT_MARIAN, marian_program, run_marian
from ziggurat.exchange.marian_shortlist import binary_shortlist, is_binary_shortlist, read_marian_shortlist

PIECES = ["</s>", "<unk>", "a", "b", "c", "d"]
ROWS = [[], [], [3, 5], [2], [], [4, 5]]
TEXT = "d a 0.5\nb a 0.25\nNULL a 1\na b 1\na NULL 1\nc d 0.5\nd d 0.5\nd a 0.125\n"


def test_text_and_binary_form_give_the_same_shortlist(tmp_path: Path) -> None:
    text, packed = tmp_path / "lex.s2t", tmp_path / "lex.bin"
    text.write_text(TEXT)
    packed.write_bytes(binary_shortlist(ROWS, first=100, best=100))
    assert is_binary_shortlist(packed)
    assert not is_binary_shortlist(text)
    for path in (text, packed):
        read = read_marian_shortlist(path, (PIECES, PIECES))
        assert [row.tolist() for row in read.rows] == ROWS
        assert read.first == 100


@pytest.mark.slow
@pytest.mark.skipif(marian_program() is None, reason=WITHOUT_MARIAN)
def test_marian_writes_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "v.yml").write_text("".join(f"{piece}: {number}\n" for number, piece in enumerate(PIECES)))
    (tmp_path / "lex").write_text(TEXT)
    options = ["-s", "lex", "2", "100", "0", "-d", "lex.bin", "-V", "v.yml", "v.yml"]
    run_marian("convert", *options, folder=tmp_path)
    assert (tmp_path / "lex.bin").read_bytes() == binary_shortlist(ROWS, first=2, best=100)


def test_damaged_shortlists_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "lex.bin"
    whole = binary_shortlist(ROWS, first=2, best=100)

    def said(content: bytes) -> str:
        path.write_bytes(content)
        return refusal(lambda: read_marian_shortlist(path, (PIECES, PIECES)))

    assert "ends within its header" in said(whole[:40])
    assert "its header names" in said(whole[:-4])
    assert "its header names" in said(whole[:40] + struct.pack("<Q", 1 << 61) + whole[48:])
    assert "its checksum" in said(whole[:-6] + b"\1" + whole[-5:])
    assert "for 2 source pieces" in said(binary_shortlist([[], []], first=0, best=9))
    assert "with target piece 6" in said(binary_shortlist([*ROWS[:-1], [6]], first=0, best=9))
    assert "line 2: 'b a' is no" in said(b"d a 0.5\nb a\n")
    generator = random.Random(3)
    for _ in range(100):
        content = bytearray(whole)
        content[generator.randrange(8, len(whole))] ^= 1 << generator.randrange(8)
        said(bytes(content))
