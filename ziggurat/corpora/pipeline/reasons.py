"""All that the result of a step depends on, as its manifest keeps it, and in words why a step is done again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ziggurat.corpora.pipeline.settings import settings_changed
from ziggurat.corpora.pipeline.step import Step, StepManifest
from ziggurat.system.yaml_text import changed, shown

AUTO = "auto: "
"""Before the device that `auto` is, in `Step.machine`."""
_FORMAT = 1
_CHANGED = "settings changed (there -> now)"


def wanted_of(
    step: Step, manifests: Mapping[str, StepManifest | None], fingerprint: Callable[[Path], str]
) -> dict[str, Any]:
    """Return all that the result of a step depends on but its `machine`; steps that are not done are left out."""
    known = {name: (manifests[name], patterns) for name, patterns in step.after.items()}
    return {
        "format": _FORMAT,
        "step": step.name,
        "version": step.version,
        "settings": dict(step.settings),
        "files": {key: [fingerprint(path) for path in paths] for key, paths in step.files().items()},
        "reads": {name: list(patterns) for name, patterns in step.after.items()},
        "after": {name: found.fingerprint(patterns) for name, (found, patterns) in known.items() if found is not None},
    }


def difference(step: Step, before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return in words why a step is not done by what `before` says; None: it differs in nothing that is known."""
    if before.get("format") != _FORMAT:
        return "done by another version of ziggurat"
    if (version := before.get("version")) != step.version:
        earlier = isinstance(version, int) and version < step.version
        return f"done by {'an earlier' if earlier else 'a later'} version of ziggurat, by which it comes out otherwise"
    if changes := settings_changed(before.get("settings"), step.settings):
        return f"{_CHANGED}: {shown(changes, 3)}"
    reasons = [*_other_steps(before, now), *_other_files(step, before, now)]
    return "; ".join(reasons) if reasons else None


def other_machine(step: Step, before: Mapping[str, Any]) -> str | None:
    """Return in words why what was begun cannot be gone on with although its result would be the same."""
    was, here = before.get("machine"), dict(step.machine())
    changes = changed(was, here)
    return f"{_CHANGED}, and it was not finished: {shown(changes, 3)}" if changes else None


def _other_steps(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what differs in the steps that are read and in what they handed on."""
    reads, read, handed = now["reads"], before.get("reads", {}), before.get("after", {})
    new = " and ".join(name for name in reads if name not in read)
    gone = " and ".join(name for name in read if name not in reads)
    reasons = []
    if new:
        reasons.append(f"now reads {new}" + (f" in place of {gone}" if gone else ""))
    elif gone:
        reasons.append(f"no longer reads {gone}")
    both = [name for name in reads if name in read]
    if others := [name for name in both if reads[name] != read[name]]:
        reasons.append(f"reads other files of {' and '.join(others)}")
    same = [name for name in both if name not in others and name in now["after"]]
    if others := [name for name in same if now["after"][name] != handed.get(name)]:
        reasons.append(f"{' and '.join(others)} handed on something else")
    return reasons


def _other_files(step: Step, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the first that differs in the files from outside."""
    was, found = before.get("files", {}), now["files"]
    for key, paths in step.files().items():
        if len(old := was.get(key, [])) != len(paths):
            return [f"{key}: {len(old)} input files before, {len(paths)} now"]
        if other := [path for path, *digests in zip(paths, old, found[key], strict=True) if len(set(digests)) > 1]:
            return [f"{other[0]} changed"]
    return [f"{key}: {len(was[key])} input files before, 0 now" for key in was if key not in found][:1]
