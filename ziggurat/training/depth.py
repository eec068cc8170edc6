"""What a run says of its depth while it trains: curves and heat maps to trackers, r to the bar, warnings to all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ziggurat.config import TrainingConfig
from ziggurat.data.files import write_atomically
from ziggurat.diagnosis.records import Record, cut_records, read_records
from ziggurat.diagnosis.views import heat_maps, scalars
from ziggurat.diagnosis.watch import WARNINGS_FILE, Warned, Watch
from ziggurat.training.metrics import MetricsWriter, RunLog

__all__ = ["Depth"]

_IMAGES_GROWTH = 1.1
"""Heat maps are drawn anew when there are so many times the records of the last ones: some 50 times in 500 records."""


class Depth:
    """Takes every record of measures, as ziggurat.training.diagnostics makes them.

    A resumed run has its warnings and heat maps as if it had never been stopped: they are functions of the records up
    to where it goes on.

    Args:
        run: folder of the run; None: nothing is written (all processes but the first).
        metrics: knows the trackers.
        log: is told of warnings.
        config: section `training`.
        update: where training starts; records after it are not of this run any more.
    """

    def __init__(
        self, run: Path | None, metrics: MetricsWriter, log: RunLog, config: TrainingConfig, *, update: int
    ) -> None:
        self._run, self._metrics, self._log = run, metrics, log
        self._watch = Watch(config.schedule.warmup_updates)
        self._records: list[Record] = []
        self._drawn = 0
        self._gaps = False
        if run is not None:
            cut_records(run, update)
            self._records += read_records(run)
        warned = [w for record in self._records for w in self._watch.see(record)]
        if run is not None and (run / WARNINGS_FILE).exists():
            write_atomically(run / WARNINGS_FILE, "".join(w.line() for w in warned).encode())

    @property
    def r(self) -> float | None:
        """r of the encoder (Bapna et al. 2018) as measured last, or None."""
        for record in reversed(self._records):
            if "r" in record.values:
                return record.values["r"].get("encoder")
        return None

    @property
    def standing(self) -> list[str]:
        """Measures outside their healthy bands, the newest last."""
        return list(self._watch.standing)

    def see(self, record: Record) -> None:
        """Take a record: tell trackers, and warn."""
        record = replace(record, values=record.as_dict()["values"])  # as it will be read by a resumed run
        self._records.append(record)
        self._metrics.tell("depth", record.update, scalars(record))
        if len(self._records) >= _IMAGES_GROWTH * self._drawn:
            self._draw()
        for warned in self._watch.see(record):
            bad = warned.kind == "warning"
            said = f"WARNING: {warned.message}" if bad else warned.message
            self._log.say(f"update {warned.update}: {said}", "bold yellow" if bad else "green")
            self._write(warned)

    def ended(self) -> None:
        """Draw what came since the last heat maps."""
        if len(self._records) > self._drawn:
            self._draw()

    def _draw(self) -> None:
        self._drawn = len(self._records)
        for heat in heat_maps(self._records):
            self._metrics.draw(f"depth/{heat.name}", self._records[-1].update, heat.rows)

    def _write(self, warned: Warned) -> None:
        if self._run is None:
            return
        try:
            (self._run / WARNINGS_FILE).parent.mkdir(exist_ok=True)
            with (self._run / WARNINGS_FILE).open("a", encoding="utf-8") as file:
                file.write(warned.line())
        except OSError as error:
            if not self._gaps:
                self._gaps = True
                self._log.say(f"{self._run / WARNINGS_FILE} cannot be written: {error.strerror}", "bold red")
