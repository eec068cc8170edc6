"""What one back-translation is: models, text, method, filters; everything that its result depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ziggurat.backtranslation.filters import PairFilter
from ziggurat.errors import ConfigError

__all__ = ["METHODS", "SHARD_LINES", "Job", "Method"]

Method = Literal["sample", "top-k", "beam", "noised-beam"]
"""How the synthetic side is made."""

METHODS: Mapping[Method, Mapping[str, Any]] = {
    "sample": {"search": "sample", "top_k": 0, "mbr": 0, "n_best": 1},
    "top-k": {"search": "sample", "top_k": 10, "mbr": 0, "n_best": 1},
    "beam": {"search": "beam", "n_best": 1},
    "noised-beam": {"search": "beam", "n_best": 1},
}
"""The decoding settings of each method, in place of the model's own."""

SHARD_LINES = 2000
"""Lines of a shard: what a stop can cost, and what is sorted by length before it is translated."""


@dataclass(frozen=True)
class Job:
    """One call of the verb.

    Attributes:
        models: Runs or model directories: the reverse model (`forward`: the teacher), or the members of an ensemble.
        inputs: Paths or globs of monolingual text.
        out: Folder of the result.
        method: How the synthetic side is made.
        forward: The text is the source and its translation the target (sequence-level distillation, Kim and Rush
            2016); else the text is the target and its translation the source (back-translation).
        which: Checkpoint of a run; see ziggurat.models.directory.open_model.
        device: `auto`, `cpu`, `cuda`, ...
        threads: CPU threads of each worker. Part of the job, not of the machine: products of matrices are summed in
            another order by another number of threads, and so rounded otherwise.
        seed: Of sampling and of noise.
        shard_lines: Lines of a shard.
        filters: Which pairs are dropped.
        decoding: Keys of the `decoding` section that replace the model's own.
    """

    models: tuple[str, ...]
    inputs: tuple[str, ...]
    out: Path
    method: Method = "sample"
    forward: bool = False
    which: str | None = None
    device: str = "auto"
    threads: int = 1
    seed: int = 1
    shard_lines: int = SHARD_LINES
    filters: PairFilter = field(default_factory=PairFilter)
    decoding: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def settings(self) -> dict[str, Any]:
        """Return the decoding settings of the method and of the user.

        Raises:
            ConfigError: the user's contradict the method or the verb.
        """
        if self.decoding.get("n_best", 1) != 1:
            raise ConfigError("`n_best`: backtranslate writes one translation for each line; leave it out")
        if clash := {"search", "seed"} & self.decoding.keys():
            raise ConfigError(f"`{min(clash)}`: give `--method` and `--seed` instead")
        return {**METHODS[self.method], "seed": self.seed, **self.decoding}
