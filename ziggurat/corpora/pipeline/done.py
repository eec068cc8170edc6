"""The share of begun steps that is done, by what is in their folders."""

from __future__ import annotations

import os
from pathlib import Path

from ziggurat.corpora.pipeline.step import Done, read_document
from ziggurat.system.errors import CheckpointError


def updates_done(run: Path) -> tuple[int, float]:
    """Return the updates of a run's newest checkpoint, from which training goes on, and the seconds they took."""
    from ziggurat.model.run_folder import checkpoint_folders, checkpoint_update, read_meta

    for folder in reversed(checkpoint_folders(run)):
        try:
            return checkpoint_update(folder), float(read_meta(folder)["progress"]["seconds"])
        except (CheckpointError, KeyError, TypeError, ValueError):
            continue
    return 0, 0.0


def lines_done(job: Path, stage: str, noun: str) -> Done | None:
    """Return the share of a job's lines whose shards are through its last stage; None where it has no plan yet."""
    from ziggurat.corpora.jobs.plan import PLAN_FILE

    plan = read_document(job / PLAN_FILE)
    try:
        lines, size = (int(number) for number in (plan["lines"], plan["settings"]["shard_lines"]))  # type: ignore[index]
        shards = sum(name.endswith(".json") for name in os.listdir(job / stage))
    except (OSError, KeyError, TypeError, ValueError):
        return None
    done = min(lines, shards * size)
    return Done(done / lines, f"{done:,} of {lines:,} {noun}") if lines > 0 else None
