"""TensorBoard: event files in the run, under `tensorboard/`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ziggurat.tracking.tracker import Pixels

__all__ = ["TensorBoard"]


class TensorBoard:
    """Writes event files.

    Args:
        run: folder of the run.
        update: where training starts; what event files have after it, from a run that was killed, is purged.
    """

    def __init__(self, run: Path, update: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, so only when wanted

        self._writer = SummaryWriter(str(run / "tensorboard"), purge_step=update + 1)

    def scalars(self, update: int, values: Mapping[str, float]) -> None:
        """Write one scalar for each figure."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, update)

    def image(self, update: int, name: str, pixels: Pixels) -> None:
        """Write an image."""
        self._writer.add_image(name, pixels, update, dataformats="HWC")

    def close(self) -> None:
        """Write what waits and close the file."""
        self._writer.close()
