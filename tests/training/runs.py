"""What training runs leave in their folder."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from ziggurat.training.checkpoint import checkpoint_folders

__all__ = ["QUIET", "final_bytes", "records"]

QUIET = Console(file=io.StringIO())
"""Takes what a run would print."""


def records(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl, of one kind where it is given."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [record for record in found if kind in (None, record["kind"])]


def final_bytes(run: Path, updates: int) -> dict[str, bytes]:
    """Return the tensors of the newest checkpoint, that of `updates`, as they are on disk: file -> content."""
    last = checkpoint_folders(run)[-1]
    assert last.name == f"step-{updates:08d}"
    return {str(p.relative_to(last)): p.read_bytes() for p in sorted(last.rglob("*.safetensors"))}
