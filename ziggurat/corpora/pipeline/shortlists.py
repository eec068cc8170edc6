"""Lexical shortlists that models of a pipeline translate with, on whose content steps depend."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ziggurat.config.pipeline import ModelName
from ziggurat.corpora.pipeline.models import decoding_of, said
from ziggurat.corpora.pipeline.road import Road
from ziggurat.system.errors import DataError

SHORTLIST = "student.shortlist"
"""File that the step `shortlist` makes."""


def shortlist_made_here(road: Road) -> bool:
    """Return whether the student's own decoding names what step `shortlist` makes: there is none before that step."""
    if road.config.student is None or road.config.shortlist is None:
        return False
    listed = road.config.student.decoding.shortlist
    return listed is not None and Path(listed).expanduser().absolute() == road.at("shortlist", SHORTLIST).absolute()


def shortlists(road: Road, *names: ModelName, changes: Mapping[str, Any] | None = None) -> dict[str, list[Path]]:
    """Return the files from outside that models translate with, by key; also of models that are there already.

    Args:
        road: the road.
        names: the models.
        changes: keys of the `decoding` section that replace the models' own; `Step.check` checks them.

    Raises CheckpointError where a model is missing that should be there already, DataError for a missing file.
    """
    found: dict[str, list[Path]] = {}
    for name in names:
        listed = {"shortlist": decoding_of(road, name).shortlist, **(changes or {})}["shortlist"]
        if not isinstance(listed, str) or (name == "student" and shortlist_made_here(road)):
            continue
        path = Path(listed).expanduser()
        if not path.is_file():
            raise DataError(
                f"{path}: no such file, but the {said(name)} is to translate with it (`decoding.shortlist`); this "
                f"makes a shortlist: `ziggurat shortlist STORE -o {path}`"
            )
        found[f"{name}.decoding.shortlist"] = [path]
    return found
