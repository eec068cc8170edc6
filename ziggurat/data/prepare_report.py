"""What `prepare` reports: counts of each corpus, vocabularies, notices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class CorpusReport:
    """Counts of one corpus: pairs read, kept and dropped, and corrections."""

    split: str
    """`train` or `dev`."""
    name: str
    read: int
    """Pairs in the files."""
    kept: int
    """Pairs in the store."""
    dropped: dict[str, int]
    """Pairs dropped, by reason."""
    carriage_returns: int
    """Lines that ended in CR LF; the CR was removed."""
    byte_order_marks: int
    """Files with a byte order mark, which was removed."""
    short_rows: int = 0
    """Rows of a TSV file that had too few columns (`row_columns`) and were left out."""
    aligned: int | None = None
    """Pairs in the store that have word alignments; None where no corpus was to have any."""
    licences: dict[str, str] = field(default_factory=dict)
    """Licences of the public corpora that `fetch` made the files of, by the corpora's names."""
    changed: list[str] = field(default_factory=list)
    """Its files that changed since they were fetched, where the other side is as it was."""
    repaired: int = 0
    """Pairs whose text was mended, also of those that were dropped."""


@dataclass(frozen=True)
class PrepareReport:
    """Result of `prepare`."""

    store: str
    reused: bool
    """True if a store of the same settings and inputs existed already, so nothing was done."""
    seconds: float
    source_vocabulary: int
    """Ids of the source side, control symbols and tags included."""
    target_vocabulary: int
    joint_vocabulary: bool
    """True if both sides share one vocabulary."""
    source_pieces: int
    """Pieces of all training sources, the tags of their corpora included."""
    target_pieces: int
    corpora: list[CorpusReport] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    """Suspicious findings that need not be faults, such as sides that look swapped, or test sentences in training
    pairs."""

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a JSON document."""
        return asdict(self)

    def pieces(self) -> str:
        """Return the sizes of the vocabularies in words: `8,000 joint pieces`."""
        if self.joint_vocabulary:
            return f"{self.source_vocabulary:,} joint pieces"
        return f"{self.source_vocabulary:,} source and {self.target_vocabulary:,} target pieces"

    @property
    def kept(self) -> int:
        """Training pairs in the store."""
        return sum(corpus.kept for corpus in self.corpora if corpus.split == "train")

    @property
    def dropped(self) -> Counter[str]:
        """Training pairs dropped, by reason."""
        return sum((Counter(c.dropped) for c in self.corpora if c.split == "train"), Counter())


def report_of(store: str, manifest: Mapping[str, Any], *, reused: bool, seconds: float) -> PrepareReport:
    """Return the report on the store that `manifest` describes."""
    names = ("name", "read", "kept", "dropped", "carriage_returns", "byte_order_marks")
    return PrepareReport(
        store=store,
        reused=reused,
        seconds=seconds,
        source_vocabulary=manifest["vocabulary"]["source"],
        target_vocabulary=manifest["vocabulary"]["target"],
        joint_vocabulary=any(name.startswith("joint.") for name in manifest["files"]),
        source_pieces=manifest["tables"]["train"]["source_pieces"],
        target_pieces=manifest["tables"]["train"]["target_pieces"],
        corpora=[
            CorpusReport(
                split=split,
                **{name: entry[name] for name in names},
                short_rows=entry.get("short_rows", 0),
                aligned=entry.get("aligned"),
                licences={part["name"]: part["licence"] for part in entry.get("origin", [])},
                changed=list(dict.fromkeys(f for part in entry.get("origin", []) for f in part.get("changed", []))),
                repaired=entry.get("repaired", 0),
            )
            for split in ("train", "dev")
            for entry in manifest["corpora"][split]
        ],
        notices=manifest["notices"],
    )
