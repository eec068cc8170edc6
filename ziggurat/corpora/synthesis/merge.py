"""Merge of shards of pairs, in order, into a corpus for `prepare`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash
import yaml

from ziggurat.corpora.jobs.plan import Plan
from ziggurat.corpora.jobs.run import complete_shards
from ziggurat.corpora.jobs.shards import Manifest
from ziggurat.corpora.synthesis.stages import filtered_files, rows_of
from ziggurat.system.errors import DataError
from ziggurat.system.files import atomic_file, write_atomically
from ziggurat.system.small_files import built, parse_json, read_bounded

CORPUS_FILE = "corpus.yaml"
MANIFEST_FILE = "manifest.json"
_SIDES = ("source.txt", "target.txt")


@dataclass(frozen=True)
class Report:
    """Counts of a merged corpus.

    Attributes:
        read: lines of the inputs.
        kept: pairs of the corpus.
        dropped: lines that gave no pair, by reason (ziggurat.corpora.synthesis.filters.Reason).
        files: size and checksum of each side, by file name.
        scores: threshold and median of the pairs' scores (ziggurat.corpora.synthesis.cross_entropy); else nothing.
    """

    read: int
    kept: int
    dropped: Mapping[str, int]
    files: Mapping[str, Mapping[str, Any]]
    scores: Mapping[str, float] = field(default_factory=dict)


def merged(out: Path, plan: Plan) -> Report | None:
    """Return the report of a corpus of `plan` that is complete already, else None."""
    try:
        document = parse_json(read_bounded(out / MANIFEST_FILE), MANIFEST_FILE)
        same = document.pop("plan") == plan.fingerprint
        sizes = [(out / name).stat().st_size == file["bytes"] for name, file in document["files"].items()]
        report = built(Report, document) if same and all(sizes) else None
    except (OSError, DataError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return report


def merge(out: Path, plan: Plan) -> Report:
    """Write the filtered shards as a corpus; see write_corpus. Raises DataError for a shard that is missing."""
    shards = filtered_files(out, plan.fingerprint)
    return write_corpus(
        out, plan, ((manifest, rows_of(shards.read(manifest)), {}) for manifest in complete_shards(plan, shards))
    )


def write_corpus(
    out: Path,
    plan: Plan,
    shards: Iterable[tuple[Manifest, Sequence[Sequence[str]], Mapping[str, int]]],
    *,
    scores: Mapping[str, float] | None = None,
) -> Report:
    """Write both sides of the corpus and then its manifest, in memory that does not grow with the corpus.

    Args:
        out: folder.
        plan: plan of the job.
        shards: the manifest of each shard, the pairs of it that stay, and how many were dropped just now, by reason.
        scores: of all pairs, for the report.

    Raises:
        DataError: a shard is incomplete or damaged, or no pair is left.
    """
    read, kept, dropped = 0, 0, Counter[str]()
    # Hashed while it is written, so that the corpus is never in memory.
    digests = [xxhash.xxh3_128() for _ in _SIDES]
    sizes = [0 for _ in _SIDES]
    with ExitStack() as stack:
        files = [stack.enter_context(atomic_file(out / name)) for name in _SIDES]
        for manifest, pairs, just_now in shards:
            for side, (file, digest) in enumerate(zip(files, digests, strict=True)):
                content = "".join(pair[side] + "\n" for pair in pairs).encode()
                file.write(content)
                digest.update(content)
                sizes[side] += len(content)
            read, kept = read + manifest.read, kept + len(pairs)
            dropped.update(manifest.dropped)
            dropped.update({reason: count for reason, count in just_now.items() if count})
        if not kept:
            raise DataError(
                f"{out}: no pair is left of {read:,} lines; dropped: {dropped_text(dropped)}; "
                "loosen the filters, or use a model that translates better"
            )
    checksums = [digest.hexdigest() for digest in digests]
    names = zip(_SIDES, sizes, checksums, strict=True)
    described = {name: {"bytes": size, "xxh3_128": checksum} for name, size, checksum in names}
    report = Report(read, kept, dict(sorted(dropped.items())), described, scores or {})
    document = json.dumps({"plan": plan.fingerprint, **asdict(report)}, indent=1) + "\n"
    # Last: a corpus without a manifest is incomplete.
    write_atomically(out / MANIFEST_FILE, document.encode())
    return report


def dropped_text(dropped: Mapping[str, int]) -> str:
    """Return the counts of dropped lines as text."""
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(dropped.items())) or "none"


def write_snippet(out: Path, *, name: str, weight: float, tag: str | None) -> str:
    """Write the corpus as an entry of `data.train` into CORPUS_FILE; return the YAML."""
    source, target = (str(out / side) for side in _SIDES)
    entry = {"name": name, "source": source, "target": target, "weight": weight, **({"tag": tag} if tag else {})}
    text = yaml.safe_dump({"data": {"train": [entry]}}, sort_keys=False, allow_unicode=True)
    write_atomically(out / CORPUS_FILE, text.encode())
    return text
