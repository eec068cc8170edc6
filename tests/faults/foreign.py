"""A fairseq checkpoint made from one of our runs."""

from __future__ import annotations

from pathlib import Path

from tests.exchange.test_import import dictionary, fairseq_checkpoint
from ziggurat.data.subword import load_tokenizers


def write_fairseq(run: Path, folder: Path) -> None:
    """Write `checkpoint.pt` and `dict.txt` for the model of `run` into `folder`."""
    source, _ = load_tokenizers(run)
    fairseq_checkpoint(run, folder, learned=False)
    dictionary(source, folder / "dict.txt")
