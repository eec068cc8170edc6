"""The mark by which a page is known as one of ours, so that nothing else is replaced by one."""

from __future__ import annotations

from pathlib import Path

GENERATOR = "Ziggurat"
"""What pages name as their generator."""
_MARKS = (
    f'<meta name="generator" content="{GENERATOR}">'.encode(),
    # All that pages of version 0.1 have.
    b"""content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">""",
)
_HEAD = 1000  # bytes that hold the mark


def may_be_replaced(path: Path) -> bool:
    """Return True unless a file with something other than a page of ours is at `path`."""
    if not path.is_file():  # nothing, or a device, which is written to and not replaced
        return True
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except OSError:
        return False
    return not head or any(mark in head for mark in _MARKS)
