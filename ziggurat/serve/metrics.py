"""Figures of a server for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ziggurat.serve.pool import ModelPool

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Counts of requests, and what the models have done, read when they are asked for.

    Args:
        pool: the models.
    """

    def __init__(self, pool: ModelPool) -> None:
        self._pool = pool
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "ziggurat_requests", "Requests by path and status.", ["path", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "ziggurat_request_seconds", "Seconds of a request.", ["path"], buckets=_SECONDS, registry=self._registry
        )
        self._registry.register(self)

    def seen(self, path: str, status: int, seconds: float) -> None:
        """Count a request. `path` is a route's, never what a client sent: each new one is a series of its own."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def text(self) -> bytes:
        """Return all figures in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the figures of the models."""
        gauges = {
            "waiting": GaugeMetricFamily("ziggurat_waiting_lines", "Lines that wait for a model.", labels=["model"]),
            "live": GaugeMetricFamily("ziggurat_live_lines", "Lines in the search of a model.", labels=["model"]),
            "ready": GaugeMetricFamily("ziggurat_model_ready", "1: the model is open.", labels=["model"]),
        }
        counts = {
            "lines": CounterMetricFamily("ziggurat_lines", "Lines that a model has translated.", labels=["model"]),
            "tokens": CounterMetricFamily("ziggurat_tokens", "Tokens that a model has written.", labels=["model"]),
            "steps": CounterMetricFamily("ziggurat_steps", "Steps of a model's searches.", labels=["model"]),
            "reloads": CounterMetricFamily("ziggurat_reloads", "Times a changed model was opened.", labels=["model"]),
        }
        for name, model in self._pool.models.items():
            state = model.engine.state
            gauges["waiting"].add_metric([name], len(model.engine.queue))
            gauges["live"].add_metric([name], state.live)
            gauges["ready"].add_metric([name], float(state.status == "ready"))
            for kind, family in counts.items():
                family.add_metric([name], getattr(state, kind))
        yield from gauges.values()
        yield from counts.values()
