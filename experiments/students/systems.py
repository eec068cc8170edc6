"""The models of the experiment, at full length and at a length that only checks that everything runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SEED = 1
DECODING: dict[str, Any] = {"beam_size": 4, "endings": "beam", "length_penalty": {"kind": "none", "alpha": 0.0}}


@dataclass(frozen=True)
class System:
    """A model by its depth and inner width; all have one width.

    Attributes:
        encoder, decoder: layers.
        d_ff: inner width; for students from scratch it makes the numbers of parameters equal (2 % apart).
        core_seconds: CPU seconds of its training.
        without: layers of the teacher that it lacks at the start; None: it is trained from scratch.
    """

    encoder: int
    decoder: int
    d_ff: int
    core_seconds: float
    without: str | None = None

    def model(self, width: int) -> dict[str, Any]:
        """Return the section `model`."""
        return {
            "d_model": width,
            "d_ff": self.d_ff,
            "heads": 4,
            "residual": "pre",
            "encoder": {"layers": self.encoder},
            "decoder": {"layers": self.decoder},
            "dropout": {"residual": 0.1, "attention": 0.0, "embedding": 0.1},
        }


def training(updates: int, peak: float, tokens: int, precision: str) -> dict[str, Any]:
    """Return the section `training` with this many updates of this many target tokens, and `peak` as the highest
    rate.
    """
    every = max(1, updates // 20)
    return {
        "seed": SEED,
        "precision": precision,
        "batch": {"max_tokens": tokens},
        "loss": {"label_smoothing": 0.1},
        "schedule": {"kind": "cosine", "peak": peak, "warmup_updates": every, "floor": 1e-5},
        "optimiser": {"betas": [0.9, 0.98], "epsilon": 1e-8},
        "clip_norm": 1.0,
        "log_every_updates": every,
        "validation": {"every_updates": 2 * every, "decode": False},
        "checkpoint": {"every_updates": every, "keep_last": 3},
        "stop": {"updates": updates},
        "diagnostics": {"every_updates": None},
        "tensorboard": False,
    }


@dataclass(frozen=True)
class Plan:
    """The sizes of the experiment.

    Attributes:
        name: the plan's name.
        width: width of all models.
        pieces: size of each vocabulary.
        systems: the models by name, `teacher` and `backward` first.
        tune_share: length of the later fine-tuning in int8, as a share of a student's updates.
        n_best: number of the teacher's candidates for each sentence.
        keep: share of the distilled pairs that the backward model keeps.
        lines: number of lines used from the corpus; None: all.
        test_lines: number of lines used from the test set; None: all.
        updates: length of every training run; None: as many as its core seconds allow.
        peak: learning rate.
        max_ratio: maximum ratio of the lengths of a distilled pair.
        rounds: number of interleaved rounds of measurement.
    """

    name: str
    width: int
    pieces: int
    systems: dict[str, System]
    tune_share: float = 0.1
    n_best: int = 4
    keep: float = 0.95
    lines: int | None = None
    test_lines: int | None = None
    updates: int | None = None
    peak: float = 2e-3
    max_ratio: float = 4.0
    rounds: int = 2

    @property
    def students(self) -> list[str]:
        """Names of the students."""
        return [name for name in self.systems if name not in ("teacher", "backward")]


def _systems(width: int) -> dict[str, System]:
    # Without biases and norms, stacks have 72 d^2 + 24 d f parameters for 6-6, which is 168 d^2 with f = 4 d; 40 d^2 +
    # 16 d f for 6-2, 56 d^2 + 26 d f for 12-1 and 80 d^2 + 38 d f for 18-1. Inner widths are multiples of a quarter of
    # the width, 64, because some libraries' bf16 kernels were wrong for odd ones.
    def inner(attention: int, networks: int) -> int:
        return round((168 - attention) * width / networks / (width // 4)) * (width // 4)

    return {
        "teacher": System(12, 6, 4 * width, 3300),
        "backward": System(3, 3, 4 * width, 400),
        "6-6": System(6, 6, 4 * width, 1000),
        "6-2": System(6, 2, inner(40, 16), 1000),
        "12-1": System(12, 1, inner(56, 26), 1000),
        # These two start from a trained teacher.
        "12-2-cut": System(12, 2, 4 * width, 600, without="decoder.2-5"),
        "12-1-cut": System(12, 1, 4 * width, 600, without="decoder.2-6"),
        "18-1": System(18, 1, inner(80, 38), 1000),
    }


FULL = Plan("full", width=256, pieces=8000, systems=_systems(256))
"""FULL takes 2 h 40 on two hyperthreads of an Intel Xeon with AMX, without 18-1 and with other work running."""
TINY = Plan(
    "tiny",
    width=32,
    pieces=400,
    systems=_systems(32),
    lines=300,
    test_lines=40,
    updates=80,
    peak=1e-2,
    max_ratio=99,
    rounds=1,
)
"""TINY takes a few minutes to check that everything runs."""
