"""Marian as a peer of the benchmarks: the parts that do not need Marian, and a small model's search if it is
installed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import decode_speed, marian_peer, train_speed
from ziggurat.exchange.importer import import_checkpoint
from ziggurat.exchange.marian_program import MARIAN_VARIABLE, WITHOUT_MARIAN, marian_program

SIZES = (64, 128, 4, 1, 1)


def test_progress_of_training_is_read_from_the_log() -> None:
    line = "[2026-11-28] Ep. 1 : Up. 1,002 : Sen. 265 : Cost 9.5 * 3,932 @ 3,740 after 17,672 : Time 1.91s : 1954.64"
    assert marian_peer.progress(line) == (1002, 17672)
    assert marian_peer.progress("[2026-11-28] Training started") is None


def test_outputs_have_the_requested_length_on_average() -> None:
    """Two batches of two: the longest sentences have 8 and 4 tokens, and so do the outputs."""
    factor = marian_peer.length_factor([3, 8, 6, 4], batch=2, length=6)
    assert factor == 1.0
    assert marian_peer.length_factor([3, 8, 6], batch=2, length=19) == 3.0


def test_without_marian_it_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(MARIAN_VARIABLE, str(tmp_path))
    assert decode_speed.left_out("marian") == train_speed.left_out("marian") == WITHOUT_MARIAN
    with decode_speed.marian_searches([], "T3", 4) as found:
        assert found == {}


@pytest.mark.slow
@pytest.mark.skipif(marian_program() is None, reason=WITHOUT_MARIAN)
@pytest.mark.parametrize("batch", [1, 4])
def test_marian_translates_to_the_requested_length(tmp_path: Path, batch: int) -> None:
    given = [[*range(2, 2 + words), 0] for words in (3, 5, 7, 7, 9, 11, 11, 13)]
    found = marian_peer.searches(tmp_path, SIZES, given, types=64, length=12, beam=2, batch=batch)
    assert set(found) == {f"marian {p} {n}x1" for p in marian_peer.PRECISIONS for n in ((1, 2) if batch > 1 else (1,))}
    for search in found.values():
        tokens, seconds = search()
        assert seconds > 0
        assert abs(tokens / len(given) - 12) <= 1  # a fraction of a token of each batch is rounded up


@pytest.mark.slow
@pytest.mark.skipif(marian_program() is None, reason=WITHOUT_MARIAN)
def test_our_model_translates_in_marian(tmp_path: Path) -> None:
    trained = Path(__file__).parents[1] / "golden" / "firefox"
    import_checkpoint(trained, tmp_path / "model")
    sources = json.loads((trained / "expected.json").read_text("utf-8"))["sources"][:8]
    (tmp_path / "text").write_text("".join(f"{line}\n" for line in sources))
    found = marian_peer.exported(tmp_path, tmp_path / "model", tmp_path / "text", beam=2, batch=4)
    assert set(found) == {f"marian {p} {n}x1" for p in marian_peer.PRECISIONS for n in (1, 2)}
    for command in found.values():
        _, seconds = marian_peer.decode(command)
        assert seconds > 0
