"""The page of `evaluate --perturb`: what disturbances cost, as one HTML file without scripts that fetches nothing."""

from __future__ import annotations

from ziggurat.evaluate.robustness import Effect, Robustness
from ziggurat.inspect.report.template import page_templates

_WIDEST = 9.0
"""Length in rem of the bar of the greatest difference under a metric."""


def robustness_page(results: Robustness) -> str:
    """Return the page."""
    return (
        page_templates()
        .get_template("robustness.html")
        .render(
            results=results,
            metrics=list(zip(results.metrics, results.signatures, results.higher_is_better, strict=True)),
            width=lambda effect: _width(results, effect),
            worse=lambda effect: _worse(results, effect),
            summary=[_sentence(results, system) for system in results.systems],
        )
    )


def _width(results: Robustness, effect: Effect) -> str:
    """Return the length of an effect's bar, in rem."""
    greatest = max(abs(other.difference) for other in results.effects if other.metric == effect.metric)
    return f"{_WIDEST * abs(effect.difference) / greatest if greatest else 0.0:.2f}"


def _worse(results: Robustness, effect: Effect) -> bool:
    up = results.higher_is_better[results.metrics.index(effect.metric)]
    return effect.difference < 0 if up else effect.difference > 0


def _sentence(results: Robustness, system: str) -> str:
    """Return which perturbations harm a system significantly, the worst first, under the first metric."""
    metric = results.metrics[0]
    own = [e for e in results.effects if e.system == system and e.metric == metric]
    if not own:
        return f"{system}: no disturbance changes a line."
    tested = [(effect, effect.p_adjusted) for effect in own if effect.p_adjusted is not None]
    harmful = sorted((e for e, p in tested if _worse(results, e) and p < 0.05), key=lambda e: -abs(e.difference))
    untested = ", ".join(effect.perturbation for effect in own if effect.p_adjusted is None)
    rest = f" Too few cases to tell: {untested}." if untested else ""
    if not tested:
        return f"{system}:{rest.lower()}"
    if not harmful:
        return f"{system}: no disturbance changes {metric} significantly for the worse.{rest}"
    listed = ", ".join(f"{effect.perturbation} ({effect.difference:+.1f})" for effect in harmful)
    return f"{system}: significantly worse {metric} with {listed}.{rest}"
