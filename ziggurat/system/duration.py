"""Time spans in a readable form."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Return a time span as `42 s`, `3:07` or `2:05:09`."""
    whole = round(max(0.0, seconds))
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
